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
    from tests.protocols.test_nats import agrees, cut
    from tests.protocols.vectors_nats import FAULTS, ROWS

CUTS = 4
PREFIX_BYTES = CUTS + 5
REPEATS_MAX = 48
LIMIT_BYTES = 300


def check(data: bytes) -> None:
    """One input. Whatever it raises is a finding."""
    if len(data) < PREFIX_BYTES:
        return
    repeats, size, flip = data[CUTS] % REPEATS_MAX + 1, data[CUTS + 1], data[CUTS + 4]
    body = data[PREFIX_BYTES:]
    stream = bytearray(body[:size] * repeats + body[size:])
    if stream:
        stream[int.from_bytes(data[CUTS + 2 : CUTS + 4]) % len(stream)] ^= flip
    check_stream(bytes(stream), data[:CUTS])


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


def seeds(corpus: Path) -> None:
    """The vectors as a beginning: once, many times over, and many times over with something spoiled."""
    for number, data in enumerate([row.data for row in ROWS] + [fault.data for fault in FAULTS]):
        size = min(len(data), 255)
        for variant, (repeats, where, flip) in enumerate([(0, 0, 0), (39, 0, 0), (39, 999, 1)]):
            prefix = bytes((*[0] * CUTS, repeats, size, *where.to_bytes(2), flip))
            (corpus / f"vector-{number:02}-{variant}").write_bytes(prefix + data)


def main() -> None:
    corpora = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    if corpora:
        seeds(corpora[0])
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
