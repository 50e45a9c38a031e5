"""Front: what the server of a cluster's front-end has behind it.

A front-end has listeners, connections and sessions as every server has; this is its `Backend`. Their words go
through the router (`routing.py`) to the shards of the cluster (`shard.py`), of which some are led here and
others elsewhere; who leads which is for the election (`election.py`). Other front-ends come to the relay
(`door.py`).

    HTTP   where the cluster has one shard, a follower passes it on to the leader, byte by byte (`pipe.py`),
           and its own process of the API stands by. Where there are several, that process answers all the
           time, for all of them (`http/sharding`).

How it fails: a cluster that cannot be used is told at the start, before anything listens (`checks.py`).
Later, a cluster that does not answer is waited for. A local disk that fails ends the front-end.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from penstock import __version__
from penstock.cluster.checks import Finding, Level, check, look, refuse, wait_for_nodes
from penstock.cluster.clocks import APART_US, CLOCK, LEADS, TIME, Clocks
from penstock.cluster.door import RelayDoor
from penstock.cluster.election import ASK_SECONDS, Election, shards_of
from penstock.cluster.info import cluster_info
from penstock.cluster.nodes import front_end_id, relay_files, servers_of, shards_wanted, wire_options
from penstock.cluster.pipe import HttpPipe, open_way
from penstock.cluster.records import HOME, LOGS, WARM, Claim, Role, View
from penstock.cluster.routing import Router
from penstock.cluster.shard import Shard, Standing
from penstock.cluster.shard_lines import ShardLines
from penstock.cluster.trust import Leader, Trust, cluster_key
from penstock.common.address import TcpAddress, parse_address
from penstock.common.given import SettingsError
from penstock.common.journal import log
from penstock.log.columns import BATCH_BYTES_MAX
from penstock.log.disk import RealDisk
from penstock.log.errors import LogFailed
from penstock.log.jetstream.api import JetStream
from penstock.log.jetstream.errors import JetStreamTrouble
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.replica import LOG
from penstock.log.jetstream.room import Room, Said, bounds_of
from penstock.log.jetstream.stream_log import StreamLog, make_missing
from penstock.log.state import Damage
from penstock.server.backend import Backend, Served
from penstock.server.calls.context import Answer
from penstock.server.server import LAST_WORDS_SECONDS, Server
from penstock.server.setting_kinds import OFF
from penstock.server.settings import Settings

LOOK_SECONDS: Final = 5.0
"""How often it is looked how the nodes are, and what they can take."""

INFO_SECONDS: Final = 0.5
"""How long the picture of a cluster with several shards is shown as it is."""

SILENT_SECONDS: Final = 60.0
"""How long the nodes' monitoring is left alone where none of it answers."""

JOIN_SECONDS: Final = 30.0
"""How long the start waits for somebody to lead."""


def _ours(settings: Settings) -> Settings:
    """The same for the server in a front-end: its log is a part of the folder, and no message is larger than
    the log takes, so that the relay carries each."""
    bytes_max = min(settings.limits.payload_bytes_max, BATCH_BYTES_MAX)
    limits = replace(settings.limits, payload_bytes_max=bytes_max)
    audit = settings.audit_path or OFF
    return replace(settings, data=os.path.join(settings.data, LOG), audit=audit, limits=limits)


def front_end(settings: Settings, reload: Callable[[], Settings] | None = None) -> Server:
    """A server that is one of several before a NATS cluster."""
    return Server(
        _ours(settings),
        None if reload is None else lambda: _ours(reload()),
        lambda server: Front(server, settings.data),
    )


