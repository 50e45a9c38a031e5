"""Pending: the four rooms one by one, and against a plain dict of offsets."""

import os
import tracemalloc

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.model.life import TRANSITIONS, Event, Reason, Refused, State
from penstock.model.pending import AS_STORED, NEAR, NO_NOTE, Hold, Line, Mark, Note, Pending, Place

ORIGINS = (b"one", b"two")
Run = tuple[int, int, Place | None]


def picked(pending: Pending, count: int = 1 << 20) -> list[int]:
    """Everything that can be picked, in order. The rooms are empty afterwards."""
    offsets: list[int] = []
    while (run := pending.pick(count)) is not None:
        offsets += range(run[0], run[1])
    return offsets


def picked_dead(pending: Pending) -> list[int]:
    offsets: list[int] = []
    while (run := pending.pick_dead(1 << 20)) is not None:
        offsets += range(run[0], run[1])
    return offsets


def take(pending: Pending, count: int, consumer: str = "ann", *, dead: bool = False) -> Run:
    """Pick one run and hold it."""
    run = pending.pick_dead(count) if dead else pending.pick(count)
    assert run is not None
    pending.hold(run[0], run[1], Hold(consumer, 1, ORIGINS[0], run[2], dead))
    return run


def queue_of(count: int) -> Pending:
    pending = Pending()
    pending.accept(count)
    return pending


# --- room by room -----------------------------------------------------------------------------


def test_messages_are_accepted_at_the_tail_and_picked_from_the_front() -> None:
    pending = Pending()
    assert (pending.accept(3), pending.accept(2)) == (0, 3)
    assert pending.pick(2) == (0, 2, None)
    assert pending.pick(9) == (2, 5, None)
    assert pending.pick(1) is None
    assert (pending.tail, pending.ready_count) == (5, 0)


def test_a_moved_message_comes_between_the_offsets_on_both_sides_of_its_tail() -> None:
    pending = queue_of(4)
    pending.pick(2)
    pending.move(State.HELD, Event.REQUEUED, 0, 1, tail=pending.tail)
    pending.accept(2)
    pending.move(State.HELD, Event.REQUEUED, 1, 2, tail=pending.tail)
    pending.accept(1)
    assert picked(pending) == [2, 3, 0, 4, 5, 1, 6]


@pytest.mark.parametrize("count", [1, 2, 3, 100])
def test_the_order_does_not_depend_on_how_many_are_picked_at_once(count: int) -> None:
    pending = queue_of(9)
    pending.pick(6)
    pending.move(State.HELD, Event.REQUEUED, 20, 23, tail=7)
    for first, end in ((4, 6), (0, 1), (1, 4)):
        pending.move(State.HELD, Event.REQUEUED, first, end, tail=8)
    assert picked(pending, count) == [6, 20, 21, 22, 7, 4, 5, 0, 1, 2, 3, 8]


def test_what_is_put_back_has_its_old_place() -> None:
    pending = queue_of(6)
    pending.pick(4)
    pending.move(State.HELD, Event.REQUEUED, 0, 4, tail=6)
    pending.pick(2)
    run = pending.pick(3)
    assert run == (0, 3, Place(6, 1))
    pending.back(4, 6, None)
    pending.back(*run)
    assert picked(pending) == [4, 5, 0, 1, 2, 3]


def test_picking_and_putting_back_leaves_no_trail() -> None:
    """A message that goes round for ever must not fill the memory."""
    pending = queue_of(3)
    pending.pick(2)
    pending.move(State.HELD, Event.REQUEUED, 0, 2, tail=3)
    pending.pick(1)
    for _ in range(1000):
        run = pending.pick(1)
        assert run == (0, 1, Place(3, 1))
        pending.back(*run)
    assert [len(order) for order in pending.waiting._orders.values()] == [1]


@pytest.mark.parametrize("event", [Event.DEAD, Event.REQUEUED])
def test_messages_that_move_together_share_a_place(event: Event) -> None:
    """Which changes nothing of their order, and is what makes a million of them cheap."""
    pending = queue_of(NEAR + 20)
    pending.pick(NEAR + 20)
    moves = [2, 4, 5, 9, 3, 8, NEAR + 9, NEAR + 10, 0, 1]
    for offset in moves:
        pending.move(State.HELD, event, offset, offset + 1, reason=Reason.REJECTED, time_us=7, tail=NEAR + 20)
    line = pending.dead if event is Event.DEAD else pending.waiting
    assert [offset for first, end, _ in by_place(line) for offset in range(first, end)] == moves
    assert len({place.number for _, _, place in line.places}) == 4  # from 2, 3, NEAR + 9 and 0 on
    assert (picked_dead if event is Event.DEAD else picked)(pending) == moves


