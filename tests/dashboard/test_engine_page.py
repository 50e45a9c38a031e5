"""The page of the engine in a browser: its figures are the API's; what is wrong is told with what to do."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from penstock import __version__
from penstock.client import PhpmqClient
from penstock.common import units
from penstock.dashboard.syncs import labels
from penstock.log.jetstream.cluster import Cluster
from tests.dashboard.conftest import StartBroker, Visit, axe, everybody, fits
from tests.dashboard.test_link import NOBODY, restart
from tests.http.api import Api
from tests.http.disks import broker_on_small_disk, damage
from tests.server.harness import BrokerProcess, until

PATH = "/engine"


def total(page: Page, field: str) -> str:
    return page.locator(f'[data-total="{field}"]').inner_text()


def fact(page: Page, label: str) -> str:
    return page.locator(".ps-facts > div", has=page.get_by_text(label, exact=True)).locator("dd").inner_text()


def bars(page: Page) -> dict[str, str]:
    rows = page.get_by_role("table", name="Syncs by their time").locator("tbody tr").all()
    return {row.locator("th").inner_text(): row.locator("td").last.inner_text() for row in rows}


@pytest.mark.long
def test_the_figures_are_the_apis(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        page = visit(broker, PATH)
        for _ in range(3):
            for _ in range(7):
                api.send("orders", bytes(10_000))

            def same() -> bool:
                engine: dict[str, Any] = api.get("/v1/engine")
                sync, buckets = engine["sync"], engine["sync"]["buckets"]
                return (
                    fact(page, "Syncs since the start") == units.count(sync["count"])
                    and fact(page, "Last") == units.duration(sync["last_seconds"])
                    and fact(page, "99 % within")
                    == total(page, "p99_seconds")
                    == units.duration(sync["p99_seconds"])
                    and fact(page, "Half within") == units.duration(sync["p50_seconds"])
                    and fact(page, "On the disk")
                    == total(page, "log_bytes")
                    == units.size(engine["log_bytes"])
                    and fact(page, "Written since it was made") == units.size(engine["position"])
                    and list(bars(page).values()) == [units.count(it["count"]) for it in buckets]
                    and list(bars(page)) == labels(buckets)
                )

            until(same, "the page to show what the API says")
        engine = api.get("/v1/engine")
        assert total(page, "state") == "Ready"
        assert fact(page, "Folder") == engine["data"]
        assert fact(page, "Openings") == "1"
        assert fact(page, "Durability").startswith("commit: ")
        share = engine["disk_bytes_free"] / engine["disk_bytes_total"]
        assert float(re.sub("[^0-9.]", "", total(page, "disk_bytes_free"))) > 0
        expect(
            page.get_by_text(f"{100 * share:.0f} % of {units.size(engine['disk_bytes_total'])}")
        ).to_be_visible()
        expect(page.get_by_role("img", name="Sync latency while this page is open: now Mean")).to_be_visible()
        expect(page.get_by_text("Nobody. What is settled stays")).to_be_visible()


@pytest.mark.long
def test_who_holds_retention(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    wild = "<script>alert(1)</script>"
    with Api(broker.ports["http"]) as api:
        api.send("orders", *[b"x"] * 2000)
        api.ask("PUT", "/v1/readers/near", {"positions": {"orders": 1999}})
        api.ask("PUT", "/v1/readers/%3Cscript%3Ealert(1)%3C%2Fscript%3E", {"positions": {"orders": 0}})
        page = visit(broker, PATH)
        holders = page.locator(".ps-holders p")
        expect(holders).to_have_text(
            [f"{wild}2,000 behind in 1 queue", "near1 behind in 1 queue"], use_inner_text=False
        )
        assert page.locator("main script").count() == 0
        page.get_by_role("link", name=wild).click()
        page.wait_for_url("**/readers?reader=*")
        until(lambda: page.locator("#reader-name").inner_text() == wild, "the reader's page")


def test_damage_is_told_with_what_to_do(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker("--http", "127.0.0.1:0")
    segment = damage(broker, "hurt")
    page = visit(broker, PATH)
    alert = page.get_by_role("region", name="The log is damaged")
    expect(alert).to_contain_text(segment.name)
    expect(alert).to_contain_text("'hurt'")
    expect(alert.locator("pre")).to_have_text(f"penstock verify {broker.folder / 'data'}")
    assert total(page, "state") == "Damaged"
    axe(page)


@pytest.mark.long
def test_a_full_disk_is_told_until_there_is_room(tmp_path: Path, visit: Visit) -> None:
    with broker_on_small_disk(tmp_path) as small:
        page = visit(small, PATH)
        with PhpmqClient(f"phpmq://127.0.0.1:{small.ports['phpmq']}") as mq:
            mq.send("orders", b"x")
            small.fill()
            # More than the segment that is there holds, less than sockets take in while nobody reads.
            for _ in range(16):
                mq.send("orders", bytes(100_000))
            expect(page.get_by_role("region", name="The disk is full")).to_contain_text("their senders wait")
            assert total(page, "state") == "Full"
            expect(page.get_by_role("status").filter(has_text="Not ready")).to_be_visible()
            axe(page)
            small.ballast.unlink()
            expect(page.get_by_role("region", name="The disk is full")).to_be_hidden()
            until(lambda: total(page, "state") == "Ready", "the engine to be ready again")
        page.close()  # before its broker goes


@pytest.mark.long
def test_a_broker_that_does_not_answer_is_told(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    page = visit(broker, PATH)
    until(lambda: total(page, "state") == "Ready", "the page to be there")
    broker.signal(signal.SIGSTOP)
    try:
        expect(page.locator(".ps-notice:visible")).to_be_visible()
        expect(page.get_by_role("region", name="The broker is not ready")).to_be_visible()
        axe(page)
    finally:
        broker.signal(signal.SIGCONT)
    until(lambda: total(page, "state") == "Ready", "the broker to be ready again")
    expect(page.locator(".ps-notice:visible")).to_have_count(0)


def test_everybody_can_use_it(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    api.send("usable", b"x")
    api.ask("PUT", f"/v1/readers/{'a-name-that-is-much-too-long-' * 6}", {"positions": {"usable": 0}})
    page = visit(broker, PATH)
    expect(page.locator(".ps-holders p")).to_have_count(1)
    until(lambda: total(page, "state") == "Ready", "the page to be filled")
    everybody(page)


def test_it_comes_back_with_the_broker(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    page = visit(broker, PATH, forgive=NOBODY)
    until(lambda: fact(page, "Openings") == "1", "the page to be there")
    broker.kill()
    again = restart(broker, broker.ports["http"])
    try:
        until(lambda: fact(page, "Openings") == "2", "the page to live again")
    finally:
        again.kill()


def boxes(page: Page, row: str) -> list[list[str]]:
    """Of the map: the lines of each."""
    found = page.get_by_role("list", name=row, exact=True).locator("li").all()
    return [box.locator("b, .ps-badge, small").all_inner_texts() for box in found]


def rows_of(page: Page, table: str) -> list[list[str]]:
    rows = page.get_by_role("table", name=table, exact=True).locator("tbody tr").all()
    return [row.locator("th, td").all_inner_texts() for row in rows]


@pytest.mark.long
def test_a_cluster_is_shown_with_what_is_wrong_with_it(tmp_path: Path, visit: Visit) -> None:
    nodes = Cluster(tmp_path / "nats", 3)
    flags = ("--http", "127.0.0.1:0", "--cluster-id", "front-1", "--allow-unsafe-sync")
    try:
        front_end = BrokerProcess(tmp_path, "--engine", ",".join(nodes.start().urls), *flags).start()
        try:
            page = visit(front_end, PATH)
            expect(page.get_by_role("region", name="Cluster", exact=True)).to_be_visible()
            assert fact(page, "Role") == "leader"
            assert fact(page, "Leader") == fact(page, "This front-end")
            (member,) = boxes(page, "Front-ends")
            assert member[:2] == [fact(page, "Leader"), "leader"]
            assert member[-1] == f"Penstock {__version__}, answers here"
            until(lambda: len(boxes(page, "NATS nodes")) == 3, "the nodes to be shown", 30.0)
            expect(page.locator(".ps-map-log")).to_have_text(
                f"The log penstock: written by {fact(page, 'Leader')}, kept by 3 of 3 nodes"
            )
            checks = {name: level for name, level, _ in rows_of(page, "Checks")}
            assert (checks["version"], checks["sync"]) == ("ok", "warn")
            alert = page.get_by_role("region", name="The NATS cluster is not as it should be")
            expect(alert).to_contain_text("sync: nobody says whether the nodes sync every write")
            axe(page)
            fits(page)
            everybody(page)
            leader = next(name for name, state, *_ in boxes(page, "NATS nodes") if state == "leader")
            other = next(node for node in nodes.nodes if node.name != leader)
            other.kill()
            expect(page.get_by_role("region", name="NATS nodes are offline")).to_contain_text(other.name)
            assert [other.name, "offline"] in [box[:2] for box in boxes(page, "NATS nodes")]
            expect(page.locator(".ps-map-log")).to_contain_text("kept by 2 of 3 nodes")
            axe(page)
            elsewhere = visit(front_end, "/readers")
            bar = elsewhere.locator(".ps-attention")
            expect(bar).to_have_text("Needs attention: NATS nodes are offline, and 1 more")
            elsewhere.close()
            page.close()  # before its broker goes
        finally:
            front_end.kill()
    finally:
        nodes.stop()


def test_without_a_cluster_there_is_no_word_of_one(broker: BrokerProcess, visit: Visit) -> None:
    page = visit(broker, PATH)
    until(lambda: total(page, "state") == "Ready", "the page to be filled")
    expect(page.get_by_role("region", name="Cluster", exact=True)).to_be_hidden()
