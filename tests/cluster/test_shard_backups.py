"""Backups of a cluster with several logs, on real nodes: taken while leaders die, restored into another."""

import json
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow.ipc
import pytest

from penstock.cli import backup as backup_command
from penstock.cli.main import main
from penstock.client import connect
from penstock.log.backup.listing import Listed, Listing
from tests.cluster.load import Load
from tests.cluster.processes import FrontEnd, Site, site
from tests.cluster.test_shards import SHARDS, queues_of_all
from tests.http.api import Api
from tests.server.harness import number_of

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("shards"), nodes=1, fronts=2, shards=SHARDS) as running:
        running.balanced()
        yield running


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """A command, with `--json`; what it says."""

    def call(*words: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert main([*words, "--json"]) == code, capsys.readouterr()
        said = capsys.readouterr()
        return [json.loads(line) for line in said.out.splitlines()] if code == 0 else said.err

    return call


def taken(run: Run, store: Path, front: FrontEnd) -> dict[str, Any]:
    (told,) = run("backup", str(store), "--url", front.url("http"))
    assert told["defects"] == []
    assert len(set(told["logs"])) == SHARDS
    return dict(told)


def into(running: Site, data: Path, name: str, shards: int = SHARDS) -> tuple[str, ...]:
    """What `penstock restore` needs to be told of another cluster on the same nodes."""
    config = data.with_suffix(".toml")
    config.write_text(
        f'engine = "{",".join(running.nodes.urls)}"\n[cluster]\nname = "{name}"\n'
        f"replicas = {len(running.nodes.nodes)}\nshards = {shards}\n"
    )
    return str(data), "--config", str(config)


def send(front: FrontEnd, queues: list[str], *bodies: bytes) -> None:
    with connect(front.url("rq")) as sender:
        for queue in queues:
            sender.send_many(queue, list(bodies))


def values(front: FrontEnd, queue: str) -> list[bytes]:
    """Of all messages that the log has."""
    front.ask(f"/v1/queues/{queue}")
    with Api(front.ports["http"]) as api:
        reply = api.ask("GET", f"/v1/queues/{queue}/log", view="messages", columns="value", start=0)
    assert reply.status == 200, reply
    with pyarrow.ipc.open_stream(reply.body) as reader:
        found: list[bytes] = reader.read_all()["value"].to_pylist()
    return found


def test_any_front_end_takes_a_backup_of_all_logs(pair: Site, tmp_path: Path, run: Run) -> None:
    queues = queues_of_all("kept")
    send(pair.fronts[0], queues, b"x" * 100_000, b"y")
    first = taken(run, tmp_path / "b", pair.fronts[0])
    assert first["bytes"] > SHARDS * 100_000
    # What has been copied from one front-end is not copied again, whoever is asked.
    again = taken(run, tmp_path / "b", pair.fronts[1])
    assert again["logs"] == first["logs"]
    assert again["copied_bytes"] == 0
    send(pair.fronts[1], queues[:1], b"z")
    more = taken(run, tmp_path / "b", pair.fronts[0])
    assert more["copied_files"] == 1
    listed = run("restore", str(tmp_path / "b"), "--check")
    assert [it["backup"] for it in listed] == [it["backup"] for it in (first, again, more)]
    assert main(["backup", str(tmp_path / "b"), "--url", pair.fronts[0].url("http"), "--keep", "1"]) == 0
    (listed,) = run("restore", str(tmp_path / "b"), "--check")
    assert listed["logs"] == first["logs"]


def test_a_restore_is_of_all_logs_at_one_time(pair: Site, tmp_path: Path, run: Run) -> None:
    queues = queues_of_all("timed")
    store = tmp_path / "b"
    send(pair.fronts[0], queues, b"one", b"two")
    backup = taken(run, store, pair.fronts[0])
    send(pair.fronts[1], queues, b"three")
    then = f"{time.time_ns() // 1000 + 1}"
    send(pair.fronts[1], queues, b"four")
    taken(run, store, pair.fronts[1])
    first = run("restore", str(store), "--list")[0]
    assert first["backup"] == backup["backup"]
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(int(then) // 1_000_000)) + f".{then[-6:]}Z"
    for name, words, count in (
        ("last", (), 4),
        ("first", ("--at", first["time"]), 2),
        ("then", ("--at", moment), 3),
    ):
        where = into(pair, tmp_path / name, f"timed-{name}")
        (done,) = run("restore", str(store), *where, *words)
        assert done["defects"] == []
        assert {queue: done["queues"][queue] for queue in queues} == dict.fromkeys(queues, count)
    # It is not empty, and overwritten is nothing.
    assert "is not empty" in run("restore", str(store), *where, code=1)


def test_what_a_backup_of_several_logs_is_not_restored_into(pair: Site, tmp_path: Path, run: Run) -> None:
    store = tmp_path / "b"
    taken(run, store, pair.fronts[0])
    other = into(pair, tmp_path / "other", "other", SHARDS + 1)
    said = run("restore", str(store), *other, code=1)
    assert f"has {SHARDS + 1}, or is to have so many, and the backup has {SHARDS}" in said
    assert "in another log than its name says" in said
    assert "a data folder has one" in run("restore", str(store), str(tmp_path / "one"), code=2)


def restored(running: Site, run: Run, store: Path, name: str, *words: str) -> FrontEnd:
    """A front-end of a cluster that was restored, with the folder that was made with it."""
    folder = running.fronts[0].folder.parent / name
    folder.mkdir()
    (done,) = run("restore", str(store), *into(running, folder / "data", name), *words)
    assert done["defects"] == []
    front = FrontEnd(name, folder, running.nodes, running.nodes.urls, "--cluster-name", name)
    running.fronts.append(front)
    return front.start()


def test_where_nobody_leads_there_is_no_backup(
    pair: Site, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues, store = queues_of_all("orphaned"), tmp_path / "b"
    here, there = pair.fronts
    send(here, queues, b"one", b"two")
    led = pair.leaders(here)
    there.kill()
    with monkeypatch.context() as patch:
        patch.setattr(backup_command, "LEADER_SECONDS", 0.0)
        said = run("backup", str(store), "--url", here.url("http"), code=1)
    assert f"nobody has led shard {led.index('b')} for" in said
    assert "no backup was made" in said
    assert "there is no backup in" in run(
        "restore", str(store), *into(pair, tmp_path / "r", "orphaned"), code=1
    )
    taken(run, store, here)  # Somebody is waited for.
    again = restored(pair, run, store, "orphaned")
    assert len(again.ask("/v1/engine")["cluster"]["shards"]) == SHARDS
    for queue in queues:
        assert values(again, queue) == [b"one", b"two"]


@pytest.mark.long
def test_leaders_die_while_they_are_copied(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is gone on with at the next one. What was confirmed before is in it, and each log comes back as it
    was at one position."""
    queues, store = queues_of_all("left"), tmp_path / "b"
    busy = queues_of_all("load")[:2]
    real = backup_command._Broker.read
    with site(tmp_path, nodes=1, fronts=3, shards=SHARDS) as running, ExitStack() as stack:
        running.balanced()
        victim, _, last = running.fronts
        send(last, queues, *[b"%d" % number * 100_000 for number in range(40)])
        loads = [stack.enter_context(Load(running, queue)) for queue in busy]
        for load in loads:
            load.flows()
        shard = running.leaders(last).index(victim.name)

        def read(
            self: backup_command._Broker, listing: Listing, file: Listed
        ) -> Generator[bytes, None, None]:
            for chunk in real(self, listing, file):
                if listing.shard == shard and file.name.endswith(".seg") and victim.running:
                    victim.kill()
                yield chunk

        monkeypatch.setattr(backup_command._Broker, "read", read)
        before = [set(load.record.confirmed) for load in loads]
        taken(run, store, last)
        assert not victim.running
        running.start_fronts()
        for load in loads:
            load.flows()
        taken(run, store, last)
        backups = run("restore", str(store), "--check")
        again = restored(running, run, store, "again", "--at", backups[0]["time"])
        for load in loads:
            load.check()
        for queue in (*queues, *busy):
            found, all_of_it = values(again, queue), values(last, queue)
            assert found == all_of_it[: len(found)]
        for numbers, queue in zip(before, busy, strict=True):
            assert numbers <= set(map(number_of, values(again, queue)))
