"""Any bytes at PHPMQ, guided by coverage.

    python tests/protocols/fuzz_phpmq.py -max_total_time=60 [-seed=N] [CORPUS]

The first bytes of an input say how the rest is cut into chunks, how often its beginning is repeated, and
which byte is then spoiled, so that the fuzzer finds its way into groups of equal messages and to what may
be wrong with them. What is checked: the quick way through the stream agrees with the careful one, whole
and in pieces, and nothing but `PeerViolation` leaves a session. A search with a CORPUS begins with the
vectors. The options are libFuzzer's.
"""

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["penstock.protocols"]):
    from penstock.model.batch import Slice
    from penstock.model.words import Consume
    from penstock.protocols.errors import PeerViolation
    from penstock.protocols.phpmq import Limits
    from penstock.protocols.phpmq_session import ClientSession, ServerSession, Window
    from tests.protocols.fuzzing import search
    from tests.protocols.test_phpmq import carefully, cut, in_chunks
    from tests.protocols.vectors_phpmq import FAULTS, ROWS

CAREFUL_BYTES_MAX = 4000  # byte by byte is slow
LIMITS = Limits(payload_bytes_max=300, windows_max=3)
BLOCK = Slice(b"m", [0, 1], 0, 1, 5, b"0" * 18, 0, expires_us=[7])


def check_stream(stream: bytes, cuts: bytes) -> None:
    chunks = cut(stream, [mark * len(stream) // 255 for mark in cuts])
    expected = in_chunks([stream], LIMITS)
    assert in_chunks(chunks, LIMITS) == expected
    if len(stream) <= CAREFUL_BYTES_MAX:
        assert carefully(stream, LIMITS) == expected
    server = ServerSession(limits=LIMITS)
    try:
        for chunk in chunks:
            for command in server.receive(chunk):
                if (
                    isinstance(command, Consume)
                    and server.window(command.queue, dead=command.dead) is Window.OPEN
                ):
                    server.deliver(command.queue, [BLOCK], 0, dead=command.dead)
    except PeerViolation:
        server.salvage()
    client = ClientSession(limits=LIMITS)
    client.consume("Foo", 5)
    try:
        for chunk in chunks:
            for event in client.receive(chunk):
                client.ack(event.queue, [id_ for id_ in event.ids if id_])
    except PeerViolation:
        client.salvage()


if __name__ == "__main__":
    search(check_stream, [row.data for row in ROWS] + [fault.data for fault in FAULTS])
