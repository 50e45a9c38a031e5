"""Searching: what is found is what a plain filter over the messages says; and it ends when nobody listens."""

import asyncio
import csv
import http.client
import io
import json
import socket
import sys
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode

import pyarrow.parquet as pq
import pytest

from penstock.control.frames import Frame
from penstock.http.api import search as api_search
from penstock.http.api.log import Asking
from penstock.http.bodies import found as found_bodies
from penstock.http.bodies.found import VALUE_BYTES_MAX, Incomplete, cursor_text, read_cursor
from penstock.http.reading import search as reading
from penstock.http.reading.looking import STATES, Runs, look_at, message_fields, with_repairs
from penstock.http.reading.pool import ReaderPool
from penstock.http.reading.search import Cursor, Found, Item, Missing, Place, Search, Wanted
from penstock.http.where import condition as where_condition
from penstock.http.where.condition import Condition, TooLong, parse
from penstock.log.log import Log, open_log
from penstock.log.reader import LogReader
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.life import State
from penstock.model.policy import Policies
from penstock.model.words import Outcome
from tests.http.api import NDJSON, Api, Reply
from tests.http.conftest import StartBroker
from tests.http.disks import damage
from tests.http.morgue import path_of, reject, send
from tests.http.test_log import remove_half, small_log
from tests.http.test_rights import SETTINGS, as_user
from tests.http.zoo import LOOKED_INTO, zoo
from tests.http.zoo import STATES as ZOO
from tests.log.folders import NOW_US, QUEUES, SECOND_US, Worker
from tests.server.harness import BrokerProcess, until

Row = dict[str, Any]

_ONLY = {"ready": State.READY, "delayed": State.DELAYED, "held": State.HELD, "dead": State.DEAD}


class Engine:
    """A log in this process, asked as the first process is; every question is counted."""

    def __init__(self, log: Log, runs_max: int = 2000) -> None:
        self._log = log
        self._runs_max = runs_max
        self.asked = 0
        self.before: Callable[[], None] = lambda: None

    def states(self, queue: str, start: int, end: int, identity: str, only: str | None) -> Runs:
        self.asked += 1
        self.before()
        self._log.check_same(queue, identity)
        runs = self._log.states(queue, start, end, self._runs_max, _ONLY[only] if only else None)
        fields = {"count": len(runs), "next": runs.next, "consumers": runs.consumers, "time_us": NOW_US}
        fields |= {"repairs": len(runs.repair_first), "steps": runs.steps, "whys": runs.whys}
        names = ["repair_first", "repair_end", "repair_distance", *(name for name, _ in Runs.COLUMNS)]
        body = b"".join(getattr(runs, name).tobytes() for name in names)
        return Runs(start, Frame(fields, memoryview(body)))


def items_of(search: Search, reader: LogReader) -> list[Item]:
    return [item for items in search.walk(reader) for item in items]


def search_of(engine: Engine, *queues: str, **wanted: Any) -> Search:
    return Search(Wanted(queues, **wanted), engine, now_us=NOW_US)


def found_by(search: Search, reader: LogReader) -> list[tuple[str, int]]:
    found = []
    for item in items_of(search, reader):
        assert isinstance(item, Found)
        found.append((item.row.queue, item.row.offset))
    return found


