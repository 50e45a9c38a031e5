"""The page of one connection in a browser: it tells what the API tells, and ends it after a question."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from penstock.dashboard.connection import alerts_of, question_of
from tests.dashboard.conftest import StartBroker, Visit, axe, everybody
from tests.dashboard.test_connections_page import total
from tests.http.api import Api
from tests.http.test_connections import row_of
from tests.http.test_rights import TOKENS, as_user, guarded
from tests.server.harness import BrokerProcess, Wire, phpmq, until

__all__ = ["guarded"]


@pytest.fixture
def wire(broker: BrokerProcess) -> Iterator[Wire]:
    with broker.wire("phpmq") as wire:
        yield wire


def holding(api: Api, wire: Wire, queue: str, count: int) -> int:
    """Have a connection hold messages; its number."""
    api.send(queue, *[b"x"] * count)
    wire.say(phpmq(2, (1, queue.encode()), (4, b"10")))
    until(lambda: row_of(api, wire.socket)["held"] == count, "it to hold them")
    number: int = row_of(api, wire.socket)["number"]
    return number


def cells(page: Page, table: str) -> list[str]:
    return page.get_by_role("table", name=table).locator("tbody tr").first.locator("th, td").all_inner_texts()


def test_it_tells_what_the_api_tells(broker: BrokerProcess, api: Api, visit: Visit, wire: Wire) -> None:
    number = holding(api, wire, "page.held", 3)
    wire.say(phpmq(1, (1, b"page.sent"), (2, b"x")))
    until(lambda: row_of(api, wire.socket)["sent"] == 1, "it to send")
    page = visit(broker, f"/connections/{number}")
    told = api.get(f"/v1/connections/{number}")
    expect(page.get_by_role("heading", level=1)).to_have_text(told["client"])
    until(lambda: total(page, "held") == "3", "the first figures")
    assert page.locator('[data-total="said"] + p').inner_text() == "publish"
    expect(page.get_by_role("link", name="page.held")).to_have_attribute("href", "/queue/page.held")
    expect(page.get_by_role("link", name="page.sent")).to_have_attribute("href", "/queue/page.sent")
    until(lambda: cells(page, "Queues that it takes from")[1:3] == ["10", "3"], "window and held")
    until(lambda: cells(page, "Queues that it sends to")[:2] == ["page.sent", "1"], "what it sends")
    message = page.get_by_role("table", name="Messages that it holds").get_by_role("link").first
    expect(message).to_have_attribute("href", "/queue/page.held?offset=0")
    for text in (told["name"], told["listener"], told["peer"], "PHPMQ"):
        expect(page.locator(".ps-facts").get_by_text(text, exact=True).first).to_be_visible()
    assert page.get_by_role("link", name="Connections").first.get_attribute("aria-current") == "page"
    axe(page)


def test_it_is_ended_after_a_question(broker: BrokerProcess, api: Api, visit: Visit, wire: Wire) -> None:
    number = holding(api, wire, "page.end", 2)
    page = visit(broker, f"/connections/{number}")
    page.get_by_role("button", name="End…").click()
    expect(page.get_by_text("2 messages that it holds will go back to page.end")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    assert api.get(f"/v1/connections/{number}")["held"] == 2
    page.get_by_role("button", name="End…").click()
    page.get_by_role("button", name="End it").click()
    expect(page.get_by_text("This connection has ended.")).to_be_visible()
    expect(page.get_by_role("button", name="End…")).to_be_hidden()
    while wire.some():
        pass
    assert api.get("/v1/queues/page.end")["ready"] == 2


@pytest.mark.long
def test_who_leaves_is_said_to_have_ended(broker: BrokerProcess, api: Api, visit: Visit, wire: Wire) -> None:
    number = holding(api, wire, "page.left", 1)
    page = visit(broker, f"/connections/{number}")
    until(lambda: total(page, "held") == "1", "the first figures")
    wire.leave()
    expect(page.get_by_text("This connection has ended.")).to_be_visible()
    assert total(page, "held") == "1", "how it was last"


@pytest.mark.parametrize("number", ["999999", "none", "-1"])
def test_there_is_no_such_connection(broker: BrokerProcess, visit: Visit, number: str) -> None:
    page = visit(broker, f"/connections/{number}", forgive=("404",))
    expect(page.get_by_role("heading", level=1)).to_contain_text("here is no ")


def test_who_may_not_end_it_is_not_offered_to(guarded: BrokerProcess, visit: Visit) -> None:
    with guarded.wire("phpmq") as wire, as_user(guarded, "root") as root:
        wire.say(phpmq(1, (1, b"orders.a"), (2, b"x")))
        until(lambda: row_of(root, wire.socket)["sent"] == 1, "it to send")
        number = row_of(root, wire.socket)["number"]
        page = visit(guarded, f"/connections/{number}", alone=True)
        page.get_by_label("Token").fill(TOKENS["read"])
        page.get_by_role("button", name="Sign in").click()
        until(lambda: cells(page, "Queues that it sends to")[:2] == ["orders.a", "1"], "what it sends")
        assert page.get_by_role("button", name="End…").count() == 0


def test_everybody_can_use_it(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api, broker.wire("phpmq") as wire:
        number = holding(api, wire, "a-name-that-is-much-too-long-for-any-column-" * 5, 4)
        wire.say(phpmq(1, (1, b"b" * 200), (2, b"x")))
        page = visit(broker, f"/connections/{number}")
        until(lambda: total(page, "held") == "4", "the first figures")
        everybody(page)


# --- sentences ---

QUIET = {
    "held": 0,
    "takes": [],
    "held_back": False,
    "blocked": False,
    "protocol": "rq",
    "output_bytes": 0,
    "blocked_seconds": None,
    "held_back_seconds": None,
}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, "It holds no message. The program may connect again by itself."),
        ({"protocol": "http"}, "It holds no message. Its leases end."),
        ({"held_back": True}, "It holds no message. What it has sent and is not stored yet is lost to it."),
        ({"held": None}, "What it holds goes back to its queues"),
        (
            {"held": 1, "takes": [{"queue": "a", "held": 1}, {"queue": "b", "held": 0}]},
            "1 message that it holds will go back to a, each as a delivery that has failed",
        ),
        (
            {"held": 3, "takes": [{"queue": "a", "held": 1}, {"queue": "b", "held": 2}]},
            "3 messages that it holds will go back to 2 queues",
        ),
    ],
)
def test_the_question_says_what_goes_back(facts: dict[str, object], said: str) -> None:
    assert question_of({**QUIET, **facts}).startswith(said)


def test_trouble_is_told_with_since_when() -> None:
    assert alerts_of(QUIET) == []
    blocked, held = alerts_of(
        {**QUIET, "blocked": True, "blocked_seconds": 65.0, "output_bytes": 2048, "held_back": True}
    )
    assert blocked.title == "It has not read what is sent to it for 65 s"
    assert "2.0 KiB wait for it" in blocked.text
    assert held.title == "It has not been read from"
