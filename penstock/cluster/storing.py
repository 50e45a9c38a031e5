"""Storing: shipments of followers, into the log, in order and once.

See `lanes.py` for what is agreed. A shipment is stored whole, as one transaction, or refused whole: then the
follower is told for the sake of which of its parts, and everything that it has sent behind it is passed over.

Clients that make queues are slowed down as those of this front-end are (`queues-new-per-second`), all of one
follower together: what they send to new ones waits there, as where there is no room, and nobody else does.

Rule that always holds: the newest key of a lane in the log tells which numbers are stored, here and after any
change of leaders.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial

from penstock.broker.broker import Broker
from penstock.cluster.frames import NUMBER, Frame, Kind, encode_frame, encode_json
from penstock.cluster.lanes import number_of, series_of, unpack_shipment
from penstock.cluster.leader_link import LeaderLink
from penstock.errors import PenstockError
from penstock.log.errors import DiskFull, LogError, LogRefused, QueueFull, QueueUnknown
from penstock.log.log import Log
from penstock.log.results import TransactionDone
from penstock.model.batch import Batch
from penstock.model.policy import QueueNameError


class TooManyNew(PenstockError):
    """A front-end's clients make queues faster than they may: the next ones wait, as for room."""

    def __init__(self) -> None:
        super().__init__("queues are made faster than queues-new-per-second")


class Storing:
    def __init__(self, broker: Broker, log: Log, now_us: Callable[[], int]) -> None:
        self._broker = broker
        self._log = log
        self._now_us = now_us

    def publish(self, link: LeaderLink, frame: Frame) -> None:
        """A shipment has come."""
        lane = frame.flag
        epoch, number, parts = unpack_shipment(frame)
        if epoch != link.epochs[lane]:
            return  # It was behind a shipment that was refused: the follower sends it again.
        series = series_of(link.front_end, link.life, lane)
        now_us = self._now_us()
        stored = partial(self._stored, link, lane, number)
        if number <= number_of(self._log.transaction_newest(series)):
            # It was stored under an earlier link; whether that is durable is not known here.
            self._log.confirm(now_us, stored)
            return
        refusal = self._check_names([queue for queue, _ in parts])
        if refusal is not None:
            self._refuse(link, lane, number, *refusal)
            return
        new = [at for at, (queue, _) in enumerate(parts) if not self._log.has_queue(queue)]
        if new and not link.pace.allows(len(new), self._broker.doors.new_per_second, now_us):
            self._refuse(link, lane, number, new, TooManyNew())
            return
        try:
            self._log.transact(f"{series}{number}", parts, now_us, stored)
        except (DiskFull, QueueFull, LogRefused) as error:
            fault = self._at_fault(parts, error)
            never = isinstance(error, QueueFull) and any(self._never_fits(*parts[at]) for at in fault)
            self._refuse(link, lane, number, fault, error, never=never)
        else:
            for queue, _ in parts:
                self._broker.stir(queue)

    def _check_names(self, queues: list[str]) -> tuple[list[int], LogError | QueueNameError] | None:
        """The first that cannot be a queue, and why; the ones before it count, if they are new."""
        try:
            self._broker.doors.check_names(queues)
        except (LogRefused, QueueNameError):
            for at in range(len(queues)):
                try:
                    self._broker.doors.check_names(queues[: at + 1])
                except (LogRefused, QueueNameError) as error:
                    return [at], error
        return None

    def _at_fault(self, parts: list[tuple[str, Batch]], error: LogError) -> list[int]:
        """For the sake of which parts a shipment was refused; none: nobody knows."""
        if isinstance(error, DiskFull) or len(parts) == 1:
            return list(range(len(parts)))
        if isinstance(error, QueueFull):
            sizes: Counter[str] = Counter()
            for queue, batch in parts:
                sizes[queue] += len(batch.payload)
            return [at for at, (queue, _) in enumerate(parts) if self._is_full(queue, sizes[queue])]
        return []

    def _is_full(self, queue: str, payload_bytes: int) -> bool:
        bytes_max = self._log.policies.for_queue(queue).max_bytes
        if not bytes_max:
            return False
        try:
            living_bytes = self._log.describe(queue).bytes
        except QueueUnknown:
            living_bytes = 0
        return living_bytes + payload_bytes > bytes_max

    def _never_fits(self, queue: str, batch: Batch) -> bool:
        """Whether it is larger than the queue may be: it has to come in smaller pieces."""
        return len(batch.payload) > self._log.policies.for_queue(queue).max_bytes

    def _refuse(
        self,
        link: LeaderLink,
        lane: int,
        number: int,
        parts: list[int],
        error: LogError | QueueNameError | TooManyNew,
        *,
        never: bool = False,
    ) -> None:
        link.epochs[lane] += 1
        full = isinstance(error, DiskFull | QueueFull | TooManyNew)
        fields = {"number": number, "parts": parts, "full": full, "never": never, "text": str(error)}
        fields["disk"] = isinstance(error, DiskFull)
        link.write(encode_frame(Kind.REFUSED, encode_json(fields), flag=lane))

    @staticmethod
    def _stored(link: LeaderLink, lane: int, number: int, result: TransactionDone | LogError | None) -> None:
        if link.is_open and not isinstance(result, LogError):
            link.write(encode_frame(Kind.STORED, NUMBER.pack(number), flag=lane))
