"""A message's page: its life is the API's events, its payload stays text, whatever it is."""

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from penstock.dashboard.message_life import STEPS_FIRST, STEPS_LAST, steps_of
from tests.dashboard.conftest import Visit, axe, everybody, until
from tests.http.api import NDJSON, Api
from tests.http.morgue import path_of, phpmq, reject, take
from tests.server.harness import WAIT_SECONDS, BrokerProcess

WILD = (
    "<script>alert(1)</script><img src=x onerror=alert(1)> {{7*7}} ${7*7} "
    '<a href="javascript:alert(1)">here</a> \u202egnirts\u202c \x1b[31mred\x00 \u200bzero'
)


def steps(page: Page) -> list[str]:
    return [str(item.get_attribute("data-event")) for item in page.locator(".ps-life > li").all()]


def shown(page: Page) -> str:
    return page.locator(".ps-payload").inner_text()


# --- its life ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_life_that_is_drawn_is_what_happened(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    api.send("life", b'{"order": 4711}')
    take(broker, "life", 1)
    take(broker, "life", 1, lambda message: message.requeue())
    take(broker, "life", 1, lambda message: message.reject())
    page = visit(broker, "/queue/life?offset=0")
    told = api.get(path_of("life", "messages/0"))
    events = [event["event"] for event in told["history"]]
    assert events == ["accepted", "returned", "requeued", "dead"]
    assert steps(page) == ["accepted", "held", "returned", "held", "requeued", "held", "dead", "now"]
    items = page.locator(".ps-life > li")
    for item, event in zip(
        [it for it in items.all() if it.get_attribute("data-event") not in ("held", "now")],
        told["history"],
        strict=True,
    ):
        moment = item.locator("time").get_attribute("datetime") or ""
        assert moment[:23] == event["time"][:23]
        if event["reason"]:
            expect(item).to_contain_text(event["reason"])
    for at, item in enumerate(it for it in items.all() if it.get_attribute("data-event") == "held"):
        expect(item).to_contain_text(f"attempt {at + 1}")
        expect(item).to_contain_text(told["history"][at + 1]["consumer"])
        expect(item).to_contain_text("held for")
    expect(items.first).to_contain_text("through http")
    expect(items.first).to_contain_text("waited")
    expect(items.last).to_contain_text("Is a dead letter")
    axe(page)
    # By click it goes back, and what happens to it then is drawn by itself.
    page.get_by_role("button", name="Redrive", exact=True).click()
    until(lambda: steps(page)[-2:] == ["redriven", "now"], "the redrive to be drawn")
    assert api.get(path_of("life"))["dead"] == 0
    expect(page.get_by_role("button", name="Redrive", exact=True)).to_be_hidden()
    with phpmq(broker) as mq:
        message = next(mq.consume("life", prefetch=1, count=1, timeout=WAIT_SECONDS))
        expect(page.locator('[data-event="now"]')).to_contain_text("Is with its consumer")
        holder = api.get(path_of("life", "messages/0"))["consumer"]
        expect(page.locator('[data-event="now"]')).to_contain_text(holder)
        message.ack()
    until(lambda: steps(page)[-2:] == ["held", "acked"], "its end to be drawn")
    expect(page.locator(".ps-queue-title .ps-badge")).to_have_text("gone")


def event(name: str, at: int, **more: Any) -> dict[str, Any]:
    given = {"reason": None, "consumer": None, "attempt": 0, "dispatched": None}
    return {"event": name, "time": f"2026-11-15T{at // 60:02d}:{at % 60:02d}:00.500Z", **given, **more}


def life(state: str, *history: dict[str, Any], consumer: str | None = None) -> list[tuple[str, str]]:
    message = {"state": state, "consumer": consumer, "protocol": "rq", "history": history, "due": None}
    return [(step.event, step.between) for step in steps_of(message, 1794787200.0)]


def test_what_was_between_two_steps() -> None:
    held = {"consumer": "c", "attempt": 1, "dispatched": "2026-11-15T10:00:00.500Z"}
    assert life(
        "gone",
        event("accepted", 0),
        event("delayed", 540, reason="lease-ended", **{**held, "dispatched": "2026-11-15T08:00:00.500Z"}),
        event("dead", 602, reason="rejected", **held),
        event("returned", 720, consumer="d", attempt=1, dispatched="2026-11-15T11:00:00.500Z"),
        event("withdrawn", 780, reason="purged"),
    ) == [
        ("accepted", "waited 8 h"),
        ("held", "held for 1 h"),
        ("delayed", "waited 1 h"),
        ("held", "held for 2 min"),
        ("dead", "dead for 58 min"),
        ("held", "held for 1 h"),
        ("returned", "dead for 1 h"),
        ("withdrawn", ""),
    ]
    assert life("ready", event("accepted", 0))[-1] == ("now", "")


