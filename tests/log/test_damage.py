"""Stored bytes that are not what was written: found, reported, set aside; the rest is served.

A small log with every kind of block is cut at every byte and has bits of every byte flipped. Whatever happens
to it, opening it gives a prefix of what was there (where the bytes could be a torn tail), or a report
that says which file, position and offsets. Never a message that was not sent, never a gap in silence,
and never an error that is not documented.
"""

import logging
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import pytest

from penstock.log.block import (
    FLAG_PART,
    HEADER_BYTES,
    KIND_CONTROL,
    KIND_MESSAGES,
    KIND_SETTLEMENTS,
    Header,
    read_control,
    read_header,
)
from penstock.log.disk import WATERMARK
from penstock.log.info import ReaderInfo
from penstock.log.ledger import read_rows
from penstock.log.log import Log
from penstock.log.segment import parse_segment_name, segment_name
from penstock.log.state import Damage, LogSettings
from penstock.model.batch import Batch, Slice
from penstock.model.ids import id_of
from penstock.model.life import Reason
from penstock.model.policy import Policies
from penstock.model.words import Outcome
from tests.log.inline import InlineWorker
from tests.log.simdisk import SimDisk
from tests.seeds import SEEDED

SETTINGS = LogSettings(segment_bytes=1536, cache_bytes=0, block_bytes=60, snapshot_blocks=1000)
NOW_US = 1_700_000_000_000_000
EVERYTHING = 1 << 50

Files = dict[str, bytes]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What the log says about thousands of damages is not for people."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Seen(NamedTuple):
    """A message as somebody gets it."""

    id: bytes
    payload: bytes
    retries: int
    expires_us: int
    attempts: int


class Picture(NamedTuple):
    """Everything that a log gives out: by queue number, door and offset; and where it ends."""

    ready: dict[tuple[int, int], Seen]
    dead: dict[tuple[int, int], Seen]
    ends: dict[int, int]


class Block(NamedTuple):
    """A block of the undamaged log."""

    file: str
    start: int  # in the file
    end: int
    header: Header
    body: bytes

    def offsets(self) -> set[tuple[int, int]]:
        """(queue number, offset) of the messages in it, or of those that it says something about."""
        header = self.header
        if header.kind == KIND_MESSAGES:
            return {(header.queue, offset) for offset in range(header.first_offset, header.offset_end)}
        if header.kind == KIND_SETTLEMENTS:
            rows = read_rows(header, memoryview(self.body))
            return {(header.queue, offset) for row in rows for offset in range(row.first, row.end)}
        return set()


def open_engine(disk: SimDisk) -> Log:
    return Log.open(
        disk, NOW_US, settings=SETTINGS, policies=Policies(), writer=InlineWorker(), keeper=InlineWorker()
    )


def turn(engine: Log) -> None:
    engine.flush(NOW_US)
    engine.wait()


def build() -> tuple[Files, Files]:
    """The files of the log: after a kill, without its snapshots; and after it was closed."""
    disk = SimDisk()
    engine = open_engine(disk)

    def turn() -> None:
        engine.flush(NOW_US)
        engine.wait()

    engine.append("orders", Batch.of([b"plain-%d" % i for i in range(3)]), NOW_US)
    turn()
    columns = Batch.of(
        [b"", b"all columns", b"x" * 40], ttl_seconds=[0, 600, 7200], retries=[-1, 0, 255], protocol="sspq"
    )
    engine.append("mails", columns, NOW_US)
    engine.append("mails", Batch.of([b"question"], reply=[b"back to you"], protocol="rq"), NOW_US)
    turn()
    engine.take("orders", "ann", 2, NOW_US)
    engine.settle("orders", "ann", Outcome.ACK, [(0, 1)], NOW_US)
    engine.settle("orders", "ann", Outcome.REQUEUE, [(1, 2)], NOW_US, ttl_seconds=900)
    engine.take("mails", "bob", 1, NOW_US)
    engine.settle("mails", "bob", Outcome.REJECT, [(0, 1)], NOW_US)
    turn()
    engine.pause("orders", True, NOW_US)
    engine.hold_retention(ReaderInfo("spark", "orders", "messages", 0, NOW_US + 10**9), NOW_US)
    turn()
    part = Batch.of([b"in-%d-" % i + b"y" * 60 for i in range(2)])
    engine.transact("key", [("orders", part), ("mails", Batch.of([b"both"]))], NOW_US)
    turn()
    assert len([name for name in disk.names() if parse_segment_name(name)]) == 2
    engine.append("orders", Batch.of([b"second segment"]), NOW_US)
    engine.withdraw("mails", [(1, 2)], Reason.OPERATOR, NOW_US)
    turn()
    engine.append("mails", Batch.of([b"last"]), NOW_US)
    turn()
    crashed = {name: data for name, data in disk.files().items() if parse_segment_name(name)}
    engine.close(NOW_US)
    return crashed, disk.files()


