"""The contract, part 10: stages, which a commit makes messages of, all of them at once."""

from array import array
from collections.abc import Sequence

import pytest

from penstock.log.errors import (
    LogError,
    LogRefused,
    QueueFull,
    QueueUnknown,
    StagesFull,
    StageUnknown,
)
from penstock.log.fingerprint import Fingerprint
from penstock.log.results import StageInfo, TransactionDone
from penstock.model.batch import Batch
from penstock.model.ids import ID_DIGITS, split_id
from penstock.model.life import Event, Reason
from penstock.model.words import Outcome
from tests.log.contract_deleting import delete
from tests.log.contract_repairs import repairs
from tests.log.contract_restart import HOW, picture
from tests.log.contract_rig import SECOND, START_US, Rig, named, open_fates, payloads

ABC = [b"a", b"b", b"c"]
STAGE_SECONDS = 3600


def ranges(done: TransactionDone) -> list[tuple[str, int, int]]:
    return [(part.queue, part.first, part.end) for part in done.stored]


def dead(messages: Sequence[bytes], reason: Reason = Reason.BAD_RECORD) -> Batch:
    batch = Batch.of(messages)
    batch.dead = reason
    return batch


def abort(rig: Rig, key: str) -> None:
    """And wait until it is so."""
    confirmed: list[object] = []
    rig.engine.abort(key, rig.now_us)
    rig.engine.confirm(rig.now_us, confirmed.append)
    assert rig.drive(lambda: bool(confirmed))
    assert confirmed == [None]


