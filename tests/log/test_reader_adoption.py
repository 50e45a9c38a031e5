"""Messages that were staged, read from the files: their columns are in blocks of the stage queue.

The logs here are written block by block, so that runs begin and end wherever they can, and rows go missing or
rot one at a time. What the log itself writes is read in `test_reader_transactions.py`.
"""

from array import array
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import accumulate, chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.http.reading import letters as reading
from penstock.http.reading.looking import look_at, look_at_one, payloads_at
from penstock.http.where.condition import parse
from penstock.log.adoption import Run, adoption_parts
from penstock.log.arrow import MESSAGES_SCHEMA, messages_batches
from penstock.log.block import (
    FLAG_DELAYED,
    FLAG_ELSEWHERE,
    FLAG_END,
    FLAG_EXPIRES,
    FLAG_HEADERS,
    FLAG_PART,
    FLAG_RETRIES,
    KIND_CONTROL,
    KIND_MESSAGES,
    Buffer,
    Columns,
    Header,
    body_checksum,
    control_parts,
    message_parts,
)
from penstock.log.disk import WATERMARK, Watermark
from penstock.log.errors import LogDamaged, LogRefused
from penstock.log.reader import LogReader, OffsetsMissing
from penstock.log.repairs import STAGE_QUEUE, repair_queue_of
from penstock.log.segment import segment_name
from penstock.log.state import FORMAT_LAST
from penstock.model.headers import encode_headers
from penstock.model.ids import id_of, origin_of
from penstock.model.life import Reason
from penstock.model.pending import AS_STORED

LOG, STAGES, ORDERS, REPAIRS = 7, 1, 2, 3
STAGED_US, COMMITTED_US = 1_800_000_000_000_000, 1_800_000_060_000_000
MINUTE_US = COMMITTED_US - STAGED_US
COLUMNS = (*MESSAGES_SCHEMA.names, "headers")


def row_content(row: int) -> bytes:
    return b"row %d " % row + b"." * (row * 7 % 31)


def row_expires_us(row: int) -> int:
    """As it is stored, of those blocks that have such a column; every third never does."""
    return STAGED_US + row * 1000 if row % 3 else 0


def row_due_us(row: int) -> int:
    """Likewise."""
    return STAGED_US + row * 500 if row % 4 else 0


def row_headers(row: int) -> bytes:
    return encode_headers({"row": str(row), "é": "ü"}) if row % 5 else b""