CRASHED, CLOSED = build()
SEGMENTS = sorted(CRASHED)


def blocks_of(files: Files) -> list[Block]:
    blocks = []
    for name in sorted(files):
        parsed = parse_segment_name(name)
        if parsed is None:
            continue
        data, at = files[name], 0
        while (header := read_header(data, at, parsed[0] + at)) is not None:
            end = at + HEADER_BYTES + header.body_bytes
            blocks.append(Block(name, at, end, header, data[at + HEADER_BYTES : end]))
            at = end
    return blocks


BLOCKS = blocks_of(CRASHED)


def numbers() -> dict[str, int]:
    fields = [read_control(memoryview(b.body)) for b in BLOCKS if b.header.kind == KIND_CONTROL]
    return {f["name"]: f["number"] for f in fields if f["op"] == "queue"}


NUMBERS = numbers()


def number_of(queue: str) -> int:
    """Damage may have taken the name of a queue."""
    return NUMBERS.get(queue) or int(queue.removeprefix("unknown-"))


def picture(engine: Log) -> Picture:
    """Take everything out of a log."""
    result = Picture({}, {}, {})
    for queue in engine.queues():
        engine.pause(queue, False, NOW_US)
        result.ends[number_of(queue)] = engine.describe(queue).offset_end
        for dead, room in ((False, result.ready), (True, result.dead)):
            for piece in engine.take(queue, "all", 1000, NOW_US, dead=dead):
                for offset, seen in messages_of(piece):
                    room[number_of(queue), offset] = seen
    return result


def messages_of(piece: Slice) -> Iterator[tuple[int, Seen]]:
    for i, payload in enumerate(piece.messages(), piece.lo):
        offset = piece.first_offset + i
        yield (
            offset,
            Seen(
                id_of(piece.origin, offset),
                payload,
                piece.retries[i] if piece.retries is not None else -1,
                piece.expires_us[i] if piece.expires_us is not None else 0,
                piece.attempts[i] if piece.attempts is not None else 0,
            ),
        )


def stored() -> dict[tuple[int, int], Seen]:
    """Every message of the log, as it was sent."""
    engine = open_engine(SimDisk(CRASHED))
    return {
        (number_of(queue), offset): seen
        for queue in engine.queues()
        for piece in engine.read(queue, 0, EVERYTHING)
        for offset, seen in messages_of(piece)
    }


SENT = stored()


def cut_at(index: int) -> Files:
    """The log up to block `index`, as a crash that took the others would leave it."""
    if index == len(BLOCKS):
        return CRASHED
    block = BLOCKS[index]
    return {
        name: data if name < block.file else data[: block.start]
        for name, data in CRASHED.items()
        if name <= block.file
    }


PREFIXES = [picture(open_engine(SimDisk(cut_at(index)))) for index in range(len(BLOCKS) + 1)]
WHOLE = PREFIXES[-1]


def first_of_transaction(index: int) -> int:
    """A transaction goes as a whole: the index of its first block."""
    while BLOCKS[index].header.flags & FLAG_PART and BLOCKS[index - 1].header.flags & FLAG_PART:
        index -= 1
    return index


def damaged(files: Files, name: str, position: int, mask: int) -> Files:
    data = bytearray(files[name])
    data[position] ^= mask
    return {**files, name: bytes(data)}


