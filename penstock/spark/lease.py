"""Lease: a named reader at the broker, which keeps what a stream has not read yet.

Spark tells a source how far a query has come (`commit`) when it has planned the next batch, and does not tell
it when the query ends. Before that it asks what is next, also where nothing is: whoever is asked knows that
all before is done (`streaming.py`). And the broker holds for a while only, and a thread renews that while the
process lives: when the query is gone, so is the process, and the lease ends by itself.

Rules that always hold:
  * The first hold is made before anything is read, and a no to it ends the query: whoever asked for a reader
    relies on it.
  * After that nothing here disturbs the query. What goes wrong is a warning, and is tried again.
  * A reader of the broker's has `READER_QUEUES` queues at most. Those beyond are held by further readers,
    whose names have a number: `nightly`, `nightly (2)`, …
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from penstock.common.text import printable
from penstock.errors import PenstockError
from penstock.spark.api import Answer, Broker, Refused
from penstock.spark.offsets import Positions

RENEWALS: Final = 3
"""How often a lease is renewed before it would end, if nothing goes wrong."""

READER_QUEUES: Final = 1000
"""What the broker takes of one reader."""

MOVE_SECONDS: Final = 1.0
"""Positions are told to the broker no more often than this, however short the batches are."""

ERROR_CHARACTERS_MAX: Final = 1000
NO_QUEUE: Final = "queue-not-found"

log = logging.getLogger("penstock.spark")


def readers_of(name: str, positions: Positions) -> Iterator[tuple[str, Positions]]:
    """Names of readers that together hold these positions, and which each of them holds."""
    rows = list(positions.items())
    for at in range(0, len(rows), READER_QUEUES):
        yield (f"{name} ({at // READER_QUEUES + 1})" if at else name), dict(rows[at : at + READER_QUEUES])


class Lease:
    def __init__(self, broker: Broker, name: str, view: str) -> None:
        self._broker = broker  # of nobody else: the thread uses it
        self._name = name
        self._view = view
        self._lock = threading.Lock()
        self._positions: Positions = {}
        self._moved = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._capped: set[str] = set()
        self._renew_seconds = 0.0  # the broker says for how long it holds
        # What is to be said, with the next renewal; of a run before this one, nothing stays.
        self._about: dict[str, str | None] = {"kind": "spark", "error": None}
        self._has_failed = False

    def hold(self, positions: Positions) -> None:
        """Hold these queues, and no others, from these positions on; what is held already stays held.

        A position goes back where another queue has the name of one that was deleted.
        """
        with self._lock:
            kept = {
                queue: min(at, positions[queue])
                for queue, at in self._positions.items()
                if queue in positions
            }
            held = kept | {queue: at for queue, at in positions.items() if queue not in kept}
            if held == self._positions:
                return
            self._positions = held
            if self._thread is not None:
                self._moved.set()
                return
        self._tell()
        self._thread = threading.Thread(target=self._renew, name=f"lease {self._name}", daemon=True)
        self._thread.start()

    def move(self, positions: Positions) -> None:
        """What is before these positions was read, and need not be kept."""
        with self._lock:
            if not self._has_failed and self._positions.items() >= positions.items():
                return
            self._positions |= positions
            if self._has_failed:
                self._has_failed = False
                self._about = {**self._about, "error": None}
        self._moved.set()

    def failed(self, why: str) -> None:
        """The query cannot read on; the broker is told why, at once."""
        with self._lock:
            self._has_failed = True
            self._about = {**self._about, "error": printable(why)[:ERROR_CHARACTERS_MAX]}
        self._moved.set()

    def end(self) -> None:
        """Renew no more; what is held is let go of when the lease ends."""
        self._ended.set()
        self._moved.set()

    def _tell(self) -> None:
        with self._lock:
            positions, about = dict(self._positions), self._about
        known = True
        capped: set[str] = set()
        failure: PenstockError | None = None
        # A queue keeps its place, so that no reader lets go of what another one does not hold yet.
        for name, held in readers_of(self._name, positions):
            try:
                answer = self._put(name, held, about)
            except PenstockError as error:
                failure = error
                continue
            self._renew_seconds = answer["lease_seconds_left"] / RENEWALS
            capped |= {row["queue"] for row in answer["queues"] if row["capped"]}
            known = known and bool(answer.get("about"))
        if failure is not None:
            raise failure
        with self._lock:
            if self._about is about:  # A broker that was restarted does not know any more what was said.
                self._about = {} if known else {"kind": "spark"}
        for queue in sorted(capped - self._capped):
            log.warning(
                "reader %r is so far behind in queue %r that the broker does not keep all of it any more "
                "(reader-bytes-max)",
                self._name,
                queue,
            )
        self._capped = capped

    def _put(self, name: str, held: Positions, about: dict[str, str | None]) -> Answer:
        """Hold these; of those that were deleted there is nothing to hold, but the others are to be held."""
        fields = {"view": self._view, "positions": held, **({"about": about} if about else {})}
        try:
            return self._broker.put("readers", name, fields=fields)
        except Refused as error:
            gone = [queue for queue in held if self._is_gone(queue)] if error.name == NO_QUEUE else []
            if not gone or len(gone) == len(held):
                raise
        with self._lock:
            for queue in gone:
                self._positions.pop(queue, None)
                del held[queue]
        return self._broker.put("readers", name, fields=fields)

    def _is_gone(self, queue: str) -> bool:
        try:
            self._broker.get("queues", queue)
        except Refused as error:
            return error.name == NO_QUEUE
        return False

    def _renew(self) -> None:
        while True:
            self._moved.wait(self._renew_seconds)
            self._moved.clear()
            if self._ended.is_set():
                if self._has_failed:
                    with suppress(PenstockError):
                        self._tell()
                self._broker.close()
                return
            try:
                self._tell()
            except PenstockError as error:
                log.warning("reader %r could not be renewed, which is tried again: %s", self._name, error)
            except Exception:  # whatever it is: without this thread nothing would be held any more
                log.exception("reader %r could not be renewed, which is tried again", self._name)
            self._ended.wait(MOVE_SECONDS)
