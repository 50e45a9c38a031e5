"""Words: numbers and times as people read them. Everything here is plain text, nothing is HTML."""

import html
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Final

NOTHING: Final = "–"

_SMALL: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_LARGE: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_POWERS: Final = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"))


def count(number: float | None) -> str:
    return NOTHING if number is None else f"{number:,.0f}"


def counted(number: int, what: str, many: str = "") -> str:
    """`1 message`, `2,000 messages`."""
    return f"{number:,} {what if number == 1 else many or what + 's'}"


def signed(number: int) -> str:
    return f"+{number:,}" if number > 0 else f"{number:,}".replace("-", "−")


def short(number: float) -> str:
    """Few digits, for an axis."""
    for power, unit in _POWERS:
        if abs(number) >= power:
            return _three(number / power) + unit
    return _three(number)


def rate(per_second: float) -> str:
    return f"{short(per_second)}/s"


def percent(part: float, whole: float) -> str:
    if not whole:
        return NOTHING
    share = 100 * part / whole
    if 0 < share < 0.1:
        return "< 0.1 %"
    return f"{share:.1f}".removesuffix(".0") + " %" if share < 10 else f"{share:.0f} %"


def seconds(took: float | None) -> str:
    """How long something took: three digits, or its two largest units."""
    if took is None:
        return NOTHING
    if took >= 59.95:
        return _two_units(round(took))
    for unit, name in _SMALL:
        if took >= unit * 0.9995:
            return f"{_three(took / unit)} {name}"
    return f"{_three(took * 1e6)} µs" if took else "0 s"


def _two_units(whole: int) -> str:
    parts: list[str] = []
    for length, unit in _LARGE:
        number, whole = divmod(whole, length)
        if number or parts:
            parts.append(f"{number} {unit}")
    return " ".join(part for part in parts[:2] if not part.startswith("0 "))


def _three(number: float) -> str:
    """At most three digits that count."""
    digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2
    text = f"{number:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def moment(time: datetime | None) -> str:
    """To the second."""
    return NOTHING if time is None else f"{time.day} {time:%b %Y, %H:%M:%S}"


def clock(time: datetime, bucket_seconds: float) -> str:
    """As exact as buckets of that length make sense."""
    if bucket_seconds < 60:
        return f"{time:%H:%M:%S}"
    return f"{time:%H:%M}" if bucket_seconds < 86_400 else f"{time.day} {time:%b}"


def listed(parts: Mapping[str, int]) -> str:
    """`25 rejected, 3 expired`, the most frequent first."""
    found = sorted(
        ((number, name) for name, number in parts.items() if number), key=lambda it: (-it[0], it[1])
    )
    return ", ".join(f"{number:,} {name}" for number, name in found)


_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]"
)
"""Characters that are not seen, and change how others are."""


def escape(text: str) -> str:
    """A text as HTML. A name of a queue may have anything in it: what is not seen is written out."""
    return html.escape(_UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text))
