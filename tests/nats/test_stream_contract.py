"""The engine contract, unchanged, run by the cluster's engine on a real server: how many copies a record has
is NATS' affair. `make test-long` runs it on a cluster of three nodes."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.log.jetstream.cluster import Cluster
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.replica import Replica
from penstock.log.jetstream.servers import parse_server
from penstock.log.jetstream.stream_log import StreamLog, make_missing, open_stream_log
from penstock.log.log import Log
from penstock.log.state import LogSettings
from penstock.model.policy import Policies
from tests.log.contract import EngineContract, Harness
from tests.nats.streams import delete_stream, new_log
from tests.seeds import SEEDED

NODES = 3 if SEEDED else 1
SMALL = LogSettings(segment_bytes=16 * 1024, block_bytes=2048, cache_bytes=4096, snapshot_blocks=16)


class StreamHarness:
    """A log of its own for every test; every opening after a crash begins with an empty folder."""

    identity_stays = True

    def __init__(self, nats: LinkThread, folder: Path) -> None:
        self._nats = nats
        self._folder = folder
        self._folders = 0
        self._names = LogNames(f"t{secrets.token_hex(6)}")
        self._policies = Policies()
        self._log: StreamLog | None = None
        self._replica: Replica
        nats.ask(make_missing(nats, self._names.all_settings(NODES)))

    def open(self, now_us: int, policies: Policies) -> Log:
        self._policies = policies
        self._folders += 1
        self._replica = Replica(self._nats.api, self._names, str(self._folder / str(self._folders)))
        return self._open(now_us)

    def _open(self, now_us: int) -> Log:
        self._nats.ask(self._replica.begin())
        self._log = open_stream_log(
            self._nats,
            self._names,
            self._replica,
            now_us,
            settings=SMALL,
            policies=self._policies,
            wake=lambda: None,
        )
        return self._log.log

    def _opened(self) -> StreamLog:
        assert self._log is not None
        return self._log

    def reopen(self, now_us: int) -> Log:
        self._opened().close(now_us)
        return self._open(now_us)

    def crash(self, now_us: int) -> Log:
        self._opened().abandon()
        return self.open(now_us, self._policies)

    def drive(self, until: Callable[[], bool], seconds: float) -> bool:
        engine = self._opened().log
        engine.poll()
        if until():
            return True
        engine.wait()
        return until()

    def end(self) -> None:
        if self._log is not None:
            self._log.abandon()
            assert not self._log.log.damage
        for stream in (self._names.stream, self._names.state_stream):
            delete_stream(self._nats, stream)


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinkThread]:
    cluster = Cluster(tmp_path_factory.mktemp("nats"), NODES)
    try:
        cluster.start()
        nats = LinkThread.open(parse_server(node.url) for node in cluster.nodes)
        try:
            # With its last stream a server takes the folder of all of them away, also while the next is made.
            new_log(nats)
            yield nats
        finally:
            nats.close()
    finally:
        cluster.stop()


class TestStreamEngine(EngineContract):
    @pytest.fixture
    def harness(self, nats: LinkThread, tmp_path: Path) -> Iterator[Harness]:
        harness = StreamHarness(nats, tmp_path)
        try:
            yield harness
        finally:
            harness.end()
