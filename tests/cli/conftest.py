"""The brokers of the tests of the HTTP API, for the commands that speak to it, and how these are run."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.cli.main import main
from tests.http.conftest import api as api
from tests.http.conftest import broker as broker
from tests.http.conftest import start_broker as start_broker
from tests.server.harness import BrokerProcess

Run = Callable[..., list[str]]


@pytest.fixture
def url(broker: BrokerProcess) -> str:
    return f"http://127.0.0.1:{broker.ports['http']}"


@pytest.fixture
def run(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command that must succeed without complaint; its lines."""
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)

    def run(*arguments: str) -> list[str]:
        code = main([*arguments, "--url", url])
        out, err = capsys.readouterr()
        assert (code, err) == (0, ""), (arguments, out)
        return out.splitlines()

    return run


def objects(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]
