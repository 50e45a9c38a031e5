"""Dead letters of many queues in a browser: by queue and reason, counted first, and back by a click."""

import pytest
from playwright.sync_api import Page, expect

from penstock.common.tokens import hash_token, new_token
from tests.dashboard.conftest import StartBroker, Visit, axe, everybody, until
from tests.http.api import Api
from tests.http.morgue import exhaust, path_of, reasons, reject
from tests.server.harness import BrokerProcess

NORTH, SOUTH = b'{"region": "north"}', b'{"region": "south"}'


def cells(page: Page, queue: str) -> dict[str, str]:
    row = page.locator(f'tr[data-key="{queue}"]')
    return {
        str(cell.get_attribute("data-column")): cell.inner_text()
        for cell in row.locator("[data-column]").all()
    }


def result(page: Page) -> str:
    return page.locator(".ps-result").inner_text()


@pytest.mark.long
def test_many_queues_at_once(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        exhaust(broker, api, "one", [NORTH])
        reject(broker, api, "one", [NORTH, NORTH, SOUTH])
        reject(broker, api, "two", [NORTH, SOUTH])
        reject(broker, api, "three", [SOUTH])
        api.send("alive", b"x")
        page = visit(broker, "/")
        page.get_by_role("link", name="Dead letters").click()
        until(lambda: cells(page, "one").get("retries-exhausted") == "1", "the reasons of a queue")
        told = cells(page, "one")
        assert (told["dead"], told["rejected"], told["expired"]) == ("4", "3", "0")
        assert page.locator('tr[data-key="alive"]').count() == 0
        everybody(page)
        page.get_by_label("Condition").fill("value.region = 'north'")
        page.get_by_role("combobox", name="Reason").select_option("rejected")
        page.get_by_role("button", name="Dry run").click()
        said = "3 of 7 dead letters would be redriven, of 2 queues. Nothing was changed."
        until(lambda: result(page) == said, "the count")
        assert [cells(page, name)["fits"] for name in ("one", "two", "three")] == ["2", "1", "0"]
        # The address has it all, and changes nothing.
        shared = visit(broker, page.url[page.url.index("/dead") :])
        until(lambda: result(shared) == said, "the same dry run")
        expect(shared.get_by_label("Condition")).to_have_value("value.region = 'north'")
        expect(shared.get_by_role("combobox", name="Reason")).to_have_value("rejected")
        shared.close()
        page.get_by_role("button", name="Redrive…").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Redrive 3 dead letters of 2 queues")
        expect(dialog).to_contain_text("one (2), two (1)")
        axe(page)
        dialog.get_by_role("button", name="Cancel").click()
        expect(dialog).to_be_hidden()
        assert api.get(path_of("one"))["dead"] == 4
        page.get_by_role("button", name="Redrive…").click()
        dialog.get_by_role("button", name="Redrive 3").click()
        until(lambda: result(page) == "Redriven 3 of 3 dead letters.", "the redrive")
        assert reasons(api, "one") == {"rejected": 1, "retries-exhausted": 1}
        assert reasons(api, "two") == {"rejected": 1}
        until(lambda: (cells(page, "one")["back"], cells(page, "one")["dead"]) == ("2", "2"), "the list")
        # Of those that are ticked only.
        page.get_by_label("Condition").fill("")
        page.get_by_role("combobox", name="Reason").select_option("")
        page.get_by_role("checkbox", name="Select three").check()
        page.get_by_role("button", name="Redrive…").click()
        expect(dialog).to_contain_text("Redrive 1 dead letter of 1 queue")
        dialog.get_by_role("button", name="Redrive 1").click()
        until(lambda: result(page) == "Redriven 1 of 1 dead letter.", "the redrive of one queue")
        assert [api.get(path_of(name))["dead"] for name in ("one", "two", "three")] == [2, 1, 0]


def test_what_is_wrong_stands_at_the_condition(broker: BrokerProcess, api: Api, visit: Visit) -> None:
    reject(broker, api, "wrong", [NORTH])
    page = visit(broker, "/dead")
    page.get_by_label("Condition").fill("valu = 1")
    page.get_by_role("button", name="Redrive…").click()
    expect(page.locator("#ps-where-wrong")).to_contain_text("valu")
    assert api.get(path_of("wrong"))["dead"] == 1


@pytest.mark.long
def test_rights(start_broker: StartBroker, visit: Visit) -> None:
    tokens = {name: new_token(name) for name in ("reader", "operator", "root")}
    may = {
        "reader": 'rights = [{queues = "*", may = ["read"]}]',
        "operator": 'rights = [{queues = "*", may = ["read"]}, {queues = "mine", may = ["operate"]}]',
        "root": "admin = true",
    }
    config = "".join(
        f'[[user]]\nname = "{name}"\ntoken-hash = "{hash_token(token)}"\n{may[name]}\n'
        for name, token in tokens.items()
    )
    broker = start_broker(config=config)
    with Api(broker.ports["http"], tokens["root"]) as api:
        for queue in ("mine", "other"):
            api.send(queue, NORTH)
            (taken,) = api.post(path_of(queue, "take"))["messages"]
            api.post(path_of(queue, "settle"), {"reject": [{"id": taken["id"]}]})

        def enter(name: str) -> Page:
            page = visit(broker, "/sign-in?next=/dead", alone=True)
            page.get_by_label("Token").fill(tokens[name])
            page.get_by_role("button", name="Sign in").click()
            until(lambda: cells(page, "other").get("rejected") == "1", "all that one may read")
            return page

        page = enter("reader")
        assert page.get_by_role("button", name="Redrive…").count() == 0
        assert page.get_by_role("checkbox").count() == 0
        page = enter("operator")
        page.get_by_role("button", name="Redrive…").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Redrive 1 dead letter of 1 queue")
        dialog.get_by_role("button", name="Redrive 1").click()
        until(lambda: result(page) == "Redriven 1 of 1 dead letter.", "what is theirs")
        assert [api.get(path_of(queue))["dead"] for queue in ("mine", "other")] == [0, 1]
