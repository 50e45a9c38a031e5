"""Consumers: the rules by example, then all of them at once against a plain model."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.broker.consumers import UNBOUNDED, Consumers, Joined
from tests.build import interpreted_only

if TYPE_CHECKING:
    from _typeshed import TraceFunction


def room(consumers: Consumers[str], key: str) -> int:
    """How many messages it may be given now."""
    member = consumers._members.get(key)
    return member.room if member is not None else 0


def demand(consumers: Consumers[str]) -> int:
    """How many messages all members together may be given now; UNBOUNDED where one set no bound."""
    return min(sum(member.room for member in consumers._members.values()), UNBOUNDED)


def hand_out(consumers: Consumers[str], available: int) -> dict[str, int]:
    """What a queue does: share, and report that everything was taken."""
    shares = consumers.share(available)
    for key, count in shares:
        consumers.took(key, count)
    assert len(dict(shares)) == len(shares), "somebody was named twice"
    return dict(shares)


def joined(**windows: int) -> Consumers[str]:
    consumers: Consumers[str] = Consumers()
    for key, credit in windows.items():
        assert consumers.join(key, credit) is Joined.ACTIVE
    return consumers


# --- Windows ---


def test_a_window_bounds_what_a_consumer_holds() -> None:
    consumers = joined(a=5)
    assert hand_out(consumers, 3) == {"a": 3}
    assert room(consumers, "a") == demand(consumers) == 2
    assert hand_out(consumers, 100) == {"a": 2}
    assert room(consumers, "a") == demand(consumers) == 0
    assert hand_out(consumers, 100) == {}
    consumers.freed("a", 4)
    assert hand_out(consumers, 100) == {"a": 4}


def test_no_bound_takes_everything() -> None:
    consumers = joined(a=0)
    assert room(consumers, "a") == demand(consumers) == UNBOUNDED
    assert hand_out(consumers, 10**9) == {"a": 10**9}
    assert demand(consumers) == UNBOUNDED
    consumers.leave("a")
    assert demand(consumers) == 0


def test_joining_again_changes_the_window_in_place() -> None:
    consumers = joined(a=5)
    hand_out(consumers, 4)
    assert consumers.join("a", 2) is Joined.ACTIVE
    assert room(consumers, "a") == 0
    consumers.freed("a", 2)
    assert room(consumers, "a") == 0  # still holds as many as it may
    consumers.freed("a", 1)
    assert room(consumers, "a") == 1
    consumers.join("a", 0)
    assert room(consumers, "a") == UNBOUNDED
    consumers.join("a", 10)
    assert room(consumers, "a") == 9
    assert len(consumers) == 1


def test_joining_again_keeps_the_turn() -> None:
    consumers = joined(a=0, b=0)
    assert hand_out(consumers, 1) == {"a": 1}
    consumers.join("b", 50)
    assert hand_out(consumers, 1) == {"b": 1}


def test_a_newcomer_may_still_hold_something() -> None:
    consumers: Consumers[str] = Consumers()
    consumers.join("a", 5, held=3)
    assert room(consumers, "a") == 2
    consumers.freed("a", 3)
    assert room(consumers, "a") == 5


def test_freeing_more_than_was_held_makes_no_room_beyond_the_window() -> None:
    consumers = joined(a=5)
    hand_out(consumers, 1)
    consumers.freed("a", 3)
    assert room(consumers, "a") == 5


def test_a_once_demand_is_renewed_by_asking_and_by_nothing_else() -> None:
    consumers: Consumers[str] = Consumers()
    consumers.join("a", 7, once=True)
    consumers.join("a", 7, once=True)  # asking twice before there is a message is asking once
    assert room(consumers, "a") == demand(consumers) == 1
    assert hand_out(consumers, 10) == {"a": 1}
    assert demand(consumers) == 0
    consumers.freed("a", 1)
    assert hand_out(consumers, 10) == {}
    consumers.join("a", 7, once=True)
    assert hand_out(consumers, 10) == {"a": 1}


def test_a_member_can_change_between_once_and_a_window() -> None:
    consumers: Consumers[str] = Consumers()
    consumers.join("a", 1, once=True)
    hand_out(consumers, 1)
    consumers.join("a", 3)
    assert room(consumers, "a") == 2
    consumers.join("a", 3, once=True)
    assert room(consumers, "a") == 1


# --- Turns and priorities ---


def test_equals_alternate_when_messages_come_one_by_one() -> None:
    consumers = joined(a=0, b=0, c=0)
    assert [list(hand_out(consumers, 1)) for _ in range(7)] == [[key] for key in "abcabca"]


def test_many_are_split_evenly_and_the_turn_goes_on() -> None:
    consumers = joined(a=0, b=0, c=0)
    assert hand_out(consumers, 10) == {"a": 4, "b": 3, "c": 3}
    assert hand_out(consumers, 10) == {"b": 4, "c": 3, "a": 3}
    assert hand_out(consumers, 1) == {"c": 1}
    assert hand_out(consumers, 2) == {"a": 1, "b": 1}
    assert hand_out(consumers, 3) == {"c": 1, "a": 1, "b": 1}


def test_what_a_small_window_cannot_take_goes_to_the_others() -> None:
    consumers = joined(a=1, b=100, c=4, d=0)
    assert hand_out(consumers, 21) == {"a": 1, "b": 8, "c": 4, "d": 8}


def test_a_window_that_is_exactly_filled_gets_no_more() -> None:
    consumers = joined(a=2, b=5)
    assert hand_out(consumers, 5) == {"a": 2, "b": 3}


def test_no_more_is_shared_than_there_is_room() -> None:
    consumers = joined(a=1, b=2, c=3)
    assert hand_out(consumers, 1000) == {"a": 1, "b": 2, "c": 3}
    assert demand(consumers) == 0


@pytest.mark.parametrize("available", [0, -1])
def test_nothing_available_is_nothing_shared(available: int) -> None:
    consumers = joined(a=1, b=2)
    assert consumers.share(available) == []
    assert hand_out(consumers, 1) == {"a": 1}


def test_a_higher_priority_with_room_is_served_first() -> None:
    consumers: Consumers[str] = Consumers()
    consumers.join("low", 0, 10)
    consumers.join("normal", 3)
    consumers.join("high", 2, 30)
    assert hand_out(consumers, 1) == {"high": 1}
    assert hand_out(consumers, 5) == {"high": 1, "normal": 3, "low": 1}
    consumers.freed("normal", 1)
    assert hand_out(consumers, 2) == {"normal": 1, "low": 1}


def test_what_a_full_priority_cannot_take_goes_to_the_next() -> None:
    consumers: Consumers[str] = Consumers()
    consumers.join("low", 0, 10)
    consumers.join("a", 1)
    consumers.join("b", 2)
    assert hand_out(consumers, 10) == {"a": 1, "b": 2, "low": 7}


def test_priority_0_is_for_broadcasts_only() -> None:
    consumers: Consumers[str] = Consumers()
    assert consumers.join("listener", 5, 0) is Joined.ACTIVE
    assert room(consumers, "listener") == demand(consumers) == 0
    assert consumers.share(5) == []
    assert consumers.broadcast_targets() == ["listener"]


def test_a_priority_can_be_changed_in_place() -> None:
    consumers = joined(a=0, b=0)
    consumers.join("b", 4, 30)
    assert hand_out(consumers, 5) == {"b": 4, "a": 1}
    consumers.join("b", 8, 0)
    assert hand_out(consumers, 5) == {"a": 5}


@pytest.mark.parametrize("stop", [Consumers.mark_idle, Consumers.block])
def test_idle_and_blocked_members_get_no_work(stop: Callable[[Consumers[str], str, bool], None]) -> None:
    consumers = joined(a=5, b=5)
    stop(consumers, "a", True)
    stop(consumers, "a", True)
    assert room(consumers, "a") == 0
    assert demand(consumers) == 5
    assert hand_out(consumers, 2) == {"b": 2}
    assert consumers.broadcast_targets() == ["a", "b"]
    stop(consumers, "a", False)
    assert demand(consumers) == 8
    assert hand_out(consumers, 8) == {"b": 3, "a": 5}


def test_idle_and_blocked_are_two_things() -> None:
    consumers = joined(a=5)
    consumers.mark_idle("a", True)
    consumers.block("a", True)
    consumers.mark_idle("a", False)
    assert demand(consumers) == 0
    consumers.block("a", False)
    assert demand(consumers) == 5


# --- Exclusive ---


def test_the_first_exclusive_holds_the_queue_and_later_ones_wait_in_line() -> None:
    consumers: Consumers[str] = Consumers()
    assert consumers.join("x1", 5, exclusive=True) is Joined.ACTIVE
    assert consumers.join("s1", 5) is Joined.STANDBY
    assert consumers.join("s2", 5) is Joined.STANDBY
    assert consumers.join("x2", 5, exclusive=True) is Joined.STANDBY
    assert consumers.join("s3", 5) is Joined.STANDBY
    assert hand_out(consumers, 100) == {"x1": 5}
    assert consumers.broadcast_targets() == ["x1"]
    assert consumers.leave("x1") == ["s1", "s2"]
    assert consumers.share(100) == [("s1", 5), ("s2", 5)]
    assert consumers.leave("s1") == []
    assert consumers.leave("s2") == ["x2"]
    assert consumers.leave("x2") == ["s3"]
    assert consumers.leave("s3") == []
    assert len(consumers) == 0


def test_an_exclusive_one_waits_for_shared_ones_and_is_not_overtaken() -> None:
    consumers = joined(s1=5, s2=5)
    assert consumers.join("x", 5, exclusive=True) is Joined.STANDBY
    assert consumers.join("late", 5) is Joined.STANDBY
    assert consumers.leave("s1") == []
    assert consumers.leave("s2") == ["x"]
    assert consumers.leave("x") == ["late"]


def test_when_a_waiting_exclusive_one_gives_up_those_behind_it_enter() -> None:
    consumers = joined(s1=5)
    consumers.join("x", 5, exclusive=True)
    consumers.join("s2", 5)
    assert consumers.leave("x") == ["s2"]
    assert consumers.broadcast_targets() == ["s1", "s2"]


def test_what_happens_to_a_standby_member_counts_when_its_turn_comes() -> None:
    consumers: Consumers[str] = Consumers()
    consumers.join("x", 5, exclusive=True)
    consumers.join("s", 5)
    assert consumers.join("s", 3, 30) is Joined.STANDBY
    consumers.block("s", True)
    assert room(consumers, "s") == 0
    assert consumers.leave("x") == ["s"]
    assert room(consumers, "s") == 0
    consumers.block("s", False)
    assert room(consumers, "s") == 3


def test_exclusiveness_is_settled_on_arrival() -> None:
    consumers = joined(a=5, b=5)
    assert consumers.join("a", 6, exclusive=True) is Joined.ACTIVE
    assert consumers.join("c", 5) is Joined.ACTIVE


# --- Those who are not here ---


def test_late_news_of_somebody_who_left_is_harmless() -> None:
    consumers = joined(a=5)
    hand_out(consumers, 3)
    assert consumers.leave("a") == []
    consumers.freed("a", 3)
    consumers.mark_idle("a", True)
    consumers.block("a", True)
    assert consumers.leave("a") == []
    assert room(consumers, "a") == 0
    assert len(consumers) == 0


def test_nothing_can_be_given_to_somebody_who_left() -> None:
    consumers = joined(a=5)
    consumers.leave("a")
    with pytest.raises(KeyError, match="'a' took 2 messages, but it has left"):
        consumers.took("a", 2)


def test_a_window_or_priority_out_of_range_is_refused() -> None:
    consumers: Consumers[str] = Consumers()
    with pytest.raises(ValueError, match="'a': credit -1; use 0"):
        consumers.join("a", -1)
    with pytest.raises(ValueError, match="'a': priority 256; use 0 to 255"):
        consumers.join("a", 1, 256)
    assert len(consumers) == 0


# --- What it costs ---


def lines_run(action: Callable[[], object]) -> int:
    """How many lines of ours `action` executes: a cost that no busy machine can change.

    What others do meanwhile is none of it: Hypothesis hears of every collection of garbage, in Python.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> "TraceFunction":
        nonlocal count
        count += event == "line" and frame.f_globals.get("__name__") == Consumers.__module__
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


