"""A bit that changes anywhere in a log: whatever is read is what was written, and whatever is lost is told.

The log has messages that were sent, messages that were staged, stages that wait, and what retention has made
of them. Readers and `verify` are asked.
"""

import random
from pathlib import Path

import pytest

from penstock.log.errors import LogDamaged
from penstock.log.inspect import inspect_log
from penstock.log.reader import LogReader, OffsetsMissing
from penstock.log.state import LogSettings
from tests.log.folders import Worker
from tests.log.test_reader import reader_messages, segments

FLIPS = 12

Content = dict[int, tuple[object, ...]]  # by offset


def content(reader: LogReader, queue: str) -> Content:
    known = reader.queue(queue)
    assert known is not None
    rows = reader_messages(reader, queue, known.offset_start, known.offset_end, fail_on_loss=False)
    return {row[0]: row for row in rows if isinstance(row[0], int)}


@pytest.mark.parametrize("seed", range(6))
def test_a_changed_bit_changes_no_message_and_is_told(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    settings = LogSettings(
        segment_bytes=rng.choice((2048, 16_384)),
        block_bytes=rng.choice((256, 1024)),
        snapshot_blocks=rng.choice((5, 60)),
    )
    worker = Worker(tmp_path, seed, settings=settings)
    for _ in range(100):
        worker.turn()
    worker.engine.close(worker.now_us)
    with LogReader(str(tmp_path)) as reader:
        good = {queue: content(reader, queue) for queue in reader.queues()}
    for _ in range(FLIPS):
        path = rng.choice(segments(tmp_path))
        whole = path.read_bytes()
        harmed = bytearray(whole)
        harmed[rng.randrange(len(whole.rstrip(b"\0")) or 1)] ^= 1 << rng.randrange(8)
        path.write_bytes(harmed)
        told = lost_by_verify(tmp_path)
        with LogReader(str(tmp_path)) as reader:
            # The name of one may be what has changed.
            for queue in good.keys() & reader.queues().keys():
                check_queue(reader, queue, good[queue], told)
        path.write_bytes(whole)


def lost_by_verify(folder: Path) -> set[tuple[str, int]]:
    defects = inspect_log(str(folder)).defects
    assert not [finding for finding in defects if "'\\x00'" in finding.text]
    return {
        (finding.queue, offset)
        for finding in defects
        if "events" not in finding.text
        for offset in range(finding.first, finding.end)
    }


def check_queue(reader: LogReader, queue: str, good: Content, told: set[tuple[str, int]]) -> None:
    found = content(reader, queue)
    assert found.items() <= good.items()
    lost = good.keys() - found.keys()
    assert {(queue, offset) for offset in lost} <= told
    if lost:
        known = reader.queue(queue)
        assert known is not None
        with pytest.raises((OffsetsMissing, LogDamaged)) as error:
            reader_messages(reader, queue, known.offset_start, max(lost) + 1)
        text = str(error.value)
        assert f"queue {queue!r}" in text
        assert f"offset {min(lost)} is" in text or f"offsets {min(lost)} to" in text
