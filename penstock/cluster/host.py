"""RelayHost: the leader's side of the relay. Followers come here with the words of their clients.

Public names: `RelayHost`, whose face is

    RelayHost(broker, engine, *, secret, term, now_us, on_failed, connection_buffer_bytes, http=None,
              expected=(), claims_seconds=10.0)
    await listen(address or socket)         where followers reach it; the real address is answered
    resumed(front_end)                      a front-end has claimed what its clients hold; this one too
    front_ends                              the ids of those that are linked
    close()                                 end all links; their clients go on at the next leader

It stands in front of a `Broker` like the listeners of the protocols do: every connection of a follower is a
`RemotePort` of the broker, and everything else is decided there. What a follower's clients publish without
asking for a reply goes to the engine by number, once (see `lanes.py`).

Rules that always hold:
  * One link for each front-end: a new one ends the one before it, which is not listened to any more.
  * When a link ends, all its connections are lost for the broker, each by the rule of its protocol.
  * After a change of leaders nothing is handed out until every front-end that is `expected` has said what its
    clients hold, or `claims_seconds` are over.
  * A settlement is confirmed to a follower when it is durable, in the order in which it came.

How it fails: a link that breaks the rules is closed and the follower comes again. `EngineFailed` goes to
`on_failed`: this front-end leads no more.
"""

import asyncio
import hmac
import logging
import socket
import struct
from array import array
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from penstock.broker.batch import Batch
from penstock.broker.broker import Broker
from penstock.broker.policy import QueueNameError
from penstock.broker.words import Consume, Where
from penstock.cluster.columns import pack_batches, unpack_ranges
from penstock.cluster.frames import (
    Body,
    Frame,
    Hello,
    Kind,
    decode_hello,
    decode_json,
    encode_frame,
    encode_json,
    text_bytes,
    violation,
)
from penstock.cluster.lanes import AGAIN, MAIN, number_of, series_of, unpack_shipment
from penstock.cluster.link import Link
from penstock.cluster.pipe import LeaderPipes
from penstock.cluster.remote import RemotePort
from penstock.cluster.sayings import NO_NUMBER, unpack_words
from penstock.engines.interface import (
    DiskFull,
    Engine,
    EngineError,
    EngineFailed,
    EngineRefused,
    QueueFull,
    QueueUnknown,
    TransactionDone,
)
from penstock.server.address import Address, TcpAddress

LINK_BUFFER_BYTES: Final = 4 << 20
"""What may wait in the buffer of one link. Beyond, all connections behind it count as blocked."""

log = logging.getLogger("penstock.relay")

_NUMBER: Final = struct.Struct("<q")
_ROOM: Final = struct.Struct("<qqq")
_COUNT: Final = struct.Struct("<I")


