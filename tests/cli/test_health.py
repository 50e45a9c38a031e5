"""`penstock health`: what it prints, and what its exit code says to a script."""

import json

import pytest

from penstock.cli.main import main
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.server.harness import until


@pytest.mark.long
def test_it_says_what_is_wrong_by_text_and_exit_code(
    start_broker: StartBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = start_broker("--http-health-seconds", "1")
    url = ("--url", f"http://127.0.0.1:{broker.ports['http']}")

    def health(*arguments: str) -> tuple[int, str]:
        code = main(["health", *arguments, *url])
        return code, capsys.readouterr().out

    assert health() == (0, "Nothing needs attention.\n")
    assert health("--json") == (0, "")
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"x")
        until(lambda: health()[0] == 3, "a warning")
        code, out = health()
        first, why, do = out.splitlines()
        assert first.startswith("WARN  orders: no-consumers, for ")
        assert why.startswith("      1 message waits, and nobody consumes this queue")
        assert do.startswith("      Do: Start its consumers")
        api.send("stuck", b"x")
        api.post("/v1/queues/stuck/take")
        until(lambda: health()[0] == 4 and "Who: http:" in health()[1], "something bad")
        code, out = health("--json")
        assert code == 4
        assert [json.loads(line)["state"] for line in out.splitlines()] == ["stalled", "no-consumers"]
        assert health("orders")[0] == 3
        assert health("nothing")[0] == 0


def test_nobody_there_is_another_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--url", "http://127.0.0.1:1"]) == 1
    assert "penstock serve" in capsys.readouterr().err
