"""Dead letters that are repaired: back into their queue with another payload, and the same name."""

from array import array
from collections.abc import Mapping

import pytest

from penstock.log.errors import LogError, LogRefused, QueueUnknown
from penstock.log.results import TransactionDone
from penstock.model.batch import Batch
from penstock.model.life import Event, Reason
from penstock.model.words import Outcome
from tests.log.contract_rig import Rig, payloads

ABC = [b"a", b"b", b"c"]


def repairs(of: Mapping[int, bytes]) -> Batch:
    batch = Batch.of(of.values(), protocol="http")
    batch.repairs = array("q", of.keys())
    return batch


def repair(rig: Rig, key: str, queue: str, of: Mapping[int, bytes]) -> TransactionDone:
    came: list[TransactionDone | LogError] = []
    rig.engine.transact(key, [(queue, repairs(of))], rig.now_us, came.append)
    rig.engine.flush(rig.now_us)
    assert rig.drive(lambda: bool(came))
    (done,) = came
    assert isinstance(done, TransactionDone), done
    return done


class Repairing:
    """Offset, id, history and attributes stay; what a consumer gets is the new payload."""

    def test_the_letter_comes_again_with_the_new_payload(self, rig: Rig) -> None:
        rig.open()
        rig.kill("orders", ABC)
        before = {m.offset: m.message_id for m in rig.read("orders")}
        done = repair(rig, "key", "orders", {0: b"A!", 2: b""})
        assert (done.redriven, done.stored, done.repeated) == (2, [], False)
        rig.has("orders", ready=2, dead=1)
        got = rig.take("orders")
        assert [(m.offset, m.payload) for m in got] == [(0, b"A!"), (2, b"")]
        if rig.harness.identity_stays:
            assert all(before[m.offset] == m.message_id for m in got)
        rig.ack("orders", got)
        assert payloads(rig.take("orders", dead=True)) == [b"b"]
        rig.has("orders", dead=1)

    def test_it_is_recorded_as_redriven(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", ABC)
        repair(rig, "key", "orders", {1: b"B"})
        last = rig.events("orders")[-1]
        assert (last.event, last.offset, last.reason) == (Event.REDRIVEN, 1, Reason.REJECTED)
        assert engine.counts("orders")[Event.REDRIVEN, Reason.REJECTED] == 1
        assert engine.queues() == ["orders"]
        assert engine.changed() == ["orders"]

    def test_the_log_keeps_what_was_sent(self, rig: Rig) -> None:
        rig.open()
        rig.kill("orders", ABC)
        repair(rig, "key", "orders", {0: b"A", 1: b"B", 2: b"C"})
        assert payloads(rig.read("orders")) == ABC

    def test_what_is_not_dead_is_passed_over(self, rig: Rig) -> None:
        rig.open()
        rig.kill("orders", ABC)
        rig.send("orders", [b"alive"])
        held = rig.take("orders", 1, dead=True)
        done = repair(rig, "key", "orders", {0: b"A", 1: b"B", 3: b"no", 99: b"no"})
        assert done.redriven == 1
        assert [(m.offset, m.payload) for m in rig.take("orders")] == [(3, b"alive"), (1, b"B")]
        assert [m.offset for m in held] == [0]

    def test_a_key_counts_once(self, rig: Rig) -> None:
        rig.open()
        rig.kill("orders", ABC)
        repair(rig, "key", "orders", {0: b"A"})
        got = rig.take("orders")
        rig.settle("orders", Outcome.REJECT, got)
        rig.has("orders", dead=3)
        done = repair(rig, "key", "orders", {0: b"again"})
        assert (done.repeated, done.redriven) == (True, 0)
        rig.has("orders", dead=3)

    def test_what_dies_again_keeps_its_payload_and_can_be_repaired_again(self, rig: Rig) -> None:
        rig.open()
        rig.kill("orders", ABC)
        for round_ in range(3):
            repair(rig, f"key-{round_}", "orders", {0: b"round %d" % round_, 1: b"and %d" % round_})
            got = rig.take("orders")
            assert payloads(got) == [b"round %d" % round_, b"and %d" % round_]
            rig.settle("orders", Outcome.REJECT, got)
        assert payloads(rig.take("orders", dead=True)) == [b"c", b"round 2", b"and 2"]

    def test_redriven_as_it_is_it_keeps_the_repaired_payload(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", ABC)
        repair(rig, "key", "orders", {1: b"B"})
        rig.settle("orders", Outcome.REJECT, rig.take("orders"))
        engine.redrive("orders", rig.now_us)
        rig.turn()
        assert sorted(payloads(rig.take("orders"))) == [b"B", b"a", b"c"]

    @pytest.mark.parametrize("how", ["reopen", "crash"])
    def test_a_restart_keeps_it(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.kill("orders", ABC)
        repair(rig, "key", "orders", {0: b"A", 2: b"C"})
        rig.ack("orders", rig.take("orders", 1))
        rig.restart(how)
        rig.has("orders", ready=1, dead=1)
        assert payloads(rig.take("orders")) == [b"C"]
        rig.restart(how)
        assert payloads(rig.take("orders")) == [b"C"]
        assert repair(rig, "key", "orders", {1: b"B"}).repeated is True

    def test_states_say_where_the_payload_is(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", [*ABC, b"d"])
        repair(rig, "key", "orders", {1: b"B", 2: b"C"})
        runs = engine.states("orders", 0, 10, 100)
        assert (list(runs.repair_first), list(runs.repair_end)) == ([1], [3])
        assert not len(engine.states("orders", 3, 10, 100).repair_first)
        rig.ack("orders", rig.take("orders"))
        assert not len(engine.states("orders", 0, 10, 100).repair_first)

    def test_many_scattered_ones_are_told_in_bounded_answers(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", [b"%d" % i for i in range(100)])
        repair(rig, "key", "orders", {i: b"repaired %d" % i for i in range(98, -1, -2)})
        start, told = 0, []
        while start < 100:
            runs = engine.states("orders", start, 100, 7)
            assert len(runs) <= 7
            assert len(runs.repair_first) <= 7
            told += list(runs.repair_first)
            assert runs.next > start
            start = runs.next
        assert told == list(range(0, 100, 2))
        assert payloads(rig.take("orders")) == [b"repaired %d" % i for i in range(98, -1, -2)]

    def test_small_takes_cut_it_anywhere(self, rig: Rig) -> None:
        rig.open()
        rig.kill("orders", [b"%d" % i for i in range(30)])
        repair(rig, "key", "orders", {i: b"<%d>" % i * (i % 4) for i in range(5, 25)})
        rig.engine.redrive("orders", rig.now_us)
        rig.turn()
        got = []
        while more := rig.take_bytes("orders", 9, 4):
            got += more
        wanted = {i: b"%d" % i for i in range(30)} | {i: b"<%d>" % i * (i % 4) for i in range(5, 25)}
        assert {m.offset: m.payload for m in got} == wanted

    def test_beside_new_messages_in_one_transaction(self, rig: Rig) -> None:
        rig.open()
        rig.kill("orders", ABC)
        parts = [("mails", Batch.of([b"m"])), ("orders", repairs({0: b"A"})), ("orders", Batch.of([b"new"]))]
        rig.engine.transact("key", parts, rig.now_us)
        rig.turn()
        assert payloads(rig.take("orders")) == [b"A", b"new"]
        rig.has("mails", ready=1)

    def test_nonsense_is_refused_and_changes_nothing(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", ABC)
        with pytest.raises(QueueUnknown):
            engine.transact("key", [("nobody", repairs({0: b"A"}))], rig.now_us)
        short = repairs({0: b"A", 1: b"B"})
        short.repairs = array("q", [0])
        with pytest.raises(LogRefused, match="one for one"):
            engine.transact("key", [("orders", short)], rig.now_us)
        with pytest.raises(LogRefused, match="in a transaction"):
            engine.append("orders", repairs({0: b"A"}), rig.now_us)
        rig.turn()
        rig.has("orders", dead=3)
        assert engine.queues() == ["orders"]