def test_another_time_or_reason_or_tail_is_another_place() -> None:
    pending = queue_of(20)
    pending.pick(20)
    facts = [(Reason.REJECTED, 1), (Reason.REJECTED, 2), (Reason.EXPIRED, 2), (Reason.EXPIRED, 2)]
    for offset, (reason, time_us) in enumerate(facts):
        pending.move(State.HELD, Event.DEAD, 2 * offset, 2 * offset + 1, reason=reason, time_us=time_us)
    assert [(place.reason, place.time_us) for _, _, place in by_place(pending.dead)] == facts
    for offset, tail in ((10, 20), (12, 21), (14, 21)):
        pending.move(State.HELD, Event.REQUEUED, offset, offset + 1, tail=tail)
    assert [place.tail for _, _, place in by_place(pending.waiting)] == [20, 21, 21]


def test_a_place_that_others_came_behind_gets_nobody_any_more() -> None:
    pending = queue_of(9)
    pending.pick(9)
    for offset in (0, 5, 2):
        pending.move(State.HELD, Event.REQUEUED, offset, offset + 1, tail=9)
    pending.mark()
    for offset in (4, 6):
        pending.move(State.HELD, Event.REQUEUED, offset, offset + 1, tail=9)
    assert [(a, place.number) for a, _, place in by_place(pending.waiting)] == [
        (0, 1),
        (5, 1),
        (2, 2),
        (4, 3),
        (6, 3),
    ]


def by_place(line: Line) -> list[tuple[int, int, Place]]:
    return sorted(line.places, key=lambda run: (run[2].number, run[0]))


@pytest.mark.parametrize("in_a_turn", [500, 2, 1])
def test_scattered_messages_take_few_bytes_each(in_a_turn: int) -> None:
    """Every second one has died, some hundreds in a turn, or each alone; and then they are redriven."""
    count = 20_000
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        pending = queue_of(2 * count)
        pending.pick(2 * count)
        for offset in range(0, 2 * count, 2):
            time_us = 1_000_000_000_000_000 + offset // in_a_turn
            pending.move(State.HELD, Event.DEAD, offset, offset + 1, reason=Reason.REJECTED, time_us=time_us)
            pending.note(offset, offset + 1, Note(1))
        assert tracemalloc.get_traced_memory()[0] - before < 100 * count
        while (run := pending.pick_dead(1)) is not None:
            pending.move(State.DEAD, Event.REDRIVEN, run[0], run[1], tail=pending.tail)
            pending.note(run[0], run[1], Note(0, AS_STORED, 0))
        assert tracemalloc.get_traced_memory()[0] - before < 100 * count
    finally:
        tracemalloc.stop()
    assert picked(pending) == list(range(0, 2 * count, 2))


def test_dead_letters_stand_in_the_order_of_death() -> None:
    pending = queue_of(5)
    pending.pick(5)
    for offset, reason in ((3, Reason.EXPIRED), (0, Reason.REJECTED), (4, Reason.EXPIRED)):
        pending.move(State.HELD, Event.DEAD, offset, offset + 1, reason=reason, time_us=77)
    assert pending.pick_dead(9) == (3, 4, Place(0, 1, Reason.EXPIRED, 77))
    assert picked_dead(pending) == [0, 4]
    assert pending.ready_count == 0


def test_a_consumer_releases_what_it_holds_and_nothing_else() -> None:
    pending = queue_of(10)
    take(pending, 4, "ann")
    take(pending, 2, "bob")
    assert pending.held_counts() == (6, 0)
    assert [(a, b) for a, b, _ in pending.release(2, 9, "ann")] == [(2, 4)]
    assert pending.release(2, 4, "ann") == []
    assert pending.release(0, 10, "eve") == []
    assert pending.release(4, 4, "bob") == pending.release(6, 4, "bob") == []
    assert pending.held_counts() == (4, 0)
    assert [(a, b) for a, b, _ in pending.release(0, 10, "bob")] == [(4, 6)]
    assert pending.held.keys() == {"ann"}


