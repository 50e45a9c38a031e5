"""Router: the broker of a front-end in a cluster of several logs. It has the face of `Broker`.

A queue is in the log, the *shard*, that its name says (`model/shards.py`), and each shard has a home: a
broker in this process, or the way to one elsewhere (`remote_broker.py`). A connection is a port of every home
that it has a word for, a `ShardPort`, from its first word on.

Rules that always hold:
  * What a connection settles is settled when all is durable that it has published before to other shards:
    logs are synced one by one, and who has sent a result and then settled its input must not have settled
    alone. Within a shard its log sees to that. All else reaches its home in the order in which it was said.
  * A connection is read from while every home of its words has room; it is let go when all have let it go.

How it fails: a log that has failed is told of to `on_failed`, and the others go on. Settlements that waited
for it are not made, and what they speak of comes again; so it is where their connection has left, and the
other shard says nothing for `LEAVING_SECONDS`.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from penstock.broker.broker import Broker
from penstock.broker.home import Home
from penstock.broker.port import Port
from penstock.log.errors import LogFailed
from penstock.model import words
from penstock.model.batch import Batch, Slice
from penstock.model.policy import Policies
from penstock.model.shards import shard_of
from penstock.model.timers import SECOND_US
from penstock.model.words import Command, Where

WAITING_BYTES: Final = 256 * 1024
"""Of settlements that wait for other shards, with their answers, before a connection is not read from."""

RUN_BYTES: Final = 160
"""What a run of settled messages, or an answer, is taken to cost beside its payload."""

LEAVING_SECONDS: Final = 5
LEAVING_BYTES: Final = 8 << 20
"""So long, and so much of it together, what was settled waits after its connection has left."""

Door = tuple[str, bool]  # queue, and whether its dead letters


class Client(Port, Protocol):
    """A connection, as it is seen from here."""

    peer: str
    connected: float
    sent: dict[str, int]

    @property
    def user(self) -> str: ...

    @property
    def is_held(self) -> bool: ...

    @property
    def is_gone(self) -> bool: ...

    @property
    def has_left(self) -> bool: ...

    def about(self, now_us: int) -> dict[str, object]: ...

    def end(self) -> None: ...

    def drop(self) -> None: ...

    def hold_for_server(self, held: bool) -> None: ...


class ShardPort:
    """A connection, as a port of one shard's home."""

    __slots__ = (
        "again",
        "answered",
        "asked",
        "bytes_room",
        "connection",
        "count_room",
        "delivered",
        "demands",
        "finished",
        "held",
        "log",
        "lost_to",
        "name",
        "protocol",
        "refused",
        "replies",
        "routed",
        "shard",
        "undelivered",
        "unsynced",
    )

    lost_to: Where

    def __init__(self, routed: "Routed", shard: int) -> None:
        connection = routed.connection
        self.routed = routed
        self.connection = connection
        self.shard = shard
        self.name = connection.name
        self.protocol = connection.protocol
        self.lost_to = connection.lost_to
        self.demands: dict[Door, words.Consume] = {}  # as the client has stated them last
        self.held = False  # there is no room for what it sends here
        self.finished = False  # its home has nothing of it any more
        self.unsynced = False  # it has published here since it was last asked whether all is durable
        self.asked = self.answered = 0  # how often it was asked that, and how often it was
        self.again = False  # it is to be asked once more
        # What goes to the connection as it is.
        self.bytes_room = connection.bytes_room
        self.count_room = connection.count_room
        self.delivered = connection.delivered
        self.replies = connection.replies
        self.undelivered = connection.undelivered
        self.refused = connection.refused
        self.log = connection.log

    # --- the port --------------------------------------------------------------------------------

    def deliver(self, queue: str, slices: list[Slice], now_us: int, dead: bool) -> None:
        demand = self.demands.get((queue, dead))
        if demand is not None and demand.once:
            del self.demands[queue, dead]
        self.connection.deliver(queue, slices, now_us, dead)

    def consuming(self, queue: str, dead: bool) -> None:
        self.connection.consuming(queue, dead)

    def decline(self, queue: str, dead: bool) -> None:
        self.demands.pop((queue, dead), None)
        self.connection.decline(queue, dead)

    def broadcast(self, queue: str, batch: Batch) -> None:
        self.connection.broadcast(queue, batch)

    def synced(self) -> None:
        self.answered = self.asked
        self.routed.synced(self)

    def hold(self, held: bool) -> None:
        self.held = held
        self.routed.check_hold()

    def finish(self) -> None:
        self.finished = True
        self.routed.finish_if_done()

    # --- for people ------------------------------------------------------------------------------

    @property
    def peer(self) -> str:
        return self.connection.peer

    @property
    def connected(self) -> float:
        return self.connection.connected

    @property
    def sent(self) -> dict[str, int]:
        return self.connection.sent

    @property
    def user(self) -> str:
        return self.connection.user

    @property
    def is_held(self) -> bool:
        return self.connection.is_held

    @property
    def is_gone(self) -> bool:
        return self.connection.is_gone

    @property
    def has_left(self) -> bool:
        return self.connection.has_left

    def about(self, now_us: int) -> dict[str, object]:
        return self.connection.about(now_us)

    def end(self) -> None:
        self.connection.end()

    def drop(self) -> None:
        self.connection.drop()

    def hold_for_server(self, held: bool) -> None:
        self.connection.hold_for_server(held)

    def move(self, home: Home) -> None:
        """Its words go to whatever is the home of its shard."""