class Front(Backend):
    nats: LinkThread
    _quick: JetStream  # which asks once, for what is asked again anyway
    election: Election
    trust: Trust
    router: Router
    door: RelayDoor

    def __init__(self, server: Server, folder: str) -> None:
        self.server = server
        self._second = server.second
        self._loop = asyncio.get_running_loop()
        self.folder = folder
        self._cluster = server.settings.cluster
        self._names = LogNames(self._cluster.name)
        self._home = front_end_id(self._cluster)
        # A number that was used in an earlier life must not count as used in this one.
        self.member = f"{self._home}-{secrets.token_hex(2)}"
        self._findings: list[Finding] = []
        self._own: RealDisk | None = None  # the folder, locked: nobody else works on the copy of the log
        self._streams: dict[int, dict[str, Any]] = {}  # by shard: what JetStream says of its stream
        self.room = Room()
        self.clocks = Clocks(self.member, lambda: server.clock.stepped_us)
        self._ask_nodes_at = float("-inf")  # their monitoring
        self._removed: list[str] = []  # what others have taken out of the streams, in words
        self._relay_address: TcpAddress
        self._pipe: HttpPipe | None = None
        self._looking: asyncio.Task[None] | None = None
        self._view: View | None = None
        self._info: dict[str, Any] = {}
        self._info_until = float("-inf")
        self._ways: set[asyncio.Task[None]] = set()  # to other front-ends' HTTP, that are being opened
        self._way_numbers = 0
        self.shard_count = 1
        self.lines = ShardLines()
        self.shards: list[Shard] = []
        self._make_shards([self._names])

    def _make_shards(self, names: Sequence[LogNames]) -> None:
        self.shard_count = len(names)
        self.lines.has_several = self.shard_count > 1
        self.router = Router([], self.server.arrival_us, self.server.want_turn, self.fail)
        self.shards = [Shard(self, number, it, it.folder(self.folder)) for number, it in enumerate(names)]
        self.router.homes = [shard.home for shard in self.shards]
        self.moved()

    def moved(self, still: Served | None = None) -> None:
        """A shard has another home. `still`: a log that nobody speaks to, and that is not closed yet."""
        self.router.homes = [shard.home for shard in self.shards]
        served = [it for shard in self.shards if (it := shard.served) is not None]
        if still is not None and still not in served:
            served.append(still)
        self.server.move_to(self.router, *served)
        self._tell_second()

    def _tell_second(self) -> None:
        """Who leads what, for the process of the HTTP API."""
        if self._second is None or self.shard_count == 1:
            return
        claims = self._view.claims if self._view is not None else ()
        self._second.set_shards(
            {
                "own": self.member,
                "leaders": [claim.leader for claim in claims] or [""] * self.shard_count,
                "served": {
                    str(it.shard): [os.path.abspath(self.shards[it.shard].replica.path), it.log.opening]
                    for shard in self.shards
                    if (it := shard.served) is not None
                },
            }
        )

    def open_way(self, to: str, caller: str, answer: Answer) -> None:
        task = self._loop.create_task(self._open_way(to, caller, answer))
        self._ways.add(task)
        task.add_done_callback(self._ways.discard)

    async def _open_way(self, to: str, caller: str, answer: Answer) -> None:
        assert self._second is not None
        facts = self.election.view.members.get(to, {})
        try:
            address = parse_address(str(facts.get("relay", "")))
            assert isinstance(address, TcpAddress), "front-ends listen to each other on networks"
            self._way_numbers += 1
            name = f"way {self._way_numbers}"
            with await open_way(Leader(address, to, 0, self.trust), self.member, caller) as there:
                self._second.hand_over(name, there)
        except (ValueError, OSError) as error:
            answer.refuse("draining", f"front-end {to} cannot be reached: {error}; try again in a second")
        else:
            answer({"name": name})

    # --- life ------------------------------------------------------------------------------------

    async def join(self) -> None:
        try:
            await self._join()
        except BaseException:
            await self.close()
            raise

    async def _join(self) -> None:
        """Connect, make sure of the cluster, and take part in it."""
        settings = self.server.settings
        options = wire_options(self._cluster)
        try:
            self.nats = await asyncio.to_thread(LinkThread.open, servers_of(settings), options)
        except JetStreamTrouble as error:
            raise SettingsError(f"engine: {error}") from None
        await wait_for_nodes(self.nats.link.info, settings)
        self._findings = await self.asked(check(self.nats.api, self.nats.link.info, settings))
        for finding in self._findings:
            if finding.level is Level.WARN:
                log.warning("%s", finding)
        refuse(self._findings)
        await self._find_shards()
        key = await self.asked(cluster_key(self.nats.api, self._names))
        self.trust = Trust(key, relay_files(self._cluster))
        self._own = RealDisk(self.folder)
        self._own.lock()
        self._quick = JetStream(self.nats.link, patience_seconds=0.0)
        for shard in self.shards:
            await shard.begin()
        await self._look_at_room()  # Who leads goes by it from the first message on.
        if self._second is not None:
            await self._second.listen()
        listen = self._cluster.listen
        relay = socket.create_server((listen.host, listen.port), backlog=256)
        host, port, *_ = relay.getsockname()
        self._relay_address = self._cluster.advertise or TcpAddress(host, port)
        http = self._second.enter if self._second is not None else None
        self.door = RelayDoor(name=self.member, trust=self.trust, http=http, rounds=self.server.rounds)
        await self.door.listen(relay)
        self.election = Election(
            JetStream(self.nats.link, answer_seconds=ASK_SECONDS, patience_seconds=0.0),
            self._names,
            self.member,
            self.shard_count,
            offer=self._offer,
            facts=self._said_of_us,
            changed=self._seen,
            warm=self._warm,
            heard=self.clocks.heard,
        )
        for shard in self.shards:
            shard.start()
        await self.asked(self.election.start())
        self._looking = self._loop.create_task(self._look_at_nodes(), name="looking at nodes")
        if self._second is not None and self.shard_count > 1:
            self._second.start()
        joined = [asyncio.ensure_future(shard.joined.wait()) for shard in self.shards]
        _, late = await asyncio.wait(joined, timeout=JOIN_SECONDS)
        for it in late:
            it.cancel()
        if late:
            log.warning("nobody leads the cluster so far; clients are accepted, and wait")

    async def _find_shards(self) -> None:
        """How many logs the cluster has, and their streams, made now where it is new."""
        wanted, replicas, names = self._cluster.shards, self._cluster.replicas, self._names
        await self.asked(make_missing(self.nats, names.cluster_settings(replicas)))
        count = await self.asked(shards_of(self.nats.api, names, shards_wanted(self.server.settings)))
        if wanted is not None and wanted != count:
            raise SettingsError(
                f"cluster.shards = {wanted}: this cluster was made with {count}, and keeps that number; set "
                f"{count}, or leave it out (to have another, make a new cluster: [cluster] name)"
            )
        shards = names.of_shards(count)
        await self.asked(make_missing(self.nats, [it.stream_settings(replicas) for it in shards]))
        if count > 1:
            self._make_shards(shards)

    async def asked(self, work: Any) -> Any:
        """What a coroutine comes to on the link's loop. Any: whatever it returns."""
        return await asyncio.wrap_future(self.nats.start(work))

    def _offer(self, shard: int, term: int) -> Claim:
        return Claim(self.member, term, str(self._relay_address), __version__)

    def _warm(self) -> list[int]:
        """The shards of which the log is here, up to date."""
        return [shard.number for shard in self.shards if shard.is_warm]

    def _said_of_us(self) -> dict[str, Any]:
        led = [shard.number for shard in self.shards if shard.led is not None]
        return {
            "id": self.member,
            HOME: self._home,
            "version": __version__,
            "relay": str(self._relay_address),
            LEADS: led if self.shard_count > 1 else bool(led),
            CLOCK: time.time_ns() // 1000,
            TIME: self.server.now_us(),
            LOGS: {str(shard.number): shard.extent() for shard in self.shards if shard.keeps},
        }

    @property
    def answers_for_others(self) -> bool:
        return self.shard_count > 1 and any(shard.led is not None for shard in self.shards)

    async def open_http(self) -> None:
        """The door is open already, and who answers there is a matter of roles."""

    async def close(self) -> None:
        """Let go of everything, in an order that lets somebody else go on at once."""
        for shard in self.shards:
            await shard.stop_steering()
        if self._looking is not None:
            self._looking.cancel()
        if self._pipe is not None:
            self._pipe.close()
        if hasattr(self, "door"):
            self.door.close()
        # Not to the brokers: a turn may still be to come, and the logs are closed by threads.
        for shard in self.shards:
            shard.broker = None
        self.router.homes = [shard.home for shard in self.shards]
        self.server.move_to(self.router)
        await asyncio.gather(*(shard.close() for shard in self.shards))
        self.lines.flush()
        if self._own is not None:
            self._own.unlock()
        if hasattr(self, "election"):
            await self.asked(self.election.stop())
        if self._second is not None:
            await self._second.stop(LAST_WORDS_SECONDS)
        if hasattr(self, "nats"):
            await asyncio.to_thread(self.nats.close)

    def facts(self) -> dict[str, object]:
        shards = {"shards": self.shard_count} if self.shard_count > 1 else {}
        return {"data": self.folder, "cluster": self._names.log, "member": self.member, **shards}

    # --- who leads -------------------------------------------------------------------------------

    def _seen(self, view: View) -> None:
        """On the link's loop: something has changed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody cares any more
            self._loop.call_soon_threadsafe(self._look, view)

    def _look(self, view: View) -> None:
        self._view = view
        self.room.writers = max(len({claim.leader for claim in view.claims} - {""}), 1)
        for shard in self.shards:
            number = shard.number
            shard.see(
                Standing(
                    view.claims[number],
                    view.roles[number] is not Role.FOLLOWING,
                    number in view.copies or self.shard_count == 1,
                    view.give.get(number, ""),
                )
            )
        self._tell_second()

    def ended(self, task: "asyncio.Task[None]") -> None:
        """One that goes on as long as we do."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.server.give_up(error)

    def before_turn(self) -> None:
        for shard in self.shards:
            shard.check()

    def fail(self, error: LogFailed) -> None:
        for shard in self.shards:
            shard.fail(error)

    def suspect(self, member: str) -> None:
        """It cannot be reached."""
        if member and hasattr(self, "election"):
            self.nats.soon(lambda: self.election.suspect(member))

    def hurry(self) -> None:
        """Somebody who led something has gone."""
        if hasattr(self, "election"):
            self.nats.soon(self.election.hurry)

    def leader_changed(self, shard: Shard) -> None:
        """HTTP goes to who leads, where the cluster has one shard."""
        if self._second is None or self.shard_count > 1:
            return
        if shard.led is not None:
            if self._pipe is not None:
                self._pipe.close()
                self._pipe = None
            self._second.start()
            return
        if self._pipe is None:
            self._pipe = HttpPipe(self._second.second_door(), self.member, shard.leader)
        self._second.prepare()
        if shard.leader() is not None:
            self._pipe.leader_changed()

    async def let_go(self) -> None:
        """A log that is led no more is about to be closed."""
        if self._second is not None and self.shard_count == 1:
            await self._second.rest(LAST_WORDS_SECONDS)
            self.door.end_pipes()

    async def _look_at_nodes(self) -> None:
        """Nothing but the end of this front-end ends it: room that has come back would not be seen."""
        told = ""
        while True:
            try:
                await self._look_at_room()
                for shard in self.shards:
                    if shard.led is not None:
                        await self._look_for_removed(shard, shard.led)
                    if shard.keeps:
                        await asyncio.to_thread(shard.replica.keep)
                told = ""
            except FileNotFoundError as error:  # Where its folder has gone, the server ends with a sentence.
                log.debug("the copy of the log is not there: %s", error)
            except Exception as error:  # noqa: BLE001 - it is told
                if told != str(error):
                    told = str(error)
                    log.exception("a fault in looking at the nodes and the copy of the log, which goes on")
            await asyncio.sleep(LOOK_SECONDS)

    async def _look_at_room(self) -> None:
        """How the streams are, and what can still be stored in them."""
        sent_bytes = self.room.sent_bytes
        try:
            for shard in self.shards:
                if shard.keeps or not self._streams:
                    stream = await self.asked(self._quick.stream(shard.names.stream))
                    self._streams[shard.number] = stream
            account = await self.asked(self._quick.account())
        except JetStreamTrouble as error:
            log.debug("nobody tells how the nodes are: %s", error)
            return
        nodes: list[Said] = []
        if self._loop.time() >= self._ask_nodes_at:
            nodes = (await look(self.nats.link.info, self.server.settings)).nodes
            if not nodes:
                self._ask_nodes_at = self._loop.time() + SILENT_SECONDS
        heard = self.room.heard(nodes, sent_bytes, self._loop.time())
        streams = list(self._streams.values())
        self.room.see(
            chain.from_iterable(bounds_of(account, stream, heard) for stream in streams), sent_bytes
        )

    async def _look_for_removed(self, shard: Shard, led: StreamLog) -> None:
        try:
            found = await self.asked(led.appender.look_for_removed())
        except JetStreamTrouble as error:
            log.debug("the records of the log were not counted: %s", error)
            return
        for text in found if led is shard.led else ():
            self._removed.append(text)
            led.log.report_damage(Damage(f"stream {shard.names.stream}", 0, "", 0, 0, text))
            self.router.want(shard.number)

    # --- for people ------------------------------------------------------------------------------

    def cluster_info(self) -> dict[str, Any]:
        """Each log that is led here asks for it every second: it is made once for all of them."""
        now = self._loop.time()
        if self.shard_count == 1 or now >= self._info_until:
            self._info, self._info_until = self._cluster_info(), now + INFO_SECONDS
        return self._info

    def _cluster_info(self) -> dict[str, Any]:
        view = self._view
        own = {**self._said_of_us(), WARM: self._warm()}
        return cluster_info(
            name=self._names.log,
            own=self.member,
            # The election tells of changes, and of this front-end what it has last said.
            members={**self.election.view.members, self.member: own},
            linked={it for shard in self.shards if shard.host is not None for it in shard.host.front_ends},
            claims=view.claims if view is not None else (),
            streams=self._streams,
            findings=[*self._findings, *self._now_found()],
        )

    def _now_found(self) -> list[Finding]:
        """What the checks at the start could not see."""
        return [*self._removed_found(), *self._clocks_found()]

    def _clocks_found(self) -> list[Finding]:
        ahead = {name: self.clocks.ahead_us(name) for name in self.election.view.members}
        apart = [
            f"{name} is {abs(by_us) / 1_000_000:.1f} s {'ahead' if by_us > 0 else 'behind'}"
            for name, by_us in sorted(ahead.items())
            if by_us is not None and abs(by_us) >= APART_US
        ]
        if not apart:
            return []
        return [
            Finding(
                "clocks",
                Level.WARN,
                f"by the clock of {self.member}, which leads, {', '.join(apart)}",
                "set the clocks right (NTP): times of messages are those of the front-end that leads",
            )
        ]

    def _removed_found(self) -> list[Finding]:
        if not self._removed:
            return []
        more = f" (and {len(self._removed) - 1} more)" if len(self._removed) > 1 else ""
        return [
            Finding(
                "records",
                Level.FAIL,
                self._removed[0] + more,
                "take a backup of this front-end now (penstock backup), and see who may write to NATS: "
                "docs/cluster.md#rights-in-nats",
            )
        ]
