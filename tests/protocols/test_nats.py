"""NATS as a server says it: vectors, any bytes, any split, quick against plain."""

import json
import re
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.protocols.errors import MisuseError, PeerViolation
from penstock.protocols.nats import Event, Info, Messages, Reader, Status
from tests.protocols.vectors_nats import FAULTS, LIMIT_BYTES, ROWS, Fault, Read, Row

Feed = Callable[[Callable[[bytes], list[Event]], bytes, bytes], list[Event]]

FOLLOWING = Row(
    "following", "", b"MSG next 3 back 4\r\nnext\r\n", (("message", 3, b"next", b"back", b"", b"next"),)
)


def flat(events: list[Event]) -> list[Read]:
    """Events without their grouping."""
    out: list[Read] = []
    for event in events:
        if isinstance(event, Messages):
            columns = event.subjects, event.replies, event.headers, event.payloads
            out += [("message", event.sid, *row) for row in zip(*columns, strict=True)]
        elif isinstance(event, Status):
            out.append(("status", event.sid, event.subject, event.code, event.text))
        elif isinstance(event, Info):
            out.append(("word", f"Info({event.said})"))
        else:
            out.append(("word", repr(event)))
    return out


def sorted_by_subscription(reads: list[Read]) -> dict[object, list[Read]]:
    """What is promised to be in order: the messages and statuses of a subscription, and the words."""
    out: dict[object, list[Read]] = defaultdict(list)
    for read in reads:
        out[None if read[0] == "word" else read[1]].append(read)
    return out


# --- the plainest reader ---

_WORDS = {b"PING": "Ping()", b"PONG": "Pong()", b"+OK": "Okay()"}


def plainly(stream: bytes, bytes_max: int) -> tuple[list[Read], int | None]:
    """The protocol read in the plainest way there is: what comes out, and where it goes wrong."""
    out: list[Read] = []
    at = 0
    while at < len(stream):
        line, found, _ = stream[at:].partition(b"\n")
        if len(line) + 1 > bytes_max:
            return out, at
        if not found:
            break
        start = at + len(line) + 1
        fields = line.split()
        fewest = {b"MSG": 4, b"HMSG": 5}.get(fields[0], 0) if fields else 0
        if not fewest or len(fields) - fewest not in (0, 1):
            word = plain_line(line.strip())
            if word is None:
                return out, at
            out.append(("word", word))
            at = start
            continue
        kind, subject, sid = fields[:3]
        sizes = fields[-2:] if kind == b"HMSG" else [b"0", fields[-1]]
        reply = fields[3] if len(fields) > fewest else b""
        if not all(size.isdigit() and len(size) < 20 for size in sizes):
            return out, at
        header_bytes, size = map(int, sizes)
        if header_bytes > size or size > bytes_max:
            return out, at
        body = stream[start : start + size]
        ending = stream[start + size : start + size + 2]
        if len(ending) < 2:
            break
        if ending != b"\r\n":
            return out, at
        headers, payload = body[:header_bytes], body[header_bytes:]
        status = re.match(rb"NATS/1\.0 (\d{3})(.?)([^\r]*)", headers, re.DOTALL)
        if not (sid.isdigit() and len(sid) < 20):
            return out, at
        if headers and headers[8:9] != b"\r":
            line_end = headers.partition(b"\r\n")[0]
            if status is None or line_end[:9] != b"NATS/1.0 ":
                return out, at
            text = line_end[13:].decode("utf-8", "replace").strip()
            out.append(("status", int(sid), subject, int(status[1]), text))
        else:
            out.append(("message", int(sid), subject, reply, headers, payload))
        at = start + size + 2
    return out, None


def plain_line(line: bytes) -> str | None:
    word = line.split()[0] if line.split() else b""
    rest = line[len(word) :].strip()
    if word in _WORDS and not rest:
        return _WORDS[word]
    if word == b"-ERR":
        text = rest.decode("utf-8", "replace").strip("'")
        return f"Refused(text={text!r})"
    if word == b"INFO":
        try:
            said = json.loads(rest)
        except ValueError:
            return None
        return f"Info({said})" if isinstance(said, dict) else None
    return None


def in_chunks(chunks: list[bytes], bytes_max: int) -> tuple[list[Read], int | None]:
    reader = Reader(frame_bytes_max=bytes_max, line_bytes_max=bytes_max)
    out: list[Read] = []
    for chunk in chunks:
        try:
            out += flat(reader.feed(chunk))
        except PeerViolation as violation:
            return out + flat(reader.salvage()), violation.position
    assert reader.position == sum(map(len, chunks))
    return out, None


def agrees(stream: bytes, chunks: list[bytes], bytes_max: int) -> None:
    """The reader says what the plainest one says, whole and in pieces."""
    plain, fault = plainly(stream, bytes_max)
    for pieces in ([stream], chunks):
        read, position = in_chunks(pieces, bytes_max)
        assert (sorted_by_subscription(read), position) == (sorted_by_subscription(plain), fault)


