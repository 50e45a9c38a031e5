"""A queue's page in a browser: its numbers are the API's, its buttons do what they say and ask first."""

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from penstock import connect
from penstock.dashboard.pages import queue_href
from penstock.dashboard.queue_messages import PAGE_ROWS
from tests.dashboard.conftest import THEMES, StartBroker, Visit, axe, everybody, readable, until
from tests.http.api import NDJSON, Api
from tests.http.morgue import path_of, reject, take
from tests.seeds import some
from tests.server.harness import BrokerProcess

SHOWN = ("ready", "held", "delayed", "dead", "consumers")
NOT_DONE = "Not done: the link to the broker is lost. Try again when this page is back."
ROLES = ("read", "operate", "admin")
NOBODY = ("WebSocket connection to", "ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE")


ALL_AT_ONCE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>a/b//c?d#e ü 日本 {{7*7}} ${1}"

CRUMBS = "all => all.map(it => getComputedStyle(it, '::before').content)"
"""What stands before each; after them is nothing."""


def number(page: Page, field: str) -> float:
    text = page.locator(f'[data-number="{field}"]').inner_text()
    return 0.0 if text == "<0.1" else float(text.replace(",", ""))


def fill(api: Api, queue: str, count: int, value: str = "{}") -> None:
    lines = "".join(json.dumps({"value": value.format(at)}) + "\n" for at in range(count))
    reply = api.ask("POST", path_of(queue, "batch"), lines.encode(), {"Content-Type": NDJSON})
    assert reply.status == 200, reply


def offsets(page: Page) -> list[int]:
    return [int(text) for text in page.locator(".ps-messages tbody th a").all_inner_texts()]


# --- what it shows ---------------------------------------------------------------------------------


