"""The plan: rounds, pauses and the end of a search, without a clock."""

import pytest

from penstock.client import ConnectionLost
from penstock.client.options import Options
from penstock.client.plan import Backoff, Plan, WrongPeer
from penstock.client.url import target_of


def plan_for(url: str, reconnect_seconds: float = 60) -> Plan:
    chosen = Options.of(backoff_seconds_min=1, backoff_seconds_max=8, reconnect_seconds=reconnect_seconds)
    return Plan(target_of(url), chosen, draw=lambda: 1.0)


@pytest.mark.parametrize(("draw", "pauses"), [(0.0, [0.5, 1, 2, 4, 4]), (1.0, [1, 2, 4, 8, 8])])
def test_pauses_double_up_to_a_bound_and_half_of_each_is_random(draw: float, pauses: list[float]) -> None:
    backoff = Backoff(1, 8, lambda: draw)
    assert [backoff.next() for _ in range(5)] == pauses
    backoff.reset()
    assert backoff.next() == pauses[0]


def test_a_round_over_all_addresses_has_no_pause() -> None:
    plan = plan_for("rq://a,b,c")
    search = plan.search(0)
    tried, pauses = [], []
    for _ in range(7):
        tried.append(str(search.address))
        search.failed(search.address, OSError("no"), 0)
        pauses.append(search.pause)
    assert tried == ["a:13700", "b:13700", "c:13700", "a:13700", "b:13700", "c:13700", "a:13700"]
    assert pauses == [0, 0, 1, 0, 0, 2, 0]


def test_the_search_ends_when_the_next_pause_would_be_too_long() -> None:
    plan = plan_for("rq://a,b", reconnect_seconds=5)
    search = plan.search(100)
    for now, why in ((100, "x"), (100, "y"), (101, "x"), (101, "y"), (103, OSError(111, "z"))):
        search.failed(search.address, why, now)
    with pytest.raises(ConnectionLost) as raised:
        search.failed(search.address, ConnectionResetError(), 103)
    assert str(raised.value) == (
        "no rq broker could be reached (6 attempts): a:13700: Connection refused; "
        "b:13700: ConnectionResetError; is it running, and is the address right?"
    )


def test_without_patience_there_is_one_round() -> None:
    search = plan_for("rq://a,b", reconnect_seconds=0).search(0)
    search.failed(search.address, "x", 0)
    with pytest.raises(ConnectionLost, match="2 attempts"):
        search.failed(search.address, "x", 0)


def test_somebody_who_does_not_speak_the_protocol_is_told_at_once_to_a_new_client() -> None:
    for first in (False, True):
        search = plan_for("rq://a").search(0, first=first)
        search.failed(search.address, "not yet there", 0)
        if first:
            with pytest.raises(ConnectionLost, match=r"2 attempts.*speaks otherwise"):
                search.failed(search.address, WrongPeer("speaks otherwise"), 1)
        else:
            search.failed(search.address, WrongPeer("speaks otherwise"), 1)


def test_a_connection_that_did_not_last_is_no_reason_to_hurry() -> None:
    plan = plan_for("phpmq://a")
    assert plan.search(0).pause == 0
    plan.connected(0)
    assert plan.search(0.1).pause == 1
    plan.connected(1)
    assert plan.search(1.1).pause == 2
    plan.connected(2)
    assert plan.search(20).pause == 0  # it had lasted
    plan.connected(20)
    assert plan.search(20.1).pause == 1


def test_one_that_was_moved_back_comes_last() -> None:
    plan = plan_for("rq://a,b")
    plan.move_back(plan.first)
    assert str(plan.first) == "b:13700"
