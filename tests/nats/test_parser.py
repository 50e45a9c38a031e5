"""Messages of all sizes, however the bytes of a server are cut into chunks."""

import asyncio
import random
from typing import Any

import pytest

from penstock.log.jetstream.parser import LARGE_BYTES, RecordParser

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
