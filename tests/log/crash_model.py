"""The model that a crash run compares the log with: what was promised, and what a crash may take back.

The log is one sequence of records. A crash leaves a prefix of it, so the whole state after a crash
follows from two numbers for each queue: how many messages are left, and how many events. The model
keeps every message with every life that it has had, so it can be cut back to any such prefix, and
then says exactly what there must be: each payload, attribute and place.

It is as plain as it can be: a list of messages, one object each, and no ranges.

Turns: everything that happens between two flushes is one turn, and the records of one turn stand
before all records of the next. So when a receipt says that something of turn T is safe, then
everything of the turns before T is safe.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.log.info import ReaderInfo
from penstock.log.results import Fate
from penstock.model.batch import RETRIES_ENDLESS, RETRIES_NONE, Batch
from penstock.model.ids import id_of
from penstock.model.life import LIVES_ON, Event, Reason
from penstock.model.policy import QueuePolicy, retry_delay_us

SECOND_US = 1_000_000
READY, DEAD, GONE = "ready", "dead", "gone"


class Life(NamedTuple):
    """What is true of a message between two of its events."""

    room: str
    attempts: int
    retries: int
    expires_us: int
    place: tuple[int, int, int]  # compares in the order of delivery
    asks: bool  # an unsettled request: the next opening withdraws it
    died: int = 0  # compares in the order of death
    reason: Reason = Reason.NONE
    payload: bytes | None = None  # None: the one that it came with
    due_us: int = 0  # it is delayed until then; 0: it is not, or not any more
    why: str = ""  # what was said when it was rejected


class Hold(NamedTuple):
    """Who has a message now. A crash forgets it."""

    consumer: str
    dead: bool
    origin: bytes


class Message:
    """One message and all its lives, the present one last."""

    __slots__ = (
        "headers",
        "hold",
        "lives",
        "offset",
        "origin",
        "payload",
        "protocol",
        "reply",
        "time_us",
        "turn",
    )

    def __init__(self, offset: int, batch: Batch, i: int, payload: bytes, time_us: int, turn: int) -> None:
        ttl = batch.ttl_seconds[i] if batch.ttl_seconds is not None else 0
        expires_us = time_us + ttl * SECOND_US if ttl else 0
        retries = batch.retries[i] if batch.retries is not None else RETRIES_NONE
        self.offset = offset
        self.payload = payload
        self.reply = batch.reply[i] if batch.reply is not None else None
        self.protocol = batch.protocol
        self.time_us = time_us
        self.turn = turn  # in which it was accepted
        self.origin = b""  # when somebody was told
        self.hold: Hold | None = None
        self.headers = batch.headers[i] if batch.headers is not None else b""
        delay_us = batch.delay_us[i] if batch.delay_us is not None else 0
        life = Life(READY, 0, retries, expires_us, (offset, 1, 0), self.reply is not None)
        self.lives = [life._replace(due_us=time_us + delay_us if delay_us else 0)]

    @property
    def life(self) -> Life:
        return self.lives[-1]


class Happening(NamedTuple):
    """An event of a message, and the turn in which it was recorded."""

    message: Message
    turn: int
    event: Event
    reason: Reason


class QueueModel:
    """One queue: its messages by offset, and its events in order."""

    def __init__(self, name: str, policy: QueuePolicy) -> None:
        self.name = name
        self.policy = policy
        self.durability = policy.durability
        self.messages: list[Message] = []
        self.happenings: list[Happening] = []  # every event but acceptance
        self.safe_offset = 0  # every message below it was promised to survive a power cut
        self.written_offset = 0  # and a crash of the process
        self.safe_event = 0  # every event below it was shown to a reader
        self.sequence = 0

    # --- what happens ----------------------------------------------------------------------------

    def happens(
        self,
        message: Message,
        event: Event,
        reason: Reason,
        turn: int,
        expires_us: int | None = None,
        payload: bytes | None = None,
        due_us: int = 0,
        why: str = "",
    ) -> None:
        """An arrow of the message's life. `expires_us`: a consumer gave it a new one; `payload`: likewise,
        whoever has redriven it; `due_us`: until when it is delayed; `why`: what was said with it."""
        life, hold = message.life, message.hold
        self.sequence += 1
        delivered = hold is not None and not hold.dead and reason is not Reason.CONSUMER_CANCELLED
        attempts = life.attempts + delivered
        if event is Event.DEAD:
            if hold is not None and hold.dead:
                attempts += 1
            after = life._replace(room=DEAD, attempts=attempts, asks=False, died=self.sequence, reason=reason)
            after = after._replace(due_us=0, why=why or life.why)
        elif event is Event.REDRIVEN:
            stored = message.lives[0]
            after = Life(READY, 0, stored.retries, 0, self._behind_tail(), asks=False)
            after = after._replace(payload=life.payload if payload is None else payload)
        elif hold is not None and hold.dead and event in (Event.REQUEUED, Event.RETURNED):
            after = life._replace(died=self.sequence) if event is Event.REQUEUED else life
        elif event in LIVES_ON:
            counts_down = reason is Reason.CONSUMER_LOST and RETRIES_NONE < life.retries < RETRIES_ENDLESS
            after = life._replace(attempts=attempts, retries=life.retries - counts_down)
            if expires_us is not None:
                after = after._replace(expires_us=expires_us)
            if event is Event.REQUEUED:
                after = after._replace(place=self._behind_tail())
            elif event is Event.DELAYED:
                after = after._replace(place=(message.offset, 1, 0), due_us=due_us)
        else:
            after = life._replace(room=GONE, asks=False, due_us=0)
        message.hold = None
        message.lives.append(after)
        self.happenings.append(Happening(message, turn, event, reason))

    def _behind_tail(self) -> tuple[int, int, int]:
        return len(self.messages), 0, self.sequence

    # --- what must be there ------------------------------------------------------------------------

    def ready(self) -> list[Message]:
        """What can be taken, in the order in which it must come."""
        free = [m for m in self.messages if m.hold is None and m.life.room == READY and not m.life.due_us]
        return sorted(free, key=lambda m: m.life.place)

    def delayed(self) -> list[Message]:
        return [m for m in self.messages if m.life.due_us]

    def due(self, now_us: int) -> None:
        """Whatever was delayed until now is not, also where a crash takes back what came after that."""
        for message in self.messages:
            for at, life in enumerate(message.lives):
                if 0 < life.due_us <= now_us:
                    message.lives[at] = life._replace(due_us=0)

    def dead(self) -> list[Message]:
        free = [m for m in self.messages if m.hold is None and m.life.room == DEAD]
        return sorted(free, key=lambda m: m.life.died)

    def held_by(self, consumer: str) -> list[Message]:
        return [m for m in self.messages if m.hold is not None and m.hold.consumer == consumer]

    def counts(self) -> tuple[int, int, int, int]:
        """Ready, delayed, held, dead, as `describe` gives them."""
        ready = delayed = held = dead = 0
        for message in self.messages:
            hold, room = message.hold, message.life.room
            if hold is not None and not hold.dead:
                held += 1
            elif message.life.due_us:
                delayed += 1
            elif room == READY:
                ready += 1
            elif room == DEAD:
                dead += 1
        return ready, delayed, held, dead

    # --- a crash -----------------------------------------------------------------------------------

    def events_possible(self, messages: int, events: int, dead: int) -> list[int]:
        """How many happenings may be left, when an opening after the crash shows so many messages,
        events and dead letters; most first.

        The opening has withdrawn the requests, which are events of its own: whether a request was
        settled before the crash or withdrawn after it cannot be told, and makes no difference.
        """
        asking = sum(m.life.asks for m in self.messages[:messages])
        died = sum(m.life.room == DEAD for m in self.messages[:messages])
        lives = [len(m.lives) for m in self.messages]
        possible = []
        for left in range(len(self.happenings), -1, -1):
            if messages + left + asking == events and died == dead:
                possible.append(left)
            if left:
                message = self.happenings[left - 1].message
                lives[message.offset] -= 1
                at = lives[message.offset]
                if message.offset < messages:
                    before, after = message.lives[at - 1], message.lives[at]
                    asking += before.asks - after.asks
                    died += (before.room == DEAD) - (after.room == DEAD)
        return possible

    def cut(self, messages: int, happenings: int) -> None:
        """Nothing but the first so many messages and events has ever been."""
        self.cut_happenings(len(self.happenings) - happenings)
        del self.messages[messages:]
        for message in self.messages:
            message.hold = None
        self.safe_offset = min(self.safe_offset, messages)

    def cut_happenings(self, count: int) -> None:
        """The last so many have not happened."""
        kept = len(self.happenings) - count
        for happening in reversed(self.happenings[kept:]):
            happening.message.lives.pop()
        del self.happenings[kept:]

    def withdraw_requests(self, turn: int) -> None:
        """What a new opening does."""
        for message in self.messages:
            if message.life.asks:
                self.happens(message, Event.WITHDRAWN, Reason.REQUESTER_GONE, turn)

    def safe_counts(self, safe_turn: int, killed: bool) -> tuple[int, int]:
        """How many messages and happenings must survive, when everything up to that turn must.

        `killed`: only the process has died, which takes nothing that was written.
        """
        messages = sum(1 for m in self.messages if m.turn <= safe_turn)
        happenings = sum(1 for h in self.happenings if h.turn <= safe_turn)
        return max(messages, self.safe_offset, self.written_offset if killed else 0), happenings


class Transaction(NamedTuple):
    """An attempted transaction: its parts, and where they went (queue, first, end)."""

    key: str
    parts: list[tuple[str, Batch]]
    ranges: list[tuple[str, int, int]]
    stages: list[str] | None = None  # it is a commit of these
    redriven: tuple[tuple[str, int, int], ...] = ()  # happenings of queues that it has brought


class Staged:
    """A part of a transaction; `stage` is its id, which comes with the receipt."""

    __slots__ = ("is_safe", "key", "parts", "stage", "time_us")

    def __init__(self, key: str, parts: list[tuple[str, Batch]], time_us: int) -> None:
        self.key = key
        self.parts = parts
        self.time_us = time_us
        self.stage = ""
        self.is_safe = False  # it was promised, or has survived a power cut

    @property
    def size(self) -> tuple[int, int]:
        """Messages and bytes."""
        return sum(len(batch) for _, batch in self.parts), sum(len(batch.payload) for _, batch in self.parts)


class Ended:
    """The end of all stages of a key: a commit, or somebody has given them up."""

    __slots__ = ("is_safe", "key", "stages", "turn")

    def __init__(self, turn: int, key: str, stages: dict[str, Staged]) -> None:
        self.turn = turn
        self.key = key
        self.stages = stages
        self.is_safe = False  # somebody was told


class Controls(NamedTuple):
    """What control blocks say, as it was after one of them."""

    turn: int
    paused: frozenset[str]
    readers: dict[tuple[str, str], ReaderInfo]  # by name and queue


class Ids:
    """Every id that was ever shown, and the payload that it named."""

    def __init__(self) -> None:
        self._payloads: dict[bytes, bytes] = {}

    def shown(self, origin: bytes, offset: int, payload: bytes) -> None:
        known = self._payloads.setdefault(id_of(origin, offset), payload)
        assert known == payload, (
            f"id {id_of(origin, offset)!r} has named {known[:40]!r} and now names {payload[:40]!r}"
        )


class Model:
    """A whole log: its queues, its clock, and what was promised."""

    def __init__(self, policies: Iterable[tuple[str, QueuePolicy]]) -> None:
        self.queues = {name: QueueModel(name, policy) for name, policy in policies}
        self.now_us = self.latest_us = 1_700_000_000 * SECOND_US
        self.turn = 0
        self.safe_turn = -1  # everything up to this turn was promised to survive a power cut
        self.written_turn = -1  # and a crash of the process
        self.transactions: list[Transaction] = []
        self.stages: dict[str, dict[str, Staged]] = {}  # that are open, by key and id
        self.staging: list[Staged] = []  # of which nobody has heard yet
        self.ended: list[Ended] = []
        self.controls = [Controls(-1, frozenset(), {})]  # the present ones last
        self.ids = Ids()
        self.counts: Counter[str] = Counter()  # what has happened, for people

    def accept(self, queue: QueueModel, batch: Batch, time_us: int = 0) -> tuple[int, int]:
        """The log takes these in; their first offset and the end."""
        first = len(queue.messages)
        for i, payload in enumerate(batch.messages()):
            queue.messages.append(Message(first + i, batch, i, payload, time_us or self.now_us, self.turn))
        return first, first + len(batch)

    def end_stages(self, key: str) -> Ended:
        """All of a key are over."""
        ended = Ended(self.turn, key, self.stages.pop(key, {}))
        self.ended.append(ended)
        return ended

    def confirm(self, queue: QueueModel, end: int, turn: int, *, safe: bool) -> None:
        """A receipt for what was accepted in that turn: synced (`safe`), or written at least."""
        self.counts["receipts"] += 1
        queue.written_offset = max(queue.written_offset, end)
        self.written_turn = max(self.written_turn, turn - 1)
        if safe:
            queue.safe_offset = max(queue.safe_offset, end)
            self.safe_turn = max(self.safe_turn, turn - 1)

    def show(self, queue: QueueModel, origin: bytes, first: int, end: int) -> None:
        """Somebody is told the ids of these messages."""
        for offset in range(first, end):
            self.ids.shown(origin, offset, queue.messages[offset].payload)
            queue.messages[offset].origin = origin

    def happen(
        self,
        queue: QueueModel,
        fates: Sequence[Fate],
        expires_us: int | None = None,
        delay_us: int | None = None,
        why: str = "",
    ) -> None:
        """`delay_us`: what a consumer wanted; None: the queue has one for it."""
        for fate in fates:
            self.counts[fate.event.name.lower()] += fate.end - fate.first
            for offset in range(fate.first, fate.end):
                message = queue.messages[offset]
                after_us = retry_delay_us(queue.policy, message.life.attempts + 1)
                due_us = self.now_us + (after_us if delay_us is None else delay_us)
                queue.happens(message, fate.event, fate.reason, self.turn, expires_us, None, due_us, why)

    def is_over(self, message: Message) -> bool:
        return 0 < message.life.expires_us <= self.now_us

    def all_safe(self) -> None:
        """Everything that is in the model now must survive."""
        for stages in self.stages.values():
            for staged in stages.values():
                staged.is_safe = True
        self.safe_turn = self.turn
        self.turn += 1

    def opened(self) -> None:
        """A new opening: whatever it has found it has synced, and it withdraws the requests."""
        self.all_safe()
        for queue in self.queues.values():
            queue.written_offset = queue.safe_offset = len(queue.messages)
            queue.withdraw_requests(self.turn)
