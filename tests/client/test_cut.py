"""Connections that are cut at every byte: what a client called done is done, what it did not is named.

Between a client and a real broker stands a door that lets a number of bytes through, in one direction or the
other, and then ends both connections: in order, by a reset, or by silence. Where `close` returned, everything
is stored and settled, as the broker's queue shows afterwards; where it raised, the error counts everything
that was not proved before.
"""

import asyncio
import os
import random
import signal
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock import aconnect
from penstock.client import ConnectionLost, PhpmqClient, TimedOut
from tests.certificates import make_certificates
from tests.client.both import Connect, both
from tests.seeds import SEEDED, some
from tests.server.harness import BrokerProcess

LINGER_RESET = struct.pack("ii", 1, 0)
EACH = 3  # messages in a conversation
TRANSPORTS = ("tcp", "tls", "unix")
SEED = int(os.environ.get("PENSTOCK_TEST_SEED", 2009))


@dataclass
class House:
    """A broker with every kind of door for both protocols."""

    process: BrokerProcess
    folder: Path

    def where(self, protocol: str, transport: str) -> "str | tuple[str, int]":
        """Of the broker's own door."""
        if transport == "unix":
            return f"{self.folder}/{protocol}.sock"
        return "localhost", self.process.ports_of(protocol)[transport == "tls"]

    def stored(self, queue: str) -> list[bytes]:
        """What is in a queue and in nobody's hands; it is empty afterwards."""
        with PhpmqClient(f"phpmq+unix://{self.folder}/phpmq.sock") as mq:
            found = list(mq.consume(queue, prefetch=100_000, timeout=0.5))
            mq.ack_many(found)
            return [message.body for message in found]


def start_house(folder: Path) -> House:
    make_certificates(folder)
    lines = []
    for protocol in ("phpmq", "sspq", "rq"):
        tls = f'tls-certificate = "{folder}/server.pem"\ntls-key = "{folder}/server.key"\n'
        unix = f"unix:{folder}/{protocol}.sock"
        for address, more in (("localhost:0", ""), ("localhost:0", tls), (unix, "")):
            lines.append(f'[[listener]]\nprotocol = "{protocol}"\naddress = "{address}"\n{more}')
    config = folder / "penstock.toml"
    config.write_text("".join(lines))
    off = [part for name in ("sspq", "phpmq", "rq") for part in (f"--{name}", "off")]
    doors = ["--config", str(config), "--http", "127.0.0.1:0", *off]
    return House(BrokerProcess(folder, *doors).start(), folder)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    house = start_house(tmp_path_factory.mktemp("house"))
    yield house
    assert house.process.stop() == 0
    assert "Traceback" not in house.process.log()


