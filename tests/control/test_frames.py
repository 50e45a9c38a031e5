"""Frames of the private link: what goes in comes out, however the socket cuts it."""

import json
import random
import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.control.batches import pack_batch, pack_batches, unpack_batch
from penstock.control.frames import Fields, FrameDecoder, FrameError, encode_frame
from penstock.model.batch import RETRIES_NONE, Batch

FRAMES: list[tuple[Fields, list[bytes]]] = [
    ({"n": 1, "call": "queues"}, []),
    ({"n": 2, "text": "ü €"}, [b"abc", b"", b"defg"]),
    ({"n": 0, "hello": {"a": [1, 2]}}, [bytes(100_000)]),
    ({}, [b"x"]),
]


def encoded(frames: list[tuple[Fields, list[bytes]]]) -> bytes:
    return b"".join(bytes(part) for fields, buffers in frames for part in encode_frame(fields, *buffers))


def decoded(chunks: list[bytes]) -> list[tuple[Fields, bytes]]:
    decoder = FrameDecoder()
    return [(frame.fields, bytes(frame.body)) for chunk in chunks for frame in decoder.receive(chunk)]


WANTED = [(fields, b"".join(buffers)) for fields, buffers in FRAMES]


def test_whole() -> None:
    assert decoded([encoded(FRAMES)]) == WANTED


def test_byte_by_byte() -> None:
    data = encoded(FRAMES[:2] + FRAMES[3:])
    assert decoded([bytes([byte]) for byte in data]) == WANTED[:2] + WANTED[3:]


@given(st.randoms(use_true_random=False))
def test_cut_anywhere(dice: random.Random) -> None:
    data = encoded(FRAMES)
    cuts = sorted(dice.sample(range(len(data)), 7))
    chunks = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert decoded(chunks) == WANTED


def test_an_unfinished_frame_waits() -> None:
    data = encoded(FRAMES[:1])
    decoder = FrameDecoder()
    assert decoder.receive(data[:-1]) == []
    assert [frame.fields for frame in decoder.receive(data[-1:])] == [FRAMES[0][0]]


def test_bodies_outlive_the_next_chunk() -> None:
    decoder = FrameDecoder()
    (first,) = decoder.receive(encoded([({"n": 1}, [b"first"])]))
    decoder.receive(encoded([({"n": 2}, [b"other"])]))
    assert bytes(first.body) == b"first"


@pytest.mark.parametrize(
    "header", [b"{", b"[]", b"7", b"\xff", json.dumps("text").encode()], ids=lambda header: repr(header)
)
def test_an_object_that_is_none_is_a_fault(header: bytes) -> None:
    with pytest.raises(FrameError):
        FrameDecoder().receive(struct.pack("<II", len(header), 0) + header)


def test_absurd_lengths_are_a_fault() -> None:
    with pytest.raises(FrameError, match="none of ours"):
        FrameDecoder().receive(struct.pack("<II", 0xFFFFFFFF, 0))


# --- batches -------------------------------------------------------------------------------

BATCHES = [
    Batch.of([b"one", b"", b"three"], protocol="http"),
    Batch.of([b"x"], ttl_seconds=[60], protocol="http"),
    Batch.of([b"y", b"z"], retries=[RETRIES_NONE, 255], protocol="spark"),
    Batch.of([b"a", b"b"], ttl_seconds=[0, 7], retries=[3, 0], protocol="http"),
]


@pytest.mark.parametrize("batch", BATCHES)
def test_a_batch_comes_back_as_it_was(batch: Batch) -> None:
    fields, buffers = pack_batch(batch)
    body = memoryview(b"".join(buffers))
    assert unpack_batch(json.loads(json.dumps(fields)), body, 0) == (batch, len(body))


def test_several_batches_stand_one_behind_the_other() -> None:
    all_fields, buffers = pack_batches(BATCHES)
    body, at = memoryview(b"".join(buffers)), 0
    for fields, batch in zip(all_fields, BATCHES, strict=True):
        unpacked, at = unpack_batch(fields, body, at)
        assert unpacked == batch
    assert at == len(body)


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_batch_that_is_cut_off_is_a_fault(cut: int) -> None:
    fields, buffers = pack_batch(BATCHES[3])
    body = b"".join(buffers)
    with pytest.raises(FrameError):
        unpack_batch(fields, memoryview(body)[: len(body) - cut], 0)


def test_bounds_that_lie_are_a_fault() -> None:
    fields, _ = pack_batch(BATCHES[0])
    body = array("i", [0, 3, 3, 9]).tobytes() + b"onethree"
    with pytest.raises(FrameError, match="agree"):
        unpack_batch(fields, memoryview(body), 0)
