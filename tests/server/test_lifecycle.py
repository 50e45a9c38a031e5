"""From the ready line to the exit code: start, stop, reload, listeners of all kinds."""

import contextlib
import http.client
import json
import resource
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from tests.certificates import make_certificates
from tests.server.doors import PhpmqDoor, RqDoor
from tests.server.harness import (
    CONFIRM,
    NO_RECEIVE,
    RECEIVE,
    ROOT,
    SEND,
    WAIT_SECONDS,
    BrokerProcess,
    Wire,
    phpmq,
    rq,
    sspq,
    until,
)
from tests.server.inside import Inside, run

pytestmark = pytest.mark.usefixtures("cold")


def serve_once(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock", "serve", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_SECONDS, cwd=ROOT, check=False
    )


def test_the_ready_line_names_every_listener(tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text(
        f'[[listener]]\nprotocol = "sspq"\naddress = "unix:{tmp_path}/s.sock"\nqueue = "log"\n'
        '[[listener]]\nprotocol = "phpmq"\naddress = "[::1]:0"\n'
    )
    broker = BrokerProcess(tmp_path, "--config", str(config), "--rq", "off").start()
    assert [protocol for protocol, _ in broker.doors] == ["sspq", "phpmq", "sspq", "phpmq"]
    *_, (_, unix), (_, ipv6) = broker.doors
    assert unix == f"unix:{tmp_path}/s.sock"
    assert ipv6.startswith("[::1]:")
    local = Wire(f"{tmp_path}/s.sock")
    local.say(sspq(SEND, b"over a unix socket"), sspq(RECEIVE))
    local.expect(sspq(SEND, b"over a unix socket"))
    local.say(sspq(CONFIRM))
    local.close()
    six = Wire(("::1", int(ipv6.rpartition(":")[2])))
    six.say(phpmq(1, (1, b"log"), (2, b"x")), phpmq(2, (1, b"log"), (4, b"1")))
    assert six.hear(8) == b"H0100303"
    six.close()
    assert broker.stop() == 0
    assert not (tmp_path / "s.sock").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--durability", "maybe"], ["durability", "commit"]),
        (["--phpmq", "nowhere"], ["phpmq", "nowhere"]),
        (["--config", "/does/not/exist.toml"], ["/does/not/exist.toml"]),
        (["--http", "0.0.0.0:9180"], ["--http", "[[user]]", "127.0.0.1:9180"]),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_2(flags: list[str], words: list[str]) -> None:
    result = serve_once(*flags)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    assert all(word in result.stderr for word in words), result.stderr


def test_a_data_folder_in_use_is_exit_3(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path).start()
    free = ["--sspq", "127.0.0.1:0", "--phpmq", "127.0.0.1:0", "--rq", "127.0.0.1:0", "--http", "off"]
    result = serve_once("--data", str(tmp_path / "data"), *free)
    assert result.returncode == 3
    assert str(broker.pid) in result.stderr
    assert "--data" in result.stderr
    assert broker.stop() == 0


def test_an_address_in_use_is_one_line_and_exit_1(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path).start()
    address = f"127.0.0.1:{broker.ports['phpmq']}"
    flags = ["--sspq", "off", "--rq", "off", "--http", "off", "--phpmq", address]
    result = serve_once(*flags, "--data", str(tmp_path / "other"))
    assert result.returncode == 1
    assert address in result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert broker.stop() == 0


def test_a_stop_waits_for_what_is_in_flight(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, "--drain-seconds", "15").start()
    sender, worker, waiting = RqDoor(broker, "q"), PhpmqDoor(broker, "q"), broker.wire("sspq")
    worker.demand(10)
    sender.send(range(3))
    assert worker.collect(3) == [0, 1, 2]
    waiting.say(sspq(RECEIVE))
    broker.signal(signal.SIGTERM)
    waiting.expect(sspq(NO_RECEIVE))  # none will come
    assert sender.wire.hear(2) == rq(1, 22)  # CLOSING
    assert broker.running
    worker.ack()
    assert broker.wait(seconds=10) == 0
    for client in (sender, worker, waiting):
        client.close()
    broker.start()
    again = PhpmqDoor(broker, "q")
    again.demand(10)
    assert again.wire.is_silent()
    again.close()
    assert broker.stop() == 0


def test_a_stop_ends_when_its_time_is_over_and_the_messages_come_again(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, "--drain-seconds", "0.5").start()
    sender, worker = RqDoor(broker, "q"), PhpmqDoor(broker, "q")
    worker.demand(10)
    sender.send(range(3))
    worker.collect(3)
    assert broker.stop() == 0
    sender.close()
    worker.close()
    broker.start()
    again = PhpmqDoor(broker, "q")
    assert again.drain(3) == [0, 1, 2]
    again.close()
    assert broker.stop() == 0


def test_a_log_that_fails_ends_the_broker_and_costs_nothing_that_was_confirmed(tmp_path: Path) -> None:
    """No file can be written beyond a limit from some moment on: no lack of room, which is waited for."""
    broker = BrokerProcess(tmp_path).start()
    sender, waiting, worker = (broker.wire(protocol) for protocol in ("rq", "sspq", "phpmq"))
    waiting.say(sspq(RECEIVE))
    worker.say(phpmq(1, (1, b"held"), (2, b"x")), phpmq(2, (1, b"held"), (4, b"1")))
    assert worker.hear(8) == b"H0100303"
    payload, confirmed = bytes(64 << 10), 0
    hard = resource.prlimit(broker.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(broker.pid, resource.RLIMIT_FSIZE, (1 << 20, hard))
    with contextlib.suppress(OSError):
        while True:
            sender.say(rq(1, (128, confirmed), (160, b"q"), (224, payload), 33, 10))
            if sender.hear(7) != rq(1, (128, confirmed), 13):
                break
            confirmed += 1
    assert 4 <= confirmed < 16
    assert broker.wait() == 1
    assert "critical stopping: " in broker.log()
    assert waiting.is_closed()
    assert "Traceback" not in broker.log(), broker.log()
    broker.start()
    again = RqDoor(broker, "q")
    again.demand(100)
    again.wire.hear(len(rq(1, (96, 1), (160, b"q"), 24)))
    frame = len(rq(1, (160, b"q"), (224, payload), 33, (128, 0), 10))
    assert len(again.wire.hear(confirmed * frame)) == confirmed * frame
    for wire in (sender, waiting, worker, again):
        wire.close()
    assert broker.stop() == 0


def test_a_second_signal_stops_now(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, "--drain-seconds", "3600").start()
    sender, worker = RqDoor(broker, "q"), PhpmqDoor(broker, "q")
    worker.demand(10)
    sender.send([7])
    worker.collect(1)
    broker.signal(signal.SIGINT)
    assert sender.wire.hear(2) == rq(1, 22)
    broker.signal(signal.SIGINT)
    assert broker.wait(seconds=10) == 0
    sender.close()
    worker.close()


def test_policies_are_read_again_on_sighup(tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text('[queue.q]\ndead-letters = "on"\n')
    broker = BrokerProcess(tmp_path, "--config", str(config), "--sspq-queue", "q").start()
    wire = broker.wire("sspq")
    config.write_text('[queue.q]\ndead-letters = "off"\n')
    broker.signal(signal.SIGHUP)
    until(lambda: "read again" in broker.log(), "the policies to be read again")
    wire.say(sspq(0xDE))
    wire.expect(sspq(NO_RECEIVE))  # dead letters are switched off
    assert "restart" not in broker.log()
    config.write_text('drain-seconds = 3\n[queue.q]\ndead-letters = "off"\n')
    broker.signal(signal.SIGHUP)
    until(lambda: "in force only after a restart: drain-seconds" in broker.log(), "the word about the rest")
    config.write_text("[queue.q]\ndead-lettres = 1\n")
    broker.signal(signal.SIGHUP)
    until(lambda: "dead-lettres" in broker.log(), "the complaint about the file")
    wire.say(sspq(0xDE))
    wire.expect(sspq(NO_RECEIVE))  # the old ones stay
    wire.close()
    assert broker.stop() == 0


def test_tokens_without_tls_get_a_warning_at_the_start(tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    token = "never-to-be-shown-anywhere"
    config.write_text(f'[[http.tokens]]\nname = "ops"\nrole = "admin"\ntoken = "{token}"\n')
    broker = BrokerProcess(tmp_path, "--config", str(config), "--http", "0.0.0.0:0").start()
    assert broker.ports["http"] > 0
    assert broker.stop() == 0
    (line,) = [line for line in broker.log().splitlines() if "unencrypted" in line]
    assert "warning" in line
    assert "tls-certificate" in line
    assert token not in broker.log()


def test_users_who_have_no_token_beside_an_open_api_get_a_warning(tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text('[[user]]\nname = "shop"\ncertificate = "shop"\nadmin = true\n')
    for address, lines in (("127.0.0.1:0", 1), ("off", 0)):
        folder = tmp_path / address
        folder.mkdir()
        broker = BrokerProcess(folder, "--config", str(config), "--http", address).start()
        assert broker.stop() == 0
        assert broker.log().count("as none has a token") == lines


def test_tokens_are_read_again_on_sighup(tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    one, two = "the-first-token-of-ops", "the-second-token-of-ops"
    text = '[[http.tokens]]\nname = "ops"\nrole = "admin"\ntoken = "{}"\n'
    config.write_text(text.format(one))
    broker = BrokerProcess(tmp_path, "--config", str(config), "--http", "127.0.0.1:0").start()

    def is_known(token: str) -> bool:
        caller = http.client.HTTPConnection("127.0.0.1", broker.ports["http"], timeout=WAIT_SECONDS)
        try:
            caller.request("GET", "/v1/queues", headers={"Authorization": f"Bearer {token}"})
            return caller.getresponse().status != 401
        finally:
            caller.close()

    assert is_known(one)
    assert not is_known(two)
    config.write_text(text.format(two))
    broker.signal(signal.SIGHUP)
    until(lambda: is_known(two), "the new token to be known")
    assert not is_known(one)
    config.write_text(text.format("too short"))
    broker.signal(signal.SIGHUP)
    until(lambda: "[[http.tokens]] 1 token: use at least" in broker.log(), "the complaint about the file")
    assert is_known(two)
    assert broker.stop() == 0
    assert not any(token in broker.log() for token in (one, two, "too short"))


def test_the_connection_limit(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, "--limits-connections-max", "2").start()
    first, second = broker.wire("rq"), broker.wire("phpmq")
    first.say(rq(5))
    first.expect(rq(6))
    second.say(phpmq(2, (1, b"q"), (4, b"1")))
    full = broker.wire("rq")
    assert full.hear(1) == rq(23)  # SERVER_FULL
    assert full.is_closed()
    other = broker.wire("sspq")
    assert other.is_closed()
    second.close()
    first.say(rq(1, (160, b"q"), (224, b"x"), (128, 1), 33, 10))
    first.expect(rq(1, (128, 1), 13))

    def admitted() -> bool:
        with broker.wire("rq") as wire:
            wire.say(rq(5))
            return wire.hear(1) == rq(6)

    until(admitted, "room for a new connection after one has left")
    for wire in (first, full, other):
        wire.close()
    assert broker.stop() == 0


def test_listeners_that_only_send_or_only_receive_and_allowed_queues(tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text(
        f'[[listener]]\nprotocol = "sspq"\naddress = "unix:{tmp_path}/send"\nmode = "send-only"\n'
        f'[[listener]]\nprotocol = "rq"\naddress = "unix:{tmp_path}/receive"\nmode = "receive-only"\n'
        f'[[listener]]\nprotocol = "rq"\naddress = "unix:{tmp_path}/some"\nqueues = ["orders.*"]\n'
    )
    broker = BrokerProcess(tmp_path, "--config", str(config)).start()
    send_only = Wire(f"{tmp_path}/send")
    send_only.say(sspq(SEND, b"in"), sspq(RECEIVE))
    send_only.expect(sspq(NO_RECEIVE))
    request = rq(1, (128, 9), (160, b"q"), (224, b"x"), 33, 10)
    receive_only = Wire(f"{tmp_path}/receive")
    receive_only.say(request)
    receive_only.expect(rq(1, (128, 9), 16))  # UNDELIVERED
    some = Wire(f"{tmp_path}/some")
    some.say(request, rq(1, (128, 10), (160, b"orders.eu"), (224, b"x"), 33, 10))
    some.expect(rq(1, (128, 9), 16) + rq(1, (128, 10), 13))
    for wire in (send_only, receive_only, some):
        wire.close()
    assert broker.stop() == 0


def test_what_a_listener_refused_is_told_to_who_asks_and_once(tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text(
        f'[[listener]]\nprotocol = "phpmq"\naddress = "unix:{tmp_path}/some"\nqueues = ["orders"]\n'
        f'[[listener]]\nprotocol = "sspq"\naddress = "unix:{tmp_path}/none"\nmode = "receive-only"\n'
    )
    broker = BrokerProcess(tmp_path, "--config", str(config)).start()
    some, none = Wire(f"{tmp_path}/some"), Wire(f"{tmp_path}/none")
    question = phpmq(2, (1, b"penstock:stored"), (4, b"0"))
    messages = [phpmq(1, (1, queue), (2, b"x")) for queue in (b"orders", b"other", b"other")]
    for refused in (b"2", b"0", b"2"):
        if refused != b"0":
            some.say(*messages)
        some.say(question)
        some.expect(phpmq(3, (1, b"penstock:stored"), (2, refused), (3, b"0" * 32)))
    for answer in (0x5D, 0x5C, 0x5D):
        none.say(sspq(SEND, b"x") if answer == 0x5D else b"", sspq(0x5C))
        none.expect(sspq(answer))
    for wire in (some, none):
        wire.close()
    assert broker.stop() == 0


def test_tls_and_mutual_tls(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    common = f'tls-certificate = "{tmp_path}/server.pem"\ntls-key = "{tmp_path}/server.key"\n'
    config = tmp_path / "penstock.toml"
    config.write_text(
        f'[[listener]]\nprotocol = "phpmq"\naddress = "127.0.0.1:0"\n{common}'
        f'[[listener]]\nprotocol = "sspq"\naddress = "127.0.0.1:0"\n{common}'
        f'tls-client-ca = "{tmp_path}/ca.pem"\n'
    )
    broker = BrokerProcess(
        tmp_path, "--config", str(config), "--sspq", "off", "--phpmq", "off", "--rq", "off"
    ).start()
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    with Wire(("127.0.0.1", broker.ports["phpmq"])) as wire:
        wire.socket = context.wrap_socket(wire.socket, server_hostname="localhost")
        payload = bytes(range(256)) * 4000
        wire.say(phpmq(1, (1, b"default"), (2, payload)), phpmq(2, (1, b"default"), (4, b"1")))
        head = wire.hear(8 + 32 + len("default") + 32)
        assert head.startswith(b"H0100303")
        assert wire.hear(len(payload)) == payload
    with Wire(("127.0.0.1", broker.ports["sspq"])) as stranger, contextlib.suppress(OSError):
        stranger.socket = context.wrap_socket(stranger.socket, server_hostname="localhost")
        stranger.say(sspq(RECEIVE))
        # TLS 1.3 lets a client believe that all is well until the first answer.
        assert stranger.socket.recv(1) == b"", "a client without a certificate got an answer"
    context.load_cert_chain(str(tmp_path / "client.pem"), str(tmp_path / "client.key"))
    with Wire(("127.0.0.1", broker.ports["sspq"])) as friend:
        friend.socket = context.wrap_socket(friend.socket, server_hostname="localhost")
        friend.say(sspq(RECEIVE))
        assert friend.hear(3) == b"\x55\x99\x5e"
    assert broker.stop() == 0
    assert "Traceback" not in broker.log(), broker.log()


def test_who_asks_where_to_connect_to_is_told_about_tls(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    config = tmp_path / "penstock.toml"
    config.write_text(
        f'[[listener]]\nprotocol = "phpmq"\naddress = "unix:{tmp_path}/door"\n'
        f'tls-certificate = "{tmp_path}/server.pem"\ntls-key = "{tmp_path}/server.key"\n'
    )

    async def test() -> None:
        async with Inside.open(tmp_path, f"--config {config} --sspq-queue orders") as server:
            rows = [(row["protocol"], row["tls"], row["queue"]) for row in server.listeners()]
            assert rows == [
                ("sspq", False, "orders"),
                ("phpmq", False, None),
                ("rq", False, None),
                ("phpmq", True, None),
            ]
            assert server.listeners()[3]["address"] == f"unix:{tmp_path}/door"

    run("uvloop", test())


def test_the_log_can_be_json(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, "--log-format", "json", "--log-level", "debug").start()
    with broker.wire("phpmq") as wire:
        wire.say(b"garbage\x1b[31m")
        assert wire.is_closed()
    assert broker.stop() == 0
    entries = [json.loads(line) for line in broker.log().splitlines()]
    assert {entry["level"] for entry in entries} >= {"info", "warning"}
    assert any("closed phpmq connection" in entry["message"] and entry["peer"] for entry in entries)


def test_without_uvloop_the_standard_loop_serves(tmp_path: Path) -> None:
    blocker = tmp_path / "site"
    blocker.mkdir()
    (blocker / "uvloop.py").write_text("raise ImportError('not here')\n")
    broker = BrokerProcess(tmp_path, env={"PYTHONPATH": str(blocker)}).start()
    sender, worker = RqDoor(broker, "q"), PhpmqDoor(broker, "q")
    sender.send(range(200))
    assert worker.drain(200) == list(range(200))
    sender.close()
    worker.close()
    assert broker.stop() == 0
    assert "Traceback" not in broker.log(), broker.log()
