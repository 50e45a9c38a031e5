"""Any bytes at the NATS reader and at what reads messages for JetStream, guided by coverage.

    python tests/protocols/fuzz_nats.py -max_total_time=60 [-seed=N] [CORPUS]

The first bytes of an input say how the rest is cut into chunks, how often its beginning is repeated, and
which byte is then spoiled. What is checked: the reader agrees with the plainest one, whole and in pieces,
and nothing but `PeerViolation` leaves those who read the messages further. A search with a CORPUS begins
with the vectors. The options are libFuzzer's.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["penstock.protocols"]):
    from penstock.protocols import nats_jetstream
    from penstock.protocols.errors import PeerViolation
    from penstock.protocols.nats import Messages, Reader
    from penstock.protocols.nats_headers import read_headers
    from tests.protocols.fuzzing import search
    from tests.protocols.test_nats import agrees, cut
    from tests.protocols.vectors_nats import FAULTS, ROWS

LIMIT_BYTES = 300


def check_stream(stream: bytes, cuts: bytes) -> None:
    agrees(stream, cut(stream, [mark * len(stream) // 255 for mark in cuts]), LIMIT_BYTES)
    reader = Reader()
    try:
        events = reader.feed(stream)
    except PeerViolation:
        events = reader.salvage()
    for event in events:
        if isinstance(event, Messages):
            check_messages(event)


def check_messages(batch: Messages) -> None:
    """What is said inside of messages is the peers' choice as well."""
    numbers = range(len(batch))
    reads: list[Callable[[], object]] = [
        lambda: nats_jetstream.read_deliveries(batch.replies),
        lambda: nats_jetstream.read_publish_answers(numbers, batch.payloads),
        lambda: nats_jetstream.read_numbers(batch.subjects, 2),
        lambda: nats_jetstream.read_direct_seqs(batch.headers),
        lambda: nats_jetstream.read_direct_times_us(batch.headers),
        lambda: [nats_jetstream.read_flow_answer(payload) for payload in batch.payloads],
        lambda: [read_headers(block) for block in batch.headers],
    ]
    for read in reads:
        try:
            read()
        except PeerViolation:
            continue


if __name__ == "__main__":
    search(check_stream, [row.data for row in ROWS] + [fault.data for fault in FAULTS])
