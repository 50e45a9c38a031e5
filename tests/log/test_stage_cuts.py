"""The power fails after every single call of the disk that a stage, a commit, an abort, the end of stages
that nobody commits, or the compacting behind them makes; and within the opening that follows.

Not sampled: each scene is played once to count its calls, and then once for each of them; of the calls of the
opening, and of those that meet a full disk, `make test` takes some, `make test-long` more. Segments have
2 KiB and blocks about 100 bytes, so that a transaction has hundreds of blocks in a dozen segments. Whatever
is left must be whole or absent, and the same call again must give the answer that was due.
"""

import copy
import errno
import logging
import random
from array import array
from collections.abc import Callable, Iterator, Sequence

import pytest

from penstock.log.block import KIND_CONTROL, read_control, read_header
from penstock.log.errors import LogError, LogFailed, StageUnknown
from penstock.log.log import Log
from penstock.log.repairs import STAGE_QUEUE
from penstock.log.results import StageInfo, TransactionDone
from penstock.log.segment import segment_name
from penstock.log.snapshot import read_snapshot, snapshot_positions
from penstock.log.state import FORMAT_STAGES, LogSettings
from penstock.model.batch import Batch
from penstock.model.life import Reason
from penstock.model.policy import Policies
from penstock.model.words import Outcome
from tests.log.contract_rig import SECOND, START_US, Got, open_slices
from tests.log.crash_model import Ids
from tests.log.inline import InlineWorker
from tests.log.simdisk import PowerCut, SimDisk
from tests.seeds import SEEDED

SETTINGS = LogSettings(
    segment_bytes=2048,
    block_bytes=64,
    cache_bytes=500,
    snapshot_blocks=15,
    stage_group_bytes=4000,
    stage_seconds=60,
    syncs_apart_us=0,
)
POLICIES = Policies({"*": {"retention-seconds": 0}})
QUEUES = ("orders", "mails", "letters")
KEY = "spark/query/7"
SHARE = 3 if SEEDED else 30
"""Of the calls of an opening, one in so many; of those of its neighbours, the next."""

