"""The contract, part 7: for those who watch. States in runs, counts, deaths, changes, the engine itself."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest

from penstock.log.errors import QueueUnknown
from penstock.log.info import SYNC_BOUNDS_SECONDS, StateRuns
from penstock.log.log import Log
from penstock.model.batch import Batch
from penstock.model.life import Event, Reason, State
from penstock.model.policy import Policies
from penstock.model.words import Outcome, Where
from tests.log.contract_rig import SECOND, Got, Rig, named

ABC = [b"a", b"b", b"c"]


class Looked(NamedTuple):
    """One living message, out of a run."""

    state: State
    reason: Reason
    consumer: str
    attempts: int
    retries: int
    expires_us: int
    time_us: int


def open_states(runs: StateRuns) -> dict[int, Looked]:
    columns = (runs.first, runs.end, runs.state, runs.reason, runs.consumer, runs.attempts)
    found: dict[int, Looked] = {}
    at = -1
    for i in range(len(runs)):
        first, end, state, reason, consumer, attempts = (column[i] for column in columns)
        assert at <= first < end
        at = end
        name = runs.consumers[consumer] if consumer >= 0 else ""
        looked = Looked(
            State(state), Reason(reason), name, attempts, runs.retries[i], runs.expires_us[i], runs.time_us[i]
        )
        found |= dict.fromkeys(range(first, end), looked)
    return found


def all_states(
    engine: Log, queue: str, end: int = 1 << 30, runs_max: int = 100, only: State | None = None
) -> dict[int, Looked]:
    """Everything, in as many answers as it takes."""
    found: dict[int, Looked] = {}
    start = 0
    while start < end:
        runs = engine.states(queue, start, end, runs_max, only)
        assert start < runs.next <= end
        assert len(runs) <= runs_max
        part = open_states(runs)
        assert all(start <= offset < runs.next for offset in part)
        found |= part
        start = runs.next
    return found


def busy(rig: Rig) -> int:
    """Ready, moved, held, dead and dead-held messages, with and without a history; 2 and 11 are gone.

    Returns where the moved one is.
    """
    rig.open({"orders": {"max-deliveries": 9}})
    rig.send("orders", named("m", 12), retries=[-1, 3] * 6)
    rig.later(seconds=1)
    got = rig.take("orders", 10)
    rig.settle("orders", Outcome.REJECT, got[0:2])
    rig.ack("orders", got[2:3])
    rig.settle("orders", Outcome.REQUEUE, got[3:4], ttl=60)
    rig.engine.give_back("orders", "ann", rig.now_us, ranges=[(5, 6)])
    rig.later(seconds=1)
    rig.take("orders", 1, consumer="bob", dead=True)
    rig.engine.withdraw("orders", [(11, 12)], Reason.OPERATOR, rig.now_us)
    return max(message.offset for message in rig.read("orders") if message.payload == b"m-3")


class States:
    """states: where the living messages are."""

    def test_every_state_with_what_is_known_of_it(self, rig: Rig) -> None:
        moved = busy(rig)
        sent, later = rig.now_us - SECOND, rig.now_us
        plain = (-2, -2)
        assert all_states(rig.engine, "orders") == {
            0: Looked(State.DEAD_HELD, Reason.REJECTED, "bob", 1, *plain, later),
            1: Looked(State.DEAD, Reason.REJECTED, "", 1, *plain, sent),
            moved: Looked(State.READY, Reason.NONE, "", 1, -2, sent + 60 * SECOND, 0),
            4: Looked(State.HELD, Reason.NONE, "ann", 0, *plain, sent),
            5: Looked(State.READY, Reason.NONE, "", 1, 2, -2, 0),
            6: Looked(State.HELD, Reason.NONE, "ann", 0, *plain, sent),
            7: Looked(State.HELD, Reason.NONE, "ann", 0, *plain, sent),
            8: Looked(State.HELD, Reason.NONE, "ann", 0, *plain, sent),
            9: Looked(State.HELD, Reason.NONE, "ann", 0, *plain, sent),
            10: Looked(State.READY, Reason.NONE, "", 0, *plain, 0),
        }

    @pytest.mark.parametrize("runs_max", [1, 2, 3, 100])
    @pytest.mark.parametrize(
        ("only", "offsets"),
        [
            (None, [0, 1, *range(4, 11)]),
            (State.READY, [5, 10]),
            (State.HELD, [4, 6, 7, 8, 9]),
            (State.DEAD, [0, 1]),
        ],
    )
    def test_some_only_and_in_parts(
        self, rig: Rig, runs_max: int, only: State | None, offsets: list[int]
    ) -> None:
        moved = busy(rig)
        expected = sorted([*offsets, moved] if only in (None, State.READY) else offsets)
        assert list(all_states(rig.engine, "orders", runs_max=runs_max, only=only)) == expected

    def test_a_range_is_clipped_and_beyond_the_end_there_is_nothing(self, rig: Rig) -> None:
        moved = busy(rig)
        for start, end in [(0, 5), (3, 4), (7, 9), (2, 3), (9, 400), (400, 500), (6, 6), (8, 2)]:
            runs = rig.engine.states("orders", start, end, 100)
            expected = sorted(o for o in (0, 1, moved, *range(4, 11)) if start <= o < end)
            assert (list(open_states(runs)), runs.next) == (expected, end)

    def test_a_backlog_is_one_run_and_what_was_just_appended_is_in_it(self, rig: Rig) -> None:
        engine = rig.open()
        for _ in range(5):
            rig.send("orders", named("m", 100))
        engine.append("orders", Batch.of(ABC), rig.now_us)
        runs = engine.states("orders", 0, 1000, 10)
        assert list(zip(runs.first, runs.end, strict=True)) == [(0, 503)]

    def test_a_million_dead_letters_are_walked_in_small_steps(self, rig: Rig) -> None:
        """As many as fit into a test: what an answer costs does not follow their number."""
        rig.open()
        rig.send("orders", [b""] * 4000)
        rig.take("orders")
        rig.engine.settle(
            "orders", "ann", Outcome.REJECT, [(i, i + 1) for i in range(0, 4000, 2)], rig.now_us
        )
        runs = rig.engine.states("orders", 1000, 1 << 40, 7, State.DEAD)
        assert list(runs.first) == [1000, 1002, 1004, 1006]  # the held ones between are looked at too
        assert len(all_states(rig.engine, "orders", end=4000, only=State.DEAD)) == 2000

    def test_an_unknown_queue_is_refused(self, rig: Rig) -> None:
        engine = rig.open()
        for look in (engine.counts, engine.deaths, engine.describe):
            with pytest.raises(QueueUnknown, match="nowhere"):
                look("nowhere")
        with pytest.raises(QueueUnknown, match="nowhere"):
            engine.states("nowhere", 0, 1, 1)


def happened(rig: Rig, since: int = 0) -> Counter[tuple[Event, Reason]]:
    """The events of the log from that number on."""
    return Counter((told.event, told.reason) for told in rig.events("orders", since))


class Counting:
    """counts and deaths: what has happened, and what has become of it."""

    def test_counts_are_the_events_and_the_deliveries(self, rig: Rig) -> None:
        rig.open({"orders": {"max-deliveries": 2}})
        delivered = 0
        for turn in range(3):
            rig.send("orders", named(f"t{turn}", 10), ttl=[0] * 9 + [1], retries=[-1] * 8 + [0, 5])
            got = rig.take("orders", 9)
            delivered += len(got)
            rig.ack("orders", got[:2])
            rig.settle("orders", Outcome.REJECT, got[2:4])
            rig.settle("orders", Outcome.REQUEUE, got[4:5])
            rig.engine.give_back("orders", "ann", rig.now_us, ranges=[(got[5].offset, got[6].offset + 1)])
            rig.engine.give_back("orders", "ann", rig.now_us, where=Where.TAIL, lost=turn > 0)
            rig.engine.redrive("orders", rig.now_us, limit=1)
            delivered += len(rig.take("orders", 1, dead=True))
            rig.settle("orders", Outcome.REQUEUE, rig.take("orders", 0, dead=True), dead=True)
            rig.lose("orders")
            rig.later(seconds=2)
            rig.engine.expire(rig.now_us)
        rig.engine.purge("orders", rig.now_us)
        counts = rig.engine.counts("orders")
        assert counts.pop((Event.HELD, Reason.NONE)) == delivered
        assert counts == happened(rig)
        assert counts[Event.ACCEPTED, Reason.NONE] == 30
        assert rig.engine.counts("orders").keys() - counts.keys() == {(Event.HELD, Reason.NONE)}

    def test_what_is_thrown_away_counts_too(self, rig: Rig) -> None:
        rig.open({"orders": {"dead-letters": "off"}})
        rig.send("orders", ABC, retries=[0, -1, -1], ttl=[0, 0, 1])
        got = rig.take("orders", 2)
        rig.settle("orders", Outcome.REJECT, got[1:])
        rig.lose("orders")
        rig.later(seconds=1)
        rig.engine.expire(rig.now_us)
        assert rig.engine.counts("orders") == {
            (Event.ACCEPTED, Reason.NONE): 3,
            (Event.HELD, Reason.NONE): 2,
            (Event.REJECTED, Reason.REJECTED): 1,
            (Event.REJECTED, Reason.RETRIES_EXHAUSTED): 1,
            (Event.EXPIRED, Reason.EXPIRED): 1,
        }
        assert rig.engine.deaths("orders") == {}

    def test_transactions_count(self, rig: Rig) -> None:
        rig.open()
        for _ in range(2):
            rig.transact("key", ("orders", ABC), ("orders", [b"d"]))
        assert rig.engine.counts("orders") == {(Event.ACCEPTED, Reason.NONE): 4}

    @pytest.mark.parametrize("how", ["reopen", "crash"])
    def test_they_begin_again_with_a_new_opening(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.send("orders", ABC)
        rig.send("orders", [b"ask"], reply=[b"x"], protocol="rq")
        rig.ack("orders", rig.take("orders", 2))
        rig.turn()
        before = rig.engine.describe("orders").event_end
        rig.restart(how)
        assert rig.engine.counts("orders") == {(Event.WITHDRAWN, Reason.REQUESTER_GONE): 1}
        rig.send("orders", [b"d"])
        rig.ack("orders", rig.take("orders", 1))
        counts = rig.engine.counts("orders")
        assert counts.pop((Event.HELD, Reason.NONE)) == 1
        assert counts == happened(rig, before)

    def test_deaths_by_reason_held_ones_included(self, rig: Rig) -> None:
        engine = rig.open({"orders": {"max-deliveries": 1}})
        rig.send("orders", [b"x", b"y", b"z"], ttl=[1, 0, 0], retries=[-1, 0, -1])
        rig.later(seconds=1)
        engine.expire(rig.now_us)
        rig.take("orders")
        rig.lose("orders")
        rig.kill("orders", ABC)
        rejected, others = Reason.REJECTED, {Reason.RETRIES_EXHAUSTED: 1, Reason.TOO_MANY_DELIVERIES: 1}
        assert engine.deaths("orders") == {Reason.EXPIRED: 1, rejected: 3, **others}
        held = rig.take("orders", 1, dead=True)
        assert engine.deaths("orders") == {Reason.EXPIRED: 1, rejected: 3, **others}
        rig.settle("orders", Outcome.REJECT, held, dead=True)
        assert engine.deaths("orders") == {rejected: 4, **others}
        engine.redrive("orders", rig.now_us, reason=rejected, limit=1)
        assert engine.deaths("orders") == {rejected: 3, **others}
        engine.purge("orders", rig.now_us, dead=True, limit=1)
        assert sum(engine.deaths("orders").values()) == engine.describe("orders").dead == 4
        rig.restart("crash")
        assert sum(rig.engine.deaths("orders").values()) == 4

    def test_deaths_of_a_letter_that_is_acknowledged_are_over(self, rig: Rig) -> None:
        rig.open()
        rig.kill("orders", ABC)
        rig.settle("orders", Outcome.ACK, rig.take("orders", 2, dead=True), dead=True)
        assert rig.engine.deaths("orders") == {Reason.REJECTED: 1}


class Changes:
    """changed: every queue that describe shows otherwise, and no other."""

    def test_each_change_is_told_once(self, rig: Rig) -> None:
        engine = rig.open({"short": {"retention-seconds": 0}})
        rig.send("other", ABC)
        rig.send("orders", named("m", 20), ttl=[0] * 19 + [3])
        assert set(engine.changed()) == {"orders", "other"}
        assert engine.changed() == []
        got: list[Got] = []

        def take() -> None:
            got.extend(rig.take("orders", 8))

        def expire() -> None:
            rig.later(seconds=5)
            engine.expire(rig.now_us)

        acts: tuple[Callable[[], object], ...] = (
            take,
            lambda: rig.ack("orders", got[:1]),
            lambda: rig.settle("orders", Outcome.REJECT, got[1:3]),
            lambda: rig.settle("orders", Outcome.REQUEUE, got[3:4]),
            lambda: engine.give_back("orders", "ann", rig.now_us),
            lambda: engine.withdraw("orders", [(9, 10)], Reason.OPERATOR, rig.now_us),
            lambda: engine.redrive("orders", rig.now_us, limit=1),
            lambda: engine.pause("orders", True, rig.now_us),
            lambda: engine.append("orders", Batch.of(ABC), rig.now_us),
            lambda: engine.transact("key", [("orders", Batch.of(ABC))], rig.now_us),
            expire,
            lambda: engine.purge("orders", rig.now_us, dead=True),
            lambda: engine.purge("orders", rig.now_us),
        )
        for act in acts:
            before = engine.describe("orders")
            act()
            assert engine.describe("orders") != before
            assert engine.changed() == ["orders"]
            rig.turn()

    def test_what_changes_nothing_is_not_told(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", ABC)
        rig.turn()
        engine.changed()
        engine.pause("orders", False, rig.now_us)
        rig.take("orders", 0)
        rig.take("orders", 5, dead=True)
        engine.settle("orders", "ann", Outcome.ACK, [(0, 3)], rig.now_us)
        engine.give_back("orders", "ann", rig.now_us)
        engine.redrive("orders", rig.now_us)
        engine.expire(rig.now_us)
        rig.read("orders")
        engine.set_policies(Policies())
        assert engine.changed() == []


class TheEngine:
    """info: what there is to say about an engine as a whole."""

    def test_it_names_itself_and_its_room(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", [b"x" * 1000])
        rig.turn()
        info = engine.info()
        assert info.engine
        assert info.data
        assert (info.failed, info.full, info.damage, info.readers) == ("", False, [], 0)
        assert 0 < info.disk_bytes_free <= info.disk_bytes_total
        assert info.bytes_in_flight == 0
        assert info.log_bytes >= 1000

    def test_syncs_are_counted_and_timed(self, rig: Rig) -> None:
        engine = rig.open()
        before = engine.info().sync.count
        for _ in range(5):
            rig.send("orders", ABC)
        sync = engine.info().sync
        assert sync.count >= before + 5
        assert sum(sync.buckets) == sync.count
        assert len(sync.buckets) == len(SYNC_BOUNDS_SECONDS) + 1
        assert 0 < sync.seconds_last <= sync.seconds_sum
        assert 0 < sync.quantile(0.5) <= sync.quantile(0.99)
