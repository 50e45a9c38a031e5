"""The contract: a consumer goes on with what it had. Resuming after a restart, and what is not given back."""

import pytest

from penstock.model.life import Event
from penstock.model.words import Outcome, Ranges
from tests.log.contract_rig import Got, Rig, named, payloads, ranges_of


def resume(rig: Rig, queue: str, messages: list[Got], *, consumer: str = "ann", dead: bool = False) -> int:
    """How many of these messages, which share an origin, are the consumer's again."""
    (origin,) = {message.origin for message in messages}
    granted = rig.engine.resume(queue, consumer, ranges_of(messages), rig.now_us, origin=origin, dead=dead)
    named_offsets = {message.offset for message in messages}
    offsets = [offset for first, end in granted for offset in range(first, end)]
    assert len(offsets) == len(set(offsets))
    assert named_offsets.issuperset(offsets)
    return len(offsets)


class Resuming:
    """resume: held again, without a delivery."""

    @pytest.mark.parametrize("how", ["reopen", "crash"])
    def test_what_was_held_is_held_again(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.send("orders", named("m", 10))
        got = rig.take("orders", 6)
        rig.restart(how)
        rig.has("orders", ready=10)
        assert resume(rig, "orders", got) == 6
        rig.has("orders", ready=4, held=6)
        assert payloads(rig.take("orders", consumer="bob")) == named("m", 10)[6:]
        assert len(rig.ack("orders", got)) > 0
        rig.has("orders", held=4)

    def test_it_is_no_delivery_and_no_event(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 3), retries=2)
        got = rig.take("orders")
        rig.restart("reopen")
        events_before = len(rig.events("orders"))
        counts_before = rig.engine.counts("orders")
        assert resume(rig, "orders", got) == 3
        assert len(rig.events("orders")) == events_before
        assert rig.engine.counts("orders") == counts_before
        rig.ack("orders", got)
        acked = [event for event in rig.events("orders") if event.event is Event.ACKED]
        assert [(event.attempt, event.consumer) for event in acked] == [(1, "ann")] * 3
        rig.has("orders")

    def test_what_is_lost_after_that_counts_once(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"a"], retries=5)
        got = rig.take("orders")
        rig.restart("crash")
        assert resume(rig, "orders", got) == 1
        rig.lose("orders")
        (again,) = rig.take("orders")
        assert (again.attempts, again.retries) == (1, 4)

    def test_nothing_that_is_gone_or_in_other_hands(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 6))
        got = rig.take("orders")
        rig.ack("orders", got[:2])
        rig.restart("reopen")
        taken = rig.take("orders", 2, consumer="bob")
        assert payloads(taken) == named("m", 4)[2:]
        assert resume(rig, "orders", got) == 2
        rig.has("orders", held=4)
        assert rig.ack("orders", got[:4]) == []
        rig.ack("orders", got[4:])
        rig.ack("orders", taken, consumer="bob")
        rig.has("orders")

    def test_nothing_of_another_origin(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("old", 3))
        (old, *_) = rig.take("orders")
        rig.restart("reopen")
        rig.send("orders", named("new", 3))
        everything: Ranges = [(0, 6)]
        granted = rig.engine.resume("orders", "ann", everything, rig.now_us, origin=old.origin)
        assert granted == [(0, 3)]
        assert rig.engine.resume("orders", "ann", everything, rig.now_us, origin=b"f" * 18) == []
        rig.has("orders", ready=3, held=3)

    def test_nothing_that_was_delivered_more_often(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 4))
        got = rig.take("orders", 3)
        rig.settle("orders", Outcome.REQUEUE, got[1:2])
        rig.restart("reopen")
        everything: Ranges = [(0, 4)]
        asked = rig.engine.resume(
            "orders", "ann", everything, rig.now_us, origin=got[0].origin, attempts_max=0
        )
        assert asked == [(0, 1), (2, 4)]
        rig.has("orders", ready=1, held=3)
        assert rig.engine.resume(
            "orders", "ann", everything, rig.now_us, origin=got[0].origin, attempts_max=1
        ) == [(1, 2)]
        rig.has("orders", held=4)

    def test_no_queue_no_messages(self, rig: Rig) -> None:
        rig.open()
        assert rig.engine.resume("nowhere", "ann", [(0, 5)], rig.now_us, origin=b"0" * 18) == []

    def test_what_was_requeued_before(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 3))
        first = rig.take("orders", 1)
        rig.settle("orders", Outcome.REQUEUE, first)
        got = rig.take("orders", 3)
        assert payloads(got) == [b"m-1", b"m-2", b"m-0"]
        rig.restart("reopen")
        moved = [message for message in got if message.payload == b"m-0"]
        assert resume(rig, "orders", moved) == 1
        rig.has("orders", ready=2, held=1)
        rig.lose("orders")
        # Back in its place, which is behind the others.
        assert payloads(rig.take("orders")) == [b"m-1", b"m-2", b"m-0"]

    def test_dead_letters_through_their_own_door(self, rig: Rig) -> None:
        rig.open()
        rig.kill("orders", named("d", 3))
        got = rig.take("orders", 2, dead=True)
        rig.restart("crash")
        assert resume(rig, "orders", got, dead=False) == 0
        assert resume(rig, "orders", got, dead=True) == 2
        rig.has("orders", dead=3)
        assert payloads(rig.take("orders", dead=True, consumer="bob")) == [b"d-2"]
        rig.settle("orders", Outcome.ACK, got, dead=True)
        rig.has("orders", dead=1)

    def test_the_living_door_does_not_give_dead_letters(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 2))
        got = rig.take("orders")
        rig.settle("orders", Outcome.REJECT, got[:1])
        rig.restart("reopen")
        assert resume(rig, "orders", got) == 1
        rig.has("orders", held=1, dead=1)


class Durable:
    """durable_end and transaction_newest: what a new broker can rely on."""

    def test_messages_are_durable_up_to_an_offset(self, rig: Rig) -> None:
        rig.open()
        assert rig.engine.durable_end("orders") == 0
        stored = rig.send("orders", named("m", 3))
        assert rig.engine.durable_end("orders") == stored.end
        rig.restart("crash")
        assert rig.engine.durable_end("orders") >= stored.end

    def test_the_newest_key_of_a_series(self, rig: Rig) -> None:
        rig.open()
        assert rig.engine.transaction_newest("relay/a/0/") is None
        for number in range(3):
            rig.transact(f"relay/a/0/{number}", ("orders", [b"x"]))
        rig.transact("relay/b/0/7", ("orders", [b"x"]))
        assert rig.engine.transaction_newest("relay/a/0/") == "relay/a/0/2"
        for how in ("reopen", "crash"):
            rig.restart(how)
            assert rig.engine.transaction_newest("relay/a/0/") == "relay/a/0/2"
            assert rig.engine.transaction_newest("relay/b/0/") == "relay/b/0/7"