class Routed:
    """A connection, with its ports."""

    __slots__ = (
        "blocked",
        "closing",
        "connection",
        "held",
        "idle",
        "ports",
        "router",
        "waiting",
        "weight",
    )

    def __init__(self, router: "Router", connection: Client) -> None:
        self.router = router
        self.connection = connection
        self.ports: dict[int, ShardPort] = {}
        # Behind what other shards have not stored yet; in the order in which it was said.
        self.waiting: deque[tuple[dict[ShardPort, int], Command]] = deque()
        self.weight = 0  # bytes in what waits
        self.held = False
        self.blocked = False
        self.idle = False
        self.closing = False

    def port(self, shard: int) -> ShardPort:
        """Its port in a shard, from now on."""
        port = self.ports.get(shard)
        if port is None:
            port = self.ports[shard] = ShardPort(self, shard)
            home = self.router.homes[shard]
            home.attach(port)
            if self.blocked:
                home.blocked(port, True)
            if self.idle:
                home.idle(port, True)
            if self.closing:
                home.handle(port, [words.Closing()], self.router.now_us())
        return port

    def check_hold(self) -> None:
        held = self.weight > WAITING_BYTES or any(port.held for port in self.ports.values())
        if held != self.held:
            self.held = held
            self.connection.hold(held)

    def finish_if_done(self) -> None:
        if not self.waiting and all(port.finished for port in self.ports.values()):
            self.connection.finish()

    def synced(self, port: ShardPort) -> None:
        if port.again:
            port.again = False
            self.router.ask(port)
        if self.waiting:
            self.router.go_on(self)

    def ask_less(self, in_chunk: Command | None) -> None:
        """It asks whether all is durable: that has one answer with what it has asked before in this chunk,
        and while a question is open, with all behind that. The first is not put off, or who asks again and
        again would never hear."""
        questions = [command for _, command in self.waiting if isinstance(command, words.Sync)]
        if questions and (len(questions) > 1 or questions[-1] is in_chunk):
            self.waiting = deque(it for it in self.waiting if it[1] is not questions[-1])

    def behind(self, shard: int) -> dict[ShardPort, int]:
        """Which ports must have answered how often before something is settled in a shard: those of others
        in which something was published. They are asked, or will be."""
        needs: dict[ShardPort, int] = {}
        for port in self.ports.values():
            if port.shard == shard:
                continue
            if port.unsynced or port.again:
                needs[port] = self.router.ask_soon(port)
            elif port.asked > port.answered:
                needs[port] = port.asked
        return needs