def test_a_release_may_ask_for_an_origin_and_a_door() -> None:
    pending = queue_of(6)
    pending.pick(6)
    place = Place(0, 1, Reason.EXPIRED, 1)
    pending.hold(0, 2, Hold("ann", 1, ORIGINS[0], None, False))
    pending.hold(2, 4, Hold("ann", 1, ORIGINS[1], None, False))
    pending.hold(4, 6, Hold("ann", 1, ORIGINS[1], place, True))
    assert pending.held_counts() == (4, 2)
    assert [(a, b) for a, b, _ in pending.release(0, 6, "ann", ORIGINS[1], dead=False)] == [(2, 4)]
    assert [(a, b) for a, b, _ in pending.release(0, 6, "ann", dead=True)] == [(4, 6)]
    assert [(a, b) for a, b, _ in pending.release(0, 6, "ann", ORIGINS[0])] == [(0, 2)]
    assert pending.held == {}


def test_state_at_names_the_room() -> None:
    pending = queue_of(7)
    take(pending, 1)  # 0
    pending.pick(3)  # 1 2 3
    pending.move(State.HELD, Event.REQUEUED, 1, 2, tail=7)
    pending.move(State.HELD, Event.DEAD, 2, 4, reason=Reason.REJECTED, time_us=5)
    pending.pick_dead(1)
    pending.hold(2, 3, Hold("bob", 1, ORIGINS[0], Place(0, 2, Reason.REJECTED, 5), True))
    states = [pending.state_at(offset)[0] for offset in range(8)]
    ready, gone = State.READY, State.GONE
    assert states == [State.HELD, ready, State.DEAD_HELD, State.DEAD, ready, ready, ready, gone]
    _, place, hold = pending.state_at(2)
    assert hold is not None
    assert (place, hold.consumer) == (Place(0, 2, Reason.REJECTED, 5), "bob")
    assert pending.unsettled(0, 100) == [(0, 7)]
    assert pending.unsettled(2, 3) == [(2, 3)]


def test_the_oldest_living_message_may_be_anywhere_but_among_the_dead() -> None:
    pending = queue_of(4)
    assert pending.oldest_living() == 0
    pending.pick(1)
    pending.move(State.HELD, Event.DEAD, 0, 1, reason=Reason.REJECTED, time_us=1)
    take(pending, 1)
    assert pending.oldest_living() == 1
    pending.release(0, 4, "ann")
    pending.move(State.HELD, Event.REQUEUED, 1, 2, tail=4)
    assert pending.oldest_living() == 1
    pending.lift(1, 4)
    take(pending, 1, dead=True)
    assert pending.oldest_living() == pending.tail == 4


def test_notes_are_beside_the_messages_until_they_are_gone() -> None:
    pending = queue_of(6)
    note = Note(1, 3, 99)
    pending.note(1, 4, note)
    pending.note(2, 3, Note(2))
    assert pending.noted(0, 6) == [
        (0, 1, NO_NOTE),
        (1, 2, note),
        (2, 3, Note(2)),
        (3, 4, note),
        (4, 6, NO_NOTE),
    ]
    pending.note(1, 2, NO_NOTE)
    pending.move(State.HELD, Event.ACKED, 2, 3)
    assert list(pending.notes) == [(3, 4, note)]
    assert Note() == Note(0, AS_STORED, AS_STORED)


def test_lifting_empties_every_room_but_the_hands_of_consumers() -> None:
    pending = queue_of(8)
    take(pending, 2)
    pending.pick(4)
    pending.move(State.HELD, Event.REQUEUED, 2, 4, tail=8)
    pending.move(State.HELD, Event.DEAD, 4, 6, reason=Reason.EXPIRED, time_us=3)
    assert sorted(pending.lift(1, 7), key=lambda run: run[0]) == [
        (2, 4, None),
        (4, 6, Place(0, 2, Reason.EXPIRED, 3)),
        (6, 7, None),
    ]
    assert picked(pending) == [7]
    assert pending.held_counts() == (2, 0)