def nothing_wrong(found: Picture) -> None:
    """Whatever is given out was sent, and stands at its offset."""
    assert not found.ready.keys() & found.dead.keys()
    for room in (found.ready, found.dead):
        for key, seen in room.items():
            sent = SENT[key]
            assert seen.payload == sent.payload, (key, seen, sent)
            assert seen.id[12:] == sent.id[12:], (key, seen, sent)


def tells_of(block: Block, report: list[Damage]) -> bool:
    """Whether the report names the place of the block."""
    return any(d.file == f"sim/{block.file}" and block.start <= d.position < block.end for d in report)


def tells_offsets(missing: set[tuple[int, int]], report: list[Damage]) -> bool:
    """Whether the report names all these messages."""
    told = {(number_of(d.queue), o) for d in report if d.queue for o in range(d.first, d.end)}
    return missing <= told


# --- the test's own log -----------------------------------------------------------------------------


def test_the_log_has_everything_that_can_be_damaged() -> None:
    kinds = [(b.file, b.header.kind) for b in BLOCKS]
    first, second = SEGMENTS
    for kind in (KIND_MESSAGES, KIND_SETTLEMENTS, KIND_CONTROL):
        assert (first, kind) in kinds
    assert {(second, KIND_MESSAGES), (second, KIND_SETTLEMENTS)} <= set(kinds)
    assert sum(bool(b.header.flags & FLAG_PART) for b in BLOCKS) >= 4
    assert 2000 < sum(b.end - b.start for b in BLOCKS) < 3000
    assert any(name.startswith("snapshot-") for name in CLOSED)
    whole = picture(open_engine(SimDisk(CLOSED)))
    assert whole == WHOLE
    assert (len(WHOLE.ready), len(WHOLE.dead), len(SENT)) == (8, 1, 12)


# --- every byte, every bit ----------------------------------------------------------------------------


def test_a_log_that_is_cut_at_any_byte_is_a_prefix() -> None:
    """A file that ends early is what a crash leaves: no report, and nothing behind the cut."""
    for index, block in enumerate(BLOCKS):
        for length in range(block.start, block.end):
            files = {name: data for name, data in CRASHED.items() if name < block.file}
            files[block.file] = CRASHED[block.file][:length]
            engine = open_engine(SimDisk(files))
            found = picture(engine)
            assert not engine.damage, (block, length, engine.damage)
            assert found == PREFIXES[first_of_transaction(index)], (block, length)


def test_an_older_segment_that_is_cut_at_any_byte_is_reported() -> None:
    first = SEGMENTS[0]
    for index, block in enumerate(BLOCKS):
        if block.file != first:
            continue
        for length in range(block.start, block.end):
            engine = open_engine(SimDisk({**CRASHED, first: CRASHED[first][:length]}))
            found = picture(engine)
            nothing_wrong(found)
            if length > block.start:
                assert tells_of(block, list(engine.damage)), (block, length, engine.damage)
            else:
                # Between two blocks it looks as if a whole segment were missing.
                assert f"sim/{segment_name(block.header.position, 0)}" in {d.file for d in engine.damage}
            gone = set().union(*(b.offsets() for b in BLOCKS[index:] if b.file == first))
            missing = (WHOLE.ready.keys() | WHOLE.dead.keys()) - found.ready.keys() - found.dead.keys()
            assert missing <= gone, (block, length)


EVERY_BIT = (
    BLOCKS
    if SEEDED
    else [*{(b.header.kind, b.header.flags & FLAG_PART): b for b in BLOCKS[:-1]}.values(), BLOCKS[-1]]
)
"""Of their headers: one block of each kind, in a transaction and not, and the last, which may be torn."""


def test_every_flipped_byte_and_bit_of_a_header_gives_a_prefix_or_a_report() -> None:
    # Spawned, not forked: the tests' own process may have threads.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        flips = sum(pool.map(flip_every_bit_of, range(len(BLOCKS))))
    assert flips == sum(7 * HEADER_BYTES * (b in EVERY_BIT) + b.end - b.start for b in BLOCKS)


