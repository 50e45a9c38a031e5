"""Penstock: a durable message broker where a queue and a log are the same thing."""

import typing

if typing.TYPE_CHECKING:
    from penstock.client import aconnect, connect

__version__ = "0.1.0"

__all__ = ["__version__", "aconnect", "connect"]


def __getattr__(name: str) -> object:
    # The clients are imported when they are first used: nothing else here needs a socket or an event loop.
    if name in ("aconnect", "connect"):
        from penstock import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
