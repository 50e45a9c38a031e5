"""SecondProcess: starts the process of the HTTP API, watches it, and starts it again.

The listening socket belongs to the first process and is inherited: while the second is away, callers
wait in its backlog and are served when it is back, and the port never changes hands. The private link
is a socket pair, made anew for every start; its end tells each side that the other is gone.

In a cluster there is a bell beside the door: a socket by which the first process hands connections over, one
end of a pair each, with the address of whoever is behind it at another front-end (`enter`). It is of this
machine's two processes alone, so that nobody else can say who somebody is.

    prepare  the process without its work: it has loaded all it needs, and looks at nothing until it is
             told what for. A follower in a cluster has one, so that callers do not wait when it leads
    start    open the listening socket; then the process, which takes some tenths of a second
    watch    when it ends, say so and start it again, later each time it ends soon
    stop     tell it to finish what is open, wait for it, and end it where it does not

How it fails: an address that cannot be listened on is the start's failure, as for every listener. A
second process that cannot live is told in the log at every try; messages go on without it.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from penstock import __version__
from penstock.common.address import TcpAddress, UnixAddress, bind_unix
from penstock.control.frames import Fields
from penstock.control.gauge import Gauge, gauge_file
from penstock.server.control import Control
from penstock.server.settings import HttpSettings, Settings, Token, UserSettings
from penstock.server.tls import tls_files

if TYPE_CHECKING:
    from penstock.server.server import Server

BACKLOG = 1024
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.1, 5.0
HEALTHY_SECONDS = 10.0
"""A process that lived this long is started again at once."""

NICENESS = 5
"""Where both processes want the same core, messages go first."""

log = logging.getLogger("penstock.second")


class SecondProcess:
    def __init__(self, server: "Server", settings: Settings, http: HttpSettings) -> None:
        self._server = server
        self._settings = settings
        self._http = http
        self._tokens = http.tokens
        self._users = settings.users
        self._socket: socket.socket | None = None
        self._bell: tuple[socket.socket, socket.socket] | None = None  # to ring, and to be heard
        self._gauge_file = -1
        self._gauge: Gauge | None = None  # while there is a door
        self._memory_is_full = False
        self._control: Control | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._stopping = asyncio.Event()
        self._stop_seconds = 0.0
        self._sharding: Fields | None = None

    # --- life ------------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Open the door; nobody answers yet."""
        tls_files(self._http)  # Wrong TLS files are told now, and not by a process that cannot start.
        address = self._http.address
        try:
            listening = await self._bound(address)
            listening.listen(BACKLOG)
        except OSError as error:
            raise OSError(error.errno, f"http listener {address}: {error.strerror}") from error
        self._socket = listening
        self._gauge_file = gauge_file()
        self._gauge = Gauge(self._gauge_file)
        if not isinstance(self._settings.engine, str):
            self._bell = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._bell[0].setblocking(False)

    async def _bound(self, address: TcpAddress | UnixAddress) -> socket.socket:
        if isinstance(address, UnixAddress):
            return bind_unix(address.path, self._settings.socket_mode)
        found = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, where = found[0]
        listening = socket.socket(family)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
        except OSError:
            listening.close()
            raise
        return listening

    @property
    def address(self) -> TcpAddress | UnixAddress:
        """Where it listens, with the real port."""
        assert self._socket is not None
        if isinstance(self._http.address, UnixAddress):
            return self._http.address
        host, port, *_ = self._socket.getsockname()
        return TcpAddress(host, port)

    def second_door(self) -> socket.socket:
        """The same listening socket once more, for whoever answers while there is no process."""
        assert self._socket is not None
        return self._socket.dup()

    def enter(self, caller: str) -> socket.socket:
        """A connection to it, of a caller who came in at another front-end. While there is no process it
        waits, as at the door; OSError where too many do."""
        assert self._bell is not None
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            socket.send_fds(self._bell[0], [caller.encode()], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def hand_over(self, name: str, there: socket.socket) -> None:
        """The end of a connection for it, under a name; OSError where it takes no more."""
        assert self._bell is not None
        socket.send_fds(self._bell[0], [b"\0" + name.encode()], [there.fileno()])

    def prepare(self) -> None:
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    def start(self) -> None:
        self._wanted.set()
        self.prepare()

    async def _watch(self) -> None:
        pause = PAUSE_SECONDS_MIN
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                what = f"ended ({_ending(await self._live())})"
            except OSError as error:  # no process or no descriptor to be had: there may be one in a moment
                what = f"could not be started ({error.strerror})"
            if self._stopping.is_set():
                return
            lived = time.monotonic() - began
            pause = PAUSE_SECONDS_MIN if lived >= HEALTHY_SECONDS else min(2 * pause, PAUSE_SECONDS_MAX)
            log.error(
                "the HTTP API's process %s after %.1f s; messages go on, it starts again in %.1f s",
                what,
                lived,
                pause,
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    async def _live(self) -> int:
        """One life of the second process; its exit code."""
        assert self._socket is not None
        ours, theirs = socket.socketpair()
        inherited = [theirs.fileno(), self._socket.fileno(), self._gauge_file]
        if self._bell is not None:
            inherited.append(self._bell[1].fileno())
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "penstock.http",
                *map(str, inherited),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the ready line's reader gets nothing else
                pass_fds=inherited,
                start_new_session=True,  # Ctrl-C is for the first, which then tells it
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._process = process
        # From here, and not by itself: its imports alone take half a second, just when the first messages go.
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
        if not await self._is_wanted(process):  # What it would ask for, this process may not have any more.
            ours.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            self._process = None
            return await process.wait()
        loop, users = asyncio.get_running_loop(), self._user_fields()
        _, self._control = await loop.create_connection(
            lambda: Control(self._server, self._hello(), self._link_lost), sock=ours
        )
        if users != (users_now := self._user_fields()):  # They were read again behind its hello.
            self._control.tell(users_now)
        if self._memory_is_full:
            self._control.tell({"memory_is_full": True})
        if self._stopping.is_set():
            self._tell_to_stop()
        try:
            return await process.wait()
        finally:
            self._process = None
            if self._gauge is not None:
                self._gauge.held_bytes = 0
            self._control.close()
            self._control = None

    async def _is_wanted(self, process: asyncio.subprocess.Process) -> bool:
        """Whether it is for something: before it has ended by itself, and before nobody wants it any more."""
        if self._wanted.is_set() or self._stopping.is_set():
            return not self._stopping.is_set()
        ends = [
            asyncio.ensure_future(it) for it in (self._wanted.wait(), self._stopping.wait(), process.wait())
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        return self._wanted.is_set() and not self._stopping.is_set() and process.returncode is None

    def _link_lost(self) -> None:
        # It sees the same end and leaves by itself; one that hangs must not keep the door closed.
        if self._process is not None and not self._stopping.is_set():
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def rest(self, seconds: float) -> None:
        """Let it finish what is open; it is gone when this returns. The door stays, for another start."""
        self.ask_to_stop(seconds)
        if self._watching is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._watching), seconds)
            except TimeoutError:
                if self._process is not None:
                    self._process.kill()
                await self._watching
            self._watching = None
        self._wanted.clear()
        self._stopping.clear()

    async def stop(self, seconds: float) -> None:
        """The same for good."""
        await self.rest(seconds)
        if self._socket is not None:
            if isinstance(self._http.address, UnixAddress):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._http.address.path)
            self._socket.close()
            self._socket = None
            os.close(self._gauge_file)
            self._gauge = None
            for end in self._bell or ():
                end.close()

    def drain(self) -> None:
        """The broker stops: nobody waits any more, but callers may still settle what they hold."""
        if self._control is not None:
            self._control.tell({"drain": True})

    def ask_to_stop(self, seconds: float) -> None:
        if not self._stopping.is_set():
            self._stopping.set()
            self._stop_seconds = seconds
            self._tell_to_stop()

    def _tell_to_stop(self) -> None:
        # One that is only starting is told as soon as there is a link to it.
        if self._control is not None:
            self._control.tell({"stop": self._stop_seconds})

    @property
    def open_calls(self) -> int:
        """Calls that wait for an answer: a sender's receipt, mostly."""
        return self._control.open_calls if self._control is not None else 0

    @property
    def bodies_bytes(self) -> int:
        """Bodies of requests that it holds."""
        return self._gauge.held_bytes if self._gauge is not None else 0

    # --- what it is told --------------------------------------------------------------------------

    def tell_of_memory(self, is_full: bool) -> None:
        """Whether clients make both processes hold as much as they may."""
        if is_full != self._memory_is_full:
            self._memory_is_full = is_full
            if self._control is not None:
                self._control.tell({"memory_is_full": is_full})

    def set_users(self, tokens: tuple[Token, ...], users: tuple[UserSettings, ...]) -> None:
        """These, from now on."""
        self._tokens, self._users = tokens, users
        if self._control is not None:
            self._control.tell(self._user_fields())

    def set_shards(self, sharding: Fields) -> None:
        """Of a cluster with several logs: how many, which of them are served here, and who leads each."""
        if sharding != self._sharding:
            self._sharding = sharding
            if self._control is not None:
                self._control.tell({"sharding": sharding})

    def read_tls_again(self) -> None:
        if self._control is not None:  # One that is only starting reads the files anyway.
            self._control.tell({"tls": True})

    def _user_fields(self) -> Fields:
        return {
            "tokens": [{"name": it.name, "role": it.role, "token": it.token} for it in self._tokens],
            "users": [
                {
                    "name": it.user.name,
                    "hashes": it.hashes,
                    "grants": [{"queues": grant.queues, "may": grant.may.value} for grant in it.user.grants],
                    "admin": it.user.is_admin,
                    "expires_us": it.user.expires_us,
                }
                for it in self._users
            ],
        }

    def _hello(self) -> Fields:
        http, limits, audit = self._http, self._settings.limits, self._settings.audit_path
        return {
            **asdict(http),
            "version": __version__,
            "data": os.path.abspath(self._settings.data),
            "cluster": None if isinstance(self._settings.engine, str) else self._settings.cluster.name,
            "address": str(self.address),
            "sharding": self._sharding,
            "audit": None if audit is None else os.path.abspath(audit),
            **self._user_fields(),
            "log_level": self._settings.log_level,
            "log_format": self._settings.log_format,
            "durability": self._settings.durability,
            "block_bytes": self._settings.log.block_bytes,
            "archive": self._archive(),
            "payload_bytes_max": limits.payload_bytes_max,
            "queue_name_bytes_max": limits.queue_name_bytes_max,
            "frame_seconds": limits.frame_seconds,
            "handshake_seconds": limits.handshake_seconds,
        }

    def _archive(self) -> Fields | None:
        """What is to be archived; None: nothing."""
        archive = self._settings.archive
        if archive.path is None:
            return None
        # A folder as every process of this machine understands it.
        path = archive.path.removeprefix("file://")
        path = path if "://" in path else os.path.abspath(path)
        return {**asdict(archive), "path": path}


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
