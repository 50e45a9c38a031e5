"""The contract, part 3: dead letters. How messages die, the door to them, redriving and purging."""

import pytest

from penstock.log.errors import LogRefused
from penstock.model.batch import Batch
from penstock.model.life import Event, Reason
from penstock.model.policy import Policies
from penstock.model.words import Outcome
from tests.log.contract_rig import Rig, count_of, named, open_fates, payloads

ABC = [b"a", b"b", b"c"]


def die_of_everything(rig: Rig) -> dict[bytes, Reason]:
    """One dead letter of every kind that an engine makes by itself, in this order."""
    rig.open({"orders": {"max-deliveries": 1}})
    rig.send("orders", [b"retries"], retries=0)
    rig.take("orders")
    rig.lose("orders")
    rig.send("orders", [b"expired"], ttl=1)
    rig.later(seconds=1)
    rig.engine.expire(rig.now_us)
    rig.kill("orders", [b"rejected"])
    rig.send("orders", [b"deliveries"])
    rig.take("orders")
    rig.lose("orders")
    return {
        b"retries": Reason.RETRIES_EXHAUSTED,
        b"expired": Reason.EXPIRED,
        b"rejected": Reason.REJECTED,
        b"deliveries": Reason.TOO_MANY_DELIVERIES,
    }


