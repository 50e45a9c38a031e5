"""The controller's session: received chunks to broker words, deliveries and answers to bytes."""

import re
from array import array
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from penstock.protocols import rq, rq_controller
from penstock.protocols.errors import MisuseError, PeerViolation
from penstock.protocols.rq import Limits
from penstock.protocols.rq_controller import ControllerSession
from penstock.protocols.rq_session import Consumer
from penstock.protocols.share import BROADCAST_COST, SHARE, UNBOUNDED

ORIGIN = b"0123456789abcdef01"


def stored(messages: list[bytes], first_offset: int = 0, **columns: Any) -> Slice:
    batch = Batch.of(messages)
    columns = {"origin": ORIGIN, "time_us": 0, **columns}
    return Slice(batch.payload, batch.bounds, 0, len(messages), first_offset, **columns)


def consumer(*doors: str, limits: Limits | None = None) -> ControllerSession:
    """A session whose node consumes these queues already."""
    session = ControllerSession(0, limits=limits)
    for door in doors:
        session.receive(rq.encode_consume(door, 0, 20, False), 0)
        queue = door.removesuffix(".dead")
        session.consuming(queue, dead=queue != door)
    return session


def reasons(told: list[Command]) -> list[tuple[str, int]]:
    return [(one.reason, one.count) for one in told if isinstance(one, Ignored)]


# -- requests --------------------------------------------------------------------------------------


def test_a_run_of_requests_is_one_publish() -> None:
    batch = Batch.of([b"a", b"bb"], retries=[1, 2])
    session = ControllerSession(0)
    wire = rq.encode_requests("orders", [7, 8], batch, noreply=False, timeout_seconds=5)
    assert session.receive(memoryview(bytearray(wire)), 1) == [
        Publish(
            "orders",
            Batch(b"abb", array("i", [0, 1, 3]), retries=array("h", [1, 2]), protocol="rq"),
            tickets=array("I", [7, 8]),
            wants_reply=True,
            timeout_seconds=5,
        )
    ]
    [noreply] = session.receive(rq.encode_requests("orders", [9], Batch.of([b""]), noreply=True), 2)
    assert isinstance(noreply, Publish)
    assert (noreply.wants_reply, noreply.tickets, noreply.batch.retries) == (False, array("I", [9]), None)


def test_the_answers_to_a_requester_are_the_originals_bytes() -> None:
    session = ControllerSession(0)
    tickets = array("I", [7, 0xFFFFFFFE])
    assert session.delivered(tickets).hex(" ", 7) == "0180000000070d 0180fffffffe0d"
    assert session.undelivered(tickets[:1]) == bytes.fromhex("01 80 00000007 10")
    answers = Batch.of([b"yes", b""])
    assert session.replies(tickets, answers) == bytes.fromhex(
        "01 80 00000007 e0 00000003 796573 0b 01 01 80 fffffffe e0 00000001 00 0b"
    )
    with pytest.raises(MisuseError, match="1 answers for 2 tickets"):
        session.replies(tickets, Batch.of([b"x"]))


