"""The contract, part 2: messages go out. Taking, settling, giving back, and the order of it all."""

import pytest

from penstock.model.batch import Batch
from penstock.model.life import Event, Reason
from penstock.model.words import Outcome, Ranges, Where
from tests.log.contract_rig import Rig, named, open_fates, payloads

ABC = [b"a", b"b", b"c"]
BOTH = [Where.PLACE, Where.TAIL]


class Taking:
    """take: how much, in which order, for whom."""

    def test_messages_come_in_the_order_of_their_arrival(self, rig: Rig) -> None:
        rig.open()
        sent = named("m", 50)
        for at in range(0, 50, 7):
            rig.send("orders", sent[at : at + 7])
        got = rig.take("orders")
        assert payloads(got) == sent
        assert [m.offset for m in got] == list(range(50))
        rig.has("orders", held=50)

    def test_what_one_has_another_does_not_get(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 10))
        assert payloads(rig.take("orders", 3, consumer="ann")) == named("m", 3)
        assert payloads(rig.take("orders", 3, consumer="bob")) == named("m", 6)[3:]
        assert payloads(rig.take("orders", 9, consumer="ann")) == named("m", 10)[6:]
        assert rig.take("orders", consumer="bob") == []
        rig.has("orders", held=10)

    def test_never_more_than_the_count(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 5))
        assert rig.take("orders", 0) == []
        assert len(rig.take("orders", 2)) == 2
        rig.has("orders", ready=3, held=2)

    def test_never_more_than_the_bytes_but_a_first_large_one_comes_alone(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x" * size for size in (40, 40, 40, 500, 10, 10)])
        assert [len(m.payload) for m in rig.take_bytes("orders", 100)] == [40, 40]
        assert [len(m.payload) for m in rig.take_bytes("orders", 100)] == [40]
        assert [len(m.payload) for m in rig.take_bytes("orders", 100)] == [500]
        assert [len(m.payload) for m in rig.take_bytes("orders", 20)] == [10, 10]
        rig.has("orders", held=6)

    def test_the_bytes_count_across_stored_blocks(self, rig: Rig) -> None:
        rig.open()
        for size in (40, 40, 40):
            rig.send("orders", [b"x" * size])
        assert len(rig.take_bytes("orders", 100)) == 2
        assert len(rig.take_bytes("orders", 100)) == 1

    def test_what_is_appended_can_be_taken_before_it_is_confirmed(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"first"])
        came, receipt = rig.receipts()
        rig.engine.append("orders", Batch.of([b"second"]), rig.now_us, receipt)
        assert payloads(rig.take("orders")) == [b"first", b"second"]
        rig.turn()
        assert len(came) == 1

    def test_an_unknown_queue_has_nothing(self, rig: Rig) -> None:
        engine = rig.open()
        assert rig.take("nowhere") == rig.take("nowhere", dead=True) == []
        assert engine.ready("nowhere") == 0
        assert engine.queues() == []

    def test_a_paused_queue_accepts_and_settles_but_gives_nothing(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", [b"dead"])
        rig.send("orders", ABC)
        held = rig.take("orders", 1)
        engine.pause("orders", True, rig.now_us)
        rig.send("orders", [b"d"])
        assert rig.take("orders") == rig.take("orders", dead=True) == []
        assert engine.ready("orders") == engine.ready("orders", dead=True) == 0
        assert rig.counts("orders") == (3, 1, 1)
        assert engine.describe("orders").paused
        assert engine.is_paused("orders")
        assert open_fates(rig.ack("orders", held)) == [(held[0].offset, Event.ACKED, Reason.NONE)]
        engine.pause("orders", False, rig.now_us)
        assert not engine.is_paused("orders")
        assert payloads(rig.take("orders")) == [b"b", b"c", b"d"]

    def test_ready_counts_each_door_for_itself(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", [b"x", b"y"])
        rig.send("orders", ABC)
        assert (engine.ready("orders"), engine.ready("orders", dead=True)) == (3, 2)
        rig.take("orders", 1)
        rig.take("orders", 1, dead=True)
        assert (engine.ready("orders"), engine.ready("orders", dead=True)) == (2, 1)


class Settling:
    """settle: a consumer's verdict on what it holds, and only on that."""

    def test_acknowledged_is_gone(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", ABC)
        got = rig.take("orders")
        fates = rig.ack("orders", got)
        assert open_fates(fates) == [(m.offset, Event.ACKED, Reason.NONE) for m in got]
        rig.has("orders")
        assert rig.take("orders") == rig.take("orders", dead=True) == []

    def test_rejected_is_dead(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", ABC)
        got = rig.take("orders", 2)
        fates = rig.settle("orders", Outcome.REJECT, got)
        assert open_fates(fates) == [(m.offset, Event.DEAD, Reason.REJECTED) for m in got]
        rig.has("orders", ready=1, dead=2)

    def test_rejected_is_gone_where_dead_letters_are_off(self, rig: Rig) -> None:
        rig.open({"orders": {"dead-letters": "off"}})
        rig.send("orders", ABC)
        fates = rig.settle("orders", Outcome.REJECT, rig.take("orders", 1))
        assert open_fates(fates) == [(0, Event.REJECTED, Reason.REJECTED)]
        rig.has("orders", ready=2)
        assert rig.take("orders", dead=True) == []

    def test_requeued_stands_behind_the_tail_of_that_moment(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", ABC)
        (a, b) = rig.take("orders", 2)
        fates = rig.settle("orders", Outcome.REQUEUE, [a])
        assert [(f.event, f.reason) for f in fates] == [(Event.REQUEUED, Reason.NONE)]
        rig.send("orders", [b"d"])
        rig.settle("orders", Outcome.REQUEUE, [b])
        rig.send("orders", [b"e"])
        rig.has("orders", ready=5)
        assert payloads(rig.take("orders")) == [b"c", b"a", b"d", b"b", b"e"]

    def test_ranges_may_name_many_some_and_none(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", named("m", 10))
        rig.take("orders")
        ranges: Ranges = [(7, 9), (0, 2), (4, 4), (6, 5), (1, 3), (100, 200)]
        fates = engine.settle("orders", "ann", Outcome.ACK, ranges, rig.now_us)
        assert sorted(open_fates(fates)) == [(o, Event.ACKED, Reason.NONE) for o in (0, 1, 2, 7, 8)]
        assert all(fate.first < fate.end for fate in fates)
        rig.has("orders", held=5)
        rig.lose("orders")
        assert [m.offset for m in rig.take("orders")] == [3, 4, 5, 6, 9]

    @pytest.mark.parametrize("outcome", Outcome)
    def test_what_somebody_else_holds_stays_with_them(self, rig: Rig, outcome: Outcome) -> None:
        rig.open()
        rig.send("orders", ABC)
        mine = rig.take("orders", 2, consumer="ann")
        assert rig.settle("orders", outcome, mine, consumer="bob") == []
        assert rig.settle("orders", outcome, mine, consumer="ann", dead=True) == []
        rig.has("orders", ready=1, held=2)
        assert len(open_fates(rig.ack("orders", mine))) == 2

    @pytest.mark.parametrize("outcome", Outcome)
    def test_a_second_verdict_finds_nothing(self, rig: Rig, outcome: Outcome) -> None:
        rig.open()
        rig.send("orders", ABC)
        got = rig.take("orders")
        rig.ack("orders", got[:1])
        rig.settle("orders", Outcome.REQUEUE, got[1:2])
        rig.settle("orders", Outcome.REJECT, got[2:])
        assert rig.settle("orders", outcome, got) == []
        rig.has("orders", ready=1, dead=1)

    def test_an_id_of_another_origin_settles_nothing(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", ABC)
        got = rig.take("orders")
        wrong = got[0].origin[:-1] + (b"0" if got[0].origin[-1:] != b"0" else b"1")
        ranges: Ranges = [(got[0].offset, got[2].offset + 1)]
        assert engine.settle("orders", "ann", Outcome.ACK, ranges, rig.now_us, origin=wrong) == []
        rig.has("orders", held=3)
        fates = engine.settle("orders", "ann", Outcome.ACK, ranges, rig.now_us, origin=got[0].origin)
        assert len(open_fates(fates)) == 3

    def test_of_messages_of_two_origins_only_the_named_ones_are_settled(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"old"])
        rig.restart("reopen")
        rig.send("orders", [b"new"])
        old, new = rig.take("orders")
        assert old.origin != new.origin
        ranges: Ranges = [(0, 1 << 40)]
        fates = rig.engine.settle("orders", "ann", Outcome.ACK, ranges, rig.now_us, origin=new.origin)
        assert open_fates(fates) == [(new.offset, Event.ACKED, Reason.NONE)]
        rig.lose("orders")
        assert payloads(rig.take("orders")) == [b"old"]

    def test_an_unknown_queue_has_nothing_to_settle(self, rig: Rig) -> None:
        engine = rig.open()
        assert engine.settle("nowhere", "ann", Outcome.ACK, [(0, 9)], rig.now_us) == []
        assert engine.give_back("nowhere", "ann", rig.now_us) == []


class GivingBack:
    """give_back: what a consumer leaves behind when it is lost, or gives up."""

    def test_lost_messages_return_to_their_place(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 6))
        got = rig.take("orders", 2, consumer="ann")
        rig.take("orders", 2, consumer="bob")
        fates = rig.lose("orders", consumer="ann")
        assert open_fates(fates) == [(m.offset, Event.RETURNED, Reason.CONSUMER_LOST) for m in got]
        rig.has("orders", ready=4, held=2)
        assert payloads(rig.take("orders", consumer="eve")) == [b"m-0", b"m-1", b"m-4", b"m-5"]

    def test_or_go_behind_the_tail(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 4))
        rig.take("orders", 2)
        fates = rig.lose("orders", where=Where.TAIL)
        assert {(f.event, f.reason) for f in fates} == {(Event.REQUEUED, Reason.CONSUMER_LOST)}
        rig.send("orders", [b"last"])
        assert payloads(rig.take("orders")) == [b"m-2", b"m-3", b"m-0", b"m-1", b"last"]

    def test_some_ranges_only(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", named("m", 6))
        rig.take("orders")
        fates = engine.give_back("orders", "ann", rig.now_us, ranges=[(1, 3), (5, 9), (2, 2)])
        assert [offset for offset, _, _ in open_fates(fates)] == [1, 2, 5]
        rig.has("orders", ready=3, held=3)

    def test_nothing_held_nothing_given_back(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", ABC)
        assert rig.lose("orders") == []
        rig.take("orders", consumer="bob")
        assert rig.lose("orders", consumer="ann") == []
        rig.has("orders", held=3)

    @pytest.mark.parametrize("where", BOTH)
    def test_not_lost_means_not_counted(self, rig: Rig, where: Where) -> None:
        """Given back unseen: the counter stays, the attempts stay, the limit is not touched."""
        engine = rig.open({"orders": {"max-deliveries": 1}})
        rig.send("orders", [b"counted", b"uncounted"], retries=[1, -1])
        for _ in range(3):
            got = rig.take("orders")
            assert [(m.payload, m.retries, m.attempts) for m in got] == [
                (b"counted", 1, 0),
                (b"uncounted", -1, 0),
            ]
            fates = engine.give_back("orders", "ann", rig.now_us, where=where, lost=False)
            event = Event.RETURNED if where is Where.PLACE else Event.REQUEUED
            assert {(f.event, f.reason) for f in fates} == {(event, Reason.CONSUMER_CANCELLED)}
        rig.has("orders", ready=2)

    @pytest.mark.parametrize("where", BOTH)
    def test_a_counter_of_2_is_seen_as_2_1_0_and_then_it_is_dead(self, rig: Rig, where: Where) -> None:
        rig.open({"orders": {"max-deliveries": 1}})
        rig.send("orders", [b"x"], retries=2)
        seen = []
        while got := rig.take("orders"):
            seen += [(m.retries, m.attempts) for m in got]
            (fate,) = rig.lose("orders", where=where)
        assert seen == [(2, 0), (1, 1), (0, 2)]
        assert (fate.event, fate.reason) == (Event.DEAD, Reason.RETRIES_EXHAUSTED)
        (dead,) = rig.take("orders", dead=True)
        assert (dead.payload, dead.retries, dead.attempts) == (b"x", 0, 3)

    def test_each_message_of_a_batch_has_its_own_counter(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"0", b"1", b"2", b"none", b"255"], retries=[0, 1, 2, -1, 255])
        rounds = []
        for _ in range(4):
            rounds.append([(m.payload, m.retries) for m in rig.take("orders")])
            rig.lose("orders")
        assert rounds == [
            [(b"0", 0), (b"1", 1), (b"2", 2), (b"none", -1), (b"255", 255)],
            [(b"1", 0), (b"2", 1), (b"none", -1), (b"255", 255)],
            [(b"2", 0), (b"none", -1), (b"255", 255)],
            [(b"none", -1), (b"255", 255)],
        ]
        assert payloads(rig.take("orders", dead=True)) == [b"0", b"1", b"2"]

    def test_255_is_endless(self, rig: Rig) -> None:
        rig.open({"orders": {"max-deliveries": 3}})
        rig.send("orders", [b"x"], retries=255)
        for attempt in range(300):
            (message,) = rig.take("orders", 1)
            assert (message.retries, message.attempts) == (255, attempt)
            rig.lose("orders")
        rig.has("orders", ready=1)

    def test_without_a_counter_max_deliveries_decides(self, rig: Rig) -> None:
        rig.open({"orders": {"max-deliveries": 3}})
        rig.send("orders", [b"x"])
        attempts = []
        while got := rig.take("orders"):
            attempts += [m.attempts for m in got]
            (fate,) = rig.lose("orders")
        assert attempts == [0, 1, 2]
        assert (fate.event, fate.reason) == (Event.DEAD, Reason.TOO_MANY_DELIVERIES)

    def test_without_a_counter_it_is_delivered_twenty_times(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x"])
        for attempt in range(20):
            assert [m.attempts for m in rig.take("orders")] == [attempt]
            rig.lose("orders")
        rig.has("orders", dead=1)

    def test_without_a_counter_and_a_limit_it_never_ends(self, rig: Rig) -> None:
        rig.open({"orders": {"max-deliveries": 0}})
        rig.send("orders", [b"x"])
        for attempt in range(25):
            messages = rig.take("orders")
            assert [m.attempts for m in messages] == [attempt]
            if attempt % 2:
                rig.lose("orders")
            else:
                rig.settle("orders", Outcome.REQUEUE, messages)
        rig.has("orders", ready=1)

    def test_a_requeue_is_a_delivery_and_may_be_one_too_many(self, rig: Rig) -> None:
        rig.open({"orders": {"max-deliveries": 3}})
        rig.send("orders", [b"a", b"b", b"c"], retries=[-1, 5, -1])
        for attempt in range(2):
            messages = rig.take("orders")
            assert [m.attempts for m in messages] == [attempt] * 3
            rig.settle("orders", Outcome.REQUEUE, messages)
        assert open_fates(rig.settle("orders", Outcome.REQUEUE, rig.take("orders"))) == [
            (0, Event.DEAD, Reason.TOO_MANY_DELIVERIES),
            (1, Event.REQUEUED, Reason.NONE),
            (2, Event.DEAD, Reason.TOO_MANY_DELIVERIES),
        ]
        rig.has("orders", ready=1, dead=2)

    def test_a_requeue_counts_as_a_delivery_but_uses_no_retry(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x"], retries=1)
        rig.settle("orders", Outcome.REQUEUE, rig.take("orders"))
        (message,) = rig.take("orders")
        assert (message.retries, message.attempts) == (1, 1)

    def test_with_dead_letters_off_it_is_thrown_away(self, rig: Rig) -> None:
        rig.open({"orders": {"dead-letters": "off", "max-deliveries": 1}})
        rig.send("orders", [b"a", b"b"], retries=[0, -1])
        rig.take("orders")
        assert open_fates(rig.lose("orders")) == [
            (0, Event.REJECTED, Reason.RETRIES_EXHAUSTED),
            (1, Event.REJECTED, Reason.TOO_MANY_DELIVERIES),
        ]
        rig.has("orders")

    @pytest.mark.parametrize("letters", ["on", "off"])
    def test_a_request_is_withdrawn_instead_of_dying(self, rig: Rig, letters: str) -> None:
        """Its sender waits for an answer, and is told; nobody looks for it among the dead letters."""
        rig.open({"orders": {"max-deliveries": 2, "dead-letters": letters}})
        rig.send("orders", [b"a", b"b"], retries=[0, -1], reply=[b"x", b"y"], protocol="rq")
        rig.take("orders")
        assert open_fates(rig.lose("orders")) == [
            (0, Event.WITHDRAWN, Reason.RETRIES_EXHAUSTED),
            (1, Event.RETURNED, Reason.CONSUMER_LOST),
        ]
        (message,) = rig.take("orders")
        assert (message.payload, message.reply) == (b"b", b"y")
        assert open_fates(rig.lose("orders")) == [(1, Event.WITHDRAWN, Reason.TOO_MANY_DELIVERIES)]
        rig.has("orders")


class Order:
    """In which order messages come that have been moved."""

    def test_a_returned_message_comes_before_everything_behind_it(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 5))
        rig.take("orders", 3)
        rig.send("orders", [b"later"])
        rig.lose("orders")
        assert payloads(rig.take("orders", 4)) == named("m", 4)

    def test_requeued_ones_are_first_in_first_out(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 5))
        got = rig.take("orders")
        for at in (3, 0, 4, 1):
            rig.settle("orders", Outcome.REQUEUE, [got[at]])
        assert payloads(rig.take("orders")) == [b"m-3", b"m-0", b"m-4", b"m-1"]

    def test_a_requeued_message_that_is_lost_returns_to_its_new_place(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", ABC)
        rig.settle("orders", Outcome.REQUEUE, rig.take("orders", 1))
        rig.send("orders", [b"d"])
        rig.take("orders", 3)
        rig.send("orders", [b"e"])
        rig.lose("orders")
        assert payloads(rig.take("orders")) == [b"b", b"c", b"a", b"d", b"e"]

    def test_requeued_twice_it_stands_at_the_later_tail(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"a"])
        for newcomer in (b"b", b"c"):
            rig.settle("orders", Outcome.REQUEUE, [m for m in rig.take("orders") if m.payload == b"a"])
            rig.lose("orders")
            rig.send("orders", [newcomer])
        assert payloads(rig.take("orders")) == [b"b", b"a", b"c"]

    def test_partly_taken_and_partly_returned_groups_keep_their_order(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 8))
        rig.settle("orders", Outcome.REQUEUE, rig.take("orders", 6))  # 6 7 | 0 1 2 3 4 5
        rig.take("orders", 4, consumer="ann")  # 6 7 0 1
        rig.take("orders", 2, consumer="bob")  # 2 3
        rig.lose("orders", consumer="ann")
        assert payloads(rig.take("orders", 3, consumer="eve")) == [b"m-6", b"m-7", b"m-0"]
        rig.lose("orders", consumer="bob")
        assert payloads(rig.take("orders", consumer="eve")) == [b"m-1", b"m-2", b"m-3", b"m-4", b"m-5"]

    def test_a_moved_message_is_the_same_message(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", ABC)
        got = rig.take("orders")
        before = {m.payload: (m.offset, m.message_id) for m in got}
        rig.settle("orders", Outcome.REQUEUE, got)
        after = {m.payload: (m.offset, m.message_id) for m in rig.take("orders")}
        assert after.keys() == before.keys()
        assert (after == before) == rig.harness.identity_stays

    @pytest.mark.parametrize("how", ["reopen", "crash"])
    def test_moved_before_a_restart_comes_before_moved_after_it(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.send("orders", named("m", 4))
        for at in (3, 1):
            (message,) = [m for m in rig.take("orders") if m.payload == b"m-%d" % at]
            rig.settle("orders", Outcome.REQUEUE, [message])
            (message,) = [m for m in rig.read("orders") if m.payload == b"m-%d" % (at - 1)]
            rig.settle("orders", Outcome.REJECT, [message])
            rig.restart(how)
        assert payloads(rig.take("orders")) == [b"m-3", b"m-1"]
        assert payloads(rig.take("orders", dead=True)) == [b"m-2", b"m-0"]

    @pytest.mark.parametrize("how", ["reopen", "crash"])
    def test_the_order_survives_a_restart(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.send("orders", named("m", 6))
        got = rig.take("orders", 5)
        rig.settle("orders", Outcome.REQUEUE, [got[2], got[0]])
        rig.send("orders", [b"tail"])
        rig.settle("orders", Outcome.REQUEUE, [got[4]])
        rig.restart(how)
        assert payloads(rig.take("orders")) == [b"m-1", b"m-3", b"m-5", b"m-2", b"m-0", b"tail", b"m-4"]
