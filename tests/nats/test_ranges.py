"""Messages read from a stream by somebody who is no broker: whole, in order, and what is said otherwise.

The records are those of a real log, cut at places of our choosing and stored on a real server. What nodes do
wrong (a damaged copy, a missing one, being behind) is done by `Bad`, between the server and the reader.
"""

import logging
import random
import secrets
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.log.errors import LogDamaged, LogError
from penstock.log.jetstream import api, ranges
from penstock.log.jetstream.api import JetStream
from penstock.log.jetstream.cluster import Cluster
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.ranges import Adopted, BytesMissing, Part, Source, blocks
from penstock.log.jetstream.records import Kind, Record
from penstock.log.jetstream.servers import parse_server
from penstock.log.log import open_log
from penstock.log.read_block import Block
from penstock.log.reader import LogReader
from penstock.log.results import StageInfo
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from tests.log.folders import NOW_US
from tests.nats.streams import delete_message

FILE = "00000000000000000000.seg"
COUNT = 300
SETTINGS = LogSettings(segment_bytes=64 << 20, block_bytes=1 << 20)

Row = tuple[int, bytes, bytes]
"""Offset, payload, origin."""


@pytest.fixture(scope="module")
def nats(node: Cluster) -> Iterator[LinkThread]:
    nats = LinkThread.open([parse_server(node.nodes[0].url)])
    yield nats
    nats.close()


class Stored:
    """A file of a log with the queues `a` and `b`, and a stream that has its bytes."""

    def __init__(self, folder: Path, nats: LinkThread, payload_bytes: int = 40) -> None:
        engine = open_log(str(folder), NOW_US, settings=SETTINGS)
        for number in range(COUNT):
            queue = "ab"[number % 2]
            engine.append(queue, Batch.of([b"%s%d" % (queue.encode(), number) * payload_bytes] * 3), NOW_US)
            engine.flush(NOW_US)
        engine.wait()
        engine.close(NOW_US)
        self.nats = nats
        self.names = LogNames(f"t{secrets.token_hex(6)}")
        nats.ask(nats.api.create_stream(self.names.stream_settings(1)))
        self.data = (folder / FILE).read_bytes()
        with LogReader(str(folder)) as reader:
            found = list(reader.messages("a", 0))
            self.rows = rows_of(found)
            self.headers = [block.header for block in found]
            self.log = int(reader.origin("a", 0)[:6], 16)
            facts = reader.queue("a")
            assert facts is not None
            self.number = facts.number
            self.end = facts.offset_end

    @property
    def source(self) -> Source:
        return Source(self.names.stream, self.log, self.number)

    def part(self, first: int = 0, last: int = -1, seq_first: int = 1) -> Part:
        """The bytes from one block to another, by their numbers."""
        begin, end = self.headers[first], self.headers[last]
        return Part(
            FILE,
            self.names.file(FILE),
            0,
            begin.position,
            end.end,
            seq_first,
            begin.first_offset,
            end.offset_end,
        )

    def put(self, *cuts: int, damaged: Sequence[int] = ()) -> None:
        """Store the file as records that end at these positions; some of them damaged."""
        nats, begin = self.nats, 0
        for number, end in enumerate((*sorted(cuts), self.headers[-1].end), 1):
            record = Record(Kind.WRITE, FILE, begin, 7, number, False, self.data[begin:end]).pack()
            if number in damaged:
                record = flipped(record)
            nats.ask(nats.api.put(self.names.file(FILE), record))
            # Of another file: whoever reads this one does not see it.
            other = Record(Kind.WRITE, "x", 0, 7, number, False, b"another").pack()
            nats.ask(nats.api.put(self.names.file("x"), other))
            begin = end

    def read(
        self, *parts: Part, start: int = 0, end: int | None = None, step_over: bool = False
    ) -> list[Row]:
        end = self.end if end is None else end
        return rows_of(blocks(self.nats, self.source, parts, start, end, step_over=step_over))


def flipped(payload: bytes) -> bytes:
    """With another bit in its middle."""
    at = len(payload) // 2
    return payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]


def rows_of(found: Iterator[Block] | Sequence[Block]) -> list[Row]:
    return [
        (block.header.first_offset + block.lo + i, payload, block.origin)
        for block in found
        for i, payload in enumerate(block.messages())
    ]


