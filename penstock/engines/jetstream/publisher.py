"""Publishing with receipts: runs of messages that are stored once, whatever dies meanwhile.

What is published in one call is a `Run`. Its messages have numbers, which are their reply subjects and their
message ids: the answers are counted off by number, and a message that is sent again is stored once, as long
as that happens within the stream's duplicate window.

Rules that always hold:
  * A run ends when every message of it has been answered for: stored, stored before, or refused for good.
    `done` is called once, and not before that.
  * A run that has no answer is sent again: when a connection is made anew, and when nothing was heard for
    `answer_seconds`. All runs that are open are sent again then, in their order.
  * While a stream has no leader only the oldest run is tried, again and again; once it is answered the others
    follow, with what was published meanwhile.
  * Until it ends a run's bytes are kept. How much that is, the caller bounds by `waiting_bytes`.

What is not promised: the order of messages across a change of leader. What was on its way then may be stored
behind what was sent after it.

How it fails: a message that the stream refuses for good is in `Run.failures`; a run with a message that is
too large for the server is misuse.
"""

import asyncio
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence

from penstock.engines.jetstream.errors import AGAIN
from penstock.engines.jetstream.link import Link, Watcher
from penstock.protocols import nats_write
from penstock.protocols.nats import Messages, Status
from penstock.protocols.nats_jetstream import Failure, read_numbers, read_publish_answers

ANSWER_SECONDS = 3.0
AGAIN_SECONDS = 0.1
"""How long a stream without a leader is left alone."""


class Run:
    """Messages that were published together."""

    __slots__ = ("count", "done", "failures", "first", "frames", "left", "sends", "sent", "seqs", "upto")

    def __init__(self, first: int, count: int, frames: bytes, done: "Callable[[Run], None]") -> None:
        self.first = first  # the number of its first message
        self.count = count
        self.frames = frames
        self.done = done
        self.seqs = array("Q", bytes(8 * count))  # where they are in the stream; 0: no answer, or refused
        self.failures: dict[int, Failure] = {}  # by place in the run: what was refused for good
        self.left = count  # without an answer
        self.upto = (
            0  # so many of the first ones have an answer, and no other; -1: it is not as simple as that
        )
        self.sends = 0
        self.sent = 0.0  # when, by the loop's clock


