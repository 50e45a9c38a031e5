"""Samples: how the queues stood over the last hour, for charts. Kept beside the mirror, in memory only.

Time is cut into slots of `STEP_SECONDS`. A queue has a row for each slot in which it has changed: its
counters and its state as they were seen last in that slot. Between two rows nothing has changed, so that a
queue at rest costs nothing, and what stands in a row holds until the next one.

Rules that always hold:
  * A slot that is over does not change any more.
  * Of what is older than `SECONDS_MAX` one row is kept: how the queue stood when that time began.
  * There are at most `ROWS_MAX` rows, 32 MB: 1,000 queues that change all the time have their whole hour.
    Where there are more, all are cut to a shorter time, as often as needed, and never below a minute.

How it fails: it does not. What was before this process was started is not known, and not shown.
"""

from array import array
from collections.abc import Iterator
from typing import Final, NamedTuple

from penstock.control.frames import Fields

STEP_SECONDS: Final = 10
SECONDS_MAX: Final = 3600
SLOTS_MAX: Final = SECONDS_MAX // STEP_SECONDS
SLOTS_MIN: Final = 60 // STEP_SECONDS
ROWS_MAX: Final = 500_000

FIELDS: Final = 8  # slot, accepted, acked, ready, held, delayed, dead, oldest_us; all of them int64
_NOTHING: Final = (0,) * (FIELDS - 1)


class Sample(NamedTuple):
    """One slot of a queue: what came and went in it, and how it stood at its end."""

    end: float  # of the slot, in seconds of the mirror's clock
    accepted: int
    acked: int
    ready: int
    held: int
    delayed: int
    dead: int
    oldest_us: int  # when the oldest living message was accepted; 0: there is none


class Samples:
    """Moments are of the mirror's clock."""

    def __init__(self, rows_max: int = ROWS_MAX) -> None:
        self._rows_max = rows_max
        self._rows: dict[str, array[int]] = {}
        self.row_count = 0

    def put(self, row: Fields, at: float, *, is_new: bool = False) -> None:
        """A queue's row of the mirror, as it was seen at a moment. New: there was no such queue before."""
        name: str = row["name"]
        slot = int(at // STEP_SECONDS)
        seen = array(
            "q",
            (
                slot,
                row["offset_end"],
                row["counts"].get("acked", 0),
                row["ready"],
                row["held"],
                row["delayed"],
                row["dead"],
                row["oldest_us"],
            ),
        )
        rows = self._rows.get(name)
        if rows is None:
            rows = self._rows[name] = array("q", (slot - 1, *_NOTHING) if is_new else ())
            self.row_count += len(rows) // FIELDS
        elif rows[-FIELDS] == slot:
            rows[-FIELDS:] = seen
            return
        rows.extend(seen)
        self.row_count += 1
        self._cut(rows, slot - SLOTS_MAX)
        if self.row_count > self._rows_max:
            self._make_room(slot)

    def forget(self, name: str) -> None:
        """There is no such queue any more."""
        self.row_count -= len(self._rows.pop(name)) // FIELDS

    def _make_room(self, slot: int) -> None:
        slots = SLOTS_MAX
        while True:
            for rows in self._rows.values():
                self._cut(rows, slot - slots)
            if slots <= SLOTS_MIN or self.row_count <= self._rows_max * 3 // 4:
                return
            slots = max(slots // 2, SLOTS_MIN)

    def _cut(self, rows: "array[int]", first_slot: int) -> None:
        """Forget what is not needed to know how things stood from a slot on."""
        gone = 0
        while len(rows) > gone + FIELDS and rows[gone + FIELDS] <= first_slot:
            gone += FIELDS
        if gone:
            del rows[:gone]
            self.row_count -= gone // FIELDS

    def of(self, name: str, at: float, seconds: float) -> Iterator[Sample]:
        """Every slot of a queue that was over at `at`, of so many seconds, as far as it is known."""
        rows = self._rows[name]
        end = int(at // STEP_SECONDS)
        # What happened in the slot of the first row is not known: nobody had looked before.
        slot = max(rows[0] + 1, end - int(seconds) // STEP_SECONDS)
        place = 0

        def forward(slot: int) -> int:
            here = place
            while here + FIELDS < len(rows) and rows[here + FIELDS] <= slot:
                here += FIELDS
            return here

        place = forward(slot - 1)
        while slot < end:
            before, place = place, forward(slot)
            yield Sample(
                float((slot + 1) * STEP_SECONDS),
                rows[place + 1] - rows[before + 1],
                rows[place + 2] - rows[before + 2],
                *rows[place + 3 : place + FIELDS],
            )
            slot += 1