@pytest.mark.long
def test_the_numbers_are_the_apis_while_traffic_runs(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    fill(api, "orders", 30)
    api.send("orders", b"later", delay=600)
    page = visit(broker, "/queue/orders")
    expect(page.get_by_role("heading", name="orders", exact=True)).to_be_visible()
    with connect(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        consumed = mq.consume("orders", prefetch=7)
        for turn in range(4):
            for message in (next(consumed) for _ in range(5)):
                message.reject() if turn == 2 else message.ack()
            fill(api, "orders", 1011)

            def same() -> bool:
                told = api.get("/v1/queues/orders")
                return all(number(page, field) == told[field] for field in SHOWN)

            until(same, "the page to show what the API says")
        assert number(page, "dead") == 5
        expect(page.locator(".ps-parts .ps-badge")).to_have_text("5")
        expect(page.locator('[data-number="oldest_seconds"]')).to_contain_text(" s")

        def rates() -> bool:
            fill(api, "orders", 100)
            told = api.get("/v1/queues/orders")["rate_in"]
            return bool(told > 20 and 0.5 < number(page, "rate_in") / told < 2)

        until(rates, "the page to show about the rate that the API says")
        # Who consumes it is told, and goes away with its connection.
        expect(page.locator(".ps-consumers tbody tr")).to_have_count(1)
        expect(page.locator('.ps-consumers [data-column="takes"]')).to_have_text("messages")
    expect(page.get_by_text("Nobody consumes this queue at the moment.")).to_be_visible()


@pytest.mark.long
def test_charts_begin_with_the_past(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    fill(api, "charted", 40)
    until(lambda: bool(api.get("/v1/queues/charted/samples")["samples"]), "a step to be over")
    page = visit(broker, "/queue/charted")
    backlog = page.get_by_role("img", name="Messages that wait, are held, delayed, dead")
    until(lambda: "Ready 40" in (backlog.get_attribute("aria-label") or ""), "the backlog to be drawn")
    rates = page.get_by_role("img", name="Messages accepted and acknowledged per second")
    # 40 within ten seconds: the API's sample knows, the rate of now has forgotten or soon will.
    until(lambda: "highest 0/s" not in (rates.get_attribute("aria-label") or "nothing"), "rates to be drawn")
    shown = page.locator(".ps-graph").first.locator(".ps-axes text").last.inner_html()
    assert shown.endswith(" UTC")
    hours, minutes, seconds = map(int, shown.removesuffix(" UTC").split(":"))
    ahead = (hours * 3600 + minutes * 60 + seconds - time.time()) % 86400
    assert min(ahead, 86400 - ahead) < 600
    page.get_by_role("button", name="1 hour").click()
    expect(page.get_by_role("button", name="1 hour")).to_have_attribute("aria-pressed", "true")
    until(lambda: "Ready 40" in (backlog.get_attribute("aria-label") or ""), "the hour to be drawn")
    until(lambda: page.url.endswith("/queue/charted?span=1h"), "the address to say so")
    page.reload()
    expect(page.get_by_role("button", name="1 hour")).to_have_attribute("aria-pressed", "true")
    fill(api, "charted", 2)
    until(lambda: "Ready 42" in (backlog.get_attribute("aria-label") or ""), "the chart to go on")


@pytest.mark.parametrize(
    "name",
    some(
        [
            ALL_AT_ONCE,
            "<script>alert(1)</script>",
            "a/b//c?d#e",
            "ü 日本 {{7*7}} ${1}",
            "\"'><img src=x onerror=alert(1)>",
            "..",
        ],
        ALL_AT_ONCE,
        "..",
    ),
)
def test_any_name_stays_text(broker: BrokerProcess, visit: Visit, name: str) -> None:
    with connect(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        mq.send(name, b"x")
    for part in (None, "messages", "dead"):
        page = visit(broker, queue_href(name, part=part))
        page.on("dialog", lambda it: pytest.fail(it.message))
        assert page.locator("h1").inner_text() == name
        assert page.locator("main img:not([alt='']), main script").count() == 0
        if part == "messages":
            page.locator(".ps-messages tbody th a").click()
            expect(page.get_by_role("heading", name="Message 0")).to_be_visible()
            expect(page.locator(".ps-payload")).to_have_text("x")
            assert page.locator(".ps-crumbs li").evaluate_all(CRUMBS) == ["none", '"/"', '"/"']
            page.get_by_role("link", name=name, exact=True).click()
            assert page.locator("h1").inner_text() == name


@pytest.mark.long
def test_a_queue_that_is_not_there_yet(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    page = visit(broker, "/queue/later%3Cb%3E", forgive=["404"])
    expect(page.get_by_role("heading", name="There is no such queue")).to_be_visible()
    expect(page.get_by_text("later<b>")).to_be_visible()
    axe(page)
    api.send("later<b>", b"x")
    expect(page.get_by_role("heading", name="later<b>")).to_be_visible()
    page = visit(broker, "/queue/x.dead", forgive=["400"])
    expect(page.get_by_text("is the door to the dead letters of 'x'")).to_be_visible()


@pytest.mark.long
def test_the_page_comes_back_when_the_broker_does(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        fill(api, "orders", 3)
    page = visit(broker, "/queue/orders?part=messages&state=ready&from=1", forgive=NOBODY)
    until(lambda: offsets(page) == [1, 2], "the page to be there")
    broker.kill()
    expect(page.locator("#ps-link")).to_be_visible()
    for name in ("Pause", "Go", "Refresh"):
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.locator("#ps-link")).to_have_text(NOT_DONE)
    again = BrokerProcess(broker.folder, "--http", f"127.0.0.1:{broker.ports['http']}").start()
    try:
        expect(page.locator("#ps-link")).to_be_hidden(timeout=30_000)
        until(lambda: offsets(page) == [1, 2], "the same page to be back")
        with Api(again.ports["http"]) as api:
            fill(api, "orders", 5)
        until(lambda: number(page, "ready") == 8, "numbers to live again")
        expect(page.get_by_role("button", name="Pause")).to_be_visible()  # and nobody has pressed it
    finally:
        again.kill()


# --- messages --------------------------------------------------------------------------------------


@pytest.mark.long
def test_messages_by_state_and_offset(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    fill(api, "many", 130, "message {}")
    take(broker, "many", 5, lambda message: message.ack())
    take(broker, "many", 2, lambda message: message.reject())
    page = visit(broker, "/queue/many?part=messages")
    until(lambda: offsets(page) == list(range(129, 129 - PAGE_ROWS, -1)), "the newest first")
    first = page.locator('tr[data-key="129"]')
    expect(first.locator('[data-column="preview"]')).to_have_text("message 129")
    expect(first.locator('[data-column="state"]')).to_have_text("ready")
    expect(first.locator('[data-column="size"]')).to_have_text("11 B")
    expect(page.get_by_role("button", name="Newer →")).to_be_disabled()
    page.get_by_role("button", name="← Older").click()
    until(lambda: offsets(page) == list(range(79, 29, -1)), "the page before")
    page.get_by_role("button", name="Ready").click()
    until(lambda: offsets(page) == list(range(7, 7 + PAGE_ROWS)), "those that wait, the oldest first")
    page.get_by_role("button", name="Newer →").click()
    until(lambda: offsets(page)[:1] == [57], "the next page")
    page.get_by_role("button", name="Newer →").click()
    until(lambda: offsets(page) == list(range(107, 130)), "the last page")
    expect(page.get_by_role("button", name="Newer →")).to_be_disabled()
    page.get_by_role("button", name="← Older").click()
    until(lambda: offsets(page)[:1] == [57], "one page back")
    assert page.url.endswith("?part=messages&state=ready&from=57")
    page.reload()
    until(lambda: offsets(page)[:1] == [57], "the same after a reload")
    page.get_by_role("button", name="Dead").click()
    until(lambda: offsets(page) == [5, 6], "the dead")
    expect(page.locator('tr[data-key="5"] .ps-badge')).to_have_text(["dead", "rejected"])
    page.get_by_role("button", name="Gone").click()
    until(lambda: offsets(page) == [0, 1, 2, 3, 4], "the gone")
    api.send("many", b"tomorrow", delay=86400)
    due = api.get(path_of("many", "messages/130"))["due"]
    page.get_by_role("button", name="Delayed").click()
    until(lambda: offsets(page) == [130], "the one whose time has not come")
    expect(page.locator(".ps-badge", has_text="until")).to_have_text(f"until {due[:10]} {due[11:16]} UTC")
    page.get_by_role("button", name="Held").click()
    expect(page.get_by_text("There is no message here.")).to_be_visible()
    page.get_by_role("button", name="All", exact=True).click()
    page.get_by_label("Go to offset").fill("42")
    page.keyboard.press("Enter")
    until(lambda: offsets(page)[-1:] == [42], "the page from 42 on")
    page.locator('tr[data-key="42"] a').click()
    expect(page.get_by_role("heading", name="Message 42")).to_be_visible()
    page.go_back()
    until(lambda: offsets(page)[-1:] == [42], "the list where it was left")


def test_a_page_of_large_messages_is_whole(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    api.send("large", *[b"%d " % at + b"x" * 1_000_000 for at in range(12)])
    page = visit(broker, "/queue/large?part=messages")
    until(lambda: offsets(page) == list(range(11, -1, -1)), "all of them")
    preview = page.locator('tr[data-key="11"] [data-column="preview"]')
    assert len(preview.inner_text()) < 300
    expect(preview).to_contain_text("11 xxx")


# --- what operators do -------------------------------------------------------------------------------


def test_pause_and_resume_by_click(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    fill(api, "stopped", 3)
    page = visit(broker, "/queue/stopped")
    expect(page.get_by_text("paused", exact=True)).to_be_hidden()
    page.get_by_role("button", name="Pause").click()
    until(lambda: api.get("/v1/queues/stopped")["paused"] is True, "the queue to be paused")
    expect(page.get_by_text("paused", exact=True)).to_be_visible()
    for theme in THEMES:
        page.emulate_media(color_scheme=theme)
        expect(page.locator("html")).to_have_attribute("data-theme", theme)
        readable(page.get_by_text("stopped is paused"))
        axe(page)
    page.get_by_role("button", name="Resume").click()
    until(lambda: api.get("/v1/queues/stopped")["paused"] is False, "the queue to be resumed")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    # What somebody else does is seen, too.
    api.post("/v1/queues/stopped/pause")
    expect(page.get_by_role("button", name="Resume")).to_be_visible()


@pytest.mark.long
def test_a_purge_wants_the_name(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    fill(api, "purged", 1233)
    api.send("purged", b"later", delay=600)
    reject(broker, api, "purged-dead", [b"a", b"b"])
    page = visit(broker, "/queue/purged")
    page.get_by_role("button", name="Purge…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("1,234 messages will be thrown away")
    go = dialog.get_by_role("button", name="Purge", exact=True)
    expect(go).to_be_disabled()
    axe(page)
    dialog.get_by_role("textbox").fill("purge")
    expect(go).to_be_disabled()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert api.get("/v1/queues/purged")["ready"] == 1233
    page.get_by_role("button", name="Purge…").click()
    dialog.get_by_role("textbox").fill("purged")
    go.click()
    until(lambda: api.get("/v1/queues/purged")["ready"] == 0, "the queue to be empty")
    expect(page.get_by_text("Purged 1,234 messages of purged")).to_be_visible()
    until(lambda: number(page, "ready") == 0, "the page to say so")
    # The dead letters are another button's business.
    page = visit(broker, "/queue/purged-dead?part=dead")
    page.get_by_role("button", name="Purge dead letters…").click()
    expect(dialog := page.get_by_role("dialog")).to_contain_text("2 dead letters will be thrown away")
    dialog.get_by_role("textbox").fill("purged-dead")
    dialog.get_by_role("button", name="Purge", exact=True).click()
    until(lambda: api.get("/v1/queues/purged-dead")["dead"] == 0, "the letters to be gone")
    expect(page.get_by_text("No letter is dead.")).to_be_visible()


@pytest.mark.long
def test_a_queue_is_deleted_by_name(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    fill(api, "deleted", 12)
    looking = visit(broker, "/queue/deleted?part=messages", forgive=["404"])
    page = visit(broker, "/queue/deleted", forgive=["404"])
    page.get_by_role("button", name="Delete…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(
        "12 messages that wait, 0 messages that are held and 0 dead letters will be gone"
    )
    go = dialog.get_by_role("button", name="Delete", exact=True)
    expect(go).to_be_disabled()
    axe(page)
    dialog.get_by_role("textbox").fill("deleted")
    go.click()
    until(lambda: api.ask("GET", "/v1/queues/deleted").status == 404, "the queue to be gone")
    expect(page.locator("tbody tr").filter(has_text="deleted")).to_have_count(0)
    expect(page).to_have_url(re.compile(r"/$"))
    # Who looks at it meanwhile is told, and sees the next one when it comes.
    expect(looking.get_by_text("There is no such queue")).to_be_visible()
    fill(api, "deleted", 1)
    expect(looking.get_by_role("button", name="Delete…")).to_be_visible()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with a token for each role, `ROLE-0123456789abcdef`."""
    folder = tmp_path_factory.mktemp("guarded")
    lines = [
        f'[[http.tokens]]\nname = "{role}-token"\nrole = "{role}"\ntoken = "{role}-0123456789abcdef"'
        for role in ROLES
    ]
    (folder / "penstock.toml").write_text("\n".join(lines))
    broker = BrokerProcess(folder, "--http", "127.0.0.1:0", "--config", str(folder / "penstock.toml")).start()
    with Api(broker.ports["http"], "admin-0123456789abcdef") as api:
        reject(broker, api, "orders", [b"a", b"b"])
    yield broker
    broker.kill()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.long
def test_each_role_has_its_buttons_and_no_more(guarded: BrokerProcess, visit: Visit, role: str) -> None:
    page = visit(guarded, "/queue/orders?part=dead", alone=True)
    page.get_by_label("Token").fill(f"{role}-0123456789abcdef")
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator(".ps-messages tbody tr")).to_have_count(2)  # looking is for everybody
    there = {
        "Pause": role != "read",
        "Redrive…": role != "read",
        "Dry run": role != "read",
        "Purge…": role == "admin",
        "Delete…": role == "admin",
        "Purge dead letters…": role == "admin",
    }
    for name, shown in there.items():
        assert page.get_by_role("button", name=name, exact=True).count() == shown, name
    page = visit(guarded, "/queue/orders?offset=0", context=page.context)
    assert page.get_by_role("button", name="Redrive", exact=True).count() == (role != "read")
    expect(page.locator(".ps-payload")).to_have_text("a")
    # What is not shown is refused as well.
    with Api(guarded.ports["http"], f"{role}-0123456789abcdef") as api:
        assert api.ask("POST", "/v1/queues/orders/resume").status == (403 if role == "read" else 200)
        assert api.ask("POST", "/v1/queues/orders/purge").status == (200 if role == "admin" else 403)


@pytest.mark.long
def test_a_role_that_was_taken_away_takes_the_buttons_with_it(
    start_broker: StartBroker, tmp_path: Path, visit: Visit
) -> None:
    config = tmp_path / "penstock.toml"
    row = '[[http.tokens]]\nname = "ann"\nrole = "{}"\ntoken = "ann-0123456789abcdef"\n'
    config.write_text(row.format("admin"))
    broker = start_broker("--config", str(config))
    with Api(broker.ports["http"], "ann-0123456789abcdef") as api:
        fill(api, "orders", 3)
        page = visit(broker, "/queue/orders", alone=True)
        page.get_by_label("Token").fill("ann-0123456789abcdef")
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("button", name="Pause").wait_for()
        expect(page.get_by_role("status")).to_have_text("Ready")
        config.write_text(row.format("read"))
        broker.signal(signal.SIGHUP)
        expect(page.get_by_role("button", name="Pause")).to_have_count(0)
        expect(page.get_by_role("status")).to_have_text("Ready")
        expect(page.get_by_role("button", name="Purge…")).to_have_count(0)
        assert api.ask("POST", "/v1/queues/orders/resume").problem == "forbidden"


# --- for everybody -----------------------------------------------------------------------------------


def test_everybody_can_use_it(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    queue = "a-name-that-is-much-too-long-for-any-line-" + "of-a-phone-" * 8
    fill(api, queue, 3, '{{"id": {}, "text": "' + "many words " * 20 + '"}}')
    take(broker, queue, 2, lambda message: message.reject())
    with connect(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        next(mq.consume(queue, prefetch=1))
        for part, there in (
            (None, ".ps-consumers tbody tr"),
            ("messages", ".ps-messages tbody tr"),
            ("dead", ".ps-messages tbody tr"),
        ):
            page = visit(broker, queue_href(queue, part=part))
            page.locator(there).first.wait_for()
            everybody(page)
            page.close()


def test_by_keyboard(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    fill(api, "keys", 2)
    page = visit(broker, "/queue/keys")
    page.locator("#main").focus()
    seen = []
    for _ in range(9):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.innerText"))
    assert seen == [
        "Queues",
        "Send a message…",
        "Pause",
        "Purge…",
        "Delete…",
        "Overview",
        "Messages",
        "Dead letters",
        "5 minutes",
    ]
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="5 minutes", exact=True)).to_have_attribute("aria-pressed", "true")


def test_quoted_names_in_commands(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    """What a page offers to copy does what it says, whatever the name is."""
    name = "it's; rm -rf $HOME"
    api.send(name, b"x")
    page = visit(broker, f"/queue/{quote(name, safe='')}")
    page.get_by_text("The same in a terminal").click()
    line = page.locator(".ps-terminal pre").inner_text().splitlines()[0]
    assert line == f"penstock show 'it'\"'\"'s; rm -rf $HOME' --url http://127.0.0.1:{broker.ports['http']}"
