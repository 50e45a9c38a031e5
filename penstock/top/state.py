"""State: what the program knows at the moment, for all of its screens."""

import time

from penstock.top.feed import Snapshot, Trouble
from penstock.top.history import History


class State:
    """The last snapshot, when it came, what has happened since, and the history."""

    def __init__(self, first: Snapshot) -> None:
        self.snapshot = first
        self.trouble: Trouble | None = None
        self.answered = time.monotonic()
        self.history = History()
        self.history.add(first.queues)

    def take(self, found: Snapshot | Trouble) -> None:
        """A round of the feed. In trouble, what is known stays as it is."""
        if isinstance(found, Trouble):
            self.trouble = found
            return
        self.snapshot, self.trouble, self.answered = found, None, time.monotonic()
        self.history.add(found.queues)