def test_places_go_on_where_a_snapshot_ended() -> None:
    pending = queue_of(2)
    pending.continue_places(41)
    pending.pick(2)
    pending.move(State.HELD, Event.REQUEUED, 0, 1, tail=2)
    assert pending.pick(1) == (0, 1, Place(2, 42))
    pending.continue_places(7)
    pending.move(State.HELD, Event.DEAD, 1, 2, reason=Reason.EXPIRED, time_us=0)
    assert pending.pick_dead(1) == (1, 2, Place(0, 43, Reason.EXPIRED, 0))


def test_a_record_about_what_is_gone_changes_nothing() -> None:
    pending = queue_of(3)
    pending.replay(Event.ACKED, 0, 2, Reason.NONE, 1, NO_NOTE, 0)
    for event in (Event.REQUEUED, Event.DEAD, Event.RETURNED, Event.REDRIVEN, Event.ACKED):
        pending.replay(event, 0, 2, Reason.REJECTED, 2, Note(5), 3)
    assert (picked(pending), picked_dead(pending)) == ([2], [])
    assert not pending.notes


# --- against a model --------------------------------------------------------------------------


class Entry:
    """One message of the model."""

    def __init__(self, offset: int) -> None:
        self.room = "ready"  # ready, dead, held, dead-held, gone
        self.place = (offset, 1, 0)  # as in its own place; (tail, 0, number) when moved
        self.reason = Reason.NONE
        self.consumer = ""
        self.note = NO_NOTE


