"""The mirror of the queues: rates and windows, who is told what, what a round costs.

The link is a stand-in with fabricated rows, and time is a number: real seconds would prove less. What the
rows are in a real broker is the other tests' business.
"""

import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import pytest

from penstock.control.frames import Buffer, Fields, Frame
from penstock.http.link import CallRefused
from penstock.http.watching.mirror import ROUND_SECONDS_MAX, SHOWN, WINDOW_SECONDS, Mirror

PART = 1000


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Broker:
    """The first process's end of the link, as far as `queues` goes."""

    def __init__(self) -> None:
        self.rows: dict[str, Fields] = {}
        self.changed: dict[str, None] = {}
        self.gone: list[str] = []
        self.time_us = 0
        self.calls: list[bool] = []
        self.on_call: Callable[[], Awaitable[object]] | None = None

    def move(self, name: str, accepted: int = 0, acked: int = 0) -> None:
        """Messages come, and are acknowledged."""
        before = self.rows.get(name)
        offset_end = accepted + (before["offset_end"] if before else 0)
        done = acked + (before["counts"]["acked"] if before else 0)
        self.rows[name] = {
            **dict.fromkeys(SHOWN, 0),
            "name": name,
            "offset_end": offset_end,
            "oldest_us": 0,
            "paused": False,
            "delivered": done,
            "counts": {"acked": done},
        }
        self.changed[name] = None

    async def call(self, name: str, fields: Fields | None = None, *buffers: Buffer) -> Frame:
        assert name == "queues"
        assert fields is not None
        self.calls.append(fields["all"])
        if fields["all"]:
            self.changed = dict.fromkeys(self.rows)
        names = list(self.changed)[:PART]
        for it in names:
            del self.changed[it]
        rows = [self.rows[it] for it in names]
        more = bool(self.changed)
        if self.on_call is not None:
            await self.on_call()
        gone, self.gone = self.gone, []
        told = {"queues": rows, "gone": gone, "more": more, "time_us": self.time_us}
        return Frame(told, memoryview(b""))

    def delete(self, name: str, told: bool = True) -> None:
        del self.rows[name]
        self.changed.pop(name, None)
        if told:
            self.gone.append(name)