# --- against a plain filter ------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[QUEUES, QUEUES[:3]], ids=["kept", "thinned"])
def busy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A log with everything in it, whole or with what retention has left of it; still open."""
    worker = Worker(tmp_path_factory.mktemp("searched"), 11, queues=request.param)
    for part in range(5):
        for _ in range(60):
            worker.turn()
        worker.settle_down()
        worker.reopen(crash=part % 2 == 0)
    for queue in worker.queues:
        late = [0, SECOND_US, 1 << 40]
        headers = [b'{"k":"%d"}' % i for i in range(3)]
        worker.engine.append(queue, Batch.of([b'{"n": %d}' % i for i in range(40)]), worker.now_us)
        worker.engine.append(queue, Batch.of([b"late"] * 3, delay_us=late, headers=headers), worker.now_us)
        for piece in worker.engine.take(queue, "ann", 12, worker.now_us):
            ranges = [(piece.offset_start, piece.offset_end)]
            worker.engine.settle(queue, "ann", Outcome.REJECT, ranges, worker.now_us)
        worker.engine.take(queue, "bob", 9, worker.now_us)
        worker.engine.take(queue, "bob", 2, worker.now_us, dead=True)
    worker.settle_down()
    yield worker
    worker.engine.close(worker.now_us)


def all_messages(worker: Worker, reader: LogReader, queue: str) -> list[Row]:
    """Every message that is in the log, with how it stands: by the code that shows pages of them."""
    known = reader.queue(queue)
    assert known is not None
    runs = Engine(worker.engine, 1_000_000).states(queue, 0, known.offset_end, reader.identity(queue), None)
    rows, at = [], 0
    while at is not None:
        look = look_at(reader, queue, [(at, known.offset_end)], 1000, 1 << 30)
        for message in with_repairs(reader, queue, look.seen, [runs]):
            fields = message_fields(message, runs)
            rows.append({**fields, "time_us": message.time_us, "value": message.value, "queue": queue})
        if look.offset_next is None:
            break
        at = look.offset_next
    return rows


FILTERS: list[tuple[str | None, Callable[[Row], bool]]] = [
    (None, lambda row: True),
    ("offset between 3 and 90", lambda row: 3 <= row["offset"] <= 90),
    ("state = 'dead' or state = 'delayed'", lambda row: row["state"] in ("dead", "delayed")),
    ("state != 'gone' and attempts >= 1", lambda row: row["attempts"] is not None and row["attempts"] >= 1),
    ("attempts is null", lambda row: row["state"] == "gone"),
    ("reason = 'rejected'", lambda row: row["reason"] == "rejected"),
    ("consumer = 'bob'", lambda row: row["consumer"] == "bob"),
    ("value_bytes > 20 and expires is not null", lambda row: len(row["value"]) > 20 and row["expires"]),
    ("retries >= 1", lambda row: row["retries"] is not None and row["retries"] >= 1),
    ("value like '%late%'", lambda row: b"late" in row["value"]),
    ("value.n >= 20", lambda row: row["value"].startswith(b'{"n": ') and int(row["value"][6:-1]) >= 20),
    ("headers.k = '1'", lambda row: row["headers"].get("k") == "1"),
    ("due is not null", lambda row: row["due"] is not None),
    ("protocol = 'rq'", lambda row: row["protocol"] == "rq"),
]  # fmt: skip


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize(("stretch", "runs_max"), [(7, 3), (10_000, 2000)])
def test_a_search_finds_what_a_plain_filter_says(
    busy: Worker, newest: bool, stretch: int, runs_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "STRETCH", stretch)
    monkeypatch.setattr(reading, "WINDOW", stretch)
    engine = Engine(busy.engine, runs_max)
    matched = 0
    with LogReader(str(busy.folder)) as reader:
        for queue in busy.queues:
            rows = all_messages(busy, reader, queue)
            times = sorted({row["time_us"] for row in rows})
            middle = times[len(times) // 2]
            for where, fits in FILTERS:
                condition = parse(where) if where is not None else None
                for states in (STATES, ("dead",), ("ready", "held"), ("delayed", "gone")):
                    search = search_of(
                        engine, queue, condition=condition, states=frozenset(states), newest=newest
                    )
                    wanted = [row for row in rows if row["state"] in states and fits(row)]
                    found = items_of(search, reader)
                    check(found, wanted[::-1] if newest else wanted)
                    assert search.ended is not None
                    assert search.ended.complete
                    assert search.found == len(wanted)
                    matched += len(wanted)
            end = rows[-1]["offset"] + 1
            for start, stop, wanted in [
                (Place(offset=5), Place(offset=40), [row for row in rows if 5 <= row["offset"] < 40]),
                (Place(time_us=middle), Place(), [row for row in rows if row["time_us"] >= middle]),
                (Place(), Place(time_us=middle), [row for row in rows if row["time_us"] < middle]),
                (Place(offset=end), Place(), []),
            ]:
                search = search_of(engine, queue, start=start, end=stop, newest=newest)
                check(items_of(search, reader), wanted[::-1] if newest else wanted)
    assert matched > 1000


SHOWN = (
    "queue", "id", "state", "expires", "retries", "attempts", "due", "headers", "reason", "why", "consumer",
    "protocol", "repaired",
)  # fmt: skip


def check(found: list[Item], wanted: list[Row]) -> None:
    assert [item.row.offset for item in found if isinstance(item, Found)] == [row["offset"] for row in wanted]
    for item, row in zip(found, wanted, strict=True):
        assert isinstance(item, Found)
        fields = found_bodies.fields_of(item, "full")
        assert bytes(item.row.value) == row["value"]
        assert fields["timestamp"] == row["time"]
        for name in [
            "queue",
            "id",
            "state",
            "expires",
            "retries",
            "attempts",
            "due",
            "headers",
            "reason",
            "why",
            "consumer",
            "protocol",
            "repaired",
        ]:
            assert fields[name] == row[name], name


@pytest.mark.parametrize("newest", [False, True])
def test_it_goes_on_where_it_ended(busy: Worker, newest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page by page over many queues, each message once and none left out; a cursor is a text."""
    monkeypatch.setattr(reading, "STRETCH", 20)
    monkeypatch.setattr(reading, "WINDOW", 20)
    engine, queues = Engine(busy.engine), sorted(busy.queues)
    living = frozenset({"ready", "dead"})
    with LogReader(str(busy.folder)) as reader:
        whole = found_by(search_of(engine, *queues, states=living, newest=newest), reader)
        assert len({queue for queue, _ in whole}) > 1
        for limit in (1, 7, len(whole) - 1, len(whole)):
            pages: list[tuple[str, int]] = []
            after, count = None, 0
            while True:
                search = search_of(engine, *queues, states=living, newest=newest, limit=limit, after=after)
                page = found_by(search, reader)
                assert len(page) <= limit
                pages += page
                count += 1
                assert search.ended is not None
                if search.ended.next is None:
                    assert search.ended.complete
                    break
                assert (search.ended.complete, search.ended.why) == (False, "limit")
                after = read_cursor(cursor_text(search.ended.next))
            assert pages == whole
            assert count >= len(whole) // limit


