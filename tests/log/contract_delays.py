"""The contract, part 11: delays, and what travels beside a payload: headers, and reasons in words."""

import json
from array import array
from collections.abc import Callable

import pytest

from penstock.log.errors import LogRefused
from penstock.model.batch import DELAY_SECONDS_MAX, Batch
from penstock.model.life import Event, Reason, State
from penstock.model.words import KEEP_TTL, Outcome, Where
from tests.log.contract_deleting import delete
from tests.log.contract_looking import Looked, all_states
from tests.log.contract_repairs import repairs
from tests.log.contract_restart import HOW, picture
from tests.log.contract_rig import SECOND, START_US, Rig, named, open_fates, payloads
from tests.log.contract_time import expired, step

BACKOFF = {"*": {"retry-delays": [1, 10, 60], "max-deliveries": 5}}
NONE = Reason.NONE


def offsets_at(rig: Rig, queue: str, seconds: float) -> list[int]:
    """What can be taken so long after the beginning; it is acknowledged."""
    rig.now_us = START_US + round(seconds * SECOND)
    rig.due()
    got = rig.take(queue)
    rig.ack(queue, got)
    return [message.offset for message in got]


class Delays:
    """Messages that are sent with a delay."""

    def test_nobody_gets_it_before_its_time(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x"], delay=10)
        rig.has("orders", delayed=1)
        for seconds, us in [(0, 0), (5, 0), (5, -1)]:
            rig.later(seconds=seconds, us=us)
            assert rig.due() == set()
            assert rig.take("orders") == []
        rig.later(us=1)
        assert rig.due() == {"orders"}
        rig.has("orders", ready=1)
        assert [(m.payload, m.attempts) for m in rig.take("orders")] == [(b"x", 0)]

    @pytest.mark.parametrize("seconds", [0.000001, 0.1, 2.999999, 3, 3.5, 60, 3601.25, DELAY_SECONDS_MAX])
    def test_to_the_microsecond_whatever_a_delay_is(self, rig: Rig, seconds: float) -> None:
        """Whoever looks once a second before, and in time, is not late."""
        rig.open()
        rig.later(us=123_456)
        rig.send("orders", [b"x"], delay=seconds)
        end_us = rig.now_us + round(seconds * SECOND)
        for early_us in (5 * SECOND, 2 * SECOND, SECOND, 1):
            rig.now_us = max(rig.now_us, end_us - early_us)
            assert rig.due() == set()
            assert rig.take("orders") == []
        rig.now_us = end_us
        assert rig.due() == {"orders"}
        assert payloads(rig.take("orders")) == [b"x"]

    def test_then_it_stands_in_its_own_place(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"a"], delay=10)
        rig.send("orders", [b"b", b"c", b"d"], delay=[0, 5, 0])
        rig.send("orders", [b"e"])
        assert payloads(rig.take("orders", 1)) == [b"b"]
        rig.later(seconds=10)
        rig.due()
        rig.send("orders", [b"f"])
        assert payloads(rig.take("orders")) == [b"a", b"c", b"d", b"e", b"f"]

    @pytest.mark.parametrize("delay", [0, [0, 0, 0]])
    def test_0_is_no_delay(self, rig: Rig, delay: float | list[float]) -> None:
        rig.open()
        rig.send("orders", [b"a", b"b", b"c"], delay=delay)
        assert rig.due() == set()
        rig.has("orders", ready=3)
        assert len(rig.take("orders")) == 3

    def test_of_batches_that_come_in_one_turn_each_has_its_own(self, rig: Rig) -> None:
        engine = rig.open()
        for delays in (None, [2], [0, 3], None, [1, 0]):
            batch = Batch.of([b"x"] * len(delays or [0]), delay_us=delays and [it * SECOND for it in delays])
            engine.append("orders", batch, rig.now_us)
        rig.has("orders", ready=4, delayed=3)
        rig.turn()
        assert [offsets_at(rig, "orders", s) for s in (0, 1, 2, 3)] == [[0, 2, 4, 6], [5], [1], [3]]

    def test_what_was_taken_in_the_turn_in_which_it_came(self, rig: Rig) -> None:
        """Before it is in a block."""
        engine = rig.open()
        engine.append("orders", Batch.of([b"a", b"b"], delay_us=[0, SECOND]), rig.now_us)
        assert payloads(rig.take("orders")) == [b"a"]
        rig.later(seconds=1)
        rig.due()
        assert payloads(rig.take("orders")) == [b"b"]

    def test_many_moments_in_many_blocks(self, rig: Rig) -> None:
        """In an order that is not that of the offsets; each at its time, and none before."""
        rig.open()
        moments = [(i * 7919) % 1009 for i in range(1500)]
        for i in range(0, 1500, 500):
            rig.send("orders", [b"m-%04d" % it for it in range(i, i + 500)], delay=moments[i : i + 500])
        for second in range(0, 1020, 10):
            expected = [i for i, moment in enumerate(moments) if second - 10 < moment <= second]
            assert offsets_at(rig, "orders", second) == expected
        rig.has("orders")

    def test_more_moments_than_one_look_has_room_for(self, rig: Rig) -> None:
        """Of a block with many, the next some hundred are filed; then it is looked at again."""
        rig.open()
        count = 6000
        moments = [1 + (i * 7919) % count for i in range(count)]  # each once
        rig.send("orders", [b""] * count, delay=[it / 1000 for it in moments])
        taken: list[int] = []
        for tenth in range(count // 1000 * 10 + 1):
            rig.now_us = START_US + tenth * SECOND // 10
            rig.due()
            got = rig.take("orders")
            rig.ack("orders", got)
            assert all(moments[m.offset] * 1000 <= tenth * 100_000 for m in got)
            taken += [m.offset for m in got]
            assert len(taken) == tenth * 100
        assert sorted(taken) == list(range(count))

    def test_all_at_once_where_nobody_has_looked_for_long(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b""] * 3000, delay=[1 + i % 1000 for i in range(3000)])
        rig.later(seconds=500)
        rig.due()
        rig.has("orders", ready=1500, delayed=1500)
        rig.later(seconds=5000)
        rig.due()
        assert [m.offset for m in rig.take("orders")] == list(range(3000))

    def test_a_ttl_goes_on_meanwhile(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x", b"y", b"z"], ttl=[5, 20, 0], delay=10)
        rig.later(seconds=5)
        assert [row[1:] for row in expired(rig)] == [(0, Event.DEAD, Reason.EXPIRED)]
        rig.has("orders", delayed=2, dead=1)
        rig.later(seconds=5)
        rig.due()
        got = rig.take("orders")
        assert [(m.payload, m.expires_us) for m in got] == [(b"y", START_US + 20 * SECOND), (b"z", 0)]

    def test_on_expiry_drop_throws_it_away(self, rig: Rig) -> None:
        rig.open({"orders": {"on-expiry": "drop"}})
        rig.send("orders", [b"x"], ttl=5, delay=10)
        rig.later(seconds=6)
        assert [row[1:] for row in expired(rig)] == [(0, Event.EXPIRED, Reason.EXPIRED)]
        rig.has("orders")
        rig.later(seconds=6)
        assert rig.due() == set()

    def test_purging_takes_it_too(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", named("m", 4), delay=[0, 9, 0, 9])
        mark = engine.mark("orders")
        rig.send("orders", [b"after"], delay=9)
        assert sorted(row[0] for row in open_fates(engine.purge("orders", rig.now_us, mark=mark))) == [
            0,
            1,
            2,
            3,
        ]
        rig.has("orders", delayed=1)
        assert offsets_at(rig, "orders", 9) == [4]

    def test_purging_some_only(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", named("m", 10), delay=9)
        assert open_fates(engine.purge("orders", rig.now_us, limit=3)) == [
            (offset, Event.WITHDRAWN, Reason.PURGED) for offset in range(3)
        ]
        rig.has("orders", delayed=7)
        assert offsets_at(rig, "orders", 9) == list(range(3, 10))

    def test_it_can_be_withdrawn(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", named("m", 6), delay=[0, 9, 9, 9, 0, 9])
        fates = open_fates(engine.withdraw("orders", [(0, 3), (5, 6)], Reason.OPERATOR, rig.now_us))
        assert sorted(fates) == [(o, Event.WITHDRAWN, Reason.OPERATOR) for o in (0, 1, 2, 5)]
        assert offsets_at(rig, "orders", 9) == [3, 4]

    def test_a_queue_that_is_deleted_with_them(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 6), delay=[9] * 6)
        delete(rig, "orders")
        rig.send("orders", [b"next"], delay=20)
        assert offsets_at(rig, "orders", 9) == []
        rig.has("orders", delayed=1)
        assert offsets_at(rig, "orders", 20) == [0]

    def test_a_paused_queue_goes_on_in_time_and_hands_out_nothing(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", [b"x"], delay=9)
        engine.pause("orders", True, rig.now_us)
        assert offsets_at(rig, "orders", 9) == []
        engine.pause("orders", False, rig.now_us)
        assert offsets_at(rig, "orders", 9) == [0]

    def test_it_counts_towards_max_bytes(self, rig: Rig) -> None:
        rig.open({"orders": {"max-bytes": 10}})
        rig.send("orders", [b"12345"], delay=9)
        assert rig.engine.describe("orders").bytes == 5
        rig.send("orders", [b"12345"], delay=9)
        with pytest.raises(LogRefused, match="max-bytes"):
            rig.send("orders", [b"1"])
        rig.engine.purge("orders", rig.now_us, limit=1)
        assert rig.engine.describe("orders").bytes == 5
        rig.send("orders", [b"12345"])
        rig.later(seconds=9)
        rig.due()
        rig.ack("orders", rig.take("orders"))
        assert rig.engine.describe("orders").bytes == 0

    def test_what_is_shown_of_it(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", [b"a", b"b", b"c"], delay=[9, 0, 9])
        plain = (NONE, "", 0, -2, -2)
        stored = Looked(State.DELAYED, *plain, -2)
        assert all_states(engine, "orders") == {0: stored, 1: Looked(State.READY, *plain, 0), 2: stored}
        assert list(all_states(engine, "orders", only=State.DELAYED, runs_max=1)) == [0, 2]
        assert list(all_states(engine, "orders", only=State.READY)) == [1]
        info = rig.described("orders")
        assert (info.ready, info.delayed, info.held, info.oldest_us) == (1, 2, 0, START_US)
        rig.later(seconds=9)
        engine.changed()
        rig.due()
        assert engine.changed() == ["orders"]
        assert set(all_states(engine, "orders", only=State.READY)) == {0, 1, 2}

    def test_neither_the_delay_nor_its_end_is_an_event_of_its_own(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"a", b"b"], delay=[9, 0])
        assert offsets_at(rig, "orders", 9) == [0, 1]
        told = [(it.event, it.offset) for it in rig.events("orders")]
        accepted, acked = Event.ACCEPTED, Event.ACKED
        assert sorted(told) == sorted([(accepted, 0), (accepted, 1), (acked, 0), (acked, 1)])
        assert rig.engine.counts("orders") == {(accepted, NONE): 2, (Event.HELD, NONE): 2, (acked, NONE): 2}

    def test_whoever_reads_the_log_sees_it_at_once(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"a", b"b"], delay=9)
        assert payloads(rig.read("orders")) == [b"a", b"b"]

    @pytest.mark.parametrize("delay_us", [-1, DELAY_SECONDS_MAX * SECOND + 1])
    def test_a_delay_that_cannot_be_is_refused(self, rig: Rig, delay_us: int) -> None:
        engine = rig.open()
        with pytest.raises(LogRefused, match=f"delay .* use 0 .none. to {DELAY_SECONDS_MAX}"):
            engine.append("orders", Batch.of([b"a", b"b"], delay_us=[0, delay_us]), rig.now_us)
        assert engine.queues() == []

    def test_columns_that_are_too_short_are_refused(self, rig: Rig) -> None:
        engine = rig.open()
        with pytest.raises(LogRefused, match="2 messages, but 1 values for delay"):
            engine.append("orders", Batch.of([b"a", b"b"], delay_us=[0]), rig.now_us)
        with pytest.raises(LogRefused, match="2 messages, but 3 values for headers"):
            engine.append("orders", Batch.of([b"a", b"b"], headers=[b""] * 3), rig.now_us)

    def test_who_waits_for_an_answer_cannot_ask_for_a_delay(self, rig: Rig) -> None:
        engine = rig.open()
        with pytest.raises(LogRefused, match="answer"):
            engine.append("orders", Batch.of([b"a"], delay_us=[1], reply=[b"r"]), rig.now_us)

    @pytest.mark.parametrize("how", ["", *HOW])
    def test_a_step_of_the_clock_puts_it_off(self, rig: Rig, how: str) -> None:
        rig.open(BACKOFF)
        rig.send("orders", named("m", 4), delay=[10, 10, 20, 0])
        (m,) = rig.take("orders")
        rig.settle("orders", Outcome.REQUEUE, [m], delay=15)
        rig.later(seconds=4)
        step(rig, 3600)
        rig.send("orders", [b"later"], delay=3)
        if how:
            rig.restart(how)
        seen = {at: offsets_at(rig, "orders", 3600 + at) for at in (4, 6.9, 7, 9.9, 10, 14.9, 15, 19.9, 20)}
        assert {at: offsets for at, offsets in seen.items() if offsets} == {
            7: [4],
            10: [0, 1],
            15: [3],
            20: [2],
        }

    @pytest.mark.parametrize("how", ["", *HOW])
    def test_what_is_delayed_after_a_step_is_not(self, rig: Rig, how: str) -> None:
        """Of a queue whose times had all come when the clock was put forward; its replay must agree."""
        rig.open()
        rig.send("orders", [b"a", b"b", b"c"], ttl=[1, 0, 0], delay=[0, 1, 0])
        assert offsets_at(rig, "orders", 0) == [0, 2]
        rig.later(seconds=3)
        rig.due()
        assert expired(rig) == []
        got = rig.take("orders")
        step(rig, 3600)
        rig.settle("orders", Outcome.REQUEUE, got, delay=10)
        if how:
            rig.restart(how)
        assert offsets_at(rig, "orders", 3612.9) == []
        assert offsets_at(rig, "orders", 3613) == [1]


class GivenBackLater:
    """Deliveries that end with a delay: by a consumer's word, or because the queue has retry-delays."""

    def test_requeued_with_a_delay_it_comes_to_its_own_place(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 4))
        got = rig.take("orders", 2)
        fates = open_fates(rig.settle("orders", Outcome.REQUEUE, got[:1], delay=2.5))
        assert fates == [(0, Event.DELAYED, NONE)]
        rig.has("orders", ready=2, delayed=1, held=1)
        rig.later(us=2_499_999)
        assert rig.due() == set()
        rig.later(us=1)
        assert rig.due() == {"orders"}
        assert [(m.offset, m.attempts) for m in rig.take("orders")] == [(0, 1), (2, 0), (3, 0)]

    def test_0_means_behind_the_tail_at_once_also_where_there_are_retry_delays(self, rig: Rig) -> None:
        rig.open(BACKOFF)
        rig.send("orders", [b"a", b"b"])
        got = rig.take("orders", 1)
        assert open_fates(rig.settle("orders", Outcome.REQUEUE, got, delay=0)) == [(0, Event.REQUEUED, NONE)]
        assert payloads(rig.take("orders")) == [b"b", b"a"]

    @pytest.mark.parametrize("delay", [None, 3])
    def test_a_ttl_that_is_kept_goes_on(self, rig: Rig, delay: float | None) -> None:
        rig.open()
        rig.send("orders", [b"x", b"y", b"z"], ttl=[10, 5, 0])
        rig.settle("orders", Outcome.REQUEUE, rig.take("orders"), ttl=KEEP_TTL, delay=delay)
        rig.later(seconds=4)
        rig.due()
        got = rig.take("orders")
        assert [m.expires_us for m in got] == [START_US + 10 * SECOND, START_US + 5 * SECOND, 0]
        rig.settle("orders", Outcome.REQUEUE, got, ttl=KEEP_TTL, delay=delay)
        rig.later(seconds=1)
        assert [row[1:] for row in expired(rig)] == [(1, Event.DEAD, Reason.EXPIRED)]
        rig.later(seconds=5)
        assert [row[1:] for row in expired(rig)] == [(0, Event.DEAD, Reason.EXPIRED)]

    @pytest.mark.parametrize("delay", [None, 3])
    def test_kept_for_too_long_it_has_expired_when_it_comes_back(self, rig: Rig, delay: float | None) -> None:
        """Its timer ran out while somebody held it: nobody else would come for it."""
        rig.open()
        rig.send("orders", [b"x", b"y"], ttl=[1, 0])
        got = rig.take("orders")
        rig.later(seconds=2)
        assert expired(rig) == []
        fates = open_fates(rig.settle("orders", Outcome.REQUEUE, got, ttl=KEEP_TTL, delay=delay))
        back = Event.DELAYED if delay else Event.REQUEUED
        assert fates == [(0, Event.DEAD, Reason.EXPIRED), (1, back, NONE)]

    def test_a_new_ttl_counts_from_now_while_it_is_delayed(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x", b"y"], ttl=[100, 0])
        got = rig.take("orders")
        rig.settle("orders", Outcome.REQUEUE, got[:1], ttl=4, delay=9)
        rig.settle("orders", Outcome.REQUEUE, got[1:], ttl=20, delay=9)
        rig.later(seconds=4)
        assert [row[1:] for row in expired(rig)] == [(0, Event.DEAD, Reason.EXPIRED)]
        rig.later(seconds=5)
        rig.due()
        assert [m.expires_us for m in rig.take("orders")] == [START_US + 20 * SECOND]

    @pytest.mark.parametrize("how", ["requeued", "lost", "lease"])
    @pytest.mark.parametrize("restart", ["", *HOW])
    def test_retry_delays_one_after_the_other_and_the_end(self, rig: Rig, how: str, restart: str) -> None:
        engine = rig.open({"orders": {"retry-delays": "1,10,60", "max-deliveries": 5}})
        rig.send("orders", [b"x"])
        for attempt, delay in enumerate([1, 10, 60, 60]):
            (m,) = rig.take("orders")
            assert m.attempts == attempt
            if how == "requeued":
                fates, reason = rig.settle("orders", Outcome.REQUEUE, [m]), NONE
            elif how == "lost":
                fates, reason = rig.lose("orders", where=Where.TAIL), Reason.CONSUMER_LOST
            else:
                reason = Reason.LEASE_ENDED
                fates = engine.give_back("orders", "ann", rig.now_us, ranges=[(0, 1)], why=reason)
            assert open_fates(fates) == [(0, Event.DELAYED, reason)]
            if restart:
                engine = rig.restart(restart)
            rig.later(seconds=delay, us=-1)
            assert rig.due() == set()
            rig.later(us=1)
            assert rig.due() == {"orders"}
        rig.take("orders")
        told = [(it.event, it.reason, it.attempt) for it in rig.events("orders")[1:]]
        assert told == [(Event.DELAYED, reason, attempt) for attempt in (1, 2, 3, 4)]
        rig.lose("orders")
        rig.has("orders", dead=1)
        ((_, _, why),) = [it[1:4] for it in rig.events("orders") if it.event is Event.DEAD]
        assert why is Reason.TOO_MANY_DELIVERIES

    def test_0_among_the_retry_delays(self, rig: Rig) -> None:
        rig.open({"orders": {"retry-delays": [0, 5]}})
        rig.send("orders", [b"a", b"b"])
        for back in (Event.RETURNED, Event.DELAYED):
            rig.take("orders", 1)
            assert open_fates(rig.lose("orders")) == [(0, back, Reason.CONSUMER_LOST)]

    def test_a_retry_counter_counts_as_without_delays(self, rig: Rig) -> None:
        rig.open({"orders": {"retry-delays": [1], "max-deliveries": 1}})
        rig.send("orders", [b"x"], retries=1)
        (m,) = rig.take("orders")
        rig.lose("orders")
        rig.later(seconds=1)
        rig.due()
        (m,) = rig.take("orders")
        assert (m.retries, m.attempts) == (0, 1)
        assert open_fates(rig.lose("orders")) == [(0, Event.DEAD, Reason.RETRIES_EXHAUSTED)]

    def test_given_back_unseen_nothing_is_delayed(self, rig: Rig) -> None:
        engine = rig.open(BACKOFF)
        rig.send("orders", [b"x"])
        rig.take("orders")
        engine.give_back("orders", "ann", rig.now_us, lost=False)
        assert [(m.payload, m.attempts) for m in rig.take("orders")] == [(b"x", 0)]

    def test_dead_letters_know_no_delays(self, rig: Rig) -> None:
        engine = rig.open(BACKOFF)
        rig.kill("orders", [b"x", b"y"])
        got = rig.take("orders", dead=True)
        fates = rig.settle("orders", Outcome.REQUEUE, got[:1], dead=True, delay=9)
        fates += engine.give_back("orders", "ann", rig.now_us, why=Reason.LEASE_ENDED)
        assert [row[1:] for row in open_fates(fates)] == [
            (Event.REQUEUED, NONE),
            (Event.REQUEUED, Reason.LEASE_ENDED),
        ]
        assert payloads(rig.take("orders", dead=True)) == [b"x", b"y"]

    def test_what_is_shown_of_it(self, rig: Rig) -> None:
        engine = rig.open(BACKOFF)
        rig.send("orders", named("m", 3))
        got = rig.take("orders")
        rig.settle("orders", Outcome.REQUEUE, got[:2], delay=9)
        shown = all_states(engine, "orders", only=State.DELAYED)
        due_us = START_US + 9 * SECOND
        assert shown == dict.fromkeys((0, 1), Looked(State.DELAYED, NONE, "", 1, -2, -2, due_us))
        rig.turn()
        assert engine.counts("orders")[Event.DELAYED, NONE] == 2
        told = [it for it in rig.events("orders") if it.event is Event.DELAYED]
        assert [(it.offset, it.consumer, it.attempt, it.dispatched_us) for it in told] == [
            (0, "ann", 1, START_US),
            (1, "ann", 1, START_US),
        ]

    def test_a_delay_that_cannot_be_is_refused_and_the_message_stays_held(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x"])
        got = rig.take("orders")
        for delay in (-5, DELAY_SECONDS_MAX + 1):
            with pytest.raises(LogRefused, match="delay"):
                rig.settle("orders", Outcome.REQUEUE, got, delay=delay)
        rig.has("orders", held=1)

    def test_a_dead_letter_that_was_delayed_is_redriven_at_once(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", [b"x"], ttl=2, delay=100)
        rig.later(seconds=2)
        assert len(expired(rig)) == 1
        engine.redrive("orders", rig.now_us)
        assert payloads(rig.take("orders")) == [b"x"]
        rig.later(seconds=98)
        assert rig.due() == set()

    @pytest.mark.parametrize("how", HOW)
    def test_a_consumer_goes_on_with_what_was_delayed_before(self, rig: Rig, how: str) -> None:
        """That its time had come is in no block, and nobody has looked since the restart."""
        rig.open(BACKOFF)
        rig.send("orders", named("m", 3), delay=[5, 0, 0])
        rig.take("orders", 1)
        rig.lose("orders")
        rig.later(seconds=5)
        rig.due()
        got = rig.take("orders", 2)
        assert [m.offset for m in got] == [0, 1]
        rig.restart(how)
        granted = rig.engine.resume("orders", "ann", [(0, 3)], rig.now_us, origin=got[0].origin)
        assert granted == [(0, 3)]
        rig.ack("orders", got)
        rig.has("orders", held=1)

    def test_nobody_goes_on_with_what_is_delayed(self, rig: Rig) -> None:
        rig.open(BACKOFF)
        rig.send("orders", named("m", 2), delay=[9, 0])
        (m,) = rig.take("orders")
        rig.settle("orders", Outcome.REQUEUE, [m])
        assert rig.engine.resume("orders", "ann", [(0, 2)], rig.now_us, origin=m.origin) == []
        rig.has("orders", delayed=2)
        assert offsets_at(rig, "orders", 1) == [1]
        assert offsets_at(rig, "orders", 9) == [0]


class DelayedStages:
    """Transactions: a delay counts from the commit."""

    def test_in_one_go(self, rig: Rig) -> None:
        engine = rig.open()
        batch = Batch.of(named("t", 3), delay_us=[0, 5 * SECOND, 2 * SECOND], headers=[b"", b"{}", b""])
        engine.transact("key", [("orders", batch), ("mails", Batch.of([b"m"]))], rig.now_us)
        rig.turn()
        assert [offsets_at(rig, "orders", s) for s in (0, 1.9, 2, 4.9, 5)] == [[0], [], [2], [], [1]]
        assert offsets_at(rig, "mails", 5) == [0]

    @pytest.mark.parametrize("how", ["", *HOW])
    def test_by_stages(self, rig: Rig, how: str) -> None:
        rig.open()
        delayed = Batch.of(named("a", 3), delay_us=[0, 5 * SECOND, 2 * SECOND], headers=[b"{}", b"", b""])
        stages = [
            rig.stage("key", ("orders", delayed)),
            rig.stage("key", ("orders", named("b", 2)), ("mails", Batch.of([b"m"], delay_us=[SECOND]))),
        ]
        rig.later(seconds=10)
        if how:
            rig.restart(how)
        rig.commit("key", *stages)
        rig.has("mails", delayed=1)
        if how:
            rig.restart(how)
        rig.due()
        rig.has("orders", ready=3, delayed=2)
        seen = {at: offsets_at(rig, "orders", 10 + at) for at in (0, 1.9, 2, 4.9, 5)}
        assert seen == {0: [0, 3, 4], 1.9: [], 2: [2], 4.9: [], 5: [1]}
        assert offsets_at(rig, "mails", 15) == [0]
        assert [m.headers for m in rig.read("orders")] == [b"{}", b"", b"", b"", b""]

    @pytest.mark.parametrize("how", ["", *HOW])
    def test_a_large_one(self, rig: Rig, how: str) -> None:
        """Some thousand rows of many blocks, in several stages."""
        rig.open()
        count = 1500
        stages = []
        for i in range(3):
            delays = array("q", [(n * 31 % 50 + i) * SECOND for n in range(count)])
            batch = Batch.of([b"%d-%04d" % (i, n) for n in range(count)])
            batch.delay_us = delays
            stages.append(rig.stage("key", ("orders", batch)))
        rig.commit("key", *stages)
        if how:
            rig.restart(how)
        taken: list[int] = []
        for second in range(0, 60, 5):
            offsets = offsets_at(rig, "orders", second)
            for offset in offsets:
                moment = offset % count * 31 % 50 + offset // count
                assert second - 5 < moment <= second
            taken += offsets
        assert sorted(taken) == list(range(3 * count))

    def test_dead_letters_have_no_delay(self, rig: Rig) -> None:
        engine = rig.open()
        batch = Batch.of([b"x"], delay_us=[SECOND])
        batch.dead = Reason.BAD_RECORD
        with pytest.raises(LogRefused, match="delay"):
            engine.transact("key", [("orders", batch)], rig.now_us)
        with pytest.raises(LogRefused, match="delay"):
            engine.stage("key", [("orders", batch)], rig.now_us, lambda _: None)


class DelaysAndRestarts:
    """At every stage of a delay, a restart changes nothing but who has looked."""

    @pytest.mark.parametrize("how", HOW)
    @pytest.mark.parametrize("stage", range(6))
    def test_at_every_stage(self, rig: Rig, stage: int, how: str) -> None:
        rig.open(BACKOFF)
        rig.send("orders", named("m", 5), delay=[4, 0, 8, 4, 0], ttl=[0, 0, 6, 0, 0])
        steps: list[Callable[[], object]] = [
            lambda: rig.settle("orders", Outcome.REQUEUE, rig.take("orders", 1), delay=5),
            lambda: rig.later(seconds=4),
            lambda: rig.due(),
            lambda: rig.take("orders", 1) and rig.lose("orders"),
            lambda: rig.later(seconds=1),
        ]
        for number, do in enumerate(steps):
            if number == stage:
                rig.restart(how)
                rig.due()
            do()
        if stage == len(steps):
            rig.restart(how)
        rig.due()
        rig.has("orders", ready=4, delayed=1)
        rig.later(seconds=1)
        assert [row[1:] for row in expired(rig)] == [(2, Event.DEAD, Reason.EXPIRED)]
        rig.has("orders", ready=4, dead=1)
        assert [(m.offset, m.attempts) for m in rig.take("orders")] == [(0, 1), (1, 1), (3, 0), (4, 0)]

    @pytest.mark.parametrize("how", HOW)
    def test_nothing_else_is_seen_of_it(self, rig: Rig, how: str) -> None:
        rig.open(BACKOFF)
        rig.send("orders", named("m", 6), delay=[40, 0, 80, 40, 0, 0], headers=[b'{"a":"1"}', b""] * 3)
        got = rig.take("orders")
        rig.settle("orders", Outcome.REQUEUE, got[:1], delay=50)
        rig.settle("orders", Outcome.REJECT, got[1:2], why="no")
        rig.lose("orders")
        rig.later(seconds=40)
        rig.due()
        rig.ack("orders", rig.take("orders", 1))
        before = picture(rig)
        shown = all_states(rig.engine, "orders")
        rig.restart(how)
        rig.due()
        assert picture(rig) == before
        assert {o: it.state for o, it in all_states(rig.engine, "orders").items()} == {
            o: it.state for o, it in shown.items()
        }
        assert [offsets_at(rig, "orders", s) for s in (40, 49, 50, 80)] == [[3, 5], [], [1], [2]]

    @pytest.mark.parametrize("how", HOW)
    def test_again_and_again(self, rig: Rig, how: str) -> None:
        """Between restarts some become due, some are delayed once more."""
        rig.open({"orders": {"retry-delays": [3], "max-deliveries": 0}})
        rig.send("orders", named("m", 300), delay=[i % 20 for i in range(300)])
        taken: list[int] = []
        for second in range(40):
            rig.now_us = START_US + second * SECOND
            rig.due()
            got = rig.take("orders")
            again = [m for m in got if m.offset % 3 == 0 and not m.attempts]
            rig.ack("orders", [m for m in got if m not in again])
            if again:
                rig.lose("orders")
            taken += [m.offset for m in got if m not in again]
            for m in got:
                assert second == m.offset % 20 + 3 * m.attempts
            rig.restart(how)
        assert sorted(taken) == list(range(300))

    @pytest.mark.parametrize("how", HOW)
    def test_a_long_time_after(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.send("orders", named("m", 3), delay=[4, 0, 8])
        rig.restart(how)
        rig.later(seconds=100)
        rig.due()
        assert payloads(rig.take("orders")) == named("m", 3)


class Headers:
    """They come out as they went in, and a message without any has none."""

    def test_beside_each_message(self, rig: Rig) -> None:
        rig.open()
        texts = [b'{"trace":"00-1"}', b"", b'{"a":"' + b"x" * 3000 + b'"}']
        rig.send("orders", [b"a", b"b", b"c"], headers=texts)
        rig.send("orders", [b"d"])
        rig.send("orders", [b"e"], headers=[b'{"e":""}'], ttl=5, retries=3, delay=1)
        rig.later(seconds=1)
        rig.due()
        expected = [*texts, b"", b'{"e":""}']
        assert [m.headers for m in rig.read("orders")] == expected
        got = rig.take("orders")
        assert [m.headers for m in got] == expected
        assert (got[-1].retries, got[-1].expires_us) == (3, START_US + 5 * SECOND)

    @pytest.mark.parametrize("how", HOW)
    def test_they_stay_whatever_happens_to_the_message(self, rig: Rig, how: str) -> None:
        engine = rig.open()
        rig.send("orders", named("m", 3), headers=[b'{"n":"%d"}' % i for i in range(3)])
        got = rig.take("orders")
        rig.settle("orders", Outcome.REQUEUE, got[:1])
        rig.settle("orders", Outcome.REJECT, got[1:2])
        rig.lose("orders")
        engine = rig.restart(how)
        engine.redrive("orders", rig.now_us)
        assert sorted((m.payload, m.headers) for m in rig.take("orders")) == [
            (b"m-%d" % i, b'{"n":"%d"}' % i) for i in range(3)
        ]

    def test_of_batches_that_come_in_one_turn(self, rig: Rig) -> None:
        engine = rig.open()
        for headers in (None, [b"{}"], None, [b"", b'{"a":"b"}']):
            engine.append("orders", Batch.of([b"x"] * len(headers or [0]), headers=headers), rig.now_us)
        assert [m.headers for m in rig.read("orders")] == [b"", b"{}", b"", b"", b'{"a":"b"}']

    def test_a_repaired_letter_keeps_them(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", named("m", 4), headers=[b'{"n":"%d"}' % i for i in range(4)])
        got = rig.take("orders")
        rig.settle("orders", Outcome.REJECT, got[1:3], why="broken")
        engine.transact("repair", [("orders", repairs({1: b"one", 2: b"two"}))], rig.now_us)
        rig.turn()
        again = rig.take("orders")
        assert [(m.payload, json.loads(m.headers)) for m in again] == [
            (b"one", {"n": "1"}),
            (b"two", {"n": "2"}),
        ]
        assert engine.whys("orders", 0, 10) == []


class Whys:
    """What a consumer says when it rejects a message is with the letter."""

    def reject(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 6))
        got = rig.take("orders")
        rig.settle("orders", Outcome.REJECT, got[:2], why="no such customer")
        rig.settle("orders", Outcome.REJECT, got[2:3])
        rig.settle("orders", Outcome.REJECT, got[3:5], why="größer als 5 €")

    @pytest.mark.parametrize("how", ["", *HOW])
    def test_they_are_told(self, rig: Rig, how: str) -> None:
        self.reject(rig)
        if how:
            rig.restart(how)
        whys = [(0, 2, "no such customer"), (3, 5, "größer als 5 €")]
        assert rig.engine.whys("orders", 0, 6) == whys
        assert rig.engine.whys("orders", 1, 4) == [(1, 2, whys[0][2]), (3, 4, whys[1][2])]
        assert rig.engine.states("orders", 0, 6, 100).whys == whys
        assert rig.engine.states("orders", 0, 6, 100, State.DEAD).whys == whys
        assert rig.engine.states("orders", 0, 6, 100, State.READY).whys == []
        assert [m.reason for m in rig.take("orders", dead=True)] == [Reason.REJECTED] * 5
        assert rig.engine.whys("orders", 0, 6) == whys

    @pytest.mark.parametrize("how", ["", *HOW])
    def test_until_the_letter_is_no_more_or_says_something_else(self, rig: Rig, how: str) -> None:
        self.reject(rig)
        got = rig.take("orders", dead=True)
        rig.settle("orders", Outcome.ACK, got[:1], dead=True)
        rig.settle("orders", Outcome.REJECT, got[1:2], dead=True, why="still not")
        rig.engine.give_back("orders", "ann", rig.now_us)
        rig.engine.redrive("orders", rig.now_us, ranges=[(3, 4)])
        if how:
            rig.restart(how)
        assert rig.engine.whys("orders", 0, 6) == [(1, 2, "still not"), (4, 5, "größer als 5 €")]
        rig.engine.purge("orders", rig.now_us, dead=True)
        if how:
            rig.restart(how)
        assert rig.engine.whys("orders", 0, 6) == []

    @pytest.mark.parametrize("how", ["", *HOW])
    def test_a_second_rejection_without_a_word_leaves_the_first(self, rig: Rig, how: str) -> None:
        self.reject(rig)
        got = rig.take("orders", dead=True)
        rig.settle("orders", Outcome.REJECT, [m for m in got if m.offset == 0], dead=True)
        if how:
            rig.restart(how)
        assert rig.engine.whys("orders", 0, 3) == [(0, 2, "no such customer")]

    @pytest.mark.parametrize("how", ["", *HOW])
    def test_who_dies_again_for_another_reason_has_none(self, rig: Rig, how: str) -> None:
        self.reject(rig)
        rig.engine.redrive("orders", rig.now_us, ranges=[(0, 1)])
        rig.take("orders", 1)
        rig.settle("orders", Outcome.REJECT, [m for m in rig.read("orders") if m.offset == 0])
        if how:
            rig.restart(how)
        assert rig.engine.whys("orders", 0, 3) == [(1, 2, "no such customer")]

    def test_where_dead_letters_are_off_nothing_is_kept(self, rig: Rig) -> None:
        rig.open({"orders": {"dead-letters": "off"}})
        rig.send("orders", [b"x"])
        rig.settle("orders", Outcome.REJECT, rig.take("orders"), why="no")
        assert rig.engine.whys("orders", 0, 1) == []
        rig.has("orders")

    def test_an_answer_has_no_more_of_them_than_runs(self, rig: Rig) -> None:
        """Letters that were rejected at one time are one run, with a text each."""
        rig.open()
        rig.send("orders", named("m", 50))
        for m in rig.take("orders"):
            rig.settle("orders", Outcome.REJECT, [m], why=f"why {m.offset}")
        found: list[tuple[int, int, str]] = []
        at = 0
        while at < 50:
            runs = rig.engine.states("orders", at, 50, 7)
            assert len(runs.whys) <= 7
            assert all(at <= first and end <= runs.next for first, end, _ in runs.whys)
            found += runs.whys
            at = runs.next
        assert found == [(i, i + 1, f"why {i}") for i in range(50)]
