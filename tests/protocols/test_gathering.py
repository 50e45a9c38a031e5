"""What comes in pieces is whole in the end, however it was cut, and however large it is."""

import random
from typing import Any

import pytest

from penstock.protocols import phpmq, rq, sspq
from penstock.protocols.gathering import MUCH_BYTES, Gathering
from penstock.protocols.phpmq_read import Reader
from penstock.protocols.rq_decoder import Decoder
from tests.server.harness import SEND
from tests.server.harness import phpmq as phpmq_frame
from tests.server.harness import rq as rq_frame
from tests.server.harness import sspq as sspq_frame


@pytest.mark.parametrize("size", [0, 1, MUCH_BYTES - 1, MUCH_BYTES, MUCH_BYTES + 1, 5 * MUCH_BYTES // 2])
def test_pieces(size: int) -> None:
    data = random.Random(size).randbytes(size)
    cut = random.Random(7)
    gathering = Gathering(size, data[:3])
    at = min(3, size)
    while at < size:
        assert gathering.tell() == at
        stop = min(at + cut.choice([1, 1000, 300_000, MUCH_BYTES, 2 * MUCH_BYTES]), size)
        gathering.write(memoryview(data)[at:stop])
        at = stop
    assert gathering.getvalue() == data


@pytest.mark.parametrize("wire", ["phpmq", "rq", "sspq"])
def test_a_large_payload_in_chunks(wire: str) -> None:
    payload = random.Random(1).randbytes(2 * MUCH_BYTES + 12345)
    readers: dict[str, tuple[Any, bytes]] = {
        "phpmq": (Reader(phpmq.FROM_CLIENT), phpmq_frame(1, (1, b"q"), (2, payload))),
        "rq": (Decoder(rq.Limits()), rq_frame(1, (128, 7), (160, b"q"), (224, payload), 10)),
        "sspq": (sspq.FrameReader(), sspq_frame(SEND, payload)),
    }
    reader, frame = readers[wire]
    events = []
    for at in range(0, len(frame), 256 * 1024):
        events += reader.feed(frame[at : at + 256 * 1024])
    (event,) = events
    assert bytes(event.batch.payload) == payload
