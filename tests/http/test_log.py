"""The log in bulk over HTTP: all three views, ranges to the edge, broken connections, many at once."""

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from starlette.types import Message

from penstock.control.frames import Frame
from penstock.http.api import log as api_log
from penstock.http.api.log import COLUMNS, Asking, Wanted, walk
from penstock.http.problems import Problem
from penstock.http.reading import letters
from penstock.http.reading import state as state_view
from penstock.http.reading.looking import STATE_WORDS, Runs, look_at, message_fields
from penstock.http.reading.pool import WALKS_MAX, ReaderPool
from penstock.http.reading.state import state_batches
from penstock.http.where.condition import parse
from penstock.log.arrow import (
    EVENTS_SCHEMA,
    MESSAGES_SCHEMA,
    events_batches,
    messages_batches,
    schema_of,
)
from penstock.log.log import Log, open_log
from penstock.log.reader import LogReader, OffsetsMissing
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.ids import id_of
from penstock.model.life import Reason, State
from penstock.model.pending import AS_STORED
from penstock.model.policy import Policies
from penstock.model.words import Outcome
from tests.http.api import ARROW, NDJSON, Api, Reply
from tests.http.conftest import StartBroker
from tests.http.morgue import path_of, phpmq, take
from tests.http.zoo import HELD, LOOKED_INTO, REQUEUED, STATES, TTL, counts, value, zoo
from tests.log.folders import NOW_US, QUEUES, SECOND_US, Worker
from tests.server.harness import WAIT_SECONDS, BrokerProcess, until

Row = dict[str, Any]


def read(api: Api, queue: str, **query: Any) -> Reply:
    reply = api.ask("GET", path_of(queue, "log"), **query)
    assert reply.status == 200, reply
    assert reply.headers["content-type"] == ARROW
    return reply


def table(api: Api, queue: str, **query: Any) -> pa.Table:
    return table_of(read(api, queue, **query))


def table_of(reply: Reply) -> pa.Table:
    whole = pa.ipc.open_stream(reply.body).read_all()
    whole.validate(full=True)
    return whole


def range_in(reply: Reply) -> tuple[int, int]:
    return int(reply.headers["penstock-start"]), int(reply.headers["penstock-end"])


def send_lines(api: Api, queue: str, first: int, end: int) -> None:
    lines = b"".join(json.dumps({"value": text_of(i)}).encode() + b"\n" for i in range(first, end))
    reply = api.ask("POST", path_of(queue, "batch"), lines, {"Content-Type": NDJSON})
    assert reply.status == 200, reply


def names(api: Api) -> list[str]:
    return [queue["name"] for queue in api.get("/v1/queues")["queues"]]


def text_of(number: int) -> str:
    return f"{number:07d}" + "." * (number % 50)


def values(first: int, end: int) -> list[bytes]:
    return [text_of(number).encode() for number in range(first, end)]


@pytest.fixture(scope="module")
def large(broker: BrokerProcess) -> str:
    """A queue with 100,000 messages."""
    with Api(broker.ports["http"]) as api:
        for first in range(0, 100_000, 20_000):
            send_lines(api, "large", first, first + 20_000)
    return "large"


# --- messages --------------------------------------------------------------------------------------


def test_all_messages_as_they_were_sent(api: Api, large: str) -> None:
    reply = read(api, large)
    assert range_in(reply) == (0, 100_000)
    messages = table_of(reply)
    assert messages.schema == MESSAGES_SCHEMA
    assert messages["offset"].to_pylist() == [*range(100_000)]
    assert messages["value"].to_pylist() == values(0, 100_000)
    assert set(messages["queue"].to_pylist()) == {large}
    assert set(messages["protocol"].to_pylist()) == {"http"}
    assert len(set(messages["id"].to_pylist())) == 100_000


