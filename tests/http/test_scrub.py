"""Scrubbing: rot in sealed segments of a running broker is found by itself, and told as `verify` tells it."""

import asyncio
import errno
import os
import signal
from pathlib import Path
from typing import cast

import pytest

from penstock.http.link import Link
from penstock.http.scrubbing import Scrubber
from penstock.log.disk import RealDisk, RealFile
from penstock.log.errors import LogError, StageDamaged
from penstock.log.inspect import inspect_log
from penstock.log.log import Log, open_log
from penstock.log.results import StageInfo
from penstock.log.scan import Hole
from penstock.log.scrub import Sealed, scrub, sealed_segments
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.policy import Policies
from penstock.model.words import Outcome
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.http.scrape import scrape
from tests.server.harness import BrokerProcess, until
from tests.server.test_second import second_of

SEGMENT_BYTES = 65_536
NOW_US = 1_700_000_000_000_000


def scrub_again(broker: BrokerProcess) -> None:
    """The next process begins with a pass."""
    os.kill(second_of(broker), signal.SIGKILL)

    def is_over() -> bool:
        with Api(broker.ports["http"]) as api:
            return scrape(api)["penstock_scrubbed_passes_total", {}] > 0

    until(is_over, "everything to have been read")


def damage(broker: BrokerProcess) -> list[str]:
    with Api(broker.ports["http"]) as api:
        told: list[str] = api.get("/v1/engine")["damage"]
        return told


def test_a_bit_that_changes_under_a_running_broker_is_found(start_broker: StartBroker) -> None:
    broker = start_broker("--log-segment-bytes", str(SEGMENT_BYTES))
    data = broker.folder / "data"
    with Api(broker.ports["http"]) as api:
        for number in range(12):
            api.send("orders", b"%02d" % number * 10_000)
    scrub_again(broker)
    assert damage(broker) == []
    segment = sorted(data.glob("*.seg"))[1]
    at = segment.read_bytes().index(b"04" * 10_000)
    with segment.open("r+b") as file:
        file.seek(at + 5000)
        file.write(b"!")
    for _ in range(2):  # A second pass tells nothing new.
        scrub_again(broker)
        (told,) = damage(broker)
    with Api(broker.ports["http"]) as api:
        assert told.startswith(f"{segment}: the block at position ")
        assert told.endswith(" does not have its checksum: queue 'orders', offsets 4 to 4")
        assert scrape(api)["penstock_damage_reports", {}] == 1
        assert scrape(api)["penstock_scrubbed_bytes_total", {}] > 2 * SEGMENT_BYTES
        assert api.get("/readyz") == {"ready": True}
        assert broker.log().count(told) == 1
        assert told in [it.text for it in inspect_log(str(data)).defects]
        # Nobody has given up a message for it so far.
        assert api.get("/v1/queues/orders")["ready"] == 12
    broker.stop()
    broker.start()
    assert damage(broker) == [told]


# --- what is no rot ---


def filled(folder: Path, count: int = 40, policies: Policies | None = None) -> Log:
    settings = LogSettings(segment_bytes=SEGMENT_BYTES)
    log = open_log(str(folder), NOW_US, settings=settings, policies=policies)
    for number in range(count):
        log.append("q", Batch.of([b"%04d" % number * 2500]), NOW_US)
        log.flush(NOW_US)
    log.wait()
    return log


def holes(disk: RealDisk) -> list[Hole]:
    return [it for segment in sealed_segments(disk) for it in scrub(disk, segment) if isinstance(it, Hole)]


def test_what_retention_removes_or_compacts_meanwhile_is_no_damage(tmp_path: Path) -> None:
    log = filled(tmp_path, policies=Policies({"q": {"retention-seconds": 0}}))
    disk = RealDisk(str(tmp_path), read_only=True)
    segments = sealed_segments(disk)
    assert len(segments) > 4
    begun = [(segment, scrub(disk, segment)) for segment in segments]
    assert all(isinstance(next(reading), int) for _, reading in begun[::2])
    # All but every seventh is settled: what is left of most segments is a compacted one, some go.
    log.take("q", "c", 40, NOW_US)
    for number in range(40):
        if number % 7:
            log.settle("q", "c", Outcome.ACK, [(number, number + 1)], NOW_US)
    for _ in range(20):  # Retention waits for two snapshots.
        log.append("q", Batch.of([bytes(10_000)]), NOW_US)
        log.flush(NOW_US)
        log.wait()
    log.trim(NOW_US + 1)
    log.wait()
    assert not {name for name, *_ in segments}.issubset(disk.names())
    for segment, reading in begun:
        assert [it for it in reading if isinstance(it, Hole)] == []
        log.report_rot(segment[0], Hole(segment[1], segment[1] + 8, None))  # as if it were
    assert holes(disk) == []
    gone = {name for name, *_ in segments} - set(disk.names())
    assert gone
    assert not any(name in damage.text for damage in log.damage for name in gone)
    log.close(NOW_US)