@pytest.fixture
def stored(tmp_path: Path, nats: LinkThread) -> Stored:
    return Stored(tmp_path / "log", nats)


def some_cuts(stored: Stored, count: int, seed: int = 1) -> list[int]:
    """Anywhere: also in the middle of headers, and at places that are no multiple of 8."""
    return random.Random(seed).sample(range(1, stored.headers[-1].end), count)


# --- what is there ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 60])
def test_what_was_written_is_what_is_read(stored: Stored, count: int) -> None:
    stored.put(*some_cuts(stored, count))
    assert len(stored.rows) == COUNT // 2 * 3
    assert stored.read(stored.part()) == stored.rows


def test_a_few_bytes_at_a_time(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "READ_BYTES", 1)
    monkeypatch.setattr(ranges, "READ_RECORDS", 3)
    stored.put(*some_cuts(stored, 40))
    assert stored.read(stored.part()) == stored.rows


@pytest.mark.parametrize(("start", "end"), [(0, 1), (1, 2), (100, 333), (449, 450), (450, 450), (7, 7)])
def test_ranges(stored: Stored, start: int, end: int) -> None:
    stored.put(*some_cuts(stored, 20))
    assert stored.read(stored.part(), start=start, end=end) == stored.rows[start:end]


def test_parts_and_where_they_begin(stored: Stored) -> None:
    ends = [header.end for header in stored.headers]
    stored.put(*ends[:-1])
    # A record of another file follows each, so that their numbers are 1, 3, 5, …
    parts = [stored.part(0, 9), stored.part(10, 19, 21), stored.part(100, 110, 2 * 100 - 5)]
    wanted = stored.rows[:60] + stored.rows[300:333]
    assert stored.read(*parts) == wanted
    assert stored.read(*parts, start=59, end=301) == stored.rows[59:60] + stored.rows[300:301]


def test_a_block_that_is_larger_than_what_is_read_at_a_time(
    tmp_path: Path, nats: LinkThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "READ_BYTES", 4096)
    large = Stored(tmp_path / "log", nats, payload_bytes=1000)
    large.put(*range(3000, large.headers[9].end, 3001))
    part = large.part(0, 9)
    assert large.read(part, end=30) == large.rows[:30]


def test_who_leaves_early_leaves_nothing_behind(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "READ_RECORDS", 1)
    stored.put(*some_cuts(stored, 30))
    found = blocks(stored.nats, stored.source, [stored.part()], 0, stored.end)
    assert isinstance(found, Generator)
    first = next(found)
    found.close()
    assert rows_of([first]) == stored.rows[: len(rows_of([first]))]
    assert stored.read(stored.part()) == stored.rows


class Counting(JetStream):
    """Counts what is asked for."""

    reads = 0

    async def read(
        self, stream: str, seq: int, count: int, *, bytes_max: int = 0, only: str = ""
    ) -> list[api.Stored]:
        self.reads += 1
        assert bytes_max <= ranges.READ_BYTES
        return await super().read(stream, seq, count, bytes_max=bytes_max, only=only)


def test_no_more_is_read_than_one_portion_ahead(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "READ_BYTES", 1)
    ends = [header.end for header in stored.headers]
    stored.put(*ends[:-1])
    counting = Counting(stored.nats.api._link)
    monkeypatch.setattr(stored.nats, "api", counting)
    found = blocks(stored.nats, stored.source, [stored.part()], 0, stored.end)
    for number, _ in enumerate(found, 1):
        assert number <= counting.reads <= number + 1
    assert counting.reads == len(ends)


# --- nodes that are not as they should be ----------------------------------------------------------


