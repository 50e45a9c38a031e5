"""TLS and Unix sockets: the same clients through other doors."""

import ssl
from typing import Any

import pytest

from penstock.client import ConnectionLost, NotSupported
from tests.client.both import Connect, both_and_uvloop, take
from tests.client.conftest import Doors


async def exchange(client: Any, protocol: str, queue: str) -> None:
    """A large message, there and back."""
    body = bytes(range(256)) * 8000
    if protocol == "rq":
        await client.send(queue, body)

        async def echo(request: Any) -> bytes:
            answer: bytes = request.body
            return answer

        serving = await client.serve(f"{queue}-echo", echo)
        assert await serving.wait_turn(5)
        assert await client.request(f"{queue}-echo", body, 10) == body
    elif protocol == "phpmq":
        await client.send(queue, body)
        await client.flush()
        (message,) = await take(client.consume(queue), 1)
        assert message.body == body
        assert await message.ack()
    else:
        await client.send(body)
        await client.flush()
        message = await client.receive(timeout=10)
        assert message.body == body
        assert await message.ack()


PROTOCOLS = pytest.mark.parametrize("protocol", ["phpmq", "sspq", "rq"])


@PROTOCOLS
@both_and_uvloop
async def test_tls(kind: Connect, doors: Doors, protocol: str, queue: str) -> None:
    options = {
        "cafile": doors.file("ca.pem"),
        "certfile": doors.file("client.pem"),
        "keyfile": doors.file("client.key"),
    }
    async with kind(doors.tls(protocol), **options) as client:
        await exchange(client, protocol, queue)


@PROTOCOLS
@both_and_uvloop
async def test_a_unix_socket(kind: Connect, doors: Doors, protocol: str, queue: str) -> None:
    async with kind(doors.unix(protocol)) as client:
        await exchange(client, protocol, queue)


@both_and_uvloop
async def test_tls_with_a_context_of_the_caller(kind: Connect, doors: Doors, queue: str) -> None:
    context = ssl.create_default_context(cafile=doors.file("ca.pem"))
    context.load_cert_chain(doors.file("client.pem"), doors.file("client.key"))
    async with kind(doors.tls("phpmq"), ssl_context=context) as client:
        await exchange(client, "phpmq", queue)


@both_and_uvloop
async def test_a_certificate_that_nobody_trusts(kind: Connect, doors: Doors, queue: str) -> None:
    with pytest.raises(ConnectionLost, match=r"certificate verify failed"):
        await kind(doors.tls("rq"))
    async with kind(doors.tls("rq"), verify=False) as client:
        await exchange(client, "rq", queue)


@both_and_uvloop
async def test_tls_where_there_is_none(kind: Connect, doors: Doors) -> None:
    """The client's first flight means nothing to the broker, or the broker's to the client."""
    with pytest.raises(ConnectionLost, match="no rq broker could be reached"):
        await kind(doors.tls("rq").replace("rqs:", "rq:"), connect_seconds=0.2)


@both_and_uvloop
async def test_a_client_without_the_certificate_that_is_asked_for(
    kind: Connect, doors: Doors, queue: str
) -> None:
    """TLS 1.3 lets the client believe that all is well until the first answer, or the end."""
    with pytest.raises(ConnectionLost):
        async with kind(doors.tls("phpmq"), cafile=doors.file("ca.pem"), reconnect_seconds=0) as client:
            await client.send(queue, b"x")


@both_and_uvloop
async def test_files_that_are_none(kind: Connect, doors: Doors) -> None:
    url = doors.tls("phpmq")
    with pytest.raises(NotSupported, match="cafile '/no/such/file' cannot be used"):
        await kind(url, cafile="/no/such/file")
    with pytest.raises(NotSupported, match=r"certfile .* cannot be used"):
        await kind(url, cafile=doors.file("ca.pem"), certfile=doors.file("penstock.toml"))
    with pytest.raises(ConnectionLost, match="No such file or directory"):
        await kind("phpmq+unix:///no/such/socket", reconnect_seconds=0)
