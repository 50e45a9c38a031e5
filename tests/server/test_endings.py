"""How connections end: sent away, cut off, refused, with the broker. What was held is never worse off."""

import contextlib
import signal
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import cast

import pytest

from penstock.model.life import Event, Reason
from penstock.protocols import sspq_session
from penstock.protocols.rq_session import SILENCE_US
from penstock.server import connection as connections
from penstock.server.connection import LAST_WORDS_SECONDS, Connection
from penstock.server.wires import RqConnection, SspqConnection
from tests.certificates import make_certificates
from tests.server.doors import PhpmqDoor, RqDoor
from tests.server.harness import (
    CONFIRM,
    RECEIVE,
    SEND,
    WAIT_SECONDS,
    BrokerProcess,
    expect_dispatch,
    phpmq,
    rq,
    sspq,
    until,
)
from tests.server.inside import LOOPS, Inside, run
from tests.server.inside import until as soon

KIB = 1 << 10


def test_a_peer_that_breaks_its_protocol_and_reads_nothing_is_not_waited_for(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, "--limits-connections-max", "2").start()
    deaf, sender = broker.wire("phpmq"), broker.wire("phpmq")
    deaf.say(phpmq(2, (1, b"q"), (4, b"100000")))
    payload = bytes(64 * KIB)
    for number in range(256):  # more than its buffers take
        sender.say(phpmq(1, (1, b"q"), (2, b"%03d" % number + payload)))
    sender.leave()
    assert deaf.hear(8) == b"H0100303"
    deaf.say(b"what is this?")
    # What it had is with others at once; it is gone when its last words have had their time.
    began = time.monotonic()
    other = broker.wire("phpmq")
    other.say(phpmq(2, (1, b"q"), (4, b"1")))
    expect_dispatch(other, b"q", b"000" + payload)
    assert time.monotonic() - began < LAST_WORDS_SECONDS
    port = deaf.socket.getsockname()[1]
    until(lambda: broker.endings(port) == 1, "the broker to give up the peer that does not read")
    third = broker.wire("phpmq")
    third.say(phpmq(2, (1, b"q"), (4, b"1")))
    expect_dispatch(third, b"q", b"001" + payload)
    for wire in (deaf, other, third):
        wire.close()
    assert broker.stop() == 0


