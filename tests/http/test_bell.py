"""Connections that are handed over with the address of who is behind them."""

import asyncio
import socket
from typing import Any

import pytest

from penstock.http.bell import Bell, caller_of


@pytest.mark.parametrize(
    ("name", "caller"),
    [
        ("192.0.2.7:5123", ("192.0.2.7", 5123)),
        ("[2001:db8::7]:5123", ("2001:db8::7", 5123)),
        ("front-1", ("front-1", 0)),
        ("front:x", ("front:x", 0)),
    ],
)
def test_who_is_behind_a_connection(name: str, caller: tuple[str, int]) -> None:
    assert caller_of(name) == caller


def test_what_is_handed_over_is_served_with_its_caller() -> None:
    class Heard(asyncio.Protocol):
        def __init__(self, caller: tuple[str, int]) -> None:
            self._caller = caller

        def connection_made(self, transport: Any) -> None:
            transport.write(repr(self._caller).encode())
            transport.close()

    async def test() -> list[bytes]:
        ring, heard = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        bell = Bell(heard, Heard, None)
        answers = []
        for name in (b"192.0.2.7:1", b"192.0.2.8:2"):
            ours, theirs = socket.socketpair()
            socket.send_fds(ring, [name], [theirs.fileno()])
            theirs.close()
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            answers.append(await asyncio.wait_for(reader.read(), 20))
            writer.close()
        bell.close()
        ring.close()
        heard.close()
        return answers

    assert asyncio.run(test()) == [b"('192.0.2.7', 1)", b"('192.0.2.8', 2)"]
