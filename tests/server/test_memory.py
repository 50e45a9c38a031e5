"""One account for all: what connections make the broker hold is counted, bounded, and given back."""

import asyncio
import contextlib
import re
from pathlib import Path

import pytest

from penstock.server import memory
from penstock.server import server as server_module
from penstock.server.memory import SMALL_BYTES, Account
from tests.server.harness import SEND, phpmq, rq, sspq
from tests.server.inside import LOOPS, Inside, Peer, run, until

MIB = 1 << 20
LIMIT = 8 * MIB
SETTINGS = f"--limits-memory-bytes-max {LIMIT}"


def begun(wire: str, announced: int, said: int) -> bytes:
    """The beginning of a message: so many bytes of its payload."""
    whole = {
        "rq": rq(1, (160, b"q"), (224, bytes(announced))),
        "phpmq": phpmq(1, (1, b"q"), (2, bytes(announced))),
        "sspq": sspq(SEND, bytes(announced)),
    }[wire]
    return whole[: len(whole) - announced + said]


@pytest.mark.parametrize("wire", ["rq", "phpmq", "sspq"])
def test_what_is_unfinished_is_counted_and_given_back(tmp_path: Path, wire: str) -> None:
    async def test() -> None:
        async with Inside.open(tmp_path, SETTINGS) as server:
            peer = await server.connect(wire)
            await peer.say(begun(wire, 4 * MIB, 3 * MIB))
            await until(lambda: server.memory.held_bytes >= 3 * MIB, "the account to know of it")
            assert server.memory.held_bytes < 3 * MIB + SMALL_BYTES
            peer.close()
            await until(lambda: server.memory.held_bytes == 0, "it to be given back")

    run("uvloop", test())


@pytest.mark.parametrize("loop", LOOPS)
def test_unfinished_messages_stop_at_the_limit_and_the_largest_are_sent_away(
    tmp_path: Path, loop: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "PATIENCE_SECONDS", 0.2)
    count = 12

    async def test() -> None:
        async with Inside.open(tmp_path, SETTINGS) as server:
            pair = await server.connect("phpmq")
            crowd = [await server.connect("rq") for _ in range(count)]
            pouring = [asyncio.create_task(pour(peer, begun("rq", 16 * MIB, 6 * MIB))) for peer in crowd]
            await until(lambda: server.memory.closed > 0, "somebody to be sent away")
            # What a turn takes may be over; and nobody is in the way of those who say little.
            assert server.memory.held_bytes <= LIMIT + 2 * MIB
            await pair.say(phpmq(2, (1, b"p"), (4, b"1")), phpmq(1, (1, b"p"), (2, b"x")))
            assert (await pair.hear(8)).startswith(b"H0100303")
            await until(lambda: server.memory.held_bytes <= LIMIT, "to be within the limit again")
            for task in pouring:
                task.cancel()
            for peer in crowd:
                peer.close()
            await until(lambda: server.memory.held_bytes == 0, "everything to be given back")
            server.journal.flush()

    run(loop, test())
    assert "at the limit of memory-bytes-max = 8388608" in caplog.text
    assert "closed rq connection: it made the broker hold" in caplog.text


