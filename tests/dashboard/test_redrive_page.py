"""Dead letters in a browser: by reason, by condition, counted first, and back into the queue by a click."""

import json

import pytest
from playwright.sync_api import Page, expect

from penstock.dashboard import redriving
from tests.dashboard.conftest import Visit, axe, everybody, until
from tests.http.api import NDJSON, Api
from tests.http.morgue import exhaust, expire, ids, path_of, reasons, reject, send, take
from tests.server.harness import BrokerProcess

ORDERS = [
    b'{"region": "north", "amount": 5}',
    b'{"region": "south", "amount": 50}',
    b'{"region": "north", "amount": 500}',
    b"no JSON at all",
]


def bury(api: Api, queue: str, *values: str) -> None:
    """Bad records, as pipelines report them."""
    body = "".join(json.dumps({"value": value}) + "\n" for value in values).encode()
    media = {"Content-Type": NDJSON}
    staged = api.ask(
        "POST", "/v1/stages", body, media, transaction=f"bury/{queue}", queue=queue, dead="bad-record"
    )
    api.post("/v1/transactions", {"transaction": f"bury/{queue}", "stages": [staged.json["stage"]]})


def offsets(page: Page) -> list[int]:
    return [int(text) for text in page.locator(".ps-messages tbody th a").all_inner_texts()]


def result(page: Page) -> str:
    return page.locator(".ps-result").inner_text()


def bars(page: Page) -> dict[str, str]:
    return {
        str(bar.get_attribute("data-reason")): bar.locator(".ps-reason-count").inner_text()
        for bar in page.locator(".ps-reason").all()
    }