class Rig:
    """A mirror with its broker and its clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.broker = Broker()
        self.mirror = Mirror(self.broker, self.clock)

    async def after(self, seconds: float) -> None:
        """Time passes, then somebody looks."""
        self.clock.now += seconds
        await self.mirror.refresh()

    def rates(self, name: str = "q") -> tuple[float, float]:
        shown = self.mirror.queue(name)
        return shown["rate_in"], shown["rate_out"]


def run(test: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await test(Rig())

    asyncio.run(main())


def test_what_was_there_before_is_no_rate() -> None:
    async def test(rig: Rig) -> None:
        rig.broker.move("q", 1_000_000, 500_000)
        await rig.after(0)
        assert rig.rates() == (0, 0)
        await rig.after(1)
        assert rig.rates() == (0, 0)

    run(test)


def test_a_steady_flow_has_its_rate_and_the_end_of_it_is_seen() -> None:
    async def test(rig: Rig) -> None:
        rig.broker.move("q", 7)
        await rig.after(0)
        for _ in range(20):
            rig.broker.move("q", 100, 40)
            await rig.after(1)
            assert rig.rates() == pytest.approx((100, 40))
        falling = []
        for _ in range(int(WINDOW_SECONDS)):
            await rig.after(1)
            falling.append(rig.rates()[0])
        assert falling == pytest.approx([80, 60, 40, 20, 0])
        await rig.after(60)
        assert rig.rates() == (0, 0)

    run(test)


def test_a_refresh_out_of_schedule_does_not_make_rates_jump() -> None:
    async def test(rig: Rig) -> None:
        rig.broker.move("q")
        await rig.after(0)
        # 200 a second, looked at at uneven moments: some hardly apart, some far.
        for _ in range(30):
            for seconds in (0.005, 0.005, 0.24, 0.75, 0.1, 0.9, 1.0):
                rig.broker.move("q", round(200 * seconds))
                await rig.after(seconds)
                if rig.clock.now > 1002:
                    assert rig.rates()[0] == pytest.approx(200, rel=0.02)

    run(test)


def test_looking_all_the_time_neither_costs_samples_nor_changes_rates() -> None:
    async def test(rig: Rig) -> None:
        rig.broker.move("q")
        await rig.after(0)
        for _ in range(3000):
            rig.broker.move("q", 1, 1)
            await rig.after(0.01)
        assert rig.rates() == pytest.approx((100, 100), rel=0.01)
        assert len(rig.mirror._trends["q"]._samples) < 30

    run(test)


def test_a_rate_is_of_a_second_at_least() -> None:
    async def test(rig: Rig) -> None:
        rig.broker.move("q")
        await rig.after(0)
        rig.broker.move("q", 50)
        await rig.after(0.001)
        assert rig.rates()[0] == 50

    run(test)


def test_a_burst_after_a_long_silence_is_not_spread_over_the_silence() -> None:
    async def test(rig: Rig) -> None:
        rig.broker.move("q")
        await rig.after(0)
        for _ in range(600):
            await rig.after(1)
        rig.broker.move("q", 500)
        await rig.after(1)
        assert rig.rates()[0] == pytest.approx(500 / WINDOW_SECONDS)

    run(test)


def test_a_new_queue_has_come_since_the_last_look() -> None:
    async def test(rig: Rig) -> None:
        await rig.after(0)
        for _ in range(10):
            await rig.after(1)
        rig.broker.move("new", 1000, 250)
        await rig.after(1)
        assert rig.rates("new") == pytest.approx((1000 / WINDOW_SECONDS, 250 / WINDOW_SECONDS))

    run(test)


def test_rounds_that_are_far_apart_still_give_the_rate() -> None:
    async def test(rig: Rig) -> None:
        rig.broker.move("q")
        await rig.after(0)
        for _ in range(4):
            rig.broker.move("q", 3000)
            await rig.after(30)
            assert rig.rates()[0] == pytest.approx(100)

    run(test)


def test_a_row_that_was_asked_for_alone_is_shown() -> None:
    async def test(rig: Rig) -> None:
        rig.broker.move("q")
        await rig.after(0)
        rig.broker.move("q", 10)
        rig.broker.move("another", 30)
        rig.clock.now += 2
        for name in ("q", "another"):
            rig.mirror.put(rig.broker.rows[name])
        assert rig.rates() == (5, 0)
        assert rig.rates("another") == (15, 0)
        assert list(rig.mirror.names) == ["another", "q"]
        assert list(rig.mirror.rows) == ["q", "another"]

    run(test)


# --- Rounds ---


def test_all_at_first_then_what_has_changed() -> None:
    async def test(rig: Rig) -> None:
        for number in range(2 * PART + 1):
            rig.broker.move(f"q{number}")
        await rig.after(0)
        assert rig.broker.calls == [True, False, False]
        assert len(rig.mirror.rows) == 2 * PART + 1
        rig.broker.move("q7", 1)
        await rig.after(1)
        assert rig.broker.calls[3:] == [False]
        assert rig.mirror.rows["q7"]["offset_end"] == 1

    run(test)


def test_who_asks_during_a_round_gets_the_next_one_together_with_the_others() -> None:
    async def test(rig: Rig) -> None:
        rig.broker.move("q")
        go_on = asyncio.Event()
        rig.broker.on_call = go_on.wait
        first = asyncio.ensure_future(rig.mirror.refresh())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(rig.broker.calls) == 1
        rig.broker.move("q", 5)  # The round has passed by.
        others = [asyncio.ensure_future(rig.mirror.refresh()) for _ in range(50)]
        go_on.set()
        await first
        await asyncio.gather(*others)
        assert rig.mirror.rows["q"]["offset_end"] == 5
        assert len(rig.broker.calls) == 2

    run(test)


def test_one_who_goes_away_does_not_take_the_round_along() -> None:
    async def test(rig: Rig) -> None:
        rig.broker.move("q", 3)
        go_on = asyncio.Event()
        rig.broker.on_call = go_on.wait
        leaving = asyncio.ensure_future(rig.mirror.refresh())
        staying = asyncio.ensure_future(rig.mirror.refresh())
        await asyncio.sleep(0)
        leaving.cancel()
        go_on.set()
        await staying
        assert rig.mirror.rows["q"]["offset_end"] == 3
        assert leaving.cancelled()

    run(test)


def test_after_a_failed_round_everything_is_asked_for_again() -> None:
    async def test(rig: Rig) -> None:
        rig.broker.move("q")
        await rig.after(0)
        rig.broker.move("q", 9)

        async def fail() -> None:
            raise CallRefused("unavailable", "the broker has not answered")

        rig.broker.on_call = fail
        with pytest.raises(CallRefused, match="not answered"):
            await rig.after(1)
        rig.broker.on_call = None
        await rig.after(1)
        assert rig.broker.calls == [True, False, True]
        assert rig.mirror.rows["q"]["offset_end"] == 9

    run(test)


def test_the_schedule_leaves_the_broker_alone_for_a_hundred_times_what_a_round_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    real_sleep = asyncio.sleep

    async def test(rig: Rig) -> None:
        done = asyncio.Event()
        lengths = [0.001, 0.03, 2.0, 0.0]

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == len(lengths):
                done.set()
                await asyncio.Event().wait()
            await real_sleep(0)

        async def take_time() -> None:
            rig.clock.now += lengths[len(pauses)]

        monkeypatch.setattr("penstock.http.watching.mirror.asyncio.sleep", sleep)
        rig.broker.on_call = take_time
        rig.mirror.start()
        async with asyncio.timeout(10):
            await done.wait()
        await rig.mirror.stop()

    run(test)
    assert pauses == pytest.approx([1.0, 3.0, ROUND_SECONDS_MAX, 1.0])


def test_the_schedule_goes_on_whatever_has_ended_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.http.watching.mirror.ROUND_SECONDS_MIN", 0.0)

    async def test(rig: Rig) -> None:
        rig.broker.move("q", 9)

        async def fail_once() -> None:
            rig.broker.on_call = None
            raise MemoryError

        rig.broker.on_call = fail_once
        rig.mirror.start()
        async with asyncio.timeout(10):
            while "q" not in rig.mirror.rows:
                await asyncio.sleep(0)
        await rig.mirror.stop()
        assert rig.broker.calls[:2] == [True, True]

    run(test)


# --- Subscribers ---


def test_a_subscriber_gets_all_first_then_what_changes_and_what_comes_to_rest() -> None:
    async def test(rig: Rig) -> None:
        for name in ("a", "b", "c"):
            rig.broker.move(name)
        await rig.after(0)
        changes = rig.mirror.subscribe()
        await changes.wait()
        assert changes.take() == ["a", "b", "c"]
        await rig.after(1)
        assert changes.take() == []
        rig.broker.move("b", 50)
        await rig.after(1)
        assert changes.take() == ["b"]
        # Its rate changes for a while without anything happening, and 0 is told once.
        seen = []
        for _ in range(20):
            await rig.after(1)
            if changes.take():
                seen.append(rig.rates("b")[0])
        assert seen[-1] == 0
        assert all(rate > 0 for rate in seen[:-1])
        rig.mirror.unsubscribe(changes)
        rig.broker.move("a", 1)
        await rig.after(1)
        assert changes.take() == []
        assert rig.mirror.subscriber_count == 0

    run(test)


def test_a_queue_that_is_deleted_is_forgotten_and_its_subscribers_are_told() -> None:
    async def test(rig: Rig) -> None:
        for name in ("a", "b", "c"):
            rig.broker.move(name, 100)
        await rig.after(0)
        rig.broker.move("b", 100)
        await rig.after(1)
        changes = rig.mirror.subscribe()
        assert changes.take() == ["a", "b", "c"]
        rig.broker.delete("b")
        await rig.after(1)
        assert "b" in changes.take()
        assert (list(rig.mirror.rows), list(rig.mirror.names)) == (["a", "c"], ["a", "c"])
        # The next one of that name has come since the last look: no rate below 0, no past that is another's.
        rig.broker.move("b", 7)
        await rig.after(1)
        assert list(rig.mirror.names) == ["a", "b", "c"]
        assert 0 < rig.rates("b")[0] <= 7
        # Made again between two looks, it has another identity.
        rig.broker.rows["b"] = {**rig.broker.rows["b"], "identity": "another", "offset_end": 1}
        rig.broker.changed["b"] = None
        await rig.after(1)
        assert 0 < rig.rates("b")[0] <= 1
        assert list(rig.mirror.names) == ["a", "b", "c"]

    run(test)


def test_what_was_deleted_while_nobody_looked_is_missed_by_the_next_whole_round() -> None:
    async def test(rig: Rig) -> None:
        for name in ("a", "b"):
            rig.broker.move(name, 1)
        await rig.after(0)
        rig.broker.delete("b", told=False)

        async def fail() -> None:
            raise CallRefused("unavailable", "not now")

        rig.broker.on_call = fail
        with pytest.raises(CallRefused):
            await rig.after(1)
        rig.broker.on_call = None
        await rig.after(1)
        assert list(rig.mirror.names) == ["a"]

    run(test)


def test_a_slow_subscriber_has_names_and_no_more() -> None:
    async def test(rig: Rig) -> None:
        rig.broker.move("q")
        await rig.after(0)
        changes = rig.mirror.subscribe()
        for _ in range(100):
            rig.broker.move("q", 1)
            await rig.after(1)
        assert changes.take() == ["q"]
        assert rig.mirror.queue("q")["offset_end"] == 100

    run(test)


# --- Many ---


def test_ten_thousand_queues() -> None:
    async def test(rig: Rig) -> None:
        for number in range(10_000):
            rig.broker.move(f"q{number:05}")
        await rig.after(0)
        assert rig.mirror.names[9_999] == "q09999"
        assert len(rig.broker.calls) == 10
        changes = rig.mirror.subscribe()
        changes.take()
        for _ in range(8):
            for number in range(0, 10_000, 2):
                rig.broker.move(f"q{number:05}", 3, 2)
            await rig.after(1)
        assert len(changes.take()) == 5000
        assert rig.rates("q00000") == pytest.approx((3, 2))
        assert rig.rates("q00001") == (0, 0)

    run(test)


def test_an_age_is_by_the_time_of_the_log_where_the_clock_of_the_machine_was_set_back() -> None:
    async def test(rig: Rig) -> None:
        ahead_us = time.time_ns() // 1000 + 3600 * 1_000_000
        rig.broker.move("q", 1)
        rig.broker.rows["q"]["oldest_us"] = ahead_us - 60 * 1_000_000
        rig.broker.time_us = ahead_us
        await rig.after(0)
        assert 60 <= rig.mirror.queue("q")["oldest_seconds"] < 1000

    run(test)


def test_what_a_broken_round_has_found_is_told_by_the_next() -> None:
    """One that is gone is in no list, so that nothing else would tell of it."""

    async def test(rig: Rig) -> None:
        for number in range(PART + 2):
            rig.broker.move(f"q{number:04}", accepted=1)
        await rig.after(1)
        changes = rig.mirror.subscribe()
        changes.take()
        for number in range(1, PART + 2):
            rig.broker.move(f"q{number:04}", accepted=1)
        rig.broker.delete("q0000")

        async def break_the_second() -> None:
            if len(rig.broker.calls) - before == 2:
                raise CallRefused("unavailable", "no answer")

        before = len(rig.broker.calls)
        rig.broker.on_call = break_the_second
        with pytest.raises(CallRefused):
            await rig.after(1)
        rig.broker.on_call = None
        await rig.after(1)
        assert "q0000" not in rig.mirror.rows
        assert "q0000" in changes.take()

    run(test)


def test_a_queue_at_rest_is_little_more_than_its_row() -> None:
    count = 2000

    def rows() -> Iterator[Fields]:
        for number in range(count):
            # As they come from the link: each with numbers and texts of its own.
            row: Fields = {**dict.fromkeys(SHOWN, 0), "bytes_max": 0}
            row |= {"name": f"queue-{number}", "identity": f"{number:010}", "oldest_us": 10**15 + number}
            row |= {"offset_end": 1, "delivered": 0, "counts": {"accepted": 1}, "times": None}
            yield json.loads(json.dumps(row))

    async def test(rig: Rig) -> None:
        await rig.after(0)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for row in rows():
                rig.mirror.put(row)
            del row
            await rig.after(1)
            await rig.after(2 * WINDOW_SECONDS)
            rig.mirror.recorder.close(0, None)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert (after - before) / count < 1000

    run(test)
