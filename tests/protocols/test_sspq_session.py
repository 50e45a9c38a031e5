"""SSPQ sessions: every cell of the tables, and both sides joined in memory."""

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.batch import RETRIES_NONE, Batch, Slice
from penstock.model.words import Command, Consume, Ignored, Outcome, Publish, Settle, Where
from penstock.protocols import sspq
from penstock.protocols.errors import MisuseError, PeerViolation
from penstock.protocols.sspq import Type
from penstock.protocols.sspq_session import (
    CLIENT,
    IGNORED_UNKNOWN,
    SERVER,
    Act,
    ClientSession,
    Declined,
    Delivery,
    Effect,
    ServerSession,
    State,
)

ORIGIN = b"0123456789abcdef01"
CONTROLS = {
    Type.RECEIVE: sspq.RECEIVE,
    Type.CONFIRM: sspq.CONFIRM,
    Type.DEAD_RECEIVE: sspq.DEAD_RECEIVE,
    Type.NO_RECEIVE: sspq.NO_RECEIVE,
}


def stored(offset: int, payload: bytes = b"m", retries: int | None = None) -> Slice:
    left = None if retries is None else [retries]
    return Slice(payload, [0, len(payload)], 0, 1, offset, ORIGIN, 0, retries=left)


def server_in(state: State) -> ServerSession:
    """A server session that came to this state in the ordinary way; it holds message 7 if any."""
    session = ServerSession("orders")
    if state in (State.WAITING, State.HOLDING):
        session.receive(sspq.RECEIVE)
    if state in (State.WAITING_DEAD, State.HOLDING_DEAD):
        session.receive(sspq.DEAD_RECEIVE)
    if state in (State.HOLDING, State.HOLDING_DEAD):
        session.deliver("orders", [stored(7)], 0, dead=state is State.HOLDING_DEAD)
    assert session.state is state
    return session


def client_in(state: State) -> ClientSession:
    session = ClientSession()
    if state is not State.IDLE:
        session.ask(dead=state in (State.WAITING_DEAD, State.HOLDING_DEAD))
    if state in (State.HOLDING, State.HOLDING_DEAD):
        session.receive(sspq.frame(Type.SEND, b"m", 2))
    assert session.state is state
    return session


MEANS: dict[Effect, list[Command]] = {
    Effect.ASK: [Consume("orders", 1, dead=False, once=True)],
    Effect.ASK_DEAD: [Consume("orders", 1, dead=True, once=True)],
}


@pytest.mark.parametrize("type_", CONTROLS)
@pytest.mark.parametrize("state", State)
def test_the_server_does_with_a_frame_what_its_table_says(state: State, type_: Type) -> None:
    session = server_in(state)
    after, effect = SERVER[state, type_]
    commands = session.receive(CONTROLS[type_])
    if effect is Effect.SETTLE:
        dead = state is State.HOLDING_DEAD
        assert commands == [Settle("orders", Outcome.ACK, ORIGIN, [(7, 8)], dead=dead)]
    else:
        assert commands == MEANS.get(effect, [Ignored(effect.value)])
    assert session.state is after
    assert session.held == ((ORIGIN, 7) if after in (State.HOLDING, State.HOLDING_DEAD) else None)


@pytest.mark.parametrize("act", Act)
@pytest.mark.parametrize("state", State)
def test_the_server_acts_only_where_its_table_says(state: State, act: Act) -> None:
    session = server_in(state)
    before = (session.state, session.held)

    def do() -> bytes:
        if act is Act.DECLINE:
            return session.decline()
        return session.deliver("orders", [stored(9, b"x", 3)], 0, dead=act is Act.DELIVER_DEAD)

    if (state, act) not in SERVER:
        with pytest.raises(MisuseError, match=f"cannot {act.value} while {state.value}"):
            do()
        assert (session.state, session.held) == before
        return
    written = do()
    assert written == (sspq.NO_RECEIVE if act is Act.DECLINE else sspq.frame(Type.SEND, b"x", 3))
    assert session.state is SERVER[state, act][0]
    assert session.held == (None if act is Act.DECLINE else (ORIGIN, 9))


@pytest.mark.parametrize("state", State)
def test_messages_are_taken_in_every_state(state: State) -> None:
    session = server_in(state)
    (command,) = session.receive(sspq.frame(Type.SEND, b"a", 3) + sspq.frame(Type.SEND, b"b", 255))
    assert isinstance(command, Publish)
    assert command.queue == "orders"
    assert command.batch.messages() == [b"a", b"b"]
    assert list(command.batch.retries or ()) == [3, 255]
    assert session.state is state


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("type_", [Type.RECEIVE, Type.DEAD_RECEIVE, Type.CONFIRM])
def test_the_client_sends_only_what_its_table_says(state: State, type_: Type) -> None:
    session = client_in(state)
    if (state, type_) in CLIENT:
        written = session.confirm() if type_ is Type.CONFIRM else session.ask(dead=type_ is Type.DEAD_RECEIVE)
        assert written == CONTROLS[type_]
        assert session.state is CLIENT[state, type_][0]
    else:
        with pytest.raises(MisuseError, match=f"a client that is {state.value} cannot send {type_.name}"):
            session.confirm() if type_ is Type.CONFIRM else session.ask(dead=type_ is Type.DEAD_RECEIVE)
        assert session.state is state