def flip_every_bit_of(index: int) -> int:
    """In a process of its own: every bit of a block's header, or one of each byte; how many."""
    logging.disable(logging.CRITICAL)
    block = BLOCKS[index]
    position = block.header.position
    proven = any(later.header.synced > position for later in BLOCKS[index + 1 :])
    alive = WHOLE.ready.keys() | WHOLE.dead.keys()
    followed = any(
        b.header.kind == KIND_MESSAGES and b.header.queue == block.header.queue for b in BLOCKS[index + 1 :]
    )
    flips = 0
    for at in range(block.start, block.end):
        for bit in range(8) if block in EVERY_BIT and at < block.start + HEADER_BYTES else (at % 8,):
            flips += 1
            engine = open_engine(SimDisk(damaged(CRASHED, block.file, at, 1 << bit)))
            found = picture(engine)
            context = (block, at, bit, engine.damage)
            nothing_wrong(found)
            if not proven:
                assert not engine.damage, context
                assert found == PREFIXES[first_of_transaction(index)], context
                continue
            assert tells_of(block, list(engine.damage)), context
            there = found.ready.keys() | found.dead.keys()
            if block.header.kind == KIND_MESSAGES:
                assert alive - there == block.offsets() & alive, context
                header_is_whole = at >= block.start + HEADER_BYTES
                if header_is_whole or followed:
                    assert tells_offsets(block.offsets(), list(engine.damage)), context
            else:
                assert alive - there == set(), context
            assert there - alive <= block.offsets(), context
    return flips


def test_with_a_watermark_there_is_no_doubt() -> None:
    """It says that everything had been synced: then no damage passes for a torn tail."""
    end = BLOCKS[-1].header.end
    files = {**CRASHED, WATERMARK: end.to_bytes(8, "little")}
    for block in BLOCKS:
        for at in range(block.start, block.end, 7):
            engine = open_engine(SimDisk(damaged(files, block.file, at, 0x10)))
            found = picture(engine)
            nothing_wrong(found)
            assert tells_of(block, list(engine.damage)), (block, at, engine.damage)
            lost = WHOLE.ready.keys() - found.ready.keys() - found.dead.keys()
            assert lost <= block.offsets() if block.header.kind == KIND_MESSAGES else not lost, (block, at)


def test_with_a_watermark_a_cut_is_no_torn_tail() -> None:
    end = BLOCKS[-1].header.end
    for index, block in enumerate(BLOCKS):
        for length in range(block.start, block.end, 5):
            files = {name: data for name, data in CRASHED.items() if name < block.file}
            files[block.file] = CRASHED[block.file][:length]
            engine = open_engine(SimDisk({**files, WATERMARK: end.to_bytes(8, "little")}))
            found = picture(engine)
            nothing_wrong(found)
            assert engine.damage, (block, length)
            before = PREFIXES[first_of_transaction(index)]
            assert before.ready.keys() <= found.ready.keys() | found.dead.keys(), (block, length)


def test_a_damaged_watermark_costs_at_most_a_report() -> None:
    end = BLOCKS[-1].header.end
    files = {**CRASHED, WATERMARK: end.to_bytes(8, "little")}
    for at in range(8):
        for bit in range(8):
            disk = SimDisk(damaged(files, WATERMARK, at, 1 << bit))
            engine = open_engine(disk)
            higher = not end >> (8 * at + bit) & 1
            assert bool(engine.damage) == higher, (at, bit, engine.damage)
            assert picture(engine) == WHOLE, (at, bit)
            disk = disk.kill()
            assert picture(open_engine(disk)) == WHOLE, (at, bit)
    for length in range(8):
        engine = open_engine(SimDisk({**CRASHED, WATERMARK: files[WATERMARK][:length]}))
        assert not engine.damage
        assert picture(engine) == WHOLE


# --- behind a snapshot: found when it is read ---------------------------------------------------------


def read_all(engine: Log) -> dict[tuple[int, int], Seen]:
    return {
        (number_of(queue), offset): seen
        for queue in engine.queues()
        for piece in engine.read(queue, 0, EVERYTHING)
        for offset, seen in messages_of(piece)
    }


def read_events(engine: Log) -> set[tuple[str, int]]:
    return {
        (queue, run.event_offset + i)
        for queue in engine.queues()
        for run in engine.events(queue, 0, EVERYTHING)
        for i in range(run.end - run.first)
    }


