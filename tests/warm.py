"""`penstock` commands from a process that has imported everything: each is a fork of it.

A test run starts hundreds of brokers. By its imports alone each takes a third of a second of a core, its
process of the HTTP API half a second, NiceGUI in it another one: more than most tests take with it. So one
process for each process of pytest (`python -m tests.warm`) imports them once and does nothing else. For a
command it forks, and the child is `python -m penstock WORDS` from there on: its own environment, folder,
output, signals and exit code. What the broker starts as its second process has been forked from it, before
its first line and as its child; one that it starts later begins from nothing, as always.

Not for a test that looks at what a start takes, at memory as such, or at the command line of a process:
`BrokerProcess.is_warm` says no there.

    the test  --  words, environment, folder; its three files, the end of a pipe  -->  here
    the test  <--  through the pipe: the number of the process, and later how it ended  --  here
"""

import asyncio
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, ClassVar

ROOT = Path(__file__).parents[1]
START_SECONDS = 60.0
REQUEST_BYTES_MAX = 1 << 17

COMMANDS = (
    "penstock.cli.main",
    "penstock.cli.serve",
    "penstock.cli.send",
    "penstock.cli.receive",
    "penstock.cli.request",
    "penstock.cli.reply",
    "penstock.cli.queues",
    "penstock.cluster.front",
    "penstock.server.server",
    "penstock.http.process",
    "penstock.dashboard.start",
    "uvloop",
)
PAGES = ("penstock.dashboard.web",)
"""With NiceGUI: for who looks at the dashboard."""


class Warm:
    """The process to fork from, as a test sees it."""

    running: ClassVar[dict[bool, "Warm"]] = {}

    @classmethod
    def get(cls, pages: bool) -> "Warm":
        if pages not in cls.running:
            cls.running[pages] = cls(COMMANDS + PAGES if pages else COMMANDS)
        return cls.running[pages]

    def __init__(self, modules: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * REQUEST_BYTES_MAX)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
            )

    def start(self, words: Sequence[str], environment: Mapping[str, str], errors: IO[bytes]) -> "Forked":
        """`python -m penstock WORDS`, with its standard output in a pipe."""
        read, write = os.pipe()
        with open(write, "wb") as output, open(os.devnull, "rb") as nothing:
            return self._fork(words, environment, [nothing, output, errors], open(read, "rb"))

    def run(
        self, words: Sequence[str], environment: Mapping[str, str], stdin: bytes, seconds: float
    ) -> "subprocess.CompletedProcess[bytes]":
        """The same to its end, as `subprocess.run` has it."""
        with TemporaryFile() as given, TemporaryFile() as output, TemporaryFile() as errors:
            given.write(stdin)
            given.seek(0)
            process = self._fork(words, environment, [given, output, errors])
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
            for said in (output, errors):
                said.seek(0)
            return subprocess.CompletedProcess(["penstock", *words], code, output.read(), errors.read())

    def _fork(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        files: Sequence[IO[bytes]],
        output: IO[bytes] | None = None,
    ) -> "Forked":
        read, write = os.pipe()
        with open(write, "wb") as told:
            request = json.dumps([list(words), dict(environment), str(ROOT)]).encode()
            socket.send_fds(self._socket, [request], [file.fileno() for file in (*files, told)])
        return Forked(output, open(read, "rb", buffering=0))


class Forked(subprocess.Popen[bytes]):
    """Such a child. Not a child of this process: how it ended, that one tells."""

    def __init__(self, output: IO[bytes] | None, told: IO[bytes]) -> None:
        # Nothing of what Popen does to start one.
        self._child_created = False
        self.args = ["penstock"]
        self.stdin, self.stdout, self.stderr = None, output, None
        self.returncode = None
        self._told = told
        self.pid = int(self._line(START_SECONDS))

    def _line(self, seconds: float | None) -> bytes:
        if not select.select([self._told], [], [], seconds)[0]:
            raise subprocess.TimeoutExpired(self.args, seconds or 0)
        line = self._told.readline()
        assert line, "the process that brokers are forked from is gone"
        return line

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = int(self._line(timeout))
            self._told.close()
        code: int = self.returncode
        return code

    def send_signal(self, sig: int) -> None:
        # It may be gone, and that told in the next moment: as Popen does it.
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)


# --- the process that is forked --------------------------------------------------------------------------


def serve(requests: socket.socket) -> list[str]:
    """Fork for every request. Returns in the children alone, with their words; ends with the test."""
    children: dict[int, int] = {}  # by their numbers, the pipes of those who ask
    heard, wake = socket.socketpair()
    for end in (heard, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        for ready in select.select([requests, heard], [], [])[0]:
            if ready is heard:
                heard.recv(4096)
                _reap(children)
                continue
            data, given, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 4)
            if not data:
                os._exit(0)
            *files, told = given
            words, environment, folder = json.loads(data)
            if not (number := os.fork()):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (requests, heard, wake):
                    end.close()
                for fd in (told, *children.values()):
                    os.close(fd)
                _become(files, environment, folder)
                return words  # type: ignore[no-any-return]
            children[number] = told
            os.write(told, b"%d\n" % number)
            for fd in files:
                os.close(fd)


def _reap(children: dict[int, int]) -> None:
    while children:
        number, status = os.waitpid(-1, os.WNOHANG)
        if not number:
            return
        told = children.pop(number)
        with contextlib.suppress(BrokenPipeError):  # Nobody wants to know any more.
            os.write(told, b"%d\n" % os.waitstatus_to_exitcode(status))
        os.close(told)


def _become(files: Sequence[int], environment: Mapping[str, str], folder: str) -> None:
    for place, fd in enumerate(files):
        os.dup2(fd, place)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)


def second_in_waiting() -> Callable[..., Any]:
    """Fork what becomes the process of the HTTP API; gives `asyncio.create_subprocess_exec`, which hands it
    out once."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    waiting = os.fork()
    if not waiting:
        ours.close()
        _be_second(theirs)
    theirs.close()
    start = asyncio.create_subprocess_exec

    async def hand_out(*command: str, **options: Any) -> Any:
        nonlocal waiting
        if command[1:3] != ("-m", "penstock.http") or not waiting:
            return await start(*command, **options)
        process, waiting = Second(waiting), 0
        with ours:
            socket.send_fds(ours, [b"begin"], list(map(int, command[3:])))
        return process

    return hand_out


def _be_second(asked: socket.socket) -> None:
    """The same as `penstock.http.__main__`, from where it has imported everything."""
    second = importlib.import_module("penstock.http.__main__")
    second._die_with_parent()
    data, given, _, _ = socket.recv_fds(asked, 16, 4)
    if not data:
        os._exit(0)
    asked.close()
    os.setsid()
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    sys.argv = ["penstock.http", *map(str, given)]
    try:
        second.main()
    except SystemExit as ended:
        os._exit(ended.code if isinstance(ended.code, int) else 1)
    except BaseException:  # noqa: BLE001 - as the interpreter does with what nobody has caught
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


class Second:
    """What a broker uses of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._end)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, signal.SIGKILL)


def main(requests_fd: int, modules: Sequence[str]) -> int:
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    with socket.socket(fileno=requests_fd) as requests:
        words = serve(requests)
    if "--http" in words and "off" not in words[words.index("--http") + 1 :][:1]:
        asyncio.create_subprocess_exec = second_in_waiting()
    from penstock.cli.main import main as penstock

    sys.argv = ["penstock", *words]
    return penstock()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
