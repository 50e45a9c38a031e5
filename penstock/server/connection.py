"""Connection: a socket, a protocol's session, and a port of the broker, in one object.

Here is what all protocols have in common; `wires.py` has one for each.

Received bytes land in one buffer that all connections share, are turned into words before the
next byte is read, and leave nothing behind but what is incomplete: ten thousand idle connections
cost ten thousand small objects and no buffers. What a turn of the loop has no time for waits in `_rest`,
which is read before anything else, in its round with the others (`rounds.py`), also where its peer is gone
by then.

Flow control, both ways:
  * Out: what waits in the socket's buffer is bounded by `connection-buffer-bytes`. A consumer that
    does not read gets no new messages; nobody else notices.
  * In: a sender for which there is no room, on the disk or in memory, is not read from.

Whatever bytes a peer sends, no exception leaves this module: a violation closes that connection,
with a line that says who, why and the first offending bytes; so does a fault of ours, with its traceback.
What it held is with others at once, and a peer that does not read its last words is not waited for.

For people it counts what passes, by chunks and by batches, and remembers what was said last (`about`).

It is long, and one: what may happen next to a connection depends on all that is noted here (what is not read,
why it is held, who has left), and each of its methods changes some of that.
"""

import asyncio
import logging
import select
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

from penstock.broker.hand_out import MESSAGE_BYTES
from penstock.broker.home import Home
from penstock.broker.ports import NOTHING, OTHERS, tally
from penstock.common.address import TcpAddress
from penstock.common.journal import log
from penstock.log.errors import LogFailed
from penstock.model import words
from penstock.model.batch import Batch, Slice
from penstock.model.rights import User
from penstock.model.timers import SECOND_US
from penstock.model.words import Command, Publish, Where
from penstock.protocols.errors import PeerViolation
from penstock.protocols.share import QUICK_SHARE, SHARE
from penstock.server.memory import SMALL_BYTES
from penstock.server.rounds import TICK_SECONDS, receive_buffer
from penstock.server.users import names_in, refusal

if TYPE_CHECKING:
    from penstock.server.server import Server
    from penstock.server.settings import Listener

UNBOUNDED = 1 << 30
LAST_WORDS_SECONDS = 5.0
"""How long a peer that is sent away may take to read what waits for it, and to close its side."""

LEFT_TICKS = 5
"""After so many, a peer that has left, and cannot be read to its end for lack of room, is not waited for: its
last words may have been acknowledgements, but what it holds may be what there is no room beside."""

BY_BROKER, BY_SERVER, BY_ROUND, BY_MEMORY = 1, 2, 4, 8
"""Reasons not to read from a connection: no room for what it sends, in its queue or on the disk; the disk is
behind; it has had its share; it holds too much."""


class Reader(Protocol):
    """What the readers of all protocols have in common."""

    share: int

    @property
    def unfinished(self) -> bool: ...


class Session(Protocol):
    """What all sessions have in common."""

    @property
    def reader(self) -> Reader: ...

    @property
    def held_bytes(self) -> int:
        """What is kept, here and elsewhere, of what its peer has said: the unfinished, what it consumes."""


