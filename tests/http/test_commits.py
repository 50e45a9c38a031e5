"""Commits against a real log, with a process that may end at any moment.

The second process's part runs here as it is, on real files; the link is a function call into a real log.
Every call of the link and every use of the disk is a moment at which the process can die, before it and
behind it: all of these moments are tried, one after the other, with the log dying too and without.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from itertools import count
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import pytest

from penstock.common.clock import Clock
from penstock.control.batches import unpack_batch
from penstock.control.frames import Buffer, Fields, Frame
from penstock.http.link import CallRefused, Link
from penstock.http.problems import Problem
from penstock.http.stages import commits, stages
from penstock.http.stages import files as stage_files
from penstock.http.stages.chunks import Chunk, load_chunk
from penstock.http.stages.files import Intent, Stage, StageFolder
from penstock.http.stages.stages import Committed, Stages
from penstock.log.disk import RealDisk
from penstock.log.errors import DiskFull, LogError, LogRefused, QueueFull
from penstock.log.log import Log
from penstock.log.results import Step, Stored, TransactionDone
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.policy import Policies
from penstock.model.words import Outcome
from tests.log.inline import InlineWorker

NOW_US = 1_700_000_000_000_000
WAIT_SECONDS = 20.0
SMALL = LogSettings(segment_bytes=64 * 1024, block_bytes=2048, cache_bytes=4096, snapshot_blocks=16)
KINDS = {QueueFull: "queue-full", DiskFull: "disk-full", LogRefused: "refused"}

P = ParamSpec("P")
T = TypeVar("T")


class Died(BaseException):
    """The process is gone at this moment."""


class Moments:
    """Counts the moments at which a process could die, and has it die at one of them."""

    def __init__(self) -> None:
        self.passed = 0
        self.last = -1

    def here(self) -> None:
        if self.last >= 0 and self.passed >= self.last:
            raise Died
        self.passed += 1


class LogLink:
    """The calls of the link that commits need, carried out by an engine."""

    def __init__(self, log: Log, moments: Moments) -> None:
        self.log = log
        self.moments = moments
        self.refusals: list[CallRefused] = []  # to give instead of answers, in the middle
        self.before_answer: Callable[[Fields], Awaitable[None]] | None = None

    async def call(self, name: str, fields: Fields | None = None, *buffers: Buffer) -> Frame:
        await asyncio.sleep(0)
        self.moments.here()
        assert fields is not None
        if name == "transaction":
            stored = self.log.transaction(fields["key"])
            answer = {
                "stored": _rows(stored),
                "steps": self.log.transaction_steps(fields["key"]),
                "fingerprint": self.log.transaction_fingerprint(fields["key"]),
            }
        else:
            answer = self._transact(fields, b"".join(buffers))
            if self.before_answer is not None:
                await self.before_answer(fields)
        self.moments.here()
        return Frame(answer, memoryview(b""))

    def _transact(self, fields: Fields, body: bytes) -> Fields:
        if self.refusals and fields.get("step", [0])[0]:
            raise self.refusals.pop()
        at, parts = 0, []
        for part in fields["parts"]:
            batch, at = unpack_batch(part["batch"], memoryview(body), at)
            parts.append((part["queue"], batch))
        came: list[TransactionDone | LogError] = []
        step = Step(*fields["step"]) if "step" in fields else None
        try:
            said = fields["fingerprint"]
            self.log.transact(fields["key"], parts, NOW_US, came.append, step=step, fingerprint=said)
        except LogRefused as error:
            raise CallRefused(KINDS[type(error)], str(error)) from None
        self.log.flush(NOW_US)
        self.log.wait()
        (done,) = came
        assert isinstance(done, TransactionDone), done
        return {"stored": _rows(done.stored), "repeated": done.repeated, "steps": done.steps}


def _rows(stored: list[Stored] | None) -> list[list[Any]] | None:
    return None if stored is None else [[it.queue, it.first, it.end, it.origin.decode()] for it in stored]


class MortalStages(Stages):
    """Stages whose process may die whenever it uses the disk."""

    moments: Moments

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self.moments.here()
        result = await super()._in_thread(function, *args, **kwargs)
        self.moments.here()
        return result


class Rig:
    """A log and the stages beside it, through any number of lives."""

    def __init__(self, folder: Path, policies: dict[str, object] | None = None) -> None:
        self.folder = folder
        self.policies = Policies(policies or {})
        self.moments = Moments()
        self.open_engine()

    def open_engine(self) -> None:
        self.log = Log.open(
            RealDisk(str(self.folder)),
            NOW_US,
            settings=SMALL,
            policies=self.policies,
            writer=InlineWorker(),
            keeper=InlineWorker(),
        )

    async def start(self, last: int = -1) -> None:
        """A new process, which dies at a moment, or not."""
        self.moments.passed, self.moments.last = 0, last
        self.link = LogLink(self.log, self.moments)
        link = cast(Link, self.link)  # as far as stages use it
        self.stages = MortalStages(str(self.folder), link, seconds=3600, bytes_max=1 << 30)
        self.stages.moments = self.moments
        await self.stages.start()

    async def die(self, *, engine_too: bool) -> None:
        """Of the process nothing is left but its files."""
        self.moments.last = -1
        await self.stages.stop()
        if engine_too:
            self.log.abandon()
            self.open_engine()

    async def end(self) -> None:
        await self.stages.stop()
        self.log.abandon()
        assert not self.log.damage

    async def stage(self, key: str, *parts: tuple[str, list[bytes]]) -> Stage:
        return await self.stages.stage(key, [(queue, Batch.of(it, protocol="http")) for queue, it in parts])

    async def settled(self) -> bool:
        """All large commits that were cut off are finished, or have died again."""
        async with asyncio.timeout(WAIT_SECONDS):
            while self.stages._large and len(self.stages._tasks) > 1:
                await asyncio.sleep(0.001)
        return not self.stages._large

    def stored(self) -> dict[str, Counter[bytes]]:
        """What the log has, by queue."""
        self.log.flush(NOW_US)
        self.log.wait()
        return {
            queue: Counter(m for it in self.log.read(queue, 0, 1 << 40) for m in it.messages())
            for queue in self.log.queues()
        }

    def files(self) -> list[str]:
        return sorted(path.suffix for path in (self.folder / "stages").iterdir() if path.suffix)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds so small that a few messages are a large commit, and pauses that nobody notices."""
    monkeypatch.setattr(stage_files, "PIECE_BYTES", 40)
    monkeypatch.setattr(stages, "AT_ONCE_BYTES", 200)
    monkeypatch.setattr(stages, "CHUNK_BYTES", 100)
    monkeypatch.setattr(commits, "PAUSE_SECONDS_MIN", 0.001)
    monkeypatch.setattr(commits, "PAUSE_SECONDS_MAX", 0.01)


