"""PHPMQ on the wire: vectors both ways, any bytes, any split, the quick way against the careful one."""

import tracemalloc
from array import array
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.model.batch import NO_TTL, Batch, Slice
from penstock.protocols import phpmq
from penstock.protocols.errors import MisuseError, PeerViolation
from penstock.protocols.phpmq import (
    SETTLEMENTS,
    ConsumeRequested,
    Dialect,
    Dispatched,
    Event,
    Limits,
    MessageType,
    PacketType,
    Sent,
)
from penstock.protocols.phpmq_read import Reader
from penstock.protocols.phpmq_write import TtlPacket, Writer
from tests.protocols.vectors_phpmq import (
    FAULTS,
    NARROW,
    NARROW_LINES,
    ROWS,
    TTL_0,
    WIDE,
    WIDE_LINES,
    Fault,
    Read,
    Row,
)

Feed = Callable[[Callable[[bytes], list[Event]], bytes, bytes], list[Event]]

EVERY_TYPE = frozenset(MessageType)
DIALECTS = (NARROW, NARROW_LINES, Dialect(35), Dialect(35, True), WIDE, WIDE_LINES)
FOLLOWING = b"H0100102P0100000000000000000000000000002q2P0200000000000000000000000000004next"
FOLLOWING_READS: Read = ("sent", "q2", b"next", 0)


def flat(events: list[Event]) -> list[Read]:
    """Events without their grouping."""
    out: list[Read] = []
    for event in events:
        if isinstance(event, ConsumeRequested):
            out.append(("consume", event.queue, event.count, event.dialect))
        elif isinstance(event, Sent | Dispatched):
            batch = event.batch
            assert batch.protocol == "phpmq"
            ttls = batch.ttl_seconds or array("q", bytes(8 * len(batch)))
            if isinstance(event, Sent):
                if batch.ttl_seconds is not None:
                    ttls = array("q", [ttl or TTL_0 for ttl in ttls])
                out += [("sent", event.queue, c, t) for c, t in zip(batch.messages(), ttls, strict=True)]
            else:
                assert batch.ttl_seconds is None or any(batch.ttl_seconds)
                rows = zip(batch.messages(), event.ids, ttls, strict=True)
                out += [("dispatched", event.queue, c, i, t) for c, i, t in rows]
        else:
            out += [("settled", event.type_, event.queue, i, event.ttl_seconds) for i in event.ids]
    return out


def write(read: Read, dialect: Dialect) -> bytes:
    """What we write to say that."""
    writer = Writer(dialect)
    match read:
        case ("sent", str(queue), bytes(content), int(ttl)):
            return writer.sends(queue, Batch.of([content], ttl_seconds=[ttl] if ttl else None))
        case ("consume", str(queue), int(count), Dialect()):
            return writer.consume(queue, count)
        case ("settled", MessageType() as type_, str(queue), bytes(id_), int(ttl)):
            return writer.settlements(type_, queue, [id_], ttl)
        case ("dispatched", str(queue), bytes(content), bytes(id_), int(ttl)):
            piece = Slice(content, [0, len(content)], 0, 1, int(id_[18:], 16), id_[:18], 0)
            piece.expires_us = [ttl * 1_000_000] if ttl else None
            return writer.dispatches(queue, [piece], 0)
    raise AssertionError(read)


def in_chunks(chunks: list[bytes], limits: Limits) -> tuple[list[Read], tuple[int, bytes, str] | None]:
    reader = Reader(EVERY_TYPE, limits)
    out: list[Read] = []
    for chunk in chunks:
        try:
            out += flat(reader.feed(chunk))
        except PeerViolation as violation:
            return out + flat(reader.salvage()), (violation.position, violation.offending, str(violation))
    assert reader.position == sum(map(len, chunks))
    return out, None