@pytest.mark.long
def test_reasons_and_their_letters(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    reject(broker, api, "reasons", ORDERS)
    exhaust(broker, api, "reasons", [b"given up"])
    expire(api, "reasons", [b"late"])
    page = visit(broker, "/queue/reasons?part=dead")
    told = {reason: str(count) for reason, count in reasons(api, "reasons").items()}
    assert (
        bars(page)
        == {"all": "6", **told}
        == {"all": "6", "rejected": "4", "retries-exhausted": "1", "expired": "1"}
    )
    until(lambda: offsets(page) == [0, 1, 2, 3, 4, 5], "all letters")
    page.locator('[data-reason="expired"]').focus()
    page.keyboard.press("Enter")
    until(lambda: offsets(page) == [5], "those that expired")
    assert page.evaluate("document.activeElement.dataset.reason") == "expired"  # the keyboard stays there
    assert page.url.endswith("?part=dead&reason=expired")
    page.reload()
    until(lambda: offsets(page) == [5], "the same after a reload")
    expect(page.locator('[data-reason="expired"]')).to_have_attribute("aria-pressed", "true")
    axe(page)
    # What dies meanwhile is counted by itself.
    reject(broker, api, "reasons", [b"one more"])
    until(lambda: bars(page)["rejected"] == "5", "the bar to grow")


@pytest.mark.long
def test_a_dry_run_and_a_redrive_by_click(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    reject(broker, api, "back", ORDERS)
    before = ids(api, "back", "dead")
    page = visit(broker, "/queue/back?part=dead")
    page.get_by_label("Condition").fill("value.region = 'north'")
    page.get_by_role("button", name="Dry run").click()
    dry = api.post(path_of("back", "redrive"), {"where": "value.region = 'north'", "dry_run": True})
    assert (dry["matched"], dry["looked_at"]) == (2, 4)
    said = "2 of 4 dead letters would be redriven. Nothing was changed."
    until(lambda: result(page) == said, "the API's count")
    until(lambda: offsets(page) == [0, 2], "the letters that fit")
    # Who gets this address sees the same, and nothing is done by it.
    shared = visit(broker, page.url[page.url.index("/queue/") :])
    until(lambda: result(shared) == said, "the same count")
    assert offsets(shared) == [0, 2]
    expect(shared.get_by_label("Condition")).to_have_value("value.region = 'north'")
    shared.close()
    assert ids(api, "back", "dead") == before
    page.get_by_role("button", name="Redrive…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("2 dead letters of back will go back behind its tail")
    axe(page)
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_be_hidden()
    assert ids(api, "back", "dead") == before
    page.get_by_role("button", name="Redrive…").click()
    dialog.get_by_role("button", name="Redrive 2").click()
    until(lambda: result(page) == "Redriven 2 dead letters; 2 left.", "the redrive")
    assert reasons(api, "back") == {"rejected": 2}
    assert sum(ids(api, "back", "ready").values()) == 2
    assert ids(api, "back") == before  # the same messages, with the ids that they had
    until(lambda: offsets(page) == [1, 3], "those that are left")
    # Without a condition, all that are left.
    page.get_by_label("Condition").fill("")
    page.get_by_role("button", name="Redrive…").click()
    page.get_by_role("dialog").get_by_role("button", name="Redrive 2").click()
    until(lambda: result(page) == "Redriven 2 dead letters; 0 left.", "the others")
    assert ids(api, "back", "ready") == before
    expect(page.get_by_text("No letter is dead.")).to_be_visible()


@pytest.mark.long
def test_a_wrong_condition_is_told_at_its_field(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    reject(broker, api, "wrong", [b"x"])
    page = visit(broker, "/queue/wrong?part=dead")
    field = page.get_by_label("Condition")
    field.fill("reson = 'rejected'")
    page.keyboard.press("Enter")
    told = api.ask("POST", path_of("wrong", "redrive"), {"where": "reson = 'rejected'"}).json["detail"]
    expect(page.locator("#ps-where-wrong")).to_have_text(told)
    assert "did you mean reason?" in told
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_attribute("aria-describedby", "ps-where-wrong")
    axe(page)
    field.fill("reason = 'rejected'")
    page.keyboard.press("Enter")
    until(lambda: result(page).startswith("1 of 1 dead letter "), "the count")
    expect(field).to_have_attribute("aria-invalid", "false")


def test_bad_records_only_where_they_are_asked_for(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    reject(broker, api, "records", [b"r1"])
    bury(api, "records", "b1", "b2", "b3")
    page = visit(broker, "/queue/records?part=dead")
    assert bars(page) == {"all": "4", "bad-record": "3", "rejected": "1"}
    page.get_by_role("button", name="Dry run").click()
    until(lambda: result(page).startswith("1 of 4 dead letters "), "all but bad records")
    page.locator('[data-reason="bad-record"]').click()
    until(lambda: offsets(page) == [1, 2, 3], "bad records")
    page.get_by_label("At most").fill("2")
    page.get_by_role("button", name="Redrive…").click()
    page.get_by_role("dialog").get_by_role("button", name="Redrive 2").click()
    until(lambda: result(page) == "Redriven 2 dead letters; 2 left.", "two of them")
    assert reasons(api, "records") == {"rejected": 1, "bad-record": 1}


@pytest.mark.parametrize("where", ["", "value like 'n%'"])
@pytest.mark.long
def test_very_many(broker: BrokerProcess, api: Api, visit: Visit, where: str) -> None:
    """More than a portion: the count and the redrive go on until all are through."""
    queue, count = f"many{len(where)}", redriving.PORTION * 2 + 345
    send(api, queue, [b"n%d" % at for at in range(count)])
    take(broker, queue, count, lambda message: message.reject())
    page = visit(broker, f"/queue/{queue}?part=dead")
    expect(page.get_by_text("The first 50 are shown.")).to_be_visible()
    page.get_by_label("Condition").fill(where)
    page.get_by_role("button", name="Redrive…").click()
    page.get_by_role("dialog").get_by_role("button", name=f"Redrive {count:,}").click()
    until(lambda: result(page) == f"Redriven {count:,} dead letters; 0 left.", "all of them")
    row = api.get(path_of(queue))
    assert (row["dead"], row["ready"]) == (0, count)


def test_everybody_can_use_it(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    reject(broker, api, "usable", ORDERS)
    exhaust(broker, api, "usable", [b"given up " * 30])
    page = visit(broker, "/queue/usable?part=dead")
    page.get_by_label("Condition").fill("value.region = 'north' and " * 10 + "attempts = 'x'")
    page.get_by_role("button", name="Dry run").click()
    expect(page.locator("#ps-where-wrong")).to_contain_text("compare things of one kind")
    page.get_by_text("What can stand in a condition").click()
    everybody(page)
    page.get_by_label("Condition").fill("")
    page.get_by_role("button", name="Redrive…").click()
    page.get_by_role("dialog").get_by_role("button", name="Redrive 5").wait_for()
    everybody(page)
