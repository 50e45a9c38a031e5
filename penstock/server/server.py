"""The server: one loop, its listeners, one broker, one log; from the ready line to the exit.

    start     open the log, listen everywhere, print the ready line
    run       turns: received chunks to words, words to the log, messages to consumers
    drain     on SIGTERM or SIGINT: accept nobody, hand out nothing, wait for what is in flight
    stop      tell those who still wait, sync, close, exit 0

A second signal stops at once: what was confirmed is safe, and everything unsettled comes again. So it does
where a stop is not over `STOP_SECONDS` after its drain, whatever clients, the disk or a cluster do.
SIGHUP reads the policies, the tokens and the TLS files again. When the log fails, the server says why and
ends with 1: it could promise nothing any more.

The file is long because there is one loop: whatever happens in a turn, at a tick or at the end has its place
here.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count as counter
from operator import attrgetter

from penstock import __version__
from penstock.broker.broker import Broker
from penstock.broker.home import Home
from penstock.common.address import Address
from penstock.common.clock import Clock
from penstock.common.given import SettingsError
from penstock.common.journal import Journal, log
from penstock.common.malloc import give_memory_back, keep_freed_memory
from penstock.common.ready import ready_line
from penstock.control.frames import Fields
from penstock.log.disk import RealDisk
from penstock.log.errors import LogError, LogFailed
from penstock.log.log import Log
from penstock.server.accepting import Accepting, allow_files
from penstock.server.audit import Audit
from penstock.server.backend import Backend, Served
from penstock.server.calls.context import Answer
from penstock.server.connection import Connection
from penstock.server.control import Control
from penstock.server.garbage import Garbage
from penstock.server.memory import Account
from penstock.server.rounds import TICK_SECONDS, Rounds
from penstock.server.second import SecondProcess
from penstock.server.settings import Limits, Listener, Settings
from penstock.server.settings_read import reloadable_difference
from penstock.server.supervisor import Supervisor
from penstock.server.tls import tls_files
from penstock.server.users import Users
from penstock.server.wires import CONNECTIONS

SLOW_TICKS = 20
TRIM_TICKS = 200
TLS_TICKS = 5 * SLOW_TICKS
SWITCH_SECONDS = 0.0001
"""How long the loop may keep the interpreter from the writer's thread. While that waits, every socket that is
read wakes it in vain, so that longer costs more: 0.5 ms took 10 % more time a message with 64 connections."""

BURST_BYTES = 1 << 20
BURST_TURNS = 1000
BURST_CONNECTIONS = 500
"""So much of the log must have been written since memory was last given back, or so much have gone on, or so
many must have been here of whom half have left."""

GRACE_SECONDS = 0.1
"""How long a stop goes on reading what was on its way: most sends are never answered."""

STOP_SECONDS = 2.0
LAST_WORDS_SECONDS = 1.0

DISK_LINES = {
    "full": (logging.ERROR, "the disk is full: new messages wait for room in %s; deliveries and acks go on"),
    "low": (logging.WARNING, "the disk is almost full: less than disk-bytes-reserve is free for %s"),
    "": (logging.INFO, "there is enough room on the disk again, for %s"),
}
EXIT_OK, EXIT_FAILED = 0, 1


class Server:
    """Owns the loop's callbacks. One to a process."""

    def __init__(
        self,
        settings: Settings,
        reload: Callable[[], Settings] | None = None,
        backend: Callable[["Server"], Backend] = Backend,
    ) -> None:
        self.settings = settings
        self._reload = reload
        self.limits: Limits = settings.limits
        self.users = Users(settings.users, settings.listeners)
        self.audit = Audit(settings.audit_path)
        self.connection_buffer_bytes = settings.limits.connection_buffer_bytes
        self.journal = Journal()
        self.connections: set[Connection] = set()
        self._throttled: set[Connection | Control] = set()  # not read from: the disk is behind
        self._ticking: list[Connection] = []  # have not had their tick of this second yet
        self._tick_at_once = 1
        self._left: list[Connection] = []  # their peers have left; in the order in which they came
        self._numbers = counter(1)
        self._port_numbers = counter(1)  # of all brokers that this process has
        self.entering = 0  # accepted, and not among the connections yet
        self.parting = 0  # refused, and still being told so
        self._listening: list[tuple[Listener, Accepting]] = []
        self._turn_wanted = False
        self._turns = BURST_TURNS  # since memory was last given back; a start is a burst, too
        self._crowd_most = 0  # connections at a time, since a crowd has left
        self._crowd_seen = 0  # a second ago
        self._arrival_us = 0  # of what was received since the last turn; 0: nothing was
        self.ticks = 0  # so often has `TICK_SECONDS` gone by, or more
        self._delayed_us = 0  # when a delay is looked after before the next tick; 0: nobody will
        self._position_seen = self._position_tidied = 0  # of the log
        self._disk_state = ""  # or "low", or "full"
        self._folder_found: list[tuple[int, int]] = []  # what the folder and its lock were, by number
        self._supervisor = Supervisor()
        self._stopping = False
        self._dismissed = False
        self._closed = False  # the log, with all there is to a turn
        self._exit = EXIT_OK
        self._done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.clock = Clock()
        self.now_us = self.clock.now_us
        self.rounds = Rounds(self._loop, self.arrival_us)
        self.memory = Account(settings.limits.memory_bytes_max)
        self._garbage = Garbage()
        self.started = time.monotonic()
        sys.setswitchinterval(SWITCH_SECONDS)
        self.second = SecondProcess(self, settings, settings.http) if settings.http is not None else None
        self.served: tuple[Served, ...] = ()
        self.home: Home
        self._backend = backend(self)

    def move_to(self, home: Home, *served: Served) -> None:
        """Words go there from now on. `served`: the logs behind it that are written by this process."""
        self.home, self.served = home, served
        self._read_on()

    def make_broker(self, opened: Log, wants_turn: Callable[[], None] | None = None) -> Broker:
        if by_us := self.clock.not_before(opened.time_us):
            for it in self.served:  # where nobody's time is over for that
                try:
                    it.broker.step(by_us, self.now_us())
                except LogFailed as error:
                    self.fail(error)
        if opened.policies is not self.settings.policies:
            opened.set_policies(self.settings.policies)  # They were read again while the log was opened.
        return Broker(
            opened,
            wants_turn or self.want_turn,
            queue_name_bytes_max=self.limits.queue_name_bytes_max,
            queues_max=self.limits.queues_max,
            queues_new_per_second=self.limits.queues_new_per_second,
            queues_elsewhere=lambda: sum(it.broker.doors.count for it in self.served if it.log is not opened),
            numbers=self._port_numbers,
        )

    @property
    def broker(self) -> Broker:
        """The broker, where this process has one."""
        return self.served[0].broker

    @property
    def log(self) -> Log:
        """The log, where this process writes one."""
        return self.served[0].log

    @property
    def stopping(self) -> bool:
        return self._stopping

    def arrival_us(self) -> int:
        """The time of what is received now. A turn has one, so that what came in it can be one block."""
        if not self._arrival_us:
            self._arrival_us = self.now_us()
            self.rounds.begin()
            self.want_turn()
        return self._arrival_us

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until told to stop; the exit code."""
        await self._backend.join()
        self._look_at_the_folder()
        try:
            await self._listen()
            await self._backend.open_http()
            for name in ("SIGTERM", "SIGINT"):
                self._loop.add_signal_handler(getattr(signal, name), self._asked_to_stop, name)
            self._loop.add_signal_handler(signal.SIGHUP, self._asked_to_reload)
            self._loop.call_later(TICK_SECONDS, self._tick)
            self._garbage.start()
            print(self.ready_line(), flush=True)  # noqa: T201 - the contract with whoever started us
            self._supervisor.ready(self._status())
            log.info("ready", extra={"facts": self._backend.facts()})
            self.audit.tell(door="process", act="start", version=__version__, pid=os.getpid())
            await self._done.wait()
        finally:
            self._garbage.stop()
            await self._close_everything()
        return self._exit

    async def _listen(self) -> None:
        for listener in self.settings.listeners:
            tls = tls_files(listener)

            def connection(has_place: bool, listener: Listener = listener) -> Connection:
                return CONNECTIONS[listener.protocol](self, listener, has_place)

            try:
                accepting = Accepting(self, listener.address, connection, tls)
            except OSError as error:
                raise OSError(
                    error.errno, f"{listener.protocol} listener {listener.address}: {error.strerror}"
                ) from error
            self._listening.append((listener, accepting))

    def _addresses(self) -> Iterator[tuple[Listener, Address]]:
        """Where it listens, with real ports."""
        for listener, accepting in self._listening:
            yield listener, accepting.address

    def listeners(self) -> list[dict[str, object]]:
        """The same for those who ask the HTTP API where to connect to."""
        return [
            {
                "protocol": listener.protocol,
                "address": str(address),
                "tls": listener.tls_certificate is not None,
                "queue": listener.queue if listener.protocol == "sspq" else None,
            }
            for listener, address in self._addresses()
        ]

    def ready_line(self) -> str:
        doors = [(listener.protocol, address) for listener, address in self._addresses()]
        return ready_line(doors if self.second is None else [*doors, ("http", self.second.address)])

    def _asked_to_stop(self, name: str) -> None:
        if self._stopping:
            log.warning("%s again: stopping now", name)
            self._end_within(STOP_SECONDS)
            self._done.set()
            return
        self._stopping = True
        self._end_within(self.settings.drain_seconds + STOP_SECONDS)
        log.info("%s: draining, at most %s s", name, self.settings.drain_seconds)
        self._supervisor.stopping(self._status())
        self._stop_listening()
        for connection in list(self.connections):
            connection.say_closing()
        if self.second is not None:
            holds = any(it.broker.taking.is_holding for it in self.served)
            if holds or self._backend.answers_for_others:
                self.second.drain()
            else:
                self.second.ask_to_stop(self.settings.drain_seconds)
        self._backend.drain()
        self._loop.call_later(self.settings.drain_seconds, self._done.set)
        self._loop.call_later(GRACE_SECONDS, self._dismiss)

    def _end_within(self, seconds: float) -> None:
        ending = threading.Timer(seconds, self._end_now)
        ending.daemon = True
        ending.start()

    def _end_now(self) -> None:
        """On a thread of its own: the loop may be what is waited for."""
        is_safe = all(it.log.is_safe for it in self.served)
        rest = "" if is_safe else "; what was not confirmed may be lost, what was settled last comes again"
        log.error("not stopped %.0f s after its time: ends now, as a crash would%s", STOP_SECONDS, rest)
        os._exit(self._exit if is_safe else EXIT_FAILED)

    def _stop_listening(self) -> None:
        for _, accepting in self._listening:
            accepting.close()

    def _dismiss(self) -> None:
        """What was sent before the stop has been read by now: let those go who hold nothing."""
        if self._throttled and not self._done.is_set():  # or not yet: the disk is behind
            self._loop.call_later(GRACE_SECONDS, self._dismiss)
            return
        self._dismissed = True
        self._backend.dismiss()
        self._check_drained()

    def _check_drained(self) -> None:
        second = None if self._backend.answers_for_others else self.second
        answered = second is None or not second.open_calls
        is_read = not (self.rounds.waiting or self._throttled)
        if self._dismissed and self._backend.is_drained and answered and is_read:
            self._done.set()

    def _asked_to_reload(self) -> None:
        self._supervisor.reloading()
        self._read_again()
        self._supervisor.reloaded()

    def _read_again(self) -> None:
        self._look_at_tls(asked=True)
        if self.second is not None:
            self.second.read_tls_again()
        if self._reload is None:
            return
        try:
            settings = self._reload()
        except SettingsError as error:
            log.error("settings not read again, the old ones stay: %s", error)
            return
        reload = reloadable_difference(self.settings, settings)
        # For brokers that are made later; and where the next settings are not taken, these stay in force.
        http = self.settings.http and replace(self.settings.http, tokens=reload.tokens)
        self.settings = replace(self.settings, policies=reload.policies, users=reload.users, http=http)
        self.home.set_policies(reload.policies)
        self.users = Users(reload.users, self.settings.listeners, self.users)
        for connection in list(self.connections):
            connection.identify()
            connection.end_refused(self.now_us())
        if self.second is not None:
            self.second.set_users(reload.tokens, reload.users)
        self.audit.tell(door="process", act="reload", users=len(reload.users), tokens=len(reload.tokens))
        log.info("policies and users read again: %d users, %d tokens", len(reload.users), len(reload.tokens))
        if reload.others:
            log.warning("changed, but in force only after a restart: %s", ", ".join(reload.others))

    def _look_at_tls(self, *, asked: bool = False) -> None:
        for _, accepting in self._listening:
            accepting.look_at_tls(asked=asked)

    def open_way(self, to: str, caller: str, answer: Answer) -> None:
        """To the HTTP process of another front-end, for ours."""
        self._backend.open_way(to, caller, answer)

    def cluster_info(self) -> Fields | None:
        return self._backend.cluster_info()

    def fail(self, error: LogFailed) -> None:
        """The log says that it is of no use any more."""
        self._backend.fail(error)

    def give_up(self, error: BaseException) -> None:
        """Stop at once."""
        if self._exit == EXIT_OK:
            self._exit = EXIT_FAILED
            log.critical("stopping: %s", error, exc_info=None if isinstance(error, LogError) else error)
            self._done.set()

    async def _close_everything(self) -> None:
        now_us = self.now_us()
        failed = any(it.log.failed is not None for it in self.served)
        if not failed:
            self.home.end_requests(now_us)
        self._stop_listening()
        for connection in list(self.connections):
            connection.close()
            if not failed:
                connection.leave(lost=False)
        last_words = asyncio.ensure_future(self._last_words())
        if self._backend.answers_for_others:
            await last_words
        stopping = [self.second.stop(LAST_WORDS_SECONDS)] if self.second is not None else []
        await asyncio.gather(last_words, *stopping)
        await self._backend.close()
        self._closed = True
        self.audit.tell(door="process", act="stop", result="failed" if self._exit else "done")
        self.audit.close()
        self._supervisor.close()
        self.journal.flush()
        log.info("stopped")

    async def _last_words(self) -> None:
        """They are still being written to peers."""
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while self.connections and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    # --- turns -----------------------------------------------------------------------------------

    def want_turn(self) -> None:
        if not self._turn_wanted:
            self._turn_wanted = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if self._closed:
            return  # What was still to be withdrawn or given back, the next start does at once.
        self._turn_wanted = False
        self._arrival_us = 0
        self._turns += 1
        self._backend.before_turn()
        try:
            self.home.turn(self.now_us())
        except LogFailed as error:
            self.fail(error)
        except Exception:  # noqa: BLE001 - it is told: a fault of ours must not stop the next turn
            log.exception("a turn failed")
        self._wait_for_delayed()
        self._look_at_memory()
        self.rounds.end()
        self._read_on()
        if self._stopping:
            self._check_drained()

    def _look_at_memory(self) -> None:
        if self.second is not None:
            self.memory.charge_bodies(self.second.bodies_bytes)
        if self.memory.is_tight or self.rounds.is_sparing:
            self.memory.look()
            self.rounds.be_sparing(self.memory.is_tight)
            if self.second is not None:
                self.second.tell_of_memory(self.memory.is_full)

    def wake(self) -> None:
        """From the log's threads: something has ended."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            self._loop.call_soon_threadsafe(self._poll)

    def _poll(self) -> None:
        for it in self.served:
            it.log.poll()
            if it.log.failed is not None:
                self.fail(it.log.failed)
        self._read_on()
        if self._stopping:
            self._check_drained()  # The last answer may have waited for this.

    def _read_on(self) -> None:
        """The disk may have caught up: with the writer's end, or in a turn, where the loop itself writes."""
        if self._throttled and self._bytes_in_flight <= self.limits.in_flight_bytes:
            throttled, self._throttled = self._throttled, set()
            for connection in throttled:
                connection.hold_for_server(False)
        if self._throttled:
            for it in self.served:
                it.log.hurry()

    @property
    def _bytes_in_flight(self) -> int:
        return sum(it.log.bytes_in_flight for it in self.served)

    def _tick(self) -> None:
        if self._done.is_set():
            return
        self._loop.call_later(TICK_SECONDS, self._tick)
        if self._stopping:
            self._check_drained()  # Whatever ended last, and outside of a turn.
        self.ticks += 1
        bodies_bytes = self.second.bodies_bytes if self.second is not None else 0
        if self.memory.is_tight or self._throttled or bodies_bytes != self.memory.bodies_bytes:
            self.want_turn()  # Bodies over HTTP come and go without one.
        step_us = self.clock.look()
        now_us = self.now_us()
        try:
            if step_us and self._arrival_us:
                self._arrival_us = now_us  # What still comes in this turn comes after the step.
            self.home.tick(now_us, step_us)
            self._wait_for_delayed()
            if self.ticks % TRIM_TICKS == 0:
                for it in self.served:
                    it.log.trim(now_us)
        except LogFailed as error:
            self.fail(error)
            return
        if self.ticks % SLOW_TICKS == 0:
            self._tell_of_the_disk()
            self._look_at_the_folder()
            self._tidy()
            self._supervisor.beat(self._status())
            if self.ticks % TLS_TICKS == 0:
                self._look_at_tls()
            left = (connection for connection in self.connections if connection.has_left)
            self._left = sorted(left, key=attrgetter("connected"))
            self._ticking = list(self.connections)
            self._tick_at_once = len(self._ticking) // SLOW_TICKS + 1
        # Some at a time: ten thousand of them would take 50 ms together.
        for connection in self._ticking[-self._tick_at_once :]:
            connection.tick(now_us)
        del self._ticking[-self._tick_at_once :]

    def _wait_for_delayed(self) -> None:
        """Before the next tick, a delay may be over."""
        due_us = min((it.log.due_us for it in self.served if it.log.due_us), default=0)
        if not due_us or 0 < self._delayed_us <= due_us:
            return
        left_us = due_us - self.now_us()
        if left_us < TICK_SECONDS * 1_000_000:
            self._delayed_us = due_us
            self._loop.call_later(max(left_us, 1000) / 1_000_000, self._delayed)

    def _delayed(self) -> None:
        self._delayed_us = 0
        if self._done.is_set():
            return
        for it in self.served:
            try:
                it.broker.due(self.now_us())
            except LogFailed as error:
                self.fail(error)
        self._wait_for_delayed()

    def _tell_of_the_disk(self) -> None:
        """A line before it is full, when it is, and when it is not any more: most senders get no word."""
        if not self.served:
            return
        infos, before = [it.log.info(with_cluster=False) for it in self.served], self._disk_state
        info = min(infos, key=lambda it: it.disk_bytes_free)
        data = info.disk_room_in
        reserve = info.disk_bytes_reserve
        if any(it.full for it in infos) or any(it.broker.publishing.waits_for_disk for it in self.served):
            now = "full"
        else:  # What changes with every segment is not told every time.
            now = "low" if info.disk_bytes_free < reserve + reserve // 8 * (before == "low") else ""
        if now == before:
            return
        self._disk_state = now
        if before == "full":
            log.warning("there is room on the disk again, for %s: senders go on", data)
        if now or before == "low":
            log.log(*DISK_LINES[now], data)

    def _status(self) -> str:
        """One line, for who looks after the process."""
        doing = f"draining, at most {self.settings.drain_seconds} s" if self._stopping else self.ready_line()
        disk = f"; the disk is {'almost ' * (self._disk_state == 'low')}full" if self._disk_state else ""
        return f"{doing}; {len(self.connections)} connections{disk}"

    def _look_at_the_folder(self) -> None:
        """Stop where another one has its name, or the lock file's: another broker may be at work there."""
        folder = self._backend.folder
        try:
            found = [os.stat(path)[1:3] for path in (folder, os.path.join(folder, RealDisk.LOCK))]
        except (FileNotFoundError, NotADirectoryError):
            found = []
        if found != (self._folder_found or found):
            what = "replaced by another one" if found else "removed"
            self.give_up(
                LogFailed(
                    f"data folder {folder!r}, or the lock file in it, was {what} under the running broker; "
                    f"see what has become of it, then start again"
                )
            )
        self._folder_found = found

    def _tidy(self) -> None:
        """Once a second: when a burst is over, what it took of memory goes back."""
        position = sum(it.log.position for it in self.served)
        crowd = len(self.connections) + self.entering
        has_left = self._crowd_most >= BURST_CONNECTIONS and crowd <= self._crowd_most // 2
        has_left = has_left and crowd >= self._crowd_seen  # and nobody follows
        self._crowd_seen = crowd
        burst = position - self._position_tidied >= BURST_BYTES or self._turns >= BURST_TURNS
        if has_left:
            # Blocks that came while they did lie between what they had: a few hundred keep all of it.
            for it in self.served:
                it.log.empty_cache()
            self._garbage.sweep()
            self._crowd_most = crowd
        if has_left or (burst and position == self._position_seen and not self.rounds.waiting):
            self._position_tidied = position
            self._turns = 0
            give_memory_back()
        self._position_seen = position

    # --- connections -----------------------------------------------------------------------------

    def name_for(self, connection: Connection) -> str:
        """A name for people and events: the protocol, the peer's address, a running number."""
        return f"{connection.protocol}:{connection.peer}#{next(self._numbers)}"

    def find_place(self) -> bool:
        """Whether there is one for who is accepted now: those who are entering have theirs."""
        there = len(self.connections) + self.entering
        self._crowd_most = max(self._crowd_most, there)
        return there < self.limits.connections_max or self._make_place()

    def refused(self, peer: str) -> None:
        limit = f"{self.limits.connections_max} are open, the limit of connections-max"
        why = "the broker is stopping" if self._stopping else limit
        self.journal.note(logging.WARNING, f"refused a connection: {why}", peer=peer)

    def _make_place(self) -> bool:
        """End the last who came of those who have left while what they sent waits for room; if there is one.

        Who is not read from is not seen to leave. So senders that come, send and go take all places while a
        queue is full, and whoever would empty it must get one.
        """
        while self._left:
            left = self._left.pop()
            if left.has_left:
                text = "connections-max: ended a sender that has left; what waited for room is not stored"
                self.journal.note(logging.WARNING, text, peer=left.name)
                left.drop()
                return True
        return False

    def gone(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._throttled.discard(connection)
        self.memory.forget(connection)

    def not_throttled(self, link: Control) -> None:
        """It is gone: nothing waits for room any more."""
        self._throttled.discard(link)

    def check_in_flight(self, connection: Connection | Control) -> None:
        """A sender that is faster than the disk is not read from until the disk has caught up."""
        if self._bytes_in_flight > self.limits.in_flight_bytes:
            self._throttled.add(connection)
            connection.hold_for_server(True)


def serve(
    settings: Settings,
    reload: Callable[[], Settings] | None = None,
    kind: Callable[[Settings, Callable[[], Settings] | None], Server] = Server,
) -> int:
    """Run a server in this process until it is told to stop; its exit code."""

    connections_max = allow_files(settings.limits.connections_max)

    async def main() -> int:
        server = kind(settings, reload)
        server.limits = replace(server.limits, connections_max=connections_max)
        return await server.run()

    keep_freed_memory()
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())