@interpreted_only
def test_the_cost_of_a_message_does_not_grow_with_the_members() -> None:
    def cost(members: int) -> list[int]:
        consumers: Consumers[int] = Consumers()
        for number in range(members):
            consumers.join(number, 2)
        actions: list[Callable[[], object]] = [
            lambda: consumers.share(1),
            lambda: consumers.took(0, 1),
            lambda: consumers.freed(0, 1),
            lambda: consumers.join(members, 1, once=True),
            lambda: consumers.leave(members),
        ]
        return [lines_run(action) for action in actions]

    assert cost(2) == cost(2000)
    assert all(0 < lines < 50 for lines in cost(2))


@interpreted_only
def test_an_even_split_needs_few_rounds_whatever_the_windows() -> None:
    consumers: Consumers[int] = Consumers()
    for number in range(2000):
        consumers.join(number, number + 1)
    total = 2000 * 2001 // 2
    for available in (2000, 50_000, total - 1, total, 2 * total):
        assert sum(count for _, count in consumers.share(available)) == min(available, total)
        # Each member costs some 7 lines a round; one round a member would be 2,000 times that.
        assert 2000 < lines_run(partial(consumers.share, available)) < 2000 * 7 * 8


# --- Everything at once, against a model that deals one message at a time ---


@dataclass
class Plain:
    """A consumer of the model."""

    credit: int
    priority: int
    exclusive: bool
    once: bool
    held: int = 0
    asked: bool = True
    active: bool = False
    idle: bool = False
    blocked: bool = False

    def room(self) -> int:
        if not self.active or self.idle or self.blocked or self.priority == 0:
            return 0
        if self.once:
            return int(self.asked)
        return UNBOUNDED if self.credit == 0 else max(0, self.credit - self.held)


