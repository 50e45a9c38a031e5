"""Shard: one of the logs of a cluster, as this front-end has it.

    followed   words go to whoever leads it, over the relay (`remote_broker.py`). Where this front-end is to
               lead it or to stand by, its copy is kept up with the stream, so that taking over is quick
    led        words go to a broker in this process, on the log (`log/jetstream/stream_log.py`); other
               front-ends come to the relay (`host.py`)
    unsure     as led, and nothing is handed out: somebody else may be about to lead

Nobody loses a connection where leadership moves: what clients hold and wait for goes to the new broker, here
or elsewhere. Where it is lost (we were not heard, and somebody else has the lease), so does what they had
said last and the stream has not got: one record at a time is on its way there, and who writes next decides
whether it came in time. Only who has sent what cannot be told of is disconnected, and who holds what others
have got since (`Seat.late`).

Rules that always hold:
  * One change at a time. What a change was for may be over when it ends: it is looked at again then.
  * A log that has failed is let go of, and its local copy falls back to what the stream has, too. Whether
    this front-end leads again is for the lease to say.
  * Nothing is said to the next leader before it is known what of our log is stored.
  * A lease is given away when all that was said to the broker is stored, and it says nothing any more.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock import __version__
from penstock.broker.broker import Broker
from penstock.broker.home import Home
from penstock.broker.port import Port
from penstock.cluster.clocks import APART_US, LEADS, led_by
from penstock.cluster.host import RelayHost
from penstock.cluster.records import Claim
from penstock.cluster.remote_broker import RemoteBroker
from penstock.cluster.routing import ShardPort
from penstock.cluster.trust import ANOTHER_KEY, Leader
from penstock.common.address import TcpAddress, parse_address
from penstock.common.journal import log
from penstock.log.errors import LogError, LogFailed, LogNewer
from penstock.log.jetstream.errors import JetStreamTrouble
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.replica import Replica
from penstock.log.jetstream.stream_log import StreamLog, open_stream_log
from penstock.log.log import Log
from penstock.model.shards import shard_of
from penstock.server.backend import Served

if TYPE_CHECKING:
    from penstock.cluster.front import Front

KEEP_UP_SECONDS: Final = 0.5
REST_SECONDS: Final = 2.0
"""How often the stream of a shard at rest is asked for news: a front-end stands by for many."""

WARM_SECONDS: Final = 5.0
"""Whose copy has been up to date within this time has the log: what is missing is read in a moment."""

LOOK_SECONDS: Final = 5.0
"""How often files that are gone from the stream are looked for."""

DOUBT_SECONDS: Final = 0.1
WRITTEN_SECONDS: Final = 0.02
"""How often it is looked whether what was on its way to the stream has come to an end."""

DOWN_SECONDS: Final = 2.0
"""So long a link may be away before it is told, where the cluster has several shards."""

CLAIMS_SECONDS: Final = 3.0
"""How long a new leader waits for front-ends to say what their clients hold."""

CLOSE_SECONDS: Final = 1.0
"""How long the end waits for the cluster to store the last of the log."""


class Standing(NamedTuple):
    """How the election sees it."""

    claim: Claim = Claim()
    leads: bool = False  # this front-end has the lease
    keeps: bool = True  # and is to have a copy
    give_to: str = ""  # somebody is to have it instead


class Shard:
    def __init__(self, front: "Front", number: int, names: LogNames, folder: str) -> None:
        self._front = front
        self._server = front.server
        self._loop = asyncio.get_running_loop()
        self.number = number
        self.names = names
        self._folder = folder
        self.replica: Replica
        self.standing = Standing()
        self.led: StreamLog | None = None  # where we lead
        self.broker: Broker | None = None  # the same
        self.host: RelayHost | None = None
        self.remote = self._new_remote()
        self._doubt: asyncio.TimerHandle | None = None  # looks again whether we still lead
        self._leader_before = ""
        self._unreachable = ""  # who led when the link to it was cut, or could not be had
        self._is_given = False  # by who led before, to us
        self._kept_up = float("-inf")  # when the copy of the log was last up to date
        self._linked = False  # to the leader
        self._told = ""  # why not, last
        self._down: asyncio.TimerHandle | None = None  # tells that it is away
        self._stirred = asyncio.Event()
        self.joined = asyncio.Event()
        self._steering: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._letting_go: asyncio.Task[None] | None = None  # of one that we led
        self._lost_log: StreamLog | None = None  # that is let go of, and may be stored in part
        self._is_copy_used = False  # by a log: the copy is more than what came from the stream
        self._term = 0  # in which we lead
        self._lost: LogFailed | None = None  # why the log that we led is of no use any more

    def _new_remote(self) -> RemoteBroker:
        return RemoteBroker(
            self._front.member,
            lambda: self._front.router.want(self.number),
            connection_buffer_bytes=self._server.connection_buffer_bytes,
            on_link=self._link_changed,
            shard=self.number,
        )

    @property
    def home(self) -> Home:
        """Where words about its queues go."""
        return self.remote if self.broker is None else self.broker

    @property
    def served(self) -> Served | None:
        if self.led is None or self.broker is None:
            return None
        return Served(self.number, self.broker, self.led.log)

    @property
    def keeps(self) -> bool:
        """Whether a copy of it is kept here."""
        return self.led is not None or self._keeping is not None

    @property
    def is_warm(self) -> bool:
        """Whether it could be led at once."""
        return self.led is not None or time.monotonic() - self._kept_up < WARM_SECONDS

    def extent(self) -> list[int]:
        """Up to where the log goes that is here; where it is led, how many queues and bytes it has, and its
        number."""
        led = self.led
        if led is None:
            return [self.replica.end]
        return [led.log.position, led.log.queue_count, led.log.bytes_stored, led.log.number]

    # --- life ------------------------------------------------------------------------------------

    async def begin(self) -> None:
        self.replica = Replica(self._front.nats.api, self.names, self._folder)
        await self._front.asked(self.replica.begin())

    def start(self) -> None:
        self._steering = self._loop.create_task(self._steer(), name=f"steering shard {self.number}")
        self._steering.add_done_callback(self._front.ended)

    async def stop_steering(self) -> None:
        if self._steering is not None:
            self._steering.cancel()
            await asyncio.gather(self._steering, return_exceptions=True)
            self._steering = None
        if self._letting_go is not None:
            if self._lost_log is not None:
                self._lost_log.appender.stop()  # Nobody waits any more for what becomes of it.
            await asyncio.gather(self._letting_go, return_exceptions=True)
        await self._stop_keeping_up()
        self._untell_down()

    async def close(self) -> None:
        """Let go of the log, so that somebody else can go on at once."""
        if self.led is None and not self.remote.is_drained:
            log.warning("what clients have sent or settled last is not known to be stored by a leader")
        self.remote.lost("this front-end stops")
        led, self.led, self.broker = self.led, None, None
        if led is not None:
            await asyncio.to_thread(led.close_within, CLOSE_SECONDS, self._server.now_us())
        elif hasattr(self, "replica") and not self._is_copy_used:
            self.replica.leave(self.replica.applied)

    # --- who leads -------------------------------------------------------------------------------

    def see(self, standing: Standing) -> None:
        """What the election has come to."""
        if standing != self.standing:
            claim = standing.claim
            if claim.leader not in (self._front.member, ""):
                self._leader_before = claim.leader
            if claim.leader != self._front.member:
                self._is_given = claim.to == self._front.member
            self.standing = standing
            self._stirred.set()

    async def _steer(self) -> None:
        """One change after the other, until the view and what we do agree."""
        while True:
            await self._stirred.wait()
            self._stirred.clear()
            if self._lost is not None:
                await self._step_down()
            standing = self.standing
            claim = standing.claim
            if not standing.leads:
                if self.led is not None:
                    await self._step_down()
                await self._follow(claim)
            elif self.led is None:
                await self._lead(claim)
            elif claim.term != self._term:
                # It was lost and taken again before we looked: what somebody else did meanwhile is not known.
                await self._step_down()
                self._stirred.set()
            else:
                self.make_sure()
                if standing.give_to and not self._server.stopping:
                    await self._hand_over(standing.give_to)

    def check(self) -> None:
        """Before a turn: a process that was stopped for a while finds out here, before it hands out what may
        be with others."""
        if (
            self.broker is not None
            and not self.broker.is_suspended
            and not self._front.election.is_sure(self.number)
        ):
            self.make_sure()

    def make_sure(self) -> None:
        """Hand out messages only as long as nobody else can."""
        if self.broker is None:
            return
        sure = self.standing.leads and self._front.election.is_sure(self.number)
        self.broker.suspend(not sure)
        if not sure and self._doubt is None:
            self._doubt = self._loop.call_later(DOUBT_SECONDS, self._still_in_doubt)

    def _still_in_doubt(self) -> None:
        self._doubt = None
        self.make_sure()

    async def _follow(self, claim: Claim) -> None:
        if not self.standing.keeps:
            await self._stop_keeping_up()
        elif self._keeping is None:
            self._keeping = self._loop.create_task(self._keep_up(), name=f"keeping up shard {self.number}")
            self._keeping.add_done_callback(self._front.ended)
        leader = self.leader()
        if leader is not None and claim.leader != self._front.member:
            self.remote.connect(leader)
        else:
            self.remote.lost("nobody leads the cluster")
        self._front.leader_changed(self)

    async def _lead(self, claim: Claim) -> None:
        began = time.monotonic()
        server, front = self._server, self._front
        await self._stop_keeping_up()
        members = front.election.view.members
        with contextlib.suppress(JetStreamTrouble):
            members = await front.asked(front.election.see_members())
        self._is_copy_used = True
        try:
            led = await asyncio.to_thread(
                open_stream_log,
                front.nats,
                self.names,
                self.replica,
                server.now_us(),
                settings=replace(server.settings.log, sharers=front.shard_count),
                policies=server.settings.policies,
                wake=server.wake,
                room=front.room,
            )
        except LogNewer:
            raise  # Others may be able to lead: this one ends.
        except (LogError, JetStreamTrouble) as error:
            self._is_copy_used = False
            log.warning("%s could not be opened, and is tried again: %s", self._name, error)
            await asyncio.sleep(KEEP_UP_SECONDS)
            self._stirred.set()
            return
        if not self.standing.leads or self.standing.claim != claim:
            # While it was opened, the lease was lost: to somebody else, or in between, and it is ours again.
            log.info("the lease of term %d was lost while the log was opened", claim.term)
            await asyncio.to_thread(led.close_within, CLOSE_SECONDS, server.now_us())
            try:
                await front.asked(self.replica.begin())  # from what was left
            except JetStreamTrouble:
                self.replica.wipe()
            self._is_copy_used = False
            self._stirred.set()
            return
        opened = led.log
        opened.cluster = front.cluster_info
        if front.shard_count > 1:
            opened.keep_to(lambda queue: shard_of(queue, front.shard_count) == self.number)
        broker = server.make_broker(opened, lambda: front.router.want(self.number))
        others = set(members) - {front.member}
        before = members.get(self._leader_before, {})
        had_led = not self._is_given and (LEADS not in before or self.number in led_by(before))
        if had_led and self._unreachable == self._leader_before:
            # Its clients are gone with it. Those of one that had the lease, and has not come to lead, are
            # there, and so are those of one that is only silent.
            others.discard(self._leader_before)
        self.led, self._term = led, claim.term
        self._keep_what_is_left(opened)
        opened.poll()
        if opened.failed is not None:  # Nobody has gone over to it yet.
            self.fail(opened.failed)
            return
        self.host = RelayHost(
            broker,
            opened,
            term=claim.term,
            shard=self.number,
            now_us=server.arrival_us,
            on_failed=front.fail,
            connection_buffer_bytes=server.connection_buffer_bytes,
            expected=others,
            claims_seconds=CLAIMS_SECONDS,
            say=lambda level, text: front.lines.say(level, self.number, text),
        )
        broker.keep_undurable()
        self.broker = broker
        self._leader_before = ""  # should we lead again, everybody has something to claim
        self.remote.lost("this front-end leads")
        self._untell_down()
        try:
            self.remote.move_to(broker, opened, server.now_us())
        except LogFailed as error:
            self.fail(error)
            for port in front.router.ports_of(self.number):
                port.log("is disconnected: the log has failed when the lead was taken", 1)
                self._drop(port)
            return
        front.moved()
        front.door.open(self.host)
        front.leader_changed(self)
        queues = len(opened.queues())
        about = "" if front.shard_count > 1 else f" after {time.monotonic() - began:.1f} s: {queues} queues"
        front.lines.say(logging.INFO, self.number, f"leading{about}")
        self.joined.set()

    @property
    def _name(self) -> str:
        return f"shard {self.number}" if self._front.shard_count > 1 else "the log"

    def _keep_what_is_left(self, opened: Log) -> None:
        """What runs out does so by the time that passes, and not by what clocks are apart."""
        now_us = self._server.now_us()
        clocks = self._front.clocks
        # No more than it has gone forward at all: a leader of a moment may have made the same step.
        step_us = min(clocks.step_us(self.number), now_us - opened.found_us)
        if step_us < APART_US:
            return
        log.warning(
            "the clock here is %.1f s ahead of that of %s, which led before: what runs out has as much time "
            "left as it had there; set the clocks right (NTP)",
            step_us / 1_000_000,
            clocks.leaders.get(self.number),
        )
        try:
            opened.step(step_us, now_us)
        except LogFailed as error:
            self._front.fail(error)

    async def _hand_over(self, to: str) -> None:
        """Somebody else is to lead, who has the log: what clients hold and have asked for goes there with
        them."""
        led, broker, host = self.led, self.broker, self.host
        assert led is not None
        assert broker is not None
        assert host is not None
        front = self._front
        front.lines.say(logging.INFO, self.number, f"handed over to {to}")
        broker.suspend(True)
        front.door.shut(host)
        self.host = None
        now_us = self._server.now_us()
        try:
            broker.end_requests(now_us)
            broker.turn(now_us)  # What was asked in this turn is answered there, too.
        except LogFailed as error:
            self._lost = error
            self._stirred.set()
            return
        broker.taking.end_waits(now_us)
        self.remote = remote = self._new_remote()
        ports = front.router.ports_of(self.number)
        remote.adopt(broker, led.log, ports, now_us)
        self.broker = None
        front.moved(still=Served(self.number, broker, led.log, is_closing=True))
        self._letting_go = self._loop.create_task(self._part_with(led, remote, ports))
        await asyncio.shield(self._letting_go)  # A stop waits for it.
        await front.asked(front.election.release(self.number, to))
        try:
            await front.asked(self.replica.begin())  # from what was left
        except JetStreamTrouble:
            self.replica.wipe()
        self._is_copy_used = False
        self._stirred.set()

    async def _part_with(self, led: StreamLog, remote: RemoteBroker, ports: list[ShardPort]) -> None:
        """All that was said to it is stored, or its clients are told that this is not known."""
        front = self._front
        is_stored = await self._stored(led.log)
        await front.let_go()
        self.led, self._lost = None, None
        front.moved()
        await asyncio.to_thread(led.close_within, CLOSE_SECONDS, self._server.now_us())
        if is_stored and led.log.is_safe:
            remote.all_stored()
            return
        log.warning("%s: not all was stored before it was handed over; clients are disconnected", self._name)
        for port in ports:
            self._drop(port)

    async def _stored(self, opened: Log) -> bool:
        """Wait until all that was said is stored, and told; False where that takes too long or fails."""
        done: asyncio.Future[bool] = self._loop.create_future()

        def confirmed(error: LogFailed | None) -> None:
            if not done.done():
                done.set_result(error is None)

        try:
            opened.confirm(self._server.now_us(), confirmed)
            return await asyncio.wait_for(done, CLOSE_SECONDS)
        except (LogFailed, TimeoutError):
            return False

    def _leave_off(self) -> None:
        """We lead no more: clients go on in the way to the next leader."""
        broker, led = self.broker, self.led
        assert broker is not None
        assert led is not None
        front, now_us = self._front, self._server.now_us()
        text = "this front-end leads no more: its clients go on at the next leader"
        front.lines.say(logging.WARNING, self.number, text)
        broker.suspend(True)
        if self.host is not None:
            front.door.shut(self.host)
            self.host = None
        broker.taking.end_waits(now_us)
        if self._lost is None:
            try:
                broker.turn(now_us)
            except LogFailed as error:
                self._lost = error
        self.remote.lost("this front-end begins anew")  # two of one name would push each other out
        self.remote = self._new_remote()
        self.broker = None
        front.router.homes[self.number] = self.remote  # What ports are told now may have them say more.
        self.remote.take_over(broker, led.log, front.router.ports_of(self.number), now_us)
        front.moved(still=Served(self.number, broker, led.log, is_closing=True))

    async def _step_down(self) -> None:
        """Somebody else leads, or nobody knows what has become of our log."""
        self._kept_up = float("-inf")
        if self.broker is not None:
            self._leave_off()
        if self.led is not None:
            self._letting_go = self._loop.create_task(self._let_go(self.led, self.remote))
            await asyncio.shield(self._letting_go)  # A stop waits for it.

    async def _let_go(self, led: StreamLog, remote: RemoteBroker) -> None:
        """What is on its way is stored, or somebody else has written: it is known what is left to say."""
        self._lost_log = led
        while led.log.failed is None and led.log.is_writing:
            await asyncio.sleep(WRITTEN_SECONDS)
            led.log.poll()  # What nobody waits for ends without a word.
        await self._front.let_go()
        self.led, self._lost = None, None
        self._front.moved()
        await asyncio.to_thread(led.let_go)
        self._is_copy_used, self._lost_log = False, None
        for port in remote.decided(*led.reached()):
            port.log("is disconnected: nobody knows whether what it has sent last is stored", 1)
            self._drop(port)

    def _drop(self, port: Port) -> None:
        if isinstance(port, ShardPort) and not port.has_left:
            self._front.router.lose(port)
            port.drop()

    def fail(self, error: LogFailed) -> None:
        """The log says that it is of no use any more: somebody else writes it, most likely."""
        # A log that we have let go of may be told of again, by whoever still looks at it.
        if self._lost is None and self.led is not None and self.led.log.failed is error:
            self._lost = error
            log.error("%s", error)
            if self.broker is not None:
                self._leave_off()
            self._stirred.set()

    # --- following -------------------------------------------------------------------------------

    def _link_changed(self, up: bool, why: str) -> None:
        """The relay's link to the leader has come up, or is down."""
        claim = self.standing.claim
        self._untell_down()
        if up:
            self._unreachable = ""
            self.joined.set()
        elif not self.standing.leads:
            self._unreachable = claim.leader or self._unreachable
            # What passes by itself is no news before there was a link; that it is not let in is, once.
            theirs = claim.version or __version__
            is_news = (ANOTHER_KEY in why or theirs != __version__) and why != self._told
            if self._linked or is_news:
                self._told = why
                versions = "" if theirs == __version__ else f" (of version {theirs}, this is {__version__})"
                self._tell_down(f"no link to the leader{versions}: {why}")
            self._front.suspect(claim.leader)
            if self._linked:
                self._front.hurry()
        self._linked = up

    def _untell_down(self) -> None:
        if self._down is not None:
            self._down.cancel()
            self._down = None

    def _tell_down(self, text: str) -> None:
        front = self._front
        if front.shard_count == 1:
            front.lines.say(logging.WARNING, self.number, text)
        else:
            # Where leadership is handed over, a link is away for a moment.
            self._down = self._loop.call_later(
                DOWN_SECONDS, front.lines.say, logging.WARNING, self.number, text
            )

    def leader(self) -> Leader | None:
        """Where the leader's relay is, and who that is; None where none can be reached."""
        claim = self.standing.claim
        try:
            address = parse_address(claim.relay)
        except ValueError:
            return None
        if not isinstance(address, TcpAddress):
            return None
        return Leader(address, claim.leader, claim.term, self._front.trust)

    async def _keep_up(self) -> None:
        """The local copy follows the stream. No client needs it: a disk that fails is waited for."""
        looked = 0.0
        seen = dropped = None
        pause = KEEP_UP_SECONDS
        fails = False
        while True:
            try:
                await self._front.asked(self.replica.catch_up())
                self._kept_up = time.monotonic()
                pause = min(2 * pause, REST_SECONDS) if self.replica.seen == seen else KEEP_UP_SECONDS
                seen = self.replica.seen
                if seen != dropped and time.monotonic() - looked > LOOK_SECONDS:
                    looked = time.monotonic()
                    await self._front.asked(self.replica.drop_removed())
                    dropped = seen
                fails = False
            except JetStreamTrouble as error:
                log.debug("the copy of %s waits: %s", self._name, error)
            except OSError as error:
                if not fails:
                    log.error("the copy of %s cannot be kept up, and is tried again: %s", self._name, error)
                fails = True
            await asyncio.sleep(LOOK_SECONDS if fails else pause)

    async def _stop_keeping_up(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None
