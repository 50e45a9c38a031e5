"""The page of connections in a browser: its numbers are the API's, and who is in trouble is seen at once."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from penstock.client import PhpmqClient, RqClient, SspqClient
from tests.dashboard.conftest import StartBroker, Visit, axe, everybody, fits
from tests.dashboard.test_link import NOBODY, restart
from tests.http.api import Api
from tests.http.disks import broker_on_small_disk
from tests.server.harness import BrokerProcess, phpmq, until

PATH = "/connections"


def cell(page: Page, name: str, column: str) -> str:
    row = page.locator(f"tr[data-key={json.dumps(name)}]")
    return row.locator(f'[data-column="{column}"]').inner_text()


def total(page: Page, field: str) -> str:
    return page.locator(f'[data-total="{field}"]').inner_text()


def names(page: Page) -> list[str]:
    rows = page.locator("tbody tr[data-key]")
    return list(map(str, rows.evaluate_all("rows => rows.map(row => row.dataset.key)")))  # at one moment


def told(api: Api) -> list[dict[str, Any]]:
    connections: list[dict[str, Any]] = api.get("/v1/connections")["connections"]
    return connections


def url(broker: BrokerProcess, protocol: str) -> str:
    return f"{protocol}://127.0.0.1:{broker.ports[protocol]}"


def block(broker: BrokerProcess, wire: Any) -> None:
    """Make a connection ask for far more than it reads."""
    with PhpmqClient(url(broker, "phpmq")) as mq:
        mq.send_many("big", [bytes(1_000_000)] * 40)
    wire.say(phpmq(2, (1, b"big"), (4, b"100")))


@pytest.mark.long
def test_an_empty_broker_says_how_to_connect(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    page = visit(broker, PATH)
    page.get_by_role("heading", name="Nobody is connected").wait_for()
    assert 'connect("phpmq://127.0.0.1:' in page.locator("pre").inner_text()
    assert total(page, "connections") == "0"
    axe(page)
    with PhpmqClient(url(broker, "phpmq")):
        until(lambda: len(names(page)) == 1, "the first connection to appear")
        assert page.get_by_role("heading", name="Nobody is connected").count() == 0
    page.get_by_role("heading", name="Nobody is connected").wait_for()


@pytest.mark.long
def test_the_numbers_are_the_apis(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    with (
        Api(broker.ports["http"]) as api,
        PhpmqClient(url(broker, "phpmq")) as mq,
        SspqClient(url(broker, "sspq")) as sspq,
        RqClient(url(broker, "rq")) as rq,
    ):
        api.send("work", *[b"x"] * 2000)
        sspq.send(b"x")
        sspq.flush()
        rq.serve("ask", lambda request: request.body).wait_turn(timeout=10)
        page = visit(broker, PATH)
        consumed = mq.consume("work", prefetch=1500, timeout=10)
        for count in (1, 700, 700):
            mq.ack_many([next(consumed) for _ in range(count)])

            def same() -> bool:
                rows = {it["name"]: it for it in told(api)}
                return (
                    set(names(page)) == set(rows)
                    and all(
                        cell(page, name, "held") == f"{it['held']:,}"
                        and cell(page, name, "peer") == it["peer"]
                        and cell(page, name, "protocol_name") == it["protocol"].upper()
                        for name, it in rows.items()
                    )
                    and total(page, "held") == f"{sum(it['held'] for it in rows.values()):,}"
                    and total(page, "connections") == "3"
                    and total(page, "consuming") == "2"
                )

            until(same, "the page to show what the API says")
        assert list(mq.consume("work.dead", timeout=0.1)) == []
        by_protocol = {it["protocol"]: it["name"] for it in told(api)}
        consumes = page.locator(f"tr[data-key={json.dumps(by_protocol['phpmq'])}] .ps-item")
        expect(consumes).to_have_text(["work", re.compile("work *dead letters")])
        assert cell(page, by_protocol["sspq"], "consumes") == "–"
        assert cell(page, by_protocol["sspq"], "sends") == "default"
        assert cell(page, by_protocol["sspq"], "said_at").endswith(" s")
        assert cell(page, by_protocol["rq"], "since").endswith(" s")
        ask = page.get_by_role("link", name="ask", exact=True)
        expect(ask).to_have_attribute("href", "/queue/ask")
    until(lambda: total(page, "connections") == "0", "all of them to be gone")


@pytest.mark.long
def test_find_sort_and_filter(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    with (
        Api(broker.ports["http"]) as api,
        PhpmqClient(url(broker, "phpmq")) as mq,
        PhpmqClient(url(broker, "phpmq")) as other,
        SspqClient(url(broker, "sspq")) as sspq,
    ):
        sspq.send(b"x")
        sspq.flush()
        api.send("work", b"1", b"2")
        held = list(mq.consume("work", prefetch=2, count=2))
        assert list(other.consume("elsewhere", timeout=0.1)) == []
        page = visit(broker, PATH)
        until(lambda: len(names(page)) == 3, "three connections")
        page.get_by_role("button", name="Held").click()
        first = names(page)[0]
        assert cell(page, first, "held") == "2"
        page.get_by_role("combobox", name="Protocol").select_option("PHPMQ")
        assert len(names(page)) == 2
        expect(page.locator(".ps-live-count")).to_have_text("2 of 3 connections")
        page.get_by_role("searchbox").fill("ELSEWHERE")  # the name of a queue
        assert len(names(page)) == 1
        assert names(page)[0] != first
        assert "protocol=phpmq" in page.url
        page.reload()
        until(lambda: len(names(page)) == 1, "the same after a reload")
        page.get_by_role("combobox", name="State").select_option("Blocked")
        expect(page.get_by_text("Nothing here matches")).to_be_visible()
        page.get_by_role("button", name="Show all").click()
        assert len(names(page)) == 3
        mq.ack_many(held)
        # Who takes over HTTP has no connection of its own, and is among them while it has something.
        api.send("work", b"3")
        api.post("/v1/queues/work/take")
        until(lambda: len(names(page)) == 4, "a worker over HTTP")
        page.get_by_role("combobox", name="Protocol").select_option("HTTP")
        (worker,) = names(page)
        assert cell(page, worker, "held") == "1"


@pytest.mark.long
def test_who_does_not_read_is_marked_and_explained(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    page = visit(broker, PATH)
    with Api(broker.ports["http"]) as api, broker.wire("phpmq") as wire:
        block(broker, wire)
        until(lambda: any(it["blocked"] for it in told(api)), "the connection to be blocked")
        (name,) = [it["name"] for it in told(api) if it["blocked"]]
        until(lambda: "blocked" in cell(page, name, "client"), "the row to be marked")
        assert total(page, "blocked") == "1"
        expect(page.get_by_role("heading", name="1 connection is blocked")).to_be_visible()
        expect(page.get_by_text("does not read what is sent to it")).to_be_visible()
        axe(page)
    expect(page.get_by_role("heading", name="1 connection is blocked")).to_be_hidden()


@pytest.mark.long
def test_senders_and_settlers_have_rates(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    with PhpmqClient(url(broker, "phpmq")) as mq:
        mq.send("rated", b"x")
        mq.flush()
        page = visit(broker, PATH)
        until(lambda: len(names(page)) == 1, "the connection to be listed")
        (name,) = names(page)

        def passes() -> bool:
            mq.send("rated", b"x")
            mq.ack_many(list(mq.consume("rated", count=1)))
            return cell(page, name, "sent_rate")[:1] in "123456789" and total(page, "passing") != "0/s"

        until(passes, "what passes in a second")
        until(lambda: cell(page, name, "settled_rate") not in ("–", ""), "what is settled in a second")
        page.get_by_role("link", name="127.0.0.1").click()
        expect(page.get_by_role("button", name="End…")).to_be_visible()


@pytest.mark.long
def test_senders_that_wait_for_room_are_marked(tmp_path: Path, visit: Visit) -> None:
    with broker_on_small_disk(tmp_path) as small, PhpmqClient(url(small, "phpmq")) as mq:
        page = visit(small, PATH)
        mq.send("orders", b"x")
        small.fill()
        # More than the segment that is there holds, less than sockets take in while nobody reads.
        for _ in range(16):
            mq.send("orders", bytes(100_000))
        told_so = page.get_by_role("heading", name="1 sender is held back")
        until(lambda: told_so.is_visible() and total(page, "held_back") == "1", "the sender to be marked")
        small.ballast.unlink()
        expect(told_so).to_be_hidden()
        page.close()  # before its broker goes


def test_two_thousand_connections(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker("--limits-connections-max", "3000")
    wires = [broker.wire("phpmq") for _ in range(2000)]
    try:
        with Api(broker.ports["http"]) as api:
            until(lambda: len(told(api)) == 2000, "all of them to be connected")
        page = visit(broker, PATH)
        expect(page.locator(".ps-live-count")).to_have_text("2,000 connections")
        assert total(page, "connections") == "2,000"
        assert len(names(page)) == 100
        fits(page)
        name = names(page)[50]
        page.get_by_role("searchbox").fill(name)
        assert names(page) == [name]
    finally:
        for wire in wires:
            wire.close()


def test_names_stay_text(broker: BrokerProcess, visit: Visit) -> None:
    wild = "<script>alert(1)</script>"
    with PhpmqClient(url(broker, "phpmq")) as mq:
        assert list(mq.consume(wild, timeout=0.1)) == []
        page = visit(broker, PATH)
        dialogs: list[str] = []
        page.on("dialog", lambda it: dialogs.append(it.message))
        expect(page.get_by_role("link", name=wild)).to_be_visible()
        assert page.locator("tbody script, tbody img").count() == 0
        assert dialogs == []


def test_everybody_can_use_it(broker: BrokerProcess, visit: Visit) -> None:
    with broker.wire("phpmq") as wire, PhpmqClient(url(broker, "phpmq")) as mq:
        long = "a-name-that-is-much-too-long-for-any-column-" + "of-a-table-" * 12
        for queue in ("usable", long, "a", "b", "c", "d"):
            assert list(mq.consume(queue, timeout=0.05)) == []
        block(broker, wire)
        page = visit(broker, PATH)
        page.get_by_role("heading", name="1 connection is blocked").wait_for()
        page.get_by_text("and 2 more").wait_for()
        everybody(page)


@pytest.mark.long
def test_it_comes_back_with_the_broker(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    page = visit(broker, PATH, forgive=NOBODY)
    with PhpmqClient(url(broker, "phpmq")):
        until(lambda: len(names(page)) == 1, "the page to be there")
        broker.kill()
    again = restart(broker, broker.ports["http"])
    try:
        page.get_by_role("heading", name="Nobody is connected").wait_for()
        with PhpmqClient(url(again, "phpmq")):
            until(lambda: len(names(page)) == 1, "the page to live again")
    finally:
        again.kill()
