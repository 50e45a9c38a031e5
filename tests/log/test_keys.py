"""Keys of transactions: which are remembered, for how long, and that a restart changes nothing about it."""

import random

import pytest

from penstock.log import keys
from penstock.log.keys import SERIES_MAX, TRANSACTIONS_MAX, Keys, kind_of


class Memory:
    """What is remembered, in the order of the commits."""

    def __init__(self, kind: str = "") -> None:
        self.kind = kind
        self.keys = Keys(kind)
        self.known: dict[str, None] = {}

    def add(self, key: str) -> None:
        for forgotten in self.keys.add(key):
            del self.known[forgotten]
        self.known[key] = None

    def again(self) -> "Memory":
        """After a restart."""
        memory = Memory(self.kind)
        for key in self.known:
            memory.add(key)
        return memory


def test_kinds() -> None:
    assert kind_of("transaction/spark/query/7") == "transaction/"
    assert kind_of("no slash at all") == ""


def test_the_newest_are_remembered_and_of_a_series_its_last_for_long() -> None:
    memory = Memory()
    for number in range(3):
        memory.add(f"t/spark/early/{number}")
    for number in range(TRANSACTIONS_MAX):
        memory.add(f"t/spark/busy/{number}")
    early = [key for key in memory.known if "early" in key]
    assert early == ["t/spark/early/2"]
    assert len(memory.known) == TRANSACTIONS_MAX + 1
    for number in range(TRANSACTIONS_MAX):
        memory.add(f"t/spark/busy/{TRANSACTIONS_MAX + number}")
    assert len(memory.known) == TRANSACTIONS_MAX + 1
    # The series goes on: its old key is not needed any more.
    memory.add("t/spark/early/3")
    assert [key for key in memory.known if "early" in key] == ["t/spark/early/3"]


def test_pieces_of_a_stream_s_batches_are_series_as_well() -> None:
    """Or whoever writes a batch in several pieces pushed out the last batches of all others."""
    memory = Memory()
    early = ["t/spark/early/7", "t/spark/early/7/out", "t/spark/early/7/expect/known"]
    for key in early:
        memory.add(key)
    for number in range(TRANSACTIONS_MAX + SERIES_MAX):
        memory.add(f"t/spark/busy/{number}/out")
        memory.add(f"t/spark/busy/{number}/bad-records")
    assert [key for key in memory.known if "early" in key] == early
    assert len(memory.known) == TRANSACTIONS_MAX + len(early)


def test_series_are_bounded_too() -> None:
    memory = Memory()
    count = TRANSACTIONS_MAX + SERIES_MAX + 5
    for number in range(count):
        memory.add(f"t/{number}/0")
    assert list(memory.known) == [f"t/{number}/0" for number in range(5, count)]
    # Keys that nothing follows are one series: they do not crowd the memory.
    for number in range(count):
        memory.add(f"t/{number}")
    assert len(memory.known) == TRANSACTIONS_MAX + SERIES_MAX


def test_a_restart_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "TRANSACTIONS_MAX", 20)
    monkeypatch.setattr(keys, "SERIES_MAX", 8)
    chance = random.Random(3)
    memory = Memory()
    for number in range(5000):
        key = f"t/{chance.randint(0, 30)}/{number}" if chance.random() < 0.8 else f"t/{number}"
        memory.add(key)
        assert len(memory.known) <= 28
        assert list(memory.known)[-20:][-1] == key
        if number % 7 == 0:
            again = memory.again()
            assert list(again.known) == list(memory.known)
            memory = again


def test_what_front_ends_relay_is_remembered_for_a_short_time_and_the_last_of_each_for_long() -> None:
    memory = Memory("relay/")
    most = keys.TRANSACTIONS_MAX_OF["relay/"]
    for number in range(5):
        memory.add(f"relay/quiet/life.0/{number}")
    for number in range(3 * most):
        memory.add(f"relay/busy/life.0/{number}")
    assert len(memory.known) == most + 1
    assert memory.keys.newest("relay/quiet/life.0/") == "relay/quiet/life.0/4"
    assert memory.keys.newest("relay/busy/life.0/") == f"relay/busy/life.0/{3 * most - 1}"
    assert memory.keys.newest("relay/nobody/life.0/") is None
    again = memory.again()
    assert list(again.known) == list(memory.known)
    assert again.keys.newest("relay/quiet/life.0/") == "relay/quiet/life.0/4"
