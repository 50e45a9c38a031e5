"""RQ's bytes to events and back: one table of vectors, and properties over streams of any kind."""

import tracemalloc
from array import array
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.model.batch import Batch
from penstock.model.words import Closing, Ignored
from penstock.protocols import rq
from penstock.protocols.errors import MisuseError, PeerViolation
from penstock.protocols.risp import encode
from penstock.protocols.rq import Command, Limits
from penstock.protocols.rq_controller import ControllerSession
from penstock.protocols.rq_decoder import Decoder
from tests.build import interpreted_only
from tests.protocols.rq_reference import Item, cut, items_of, reference, settled
from tests.protocols.vectors_rq import VECTORS, Vector

vectors = pytest.mark.parametrize("vector", VECTORS, ids=[vector.name for vector in VECTORS])
SMALL = Limits(payload_bytes_max=300, queue_name_bytes_max=20)


def read(chunks: Iterable[bytes], limits: Limits | None = None) -> tuple[list[Item], bool]:
    """All items of a stream, and whether it broke off with a violation."""
    decoder = Decoder(limits or Limits())
    items: list[Item] = []
    try:
        for chunk in chunks:
            items += items_of(decoder.feed(chunk))
    except PeerViolation:
        items += items_of(decoder.salvage())
        return items, True
    return items, False


def one_by_one(stream: bytes) -> list[bytes]:
    return [stream[i : i + 1] for i in range(len(stream))]


# -- vectors: fed whole, byte by byte, with trailing bytes; and written ----------------------------


@vectors
def test_a_vector_is_read_whole(vector: Vector) -> None:
    assert settled(read([vector.wire])[0]) == settled(vector.items)


@vectors
def test_a_vector_is_read_byte_by_byte(vector: Vector) -> None:
    assert settled(read(one_by_one(vector.wire))[0]) == settled(vector.items)


@vectors
def test_a_vector_is_read_with_bytes_behind_it(vector: Vector) -> None:
    trailing = bytes.fromhex("01 80 0000")
    decoder = Decoder(Limits())
    assert settled(items_of(decoder.feed(vector.wire + trailing))) == settled(vector.items)
    rest = list(items_of(decoder.feed(bytes.fromhex("0009 0d"))))
    assert rest == [("delivered", 9)]


@vectors
def test_a_vector_is_read_twice_in_a_row(vector: Vector) -> None:
    """The second time, the fast paths know the shape."""
    decoder = Decoder(Limits())
    first = settled(items_of(decoder.feed(b"\x01\x00" + vector.wire)))
    again = settled(items_of(decoder.feed(b"\x01\x00" + vector.wire)))
    assert first == again == settled(vector.items)


@vectors
def test_a_vector_is_written(vector: Vector) -> None:
    if vector.encode is None:
        assert read([vector.wire])[1] is False
    else:
        assert vector.encode().hex(" ") == vector.wire.hex(" ")


def test_every_command_is_in_the_vectors() -> None:
    seen = {byte for vector in VECTORS for byte in vector.wire}
    assert {int(command) for command in Command} <= seen


# -- batches --------------------------------------------------------------------------------------


def test_a_run_of_requests_is_one_event_with_columns_ready_for_the_log() -> None:
    batch = Batch.of([b"a", b"", b"ccc"], retries=[0, 5, 255])
    stream = rq.encode_requests("orders", [1, 2, 0xFFFFFFFF], batch, noreply=True, timeout_seconds=9)
    [event] = Decoder(Limits()).feed(stream)
    assert event == rq.Requests(
        "orders",
        array("I", [1, 2, 0xFFFFFFFF]),
        Batch(b"accc", array("i", [0, 1, 1, 4]), retries=array("h", [0, 5, 255]), protocol="rq"),
        noreply=True,
        timeout_seconds=9,
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"queue": "a"}, {"queue": "b"}),
        ({"noreply": True}, {"noreply": False}),
        ({"timeout_seconds": 1}, {"timeout_seconds": 2}),
        ({"batch": Batch.of([b"x"])}, {"batch": Batch.of([b"x"], retries=[1])}),
    ],
)
def test_requests_that_differ_are_different_events(first: dict[str, Any], second: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"queue": "a", "batch": Batch.of([b"x"]), "noreply": True, "timeout_seconds": 0}

    def frame(ident: int, changes: dict[str, Any]) -> bytes:
        attributes = plain | changes
        queue, batch = attributes.pop("queue"), attributes.pop("batch")
        return rq.encode_requests(queue, [ident], batch, **attributes)

    stream = frame(1, first) + frame(2, first) + frame(3, second)
    ids = [list(event.ids) for event in Decoder(Limits()).feed(stream) if isinstance(event, rq.Requests)]
    assert ids == [[1, 2], [3]]


