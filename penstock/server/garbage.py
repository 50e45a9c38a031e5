"""Garbage: how often the interpreter looks for cycles among all old objects, while no message moves.

Moving messages makes no cycles, so that this finds next to nothing; and it takes 70 ms for a million objects,
which a cache full of small blocks has, or a hundred thousand queues. It is done ten times less than usual.
Where it took long, what it found alive is set aside (`gc.freeze`) and not looked at the next times. Cycles
among that are found when it is taken back, `TAKE_BACK_SECONDS` later at the earliest.
"""

import gc
import time
from typing import Any, Final

THRESHOLDS: Final = (700, 10, 100)
LONG_SECONDS: Final = 0.01
TAKE_BACK_SECONDS: Final = 3600.0


class Garbage:
    def __init__(self) -> None:
        self._began = 0.0
        self._taken_back = time.monotonic()

    def start(self) -> None:
        """What is there now stays: there is no need to look at it again."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)
        gc.callbacks.append(self._look)

    @staticmethod
    def sweep() -> None:
        """What a crowd had that has left goes back to the system.

        The interpreter gives memory back by the megabyte, where nothing is left in it; with a collection it
        lets go of what it keeps for the next objects, too.
        """
        gc.collect()

    def stop(self) -> None:
        if self._look in gc.callbacks:
            gc.callbacks.remove(self._look)

    def _look(self, phase: str, info: dict[str, Any]) -> None:  # Any: what the interpreter tells
        if phase == "start":
            self._began = time.monotonic()
        elif info["generation"] == 2:
            now = time.monotonic()
            if now - self._taken_back > TAKE_BACK_SECONDS:
                self._taken_back = now
                gc.unfreeze()
            elif now - self._began > LONG_SECONDS:
                gc.freeze()
