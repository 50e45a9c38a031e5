"""The relay's codec: a table of frames, cut anyhow; columns that come out as they went in; and no crash."""

import random
from array import array
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.columns import (
    pack_batches,
    pack_ranges,
    pack_slices,
    unpack_batch,
    unpack_ranges,
    unpack_slices,
)
from penstock.cluster.frames import (
    FRAME_BYTES_MAX,
    Body,
    Buffer,
    Frame,
    Hello,
    Kind,
    Reader,
    decode_hello,
    decode_json,
    encode_frame,
    encode_hello,
    encode_json,
)
from penstock.cluster.front import _ours
from penstock.cluster.lanes import Item, Shipment, pack_shipment, unpack_shipment
from penstock.cluster.seats import Seat
from penstock.cluster.word_codec import NO_NUMBER, pack_words, unpack_words
from penstock.model.batch import Batch, Slice
from penstock.model.words import (
    Accepted,
    Broadcast,
    Cancel,
    Closing,
    Command,
    Consume,
    Outcome,
    Publish,
    Reply,
    Settle,
)
from penstock.protocols.errors import PeerViolation
from penstock.server.rounds import RECEIVE_BYTES
from penstock.server.settings_read import load
from tests.server.settings_source import parser

ORIGIN = b"0123456789abcdef01"

VECTORS = [
    ("00000000 0f 00 0000 00000000", Kind.RESUMED, 0, 0, b""),
    ("00000000 0b 00 0000 07000000", Kind.DETACH, 0, 7, b""),
    ("00000000 12 01 0000 07000000", Kind.BLOCKED, 1, 7, b""),
    ("08000000 32 01 0000 00000000 0500000000000000", Kind.STORED, 1, 0, bytes([5, *[0] * 7])),
    ("02000000 29 00 0000 ffffffff 5131", Kind.CONSUMING, 0, 2**32 - 1, b"Q1"),
]
WIRE = b"".join(bytes.fromhex(row[0]) for row in VECTORS)


def frames_of(chunks: Iterable[Buffer], reader: Reader | None = None) -> list[Frame]:
    """The frames of a stream; their bodies are copied, because they hold for one chunk only."""
    reader = reader or Reader(FRAME_BYTES_MAX)
    return [
        frame._replace(body=memoryview(bytes(frame.body))) for chunk in chunks for frame in reader.feed(chunk)
    ]


def one(kind: Kind, *buffers: Buffer) -> Body:
    (frame,) = frames_of([encode_frame(kind, *buffers)])
    return Body(frame)


# --- frames ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", VECTORS, ids=[row[1].name for row in VECTORS])
def test_the_bytes_of_a_frame(row: tuple[str, Kind, int, int, bytes]) -> None:
    wire, kind, flag, port, body = row
    assert encode_frame(kind, body, port=port, flag=flag) == bytes.fromhex(wire)


@pytest.mark.parametrize("size", [1, 2, 5, 11, 13, 1000])
def test_frames_come_out_whole_however_they_were_cut(size: int) -> None:
    frames = frames_of(WIRE[at : at + size] for at in range(0, len(WIRE), size))
    assert [(f.kind, f.flag, f.port, bytes(f.body)) for f in frames] == [row[1:] for row in VECTORS]
    positions = [0]
    for row in VECTORS:
        positions.append(positions[-1] + len(bytes.fromhex(row[0])))
    assert [frame.position for frame in frames] == positions[:-1]


def test_a_frame_that_is_whole_is_not_copied() -> None:
    chunk = bytearray(encode_frame(Kind.LOG, b"abc"))
    (frame,) = Reader(FRAME_BYTES_MAX).feed(chunk)
    chunk[-1:] = b"d"
    assert bytes(frame.body) == b"abd"


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 400), min_size=1, max_size=50))
def test_any_bodies_any_cuts(bodies: list[bytes], cuts: list[int]) -> None:
    wire = b"".join(encode_frame(Kind.WORDS, body, port=number) for number, body in enumerate(bodies))
    chunks, at, turn = [], 0, 0
    while at < len(wire):
        chunks.append(wire[at : at + cuts[turn % len(cuts)]])
        at += cuts[turn % len(cuts)]
        turn += 1
    assert [bytes(frame.body) for frame in frames_of(chunks)] == bodies


