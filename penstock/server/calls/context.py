"""What calls work on, and how they are answered: now, with a refusal, or when what was done is safe."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from penstock.broker.broker import Broker
from penstock.broker.operate import Draining, Operator, TooFast
from penstock.control.frames import Buffer, Fields
from penstock.log.errors import (
    AttemptOver,
    DiskFull,
    LogError,
    LogFailed,
    LogRefused,
    QueueDeleted,
    QueueFull,
    QueueTooSmall,
    QueueUnknown,
    ReaderUnknown,
    StageDamaged,
    StageUnknown,
)
from penstock.log.log import Log
from penstock.model.batch import Batch
from penstock.model.policy import QueueNameError
from penstock.server.audit import Audit
from penstock.server.memory import Account

ROWS_MAX: Final = 50
"""Queues or connections in one answer."""

log = logging.getLogger("penstock.control")


class Answer(Protocol):
    """What a call is answered with, once."""

    def __call__(self, fields: Fields, *buffers: Buffer) -> None: ...

    def refuse(self, kind: str, detail: str) -> None: ...

    def beside(self, number: int) -> "Answer":
        """That of another call, which came in the same frame under this number."""


class Host(Protocol):
    """What a handler needs of the server."""

    started: float
    memory: Account
    audit: Audit

    @property
    def broker(self) -> Broker: ...

    @property
    def log(self) -> Log: ...

    def now_us(self) -> int: ...

    def arrival_us(self) -> int: ...

    def fail(self, error: LogFailed) -> None: ...

    def listeners(self) -> list[Fields]:
        """Where clients of the wires connect to."""


class Context:
    """What handlers work on. One to a link: a round of `queues` is of one caller."""

    def __init__(self, server: Host) -> None:
        self.server = server
        self.log = server.log
        self.operator = Operator(server.broker, server.log)
        self.staged: dict[int, list[tuple[str, Batch]]] = {}  # of stages that come in several calls
        self._steps: deque[Callable[[], None]] = deque()  # of long work
        self.log.times.want(True)

    def step(self, take_one: Callable[[], None]) -> None:
        """Take a step of long work in a later turn of the loop: one in a turn, however many are at work."""
        self._steps.append(take_one)
        if len(self._steps) == 1:
            asyncio.get_running_loop().call_soon(self._next_step)

    def _next_step(self) -> None:
        self._steps[0]()  # It may ask for the next one, behind the others.
        self._steps.popleft()
        if self._steps:
            asyncio.get_running_loop().call_soon(self._next_step)

    def refuse(self, answer: Answer, error: Exception, call: str = "") -> None:
        """Say no for an error, which may have come when nobody was there any more to raise it to."""
        kind = refusal_of(error)
        if kind is None:
            log.error("call %r of the second process failed", call or "earlier", exc_info=error)
            kind = "bug"
        answer.refuse(kind, str(error))
        if isinstance(error, LogFailed):
            self.server.fail(error)


Handler = Callable[[Context, Fields, memoryview, Answer], None]


class ConnectionUnknown(LogRefused):
    """There is no connection of that number, or not any more."""


class CallRefused(LogRefused):
    """A call that asks for what cannot be, said by its handler."""


REFUSALS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (QueueUnknown, "no-queue"),
    (QueueDeleted, "deleted"),
    (ReaderUnknown, "no-reader"),
    (ConnectionUnknown, "no-connection"),
    (AttemptOver, "attempt-over"),
    (StageUnknown, "no-stage"),
    (StageDamaged, "stage-damaged"),
    (DiskFull, "disk-full"),
    (QueueTooSmall, "too-large"),
    (QueueFull, "queue-full"),
    (LogFailed, "failed"),
    (LogError, "refused"),
    (QueueNameError, "name"),
    (Draining, "draining"),
    (TooFast, "too-fast"),
)
"""The kind of refusal that an error is; the first that fits counts."""


def refusal_of(error: Exception) -> str | None:
    """The kind of a refusal; None where the error is a fault of ours."""
    return next((kind for error_type, kind in REFUSALS if isinstance(error, error_type)), None)


def when_safe(context: Context, answer: Answer, result: Fields) -> None:
    """Tell what was done when it is synced: a crash does not take back what somebody was told."""
    context.log.confirm(context.server.now_us(), told_when_safe(context, answer, result))


def told_when_safe(context: Context, answer: Answer, result: Fields) -> Callable[[LogFailed | None], None]:
    def confirmed(error: LogFailed | None) -> None:
        if error is None:
            answer(result)
        else:
            context.refuse(answer, error)

    return confirmed