EVENTS = read_events(open_engine(SimDisk(CLOSED)))


@pytest.mark.parametrize("way", ["take", "read"])
def test_damage_in_an_older_segment_is_found_when_it_is_read(way: str) -> None:
    alive = WHOLE.ready.keys() | WHOLE.dead.keys()
    for block in BLOCKS:
        is_messages = block.header.kind == KIND_MESSAGES
        for at in range(block.start, block.end, 3):
            disk = SimDisk(damaged(CLOSED, block.file, at, 1 << at % 8))
            engine = open_engine(disk)
            assert not engine.damage, "nobody has looked yet"
            if way == "read":
                seen = read_all(engine)
                assert seen.items() <= SENT.items()
                assert SENT.keys() - seen.keys() == (block.offsets() if is_messages else set()), (block, at)
                lost = block.offsets()
            found = picture(engine)
            nothing_wrong(found)
            assert alive - found.ready.keys() - found.dead.keys() == (
                block.offsets() & alive if is_messages else set()
            )
            if way == "take":
                lost = block.offsets() & alive
            if is_messages and lost:
                assert tells_of(block, list(engine.damage)), (block, at, engine.damage)
                assert tells_offsets(lost, list(engine.damage)), (block, at, engine.damage)
                twice = [(d.queue, d.first) for d in engine.damage]
                assert len(twice) == len(set(twice)), engine.damage
            else:
                assert not engine.damage, (block, at, engine.damage)


def test_damage_that_was_found_is_known_after_a_restart() -> None:
    block = next(b for b in BLOCKS if b.header.kind == KIND_MESSAGES)
    disk = SimDisk(damaged(CLOSED, block.file, block.end - 1, 0xFF))
    engine = open_engine(disk)
    queue = next(name for name, number in NUMBERS.items() if number == block.header.queue)
    engine.pause(queue, False, NOW_US)
    engine.take(queue, "ann", 1000, NOW_US)
    report = list(engine.damage)
    assert len(report) >= 1
    assert block.file in report[0].text
    engine.flush(NOW_US)
    engine.wait()
    for _ in range(3):
        disk = disk.kill()
        engine = open_engine(disk)
        assert list(engine.damage) == report
        found = picture(engine)
        assert found.ready.keys() == WHOLE.ready.keys() - block.offsets()
        assert list(engine.damage) == report, "what is known is not reported again"
        engine.close(NOW_US)


def test_damage_found_by_recovery_is_known_after_a_restart() -> None:
    block = next(b for b in BLOCKS if b.header.kind == KIND_MESSAGES)
    disk = SimDisk(damaged(CRASHED, block.file, block.end - 1, 0xFF))
    reports = []
    for end in ("kill", "close", "kill", "close"):
        engine = open_engine(disk)
        reports.append({(d.queue, d.first, d.end) for d in engine.damage})
        assert picture(engine).ready.keys() == WHOLE.ready.keys() - block.offsets()
        if end == "close":
            engine.close(NOW_US)
        disk = disk.kill()
    assert reports[0]
    assert reports == [reports[0]] * 4


def test_damaged_bytes_are_kept() -> None:
    block = next(b for b in BLOCKS if b.header.kind == KIND_MESSAGES)
    files = damaged(CRASHED, block.file, block.end - 1, 0xFF)
    disk = SimDisk(files)
    engine = open_engine(disk)
    (name,) = [name for name in disk.names() if name.startswith("quarantine-")]
    assert disk.files()[name] == files[block.file][block.start : block.end]
    assert any(f"sim/{name}" in damage.text for damage in engine.damage)


def test_damaged_events_are_reported_when_they_are_read() -> None:
    for block in BLOCKS:
        if block.header.kind != KIND_SETTLEMENTS:
            continue
        for at in range(block.start, block.end, 3):
            engine = open_engine(SimDisk(damaged(CLOSED, block.file, at, 1 << at % 8)))
            found = read_events(engine)
            first = block.header.first_event
            queue = next(name for name, number in NUMBERS.items() if number == block.header.queue)
            lost = {(queue, number) for number in range(first, first + block.header.event_count)}
            assert EVENTS - found == lost, (block, at)
            assert any(d.queue == queue and f"events {first} to" in d.text for d in engine.damage), (
                engine.damage
            )


