"""Nobody has a turn of the loop to himself: who says more than his share waits in a round with the others.

Nothing is timed. That others are served in between is seen from what is unread when they are done.
"""

import asyncio
import socket
import struct
from pathlib import Path

import pytest

from penstock.server.rounds import LATE_BYTES, RECEIVE_BYTES, Rounds
from tests.server.harness import CONFIRM, SEND, WAIT_SECONDS, phpmq, rq, sspq
from tests.server.inside import LOOPS, Inside, run, until

SHARES = 150  # that a flood is worth, at least
FLOODS: dict[str, tuple[str, int, bytes]] = {
    # Each is a wire, how many bytes of it a share is enough for, and words that have to be read one by one.
    "actions that lack everything": ("rq", 1500, rq(10, 20, 21, 14)),
    "consume and cancel": ("rq", 2000, rq(1, (160, b"f"), 20, 21)),
    "registers": ("rq", 2500, rq((64, 1), (96, 7), 32, 0)),
    "unknown commands": ("rq", 11000, rq(2, 3, (70, 0), (170, b""))),
    "windows": ("phpmq", 16_000, phpmq(2, (1, b"f"), (4, b"5")) + phpmq(2, (1, b"f"), (4, b"0"))),
    "queues in turn": (
        "phpmq",
        25_000,
        b"".join(phpmq(4, (1, b"f%d" % number), (3, b"0" * 32)) for number in range(70)),
    ),
    "frames that mean nothing": (
        "sspq",
        17_000,
        sspq(CONFIRM) + sspq(0x0E) + sspq(1) + sspq(2),
    ),
}
LAST = {
    "rq": rq(1, (128, 1), (160, b"last"), (224, b"last"), 33, 10),
    "phpmq": phpmq(1, (1, b"last"), (2, b"last")),
    "sspq": sspq(SEND, b"last"),
}