@pytest.mark.parametrize(
    ("wire", "output", "reason"),
    [
        ("01 80 00000007 a0 01 71 0a", "01 80 00000007 10", "REQUEST without PAYLOAD"),
        ("01 80 00000007 e0 00000000 0a", "01 80 00000007 10", "REQUEST without QUEUE or QUEUEID"),
        ("01 80 00000007 0a", "01 80 00000007 10", "REQUEST without QUEUE or QUEUEID and PAYLOAD"),
        ("01 a0 01 71 e0 00000000 0a", "", "REQUEST without ID"),
        ("01 80 00000007 60 0001 e0 00000000 0a", "01 80 00000007 10", "REQUEST with an unknown QUEUEID"),
        ("01 80 00000007 60 0000 e0 00000000 0a", "01 80 00000007 10", "REQUEST with an unknown QUEUEID"),
        (
            "01 80 00000007 a0 06 712e64656164 e0 00000000 0a",
            "01 80 00000007 10",
            "REQUEST for a queue that cannot be",
        ),
        ("01 80 00000007 a0 01 0a e0 00000000 0a", "01 80 00000007 10", "REQUEST for a queue that cannot be"),
        ("01 80 00000007 a0 00 e0 00000000 0a", "01 80 00000007 10", "REQUEST with an empty QUEUE"),
        ("01 80 00000007 a0 01 ff e0 00000000 0a", "01 80 00000007 10",
         "REQUEST with a QUEUE that is not UTF-8"),
        ("01 0b", "", "REPLY without ID"),
        ("01 0d", "", "DELIVERED without ID"),
        ("01 80 00000007 e0 00000000 0e", "", "BROADCAST without QUEUE or QUEUEID"),
        ("01 60 0009 e0 00000000 0e", "", "BROADCAST with an unknown QUEUEID"),
        ("01 a0 06 712e64656164 e0 00000000 0e", "", "BROADCAST for a queue that cannot be"),
        ("01 14", "", "CONSUME without QUEUE or QUEUEID"),
        ("01 60 0009 14", "", "CONSUME with an unknown QUEUEID"),
        ("01 a0 05 2e64656164 14", "", "CONSUME for a queue that cannot be"),
        ("01 a0 0b 712e646561642e64656164 14", "", "CONSUME for a queue that cannot be"),
        ("01 15", "", "CANCEL_QUEUE without QUEUE or QUEUEID"),
        ("01 60 0009 15", "", "CANCEL_QUEUE of a queue that is not consumed"),
        ("01 80 00000000 0d", "", "DELIVERED for a delivery that is not out"),
        ("01 80 ffffffff e0 00000000 0b", "", "REPLY to a delivery that is not out"),
        ("01 80 00000000 10", "", "UNDELIVERED from a node"),
        ("01 60 0001 a0 01 71 18", "", "CONSUMING from a node"),
        ("17", "", "SERVER_FULL from a node"),
        ("1f", "", "unknown command"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_answered_where_it_can_be_and_always_told(
    wire: str, output: str, reason: str
) -> None:
    session = ControllerSession(0)
    assert reasons(session.receive(bytes.fromhex(wire), 1)) == [(reason, 1)]
    assert session.take_output() == bytes.fromhex(output)
    assert session.take_output() == b""


def test_a_flood_in_vain_is_added_up() -> None:
    session = ControllerSession(0, share=UNBOUNDED)
    wire = b"\x1f" * 1000 + b"\x01\x0a" * 1000 + rq.encode_delivered(range(1000))
    assert reasons(session.receive(wire, 1)) == [
        ("REQUEST without ID and QUEUE or QUEUEID and PAYLOAD", 1000),
        ("DELIVERED for a delivery that is not out", 1000),
        ("unknown command", 1000),
    ]


def test_what_came_before_a_violation_is_salvaged() -> None:
    session = ControllerSession(0, limits=Limits(payload_bytes_max=10))
    good = rq.encode_requests("q", [1], Batch.of([b"x"]), noreply=True)
    with pytest.raises(PeerViolation, match="limit is 10"):
        session.receive(good + b"\x05\xe0\x00\x00\x00\x0b", 1)
    [publish] = session.salvage()
    assert isinstance(publish, Publish)
    assert session.salvage() == []
    assert session.take_output() == rq.PONG
    with pytest.raises(PeerViolation):
        session.receive(good, 2)
    assert session.salvage() == []


# -- consumers -------------------------------------------------------------------------------------


def test_consume_is_told_with_its_defaults() -> None:
    session = ControllerSession(0)
    assert session.receive(bytes.fromhex("01 a0 02 5131 14"), 1) == [
        Consume("Q1", 0, dead=False, priority=20, exclusive=False)
    ]
    assert session.receive(rq.encode_consume("Q2.dead", 5, 0, True), 1) == [
        Consume("Q2", 5, dead=True, priority=0, exclusive=True)
    ]


def test_queue_ids_count_from_one_and_name_the_queue_in_both_directions() -> None:
    session = consumer("Q1")
    session.receive(rq.encode_consume("Q2.dead", 0, 20, False), 1)
    assert session.consuming("Q2", dead=True) == bytes.fromhex("01 60 0002 a0 07 51322e64656164 18")
    [publish] = session.receive(bytes.fromhex("01 80 00000001 60 0001 e0 00000000 0a"), 1)
    assert isinstance(publish, Publish)
    assert publish.queue == "Q1"
    assert session.receive(bytes.fromhex("01 60 0002 15"), 1) == [Cancel("Q2", dead=True)]
    # The dead-letter door cannot be sent to by its id either.
    assert reasons(session.receive(bytes.fromhex("01 80 00000001 60 0002 e0 00000000 0a"), 1)) == [
        ("REQUEST for a queue that cannot be", 1)
    ]
    # Consumed again, a queue keeps its id.
    session.receive(rq.encode_consume("Q2.dead", 0, 20, False), 1)
    assert session.consuming("Q2", dead=True)[2:4] == bytes.fromhex("0002")


def test_consuming_is_said_once_for_each_consume() -> None:
    """The original library dies of one that it has not asked for, and waits for one that it has."""
    session = consumer("Q1")
    assert session.consuming("Q1") == b""
    session.receive(rq.encode_consume("Q1", 9, 30, False) * 2, 1)
    assert [session.consuming("Q1") for _ in range(3)] == [rq.encode_consuming("Q1", 1)] * 2 + [b""]


@pytest.mark.parametrize("again", [b"", rq.encode_consume("q", 0, 20, False)])
def test_no_call_fails_for_what_the_node_has_said_meanwhile(again: bytes) -> None:
    """One chunk asks, cancels and leaves; the broker still acts on its first command."""
    session = ControllerSession(0)
    wire = rq.encode_consume("q", 0, 20, False) + rq.encode_cancel("q") + again + rq.CLOSING
    assert len(session.receive(wire, 1)) == (4 if again else 3)
    assert session.consuming("q") == rq.encode_consuming("q", 1)
    assert session.consuming("q") == (rq.encode_consuming("q", 1) if again else b"")
    assert session.deliver("q", [stored([b"x"])])
    assert session.broadcast("q", Batch.of([b"y"]))
    assert session.receive(rq.encode_delivered([0]), 2) == [Settle("q", Outcome.ACK, ORIGIN, [(0, 1)])]
    assert session.consumer("q") is (Consumer.CONSUMING if again else Consumer.CANCELLED)


def test_work_needs_a_consumer_that_was_told() -> None:
    session = ControllerSession(0)
    with pytest.raises(MisuseError, match="never asked"):
        session.consuming("q")
    session.receive(rq.encode_consume("q", 0, 20, True), 1)
    for dead in (False, True):
        with pytest.raises(MisuseError, match="never told"):
            session.deliver("q", [stored([b"x"])], dead=dead)
    assert session.deliveries == 0


def test_a_node_may_not_consume_without_end() -> None:
    session = consumer("a", "b", limits=Limits(consumed_queues_max=2))
    assert reasons(session.receive(rq.encode_consume("c", 0, 20, False), 1)) == [
        ("CONSUME of too many queues", 1)
    ]
    assert session.receive(rq.encode_consume("a", 3, 20, False), 1) == [Consume("a", 3)]


def test_a_cancelled_consumer_makes_room_for_another() -> None:
    """A worker that takes queue after queue goes on for as long as there are queue ids."""
    session = ControllerSession(0, limits=Limits(consumed_queues_max=2))
    session.receive(rq.encode_consume("kept", 0, 20, False), 1)
    for number in range(1, rq.QUEUE_ID_MAX):
        name = f"q{number}"
        assert session.receive(rq.encode_consume(name, 0, 20, False), 1) == [Consume(name, 0)]
        session.consuming(name)
        assert session.receive(rq.encode_cancel(name), 1) == [Cancel(name)]
    assert reasons(session.receive(rq.encode_consume("one more", 0, 20, False), 1)) == [
        ("CONSUME of too many queues on one connection", 1)
    ]
    assert session.receive(rq.encode_consume("q1", 3, 20, False), 1) == [Consume("q1", 3)]
    assert reasons(session.receive(rq.encode_consume("q2", 3, 20, False), 1)) == [
        ("CONSUME of too many queues", 1)
    ]


def test_broadcasts_pass_through() -> None:
    session = consumer("Q1")
    wire = bytes.fromhex("01 80 00000009 a0 02 5131 e0 00000002 6869 0e 01 60 0001 e0 00000000 0e")
    by_name, by_id = session.receive(wire, 1)
    assert by_name == Broadcast("Q1", Batch(b"hi", array("i", [0, 2]), protocol="rq"))
    assert isinstance(by_id, Broadcast)
    assert by_id.queue == "Q1"
    assert session.broadcast("Q1", by_name.batch) == bytes.fromhex("01 a0 02 5131 e0 00000002 6869 0e")
    with pytest.raises(MisuseError, match="never told"):
        session.broadcast("Q9", by_name.batch)


# -- deliveries ------------------------------------------------------------------------------------


def test_deliveries_are_the_originals_bytes_and_name_the_queue_by_name() -> None:
    session = consumer("Q1")
    assert session.deliver("Q1", [stored([b"hello"]), stored([b"x"], reply=[b"r"])]) == bytes.fromhex(
        "01 a0 02 5131 e0 00000005 68656c6c6f 21 80 00000000 0a 01 a0 02 5131 e0 00000001 78 80 00000001 0a"
    )


def test_a_slice_of_a_block_is_delivered_and_settled_by_its_offsets() -> None:
    session = consumer("q")
    block = stored([b"a", b"bb", b"ccc", b"dddd"], first_offset=100)
    block.lo, block.hi = 1, 3
    block.payload = memoryview(block.payload)
    wire = session.deliver("q", [block])
    assert wire == rq.encode_deliveries("q", [0, 1], b"bbccc", array("i", [0, 2, 5]), noreply=True)
    assert session.receive(rq.encode_delivered([1, 0]), 1) == [
        Settle("q", Outcome.ACK, ORIGIN, [(101, 103)], dead=False)
    ]


def test_messages_with_and_without_a_reply_address_in_one_slice() -> None:
    session = consumer("q")
    mixed = stored([b"a", b"b", b"c"], reply=[b"r", b"", b"r"])
    wire = session.deliver("q", [mixed])
    assert wire == (
        rq.encode_deliveries("q", [0], b"a", [0, 1], noreply=False)
        + rq.encode_deliveries("q", [1], b"b", [0, 1], noreply=True)
        + rq.encode_deliveries("q", [2], b"c", [0, 1], noreply=False)
    )
    assert session.receive(rq.encode_delivered([0, 1, 2]), 1) == [
        Accepted("q", ORIGIN, [(0, 1), (2, 3)]),
        Settle("q", Outcome.ACK, ORIGIN, [(1, 2)]),
    ]


def test_a_dead_letter_is_delivered_without_reply_and_settled_as_dead() -> None:
    session = consumer("q.dead", "q")
    wire = session.deliver("q", [stored([b"x"], first_offset=9, reply=[b"r"])], dead=True)
    assert wire == rq.encode_deliveries("q.dead", [0], b"x", [0, 1], noreply=True)
    session.deliver("q", [stored([b"y"], first_offset=10)])
    assert session.receive(rq.encode_delivered([0, 1]), 1) == [
        Settle("q", Outcome.ACK, ORIGIN, [(9, 10)], dead=True),
        Settle("q", Outcome.ACK, ORIGIN, [(10, 11)], dead=False),
    ]


def test_replies_become_one_word_with_offsets_and_answers() -> None:
    session = consumer("q")
    session.deliver("q", [stored([b"1", b"2", b"3"], first_offset=50, reply=[b"r"] * 3)])
    wire = rq.encode_delivered([0, 1]) + rq.encode_replies([2, 0, 1], Batch.of([b"c", b"a", b"b"]))
    accepted, reply = session.receive(wire, 1)
    assert accepted == Accepted("q", ORIGIN, [(50, 52)])
    assert reply == Reply(
        "q", ORIGIN, array("q", [52, 50, 51]), Batch(b"cab", array("i", [0, 1, 2, 3]), protocol="rq")
    )
    assert session.deliveries == 0


def test_replies_for_several_queues_and_openings_are_parted() -> None:
    session = consumer("p", "q")
    session.deliver("p", [stored([b"1"], first_offset=5, reply=[b"r"])])
    session.deliver("q", [stored([b"2"], first_offset=6, reply=[b"r"])])
    session.deliver("q", [stored([b"3"], first_offset=7, reply=[b"r"], origin=b"f" * 18)])
    session.deliver("q", [stored([b"4"], first_offset=8)])
    answers = Batch.of([b"a", b"b", b"c", b"d", b"?"])
    told = session.receive(rq.encode_replies([2, 1, 0, 3, 77], answers), 1)
    assert [(one.queue, one.origin, list(one.offsets), one.answers.messages()) for one in told
            if isinstance(one, Reply)] == [
        ("q", b"f" * 18, [7], [b"a"]), ("q", ORIGIN, [6], [b"b"]), ("p", ORIGIN, [5], [b"c"])
    ]  # fmt: skip
    assert [one for one in told if isinstance(one, Settle)] == [Settle("q", Outcome.ACK, ORIGIN, [(8, 9)])]
    assert reasons(told) == [("REPLY to a NOREPLY delivery", 1), ("REPLY to a delivery that is not out", 1)]
    assert session.deliveries == 0


def test_delivery_ids_start_at_0_and_freed_ones_are_given_again() -> None:
    session = consumer("q")
    session.deliver("q", [stored([b""] * 4)])
    session.receive(rq.encode_delivered([1, 2]), 1)
    wire = session.deliver("q", [stored([b""] * 3, first_offset=10)])
    assert wire == rq.encode_deliveries("q", [1, 2, 4], b"", [0] * 4, noreply=True)


def test_an_id_that_is_still_out_is_never_given_again() -> None:
    """A late answer to a withdrawn request must not reach another requester."""
    session = consumer("q")
    session.deliver("q", [stored([b"old"], first_offset=1, reply=[b"r"])])
    session.deliver("q", [stored([b"new"] * 5, first_offset=2, reply=[b"r"] * 5)])
    [late] = session.receive(rq.encode_replies([0], Batch.of([b"late"])), 1)
    assert isinstance(late, Reply)
    assert list(late.offsets) == [1]


def test_no_more_than_32768_deliveries_are_out() -> None:
    session = consumer("q")
    assert session.free_deliveries() == 32768
    wire = session.deliver("q", [stored([b""] * 32768)])
    assert wire.endswith(bytes.fromhex("21 80 00007fff 0a"))
    assert session.free_deliveries() == 0
    with pytest.raises(MisuseError, match="free_deliveries"):
        session.deliver("q", [stored([b""])])
    session.receive(rq.encode_delivered([32767]), 1)
    assert session.free_deliveries() == 1
    assert session.deliver("q", [stored([b""])]).endswith(bytes.fromhex("80 00007fff 0a"))


def test_what_a_cancelled_consumer_holds_it_may_still_settle() -> None:
    session = consumer("q")
    session.deliver("q", [stored([b"x"])])
    assert session.receive(rq.encode_cancel("q"), 1) == [Cancel("q")]
    assert session.receive(rq.encode_delivered([0]), 1) == [Settle("q", Outcome.ACK, ORIGIN, [(0, 1)])]


def test_what_is_pending_may_finish_after_closing() -> None:
    session = consumer("q")
    session.deliver("q", [stored([b"x"], reply=[b"r"])])
    assert session.closing() == bytes.fromhex("01 16")
    assert session.receive(rq.CLOSING, 1) == [Closing()]
    [accepted] = session.receive(rq.encode_delivered([0]), 1)
    assert isinstance(accepted, Accepted)
    [reply] = session.receive(rq.encode_replies([0], Batch.of([b"y"])), 1)
    assert isinstance(reply, Reply)
    assert session.replies([4], Batch.of([b"z"])) == rq.encode_replies([4], Batch.of([b"z"]))


def test_a_full_controller_says_so_and_nothing_else() -> None:
    session = ControllerSession(0)
    assert session.full() == bytes.fromhex("17")
    with pytest.raises(MisuseError, match="SERVER_FULL"):
        session.delivered([1])


@settings(max_examples=60)
@given(st.lists(st.integers(0, 60), max_size=60), st.lists(st.booleans(), min_size=40, max_size=40))
def test_settlements_cover_each_offset_once_in_as_few_ranges_as_can_be(
    named: list[int], wants_reply: list[bool]
) -> None:
    session = consumer("q")
    reply = [b"r" if wants else b"" for wants in wants_reply]
    session.deliver("q", [stored([b""] * 40, first_offset=1000, reply=reply)])
    told = session.receive(rq.encode_delivered(named), 1)
    out = {1000 + ident for ident in named if ident < 40}
    for kind, wanted in ((Settle, False), (Accepted, True)):
        ranges = [r for one in told if isinstance(one, kind) for r in one.ranges]
        offsets = [offset for first, end in ranges for offset in range(first, end)]
        assert offsets == sorted(offset for offset in out if wants_reply[offset - 1000] is wanted)
        assert all(first > end for (_, end), (first, _) in pairwise(ranges))
    assert sum(one.count for one in told if isinstance(one, Ignored)) == len(named) - len(out)


def test_settlements_that_are_far_apart_cost_as_much_as_neighbours() -> None:
    session = consumer("q")
    far = 1 << 50
    session.deliver("q", [stored([b"old"]), stored([b"new"], first_offset=far)])
    [settled] = session.receive(rq.encode_delivered([0, 1]), 1)
    assert isinstance(settled, Settle)
    assert settled.ranges == [(0, 1), (far, far + 1)]


@pytest.mark.parametrize("in_order", [True, False])
def test_whatever_goes_out_and_is_answered_in_between_each_answer_is_for_what_is_out(
    in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deliveries and answers in turn, in order and not, so that ids are given again while others are out."""
    monkeypatch.setattr(rq_controller, "IN_ORDER", in_order)
    monkeypatch.setattr(rq_controller, "_NOTICES_MAX", 4)
    for seed in range(30):
        random = Random(seed)
        session, out = consumer("q", "q.dead"), dict[int, list[Any]]()
        for _ in range(40):
            for _ in range(random.choice((0, 1, 6))):
                dead, offset, count = random.random() < 0.2, random.randrange(40), random.randrange(1, 5)
                reply = [random.choice((b"", b"r")) for _ in range(count)] if random.random() < 0.2 else None
                wire = session.deliver("q", [stored([b"x"] * count, offset, reply=reply)], dead=dead)
                ids = [int.from_bytes(it) for it in re.findall(rb"\x80(....)\x0a", wire, re.DOTALL)]
                assert len(ids) == count
                assert out.keys().isdisjoint(ids)
                for i, ident in enumerate(ids):
                    wants_reply = reply is not None and reply[i] == b"r" and not dead
                    out[ident] = [Accepted if wants_reply else Settle, dead, offset + i]
            ids = list(out)[: random.choice((0, 1, 3, 20))]
            ids += random.choices(range(len(out) + 9), k=random.choice((0, 0, 2)))
            due, strays = set(), 0
            for ident in ids:
                kind, dead, offset = out.get(ident, (None, False, 0))
                due |= {(kind, dead, offset)} if kind else set()
                strays += kind is None
                if kind is Accepted:
                    out[ident][0] = None  # It has been taken, and is out still.
                elif ident in out and kind:
                    del out[ident]
            told = session.receive(rq.encode_delivered(ids), 1)
            done = {
                (type(one), isinstance(one, Settle) and one.dead, offset)
                for one in told
                if isinstance(one, Settle | Accepted)
                for first, end in one.ranges
                for offset in range(first, end)
            }
            assert done == due, seed
            assert sum(one.count for one in told if isinstance(one, Ignored)) == strays
            assert session.deliveries == len(out)


# -- silence ---------------------------------------------------------------------------------------

SECOND = 1_000_000


def test_a_silent_node_is_pinged_then_marked_idle_and_awake_again_with_its_first_byte() -> None:
    session = ControllerSession(0)

    def state() -> tuple[bool, int | None, bytes]:
        return session.idle, session.due_us, session.take_output()

    assert state() == (False, 15 * SECOND, b"")
    assert not session.tick(15 * SECOND - 1)
    assert state() == (False, 15 * SECOND, b"")
    assert not session.tick(15 * SECOND)
    assert state() == (False, 30 * SECOND, rq.PING)
    assert not session.tick(30 * SECOND - 1)
    assert session.tick(30 * SECOND)
    assert state() == (True, None, b"")
    assert not session.tick(100 * SECOND)
    assert state() == (True, None, b"")
    session.receive(b"", 101 * SECOND)
    assert state() == (True, None, b"")
    session.receive(b"\x01", 101 * SECOND)
    assert state() == (False, 116 * SECOND, b"")
    assert session.tick(101 * SECOND + 1)
    assert not session.tick(101 * SECOND + 2)


def test_a_tick_that_comes_late_still_gives_the_node_its_time() -> None:
    session = ControllerSession(0)
    session.tick(60 * SECOND)
    assert not session.tick(74 * SECOND)
    assert not session.idle
    assert session.tick(75 * SECOND)


def test_a_ping_is_answered_each_time() -> None:
    session = ControllerSession(0)
    assert session.receive(b"\x05\x05\x06", 1) == []
    assert session.take_output() == b"\x06\x06"


def test_broadcasts_take_much_of_a_share_but_those_that_are_one_event() -> None:
    """Each event is written to everybody who consumes the queue, however many they are."""
    one = rq.encode_broadcasts("q", Batch.of([b"x"]))
    for between, most in ((b"", 20), (rq.PONG, SHARE // BROADCAST_COST)):
        session = ControllerSession(0)
        commands = session.receive((one + between) * 20, 0)
        told = sum(len(it.batch) for it in commands if isinstance(it, Broadcast))
        assert 0 < told <= most
        assert bool(session.reader.rest) is bool(between)
