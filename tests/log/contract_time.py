"""The contract, part 4: time. TTLs, exact to the microsecond where it matters, and on-expiry."""

from itertools import pairwise

import pytest

from penstock.log.errors import LogRefused
from penstock.log.info import ReaderInfo
from penstock.model.life import Event, Reason
from penstock.model.words import Outcome, Where
from tests.log.contract_rig import SECOND, Rig, named, open_fates, payloads

DEAD = (Event.DEAD, Reason.EXPIRED)
DROPPED = (Event.EXPIRED, Reason.EXPIRED)


def expired(rig: Rig) -> list[tuple[str, int, Event, Reason]]:
    """What one `expire` says."""
    return [(queue, *row) for queue, fate in rig.engine.expire(rig.now_us) for row in open_fates([fate])]


class Expiry:
    """take and expire with messages that have a TTL."""

    def test_a_message_lives_until_the_last_microsecond(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x"], ttl=10)
        rig.later(seconds=10, us=-1)
        assert expired(rig) == []
        assert payloads(rig.take("orders")) == [b"x"]

    def test_and_not_one_longer(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x"], ttl=10)
        rig.later(seconds=10)
        assert rig.take("orders") == []
        rig.has("orders", dead=1)

    def test_what_a_take_finds_expired_is_told_by_the_next_expire_and_once(self, rig: Rig) -> None:
        rig.open()
        rig.later(us=300_000)
        rig.send("orders", [b"x"], ttl=1)
        rig.later(seconds=1)
        assert rig.take("orders") == []
        rig.turn()
        assert expired(rig) == [("orders", 0, *DEAD)]
        rig.later(seconds=2)
        assert expired(rig) == []

    def test_expire_finds_it_within_the_second(self, rig: Rig) -> None:
        rig.open()
        rig.later(us=300_000)
        rig.send("orders", [b"x"], ttl=10)
        rig.send("mails", [b"y"], ttl=10)
        rig.later(seconds=10, us=700_000)
        assert sorted(expired(rig)) == [("mails", 0, *DEAD), ("orders", 0, *DEAD)]
        rig.has("orders", dead=1)
        assert expired(rig) == []

    @pytest.mark.parametrize("how", ["", "reopen", "crash"])
    def test_very_many_end_in_several_goes_and_each_once(self, rig: Rig, how: str) -> None:
        rig.open()
        count = 50_000
        for _ in range(count // 10_000):
            rig.send("orders", [b"x"] * 10_000, ttl=10)
        rig.later(seconds=10)
        goes = [[fate for _, fate in rig.engine.expire(rig.now_us)]]
        assert 0 < sum(fate.end - fate.first for fate in goes[0]) < count
        if how:
            rig.restart(how)
            rig.later(seconds=1)
        while goes[-1]:
            goes.append([fate for _, fate in rig.engine.expire(rig.now_us)])
        ended = sorted((fate.first, fate.end) for fates in goes for fate in fates)
        assert ended[0][0] == 0
        assert ended[-1][1] == count
        assert all(one[1] == other[0] for one, other in pairwise(ended))
        rig.has("orders", dead=count)

    def test_the_others_stay_as_they_are(self, rig: Rig) -> None:
        rig.open()
        ttls = [5, 0, 5, 9, 0, 5]
        sent = named("m", 6)
        rig.send("orders", sent, ttl=ttls)
        rig.send("orders", [b"plain"])
        rig.later(seconds=6)
        assert [offset for _, offset, _, _ in expired(rig)] == [0, 2, 5]
        rig.has("orders", ready=4, dead=3)
        got = rig.take("orders")
        assert payloads(got) == [b"m-1", b"m-3", b"m-4", b"plain"]
        assert [m.expires_us for m in got] == [0, rig.now_us + 3 * SECOND, 0, 0]
        assert payloads(rig.take("orders", dead=True)) == [b"m-0", b"m-2", b"m-5"]

    def test_a_take_steps_over_expired_ones_and_still_gives_the_count(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 9), ttl=[1, 0, 1, 1, 0, 0, 1, 0, 1])
        rig.later(seconds=1)
        assert payloads(rig.take("orders", 3)) == [b"m-1", b"m-4", b"m-5"]
        assert payloads(rig.take("orders", 3)) == [b"m-7"]
        rig.has("orders", held=4, dead=5)

    def test_a_take_that_ends_early_leaves_the_rest_alone(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x" * 10] * 6, ttl=[1, 0, 1, 0, 1, 0])
        rig.later(seconds=1)
        assert len(rig.take_bytes("orders", 15)) == 1
        assert len(rig.take("orders")) == 2
        rig.has("orders", held=3, dead=3)

    def test_many_moments_one_after_the_other(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 20), ttl=[20 - i for i in range(20)])
        for second in range(1, 21):
            rig.later(seconds=1)
            assert expired(rig) == [("orders", 20 - second, *DEAD)]
        assert payloads(rig.take("orders", dead=True)) == named("m", 20)[::-1]

    def test_on_expiry_drop_throws_it_away(self, rig: Rig) -> None:
        rig.open({"orders": {"on-expiry": "drop"}})
        rig.send("orders", [b"x", b"y"], ttl=[1, 2])
        rig.later(seconds=1)
        assert expired(rig) == [("orders", 0, *DROPPED)]
        rig.later(seconds=1)
        assert rig.take("orders") == []
        rig.has("orders")

    def test_so_does_dead_letters_off(self, rig: Rig) -> None:
        rig.open({"orders": {"dead-letters": "off"}})
        rig.send("orders", [b"x"], ttl=1)
        rig.later(seconds=1)
        assert expired(rig) == [("orders", 0, *DROPPED)]

    def test_a_paused_queue_expires_too(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x"], ttl=1)
        rig.engine.pause("orders", True, rig.now_us)
        rig.later(seconds=1)
        assert expired(rig) == [("orders", 0, *DEAD)]

    def test_the_longest_ttl(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x"], ttl=10**12)
        (message,) = rig.take("orders")
        assert message.expires_us == rig.now_us + 10**12 * SECOND


class ExpiryWhileHeld:
    """A consumer may finish what it holds; what comes back too late has expired."""

    def test_a_held_message_is_left_to_its_consumer(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x"], ttl=1)
        got = rig.take("orders")
        rig.later(seconds=5)
        assert expired(rig) == []
        rig.has("orders", held=1)
        assert open_fates(rig.ack("orders", got)) == [(0, Event.ACKED, Reason.NONE)]

    @pytest.mark.parametrize("lost", [True, False])
    @pytest.mark.parametrize("where", Where)
    def test_given_back_too_late_it_has_expired(self, rig: Rig, where: Where, lost: bool) -> None:
        engine = rig.open()
        rig.send("orders", [b"x", b"y"], ttl=[1, 0])
        rig.take("orders")
        rig.later(seconds=1)
        fates = open_fates(engine.give_back("orders", "ann", rig.now_us, where=where, lost=lost))
        assert fates[0] == (0, *DEAD)
        assert fates[1][1] in (Event.RETURNED, Event.REQUEUED)
        rig.has("orders", ready=1, dead=1)

    def test_given_back_in_time_it_expires_at_its_moment(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x", b"y"], ttl=[10, 20])
        rig.take("orders")
        rig.later(seconds=5)
        rig.lose("orders")
        assert expired(rig) == []
        rig.later(seconds=5)
        assert expired(rig) == [("orders", 0, *DEAD)]
        rig.later(seconds=10)
        assert expired(rig) == [("orders", 1, *DEAD)]

    def test_held_over_one_moment_and_back_before_the_other(self, rig: Rig) -> None:
        """The timer of a block runs out while all of it is held; the later ones must not be forgotten."""
        rig.open()
        rig.send("orders", [b"x", b"y"], ttl=[1, 10])
        x, _ = rig.take("orders")
        rig.later(seconds=2)
        assert expired(rig) == []
        rig.ack("orders", [x])
        rig.lose("orders")
        rig.later(seconds=8)
        assert expired(rig) == [("orders", 1, *DEAD)]

    @pytest.mark.parametrize("how", ["reopen", "crash"])
    def test_expired_in_the_hands_of_a_consumer_that_the_restart_forgot(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.send("orders", [b"x", b"y"], ttl=[1, 100])
        rig.take("orders")
        rig.later(seconds=5)
        assert expired(rig) == []
        rig.restart(how)
        assert expired(rig) == [("orders", 0, *DEAD)]
        rig.has("orders", ready=1, dead=1)


class NewTtl:
    """A requeue sets a new TTL, or none."""

    def test_the_new_one_counts_from_now(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x"], ttl=3)
        rig.later(seconds=2)
        rig.settle("orders", Outcome.REQUEUE, rig.take("orders"), ttl=10)
        rig.later(seconds=9)
        assert expired(rig) == []
        (message,) = rig.take("orders")
        assert message.expires_us == rig.now_us + SECOND
        rig.lose("orders")
        rig.later(seconds=1)
        assert [row[2:] for row in expired(rig)] == [DEAD]

    def test_0_means_none_from_now_on(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x"], ttl=3)
        rig.settle("orders", Outcome.REQUEUE, rig.take("orders"), ttl=0)
        rig.later(seconds=1000)
        assert expired(rig) == []
        assert [(m.payload, m.expires_us) for m in rig.take("orders")] == [(b"x", 0)]

    def test_a_message_without_one_gets_one(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x", b"y"])
        x, _ = rig.take("orders")
        rig.settle("orders", Outcome.REQUEUE, [x], ttl=1)
        rig.lose("orders")
        rig.later(seconds=1)
        assert [row[2:] for row in expired(rig)] == [DEAD]
        assert payloads(rig.take("orders")) == [b"y"]

    def test_a_requeue_saves_what_had_expired_in_its_consumer_s_hands(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x"], ttl=1)
        got = rig.take("orders")
        rig.later(seconds=5)
        rig.settle("orders", Outcome.REQUEUE, got, ttl=5)
        assert expired(rig) == []
        assert payloads(rig.take("orders")) == [b"x"]

    def test_a_ttl_that_cannot_be_is_refused_and_the_message_stays_held(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x"])
        got = rig.take("orders")
        for ttl in (-1, 1 << 60):
            with pytest.raises(LogRefused, match="TTL"):
                rig.settle("orders", Outcome.REQUEUE, got, ttl=ttl)
        assert len(rig.ack("orders", got)) == 1

    @pytest.mark.parametrize("how", ["reopen", "crash"])
    def test_the_new_moment_of_a_message_that_had_none_survives_a_restart(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.send("orders", [b"x", b"y"])
        rig.settle("orders", Outcome.REQUEUE, rig.take("orders", 1), ttl=5)
        rig.restart(how)
        rig.later(seconds=5)
        assert [row[2:] for row in expired(rig)] == [DEAD]
        assert payloads(rig.take("orders")) == [b"y"]

    @pytest.mark.parametrize("how", ["reopen", "crash"])
    def test_moments_survive_a_restart(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.send("orders", [b"x", b"y", b"z"], ttl=[10, 20, 30])
        _, y = rig.take("orders", 2)
        rig.settle("orders", Outcome.REQUEUE, [y], ttl=40)
        rig.restart(how)
        seen = []
        for _ in range(5):
            rig.later(seconds=10)
            seen.append([row[0] for row in expired(rig)])
        assert seen == [["orders"], [], ["orders"], ["orders"], []]
        assert payloads(rig.take("orders", dead=True)) == [b"x", b"z", b"y"]


def step(rig: Rig, seconds: int) -> None:
    rig.later(seconds=seconds)
    rig.engine.step(seconds * SECOND, rig.now_us)
    rig.turn()


class ClockSteps:
    """The clock is put forward by `step`, and nobody has waited for that long."""

    @pytest.mark.parametrize("how", ["", "reopen", "crash"])
    def test_what_was_sent_before_lives_as_long_as_it_would_have(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.send("orders", [b"a", b"b", b"c"], ttl=[10, 0, 5000])
        rig.later(seconds=4)
        step(rig, 3600)
        step(rig, 86_400)
        rig.send("orders", [b"later"], ttl=3)
        if how:
            rig.restart(how)
        assert expired(rig) == []
        left = [(m.payload, m.expires_us and m.expires_us - rig.now_us) for m in rig.take("orders")]
        assert left == [(b"a", 6 * SECOND), (b"b", 0), (b"c", 4996 * SECOND), (b"later", 3 * SECOND)]
        rig.lose("orders")
        rig.later(seconds=3)
        assert [offset for _, offset, *_ in expired(rig)] == [3]
        rig.later(seconds=3, us=-1)
        assert expired(rig) == []
        rig.later(us=1)
        assert [offset for _, offset, *_ in expired(rig)] == [0]
        rig.later(seconds=4990)
        assert [offset for _, offset, *_ in expired(rig)] == [2]
        rig.has("orders", ready=1, dead=3)

    def test_what_had_run_out_before_in_the_hands_of_a_consumer_has(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"x"], ttl=1)
        rig.take("orders")
        rig.later(seconds=2)
        assert expired(rig) == []
        step(rig, 3600)
        rig.lose("orders")
        rig.has("orders", dead=1)

    @pytest.mark.parametrize("how", ["", "reopen", "crash"])
    def test_a_new_ttl_is_not_put_off(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.send("orders", [b"x", b"y"], ttl=10)
        got = rig.take("orders")
        step(rig, 3600)
        rig.settle("orders", Outcome.REQUEUE, got[:1], ttl=2)
        rig.lose("orders")
        if how:
            rig.restart(how)
        rig.later(seconds=2)
        assert [offset for _, offset, *_ in expired(rig)] == [0]
        rig.later(seconds=8)
        assert [offset for _, offset, *_ in expired(rig)] == [1]

    @pytest.mark.parametrize("how", ["", "reopen", "crash"])
    def test_a_lease_lasts_as_long_as_it_would_have(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.send("orders", [b"x"])
        until_us = rig.now_us + 60 * SECOND
        rig.engine.hold_retention(ReaderInfo("spark", "orders", "messages", 0, until_us), rig.now_us)
        step(rig, 3600)
        if how:
            rig.restart(how)
        assert [it.lease_until_us for it in rig.engine.readers()] == [until_us + 3600 * SECOND]

    @pytest.mark.parametrize("how", ["reopen", "crash"])
    def test_an_opening_does_not_go_back_behind_what_is_in_the_log(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.later(seconds=100)
        rig.send("orders", [b"x"])
        rig.turn()
        assert rig.engine.time_us == rig.now_us
        reached, rig.now_us = rig.now_us, rig.now_us - 50 * SECOND
        rig.restart(how)
        assert rig.engine.time_us == reached
