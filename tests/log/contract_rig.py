"""What the contract needs of an engine under test, and the words in which its tests speak.

A `Harness` is the one thing to write for a new engine: how it is opened, restarted and waited for.
The contract never sleeps and never asks how an engine works. It moves the clock itself, says what it
expects, and lets the harness `drive` until that is so. An engine that answers from memory is there at
once; one that speaks to a cluster takes its time behind the same call.

Messages are told apart by their payloads: an engine may keep a message's offset and id when it moves
(`identity_stays`), or store it again under new ones.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.log.errors import LogError
from penstock.log.info import QueueInfo
from penstock.log.log import Log
from penstock.log.results import Begun, EventRun, Fate, Receipt, StageInfo, Stored, TransactionDone
from penstock.model.batch import RETRIES_NONE, Batch, Slice
from penstock.model.ids import id_of
from penstock.model.life import Event, Reason
from penstock.model.policy import Policies
from penstock.model.words import RETRY_DELAYS, Outcome, Ranges, Where

SECOND = 1_000_000
START_US = 1_700_000_000 * SECOND
PATIENCE_SECONDS = 10.0
EVERYTHING = 1 << 20

Settings = Mapping[str, Mapping[str, object]]


class Harness(Protocol):
    """One kind of engine. `crash` and `reopen` answer with the engine that goes on."""

    identity_stays: bool
    """Whether a message keeps its offset and id when it is requeued or redriven."""

    def open(self, now_us: int, policies: Policies) -> Log:
        """An engine with nothing in it."""

    def reopen(self, now_us: int) -> Log:
        """Close it, and open it again."""

    def crash(self, now_us: int) -> Log:
        """The process dies without another word. What had been confirmed is opened again."""

    def drive(self, until: Callable[[], bool], seconds: float) -> bool:
        """Let pending work go on until `until` holds, nothing is left to do, or time is over.

        Answers whether `until` holds.
        """

    def end(self) -> None:
        """Leave nothing behind."""


class Got(NamedTuple):
    """One message as it was delivered or read."""

    payload: bytes
    offset: int
    message_id: bytes
    retries: int
    attempts: int
    expires_us: int
    time_us: int
    reply: bytes | None
    protocol: str
    origin: bytes
    headers: bytes
    reason: Reason  # of a dead letter


class Told(NamedTuple):
    """One event of one message."""

    number: int
    event: Event
    offset: int
    reason: Reason
    consumer: str
    attempt: int
    dispatched_us: int
    time_us: int


def open_slices(slices: Iterable[Slice]) -> list[Got]:
    return [
        Got(
            payload,
            piece.first_offset + i,
            id_of(piece.origin, piece.first_offset + i),
            piece.retries[i] if piece.retries is not None else RETRIES_NONE,
            piece.attempts[i] if piece.attempts is not None else 0,
            max(piece.expires_us[i], 0) if piece.expires_us is not None else 0,
            piece.time_us,
            piece.reply[i] if piece.reply is not None else None,
            piece.protocol,
            piece.origin,
            piece.headers[i] if piece.headers is not None else b"",
            piece.reason,
        )
        for piece in slices
        for i, payload in zip(range(piece.lo, piece.hi), piece.messages(), strict=True)
    ]


def open_runs(events: Iterable[EventRun]) -> list[Told]:
    return [
        Told(
            run.event_offset + i,
            run.event,
            run.first + i,
            run.reason,
            run.consumer,
            run.attempt,
            run.dispatched_us,
            run.time_us,
        )
        for run in events
        for i in range(run.end - run.first)
    ]


def open_fates(fates: Iterable[Fate]) -> list[tuple[int, Event, Reason]]:
    return [(offset, fate.event, fate.reason) for fate in fates for offset in range(fate.first, fate.end)]


def count_of(fates: Iterable[Fate]) -> int:
    return sum(fate.end - fate.first for fate in fates)


def payloads(messages: Iterable[Got]) -> list[bytes]:
    return [message.payload for message in messages]


def ranges_of(messages: Iterable[Got]) -> Ranges:
    return [(message.offset, message.offset + 1) for message in messages]


def named(stem: str, count: int) -> list[bytes]:
    """`count` payloads that can be told apart."""
    return [f"{stem}-{i}".encode() for i in range(count)]


class Rig:
    """An engine, a clock that stands until it is moved, and the usual moves."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.now_us = START_US
        self.engine: Log

    # --- life and time -------------------------------------------------------------------------

    def open(self, policies: Settings | None = None) -> Log:
        self.engine = self.harness.open(self.now_us, Policies(policies))
        return self.engine

    def restart(self, how: str) -> Log:
        """ "reopen" or "crash", with everything confirmed before."""
        self.turn()
        self.engine = (self.harness.crash if how == "crash" else self.harness.reopen)(self.now_us)
        return self.engine

    def later(self, *, seconds: int = 0, us: int = 0) -> None:
        self.now_us += seconds * SECOND + us

    def due(self) -> set[str]:
        """What was delayed until now is ready: where there was some. As often as it takes."""
        found = set(self.engine.due(self.now_us))
        while 0 < self.engine.due_us <= self.now_us:
            found.update(self.engine.due(self.now_us))
        return found

    def drive(self, until: Callable[[], bool] = lambda: False) -> bool:
        return self.harness.drive(until, PATIENCE_SECONDS)

    def turn(self) -> None:
        """The end of a turn of the broker's loop, and everything that follows from it."""
        self.engine.flush(self.now_us)
        self.drive()

    # --- in --------------------------------------------------------------------------------------

    def send(
        self,
        queue: str,
        messages: Sequence[bytes],
        *,
        ttl: int | Sequence[int] | None = None,
        retries: int | Sequence[int] | None = None,
        reply: Sequence[bytes] | None = None,
        protocol: str = "http",
        delay: float | Sequence[float] | None = None,
        headers: Sequence[bytes] | None = None,
    ) -> Stored:
        """Append, and wait for the receipt. A delay is in seconds."""
        count = len(messages)
        delays = [delay] * count if isinstance(delay, int | float) else delay
        batch = Batch.of(
            messages,
            ttl_seconds=[ttl] * count if isinstance(ttl, int) else ttl,
            retries=[retries] * count if isinstance(retries, int) else retries,
            reply=reply,
            protocol=protocol,
            delay_us=[round(it * SECOND) for it in delays] if delays is not None else None,
            headers=headers,
        )
        receipts, receipt = self.receipts()
        self.engine.append(queue, batch, self.now_us, receipt)
        self.engine.flush(self.now_us)
        assert self.drive(lambda: bool(receipts)), f"no receipt for {queue}"
        (stored,) = receipts
        return stored

    def receipts(self) -> tuple[list[Stored], Receipt]:
        """A receipt to hand over, and the list that it fills."""
        came: list[Stored] = []

        def receipt(stored: Stored | LogError) -> None:
            assert isinstance(stored, Stored), stored
            came.append(stored)

        return came, receipt

    def transact(
        self,
        key: str,
        *parts: tuple[str, list[bytes]],
        dead: Sequence[str] = (),
    ) -> TransactionDone:
        """All of it, and wait for the receipt. What is for the queues `dead` is dead at once."""
        came: list[TransactionDone | LogError] = []
        batches = [(queue, Batch.of(messages)) for queue, messages in parts]
        for queue, batch in batches:
            batch.dead = Reason.BAD_RECORD if queue in dead else Reason.NONE
        self.engine.transact(key, batches, self.now_us, came.append)
        return self._done(key, came)

    def _done(self, key: str, came: list[TransactionDone | LogError]) -> TransactionDone:
        self.engine.flush(self.now_us)
        assert self.drive(lambda: bool(came)), f"no receipt for {key}"
        (done,) = came
        assert isinstance(done, TransactionDone), done
        return done

    def stage(self, key: str, *parts: tuple[str, Batch | list[bytes]]) -> str:
        """A part of a transaction, and wait for the receipt; its id."""
        came: list[StageInfo | LogError] = []
        batches = [(queue, it if isinstance(it, Batch) else Batch.of(it)) for queue, it in parts]
        self.engine.stage(key, batches, self.now_us, came.append)
        self.engine.flush(self.now_us)
        assert self.drive(lambda: bool(came)), f"no receipt for a stage of {key}"
        (info,) = came
        assert isinstance(info, StageInfo), info
        return info.stage

    def commit(self, key: str, *stages: str, steps: int = 0) -> TransactionDone:
        """These become messages, behind steps of an earlier version; and wait for the receipt."""
        came: list[TransactionDone | LogError] = []
        self.engine.commit(key, stages, self.now_us, came.append, Begun(steps, "of all"))
        return self._done(key, came)

    # --- out -------------------------------------------------------------------------------------

    def take(
        self, queue: str, count: int = EVERYTHING, *, consumer: str = "ann", dead: bool = False
    ) -> list[Got]:
        """Up to `count` messages, as far as there are any."""
        got: list[Got] = []

        def enough() -> bool:
            slices = self.engine.take(
                queue, consumer, count - len(got), self.now_us, bytes_max=1 << 30, dead=dead
            )
            got.extend(open_slices(slices))
            return len(got) == count

        self.drive(enough)
        return got

    def take_bytes(self, queue: str, bytes_max: int, count: int = EVERYTHING) -> list[Got]:
        """One answer that is not empty, if there is one."""
        got: list[Got] = []

        def something() -> bool:
            got.extend(open_slices(self.engine.take(queue, "ann", count, self.now_us, bytes_max=bytes_max)))
            return bool(got)

        self.drive(something)
        return got

    def settle(
        self,
        queue: str,
        outcome: Outcome,
        messages: Sequence[Got],
        *,
        consumer: str = "ann",
        ttl: int = 0,
        dead: bool = False,
        delay: float | None = None,
        why: str = "",
    ) -> list[Fate]:
        return self.engine.settle(
            queue,
            consumer,
            outcome,
            ranges_of(messages),
            self.now_us,
            ttl_seconds=ttl,
            dead=dead,
            delay_us=RETRY_DELAYS if delay is None else round(delay * SECOND),
            why=why,
        )

    def ack(self, queue: str, messages: Sequence[Got], *, consumer: str = "ann") -> list[Fate]:
        return self.settle(queue, Outcome.ACK, messages, consumer=consumer)

    def lose(self, queue: str, *, consumer: str = "ann", where: Where = Where.PLACE) -> list[Fate]:
        """The consumer's connection has ended."""
        return self.engine.give_back(queue, consumer, self.now_us, where=where)

    def kill(self, queue: str, messages: Sequence[bytes]) -> None:
        """Messages that are rejected at once: dead letters, in that order."""
        for message in messages:
            self.send(queue, [message])
            got = self.take(queue, consumer="undertaker")
            assert payloads(got) == [message]
            self.settle(queue, Outcome.REJECT, got, consumer="undertaker")

    # --- looking ---------------------------------------------------------------------------------

    def counts(self, queue: str) -> tuple[int, int, int]:
        """Ready, held, dead."""
        info = self.engine.describe(queue)
        return info.ready, info.held, info.dead

    def has(self, queue: str, *, ready: int = 0, delayed: int = 0, held: int = 0, dead: int = 0) -> None:
        """Assert how many messages are where."""
        self.drive(lambda: self.counts(queue) == (ready, held, dead))
        assert (*self.counts(queue), self.engine.describe(queue).delayed) == (ready, held, dead, delayed)
        assert self.engine.ready(queue) == ready

    def read(self, queue: str, start: int = 0, end: int = EVERYTHING) -> list[Got]:
        self.turn()
        return open_slices(self.engine.read(queue, start, end))

    def events(self, queue: str, start: int = 0, end: int = EVERYTHING) -> list[Told]:
        self.turn()
        return open_runs(self.engine.events(queue, start, end))

    def described(self, queue: str) -> QueueInfo:
        self.turn()
        return self.engine.describe(queue)