class Publisher(Watcher):
    """Publishes to one subject of one stream."""

    def __init__(
        self, link: Link, subject: str, *, id_head: bytes, answer_seconds: float = ANSWER_SECONDS
    ) -> None:
        """`id_head` is what this publisher's message ids begin with: nobody else's may begin like that."""
        self._subject = nats_write.subject_bytes(subject)
        self.waiting_bytes = 0
        self._link = link
        self._id_head = id_head
        self._answer_seconds = answer_seconds
        self._head = link.new_inbox()
        self._number_next = 0
        self._runs: dict[int, Run] = {}  # by first number, in order
        self._firsts: list[int] = []  # the same numbers, for searching
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._leaderless = False  # the stream has said so, and not taken anything since
        self._sid = link.subscribe(self._head + b"*", self)
        link.watch(self)

    @property
    def open_runs(self) -> list[Run]:
        """The runs that have not ended, in their order."""
        return list(self._runs.values())

    def publish(
        self,
        payload: bytes | memoryview,
        bounds: Sequence[int],
        *,
        headers: bytes | Sequence[bytes] = b"",
        done: Callable[[Run], None],
    ) -> Run:
        """Publish `payload[bounds[i]:bounds[i + 1]]`, at least one; `headers` as for `encode_publishes`."""
        first, count = self._number_next, len(bounds) - 1
        frames = nats_write.encode_publishes(
            self._subject,
            payload,
            bounds,
            reply_head=self._head,
            number_first=first,
            id_head=self._id_head,
            id_first=first,
            headers=headers,
            message_bytes_max=self._link.message_bytes_max,
        )
        self._number_next += count
        run = self._runs[first] = Run(first, count, frames, done)
        self._firsts.append(first)
        self.waiting_bytes += len(frames)
        if not self._leaderless:
            self._send(run)
        if self._timer is None:
            self._look_later(self._answer_seconds)
        return run

    def close(self) -> None:
        """Send nothing again. Runs that are open stay open."""
        if self._timer is not None:
            self._timer.cancel()
        self._link.unsubscribe(self._sid)
        self._link.unwatch(self)

    def _send(self, run: Run) -> None:
        if self._link.write(run.frames):
            run.sends += 1
            run.sent = self._loop.time()

    # --- answers ---------------------------------------------------------------------------------

    def messages(self, batch: Messages) -> None:
        numbers = read_numbers(batch.subjects, len(self._head))
        answers = read_publish_answers(numbers, batch.payloads)
        again = sum(failure.err_code in AGAIN for failure in answers.failures.values())
        if again:
            self._lost_leader()
        at = 0
        while at < len(numbers):
            run = self._run_of(numbers[at])
            if run is None:  # it has ended: this is the answer to what was sent again
                at += 1
                continue
            # Answers nearly always come once, and in the order of the publishes: one slice for the whole run.
            lo = numbers[at] - run.first
            hi = min(run.count, lo + len(numbers) - at)
            end = at + hi - lo
            in_order = numbers[at:end] == list(range(numbers[at], numbers[at] + hi - lo))
            if lo == run.upto and in_order and not answers.failures:
                run.seqs[lo:hi] = array("Q", answers.seqs[at:end])
                run.left -= hi - lo
                run.upto = hi
                at = end
            else:
                run.upto = -1
                self._answer_one(run, lo, answers.seqs[at], answers.failures.get(at))
                at += 1
            if not run.left:
                self._end(run)
        if self._leaderless and not again:
            self._leaderless = False
            self._send_all()

    def _answer_one(self, run: Run, place: int, seq: int, failure: Failure | None) -> None:
        """One answer. A message that was sent again may be answered for again, or by a new leader too."""
        if run.seqs[place] or place in run.failures:
            return
        if failure is None:
            run.seqs[place] = seq
        elif failure.err_code in AGAIN:
            return
        else:
            run.failures[place] = failure
        run.left -= 1

    def _run_of(self, number: int) -> Run | None:
        at = bisect_right(self._firsts, number) - 1
        run = self._runs[self._firsts[at]] if at >= 0 else None
        return run if run is not None and number < run.first + run.count else None

    def _end(self, run: Run) -> None:
        del self._runs[run.first]
        del self._firsts[bisect_right(self._firsts, run.first) - 1]
        self.waiting_bytes -= len(run.frames)
        run.done(run)

    def status(self, status: Status) -> None:
        # Nobody listens to the stream's subject: it has no leader, or it is not there yet.
        self._lost_leader()

    # --- sending again ---------------------------------------------------------------------------

    def _lost_leader(self) -> None:
        self._leaderless = True
        self._look_later(AGAIN_SECONDS)

    def _look_later(self, seconds: float) -> None:
        """Look after that time, or before if that was planned already."""
        if self._timer is not None:
            if self._timer.when() <= self._loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Sends again what has no answer."""
        self._timer = None
        if not self._runs:
            return
        oldest = self._runs[self._firsts[0]]
        quiet_seconds = self._loop.time() - oldest.sent
        if self._leaderless:
            self._send(oldest)
        elif quiet_seconds >= self._answer_seconds:
            self._send_all()
            quiet_seconds = 0.0
        wait_seconds = AGAIN_SECONDS if self._leaderless else self._answer_seconds - quiet_seconds
        self._look_later(max(wait_seconds, AGAIN_SECONDS))

    def _send_all(self) -> None:
        for run in self._runs.values():
            self._send(run)

    # --- the link --------------------------------------------------------------------------------

    def up(self) -> None:
        self._send_all()
