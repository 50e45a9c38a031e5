"""Streams of the three wires by a seed: mostly right, often in runs of like messages, often a little wrong.

What they have in them is what fast paths rest on: frames that are nearly like the last one, attributes in any
order, more than once or not at all, all dialects, lengths at their edges, cut ends, a byte that is flipped.
The same seed gives the same stream in every process.
"""

from collections.abc import Callable
from itertools import pairwise
from random import Random

from penstock.protocols.phpmq import Dialect, MessageType, PacketType
from penstock.protocols.risp import encode
from penstock.protocols.rq import NEEDS, Command

PAYLOAD_BYTES_MAX = 300
"""The limit that the properties set: it is reached often."""

ORIGIN = b"0123456789abcdef01"
_TIMES = (1, 1, 1, 1, 2, 2, 3, 33, 65)  # how often something is said; groups are of 32 and 64
_TIMES_RQ = (1, 1, 2, 3, 5)  # RQ has none
_SIZES = (0, 0, 1, 1, 2, 5, 9, 10, 31, 63, 64, 65, 99, 100, 255, 256, 299, 300)


def _payload(random: Random) -> bytes:
    size = 301 if random.random() < 0.02 else random.choice(_SIZES)
    kind = random.randrange(4)
    if kind == 0:
        return random.randbytes(size)
    if kind == 1:
        return bytes((random.choice(b"\0\1\n0PH\x55\x80\xe0"),)) * size
    return bytes(random.choices(b"\0\1\n5P0H\x0a\x0b\x0d\x80\xa0\xe0\x55\x99", k=size))


def _spoiled(random: Random, stream: bytes) -> bytes:
    """Nothing, or one small thing."""
    kind = random.randrange(8)
    if kind > 3 or not stream:
        return stream
    at = random.randrange(len(stream))
    if kind == 0:
        return stream[:at]
    if kind == 1:
        return stream[:at] + bytes((stream[at] ^ 1 << random.randrange(8),)) + stream[at + 1 :]
    if kind == 2:
        return stream[:at] + random.randbytes(1) + stream[at:]
    return stream[:at] + stream[at + 1 :]


def _told(
    random: Random,
    say: Callable[[Random], bytes],
    again: Callable[[Random], list[bytes]],
    times: tuple[int, ...] = _TIMES,
) -> bytes:
    """Many things said, some of them many times, some in turns."""
    out: list[bytes] = []
    for _ in range(random.randrange(1, 5)):
        kind = random.randrange(3)
        if kind == 0:
            out.append(say(random) * random.choice(times))
        elif kind == 1:
            out += again(random)
        else:
            turns = [say(random) for _ in range(random.randrange(1, 4))]
            out += [random.choice(turns) for _ in range(random.choice(times))]
    return _spoiled(random, b"".join(out))


# --- RQ ----------------------------------------------------------------------------------------------

_ACTIONS = tuple(NEEDS)
_FLAGS = (Command.EXCLUSIVE, Command.NOREPLY)
_NAMES = (b"q", b"Q1", b"orders", "ä".encode(), b"q.dead", b"", b"\xff", b"secret", b"n" * 255)


def _attribute(random: Random, command: Command) -> bytes:
    if command in _FLAGS:
        return encode(command)
    if command is Command.PAYLOAD:
        return encode(command, _payload(random))
    if command is Command.QUEUE:
        return encode(command, random.choice(_NAMES[: random.choice((2, 2, 4, 9))]))
    if command is Command.ID:
        return encode(command, random.choice((0, 1, 2, 5, 7, 32767, 0x01800000, 0xFFFFFFFF)))
    width = {Command.PRIORITY: 1, Command.RETRIES: 1}.get(command, 2)
    return encode(command, random.choice((0, 1, 2, 3, (1 << 8 * width) - 1)))


def _rq_frame(random: Random) -> bytes:
    action = random.choice((Command.REQUEST, Command.REQUEST, Command.REPLY, Command.DELIVERED, *_ACTIONS))
    needed = [random.choice(choice) for choice in NEEDS[action] if random.random() > 0.05]
    if action is Command.REPLY and random.random() < 0.7:
        needed.append(Command.PAYLOAD)
    others = (*_FLAGS, Command.RETRIES, Command.TIMEOUT, Command.MAX, Command.PRIORITY, Command.QUEUEID)
    attributes = needed + [other for other in others if random.random() < 0.1]
    if random.random() < 0.1:
        attributes.append(random.choice((Command.ID, Command.PAYLOAD, Command.QUEUE)))
    random.shuffle(attributes)
    parts = [encode(Command.CLEAR)] * random.choice((0, 1, 1, 1, 1, 1, 1, 2, 2, 3))
    parts += [_attribute(random, attribute) for attribute in attributes]
    parts.append(encode(action) * random.choice((1, 1, 1, 1, 1, 2, 3)))
    for _ in range(random.choice((0, 0, 0, 0, 0, 1, 2))):
        odd = random.choice(
            (b"\0", b"\1", b"\x02", b"\x5f\x01", b"\xbf\x01\x01", b"\x05", b"\x80\0\0\0\5\x0d")
        )
        parts.insert(random.randrange(len(parts) + 1), odd)
    return b"".join(parts)


