"""Tracks: what the rules of `common/health.py` look at, out of what is seen of a thing from time to time.

A track is fed with what is so at a moment, and remembers what a rule needs of the past: when something last
moved and how long that takes usually, what has come and died lately, how long syncs took.

Rules that always hold:
  * No clock and no IO: moments are numbers that somebody gives.
  * Memory is bounded: a window keeps a handful of points, and only of what has a backlog or dies.
  * What was before the first look is not known, and counts as nothing.

How it fails: it does not. Counters that go back (another front-end leads) begin anew.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from penstock.common.health import BACKLOG_MIN, FAR_SECONDS, PATIENCE_SECONDS
from penstock.common.health_figures import BrokerFigures, QueueFigures, ReaderFigures
from penstock.control.frames import Fields
from penstock.log.info import SyncInfo
from penstock.model.life import DEAD_REASONS

POINTS: Final = 5
"""A window has so many steps."""

LEARNS: Final = 0.2
"""How much the newest gap counts in what is usual."""

HOUR_SECONDS: Final = 3600.0
DAY_SECONDS: Final = 86400.0


class Pace:
    """When something last moved, and how long that takes usually: a mean in which the newest count most."""

    __slots__ = ("_value", "moved_at", "usual_seconds")

    def __init__(self, value: int, at: float) -> None:
        self._value = value
        self.moved_at = at
        self.usual_seconds = 0.0

    def see(self, value: int, at: float, *, counts: bool = True) -> None:
        """The newest value. Where it does not count, nobody had anything to do since the last one."""
        if value != self._value:
            if counts:
                self.usual_seconds += LEARNS * (at - self.moved_at - self.usual_seconds)
            self._value = value
            self.moved_at = at
        elif not counts:
            self.moved_at = at


_NO_POINTS: Final[list[tuple[float, tuple[int, ...]]]] = []
"""Of all windows that are empty: most queues have two of these."""


class Window:
    """Points of the last seconds, a step apart; the oldest is as old as the window when it is full."""

    __slots__ = ("_points", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._points = _NO_POINTS  # few: two deques would be 1.5 KB a queue

    @property
    def _step(self) -> float:
        return self.seconds / POINTS

    def add(self, at: float, *values: int) -> list[tuple[float, tuple[int, ...], tuple[int, ...]]]:
        """A point, where the last one is old enough. What leaves the window: seconds, and both ends of it."""
        if self._points is _NO_POINTS:
            self._points = []
        points, left = self._points, []
        if not points or at - points[-1][0] >= self._step:
            points.append((at, values))
        while len(points) > 1 and points[1][0] <= at - self.seconds:
            gone, values_then = points.pop(0)
            left.append((points[0][0] - gone, values_then, points[0][1]))
        return left

    @property
    def is_empty(self) -> bool:
        return not self._points

    def then(self) -> tuple[float, tuple[int, ...]]:
        """The oldest point."""
        return self._points[0]

    def middle(self) -> tuple[int, ...]:
        """How it was in the middle of it."""
        return self._points[len(self._points) // 2][1]

    def is_full(self, at: float) -> bool:
        return bool(self._points) and at - self._points[0][0] >= self.seconds - self._step / 2

    def clear(self) -> None:
        self._points = _NO_POINTS


class QueueTrack:
    """One queue, by its rows of the mirror."""

    __slots__ = ("_deaths", "_died_at", "_died_usually", "_growth", "_handed", "_scale", "_settled", "row")

    def __init__(self, row: Fields, at: float, patience: float) -> None:
        self.row = row
        self._scale = patience / PATIENCE_SECONDS
        self._settled = Pace(row["delivered"] - row["held"], at)
        self._handed = Pace(row["delivered"], at)
        self._growth = Window(2.5 * patience)  # ready, accepted, bytes
        self._deaths = Window(2.5 * patience)  # died, ended, and each reason
        self._died_usually = 0.0
        self._died_at = at  # when that was last brought up to date, where the window is empty

    def goes_on(self, row: Fields) -> bool:
        """Whether a row is of the same queue, counted on."""
        return (
            row["identity"] == self.row["identity"]
            and row["delivered"] >= self.row["delivered"]
            and _died(row) >= _died(self.row)
        )

    @property
    def is_restless(self) -> bool:
        """Whether time alone can make something of it."""
        row = self.row
        return bool(row["held"] or row["ready"]) or not self._deaths.is_empty

    def look(
        self,
        row: Fields,
        at: float,
        *,
        blocked: Sequence[float] = (),
        senders_wait: bool = False,
        is_read: bool = False,
        disk_bytes_free: int = 0,
        is_dying: bool = False,
    ) -> QueueFigures:
        """The figures of now. `blocked`: for how long each consumer that does not read has not."""
        before, self.row = self.row, row
        self._settled.see(row["delivered"] - row["held"], at, counts=before["held"] > 0)
        # Where nothing waits, or somebody consumes, nobody is missed.
        is_missed = row["ready"] > 0 and not row["consumers"] and not row["paused"]
        self._handed.see(row["delivered"], at, counts=is_missed)
        grown, grown_late, rate_in, rate_out, full_seconds = self._grown(row, at, disk_bytes_free)
        died, ended, reasons = self._died(before, at, is_dying)
        return QueueFigures(
            ready=row["ready"],
            held=row["held"],
            consumers=row["consumers"],
            bytes=row["bytes"],
            bytes_max=row["bytes_max"],
            paused=row["paused"],
            is_log=is_read and not row["delivered"],
            unsettled_seconds=at - self._settled.moved_at if row["held"] else 0.0,
            usual_seconds=self._settled.usual_seconds,
            undelivered_seconds=at - self._handed.moved_at,
            blocked=len(blocked),
            blocked_seconds=max(blocked, default=0.0),
            senders_wait=senders_wait,
            rate_in=rate_in,
            rate_out=rate_out,
            grown=grown,
            grown_late=grown_late,
            full_seconds=full_seconds,
            died=died,
            died_usually=self._died_usually,
            ended=ended,
            reasons=reasons,
        )

    def _grown(self, row: Fields, at: float, free: int) -> tuple[int, int, float, float, float | None]:
        window, ready = self._growth, row["ready"]
        if ready * 2 < BACKLOG_MIN:
            window.clear()
            return 0, 0, 0.0, 0.0, None
        window.add(at, ready, row["offset_end"], row["bytes"])
        if not window.is_full(at):
            return 0, 0, 0.0, 0.0, None
        then, (ready_then, accepted_then, bytes_then) = window.then()
        seconds = at - then
        rate_in = max(row["offset_end"] - accepted_then, 0) / seconds
        rate_out = max(rate_in - (ready - ready_then) / seconds, 0.0)
        pace = (row["bytes"] - bytes_then) / seconds
        room = min(
            (it for it in (row["bytes_max"] - row["bytes"] if row["bytes_max"] else 0, free) if it > 0),
            default=0,
        )
        full = room / pace if pace > 0 and 0 < room < pace * FAR_SECONDS else None
        return ready - ready_then, ready - window.middle()[0], rate_in, rate_out, full

    def _died(self, before: Fields, at: float, is_dying: bool) -> tuple[int, int, Mapping[str, int]]:
        window, row = self._deaths, self.row
        values = _deaths(row)
        learning = (DAY_SECONDS if is_dying else HOUR_SECONDS) * self._scale
        if window.is_empty:
            if values[0] == _died(before):
                return 0, 0, {}
            self._died_usually *= math.exp(-(at - self._died_at) / learning)
            window.add(at, *_deaths(before))
        for seconds, then, later in window.add(at, *values):
            # What goes on for a day has become usual; while nothing is wrong, that is learned in an hour.
            pace = (later[0] - then[0]) / seconds * window.seconds
            self._died_usually += (1 - math.exp(-seconds / learning)) * (pace - self._died_usually)
        _, (died_then, ended_then, *reasons_then) = window.then()
        if values[0] == died_then:
            window.clear()
            self._died_at = at
            return 0, 0, {}
        reasons = zip(_REASONS, values[2:], reasons_then, strict=True)
        return (
            values[0] - died_then,
            values[1] - ended_then,
            {reason: now - then for reason, now, then in reasons if now > then},
        )


_REASONS: Final = tuple(sorted(reason.label for reason in DEAD_REASONS))


def _died(row: Fields) -> int:
    return sum(row["counts"].get(f"dead:{reason}", 0) for reason in _REASONS)


def _deaths(row: Fields) -> tuple[int, ...]:
    """How many have died, how many deliveries have ended, and the deaths by reason."""
    reasons = [row["counts"].get(f"dead:{reason}", 0) for reason in _REASONS]
    return sum(reasons), row["delivered"] - row["held"], *reasons


class ReaderTrack:
    """One reader, by what the first process says of it."""

    __slots__ = ("_growth", "_pace")

    def __init__(self, reader: Fields, at: float, patience: float) -> None:
        self._pace = Pace(_position(reader), at)
        self._growth = Window(7.5 * patience)

    def look(self, reader: Fields, at: float) -> ReaderFigures:
        lag = sum(it["lag"] for it in reader["queues"])
        self._pace.see(_position(reader), at, counts=lag > 0)
        self._growth.add(at, lag)
        is_full = self._growth.is_full(at)
        return ReaderFigures(
            lag=lag,
            holds=reader["lease_seconds_left"] > 0,
            capped=any(it["capped"] for it in reader["queues"]),
            unmoved_seconds=at - self._pace.moved_at,
            usual_seconds=self._pace.usual_seconds,
            grown=lag - self._growth.then()[1][0] if is_full else 0,
            grown_late=lag - self._growth.middle()[0] if is_full else 0,
        )


def _position(reader: Fields) -> int:
    return sum(it["position"] for it in reader["queues"])


class BrokerTrack:
    """The broker, by what `engine` and `health` of the first process say."""

    __slots__ = ("_syncs",)

    def __init__(self, patience: float) -> None:
        self._syncs = Window(patience / 2)  # how many took how long

    def look(self, engine: Fields, health: Fields, at: float, archive_error: str = "") -> BrokerFigures:
        cluster = engine["cluster"] or {"nodes": [], "checks": []}
        now = engine["sync"]["buckets"]
        self._syncs.add(at, *now)
        before = list(self._syncs.then()[1])
        if sum(now) < sum(before):  # Another log, or another front-end's.
            self._syncs.clear()
            before = now
        lately = SyncInfo(sum(now) - sum(before), buckets=[b - a for a, b in zip(before, now, strict=True)])
        usual = SyncInfo(sum(before), buckets=before)
        return BrokerFigures(
            ready=health["ready"],
            reason=health["reason"],
            failed=engine["failed"] or "",
            full=engine["full"],
            disk_bytes_free=engine["disk_bytes_free"],
            disk_bytes_reserve=engine["disk_bytes_reserve"],
            damage=len(engine["damage"]),
            memory_bytes=engine["memory"]["held_bytes"],
            memory_bytes_max=engine["memory"]["limit_bytes"],
            syncs=lately.count,
            sync_seconds=lately.quantile(0.5),
            syncs_before=usual.count,
            sync_usual_seconds=usual.quantile(0.5),
            nodes=len(cluster["nodes"]),
            nodes_offline=sum(it["state"] == "offline" for it in cluster["nodes"]),
            checks=tuple(_check(it) for it in cluster["checks"] if it["level"] != "ok"),
            archive_error=archive_error,
        )


def _check(check: Fields) -> str:
    advice = f" {check['advice']}" if check["advice"] else ""
    return f"{check['name']}: {check['text']}.{advice}"