def test_looking_at_a_damaged_queue_is_no_error() -> None:
    for block in BLOCKS:
        engine = open_engine(SimDisk(damaged(CLOSED, block.file, block.end - 1, 1)))
        for queue in engine.queues():
            info = engine.describe(queue)
            assert info.ready + info.dead == sum(
                number == NUMBERS[queue] for number, _ in WHOLE.ready.keys() | WHOLE.dead.keys()
            )
            assert info.bytes >= 0


# --- snapshots ------------------------------------------------------------------------------------------


def snapshots(files: Files) -> list[str]:
    return sorted(name for name in files if name.startswith("snapshot-"))


def test_a_damaged_snapshot_costs_nothing_but_time() -> None:
    """Every byte of the newest: the older one and the blocks after it say the same."""
    older, newest = snapshots(CLOSED)
    for at in range(len(CLOSED[newest])):
        engine = open_engine(SimDisk(damaged(CLOSED, newest, at, 1 << at % 8)))
        assert [d.file for d in engine.damage] == [f"sim/{newest}"], (at, engine.damage)
        assert picture(engine) == WHOLE, at
    for length in range(0, len(CLOSED[newest]), 5):
        engine = open_engine(SimDisk({**CLOSED, newest: CLOSED[newest][:length]}))
        assert [d.file for d in engine.damage] == [f"sim/{newest}"], (length, engine.damage)
        assert picture(engine) == WHOLE, length
    both = damaged(damaged(CLOSED, newest, 20, 1), older, 20, 1)
    engine = open_engine(SimDisk(both))
    assert {d.file for d in engine.damage} == {f"sim/{newest}", f"sim/{older}"}
    assert picture(engine) == WHOLE


def test_a_damaged_snapshot_is_known_after_a_restart() -> None:
    newest = snapshots(CLOSED)[-1]
    disk = SimDisk(damaged(CLOSED, newest, 30, 4))
    for _ in range(3):
        engine = open_engine(disk)
        assert [d.file for d in engine.damage] == [f"sim/{newest}"]
        disk = disk.kill()


# --- whole files ----------------------------------------------------------------------------------------


def without(files: Files, name: str) -> Files:
    return {other: data for other, data in files.items() if other != name}


@pytest.mark.parametrize("name", SEGMENTS)
def test_a_segment_that_the_snapshot_knows_and_that_is_missing_is_reported(name: str) -> None:
    engine = open_engine(SimDisk(without(CLOSED, name)))
    found = picture(engine)
    nothing_wrong(found)
    gone = set().union(*(b.offsets() for b in BLOCKS if b.file == name and b.header.kind == KIND_MESSAGES))
    alive = WHOLE.ready.keys() | WHOLE.dead.keys()
    assert alive - found.ready.keys() - found.dead.keys() == gone & alive
    assert tells_offsets(gone & alive, list(engine.damage))
    assert all(d.file == f"sim/{name}" for d in engine.damage)


def test_without_a_snapshot_a_missing_segment_is_reported() -> None:
    first, _ = SEGMENTS
    engine = open_engine(SimDisk(without(CRASHED, first)))
    nothing_wrong(picture(engine))
    assert any("no snapshot" in d.text for d in engine.damage), engine.damage
    assert any("the name of queue" in d.text for d in engine.damage), engine.damage


def test_a_segment_that_is_missing_in_the_middle_is_reported() -> None:
    disk = SimDisk(CRASHED)
    engine = open_engine(disk)  # a third segment
    engine.append("orders", Batch.of([b"third segment"]), NOW_US)
    engine.flush(NOW_US)
    engine.wait()
    segments = {name: data for name, data in disk.files().items() if parse_segment_name(name)}
    middle = sorted(segments)[1]
    engine = open_engine(SimDisk(without(segments, middle)))
    assert any(d.file == f"sim/{middle}" and "missing" in d.text for d in engine.damage), engine.damage
    gone = set().union(*(b.offsets() for b in BLOCKS if b.file == middle and b.header.kind == KIND_MESSAGES))
    followed = {key for key in gone if key[0] == NUMBERS["orders"]}
    assert followed
    assert tells_offsets(followed, list(engine.damage)), engine.damage
    payloads = [seen.payload for seen in picture(engine).ready.values()]
    assert b"third segment" in payloads
    assert b"second segment" not in payloads