def flood_of(name: str) -> tuple[str, bytes, str]:
    """The wire, the stream, and the queue where its last message goes."""
    wire, share_bytes, words = FLOODS[name]
    queue = "default" if wire == "sspq" else "last"
    return wire, words * (SHARES * share_bytes // len(words) + 1) + LAST[wire], queue


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_words_lets_others_go_first(tmp_path: Path, loop: str, name: str) -> None:
    wire, stream, queue = flood_of(name)

    async def test() -> None:
        async with Inside.open(tmp_path) as server:
            pair = await server.connect("phpmq")
            flooder = await server.connect(wire)
            flooding = asyncio.create_task(flooder.say(stream))
            async with asyncio.timeout(WAIT_SECONDS):
                while not server.rounds.waiting:
                    await asyncio.sleep(0)  # by turns, not by time: a share may be 0.1 ms
            for number in range(2):
                await pair.say(phpmq(2, (1, b"pair"), (4, b"1")), phpmq(1, (1, b"pair"), (2, b"%d" % number)))
                dispatch = await pair.hear(len(phpmq(3, (1, b"pair"), (2, b"0"), (3, b"?" * 32))))
                assert dispatch.startswith(b"H0100303"), dispatch
                await pair.say(phpmq(4, (1, b"pair"), (3, dispatch[-32:])))
            assert server.log.ready(queue) == 0, "the flood has been read to its end"
            await until(lambda: server.log.ready(queue) == 1, "the flood to be read to its end")
            await flooding
            assert not server.rounds.waiting

    run(loop, test())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("wire", LAST)
def test_what_was_received_of_a_peer_that_is_gone_is_read_to_its_end(
    tmp_path: Path, loop: str, wire: str
) -> None:
    name = next(name for name, (of, _, _) in FLOODS.items() if of == wire)
    _, stream, queue = flood_of(name)

    async def test() -> None:
        async with Inside.open(tmp_path) as server:
            flooder = await server.connect(wire)
            await flooder.say(stream)
            flooder.close()
            await until(lambda: not server.connections, "the server to see the end of the connection")
            await until(lambda: server.log.ready(queue) == 1, "the flood to be read to its end")
            await until(lambda: not server.home.ports.attached, "the port to be gone")  # type: ignore[attr-defined]

    run(loop, test())


def test_what_waits_of_a_peer_that_is_reset_is_read_and_then_the_port_is_gone(tmp_path: Path) -> None:
    """A reset comes at once, and not behind what was received."""

    async def test() -> None:
        async with Inside.open(tmp_path) as server:
            flooder = await server.connect("rq")
            _, stream, _ = flood_of("consume and cancel")
            await flooder.say(stream[:150_000])
            await until(lambda: bool(server.rounds.waiting), "it to have had its share")
            flooder.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            flooder.close()
            await until(lambda: not server.home.ports.attached, "the port to be gone")  # type: ignore[attr-defined]
            assert not server.connections

    run("uvloop", test())


def test_who_is_let_go_at_a_stop_is_heard_to_its_end(tmp_path: Path) -> None:
    """What was received before the stop is not lost for having to wait its turn."""
    _, _, words = FLOODS["windows"]

    async def test() -> None:
        async with Inside.open(tmp_path) as server:
            flooder = await server.connect("phpmq")
            await flooder.say(words * 300, LAST["phpmq"])
            (connection,) = server.connections
            async with asyncio.timeout(WAIT_SECONDS):
                while not connection._rest.endswith(LAST["phpmq"]):
                    await asyncio.sleep(0)
            server.home.dismiss()
            await until(lambda: not server.connections, "it to be let go")
            assert server.log.ready("last") == 1

    run("uvloop", test())


@pytest.mark.parametrize("loop", LOOPS)
def test_what_waits_is_read_only_where_there_is_room(tmp_path: Path, loop: str) -> None:
    """Both reasons not to read at once, again and again: no message is lost, doubled or out of order."""
    count = 3000

    async def test() -> None:
        async with Inside.open(tmp_path, "--limits-in-flight-bytes 4096") as server:
            sender = await server.connect("rq")
            # Frames with a CLEAR too many are read word by word.
            await sender.say(
                *(
                    rq(1, 1, (128, number), (160, b"last"), (224, b"%d" % number), 33, 10)
                    for number in range(count)
                )
            )
            await until(lambda: server.log.ready("last") == count, "everything to be stored")
            receipts = await sender.hear(7 * count)
            assert receipts == b"".join(rq(1, (128, number), 13) for number in range(count))

    run(loop, test())


class Waiting:
    """A peer whose every piece takes the whole of a turn, or next to nothing of it."""

    def __init__(self, rounds: Rounds, served: list[str], name: str, pieces: int) -> None:
        self.rounds, self.served, self.name, self.pieces = rounds, served, name, pieces
        self.takes_long = False

    def go_on(self, quick: bool) -> None:
        self.served.append(self.name + ("" if quick else "+"))
        while self.name.isupper() and not quick and not self.rounds.is_over():
            pass
        self.pieces -= 1
        if self.pieces:
            self.rounds.wait(self, for_more=self.name.isupper())


def served_of(peers: list[tuple[str, int]]) -> str:
    served: list[str] = []

    async def test() -> None:
        loop = asyncio.get_running_loop()

        def begin_turn() -> None:
            rounds.begin()
            loop.call_soon(rounds.end)

        rounds = Rounds(loop, begin_turn)
        for name, pieces in peers:
            rounds.wait(Waiting(rounds, served, name, pieces))
        async with asyncio.timeout(WAIT_SECONDS):
            while rounds.waiting:
                await asyncio.sleep(0)

    run("uvloop", test())
    return " ".join(served)


def test_rounds_go_from_one_to_the_next_and_begin_where_the_last_one_ended() -> None:
    assert served_of([("A", 4), ("B", 1), ("C", 3)]) == "A B C A+ C+ A+ C+ A+"


def test_one_who_says_little_does_not_wait_for_all_who_say_much() -> None:
    served = served_of([(name, 4) for name in "ABCDEFGH"] + [("a", 5)])
    much_between = [piece.count("+") for piece in served.split(" a")]
    assert max(much_between[1:-1]) <= 1, served
    assert served.count("+") == 8 * 3, served


@pytest.mark.parametrize("loop", LOOPS)
def test_who_ends_while_its_last_messages_wait_for_room_is_heard_to_its_end(
    tmp_path: Path, loop: str
) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text("[queue.small]\nmax-bytes = 1000\n")
    _, _, words = FLOODS["windows"]

    async def test() -> None:
        async with Inside.open(tmp_path, f"--config {config}") as server:
            sender = await server.connect("phpmq")
            await sender.say(words * 300, *(phpmq(1, (1, b"small"), (2, bytes(500))) for _ in range(10)))
            sender.socket.shutdown(socket.SHUT_WR)
            await until(lambda: server.log.ready("small") == 2, "the queue to be full")
            consumer = await server.connect("phpmq")
            await consumer.say(phpmq(2, (1, b"small"), (4, b"1")))
            for _ in range(10):
                dispatch = await consumer.hear(len(phpmq(3, (1, b"small"), (2, bytes(500)), (3, b"?" * 32))))
                await consumer.say(phpmq(4, (1, b"small"), (3, dispatch[-32:])))
            await until(lambda: len(server.connections) == 1, "the sender to be gone")

    run(loop, test())


def test_what_is_kept_of_those_who_wait_is_bounded_however_many_they_are() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        rounds = Rounds(loop, lambda: None)
        kept: dict[int, int] = {}
        for count in range(1, 3001):
            rounds.wait(Waiting(rounds, [], "a", 1))
            if count in (1, 100, 500, 3000):
                rounds.end()
                kept[count] = len(rounds.buffer)
                assert rounds.late_bytes == kept[count]
        async with asyncio.timeout(WAIT_SECONDS):
            while rounds.waiting:
                await asyncio.sleep(0)
        rounds.end()
        assert (len(rounds.buffer), rounds.late_bytes) == (RECEIVE_BYTES, LATE_BYTES)
        assert kept[1] == kept[100] == LATE_BYTES
        assert 4096 < kept[500] <= (8 << 20) // 500
        assert kept[3000] == 4096

    run("uvloop", test())
