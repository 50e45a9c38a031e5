"""Large contents of PHPMQ are read as views of a chunk: against the careful way, however the stream is cut.

The buffer is overwritten after each chunk, as a server's is: nothing of it may be in an event.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.batch import Batch, Slice
from penstock.protocols import phpmq, phpmq_read, phpmq_runs, phpmq_write
from penstock.protocols.errors import PeerViolation
from penstock.protocols.phpmq import Dialect, MessageType, PacketType, Sent
from penstock.protocols.phpmq_read import Reader
from penstock.protocols.phpmq_write import Writer
from penstock.protocols.share import UNBOUNDED

LARGE = 20

sizes = st.lists(st.sampled_from((0, 3, LARGE - 1, LARGE, LARGE + 1, 70)), min_size=1, max_size=8)
dialects = st.builds(Dialect, st.sampled_from(phpmq.WIDTHS), st.booleans())
others = st.sampled_from((b"", b"", b"", b"window", b"verdict", b"ttl", b"damage"))


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phpmq_read, "LARGE_BYTES", LARGE)


def said(reader: Reader, chunks: list[memoryview]) -> list[object]:
    """What a stream says, message by message, and what the reader remembers of it."""
    told: list[object] = []
    try:
        for chunk in chunks:
            rest: bytes | memoryview = memoryview(bytearray(chunk))
            while len(rest):
                events = reader.feed(rest)
                if isinstance(rest, memoryview):
                    rest[:] = bytes(len(rest))
                told += (item for event in events for item in items(event))
                rest = reader.rest
    except PeerViolation as violation:
        return [*told, *(item for event in reader.salvage() for item in items(event)), str(violation)]
    return [*told, reader.dialect, reader.position, reader.held_bytes, reader.unfinished]


def items(event: phpmq.Event) -> list[object]:
    if not isinstance(event, Sent):
        return [event]
    ttls = event.batch.ttl_seconds or [None] * len(event.batch)
    return [(event.queue, *row) for row in zip(event.batch.messages(), ttls, strict=True)]


@settings(deadline=None)
@given(st.lists(st.tuples(sizes, dialects, others), min_size=1, max_size=4), st.data())
def test_it_says_what_the_careful_way_says(
    runs: list[tuple[list[int], Dialect, bytes]], data: st.DataObject
) -> None:
    stream = b""
    for number, (lengths, dialect, other) in enumerate(runs):
        writer = Writer(dialect)
        stream += writer.sends("q", Batch.of([bytes((65 + number + i,)) * n for i, n in enumerate(lengths)]))
        if other == b"window":
            stream += writer.consume("q", 5)
        elif other == b"verdict":
            stream += writer.settlements(MessageType.ACKNOWLEDGE, "q", [b"1" * 32])
        elif other == b"ttl":
            stream += writer.sends("q", Batch.of([b"t" * LARGE, b"u" * 50], ttl_seconds=[7, 0]))
        else:
            stream += other
    stream = stream[: data.draw(st.integers(max(len(stream) - 90, 0), len(stream)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    views = [memoryview(stream)[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    careful = Reader(phpmq.FROM_CLIENT)
    careful._quick = False
    expected = said(careful, views)
    assert said(Reader(phpmq.FROM_CLIENT), views) == expected
    share = data.draw(st.sampled_from((1, 2, 7, UNBOUNDED)))
    assert said(Reader(phpmq.FROM_CLIENT, share=share), views) == expected


def test_a_dialect_is_the_last_one_also_where_shapes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phpmq_runs, "_SHAPES_MAX", 1)
    narrow, wide = Dialect(32, line_breaks=False), Dialect(36, line_breaks=False)
    # In an order of its own, which is not learned.
    packets = (PacketType.QUEUE, b"q"), (PacketType.TTL, b"5"), (PacketType.CONTENT, b"odd")
    odd = wide.message_header(MessageType.MESSAGE, 3) + b"".join(wide.packet(*it) for it in packets)
    reader = Reader(phpmq.FROM_CLIENT)
    for message in (b"x" * LARGE, odd, b"x" * (LARGE + 1)):
        is_odd = message is odd
        chunk = odd if is_odd else Writer(narrow).sends("q", Batch.of([message]))
        reader.feed(memoryview(chunk))
        assert reader.dialect == (wide if is_odd else narrow)


@pytest.mark.parametrize(("taken", "views"), [(4, True), (2, True), (1, False)])
def test_a_small_part_of_a_block_does_not_keep_all_of_it(taken: int, views: bool) -> None:
    """What waits for a peer is counted by what it takes: it may pin no more than twice that."""
    size = phpmq_write.LARGE_BYTES
    block = bytes(4 * size)
    piece = Slice(block, [size * number for number in range(5)], 0, taken, 7, b"0" * 18, 0)
    parts = Writer(Dialect()).dispatch_parts("q", [piece], 0, phpmq_write.NEVER, False)
    pinned = [part for part in parts if isinstance(part, memoryview) and part.obj is block]
    assert len(pinned) == (taken if views else 0)
    assert b"".join(parts).count(bytes(size)) == taken
    # Whoever takes that part behind a whole block is written the other one from where it is.
    whole = Slice(b"w" * 4 * size, piece.bounds, 0, 4, 3, b"0" * 18, 0)
    both = Writer(Dialect()).dispatch_parts("q", [whole, piece], 0, phpmq_write.NEVER, False)
    assert sum(isinstance(part, memoryview) and part.obj is whole.payload for part in both) == 4
    assert sum(isinstance(part, memoryview) and part.obj is block for part in both) == len(pinned)
    alone = Writer(Dialect()).dispatch_parts("q", [whole], 0, phpmq_write.NEVER, False)
    assert b"".join(both) == b"".join(alone + parts)