def test_what_is_no_cursor() -> None:
    cursor = Cursor("größe/1", "0a1b2c000001", 17, True)
    assert read_cursor(cursor_text(cursor)) == cursor
    for text in ("", "x", "e30", "W10", cursor_text(cursor)[:-8], "_" * 50):
        assert read_cursor(text) is None


# --- bounds ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Log, str]]:
    folder = str(tmp_path_factory.mktemp("million"))
    log = open_log(folder, NOW_US, settings=LogSettings(segment_bytes=32 << 20))
    for part in range(100):
        batch = Batch.of([b'{"n": %d}' % (part * 10_000 + i) for i in range(10_000)])
        log.append("q", batch, NOW_US + part)
        log.flush(NOW_US + part)
        log.wait()
    yield log, folder
    log.close(NOW_US)


@pytest.mark.parametrize("newest", [False, True])
def test_a_million_messages_are_searched_in_bounded_memory(million: tuple[Log, str], newest: bool) -> None:
    log, folder = million
    engine = Engine(log)
    condition = parse("offset < 10 or offset >= 999990")
    search = search_of(engine, "q", condition=condition, newest=newest)
    offsets: list[int] = []
    parts = 0
    before = sys.getallocatedblocks()
    most = 0
    with LogReader(folder) as reader:
        for items in search.walk(reader):
            parts += 1
            most = max(most, sys.getallocatedblocks() - before)
            assert len(items) <= max(reading.PART_ITEMS, 1)
            offsets += [item.row.offset for item in items if isinstance(item, Found)]
    wanted = [*range(10), *range(999_990, 1_000_000)]
    assert offsets == (wanted[::-1] if newest else wanted)
    assert (search.searched, search.total) == (1_000_000, 1_000_000)
    assert most < 100_000  # objects; all that was looked at would be millions
    assert engine.asked >= 1_000_000 // reading.STRETCH


