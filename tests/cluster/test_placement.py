"""Placement: equal shares, few moves, and the same answer for everybody."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from penstock.cluster.placement import Place, order, place, score
from tests.seeds import SEED


def members(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def settled(homes: dict[str, str], leaders: Sequence[str]) -> list[str]:
    return [it.leader for it in place(homes, leaders)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 20])
@pytest.mark.parametrize("shards", [1, 2, 16, 17, 256])
def test_shares_are_equal_and_a_plan_that_is_carried_out_stays(count: int, shards: int) -> None:
    homes = members(*(f"front-{number}" for number in range(count)))
    leaders = settled(homes, [""] * shards)
    led = Counter(dict.fromkeys(homes, 0))
    led.update(leaders)
    assert max(led.values()) - min(led.values()) <= 1
    assert settled(homes, leaders) == leaders
    for it, leader in zip(place(homes, leaders), leaders, strict=True):
        assert it.standby != leader
        assert bool(it.standby) is (count > 1)


def test_three_of_sixteen_lead_no_more_than_45_percent() -> None:
    for seed in range(50):
        homes = members(*(f"{seed}-{number}" for number in range(3)))
        assert max(Counter(settled(homes, [""] * 16)).values()) <= 7


@pytest.mark.parametrize("shards", [1, 16, 17, 40])
def test_who_comes_takes_its_share_and_nothing_else_moves(shards: int) -> None:
    homes = members("a", "b", "c")
    leaders = settled(homes, [""] * shards)
    after = settled({**homes, "d": "d"}, leaders)
    moved = {new for old, new in zip(leaders, after, strict=True) if old != new}
    assert moved <= {"d"}
    assert after.count("d") in (shards // 4, -(-shards // 4)) or shards == 1
    assert shards > 1 or after == leaders


def test_who_leads_too_many_keeps_those_that_have_their_best_score_there() -> None:
    after = settled(members("a", "b", "c"), ["a"] * 16)
    kept = [score("a", shard) for shard, leader in enumerate(after) if leader == "a"]
    assert sorted(kept) == sorted(score("a", shard) for shard in range(16))[-len(kept) :]


@pytest.mark.parametrize("shards", [1, 16, 17, 40])
def test_who_goes_moves_only_what_it_led(shards: int) -> None:
    homes = members("a", "b", "c", "d")
    leaders = settled(homes, [""] * shards)
    del homes["b"]
    after = settled(homes, leaders)
    assert {old for old, new in zip(leaders, after, strict=True) if old != new} <= {"b"}
    assert "b" not in after


def test_a_plan_carried_out_in_part_is_the_rest_of_the_same_plan() -> None:
    rng = random.Random(int(SEED or random.randrange(10**9)))
    for _ in range(100):
        count, shards = rng.randint(1, 6), rng.randint(1, 40)
        homes = members(*(f"front-{rng.randrange(100)}-{number}" for number in range(count)))
        leaders = [
            rng.choice([*homes, "gone"]) if rng.random() < 0.8 else next(iter(homes)) for _ in range(shards)
        ]
        plan = settled(homes, leaders)
        for shard in rng.sample(range(shards), shards):
            leaders[shard] = plan[shard]
            assert settled(homes, leaders) == plan


def test_the_standby_is_the_first_in_the_order_that_does_not_lead() -> None:
    homes = members("a", "b", "c")
    first, second, third = order(5, homes)
    for leader, standby in ((first, second), (second, first), (third, first), ("", second), ("gone", second)):
        assert place(homes, [""] * 5 + [leader])[5].standby == standby


def test_who_is_started_again_gets_the_same_shards() -> None:
    before = place({"a-1": "a", "b-1": "b", "c-1": "c"}, [""] * 16)
    again = place({"a-2": "a", "b-1": "b", "c-1": "c"}, [""] * 16)
    assert [(it.leader[0], it.standby[0]) for it in before] == [(it.leader[0], it.standby[0]) for it in again]


def test_who_is_weary_keeps_what_it_leads_and_gets_nothing_new() -> None:
    homes = members("a", "b", "c")
    assert "a" not in settled_weary(homes, [""] * 16, "a")
    leaders = ["a"] * 2 + ["b"] * 14
    assert settled_weary(homes, leaders, "a")[:2] == ["a", "a"]
    assert all(order(shard, homes, {"a"})[-1] == "a" for shard in range(16))
    # Where all are, nobody is.
    assert settled_weary(homes, leaders, "a", "b", "c") == settled(homes, leaders)


def settled_weary(homes: dict[str, str], leaders: Sequence[str], *weary: str) -> list[str]:
    return [it.leader for it in place(homes, leaders, weary)]


def test_nobody_there_places_nothing() -> None:
    assert place({}, ["a", ""]) == (Place(), Place())
