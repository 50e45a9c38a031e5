"""The lists of `penstock top` on a terminal of its own: attention, connections, dead letters, readers."""

import pytest

from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.http.morgue import expire, path_of, reject
from tests.http.test_connections import row_of
from tests.server.harness import BrokerProcess, phpmq, until
from tests.top.screen import Screen
from tests.top.test_top import ENTER, ESCAPE, TOKENS, url_of


@pytest.fixture(scope="module")
def url(broker: BrokerProcess) -> str:
    return url_of(broker)


@pytest.mark.long
def test_what_needs_attention_stands_first(start_broker: StartBroker) -> None:
    broker = start_broker("--http-health-seconds", "1")
    with Api(broker.ports["http"]) as api:
        api.send("stopped", b"x")
        api.post(path_of("stopped", "pause"))

        def told() -> bool:
            return any(it["queue"] == "stopped" for it in api.get("/v1/health")["attention"])

        until(told, "the broker to find it")
        with Screen("top", "--url", url_of(broker)) as screen:
            screen.wait_text("! stopped: paused for ")
            lines = screen.lines
            assert lines.index(screen.line_of("! stopped")) < lines.index(screen.line_of("QUEUE"))
            screen.type("a")
            screen.wait_text("Attention")
            screen.wait(lambda it: "paused" in it.line_of("warn"), "the list")
            screen.type(ENTER)
            screen.wait_text("durability")
            screen.type(ESCAPE)
            screen.wait_text("Attention")
            screen.type("?")
            screen.wait_text("Esc closes this")
            screen.type(ESCAPE)
            screen.type(ESCAPE)
            screen.wait_text("READY")
            api.post(path_of("stopped", "resume"))


def test_a_connection_is_ended_after_a_question(broker: BrokerProcess, api: Api, url: str) -> None:
    with broker.wire("phpmq") as wire:
        api.send("top.held", b"1", b"2")
        wire.say(phpmq(2, (1, b"top.held"), (4, b"5")))
        until(lambda: row_of(api, wire.socket)["held"] == 2, "it to hold them")
        with Screen("top", "--url", url) as screen:
            screen.wait_text("q quit")
            screen.type("c")
            screen.wait_text("top.held")
            screen.wait_text("x ends it")
            screen.type("x")
            screen.wait_text("2 messages that it holds will go back")
            screen.type("n")
            screen.wait(lambda it: "will go back" not in it.text, "the question to be gone")
            assert row_of(api, wire.socket)["held"] == 2
            screen.type("x")
            screen.wait_text("will go back")
            screen.type("y")
            screen.wait_text("which held 2 messages")
            screen.wait_text("nobody is connected")
        while wire.some():
            pass
    assert api.get(path_of("top.held"))["ready"] == 2


def test_dead_letters_by_reason(broker: BrokerProcess, api: Api, url: str) -> None:
    reject(broker, api, "top.letters", [b"1", b"2", b"3"])
    expire(api, "top.letters", [b"late"])
    with Screen("top", "top.letters", "--url", url) as screen:
        screen.wait_text("q quit")
        screen.type("l")
        screen.wait(lambda it: it.line_of("top.letters") != "", "the letters")
        screen.wait_text("rejected")
        screen.wait_text("expired")
        screen.type("r")
        screen.wait_text("Put ")
        screen.wait_text("of top.letters back")
        screen.type("y")
        screen.wait_text("redriven")
        until(lambda: api.get(path_of("top.letters"))["dead"] in (1, 3), "one reason to be redriven")
        left = api.get(path_of("top.letters"))["dead"]
        screen.wait(lambda it: "expired" not in it.text or "rejected" not in it.text, "the other reason only")
        screen.type("x")
        screen.wait_text(f"Throw away all {left} dead letter")
        screen.type("y")
        screen.wait_text("there is no dead letter")
    assert api.get(path_of("top.letters"))["dead"] == 0


def test_readers(api: Api, url: str) -> None:
    api.send("top.read", b"1", b"2")
    said = {"positions": {"top.read": 0}, "about": {"kind": "pipeline", "error": "the sink is full"}}
    assert api.ask("PUT", "/v1/readers/totals", said).status == 200
    with Screen("top", "--url", url, columns=120) as screen:
        screen.wait_text("q quit")
        screen.type("n")
        screen.wait(lambda it: it.line_of("totals").split()[1:3] == ["pipeline", "2"], "the reader")
        screen.wait_text("the sink is full")
        screen.wait_text("reads top.read")


def test_who_may_only_read_is_told_so(start_broker: StartBroker) -> None:
    broker = start_broker(config=TOKENS)
    token = "0123456789abcdef0123456789abcdef"
    with Api(broker.ports["http"], token) as api, broker.wire("phpmq") as wire:
        wire.say(phpmq(2, (1, b"kept"), (4, b"5")))
        until(lambda: bool(row_of(api, wire.socket)["consumes"]), "it to consume")
        around = {"PENSTOCK_TOKEN": token}
        with Screen("top", "--url", url_of(broker), around=around) as screen:
            screen.wait_text("q quit")
            screen.type("c")
            screen.wait_text("x ends it")
            screen.type("x")
            screen.wait_text("It holds nothing.")
            screen.type("y")
            screen.wait_text("may not do this")
            assert row_of(api, wire.socket)["consumes"]
