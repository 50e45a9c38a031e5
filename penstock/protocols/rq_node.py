"""The node's end of an RQ connection: requester, consumer or both.

A `NodeSession` owns what one connection to one controller knows: the ids of its requests that
are not answered, the deliveries that it holds, the queues it consumes and the ids they were
given, the controller's silence, and how far the two have come in saying goodbye. The tables are
in `rq_session.py`. Calls return the bytes to send, `receive` returns events for many messages
each; PONG, PING and UNDELIVERED for a delivery that nobody asked for wait in `take_output`.

Rules that always hold:
  * A request id is between 0 and 32767, and is given again only when its exchange is over.
  * A call that is refused with `MisuseError` has changed nothing.
  * A delivery of a queue that was cancelled is still told: the controller sent it before it knew.

How it fails: `MisuseError` for a call that the tables do not allow, `PeerViolation` for a stream
that cannot be trusted, also where the controller gives a delivery id twice: an answer would then
reach the wrong requester.

Which controller to use is in `Controllers`: SERVER_FULL, a failed connect or a silent controller
moves it to the back of the list.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.model.batch import Batch
from penstock.model.words import Ignored
from penstock.protocols import rq
from penstock.protocols.errors import MisuseError, PeerViolation
from penstock.protocols.rq import Command, Limits, Name
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
    pick,
    step,
)


@dataclass(slots=True)
class Deliveries:
    """Work for this consumer. Answer with `delivered`, and with `reply` unless `noreply`."""

    queue: str
    ids: "array[int]"  # the controller's delivery ids
    batch: Batch
    noreply: bool


@dataclass(slots=True)
class Receipts:
    """These requests of `send` are durable."""

    ids: "array[int]"


@dataclass(slots=True)
class Taken:
    """Consumers work on these requests of `request`; the answers follow."""

    ids: "array[int]"


@dataclass(slots=True)
class Answers:
    """The answers to requests of `request`."""

    ids: "array[int]"
    batch: Batch


@dataclass(slots=True)
class Failed:
    """These requests were not delivered, and will not be answered."""

    ids: "array[int]"


@dataclass(slots=True)
class Heard:
    """Broadcasts to a queue that this node consumes."""

    queue: str
    batch: Batch


@dataclass(slots=True)
class Consuming:
    """It is our turn to consume this queue."""

    queue: str


@dataclass(slots=True)
class ControllerClosing:
    """Nothing new begins here; connect to another controller."""


@dataclass(slots=True)
class ControllerFull:
    """There is no room here; connect to another controller."""


NodeEvent = (
    Deliveries
    | Receipts
    | Taken
    | Answers
    | Failed
    | Heard
    | Consuming
    | ControllerClosing
    | ControllerFull
    | Ignored
)

_TOLD: dict[tuple[Exchange, Step], type[Receipts] | type[Taken] | type[Failed]] = {
    (Exchange.NOTICE, Step.DELIVERED): Receipts,
    (Exchange.REQUEST, Step.DELIVERED): Taken,
    (Exchange.TAKEN, Step.DELIVERED): Taken,
    (Exchange.NOTICE, Step.UNDELIVERED): Failed,
    (Exchange.REQUEST, Step.UNDELIVERED): Failed,
    (Exchange.TAKEN, Step.UNDELIVERED): Failed,
}
"""What the end of an exchange, or its being taken, is to its requester."""

_AFTER = {
    how: tuple(int(EXCHANGES.get((state, how), state)) for state in Exchange)
    for how in (Step.DELIVERED, Step.REPLY, Step.UNDELIVERED)
}
"""By step and state: the next state. Where the table has none, the state stays."""

_FREE = int(Exchange.FREE)
_NOTICE = int(Exchange.NOTICE)

_FAREWELLS: dict[Command, tuple[Farewell, type[ControllerClosing] | type[ControllerFull]]] = {
    Command.CLOSING: (Farewell.CONTROLLER_CLOSING, ControllerClosing),
    Command.SERVER_FULL: (Farewell.SERVER_FULL, ControllerFull),
}


class NodeSession:
    """One connection to a controller, seen from the node."""

    def __init__(self, now_us: int, *, limits: Limits | None = None, silence_us: int = SILENCE_US) -> None:
        self._limits = limits or Limits()
        self._decoder = Decoder(self._limits)
        self._pulse = Pulse(now_us, silence_us)
        self._connection = Connection.OPEN
        self._output = bytearray()
        self._ignored = IgnoredTally()
        self._violation: PeerViolation | None = None
        self._events: list[NodeEvent] = []  # those of the chunk being read, or to be salvaged
        self._consumers: dict[str, Consumer] = {}
        self._queue_names: dict[int, str] = {}  # by queue id
        self._pool = IdPool()
        self._requests = bytearray()  # by request id: the state of its exchange
        self._held: dict[int, int] = {}  # the same by delivery id, which is the controller's to choose

    # -- state ------------------------------------------------------------------------------------

    @property
    def connection(self) -> Connection:
        return self._connection

    @property
    def silent(self) -> bool:
        """The controller has not answered a ping: connect to the next one."""
        return self._pulse.idle

    @property
    def due_us(self) -> int | None:
        """When `tick` has something to do next, where nothing is received before."""
        return self._pulse.due_us

    @property
    def requests(self) -> int:
        """How many requests are not answered."""
        return self._pool.taken

    @property
    def held(self) -> int:
        """How many deliveries wait for our DELIVERED or REPLY."""
        return len(self._held)

    @property
    def consumes(self) -> bool:
        """Whether a queue is consumed or asked for here: then the connection is kept, silent or not."""
        return any(state in (Consumer.ASKED, Consumer.CONSUMING) for state in self._consumers.values())

    def consumer(self, queue: str) -> Consumer:
        return self._consumers.get(queue, Consumer.NONE)

    def free_requests(self) -> int:
        """How many more requests may be under way."""
        return self._pool.available

    # -- out --------------------------------------------------------------------------------------

    def consume(
        self, queue: str, *, credit: int = 0, priority: int = rq.PRIORITY_DEFAULT, exclusive: bool = False
    ) -> bytes:
        """Ask for a queue (or for `NAME.dead`): at most `credit` deliveries held, 0 for no bound."""
        self._may_begin(f"consuming queue {queue!r}")
        frame = rq.encode_consume(queue, credit, priority, exclusive)
        before = self.consumer(queue)
        self._consumers[queue] = step(CONSUMERS, before, Command.CONSUME, f"consumer of queue {queue!r}")
        return frame

    def cancel(self, queue: str) -> bytes:
        """End consuming; what is held may still be answered."""
        before = self.consumer(queue)
        self._consumers[queue] = step(CONSUMERS, before, Command.CANCEL_QUEUE, f"consumer of queue {queue!r}")
        return rq.encode_cancel(queue)

    def request(self, queue: str, batch: Batch, *, timeout_seconds: int = 0) -> tuple["array[int]", bytes]:
        """Requests that want an answer: their ids, and the bytes to send."""
        return self._request(queue, batch, Step.REQUEST, timeout_seconds)

    def send(self, queue: str, batch: Batch) -> tuple["array[int]", bytes]:
        """Messages that want no answer; `Receipts` says when they are durable."""
        return self._request(queue, batch, Step.NOTICE, 0)

    def broadcast(self, queue: str, batch: Batch) -> bytes:
        self._may_begin(f"a broadcast to queue {queue!r}")
        self._check_sizes(queue, batch)
        return rq.encode_broadcasts(queue, batch)

    def delivered(self, ids: Sequence[int]) -> bytes:
        """We have taken these deliveries. For NOREPLY that settles them."""
        self._answer(ids, Step.DELIVERED)
        return rq.encode_delivered(ids)

    def reply(self, ids: Sequence[int], answers: Batch) -> bytes:
        """We are done with these deliveries: one answer for each."""
        if len(ids) != len(answers):
            raise MisuseError(f"{len(answers)} answers for {len(ids)} deliveries: each needs one")
        for ident in ids:
            if self._held.get(ident) == _NOTICE:
                raise MisuseError(f"delivery {ident}: it wants no reply; say delivered()")
        self._answer(ids, Step.REPLY)
        return rq.encode_node_replies(ids, answers)

    def closing(self) -> bytes:
        """We leave: nothing new begins, what has begun may finish."""
        self._connection = step(CONNECTIONS, self._connection, Farewell.NODE_CLOSING, "connection")
        return rq.CLOSING

    def take_output(self) -> bytes:
        """What the session has to say by itself; it is forgotten here."""
        output = bytes(self._output)
        self._output.clear()
        return output

    def _may_begin(self, what: str) -> None:
        if self._connection is not Connection.OPEN:
            raise MisuseError(f"{what} cannot begin, the connection is {self._connection.value}")

    def _check_sizes(self, queue: str, batch: Batch) -> None:
        """What the controller's limits would refuse by closing the connection is refused here."""
        bounds, limit = batch.bounds, self._limits.payload_bytes_max
        if bounds[-1] > limit:
            for i in range(len(batch)):
                if bounds[i + 1] - bounds[i] > limit:
                    size = bounds[i + 1] - bounds[i]
                    raise MisuseError(f"queue {queue!r}: message {i} has {size} bytes, the limit is {limit}")
        if batch.ttl_seconds is not None and any(batch.ttl_seconds):
            raise MisuseError(f"queue {queue!r}: RQ cannot say a TTL; leave it out, or use timeout_seconds")

    def _request(
        self, queue: str, batch: Batch, how: Step, timeout_seconds: int
    ) -> tuple["array[int]", bytes]:
        self._may_begin(f"a request to queue {queue!r}")
        self._check_sizes(queue, batch)
        count = len(batch)
        if count > self._pool.available:
            raise MisuseError(
                f"queue {queue!r}: {count} requests do not fit, {self._pool.taken} are under way "
                f"and {self._pool.available} more may be; ask free_requests() first"
            )
        taken = self._pool.take(count)
        try:
            noreply = how is Step.NOTICE
            frames = rq.encode_requests(queue, taken, batch, noreply=noreply, timeout_seconds=timeout_seconds)
        except MisuseError:
            self._pool.free(taken)
            raise
        requests = self._requests
        requests.extend(bytes(self._pool.high - len(requests)))
        state = EXCHANGES[Exchange.FREE, how]
        for ident in taken:
            requests[ident] = state
        return array("I", taken), frames

    def _answer(self, ids: Sequence[int], how: Step) -> None:
        """Our step in exchanges that the controller began: all of them or none."""
        held, after = self._held, _AFTER[how]
        if len(set(ids)) != len(ids):
            raise MisuseError(f"{how.value}: a delivery is named twice in {list(ids)[:20]}")
        for ident in ids:
            if ident not in held:
                raise MisuseError(f"delivery {ident}: {how.value} is not possible, it is not held")
        for ident in ids:
            state = after[held[ident]]
            if state == _FREE:
                del held[ident]
            else:
                held[ident] = state

    # -- in ---------------------------------------------------------------------------------------

    def receive(self, data: bytes | bytearray | memoryview, now_us: int) -> list[NodeEvent]:
        """The events of a received chunk. The chunk may be reused afterwards."""
        if self._violation is not None:
            raise self._violation
        if len(data):
            self._pulse.heard(now_us)
        violation: PeerViolation | None = None
        try:
            events = self._decoder.feed(data)
        except PeerViolation as found:
            violation, events = found, self._decoder.salvage()
        try:
            for event in events:
                _HANDLERS[type(event)](self, event)
        except PeerViolation as found:
            violation = found  # it stands before what the decoder may have found
        if violation is not None:
            self._violation = violation
            raise violation
        return self.salvage()

    def salvage(self) -> list[NodeEvent]:
        """After a violation: the events before it in the same chunk. Gives them once."""
        events, self._events = self._events, []
        events += self._ignored.take()
        return events

    def tick(self, now_us: int) -> bool:
        """Ping a silent controller. True where `silent` has changed since the last tick."""
        if self._pulse.tick(now_us):
            self._output += rq.PING
        return self._pulse.changed()

    def _on_requests(self, event: rq.Requests) -> None:
        name = self._named(event.queue)
        if name is None or self.consumer(name) is Consumer.NONE:
            # The original library answers this way, too.
            self._output += rq.encode_undelivered(event.ids)
            self._ignored.add(
                "REQUEST of a queue that is not consumed", f"queue {event.queue!r}", len(event.ids)
            )
            return
        state = EXCHANGES[Exchange.FREE, Step.NOTICE if event.noreply else Step.REQUEST]
        held, ids, batch = self._held, event.ids, event.batch
        repeated = False
        for position, ident in enumerate(ids):
            if ident in held:
                repeated = True
                ids, batch = ids[:position], pick(batch, range(position))
                break
            held[ident] = state
        if ids:
            self._events.append(Deliveries(name, ids, batch, event.noreply))
        if repeated:
            raise PeerViolation(
                "RQ",
                f"delivery id {ident} is given again while it is held",
                position=self._decoder.position,
                offending=ident.to_bytes(4, "big"),
            )

    def _on_delivered(self, event: rq.Delivered) -> None:
        self._hear(event.ids, Step.DELIVERED)

    def _on_undelivered(self, event: rq.Undelivered) -> None:
        self._hear(event.ids, Step.UNDELIVERED)

    def _hear(self, ids: "array[int]", how: Step) -> None:
        """The controller's step in exchanges that we began."""
        requests, known, after = self._requests, len(self._requests), _AFTER[how]
        groups: dict[int, list[int]] = {}  # by state: ids
        group: list[int] = []
        last = -1
        for ident in ids:
            state = requests[ident] if ident < known else _FREE
            if state != last:
                last = state
                group = groups.setdefault(state, [])
            group.append(ident)
            if state != _FREE:
                requests[ident] = after[state]
        events: dict[type[Receipts] | type[Taken] | type[Failed], array[int]] = {}
        for state, group in groups.items():
            told = _TOLD.get((Exchange(state), how))
            if told is None:
                self._ignored.add(f"{how.value} for a request that is not under way", count=len(group))
                continue
            if after[state] == _FREE:
                self._pool.free(group)
            events.setdefault(told, array("I")).fromlist(group)
        self._events += [told(idents) for told, idents in events.items()]

    def _on_replies(self, event: rq.Replies) -> None:
        requests, known = self._requests, len(self._requests)
        answered: list[int] = []  # positions in the batch
        receipts: list[int] = []
        strays = 0
        for position, ident in enumerate(event.ids):
            state = requests[ident] if ident < known else _FREE
            if state == _FREE:
                strays += 1
                continue
            requests[ident] = _FREE
            (receipts if state == _NOTICE else answered).append(position)
        if receipts:
            # Nobody waits for the answer, but a request that was answered has arrived.
            ids = [event.ids[position] for position in receipts]
            self._ignored.add("REPLY to a NOREPLY request", f"request {ids[0]}", len(ids))
            self._pool.free(ids)
            self._events.append(Receipts(array("I", ids)))
        if answered:
            whole = len(answered) == len(event.ids)
            ids = [event.ids[position] for position in answered]
            self._pool.free(ids)
            self._events.append(
                Answers(array("I", ids), event.batch if whole else pick(event.batch, answered))
            )
        if strays:
            self._ignored.add("REPLY for a request that is not under way", count=strays)

    def _on_broadcasts(self, event: rq.Broadcasts) -> None:
        name = self._named(event.queue)
        if name is None or self.consumer(name) is Consumer.NONE:
            self._ignored.add(
                "BROADCAST of a queue that is not consumed", f"queue {event.queue!r}", len(event.batch)
            )
        else:
            self._events.append(Heard(name, event.batch))

    def _on_consuming(self, event: rq.Consuming) -> None:
        before = self.consumer(event.queue)
        if before is Consumer.NONE:
            self._ignored.add("CONSUMING of a queue that was not asked for", f"queue {event.queue!r}")
            return
        self._queue_names[event.queue_id] = event.queue
        after = CONSUMERS.get((before, Command.CONSUMING))
        if after is None:
            return  # It was cancelled while this was on its way.
        self._consumers[event.queue] = after
        if before is Consumer.ASKED:
            self._events.append(Consuming(event.queue))

    def _on_signal(self, event: rq.Signal) -> None:
        if event.command is Command.PING:
            self._output += rq.PONG * event.count
        elif event.command is not Command.PONG:
            farewell, told = _FAREWELLS[event.command]
            after = CONNECTIONS.get((self._connection, farewell))
            if after is not None:
                self._connection = after
                self._events.append(told())
            if event.count > (after is not None):
                reason = f"{farewell.value} while it is {self._connection.value}"
                self._ignored.add(reason, count=event.count - (after is not None))

    def _on_malformed(self, event: rq.Malformed) -> None:
        self._ignored.add(event.reason, "" if event.ident is None else f"id {event.ident}", event.count)

    def _on_skipped(self, event: rq.Skipped) -> None:
        seen = ", ".join(str(command) for command in sorted(event.commands))
        self._ignored.add("unknown command", f"commands {seen}", sum(event.commands.values()))

    def _on_node_word(self, event: rq.ConsumeAsked | rq.CancelAsked) -> None:
        self._ignored.add("a node's command from a controller", f"queue {event.queue!r}")

    def _named(self, name: Name) -> str | None:
        return name if isinstance(name, str) else self._queue_names.get(name)


