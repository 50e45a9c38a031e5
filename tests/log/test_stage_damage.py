"""Damaged bytes of stages and commits: what is lost is named by queue and offset, the rest is delivered."""

import logging
from array import array
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from penstock.log.block import (
    FLAG_ELSEWHERE,
    HEADER_BYTES,
    KIND_CONTROL,
    KIND_MESSAGES,
    Header,
    read_control,
    read_header,
)
from penstock.log.errors import StageDamaged, StageUnknown
from penstock.log.log import Log
from penstock.log.repairs import MARK
from penstock.log.results import StageInfo
from penstock.log.scan import Hole
from penstock.log.segment import parse_segment_name
from penstock.log.snapshot import PREFIX
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.life import Reason
from penstock.model.policy import Policies
from penstock.model.words import Outcome
from tests.log.contract_rig import START_US, open_slices
from tests.log.inline import InlineWorker
from tests.log.simdisk import SimDisk

SETTINGS = LogSettings(segment_bytes=2048, block_bytes=150, cache_bytes=0, snapshot_blocks=10_000)
EVERYTHING = 1 << 50
Files = dict[str, bytes]
Named = set[tuple[str, int]]  # queue, offset

ORDERS = [b"order %-40d" % i for i in range(30)]
MAILS = [b"mail %-40d" % i for i in range(12)]
BAD = [b"bad %d" % i for i in range(5)]
LETTERS = [b"letter %d" % i for i in range(6)]
REPAIRED = {0: b"repaired 0", 1: b"repaired 1", 4: b"repaired 4"}
OPEN = [b"open %-40d" % i for i in range(12)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def open_log(disk: SimDisk) -> Log:
    return Log.open(
        disk, START_US, settings=SETTINGS, policies=Policies(), writer=InlineWorker(), keeper=InlineWorker()
    )


def turn(engine: Log) -> None:
    engine.flush(START_US)
    engine.wait()


def stage(engine: Log, key: str, *parts: tuple[str, Batch]) -> str:
    came: list[object] = []
    engine.stage(key, parts, START_US, came.append)
    turn(engine)
    (info,) = came
    assert isinstance(info, StageInfo), info
    return info.stage


def repairs(of: dict[int, bytes]) -> Batch:
    batch = Batch.of(of.values())
    batch.repairs = array("q", of)
    return batch


class Story(NamedTuple):
    """The files of a log, with snapshots and without, and the ids of a stage that is open and one that has
    letters."""

    closed: Files
    killed: Files
    alone: Files  # nothing behind the commit
    open: str
    repairing: str
    rows: dict[int, tuple[str, int]]  # what became of the rows of the stage queue: queue, offset
    open_rows: range
    letters_rows: set[int]  # rows of letters, of the commit and of the stage that is open
    number: int  # of the stage queue


def tell() -> Story:
    disk = SimDisk()
    engine = open_log(disk)
    engine.append("letters", Batch.of(LETTERS), START_US)
    engine.take("letters", "ann", 10, START_US)
    engine.settle("letters", "ann", Outcome.REJECT, [(0, 6)], START_US)
    turn(engine)
    bad = Batch.of(BAD)
    bad.dead = Reason.BAD_RECORD
    one = stage(engine, "key", ("orders", Batch.of(ORDERS[:20])), ("letters", repairs(REPAIRED)))
    left = stage(engine, "open", ("orders", Batch.of(OPEN)))
    two = stage(engine, "key", ("mails", Batch.of(MAILS)), ("mails", bad), ("orders", Batch.of(ORDERS[20:])))
    repairing = stage(engine, "repairing", ("letters", repairs({2: b"new"})))
    engine.commit("key", [one, two], START_US)
    turn(engine)
    unfinished = {name: data for name, data in disk.files().items() if not name.startswith(PREFIX)}
    for queue in ("orders", "mails", "letters"):  # Gaps before these are found.
        engine.append(queue, Batch.of([b"behind"]), START_US)
        turn(engine)
    state = engine._state
    rows: dict[int, tuple[str, int]] = {}
    for queue, first in (("orders", 0), ("orders", 20), ("mails", 0)):
        count = {("orders", 0): 20, ("orders", 20): 10, ("mails", 0): 17}[queue, first]
        for offset in range(first, first + count):
            number = state.queues[queue].number
            (segment,) = [it for it in state.segments.holding(number) if it.names]
            entries = state.segments.entries_of(segment, number)
            found = state.segments._find(segment, entries.positions[entries.at(offset)])
            rows[found.row_at(offset)[0]] = queue, offset  # type: ignore[union-attr]
    parts = [part for it in state.stages for part in it.parts]
    (mine,) = [it for it in state.stages if it.info.stage == left]
    stages = {info.key: info for info in (it.info for it in state.stages)}
    assert stages.keys() == {"open", "repairing"}
    first = min(row for row in rows if rows[row][0] == "orders") + 20
    letters_rows = {first + len(REPAIRED), *(part.letters for part in parts if part.letters >= 0)}
    rows |= {first + at: ("letters", offset) for at, offset in enumerate(REPAIRED)}
    killed = disk.kill()
    killed_files = {name: data for name, data in killed.files().items() if not name.startswith(PREFIX)}
    again = SimDisk(killed.files())
    open_log(again).close(START_US)
    return Story(
        again.files(),
        killed_files,
        unfinished,
        left,
        repairing,
        rows,
        range(mine.first, mine.end),
        letters_rows,
        state.segments.stage_queue,
    )


STORY = tell()


def everything() -> dict[tuple[str, int], bytes]:
    """What is alive or dead, undamaged."""
    found = {("orders", i): it for i, it in enumerate([*ORDERS, b"behind"])}
    found |= {("mails", i): it for i, it in enumerate([*MAILS, *BAD, b"behind"])}
    return found | {("letters", i): REPAIRED.get(i, it) for i, it in enumerate([*LETTERS, b"behind"])}


def taken(engine: Log) -> dict[tuple[str, int], bytes]:
    found: dict[tuple[str, int], bytes] = {}
    for queue in ("orders", "mails", "letters"):
        for dead in (False, True):
            while slices := engine.take(queue, "ann", 100, START_US, dead=dead):
                found |= {(queue, it.offset): it.payload for it in open_slices(slices)}
    turn(engine)
    return found


def named(engine: Log) -> Named:
    shown = [it for it in engine.damage if not it.queue.startswith(MARK)]
    return {(it.queue, offset) for it in shown for offset in range(it.first, it.end)}


class Block(NamedTuple):
    file: str
    header: Header
    fields: dict[str, object]  # of a control block

    @property
    def start(self) -> int:
        return self.header.position - parse_segment_name(self.file)[0]  # type: ignore[index]


def blocks(files: Files) -> list[Block]:
    found = []
    for name, data in sorted(files.items()):
        parsed = parse_segment_name(name)
        at = 0
        while parsed is not None and (header := read_header(data, at, parsed[0] + at)) is not None:
            body = memoryview(data)[at + HEADER_BYTES : header.end - parsed[0]]
            fields = read_control(body) if header.kind == KIND_CONTROL else {}
            found.append(Block(name, header, fields))
            at = header.end - parsed[0]
    return found


def flipped(files: Files, block: Block, at: int) -> SimDisk:
    data = bytearray(files[block.file])
    data[block.start + at] ^= 4
    return SimDisk(files | {block.file: bytes(data)})


ROWS = [
    it for it in blocks(STORY.killed) if it.header.kind == KIND_MESSAGES and it.header.queue == STORY.number
]
ADOPTIONS = [
    it for it in blocks(STORY.killed) if it.header.kind == KIND_MESSAGES and it.header.flags & FLAG_ELSEWHERE
]
IN_HEADER, IN_BODY = 30, HEADER_BYTES + 5


def place(block: Block) -> str:
    return str(block.header.position)


def rows_of(block: Block) -> range:
    return range(block.header.first_offset, block.header.offset_end)


def lost_with(rows: range) -> Named:
    return {STORY.rows[row] for row in rows if row in STORY.rows}


def check(disk: SimDisk, lost: Named) -> None:
    """Exactly these are named, all others are delivered; and the next opening knows it."""
    for _ in range(2):
        engine = open_log(disk)
        found = taken(engine)
        wanted = {it: payload for it, payload in everything().items() if it not in lost}
        assert found == wanted
        assert named(engine) == lost
        assert engine.transaction("key") is not None
        turn(engine)
        disk = disk.kill()


def check_open(disk: SimDisk, rows: range, *, known: bool) -> None:
    """What is staged cannot be committed where that is known, and is named when it is taken otherwise."""
    engine = open_log(disk)
    lost = {row - STORY.open_rows.start for row in rows if row in STORY.open_rows}
    if lost and known:
        with pytest.raises(StageDamaged, match="stage that part again"):
            engine.commit("open", [STORY.open], START_US)
        return
    engine.commit("open", [STORY.open], START_US)
    turn(engine)
    found = taken(engine)
    for i, payload in enumerate(OPEN):
        assert found.get(("orders", 31 + i)) == (None if i in lost else payload)
    assert named(engine) == lost_with(rows) | {("orders", 31 + i) for i in lost}


def test_the_story_has_everything() -> None:
    assert len(ROWS) > 15
    assert len(ADOPTIONS) == 4
    assert len(STORY.rows) == 30 + 17 + 3
    assert set(STORY.rows.values()) >= {("letters", 4), ("mails", 16), ("orders", 29)}
    for files in (STORY.closed, STORY.killed):
        check(SimDisk(files), set())


@pytest.mark.parametrize("at", [IN_HEADER, IN_BODY])
@pytest.mark.parametrize("block", ROWS, ids=place)
def test_rows(block: Block, at: int) -> None:
    rows = rows_of(block)
    for files, known in ((STORY.killed, True), (STORY.closed, False)):
        check(flipped(files, block, at), lost_with(rows))
        told = [it.text for it in open_log(flipped(files, block, at)).damage]
        assert not any("delivered again" in text for text in told), "nothing ever settles a row"
        check_open(flipped(files, block, at), rows, known=known)


@pytest.mark.parametrize("at", [IN_HEADER, IN_BODY])
@pytest.mark.parametrize("block", ADOPTIONS, ids=place)
def test_adoptions(block: Block, at: int) -> None:
    header = block.header
    offsets = range(header.first_offset, header.offset_end)
    for files in (STORY.killed, STORY.closed):
        engine = open_log(SimDisk(files))
        queue = engine._state.by_number[header.queue].name
        lost = {(queue, offset) for offset in offsets}
        if queue.startswith(MARK):
            lost = {("letters", offset) for offset in REPAIRED}
        check(flipped(files, block, at), lost)


@pytest.mark.parametrize("at", [IN_HEADER, IN_BODY])
@pytest.mark.parametrize("block", ADOPTIONS, ids=place)
def test_no_offset_of_the_last_adoption_is_given_again(block: Block, at: int) -> None:
    before = open_log(SimDisk(STORY.alone))
    ends = {queue: before.describe(queue).offset_end for queue in before.queues()}
    assert (ends["orders"], ends["mails"]) == (30, 17)
    engine = open_log(flipped(STORY.alone, block, at))
    assert {queue: engine.describe(queue).offset_end for queue in engine.queues()} == ends
    queue = before._state.by_number[block.header.queue].name
    offsets = range(block.header.first_offset, block.header.offset_end)
    if not queue.startswith(MARK):
        assert named(engine) == {(queue, offset) for offset in offsets}


@pytest.mark.parametrize("segment", sorted({it.file for it in ROWS}))
def test_a_missing_segment_with_rows_alone(segment: str) -> None:
    its = [it for it in blocks(STORY.killed) if it.file == segment]
    if any(it.header.kind != KIND_CONTROL and it.header.queue != STORY.number for it in its):
        return  # It has other messages, which are told as ever.
    rows = [row for it in its if it.header.queue == STORY.number for row in rows_of(it)]
    whole = range(min(rows), max(rows) + 1)
    files = {name: data for name, data in STORY.closed.items() if name != segment}
    check(SimDisk(files), lost_with(whole))
    check_open(SimDisk(files), whole, known=True)


@pytest.mark.parametrize("op", ["stage", "transaction", "format", "queue", "stage-gone"])
def test_control_blocks(op: str) -> None:
    """No message is lost with one, whatever it said."""
    for block in blocks(STORY.killed):
        if block.fields.get("op") != op or block.fields.get("name") not in (None, "\0"):
            continue
        for at in (IN_HEADER, IN_BODY):
            disk = flipped(STORY.killed, block, at)
            engine = open_log(disk)
            assert taken(engine) == everything()
            assert named(engine) == set()
            assert any("damaged" in it.text for it in engine.damage)
            if op == "transaction":
                assert engine.transaction("key") is None
            stage = block.fields.get("stage")
            if isinstance(stage, dict) and stage["stage"][0] == STORY.open:
                with pytest.raises(StageUnknown):
                    engine.commit("open", [STORY.open], START_US)
            elif op != "transaction":
                engine.commit("open", [STORY.open], START_US)
                turn(engine)
                assert [it[1] for it in sorted(taken(engine).items())] == OPEN


def test_letters_of_a_stage() -> None:
    for files in (STORY.killed, STORY.closed):
        for block in ROWS:
            if not STORY.letters_rows & set(rows_of(block)):
                continue
            for at in (IN_HEADER, IN_BODY):
                disk = flipped(files, block, at)
                check(disk.copy(), lost_with(rows_of(block)))
                engine = open_log(disk)
                if max(rows_of(block)) < max(STORY.letters_rows):
                    engine.commit("repairing", [STORY.repairing], START_US)
                    continue
                with pytest.raises(StageDamaged, match="stage that part again"):
                    engine.commit("repairing", [STORY.repairing], START_US)


def test_what_scrubbing_finds_keeps_a_stage_from_its_commit() -> None:
    for block in ROWS:
        rows = rows_of(block)
        if not set(rows) & set(STORY.open_rows):
            continue
        for header in (block.header, None):
            engine = open_log(SimDisk(STORY.closed))
            engine.report_rot(block.file, Hole(block.header.position, block.header.end, header))
            with pytest.raises(StageDamaged, match="stage that part again"):
                engine.commit("open", [STORY.open], START_US)
            assert taken(engine) == everything()
