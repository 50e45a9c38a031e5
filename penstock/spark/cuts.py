"""Cuts: ranges of messages by their bytes, which the broker knows. What it tells is a hint, and no more.

Rules that always hold:
  * Pieces cover the ranges exactly, in order, whatever the broker says: one that is of an earlier version, or
    does not have a queue any more, makes pieces that nobody has weighed.
  * Many ranges are one request.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from penstock.spark.api import Broker, Refused
from penstock.spark.splits import Range, shares

RANGES_MAX: Final = 1000
"""What the broker takes at a time."""

PIECES_MAX: Final = 1000
"""Of a range in one answer."""


def cut(broker: Broker, ranges: Sequence[Range], bytes_max: int) -> list[Range]:
    """The same ranges in pieces of so many bytes, or of one message, with the bytes of each."""
    pieces: list[list[Range]] = [[] for _ in ranges]
    left = [number for number, whole in enumerate(ranges) if whole.size > 0]
    rest = list(ranges)
    while left:
        portion, found = left[:RANGES_MAX], False
        answers = _ask(broker, [(rest[number], bytes_max) for number in portion], PIECES_MAX)
        for number, piece_ends in zip(portion, answers, strict=True):
            for piece in _within(rest[number], piece_ends):
                pieces[number].append(piece)
                rest[number] = rest[number]._replace(start=piece.end)
                found = True
        if not found:
            for number in portion:
                pieces[number].append(rest[number])
                rest[number] = rest[number]._replace(start=rest[number].end)
        left = [number for number in left if rest[number].size > 0]
    return [piece for those in pieces for piece in those]


def within_bytes(broker: Broker, ranges: Sequence[Range], bytes_max: int) -> dict[str, int]:
    """How many messages of each of some queues are so many bytes together: shared by what waits in each."""
    counts = {whole.queue: whole.size for whole in ranges}
    weights: dict[str, int] = {}
    for piece in cut(broker, ranges, bytes_max):
        weights[piece.queue] = weights.get(piece.queue, 0) + piece.bytes
    if sum(weights.values()) <= bytes_max:
        return counts
    given = shares(weights, bytes_max)
    limited = [(whole, given[whole.queue]) for whole in ranges if whole.queue in given]
    for at in range(0, len(limited), RANGES_MAX):
        portion = limited[at : at + RANGES_MAX]
        for (whole, _), piece_ends in zip(portion, _ask(broker, portion, 1), strict=True):
            for piece in _within(whole, piece_ends):
                counts[whole.queue] = piece.size
    return counts


def _ask(broker: Broker, ranges: Sequence[tuple[Range, int]], most: int) -> list[list[tuple[int, int]]]:
    """For each range ends and bytes of its first pieces of so many bytes."""
    wanted = [
        {"queue": whole.queue, "start": whole.start, "end": whole.end, "bytes": bytes_max}
        for whole, bytes_max in ranges
    ]
    try:
        answer = broker.post("cuts", fields={"ranges": wanted, "most": most})
    except Refused as error:
        if error.status != 404:
            raise
        return [[] for _ in ranges]  # It does not know the call.
    return [list(zip(row["ends"], row["bytes"], strict=True)) for row in answer["ranges"]]


def _within(whole: Range, piece_ends: Sequence[tuple[int, int]]) -> Iterator[Range]:
    at = whole.start
    for end, payload_bytes in piece_ends:
        if at < end <= whole.end:
            yield whole._replace(start=at, end=end, bytes=payload_bytes)
            at = end