KEYS = st.sampled_from("abcdef")
STOPPED = st.sampled_from([False, False, True])


class AgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.real: Consumers[str] = Consumers()
        self.plain: dict[str, Plain] = {}  # in order of arrival
        self.turn: list[str] = []  # those with room, longest waiting first

    def admit(self) -> list[str]:
        """Let standby members in, as far as the rules allow."""
        entered = []
        for key, member in self.plain.items():
            if member.active:
                continue
            active = [other for other in self.plain.values() if other.active]
            if any(other.exclusive for other in active) or (member.exclusive and active):
                break
            member.active = True
            entered.append(key)
        return entered

    def settle_turn(self) -> None:
        have_room = [key for key, member in self.plain.items() if member.room()]
        self.turn = [key for key in self.turn if key in have_room]
        self.turn += [key for key in have_room if key not in self.turn]

    @initialize(windows=st.lists(st.integers(0, 5), max_size=6))
    def several(self, windows: list[int]) -> None:
        """Most of what can go wrong needs several members at once."""
        for key, credit in zip("abcdef", windows, strict=False):
            self.join(key, credit, 20, False, False)

    @rule(
        key=KEYS,
        credit=st.integers(0, 5),
        priority=st.sampled_from([20, 20, 20, 30, 10, 0]),
        exclusive=st.sampled_from([False] * 15 + [True]),  # one of them makes all others wait
        once=st.sampled_from([False, False, True]),
    )
    def join(self, key: str, credit: int, priority: int, exclusive: bool, once: bool) -> None:
        answer = self.real.join(key, credit, priority, exclusive, once=once)
        member = self.plain.get(key)
        if member is None:
            self.plain[key] = Plain(credit, priority, exclusive, once)
            self.admit()
        else:
            if member.priority != priority and key in self.turn:
                self.turn.remove(key)
            member.credit, member.priority, member.once, member.asked = credit, priority, once, True
        self.settle_turn()
        assert answer is (Joined.ACTIVE if self.plain[key].active else Joined.STANDBY)

    @rule(key=KEYS)
    def leave(self, key: str) -> None:
        self.plain.pop(key, None)
        assert self.real.leave(key) == self.admit()
        self.settle_turn()

    @precondition(lambda self: self.turn)
    @rule(available=st.one_of(st.just(1), st.integers(0, 30)))
    def hand_out(self, available: int) -> None:
        dealt: dict[str, int] = {}
        for _ in range(available):
            if not self.turn:
                break
            top = max(self.plain[key].priority for key in self.turn)
            key = next(key for key in self.turn if self.plain[key].priority == top)
            member = self.plain[key]
            member.held += 1
            member.asked = False
            dealt[key] = dealt.get(key, 0) + 1
            self.turn.remove(key)
            if member.room():
                self.turn.append(key)
        assert hand_out(self.real, available) == dealt

    @rule(key=KEYS, count=st.integers(0, 6))
    def free(self, key: str, count: int) -> None:
        self.real.freed(key, count)
        if key in self.plain:
            self.plain[key].held = max(0, self.plain[key].held - count)
        self.settle_turn()

    @rule(key=KEYS, idle=STOPPED)
    def mark_idle(self, key: str, idle: bool) -> None:
        self.real.mark_idle(key, idle)
        if key in self.plain:
            self.plain[key].idle = idle
        self.settle_turn()

    @rule(key=KEYS, blocked=STOPPED)
    def block(self, key: str, blocked: bool) -> None:
        self.real.block(key, blocked)
        if key in self.plain:
            self.plain[key].blocked = blocked
        self.settle_turn()

    @invariant()
    def agree(self) -> None:
        rooms = {key: member.room() for key, member in self.plain.items()}
        assert {key: room(self.real, key) for key in self.plain} == rooms
        assert demand(self.real) == min(sum(rooms.values()), UNBOUNDED)
        assert self.real.broadcast_targets() == [key for key, member in self.plain.items() if member.active]
        assert len(self.real) == len(self.plain)


AgainstModel.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestAgainstModel = AgainstModel.TestCase