class Door:
    """Lets so many bytes through, up (to the broker) or down, and then cuts."""

    def __init__(self, house: House, protocol: str, transport: str) -> None:
        self._there = house.where(protocol, transport)
        self._folder = house.folder
        self._transport = transport
        self._protocol = protocol
        self.url = ""
        self.options: dict[str, Any] = {"cafile": f"{house.folder}/ca.pem"} if transport == "tls" else {}
        self.left = {"up": 0, "down": 0}
        self.passed = {"up": 0, "down": 0}
        self.how = "fin"
        self._guard: asyncio.Future[None] | None = None

    async def open(self, direction: str, at: int, how: str) -> None:
        """For one conversation: nobody can come again after the cut."""
        self.left = {"up": 1 << 40, "down": 1 << 40, direction: at}
        self.passed = {"up": 0, "down": 0}
        self.how = how
        scheme = self._protocol + {"tcp": "", "tls": "s", "unix": "+unix"}[self._transport]
        if self._transport == "unix":
            path = self._folder / "door.sock"
            path.unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            listener.listen()
            self.url = f"{scheme}://{path}"
        else:
            listener = socket.create_server(("127.0.0.1", 0))
            self.url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"
        listener.setblocking(False)
        self._guard = asyncio.ensure_future(self._let_in(listener))

    async def close(self) -> None:
        """And wait until the one who came has gone."""
        assert self._guard is not None
        await self._guard

    async def _let_in(self, listener: socket.socket) -> None:
        with listener:
            client, _ = await asyncio.get_running_loop().sock_accept(listener)
        reader, writer = await asyncio.open_connection(sock=client)
        if isinstance(self._there, str):
            up_reader, up_writer = await asyncio.open_unix_connection(self._there)
        else:
            up_reader, up_writer = await asyncio.open_connection(*self._there)
        pumps = {
            asyncio.ensure_future(self._pump("up", reader, up_writer)),
            asyncio.ensure_future(self._pump("down", up_reader, writer)),
        }
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        cut = any(left < 0 for left in self.left.values())
        for pump in pumps:
            pump.cancel()
        await asyncio.wait(pumps)
        if cut and self.how == "silence":
            with suppress(OSError):
                await reader.read()  # until the client has had enough
        for one in (writer, up_writer):
            if cut and self.how == "reset" and self._transport != "unix":
                with suppress(OSError):  # its peer has been faster
                    sock = one.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RESET)
            one.close()
        for one in (writer, up_writer):
            with suppress(OSError):
                await one.wait_closed()

    async def _pump(self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                passing = data[: max(self.left[direction], 0)]
                writer.write(passing)
                await writer.drain()
                self.passed[direction] += len(passing)
                self.left[direction] -= len(data)
                if self.left[direction] < 0:
                    return
            if direction == "up" and writer.can_write_eof():
                writer.write_eof()
                await asyncio.Event().wait()  # the broker ends it


async def error_of(call: Awaitable[None]) -> ConnectionLost | TimedOut | None:
    try:
        await call
    except (ConnectionLost, TimedOut) as error:
        return error
    return None


async def send(client: Any, protocol: str, queue: str, body: bytes) -> None:
    await (client.send(queue, body) if protocol == "phpmq" else client.send(body))


async def settle(client: Any, protocol: str, queue: str, done: list[bytes]) -> None:
    if protocol == "phpmq":
        async for message in client.consume(queue, prefetch=EACH, count=EACH, timeout=5):
            done += [message.body] * await message.ack()
        return
    for _ in range(EACH):
        message = await client.receive(timeout=5)
        done += [message.body] * await message.ack()


def points(top: int, some: int, chance: random.Random) -> list[int]:
    """Cuts at every byte, or at some of them and at both ends."""
    if some >= top:
        return list(range(top + 1))
    return sorted({0, 1, top - 1, top, *chance.sample(range(top), some)})


CASES = pytest.mark.parametrize("protocol", ["phpmq", "sspq"])
WAYS = pytest.mark.parametrize("transport", some(TRANSPORTS, "tls"))


# By whom, over which client, under which name; whether all is well as far as the client says.
Talk = Callable[["Cuts", Any, str], Awaitable[bool]]


class Cuts:
    """Conversations of one client through a door that is cut, in one test."""

    def __init__(self, kind: Connect, house: House, protocol: str, transport: str, what: str) -> None:
        self._kind = kind
        self._door = Door(house, protocol, transport)
        self._options = {"reconnect_seconds": 0, "operation_seconds": 5, **self._door.options}
        self.protocol = protocol
        self.queue = "default" if protocol == "sspq" else f"{what}-{protocol}-{transport}-{kind.__name__}"
        self.chance = random.Random(f"{SEED} {protocol} {transport} {what}")
        self.done: list[bytes] = []
        self.unsent: list[bytes] = []
        self.doubted = 0

    async def all(self, talk: Talk, some: int, silent: float) -> None:
        """`talk` whole, then cut at some bytes each way, the share `silent` of the cuts by silence."""

        async def through(direction: str, at: int, how: str) -> bool:
            self._options["operation_seconds"] = self._options["connect_seconds"] = (
                0.3 if how == "silence" else 5
            )
            await self._door.open(direction, at, how)
            try:
                client = await self._kind(self._door.url, **self._options)
            except ConnectionLost:
                return False
            else:
                return await talk(self, client, f"{direction} {at} {how}")
            finally:
                await self._door.close()

        assert await through("up", 1 << 30, "fin")
        for direction, top in dict(self._door.passed).items():
            for at in points(top, some, self.chance):
                is_silent = self.chance.random() < silent
                how = "silence" if is_silent else self.chance.choice(("fin", "reset"))
                self.doubted += not await through(direction, at, how)
        assert len(self.done) >= 2 * EACH
        assert self.doubted > 20


async def say(cuts: Cuts, client: Any, name: str) -> bool:
    """Send. An error must count everything that was sent."""
    bodies = [f"{name} {number}".encode() for number in range(EACH)]
    for sent, body in enumerate(bodies):
        lost = await error_of(send(client, cuts.protocol, cuts.queue, body))
        if lost is not None:
            assert lost.in_doubt in (sent, sent + 1), name
            await client.close()  # it was told, and there is nothing else
            return False
    lost = await error_of(client.close())
    if lost is None:
        cuts.done.extend(bodies)
        return True
    assert lost.in_doubt == EACH, name
    return False


async def hear(cuts: Cuts, client: Any, name: str) -> bool:
    """Take and acknowledge. An error must count every acknowledgement."""
    acked: list[bytes] = []
    with suppress(ConnectionLost):  # there is nobody to connect to again, or the peer broke off
        await settle(client, cuts.protocol, cuts.queue, acked)
    lost = await error_of(client.close())
    if lost is None:
        cuts.done.extend(acked)
        return len(acked) == EACH
    assert lost.in_doubt == 0, name
    # It may be that none was told: the cut came within the first acknowledgement.
    assert lost.verdicts_in_doubt >= len(acked), name
    return False


async def say_with_receipts(cuts: Cuts, client: Any, name: str) -> bool:
    """Over RQ and HTTP, what `send` has returned for is done. An error is about the one message."""
    lost = None
    for number in range(EACH):
        body = f"{name} {number}".encode()
        lost = await error_of(client.send(cuts.queue, body))
        if lost is not None:
            assert lost.in_doubt <= 1, name
            if not lost.in_doubt:
                cuts.unsent.append(body)
            break
        cuts.done.append(body)
    await client.close()
    return lost is None


@pytest.mark.parametrize("protocol", ["phpmq", "sspq", "rq"])
@WAYS
@both
async def test_sends(kind: Connect, house: House, protocol: str, transport: str) -> None:
    cuts = Cuts(kind, house, protocol, transport, "sends")
    every = SEEDED and transport == "tcp" and kind is aconnect
    talk = say_with_receipts if protocol == "rq" else say
    await cuts.all(talk, 10_000 if every else 40, silent=0.005)
    compare(cuts, house)


@both
async def test_sends_over_http(kind: Connect, house: House) -> None:
    cuts = Cuts(kind, house, "http", "tcp", "sends")
    await cuts.all(say_with_receipts, 10_000 if SEEDED and kind is aconnect else 40, silent=0.005)
    compare(cuts, house)


def compare(cuts: Cuts, house: House) -> None:
    """What was sent with what there is."""
    found = house.stored(cuts.queue)
    assert not set(cuts.done) - set(found), "called done, and not stored"
    assert not set(cuts.unsent) & set(found), "not in doubt, and stored"
    assert len(found) == len(set(found)), "stored twice"


@CASES
@WAYS
@both
async def test_acknowledgements(kind: Connect, house: House, protocol: str, transport: str) -> None:
    cuts = Cuts(kind, house, protocol, transport, "acks")
    with PhpmqClient(f"phpmq+unix://{house.folder}/phpmq.sock") as mq:
        mq.send_many(cuts.queue, (b"%d" % number for number in range(10_000)))
    every = SEEDED and transport == "tcp" and protocol == "sspq" and kind is aconnect
    await cuts.all(hear, 10_000 if every else 30, silent=0)
    left = house.stored(cuts.queue)
    assert not set(cuts.done) & set(left), "acknowledged, and there again"


ENDS = {"killed": signal.SIGKILL, "stopped": signal.SIGTERM, "frozen": signal.SIGSTOP}


@pytest.mark.parametrize("end", ENDS)
@WAYS
@both
async def test_a_broker_that_ends_under_a_sender(
    kind: Connect, tmp_path: Path, transport: str, end: str
) -> None:
    """Whatever `flush` or `close` has returned for is in the log; what is missing is counted as in doubt."""
    chance = random.Random(f"{SEED} {transport} {end}")
    house = start_house(tmp_path)
    there = house.where("phpmq", transport)
    scheme = {"tcp": "phpmq://", "tls": "phpmqs://", "unix": "phpmq+unix://"}[transport]
    address = there if isinstance(there, str) else f"{there[0]}:{there[1]}"
    options: dict[str, Any] = {"cafile": f"{tmp_path}/ca.pem"} if transport == "tls" else {}
    mq = await kind(f"{scheme}{address}", reconnect_seconds=0, operation_seconds=1, **options)
    sent = proved = 0
    end_at = chance.randint(20, 60)
    lost: ConnectionLost | TimedOut | None = None
    for number in range(10_000):
        if number == end_at:
            house.process.signal(ENDS[end])
        lost = await error_of(mq.send_many("q", [b"%d" % one for one in range(sent, sent + 100)]))
        sent += 100
        if lost is None and number % 10 == 9:
            lost = await error_of(mq.flush())
            proved = sent if lost is None else proved
        if lost is not None or (number > end_at + 20 and end == "frozen"):
            break
    if lost is None:
        lost = await error_of(mq.close())
        proved = sent if lost is None else proved
    else:
        await mq.close()  # it was told
    await asyncio.to_thread(house.process.kill)
    house.process.start()
    found = {int(body) for body in await asyncio.to_thread(house.stored, "q")}
    house.process.kill()
    assert found.issuperset(range(proved)), "proved, and not stored"
    missing = sum(1 for one in range(sent) if one not in found)
    assert lost is not None
    assert lost.in_doubt <= sent - proved
    assert missing <= lost.in_doubt + 100  # what the last call did not send at all
