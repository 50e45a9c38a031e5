"""History: how fast queues have moved and what has waited in them, a moment for every round of the feed.

The rules that always hold: a queue has at most `MOMENTS_MAX` moments, the oldest are forgotten first; a queue
in which nothing has happened since we look has none, so that a hundred thousand idle queues cost nothing;
and a queue that is gone is forgotten.

Three floats of four bytes make a moment. They are for drawing: what is written in digits comes from the API.
"""

from array import array
from collections.abc import Iterable
from typing import Final

from penstock.client.http_core import Answer

MOMENTS_MAX: Final = 240
FIELDS: Final = ("rate_in", "rate_out", "backlog")


class Track:
    """The moments of one queue, or of all of them together."""

    def __init__(self) -> None:
        self._values = array("f")

    def add(self, rate_in: float, rate_out: float, backlog: int) -> None:
        self._values.extend((rate_in, rate_out, backlog))
        if len(self._values) > MOMENTS_MAX * len(FIELDS):
            del self._values[: len(FIELDS)]

    def of(self, field: str) -> "array[float]":
        """One of `FIELDS`, the newest last."""
        return self._values[FIELDS.index(field) :: len(FIELDS)]


def backlog_of(queue: Answer) -> int:
    """What is not settled yet: what waits and what consumers have."""
    waiting: int = queue["ready"] + queue["held"]
    return waiting


class History:
    def __init__(self) -> None:
        self.total = Track()
        self._tracks: dict[str, Track] = {}

    def add(self, queues: Iterable[Answer]) -> None:
        """One round: every queue that there is."""
        tracks: dict[str, Track] = {}
        total_in = total_out = 0.0
        total_backlog = 0
        for queue in queues:
            name, moment = queue["name"], (queue["rate_in"], queue["rate_out"], backlog_of(queue))
            track = self._tracks.get(name)
            if track is not None or any(moment):
                tracks[name] = track = track or Track()
                track.add(*moment)
            total_in += moment[0]
            total_out += moment[1]
            total_backlog += moment[2]
        self._tracks = tracks
        self.total.add(total_in, total_out, total_backlog)

    def of(self, name: str) -> Track:
        return self._tracks.get(name) or Track()