@pytest.mark.parametrize("loop", LOOPS)
def test_who_has_closed_its_side_holds_and_gets_nothing_any_more(
    tmp_path: Path, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can settle nothing from then on, whether or not it reads what waits for it."""
    monkeypatch.setattr(connections, "LAST_WORDS_SECONDS", 0.5)

    async def test() -> None:
        async with Inside.open(tmp_path) as server:
            deaf, sender = await server.connect("phpmq", buffer_bytes=4 * KIB), await server.connect("phpmq")
            await deaf.say(phpmq(2, (1, b"q"), (4, b"100000")))
            for _ in range(100):  # more than its buffers take
                await sender.say(phpmq(1, (1, b"q"), (2, bytes(64 * KIB))))
            await soon(lambda: server.broker.ports.infos(0, 1)[0].blocked, "its buffer to be full")
            await soon(lambda: server.log.describe("q").offset_end == 100, "all to be stored")
            assert 0 < server.log.describe("q").held < 100
            deaf.socket.shutdown(socket.SHUT_WR)
            await soon(lambda: server.log.describe("q").held == 0, "what it had to be there again")
            assert server.log.describe("q").ready == 100
            heard = 0
            while heard < 64 * KIB:  # to read on makes room, but not for more messages
                heard += len(await deaf.hear(4 * KIB))
            await soon(lambda: len(server.connections) == 1, "the broker to give up who does not read")
            assert server.log.counts("q")[Event.HELD, Reason.NONE] < 100

    run(loop, test())


@pytest.mark.parametrize("tls", [False, True])
def test_who_is_refused_can_read_why(tmp_path: Path, tls: bool) -> None:
    flags = ["--limits-connections-max", "1"]
    if tls:
        make_certificates(tmp_path)
        config = tmp_path / "penstock.toml"
        config.write_text(
            f'[[listener]]\nprotocol = "rq"\naddress = "127.0.0.1:0"\n'
            f'tls-certificate = "{tmp_path}/server.pem"\ntls-key = "{tmp_path}/server.key"\n'
        )
        flags += ["--config", str(config), "--rq", "off"]
    broker = BrokerProcess(tmp_path, *flags).start()
    first = broker.wire("phpmq")
    first.say(phpmq(2, (1, b"q"), (4, b"1")), phpmq(1, (1, b"q"), (2, b"x")))
    expect_dispatch(first, b"q", b"x")
    peer = socket.create_connection(("127.0.0.1", broker.ports["rq"]), WAIT_SECONDS)
    if tls:
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        peer = context.wrap_socket(peer, server_hostname="localhost")
    # Programs say what they want before they read: none of that may be answered by a reset.
    for _ in range(20):
        peer.sendall(rq(1, (160, b"q"), (98, 10), 20) * 100)
        time.sleep(0.005)
    assert peer.recv(100) == rq(23)  # SERVER_FULL
    if not tls:
        assert peer.recv(100) == b""
    peer.close()
    first.close()
    assert broker.stop() == 0
    assert "Traceback" not in broker.log(), broker.log()


@pytest.mark.parametrize("how", ["time is over", "second signal", "it leaves", "kill -9"])
@pytest.mark.parametrize("protocol", ["sspq", "phpmq", "rq"])
def test_a_stop_costs_no_attempt_of_a_delivery(tmp_path: Path, protocol: str, how: str) -> None:
    """With max-deliveries 1, a delivery that is counted is the last one."""
    config = tmp_path / "penstock.toml"
    config.write_text("[queue.q]\nmax-deliveries = 1\n")
    drain = "0.3" if how == "time is over" else "600"
    flags = ("--config", str(config), "--sspq-queue", "q", "--drain-seconds", drain)
    broker = BrokerProcess(tmp_path, *flags).start()
    sender, worker = RqDoor(broker, "q"), broker.wire(protocol)
    sender.send([7])
    if protocol == "sspq":
        worker.say(sspq(RECEIVE))
    elif protocol == "phpmq":
        worker.say(phpmq(2, (1, b"q"), (4, b"1")))
    else:
        worker.say(rq(1, (160, b"q"), (98, 1), 20))
    while b"%012d" % 7 not in (heard := worker.some()):
        assert heard
    if how == "kill -9":
        broker.kill()
    else:
        broker.signal(signal.SIGTERM)
        until(lambda: "draining" in broker.log(), "the broker to have heard of the stop")
        if how == "second signal":
            broker.signal(signal.SIGTERM)
        elif how == "it leaves":
            worker.close()
        assert broker.wait() == 0
    worker.close()
    sender.close()
    broker.start()
    again = PhpmqDoor(broker, "q")
    assert again.drain(1) == [7]
    again.close()
    assert broker.stop() == 0


def test_who_goes_on_sending_over_tls_while_the_broker_ends_finds_no_fault(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    config = tmp_path / "penstock.toml"
    config.write_text(
        f'[[listener]]\nprotocol = "sspq"\naddress = "127.0.0.1:0"\nqueue = "q"\n'
        f'tls-certificate = "{tmp_path}/server.pem"\ntls-key = "{tmp_path}/server.key"\n'
    )
    broker = BrokerProcess(
        tmp_path, "--config", str(config), "--sspq", "off", "--drain-seconds", "0.2"
    ).start()
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    peers = []
    over = threading.Event()

    def send(peer: ssl.SSLSocket) -> None:
        with contextlib.suppress(OSError):
            while not over.is_set():
                peer.sendall(sspq(SEND, b"x" * 100))

    for _ in range(3):
        raw = socket.create_connection(("127.0.0.1", broker.ports["sspq"]), WAIT_SECONDS)
        peers.append(context.wrap_socket(raw, server_hostname="localhost"))
        # It holds one, so that it is not let go before the end.
        peers[-1].sendall(sspq(SEND, b"first") + sspq(RECEIVE))
        assert peers[-1].recv(8)
    threads = [threading.Thread(target=send, args=(peer,)) for peer in peers]
    for thread in threads:
        thread.start()
    assert broker.stop() == 0
    over.set()
    for thread, peer in zip(threads, peers, strict=True):
        thread.join()
        peer.close()
    assert "Traceback" not in broker.log(), broker.log()


class Broken:
    """A session that has a bug in one of its methods."""

    def __init__(self, session: sspq_session.ServerSession, where: str) -> None:
        self._session = session
        self._where = where

    def __getattr__(self, name: str) -> object:
        if name == self._where:
            raise SystemError("an index that is none")
        return getattr(self._session, name)


def broken(connection: Connection, where: str) -> None:
    assert isinstance(connection, SspqConnection)
    connection._session = cast(sspq_session.ServerSession, Broken(connection._session, where))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("where", ["receive", "deliver"])
def test_a_fault_of_ours_costs_one_connection(
    tmp_path: Path, loop: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows of one; so it is made here, in one session."""

    async def test() -> None:
        async with Inside.open(tmp_path, "--sspq-queue q") as server:
            victim = await server.connect("sspq")
            other = await server.connect("sspq")
            broken(server.in_order[0], where)
            await other.say(sspq(SEND, b"1", 9) + sspq(SEND, b"2", 9))
            await victim.say(sspq(RECEIVE))
            assert await victim.hear(1) == b""
            await soon(lambda: len(server.connections) == 1, "the connection to be gone")
            numbers = set()
            for _ in range(2):
                await other.say(sspq(RECEIVE))
                numbers.add((await other.hear(9))[8:])
                await other.say(sspq(CONFIRM))
            assert numbers == {b"1", b"2"}

    run(loop, test())
    assert "a bug" in caplog.text
    assert "an index that is none" in caplog.text


@pytest.mark.parametrize("loop", LOOPS)
def test_what_comes_from_a_connection_that_is_no_port_any_more_goes_nowhere(
    tmp_path: Path, loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    """TLS may deliver what it has read when the connection is already being closed."""

    async def test() -> None:
        async with Inside.open(tmp_path, "--sspq-queue q") as server:
            gone, other = await server.connect("sspq"), await server.connect("sspq")
            server.in_order[0].leave(lost=False)
            await gone.say(sspq(SEND, b"too late"))
            await other.say(sspq(SEND, b"in time"), sspq(RECEIVE))
            assert await other.hear(15) == sspq(SEND, b"in time")

    run(loop, test())
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("loop", LOOPS)
def test_an_idle_node_that_is_no_port_any_more_gets_no_mark(
    tmp_path: Path, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was silent until it broke the protocol, and its last words are still being written."""

    async def test() -> None:
        async with Inside.open(tmp_path) as server:
            node = await server.connect("rq")
            await node.say(rq(5))
            assert await node.hear(1) == rq(6)
            (connection,) = server.connections
            later = server.now_us() + 2 * SILENCE_US
            connection.tick(later)
            connection.tick(later + SILENCE_US)
            assert isinstance(connection, RqConnection)
            assert connection._session.idle
            before, ticked = RqConnection.leave, list[str]()

            def leave(connection: RqConnection, *, lost: bool) -> None:
                before(connection, lost=lost)
                connection.tick(server.now_us())  # what the server does once a second
                ticked.append(connection.name)

            monkeypatch.setattr(RqConnection, "leave", leave)
            await node.say(rq((224, b""))[:1] + b"\xff\xff\xff\xff")
            assert await node.hear(2) == rq(5)
            await soon(lambda: not server.connections, "the connection to be gone")
            assert ticked

    run(loop, test())
