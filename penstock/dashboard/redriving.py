"""Redriving from the dashboard: in portions, so that there is progress to show and a way to stop.

Rules that always hold:
  * Nothing is chosen here: reason, condition and limit go to the API, which judges and moves.
  * It ends. Without a condition no more letters are moved than were counted before; with one, the walk goes
    along the offsets and passes each once, also where a letter dies again meanwhile.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from penstock.control.frames import Fields
from penstock.dashboard.caller import Caller, queue_path

PORTION: Final = 10_000
LISTED: Final = 50
"""Of those that fit, so many are shown."""

BAD_RECORD: Final = "bad-record"


@dataclass(frozen=True, slots=True)
class Wish:
    """Which dead letters."""

    reason: str | None = None
    where: str | None = None
    limit: int | None = None

    def fields(self) -> Fields:
        given = {"reason": self.reason, "where": self.where, "limit": self.limit}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(slots=True)
class Progress:
    """What a wish has come to so far."""

    looked_at: int = 0
    matched: int = 0
    redriven: int = 0
    ranges: tuple[tuple[int, int], ...] = ()  # where the first of those that fit are


async def count(api: Caller, queue: str, wish: Wish) -> AsyncIterator[Progress]:
    """A dry run: what would be redriven, more of it with each portion."""
    progress = Progress()
    at: int | None = 0
    while at is not None:
        left = None if wish.limit is None else wish.limit - progress.matched
        if left == 0:
            break
        answer = await api.post(
            queue_path(queue, "redrive"),
            {
                **wish.fields(),
                **({} if left is None else {"limit": left}),
                "dry_run": True,
                "from": at,
                "scan_limit": PORTION,
                "list_limit": LISTED,
            },
        )
        progress.looked_at += answer["looked_at"]
        progress.matched += answer["matched"]
        if not progress.ranges:
            progress.ranges = tuple((first, end) for first, end in answer["ranges"])
        at = answer["next"]
        yield progress


async def redrive(api: Caller, queue: str, wish: Wish, matched: int) -> AsyncIterator[Progress]:
    """Do it, for no more letters than have matched; who leaves the loop early stops it."""
    progress = Progress()
    at: int | None = 0
    while at is not None and progress.redriven < matched:
        left = matched - progress.redriven
        fields: Fields = {**wish.fields(), "limit": min(left, PORTION)}
        if wish.where is not None:
            fields |= {"limit": left, "from": at, "scan_limit": PORTION}
        answer = await api.post(queue_path(queue, "redrive"), fields)
        progress.looked_at += answer["looked_at"]
        progress.redriven += answer["redriven"]
        # Without a condition, those that died first come first, as often as is asked.
        at = answer["next"] if wish.where is not None else (0 if answer["redriven"] else None)
        yield progress
