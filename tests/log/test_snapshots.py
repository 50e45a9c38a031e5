"""Snapshots of many queues: what has not changed is not looked at again, what has is looked at in slices, and
whatever happens between two slices is in the snapshot."""

import json
import random
import struct
import zlib
from array import array
from pathlib import Path
from typing import Any

import pytest

from penstock.log import snapshot
from penstock.log.inspect import inspect_log
from penstock.log.queue import LogQueue
from penstock.log.segment import Segment
from penstock.log.snapshot import SLICE_QUEUES
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.life import Reason
from penstock.model.words import Outcome
from tests.log.contract_rig import SECOND
from tests.log.test_retention import Rig

MANY = LogSettings(snapshot_blocks=1_000_000)
"""One segment, and no snapshot but those that a test asks for."""


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path, {}, MANY)
    rig.turn()  # The one that follows every opening is written.
    return rig


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of queues, as snapshots look at them."""
    names: list[str] = []
    image = snapshot._image

    def noted(queue: LogQueue, active: Segment) -> Any:
        names.append(queue.name)
        return image(queue, active)

    monkeypatch.setattr(snapshot, "_image", noted)
    return names


def due(rig: Rig) -> None:
    """A snapshot is due."""
    rig.engine._committer.blocks_since_snapshot = MANY.snapshot_blocks


def stored(folder: Path) -> tuple[dict[str, Any], "array[int]"]:
    """What the newest snapshot says."""
    data = max(folder.glob("snapshot-*")).read_bytes()
    (length,) = struct.unpack_from("<I", data, 8)
    return json.loads(data[12 : 12 + length]), array("q", data[12 + length :])


def everything(rig: Rig) -> list[object]:
    engine = rig.engine
    rows = [(engine.describe(name), engine.deaths(name)) for name in engine.queues()]
    return [(info.name, info.ready + info.held, info.dead, info.offset_end, info.event_end, info.bytes,
             info.oldest_us, info.paused, deaths) for info, deaths in rows]  # fmt: skip


def test_what_has_not_changed_is_not_looked_at_again(rig: Rig, looked_at: list[str]) -> None:
    for number in range(30):
        rig.engine.append(f"q{number}", Batch.of([b"x"]), rig.now_us)
    due(rig)
    rig.turn()
    assert sorted(looked_at) == sorted(f"q{number}" for number in range(30))
    looked_at.clear()
    rig.engine.append("q7", Batch.of([b"y"]), rig.now_us)
    rig.engine.take("q3", "ann", 1, rig.now_us)
    rig.engine.pause("q5", True, rig.now_us)
    rig.turn()
    assert rig.engine.changed()  # Who lists queues asks for changes, too, and takes none from snapshots.
    due(rig)
    rig.turn()
    assert sorted(looked_at) == ["q3", "q5", "q7"]
    meta, _ = stored(rig.folder)
    assert [entry["name"] for entry in meta["queues"]] == [f"q{number}" for number in range(30)]
    assert not inspect_log(str(rig.folder)).defects
    before = everything(rig)
    rig.crash()
    assert everything(rig) == before


def test_many_are_looked_at_in_slices_and_what_happens_meanwhile_counts(
    rig: Rig, looked_at: list[str]
) -> None:
    count = 3 * SLICE_QUEUES
    for number in range(count):
        rig.engine.append(f"q{number}", Batch.of([b"x"]), rig.now_us)
    due(rig)
    slices = 0
    while not list(rig.folder.glob("snapshot-*0"))[1:] and slices < 20:
        looked_at.clear()
        rig.engine.append("q0", Batch.of([b"again"]), rig.now_us)
        if slices == 1:
            rig.engine.declare("late", rig.now_us)
            rig.engine.take("q1", "ann", 1, rig.now_us)
        rig.turn()
        assert len(looked_at) <= SLICE_QUEUES
        slices += 1
        if rig.engine._snapshotter._slices == 0:
            break
    assert 3 < slices < 20
    meta, _ = stored(rig.folder)
    entries = {entry["name"]: entry for entry in meta["queues"]}
    assert len(entries) == count + 1
    assert entries["q0"]["tail"] == 1 + slices
    assert entries["q1"]["counts"][0] == 1  # It is held, and will be ready after a crash.
    before = everything(rig)
    rig.crash()
    assert everything(rig) == before
    assert not inspect_log(str(rig.folder)).defects


@pytest.mark.parametrize("what", ["_image", "Capture"])
def test_what_could_not_be_looked_at_for_lack_of_memory_is_looked_at_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    rig.engine.append("orders", Batch.of([b"one"]), rig.now_us)
    due(rig)
    rig.turn()
    assert stored(rig.folder)[0]["queues"][0]["tail"] == 1

    def no_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as short:
        short.setattr(snapshot, what, no_memory)
        rig.engine.append("orders", Batch.of([b"two"]), rig.now_us)
        due(rig)
        with pytest.raises(MemoryError):
            rig.turn()
    rig.turn()
    assert stored(rig.folder)[0]["queues"][0]["tail"] == 2
    before = everything(rig)
    rig.crash()
    assert everything(rig) == before


def test_what_changes_faster_than_it_is_looked_at_is_looked_at_in_one_go(
    rig: Rig, looked_at: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "SLICES_MAX", 5)
    count = 2 * SLICE_QUEUES
    due(rig)
    for turn in range(8):
        for number in range(count):
            rig.engine.append(f"q{number}", Batch.of([b"%d" % turn]), rig.now_us)
        looked_at.clear()
        rig.turn()
        if len(looked_at) > SLICE_QUEUES:
            break
    assert turn == 5
    meta, _ = stored(rig.folder)
    assert {entry["tail"] for entry in meta["queues"]} == {6}


def test_a_snapshot_of_an_earlier_version_opens(rig: Rig) -> None:
    rig.send("orders", [b"a", b"b", b"c"])
    rig.ack("orders", rig.take("orders", 1))
    rig.send("empty", [b"d"])
    rig.ack("empty", rig.take("empty"))
    rig.send("paused", [b"e"])
    rig.engine.pause("paused", True, rig.now_us)
    before = everything(rig)
    rig.engine.close(rig.now_us)
    path = max(rig.folder.glob("snapshot-*"))
    meta, numbers = stored(rig.folder)
    assert not numbers
    for entry in meta["queues"]:
        span = entry.pop("span", None)
        if span is not None and span[0] == meta["segments"][-1][0]:
            meta["segments"][-1][4].append([entry["number"], *span[1:]])
        ready = entry.pop("ready", [])
        numbers.extend(ready)
        entry["counts"] = [len(ready) // 2, 0, 0, 0, 0]
        for name in ("offset_start", "event_start"):
            entry.setdefault(name, 0)
        entry.setdefault("paused", False)
    text = json.dumps(meta).encode()
    body = struct.pack("<I", len(text)) + text + numbers.tobytes()
    path.write_bytes(b"PSKS" + struct.pack("<I", zlib.crc32(body)) + body)
    rig.open()
    assert not rig.engine.damage
    assert everything(rig) == before
    assert [message.payload for message in rig.take("orders")] == [b"b", b"c"]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_is_in_the_next_snapshot(tmp_path: Path, seed: int) -> None:
    """Snapshots say what the blocks before them say, and a start from one finds all that there was."""
    settings = LogSettings(segment_bytes=16384, block_bytes=1024, cache_bytes=2048, snapshot_blocks=7)
    rig = Rig(tmp_path, {"*": {"retention-seconds": 0, "max-deliveries": 3}}, settings)
    chance = random.Random(seed)
    for step in range(400):
        rig.now_us += 1000
        name = f"q{chance.randrange(8)}"
        act = chance.randrange(10)
        if act < 4 or not rig.engine.has_queue(name):
            ttl = array("q", [chance.choice((0, 1))]) if chance.random() < 0.2 else None
            rig.engine.append(name, Batch(b"x" * 40, array("i", [0, 40]), ttl_seconds=ttl), rig.now_us)
        elif act < 7:
            for got in rig.take(name, chance.randrange(1, 4)):
                if chance.random() < 0.8:
                    rig.settle(name, chance.choice(list(Outcome)), [got])
        elif act == 7:
            rig.engine.give_back(name, "ann", rig.now_us)
        elif act == 8:
            rig.engine.redrive(name, rig.now_us, limit=2)
            if chance.random() < 0.3:
                rig.engine.purge(name, rig.now_us, limit=1)
        elif chance.random() < 0.5:
            dead = Batch(b"t", array("i", [0, 1]), dead=Reason.REJECTED)
            parts = [(name, Batch.of([b"t"])), (f"t{chance.randrange(3)}", dead)]
            rig.engine.transact(f"k{step}", parts, rig.now_us)
        else:
            rig.engine.pause(name, chance.random() < 0.5, rig.now_us)
        if chance.random() < 0.4:
            rig.engine.expire(rig.now_us)
            rig.turn()
        if chance.random() < 0.05:
            rig.engine.changed()
            rig.trim()
    for name in rig.engine.queues():
        rig.engine.pause(name, False, rig.now_us)
    rig.turn()
    before = everything(rig)
    rig.reopen()
    assert everything(rig) == before
    assert not inspect_log(str(rig.folder)).defects
    rig.engine.abandon()


def test_a_look_at_delayed_messages_between_two_slices_counts(rig: Rig) -> None:
    """It gives them a time of their own, and what was filed for their block is used up."""
    rig.engine.append("later", Batch.of([b"x"], delay_us=[10 * SECOND]), rig.now_us)
    for number in range(2 * SLICE_QUEUES):
        rig.engine.append(f"q{number}", Batch.of([b"x"]), rig.now_us)
    due(rig)
    rig.turn()
    assert rig.engine._snapshotter._slices == 1  # "later" is looked at, most others are not.
    rig.now_us += 9 * SECOND
    assert not rig.engine.due(rig.now_us)
    for _ in range(5):
        rig.turn()
    assert rig.engine._snapshotter._slices == 0
    assert len(list(rig.folder.glob("snapshot-*"))) == 2
    rig.crash()
    rig.now_us += 2 * SECOND
    for _ in range(3):
        rig.engine.due(rig.now_us)
    assert rig.engine.ready("later") == 1
