"""The node's session: what it says, what it hears, and what it refuses to say."""

from array import array
from collections.abc import Callable

import pytest

from penstock.model.batch import Batch
from penstock.model.words import Ignored
from penstock.protocols import rq
from penstock.protocols.errors import MisuseError, PeerViolation
from penstock.protocols.rq import Limits
from penstock.protocols.rq_node import (
    Answers,
    Consuming,
    Controllers,
    Deliveries,
    Failed,
    Heard,
    NodeEvent,
    NodeSession,
    Receipts,
    Taken,
)

TWO = Batch.of([b"a", b"bb"])


def worker(*queues: str) -> NodeSession:
    """A node that consumes these queues, with queue ids from 1."""
    session = NodeSession(0)
    for queue_id, queue in enumerate(queues, 1):
        session.consume(queue)
        session.receive(rq.encode_consuming(queue, queue_id), 0)
    return session


def deliveries(ids: list[int], *, noreply: bool, queue: str = "q") -> bytes:
    batch = Batch.of([b"m%d" % ident for ident in ids])
    return rq.encode_deliveries(queue, ids, batch.payload, batch.bounds, noreply=noreply)


def reasons(told: list[NodeEvent]) -> list[tuple[str, int]]:
    return [(one.reason, one.count) for one in told if isinstance(one, Ignored)]


# -- asking ----------------------------------------------------------------------------------------


def test_what_a_node_asks_is_the_originals_bytes() -> None:
    session = NodeSession(0)
    assert session.consume("Q1", credit=5) == bytes.fromhex("01 a0 02 5131 62 0005 40 14 14")
    assert session.consume("Q1", credit=5, exclusive=True) == bytes.fromhex(
        "01 a0 02 5131 62 0005 40 14 20 14"
    )
    ids, wire = session.request("Q1", Batch.of([b"hello"]))
    assert list(ids) == [0]
    assert wire == bytes.fromhex("01 80 00000000 a0 02 5131 e0 00000005 68656c6c6f 0a")
    ids, wire = session.send("Q1", Batch.of([b"hello"]))
    assert list(ids) == [1]
    assert wire == bytes.fromhex("01 80 00000001 a0 02 5131 e0 00000005 68656c6c6f 21 0a")
    assert session.broadcast("Q1", Batch.of([b"hi"])) == bytes.fromhex("01 a0 02 5131 e0 00000002 6869 0e")
    assert session.cancel("Q1") == bytes.fromhex("01 a0 02 5131 15")
    assert session.closing() == bytes.fromhex("01 16")


def test_many_requests_are_one_buffer() -> None:
    session = NodeSession(0)
    counted = Batch.of([b"a", b"b", b"c"], retries=[2, 2, -1])
    ids, wire = session.request("q", counted, timeout_seconds=4)
    assert wire == rq.encode_requests("q", ids, counted, noreply=False, timeout_seconds=4)


def test_taken_answered_and_failed() -> None:
    session = NodeSession(0)
    ids, _ = session.request("q", Batch.of([b"1", b"2", b"3"]))
    assert session.receive(rq.encode_delivered(ids[:2]), 1) == [Taken(ids[:2])]
    assert session.receive(rq.encode_replies(ids[:1], Batch.of([b"yes"])), 1) == [
        Answers(ids[:1], Batch(b"yes", array("i", [0, 3]), protocol="rq"))
    ]
    assert session.receive(rq.encode_undelivered(ids[1:]), 1) == [Failed(ids[1:])]
    assert session.requests == 0


def test_receipts_for_what_wants_no_answer() -> None:
    session = NodeSession(0)
    ids, _ = session.send("q", TWO)
    assert session.receive(rq.encode_delivered(ids), 1) == [Receipts(ids)]
    assert session.requests == 0


def test_answers_that_nobody_waits_for_are_told_apart() -> None:
    session = NodeSession(0)
    asked, _ = session.request("q", Batch.of([b"1"]))
    sent, _ = session.send("q", Batch.of([b"2"]))
    wire = rq.encode_replies([asked[0], sent[0], 99], Batch.of([b"a", b"b", b"c"]))
    told = session.receive(wire, 1)
    assert Receipts(sent) in told
    assert Answers(asked, Batch(b"a", array("i", [0, 1]), protocol="rq")) in told
    assert reasons(told) == [
        ("REPLY to a NOREPLY request", 1),
        ("REPLY for a request that is not under way", 1),
    ]


