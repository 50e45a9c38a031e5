"""The one property of the wires: however a stream is fed and whichever path reads it, it says the same.

For each seed there is a stream (`streams.py`). It is fed whole, as a view, in random chunks and byte by byte,
to readers with all fast paths, with none, and with each taken away, at once and in shares of a few words; to
the sessions of both sides; and what encoders write is compared with what is put together packet by packet.
Nothing but `PeerViolation` may leave a parser. `test_ways.py` does some seeds and knows what they say, in
both builds; `fuzz_ways.py` searches on.
"""

import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from types import ModuleType
from typing import Any

from penstock.model import words
from penstock.model.batch import NO_TTL, RETRIES_NONE, Batch, Slice
from penstock.protocols import phpmq, phpmq_read, phpmq_write, rq, rq_controller, rq_decoder, rq_node, sspq
from penstock.protocols.errors import PeerViolation
from penstock.protocols.phpmq import Dialect, MessageType, PacketType
from penstock.protocols.phpmq_session import IGNORED_TWICE
from penstock.protocols.phpmq_session import ClientSession as PhpmqClient
from penstock.protocols.phpmq_session import ServerSession as PhpmqServer
from penstock.protocols.phpmq_write import TtlPacket, Writer
from penstock.protocols.risp import encode
from penstock.protocols.rq import Command
from penstock.protocols.rq_controller import ControllerSession
from penstock.protocols.share import UNBOUNDED
from penstock.protocols.sspq_session import ClientSession as SspqClient
from penstock.protocols.sspq_session import Declined, Delivery, Synced
from penstock.protocols.sspq_session import ServerSession as SspqServer
from tests.protocols.rq_reference import items_of, reference, settled
from tests.protocols.streams import ORIGIN, PAYLOAD_BYTES_MAX, STREAMS, feedings

Said = Any
"""What was said, in plain tuples, without how it was grouped: equal where the same was said."""

Chunks = Sequence[bytes | memoryview]

BYTE_BY_BYTE_MAX = 800
RQ_LIMITS = rq.Limits(payload_bytes_max=PAYLOAD_BYTES_MAX, queue_name_bytes_max=200)
PHPMQ_LIMITS = phpmq.Limits(payload_bytes_max=PAYLOAD_BYTES_MAX, queue_name_bytes_max=200, windows_max=4)


