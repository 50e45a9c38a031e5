"""Port: one connection, seen from the broker. Where words come from and deliveries go.

The server implements it with a socket and a protocol's session behind; the broker knows neither.
Everything here is for many messages at once, and nothing waits: a port that cannot take more says
so beforehand, by `bytes_room` and `count_room`, and by telling the broker when it is blocked.
"""

from collections.abc import Sequence
from typing import Protocol

from penstock.model.batch import Batch, Slice
from penstock.model.words import Where


class Port(Protocol):
    name: str
    """Unique among the connections of the day; shown to people and written into the events."""

    protocol: str
    lost_to: Where

    def __hash__(self) -> int: ...

    def bytes_room(self) -> int:
        """How many bytes of payload it can take now."""

    def count_room(self) -> int:
        """How many deliveries it can take now."""

    def deliver(self, queue: str, slices: list[Slice], now_us: int, dead: bool) -> None:
        """Messages that it holds from now on. It may write their payloads later, from where they are."""

    def consuming(self, queue: str, dead: bool) -> None:
        """Its demand for a queue is in force."""

    def decline(self, queue: str, dead: bool) -> None:
        """Its demand for a single message will not be met."""

    def delivered(self, tickets: Sequence[int]) -> None:
        """What it sent under these tickets is durable (or, for requests, with a consumer)."""

    def replies(self, tickets: Sequence[int], answers: Batch) -> None: ...

    def undelivered(self, tickets: Sequence[int]) -> None: ...

    def refused(self, count: int) -> None:
        """So many messages that it sent without tickets are not stored, and will not be."""

    def synced(self) -> None:
        """Everything that it had said when it asked for this is durable, but for what was refused."""

    def broadcast(self, queue: str, batch: Batch) -> None: ...

    def hold(self, held: bool) -> None:
        """Read nothing more from it for now, or go on reading."""

    def finish(self) -> None:
        """It wanted to leave, and nothing is pending any more: close it."""

    def log(self, text: str, count: int) -> None:
        """Something that a person should be able to find out about this connection."""