@pytest.fixture
def run(tmp_path: Path) -> "Run":
    """Runs a story with a fresh rig, and ends that."""

    def run(story: Callable[[Rig], Coroutine[Any, Any, None]], **policies: object) -> None:
        async def whole() -> None:
            rig = Rig(tmp_path, policies)
            await rig.start()
            try:
                await story(rig)
            finally:
                await rig.end()

        asyncio.run(whole())

    return run


Run = Callable[..., None]
MANY = [b"%02d" % number + b"." * 18 for number in range(30)]
FEW = [b"few-1", b"few-2"]
WANTED = {"orders": Counter(MANY[:25]), "mails": Counter(MANY[25:])}


async def stage_many(rig: Rig) -> list[str]:
    """Three stages that count, and one of a try that failed."""
    ids = [
        (await rig.stage("key", ("orders", MANY[:12]))).id,
        (await rig.stage("key", ("orders", MANY[12:20]), ("mails", MANY[25:]))).id,
        (await rig.stage("key", ("orders", MANY[20:25]))).id,
    ]
    await rig.stage("key", ("orders", MANY[12:18]))
    return ids


async def all_lives(folder: Path, one_life: Callable[[Rig, int], Coroutine[Any, Any, bool]]) -> int:
    """Live with death at every moment, until there is none left; how many there are."""
    for last in count():
        (folder / str(last)).mkdir()
        rig = Rig(folder / str(last))
        try:
            if not await one_life(rig, last):
                return last
        finally:
            await rig.end()
    raise AssertionError("it never ends")


