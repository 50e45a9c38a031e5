"""The engine contract, run by the embedded log: on a real folder with threads, step by step, and on a disk
that forgets with every crash what was not synced."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.log.disk import Disk, RealDisk
from penstock.log.log import Log
from penstock.log.state import LogSettings
from penstock.log.workers import ThreadWorker, Worker
from penstock.model.policy import Policies
from tests.log.contract import EngineContract, Harness
from tests.log.inline import InlineWorker
from tests.log.simdisk import SimDisk
from tests.seeds import SEED

SMALL = LogSettings(segment_bytes=16 * 1024, block_bytes=2048, cache_bytes=4096, snapshot_blocks=16)


class LogHarness:
    """The embedded log on a disk. `wait` blocks until all work is done, so `drive` needs no clock."""

    identity_stays = True

    def __init__(
        self, disk: Callable[[], Disk], settings: LogSettings, worker: Callable[[str], Worker]
    ) -> None:
        self._disk = disk
        self._settings = settings
        self._worker = worker
        self._policies = Policies()
        self._engine: Log | None = None

    def open(self, now_us: int, policies: Policies) -> Log:
        self._policies = policies
        self._engine = Log.open(
            self._disk(),
            now_us,
            settings=self._settings,
            policies=policies,
            writer=self._worker("writer"),
            keeper=self._worker("keeper"),
        )
        return self._engine

    def _opened(self) -> Log:
        assert self._engine is not None
        return self._engine

    def reopen(self, now_us: int) -> Log:
        self._opened().close(now_us)
        return self.open(now_us, self._policies)

    def crash(self, now_us: int) -> Log:
        self._opened().abandon()
        return self.open(now_us, self._policies)

    def drive(self, until: Callable[[], bool], seconds: float) -> bool:
        engine = self._opened()
        engine.poll()
        if until():
            return True
        engine.wait()
        return until()

    def end(self) -> None:
        if self._engine is not None:
            self._engine.abandon()
            assert not self._engine.damage


class SimulatedHarness(LogHarness):
    """The power fails with the process: any part of what was not synced is gone."""

    def __init__(self, chance: random.Random) -> None:
        self._simulated, self._chance = SimDisk(), chance
        super().__init__(lambda: self._simulated, SMALL, inline)

    def crash(self, now_us: int) -> Log:
        self._simulated = self._simulated.crash(self._chance)
        return self.open(now_us, self._policies)


def in_folder(folder: Path) -> Callable[[], Disk]:
    return lambda: RealDisk(str(folder))


def thread(name: str) -> Worker:
    return ThreadWorker(name, lambda: None)


def inline(name: str) -> Worker:
    return InlineWorker()


class TestLog(EngineContract):
    """As it runs: threads, and files of the usual size."""

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[Harness]:
        harness = LogHarness(in_folder(tmp_path), LogSettings(), thread)
        yield harness
        harness.end()


class TestLogInSmallPieces(EngineContract):
    """Segments, blocks and cache so small that every test crosses their borders many times."""

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[Harness]:
        harness = LogHarness(in_folder(tmp_path), SMALL, inline)
        yield harness
        harness.end()


class TestLogOnASimulatedDisk(EngineContract):
    @pytest.fixture
    def harness(self, request: pytest.FixtureRequest) -> Iterator[Harness]:
        harness = SimulatedHarness(random.Random(f"{SEED} {request.node.name}"))
        yield harness
        harness.end()
