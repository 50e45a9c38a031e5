"""Leases: the messages that an HTTP client holds, and what it has to say of them.

A *window* is one loop over `consume`: at most `prefetch` unsettled messages at this client. It takes over a
connection of its own, where the broker may wait with its answer. Verdicts go over another one, gathered:

    verdict ──► after LINGER_SECONDS, or before that when a window has nothing more here and takes again,
                when MANY_VERDICTS wait, when a loop is left, by `flush` and by `close` ──► settled, or gone

A thread in the background, from the first `consume` on, sees to that. It also extends leases, a third of
their length after they began: those of messages that wait here, and of those that are kept (`keep`). So what
waits here does not come to an end however long the caller works on another message.

Rules that always hold:
  * A verdict names the delivery that it is about (`attempts`): one that somebody else has got since is gone.
  * A message whose lease has ended, as far as can be known here, is not handed out.
  * What was not handed out goes back at once when its loop is left (`requeue` without a delay, which counts
    as a delivery); what was, and has no verdict, when the client is closed.
  * Leaving a loop takes no lock and does no IO: the garbage collector may do it at any moment.
  * Nothing is awaited while the lock is held. Both kinds of clients use this from threads.

How it fails: verdicts that came too late are logged and counted by `flush`: those messages come again. After
a lost connection verdicts are said once more, and what is gone then is not counted: perhaps it was settled by
the first try. Where no broker is found, verdicts are in doubt: the next `flush`, or `close`, raises that.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import inf
from queue import Empty, SimpleQueue
from typing import Final, Generic, NamedTuple

from penstock.client.errors import ClientError, ConnectionLost, NotSupported, TimedOut
from penstock.client.fork import begin_anew_after_fork
from penstock.client.http_core import TAKE_SECONDS, Answer, HttpCore, check_door, said
from penstock.client.http_held import H, Window
from penstock.client.http_line import HttpLine
from penstock.client.options import SECONDS_TOP, Options
from penstock.client.plan import log

LINGER_SECONDS: Final = 0.05
MANY_VERDICTS: Final = 1000
VERDICTS_MAX: Final = 10_000
"""Of one request."""

EXTEND: Final = "extend"

LATE: Final = "queue %r: %d leases had ended before this client said %s; those messages come again"
DROPPED: Final = "queue %r: %s dropped: this client is closed, and the message comes again"


class Verdict(NamedTuple, Generic[H]):
    """What became of a message."""

    held: H
    outcome: str
    more: Mapping[str, object]
    by_caller: bool = True


Entries = dict[str, Verdict[H]]


class Leases(Generic[H]):
    """Of one client. `make_message` gives what the caller gets; `make_line` a connection."""

    def __init__(
        self,
        core: HttpCore,
        options: Options,
        make_line: Callable[[], HttpLine],
        make_message: Callable[[Window[H], Answer, float], H],
    ) -> None:
        self._core = core
        self._options = options
        self._make_line = make_line
        self._make_message = make_message
        self._line = make_line()  # for verdicts
        self._breaks = 0  # of it, when there was an answer last
        self._begin()
        begin_anew_after_fork(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()  # everything below
        self._windows: set[Window[H]] = set()
        self._out: dict[H, None] = {}  # handed out, without a verdict
        self._kept: set[H] = set()  # their leases are extended
        self._verdicts: list[Verdict[H]] = []
        self._verdicts_due = inf
        self._late = 0  # not told yet, as the next two
        self._doubted = 0
        self._trouble: ClientError | None = None
        self._is_closed = False
        self._saying = threading.Lock()  # held until everything that was to be said is answered
        self._thread: threading.Thread | None = None
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._sleeps_until = -inf  # the thread

    def forked(self) -> None:
        """This is a child: what is held is its parent's, as are the loops."""
        for held in (*self._out, *self._kept):
            held._is_settled = True
        for window in self._windows:
            window.inbox.clear()
            window.why_over = "it was begun before a fork; begin another one"
        self._begin()

    # --- in ------------------------------------------------------------------------------------------

    def consume(self, queue: str, prefetch: int, lease: float, dead: bool, count: int | None) -> Window[H]:
        """A new window; nothing is taken yet."""
        name, dead = check_door(queue, dead)
        if prefetch < 1:
            raise NotSupported(f"queue {queue!r}: prefetch is {prefetch}: use at least 1")
        if not 1 <= lease < inf:
            raise NotSupported(f"queue {queue!r}: lease is {lease}: use at least 1 second")
        window: Window[H] = Window(name, dead, prefetch, lease, count, self._make_line())
        with self._lock:
            if self._is_closed:
                raise ConnectionLost(f"queue {queue!r}: this client is closed; make another one")
            self._windows.add(window)
            if self._thread is None:
                self._thread = threading.Thread(target=self._tend, name="penstock-leases", daemon=True)
                self._thread.start()
        return window

    def end(self, window: Window[H]) -> None:
        """Its loop was left."""
        window.end()
        self._wake.put(None)

    def here(self, window: Window[H]) -> H | None:
        """The next message for a window, if it is here."""
        with self._lock:
            held = self._first(window)
            if held is not None:
                window.inbox.popleft()
                self._kept.discard(held)
                self._out[held] = None
                window.out += 1
                window.left -= 1
        return held

    def _first(self, window: Window[H]) -> H | None:
        """Of those that are here the first that is still ours."""
        now = time.monotonic()
        while window.inbox and not window.why_over:
            held = window.inbox[0]
            if not held.is_gone and now < held._ends_at:
                return held
            window.inbox.popleft()
            self._kept.discard(held)
        return None

    def _has(self, window: Window[H]) -> bool:
        with self._lock:
            return self._first(window) is not None

    def comes(self, window: Window[H], timeout: float | None) -> bool:
        """Wait until the next message for a window is here. False: it has not come in time."""
        deadline = inf if timeout is None else time.monotonic() + min(timeout, SECONDS_TOP)
        while not self._has(window):
            if window.why_over:
                raise ConnectionLost(f"queue {window.queue!r}: nothing comes in this loop: {window.why_over}")
            now = time.monotonic()
            seconds = max(0.0, deadline - now)
            with self._lock:
                room, room_at = self._room(window, now)
                window.is_waiting = room < 1
            if room < 1:
                _wait(window.bell, min(seconds, room_at - now))
            else:
                self._hurry()
                self._take(window, room, min(seconds, TAKE_SECONDS))
            if not seconds:
                return self._has(window)
        return True

    def next(self, window: Window[H], timeout: float | None) -> H | None:
        """The next message for a window as soon as it comes; None where it has not in time."""
        while (message := self.here(window)) is None and self.comes(window, timeout):
            pass
        return message

    def _room(self, window: Window[H], now: float) -> tuple[int, float]:
        """How many messages may be taken; where none may, when a lease will have ended."""
        ends_at = now
        if window.out >= window.prefetch:
            out = [held for held in self._out if held._window is window]
            for held in out:
                if held._ends_at <= now:
                    self._let_go(held)
            ends_at = min((held._ends_at for held in out), default=now)
        return int(min(window.prefetch - window.out, window.left)), ends_at

    def _take(self, window: Window[H], count: int, wait: float) -> None:
        request = self._core.take(window.queue, window.dead, count, window.lease_seconds, wait)
        try:
            with window.turn:
                messages = said(window.line.ask(request), "messages")
                now = time.monotonic()
                taken = [self._make_message(window, message, now) for message in messages]
                with self._lock:
                    window.inbox.extend(taken)
                    self._kept.update(taken)
                    self._ring(now + window.lease_seconds / 3)
        finally:
            if window.why_over:
                self._wake.put(None)

    # --- out -----------------------------------------------------------------------------------------

    def settle(self, held: H, outcome: str, **more: object) -> bool:
        """Say what became of a message. False: that was said before, or would be in vain."""
        with self._lock:
            if not (self._is_closed or held._is_settled or held.is_gone):
                held._is_settled = True
                self._let_go(held)
                self._verdicts.append(Verdict(held, outcome, more))
                if len(self._verdicts) == 1:
                    self._verdicts_due = time.monotonic() + LINGER_SECONDS
                elif len(self._verdicts) >= MANY_VERDICTS:
                    self._verdicts_due = -inf
                self._ring(self._verdicts_due)
                return True
        if self._is_closed:
            log.warning(DROPPED, held.queue, outcome)
        return False

    def _let_go(self, held: H) -> None:
        self._kept.discard(held)
        if held in self._out:
            del self._out[held]
            held._window.out -= 1
            if held._window.is_waiting:
                held._window.bell.put(None)

    def extend(self, held: H, lease: float | None) -> bool:
        """Hold a message for so many seconds from now on. False: it is not held any more."""
        seconds = held._lease_seconds if lease is None else lease
        with self._lock:
            if held._is_settled or held.is_gone or self._is_closed:
                return False
        entry = {"id": held.id, "attempts": held.attempts, "lease": seconds}
        answer = self._line.ask(self._core.settle(held.queue, {"extend": [entry]}))
        with self._lock:
            held._renew(seconds, time.monotonic())
            if said(answer, "gone"):
                held.is_gone = True
                self._let_go(held)
            self._ring(held._extend_at)
        if held.is_gone:
            log.warning(LATE, held.queue, 1, "extend")
        return not held.is_gone

    def keep(self, held: H) -> None:
        """Extend its lease again and again, until it is settled, or `unkeep` is called."""
        with self._lock:
            if not held._is_settled and not held.is_gone:
                self._kept.add(held)
                self._ring(held._extend_at)

    def unkeep(self, held: H) -> None:
        with self._lock:
            self._kept.discard(held)

    def flush(self) -> int:
        """Until everything that was said is settled; how many verdicts came too late since the last time.

        ConnectionLost, TimedOut or Refused where that could not be done, with `verdicts_in_doubt`.
        """
        # An error is told below, together with what the thread did not get through.
        with self._saying, contextlib.suppress(ClientError):
            self._hurry()
            self._say()
        with self._lock:
            late, self._late = self._late, 0
            trouble, self._trouble = self._trouble, None
            doubted, self._doubted = self._doubted, 0
        if trouble is not None and doubted:
            if isinstance(trouble, ConnectionLost | TimedOut):
                trouble.verdicts_in_doubt = doubted
            trouble.args = (f"{trouble}; {doubted} verdicts are in doubt, what was not settled comes again",)
            raise trouble
        return late

    def close(self) -> None:
        """End all loops, give back what has no verdict, and wait as `flush` does; but look for a lost broker
        no longer."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            windows = list(self._windows)
        self._line.leave()
        for window in windows:
            window.end("this client is closed; make another one")
        for window in windows:
            with window.turn:
                pass  # whoever takes for it has noticed
        with self._lock:
            self._give_back(self._out, {})
            self._out.clear()
        try:
            self.flush()
        finally:
            self._wake.put(None)
            self._line.close()

    # --- what the thread does --------------------------------------------------------------------------

    def _tend(self) -> None:
        wake = self._wake
        while not self._is_closed:
            with self._lock:
                self._sleeps_until = due = self._due()
            seconds = due - time.monotonic()
            if seconds > 0:
                _wait(wake, seconds)
                continue
            with self._lock:
                self._sleeps_until = -inf
            try:
                with self._saying:
                    self._say()
            except ClientError as error:
                log.warning("verdicts on messages: %s", error)

    def _due(self) -> float:
        if any(window.why_over and not window.turn.locked() for window in self._windows):
            return -inf
        return min([self._verdicts_due, *(held._extend_at for held in self._kept)])

    def _ring(self, due: float) -> None:
        """The thread has something to do then."""
        if due < self._sleeps_until:
            self._wake.put(None)

    def _hurry(self) -> None:
        with self._lock:
            if self._verdicts:
                self._verdicts_due = -inf
                self._ring(-inf)

    def _say(self) -> None:
        """Say everything that is to be said by now."""
        while (batch := self._batch()) is not None:
            queue, entries = batch
            lists: dict[str, list[Mapping[str, object]]] = {}
            for held, outcome, more, _ in entries.values():
                entry = {"id": held.id, "attempts": held.attempts, **more}
                lists.setdefault(outcome, []).append(entry)
            try:
                answer = self._line.ask(self._core.settle(queue, lists))
                self._said(queue, entries, set(said(answer, "gone")))
            except ClientError as error:
                self._failed(entries.values(), error)
                raise
            except BaseException:  # whoever flushes was interrupted: the thread goes on with it
                with self._lock:
                    for verdict in entries.values():
                        verdict.held._extend_at = -inf
                    self._verdicts[:0] = [it for it in entries.values() if it.outcome != EXTEND]
                    self._verdicts_due = -inf
                    self._ring(-inf)
                raise

    def _batch(self) -> tuple[str, Entries[H]] | None:
        """What to say next, of one queue: by id, because none can be named twice."""
        now = time.monotonic()
        over: list[Window[H]] = []
        with self._lock:
            for window in self._windows:
                if window.why_over and not window.turn.locked():
                    over.append(window)
                    self._give_back(window.inbox, {"delay": 0})
                    window.inbox.clear()
                    self._verdicts_due = -inf
            self._windows.difference_update(over)
            due = [
                Verdict(held, EXTEND, {"lease": held._lease_seconds}, by_caller=False)
                for held in self._kept
                if held._extend_at <= now
            ]
            queue = ""
            entries: Entries[H] = {}
            rest: list[Verdict[H]] = []
            if self._verdicts_due <= now:
                due[:0] = self._verdicts
                self._verdicts = rest
            for verdict in due:
                held = verdict.held
                queue = queue or held.queue
                if held.queue == queue and held.id not in entries and len(entries) < VERDICTS_MAX:
                    entries[held.id] = verdict
                    held._extend_at = inf  # until there is an answer
                elif verdict.outcome != EXTEND:
                    rest.append(verdict)
            if not self._verdicts:
                self._verdicts_due = inf
        for window in over:
            window.line.close()
        return (queue, entries) if entries else None

    def _give_back(self, messages: Iterable[H], more: Mapping[str, object]) -> None:
        for held in messages:
            self._kept.discard(held)
            if not held._is_settled and not held.is_gone:
                held._is_settled = True
                self._verdicts.append(Verdict(held, "requeue", more, by_caller=False))

    def _said(self, queue: str, entries: Entries[H], gone: set[str]) -> None:
        now = time.monotonic()
        repeated, self._breaks = self._line.breaks > self._breaks, self._line.breaks
        late: Counter[str] = Counter()
        with self._lock:
            for it, (held, outcome, _, by_caller) in entries.items():
                if it in gone:
                    held.is_gone = outcome == EXTEND or not repeated
                    late[outcome] += (by_caller and not repeated) or held in self._out
                    self._let_go(held)
                elif outcome == EXTEND:
                    held._renew(held._lease_seconds, now)
            self._late += late.total() - late[EXTEND]
            if repeated:  # the broker may have forgotten who holds what
                for held in self._kept:
                    held._extend_at = now
        for outcome, count in late.items():
            if count:
                log.warning(LATE, queue, count, outcome)

    def _failed(self, verdicts: Iterable[Verdict[H]], error: ClientError) -> None:
        again = time.monotonic() + self._options.backoff_seconds_max
        with self._lock:
            for verdict in verdicts:
                verdict.held._extend_at = again
                self._doubted += verdict.by_caller
            self._trouble = error


def _wait(bell: SimpleQueue[None], seconds: float) -> None:
    """Until somebody rings; at most so long."""
    with contextlib.suppress(Empty):
        bell.get(timeout=min(seconds, SECONDS_TOP))