def test_what_comes_newest_first_is_kept_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "KEPT_BYTES", 1000)
    log = open_log(str(tmp_path), NOW_US)
    log.append("q", Batch.of([bytes([i]) * 300 for i in range(20)]), NOW_US)
    log.flush(NOW_US)
    log.wait()
    engine = Engine(log)
    with LogReader(str(tmp_path)) as reader:
        search = search_of(engine, "q", newest=True)
        parts = [
            [item.row.offset for item in items if isinstance(item, Found)] for items in search.walk(reader)
        ]
    assert [offset for part in parts for offset in part] == [*range(19, -1, -1)]
    assert max(map(len, parts)) <= 4
    assert (search.found, search.searched) == (20, 20)
    log.close(NOW_US)


def test_an_end_by_time_says_where_to_go_on(million: tuple[Log, str]) -> None:
    log, folder = million
    engine = Engine(log)
    wanted = Wanted(["q"], parse("value.n = 999999"), start=Place(offset=900_000))
    search = Search(wanted, engine, now_us=NOW_US, deadline=0.0)
    with LogReader(folder) as reader:
        assert items_of(search, reader) == []
        assert search.ended is not None
        assert (search.ended.complete, search.ended.why) == (False, "time")
        again = Search(wanted._replace(after=search.ended.next), engine, now_us=NOW_US)
        assert found_by(again, reader) == [("q", 999_999)]


@pytest.mark.parametrize("stretches", [1, 2, 3])
def test_time_that_is_over_before_a_stretch_is_looked_at_leaves_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stretches: int
) -> None:
    """The first process may take long to answer: then nothing of what it told has been looked at."""
    monkeypatch.setattr(reading, "STRETCH", 4)
    monkeypatch.setattr(reading, "REST_SECONDS", -1.0)
    log = open_log(str(tmp_path), NOW_US)
    log.append("q", Batch.of([b"%d" % i for i in range(12)]), NOW_US)
    log.flush(NOW_US)
    log.wait()
    engine = Engine(log)
    wanted = Wanted(["q"])
    search = Search(wanted, engine, now_us=NOW_US)

    def late() -> None:
        if engine.asked == stretches:
            search._deadline = 0.0

    engine.before = late
    with LogReader(str(tmp_path)) as reader:
        found = found_by(search, reader)
        assert search.ended is not None
        assert (search.ended.why, search.searched) == ("time", len(found))
        again = Search(wanted._replace(after=search.ended.next), engine, now_us=NOW_US)
        assert found + found_by(again, reader) == [("q", offset) for offset in range(12)]
    log.close(NOW_US)


def test_a_search_that_nobody_takes_from_stands_still_and_one_that_is_broken_off_stops(
    million: tuple[Log, str],
) -> None:
    """Counted in questions to the first process: none comes after the end."""
    log, folder = million
    engine = Engine(log)

    async def run() -> None:
        pool = ReaderPool(folder)
        try:
            search = search_of(engine, "q")
            stream = pool.stream(lambda reader: search.walk(reader))
            for _ in range(3):
                await anext(stream)
            asked = engine.asked
            assert asked <= 2
            await stream.aclose()
            assert pool.lent == 0
            assert engine.asked == asked
        finally:
            pool.close()

    asyncio.run(run())
    assert engine.asked < 1_000_000 // reading.STRETCH // 10


# --- what is not there any more --------------------------------------------------------------------


