"""What the broker keeps of requests, names and consumers: as much as is said here, whatever they carry."""

import tracemalloc
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.broker.ports import NOTHING
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.words import Cancel, Consume, Publish
from tests.broker.test_broker import FakePort, House, send, settle

REQUEST_BYTES = 16  # its ticket, and whether it is open
CONSUMER_BYTES = 6000  # one who consumes a queue of its own: the port, what is known of it, and of the name
IDLE_BYTES = 600  # of the broker, for a port that has said nothing
COUNT = 200_000


class Measure:
    grown = 0


@contextmanager
def growth() -> Iterator[Measure]:
    """How much more memory is in use at the end."""
    measure = Measure()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield measure
        measure.grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, settings=LogSettings(cache_bytes=0))
    yield house
    house.log.close(house.now)


def test_a_port_that_has_said_nothing_has_nothing_of_its_own(house: House) -> None:
    count = 1000
    ports = [FakePort(house, f"p{number}") for number in range(count)]
    with growth() as measure:
        for port in ports:
            house.broker.attach(port)
    assert measure.grown < IDLE_BYTES * count
    asker, worker = ports[:2]
    worker.say(Consume("q", 0), Consume("full", 0))
    worker.room = 0
    asker.say(send("q", b"a", b"b", tickets=[1, 2], wants_reply=True))
    house.turn()
    worker.room = 1 << 20
    house.tick()
    worker.say(*(settle(worker, "q", offset) for offset in range(2)))
    house.turn()
    assert house.broker.ports.attached[worker].settled == {("q", False): 2}
    # What these two have is not the others'.
    assert not NOTHING
    with pytest.raises(TypeError, match="everybody's"):
        NOTHING["q", False] = 1


def test_requests_without_a_payload_cost_their_tickets(house: House) -> None:
    asker = house.port("a", "rq")
    with growth() as measure:
        tickets = array("I", range(COUNT))
        empty = Batch(b"", array("i", bytes(4 * (COUNT + 1))))
        asker.say(Publish("q", empty, tickets, wants_reply=True, timeout_seconds=60))
        del empty, tickets
        house.turn()
    assert measure.grown < COUNT * REQUEST_BYTES
    with growth() as measure:
        house.tick(61)
        assert [len(tickets) for tickets in asker.heard("undelivered")] == [COUNT]  # type: ignore[arg-type]
        asker.told.clear()
    assert measure.grown < 2 * COUNT  # What the log notes of them meanwhile is not for each of them.


def test_consumers_of_names_cost_what_is_said_and_nothing_when_they_have_left(house: House) -> None:
    count = 2000
    house.port("first").say(Consume("first", 1), Cancel("first"))
    with growth() as measure:
        ports = [house.port(f"w{number}") for number in range(count)]
        for number, port in enumerate(ports):
            port.say(Consume(f"name-{number}", 1))
        house.turn()
    assert measure.grown < count * CONSUMER_BYTES
    with growth() as measure:
        for _ in range(2):
            again = [FakePort(house, f"x{number}") for number in range(count)]
            for number, port in enumerate(again):
                house.broker.attach(port)
                port.say(Consume(f"other-{number}", 1), send("first", b""))
                house.broker.detach(port, house.now)
            del again, port
            house.turn()
    assert measure.grown < count * 500
    assert len(house.broker.doors.by_queue) == count


def test_a_queue_that_nobody_consumes_costs_less_than_two_kilobytes(house: House) -> None:
    count = 2000
    sender = house.port("s")
    sender.say(send("first", b"x"))
    house.turn()
    with growth() as measure:
        for number in range(count):
            sender.say(send(f"name-{number}", b"x"))
            if number % 100 == 99:
                house.tick(0.1)
        house.log.changed()
        house.turn()
    assert house.log.queue_count == count + 1
    assert measure.grown < count * 2048
