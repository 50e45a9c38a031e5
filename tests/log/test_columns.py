"""Columns are cut where one by one would cut them, and each piece is a batch of its own."""

import random
from array import array

import pytest

from penstock.log.block import Columns
from penstock.log.columns import split_columns


def drawn(chance: random.Random) -> Columns:
    sizes = [chance.choice([0, 0, 1, 7, 100, 3000]) for _ in range(chance.randint(1, 400))]
    bounds = array("i", [0])
    for size in sizes:
        bounds.append(bounds[-1] + size)
    count = len(sizes)
    return Columns(
        bounds,
        chance.randbytes(bounds[-1]),
        array("q", range(count)) if chance.random() < 0.5 else None,
        array("h", range(count)) if chance.random() < 0.5 else None,
        [b"r%d" % number for number in range(count)] if chance.random() < 0.3 else None,
    )


def one_by_one(columns: Columns, block_bytes: int) -> list[int]:
    """How many messages each piece has."""
    each = 4 + 8 * (columns.expires is not None) + 2 * (columns.retries is not None)
    if columns.reply is not None:
        each += 4 + sum(map(len, columns.reply)) // len(columns)
    sizes = [columns.bounds[i + 1] - columns.bounds[i] + each for i in range(len(columns))]
    if sum(sizes) <= 2 * block_bytes:
        return [len(sizes)]
    counts, room = [0], block_bytes
    for size in sizes:
        if counts[-1] and size > room:
            counts.append(0)
            room = block_bytes
        counts[-1] += 1
        room -= size
    return counts


@pytest.mark.parametrize("seed", range(200))
def test_pieces(seed: int) -> None:
    chance = random.Random(seed)
    columns, block_bytes = drawn(chance), chance.choice([1, 50, 1000, 20_000])
    pieces = list(split_columns(columns, block_bytes))
    assert [len(piece) for piece in pieces] == one_by_one(columns, block_bytes)
    at = 0
    for piece in pieces:
        end = at + len(piece)
        start = columns.bounds[at]
        assert list(piece.bounds) == [bound - start for bound in columns.bounds[at : end + 1]]
        assert piece.payload == columns.payload[start : columns.bounds[end]]
        for name in ("expires", "retries", "reply"):
            whole, part = getattr(columns, name), getattr(piece, name)
            assert (part is None) == (whole is None)
            assert part is None or list(part) == list(whole[at:end])
        at = end
    assert at == len(columns)
