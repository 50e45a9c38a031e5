"""SIGTERM ends the broker, whatever its clients, its disk or its second process do meanwhile."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.certificates import make_certificates
from tests.http.api import NDJSON, Api
from tests.server.harness import SEND, BrokerProcess, Wire, phpmq, rq, sspq, until
from tests.server.test_second import second_of

STOP_SECONDS = 20.0
"""More than a second of draining and two more, for machines that are busy."""


class Crowd:
    """Clients of one kind, and the threads that they speak from."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.api = Api(broker.ports["http"])
        self.wires: list[Wire] = []
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()

    def wire(self, name: str) -> Wire:
        wire = self.broker.wire(name)
        self.wires.append(wire)
        return wire

    def repeat(self, call: Callable[[], object]) -> None:
        """Again and again, from a thread of its own, until the connection is gone or the test over."""

        def loop() -> None:
            with contextlib.suppress(OSError):
                while not self._over.is_set():
                    call()

        self._threads.append(threading.Thread(target=loop))
        self._threads[-1].start()

    def end(self) -> None:
        self._over.set()
        for wire in self.wires:
            with contextlib.suppress(OSError):
                wire.socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(STOP_SECONDS)
            assert not thread.is_alive()
        for wire in self.wires:
            wire.close()
        self.api.close()


def nobody(crowd: Crowd) -> None:
    """To compare with."""


def deaf_readers(crowd: Crowd) -> None:
    sender = crowd.wire("phpmq")
    for queue in (b"a", b"b"):
        for _ in range(64):
            sender.say(phpmq(1, (1, queue), (2, bytes(100_000))))
        for _ in range(4):
            crowd.wire("phpmq").say(phpmq(2, (1, queue), (4, b"100")))
    crowd.wire("rq").say(rq(1, (160, b"c"), 20), rq(1, (160, b"c"), (224, bytes(100_000)), 14) * 100)
    until(
        lambda: any(it["blocked"] for it in crowd.api.get("/v1/connections")["connections"]),
        "somebody not to read",
    )


def floods(crowd: Crowd) -> None:
    said = {
        "sspq": sspq(SEND, b"x") * 1000,
        "phpmq": phpmq(1, (1, b"q"), (2, b"x")) * 1000,
        "rq": b"\x0a" * 100_000,
    }
    for name, data in said.items():
        crowd.repeat(partial(crowd.wire(name).say, data))


def unfinished_frames(crowd: Crowd) -> None:
    crowd.wire("sspq").say(sspq(SEND, bytes(1000))[:-1])
    crowd.wire("phpmq").say(phpmq(1, (1, b"q"), (2, bytes(1000)))[:-1])
    crowd.wire("rq").say(rq(1, (128, 1), (160, b"q"), (224, bytes(1000)))[:-1])


def handshakes_that_nobody_ends(crowd: Crowd) -> None:
    for number in range(20):
        crowd.wire("sspq").say(b"\x16\x03\x01\x02\x00"[: number % 6])