def test_requests_for_queues_in_turn_are_one_event_a_queue() -> None:
    stream = b"".join(
        rq.encode_requests(f"q{ident % 3}", [ident], Batch.of([b"x"]), noreply=True) for ident in range(30)
    )
    events = Decoder(Limits()).feed(stream)
    assert [event.queue for event in events if isinstance(event, rq.Requests)] == ["q0", "q1", "q2"]


def test_a_queue_named_both_ways_keeps_its_order() -> None:
    by_name = rq.encode_requests("a", [1], Batch.of([b"x"]), noreply=True)
    by_id = bytes.fromhex("01 80 00000002 60 0001 e0 00000000 21 0a")
    again = rq.encode_requests("a", [3], Batch.of([b"x"]), noreply=True)
    events = Decoder(Limits()).feed(by_name + by_id + again)
    assert [event.queue for event in events if isinstance(event, rq.Requests)] == ["a", 1, "a"]


def test_a_worker_that_answers_each_at_once_gives_two_events() -> None:
    stream = b"".join(
        rq.encode_delivered([ident]) + rq.encode_replies([ident], Batch.of([b"done"])) for ident in range(50)
    )
    delivered, replies = Decoder(Limits()).feed(stream)
    assert delivered == rq.Delivered(array("I", range(50)))
    assert isinstance(replies, rq.Replies)
    assert list(replies.ids) == list(range(50))


def test_delivered_after_the_reply_to_the_same_id_stays_behind_it() -> None:
    reply = rq.encode_replies([4], Batch.of([b""]))
    for late in (rq.encode_delivered([4]), rq.encode_delivered([3, 4])):
        for extra in (b"", reply):
            items = list(items_of(Decoder(Limits()).feed(reply + late + extra)))
            assert items.index(("reply", 4, b"")) < items.index(("delivered", 4))


def test_unknown_commands_are_counted_in_one_event() -> None:
    events = Decoder(Limits()).feed(b"\x1f\x05\x1f\xbf\x02zz")
    assert events == [rq.Signal(Command.PING), rq.Skipped({0x1F: 2, 0xBF: 1})]


# -- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "head"),
    [
        (Limits(payload_bytes_max=100), "e0 00000065"),
        (Limits(), "e0 04000001"),
        (Limits(), "ff ffffffff"),
        (Limits(queue_name_bytes_max=3), "a0 04"),
    ],
)
def test_a_length_over_the_limit_is_a_violation_and_what_came_before_is_kept(
    limits: Limits, head: str
) -> None:
    good = rq.encode_delivered([1, 2])
    decoder = Decoder(limits)
    with pytest.raises(PeerViolation) as raised:
        decoder.feed(good + bytes.fromhex(head))
    assert raised.value.position == len(good)
    assert raised.value.offending == bytes.fromhex(head)
    assert list(items_of(decoder.salvage())) == [("delivered", 1), ("delivered", 2)]
    assert decoder.salvage() == []
    with pytest.raises(PeerViolation):
        decoder.feed(good)


def test_a_payload_at_the_limit_is_read_by_every_path() -> None:
    limits = Limits(payload_bytes_max=100)

    def frames(size: int) -> list[bytes]:
        batch = Batch.of([b"x" * size])
        return [
            rq.encode_requests("q", [1], batch, noreply=True),
            rq.encode_replies([1], batch),
            rq.encode_deliveries("q", [1], batch.payload, batch.bounds, noreply=True),
        ]

    for fits, over in zip(frames(100), frames(101), strict=True):
        assert len(read([fits * 3], limits)[0]) == 3
        items, violated = read([fits * 2 + over], limits)
        assert violated
        assert len(items) == 2


