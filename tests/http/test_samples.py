"""How queues and the broker did over time: what the recorder makes of rows, what is kept over restarts of
either process, and the calls that show it."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock import connect
from penstock.control.frames import Buffer, Fields, Frame
from penstock.http.history.folder import HOUR
from penstock.http.history.keeper import Keeper
from penstock.http.history.recorder import RECENT_STEPS, Recorder
from penstock.http.history.steps import COUNTED, STANDING, STEP_SECONDS, WHOLE, Key, Step
from penstock.http.watching.mirror import Mirror
from penstock.log.info import SYNC_BOUNDS_SECONDS
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.server.harness import BrokerProcess, until

Q: Key = ("q", "0" * 12)
STEPS_WAIT = 6 * STEP_SECONDS
"""For a step to be over, where other tests run too."""


def row(name: str = "q", accepted: int = 0, identity: str = "0" * 12, **more: Any) -> Fields:
    counts = more.pop("counts", {})
    return {
        "name": name,
        "identity": identity,
        "offset_end": accepted,
        "delivered": 0,
        "counts": counts,
        **dict.fromkeys(("ready", "held", "delayed", "dead", "bytes", "consumers", "oldest_us"), 0),
        **more,
    }


def counted(step: Step) -> dict[str, int]:
    return {name: count for name, count in zip(COUNTED, step.counted, strict=True) if count}


def stands(step: Step) -> dict[str, int]:
    return {name: value for name, value in zip(STANDING, step.standing, strict=True) if value}


# --- the recorder ---------------------------------------------------------------------------------------


def test_a_step_has_what_happened_in_it_and_how_it_ended() -> None:
    recorder = Recorder()
    recorder.put(row(accepted=100, counts={"acked": 40, "dead:expired": 2}, ready=3))
    first = recorder.close(1000, None, full=True).steps
    # What was before the first look is in no step.
    assert (counted(first[Q]), stands(first[Q])) == ({}, {"ready": 3})
    happened = {
        "acked": 50,
        "dead:expired": 3,
        "dead:rejected": 1,
        "requeued": 4,
        "returned:consumer-lost": 2,
    }
    recorder.put(row(accepted=130, counts=happened, ready=9, held=1, delivered=20, oldest_us=1_005_340_000))
    second = recorder.close(1010, None).steps
    assert counted(second[Q]) == {
        "accepted": 30,
        "acked": 10,
        "delivered": 20,
        "requeued": 6,
        "dead:expired": 1,
        "dead:rejected": 1,
    }
    assert stands(second[Q]) == {"ready": 9, "held": 1, "oldest": 10_053}
    assert counted(second[WHOLE]) == {**counted(second[Q]), "looks": 1}
    # At rest it costs nothing, but where every queue that is not empty is told of.
    assert recorder.close(1020, None).steps.keys() == {WHOLE}
    assert recorder.close(1030, None, full=True).steps.keys() == {WHOLE, Q}


def test_times_of_a_step_are_those_since_the_last_one_and_the_whole_has_all() -> None:
    recorder = Recorder()
    for name in ("q", "r"):
        recorder.put(row(name, times=[[3, 1, 9, 2], [5, 7]]))
        recorder.put(row(name, times=[[9, 1], []]))
    steps = recorder.close(1000, None).steps
    assert steps[Q].spreads == ({3: 1, 9: 3}, {5: 7}, {})
    assert steps[WHOLE].spreads == ({3: 2, 9: 6}, {5: 14}, {})
    recorder.put(row(accepted=1))
    assert recorder.close(1010, None).steps[Q].spreads == ({}, {}, {})


def test_all_of_a_new_queue_came_in_its_first_step_and_one_of_its_name_is_another() -> None:
    recorder = Recorder()
    recorder.put(row(accepted=5, ready=5), is_new=True)
    step = recorder.close(1000, None).steps[Q]
    assert counted(step) == {"looks": 1, "accepted": 5}
    recorder.forget("q")
    recorder.put(row(accepted=2, ready=2, identity="1" * 12), is_new=True)
    steps = recorder.close(1010, None).steps
    assert steps.keys() == {WHOLE, ("q", "1" * 12)}
    assert stands(steps[WHOLE]) == {"ready": 2}
    assert counted(steps[WHOLE]) == {"looks": 1, "accepted": 2}


def test_what_happened_in_a_queue_that_is_gone_is_in_the_whole() -> None:
    recorder = Recorder()
    recorder.put(row(accepted=5, ready=5), is_new=True)
    recorder.forget("q")
    steps = recorder.close(1000, None).steps
    assert steps.keys() == {WHOLE}
    assert (counted(steps[WHOLE]), stands(steps[WHOLE])) == ({"looks": 1, "accepted": 5}, {})


def test_counters_that_begin_anew_do_not_count_backwards() -> None:
    recorder = Recorder()
    recorder.put(row(accepted=100, counts={"acked": 90}, delivered=95))
    recorder.close(1000, None)
    recorder.put(row(accepted=103, counts={"acked": 2}, delivered=4))
    assert counted(recorder.close(1010, None).steps[Q]) == {"accepted": 3, "acked": 2, "delivered": 4}


def test_of_too_many_queues_those_are_told_of_in_which_most_happens() -> None:
    recorder = Recorder(queues_max=10)
    for number in range(30):
        recorder.put(row(f"q{number}", accepted=0, ready=30 - number))
    closed = recorder.close(1000, None, full=True)
    assert closed.is_cut
    for number in range(30):
        recorder.put(row(f"q{number}", accepted=number, ready=1))
    closed = recorder.close(1010, None)
    assert closed.is_cut
    assert {key[0] for key in closed.steps} == {"", *(f"q{number}" for number in range(20, 30))}
    assert counted(closed.steps[WHOLE])["accepted"] == sum(range(30))
    assert stands(closed.steps[WHOLE])["ready"] == 30
    for number in range(8):
        recorder.put(row(f"q{number}", accepted=number + 1, ready=1))
    closed = recorder.close(1020, None, full=True)
    assert len(closed.steps) == 11
    assert {f"q{number}" for number in range(8)} <= {key[0] for key in closed.steps}


def test_the_engine_is_told_of_with_the_whole() -> None:
    recorder = Recorder()

    def engine(*buckets: int) -> Fields:
        return {"connections": 4, "disk_bytes_free": 9, "sync": {"buckets": list(buckets)}}

    # What was synced before the first look is in no step.
    assert recorder.close(1000, engine(5, 1)).steps[WHOLE].spreads[2] == {}
    step = recorder.close(1010, engine(7, 1)).steps[WHOLE]
    assert step.spreads[2] == {0: 2}
    assert stands(step) == {"connections": 4, "disk_bytes_free": 9}
    # Where the first process does not answer, free room is what it was and not none.
    assert stands(recorder.close(1020, None).steps[WHOLE]) == {"connections": 4, "disk_bytes_free": 9}
    assert recorder.close(1030, engine(7, 4)).steps[WHOLE].spreads[2] == {1: 3}
    assert len(recorder.recent) == 4
    for at in range(1040, 1200, STEP_SECONDS):
        recorder.close(at, None)
    assert len(recorder.recent) == RECENT_STEPS


# --- the keeper -----------------------------------------------------------------------------------------


class Rig:
    """A keeper whose time is a number, and which is told when a step is over."""

    def __init__(self, data: Path, days: int = 14) -> None:
        self.now = 1_790_000_000 // HOUR * HOUR
        self.mirror = Mirror(self)
        self.mirror.now_us = lambda: self.now * 1_000_000  # type: ignore[method-assign]
        self.keeper = Keeper(str(data), days, self, self.mirror)

    async def call(self, name: str, fields: Fields | None = None, *buffers: Buffer) -> Frame:
        told = {"opening": 1, "version": "1", "connections": 0, "disk_bytes_free": 0}
        return Frame({**told, "sync": {"buckets": [0] * 13}}, memoryview(b""))

    async def begin(self) -> None:
        await self.keeper._run(self.keeper._open, self.now)
        self.keeper._last = self.now

    async def pass_seconds(self, seconds: int) -> None:
        for _ in range(seconds // STEP_SECONDS):
            self.now += STEP_SECONDS
            await self.keeper._look()

    async def told(
        self, key: Key = Q, seconds: int = HOUR, step: int | None = None
    ) -> list[tuple[int, int, int]]:
        past = await self.keeper.read(key, self.now - seconds, self.now, step)
        return [(it.step.at, it.step.counted[1], it.step.standing[0]) for it in past.told]

    async def end(self) -> None:
        if self.keeper._task is None:
            await self.keeper._turn_page()
        await self.keeper.stop()


def test_steps_are_told_at_once_and_after_they_were_written_and_folded(tmp_path: Path) -> None:
    async def run() -> None:
        rig = Rig(tmp_path)
        await rig.begin()
        start = rig.now
        rig.mirror.recorder.put(row(accepted=3, ready=3), is_new=True)
        await rig.pass_seconds(STEP_SECONDS)
        assert await rig.told() == [(start, 3, 3)]
        assert not list((tmp_path / "history").iterdir())  # not before the minute is over
        await rig.pass_seconds(60)
        assert [it.name for it in (tmp_path / "history").iterdir()] == [f"now-{start}.hist"]
        await rig.pass_seconds(HOUR)
        rig.mirror.recorder.put(row(accepted=4, ready=4))
        await rig.pass_seconds(30)
        told = await rig.told(seconds=2 * HOUR, step=10)
        assert len(told) == (60 + HOUR + 40) // STEP_SECONDS
        assert [it for it in told if it[1]] == [(start, 3, 3), (start + HOUR + 70, 1, 4)]
        assert {it[2] for it in told[:-3]} == {3}
        assert sum(it[1] for it in await rig.told(seconds=2 * HOUR, step=600)) == 4
        await rig.end()
        # Another process goes on, and what it did not see is a gap.
        rig = Rig(tmp_path)
        rig.now = start + HOUR + 400
        await rig.begin()
        rig.mirror.recorder.put(row(accepted=9, ready=2))
        await rig.pass_seconds(20)
        told = await rig.told(step=10)
        assert [it[0] - start - HOUR for it in told[-3:]] == [90, 400, 410]
        assert [it[1:] for it in told[-2:]] == [(0, 2), (0, 2)]
        await rig.end()

    asyncio.run(run())


def test_a_time_that_jumps_ahead_leaves_a_gap_and_one_that_stands_still_no_step_twice(tmp_path: Path) -> None:
    async def run() -> None:
        rig = Rig(tmp_path)
        await rig.begin()
        start = rig.now
        rig.mirror.recorder.put(row(accepted=1, ready=1), is_new=True)
        await rig.pass_seconds(30)
        rig.now += 5 * HOUR
        rig.mirror.recorder.put(row(accepted=2, ready=0))
        await rig.keeper._look()
        rig.now -= 7  # A process that is asked twice within a step.
        await rig.keeper._look()
        await rig.pass_seconds(20)
        told = await rig.told(seconds=6 * HOUR, step=10)
        ats = [it[0] - start for it in told]
        assert ats[:3] == [0, 10, 20]
        assert ats == sorted(set(ats))
        assert ats[3] >= 5 * HOUR
        assert told[3][1:] == (1, 0)
        await rig.end()

    asyncio.run(run())


def test_a_disk_that_fails_is_told_of_once_and_nothing_is_lost_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        rig = Rig(tmp_path)
        await rig.begin()
        start = rig.now
        (tmp_path / "history").rmdir()
        (tmp_path / "history").write_bytes(b"in the way")
        rig.mirror.recorder.put(row(accepted=3, ready=3), is_new=True)
        with caplog.at_level(logging.WARNING, "penstock.history"):
            await rig.pass_seconds(300)
        assert len(caplog.records) == 1
        told = await rig.told(step=10)
        assert [it[1] for it in told] == [3] + [0] * 29
        (tmp_path / "history").unlink()
        (tmp_path / "history").mkdir()
        await rig.pass_seconds(60)
        assert (tmp_path / "history" / f"now-{start}.hist").stat().st_size
        assert len(await rig.told(step=10)) == 36
        await rig.end()

    asyncio.run(run())


def test_switched_off_there_is_an_hour_in_memory(tmp_path: Path) -> None:
    async def run() -> None:
        rig = Rig(tmp_path, days=0)
        await rig.begin()
        rig.mirror.recorder.put(row(accepted=3, ready=3), is_new=True)
        await rig.pass_seconds(3 * HOUR)
        told = await rig.told(seconds=3 * HOUR)
        assert HOUR // STEP_SECONDS <= len(told) <= (HOUR + 120) // STEP_SECONDS
        await rig.keeper.mark("deploy", "1.2")
        assert [it["text"] for it in await rig.keeper.marked(0, 1 << 62)] == ["1.2"]
        assert not list(tmp_path.iterdir())
        await rig.end()

    asyncio.run(run())


# --- the calls ------------------------------------------------------------------------------------------


def test_what_a_broker_tells_of_its_queue(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api, connect(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        api.get("/v1/queues")  # from now on, a queue is new
        api.send("orders", *[b"x"] * 6)
        api.send("orders", b"later", delay=600)
        consumed = mq.consume("orders", prefetch=1)
        for _ in range(2):
            next(consumed).ack()
        next(consumed).reject()

        def told() -> bool:
            samples = api.get("/v1/queues/orders/samples")["samples"]
            return bool(samples) and samples[-1]["ready"] == 2

        until(told, "the step to be over", STEPS_WAIT)
        answer = api.get("/v1/queues/orders/samples", seconds=300, buckets=True)
        assert answer["step_seconds"] == STEP_SECONDS
        samples = answer["samples"]
        assert sum(it["rate_in"] for it in samples) * STEP_SECONDS == pytest.approx(7)
        assert sum(it["rate_out"] for it in samples) * STEP_SECONDS == pytest.approx(2)
        last = samples[-1]
        assert (last["ready"], last["held"], last["delayed"], last["dead"]) == (2, 1, 1, 1)
        assert last["consumers"] == 1
        assert 0 <= last["oldest_seconds"] <= STEPS_WAIT
        age = (datetime.now(UTC) - datetime.fromisoformat(last["time"])).total_seconds()
        assert -0.5 < age < STEPS_WAIT
        assert sum(it["accepted"] for it in samples) == 7
        assert sum(it["delivered"] for it in samples) == 4
        assert sum(it["died"].get("rejected", 0) for it in samples) == 1
        # Four were handed out, and three of them were settled.
        for field, count in (("waiting", 4), ("working", 3)):
            found = [it[field] for it in samples if it[field] is not None]
            assert sum(it["count"] for it in found) == count
            for it in found:
                assert 0 <= it["p50_seconds"] <= it["p99_seconds"] <= STEPS_WAIT
                assert sum(bucket["count"] for bucket in it["buckets"]) == it["count"]
        whole = api.get("/v1/samples", seconds=300)["samples"]
        assert sum(it["accepted"] for it in whole) == 7
        assert whole[-1]["connections"] >= 1
        assert whole[-1]["disk_bytes_free"] > 0
        assert sum(it["syncs"]["count"] for it in whole) >= 1
        assert all((it["syncs"]["p99_seconds"] or 0) <= SYNC_BOUNDS_SECONDS[-1] for it in whole)


@pytest.mark.long
def test_a_time_and_a_step_can_be_asked_for(broker: BrokerProcess, api: Api) -> None:
    api.send("ranged", b"x")
    until(lambda: bool(api.get("/v1/queues/ranged/samples")["samples"]), "a step to be over", STEPS_WAIT)
    now = datetime.now(UTC)

    def asked(**query: object) -> Fields:
        answer: Fields = api.get("/v1/queues/ranged/samples", **query)
        return answer

    for step, given in ((10, 1), (10, 10), (30, 11), (3600, 3600)):
        assert asked(step=given)["step_seconds"] == step
    start = (now - timedelta(minutes=10)).isoformat().replace("+00:00", "Z")
    assert asked(**{"from": start})["samples"]
    assert asked(**{"from": start, "to": start})["samples"] == []
    later = (now + timedelta(days=1)).isoformat().replace("+00:00", "Z")
    assert asked(**{"from": later})["samples"] == []
    assert asked(**{"from": "2020-01-01T00:00:00Z"})["step_seconds"] == 1800
    last = asked(step=3600)["samples"][-1]["time"]
    assert datetime.fromisoformat(last) <= datetime.now(UTC) + timedelta(seconds=1)  # It runs still.


def test_what_is_refused(broker: BrokerProcess, api: Api) -> None:
    api.send("some", b"x")
    assert api.get("/v1/queues/some/samples")["step_seconds"] == STEP_SECONDS
    assert api.ask("GET", "/v1/queues/none/samples").problem == "queue-not-found"
    for path in ("/v1/queues/some/samples", "/v1/samples"):
        assert api.ask("GET", path, seconds=14 * 86_400 + 1).problem == "bad-request"
        assert api.ask("GET", path, seconds=1).problem == "bad-request"
        assert api.ask("GET", path, step=0).problem == "bad-request"
        assert api.ask("GET", path, from_="yesterday").problem == "bad-request"


def history_of(broker: BrokerProcess) -> Path:
    return broker.folder / "data" / "history"


@pytest.mark.long
def test_history_outlives_both_processes(start_broker: StartBroker) -> None:
    """A clean stop, the end of the second process alone, and kill -9 of all; each leaves what was before."""
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.get("/v1/queues")
        api.send("kept", *[b"x"] * 5)
        until(lambda: accepted(api) == 5, "a step to be over", STEPS_WAIT)
    broker.stop()
    broker.start()
    with Api(broker.ports["http"]) as api:
        assert accepted(api) == 5

        def kinds() -> list[str]:
            return [it["kind"] for it in api.get("/v1/marks")["marks"]]

        until(lambda: kinds() == ["start", "stop", "start"], "the marks", STEPS_WAIT)
        os.kill(second_of(broker), signal.SIGKILL)
    until(lambda: answers(broker), "the API to be back", STEPS_WAIT)
    with Api(broker.ports["http"]) as api:
        assert accepted(api) == 5
        until(lambda: api.get("/v1/marks")["marks"][-1]["kind"] == "restart", "its mark", STEPS_WAIT)
    broker.kill()
    for newest in history_of(broker).glob("now-*"):
        with open(newest, "ab") as file:
            file.write(b"PSH1 torn")
    broker.start()
    with Api(broker.ports["http"]) as api:
        assert accepted(api) == 5
        api.send("kept", b"x")
        until(lambda: accepted(api) == 6, "another step to be over", STEPS_WAIT)
        # Deleted and made again, it is another.
        assert api.ask("DELETE", "/v1/queues/kept").status == 200
        api.send("kept", b"x")
        until(lambda: accepted(api) == 1, "a step of the new one to be over", STEPS_WAIT)
        assert all(it["ready"] == 1 for it in api.get("/v1/queues/kept/samples")["samples"])
    verify = [sys.executable, "-m", "penstock", "verify", str(broker.folder / "data")]
    broker.stop()
    assert subprocess.run(verify, capture_output=True, check=False).returncode == 0


def accepted(api: Api) -> int:
    return sum(it["accepted"] for it in api.get("/v1/queues/kept/samples")["samples"])


def answers(broker: BrokerProcess) -> bool:
    try:
        with Api(broker.ports["http"]) as api:
            return api.ask("GET", "/readyz").status == 200
    except OSError:
        return False


def second_of(broker: BrokerProcess) -> int:
    """The second process: the only child."""
    path = Path(f"/proc/{broker.pid}/task/{broker.pid}/children")
    (child,) = path.read_text().split()
    return int(child)
