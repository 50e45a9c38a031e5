"""What many queues cost: memory of the two processes, a start, a list of them; and what others notice of it.

Each queue has one message, which waits. They are made over one PHPMQ connection, without a limit on how fast.
"""

import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from urllib.error import HTTPError

from bench import peers
from bench.bench_hostile import Pair, Row
from bench.server import Server, disk_folder

WARM_QUEUES = 10_000  # Their messages fill what the log keeps at hand, which is no larger for more queues.
MEMORY_QUEUES = 20_000
LISTED_QUEUES = 10_000
START_QUEUES = 100_000
LISTS = 20
MADE_SECONDS_MAX = 120.0
SETTLED_SECONDS = 12.0
"""Until both processes have looked at all of them, and the loop has had time for a snapshot."""


def _penstock(folder: Path) -> Server:
    more = [*peers.AS_MANY_QUEUES, "--limits-queues-max", str(2 * START_QUEUES)]
    return peers.penstock(folder, http=True, more=more)


def _make(server: Server, first: int, end: int) -> None:
    message = b"H0100102P01%029dmade-%06dP02%029dx"
    with socket.create_connection(("127.0.0.1", server.ports["phpmq"])) as peer:
        for start in range(first, end, 1000):
            peer.sendall(b"".join(message % (11, number, 1) for number in range(start, start + 1000)))
        deadline = time.monotonic() + MADE_SECONDS_MAX
        while time.monotonic() < deadline:
            with suppress(HTTPError):
                _get(server, f"/v1/queues/made-{end - 1:06d}")
                return
            time.sleep(0.05)
    raise TimeoutError(f"{end - first} queues were not made within {MADE_SECONDS_MAX:.0f} s")


def _get(server: Server, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports['http']}{path}") as answer:
        body: bytes = answer.read()
        return body


def _resident_kb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return next(float(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


def _costs(server: Server) -> Iterator[Row]:
    _make(server, 0, WARM_QUEUES)
    _get(server, "/v1/queues")
    time.sleep(SETTLED_SECONDS)
    broker = server.pid
    http = max((pid for pid in server.pids() if pid != broker), key=_resident_kb)
    before = _resident_kb(broker), _resident_kb(http)
    _make(server, WARM_QUEUES, WARM_QUEUES + MEMORY_QUEUES)
    _get(server, "/v1/queues")
    time.sleep(SETTLED_SECONDS)
    for name, pid, was in (("broker", broker, before[0]), ("HTTP process", http, before[1])):
        yield f"a queue in the {name}", (_resident_kb(pid) - was) / MEMORY_QUEUES, "KB", 2.0


def _list(server: Server) -> Iterator[Row]:
    pair = Pair(server.ports)
    alone = pair.run(2.0)
    took: list[float] = []
    beside: list[float] = []
    for _ in range(LISTS):
        began = time.perf_counter()
        _get(server, f"/v1/queues?limit={LISTED_QUEUES}")
        took.append((time.perf_counter() - began) * 1000)
        beside += pair.run(0.1)
    yield f"GET /v1/queues of {LISTED_QUEUES:,}", median(took), "ms", 100.0
    yield "the longest of them", max(took), "ms", 0
    yield "a pair's longest gap, alone", max(alone), "ms", 0
    yield "a pair's longest gap, between lists", max(beside), "ms", 50.0


def run() -> Iterator[Row]:
    with disk_folder() as folder:
        with _penstock(folder) as server:
            yield from _costs(server)
            yield from _list(server)
            _make(server, WARM_QUEUES + MEMORY_QUEUES, START_QUEUES)
        for how in ("a stop", "a kill"):
            began = time.perf_counter()
            with _penstock(folder) as server:
                yield f"start with {START_QUEUES:,} after {how}", time.perf_counter() - began, "s", 3.0
                server.kill()
