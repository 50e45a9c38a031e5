"""The controller's end of an RQ connection: received bytes to broker words, deliveries to bytes.

A `ControllerSession` owns what one connection knows: its consumers and the queue ids they were
told, the delivery ids that are out and the offsets behind them, the peer's silence, and how far
the two have come in saying goodbye. The tables are in `rq_session.py`. It does no IO and has no
clock: `receive` and `tick` are told the time, and outgoing methods return bytes. What it answers
by itself (PONG, PING, UNDELIVERED for a request that cannot be taken) waits in `take_output`.

Rules that always hold:
  * A received chunk becomes commands for many messages each; no object per message. A delivery
    that is out is two array entries, indexed by its id; or one of `_notices`, NOREPLY deliveries in the
    order in which they went out, which is also the order in which most consumers are done with them.
    Where one is not, they all become entries.
  * A delivery id is between 0 and 32767, and is given again only when its consumer is done with it.
  * Queues are named to a node by QUEUE as the node itself named them, and by QUEUEID in CONSUMING only.
  * A dead letter is always delivered as NOREPLY: whoever asked has been told long ago.
  * Every request that is refused here is answered with UNDELIVERED and told as `Ignored`.
  * No call fails for what the node has done. `receive` may have read a CANCEL_QUEUE or a CLOSING
    that the broker has not come to yet; until it has, it may deliver, as if that were still on its way.

How it fails: `MisuseError` for a call that the tables do not allow, with nothing changed, and
`PeerViolation` for a stream that cannot be trusted (close it). The commands that came before it in
the same chunk wait in `salvage`.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

from penstock.model import words
from penstock.model.batch import Batch, Slice
from penstock.model.policy import door_of
from penstock.model.words import Command, Outcome, Ranges, ranges_of
from penstock.protocols import rq
from penstock.protocols.errors import MisuseError, PeerViolation
from penstock.protocols.rq import Limits, Name
from penstock.protocols.rq_decoder import Decoder
from penstock.protocols.rq_session import (
    CONNECTIONS,
    CONSUMERS,
    EXCHANGES,
    SILENCE_US,
    Connection,
    Consumer,
    Exchange,
    Farewell,
    IdPool,
    IgnoredTally,
    Pulse,
    Step,
    door_name,
    pick,
    refusal,
    step,
)
from penstock.protocols.share import SHARE, WINDOW_BYTES

IN_ORDER = True
"""Whether a new session settles what is done in order as a whole. Tests of the other way have it off."""

_NAME_BYTES = 200
"""What a queue that was ever consumed takes besides its name: to the end of the connection it has its id."""

_NOTICES_MAX = 64
"""So many of `_notices` there are at most: each is an object, where an entry has 12 bytes."""

_STATE_BITS = 2
_STATE_MASK = (1 << _STATE_BITS) - 1
_NOTICE = int(Exchange.NOTICE)
_AFTER_DELIVERED = tuple(int(EXCHANGES.get((state, Step.DELIVERED), state)) for state in Exchange)
_OPEN: Final = Connection.OPEN  # what comes with every chunk is looked up once
_LEAVING: Final = Connection.LEAVING
_NOT_CONSUMED = frozenset({Consumer.NONE, Consumer.CANCELLED})


class _Shared(NamedTuple):
    """What many deliveries have in common, so that each needs a number only."""

    queue: str
    dead: bool
    origin: bytes


class _Notices:
    """NOREPLY deliveries of neighbours that went out in order: their ids, and the first one's offset."""

    __slots__ = ("ids", "number", "offset")

    def __init__(self, ids: "array[int]", offset: int, number: int) -> None:
        self.ids = ids
        self.offset = offset
        self.number = number  # of what they share