def test_a_very_long_life_is_shortened() -> None:
    history = [event("accepted", 0)]
    for at in range(1, 400):
        history.append(event("returned", at, consumer="c", attempt=at, dispatched=history[-1]["time"]))
    drawn = life("ready", *history)
    assert len(drawn) == STEPS_FIRST + 1 + STEPS_LAST
    assert drawn[STEPS_FIRST][0] == "left-out"
    assert (drawn[0][0], drawn[-1][0]) == ("accepted", "now")


@pytest.mark.long
def test_what_a_worker_over_http_has_said(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    """Headers that it was sent with, a delay, and the reason of a rejection: all of it stays text."""
    said = "<img src=x onerror=alert(1)> \u202egnirts"
    line = {"value": "x", "headers": {"<b>name</b>": said, "traceparent": "00-0af7651916cd43dd-01"}}
    api.ask("POST", path_of("told", "batch"), json.dumps(line).encode(), {"Content-Type": NDJSON})
    (message,) = api.post(path_of("told", "take"))["messages"]
    api.post(path_of("told", "settle"), {"requeue": [{"id": message["id"], "delay": 0.05}]})
    page = visit(broker, "/queue/told?offset=0")
    (message,) = api.post(path_of("told", "take"), wait=10)["messages"]
    api.post(path_of("told", "settle"), {"requeue": [{"id": message["id"], "delay": 90_000}]})
    until(lambda: steps(page) == ["accepted", *["held", "delayed"] * 2, "now"], "both to be drawn")
    due = api.get(path_of("told", "messages/0"))["due"]
    expect(page.locator('[data-event="now"]')).to_contain_text(f"until {due[:10]} {due[11:16]} UTC")
    expect(page.locator(".ps-queue-title .ps-badge")).to_have_text("delayed")
    shown_said = said.replace("\u202e", "\\u202e")
    expect(page.locator(".ps-headers tr")).to_have_text(
        [f"<b>name</b>{shown_said}", "traceparent00-0af7651916cd43dd-01"]
    )
    api.send("told", b"y")
    (message,) = api.post(path_of("told", "take"))["messages"]
    api.post(path_of("told", "settle"), {"reject": [{"id": message["id"], "reason": said}]})
    page = visit(broker, "/queue/told?offset=1")
    expect(page.locator(".ps-fact-long").first).to_have_text(f"rejected: {shown_said}")
    assert page.locator(".ps-headers").count() == 0
    page = visit(broker, "/queue/told?part=dead")
    expect(page.locator(".ps-messages tr .ps-badge")).to_have_text(["dead", f"rejected: {shown_said}"])
    assert page.locator("main img:not([alt=''])").count() == 0


# --- its payload -------------------------------------------------------------------------------------


def test_nothing_in_a_payload_does_anything(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    api.send("wild", WILD.encode(), json.dumps({"text": WILD, WILD: [WILD]}, ensure_ascii=False).encode())
    for path in ("/queue/wild?offset=0", "/queue/wild?offset=1", "/queue/wild?part=messages"):
        page = visit(broker, path)
        page.on("dialog", lambda it: pytest.fail(it.message))
        place = page.locator(".ps-payload, tr[data-key='0'] [data-column='preview']")
        expect(place).to_contain_text("<script>alert(1)</script><img src=x onerror=alert(1)> {{7*7}} ${7*7}")
        text = place.inner_text()
        assert "\\u202egnirts\\u202c" in text
        assert "\\x00" in text.replace("\\u0000", "\\x00")
        assert not set(text) & set("\u202e\u202c\x1b\x00\u200b")
        assert page.locator("main script, main img, main a[href^='javascript']").count() == 0


def test_the_forms_of_a_payload(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    api.send(
        "forms",
        b'{"a": [1, 2.50, "x"], "a": {}, "big": 12345678901234567890.10}',
        b"caf\xc3\xa9",
        b"\xff\x00A",
        b"",
    )
    page = visit(broker, "/queue/forms?offset=0")
    # Laid out, and otherwise as it was sent: a field that is there twice, and what a float would lose.
    assert shown(page) == (
        '{\n  "a": [\n    1,\n    2.50,\n    "x"\n  ],\n  "a": {},\n  "big": 12345678901234567890.10\n}'
    )
    page.get_by_role("button", name="Text").click()
    until(lambda: shown(page).startswith('{"a": [1, 2.50'), "the text as it was sent")
    page.get_by_role("button", name="Hex").click()
    until(lambda: shown(page).startswith("00000000  7b 22 61 22 3a 20 5b 31  2c 20"), "hexadecimal digits")
    assert shown(page).splitlines()[0].endswith('  {"a": [1, 2.50, ')
    page = visit(broker, "/queue/forms?offset=1")
    assert shown(page) == "café"
    assert page.get_by_role("button", name="JSON").count() == 0
    page = visit(broker, "/queue/forms?offset=2")
    assert shown(page).split() == ["00000000", "ff", "00", "41", "..A"]
    assert page.get_by_role("button", name="Text").count() == 0
    page = visit(broker, "/queue/forms?offset=3")
    assert shown(page) == "(empty)"


@pytest.mark.long
def test_a_large_payload_is_shown_in_part_and_downloaded_whole(
    broker: BrokerProcess, api: Api, visit: Visit
) -> None:
    value = bytes(range(256)) * 4096
    text = b"[" + b"1234567, " * 130_000 + b"0]"
    api.send("large", value, text)
    page = visit(broker, "/queue/large?offset=0")
    assert len(shown(page)) < 100_000
    expect(page.locator(".ps-note")).to_have_text(
        "The first 8,192 of 1,048,576 bytes. Download it to see all."
    )
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename == "large-0.bin"
    assert download.value.path().read_bytes() == value
    page = visit(broker, "/queue/large?offset=1")
    assert shown(page).startswith("[\n  1234567,\n  1234567,")
    assert len(shown(page)) < 100_000
    page.get_by_role("button", name="Text").click()
    expect(page.locator(".ps-note")).to_contain_text("The first 65,536 of 1,170,003 characters.")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename == "large-1.json"
    assert download.value.path().read_bytes() == text


def test_a_repaired_message_says_so(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    reject(broker, api, "mended", [b"wrong"])
    looking = visit(broker, "/queue/mended?offset=0")
    assert shown(looking) == "wrong"
    line = json.dumps({"offset": 0, "value": "right"}).encode()
    stage = api.ask(
        "POST",
        "/v1/stages",
        line,
        {"Content-Type": NDJSON},
        transaction="mended",
        redrive="true",
        queue="mended",
    ).json["stage"]
    api.post("/v1/transactions", {"transaction": "mended", "stages": [stage]})
    # Whoever looked at it before sees it with the next look, which comes by itself, or with this.
    looking.locator("button", has_text="Redrive").dispatch_event("click")
    for it in (looking, visit(broker, "/queue/mended?offset=0")):
        expect(it.locator(".ps-queue-title")).to_contain_text("repaired", timeout=1000 * WAIT_SECONDS)
        assert shown(it) == "right"
    page = visit(broker, "/queue/mended?part=messages")
    expect(page.locator('tr[data-key="0"] [data-column="state"] .ps-badge')).to_have_text(
        ["ready", "repaired"]
    )


LAID_OUT = [
    (b"[]", "[]"),
    (b'{"a":{},"b":[]}', '{\n  "a": {},\n  "b": []\n}'),
    (b'[{"a":"]}{[,:"}]', '[\n  {\n    "a": "]}{[,:"\n  }\n]'),
    (b' {"\\u202e":"\\"", "\\\\": -1.50e+3}\r\n', '{\n  "\\u202e": "\\"",\n  "\\\\": -1.50e+3\n}'),
    ('["\u202e",\ttrue, null]'.encode(), '[\n  "\\u202e",\n  true,\n  null\n]'),
]


def test_json_is_laid_out(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    """Token by token: what is between brackets and strings stays as it is."""
    api.send("laid", *(value for value, _ in LAID_OUT))
    for offset, (value, laid_out) in enumerate(LAID_OUT):
        page = visit(broker, f"/queue/laid?offset={offset}")
        assert shown(page) == laid_out
        if b"\xe2" not in value:
            assert json.loads(laid_out) == json.loads(value)
        page.close()


@pytest.mark.long
def test_json_folds_by_click_and_by_key(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    api.send("folds", b'{"a": {"b": [1, 2, 3], "c": "<i>"}, "d": [{}]}')
    page = visit(broker, "/queue/folds?offset=0")
    whole = shown(page)
    expect(page.locator(".ps-json-key")).to_have_text(['"a"', '"b"', '"c"', '"d"'])
    expect(page.locator(".ps-json-number")).to_have_text(["1", "2", "3"])
    expect(page.locator(".ps-json-text")).to_have_text('"<i>"')
    page.get_by_role("button", name='Fold "b"').focus()
    page.keyboard.press("Enter")
    assert '"b": [ 3 items ],' in shown(page)
    again = page.get_by_role("button", name='Unfold "b"')
    expect(again).to_be_focused()
    expect(again).to_have_attribute("aria-expanded", "false")
    axe(page)
    page.get_by_role("button", name="Fold all", exact=True).click()
    assert shown(page) == '{\n  "a": { 2 fields },\n  "d": [ 1 item ]\n}'
    page.get_by_role("button", name='Unfold "a"').click()
    assert '"b": [ 3 items ],' in shown(page)
    page.get_by_role("button", name="Unfold all").click()
    assert shown(page) == whole
    everybody(page)


@pytest.mark.long
def test_a_megabyte_of_json_kills_no_page(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    """However wide, deep or long: few lines are drawn, and there is a way to the rest."""
    wide = json.dumps({"rows": [{"id": at, "text": "x" * 20} for at in range(20_000)], "tail": 7}).encode()
    deep = b"[" * 900 + b"1" + b"]" * 900
    long = json.dumps({"text": "y" * 900_000, "tail": 7}).encode()
    assert len(wide) > 900_000
    api.send("megabyte", wide, deep, long, b"[" * 200_000)
    page = visit(broker, "/queue/megabyte?offset=0")
    assert shown(page) == '{\n  "rows": [ 20,000 items ],\n  "tail": 7\n}'
    page.get_by_role("button", name='Unfold "rows"').click()
    lines = page.locator(".ps-json > div")
    expect(lines).to_have_count(500)
    page.get_by_role("button", name="Show more lines").click()
    expect(lines).to_have_count(1000)
    axe(page)
    page = visit(broker, "/queue/megabyte?offset=1")
    expect(page.locator(".ps-json > div")).to_have_count(500)
    page = visit(broker, "/queue/megabyte?offset=2")
    assert len(shown(page)) < 5000
    assert shown(page).endswith('"tail": 7\n}')
    page.get_by_role("button", name="898,002 more characters").click()
    until(lambda: len(shown(page)) > 900_000, "all of it")
    page = visit(broker, "/queue/megabyte?offset=3")  # deeper than anybody reads: no JSON, and text
    assert shown(page).startswith("[[[[")
    assert page.get_by_role("button", name="JSON").count() == 0


def test_copy_is_what_was_sent(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    for offset, value in enumerate((b'{"a":1.50,\r\n "a": "\xe2\x80\xae\\n"}', b"tab\tand \x1b bell\x07")):
        api.send("copied", value)
        page = visit(broker, f"/queue/copied?offset={offset}", alone=True)
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.get_by_role("button", name="Copy", exact=True).click()
        expect(page.locator(".ps-toast")).to_contain_text(f"Copied {len(value)} B")
        assert page.evaluate("navigator.clipboard.readText()") == value.decode()
    api.send("copied", b"\xff")
    page = visit(broker, "/queue/copied?offset=2")
    assert shown(page)
    assert page.get_by_role("button", name="Copy", exact=True).count() == 0


# --- for everybody -----------------------------------------------------------------------------------


@pytest.mark.long
def test_what_is_not_there(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    api.send("short", b"x")
    page = visit(broker, "/queue/short?offset=7", forgive=["404"])
    expect(page.get_by_role("heading", name="has no message at offset 7")).to_be_visible()
    axe(page)
    page = visit(broker, "/queue/short?offset=-1")
    expect(page.get_by_role("heading", name="short", exact=True)).to_be_visible()
    for wrong in ("9" * 30, "9" * 5000, "²", "1_0"):
        page = visit(broker, f"/queue/short?offset={wrong}&part=messages&from={wrong}")
        expect(page.get_by_role("heading", name="short", exact=True)).to_be_visible()


def test_everybody_can_use_it(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    api.send("usable", json.dumps({"word": "x" * 3000, "list": list(range(100))}).encode(), retries=3)
    take(broker, "usable", 1)
    take(broker, "usable", 1, lambda message: message.reject())
    page = visit(broker, "/queue/usable?offset=0")
    page.locator(".ps-life > li").first.wait_for()
    everybody(page)
    page.get_by_role("button", name="Hex").click()
    until(lambda: shown(page).startswith("00000000"), "hexadecimal digits")
    everybody(page)
