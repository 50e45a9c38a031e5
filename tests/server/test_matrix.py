"""Each sender × each consumer × each ending, a thousand messages each, counted.

One broker serves all cells, each with a queue of its own; SSPQ has no queue names, so the SSPQ
listener's queue is used where SSPQ is on either side and is left empty by every cell.
"""

from collections.abc import Iterator
from itertools import product

import pytest

from penstock.tally import Tally
from tests.server.doors import DOORS, Door, PhpmqDoor
from tests.server.harness import BrokerProcess

MESSAGES = 1000
SSPQ_QUEUE = "jobs"
PAIRS = list(product(DOORS, DOORS))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("matrix"), "--sspq-queue", SSPQ_QUEUE).start()
    yield process
    assert process.stop() == 0
    assert "Traceback" not in process.log()


class Cell:
    """One sender and one kind of consumer on a queue; the tally of what happens between them."""

    def __init__(self, broker: BrokerProcess, sender: str, consumer: str, ending: str) -> None:
        self.broker = broker
        self.consumer_kind = consumer
        self.queue = SSPQ_QUEUE if "sspq" in (sender, consumer) else f"{sender}-{consumer}-{ending}"
        self.tally = Tally()
        self.sender = DOORS[sender](broker, self.queue)
        self.numbers = range(MESSAGES)

    def send(self) -> None:
        for start in range(0, MESSAGES, 250):
            self.sender.send(self.numbers[start : start + 250], self.tally)
        self.sender.stored()  # What others do meanwhile would come before what is not read yet.

    def consumer(self, kind: str = "") -> Door:
        return DOORS[kind or self.consumer_kind](self.broker, self.queue)

    def finish(self) -> None:
        """Every message was delivered, and the queue is empty."""
        self.sender.close()
        # SSPQ and PHPMQ do not confirm; without a crash, everything that was sent must arrive.
        self.tally.confirmed(self.numbers)
        assert self.tally.clean, str(self.tally)
        for dead in (False, True):
            probe = DOORS["phpmq"](self.broker, self.queue)
            probe.demand(1, dead)
            assert probe.wire.is_silent(0.05), f"something is left in {self.queue!r}"
            probe.close()


@pytest.mark.parametrize(("sender", "consumer"), PAIRS)
def test_acknowledged(broker: BrokerProcess, sender: str, consumer: str) -> None:
    cell = Cell(broker, sender, consumer, "ack")
    cell.send()
    door = cell.consumer()
    got = door.drain(MESSAGES)
    cell.tally.delivered(got)
    assert got == list(cell.numbers)  # in order
    door.close()
    cell.finish()


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize(("sender", "consumer"), PAIRS)
def test_consumer_lost(broker: BrokerProcess, sender: str, consumer: str, how: str) -> None:
    cell = Cell(broker, sender, consumer, how)
    cell.send()
    lost = cell.consumer()
    held = 1 if consumer == "sspq" else 100
    lost.demand(held)
    cell.tally.delivered(lost.collect(held))
    if how == "fin":
        lost.close()
    else:
        lost.reset()
    door = cell.consumer()
    got = door.drain(MESSAGES)
    cell.tally.delivered(got)
    assert sorted(got) == list(cell.numbers)
    assert cell.tally.repeated == held
    if consumer == "phpmq":
        assert got == list(cell.numbers), "PHPMQ returns messages to their original place"
    if consumer == "sspq":
        assert got[-1] == 0, "SSPQ puts the message behind the tail"
    door.close()
    cell.finish()


@pytest.mark.parametrize("sender", DOORS)
def test_requeued(broker: BrokerProcess, sender: str) -> None:
    cell = Cell(broker, sender, "phpmq", "requeue")
    cell.send()
    door = cell.consumer()
    assert isinstance(door, PhpmqDoor)
    door.demand(100)
    first = door.collect(100)
    ids = dict(door.ids)
    cell.tally.delivered(first)
    door.requeue()
    rest: list[int] = []
    while len(rest) < MESSAGES:
        rest += door.collect(1)
        door.ack()
    cell.tally.delivered(rest)
    assert rest == [*range(100, MESSAGES), *range(100)], "requeued ones come last, in their old order"
    assert all(door.ids[number] == ids[number] for number in range(100)), "and keep their ids"
    door.close()
    cell.finish()


@pytest.mark.parametrize(("sender", "consumer"), PAIRS)
def test_rejected_then_taken_from_the_dead_letters(broker: BrokerProcess, sender: str, consumer: str) -> None:
    cell = Cell(broker, sender, consumer, "reject")
    cell.send()
    judge = cell.consumer("phpmq")
    assert isinstance(judge, PhpmqDoor)
    judge.demand(200)
    rejected: list[int] = []
    while len(rejected) < MESSAGES:
        rejected += judge.collect(1)
        judge.reject()
    judge.close()
    door = cell.consumer()
    got = door.drain(MESSAGES, dead=True)
    assert got == list(cell.numbers), "dead letters come in the order of death"
    cell.tally.delivered(got)
    door.close()
    cell.finish()


@pytest.mark.parametrize("consumer", DOORS)
def test_expired_then_taken_from_the_dead_letters(broker: BrokerProcess, consumer: str) -> None:
    cell = Cell(broker, "phpmq", consumer, "expiry")
    assert isinstance(cell.sender, PhpmqDoor)
    cell.sender.ttl_seconds = 1
    cell.send()
    door = cell.consumer()
    got = door.drain(MESSAGES, dead=True)
    assert sorted(got) == list(cell.numbers)
    cell.tally.delivered(got)
    door.close()
    cell.finish()