@pytest.mark.parametrize(
    ("start", "end", "served"),
    [
        (None, 10, (0, 10)),
        (99_990, None, (99_990, 100_000)),
        (20_000, 20_000, (20_000, 20_000)),
        (19_999, 20_001, (19_999, 20_001)),
        (77_777, 77_778, (77_777, 77_778)),
        (99_999, 100_001, (99_999, 100_000)),
        (100_000, None, (100_000, 100_000)),
        (100_000, 200_000, (100_000, 100_000)),
        (150_000, 200_000, (150_000, 150_000)),
        (50, 40, (50, 50)),
    ],
)
def test_ranges(api: Api, large: str, start: int | None, end: int | None, served: tuple[int, int]) -> None:
    for view in ("messages", "events", "state"):
        reply = read(api, large, view=view, start=start, end=end)
        assert range_in(reply) == served
        column = "event_offset" if view == "events" else "offset"
        assert table_of(reply)[column].to_pylist() == [*range(*served)]


@pytest.mark.parametrize("queue", ["a/b c", "größe/ñ 100%", "日本/語?x=1&y#z"])
def test_names_of_all_kinds(api: Api, queue: str) -> None:
    api.send(queue, b"x", b"y")
    for view in COLUMNS:
        rows = table(api, queue, view=view)
        assert rows["queue"].to_pylist() == [queue, queue]


def test_what_messages_may_have(api: Api) -> None:
    api.send("dressed", b"", ttl=600, retries=3)
    api.send("dressed", b"plain")
    first, second = table(api, "dressed").to_pylist()
    assert (first["value"], second["value"]) == (b"", b"plain")
    assert first["expires"] - first["timestamp"] == timedelta(seconds=600)
    assert (first["retries"], second["retries"], second["expires"]) == (3, None, None)
    (shown, _) = api.get(path_of("dressed", "messages"))["messages"]
    assert shown["id"] == first["id"]
    assert datetime.fromisoformat(shown["time"]) == first["timestamp"]


def test_headers_come_where_they_are_named(api: Api) -> None:
    api.send("titled", b"plain", delay=3600)
    said = {"Penstock-Header-Trace": "a b", "Penstock-Header-tenant": "acme"}
    reply = api.ask("POST", path_of("titled", "messages"), b"titled", said, delay=0.5)
    assert reply.status == 200, reply
    assert table(api, "titled").schema == MESSAGES_SCHEMA
    found = table(api, "titled", columns="offset,headers")
    assert found.schema == schema_of("messages", ["offset", "headers"])
    assert found.to_pylist() == [
        {"offset": 0, "headers": None},
        {"offset": 1, "headers": [("trace", "a b"), ("tenant", "acme")]},
    ]
    assert table(api, "titled", view="state", state="delayed", end=1)["state"].to_pylist() == ["delayed"]
    reply = api.ask("GET", path_of("titled", "log"), view="state", columns="headers")
    assert (reply.status, reply.problem) == (400, "bad-request")


# --- events ----------------------------------------------------------------------------------------


def test_events_are_what_the_log_has(broker: BrokerProcess, api: Api) -> None:
    send_lines(api, "worked", 0, 500)
    take(broker, "worked", 300, lambda message: message.ack())
    take(broker, "worked", 50, lambda message: message.reject())

    def settled() -> bool:
        return bool(table(api, "worked", view="events").num_rows == 850)

    until(settled, "all events to be synced")
    reply = read(api, "worked", view="events")
    assert range_in(reply) == (0, 850)
    events = table_of(reply)
    assert events.schema == EVENTS_SCHEMA
    with LogReader(str(broker.folder / "data")) as reader:
        batches = events_batches(reader, "worked", 0)
        assert events.to_pylist() == pa.Table.from_batches(batches, EVENTS_SCHEMA).to_pylist()
    part = table(api, "worked", view="events", start=495, end=505)
    assert part.to_pylist() == events.slice(495, 10).to_pylist()
    assert set(events["event"].to_pylist()) == {"accepted", "acked", "dead"}


# --- state -----------------------------------------------------------------------------------------


