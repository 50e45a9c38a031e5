"""Readers: who reads the log from outside at their own pace, and which segments are kept for them.

A reader names a position in each queue that it reads. While its lease lasts, nothing at or behind
that position is removed, however old it is; up to `reader_bytes_max`, so that a reader that has
stopped cannot fill the disk.

Rules that always hold:
  * The bytes that a reader holds in a queue are those of the segments with something that it has not
    read, from the newest back. The segment with which they would be more than `reader_bytes_max` is not
    held for it any more, nor is any older one: retention alone decides about these.
  * A reader that has lost something by this is told of once in the log, and shown as capped until its
    position is in what is kept.
  * A lease that ended a while ago is forgotten.
"""

import logging
from collections.abc import Container

from penstock.log.info import ReaderInfo
from penstock.log.segment import Segment
from penstock.log.state import LogState, ReaderKey
from penstock.log.views import event_end

log = logging.getLogger("penstock.log")

FORGET_AFTER_US = 300 * 1_000_000
"""How long a reader is shown whose lease has ended: somebody may want to know where it was."""


class Readers:
    """What the readers of a log hold."""

    def __init__(self, state: LogState) -> None:
        self._state = state
        self._lost: set[ReaderKey] = set()  # something was removed that these had not read
        self._over: set[ReaderKey] = set()  # something could be, as of the last look

    def held(self, now_us: int) -> set[int]:
        """The bases of the segments that somebody holds."""
        state = self._state
        bytes_max = state.settings.reader_bytes_max
        reading: dict[int, list[ReaderInfo]] = {}
        for reader in state.readers.values():
            queue = state.queues.get(reader.queue)
            if queue is not None and reader.lease_until_us > now_us:
                reading.setdefault(queue.number, []).append(reader)
        held: set[int] = set()
        held_bytes: dict[ReaderKey, int] = {}
        self._over = set()
        self._lost = {key for key in self._lost if self._misses(key)}
        for segment in reversed(state.segments.all) if reading else ():
            for number in segment.spans if len(segment.spans) < len(reading) else reading:
                for reader in reading.get(number, ()) if number in segment.spans else ():
                    if not _wants(reader, segment, number):
                        continue
                    key = reader.name, reader.queue
                    elsewhere = segment.adopted.get(number, (0, 0))[1]  # which is kept with it
                    held_bytes[key] = held_bytes.get(key, 0) + segment.size + elsewhere
                    if 0 < bytes_max < held_bytes[key]:
                        self._over.add(key)
                    else:
                        held.add(segment.base)
        return held

    def lose(self, segment: Segment, now_us: int) -> None:
        """This segment goes: whoever had not read it is too far behind, and that is told."""
        for key, reader in self._state.readers.items():
            queue = self._state.queues.get(reader.queue)
            if queue is None or reader.lease_until_us <= now_us or key in self._lost:
                continue
            if _wants(reader, segment, queue.number):
                self._lost.add(key)
                span = segment.spans[queue.number]
                events = reader.view == "events"
                log.warning(
                    "reader %r of queue %r is too far behind: %s from %d up to %d are removed before it has "
                    "read them, and more may follow, because it holds at most %d bytes of the log "
                    "(reader-bytes-max)",
                    reader.name,
                    reader.queue,
                    "events" if events else "offsets",
                    max(reader.position, span.first_event if events else span.first_offset),
                    (span.end_event if events else span.end_offset) - 1,
                    self._state.settings.reader_bytes_max,
                )

    def listed(self, queues: Container[str] | None = None) -> list[ReaderInfo]:
        """Every reader of every queue, or of some, as somebody who looks should see it."""
        return [
            ReaderInfo(
                reader.name,
                reader.queue,
                reader.view,
                reader.position,
                reader.lease_until_us,
                key in self._over or (key in self._lost and self._misses(key)),
                self._end(reader),
            )
            for key, reader in self._state.readers.items()
            if queues is None or key[1] in queues
        ]

    def _end(self, reader: ReaderInfo) -> int:
        queue = self._state.queues.get(reader.queue)
        if queue is None:
            return reader.position
        return event_end(queue) if reader.view == "events" else queue.pending.tail

    def _misses(self, key: ReaderKey) -> bool:
        """Whether its position is still before what is kept."""
        reader = self._state.readers.get(key)
        queue = self._state.queues.get(key[1])
        if reader is None or queue is None:
            return False
        return reader.position < (queue.event_start if reader.view == "events" else queue.offset_start)

    def ended(self, now_us: int) -> list[ReaderKey]:
        """Those whose lease has been over for so long that they can be forgotten."""
        return [
            key
            for key, reader in self._state.readers.items()
            if reader.lease_until_us + FORGET_AFTER_US <= now_us
        ]


def _wants(reader: ReaderInfo, segment: Segment, number: int) -> bool:
    """Whether the segment has something of that queue which the reader has not read."""
    span = segment.spans.get(number)
    if span is None:
        return False
    return reader.position < (span.end_event if reader.view == "events" else span.end_offset)
