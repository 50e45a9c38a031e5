"""Words in frames: the commands of `model/words.py`, as a follower hands them on.

    int64    number of the frame, by which its settlements are confirmed; NO_NUMBER: it has none
    then, for each command, uint8 which, and its fields

`Ignored` does not travel: it is a line for people, and the follower writes it. A `Publish` travels here only
where it wants a reply; all others are stored by number, see `lanes.py`.

How it fails: `PeerViolation`.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from penstock.cluster.columns import pack_batches, pack_ranges, unpack_batch, unpack_ranges
from penstock.cluster.frames import (
    COUNT,
    HEADER_BYTES,
    NUMBER,
    Body,
    Buffer,
    flagged,
    short_bytes,
    text_bytes,
)
from penstock.model import words
from penstock.model.words import Command, Outcome
from penstock.protocols.errors import PeerViolation

NO_NUMBER: Final = -1
CREDIT_MAX: Final = (1 << 32) - 1
"""No consumer ever has more; PHPMQ has ten digits to ask for it."""

_PUBLISH: Final = struct.Struct("<II")
_CONSUME: Final = struct.Struct("<IBB")
_SETTLE: Final = struct.Struct("<BBq")
_OUTCOMES: Final = tuple(Outcome)


def _publish(command: words.Publish) -> list[Buffer]:
    tickets = command.tickets
    assert tickets is not None
    head = _PUBLISH.pack(command.timeout_seconds, len(tickets))
    return [
        text_bytes(command.queue),
        head,
        tickets.tobytes(),
        *pack_batches([command.batch], command.batch.protocol),
    ]


def _read_publish(body: Body) -> words.Publish:
    queue = body.text()
    timeout_seconds, count = body.numbers(_PUBLISH)
    tickets = body.column("I", count)
    batch = unpack_batch(body)
    if len(batch) != count:
        raise body.bad(f"{len(batch)} requests and {count} tickets")
    return words.Publish(queue, batch, tickets, wants_reply=True, timeout_seconds=timeout_seconds)


def _consume(command: words.Consume) -> list[Buffer]:
    switches = command.dead | command.once << 1 | command.exclusive << 2
    credit = min(command.credit, CREDIT_MAX)
    return [text_bytes(command.queue), _CONSUME.pack(credit, switches, command.priority)]


def _read_consume(body: Body) -> words.Consume:
    queue = body.text()
    credit, switches, priority = body.numbers(_CONSUME)
    return words.Consume(
        queue, credit, bool(switches & 1), bool(switches & 2), priority, exclusive=bool(switches & 4)
    )


def _cancel(command: words.Cancel) -> list[Buffer]:
    return [text_bytes(command.queue), bytes((command.dead,))]


def _read_cancel(body: Body) -> words.Cancel:
    return words.Cancel(body.text(), bool(body.raw(1)[0]))


def _settle(command: words.Settle) -> list[Buffer]:
    head = _SETTLE.pack(_OUTCOMES.index(command.outcome), command.dead, command.ttl_seconds)
    return [text_bytes(command.queue), head, short_bytes(command.origin), pack_ranges(command.ranges)]


def _read_settle(body: Body) -> words.Settle:
    queue = body.text()
    outcome, dead, ttl_seconds = body.numbers(_SETTLE)
    if outcome >= len(_OUTCOMES):
        raise body.bad(f"the outcome {outcome}, which nobody knows")
    origin = body.short()
    return words.Settle(queue, _OUTCOMES[outcome], origin, unpack_ranges(body), ttl_seconds, bool(dead))


def _accepted(command: words.Accepted) -> list[Buffer]:
    return [text_bytes(command.queue), short_bytes(command.origin), pack_ranges(command.ranges)]


def _read_accepted(body: Body) -> words.Accepted:
    return words.Accepted(body.text(), body.short(), unpack_ranges(body))


def _reply(command: words.Reply) -> list[Buffer]:
    return [
        text_bytes(command.queue),
        short_bytes(command.origin),
        COUNT.pack(len(command.offsets)),
        command.offsets.tobytes(),
        *pack_batches([command.answers], command.answers.protocol),
    ]


def _read_reply(body: Body) -> words.Reply:
    queue, origin = body.text(), body.short()
    (count,) = body.numbers(COUNT)
    offsets = body.column("q", count)
    answers = unpack_batch(body)
    if len(answers) != count:
        raise body.bad(f"{len(answers)} answers to {count} requests")
    return words.Reply(queue, origin, offsets, answers)


def _broadcast(command: words.Broadcast) -> list[Buffer]:
    return [text_bytes(command.queue), *pack_batches([command.batch], command.batch.protocol)]


def _read_broadcast(body: Body) -> words.Broadcast:
    return words.Broadcast(body.text(), unpack_batch(body))


def _closing(command: words.Closing) -> list[Buffer]:
    return []


def _read_closing(body: Body) -> words.Closing:
    return words.Closing()


# Any: each packer takes the one command that it stands under.
_TABLE: Final[tuple[tuple[type, Callable[[Any], list[Buffer]], Callable[[Body], Command]], ...]] = (
    (words.Publish, _publish, _read_publish),
    (words.Consume, _consume, _read_consume),
    (words.Cancel, _cancel, _read_cancel),
    (words.Settle, _settle, _read_settle),
    (words.Accepted, _accepted, _read_accepted),
    (words.Reply, _reply, _read_reply),
    (words.Broadcast, _broadcast, _read_broadcast),
    (words.Closing, _closing, _read_closing),
)
_PACK: Final = {type_: (bytes((number,)), pack) for number, (type_, pack, _) in enumerate(_TABLE)}


def pack_words(number: int, commands: Sequence[Command]) -> list[Buffer]:
    buffers: list[Buffer] = [NUMBER.pack(number)]
    for command in commands:
        mark, pack = _PACK[type(command)]
        buffers.append(mark)
        buffers += pack(command)
    return buffers


def renumbered(frame: bytes, number: int, flag: int = 0) -> bytes:
    """A frame of words, under another number."""
    end = HEADER_BYTES + NUMBER.size
    return b"".join((flagged(frame[:HEADER_BYTES], flag), NUMBER.pack(number), memoryview(frame)[end:]))


def unpack_words(body: Body) -> tuple[int, list[Command]]:
    (number,) = body.numbers(NUMBER)
    commands: list[Command] = []
    while body.left:
        mark = body.raw(1)[0]
        if mark >= len(_TABLE):
            raise _unknown(body, mark)
        commands.append(_TABLE[mark][2](body))
    return number, commands


def _unknown(body: Body, mark: int) -> PeerViolation:
    return body.bad(f"the word {mark}, which nobody knows")
