"""The search in a browser: results as they are found, how far it got, a link that repeats it, and files."""

import csv
import io
import json
import shlex
import subprocess
import sys
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from playwright.sync_api import Page, expect

from penstock.common.tokens import hash_token, new_token
from penstock.dashboard.finding import ROWS, Query
from tests.dashboard.conftest import StartBroker, Visit, axe, everybody, until
from tests.http.api import NDJSON, Api
from tests.http.morgue import path_of, reject, send
from tests.server.harness import BrokerProcess

ORDERS = [
    b'{"order": 1, "region": "north", "note": "=1+1"}',
    b'{"order": 2, "region": "south"}',
    b'{"order": 3, "region": "north"}',
    b"no JSON",
]


def keys(page: Page) -> list[str]:
    rows = page.locator(".ps-messages tbody tr")
    return list(map(str, rows.evaluate_all("rows => rows.map(row => row.dataset.key)")))  # at one moment


def status(page: Page) -> str:
    return page.locator(".ps-search-status").inner_text()


def path(page: Page) -> str:
    return page.url[page.url.index("/", 8) :]


def test_queries_are_addresses() -> None:
    """All of a search is in its address, and comes back from there."""
    query = Query("", "orders.*", "value.a = 'b&c'", ("ready", "dead"), "-1h", "12", newest=False)
    assert query.href == (
        "/search?queues=orders.%2A&where=value.a+%3D+%27b%26c%27&state=ready%2Cdead&from=-1h&to=12&newest=false"
    )
    assert Query.of(query.words()) == query
    of_one = Query("a/b", "", "", (), "", "", newest=True)
    assert of_one.href == "/queue/a%2Fb?part=messages&newest=true"
    assert Query.of(of_one.words(), "a/b") == of_one
    assert Query.of({}) is None  # Nobody has asked for anything.
    assert Query.of({"state": "dead"}) == Query(states=("dead",))
    assert Query.of({"state": "dead"}, "one") is None  # That is the list of its messages.
    asked = Query.of({"newest": "yes", "state": "dead,wrong", "queues": "x"}, "one")
    assert asked == Query("one", states=("dead",))