class HostLink(Link):
    """The leader's end of a link."""

    def __init__(self, host: "RelayHost") -> None:
        super().__init__()
        self._host = host
        self.front_end = ""  # empty until its hello was accepted
        self.ports: dict[int, RemotePort] = {}
        self.epochs = {MAIN: 0, AGAIN: 0}
        self.words_number = NO_NUMBER  # the last that came
        self.is_full = False
        self._shout: tuple[str, Batch, list[int]] | None = None  # a broadcast, and for whom

    def on_open(self) -> None:
        assert self._transport is not None
        self._transport.set_write_buffer_limits(high=LINK_BUFFER_BYTES)

    def on_frame(self, frame: Frame) -> None:
        if not self.front_end:
            self._host.greet(self, decode_hello(frame))
            return
        handler = _HANDLERS.get(frame.kind)
        if handler is None:
            raise violation(f"a {frame.kind.name} frame, which is not the follower's to send", frame.position)
        try:
            handler(self._host, self, frame)
        except EngineFailed as error:
            self._host.on_failed(error)

    def on_received(self) -> None:
        self._host.confirm_soon()

    def on_lost(self, why: str) -> None:
        self._host.link_lost(self, why)

    def pause_writing(self) -> None:
        self._full(True)

    def resume_writing(self) -> None:
        self._full(False)

    def _full(self, full: bool) -> None:
        self.is_full = full
        for port in self.ports.values():
            self._host.block(port, full or port.blocked)

    def refuse(self, why: str) -> None:
        self.write(encode_frame(Kind.WELCOME, encode_json({"refused": why})))
        self.close(why)

    def port(self, frame: Frame) -> RemotePort:
        found = self.ports.get(frame.port)
        if found is None:
            raise violation(f"a {frame.kind.name} frame of port {frame.port}: there is none", frame.position)
        return found

    def write(self, frame: bytes) -> None:
        if self._shout is not None:
            self._end_shout()
        super().write(frame)

    def flush(self) -> None:
        if self._shout is not None:
            self._end_shout()
        super().flush()

    def broadcast(self, port: int, queue: str, batch: Batch) -> None:
        """What all consumers of a queue hear travels once to those of one front-end."""
        if self._shout is not None and self._shout[1] is batch:
            self._shout[2].append(port)
            return
        if self._shout is not None:
            self._end_shout()
        self._shout = (queue, batch, [port])
        self.flush_soon()

    def _end_shout(self) -> None:
        assert self._shout is not None
        queue, batch, ports = self._shout
        self._shout = None
        super().write(
            encode_frame(
                Kind.BROADCAST,
                text_bytes(queue),
                _COUNT.pack(len(ports)),
                array("I", ports).tobytes(),
                *pack_batches([batch], batch.protocol),
            )
        )


