"""Bodies of settlements: what they mean, what is refused and in which words; both ways of reading agree."""

import json
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.control.takes import Verdict
from penstock.http import kinds
from penstock.http.bodies.verdicts import IDS_MAX, read_verdicts
from penstock.http.problems import Problem

LEASE = kinds.Seconds(1, 43_200)
ORIGIN, OTHER = "abcdef000001000001", "abcdef000001000002"


def id_of(offset: int, origin: str = ORIGIN) -> str:
    return f"{origin}{offset:014x}"


def read(**lists: Any) -> list[Verdict]:
    return read_verdicts(json.loads(json.dumps(lists)), LEASE)


def verdict(outcome: str, offsets: list[int], attempts: list[int] | None = None, **said: Any) -> Verdict:
    origin = said.pop("origin", ORIGIN).encode()
    return Verdict(outcome, origin, array("q", offsets), array("i", attempts or [0] * len(offsets)), **said)


# --- what is taken -----------------------------------------------------------------------------------


def test_plain_ids() -> None:
    assert read(ack=[id_of(7), id_of(3)], reject=[id_of(4)], requeue=[id_of((1 << 56) - 1)]) == [
        verdict("ack", [7, 3]),
        verdict("requeue", [(1 << 56) - 1]),
        verdict("reject", [4]),
    ]


def test_ids_of_several_openings() -> None:
    assert read(ack=[id_of(1), id_of(2, OTHER), id_of(3)]) == [
        verdict("ack", [1, 3]),
        verdict("ack", [2], origin=OTHER),
    ]


def test_deliveries_that_are_meant() -> None:
    told = [{"id": id_of(1), "attempts": 2}, {"id": id_of(2, OTHER), "attempts": 1}]
    assert read(ack=told) == [verdict("ack", [1], [2]), verdict("ack", [2], [1], origin=OTHER)]
    assert read(ack=[*told, id_of(3)]) == [
        verdict("ack", [1, 3], [2, 0]),
        verdict("ack", [2], [1], origin=OTHER),
    ]
    assert read(ack=[{"id": id_of(1), "attempts": None}, {"id": id_of(2)}]) == [verdict("ack", [1, 2])]


def test_what_can_be_said_beside_an_id() -> None:
    assert read(
        requeue=[
            id_of(1),
            {"id": id_of(2), "delay": 0},
            {"id": id_of(3), "delay": None, "attempts": 4},
            {"id": id_of(4), "delay": 0.25},
            {"id": id_of(5), "delay": 0},
        ],
        reject=[{"id": id_of(6), "reason": "größer"}, {"id": id_of(7)}, {"id": id_of(8), "reason": ""}],
        extend=[{"id": id_of(9), "lease": 1.5}, {"id": id_of(10), "lease": 43_200, "attempts": 1}],
    ) == [
        verdict("requeue", [1, 3], [0, 4]),
        verdict("requeue", [2, 5], delay_us=0),
        verdict("requeue", [4], delay_us=250_000),
        verdict("reject", [6], why="größer"),
        verdict("reject", [7]),
        verdict("reject", [8], why=""),
        verdict("extend", [9], lease_us=1_500_000),
        verdict("extend", [10], [1], lease_us=43_200_000_000),
    ]


def test_nothing_to_settle() -> None:
    assert read() == read(ack=[], reject=None) == []


def test_so_many_and_no_more() -> None:
    ids = [id_of(offset) for offset in range(IDS_MAX)]
    assert sum(len(it.offsets) for it in read(ack=ids[1:], extend=[{"id": ids[0], "lease": 1}])) == IDS_MAX
    with pytest.raises(Problem, match="more than 10000 ids; settle fewer at a time"):
        read(ack=ids, reject=[id_of(IDS_MAX)])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**56 - 1), st.booleans(), st.integers(0, 9)), unique_by=lambda it: it[0]
    )
)
def test_both_ways_agree(rows: list[tuple[int, bool, int]]) -> None:
    """All at once, and one by one, which an entry that is said more of has all of them read."""
    ids = [id_of(offset, OTHER if other else ORIGIN) for offset, other, _ in rows]
    meant = [{"id": it, "attempts": 1 + attempts} for it, (_, _, attempts) in zip(ids, rows, strict=True)]
    last = id_of(0, "f" * 18)
    for entries in (ids, meant):
        together = read(requeue=entries)
        one_by_one = read(requeue=[*entries, {"id": last, "delay": 1}])
        assert one_by_one == [*together, verdict("requeue", [0], origin="f" * 18, delay_us=1_000_000)]


# --- what is refused ---------------------------------------------------------------------------------

GOOD = id_of(1)
NO_ID = "it has no id; use the 32 hex digits that take has told"

