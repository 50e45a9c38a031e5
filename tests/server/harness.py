"""A real broker process, and sockets that speak bytes to it. For end-to-end tests.

Nothing here sleeps to synchronise: the ready line says that the broker accepts, answers say that
it has read, and every wait has an end (`WAIT_SECONDS`).
"""

import os
import re
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from penstock.common.ready import Doors, NotReady, wait_ready
from tests.warm import Warm

WAIT_SECONDS = 30.0
LOOK_SECONDS_MIN, LOOK_SECONDS_MAX = 0.01, 0.2
"""Between two looks at what is waited for."""

PORTS = range(10_000, 20_000)
"""Where brokers listen that come back at the same port: no system gives one of these to a connection that
goes out, which would keep it from them, and no NATS node of a test chooses one."""

SEGMENT_BYTES = 8 << 20
"""Smaller than the default: there are hundreds of brokers in a test run, and each takes a segment at once."""

ROOT = Path(__file__).parents[2]


START_ATTEMPTS = 5


def is_free(port: int) -> bool:
    """Whether somebody could listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class BrokerProcess:
    """`penstock serve` on free ports, with a folder that outlives it."""

    alive: ClassVar[set["BrokerProcess"]] = set()
    is_warm = True
    """Whether it is forked from a process that has imported everything (`tests/warm.py`)."""
    has_pages: ClassVar[bool] = False
    """Whether somebody will look at its dashboard."""

    def __init__(self, folder: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.flags = flags
        self.env = env or {}
        self.ports: dict[str, int] = {}
        self.doors: Doors = []  # as the ready line names them
        self._log = folder / "broker.log"
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        given = {flag for flag in self.flags if flag.startswith("--")}
        listeners = [
            part
            for name in ("sspq", "phpmq", "rq")
            if f"--{name}" not in given
            for part in (f"--{name}", f"127.0.0.1:{self.port(name)}")
        ]
        # The HTTP API is a second process, which only its own tests pay for.
        if "--http" not in given:
            listeners += ["--http", "off"]
        data = [] if "--data" in given else ["--data", str(self.folder / "data")]
        if "--log-segment-bytes" not in given:
            data += ["--log-segment-bytes", str(SEGMENT_BYTES)]
        return [sys.executable, "-m", "penstock", "serve", *data, *listeners, *self.flags]

    def port(self, name: str) -> int:
        """The same again after a restart, so that clients find it; at first, one that nobody listens on."""
        while name not in self.ports:
            port = secrets.choice(PORTS)
            if is_free(port) and port not in self.ports.values():
                self.ports[name] = port
        return self.ports[name]

    def start(self) -> "BrokerProcess":
        for attempts_left in reversed(range(START_ATTEMPTS if not self.doors else 1)):
            try:
                self.doors = wait_ready(self._spawn(), WAIT_SECONDS)
                break
            except NotReady as error:
                # Somebody else may have chosen the same port at the same moment.
                if not attempts_left or "ddress already in use" not in self.log():
                    raise AssertionError(f"{error}\n{self.log()}") from None
                self.kill()
                self.ports.clear()
        # Of several listeners of a protocol, the first counts.
        for name, where in reversed(self.doors):
            if not where.startswith("unix:"):
                self.ports[name] = int(where.rpartition(":")[2])
        return self

    def _spawn(self) -> "subprocess.Popen[bytes]":
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")} | self.env
        command = self.command()
        with self._log.open("ab") as log:
            if self._forks(command):
                self._process = Warm.get(self.has_pages).start(command[3:], environment, log)
            else:
                self._process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=log, env=environment, cwd=ROOT
                )
        self.alive.add(self)
        return self._process

    def _forks(self, command: list[str]) -> bool:
        """Not where something is done before it begins, or given to its interpreter."""
        is_plain = command[:4] == [sys.executable, "-m", "penstock", "serve"]
        return self.is_warm and is_plain and all(name.startswith("PENSTOCK_") for name in self.env)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = WAIT_SECONDS) -> int:
        assert self._process is not None
        code = self._process.wait(seconds)
        self.alive.discard(self)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.running:
            with suppress(ProcessLookupError):  # It has just ended, and whoever forked it knows it first.
                self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """kill -9."""
        if self.running:
            with suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
        self.wait()

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def endings(self, port: int) -> int:
        """How many connections from that port of a client the broker has seen the end of."""
        return len(re.findall(rf"\d:{port}#\d+ (?:left|was lost)", self.log()))

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def ports_of(self, protocol: str) -> list[int]:
        """Of all its listeners, in the order of the ready line."""
        return [
            int(where.rpartition(":")[2])
            for name, where in self.doors
            if name == protocol and where[:5] != "unix:"
        ]

    def wire(self, name: str) -> "Wire":
        return Wire(("127.0.0.1", self.ports[name]))


class Wire:
    """A connection on which a test says and hears bytes."""

    def __init__(self, address: tuple[str, int] | str) -> None:
        if isinstance(address, str):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(WAIT_SECONDS)
            self.socket.connect(address)
        else:
            self.socket = socket.create_connection(address, WAIT_SECONDS)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._heard = bytearray()

    def say(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def hear(self, count: int) -> bytes:
        """Exactly that many bytes, or fewer where the peer closes."""
        while len(self._heard) < count:
            data = self._receive()
            if not data:
                break
            self._heard += data
        heard = bytes(self._heard[:count])
        del self._heard[:count]
        return heard

    def some(self) -> bytes:
        """What is there; waits for the first byte. Empty where the peer has closed."""
        if not self._heard:
            self._heard += self._receive()
        heard = bytes(self._heard)
        self._heard.clear()
        return heard

    def _receive(self) -> bytes:
        try:
            return self.socket.recv(1 << 18)
        except ConnectionResetError:
            return b""

    def expect(self, expected: bytes) -> None:
        heard = self.hear(len(expected))
        assert heard == expected, f"heard {heard.hex(' ')}, expected {expected.hex(' ')}"

    def is_silent(self, seconds: float = 0.2) -> bool:
        """Nothing comes for that long. For asserting that nothing happens, never for waiting."""
        ready, _, _ = select.select([self.socket], [], [], seconds)
        return not ready and not self._heard

    def is_closed(self) -> bool:
        """Waits for the peer to close; True where it does before anything else comes."""
        return self.some() == b""

    def leave(self) -> None:
        """FIN, and wait for the broker's own: it has read everything and taken back what was held here."""
        self.socket.shutdown(socket.SHUT_WR)
        while self._receive():
            pass
        self.socket.close()

    def close(self) -> None:
        """FIN."""
        self.socket.close()

    def reset(self) -> None:
        """RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lose(broker: BrokerProcess, wire: Wire, ending: str) -> None:
    """End a connection by "fin" or "rst", and wait until the broker has noticed."""
    if ending == "fin":
        wire.leave()
        return
    port: int = wire.socket.getsockname()[1]
    before = broker.endings(port)
    wire.reset()
    until(lambda: broker.endings(port) > before, "the broker to see the end of a connection")


def until(condition: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Poll for something that no answer announces; the end is bounded and named.

    A look that takes long is taken less often: most of the time belongs to those who are waited for.
    """
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if condition():
            return
        looked = time.monotonic()
        if looked > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(min(max(LOOK_SECONDS_MIN, 4 * (looked - began)), LOOK_SECONDS_MAX))