@pytest.mark.parametrize("state", State)
def test_the_client_takes_a_message_only_where_it_asked(state: State) -> None:
    session = client_in(state)
    data = sspq.frame(Type.SEND, b"m", 4)
    if (state, Type.SEND) in CLIENT:
        assert session.receive(data) == [Delivery(b"m", 4, dead=state is State.WAITING_DEAD)]
        assert session.state is CLIENT[state, Type.SEND][0]
    else:
        for _ in range(2):
            with pytest.raises(PeerViolation, match=f"a message for a client that is {state.value}"):
                session.receive(data)
        assert session.state is state


@pytest.mark.parametrize("state", State)
def test_the_client_counts_a_refusal_that_it_did_not_ask_for(state: State) -> None:
    session = client_in(state)
    answers = session.receive(sspq.NO_RECEIVE * 3)
    if state in (State.WAITING, State.WAITING_DEAD):
        declined = Declined(dead=state is State.WAITING_DEAD)
        assert answers == [declined, Ignored(Effect.IGNORE_UNASKED.value, 2)]
    else:
        assert answers == [Ignored(Effect.IGNORE_UNASKED.value, 3)]


def test_a_second_message_is_a_violation_and_the_first_is_salvaged() -> None:
    session = client_in(State.WAITING)
    with pytest.raises(PeerViolation, match="a message for a client that is holding"):
        session.receive(sspq.frame(Type.SEND, b"one", 1) + sspq.frame(Type.SEND, b"two", 1) + b"rubbish!")
    assert session.salvage() == [Delivery(b"one", 1, dead=False)]
    assert session.salvage() == []


def test_the_client_counts_what_only_clients_send_and_unknown_types() -> None:
    session = ClientSession()
    unknown = sspq.RECEIVE[:2] + b"\x42" + sspq.RECEIVE[3:]
    assert session.receive(sspq.RECEIVE + sspq.CONFIRM + unknown * 2) == [
        Ignored(Effect.IGNORE_DIRECTION.value, 2),
        Ignored(IGNORED_UNKNOWN, 2, "type 0x42"),
    ]


def test_confirm_and_receive_by_the_thousand_settle_once_and_ask_once() -> None:
    session = server_in(State.HOLDING)
    assert session.receive((sspq.CONFIRM + sspq.RECEIVE) * 1000) == [
        Settle("orders", Outcome.ACK, ORIGIN, [(7, 8)]),
        Consume("orders", 1, once=True),
        Ignored(Effect.IGNORE_STRAY.value, 999),
        Ignored(Effect.IGNORE_WAITING.value, 999),
    ]
    assert session.state is State.WAITING


def test_unknown_types_are_counted_by_type() -> None:
    session = ServerSession("orders")
    unknown = [sspq.RECEIVE[:2] + bytes((byte,)) + sspq.RECEIVE[3:] for byte in (0x42, 0x43, 0x42)]
    assert session.receive(b"".join(unknown)) == [
        Ignored(IGNORED_UNKNOWN, 2, "type 0x42"),
        Ignored(IGNORED_UNKNOWN, 1, "type 0x43"),
    ]


def test_commands_before_a_violation_are_salvaged() -> None:
    session = ServerSession("orders")
    with pytest.raises(PeerViolation, match="the magic is 0x6e6f, not 0x5599 at byte 17"):
        session.receive(sspq.frame(Type.SEND, b"a") + sspq.RECEIVE + b"no magic")
    publish, consume = session.salvage()
    assert isinstance(publish, Publish)
    assert consume == Consume("orders", 1, once=True)
    assert session.salvage() == []
    with pytest.raises(PeerViolation, match="at byte 17"):
        session.receive(b"")


def test_a_delivery_is_one_message_of_the_session_s_queue() -> None:
    session = server_in(State.WAITING)
    for queue, slices in (("orders", []), ("orders", [stored(1), stored(2)]), ("bills", [stored(1)])):
        with pytest.raises(MisuseError, match="a delivery is one message of queue 'orders'"):
            session.deliver(queue, slices, 0)
    assert session.state is State.WAITING


@pytest.mark.parametrize(("retries", "shown"), [(None, 255), (RETRIES_NONE, 255), (0, 0), (2, 2), (255, 255)])
def test_a_delivery_shows_what_is_left_of_the_retries(retries: int | None, shown: int) -> None:
    session = server_in(State.WAITING)
    assert session.deliver("orders", [stored(1, b"m", retries)], 0) == sspq.frame(Type.SEND, b"m", shown)


