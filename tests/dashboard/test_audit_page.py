"""The page of the audit in a browser: what the file has, newest first, going on while it is open."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from penstock.dashboard.audit import LINES, rows_of
from tests.dashboard.conftest import StartBroker, Visit, axe, everybody
from tests.dashboard.test_rights_pages import SETTINGS, api_of, sign_in
from tests.http.api import Api
from tests.server.harness import until

PATH = "/audit"


def column(page: Page, name: str) -> list[str]:
    return page.locator(f'tbody [data-column="{name}"]').all_inner_texts()


@pytest.mark.long
def test_acts_and_refusals_as_they_come(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker(config=SETTINGS)
    with api_of(broker, "root") as root, api_of(broker, "reader") as reader:
        root.send("orders.a", b"1", b"2")
        page = sign_in(visit(broker, PATH, alone=True), "root")
        until(lambda: column(page, "act") == ["sign in", "start"], "the page to be there")
        axe(page)
        root.post("/v1/queues/orders.a/purge")
        for _ in range(3):
            assert reader.ask("POST", "/v1/queues/orders.a/purge").status == 403
        assert root.ask("POST", "/v1/queues/nowhere/pause").status == 404
        until(lambda: len(column(page, "act")) >= 5, "what has happened since")
        row = page.locator("tbody tr", has_text="root").filter(has_text="purge")
        expect(row).to_have_count(1)  # begun and done
        expect(row.locator('[data-column="result"]')).to_have_text("done")
        expect(row.locator('[data-column="count"]')).to_have_text("2")
        expect(row.get_by_role("link", name="orders.a")).to_have_attribute("href", "/queue/orders.a")
        expect(page.locator("tbody .ps-bad", has_text="forbidden").first).to_be_visible()
        expect(page.locator("tbody .ps-bad", has_text="queue-not-found")).to_be_visible()
        times = column(page, "time")
        assert times == sorted(times, reverse=True)
        page.get_by_role("combobox", name="Show").select_option("Refusals")
        assert set(column(page, "who")) == {"reader"}
        assert set(column(page, "act")) == {"POST /v1/queues/{queue}/purge"}
        page.get_by_role("combobox", name="Show").select_option("Acts")
        assert "forbidden" not in column(page, "result")
        page.keyboard.press("Tab")
        page.keyboard.press("/")
        page.keyboard.type("NOWHERE")
        assert column(page, "result") == ["queue-not-found"]
        page.reload()
        until(lambda: column(page, "result") == ["queue-not-found"], "the same after a reload")
        page.get_by_role("searchbox").fill("")
        page.get_by_role("combobox", name="Show").select_option("All")
        everybody(page)


def test_without_an_audit_it_says_so(start_broker: StartBroker, visit: Visit) -> None:
    page = visit(start_broker("--audit", "off"), PATH, forgive=["404"])
    expect(page.get_by_role("heading", name="there is no audit: it is switched off")).to_be_visible()


def test_names_stay_text_and_only_the_newest_are_shown(
    start_broker: StartBroker, tmp_path: Path, visit: Visit
) -> None:
    wild = "<img src=x onerror=alert(1)>"
    data = tmp_path / "broker" / "data"
    data.mkdir(parents=True)
    with (data / "audit.jsonl").open("w") as file:
        for number in range(2 * LINES):
            line = {"time": "2026-01-01T00:00:00.000Z", "who": wild, "act": f"n{number}", "queue": wild}
            file.write(json.dumps({**line, "result": "forbidden"}, separators=(",", ":")) + "\n")
    broker = start_broker()
    page = visit(broker, PATH)
    expect(page.locator(".ps-live-count")).to_have_text(f"{LINES} lines")
    until(
        lambda: column(page, "act")[:3] == ["start", f"n{2 * LINES - 1}", f"n{2 * LINES - 2}"], "their order"
    )
    expect(page.get_by_role("link", name=wild).first).to_be_visible()
    assert page.locator("tbody img").count() == 0
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"x")
        api.post("/v1/queues/orders/pause")
        until(lambda: column(page, "act")[0] == "pause", "a new line")
    expect(page.locator(".ps-live-count")).to_have_text(f"{LINES - 1} lines")  # two of which are one row


def test_a_call_that_did_not_end_stays_begun() -> None:
    lines = [
        {"time": f"2026-01-01T00:00:0{at}.000Z", "act": "purge", "queue": queue, "call": 1, "result": result}
        for at, (queue, result) in enumerate(
            [("cut", "done"), ("a", "begun"), ("b", "begun"), ("b", "queue-not-found"), ("c", "begun")]
        )
    ]
    assert [(row["names"], row["outcome"], row["time"][-6:]) for row in rows_of(lines)] == [
        ("cut", "done", "00.000"),
        ("a", "begun", "01.000"),  # Its process was killed, and the next one counts from 1.
        ("b", "queue-not-found", "02.000"),
        ("c", "begun", "04.000"),
    ]