# --- bytes, written out as the specification has them --------------------------------------------------


def sspq(type_: int, payload: bytes = b"", retries: int = 0) -> bytes:
    return b"\x55\x99" + bytes([type_, retries]) + struct.pack(">I", len(payload)) + payload


SEND, RECEIVE, CONFIRM, DEAD_RECEIVE, NO_RECEIVE = 0x5E, 0xEC, 0xC0, 0xDE, 0x0E


def phpmq(type_: int, *packets: tuple[int, bytes], width: int = 32, newline: bytes = b"") -> bytes:
    head = b"H01%03d%02d" % (type_, len(packets)) + newline
    body = [
        b"P%02d" % number + str(len(content)).zfill(width - 3).encode() + newline + content + newline
        for number, content in packets
    ]
    return head + b"".join(body)


def expect_dispatch(
    wire: Wire,
    queue: bytes,
    content: bytes,
    ttl: bytes | None = None,
    *,
    width: int = 32,
    newline: bytes = b"",
) -> bytes:
    """A PHPMQ dispatch, byte for byte but for its id, which is returned."""
    packets = [(1, queue), (2, content), (3, b"?" * 32)] + ([(5, ttl)] if ttl is not None else [])
    expected = phpmq(3, *packets, width=width, newline=newline)
    heard = wire.hear(len(expected))
    at = expected.rindex(b"?" * 32)
    message_id = heard[at : at + 32]
    expected = expected[:at] + message_id + expected[at + 32 :]
    assert heard == expected, f"heard {heard!r}, expected {expected!r}"
    return message_id


def rq(*commands: int | tuple[int, int | bytes]) -> bytes:
    """RISP commands: a number alone, or with an integer or a string whose width the number implies."""
    out = bytearray()
    for command in commands:
        if isinstance(command, int):
            out.append(command)
            continue
        number, value = command
        out.append(number)
        width = {2: 1, 3: 2, 4: 4, 5: 1, 6: 2, 7: 4}[number >> 5]
        if isinstance(value, int):
            out += value.to_bytes(width, "big")
        else:
            out += len(value).to_bytes(width, "big") + value
    return bytes(out)


def numbered(numbers: Sequence[int]) -> list[bytes]:
    """Payloads that carry a number and some weight."""
    return [b"%012d" % number + b"." * (number % 97) for number in numbers]


def number_of(payload: bytes) -> int:
    return int(payload[:12])