@contextmanager
def _set(module: ModuleType, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _paths(wire: str) -> list[tuple[ModuleType, str, object]]:
    """All fast paths, none, and each taken away."""
    if wire == "phpmq":
        paths = [("QUICK", True), ("QUICK", False), ("LARGE_BYTES", 1), ("LARGE_BYTES", 40)]
        return [(phpmq_read, name, value) for name, value in paths]
    if wire == "sspq":
        return [(sspq, "FAST_PATHS", fast) for fast in (True, False)]
    every = rq_decoder.FAST_PATHS
    some = [every, frozenset(), *(every - {path} for path in sorted(every))]
    return [(rq_controller, "IN_ORDER", False), *((rq_decoder, "FAST_PATHS", paths) for paths in some)]


def _fed(session: Any, receive: Callable[[Any], Iterable[Any]], chunks: Chunks) -> Any:
    """All that a stream says, and the violation that ends it."""
    said: list[Any] = []
    for chunk in chunks:
        rest = chunk
        while True:
            try:
                said += receive(rest)
            except PeerViolation as violation:
                said += session.salvage()
                return said, violation
            before, rest = rest, getattr(getattr(session, "reader", session), "rest", b"")
            if not len(rest):
                break
            assert len(rest) < len(before), "nothing was read"
    return said, None


# --- readers -----------------------------------------------------------------------------------------


def _read_rq(chunks: Chunks, share: int) -> Said:
    decoder = rq_decoder.Decoder(RQ_LIMITS, share)
    events, violation = _fed(decoder, decoder.feed, chunks)
    return settled(items_of(events)), violation and violation.position


def _read_phpmq(chunks: Chunks, share: int) -> Said:
    reader = phpmq_read.Reader(frozenset(MessageType), PHPMQ_LIMITS, share)
    events, violation = _fed(reader, reader.feed, chunks)
    return [item for event in events for item in _phpmq_items(event)], violation and str(violation)


def _phpmq_items(event: phpmq.Event) -> Iterator[Said]:
    if isinstance(event, phpmq.ConsumeRequested):
        dialect = event.dialect
        width = dialect.packet_header_bytes
        yield "consume", event.queue, event.count, width, dialect.line_breaks, event.position
    elif isinstance(event, phpmq.Settled):
        for id_ in event.ids:
            yield "settled", int(event.type_), event.queue, id_, event.ttl_seconds
    else:
        batch, count = event.batch, len(event.batch)
        none = [None if isinstance(event, phpmq.Sent) else 0] * count
        ttls = none if batch.ttl_seconds is None else list(batch.ttl_seconds)
        ids = event.ids if isinstance(event, phpmq.Dispatched) else [b""] * count
        for content, id_, ttl in zip(batch.messages(), ids, ttls, strict=True):
            yield type(event).__name__, event.queue, content, id_, ttl


def _read_sspq(chunks: Chunks, share: int) -> Said:
    reader = sspq.FrameReader(payload_bytes_max=PAYLOAD_BYTES_MAX, share=share)
    events, violation = _fed(reader, reader.feed, chunks)
    said: list[Said] = []
    for event in events:
        if isinstance(event, sspq.Messages):
            said += zip(event.batch.messages(), event.batch.retries or (), strict=True)
        elif isinstance(event, sspq.Control):
            said += [int(type_) for type_ in event.types] * event.count
        else:
            said += [("unknown", event.type_byte)] * event.count
    return said, violation and str(violation)


# --- sessions ----------------------------------------------------------------------------------------


def _words(commands: Iterable[Any]) -> tuple[list[Said], list[Said], dict[str, int]]:
    """Settlements by origin (the order of acknowledgements says nothing); the others; what was ignored."""
    acks: set[Said] = set()
    verdicts: list[Said] = []
    others: list[Said] = []
    ignored: Counter[str] = Counter()
    for command in commands:
        if isinstance(command, words.Ignored):
            ignored[command.reason] += command.count
        elif isinstance(command, words.Publish | words.Broadcast):
            batch, count = command.batch, len(command.batch)
            columns = (
                batch.messages(),
                batch.retries or [RETRIES_NONE] * count,
                batch.ttl_seconds or [None] * count,
            )
            tickets = getattr(command, "tickets", None) or [None] * count
            asked = (getattr(command, "wants_reply", None), getattr(command, "timeout_seconds", None))
            name = type(command).__name__
            others += [(name, command.queue, *row, *asked) for row in zip(*columns, tickets, strict=True)]
        elif isinstance(command, words.Settle | words.Accepted):
            outcome = command.outcome.name if isinstance(command, words.Settle) else "ACCEPTED"
            extra = (command.ttl_seconds, command.dead) if isinstance(command, words.Settle) else ()
            rows = [
                (outcome, command.queue, command.origin, offset, *extra)
                for first, end in command.ranges
                for offset in range(first, end)
            ]
            if outcome in ("ACK", "ACCEPTED"):
                acks.update(rows)
            else:
                verdicts += rows
        elif isinstance(command, words.Reply):
            answers = zip(command.offsets, command.answers.messages(), strict=True)
            others += [("reply", command.queue, command.origin, *answer) for answer in answers]
        elif isinstance(command, words.Consume):
            how = (command.credit, command.dead, command.priority, command.exclusive, command.once)
            others.append(("consume", command.queue, *how))
        else:
            others.append(
                (type(command).__name__, getattr(command, "queue", ""), getattr(command, "dead", False))
            )
    verdicts.sort(key=lambda row: row[:3])
    return sorted(acks) + verdicts, others, dict(sorted(ignored.items()))


_BLOCK = Batch.of([b"%d" % i for i in range(8)])


def _stored(reply: bool) -> list[Slice]:
    addresses = [b"r" if reply and i % 2 else b"" for i in range(8)]
    return [Slice(_BLOCK.payload, _BLOCK.bounds, 0, 8, 0, ORIGIN, 0, reply=addresses)]


def _notices() -> list[Slice]:
    """Of two origins, with a gap, and one that comes a second time."""
    rows = ((0, 8, ORIGIN), (10, 11, ORIGIN), (5, 6, ORIGIN), (0, 3, ORIGIN[::-1]), (11, 14, ORIGIN))
    block = Batch.of([b"%d" % i for i in range(14)])
    return [Slice(block.payload, block.bounds, lo, hi, 90, origin, 0) for lo, hi, origin in rows]


def _by_queue(said: list[Said]) -> list[Said]:
    """RQ tells the queues of a chunk one after the other: each keeps its own order."""
    return sorted(said, key=lambda item: (str(item[0]), str(item[1])))


def _serve_rq(chunks: Chunks, share: int) -> Said:
    session = ControllerSession(0, limits=RQ_LIMITS, share=share)
    _fed(session, lambda chunk: session.receive(chunk, 0), [rq.encode_consume("Q1", 0, 20, False)])
    session.consuming("Q1")
    session.deliver("Q1", _stored(reply=True))
    session.deliver("Q1", _notices())
    commands, violation = _fed(session, lambda chunk: session.receive(chunk, 1), chunks)
    acks, others, ignored = _words(commands)
    output = sorted(reference(session.take_output())[0], key=repr)
    return acks, _by_queue(others), ignored, output, session.deliveries, violation and violation.position


def _serve_phpmq(chunks: Chunks, share: int) -> Said:
    session = PhpmqServer(limits=PHPMQ_LIMITS, share=share)
    written = b""

    commands, violation = _fed(session, session.receive, chunks)
    acks, others, ignored = _words(commands)
    ignored.pop(IGNORED_TWICE, None)
    for queue in ("q", "Foo"):
        if session.window(queue).value == "open":
            written += session.deliver(queue, _stored(reply=False), 0)
    return acks, others, ignored, written, violation and str(violation)


def _serve_sspq(chunks: Chunks, share: int) -> Said:
    session = SspqServer("q", payload_bytes_max=PAYLOAD_BYTES_MAX, share=share)
    commands, violation = _fed(session, session.receive, chunks)
    return *_words(commands), session.state.value, violation and str(violation)


def _node_rq(chunks: Chunks, share: int) -> Said:
    session = rq_node.NodeSession(0, limits=RQ_LIMITS)
    session.consume("Q1")
    session.consume("q")
    session.request("Q1", _BLOCK)
    session.send("Q1", _BLOCK)
    events, violation = _fed(session, lambda chunk: session.receive(chunk, 1), chunks)
    if violation is not None:
        return "violation"  # which of two deliveries with one id came first is a matter of grouping
    said: list[Said] = []
    ignored: Counter[str] = Counter()
    for event in events:
        name = type(event).__name__
        if isinstance(event, words.Ignored):
            ignored[event.reason] += event.count
            continue
        queue = getattr(event, "queue", "")
        batch = getattr(event, "batch", None)
        ids = list(getattr(event, "ids", ())) or [None] * (len(batch) if batch is not None else 1)
        messages = batch.messages() if batch is not None else [None] * len(ids)
        said += [(name, queue, *row) for row in zip(ids, messages, strict=True)]
    output = sorted(reference(session.take_output())[0], key=repr)
    return sorted(said, key=repr), dict(sorted(ignored.items())), output, session.requests, session.held


def _client_phpmq(chunks: Chunks, share: int) -> Said:
    session = PhpmqClient(limits=PHPMQ_LIMITS)
    session.consume("q", 5)
    session.consume("Foo", 5)
    events, violation = _fed(session, session.receive, chunks)
    # A dispatch that nobody asked for is placed at its chunk's end.
    return [item for event in events for item in _phpmq_items(event)], violation is None


def _client_sspq(chunks: Chunks, share: int) -> Said:
    session = SspqClient(payload_bytes_max=PAYLOAD_BYTES_MAX)
    session.ask()
    answers, violation = _fed(session, session.receive, chunks)
    said: list[Said] = []
    for answer in answers:
        if isinstance(answer, Delivery):
            said.append((answer.payload, answer.retries, answer.dead))
        elif isinstance(answer, Declined):
            said.append(("declined", answer.dead))
        elif isinstance(answer, Synced):
            said.append(("synced", answer.refused))
        else:
            said += [(answer.reason, answer.detail)] * answer.count
    return said, session.state.value, violation is None


READERS: dict[str, dict[str, Callable[[Chunks, int], Said]]] = {
    "rq": {"reader": _read_rq, "server": _serve_rq, "client": _node_rq},
    "phpmq": {"reader": _read_phpmq, "server": _serve_phpmq, "client": _client_phpmq},
    "sspq": {"reader": _read_sspq, "server": _serve_sspq, "client": _client_sspq},
}


# --- encoders ----------------------------------------------------------------------------------------


def _batch(random: Random) -> Batch:
    size = random.choice((0, 1, 5, 300, 5000))
    count = random.choice((0, 1, 2, 40, 70))
    same = random.random() < 0.5
    messages = [random.randbytes(size if same else random.randrange(size + 1)) for _ in range(count)]
    retries = random.choice((None, [3] * count, [random.choice((-1, 0, 7, 255)) for _ in range(count)]))
    return Batch.of(messages, retries=retries)


def _slice(random: Random, batch: Batch) -> Slice:
    """The same messages as they come out of a log: within a block, in whatever holds them."""
    count = len(batch)
    lo = random.choice((0, 0, 1, 3))
    before = [random.randbytes(random.randrange(9)) for _ in range(lo)]
    block = Batch.of([*before, *batch.messages(), b"behind"])
    payload = block.payload if random.random() < 0.5 else memoryview(block.payload)
    bounds: Sequence[int] = random.choice((block.bounds, list(block.bounds), memoryview(block.bounds)))
    offset = random.choice((0, 5, (1 << 32) - lo - 2, 1 << 40))
    expires = random.choice((None, [0, 7_000_000, 1, NO_TTL, 90_000_000_000]))
    column = [random.choice(expires) for _ in range(lo + count + 1)] if expires else None
    retries = None if batch.retries is None else [0] * lo + list(batch.retries) + [0]
    return Slice(payload, bounds, lo, lo + count, offset, ORIGIN, 0, expires_us=column, retries=retries)


def _empty(payload: bytes) -> tuple[bytes, bytes]:
    """How RQ says a payload: one CLEAR and it, or two and a NOP byte."""
    clear = encode(Command.CLEAR)
    return (
        (clear, encode(Command.PAYLOAD, payload)) if payload else (clear * 2, encode(Command.PAYLOAD, b"\0"))
    )


def _written_rq(random: Random) -> Iterator[tuple[bytes, bytes]]:
    batch = _batch(random)
    ids = [random.choice((0, 7, 32767, 0xFFFFFFFF)) for _ in range(len(batch))]
    noreply = random.random() < 0.5
    timeout = random.choice((0, 30))
    queue = encode(Command.QUEUE, b"Q1")
    flag = encode(Command.NOREPLY) if noreply else b""
    requests, deliveries, replies, own, broadcasts = [], [], [], [], []
    for i, payload in enumerate(batch.messages()):
        clear, said = _empty(payload)
        ident = encode(Command.ID, ids[i])
        left = RETRIES_NONE if batch.retries is None else batch.retries[i]
        retries = encode(Command.RETRIES, left) if left != RETRIES_NONE else b""
        limit = encode(Command.TIMEOUT, timeout) if timeout else b""
        requests += [clear, ident, queue, retries, limit, said, flag, encode(Command.REQUEST)]
        deliveries += [clear, queue, said, flag, ident, encode(Command.REQUEST)]
        replies += [clear, ident, said, encode(Command.REPLY)]
        own += [encode(Command.CLEAR), ident, said if payload else b"", encode(Command.REPLY)]
        broadcasts += [clear, queue, said, encode(Command.BROADCAST)]
    piece = _slice(random, batch)
    bounds = piece.bounds[piece.lo : piece.hi + 1]
    written = rq.encode_deliveries("Q1", ids, piece.payload, bounds, noreply=noreply)
    yield rq.encode_requests("Q1", ids, batch, noreply=noreply, timeout_seconds=timeout), b"".join(requests)
    yield written, b"".join(deliveries)
    yield rq.encode_replies(ids, batch), b"".join(replies)
    yield rq.encode_node_replies(ids, batch), b"".join(own)
    yield rq.encode_broadcasts("Q1", batch), b"".join(broadcasts)
    for action, frames in (
        (Command.DELIVERED, rq.encode_delivered),
        (Command.UNDELIVERED, rq.encode_undelivered),
    ):
        plain = b"".join(encode(Command.CLEAR) + encode(Command.ID, ident) + encode(action) for ident in ids)
        yield frames(ids), plain


def _phpmq_plain(dialect: Dialect, type_: MessageType, packets: list[tuple[PacketType, bytes]]) -> bytes:
    return dialect.message_header(type_, len(packets)) + b"".join(
        dialect.packet(*packet) for packet in packets
    )


def _written_phpmq(random: Random) -> Iterator[tuple[bytes, bytes]]:
    dialect = Dialect(random.choice(phpmq.WIDTHS), random.random() < 0.5)
    writer = Writer(dialect)
    batch = _batch(random)
    queue = (PacketType.QUEUE, b"orders")
    ttls = [random.choice((0, 5, 3600)) for _ in range(len(batch))] if random.random() < 0.5 else None
    batch.ttl_seconds = array("q", ttls) if ttls is not None else None
    plain = [
        [queue, (PacketType.CONTENT, content), *([(PacketType.TTL, b"%d" % ttl)] if ttl else [])]
        for content, ttl in zip(batch.messages(), ttls or [0] * len(batch), strict=True)
    ]
    sends = b"".join(_phpmq_plain(dialect, MessageType.MESSAGE, packets) for packets in plain)
    yield writer.sends("orders", batch), sends
    now_us, dead = 1_000_000, random.random() < 0.3
    setting = random.choice(tuple(TtlPacket))
    pieces = [_slice(random, _batch(random)) for _ in range(random.choice((1, 1, 2)))]
    out = []
    for piece in pieces:
        for i in range(piece.lo, piece.hi):
            content = bytes(piece.payload[piece.bounds[i] : piece.bounds[i + 1]])
            packets = [queue, (PacketType.CONTENT, content)]
            packets.append((PacketType.ID, ORIGIN + b"%014x" % (piece.first_offset + i)))
            expires = NO_TTL if piece.expires_us is None else piece.expires_us[i]
            left = max(-(-(expires - now_us) // 1_000_000), 1) if expires > 0 and not dead else 0
            if setting is TtlPacket.ALWAYS or (setting is TtlPacket.AUTO and expires != NO_TTL):
                packets.append((PacketType.TTL, b"%d" % left))
            out.append(_phpmq_plain(dialect, MessageType.DISPATCH, packets))
    yield writer.dispatches("orders", pieces, now_us, setting, dead), b"".join(out)
    with _set(phpmq_write, "LARGE_BYTES", 1):
        assert b"".join(writer.dispatch_parts("orders", pieces, now_us, setting, dead)) == b"".join(out)
    ids = [ORIGIN + b"%014x" % i for i in range(random.choice((0, 1, 40)))] + [b"x"]
    packets_of = [[queue, (PacketType.ID, id_), (PacketType.TTL, b"9")] for id_ in ids]
    requeues = b"".join(_phpmq_plain(dialect, MessageType.REQUEUE, packets) for packets in packets_of)
    yield writer.settlements(MessageType.REQUEUE, "orders", ids, 9), requeues


def _written_sspq(random: Random) -> Iterator[tuple[bytes, bytes]]:
    batch = _batch(random)
    retries = [255 if left == RETRIES_NONE else left for left in batch.retries or [RETRIES_NONE] * len(batch)]
    rows = zip(batch.messages(), retries, strict=True)
    plain = b"".join(sspq.frame(sspq.Type.SEND, payload, left) for payload, left in rows)
    yield sspq.encode_batch(batch), plain
    yield sspq.encode_slices([_slice(random, batch)]), plain


_WRITERS = {"rq": _written_rq, "phpmq": _written_phpmq, "sspq": _written_sspq}


# --- the property ------------------------------------------------------------------------------------


def check(wire: str, seed: int) -> str:
    """Everything about one seed; what it says, as text. Raises AssertionError where ways differ."""
    random = Random(f"{wire} {seed}")
    stream = STREAMS[wire](random)
    fed = feedings(random, stream)
    if len(stream) > BYTE_BY_BYTE_MAX:
        del fed["byte by byte"]
    # Of their own chance, so that a stream stays what it was.
    of_its_own = Random(f"{wire} {seed} shares")
    shares = {"a view": of_its_own.choice((1, 2, 5, 40)), "small chunks": of_its_own.choice((1, 3))}
    said: list[Said] = []
    for side, read in READERS[wire].items():
        first = None
        # Sessions stand on the readers, where each path is looked at by itself.
        for module, name, value in _paths(wire)[: None if side == "reader" else 2]:
            with _set(module, name, value):
                for feeding, chunks in fed.items():
                    share = shares.get(feeding, UNBOUNDED) if side != "client" else UNBOUNDED
                    heard = read(chunks, share)
                    first = heard if first is None else first
                    if heard != first:
                        what = _difference(first, heard)
                        raise AssertionError(
                            f"{wire}, seed {seed}, {side}: {name} = {value}, fed {feeding}, "
                            f"a share of {share}: {what}"
                        )
        said.append(first)
    if wire == "rq":
        items, broken = reference(stream, RQ_LIMITS)
        assert said[0][0] == settled(items), (
            f"rq, seed {seed}: not what the reference says\n{stream.hex(' ')}"
        )
        assert (said[0][1] is not None) == broken, f"rq, seed {seed}: a length is or is not over its limit"
    for number, (written, plain) in enumerate(_WRITERS[wire](random)):
        assert written == plain, f"{wire}, seed {seed}: encoder {number} is not right"
        said.append(written)
    return repr(said)


def _difference(first: Said, other: Said) -> str:
    """The first place where two differ, in few words."""
    if isinstance(first, list | tuple) and isinstance(other, list | tuple):
        if len(first) != len(other):
            return f"{len(first)} items, {len(other)} items: {first[-1:]!r:.300} {other[-1:]!r:.300}"
        for a, b in zip(first, other, strict=True):
            if a != b:
                return _difference(a, b)
    return f"{first!r:.300} is not {other!r:.300}"


def digest(wire: str, first: int, end: int) -> str:
    """What these seeds say, in few digits: the same in every process of either build."""
    told = hashlib.sha256()
    for seed in range(first, end):
        told.update(check(wire, seed).encode())
    return told.hexdigest()[:16]


def search(seconds: float, first: int) -> int:
    """New seeds for that long; how many streams. A seed that breaks the property raises."""
    end = time.monotonic() + seconds
    seed = first
    while time.monotonic() < end:
        for wire in STREAMS:
            check(wire, seed)
        seed += 1
    return (seed - first) * len(STREAMS)
