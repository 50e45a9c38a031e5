"""Ranges of POST /v1/queues/{queue}/redrive: letters that are named by their offsets."""

import random
from itertools import pairwise
from typing import Any

import pytest

from penstock.http.reading.letters import Range, Run, merged, within
from penstock.model.life import Reason
from tests.http.api import Api
from tests.http.morgue import bodies_left, exhaust, path_of, reject
from tests.server.harness import BrokerProcess

LETTERS = [b"%02d" % number for number in range(20)]


def redrive(api: Api, queue: str, **fields: object) -> tuple[int, int, int]:
    answer: dict[str, Any] = api.post(path_of(queue, "redrive"), dict(fields))
    return answer["looked_at"], answer["matched"], answer["redriven"]


def ready(api: Api, queue: str) -> list[int]:
    found = api.get(path_of(queue, "messages"), state="ready")["messages"]
    return [message["offset"] for message in found]


def test_letters_in_ranges_are_redriven_and_no_others(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "ranges", LETTERS)
    # In any order, overlapping, empty, the wrong way round, and beyond the end.
    ranges = [[7, 9], [0, 1], [8, 11], [5, 5], [4, 2], [18, 1000]]
    assert redrive(api, "ranges", ranges=ranges) == (7, 7, 7)
    assert ready(api, "ranges") == [0, 7, 8, 9, 10, 18, 19]
    assert redrive(api, "ranges", ranges=ranges) == (0, 0, 0)
    assert redrive(api, "ranges", ranges=[[5, 5]]) == (0, 0, 0)
    assert redrive(api, "ranges", ranges=[[0, 20]], limit=2, **{"from": 3}) == (2, 2, 2)
    assert bodies_left(broker, "ranges", 9)[7:] == [b"03", b"04"]


def test_ranges_go_together_with_everything_else(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "both", LETTERS[:10])
    exhaust(broker, api, "both", LETTERS[10:])
    ranges = [[0, 5], [8, 12], [15, 17]]
    assert redrive(api, "both", ranges=ranges, dry_run=True) == (11, 11, 0)
    assert redrive(api, "both", ranges=ranges, dry_run=True, reason="rejected") == (7, 7, 0)
    assert redrive(api, "both", ranges=ranges, dry_run=True, **{"from": 9}) == (5, 5, 0)
    assert redrive(api, "both", ranges=[[3, 3]], dry_run=True) == (0, 0, 0)
    assert redrive(api, "both", ranges=ranges, where="value in ('03', '07', '16')") == (11, 2, 2)
    assert ready(api, "both") == [3, 16]
    assert redrive(api, "both", ranges=ranges, where="reason != 'rejected'") == (9, 3, 3)
    assert ready(api, "both") == [3, 10, 11, 15, 16]
    answer = api.post(path_of("both", "redrive"), {"ranges": ranges, "scan_limit": 3})
    assert (answer["redriven"], answer["next"]) == (3, 3)
    assert ready(api, "both") == [0, 1, 2, 3, 10, 11, 15, 16]


def test_many_ranges_in_one_call(broker: BrokerProcess, api: Api) -> None:
    api.send("many", *[b"letter"] * 10)
    bodies = [b"x"] * 20_000
    reject(broker, api, "many", bodies)
    odd = [[offset, offset + 1] for offset in range(1, 20_000, 2)]
    assert redrive(api, "many", ranges=odd) == (10_000, 10_000, 10_000)
    assert redrive(api, "many", ranges=odd, dry_run=True) == (0, 0, 0)
    assert api.get(path_of("many"))["dead"] == 10_000


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        {},
        [[1]],
        [[1, 2, 3]],
        [1, 2],
        [["1", 2]],
        [[1, 2.5]],
        [[True, 2]],
        [[-1, 2]],
        [[0, 1 << 56]],
        [[0, 1]] * 10_001,
    ],
)
def test_ranges_that_are_none(broker: BrokerProcess, api: Api, ranges: object) -> None:
    api.send("wrong", b"x")
    reply = api.ask("POST", path_of("wrong", "redrive"), {"ranges": ranges})
    assert reply.problem == "bad-request"
    assert "field 'ranges': use a list of 1 to 10000 ranges" in reply.json["detail"]


def test_merging_and_cutting_agree_with_sets() -> None:
    chance = random.Random(7)
    for _ in range(300):
        ranges = [
            Range(first, first + chance.randint(-2, 6))
            for first in (chance.randint(0, 60) for _ in range(chance.randint(0, 12)))
        ]
        start = chance.choice((0, 0, 20))
        whole = merged(ranges, start)
        offsets = {offset for first, end in ranges for offset in range(first, end) if offset >= start}
        assert [offset for first, end in whole for offset in range(first, end)] == sorted(offsets)
        assert all(before.end < behind.first for before, behind in pairwise(whole))
        runs, at = [], 0
        while at < 70:
            at += chance.randint(0, 5)
            end = at + chance.randint(1, 9)
            runs.append(Run(at, end, 0, 0, 1, 0, Reason.REJECTED))
            at = end
        dead = {offset for run in runs for offset in range(run.first, run.end)}
        found = [offset for run in within(runs, whole) for offset in range(run.first, run.end)]
        assert found == sorted(dead & offsets)
