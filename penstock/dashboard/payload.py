"""Payload: the bytes of a message as people look at them: a line, text, JSON, hexadecimal digits.

Rules that always hold:
  * What is returned prints: control characters, and those that change the direction of text or have no
    width, are shown as escapes (`\\x1b`, `\\u202e`). Nothing that a message holds can hide or disguise.
  * What is returned is bounded. What was left out is said beside it, not in it.
  * JSON is told as it is, and laid out in the browser (`assets/payload.js`), token by token: numbers, escapes
    and fields that are there twice stay as they are.
"""

import json
from base64 import b64decode
from dataclasses import dataclass
from typing import Final

from penstock.common.text import printable

PREVIEW_BYTES: Final = 240
TEXT_CHARACTERS_MAX: Final = 64 * 1024
JSON_BYTES_MAX: Final = 2 << 20
"""What is parsed, and goes to the browser, to be laid out."""

HEX_BYTES_MAX: Final = 8 * 1024
HEX_ROW: Final = 16


@dataclass(frozen=True, slots=True)
class Shown:
    """A payload in one of its forms."""

    text: str
    note: str = ""  # what is left out or different, in a sentence; empty: nothing


def size_of(base64: str) -> int:
    """How many bytes a text of base64 stands for."""
    return len(base64) // 4 * 3 - base64[-2:].count("=")


def preview(base64: str) -> str:
    """The beginning, in one line."""
    return line_of(b64decode(base64[: PREVIEW_BYTES // 3 * 4]), size_of(base64))


def line_of(beginning: bytes, size: int) -> str:
    """The beginning of a payload of that size, in one line."""
    beginning = beginning[:PREVIEW_BYTES]
    rest = size - len(beginning)
    text = _decoded(beginning, is_whole=rest == 0)
    line = "0x" + beginning[: PREVIEW_BYTES // 4].hex() if text is None else printable(" ".join(text.split()))
    return line + "…" if rest else line


def as_text(value: bytes) -> Shown | None:
    """None where it is no UTF-8."""
    text = _decoded(value)
    return None if text is None else _shown(text)


def as_json(value: bytes) -> Shown | None:
    """As it is, and known to be right. None where it is no JSON, or only a word of it, or too much."""
    if len(value) > JSON_BYTES_MAX or value.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        text = value.decode()
        json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _escaped(text.replace("\r", " "))  # which is only between tokens


def as_hex(value: bytes) -> Shown:
    """Rows of offset, bytes, and the characters that they are in ASCII."""
    rows = []
    for at in range(0, min(len(value), HEX_BYTES_MAX), HEX_ROW):
        part = value[at : at + HEX_ROW]
        digits = f"{part[:8].hex(' ')}  {part[8:].hex(' ')}".ljust(3 * HEX_ROW)
        letters = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in part)
        rows.append(f"{at:08x}  {digits}  {letters}")
    left = len(value) - HEX_BYTES_MAX
    note = f"The first {HEX_BYTES_MAX:,} of {len(value):,} bytes. Download it to see all." if left > 0 else ""
    return Shown("\n".join(rows), note)


def _decoded(value: bytes, *, is_whole: bool = True) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        if not is_whole and error.start >= len(value) - 3:
            return value[: error.start].decode()  # a character that was cut in two
        return None


def _shown(text: str) -> Shown:
    cut = ""
    if len(text) > TEXT_CHARACTERS_MAX:
        cut = f"The first {TEXT_CHARACTERS_MAX:,} of {len(text):,} characters. Download it to see all."
        text = text[:TEXT_CHARACTERS_MAX]
    shown = _escaped(text.replace("\r\n", "\n"), was=text)
    return Shown(shown.text, " ".join(filter(None, (cut, shown.note))))


def _escaped(text: str, was: str | None = None) -> Shown:
    """Nothing in it but what prints, and what sets lines and columns off."""
    safe = "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
    note = "What does not print is shown as an escape, or as a plain line break; see Hex."
    return Shown(safe, note if safe != (text if was is None else was) else "")
