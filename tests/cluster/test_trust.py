"""Who is let in at the relay: nobody without the cluster's key, whatever was recorded, altered or shown.

Certificates of an authority are shown where TLS alone would keep the stranger out: it has one of them then.
"""

import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.cluster import door as relay_host
from penstock.cluster.frames import Hello, Kind, encode_frame, encode_hello, encode_json
from penstock.cluster.trust import Asking, Files, Trust
from penstock.cluster.trust import Leader as Place
from penstock.common.address import TcpAddress
from penstock.common.given import SettingsError
from penstock.log.jetstream.cluster import Cluster
from tests.certificates import make_authority, make_certificate, make_certificates
from tests.cluster.fronts import ANY_PORT, Follower, Leader, LoopThread
from tests.cluster.processes import ONE_LOG, FrontEnd
from tests.cluster.relay_wire import RelayWire
from tests.cluster.test_pipe import HttpServer
from tests.server.doors import PhpmqDoor
from tests.server.harness import ROOT, WAIT_SECONDS, Wire

KEY = bytes(range(32))
HELLO = Hello("words", "somebody", 1, "life")
STRANGER = Hello("words", "stranger", 1, "life")


class Between:
    """Somebody on the way: takes connections, passes on what `alter` makes of a chunk, and keeps copies."""

    def __init__(self, target: TcpAddress, alter: Callable[[str, bytes], bytes] | None = None) -> None:
        self._target = target
        self._alter = alter or (lambda _way, data: data)
        self._door = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._door]
        self.address = TcpAddress(*self._door.getsockname())
        self.heard: dict[str, list[bytes]] = {"in": [], "out": []}
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._door.accept()
                far = socket.create_connection((self._target.host, self._target.port), WAIT_SECONDS)
                self._sockets += [near, far]
                for way, one, other in (("in", near, far), ("out", far, near)):
                    threading.Thread(target=self._pass, args=(way, one, other), daemon=True).start()

    def _pass(self, way: str, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                self.heard[way].append(data)
                other.sendall(self._alter(way, data))
            other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for it in self._sockets:
            with suppress(OSError):
                it.shutdown(socket.SHUT_RDWR)
            it.close()


@pytest.fixture
def files(tmp_path: Path) -> Callable[[str], Files]:
    """What an authority has signed, by name."""
    make_certificates(tmp_path)
    return lambda name: Files(*(str(tmp_path / it) for it in (f"{name}.pem", f"{name}.key", "ca.pem")))


def turned_away(leader: Leader, wire: Wire) -> None:
    """The leader says nothing more to it, and counts nobody as linked."""
    while wire.some():
        pass
    wire.close()
    leader.thread.until(lambda: not leader.door._strangers, "it to be gone")
    assert leader.thread.call(lambda: leader.host.front_ends) == []


# --- the key -----------------------------------------------------------------------------------------


def test_whoever_has_another_key_has_no_tls(thread: LoopThread, tmp_path: Path) -> None:
    leader = Leader(thread, tmp_path)
    follower = Follower(thread)
    thread.call(follower.remote.connect, leader.place._replace(trust=Trust(bytes(32))))
    thread.until(lambda: follower.links, "it to be told")
    up, why = follower.links[0]
    assert not up
    assert "no TLS with it (CERTIFICATE_VERIFY_FAILED)" in why
    assert "run one Penstock everywhere" in why
    # Who does not look whom it speaks to is found out by the leader.
    blind = Trust(bytes(32))
    blind.client.verify_mode = ssl.CERT_NONE
    wire = RelayWire(leader.place, blind)
    with suppress(OSError):
        wire.say(encode_hello(STRANGER))
    turned_away(leader, wire)
    assert "somebody at 127.0.0.1 was turned away at the relay: no TLS with it" in leader.log()
    follower.stop()
    leader.stop()


def test_with_certificates_the_key_is_asked_for_as_well(
    thread: LoopThread, tmp_path: Path, files: Callable[[str], Files]
) -> None:
    leader = Leader(thread, tmp_path / "log", trust=Trust(KEY, files("server")))
    good = Follower(thread).follow(leader)
    stranger = Follower(thread, "stranger")
    thread.call(stranger.remote.connect, leader.place._replace(trust=Trust(bytes(32), files("client"))))
    thread.until(lambda: stranger.links, "it to be told")
    assert "a leader that does not know the cluster's key" in stranger.links[0][1]
    # And where it is not particular about that:
    wire = RelayWire(leader.place, Trust(bytes(32), files("client")))
    wire.say(encode_hello(STRANGER))
    assert wire.frame().kind is Kind.CHALLENGE
    wire.say(encode_frame(Kind.PROOF, encode_json({"proof": "00" * 32})))
    assert wire.is_closed()
    wire.close()
    thread.until(lambda: not leader.door._strangers, "it to be gone")
    assert thread.call(lambda: leader.host.front_ends) == ["follower"]
    for front in (good, stranger, leader):
        front.stop()


def test_a_certificate_of_another_authority_is_worth_nothing(
    thread: LoopThread, tmp_path: Path, files: Callable[[str], Files]
) -> None:
    make_authority(tmp_path, "other")
    make_certificate(tmp_path, "theirs", "other")
    leader = Leader(thread, tmp_path / "log", trust=Trust(KEY, files("server")))
    wire = RelayWire(leader.place, Trust(KEY, files("theirs")))
    with suppress(OSError):
        wire.say(encode_hello(STRANGER))
    turned_away(leader, wire)
    leader.stop()


def test_files_that_cannot_be_used_are_told_by_their_settings(files: Callable[[str], Files]) -> None:
    good = files("server")
    for given, why in (
        (good._replace(key=good.ca), r"\[cluster\] relay-key: .*ca.pem' cannot be used with"),
        (good._replace(certificate="/none"), r"\[cluster\] relay-certificate: '/none' cannot be read"),
        (good._replace(ca="/none"), r"\[cluster\] relay-ca: '/none' cannot be read"),
    ):
        with pytest.raises(SettingsError, match=why):
            Trust(KEY, given)


def test_a_front_end_that_is_not_let_in_says_what_to_do(
    tmp_path: Path, files: Callable[[str], Files]
) -> None:
    cluster = Cluster(tmp_path / "nats", 1)
    given = zip(("certificate", "key", "ca"), files("client"), strict=True)
    flags = [word for name, file in given for word in (f"--cluster-relay-{name}", file)]
    leader: FrontEnd | None = None
    other: FrontEnd | None = None
    try:
        cluster.start()
        leader = FrontEnd("a", tmp_path / "a", cluster, cluster.urls, *ONE_LOG)
        leader.start()
        other = FrontEnd("b", tmp_path / "b", cluster, cluster.urls, *ONE_LOG, *flags)
        other._spawn()  # It is not ready: nobody leads that it could reach.
        other.says("no link to the leader: the leader's relay at ")
        other.says(
            "run one Penstock everywhere, with the same NATS servers, [cluster] name and relay- settings"
        )
    finally:
        for front in (leader, other):
            if front is not None and front.running:
                front.kill()
        cluster.stop()


# --- replayed, reflected, altered ----------------------------------------------------------------------


def test_what_was_recorded_on_the_wire_opens_nothing(thread: LoopThread, tmp_path: Path) -> None:
    leader = Leader(thread, tmp_path)
    between = Between(leader.address)
    wire = RelayWire(leader.place._replace(address=between.address))
    wire.prove(HELLO)
    assert wire.welcome() == ""
    wire.close()
    thread.until(lambda: not leader.host.front_ends, "the link to end")
    replay = Wire((leader.address.host, leader.address.port))
    with suppress(OSError):
        for chunk in between.heard["in"]:
            replay.say(chunk)
    turned_away(leader, replay)
    between.close()
    leader.stop()


def test_a_greeting_that_was_good_once_is_not_good_again(
    thread: LoopThread, tmp_path: Path, files: Callable[[str], Files]
) -> None:
    """Somebody with a certificate has come to know every frame of another link."""
    leader = Leader(thread, tmp_path / "log", trust=Trust(KEY, files("server")))
    good = RelayWire(leader.place)
    asking = Asking(leader.place, HELLO)
    hello = asking.hello()
    good.say(hello)
    proof = asking.prove(good.frame(), good.certificate)
    good.say(proof)
    assert good.welcome() == ""
    good.close()
    thread.until(lambda: not leader.host.front_ends, "the link to end")
    replay = RelayWire(leader.place, Trust(bytes(32), files("client")))
    replay.say(hello)
    assert replay.frame().kind is Kind.CHALLENGE
    replay.say(proof)
    turned_away(leader, replay)
    assert "a peer that does not know the cluster's key" in leader.log()
    leader.stop()


def test_the_proof_of_the_leader_is_not_that_of_a_follower(
    thread: LoopThread, tmp_path: Path, files: Callable[[str], Files]
) -> None:
    leader = Leader(thread, tmp_path / "log", trust=Trust(KEY, files("server")))
    mirror = RelayWire(leader.place, Trust(bytes(32), files("client")))
    mirror.say(encode_hello(STRANGER))
    challenge = mirror.frame()
    mirror.say(encode_frame(Kind.PROOF, challenge.body))  # it has a field `proof`, too
    turned_away(leader, mirror)
    leader.stop()


def test_who_stands_in_between_with_a_certificate_is_found_out(
    thread: LoopThread, tmp_path: Path, files: Callable[[str], Files]
) -> None:
    """It has TLS with both, and passes on each of their frames."""
    leader = Leader(thread, tmp_path / "log", trust=Trust(KEY, files("server")))
    middle = Trust(bytes(32), files("client"))
    door = middle.server.wrap_socket(socket.create_server(("127.0.0.1", 0)), server_side=True)

    def stand() -> None:
        near, _ = door.accept()
        near.settimeout(WAIT_SECONDS)
        with near, RelayWire(leader.place, middle) as far, suppress(OSError, ValueError):
            far.say(near.recv(4096))
            near.sendall(far.some())
            far.say(near.recv(4096))

    standing = threading.Thread(target=stand, daemon=True)
    standing.start()
    follower = Follower(thread)
    place = leader.place._replace(address=TcpAddress(*door.getsockname()))
    thread.call(follower.remote.connect, place)
    thread.until(lambda: follower.links, "it to be told")
    assert "a leader that does not know the cluster's key" in follower.links[0][1]
    standing.join(WAIT_SECONDS)
    assert thread.call(lambda: leader.host.front_ends) == []
    door.close()
    follower.stop()
    leader.stop()


@pytest.mark.parametrize("way", ["in", "out"])
def test_an_altered_byte_ends_the_link_and_nothing_is_lost_or_changed(
    thread: LoopThread, tmp_path: Path, way: str
) -> None:
    leader = Leader(thread, tmp_path)
    to_alter = {"in": 0, "out": 0}

    def alter(now: str, data: bytes) -> bytes:
        if not to_alter[now]:
            return data
        to_alter[now] -= 1
        return data[:-1] + bytes((data[-1] ^ 1,))

    between = Between(leader.address, alter)
    follower = Follower(thread)
    thread.call(follower.remote.connect, leader.place._replace(address=between.address))
    thread.until(lambda: follower.remote.is_linked, "the link")
    door = PhpmqDoor(follower, "default")  # type: ignore[arg-type]
    door.send(range(5))
    leader.thread.until(lambda: leader.counts_now("default") == (5, 0, 0), "what was sent")
    to_alter[way] = 1
    door.send(range(5, 10))
    thread.until(lambda: any(not up for up, _ in follower.links), "the link to end")
    thread.until(lambda: leader.counts_now("default") == (10, 0, 0), "all, over the next one")
    door.demand(10)
    assert door.collect(10) == list(range(10))
    door.ack()
    door.close()
    follower.stop()
    leader.stop()
    between.close()


# --- strangers -----------------------------------------------------------------------------------------


VISIT = """
import socket, ssl, sys
from penstock.cluster.frames import Hello, encode_hello, encode_frame, Kind
from penstock.cluster.trust import Leader, Trust
from penstock.common.address import TcpAddress
from tests.cluster.relay_wire import RelayWire
host, port, key, source = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3]), sys.argv[4]
old = encode_frame(Kind.HELLO, b'{"magic": "penstock-relay", "version": 1, "kind": "http", "secret": ""}')
for said in (b"GET /v1/queues HTTP/1.1\\r\\n\\r\\n", old, encode_hello(Hello("http", "stranger", 1)), b""):
    with socket.create_connection((host, port), 20, (source, 0)) as plain:
        plain.sendall(said or bytes(1000))
        heard = b""
        try:
            while data := plain.recv(4096):
                heard += data
        except ConnectionResetError:
            pass
        assert heard[:1] in (b"", b"\\x15"), heard  # nothing, or an alert of TLS
blind = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
for context in (blind, Trust(bytes(32)).client):
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection((host, port), 20, (source, 0)) as plain:
        try:
            link = context.wrap_socket(plain)
            link.sendall(encode_hello(Hello("http", "stranger", 1)))
            assert link.recv(4096) == b""
        except (ssl.SSLError, ConnectionError):
            pass
with RelayWire(Leader(TcpAddress(host, port), "leader-1", 1, Trust(key))) as good:
    good.prove(Hello("words", "remote", 1, "life"))
    assert good.welcome() == ""
print("done")
"""


class Machine:
    """A second machine: a network namespace where we may make one, else another address of the loopback."""

    def __init__(self) -> None:
        self.space = f"penstock-{threading.get_native_id()}"
        self.here, self.there = "127.0.0.1", "127.0.0.2"
        self.enter: list[str] = []
        made = self._ip(f"netns add {self.space}")
        if made:
            near = f"ps{threading.get_native_id()}"
            steps = (
                f"link add {near}a type veth peer name {near}b netns {self.space}",
                f"addr add 198.18.77.1/30 dev {near}a",
                f"link set {near}a up",
                f"-n {self.space} addr add 198.18.77.2/30 dev {near}b",
                f"-n {self.space} link set {near}b up",
            )
            if all(self._ip(step) for step in steps):
                self.here, self.there = "198.18.77.1", "198.18.77.2"
                self.enter = ["ip", "netns", "exec", self.space]

    def _ip(self, words: str) -> bool:
        if shutil.which("ip") is None:
            return False
        return subprocess.run(["ip", *words.split()], capture_output=True, check=False).returncode == 0

    def close(self) -> None:
        self._ip(f"netns del {self.space}")  # and its end of the cable, so the cable


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.close()


def test_a_stranger_on_another_machine_gets_nothing(
    thread: LoopThread, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_host, "HANDSHAKE_SECONDS", 0.5)
    http = HttpServer(thread)
    leader = Leader(thread, tmp_path, relay=TcpAddress(machine.here, 0), http=http.enter)
    words = [machine.here, str(leader.address.port), KEY.hex(), machine.there]
    done = subprocess.run(
        [*machine.enter, sys.executable, "-c", VISIT, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    told = [line for line in thread.lines.lines if "turned away at the relay" in line]
    assert len(told) == 1, "however many come"
    assert f"somebody at {machine.there}" in told[0] or not machine.enter
    assert "run one Penstock everywhere" in told[0]
    assert any("front-end remote is linked" in line for line in thread.lines.lines)
    leader.stop()
    http.close()


def test_a_leader_of_the_version_before_is_told_as_such(thread: LoopThread) -> None:
    """It takes the beginning of TLS for a frame that is too large, and closes the link."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(WAIT_SECONDS)
        follower = Follower(thread)
        place = Place(TcpAddress(*door.getsockname()), "before", 1, Trust(KEY))
        thread.call(follower.remote.connect, place)
        link, _ = door.accept()
        assert link.recv(4096)[:1] == b"\x16"
        link.close()
        thread.until(lambda: follower.links, "it to be told")
        assert "run one Penstock everywhere" in follower.links[0][1]
        follower.stop()


def test_http_goes_nowhere_before_the_proof(thread: LoopThread, tmp_path: Path) -> None:
    http = HttpServer(thread)
    leader = Leader(thread, tmp_path, http=http.enter)
    request = encode_frame(Kind.DATA, b"POST /v1/queues/q HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")
    hello = encode_hello(STRANGER._replace(kind="http", nonce="00"))
    for said in (request, hello + request, hello + encode_frame(Kind.PROOF, b"{}") + request):
        wire = RelayWire(leader.place)
        wire.say(said)
        turned_away(leader, wire)
    assert http.read_bytes == 0
    leader.stop()
    http.close()


def test_many_who_say_nothing_keep_nobody_out_for_long(
    thread: LoopThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_host, "HANDSHAKE_SECONDS", 0.2)
    monkeypatch.setattr(relay_host, "HANDSHAKES_MAX", 5)
    leader = Leader(thread, tmp_path, relay=ANY_PORT)
    silent = [Wire((leader.address.host, leader.address.port)) for _ in range(12)]
    follower = Follower(thread).follow(leader)
    for wire in silent:
        assert wire.is_closed()
        wire.close()
    follower.stop()
    leader.stop()
