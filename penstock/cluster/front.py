"""Front: what the server of a cluster's front-end has behind it, and which part it plays.

A front-end has listeners, connections and sessions as every server has; this is its `Backend`. Where their
words go depends on who leads (`log/jetstream/lease.py`):

    following   to the leader, over the relay (`remote_broker.py`); HTTP too, byte by byte (`pipe.py`).
                Meanwhile the local copy of the log is kept up with the stream, and the process of the HTTP
                API stands by: taking over is quick.
    leading     to a broker in this process, on the log (`log/jetstream/stream_log.py`); other front-ends come
                to the relay (`host.py`). The HTTP API has its process, as on one machine.
    unsure      as leading, and nothing is handed out: somebody else may be about to lead.

From following to leading nobody loses a connection: what clients hold and wait for moves to the new broker,
here or elsewhere. From leading to following there is no such way: what the others have done meanwhile is
not known here, so that all clients are disconnected, and come again. What those had sent who have left
already, and no log has had yet, goes to the next leader.

Rules that always hold:
  * One change at a time. What a change was for may be over when it ends: it is looked at again then.
  * A log that has failed is let go of, and its local copy falls back to what the stream has, too. Whether
    this front-end leads again is for the lease to say.

How it fails: a cluster that cannot be used is told at the start, before anything listens (`checks.py`).
Later, a cluster that does not answer is waited for. A local disk that fails ends the front-end.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from penstock import __version__
from penstock.cluster.checks import Finding, Level, check, look, refuse, wait_for_nodes
from penstock.cluster.clocks import APART_US, CLOCK, LEADS, TIME, Clocks
from penstock.cluster.host import RelayHost
from penstock.cluster.info import cluster_info
from penstock.cluster.nodes import front_end_id, relay_files, servers_of, wire_options
from penstock.cluster.pipe import HttpPipe
from penstock.cluster.remote_broker import RemoteBroker
from penstock.cluster.trust import ANOTHER_KEY, Leader, Trust, cluster_key
from penstock.common.address import TcpAddress, parse_address
from penstock.common.given import SettingsError
from penstock.common.journal import log
from penstock.log.columns import BATCH_BYTES_MAX
from penstock.log.disk import RealDisk
from penstock.log.errors import LogError, LogFailed, LogNewer
from penstock.log.jetstream.api import JetStream
from penstock.log.jetstream.errors import JetStreamTrouble
from penstock.log.jetstream.lease import ASK_SECONDS, WARM, Claim, Election, Role, View
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.replica import LOG, Replica
from penstock.log.jetstream.room import Room, Said, bounds_of
from penstock.log.jetstream.stream_log import StreamLog, make_streams, open_stream_log
from penstock.log.log import Log
from penstock.log.state import Damage
from penstock.server.backend import Backend
from penstock.server.server import LAST_WORDS_SECONDS, Server
from penstock.server.setting_kinds import OFF
from penstock.server.settings import Settings

KEEP_UP_SECONDS: Final = 0.5
WARM_SECONDS: Final = 5.0
"""Whose copy has been up to date within this time has the log: what is missing is read in a moment."""

LOOK_SECONDS: Final = 5.0
"""How often files that are gone from the stream are looked for, how its nodes are, and what they can take."""

SILENT_SECONDS: Final = 60.0
"""How long the nodes' monitoring is left alone where none of it answers."""

JOIN_SECONDS: Final = 30.0
"""How long the start waits for somebody to lead."""

DOUBT_SECONDS: Final = 0.1

CLAIMS_SECONDS: Final = 3.0
"""How long a new leader waits for front-ends to say what their clients hold."""