class Bad(JetStream):
    """One node's answers, made worse. The leader's are as they are."""

    def __init__(self, good: JetStream, damaged: Sequence[int] = (), lacks: Sequence[int] = ()) -> None:
        super().__init__(good._link)
        self._damaged = damaged
        self._lacks = lacks
        self.asked_leader = 0

    async def read(
        self, stream: str, seq: int, count: int, *, bytes_max: int = 0, only: str = ""
    ) -> list[api.Stored]:
        found = await super().read(stream, seq, count, bytes_max=bytes_max, only=only)
        return [
            replace(one, payload=flipped(one.payload)) if one.seq in self._damaged else one
            for one in found
            if one.seq not in self._lacks
        ]

    async def _get(self, stream: str, question: object) -> object:  # type: ignore[override]
        self.asked_leader += 1
        return await super()._get(stream, question)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damaged", "lacks", "asked"),
    [
        ([1], [], 1),
        ([5, 9], [], 2),
        ([], [5], 1),
        ([], [1, 3], 2),
        ([], range(21, 43), 11),
        ([], range(1, 43), 21),
        ([7], [9, 11], 3),
        ([7, 9], [3, 5], 4),
        ([7], range(9, 43), 18),
    ],
    ids=str,
)
def test_the_leader_has_what_a_node_has_not(
    stored: Stored,
    monkeypatch: pytest.MonkeyPatch,
    damaged: Sequence[int],
    lacks: Sequence[int],
    asked: int,
) -> None:
    stored.put(*some_cuts(stored, 20))
    bad = Bad(stored.nats.api, damaged, lacks)
    monkeypatch.setattr(stored.nats, "api", bad)
    assert stored.read(stored.part()) == stored.rows
    assert bad.asked_leader == asked


class BadLeader(JetStream):
    """The leader's answers, made worse, and now and then those of a node."""

    def __init__(self, good: JetStream, damaged: Sequence[int], lacks: bool) -> None:
        super().__init__(good._link)
        self._damaged = damaged
        self._lacks = lacks
        self._reads = 0

    async def read(
        self, stream: str, seq: int, count: int, *, bytes_max: int = 0, only: str = ""
    ) -> list[api.Stored]:
        self._reads += 1
        if self._reads % 5:
            node = Bad(self, self._damaged, self._damaged if self._lacks else ())
            return await node.read(stream, seq, count, bytes_max=bytes_max, only=only)
        return await super().read(stream, seq, count, bytes_max=bytes_max, only=only)

    async def next_message(self, stream: str, seq: int, only: str = ">") -> api.Stored | None:
        stored = await super().next_message(stream, seq, only)
        while self._lacks and stored is not None and stored.seq in self._damaged:
            stored = await super().next_message(stream, stored.seq + 1, only)
        if stored is not None and stored.seq in self._damaged:
            return replace(stored, payload=flipped(stored.payload))
        return stored


@pytest.mark.parametrize("lacks", [False, True])
def test_a_node_has_what_the_leader_has_not(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, lacks: bool
) -> None:
    stored.put(*some_cuts(stored, 20))
    monkeypatch.setattr(stored.nats, "api", BadLeader(stored.nats.api, [1, 7, 9, 41], lacks))
    assert stored.read(stored.part()) == stored.rows


def test_a_record_that_is_damaged_everywhere(stored: Stored, caplog: pytest.LogCaptureFixture) -> None:
    middle = stored.headers[60].position
    stored.put(middle, stored.headers[70].position, damaged=[2])
    said = (
        rf"stream {stored.names.stream}, {FILE}, offsets 0 to {stored.end - 1} of the queue.*: "
        "record 3 does not have its checksum"
    )
    with pytest.raises(BytesMissing, match=said):
        stored.read(stored.part())
    # What does not need it is not disturbed.
    assert stored.read(stored.part(0, 50), end=153) == stored.rows[:153]
    with caplog.at_level(logging.WARNING):
        assert stored.read(stored.part(), step_over=True) == stored.rows[:180] + stored.rows[210:]
    assert "record 3 does not have its checksum" in caplog.text


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_record_that_nobody_has(stored: Stored, lost: int, caplog: pytest.LogCaptureFixture) -> None:
    ends = (stored.headers[60].position, stored.headers[70].position + 13)
    stored.put(*ends)
    nats = stored.nats
    delete_message(nats, stored.names.stream, 2 * lost - 1)
    with pytest.raises(BytesMissing, match=r"bytes \d+ to \d+ are missing"):
        stored.read(stored.part())
    kept = [stored.rows[180:], stored.rows[:180] + stored.rows[213:], stored.rows[:210]][lost - 1]
    with caplog.at_level(logging.WARNING):
        assert stored.read(stored.part(), step_over=True) == kept
    assert "are missing" in caplog.text


