"""LeaderLink: the leader's end of a link.

It knows the connections of its front-end by their numbers, and says their frames. What frames mean is the
host's business (`host.py`).

Rules that always hold:
  * Until it has proved who it is (`trust.py`), a peer can say nothing else, and not for long.
  * While the buffer of the link is full, all connections behind it are blocked.
"""

from array import array
from typing import TYPE_CHECKING, Final

from penstock.broker.doors import Pace
from penstock.cluster.columns import pack_batches
from penstock.cluster.frames import (
    COUNT,
    Frame,
    Hello,
    Kind,
    encode_frame,
    encode_json,
    text_bytes,
    violation,
)
from penstock.cluster.lanes import AGAIN, MAIN
from penstock.cluster.link import Link
from penstock.cluster.remote_port import RemotePort
from penstock.cluster.trust import Answering
from penstock.cluster.word_codec import NO_NUMBER
from penstock.model.batch import Batch

if TYPE_CHECKING:
    from penstock.cluster.door import RelayDoor
    from penstock.cluster.host import RelayHost

HELLO_SECONDS: Final = 5.0
LINK_BUFFER_BYTES: Final = 4 << 20
"""What may wait in the buffer of one link. Beyond, all connections behind it count as blocked."""


class LeaderLink(Link):
    """The leader's end of a link."""

    _host: "RelayHost"  # whose it is, once its hello was accepted

    def __init__(self, door: "RelayDoor") -> None:
        super().__init__(door.rounds)
        self._door = door
        self._answering = Answering(door.trust, door.name)
        self.front_end = ""  # empty until its hello was accepted
        self.life = ""
        self.peer = ""  # its host
        self.ports: dict[int, RemotePort] = {}
        self.epochs = {MAIN: 0, AGAIN: 0}
        self.words_number = NO_NUMBER  # the last that came
        self.is_full = False
        self.pace = Pace()  # of the queues that its clients make
        self._shout: tuple[str, Batch, list[int]] | None = None  # a broadcast, and for whom

    def on_open(self) -> None:
        assert self._transport is not None
        self._transport.set_write_buffer_limits(high=LINK_BUFFER_BYTES)
        self._loop.call_later(HELLO_SECONDS, self._is_it_late)

    def _is_it_late(self) -> None:
        if not self.front_end:
            self.close(f"no greeting within {HELLO_SECONDS} s")

    def belong_to(self, host: "RelayHost", hello: Hello) -> None:
        """Its hello is accepted."""
        self._host = host
        self.front_end, self.life = hello.front_end, hello.life

    def on_frame(self, frame: Frame) -> None:
        if self.front_end:
            self._host.hear(self, frame)
            return
        heard = self._answering.hear(frame)
        if isinstance(heard, bytes):
            self.write(heard)
        else:
            self._door.greet(self, heard)

    def on_received(self) -> None:
        if self.front_end:
            self._host.confirm_soon()

    def on_lost(self, why: str) -> None:
        if self.front_end:
            self._host.link_lost(self, why)
        else:
            self._door.lost(self, why)

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

    def is_durable(self, queue: str, offset_end: int) -> bool:
        return self._host.is_durable(queue, offset_end)

    def write_when_durable(self, port: RemotePort, frame: bytes) -> None:
        self._host.write_when_durable(self, port, frame)

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
                COUNT.pack(len(ports)),
                array("I", ports).tobytes(),
                *pack_batches([batch], batch.protocol),
            )
        )
