"""The audit: every act and every refusal has its lines, whatever is killed, full or in the way."""

import asyncio
import json
import logging
import os
import signal
import stat
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from penstock.http.api.audit import _read
from penstock.server import audit as audit_module
from penstock.server.audit import FILES, Audit, append
from tests.http.api import NDJSON, Api
from tests.http.conftest import StartBroker
from tests.http.morgue import reject, send
from tests.http.test_rights import SETTINGS, as_user, bearer
from tests.server.harness import BrokerProcess, until
from tests.server.test_second import second_of

MANY = 30_000
ATTEMPTS = 5

Line = dict[str, Any]


def audit_of(broker: BrokerProcess) -> Path:
    return broker.folder / "data" / "audit.jsonl"


def lines_of(path: Path) -> list[Line]:
    whole, _, _ = path.read_text().rpartition("\n")  # One may be being written.
    return [json.loads(line) for line in whole.splitlines()]


def acts(broker: BrokerProcess, act: str) -> list[Line]:
    return [line for line in lines_of(audit_of(broker)) if line["act"] == act]


# --- acts ------------------------------------------------------------------------------------------


def test_every_act_is_told_before_and_after(start_broker: StartBroker) -> None:
    broker = start_broker(config=SETTINGS)
    with as_user(broker, "root") as root, as_user(broker, "operate") as operate:
        reject(broker, root, "orders.a", [b"1", b"2", b"3"])
        root.send("orders.a", b"x", b"y")
        operate.post("/v1/queues/orders.a/pause")
        operate.post("/v1/queues/orders.a/resume")
        operate.post("/v1/queues/orders.a/redrive", {"limit": 2})
        letter = root.get("/v1/queues/orders.a/messages", state="dead")["messages"][0]["offset"]
        line = json.dumps({"offset": letter, "value": "mended"}).encode()
        where = {"transaction": "t", "queue": "orders.a", "redrive": True}
        assert operate.ask("POST", "/v1/stages", line, {"Content-Type": NDJSON}, **where).status == 200
        root.post("/v1/queues/orders.a/purge")
        assert operate.ask("PUT", "/v1/readers/r", {"positions": {"orders.a": 0}}).status == 200
        about = {"about": {"state": "running", "wish": 0}}
        assert operate.ask("PUT", "/v1/readers/r", about).status == 200
        assert operate.ask("POST", "/v1/readers/r/pause").status == 200
        assert operate.ask("DELETE", "/v1/readers/r").status == 204
        form = urlencode({"token": bearer("root")["Authorization"].removeprefix("Bearer ")}).encode()
        kind = {"Accept": "text/html", "Content-Type": "application/x-www-form-urlencoded"}
        assert root.ask("POST", "/sign-in", form, kind).status == 303
        assert root.ask("DELETE", "/v1/queues/orders.a").status == 200
        # What cannot be done was begun, and says how it ended.
        assert root.ask("POST", "/v1/queues/nowhere/pause").problem == "queue-not-found"
    assert broker.stop() == 0
    lines = lines_of(audit_of(broker))
    calls: dict[int, list[Line]] = {}
    for one in lines:
        if "call" in one:
            calls.setdefault(one["call"], []).append(one)
    told = []
    for begun, ended in calls.values():
        assert begun["result"] == "begun"
        assert begun["from"] == ended["from"] == "127.0.0.1"
        same = {name: begun[name] for name in begun if name not in ("time", "result")}
        assert same.items() <= ended.items()
        told.append((ended["who"], ended["door"], ended["act"], ended.get("queue"), ended["result"]))
    assert told == [
        ("operate", "http", "pause", "orders.a", "done"),
        ("operate", "http", "resume", "orders.a", "done"),
        ("operate", "http", "redrive", "orders.a", "done"),
        ("operate", "http", "repair", "orders.a", "done"),
        ("root", "http", "purge", "orders.a", "done"),
        ("operate", "http", "pause pipeline", None, "done"),
        ("operate", "http", "release reader", None, "done"),
        ("root", "page", "sign in", None, "done"),
        ("root", "http", "delete", "orders.a", "done"),
        ("root", "http", "pause", "nowhere", "queue-not-found"),
    ]
    counts = {one["act"]: one["count"] for one in lines if one.get("result") == "done" and "count" in one}
    assert counts == {"redrive": 2, "repair": 1, "purge": 4, "delete": 1}
    assert [one["act"] for one in lines if one.get("door") == "process"] == ["start", "stop"]
    assert lines == sorted(lines, key=lambda one: one["time"])


def wait_for_purge(broker: BrokerProcess, before: int) -> None:
    until(lambda: len(acts(broker, "purge")) > before, "the purge to begin")


