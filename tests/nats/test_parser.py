"""Messages of all sizes, however the bytes of a server are cut into chunks, as nats-py reads them."""

import asyncio
import random
from itertools import pairwise
from typing import Any

import pytest
from nats.protocol import command
from nats.protocol.parser import Parser

from penstock.log.jetstream.parser import LARGE_BYTES, RecordParser
from penstock.log.jetstream.wire import said

SEED = 20261116
SIZES = (0, 1, 5000, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1, 300_000)


class Hearing:
    """What nats-py's client is to a parser."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    async def _process_msg(self, *message: Any) -> None:
        self.heard.append(message)

    async def _process_ping(self) -> None:
        self.heard.append(("PING",))


@pytest.mark.parametrize("step", [1, 2, 7, 1000, LARGE_BYTES, 256 * 1024, 10_000_000])
def test_messages_however_they_are_cut(step: int) -> None:
    chance = random.Random(SEED)
    stream, wanted = bytearray(), []
    for number in range(20 if step > 2 else 4):
        headers = chance.choice([b"", b"NATS/1.0\r\nA: b\r\n\r\n"])
        payload = chance.randbytes(SIZES[-number % len(SIZES)] if step > 2 else LARGE_BYTES + number)
        reply = chance.choice([b"", b"back"])
        words = [b"HMSG" if headers else b"MSG", b"a.b", b"7", *filter(None, [reply])]
        words += [b"%d" % len(headers)] * bool(headers) + [b"%d" % (len(headers) + len(payload))]
        stream += b" ".join(words) + b"\r\n" + headers + payload + b"\r\nPING\r\n"
        wanted += [(7, b"a.b", reply, payload, headers or None), ("PING",)]
    hearing = Hearing()
    parser = RecordParser(hearing)

    async def run() -> None:
        for at in range(0, len(stream), step):
            await parser.parse(bytes(stream[at : at + step]))

    asyncio.run(run())
    assert hearing.heard == wanted


LINES = (
    b"PING\r\n",
    b"+OK\r\n",
    b"MSG  a.b 7 2\r\nhi\r\n",
    b"MSG a.b  7 2\r\nhi\r\n",
    b"MSG a.b 7  2\r\nhi\r\n",
    b"MSG a.b 7 back  2\r\nhi\r\n",
    b"MSG a.b 7 2\r\n\r\n\r\n",
    b"MSG a.b 7 0\r\n\r\n",
    b"MSG a.b 7 back 2\r\nhi\r\n",
    b"MSG a.b 7 12\r\nMSG a.b 7 0\r\r\n",
    b"HMSG a.b 7 12 14\r\nNATS/1.0\r\n\r\nhi\r\n",
    b"HMSG a.b 7 back 12 12\r\nNATS/1.0\r\n\r\n\r\n",
    b"HMSG a.b 7 16 16\r\nNATS/1.0 404\r\n\r\n\r\n",
)


@pytest.mark.parametrize("seed", range(200))
def test_what_stands_whole_in_a_chunk_is_read_as_nats_py_reads_it(seed: int) -> None:
    chance = random.Random(SEED + seed)
    stream = b"".join(chance.choices(LINES, k=chance.randrange(1, 30)))
    cuts = sorted(chance.choices(range(len(stream) + 1), k=chance.randrange(6)))
    chunks = [stream[a:b] for a, b in pairwise([0, *cuts, len(stream)]) if a < b]

    async def read(parser: Parser, hearing: Hearing) -> list[tuple[Any, ...]]:
        for chunk in chunks:
            await parser.parse(chunk)
        assert not parser.buf
        return hearing.heard

    ours, theirs = Hearing(), Hearing()
    assert asyncio.run(read(RecordParser(ours), ours)) == asyncio.run(read(Parser(theirs), theirs))


@pytest.mark.parametrize("seed", range(50))
def test_a_question_is_written_as_nats_py_writes_it(seed: int) -> None:
    chance = random.Random(SEED + seed)
    payload = chance.randbytes(chance.choice(SIZES))
    headers = {
        f"Nats-{number}": chance.choice(["", "7", "a b", "é"]) for number in range(chance.randrange(4))
    }
    head = b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items())
    wanted = (
        command.hpub_cmd("a.b", "back.1", b"NATS/1.0\r\n" + head + b"\r\n", payload)
        if headers
        else command.pub_cmd("a.b", "back.1", payload)
    )
    assert said("a.b", "back.1", payload, headers or None) == wanted
