"""The first page in a browser: its numbers are the API's, its names stay text, everybody can use it."""

import json
import re
from urllib.parse import quote, unquote

import pytest
from playwright.sync_api import Page, expect

from penstock import connect
from tests.dashboard.conftest import StartBroker, Visit, axe, everybody, fits, until
from tests.http.api import NDJSON, Api
from tests.server.harness import ROOT, BrokerProcess

SHOWN = ("ready", "held", "delayed", "dead", "consumers")


def cell(page: Page, queue: str, column: str) -> str:
    """What a queue's row says; the first word where there are more."""
    row = page.locator(f"tr[data-key={json.dumps(queue)}]")
    return row.locator(f'[data-column="{column}"]').inner_text()


def total(page: Page, field: str) -> str:
    return page.locator(f'[data-total="{field}"]').inner_text()


def number(text: str) -> float:
    return 0.0 if text == "<0.1" else float(text.replace(",", ""))


def names(page: Page) -> list[str]:
    return page.locator("tbody th a").all_inner_texts()


def fill(api: Api, queue: str, count: int) -> None:
    lines = "".join(f'{{"value": "{number}"}}\n' for number in range(count))
    path = f"/v1/queues/{quote(queue, safe='')}/batch"
    assert api.ask("POST", path, lines.encode(), {"Content-Type": NDJSON}).status == 200


@pytest.mark.long
def test_an_empty_broker_says_what_to_do(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    page = visit(broker)
    page.get_by_role("heading", name="No queue yet").wait_for()
    line = page.locator("pre").inner_text()
    assert line.startswith("penstock send ")
    assert line.endswith(f"http://127.0.0.1:{broker.ports['http']}")
    axe(page)
    # What the line does, makes the queue appear.
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"hello")
    until(lambda: names(page) == ["orders"], "the first queue to appear")
    assert page.get_by_role("heading", name="No queue yet").count() == 0


