"""Any bytes at SSPQ, guided by coverage.

    python tests/protocols/fuzz_sspq.py -max_total_time=60 [-seed=N] [CORPUS]

The first bytes of an input say how the rest is cut into chunks, how often its beginning is repeated, and
which byte is then spoiled, so that the fuzzer finds its way into groups of equal frames and to what may
be wrong with them. What is checked: the reader agrees with the plainest one, whole and in pieces, and
nothing but `PeerViolation` leaves a session. A search with a CORPUS begins with the vectors. The options
are libFuzzer's.
"""

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["penstock.protocols"]):
    from penstock.model.batch import Slice
    from penstock.protocols.errors import PeerViolation
    from penstock.protocols.sspq_session import ClientSession, ServerSession, State
    from tests.protocols.fuzzing import search
    from tests.protocols.test_sspq import cut, in_chunks, plainly
    from tests.protocols.vectors_sspq import FAULTS, ROWS

LIMIT_BYTES = 300


def check_stream(stream: bytes, cuts: bytes) -> None:
    chunks = cut(stream, [mark * len(stream) // 255 for mark in cuts])
    expected = plainly(stream, LIMIT_BYTES)
    assert in_chunks([stream], LIMIT_BYTES) == expected
    assert in_chunks(chunks, LIMIT_BYTES) == expected
    server, client = ServerSession("q", payload_bytes_max=LIMIT_BYTES), ClientSession()
    client.ask()
    try:
        for chunk in chunks:
            server.receive(chunk)
            if server.state in (State.WAITING, State.WAITING_DEAD):
                dead = server.state is State.WAITING_DEAD
                server.deliver("q", [Slice(b"m", [0, 1], 0, 1, 5, b"0" * 18, 0)], 0, dead=dead)
        assert expected[1] is None
    except PeerViolation:
        assert expected[1] is not None
    try:
        for chunk in chunks:
            client.receive(chunk)
            if client.state in (State.HOLDING, State.HOLDING_DEAD):
                client.confirm()
    except PeerViolation:
        client.salvage()


if __name__ == "__main__":
    search(check_stream, [row.data for row in ROWS] + [fault.data for fault in FAULTS])
