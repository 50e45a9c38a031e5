"""Data folders for the tests of what reads them: random work on a real log, and planted content."""

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from penstock.log.errors import LogError
from penstock.log.log import Log, open_log
from penstock.log.results import Receipt, StageInfo
from penstock.log.state import LogSettings
from penstock.model.batch import Batch, Slice
from penstock.model.headers import encode_headers
from penstock.model.life import Reason
from penstock.model.policy import Policies
from penstock.model.words import Outcome, Where

NOW_US = 1_800_000_000_000_000
SECOND_US = 1_000_000
SETTINGS = LogSettings(segment_bytes=16 * 1024, block_bytes=2048, snapshot_blocks=60)
POLICIES = Policies(
    {
        "brief": {"retention-seconds": 0},
        "lazy": {"durability": "none", "retention-seconds": 0},
        "short": {"retention-seconds": 2, "max-deliveries": 2, "on-expiry": "drop"},
    }
)
QUEUES = ("brief", "lazy", "short", "kept")
PROTOCOLS = ("", "sspq", "phpmq", "rq", "http", "spark")


def harmed(content: bytes, rng: random.Random) -> bytes:
    """A file that was cut off, or has junk or zeros from somewhere on."""
    at = rng.randrange(len(content))
    match rng.randrange(3):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + rng.randbytes(len(content[at : at + 100])) + content[at + 100 :]
        case _:
            return content[:at] + bytes(len(content[at : at + 500])) + content[at + 500 :]


def no_receipt(_result: object) -> None:
    """For those who do not want to know."""


