"""`penstock demo`: the promise, shown. Messages go in, the process is killed, nothing is lost.

A second process writes messages to an embedded log and prints what was confirmed; another part
of it takes and settles some. It is killed with -9 in the middle of that, several times, and
started again. Then everything that is left is taken out and counted.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from penstock.broker.batch import Batch, Slice
from penstock.broker.words import Outcome
from penstock.engines.interface import EngineError, Receipt, Stored
from penstock.engines.log.engine import LogEngine, open_log
from penstock.errors import PenstockError
from penstock.tally import Tally

HELP = "kill a writer with -9 again and again, and show that nothing confirmed is lost"

QUEUE = "orders"
CONSUMER = "demo-worker"
KILLS = 5
BATCH_MESSAGES = 500
CONFIRMED_BEFORE_KILL = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", metavar="DIR", help="keep the log in this folder (default: a temporary one)"
    )
    parser.add_argument(
        "--kills", type=int, default=KILLS, metavar="N", help="how often (default: %(default)s)"
    )
    parser.add_argument("--worker", type=int, metavar="FIRST", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    if args.kills < 1:
        print("penstock demo: --kills needs to be at least 1", file=sys.stderr)
        return 2
    if args.worker is not None:
        work(args.data, args.worker)
        return 0
    if args.data:
        return show(args.data, args.kills)
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        return show(folder, args.kills)


def now_us() -> int:
    return time.time_ns() // 1000


# --- the part that people see ----------------------------------------------------------------------


def show(folder: str, kills: int) -> int:
    print(f"Penstock keeps its log in {folder}")
    tally = Tally()
    first = 0
    for kill in range(1, kills + 1):
        started = time.monotonic()
        confirmed = 0
        process = start_worker(folder, first)
        assert process.stdout is not None
        for line in process.stdout:
            confirmed += note(line, tally)
            if confirmed >= CONFIRMED_BEFORE_KILL:
                break
        else:
            raise PenstockError(f"the worker ended by itself, with exit code {process.wait()}; see above")
        os.kill(process.pid, signal.SIGKILL)
        # What the worker had said before it died counts: it was confirmed.
        for line in process.stdout:
            confirmed += note(line, tally)
        process.wait()
        process.stdout.close()
        seconds = time.monotonic() - started
        print(
            f"  kill -9 number {kill}: {confirmed:,} messages confirmed in {seconds:.1f} s, "
            f"the worker died in the middle of the next ones"
        )
        first += 100_000_000
    started = time.monotonic()
    engine = open_log(folder, now_us())
    print(f"Opened again in {time.monotonic() - started:.3f} s: {standing(engine)}")
    drained = drain(engine, tally)
    print(f"Took out the {drained:,} messages that were left, and settled them: {standing(engine)}")
    for damage in engine.damage:
        print(f"  damage: {damage.text}")
    engine.close(now_us())
    print(f"The count over all {kills + 1} lives of the log: {tally}")
    if not tally.clean:
        print("Something is wrong with the figures above.", file=sys.stderr)
        return 1
    print("Nothing that was confirmed is lost, nothing is invented, nothing settled came again.")
    print("(repeated: taken by a worker that was killed before it could settle; another one got it)")
    return 0


def standing(engine: LogEngine) -> str:
    info = engine.describe(QUEUE)
    return f"queue {info.name!r} has {info.ready:,} ready of {info.offset_end:,} ever accepted"


def start_worker(folder: str, first: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "penstock", "demo", "--data", folder, "--worker", str(first)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def note(line: str, tally: Tally) -> int:
    """One line of the worker's report into the tally; how many messages it confirms.

    A line that the kill has cut off says nothing that counts.
    """
    if not line.endswith("\n"):
        return 0
    word, *fields = line.split()
    numbers = range(int(fields[0]), int(fields[1]))
    if word == "sending":
        tally.attempted(numbers)
    elif word == "delivered":
        tally.delivered(numbers)
    elif word == "settled":
        tally.settled(numbers)
    elif word == "confirmed":
        tally.confirmed(numbers)
        return len(numbers)
    return 0


def drain(engine: LogEngine, tally: Tally) -> int:
    count = 0
    while slices := engine.take(QUEUE, CONSUMER, 10_000, now_us(), bytes_max=1 << 24):
        for piece in slices:
            count += len(piece)
            for begin, end in runs_of_numbers(piece):
                tally.delivered(range(begin, end))
            engine.settle(QUEUE, CONSUMER, Outcome.ACK, [(piece.offset_start, piece.offset_end)], now_us())
        engine.flush(now_us())
    engine.wait()
    return count


# --- the part that is killed -----------------------------------------------------------------------


def work(folder: str, first: int) -> None:
    """Send, take and settle for ever; say each thing before or after it, as Tally asks."""
    engine = open_log(folder, now_us())
    pace = random.Random(first)
    number = first
    unsettled: list[tuple[int, int]] = []
    while True:
        end = number + pace.randint(1, BATCH_MESSAGES)
        say("sending", number, end)
        batch = Batch.of([b"order %d" % n for n in range(number, end)], protocol="http")
        engine.append(QUEUE, batch, now_us(), receipt=confirm(number, end))
        number = end
        if pace.random() < 0.5:
            for piece in engine.take(QUEUE, CONSUMER, pace.randint(1, BATCH_MESSAGES), now_us()):
                for begin, stop in runs_of_numbers(piece):
                    say("delivered", begin, stop)
                    unsettled.append((begin, stop))
                engine.settle(
                    QUEUE, CONSUMER, Outcome.ACK, [(piece.offset_start, piece.offset_end)], now_us()
                )
        engine.flush(now_us())
        if pace.random() < 0.1:
            engine.wait()
            for begin, stop in unsettled:
                say("settled", begin, stop)
            unsettled.clear()
        engine.poll()


def confirm(number: int, end: int) -> Receipt:
    def receipt(result: Stored | EngineError) -> None:
        if isinstance(result, EngineError):
            raise result
        say("confirmed", number, end)

    return receipt


def say(word: str, first: int, end: int) -> None:
    """One line in one write, so that a kill can only cut the last one."""
    os.write(1, b"%s %d %d\n" % (word.encode(), first, end))


def runs_of_numbers(piece: Slice) -> Iterator[tuple[int, int]]:
    """The numbers in a slice's payloads, in runs that follow each other."""
    begin = end = -1
    for payload in piece.messages():
        number = int(payload.removeprefix(b"order "))
        if number != end:
            if end >= 0:
                yield begin, end
            begin = number
        end = number + 1
    if end >= 0:
        yield begin, end
