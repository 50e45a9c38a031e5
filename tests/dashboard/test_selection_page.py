"""What is ticked in a list of messages, and what is done with it: each time with a question, and a result."""

from base64 import b64decode

import pytest
from playwright.sync_api import Locator, Page, expect

from penstock.common.tokens import hash_token, new_token
from tests.dashboard.conftest import StartBroker, Visit, axe, everybody, resize, until
from tests.http.api import Api
from tests.http.morgue import path_of, reject, send
from tests.server.harness import BrokerProcess

VALUES = [b"zero", b"one", b"two", b"three", b"four"]


def box(page: Page, key: str) -> Locator:
    return page.get_by_role("checkbox", name=f"Select {key}", exact=True)


def bar(page: Page) -> Locator:
    return page.get_by_role("group", name="Selected messages")


def toast(page: Page) -> Locator:
    return page.locator(".ps-toast")


def values(api: Api, queue: str) -> list[bytes]:
    """Of those that wait."""
    told = api.get(path_of(queue, "messages"), state="ready")["messages"]
    return [b64decode(message["value_base64"]) for message in told]


def state(page: Page, key: str) -> str:
    return page.locator(f'tr[data-key="{key}"] [data-column="state"] .ps-badge').first.inner_text()


@pytest.mark.long
def test_ticking(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    send(api, "ticks", VALUES)
    page = visit(broker, "/queue/ticks?part=messages&newest=false")
    expect(bar(page)).to_be_hidden()
    box(page, "ticks:1").check()
    expect(bar(page)).to_contain_text("1 selected")
    box(page, "ticks:3").click(modifiers=["Shift"])
    expect(bar(page)).to_contain_text("3 selected")
    everybody(page)
    bar(page).get_by_role("button", name="Select all").click()
    expect(bar(page)).to_contain_text("5 selected")
    resize(page, 1280)
    box(page, "ticks:2").uncheck()
    expect(bar(page)).to_contain_text("4 selected")
    page.get_by_role("checkbox", name="All that are shown").check()
    expect(bar(page)).to_contain_text("5 selected")
    bar(page).get_by_role("button", name="Clear").click()
    expect(bar(page)).to_be_hidden()
    # By keyboard as well.
    box(page, "ticks:0").focus()
    page.keyboard.press("Space")
    expect(bar(page)).to_contain_text("1 selected")


def test_copies_and_moves_to_another_queue(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    send(api, "from.a", VALUES)
    send(api, "from.b", VALUES[:1])
    page = visit(broker, "/search?queues=from.*&newest=false")
    box(page, "from.a:1").check()
    box(page, "from.b:0").check()
    bar(page).get_by_role("button", name="Copy to…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Copy 2 messages")
    expect(dialog).to_contain_text("Of 2 queues (from.a, from.b): 2 ready.")
    expect(dialog.get_by_label("To the queue")).to_be_focused()
    axe(page)
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    expect(toast(page)).to_contain_text("2 messages copied to there")
    assert values(api, "there") == [b"one", b"zero"]
    assert len(values(api, "from.a")) == 5
    expect(bar(page)).to_be_hidden()
    box(page, "from.a:0").check()
    box(page, "from.a:2").click(modifiers=["Shift"])
    bar(page).get_by_role("button", name="Move to…").click()
    expect(dialog).to_contain_text("Move 3 messages")
    dialog.get_by_label("To the queue").fill("from.a")
    dialog.get_by_role("button", name="Move", exact=True).click()
    expect(toast(page).last).to_contain_text("the same queue")  # Nothing is done, and the API says why.
    assert len(values(api, "from.a")) == 5
    box(page, "from.a:0").check()
    box(page, "from.a:2").click(modifiers=["Shift"])
    bar(page).get_by_role("button", name="Move to…").click()
    dialog.get_by_label("To the queue").fill("there")
    dialog.get_by_role("button", name="Move", exact=True).click()
    until(lambda: state(page, "from.a:0") == "gone", "the rows to say how they stand")
    assert values(api, "from.a") == [b"three", b"four"]
    assert sorted(values(api, "there")) == sorted([b"one", b"zero", *VALUES[:3]])


def test_withdraws_what_nobody_holds(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    send(api, "out", VALUES)
    page = visit(broker, "/queue/out?part=messages")
    page.get_by_role("checkbox", name="All that are shown").check()
    (held,) = api.post(path_of("out", "take"))["messages"]
    bar(page).get_by_role("button", name="Withdraw…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Of out: 5 ready. Nobody will get them any more")
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_be_hidden()
    assert len(values(api, "out")) == 4
    bar(page).get_by_role("button", name="Withdraw…").click()
    dialog.get_by_role("button", name="Withdraw 5").click()
    expect(toast(page)).to_contain_text("4 messages withdrawn; 1 could not be")
    until(lambda: state(page, "1") == "gone", "the list to be read again")
    assert state(page, str(held["offset"])) == "held"
    assert api.get(path_of("out"))["ready"] == 0


def test_redrives_the_dead_ones(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    reject(broker, api, "mixed", VALUES[:3])
    send(api, "mixed", VALUES[3:])
    page = visit(broker, "/queue/mixed?part=messages&newest=false")
    for offset in (0, 2, 3):
        box(page, f"mixed:{offset}").check()
    bar(page).get_by_role("button", name="Redrive…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Of mixed: 2 dead, 1 ready.")
    dialog.get_by_role("button", name="Redrive 3").click()
    expect(toast(page)).to_contain_text("2 messages redriven; 1 could not be")
    until(lambda: [state(page, f"mixed:{at}") for at in range(3)] == ["ready", "dead", "ready"], "both")
    # From the list of dead letters, too.
    page = visit(broker, "/queue/mixed?part=dead")
    box(page, "1").check()
    bar(page).get_by_role("button", name="Redrive…").click()
    page.get_by_role("dialog").get_by_role("button", name="Redrive 1").click()
    until(lambda: api.get(path_of("mixed"))["dead"] == 0, "the last one")
    expect(page.get_by_text("No letter is dead.")).to_be_visible()


@pytest.mark.long
def test_edits_and_sends_again(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    headers = {"Penstock-Header-trace": "abc"}
    api.ask("POST", path_of("again", "messages"), b'{"amount": 1.50}', headers)
    api.send("again", b"\xff\x00", b"a\r\nb")
    page = visit(broker, "/queue/again?part=messages")
    box(page, "0").check()
    bar(page).get_by_role("button", name="Edit and send again…").click()
    dialog = page.get_by_role("dialog")
    payload = dialog.get_by_role("textbox", name="Payload")
    expect(payload).to_have_value('{"amount": 1.50}')
    expect(dialog.get_by_label("Name of header 1")).to_have_value("trace")
    assert dialog.get_by_role("radio").count() == 0  # It is no dead letter.
    payload.fill('{"amount": 2}')
    dialog.get_by_role("button", name="Send", exact=True).click()
    expect(dialog).to_contain_text("Stored in again: message 3")
    page.keyboard.press("Escape")
    told = api.get(path_of("again", "messages/3"))
    assert b64decode(told["value_base64"]) == b'{"amount": 2}'
    assert told["headers"] == {"trace": "abc"}
    # Of several there is no such button: a dialog is about one.
    box(page, "1").check()
    expect(bar(page).get_by_role("button", name="Edit and send again…")).to_be_hidden()
    # What cannot stand in a form is sent as it is, to the byte.
    for offset, value in ((1, b"\xff\x00"), (2, b"a\r\nb")):
        page = visit(broker, f"/queue/again?offset={offset}")
        page.get_by_role("button", name="Send again…").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("sent as it is")
        dialog.get_by_role("button", name="Send", exact=True).click()
        expect(dialog).to_contain_text(f"Stored in again: message {offset + 3}")
        told = api.get(path_of("again", f"messages/{offset + 3}"))
        assert b64decode(told["value_base64"]) == value


@pytest.mark.long
def test_repairs_a_dead_letter(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    reject(broker, api, "broken", [b"wrong", b"worse"])
    page = visit(broker, "/queue/broken?offset=0")
    page.get_by_role("button", name="Send again…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("radio", name="Repair the dead letter")).to_be_checked()
    assert not dialog.get_by_label("Time to live").is_visible()  # It keeps what it has.
    axe(page)
    dialog.get_by_role("textbox", name="Payload").fill("right")
    dialog.get_by_role("button", name="Repair and redrive").click()
    expect(dialog).to_contain_text("Back in broken, with this payload: message 0")
    told = api.get(path_of("broken", "messages/0"))
    assert (told["state"], told["repaired"], b64decode(told["value_base64"])) == ("ready", True, b"right")
    page.keyboard.press("Escape")
    # As a new message it leaves the letter where it is.
    page = visit(broker, "/queue/broken?offset=1")
    page.get_by_role("button", name="Send again…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("radio", name="Send it as a new message").check()
    dialog.get_by_role("button", name="Send", exact=True).click()
    expect(dialog).to_contain_text("Stored in broken: message 2")
    assert api.get(path_of("broken", "messages/1"))["state"] == "dead"
    # What somebody has redriven meanwhile is not repaired, and the dialog says so.
    dialog.get_by_role("radio", name="Repair the dead letter").check()
    api.post(path_of("broken", "redrive"), {"ranges": [[1, 2]]})
    dialog.get_by_role("button", name="Repair and redrive").click()
    expect(dialog.get_by_role("alert")).to_contain_text("is no dead letter any more")


@pytest.mark.long
def test_only_what_one_may_do_is_offered(start_broker: StartBroker, visit: Visit) -> None:
    may = {
        "reader": 'rights = [{queues = "*", may = ["read"]}]',
        "sender": 'rights = [{queues = "*", may = ["read", "send"]}]',
        "operator": 'rights = [{queues = "*", may = ["read", "operate"]}]',
        "root": "admin = true",
    }
    offered = {
        "reader": [],
        "sender": ["Copy to…", "Edit and send again…"],
        "operator": ["Redrive…", "Withdraw…", "Edit and send again…"],
        "root": ["Redrive…", "Copy to…", "Move to…", "Withdraw…", "Edit and send again…"],
    }
    tokens = {name: new_token(name) for name in may}
    config = "".join(
        f'[[user]]\nname = "{name}"\ntoken-hash = "{hash_token(token)}"\n{may[name]}\n'
        for name, token in tokens.items()
    )
    broker = start_broker(config=config)
    with Api(broker.ports["http"], tokens["root"]) as api:
        api.send("theirs", b"x")
    for name, buttons in offered.items():
        page = visit(broker, "/sign-in?next=/search%3Fnewest=true", alone=True)
        page.get_by_label("Token").fill(tokens[name])
        page.get_by_role("button", name="Sign in").click()
        page.locator('tr[data-key="theirs:0"]').wait_for()
        assert page.locator(".ps-pick").count() == (2 if buttons else 0)
        if buttons:
            box(page, "theirs:0").check()
            expect(bar(page)).to_contain_text("1 selected")
            expect(bar(page).get_by_role("button")).to_have_text([*buttons, "Select all", "Clear"])
