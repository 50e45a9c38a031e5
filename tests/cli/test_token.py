"""`penstock token new`: what it prints is what the settings and the API take."""

import json
import tomllib
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.common.tokens import fits
from tests.http.api import Api
from tests.http.conftest import StartBroker, start_broker

__all__ = ["start_broker"]


def test_the_lines_make_the_token_known(
    start_broker: StartBroker,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert main(["token", "new", "billing"]) == 0
    token, _, rest = capsys.readouterr().out.partition("\n")
    lines = rest[rest.index("[[user]]") : rest.index("\nTo change")]
    (user,) = tomllib.loads(lines)["user"]
    assert fits(token, user["token-hash"])
    broker = start_broker(config=lines)
    with Api(broker.ports["http"], token) as api:
        assert api.ask("GET", "/v1/queues").status == 200
    with Api(broker.ports["http"]) as api:
        assert api.ask("GET", "/v1/queues").status == 401


def test_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "new", "billing", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["user"] == "billing"
    assert fits(told["token"], told["token-hash"])


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "a\n"])
def test_names_that_are_none(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "new", name]) == 2
    assert "1 to 64 letters" in capsys.readouterr().err
