"""How Spark's processes ask a broker: over TCP, TLS and a Unix socket, and again where it breaks."""

import os
import pickle
import signal
import threading
from pathlib import Path

import pytest

from penstock.spark.api import Broker, BrokerError, Refused, Unreachable
from tests.certificates import make_authority
from tests.server.harness import BrokerProcess, until
from tests.spark.conftest import StartBroker
from tests.spark.rig import send, url_of, values


def test_a_broker_travels_without_its_connection(broker: BrokerProcess) -> None:
    asking = Broker(url_of(broker), "secret", 3)
    assert asking.get("offsets", queues="nowhere") == {"queues": [], "next": None}
    there = pickle.loads(pickle.dumps(asking))
    assert (there.url, there.token, there.retry_seconds) == (asking.url, "secret", 3)
    assert there.get("offsets", queues="nowhere") == {"queues": [], "next": None}
    for one in (asking, there):
        one.close()


def test_a_no_is_told_in_the_broker_s_words_at_once(broker: BrokerProcess) -> None:
    asking = Broker(url_of(broker), retry_seconds=60)
    with pytest.raises(Refused, match="there is no queue 'nowhere'") as refusal:
        asking.get("queues", "nowhere")
    assert (refusal.value.status, refusal.value.name) == (404, "queue-not-found")
    with pytest.raises(Refused, match="there is no parameter 'limits' here; did you mean 'limit'"):
        asking.get("offsets", limits=3)
    asking.close()


def test_nobody_there() -> None:
    with pytest.raises(
        Unreachable, match=r"http://127.0.0.1:9: no broker answers there \(Connection refused\)"
    ):
        Broker("http://127.0.0.1:9", retry_seconds=0.1).get("offsets")
    assert Broker("http://127.0.0.1:9", retry_seconds=60).in_haste().contact_seconds == 5


def test_a_broker_that_comes_back_is_asked_again(start_broker: StartBroker) -> None:
    broker = start_broker()
    send(broker, "q", values(3))
    asking = Broker(url_of(broker), retry_seconds=30)
    assert asking.get("offsets", queues="q")["queues"][0]["offset_end"] == 3
    broker.flags = ("--http", f"127.0.0.1:{broker.ports['http']}")
    broker.kill()
    restarting = threading.Thread(target=broker.start)
    restarting.start()
    assert asking.get("offsets", queues="q")["queues"][0]["offset_end"] == 3
    restarting.join()
    asking.close()


def test_an_api_that_dies_alone_is_asked_again(start_broker: StartBroker) -> None:
    broker = start_broker()
    send(broker, "q", values(3))
    asking = Broker(url_of(broker), retry_seconds=30)
    assert asking.get("offsets", queues="q")["queues"][0]["offset_end"] == 3
    children = Path(f"/proc/{broker.pid}/task/{broker.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{child}/fd").exists() for child in children), "the API is gone")
    assert asking.get("offsets", queues="q")["queues"][0]["offset_end"] == 3
    asking.close()


def test_a_unix_socket(start_broker: StartBroker, tmp_path: Path) -> None:
    start_broker("--http", f"unix:{tmp_path}/http.sock")
    asking = Broker(f"http+unix://{tmp_path}/http.sock")
    assert asking.get("offsets") == {"queues": [], "next": None}
    asking.close()


def test_tls(start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_authority(tmp_path, "api")
    broker = start_broker(
        config=f"[http]\ntls-certificate = '{tmp_path}/api.pem'\ntls-key = '{tmp_path}/api.key'\n"
    )
    asking = Broker(url_of(broker).replace("http:", "https:"), retry_seconds=5)
    with pytest.raises(
        BrokerError, match=r"the certificate there cannot be trusted \(self.signed certificate"
    ):
        asking.get("offsets")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "api.pem"))
    assert asking.get("offsets") == {"queues": [], "next": None}
    asking.close()