def test_retention_that_takes_segments_meanwhile_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "STRETCH", 50)
    log = small_log(tmp_path)
    engine = Engine(log)

    def remove() -> None:
        if engine.asked == 3:
            remove_half(log)

    engine.before = remove
    with LogReader(str(tmp_path), maps_max=1) as reader:
        search = search_of(engine, "q")
        items = items_of(search, reader)
    found = [item.row.offset for item in items if isinstance(item, Found)]
    missing = [item for item in items if isinstance(item, Missing)]
    lost = {offset for it in missing for offset in range(it.first, it.end)}
    assert missing
    assert {it.why for it in missing} == {"retention"}
    assert sorted([*found, *lost]) == [*range(1000)]  # each is found, or told of
    assert search.ended == (False, "missing", None)
    assert search.missing == len(lost)
    log.close(NOW_US)


def test_what_is_damaged_is_told(tmp_path: Path) -> None:
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
    for newest in (False, True):
        with LogReader(str(tmp_path)) as reader:
            search = search_of(Engine(log), "q", newest=newest)
            items = items_of(search, reader)
        assert [it for it in items if isinstance(it, Missing)] == [Missing("q", 10, 20, "damaged")]
        assert sorted(it.row.offset for it in items if isinstance(it, Found)) == [*range(10), *range(20, 30)]
        assert search.ended == (False, "missing", None)
    log.close(NOW_US)


def test_a_queue_that_is_deleted_meanwhile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "STRETCH", 5)
    log = open_log(str(tmp_path), NOW_US, policies=Policies({}))
    for queue in ("a", "b"):
        log.append(queue, Batch.of([b"x"] * 20), NOW_US)
    log.flush(NOW_US)
    log.wait()
    engine = Engine(log)

    def delete() -> None:
        if engine.asked == 2:
            log.delete(["a"], NOW_US)
            log.append("a", Batch.of([b"another"] * 30), NOW_US)
            log.flush(NOW_US)
            log.wait()

    engine.before = delete
    with LogReader(str(tmp_path)) as reader:
        search = search_of(engine, "a", "b")
        items = items_of(search, reader)
    assert [(it.row.queue, it.row.offset) for it in items if isinstance(it, Found)] == [
        *(("a", offset) for offset in range(5)),
        *(("b", offset) for offset in range(20)),
    ]
    (missing,) = (it for it in items if isinstance(it, Missing))
    assert (missing.queue, missing.end, missing.why) == ("a", 20, "deleted")
    log.close(NOW_US)


# --- over HTTP -------------------------------------------------------------------------------------


def lines_of(reply: Reply) -> tuple[list[Row], Row]:
    """What was found, and how it ended."""
    assert reply.status == 200, reply
    assert reply.headers["content-type"] == NDJSON
    lines = [json.loads(line) for line in reply.body.splitlines()]
    assert [*lines[-1]] == ["end"]
    return [line for line in lines[:-1] if "offset" in line], lines[-1]["end"]


def searched(api: Api, queue: str | None = None, **query: Any) -> tuple[list[Row], Row]:
    path = path_of(queue, "search") if queue is not None else "/v1/search"
    return lines_of(api.ask("GET", path, **query))


def test_a_message_in_every_state(broker: BrokerProcess, api: Api) -> None:
    queue = "zoo/ü"
    with zoo(broker, api, queue):
        shown = api.get(path_of(queue, "messages"))["messages"]
        found, end = searched(api, queue)
        assert end == {
            "complete": True, "why": None, "searched": 9, "found": 9, "missing": 0, "next": None
        }  # fmt: skip
        for row, message in zip(found, shown, strict=True):
            for name in ("offset", "id", "state", "expires", "retries", "attempts", "reason", "consumer"):
                assert row[name] == message[name]
            assert (row["queue"], row["timestamp"]) == (queue, message["time"])
            assert row["value_base64"] == message["value_base64"]
        for state in STATES:
            only, _ = searched(api, queue, state=state)
            assert [row["offset"] for row in only] == [it for it, word in ZOO.items() if word == state]
        some, _ = searched(api, queue, state="held,gone", newest=True)
        assert [row["state"] for row in some] == ["held", "gone"]
        assert {row["offset"]: row["died"] is None for row in found if row["state"] == "dead"} == {
            offset: offset == LOOKED_INTO for offset, word in ZOO.items() if word == "dead"
        }
        document = api.get("/openapi.json")
        names = document["components"]["schemas"]["FoundMessage"]
        assert set(names["required"]) <= set(found[0]) <= set(names["properties"])


