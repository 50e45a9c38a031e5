"""`penstock verify`: every kind of defect is planted and found, nothing else is, and nothing is changed."""

import json
import random
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from penstock.cli import messaging
from penstock.cli.main import main
from penstock.log import retention
from penstock.log.block import (
    FLAG_END,
    HEADER_BYTES,
    KIND_CONTROL,
    KIND_MESSAGES,
    KIND_SETTLEMENTS,
    Header,
    read_header,
)
from penstock.log.disk import WATERMARK, RealDisk, Watermark
from penstock.log.errors import LogError
from penstock.log.findings import DEFECTS, NOTES, Finding, Report
from penstock.log.inspect import inspect_log
from penstock.log.log import Log, open_log
from penstock.log.results import StageInfo
from penstock.log.scan import Hole, walk
from penstock.log.segment import Segment, parse_segment_name
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.policy import Policies
from penstock.model.words import Outcome
from tests.log.folders import NOW_US, SECOND_US, Worker, harmed

SMALL = LogSettings(segment_bytes=4096, block_bytes=1024, snapshot_blocks=30)
LARGE = LogSettings(segment_bytes=1 << 20)
STAGE_NUMBER = 3  # of the queue with what was staged
BRIEF = Policies({"*": {"retention-seconds": 0}})


# --- folders ---------------------------------------------------------------------------------------


def open_at(folder: Path, settings: LogSettings = SMALL, policies: Policies | None = None) -> Log:
    return open_log(str(folder), NOW_US, settings=settings, policies=policies)