class ControllerSession:
    """One node's connection, seen from the controller."""

    def __init__(
        self,
        now_us: int,
        *,
        limits: Limits | None = None,
        silence_us: int = SILENCE_US,
        share: int = SHARE,
    ) -> None:
        self._limits = limits or Limits()
        self.reader = Decoder(self._limits, share)
        self._pulse = Pulse(now_us, silence_us)
        self._connection = Connection.OPEN
        self._output = bytearray()
        self._ignored = IgnoredTally()
        self._commands: list[Command] = []  # those of the chunk being read, or to be salvaged
        self._consumers: dict[str, Consumer] = {}  # by the name that the node uses
        self._consumed = 0  # how many of them are not cancelled
        self._unanswered: dict[str, int] = {}  # CONSUMEs without their CONSUMING
        self._queue_ids: dict[str, int] = {}
        self._queue_names: list[str] = []  # index + 1 is the queue id
        self._names_bytes = 0  # what all these take
        self._pool = IdPool()
        self._shared: list[_Shared] = []
        self._shared_numbers: dict[tuple[str, bool, bytes], int] = {}  # by queue, dead and origin
        # By delivery id: the offset, and a tag (the number of what is shared, and the exchange's state in the
        # last bits).
        self._offsets = array("q")
        self._tags = array("i")
        self._notices: list[_Notices] = []
        self._in_order = IN_ORDER

    # -- state ------------------------------------------------------------------------------------

    @property
    def connection(self) -> Connection:
        return self._connection

    @property
    def idle(self) -> bool:
        """The node has not answered a ping: no new work for it until it is heard again."""
        return self._pulse.idle

    @property
    def pulse(self) -> str:
        """awake, pinged or idle."""
        return self._pulse.state.name.lower()

    @property
    def due_us(self) -> int | None:
        """When `tick` has something to do next, where nothing is received before."""
        return self._pulse.due_us

    @property
    def held_bytes(self) -> int:
        """What it keeps of what its peer has said, with what consumers take elsewhere."""
        return self.reader.held_bytes + WINDOW_BYTES * self._consumed + self._names_bytes

    @property
    def deliveries(self) -> int:
        """How many deliveries are out."""
        return self._pool.taken

    def free_deliveries(self) -> int:
        """How many more deliveries may begin: the ids are limited, and none begins once we are closing."""
        return self._pool.available if self._may_deliver() else 0

    def _may_deliver(self) -> bool:
        return self._connection is _OPEN or self._connection is _LEAVING

    def consumer(self, queue: str, *, dead: bool = False) -> Consumer:
        return self._consumers.get(door_name(queue, dead), Consumer.NONE)

    # -- in ---------------------------------------------------------------------------------------

    def receive(self, data: bytes | bytearray | memoryview, now_us: int) -> list[Command]:
        """The commands of a received chunk. The chunk may be reused afterwards."""
        if len(data):
            self._pulse.heard(now_us)
        try:
            events = self.reader.feed(data)
        except PeerViolation:
            self._handle(self.reader.salvage())
            raise
        self._handle(events)
        return self.salvage()

    def salvage(self) -> list[Command]:
        """After a violation: the commands before it in the same chunk. Gives them once."""
        commands, self._commands = self._commands, []
        commands += self._ignored.take()
        return commands

    def _handle(self, events: list[rq.Event]) -> None:
        for event in events:
            _HANDLERS[type(event)](self, event)

    def tick(self, now_us: int) -> bool:
        """Ping a silent node, mark it idle. True where `idle` has changed since the last tick."""
        if self._pulse.tick(now_us):
            self._output += rq.PING
        return self._pulse.changed()

    def take_output(self) -> bytes:
        """What the session has to say by itself; it is forgotten here."""
        if not self._output:
            return b""
        output = bytes(self._output)
        self._output.clear()
        return output

    # -- out --------------------------------------------------------------------------------------

    def consuming(self, queue: str, *, dead: bool = False) -> bytes:
        """The node's turn has come. Nothing where it waits for no answer: the original library dies of it."""
        name = door_name(queue, dead)
        before = self._consumers.get(name, Consumer.NONE)
        queue_id = self._queue_ids.get(name)
        if before is Consumer.NONE:
            raise MisuseError(f"queue {name!r}: the node has never asked to consume it")
        unanswered = self._unanswered.pop(name, 0)
        if not unanswered:
            return b""
        if unanswered > 1:
            self._unanswered[name] = unanswered - 1
        if queue_id is None:
            self._queue_names.append(name)
            queue_id = self._queue_ids[name] = len(self._queue_names)
        self._consumers[name] = CONSUMERS.get((before, rq.Command.CONSUMING), before)
        return rq.encode_consuming(name, queue_id)

    def deliver(self, queue: str, slices: Sequence[Slice], *, dead: bool = False) -> bytes:
        """Requests for a consumer. Messages with a reply address want a reply, all others are NOREPLY."""
        name = self._told(queue, dead)
        count = 0
        for part in slices:
            count += part.hi - part.lo
        if count > self.free_deliveries():
            raise MisuseError(
                f"queue {name!r}: {count} deliveries do not fit, {self._pool.taken} are out and "
                f"{self.free_deliveries()} more may be on a connection that is {self._connection.value}; "
                f"ask free_deliveries() first"
            )
        buffers = []
        for part in slices:
            number = self._shared_number(queue, dead, part.origin)
            runs = [(False, part.lo, part.hi)] if dead or part.reply is None else _reply_runs(part)
            for wants_reply, lo, hi in runs:
                ids = self._pool.take(hi - lo)
                if wants_reply:
                    self._note(ids, part.first_offset + lo, number, Exchange.REQUEST)
                else:
                    self._add_notices(ids, part.first_offset + lo, number)
                bounds = part.bounds[lo : hi + 1]
                buffers.append(rq.encode_deliveries(name, ids, part.payload, bounds, noreply=not wants_reply))
        return buffers[0] if len(buffers) == 1 else b"".join(buffers)

    def broadcast(self, queue: str, batch: Batch) -> bytes:
        """To a consumer. Nothing once we are closing: a broadcast is for whoever is there."""
        name = self._told(queue, dead=False)
        return rq.encode_broadcasts(name, batch) if self._may_deliver() else b""

    def delivered(self, tickets: Iterable[int]) -> bytes:
        """To the requester: a consumer has taken these requests, or these NOREPLY requests are durable."""
        self._may_finish()
        return rq.encode_delivered(tickets)

    def replies(self, tickets: Sequence[int], answers: Batch) -> bytes:
        """To the requester: one answer for each ticket."""
        self._may_finish()
        if len(tickets) != len(answers):
            raise MisuseError(f"{len(answers)} answers for {len(tickets)} tickets: each needs one")
        return rq.encode_replies(tickets, answers)

    def undelivered(self, tickets: Iterable[int]) -> bytes:
        """To the requester: these requests will not be answered."""
        self._may_finish()
        return rq.encode_undelivered(tickets)

    def closing(self) -> bytes:
        """We shut down: nothing new begins, what has begun may finish."""
        self._connection = step(CONNECTIONS, self._connection, Farewell.CONTROLLER_CLOSING, "connection")
        return rq.CLOSING

    def full(self) -> bytes:
        """There is no room for this node: send it and close."""
        self._connection = step(CONNECTIONS, self._connection, Farewell.SERVER_FULL, "connection")
        return rq.SERVER_FULL

    def _told(self, queue: str, dead: bool) -> str:
        """The name of a queue that this node was told it consumes."""
        name = door_name(queue, dead)
        if name not in self._queue_ids:
            raise MisuseError(
                f"queue {name!r}: the node was never told consuming(), so nothing can be given to it"
            )
        return name

    def _may_finish(self) -> None:
        if self._connection is Connection.FULL:
            raise MisuseError("the node was told SERVER_FULL: nothing else can be said to it")

    def _shared_number(self, queue: str, dead: bool, origin: bytes) -> int:
        number = self._shared_numbers.get((queue, dead, origin))
        if number is None:
            number = self._shared_numbers[queue, dead, origin] = len(self._shared)
            self._shared.append(_Shared(queue, dead, origin))
        return number

    def _note(self, ids: "array[int]", offset: int, number: int, state: Exchange) -> None:
        """Write down which offsets are behind delivery ids."""
        offsets, tags = self._offsets, self._tags
        tag = number << _STATE_BITS | state
        grown = self._pool.high - len(tags)
        offsets.frombytes(bytes(grown * offsets.itemsize))
        tags.frombytes(bytes(grown * tags.itemsize))
        for ident in ids:
            offsets[ident] = offset
            tags[ident] = tag
            offset += 1

    def _add_notices(self, ids: "array[int]", offset: int, number: int) -> None:
        notices = self._notices
        last = notices[-1] if notices else None
        if last is not None and last.number == number and last.offset + len(last.ids) == offset:
            last.ids.extend(ids)
            return
        if len(notices) >= _NOTICES_MAX:
            self._note_notices()
        self._notices.append(_Notices(ids, offset, number))

    def _note_notices(self) -> None:
        """Who answers does not keep to their order, or answers others: write them all down."""
        notices, self._notices = self._notices, []
        for some in notices:
            self._note(some.ids, some.offset, some.number, Exchange.NOTICE)

    # -- events -----------------------------------------------------------------------------------

    def _on_requests(self, event: rq.Requests) -> None:
        refused = self._refused("REQUEST", event.queue)
        if refused is None:
            self._commands.append(
                words.Publish(
                    self._named(event.queue),
                    event.batch,
                    tickets=event.ids,
                    wants_reply=not event.noreply,
                    timeout_seconds=event.timeout_seconds,
                )
            )
        else:
            self._output += rq.encode_undelivered(event.ids)
            why, detail = refused
            self._ignored.add(why, f"request {event.ids[0]}: {detail}", len(event.ids))

    def _on_delivered(self, event: rq.Delivered) -> None:
        ids = self._settle_in_order(event.ids) if self._in_order else event.ids
        if not ids:
            return
        self._note_notices()
        tags, offsets, known = self._tags, self._offsets, len(self._tags)
        groups: dict[int, tuple[list[int], list[int]]] = {}  # by tag: delivery ids and their offsets
        idents: list[int] = []
        found: list[int] = []
        last = -1
        after = strays = 0
        for ident in ids:
            if ident >= known:
                strays += 1
                continue
            tag = tags[ident]
            if tag != last:
                last = tag
                idents, found = groups.setdefault(tag, ([], []))
                state = _AFTER_DELIVERED[tag & _STATE_MASK]
                after = tag & ~_STATE_MASK | state if state else 0
            idents.append(ident)
            found.append(offsets[ident])
            tags[ident] = after
        for tag, (idents, found) in groups.items():
            exchange = Exchange(tag & _STATE_MASK)
            if exchange is Exchange.FREE:
                strays += len(idents)
            elif exchange is Exchange.TAKEN:
                self._ignored.add("DELIVERED twice", f"delivery {idents[0]}", len(idents))
            elif exchange is Exchange.NOTICE:
                self._pool.free(idents)
                self._settle(tag >> _STATE_BITS, ranges_of(found))
            else:
                shared = self._shared[tag >> _STATE_BITS]
                self._commands.append(words.Accepted(shared.queue, shared.origin, ranges_of(found)))
        if strays:
            self._ignored.add("DELIVERED for a delivery that is not out", count=strays)

    def _settle_in_order(self, ids: "array[int]") -> "array[int]":
        """Settle the deliveries that went out first, as far as these ids are theirs; the ids behind them."""
        notices = self._notices
        settled: dict[int, Ranges] = {}
        at = done = 0
        while at < len(ids) and done < len(notices):
            first = notices[done]
            count = min(len(first.ids), len(ids) - at)
            whole = count == len(first.ids)
            if (first.ids if whole else first.ids[:count]) != ids[at : at + count]:
                break
            settled.setdefault(first.number, []).append((first.offset, first.offset + count))
            at += count
            if whole:
                done += 1
            else:
                del first.ids[:count]
                first.offset += count
        del notices[:done]
        self._pool.free(ids[:at])
        for number, ranges in settled.items():
            self._settle(number, ranges if len(ranges) == 1 else _merged(ranges))
        return ids[at:]

    def _on_replies(self, event: rq.Replies) -> None:
        self._note_notices()
        ids, batch = event.ids, event.batch
        tags, offsets, known = self._tags, self._offsets, len(self._tags)
        groups: dict[int, list[int]] = {}  # by tag, REQUEST counted as TAKEN: positions in the batch
        members: list[int] = []
        last = -1
        strays = 0
        for position, ident in enumerate(ids):
            tag = tags[ident] if ident < known else 0
            if not tag & _STATE_MASK:
                strays += 1
                continue
            tags[ident] = 0
            tag |= _NOTICE  # makes TAKEN of REQUEST, and leaves NOTICE and TAKEN as they are
            if tag != last:
                last = tag
                members = groups.setdefault(tag, [])
            members.append(position)
        for tag, members in groups.items():
            shared = self._shared[tag >> _STATE_BITS]
            whole = len(members) == len(ids)
            idents = list(ids) if whole else [ids[position] for position in members]
            found = [offsets[ident] for ident in idents]
            self._pool.free(idents)
            if tag & _STATE_MASK == Exchange.NOTICE:
                # The consumer is done with it, which is what counts; there is nobody to answer.
                self._ignored.add("REPLY to a NOREPLY delivery", f"delivery {idents[0]}", len(idents))
                self._settle(tag >> _STATE_BITS, ranges_of(found))
                continue
            answers = batch if whole else pick(batch, members)
            self._commands.append(words.Reply(shared.queue, shared.origin, array("q", found), answers))
        if strays:
            self._ignored.add("REPLY to a delivery that is not out", count=strays)

    def _settle(self, number: int, ranges: Ranges) -> None:
        shared = self._shared[number]
        self._commands.append(
            words.Settle(shared.queue, Outcome.ACK, shared.origin, ranges, dead=shared.dead)
        )

    def _on_broadcasts(self, event: rq.Broadcasts) -> None:
        refused = self._refused("BROADCAST", event.queue)
        if refused is None:
            self._commands.append(words.Broadcast(self._named(event.queue), event.batch))
        else:
            self._ignored.add(*refused, len(event.batch))

    def _on_consume(self, event: rq.ConsumeAsked) -> None:
        name = self._named(event.queue)
        queue, dead = door_of(name)
        refused = self._refused("CONSUME", queue if name else event.queue)
        before = self._consumers.get(name, Consumer.NONE)
        if refused is None and before in _NOT_CONSUMED:
            limit = self._limits.consumed_queues_max
            if self._consumed >= limit:
                refused = "CONSUME of too many queues", f"queue {name!r}: {limit} at once are the limit"
            elif before is Consumer.NONE and len(self._consumers) >= rq.QUEUE_ID_MAX:
                refused = (
                    "CONSUME of too many queues on one connection",
                    f"queue {name!r}: all {rq.QUEUE_ID_MAX} queue ids were given; connect again",
                )
        if refused is not None:
            self._ignored.add(*refused)
            return
        self._consumed += before in _NOT_CONSUMED
        if before is Consumer.NONE:
            self._names_bytes += _NAME_BYTES + len(name)
        self._unanswered[name] = self._unanswered.get(name, 0) + 1
        self._consumers[name] = CONSUMERS[before, rq.Command.CONSUME]
        self._commands.append(
            words.Consume(queue, event.credit, dead=dead, priority=event.priority, exclusive=event.exclusive)
        )

    def _on_cancel(self, event: rq.CancelAsked) -> None:
        name = self._named(event.queue)
        before = self._consumers.get(name, Consumer.NONE)
        after = CONSUMERS.get((before, rq.Command.CANCEL_QUEUE))
        if after is None:
            self._ignored.add("CANCEL_QUEUE of a queue that is not consumed", f"queue {event.queue!r}")
            return
        self._consumers[name] = after
        self._consumed -= 1
        queue, dead = door_of(name)
        self._commands.append(words.Cancel(queue, dead=dead))

    def _on_signal(self, event: rq.Signal) -> None:
        if event.command is rq.Command.PING:
            self._output += rq.PONG * event.count
        elif event.command is rq.Command.CLOSING:
            after = CONNECTIONS.get((self._connection, Farewell.NODE_CLOSING))
            if after is not None:
                self._connection = after
                self._commands.append(words.Closing())
            if event.count > (after is not None):
                self._ignored.add("CLOSING twice", count=event.count - (after is not None))
        elif event.command is rq.Command.SERVER_FULL:
            self._ignored.add("SERVER_FULL from a node", count=event.count)

    def _on_malformed(self, event: rq.Malformed) -> None:
        detail = "" if event.ident is None else f"id {event.ident}"
        if event.command is rq.Command.REQUEST and event.ident is not None:
            self._output += rq.encode_undelivered((event.ident,)) * event.count
        self._ignored.add(event.reason, detail, event.count)

    def _on_skipped(self, event: rq.Skipped) -> None:
        seen = ", ".join(str(command) for command in sorted(event.commands))
        self._ignored.add("unknown command", f"commands {seen}", sum(event.commands.values()))

    def _on_undelivered(self, event: rq.Undelivered) -> None:
        self._ignored.add("UNDELIVERED from a node", f"delivery {event.ids[0]}", len(event.ids))

    def _on_consuming(self, event: rq.Consuming) -> None:
        self._ignored.add("CONSUMING from a node", f"queue {event.queue!r}")

    def _refused(self, action: str, queue: Name) -> tuple[str, str] | None:
        """Why work for a queue cannot begin: the reason, and the case. None: it can."""
        if self._connection is not _OPEN:
            return f"{action} while closing", f"the connection is {self._connection.value}"
        name = self._named(queue)
        if not name and isinstance(queue, int):
            return f"{action} with an unknown QUEUEID", f"queue id {queue}"
        wrong = refusal(name)
        return None if wrong is None else (f"{action} for a queue that cannot be", wrong)

    def _named(self, queue: Name) -> str:
        """The queue's name, also where it was given by the id that this node was told; "" for another id."""
        if isinstance(queue, str):
            return queue
        return self._queue_names[queue - 1] if 1 <= queue <= len(self._queue_names) else ""


