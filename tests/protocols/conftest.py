"""What the protocol tests share: how bytes are fed, and how long properties may search."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

settings.register_profile("protocols", deadline=None, max_examples=200)
settings.load_profile("protocols")

E = TypeVar("E")
Receive = Callable[[bytes | bytearray | memoryview], list[E]]
Feed = Callable[[Receive[Any], bytes, bytes], list[Any]]


def _whole(receive: Receive[E], data: bytes, following: bytes) -> list[E]:
    return [*receive(data), *receive(following)]


def _byte_by_byte(receive: Receive[E], data: bytes, following: bytes) -> list[E]:
    stream = data + following
    return [event for at in range(len(stream)) for event in receive(stream[at : at + 1])]


def _with_trailing_bytes(receive: Receive[E], data: bytes, following: bytes) -> list[E]:
    cut = len(following) // 2
    return [*receive(data + following[:cut]), *receive(following[cut:])]


def _through_one_buffer(receive: Receive[E], data: bytes, following: bytes) -> list[E]:
    """As a server does it that reads into the same buffer again and again."""
    buffer = bytearray(7)
    stream, events = data + following, []
    for at in range(0, len(stream), len(buffer)):
        part = stream[at : at + len(buffer)]
        buffer[: len(part)] = part
        events += receive(memoryview(buffer)[: len(part)])
        buffer[:] = b"\xff" * len(buffer)
    return events


_FEEDINGS: dict[str, Feed] = {
    "whole": _whole,
    "byte by byte": _byte_by_byte,
    "with trailing bytes": _with_trailing_bytes,
    "through one buffer": _through_one_buffer,
}


@pytest.fixture(params=_FEEDINGS, ids=lambda name: name.replace(" ", "-"))
def feed(request: pytest.FixtureRequest) -> Feed:
    """Feeds `data` and then the message `following` to a receiver; gives all events."""
    return _FEEDINGS[request.param]
