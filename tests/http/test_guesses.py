"""Guesses: who waits for how long, by a clock that the test turns; and the guard that asks."""

import asyncio

from penstock.common.tokens import hash_token, new_token
from penstock.http.auth import AT_ONCE, Guard
from penstock.http.guesses import FORGET_SECONDS, FREE, KEPT_MAX, WAIT_SECONDS_MAX, Guesses
from penstock.http.problems import Problem


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def guess(guesses: Guesses, number: int, address: str = "10.0.0.1", name: str = "ann") -> None:
    guesses.failed(str(number).encode(), address, name)


def test_the_first_are_free_and_then_each_costs_more() -> None:
    clock = Clock()
    guesses = Guesses(clock)
    for number in range(FREE):
        assert guesses.wait_seconds("10.0.0.1", "ann") == 0
        guess(guesses, number)
    waits = []
    for number in range(10):
        waits.append(guesses.wait_seconds("10.0.0.1", "ann"))
        clock.now += waits[-1]
        assert guesses.wait_seconds("10.0.0.1", "ann") == 0
        guess(guesses, FREE + number)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, WAIT_SECONDS_MAX]


def test_an_address_and_a_name_count_apart() -> None:
    guesses = Guesses(Clock())
    for number in range(FREE):
        guess(guesses, number, name="")  # a token of no particular user
    assert guesses.wait_seconds("10.0.0.1", "bob") > 0
    assert guesses.wait_seconds("10.0.0.2", "bob") == 0
    for number in range(FREE):
        guess(guesses, number, address=f"10.0.1.{number}", name="bob")
    assert guesses.wait_seconds("10.0.0.2", "bob") > 0
    assert guesses.wait_seconds("10.0.0.2", "ann") == 0


def test_all_is_forgotten_after_a_while() -> None:
    clock = Clock()
    guesses = Guesses(clock)
    for number in range(3 * FREE):
        guess(guesses, number)
    clock.now += FORGET_SECONDS + 1
    assert guesses.wait_seconds("10.0.0.1", "ann") == 0
    guess(guesses, 0)
    assert guesses.wait_seconds("10.0.0.1", "ann") == 0


def test_the_same_wrong_one_is_known_until_settings_change() -> None:
    guesses = Guesses(Clock())
    guess(guesses, 1)
    assert guesses.is_known_wrong(b"1")
    guesses.forget_wrong()
    assert not guesses.is_known_wrong(b"1")


def test_what_is_kept_is_bounded() -> None:
    guesses = Guesses(Clock())
    for number in range(3 * KEPT_MAX):
        guess(guesses, number, str(number), f"name{number}")
        guesses.trust(str(number).encode(), "here")
    kept = (guesses._wrong, guesses._known_wrong, guesses._trusted)
    assert all(len(it) <= KEPT_MAX for it in kept)
    assert guesses.is_trusted(str(3 * KEPT_MAX - 1).encode(), "here")
    assert not guesses.is_trusted(b"0", "here")


TOKEN = new_token("ann")
ANN = {"name": "ann", "hashes": [hash_token(TOKEN)], "grants": [], "admin": True, "expires_us": 0}


async def shown(guard: Guard, token: str, address: str) -> str:
    """What becomes of a token."""
    try:
        return (await guard.recognise(token, address)).name
    except Problem as problem:
        return problem.name


def test_guesses_that_come_all_at_once_are_slowed_down_too() -> None:
    async def main() -> None:
        guard = Guard((), (ANN,))
        told = await asyncio.gather(*(shown(guard, f"ann.{it}", f"10.0.0.{it}") for it in range(100)))
        assert FREE <= told.count("unauthorized") <= FREE + AT_ONCE
        assert told.count("unauthorized") + told.count("too-many-guesses") == 100

    asyncio.run(main())


def test_guesses_of_others_keep_nobody_out_whose_token_is_known() -> None:
    async def main() -> None:
        guard = Guard((), (ANN,))
        assert await shown(guard, TOKEN, "10.0.0.1") == "ann"
        for number in range(FREE):
            await shown(guard, f"ann.{number}", "10.0.0.2")
        assert await shown(guard, "ann.more", "10.0.0.3") == "too-many-guesses"
        assert await shown(guard, TOKEN, "10.0.0.4") == "ann"  # from where it has never been
        assert await shown(guard, TOKEN, "10.0.0.2") == "too-many-guesses"  # where the guesses come from

    asyncio.run(main())


def test_a_token_that_is_revoked_while_it_is_compared_is_not_let_in() -> None:
    async def main() -> None:
        guard = Guard((), (ANN,))
        comparing = asyncio.ensure_future(shown(guard, TOKEN, "10.0.0.1"))
        await asyncio.sleep(0)
        guard.set_users((), ({**ANN, "hashes": [hash_token("ann.other")]},))
        assert await comparing == "unauthorized"

    asyncio.run(main())
