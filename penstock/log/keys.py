"""Keys: which transactions are remembered, of all that were ever committed.

A key that comes again while it is remembered adds nothing and gets the first answer; one that was forgotten
is a new key, and its messages would be stored again. Memory is bounded, so that something must be forgotten:

    kind      what stands before the first slash of a key. Kinds do not push out each other's keys
    series    what stands before the last slash. A stream of batches is one: `spark/QUERY/7`, `spark/QUERY/8`;
              and so is a piece of each, which has its name behind the number: `spark/QUERY/7/out`

Of each kind the newest `TRANSACTIONS_MAX` keys are remembered, whatever they are (of some kinds fewer, see
`TRANSACTIONS_MAX_OF`). That is enough for a repetition that comes soon after its first try. One that comes
late is the last batch of a stream whose writer was down for days, while others went on: so beyond those, the
newest key of each of `SERIES_MAX` series is remembered, of those that were used last.

The rule that always holds: what is remembered is a function of the keys and their order. A snapshot has both,
so that nothing else of this is written down.
"""

import re
from collections import deque
from typing import Final

TRANSACTIONS_MAX: Final = 10_000
SERIES_MAX: Final = 10_000
TRANSACTIONS_MAX_OF: Final = {"relay/": 256, "move/": 256}
"""Front-ends number what they relay, in the order of storing: the newest of a series tells of all others.
A key of messages that are moved to another log never comes again."""

_PIECE: Final = re.compile("(.*/)[0-9]+/(.*[^0-9/][^/]*)")
"""A batch's number, and the name of a piece of it behind that."""


class Keys:
    """The keys of one kind."""

    def __init__(self, kind: str = "") -> None:
        self._line_max = TRANSACTIONS_MAX_OF.get(kind, TRANSACTIONS_MAX)
        self._line: deque[str] = deque()
        self._newest: dict[str, str] = {}  # of each series
        self._alone: dict[str, None] = {}  # newest of their series that are not in the line any more

    def add(self, key: str) -> list[str]:
        """One more key, which is not remembered yet; those that are forgotten for it."""
        forgotten: list[str] = []
        former = self._newest.get(_series(key))
        if former in self._alone:
            del self._alone[former]
            forgotten.append(former)
        self._newest[_series(key)] = key
        self._line.append(key)
        if len(self._line) > self._line_max:
            oldest = self._line.popleft()
            if self._newest[_series(oldest)] == oldest:
                self._alone[oldest] = None
            else:
                forgotten.append(oldest)
        if len(self._alone) > SERIES_MAX:
            longest = next(iter(self._alone))
            del self._alone[longest], self._newest[_series(longest)]
            forgotten.append(longest)
        return forgotten

    def newest(self, series: str) -> str | None:
        """The key that was added last of a series, which ends with its slash."""
        return self._newest.get(series)


def kind_of(key: str) -> str:
    return key[: key.find("/") + 1]


def _series(key: str) -> str:
    piece = _PIECE.fullmatch(key)
    return key[: key.rfind("/") + 1] if piece is None else f"{piece[1]}/{piece[2]}"