def test_every_parameter(broker: BrokerProcess, api: Api) -> None:
    send(api, "p", [b'{"n": %d}' % number for number in range(50)])
    found, end = searched(api, "p", where="value.n >= 40 and value.n < 45", limit=3)
    assert [row["value"] for row in found] == ['{"n": 40}', '{"n": 41}', '{"n": 42}']
    assert (end["complete"], end["why"], end["searched"]) == (False, "limit", 43)
    rest, end = searched(api, "p", where="value.n >= 40 and value.n < 45", after=end["next"])
    assert [row["offset"] for row in rest] == [43, 44]
    assert end["complete"]
    assert [row["offset"] for row in searched(api, "p", from_=10, to=12)[0]] == [10, 11]
    assert len(searched(api, "p", from_="-1h")[0]) == 50
    assert searched(api, "p", to="-1h")[0] == []
    assert searched(api, "p", from_="+1h")[0] == []
    assert len(searched(api, "p", from_=found[0]["timestamp"], to="+1h")[0]) == 50
    assert "value" not in searched(api, "p", values="none", limit=1)[0][0]
    long = "ü" * VALUE_BYTES_MAX
    api.send("p", long.encode(), b"x" + long.encode())
    for row in searched(api, "p", from_=50)[0]:
        assert row["cut"] is True
        assert row["value_bytes"] in (2 * VALUE_BYTES_MAX, 2 * VALUE_BYTES_MAX + 1)
        assert len(row["value"]) == VALUE_BYTES_MAX // 2 - (row["value"][0] == "x") + (row["value"][0] == "x")
    whole = searched(api, "p", from_=50, limit=1, values="full")[0][0]
    assert (whole["value"], "cut" in whole) == (long, False)
    for wrong in (
        {"where": "n = 1"},
        {"state": "lost"},
        {"state": "dead,dead"},
        {"from": "yesterday"},
        {"to": "-1"},
        {"limit": 0},
        {"after": "x"},
        {"after": urlsafe_b64encode(b"[" * 20_000).decode()},
        {"after": end["next"] or cursor_text(Cursor("other", "", 0, False))},
        {"after": cursor_text(Cursor("p", "", 0, True))},
        {"timeout": 0},
        {"values": "some"},
        {"format": "xml"},
    ):
        reply = api.ask("GET", path_of("p", "search"), **wrong)
        assert (reply.status, reply.problem) == (400, "bad-request"), wrong
    assert api.ask("GET", path_of("nowhere", "search")).problem == "queue-not-found"
    gone = cursor_text(Cursor("p", "0" * 12, 0, False))
    assert api.ask("GET", path_of("p", "search"), after=gone).problem == "queue-deleted"


def test_many_queues(broker: BrokerProcess, api: Api) -> None:
    for queue in ("many.a", "many.b", "many.c"):
        send(api, queue, [b"one", b"two"])
    reject(broker, api, "many.d", [b"two"])
    found, end = searched(api, queues="many.*", where="value = 'two'")
    assert [(row["queue"], row["state"]) for row in found] == [
        ("many.a", "ready"), ("many.b", "ready"), ("many.c", "ready"), ("many.d", "dead")
    ]  # fmt: skip
    assert (end["complete"], end["searched"]) == (True, 7)
    found, end = searched(api, queues="many.?", limit=3, newest=True)
    assert [(row["queue"], row["offset"]) for row in found] == [("many.a", 1), ("many.a", 0), ("many.b", 1)]
    found, _ = searched(api, queues="many.?", newest=True, after=end["next"])
    assert [(row["queue"], row["offset"]) for row in found][:2] == [("many.b", 0), ("many.c", 1)]
    # One that is deleted before it goes on is not passed over in silence.
    assert api.ask("DELETE", "/v1/queues/many.b").status == 200
    rest, ended = searched(api, queues="many.?", newest=True, after=end["next"])
    assert [row["queue"] for row in rest] == ["many.c", "many.c", "many.d"]
    assert (ended["complete"], ended["why"], ended["missing"]) == (False, "missing", 1)
    assert searched(api, queues="none.*")[0] == []


