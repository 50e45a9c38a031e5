"""Sayings: what named readers say about themselves, and when each was last seen to move.

A reader is a position in the log and a lease. What kind of program it is, which batch it has done, and why it
does not get on, only the program knows: it may say so with its lease (`about`), and it is kept here, in this
process, until its reader is gone. After a restart of the broker nothing is known until it is said again.

The other way go wishes: what people want of the program, which hears it in the answer when it next says
something, and then says the number of the wish that it has done.

Rules that always hold:
  * What is said replaces what was said under the same name; null takes it back; the rest stays.
  * A wish is kept until it is done or another one takes its place: an answer that is lost loses no wish.
  * So many readers are remembered, and no more: those that were heard of last.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

READERS_MAX: Final = 10_000
STATES: Final = ("running", "paused", "retrying", "failed", "stopped")
"""Of a reader's program, as it says itself."""


class Wish(NamedTuple):
    """What somebody wants of the program. Numbers grow."""

    action: str
    number: int


class Saying(NamedTuple):
    """One reader."""

    about: Mapping[str, Any]
    positions: Mapping[str, int]
    moved_us: int = 0  # when it was last seen to move; 0: never
    moved: int = 0  # by how much
    wish: Wish | None = None  # that is not done yet


NOTHING: Final = Saying({}, {})


class Sayings:
    def __init__(self) -> None:
        self._by_name: OrderedDict[str, Saying] = OrderedDict()

    def of(self, name: str) -> Saying:
        return self._by_name.get(name, NOTHING)

    def said(self, name: str, about: Mapping[str, Any], now_us: int) -> None:
        """A reader tells of itself."""
        known = self.of(name)
        told = {**known.about, **about, "at_us": now_us}
        done = known.wish is not None and (about.get("wish") or 0) >= known.wish.number
        told = {key: it for key, it in told.items() if it is not None}
        self._keep(name, known._replace(about=told, wish=None if done else known.wish))

    def wished(self, name: str, action: str, now_us: int) -> None:
        """Somebody wants something of a reader's program."""
        self._keep(name, self.of(name)._replace(wish=Wish(action, now_us)))

    def is_at(self, name: str, positions: Mapping[str, int], now_us: int) -> None:
        """A reader says where it is."""
        known = self.of(name)
        grown = sum(max(at - known.positions.get(queue, at), 0) for queue, at in positions.items())
        moved = (now_us, grown) if grown else (known.moved_us, known.moved)
        self._keep(name, Saying(known.about, dict(positions), *moved, known.wish))

    def _keep(self, name: str, saying: Saying) -> None:
        self._by_name[name] = saying
        self._by_name.move_to_end(name)
        if len(self._by_name) > READERS_MAX:
            self._by_name.popitem(last=False)

    def forget_others(self, names: Collection[str]) -> None:
        """These are all readers that there are."""
        for name in self._by_name.keys() - names:
            del self._by_name[name]
