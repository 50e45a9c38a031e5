"""Traffic: orders through all three protocols, kill -9 in the middle of more of them, and the count.

A worker waits for what is there, not for a time. How much that is it knows from the senders, and after the
kill from the broker's own count. Where nothing comes for `PATIENCE_SECONDS` there is no verdict: a machine
that is slow has lost nothing.

Every order that a worker got is known afterwards (`stored`). Those whose sender had a receipt are all among
them: that is the promise. Of the batch that the kill interrupted some may be there too: they were stored, and
the broker died before it could say so.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final

from penstock.client import (
    ClientError,
    HttpClient,
    PhpmqClient,
    PhpmqMessage,
    RqClient,
    RqRequest,
    SspqClient,
)
from penstock.client.options import ClientOptions
from penstock.common.tables import Column
from penstock.demo.broker import Broker
from penstock.demo.orders import QUEUE, body_of, number_of
from penstock.demo.screen import Screen
from penstock.errors import PenstockError
from penstock.tally import Tally

BATCH: Final = 500
ONE_BY_ONE: Final = 100
IN_DANGER_SECONDS: Final = 0.5
PATIENCE_SECONDS: Final = 120.0
"""How long anything may take. What takes milliseconds elsewhere may take seconds here."""
PROGRESS_SECONDS: Final = 5.0
"""After so long somebody who watches wants to know how far it is."""
PATIENT: Final[ClientOptions] = {
    "connect_seconds": PATIENCE_SECONDS,
    "operation_seconds": PATIENCE_SECONDS,
    "silence_seconds": PATIENCE_SECONDS,
}
"""The same for clients."""


class Traffic:
    """The first half of the demonstration, step by step."""

    def __init__(self, broker: Broker, screen: Screen, orders: int) -> None:
        self._broker = broker
        self._screen = screen
        self._orders = orders
        self._tally = Tally()
        self.stored: set[int] = set()
        """The numbers of all orders that a worker got."""
        self.number_end = 0
        """No order has this number, or a larger one."""

    def run(self) -> bool:
        """Whether the broker has kept its promise; it runs afterwards."""
        screen = self._screen
        screen.section("A broker, on free ports of this machine")
        self._broker.start()
        ports = ", ".join(f"{name} {port}" for name, port in self._broker.ports.items())
        screen.step(f"ready on 127.0.0.1: {ports}")
        self._ask_and_answer()
        screen.section(f"Orders through three protocols into one queue, {QUEUE!r}")
        self._send_through_every_door()
        self._take_some()
        screen.section("kill -9 while more orders come")
        self._kill_in_the_middle()
        self._broker.start()
        screen.step("the broker is started again, and ready")
        self._take_the_rest()
        return self._verdict()

    def _ask_and_answer(self) -> None:
        """RQ is for questions, too."""

        def answer(request: RqRequest) -> bytes:
            return request.body.upper()

        with (
            RqClient(self._broker.url("rq"), **PATIENT) as worker,
            RqClient(self._broker.url("rq"), **PATIENT) as asker,
        ):
            worker.serve("shout", answer).wait_turn(PATIENCE_SECONDS)
            started = time.monotonic()
            reply = asker.request("shout", b"hello", timeout=PATIENCE_SECONDS)
            took = (time.monotonic() - started) * 1000
        self._screen.step(
            f"RQ     a request 'hello' is answered by another node with {reply.decode()!r}, in {took:.1f} ms"
        )

    def _send_through_every_door(self) -> None:
        numbers = iter(range(3 * self._orders))
        with SspqClient(self._broker.url("sspq"), **PATIENT) as sspq:
            self._send("SSPQ", numbers, sspq.send_many)
        with PhpmqClient(self._broker.url("phpmq"), **PATIENT) as phpmq:
            self._send("PHPMQ", numbers, lambda bodies: phpmq.send_many(QUEUE, bodies))
        with RqClient(self._broker.url("rq"), **PATIENT) as rq:
            self._send("RQ", numbers, lambda bodies: rq.send_many(QUEUE, bodies))

    def _send(self, name: str, numbers: Iterator[int], send: Callable[[list[bytes]], object]) -> None:
        chosen = list(islice(numbers, self._orders))
        bodies = [body_of(number) for number in chosen]
        self._tally.attempted(chosen)
        started = time.monotonic()
        send(bodies)
        rate = len(chosen) / (time.monotonic() - started)
        self._screen.step(f"{name:<6} {len(chosen):,} orders sent, {rate:,.0f} a second")

    def _take_some(self) -> None:
        """Take everything, settle half of it; the other half is in a worker's hands when disaster comes."""
        total = 3 * self._orders
        with PhpmqClient(self._broker.url("phpmq"), **PATIENT) as worker:
            taken = list(self._take(worker, total, prefetch=total))
            self._delivered(message.body for message in taken)
            self._screen.step(
                f"PHPMQ  a worker took {len(taken):,} orders, whatever protocol they had come by"
            )
            # SSPQ and PHPMQ never confirm. But a receipt for a later message says that all before it
            # are on the disk as well: groups are written one after the other.
            with RqClient(self._broker.url("rq"), **PATIENT) as fence:
                fence.send("fence", b"")
            self._tally.confirmed(range(total))
            worker.ack_many(taken[::2])
            self._screen.step(
                f"PHPMQ  it acknowledged every second one; {len(taken[1::2]):,} are unfinished work"
            )

    def _kill_in_the_middle(self) -> None:
        """Send with receipts until the broker dies of -9."""
        killer = threading.Timer(IN_DANGER_SECONDS, self._broker.end, [signal.SIGKILL])
        confirmed = 0
        number = 3 * self._orders
        options: ClientOptions = {**PATIENT, "reconnect_seconds": 0, "drain_seconds": 0}
        sender = RqClient(self._broker.url("rq"), **options)
        with contextlib.suppress(ClientError), sender:
            while True:
                chosen = range(number, number + BATCH)
                number = chosen.stop
                self._tally.attempted(chosen)
                sender.send_many(QUEUE, [body_of(n) for n in chosen], timeout=PATIENCE_SECONDS)
                self._tally.confirmed(chosen)
                confirmed += len(chosen)
                if confirmed == BATCH:
                    killer.start()
        killer.join()
        self.number_end = number
        self._screen.step(
            f"RQ     {confirmed:,} more were confirmed, a receipt each, when kill -9 hit the broker"
        )

    def _take_the_rest(self) -> None:
        count = 0
        with SspqClient(self._broker.url("sspq"), **PATIENT) as one_by_one:
            for _ in range(ONE_BY_ONE):
                single = one_by_one.receive(timeout=PATIENCE_SECONDS)
                self._delivered([single.body])
                single.ack()
                count += 1
        with HttpClient(self._broker.url("http"), **PATIENT) as api:
            left = api.queue(QUEUE).ready
        with PhpmqClient(self._broker.url("phpmq"), **PATIENT) as worker:
            batch = []
            for message in self._take(worker, left, prefetch=2 * BATCH):
                batch.append(message)
                count += 1
                if len(batch) == BATCH:
                    self._delivered(message.body for message in batch)
                    worker.ack_many(batch)
                    batch.clear()
            self._delivered(message.body for message in batch)
            worker.ack_many(batch)
        self._screen.step(f"two workers, SSPQ and PHPMQ, took and acknowledged the {count:,} that were left")

    def _take(self, worker: PhpmqClient, total: int, prefetch: int) -> Iterator[PhpmqMessage]:
        """So many messages of the queue, however long they take, as long as they come."""
        taken = 0
        came = told = time.monotonic()
        while taken < total:
            for message in worker.consume(QUEUE, prefetch, timeout=PROGRESS_SECONDS):
                taken += 1
                yield message
                came = time.monotonic()
                if taken == total or came - told > PROGRESS_SECONDS:
                    break
            if taken == total:
                return
            told = time.monotonic()
            if told - came > PATIENCE_SECONDS:
                raise PenstockError(
                    f"queue {QUEUE!r}: {taken:,} of {total:,} orders came, and then nothing for "
                    f"{PATIENCE_SECONDS:.0f} s. That is no loss yet, but nothing can be said of the others"
                )
            self._screen.note(f"PHPMQ  {taken:,} of {total:,} have come, waiting for the others")

    def _delivered(self, bodies: Iterable[bytes]) -> None:
        numbers = [number_of(body) for body in bodies]
        self._tally.delivered(numbers)
        self.stored.update(numbers)

    def _verdict(self) -> bool:
        screen, counts = self._screen, self._tally.counts()
        screen.table(
            [Column(name, right=True) for name in counts], [[f"{number:,}" for number in counts.values()]]
        )
        if not self._tally.clean:
            return False
        screen.note("Nothing that was confirmed is lost, and nothing is invented.")
        screen.note("Repeated is the unfinished work: a worker got it again, as it must.")
        in_doubt = counts["delivered"] - counts["confirmed"]
        if in_doubt:
            screen.note(f"{in_doubt:,} were stored, and the broker died before it could say so.")
        return True