@pytest.mark.parametrize("before", [True, False])
def test_the_segment_in_which_the_snapshot_ends_is_missing(before: bool) -> None:
    """Whatever stands before it: the log opens, and says that something behind the snapshot is not there."""
    disk = SimDisk()
    engine = open_engine(disk)

    def segments() -> list[str]:
        return sorted(name for name in disk.names() if parse_segment_name(name))

    def send_until(count: int) -> None:
        while len(segments()) < count:
            engine.append("orders", Batch.of([b"x" * 50]), NOW_US)
            turn(engine)

    send_until(3)
    engine.append("late", Batch.of([b"nothing follows"]), NOW_US)
    turn(engine)
    send_until(4)
    engine.append("orders", Batch.of([b"last"]), NOW_US)
    turn(engine)
    engine.abandon()
    first, second, third, _ = segments()
    newest = snapshots(disk.files())[-1]
    gone = {newest, third} if before else {newest, third, second, first}
    engine = open_engine(SimDisk({name: data for name, data in disk.files().items() if name not in gone}))
    told = [d for d in engine.damage if d.file == f"sim/{third}" and "bytes are not there" in d.text]
    assert len(told) == 1, engine.damage
    found = [payload for piece in engine.take("orders", "all", 1000, NOW_US) for payload in piece.messages()]
    assert b"last" in found
    assert (len(found) > 2) == before
    engine.close(NOW_US)


@pytest.mark.parametrize("length", [0, 8, 80])
def test_the_segment_in_which_the_snapshot_ends_is_cut_before_that(length: int) -> None:
    """The log opens, says that what stood behind the snapshot is not there, and has what follows."""
    disk = SimDisk()
    engine = open_engine(disk)
    while len(segments := sorted(filter(parse_segment_name, disk.names()))) < 3:
        engine.append("orders", Batch.of([b"x" * 50]), NOW_US)
        turn(engine)
    engine.append("orders", Batch.of([b"last"]), NOW_US)
    turn(engine)
    engine.abandon()
    older, newest = snapshots(disk.files())
    _, second, third = segments
    start, end = int(older.removeprefix("snapshot-")), int(third.removesuffix(".seg"))
    assert int(second.removesuffix(".seg")) + length < start < end
    files = without(disk.files(), newest)
    engine = open_engine(SimDisk({**files, second: files[second][:length]}))
    assert any(f"{end - start} bytes are not there" in d.text for d in engine.damage), engine.damage
    found = [payload for piece in engine.take("orders", "all", 1000, NOW_US) for payload in piece.messages()]
    assert b"last" in found
    engine.close(NOW_US)


@pytest.mark.parametrize("folder", ["sim", "restored"])
@pytest.mark.parametrize("known", ["to a snapshot", "to nobody", "as a gap"])
def test_a_segment_that_is_put_back_is_not_removed(known: str, folder: str) -> None:
    """Whatever is known of it, and in whatever folder somebody puts the log together again."""
    files, gone = CLOSED if known == "to a snapshot" else CRASHED, SEGMENTS[0]
    if known == "as a gap":
        disk = SimDisk(CRASHED)
        open_engine(disk).abandon()  # a third segment
        files, gone = (
            {name: data for name, data in disk.files().items() if parse_segment_name(name)},
            SEGMENTS[1],
        )
    disk = SimDisk(without(files, gone))
    engine = open_engine(disk)
    assert engine.damage
    for _ in range(2):  # the older snapshot does not know the segment either
        turn(engine)
        engine.close(NOW_US)
        engine = open_engine(disk)
    engine.close(NOW_US)
    disk = SimDisk({**disk.files(), gone: files[gone]})
    disk.FOLDER = folder
    engine = open_engine(disk)
    if known == "to a snapshot":
        nothing_wrong(picture(engine))
    assert disk.files()["quarantine-" + gone] == files[gone]
    assert gone not in disk.files()
    assert any("here again" in d.text for d in engine.damage)
    engine.close(NOW_US)