class PendingAgainstModel(RuleBasedStateMachine):
    """Live calls, and the record of them: replayed from nothing, it must lead to the same rooms."""

    def __init__(self) -> None:
        super().__init__()
        self.pending = Pending()
        self.entries: list[Entry] = []
        self.moves = 0
        self.marked: tuple[Mark, dict[int, tuple[int, int, int]]] | None = None
        self.record: list[tuple[Event, int, int, Reason, Note, int]] = []

    def line(self, room: str) -> list[int]:
        mine = [offset for offset, entry in enumerate(self.entries) if entry.room == room]
        return sorted(mine, key=lambda offset: (self.entries[offset].place, offset))

    @rule(count=st.integers(1, 5))
    def accept(self, count: int) -> None:
        assert self.pending.accept(count) == len(self.entries)
        self.record.append((Event.ACCEPTED, len(self.entries), count, Reason.NONE, NO_NOTE, 0))
        self.entries += [Entry(len(self.entries) + i) for i in range(count)]

    @rule(count=st.integers(1, 6), consumer=st.sampled_from(["ann", "bob"]), dead=st.booleans())
    def take(self, count: int, consumer: str, dead: bool) -> None:
        expected = self.line("dead" if dead else "ready")[:count]
        taken: list[int] = []
        while len(taken) < count:
            left = count - len(taken)
            run = self.pending.pick_dead(left) if dead else self.pending.pick(left)
            if run is None:
                break
            first, end, place = run
            self.pending.hold(first, end, Hold(consumer, 1, ORIGINS[first % 2], place, dead))
            taken += range(first, end)
        assert taken == expected
        for offset in taken:
            self.entries[offset].room = "dead-held" if dead else "held"
            self.entries[offset].consumer = consumer

    def write(self, event: Event, first: int, end: int, reason: Reason, note: Note, tail: int = 0) -> None:
        self.record.append((event, first, end, reason, note, tail))

    @precondition(lambda self: self.pending.held)
    @rule(
        data=st.data(),
        how=st.sampled_from(["acked", "returned", "requeued", "dead"]),
        whole=st.booleans(),
        retries=st.integers(0, 2),
    )
    def end(self, data: st.DataObject, how: str, whole: bool, retries: int) -> None:
        """A consumer ends its deliveries, as the queue would."""
        consumer = data.draw(st.sampled_from(sorted(self.pending.held)))
        held = [
            o for o, entry in enumerate(self.entries) if "held" in entry.room and entry.consumer == consumer
        ]
        first = held[0] if whole else data.draw(st.sampled_from(held))
        released = self.pending.release(first, len(self.entries), consumer)
        assert sorted(o for a, b, _ in released for o in range(a, b)) == [o for o in held if o >= first]
        for a, b, hold in released:
            for c, d, before in self.pending.noted(a, b):
                self.end_run(c, d, hold, how, Note(before.attempts + 1, retries))

    def end_run(self, first: int, end: int, hold: Hold, how: str, note: Note) -> None:
        pending, tail = self.pending, len(self.entries)
        if how == "acked":
            pending.move(State.HELD, Event.ACKED, first, end)
            self.write(Event.ACKED, first, end, Reason.NONE, NO_NOTE)
        elif how == "returned":
            pending.back(first, end, hold.place, hold.dead)
            self.write(Event.RETURNED, first, end, Reason.CONSUMER_LOST, note)
        elif how == "dead":
            pending.move(State.HELD, Event.DEAD, first, end, reason=Reason.REJECTED, time_us=7)
            self.write(Event.DEAD, first, end, Reason.REJECTED, note)
        elif hold.dead:
            assert hold.place is not None
            pending.move(State.DEAD_HELD, Event.REQUEUED, first, end, hold.place)
            self.write(Event.REQUEUED, first, end, Reason.CONSUMER_LOST, note)
        else:
            pending.move(State.HELD, Event.REQUEUED, first, end, tail=tail)
            self.write(Event.REQUEUED, first, end, Reason.NONE, note, tail)
        if how != "acked":
            pending.note(first, end, note)
        self.moves += 1
        for entry in self.entries[first:end]:
            was_dead = entry.room == "dead-held"
            entry.note = NO_NOTE if how == "acked" else note
            if how == "acked":
                entry.room = "gone"
            elif how == "dead" or was_dead:
                entry.room = "dead"
                entry.reason = Reason.REJECTED if how == "dead" else entry.reason
                entry.place = entry.place if how == "returned" else (0, 0, self.moves)
            else:
                entry.room = "ready"
                entry.place = entry.place if how == "returned" else (tail, 0, self.moves)

    @rule(first=st.integers(0, 40), length=st.integers(0, 6), redrive=st.booleans())
    def lift(self, first: int, length: int, redrive: bool) -> None:
        """Without a consumer: dead letters are redriven, living ones expire."""
        end = first + length
        lifted = self.pending.lift(first, end)
        expected = [o for o, e in enumerate(self.entries) if e.room in ("ready", "dead") and first <= o < end]
        assert sorted(o for a, b, _ in lifted for o in range(a, b)) == expected
        for a, b, death in lifted:
            assert {self.entries[o].room == "dead" for o in range(a, b)} == {death is not None}
            self.moves += 1
            tail = len(self.entries)
            if death is None:
                self.pending.move(State.HELD, Event.DEAD, a, b, reason=Reason.EXPIRED, time_us=9)
                for c, d, note in self.pending.noted(a, b):
                    self.write(Event.DEAD, c, d, Reason.EXPIRED, note)
            elif redrive:
                self.pending.move(State.HELD, Event.REQUEUED, a, b, tail=tail)
                self.pending.note(a, b, Note(0, AS_STORED, 0))
                self.write(Event.REDRIVEN, a, b, death.reason, Note(0, AS_STORED, 0), tail)
            else:
                self.pending.move(State.HELD, Event.ACKED, a, b)
                self.write(Event.WITHDRAWN, a, b, Reason.PURGED, NO_NOTE)
            for entry in self.entries[a:b]:
                if death is None:
                    entry.room, entry.reason, entry.place = "dead", Reason.EXPIRED, (0, 0, self.moves)
                elif redrive:
                    entry.room, entry.note = "ready", Note(0, AS_STORED, 0)
                    entry.place = (tail, 0, self.moves)
                else:
                    entry.room, entry.note = "gone", NO_NOTE

    @rule()
    def mark(self) -> None:
        # Also those that somebody has: who gives back moves nothing.
        dead = [o for o, entry in enumerate(self.entries) if "dead" in entry.room]
        self.marked = self.pending.mark(), {o: self.entries[o].place for o in dead}

    @precondition(lambda self: self.marked is not None)
    @rule(count=st.integers(1, 6))
    def purge_marked(self, count: int) -> None:
        """The next dead letters that were dead when the mark was made."""
        assert self.marked is not None
        (_, number), places = self.marked
        line = [o for o in self.line("dead") if self.entries[o].place == places.get(o)]
        run = self.pending.pick_dead(count, None, number)
        assert (run is None) == (not line)
        if run is not None:
            assert list(range(run[0], run[1])) == line[: run[1] - run[0]]
            assert run[1] - run[0] <= count
            self.pending.move(State.DEAD, Event.WITHDRAWN, run[0], run[1])
            self.write(Event.WITHDRAWN, run[0], run[1], Reason.PURGED, NO_NOTE)
            for entry in self.entries[run[0] : run[1]]:
                entry.room, entry.note = "gone", NO_NOTE

    @invariant()
    def the_rooms_are_those_of_the_model(self) -> None:
        rooms = [entry.room for entry in self.entries]
        assert self.pending.ready_count == rooms.count("ready")
        assert self.pending.dead.places.total == rooms.count("dead")
        assert self.pending.held_counts() == (rooms.count("held"), rooms.count("dead-held"))
        for offset, entry in enumerate(self.entries):
            state, place, _ = self.pending.state_at(offset)
            assert state.name.lower().replace("_", "-") == entry.room
            if "dead" in entry.room:
                assert place is not None
                assert place.reason is entry.reason
        living = [o for o, entry in enumerate(self.entries) if entry.room in ("ready", "held")]
        assert self.pending.oldest_living() == min(living, default=len(self.entries))
        assert notes_of(self.pending) == {o: e.note for o, e in enumerate(self.entries) if e.note != NO_NOTE}

    def teardown(self) -> None:
        """Nobody holds anything after a crash: replayed, everything is in its old room again."""
        again = Pending()
        for event, first, end, reason, note, tail in self.record:
            if event is Event.ACCEPTED:
                again.accept(end)
            else:
                again.replay(event, first, end, reason, 7, note, tail)
        for entry in self.entries:
            entry.room = entry.room.removesuffix("-held") if entry.room != "held" else "ready"
        assert notes_of(again) == notes_of(self.pending)
        reasons = {o: again.state_at(o)[1] for o in self.line("dead")}
        assert {o: place.reason for o, place in reasons.items() if place is not None} == {
            o: self.entries[o].reason for o in self.line("dead")
        }
        assert picked(again) == self.line("ready")
        assert picked_dead(again) == self.line("dead")


