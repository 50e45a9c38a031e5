"""Sending from the page: what is typed is judged, what is sent is what was typed, and there is a receipt."""

from base64 import b64decode

import pytest
from playwright.sync_api import Locator, Page, expect

from penstock.common.tokens import hash_token, new_token
from penstock.dashboard.sending import EDIT_BYTES_MAX
from tests.dashboard.conftest import StartBroker, Visit, axe, everybody, until
from tests.http.api import Api
from tests.http.morgue import path_of
from tests.server.harness import BrokerProcess


def dialog_of(page: Page) -> Locator:
    page.get_by_role("button", name="Send a message…").click()
    return page.get_by_role("dialog")


def message(api: Api, queue: str, offset: int = 0) -> dict[str, object]:
    told: dict[str, object] = api.get(path_of(queue, f"messages/{offset}"))
    return told


def value(told: dict[str, object]) -> bytes:
    return b64decode(str(told["value_base64"]))


def test_a_message_by_hand_and_its_receipt(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    api.send("first", b"x")
    page = visit(broker, "/")
    dialog = dialog_of(page)
    expect(dialog.get_by_label("Queue")).to_be_focused()
    dialog.get_by_label("Queue").fill("by/hand")
    payload = dialog.get_by_role("textbox", name="Payload")
    payload.fill('{"order": 4711, "note": "caf')
    expect(dialog).to_contain_text("28 B, no JSON:")  # as it is typed
    go = dialog.get_by_role("button", name="Send", exact=True)
    expect(go).to_be_disabled()
    axe(page)
    text = '{"order": 4711,\n "note": "café", "amount": 1.50}'
    payload.fill(text)
    expect(dialog).to_contain_text(f"{len(text.encode())} B, JSON")
    dialog.get_by_role("button", name="Add a header").click()
    page.keyboard.type("Trace")  # which has the keyboard then
    dialog.get_by_label("Value of header 1").fill(" <b>1</b>")
    dialog.get_by_label("Delay").fill("90000")
    dialog.get_by_label("Time to live").fill("100000")
    go.click()
    expect(dialog).to_contain_text("Stored in by/hand: message 0")
    told = message(api, "by/hand")
    assert value(told) == text.encode()
    assert told["headers"] == {"Trace": " <b>1</b>"}
    assert told["state"] == "delayed"
    assert 99_000 < int(str(told["ttl"])) <= 100_000
    everybody(page)
    dialog.get_by_role("link", name="message 0").click()
    expect(page.get_by_role("heading", name="Message 0")).to_be_visible()
    expect(page.locator(".ps-headers")).to_contain_text("Trace")


@pytest.mark.long
def test_on_the_page_of_a_queue(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    page = visit(broker, "/queue/soon", forgive=["404"])
    dialog = dialog_of(page)
    payload = dialog.get_by_role("textbox", name="Payload")
    expect(payload).to_be_focused()
    expect(dialog.get_by_label("Queue")).to_have_value("soon")
    # What begins like JSON is taken for it, unless somebody says that it is text.
    payload.fill("[not JSON")
    go = dialog.get_by_role("button", name="Send", exact=True)
    expect(go).to_be_disabled()
    dialog.get_by_role("button", name="Text", exact=True).click()
    expect(go).to_be_enabled()
    payload.press("Control+Enter")
    # The page of the queue comes by itself, as it does for everybody who looks at it.
    expect(page.locator('[data-number="ready"]')).to_have_text("1")
    assert value(message(api, "soon")) == b"[not JSON"
    # Several in a row, and a click beside the dialog loses nothing.
    dialog = dialog_of(page)
    payload = dialog.get_by_role("textbox", name="Payload")
    payload.fill("two")
    go = dialog.get_by_role("button", name="Send", exact=True)
    go.click()
    expect(dialog).to_contain_text("Stored in soon: message 1")
    payload.fill("three")
    page.mouse.click(5, 5)
    go.click()
    expect(dialog).to_contain_text("Stored in soon: message 2")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    until(lambda: page.locator(".q-dialog").count() == 0, "the dialog to be gone")
    assert [value(message(api, "soon", at)) for at in (1, 2)] == [b"two", b"three"]


@pytest.mark.long
def test_what_is_refused_stands_in_the_dialog(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    api.send("strict", b"x")
    page = visit(broker, "/queue/strict")
    dialog = dialog_of(page)
    payload = dialog.get_by_role("textbox", name="Payload")
    payload.fill("typed")
    go = dialog.get_by_role("button", name="Send", exact=True)
    dialog.get_by_label("Queue").fill("strict.dead")
    go.click()
    expect(dialog.get_by_role("alert")).to_contain_text("is the door to the dead letters of 'strict'")
    dialog.get_by_label("Queue").fill("strict")
    for _ in range(2):
        dialog.get_by_role("button", name="Add a header").click()
        page.keyboard.type("same")
    go.click()
    expect(dialog.get_by_role("alert")).to_contain_text("The header 'same' is there twice")
    axe(page)
    dialog.get_by_role("button", name="Remove header 2").click()
    payload.fill("y" * 1_000_000)
    go.click()
    expect(dialog.get_by_role("alert")).to_contain_text("more than a page can send")
    assert api.get(path_of("strict"))["offset_end"] == 1
    payload.fill("z" * 2 * EDIT_BYTES_MAX)
    go.click()
    expect(dialog).to_contain_text("Stored in strict: message 1")
    assert value(message(api, "strict", 1)) == b"z" * 2 * EDIT_BYTES_MAX


@pytest.mark.long
def test_only_those_who_may_send_are_offered_it(start_broker: StartBroker, visit: Visit) -> None:
    tokens = {name: new_token(name) for name in ("reader", "sender", "root")}
    may = {
        "reader": 'rights = [{queues = "*", may = ["read"]}]',
        "sender": 'rights = [{queues = "*", may = ["read"]}, {queues = "mine.*", may = ["send"]}]',
        "root": "admin = true",
    }
    config = "".join(
        f'[[user]]\nname = "{name}"\ntoken-hash = "{hash_token(token)}"\n{may[name]}\n'
        for name, token in tokens.items()
    )
    broker = start_broker(config=config)
    with Api(broker.ports["http"], tokens["root"]) as api:
        api.send("other", b"x")
        api.send("mine.one", b"x")

        def enter(name: str, path: str) -> Page:
            page = visit(broker, "/sign-in", alone=True, forgive=["403"])
            page.get_by_label("Token").fill(tokens[name])
            page.get_by_role("button", name="Sign in").click()
            page.locator(".ps-live-table").wait_for()
            page.goto(page.url.rstrip("/") + path)
            return page

        for name, path, offered in (
            ("reader", "/", 0),
            ("reader", "/queue/other", 0),
            ("sender", "/queue/other", 0),
            ("sender", "/queue/mine.one", 1),
        ):
            page = enter(name, path)
            page.locator(".ps-live-table, .ps-numbers").first.wait_for()
            assert page.get_by_role("button", name="Send a message…").count() == offered, (name, path)
        page = enter("sender", "/")
        dialog = dialog_of(page)
        # Of the queues that there are, those are proposed that one may send to.
        expect(dialog.locator("datalist option")).to_have_count(1)
        expect(dialog.locator("datalist option")).to_have_attribute("value", "mine.one")
        dialog.get_by_role("textbox", name="Payload").fill("x")
        dialog.get_by_label("Queue").fill("other")
        go = dialog.get_by_role("button", name="Send", exact=True)
        go.click()
        expect(dialog.get_by_role("alert")).to_contain_text("send")
        dialog.get_by_label("Queue").fill("mine.two")
        go.click()
        expect(dialog).to_contain_text("Stored in mine.two: message 0")
        assert api.get(path_of("other"))["offset_end"] == 1