def test_strangers_are_bounded() -> None:
    with pytest.raises(PeerViolation, match="at most 4096"):
        frames_of([encode_frame(Kind.HELLO, bytes(5000))], Reader())
    with pytest.raises(PeerViolation, match="no frame has the kind 71"):
        frames_of([b"\0\0\0\0GET / HTTP/1.1\r\n\r\n"], Reader())
    with pytest.raises(PeerViolation, match="at most 4096"):
        frames_of([b"GET / HTTP/1.1\r\n\r\n"], Reader())


def test_hello() -> None:
    hello = Hello("words", "a front-end", 7, "life", "nonce", "192.0.2.7:80")
    (frame,) = frames_of([encode_hello(hello)], Reader())
    assert decode_hello(frame) == hello
    for fields in ({}, {"magic": "penstock-relay", "version": 99}, {"magic": "penstock-relay", "version": 1}):
        (frame,) = frames_of([encode_frame(Kind.HELLO, encode_json(fields))])
        with pytest.raises(PeerViolation):
            decode_hello(frame)
    (frame,) = frames_of([encode_frame(Kind.RESUMED)])
    with pytest.raises(PeerViolation, match="begins with RESUMED"):
        decode_hello(frame)


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"\xff"])
def test_json_that_is_none(body: bytes) -> None:
    (frame,) = frames_of([encode_frame(Kind.LOG, body)])
    with pytest.raises(PeerViolation):
        decode_json(frame)


# --- columns -----------------------------------------------------------------------------------------

payloads = st.lists(st.binary(max_size=60), min_size=1, max_size=30)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    messages = draw(payloads)
    count = len(messages)

    def column(values: st.SearchStrategy[int]) -> list[int] | None:
        return draw(st.none() | st.lists(values, min_size=count, max_size=count))

    return Batch.of(
        messages,
        ttl_seconds=column(st.integers(0, 10**12)),
        retries=column(st.integers(-1, 255)),
        protocol="rq",
    )


@given(st.lists(batches(), min_size=1, max_size=4))
def test_batches_join_on_the_wire(parts: list[Batch]) -> None:
    body = one(Kind.PUBLISH, *pack_batches(parts, "rq"))
    joined = unpack_batch(body)
    body.end()
    assert joined.messages() == [message for part in parts for message in part.messages()]
    assert joined.protocol == "rq"
    for name, absent in (("ttl_seconds", 0), ("retries", -1)):
        expected = [
            value
            for part in parts
            for value in (getattr(part, name) if getattr(part, name) is not None else [absent] * len(part))
        ]
        column = getattr(joined, name)
        if column is None:
            assert all(getattr(part, name) is None for part in parts)
        else:
            assert list(column) == expected


def test_reply_addresses_travel() -> None:
    batch = Batch.of([b"a", b"b"], reply=[b"1 2 3", b""], protocol="rq")
    assert unpack_batch(one(Kind.REPLIES, *pack_batches([batch], "rq"))) == batch


# Any: whatever can be indexed.
HOLDERS: dict[str, Callable[["array[int]"], Any]] = {"array": copy, "view": memoryview, "list": list}


@st.composite
def slices(draw: st.DrawFn) -> Slice:
    messages = draw(payloads)
    count = len(messages)
    lo = draw(st.integers(0, count - 1))
    hi = draw(st.integers(lo + 1, count))
    batch = Batch.of(messages)
    numbers = st.lists(st.integers(0, 255), min_size=count, max_size=count)
    has = st.booleans()
    return Slice(
        memoryview(batch.payload) if draw(has) else batch.payload,
        HOLDERS[draw(st.sampled_from(list(HOLDERS)))](batch.bounds),
        lo,
        hi,
        draw(st.integers(0, 2**50)),
        ORIGIN,
        draw(st.integers(0, 2**50)),
        array("q", draw(numbers)) if draw(has) else None,
        array("h", draw(numbers)) if draw(has) else None,
        array("i", draw(numbers)) if draw(has) else None,
        [b"%d" % number for number in draw(numbers)] if draw(has) else None,
        "phpmq",
    )


