"""SSPQ on the wire: vectors both ways, any bytes, any split, quick against plain."""

import struct
import tracemalloc
from array import array
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.model.batch import RETRIES_NONE, Batch, Slice
from penstock.protocols import sspq
from penstock.protocols.errors import MisuseError, PeerViolation
from penstock.protocols.sspq import Control, Event, FrameReader, Messages, Type
from tests.protocols.vectors_sspq import FAULTS, LIMIT_BYTES, ROWS, Fault, Read, Row

Feed = Callable[[Callable[[bytes], list[Event]], bytes, bytes], list[Event]]

FOLLOWING = Row("following", "", b"\x55\x99\x5e\x05\x00\x00\x00\x04next", (("send", 5, b"next"),))


def flat(events: list[Event]) -> list[Read]:
    """Events without their grouping."""
    out: list[Read] = []
    for event in events:
        if isinstance(event, Messages):
            batch = event.batch
            assert batch.protocol == "sspq"
            assert batch.retries is not None
            out += [("send", r, p) for r, p in zip(batch.retries, batch.messages(), strict=True)]
        elif isinstance(event, Control):
            out += [("control", type_) for _ in range(event.count) for type_ in event.types]
        else:
            out += [("unknown", event.type_byte)] * event.count
    return out


def plainly(stream: bytes, payload_bytes_max: int) -> tuple[list[Read], tuple[int, bytes] | None]:
    """The protocol read in the plainest way there is: what comes out, and where it goes wrong."""
    out: list[Read] = []
    at = 0
    while len(stream) - at >= 8:
        magic, type_byte, retries, size = struct.unpack_from(">HBBI", stream, at)
        if magic != 0x5599 or size > payload_bytes_max:
            return out, (at, stream[at : at + 8])
        payload = stream[at + 8 : at + 8 + size]
        if len(payload) < size:
            break
        if type_byte == 0x5E:
            out.append(("send", retries, payload))
        elif type_byte in (0xEC, 0xC0, 0xDE, 0x0E):
            out.append(("control", type_byte))
        else:
            out.append(("unknown", type_byte))
        at += 8 + size
    return out, None


def in_chunks(chunks: list[bytes], payload_bytes_max: int) -> tuple[list[Read], tuple[int, bytes] | None]:
    reader = FrameReader(payload_bytes_max=payload_bytes_max)
    out: list[Read] = []
    for chunk in chunks:
        try:
            out += flat(reader.feed(chunk))
        except PeerViolation as violation:
            return out + flat(reader.salvage()), (violation.position, violation.offending)
    assert reader.position == sum(map(len, chunks))
    return out, None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_vectors_are_read(row: Row, feed: Feed) -> None:
    events = feed(FrameReader().feed, row.data, FOLLOWING.data)
    assert flat(events) == [*row.reads, *FOLLOWING.reads]


@pytest.mark.parametrize("row", [row for row in ROWS if row.written], ids=lambda row: row.name)
def test_vectors_are_written(row: Row) -> None:
    written = b""
    for read in row.reads:
        if len(read) == 3:
            written += sspq.frame(Type.SEND, read[2], read[1])
        else:
            written += sspq.frame(Type(read[1]))
    assert written == row.data
    sends = [read for read in row.reads if len(read) == 3]
    if len(sends) == len(row.reads):
        batch = Batch.of([read[2] for read in sends], retries=[read[1] for read in sends])
        assert sspq.encode_batch(batch) == row.data


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_are_violations_with_their_place(fault: Fault, feed: Feed) -> None:
    reader = FrameReader(payload_bytes_max=LIMIT_BYTES)
    with pytest.raises(PeerViolation, match=fault.message) as caught:
        feed(reader.feed, fault.data, b"")
    assert caught.value.position == fault.position
    assert caught.value.offending == fault.data[fault.position : fault.position + 8]
    with pytest.raises(PeerViolation, match=fault.message):
        reader.feed(sspq.RECEIVE)


def test_what_came_before_a_violation_is_salvaged_once() -> None:
    reader = FrameReader()
    with pytest.raises(PeerViolation):
        reader.feed(sspq.frame(Type.SEND, b"good", 1) * 40 + b"bad bytes")
    assert flat(reader.salvage()) == [("send", 1, b"good")] * 40
    assert reader.salvage() == []


def test_a_run_is_one_batch_ready_to_be_a_block() -> None:
    stream = b"".join(sspq.frame(Type.SEND, bytes(size), size % 3) for size in range(100))
    (event,) = FrameReader().feed(stream)
    assert isinstance(event, Messages)
    assert event.batch.bounds.typecode == "i"
    assert event.batch.bounds[0] == 0
    assert event.batch.bounds[-1] == len(event.batch.payload) == sum(range(100))
    assert event.batch.retries == array("h", [size % 3 for size in range(100)])


def test_pairs_of_confirm_and_receive_are_counted_together() -> None:
    assert FrameReader().feed((sspq.CONFIRM + sspq.RECEIVE) * 1000 + sspq.CONFIRM) == [
        Control((Type.CONFIRM, Type.RECEIVE), 1000),
        Control((Type.CONFIRM,), 1),
    ]


