"""Requests: who waits for which answer, in all queues.

A request is a message that wants a reply. `asked.py` has those that came together, and the addresses by which
answers find back; here they are found, told and ended.

Rules that always hold:
  * Whoever asks hears once that a consumer has the request, before it hears the answer, however many
    consumers had it and whether or not one of them said so.
  * Every request ends once: answered, undelivered, or withdrawn because its time is over or its sender gone.
    What comes after that is dropped.
  * A consumer that works on a request when it is withdrawn has room again when it is done with it.

Requests that came together have neighbouring offsets, in their order, and mostly stay together until they
are answered. So addresses are looked at run by run: where the first and the last of neighbours are of one
batch and as far apart as they stand, so are those in between, and none of them is read.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import compress

from penstock.broker.asked import Asked, addresses, parse_address
from penstock.broker.port import Port
from penstock.broker.ports import Attached, Ports, own
from penstock.log.errors import LogError
from penstock.log.log import Log
from penstock.log.results import Fate, Receipt, Stored
from penstock.model import words
from penstock.model.batch import Batch, Slice
from penstock.model.life import LIVES_ON, Reason
from penstock.model.ranges import RangeMap
from penstock.model.timers import SECOND_US
from penstock.model.words import Ranges, ranges_of

WITHDRAWN_A_TURN = 1000
"""Requests that are taken out of the log in one turn, however many have ended: a few milliseconds."""

Runs = Sequence[tuple[int, Sequence[bytes]]]
"""Addresses of neighbouring offsets: that of the first one, and all of them in order."""

Found = dict[Asked, tuple[Sequence[int], Sequence[int]]]
"""By the batch that requests came with: their indexes in it, and their offsets. Ranges, mostly."""


class Outgoing:
    """The reply addresses of requests that are with consumers, by offset; for one queue."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: RangeMap[tuple[int, Sequence[bytes]]] = RangeMap()

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, first: int, addresses: Sequence[bytes]) -> None:
        """Handed to a consumer. A request that comes again replaces its former self."""
        end = first + len(addresses)
        if self._runs:
            self._runs.cut(first, end)
        self._runs.add(first, end, (first, addresses))

    def look(self, ranges: Iterable[tuple[int, int]]) -> Runs:
        """The addresses of those that are there."""
        return [
            (a, addresses[a - base : b - base])
            for first, end in ranges
            for a, b, (base, addresses) in self._runs.find(first, end)
        ]

    def take(self, ranges: Iterable[tuple[int, int]]) -> Runs:
        """The same, and they are not there any more."""
        return [
            (a, addresses[a - base : b - base])
            for first, end in ranges
            for a, b, (base, addresses) in self._runs.cut(first, end)
        ]


class QueueRequests:
    """Those of one queue."""

    __slots__ = ("asked", "early", "ended_early", "orphans", "outgoing")

    def __init__(self) -> None:
        self.outgoing = Outgoing()
        self.asked: RangeMap[Asked] = RangeMap()  # by offset
        self.early: dict[Asked, None] = {}  # those whose offsets are not known yet
        self.ended_early: RangeMap[None] = RangeMap()  # what has come to an end since there are such
        self.orphans: RangeMap[str] = RangeMap()  # withdrawn while a consumer (its name) works on them

    def orphans_done(self, name: str, ranges: Ranges) -> int:
        """A consumer is done with requests that were withdrawn from it; how many."""
        done = 0
        for first, end in ranges:
            for a, b, holder in self.orphans.find(first, end):
                if holder == name:
                    self.orphans.cut(a, b)
                    done += b - a
        return done

    def forget_orphans(self, name: str) -> None:
        """That consumer is gone."""
        for first, end, holder in list(self.orphans):
            if holder == name:
                self.orphans.cut(first, end)