def bodies_that_never_end(crowd: Crowd) -> None:
    for _ in range(5):
        crowd.wire("http").say(
            b"POST /v1/queues/q/messages HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\nso far"
        )
        crowd.wire("http").say(b"POST /v1/queues/q/batch HTTP/1.1\r\nHost: ")
        crowd.wire("http").say(b"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert crowd.wires[-1].hear(12) == b"HTTP/1.1 200"


def long_work(crowd: Crowd) -> None:
    """Dead letters one by one, redriven, and everything purged, over and over."""
    lines = b'{"value": "x", "ttl": 1}\n{"value": "x"}\n' * 10_000
    for _ in range(3):
        assert crowd.api.ask("POST", "/v1/queues/q/batch", lines, {"Content-Type": NDJSON}).status == 200
    until(lambda: bool(crowd.api.get("/v1/queues/q")["dead"] == 30_000), "all of them to expire")
    for path in ("/v1/queues/q/redrive", "/v1/queues/q/purge"):
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        for _ in range(5):
            crowd.wire("http").say(head.encode(), b"Content-Length: 2\r\n\r\n{}")


def a_second_process_that_hangs(crowd: Crowd) -> None:
    os.kill(second_of(crowd.broker), signal.SIGSTOP)


def requests_that_nobody_answers(crowd: Crowd) -> None:
    crowd.wire("rq").say(*[rq(1, (128, number), (160, b"q"), (224, b"?"), 10) for number in range(1000)])
    worker = crowd.wire("rq")
    worker.say(rq(1, (160, b"q"), 20))
    assert worker.hear(1) == b"\x01"


@pytest.mark.parametrize(
    "come",
    [
        nobody,
        deaf_readers,
        floods,
        unfinished_frames,
        handshakes_that_nobody_ends,
        bodies_that_never_end,
        long_work,
        a_second_process_that_hangs,
        requests_that_nobody_answers,
    ],
)
def test_a_stop_ends_whatever_clients_do(tmp_path: Path, come: Callable[[Crowd], None]) -> None:
    flags = ["--drain-seconds", "1", "--http", "127.0.0.1:0"]
    if come is handshakes_that_nobody_ends:
        make_certificates(tmp_path)
        config = tmp_path / "penstock.toml"
        config.write_text(
            f'[[listener]]\nprotocol = "sspq"\naddress = "127.0.0.1:0"\n'
            f'tls-certificate = "{tmp_path}/server.pem"\ntls-key = "{tmp_path}/server.key"\n'
        )
        flags += ["--config", str(config), "--sspq", "off"]
    broker = BrokerProcess(tmp_path, *flags).start()
    crowd = Crowd(broker)
    try:
        come(crowd)
        broker.signal(signal.SIGTERM)
        code = broker.wait(STOP_SECONDS)
    finally:
        crowd.end()
    # Where the machine is so busy that two seconds are not enough, that is what the log and the code say.
    assert code == ("may be lost, what was settled last comes again" in broker.log()), broker.log()
    assert "Traceback" not in broker.log(), broker.log()
    assert broker.start().stop() == 0


def test_what_a_stop_does_not_get_to_is_done_by_the_next_start(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, "--drain-seconds", "1").start()
    with broker.wire("rq") as asker:
        asker.say(*[rq(1, (128, number), (160, b"q"), (224, b"?"), 10) for number in range(20_000)], rq(5))
        asker.expect(rq(6))
        assert broker.stop() == 0
    broker.start()
    with broker.wire("phpmq") as worker:
        worker.say(phpmq(1, (1, b"q"), (2, b"the only one")), phpmq(2, (1, b"q"), (4, b"1")))
        assert b"the only one" in worker.hear(8 + 3 * 32 + 1 + 12 + 32)
    assert broker.stop() == 0
    assert "Traceback" not in broker.log(), broker.log()


def test_a_stop_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    site, hangs = tmp_path / "site", tmp_path / "hangs"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        f"import os, time\nsync = os.fdatasync\n"
        f"def slow(fd):\n    while os.path.exists({str(hangs)!r}): time.sleep(0.01)\n    sync(fd)\n"
        f"os.fdatasync = slow\n"
    )
    broker = BrokerProcess(tmp_path, "--drain-seconds", "0.5", env={"PYTHONPATH": str(site)}).start()
    with broker.wire("rq") as sender:
        sender.say(rq(1, (128, 1), (160, b"q"), (224, b"confirmed"), 33, 10))
        sender.expect(rq(1, (128, 1), 13))
        hangs.touch()
        sender.say(rq(1, (128, 2), (160, b"q"), (224, b"on its way"), 33, 10))
        until(lambda: "rq" in broker.log(), "the broker to have a line")
        broker.signal(signal.SIGTERM)
        assert broker.wait(STOP_SECONDS) == 1
        assert sender.hear(2) == rq(1, 22)  # CLOSING, and no receipt
    assert "ends now, as a crash would; what was not confirmed may be lost" in broker.log()
    hangs.unlink()
    broker.start()
    with broker.wire("phpmq") as worker:
        worker.say(phpmq(2, (1, b"q"), (4, b"1")))
        assert b"confirmed" in worker.hear(8 + 3 * 32 + 1 + 9 + 32)
    assert broker.stop() == 0
