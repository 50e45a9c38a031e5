"""SSPQ sessions: what either side of a connection may do next, and what it means to the broker.

Both sides walk through the same five states, one message in flight at most:

                  RECEIVE                 SEND (server)
        idle ───────────────► waiting ───────────────► holding
         ▲ ▲                     │                        │
         │ └──── NO_RECEIVE ─────┘                        │
         └──────────────────── CONFIRM ───────────────────┘

and the same again for DEAD_RECEIVE, which leads through `waiting-dead` and `holding-dead`. SEND from
the client is possible in every state and changes none. The tables below are the whole truth: a cell
that is missing is misuse where it is our own act, and a violation where it is the peer's.

Rules that always hold:
  * The server session never answers on its own: bytes leave only through `deliver` and `decline`.
  * Whatever the client asks too early or too often changes nothing. It is counted, in bulk, as
    `words.Ignored`, at the end of the commands of the chunk.
  * The server session remembers which message is in flight (`held`), because CONFIRM does not name it.
    Credit stays with the broker: one RECEIVE is one `Consume(credit=1, once=True)`.

How it fails: `PeerViolation` from the reader passes through; the commands that came before it in the same
chunk wait in `salvage()`. A call that the table does not have raises `MisuseError` and changes nothing.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import ClassVar

from penstock.model.batch import Batch, Slice
from penstock.model.words import Command, Consume, Ignored, Outcome, Publish, Settle, Sync, Where
from penstock.protocols import sspq
from penstock.protocols.errors import MisuseError, PeerViolation
from penstock.protocols.share import SHARE
from penstock.protocols.sspq import Control, Event, FrameReader, Messages, Type

QUEUE_DEFAULT = "default"


class State(Enum):
    IDLE = "idle"
    WAITING = "waiting"
    WAITING_DEAD = "waiting-dead"
    HOLDING = "holding"
    HOLDING_DEAD = "holding-dead"


class Act(Enum):
    """What the server does of its own accord."""

    DELIVER = "deliver a message"
    DELIVER_DEAD = "deliver a dead letter"
    DECLINE = "decline"


class Effect(Enum):
    """What a step means beyond the change of state. The text of an ignored one is its reason."""

    NONE = ""
    ASK = "asks for a message"
    ASK_DEAD = "asks for a dead letter"
    SETTLE = "settles the message in flight"
    IGNORE_WAITING = "sspq: asked for a message while already waiting for one"
    IGNORE_HOLDING = "sspq: asked for a message while one is unconfirmed"
    IGNORE_STRAY = "sspq: confirmed without holding a message"
    IGNORE_UNASKED = "sspq: declined without being asked"
    IGNORE_DIRECTION = "sspq: a frame that only the other side sends"


IGNORED_UNKNOWN = "sspq: unknown frame type, skipped"

_WAITING = (State.WAITING, State.WAITING_DEAD)
_HOLDING = (State.HOLDING, State.HOLDING_DEAD)
_ASKING = (Type.RECEIVE, Type.DEAD_RECEIVE)

SERVER: dict[tuple[State, Type | Act], tuple[State, Effect]] = {
    (State.IDLE, Type.RECEIVE): (State.WAITING, Effect.ASK),
    (State.IDLE, Type.DEAD_RECEIVE): (State.WAITING_DEAD, Effect.ASK_DEAD),
    (State.WAITING, Act.DELIVER): (State.HOLDING, Effect.NONE),
    (State.WAITING, Act.DECLINE): (State.IDLE, Effect.NONE),
    (State.WAITING_DEAD, Act.DELIVER_DEAD): (State.HOLDING_DEAD, Effect.NONE),
    (State.WAITING_DEAD, Act.DECLINE): (State.IDLE, Effect.NONE),
    (State.HOLDING, Type.CONFIRM): (State.IDLE, Effect.SETTLE),
    (State.HOLDING_DEAD, Type.CONFIRM): (State.IDLE, Effect.SETTLE),
    (State.IDLE, Type.CONFIRM): (State.IDLE, Effect.IGNORE_STRAY),
    **{(state, Type.CONFIRM): (state, Effect.IGNORE_STRAY) for state in _WAITING},
    **{(state, asked): (state, Effect.IGNORE_WAITING) for state in _WAITING for asked in _ASKING},
    **{(state, asked): (state, Effect.IGNORE_HOLDING) for state in _HOLDING for asked in _ASKING},
    **{(state, Type.NO_RECEIVE): (state, Effect.IGNORE_DIRECTION) for state in State},
}
"""What a server session does with each control frame, and what it may do itself."""

CLIENT: dict[tuple[State, Type], tuple[State, Effect]] = {
    (State.IDLE, Type.RECEIVE): (State.WAITING, Effect.NONE),
    (State.IDLE, Type.DEAD_RECEIVE): (State.WAITING_DEAD, Effect.NONE),
    (State.WAITING, Type.SEND): (State.HOLDING, Effect.NONE),
    (State.WAITING_DEAD, Type.SEND): (State.HOLDING_DEAD, Effect.NONE),
    (State.WAITING, Type.NO_RECEIVE): (State.IDLE, Effect.NONE),
    (State.WAITING_DEAD, Type.NO_RECEIVE): (State.IDLE, Effect.NONE),
    (State.HOLDING, Type.CONFIRM): (State.IDLE, Effect.NONE),
    (State.HOLDING_DEAD, Type.CONFIRM): (State.IDLE, Effect.NONE),
    **{(state, Type.NO_RECEIVE): (state, Effect.IGNORE_UNASKED) for state in (State.IDLE, *_HOLDING)},
}
"""What a client session may send, and what it makes of the server's SEND and NO_RECEIVE frames."""

