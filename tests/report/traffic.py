"""Traffic on order: a log as some hours of work leave it, made by the real engine with a clock of our own.

Everything is drawn from a seed, and nothing waits: three hours of a busy broker are there in a second. The
queues differ in what goes wrong in them:

    orders        phpmq consumers on two machines; one is slow, one crashes, some messages are rejected
    mail/out      TTL, too few consumers: messages expire
    thumbnails    a consumer that cannot keep up for a while, so that a backlog grows and goes
    fragile       sspq, retries that run down; later an operator redrives the dead letters
    purged        nobody consumes, and somebody purges
    retried       retry-delays, and a consumer over HTTP that fails often
    <script>…     a name that a careless report would run
"""

import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from penstock.log.log import Log, open_log
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.life import Reason
from penstock.model.policy import Policies
from penstock.model.words import Outcome, Where

SECOND: Final = 1_000_000
SEGMENT_BYTES: Final = 8 << 20
HOSTILE: Final = "<script>alert('queue')</script>&\"quoted\""

Shape = Callable[[float], float]
"""What part of its usual load a queue has, by the part of the time that is over."""


def steady(_part: float) -> float:
    return 1.0


def rush(part: float) -> float:
    """More and more towards the middle, with a peak."""
    return 0.4 + 1.2 * max(0.0, 1 - abs(part - 0.55) * 3) + (2.0 if 0.6 < part < 0.64 else 0.0)


def never(_part: float) -> float:
    return 0.0


class Worker(NamedTuple):
    """A consumer. Shares are parts of its deliveries; the rest is acknowledged."""

    name: str
    credit: int
    work_seconds: float  # about half of its deliveries take longer than this
    rejects: float = 0.0
    requeues: float = 0.0
    crashes: float = 0.0  # per delivery
    where: Where = Where.TAIL
    absent: tuple[float, float] = (2.0, 2.0)  # the part of the time for which it is not there


@dataclass
class Queue:
    """How messages come into a queue, and who takes them."""

    name: str
    per_second: float
    workers: list[Worker]
    shape: Shape = steady
    ttl_seconds: int = 0
    retries: int | None = None
    protocol: str = "phpmq"
    busy: dict[str, int] = field(default_factory=dict)


def queues() -> list[Queue]:
    orders = [
        Worker("phpmq:10.0.0.11:41200#1", 8, 0.08, rejects=0.004, requeues=0.02),
        Worker("phpmq:10.0.0.11:41204#2", 8, 0.09, rejects=0.004, requeues=0.02),
        Worker("phpmq:10.0.0.12:50112#3", 8, 1.9, rejects=0.01),
        Worker("phpmq:[2001:db8::7]:38000#4", 8, 0.12, crashes=0.03, requeues=0.08),
    ]
    return [
        Queue("orders", 2.0, orders, rush),
        Queue("mail/out", 0.9, [Worker("phpmq:10.0.0.20:4711#5", 1, 1.3)], steady, ttl_seconds=30),
        Queue(
            "thumbnails",
            1.2,
            [
                Worker("rq:10.0.0.31:60001#6", 2, 0.7, absent=(0.3, 0.45)),
                Worker("rq:10.0.0.32:60002#7", 2, 0.9, absent=(0.3, 0.45)),
            ],
            protocol="rq",
        ),
        Queue(
            "fragile",
            0.3,
            [Worker("sspq:unix#8", 1, 0.4, crashes=0.25, where=Where.PLACE)],
            retries=2,
            protocol="sspq",
        ),
        Queue("purged", 0.1, [], protocol="http"),
        Queue("retried", 0.3, [Worker("http:10.0.0.40:5123", 4, 0.3, 0.01, 0.1, 0.05)], protocol="http"),
        Queue(HOSTILE, 0.2, [Worker("rq:10.0.0.31:60001#6", 1, 0.2)], protocol="rq"),
    ]