def test_a_payload_outlives_the_buffer_that_its_frame_stood_in() -> None:
    """A port writes large ones from where they are, and its peer may be slow to read."""
    block = Batch.of([b"mine"])
    sent = Slice(block.payload, block.bounds, 0, 1, 0, b"0" * 18, 0)
    buffer = bytearray(encode_frame(Kind.DELIVER, *pack_slices([sent])))
    (piece,) = [piece for frame in Reader().feed(buffer) for piece in unpack_slices(Body(frame))]
    buffer[:] = bytes(len(buffer))
    assert piece.payload == b"mine"


@given(st.lists(slices(), max_size=4))
def test_of_a_slice_only_its_window_travels(pieces: list[Slice]) -> None:
    buffers = pack_slices(pieces)
    body = one(Kind.DELIVER, *buffers)
    got = unpack_slices(body)
    body.end()
    assert len(got) == len(pieces)
    for piece, sent in zip(got, pieces, strict=True):
        assert (piece.lo, piece.hi) == (0, len(sent))
        assert piece.messages() == sent.messages()
        assert len(piece.payload) == sent.payload_bytes
        assert piece.offset_start == sent.offset_start
        assert (piece.origin, piece.time_us, piece.protocol) == (sent.origin, sent.time_us, sent.protocol)
        for name in ("expires_us", "retries", "attempts", "reply"):
            column = getattr(sent, name)
            expected = None if column is None else list(column[sent.lo : sent.hi])
            assert (None if getattr(piece, name) is None else list(getattr(piece, name))) == expected


@given(st.lists(st.tuples(st.integers(0, 2**60), st.integers(0, 2**60)), max_size=20))
def test_ranges(ranges: list[tuple[int, int]]) -> None:
    assert unpack_ranges(one(Kind.CLAIM, pack_ranges(ranges))) == ranges


def test_halves() -> None:
    batch = Batch.of([b"a", b"bb", b"", b"dddd", b"e"], ttl_seconds=range(5), retries=range(5), protocol="rq")
    first, second = Publish("q", batch, array("I", range(5))).halves()
    assert first.batch.messages() + second.batch.messages() == batch.messages()
    for half, rows in ((first, range(2)), (second, range(2, 5))):
        assert half.batch.bounds[0] == 0
        assert half.tickets is not None
        assert half.batch.ttl_seconds is not None
        assert half.batch.retries is not None
        assert list(half.tickets) == list(half.batch.ttl_seconds) == list(half.batch.retries) == list(rows)
        assert (half.queue, half.batch.protocol) == ("q", "rq")


# --- words -------------------------------------------------------------------------------------------

COMMANDS: list[Command] = [
    Publish("q", Batch.of([b"?"], protocol="rq"), array("I", [7]), wants_reply=True, timeout_seconds=9),
    Consume("größe", 65_535, dead=True, once=True, priority=255, exclusive=True),
    Consume("q", 0),
    Cancel("q", dead=True),
    Settle("q", Outcome.REQUEUE, ORIGIN, [(1, 5), (9, 10)], ttl_seconds=60, dead=True),
    Settle("q", Outcome.ACK, b"", []),
    Settle("q", Outcome.REJECT, ORIGIN, [(2**40, 2**40 + 1)]),
    Accepted("q", ORIGIN, [(3, 4)]),
    Reply("q", ORIGIN, array("q", [3, 1]), Batch.of([b"three", b"one"])),
    Broadcast("q", Batch.of([b"all"], protocol="rq")),
    Closing(),
]


@given(st.lists(st.sampled_from(COMMANDS), max_size=20), st.integers(NO_NUMBER, 2**60))
def test_words(commands: list[Command], number: int) -> None:
    assert unpack_words(one(Kind.WORDS, *pack_words(number, commands))) == (number, commands)


def test_a_shipment_has_one_batch_for_each_queue() -> None:
    items = [
        Item(Seat(None, number), Publish(queue, Batch.of([text], protocol="rq")))  # type: ignore[arg-type]
        for number, (queue, text) in enumerate([("a", b"1"), ("b", b"2"), ("a", b"3")])
    ]
    (frame,) = frames_of([pack_shipment(1, 3, Shipment(5, items))])
    epoch, number, parts = unpack_shipment(frame)
    assert (epoch, number, frame.flag) == (3, 5, 1)
    assert [(queue, batch.messages()) for queue, batch in parts] == [("a", [b"1", b"3"]), ("b", [b"2"])]