def test_request_ids_stay_below_32768_and_are_given_again() -> None:
    session = NodeSession(0)
    ids, _ = session.send("q", Batch.of([b""] * 32768))
    assert max(ids) == 32767
    assert session.free_requests() == 0
    with pytest.raises(MisuseError, match="free_requests"):
        session.send("q", Batch.of([b""]))
    session.receive(rq.encode_delivered([17, 5]), 1)
    again, _ = session.request("q", TWO)
    assert sorted(again) == [5, 17]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda s: s.send("", TWO), "name"),
        (lambda s: s.request("x" * 256, TWO), "name"),
        (lambda s: s.request("q", TWO, timeout_seconds=65536), "integer"),
        (lambda s: s.send("q", Batch.of([b"x"], retries=[256])), "integer"),
        (lambda s: s.send("q", Batch.of([b"x", b"y" * 11])), "message 1 has 11 bytes"),
        (lambda s: s.broadcast("q", Batch.of([b"y" * 11])), "message 0 has 11 bytes"),
        (lambda s: s.send("q", Batch.of([b"x"], ttl_seconds=[5])), "TTL"),
        (lambda s: s.consume("q", credit=65536), "integer"),
        (lambda s: s.consume("q", priority=256), "integer"),
        (lambda s: s.cancel("never"), "none"),
        (lambda s: s.delivered([3]), "not held"),
        (lambda s: s.reply([3], Batch.of([b""])), "not held"),
        (lambda s: s.reply([], TWO), "2 answers for 0"),
    ],
)
def test_a_call_that_rq_cannot_say_is_misuse_and_changes_nothing(
    call: Callable[[NodeSession], object], why: str
) -> None:
    session = NodeSession(0, limits=Limits(payload_bytes_max=10))
    with pytest.raises(MisuseError, match=why):
        call(session)
    assert (session.requests, session.held, session.consumes) == (0, 0, False)
    ids, _ = session.send("q", Batch.of([b"y" * 10, b"z"]))
    assert list(ids) == [0, 1]


# -- working ---------------------------------------------------------------------------------------


def test_several_queues_are_consumed_and_named_either_way() -> None:
    session = NodeSession(0)
    session.consume("Q1")
    session.consume("Q2")
    assert session.consumes
    wire = rq.encode_consuming("Q1", 1) + rq.encode_consuming("Q2", 2)
    assert session.receive(wire, 1) == [Consuming("Q1"), Consuming("Q2")]
    by_name = deliveries([0], noreply=False, queue="Q1")
    by_id = bytes.fromhex("01 60 0002 e0 00000001 78 21 80 00000001 0a")
    first, second = session.receive(by_name + by_id, 2)
    assert first == Deliveries(
        "Q1", array("I", [0]), Batch(b"m0", array("i", [0, 2]), protocol="rq"), noreply=False
    )
    assert second == Deliveries(
        "Q2", array("I", [1]), Batch(b"x", array("i", [0, 1]), protocol="rq"), noreply=True
    )
    session.cancel("Q1")
    session.cancel("Q2")
    assert not session.consumes


def test_delivered_then_reply() -> None:
    session = worker("q")
    session.receive(deliveries([4, 5], noreply=False), 1)
    assert session.delivered([4, 5]) == rq.encode_delivered([4, 5])
    assert session.held == 2
    assert session.reply([5, 4], TWO) == rq.encode_replies([5, 4], TWO)
    assert session.held == 0


def test_delivered_settles_what_wants_no_reply() -> None:
    session = worker("q")
    session.receive(deliveries([4], noreply=True), 1)
    with pytest.raises(MisuseError, match="wants no reply"):
        session.reply([4], Batch.of([b""]))
    with pytest.raises(MisuseError, match="twice"):
        session.delivered([4, 4])
    with pytest.raises(MisuseError, match="not held"):
        session.delivered([4, 6])
    assert session.held == 1
    session.delivered([4])
    assert session.held == 0