class Router:
    def __init__(
        self,
        homes: Sequence[Home],
        now_us: Callable[[], int],
        wants_turn: Callable[[], None],
        on_failed: Callable[[LogFailed], None],
    ) -> None:
        self.homes = list(homes)
        self.now_us = now_us  # of what is received now
        self._wants_turn = wants_turn
        self._on_failed = on_failed
        self._failing = _Failing(on_failed)
        self._routed: dict[Port, Routed] = {}
        # Have left, with words that wait: whether they count as lost, and until when they are waited for.
        self._leaving: dict[Routed, tuple[bool, int]] = {}
        self._wanted: set[int] = set()  # shards that have work in this turn

    # --- homes -----------------------------------------------------------------------------------

    def want(self, shard: int) -> None:
        """That one has work in this turn."""
        self._wanted.add(shard)
        self._wants_turn()

    def ports_of(self, shard: int) -> list[ShardPort]:
        """The ports that a shard has of all connections, those included that leave."""
        routed = [*self._routed.values(), *self._leaving]
        return [it.ports[shard] for it in routed if shard in it.ports]

    # --- ports -----------------------------------------------------------------------------------

    def attach(self, port: Port) -> None:
        # Any: connections are all that a server attaches.
        connection: Any = port
        self._routed[port] = Routed(self, connection)

    def detach(self, port: Port, now_us: int, *, lost: bool = True) -> None:
        routed = self._routed.pop(port, None)
        if routed is None:
            return
        if routed.weight and sum(it.weight for it in self._leaving) + routed.weight <= LEAVING_BYTES:
            # It has settled these: they wait for what it had published before, and not for its peer.
            self._leaving[routed] = lost, now_us + LEAVING_SECONDS * SECOND_US
            for it in routed.ports.values():
                cancelled = [words.Cancel(*door) for door in it.demands]
                it.demands.clear()
                if cancelled:
                    self._say(it, cancelled, now_us)
        else:
            self._detach(routed, now_us, lost)

    def lose(self, port: ShardPort) -> None:
        """What it has said is not known to be durable, and may never be: nothing is settled behind it."""
        self._forget(port.routed, self.now_us())

    def _forget(self, routed: Routed, now_us: int) -> None:
        """What waits of a connection is not said any more."""
        if routed.weight:
            routed.connection.log(
                "what it has settled comes again: what it had sent before is not known to be stored", 1
            )
        routed.waiting.clear()
        routed.weight = 0
        if routed in self._leaving:
            self._detach(routed, now_us, self._leaving.pop(routed)[0])

    def _detach(self, routed: Routed, now_us: int, lost: bool) -> None:
        for port in routed.ports.values():
            with self._failing:
                self.homes[port.shard].detach(port, now_us, lost=lost)

    def named(self, port: Port) -> None:
        for it in self._ports_of(port):
            self.homes[it.shard].named(it)

    def left(self, port: Port, now_us: int, *, lost: bool = True) -> None:
        for it in self._ports_of(port):
            with self._failing:
                self.homes[it.shard].left(it, now_us, lost=lost)

    def demands(self, port: Port) -> list[Door]:
        return [door for it in self._ports_of(port) for door in self.homes[it.shard].demands(it)]

    def blocked(self, port: Port, blocked: bool) -> None:
        routed = self._routed.get(port)
        if routed is not None:
            routed.blocked = blocked
            for it in routed.ports.values():
                self.homes[it.shard].blocked(it, blocked)

    def idle(self, port: Port, idle: bool) -> None:
        self._routed[port].idle = idle
        for it in self._ports_of(port):
            self.homes[it.shard].idle(it, idle)

    def _ports_of(self, port: Port) -> list[ShardPort]:
        routed = self._routed.get(port)
        return list(routed.ports.values()) if routed is not None else []

    # --- words -----------------------------------------------------------------------------------

    def handle(self, port: Port, commands: Iterable[Command], now_us: int) -> None:
        """What a port has said in one chunk."""
        routed = self._routed[port]
        said: dict[ShardPort, list[Command]] = {}
        asked: Command | None = None  # in this chunk
        for command in commands:
            if isinstance(command, words.Sync):
                routed.ask_less(asked)
                asked = command
                self._wait(routed, {it: self.ask_soon(it) for it in routed.ports.values()}, command)
            elif isinstance(command, words.Closing):
                self._wait(routed, {}, command)
            elif isinstance(command, words.Ignored):
                text = f"{command.reason}: {command.detail}" if command.detail else command.reason
                routed.connection.log(text, command.count)
            else:
                it = routed.port(shard_of(command.queue, len(self.homes)))
                if isinstance(command, words.Publish):
                    it.unsynced, it.finished = True, False
                elif isinstance(command, words.Settle | words.Reply):
                    it.finished = False
                    needs = routed.behind(it.shard) if len(routed.ports) > 1 else None
                    if needs or routed.waiting:
                        self._wait(routed, needs or {}, command)
                        continue
                elif isinstance(command, words.Consume):
                    it.demands[command.queue, command.dead] = command
                elif isinstance(command, words.Cancel):
                    it.demands.pop((command.queue, command.dead), None)
                said.setdefault(it, []).append(command)
        for it, its in said.items():
            self._say(it, its, now_us)
        if routed.waiting:
            for it in routed.ports.values():
                if it.again and it.asked == it.answered:
                    it.again = False
                    self.ask(it)
            self.go_on(routed)

    def _say(self, port: ShardPort, commands: Sequence[Command], now_us: int) -> None:
        home = self.homes[port.shard]
        if isinstance(home, Broker) and (error := home.failed) is not None:
            self._on_failed(error)
            if self.homes[port.shard] is home:
                return  # This front-end ends.
            home = self.homes[port.shard]
        try:
            home.handle(port, commands, now_us)
        except LogFailed as error:
            port.log("is disconnected: the log has failed while it took what the client had said", 1)
            port.drop()
            self._on_failed(error)

    def _wait(self, routed: Routed, needs: dict[ShardPort, int], command: Command) -> None:
        routed.waiting.append((needs, command))
        routed.weight += _weight(command)
        routed.check_hold()

    def ask_soon(self, port: ShardPort) -> int:
        """Ask a port whether all that was said there is durable, behind what is being said: by which answer
        it will be known. One question at a time is open, so that an answer is that of the last one."""
        port.unsynced = False
        port.again = True
        return port.asked + 1

    def ask(self, port: ShardPort) -> None:
        port.asked += 1
        self._say(port, [words.Sync()], self.now_us())

    def go_on(self, routed: Routed) -> None:
        """Say what waited and need not wait any more."""
        now_us = self.now_us()
        waiting = routed.waiting
        while waiting:
            needs, command = waiting[0]
            if any(port.answered < count for port, count in needs.items()):
                break
            waiting.popleft()
            routed.weight -= _weight(command)
            if isinstance(command, words.Settle | words.Reply):
                it = routed.port(shard_of(command.queue, len(self.homes)))
                self._say(it, [command], now_us)
            elif isinstance(command, words.Sync):
                routed.connection.synced()
            else:
                self._close(routed, now_us)
        routed.check_hold()
        if not waiting and routed in self._leaving:
            self._detach(routed, now_us, self._leaving.pop(routed)[0])
        elif routed.closing:
            routed.finish_if_done()

    def _close(self, routed: Routed, now_us: int) -> None:
        routed.closing = True
        for it in list(routed.ports.values()):
            it.demands.clear()
            self._say(it, [words.Closing()], now_us)

    # --- leaving ---------------------------------------------------------------------------------

    # A front-end that leads and stops has work for others until the end: only its own clients are sent away.
    # Those of other front-ends stay connected there, and are attached anew at the next leader.

    def drain(self) -> None:
        for home in self.homes:
            if not isinstance(home, Broker):
                home.drain()

    def dismiss(self) -> None:
        for shard, home in enumerate(self.homes):
            if isinstance(home, Broker):
                home.send_away(self.ports_of(shard))
            else:
                home.dismiss()
        for routed in list(self._routed.values()):
            routed.closing = True
            routed.finish_if_done()

    @property
    def is_drained(self) -> bool:
        return not self._leaving and all(
            home.has_nothing_of(self.ports_of(shard)) if isinstance(home, Broker) else home.is_drained
            for shard, home in enumerate(self.homes)
        )

    def end_requests(self, now_us: int) -> None:
        for home in self.homes:
            with self._failing:
                home.end_requests(now_us)

    def set_policies(self, policies: Policies) -> None:
        for home in self.homes:
            home.set_policies(policies)

    # --- turns -----------------------------------------------------------------------------------

    def turn(self, now_us: int) -> None:
        wanted, self._wanted = self._wanted, set()
        for shard in wanted:
            with self._failing:
                self.homes[shard].turn(now_us)

    def tick(self, now_us: int, step_us: int = 0) -> None:
        for routed, (lost, until_us) in list(self._leaving.items()):
            self._leaving[routed] = lost, until_us + step_us
            if until_us + step_us <= now_us:
                self._forget(routed, now_us)
        for home in self.homes:
            with self._failing:
                home.tick(now_us, step_us)


class _Failing:
    """What fails in one shard is told, and the others go on."""

    __slots__ = ("_on_failed",)

    def __init__(self, on_failed: Callable[[LogFailed], None]) -> None:
        self._on_failed = on_failed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, LogFailed):
            self._on_failed(error)
            return True
        return False


def _weight(command: Command) -> int:
    """Of what nobody would miss, nothing."""
    if isinstance(command, words.Settle):
        return RUN_BYTES * len(command.ranges)
    if isinstance(command, words.Reply):
        return RUN_BYTES * len(command.offsets) + len(command.answers.payload)
    return 0
