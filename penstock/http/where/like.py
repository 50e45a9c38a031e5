"""The patterns of `like`: `%` is any characters, also none; `_` is one; behind a backslash, only itself.

A pattern is split at its `%` into pieces. The first must begin the text, the last must end it, and each of
the others is looked for once, behind the one before: the leftmost place is always good enough, because it
leaves most room, and nothing is tried twice. A piece with `_` in it is a regular expression of single
characters; there is no repetition in it that could be matched in two ways. To look for it may take the length
of the text times that of the piece, while no other thread runs. Where that is much, the text is gone through
character by character, with a bit for each place in the piece that may have been reached: 0.2 µs for each,
whatever the piece is, and others have their turns.

How it fails: `TooLong`, where a text is not judged by a given time. A condition may have hundreds of
patterns, and each of them a text of many megabytes.
"""

import re
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from penstock.errors import PenstockError

_PART: Final = re.compile(r"\\(?P<literal>[%_\\])|(?P<wild>[%_])|(?P<plain>[^%_\\]+)", re.DOTALL)
QUICK_MAX: Final = 2_000_000
"""Characters of a text times those of a piece: about 10 ms at most."""

CHUNK_CHARACTERS: Final = 1 << 16
"""Gone through before somebody looks at the clock: about 15 ms."""

_ONE: Final = None
"""What stands for `_` in a piece."""


class TooLong(PenstockError):
    """The time is over."""


class _Piece(NamedTuple):
    """What stands between two `%`: functions of a text and a place in it."""

    characters: int
    is_at: Callable[[str, int], object]  # true where the piece begins at that place
    find: Callable[[str, int, float], int]  # the first place from there on, by that time; -1: none


def matcher(pattern: str) -> Callable[[str, float], bool]:
    """Whether a whole text matches `pattern`, whose backslashes are known to be in order; found out by a
    moment of the monotonic clock."""
    first, *others = map(_piece, _split(pattern))
    if not others:
        return lambda text, _until: len(text) == first.characters and bool(first.is_at(text, 0))
    *middle, last = others
    characters_min = first.characters + sum(piece.characters for piece in others)

    def matches(text: str, until: float) -> bool:
        if len(text) < characters_min or not first.is_at(text, 0):
            return False
        at = first.characters
        for piece in middle:
            if time.monotonic() > until:
                raise TooLong
            at = piece.find(text, at, until)
            if at < 0:
                return False
            at += piece.characters
        end = len(text) - last.characters
        return end >= at and bool(last.is_at(text, end))

    return matches


def _split(pattern: str) -> list[list[str | None]]:
    """The pieces of a pattern, character by character."""
    pieces: list[list[str | None]] = [[]]
    for part in _PART.finditer(pattern):
        if part["wild"] == "%":
            pieces.append([])
        elif part["wild"]:
            pieces[-1].append(_ONE)
        else:
            pieces[-1].extend(part["literal"] or part["plain"])
    return pieces


def _piece(characters: list[str | None]) -> _Piece:
    if _ONE not in characters:
        text = "".join(filter(None, characters))
        return _Piece(
            len(text),
            lambda whole, at: whole.startswith(text, at),
            lambda whole, at, _until: whole.find(text, at),
        )
    expression = re.compile("".join("." if c is _ONE else re.escape(c) for c in characters), re.DOTALL)

    def find(whole: str, at: int, until: float) -> int:
        if (len(whole) - at) * len(characters) > QUICK_MAX:
            return _find_slowly(characters, whole, at, until)
        found = expression.search(whole, at)
        return found.start() if found else -1

    return _Piece(len(characters), expression.match, find)


def _find_slowly(characters: list[str | None], whole: str, at: int, until: float) -> int:
    any_character = sum(1 << place for place, c in enumerate(characters) if c is _ONE)
    places: dict[str, int] = {}
    for place, c in enumerate(characters):
        if c is not _ONE:
            places[c] = places.get(c, any_character) | 1 << place
    reached, last = 0, 1 << len(characters) - 1
    for chunk in range(at, len(whole), CHUNK_CHARACTERS):
        if time.monotonic() > until:
            raise TooLong
        for end, c in enumerate(whole[chunk : chunk + CHUNK_CHARACTERS], chunk + 1):
            reached = (reached << 1 | 1) & places.get(c, any_character)
            if reached & last:
                return end - len(characters)
    return -1
