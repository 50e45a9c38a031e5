"""`penstock demo`: the promise, shown on a real broker.

A broker in a temporary folder; messages through all three protocols into one queue; a worker that
takes them whatever door they came through; kill -9 in the middle of more of them; a restart; and a
count of everything that was confirmed, delivered and lost.
"""

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice

from penstock.client import ClientError, PhpmqClient, RqClient, RqRequest, SspqClient
from penstock.errors import PenstockError
from penstock.tally import Tally

HELP = "send through all three protocols, kill the broker with -9, and count what is lost"

QUEUE = "orders"
MESSAGES = 10_000
"""Sent through each protocol before the kill."""

BATCH = 500
ONE_BY_ONE = 100
IN_DANGER_SECONDS = 1.5
START_SECONDS = 30.0
QUIET_SECONDS = 1.0
"""A queue from which nothing has come for so long is taken to be empty."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", metavar="DIR", help="keep the log in this folder, new or empty (default: a temporary one)"
    )
    parser.add_argument(
        "--messages",
        type=int,
        default=MESSAGES,
        metavar="N",
        help="how many through each protocol before the kill (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    if args.messages < 1:
        print("penstock demo: --messages needs to be at least 1", file=sys.stderr)
        return 2
    if args.data:
        if os.path.isdir(args.data) and os.listdir(args.data):
            print(f"penstock demo: {args.data} is not empty; name a new folder", file=sys.stderr)
            return 2
        return show(args.data, args.messages)
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        return show(folder, args.messages)


class Broker:
    """`penstock serve` in a process of its own."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self.addresses: dict[str, str] = {}

    def start(self) -> float:
        """Start it; after how many seconds it accepted."""
        command = [sys.executable, "-m", "penstock", "serve", "--data", self._folder]
        command += ["--sspq-queue", QUEUE, "--log-level", "warning"]
        for protocol in ("sspq", "phpmq", "rq"):
            command += [f"--{protocol}", self.addresses.get(protocol, "127.0.0.1:0")]
        started = time.monotonic()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        watchdog = threading.Timer(START_SECONDS, self._process.kill)
        watchdog.start()
        line = self._process.stdout.readline()
        watchdog.cancel()
        if not line.startswith("penstock ready"):
            raise PenstockError("the broker did not start; see above")
        self.addresses = dict(part.split("=", 1) for part in line.split()[2:])
        return time.monotonic() - started

    def url(self, protocol: str) -> str:
        return f"{protocol}://{self.addresses[protocol]}"

    def end(self, number: int) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(number)
            process.wait()
        if process is not None and process.stdout is not None:
            process.stdout.close()


def show(folder: str, messages: int) -> int:
    # The clients log what happens to their connections; here it happens on purpose.
    logging.getLogger("penstock").addHandler(logging.NullHandler())
    broker = Broker(folder)
    try:
        return Show(broker, folder, messages).run()
    finally:
        broker.end(signal.SIGKILL)


