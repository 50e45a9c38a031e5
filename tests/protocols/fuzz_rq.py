"""Any bytes at RQ, guided by coverage.

    python tests/protocols/fuzz_rq.py -max_total_time=60 [-seed=N] [CORPUS]

The first bytes say how the rest is cut into chunks. What is checked: nothing but `PeerViolation`
leaves a session; the decoder agrees with the plain reference, whole and in pieces; and a session's
counts stay right. The options are libFuzzer's.
"""

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[2]))

with atheris.instrument_imports(include=["penstock.protocols"]):
    from penstock.model.batch import Batch, Slice
    from penstock.protocols import rq
    from penstock.protocols.errors import PeerViolation
    from penstock.protocols.rq import Limits
    from penstock.protocols.rq_controller import ControllerSession
    from penstock.protocols.rq_decoder import Decoder
    from penstock.protocols.rq_node import NodeSession
    from tests.protocols.rq_reference import Item, cut, items_of, reference, settled
    from tests.protocols.vectors_rq import VECTORS

LIMITS = Limits(payload_bytes_max=64, queue_name_bytes_max=16)
CUTS = 4
DELIVERIES = 8
BLOCK = Batch.of([b"%d" % i for i in range(DELIVERIES)])
REPLY = [b"r", b""] * (DELIVERIES // 2)


def controller() -> ControllerSession:
    """A session in the middle of its work."""
    session = ControllerSession(0, limits=LIMITS)
    session.receive(rq.encode_consume("Q1", 0, 20, False), 0)
    session.consuming("Q1")
    session.deliver("Q1", [Slice(BLOCK.payload, BLOCK.bounds, 0, DELIVERIES, 0, b"0" * 18, 0, reply=REPLY)])
    return session


def node() -> NodeSession:
    session = NodeSession(0, limits=LIMITS)
    session.consume("Q1")
    session.request("Q1", BLOCK)
    session.send("Q1", BLOCK)
    return session


def check(data: bytes) -> None:
    """One input. Whatever it raises is a finding."""
    stream = data[CUTS:]
    chunks = cut(stream, list(data[:CUTS]))
    expected, broken = reference(stream, LIMITS)
    for pieces in ([stream], chunks):
        decoder = Decoder(LIMITS)
        items: list[Item] = []
        violated = False
        try:
            for piece in pieces:
                items += items_of(decoder.feed(piece))
        except PeerViolation:
            violated = True
            items += items_of(decoder.salvage())
        assert settled(items) == settled(expected), "the decoder and the reference do not agree"
        assert violated == broken, "a length over the limit was missed, or one within it refused"
    for session in (controller(), node()):
        try:
            for chunk in chunks:
                session.receive(chunk, 1)
        except PeerViolation:
            session.salvage()
        if isinstance(session, ControllerSession):
            assert 0 <= session.deliveries <= DELIVERIES, "a delivery was lost or doubled"
        else:
            assert 0 <= session.requests <= 2 * DELIVERIES, "a request was lost or doubled"
        session.take_output()


def seeds(corpus: Path) -> None:
    """The vectors as a beginning, twice each, so that the fast paths are found at once."""
    for number, vector in enumerate(VECTORS):
        (corpus / f"vector-{number:02}").write_bytes(bytes(CUTS) + vector.wire * 2)


def main() -> None:
    corpora = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    if corpora:
        seeds(corpora[0])
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
