"""Clients for the three protocols and the HTTP API, for threads and for asyncio.

`connect` and `aconnect` choose the client by the URL's scheme. The clients themselves are here too: who
wants a type checker to know which one it is writes `PhpmqClient("phpmq://…")`, which is the same.

One shape for all: a pure core per protocol (what to say, what is owed, what is in doubt), and under it a
thin layer that does the IO, once with blocking sockets and once with asyncio. Modules are imported when
their client is first used, so that `import penstock` and a client that blocks need no event loop.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Unpack

from penstock.client.errors import (
    ClientError,
    ConnectionLost,
    Declined,
    NotSupported,
    Refused,
    TimedOut,
    Undelivered,
)
from penstock.client.options import ClientOptions
from penstock.client.url import target_of

if TYPE_CHECKING:
    from penstock.client.async_http import AsyncHttpClient
    from penstock.client.async_rq import AsyncRqClient
    from penstock.client.http import AsyncHttpMessage, HttpClient, HttpMessage
    from penstock.client.http_core import BatchReceipt, PeekedMessage, QueueDetails, QueueInfo, Receipt
    from penstock.client.phpmq import AsyncPhpmqClient, AsyncPhpmqMessage, PhpmqClient, PhpmqMessage
    from penstock.client.rq import RqClient, RqServing
    from penstock.client.rq_serving import AsyncServing, RqRequest
    from penstock.client.sspq import AsyncSspqClient, AsyncSspqMessage, SspqClient, SspqMessage

__all__ = [
    "AsyncHttpClient",
    "AsyncHttpMessage",
    "AsyncPhpmqClient",
    "AsyncPhpmqMessage",
    "AsyncRqClient",
    "AsyncServing",
    "AsyncSspqClient",
    "AsyncSspqMessage",
    "BatchReceipt",
    "ClientError",
    "ClientOptions",
    "ConnectionLost",
    "Declined",
    "HttpClient",
    "HttpMessage",
    "NotSupported",
    "PeekedMessage",
    "PhpmqClient",
    "PhpmqMessage",
    "QueueDetails",
    "QueueInfo",
    "Receipt",
    "Refused",
    "RqClient",
    "RqRequest",
    "RqServing",
    "SspqClient",
    "SspqMessage",
    "TimedOut",
    "Undelivered",
    "aconnect",
    "connect",
]

_HOMES: Final = {
    "AsyncHttpClient": "async_http",
    "AsyncHttpMessage": "http",
    "AsyncPhpmqClient": "phpmq",
    "AsyncPhpmqMessage": "phpmq",
    "AsyncRqClient": "async_rq",
    "AsyncServing": "rq_serving",
    "AsyncSspqClient": "sspq",
    "AsyncSspqMessage": "sspq",
    "BatchReceipt": "http_core",
    "HttpClient": "http",
    "HttpMessage": "http",
    "PeekedMessage": "http_core",
    "PhpmqClient": "phpmq",
    "PhpmqMessage": "phpmq",
    "QueueDetails": "http_core",
    "QueueInfo": "http_core",
    "Receipt": "http_core",
    "RqClient": "rq",
    "RqRequest": "rq_serving",
    "RqServing": "rq",
    "SspqClient": "sspq",
    "SspqMessage": "sspq",
}
"""In which module of this package a name lives that is imported when it is first used."""

_CLIENTS: Final = {"phpmq": "PhpmqClient", "sspq": "SspqClient", "rq": "RqClient", "http": "HttpClient"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


# Any: which client it is depends on the text of the URL, which no type can say.
def connect(url: str, **options: Unpack[ClientOptions]) -> Any:
    """A client for threads: `PhpmqClient`, `SspqClient`, `RqClient` or `HttpClient`, by the URL's scheme."""
    return __getattr__(_CLIENTS[target_of(url).protocol])(url, **options)


def aconnect(url: str, **options: Unpack[ClientOptions]) -> Any:
    """A client for asyncio, by the scheme of the URL: `await` it, or enter it with `async with`."""
    return __getattr__(f"Async{_CLIENTS[target_of(url).protocol]}")(url, **options)
