"""Traffic: orders through all three protocols, kill -9 in the middle of more of them, and the count.

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

from penstock.cli.tables import Column
from penstock.client import ClientError, PhpmqClient, RqClient, RqRequest, SspqClient
from penstock.demo.broker import Broker
from penstock.demo.orders import QUEUE, body_of, number_of
from penstock.demo.screen import Screen
from penstock.tally import Tally

BATCH: Final = 500
ONE_BY_ONE: Final = 100
IN_DANGER_SECONDS: Final = 0.5
ANSWER_SECONDS_MAX: Final = 30.0
QUIET_SECONDS: Final = 1.0
"""A queue from which nothing has come for so long is taken to be empty."""


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

        with RqClient(self._broker.url("rq")) as worker, RqClient(self._broker.url("rq")) as asker:
            worker.serve("shout", answer).wait_turn(ANSWER_SECONDS_MAX)
            started = time.monotonic()
            reply = asker.request("shout", b"hello", timeout=ANSWER_SECONDS_MAX)
            took = (time.monotonic() - started) * 1000
        self._screen.step(
            f"RQ     a request 'hello' is answered by another node with {reply.decode()!r}, in {took:.1f} ms"
        )

    def _send_through_every_door(self) -> None:
        numbers = iter(range(3 * self._orders))
        with SspqClient(self._broker.url("sspq")) as sspq:
            self._send("SSPQ", numbers, sspq.send_many)
        with PhpmqClient(self._broker.url("phpmq")) as phpmq:
            self._send("PHPMQ", numbers, lambda bodies: phpmq.send_many(QUEUE, bodies))
        with RqClient(self._broker.url("rq")) as rq:
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
        with PhpmqClient(self._broker.url("phpmq")) as worker:
            taken = list(worker.consume(QUEUE, prefetch=total, count=total, timeout=ANSWER_SECONDS_MAX))
            self._delivered(message.body for message in taken)
            self._screen.step(
                f"PHPMQ  a worker took {len(taken):,} orders, whatever protocol they had come by"
            )
            # SSPQ and PHPMQ never confirm. But a receipt for a later message says that all before it
            # are on the disk as well: groups are written one after the other.
            with RqClient(self._broker.url("rq")) as fence:
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
        sender = RqClient(self._broker.url("rq"), reconnect_seconds=0, drain_seconds=0)
        killer.start()
        with contextlib.suppress(ClientError), sender:
            while True:
                chosen = range(number, number + BATCH)
                number = chosen.stop
                self._tally.attempted(chosen)
                sender.send_many(QUEUE, [body_of(n) for n in chosen], timeout=ANSWER_SECONDS_MAX)
                self._tally.confirmed(chosen)
                confirmed += len(chosen)
        killer.join()
        self.number_end = number
        self._screen.step(
            f"RQ     {confirmed:,} more were confirmed, a receipt each, when kill -9 hit the broker"
        )

    def _take_the_rest(self) -> None:
        count = 0
        with SspqClient(self._broker.url("sspq")) as one_by_one:
            for _ in range(ONE_BY_ONE):
                single = one_by_one.receive(timeout=ANSWER_SECONDS_MAX)
                self._delivered([single.body])
                single.ack()
                count += 1
        with PhpmqClient(self._broker.url("phpmq")) as worker:
            batch = []
            for message in worker.consume(QUEUE, prefetch=2 * BATCH, timeout=QUIET_SECONDS):
                batch.append(message)
                count += 1
                if len(batch) == BATCH:
                    self._delivered(message.body for message in batch)
                    worker.ack_many(batch)
                    batch.clear()
            self._delivered(message.body for message in batch)
            worker.ack_many(batch)
        self._screen.step(f"two workers, SSPQ and PHPMQ, took and acknowledged the {count:,} that were left")

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
