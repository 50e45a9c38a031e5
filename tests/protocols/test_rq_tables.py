"""Every cell of the four tables, on both sides of the wire: what it has happens, what it lacks does not."""

from collections.abc import Callable

import pytest

from penstock.model.batch import Batch, Slice
from penstock.model.words import Accepted, Cancel, Closing, Command, Consume, Ignored, Reply, Settle
from penstock.protocols import rq
from penstock.protocols.errors import MisuseError
from penstock.protocols.rq import Command as Word
from penstock.protocols.rq_controller import ControllerSession
from penstock.protocols.rq_node import (
    Answers,
    Consuming,
    ControllerClosing,
    ControllerFull,
    Failed,
    NodeEvent,
    NodeSession,
    Receipts,
    Taken,
)
from penstock.protocols.rq_session import (
    CONNECTIONS,
    CONSUMERS,
    EXCHANGES,
    SILENCES,
    Connection,
    Consumer,
    Exchange,
    Farewell,
    Liveness,
    Pulse,
    Step,
)

ONE = Batch.of([b"m"])


def slice_of(reply: bool) -> Slice:
    return Slice(b"m", [0, 1], 0, 1, 40, b"o" * 18, 0, reply=[b"r"] if reply else None)


def effects(told: list[Command] | list[NodeEvent]) -> set[type]:
    return {type(one) for one in told}


# -- the connection --------------------------------------------------------------------------------

FAREWELLS: dict[Connection, list[Farewell]] = {
    Connection.OPEN: [],
    Connection.LEAVING: [Farewell.NODE_CLOSING],
    Connection.STOPPING: [Farewell.CONTROLLER_CLOSING],
    Connection.ENDING: [Farewell.CONTROLLER_CLOSING, Farewell.NODE_CLOSING],
    Connection.FULL: [Farewell.SERVER_FULL],
}
"""A way to every state."""


def controller_says(session: ControllerSession, farewell: Farewell) -> list[Command]:
    if farewell is Farewell.NODE_CLOSING:
        return session.receive(rq.CLOSING, 1)
    said = session.closing() if farewell is Farewell.CONTROLLER_CLOSING else session.full()
    assert said == (rq.CLOSING if farewell is Farewell.CONTROLLER_CLOSING else rq.SERVER_FULL)
    return []


def node_says(session: NodeSession, farewell: Farewell) -> list[NodeEvent]:
    if farewell is Farewell.NODE_CLOSING:
        assert session.closing() == rq.CLOSING
        return []
    return session.receive(rq.CLOSING if farewell is Farewell.CONTROLLER_CLOSING else rq.SERVER_FULL, 1)


@pytest.mark.parametrize("farewell", Farewell)
@pytest.mark.parametrize("state", Connection)
def test_every_cell_of_the_connection_at_the_controller(state: Connection, farewell: Farewell) -> None:
    session = ControllerSession(0)
    for before in FAREWELLS[state]:
        controller_says(session, before)
    assert session.connection is state
    after = CONNECTIONS.get((state, farewell))
    if farewell is Farewell.NODE_CLOSING:
        assert effects(controller_says(session, farewell)) == {Closing if after else Ignored}
    elif after:
        controller_says(session, farewell)
    else:
        with pytest.raises(MisuseError, match=state.value):
            controller_says(session, farewell)
    assert session.connection is (after or state)


@pytest.mark.parametrize("farewell", Farewell)
@pytest.mark.parametrize("state", Connection)
def test_every_cell_of_the_connection_at_the_node(state: Connection, farewell: Farewell) -> None:
    session = NodeSession(0)
    for before in FAREWELLS[state]:
        node_says(session, before)
    assert session.connection is state
    after = CONNECTIONS.get((state, farewell))
    if farewell is not Farewell.NODE_CLOSING:
        told = ControllerFull if farewell is Farewell.SERVER_FULL else ControllerClosing
        assert effects(node_says(session, farewell)) == {told if after else Ignored}
    elif after:
        node_says(session, farewell)
    else:
        with pytest.raises(MisuseError, match=state.value):
            node_says(session, farewell)
    assert session.connection is (after or state)