class DeadLetters:
    """The door: dead letters are taken, held and settled like messages, and stay dead."""

    def test_every_way_to_die_has_its_reason(self, rig: Rig) -> None:
        reasons = die_of_everything(rig)
        rig.has("orders", dead=4)
        payload_at = {m.offset: m.payload for m in rig.read("orders")}
        deaths = [t for t in rig.events("orders") if t.event is Event.DEAD]
        assert [(payload_at[t.offset], t.reason) for t in deaths] == list(reasons.items())

    def test_the_dead_stand_in_the_order_of_their_death(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", ABC)
        a, b, c = rig.take("orders")
        for message in (c, a, b):
            rig.settle("orders", Outcome.REJECT, [message])
        assert payloads(rig.take("orders", dead=True)) == [b"c", b"a", b"b"]

    def test_neither_door_shows_what_is_behind_the_other(self, rig: Rig) -> None:
        rig.open()
        rig.kill("orders", [b"dead"])
        rig.send("orders", [b"living"])
        assert payloads(rig.take("orders", dead=True)) == [b"dead"]
        assert payloads(rig.take("orders")) == [b"living"]
        rig.has("orders", held=1, dead=1)

    def test_a_dead_letter_is_the_message_that_it_was(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x"], retries=7, ttl=60, protocol="phpmq")
        (living,) = rig.take("orders")
        rig.settle("orders", Outcome.REJECT, [living])
        (dead,) = rig.take("orders", dead=True)
        assert dead == living._replace(attempts=1, reason=Reason.REJECTED)

    def test_held_by_one_it_is_not_there_for_others_and_still_counts(self, rig: Rig) -> None:
        rig.open()
        rig.kill("orders", ABC)
        rig.take("orders", 2, consumer="ann", dead=True)
        rig.has("orders", dead=3)
        assert payloads(rig.take("orders", consumer="bob", dead=True)) == [b"c"]

    def test_acknowledged_it_is_gone_for_good(self, rig: Rig) -> None:
        rig.open()
        rig.kill("orders", ABC)
        got = rig.take("orders", 2, dead=True)
        assert rig.settle("orders", Outcome.ACK, got) == []  # not through the door that it came through
        fates = rig.settle("orders", Outcome.ACK, got, dead=True)
        assert open_fates(fates) == [(m.offset, Event.ACKED, Reason.NONE) for m in got]
        rig.has("orders", dead=1)
        assert count_of(rig.engine.redrive("orders", rig.now_us)) == 1

    def test_lost_it_stands_behind_the_other_dead_whatever_its_counter(self, rig: Rig) -> None:
        rig.open({"orders": {"max-deliveries": 1}})
        rig.send("orders", [b"x"], retries=0)
        rig.take("orders")
        rig.lose("orders")
        rig.kill("orders", [b"y"])
        for expected in (b"x", b"y", b"x"):
            (message,) = rig.take("orders", 1, dead=True)
            assert message.payload == expected
            (fate,) = rig.lose("orders")
            assert (fate.event, fate.reason) == (Event.REQUEUED, Reason.CONSUMER_LOST)
        rig.has("orders", dead=2)

    def test_given_back_unseen_it_keeps_its_place(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", ABC)
        rig.take("orders", 1, dead=True)
        (fate,) = engine.give_back("orders", "ann", rig.now_us, lost=False)
        assert (fate.event, fate.reason) == (Event.RETURNED, Reason.CONSUMER_CANCELLED)
        assert payloads(rig.take("orders", dead=True)) == ABC

    def test_requeued_through_the_door_it_stands_behind_the_other_dead(self, rig: Rig) -> None:
        rig.open()
        rig.kill("orders", ABC)
        fates = rig.settle("orders", Outcome.REQUEUE, rig.take("orders", 1, dead=True), dead=True, ttl=1)
        assert [(f.event, f.reason) for f in fates] == [(Event.REQUEUED, Reason.NONE)]
        rig.later(seconds=5)
        assert rig.engine.expire(rig.now_us) == []
        assert payloads(rig.take("orders", dead=True)) == [b"b", b"c", b"a"]

    def test_rejected_it_dies_once_more(self, rig: Rig) -> None:
        die_of_everything(rig)
        fates = rig.settle("orders", Outcome.REJECT, rig.take("orders", 1, dead=True), dead=True)
        assert [(f.event, f.reason) for f in fates] == [(Event.DEAD, Reason.REJECTED)]
        assert count_of(rig.engine.redrive("orders", rig.now_us, reason=Reason.RETRIES_EXHAUSTED)) == 0
        assert payloads(rig.take("orders", dead=True)) == [b"expired", b"rejected", b"deliveries", b"retries"]

    def test_rejected_with_dead_letters_switched_off_meanwhile_it_is_gone(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", [b"x"])
        engine.set_policies(Policies({"orders": {"dead-letters": "off"}}))
        fates = rig.settle("orders", Outcome.REJECT, rig.take("orders", dead=True), dead=True)
        assert [(f.event, f.reason) for f in fates] == [(Event.REJECTED, Reason.REJECTED)]
        rig.has("orders")

    def test_a_dead_letter_does_not_expire(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", [b"x"], ttl=5)
        rig.settle("orders", Outcome.REJECT, rig.take("orders"))
        rig.later(seconds=60)
        assert engine.expire(rig.now_us) == []
        assert payloads(rig.take("orders", dead=True)) == [b"x"]

    def test_a_dead_letter_is_not_withdrawn_with_its_offset(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", [b"x"])
        assert engine.withdraw("orders", [(0, 9)], Reason.OPERATOR, rig.now_us) == []
        rig.has("orders", dead=1)

    @pytest.mark.parametrize("how", ["reopen", "crash"])
    def test_the_dead_survive_a_restart_with_reasons_and_order(self, rig: Rig, how: str) -> None:
        reasons = die_of_everything(rig)
        rig.take("orders", 1, dead=True)
        rig.lose("orders")  # "retries" is the last one now
        rig.take("orders", 2, dead=True)  # held, which is forgotten
        rig.restart(how)
        rig.has("orders", dead=4)
        rest = list(reasons)[1:]
        assert count_of(rig.engine.redrive("orders", rig.now_us, reason=Reason.REJECTED)) == 1
        rest.remove(b"rejected")
        assert payloads(rig.take("orders", dead=True)) == [*rest, b"retries"]


class SentDead:
    """A transaction can bring dead letters: in their queue at once, and in nobody's hands before."""

    def test_they_are_dead_from_the_beginning(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"before"])
        done = rig.transact("key", ("orders", ABC), ("mails", [b"m"]), dead=["orders"])
        assert [(s.queue, s.end - s.first) for s in done.stored] == [("orders", 3), ("mails", 1)]
        rig.has("orders", ready=1, dead=3)
        rig.has("mails", ready=1)
        assert rig.engine.deaths("orders") == {Reason.BAD_RECORD: 3}
        assert payloads(rig.take("orders")) == [b"before"]
        assert payloads(rig.take("orders", dead=True)) == ABC

    def test_both_arrows_are_recorded_and_counted(self, rig: Rig) -> None:
        engine = rig.open()
        done = rig.transact("key", ("orders", ABC), dead=["orders"])
        first = done.stored[0].first
        told = [(t.offset - first, t.event, t.reason, t.attempt) for t in rig.events("orders")]
        assert told == [
            *((i, Event.ACCEPTED, Reason.NONE, 0) for i in range(3)),
            *((i, Event.DEAD, Reason.BAD_RECORD, 0) for i in range(3)),
        ]
        counts = engine.counts("orders")
        assert (counts[Event.ACCEPTED, Reason.NONE], counts[Event.DEAD, Reason.BAD_RECORD]) == (3, 3)

    def test_the_log_has_them_as_it_has_any_message(self, rig: Rig) -> None:
        rig.open()
        rig.transact("key", ("orders", ABC), dead=["orders"])
        assert payloads(rig.read("orders")) == ABC

    @pytest.mark.parametrize("how", ["reopen", "crash"])
    def test_after_a_restart_they_are_dead_once(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.transact("key", ("orders", ABC), ("orders", [b"d"]), dead=["orders"])
        rig.restart(how)
        rig.has("orders", dead=4)
        assert rig.transact("key", ("orders", ABC), dead=["orders"]).repeated is True
        rig.has("orders", dead=4)

    def test_redriven_they_are_messages(self, rig: Rig) -> None:
        engine = rig.open()
        rig.transact("key", ("orders", ABC), dead=["orders"])
        assert count_of(engine.redrive("orders", rig.now_us, reason=Reason.BAD_RECORD, limit=2)) == 2
        assert payloads(rig.take("orders")) == [b"a", b"b"]
        rig.has("orders", held=2, dead=1)

    def test_they_do_not_expire(self, rig: Rig) -> None:
        engine = rig.open()
        batch = Batch.of(ABC, ttl_seconds=[1] * 3)
        batch.dead = Reason.BAD_RECORD
        engine.transact("key", [("orders", batch)], rig.now_us)
        rig.turn()
        rig.later(seconds=5)
        assert engine.expire(rig.now_us) == []
        rig.has("orders", dead=3)

    def test_a_full_queue_takes_them(self, rig: Rig) -> None:
        rig.open({"orders": {"max-bytes": 2}})
        rig.send("orders", [b"xx"])
        rig.transact("key", ("orders", ABC), dead=["orders"])
        rig.has("orders", ready=1, dead=3)

    def test_where_dead_letters_are_switched_off_they_are_gone(self, rig: Rig) -> None:
        rig.open({"orders": {"dead-letters": "off"}})
        rig.transact("key", ("orders", ABC), dead=["orders"])
        rig.has("orders")
        ends = [(t.event, t.reason) for t in rig.events("orders")][3:]
        assert ends == [(Event.WITHDRAWN, Reason.BAD_RECORD)] * 3

    def test_only_a_transaction_brings_them(self, rig: Rig) -> None:
        engine = rig.open()
        batch = Batch.of(ABC)
        batch.dead = Reason.BAD_RECORD
        with pytest.raises(LogRefused, match="in a transaction"):
            engine.append("orders", batch, rig.now_us)
        assert engine.queues() == []


class Redriving:
    """redrive: a dead letter back behind the tail, with a new life and its old id."""

    def test_all_in_the_order_of_death_behind_the_tail(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", ABC)
        rig.send("orders", [b"living"])
        assert count_of(engine.redrive("orders", rig.now_us)) == 3
        rig.send("orders", [b"later"])
        rig.has("orders", ready=5)
        assert payloads(rig.take("orders")) == [b"living", *ABC, b"later"]

    def test_the_order_is_that_of_death_not_of_arrival(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", ABC)
        a, b, c = rig.take("orders")
        for message in (c, a, b):
            rig.settle("orders", Outcome.REJECT, [message])
        assert count_of(engine.redrive("orders", rig.now_us, limit=2)) == 2
        assert payloads(rig.take("orders")) == [b"c", b"a"]

    def test_by_reason(self, rig: Rig) -> None:
        die_of_everything(rig)
        assert count_of(rig.engine.redrive("orders", rig.now_us, reason=Reason.EXPIRED)) == 1
        assert count_of(rig.engine.redrive("orders", rig.now_us, reason=Reason.EXPIRED)) == 0
        assert payloads(rig.take("orders")) == [b"expired"]
        rig.has("orders", held=1, dead=3)

    def test_by_ranges_which_may_overlap_and_miss(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", named("m", 8))
        offset = {m.payload: m.offset for m in rig.take("orders", dead=True)}
        engine.give_back("orders", "ann", rig.now_us, lost=False)
        a, b = offset[b"m-1"], offset[b"m-3"]
        ranges = [(a, b + 1), (a, b), (b, b + 2), (500, 900), (3, 2)]
        assert count_of(engine.redrive("orders", rig.now_us, ranges=ranges)) == 4
        assert payloads(rig.take("orders")) == named("m", 5)[1:]

    def test_up_to_a_limit_the_longest_dead_first(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", named("m", 5))
        assert count_of(engine.redrive("orders", rig.now_us, limit=0)) == 0
        assert count_of(engine.redrive("orders", rig.now_us, limit=2)) == 2
        assert count_of(engine.redrive("orders", rig.now_us, limit=2, reason=Reason.REJECTED)) == 2
        assert count_of(engine.redrive("orders", rig.now_us, limit=2)) == 1
        assert payloads(rig.take("orders")) == named("m", 5)

    @pytest.mark.parametrize("by_ranges", [False, True])
    def test_in_portions_of_a_few_runs(self, rig: Rig, by_ranges: bool) -> None:
        engine = rig.open()
        rig.send("orders", named("m", 10))
        got = rig.take("orders")
        for message in got[8::-2]:
            rig.settle("orders", Outcome.REJECT, [message])
        ranges = [(0, 10)] if by_ranges else None
        for _ in range(2):
            fates = engine.redrive("orders", rig.now_us, ranges=ranges, runs_max=2)
            assert [f.end - f.first for f in fates] == [1, 1]
        assert count_of(engine.redrive("orders", rig.now_us, ranges=ranges, runs_max=2)) == 1
        assert payloads(rig.take("orders")) == [b"m-8", b"m-6", b"m-4", b"m-2", b"m-0"]

    def test_one_run_is_one_however_long(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", named("m", 500))
        rig.settle("orders", Outcome.REJECT, rig.take("orders", 1))
        rig.engine.settle("orders", "ann", Outcome.REJECT, [(0, 500)], rig.now_us)
        rig.take("orders")
        rig.later(seconds=1)  # Another time is another run.
        rig.engine.settle("orders", "ann", Outcome.REJECT, [(0, 500)], rig.now_us)
        fates = engine.redrive("orders", rig.now_us, runs_max=2, limit=400)
        assert [(f.event, f.reason) for f in fates] == [(Event.REDRIVEN, Reason.REJECTED)] * 2
        assert count_of(fates) == 400
        rig.has("orders", ready=400, dead=100)

    def test_by_reason_among_many_of_another(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", named("m", 20), ttl=[1] * 20)
        got = rig.take("orders", 6)
        rig.later(seconds=1)
        engine.expire(rig.now_us)
        for message in got:
            rig.settle("orders", Outcome.REJECT, [message])
        assert count_of(engine.redrive("orders", rig.now_us, reason=Reason.REJECTED, limit=2)) == 2
        assert payloads(rig.take("orders")) == [b"m-0", b"m-1"]
        rig.lose("orders")
        assert count_of(engine.redrive("orders", rig.now_us, reason=Reason.REJECTED)) == 4
        assert engine.deaths("orders") == {Reason.EXPIRED: 14}
        assert payloads(rig.take("orders", 3, dead=True)) == [b"m-6", b"m-7", b"m-8"]

    def test_what_came_back_to_its_place_among_the_dead_is_redriven_in_its_turn(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", named("m", 6))
        rig.take("orders", 4, dead=True)
        engine.give_back("orders", "ann", rig.now_us, ranges=[(1, 3)], lost=False)
        engine.give_back("orders", "ann", rig.now_us, ranges=[(3, 4)])
        assert count_of(engine.redrive("orders", rig.now_us, limit=4)) == 4
        engine.give_back("orders", "ann", rig.now_us, lost=False)
        assert count_of(engine.redrive("orders", rig.now_us)) == 2
        assert payloads(rig.take("orders")) == [b"m-1", b"m-2", b"m-4", b"m-5", b"m-0", b"m-3"]

    def test_not_what_somebody_holds(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", ABC)
        held = rig.take("orders", 1, dead=True)
        assert count_of(engine.redrive("orders", rig.now_us)) == 2
        rig.settle("orders", Outcome.REQUEUE, held, dead=True)
        assert count_of(engine.redrive("orders", rig.now_us)) == 1
        assert payloads(rig.take("orders")) == [b"b", b"c", b"a"]

    def test_counters_begin_again_and_the_ttl_is_over(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", [b"x"], retries=1, ttl=10)
        for _ in range(2):
            rig.take("orders")
            rig.lose("orders")
        (before,) = rig.take("orders", dead=True)
        assert (before.retries, before.attempts) == (0, 2)
        engine.give_back("orders", "ann", rig.now_us, lost=False)
        assert count_of(engine.redrive("orders", rig.now_us)) == 1
        rig.later(seconds=100)
        assert engine.expire(rig.now_us) == []
        (after,) = rig.take("orders")
        assert (after.payload, after.retries, after.attempts, after.expires_us) == (b"x", 1, 0, 0)
        assert (after.message_id == before.message_id) == rig.harness.identity_stays

    def test_redriven_it_can_die_again(self, rig: Rig) -> None:
        engine = rig.open({"orders": {"max-deliveries": 2}})
        rig.send("orders", [b"x"])
        for _ in range(2):
            for attempt in range(2):
                assert [m.attempts for m in rig.take("orders")] == [attempt]
                (fate,) = rig.lose("orders")
            assert (fate.event, fate.reason) == (Event.DEAD, Reason.TOO_MANY_DELIVERIES)
            assert count_of(engine.redrive("orders", rig.now_us)) == 1
        rig.has("orders", ready=1)

    @pytest.mark.parametrize("how", ["reopen", "crash"])
    def test_redriven_ones_survive_a_restart(self, rig: Rig, how: str) -> None:
        engine = rig.open()
        rig.send("orders", [b"x"], retries=0, ttl=10)
        rig.take("orders")
        rig.lose("orders")
        rig.send("orders", [b"y"])
        engine.redrive("orders", rig.now_us)
        rig.send("orders", [b"z"])
        rig.restart(how)
        rig.later(seconds=100)
        assert rig.engine.expire(rig.now_us) == []
        got = rig.take("orders")
        assert [(m.payload, m.retries, m.attempts) for m in got] == [
            (b"y", -1, 0),
            (b"x", 0, 0),
            (b"z", -1, 0),
        ]

    def test_an_unknown_queue_is_refused(self, rig: Rig) -> None:
        engine = rig.open()
        with pytest.raises(LogRefused, match="nowhere"):
            engine.redrive("nowhere", rig.now_us)


class Removing:
    """purge and withdraw: taken out by an operator or a sender."""

    def test_purge_takes_the_ready_ones_only(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", [b"dead"])
        rig.send("orders", named("m", 5))
        rig.settle("orders", Outcome.REQUEUE, rig.take("orders", 1))
        held = rig.take("orders", 1)
        assert count_of(engine.purge("orders", rig.now_us)) == 4
        rig.has("orders", held=1, dead=1)
        rig.lose("orders")
        assert payloads(rig.take("orders")) == payloads(held)

    def test_purge_of_the_dead_takes_those_that_nobody_holds(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", ABC)
        rig.send("orders", [b"living"])
        rig.take("orders", 1, dead=True)
        assert count_of(engine.purge("orders", rig.now_us, dead=True)) == 2
        assert count_of(engine.purge("orders", rig.now_us, dead=True)) == 0
        rig.has("orders", ready=1, dead=1)
        rig.lose("orders")
        assert payloads(rig.take("orders", dead=True)) == [b"a"]

    @pytest.mark.parametrize("dead", [False, True])
    def test_purge_in_portions(self, rig: Rig, dead: bool) -> None:
        engine = rig.open()
        rig.send("orders", named("m", 12))
        got = rig.take("orders")
        for message in got[::2]:
            rig.settle("orders", Outcome.REJECT if dead else Outcome.REQUEUE, [message])
        moved = [m.offset for m in rig.read("orders") if m.payload in named("m", 12)[::2]][-6:]
        first = engine.purge("orders", rig.now_us, dead=dead, runs_max=2)
        assert open_fates(first) == [(o, Event.WITHDRAWN, Reason.PURGED) for o in moved[:2]]
        assert count_of(engine.purge("orders", rig.now_us, dead=dead, limit=3)) == 3
        assert count_of(engine.purge("orders", rig.now_us, dead=dead, limit=0)) == 0
        assert count_of(engine.purge("orders", rig.now_us, dead=dead, runs_max=9)) == 1
        rig.has("orders", held=6)

    def test_purge_takes_what_has_just_been_appended(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", [b"a"])
        engine.append("orders", Batch.of([b"b"]), rig.now_us)
        assert count_of(engine.purge("orders", rig.now_us)) == 2
        rig.turn()
        assert rig.take("orders") == []
        assert payloads(rig.read("orders")) == [b"a", b"b"]

    def test_withdraw_takes_ready_moved_and_held_ones(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", named("m", 6))
        got = rig.take("orders", 4)
        rig.settle("orders", Outcome.REQUEUE, got[:1])
        rig.ack("orders", got[1:2])
        moved = max(m.offset for m in rig.read("orders") if m.payload == b"m-0")
        ranges = [(moved, moved + 1), (got[1].offset, got[2].offset + 1), (5, 6), (50, 60), (5, 6)]
        fates = engine.withdraw("orders", ranges, Reason.TIMEOUT, rig.now_us)
        expected = {moved, got[2].offset, 5}
        assert sorted(open_fates(fates)) == [(o, Event.WITHDRAWN, Reason.TIMEOUT) for o in sorted(expected)]
        assert {fate.consumer for fate in fates if fate.first == got[2].offset} == {"ann"}
        rig.has("orders", ready=1, held=1)
        assert rig.ack("orders", got[2:3]) == []
        assert len(rig.ack("orders", got[3:4])) == 1
        assert payloads(rig.take("orders")) == [b"m-4"]

    def test_withdrawn_is_gone_after_a_restart_too(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", named("m", 4))
        rig.take("orders", 1)
        engine.withdraw("orders", [(0, 2)], Reason.OPERATOR, rig.now_us)
        rig.restart("crash")
        assert payloads(rig.take("orders")) == [b"m-2", b"m-3"]

    def test_an_unknown_queue_is_refused(self, rig: Rig) -> None:
        engine = rig.open()
        with pytest.raises(LogRefused, match="nowhere"):
            engine.purge("nowhere", rig.now_us)
        with pytest.raises(LogRefused, match="nowhere"):
            engine.withdraw("nowhere", [(0, 1)], Reason.OPERATOR, rig.now_us)