_IGNORED = frozenset(effect for effect in Effect if effect.name.startswith("IGNORE"))


class ServerSession:
    """The broker's end of one SSPQ connection, which talks to one queue."""

    LOST_TO: ClassVar[Where] = Where.TAIL
    """Where a message goes whose consumer is lost, after its retry counter was lowered."""

    def __init__(
        self,
        queue: str = QUEUE_DEFAULT,
        *,
        payload_bytes_max: int = sspq.PAYLOAD_BYTES_MAX,
        share: int = SHARE,
    ) -> None:
        self.queue = queue
        self.state = State.IDLE
        self.held: tuple[bytes, int] | None = None  # origin and offset of the message in flight
        self.reader = FrameReader(payload_bytes_max=payload_bytes_max, share=share)
        self._salvaged: list[Command] = []

    @property
    def held_bytes(self) -> int:
        """What it keeps of what its peer has said."""
        return self.reader.held_bytes

    @property
    def position(self) -> int:
        """How many bytes of the stream have been read."""
        return self.reader.position

    def receive(self, data: bytes | bytearray | memoryview) -> list[Command]:
        """What the peer wants with a chunk. The caller may reuse `data` afterwards."""
        try:
            events = self.reader.feed(data)
        except PeerViolation:
            self._salvaged = self._commands(self.reader.salvage())
            raise
        return self._commands(events)

    def salvage(self) -> list[Command]:
        """After a violation: the commands before it in the same chunk. Gives them once."""
        commands, self._salvaged = self._salvaged, []
        return commands

    def deliver(self, queue: str, slices: Iterable[Slice], now_us: int, dead: bool = False) -> bytes:
        """The one message that was asked for, as one buffer for one write."""
        pieces = [piece for piece in slices if len(piece)]
        if queue != self.queue or sum(map(len, pieces)) != 1:
            raise MisuseError(
                f"sspq: a delivery is one message of queue {self.queue!r}, "
                f"not {sum(map(len, pieces))} of {queue!r}"
            )
        after = self._after(Act.DELIVER_DEAD if dead else Act.DELIVER)
        encoded = sspq.encode_slices(pieces)
        self.state = after
        self.held = (pieces[0].origin, pieces[0].offset_start)
        return encoded

    def decline(self) -> bytes:
        """Tells a waiting peer that none will come."""
        self.state = self._after(Act.DECLINE)
        return sspq.NO_RECEIVE

    def synced(self, *, refused: bool) -> bytes:
        """Everything that the peer had said when it asked for this is stored; or not all of it."""
        return sspq.SYNC_FRAMES[sspq.SYNC_REFUSED if refused else sspq.SYNC]

    def _after(self, act: Act) -> State:
        cell = SERVER.get((self.state, act))
        if cell is None:
            raise MisuseError(f"sspq: queue {self.queue!r}: cannot {act.value} while {self.state.value}")
        return cell[0]

    def _commands(self, events: list[Event]) -> list[Command]:
        commands: list[Command] = []
        ignored: Counter[tuple[str, str]] = Counter()
        for event in events:
            if isinstance(event, Messages):
                commands.append(Publish(self.queue, event.batch))
            elif isinstance(event, Control):
                self._control(event, commands, ignored)
            elif event.type_byte == sspq.SYNC:
                commands.append(Sync())
            else:
                ignored[IGNORED_UNKNOWN, f"type {event.type_byte:#04x}"] += event.count
        commands += [Ignored(reason, count, detail) for (reason, detail), count in ignored.items()]
        return commands

    def _control(self, event: Control, commands: list[Command], ignored: Counter[tuple[str, str]]) -> None:
        for done in range(event.count):
            before = (self.state, len(commands))
            effects = [self._step(type_, commands) for type_ in event.types]
            # A round that changed nothing and asked for nothing is the same every time: the rest of
            # the frames is only counted.
            still = (self.state, len(commands)) == before
            rounds = event.count - done if still else 1
            for effect in effects:
                if effect in _IGNORED:
                    ignored[effect.value, ""] += rounds
            if still:
                return

    def _step(self, type_: Type, commands: list[Command]) -> Effect:
        state = self.state
        self.state, effect = SERVER[state, type_]
        if effect is Effect.ASK or effect is Effect.ASK_DEAD:
            commands.append(Consume(self.queue, credit=1, dead=effect is Effect.ASK_DEAD, once=True))
        elif effect is Effect.SETTLE and self.held is not None:
            origin, offset = self.held
            self.held = None
            dead = state is State.HOLDING_DEAD
            commands.append(Settle(self.queue, Outcome.ACK, origin, [(offset, offset + 1)], dead=dead))
        return effect