class Connection(asyncio.BufferedProtocol):
    """What all protocols have in common. A subclass has the session."""

    # 0.3 KB, and as attributes in a dictionary 1.6 KB: there may be ten thousand.
    __slots__ = (
        "_attached",
        "_blocked_since",
        "_broker",
        "_bytes_in",
        "_bytes_out",
        "_certificate",
        "_charged",
        "_closing",
        "_ending",
        "_has_ended",
        "_heard",
        "_heard_us",
        "_held_since",
        "_holds",
        "_is_parting",
        "_left_ticks",
        "_listener",
        "_refused",
        "_rest",
        "_restricted",
        "_said",
        "_said_us",
        "_server",
        "_session",
        "_transport",
        "_unstored_bytes",
        "_user",
        "connected",
        "name",
        "peer",
        "sent",
        "takes_long",
    )

    _session: Session
    protocol = ""
    lost_to = Where.PLACE

    def __init__(self, server: "Server", listener: "Listener", has_place: bool = True) -> None:
        self.name = ""
        self.peer = ""
        self.connected = 0.0  # by the clock that nobody sets
        self._server = server
        self._broker = server.home
        self._listener = listener
        self._user: User | None = None
        self._restricted = False
        self._transport: asyncio.Transport | None = None
        self.takes_long = False
        self._holds = 0  # reasons not to read
        self._rest = b""  # received, and not read yet
        self._has_ended = False  # the peer says no more
        self._ending = ""  # how it has left, where that is not told yet
        self._heard = 0  # the server's tick when something came last
        self._unstored_bytes = 0  # of messages that it has sent and there is no room for
        self._charged = False  # the account of memory knows of it
        self._refused = 0  # messages that were sent without tickets, since that was last told
        self._closing = False
        self._attached = False
        self.sent: dict[str, int] = NOTHING  # messages, by queue
        self._bytes_in = 0
        self._bytes_out = 0
        self._said: type[Command] | None = None  # its last word
        self._said_us = 0
        self._heard_us = 0
        self._blocked_since = 0.0  # by the clock that nobody sets; 0: it reads what it gets
        self._held_since = 0.0  # 0: it is read from
        self._certificate = ""  # the name in it
        self._left_ticks = 0  # for how many its peer has been gone
        self._is_parting = not has_place  # it is told that there is no place for it

    # --- the socket ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        self.peer = str(TcpAddress(peer[0], peer[1])) if isinstance(peer, tuple) else "unix"
        self.connected = time.monotonic()
        self.name = self._server.name_for(self)
        server = self._server
        if server.stopping and not self._is_parting:
            self._is_parting = True
            server.parting += 1
        if self._is_parting:
            server.refused(self.name)
            self._refuse()
            self._transport = None
            self._part(transport)
            return
        server.connections.add(self)
        # A port that has no room left is told when it has some again: it must count as full from there on.
        transport.set_write_buffer_limits(high=self._server.connection_buffer_bytes - 1)
        # Not the home of when it was accepted: with TLS that is a handshake ago.
        self._broker = self._server.home
        self.identify()
        self._broker.attach(self)
        self._attached = True
        as_user = f" as {self.user!r}" if self.user else ""
        self._server.journal.note(logging.INFO, f"{self.name} connected{as_user}")

    def identify(self) -> None:
        """See who it is, by the settings of now."""
        before = self.user
        if self._transport is not None:
            certificate = self._transport.get_extra_info("peercert")
            self._user = self._server.users.find(certificate, self._listener)
            self._certificate = next(iter(names_in(certificate or {})), "")
        if self._attached and self.user != before:
            self._broker.named(self)
        listener = self._listener
        open_to_all = listener.mode == "both" and listener.queues == ("*",)
        self._restricted = self._user is not None or not open_to_all

    def end_refused(self, now_us: int) -> None:
        """What its user may not consume any more, it does not; what it holds it may still settle."""
        if not self._restricted or not self._attached:
            return
        for queue, dead in self._broker.demands(self):
            # The session hears of it last: what it was about to get must not come behind its no.
            if refusal(self._user, self._listener, words.Consume(queue, 0, dead), now_us):
                self._handle([words.Cancel(queue, dead)], now_us)
                self._may(words.Consume(queue, 0, dead), now_us)

    @property
    def user(self) -> str:
        """The name of who it is; empty: nobody in particular."""
        return self._user.name if self._user is not None else ""

    def _refuse(self) -> None:
        """Tell the peer that the server is full, where its protocol has a word for that."""

    @staticmethod
    def _part(transport: asyncio.Transport) -> None:
        """Close without losing what was written last: a close with unread bytes would reset the connection,
        and the peer's system throw away what it has not read. What still comes goes nowhere."""
        if transport.can_write_eof():
            transport.write_eof()
        asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, transport.abort)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._server.rounds.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if not self._attached:
            return
        self._heard = self._server.ticks
        self._bytes_in += nbytes
        rounds = self._server.rounds
        if self._rest or rounds.must_wait():
            self._keep(self._rest + receive_buffer[:nbytes])
        elif rounds.is_crowded:
            self._read_little(receive_buffer[:nbytes])
        else:
            self._read(receive_buffer[:nbytes])

    def _keep(self, rest: bytes, *, for_more: bool = False) -> None:
        """For a later turn."""
        self._rest = rest
        if len(rest) >= self._server.rounds.late_bytes:
            self._hold(BY_ROUND, True)
        if self._transport is None or not self._holds & ~BY_ROUND:
            self._server.rounds.wait(self, for_more=for_more)
        if self._charged or len(rest) >= SMALL_BYTES:
            self._weigh()

    def go_on(self, quick: bool) -> None:
        if self._holds & ~BY_ROUND and self._transport is not None:
            return  # It goes on when there is room.
        rest, self._rest = self._rest, b""
        if self._attached and rest and not self._closing:
            if quick:
                self._read_little(rest)
            else:
                self._read(rest)
        if not self._rest:
            self._hold(BY_ROUND, False)
            if self._has_ended and not self._holds:  # or what it has said last would have no room any more
                self._end()
            if self._transport is None:
                self._left()

    def _read_little(self, data: bytes | memoryview) -> None:
        self._session.reader.share = QUICK_SHARE
        self._read(data)
        self._session.reader.share = SHARE

    def _read(self, data: bytes | memoryview) -> None:
        now_us = self._server.arrival_us()
        try:
            commands, rest = self._receive(data, now_us)
        except PeerViolation as violation:
            self._handle(self._salvage(), now_us)
            self._server.journal.note(
                logging.WARNING, f"closed {self.protocol} connection: {violation}", peer=self.name
            )
            self.leave(lost=True)
            self.close()
            return
        except Exception:  # noqa: BLE001 - it is told: a fault of ours costs one connection
            self._fault("what it sent could not be read")
            return
        self._rest = rest
        self._heard_us = now_us
        if commands:
            self._said, self._said_us = type(commands[-1]), now_us
        self._handle(commands, now_us)
        publishes = False
        for command in commands:
            if isinstance(command, Publish):
                publishes = True
                self.sent = tally(self.sent, command.queue, OTHERS, len(command.batch))
        if publishes:  # Those who only take and settle are always read: they make room.
            self._server.check_in_flight(self)
        if rest or self._holds or self._charged or self._session.held_bytes >= SMALL_BYTES:
            self._keep_account(commands, rest)

    def _keep_account(self, commands: list[Command], rest: bytes) -> None:
        """Something of it is kept: what it has sent, what is not read of it, or what was begun."""
        if self._holds & BY_BROKER:
            self._unstored_bytes += sum(
                len(it.batch.payload) + MESSAGE_BYTES * len(it.batch)
                for it in commands
                if isinstance(it, Publish)
            )
        if rest:
            self._keep(rest, for_more=True)
        self._weigh()

    def _weigh(self) -> None:
        """Tell the account what it makes the process hold."""
        if self._transport is None:
            return
        held_bytes = self._input_bytes + self.output_bytes
        if self._charged or held_bytes >= SMALL_BYTES:
            self._charged = held_bytes >= SMALL_BYTES
            memory, rounds = self._server.memory, self._server.rounds
            memory.charge(self, held_bytes)
            if memory.is_tight and not rounds.is_sparing:
                rounds.be_sparing(True)  # Not at the turn's end: many others may be read from in it.

    @property
    def _input_bytes(self) -> int:
        said_bytes = self._session.held_bytes if self._bytes_in else 0
        return said_bytes + len(self._rest) + self._unstored_bytes

    @property
    def output_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def close_for_memory(self, why: str) -> None:
        self._server.journal.note(logging.ERROR, f"closed {self.protocol} connection: {why}", peer=self.name)
        self.leave(lost=True)
        self.drop()

    def hold_for_memory(self, held: bool) -> None:
        self._hold(BY_MEMORY, held)

    def _receive(self, data: bytes | memoryview, now_us: int) -> tuple[list[Command], bytes]:
        """What it says, and what there is no time for yet."""
        raise NotImplementedError

    def _salvage(self) -> list[Command]:
        raise NotImplementedError

    def _handle(self, commands: list[Command], now_us: int) -> None:
        if self._restricted:
            commands = [command for command in commands if self._may(command, now_us)]
        if not commands:
            return
        try:
            self._broker.handle(self, commands, now_us)
        except LogFailed as failure:
            self._server.fail(failure)
        except Exception:  # noqa: BLE001 - it is told, as above
            self._fault("what it said could not be carried out")

    def _may(self, command: Command, now_us: int) -> bool:
        """Whether its user, and the listener's settings, allow it; says no where there is a way."""
        why = refusal(self._user, self._listener, command, now_us)
        if not why:
            return True
        self._server.audit.refused(
            {
                "who": self.user,
                "from": self.peer.rpartition(":")[0] or self.peer,
                "door": self.protocol,
                "act": "receive" if isinstance(command, words.Consume) else "send",
                "queue": getattr(command, "queue", ""),
                "result": "forbidden",
            }
        )
        if isinstance(command, words.Consume):
            self.log(why, 1)
            self.decline(command.queue, command.dead)
        elif isinstance(command, words.Publish | words.Broadcast):
            self.log(why, len(command.batch))
            if isinstance(command, words.Publish):
                if command.tickets is not None:
                    self.undelivered(command.tickets)
                else:
                    self.refused(len(command.batch))
        return False

    def eof_received(self) -> bool:
        if self._rest:
            # What it has said before is heard first. (With TLS, it is closed whatever is returned here.)
            self._has_ended = True
            return self._listener.tls_certificate is None
        self._end()
        return False

    def _end(self) -> None:
        """The end of the connection, in all three protocols: it can settle nothing any more, whether or not
        it reads what waits for it."""
        self.leave(lost=not self._server.stopping)
        self.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_parting:
            self._server.parting -= 1
        if self._listener.tls_certificate is not None:
            self._server.memory.tls_left()
        if self._transport is None:
            return
        self._transport = None
        self._server.gone(self)
        self._ending = f"was lost: {error}" if error else "left"
        if not self._rest or self._closing:
            self._left()
        else:
            self._server.rounds.wait(self)  # Also where there is no room: nobody waits for that.

    def _left(self) -> None:
        """The peer is gone, and what it has said was heard."""
        # Who leaves a broker that stops may do so for that; a crash would not count its deliveries either.
        self.leave(lost=not self._server.stopping)
        self._server.journal.note(logging.INFO, f"{self.name} {self._ending}")

    def leave(self, *, lost: bool) -> None:
        """Be no port any more: what it holds goes back, and is a delivery that failed where it is `lost`."""
        if not self._attached:
            return
        self._attached = False
        try:
            self._broker.detach(self, self._server.now_us(), lost=lost)
        except LogFailed as failure:
            self._server.fail(failure)

    def _fault(self, what: str) -> None:
        """In an `except`: it is ours, and costs this connection."""
        log.exception("closed %s: a bug: %s", self.name, what)
        self.drop()

    def pause_writing(self) -> None:
        self._blocked_since = time.monotonic()
        self._broker.blocked(self, True)

    def resume_writing(self) -> None:
        self._blocked_since = 0.0
        self._broker.blocked(self, False)

    def end(self) -> None:
        """An operator sends it away: as if it were lost, but it is told where there is a word for that."""
        self.log("ended by an operator", 1)
        self.say_closing()
        for queue, dead in self._broker.demands(self):
            self.decline(queue, dead)
        self.leave(lost=True)
        self.close()

    def about(self, now_us: int) -> dict[str, object]:
        """What only this end of it knows, for people."""
        now = time.monotonic()
        return {
            "client": self._certificate or self.peer,
            "certificate": self._certificate,
            "listener": str(self._listener.address),
            "said": self._said.__name__.lower() if self._said is not None else "",
            "said_seconds": max(now_us - self._said_us, 0) / SECOND_US if self._said_us else None,
            "heard_seconds": max(now_us - self._heard_us, 0) / SECOND_US if self._heard_us else None,
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out,
            "input_bytes": self._input_bytes,
            "output_bytes": self.output_bytes,
            "blocked_seconds": now - self._blocked_since if self._blocked_since else None,
            "held_back_seconds": now - self._held_since if self._held_since else None,
        }

    def close(self) -> None:
        """Write what is waiting, then close; for a peer that does not read it, not for ever."""
        if self._transport is not None and not self._closing:
            self._closing = True
            self._transport.close()
            if self._transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self.drop)

    def _write(self, data: bytes | memoryview) -> None:
        if self._transport is not None and data and not self._closing:
            self._transport.write(data)
            self._bytes_out += len(data)
            if self._charged or self._transport.get_write_buffer_size() >= SMALL_BYTES:
                self._weigh()

    # --- the port --------------------------------------------------------------------------------

    def bytes_room(self) -> int:
        if self._transport is None or self._closing:
            return 0
        return self._server.connection_buffer_bytes - self._transport.get_write_buffer_size()

    def count_room(self) -> int:
        return UNBOUNDED

    def deliver(self, queue: str, slices: list[Slice], now_us: int, dead: bool) -> None:
        try:
            parts = self._delivery(queue, slices, now_us, dead)
        except Exception:  # noqa: BLE001 - it is told, as above
            self._fault(f"messages of queue {queue!r} could not be sent")
            return
        if len(parts) == 1:
            self._write(parts[0])
        elif self._transport is not None and not self._closing:
            self._transport.writelines(parts)
            self._bytes_out += sum(map(len, parts))
            self._weigh()

    def _delivery(self, queue: str, slices: list[Slice], now_us: int, dead: bool) -> list[bytes | memoryview]:
        """As buffers for one write."""
        raise NotImplementedError

    def consuming(self, queue: str, dead: bool) -> None:
        """Only RQ has a word for it."""

    def decline(self, queue: str, dead: bool) -> None:
        """Only SSPQ has a word for it."""

    def delivered(self, tickets: Sequence[int]) -> None:
        """Only RQ has a word for it, as for the next three."""

    def replies(self, tickets: Sequence[int], answers: Batch) -> None:
        """See `delivered`."""

    def undelivered(self, tickets: Sequence[int]) -> None:
        """See `delivered`."""

    def broadcast(self, queue: str, batch: Batch) -> None:
        """See `delivered`."""

    def refused(self, count: int) -> None:
        self._refused += count

    def synced(self) -> None:
        """RQ has receipts, and no word for it."""

    def move(self, home: Home) -> None:
        """Its words go elsewhere from now on, where it is attached already."""
        self._broker = home

    def drop(self) -> None:
        """Close at once: what it holds and waits for is not known here any more."""
        if self._transport is not None:
            self._closing = True
            self._transport.abort()

    def hold(self, held: bool) -> None:
        if not held:
            self._unstored_bytes = 0
        self._hold(BY_BROKER, held)

    def hold_for_server(self, held: bool) -> None:
        self._hold(BY_SERVER, held)

    def _hold(self, reason: int, held: bool) -> None:
        before = self._holds
        self._holds = before | reason if held else before & ~reason
        if not self._holds & ~BY_ROUND:
            self._held_since = 0.0
        elif not self._held_since:
            self._held_since = time.monotonic()
        if (self._rest or self._has_ended) and before & ~BY_ROUND and not self._holds & ~BY_ROUND:
            self._server.rounds.wait(self)
        if self._transport is None or self._transport.is_closing():
            return
        if self._holds and not before:
            self._transport.pause_reading()
        elif before and not self._holds:
            self._heard = self._server.ticks
            self._transport.resume_reading()

    @property
    def is_held(self) -> bool:
        """Whether it is not read from, because there is no room for what it sends."""
        return bool(self._holds & ~BY_ROUND)

    def finish(self) -> None:
        if self._rest:
            self._has_ended = True  # It has said more, which is heard first.
        else:
            self.close()

    def log(self, text: str, count: int) -> None:
        self._server.journal.note(logging.INFO, text, count, peer=self.name)

    def tick(self, now_us: int) -> None:
        """Once a second. While there is no room for what it has sent, nobody else sees its peer leave."""
        if self._user is not None and self._user.is_over(now_us):
            self.end_refused(now_us)
        self._left_ticks = self._left_ticks + 1 if self._holds & BY_BROKER and self._peer_has_closed() else 0
        if self._left_ticks >= LEFT_TICKS and self._attached:  # It may have had more to say meanwhile.
            try:
                self._broker.left(self, now_us, lost=not self._server.stopping)
            except LogFailed as failure:
                self._server.fail(failure)
        if self._charged:
            self._weigh()
        server = self._server
        seconds = server.limits.frame_seconds
        if self._holds or not self._attached or not self._bytes_in or not self._session.reader.unfinished:
            return
        if (server.ticks - self._heard) * TICK_SECONDS > seconds:
            server.journal.note(
                logging.WARNING,
                f"closed {self.protocol} connection: the rest of a message has not come for {seconds} s, the "
                f"limit of frame-seconds",
                peer=self.name,
            )
            self.leave(lost=True)
            self.close()

    def _peer_has_closed(self) -> bool:
        if self._transport is None or self._transport.is_closing():
            return False
        looking = select.poll()
        looking.register(self._transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(looking.poll(0))

    @property
    def has_left(self) -> bool:
        """Whether its peer is gone, and it is here only for what it has sent and there is no room for."""
        return bool(self._holds & BY_BROKER) and self._left_ticks >= LEFT_TICKS and not self._closing

    @property
    def is_gone(self) -> bool:
        """Whether its socket is closed, and it is here only for what it has said and was not heard yet."""
        return self._transport is None

    def say_closing(self) -> None:
        """The server is about to stop; only RQ has a word for it."""