payloads = st.sampled_from([0, 1, 5, 100]).flatmap(lambda size: st.binary(min_size=size, max_size=size))
pieces = st.one_of(
    st.tuples(payloads, st.integers(0, 255), st.integers(1, 70)).map(
        lambda t: sspq.frame(Type.SEND, t[0], t[1]) * t[2]
    ),
    st.lists(st.tuples(payloads, st.integers(0, 255)), max_size=8).map(
        lambda sends: b"".join(sspq.frame(Type.SEND, p, r) for p, r in sends)
    ),
    st.integers(1, 200).map(lambda count: (sspq.CONFIRM + sspq.RECEIVE) * count),
    st.sampled_from([sspq.RECEIVE, sspq.CONFIRM, sspq.DEAD_RECEIVE, sspq.NO_RECEIVE]),
    st.tuples(st.integers(0, 255), st.integers(0, 255), payloads).map(
        lambda t: struct.pack(">HBBI", 0x5599, t[0], t[1], len(t[2])) + t[2]
    ),
)
streams = st.lists(pieces, max_size=8).map(b"".join)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    stream = bytearray(draw(streams))
    for _ in range(draw(st.integers(0, 2))):
        if stream:
            stream[draw(st.integers(0, len(stream) - 1))] = draw(st.integers(0, 255))
    return bytes(stream)


def cut(stream: bytes, at: list[int]) -> list[bytes]:
    marks = [0, *sorted(mark % (len(stream) + 1) for mark in at), len(stream)]
    return [stream[start:end] for start, end in pairwise(marks)]


@given(damaged(), st.lists(st.integers(0, 1 << 20), max_size=6), st.sampled_from([3, 99, 1 << 20]))
def test_any_split_reads_as_the_plainest_reader_does(stream: bytes, cuts: list[int], limit: int) -> None:
    plain, fault = plainly(stream, limit)
    assert in_chunks(cut(stream, cuts), limit) == (plain, fault)
    assert in_chunks([stream], limit) == (plain, fault)


@given(st.binary(max_size=200))
@example(b"\x55\x99" * 30)
def test_any_bytes_are_events_or_a_violation(data: bytes) -> None:
    plain, fault = plainly(data, 1000)
    assert in_chunks([data], 1000) == (plain, fault)
    assert in_chunks([data[at : at + 1] for at in range(len(data))], 1000) == (plain, fault)


@given(st.lists(st.tuples(payloads, st.integers(RETRIES_NONE, 255)), max_size=100))
def test_what_is_written_reads_as_it_was(sends: list[tuple[bytes, int]]) -> None:
    batch = Batch.of([p for p, _ in sends], retries=[r for _, r in sends])
    expected = [("send", 255 if r == RETRIES_NONE else r, p) for p, r in sends]
    assert flat(FrameReader().feed(sspq.encode_batch(batch))) == expected


@given(st.lists(payloads, min_size=1, max_size=40), st.data())
def test_slices_are_written_as_their_messages(messages: list[bytes], data: st.DataObject) -> None:
    batch = Batch.of(messages)
    lo = data.draw(st.integers(0, len(messages)))
    hi = data.draw(st.integers(lo, len(messages)))
    retries = data.draw(
        st.none() | st.lists(st.integers(0, 255), min_size=len(messages), max_size=len(messages))
    )
    payload = memoryview(batch.payload) if data.draw(st.booleans()) else batch.payload
    piece = Slice(payload, batch.bounds, lo, hi, 10, b"0" * 18, 0, retries=retries)
    left = retries[lo:hi] if retries is not None else [255] * (hi - lo)
    expected = [("send", r, p) for r, p in zip(left, messages[lo:hi], strict=True)] * 2
    assert flat(FrameReader().feed(sspq.encode_slices([piece, piece]))) == expected


def test_a_large_payload_costs_about_its_size_and_is_not_copied_again() -> None:
    size, chunk = 64 << 20, bytes(256 << 10)
    reader = FrameReader()
    tracemalloc.start()
    try:
        events = reader.feed(struct.pack(">HBBI", 0x5599, Type.SEND, 0, size))
        for _ in range(size // len(chunk)):
            assert events == []
            events = reader.feed(memoryview(chunk))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    (event,) = events
    assert isinstance(event, Messages)
    assert len(event.batch.payload) == size
    assert peak_bytes < size * 1.2


def test_an_announced_payload_costs_nothing_before_it_comes() -> None:
    tracemalloc.start()
    try:
        FrameReader().feed(struct.pack(">HBBI", 0x5599, Type.SEND, 0, 64 << 20) + b"x")
        FrameReader().feed(struct.pack(">HBBI", 0x5599, 0x42, 0, 64 << 20) + bytes(1 << 16))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 18


def test_misuse_says_what_cannot_be_said() -> None:
    with pytest.raises(MisuseError, match="256 retries do not fit in a byte"):
        sspq.frame(Type.SEND, b"", 256)
    with pytest.raises(MisuseError, match="not a type that travels"):
        sspq.frame(Type.OTHER)
    with pytest.raises(MisuseError, match="retries must be 0 to 255"):
        sspq.encode_batch(Batch.of([b"a"], retries=[300]))
    with pytest.raises(MisuseError, match="payload_bytes_max is 0"):
        FrameReader(payload_bytes_max=0)


def test_equal_frames_that_are_taken_together_may_be_cut_within_the_last() -> None:
    frame = sspq.frame(sspq.Type.SEND, b"x" * 20, 3)
    stream = frame * 64
    for cut in range(len(stream) - len(frame), len(stream)):
        reader = sspq.FrameReader()
        events = reader.feed(stream[:cut]) + reader.feed(stream[cut:])
        batches = [event.batch for event in events if isinstance(event, sspq.Messages)]
        assert sum(map(len, batches)) == 64
        assert b"".join(batch.payload for batch in batches) == b"x" * 20 * 64