@dataclass(slots=True)
class Delivery:
    """A message that this client asked for and now holds until it confirms."""

    payload: bytes
    retries: int  # what is left
    dead: bool


@dataclass(slots=True)
class Declined:
    """The server says that none will come."""

    dead: bool


@dataclass(slots=True)
class Synced:
    """The server says that everything before the question is stored; or that it has refused some of it."""

    refused: bool


Answer = Delivery | Declined | Synced | Ignored


class ClientSession:
    """A client's end of one SSPQ connection. Every method but `receive` returns bytes to write."""

    def __init__(self, *, payload_bytes_max: int = sspq.PAYLOAD_BYTES_MAX) -> None:
        self.state = State.IDLE
        self._payload_bytes_max = payload_bytes_max
        self._reader = FrameReader(payload_bytes_max=payload_bytes_max)
        self._violation: PeerViolation | None = None
        self._salvaged: list[Answer] = []

    def send(self, batch: Batch) -> bytes:
        """Messages for the server's queue, as one buffer. No retry counter is sent as 255."""
        if len(batch.payload) > self._payload_bytes_max:
            largest = max(end - start for start, end in pairwise(batch.bounds))
            if largest > self._payload_bytes_max:
                raise MisuseError(f"sspq: a message of {largest} bytes is over {self._payload_bytes_max}")
        return sspq.encode_batch(batch)

    def ask(self, *, dead: bool = False) -> bytes:
        """Asks for one message, or one dead letter."""
        self.state = self._after(Type.DEAD_RECEIVE if dead else Type.RECEIVE)
        return sspq.DEAD_RECEIVE if dead else sspq.RECEIVE

    def confirm(self) -> bytes:
        """Settles the message that this client holds. Write it together with the next `ask`."""
        self.state = self._after(Type.CONFIRM)
        return sspq.CONFIRM

    def sync(self) -> bytes:
        """Asks whether everything so far is stored. Possible in every state."""
        return sspq.SYNC_FRAMES[sspq.SYNC]

    def receive(self, data: bytes | bytearray | memoryview) -> list[Answer]:
        """What the server says with a chunk. The caller may reuse `data` afterwards.

        A message that nobody asked for is a violation: the server would wait for its confirmation
        for ever. The violation's position is then that of the chunk's end.
        """
        if self._violation is not None:
            raise self._violation
        violation = None
        try:
            events = self._reader.feed(data)
        except PeerViolation as raised:
            violation, events = raised, self._reader.salvage()
        answers: list[Answer] = []
        try:
            for event in events:
                self._event(event, answers)
        except PeerViolation as raised:
            violation = raised  # it stands before what the reader may have found
        if violation is not None:
            self._violation, self._salvaged = violation, answers
            raise violation
        return answers

    def salvage(self) -> list[Answer]:
        """After a violation: what came before it in the same chunk. Gives it once."""
        answers, self._salvaged = self._salvaged, []
        return answers

    def _after(self, type_: Type) -> State:
        cell = CLIENT.get((self.state, type_))
        if cell is None:
            raise MisuseError(f"sspq: a client that is {self.state.value} cannot send {type_.name}")
        return cell[0]

    def _event(self, event: Event, answers: list[Answer]) -> None:
        if isinstance(event, Messages):
            for payload, left in zip(event.batch.messages(), event.batch.retries or (), strict=True):
                self._message(payload, left, answers)
        elif isinstance(event, Control):
            for type_ in event.types * event.count:
                self._control(type_, answers)
        elif event.type_byte in sspq.SYNC_FRAMES:
            answers += [Synced(event.type_byte == sspq.SYNC_REFUSED) for _ in range(event.count)]
        else:
            _ignore(answers, Ignored(IGNORED_UNKNOWN, event.count, f"type {event.type_byte:#04x}"))

    def _message(self, payload: bytes, left: int, answers: list[Answer]) -> None:
        cell = CLIENT.get((self.state, Type.SEND))
        if cell is None:
            raise PeerViolation(
                sspq.PROTOCOL,
                f"a message for a client that is {self.state.value}",
                position=self._reader.position,
                offending=payload,
            )
        answers.append(Delivery(payload, left, self.state is State.WAITING_DEAD))
        self.state = cell[0]

    def _control(self, type_: Type, answers: list[Answer]) -> None:
        if type_ is not Type.NO_RECEIVE:
            _ignore(answers, Ignored(Effect.IGNORE_DIRECTION.value))
            return
        state = self.state
        self.state, effect = CLIENT[state, type_]
        if effect in _IGNORED:
            _ignore(answers, Ignored(effect.value))
        else:
            answers.append(Declined(state is State.WAITING_DEAD))


def _ignore(answers: list[Answer], ignored: Ignored) -> None:
    """Adds to the count of the last answer where that says the same."""
    last = answers[-1] if answers else None
    if isinstance(last, Ignored) and (last.reason, last.detail) == (ignored.reason, ignored.detail):
        last.count += ignored.count
    else:
        answers.append(ignored)