@pytest.mark.parametrize("state", [state for state in Connection if state is not Connection.OPEN])
def test_nothing_new_begins_once_a_side_has_said_goodbye(state: Connection) -> None:
    controller, node = ControllerSession(0), NodeSession(0)
    controller.receive(rq.encode_consume("q", 0, 20, False), 0)
    controller.consuming("q")
    for farewell in FAREWELLS[state]:
        controller_says(controller, farewell)
        node_says(node, farewell)
    if state is Connection.LEAVING:
        # The broker may not have come to the node's CLOSING yet.
        assert controller.deliver("q", [slice_of(False)])
        assert controller.broadcast("q", ONE)
    else:
        assert controller.free_deliveries() == 0
        assert controller.broadcast("q", ONE) == b""
        with pytest.raises(MisuseError, match=state.value):
            controller.deliver("q", [slice_of(False)])
    begins: list[Callable[[], object]] = [
        lambda: node.request("q", ONE),
        lambda: node.send("q", ONE),
        lambda: node.broadcast("q", ONE),
        lambda: node.consume("q"),
    ]
    for begin in begins:
        with pytest.raises(MisuseError, match=state.value):
            begin()
    # What a node sends all the same, or sent before it heard of it, is refused in the open.
    late = rq.encode_requests("q", [3, 4], Batch.of([b"", b""]), noreply=True)
    late += rq.encode_broadcasts("q", ONE) + rq.encode_consume("p", 1, 20, False)
    told = controller.receive(late, 1)
    assert [(one.reason, one.count) for one in told if isinstance(one, Ignored)] == [
        ("REQUEST while closing", 2),
        ("BROADCAST while closing", 1),
        ("CONSUME while closing", 1),
    ]
    assert controller.take_output() == rq.encode_undelivered([3, 4])


# -- consumers -------------------------------------------------------------------------------------

WORDS: dict[Consumer, list[Word]] = {
    Consumer.NONE: [],
    Consumer.ASKED: [Word.CONSUME],
    Consumer.CONSUMING: [Word.CONSUME, Word.CONSUMING],
    Consumer.CANCELLED: [Word.CONSUME, Word.CANCEL_QUEUE],
}


def at_controller(session: ControllerSession, word: Word) -> set[type]:
    if word is Word.CONSUMING:
        session.consuming("q")
        return set()
    wire = rq.encode_consume("q", 1, 20, False) if word is Word.CONSUME else rq.encode_cancel("q")
    return effects(session.receive(wire, 1))


def at_node(session: NodeSession, word: Word) -> set[type]:
    if word is Word.CONSUMING:
        return effects(session.receive(rq.encode_consuming("q", 1), 1))
    said = session.consume("q") if word is Word.CONSUME else session.cancel("q")
    assert said
    return set()


@pytest.mark.parametrize("word", [Word.CONSUME, Word.CONSUMING, Word.CANCEL_QUEUE])
@pytest.mark.parametrize("state", Consumer)
def test_every_cell_of_a_consumer(state: Consumer, word: Word) -> None:
    controller, node = ControllerSession(0), NodeSession(0)
    for before in WORDS[state]:
        at_controller(controller, before)
        at_node(node, before)
    assert controller.consumer("q") is node.consumer("q") is state
    after = CONSUMERS.get((state, word))
    told = {Word.CONSUME: Consume, Word.CANCEL_QUEUE: Cancel}
    if word in told:
        assert at_controller(controller, word) == {told[word] if after else Ignored}
    elif state is Consumer.NONE:
        with pytest.raises(MisuseError, match="never asked"):
            at_controller(controller, word)
    else:
        at_controller(controller, word)
    if word is Word.CONSUMING:
        # Told once, and never for a queue that was cancelled in the meantime.
        heard = {Consumer.ASKED: {Consuming}, Consumer.NONE: {Ignored}}
        assert at_node(node, word) == heard.get(state, set())
    elif after:
        at_node(node, word)
    else:
        with pytest.raises(MisuseError, match="CANCEL_QUEUE is not possible"):
            at_node(node, word)
    assert controller.consumer("q") is node.consumer("q") is (after or state)


# -- exchanges -------------------------------------------------------------------------------------

STEPS: dict[Exchange, list[Step]] = {
    Exchange.FREE: [],
    Exchange.NOTICE: [Step.NOTICE],
    Exchange.REQUEST: [Step.REQUEST],
    Exchange.TAKEN: [Step.REQUEST, Step.DELIVERED],
}
ANSWERS = {
    Step.DELIVERED: rq.encode_delivered([0]),
    Step.REPLY: rq.encode_replies([0], ONE),
    Step.UNDELIVERED: rq.encode_undelivered([0]),
}
BEGINNINGS = (Step.NOTICE, Step.REQUEST)


