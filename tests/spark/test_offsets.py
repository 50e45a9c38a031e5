"""Where queries begin and end, and what is said about offsets that are gone."""

import json
import logging
import re

import pytest

from penstock.spark.api import Broker, Interrupted, NoLeader, Patience, Unreachable
from penstock.spark.offsets import (
    DataLost,
    Extent,
    ending_positions,
    identities_of,
    kept_position,
    offset_of,
    positions_of,
    starting_positions,
)
from penstock.spark.options import BATCH, STREAM, ReadOptions, WrongOption, read_options

NOBODY = Broker("http://127.0.0.1:9")
EXTENTS = {"a": Extent(5, 10), "b": Extent(0, 3)}


def options(kind: str = STREAM, **said: str) -> ReadOptions:
    return read_options({"subscribe": "a,b,c", **said}, kind)


@pytest.mark.parametrize(
    ("said", "positions"),
    [
        ("earliest", {"a": 5, "b": 0}),
        ("latest", {"a": 10, "b": 3}),
        ('{"a": 7, "b": -2, "c": -1}', {"a": 7, "b": 0}),
        ('{"a": -1, "b": 3, "c": 0}', {"a": 10, "b": 3}),
        ('{"a": 1, "b": 1, "c": -2}', {"a": 1, "b": 1}),
    ],
)
def test_where_a_query_begins(said: str, positions: dict[str, int]) -> None:
    assert starting_positions(NOBODY, options(startingOffsets=said), EXTENTS) == positions


def test_where_a_batch_ends() -> None:
    assert ending_positions(NOBODY, options(BATCH), EXTENTS) == {"a": 10, "b": 3}
    said = options(BATCH, endingOffsets='{"a": 6, "b": -1, "c": -1}')
    assert ending_positions(NOBODY, said, EXTENTS) == {"a": 6, "b": 3}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ('{"a": 7, "b": 0}', "'startingOffsets' does not name 'c'; name every queue"),
        ('{"a": 7, "b": 0, "c": 0, "d": 0}', "'startingOffsets' names 'd', which this query does not read"),
        ('{"a": 11, "b": 0, "c": 0}', "queue 'a': 11 is behind the end of what can be read, 10"),
        ('{"a": 7, "b": 0, "c": 1}', "queue 'c': 1 is behind the end of what can be read, 0"),
    ],
)
def test_offsets_that_cannot_be_meant(said: str, words: str) -> None:
    with pytest.raises(WrongOption, match=re.escape(words)):
        starting_positions(NOBODY, options(startingOffsets=said), EXTENTS)


def test_with_a_pattern_a_query_that_may_go_on_does_without_a_queue_that_is_gone() -> None:
    said = {"subscribePattern": "[abc]", "endingOffsets": '{"a": 7, "b": 3, "c": 5}'}
    with pytest.raises(WrongOption, match="queue 'c': 5 is behind the end of what can be read, 0"):
        ending_positions(NOBODY, read_options(said, BATCH), EXTENTS)
    going_on = read_options({**said, "failOnDataLoss": "false"}, BATCH)
    assert ending_positions(NOBODY, going_on, EXTENTS) == {"a": 7, "b": 3}


def test_with_a_pattern_every_queue_that_is_there_must_be_named() -> None:
    said = read_options({"subscribePattern": "[abc]", "startingOffsets": '{"a": 7}'}, STREAM)
    with pytest.raises(WrongOption, match="does not name 'b'"):
        starting_positions(NOBODY, said, EXTENTS)


# --- what is gone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [5, 7, 10])
def test_what_is_there_is_read(position: int) -> None:
    assert kept_position(options(), "a", position, Extent(5, 10)) == position


def test_a_queue_that_is_not_there_yet_has_lost_nothing() -> None:
    assert kept_position(options(), "a", 0, None) == 0


LOST = [
    (3, Extent(5, 10), 5, "queue 'a': offsets 3 to 4 were removed by retention"),
    (12, Extent(5, 10), 5, "queue 'a' ends at 10, but was read up to 12"),
    (7, None, 0, "queue 'a' is gone, but was read up to 7"),
]


@pytest.mark.parametrize(("position", "extent", "kept", "words"), LOST)
def test_what_is_gone_is_an_error_that_says_what_to_do(
    position: int, extent: Extent | None, kept: int, words: str
) -> None:
    with pytest.raises(DataLost, match=re.escape(words)) as loss:
        kept_position(options(), "a", position, extent)
    assert "set failOnDataLoss to false to go on" in str(loss.value)


@pytest.mark.parametrize(("position", "extent", "kept", "words"), LOST)
def test_what_is_gone_is_a_warning_where_the_query_may_go_on(
    position: int, extent: Extent | None, kept: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "penstock.spark"):
        assert kept_position(options(failOnDataLoss="false"), "a", position, extent) == kept
    assert words in caplog.text


def test_a_position_is_of_one_queue() -> None:
    there = Extent(0, 10, "3f9a1c000002")
    assert kept_position(options(), "a", 7, there, "3f9a1c000002") == 7
    assert kept_position(options(), "a", 7, there, "") == 7
    assert kept_position(options(), "a", 7, Extent(0, 10), "3f9a1c000001") == 7
    with pytest.raises(DataLost, match="queue 'a' was deleted, and another of that name stands now"):
        kept_position(options(), "a", 7, there, "3f9a1c000001")
    assert kept_position(options(failOnDataLoss="false"), "a", 7, there, "3f9a1c000001") == 0
    offset = offset_of({"b": 1, "a": 7}, {"a": there, "b": Extent(0, 3)})
    assert json.dumps(offset) == '{"": {"a": "3f9a1c000002"}, "a": 7, "b": 1}'
    assert (positions_of(offset), identities_of(offset)) == ({"a": 7, "b": 1}, {"a": "3f9a1c000002"})
    assert identities_of({"a": 7}) == {}


def test_events_are_called_events() -> None:
    with pytest.raises(DataLost, match="events 3 to 4"):
        kept_position(options(view="events"), "a", 3, Extent(5, 10))


# --- trying again ----------------------------------------------------------------------------------


def test_patience_grows_its_pauses_and_ends() -> None:
    now = 0.0
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    patience = Patience(7, clock=lambda: now, sleep=sleep)
    error = Interrupted("http://x: no broker answers there (Connection refused)")
    with pytest.raises(Unreachable) as ending:
        _fail_again_and_again(patience, error)
    assert pauses[:5] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6])
    assert max(pauses) == pytest.approx(2)
    assert sum(pauses) == pytest.approx(7)
    assert str(ending.value).startswith(
        "http://x: no broker answers there (Connection refused); tried for 7 s"
    )
    patience.succeeded()
    patience.failed(error)
    assert pauses[-1] == pytest.approx(0.1)
    for answer, seconds in ((error, 3), (NoLeader("http://x: no answer from b"), 7)):
        pauses.clear()
        hasty = Patience(7, clock=lambda: now, sleep=sleep, contact_seconds=3)
        with pytest.raises(Unreachable, match=f"tried for {seconds} s"):
            _fail_again_and_again(hasty, answer)
        assert sum(pauses) == pytest.approx(seconds)


def _fail_again_and_again(patience: Patience, error: Interrupted) -> None:
    for _ in range(100):
        patience.failed(error)