def test_what_came_with_a_ttl_and_what_came_without_are_batches_of_their_own_in_order() -> None:
    came = [("a", b"1", None), ("a", b"2", 0), ("b", b"3", 60), ("a", b"4", 60), ("a", b"5", None)]
    items = [
        Item(
            Seat(None, number),  # type: ignore[arg-type]
            Publish(queue, Batch.of([text], ttl_seconds=None if ttl is None else [ttl], protocol="phpmq")),
        )
        for number, (queue, text, ttl) in enumerate(came)
    ]
    (frame,) = frames_of([pack_shipment(0, 0, Shipment(0, items))])
    assert unpack_shipment(frame)[2] == [
        ("a", Batch.of([b"1"], protocol="phpmq")),
        ("a", Batch.of([b"2", b"4"], ttl_seconds=[0, 60], protocol="phpmq")),
        ("b", Batch.of([b"3"], ttl_seconds=[60], protocol="phpmq")),
        ("a", Batch.of([b"5"], protocol="phpmq")),
    ]


# --- whatever comes ------------------------------------------------------------------------------------

READERS = {
    Kind.WORDS: unpack_words,
    Kind.DELIVER: unpack_slices,
    Kind.REPLIES: unpack_batch,
    Kind.CLAIM: unpack_ranges,
}


def read_all(wire: bytes, cut: int) -> None:
    for frame in frames_of([wire[:cut], wire[cut:]], Reader(1 << 20)):
        if frame.kind is Kind.PUBLISH:
            unpack_shipment(frame)
        elif frame.kind in (Kind.LOG, Kind.ATTACH, Kind.REFUSED):
            decode_json(frame)
        elif frame.kind is Kind.HELLO:
            decode_hello(frame)
        elif frame.kind in READERS:
            READERS[frame.kind](Body(frame))


def samples() -> list[bytes]:
    batch = Batch.of([b"a", b"bb"], ttl_seconds=[1, 2], retries=[3, 4], protocol="rq")
    piece = Slice(
        batch.payload, batch.bounds, 0, 2, 9, ORIGIN, 1, None, batch.retries, None, [b"x", b"y"], "rq"
    )
    item = Item(Seat(None, 1), Publish("queue", batch))  # type: ignore[arg-type]
    return [
        encode_frame(Kind.WORDS, *pack_words(5, COMMANDS)),
        encode_frame(Kind.DELIVER, *pack_slices([piece, piece])),
        encode_frame(Kind.REPLIES, *pack_batches([batch, batch], "rq")),
        encode_frame(Kind.CLAIM, pack_ranges([(1, 2)])),
        encode_frame(Kind.LOG, encode_json({"text": "x", "count": 1})),
        pack_shipment(0, 1, Shipment(2, [item, item])),
        encode_hello(Hello("http", "", 1)),
    ]


def test_only_violations_leave_the_codec() -> None:
    chance = random.Random(20)
    wires = samples()
    for wire in wires:
        read_all(wire, len(wire) // 2)
    refused = 0
    for _ in range(20_000):
        broken = bytearray(chance.choice(wires))
        for _ in range(chance.choice((1, 1, 2, 8))):
            what = chance.random()
            at = chance.randrange(len(broken))
            if what < 0.7:
                broken[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
            elif what < 0.85 and len(broken) > 10:
                del broken[at : at + chance.randrange(1, 9)]
            else:
                broken[at:at] = chance.randbytes(chance.randrange(1, 9))
        try:
            read_all(bytes(broken), chance.randrange(len(broken)))
        except PeerViolation:
            refused += 1
    assert refused > 1000


def test_the_largest_message_that_a_front_end_takes_fits_a_frame() -> None:
    words = ["--engine", "nats://127.0.0.1:4222", "--limits-payload-bytes-max", "2147483647"]
    settings = _ours(load(parser().parse_args(words), {}))
    # In one chunk there may be others before it, with what a column has for each.
    assert settings.limits.payload_bytes_max + 64 * RECEIVE_BYTES < FRAME_BYTES_MAX