def test_what_is_read_wrong_once_is_no_rot_and_what_is_blank_in_the_middle_is(tmp_path: Path) -> None:
    filled(tmp_path).close(NOW_US)

    class Flaky(RealFile):
        reads = 0

        def read(self, position: int, length: int) -> bytes:
            Flaky.reads += 1
            data = super().read(position, length)
            return data[:500] + b"?" + data[501:] if Flaky.reads == 1 else data

    class FlakyDisk(RealDisk):
        def open(self, name: str) -> RealFile:
            return Flaky(self.descriptor(name, os.O_RDONLY))

    disk = FlakyDisk(str(tmp_path), read_only=True)
    assert holes(disk) == []
    assert Flaky.reads > 2
    name, base, _ = sealed_segments(disk)[0]
    with (tmp_path / name).open("r+b") as file:
        file.seek(4096)
        file.write(bytes(8192))
    hole = holes(disk)[0]
    assert base < hole.start < hole.end
    log = open_log(str(tmp_path), NOW_US, settings=LogSettings(segment_bytes=SEGMENT_BYTES))
    for _ in range(2):
        log.report_rot(name, hole)
    (damage,) = log.damage
    assert name in damage.text
    log.close(NOW_US)


def test_what_this_process_lacks_is_no_damage(tmp_path: Path) -> None:
    """Too many callers may have taken all descriptors: nothing is told of the files, which stays for good."""
    filled(tmp_path).close(NOW_US)
    told: list[str] = []

    class Told(Scrubber):
        def _tell(self, segment: Sealed, hole: Hole, why: str = "") -> None:
            told.append(why)

    class Poor(RealDisk):
        error = errno.EMFILE

        def open(self, name: str) -> RealFile:
            raise OSError(self.error, os.strerror(self.error), name)

    async def scrubbing() -> Scrubber:
        return Told(str(tmp_path), cast(Link, None))

    scrubber = asyncio.run(scrubbing())
    scrubber._disk = disk = Poor(str(tmp_path), read_only=True)
    segments = sealed_segments(disk)
    with pytest.raises(OSError, match="Too many open files"):
        scrubber._pass(segments)
    assert (told, scrubber.passes) == ([], 0)
    disk.error = errno.EIO
    scrubber._pass(segments)
    assert len(told) == len(segments)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    log = filled(tmp_path)
    name, base, _ = sealed_segments(RealDisk(str(tmp_path), read_only=True))[0]
    log.report_rot(name, Hole(base, base, None), "[Errno 5] Input/output error")
    (damage,) = log.damage
    assert damage.text == f"{tmp_path}/{name}: cannot be read: [Errno 5] Input/output error"
    log.close(NOW_US)


def test_what_was_staged_is_told_as_what_it_is(tmp_path: Path) -> None:
    """With the messages that it has become, or the stage that waits, and is not committed any more."""
    log = open_log(str(tmp_path), NOW_US, settings=LogSettings(segment_bytes=SEGMENT_BYTES))
    stages: list[str] = []

    def note(info: StageInfo | LogError) -> None:
        assert isinstance(info, StageInfo)
        stages.append(info.stage)

    for key in ("done", "open"):
        log.stage(key, [("q", Batch.of([key.encode() * 1000] * 3))], NOW_US, note)
        log.wait()
    log.commit("done", stages[:1], NOW_US)
    for _ in range(10):
        log.append("q", Batch.of([bytes(10_000)]), NOW_US)
        log.flush(NOW_US)
    log.wait()
    disk = RealDisk(str(tmp_path), read_only=True)
    first = tmp_path / sealed_segments(disk)[0].name
    for content in (b"done", b"open"):
        with first.open("r+b") as file:
            file.seek(first.read_bytes().index(content * 1000))
            file.write(b"!")
    for hole in holes(disk):
        log.report_rot(first.name, hole)
    told = [damage.text for damage in log.damage]
    assert [text.partition(" does not have its checksum: ")[2] for text in told] == [
        "queue 'q', offsets 0 to 2",
        f"transaction 'open', stage '{stages[1]}'",
    ]
    assert told == [finding.text for finding in inspect_log(str(tmp_path)).defects]
    with pytest.raises(StageDamaged, match="stage that part again"):
        log.commit("open", stages[1:], NOW_US)
    log.close(NOW_US)
