"""Publishing: messages from ports to the log, and word of them back to whoever sent them.

Rules that always hold:
  * A sender for whose messages there is no room is not told no at once: it is not read any more, its
    messages wait here in order, and go in as soon as there is room, before those of later senders.
  * So does one that makes queues faster than it may, and nobody else waits for that.
  * What a sender settles behind messages that wait, waits behind them: who has sent a result and then settled
    its input must not have settled alone. Behind requests it does not: these end with their sender anyway.
  * Who can be told no (RQ) does not wait for ever: a request not longer than its own time, and nobody longer
    than `DISK_SECONDS` for room on the disk, which no consumer makes.
  * What the log refuses for good is refused here, to its sender, by name.
  * A port that asks whether all it has said is durable is answered once for all that it asks in a turn.
"""

from collections.abc import Callable, Sequence, Set
from typing import Final

from penstock.broker.doors import Doors
from penstock.broker.hand_out import HandOut
from penstock.broker.ports import Attached, Ports
from penstock.broker.requests import Requests
from penstock.broker.settling import Settling
from penstock.broker.undurable import Undurable
from penstock.log.errors import DiskFull, LogError, LogRefused, QueueFull
from penstock.log.log import Log
from penstock.log.results import Receipt, Stored
from penstock.model import words
from penstock.model.policy import QueueNameError
from penstock.model.timers import SECOND_US

EVERY_QUEUE: Final = ""
DISK_SECONDS: Final = 10