OLD = [b"dead-%d" % i for i in range(8)]
REPAIRED = {i: b"repaired-%d" % i for i in (1, 2, 5)}
FIRST = [b"%-40d" % i for i in range(60)]
MAILS = [b"m%-30d" % i for i in range(20)]
SECOND_PART = [b"second %-40d" % i for i in range(40)]
BAD = [b"bad %d" % i for i in range(10)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def first_part() -> list[tuple[str, Batch]]:
    repairs = Batch.of(REPAIRED.values())
    repairs.repairs = array("q", REPAIRED)
    return [
        ("orders", Batch.of(FIRST, ttl_seconds=[50] * 60)),
        ("letters", repairs),
        ("mails", Batch.of(MAILS)),
    ]


def second_part() -> list[tuple[str, Batch]]:
    bad = Batch.of(BAD)
    bad.dead = Reason.BAD_RECORD
    return [("mails", bad), ("orders", Batch.of(SECOND_PART))]


class Scene:
    """A log on a simulated disk, and what was promised of it."""

    def __init__(self) -> None:
        self.disk = SimDisk()
        self.now_us = START_US
        self.ids = Ids()
        self.stages: list[str] = []  # in the order in which they are committed
        self.told: dict[int, str] = {}  # what was confirmed, by the number of messages
        self.came: list[TransactionDone | StageInfo | LogError | None] = []
        self.open()
        self.engine.append("letters", Batch.of(OLD), self.now_us)
        self.reject("letters")
        self.engine.append("orders", Batch.of([b"before"]), self.now_us)
        self.turn()

    def open(self) -> None:
        self.writer, self.keeper = InlineWorker(), InlineWorker()
        self.engine = Log.open(
            self.disk,
            self.now_us,
            settings=SETTINGS,
            policies=POLICIES,
            writer=self.writer,
            keeper=self.keeper,
        )

    def turn(self) -> None:
        self.engine.flush(self.now_us)
        self.engine.wait()
        for _ in range(3 if self.engine._committer.waits_for_room else 0):
            self.engine.tick(self.now_us)
            self.engine.wait()

    def after(self, disk: SimDisk) -> "Scene":
        """The next life of it, on what is left; this one may have others."""
        scene = copy.copy(self)
        scene.disk, scene.ids = disk, copy.deepcopy(self.ids)
        scene.came, scene.stages, scene.told = list(self.came), list(self.stages), dict(self.told)
        scene.open()
        return scene

    def take(self, queue: str, *, dead: bool = False) -> list[Got]:
        return open_slices(self.engine.take(queue, "ann", 10_000, self.now_us, bytes_max=1 << 30, dead=dead))

    def settle(self, queue: str, outcome: Outcome, messages: Sequence[Got]) -> None:
        ranges = [(it.offset, it.offset + 1) for it in messages]
        self.engine.settle(queue, "ann", outcome, ranges, self.now_us)

    def reject(self, queue: str) -> None:
        self.settle(queue, Outcome.REJECT, self.take(queue))
        self.turn()

    # --- what is done, and may be done again

    def stage(self, parts: list[tuple[str, Batch]]) -> str:
        """Unless it is there; its id."""
        count = sum(len(batch) for _, batch in parts)
        for info in self.engine.stages(KEY):
            if info.messages == count:
                return info.stage
        assert count not in self.told, "LOST: a stage that was confirmed is not there"

        def receipt(told: StageInfo | LogError) -> None:
            if isinstance(told, StageInfo):
                self.told[told.messages] = told.stage

        self.engine.stage(KEY, parts, self.now_us, receipt)
        self.turn()
        return self.told[count]

    def stage_all(self) -> None:
        self.stages = [self.stage(parts()) for parts in (first_part, second_part)]

    def commit(self) -> TransactionDone:
        self.engine.commit(KEY, self.stages, self.now_us, self.came.append)
        self.turn()
        done = self.came[-1]
        assert isinstance(done, TransactionDone), done
        return done

    def give_up(self) -> None:
        self.engine.abort(KEY, self.now_us)
        self.engine.confirm(self.now_us, self.came.append)
        self.turn()

    def lapse(self) -> None:
        self.now_us += 60 * SECOND
        self.engine.tick(self.now_us)
        self.engine.confirm(self.now_us, self.came.append)
        self.turn()

    def consume(self) -> None:
        """Most of it, so that its segments are worth compacting; then enough to leave them behind."""
        for queue in QUEUES:
            messages = self.take(queue)
            self.settle(queue, Outcome.ACK, [it for it in messages if it.offset % 100 > 1])
            self.settle(queue, Outcome.REQUEUE, [it for it in messages if it.offset % 100 <= 1])
        for _ in range(60):
            self.engine.append("other", Batch.of([b"x" * 100]), self.now_us)
            self.turn()
            self.settle("other", Outcome.ACK, self.take("other"))
            self.turn()

    def trim(self) -> None:
        for _ in range(3):
            self.engine.trim(self.now_us)
            self.turn()

    # --- what must be there

    def picture(self) -> dict[str, list[tuple[int, bytes]]]:
        """Everything that is alive or dead, by queue; afterwards somebody holds it."""
        found: dict[str, list[tuple[int, bytes]]] = {}
        for queue in QUEUES:
            for dead in (False, True):
                got = self.take(queue, dead=dead)
                for it in got:
                    repaired = queue == "letters" and it.offset in REPAIRED
                    stored = OLD[it.offset] if repaired else it.payload
                    self.ids.shown(it.origin, it.offset, stored)
                found[f"{queue} dead" if dead else queue] = [(it.offset, it.payload) for it in got]
        return found

    def expect(self, *, committed: bool, consumed: bool = False) -> None:
        """All of it, or nothing."""
        found = self.picture()
        letters = list(enumerate(OLD))
        wanted: dict[str, list[tuple[int, bytes]]] = {queue: [] for queue in found}
        wanted |= {"orders": [(0, b"before")], "letters dead": letters}
        if committed:
            wanted["orders"] += list(enumerate(FIRST + SECOND_PART, 1))
            wanted["mails"] += list(enumerate(MAILS))
            wanted["mails dead"] += list(enumerate(BAD, len(MAILS)))
            wanted["letters"] += list(REPAIRED.items())
            wanted["letters dead"] = [it for it in letters if it[0] not in REPAIRED]
        for queue in QUEUES if consumed else ():
            wanted[queue] = [it for it in wanted[queue] if it[0] % 100 <= 1]
        assert found == wanted
        assert not self.engine.damage
        self.expect_format()
        for queue in QUEUES:
            self.engine.give_back(queue, "ann", self.now_us, lost=False)
        self.turn()

    def expect_format(self) -> None:
        """Whoever does not know stages stops at the first block behind any snapshot that has some."""
        files = self.disk.files()
        for at in snapshot_positions(self.disk):
            if STAGE_QUEUE not in {it["name"] for it in read_snapshot(self.disk, at)[0]["queues"]}:
                continue
            base = max(it.base for it in self.engine._state.segments.all if it.base <= at)
            data = files[segment_name(base, 0)]
            header = read_header(data, at - base, at)
            assert header is not None, f"{at}: no format stands there"
            assert header.kind == KIND_CONTROL, f"{at}: no format stands there"
            fields = read_control(memoryview(data)[header.end - header.body_bytes - base : header.end - base])
            assert fields == {"op": "format", "format": FORMAT_STAGES, "queue": fields["queue"]}, at


Act = Callable[[Scene], None]


def nothing(scene: Scene) -> None:
    """Is prepared."""


def played(prepare: Act, act: Act, fault: Act) -> Scene:
    """Something goes wrong in the act."""
    scene = Scene()
    prepare(scene)
    scene.disk.calls.clear()
    fault(scene)
    try:
        act(scene)
    except PowerCut:
        pass
    except (LogFailed, AssertionError, LookupError):  # A receipt did not come, or said so.
        assert scene.engine.failed is not None
    return scene


def check_left(scene: Scene, check: Act, at: int, ways: int = 2, *, openings: bool = True) -> None:
    """What a power cut may leave, in some of its ways, and the death of the process; then what a cut after
    every call of the next opening leaves."""
    left = [scene.disk.crash(random.Random(100 * at + seed)) for seed in range(ways)]
    opened = left[0].copy()
    scene.after(opened).engine.abandon()
    # Every call of it, over some neighbours: whatever they leave, an opening does much the same.
    for nth in range(1 + at % SHARE, len(opened.calls) if openings else 0, SHARE):
        again = left[0].copy()
        again.cut_after(nth)
        with pytest.raises(PowerCut):
            scene.after(again)
        check(scene.after(again.crash(random.Random(nth))))
    for disk in left:
        check(scene.after(disk))
    check(scene.after(scene.disk.kill()))


def after_every_call(prepare: Act, act: Act, check: Act, *, backwards: bool = False) -> Scene:
    """The scene as it is without a cut."""
    whole = played(prepare, act, nothing)
    calls = list(whole.disk.calls)
    ways = max(2, 30 // len(calls))
    for at in sorted(range(1, len(calls) + 1), reverse=backwards):
        scene = played(prepare, act, lambda scene, at=at: scene.disk.cut_after(at))  # type: ignore[misc]
        check_left(scene, check, at, ways)
    check(whole.after(whole.disk.kill()))
    return whole


def with_every_fault(prepare: Act, act: Act, check: Act, error: int) -> None:
    """Every call of the act fails once with that error; where it is that of a full disk, the first of each
    kind, and some of the others."""
    calls = [call for call, _ in played(prepare, act, nothing).disk.calls]
    share = 4 if error == errno.ENOSPC and not SEEDED else 1
    for call in sorted(set(calls)):
        for nth in range(1, calls.count(call) + 1, share):
            scene = played(
                prepare,
                act,
                lambda scene, call=call, nth=nth: scene.disk.fail(call, nth, error),  # type: ignore[misc]
            )
            check_left(scene, check, nth, openings=False)


def check_stages(scene: Scene) -> None:
    scene.expect(committed=False)
    assert scene.engine.transaction(KEY) is None
    scene.stage_all()
    assert scene.engine.stages_count == 2
    assert not scene.commit().repeated
    check_commit(scene)


def check_commit(scene: Scene) -> None:
    is_made = scene.engine.transaction(KEY) is not None
    assert is_made or not any(isinstance(it, TransactionDone) for it in scene.came), "LOST: a commit"
    scene.expect(committed=is_made)
    if not is_made:
        assert [info.stage for info in scene.engine.stages(KEY)] == scene.stages
    done = scene.commit()
    assert done.repeated == is_made
    again = scene.commit()
    assert (again.repeated, again.stored) == (True, done.stored)
    scene.expect(committed=True)


def check_end(scene: Scene) -> None:
    """Of stages that were given up."""
    left = [info.stage for info in scene.engine.stages(KEY)]
    assert left in ([], scene.stages)
    assert None not in scene.came or not left, "somebody was told that they are gone"
    if not left:
        with pytest.raises(StageUnknown):
            scene.commit()
        scene.told.clear()
    check_stages(scene)


def check_rest(scene: Scene) -> None:
    """What is left of a transaction that most of has been consumed."""
    for _ in range(2):
        scene.expect(committed=True, consumed=True)
        assert scene.commit().repeated
        for queue in QUEUES:
            info = scene.engine.describe(queue)
            read = open_slices(scene.engine.read(queue, info.offset_start, info.offset_end))
            assert [it.offset for it in read] == list(range(info.offset_start, info.offset_end))
        scene.trim()


def consumed(scene: Scene) -> None:
    scene.stage_all()
    scene.commit()
    scene.consume()


SCENES = {
    "stage": (nothing, Scene.stage_all, check_stages),
    "commit": (Scene.stage_all, Scene.commit, check_commit),
    "abort": (Scene.stage_all, Scene.give_up, check_end),
    "lapse": (Scene.stage_all, Scene.lapse, check_end),
    "trim": (consumed, Scene.trim, check_rest),
}


@pytest.mark.parametrize("name", SCENES)
def test_the_power_fails_after_every_call(name: str) -> None:
    whole = after_every_call(*SCENES[name])  # type: ignore[arg-type]
    assert len(whole.disk.calls) > 1
    if name == "trim":
        stage_queue = whole.engine._state.segments.stage_queue
        compacted = [it for it in whole.engine._state.segments.all if it.generation]
        assert any(it.names for it in compacted), "no segment with messages was compacted"
        assert any(stage_queue in it.spans for it in compacted), "no segment with rows was compacted"


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("name", SCENES)
def test_every_call_fails_once(name: str, error: int) -> None:
    with_every_fault(*SCENES[name], error)  # type: ignore[arg-type]


def test_the_scenes_are_large_enough() -> None:
    scene = Scene()
    scene.stage_all()
    segments = scene.engine._state.segments
    rows = [it for it in segments.all if segments.stage_queue in it.spans]
    blocks = sum(len(segments.entries_of(it, segments.stage_queue)) for it in rows)
    assert (len(rows) > 8, blocks > 100) == (True, True), (len(rows), blocks)