# --- vectors ---


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_vectors_are_read(row: Row, feed: Feed) -> None:
    assert flat(feed(Reader().feed, row.data, FOLLOWING.data)) == [*row.reads, *FOLLOWING.reads]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_are_violations_with_their_place(fault: Fault, feed: Feed) -> None:
    reader = Reader(frame_bytes_max=LIMIT_BYTES, line_bytes_max=LIMIT_BYTES)
    with pytest.raises(PeerViolation, match=fault.message) as caught:
        feed(reader.feed, fault.data, b"")
    assert caught.value.position == fault.position
    assert fault.data[fault.position :].startswith(caught.value.offending)
    with pytest.raises(PeerViolation, match=fault.message):
        reader.feed(b"PING\r\n")


def test_what_came_before_a_violation_is_salvaged_once() -> None:
    reader = Reader()
    with pytest.raises(PeerViolation):
        reader.feed(b"MSG a 1 4\r\ngood\r\n" * 40 + b"bad bytes\r\n")
    assert flat(reader.salvage()) == [("message", 1, b"a", b"", b"", b"good")] * 40
    assert reader.salvage() == []


def test_a_subscription_s_messages_are_one_batch_whoever_else_is_served() -> None:
    events = Reader().feed(b"MSG a 1 1\r\nx\r\nMSG b 2 1\r\ny\r\nPING\r\n" * 100)
    batches = [event for event in events if isinstance(event, Messages)]
    assert [(batch.sid, len(batch)) for batch in batches] == [(1, 100), (2, 100)]
    assert len(events) == 102


def test_limits_that_let_nothing_in_are_misuse() -> None:
    with pytest.raises(MisuseError, match="let nothing in"):
        Reader(frame_bytes_max=0)


# --- any bytes ---

subjects = st.sampled_from([b"a", b"q.orders", b"_INBOX.x.0000000000001", b"\xc3\xbc"])
sids = st.integers(1, 3).map(lambda n: b"%d" % n)
payloads = st.one_of(st.binary(max_size=20), st.sampled_from([b"", b"\r\n", b"PING\r\n", bytes(50)]))
header_blocks = st.sampled_from(
    [
        b"NATS/1.0\r\n\r\n",
        b"NATS/1.0\r\nA: b\r\n\r\n",
        b"NATS/1.0 503\r\n\r\n",
        b"NATS/1.0 409 Leadership Change\r\n\r\n",
        b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 7\r\n\r\n",
    ]
)


def message(subject: bytes, sid: bytes, reply: bytes, headers: bytes, payload: bytes) -> bytes:
    line = b" ".join(part for part in (subject, sid, reply) if part)
    if headers:
        return b"HMSG %b %d %d\r\n%b%b\r\n" % (line, len(headers), len(headers + payload), headers, payload)
    return b"MSG %b %d\r\n%b\r\n" % (line, len(payload), payload)


frames = st.one_of(
    st.builds(
        message, subjects, sids, st.sampled_from([b"", b"r.1"]), header_blocks | st.just(b""), payloads
    ),
    st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'no'\r\n", b'INFO {"a":1} \r\n']),
)
streams = st.lists(frames, max_size=12).map(b"".join)


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


@given(damaged(), st.lists(st.integers(0, 1 << 20), max_size=6), st.sampled_from([30, 64, 1 << 20]))
def test_any_split_reads_as_the_plainest_reader_does(stream: bytes, cuts: list[int], limit: int) -> None:
    agrees(stream, cut(stream, cuts), limit)


@given(st.binary(max_size=200))
@example(b"MSG a 1 5\r\n" * 5)
@example(b"HMSG a 1 9 9\r\nNATS/1.0 \r\n")
def test_any_bytes_are_events_or_a_violation(data: bytes) -> None:
    agrees(data, [data[at : at + 1] for at in range(len(data))], 1000)


# --- memory ---


def test_a_large_payload_costs_about_twice_its_size() -> None:
    size, chunk = 32 << 20, bytes(256 << 10)
    reader = Reader()
    tracemalloc.start()
    try:
        events = reader.feed(b"MSG a 1 %d\r\n" % size)
        for _ in range(size // len(chunk)):
            assert events == []
            events = reader.feed(memoryview(chunk))
        events = reader.feed(b"\r\n")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    (event,) = events
    assert isinstance(event, Messages)
    assert len(event.payloads[0]) == size
    assert peak_bytes < size * 2.3


def test_an_announced_payload_costs_nothing_before_it_comes() -> None:
    tracemalloc.start()
    try:
        Reader().feed(b"MSG a 1 %d\r\nx" % (60 << 20))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 18
