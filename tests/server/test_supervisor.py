"""What systemd is told: by a real broker, at a real socket; also that a loop that is stuck says nothing."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.server.supervisor import Supervisor
from tests.server.harness import WAIT_SECONDS, BrokerProcess, until


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(WAIT_SECONDS)
        yield listening


def lines_until(heard: socket.socket, last: str) -> list[str]:
    """All lines up to a datagram that has this one."""
    lines: list[str] = []
    while last not in lines:
        lines += heard.recv(4096).decode().split("\n")
    return lines


@pytest.fixture
def broker(tmp_path: Path, heard: socket.socket) -> Iterator[BrokerProcess]:
    around = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "3000000"}
    process = BrokerProcess(tmp_path, "--http", "127.0.0.1:0", "--drain-seconds", "1", env=around).start()
    yield process
    process.kill()


def test_a_life_is_told_from_ready_to_stopping(heard: socket.socket, broker: BrokerProcess) -> None:
    ready, status = heard.recv(4096).decode().split("\n")
    assert ready == "READY=1"
    doors = " ".join(f"{name}={where}" for name, where in broker.doors)
    assert status == f"STATUS=penstock ready {doors}; 0 connections"
    broker.signal(signal.SIGHUP)
    told = lines_until(heard, "READY=1")
    assert "RELOADING=1" in told
    assert any(line.startswith("MONOTONIC_USEC=") for line in told)
    with broker.wire("phpmq").socket:
        lines_until(heard, f"STATUS=penstock ready {doors}; 1 connections")
        broker.signal(signal.SIGTERM)
        told = lines_until(heard, "STOPPING=1")
    assert told[-1] == "STATUS=draining, at most 1.0 s; 1 connections"
    assert broker.wait() == 0


def test_the_loop_itself_beats_the_watchdog(heard: socket.socket, broker: BrokerProcess) -> None:
    lines_until(heard, "WATCHDOG=1")
    # A process that is stopped is a loop that is stuck, to whoever waits for it.
    broker.signal(signal.SIGSTOP)
    heard.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while heard.recv(4096):
            pass
    heard.settimeout(2.5)
    with pytest.raises(TimeoutError):
        heard.recv(4096)
    broker.signal(signal.SIGCONT)
    heard.settimeout(WAIT_SECONDS)
    lines_until(heard, "WATCHDOG=1")


def test_the_second_process_cannot_speak_for_the_first(heard: socket.socket, broker: BrokerProcess) -> None:
    children = Path(f"/proc/{broker.pid}/task/{broker.pid}/children")
    until(lambda: len(children.read_text().split()) == 1, "there is a second process")
    own, other = (Path(f"/proc/{pid}/cmdline") for pid in (broker.pid, children.read_text().strip()))
    until(lambda: other.read_bytes() not in (b"", own.read_bytes()), "the second process has begun")
    around = other.with_name("environ").read_bytes()
    assert b"NOTIFY_SOCKET" not in around
    assert b"WATCHDOG_" not in around


@pytest.mark.parametrize(
    ("around", "told"),
    [
        ({}, []),
        ({"WATCHDOG_USEC": "1000000"}, ["WATCHDOG=1"]),
        ({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid())}, ["WATCHDOG=1"]),
        ({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}, []),
    ],
)
def test_it_beats_where_it_is_asked_to(
    around: dict[str, str], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("")  # Linux gives it an abstract name, which systemd writes with an @
        name = listening.getsockname().decode()
        for key, value in {"NOTIFY_SOCKET": f"@{name[1:]}", **around}.items():
            monkeypatch.setenv(key, value)
        supervisor = Supervisor()
        supervisor.beat("here")
        supervisor.beat("here")
        assert listening.recv(4096).decode().split("\n") == [*told, "STATUS=here"]
        if told:
            assert listening.recv(4096).decode().split("\n") == told
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.recv(4096)
    supervisor.ready("nobody listens any more")  # and nothing fails
    supervisor.close()


def test_without_a_socket_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    supervisor = Supervisor()
    supervisor.ready("ready")
    supervisor.beat("ready")
