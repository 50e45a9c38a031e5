"""Settling: the ends of deliveries, by a consumer's word, by its loss, or because they did not reach it.

Each tells the log, gives the consumer its room again, and tells those who wait for an answer.
"""

from collections import deque
from collections.abc import Callable, Sequence

from penstock.broker.hand_out import HandOut
from penstock.broker.ports import OTHERS, Attached, tally
from penstock.broker.requests import Requests
from penstock.broker.undurable import Undurable
from penstock.log.errors import LogRefused
from penstock.log.log import Log
from penstock.log.results import Fate
from penstock.model import words
from penstock.model.life import Reason
from penstock.model.words import Outcome, Ranges, ranges_of

RUNS_A_TURN = 200
"""Runs of messages that go back in one turn, however many are lost: a few milliseconds."""


class Settling:
    def __init__(
        self, log: Log, hand_out: HandOut, requests: Requests, wants_turn: Callable[[], None]
    ) -> None:
        self._log = log
        self._hand_out = hand_out
        self._requests = requests
        self._wants_turn = wants_turn
        # Queues, who had messages of them, where these go, and when it was lost.
        self._leaving: deque[tuple[str, str, words.Where, int]] = deque()
        self._runs_left = RUNS_A_TURN  # of this turn
        self.undurable: Undurable | None = None  # as `Publishing` has it

    def settle(self, attached: Attached, command: words.Settle, now_us: int) -> Sequence[Fate]:
        """What has become of those that it held."""
        try:
            fates = self._log.settle(
                command.queue,
                attached.port.name,
                command.outcome,
                command.ranges,
                now_us,
                origin=command.origin,
                ttl_seconds=command.ttl_seconds,
                dead=command.dead,
                delay_us=command.delay_us,
                why=command.why,
            )
        except LogRefused as error:  # A new TTL that no message can have: it holds them still.
            attached.port.log(f"refused: {error}", sum(end - first for first, end in command.ranges))
            return ()
        if self.undurable is not None:
            self.undurable.settled(attached.port, command, fates)
        settled = self._freed(attached, command.queue, command.dead, fates, command.ranges)
        key, others = (command.queue, command.dead), (OTHERS, command.dead)
        attached.settled = tally(attached.settled, key, others, settled)
        named = 0
        for first, end in command.ranges:
            named += end - first
        if settled < named:
            attached.port.log(
                f"queue {command.queue!r}: settled what it does not hold ({command.outcome.value})",
                named - settled,
            )
        requests = self._requests.by_queue.get(command.queue)
        if requests is None or command.dead or not requests.outgoing:
            return fates
        if command.outcome is Outcome.ACK:
            self._requests.answer_empty(requests, fates)
        else:
            self._requests.end_without_answer(command.queue, fates)
        return fates

    def reply(self, attached: Attached, command: words.Reply, now_us: int) -> None:
        ranges = ranges_of(command.offsets)
        fates = self._log.settle(
            command.queue, attached.port.name, Outcome.ACK, ranges, now_us, origin=command.origin
        )
        if self.undurable is not None:
            self.undurable.settled(attached.port, command, fates)
        settled = self._freed(attached, command.queue, False, fates, ranges)
        attached.settled = tally(attached.settled, (command.queue, False), (OTHERS, False), settled)
        self._requests.answer(command, fates)

    def take_back(
        self,
        attached: Attached,
        queue: str,
        dead: bool,
        ranges: Ranges,
        now_us: int,
        why: Reason | None = None,
    ) -> None:
        """Messages that a port holds no more, because it never saw them; or `why` they count as lost."""
        lost, reason = why is not None, why or Reason.CONSUMER_LOST
        fates = self._log.give_back(queue, attached.port.name, now_us, ranges=ranges, lost=lost, why=reason)
        self._freed(attached, queue, dead, fates, ranges)
        self._given_back(queue, fates)

    def give_back_all(self, attached: Attached, now_us: int, lost: bool) -> None:
        """Its port is gone: what it held goes back, by the rule of its protocol where it is `lost`."""
        port = attached.port
        for queue in {queue for queue, _ in attached.holds}:
            if lost:
                self._leaving.append((queue, port.name, port.lost_to, now_us))
            else:  # At once: it may claim them in a moment.
                self._given_back(queue, self._log.give_back(queue, port.name, now_us, lost=False))
                self._forget_orphans(queue, port.name)
        self._go_on(now_us)

    def turn(self, now_us: int) -> None:
        """What lost ports held goes back, so much from one turn to the next. Until then nobody can settle it;
        after a crash it is where it was."""
        self._runs_left = RUNS_A_TURN
        self._go_on(now_us)

    def _go_on(self, now_us: int) -> None:
        while self._leaving and self._runs_left > 0:
            queue, name, where, _ = self._leaving[0]
            fates = self._log.give_back(queue, name, now_us, where=where, runs_max=self._runs_left)
            self._runs_left -= max(len(fates), 1)
            if fates:
                self._given_back(queue, fates)
            else:
                self._leaving.popleft()
                self._forget_orphans(queue, name)  # Until now, requests that it held may have been withdrawn.
        if self._leaving:
            self._wants_turn()

    def finish(self, name: str) -> None:
        """One of that name comes again (a client of another front-end): what it takes from now on is its own,
        so what it has lost goes back before."""
        for entry in [entry for entry in self._leaving if entry[1] == name]:
            queue, _, where, now_us = entry
            self._leaving.remove(entry)
            self._given_back(queue, self._log.give_back(queue, name, now_us, where=where))
            self._forget_orphans(queue, name)

    def _forget_orphans(self, queue: str, name: str) -> None:
        requests = self._requests.by_queue.get(queue)
        if requests is not None:
            requests.forget_orphans(name)

    def _given_back(self, queue: str, fates: Sequence[Fate]) -> None:
        self._requests.end_without_answer(queue, fates)
        self._hand_out.stir(queue)

    def _freed(
        self, attached: Attached, queue: str, dead: bool, fates: Sequence[Fate], ranges: Ranges
    ) -> int:
        """Room that a consumer has again; how many messages it has let go of."""
        settled = 0
        for fate in fates:
            settled += fate.end - fate.first
        requests = self._requests.by_queue.get(queue)
        if requests is not None and requests.orphans and not dead:
            settled += requests.orphans_done(attached.port.name, ranges)
        ghosts = attached.ghosts.get((queue, dead)) if attached.ghosts else None
        if ghosts:
            settled += sum(end - first for pair in ranges for first, end, _ in ghosts.cut(*pair))
        if settled:
            self._hand_out.freed(attached, queue, dead, settled)
            attached.finish_if_done()
        return settled