class Pen:
    """Writes a log block by block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.position = 0
        self.opening = 1
        self._base, self._blocks = 0, b""
        self.next = {STAGES: 0, ORDERS: 0, REPAIRS: 0}
        self.control({"op": "opening", "opening": 1, "log": LOG, "format": 1})
        for number, name in ((STAGES, STAGE_QUEUE), (ORDERS, "orders"), (REPAIRS, repair_queue_of("orders"))):
            self.control({"op": "queue", "number": number, "name": name})

    def put(self, header: Header, parts: Sequence[Buffer]) -> Header:
        header.position, header.opening = self.position, self.opening
        header.body_bytes, header.body_checksum = sum(map(len, parts)), body_checksum(parts)
        self._blocks += header.pack() + b"".join(parts)
        self.position = header.end
        return header

    def control(self, fields: dict[str, object], flags: int = 0) -> None:
        header = Header(KIND_CONTROL, flags, 0, 0, 0, 0, 0, 0, 0, 0, 0, STAGED_US, 0, 0, 0, 0)
        self.put(header, control_parts(fields))

    def rows(self, count: int, flags: int = 0) -> Header:
        """A block of the stage queue; the flags say which columns it has."""
        first = self.next[STAGES]
        rows = range(first, first + count)
        payloads = [row_content(row) for row in rows]
        bounds = array("i", [0])
        for payload in payloads:
            bounds.append(bounds[-1] + len(payload))
        expires = array("q", map(row_expires_us, rows)) if flags & FLAG_EXPIRES else None
        left = array("h", [row % 5 for row in rows]) if flags & FLAG_RETRIES else None
        due = array("q", map(row_due_us, rows)) if flags & FLAG_DELAYED else None
        headers = [*map(row_headers, rows)] if flags & FLAG_HEADERS else None
        self.next[STAGES] += count
        size, time_us = bounds[-1], STAGED_US
        header = Header(
            KIND_MESSAGES, flags, 4, STAGES, count, 0, 0, first, first, count, 0, time_us, 0, 0, size, 0
        )
        columns = Columns(bounds, b"".join(payloads), expires, left, None, due, headers)
        return self.put(header, message_parts(columns))

    def adopt(self, runs: Sequence[tuple[int, int]], number: int = ORDERS) -> Header:
        """A transaction: rows (first, end) become messages."""
        first, count = self.next[number], sum(end - row for row, end in runs)
        told = [Run(row, end - row, sum(map(len, values(range(row, end)))), 0) for row, end in runs]
        size = sum(run.payload_bytes for run in told)
        flags = FLAG_ELSEWHERE | FLAG_PART
        time_us = COMMITTED_US
        header = Header(
            KIND_MESSAGES, flags, 4, number, count, 0, 0, first, first, count, 0, time_us, 0, 0, size, 0
        )
        self.put(header, adoption_parts(told))
        self.control({"op": "transaction", "key": "", "parts": []}, FLAG_PART | FLAG_END)
        self.next[number] += count
        return header

    def segment(self, generation: int = 0) -> None:
        """What was written so far is a segment; what follows is another one, of the next opening."""
        (self.folder / segment_name(self._base, generation)).write_bytes(self._blocks)
        self._base, self._blocks = self.position, b""
        self.opening += 1

    def compact(self, base: int, kept: dict[int, tuple[int, int]]) -> None:
        """In the place of a segment, what was adopted: by the first offset, the rows."""
        self._base, self._blocks, self.position = base, b"", base
        for offset, rows in kept.items():
            self.next[ORDERS] = offset
            self.adopt([rows])
        self.segment(1)
        (self.folder / segment_name(base, 0)).unlink()

    def done(self) -> LogReader:
        self.segment()
        watermark = Watermark(str(self.folder / WATERMARK), writable=True)
        watermark.set(self.position)
        watermark.close()
        return LogReader(str(self.folder), maps_max=1)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[tuple[int, int, bool]], list[list[tuple[int, int]]]]:
    """Stage blocks (rows, flags, the last of a segment), and the runs of commits."""
    flags = st.sets(st.sampled_from((FLAG_EXPIRES, FLAG_RETRIES, FLAG_DELAYED, FLAG_HEADERS))).map(sum)
    block = st.tuples(st.integers(1, 9), flags, st.booleans())
    blocks = draw(st.lists(block, min_size=1, max_size=8))
    rows = sum(count for count, *_ in blocks)
    cuts = sorted(draw(st.sets(st.integers(0, rows), min_size=2, max_size=12)))
    runs = draw(st.permutations(list(pairwise(cuts))))
    kept = runs[: draw(st.integers(1, len(runs)))]
    commits: list[list[tuple[int, int]]] = [[]]
    for run in kept:
        is_next: bool = draw(st.booleans())
        if commits[-1] and is_next:
            commits.append([])
        commits[-1].append(run)
    return blocks, commits


@settings(max_examples=60, deadline=None)
@given(layouts(), st.data())
def test_messages_are_the_rows_that_were_adopted(
    layout: tuple[list[tuple[int, int, bool]], list[list[tuple[int, int]]]], data: st.DataObject
) -> None:
    blocks, commits = layout
    with TemporaryDirectory() as folder:
        pen = Pen(Path(folder))
        flags: dict[int, int] = {}
        for count, its_flags, is_last in blocks:
            flags |= dict.fromkeys(range(pen.next[STAGES], pen.next[STAGES] + count), its_flags)
            pen.rows(count, its_flags)
            if is_last:
                pen.segment()
        expected: list[tuple[int, int]] = []  # row, opening
        for runs in commits:
            pen.adopt(runs)
            rows = chain.from_iterable(range(*run) for run in runs)
            expected += [(row, pen.opening) for row in rows]
            if data.draw(st.booleans()):
                pen.segment()
        start = data.draw(st.integers(0, len(expected)))
        end = data.draw(st.integers(start, len(expected)))
        with pen.done() as reader:
            assert list(reader.queues()) == ["orders"]
            told = [
                {
                    "offset": offset,
                    "id": id_of(origin_of(LOG, ORDERS, opening), offset).decode(),
                    "value": row_content(row),
                    "time": COMMITTED_US,
                    "protocol": "http",
                    "expires": row_expires_us(row) + MINUTE_US
                    if flags[row] & FLAG_EXPIRES and row % 3
                    else 0,
                    "retries": row % 5 if flags[row] & FLAG_RETRIES else -1,
                    "due": row_due_us(row) + MINUTE_US if flags[row] & FLAG_DELAYED and row % 4 else 0,
                    "headers": row_headers(row) if flags[row] & FLAG_HEADERS else b"",
                }
                for offset, (row, opening) in enumerate(expected)
            ]
            assert read(reader, start, end) == told[start:end]
            assert [(run.first, run.end) for run in reader.events("orders", 0)] == [
                (first, end) for first, end in pairwise(offsets_of(commits))
            ]
            check_looks(reader, told, start, end)
            for rows_max in (3, 1000):
                table = [
                    row
                    for batch in messages_batches(
                        reader, "orders", start, end, rows_max=rows_max, columns=COLUMNS
                    )
                    for row in batch.to_pylist()
                ]
                for row, its in zip(table, told[start:end], strict=True):
                    assert {name: row[name] for name in ("offset", "id", "value", "protocol")} == {
                        name: its[name] for name in ("offset", "id", "value", "protocol")
                    }
                    assert us_of(row["timestamp"]) == COMMITTED_US
                    assert us_of(row["expires"]) == its["expires"]
                    assert row["retries"] == (None if its["retries"] == -1 else its["retries"])
                    assert encode_headers(dict(row["headers"] or ())) == its["headers"]
            offsets = [
                offset
                for batch in messages_batches(reader, "orders", start, end, columns=("offset",))
                for offset in batch["offset"].to_pylist()
            ]
            assert offsets == list(range(start, end))


def us_of(moment: datetime | None) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) if moment else 0


def offsets_of(commits: list[list[tuple[int, int]]]) -> list[int]:
    return [0, *accumulate(sum(end - row for row, end in runs) for runs in commits)]


def read(
    reader: LogReader, start: int, end: int | None = None, *, loss: bool = False
) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for block in reader.messages("orders", start, end, fail_on_loss=not loss):
        bounds, payload, expires, retries, due, headers = block.columns()
        again = block.columns()
        if block.stored is not block.header:
            assert again.expires is expires, "expiries are moved once, not for each look"
            assert again.due is due
        header = block.header
        assert header.first_offset + block.hi <= block.offset_end
        assert header.first_event == header.first_offset  # nothing has happened to them but that they came
        found += [
            {
                "offset": header.first_offset + i,
                "id": id_of(block.origin, header.first_offset + i).decode(),
                "value": bytes(payload[bounds[i] : bounds[i + 1]]),
                "time": header.time_us,
                "protocol": block.protocol,
                "expires": expires[i] if expires is not None else 0,
                "retries": retries[i] if retries is not None else -1,
                "due": due[i] if due is not None else 0,
                "headers": headers.at(i) if headers is not None else b"",
            }
            for i in range(block.lo, block.hi)
        ]
    return found


def check_looks(reader: LogReader, told: list[dict[str, object]], start: int, end: int) -> None:
    """What those who look at single messages find."""
    ranges = [(offset, offset + 2) for offset in range(start, end - 1, 3)]
    seen = look_at(reader, "orders", ranges, 1000, 1 << 20).seen
    assert [(it.offset, it.id, it.event, it.value, it.expires_us, it.retries) for it in seen] == [
        (offset, its["id"], offset, its["value"], its["expires"], its["retries"])
        for first, behind in ranges
        for offset, its in enumerate(told[first:behind], first)
    ]
    letters = [reading.Run(*run, 0, AS_STORED, 0, AS_STORED, Reason.REJECTED) for run in ranges]
    for offset, its in enumerate(told[start:end], start):
        value = its["value"]
        assert isinstance(value, bytes)
        condition = parse(f"value = '{value.decode()}' and id = '{its['id']}'")
        found = list(reading.matching(reader, "orders", letters, condition, COMMITTED_US, {}))
        assert found == [[(offset, offset + 1)] if any(a <= offset < b for a, b in ranges) else []]
    for offset in range(start, end):
        assert reader.kept_from("orders", offset) == offset
        one = look_at_one(reader, "orders", offset)
        assert one is not None
        assert one.value == told[offset]["value"]


def test_payloads_of_repairs_are_adopted_too(tmp_path: Path) -> None:
    pen = Pen(tmp_path)
    pen.rows(9)
    pen.adopt([(4, 6), (1, 3)], REPAIRS)
    with pen.done() as reader:
        assert payloads_at(reader, "orders", [3, 0, 1]) == {
            0: row_content(4),
            1: row_content(5),
            3: row_content(2),
        }


def test_a_payload_is_a_window_on_the_file(tmp_path: Path) -> None:
    pen = Pen(tmp_path)
    pen.rows(500, FLAG_EXPIRES)
    pen.adopt([(100, 400)])
    with pen.done() as reader:
        (block,) = reader.messages("orders", 10, 20)
        assert (block.lo, block.hi, block.offset_end) == (110, 120, 300)
        assert (block.stored.queue, block.stored.first_offset) == (STAGES, 0)
        assert reader.file_of(block.stored) == (segment_name(0, 0), 0)
        batch = next(messages_batches(reader, "orders", 10, 20))
        assert batch["value"].buffers()[2].address == pa.py_buffer(block.columns().payload).address


def staged(folder: Path) -> tuple[Pen, list[Header]]:
    """Three stage blocks, each in a segment of its own, and a commit of rows from all of them."""
    pen = Pen(folder)
    headers = []
    for _ in range(3):
        headers.append(pen.rows(10))
        pen.segment()
    pen.adopt([(5, 25), (2, 4)])
    return pen, headers


def values(rows: Sequence[int]) -> list[bytes]:
    return [row_content(row) for row in rows]


def test_damage_is_told_with_the_messages_and_their_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pen, headers = staged(tmp_path)
    with pen.done() as reader:
        path, at = tmp_path / segment_name(headers[1].position, 0), 80
        path.write_bytes(bytes(changed(path.read_bytes(), at)))
        with pytest.raises(LogDamaged) as error:
            list(reader.messages("orders", 0))
        told = f"{path}: the block at position 0 does not have its checksum: queue 'orders', offsets 5 to 14"
        assert str(error.value) == told
        found = read(reader, 0, loss=True)
        assert caplog.messages == [told]
        assert [row["offset"] for row in found] == [*range(5), *range(15, 22)]
        assert [row["value"] for row in found] == values([*range(5, 10), *range(20, 25), 2, 3])
        # Headers are there: so is what they tell.
        blocks = reader.messages("orders", 3, 17, headers_only=True)
        assert [(it.header.first_offset + it.lo, it.header.first_offset + it.hi) for it in blocks] == [
            (3, 5),
            (5, 15),
            (15, 17),
        ]


def changed(content: bytes, at: int) -> bytearray:
    harmed = bytearray(content)
    harmed[at] ^= 1
    return harmed


@pytest.mark.parametrize("how", ["removed", "header"])
def test_rows_that_are_gone_are_told_as_messages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    pen, headers = staged(tmp_path)
    pen.done().close()
    path = tmp_path / segment_name(headers[1].position, 0)
    if how == "removed":
        path.unlink()
    else:
        path.write_bytes(bytes(changed(path.read_bytes(), 8)))
    with LogReader(str(tmp_path)) as reader:
        with pytest.raises(OffsetsMissing) as error:
            list(reader.messages("orders", 0))
        assert (error.value.queue, error.value.first, error.value.end) == ("orders", 5, 15)
        assert "queue 'orders': offsets 5 to 14 are not in the log" in str(error.value)
        found = read(reader, 0, loss=True)
        assert [row["offset"] for row in found] == [*range(5), *range(15, 22)]
        assert not [text for text in caplog.messages if "\\x00" in text]


def test_a_damaged_adoption_block_is_told(tmp_path: Path) -> None:
    pen, _ = staged(tmp_path)
    base = max(int(path.name[:20]) for path in tmp_path.glob("*.seg"))
    pen.done().close()
    path = max(tmp_path.glob("*.seg"))
    assert int(path.name[:20]) > base
    path.write_bytes(bytes(changed(path.read_bytes(), 80)))
    with LogReader(str(tmp_path)) as reader:
        with pytest.raises(LogDamaged, match="queue 'orders', offsets 0 to 21"):
            list(reader.messages("orders", 3))
        assert not read(reader, 3, loss=True)
        assert [(run.first, run.end) for run in reader.events("orders", 0)] == [(0, 22)]


def test_rows_that_go_after_their_messages_are_no_loss(tmp_path: Path) -> None:
    """Compacting takes the messages first, and then the rows: who has seen neither finds what is left."""
    pen, headers = staged(tmp_path)
    pen.segment()
    pen.control({"op": "transaction", "key": "", "parts": []})
    with pen.done() as reader:
        found = reader.messages("orders", 0, fail_on_loss=False)
        assert next(found).messages() == values(range(5, 10))
        pen.compact(headers[2].end, {15: (20, 22), 20: (2, 4)})
        (tmp_path / segment_name(headers[1].position, 0)).unlink()
        assert [row for block in found for row in block.messages()] == values([20, 21, 2, 3])
        assert [reader.kept_from("orders", offset) for offset in (0, 16, 17, 22)] == [15, 16, 20, None]


def test_rows_may_be_compacted_under_a_reader(tmp_path: Path) -> None:
    """What is still named is there again, in another file."""
    pen, headers = staged(tmp_path)
    with pen.done() as reader:
        found = reader.messages("orders", 0)
        assert next(found).messages() == values(range(5, 10))
        base = headers[1].position
        whole = (tmp_path / segment_name(base, 0)).read_bytes()
        (tmp_path / segment_name(base, 1)).write_bytes(whole)
        (tmp_path / segment_name(base, 0)).unlink()
        assert [row for block in found for row in block.messages()] == values([*range(10, 25), 2, 3])


def test_the_stage_queue_is_known_by_its_stages(tmp_path: Path) -> None:
    """The block that declares it may be damaged: it is no queue that anybody sees for that."""
    pen = Pen(tmp_path)
    pen.rows(10)
    pen.control({"op": "stage", "queue": STAGES, "stage": {}})
    pen.adopt([(3, 7)])
    pen.done().close()
    (path,) = tmp_path.glob("*.seg")
    content = path.read_bytes()
    path.write_bytes(bytes(changed(content, content.index(b'"name":"\\u0000"'))))
    with LogReader(str(tmp_path)) as reader:
        assert list(reader.queues()) == ["orders"]
        assert [row["value"] for row in read(reader, 0)] == values(range(3, 7))


def test_a_format_that_is_not_known_is_not_read(tmp_path: Path) -> None:
    pen = Pen(tmp_path)
    pen.control({"op": "format", "format": 2, "queue": STAGES})
    with pen.done() as reader:
        assert list(reader.queues()) == ["orders"]
    pen.control({"op": "format", "format": FORMAT_LAST + 1})
    with pytest.raises(LogRefused, match=rf"\.seg: the log has format {FORMAT_LAST + 1}: .* newer version"):
        pen.done()
