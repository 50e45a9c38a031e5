"""A broker that restarts keeps its promises: seeded runs, and proof that they would notice.

`restarts.py` says what must hold. A failure names its seed and the command that repeats it. The first seeds
are the same in every run; the others follow a random number, so that each run of the tests looks at something
new.
"""

import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import pytest

from penstock.broker import requests
from penstock.broker.asked import Asked
from penstock.broker.consumers import Consumers
from penstock.broker.doors import Doors
from penstock.broker.hand_out import HandOut
from penstock.broker.leases import Lease, Leases
from penstock.broker.ports import Attached
from penstock.broker.requests import Requests
from penstock.broker.taking import Taking
from penstock.log.errors import LogRefused
from penstock.model.words import Consume
from tests.broker.restarts import Broken, run
from tests.build import interpreted_only

FIXED_SEEDS = 40
NEW_SEEDS = 20
CANARY_SEEDS = 120


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_every_promise_holds_through_restarts_and_changes_of_leaders() -> None:
    base = int(os.environ.get("PENSTOCK_TEST_SEED", random.randrange(10**6, 10**9)))
    total: Counter[str] = Counter()
    for seed in (*range(FIXED_SEEDS), *range(base, base + NEW_SEEDS)):
        total += run(seed)
    # It has all happened.
    for what in ("close", "kill", "cut", "lead", "used up", "refused", "full", "redrive", "purge", "checks"):
        assert total[what], (what, total)
    for what in ("take", "settle_taken", "untake", "lose_link"):
        assert total[what] > 50, (what, total)
    assert total["messages"] > 3000


def assert_caught(text: str) -> None:
    caught = []
    for seed in range(CANARY_SEEDS):
        try:
            run(seed)
        except Broken as broken:
            caught.append(str(broken))
            if text in caught[-1]:
                return
    raise AssertionError(f"{CANARY_SEEDS} runs, and none found that: {caught[:3]}")


canary: Callable[..., Callable[..., None]] = interpreted_only
"""The fault is put in place of a method, which compiled callers do not look up."""


@canary
def test_an_answer_that_goes_by_numbers_of_another_opening_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def parse(value: bytes, opening: int) -> tuple[int, int, int] | None:
        numbers = [int(number) for number in value.split()]
        return (numbers[1], numbers[2], numbers[3]) if numbers else None

    monkeypatch.setattr(requests, "parse_address", parse)
    assert_caught("answer")


@canary
def test_a_share_that_nobody_gets_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Consumers.block

    def only_if_told(self: Consumers[object], key: object, blocked: bool) -> None:
        # As if who has no room kept its turn: only the port itself blocks.
        if not blocked or getattr(key, "blocked", False):
            block(self, key, blocked)

    monkeypatch.setattr(Consumers, "block", only_if_told)
    assert_caught("wants another turn")


@canary
def test_a_blocked_port_that_is_given_something_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    join = HandOut.join

    def forget(self: HandOut, attached: Attached, command: Consume) -> None:
        blocked, attached.blocked = attached.blocked, False
        join(self, attached, command)
        attached.blocked = blocked

    monkeypatch.setattr(HandOut, "join", forget)
    assert_caught("is blocked")


@canary
def test_a_limit_that_counts_spoken_names_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_doors(self: Doors, queues: Iterable[str]) -> None:
        for queue in queues:
            if queue not in self.by_queue and len(self.by_queue) >= self._queues_max:
                raise LogRefused(f"queue {queue!r}: the limit of queues-max")

    monkeypatch.setattr(Doors, "check_names", by_doors)
    assert_caught("and was refused")


@canary
def test_deadlines_that_stay_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Requests, "_thin_deadlines", lambda self: None)
    assert_caught("deadlines of requests that have ended")


@canary
def test_a_second_delivered_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Asked, "tell", lambda self, indexes: list(indexes))
    assert_caught("is told DELIVERED again")


@canary
def test_a_lease_that_ends_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Leases.ended

    def early(self: Leases, now_us: int) -> Lease | None:
        return ended(self, now_us + 1_500_000)

    monkeypatch.setattr(Leases, "ended", early)
    assert_caught("was taken from")


@canary
def test_a_call_that_outlives_its_link_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Taking, "link_lost", lambda self, now_us: None)
    assert_caught("did not wait")
