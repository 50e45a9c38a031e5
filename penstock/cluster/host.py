"""RelayHost: the leader's side of the relay. Followers come here with the words of their clients.

    greet(link, hello)                      a follower has come (`door.py`)
    resumed(front_end)                      a front-end has claimed what its clients hold; this one too
    front_ends                              the ids of those that are linked
    close()                                 end all links; their clients go on at the next leader

It stands in front of a `Broker` like the listeners of the protocols do: every connection of a follower is a
`RemotePort` of the broker, and everything else is decided there. What a follower's clients publish without
asking for a reply goes to the log by number, once (see `lanes.py`).

Rules that always hold:
  * One link for each front-end: a new one ends the one before it, which is not listened to any more.
  * When a link ends, and the front-end has not opened another one within `grace_seconds`, all its connections
    are lost for the broker, each by the rule of its protocol. If it has, they go on: what their clients
    hold stays with them, and no delivery is counted.
  * After a change of leaders nothing is handed out until every front-end that is `expected` has said what its
    clients hold, or `claims_seconds` are over; twice that, where it is linked.
  * A settlement is confirmed to a follower when it is durable, in the order in which it came.
  * What was said behind a shipment that is refused is passed over, as the shipments behind it are.

How it fails: a link that breaks the rules is closed and the follower comes again. `LogFailed` goes to
`on_failed`: this front-end leads no more.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from penstock.broker.broker import Broker
from penstock.cluster.columns import unpack_ranges
from penstock.cluster.frames import (
    CLAIM_ATTEMPTS,
    CLAIM_DEAD,
    CLAIM_SETTLED,
    NUMBER,
    ROOM,
    WORDS_ACTIVE,
    WORDS_AGAIN,
    WORDS_BEHIND,
    WORDS_EPOCH,
    WORDS_EPOCHS,
    Body,
    Frame,
    Hello,
    Kind,
    decode_json,
    encode_frame,
    violation,
)
from penstock.cluster.lanes import MAIN
from penstock.cluster.leader_link import LeaderLink
from penstock.cluster.remote_port import RemotePort
from penstock.cluster.seating import count_of
from penstock.cluster.storing import Storing
from penstock.cluster.word_codec import NO_NUMBER, unpack_words
from penstock.log.errors import LogFailed
from penstock.log.log import Log
from penstock.model.words import Consume, Where

log = logging.getLogger("penstock.relay")


class RelayHost:
    def __init__(
        self,
        broker: Broker,
        log: Log,
        *,
        term: int,
        shard: int = 0,
        now_us: Callable[[], int],
        on_failed: Callable[[LogFailed], None],
        connection_buffer_bytes: int,
        expected: Collection[str] = (),
        claims_seconds: float = 10.0,
        grace_seconds: float = 1.0,
        say: Callable[[int, str], None] = lambda level, text: log.log(level, "%s", text),
    ) -> None:
        self._broker = broker
        self._log = log
        self.term = term
        self.shard = shard
        self._now_us = now_us  # of what is received now: a turn has one time
        self.on_failed = on_failed
        self._say = say  # in the log of this front-end
        self._buffer_bytes = connection_buffer_bytes
        self._loop = asyncio.get_running_loop()
        self._links: dict[str, LeaderLink] = {}
        self._storing = Storing(broker, log, now_us)
        self._unconfirmed: dict[LeaderLink, None] = {}
        self._undurable: list[tuple[LeaderLink, RemotePort, bytes]] = []  # deliveries that wait for the disk
        self._claims: dict[RemotePort, list[Frame]] = {}  # that wait until all settlements are known
        self._confirming = False
        self._confirm_wanted = False
        self._expected = set(expected)
        self._patience: asyncio.TimerHandle | None = None
        self._claims_seconds = claims_seconds
        self._grace_seconds = grace_seconds
        self._parked: dict[str, tuple[asyncio.TimerHandle, list[RemotePort]]] = {}  # of links that have ended
        if self._expected:
            self._wait_for_claims()

    # --- links -----------------------------------------------------------------------------------

    @property
    def front_ends(self) -> list[str]:
        return list(self._links)

    def greet(self, link: LeaderLink, hello: Hello) -> None:
        before = self._links.pop(hello.front_end, None)
        if before is not None:
            before.abort("the front-end has opened another link")
            self._park(before)
        self._come_again(hello.front_end)
        link.belong_to(self, hello)
        self._links[hello.front_end] = link
        link.trust()
        link.write(encode_frame(Kind.WELCOME))
        self._say(logging.INFO, f"front-end {hello.front_end} is linked")

    def link_lost(self, link: LeaderLink, why: str) -> None:
        if self._links.get(link.front_end) is link:
            del self._links[link.front_end]
            self._say(logging.WARNING, f"the link to front-end {link.front_end} has ended: {why}")
            self._park(link)

    def _park(self, link: LeaderLink) -> None:
        """Its connections get nothing any more, and may come again."""
        self._unconfirmed.pop(link, None)
        ports, link.ports = list(link.ports.values()), {}
        if not ports:
            return
        for port in ports:
            self._claims.pop(port, None)
            port.blocked = True
            self.block(port, True)
        timer = self._loop.call_later(self._grace_seconds, self._detach_parked, link.front_end, True)
        former = self._parked.pop(link.front_end, None)
        if former is not None:
            former[0].cancel()
            ports += former[1]
        self._parked[link.front_end] = timer, ports

    def _come_again(self, front_end: str) -> None:
        """A front-end is back in time: nothing is handed out until it has said what its clients hold."""
        if front_end in self._parked:
            self._expected.add(front_end)
            self._wait_for_claims()
            self._detach_parked(front_end, False)

    def _detach_parked(self, front_end: str, lost: bool) -> None:
        timer, ports = self._parked.pop(front_end)
        timer.cancel()
        # Who is back holds what it held: that does not expire, however long ago its time was over.
        now_us = self._now_us() if lost else 0
        try:
            for port in ports:
                self._broker.detach(port, now_us, lost=lost)
        except LogFailed as error:
            self.on_failed(error)

    def _wait_for_claims(self) -> None:
        self._broker.wait_for_claims(True)
        if self._patience is None:
            self._patience = self._loop.call_later(self._claims_seconds, self._wait_no_longer)

    def close(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        for timer, _ in self._parked.values():
            timer.cancel()
        self._parked.clear()
        self._claims.clear()
        links, self._links = list(self._links.values()), {}
        for link in links:
            # What their clients hold is not lost: they claim it from the next leader.
            link.ports = {}
            link.close("this front-end leads no more")
        # Whoever comes for a confirmation now finds none to be had: the log may be closed already.
        self._unconfirmed.clear()
        self._undurable.clear()

    # --- after a change of leaders -----------------------------------------------------------------

    def resumed(self, front_end: str) -> None:
        """All that its clients hold has been claimed."""
        self._expected.discard(front_end)
        if not self._expected and self._patience is not None:
            self._patience.cancel()
            self._patience = None
            try:
                for port in list(self._claims):
                    self._claim_waiting(port)
            except LogFailed as error:
                self.on_failed(error)
            self._broker.wait_for_claims(False)

    def _wait_no_longer(self, for_all: bool = False) -> None:
        """For those who have not come. Who is linked is about to claim, behind what it has to store."""
        gone = self._expected - (set() if for_all else self._links.keys())
        if gone != self._expected:
            self._patience = self._loop.call_later(self._claims_seconds, self._wait_no_longer, True)
        if gone:
            log.warning(
                "front-ends that have not come back: %s; what their clients hold is handed out again",
                ", ".join(sorted(gone)),
            )
        for front_end in gone:
            self.resumed(front_end)

    def _resumed(self, link: LeaderLink, frame: Frame) -> None:
        self.resumed(link.front_end)

    def _claim(self, link: LeaderLink, frame: Frame) -> None:
        """What a client holds, or held when it settled it.

        Where others may still tell of settlements, it waits for them: what one client had rejected may be
        what another one has as a dead letter.
        """
        port = link.port(frame)
        if self._expected and not frame.flag & CLAIM_SETTLED:
            own = frame._replace(body=memoryview(bytes(frame.body)))
            self._claims.setdefault(port, []).append(own)
        else:
            self._claim_now(port, frame)

    def _claim_now(self, port: RemotePort, frame: Frame) -> None:
        body = Body(frame)
        queue, origin, ranges = body.text(), body.short(), unpack_ranges(body)
        body.end()
        told = frame.flag >> CLAIM_ATTEMPTS
        dead, attempts_max = bool(frame.flag & CLAIM_DEAD), told - 1 if told else None
        granted = self._broker.claim(port, queue, dead, origin, ranges, self._now_us(), attempts_max)
        # What it has settled may have been done before the last link ended.
        if port.late and not frame.flag & CLAIM_SETTLED and count_of(granted) < count_of(ranges):
            port.end_late()

    def _claim_waiting(self, port: RemotePort) -> None:
        for frame in self._claims.pop(port, ()):
            self._claim_now(port, frame)

    # --- connections -------------------------------------------------------------------------------

    def _attach(self, link: LeaderLink, frame: Frame) -> None:
        fields = decode_json(frame)
        if frame.port in link.ports:
            raise violation(f"port {frame.port} attached twice", frame.position)
        try:
            port = RemotePort(
                link,
                frame.port,
                f"{fields['name']}@{link.front_end}",
                str(fields["protocol"]),
                Where(fields["lost_to"]),
                str(fields["peer"]),
                time.monotonic() - max(time.time() - int(fields["connected_us"]) / 1_000_000, 0),
                min(self._buffer_bytes, int(fields["buffer_bytes"])),
                int(fields["count_room"]),
                str(fields["user"]),
                late=fields.get("late") is True,  # a front-end of an older version does not say
            )
        except (KeyError, TypeError, ValueError) as error:
            raise violation(f"an ATTACH frame that lacks or spoils {error}", frame.position) from None
        link.ports[frame.port] = port
        self._broker.attach(port)
        if link.is_full:
            self.block(port, True)

    def _user(self, link: LeaderLink, frame: Frame) -> None:
        link.port(frame).user = Body(frame).text()

    def _detach(self, link: LeaderLink, frame: Frame) -> None:
        port = link.port(frame)
        self._claim_waiting(port)
        self._broker.detach(port, self._now_us(), lost=not frame.flag)
        del link.ports[frame.port]

    def block(self, port: RemotePort, blocked: bool) -> None:
        self._broker.blocked(port, blocked)

    def _blocked(self, link: LeaderLink, frame: Frame) -> None:
        port = link.port(frame)
        port.blocked = bool(frame.flag)
        self.block(port, port.blocked or link.is_full)

    def _idle(self, link: LeaderLink, frame: Frame) -> None:
        self._broker.idle(link.port(frame), bool(frame.flag))

    def _room(self, link: LeaderLink, frame: Frame) -> None:
        port = link.port(frame)
        port.drained(*Body(frame).numbers(ROOM))
        if not port.blocked and not link.is_full:
            self.block(port, False)

    # --- words -------------------------------------------------------------------------------------

    def _words(self, link: LeaderLink, frame: Frame) -> None:
        port = link.port(frame)
        number, commands = unpack_words(Body(frame))
        if frame.flag & WORDS_BEHIND and frame.flag >> WORDS_EPOCH != link.epochs[MAIN] % WORDS_EPOCHS:
            return  # It was behind a shipment that was refused: the follower says it again.
        now_us = self._now_us()
        if number != NO_NUMBER and not frame.flag & WORDS_AGAIN:
            self._claim_waiting(port)  # It settles what it holds.
        if frame.flag & WORDS_ACTIVE:
            for command in commands:
                if isinstance(command, Consume):
                    self._broker.rejoin(port, command, now_us)
        else:
            self._broker.handle(port, commands, now_us)
        if number != NO_NUMBER:
            link.words_number = number
            self._unconfirmed[link] = None

    def _return(self, link: LeaderLink, frame: Frame) -> None:
        body = Body(frame)
        queue, ranges = body.text(), unpack_ranges(body)
        body.end()
        self._broker.take_back(link.port(frame), queue, bool(frame.flag), ranges, self._now_us())

    def is_durable(self, queue: str, offset_end: int) -> bool:
        return self._log.durable_end(queue) >= offset_end

    def write_when_durable(self, link: LeaderLink, port: RemotePort, frame: bytes) -> None:
        port.undurable += 1
        self._undurable.append((link, port, frame))
        self.confirm_soon()

    def confirm_soon(self) -> None:
        if (self._unconfirmed or self._undurable) and not self._confirming and not self._confirm_wanted:
            self._confirm_wanted = True
            self._loop.call_soon(self._confirm)

    def _confirm(self) -> None:
        """One confirmation at a time is on its way; it speaks for all that came before it."""
        self._confirm_wanted = False
        told = [(link, link.words_number) for link in self._unconfirmed]
        self._unconfirmed.clear()
        deliveries, self._undurable = self._undurable, []
        if not told and not deliveries:
            return
        self._confirming = True
        try:
            self._log.confirm(self._now_us(), partial(self._confirmed, told, deliveries))
        except LogFailed as error:
            self.on_failed(error)

    def _confirmed(
        self,
        told: list[tuple[LeaderLink, int]],
        deliveries: list[tuple[LeaderLink, RemotePort, bytes]],
        error: LogFailed | None,
    ) -> None:
        self._confirming = False
        if error is not None:
            return
        for link, port, frame in deliveries:
            port.undurable -= 1
            if link.is_open:
                link.write(frame)
        for link, number in told:
            if link.is_open:
                link.write(encode_frame(Kind.SETTLED, NUMBER.pack(number)))
        self.confirm_soon()

    def _publish(self, link: LeaderLink, frame: Frame) -> None:
        self._storing.publish(link, frame)

    def hear(self, link: LeaderLink, frame: Frame) -> None:
        """A frame of a follower that is known."""
        handler = _HANDLERS.get(frame.kind)
        if handler is None:
            raise violation(f"a {frame.kind.name} frame, which is not the follower's to send", frame.position)
        try:
            handler(self, link, frame)
        except LogFailed as error:
            self.on_failed(error)


_HANDLERS: Final[dict[Kind, Callable[[RelayHost, LeaderLink, Frame], None]]] = {
    Kind.ATTACH: RelayHost._attach,
    Kind.USER: RelayHost._user,
    Kind.DETACH: RelayHost._detach,
    Kind.WORDS: RelayHost._words,
    Kind.PUBLISH: RelayHost._publish,
    Kind.CLAIM: RelayHost._claim,
    Kind.RESUMED: RelayHost._resumed,
    Kind.ROOM: RelayHost._room,
    Kind.IDLE: RelayHost._idle,
    Kind.BLOCKED: RelayHost._blocked,
    Kind.RETURN: RelayHost._return,
}