class Show:
    """The steps, in the order in which a person sees them."""

    def __init__(self, broker: Broker, folder: str, messages: int) -> None:
        self._broker = broker
        self._folder = folder
        self._messages = messages
        self._tally = Tally()

    def run(self) -> int:
        seconds = self._broker.start()
        where = ", ".join(f"{name} on {address}" for name, address in self._broker.addresses.items())
        say(f"A broker is up after {seconds:.2f} s: {where}; its log is in {self._folder}")
        self._ask_and_answer()
        self._send_through_every_door()
        self._take_some()
        self._kill_in_the_middle()
        seconds = self._broker.start()
        say(f"Started again: ready after {seconds:.2f} s")
        self._take_the_rest()
        self._broker.end(signal.SIGTERM)
        return self._verdict()

    def _ask_and_answer(self) -> None:
        """RQ is for questions, too."""

        def answer(request: RqRequest) -> bytes:
            return request.body.upper()

        with RqClient(self._broker.url("rq")) as worker, RqClient(self._broker.url("rq")) as asker:
            worker.serve("shout", answer).wait_turn(START_SECONDS)
            started = time.monotonic()
            reply = asker.request("shout", b"hello", timeout=START_SECONDS)
            took = (time.monotonic() - started) * 1000
        say(f"RQ: a request 'hello' is answered by another node with {reply.decode()!r}, in {took:.1f} ms")

    def _send_through_every_door(self) -> None:
        numbers = iter(range(3 * self._messages))
        with SspqClient(self._broker.url("sspq")) as sspq:
            self._send("SSPQ", numbers, sspq.send_many)
        with PhpmqClient(self._broker.url("phpmq")) as phpmq:
            self._send("PHPMQ", numbers, lambda bodies: phpmq.send_many(QUEUE, bodies))
        with RqClient(self._broker.url("rq")) as rq:
            self._send("RQ", numbers, lambda bodies: rq.send_many(QUEUE, bodies))

    def _send(self, name: str, numbers: Iterator[int], send: Callable[[list[bytes]], object]) -> None:
        chosen = list(islice(numbers, self._messages))
        self._tally.attempted(chosen)
        started = time.monotonic()
        send([body_of(number) for number in chosen])
        rate = len(chosen) / (time.monotonic() - started)
        say(f"{name}: sent {len(chosen):,} messages to the queue {QUEUE!r} ({rate:,.0f} a second)")

    def _take_some(self) -> None:
        """Take everything, settle half of it; the other half is in a worker's hands when disaster comes."""
        total = 3 * self._messages
        with PhpmqClient(self._broker.url("phpmq")) as worker:
            taken = list(worker.consume(QUEUE, prefetch=total, count=total, timeout=START_SECONDS))
            self._tally.delivered(number_of(message.body) for message in taken)
            say(f"PHPMQ: a worker took {len(taken):,} messages, whatever protocol they had come by")
            # SSPQ and PHPMQ never confirm. But a receipt for a later message says that all before it
            # are on the disk as well: groups are written one after the other.
            with RqClient(self._broker.url("rq")) as fence:
                fence.send("fence", b"")
            self._tally.confirmed(range(total))
            worker.ack_many(taken[::2])
            say(f"  and acknowledged every second one; {len(taken) - len(taken[::2]):,} are unfinished work")

    def _kill_in_the_middle(self) -> None:
        """Send with receipts until the broker dies of -9."""
        killer = threading.Timer(IN_DANGER_SECONDS, self._broker.end, [signal.SIGKILL])
        confirmed = 0
        number = 3 * self._messages
        sender = RqClient(self._broker.url("rq"), reconnect_seconds=0, drain_seconds=0)
        killer.start()
        with contextlib.suppress(ClientError), sender:
            while True:
                chosen = range(number, number + BATCH)
                number = chosen.stop
                self._tally.attempted(chosen)
                sender.send_many(QUEUE, [body_of(n) for n in chosen], timeout=START_SECONDS)
                self._tally.confirmed(chosen)
                confirmed += len(chosen)
        killer.join()
        say(f"RQ: {confirmed:,} more were confirmed, one receipt each, when kill -9 hit the broker")

    def _take_the_rest(self) -> None:
        count = 0
        with SspqClient(self._broker.url("sspq")) as one_by_one:
            for _ in range(ONE_BY_ONE):
                single = one_by_one.receive(timeout=START_SECONDS)
                self._tally.delivered([number_of(single.body)])
                single.ack()
                count += 1
        with PhpmqClient(self._broker.url("phpmq")) as worker:
            batch = []
            for message in worker.consume(QUEUE, prefetch=2 * BATCH, timeout=QUIET_SECONDS):
                self._tally.delivered([number_of(message.body)])
                batch.append(message)
                count += 1
                if len(batch) == BATCH:
                    worker.ack_many(batch)
                    batch.clear()
            worker.ack_many(batch)
        say(f"Two workers, SSPQ and PHPMQ, took the {count:,} messages that were left, and acknowledged them")

    def _verdict(self) -> int:
        say(f"The count: {self._tally}")
        if not self._tally.clean:
            print("penstock demo: something is wrong with the figures above", file=sys.stderr)
            return 1
        say("Nothing that was confirmed is lost, and nothing is invented.")
        say("(repeated: unfinished work when the broker died; a worker got it again, as it must)")
        return 0


def body_of(number: int) -> bytes:
    return b"order %d" % number


def number_of(body: bytes) -> int:
    return int(body.removeprefix(b"order "))


def say(line: str) -> None:
    print(line, flush=True)
