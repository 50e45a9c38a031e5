"""A page and its broker: what it says when the broker is gone, stopped or slow, and that it comes back."""

import os
import signal
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.dashboard.conftest import StartBroker, Visit, axe, until
from tests.http.api import Api
from tests.server.harness import BrokerProcess

# What a browser writes to its console while nobody answers.
NOBODY = ("WebSocket connection to", "ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE")
LOST = "The link to the broker is lost. This page comes back by itself."


def rows(page: Page) -> list[str]:
    return page.locator("tbody th a").all_inner_texts()


def second_process(broker: BrokerProcess) -> int:
    (pid,) = Path(f"/proc/{broker.pid}/task/{broker.pid}/children").read_text().split()
    return int(pid)


def restart(broker: BrokerProcess, port: int) -> BrokerProcess:
    """The same broker again, at the same address."""
    again = BrokerProcess(broker.folder, "--http", f"127.0.0.1:{port}")
    again.ports = dict(broker.ports)
    return again.start()


@pytest.mark.long
def test_a_page_comes_back_when_the_broker_does(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    port = broker.ports["http"]
    with Api(port) as api:
        api.send("orders", b"one")
    page = visit(broker, "/?q=ord", forgive=NOBODY)
    until(lambda: rows(page) == ["orders"], "the page to be there")
    broker.kill()
    expect(page.get_by_text(LOST)).to_be_visible()
    assert rows(page) == ["orders"]  # what it knew is still there, and marked as old
    assert page.evaluate("document.documentElement.classList.contains('ps-stale')")
    axe(page)
    again = restart(broker, port)
    try:
        expect(page.get_by_text(LOST)).to_be_hidden(timeout=20_000)
        with Api(port) as api:
            api.send("orders.eu", b"two")
        until(lambda: rows(page) == ["orders", "orders.eu"], "the page to live again")
        assert page.url.endswith("/?q=ord")
    finally:
        assert again.stop() == 0


@pytest.mark.long
def test_a_page_whose_visitor_is_forgotten_asks_for_the_token(
    start_broker: StartBroker, tmp_path: Path, visit: Visit
) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text('[[http.tokens]]\nname = "ops"\nrole = "admin"\ntoken = "ops-0123456789abcdef"\n')
    broker = start_broker("--config", str(config))
    page = visit(broker, "/?q=x", forgive=NOBODY, alone=True)
    page.get_by_label("Token").fill("ops-0123456789abcdef")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="No queue yet")).to_be_visible()
    os.kill(second_process(broker), signal.SIGKILL)
    page.wait_for_url("**/sign-in?next=**")
    page.get_by_label("Token").fill("ops-0123456789abcdef")
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/?q=x")
    expect(page.get_by_role("heading", name="No queue yet")).to_be_visible()


@pytest.mark.long
def test_a_page_comes_back_when_only_its_process_was_lost(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    page = visit(broker, forgive=NOBODY)
    expect(page.get_by_role("heading", name="No queue yet")).to_be_visible()
    page.evaluate("window.before = true")
    os.kill(second_process(broker), signal.SIGKILL)
    page.wait_for_function("window.before === undefined")
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"one")
    until(lambda: rows(page) == ["orders"], "the page to live again")


@pytest.mark.long
def test_a_page_tells_of_a_broker_that_does_not_answer(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    page = visit(broker)
    state = page.locator(".ps-state")
    expect(state).to_have_text("Ready")
    broker.signal(signal.SIGSTOP)
    try:
        expect(state).to_have_text("Not ready")
        expect(page.get_by_role("alert").filter(has_text="has not answered")).to_be_visible()
        axe(page)
    finally:
        broker.signal(signal.SIGCONT)
    expect(state).to_have_text("Ready")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_open_pages_do_not_keep_a_broker_from_stopping(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker("--drain-seconds", "10")
    for _ in range(3):
        page = visit(broker, forgive=NOBODY)
        expect(page.get_by_role("heading", name="No queue yet")).to_be_visible()
    broker.signal(signal.SIGTERM)
    assert broker.wait(5) == 0
    assert "Traceback" not in broker.log()
    assert "nicegui" not in broker.log().lower()


@pytest.mark.long
def test_many_pages_read_the_broker_once(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"one")
        pages = [visit(broker) for _ in range(3)]
        for page in pages:
            until(lambda page=page: rows(page) == ["orders"], "the page to be there")  # type: ignore[misc]
        text = api.ask("GET", "/metrics").body.decode()
        (line,) = (line for line in text.splitlines() if line.startswith("penstock_http_event_streams "))
        assert line.split()[1] in ("1", "1.0")
        api.send("mail", b"one")
        for page in pages:
            until(lambda page=page: rows(page) == ["mail", "orders"], "the change in every page")  # type: ignore[misc]
    assert not list(Path(broker.folder).rglob("*nicegui*"))
    assert not (Path(broker.folder) / "data" / "dashboard").exists()
