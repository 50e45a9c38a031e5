"""The log of a cluster: restored from a backup, cut in the middle of that, and of another version."""

import base64
import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.log.backup.listing import list_files
from penstock.log.backup.store import Store
from penstock.log.backup.taking import take
from penstock.log.disk import RealDisk
from penstock.log.errors import LogNewer, LogRefused
from penstock.log.jetstream.appender import Appender
from penstock.log.jetstream.cluster import Cluster
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.records import Kind
from penstock.log.log import Log
from penstock.model.batch import Batch
from tests.log.folders import Worker
from tests.log.simdisk import PowerCut
from tests.log.test_backup import Source
from tests.nats.streams import TestLog, link_at, new_log, stored_in
from tests.server.harness import ROOT

WRITTEN = ROOT / "tests" / "data" / "stream-0.1.0"


@pytest.fixture(scope="module")
def nats(node: Cluster) -> Iterator[LinkThread]:
    with link_at(node.nodes[0].url, alone=False) as nats:
        yield nats


def facts(log: Log) -> dict[str, dict[str, int]]:
    found = {name: log.describe(name) for name in log.queues()}
    return {n: {"ready": it.ready, "dead": it.dead, "offset_end": it.offset_end} for n, it in found.items()}


# --- versions ----------------------------------------------------------------------------------------


def test_a_stream_of_0_1_0(nats: LinkThread, tmp_path: Path) -> None:
    names = new_log(nats)
    for line in lzma.decompress((WRITTEN / "records.jsonl.xz").read_bytes()).splitlines():
        fields = json.loads(line)
        nats.ask(nats.api.put(names.file(fields["file"]), base64.b64decode(fields["record"])))
    expected = json.loads((WRITTEN / "expected.json").read_text())
    log = TestLog(nats, names, tmp_path / "a")
    log.now_us = 1_794_100_000_000_000
    engine = log.open()
    assert facts(engine) == expected
    assert list(engine.damage) == []
    (piece,) = engine.take("orders", "ann", 1, log.now_us)
    assert piece.offset_start == 24
    engine.append("orders", Batch.of([b"new"]), log.now_us, lambda _: None)
    engine.flush(log.now_us)
    engine.wait()
    log.led.close(log.now_us)
    again = log.again(tmp_path / "b")
    expected["orders"] = {"ready": 159, "dead": 24, "offset_end": 183}
    assert facts(again.open()) == expected
    again.led.close(log.now_us)


def test_what_a_later_version_has_written_is_refused(nats: LinkThread, tmp_path: Path) -> None:
    log = TestLog(nats, new_log(nats), tmp_path / "a")
    engine = log.open()
    engine.append("orders", Batch.of([b"one"]), log.now_us, lambda _: None)
    engine.flush(log.now_us)
    engine._sealer.control({"op": "format", "format": 99, "queue": 0}, log.now_us)
    engine.flush(log.now_us)
    engine.wait()
    log.led.abandon()
    before = len(stored_in(nats, log.names))
    for _ in range(2):
        with pytest.raises(
            LogNewer, match=r"says format 99, which this version does not know.* newer version"
        ):
            log.again(tmp_path / "b").open()
    assert len(stored_in(nats, log.names)) == before


# --- backups -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, int]]]:
    """A backup, and the queues that are in it."""
    folder = tmp_path_factory.mktemp("kept")
    worker = Worker(folder / "data", 9)
    for _ in range(60):
        worker.turn()
    worker.settle_down()
    disk = RealDisk(str(folder / "b"))
    disk.lock()
    take(Store(disk), Source(worker))
    disk.unlock()
    worker.engine.abandon()
    worker.engine = worker._open()
    found = facts(worker.engine)
    worker.engine.abandon()
    assert list_files(str(worker.folder))[0]
    return folder / "b", found


def restore(node: Cluster, kept: Path, names: LogNames, data: Path) -> int:
    data.mkdir(exist_ok=True)
    config = data.with_suffix(".toml")
    config.write_text(f'engine = "{node.nodes[0].url}"\n[cluster]\nname = "{names.log}"\nreplicas = 1\n')
    return main(["restore", str(kept), str(data), "--config", str(config)])


def tails(log: Log) -> dict[str, int]:
    return {name: it["offset_end"] for name, it in facts(log).items()}


def test_a_restore_into_a_stream(
    node: Cluster, nats: LinkThread, kept: tuple[Path, dict[str, dict[str, int]]], tmp_path: Path
) -> None:
    names = new_log(nats)
    assert restore(node, kept[0], names, tmp_path / "data") == 0
    # The front-end that is started there next goes on with the copy, as any other does from the stream.
    for folder in ("data", "elsewhere"):
        log = TestLog(nats, names, tmp_path / folder)
        engine = log.open()
        assert tails(engine) == {name: it["offset_end"] for name, it in kept[1].items()}
        assert list(engine.damage) == []
        log.led.close(log.now_us)
    assert restore(node, kept[0], names, tmp_path / "third") == 1  # It is not empty.


def test_a_restore_into_a_stream_that_is_cut(
    node: Cluster,
    nats: LinkThread,
    kept: tuple[Path, dict[str, dict[str, int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After any record: nobody leads what is there, and called again, from another folder, it goes on."""
    left = 0
    append, purge = Appender._append, Appender._try_purge

    def burn() -> None:
        nonlocal left
        left -= 1
        if not left:
            raise PowerCut

    async def mortal(
        self: Appender, kind: Kind, name: str, position: int, data: memoryview, *, more: bool
    ) -> None:
        burn()
        await append(self, kind, name, position, data, more=more)

    async def mortal_purge(self: Appender, name: str, before_seq: int) -> tuple[int, str]:
        burn()
        return await purge(self, name, before_seq)

    monkeypatch.setattr(Appender, "_append", mortal)
    monkeypatch.setattr(Appender, "_try_purge", mortal_purge)
    cuts = 0
    for step in range(2, 1000):
        names, left = new_log(nats), step
        try:
            code: int | None = restore(node, kept[0], names, tmp_path / f"{step}")
        except PowerCut:
            code = None
        left = 0
        if code == 0:
            break
        with pytest.raises(LogRefused, match="a restore into it was not finished"):
            TestLog(nats, names, tmp_path / f"{step}-front").open()
        assert restore(node, kept[0], names, tmp_path / f"{step}-again") == 0
        log = TestLog(nats, names, tmp_path / f"{step}-after")
        assert tails(log.open()) == {name: it["offset_end"] for name, it in kept[1].items()}
        log.led.close(log.now_us)
        cuts += 1
    assert cuts > 2
    assert os.path.isdir(tmp_path / "2")
