"""Everything that a network, a disk and bad luck can do to a broker, done to a real one."""

import contextlib
import os
import random
import resource
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.tally import Tally
from tests.server.doors import DOORS, PhpmqDoor, RqDoor, SspqDoor
from tests.server.harness import (
    RECEIVE,
    SEND,
    WAIT_SECONDS,
    BrokerProcess,
    Wire,
    number_of,
    phpmq,
    sspq,
    until,
)

pytestmark = pytest.mark.usefixtures("cold")

MB = 1_000_000


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path).start()
    yield process
    assert process.stop() == 0, process.log()
    assert "Traceback" not in process.log(), process.log()


def serves(broker: BrokerProcess, queue: str, numbers: range) -> None:
    """Other clients are served as if nothing were the matter."""
    sender, consumer = RqDoor(broker, queue), PhpmqDoor(broker, queue)
    sender.send(numbers)
    assert consumer.drain(len(numbers)) == list(numbers)
    sender.close()
    consumer.close()


def test_kill_9_under_load_loses_nothing_confirmed(tmp_path: Path) -> None:
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", random.randrange(2**32)))
    pace = random.Random(seed)
    broker = BrokerProcess(tmp_path, "--log-segment-bytes", "1048576", "--log-snapshot-blocks", "200")
    tally = Tally()
    number = 0
    for _ in range(6):
        broker.start()
        killer = threading.Timer(pace.uniform(0.2, 0.8), broker.kill)
        killer.start()
        sender, consumer = RqDoor(broker, "orders"), PhpmqDoor(broker, "orders")
        with contextlib.suppress(OSError):  # the broker dies in the middle of it
            consumer.demand(200)
            while True:
                numbers = range(number, number + pace.randint(1, 100))
                number = numbers.stop
                sender.send(numbers, tally)
                start = len(consumer.got)
                consumer.collect(1)
                tally.delivered(consumer.got[start:])
                if pace.random() < 0.8:
                    consumer.ack()
        killer.join()
        sender.close()
        consumer.close()
    broker.start()
    last = PhpmqDoor(broker, "orders")
    last.demand(1000)
    while not last.wire.is_silent(1.0):
        tally.delivered(last.collect(1))
        last.ack()
    last.close()
    assert broker.stop() == 0
    assert tally.clean, f"seed {seed} (PENSTOCK_TEST_SEED={seed} repeats it): {tally}"
    assert tally.counts()["confirmed"] > 500, f"seed {seed}: too little happened: {tally}"
    assert "Traceback" not in broker.log(), broker.log()


def test_acknowledged_and_stopped_cleanly_does_not_come_again(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, "--drain-seconds", "1").start()
    sender, consumer = RqDoor(broker, "q"), PhpmqDoor(broker, "q")
    sender.send(range(500))
    consumer.demand(100)
    got = consumer.collect(100)[:100]
    consumer.ack()
    more = consumer.collect(100)  # their arrival shows that the acknowledgements were read
    assert broker.stop() == 0
    sender.close()
    consumer.close()
    broker.start()
    again = PhpmqDoor(broker, "q")
    assert again.drain(400) == list(range(100, 500)), (got[:3], more[:3])
    again.close()
    assert broker.stop() == 0


def test_random_bytes_on_every_port(broker: BrokerProcess) -> None:
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", random.randrange(2**32)))
    pace = random.Random(seed)
    starts = {
        "sspq": [b"", sspq(SEND, b"x"), b"\x55\x99\x5e\xff\xff\xff\xff\xff", b"\x55\x99"],
        "phpmq": [b"", b"H0100102", b"H0100202P01" + b"9" * 40, phpmq(1, (1, b"noise"), (2, b"x"))],
        "rq": [b"", b"\x01\xa0\x02Q1", b"\xe0\xff\xff\xff\xff", b"\x01\x80\x00\x00\x00\x07\x0a"],
    }
    for _ in range(150):
        for protocol, beginnings in starts.items():
            with broker.wire(protocol) as wire, contextlib.suppress(OSError):
                wire.say(pace.choice(beginnings), pace.randbytes(pace.choice([1, 10, 1000, 70_000])))
                if pace.random() < 0.5:
                    wire.reset()
    assert broker.running, f"seed {seed}\n{broker.log()}"
    serves(broker, "calm", range(1000))
    assert broker.resident_bytes() < 150 * MB


def test_the_log_says_who_was_closed_and_why(broker: BrokerProcess) -> None:
    with broker.wire("phpmq") as wire:
        wire.say(b"GET / HTTP/1.1\r\n\r\n")
        assert wire.is_closed()
        port = wire.socket.getsockname()[1] if wire.socket.fileno() >= 0 else 0
    until(lambda: "closed phpmq connection" in broker.log(), "a line about the closed connection")
    line = next(line for line in broker.log().splitlines() if "closed phpmq connection" in line)
    assert "47 45 54 20" in line  # the first offending bytes
    assert f"127.0.0.1:{port}" in line