CLOSE_SECONDS: Final = 1.0
"""How long a stop waits for the cluster to store the last of the log."""


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
    _remote: RemoteBroker
    _nats: LinkThread
    _quick: JetStream  # which asks once, for what is asked again anyway
    _replica: Replica
    _election: Election
    _trust: Trust

    def __init__(self, server: Server, folder: str) -> None:
        self._server = server
        self._second = server.second
        self._loop = asyncio.get_running_loop()
        self.folder = folder
        self._cluster = server.settings.cluster
        self._names = LogNames(self._cluster.name)
        # A number that was used in an earlier life must not count as used in this one.
        self._member = f"{front_end_id(self._cluster)}-{secrets.token_hex(2)}"
        self._findings: list[Finding] = []
        self._own: RealDisk | None = None  # the folder, locked: nobody else works on the copy of the log
        self._stream: dict[str, Any] | None = None  # what JetStream says of the log's stream
        self._room = Room()
        self._clocks = Clocks(self._member, lambda: server.clock.stepped_us)
        self._ask_nodes_at = float("-inf")  # their monitoring
        self._removed: list[str] = []  # what others have taken out of the stream, in words
        self._relay: socket.socket | None = None
        self._relay_address: TcpAddress
        self._view = View()
        self._doubt: asyncio.TimerHandle | None = None  # looks again whether we still lead
        self._leader_before = ""
        self._kept_up = float("-inf")  # when the copy of the log was last up to date
        self._linked = False  # to the leader
        self._told = ""  # why not, last
        self._host: RelayHost | None = None
        self._pipe: HttpPipe | None = None
        self._stirred = asyncio.Event()
        self._joined = asyncio.Event()
        self._steering: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._led: StreamLog | None = None  # where we lead
        self._letting_go: asyncio.Task[None] | None = None  # of one that we led
        self._is_copy_used = False  # by a log: the copy is more than what came from the stream
        self._term = 0  # in which we lead
        self._lost: LogFailed | None = None  # why the log that we led is of no use any more
        self._go_remote()

    def _go_remote(self) -> None:
        """Words go to whoever leads."""
        self._remote = RemoteBroker(
            self._member,
            self._server.want_turn,
            connection_buffer_bytes=self._server.connection_buffer_bytes,
            on_link=self._link_changed,
        )
        self._server.move_to(self._remote, None)

    # --- life ------------------------------------------------------------------------------------

    async def join(self) -> None:
        try:
            await self._join()
        except BaseException:
            await self.close()
            raise

    async def _join(self) -> None:
        """Connect, make sure of the cluster, and take part in it."""
        settings = self._server.settings
        options = wire_options(self._cluster)
        try:
            self._nats = await asyncio.to_thread(LinkThread.open, servers_of(settings), options)
        except JetStreamTrouble as error:
            raise SettingsError(f"engine: {error}") from None
        await wait_for_nodes(self._nats.link.info, settings)
        self._findings = await self._asked(check(self._nats.api, self._nats.link.info, settings))
        for finding in self._findings:
            if finding.level is Level.WARN:
                log.warning("%s", finding)
        refuse(self._findings)
        await self._asked(make_streams(self._nats, self._names, self._cluster.replicas))
        key = await self._asked(cluster_key(self._nats.api, self._names))
        self._trust = Trust(key, relay_files(self._cluster))
        self._own = RealDisk(self.folder)
        self._own.lock()
        self._quick = JetStream(self._nats.link, patience_seconds=0.0)
        self._replica = Replica(self._nats.api, self._names, self.folder)
        await self._asked(self._replica.begin())
        await self._look_at_room()  # Who leads goes by it from the first message on.
        if self._second is not None:
            await self._second.listen()
        listen = self._cluster.listen
        self._relay = socket.create_server((listen.host, listen.port), backlog=256)
        host, port, *_ = self._relay.getsockname()
        self._relay_address = self._cluster.advertise or TcpAddress(host, port)
        self._election = Election(
            JetStream(self._nats.link, answer_seconds=ASK_SECONDS, patience_seconds=0.0),
            self._names,
            self._member,
            offer=self._offer,
            facts=self._said_of_us,
            changed=self._seen,
            is_warm=self._is_warm,
            heard=self._clocks.heard,
        )
        await self._asked(self._election.start())
        self._looking = self._loop.create_task(self._look_at_nodes(), name="looking at nodes")
        self._steering = self._loop.create_task(self._steer(), name="steering")
        self._steering.add_done_callback(self._steered)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._joined.wait(), JOIN_SECONDS)
        if not self._joined.is_set():
            log.warning("nobody leads the cluster so far; clients are accepted, and wait")

    async def _asked(self, work: Any) -> Any:
        """What a coroutine comes to on the link's loop. Any: whatever it returns."""
        return await asyncio.wrap_future(self._nats.start(work))

    def _offer(self, term: int) -> Claim:
        return Claim(self._member, term, str(self._relay_address), __version__)

    def _said_of_us(self) -> dict[str, Any]:
        leads = self._led is not None
        return {
            "id": self._member,
            "version": __version__,
            LEADS: leads,
            WARM: leads or self._is_warm(),
            CLOCK: time.time_ns() // 1000,
            TIME: self._server.now_us(),
        }

    def _is_warm(self) -> bool:
        return time.monotonic() - self._kept_up < WARM_SECONDS

    async def open_http(self) -> None:
        """The door is open already, and who answers there is a matter of roles."""

    async def close(self) -> None:
        """Let go of everything, in an order that lets somebody else go on at once."""
        if self._steering is not None:
            self._steering.cancel()
            await asyncio.gather(self._steering, return_exceptions=True)
            self._steering = None
        if self._letting_go is not None:
            await asyncio.gather(self._letting_go, return_exceptions=True)
        if self._looking is not None:
            self._looking.cancel()
        await self._stop_keeping_up()
        if self._pipe is not None:
            self._pipe.close()
        if self._host is not None:
            self._host.close()
        if self._led is None and not self._remote.is_drained:
            log.warning("what clients have sent or settled last is not known to be stored by a leader")
        led, self._led = self._led, None
        # Not the broker: a turn may still be to come, and the log is closed by a thread.
        self._server.move_to(self._remote, None)
        if led is not None:
            await asyncio.to_thread(led.close_within, CLOSE_SECONDS, self._server.now_us())
        elif hasattr(self, "_replica") and not self._is_copy_used:
            self._replica.leave(self._replica.applied)
        if self._own is not None:
            self._own.unlock()
        if hasattr(self, "_election"):
            await self._asked(self._election.stop())
        if self._relay is not None:
            self._relay.close()
        if self._second is not None:
            await self._second.stop(LAST_WORDS_SECONDS)
        if hasattr(self, "_nats"):
            await asyncio.to_thread(self._nats.close)

    # A front-end that leads and stops has work for others until the end: only its own clients are sent away.
    # Those of other front-ends stay connected there, and are attached anew at the next leader.

    def drain(self) -> None:
        if self._led is None:
            self._remote.drain()

    def dismiss(self) -> None:
        if self._led is None:
            self._remote.dismiss()
        else:
            self._server.broker.send_away(self._server.connections)

    @property
    def is_drained(self) -> bool:
        if self._led is None:
            return self._remote.is_drained
        return self._server.broker.has_nothing_of(self._server.connections)

    def facts(self) -> dict[str, object]:
        return {"data": self.folder, "cluster": self._names.log, "member": self._member}

    # --- who leads -------------------------------------------------------------------------------

    def _seen(self, view: View) -> None:
        """On the link's loop: the lease has changed."""
        seen = View(view.role, view.claim, dict(view.members))
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody cares any more
            self._loop.call_soon_threadsafe(self._look, seen)

    def _look(self, view: View) -> None:
        if view.claim.leader not in (self._member, ""):
            self._leader_before = view.claim.leader
        self._view = view
        self._stirred.set()

    def _steered(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._server.give_up(error)

    async def _steer(self) -> None:
        """One change after the other, until the view and what we do agree."""
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            if self._lost is not None:
                await self._step_down()
            role, claim = self._view.role, self._view.claim
            if role is Role.FOLLOWING:
                if self._led is not None:
                    await self._step_down()
                self._follow(claim)
            elif self._led is None:
                await self._lead(claim)
            elif claim.term != self._term:
                # It was lost and taken again before we looked: what somebody else did meanwhile is not known.
                await self._step_down()
                self._stirred.set()
            else:
                self._make_sure()

    def before_turn(self) -> None:
        # A process that was stopped for a while finds out here, before it hands out what may be with others.
        if self._led is not None and not self._server.broker.is_suspended and not self._election.is_sure:
            self._make_sure()

    def _make_sure(self) -> None:
        """Hand out messages only as long as nobody else can."""
        if self._led is None:
            return
        sure = self._view.role is Role.LEADING and self._election.is_sure
        self._server.broker.suspend(not sure)
        if not sure and self._doubt is None:
            self._doubt = self._loop.call_later(DOUBT_SECONDS, self._still_in_doubt)

    def _still_in_doubt(self) -> None:
        self._doubt = None
        self._make_sure()

    def _follow(self, claim: Claim) -> None:
        if self._keeping is None:
            self._keeping = self._loop.create_task(self._keep_up(), name="keeping up")
            self._keeping.add_done_callback(self._steered)
        if self._pipe is None and self._second is not None:
            self._pipe = HttpPipe(self._second.second_door(), self._member, self._leader_link)
        if self._second is not None:
            self._second.prepare()
        leader = self._leader_link()
        if leader is not None and claim.leader != self._member:
            self._remote.connect(leader)
            if self._pipe is not None:
                self._pipe.leader_changed()
        else:
            self._remote.lost("nobody leads the cluster")

    async def _lead(self, claim: Claim) -> None:
        began = time.monotonic()
        server = self._server
        await self._stop_keeping_up()
        members = self._election.view.members
        with contextlib.suppress(JetStreamTrouble):
            members = await self._asked(self._election.see_members())
        self._is_copy_used = True
        try:
            led = await asyncio.to_thread(
                open_stream_log,
                self._nats,
                self._names,
                self._replica,
                server.now_us(),
                settings=server.settings.log,
                policies=server.settings.policies,
                wake=server.wake,
                room=self._room,
            )
        except LogNewer:
            raise  # Others may be able to lead: this one ends.
        except (LogError, JetStreamTrouble) as error:
            self._is_copy_used = False
            log.warning("the log could not be opened, and is tried again: %s", error)
            await asyncio.sleep(KEEP_UP_SECONDS)
            self._stirred.set()
            return
        if self._view.claim != claim:
            # While it was opened, the lease was lost: to somebody else, or in between, and it is ours again.
            log.info("the lease of term %d was lost while the log was opened", claim.term)
            await asyncio.to_thread(led.close_within, CLOSE_SECONDS, server.now_us())
            try:
                await self._asked(self._replica.begin())  # from what was left
            except JetStreamTrouble:
                self._replica.wipe()
            self._is_copy_used = False
            self._stirred.set()
            return
        opened = led.log
        opened.cluster = self._cluster_info
        broker = server.make_broker(opened)
        others = set(members) - {self._member}
        if members.get(self._leader_before, {}).get(LEADS, True):
            # It has nothing to claim: its clients are gone with it, or will be told to come again. Those of
            # one that had the lease, and has not come to lead, are there.
            others.discard(self._leader_before)
        assert self._relay is not None
        self._host = RelayHost(
            broker,
            opened,
            name=self._member,
            trust=self._trust,
            term=claim.term,
            now_us=server.arrival_us,
            on_failed=self.fail,
            connection_buffer_bytes=server.connection_buffer_bytes,
            http=self._second.enter if self._second is not None else None,
            expected=others,
            claims_seconds=CLAIMS_SECONDS,
            rounds=server.rounds,
        )
        self._led, self._term = led, claim.term
        self._keep_what_is_left(led.log)
        self._leader_before = ""  # should we lead again, everybody has something to claim
        self._remote.lost("this front-end leads")
        self._remote.move_to(broker, opened, server.now_us())
        server.move_to(broker, opened)
        await self._host.listen(self._relay.dup())
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if self._second is not None:
            self._second.start()
        log.info("leading after %.1f s: %d queues", time.monotonic() - began, len(opened.queues()))
        self._joined.set()

    def _keep_what_is_left(self, opened: Log) -> None:
        """What runs out does so by the time that passes, and not by what clocks are apart."""
        now_us = self._server.now_us()
        # No more than it has gone forward at all: a leader of a moment may have made the same step.
        step_us = min(self._clocks.step_us(), now_us - opened.found_us)
        if step_us < APART_US:
            return
        log.warning(
            "the clock here is %.1f s ahead of that of %s, which led before: what runs out has as much time "
            "left as it had there; set the clocks right (NTP)",
            step_us / 1_000_000,
            self._clocks.leader,
        )
        try:
            opened.step(step_us, now_us)
        except LogFailed as error:
            self.fail(error)

    async def _step_down(self) -> None:
        """Somebody else leads, or nobody knows what has become of our log: begin anew."""
        led, self._led, self._lost = self._led, None, None
        self._kept_up = float("-inf")
        self._removed.clear()
        log.warning("this front-end leads no more: its clients are disconnected, and can come again")
        if self._host is not None:
            self._host.close()
            self._host = None
        self._remote.lost("this front-end begins anew")  # two of one name would push each other out
        broker = self._server.broker
        self._go_remote()
        self._remote.take_from(broker, self._server.now_us())
        for connection in list(self._server.connections):
            if not connection.has_left:
                connection.move(self._remote)
                connection.drop()
        self._letting_go = self._loop.create_task(self._let_go(led))
        await asyncio.shield(self._letting_go)  # A stop waits for it.

    async def _let_go(self, led: StreamLog | None) -> None:
        if self._second is not None:
            await self._second.rest(LAST_WORDS_SECONDS)
        if led is not None:
            await asyncio.to_thread(led.abandon)
            self._is_copy_used = False

    def fail(self, error: LogFailed) -> None:
        """The log says that it is of no use any more: somebody else writes it, most likely."""
        # A log that we have let go of may be told of again, by whoever still looks at it.
        if self._lost is None and self._led is not None and self._led.log.failed is error:
            self._lost = error
            log.error("%s", error)
            self._stirred.set()

    # --- following -------------------------------------------------------------------------------

    def _link_changed(self, up: bool, why: str) -> None:
        """The relay's link to the leader has come up, or is down."""
        if up:
            self._joined.set()
        elif self._view.role is Role.FOLLOWING:
            # What passes by itself is no news before there was a link; that it is not let in is, once.
            theirs = self._view.claim.version or __version__
            is_news = (ANOTHER_KEY in why or theirs != __version__) and why != self._told
            if self._linked or is_news:
                self._told = why
                versions = "" if theirs == __version__ else f" (of version {theirs}, this is {__version__})"
                log.warning("no link to the leader%s: %s", versions, why)
            self._nats.soon(self._election.suspect)
        self._linked = up

    def _leader_link(self) -> Leader | None:
        """Where the leader's relay is, and who that is; None where none can be reached."""
        claim = self._view.claim
        try:
            address = parse_address(claim.relay)
        except ValueError:
            return None
        if not isinstance(address, TcpAddress):
            return None
        return Leader(address, claim.leader, claim.term, self._trust)

    async def _keep_up(self) -> None:
        """The local copy follows the stream. No client needs it: a disk that fails is waited for."""
        looked = 0.0
        fails = False
        while True:
            try:
                await self._asked(self._replica.catch_up())
                self._kept_up = time.monotonic()
                if time.monotonic() - looked > LOOK_SECONDS:
                    looked = time.monotonic()
                    await self._asked(self._replica.drop_removed())
                fails = False
            except JetStreamTrouble as error:
                log.debug("the copy of the log waits: %s", error)
            except OSError as error:
                if not fails:
                    log.error("the copy of the log cannot be kept up, and is tried again: %s", error)
                fails = True
            await asyncio.sleep(LOOK_SECONDS if fails else KEEP_UP_SECONDS)

    async def _stop_keeping_up(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None

    async def _look_at_nodes(self) -> None:
        """Nothing but the end of this front-end ends it: room that has come back would not be seen."""
        told = ""
        while True:
            try:
                await self._look_at_room()
                led = self._led
                if led is not None:
                    await self._look_for_removed(led)
                await asyncio.to_thread(self._replica.keep)
                told = ""
            except Exception as error:  # noqa: BLE001 - it is told
                if told != str(error):
                    told = str(error)
                    log.exception("a fault in looking at the nodes and the copy of the log, which goes on")
            await asyncio.sleep(LOOK_SECONDS)

    async def _look_at_room(self) -> None:
        """How the stream is, and what can still be stored in it."""
        sent_bytes = self._room.sent_bytes
        try:
            self._stream = stream = await self._asked(self._quick.stream(self._names.stream))
            account = await self._asked(self._quick.account())
        except JetStreamTrouble as error:
            log.debug("nobody tells how the nodes are: %s", error)
            return
        nodes: list[Said] = []
        if self._loop.time() >= self._ask_nodes_at:
            nodes = (await look(self._nats.link.info, self._server.settings)).nodes
            if not nodes:
                self._ask_nodes_at = self._loop.time() + SILENT_SECONDS
        heard = self._room.heard(nodes, sent_bytes, self._loop.time())
        self._room.see(bounds_of(account, stream, heard), sent_bytes)

    async def _look_for_removed(self, led: StreamLog) -> None:
        try:
            found = await self._asked(led.appender.look_for_removed())
        except JetStreamTrouble as error:
            log.debug("the records of the log were not counted: %s", error)
            return
        for text in found if led is self._led else ():
            self._removed.append(text)
            led.log.report_damage(Damage(f"stream {self._names.stream}", 0, "", 0, 0, text))
            self._server.want_turn()

    # --- for people ------------------------------------------------------------------------------

    def _cluster_info(self) -> dict[str, Any]:
        return cluster_info(
            name=self._names.log,
            own=self._member,
            leader=self._view.claim.leader,
            # The lease tells of changes of its own only, and of this front-end what it has last said.
            members={**self._election.view.members, self._member: self._said_of_us()},
            linked=self._host.front_ends if self._host is not None else (),
            stream=self._stream,
            findings=[*self._findings, *self._now_found()],
        )

    def _now_found(self) -> list[Finding]:
        """What the checks at the start could not see."""
        return [*self._removed_found(), *self._clocks_found()]

    def _clocks_found(self) -> list[Finding]:
        ahead = {name: self._clocks.ahead_us(name) for name in self._election.view.members}
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
                f"by the clock of {self._member}, which leads, {', '.join(apart)}",
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