def test_the_state_of_every_kind(broker: BrokerProcess, api: Api) -> None:
    queue = "state/zoo ü"
    with zoo(broker, api, queue):
        reply = read(api, queue, view="state")
        shown = api.get(path_of(queue, "messages"))["messages"]
        assert range_in(reply) == (0, 9)
        states = table_of(reply)
        assert states.schema == schema_of("state")
        rows = {row["offset"]: row for row in states.to_pylist()}
        assert {offset: row["state"] for offset, row in rows.items()} == {
            offset: state for offset, state in STATES.items() if state != "gone"
        }
        for offset, row in rows.items():
            message = shown[offset]
            assert row["value"] == value(offset)
            for column in ("id", "attempts", "reason", "consumer", "retries"):
                assert row[column] == message[column]
            assert row["timestamp"] == datetime.fromisoformat(message["time"])
            expires = message["expires"]
            assert row["expires"] == (datetime.fromisoformat(expires) if expires else None)
        assert rows[HELD]["consumer"] != rows[LOOKED_INTO]["consumer"]
        assert (rows[TTL]["retries"], rows[REQUEUED]["attempts"]) == (7, 1)
        for state in ("ready", "held", "dead"):
            only = table(api, queue, view="state", state=state).to_pylist()
            assert only == [row for row in rows.values() if row["state"] == state]
        some = table(api, queue, view="state", start=2, end=6)
        assert some.to_pylist() == [rows[offset] for offset in (2, 3, 4, 5)]


def test_the_state_of_a_queue_with_as_many_runs_as_messages(broker: BrokerProcess, api: Api) -> None:
    count, part = 13_500, 900
    send_lines(api, "runs", 0, count)
    with phpmq(broker) as mq:
        for _ in range(count // part):
            taken = list(mq.consume("runs", prefetch=part, count=part, timeout=WAIT_SECONDS))
            mq.ack_many(taken[0::3])
            for message in taken[1::3]:
                message.reject()
            for message in taken[2::3]:
                message.requeue()
    until(lambda: counts(api, "runs") == (4500, 0, 4500), "verdicts to arrive")
    states = table(api, "runs", view="state")
    assert states["offset"].to_pylist() == [offset for offset in range(count) if offset % 3]
    assert states["value"].to_pylist() == [text_of(offset).encode() for offset in range(count) if offset % 3]
    assert states["state"].to_pylist() == ["dead", "ready"] * 4500
    assert states["reason"].to_pylist() == ["rejected", None] * 4500
    assert set(states["attempts"].to_pylist()) == {1}


# --- the state view by itself, against the log -----------------------------------------------------


def runs_of(log: Log, queue: str, start: int, end: int, runs_max: int) -> Runs:
    """As the first process answers."""
    runs = log.states(queue, start, end, runs_max)
    fields = {"count": len(runs), "next": runs.next, "consumers": runs.consumers, "time_us": NOW_US}
    fields |= {"repairs": len(runs.repair_first), "steps": runs.steps}
    names = ["repair_first", "repair_end", "repair_distance", *(name for name, _ in Runs.COLUMNS)]
    body = b"".join(getattr(runs, name).tobytes() for name in names)
    return Runs(start, Frame(fields, memoryview(body)))


def moment(us: int) -> datetime | None:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us) if us > 0 else None


def state_rows(log: Log, queue: str, start: int, end: int) -> list[Row]:
    """The view, built one by one."""
    runs = log.states(queue, start, end, 1_000_000)
    rows: list[Row] = []
    for run in range(len(runs)):
        expires, retries = runs.expires_us[run], runs.retries[run]
        for piece in log.read(queue, runs.first[run], runs.end[run]):
            for i in range(piece.lo, piece.hi):
                offset = piece.first_offset + i
                stored_expires = piece.expires_us[i] if piece.expires_us is not None else 0
                stored_retries = piece.retries[i] if piece.retries is not None else -1
                left = stored_retries if retries == AS_STORED else retries
                rows.append(
                    {
                        "queue": queue,
                        "offset": offset,
                        "id": id_of(piece.origin, offset).decode(),
                        "state": STATE_WORDS[State(runs.state[run])],
                        "attempts": runs.attempts[run],
                        "reason": Reason(runs.reason[run]).label or None,
                        "consumer": runs.consumers[runs.consumer[run]] if runs.consumer[run] >= 0 else None,
                        "timestamp": moment(piece.time_us),
                        "expires": moment(stored_expires if expires == AS_STORED else expires),
                        "retries": left if left >= 0 else None,
                        "value": bytes(piece.payload[piece.bounds[i] : piece.bounds[i + 1]]),
                    }
                )
    return rows