def notes_of(pending: Pending) -> dict[int, Note]:
    return {offset: note for first, end, note in pending.notes for offset in range(first, end)}


TestPendingAgainstModel = PendingAgainstModel.TestCase
TestPendingAgainstModel.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    derandomize="PENSTOCK_TEST_SEED" not in os.environ,
    print_blob=True,
)


def test_a_record_whose_forerunner_is_damaged_counts() -> None:
    """What a readable record says of a message holds, whatever is missing before it."""
    pending = Pending()
    pending.accept(4)
    pending.replay(Event.REDRIVEN, 0, 1, Reason.REJECTED, 5, Note(0, AS_STORED, 0), 4)
    assert pending.state_at(0)[:2] == (State.READY, Place(4, 1))
    pending.replay(Event.DEAD, 1, 2, Reason.REJECTED, 5, Note(1), 0)
    pending.replay(Event.EXPIRED, 1, 2, Reason.EXPIRED, 6, NO_NOTE, 0)
    assert pending.state_at(1)[0] is State.GONE
    assert pending.deaths() == {}


# `accept` and `hold` are the ways of the other two.
@pytest.mark.parametrize("event", sorted(set(Event) - {Event.ACCEPTED, Event.HELD}))
@pytest.mark.parametrize("was", State)
def test_nothing_goes_where_the_table_does_not_lead(was: State, event: Event) -> None:
    """`move` is the one way from room to room, and it asks the table first."""
    pending = Pending()
    pending.accept(3)
    place = Place(0, 7, Reason.EXPIRED, 4)
    if was in (State.DEAD, State.DEAD_HELD):
        pending.pick(1)
        pending.move(State.HELD, Event.DEAD, 0, 1, reason=Reason.EXPIRED, time_us=4)
        pending.lift_dead(0, 1)
    else:
        pending.pick(1)
    before = pending.unsettled(0, 3), pending.deaths()
    to = TRANSITIONS.get((was, event))
    if to is None:
        with pytest.raises(Refused):
            pending.move(was, event, 0, 1, place, Reason.REJECTED, 9, 3)
        assert (pending.unsettled(0, 3), pending.deaths()) == before
        return
    pending.move(was, event, 0, 1, place if was is State.DEAD_HELD else None, Reason.REJECTED, 9, 3)
    assert pending.state_at(0)[0] is to
