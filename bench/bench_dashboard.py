"""What open pages of the dashboard cost the broker's own process, which must not notice them.

A real browser has three pages open (the queues, one queue, the connections) on a broker with a thousand
queues and some hundred connections. CPU time of the first process alone is read over a while without
pages, with them, and without them again; the cost is the difference to the mean of both. "Busy" sends a
steady stream to fifty of the queues meanwhile. Needs Chromium and Playwright, as the tests do.
"""

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from bench import peers
from bench.server import PeerMissing, Server, disk_folder
from penstock import connect
from penstock.dashboard.feed import LINGER_SECONDS

QUEUES = 1_000
BUSY_QUEUES = 50
BUSY_PER_SECOND = 500
CONNECTIONS = 200
WINDOW_SECONDS = 30.0
SETTLE_SECONDS = 5.0
PAGES = ("/", "/queue/tenant-0000", "/connections")
COST_GOAL = 1.0

Row = tuple[str, float, str, float]


def run() -> list[Row]:
    """See the module's docstring."""
    with ExitStack() as stack:
        folder = stack.enter_context(disk_folder())
        server = stack.enter_context(peers.penstock(folder, http=True))
        driver = stack.enter_context(sync_playwright())
        browser = driver.chromium.launch(executable_path=_chromium(), args=["--headless", "--no-sandbox"])
        stack.callback(browser.close)
        with connect(f"phpmq://127.0.0.1:{server.ports['phpmq']}") as mq:
            for queue in _queues(QUEUES):
                mq.send(queue, b"x")
        for _ in range(CONNECTIONS):
            address = ("127.0.0.1", server.ports["phpmq"])
            stack.enter_context(closing(socket.create_connection(address)))
        rows = [*_cost("idle", server, browser)]
        with _traffic(server):
            rows += _cost(f"{BUSY_PER_SECOND} msg/s", server, browser)
        return rows


def _queues(count: int) -> list[str]:
    return [f"tenant-{at:04d}" for at in range(count)]


def _cost(name: str, server: Server, browser: Browser) -> Iterator[Row]:
    time.sleep(SETTLE_SECONDS)
    before = _share(server.pid)
    with _open_pages(server, browser):
        time.sleep(SETTLE_SECONDS)
        beside = _share(server.pid)
    time.sleep(LINGER_SECONDS + SETTLE_SECONDS)
    after = _share(server.pid)
    without = (before + after) / 2
    yield f"{name}, no page", without, "% core", 0
    yield f"{name}, {len(PAGES)} pages", beside, "% core", 0
    yield f"{name}, cost of the pages", beside - without, "% core", COST_GOAL


def _share(pid: int) -> float:
    """How much of a core one process uses, over a while."""
    began, before = time.monotonic(), _cpu_seconds(pid)
    time.sleep(WINDOW_SECONDS)
    return 100 * (_cpu_seconds(pid) - before) / (time.monotonic() - began)


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process without those that it has started."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _open_pages(server: Server, browser: Browser) -> Iterator[None]:
    with closing(browser.new_context()) as context:
        for path in PAGES:
            page = context.new_page()
            page.goto(f"http://127.0.0.1:{server.ports['http']}{path}")
            page.get_by_role("status").filter(has_text="Ready").wait_for()
        yield


@contextmanager
def _traffic(server: Server) -> Iterator[None]:
    """A steady stream, spread over some queues."""
    queues, ending = _queues(BUSY_QUEUES), threading.Event()

    def send() -> None:
        with connect(f"phpmq://127.0.0.1:{server.ports['phpmq']}") as mq:
            while not ending.wait(BUSY_QUEUES / BUSY_PER_SECOND):
                for queue in queues:
                    mq.send(queue, bytes(100))

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        ending.set()
        sender.join()


def _chromium() -> str:
    found = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if found is None:
        raise PeerMissing("chromium", "Debian: chromium")
    return found
