"""Pages for users who may do only some things, with some queues: what is not theirs is not there."""

import json
import re
import signal

import pytest
from playwright.sync_api import Page, expect

from penstock.client import PhpmqClient
from penstock.common.tokens import hash_token, new_token
from penstock.http.guesses import FREE
from tests.dashboard.conftest import StartBroker, Visit, axe, everybody, until
from tests.http.api import Api
from tests.http.morgue import reject
from tests.server.harness import BrokerProcess

MAY = {
    "reader": ["read"],
    "operator": ["read", "operate"],
    "sender": ["send"],
    "taker": ["receive"],
    "old": ["read"],
}
TOKENS = {name: new_token(name) for name in (*MAY, "root")}


def user(name: str) -> str:
    rights = (
        f'rights = [{{queues = "orders.*", may = {json.dumps(MAY[name])}}}]'
        if name in MAY
        else "admin = true"
    )
    expires = "expires = 2020-01-31" if name == "old" else ""
    return f'[[user]]\nname = "{name}"\ntoken-hash = "{hash_token(TOKENS[name])}"\n{rights}\n{expires}\n'


SETTINGS = "".join(map(user, TOKENS))
ALL = ("Queues", "Search", "Dead letters", "Connections", "Readers", "Engine")
HIDDEN = re.compile("payroll|salaries")


def api_of(broker: BrokerProcess, name: str) -> Api:
    return Api(broker.ports["http"], TOKENS[name])


def sign_in(page: Page, name: str) -> Page:
    page.get_by_label("Token").fill(TOKENS[name])
    page.get_by_role("button", name="Sign in").click()
    page.locator(".ps-state-ok").wait_for()
    return page


def go(page: Page, path: str) -> None:
    page.goto(re.sub("(?<=[0-9])/.*", path, page.url, count=1))
    page.locator(".ps-state-ok").wait_for()


def navigation(page: Page) -> list[str]:
    return page.get_by_role("navigation", name="Pages").get_by_role("link").all_inner_texts()


def buttons(page: Page) -> set[str]:
    """Those that do something to the broker."""
    names = page.locator("#main button:not(th button):visible").all_inner_texts()
    return {name.rstrip("…") for name in names} & {
        *("Pause", "Resume", "Purge", "Delete", "Purge dead letters", "Dry run", "Redrive", "Release")
    }


def only(page: Page, wanted: set[str]) -> None:
    until(lambda: buttons(page) == wanted, f"{wanted} at {page.url}")


@pytest.fixture
def broker(start_broker: StartBroker) -> BrokerProcess:
    """Queues that everybody here may look at, and one that is somebody else's, as busy as they are."""
    broker = start_broker(config=SETTINGS)
    with api_of(broker, "root") as root:
        for queue in ("orders.a", "orders.b", "payroll"):
            reject(broker, root, queue, [b"1"])
            root.send(queue, b'{"n": 2}', b"3", b"4")
        for name, positions in (
            ("mine", {"orders.a": 0}),
            ("theirs", {"orders.a": 0, "payroll": 0}),
            ("salaries", {"payroll": 0}),
        ):
            fields = {"positions": positions, "lease_seconds": 3600}
            assert root.ask("PUT", f"/v1/readers/{name}", fields).status == 200
    return broker


