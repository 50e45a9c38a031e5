"""The report's section on the audit: what was done and refused in its time, escaped and bounded."""

import time
from urllib.parse import quote

import pytest

from penstock.report import audit, job, tables
from penstock.report.audit import ASKED, SHOWN, ask_audit
from penstock.report.figures import figures_of
from penstock.report.page import render
from penstock.report.period import Period
from penstock.spark.api import Broker
from tests.http.api import Api
from tests.http.conftest import StartBroker, start_broker
from tests.http.test_rights import SETTINGS, TOKENS
from tests.report.test_page import ABOUT, Page
from tests.report.traffic import HOSTILE
from tests.server.harness import until

__all__ = ["start_broker"]


def page_of(lines: list[dict[str, object]]) -> Page:
    return Page(render(figures_of(*job.Result(None, tables.of_nothing([]))), ABOUT, lines))


def test_it_tells_who_did_what_and_who_was_refused(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = start_broker(config=SETTINGS)
    port = broker.ports["http"]
    with Api(port, TOKENS["root"]) as root, Api(port, TOKENS["read"]) as reader:
        root.send("orders.a", b"1", b"2")
        root.send(HOSTILE, b"1")
        until(lambda: len(root.get("/v1/audit")["lines"]) == 1, "the start to be told")
        before_us = time.time_ns() // 1000
        root.post("/v1/queues/orders.a/purge")
        assert root.ask("POST", "/v1/queues/orders.b/pause").status == 404
        assert reader.ask("POST", "/v1/queues/orders.a/purge").status == 403
        assert root.ask("DELETE", f"/v1/queues/{quote(HOSTILE, safe='')}").status == 200
        until(lambda: "forbidden" in str(root.get("/v1/audit")), "the refusal to be told")
    asks = Broker(f"http://127.0.0.1:{port}", TOKENS["root"])
    lines = ask_audit(asks, Period())
    assert [(line["act"], line.get("result")) for line in lines] == [
        ("start", None),
        ("purge", "done"),
        ("pause", "queue-not-found"),
        ("delete", "done"),
        ("POST /v1/queues/{queue}/purge", "forbidden"),
    ]
    page = page_of(lines)
    assert "#audit" in {attributes["href"] for attributes in page.all("a")}
    assert HOSTILE in page.table_words
    assert {"root", "read", "127.0.0.1", "purge", "forbidden", "queue-not-found", "2"} <= set(
        page.table_words
    )
    assert {attributes.get("scope") for attributes in page.all("th")} == {"col", "row"}
    # Of other times and other queues there is nothing.
    assert [line["act"] for line in ask_audit(asks, Period(before_us), ["orders.b"])] == ["pause"]
    assert [line["act"] for line in ask_audit(asks, Period(None, before_us))] == ["start"]
    monkeypatch.setattr(audit, "ASKED", 1)  # More has come since than is asked for.
    assert [line["act"] for line in ask_audit(asks, Period(None, before_us))] == ["start"]
    assert len(ask_audit(asks, Period(None, time.time_ns() // 1000))) == 1
    asks.close()
    asks = Broker(f"http://127.0.0.1:{port}", TOKENS["read"])
    assert ask_audit(asks, Period()) == []
    asks.close()
    assert "audit" not in {attributes.get("id") for _, attributes in page_of([]).tags}


def test_many_lines_are_counted_and_a_few_are_shown() -> None:
    lines = [
        {
            "time": "2026-01-01T00:00:00.000Z",
            "who": f"u{number}",
            "act": "send",
            "result": "forbidden",
            "times": 3,
        }
        for number in range(ASKED)
    ]
    page = page_of(lines)
    assert f"{3 * ASKED:,}" in page.table_words
    assert sum(word.startswith("u") for word in page.table_words) == SHOWN
    assert f"u{ASKED - 1}" in page.table_words
    assert f"the last {ASKED:,} lines" in page.text
