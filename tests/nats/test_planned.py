"""Where messages are in the stream, as a leader tells it: who reads there sees what the log's files hold.

Random work on a real log in a real stream: several queues in every file, files that go, that are compacted,
and that a new leader has only as a copy.
"""

import json
import os
import random
import secrets
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.http.api.log import Wanted
from penstock.http.problems import Problem
from penstock.http.reading import records
from penstock.http.reading.records import Planner, seq_of
from penstock.log.arrow import (
    MESSAGES_SCHEMA,
    Constants,
    batch_of,
    groups_of,
    messages_batches,
    schema_of,
)
from penstock.log.block import Header
from penstock.log.errors import LogError
from penstock.log.jetstream.cluster import Cluster
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.ranges import Part, Source, blocks
from penstock.log.jetstream.replica import LOG, RECORDS, Replica
from penstock.log.jetstream.servers import parse_server
from penstock.log.jetstream.stream_log import make_missing, open_stream_log
from penstock.log.log import Log
from penstock.log.reader import LogReader
from penstock.log.results import StageInfo
from penstock.log.segment import segment_name
from penstock.model.batch import Batch
from penstock.model.words import Outcome
from tests.log.folders import POLICIES, QUEUES, SECOND_US, Worker

TURNS = 250


@pytest.fixture(scope="module")
def nats(node: Cluster) -> Iterator[LinkThread]:
    nats = LinkThread.open([parse_server(node.nodes[0].url)])
    yield nats
    nats.close()


class StreamWorker(Worker):
    """The same, with a log in a stream; some of its messages are staged, and committed later."""

    def __init__(self, nats: LinkThread, folder: Path, seed: int, queues: Sequence[str] = QUEUES) -> None:
        self._nats = nats
        self.staged: dict[str, list[str]] = {}  # by key: ids of stages that are confirmed
        self.names = LogNames(f"t{secrets.token_hex(6)}")
        nats.ask(make_missing(nats, self.names.all_settings(1)))
        super().__init__(folder, seed, queues=queues)

    def _open(self) -> Log:
        replica = Replica(self._nats.api, self.names, str(self.folder))
        self._nats.ask(replica.begin())
        self.led = open_stream_log(
            self._nats,
            self.names,
            replica,
            self.now_us,
            settings=self.settings,
            policies=POLICIES,
            wake=lambda: None,
        )
        return self.led.log

    def reopen(self, crash: bool) -> None:
        if crash:
            self.led.abandon()
        else:
            self.led.close(self.now_us)
        self.now_us += SECOND_US
        self.engine = self._open()

    def _send(self) -> None:
        rng = self.rng
        what = rng.random()
        if what < 0.2:
            self.stage(f"key-{rng.randrange(3)}-{self.now_us // (5 * SECOND_US)}")
        elif what < 0.35 and self.staged:
            key = rng.choice(list(self.staged))
            stages = self.staged.pop(key)
            rng.shuffle(stages)
            self.engine.commit(key, stages, self.now_us)
        else:
            super()._send()

    def stage(self, key: str, *parts: tuple[str, Batch]) -> None:
        if self.engine.transaction(key) is not None:
            return

        aborts = self.aborts[key]

        def receipt(result: StageInfo | LogError) -> None:
            assert isinstance(result, StageInfo), result
            # An abort takes what is on its way as well.
            if self.engine.transaction(key) is None and self.aborts[key] == aborts:
                self.staged.setdefault(key, []).append(result.stage)

        some = [(self.rng.choice(self.queues), self._without_reply()) for _ in range(self.rng.randint(1, 4))]
        self.engine.stage(key, parts or some, self.now_us, receipt)


class Told:
    """What the leader of a log tells about it."""

    def __init__(self, worker: StreamWorker, nats: LinkThread) -> None:
        self._nats = nats
        self.stage_files: set[str] = set()  # those that parts with staged messages were in
        self.data = str(worker.folder / LOG)
        self._planner = Planner(worker.names, self.data)
        self.reader = LogReader(self.data)

    def __enter__(self) -> "Told":
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()

    def plan(self, queue: str, start: int | None, end: int | None, fail: bool = True) -> dict[str, object]:
        told = self._planner.plan(self.reader, Wanted(queue, "messages", start, end, (), fail))
        assert told is not None
        return told

    def table(
        self, queue: str, start: int, end: int, columns: Sequence[str] | None = None, fail: bool = True
    ) -> pa.Table:
        """What is read from the stream by a plan, or by as many as it takes."""
        schema = schema_of("messages", columns)
        tables = [schema.empty_table()]
        while start < end:
            told = self.plan(queue, start, end, fail)
            rows = told["parts"]
            assert isinstance(rows, list)
            parts = [Part(**row) for row in json.loads(json.dumps(rows))]
            self.stage_files |= {part.file for part in parts if part.number}
            for part in parts:
                assert part.position_start < part.position_end
                assert part.offset_start < part.offset_end
            source = Source(str(told["stream"]), int(str(told["log"])), int(str(told["number"])))
            found = blocks(self._nats, source, parts, start, end)
            groups = groups_of(found, Constants(queue), 1000)
            tables += [pa.Table.from_batches([batch_of(group, schema)]) for group in groups]
            assert int(str(told["end"])) > start
            start = int(str(told["end"]))
        table = pa.concat_tables(tables)
        table.validate(full=True)
        return table.combine_chunks()

    def file_table(
        self, queue: str, start: int, end: int, columns: Sequence[str] | None = None, fail: bool = True
    ) -> pa.Table:
        """What is read from the files."""
        batches = messages_batches(self.reader, queue, start, end, columns=columns, fail_on_loss=fail)
        return pa.Table.from_batches(batches, schema_of("messages", columns)).combine_chunks()


