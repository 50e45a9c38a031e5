"""Survey: which queues a report is about, how they stand, and how far their events can be read.

What the broker says of a queue is of one moment: how many messages live in it, and how many events have
happened. Events are read up to exactly that number, so that what lives then follows for any moment before:
it is what lives now, without what has come since, with what has gone since. (While messages are written at
that very moment, a few of them may be counted on the wrong side.)

How it fails: `NoQueues` where a pattern fits none, and whatever the asker raises.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from penstock.errors import PenstockError

SYNC_SECONDS_MAX: Final = 5.0
"""Events are in the files within milliseconds, unless the disk is full."""

PAGE: Final = 10_000


class NoQueues(PenstockError):
    """There is nothing to report on."""


class Asks(Protocol):
    """Somebody who asks the HTTP API: the commands' own `Admin`, or Spark's `Broker`."""

    def get(self, *segments: str, **query: object) -> Any: ...


class Facts(NamedTuple):
    """A queue at the moment of the survey. Ends are exclusive."""

    queue: str
    event_start: int  # retention has removed what was before
    event_end: int
    unsynced: int  # events behind the end, which cannot be read yet
    ready: int
    held: int
    delayed: int
    dead: int
    consumers: int
    paused: bool

    @property
    def living(self) -> int:
        return self.ready + self.held + self.delayed + self.dead

    @property
    def events(self) -> int:
        """How many can be read."""
        return self.event_end - self.event_start

    def columns(self) -> dict[str, Any]:
        """As columns of the report's tables."""
        return {
            "queue": self.queue,
            "event_kept": self.event_start,
            "unsynced_events": self.unsynced,
            "ready_now": self.ready,
            "held_now": self.held,
            "delayed_now": self.delayed,
            "dead_now": self.dead,
            "consumers_now": self.consumers,
            "paused": self.paused,
        }


def survey(asks: Asks, patterns: Sequence[str] = ()) -> list[Facts]:
    """The queues that fit one of the patterns, or all of them; by name."""
    rows: dict[str, dict[str, Any]] = {}
    for pattern in patterns or (None,):
        found = {row["name"]: row for row in _pages(asks, "queues", match=pattern)}
        if pattern is not None and not found:
            raise NoQueues(f"no queue has a name that fits {pattern!r}; `penstock queues` lists them")
        rows |= found
    synced = _synced(asks, rows.values())
    return [
        Facts(
            name,
            row["event_start"],
            min(row["event_end"], synced.get(name, row["event_start"])),
            max(row["event_end"] - synced.get(name, row["event_start"]), 0),
            *(row[field] for field in ("ready", "held", "delayed", "dead", "consumers", "paused")),
        )
        for name, row in sorted(rows.items())
    ]


def _pages(asks: Asks, what: str, **query: object) -> Iterable[dict[str, Any]]:
    after: str | None = None
    while True:
        page = asks.get(what, after=after, limit=PAGE, **query)
        yield from page["queues"]
        after = page["next"]
        if after is None:
            return


def _synced(asks: Asks, rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Up to where each queue's events can be read: waits until that is as far as the rows say."""
    wanted = {row["name"]: row["event_end"] for row in rows}
    deadline = time.monotonic() + SYNC_SECONDS_MAX
    while True:
        synced = {row["name"]: row["event_end"] for row in _pages(asks, "offsets") if row["name"] in wanted}
        there = all(synced.get(name, 0) >= end for name, end in wanted.items())
        if there or time.monotonic() > deadline:
            return synced
        time.sleep(0.05)


def position_before(asks: Asks, queue: str, offset: int, event_start: int) -> int:
    """A number of an event from which on all events of a message are there, as far as they are kept."""
    page = asks.get("queues", queue, "messages", limit=1, **{"from": offset})
    if not page["messages"] or page["messages"][0]["offset"] != offset:
        return event_start  # Retention has taken it; some of its events may be there.
    accepted = page["messages"][0]["time"]
    position: int = asks.get("queues", queue, "offset", time=accepted, view="events")["offset"]
    return max(position, event_start)