# A handler takes the event of its own key, which a dict's type cannot say: hence Any.
_HANDLERS: dict[type, Callable[[NodeSession, Any], None]] = {
    rq.Requests: NodeSession._on_requests,
    rq.Replies: NodeSession._on_replies,
    rq.Delivered: NodeSession._on_delivered,
    rq.Undelivered: NodeSession._on_undelivered,
    rq.Broadcasts: NodeSession._on_broadcasts,
    rq.ConsumeAsked: NodeSession._on_node_word,
    rq.Consuming: NodeSession._on_consuming,
    rq.CancelAsked: NodeSession._on_node_word,
    rq.Signal: NodeSession._on_signal,
    rq.Malformed: NodeSession._on_malformed,
    rq.Skipped: NodeSession._on_skipped,
}


class Controllers:
    """The controllers of a node, in the order in which to try them."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._addresses = list(addresses)
        if not self._addresses:
            raise MisuseError("a node needs at least one controller")

    @property
    def first(self) -> str:
        return self._addresses[0]

    def move_back(self, address: str) -> str:
        """This one was full, silent or could not be reached: the one to try now."""
        if address not in self._addresses:
            raise MisuseError(f"controller {address!r} is none of {', '.join(self._addresses)}")
        self._addresses.remove(address)
        self._addresses.append(address)
        return self._addresses[0]
