"""The page of readers in a browser: lag as the API has it, moving with its readers; release by click."""

import json
import re
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from tests.dashboard.conftest import StartBroker, Visit, axe, everybody, readable
from tests.http.api import Api
from tests.server.harness import BrokerProcess, until

PATH = "/readers"
TOKENS = {role: f"{role}-0123456789abcdef" for role in ("read", "operate")}


def put(api: Api, name: str, positions: dict[str, int], **fields: object) -> None:
    path = f"/v1/readers/{quote(name, safe='')}"
    assert api.ask("PUT", path, {"positions": positions, **fields}).status == 200


def cell(page: Page, table: str, key: str, column: str) -> str:
    row = page.get_by_role("table", name=table, exact=True).locator(f"tr[data-key={json.dumps(key)}]")
    return row.locator(f'[data-column="{column}"]').inner_text()


def total(page: Page, field: str) -> str:
    return page.locator(f'[data-total="{field}"]').inner_text()


def names(page: Page) -> list[str]:
    return page.get_by_role("table", name="Readers", exact=True).locator("tbody th a").all_inner_texts()


def chosen(page: Page) -> str:
    return page.locator("#reader-name").inner_text()


@pytest.mark.long
def test_without_readers_it_shows_the_option_of_spark(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    page = visit(broker, PATH)
    page.get_by_role("heading", name="No reader has a name yet").wait_for()
    assert '.option("reader", ' in page.locator("pre").inner_text()
    assert f'"http://127.0.0.1:{broker.ports["http"]}"' in page.locator("pre").inner_text()
    expect(page.locator("#reader")).to_be_hidden()
    axe(page)
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"1")
        put(api, "nightly", {"orders": 0})
    until(lambda: names(page) == ["nightly"], "the first reader to appear")


