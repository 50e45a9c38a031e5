"""Guesses: whoever shows wrong tokens has to wait, longer each time.

Counted by address and by the name that tokens claim, since either can be many. Whoever has shown the right
one from an address may go on from there: the guesses of somebody else lock nobody out who is in.

Rules that always hold:
  * `FREE` wrong ones cost nothing; from then on the next one is not looked at for 1, 2, 4, … seconds, up to
    `WAIT_SECONDS_MAX`. After `FORGET_SECONDS` without one, all is forgotten.
  * The same wrong one again is no new guess: a program with an old token locks nobody out.
  * What is kept is bounded: the oldest go first.
"""

import math
import time
from collections.abc import Callable
from typing import Any, Final

FREE: Final = 10
WAIT_SECONDS_MAX: Final = 60
FORGET_SECONDS: Final = 600.0
KEPT_MAX: Final = 10_000


class Guesses:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrong: dict[tuple[str, str], tuple[int, float]] = {}  # how often, and when last
        self._known_wrong: dict[bytes, None] = {}  # digests
        self._trusted: dict[tuple[bytes, str], None] = {}  # digests of right tokens, from where

    def wait_seconds(self, address: str, name: str) -> int:
        """For how long nothing is looked at that comes from there, or claims that name; 0: go on."""
        return max(self._wait(("address", address)), self._wait(("name", name)) if name else 0)

    def _wait(self, key: tuple[str, str]) -> int:
        count, last = self._wrong.get(key, (0, 0.0))
        if count < FREE:
            return 0
        passed = self._clock() - last
        if passed > FORGET_SECONDS:
            del self._wrong[key]
            return 0
        wait = min(1 << min(count - FREE, 6), WAIT_SECONDS_MAX)
        return max(math.ceil(wait - passed), 0)

    def failed(self, digest: bytes, address: str, name: str) -> None:
        _make_room(self._known_wrong)
        self._known_wrong[digest] = None
        for key in (("address", address), ("name", name)):
            if key[1]:
                count, _ = self._wrong.pop(key, (0, 0.0))
                _make_room(self._wrong)
                self._wrong[key] = count + 1, self._clock()

    def is_known_wrong(self, digest: bytes) -> bool:
        return digest in self._known_wrong

    def forget_wrong(self) -> None:
        """What was wrong so far may be right now."""
        self._known_wrong.clear()

    def trust(self, digest: bytes, address: str) -> None:
        self._trusted.pop((digest, address), None)
        _make_room(self._trusted)
        self._trusted[digest, address] = None

    def is_trusted(self, digest: bytes, address: str) -> bool:
        return (digest, address) in self._trusted


def _make_room(kept: dict[Any, Any]) -> None:  # whatever is kept
    while len(kept) >= KEPT_MAX:
        del kept[next(iter(kept))]
