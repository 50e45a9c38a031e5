"""Health figures: plain numbers of a queue, a reader or the broker, which the rules of `health.py` look at.

Whoever watches gathers them (`http/watching/tracks.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """One queue at a moment. `lately` is a window of 2.5 times the patience."""

    ready: int = 0
    held: int = 0
    consumers: int = 0
    bytes: int = 0
    bytes_max: int = 0  # max-bytes; 0: no bound
    paused: bool = False
    is_log: bool = False  # readers with a name read it, and nobody has ever consumed it
    unsettled_seconds: float = 0.0  # since a delivery has ended, or the first one began
    usual_seconds: float = 0.0  # so long passes between two endings, usually
    undelivered_seconds: float = 0.0  # since anything was handed out
    blocked: int = 0  # consumers that do not read
    blocked_seconds: float = 0.0  # the longest of them
    senders_wait: bool = False
    rate_in: float = 0.0  # lately
    rate_out: float = 0.0
    grown: int = 0  # by so many messages, lately; 0 where the window is not full yet
    grown_late: int = 0  # in the second half of it
    full_seconds: float | None = None  # until there is no room, at this pace
    died: int = 0  # lately
    died_usually: float = 0.0
    ended: int = 0  # deliveries, lately
    reasons: Mapping[str, int] | None = None  # of those that died


@dataclass(frozen=True, slots=True)
class ReaderFigures:
    """A named reader at a moment."""

    lag: int = 0
    holds: bool = True  # its lease goes on
    capped: bool = False
    unmoved_seconds: float = 0.0  # since it has read anything
    usual_seconds: float = 0.0
    grown: int = 0  # its lag, lately
    grown_late: int = 0


@dataclass(frozen=True, slots=True)
class BrokerFigures:
    """The broker itself at a moment."""

    ready: bool = True
    reason: str = ""  # why it is not
    failed: str = ""
    full: bool = False
    disk_bytes_free: int = 1
    disk_bytes_reserve: int = 0
    damage: int = 0
    memory_bytes: int = 0
    memory_bytes_max: int = 0
    syncs: int = 0  # lately
    sync_seconds: float = 0.0  # half of them took that long or longer
    syncs_before: int = 0
    sync_usual_seconds: float = 0.0
    nodes: int = 0  # of NATS
    nodes_offline: int = 0
    checks: tuple[str, ...] = ()  # of the NATS cluster, that found something; each with its text
    archive_error: str = ""  # why queues do not become tables
