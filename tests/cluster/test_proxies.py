"""Whether proxies do what is asked of them: both ends of a connection are here."""

import os
import select
import socket
import time
from collections.abc import Iterator

import pytest

from tests.cluster.proxies import Part, Proxies
from tests.server.harness import WAIT_SECONDS, Wire

SECONDS = 0.05


@pytest.fixture
def proxies() -> Iterator[Proxies]:
    proxies = Proxies(7)
    yield proxies
    proxies.close()


class Ends:
    """Two parts, of which one listens; and connections of the other one, which is this process, to it."""

    def __init__(self, proxies: Proxies) -> None:
        self.door = socket.create_server(("127.0.0.1", 0))
        self.door.settimeout(WAIT_SECONDS)
        self.comes, self.to = proxies.add("comes", os.getpid), proxies.add("to", lambda: 0)
        self._at = proxies.open(self.to, lambda: int(self.door.getsockname()[1]))

    def connect(self) -> Wire:
        return Wire(("127.0.0.1", self._at))

    def accept(self) -> Wire:
        wire = Wire.__new__(Wire)
        wire.socket, _ = self.door.accept()
        wire.socket.settimeout(WAIT_SECONDS)
        wire._heard = bytearray()
        return wire

    def has_come(self) -> bool:
        return bool(select.select([self.door], [], [], SECONDS)[0])


@pytest.fixture
def ends(proxies: Proxies) -> Iterator[Ends]:
    ends = Ends(proxies)
    yield ends
    ends.door.close()


def test_what_is_cut_one_way_is_heard_the_other_way_and_all_of_it_later(proxies: Proxies, ends: Ends) -> None:
    for says_more in (True, False):
        one = ends.connect()
        other = ends.accept()
        says, hears = (one, other) if says_more else (other, one)
        parts: list[Part] = [ends.comes, ends.to]
        proxies.cut(*(parts if says_more else parts[::-1]), both=False)
        says.say(b"a word")
        hears.say(b"an answer")
        says.expect(b"an answer")
        assert hears.is_silent(SECONDS)
        with ends.connect():
            assert not ends.has_come()  # for that each has to hear the other
        says.say(b", and more")
        says.close()
        assert hears.is_silent(SECONDS)
        proxies.heal()
        hears.expect(b"a word, and more")
        assert hears.is_closed()
        hears.close()
        ends.accept().close()


def test_who_is_cut_off_does_not_hear_that_the_other_has_gone(proxies: Proxies, ends: Ends) -> None:
    one = ends.connect()
    other = ends.accept()
    proxies.cut(ends.comes, ends.to)
    one.reset()
    assert other.is_silent(SECONDS)
    proxies.heal()
    assert other.is_closed()
    other.close()


def test_who_is_no_part_passes(proxies: Proxies, ends: Ends) -> None:
    proxies.cut(ends.comes, ends.to)
    ends.comes._pid = lambda: 0
    with ends.connect() as one, ends.accept() as other:
        one.say(b"a word")
        other.expect(b"a word")


@pytest.mark.parametrize("bad", ["late", "slow", "loses"])
def test_what_is_late_or_slow_or_lost_comes_all_the_same(
    proxies: Proxies, ends: Ends, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.cluster.proxies.AGAIN_SECONDS", SECONDS)
    with ends.connect() as one, ends.accept() as other:
        if bad == "late":
            proxies.delay(SECONDS)
        elif bad == "slow":
            proxies.slow(int(8 / SECONDS))
        else:
            proxies.lose(0.5)
        began = time.monotonic()
        for number in range(8):
            one.say(bytes([number]))
            other.expect(bytes([number]))
        assert time.monotonic() - began >= SECONDS


def test_now_and_then_a_loss_is_that_of_the_connection(
    proxies: Proxies, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.cluster.proxies.BREAKS", 1.0)
    proxies.lose(1.0)
    with ends.connect() as one, ends.accept() as other:
        one.say(b"a word")
        assert other.is_closed()
        assert one.is_closed()