@pytest.mark.parametrize("how", [Step.DELIVERED, Step.REPLY])
@pytest.mark.parametrize("state", Exchange)
def test_every_cell_of_an_exchange_with_a_consumer(state: Exchange, how: Step) -> None:
    session = ControllerSession(0)
    at_controller(session, Word.CONSUME)
    at_controller(session, Word.CONSUMING)
    for before in STEPS[state]:
        if before in BEGINNINGS:
            session.deliver("q", [slice_of(before is Step.REQUEST)])
        else:
            session.receive(ANSWERS[before], 1)
    out = 0 if state is Exchange.FREE else 1
    assert session.deliveries == out
    told = {
        (Exchange.FREE, Step.DELIVERED): {Ignored},
        (Exchange.FREE, Step.REPLY): {Ignored},
        (Exchange.NOTICE, Step.DELIVERED): {Settle},
        (Exchange.NOTICE, Step.REPLY): {Settle, Ignored},
        (Exchange.REQUEST, Step.DELIVERED): {Accepted},
        (Exchange.REQUEST, Step.REPLY): {Reply},
        (Exchange.TAKEN, Step.DELIVERED): {Ignored},
        (Exchange.TAKEN, Step.REPLY): {Reply},
    }
    assert effects(session.receive(ANSWERS[how], 1)) == told[state, how]
    after = EXCHANGES.get((state, how), state)
    assert session.deliveries == (0 if after is Exchange.FREE else 1)


@pytest.mark.parametrize("how", [Step.DELIVERED, Step.REPLY, Step.UNDELIVERED])
@pytest.mark.parametrize("state", Exchange)
def test_every_cell_of_an_exchange_with_a_requester(state: Exchange, how: Step) -> None:
    session = NodeSession(0)
    for before in STEPS[state]:
        if before is Step.NOTICE:
            session.send("q", ONE)
        elif before is Step.REQUEST:
            session.request("q", ONE)
        else:
            session.receive(ANSWERS[before], 1)
    told = {
        (Exchange.FREE, Step.DELIVERED): {Ignored},
        (Exchange.FREE, Step.REPLY): {Ignored},
        (Exchange.FREE, Step.UNDELIVERED): {Ignored},
        (Exchange.NOTICE, Step.DELIVERED): {Receipts},
        (Exchange.NOTICE, Step.REPLY): {Receipts, Ignored},
        (Exchange.NOTICE, Step.UNDELIVERED): {Failed},
        (Exchange.REQUEST, Step.DELIVERED): {Taken},
        (Exchange.REQUEST, Step.REPLY): {Answers},
        (Exchange.REQUEST, Step.UNDELIVERED): {Failed},
        (Exchange.TAKEN, Step.DELIVERED): {Taken},
        (Exchange.TAKEN, Step.REPLY): {Answers},
        (Exchange.TAKEN, Step.UNDELIVERED): {Failed},
    }
    assert effects(session.receive(ANSWERS[how], 1)) == told[state, how]
    after = EXCHANGES.get((state, how), state)
    assert session.requests == (0 if after is Exchange.FREE else 1)


def test_a_free_id_can_only_be_begun() -> None:
    assert {how for state, how in EXCHANGES if state is Exchange.FREE} == set(BEGINNINGS)
    assert not {(state, how) for state, how in EXCHANGES if state is not Exchange.FREE and how in BEGINNINGS}


# -- silence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", Liveness)
def test_every_cell_of_silence(state: Liveness) -> None:
    pulse = Pulse(0, 10)
    now_us = 0
    while pulse.state is not state:
        now_us += 10
        pulse.tick(now_us)
    assert pulse.tick(now_us + 9) is False
    assert pulse.state is state
    pings = pulse.tick(now_us + 10)
    assert pulse.state is SILENCES[state]
    assert pings is (SILENCES[state] is Liveness.PINGED)
    pulse.heard(now_us + 11)
    assert pulse.state is Liveness.AWAKE
    assert pulse.due_us == now_us + 21


def test_silence_is_found_out_though_the_clock_is_set_back() -> None:
    pulse = Pulse(10_000, 10)
    assert pulse.tick(3) is False
    assert pulse.tick(12) is False
    assert pulse.tick(13) is True


def test_silence_must_be_a_time() -> None:
    with pytest.raises(MisuseError, match="silence_us"):
        Pulse(0, 0)