# A handler takes the event of its own key, which a dict's type cannot say: hence Any.
_HANDLERS: dict[type, Callable[[ControllerSession, Any], None]] = {
    rq.Requests: ControllerSession._on_requests,
    rq.Replies: ControllerSession._on_replies,
    rq.Delivered: ControllerSession._on_delivered,
    rq.Undelivered: ControllerSession._on_undelivered,
    rq.Broadcasts: ControllerSession._on_broadcasts,
    rq.ConsumeAsked: ControllerSession._on_consume,
    rq.Consuming: ControllerSession._on_consuming,
    rq.CancelAsked: ControllerSession._on_cancel,
    rq.Signal: ControllerSession._on_signal,
    rq.Malformed: ControllerSession._on_malformed,
    rq.Skipped: ControllerSession._on_skipped,
}


def _merged(ranges: Ranges) -> Ranges:
    """Ranges in any order, as `ranges_of` gives those of their offsets."""
    found: Ranges = []
    for first, end in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return found


def _reply_runs(part: Slice) -> list[tuple[bool, int, int]]:
    """The messages of a slice, parted where wanting a reply changes: whether they do, from, to."""
    reply, lo = part.reply or (), part.lo
    if all(reply[lo : part.hi]):
        return [(True, lo, part.hi)]
    runs = []
    for wants_reply, group in groupby(reply[lo : part.hi], key=bool):
        hi = lo + sum(1 for _ in group)
        runs.append((wants_reply, lo, hi))
        lo = hi
    return runs