async def pour(peer: Peer, stream: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # It was sent away.
        await peer.say(stream)


@pytest.mark.parametrize("loop", LOOPS)
def test_answers_to_a_requester_that_does_not_read_are_bounded(tmp_path: Path, loop: str) -> None:
    """A worker names one payload of a megabyte again and again: its requester is closed, and it is not."""
    requests = 64

    async def test() -> None:
        async with Inside.open(tmp_path, SETTINGS) as server:
            worker = await server.connect("rq")
            await worker.say(rq(1, (160, b"q"), (98, requests), 20))
            await worker.hear(len(rq(1, (96, 1), (160, b"q"), 24)))
            deaf = await server.connect("rq", buffer_bytes=4096)
            for number in range(requests):
                await deaf.say(rq(1, (128, number), (160, b"q"), (224, b"?"), 10))
            await worker.hear(requests * len(rq(1, (128, 0), (160, b"q"), (224, b"?"), 10)))
            replying = asyncio.create_task(
                worker.say(rq(1, (224, bytes(MIB))), *(rq((128, number), 11) for number in range(requests)))
            )
            most = 0
            async with asyncio.timeout(20):
                while not server.memory.closed:
                    most = max(most, server.memory.held_bytes)
                    await asyncio.sleep(0)
            await replying
            assert most <= LIMIT + 4 * MIB
            await until(lambda: len(server.connections) == 1, "the requester to be gone")
            await worker.say(rq(5))
            assert await worker.hear(1) == rq(6)

    run(loop, test())


def test_senders_whose_messages_wait_for_room_are_counted(tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text("[queue.small]\nmax-bytes = 1000\n")

    async def test() -> None:
        async with Inside.open(tmp_path, f"--config {config}") as server:
            sender = await server.connect("phpmq")
            await sender.say(*(phpmq(1, (1, b"small"), (2, bytes(500))) for _ in range(200)))
            await until(lambda: server.memory.held_bytes > 190 * 500, "the account to know of them")
            consumer = await server.connect("phpmq")
            await consumer.say(phpmq(2, (1, b"small"), (4, b"1")))
            frame = len(phpmq(3, (1, b"small"), (2, bytes(500)), (3, b"?" * 32)))
            for _ in range(200):
                dispatch = await consumer.hear(frame)
                await consumer.say(phpmq(4, (1, b"small"), (3, dispatch[-32:])))
            await until(lambda: server.memory.held_bytes == 0, "it to be given back")

    run("uvloop", test())


@pytest.mark.parametrize("wire", ["rq", "phpmq"])
def test_queues_that_are_consumed_are_counted_and_given_back(tmp_path: Path, wire: str) -> None:
    count = 500

    async def test() -> None:
        async with Inside.open(tmp_path, SETTINGS) as server:
            peer = await server.connect(wire)
            names = [b"%0200d" % number for number in range(count)]
            if wire == "rq":
                await peer.say(*(rq(1, (160, it), 20) for it in names))
                await until(lambda: server.memory.held_bytes > count * 1200, "the account to know of them")
                await peer.say(*(rq(1, (160, it), 21) for it in names))
                # Its ids name them still.
                await until(lambda: server.memory.held_bytes < count * 1000, "windows to be given back")
                assert server.memory.held_bytes > count * 200
                peer.close()
            else:
                await peer.say(*(phpmq(2, (1, it), (4, b"1")) for it in names))
                await until(lambda: server.memory.held_bytes > count * 1000, "the account to know of them")
                await peer.say(*(phpmq(2, (1, it), (4, b"0")) for it in names))
            await until(lambda: server.memory.held_bytes == 0, "everything to be given back")

    run("uvloop", test())


def test_the_account_adds_up() -> None:
    class Holder:
        def __init__(self, name: str, output_bytes: int = 0) -> None:
            self.name, self.output_bytes = name, output_bytes
            self.told: list[bool] = []
            self.why = ""

        def hold_for_memory(self, held: bool) -> None:
            self.told.append(held)

        def close_for_memory(self, why: str) -> None:
            self.why = why

    account = Account(10 * MIB)
    small, large, deaf = Holder("small"), Holder("large"), Holder("deaf", 9 * MIB)
    account.charge(small, SMALL_BYTES - 1)
    assert account.held_bytes == 0
    account.charge(small, MIB)
    account.charge(large, 6 * MIB)
    account.charge(large, 8 * MIB)
    assert account.held_bytes == 9 * MIB
    account.look()
    assert not large.told
    account.charge(large, 10 * MIB)
    account.look()
    account.charge(large, 8 * MIB)  # less than the limit, but not by much
    account.look()
    assert large.told == [True]
    account.charge(large, 7 * MIB)
    account.look()
    assert large.told == [True, False]
    assert small.told == [True, False]
    account.charge(deaf, 9 * MIB)
    account.look()
    assert "9437184 bytes which it does not read" in deaf.why
    assert not large.why
    assert account.held_bytes == 8 * MIB
    assert account.closed == 1
    for holder in (small, large, deaf):
        account.forget(holder)
    assert account.held_bytes == 0


def test_bodies_over_http_are_in_the_account() -> None:
    account = Account(10 * MIB)
    account.charge_bodies(5 * MIB)
    assert (account.held_bytes, account.is_tight) == (5 * MIB, False)
    account.charge_bodies(11 * MIB)
    account.look()
    assert (account.is_full, account.closed) == (True, 0)
    account.charge_bodies(9 * MIB)  # less than the limit, but not by much
    account.look()
    assert account.is_full
    account.charge_bodies(0)
    assert account.is_tight  # Somebody has to look once more, or nobody would be told.
    account.look()
    assert (account.held_bytes, account.is_full, account.is_tight) == (0, False, False)


def test_when_a_crowd_has_left_nothing_is_kept_that_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came beside it lies between what it had, and would keep all of that."""
    monkeypatch.setattr(server_module, "BURST_CONNECTIONS", 5)
    count = 50

    async def test() -> None:
        async with Inside.open(tmp_path) as server:
            cache = server.log._state.segments._cache
            crowd = [await server.connect("phpmq") for _ in range(10)]
            sender = await server.connect("phpmq")
            for number in range(count):  # each a block of its own
                await sender.say(phpmq(1, (1, b"q"), (2, b"%02d" % number)))
                while server.log.ready("q") == number:
                    await asyncio.sleep(0)
            await until(lambda: len(cache) == count, "all of them to be in the cache")
            for peer in crowd:
                peer.close()
            await until(lambda: len(cache) <= 1, "the cache to be emptied")
            consumer = await server.connect("phpmq")
            await consumer.say(phpmq(2, (1, b"q"), (4, b"%d" % count)))
            dispatch = await consumer.hear(count * len(phpmq(3, (1, b"q"), (2, b"00"), (3, b"?" * 32))))
            contents = re.findall(rb"P02\d{29}(\d\d)", dispatch)
            assert contents == [b"%02d" % number for number in range(count)]

    run("uvloop", test())