def test_many_queues_by_condition_state_and_time(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    send(api, "find.a", ORDERS)
    reject(broker, api, "find.b", ORDERS)
    send(api, "other", ORDERS)
    page = visit(broker, "/search")
    expect(page.get_by_role("link", name="Search")).to_have_attribute("aria-current", "page")
    page.get_by_label("Queue or pattern").fill("find.*")
    page.get_by_label("Condition").fill("value.region = 'north'")
    page.keyboard.press("Enter")
    until(lambda: keys(page) == ["find.a:2", "find.a:0", "find.b:2", "find.b:0"], "the newest of each first")
    until(lambda: status(page) == "4 found, 8 searched.", "how far it got")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    page.get_by_role("checkbox", name="Dead").check()
    page.get_by_role("checkbox", name="Newest first").uncheck()
    page.get_by_label("From").fill("-1h")
    page.get_by_role("button", name="Search", exact=True).click()
    until(lambda: keys(page) == ["find.b:0", "find.b:2"], "the dead ones, oldest first")
    expect(page.locator('tr[data-key="find.b:0"] .ps-badge')).to_have_text(["dead", "rejected"])
    everybody(page)
    # So does a terminal.
    page.get_by_text("The same in a terminal").click()
    command = shlex.split(page.locator(".ps-terminal pre").last.inner_text())
    assert command[0] == "penstock"
    done = subprocess.run(
        [sys.executable, "-m", *command, "--json"], capture_output=True, text=True, check=True, timeout=60
    )
    assert [json.loads(line)["offset"] for line in done.stdout.splitlines()] == [0, 2]
    # The address repeats it, with everything.
    again = visit(broker, path(page))
    until(lambda: keys(again) == ["find.b:0", "find.b:2"], "the same search")
    expect(again.get_by_label("Queue or pattern")).to_have_value("find.*")
    expect(again.get_by_label("Condition")).to_have_value("value.region = 'north'")
    expect(again.get_by_role("checkbox", name="Dead")).to_be_checked()
    expect(again.get_by_role("checkbox", name="Newest first")).not_to_be_checked()
    expect(again.get_by_label("From")).to_have_value("-1h")
    again.get_by_label("Condition").fill("value.region = 'nowhere'")
    again.keyboard.press("Enter")
    expect(again.get_by_text("Nothing was found.")).to_be_visible()
    # A row leads to its message.
    page.locator('tr[data-key="find.b:2"] a').click()
    expect(page.get_by_role("heading", name="Message 2")).to_be_visible()


def test_in_a_queue(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    send(api, "within", ORDERS)
    page = visit(broker, "/queue/within?part=messages")
    page.get_by_role("navigation", name="Ways to messages").get_by_role("link", name="Search").click()
    page.get_by_label("Condition").fill("value like '%JSON%'")

    def found() -> bool:
        page.get_by_label("Condition").press("Enter")  # Before the page listens, nobody hears it.
        return keys(page) == ["within:3"]

    until(found, "what was looked for")
    assert path(page).startswith("/queue/within?part=messages&where=")
    assert page.get_by_label("Queue or pattern").count() == 0
    everybody(page)
    page.reload()
    until(lambda: keys(page) == ["within:3"], "the same after a reload")
    page.get_by_role("link", name="Browse").click()
    until(lambda: len(keys(page)) == 4, "all of them")


def test_what_is_wrong_stands_at_the_condition(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    send(api, "wrongly", ORDERS)
    page = visit(broker, "/search?queues=wrongly&where=valu+%3D+1&newest=true")
    wrong = page.locator("#ps-where-wrong")
    expect(wrong).to_contain_text("valu")
    expect(page.get_by_label("Condition")).to_have_attribute("aria-invalid", "true")
    axe(page)
    page.get_by_label("Condition").fill("")
    page.get_by_label("From").fill("yesterday, or so")
    page.keyboard.press("Enter")
    expect(wrong).to_contain_text("2026-11-15")  # what would be right
    page.get_by_label("From").fill("2")
    page.keyboard.press("Enter")
    until(lambda: keys(page) == ["wrongly:3", "wrongly:2"], "those from an offset on")
    expect(wrong).to_be_empty()


def test_a_search_of_many_goes_on_and_can_be_stopped(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    lines = b"".join(b'{"value": "%d"}\n' % at for at in range(2 * ROWS + 50))
    api.ask("POST", path_of("many", "batch"), lines, {"Content-Type": NDJSON})
    page = visit(broker, "/queue/many?part=messages&newest=false")
    until(lambda: len(keys(page)) == ROWS, "the first of them")
    until(lambda: status(page).startswith(f"There is more. {ROWS} found"), "that there are more")
    page.get_by_role("button", name="Go on").click()
    until(lambda: len(keys(page)) == 2 * ROWS, "more of them")
    page.get_by_role("button", name="Go on").click()
    until(lambda: len(keys(page)) == 2 * ROWS + 50, "all of them")
    assert keys(page) == [f"many:{at}" for at in range(2 * ROWS + 50)]
    expect(page.get_by_role("button", name="Go on")).to_be_hidden()


@pytest.mark.long
def test_stop_ends_the_search_at_the_api(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    """A search that takes long says how far it is; Stop ends it, and leaving its page does."""
    line = json.dumps({"value": "ay" * 150_000}).encode() + b"\n"
    reply = api.ask("POST", path_of("slow", "batch"), line * 48, {"Content-Type": NDJSON})
    assert reply.status == 200
    # A part of a second for each of them, and on a busy machine still less than a condition may take.
    where = quote(" or ".join(f"value like '%_y_{'z' * at}%'" for at in range(1, 8)))
    page = visit(broker, f"/search?queues=slow&where={where}&newest=true")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    until(lambda: " of about 48 searched, now at " in status(page), "how far it is")
    axe(page)
    page.get_by_role("button", name="Stop").click()
    until(lambda: status(page).startswith("Stopped. 0 found, "), "the end")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    # Nobody has more than four at a time: these would be refused if the ended ones went on.
    for _ in range(5):
        page.get_by_role("button", name="Search", exact=True).click()
        until(lambda: "of about 48" in status(page) and "Stopped" not in status(page), "the next one")
    assert page.locator(".ps-toast").count() == 0


@pytest.mark.parametrize("form", ["NDJSON", "CSV", "Parquet"])
@pytest.mark.long
def test_exports(broker: BrokerProcess, api: Api, visit: Visit, form: str) -> None:
    queue = f"export.{form}"
    send(api, queue, ORDERS)
    api.send(queue, b"y" * 10_000)
    page = visit(broker, f"/search?queues={queue}&where=value_bytes+%3E+8&newest=false")
    until(lambda: len(keys(page)) == 4, "what was found")
    with page.expect_download() as download:
        page.get_by_role("link", name=form, exact=True).click()
    assert download.value.suggested_filename == f"messages.{form.lower()}"
    content = download.value.path().read_bytes()
    wanted = [*ORDERS[:3], b"y" * 10_000]
    if form == "NDJSON":
        *rows, end = map(json.loads, content.splitlines())
        assert end["end"]["complete"]
        found = [row["value"].encode() for row in rows]
    elif form == "CSV":
        found = [row["value"].encode() for row in csv.DictReader(io.StringIO(content.decode()))]
    else:
        found = pq.read_table(pa.BufferReader(content))["value"].to_pylist()
    assert found == wanted  # whole, however long


@pytest.mark.long
def test_visitors_find_and_export_what_they_may_read(start_broker: StartBroker, visit: Visit) -> None:
    token, root = new_token("reader"), new_token("root")
    broker = start_broker(
        config=f'[[user]]\nname = "reader"\ntoken-hash = "{hash_token(token)}"\n'
        'rights = [{queues = "mine.*", may = ["read"]}]\n'
        f'[[user]]\nname = "root"\ntoken-hash = "{hash_token(root)}"\nadmin = true\n'
    )
    with Api(broker.ports["http"], root) as api:
        api.send("mine.one", b"seen")
        api.send("secret", b"hidden")
    page = visit(broker, "/sign-in?next=/search%3Fnewest=true", alone=True)
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    until(lambda: keys(page) == ["mine.one:0"], "what is theirs")
    until(lambda: status(page) == "1 found, 1 searched.", "nothing else to be counted")
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    text = download.value.path().read_text()
    assert "seen" in text
    assert "secret" not in text
    # Of a queue that is not theirs there is nothing, and nobody without a session gets anything.
    base = f"http://127.0.0.1:{broker.ports['http']}"
    reply = page.request.get(f"{base}/export?format=csv&queue=secret&newest=true")
    assert reply.status == 403
    assert page.request.get(f"{base}/export?format=exe&newest=true").status == 400
    with Api(broker.ports["http"]) as stranger:
        assert stranger.ask("GET", "/export?format=csv&newest=true").status == 401
