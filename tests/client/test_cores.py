"""The pure cores: what they count and what they write, without a socket."""

from typing import Any

import pytest

from penstock.client import ConnectionLost, NotSupported, Undelivered
from penstock.client.core import CHUNK_BYTES, CHUNK_MESSAGES, chunks
from penstock.client.phpmq_core import Held, PhpmqCore, unsettled
from penstock.client.rq_core import Call, LineCore
from penstock.client.sspq_core import SspqCore
from penstock.model.batch import Batch
from penstock.model.words import Outcome
from penstock.protocols import rq, sspq
from penstock.protocols.rq_node import Deliveries
from tests.server.harness import phpmq

LIMIT = 1 << 20


def dispatch(queue: bytes, body: bytes, number: int, ttl: bytes | None = None) -> bytes:
    packets = [(1, queue), (2, body), (3, b"%032x" % number)]
    return phpmq(3, *packets, *([(5, ttl)] if ttl is not None else []))


def consume(queue: bytes, count: int) -> bytes:
    return phpmq(2, (1, queue), (4, b"%d" % count))


def ack(queue: bytes, number: int) -> bytes:
    return phpmq(4, (1, queue), (3, b"%032x" % number))


# --- chunks --------------------------------------------------------------------------------------------


def test_chunks_are_bounded_by_count_and_by_bytes() -> None:
    assert list(chunks([])) == []
    assert [len(chunk) for chunk in chunks([b""] * (2 * CHUNK_MESSAGES + 1))] == [CHUNK_MESSAGES] * 2 + [1]
    large = b"x" * (CHUNK_BYTES // 2)
    assert [len(chunk) for chunk in chunks([large] * 5)] == [2, 2, 1]
    others: list[Any] = [bytearray(b"a"), memoryview(b"b")]
    assert list(chunks(others)) == [[b"a", b"b"]]


@pytest.mark.parametrize("body", ["text", 3, None])
def test_a_message_is_bytes(body: Any) -> None:
    with pytest.raises(TypeError, match="a message is bytes, not"):
        list(chunks([body]))


# --- PHPMQ ---------------------------------------------------------------------------------------------


def test_windows_are_asked_for_again_and_what_was_fetched_is_forgotten() -> None:
    core = PhpmqCore(LIMIT)
    assert core.opened() == b""
    window, request = core.consume("q", 5, None)
    assert request == consume(b"q", 5)
    core.feed(dispatch(b"q", b"a", 1) + dispatch(b"q", b"b", 2, b"7"))
    first = core.take(window)
    assert first is not None
    assert (first.body, first.ttl_seconds, first.generation) == (b"a", 0, 1)
    core.lost("cut")
    assert core.take(window) is None
    assert core.opened() == consume(b"q", 5)
    assert core.take(window) is None
    assert core.settle(Outcome.ACK, "q", [first], first.generation) is None
    core.feed(dispatch(b"q", b"a", 1))
    again = core.take(window)
    assert again is not None
    assert core.settle(Outcome.ACK, "q", [again], again.generation) == ack(b"q", 1)


def test_a_window_with_a_count_shrinks_before_room_is_made() -> None:
    core = PhpmqCore(LIMIT)
    core.opened()
    window, request = core.consume("q", 3, 4)
    assert request == consume(b"q", 3)
    written = []
    for number in range(4):
        core.feed(dispatch(b"q", b"x", number))
        fetched = core.take(window)
        assert fetched is not None
        written.append(core.settle(Outcome.ACK, "q", [fetched], 1))
    assert written == [
        ack(b"q", 0),  # three more are wanted, and may be here
        consume(b"q", 2) + ack(b"q", 1),
        consume(b"q", 1) + ack(b"q", 2),
        consume(b"q", 0) + ack(b"q", 3),
    ]
    assert window.is_done


def test_who_settles_one_behind_gets_the_last_of_a_count() -> None:
    core = PhpmqCore(LIMIT)
    core.opened()
    window, _ = core.consume("q", 2, 3)
    core.feed(dispatch(b"q", b"x", 1) + dispatch(b"q", b"x", 2))
    first = core.take(window)
    assert first is not None
    core.take(window)
    # One is held, one is still to come: the window stays as it is.
    assert core.settle(Outcome.ACK, "q", [first], 1) == ack(b"q", 1)


def test_after_a_loss_a_count_goes_on_from_what_was_handed_out() -> None:
    core = PhpmqCore(LIMIT)
    core.opened()
    window, _ = core.consume("q", 10, 4)
    core.feed(dispatch(b"q", b"x", 1) + dispatch(b"q", b"x", 2) + dispatch(b"q", b"x", 3))
    core.take(window)
    core.take(window)
    core.lost("cut")
    assert core.opened() == consume(b"q", 2)


def test_a_loop_that_was_left_ends_its_window_with_the_next_verdict() -> None:
    core = PhpmqCore(LIMIT)
    core.opened()
    window, _ = core.consume("q", 10, None)
    core.feed(dispatch(b"q", b"x", 1))
    fetched = core.take(window)
    assert fetched is not None
    window.is_over = True
    assert core.settle(Outcome.ACK, "q", [fetched], 1) == consume(b"q", 0) + ack(b"q", 1)
    core.lost("cut")
    assert core.opened() == b""


def test_what_an_earlier_loop_holds_takes_no_room_of_the_next() -> None:
    core = PhpmqCore(LIMIT)
    core.opened()
    former, _ = core.consume("q", 10, 2)
    core.feed(dispatch(b"q", b"x", 1) + dispatch(b"q", b"x", 2))
    held = [core.take(former), core.take(former)]
    former.is_over = True
    window, request = core.consume("q", 10, 3)
    assert request == consume(b"q", 5)  # the broker counts the two that are unsettled
    assert held[0] is not None
    assert core.settle(Outcome.ACK, "q", [held[0]], 1) == consume(b"q", 4) + ack(b"q", 1)
    core.feed(dispatch(b"q", b"x", 3))
    third = core.take(window)
    assert third is not None
    assert core.settle(Outcome.ACK, "q", [third], 1) == consume(b"q", 3) + ack(b"q", 3)
    assert held[1] is not None
    assert core.settle(Outcome.ACK, "q", [held[1]], 1) == consume(b"q", 2) + ack(b"q", 2)


def test_a_loop_that_is_left_does_not_close_the_window_of_another() -> None:
    core = PhpmqCore(LIMIT)
    core.opened()
    staying, request = core.consume("q", 3, None)
    assert request == consume(b"q", 3)
    leaving, request = core.consume("q", 2, None)
    assert request == consume(b"q", 5)
    core.feed(dispatch(b"q", b"x", 1) + dispatch(b"q", b"x", 2))
    first, second = core.take(leaving), core.take(leaving)
    assert first is not None
    assert second is not None
    leaving.is_over = True
    assert core.settle(Outcome.ACK, "q", [first], 1) == consume(b"q", 4) + ack(b"q", 1)
    assert core.settle(Outcome.ACK, "q", [second], 1) == consume(b"q", 3) + ack(b"q", 2)
    core.lost("cut")
    assert core.opened() == consume(b"q", 3)
    staying.is_over = True
    core.lost("cut")
    assert core.opened() == b""


def test_verdicts_are_grouped_by_queue_and_connection() -> None:
    core = PhpmqCore(LIMIT)
    core.opened()
    held: list[Held] = []
    for queue in ("a", "b", "a"):
        window, _ = core.consume(queue, 10, None)
        core.feed(dispatch(queue.encode(), b"x", len(held)))
        fetched = core.take(window)
        assert fetched is not None
        held.append(Held(queue, fetched))
    groups = unsettled(held)
    assert {key: [one.id for one in group] for key, group in groups.items()} == {
        ("a", 1): [b"%032x" % 0, b"%032x" % 2],
        ("b", 1): [b"%032x" % 1],
    }
    assert core.settle(Outcome.ACK, "a", groups["a", 1], 1) is not None
    assert list(unsettled(held)) == [("b", 1)]
    assert repr(held[1]) == f"<Held {1:032x} of 'b', 1 bytes>"


def test_what_is_in_doubt_is_told_once() -> None:
    core = PhpmqCore(LIMIT)
    core.opened()
    core.send("q", [b"a", b"b"], None)
    core.check()
    core.lost("cut")
    core.opened()
    core.send("q", [b"c"], None)
    core.lost("cut again")
    with pytest.raises(ConnectionLost, match=r"lost \(cut again\).* the last 3 messages") as raised:
        core.check()
    assert raised.value.in_doubt == 3
    core.check()
    core.opened()
    core.send("q", [b"d"], None)
    core.proved()
    core.lost("cut")
    core.check()


def test_a_refused_send_is_not_in_doubt() -> None:
    core = PhpmqCore(10)
    core.opened()
    with pytest.raises(NotSupported):
        core.send("q", [b"x" * 11], None)
    core.lost("cut")
    core.check()


# --- SSPQ ----------------------------------------------------------------------------------------------


def test_an_answer_proves_what_was_said_before_the_question_only() -> None:
    core = SspqCore(LIMIT)
    core.opened()
    assert core.ask_proof() is None  # nothing was said
    core.send([b"a", b"b"], None)
    core.ask(dead=False)
    core.feed(sspq.encode_batch(Batch.of([b"x"])))  # read is not stored
    taken = core.take()
    assert isinstance(taken, tuple)
    assert core.confirm(taken[0]) == sspq.CONFIRM
    question = core.ask_proof()
    assert question == sspq.SYNC_FRAMES[sspq.SYNC]
    assert core.ask_proof() == b""  # it was asked before
    core.send([b"c"], None)
    core.feed(question)
    assert not core.is_asking
    core.lost("cut")
    with pytest.raises(ConnectionLost) as raised:
        core.check(verdicts=True)
    assert (raised.value.in_doubt, raised.value.verdicts_in_doubt) == (1, 0)


def test_verdicts_in_doubt_are_named_until_there_is_a_new_connection() -> None:
    for reopened in (False, True):
        core = SspqCore(LIMIT)
        core.opened()
        core.ask(dead=False)
        core.feed(sspq.encode_batch(Batch.of([b"x"])))
        taken = core.take()
        assert isinstance(taken, tuple)
        core.confirm(taken[0])
        core.lost("cut")
        core.check()
        if reopened:
            core.opened()
            core.check(verdicts=True)
            continue
        with pytest.raises(ConnectionLost, match="1 acknowledgement sent") as raised:
            core.check(verdicts=True)
        assert (raised.value.in_doubt, raised.value.verdicts_in_doubt) == (0, 1)


def test_what_the_broker_has_refused_is_named() -> None:
    core = SspqCore(LIMIT)
    core.opened()
    core.send([b"a", b"b"], None)
    core.ask_proof()
    core.feed(sspq.SYNC_FRAMES[sspq.SYNC_REFUSED])
    with pytest.raises(Undelivered, match="refused some of 2 messages") as raised:
        core.check()
    assert raised.value.in_doubt == 2
    core.check()


def test_a_message_is_confirmed_by_its_own_number() -> None:
    core = SspqCore(LIMIT)
    core.opened()
    core.ask(dead=False)
    core.feed(sspq.encode_batch(Batch.of([b"a"])))
    taken = core.take()
    assert isinstance(taken, tuple)
    number, delivery = taken
    assert delivery.payload == b"a"
    assert core.confirm(number + 1) is None
    assert core.confirm(number) == sspq.CONFIRM
    assert core.confirm(number) is None
    core.ask(dead=False)
    core.feed(sspq.encode_batch(Batch.of([b"b"])))
    assert core.confirm(number) is None  # not the next one by mistake
    core.lost("cut")
    assert not core.is_waiting


# --- RQ ------------------------------------------------------------------------------------------------


def nobody_waits() -> None:
    """For calls that a test looks at itself."""


def line() -> LineCore:
    return LineCore(0, payload_bytes_max=LIMIT, silence_us=15_000_000)


def test_receipts_failures_and_losses_by_position() -> None:
    changes = []
    core, call = line(), Call(lambda: changes.append(1))
    core.send(call, "q", [b"a", b"b", b"c"], 0, None)
    core.send(call, "q", [b"d"], 3, None)
    assert call.open == {0, 1, 2, 3}
    assert core.feed(rq.encode_delivered([1]) + rq.encode_undelivered([2]), 0) == []
    assert (call.confirmed, call.failed, call.open) == (1, [2], {0, 3})
    core.lost("cut")
    assert (sorted(call.in_doubt), call.open, call.why) == ([0, 3], set(), "cut")
    assert len(changes) == 3
    assert core.calls == 0


def test_an_answer_to_a_call_that_was_forgotten_reaches_nobody() -> None:
    core, call, other = line(), Call(nobody_waits), Call(nobody_waits)
    core.request(call, "q", b"?", 3, None)
    core.forget(call)
    core.request(other, "q", b"?", 3, None)  # has another id: the first one is not free yet
    core.feed(rq.encode_delivered([1]) + rq.encode_replies([0, 1], Batch.of([b"late", b"mine"])), 0)
    assert (call.answer, call.confirmed) == (b"", 0)
    assert (other.answer, other.taken) == (b"mine", True)


def test_what_is_not_about_calls_comes_out() -> None:
    core = line()
    core.session.consume("q")
    (event,) = core.feed(rq.encode_deliveries("q", [7], b"x", [0, 1], noreply=True), 0)
    assert isinstance(event, Deliveries)
    assert (event.queue, list(event.ids), event.batch.messages(), event.noreply) == ("q", [7], [b"x"], True)


@pytest.mark.parametrize(
    ("queue", "retries", "complaint"),
    [("", None, "cannot be empty"), ("q.dead", None, "dead letters"), ("q", -1, "use 0 to 255")],
)
def test_what_rq_cannot_say(queue: str, retries: int | None, complaint: str) -> None:
    core, call = line(), Call(nobody_waits)
    with pytest.raises(NotSupported, match=complaint):
        core.send(call, queue, [b"x"], 0, retries)
    assert (core.calls, call.open) == (0, set())