def fill(engine: Log, turns: int = 20) -> None:
    """Messages in two queues, acknowledgements, rejections, transactions, and a stage that is left open."""
    staged: list[str] = []
    for turn in range(turns):
        now_us = NOW_US + turn * 1000
        for queue in ("q", "p"):
            engine.append(
                queue, Batch.of([b"%s-%d-%d" % (queue.encode(), turn, i) for i in range(10)]), now_us
            )
        if turn == turns // 2:
            parts = [("q", Batch.of([b"together"])), ("p", Batch.of([b"with this"]))]
            engine.transact("key", parts, now_us)
        if turn in (turns // 3, turns - 1):
            parts = [(queue, Batch.of([b"staged %d" % i for i in range(30)])) for queue in ("q", "p")]
            engine.stage(f"staged-{turn}", parts, now_us, lambda info: staged.append(stage_id(info)))
        elif turn == turns // 3 + 2:
            engine.commit(f"staged-{turns // 3}", staged, now_us)
        for piece in engine.take("q", "c", 8, now_us):
            outcome = Outcome.REJECT if turn % 5 == 4 else Outcome.ACK
            engine.settle("q", "c", outcome, [(piece.offset_start, piece.offset_end)], now_us)
        engine.flush(now_us)
        engine.wait()


def stage_id(info: StageInfo | LogError) -> str:
    assert isinstance(info, StageInfo)
    return info.stage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log of several segments, closed in good order."""
    path = tmp_path / "data"
    engine = open_at(path)
    fill(engine)
    engine.close(NOW_US)
    return path


def segments(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if parse_segment_name(path.name))


def blocks(folder: Path) -> list[tuple[Path, int, Header]]:
    """File, position in it, and header of every block of a log in which nothing is wrong."""
    found = []
    paths = segments(folder)
    disk = RealDisk(str(folder), read_only=True)
    for at, path in enumerate(paths):
        base = int(path.name[:20])
        end = int(paths[at + 1].name[:20]) if at + 1 < len(paths) else base + path.stat().st_size
        file = disk.open(path.name)
        for item in walk(file, base, base, end):
            if not isinstance(item, Hole):
                found.append((path, item[0].position - base, item[0]))
        file.close()
    return found


def block_of(folder: Path, kind: int, queue: int = 1, nth: int = 5) -> tuple[Path, int, Header]:
    chosen = [
        b for b in blocks(folder) if b[2].kind == kind and (kind == KIND_CONTROL or b[2].queue == queue)
    ]
    return chosen[nth]


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def rewrite(path: Path, at: int, body: bytes | None = None, **fields: int) -> None:
    """Change a block so that its checksums are right all the same."""
    with path.open("rb") as file:
        file.seek(at)
        header = read_header(file.read(HEADER_BYTES), 0, int(path.name[:20]) + at)
        assert header is not None
        stored = file.read(header.body_bytes)
    if body is not None:
        assert len(body) == len(stored)
        stored = body
    header.body_checksum = zlib.crc32(stored)
    for name, value in fields.items():
        setattr(header, name, value)
    patch(path, at, header.pack() + stored)


def rewrite_snapshot(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<I", data, 8)
    meta = json.loads(data[12 : 12 + length])
    change(meta)
    text = json.dumps(meta).encode()
    body = struct.pack("<I", len(text)) + text + data[12 + length :]
    path.write_bytes(b"PSKS" + struct.pack("<I", zlib.crc32(body)) + body)


def set_watermark(folder: Path, position: int) -> None:
    mark = Watermark(str(folder / WATERMARK), writable=True)
    mark.set(position)
    mark.close()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def inspect(folder: Path) -> Report:
    """Look, and see that looking changes nothing."""
    before = content(folder)
    report = inspect_log(str(folder))
    assert content(folder) == before
    return report


def kinds(findings: list[Finding]) -> set[str]:
    return {finding.kind for finding in findings}


# --- nothing is wrong ------------------------------------------------------------------------------


def test_a_good_log(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = inspect(folder)
    assert (report.defects, report.notes) == ([], [])
    every = blocks(folder)
    assert report.segments == len(segments(folder)) > 2
    assert report.blocks == len(every)
    of_queues = [header for _, _, header in every if header.queue != STAGE_NUMBER]
    assert report.messages == 462 == sum(h.count for h in of_queues if h.kind == KIND_MESSAGES)
    assert report.events == sum(h.event_count for h in of_queues)
    assert report.bytes == report.position == every[-1][2].end
    assert (report.queues, report.snapshots) == (2, 2)
    assert main(["verify", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out == (
        f"{report.segments} segments, 2 snapshots, {report.blocks} blocks, 462 messages, "
        f"{report.events} events, {report.bytes:,} bytes, 2 queues, 0 defects, 0 notes\n"
    )


def test_the_installed_command(folder: Path) -> None:
    command = Path(sys.executable).with_name("penstock")
    good = subprocess.run([command, "verify", folder], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.endswith("0 defects, 0 notes\n")
    path, at, header = block_of(folder, KIND_MESSAGES)
    patch(path, at + HEADER_BYTES, b"\xff")
    bad = subprocess.run([command, "verify", "--json", folder], capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    report = json.loads(bad.stdout)
    assert report["folder"] == str(folder)
    (defect,) = report["defects"]
    assert defect == {
        "kind": "bad-body",
        "text": f"{path}: the block at position {at} does not have its checksum: queue 'q', offsets "
        f"{header.first_offset} to {header.offset_end - 1}",
        "file": str(path),
        "position": at,
        "queue": "q",
        "first": header.first_offset,
        "end": header.offset_end,
    }


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_work_leaves_nothing_to_find(tmp_path: Path, seed: int) -> None:
    """Trimmed, compacted, reopened, crashed: looked at while the log is open, and after."""
    worker = Worker(tmp_path, seed, queues=("brief", "lazy", "short"))
    for part in range(12):
        for _ in range(25):
            worker.turn()
        worker.engine.wait()
        if part % 3 == 2:
            worker.reopen(crash=part % 2 == 0)
        assert inspect_log(str(tmp_path)).defects == []
        worker.settle_down()
        worker.engine.trim(worker.now_us)
        worker.engine.wait()
        report = inspect(tmp_path)
        assert report.defects == []
        assert kinds(report.notes) <= {"removed-since", "behind-watermark"}
    names = [path.name for path in segments(tmp_path)]
    assert names[0] != "00000000000000000000.seg"
    worker.engine.close(worker.now_us)
    assert inspect(tmp_path).defects == []


def test_beside_a_broker_that_trims_and_compacts(tmp_path: Path) -> None:
    """Looked at while another process works in the folder."""
    program = (
        "import sys; from pathlib import Path; from tests.log.folders import Worker\n"
        "worker = Worker(Path(sys.argv[1]), 7, queues=('brief', 'lazy', 'short'))\n"
        "print('open', flush=True)\n"
        "for turn in range(600):\n"
        "    worker.turn()\n"
        "    if turn % 10 == 0: worker.engine.trim(worker.now_us)\n"
        "worker.engine.close(worker.now_us)\n"
    )
    root = Path(__file__).parent.parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], cwd=root, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        looks = 0
        while writer.poll() is None:
            assert inspect_log(str(tmp_path)).defects == []
            looks += 1
        assert (writer.wait(), looks > 3) == (0, True)
    report = inspect(tmp_path)
    assert report.defects == []
    assert segments(tmp_path)[0].name != "00000000000000000000.seg"


# --- defects ---------------------------------------------------------------------------------------


def plant_bad_header(folder: Path) -> None:
    path, at, _ = block_of(folder, KIND_MESSAGES)
    patch(path, at + 20, b"\xff\xff")


def plant_bad_body(folder: Path) -> None:
    path, at, _ = block_of(folder, KIND_SETTLEMENTS, nth=2)
    patch(path, at + HEADER_BYTES + 3, b"\xff")


def plant_bad_content(folder: Path) -> None:
    path, at, header = block_of(folder, KIND_MESSAGES)
    body = path.read_bytes()[at + HEADER_BYTES : at + HEADER_BYTES + header.body_bytes]
    rewrite(path, at, struct.pack("<i", 5) + body[4:])


def plant_missing_segment(folder: Path) -> None:
    segments(folder)[1].unlink()


def plant_missing_offsets(folder: Path) -> None:
    """The numbers go on further than they should, in header and snapshot alike."""
    last = [b for b in blocks(folder) if b[2].kind == KIND_MESSAGES and b[2].queue == 2][-1]
    rewrite(last[0], last[1], first_offset=last[2].first_offset + 3)
    _forget_snapshots(folder)


def plant_missing_rows(folder: Path) -> None:
    """Of a stage, the numbers go on further than they should."""
    path, at, header = stage_blocks(folder)[-1]
    rewrite(path, at, first_offset=header.first_offset + 3)
    _forget_snapshots(folder)


def stage_blocks(folder: Path) -> list[tuple[Path, int, Header]]:
    return [block for block in blocks(folder) if block[2].queue == STAGE_NUMBER]


def plant_missing_events(folder: Path) -> None:
    last = [b for b in blocks(folder) if b[2].queue == 2][-1]
    rewrite(last[0], last[1], first_event=last[2].first_event + 3)
    _forget_snapshots(folder)


def plant_repeated_offsets(folder: Path) -> None:
    path, at, header = block_of(folder, KIND_MESSAGES)
    rewrite(path, at, first_offset=header.first_offset - 2)


def plant_overlap(folder: Path) -> None:
    """A segment that was compacted into a longer one: every message has a header of its own."""
    path, at, _ = block_of(folder, KIND_MESSAGES)
    mine = [header for it, _, header in blocks(folder) if it == path]
    base = parse_segment_name(path.name)[0]  # type: ignore[index]
    living: dict[int, list[tuple[int, int]]] = {}
    for header in mine:
        if header.kind == KIND_MESSAGES:
            runs = living.setdefault(header.queue, [])
            runs += [(offset, offset + 1) for offset in range(header.first_offset, header.offset_end)]
    disk = RealDisk(str(folder))
    with mock.patch.object(retention, "COMPACT_BELOW", 1000.0):
        segment = Segment(base, 0, mine[-1].end - base, 0, sealed=True)
        result = retention.compact(disk, segment, living, retention.Staged(0, []))
    disk.rename(result.name + retention.TEMPORARY, result.name)
    path.unlink()
    assert at < result.size


def plant_open_transaction(folder: Path) -> None:
    path, at, header = next(b for b in blocks(folder) if b[2].flags & FLAG_END)
    rewrite(path, at, flags=0)
    assert header.kind == KIND_CONTROL


def plant_lost_name(folder: Path) -> None:
    path, at, _ = next(b for b in blocks(folder) if b[2].queue == 1)
    rewrite(path, at, queue=77)


def plant_bad_snapshot(folder: Path) -> None:
    path = min(folder.glob("snapshot-*"))
    patch(path, 40, b"\xff")


def plant_snapshot_that_disagrees(folder: Path) -> None:
    def change(meta: dict[str, Any]) -> None:
        meta["queues"][0]["paused"] = True

    rewrite_snapshot(max(folder.glob("snapshot-*")), change)


def plant_synced_and_gone(folder: Path) -> None:
    path, at, _ = blocks(folder)[-1]
    with path.open("r+b") as file:
        file.truncate(at)


def _forget_snapshots(folder: Path) -> None:
    for path in folder.glob("snapshot-*"):
        path.unlink()


PLANTED: dict[str, Callable[[Path], None]] = {
    "bad-header": plant_bad_header,
    "bad-body": plant_bad_body,
    "bad-content": plant_bad_content,
    "missing-segment": plant_missing_segment,
    "missing-offsets": plant_missing_offsets,
    "missing-rows": plant_missing_rows,
    "missing-events": plant_missing_events,
    "repeated-offsets": plant_repeated_offsets,
    "overlap": plant_overlap,
    "open-transaction": plant_open_transaction,
    "lost-name": plant_lost_name,
    "bad-snapshot": plant_bad_snapshot,
    "snapshot-disagrees": plant_snapshot_that_disagrees,
    "synced-and-gone": plant_synced_and_gone,
}


def test_every_kind_of_defect_is_planted() -> None:
    assert PLANTED.keys() == DEFECTS.keys()


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_defects_are_found(folder: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    PLANTED[kind](folder)
    report = inspect(folder)
    found = [finding for finding in report.defects if finding.kind == kind]
    assert found
    assert found[0].file.startswith(str(folder))
    assert found[0].text.startswith(found[0].file)
    assert main(["verify", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert f"DEFECT {kind}: {found[0].text}\n" in out
    assert (
        f", {len(report.defects)} defect{'' if len(report.defects) == 1 else 's'}, " in out.splitlines()[-1]
    )


def test_any_flipped_bit_of_any_block_is_found(folder: Path) -> None:
    rng = random.Random(1)
    every = blocks(folder)
    for _ in range(60):
        path, at, header = rng.choice(every)
        place = at + rng.randrange(HEADER_BYTES + header.body_bytes)
        before = path.read_bytes()
        patch(path, place, bytes([before[place] ^ 1 << rng.randrange(8)]))
        found = inspect_log(str(folder)).defects
        assert (str(path), at) in [(finding.file, finding.position) for finding in found], place
        patch(path, place, before[place : place + 1])
    assert inspect(folder).defects == []


def test_whatever_is_done_to_the_files_there_is_a_report(folder: Path) -> None:
    """Cut, emptied, filled with junk, removed: many at a time, and never an exception."""
    good = content(folder)
    rng = random.Random(2)
    for _ in range(60):
        for _ in range(rng.randint(1, 4)):
            path = folder / rng.choice(sorted(name for name in good if name != RealDisk.LOCK))
            path.write_bytes(harmed(good[path.name], rng))
        report = inspect(folder)
        assert report.segments <= len(segments(folder))
        for name, whole in good.items():
            (folder / name).write_bytes(whole)
    assert inspect(folder).defects == []


@pytest.mark.parametrize(("place", "kind"), [(HEADER_BYTES, "bad-body"), (4, "missing-rows")])
def test_what_was_staged_is_told_as_what_it_is(folder: Path, place: int, kind: str) -> None:
    """Damage in rows: with the messages that they have become, or with the stage that waits."""
    told: list[tuple[str, int, int]] = []
    for path, at, header in stage_blocks(folder):
        patch(path, at + place, b"\xff")
        defects = inspect_log(str(folder)).defects
        found = [finding for finding in defects if finding.kind == kind]
        assert not [finding for finding in defects if "\\x00" in finding.text]
        assert (str(path), at) in [(finding.file, finding.position) for finding in defects]
        for finding in found:
            if finding.queue:
                assert (
                    f"queue {finding.queue!r}, offsets {finding.first} to {finding.end - 1}" in finding.text
                )
                assert finding.end - finding.first == header.count
                told.append((finding.queue, finding.first, finding.end))
            else:
                assert re.search(r"transaction 'staged-19', stage '[0-9a-f]{32}'", finding.text)
        assert {bool(finding.queue) for finding in found} == {header.offset_end <= 60}
        patch(path, at + place, (b"\x01" if place == 4 else b"\0"))
        assert inspect(folder).defects == []
    assert sum(end - first for _, first, end in told) == 60
    assert {queue for queue, _, _ in told} == {"q", "p"}


def test_damage_in_rows_that_nobody_needs(folder: Path) -> None:
    engine = open_at(folder)
    engine.abort("staged-19", NOW_US + SECOND_US)
    engine.close(NOW_US + SECOND_US)
    path, at, _ = stage_blocks(folder)[-1]
    patch(path, at + HEADER_BYTES, b"\xff")
    (found,) = [finding for finding in inspect_log(str(folder)).defects if finding.kind == "bad-body"]
    assert (found.queue, found.file, found.position) == ("", str(path), at)
    assert found.text.endswith("does not have its checksum: it was staged, and nobody needs it any more")


@pytest.mark.parametrize(
    ("part", "says"),
    [("names", "of the stages are not among those that"), ("stages", "is None; the blocks say {")],
)
def test_a_snapshot_that_does_not_know_what_was_staged(folder: Path, part: str, says: str) -> None:
    path = max(folder.glob("snapshot-*"))
    rewrite_snapshot(path, lambda meta: meta[part].clear())
    found = inspect(folder).defects
    assert {finding.kind for finding in found} == {"snapshot-disagrees"}
    assert [finding for finding in found if says in finding.text]


@pytest.mark.parametrize(("kind", "what"), [(KIND_MESSAGES, "offset"), (KIND_SETTLEMENTS, "event")])
def test_a_bad_header_of_the_last_block_is_told_with_what_is_missing(
    folder: Path, kind: int, what: str
) -> None:
    """No later block of the queue shows a gap, but a snapshot knows how far it went."""
    path, at, header = block_of(folder, kind, nth=-1)
    patch(path, at, b"JUNK")
    (found,) = [it for it in inspect(folder).defects if it.kind == f"missing-{what}s" and it.queue == "q"]
    first = header.first_offset if what == "offset" else header.first_event
    assert (found.first, found.end) == (first, first + header.event_count)


def test_a_bad_header_is_told_with_what_is_missing(folder: Path) -> None:
    path, at, header = block_of(folder, KIND_MESSAGES)
    patch(path, at, b"JUNK")
    report = inspect(folder)
    length = HEADER_BYTES + header.body_bytes
    by_kind = {finding.kind: finding for finding in report.defects}
    assert by_kind.keys() == {"bad-header", "missing-offsets", "missing-events"}
    assert (by_kind["bad-header"].file, by_kind["bad-header"].position) == (str(path), at)
    assert f"{length} bytes at position {at}" in by_kind["bad-header"].text
    missing = by_kind["missing-offsets"]
    assert (missing.queue, missing.first, missing.end) == ("q", header.first_offset, header.offset_end)
    assert kinds(report.notes) == {"not-compared"}


def test_damage_in_many_places_is_all_found(folder: Path) -> None:
    chosen = [b for b in blocks(folder) if b[2].kind == KIND_MESSAGES and b[2].queue != STAGE_NUMBER][3::7]
    for path, at, _ in chosen:
        patch(path, at + HEADER_BYTES, b"\xff")
    report = inspect(folder)
    assert [(f.kind, f.file, f.position) for f in report.defects] == [
        ("bad-body", str(path), at) for path, at, _ in chosen
    ]
    assert [(f.first, f.end) for f in report.defects] == [
        (h.first_offset, h.offset_end) for _, _, h in chosen
    ]


def test_a_control_block_that_is_damaged(folder: Path) -> None:
    path, at, _ = block_of(folder, KIND_CONTROL, nth=1)
    patch(path, at + HEADER_BYTES, b"\xff")
    _forget_snapshots(folder)
    report = inspect(folder)
    assert f"the block at position {at} does not have its checksum: a control block" in report.defects[0].text
    assert kinds(report.defects) == {"bad-body", "lost-name"}


@pytest.mark.parametrize("nth", [0, 1, -1])
@pytest.mark.parametrize("snapshots", [True, False])
def test_a_missing_segment(folder: Path, nth: int, snapshots: bool) -> None:
    path = segments(folder)[nth]
    path.unlink()
    if not snapshots:
        _forget_snapshots(folder)
    report = inspect(folder)
    assert report.defects[0].kind in ("missing-segment", "synced-and-gone")
    if nth >= 0:
        assert report.defects[0].file == str(path)
        assert f"{path}: is missing" in report.defects[0].text
        # Without the first one and without a snapshot nobody knows where the offsets began.
        assert ("missing-offsets" in kinds(report.defects)) == (snapshots or nth > 0)


@pytest.mark.parametrize("all_of_them", [False, True])
def test_all_that_there_was_of_a_queue_is_missing(folder: Path, all_of_them: bool) -> None:
    """Only the newest snapshot knows that queue."""
    engine = open_at(folder)
    engine.append("alone", Batch.of([b"one", b"two"]), NOW_US)
    engine.close(NOW_US)
    last = segments(folder)[-1]
    for path in segments(folder) if all_of_them else [last]:
        path.unlink()
    defects = inspect(folder).defects
    found = [(f.file, f.first, f.end) for f in defects if f.kind == "missing-segment" and f.queue == "alone"]
    assert found == [(str(last), 0, 2)]
    assert "synced-and-gone" in kinds(defects)


def test_a_missing_compacted_segment(tmp_path: Path) -> None:
    """Retention could have taken it, but for the messages in it that are not settled."""
    folder = compacted_log(tmp_path / "data")
    (path,) = (path for path in segments(folder) if path.name.count(".") == 2)
    assert inspect(folder).defects == []
    path.unlink()
    report = inspect(folder)
    assert kinds(report.defects) == {"missing-segment", "missing-offsets"}
    assert [(f.queue, f.first, f.end) for f in report.defects if f.kind == "missing-segment"] == [("q", 3, 4)]


def compacted_log(folder: Path) -> Path:
    """One message is not settled, and all others are: its segment is compacted, others removed."""
    engine = open_at(folder, policies=BRIEF)
    now_us = NOW_US
    for turn in range(60):
        now_us += SECOND_US
        engine.append("q", Batch.of([b"%d" % turn * 20] * 10), now_us)
        for piece in engine.take("q", "c", 10, now_us):
            ranges = [(o, o + 1) for o in range(piece.offset_start, piece.offset_end) if o != 3]
            engine.settle("q", "c", Outcome.ACK, ranges, now_us)
        engine.flush(now_us)
        engine.wait()
        engine.trim(now_us)
        engine.wait()
    engine.close(now_us)
    return folder


def test_damage_in_a_compacted_segment(tmp_path: Path) -> None:
    folder = compacted_log(tmp_path / "data")
    (path,) = (path for path in segments(folder) if path.name.count(".") == 2)
    patch(path, HEADER_BYTES + 1, b"\xff")
    report = inspect(folder)
    (defect,) = report.defects
    assert (defect.kind, defect.file, defect.position) == ("bad-body", str(path), 0)
    assert (defect.queue, defect.first, defect.end) == ("q", 3, 4)


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("tail", 500, "queue 'q': tail 500; the blocks say 231"),
        ("next_event", 3, "queue 'q': next event 3; the blocks say "),
        ("name", "z", "queue 'q': name 'z'; the blocks say 'q'"),
    ],
)
def test_what_a_snapshot_says_otherwise(folder: Path, part: str, value: object, says: str) -> None:
    path = max(folder.glob("snapshot-*"))

    def change(meta: dict[str, Any]) -> None:
        meta["queues"][0][part] = value

    rewrite_snapshot(path, change)
    found = [f for f in inspect(folder).defects if f.kind == "snapshot-disagrees"]
    assert len(found) == 1
    assert found[0].text.startswith(f"{path}: {says}")


def test_a_snapshot_without_a_queue_and_without_sense(folder: Path) -> None:
    older, newer = sorted(folder.glob("snapshot-*"))
    rewrite_snapshot(newer, lambda meta: meta["queues"].pop(1))
    rewrite_snapshot(older, lambda meta: meta.pop("log"))
    texts = [(f.kind, f.file, f.text) for f in inspect(folder).defects]
    assert ("bad-snapshot", str(older)) in [text[:2] for text in texts]
    assert any(kind == "snapshot-disagrees" and "queue 'p' is not in it" in text for kind, _, text in texts)


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        (KIND_MESSAGES, {"extra": 1}, "its payload and its header do not agree"),
        (KIND_MESSAGES, {"protocol": 99}, "there is no protocol 99"),
        (KIND_MESSAGES, {"event_count": 3}, "it has not one event for each message"),
        (KIND_MESSAGES, {"expires_min_us": 3}, "its expiries and its header do not agree"),
        (KIND_MESSAGES, {"count": 1 << 20}, "its columns do not fit"),
        (KIND_SETTLEMENTS, {"event_count": 3}, "its rows and its number of events do not agree"),
        (KIND_SETTLEMENTS, {"first_offset": 999}, "its rows and its first offset do not agree"),
        (KIND_SETTLEMENTS, {"extra": 0}, "its columns do not fit"),
    ],
)
def test_content_that_does_not_fit(folder: Path, kind: int, change: dict[str, int], says: str) -> None:
    path, at, _ = block_of(folder, kind, nth=2)
    rewrite(path, at, None, **change)
    found = [f for f in inspect(folder).defects if f.kind == "bad-content"]
    assert [f.position for f in found] == [at]
    assert f"the block at position {at} has its checksum, but {says}" in found[0].text


def test_a_control_block_that_no_version_knows(folder: Path) -> None:
    path, at, header = block_of(folder, KIND_CONTROL, nth=1)
    rewrite(path, at, b'{"op":"fly"}'.ljust(header.body_bytes, b"\0"))
    assert any("says 'fly', which this version does not know" in f.text for f in inspect(folder).defects)
    rewrite(path, at, b"{op".ljust(header.body_bytes, b"\0"))
    assert any("its columns do not fit" in f.text for f in inspect(folder).defects)


# --- notes -----------------------------------------------------------------------------------------


def torn(folder: Path) -> None:
    """The last group was being written when the power went."""
    (path,) = segments(folder)
    position = int(blocks(folder)[-1][2].end)
    patch(path, position, b"PSK1" + b"half of a block" * 20)


def note_torn_tail(folder: Path) -> None:
    engine = open_at(folder, LARGE)
    fill(engine)
    engine.abandon()
    torn(folder)


def note_behind_watermark(folder: Path) -> None:
    engine = open_at(folder, LARGE)
    fill(engine)
    engine.abandon()
    set_watermark(folder, blocks(folder)[-3][2].position)


def note_no_watermark(folder: Path) -> None:
    open_at(folder).close(NOW_US)
    (folder / WATERMARK).unlink()


def note_leftover(folder: Path) -> None:
    open_at(folder).close(NOW_US)
    (folder / "snapshot-00000000000000000777.tmp").write_bytes(b"half")


def note_quarantine(folder: Path) -> None:
    """Damage that a start has met and set aside: the bytes are still bad, so they are a defect too."""
    engine = open_at(folder, LARGE)
    fill(engine)
    engine.abandon()
    path, at, _ = block_of(folder, KIND_MESSAGES)
    patch(path, at + HEADER_BYTES, b"\xff")
    engine = open_at(folder, LARGE)
    assert engine.damage
    engine.close(NOW_US)


def note_removed_since(folder: Path) -> None:
    engine = open_at(folder, policies=BRIEF)
    now_us = NOW_US
    for _ in range(40):
        now_us += SECOND_US
        engine.append("q", Batch.of([b"." * 100] * 5), now_us)
        engine.purge("q", now_us)
        engine.flush(now_us)
        engine.wait()
    engine.trim(now_us)
    engine.wait()
    engine.abandon()


def note_not_compared(folder: Path) -> None:
    engine = open_at(folder)
    fill(engine)
    engine.close(NOW_US)
    plant_bad_body(folder)


def note_unknown_file(folder: Path) -> None:
    open_at(folder).close(NOW_US)
    (folder / "README").write_text("mine")


NOTED: dict[str, tuple[Callable[[Path], None], set[str]]] = {
    "torn-tail": (note_torn_tail, set()),
    "behind-watermark": (note_behind_watermark, set()),
    "no-watermark": (note_no_watermark, set()),
    "leftover": (note_leftover, set()),
    "quarantine": (note_quarantine, {"bad-body"}),
    "known-damage": (note_quarantine, {"bad-body"}),
    "removed-since": (note_removed_since, set()),
    "not-compared": (note_not_compared, {"bad-body"}),
    "unknown-file": (note_unknown_file, set()),
}


def test_every_kind_of_note_is_tried() -> None:
    assert NOTED.keys() == NOTES.keys()


@pytest.mark.parametrize("kind", NOTED)
def test_notes_are_no_defects(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, defects = NOTED[kind]
    folder = tmp_path / "data"
    make(folder)
    report = inspect(folder)
    assert kind in kinds(report.notes)
    assert kinds(report.defects) == defects
    assert main(["verify", str(folder)]) == (1 if defects else 0)
    assert f"note {kind}: " in capsys.readouterr().out


def test_an_older_generation_is_a_leftover(tmp_path: Path) -> None:
    folder = compacted_log(tmp_path / "data")
    (path,) = (path for path in segments(folder) if path.name.count(".") == 2)
    (folder / path.name.replace(".1.seg", ".seg").replace(".2.seg", ".1.seg")).write_bytes(b"old")
    report = inspect(folder)
    assert (report.defects, kinds(report.notes)) == ([], {"leftover"})


def test_gaps_that_retention_left_are_right_when_the_newest_snapshot_is_damaged(tmp_path: Path) -> None:
    """Damaged where it is, and after a start that has set it aside."""
    worker = Worker(tmp_path, 11, queues=("brief", "lazy"))
    for _ in range(300):
        worker.turn()
    worker.settle_down()
    worker.engine.trim(worker.now_us)
    worker.settle_down()
    worker.engine.abandon()
    assert inspect(tmp_path).defects == []
    found = [parse_segment_name(path.name) or (0, 0) for path in segments(tmp_path)]
    assert found[0][0] > 0 or any(generation for _, generation in found), "nothing was trimmed"
    newest = max(tmp_path.glob("snapshot-*"))
    newest.write_bytes(newest.read_bytes()[:-1])
    assert kinds(inspect(tmp_path).defects) == {"bad-snapshot"}
    worker._open().abandon()
    assert inspect(tmp_path).defects == []


def test_a_torn_tail_is_what_a_start_cuts(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    note_torn_tail(folder)
    (folder / WATERMARK).unlink()
    report = inspect(folder)
    assert (report.defects, kinds(report.notes)) == ([], {"torn-tail", "no-watermark"})
    engine = open_at(folder, LARGE)
    assert segments(folder)[-1].name == f"{report.position:020d}.seg"
    engine.close(NOW_US)


def test_an_unfinished_transaction_at_the_end_is_a_torn_tail(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    engine = open_at(folder, LARGE)
    engine.transact("key", [("q", Batch.of([b"a"])), ("p", Batch.of([b"b"]))], NOW_US)
    engine.flush(NOW_US)
    engine.wait()
    engine.abandon()
    path, at, header = blocks(folder)[-1]
    assert header.flags & FLAG_END
    patch(path, at, bytes(HEADER_BYTES + header.body_bytes))
    (folder / WATERMARK).unlink()
    report = inspect(folder)
    assert report.defects == []
    assert "the transaction at log position" in next(f.text for f in report.notes if f.kind == "torn-tail")
    engine = open_at(folder, LARGE)
    assert engine.describe("q").offset_end == 0
    engine.close(NOW_US)


def test_damage_is_proven_by_a_later_block_where_the_watermark_is_lost(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    engine = open_at(folder, LARGE)
    fill(engine)
    engine.abandon()
    path, at, _ = block_of(folder, KIND_MESSAGES)
    patch(path, at + HEADER_BYTES, b"\xff")
    (folder / WATERMARK).unlink()
    assert [(f.kind, f.position) for f in inspect(folder).defects] == [("bad-body", at)]


def test_the_tail_that_the_watermark_covers_is_not_torn_but_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    engine = open_at(folder, LARGE)
    fill(engine)
    engine.abandon()
    path, at, header = blocks(folder)[-1]
    patch(path, at + HEADER_BYTES, b"\xff")
    (defect,) = inspect(folder).defects
    assert (defect.kind, defect.position) == ("bad-body", at)
    assert header.kind == KIND_SETTLEMENTS, "what was settled in a turn comes behind its messages"
    assert defect.first == header.first_event
    assert defect.end > defect.first


# --- misuse and the terminal -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "there is no folder"),
        (lambda path: path.write_text("a file"), "is not a folder"),
        (lambda path: path.mkdir(), "there is no log in"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "dump"])
def test_no_log(
    tmp_path: Path,
    command: str,
    make: Callable[[Path], object],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "data"
    make(path)
    assert main([command, str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"penstock {command}: ")
    assert says in err
    assert str(path) in err
    assert err.count("\n") == 1


def test_a_file_that_cannot_be_read_at_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = segments(folder)[1]
    path.unlink()
    path.mkdir()
    assert main(["verify", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("penstock verify: ")


def test_help_explains_every_kind_and_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--help"]) == 0
    out = capsys.readouterr().out
    for kind, meaning in {**DEFECTS, **NOTES}.items():
        assert f"  {kind} " in out
        assert meaning in out
    assert "  penstock verify penstock-data\n" in out


def test_the_commands_of_the_page_about_the_format(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "log-format.md"
    commands = re.findall(r"^\$ penstock (.+)$", page.read_text(), re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        assert main(command.replace("penstock-data", str(folder)).split()) == 0
        assert capsys.readouterr().out


def test_progress_on_a_terminal_only(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messaging, "PROGRESS_SECONDS", 0)
    assert main(["verify", str(folder)]) == 0
    quiet = capsys.readouterr()
    assert quiet.err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["verify", str(folder)]) == 0
    shown = capsys.readouterr()
    assert shown.out == quiet.out
    assert "\r100 % of " in shown.err
    assert shown.err.endswith("\r\x1b[K")