@pytest.mark.parametrize("begins_late", [False, True])
def test_offsets_that_a_settlement_names_are_not_given_again(begins_late: bool) -> None:
    """A reader that has read them would take what comes there for something that it knows."""
    disk = SimDisk()
    engine = open_engine(disk)
    for payloads in ([b"a"], [b"b", b"c"]):
        engine.append("orders", Batch.of(payloads), NOW_US)
        turn(engine)
    engine.take("orders", "ann", 3, NOW_US)
    engine.settle("orders", "ann", Outcome.ACK, [(0, 3)], NOW_US)
    turn(engine)
    engine.append("other", Batch.of([b"synced later"]), NOW_US)
    turn(engine)
    engine.abandon()
    files = {name: data for name, data in disk.files().items() if parse_segment_name(name)}
    if begins_late:
        engine = open_engine(disk := SimDisk(files))
        engine.append("orders", Batch.of([b"d"]), NOW_US)
        turn(engine)
        engine.take("orders", "ann", 1, NOW_US)
        engine.settle("orders", "ann", Outcome.ACK, [(3, 4)], NOW_US)
        turn(engine)
        engine.abandon()
        files = {name: data for name, data in disk.files().items() if parse_segment_name(name)}
        del files[min(files)]
    block = next(
        b for b in reversed(blocks_of(files)) if b.header.kind == KIND_MESSAGES and b.header.queue == 1
    )
    data = bytearray(files[block.file])
    data[block.start : block.end] = bytes(block.end - block.start)
    engine = open_engine(SimDisk(files | {block.file: bytes(data)}))
    name = "unknown-1" if begins_late else "orders"
    assert engine.describe(name).offset_end == (4 if begins_late else 3)
    assert not engine.describe(name).ready
    assert begins_late or any((d.queue, d.first, d.end) == ("orders", 1, 3) for d in engine.damage)
    engine.append(name, Batch.of([b"new"]), NOW_US)
    turn(engine)
    (piece,) = engine.take(name, "ann", 5, NOW_US)
    assert (piece.offset_start, piece.messages()) == (4 if begins_late else 3, [b"new"])
    engine.close(NOW_US)


def test_a_file_that_goes_away_while_the_log_is_open_is_reported() -> None:
    disk = SimDisk(CLOSED)
    engine = open_engine(disk)
    disk.remove(SEGMENTS[0])
    found = picture(engine)
    nothing_wrong(found)
    assert tells_offsets(WHOLE.ready.keys() - found.ready.keys(), list(engine.damage))
    assert any(SEGMENTS[0] in d.text for d in engine.damage)
    assert found.ready


@pytest.mark.parametrize("first", ["lost", "named"])
def test_a_queue_that_is_called_like_one_whose_name_is_lost(first: str) -> None:
    """Somebody may call a queue `unknown-2`: both are there."""
    disk = SimDisk()
    engine = open_engine(disk)
    names = ["before", "lost", "unknown-2"] if first == "lost" else ["unknown-2", "lost", "behind"]
    for name in names:
        engine.append(name, Batch.of([b"of " + name.encode()]), NOW_US)
        engine.flush(NOW_US)
        engine.wait()
    files = {name: data for name, data in disk.files().items() if not name.startswith("snapshot")}
    engine.abandon()
    name = next(name for name in files if parse_segment_name(name) == (0, 0))
    data = bytearray(files[name])
    data[data.index(b'"lost"') + 1] ^= 1
    damaged = SimDisk(files | {name: bytes(data)})
    engine = open_engine(damaged)
    lost = "unknown-2-lost"
    assert set(engine.queues()) == set(names) - {"lost"} | {lost}
    for name in [*names, lost]:
        if name != "lost":
            (piece,) = engine.take(name, "ann", 5, NOW_US)
            assert piece.messages() == [b"of " + (b"lost" if name == lost else name.encode())]
    engine.close(NOW_US)
    assert set(open_engine(damaged.copy()).queues()) == set(names) - {"lost"} | {lost}