class Simulation:
    """A log that is being made, in steps of a second."""

    def __init__(self, folder: Path, start_us: int, seconds: int, seed: int, scale: float = 1.0) -> None:
        self._random = random.Random(seed)
        self._start_us = start_us
        self._seconds = seconds
        self._scale = scale
        self._queues = queues()
        self._ends: list[tuple[int, int, Queue, Worker, int]] = []
        self._count = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._engine: Log = open_log(
            str(folder),
            start_us,
            settings=LogSettings(segment_bytes=SEGMENT_BYTES),
            policies=Policies({"retried": {"retry-delays": [2, 30]}}),
        )

    def run(self) -> None:
        engine = self._engine
        for second in range(self._seconds):
            part = second / self._seconds
            for queue in self._queues:
                self._send(queue, part, self._start_us + second * SECOND)
            for tenth in range(10):
                now_us = self._start_us + second * SECOND + tenth * SECOND // 10
                self._end_deliveries(now_us)
                for queue in self._queues:
                    self._take(queue, part, now_us)
                engine.flush(now_us)
                engine.poll()
            engine.expire(now_us)
            engine.due(now_us)
            if second == int(self._seconds * 0.7):
                engine.redrive("fragile", now_us, reason=Reason.RETRIES_EXHAUSTED, limit=30)
                engine.purge("purged", now_us)
            if second == int(self._seconds * 0.8):
                self._look_at_dead_letters(now_us)
        engine.flush(now_us)
        engine.wait()
        engine.close(now_us)

    def _send(self, queue: Queue, part: float, now_us: int) -> None:
        wanted = queue.per_second * self._scale * queue.shape(part)
        count = int(wanted) + (self._random.random() < wanted % 1)
        if not count:
            return
        batch = Batch.of(
            [b"%d" % self._random.randrange(10**9) for _ in range(count)],
            ttl_seconds=[queue.ttl_seconds] * count if queue.ttl_seconds else None,
            retries=[queue.retries] * count if queue.retries is not None else None,
            protocol=queue.protocol,
        )
        self._engine.append(queue.name, batch, now_us)

    def _take(self, queue: Queue, part: float, now_us: int) -> None:
        for worker in self._random.sample(queue.workers, len(queue.workers)):
            room = int(worker.credit * max(self._scale, 1)) - queue.busy.get(worker.name, 0)
            if room <= 0 or worker.absent[0] <= part < worker.absent[1]:
                continue
            sent_us = now_us + self._random.randrange(200, 40_000)
            for piece in self._engine.take(queue.name, worker.name, room, sent_us):
                for offset in range(piece.offset_start, piece.offset_end):
                    took = worker.work_seconds * self._random.lognormvariate(0, 0.6)
                    queue.busy[worker.name] = queue.busy.get(worker.name, 0) + 1
                    self._count += 1
                    end_us = sent_us + int(took * SECOND)
                    heapq.heappush(self._ends, (end_us, self._count, queue, worker, offset))

    def _end_deliveries(self, now_us: int) -> None:
        while self._ends and self._ends[0][0] <= now_us:
            _, _, queue, worker, offset = heapq.heappop(self._ends)
            if queue.busy[worker.name] == 0:
                continue  # it has crashed meanwhile, and has lost everything
            draw = self._random.random()
            if draw < worker.crashes:
                self._engine.give_back(queue.name, worker.name, now_us, where=worker.where, lost=True)
                queue.busy[worker.name] = 0
                self._ends = [end for end in self._ends if end[3] is not worker or end[2] is not queue]
                heapq.heapify(self._ends)
                continue
            queue.busy[worker.name] -= 1
            if draw < worker.crashes + worker.rejects:
                outcome = Outcome.REJECT
            elif draw < worker.crashes + worker.rejects + worker.requeues:
                outcome = Outcome.REQUEUE
            else:
                outcome = Outcome.ACK
            self._engine.settle(queue.name, worker.name, outcome, [(offset, offset + 1)], now_us)

    def _look_at_dead_letters(self, now_us: int) -> None:
        """Somebody takes dead letters through the door: gives some back, and acknowledges others."""
        engine, who = self._engine, "phpmq:10.0.0.99:9999#90"
        taken = [
            offset
            for piece in engine.take("mail/out", who, 6, now_us, dead=True)
            for offset in range(piece.offset_start, piece.offset_end)
        ]
        later_us = now_us + 2 * SECOND
        ranges = [(offset, offset + 1) for offset in taken]
        engine.settle("mail/out", who, Outcome.ACK, ranges[:3], later_us, dead=True)
        engine.settle("mail/out", who, Outcome.REJECT, ranges[3:4], later_us, dead=True)
        engine.give_back("mail/out", who, later_us, lost=False)


def write_log(
    folder: Path, end_us: int, seconds: int = 3 * 3600, seed: int = 7, scale: float = 1.0
) -> Mapping[str, int]:
    """A log of the last `seconds` before `end_us`; the names of its queues."""
    Simulation(folder, end_us - seconds * SECOND, seconds, seed, scale).run()
    return {queue.name: 0 for queue in queues()}