def _rq_run(random: Random) -> list[bytes]:
    """Frames that differ in id and payload only."""
    action = random.choice((Command.REQUEST, Command.REPLY, Command.DELIVERED, Command.UNDELIVERED))
    parts: list[Command] = [Command.ID]
    if action is Command.REQUEST:
        parts += [Command.QUEUE, Command.PAYLOAD]
    elif action is Command.REPLY and random.random() < 0.8:
        parts.append(Command.PAYLOAD)
    if random.random() < 0.5:
        random.shuffle(parts)
    parts += [flag for flag in (Command.NOREPLY, Command.RETRIES) if random.random() < 0.2]
    fixed = {part: _attribute(random, part) for part in parts}
    clears = encode(Command.CLEAR) * random.choice((1, 1, 1, 1, 2))
    frames = []
    for _ in range(random.choice(_TIMES_RQ)):
        said = [
            _attribute(random, part) if part in (Command.ID, Command.PAYLOAD) else fixed[part]
            for part in parts
        ]
        frames.append(clears + b"".join(said) + encode(action))
        if random.random() < 0.02:
            frames.append(random.choice((b"\x05", b"\0", b"\1", b"\1\1", _rq_frame(random))))
    return frames


def _rq_left_over(random: Random) -> list[bytes]:
    """A frame without an end, frames that a fast path reads, and one that goes on with their registers."""
    begun = [Command.ID] * (random.random() < 0.6)
    begun += random.choice(([], [Command.QUEUE], [Command.PAYLOAD]))
    more = random.choice(
        ([], [Command.QUEUE, Command.PAYLOAD], [Command.QUEUEID, Command.PAYLOAD], [Command.QUEUEID])
    )
    action = encode(random.choice((Command.REQUEST, Command.REQUEST, Command.REPLY, Command.BROADCAST)))
    settled = encode(Command.ID, random.randrange(8)) + encode(
        random.choice((Command.DELIVERED, Command.REPLY))
    )
    fast = [encode(Command.CLEAR) + settled] if random.random() < 0.7 else _rq_run(random)
    return [
        encode(Command.CLEAR) + b"".join(_attribute(random, attribute) for attribute in begun),
        *fast,
        b"".join(_attribute(random, attribute) for attribute in more) + action,
    ]


def _rq_in_order(random: Random) -> list[bytes]:
    """A consumer that is done with what it was given from the first on; nearly always."""
    ids = list(range(random.choice((0, 8, 8, 8, 9, 16)), random.choice((9, 12, 16, 17, 24, 30))))
    for _ in range(random.choice((0, 0, 1, 2))):
        at = random.randrange(len(ids) + 1)
        ids[at : at + random.choice((0, 1, 2))] = random.choice(([], [at], [8, 8], ids[:2][::-1]))
    frames = [encode(Command.CLEAR) + encode(Command.ID, i) + encode(Command.DELIVERED) for i in ids]
    if random.random() < 0.3:
        frames.insert(random.randrange(len(frames) + 1), random.choice((b"\x05", _rq_frame(random))))
    return frames


def _rq_frames(random: Random) -> list[bytes]:
    return _rq_run(random) if random.random() < 0.5 else _rq_left_over(random) * random.choice((1, 2, 3))


def rq_stream(random: Random) -> bytes:
    stream = _told(random, _rq_frame, _rq_frames, _TIMES_RQ)
    in_order = b"".join(_rq_in_order(random))
    return random.choice((stream, stream, in_order + stream, stream + in_order))


# --- PHPMQ -------------------------------------------------------------------------------------------

_DIALECTS = tuple(Dialect(width, breaks) for width in (32, 35, 36) for breaks in (False, True))
_QUEUES = ("q", "Foo", "2nds", "1234567890", "orders.dead", "ä" * 8, "P02" + "0" * 33, "n" * 255)
_PACKETS = {
    MessageType.MESSAGE: (PacketType.QUEUE, PacketType.CONTENT),
    MessageType.CONSUME: (PacketType.QUEUE, PacketType.COUNT),
    MessageType.DISPATCH: (PacketType.QUEUE, PacketType.CONTENT, PacketType.ID),
    MessageType.ACKNOWLEDGE: (PacketType.QUEUE, PacketType.ID),
    MessageType.REQUEUE: (PacketType.QUEUE, PacketType.ID, PacketType.TTL),
    MessageType.DEAD_LETTER: (PacketType.QUEUE, PacketType.ID),
}
_NUMBERS = (b"0", b"5", b"60", b"05", b"3600", b"9" * 10, b"5\n", b"1" * 11, b"")


def _content(random: Random, type_: PacketType) -> bytes:
    if type_ is PacketType.QUEUE:
        return random.choice(_QUEUES[: random.choice((2, 3, 8))]).encode()
    if type_ is PacketType.CONTENT:
        return _payload(random)
    if type_ is PacketType.ID:
        offset = random.choice((0, 1, 2, 3, 4, 255, 1 << 32, (1 << 32) - 1))
        ours = ORIGIN + b"%014x" % offset
        return (
            ours if random.random() < 0.9 else random.choice((b"", b"x", ours.upper(), ours[:-1], b"f" * 32))
        )
    return random.choice(_NUMBERS[: random.choice((4, 5, 5, 6, 9))])


