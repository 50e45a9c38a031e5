"""Who comes in: connections count from their accept, unfinished things end, the log has its descriptors."""

import resource
import socket
import ssl
from pathlib import Path

from penstock.common.address import TcpAddress
from penstock.server.accepting import KEEP_ALIVE, bind
from tests.certificates import make_certificates
from tests.server.harness import SEND, BrokerProcess, Wire, rq, sspq, until

PING, PONG = rq(5), rq(6)


def tls_broker(folder: Path, *flags: str) -> BrokerProcess:
    make_certificates(folder)
    config = folder / "penstock.toml"
    config.write_text(
        '[[listener]]\nprotocol = "rq"\naddress = "127.0.0.1:0"\n'
        f'tls-certificate = "{folder}/server.pem"\ntls-key = "{folder}/server.key"\n'
    )
    return BrokerProcess(folder, "--rq", "off", "--config", str(config), *flags).start()


def answers_over_tls(folder: Path, port: int) -> bool:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    try:
        with (
            socket.create_connection(("127.0.0.1", port), 5) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as peer,
        ):
            peer.sendall(PING)
            return peer.recv(1) == PONG
    except (ConnectionError, ssl.SSLError):
        return False


def test_handshakes_that_nobody_finishes_count_and_end(tmp_path: Path) -> None:
    broker = tls_broker(tmp_path, "--limits-connections-max", "5", "--limits-handshake-seconds", "2")
    (port,) = broker.ports_of("rq")
    assert answers_over_tls(tmp_path, port)
    silent: list[socket.socket] = []

    def crowded() -> bool:
        silent.extend(socket.create_connection(("127.0.0.1", port)) for _ in range(5))
        return not answers_over_tls(tmp_path, port)

    until(crowded, "all places to be taken by those who say nothing")
    assert "refused a connection: 5 are open, the limit of connections-max" in broker.log()
    until(lambda: answers_over_tls(tmp_path, port), "a place to be free again")
    until(lambda: "a connection came to nothing" in broker.log(), "a line about them")
    for peer in silent:
        peer.settimeout(5)
        assert peer.recv(1) == b"", "the broker has not closed it"
        peer.close()
    assert broker.stop() == 0


def test_a_handshake_that_is_none_leaves_a_line(tmp_path: Path) -> None:
    broker = tls_broker(tmp_path)
    (port,) = broker.ports_of("rq")
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: "a connection came to nothing" in broker.log(), "the line")
        (line,) = [line for line in broker.log().splitlines() if "came to nothing" in line]
        assert f"127.0.0.1:{peer.getsockname()[1]}" in line, line
    assert answers_over_tls(tmp_path, port)
    assert broker.stop() == 0


class FewFiles(BrokerProcess):
    """A broker that may have few files open."""

    FILES = 200

    def command(self) -> list[str]:
        return ["bash", "-c", f'ulimit -n {self.FILES}; exec "$@"', "bash", *super().command()]


def test_clients_get_the_descriptors_that_the_log_leaves(tmp_path: Path) -> None:
    """More of them than there are files: those who came first go on, through many segments."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(1024, hard)), hard))
    broker = FewFiles(tmp_path, "--log-segment-bytes", str(1 << 16)).start()
    assert f"the system allows {FewFiles.FILES} open files" in broker.log()
    assert f"it is {FewFiles.FILES // 2} from now on" in broker.log()
    sender = broker.wire("rq")
    sender.say(PING)
    sender.expect(PONG)
    crowd = [broker.wire("sspq") for _ in range(3 * FewFiles.FILES)]
    until(lambda: "refused a connection" in broker.log(), "the limit to be reached")
    for number in range(40):
        sender.say(rq(1, (128, number), (160, b"q"), (224, bytes(20_000)), 33, 10))
        sender.expect(rq(1, (128, number), 13))
    assert broker.running
    for wire in crowd:
        wire.close()

    def admitted() -> bool:
        with broker.wire("rq") as wire:
            wire.say(PING)
            return wire.hear(1) == PONG

    until(admitted, "places to be free again")
    sender.close()
    assert broker.stop() == 0


def test_the_rest_of_a_message_has_to_come(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, "--limits-frame-seconds", "1").start()
    idle = broker.wire("rq")
    idle.say(PING)
    idle.expect(PONG)
    begun = {
        "rq": rq(1, (160, b"q"), (224, b"payload"))[:-3],
        "phpmq": b"H0100102P01",
        "sspq": sspq(SEND, b"payload")[:-3],
    }
    wires: dict[str, Wire] = {name: broker.wire(name) for name in begun}
    for name, wire in wires.items():
        wire.say(begun[name])
    for name, wire in wires.items():
        assert wire.is_closed(), name
        line = f"closed {name} connection: the rest of a message has not come for 1 s, the limit of"
        assert f"{line} frame-seconds" in broker.log()
        wire.close()
    idle.say(PING)
    idle.expect(PONG)  # It has said all it wanted to say.
    idle.close()
    assert broker.stop() == 0


def test_connections_with_tls_take_half_of_the_memory_at_most(tmp_path: Path) -> None:
    broker = tls_broker(tmp_path, "--limits-memory-bytes-max", "1048576")
    (port,) = broker.ports_of("rq")
    for _ in range(10):
        assert answers_over_tls(tmp_path, port), "those who have left still count"
    silent: list[socket.socket] = []

    def crowded() -> bool:
        silent.extend(socket.create_connection(("127.0.0.1", port)) for _ in range(8))
        return not answers_over_tls(tmp_path, port)

    until(crowded, "the memory for them to be used up")
    assert "refused a connection: those with TLS take half of memory-bytes-max" in broker.log()
    for peer in silent:
        peer.close()
    until(lambda: answers_over_tls(tmp_path, port), "room again")
    assert broker.stop() == 0


def test_who_is_accepted_is_watched_by_the_kernel() -> None:
    (ours,) = bind(TcpAddress("127.0.0.1", 0), 0o600)
    with ours, socket.socket() as theirs:
        ours.listen()
        theirs.connect(ours.getsockname())
        with ours.accept()[0] as peer:
            assert [peer.getsockopt(level, option) for level, option, _ in KEEP_ALIVE] == [1, 60, 15, 4]