def test_the_numbers_are_the_apis_while_traffic_runs(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api, connect(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        fill(api, "orders", 20)
        fill(api, "mail", 1234)
        api.send("mail", b"later", delay=600)
        page = visit(broker)
        page.locator('tr[data-key="orders"]').wait_for()
        consumed = mq.consume("orders", prefetch=7)
        for turn in range(4):
            for message in (next(consumed) for _ in range(5)):
                message.reject() if turn == 2 else message.ack()
            fill(api, "orders", 11)

            def same() -> bool:
                rows = {row["name"]: row for row in api.get("/v1/queues")["queues"]}
                return all(
                    number(cell(page, name, it)) == row[it] for name, row in rows.items() for it in SHOWN
                ) and all(
                    number(total(page, field)) == sum(row[field] for row in rows.values())
                    for field in ("ready", "held", "dead")
                )

            until(same, "the page to show what the API says")
        assert cell(page, "orders", "dead") == "5"
        assert cell(page, "mail", "ready") == "1,234"
        assert total(page, "delayed") == "1 delayed"
        assert cell(page, "mail", "oldest_at").endswith(" s")

        def rates() -> bool:
            fill(api, "orders", 100)
            told = next(row for row in api.get("/v1/queues")["queues"] if row["name"] == "orders")
            here = number(cell(page, "orders", "rate_in"))
            return bool(told["rate_in"] > 20 and 0.5 < here / told["rate_in"] < 2)

        until(rates, "the page to show about the rate that the API says")


def test_names_stay_text_and_lead_to_their_pages(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    wild = [
        "a/b//c",
        "<script>alert(1)</script>",
        "\"'><img src=x onerror=alert(1)>",
        "ü 日本 ${1} {{7*7}}",
        "..",
    ]
    for name in wild:
        # A path cannot name a queue that is "..": it is made by another door.
        with connect(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
            mq.send(name, b"x")
    page = visit(broker)
    dialogs: list[str] = []
    page.on("dialog", lambda it: dialogs.append(it.message))
    for name in wild:
        page.locator("tbody th a", has_text=name).first.wait_for()
    assert set(wild) <= set(names(page))
    assert page.locator("tbody img, tbody script").count() == 0
    paths = {
        link.inner_text(): page.evaluate(
            "it => new URL(it.href).pathname + new URL(it.href).search", link.element_handle()
        )
        for link in page.locator("tbody th a").all()
    }
    assert paths["a/b//c"] == "/queue/a%2Fb%2F%2Fc"
    assert paths[".."] == "/queue/?name=.."
    for name in wild[:-1]:
        assert paths[name] == "/queue/" + quote(name, safe=""), name
    assert dialogs == []


def test_find_and_sort_and_both_are_in_the_address(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        for count, name in enumerate(["mail-10", "mail-9", "orders", "Orders.eu"], 1):
            fill(api, name, count)
    page = visit(broker)
    until(lambda: names(page) == ["mail-9", "mail-10", "orders", "Orders.eu"], "names in the order of people")
    # Beside the word, too.
    page.get_by_role("columnheader", name="Ready").click(position={"x": 3, "y": 3})
    assert names(page) == ["Orders.eu", "orders", "mail-9", "mail-10"]
    expect(page.get_by_role("columnheader", name="Ready")).to_have_attribute("aria-sort", "descending")
    page.get_by_role("button", name="Ready").click()
    assert names(page) == ["mail-10", "mail-9", "orders", "Orders.eu"]
    page.keyboard.press("/")
    page.keyboard.type("ORD")
    assert names(page) == ["orders", "Orders.eu"]
    expect(page.locator(".ps-live-count")).to_have_text("2 of 4 queues")
    assert page.url.partition("?")[2] == "sort=ready&q=ORD"
    page.reload()
    until(lambda: names(page) == ["orders", "Orders.eu"], "the same after a reload")
    expect(page.get_by_role("searchbox")).to_have_value("ORD")
    page.get_by_role("searchbox").fill("nothing like it")
    expect(page.get_by_text("Nothing here matches")).to_be_visible()
    axe(page)
    page.get_by_role("button", name="Show all").click()
    assert len(names(page)) == 4
    assert page.url.partition("?")[2] == "sort=ready"


@pytest.mark.long
def test_a_thousand_queues(start_broker: StartBroker, visit: Visit) -> None:
    # None of them needs attention, however long this takes: that would be told, too.
    broker = start_broker(config="[http]\nhealth-seconds = 86400\n")
    with connect(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        for at in range(1000):
            mq.send(f"tenant-{at:04d}", b"x")
    with Api(broker.ports["http"]) as api:
        until(lambda: len(api.get("/v1/queues")["queues"]) == 1000, "a thousand queues")
        page = visit(broker)
        expect(page.locator(".ps-live-count")).to_have_text("1,000 queues")
        until(lambda: len(names(page)) == 100, "a page of them")
        expect(page.get_by_text("1–100 of 1,000")).to_be_visible()
        page.get_by_role("button", name="Next").click()
        until(lambda: names(page)[:1] == ["tenant-0100"], "the next page")
        until(lambda: page.url.endswith("?page=2"), "its address")
        received: list[str] = []
        page.on("websocket", lambda it: it.on("framereceived", lambda frame: received.append(str(frame))))
        page.goto(page.url.partition("?")[0] + "?q=0777")
        until(lambda: names(page) == ["tenant-0777"], "one of a thousand")
        assert len(told(received)) == 1000  # all of them have come once
        until(lambda: not any(it["rate_in"] for it in api.get("/v1/queues")["queues"]), "rates to end")
        until(lambda: quiet(page, received), "a second in which none of them comes")
        fill(api, "tenant-0777", 4)
        until(lambda: cell(page, "tenant-0777", "ready") == "5", "the change to be shown")
        assert told(received) == {"tenant-0777"}  # only the row that has changed


def told(received: list[str]) -> set[str]:
    """The queues that frames tell of."""
    return {name for frame in received for name in re.findall(r"tenant-\d{4}", frame)}


def quiet(page: Page, received: list[str]) -> bool:
    received.clear()
    page.wait_for_timeout(1500)
    return not told(received)


def test_everybody_can_use_it(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    fill(api, "usable", 3)
    api.post("/v1/queues/usable/pause")
    fill(api, "a-name-that-is-much-too-long-for-any-column-" + "of-a-table-" * 12, 3)
    page = visit(broker, width=375, dark=True)
    page.locator('tr[data-key="usable"]').wait_for()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    expect(page.get_by_role("status").filter(has_text="Ready")).to_be_visible()
    axe(page)
    fits(page)
    everybody(page)


@pytest.mark.long
def test_by_keyboard(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    fill(api, "keys", 1)
    page = visit(broker)
    page.locator('tr[data-key="keys"]').wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.type") == "search"
    page.keyboard.type("keys")
    page.keyboard.press("Escape")
    expect(page.get_by_role("searchbox")).to_have_value("")
    # Arrows walk along the queues, and back to where one types; Enter opens.
    fill(api, "keys.1", 1)
    fill(api, "keys.2", 1)
    page.keyboard.type("keys")
    until(lambda: names(page) == ["keys", "keys.1", "keys.2"], "the queues")
    walked = []
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
        walked.append(page.evaluate("document.activeElement.innerText"))
    assert walked == ["keys", "keys.1", "keys.2", "keys.2", "keys.1", "keys", ""]
    page.keyboard.type(".2")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="keys.2", exact=True)).to_be_visible()


def test_the_icon_of_the_tab_is_ours(broker: BrokerProcess, visit: Visit) -> None:
    page = visit(broker)
    (icon,) = page.evaluate("[...document.querySelectorAll('link[rel~=icon]')].map(it => it.href)")
    ours = (ROOT / "penstock" / "dashboard" / "assets" / "favicon.svg").read_text(encoding="utf-8")
    assert unquote(icon) == f"data:image/svg+xml,{ours.strip()}"


def test_light_and_dark_are_remembered(broker: BrokerProcess, visit: Visit) -> None:
    page = visit(broker, alone=True)
    button = page.locator("[data-ps-theme]")
    expect(button).to_have_attribute("aria-label", "Colours: Auto. Change.")
    button.click()
    button.click()
    expect(button).to_have_attribute("aria-label", "Colours: Dark. Change.")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    expect(button).to_have_text("Dark")
    assert page.evaluate("document.body.classList.contains('body--dark')")


def test_what_is_not_there(broker: BrokerProcess, visit: Visit) -> None:
    page = visit(broker, "/no/such/page", forgive=["404"])
    expect(page.get_by_role("heading", name="There is nothing at this address")).to_be_visible()
    axe(page)
    page.get_by_role("link", name="See all queues").click()
    page.wait_for_url("**/")
