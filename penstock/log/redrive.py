"""Redrive: dead letters that go back into their queue with other payloads, all of them at once.

There may be a hundred thousand, each of them alone, and the loop must not stand still for them:

    hold      some of them in each turn are taken out of their room. To everybody they are dead letters that
              somebody looks at: nobody else gets them, a snapshot has them as dead, and so has the next start
    commit    the rows that say that they are redriven go into the log, in the group of their transaction
    release   some of them in each turn come behind the tail, with their payloads, to the places that were
              next when they were committed, as after a restart: whatever else has come there since then

Between the last two, memory is behind the log: no snapshot may be taken (`LogState.redriving`).
"""

from array import array
from itertools import islice

from penstock.log.adoption import Run
from penstock.log.ledger import Ledger
from penstock.log.queue import LogQueue
from penstock.log.repairs import MARK, runs_of
from penstock.model.life import Event
from penstock.model.pending import NEAR, REDRIVEN, Hold, Place


class Redrive:
    """Of one queue, for one transaction."""

    def __init__(self, queue: LogQueue, offsets: "array[int]", key: str) -> None:
        self.queue = queue
        self._consumer = MARK + key  # no consumer can be called so
        self._left = runs_of(offsets)
        self._run: tuple[int, int, int] | None = None  # of these, the one that is looked at
        self._pieces: list[tuple[int, int]] = []  # that are held
        self.rows = Ledger()
        self.taken: list[tuple[int, int]] = []
        """Which of the offsets these are, as ranges of their indexes: their payloads come in that order."""
        self.staged: list[Run] = []  # where these are, if they were staged
        self.payload_first = 0  # where the first of these is in the repair queue
        self._place = Place(0, 0)
        self._place_end = -NEAR

    def hold(self, runs_max: int) -> bool:
        """Take some more of those that are dead, and that nobody holds; whether that was all."""
        pending = self.queue.pending
        for _ in range(runs_max):
            run = self._run or next(self._left, None)
            if run is None:
                return True
            row, first, end = run
            self._run = None
            # Neighbours may have died one by one.
            for a, b, place in islice(pending.dead.places.walk(first, end), 1):
                pending.resume(a, b, Hold(self._consumer, 0, b"", place, dead=True))
                self._pieces.append((a, b))
                self.rows.add(Event.REDRIVEN, a, b, place.reason, "", REDRIVEN.attempts, 0, REDRIVEN)
                lo, hi = row + a - first, row + b - first
                if self.taken and self.taken[-1][1] == lo:
                    self.taken[-1] = self.taken[-1][0], hi
                else:
                    self.taken.append((lo, hi))
                self._run = (hi, b, end) if b < end else None
        return False

    def give_up(self) -> None:
        """They are dead letters as before."""
        pending = self.queue.pending
        for first, end in self._pieces:
            for a, b, hold in pending.release(first, end, self._consumer):
                pending.back(a, b, hold.place, dead=True)
        self._pieces.clear()

    def commit(self) -> None:
        """The rows are to be written now, and the payloads are next in the repair queue."""
        repair_queue = self.queue.repair_queue
        assert repair_queue is not None
        self.payload_first = repair_queue.pending.tail
        pending = self.queue.pending
        self._place = Place(pending.tail, pending.reserve_places(len(self._pieces)) - 1)
        self.rows.move_behind(pending.tail)

    def release(self, runs_max: int) -> bool:
        """Let some more of them go behind the tail; whether that was all."""
        queue, pending = self.queue, self.queue.pending
        at = self.payload_first
        some = self._pieces[:runs_max]
        del self._pieces[:runs_max]
        for first, end in some:
            pending.release(first, end, self._consumer)
            if not 0 <= first - self._place_end < NEAR:  # They share a place where they do after a restart.
                self._place = self._place._replace(number=self._place.number + 1)
            self._place_end = end
            pending.back(first, end, self._place)
            pending.note(first, end, REDRIVEN)
            if self.queue.whys:
                self.queue.whys.cut(first, end)
            queue.weight.come_back(first, end)
            queue.put_repair(first, end, at - first)
            at += end - first
        self.payload_first = at
        return not self._pieces