def carefully(stream: bytes, limits: Limits) -> tuple[list[Read], tuple[int, bytes, str] | None]:
    """Byte by byte no chunk ever holds a whole message, so that the quick way never sees one."""
    return in_chunks([stream[at : at + 1] for at in range(len(stream))], limits)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_vectors_are_read(row: Row, feed: Feed) -> None:
    events = feed(Reader(EVERY_TYPE).feed, row.data, FOLLOWING)
    assert flat(events) == [*row.reads, FOLLOWING_READS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_message_is_there_with_its_last_content(row: Row) -> None:
    assert flat(Reader(EVERY_TYPE).feed(row.data.rstrip(b"\n"))) == list(row.reads)


@pytest.mark.parametrize("row", [row for row in ROWS if row.written], ids=lambda row: row.name)
def test_vectors_are_written(row: Row) -> None:
    assert row.written is not None
    assert b"".join(write(read, row.written) for read in row.reads) == row.data


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_side_refuses_what_only_the_other_says(row: Row) -> None:
    wrong = phpmq.FROM_CLIENT if row.from_server else phpmq.FROM_SERVER
    with pytest.raises(PeerViolation, match="is not for this side"):
        Reader(wrong).feed(row.data)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_are_violations_with_their_place(fault: Fault, feed: Feed) -> None:
    reader = Reader(phpmq.FROM_CLIENT)
    with pytest.raises(PeerViolation, match=fault.message) as caught:
        feed(reader.feed, fault.data, b"")
    assert caught.value.position == fault.position
    assert caught.value.offending == fault.data[fault.position :][: len(caught.value.offending)]
    assert caught.value.offending
    with pytest.raises(PeerViolation, match=fault.message):
        reader.feed(FOLLOWING)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_came_before_a_violation_is_salvaged_once(fault: Fault) -> None:
    reader = Reader(phpmq.FROM_CLIENT)
    with pytest.raises(PeerViolation, match=fault.message) as caught:
        reader.feed(FOLLOWING * 40 + fault.data)
    assert caught.value.position == fault.position + 40 * len(FOLLOWING)
    assert flat(reader.salvage()) == [FOLLOWING_READS] * 40
    assert reader.salvage() == []


def test_a_run_is_one_batch_ready_to_be_a_block() -> None:
    writer = Writer(NARROW)
    first = writer.sends("a", Batch.of([bytes(size) for size in range(100)]))
    second = writer.sends("a", Batch.of([b"x"] * 100, ttl_seconds=[7] * 100))
    events = [event for event in Reader(EVERY_TYPE).feed(first + second) if isinstance(event, Sent)]
    assert [event.batch.ttl_seconds for event in events] == [None, array("q", [7] * 100)]
    for event in events:
        assert event.batch.bounds.typecode == "i"
        assert event.batch.bounds[-1] == len(event.batch.payload)


def test_queues_of_equal_length_are_kept_apart() -> None:
    writer = Writer(NARROW)
    batch = Batch.of([b"x" * 9] * 50)
    stream = b"".join(writer.sends(name, batch) for name in ("aa", "ab", "aa", "ba"))
    events = Reader(EVERY_TYPE).feed(stream * 2)
    assert [event.queue for event in events if isinstance(event, Sent)] == ["aa", "ab", "aa", "ba"] * 2
    assert [len(event.batch) for event in events if isinstance(event, Sent)] == [50] * 8


def test_the_digits_of_a_ttl_are_known_without_the_line_break_of_another_dialect() -> None:
    """A message with line breaks has shown a TTL of 5; the text 5 and a break is no number for that."""
    known = write(("sent", "q", b"x", 5), NARROW_LINES) + write(("sent", "q", b"x", 60), NARROW)
    spoiled = write(("sent", "q", b"x", 60), NARROW).replace(b"60", b"5\n")
    for stream in (known + spoiled, known + spoiled * 40):
        said, violation = in_chunks([stream], Limits())
        assert (said, violation) == carefully(stream, Limits())
        assert violation is not None


def test_the_width_last_seen_is_also_that_of_the_quick_way() -> None:
    wide, narrow = (Writer(dialect).sends("a", Batch.of([b"x"])) for dialect in (WIDE, NARROW))
    packets = [(PacketType.CONTENT, b"y"), (PacketType.QUEUE, b"a")]
    stream = wide + narrow + wide + message(WIDE, MessageType.MESSAGE, packets)
    assert flat(Reader(EVERY_TYPE).feed(stream)) == [("sent", "a", c, 0) for c in (b"x", b"x", b"x", b"y")]


@pytest.mark.parametrize(
    "head",
    [
        b"H0100102P0100000000000000000000000000001aP0200000000000000000000000000051",
        b"H0100102P0100000000000000000000000000001aP0299999999999999999999999999999",
        b"H0100102P0100000000000000000000000000001aP020000000000000000000000000+005",
        b"H0100102P0100000000000000000000000000001aP020000000000000000000000000 005",
        b"H0100102P0100000000000000000000000000001aP02000000000000000000000000001_0",
        b"H0100102P0100000000000000000000000000001aP02" + bytes(29),
    ],
)
def test_the_quick_way_leaves_faults_to_the_careful_way(head: bytes) -> None:
    good = Writer(NARROW).sends("a", Batch.of([b"x" * 50] * 3))
    limits = Limits(payload_bytes_max=50)
    read, fault = in_chunks([good + head + b"x" * 51], limits)
    assert (read, fault) == carefully(good + head + b"x" * 51, limits)
    assert len(read) == 3
    assert fault is not None
    assert fault[0] == len(good) + 41


# ---- any stream, any split

queues = st.sampled_from(["a", "aa", "ab", "ba", "a.dead", "größe"])
contents = st.sampled_from([0, 1, 2, 33, 100]).flatmap(lambda size: st.binary(min_size=size, max_size=size))
ids = st.one_of(
    st.integers(0, 99).map(lambda n: b"0123456789abcdef01%014x" % n),
    st.binary(min_size=32, max_size=32),
    st.binary(max_size=40),
)
ttls = st.sampled_from([b"0", b"7", b"60", b"007", b"3600"])


def message(
    dialect: Dialect, type_: MessageType, packets: list[tuple[PacketType, bytes]], last_break: bool = True
) -> bytes:
    text = dialect.message_header(type_, len(packets)) + b"".join(
        dialect.packet(*packet) for packet in packets
    )
    return text if last_break or not dialect.line_breaks else text[:-1]


@st.composite
def runs(draw: st.DrawFn) -> bytes:
    """Messages that look alike, often enough for whole groups, sometimes with something odd about them."""
    dialect = draw(st.sampled_from(DIALECTS))
    type_ = draw(st.sampled_from(MessageType))
    queue = draw(queues).encode()
    order = (
        draw(st.permutations(phpmq.REQUIRED[type_]))
        if draw(st.integers(0, 4)) == 0
        else phpmq.REQUIRED[type_]
    )
    order = [*order, *(phpmq.OPTIONAL.get(type_, ()) if draw(st.booleans()) else ())]
    last_break = draw(st.integers(0, 9)) > 0
    values = {
        PacketType.QUEUE: st.just(queue),
        PacketType.CONTENT: contents,
        PacketType.ID: ids,
        PacketType.COUNT: st.sampled_from([b"0", b"5", b"1000"]),
        PacketType.TTL: ttls,
    }
    different = draw(st.lists(st.fixed_dictionaries({p: values[p] for p in order}), min_size=1, max_size=3))
    texts = [message(dialect, type_, [(p, row[p]) for p in order], last_break) for row in different]
    return b"".join(text * draw(st.integers(1, 70)) for text in texts)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    stream = bytearray(b"".join(draw(st.lists(runs(), max_size=4))))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        if stream:
            stream[draw(st.integers(0, len(stream) - 1))] = draw(st.sampled_from(b"HP0123456789\n\x00aF"))
    if stream and draw(st.integers(0, 4)) == 0:
        del stream[draw(st.integers(0, len(stream) - 1))]
    return bytes(stream)


def cut(stream: bytes, at: list[int]) -> list[bytes]:
    marks = [0, *sorted(mark % (len(stream) + 1) for mark in at), len(stream)]
    return [stream[start:end] for start, end in pairwise(marks)]


TIGHT = Limits(payload_bytes_max=50, queue_name_bytes_max=5, number_digits_max=2, message_id_bytes_max=32)


@given(damaged(), st.lists(st.integers(0, 1 << 20), max_size=6), st.sampled_from([Limits(), TIGHT]))
def test_the_quick_way_says_what_the_careful_way_says(stream: bytes, cuts: list[int], limits: Limits) -> None:
    expected = carefully(stream, limits)
    assert in_chunks([stream], limits) == expected
    assert in_chunks(cut(stream, cuts), limits) == expected


@given(st.binary(max_size=200) | st.text(alphabet="HP0123\n", max_size=200).map(str.encode))
@example(b"H0100102" * 9)
def test_any_bytes_are_events_or_a_violation(data: bytes) -> None:
    assert in_chunks([data], Limits()) == carefully(data, Limits())


@pytest.mark.parametrize("dialect", DIALECTS, ids=str)
def test_a_cut_at_any_byte_changes_nothing(dialect: Dialect) -> None:
    """Also where what stands before the cut looks like something shorter that was seen already."""
    values = {
        PacketType.QUEUE: (b"aa",) * 4,
        PacketType.CONTENT: (b"x", b"x" * 11, b"x", b"x" * 11),
        PacketType.ID: tuple(b"0123456789abcdef01%014x" % number for number in (1, 17, 1, 17)),
        PacketType.COUNT: (b"1", b"11", b"1", b"11"),
        PacketType.TTL: (b"6", b"60", b"6", b"60"),
    }
    orders = [(type_, order) for type_, order in phpmq.REQUIRED.items()]
    orders += [(type_, phpmq.REQUIRED[type_] + others) for type_, others in phpmq.OPTIONAL.items()]
    for type_, order in orders:
        stream = b"".join(message(dialect, type_, [(p, values[p][n]) for p in order]) for n in range(4))
        expected = carefully(stream, Limits())
        assert len(expected[0]) == 4
        for at in range(len(stream)):
            assert in_chunks([stream[:at], stream[at:]], Limits()) == expected


many = st.lists(st.tuples(contents, st.sampled_from([0, 0, 5, 3600])), max_size=80)


@given(st.sampled_from(DIALECTS), queues, many)
def test_sends_read_as_they_were(dialect: Dialect, queue: str, sends: list[tuple[bytes, int]]) -> None:
    batch = Batch.of([c for c, _ in sends], ttl_seconds=[t for _, t in sends])
    stream = Writer(dialect).sends(queue, batch)
    assert flat(Reader(EVERY_TYPE).feed(stream)) == [("sent", queue, c, t) for c, t in sends]


@given(
    st.sampled_from(DIALECTS),
    queues,
    st.sampled_from(sorted(SETTLEMENTS)),
    st.lists(ids.filter(bool), max_size=80),
    st.sampled_from([0, 9, 86400]),
)
def test_verdicts_read_as_they_were(
    dialect: Dialect, queue: str, type_: MessageType, named: list[bytes], ttl: int
) -> None:
    stream = Writer(dialect).settlements(type_, queue, named, ttl)
    shown = ttl if type_ is MessageType.REQUEUE else 0
    assert flat(Reader(EVERY_TYPE).feed(stream)) == [("settled", type_, queue, i, shown) for i in named]


@given(
    st.sampled_from(DIALECTS),
    st.sampled_from(TtlPacket),
    many.filter(bool),
    st.integers(0, (1 << 56) - 100),
    st.booleans(),
    st.data(),
)
def test_dispatches_read_as_their_slices(
    dialect: Dialect,
    ttl_packet: TtlPacket,
    messages: list[tuple[bytes, int]],
    first: int,
    dead: bool,
    data: st.DataObject,
) -> None:
    batch = Batch.of([content for content, _ in messages])
    lo = data.draw(st.integers(0, len(messages)))
    hi = data.draw(st.integers(lo, len(messages)))
    now_us = 1_700_000_000_000_000
    expires = [now_us + ttl * 1_000_000 - 999_999 if ttl else 0 for _, ttl in messages]
    payload = memoryview(batch.payload) if data.draw(st.booleans()) else batch.payload
    origin = b"0123456789abcdef01"
    piece = Slice(payload, batch.bounds, lo, hi, first, origin, 0, expires_us=expires)
    stream = Writer(dialect).dispatches("a", [piece, piece], now_us, ttl_packet, dead)
    expected: list[Read] = []
    for at in range(lo, hi):
        shown = 0 if dead or ttl_packet is TtlPacket.NEVER else messages[at][1]
        expected.append(("dispatched", "a", messages[at][0], origin + b"%014x" % (first + at), shown))
    assert flat(Reader(phpmq.FROM_SERVER).feed(stream)) == expected * 2


def test_the_ttl_packet_follows_its_setting() -> None:
    column = [5_000_000, 0, NO_TTL]
    pieces = [Slice(b"abc", [0, 1, 2, 3], 0, 3, 0, b"0" * 18, 0, expires_us=column)]
    plain = [Slice(b"c", [0, 1], 0, 1, 9, b"0" * 18, 0)]
    counts = {
        setting: [
            int(part[:2])
            for part in Writer(NARROW).dispatches("q", pieces + plain, 0, setting).split(b"H01003")[1:]
        ]
        for setting in TtlPacket
    }
    assert counts == {
        TtlPacket.AUTO: [4, 4, 3, 3],
        TtlPacket.ALWAYS: [4, 4, 4, 4],
        TtlPacket.NEVER: [3, 3, 3, 3],
    }


@pytest.mark.parametrize(
    ("left_us", "shown"), [(1, 1), (999_999, 1), (1_000_000, 1), (1_000_001, 2), (0, 1), (-5_000_000, 1)]
)
def test_what_is_left_of_a_ttl_is_rounded_up_and_never_0(left_us: int, shown: int) -> None:
    now_us = 1_700_000_000_000_000
    piece = Slice(b"x", [0, 1], 0, 1, 0, b"0" * 18, 0, expires_us=[now_us + left_us])
    (read,) = flat(Reader(EVERY_TYPE).feed(Writer(NARROW).dispatches("q", [piece], now_us)))
    assert read[-1] == shown


# ---- what it costs


def test_a_large_content_costs_about_its_size_and_is_not_copied_again() -> None:
    size, chunk = 64 << 20, bytes(256 << 10)
    reader = Reader(EVERY_TYPE)
    head = NARROW.message_header(MessageType.MESSAGE, 2) + NARROW.packet(PacketType.QUEUE, b"q")
    tracemalloc.start()
    try:
        events = reader.feed(head + NARROW.packet_header(PacketType.CONTENT, size))
        for _ in range(size // len(chunk)):
            assert events == []
            events = reader.feed(memoryview(chunk))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    (event,) = events
    assert isinstance(event, Sent)
    assert len(event.batch.payload) == size
    assert peak_bytes < size * 1.2


def test_an_announced_content_costs_nothing_before_it_comes() -> None:
    head = NARROW.message_header(MessageType.MESSAGE, 2) + NARROW.packet(PacketType.QUEUE, b"q")
    tracemalloc.start()
    try:
        Reader(EVERY_TYPE).feed(head + NARROW.packet_header(PacketType.CONTENT, 64 << 20) + b"x")
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 18


def test_what_a_peer_makes_us_remember_is_bounded() -> None:
    """Hundreds of queues, thousands of sizes and TTLs, all of which the quick way would like to remember."""
    packets = [(PacketType.QUEUE, b""), (PacketType.CONTENT, b""), (PacketType.TTL, b"")]
    streams = []
    for queue in range(200):
        packets[0] = (PacketType.QUEUE, b"queue%d" % queue)
        texts = []
        for size in range(40):
            packets[1:] = (PacketType.CONTENT, bytes(size)), (PacketType.TTL, b"%d" % (queue * 40 + size))
            texts.append(message(NARROW, MessageType.MESSAGE, packets))
        streams.append(b"".join(texts))
    reader = Reader(EVERY_TYPE)
    tracemalloc.start()
    try:
        for stream in streams:
            reader.feed(stream)
        kept_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept_bytes < 1 << 19


# ---- misuse


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: w.sends("", Batch.of([b"x"])), "a queue name cannot be empty"),
        (lambda w: w.sends("q" * 256, Batch.of([b"x"])), "the name has 256 bytes; use at most 255"),
        (lambda w: w.consume("q" * 251 + ".dead", 1), "the name has 256 bytes; use at most 255"),
        (lambda w: w.sends("a\nb", Batch.of([b"x"])), "control character"),
        (lambda w: w.sends("\udc80", Batch.of([b"x"])), "not text"),
        (lambda w: w.sends("q", Batch.of([b"x" * 51])), "a message of 51 bytes is over 50"),
        (
            lambda w: w.sends("q", Batch.of([b"x"], ttl_seconds=[-1])),
            "a TTL is a number of at most 10 digits",
        ),
        (lambda w: w.consume("q", 10**10), "a window is a number of at most 10 digits"),
        (lambda w: w.consume("q", -1), "a window is a number of at most 10 digits"),
        (lambda w: w.settlements(MessageType.ACKNOWLEDGE, "q", [b""]), "an id has 1 to 255 bytes, not 0"),
        (lambda w: w.settlements(MessageType.REQUEUE, "q", [b"i"], 10**10), "a TTL is a number"),
        (lambda w: w.settlements(MessageType.CONSUME, "q", []), "message 002 is no verdict"),
    ],
)
def test_misuse_says_what_cannot_be_said(call: Callable[[Writer], bytes], message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        call(Writer(NARROW, Limits(payload_bytes_max=50)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("payload_bytes_max", 1 << 31),
        ("queue_name_bytes_max", 10_000),
        ("number_digits_max", 13),
        ("windows_max", 0),
    ],
)
def test_limits_have_limits(name: str, value: int) -> None:
    with pytest.raises(MisuseError, match=f"{name} is {value}, must be 1 to"):
        Limits(**{name: value})


@pytest.mark.parametrize("name", ["Foo", "1", "2nd", "0123456789", "9" * 99, "P02" + "0" * 20, "ä" * 50])
@pytest.mark.parametrize("dialect", DIALECTS, ids=str)
def test_the_width_is_recognised_whatever_the_name(dialect: Dialect, name: str) -> None:
    """Also where the name begins with a digit, which could be the last one of a wider header."""
    writer = Writer(dialect)
    stream = writer.consume(name, 5) + writer.sends(name, Batch.of([b"", b"7", b"P02" + b"0" * 40]))
    reads: list[Read] = [("consume", name, 5, dialect)]
    reads += [("sent", name, content, 0) for content in (b"", b"7", b"P02" + b"0" * 40)]
    for chunks in ([stream], [stream[at : at + 1] for at in range(len(stream))]):
        assert in_chunks(chunks, Limits()) == (reads, None)
    if len(name) < 30:
        return
    over = writer.sends(name, Batch.of([b"x"]))
    assert in_chunks([over], Limits(queue_name_bytes_max=20))[1] is not None


def test_a_dialect_has_one_of_three_widths() -> None:
    with pytest.raises(MisuseError, match="32, 35 or 36 bytes, not 33"):
        Dialect(33)