def test_what_was_sent_before_the_cancel_arrived_is_still_told() -> None:
    session = worker("q")
    session.cancel("q")
    [told] = session.receive(deliveries([1], noreply=True), 1)
    assert isinstance(told, Deliveries)
    session.delivered([1])


def test_a_delivery_that_nobody_asked_for_is_sent_back() -> None:
    session = worker("q")
    assert reasons(session.receive(deliveries([1, 2], noreply=True, queue="p"), 1)) == [
        ("REQUEST of a queue that is not consumed", 2)
    ]
    assert session.take_output() == rq.encode_undelivered([1, 2])
    assert session.held == 0


def test_a_delivery_id_given_twice_is_a_violation() -> None:
    session = worker("q")
    with pytest.raises(PeerViolation, match="delivery id 3 is given again"):
        session.receive(deliveries([2, 3, 3, 4], noreply=False), 1)
    [told] = session.salvage()
    assert isinstance(told, Deliveries)
    assert list(told.ids) == [2, 3]
    assert told.batch.messages() == [b"m2", b"m3"]
    with pytest.raises(PeerViolation):
        session.receive(b"", 2)


def test_the_first_violation_of_a_chunk_counts() -> None:
    session = NodeSession(0, limits=Limits(payload_bytes_max=10))
    session.consume("q")
    twice = deliveries([1, 1], noreply=True)
    with pytest.raises(PeerViolation, match="given again"):
        session.receive(twice + b"\xe0\xff\xff\xff\xff", 1)
    over = NodeSession(0, limits=Limits(payload_bytes_max=10))
    with pytest.raises(PeerViolation, match="limit is 10"):
        over.receive(b"\x05\xe0\xff\xff\xff\xff", 1)
    assert over.salvage() == []
    assert over.take_output() == rq.PONG


def test_broadcasts_are_heard_by_consumers() -> None:
    session = worker("q")
    assert session.receive(rq.encode_broadcasts("q", TWO), 1) == [
        Heard("q", Batch(b"abb", array("i", [0, 1, 3]), protocol="rq"))
    ]
    assert reasons(session.receive(rq.encode_broadcasts("p", TWO), 1)) == [
        ("BROADCAST of a queue that is not consumed", 2)
    ]


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        ("01 a0 01 71 14", "a node's command from a controller"),
        ("01 a0 01 71 15", "a node's command from a controller"),
        ("01 80 00000001 0d", "DELIVERED for a request that is not under way"),
        ("01 80 00000001 10", "UNDELIVERED for a request that is not under way"),
        ("01 80 00000001 0a", "REQUEST without QUEUE or QUEUEID and PAYLOAD"),
        ("01 60 0001 18", "CONSUMING without QUEUE"),
        ("01 60 0001 a0 01 71 18", "CONSUMING of a queue that was not asked for"),
        ("bf 01 aa", "unknown command"),
    ],
)
def test_what_a_controller_says_in_vain_is_told(wire: str, reason: str) -> None:
    session = NodeSession(0)
    assert reasons(session.receive(bytes.fromhex(wire), 1)) == [(reason, 1)]


# -- the controller's silence, and which controller to use ---------------------------------------------


def test_a_controller_that_does_not_answer_a_ping_is_silent() -> None:
    session = NodeSession(0, silence_us=100)
    assert not session.tick(100)
    assert session.take_output() == rq.PING
    assert session.tick(200)
    assert session.silent
    assert session.receive(rq.PING, 300) == []
    assert session.take_output() == rq.PONG
    assert (session.silent, session.due_us) == (False, 400)


def test_a_controller_that_cannot_be_used_moves_to_the_back() -> None:
    controllers = Controllers(["a:1", "b:1", "c:1"])
    assert controllers.first == "a:1"
    assert controllers.move_back("a:1") == "b:1"
    assert controllers.move_back("b:1") == "c:1"
    assert controllers.move_back("c:1") == "a:1"
    with pytest.raises(MisuseError, match="at least one"):
        Controllers([])
    with pytest.raises(MisuseError, match="x:1"):
        controllers.move_back("x:1")