WRONG: list[tuple[object, str]] = [
    ([], "the body is an object with lists of ids: ack, requeue, reject, extend"),
    (None, "the body is an object with lists of ids"),
    ({"acks": []}, "the body is an object with lists of ids"),
    ({"ack": GOOD}, "'ack' is no list; send a list of ids"),
    ({"ack": {}}, "'ack' is no list"),
    ({"ack": 0}, "'ack' is no list"),
    ({"ack": [GOOD, "1"]}, f"'ack', entry 1: {NO_ID}"),
    ({"ack": [GOOD.upper()]}, f"'ack', entry 0: {NO_ID}"),
    ({"ack": [GOOD[:-1], GOOD + "0"]}, f"'ack', entry 0: {NO_ID}"),
    ({"ack": [GOOD[:-1] + "é"]}, f"'ack', entry 0: {NO_ID}"),
    ({"ack": [GOOD[:-1] + "\n"]}, f"'ack', entry 0: {NO_ID}"),
    ({"ack": [17]}, f"'ack', entry 0: {NO_ID}"),
    ({"ack": [None]}, f"'ack', entry 0: {NO_ID}"),
    ({"ack": [[GOOD]]}, f"'ack', entry 0: {NO_ID}"),
    ({"ack": [{}]}, f"'ack', entry 0: {NO_ID}"),
    ({"ack": [{"attempts": 1}]}, f"'ack', entry 0: {NO_ID}"),
    ({"reject": [GOOD, {"id": 5, "attempts": 1}]}, f"'reject', entry 1: {NO_ID}"),
    ({"ack": [{"id": GOOD, "attempts": 0}]}, "'ack', entry 0: 'attempts': use a whole number from 1 to"),
    ({"ack": [{"id": GOOD, "attempts": True}]}, "'ack', entry 0: 'attempts': use a whole number from 1 to"),
    ({"ack": [{"id": GOOD, "attempts": 2**31}]}, "'ack', entry 0: 'attempts': use a whole number from 1 to"),
    ({"ack": [{"id": GOOD, "delay": 1}]}, "'ack', entry 0: use an id, or an object with id, attempts"),
    ({"ack": [{"id": GOOD, "": 1}]}, "'ack', entry 0: use an id, or an object with id, attempts"),
    (
        {"requeue": [{"id": GOOD, "reason": ""}]},
        "'requeue', entry 0: use an id, or an object with id, attempts, d",
    ),
    (
        {"requeue": [{"id": GOOD, "delay": -1}]},
        "'requeue', entry 0: 'delay': use a number of seconds from 0 to 3155",
    ),
    (
        {"requeue": [{"id": GOOD, "delay": 315_576_001}]},
        "'requeue', entry 0: 'delay': use a number of seconds",
    ),
    (
        {"requeue": [{"id": GOOD, "delay": float("nan")}]},
        "'requeue', entry 0: 'delay': use a number of seconds",
    ),
    ({"requeue": [{"id": GOOD, "delay": "1"}]}, "'requeue', entry 0: 'delay': use a number of seconds"),
    ({"requeue": [{"id": GOOD, "delay": False}]}, "'requeue', entry 0: 'delay': use a number of seconds"),
    (
        {"reject": [{"id": GOOD, "reason": 5}]},
        "'reject', entry 0: 'reason': use a text of at most 1000 bytes",
    ),
    (
        {"reject": [{"id": GOOD, "reason": "é" * 501}]},
        "'reject', entry 0: 'reason': use a text of at most 1000",
    ),
    (
        {"reject": [{"id": GOOD, "reason": "\ud800"}]},
        "'reject', entry 0: 'reason': use a text of at most 1000",
    ),
    ({"extend": [GOOD]}, "'extend', entry 0: 'lease': use a number of seconds from 1 to 43200"),
    (
        {"extend": [{"id": GOOD, "lease": None}]},
        "'extend', entry 0: 'lease': use a number of seconds from 1 to",
    ),
    (
        {"extend": [{"id": GOOD, "lease": 0.9}]},
        "'extend', entry 0: 'lease': use a number of seconds from 1 to",
    ),
    (
        {"extend": [{"id": GOOD, "lease": 43_201}]},
        "'extend', entry 0: 'lease': use a number of seconds from 1 to",
    ),
    ({"ack": [GOOD, GOOD]}, f"id {GOOD} is named twice; say once what becomes of each message"),
    ({"ack": [GOOD], "extend": [{"id": GOOD, "lease": 1}]}, f"id {GOOD} is named twice"),
    ({"ack": [{"id": GOOD, "attempts": 1}, {"id": GOOD, "attempts": 2}]}, f"id {GOOD} is named twice"),
]


@pytest.mark.parametrize(("body", "detail"), WRONG, ids=[json.dumps(body)[:60] for body, _ in WRONG])
def test_what_is_wrong_is_named(body: object, detail: str) -> None:
    with pytest.raises(Problem) as raised:
        read_verdicts(body, LEASE)
    assert raised.value.status == 400
    assert raised.value.detail.startswith(detail)
    assert len(raised.value.detail) < 300
