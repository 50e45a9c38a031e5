"""Flow control: who does not read gets no more, who sends faster than the disk is not read, and both go on.

Nothing here is slow by chance. A disk that stands still is a real one: the kernel makes whoever opens a file
wait while another process has a lease on it, and the log's writer opens the file of its next segment.
"""

import asyncio
import fcntl
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.log.block import Buffer
from penstock.log.disk import RealFile
from penstock.server import connection as connections
from penstock.server.rounds import RECEIVE_BYTES
from tests.server.harness import (
    SEND,
    WAIT_SECONDS,
    BrokerProcess,
    Wire,
    expect_dispatch,
    phpmq,
    rq,
    sspq,
    until,
)
from tests.server.inside import LOOPS, Inside, Peer, run
from tests.server.inside import until as soon

pytestmark = pytest.mark.usefixtures("cold")

KIB, MIB = 1 << 10, 1 << 20
SEGMENT = 4 * MIB


@contextmanager
def standing_disk(broker: BrokerProcess, wire: Wire) -> Iterator[None]:
    """The log's writer stands still in here; for less than /proc/sys/fs/lease-break-time, which is 45 s.

    More than half a segment makes the broker have the next one's file ready; when this one is full, the
    writer opens that.
    """
    spare = broker.folder / "data" / "spare-1"
    for _ in range(SEGMENT // (100 * KIB) * 6 // 10):
        wire.say(phpmq(1, (1, b"ballast"), (2, bytes(100 * KIB))))
    until(lambda: spare.exists() and spare.stat().st_size == SEGMENT, "the next segment's file")
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel tells that somebody wants the file
    leased = os.open(spare, os.O_RDWR)

    def lease() -> bool:
        try:
            fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except BlockingIOError:  # the broker has it still open
            return False
        return True

    try:
        until(lease, "a lease on the next segment's file")
        for _ in range(SEGMENT // (100 * KIB) * 6 // 10):
            wire.say(phpmq(1, (1, b"ballast"), (2, bytes(100 * KIB))))
        until(lambda: not spare.exists(), "the writer to begin its next segment")
        yield
    finally:
        os.close(leased)  # and with it the lease
        signal.signal(signal.SIGIO, before)


def pour(wire: Wire, stream: bytes) -> int:
    """How many bytes were taken before the broker stopped reading."""
    wire.socket.setblocking(False)
    rest = memoryview(stream)
    while rest and select.select([], [wire.socket], [], 1.0)[1]:
        rest = rest[wire.socket.send(rest) :]
    wire.socket.settimeout(WAIT_SECONDS)
    return len(stream) - len(rest)


def message(protocol: str, number: int, payload: bytes) -> bytes:
    """To queue q; nobody wants an answer."""
    if protocol == "sspq":
        return sspq(SEND, payload)
    if protocol == "phpmq":
        return phpmq(1, (1, b"q"), (2, payload))
    return rq(1, (128, number), (160, b"q"), (224, payload), 33, 10)


def is_alive(broker: BrokerProcess) -> bool:
    with broker.wire("rq") as wire:
        wire.say(rq(5))
        return wire.hear(1) == rq(6)


@pytest.mark.parametrize("protocol", ["sspq", "phpmq", "rq"])
def test_who_sends_faster_than_the_disk_is_not_read_until_it_has_caught_up(
    tmp_path: Path, protocol: str
) -> None:
    flags = ("--limits-in-flight-bytes", str(256 * KIB), "--log-segment-bytes", str(SEGMENT))
    broker = BrokerProcess(tmp_path, *flags, "--sspq-queue", "q").start()
    payload = b"x" * (10 * KIB)
    messages = [message(protocol, number, payload) for number in range(6400)]
    message_bytes, poured = len(messages[0]), b"".join(messages)
    first, sender, worker = broker.wire("phpmq"), broker.wire(protocol), broker.wire("phpmq")
    worker.say(phpmq(1, (1, b"other"), (2, b"held")), phpmq(2, (1, b"other"), (4, b"2")))
    held = expect_dispatch(worker, b"other", b"held")
    with standing_disk(broker, first):
        before = broker.resident_bytes()
        sent = pour(sender, poured)
        assert sent < 32 * MIB, "the broker takes in whatever comes"
        assert broker.resident_bytes() - before < 16 * MIB
        # Nobody else waits, and who settles is read.
        assert is_alive(broker)
        worker.say(phpmq(4, (1, b"other"), (3, held)))
        # One that has not sent yet is stopped by its first chunk, and not by its second.
        other = broker.wire(protocol)
        assert pour(other, poured) < 32 * MIB
    count = -(-sent // message_bytes)
    sender.say(poured[sent : count * message_bytes])
    sender.leave()
    other.reset()
    worker.say(phpmq(2, (1, b"q"), (4, b"100")))
    for _ in range(count):
        message_id = expect_dispatch(worker, b"q", payload)
        worker.say(phpmq(4, (1, b"q"), (3, message_id)))
    worker.close()
    first.close()
    assert broker.stop() == 0


@pytest.mark.parametrize("protocol", ["sspq", "phpmq", "rq"])
def test_who_sends_more_than_a_queue_takes_is_not_read_until_it_has_room(
    tmp_path: Path, protocol: str
) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text(f"[queue.q]\nmax-bytes = {MIB}\n")
    broker = BrokerProcess(tmp_path, "--config", str(config), "--sspq-queue", "q").start()
    payload = b"x" * (10 * KIB)
    messages = [message(protocol, number, payload) for number in range(6400)]
    message_bytes, poured = len(messages[0]), b"".join(messages)
    sender, worker = broker.wire(protocol), broker.wire("phpmq")
    before = broker.resident_bytes()
    sent = pour(sender, poured)
    assert sent < 32 * MIB, "the broker takes in whatever comes"
    assert broker.resident_bytes() - before < 16 * MIB
    assert is_alive(broker)
    count = -(-sent // message_bytes)
    worker.say(phpmq(2, (1, b"q"), (4, b"100")))
    for number in range(count):
        if number == sent // message_bytes:
            sender.say(poured[sent : count * message_bytes])  # it is read again
        message_id = expect_dispatch(worker, b"q", payload)
        worker.say(phpmq(4, (1, b"q"), (3, message_id)))
    sender.leave()
    worker.close()
    assert broker.stop() == 0


# --- out: what waits in a connection's buffer ---------------------------------------------------------


BUFFER = 64 * KIB
FRAME = len(phpmq(3, (1, b"q"), (2, b""), (3, b"?" * 32)))
"""What PHPMQ puts around a payload for queue q."""


def transport_of(server: Inside) -> asyncio.Transport:
    """The first connection's."""
    transport = server.in_order[0]._transport
    assert transport is not None
    return transport


async def deaf_consumer(server: Inside) -> Peer:
    """It consumes without end and reads nothing; the kernel takes little for it, and always the same."""
    consumer = await server.connect("phpmq", buffer_bytes=4 * KIB)
    transport_of(server).get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * KIB)
    await consumer.say(phpmq(2, (1, b"q"), (4, b"100000")))
    return consumer


@pytest.mark.parametrize("loop", LOOPS)
def test_a_sender_is_read_again_when_the_loop_itself_has_written_what_it_sent(
    tmp_path: Path, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer has no end to tell then: nobody waits for a sync, and the next tick may be late."""
    config = tmp_path / "penstock.toml"
    config.write_text('[queue.q]\ndurability = "none"\n')
    monkeypatch.setattr(Inside, "_tick", lambda server: None)

    async def test() -> None:
        async with Inside.open(tmp_path, f"--config {config} --limits-in-flight-bytes 4096") as server:
            sender = await server.connect("phpmq")
            for number in range(3):
                await sender.say(message("phpmq", number, bytes(5000)))
                await soon(lambda: server.log.ready("q") > number, f"message {number}")  # noqa: B023

    run(loop, test())


@pytest.mark.parametrize("loop", LOOPS)
def test_senders_that_left_while_a_queue_is_full_keep_nobody_out_who_would_empty_it(
    tmp_path: Path, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text("[queue.q]\nmax-bytes = 1\n")
    monkeypatch.setattr(connections, "LEFT_TICKS", 1)

    async def test() -> None:
        async with Inside.open(tmp_path, f"--config {config} --limits-connections-max 4") as server:
            stays = await server.connect("phpmq")
            await stays.say(message("phpmq", 0, b"0"))
            await soon(lambda: server.log.has_queue("q"), "the queue to be full")
            for number in range(1, 4):
                sender = await server.connect("phpmq")
                await sender.say(message("phpmq", 0, b"%d" % number))
                await soon(lambda: server.in_order[-1].is_held, "the sender to be held back")
                sender.close()
            await stays.say(message("phpmq", 0, b"4"))
            await soon(lambda: server.in_order[0].is_held, "the one who stays to be held back")
            await soon(lambda: len(server._left) == 3, "those who have left to be known")
            consumer = await server.try_to_connect("phpmq")
            await consumer.say(phpmq(2, (1, b"q"), (4, b"1")))
            size = len(phpmq(3, (1, b"q"), (2, b"0"), (3, bytes(32))))
            for expected in (b"0", b"1", b"2", b"4"):  # The last who had left has made place.
                heard = await consumer.hear(size)
                assert heard == phpmq(3, (1, b"q"), (2, expected), (3, heard[-32:]))
                await consumer.say(phpmq(4, (1, b"q"), (3, heard[-32:])))
            await soon(lambda: len(server.connections) == 2, "those who had left to be gone")

    run(loop, test())


@pytest.mark.parametrize("loop", LOOPS)
def test_who_is_lost_while_it_is_held_back_and_not_read_to_its_end_holds_nothing(
    tmp_path: Path, loop: str
) -> None:
    """There is room in the queue only when what it holds is done."""
    config = tmp_path / "penstock.toml"
    config.write_text("[queue.q]\nmax-bytes = 1\n")

    async def test() -> None:
        async with Inside.open(tmp_path, f"--config {config}") as server:
            worker, sender = await server.connect("phpmq"), await server.connect("phpmq")
            await sender.say(message("phpmq", 0, b"0"))
            await worker.say(*(phpmq(2, (1, queue), (4, b"5")) for queue in (b"q", b"b")))
            dispatch = len(phpmq(3, (1, b"q"), (2, b"0"), (3, bytes(32))))
            assert len(await worker.hear(dispatch)) == dispatch
            many = [phpmq(1, (1, b"n%d" % number), (2, b"x")) for number in range(1000)]
            await worker.say(message("phpmq", 0, b"1"), *many)  # more than its share of a turn
            connection = server.in_order[0]
            await soon(lambda: connection.is_held and bool(connection._rest), "it to be held half read")
            worker.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            worker.close()
            async with asyncio.timeout(WAIT_SECONDS):
                while connection in server.connections:  # Whoever writes to it finds out.
                    await sender.say(phpmq(1, (1, b"b"), (2, b"x")))
                    await asyncio.sleep(0.01)
            await soon(lambda: server.log.describe("q").held == 0, "what it held to be there again")
            await soon(lambda: len(server.broker.ports.attached) == 1, "it to be no port any more")

    run(loop, test())


@pytest.mark.parametrize("loop", LOOPS)
def test_what_waits_for_a_consumer_that_does_not_read_is_bounded(tmp_path: Path, loop: str) -> None:
    payload = bytes(4 * KIB)
    count = 400

    async def test() -> None:
        async with Inside.open(tmp_path, f"--limits-connection-buffer-bytes {BUFFER}") as server:
            consumer = await deaf_consumer(server)
            sender = await server.connect("phpmq")
            for _ in range(count):
                await sender.say(phpmq(1, (1, b"q"), (2, payload)))
            await soon(lambda: held(server) + server.log.ready("q") == count, "the broker to have read all")
            waiting = transport_of(server).get_write_buffer_size()
            # The limit, one message that is over it, and what is around each.
            assert BUFFER - 5 * KIB <= waiting <= BUFFER + 5 * KIB + BUFFER // 16
            heard = await consumer.hear(count * (FRAME + len(payload)))
            assert heard.count(b"H0100303P01") == count

    run(loop, test())


@pytest.mark.parametrize("loop", LOOPS)
def test_broadcasts_to_a_node_that_does_not_read_are_lost_to_it(tmp_path: Path, loop: str) -> None:
    def broadcast(text: bytes) -> bytes:
        return rq(1, (160, b"q"), (224, text.ljust(4 * KIB)), 14)

    async def test() -> None:
        async with Inside.open(tmp_path, f"--limits-connection-buffer-bytes {BUFFER}") as server:
            deaf = await server.connect("rq", buffer_bytes=4 * KIB)
            transport_of(server).get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * KIB
            )
            await deaf.say(rq(1, (160, b"q"), (64, 0), 20))  # priority 0: nothing but broadcasts
            answer = rq(1, (96, 1), (160, b"q"), 24)
            assert await deaf.hear(len(answer)) == answer
            sender = await server.connect("rq")
            for number in range(400):
                await sender.say(broadcast(b"%d" % number))
            await sender.say(rq(5))
            assert await sender.hear(1) == rq(6)
            waiting = transport_of(server).get_write_buffer_size()
            # The limit, and what came in one chunk.
            assert BUFFER - 5 * KIB <= waiting <= BUFFER + RECEIVE_BYTES
            assert 0 < server.memory.broadcasts_lost < 400
            frame = len(broadcast(b""))
            assert await deaf.hear(frame * 10) == b"".join(broadcast(b"%d" % i) for i in range(10))
            while transport_of(server).get_write_buffer_size():
                await deaf.hear(frame)
            await sender.say(broadcast(b"last"))
            while await deaf.hear(frame) != broadcast(b"last"):
                pass

    run(loop, test())


@pytest.mark.parametrize("loop", LOOPS)
def test_a_buffer_that_is_full_to_the_byte_is_no_dead_end(tmp_path: Path, loop: str) -> None:
    """Nothing more may wait, and not one byte too much does: it must be heard when there is room again."""

    async def test() -> None:
        async with Inside.open(tmp_path, f"--limits-connection-buffer-bytes {BUFFER}") as server:
            consumer = await deaf_consumer(server)
            sender = await server.connect("phpmq")
            connection = server.in_order[0]
            expected = 0

            async def send(payload: bytes) -> None:
                nonlocal expected
                before = held(server)
                await sender.say(phpmq(1, (1, b"q"), (2, payload)))
                expected += FRAME + len(payload)
                await soon(lambda: held(server) > before or server.log.ready("q") == 1, "the message")
                await asyncio.sleep(0.05)  # what the kernel takes, it takes now

            while connection.bytes_room() == BUFFER:
                await send(bytes(16 * KIB))
            await send(bytes(connection.bytes_room() - FRAME))
            assert connection.bytes_room() == 0
            await send(b"the last")
            assert server.log.ready("q") == 1
            heard = await consumer.hear(expected)
            assert heard.count(b"the last") == 1

    run(loop, test())


def held(server: Inside) -> int:
    """Messages that the first connection has."""
    return server.broker.ports.infos(0, 1)[0].held


@pytest.mark.parametrize("protocol", ["phpmq", "rq"])
def test_who_makes_queues_too_fast_is_read_later_and_nothing_is_lost(tmp_path: Path, protocol: str) -> None:
    broker = BrokerProcess(tmp_path, "--limits-queues-new-per-second", "50", "--log-level", "info").start()
    maker, other = broker.wire(protocol), broker.wire("phpmq")
    names = [b"made-%d" % number for number in range(120)]
    for number, name in enumerate(names):
        if protocol == "phpmq":
            maker.say(phpmq(1, (1, name), (2, name)))
        else:
            maker.say(rq(1, (128, number), (160, name), (224, name), 33, 10))
    maker.leave()  # What it has said is heard to its end all the same.
    for name in names:
        other.say(phpmq(2, (1, name), (4, b"1")))
        message_id = expect_dispatch(other, name, name)
        other.say(phpmq(4, (1, name), (3, message_id)))
    assert "makes queues faster than queues-new-per-second" in broker.log()
    other.close()
    assert broker.stop() == 0


@pytest.mark.parametrize("loop", LOOPS)
def test_a_stop_reads_those_to_their_end_who_wait_for_the_disk(
    tmp_path: Path, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    write = RealFile.write

    def late(self: RealFile, position: int, buffers: Sequence[Buffer]) -> None:
        assert goes_on.wait(WAIT_SECONDS)
        write(self, position, buffers)

    async def test() -> None:
        async with Inside.open(tmp_path, "--limits-in-flight-bytes 65536 --sspq-queue q") as server:
            monkeypatch.setattr(server, "_end_within", lambda seconds: None)
            sender = await server.connect("sspq")
            monkeypatch.setattr(RealFile, "write", late)
            try:
                await sender.say(*(sspq(SEND, b"%040d" % number) for number in range(4000)))
                await soon(lambda: server.in_order[0].is_held, "the disk to be behind")
                server._asked_to_stop("SIGTERM")
                ticks = server.ticks
                await soon(lambda: server.ticks > ticks + 5, "what was on its way to have been read")
                assert not server._done.is_set()
            finally:
                goes_on.set()
            await soon(server._done.is_set, "the drain to be over")
            assert server.log.describe("q").offset_end == 4000

    run(loop, test())
