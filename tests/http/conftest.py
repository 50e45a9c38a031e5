"""A broker with its HTTP API on a free port, for every test that asks for one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.http.api import Api
from tests.server.harness import BrokerProcess

StartBroker = Callable[..., BrokerProcess]


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[StartBroker]:
    """Starts brokers in folders of their own, and sees to it that none outlives the test."""
    started: list[BrokerProcess] = []

    def start(
        *flags: str, folder: str = "broker", config: str | None = None, env: dict[str, str] | None = None
    ) -> BrokerProcess:
        where = tmp_path / folder
        where.mkdir(exist_ok=True)
        if config is not None:
            (where / "penstock.toml").write_text(config)
            flags = ("--config", str(where / "penstock.toml"), *flags)
        http = () if "--http" in flags else ("--http", "127.0.0.1:0")
        broker = BrokerProcess(where, *http, *flags, env=env)
        started.append(broker)
        return broker.start()

    yield start
    for broker in started:
        if broker.running:
            broker.kill()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker for all tests of a module: use a queue name of your own in each test."""
    broker = BrokerProcess(tmp_path_factory.mktemp("broker"), "--http", "127.0.0.1:0").start()
    yield broker
    if broker.running:
        broker.kill()


@pytest.fixture
def api(broker: BrokerProcess) -> Iterator[Api]:
    """A caller of the module's broker."""
    with Api(broker.ports["http"]) as api:
        yield api
