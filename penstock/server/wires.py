"""Wires: a connection for each of the three protocols, with its session and the words that only it has."""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from penstock.model.batch import Batch, Slice
from penstock.model.words import Command, Where
from penstock.protocols import phpmq, phpmq_session, rq, rq_controller, sspq_session
from penstock.protocols.errors import PeerViolation
from penstock.protocols.rq_session import Connection as RqState
from penstock.server.connection import Connection

if TYPE_CHECKING:
    from penstock.server.server import Server
    from penstock.server.settings import Limits, Listener

FOREIGN = (b"GET ", b"HEAD", b"POST", b"PUT ", b"DELE", b"OPTI", b"H01", b"\x55\x99")
"""How streams of HTTP, PHPMQ and SSPQ begin. An RQ session would skip them as commands that it does not know,
and whoever came to the wrong port would wait for ever."""
FOREIGN_BYTES_MAX = max(map(len, FOREIGN))


# One for all connections: these are checked where they are made, and take 0.4 KB with what follows from them.


@lru_cache(1)
def _phpmq_limits(limits: "Limits") -> phpmq.Limits:
    return phpmq.Limits(
        payload_bytes_max=limits.payload_bytes_max,
        queue_name_bytes_max=limits.queue_name_bytes_max,
        packets_per_message_max=limits.packets_per_message_max,
        windows_max=limits.consumed_queues_max,
    )


@lru_cache(1)
def _rq_limits(limits: "Limits") -> rq.Limits:
    return rq.Limits(
        payload_bytes_max=limits.payload_bytes_max,
        queue_name_bytes_max=limits.queue_name_bytes_max,
        consumed_queues_max=limits.consumed_queues_max,
    )


class _Queueing(Connection):
    """What SSPQ and PHPMQ have in common: nothing is answered but by messages.

    Who has said nothing yet has no session, which takes 1.3 KB: it is made when somebody looks for it."""

    __slots__ = ()

    _session: sspq_session.ServerSession | phpmq_session.ServerSession

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name != "_session":
                raise AttributeError(name)
            self._session = self._new_session()
            return self._session

    def _new_session(self) -> sspq_session.ServerSession | phpmq_session.ServerSession:
        raise NotImplementedError

    def _receive(self, data: bytes | memoryview, now_us: int) -> tuple[list[Command], bytes]:
        return self._session.receive(data), self._session.reader.rest

    def _salvage(self) -> list[Command]:
        return self._session.salvage()

    def _delivery(self, queue: str, slices: list[Slice], now_us: int, dead: bool) -> list[bytes | memoryview]:
        return [self._session.deliver(queue, slices, now_us, dead)]


class SspqConnection(_Queueing):
    __slots__ = ()

    _session: sspq_session.ServerSession
    protocol = "sspq"
    lost_to = sspq_session.ServerSession.LOST_TO

    def _new_session(self) -> sspq_session.ServerSession:
        limits = self._server.limits
        return sspq_session.ServerSession(self._listener.queue, payload_bytes_max=limits.payload_bytes_max)

    def synced(self) -> None:
        self._write(self._session.synced(refused=bool(self._refused)))
        self._refused = 0

    def decline(self, queue: str, dead: bool) -> None:
        if self._session.state in (sspq_session.State.WAITING, sspq_session.State.WAITING_DEAD):
            self._write(self._session.decline())


class PhpmqConnection(_Queueing):
    __slots__ = ()

    _session: phpmq_session.ServerSession
    protocol = "phpmq"
    lost_to = phpmq_session.ServerSession.LOST_TO

    def _new_session(self) -> phpmq_session.ServerSession:
        return phpmq_session.ServerSession(
            ttl_packet=self._listener.ttl_packet,
            consume=self._listener.consume,
            limits=_phpmq_limits(self._server.limits),
        )

    def _delivery(self, queue: str, slices: list[Slice], now_us: int, dead: bool) -> list[bytes | memoryview]:
        return self._session.delivery(queue, slices, now_us, dead)

    def synced(self) -> None:
        self._write(self._session.synced(self._refused))
        self._refused = 0


class RqConnection(Connection):
    __slots__ = ("_first", "_was_idle")

    _session: rq_controller.ControllerSession
    protocol = "rq"
    lost_to = Where.PLACE

    def __init__(self, server: "Server", listener: "Listener", has_place: bool = True) -> None:
        super().__init__(server, listener, has_place)
        self._session = rq_controller.ControllerSession(server.now_us(), limits=_rq_limits(server.limits))
        self._was_idle = False
        self._first = b""  # bytes that it has said, as many as tell whether it is a stream of RQ

    def _refuse(self) -> None:
        assert self._transport is not None
        self._transport.write(self._session.full())

    def _receive(self, data: bytes | memoryview, now_us: int) -> tuple[list[Command], bytes]:
        if len(self._first) < FOREIGN_BYTES_MAX:
            self._first += bytes(data[: FOREIGN_BYTES_MAX - len(self._first)])
            if self._first.startswith(FOREIGN):
                raise PeerViolation(
                    self.protocol, "this is another protocol", position=0, offending=self._first
                )
        commands = self._session.receive(data, now_us)
        self._write(self._session.take_output())
        if self._was_idle:
            self._mark(self._session.idle)
        return commands, self._session.reader.rest

    def _salvage(self) -> list[Command]:
        self._write(self._session.take_output())
        return self._session.salvage()

    def _mark(self, idle: bool) -> None:
        if idle != self._was_idle:
            self._was_idle = idle
            self._broker.idle(self, idle)
            self._server.journal.note(
                logging.INFO,
                "does not answer pings: no new work" if idle else "answers again",
                peer=self.name,
            )

    def tick(self, now_us: int) -> None:
        super().tick(now_us)
        if not self._attached:
            return
        self._session.tick(now_us)
        self._write(self._session.take_output())
        self._mark(self._session.idle)

    def about(self, now_us: int) -> dict[str, object]:
        return {**super().about(now_us), "pulse": self._session.pulse}

    def count_room(self) -> int:
        return self._session.free_deliveries()

    def _delivery(self, queue: str, slices: list[Slice], now_us: int, dead: bool) -> list[bytes | memoryview]:
        return [self._session.deliver(queue, slices, dead=dead)]

    def consuming(self, queue: str, dead: bool) -> None:
        self._write(self._session.consuming(queue, dead=dead))

    def delivered(self, tickets: Sequence[int]) -> None:
        self._write(self._session.delivered(tickets))

    def replies(self, tickets: Sequence[int], answers: Batch) -> None:
        self._write(self._session.replies(tickets, answers))

    def undelivered(self, tickets: Sequence[int]) -> None:
        self._write(self._session.undelivered(tickets))

    def broadcast(self, queue: str, batch: Batch) -> None:
        # Nobody keeps it for later: not for a node that does not read what it has.
        if self.bytes_room() > 0:
            self._write(self._session.broadcast(queue, batch))
        else:
            self._server.memory.broadcasts_lost += len(batch)
            self.log(f"queue {queue!r}: it does not read, broadcasts to it are lost", len(batch))

    def say_closing(self) -> None:
        if self._session.connection is RqState.OPEN:
            self._write(self._session.closing())


CONNECTIONS: dict[str, type[Connection]] = {
    "sspq": SspqConnection,
    "phpmq": PhpmqConnection,
    "rq": RqConnection,
}