class Publishing:
    def __init__(
        self,
        log: Log,
        ports: Ports,
        doors: Doors,
        hand_out: HandOut,
        requests: Requests,
        settling: Settling,
        wants_turn: Callable[[], None],
    ) -> None:
        self._log = log
        self._ports = ports
        self._doors = doors
        self._hand_out = hand_out
        self._requests = requests
        self._settling = settling
        self._wants_turn = wants_turn
        self.held_back: dict[Attached, int] = {}  # since when; in the order in which they go in
        self._full: set[str] = set()  # queues that they wait for; EVERY_QUEUE where the disk is full
        self._syncing: dict[Attached, None] = {}  # these want to hear when all that they have said is durable
        self.undurable: Undurable | None = None  # where somebody else may have to go on

    def forget(self, attached: Attached) -> None:
        """It is gone, and what it had sent and there was no room for goes with it: nobody else is told."""
        if attached.waiting:
            count = sum(len(it.batch) for it in attached.waiting if isinstance(it, words.Publish))
            attached.port.log(f"left while {count} messages that it had sent waited for room: not stored", 1)
        self.held_back.pop(attached, None)
        self._syncing.pop(attached, None)

    # --- messages --------------------------------------------------------------------------------

    def publish(self, attached: Attached, command: words.Publish, now_us: int) -> None:
        if attached.waiting:
            attached.waiting.append(command)
        elif (self._full and self._others_wait(command.queue)) or not self._store(attached, command, now_us):
            attached.waiting.append(command)
            attached.port.hold(True)
            self.held_back[attached] = now_us

    def _others_wait(self, queue: str) -> bool:
        """Whether somebody came before who waits for room in that queue: nobody overtakes it."""
        return queue in self._full or EVERY_QUEUE in self._full

    def _store(self, attached: Attached, command: words.Publish, now_us: int) -> bool:
        """Whether the log has taken them, or refused them for good; they wait where it has no room, or would
        have to make a queue too soon."""
        queue, batch, tickets = command.queue, command.batch, command.tickets
        batch.protocol = attached.port.protocol
        asked = None
        receipt = None
        if tickets is not None:
            if command.wants_reply:
                asked = self._requests.prepare(attached, command, tickets)
                receipt = self._requests.receipt(asked, now_us)
            else:
                receipt = self._receipt(attached, command, tickets)
        try:
            if not self._log.has_queue(queue):
                self._doors.check_names((queue,))
                if not attached.pace.allows(1, self._doors.new_per_second, now_us):
                    attached.port.log("makes queues faster than queues-new-per-second: the next ones wait", 1)
                    return False
            self._log.append(queue, batch, now_us, receipt)
        except (LogRefused, QueueNameError) as error:
            if isinstance(error, DiskFull | QueueFull) and not self._never_fits(command):
                self._full.add(EVERY_QUEUE if isinstance(error, DiskFull) else queue)
                return False
            attached.port.log(f"refused: {error}", len(batch))
            if tickets is not None:
                attached.port.undelivered(tickets)
            else:
                attached.port.refused(len(batch))
            return True
        if asked is not None:
            self._requests.begin(attached, asked, command.timeout_seconds, now_us)
        else:
            if receipt is not None:
                attached.receipts += 1
            if self.undurable is not None:
                self.undurable.published(attached.port, command)
        self._hand_out.stir(queue)
        return True

    def _never_fits(self, command: words.Publish) -> bool:
        """Whether it is one message that is more than its queue may ever have."""
        bytes_max = self._log.policies.for_queue(command.queue).max_bytes
        return len(command.batch) == 1 and 0 < bytes_max < len(command.batch.payload)

    def _receipt(self, attached: Attached, command: words.Publish, tickets: Sequence[int]) -> Receipt:
        port = attached.port

        def receipt(result: Stored | LogError) -> None:
            # Where the log has failed, nobody knows whether they are stored: the connection is about to end,
            # or goes on at another broker.
            if port not in self._ports.attached or not isinstance(result, Stored):
                return
            command.tickets = None  # It is told, whatever becomes of them.
            port.delivered(tickets)
            attached.receipts -= 1
            attached.finish_if_done()

        return receipt

    # --- those that wait for room ----------------------------------------------------------------

    def stepped(self, by_us: int) -> None:
        self.held_back = {attached: since_us + by_us for attached, since_us in self.held_back.items()}

    def retry(self, now_us: int) -> None:
        """Room may have come back: take in what waits, in order, and go on reading from its senders."""
        self._full.clear()
        for attached in list(self.held_back):
            while attached.waiting:
                command = attached.waiting[0]
                if not isinstance(command, words.Publish):
                    del attached.waiting[0]
                    self._settle(attached, command, now_us)
                    continue
                if self._others_wait(command.queue):
                    break
                del attached.waiting[0]
                if self._store(attached, command, now_us):
                    continue
                if command.queue not in self._full or len(command.batch) == 1:
                    attached.waiting.insert(0, command)
                    break
                # Some may fit where all do not, and all of them may be more than the queue ever takes.
                self._full.discard(command.queue)
                attached.waiting[:0] = command.halves()
            self._end_late(attached, now_us - self.held_back[attached])
            if not attached.waiting:
                del self.held_back[attached]
                attached.port.hold(False)
                attached.finish_if_done()
                self._wants_turn()

    def _settle(self, attached: Attached, command: words.Settle | words.Reply, now_us: int) -> None:
        if isinstance(command, words.Settle):
            self._settling.settle(attached, command, now_us)
        else:
            self._settling.reply(attached, command, now_us)

    def _end_late(self, attached: Attached, waited_us: int) -> None:
        """Tell those no who have waited for long enough, and can be told."""
        seconds = waited_us // SECOND_US
        first = attached.waiting[0] if attached.waiting else None
        if not seconds or not isinstance(first, words.Publish) or first.tickets is None:
            return
        waiting, attached.waiting = attached.waiting, []
        for command in waiting:
            is_over = self.waits_for_disk and seconds >= DISK_SECONDS
            if (
                not isinstance(command, words.Publish)
                or command.tickets is None
                or not (is_over or 0 < command.timeout_seconds <= seconds)
            ):
                attached.waiting.append(command)
                continue
            room = "on the disk" if self.waits_for_disk else f"in queue {command.queue!r}"
            attached.port.log(f"undelivered: there was no room {room} for {seconds} s", len(command.batch))
            attached.port.undelivered(command.tickets)

    @property
    def full(self) -> Set[str]:
        """Queues that senders wait for room in; EVERY_QUEUE: on the disk."""
        return self._full

    @property
    def waits_for_disk(self) -> bool:
        """Whether messages wait here because there is no room for them on the disk."""
        return EVERY_QUEUE in self._full

    # --- confirmations ---------------------------------------------------------------------------

    def sync(self, attached: Attached, command: words.Sync, now_us: int) -> None:
        if attached not in self._syncing:
            self._syncing[attached] = None
            attached.receipts += 1

    def confirm(self, now_us: int) -> None:
        """One confirmation for all that asked in this turn. Whose messages wait for room is asked later."""
        if not self._syncing:
            return
        ready = [attached for attached in self._syncing if not attached.waiting]
        self._syncing = {attached: None for attached in self._syncing if attached.waiting}

        def confirmed(error: LogError | None) -> None:
            for attached in ready if error is None else ():
                attached.receipts -= 1
                if attached.port in self._ports.attached:
                    attached.port.synced()
                    attached.finish_if_done()

        if ready:
            self._log.confirm(now_us, confirmed)
