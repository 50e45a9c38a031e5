"""A broker for each module; workers and apps of its own for each test, of which nothing stays."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery import Celery
from kombu import pools

from tests.celery.workers import Worker, url_of
from tests.http.api import Api
from tests.server.harness import BrokerProcess

StartWorker = Callable[..., Worker]
MakeApp = Callable[..., Celery]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("broker"), "--http", "127.0.0.1:0").start()
    yield process
    if process.running:
        process.kill()


@pytest.fixture
def api(broker: BrokerProcess) -> Iterator[Api]:
    with Api(broker.ports["http"]) as api:
        yield api


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> str:
    """A queue of the test's own."""
    name: str = request.node.name
    return name.removeprefix("test_").replace("[", ".").removesuffix("]")


@pytest.fixture
def start_worker(broker: BrokerProcess, tmp_path: Path) -> Iterator[StartWorker]:
    """Starts workers by name, with flags of the command and settings of Celery."""
    started: list[Worker] = []

    def start(name: str, *flags: str, **settings: object) -> Worker:
        started.append(Worker(broker, tmp_path, name, *flags, **settings))
        return started[-1]

    yield start
    for worker in started:
        worker.kill()


@pytest.fixture
def make_app(broker: BrokerProcess) -> Iterator[MakeApp]:
    """Makes apps as the workers have them, but for the tasks, which have names only."""
    made: list[Celery] = []

    def make(**settings: object) -> Celery:
        app = Celery("tests", broker=url_of(broker), set_as_current=False)
        app.conf.update(settings)
        made.append(app)
        return app

    yield make
    pools.reset()  # which all apps share
    for app in made:
        app.close()
