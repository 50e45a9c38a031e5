"""Words go to another home from some moment on: those of clients that are only coming, too."""

import asyncio
import socket
import ssl
from pathlib import Path

import pytest

from penstock.server.backend import Served
from tests.certificates import make_certificates
from tests.server.harness import RECEIVE, SEND, WAIT_SECONDS, sspq
from tests.server.inside import LOOPS, Inside, run

RECEIVE_BYTES = 1 << 16


class TlsPeer:
    """A client whose handshake is taken step by step."""

    def __init__(self, peer: socket.socket, authority: Path) -> None:
        self._socket = peer
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cafile=str(authority))
        self._tls = context.wrap_bio(self._in, self._out, server_hostname="localhost")

    async def greet(self) -> None:
        """The first word of the handshake, and the server's answer: it has accepted the connection."""
        with pytest.raises(ssl.SSLWantReadError):
            self._tls.do_handshake()
        await self._exchange()

    async def finish(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._exchange()
            else:
                return

    async def say(self, data: bytes) -> None:
        self._tls.write(data)
        await asyncio.get_running_loop().sock_sendall(self._socket, self._out.read())

    async def hear(self, count: int) -> bytes:
        heard = b""
        while len(heard) < count:
            try:
                heard += self._tls.read(count - len(heard))
            except ssl.SSLWantReadError:
                await self._exchange()
        return heard

    async def _exchange(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, self._out.read())
        received = await loop.sock_recv(self._socket, RECEIVE_BYTES)
        assert received, "the server has closed the connection"
        self._in.write(received)


@pytest.mark.parametrize("loop", LOOPS)
def test_who_is_accepted_before_a_move_and_ready_after_it_speaks_to_the_new_home(
    tmp_path: Path, loop: str
) -> None:
    """A TLS handshake takes its time, in which a front-end may come to lead, or cease to."""
    make_certificates(tmp_path)
    config = tmp_path / "penstock.toml"
    config.write_text(
        f'[[listener]]\nprotocol = "sspq"\naddress = "127.0.0.1:0"\nqueue = "q"\n'
        f'tls-certificate = "{tmp_path}/server.pem"\ntls-key = "{tmp_path}/server.key"\n'
    )

    async def test() -> None:
        async with Inside.open(tmp_path, f"--config {config} --sspq off") as server:
            with socket.socket() as raw:
                raw.setblocking(False)
                await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", server.port("sspq")))
                peer = TlsPeer(raw, tmp_path / "ca.pem")
                async with asyncio.timeout(WAIT_SECONDS):
                    await peer.greet()
                    log = server.log
                    broker = server.make_broker(log)
                    server.move_to(broker, Served(0, broker, log))
                    await peer.finish()
                    await peer.say(sspq(SEND, b"x", 9) + sspq(RECEIVE))
                    assert await peer.hear(9) == sspq(SEND, b"x", 9)
                assert [port.name for port in broker.ports.attached] == [server.in_order[0].name]

    run(loop, test())
