"""Both sides joined in memory: whatever they say and however the bytes travel, they end as the tables say.

`Conversation` is a node that asks, sends, consumes and answers as it likes, and a controller with
the smallest broker that can be: a list per queue. The bytes between them arrive in pieces of any
size. At every step both sides' consumers stand where the table puts them for what each has said
and heard; at the end nothing is held, and every message has had exactly the fate that it should.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.model.batch import Batch, Slice
from penstock.model.words import (
    Accepted,
    Broadcast,
    Cancel,
    Closing,
    Command,
    Consume,
    Ignored,
    Outcome,
    Publish,
    Reply,
    Settle,
)
from penstock.protocols import rq
from penstock.protocols.errors import PeerViolation
from penstock.protocols.rq import Command as Word
from penstock.protocols.rq import Limits
from penstock.protocols.rq_controller import ControllerSession
from penstock.protocols.rq_node import (
    Answers,
    Consuming,
    ControllerClosing,
    ControllerFull,
    Deliveries,
    Heard,
    NodeEvent,
    NodeSession,
    Receipts,
    Taken,
)
from penstock.protocols.rq_session import CONNECTIONS, CONSUMERS, Connection, Consumer, Farewell
from tests.protocols.rq_reference import cut

QUEUES = ["a", "b"]
ORIGIN = b"0" * 18
queues = st.sampled_from(QUEUES)
payloads = st.lists(st.binary(max_size=6), min_size=1, max_size=4)


class Conversation(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_us = 0
        self.controller = ControllerSession(0)
        self.node = NodeSession(0)
        self.up, self.down = bytearray(), bytearray()  # bytes on their way to the controller, to the node
        # What the tables say of what each side has said and heard.
        self.node_consumers = dict.fromkeys(QUEUES, Consumer.NONE)
        self.controller_consumers = dict.fromkeys(QUEUES, Consumer.NONE)
        self.node_connection = self.controller_connection = Connection.OPEN
        # The broker: offset is the position in the log; ready are those not delivered.
        self.log: dict[str, list[tuple[bytes, int, bool]]] = {queue: [] for queue in QUEUES}
        self.ready: dict[str, deque[int]] = {queue: deque() for queue in QUEUES}
        self.credit: dict[str, int] = dict.fromkeys(QUEUES, 0)
        self.out: dict[str, set[int]] = {queue: set() for queue in QUEUES}
        # The node: what it has asked and what came of it.
        self.asked: dict[int, bytes] = {}
        self.sent: set[int] = set()
        self.taken: set[int] = set()
        self.held: dict[int, tuple[bytes, bool, bool]] = {}  # payload, noreply, delivered said
        self.arrived: dict[str, list[bytes]] = {queue: [] for queue in QUEUES}
        self.broadcasts_sent = self.broadcasts_heard = 0

    # -- the node speaks ---------------------------------------------------------------------------

    def node_open(self) -> bool:
        return self.node.connection is Connection.OPEN

    @precondition(node_open)
    @rule(queue=queues, credit=st.integers(0, 3))
    def consume(self, queue: str, credit: int) -> None:
        self.up += self.node.consume(queue, credit=credit)
        self.node_consumers[queue] = CONSUMERS[self.node_consumers[queue], Word.CONSUME]

    @rule(queue=queues)
    def cancel(self, queue: str) -> None:
        after = CONSUMERS.get((self.node_consumers[queue], Word.CANCEL_QUEUE))
        if after is not None:
            self.up += self.node.cancel(queue)
            self.node_consumers[queue] = after

    @precondition(node_open)
    @rule(queue=queues, messages=payloads)
    def request(self, queue: str, messages: list[bytes]) -> None:
        ids, wire = self.node.request(queue, Batch.of(messages))
        assert not set(ids) & (set(self.asked) | self.sent)
        self.asked.update(zip(ids, messages, strict=True))
        self.up += wire

    @precondition(node_open)
    @rule(queue=queues, messages=payloads)
    def send(self, queue: str, messages: list[bytes]) -> None:
        ids, wire = self.node.send(queue, Batch.of(messages))
        assert not set(ids) & (set(self.asked) | self.sent)
        self.sent.update(ids)
        self.up += wire

    @precondition(node_open)
    @rule(queue=queues, messages=payloads)
    def broadcast(self, queue: str, messages: list[bytes]) -> None:
        self.up += self.node.broadcast(queue, Batch.of(messages))

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True)) if self.held else []
        say_delivered = [i for i in chosen if not self.held[i][2] and data.draw(st.booleans())]
        self.say_delivered(say_delivered)
        self.say_reply([i for i in chosen if i in self.held and not self.held[i][1]])

    def say_delivered(self, ids: Sequence[int]) -> None:
        self.up += self.node.delivered(ids)
        for ident in ids:
            payload, noreply, _ = self.held[ident]
            if noreply:
                del self.held[ident]
            else:
                self.held[ident] = payload, noreply, True

    def say_reply(self, ids: Sequence[int]) -> None:
        self.up += self.node.reply(ids, Batch.of([b"re:" + self.held[i][0] for i in ids]))
        for ident in ids:
            del self.held[ident]

    # -- goodbye, and silence -----------------------------------------------------------------------

    @precondition(lambda self: (self.node.connection, Farewell.NODE_CLOSING) in CONNECTIONS)
    @rule(really=st.integers(0, 5))
    def node_closing(self, really: int) -> None:
        if not really:
            self.up += self.node.closing()
            self.node_connection = CONNECTIONS[self.node_connection, Farewell.NODE_CLOSING]

    @precondition(lambda self: (self.controller.connection, Farewell.CONTROLLER_CLOSING) in CONNECTIONS)
    @rule(really=st.integers(0, 5))
    def controller_closing(self, really: int) -> None:
        if not really:
            self.down += self.controller.closing()
            self.controller_connection = CONNECTIONS[self.controller_connection, Farewell.CONTROLLER_CLOSING]

    @rule(seconds=st.integers(1, 20))
    def silence(self, seconds: int) -> None:
        self.now_us += seconds * 1_000_000
        self.controller.tick(self.now_us)
        self.node.tick(self.now_us)
        self.down += self.controller.take_output()
        self.up += self.node.take_output()

    # -- bytes travel -------------------------------------------------------------------------------

    @rule(count=st.integers(1, 40) | st.just(10_000))
    def to_controller(self, count: int) -> None:
        chunk = bytes(self.up[:count])
        del self.up[:count]
        while chunk:  # What its share was not enough for is fed to it before anything else.
            for command in self.controller.receive(chunk, self.now_us):
                self.serve(command)
            chunk = self.controller.reader.rest
        self.down += self.controller.take_output()
        self.dispatch()

    @rule(count=st.integers(1, 40) | st.just(10_000))
    def to_node(self, count: int) -> None:
        chunk = bytes(self.down[:count])
        del self.down[:count]
        for event in self.node.receive(chunk, self.now_us):
            self.hear(event)
        self.up += self.node.take_output()

    def serve(self, command: Command) -> None:
        """The smallest broker."""
        if isinstance(command, Publish):
            assert command.tickets is not None
            for payload, ticket in zip(command.batch.messages(), command.tickets, strict=True):
                self.ready[command.queue].append(len(self.log[command.queue]))
                self.log[command.queue].append((payload, ticket, command.wants_reply))
            if not command.wants_reply:
                self.down += self.controller.delivered(command.tickets)
        elif isinstance(command, Consume):
            self.credit[command.queue] = command.credit
            before = self.controller_consumers[command.queue]
            asked = CONSUMERS[before, Word.CONSUME]
            self.controller_consumers[command.queue] = CONSUMERS[asked, Word.CONSUMING]
            self.down += self.controller.consuming(command.queue)
        elif isinstance(command, Cancel):
            before = self.controller_consumers[command.queue]
            self.controller_consumers[command.queue] = CONSUMERS[before, Word.CANCEL_QUEUE]
        elif isinstance(command, Accepted):
            offsets = [offset for first, end in command.ranges for offset in range(first, end)]
            self.down += self.controller.delivered(self.tickets(command.queue, offsets))
        elif isinstance(command, Reply):
            self.settle(command.queue, command.offsets)
            tickets = self.tickets(command.queue, command.offsets)
            self.down += self.controller.replies(tickets, command.answers)
        elif isinstance(command, Settle):
            assert command.outcome is Outcome.ACK
            self.settle(command.queue, [o for first, end in command.ranges for o in range(first, end)])
        elif isinstance(command, Broadcast):
            if (
                self.controller.connection is Connection.OPEN
                and self.controller.consumer(command.queue) is Consumer.CONSUMING
            ):
                self.broadcasts_sent += len(command.batch)
                self.down += self.controller.broadcast(command.queue, command.batch)
        elif isinstance(command, Closing):
            self.controller_connection = CONNECTIONS[self.controller_connection, Farewell.NODE_CLOSING]
        else:
            # The only things in vain: what a node says after a goodbye that it has not heard yet.
            assert self.controller.connection is not Connection.OPEN
            assert isinstance(command, Ignored)
            assert command.reason in (
                "REQUEST while closing",
                "BROADCAST while closing",
                "CONSUME while closing",
                "CANCEL_QUEUE of a queue that is not consumed",
            )

    def tickets(self, queue: str, offsets: Iterable[int]) -> "array[int]":
        assert all(self.log[queue][offset][2] for offset in offsets)
        return array("I", [self.log[queue][offset][1] for offset in offsets])

    def settle(self, queue: str, offsets: Iterable[int]) -> None:
        for offset in offsets:
            self.out[queue].remove(offset)

    def dispatch(self) -> None:
        for queue in QUEUES:
            if self.controller.connection is not Connection.OPEN:
                return
            if self.controller.consumer(queue) is not Consumer.CONSUMING:
                continue
            room = self.credit[queue] - len(self.out[queue]) if self.credit[queue] else 1000
            slices: list[Slice] = []
            while self.ready[queue] and len(slices) < room:
                offset = self.ready[queue].popleft()
                payload, _, wants = self.log[queue][offset]
                self.out[queue].add(offset)
                reply = [b"r"] if wants else None
                slices.append(Slice(payload, [0, len(payload)], 0, 1, offset, ORIGIN, 0, reply=reply))
            self.down += self.controller.deliver(queue, slices)

    def hear(self, event: NodeEvent) -> None:
        if isinstance(event, Deliveries):
            self.arrived[event.queue] += event.batch.messages()
            for ident, payload in zip(event.ids, event.batch.messages(), strict=True):
                assert ident not in self.held
                self.held[ident] = payload, event.noreply, False
        elif isinstance(event, Receipts):
            self.sent -= set(event.ids)
        elif isinstance(event, Taken):
            assert not self.taken & set(event.ids)
            self.taken.update(event.ids)
        elif isinstance(event, Answers):
            for ident, answer in zip(event.ids, event.batch.messages(), strict=True):
                assert answer == b"re:" + self.asked.pop(ident)
                self.taken.discard(ident)
        elif isinstance(event, Heard):
            self.broadcasts_heard += len(event.batch)
        elif isinstance(event, Consuming):
            self.node_consumers[event.queue] = CONSUMERS[self.node_consumers[event.queue], Word.CONSUMING]
        elif isinstance(event, ControllerClosing):
            self.node_connection = CONNECTIONS[self.node_connection, Farewell.CONTROLLER_CLOSING]
        else:
            assert not isinstance(event, ControllerFull | Ignored), event
            for ident in event.ids:  # Failed: refused because of a goodbye
                self.sent.discard(ident)
                self.asked.pop(ident, None)

    # -- what must hold ------------------------------------------------------------------------------

    @invariant()
    def the_tables_hold(self) -> None:
        for queue in QUEUES:
            assert self.controller.consumer(queue) is self.controller_consumers[queue]
            assert self.node.consumer(queue) is self.node_consumers[queue]
        assert self.controller.connection is self.controller_connection
        assert self.node.connection is self.node_connection

    @invariant()
    def both_sides_count_alike(self) -> None:
        assert self.controller.deliveries == sum(map(len, self.out.values()))
        assert self.node.held == len(self.held)
        assert self.node.requests == len(self.asked) + len(self.sent)

    def teardown(self) -> None:
        """Let everything arrive and answer all that is held: then both sides are of one mind."""
        while self.up or self.down or self.held:
            self.to_controller(10_000)
            self.to_node(10_000)
            self.say_delivered([i for i, (_, _, said) in self.held.items() if not said])
            self.say_reply([i for i, (_, noreply, _) in self.held.items() if not noreply])
        assert self.controller.deliveries == 0
        if self.controller_connection is Connection.OPEN:
            assert self.controller_consumers == self.node_consumers
        assert self.controller_connection is self.node_connection
        assert self.broadcasts_heard == self.broadcasts_sent
        waiting = sum(self.log[queue][o][2] for queue in QUEUES for o in self.ready[queue])
        assert len(self.asked) == waiting
        assert not self.sent
        assert not self.taken
        for queue in QUEUES:
            never = set(self.ready[queue])
            expected = [m for o, (m, _, _) in enumerate(self.log[queue]) if o not in never]
            assert self.arrived[queue] == expected


Conversation.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestConversation = Conversation.TestCase


# -- any bytes, at a session in the middle of its work ----------------------------------------------

frames = st.sampled_from(
    [
        rq.encode_delivered([0, 1, 2, 40]),
        rq.encode_undelivered([0, 1]),
        rq.encode_replies([1, 3, 0], Batch.of([b"x", b"", b"z"])),
        rq.encode_requests("a", [0, 1], Batch.of([b"m", b"n"]), noreply=False),
        rq.encode_requests("a.dead", [5], Batch.of([b"m"]), noreply=True),
        rq.encode_consume("b.dead", 3, 10, True),
        rq.encode_consuming("b", 2),
        rq.encode_cancel("a"),
        rq.encode_broadcasts("a", Batch.of([b"m"])),
        rq.encode_deliveries("a", [9, 1], b"xy", [0, 1, 2], noreply=False),
        rq.CLOSING,
        rq.SERVER_FULL,
        rq.PING,
        bytes.fromhex("01 60 0001 80 00000003 e0 00000001 78 0a"),
        bytes.fromhex("e0 ffffffff"),
    ]
)
streams = st.lists(frames | st.binary(max_size=5), max_size=8).map(b"".join)


def flattened(told: Iterable[Any]) -> list[Any]:
    """What was told, without regard to which messages came in one word together."""
    ones: list[Any] = []
    for one in told:
        if isinstance(one, Publish):
            assert one.tickets is not None
            for pair in zip(one.tickets, one.batch.messages(), strict=True):
                ones.append((Publish, one.queue, one.wants_reply, one.timeout_seconds, *pair))
        elif isinstance(one, Reply):
            for answer in zip(one.offsets, one.answers.messages(), strict=True):
                ones.append((Reply, one.queue, one.origin, *answer))
        elif isinstance(one, Settle | Accepted):
            dead = isinstance(one, Settle) and one.dead
            for offset in (o for first, end in one.ranges for o in range(first, end)):
                ones.append((type(one), one.queue, one.origin, dead, offset))
        elif isinstance(one, Broadcast | Heard):
            ones += [(type(one), one.queue, message) for message in one.batch.messages()]
        elif isinstance(one, Deliveries):
            for delivery in zip(one.ids, one.batch.messages(), strict=True):
                ones.append((Deliveries, one.queue, one.noreply, *delivery))
        elif isinstance(one, Answers):
            ones += [(Answers, *answer) for answer in zip(one.ids, one.batch.messages(), strict=True)]
        elif isinstance(one, Ignored):
            ones += [(Ignored, one.reason)] * one.count
        elif hasattr(one, "ids"):
            ones += [(type(one), ident) for ident in one.ids]
        else:
            ones.append(one)
    return sorted(map(repr, ones))


def busy_controller() -> ControllerSession:
    session = ControllerSession(0, limits=Limits(payload_bytes_max=100))
    session.receive(rq.encode_consume("a", 0, 20, False), 0)
    session.consuming("a")
    batch = Batch.of([b"%d" % i for i in range(6)])
    reply = [b"r", b"", b"r", b"r", b"", b""]
    session.deliver("a", [Slice(batch.payload, batch.bounds, 0, 6, 100, ORIGIN, 0, reply=reply)])
    return session


def busy_node() -> NodeSession:
    session = NodeSession(0, limits=Limits(payload_bytes_max=100))
    session.consume("a")
    session.request("a", Batch.of([b"1", b"2"]))
    session.send("a", Batch.of([b"3", b"4"]))
    session.receive(rq.encode_deliveries("a", [1], b"x", [0, 1], noreply=False), 0)
    return session


def outcome(session: ControllerSession | NodeSession, chunks: Iterable[bytes]) -> tuple[Any, ...]:
    told: list[Any] = []
    violation = ""
    try:
        for chunk in chunks:
            told += session.receive(chunk, 1)
    except PeerViolation as raised:
        violation = str(raised).partition(" at byte")[0]
        if "given again" in violation:
            # Deliveries of another queue may be told before or after, as may unknown commands.
            return (violation,)
        told += session.salvage()
    output = session.take_output()
    counts = (
        session.deliveries if isinstance(session, ControllerSession) else (session.requests, session.held)
    )
    return flattened(told), sorted(output), violation, counts, session.connection


@settings(max_examples=200)
@given(streams, st.lists(st.integers(0, 400), max_size=6))
def test_any_bytes_in_any_pieces_do_the_same_to_a_session(stream: bytes, at: list[int]) -> None:
    for make in (busy_controller, busy_node):
        whole = outcome(make(), [stream])
        assert outcome(make(), cut(stream, at)) == whole
        assert outcome(make(), [stream[i : i + 1] for i in range(len(stream))]) == whole