def test_a_file_that_is_gone(stored: Stored) -> None:
    stored.put(*some_cuts(stored, 5))
    nats = stored.nats
    nats.ask(nats.api.purge_subject(stored.names.stream, stored.names.file(FILE)))
    with pytest.raises(BytesMissing, match="there is no record 1 or later of this file"):
        stored.read(stored.part())


def test_a_block_that_is_not_what_was_written(stored: Stored, caplog: pytest.LogCaptureFixture) -> None:
    header = stored.headers[50]
    data = bytearray(stored.data)
    data[header.end - 20] ^= 1
    stored.data = bytes(data)
    stored.put()
    with pytest.raises(LogDamaged, match="does not have its checksum: offsets 150 to 152"):
        stored.read(stored.part())
    with caplog.at_level(logging.WARNING):
        assert stored.read(stored.part(), step_over=True) == stored.rows[:150] + stored.rows[153:]
    assert "offsets 150 to 152" in caplog.text


@pytest.mark.parametrize("read_bytes", [1, 1 << 20])
def test_a_header_that_is_none_is_stepped_over(
    stored: Stored, read_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As reading the files does. Whoever counts offsets sees what is missing."""
    monkeypatch.setattr(ranges, "READ_BYTES", read_bytes)
    data = bytearray(stored.data)
    data[stored.headers[50].position + 30] ^= 1
    stored.data = bytes(data)
    stored.put(*some_cuts(stored, 50))
    assert stored.read(stored.part()) == stored.rows[:150] + stored.rows[153:]


def test_rows_that_are_not_what_was_written(tmp_path: Path, nats: LinkThread) -> None:
    """They are told by the offsets that they have in the queue that was asked for."""
    engine = open_log(str(tmp_path), NOW_US, settings=SETTINGS)
    stages: list[StageInfo | LogError] = []
    for content in (b"second", b"first"):
        staged = [(name, Batch.of([content] * 3, ttl_seconds=[0, 5, 9])) for name in ("b", "a", "b")]
        engine.stage("key", staged, NOW_US, stages.append)
        engine.wait()
    ids = [stage.stage for stage in stages if isinstance(stage, StageInfo)]
    engine.append("a", Batch.of([b"before"] * 4), NOW_US)
    engine.commit("key", ids[::-1], NOW_US + 7_000_000)
    engine.wait()
    engine.close(NOW_US)
    names = LogNames(f"t{secrets.token_hex(6)}")
    nats.ask(nats.api.create_stream(names.stream_settings(1)))
    with LogReader(str(tmp_path)) as reader:
        wanted = list(reader.messages("a", 4))
        source = Source(names.stream, int(reader.origin("a", 0)[:6], 16), wanted[0].header.queue)
    parts: list[Part] = []
    for block in wanted:
        stored, its, end = block.stored, block.header, block.header.first_offset + block.hi
        run = Adopted(its.first_offset, stored.first_offset, block.hi, its.opening, its.time_us)
        at = (stored.position, stored.end, 1, its.first_offset, end)
        parts.append(Part(FILE, names.file(FILE), 0, *at, stored.queue, [run]))
    data = bytearray((tmp_path / FILE).read_bytes()[: max(part.position_end for part in parts)])
    nats.ask(nats.api.put(names.file(FILE), Record(Kind.WRITE, FILE, 0, 7, 1, False, bytes(data)).pack()))
    found = list(blocks(nats, source, parts, 4, 10))
    assert rows_of(found) == rows_of(wanted)
    assert [payload for _, payload, _ in rows_of(found)] == [b"first"] * 3 + [b"second"] * 3
    assert [list(block.columns().expires or ()) for block in found] == [
        [0, NOW_US + 12_000_000, NOW_US + 16_000_000]
    ] * 2
    # The part that is asked for last lies before the others.
    assert parts[1].position_end < parts[0].position_start
    data[wanted[1].stored.end - 40] ^= 1
    nats.ask(nats.api.purge_subject(names.stream, names.file(FILE)))
    nats.ask(nats.api.put(names.file(FILE), Record(Kind.WRITE, FILE, 0, 7, 2, False, bytes(data)).pack()))
    with pytest.raises(LogDamaged, match="does not have its checksum: offsets 7 to 9"):
        list(blocks(nats, source, parts, 4, 10))
    assert rows_of(blocks(nats, source, parts, 4, 10, step_over=True)) == rows_of(wanted[:1])