def _phpmq_message(
    random: Random, dialect: Dialect, type_: MessageType, fixed: dict[PacketType, bytes], with_ttl: bool
) -> bytes:
    packets = list(_PACKETS[type_])
    if with_ttl and PacketType.TTL not in packets:
        packets.append(PacketType.TTL)
    if random.random() < 0.03:
        random.shuffle(packets)
    if random.random() < 0.01:
        packets.append(random.choice(tuple(PacketType)))
    count = len(packets) if random.random() > 0.01 else random.randrange(7)
    out = [dialect.message_header(type_, count)]
    for packet in packets:
        out.append(dialect.packet(packet, fixed[packet] if packet in fixed else _content(random, packet)))
    return b"".join(out)


def _phpmq_frame(random: Random) -> bytes:
    type_ = random.choice((*MessageType, MessageType.MESSAGE, MessageType.MESSAGE))
    may_have_ttl = type_ in (MessageType.MESSAGE, MessageType.DISPATCH)
    with_ttl = may_have_ttl and random.random() < 0.4
    return _phpmq_message(random, random.choice(_DIALECTS), type_, {}, with_ttl)


def _phpmq_run(random: Random) -> list[bytes]:
    """Messages that differ in few things: contents of one size or several, ids in a row, a TTL at times."""
    type_ = random.choice((MessageType.MESSAGE, MessageType.MESSAGE, *MessageType))
    dialect = random.choice(_DIALECTS)
    may_have_ttl = type_ in (MessageType.MESSAGE, MessageType.DISPATCH)
    with_ttl = may_have_ttl and random.random() < 0.4
    fixed = {packet: _content(random, packet) for packet in PacketType if random.random() < 0.5}
    fixed[PacketType.QUEUE] = _content(random, PacketType.QUEUE)
    in_a_row = random.random() < 0.5
    out = []
    for number in range(random.choice(_TIMES)):
        if in_a_row:
            fixed[PacketType.ID] = ORIGIN + b"%014x" % ((1 << 32) - 3 + number)
        other_ttl = may_have_ttl and random.random() < 0.03
        out.append(_phpmq_message(random, dialect, type_, fixed, with_ttl != other_ttl))
    return out


def phpmq_stream(random: Random) -> bytes:
    return _told(random, _phpmq_frame, _phpmq_run)


# --- SSPQ --------------------------------------------------------------------------------------------

_TYPES = (0x5E, 0x5E, 0x5E, 0xEC, 0xC0, 0xDE, 0x0E, 0xFF, 0x00)
_PAIR = bytes.fromhex("5599c00000000000 5599ec0000000000")


def _sspq_frame(random: Random) -> bytes:
    type_ = random.choice(_TYPES)
    payload = _payload(random) if type_ == 0x5E or random.random() < 0.1 else b""
    retries = random.choice((0, 0, 3, 254, 255))
    if random.random() < 0.1:
        return _PAIR * random.choice(_TIMES)
    return bytes((0x55, 0x99, type_, retries)) + len(payload).to_bytes(4, "big") + payload


def _sspq_run(random: Random) -> list[bytes]:
    size, retries = len(_payload(random)), random.choice((0, 3, 255))
    head = bytes((0x55, 0x99, 0x5E, retries)) + size.to_bytes(4, "big")
    frames = [head + random.randbytes(size) for _ in range(random.choice(_TIMES))]
    if random.random() < 0.3:
        frames.insert(random.randrange(len(frames) + 1), _sspq_frame(random))
    return frames


def sspq_stream(random: Random) -> bytes:
    return _told(random, _sspq_frame, _sspq_run)


STREAMS: dict[str, Callable[[Random], bytes]] = {
    "rq": rq_stream,
    "phpmq": phpmq_stream,
    "sspq": sspq_stream,
}


def feedings(random: Random, stream: bytes) -> dict[str, list[bytes | memoryview]]:
    """One stream in chunks of all kinds. Those of a memoryview are views of one buffer."""
    marks = sorted(random.randrange(len(stream) + 1) for _ in range(random.choice((1, 2, 3, 9))))
    edges = [0, *marks, len(stream)]
    chunks = [stream[lo:hi] for lo, hi in pairwise(edges)]
    small = [0]
    while small[-1] < len(stream):
        small.append(small[-1] + random.randrange(1, 90))
    view = memoryview(bytearray(stream))
    views: list[bytes | memoryview] = [view[lo:hi] for lo, hi in pairwise(edges)]
    return {
        "whole": [stream],
        "a view": [view],
        f"cut at {marks}": [*chunks],
        f"views cut at {marks}": views,
        "small chunks": [stream[lo:hi] for lo, hi in pairwise(small)],
        "small views": [view[lo:hi] for lo, hi in pairwise(small)],
        "byte by byte": [stream[at : at + 1] for at in range(len(stream))],
    }