@pytest.mark.parametrize(
    ("name", "head", "dead", "message", "reader"),
    [
        ("reader", set(), set(), set(), set()),
        pytest.param(
            "operator",
            {"Pause"},
            {"Pause", "Dry run", "Redrive"},
            {"Redrive"},
            {"Release"},
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.long
def test_only_what_is_theirs_is_there(
    broker: BrokerProcess,
    visit: Visit,
    name: str,
    head: set[str],
    dead: set[str],
    message: set[str],
    reader: set[str],
) -> None:
    url = f"phpmq://127.0.0.1:{broker.ports['phpmq']}"
    with PhpmqClient(url) as both, PhpmqClient(url) as other:
        assert len(list(both.consume("orders.a", count=1, timeout=10))) == 1
        assert len(list(both.consume("payroll", count=1, timeout=10))) == 1
        assert len(list(other.consume("payroll", count=1, timeout=10))) == 1
        page = sign_in(visit(broker, alone=True, forgive=["403"]), name)
        page.locator('tr[data-key="orders.a"]').wait_for()
        assert navigation(page) == list(ALL)
        assert page.locator("tbody th a").all_inner_texts() == ["orders.a", "orders.b"]
        until(lambda: page.locator('[data-total="dead"]').inner_text() == "2", "the totals of two queues")
        assert page.locator('[data-total="held"]').inner_text() == "1"
        assert page.locator('[data-total="ready"]').inner_text() == "5"
        seen = [page.inner_text("body")]
        for path, sign, wanted in (
            ("/queue/orders.a", "Settings and log", head),
            ("/queue/orders.a?part=dead", "rejected", dead),
            ("/queue/orders.a?offset=0", "Life", message),
            ("/connections", "and has not", set()),
            ("/readers?reader=mine", "Messages, by offset", reader),
            ("/readers?reader=theirs", "1, and 1 that you may not see", set()),
            ("/engine", "theirs", set()),
        ):
            go(page, path)
            if path == "/connections":
                page.locator("tbody tr").wait_for()
            else:
                page.get_by_text(sign).first.wait_for()
            only(page, wanted)
            seen.append(page.inner_text("body"))
            axe(page)
            if path == "/connections":
                assert page.locator("tbody tr").count() == 1
                expect(page.locator('[data-column="consumes"]')).to_have_text(re.compile("^ *orders.a *$"))
                expect(page.locator('[data-column="held"]')).to_have_text("–")  # it has others, too
        assert not any(HIDDEN.search(text) for text in seen)
        for path in (
            "/queue/payroll",
            "/queue/payroll?offset=0",
            "/queue/payroll?part=dead",
            "/queue/nowhere",
        ):
            go(page, path)
            expect(page.get_by_role("heading", name="You may not look at this queue")).to_be_visible()
            expect(page.get_by_text(f"You are signed in as {name}, and may: ")).to_be_visible()
            assert buttons(page) == set()
        go(page, "/audit")
        expect(page.get_by_role("heading", name="This page is for admins")).to_be_visible()
        everybody(page)
    with api_of(broker, "root") as root:
        until(
            lambda: (
                {("payroll", name), ("", name)}
                <= {
                    (it.get("queue"), it.get("who"))
                    for it in root.get("/v1/audit")["lines"]
                    if "call" not in it
                }
            ),
            "what was refused to be in the audit",
        )
    assert "Traceback" not in broker.log()
    assert "cannot read" not in broker.log()


@pytest.mark.long
def test_who_may_read_nothing_is_told_so(broker: BrokerProcess, visit: Visit) -> None:
    page = sign_in(visit(broker, alone=True, forgive=["403", "404"]), "sender")
    for path in ("/", "/connections", "/readers", "/engine"):
        go(page, path)
        expect(page.get_by_role("heading", name="You may look at no queue")).to_be_visible()
        expect(page.get_by_text("You are signed in as sender, and may: send.")).to_be_visible()
        assert navigation(page) == []
        assert page.get_by_role("link", name="See all queues").count() == 0
    everybody(page)
    go(page, "/queue/orders.a")
    expect(page.get_by_role("heading", name="You may not look at this queue")).to_be_visible()
    go(page, "/nothing")
    expect(page.get_by_role("heading", name="There is nothing at this address")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/sign-in")
    assert "cannot read" not in broker.log()


@pytest.mark.long
def test_rights_that_change_change_the_pages_that_are_open(broker: BrokerProcess, visit: Visit) -> None:
    pages = [sign_in(visit(broker, alone=True), name) for name in ("reader", "reader", "root")]
    for page in pages:
        page.locator('tr[data-key="orders.a"]').wait_for()
    # One who leaves takes nothing from their other browser.
    pages[0].get_by_role("button", name="Sign out").click()
    pages[0].wait_for_url("**/sign-in")
    with api_of(broker, "root") as root:
        root.send("orders.c", b"x")
    pages[1].locator('tr[data-key="orders.c"]').wait_for()
    config = broker.folder / "penstock.toml"
    changed = SETTINGS.replace('"orders.*", may = ["read"]', '"orders.c", may = ["read"]')
    config.write_text(changed.replace("admin = true", 'rights = [{queues = "payroll", may = ["read"]}]'))
    broker.signal(signal.SIGHUP)
    for page, queue in ((pages[1], "orders.c"), (pages[2], "payroll")):
        expect(page.locator("tbody th a")).to_have_text([queue])
        page.locator(".ps-state-ok").wait_for()
        assert navigation(page) == list(ALL)


@pytest.mark.long
def test_connections_show_users_where_there_are_some(broker: BrokerProcess, visit: Visit) -> None:
    with PhpmqClient(f"phpmq://127.0.0.1:{broker.ports['phpmq']}"), api_of(broker, "taker") as taker:
        page = sign_in(visit(broker, "/connections", alone=True), "root")
        until(lambda: page.locator("tbody tr").count() == 1, "a connection of nobody in particular")
        heads = page.get_by_role("columnheader")
        assert "User" not in heads.all_inner_texts()
        assert len(taker.post("/v1/queues/orders.a/take")["messages"]) == 1
        users = page.locator('tbody [data-column="user"]')
        until(lambda: sorted(users.all_inner_texts()) == ["taker", "–"], "who took a message")
        assert heads.all_inner_texts()[3] == "User"
        page.get_by_role("searchbox").fill("taker")
        assert users.all_inner_texts() == ["taker"]
        everybody(page)


@pytest.mark.long
def test_the_sign_in_page_says_what_is_wrong(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker(config=SETTINGS)
    page = visit(broker, alone=True, forgive=["401", "429"])

    def told(token: str) -> str:
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_load_state()
        return page.get_by_role("alert").inner_text()

    assert told(TOKENS["old"]) == "The time of user 'old' was over on 2020-01-31 00:00 UTC."
    axe(page)
    for number in range(FREE):
        assert told(f"reader.{number}") == "This token is not known here."
    assert re.fullmatch(
        "Too many wrong tokens came from here, or for this user; try again in [0-9]+ s.", told("reader.more")
    )
    axe(page)
