"""The archive of a cluster with several logs, on real nodes: who leads a log archives it, each row once."""

import time
from collections import Counter
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from penstock.cli.main import main
from tests.cluster.load import Load
from tests.cluster.processes import FrontEnd, Site, site
from tests.cluster.test_shard_backups import send, values
from tests.cluster.test_shards import SHARDS, queues_of_all
from tests.http.api import Api
from tests.lake.rig import WAIT_SECONDS, rows_of
from tests.server.harness import until


def archiving(folder: Path, fronts: int) -> AbstractContextManager[Site]:
    flags = ("--archive-path", str(folder / "lake"), "--archive-seconds", "1")
    return site(folder, nodes=1, fronts=fronts, shards=SHARDS, flags=flags)


def wait_archived(front: FrontEnd, queues: list[str]) -> None:
    """All of them are in both tables."""

    def is_done() -> bool:
        with Api(front.ports["http"]) as api:
            reply = api.ask("GET", "/v1/archive")
        if reply.status != 200 or "missing" in reply.json:
            return False
        rows = [it for it in reply.json["queues"] if it["queue"] in queues]
        return len(rows) == 2 * len(queues) and not any(it["lag"] for it in rows)

    until(is_done, f"{queues} to be archived", WAIT_SECONDS)


def check_tables(running: Site, path: str, queues: list[str]) -> None:
    front = running.running[0]
    rows = [row for row in rows_of(path) if row["queue"] in queues]
    assert set(Counter((row["queue"], row["offset"]) for row in rows).values()) == {1}
    for queue in queues:
        its = sorted((row for row in rows if row["queue"] == queue), key=lambda row: row["offset"])
        assert [row["value"] for row in its] == values(front, queue)
    events = Counter((row["queue"], row["event_offset"]) for row in rows_of(path, "events"))
    assert set(events.values()) == {1}
    assert main(["archive", "check", "--url", front.url("http")]) == 0


def test_all_logs_are_archived_into_one_table(tmp_path: Path) -> None:
    """Whoever leads them, also where a leader dies in the middle."""
    path, queues = str(tmp_path / "lake"), queues_of_all("kept")
    with archiving(tmp_path, 2) as running:
        running.balanced()
        here, there = running.fronts
        send(here, queues, *[b"%d" % number for number in range(50)])
        wait_archived(there, queues)
        check_tables(running, path, queues)
        told = there.ask("/v1/archive")
        assert told["path"] == path
        assert told["error"] is None
        assert {it["view"]: it["rows"] for it in told["tables"]}["messages"] >= 50 * SHARDS
        send(here, queues, *[b"more %d" % number for number in range(50)])
        there.kill()
        send(here, queues, b"last")
        wait_archived(here, queues)
        check_tables(running, path, queues)


@pytest.mark.long
def test_each_row_is_there_once_whoever_dies_or_stands_still(tmp_path: Path) -> None:
    path, queues = str(tmp_path / "lake"), queues_of_all("load")
    with archiving(tmp_path, 3) as running, ExitStack() as stack:
        running.balanced()
        loads = [stack.enter_context(Load(running, queue)) for queue in queues]
        for load in loads:
            load.flows()
        dead, still, last = running.fronts
        dead.kill()
        until(lambda: dead.name not in running.leaders(last), "others to lead", 60)
        running.start_fronts()
        for load in loads:
            load.flows()
        still.pause()  # Its archiver goes on.
        until(lambda: still.name not in running.leaders(last), "others to lead", 60)
        for load in loads:
            load.flows([dead, last])
        still.resume()
        began = time.monotonic()
        for load in loads:
            load.flows()
            load.lead_changed(0.0, began)
        for load in loads:
            load.check()
        wait_archived(last, queues)
        check_tables(running, path, queues)
