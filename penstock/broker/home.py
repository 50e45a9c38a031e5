"""Home: where a connection's words go, seen from the server.

That is the broker; or, on a front-end of a cluster, the way to the broker that leads.
"""

from collections.abc import Iterable
from typing import Protocol

from penstock.broker.port import Port
from penstock.model.policy import Policies
from penstock.model.words import Command


class Home(Protocol):
    """Each of these is what `Broker` says of it."""

    def attach(self, port: Port) -> None: ...

    def detach(self, port: Port, now_us: int, *, lost: bool = True) -> None: ...

    def handle(self, port: Port, commands: Iterable[Command], now_us: int) -> None: ...

    def blocked(self, port: Port, blocked: bool) -> None: ...

    def idle(self, port: Port, idle: bool) -> None: ...

    def drain(self) -> None: ...

    def dismiss(self) -> None: ...

    @property
    def is_drained(self) -> bool: ...

    def end_requests(self, now_us: int) -> None: ...

    def set_policies(self, policies: Policies) -> None: ...

    def turn(self, now_us: int) -> None: ...

    def tick(self, now_us: int) -> None: ...