def test_a_client_does_not_send_what_its_limit_forbids() -> None:
    session = ClientSession(payload_bytes_max=3)
    assert session.send(Batch.of([b"abc", b"de"], retries=[1, 2])) == sspq.frame(
        Type.SEND, b"abc", 1
    ) + sspq.frame(Type.SEND, b"de", 2)
    with pytest.raises(MisuseError, match="a message of 4 bytes is over 3"):
        session.send(Batch.of([b"abcd"]))


def test_a_lost_consumer_s_message_goes_to_the_tail() -> None:
    assert ServerSession.LOST_TO is Where.TAIL


class Wire:
    """One direction of a connection: bytes that come in other pieces than they went."""

    def __init__(self, draw: st.DataObject) -> None:
        self._draw = draw
        self._bytes = b""

    def put(self, data: bytes) -> None:
        self._bytes += data

    def take(self, everything: bool = False) -> bytes:
        count = len(self._bytes) if everything else self._draw.draw(st.integers(0, len(self._bytes)))
        out, self._bytes = self._bytes[:count], self._bytes[count:]
        return out


class Conversation:
    """A client, a server and the smallest broker that there can be, with a model that walks the tables."""

    def __init__(self, data: st.DataObject) -> None:
        self.client, self.server = ClientSession(), ServerSession("orders")
        self.up, self.down = Wire(data), Wire(data)
        self.ready: deque[tuple[int, bytes]] = deque()
        self.dead: deque[tuple[int, bytes]] = deque((1000 + n, b"dead%d" % n) for n in range(3))
        self.published: list[bytes] = []
        self.wanted: bool | None = None  # what the broker owes: True a dead letter, False a message
        self.held: tuple[int, bytes, bool] | None = None
        self.settled: list[bytes] = []
        self.got: list[bytes] = []
        self.model = State.IDLE

    def to_server(self, data: bytes) -> None:
        for command in self.server.receive(data):
            if isinstance(command, Publish):
                for payload in command.batch.messages():
                    self.ready.append((len(self.published), payload))
                    self.published.append(payload)
            elif isinstance(command, Consume):
                assert self.wanted is None
                self.wanted = command.dead
            else:
                assert isinstance(command, Settle)
                assert self.held is not None
                offset, payload, dead = self.held
                assert (command.ranges, command.dead) == ([(offset, offset + 1)], dead)
                self.settled.append(payload)
                self.held = None

    def to_client(self, data: bytes) -> None:
        for answer in self.client.receive(data):
            if isinstance(answer, Delivery):
                self.got.append(answer.payload)
                self.model = CLIENT[self.model, Type.SEND][0]
                assert answer.dead == (self.model is State.HOLDING_DEAD)
            else:
                assert isinstance(answer, Declined)
                self.model = CLIENT[self.model, Type.NO_RECEIVE][0]

    def ask(self, type_: Type) -> None:
        if (self.model, type_) in CLIENT:
            self.up.put(self.client.ask(dead=type_ is Type.DEAD_RECEIVE))
            self.model = CLIENT[self.model, type_][0]

    def confirm(self) -> None:
        if (self.model, Type.CONFIRM) in CLIENT:
            self.up.put(self.client.confirm())
            self.model = CLIENT[self.model, Type.CONFIRM][0]

    def dispatch(self) -> None:
        if self.wanted is None:
            return
        source = self.dead if self.wanted else self.ready
        if source:
            offset, payload = source.popleft()
            self.down.put(self.server.deliver("orders", [stored(offset, payload, 1)], 0, dead=self.wanted))
            self.held = (offset, payload, self.wanted)
            self.wanted = None

    def turn(self) -> None:
        """What a server does all the time."""
        self.to_server(self.up.take(everything=True))
        self.dispatch()
        self.to_client(self.down.take(everything=True))

    def decline(self) -> None:
        if self.wanted is not None:
            self.down.put(self.server.decline())
            self.wanted = None


@given(st.data())
def test_joined_sides_end_where_the_tables_say(data: st.DataObject) -> None:
    talk = Conversation(data)
    sent: list[bytes] = []

    def send() -> None:
        payloads = data.draw(st.lists(st.binary(max_size=3), max_size=3))
        sent.extend(payloads)
        talk.up.put(talk.client.send(Batch.of(payloads, retries=[1] * len(payloads))))

    acts: dict[str, Callable[[], None]] = {
        "send": send,
        "ask": lambda: talk.ask(Type.RECEIVE),
        "ask dead": lambda: talk.ask(Type.DEAD_RECEIVE),
        "confirm": talk.confirm,
        "dispatch": talk.dispatch,
        "decline": talk.decline,
        "up": lambda: talk.to_server(talk.up.take()),
        "down": lambda: talk.to_client(talk.down.take()),
        "turn": talk.turn,
    }
    for name in data.draw(st.lists(st.sampled_from(sorted(acts)), min_size=20, max_size=40)):
        acts[name]()
        assert talk.client.state is talk.model
    talk.turn()
    assert talk.server.state is talk.client.state is talk.model
    assert talk.published == sent
    holding = [] if talk.held is None else [talk.held[1]]
    assert talk.got == talk.settled + holding
    assert talk.server.held == (None if talk.held is None else (ORIGIN, talk.held[0]))