class Requests:
    def __init__(self, log: Log, ports: Ports, wants_turn: Callable[[], None]) -> None:
        self._log = log
        self._ports = ports
        self._wants_turn = wants_turn
        self._opening = log.opening
        self.by_queue: dict[str, QueueRequests] = {}  # where there was one
        self._deadlines: list[tuple[int, int, Asked]] = []
        self._deadlines_over = 0  # how many of them are of requests that have ended
        self._clock_us = 0  # by which they are due: nobody waits longer or shorter by the time of day
        self._seen_us = 0  # what the time was when that was looked at
        # What is still to be withdrawn of those that have ended: queue, first offset, which were open, why.
        # Whoever had asked has been told, and answers are dropped. The next opening withdraws what is left.
        self._leaving: deque[tuple[str, QueueRequests, int, bytearray, Reason]] = deque()

    def _of(self, queue: str) -> QueueRequests:
        requests = self.by_queue.get(queue)
        if requests is None:
            requests = self.by_queue[queue] = QueueRequests()
        return requests

    def is_asked(self, queue: str) -> bool:
        """Whether somebody waits for answers to requests in that queue."""
        requests = self.by_queue.get(queue)
        return requests is not None and bool(requests.asked or requests.early)

    # --- on their way in -------------------------------------------------------------------------

    def prepare(self, attached: Attached, command: words.Publish, tickets: "array[int]") -> Asked:
        """Requests that are about to be stored: their messages carry the way back."""
        asked = Asked(attached.port, attached.asked_count, command.queue, tickets)
        attached.asked_count += 1
        command.batch.reply = addresses(self._opening, attached.number, asked.number, len(tickets))
        return asked

    def begin(self, attached: Attached, asked: Asked, timeout_seconds: int, now_us: int) -> None:
        """The log has taken them. It may have told already where they are."""
        attached.asked = own(attached.asked)
        attached.asked[asked.number] = asked
        if asked.first < 0:
            self._of(asked.queue).early[asked] = None
        if timeout_seconds:
            asked.timed = True
            clock_us = self._clock_us + max(now_us - self._seen_us, 0)
            heappush(self._deadlines, (clock_us + timeout_seconds * SECOND_US, id(asked), asked))

    def receipt(self, asked: Asked, now_us: int) -> Receipt:
        def receipt(result: Stored | LogError) -> None:
            requests = self._of(asked.queue)
            requests.early.pop(asked, None)
            if not isinstance(result, Stored):
                self._undelivered(asked, asked.end_all())
                return
            asked.first = result.first
            if requests.ended_early:
                # Where all have ended, it may have been with their queue, and these are another's.
                ended = requests.ended_early.find(result.first, result.end) if asked.open_count else ()
                for first, end, _ in ended:
                    self._end_undelivered(asked, asked.open_in(first, end))
                if not requests.early:
                    requests.ended_early = RangeMap()
            if not asked.open_count:
                return
            if asked.port in self._ports.attached:
                requests.asked.add(result.first, result.end, asked)
            else:
                # Its sender left before the log had told where the requests are.
                self._withdraw(asked, Reason.REQUESTER_GONE)

        return receipt

    # --- with consumers --------------------------------------------------------------------------

    def note(self, queue: str, port: Port, slices: list[Slice]) -> None:
        """A port is about to be handed these."""
        for piece in slices:
            if piece.reply is not None:
                ways = piece.reply[piece.lo : piece.hi]
                self._of(queue).outgoing.add(piece.offset_start, ways)
                if port.protocol != "rq":
                    # Other protocols have no word for it: having it is having taken it.
                    self._tell_delivered([(piece.offset_start, ways)])

    def accepted(self, attached: Attached, command: words.Accepted, now_us: int) -> None:
        requests = self.by_queue.get(command.queue)
        if requests is not None:
            self._tell_delivered(requests.outgoing.look(command.ranges))

    def _tell_delivered(self, runs: Runs) -> None:
        for asked, (indexes, _) in self.find_open(runs).items():
            self._tell_once(asked, indexes)

    @staticmethod
    def _tell_once(asked: Asked, indexes: Sequence[int]) -> None:
        """That a consumer has these; whoever asked has not heard it of some, whichever consumer it was."""
        fresh = asked.tell(indexes)
        if fresh:
            asked.port.delivered(fresh)

    def find_open(self, runs: Runs) -> Found:
        """Those for whose answers somebody still waits."""
        found: Found = {}
        for first, ways in runs:
            at, end = 0, len(ways)
            while at < end:
                numbers = parse_address(ways[at], self._opening)
                attached = self._ports.by_number.get(numbers[0]) if numbers is not None else None
                asked = (
                    attached.asked.get(numbers[1]) if numbers is not None and attached is not None else None
                )
                if numbers is None or asked is None or not 0 <= numbers[2] < len(asked.tickets):
                    at += 1
                    continue
                index = numbers[2]
                count = min(end - at, len(asked.tickets) - index)
                last = parse_address(ways[at + count - 1], self._opening)
                if last != (numbers[0], numbers[1], index + count - 1):
                    count = 1
                indexes = asked.open_from(index, count)
                if indexes:
                    offsets: Sequence[int] = range(first + at, first + at + count)
                    if not isinstance(indexes, range):
                        offsets = [first + at + i - index for i in indexes]
                    before = found.get(asked)
                    if before is not None:
                        indexes, offsets = _more(before[0], indexes), _more(before[1], offsets)
                    found[asked] = indexes, offsets
                at += count
        return found

    # --- ends ------------------------------------------------------------------------------------

    def answer(self, command: words.Reply, fates: Sequence[Fate]) -> None:
        """A consumer has settled these, with answers."""
        requests = self.by_queue.get(command.queue)
        if requests is None or not fates:
            return
        runs = requests.outgoing.take([(fate.first, fate.end) for fate in fates])
        answers = command.answers
        positions: dict[int, int] = {}
        for asked, (indexes, offsets) in self.find_open(runs).items():
            chosen = answers
            if array("q", offsets) != command.offsets:
                positions = positions or {offset: i for i, offset in enumerate(command.offsets)}
                chosen = _pick(answers, [positions[offset] for offset in offsets])
            self._answered(asked, indexes, chosen)

    def answer_empty(self, requests: QueueRequests, fates: Sequence[Fate]) -> None:
        """A consumer has settled these through a door without answers: the answer is empty."""
        runs = requests.outgoing.take([(fate.first, fate.end) for fate in fates])
        for asked, (indexes, _) in self.find_open(runs).items():
            self._answered(asked, indexes, Batch(b"", array("i", bytes(4 * (len(indexes) + 1)))))

    def _answered(self, asked: Asked, indexes: Sequence[int], answers: Batch) -> None:
        self._tell_once(asked, indexes)
        asked.port.replies(asked.tickets_of(indexes), answers)
        asked.end(indexes)
        self._forget_if_done(asked)

    def end_without_answer(self, queue: str, fates: Iterable[Fate]) -> None:
        """Requests among messages that have come to an end: tell who waits."""
        requests = self.by_queue.get(queue)
        if requests is None:
            return
        ended = [(f.first, f.end) for f in fates if f.event not in LIVES_ON]
        if requests.outgoing:
            # These carry their way back, which is known before the log has told their offsets.
            for asked, (indexes, _) in self.find_open(requests.outgoing.take(ended)).items():
                self._end_undelivered(asked, indexes)
        for first, end in ended:
            for a, b, asked in requests.asked.find(first, end) if requests.asked else ():
                self._end_undelivered(asked, asked.open_in(a, b))
            if requests.early:
                # Whoever asked is told when it is known which requests these were.
                requests.ended_early.cut(first, end)
                requests.ended_early.add(first, end, None)

    def sender_gone(self, attached: Attached, now_us: int) -> None:
        for asked in attached.asked.values():
            if asked.first >= 0:
                self._withdraw(asked, Reason.REQUESTER_GONE)

    def queue_gone(self, queue: str) -> None:
        """It was deleted: whoever waits for an answer is told that there will be none."""
        requests = self.by_queue.pop(queue, None)
        if requests is not None:
            for asked in {**requests.early, **{asked: None for _, _, asked in requests.asked}}:
                self._undelivered(asked, asked.end_all())

    def end_all(self, now_us: int) -> None:
        """The broker stops: whoever still waits for an answer is told that there will be none."""
        for attached in self._ports.everybody():
            for asked in list(attached.asked.values()):
                if asked.first >= 0:
                    self._withdraw(asked, Reason.UNDELIVERABLE)
                else:
                    self._undelivered(asked, asked.end_all())
        self.turn(now_us)

    def _withdraw(self, asked: Asked, reason: Reason) -> None:
        """Nobody waits for these any more."""
        self._leaving.append((asked.queue, self._of(asked.queue), asked.first, asked.opened, reason))
        self._undelivered(asked, asked.end_all())
        self._wants_turn()

    def turn(self, now_us: int) -> None:
        """Withdraw some of those that nobody waits for; consumers that work on them have room when done."""
        # Those of a queue together: the log looks at everybody who holds something there.
        found: dict[tuple[str, Reason], list[int]] = {}
        left = WITHDRAWN_A_TURN
        while self._leaving and left > 0:
            queue, requests, first, opened, reason = self._leaving.popleft()
            if self.by_queue.get(queue) is not requests:
                continue  # That queue is gone.
            count = min(len(opened), left)
            if count < len(opened):
                self._leaving.appendleft((queue, requests, first + count, opened[count:], reason))
            found.setdefault((queue, reason), []).extend(compress(range(first, first + count), opened))
            left -= count
        for (queue, reason), offsets in found.items():
            requests, ranges = self.by_queue[queue], ranges_of(offsets)
            requests.outgoing.take(ranges)
            for fate in self._log.withdraw(queue, ranges, reason, now_us):
                if fate.consumer:
                    requests.orphans.add(fate.first, fate.end, fate.consumer)
        if self._leaving:
            self._wants_turn()

    def _end_undelivered(self, asked: Asked, indexes: Sequence[int]) -> None:
        asked.end(indexes)
        self._undelivered(asked, asked.tickets_of(indexes))

    def _undelivered(self, asked: Asked, tickets: Sequence[int]) -> None:
        if tickets and asked.port in self._ports.attached:
            asked.port.undelivered(tickets)
        self._forget_if_done(asked)

    def _forget_if_done(self, asked: Asked) -> None:
        if asked.open_count:
            return
        attached = self._ports.attached.get(asked.port)
        if attached is not None and attached.asked.pop(asked.number, None) is not None:
            attached.finish_if_done()
        requests = self.by_queue.get(asked.queue)
        if requests is not None and asked.first >= 0 and requests.asked:
            requests.asked.cut(asked.first, asked.first + len(asked.tickets))
        if asked.timed:
            asked.timed = False
            self._deadlines_over += 1
            self._thin_deadlines()

    # --- deadlines -------------------------------------------------------------------------------

    def stepped(self, by_us: int) -> None:
        self._seen_us += by_us

    def expire(self, now_us: int) -> None:
        """Withdraw those whose time is over."""
        self._clock_us += max(now_us - self._seen_us, 0)
        self._seen_us = now_us
        late = []
        while self._deadlines and self._deadlines[0][0] <= self._clock_us:
            deadline = heappop(self._deadlines)
            asked = deadline[2]
            if not asked.timed:
                self._deadlines_over -= 1
            elif asked.first < 0:
                late.append(deadline)  # The disk is slow: withdrawn as soon as it is known where they are.
            else:
                asked.timed = False
                self._withdraw(asked, Reason.TIMEOUT)
        for deadline in late:
            heappush(self._deadlines, deadline)
        self._thin_deadlines()

    def _thin_deadlines(self) -> None:
        """Let go of those that are over, with their ports, before they are more than half."""
        if 2 * self._deadlines_over > len(self._deadlines):
            self._deadlines[:] = [entry for entry in self._deadlines if entry[2].timed]
            heapify(self._deadlines)
            self._deadlines_over = 0


def _pick(batch: Batch, positions: Iterable[int]) -> Batch:
    return Batch.of([batch.payload[batch.bounds[i] : batch.bounds[i + 1]] for i in positions])


def _more(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """A list is made longer where there is one: many runs take no more time than their length."""
    together: list[int] = before if isinstance(before, list) else list(before)
    together.extend(after)
    return together
