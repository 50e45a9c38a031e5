"""The quick ways of the decoders are as strict as the careful ones: one wrong byte is seen, wherever it is.

A session that has seen a shape of messages reads more of it by comparing bytes. So a message of that shape
with one byte changed is fed behind good ones, whole and byte by byte: both ways end in the same words or the
same violation. Byte by byte nothing is ever quick.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Protocol

import pytest

from penstock.model.batch import RETRIES_NONE
from penstock.model.words import Command, Ignored, Publish, Settle
from penstock.protocols import phpmq_session, rq_controller, sspq_session
from penstock.protocols.errors import PeerViolation
from penstock.protocols.phpmq import Dispatched
from tests.server.harness import SEND, phpmq, rq, sspq


class Session(Protocol):
    def receive(self, data: bytes) -> list[Command]: ...
    def salvage(self) -> list[Command]: ...


class RqSession:
    """With the clock that the others do not need."""

    def __init__(self) -> None:
        self._session = rq_controller.ControllerSession(0)
        self.said = b""

    def receive(self, data: bytes) -> list[Command]:
        try:
            return self._session.receive(data, 0)
        finally:
            self.said += self._session.take_output()

    def salvage(self) -> list[Command]:
        return self._session.salvage()


class PhpmqClient:
    """The other side, which has no words for the broker."""

    def __init__(self) -> None:
        self._session = phpmq_session.ClientSession()
        self._session.consume("q", 100)
        self.said: list[object] = []

    def receive(self, data: bytes) -> list[Command]:
        return self._note(self._session.receive(data))

    def salvage(self) -> list[Command]:
        return self._note(self._session.salvage())

    def _note(self, dispatched: list[Dispatched]) -> list[Command]:
        for it in dispatched:
            ttls = it.batch.ttl_seconds or [0] * len(it.ids)
            self.said += zip(repeat(it.queue), it.batch.messages(), it.ids, ttls, strict=False)
        return []


ID = b"0123456789abcdef" * 2


def message(*packets: tuple[int, bytes], type_: int = 1, width: int = 32, newline: bytes = b"") -> bytes:
    return phpmq(type_, *packets, width=width, newline=newline)


SHAPES: dict[str, tuple[Callable[[], Session], bytes]] = {
    "sspq": (lambda: sspq_session.ServerSession("q"), sspq(SEND, b"abc", 3)),
    "phpmq": (phpmq_session.ServerSession, message((1, b"q"), (2, b"abc"))),
    "phpmq, lines": (phpmq_session.ServerSession, message((1, b"q"), (2, b"abc"), newline=b"\n")),
    "phpmq, 35 bytes": (phpmq_session.ServerSession, message((1, b"q"), (2, b"abc"), width=35)),
    "phpmq, 36 bytes": (phpmq_session.ServerSession, message((1, b"q"), (2, b"abc"), width=36)),
    "phpmq, ttl": (phpmq_session.ServerSession, message((1, b"q"), (2, b"abc"), (5, b"60"))),
    "phpmq, ttl, lines": (
        phpmq_session.ServerSession,
        message((1, b"q"), (2, b"abc"), (5, b"60"), newline=b"\n"),
    ),
    "phpmq, ack": (phpmq_session.ServerSession, message((1, b"q"), (3, ID), type_=4)),
    "phpmq, ack, lines": (
        phpmq_session.ServerSession,
        message((1, b"q"), (3, ID), type_=4, newline=b"\n"),
    ),
    "phpmq, dispatch": (PhpmqClient, message((1, b"q"), (2, b"abc"), (3, ID), type_=3)),
    "phpmq, dispatch, lines": (
        PhpmqClient,
        message((1, b"q"), (2, b"abc"), (3, ID), type_=3, newline=b"\n"),
    ),
    "phpmq, dispatch, ttl, lines": (
        PhpmqClient,
        message((1, b"q"), (2, b"abc"), (3, ID), (5, b"60"), type_=3, newline=b"\n"),
    ),
    "rq, payload first": (RqSession, rq(1, (160, b"q"), (224, b"abc"), 33, (128, 7), 10)),
    "rq": (RqSession, rq(1, (128, 7), (160, b"q"), (224, b"abc"), 33, 10)),
    "rq, priority": (RqSession, rq(1, (128, 7), (160, b"q"), (64, 9), (97, 60), (224, b"abc"), 10)),
    "rq, delivered": (RqSession, rq(1, (128, 7), 13)),
    "rq, reply": (RqSession, rq(1, (128, 7), (224, b"abc"), 11)),
}
GOOD = 3
"""Messages that teach the shape, and as many that come after the wrong one."""


def outcome(session: Session, chunks: Iterable[bytes]) -> tuple[object, ...]:
    """What was said, what was ignored, the violation at the end, what a peer was answered.

    In a chunk, queues may overtake each other, an id that is settled twice counts once, and a violation shows
    the bytes that came with it.
    """
    said: dict[str, list[object]] = {}
    settled: set[object] = set()
    ignored: Counter[str] = Counter()
    violation = ""

    def hear(commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Ignored):
                if "twice" not in command.reason:
                    ignored[command.reason] += command.count
            elif isinstance(command, Publish):
                said.setdefault(command.queue, []).extend(messages(command))
            elif isinstance(command, Settle):
                offsets = [offset for first, end in command.ranges for offset in range(first, end)]
                settled.update((command.queue, command.outcome, command.origin, it) for it in offsets)
            else:
                said.setdefault("", []).append(repr(command))

    try:
        for chunk in chunks:
            hear(session.receive(chunk))
    except PeerViolation as error:
        hear(session.salvage())
        violation = re.sub(r"( at byte \d+): .*", r"\1", str(error))
        if "never asked for" in violation:  # which is placed at the end of its chunk
            violation = violation.partition(" at byte")[0]
    return said, settled, ignored, violation, getattr(session, "said", b"")


def messages(command: Publish) -> Iterator[tuple[object, ...]]:
    batch = command.batch
    for i, payload in enumerate(batch.messages()):
        ticket = command.tickets[i] if command.tickets is not None else None
        ttl = batch.ttl_seconds[i] if batch.ttl_seconds is not None else 0
        retries = batch.retries[i] if batch.retries is not None else RETRIES_NONE
        yield payload, ticket, command.wants_reply, command.timeout_seconds, ttl, retries


@pytest.mark.parametrize("shape", SHAPES)
def test_a_wrong_byte_is_seen_however_it_comes(shape: str) -> None:
    make, good = SHAPES[shape]
    for at in range(len(good)):
        for change in (0x01, 0x10, 0x80):
            bad = good[:at] + bytes([good[at] ^ change]) + good[at + 1 :]
            stream = good * GOOD + bad + good * GOOD
            careful = outcome(make(), [stream[i : i + 1] for i in range(len(stream))])
            whole = outcome(make(), [stream])
            taught = outcome(make(), [good * GOOD, bad + good * GOOD])
            assert whole == careful, f"byte {at} ^ {change:#x} of {good!r}, in one chunk"
            assert taught == careful, f"byte {at} ^ {change:#x} of {good!r}, behind a chunk of good ones"