class Staging:
    """stage: nobody sees it, and it is safe."""

    def test_nobody_sees_it(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", ABC)
        stage = rig.stage("key", ("orders", [b"x", b"yy"]), ("mails", [b"z"]))
        assert (len(stage), stage == stage.lower()) == (ID_DIGITS, True)
        assert engine.queues() == ["orders"]
        assert (engine.queue_count, engine.changed()) == (1, ["orders"])
        assert (engine.transaction("key"), engine.ready("mails")) == (None, 0)
        assert payloads(rig.read("orders")) == payloads(rig.take("orders")) == ABC
        assert [t.offset for t in rig.events("orders")] == [0, 1, 2]

    def test_what_is_known_of_it(self, rig: Rig) -> None:
        engine = rig.open()
        first = rig.stage("key", ("orders", [b"x", b"yy"]), ("mails", [b"z"]))
        rig.later(seconds=1)
        second = rig.stage("key", ("orders", [b"x" * 5000]))
        other = rig.stage("other", ("tasks", ABC))
        told = [(it.stage, it.key, it.time_us, it.messages, it.payload_bytes) for it in engine.stages("key")]
        assert told == [
            (first, "key", START_US, 3, 4),
            (second, "key", START_US + SECOND, 1, 5000),
        ]
        assert (engine.stages_count, len({first, second, other})) == (3, 3)
        stored = [it.stored_bytes for key in ("key", "other") for it in engine.stages(key)]
        assert engine.stages_bytes == sum(stored) > 5000
        assert engine.staged_queues([first, other, "no such"]) == {"orders", "mails", "tasks"}
        assert engine.stages("nobody") == []

    @pytest.mark.parametrize("how", HOW)
    def test_it_outlives_the_engine(self, rig: Rig, how: str) -> None:
        rig.open()
        stages = [rig.stage("key", ("orders", named(f"m{i}", 9))) for i in range(3)]
        before = rig.engine.stages("key")
        rig.restart(how)
        assert rig.engine.stages("key") == before
        assert rig.engine.stages_count == 3
        stages.append(rig.stage("key", ("orders", [b"last"])))
        rig.restart(how)
        rig.commit("key", *stages)
        wanted = [message for i in range(3) for message in named(f"m{i}", 9)]
        assert payloads(rig.take("orders")) == [*wanted, b"last"]

    def test_no_id_is_given_twice(self, rig: Rig) -> None:
        rig.open()
        ids = []
        for how in (*HOW, *HOW):
            ids += [rig.stage("key", ("orders", [b"x"])) for _ in range(3)]
            abort(rig, "key")
            rig.restart(how)
        assert len(set(ids)) == len(ids)

    def test_what_a_commit_could_not_store_is_refused(self, rig: Rig) -> None:
        engine = rig.open()
        came: list[StageInfo | LogError] = []
        asking = Batch.of([b"q"], reply=[b"to"], protocol="rq")
        for parts, sign in (
            ([], "without messages"),
            ([("orders", Batch(b"", array("i", [0])))], "orders"),
            ([("orders.dead", Batch.of(ABC))], "orders.dead"),
            ([("orders", Batch.of(ABC)), ("mails", asking)], "mails"),
            ([("orders", Batch.of(ABC, ttl_seconds=[-1, 0, 0]))], "orders"),
        ):
            with pytest.raises(LogRefused, match=sign):
                engine.stage("key", parts, rig.now_us, came.append)
        with pytest.raises(LogRefused, match="key"):
            engine.stage("", [("orders", Batch.of(ABC))], rig.now_us, came.append)
        rig.turn()
        assert (came, engine.stages_count, engine.stages_bytes, engine.queues()) == ([], 0, 0, [])

    def test_stages_together_have_a_bound(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = rig.open()
        rig.stage("other", ("orders", [b"x" * 2000]))
        monkeypatch.setattr(engine._settings, "stages_bytes_max", engine.stages_bytes + 3000)
        with pytest.raises(StagesFull, match="stages-bytes-max"):
            rig.stage("key", ("orders", [b"x" * 3000]))
        came: list[StageInfo | LogError] = []
        engine.stage("key", [("orders", Batch.of([b"x" * 2000]))], rig.now_us, came.append)
        with pytest.raises(StagesFull):  # It is on its way, and counts.
            engine.stage("key", [("orders", Batch.of([b"x" * 2000]))], rig.now_us, came.append)
        rig.turn()
        assert len(came) == 1
        abort(rig, "other")
        rig.commit("key", engine.stages("key")[0].stage)
        assert engine.stages_bytes == 0
        rig.stage("key 2", ("orders", [b"x" * 2000]))

    def test_many_at_once_follow_one_after_the_other(self, rig: Rig) -> None:
        engine = rig.open()
        came: list[StageInfo | LogError] = []
        sent = {f"key-{i}": named(f"m{i}", 30) for i in range(20)}
        for key, messages in sent.items():
            engine.stage(key, [("orders", Batch.of(messages))], rig.now_us, came.append)
        rig.turn()
        stages = [it for it in came if isinstance(it, StageInfo)]
        assert [it.key for it in stages] == list(sent)
        for info in reversed(stages):
            rig.commit(info.key, info.stage)
        assert payloads(rig.take("orders")) == [m for key in reversed(sent) for m in sent[key]]


class Committing:
    """commit: stages become messages, all or nothing, once."""

    def test_all_queues_get_their_messages_and_one_receipt_says_where(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", ABC)
        one = rig.stage("key", ("orders", [b"x", b"yy"]), ("mails", [b"z"]))
        two = rig.stage("key", ("mails", [b"m"]), ("orders", [b"last"]))
        rig.later(seconds=9)
        done = rig.commit("key", one, two)
        assert (done.key, done.repeated, done.redriven) == ("key", False, 0)
        assert ranges(done) == [("orders", 3, 6), ("mails", 0, 2)]
        assert engine.transaction("key") == done.stored
        assert (engine.stages("key"), engine.stages_count, engine.stages_bytes) == ([], 0, 0)
        got = rig.take("orders")
        assert payloads(got) == [*ABC, b"x", b"yy", b"last"]
        assert [m.time_us for m in got] == [START_US] * 3 + [START_US + 9 * SECOND] * 3
        origins = {part.queue: part.origin for part in done.stored}
        assert {m.origin for m in got} == {origins["orders"]}
        assert rig.read("orders") == [m._replace(attempts=0) for m in got]
        assert payloads(rig.take("mails")) == [b"z", b"m"]
        accepted = [(t.event, t.offset, t.time_us) for t in rig.events("mails")]
        assert accepted == [(Event.ACCEPTED, i, START_US + 9 * SECOND) for i in range(2)]
        info = rig.described("orders")
        assert (info.bytes, info.offset_end, info.held) == (10, 6, 6)

    def test_stages_come_in_the_order_in_which_they_are_named(self, rig: Rig) -> None:
        rig.open()
        stages = [rig.stage("key", ("orders", named(f"m{i}", 4))) for i in range(4)]
        rig.commit("key", *(stages[i] for i in (2, 0, 3, 1)))
        assert payloads(rig.take("orders")) == [m for i in (2, 0, 3, 1) for m in named(f"m{i}", 4)]

    def test_a_stage_that_is_named_twice_counts_once(self, rig: Rig) -> None:
        rig.open()
        totals = Fingerprint("key")
        totals.add([("orders", Batch.of(ABC))])
        came: list[StageInfo | LogError] = []
        for _ in range(2):  # the first is committed, the second is another try of the same
            batch = Batch.of(ABC)
            rig.engine.stage("key", [("orders", batch)], rig.now_us, came.append, totals=totals.totals())
        rig.turn()
        one, two = (it.stage for it in came if isinstance(it, StageInfo))
        done = rig.commit("key", one, one)
        assert ranges(done) == [("orders", 0, 3)]
        assert done.fingerprint == totals.text([one])
        rig.engine.stage("key", [("orders", Batch.of(ABC))], rig.now_us, came.append, totals=totals.totals())
        rig.turn()
        (three,) = [it.stage for it in came[2:] if isinstance(it, StageInfo)]
        again = rig.commit("key", three, three)
        assert (again.repeated, again.asked) == (True, totals.totals())
        assert payloads(rig.take("orders")) == ABC
        assert two not in (one, three)

    def test_a_stage_that_is_named_by_both_its_ids_counts_once(self, rig: Rig) -> None:
        """One that an earlier version has kept has two, and whoever asks how a key stands is told the new."""
        rig.open()
        totals = Fingerprint("key")
        totals.add([("orders", Batch.of(ABC))])
        came: list[StageInfo | LogError] = []

        def stage(was: str) -> str:
            batch = Batch.of(ABC)
            rig.engine.stage(
                "key", [("orders", batch)], rig.now_us, came.append, totals=totals.totals(), was=was
            )
            rig.turn()
            info = came[-1]
            assert isinstance(info, StageInfo)
            return info.stage

        done = rig.commit("key", stage("a" * 32), "a" * 32)
        assert ranges(done) == [("orders", 0, 3)]
        assert done.fingerprint.startswith(totals.text([]).partition("/")[0])
        again = rig.commit("key", stage("b" * 32), "b" * 32)
        assert (again.repeated, again.asked) == (True, totals.totals())
        assert payloads(rig.take("orders")) == ABC

    def test_what_is_not_named_is_over_too(self, rig: Rig) -> None:
        rig.open()
        one, two = (rig.stage("key", ("orders", [it])) for it in (b"1", b"2"))
        rig.commit("key", one)
        assert rig.engine.stages_count == 0
        assert payloads(rig.take("orders")) == [b"1"]
        again = rig.commit("key", one, two)
        assert (again.repeated, again.asked) == (True, None)

    def test_one_that_comes_without_stages_ends_them(self, rig: Rig) -> None:
        rig.open()
        stage = rig.stage("key", ("orders", ABC))
        rig.transact("key", ("orders", [b"other"]))
        for how in HOW:
            assert rig.engine.stages_count == 0
            assert rig.commit("key", stage).repeated
            rig.restart(how)
        assert payloads(rig.take("orders")) == [b"other"]

    @pytest.mark.parametrize("how", HOW)
    def test_the_same_key_again(self, rig: Rig, how: str) -> None:
        rig.open()
        batch = Batch.of(ABC)
        totals = Fingerprint("key")
        totals.add([("orders", batch)])
        came: list[StageInfo | LogError] = []

        def stage() -> str:
            rig.engine.stage("key", [("orders", batch)], rig.now_us, came.append, totals=totals.totals())
            rig.turn()
            info = came[-1]
            assert isinstance(info, StageInfo)
            return info.stage

        first = stage()
        done = rig.commit("key", first)
        assert (done.repeated, done.fingerprint) == (False, totals.text([first]))
        for _ in range(2):
            again = rig.commit("key", first)
            assert (again.repeated, again.stored, again.asked) == (True, done.stored, None)
            second = stage()
            for _ in range(2):
                again = rig.commit("key", second)
                assert (again.repeated, again.stored) == (True, done.stored)
                assert (again.fingerprint, again.asked) == (done.fingerprint, totals.totals())
                rig.restart(how)
            abort(rig, "key")
        assert payloads(rig.take("orders")) == ABC

    def test_repetitions_in_the_same_turn_get_the_same_answer(self, rig: Rig) -> None:
        engine = rig.open()
        stage = rig.stage("key", ("orders", ABC))
        came: list[TransactionDone | LogError] = []
        for _ in range(3):
            engine.commit("key", [stage], rig.now_us, came.append)
        assert came == []
        rig.turn()
        done = [it for it in came if isinstance(it, TransactionDone)]
        assert [it.repeated for it in done] == [False, True, True]
        assert len({tuple(it.stored) for it in done}) == 1
        assert payloads(rig.take("orders")) == ABC

    def test_unknown_stages_are_refused_and_nothing_changes(self, rig: Rig) -> None:
        engine = rig.open()
        mine, other = rig.stage("key", ("orders", ABC)), rig.stage("other", ("orders", [b"o"]))
        for ids in ([mine, other], ["0" * 32], [mine, "what?"], [""]):
            with pytest.raises(StageUnknown):
                engine.commit("key", ids, rig.now_us)
        came: list[StageInfo | LogError] = []
        engine.stage("key", [("orders", Batch.of(ABC))], rig.now_us, came.append)
        waiting = [it.stage for it in engine.stages("key") if it.stage != mine]
        for stage in waiting:
            with pytest.raises(StageUnknown):  # It is not safe yet.
                engine.commit("key", [mine, stage], rig.now_us)
        assert (engine.transaction("key"), engine.queues()) == (None, [])
        rig.turn()
        assert ranges(rig.commit("key", mine)) == [("orders", 0, 3)]
        assert ranges(rig.commit("other", other)) == [("orders", 3, 4)]

    def test_without_stages_it_is_an_empty_transaction(self, rig: Rig) -> None:
        rig.open()
        assert rig.commit("key").stored == []
        assert rig.commit("key").repeated is True

    def test_it_stands_in_order_with_what_is_sent_around_it(self, rig: Rig) -> None:
        engine = rig.open()
        stage = rig.stage("key", ("orders", [b"2", b"3"]))
        engine.append("orders", Batch.of([b"1"]), rig.now_us)
        engine.commit("key", [stage], rig.now_us)
        engine.append("orders", Batch.of([b"4"]), rig.now_us)
        # As with any message, a worker may get it before the sync; readers see it behind that.
        assert list(engine.read("orders", 0, 99)) == []
        assert (engine.ready("orders"), engine.durable_end("orders")) == (4, 0)
        assert payloads(rig.take("orders")) == [b"1", b"2", b"3", b"4"]
        rig.turn()
        assert engine.durable_end("orders") == 4
        assert payloads(rig.read("orders")) == [b"1", b"2", b"3", b"4"]

    def test_attributes_travel(self, rig: Rig) -> None:
        rig.open()
        plain = Batch.of(named("p", 3), protocol="phpmq")
        timed = Batch.of(named("t", 3), ttl_seconds=[5, 0, 9], retries=[2, -1, 0], protocol="phpmq")
        spark = Batch.of(named("s", 3), protocol="spark")
        stage = rig.stage("key", ("orders", plain), ("orders", timed), ("orders", spark))
        rig.later(seconds=100)
        now_us = rig.now_us
        rig.commit("key", stage)
        got = rig.take("orders")
        assert payloads(got) == named("p", 3) + named("t", 3) + named("s", 3)
        assert [m.expires_us for m in got[3:6]] == [now_us + 5 * SECOND, 0, now_us + 9 * SECOND]
        assert [m.retries for m in got] == [-1] * 3 + [2, -1, 0] + [-1] * 3
        assert [m.protocol for m in got] == ["phpmq"] * 6 + ["spark"] * 3
        assert {m.time_us for m in got} == {now_us}

    def test_a_ttl_counts_from_the_commit(self, rig: Rig) -> None:
        engine = rig.open()
        stage = rig.stage("key", ("orders", Batch.of(ABC, ttl_seconds=[5, 0, 60])))
        rig.later(seconds=30)
        assert engine.expire(rig.now_us) == []
        rig.commit("key", stage)
        rig.later(us=5 * SECOND - 1)
        assert engine.expire(rig.now_us) == []
        rig.has("orders", ready=3)
        rig.later(us=1)
        expired = [fate for _, fate in engine.expire(rig.now_us)]
        assert open_fates(expired) == [(0, Event.DEAD, Reason.EXPIRED)]
        rig.restart("crash")
        rig.later(seconds=55)
        expired = [fate for _, fate in rig.engine.expire(rig.now_us)]
        assert open_fates(expired) == [(2, Event.DEAD, Reason.EXPIRED)]
        assert payloads(rig.take("orders")) == [b"b"]

    def test_a_ttl_counts_though_the_clock_was_set_back(self, rig: Rig) -> None:
        rig.open()
        stage = rig.stage("key", ("orders", Batch.of(ABC, ttl_seconds=[5, 0, 60])))
        rig.later(seconds=-100)
        rig.commit("key", stage)
        rig.later(seconds=5)
        assert payloads(rig.take("orders")) == [b"b", b"c"]

    def test_a_step_of_the_clock_between_the_two(self, rig: Rig) -> None:
        engine = rig.open()
        stage = rig.stage("key", ("orders", Batch.of(ABC, ttl_seconds=[5, 0, 60])))
        for _ in range(2):
            rig.later(seconds=STAGE_SECONDS)
            engine.step(STAGE_SECONDS * SECOND, rig.now_us)
        engine.tick(rig.now_us)
        rig.restart("crash")
        rig.engine.tick(rig.now_us)
        rig.commit("key", stage)
        rig.later(seconds=10)
        assert [fate.first for _, fate in rig.engine.expire(rig.now_us)] == [0]

    def test_retries_count_down(self, rig: Rig) -> None:
        rig.open()
        stage = rig.stage("key", ("orders", Batch.of(ABC, retries=[0, 1, 255])))
        rig.commit("key", stage)
        for wanted in (ABC, [b"b", b"c"], [b"c"]):
            assert payloads(rig.take("orders")) == wanted
            rig.lose("orders")
        rig.has("orders", ready=1, dead=2)

    def test_what_is_dead_is_dead_from_the_beginning(self, rig: Rig) -> None:
        rig.open({"gone": {"dead-letters": "off"}})
        stage = rig.stage("key", ("orders", dead(ABC)), ("orders", [b"alive"]), ("gone", dead([b"g"])))
        assert ranges(rig.commit("key", stage)) == [("orders", 0, 3), ("orders", 3, 4), ("gone", 0, 1)]
        for how in (None, *HOW):
            if how is not None:
                rig.restart(how)
            rig.has("orders", ready=1, dead=3)
            rig.has("gone")
            assert rig.engine.deaths("orders") == {Reason.BAD_RECORD: 3}
        assert payloads(rig.take("orders")) == [b"alive"]
        assert payloads(rig.take("orders", dead=True)) == ABC
        told = [(t.event, t.offset) for t in rig.events("orders") if t.offset == 2]
        assert told == [(Event.ACCEPTED, 2), (Event.DEAD, 2)]

    def test_max_bytes_is_asked_at_the_commit(self, rig: Rig) -> None:
        engine = rig.open({"orders": {"max-bytes": 10}})
        one = rig.stage("key", ("orders", [b"x" * 4]), ("mails", [b"m"]), ("orders", dead([b"d" * 50])))
        two = rig.stage("key", ("orders", [b"x" * 7]))
        with pytest.raises(QueueFull):
            engine.commit("key", [one, two], rig.now_us)
        assert (engine.queues(), len(engine.stages("key"))) == ([], 2)
        rig.commit("key", one)
        third = rig.stage("key 3", ("orders", [b"x" * 7]))
        with pytest.raises(QueueFull):
            engine.commit("key 3", [third], rig.now_us)
        rig.ack("orders", rig.take("orders"))
        rig.commit("key 3", third)
        rig.has("orders", ready=1, dead=1)

    def test_a_queue_that_was_deleted_meanwhile_is_made_again(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", ABC)
        old = rig.described("orders").identity
        stage = rig.stage("key", ("orders", [b"new"]), ("mails", [b"m"]))
        delete(rig, "orders", *(["mails"] if rig.engine.has_queue("mails") else []))
        assert ranges(rig.commit("key", stage)) == [("orders", 0, 1), ("mails", 0, 1)]
        assert rig.described("orders").identity != old
        assert payloads(rig.take("orders")) == [b"new"]
        delete(rig, "orders")
        again = rig.commit("key", stage)
        assert ranges(again) == [("orders", 0, 0), ("mails", 0, 1)]

    @pytest.mark.parametrize("how", HOW)
    def test_a_large_one_is_still_one(self, rig: Rig, how: str) -> None:
        rig.open()
        sent = [bytes([i % 256]) * 10_000 for i in range(500)]
        stages = [
            rig.stage("key", ("orders", sent[at : at + 100]), ("mails", sent[at : at + 3]))
            for at in range(0, 500, 100)
        ]
        rig.restart(how)
        done = rig.commit("key", *stages)
        assert ranges(done) == [("orders", 0, 500), ("mails", 0, 15)]
        rig.restart(how)
        assert rig.engine.transaction("key") == done.stored
        assert payloads(rig.read("orders", 198, 203)) == sent[198:203]
        assert payloads(rig.take("orders")) == sent
        assert payloads(rig.take("mails")) == [m for at in range(0, 500, 100) for m in sent[at : at + 3]]

    def test_more_blocks_of_adoption_than_a_segment_holds(self, rig: Rig) -> None:
        rig.open()
        names = [f"queue-{i}" for i in range(400)]
        stages = [rig.stage("key", *((name, [name.encode()]) for name in names[i::4])) for i in range(4)]
        done = rig.commit("key", *stages)
        assert sorted(ranges(done)) == sorted((name, 0, 1) for name in names)
        rig.restart("crash")
        for name in names:
            assert payloads(rig.take(name)) == [name.encode()]

    @pytest.mark.parametrize("how", HOW)
    def test_ids_are_those_of_the_commit(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.send("orders", [b"before"])
        stage = rig.stage("key", ("orders", ABC))
        rig.restart(how)
        done = rig.commit("key", stage)
        plain = rig.send("orders", [b"behind"])
        assert done.stored[0].origin == plain.origin
        ids = [m.message_id for m in rig.read("orders")]
        rig.restart(how)
        got = rig.take("orders")
        assert [m.message_id for m in got] == ids
        assert len(set(ids)) == 5
        assert [split_id(it) for it in ids] == [(m.origin, i) for i, m in enumerate(got)]

    @pytest.mark.parametrize("how", HOW)
    def test_everything_is_the_same_afterwards(self, rig: Rig, how: str) -> None:
        rig.open()
        for at in range(6):
            key = f"key-{at}"
            stage = rig.stage(key, ("orders", named(f"o{at}", 20)), ("mails", dead(named(f"m{at}", 3))))
            rig.commit(key, stage)
        got = rig.take("orders", 60)
        rig.ack("orders", got[::2])
        rig.settle("orders", Outcome.REQUEUE, got[1::4])
        rig.settle("orders", Outcome.REJECT, got[3::4])
        rig.stage("open", ("orders", ABC))
        before = picture(rig)
        rig.restart(how)
        assert picture(rig) == before
        wanted = named("o3", 20) + named("o4", 20) + named("o5", 20)
        assert payloads(rig.take("orders")) == wanted + [m.payload for m in got[1::4]]
        assert payloads(rig.take("orders", dead=True)) == [m.payload for m in got[3::4]]


class StagedRepairs:
    """Dead letters that go back with payloads which were staged."""

    @pytest.mark.parametrize("how", HOW)
    def test_they_come_again_with_the_new_payloads(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.kill("orders", named("dead", 6))
        one = rig.stage("key", ("orders", repairs({0: b"A!", 2: b"", 4: b"E"})), ("orders", [b"new"]))
        two = rig.stage("key", ("orders", repairs({5: b"F"})), ("mails", [b"m"]))
        rig.restart(how)
        done = rig.commit("key", one, two)
        assert (done.redriven, ranges(done)) == (4, [("orders", 6, 7), ("mails", 0, 1)])
        assert payloads(rig.read("orders")) == [*named("dead", 6), b"new"]
        rig.restart(how)
        rig.has("orders", ready=5, dead=2)
        got = {m.offset: m.payload for m in rig.take("orders")}
        assert got == {0: b"A!", 2: b"", 4: b"E", 5: b"F", 6: b"new"}
        assert payloads(rig.take("orders", dead=True)) == [b"dead-1", b"dead-3"]

    def test_what_is_not_dead_any_more_is_passed_over(self, rig: Rig) -> None:
        rig.open()
        rig.kill("orders", named("dead", 9))
        offsets = (8, 1, 2, 3, 5, 99)
        stage = rig.stage("key", ("orders", repairs({i: b"new-%d" % i for i in offsets})))
        rig.engine.redrive("orders", rig.now_us, ranges=[(2, 3)])
        held = rig.take("orders", 1, dead=True)
        assert [m.offset for m in held] == [0]
        done = rig.commit("key", stage)
        assert done.redriven == 4
        rig.restart("crash")
        got = {m.offset: m.payload for m in rig.take("orders")}
        assert got == {2: b"dead-2", 8: b"new-8", 1: b"new-1", 3: b"new-3", 5: b"new-5"}
        assert rig.commit("key", stage).redriven == 0

    def test_many_scattered_ones(self, rig: Rig) -> None:
        rig.open()
        rig.transact("dead", ("orders", named("dead", 1000)), dead=["orders"])
        wanted = {i: b"new-%d" % i * (i % 50) for i in range(0, 1000, 3)}
        stage = rig.stage("key", ("orders", repairs(wanted)))
        rig.engine.purge("orders", rig.now_us, dead=True, limit=100)
        done = rig.commit("key", stage)
        left = {i: payload for i, payload in wanted.items() if i >= 100}
        assert done.redriven == len(left)
        rig.restart("crash")
        assert {m.offset: m.payload for m in rig.take("orders")} == left

    def test_another_queue_of_that_name_gets_nothing(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", ABC)
        batch = repairs({0: b"A"})
        batch.identity = rig.described("orders").identity
        stage = rig.stage("key", ("orders", batch), ("mails", [b"m"]))
        delete(rig, "orders")
        rig.kill("orders", ABC)
        done = rig.commit("key", stage)
        assert (done.redriven, ranges(done)) == (0, [("mails", 0, 1)])
        rig.has("orders", dead=3)
        unnamed = rig.stage("key 2", ("orders", repairs({0: b"A"})))
        delete(rig, "orders")
        with pytest.raises(QueueUnknown):
            engine.commit("key 2", [unnamed], rig.now_us)


class EndingStages:
    """abort, and what nobody ends."""

    @pytest.mark.parametrize("how", HOW)
    def test_aborted_ones_are_gone(self, rig: Rig, how: str) -> None:
        rig.open()
        mine = [rig.stage("key", ("orders", ABC)) for _ in range(3)]
        other = rig.stage("other", ("orders", [b"o"]))
        abort(rig, "key")
        abort(rig, "nobody")
        for _ in range(2):
            assert (rig.engine.stages("key"), rig.engine.stages_count) == ([], 1)
            with pytest.raises(StageUnknown):
                rig.engine.commit("key", mine[:1], rig.now_us)
            rig.restart(how)
        rig.commit("other", other)
        rig.commit("key", rig.stage("key", ("orders", [b"again"])))
        assert payloads(rig.take("orders")) == [b"o", b"again"]

    def test_what_is_said_of_those_that_nobody_ends(self, rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
        """That of a key which is committed nothing is lost."""
        rig.open()
        for key in ("committed", "given up"):
            rig.stage(f"transaction/{key}", ("orders", ABC))
        rig.commit("transaction/committed")
        for _ in range(2):  # a second try, and what was on its way when the first was committed
            rig.stage("transaction/committed", ("orders", ABC))
        rig.later(seconds=STAGE_SECONDS)
        with caplog.at_level("INFO"):
            rig.engine.tick(rig.now_us)
        assert [
            (it.levelname, it.getMessage()) for it in caplog.records if "transaction" in it.getMessage()
        ] == [
            (
                "WARNING",
                f"transaction 'given up' was not committed for {STAGE_SECONDS} s: its 1 stages are removed",
            ),
            ("INFO", "transaction 'committed' is committed: 2 stages that came after that are removed"),
        ]
        assert rig.engine.stages_count == 0

    @pytest.mark.parametrize("how", HOW)
    def test_what_waits_too_long_goes(self, rig: Rig, how: str) -> None:
        rig.open()
        old = rig.stage("old", ("orders", ABC))
        rig.later(seconds=STAGE_SECONDS // 2)
        young = rig.stage("young", ("orders", [b"y"]))
        rig.stage("fed", ("orders", [b"1"]))
        rig.restart(how)
        rig.later(seconds=STAGE_SECONDS // 2 - 1)
        fed = rig.stage("fed", ("orders", [b"2"]))
        rig.engine.tick(rig.now_us)
        assert rig.engine.stages_count == 4
        rig.later(seconds=1)
        rig.engine.tick(rig.now_us)
        assert (rig.engine.stages("old"), rig.engine.stages_count) == ([], 3)
        rig.restart(how)
        with pytest.raises(StageUnknown):
            rig.engine.commit("old", [old], rig.now_us)
        rig.commit("young", young)
        rig.later(seconds=STAGE_SECONDS - 2)
        rig.engine.tick(rig.now_us)
        assert len(rig.engine.stages("fed")) == 2
        rig.commit("fed", fed)
        assert payloads(rig.take("orders")) == [b"y", b"2"]
