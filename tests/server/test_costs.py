"""What things cost the broker by what they are, and not by their payload: there are many, and all are empty.

A bound that counts payload alone says nothing here. Memory is what the process has more than before; a bound
is a few times what was measured, and far below what a place that counts payload would take.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.harness import (
    RECEIVE,
    SEND,
    BrokerProcess,
    Wire,
    phpmq,
    rq,
    sspq,
)

pytestmark = pytest.mark.usefixtures("cold")

KIB, MIB = 1 << 10, 1 << 20
MILLION = 1_000_000


def empty(protocol: str, number: int) -> bytes:
    """A message of no bytes for queue q."""
    if protocol == "sspq":
        return sspq(SEND)
    if protocol == "phpmq":
        return phpmq(1, (1, b"q"), (2, b""))
    return rq(1, (128, number), (160, b"q"), (224, b""), 33, 10)


DEMANDS = {
    "sspq": sspq(RECEIVE),
    "phpmq": phpmq(2, (1, b"q"), (4, b"1000000")),
    "rq": rq(1, (160, b"q"), 20),
}


def grown(broker: BrokerProcess, work: Callable[[], None]) -> int:
    """How many bytes the broker has more after this."""
    before = broker.resident_bytes()
    work()
    return broker.resident_bytes() - before


def settled(broker: BrokerProcess) -> None:
    """What was said before has been done, and the turn after it too."""
    with broker.wire("rq") as other:
        for _ in range(3):
            other.say(rq(5))
            other.expect(rq(6))


@pytest.mark.parametrize("protocol", DEMANDS)
def test_a_million_empty_messages(tmp_path: Path, protocol: str) -> None:
    limits = ("--limits-in-flight-bytes", str(MIB), "--limits-connection-buffer-bytes", str(MIB))
    broker = BrokerProcess(tmp_path, "--sspq-queue", "q", *limits).start()

    def send() -> None:
        with broker.wire(protocol) as sender:
            for first in range(0, MILLION, 10_000):
                sender.say(*[empty(protocol, number) for number in range(first, first + 10_000)])
                if protocol == "rq":
                    heard = sender.hear(10_000 * 7)
                    assert heard[6::7] == rq(13) * 10_000  # DELIVERED, each
            sender.leave()

    def deaf() -> None:
        with broker.wire(protocol) as consumer:
            consumer.say(DEMANDS[protocol])
            assert consumer.hear(1)
            settled(broker)

    assert grown(broker, send) < 20 * MIB  # on their way to the disk, and blocks that are still in memory
    assert grown(broker, deaf) < 4 * MIB  # a connection's buffer, twice over while it is filled
    assert broker.stop() == 0


def test_names_consumers_and_requests(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path).start()
    wire, asker = broker.wire("phpmq"), broker.wire("rq")
    wires: list[Wire] = []

    def names() -> None:
        wire.say(*[phpmq(1, (1, b"queue-%d" % number), (2, b"")) for number in range(5000)])
        wire.say(phpmq(2, (1, b"queue-4999"), (4, b"1")))
        assert wire.hear(8) == b"H0100303"

    def consumers() -> None:
        for _ in range(500):
            wires.append(broker.wire("phpmq"))
            wires[-1].say(phpmq(2, (1, b"nothing"), (4, b"1")))
        settled(broker)

    def requests() -> None:
        asker.say(
            *[rq(1, (128, number), (160, b"asked"), (224, b""), (97, 600), 10) for number in range(20_000)]
        )
        asker.say(rq(5))
        asker.expect(rq(6))

    assert grown(broker, names) < 5000 * 20 * KIB
    assert grown(broker, consumers) < 500 * 8 * KIB
    assert grown(broker, requests) < 20_000 * KIB
    # Nothing of all that stays: the same again costs next to nothing.
    for it in wires:
        it.leave()
    asker.leave()
    wires.clear()
    asker = broker.wire("rq")
    assert grown(broker, consumers) < 500 * 4 * KIB
    assert grown(broker, requests) < 20_000 * KIB // 2
    for it in (wire, asker, *wires):
        it.close()
    assert broker.stop() == 0
