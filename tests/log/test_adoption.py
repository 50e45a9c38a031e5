"""Adoption blocks: layout, and how offsets find their rows."""

from array import array

import pytest

from penstock.log.adoption import Adoption, Run, adopted, adoption_parts, read_adoption
from penstock.log.block import FLAG_ELSEWHERE, FLAG_EXPIRES, KIND_MESSAGES, Header, Messages


def header(first: int, count: int, *, flags: int = 0, time_us: int = 0, body_bytes: int = 0) -> Header:
    return Header(
        KIND_MESSAGES, flags, 4, 9, count, 3, 0, first, first + 100, count, body_bytes, time_us, 0, 0, 0, 0
    )


RUNS = [Run(40, 3, 30, 0), Run(50, 2, 20, 7_000)]


def test_what_is_written_is_read_again() -> None:
    body = b"".join(adoption_parts(RUNS))
    assert len(body) == 32 * len(RUNS)
    block = read_adoption(header(7, 5, flags=FLAG_ELSEWHERE, body_bytes=len(body)), memoryview(body))
    assert block.runs == RUNS
    assert [block.row_at(offset) for offset in range(7, 12)] == [
        (40, 43),
        (41, 43),
        (42, 43),
        (50, 52),
        (51, 52),
    ]


def test_runs_that_do_not_fit_their_header_are_told() -> None:
    body = b"".join(adoption_parts(RUNS))
    with pytest.raises(ValueError, match="have 5 rows"):
        read_adoption(header(7, 6, flags=FLAG_ELSEWHERE, body_bytes=len(body)), memoryview(body))


def test_offsets_are_cut_at_the_edges() -> None:
    block = Adoption(header(7, 5), RUNS)
    assert list(block.within(0, 99)) == [(7, 40, 43), (10, 50, 52)]
    assert list(block.within(8, 11)) == [(8, 41, 43), (10, 50, 51)]
    assert list(block.within(9, 10)) == [(9, 42, 43)]
    assert not list(block.within(12, 99))


def test_a_message_is_the_row_with_the_time_and_number_of_its_commit() -> None:
    stage = Messages(
        header(38, 4, flags=FLAG_EXPIRES, time_us=1_000),
        array("i", [0, 1, 3, 6, 10]),
        b"abbcccdddd",
        array("q", [1_500, 0, 2_000, 3_000]),
        array("h", [1, 2, 3, 4]),
        None,
    )
    block = Adoption(header(7, 5, time_us=11_000), RUNS)
    found = adopted(block, stage, 8)  # row 41, the last that this stage block has; row 40 is of this run, too
    assert (found.header.first_offset, found.header.count, found.header.first_event) == (7, 2, 107)
    assert found.payload[found.bounds[0] : found.bounds[1]] == b"ccc"
    assert found.payload[found.bounds[1] : found.bounds[2]] == b"dddd"
    assert (found.header.time_us, found.header.queue, found.header.opening) == (11_000, 9, 3)
    assert found.expires is not None
    assert found.retries is not None
    assert (list(found.expires), list(found.retries)) == ([12_000, 13_000], [3, 4])