def test_what_was_begun_by_a_process_that_is_killed_stays_told(start_broker: StartBroker) -> None:
    broker = start_broker()
    for _ in range(ATTEMPTS):
        pid, before = second_of(broker), len(acts(broker, "purge"))
        with Api(broker.ports["http"]) as api:
            send(api, "orders", [b"x" * 20] * MANY)
        with Api(broker.ports["http"]) as api:
            api._connection.request("POST", "/v1/queues/orders/purge")
            wait_for_purge(broker, before)
            os.kill(pid, signal.SIGKILL)
        assert second_of(broker) != pid
        if acts(broker, "purge")[-1]["result"] == "begun":
            break
    else:
        pytest.fail("every purge was over before its process was killed")
    with Api(broker.ports["http"]) as api:
        api.post("/v1/queues/orders/purge")
        assert api.get("/v1/queues/orders")["ready"] == 0
        told = [line["result"] for line in api.get("/v1/audit")["lines"] if line["act"] == "purge"]
    assert told[-3:] == ["begun", "begun", "done"]


# --- refusals --------------------------------------------------------------------------------------


def test_a_thousand_refusals_are_a_few_lines(start_broker: StartBroker) -> None:
    broker = start_broker(config=SETTINGS)
    with as_user(broker, "read") as api:
        for _ in range(700):
            assert api.ask("POST", "/v1/queues/orders.a/purge").status == 403
    with Api(broker.ports["http"], "read.wrong") as api:
        for _ in range(300):
            assert api.ask("GET", "/v1/queues").status == 401
    assert broker.stop() == 0
    refused = [line for line in lines_of(audit_of(broker)) if line["door"] == "http"]
    assert len(refused) <= 20
    sums: Counter[tuple[str, str, str, str]] = Counter()
    for line in refused:
        sums[line["who"], line["act"], line["queue"], line["result"]] += line.get("times", 1)
    assert sums == {
        ("read", "POST /v1/queues/{queue}/purge", "orders.a", "forbidden"): 700,
        ("", "GET /v1/queues", "", "unauthorized"): 300,
    }


# --- reading ---------------------------------------------------------------------------------------


def stored(number: int, **more: object) -> Line:
    return {"time": f"2020-01-01T00:00:{number // 10:02}.{number % 10}00Z", "act": f"n{number}", **more}


def test_lines_are_read_from_a_time_on_or_from_the_end(start_broker: StartBroker, tmp_path: Path) -> None:
    data = tmp_path / "broker" / "data"
    data.mkdir(parents=True)
    for name, numbers in (("audit.jsonl.2", range(10)), ("audit.jsonl.1", range(10, 20))):
        (data / name).write_text(
            "".join(json.dumps(stored(it), separators=(",", ":")) + "\n" for it in numbers)
        )
    # A line that was cut, which the broker ends before it goes on, and two of one moment.
    same = [json.dumps(stored(20, call=it), separators=(",", ":")) for it in (1, 2)]
    (data / "audit.jsonl").write_text("\n".join([*same, '{"time":"2020-01-01T00:']))
    broker = start_broker(config=SETTINGS)
    with as_user(broker, "root") as api:

        def names(**query: object) -> list[str]:
            return [line["act"] for line in api.get("/v1/audit", **query)["lines"]]

        every = [f"n{number}" for number in (*range(20), 20, 20)] + ["start"]
        assert names() == every
        assert names(**{"from": "2020-01-01T00:00:01.500Z"}) == every[15:]
        found, start = [], None
        for _ in range(9):
            page = api.get("/v1/audit", limit=3, **{"from": start})
            found.append([line["act"] for line in page["lines"]])
            start = page["next"]
            if start is None:
                break
        assert [name for names in found for name in names] == every
        assert max(map(len, found)) <= 4  # those of one moment stay together
        assert names(last=4) == every[-4:]
        assert names(last=1000) == every
        assert names(last=14, limit=1) == every[-14:]
        assert names(last=1000, **{"from": "2020-01-01T00:00:01.500Z"}) == every[15:]
        assert api.ask("GET", "/v1/audit", last=0).problem == "bad-request"
    for name in ("read", "operate", "all"):
        with as_user(broker, name) as api:
            assert api.ask("GET", "/v1/audit").problem == "forbidden"
    assert b'\n{"time":"2020-01-01T00:\n{' in (data / "audit.jsonl").read_bytes()


def test_a_line_that_is_cut_and_a_file_that_is_empty_hide_nothing(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    lines = [json.dumps(stored(number), separators=(",", ":")) for number in range(4)]
    # The disk was full in the middle of a line, and later before the first one of a file.
    (tmp_path / "audit.jsonl.1").write_text("\n".join([*lines[:2], '{"ti', *lines[2:], ""]))
    path.write_text("")
    start = b"2020-01-01T00:00:00.100Z"
    found, more = _read(str(path), start, 100)
    assert [(line["act"], more) for line in found] == [("n1", None), ("n2", None), ("n3", None)]
    _, more = _read(str(path), b"", 2)
    assert more == "2020-01-01T00:00:00.200Z"


def test_it_can_be_switched_off(start_broker: StartBroker) -> None:
    broker = start_broker("--audit", "off")
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"x")
        api.post("/v1/queues/orders/purge")
        assert "switched off" in api.ask("GET", "/v1/audit").json["detail"]
    assert broker.stop() == 0
    assert not audit_of(broker).exists()