def test_one_finds_what_one_may_read(start_broker: StartBroker) -> None:
    broker = start_broker(config=SETTINGS)
    with as_user(broker, "root") as root:
        for queue in ("orders.a", "orders.b", "payroll"):
            root.send(queue, b"x")
        assert len(searched(root)[0]) == 3
    with as_user(broker, "read") as api:
        found, end = searched(api)
        assert [row["queue"] for row in found] == ["orders.a", "orders.b"]
        assert end["searched"] == 2  # Others are not counted either.
        assert searched(api, queues="pay*")[0] == []
        assert api.ask("GET", path_of("payroll", "search")).status == 403
    with as_user(broker, "send") as api:
        assert api.ask("GET", "/v1/search").status == 403


def test_what_is_damaged_ends_an_export_and_not_the_lines(start_broker: StartBroker) -> None:
    broker = start_broker()
    damage(broker, "q")
    with Api(broker.ports["http"]) as api:
        found, end = searched(api, "q")
        assert [row["offset"] for row in found] == [0, 1, 2, 4]
        assert (end["complete"], end["why"], end["missing"]) == (False, "missing", 1)
    for format_ in ("csv", "parquet"):
        with Api(broker.ports["http"]) as api, pytest.raises(http.client.HTTPException):
            api.ask("GET", path_of("q", "search"), format=format_)


# --- exports ---------------------------------------------------------------------------------------

ODD = ['=cmd|"/c calc"!A1', "+1", "-1", "@sum", "\tx", 'a "quoted", thing', "two\r\nlines", "plain", "ü", ""]


def test_csv(api: Api) -> None:
    lines = b"".join(json.dumps({"value": text, "headers": {"k": text}}).encode() + b"\n" for text in ODD)
    assert api.ask("POST", path_of("csv", "batch"), lines, {"Content-Type": NDJSON}).status == 200
    api.send("csv", b"\xff")
    reply = api.ask("GET", path_of("csv", "search"), None, {"Accept": "text/csv"})
    assert reply.headers["content-type"] == "text/csv; charset=utf-8"
    assert reply.headers["content-disposition"].startswith('attachment; filename="csv-')
    rows = list(csv.DictReader(io.StringIO(reply.body.decode(), newline="")))
    assert [row["value"] for row in rows] == [*ODD, ""]  # to the letter
    assert [json.loads(row["headers"])["k"] for row in rows[:-1]] == ODD
    assert rows[-1]["value_base64"] == "/w=="
    assert (rows[0]["offset"], rows[0]["state"], rows[0]["expires"]) == ("0", "ready", "")
    safe = api.ask("GET", path_of("csv", "search"), format="csv", spreadsheet=True)
    cells = [row["value"] for row in csv.DictReader(io.StringIO(safe.body.decode(), newline=""))]
    assert cells == [*(f"'{text}" for text in ODD[:5]), *ODD[5:], ""]