def check(told: Told, rng: random.Random) -> int:
    """Compare everything, and some ranges; how many rows there were."""
    total = 0
    for queue, facts in told.reader.queues().items():
        start, end = facts.offset_start, facts.offset_end
        every = [*MESSAGES_SCHEMA.names, "headers"]
        whole = told.table(queue, start, end, every)
        assert whole == told.file_table(queue, start, end, every), queue
        total += whole.num_rows
        if start:
            with pytest.raises(Problem, match=f"queue '{queue}': retention has removed"):
                told.plan(queue, start - 1, end)
            assert told.plan(queue, start - 1, end, fail=False)["start"] == start
        for _ in range(5):
            first = rng.randint(start, end)
            last = rng.randint(first, end)
            columns = rng.sample(every, rng.randint(1, 9))
            assert told.table(queue, first, last, columns) == told.file_table(queue, first, last, columns)
    return total


@pytest.mark.parametrize(("seed", "queues"), [(1, QUEUES), (2, ("brief", "lazy"))])
def test_the_stream_has_what_the_files_have(
    nats: LinkThread, tmp_path: Path, seed: int, queues: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Parts end where other queues have this much between two blocks.
    monkeypatch.setattr(records, "GAP_BYTES_MAX", 500)
    worker = StreamWorker(nats, tmp_path, seed, queues)
    rng = random.Random(seed)
    compacted = total = staged = 0
    for turn in range(1, TURNS + 1):
        worker.turn()
        if turn % 50:
            continue
        worker.settle_down()
        with Told(worker, nats) as told:
            total += check(told, rng)
            staged += len(told.stage_files)
            compacted += len(list(Path(told.data).glob("*.*.seg")))
        # A clean restart goes on with its files; after a crash all of them are made again from the stream.
        worker.reopen(crash=turn % 100 == 0)
    worker.led.abandon()
    assert total
    assert staged
    # With queues that keep nothing, files are compacted.
    assert bool(compacted) == ("kept" not in queues)


def test_rows_of_stages_in_files_that_were_compacted(nats: LinkThread, tmp_path: Path) -> None:
    """The messages are in a file that is as it was: their rows are in one of which little is left."""
    worker = StreamWorker(nats, tmp_path, 6)
    engine = worker.engine

    def fill() -> None:
        """One file more, of messages that are gone."""
        worker.settle_down()
        for _ in range(8):
            engine.append("brief", Batch.of([b"." * 2000]), worker.now_us)
            engine.flush(worker.now_us)
            for piece in engine.take("brief", "ann", 10, worker.now_us):
                ranges = [(piece.offset_start, piece.offset_end)]
                engine.settle("brief", "ann", Outcome.ACK, ranges, worker.now_us)
        worker.settle_down()

    for key in ("gone", "good"):
        payloads = [b"%s-%d" % (key.encode(), number) for number in range(200)]
        worker.stage(key, ("kept", Batch.of(payloads, ttl_seconds=[0, 50] * 100)))
        fill()
    engine.abort("gone", worker.now_us)
    fill()
    engine.commit("good", worker.staged["good"], worker.now_us)
    for _ in range(12):
        fill()
    engine.trim(worker.now_us)
    engine.wait()
    for led in ("as it was", "from its folder", "from the stream"):
        with Told(worker, nats) as told:
            table = told.table("kept", 0, 200)
            assert table == told.file_table("kept", 0, 200)
            assert table["value"].to_pylist() == [b"good-%d" % number for number in range(200)]
            generations = {name.count(".") for name in told.stage_files}
            assert generations == {2}, (led, told.stage_files, os.listdir(told.data))
            # The file is here, and is on its way into the stream.
            index = tmp_path / RECORDS / next(iter(told.stage_files))
            noted = index.read_bytes()
            index.unlink()
            with pytest.raises(Problem, match="its files change all the time; try again"):
                told.plan("kept", None, None)
            index.write_bytes(noted)
        worker.reopen(crash=led == "from its folder")
    worker.led.abandon()


def test_rows_that_are_lost_are_stepped_over(nats: LinkThread, tmp_path: Path) -> None:
    """What stands in their place between two blocks of the queue says which rows they were, and is no
    message."""
    worker = StreamWorker(nats, tmp_path, 7)
    engine = worker.engine
    worker.stage("key", ("kept", Batch.of([b"staged"] * 3)))
    worker.settle_down()
    engine.append("kept", Batch.of([b"before"] * 3), worker.now_us)
    engine.flush(worker.now_us)
    engine.commit("key", worker.staged["key"], worker.now_us)
    engine.append("kept", Batch.of([b"behind"] * 3), worker.now_us)
    worker.settle_down()
    with Told(worker, nats) as told:
        assert (
            told.table("kept", 0, 9)["value"].to_pylist()
            == [b"before"] * 3 + [b"staged"] * 3 + [b"behind"] * 3
        )
        (stage,) = [block.stored for block in told.reader.messages("kept", 3, 6)]
        file = Path(told.data, told.reader.file_of(stage)[0])
    data = bytearray(file.read_bytes())
    data[stage.position + 30] ^= 1
    file.write_bytes(data)
    with Told(worker, nats) as told:
        with pytest.raises(Problem, match="offsets 3 to 5"):
            told.plan("kept", 0, 9)
        table = told.table("kept", 0, 9, fail=False)
        assert table == told.file_table("kept", 0, 9, fail=False)
        assert table["offset"].to_pylist() == [0, 1, 2, 6, 7, 8]
        parts = told.plan("kept", 0, 9, fail=False)["parts"]
        assert isinstance(parts, list)
        assert [sorted(part) for part in parts] == [sorted(set(Part._fields) - {"number", "runs"})]
    worker.led.abandon()


def test_a_reader_that_stays_sees_files_grow(nats: LinkThread, tmp_path: Path) -> None:
    worker = StreamWorker(nats, tmp_path, 4)
    worker.turn()
    worker.settle_down()
    rng = random.Random(4)
    with Told(worker, nats) as told:
        for _ in range(10):
            for _ in range(5):
                worker.turn()
            worker.settle_down()
            told.reader.refresh()
            for queue, facts in told.reader.queues().items():
                assert facts.offset_end == worker.engine.describe(queue).offset_end
            check(told, rng)
    worker.led.abandon()


def test_a_long_plan_comes_in_several_answers(
    nats: LinkThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = StreamWorker(nats, tmp_path, 3)
    for _ in range(60):
        worker.turn()
    worker.settle_down()
    with Told(worker, nats) as told:
        for queue, facts in told.reader.queues().items():
            wanted = told.file_table(queue, facts.offset_start, facts.offset_end)
            for limit, most in (("BLOCKS_MAX", 3), ("PARTS_MAX", 1)):
                with monkeypatch.context() as patch:
                    patch.setattr(records, limit, most)
                    patch.setattr(records, "GAP_BYTES_MAX", 0)
                    first = told.plan(queue, None, None)
                    assert first["start"] == facts.offset_start
                    assert told.table(queue, facts.offset_start, facts.offset_end) == wanted
        assert told.plan("kept", 5, 5)["parts"] == []
        beyond = told.plan("kept", 1 << 40, None)
        assert (beyond["start"], beyond["end"], beyond["parts"]) == (1 << 40, 1 << 40, [])
    worker.led.abandon()


def test_files_that_are_compacted_meanwhile_are_looked_at_again(
    nats: LinkThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = StreamWorker(nats, tmp_path, 5)
    for _ in range(10):
        worker.turn()
    worker.settle_down()
    looked = 0
    file_of = LogReader.file_of

    def compacted(reader: LogReader, header: Header) -> tuple[str, int]:
        nonlocal looked
        looked += 1
        name, base = file_of(reader, header)
        return (segment_name(base, 1) if looked <= most else name), base

    monkeypatch.setattr(LogReader, "file_of", compacted)
    with Told(worker, nats) as told:
        queue = next(iter(told.reader.queues()))
        most = 1
        parts = told.plan(queue, None, None)["parts"]
        assert isinstance(parts, list)
        assert {part["file"] for part in parts} <= set(os.listdir(told.data))
        most = 1 << 40
        with pytest.raises(Problem, match="its files change all the time; try again"):
            told.plan(queue, None, None)
    worker.led.abandon()


def test_which_record_has_a_position() -> None:
    pairs = array("Q", [0, 3, 100, 5, 250, 9])
    assert [seq_of(pairs, position) for position in (0, 99, 100, 249, 250, 10_000)] == [3, 3, 5, 5, 9, 9]
    # A file that was cut at 100, and written again from there on.
    again = pairs + array("Q", [100, 20, 180, 21])
    assert [seq_of(again, position) for position in (0, 99, 100, 179, 180, 10_000)] == [3, 3, 20, 20, 21, 21]
    # Nothing was noted: from the beginning.
    assert seq_of(array("Q"), 500) == 1