# --- files -----------------------------------------------------------------------------------------


def test_nobody_else_can_read_it_and_no_link_is_followed(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        until(lambda: len(api.get("/v1/audit")["lines"]) == 1, "the first line")
    assert stat.S_IMODE(audit_of(broker).stat().st_mode) == 0o600
    assert broker.stop() == 0
    target = tmp_path / "precious"
    target.write_text("precious\n")
    audit_of(broker).unlink()
    audit_of(broker).symlink_to(target)
    broker.start()
    works_without_audit(broker)
    assert target.read_text() == "precious\n"


def test_where_the_disk_is_full_acts_go_on_and_the_log_says_so(start_broker: StartBroker) -> None:
    works_without_audit(start_broker("--audit", "/dev/full"))


def test_a_pipe_that_nobody_reads_keeps_nobody_waiting(start_broker: StartBroker, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    works_without_audit(start_broker("--audit", str(tmp_path / "pipe")))


def test_what_waits_to_be_written_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audit_module, "LINES_MAX", 10)

    async def run() -> None:
        audit = Audit(str(tmp_path / "audit.jsonl"))
        for number in range(30):  # in one turn of the loop: nothing is written meanwhile
            audit.tell(act=str(number))
        await told(audit, "next")
        await told(audit, "last")
        audit.close()

    asyncio.run(run())
    acts = [line["act"] for line in lines_of(tmp_path / "audit.jsonl")]
    assert acts == [*map(str, range(10)), "last"]
    assert "21 lines are not in it" in caplog.text


def test_refusals_cannot_push_out_what_others_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "GATHER_SECONDS", 0.01)

    async def run() -> None:
        audit = Audit(str(tmp_path / "audit.jsonl"))
        for period in range(10):
            for number in range(audit_module.KINDS_MAX):
                audit.refused({"act": "GET", "queue": f"{period}.{number}"})
            await asyncio.sleep(0.02)  # longer than what is gathered
        await told(audit, "last")
        audit.close()

    asyncio.run(run())
    lines = lines_of(tmp_path / "audit.jsonl")
    others = [line for line in lines if line["act"] == "others"]
    assert len(lines) < audit_module.KINDS_MAX + 100
    refused = sum(line["act"] == "GET" for line in lines) + sum(line.get("times", 1) for line in others)
    assert refused == 10 * audit_module.KINDS_MAX


def works_without_audit(broker: BrokerProcess) -> None:
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"x")
        assert api.post("/v1/queues/orders/purge") == {"purged": 1}
    assert broker.stop() == 0
    assert broker.log().count("the audit cannot be written, and acts go on without it") == 1
    assert '"act":"purge","queue":"orders"' in broker.log()


def test_lines_are_written_again_as_soon_as_they_can_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "audit.jsonl"
    path.mkdir()

    async def run() -> None:
        audit = Audit(str(path))
        await told(audit, "lost")
        path.rmdir()
        await told(audit, "kept")
        audit.close()

    with caplog.at_level(logging.WARNING, "penstock.audit"):
        asyncio.run(run())
    assert [line["act"] for line in lines_of(path)] == ["kept"]
    assert "lost" in caplog.text


async def told(audit: Audit, act: str) -> None:
    done = asyncio.Event()
    audit.act({"act": act}, done.set)
    await asyncio.wait_for(done.wait(), 10)


def test_files_change_and_eight_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "FILE_BYTES", 2000)
    path = tmp_path / "audit.jsonl"

    async def run(count: int) -> None:
        audit = Audit(str(path))
        for number in range(count):
            await told(audit, str(number))
        audit.close()

    def kept() -> list[int]:
        files = sorted(
            tmp_path.iterdir(), key=lambda it: -int(it.suffix[1:]) if it.suffix[1:].isdigit() else 0
        )
        return [int(line["act"]) for file in files for line in lines_of(file)]

    asyncio.run(run(100))
    assert 1 < len(list(tmp_path.iterdir())) < FILES
    assert kept() == list(range(100))
    for file in tmp_path.iterdir():
        file.unlink()
    asyncio.run(run(1000))
    numbers = kept()
    assert len(list(tmp_path.iterdir())) == FILES
    assert numbers == list(range(1000 - len(numbers), 1000))
    assert all(file.stat().st_size < 2100 for file in tmp_path.iterdir())


def test_a_torn_line_is_followed_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"act":"whole"}\n{"act":"to')
    append(str(path), ['{"act":"next"}\n'])
    assert path.read_text().splitlines() == ['{"act":"whole"}', '{"act":"to', '{"act":"next"}']