def test_parquet_in_groups(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    send(api, "rows", [b"%d" % number for number in range(3000)])
    api.send("rows", b"\xff\xfe", ttl=60)
    reply = api.ask("GET", path_of("rows", "search"), format="parquet")
    assert reply.headers["content-type"] == found_bodies.PARQUET
    table = pq.read_table(io.BytesIO(reply.body))
    assert table["value"].to_pylist() == [*(b"%d" % number for number in range(3000)), b"\xff\xfe"]
    assert table["offset"].to_pylist() == [*range(3001)]
    assert table["expires"].to_pylist()[-1] is not None
    # By itself, with small groups: what it keeps is written when a group is full.
    monkeypatch.setattr(found_bodies, "GROUP_ROWS", 100)
    encoder = found_bodies.Parquet("full")
    row = reading._EMPTY._replace(queue="q", value=memoryview(b"x"), value_bytes=1, protocol="http")
    parts = [encoder.head()]
    for number in range(10):
        parts.append(encoder.items([Found(row._replace(offset=number), None, False)] * 50))
        assert len(encoder._group) < 100
    search = search_of(Engine.__new__(Engine), "q")
    with pytest.raises(Incomplete):
        encoder.end(search)
    search.ended = reading.Ended(True)
    parts.append(encoder.end(search))
    file = pq.ParquetFile(io.BytesIO(b"".join(parts)))
    assert (file.metadata.num_rows, file.metadata.num_row_groups) == (500, 5)


# --- callers that go, and many at once -------------------------------------------------------------


def begun(port: int, queue: str, **query: Any) -> socket.socket:
    """A search whose answer has begun, and is not read."""
    client = socket.create_connection(("127.0.0.1", port), 30)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    target = path_of(queue, "search") + "?" + urlencode(query)
    client.sendall(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    assert client.recv(12) == b"HTTP/1.1 200"
    return client


def test_a_user_has_a_few_searches_and_one_that_is_broken_off_makes_room(
    broker: BrokerProcess, api: Api
) -> None:
    for _ in range(20):
        api.send("large", b"x" * 1_000_000)
    port = broker.ports["http"]
    clients = [begun(port, "large", values="full") for _ in range(api_search.SEARCHES_MAX_USER)]
    reply = api.ask("GET", path_of("large", "search"))
    assert (reply.status, reply.problem) == (429, "too-many-searches")
    assert "of yours" in reply.json["detail"]
    assert reply.headers["retry-after"]
    # Others are served as before.
    assert api.get(path_of("large"))["ready"] == 20
    for client in clients:
        client.close()
    until(lambda: api.ask("GET", path_of("large", "search"), limit=1).status == 200, "a turn")


def test_a_condition_that_takes_too_long_ends_the_search_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(str(tmp_path), NOW_US)
    log.append("q", Batch.of([b"short", b"long", b"short"]), NOW_US)
    log.flush(NOW_US)
    log.wait()

    def matches(self: Condition, row: where_condition.Row, now_us: int) -> bool:
        if bytes(row.value) == b"long":
            raise TooLong
        return True

    monkeypatch.setattr(Condition, "matches", matches)
    with LogReader(str(tmp_path)) as reader:
        with pytest.raises(TooLong, match="the message at offset 1, which has 4 bytes"):
            list(walked(reader, search_of(Engine(log), "q", condition=parse("value like '%_b%'"))))
        monkeypatch.setattr(reading, "PART_ITEMS", 1)
        lines = list(walked(reader, search_of(Engine(log), "q", condition=parse("value like '%_b%'"))))
    assert [line["offset"] for line in lines[:-1]] == [0]
    end = lines[-1]["end"]
    assert (end["complete"], end["why"], end["found"]) == (False, "error", 1)
    assert "takes more than 5 s" in end["detail"]
    log.close(NOW_US)


def walked(reader: LogReader, search: Search) -> Iterator[Row]:
    nobody = cast(Asking, None)
    parts = api_search._walk(reader, search, nobody, None, lambda: found_bodies.Lines("cut"))
    return map(json.loads, b"".join(parts).splitlines())


def test_progress_is_told(million: tuple[Log, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_search, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(reading, "REST_SECONDS", 0.0)
    log, folder = million
    start = Place(offset=950_000)
    search = search_of(Engine(log), "q", condition=parse("offset = 999999"), start=start)
    with LogReader(folder) as reader:
        lines = list(walked(reader, search))
    progress = [line["progress"] for line in lines if "progress" in line]
    assert progress
    assert [it["searched"] for it in progress] == sorted(it["searched"] for it in progress)
    assert {it["total"] for it in progress} == {50_000}
    assert lines[-1]["end"]["found"] == 1
