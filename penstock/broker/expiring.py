"""Expiring: an empty queue that nobody has used for its `expire-seconds` is deleted.

A queue is in use while it has messages or dead letters, consumers, a reader with a lease, while it is paused,
and whenever something happens in it. Who only looks at it does not use it, nor who has archived it all.

Rules that always hold:
  * How long it has not been in use is counted by this broker alone, from when it first sees it so, by ticks:
    a clock that leaps ahead adds `LEAP_US` at most.
  * Of very many queues, some are looked at in each tick: a queue may stay a while longer.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final

from penstock.broker.doors import Doors
from penstock.log.info import ARCHIVE_READERS, ReaderInfo
from penstock.log.log import Log

QUEUES_A_TICK: Final = 200
LEAP_US: Final = 60_000_000

log = logging.getLogger("penstock.broker")


class Expiring:
    def __init__(self, log: Log, doors: Doors, delete: Callable[[Sequence[str], int], None]) -> None:
        self._log = log
        self._doors = doors
        self._delete = delete
        self._round: Iterator[str] = iter(())
        self._idle: dict[str, tuple[str, int, int]] = {}  # identity, next event, and since when
        self._clock_us = self._seen_us = 0

    def tick(self, now_us: int) -> None:
        self._clock_us += min(max(now_us - self._seen_us, 0), LEAP_US)
        self._seen_us = now_us
        if not self._log.policies.some_expire:
            return
        names = list(islice(self._round, QUEUES_A_TICK))
        if not names:
            self._round = iter(self._log.queues())
            self._idle = {name: it for name, it in self._idle.items() if self._log.has_queue(name)}
        readers = self._log.readers(set(names))
        reading = {it.queue for it in readers if it.lease_until_us > now_us and self._reads(it)}
        over = [name for name in names if self._is_over(name, name in reading)]
        if over:
            log.info("deleted, because they were empty and not used for expire-seconds: %s", ", ".join(over))
            self._delete(over, now_us)

    @staticmethod
    def _reads(reader: ReaderInfo) -> bool:
        return reader.name not in ARCHIVE_READERS.values() or reader.position < reader.end

    def _is_over(self, name: str, is_read: bool) -> bool:
        seconds = self._log.policies.for_queue(name).expire_seconds
        if not seconds or not self._log.has_queue(name):
            return False
        info = self._log.describe(name)
        in_use = is_read or info.ready or info.delayed or info.held or info.dead or info.paused
        identity, event, since_us = self._idle.get(name, ("", 0, 0))
        if in_use or self._doors.consumer_count(name) or (identity, event) != (info.identity, info.event_end):
            self._idle[name] = info.identity, info.event_end, self._clock_us
            return False
        return self._clock_us - since_us >= seconds * 1_000_000
