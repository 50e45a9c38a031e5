"""What needs attention, as pages show it: at the head of the first, as badges, on the queue's own page and
the engine's, and in a bar on every other one."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.dashboard.conftest import Visit, everybody
from tests.http.api import Api
from tests.http.test_rights import SETTINGS, TOKENS, as_user
from tests.server.harness import BrokerProcess, until


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    flags = ("--http", "127.0.0.1:0", "--http-health-seconds", "1")
    broker = BrokerProcess(tmp_path_factory.mktemp("attention"), *flags).start()
    yield broker
    broker.kill()


def hold(api: Api, queue: str) -> None:
    api.send(queue, b"x")
    api.post(f"/v1/queues/{queue}/take", lease=600)


def region(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=name, exact=True)


def test_a_broker_that_is_well_says_nothing(broker: BrokerProcess, visit: Visit) -> None:
    for path in ("/", "/connections", "/engine"):
        page = visit(broker, path)
        expect(page.locator(".ps-state")).to_have_text("Ready")
        expect(page.locator(".ps-findings")).to_be_hidden()
        expect(page.locator(".ps-attention")).to_be_hidden()


@pytest.mark.long
def test_what_is_wrong_is_on_every_page(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    page = visit(broker, "/")
    hold(api, "stuck")
    api.send("<b>lonely</b>", b"x")
    attention = region(page, "Needs attention")
    stuck = region(page, "stuck: Nothing is settled")
    expect(stuck).to_contain_text("1 message is held, and none was settled for ")
    expect(stuck).to_contain_text("Who: http:127.0.0.1:")
    expect(stuck).to_contain_text("Look at the consumers that hold them")
    expect(stuck).to_contain_text("for ")
    expect(region(page, "<b>lonely</b>: Nobody consumes it")).to_be_visible()
    expect(attention.locator(".ps-alert").first).to_contain_text("stuck")  # what is bad comes first
    badges = page.get_by_role("row").filter(has_text="stuck").locator(".ps-badge")
    expect(badges).to_have_text(["stalled"])
    expect(page.locator(".ps-attention")).to_be_hidden()
    everybody(page)
    stuck.get_by_role("link").click()
    page.wait_for_url("**/queue/stuck")
    expect(region(page, "stuck: Nothing is settled")).to_be_visible()
    bar = page.locator(".ps-attention")
    expect(bar).to_have_text("Needs attention: stuck: Nothing is settled, and 1 more")
    everybody(page)
    for path in ("/connections", "/readers", "/engine", "/queue/nothing"):
        other = visit(broker, path, forgive=["404"])
        expect(other.locator(".ps-attention")).to_have_text(
            "Needs attention: stuck: Nothing is settled, and 1 more"
        )
        expect(other.locator(".ps-findings")).to_be_hidden()
    bar.get_by_role("link").click()
    page.wait_for_url("**/#attention")
    expect(attention).to_be_visible()
    api.ask("DELETE", "/v1/queues/stuck", force=True)
    expect(stuck).to_be_hidden()
    expect(attention).to_be_visible()
    api.ask("DELETE", "/v1/queues/%3Cb%3Elonely%3C%2Fb%3E", force=True)
    expect(attention).to_be_hidden()


@pytest.mark.long
def test_many_findings_leave_room_for_the_rest(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    names = [f"many-{number}" for number in range(7)]
    for name in names:
        api.send(name, b"x")
    page = visit(broker, "/")
    more = page.get_by_text("3 more", exact=True)
    expect(more).to_be_visible()
    assert page.locator(".ps-alert:visible").count() == 4
    more.click()
    until(lambda: page.locator(".ps-alert:visible").count() == 7, "all of them")
    first = page.locator(".ps-alert").first
    since = first.locator(".ps-alert-since")
    before = since.inner_text()
    until(lambda: since.inner_text() != before, "the time to go on")
    assert page.locator(".ps-alert:visible").count() == 7, "what was open has closed"
    for name in names:
        api.ask("DELETE", f"/v1/queues/{name}")


@pytest.mark.long
def test_nobody_sees_what_they_may_not_read(tmp_path_factory: pytest.TempPathFactory, visit: Visit) -> None:
    folder = tmp_path_factory.mktemp("rights")
    (folder / "penstock.toml").write_text(SETTINGS)
    flags = ("--http", "127.0.0.1:0", "--http-health-seconds", "1", "--config", str(folder / "penstock.toml"))
    broker = BrokerProcess(folder, *flags).start()
    try:
        with as_user(broker, "root") as root:
            root.send("orders.a", b"x")
            hold(root, "payroll")
            until(lambda: root.get("/v1/health")["bad"] == 1, "it to be told")
        page = visit(broker, "/sign-in", alone=True)
        page.get_by_label("Token").fill(TOKENS["read"])
        page.get_by_role("button", name="Sign in").click()
        expect(region(page, "orders.a: Nobody consumes it")).to_be_visible()
        assert "payroll" not in page.content()
        page.goto(page.url.rstrip("/") + "/connections")
        expect(page.locator(".ps-attention")).to_have_text("Needs attention: orders.a: Nobody consumes it")
    finally:
        broker.kill()