def test_two_thousand_connections(broker: BrokerProcess) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    before = broker.resident_bytes()
    wires = []
    for number in range(2000):
        wires.append(broker.wire(("sspq", "phpmq", "rq")[number % 3]))
    for wire in wires[::3]:
        wire.say(sspq(RECEIVE))  # a third of them wait for a message
    serves(broker, "among-many", range(1000))
    sender = SspqDoor(broker, "default")
    sender.send(range(len(wires[::3])))
    numbers = [_one_sspq(wire) for wire in wires[::3]]
    assert sorted(numbers) == list(range(len(numbers)))  # each waiting one got exactly one
    assert broker.resident_bytes() - before < 60 * MB
    for wire in wires:
        wire.close()
    sender.close()


def _one_sspq(wire: Wire) -> int:
    head = wire.hear(8)
    return number_of(wire.hear(int.from_bytes(head[4:8], "big")))


def test_a_consumer_that_never_reads_harms_nobody(broker: BrokerProcess) -> None:
    sender = RqDoor(broker, "heavy")
    stopped = broker.wire("phpmq")
    stopped.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stopped.say(phpmq(2, (1, b"heavy"), (4, b"100000")))
    before = broker.resident_bytes()
    payload = b"." * 50_000
    raw = broker.wire("phpmq")
    for _ in range(20):
        raw.say(phpmq(1, (1, b"heavy"), (2, payload)) * 100)  # 100 MB in all
    serves(broker, "light", range(1000))
    # A fence: the sender's last message is behind all of these, and its receipt says that they are in.
    sender.send([0])
    assert broker.resident_bytes() - before < 60 * MB, "what waits for a stopped consumer is bounded"
    stopped.close()
    raw.close()
    other = broker.wire("phpmq")
    other.say(phpmq(2, (1, b"heavy"), (4, b"10")))
    assert other.hear(8) == b"H0100303"
    other.close()
    sender.close()


def test_a_client_that_sends_byte_by_byte_harms_nobody(broker: BrokerProcess) -> None:
    message = phpmq(1, (1, b"slow"), (2, b"000000000007"))
    slow = broker.wire("phpmq")
    half_open = [broker.wire(protocol) for protocol in DOORS for _ in range(20)]
    for wire, beginning in zip(half_open, [b"\x55\x99\x5e", b"H01001", b"\x01\xa0\x05or"] * 20, strict=True):
        wire.say(beginning)
    for position in range(len(message)):
        slow.say(message[position : position + 1])
        if position % 10 == 0:
            serves(broker, f"meanwhile-{position}", range(50))
    consumer = PhpmqDoor(broker, "slow")
    assert consumer.drain(1) == [7]
    consumer.close()
    slow.close()
    for wire in half_open:
        wire.reset()


def test_a_large_message_passes_every_door(broker: BrokerProcess) -> None:
    payload = random.Random(1).randbytes(16 << 20)
    with broker.wire("phpmq") as sender, broker.wire("sspq") as consumer:
        sender.say(phpmq(1, (1, b"default"), (2, payload)))
        consumer.say(sspq(RECEIVE))
        head = consumer.hear(8)
        assert head[:3] == b"\x55\x99\x5e"
        assert consumer.hear(int.from_bytes(head[4:8], "big")) == payload


# --- a full disk -----------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount; the simulated disk tests the same rules")
def test_a_full_disk_holds_senders_back_and_goes_on_serving(tmp_path: Path, small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(5 << 20))
    broker = BrokerProcess(
        tmp_path, "--data", str(small_disk / "data"), "--log-segment-bytes", "1048576"
    ).start()
    consumer = PhpmqDoor(broker, "q")
    sender = broker.wire("phpmq")
    sender.socket.settimeout(1.0)
    batch = b"".join(phpmq(1, (1, b"q"), (2, b"%012d" % number + b"." * 2000)) for number in range(20_000))
    sent = 0
    view = memoryview(batch)
    with contextlib.suppress(TimeoutError):  # the broker reads no more: that is the point
        while sent < len(batch):
            sent += sender.socket.send(view[sent : sent + 65536])
    assert sent < len(batch), "40 MB do not fit on a disk of 12 MiB"
    consumer.demand(50)
    got = consumer.collect(50)
    assert got == list(range(len(got)))
    for _ in range(20):  # deliveries and settlements go on
        consumer.ack()
        got += consumer.collect(50)
    assert broker.running
    filler.unlink()
    sender.socket.settimeout(WAIT_SECONDS)

    def send_the_rest() -> None:
        with contextlib.suppress(OSError):  # the test resets the connection when it has seen enough
            sender.socket.sendall(view[sent:])

    rest = threading.Thread(target=send_the_rest)
    rest.start()
    # Retention keeps settled messages a day; on this disk there is room for a few thousand more.
    target = len(got) + 500
    while len(got) < target:
        consumer.ack()
        got += consumer.collect(1)
    assert got == list(range(len(got)))
    sender.reset()
    rest.join(WAIT_SECONDS)
    consumer.close()
    assert broker.stop() == 0, broker.log()
    assert "Traceback" not in broker.log(), broker.log()
