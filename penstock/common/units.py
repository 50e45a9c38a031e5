"""Units: numbers, sizes, times and ages as people read them, on terminals, pages and reports alike.

Everything here is plain text. `dashboard/assets/words.js` writes counts, rates, ages and sizes the same way
in the browser; a test compares the two. What is not known is `NOTHING`; tables of a terminal have a sign of
their own for it, which every encoding has.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

NOTHING: Final = "–"

_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_POWERS: Final = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"))
_SHORT_TIMES: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_LONG_TIMES: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


# --- numbers -----------------------------------------------------------------------------------------------


def count(number: float | None) -> str:
    """1234567 is 1,234,567."""
    return NOTHING if number is None else f"{number:,.0f}"


def counted(number: int, what: str, many: str = "") -> str:
    """`1 message`, `2,000 messages`."""
    return f"{number:,} {what if number == 1 else many or what + 's'}"


def listed(parts: Mapping[str, int]) -> str:
    """`25 rejected, 3 expired`, the most frequent first."""
    found = sorted(
        ((number, name) for name, number in parts.items() if number), key=lambda it: (-it[0], it[1])
    )
    return ", ".join(f"{number:,} {name}" for number, name in found)


def signed(number: int) -> str:
    return f"+{number:,}" if number > 0 else f"{number:,}".replace("-", "−")


def short(number: float) -> str:
    """Three digits that count, and a unit: 1234567 is 1.23 M."""
    for power, unit in _POWERS:
        if abs(number) >= power:
            return _three(number / power) + unit
    return _three(number)


def rate(per_second: float) -> str:
    """One digit behind the point where that says something."""
    if 0 < per_second < 0.05:
        return "<0.1"
    return f"{per_second:.1f}" if 0 < per_second < 9.95 else count(per_second)


def percent(part: float, whole: float) -> str:
    if not whole:
        return NOTHING
    share = 100 * part / whole
    if 0 < share < 0.1:
        return "< 0.1 %"
    return f"{share:.1f}".removesuffix(".0") + " %" if share < 10 else f"{share:.0f} %"


def size(count_bytes: float) -> str:
    """Bytes in the unit that suits them: 1234 is 1.2 KiB."""
    for unit in _BYTE_UNITS:
        if count_bytes < 1024 or unit == _BYTE_UNITS[-1]:
            break
        count_bytes /= 1024
    return f"{count_bytes:.0f} {unit}" if unit == "B" or count_bytes >= 100 else f"{count_bytes:.1f} {unit}"


def _three(number: float) -> str:
    """At most three digits that count."""
    digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2
    text = f"{number:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


# --- times -------------------------------------------------------------------------------------------------


def duration(seconds: float | None) -> str:
    """How long something took: three digits that count, or its two largest units."""
    if seconds is None:
        return NOTHING
    if seconds < 59.95:
        for unit, name in _SHORT_TIMES:
            if seconds >= unit * 0.9995:
                return f"{_three(seconds / unit)} {name}"
        return f"{_three(seconds * 1e6)} µs" if seconds > 0 else "0 s"
    whole = round(seconds)
    parts: list[str] = []
    for length, name in _LONG_TIMES:
        number, whole = divmod(whole, length)
        if number or parts:
            parts.append(f"{number} {name}")
    return " ".join(part for part in parts[:2] if not part.startswith("0 "))


def age(seconds: float | None) -> str:
    """How long ago, where that goes on: 45 s, 12 min, 3 h 5 min, 23 h. No finer than it is of use."""
    if seconds is None:
        return NOTHING
    if seconds < 0.95:
        return "<1 s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    length, unit, part, part_unit = (60, "h", 1, "min") if minutes < 1440 else (1440, "d", 60, "h")
    number, rest = minutes // length, minutes % length // part
    return f"{number} {unit} {rest} {part_unit}" if rest and number < 10 else f"{number} {unit}"


def since(time: str, now: datetime | None = None) -> str:
    """The age of what has happened at a time of the API's."""
    return age(((now or datetime.now(UTC)) - datetime.fromisoformat(time)).total_seconds())


def moment(time: datetime | None) -> str:
    """To the second: 2026-11-15 14:03:07."""
    return NOTHING if time is None else f"{time:%Y-%m-%d %H:%M:%S}"