@pytest.mark.parametrize(
    "wrong",
    [{"payload_bytes_max": 0}, {"payload_bytes_max": 1 << 31}, {"queue_name_bytes_max": 256},
     {"consumed_queues_max": 65536}],
)  # fmt: skip
def test_limits_that_rq_cannot_keep_are_misuse(wrong: dict[str, int]) -> None:
    with pytest.raises(MisuseError, match=next(iter(wrong))):
        Limits(**wrong)


@pytest.mark.parametrize("name", ["", "x" * 256, "\ud800"])
def test_a_name_that_rq_cannot_say_is_misuse(name: str) -> None:
    with pytest.raises(MisuseError, match="queue"):
        rq.encode_cancel(name)


def test_a_payload_of_64_mib_costs_about_64_mib() -> None:
    size = 64 << 20
    chunk = memoryview(bytearray(256 << 10))
    decoder = Decoder(Limits())
    small = rq.encode_requests("q", [1], Batch.of([b"x"]), noreply=True)
    events: list[rq.Event] = []
    tracemalloc.start()
    try:
        events += decoder.feed(small + bytes.fromhex("01 80 00000002 a0 01 71 e0") + size.to_bytes(4, "big"))
        for _ in range(size // len(chunk)):
            events += decoder.feed(chunk)
        events += decoder.feed(b"\x21\x0a" + small)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        sizes = [len(event.batch.payload) for event in events if isinstance(event, rq.Requests)]
        events.clear()
        idle_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert sizes == [1, size, 1]
    assert peak_bytes < size * 1.2
    assert idle_bytes < 1 << 20


@pytest.mark.parametrize("frames", ["requests", "replies", "broadcasts"])
def test_a_large_payload_among_small_ones_is_an_event_of_its_own(frames: str) -> None:
    batch = Batch.of([b"a", b"b", b"x" * (256 << 10), b"c", b"d"])
    stream = {
        "requests": lambda: rq.encode_requests("q", range(5), batch, noreply=True),
        "replies": lambda: rq.encode_replies(range(5), batch),
        "broadcasts": lambda: rq.encode_broadcasts("q", batch),
    }[frames]()
    events = Decoder(Limits()).feed(stream)
    kinds = (rq.Requests, rq.Replies, rq.Broadcasts)
    assert [len(event.batch) for event in events if isinstance(event, kinds)] == [2, 1, 2]


def test_a_chunk_larger_than_any_event_is_read_in_parts() -> None:
    batch = Batch.of([bytes([i % 256]) * 1000 for i in range(3000)])
    stream = rq.encode_requests("q", range(3000), batch, noreply=True)
    events = Decoder(Limits()).feed(stream)
    assert len(events) > 1
    assert [item[3] for item in items_of(events)] == batch.messages()


# -- properties -----------------------------------------------------------------------------------

names = st.sampled_from(["a", "b", "Q1", "ü", "orders.dead"])
idents = st.integers(0, 5) | st.integers(0, 0xFFFFFFFF)
payloads = st.binary(max_size=12) | st.sampled_from(
    [b"", b"\x01\x80\x00\x00\x00\x01\x0d", b"\x0a" * 5, b"\x0b"]
)

ATTRIBUTES: dict[Command, st.SearchStrategy[Any]] = {
    Command.EXCLUSIVE: st.none(),
    Command.NOREPLY: st.none(),
    Command.PRIORITY: st.integers(0, 255),
    Command.RETRIES: st.integers(0, 2) | st.just(255),
    Command.QUEUEID: st.integers(0, 3),
    Command.TIMEOUT: st.sampled_from([0, 1, 65535]),
    Command.MAX: st.integers(0, 65535),
    Command.ID: idents,
    Command.QUEUE: names.map(str.encode) | st.sampled_from([b"", b"\xff"]),
    Command.PAYLOAD: payloads,
}
attributes = st.sampled_from(sorted(ATTRIBUTES)).flatmap(
    lambda command: ATTRIBUTES[command].map(lambda value: encode(command, value))
)
actions = st.sampled_from(sorted(rq.NEEDS)).map(encode)
batches = st.lists(payloads, min_size=1, max_size=6).map(Batch.of)


def ids_for(batch: Batch) -> st.SearchStrategy[list[int]]:
    return st.lists(idents, min_size=len(batch), max_size=len(batch))


@st.composite
def originals(draw: st.DrawFn) -> bytes:
    """Frames as the original programs and we write them: what the fast paths are made for."""
    batch = draw(batches)
    ids, name, noreply = draw(ids_for(batch)), draw(names), draw(st.booleans())
    kind = draw(st.integers(0, 6))
    if kind == 0:
        retries = draw(st.none() | st.lists(st.integers(-1, 3), min_size=len(ids), max_size=len(ids)))
        counted = Batch.of(batch.messages(), retries=retries)
        timeout = draw(st.sampled_from([0, 30]))
        return rq.encode_requests(name, ids, counted, noreply=noreply, timeout_seconds=timeout)
    if kind == 1:
        return rq.encode_deliveries(name, ids, batch.payload, batch.bounds, noreply=noreply)
    if kind == 2:
        return rq.encode_replies(ids, batch)
    if kind == 3:
        return rq.encode_delivered(ids)
    if kind == 4:
        return rq.encode_undelivered(ids)
    if kind == 5:
        return rq.encode_broadcasts(name, batch)
    pairs = zip(ids, batch.messages(), strict=True)
    return b"".join(rq.encode_delivered([i]) + rq.encode_replies([i], Batch.of([m])) for i, m in pairs)


frames = st.tuples(st.lists(attributes, max_size=7).map(b"".join), actions).map(
    lambda f: b"\x01" + f[0] + f[1]
)
scraps = attributes | actions | st.binary(max_size=4) | st.just(b"\x00") | st.just(b"\x1f")
streams = st.lists(originals() | frames | scraps, max_size=8).map(b"".join)
cuts = st.lists(st.integers(0, 600), max_size=6)


@st.composite
def repeats(draw: st.DrawFn) -> bytes:
    """One frame again and again with other ids and payloads, then a byte changed here or there.

    This is what a shape is learned from, and what it must not be fooled by: attributes twice,
    actions and unknown commands in the middle, and frames that are almost the same.
    """
    around = st.lists(attributes | actions | st.sampled_from([b"\x00", b"\x1f", b"\xbf\x01z"]), max_size=2)
    order = draw(st.permutations([Command.ID, Command.PAYLOAD, Command.QUEUE]))
    between = [b"".join(draw(around)) for _ in order]
    action = draw(st.sampled_from([b"\x0a", b"\x21\x0a", b"\x0b", b"\x0e"]))
    stream = bytearray()
    for _ in range(draw(st.integers(2, 5))):
        values: dict[Command, int | bytes] = {
            Command.ID: draw(idents),
            Command.PAYLOAD: draw(payloads),
            Command.QUEUE: b"a",
        }
        parts = [encode(command, values[command]) for command in order]
        stream += b"\x01" + b"".join(chain.from_iterable(zip(parts, between, strict=True))) + action
    for at in draw(st.lists(st.integers(0, len(stream) - 1), max_size=2)):
        stream[at] = draw(st.sampled_from([0x00, 0x01, 0x0A, 0x0B, 0x0D, 0x0E, 0x1F, 0x21, stream[at] ^ 1]))
    return bytes(stream)


REPEATED = bytes.fromhex("01 80 00000001 a0 01 61 e0 00000001 78 0a") * 3

# A frame that began in another chunk is nothing to learn from: these two would then be misread.
_FLAG, _FRAME, _LIKE_IT = (
    bytes.fromhex(wire)
    for wire in (
        "00 01 21",
        "62 0180 80 00000001 a0 01 61 e0 00000000 0a",
        "01 80 80000000 02 a0 01 61 e0 00000000 0a",
    )
)
CUT_WITH_A_FLAG = (_FLAG + _FRAME + _LIKE_IT, [len(_FLAG), len(_FLAG + _FRAME)])
_REST, _OTHER = (
    bytes.fromhex("80 00000001 a0 01 61 e0 00000000 0a"),
    bytes.fromhex("01 80 0000a001 61 e000 000000 0a"),
)
CUT_AFTER_CLEAR = (b"\x01" + _REST + _OTHER, [1, 1 + len(_REST)])


@settings(max_examples=400)
@given(streams | repeats(), cuts)
@example(REPEATED + REPEATED[:-1] + b"\x0e", [])
@example(REPEATED + bytes.fromhex("80 00000002 0a 0a 15"), [17])
@example(bytes.fromhex("01 80 00000001 e0 00000000 0b 0d 0d 80 00000001 0b"), [3])
# A frame that a fast path has read is not one to learn from.
@example(bytes.fromhex("01 01 80 00000005 0d a0 01 71 e0 00000003 616263 0a") * 3, [])
@example(bytes.fromhex("01 01 00 80 00000005 0d a0 01 71 e0 00000003 616263 0a 01 80 00000005 0d 0a"), [])
@example(bytes.fromhex("01 80 00000005 01 80 00000005 0d a0 01 71 e0 00000003 616263 0a") * 2, [])
# A string that began in an earlier chunk is dropped by the CLEAR behind it.
@example(bytes.fromhex("60 0001 a0 06 736563726574 01 80 00000005 0d 60 0001 e0 00000000 0a"), [6])
@example(bytes.fromhex("e0 00000003 6f6c64 01 80 00000005 0b 0b"), [6])
@example(*CUT_WITH_A_FLAG)
@example(*CUT_AFTER_CLEAR)
def test_any_stream_in_any_pieces_means_what_the_reference_says(stream: bytes, at: list[int]) -> None:
    expected, broken = reference(stream, SMALL)
    for chunks in ([stream], cut(stream, at), one_by_one(stream)):
        items, violated = read(chunks, SMALL)
        assert settled(items) == settled(expected)
        assert violated == broken


@pytest.mark.parametrize(
    "shape",
    [
        "01 80 00000001 a0 01 61 e0 00000001 78 0a",
        "01 21 80 00000001 41 05 a0 01 61 61 0102 e0 00000001 78 20 0a",
        "01 a0 01 61 e0 00000001 78 21 80 00000001 0a",
        "01 80 00000001 e0 00000001 78 0b",
        "01 80 00000001 0d",
        "01 80 00000001 10",
    ],
)
def test_a_frame_that_is_almost_like_the_last_one_is_not_taken_for_it(shape: str) -> None:
    frame = bytes.fromhex(shape)
    values = [*Command, 0x02, 0x1F, 0xBF, 0xFF]
    for at in range(len(frame)):
        for value in values:
            changed = frame[:at] + bytes((value,)) + frame[at + 1 :]
            stream = frame + frame + changed + frame + changed
            items, violated = read([stream], SMALL)
            expected, broken = reference(stream, SMALL)
            assert settled(items) == settled(expected), f"byte {at} as {value:#04x}"
            assert violated == broken


@settings(max_examples=150)
@given(st.binary(max_size=300), cuts)
def test_any_bytes_give_events_or_need_more_or_a_violation(stream: bytes, at: list[int]) -> None:
    expected, broken = reference(stream, SMALL)
    items, violated = read(cut(stream, at), SMALL)
    assert settled(items) == settled(expected)
    assert violated == broken


def walker() -> Decoder:
    """The decoder without its fast paths."""

    class Walker(Decoder):
        def _take_id_frames(self) -> None:
            pass

        def _take_settled(self) -> None:
            pass

        def _take_requests(self) -> None:
            pass

    return Walker(Limits())


@interpreted_only
@settings(max_examples=200)
@given(st.lists(originals(), min_size=1, max_size=6), st.lists(attributes | actions, max_size=3))
def test_the_fast_paths_give_what_the_walker_gives_and_leave_the_same_registers(
    parts: list[bytes], after: list[bytes]
) -> None:
    stream = b"".join(parts)
    fast, slow = Decoder(Limits()), walker()
    assert settled(items_of(fast.feed(stream))) == settled(items_of(slow.feed(stream)))
    tail = b"".join(after) + b"\x0a\x0b\x0d\x0e\x10\x14\x15\x18"  # actions that show the registers
    assert settled(items_of(fast.feed(tail))) == settled(items_of(slow.feed(tail)))


@given(names, batches, st.data())
def test_what_is_encoded_is_decoded(name: str, batch: Batch, data: st.DataObject) -> None:
    ids = data.draw(ids_for(batch))
    noreply, timeout = data.draw(st.booleans()), data.draw(st.integers(0, 65535))
    retries = data.draw(st.none() | st.lists(st.integers(-1, 255), min_size=len(ids), max_size=len(ids)))
    counted = Batch.of(batch.messages(), retries=retries)
    left = retries or [-1] * len(ids)
    messages = batch.messages()
    numbered = list(zip(ids, messages, strict=True))
    assert read([rq.encode_requests(name, ids, counted, noreply=noreply, timeout_seconds=timeout)])[0] == [
        ("request", name, i, m, noreply, r, timeout) for (i, m), r in zip(numbered, left, strict=True)
    ]
    view = memoryview(batch.payload)
    assert read([rq.encode_deliveries(name, ids, view, batch.bounds, noreply=noreply)])[0] == [
        ("request", name, i, m, noreply, -1, 0) for i, m in numbered
    ]
    assert read([rq.encode_replies(ids, batch)])[0] == [("reply", i, m) for i, m in numbered]
    assert read([rq.encode_delivered(ids)])[0] == [("delivered", i) for i in ids]
    assert read([rq.encode_undelivered(ids)])[0] == [("undelivered", i) for i in ids]
    assert read([rq.encode_broadcasts(name, batch)])[0] == [("broadcast", name, m) for m in messages]
    credit, priority = data.draw(st.integers(0, 65535)), data.draw(st.integers(0, 255))
    assert read([rq.encode_consume(name, credit, priority, noreply)])[0] == [
        ("consume", name, credit, priority, noreply)
    ]
    assert read([rq.encode_consuming(name, credit)])[0] == [("consuming", name, credit)]
    assert read([rq.encode_cancel(name)])[0] == [("cancel", name)]


def test_nothing_to_encode_is_no_bytes() -> None:
    none = Batch.of([])
    assert rq.encode_requests("q", [], none, noreply=True) == b""
    assert rq.encode_deliveries("q", [], none.payload, none.bounds, noreply=True) == b""
    assert rq.encode_replies([], none) == rq.encode_delivered([]) == rq.encode_broadcasts("q", none) == b""


def test_large_messages_are_written_whole() -> None:
    batch = Batch.of([b"a" * 9000, b"", b"b" * 70000])
    assert read([rq.encode_deliveries("q", [0, 1, 2], batch.payload, batch.bounds, noreply=False)])[0] == [
        ("request", "q", i, m, False, -1, 0) for i, m in enumerate(batch.messages())
    ]
    # A slice of a stored block: the bounds do not start at 0.
    part = rq.encode_deliveries("q", [5], batch.payload, batch.bounds[2:], noreply=False)
    assert read([part])[0] == [("request", "q", 5, b"b" * 70000, False, -1, 0)]


FLOOD = 1 << 18


@pytest.mark.parametrize(
    ("flood", "events", "said"),
    [
        (b"\x0a", 1, {("malformed", "REQUEST", None): FLOOD}),
        (b"\x05", 1, {("signal", "PING"): FLOOD}),
        (b"\x17", 1, {("signal", "SERVER_FULL"): FLOOD}),
        (b"\x02", 1, {("skipped", 2): FLOOD}),
        (b"\x00", 0, {}),
        (b"\x01", 0, {}),
    ],
    ids=["REQUEST", "PING", "SERVER_FULL", "unknown", "NOP", "CLEAR"],
)
def test_a_flood_of_commands_is_one_event(flood: bytes, events: int, said: dict[Item, int]) -> None:
    """Whoever floods a connection with one byte costs about a byte, not an object for each."""
    decoder = Decoder(Limits())
    tracemalloc.start()
    found = decoder.feed(flood * FLOOD)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == events
    assert Counter(items_of(found)) == said
    assert peak < 4 * FLOOD


def test_a_flood_is_answered_and_counted_as_often_as_it_was_said() -> None:
    session = ControllerSession(0)
    assert session.receive(rq.PING * 1000, 1) == []
    assert session.take_output() == rq.PONG * 1000
    [ignored] = session.receive(bytes.fromhex("01 80 00000007") + b"\x0a" * 1000, 1)
    assert isinstance(ignored, Ignored)
    assert ignored.count == 1000
    assert session.take_output() == rq.encode_undelivered([7]) * 1000
    closing, twice = session.receive(b"\x16" * 5, 1)
    assert (closing, twice) == (Closing(), Ignored("CLOSING twice", 4))