@pytest.mark.long
def test_lag_is_the_apis_and_moves_with_the_reader(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("orders", *[b"x"] * 1500)
        api.send("mail", b"x", b"y")
        put(api, "nightly", {"orders": 0, "mail": 1}, lease_seconds=3600)
        put(api, "audit", {"mail": 1}, view="events", lease_seconds=3600)
        page = visit(broker, PATH)
        for position in (0, 700, 1500):
            put(api, "nightly", {"orders": position, "mail": 1}, lease_seconds=3600)

            def same() -> bool:
                readers = {it["name"]: it for it in api.get("/v1/readers")["readers"]}
                lags = {name: sum(it["lag"] for it in reader["queues"]) for name, reader in readers.items()}
                return (
                    set(names(page)) == set(readers)
                    and all(cell(page, "Readers", name, "lag") == f"{lag:,}" for name, lag in lags.items())
                    and total(page, "lag") == f"{sum(lags.values()):,}"
                    and all(
                        cell(page, "Queues of the reader", it["queue"], field) == f"{it[field]:,}"
                        for it in readers["nightly"]["queues"]
                        for field in ("position", "end", "lag")
                    )
                )

            until(same, "the page to show what the API says")
        assert chosen(page) == "nightly"  # which was the furthest behind
        assert cell(page, "Readers", "audit", "view") == "events"
        assert cell(page, "Readers", "nightly", "bytes") == "1 B"
        assert cell(page, "Readers", "audit", "bytes") in ("", "–")
        assert cell(page, "Readers", "nightly", "lease").endswith(" min")
        chart = page.get_by_role("img", name="Lag while this page is open: now Lag 1;")
        expect(chart).to_be_visible()
        page.get_by_role("link", name="audit", exact=True).click()
        page.wait_for_url("**/readers?reader=audit#reader")
        until(lambda: chosen(page) == "audit", "the other reader")
        expect(page.get_by_text("Events, by number")).to_be_visible()


@pytest.mark.long
def test_release_by_click(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("orders", *[b"x"] * 1234)
        put(api, "one/two", {"orders": 0}, lease_seconds=3600)
        put(api, "other", {"orders": 1000}, lease_seconds=3600)
        page = visit(broker, f"{PATH}?reader=one%2Ftwo")
        page.get_by_role("button", name="Release").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Release the reader one/two?")
        expect(dialog).to_contain_text("retention may remove what it has not read, which is 1,234 now")
        axe(page)
        dialog.get_by_role("button", name="Cancel").click()
        expect(dialog).to_be_hidden()
        assert len(api.get("/v1/readers")["readers"]) == 2
        page.get_by_role("button", name="Release").click()
        page.get_by_role("dialog").get_by_role("button", name="Release").click()
        expect(page.get_by_text("Released one/two")).to_be_visible()
        until(lambda: names(page) == ["other"], "the reader to be gone")
        assert [it["name"] for it in api.get("/v1/readers")["readers"]] == ["other"]
        expect(page.get_by_text("There is no such reader (any more)")).to_be_visible()
        expect(page.get_by_role("button", name="Release")).to_be_hidden()


def test_what_the_api_refuses_is_told(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"x")
        put(api, "short", {"orders": 0}, lease_seconds=3600)
        page = visit(broker, PATH)
        page.get_by_role("button", name="Release").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Release the reader short?")
        assert api.ask("DELETE", "/v1/readers/short").status == 204
        dialog.get_by_role("button", name="Release").click()
        expect(page.locator(".ps-toast-bad")).to_contain_text("there is no reader 'short'")
        readable(page.get_by_role("button", name="Close"))


@pytest.mark.long
def test_only_who_may_operate_can_release(start_broker: StartBroker, tmp_path: Path, visit: Visit) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text(
        "".join(
            f'[[http.tokens]]\nname = "{role}"\nrole = "{role}"\ntoken = "{token}"\n'
            for role, token in TOKENS.items()
        )
    )
    broker = start_broker("--config", str(config))
    with Api(broker.ports["http"], TOKENS["operate"]) as api:
        api.send("orders", b"x")
        put(api, "nightly", {"orders": 0}, lease_seconds=3600)
    for role, buttons in (("read", 0), ("operate", 1)):
        page = visit(broker, PATH, alone=True)
        page.get_by_label("Token").fill(TOKENS[role])
        page.get_by_role("button", name="Sign in").click()
        expect(page.locator("#reader-name")).to_have_text("nightly")
        assert page.get_by_role("button", name="Release").count() == buttons
    with Api(broker.ports["http"], TOKENS["read"]) as api:
        assert api.ask("DELETE", "/v1/readers/nightly").problem == "forbidden"
        assert len(api.get("/v1/readers")["readers"]) == 1


@pytest.mark.long
def test_leases_that_ended_and_readers_that_are_capped_are_marked(
    start_broker: StartBroker, visit: Visit
) -> None:
    broker = start_broker("--log-reader-bytes-max", "100000", "--log-segment-bytes", str(1 << 20))
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"x")
        put(api, "short", {"orders": 0}, lease_seconds=1)
        put(api, "behind", {"orders": 0}, lease_seconds=3600)
        page = visit(broker, f"{PATH}?reader=behind")
        until(lambda: "lease ended" in cell(page, "Readers", "short", "name"), "the end of the lease")
        assert cell(page, "Readers", "short", "lease") == "–"
        for _ in range(40):
            api.send("orders", bytes(100_000))
        until(lambda: "capped" in cell(page, "Readers", "behind", "name"), "the reader to be capped")
        # The two tables are drawn one behind the other.
        until(
            lambda: "capped" in cell(page, "Queues of the reader", "orders", "queue"),
            "its queue to be marked",
        )
        assert total(page, "capped") in ("1", "2")
        expect(page.get_by_text("holds at most [log] reader-bytes-max")).to_be_visible()
        axe(page)


def test_names_stay_text(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    wild = "<script>alert(1)</script>"
    api.send(wild, b"x")
    put(api, "\"'><img src=x onerror=alert(1)>", {wild: 0})
    put(api, wild, {wild: 0})
    page = visit(broker, f"{PATH}?reader={quote(wild)}")
    dialogs: list[str] = []
    page.on("dialog", lambda it: dialogs.append(it.message))
    until(lambda: chosen(page) == wild, "the reader")
    assert wild in names(page)
    page.get_by_role("button", name="Release").click()
    expect(page.get_by_role("dialog")).to_contain_text(wild)
    assert page.locator("main script, main img, [role=dialog] script").count() == 0
    assert dialogs == []


def test_everybody_can_use_it(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    api.send("usable", b"x")
    api.send("a-queue-with-a-name-that-is-much-too-long-" + "for-a-table-" * 12, b"x")
    long = "a-name-that-is-much-too-long-" + "for-any-column-" * 10
    put(api, long, {"usable": 0})
    page = visit(broker, f"{PATH}?reader={long}")
    until(lambda: chosen(page) == long, "the reader")
    expect(page.get_by_role("img", name=re.compile("^Lag while this page is open"))).to_be_visible()
    everybody(page)


def test_by_keyboard(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    api.send("keys", b"x")
    put(api, "by-keyboard", {"keys": 0})
    page = visit(broker, f"{PATH}?reader=by-keyboard")
    release = page.get_by_role("button", name="Release")
    release.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert "by-keyboard" in [it["name"] for it in api.get("/v1/readers")["readers"]]


@pytest.mark.long
def test_a_pipeline_shows_how_it_stands_and_takes_wishes(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("orders", *[b"x"] * 5)
        path = "/v1/readers/totals"
        about: dict[str, object] = {
            "kind": "pipeline",
            "name": "totals",
            "state": "retrying",
            "state_seconds": 75,
            "retry_seconds": 12,
            "error": "no broker answers there",
            "rows_total": 1200,
            "rows_per_second": 3.5,
            "bad_records": 2,
            "sinks": {"files": 1100, "alerts": 98},
            "expectations": {"amount > 0": 7, "region is known": 0},
            "expectations_checked": {"amount > 0": 1198, "region is known": 1198},
            "wish": 0,
        }
        panel_text = ""

        def says(**more: object) -> bool:
            """As the service does, again and again."""
            about.update(more)
            said = {"positions": {"orders": 0}, "lease_seconds": 600, "about": about}
            return api.ask("PUT", path, said).status == 200

        def until_shown(*texts: str) -> None:
            def shown() -> bool:
                nonlocal panel_text
                says()
                panel_text = page.locator("#reader").inner_text()
                return all(text in panel_text for text in texts)

            until(shown, f"{texts}, not {panel_text}")

        says()
        page = visit(broker, PATH)
        until(lambda: says() and "retrying" in cell(page, "Readers", "totals", "name"), "its state")
        assert cell(page, "Readers", "totals", "rate") == "3.5"
        until_shown("retrying for 75 s, tried again in 12 s", "3.5/s, 1,200 in all, 2 bad records")
        until_shown(
            "1,100 files, 98 alerts", "7 of 1,198 amount > 0, 0 of 1,198 region is known", "Pause", "Restart"
        )
        assert "Resume" not in panel_text
        everybody(page)
        until_shown("Pause")
        page.get_by_role("button", name="Pause").click()
        expect(page.get_by_text("Pause is wished of totals")).to_be_visible()
        until_shown("pause is wished")
        wish = api.get(path)["wish"]
        assert wish["action"] == "pause"
        says(state="paused", wish=wish["number"], error=None, retry_seconds=None)
        until_shown("paused for 75 s", "Resume")
        assert "Pause" not in panel_text
        page.get_by_role("button", name="Resume").click()
        until(lambda: (api.get(path)["wish"] or {}).get("action") == "resume", "it to be wished")
        # One that has ended has no buttons for it.
        says(state="stopped")
        expect(page.get_by_role("button", name="Restart")).to_be_hidden()


@pytest.mark.long
def test_what_readers_say_of_themselves(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("orders", *[b"x"] * 5)
        path = "/v1/readers/totals"
        for position in (0, 2):
            about = {"kind": "pipeline", "name": "totals", "batch": 12, "rows": 2}
            said = {"positions": {"orders": position}, "lease_seconds": 600, "about": about}
            assert api.ask("PUT", path, said).status == 200
        page = visit(broker, PATH)
        until(lambda: cell(page, "Readers", "totals", "kind") == "pipeline", "what it is")
        until(
            lambda: cell(page, "Readers", "totals", "behind").endswith(" s"),
            "how old what it has not read is",
        )
        assert cell(page, "Readers", "totals", "moved_at").endswith(" s")
        panel = page.locator("#reader")
        expect(panel).to_contain_text("number 12, 2 rows")
        expect(panel).to_contain_text("ago, by 2")
        assert page.locator('[data-total="failing"]').inner_text() == "0"
        assert api.ask("PUT", path, {"about": {"error": "<b>no</b> room"}}).status == 200
        expect(page.get_by_role("heading", name="totals does not get on")).to_be_visible()
        expect(page.get_by_text("It says: <b>no</b> room").first).to_be_visible()
        until(lambda: "failing" in cell(page, "Readers", "totals", "name"), "the row to be marked")
        everybody(page)
        assert api.ask("PUT", path, {"about": {"error": None}}).status == 200
        expect(page.get_by_role("heading", name="totals does not get on")).to_be_hidden()