# --- every moment ---


@pytest.mark.parametrize("engine_too", [False, True], ids=["second dies", "both die"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_whenever_a_process_dies_everything_is_stored_once(
    tmp_path: Path, large: bool, engine_too: bool
) -> None:
    async def one_life(rig: Rig, last: int) -> bool:
        """Commit, die at that moment, live again, and commit again; whether it died at all."""
        await rig.start()
        if large:
            ids = await stage_many(rig)
        else:
            ids = [(await rig.stage("key", ("orders", FEW))).id]
            await rig.stage("key", ("orders", [b"of a try that failed"]))
        wanted = WANTED if large else {"orders": Counter(FEW)}
        first: Committed | None = None
        rig.moments.passed, rig.moments.last = 0, last
        with contextlib.suppress(Died, Problem):
            first = await rig.stages.commit("key", ids)
        await rig.die(engine_too=engine_too)
        intended = ".intent" in rig.files()
        await rig.start()
        await rig.settled()
        # All or nothing, before anybody asks again; and all, once there was an intent or an answer.
        found = {queue: messages for queue, messages in rig.stored().items() if messages}
        assert found in ({}, wanted), f"at moment {last}: {found}"
        assert found == wanted or not (intended or first), f"at moment {last}"
        again = await rig.stages.commit("key", ids)
        assert rig.stored() == wanted, f"at moment {last}"
        assert again.repeated == bool(found), f"at moment {last}"
        assert first is None or again.stored == first.stored
        assert (await rig.stages.standing("key")).stored == again.stored
        assert rig.files() == []
        # Stages of somebody else, which are gone: nobody can say that what they brought is stored.
        with pytest.raises(Problem, match="committed with other stages"):
            await rig.stages.commit("key", ["f" * 32])
        assert rig.stored() == wanted, f"at moment {last}"
        assert await rig.stages.abort("key")
        return first is None

    moments = asyncio.run(all_lives(tmp_path, one_life))
    assert moments >= (25 if large else 8), "so many moments there are at least"


def test_a_second_death_on_the_way_back_changes_nothing(tmp_path: Path) -> None:
    """Die in the middle of a large commit, and again at every moment of the next start."""

    async def one_life(rig: Rig, last: int) -> bool:
        await rig.start()
        ids = await stage_many(rig)
        rig.moments.passed, rig.moments.last = 0, 16
        with pytest.raises((Died, Problem)):
            await rig.stages.commit("key", ids)
        await rig.die(engine_too=True)
        alive = False
        with contextlib.suppress(Died):
            await rig.start(last)
            alive = await rig.settled()
        await rig.die(engine_too=False)
        await rig.start()
        await rig.settled()
        assert rig.stored() == WANTED, f"at moment {last}"
        assert rig.files() == []
        return not alive

    assert asyncio.run(all_lives(tmp_path, one_life)) > 15


# --- refusals ---


def test_a_refusal_in_the_middle_is_told_and_the_rest_follows_by_itself(run: Run) -> None:
    async def story(rig: Rig) -> None:
        ids = await stage_many(rig)
        rig.link.refusals = [CallRefused("disk-full", "no room"), CallRefused("unavailable", "no answer")]
        with pytest.raises(CallRefused, match="no answer"):
            await rig.stages.commit("key", ids)
        with pytest.raises(Problem, match="cannot be aborted"):
            await rig.stages.abort("key")
        await rig.settled()
        assert rig.stored() == WANTED
        assert (await rig.stages.commit("key", ids)).repeated

    run(story)


def test_a_full_queue_takes_the_rest_when_consumers_have_made_room(run: Run) -> None:
    async def story(rig: Rig) -> None:
        ids = await stage_many(rig)
        with pytest.raises(CallRefused, match="max-bytes") as refused:
            await rig.stages.commit("key", ids)
        assert refused.value.kind == "queue-full"
        standing = await rig.stages.standing("key")
        assert (standing.stored, standing.committing) == (None, True)
        taken: Counter[bytes] = Counter()
        async with asyncio.timeout(WAIT_SECONDS):
            while rig.stages._large:
                for slice_ in rig.log.take("orders", "ann", 100, NOW_US):
                    taken.update(slice_.messages())
                    ranges = [(slice_.offset_start, slice_.offset_end)]
                    rig.log.settle("orders", "ann", Outcome.ACK, ranges, NOW_US)
                await asyncio.sleep(0.001)
        assert rig.stored() == WANTED
        assert taken <= WANTED["orders"]

    run(story, orders={"max-bytes": 250})


def test_where_the_first_step_is_refused_nothing_has_happened(run: Run) -> None:
    async def story(rig: Rig) -> None:
        ids = await stage_many(rig)
        with pytest.raises(CallRefused, match="max-bytes"):
            await rig.stages.commit("key", ids)
        assert rig.files() == [".stage"] * 4
        assert rig.log.queues() == []
        standing = await rig.stages.standing("key")
        assert (standing.committing, len(standing.stages)) == (False, 4)
        assert await rig.stages.abort("key") is False
        with pytest.raises(Problem, match="no stage"):
            await rig.stages.commit("key", ids)

    run(story, orders={"max-bytes": 50})


def test_concurrent_commits_are_one(run: Run) -> None:
    async def story(rig: Rig) -> None:
        for key in ("large", "small"):
            ids = [(await rig.stage(key, (key, MANY if key == "large" else FEW))).id]
            outcomes = await asyncio.gather(*(rig.stages.commit(key, ids) for _ in range(10)))
            assert sorted(it.repeated for it in outcomes) == [False] + [True] * 9
            assert len({tuple(it.stored) for it in outcomes}) == 1
        assert rig.stored() == {"large": Counter(MANY), "small": Counter(FEW)}

    run(story)


def test_many_large_commits_at_a_time_all_end(run: Run) -> None:
    async def story(rig: Rig) -> None:
        keys = [f"key-{number}" for number in range(8)]
        ids = {key: (await rig.stage(key, ("orders", [key.encode() + m for m in MANY]))).id for key in keys}
        rig.link.refusals = [CallRefused("queue-full", "full")] * 5

        async def commit(key: str) -> list[Any]:
            while True:
                try:
                    return (await rig.stages.commit(key, [ids[key]])).stored
                except CallRefused:
                    await asyncio.sleep(0.001)

        ranges = [it for stored in await asyncio.gather(*map(commit, keys)) for it in stored]
        assert sum(it.end - it.first for it in ranges) == len(MANY) * len(keys)
        assert rig.stored() == {"orders": Counter(key.encode() + m for key in keys for m in MANY)}

    run(story)


def test_chunks_follow_in_order_while_others_wait_for_their_sync(run: Run) -> None:
    """The receipts of three chunks come when all three have been sent, and not before."""
    sent: list[int] = []
    on_their_way = 0
    three = asyncio.Event()

    async def hold_back(fields: Fields) -> None:
        nonlocal on_their_way
        sent.append(fields["step"][0])
        if not sent[-1]:
            return
        on_their_way += 1
        assert on_their_way <= commits.CHUNKS_AT_WORK
        if on_their_way == commits.CHUNKS_AT_WORK:
            three.set()
        await three.wait()
        on_their_way -= 1

    async def story(rig: Rig) -> None:
        rig.link.before_answer = hold_back
        ids = await stage_many(rig)
        async with asyncio.timeout(WAIT_SECONDS):
            await rig.stages.commit("key", ids)
        assert len(sent) > 1 + commits.CHUNKS_AT_WORK
        assert sent == list(range(len(sent)))
        assert rig.stored() == WANTED

    run(story)


def test_the_steps_behind_a_refused_one_are_refused_and_sent_again(run: Run) -> None:
    sent: list[int] = []

    async def note(fields: Fields) -> None:
        sent.append(fields["step"][0])

    async def story(rig: Rig) -> None:
        rig.link.before_answer = note
        rig.link.refusals = [CallRefused("queue-full", "full")]
        ids = await stage_many(rig)
        with pytest.raises(CallRefused, match="full"):
            await rig.stages.commit("key", ids)
        await rig.settled()
        assert sent == list(range(len(sent)))  # what the log has taken, each step once
        assert rig.stored() == WANTED

    run(story)


# --- what cannot be finished ---


def test_a_stage_that_is_damaged_is_found_before_anything_is_stored(run: Run) -> None:
    async def story(rig: Rig) -> None:
        ids = await stage_many(rig)
        path = rig.folder / "stages" / f"{ids[2]}.stage"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        for chosen in (ids, ids[2:]):
            with pytest.raises(Problem, match="damaged") as problem:
                await rig.stages.commit("key", chosen)
            assert problem.value.name == "conflict"
        assert rig.log.queues() == []
        assert ".intent" not in rig.files()

    run(story)


def test_a_stage_that_is_damaged_half_way_is_told_and_nothing_is_doubled(run: Run) -> None:
    async def story(rig: Rig) -> None:
        ids = await stage_many(rig)
        rig.moments.passed, rig.moments.last = 0, 16
        with pytest.raises((Died, Problem)):
            await rig.stages.commit("key", ids)
        await rig.die(engine_too=True)
        path = rig.folder / "stages" / f"{ids[2]}.stage"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        await rig.start()
        for _ in range(2):
            with pytest.raises(Problem, match="cannot be finished") as problem:
                await rig.stages.commit("key", ids)
            assert problem.value.name == "conflict"
            with pytest.raises(Problem, match="cannot be aborted"):
                await rig.stages.abort("key")
            await rig.die(engine_too=False)
            await rig.start()
        found = rig.stored()["orders"]
        assert found
        assert found < WANTED["orders"]

    run(story)


def test_a_lost_intent_is_told_and_nothing_is_doubled(run: Run) -> None:
    async def story(rig: Rig) -> None:
        ids = await stage_many(rig)
        rig.moments.passed, rig.moments.last = 0, 16
        with pytest.raises((Died, Problem)):
            await rig.stages.commit("key", ids)
        await rig.die(engine_too=True)
        (path,) = (rig.folder / "stages").glob("*.intent")
        path.write_bytes(b"nonsense")
        await rig.start()
        before = rig.stored()
        with pytest.raises(Problem, match="chunks of it are in the log"):
            await rig.stages.commit("key", ids)
        with pytest.raises(Problem, match="chunks of it are in the log"):
            await rig.stages.abort("key")
        assert rig.stored() == before

    run(story)


def test_an_intent_of_what_was_aborted_is_dropped(run: Run) -> None:
    async def story(rig: Rig) -> None:
        ids = await stage_many(rig)
        rig.stages._folder.write_intent(Intent("key", tuple(ids), 100, 100, begun=False))
        await rig.stages.abort("key")  # it does not know of the intent
        await rig.die(engine_too=False)
        await rig.start()
        await rig.settled()
        assert rig.files() == []
        assert rig.log.queues() == []

    run(story)


def test_an_intent_of_which_nothing_is_stored_is_given_up_as_its_stages_are(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front-end that leads again after days: who wanted this has sent it elsewhere since then."""

    async def story(rig: Rig) -> None:
        ids = await stage_many(rig)
        rig.stages._folder.write_intent(Intent("key", tuple(ids), 100, 100, begun=False))
        now_ns = time.time_ns() + 2 * 3600 * 10**9
        await rig.die(engine_too=False)
        monkeypatch.setattr(stages, "Clock", lambda: Clock(lambda: now_ns))
        await rig.start()
        await rig.settled()
        assert rig.files() == []
        assert rig.log.queues() == []

    run(story)


def test_a_marked_intent_that_the_log_has_forgotten_is_not_carried_out_again(run: Run) -> None:
    async def story(rig: Rig) -> None:
        ids = await stage_many(rig)
        rig.stages._folder.write_intent(Intent("key", tuple(ids), 100, 100, begun=True))
        await rig.die(engine_too=False)
        await rig.start()
        await rig.settled()
        assert rig.files() == []
        assert rig.log.queues() == []

    run(story)


def test_a_sweep_leaves_what_was_staged_while_it_went_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(rig: Rig) -> None:
        for key in ("old", "again"):
            await rig.stage(key, ("orders", [b"left behind"]))
        now_ns = time.time_ns() + 2 * 3600 * 10**9
        monkeypatch.setattr(rig.stages, "_clock", Clock(lambda: now_ns))
        fresh: list[str] = []
        drop = rig.stages._drop

        async def drop_slowly(key: str, stage_ids: Iterable[str] = ()) -> None:
            await drop(key, stage_ids)
            if key == "old":
                assert not await rig.stages.abort("again")
                fresh.append((await rig.stage("again", ("orders", FEW))).id)

        monkeypatch.setattr(rig.stages, "_drop", drop_slowly)
        await rig.stages._sweep()
        await rig.stages.commit("again", fresh)
        assert rig.stored() == {"orders": Counter(FEW)}

    run(story)


def test_a_large_commit_goes_on_whatever_has_stopped_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(rig: Rig) -> None:
        ids = await stage_many(rig)
        loaded = count()

        def load_or_fail(folder: StageFolder, chunk: Chunk) -> list[tuple[str, Batch]]:
            if next(loaded) == 2:
                raise MemoryError
            return load_chunk(folder, chunk)

        monkeypatch.setattr(commits, "load_chunk", load_or_fail)
        async with asyncio.timeout(WAIT_SECONDS):
            with pytest.raises(Problem, match="is finished later"):
                await rig.stages.commit("key", ids)
            assert (await rig.stages.commit("key", ids)).repeated
        assert rig.stored() == WANTED

    run(story)


def test_a_large_commit_that_ends_while_other_stages_are_compared_is_answered(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(rig: Rig) -> None:
        first, again = [(await rig.stage("key", ("orders", MANY))).id for _ in range(2)]
        loop, begun, compared = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        async def wait(fields: Fields) -> None:
            begun.set()
            await compared.wait()

        def compare(*args: Any) -> Any:
            found = fingerprint_of(*args)
            loop.call_soon_threadsafe(compared.set)
            asyncio.run_coroutine_threadsafe(rig.settled(), loop).result(WAIT_SECONDS)
            return found

        fingerprint_of = stages._fingerprint_of
        monkeypatch.setattr(stages, "_fingerprint_of", compare)
        rig.link.before_answer = wait
        async with asyncio.timeout(WAIT_SECONDS):
            commit = asyncio.create_task(rig.stages.commit("key", [first]))
            await begun.wait()
            repeated = await rig.stages.commit("key", [again])
            assert repeated == ((await commit).stored, True)
        assert rig.stored() == {"orders": Counter(MANY)}

    run(story)


def test_a_stage_that_the_disk_does_not_give_stops_nobody_and_is_waited_for(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """A bad sector, or an owner that a restored backup has wrong."""

    async def story(rig: Rig) -> None:
        ids = await stage_many(rig)
        rig.moments.passed, rig.moments.last = 0, 16
        with pytest.raises((Died, Problem)):
            await rig.stages.commit("key", ids)
        await rig.die(engine_too=True)
        path = rig.folder / "stages" / f"{ids[2]}.stage"
        away = path.rename(rig.folder / "away")
        path.mkdir()
        await rig.start()
        assert f"a stage cannot be read: {path}: Is a directory" in caplog.text
        other = (await rig.stage("other", ("letters", FEW))).id
        assert not (await rig.stages.commit("other", [other])).repeated
        with pytest.raises(Problem, match="Is a directory; look at the disk"):
            await rig.stages.commit("key", ids)
        path.rmdir()
        away.rename(path)
        async with asyncio.timeout(WAIT_SECONDS):
            assert (await rig.stages.commit("key", ids)).repeated
        assert rig.stored() == WANTED | {"letters": Counter(FEW)}

    run(story)
