"""Celery on Penstock when processes die, the broker and workers: what was sent is done, at least once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.celery.conftest import MakeApp, StartWorker
from tests.celery.workers import lines, send
from tests.http.api import Api
from tests.seeds import some
from tests.server.harness import BrokerProcess, until

LEASE_SECONDS = 2
RETRY = {"max_retries": None, "interval_start": 0, "interval_step": 0.1, "interval_max": 0.5}
SETTINGS: dict[str, Any] = {
    "broker_transport_options": {"lease": LEASE_SECONDS},
    "task_publish_retry_policy": RETRY,
    "task_ignore_result": True,
    "worker_prefetch_multiplier": 16,
}

NAMES = "one", "two"
QUIET = "-P", "solo", "-l", "WARNING", "--without-heartbeat"
CRASHES = (0.15, 0, False), (0.35, None, True), (0.55, 1, False), (0.75, 0, True)
"""When so much is done: which worker dies, and whether the broker does."""
TASKS = 10_000
SENDERS = 4
TASKS_SECONDS = 120.0
"""For each part of it; all take a quarter of that on two cores that have nothing else to do."""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """One that can come back at the same place."""
    broker = BrokerProcess(tmp_path, "--http", "127.0.0.1:0").start()
    broker.flags = ("--http", f"127.0.0.1:{broker.ports['http']}")
    yield broker
    if broker.running:
        broker.kill()


def test_a_task_of_a_killed_worker_is_done_by_another(
    broker: BrokerProcess, start_worker: StartWorker, make_app: MakeApp, tmp_path: Path
) -> None:
    said, release = tmp_path / "said", tmp_path / "release"
    first = start_worker("first", "-P", "solo", **SETTINGS).ready()
    app = make_app(**SETTINGS)
    send(app, "wait_for", str(said), str(release))
    until(lambda: len(lines(said)) == 1, "the task to begin")
    first.kill()
    release.touch()
    second = start_worker("second", "-P", "solo", **SETTINGS).ready()
    until(lambda: lines(said)[-1] == "ended", "another worker to do it")
    begun = [line for line in lines(said) if line.startswith("begun")]
    assert begun == [f"begun {first.pid}", f"begun {second.pid}"]
    with Api(broker.ports["http"]) as api:
        until(lambda: api.get("/v1/queues/celery")["held"] == 0, "the acknowledgement")
    assert second.stop() == 0


def restart(broker: BrokerProcess) -> None:
    broker.stop()
    broker.start()


def kill(broker: BrokerProcess) -> None:
    broker.kill()
    broker.start()


def kill_its_api(broker: BrokerProcess) -> None:
    """The process that speaks HTTP, which the other one starts again."""
    os.kill(int(Path(f"/proc/{broker.pid}/task/{broker.pid}/children").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("end", some([restart, kill, kill_its_api], kill), ids=lambda end: end.__name__)
def test_a_broker_that_comes_back(
    broker: BrokerProcess,
    start_worker: StartWorker,
    make_app: MakeApp,
    tmp_path: Path,
    end: Callable[[BrokerProcess], None],
) -> None:
    """Worker and sender find it again by themselves; what was sent before is there."""
    noted = tmp_path / "noted"
    worker = start_worker("worker", "-c", "1", **SETTINGS).ready()
    app = make_app(**SETTINGS)
    send(app, "note", str(noted), "before")
    until(lambda: lines(noted) == ["before"], "the first task")
    send(app, "note", str(noted), "meanwhile", countdown=1.5)
    end(broker)
    send(app, "note", str(noted), "after")
    until(lambda: {"meanwhile", "after"} <= set(lines(noted)), "the others")
    until(lambda: app.control.ping(timeout=1) == [{"worker@test": {"ok": "pong"}}], "remote control")
    assert worker.stop() == 0


@pytest.mark.long
def test_ten_thousand_tasks_through_crashes(
    broker: BrokerProcess, start_worker: StartWorker, make_app: MakeApp, tmp_path: Path
) -> None:
    """Broker and workers are killed in turn while tasks are sent and done: each is done, none is lost."""
    noted = tmp_path / "noted"
    workers = [start_worker(name, *QUIET, **SETTINGS) for name in NAMES]
    app = make_app(**SETTINGS)

    def send_some(first: int) -> None:
        for number in range(first, TASKS, SENDERS):
            send(app, "note", str(noted), number)

    senders = [threading.Thread(target=send_some, args=(first,)) for first in range(SENDERS)]
    for sender in senders:
        sender.start()
    for share, victim, is_broker_killed in CRASHES:
        until(partial(have_done, noted, int(share * TASKS)), f"{share:.0%} of the tasks", TASKS_SECONDS)
        if victim is not None:
            workers[victim].kill()
        if is_broker_killed:
            broker.kill()
            broker.start()
        if victim is not None:
            workers[victim] = start_worker(NAMES[victim], *QUIET, **SETTINGS)
    for sender in senders:
        sender.join(TASKS_SECONDS)
    until(partial(have_done, noted, TASKS), "every task", TASKS_SECONDS)
    with Api(broker.ports["http"]) as api:
        until(lambda: counts(api) == (0, 0, 0), "every message to be acknowledged")
    for worker in workers:
        assert worker.stop() == 0


def have_done(noted: Path, count: int) -> bool:
    return len(set(lines(noted))) >= count


def counts(api: Api) -> tuple[int, int, int]:
    row = api.get("/v1/queues/celery")
    return row["ready"], row["held"], row["dead"]
