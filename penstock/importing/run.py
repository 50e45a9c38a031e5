"""The loop of an import: take, write down, store, settle; until there is nothing left.

    take      the source gives messages, which come again there unless they are settled
    write     the journal names the transaction and the messages that it is about to store
    store     Penstock commits them, all or none, and says where they are; in several transactions, each
              written down before, where they are more than it ever takes at once (max-bytes of the queue,
              body-bytes-max)
    settle    the source is told that they are done

Rules that always hold:
  * Nothing is settled that is not stored: a crash at any point loses nothing.
  * What has an identity and is stored is settled when it comes again, and not stored a second time; in this
    run (the source was away before it could be told) or in the next one (by the journal).
  * One batch is on its way at a time.

How it fails: the source's `Away` when it was looked for in vain for `wait` seconds; everything else as it
comes. The next run goes on where this one has ended, however it has.
"""

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from threading import Event
from typing import Any, Final

from penstock.client.errors import Refused
from penstock.client.plan import Backoff
from penstock.importing.journal import Journal
from penstock.importing.sink import Sink, Unmovable
from penstock.importing.source import BATCH_MAX, POLL_SECONDS, Away, Message, Refuses, Source, log

BATCH_FIRST: Final = 16
BATCH_BYTES: Final = 4 << 20
"""What a batch should have of payload: how many messages that are is known from the last one."""

WAIT_SECONDS: Final = 1.0
"""Between two looks whether Penstock has room."""


class Stopped(Exception):
    """Somebody wants an end while nothing goes on."""


@dataclass(slots=True)
class Import:
    source: Source
    sink: Sink
    journal: Journal
    count: int | None  # no more than so many; None: all
    follow: bool
    timeout: float  # without `follow`: it is over when no message has come for so long
    wait: float  # a source that is away is looked for so long
    tell: Callable[[Mapping[str, Any]], None]  # where a batch is
    imported: int = 0
    again: int = 0  # came again, and were stored before
    stop: Event = field(default_factory=Event)
    _bytes_max: int = BATCH_BYTES  # of a batch; less where Penstock does not take so much at once
    _name: str = field(default_factory=lambda: f"import/{uuid.uuid4().hex}")  # of its transactions
    _number: int = 1  # of the next one
    _known: dict[str, None] = field(default_factory=dict)  # stored, and perhaps not settled there
    _search: "_Search | None" = None  # while the source is away

    def run(self) -> None:
        if self.count is not None:  # what is fetched ahead and goes back has been delivered once more there
            self.source.batch_max = min(self.source.batch_max, self.count)
        self._patiently(self.source.open)
        self._resume()
        size = BATCH_FIRST
        since = time.monotonic()
        while not self.stop.is_set() and (self.count is None or self.imported < self.count):
            size = min(size, self.source.batch_max)
            try:
                batch = self.source.take(
                    size if self.count is None else min(size, self.count - self.imported)
                )
                if batch:
                    self._move(batch)
                    mean = max(_bytes_of(batch) // len(batch), 1)
                    size = max(min(BATCH_MAX, 4 * size, self._bytes_max // mean), 1)
                    since = time.monotonic()
                elif not self.follow and time.monotonic() - since >= self.timeout:
                    break
                else:
                    self.stop.wait(POLL_SECONDS / 4)
                self._search = None
            except Away as error:
                if self._search is None:
                    log.warning("%s; connecting again", error)
                    self._search = _Search(self.wait)
                    self.source.close()
                else:
                    self._pause(self._search, error)
                self._patiently(self.source.open)
                since = time.monotonic()
        if not self._known:
            self.journal.clear()

    def _resume(self) -> None:
        """What the last run has stored, and may not have settled."""
        record = self.journal.read()
        if record:
            fresh = record["fresh"] if self.sink.committed(record["transaction"]) else []
            self._known = dict.fromkeys([*record["known"], *fresh])

    def _move(self, batch: list[Message]) -> None:
        fresh = [message for message in batch if message.is_first or message.identity not in self._known]
        began = time.monotonic()
        self._store(fresh, batch)
        if self._search is not None:
            self._search.deadline += time.monotonic() - began  # which was not the source's time
        self.again += len(batch) - len(fresh)
        self.source.settle(batch)
        if self.source.confirms:
            for message in batch:
                self._known.pop(message.identity, None)
        else:  # no more than this were with us at a time
            for identity in [*islice(self._known, max(len(self._known) - BATCH_MAX, 0))]:
                del self._known[identity]

    def _store(self, fresh: list[Message], batch: list[Message]) -> None:
        """In one transaction; in several where that is more than Penstock ever takes at once."""
        size = len(fresh)
        while part := fresh[:size]:
            key = f"{self._name}/{self._number}"
            identities = [message.identity for message in part if message.identity]
            if identities:
                self.journal.write(key, identities, [*self._known])
            try:
                stored = self.sink.store(key, part, lambda: self._wait(batch))
            except Refused as error:
                if error.name != "body-too-large":
                    raise
                if len(part) == 1:
                    which = f"the message {part[0].identity}" if identities else "a message"
                    raise Unmovable(
                        f"{self.source.name}: {which} of {len(part[0].body):,} bytes is too large for "
                        f"Penstock ({error.detail}); raise that limit, and the same command goes on"
                    ) from None
                size = len(part) // 2  # under the same key: its commit drops what was staged in vain
                self._bytes_max = min(self._bytes_max, _bytes_of(part) // 2)
                continue
            self._number += 1
            self._known |= dict.fromkeys(identities)
            self.imported += len(part)
            self.tell({"transaction": key, "count": len(part), **stored})
            fresh = fresh[size:]

    def _wait(self, batch: list[Message]) -> None:
        if self.stop.wait(WAIT_SECONDS):
            raise Stopped
        with suppress(Away):  # `settle` finds that out
            self.source.keep(batch)

    def _patiently(self, step: Callable[[], None]) -> None:
        """Do something with the source, again and again while it is away."""
        self._search = self._search or _Search(self.wait)
        while True:
            try:
                return step()
            except Away as error:
                self._pause(self._search, error)

    def _pause(self, search: "_Search", error: Away) -> None:
        """Before another try; that was the last one where it was looked for long enough."""
        self.source.close()
        if "CERTIFICATE_VERIFY_FAILED" in str(error):  # as every client has it from OpenSSL
            raise Refuses(f"{error}; say who signs its certificate: ?cafile=FILE") from None
        pause = search.pauses.next()
        if time.monotonic() + pause > search.deadline:
            raise Away(f"{error}; is it running, and is the address right?") from None
        if not search.is_told:
            log.warning("%s; trying for %g s", error, self.wait)
        search.is_told = True
        if self.stop.wait(pause):
            raise Stopped from None


class _Search:
    """For a source that is away. It is over when something was taken and settled, or nothing was there: one
    that lets everybody in and then throws them out is away, too."""

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.pauses = Backoff(0.1, 5.0)
        self.is_told = False


def _bytes_of(messages: list[Message]) -> int:
    return sum(len(message.body) for message in messages)
