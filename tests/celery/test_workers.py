"""Celery on Penstock: real workers, and what people do with them. One worker serves most tests."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group

from tests.celery.conftest import MakeApp, StartWorker
from tests.celery.workers import Worker, celery, environment, lines, send
from tests.http.api import Api
from tests.server.harness import ROOT, WAIT_SECONDS, BrokerProcess, until

IDLE_SECONDS = 5.0
IDLE_CPU_SHARE = 0.01
CLOCK_TICK = 0.01


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A result backend that Celery brings along and that needs no server."""
    return f"file://{tmp_path_factory.mktemp('results')}"


@pytest.fixture(scope="module")
def worker(broker: BrokerProcess, results: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    flags = "-c", "2", "-E", "-Q", "celery,second"
    folder = tmp_path_factory.mktemp("worker")
    worker = Worker(broker, folder, "shared", *flags, result_backend=results).ready()
    yield worker
    worker.kill()


@pytest.fixture
def app(make_app: MakeApp, worker: Worker, results: str) -> Celery:
    return make_app(result_backend=results)


def task(app: Celery, name: str, *arguments: object) -> Any:
    return app.signature(f"tests.celery.tasks.{name}", arguments)


# --- tasks and their results ---


def test_a_task_and_its_result(app: Celery) -> None:
    assert send(app, "add", 2, 3).get(timeout=WAIT_SECONDS) == 5


def test_results_by_rpc(start_worker: StartWorker, make_app: MakeApp, api: Api) -> None:
    """They come through a queue of the caller's own, which ends with it."""
    worker = start_worker("rpc", "-P", "solo", "-Q", "rpc", result_backend="rpc://").ready()
    app = make_app(result_backend="rpc://")
    answers = [send(app, "add", number, 1, queue="rpc") for number in range(20)]
    assert [answer.get(timeout=WAIT_SECONDS) for answer in answers] == list(range(1, 21))
    assert app.thread_oid in {row["name"] for row in api.get("/v1/queues")["queues"]}
    app.backend.result_consumer.stop()
    assert app.thread_oid not in {row["name"] for row in api.get("/v1/queues")["queues"]}
    assert worker.stop() == 0


def test_chains_groups_and_chords(app: Celery) -> None:
    flow = chain(task(app, "add", 1, 1), task(app, "add", 3), task(app, "add", 4))
    assert flow.apply_async().get(timeout=WAIT_SECONDS) == 9
    many = group(task(app, "add", number, number) for number in range(10))
    assert many.apply_async().get(timeout=WAIT_SECONDS) == list(range(0, 20, 2))
    joined = chord([task(app, "add", number, number) for number in range(5)], task(app, "total"))
    assert joined.apply_async().get(timeout=WAIT_SECONDS) == 20


def test_a_task_from_any_language(api: Api, app: Celery, results: str) -> None:
    """What a program without Celery posts is a task where its headers say so."""
    headers = {
        "Penstock-Header-Task": "tests.celery.tasks.add",
        "Penstock-Header-Id": "from-elsewhere",
        "Penstock-Header-Content-Type": "application/json",
    }
    posted = api.ask("POST", "/v1/queues/celery/messages", b"[[20, 22], {}, {}]", headers=headers)
    assert posted.status == 200
    assert app.AsyncResult("from-elsewhere").get(timeout=WAIT_SECONDS) == 42


def test_a_task_that_no_worker_knows_is_a_dead_letter(app: Celery, api: Api) -> None:
    app.send_task("no.such.task", queue="second")
    until(lambda: dead_letters(api, "second") == 1, "the dead letter")
    assert send(app, "add", 1, 1, queue="second").get(timeout=WAIT_SECONDS) == 2  # and the worker works on


def test_reject(app: Celery, api: Api) -> None:
    before = dead_letters(api, "second")
    send(app, "refuse", queue="second")
    until(lambda: dead_letters(api, "second") == before + 1, "the dead letter")


def dead_letters(api: Api, queue: str) -> int:
    reply = api.ask("GET", f"/v1/queues/{queue}")
    return int(reply.json["dead"]) if reply.status == 200 else 0


def test_where_a_task_came_from(app: Celery) -> None:
    info = send(app, "delivery").get(timeout=WAIT_SECONDS)
    assert (info["routing_key"], info["redelivered"]) == ("celery", False)


# --- when: countdown, eta, retry ---


def test_a_countdown_waits_in_the_broker(app: Celery, api: Api, tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    began = time.time()
    answer = send(app, "note", str(noted), "now", countdown=1)
    assert api.get("/v1/queues/celery")["held"] == 0
    answer.get(timeout=WAIT_SECONDS)
    assert 1 <= time.time() - began < 3


def test_an_eta_that_the_worker_holds(app: Celery, api: Api) -> None:
    """One without a time zone is the worker's to understand."""
    eta = (datetime.now(UTC) + timedelta(seconds=1.5)).replace(tzinfo=None)
    answer = send(app, "add", 1, 2, eta=eta.isoformat())
    until(lambda: api.get("/v1/queues/celery")["held"] == 1, "the worker to hold it")
    assert answer.get(timeout=WAIT_SECONDS) == 3
    assert datetime.now(UTC).replace(tzinfo=None) >= eta


def test_a_task_that_is_retried(app: Celery, tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    assert send(app, "third_time_lucky", str(tries)).get(timeout=WAIT_SECONDS) == 2
    first, second, third = map(float, lines(tries))
    assert second - first >= 0.3
    assert third - second >= 0.3


# --- acknowledgements ---


@pytest.mark.parametrize(("name", "held"), [("wait_for", 1), ("wait_for_early", 0)])
def test_acks_late_and_early(app: Celery, api: Api, tmp_path: Path, name: str, held: int) -> None:
    said, release = tmp_path / "said", tmp_path / "release"
    answer = send(app, name, str(said), str(release))
    until(lambda: bool(lines(said)), "the task to begin")
    until(
        lambda: api.get("/v1/queues/celery")["held"] == held, "the worker to hold what it acknowledges late"
    )
    release.touch()
    answer.get(timeout=WAIT_SECONDS)
    until(lambda: api.get("/v1/queues/celery")["held"] == 0, "the acknowledgement")


@pytest.mark.parametrize("pool", ["solo", "threads"])
@pytest.mark.long
def test_a_task_longer_than_its_lease_runs_once(
    start_worker: StartWorker, make_app: MakeApp, api: Api, tmp_path: Path, pool: str
) -> None:
    """Also in the pool where nothing else runs beside it; and a worker that stops finishes it."""
    said, release = tmp_path / "said", tmp_path / "release"
    settings: dict[str, object] = {"broker_transport_options": {"lease": 1}}
    queue = f"long-{pool}"
    flags = "-P", pool, "-Q", queue, "--prefetch-multiplier", "1", "-c", "1"
    worker = start_worker(pool, *flags, **settings).ready()
    app = make_app()
    send(app, "wait_for", str(said), str(release), queue=queue)
    until(lambda: bool(lines(said)), "the task to begin")
    other = start_worker(f"{pool}-other", *flags, **settings).ready()  # takes longer than the lease
    assert api.get(f"/v1/queues/{queue}")["held"] == 1
    release.touch()
    assert worker.stop() == 0
    assert [line.split()[0] for line in lines(said)] == ["begun", "ended"]
    counts = api.get(f"/v1/queues/{queue}")
    assert (counts["ready"], counts["held"], counts["dead"]) == (0, 0, 0)
    assert other.stop() == 0


def test_a_worker_that_stops_gives_back_what_it_has_not_begun(
    start_worker: StartWorker, make_app: MakeApp, api: Api, tmp_path: Path
) -> None:
    said, release = tmp_path / "said", tmp_path / "release"
    worker = start_worker("stops", "-c", "1", "-Q", "stops").ready()
    app = make_app()
    for _ in range(4):
        send(app, "wait_for", str(said), str(release), queue="stops")
    until(lambda: bool(lines(said)), "the first to begin")
    until(lambda: api.get("/v1/queues/stops")["held"] == 4, "the worker to hold all four")
    release.touch()
    assert worker.stop() == 0
    done = lines(said).count("ended")
    counts = api.get("/v1/queues/stops")
    assert (counts["held"], counts["ready"]) == (0, 4 - done)


# --- priorities ---


def test_priorities(start_worker: StartWorker, make_app: MakeApp, tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    options: dict[str, object] = {"broker_transport_options": {"priority_steps": [0, 3, 6, 9]}}
    app = make_app(**options)
    for priority in (0, 3, 6, 9) * 3:
        send(app, "note", str(noted), priority, queue="ranked", priority=priority)
    flags = "-P", "solo", "-Q", "ranked", "--prefetch-multiplier", "1"
    worker = start_worker("ranked", *flags, **options).ready()
    until(lambda: len(lines(noted)) == 12, "all tasks")
    assert lines(noted) == sorted(lines(noted), reverse=True)
    assert worker.stop() == 0


def test_several_queues_and_a_narrow_window(
    start_worker: StartWorker, make_app: MakeApp, tmp_path: Path
) -> None:
    """Whatever comes to two of them at once is done, one after the other."""
    noted, queues = tmp_path / "noted", ["a", "b", "c"]
    flags = "-P", "solo", "-Q", ",".join(queues), "--prefetch-multiplier", "1"
    worker = start_worker("narrow", *flags).ready()
    app = make_app()
    for number in range(10):
        for queue in queues:
            send(app, "note", str(noted), f"{queue}{number}", queue=queue)
    until(lambda: len(set(lines(noted))) == 30, "all tasks")
    assert worker.stop() == 0


# --- remote control and events ---


def test_remote_control(app: Celery, worker: Worker) -> None:
    name = f"{worker.name}@test"
    assert app.control.ping(timeout=2, destination=[name]) == [{name: {"ok": "pong"}}]
    inspect = app.control.inspect([name], timeout=2)
    assert {queue["name"] for queue in inspect.active_queues()[name]} == {"celery", "second"}
    assert app.control.rate_limit(
        "tests.celery.tasks.add", "1000/s", reply=True, timeout=2, destination=[name]
    )
    assert app.control.add_consumer("third", reply=True, timeout=2, destination=[name])
    assert send(app, "add", 1, 1, queue="third").get(timeout=WAIT_SECONDS) == 2
    assert app.control.cancel_consumer("third", reply=True, timeout=2, destination=[name])


def test_the_commands(broker: BrokerProcess, worker: Worker) -> None:
    name = f"{worker.name}@test"
    assert re.search(rf"{name}.*OK\s+pong", celery(broker, "inspect", "ping"), re.DOTALL)
    assert f"{name}: OK" in celery(broker, "status")


def test_revoke(app: Celery, worker: Worker, tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    answer = send(app, "note", str(noted), "never", countdown=1)
    answer.revoke()
    send(app, "note", str(noted), "later", countdown=1.2).get(timeout=WAIT_SECONDS)
    assert (answer.state, lines(noted)) == ("REVOKED", ["later"])


def test_events(broker: BrokerProcess, app: Celery, worker: Worker) -> None:
    """`celery events --dump` sees the worker's heartbeat and what becomes of a task."""
    words = [sys.executable, "-u", "-m", "celery", "-A", "tests.celery.tasks", "events", "--dump"]
    seen = ""
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment(broker, {})
    ) as dump:
        try:
            assert dump.stdout is not None
            for line in dump.stdout:
                if "heartbeat" in line and "heartbeat" not in seen:
                    send(app, "add", 1, 1)
                seen += line
                if "succeeded" in line:
                    break
        finally:
            dump.terminate()
    assert f"{worker.name}@test" in seen
    assert [word for word in ("received", "started", "succeeded") if word not in seen] == []


# --- at rest ---


@pytest.mark.long
def test_an_idle_worker_rests(app: Celery, worker: Worker, api: Api) -> None:
    """Under 1 % of a core, over a while in which it has nothing to do but to tell that it lives."""
    until(lambda: api.get("/v1/queues/celery")["held"] == 0, "the worker to be idle")
    began, before = time.monotonic(), worker.cpu_seconds()
    until(lambda: time.monotonic() - began >= IDLE_SECONDS, "a while", 2 * IDLE_SECONDS)
    used = worker.cpu_seconds() - before
    assert used <= IDLE_CPU_SHARE * (time.monotonic() - began) + CLOCK_TICK
    # A request stands at each of its queues, its mailbox included.
    standing = [it["queue"] for row in api.get("/v1/connections")["connections"] for it in row["consumes"]]
    assert sorted(standing) == ["celery", "second", f"{worker.name}@test.celery.pidbox"]