class RelayHost:
    """See the module's docstring."""

    def __init__(
        self,
        broker: Broker,
        engine: Engine,
        *,
        secret: str,
        term: int,
        now_us: Callable[[], int],
        on_failed: Callable[[EngineFailed], None],
        connection_buffer_bytes: int,
        http: Address | None = None,
        expected: Collection[str] = (),
        claims_seconds: float = 10.0,
    ) -> None:
        self._broker = broker
        self._engine = engine
        self._secret = secret
        self._term = term
        self._now_us = now_us  # of what is received now: a turn has one time
        self.on_failed = on_failed
        self._buffer_bytes = connection_buffer_bytes
        self._pipes = LeaderPipes(http)
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._links: dict[str, HostLink] = {}
        self._strangers: set[HostLink] = set()  # links without a hello so far
        self._newest: dict[str, int] = {}  # of each lane, the last number that was stored
        self._unconfirmed: dict[HostLink, None] = {}
        self._confirming = False
        self._confirm_wanted = False
        self._expected = set(expected)
        self._patience: asyncio.TimerHandle | None = None
        if self._expected:
            broker.wait_for_claims(True)
            self._patience = self._loop.call_later(claims_seconds, self._wait_no_longer)

    # --- links -----------------------------------------------------------------------------------

    async def listen(self, where: TcpAddress | socket.socket) -> TcpAddress:
        """At an address, or with a socket that listens already and is the host's from now on."""
        door = where if isinstance(where, socket.socket) else socket.create_server((where.host, where.port))
        self._server = await self._loop.create_server(self._link, sock=door, backlog=256)
        host, port, *_ = door.getsockname()
        return TcpAddress(host, port)

    def _link(self) -> HostLink:
        link = HostLink(self)
        self._strangers.add(link)
        return link

    @property
    def front_ends(self) -> list[str]:
        return list(self._links)

    def greet(self, link: HostLink, hello: Hello) -> None:
        self._strangers.discard(link)
        if not hmac.compare_digest(hello.secret.encode(), self._secret.encode()):
            link.refuse("the secret is not that of this leader")
        elif hello.term != self._term:
            link.refuse(f"this is the leader of term {self._term}, not of {hello.term}")
        elif hello.kind == "http":
            self._pipes.take(link.hand_over())
        elif hello.kind != "words" or not hello.front_end:
            link.refuse(f"there are no links of kind {hello.kind!r}")
        else:
            before = self._links.get(hello.front_end)
            if before is not None:
                before.abort("the front-end has opened another link")
                self._left(before)
            link.front_end = hello.front_end
            self._links[hello.front_end] = link
            link.trust()
            link.write(encode_frame(Kind.WELCOME))
            log.info("front-end %s is linked", hello.front_end)

    def link_lost(self, link: HostLink, why: str) -> None:
        self._strangers.discard(link)
        if self._links.get(link.front_end) is link:
            del self._links[link.front_end]
            log.warning("the link to front-end %s has ended: %s", link.front_end, why)
        self._left(link)

    def _left(self, link: HostLink) -> None:
        """Its connections are lost."""
        self._unconfirmed.pop(link, None)
        ports, link.ports = link.ports, {}
        now_us = self._now_us()
        try:
            for port in ports.values():
                self._broker.detach(port, now_us)
        except EngineFailed as error:
            self.on_failed(error)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._patience is not None:
            self._patience.cancel()
        self._pipes.close()
        links, self._links = [*self._links.values(), *self._strangers], {}
        for link in links:
            # What their clients hold is not lost: they claim it from the next leader.
            link.ports = {}
            link.close("this front-end leads no more")

    # --- after a change of leaders -----------------------------------------------------------------

    def resumed(self, front_end: str) -> None:
        """All that its clients hold has been claimed."""
        self._expected.discard(front_end)
        if not self._expected and self._patience is not None:
            self._patience.cancel()
            self._patience = None
            self._broker.wait_for_claims(False)

    def _wait_no_longer(self) -> None:
        log.warning(
            "front-ends that have not come back: %s; what their clients hold is handed out again",
            ", ".join(sorted(self._expected)),
        )
        for front_end in list(self._expected):
            self.resumed(front_end)

    def _resumed(self, link: HostLink, frame: Frame) -> None:
        self.resumed(link.front_end)

    def _claim(self, link: HostLink, frame: Frame) -> None:
        port = link.port(frame)
        body = Body(frame)
        queue, origin, ranges = body.text(), body.short(), unpack_ranges(body)
        body.end()
        self._broker.claim(port, queue, bool(frame.flag), origin, ranges, self._now_us())

    # --- connections -------------------------------------------------------------------------------

    def _attach(self, link: HostLink, frame: Frame) -> None:
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
                int(fields["connected_us"]),
                self._buffer_bytes,
                int(fields["count_room"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise violation(f"an ATTACH frame that lacks or spoils {error}", frame.position) from None
        link.ports[frame.port] = port
        self._broker.attach(port)
        if link.is_full:
            self.block(port, True)

    def _detach(self, link: HostLink, frame: Frame) -> None:
        self._broker.detach(link.port(frame), self._now_us())
        del link.ports[frame.port]

    def block(self, port: RemotePort, blocked: bool) -> None:
        self._broker.blocked(port, blocked)

    def _blocked(self, link: HostLink, frame: Frame) -> None:
        port = link.port(frame)
        port.blocked = bool(frame.flag)
        self.block(port, port.blocked or link.is_full)

    def _idle(self, link: HostLink, frame: Frame) -> None:
        self._broker.idle(link.port(frame), bool(frame.flag))

    def _room(self, link: HostLink, frame: Frame) -> None:
        port = link.port(frame)
        port.drained(*Body(frame).numbers(_ROOM))
        if not port.blocked and not link.is_full:
            self.block(port, False)

    # --- words -------------------------------------------------------------------------------------

    def _words(self, link: HostLink, frame: Frame) -> None:
        port = link.port(frame)
        number, commands = unpack_words(Body(frame))
        now_us = self._now_us()
        if frame.flag:
            for command in commands:
                if isinstance(command, Consume):
                    self._broker.rejoin(port, command, now_us)
        else:
            self._broker.handle(port, commands, now_us)
        if number != NO_NUMBER:
            link.words_number = number
            self._unconfirmed[link] = None

    def _return(self, link: HostLink, frame: Frame) -> None:
        body = Body(frame)
        queue, ranges = body.text(), unpack_ranges(body)
        body.end()
        self._broker.take_back(link.port(frame), queue, bool(frame.flag), ranges, self._now_us())

    def confirm_soon(self) -> None:
        if self._unconfirmed and not self._confirming and not self._confirm_wanted:
            self._confirm_wanted = True
            self._loop.call_soon(self._confirm)

    def _confirm(self) -> None:
        """One confirmation at a time is on its way; it speaks for all that came before it."""
        self._confirm_wanted = False
        told = [(link, link.words_number) for link in self._unconfirmed]
        self._unconfirmed.clear()
        if not told:
            return
        self._confirming = True
        try:
            self._engine.confirm(self._now_us(), partial(self._confirmed, told))
        except EngineFailed as error:
            self.on_failed(error)

    def _confirmed(self, told: list[tuple[HostLink, int]], error: EngineFailed | None) -> None:
        self._confirming = False
        if error is not None:
            return
        for link, number in told:
            if link.is_open:
                link.write(encode_frame(Kind.SETTLED, _NUMBER.pack(number)))
        self.confirm_soon()

    # --- messages ------------------------------------------------------------------------------------

    def _publish(self, link: HostLink, frame: Frame) -> None:
        lane = frame.flag
        epoch, number, parts = unpack_shipment(frame)
        if epoch != link.epochs[lane]:
            return  # It was behind a shipment that was refused: the follower sends it again.
        series = series_of(link.front_end, lane)
        newest = self._newest.get(series)
        if newest is None:
            newest = self._newest[series] = number_of(self._engine.transaction_newest(series))
        now_us = self._now_us()
        stored = partial(self._stored, link, lane, number)
        if number <= newest:
            # It was stored under an earlier link; whether that is durable is not known here.
            self._engine.confirm(now_us, stored)
            return
        refusal: EngineError | QueueNameError
        for at, (queue, _) in enumerate(parts):
            try:
                self._broker.check_name(queue)
            except (EngineRefused, QueueNameError) as error:
                self._refuse(link, lane, number, [at], error)
                return
        try:
            self._engine.transact(f"{series}{number}", parts, now_us, stored)
        except (DiskFull, QueueFull, EngineRefused) as error:
            refusal = error
        else:
            self._newest[series] = number
            for queue, _ in parts:
                self._broker.stir(queue)
            return
        self._refuse(link, lane, number, self._at_fault(parts, refusal), refusal)

    def _at_fault(self, parts: list[tuple[str, Batch]], error: EngineError) -> list[int]:
        """For the sake of which parts a shipment was refused; none: nobody knows."""
        if isinstance(error, DiskFull) or len(parts) == 1:
            return list(range(len(parts)))
        if isinstance(error, QueueFull):
            return [at for at, (queue, batch) in enumerate(parts) if self._is_full(queue, len(batch.payload))]
        return []

    def _is_full(self, queue: str, payload_bytes: int) -> bool:
        bytes_max = self._broker.policies.for_queue(queue).max_bytes
        if not bytes_max:
            return False
        try:
            living_bytes = self._engine.describe(queue).bytes
        except QueueUnknown:
            living_bytes = 0
        return living_bytes + payload_bytes > bytes_max

    def _refuse(
        self, link: HostLink, lane: int, number: int, parts: list[int], error: EngineError | QueueNameError
    ) -> None:
        link.epochs[lane] += 1
        full = isinstance(error, DiskFull | QueueFull)
        fields = {"number": number, "parts": parts, "full": full, "text": str(error)}
        link.write(encode_frame(Kind.REFUSED, encode_json(fields), flag=lane))

    @staticmethod
    def _stored(link: HostLink, lane: int, number: int, result: TransactionDone | EngineError | None) -> None:
        if link.is_open and not isinstance(result, EngineError):
            link.write(encode_frame(Kind.STORED, _NUMBER.pack(number), flag=lane))


_HANDLERS: Final[dict[Kind, Callable[[RelayHost, HostLink, Frame], None]]] = {
    Kind.ATTACH: RelayHost._attach,
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
