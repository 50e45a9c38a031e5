"""The process that `test_kill9.py` kills: a broker's worth of work on the embedded log.

Every line that it prints is a fact for `penstock.tally.Tally`, written in one write, before the
act (`sending`) or after its proof (`confirmed`, `settled`).
"""

import os
import random
import sys
import time
from collections.abc import Iterable

from penstock.log.errors import LogError
from penstock.log.log import open_log
from penstock.log.results import Receipt, Stored, TransactionDone, TransactionReceipt
from penstock.log.state import LogSettings
from penstock.model.batch import Batch, Slice
from penstock.model.words import Outcome, Where

QUEUES = ("orders", "mails", "audit")
SETTINGS = LogSettings(segment_bytes=256 * 1024, block_bytes=16 * 1024, snapshot_blocks=50)


def now_us() -> int:
    return time.time_ns() // 1000


def say(word: str, numbers: Iterable[int]) -> None:
    os.write(1, f"{word} {','.join(map(str, numbers))}\n".encode())


def numbers_of(piece: Slice) -> list[int]:
    return [int(payload[:12]) for payload in piece.messages()]


def batch_of(numbers: range, pace: random.Random) -> Batch:
    retries = [pace.choice([-1, 0, 2, 255]) for _ in numbers] if pace.random() < 0.3 else None
    return Batch.of([b"%012d" % n + b"." * pace.randint(0, 200) for n in numbers], retries=retries)


def main(folder: str, first: int) -> None:
    pace = random.Random(first)
    engine = open_log(folder, now_us(), settings=SETTINGS)
    number = first
    transactions = 0
    acked: list[int] = []

    def confirm(numbers: range) -> Receipt:
        def receipt(result: Stored | LogError) -> None:
            assert isinstance(result, Stored), result
            say("confirmed", numbers)

        return receipt

    def confirm_all(numbers: range) -> TransactionReceipt:
        def receipt(result: TransactionDone | LogError) -> None:
            assert isinstance(result, TransactionDone), result
            say("confirmed", numbers)

        return receipt

    while True:
        numbers = range(number, number + pace.randint(1, 200))
        number = numbers.stop
        say("sending", numbers)
        if pace.random() < 0.1:
            transactions += 1
            third = len(numbers) // 3
            parts = [numbers[:third], numbers[third : 2 * third], numbers[2 * third :]]
            engine.transact(
                f"{first}-{transactions}",
                [(q, batch_of(part, pace)) for q, part in zip(QUEUES, parts, strict=True) if part],
                now_us(),
                confirm_all(numbers),
            )
        else:
            engine.append(pace.choice(QUEUES), batch_of(numbers, pace), now_us(), confirm(numbers))
        queue = pace.choice(QUEUES)
        for piece in engine.take(queue, "worker", pace.randint(1, 300), now_us()):
            held = numbers_of(piece)
            say("delivered", held)
            ranges = [(piece.offset_start, piece.offset_end)]
            ending = pace.random()
            if ending < 0.6:
                engine.settle(queue, "worker", Outcome.ACK, ranges, now_us(), origin=piece.origin)
                acked += held
            elif ending < 0.7:
                engine.settle(queue, "worker", Outcome.REQUEUE, ranges, now_us())
            elif ending < 0.8:
                engine.settle(queue, "worker", Outcome.REJECT, ranges, now_us())
            elif ending < 0.9:
                where = pace.choice([Where.PLACE, Where.TAIL])
                engine.give_back(queue, "worker", now_us(), ranges=ranges, where=where)
            # otherwise it stays in the worker's hands
        if pace.random() < 0.05 and queue in engine.queues():
            engine.redrive(queue, now_us(), limit=100)
        engine.flush(now_us())
        if pace.random() < 0.1:
            engine.wait()
            say("settled", acked)
            acked.clear()
            engine.tick(now_us())
            engine.trim(now_us())
        engine.poll()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
