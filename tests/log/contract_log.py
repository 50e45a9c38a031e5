"""The contract, part 5: the log behind the queue. Reading, events, describe, readers, policies, trim."""

import pytest

from penstock.log.errors import LogRefused
from penstock.log.info import QueueInfo, ReaderInfo
from penstock.model.batch import Batch
from penstock.model.life import Event, Reason, State, after
from penstock.model.policy import Policies
from penstock.model.words import Outcome, Where
from tests.log.contract_rig import SECOND, START_US, Got, Rig, Told, named, open_runs, payloads

ABC = [b"a", b"b", b"c"]


class Reading:
    """read: a range of offsets, whatever state the messages are in."""

    def test_ranges_are_clipped_to_what_is_there(self, rig: Rig) -> None:
        rig.open()
        for at in range(0, 20, 4):
            rig.send("orders", named("m", 20)[at : at + 4])
        everything = named("m", 20)
        for start, end in [(0, 20), (0, 1), (19, 20), (3, 9), (4, 8), (7, 7), (9, 3), (18, 99), (50, 60)]:
            got = rig.read("orders", start, end)
            assert payloads(got) == everything[start:end]
            assert [m.offset for m in got] == list(range(20))[start:end]

    def test_every_state_can_be_read_and_reading_changes_none(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 5), retries=5)
        got = rig.take("orders", 4)
        rig.ack("orders", got[:1])
        rig.settle("orders", Outcome.REJECT, got[1:2])
        rig.engine.withdraw("orders", [(got[2].offset, got[2].offset + 1)], Reason.OPERATOR, rig.now_us)
        counts = rig.counts("orders")
        assert payloads(rig.read("orders")) == named("m", 5)
        assert rig.counts("orders") == counts == (1, 1, 1)

    def test_what_is_read_is_what_is_delivered(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", ABC, ttl=[1, 0, 9], retries=[3, -1, 0], protocol="phpmq")
        rig.send("orders", [b"q"], reply=[b"there"], protocol="rq")
        assert rig.read("orders") == rig.take("orders")

    def test_only_what_is_synced_is_shown(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", [b"a"])
        engine.append("orders", Batch.of([b"b"]), rig.now_us)
        assert sum(len(piece) for piece in engine.read("orders", 0, 9)) == 1
        engine.flush(rig.now_us)
        assert rig.drive(lambda: sum(len(piece) for piece in engine.read("orders", 0, 9)) == 2)

    def test_an_unknown_queue_is_refused(self, rig: Rig) -> None:
        engine = rig.open()
        for look in (engine.read, engine.events):
            with pytest.raises(LogRefused, match="nowhere"):
                list(look("nowhere", 0, 1))
        with pytest.raises(LogRefused, match="nowhere"):
            engine.describe("nowhere")
        with pytest.raises(LogRefused, match="nowhere"):
            engine.pause("nowhere", True, rig.now_us)


class Events:
    """events: every arrow of a message's life, numbered without holes."""

    def walk(self, rig: Rig) -> list[tuple[Event, bytes, Reason, str, int, int, int]]:
        """One message for each way to live; what must be recorded, in order.

        An entry is event, payload, reason, consumer, attempt, seconds of dispatch and of the event.
        """
        engine = rig.open({"orders": {"max-deliveries": 2}})
        none, lost = Reason.NONE, Reason.CONSUMER_LOST
        rig.send("orders", [b"acked", b"rejected", b"requeued", b"returned", b"cancelled"])
        expected = [
            (Event.ACCEPTED, payload, none, "", 0, -1, 0)
            for payload in (b"acked", b"rejected", b"requeued", b"returned", b"cancelled")
        ]
        rig.later(seconds=1)
        acked, rejected, requeued, returned, _cancelled = rig.take("orders", consumer="ann")
        rig.later(seconds=1)
        rig.ack("orders", [acked])
        rig.settle("orders", Outcome.REJECT, [rejected])
        rig.settle("orders", Outcome.REQUEUE, [requeued], ttl=90)
        engine.give_back("orders", "ann", rig.now_us, ranges=[(returned.offset, returned.offset + 1)])
        engine.give_back("orders", "ann", rig.now_us, lost=False)
        rig.turn()
        expected += [
            (Event.ACKED, b"acked", none, "ann", 1, 1, 2),
            (Event.DEAD, b"rejected", Reason.REJECTED, "ann", 1, 1, 2),
            (Event.REQUEUED, b"requeued", none, "ann", 1, 1, 2),
            (Event.RETURNED, b"returned", lost, "ann", 1, 1, 2),
            (Event.RETURNED, b"cancelled", Reason.CONSUMER_CANCELLED, "ann", 0, 1, 2),
        ]
        rig.later(seconds=1)
        rig.take("orders", consumer="bob")
        rig.lose("orders", consumer="bob", where=Where.TAIL)
        rig.turn()
        expected += [
            (Event.DEAD, b"requeued", Reason.TOO_MANY_DELIVERIES, "bob", 2, 3, 3),
            (Event.DEAD, b"returned", Reason.TOO_MANY_DELIVERIES, "bob", 2, 3, 3),
            (Event.REQUEUED, b"cancelled", lost, "bob", 1, 3, 3),
        ]
        rig.later(seconds=1)
        engine.redrive("orders", rig.now_us, limit=1)
        engine.purge("orders", rig.now_us)
        rig.turn()
        expected += [
            (Event.REDRIVEN, b"rejected", Reason.REJECTED, "", 0, -1, 4),
            (Event.WITHDRAWN, b"cancelled", Reason.PURGED, "", 1, -1, 4),
            (Event.WITHDRAWN, b"rejected", Reason.PURGED, "", 0, -1, 4),
        ]
        (dead,) = rig.take("orders", 1, consumer="eve", dead=True)
        rig.later(seconds=1)
        rig.settle("orders", Outcome.ACK, [dead], consumer="eve", dead=True)
        rig.turn()
        expected.append((Event.ACKED, b"requeued", none, "eve", 3, 4, 5))
        rig.send("orders", [b"expired"], ttl=1)
        rig.later(seconds=1)
        engine.expire(rig.now_us)
        rig.turn()
        expected += [
            (Event.ACCEPTED, b"expired", none, "", 0, -1, 5),
            (Event.DEAD, b"expired", Reason.EXPIRED, "", 0, -1, 6),
        ]
        return expected

    def test_every_arrow_is_recorded_with_all_that_belongs_to_it(self, rig: Rig) -> None:
        expected = self.walk(rig)
        payload_at = {m.offset: m.payload for m in rig.read("orders")}

        def seconds(us: int) -> int:
            return (us - START_US) // SECOND if us else -1

        events = rig.events("orders")
        seen = [
            (
                t.event,
                payload_at[t.offset],
                t.reason,
                t.consumer,
                t.attempt,
                seconds(t.dispatched_us),
                seconds(t.time_us),
            )
            for t in events
        ]
        # Within one turn, arrows of different messages may be written down in any order.
        assert sorted(seen, key=lambda row: (row[6], row)) == sorted(expected, key=lambda row: (row[6], row))
        assert [t.number for t in events] == list(range(len(expected)))
        assert rig.described("orders").event_end == len(expected)

    def test_replayed_through_the_life_table_they_give_the_state(self, rig: Rig) -> None:
        self.walk(rig)
        rig.send("orders", [b"last"])
        states = replay(rig.events("orders"))
        info = rig.described("orders")
        assert list(states.values()).count(State.READY) == info.ready == 1
        assert list(states.values()).count(State.DEAD) == info.dead == 2
        assert len(states) == info.offset_end

    def test_ranges_of_events_are_clipped_too(self, rig: Rig) -> None:
        self.walk(rig)
        events = rig.events("orders")
        for start, end in [(0, 3), (2, 9), (6, 7), (9, 9), (7, 2), (len(events) - 1, 99), (500, 600)]:
            assert rig.events("orders", start, end) == events[start:end]

    def test_neighbours_of_one_turn_keep_what_is_their_own(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 8))
        rig.take("orders", 2)
        rig.lose("orders")
        rig.turn()
        rig.take("orders", 3, consumer="ann")  # 0 and 1 for the second time, 2 for the first
        rig.later(us=1)
        rig.take("orders", 1, consumer="ann")  # 3, a moment later
        rig.take("orders", 1, consumer="bob")  # 4
        ranges = [(0, 8)]
        for consumer in ("ann", "bob"):
            rig.engine.settle("orders", consumer, Outcome.ACK, ranges, rig.now_us)
        rig.engine.withdraw("orders", [(5, 6)], Reason.TIMEOUT, rig.now_us)
        rig.engine.withdraw("orders", [(6, 8)], Reason.OPERATOR, rig.now_us)
        none = Reason.NONE
        ends = {t.offset: t for t in rig.events("orders") if t.event in (Event.ACKED, Event.WITHDRAWN)}
        assert [
            (t.event, t.reason, t.consumer, t.attempt, t.dispatched_us and t.dispatched_us - START_US)
            for _, t in sorted(ends.items())
        ] == [
            (Event.ACKED, none, "ann", 2, 0),
            (Event.ACKED, none, "ann", 2, 0),
            (Event.ACKED, none, "ann", 1, 0),
            (Event.ACKED, none, "ann", 1, 1),
            (Event.ACKED, none, "bob", 1, 1),
            (Event.WITHDRAWN, Reason.TIMEOUT, "", 0, 0),
            (Event.WITHDRAWN, Reason.OPERATOR, "", 0, 0),
            (Event.WITHDRAWN, Reason.OPERATOR, "", 0, 0),
        ]

    def test_dropped_messages_say_why(self, rig: Rig) -> None:
        rig.open({"orders": {"dead-letters": "off"}})
        rig.send("orders", [b"r", b"e"], retries=[0, -1], ttl=[0, 1])
        rig.take("orders", 1)
        rig.lose("orders")
        rig.later(seconds=1)
        rig.engine.expire(rig.now_us)
        ends = [(t.event, t.reason, t.offset) for t in rig.events("orders") if t.event is not Event.ACCEPTED]
        assert ends == [
            (Event.REJECTED, Reason.RETRIES_EXHAUSTED, 0),
            (Event.EXPIRED, Reason.EXPIRED, 1),
        ]

    def test_each_queue_has_its_own_numbers(self, rig: Rig) -> None:
        rig.open()
        for queue in ("orders", "mails"):
            rig.send(queue, ABC)
            rig.ack(queue, rig.take(queue))
        for queue in ("orders", "mails"):
            assert [t.number for t in rig.events(queue)] == list(range(6))

    def test_events_of_unsynced_settlements_are_not_shown(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", ABC)
        rig.ack("orders", rig.take("orders"))
        assert len(open_runs(engine.events("orders", 0, 99))) == 3
        assert engine.describe("orders").event_end == 6
        assert len(rig.events("orders")) == 6


def replay(events: list[Told]) -> dict[int, State]:
    """Where each message is, if the life table is to be believed."""
    states: dict[int, State] = {}
    for told in events:
        state = states.get(told.offset, State.NEW)
        if told.dispatched_us:
            state = after(state, Event.HELD)
        states[told.offset] = after(state, told.event)
    return states


class Describing:
    """describe: counts and positions."""

    def test_every_field(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", [b"aa", b"bbb"])
        rig.later(seconds=1)
        rig.send("orders", [b"cccc", b"ddddd", b"eeeeee"])
        rig.later(seconds=1)
        got = rig.take("orders", 4)
        rig.ack("orders", got[:1])
        rig.settle("orders", Outcome.REJECT, got[1:2])
        engine.pause("orders", True, rig.now_us)
        info = rig.described("orders")
        assert info == QueueInfo(
            name="orders",
            ready=1,
            delayed=0,
            held=2,
            dead=1,
            offset_start=0,
            offset_end=5,
            event_start=0,
            event_end=7,
            bytes=15,
            oldest_us=START_US + SECOND,
            paused=True,
            identity=got[0].message_id[:12].decode(),
        )

    def test_bytes_and_age_follow_the_oldest_living_message(self, rig: Rig) -> None:
        rig.open()
        seen = []
        for size in (5, 7, 11):
            rig.send("orders", [b"x" * size])
            rig.later(seconds=1)
        messages = rig.take("orders")
        for message in messages:
            info = rig.engine.describe("orders")
            seen.append((info.bytes, (info.oldest_us - START_US) // SECOND))
            rig.ack("orders", [message])
        assert seen == [(23, 0), (18, 1), (11, 2)]
        info = rig.described("orders")
        assert (info.bytes, info.oldest_us) == (0, 0)

    def test_what_was_just_appended_counts(self, rig: Rig) -> None:
        engine = rig.open()
        engine.append("orders", Batch.of([b"abc"]), rig.now_us)
        info = engine.describe("orders")
        assert (info.ready, info.bytes, info.oldest_us, info.offset_end, info.event_end) == (
            1,
            3,
            START_US,
            1,
            1,
        )

    def test_a_dead_letter_is_not_living(self, rig: Rig) -> None:
        rig.open()
        rig.kill("orders", [b"x"])
        info = rig.described("orders")
        assert (info.bytes, info.oldest_us, info.dead) == (0, 0, 1)


class ReadersAndPolicies:
    """hold_retention, release_retention, readers; set_policies; trim does no harm."""

    def test_readers_are_registered_moved_and_released(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", ABC)
        lease = rig.now_us + 60 * SECOND
        first = ReaderInfo("spark", "orders", "messages", 0, lease)
        second = ReaderInfo("audit", "orders", "events", 2, lease)
        engine.hold_retention(first, rig.now_us)
        engine.hold_retention(second, rig.now_us)
        assert engine.readers() == [first, second]
        moved = ReaderInfo("spark", "orders", "messages", 3, lease)
        engine.hold_retention(moved, rig.now_us)
        assert sorted(engine.readers(), key=lambda reader: reader.name) == [second, moved]
        engine.release_retention("audit", rig.now_us)
        assert engine.readers() == [moved]

    def test_a_reader_may_read_several_queues(self, rig: Rig) -> None:
        engine = rig.open()
        lease = rig.now_us + 60 * SECOND
        held = []
        for position, queue in enumerate(("orders", "mails", "audit")):
            rig.send(queue, ABC)
            held.append(ReaderInfo("spark", queue, "messages", position, lease))
            engine.hold_retention(held[-1], rig.now_us)
        other = ReaderInfo("other", "mails", "events", 1, lease)
        engine.hold_retention(other, rig.now_us)
        assert engine.readers() == [*held, other]
        assert engine.info().readers == 2
        engine.release_retention("spark", rig.now_us, queue="mails")
        assert engine.readers() == [held[0], held[2], other]
        with pytest.raises(LogRefused, match="mails"):
            engine.release_retention("spark", rig.now_us, queue="mails")
        for how in ("reopen", "crash"):
            rig.restart(how)
            assert rig.engine.readers() == [held[0], held[2], other]
        rig.engine.release_retention("spark", rig.now_us)
        assert rig.engine.readers() == [other]
        rig.restart("crash")
        assert rig.engine.readers() == [other]

    def test_a_lease_that_ended_long_ago_is_forgotten(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", ABC)
        reader = ReaderInfo("spark", "orders", "messages", 0, rig.now_us + 60 * SECOND)
        engine.hold_retention(reader, rig.now_us)
        engine.trim(rig.now_us)
        rig.later(seconds=61)
        engine.trim(rig.now_us)
        assert engine.readers() == [reader]  # somebody may want to know where it was
        rig.later(seconds=3600)
        engine.trim(rig.now_us)
        assert engine.readers() == []
        rig.restart("crash")
        assert rig.engine.readers() == []

    def test_a_reader_must_make_sense(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", ABC)
        with pytest.raises(LogRefused, match="nowhere"):
            engine.hold_retention(ReaderInfo("spark", "nowhere", "messages", 0, rig.now_us), rig.now_us)
        with pytest.raises(LogRefused, match="view"):
            engine.hold_retention(ReaderInfo("spark", "orders", "pictures", 0, rig.now_us), rig.now_us)
        with pytest.raises(LogRefused, match="spark"):
            engine.release_retention("spark", rig.now_us)
        assert engine.readers() == []

    def test_new_policies_hold_from_now_on(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", ABC)
        rig.take("orders", 1)
        engine.set_policies(Policies({"orders": {"max-deliveries": 1}}))
        (fate,) = rig.lose("orders")
        assert fate.event is Event.DEAD
        rig.send("mails", [b"m"])
        rig.take("mails")
        (fate,) = rig.lose("mails")
        assert fate.event is Event.RETURNED

    def test_trimming_touches_nothing_that_is_unsettled(self, rig: Rig) -> None:
        rig.open({"orders": {"retention-seconds": 0}})
        sent = named("m", 300)
        for at in range(0, 300, 3):
            rig.send("orders", sent[at : at + 3])
            got: list[Got] = rig.take("orders", 3)
            rig.ack("orders", got[:1])
            rig.settle("orders", Outcome.REJECT, got[1:2])
            if at % 30 == 0:
                rig.later(seconds=1)
                rig.engine.trim(rig.now_us)
                rig.turn()
        rig.has("orders", held=100, dead=100)
        rig.lose("orders")
        assert payloads(rig.take("orders")) == sent[2::3]
        assert payloads(rig.take("orders", dead=True)) == sent[1::3]
