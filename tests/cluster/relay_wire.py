"""A link of the relay of which a test says every byte: TLS, the greeting, and what comes behind it."""

import json
import ssl

from penstock.cluster.frames import HEADER_BYTES, Frame, Hello, Kind, Reader
from penstock.cluster.trust import Asking, Trust
from penstock.cluster.trust import Leader as Place
from tests.server.harness import Wire


class RelayWire(Wire):
    def __init__(self, place: Place, trust: Trust | None = None) -> None:
        """`trust`: what to show, where that is not what the leader expects."""
        super().__init__((place.address.host, place.address.port))
        self.place = place
        context = (trust or place.trust).client
        self.socket: ssl.SSLSocket = context.wrap_socket(self.socket)

    def __enter__(self) -> "RelayWire":
        return self

    def _receive(self) -> bytes:
        try:
            return super()._receive()
        except ssl.SSLError:
            return b""

    def frame(self) -> Frame:
        head = self.hear(HEADER_BYTES)
        (frame,) = Reader().feed(head + self.hear(int.from_bytes(head[:4], "little")))
        return frame

    @property
    def certificate(self) -> bytes:
        return self.socket.getpeercert(binary_form=True) or b""

    def prove(self, hello: Hello) -> None:
        """All but the welcome."""
        asking = Asking(self.place, hello)
        self.say(asking.hello())
        self.say(asking.prove(self.frame(), self.certificate))

    def welcome(self) -> str:
        """Empty, or why not."""
        frame = self.frame()
        assert frame.kind is Kind.WELCOME
        return str(json.loads(bytes(frame.body))["refused"]) if len(frame.body) else ""