class Worker:
    """Does, turn by turn, what a broker does with a log; time is its own."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        queues: Sequence[str] = QUEUES,
        settings: LogSettings = SETTINGS,
    ) -> None:
        self.folder = folder
        self.queues = queues
        self.rng = random.Random(seed)
        self.settings = settings
        self.now_us = NOW_US
        self.staged: dict[str, list[str]] = {}  # by key: stages that were confirmed
        self.aborts: Counter[str] = Counter()  # by key
        self.engine = self._open()

    def _open(self) -> Log:
        return open_log(str(self.folder), self.now_us, settings=self.settings, policies=POLICIES)

    def reopen(self, crash: bool) -> None:
        if crash:
            self.engine.abandon()
        else:
            self.engine.close(self.now_us)
        self.now_us += SECOND_US
        self.engine = self._open()

    def batch(self) -> Batch:
        rng = self.rng
        count = rng.choice((1, 1, 2, 5, 20))
        reply = [b"to-%d" % i for i in range(count)] if rng.random() < 0.1 else None
        is_delayed = reply is None and rng.random() < 0.2
        return Batch.of(
            [rng.randbytes(rng.choice((0, 3, 40, 90))) for _ in range(count)],
            ttl_seconds=[rng.choice((0, 1, 30)) for _ in range(count)] if rng.random() < 0.3 else None,
            retries=[rng.choice((-1, 0, 2, 255)) for _ in range(count)] if rng.random() < 0.3 else None,
            reply=reply,
            protocol=rng.choice(PROTOCOLS),
            delay_us=[rng.choice((0, SECOND_US // 2, 3 * SECOND_US)) for _ in range(count)]
            if is_delayed
            else None,
            headers=[
                encode_headers({f"né-{i}": '"é"' * i for i in range(rng.randrange(4))}) for _ in range(count)
            ]
            if rng.random() < 0.3
            else None,
        )

    def turn(self) -> None:
        """A few things, then the end of a turn of the loop."""
        self.now_us += self.rng.choice((10, 1000, SECOND_US // 3))
        self.engine.due(self.now_us)
        for _ in range(self.rng.randint(1, 4)):
            self.rng.choice((self._send, self._send, self._work, self._work, self._work, self._rare))()
        self.engine.flush(self.now_us)
        if self.rng.random() < 0.3:
            self.engine.wait()
        self.engine.poll()

    def settle_down(self) -> None:
        """Everything that was done so far is synced, and trimming has come to an end."""
        self.now_us += 2 * SECOND_US
        for _ in range(2):
            self.engine.tick(self.now_us)
            self.engine.wait()

    def _send(self) -> None:
        receipt: Receipt = no_receipt
        if self.rng.random() < 0.3:
            queues = self.rng.sample(self.queues, 2)
            parts = [(queue, self._part(queue)) for queue in queues]
            self.rng.choice((self._transact, self._stage, self._commit))(parts)
        else:
            self.engine.append(self.rng.choice(self.queues), self.batch(), self.now_us, receipt)

    def _without_reply(self) -> Batch:
        batch = self.batch()
        batch.reply = None
        return batch

    def _part(self, queue: str) -> Batch:
        """What may be a part of a transaction."""
        rng, batch = self.rng, self._without_reply()
        what = rng.random()
        if what < 0.1:
            batch.dead = Reason.BAD_RECORD
            batch.delay_us = None
        elif what < 0.2 and queue in self.engine.queues():
            # Those of them that are dead letters are repaired.
            letters = range(self.engine.describe(queue).offset_end)
            repairs = sorted(rng.sample(letters, min(len(letters), 20)))
            if repairs:
                batch = Batch.of([b"repaired %d" % offset for offset in repairs])
                batch.repairs = array("q", repairs)
        return batch

    def _transact(self, parts: list[tuple[str, Batch]]) -> None:
        self.engine.transact(f"key-{self.rng.random()}", parts, self.now_us)

    def _stage(self, parts: list[tuple[str, Batch]]) -> None:
        keys = [*self.staged, f"key-{self.rng.random()}"]
        key = self.rng.choice(keys)

        def receipt(info: StageInfo | LogError) -> None:
            assert isinstance(info, StageInfo), info
            self.staged.setdefault(key, []).append(info.stage)

        self.engine.stage(key, parts, self.now_us, receipt)
        self.engine.wait()  # What is staged decides what is done next, and a seed shall always do the same.

    def _commit(self, _: object) -> None:
        """Something that was staged becomes messages, or nothing does."""
        if not self.staged:
            return
        key = self.rng.choice(list(self.staged))
        stages = self.staged.pop(key)
        if self.rng.random() < 0.2:
            self.aborts[key] += 1
            self.engine.abort(key, self.now_us)
        else:
            self.engine.commit(key, self.rng.sample(stages, self.rng.randint(1, len(stages))), self.now_us)

    def _work(self) -> None:
        rng, engine = self.rng, self.engine
        queue = rng.choice(self.queues)
        consumer = rng.choice(("ann", "bob"))
        dead = rng.random() < 0.15
        for piece in engine.take(queue, consumer, rng.choice((1, 10, 50)), self.now_us, dead=dead):
            self._finish(queue, consumer, piece, dead)

    def _finish(self, queue: str, consumer: str, piece: Slice, dead: bool) -> None:
        rng, engine = self.rng, self.engine
        ranges = [(piece.offset_start, piece.offset_end)]
        ending = rng.random()
        if ending < 0.65:
            engine.settle(queue, consumer, Outcome.ACK, ranges, self.now_us, dead=dead)
        elif ending < 0.72:
            text = rng.choice(("", "no such order"))
            engine.settle(queue, consumer, Outcome.REJECT, ranges, self.now_us, dead=dead, why=text)
        elif ending < 0.8:
            engine.settle(
                queue,
                consumer,
                Outcome.REQUEUE,
                ranges,
                self.now_us,
                dead=dead,
                ttl_seconds=rng.choice((0, 5)),
                delay_us=rng.choice((0, SECOND_US)),
            )
        elif ending < 0.95:
            where = rng.choice((Where.PLACE, Where.TAIL))
            why = rng.choice((Reason.CONSUMER_LOST, Reason.LEASE_ENDED))
            engine.give_back(queue, consumer, self.now_us, where=where, lost=rng.random() < 0.7, why=why)

    def _rare(self) -> None:
        rng, engine = self.rng, self.engine
        queue = rng.choice(self.queues)
        if queue not in engine.queues():
            return
        what = rng.randrange(6)
        if what == 0:
            engine.redrive(queue, self.now_us, limit=rng.choice((None, 3)))
        elif what == 1:
            engine.expire(self.now_us)
        elif what == 2:
            first = rng.randrange(engine.describe(queue).offset_end + 1)
            engine.withdraw(queue, [(first, first + 5)], Reason.OPERATOR, self.now_us)
        elif what == 3:
            engine.purge(queue, self.now_us, dead=rng.random() < 0.5)
        elif what == 4:
            engine.trim(self.now_us)
        else:
            engine.tick(self.now_us)
