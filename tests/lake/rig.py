"""Logs to archive, and what tables have of them."""

import os
import signal
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from penstock.lake.archiver import Archiver, Plan, Told
from penstock.lake.table import Table
from penstock.log.log import Log, open_log
from penstock.log.reader import LogReader
from penstock.model.batch import Batch
from tests.http.api import Api
from tests.server.harness import until

DAY_US = 86_400 * 1_000_000
WAIT_SECONDS = 90.0
"""A process with Arrow and deltalake in it begins slowly on a busy machine."""


def is_done(api: Api, *queues: str) -> bool:
    """Whether all of some queues is in both tables."""
    rows = [it for it in api.get("/v1/archive")["queues"] if it["queue"] in queues]
    return len(rows) == 2 * len(queues) and not any(it["lag"] for it in rows)


def wait_done(api: Api, *queues: str) -> None:
    until(lambda: is_done(api, *queues), f"{queues} are archived", WAIT_SECONDS)


def now_us() -> int:
    return time.time_ns() // 1000


def put(log: Log, queue: str, bodies: Iterable[bytes], at_us: int | None = None) -> None:
    """Messages in one block."""
    whole = list(bodies)
    bounds = array("i", [0])
    for body in whole:
        bounds.append(bounds[-1] + len(body))
    at_us = at_us or now_us()
    log.append(queue, Batch(b"".join(whole), bounds, protocol="http"), at_us)
    log.flush(at_us)
    log.wait()


def filled(folder: str, queues: dict[str, int], block: int = 10) -> None:
    """A log with so many messages in each queue."""
    log = open_log(folder, now_us())
    for queue, count in queues.items():
        for first in range(0, count, block):
            put(log, queue, (b"%s %d" % (queue.encode(), n) for n in range(first, min(first + block, count))))
    log.close(now_us())


def archived(
    data: str, path: str, turns: int = 1, tell: Callable[[Told], None] = lambda _: None, **plan: Any
) -> Archiver:
    """An archiver after so many turns."""
    archiver = Archiver(data, Plan(path, **{"seconds": 1, **plan}), tell)
    archiver._open()
    for turn in range(turns):
        archiver.turn(1000.0 * (turn + 1))
    return archiver


def rows_of(path: str, view: str = "messages") -> list[dict[str, Any]]:
    """All rows of a table, as whoever reads Delta sees them."""
    rows: list[dict[str, Any]] = Table(path, view).open().delta.to_pyarrow_table().to_pylist()
    return rows


def assert_complete(data: str, path: str) -> None:
    """Both tables have what the log has, each row once."""
    from penstock.log.arrow import events_batches, messages_batches

    with LogReader(data) as reader:
        for view, make in (("messages", messages_batches), ("events", events_batches)):
            stored = Counter(
                tuple(sorted((key, str(it)) for key, it in row.items()))
                for queue in reader.queues()
                for batch in make(reader, queue, 0)
                for row in batch.to_pylist()
            )
            told = Counter(
                tuple(
                    sorted(
                        (key, str(it)) for key, it in row.items() if key not in ("day", "identity", "headers")
                    )
                )
                for row in rows_of(path, view)
            )
            assert told == stored, view


def main() -> None:
    """As a process: archive all there is, and die by SIGKILL before or after the n-th call of a method."""
    data, path, when, method, number = sys.argv[1:]
    left = [int(number)]
    owner: Any = Table
    real = getattr(owner, method)

    def deadly(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = real(*args, **kwargs)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(owner, method, deadly)
    archived(data, path, turns=20, rows=70)


if __name__ == "__main__":
    main()