@pytest.fixture(scope="module", params=[QUEUES, QUEUES[:3]], ids=["kept", "thinned"])
def busy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A log with everything in it, whole or with what retention has left of it; still open."""
    worker = Worker(tmp_path_factory.mktemp("busy"), 5, queues=request.param)
    for part in range(6):
        for _ in range(80):
            worker.turn()
        worker.settle_down()
        worker.reopen(crash=part % 2 == 0)
    for queue in worker.queues:
        worker.engine.append(queue, Batch.of([b"%d" % i for i in range(40)]), worker.now_us)
        worker.engine.append(queue, Batch.of([b"late"] * 3, delay_us=[0, SECOND_US, 1 << 40]), worker.now_us)
        for piece in worker.engine.take(queue, "ann", 12, worker.now_us):
            ranges = [(piece.offset_start, piece.offset_end)]
            worker.engine.settle(queue, "ann", Outcome.REJECT, ranges, worker.now_us)
        for who in ("ann", "bob"):
            worker.engine.take(queue, who, 9, worker.now_us)
            worker.engine.take(queue, who, 2, worker.now_us, dead=True)
    worker.settle_down()
    yield worker
    worker.engine.close(worker.now_us)


@pytest.mark.parametrize("join_rows", [1, 4096])
@pytest.mark.parametrize("runs_max", [1, 3, 2000])
def test_states_are_what_the_engine_says(
    busy: Worker, runs_max: int, join_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_view, "JOIN_ROWS", join_rows)
    log, seen = busy.engine, set()
    for queue in busy.queues:
        with LogReader(str(busy.folder)) as reader:
            known = reader.queue(queue)
            assert known is not None
            middle = (known.offset_start + known.offset_end) // 2
            for start, end in [(0, known.offset_end), (middle - 20, middle + 20), (middle, middle + 1)]:

                def ask(at: int, queue: str = queue, end: int = end) -> Runs:
                    return runs_of(log, queue, at, end, runs_max)

                batches = list(state_batches(reader, queue, start, end, ask))
                for batch in batches:
                    batch.validate(full=True)
                rows = pa.Table.from_batches(batches, schema_of("state")).to_pylist()
                assert rows == state_rows(log, queue, start, end)
                seen |= {(row["state"], row["consumer"]) for row in rows}
                for columns in (["state", "offset"], ["expires", "retries"], ["value", "id", "timestamp"]):
                    batches = list(state_batches(reader, queue, start, end, ask, columns=columns))
                    pruned = [{name: row[name] for name in columns} for row in rows]
                    assert [row for batch in batches for row in batch.to_pylist()] == pruned
                    assert all(batch.schema.names == columns for batch in batches)
    assert seen >= {
        ("ready", None),
        ("held", "ann"),
        ("held", "bob"),
        ("dead", None),
        ("dead", "ann"),
        ("delayed", None),
    }


def test_a_clock_that_was_put_forward_puts_off_what_is_told_of_expiry(tmp_path: Path) -> None:
    log, hour_us = open_log(str(tmp_path), NOW_US), 3600 * SECOND_US

    log.append("q", Batch.of([b"living", b"new", b"dead"], ttl_seconds=[100] * 3), NOW_US)
    log.take("q", "w", 3, NOW_US)
    log.settle("q", "w", Outcome.REJECT, [(2, 3)], NOW_US)
    log.step(hour_us, NOW_US + hour_us)
    log.settle("q", "w", Outcome.REQUEUE, [(1, 2)], NOW_US + hour_us, ttl_seconds=7)
    log.give_back("q", "w", NOW_US + hour_us)
    log.append("q", Batch.of([b"after"], ttl_seconds=[100]), NOW_US + hour_us)
    log.flush(NOW_US + hour_us)
    log.wait()
    runs = runs_of(log, "q", 0, 4, 100)
    with LogReader(str(tmp_path)) as reader:
        batches = state_batches(reader, "q", 0, 4, lambda at: runs_of(log, "q", at, 4, 100))
        rows = pa.Table.from_batches(list(batches), schema_of("state")).to_pylist()
        seen = look_at(reader, "q", [(0, 4)], 10, 1000).seen
        now = moment(NOW_US + hour_us)
        assert now is not None
        assert [(row["expires"] - now).total_seconds() for row in rows] == [100, 7, 100, 100]
        runs.now_us = NOW_US + hour_us
        assert [message_fields(it, runs)["ttl"] for it in seen] == [100, 7, None, 100]
        late = parse("expires > '+1m'")
        found = letters.matching(reader, "q", list(letters._runs(runs)), late, runs.now_us, {})
        assert [range_ for ranges in found for range_ in ranges] == [(2, 3)]
    log.close(NOW_US + hour_us)


def small_log(folder: Path) -> Log:
    """1000 messages in small segments, of which nothing that is settled is kept."""
    settings = LogSettings(segment_bytes=16 * 1024, block_bytes=2048, snapshot_blocks=10)
    policies = Policies({"q": {"retention-seconds": 0}})
    log = open_log(str(folder), NOW_US, settings=settings, policies=policies)
    for turn in range(100):
        log.append("q", Batch.of([b"x" * 100] * 10), NOW_US + turn)
        log.flush(NOW_US + turn)
        log.wait()
    return log


def remove_half(log: Log) -> None:
    """The first half of these is settled, and retention takes it."""
    log.withdraw("q", [(0, 500)], Reason.OPERATOR, NOW_US)
    for turn in range(4):
        now_us = NOW_US + turn * 10 * SECOND_US
        log.append("q", Batch.of([b"more" * 400] * 30), now_us)
        log.flush(now_us)
        log.wait()
        log.tick(now_us)
        log.trim(now_us)
        log.wait()


def test_states_of_messages_that_go_between_the_question_and_the_read(tmp_path: Path) -> None:
    """What was settled and removed since the runs were told is left out, without a word."""
    log = small_log(tmp_path)
    with LogReader(str(tmp_path)) as reader:
        runs = runs_of(log, "q", 0, 1000, 2000)
        remove_half(log)
        assert log.describe("q").offset_start > 0
        batches = list(state_batches(reader, "q", 0, 1000, lambda _: runs))
        offsets = [offset for batch in batches for offset in batch["offset"].to_pylist()]
        assert offsets == [*range(500, 1000)]
    log.close(NOW_US)


def test_a_living_message_that_cannot_be_found_is_an_error(tmp_path: Path) -> None:
    log = open_log(str(tmp_path), NOW_US)
    for turn in range(3):
        log.append("q", Batch.of([b"x" * 100] * 10), NOW_US + turn)
        log.flush(NOW_US + turn)
        log.wait()
    with LogReader(str(tmp_path)) as reader:
        position = next(reader.messages("q", 10)).header.position
    for path in tmp_path.glob("*.seg"):
        with path.open("r+b") as file:
            file.seek(position + 30)
            file.write(b"\xff")
    with LogReader(str(tmp_path)) as reader:

        def ask(at: int) -> Runs:
            return runs_of(log, "q", at, 30, 2000)

        with pytest.raises(OffsetsMissing, match="offsets 10 to 19"):
            list(state_batches(reader, "q", 0, 30, ask))
        batches = list(state_batches(reader, "q", 0, 30, ask, fail_on_loss=False))
        assert sum(batch.num_rows for batch in batches) == 20
    log.close(NOW_US)


# --- columns --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "columns"),
    [
        ("messages", ["value", "offset"]),
        ("messages", ["id"]),
        ("events", ["timestamp", "event", "offset"]),
        ("state", ["state", "offset", "value"]),
        ("state", ["consumer"]),
    ],
)
def test_columns_in_the_order_of_the_question(api: Api, large: str, view: str, columns: list[str]) -> None:
    whole = table(api, large, view=view, start=100, end=300)
    some = table(api, large, view=view, start=100, end=300, columns=",".join(columns))
    assert some.schema.names == columns
    assert some.equals(whole.select(columns))
    again = table(api, large, view=view, start=100, end=300, columns=",".join([*columns, columns[0]]))
    assert again.schema.names == columns


# --- no ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ({"view": "payloads"}, "messages, events, state"),
        ({"start": -1}, "start"),
        ({"end": "x"}, "end"),
        ({"columns": "nix"}, "columns"),
        ({"columns": ""}, "columns"),
        ({"columns": "event"}, "the view messages has no column 'event'; it has queue, offset, id, value"),
        ({"view": "events", "columns": "offset,value"}, "the view events has no column 'value'"),
        ({"fail_on_loss": 1}, "fail_on_loss"),
        ({"view": "state", "state": "gone"}, "use one of ready, delayed, held, dead"),
        ({"view": "events", "state": "dead"}, "'state': the view events does not tell how messages stand"),
        ({"strt": 1}, "did you mean 'start'"),
    ],
)
def test_wrong_parameters_are_named(api: Api, query: dict[str, Any], named: str) -> None:
    api.send("asked", b"x")
    reply = api.ask("GET", path_of("asked", "log"), **query)
    assert (reply.status, reply.problem) == (400, "bad-request")
    assert named in reply.json["detail"]


def test_no_queue_and_no_head(api: Api) -> None:
    for view in COLUMNS:
        reply = api.ask("GET", path_of("nix", "log"), view=view)
        assert (reply.status, reply.problem) == (404, "queue-not-found")
    api.send("asked", b"x")
    assert api.ask("HEAD", path_of("asked", "log")).status == 405


BLOCKING = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {module!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.parametrize("module", ["pyarrow", "numpy"])
def test_without_the_extra_it_says_what_to_install(
    tmp_path: Path, start_broker: StartBroker, module: str
) -> None:
    (tmp_path / "block").mkdir()
    (tmp_path / "block" / "sitecustomize.py").write_text(BLOCKING.format(module=module))
    broker = start_broker(env={"PYTHONPATH": str(tmp_path / "block")})
    with Api(broker.ports["http"]) as api:
        api.send("base", b"x", b"y")
        for view in COLUMNS:
            reply = api.ask("GET", path_of("base", "log"), view=view)
            assert (reply.status, reply.problem) == (501, "not-installed")
            assert f"{module} is not installed" in reply.json["detail"]
            assert "pip install 'penstock[arrow]'" in reply.json["detail"]
        # All that needs no Arrow goes on, histories too.
        messages = api.get(path_of("base", "messages"), history=True)["messages"]
        assert [len(message["history"]) for message in messages] == [1, 1]


# --- retention and damage ------------------------------------------------------------------------------


def test_what_retention_has_removed(tmp_path: Path, start_broker: StartBroker) -> None:
    folder = tmp_path / "broker"
    folder.mkdir()
    worker = Worker(folder / "data", 19, queues=QUEUES[:3])
    for part in range(6):
        for _ in range(80):
            worker.turn()
        worker.settle_down()
        worker.reopen(crash=part % 2 == 0)
    worker.now_us += 60 * SECOND_US
    worker.engine.expire(worker.now_us)  # What expires does so here, and not while it is looked at.
    worker.settle_down()
    living = state_rows(worker.engine, "brief", 0, worker.engine.describe("brief").offset_end)
    worker.engine.close(worker.now_us)
    broker = start_broker()
    with LogReader(str(folder / "data")) as reader, Api(broker.ports["http"]) as api:
        known = reader.queue("brief")
        assert known is not None
        for view, start, end in [
            ("messages", known.offset_start, known.offset_end),
            ("events", known.event_start, known.event_end),
        ]:
            assert start > 0
            assert range_in(read(api, "brief", view=view)) == (start, end)
            assert range_in(read(api, "brief", view=view, start=start)) == (start, end)
            assert range_in(read(api, "brief", view=view, start=0, fail_on_loss=False)) == (start, end)
            assert range_in(read(api, "brief", view=view, start=0, end=1, fail_on_loss=False)) == (
                start,
                start,
            )
            reply = api.ask("GET", path_of("brief", "log"), view=view, start=start - 1)
            assert (reply.status, reply.problem) == (410, "offsets-missing")
            assert (reply.json["queue"], reply.json["offset_start"]) == ("brief", start)
            assert str(start) in reply.json["detail"]
        batches = messages_batches(reader, "brief", known.offset_start)
        assert table(api, "brief").to_pylist() == pa.Table.from_batches(batches).to_pylist()
        # What is alive is there, however old it is.
        assert living[0]["offset"] < known.offset_start
        states = read(api, "brief", view="state", start=0)
        assert range_in(states) == (0, known.offset_end)
        assert table_of(states)["offset"].to_pylist() == [row["offset"] for row in living]


def damage(broker: BrokerProcess, content: bytes) -> None:
    for path in (broker.folder / "data").glob("*.seg"):
        with path.open("r+b") as file:
            at = file.read().find(content)
            if at >= 0:
                file.seek(at)
                file.write(b"#")


def test_an_error_in_the_middle_breaks_the_connection(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        for first in range(0, 100_000, 10_000):
            send_lines(api, "broken", first, first + 10_000)
        damage(broker, text_of(77_777).encode())
        for view in ("messages", "state"):
            with pytest.raises(http.client.IncompleteRead), Api(broker.ports["http"]) as reader:
                reader.ask("GET", path_of("broken", "log"), view=view)
        until(lambda: "was broken off" in broker.log(), "the log to tell")
        assert "does not have its checksum" in broker.log()
        for view in ("messages", "state"):
            rest = table(api, "broken", view=view, fail_on_loss=False)["offset"].to_pylist()
            assert rest == sorted(rest)
            assert 77_777 not in rest
            assert len(rest) >= 80_000
        # At the very beginning, it is a problem.
        reply = api.ask("GET", path_of("broken", "log"), start=77_777, end=77_778)
        assert (reply.status, reply.problem) == (500, "internal")
        assert "does not have its checksum" in reply.json["detail"]


def first_of(reader: LogReader, queue: str, view: str, start: int) -> object:
    """The first thing that a walk yields; nobody has to be asked for these."""
    wanted = Wanted(queue, view, start, None, COLUMNS[view], fail_on_loss=True)
    return next(walk(reader, wanted, cast(Asking, None)))


@pytest.mark.parametrize("view", ["messages", "events"])
def test_retention_that_goes_on_after_the_range_was_settled(tmp_path: Path, view: str) -> None:
    log = small_log(tmp_path)
    # This one does not look again before it finds files gone.
    with LogReader(str(tmp_path), maps_max=1) as reader:
        assert first_of(reader, "q", view, 0) == (0, 1000)
        remove_half(log)
        info = log.describe("q")
        start = info.event_start if view == "events" else info.offset_start
        assert start > 0
        with pytest.raises(Problem, match="retention has removed") as caught:
            first_of(reader, "q", view, 0)
        assert caught.value.status == 410
        assert caught.value.fields()["offset_start"] == start
    log.close(NOW_US)


def test_a_beginning_that_is_damaged_is_not_put_down_to_retention(tmp_path: Path) -> None:
    log = open_log(str(tmp_path), NOW_US)
    for turn in range(3):
        log.append("q", Batch.of([b"x" * 100] * 10), NOW_US + turn)
        log.flush(NOW_US + turn)
        log.wait()
    with LogReader(str(tmp_path)) as reader:
        position = next(reader.messages("q", 10)).header.position
    for path in tmp_path.glob("*.seg"):
        with path.open("r+b") as file:
            file.seek(position + 30)
            file.write(b"\xff")
    with LogReader(str(tmp_path)) as reader, pytest.raises(Problem, match="offsets 10 to 19") as caught:
        first_of(reader, "q", "messages", 10)
    assert caught.value.status == 500
    log.close(NOW_US)


# --- clients that go, many at once, and a broker at work ---------------------------------------------------


def open_and_read_a_bit(port: int, queue: str) -> socket.socket:
    """The beginning of an answer, of which the rest is not read."""
    client = socket.create_connection(("127.0.0.1", port), WAIT_SECONDS)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.sendall(f"GET {path_of(queue, 'log')} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert client.recv(15) == b"HTTP/1.1 200 OK"
    return client


@pytest.fixture(scope="module")
def huge(broker: BrokerProcess) -> str:
    """A queue whose log does not fit into the buffers of a connection."""
    with phpmq(broker) as mq, Api(broker.ports["http"]) as api:
        mq.send_many("huge", [b"%06d" % i + b"h" * 5000 for i in range(4000)])
        until(lambda: counts(api, "huge")[0] == 4000, "all to arrive")
    return "huge"


@pytest.mark.long
def test_clients_that_leave_in_the_middle_leave_nothing_behind(
    broker: BrokerProcess, api: Api, huge: str
) -> None:
    """More of them than may be open at a time: were one not released, the last would wait in vain."""
    port = broker.ports["http"]
    for _ in range(2):
        clients = [open_and_read_a_bit(port, huge) for _ in range(WALKS_MAX)]
        # They are all stalled, and keep nobody from looking.
        assert len(api.get(path_of(huge, "messages"), limit=10)["messages"]) == 10
        for client in clients:
            client.close()
    assert table(api, huge)["offset"].to_pylist() == [*range(4000)]


def test_a_walk_waits_for_its_turn(broker: BrokerProcess, huge: str) -> None:
    port = broker.ports["http"]
    clients = [open_and_read_a_bit(port, huge) for _ in range(WALKS_MAX)]
    with Api(port) as api:
        done: list[int] = []
        waiting = threading.Thread(target=lambda: done.append(table(api, huge).num_rows))
        waiting.start()
        assert not done
        clients.pop().close()
        waiting.join(WAIT_SECONDS)
        assert done == [4000]
    for client in clients:
        client.close()


@pytest.mark.parametrize("crowded", [True, False])
def test_a_client_that_takes_nothing_keeps_its_turn_only_while_nobody_else_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crowded: bool
) -> None:
    """And then not for ever. A walk that has to look for its next part is no such client."""
    monkeypatch.setattr(api_log, "STALL_SECONDS", 0.05)
    monkeypatch.setattr(api_log, "STALL_SECONDS_MAX", WAIT_SECONDS if crowded else 0.2)
    sent: list[bytes] = []
    looked = threading.Event()

    def slow(_reader: LogReader) -> Iterator[api_log.Range | api_log.Chunk]:
        yield b"a"
        assert looked.wait(WAIT_SECONDS)
        yield b"b"
        yield from [b"c"] * 5

    async def stall_at_b(message: Message) -> None:
        sent.append(message.get("body", b""))
        if sent[-1] == b"b":
            await asyncio.Event().wait()

    async def stay() -> Message:
        await asyncio.Event().wait()
        return {}

    async def run() -> None:
        pool = ReaderPool(str(tmp_path), walks_max=1 if crowded else 2)
        try:
            asyncio.get_running_loop().call_later(0.3, looked.set)
            async with asyncio.timeout(WAIT_SECONDS):
                what = "messages of 'q'"
                response = api_log.StreamedResponse(
                    pool.stream(slow), api_log.ARROW_MEDIA, {}, what, lambda: None
                )
                await response({}, stay, stall_at_b)
                assert len([part async for part in pool.stream(slow)]) == 7
        finally:
            pool.close()

    asyncio.run(run())
    assert sent == [b"", b"a", b"b"]


def test_several_bulk_readers_at_once(broker: BrokerProcess, large: str) -> None:
    found: list[pa.Table] = []

    def read_all(view: str) -> None:
        with Api(broker.ports["http"]) as api:
            found.append(table(api, large, view=view, columns="offset"))

    threads = [threading.Thread(target=read_all, args=(view,)) for view in (*COLUMNS, *COLUMNS, *COLUMNS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert [it.num_rows for it in found] == [100_000] * 9


def test_following_a_broker_that_writes(broker: BrokerProcess, api: Api) -> None:
    """From end to end: nothing is missed, nothing comes twice, and all of it is what was sent."""
    count = 40_000
    api.send("busy", text_of(0).encode())

    def write() -> None:
        with phpmq(broker) as mq:
            for first in range(1, count, 100):
                mq.send_many("busy", values(first, min(first + 100, count)))

    writer = threading.Thread(target=write)
    writer.start()
    at, reads = 0, 0
    while at < count:
        reply = read(api, "busy", start=at)
        start, end = range_in(reply)
        messages = table_of(reply)
        assert start == at
        assert messages["offset"].to_pylist() == [*range(start, end)]
        assert messages["value"].to_pylist() == values(start, end)
        at, reads = end, reads + 1
    writer.join(WAIT_SECONDS)
    assert reads > 1


def test_a_range_that_is_not_synced_yet_is_cut(start_broker: StartBroker) -> None:
    broker = start_broker("--durability", "none")
    with Api(broker.ports["http"]) as api, phpmq(broker) as mq:
        mq.send_many("unsafe", [b"x"] * 10)
        until(lambda: "unsafe" in names(api), "the queue to be there")
        reply = read(api, "unsafe", end=10)
        assert range_in(reply) in ((0, 0), (0, 10))
        assert table_of(reply).num_rows == range_in(reply)[1]
        assert table_of(reply).schema == MESSAGES_SCHEMA
        until(lambda: range_in(read(api, "unsafe")) == (0, 10), "messages to be synced")
