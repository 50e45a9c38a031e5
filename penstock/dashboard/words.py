"""Numbers as people read them. `assets/words.js` says the same in the browser."""

from datetime import UTC, datetime

from penstock.common.tables import size as size  # 1234 is 1.2 KiB


def count(value: float) -> str:
    """1234567 is 1,234,567."""
    return f"{value:,.0f}"


def rate(value: float) -> str:
    """Per second: one digit behind the point where that says something."""
    if 0 < value < 0.05:
        return "<0.1"
    return f"{value:.1f}" if 0 < value < 9.95 else count(value)


def age(seconds: float | None) -> str:
    """How long ago, or how long: 45 s, 12 min, 3 h 5 min, 2 d 4 h."""
    if seconds is None:
        return "–"
    if seconds < 0.95:
        return "<1 s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    hours, days = minutes // 60, minutes // 1440
    if hours < 1:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes % 60} min" if minutes % 60 else f"{hours} h"
    return f"{days} d {hours % 24} h" if hours % 24 and days < 10 else f"{days} d"


def moment(epoch_seconds: float) -> str:
    """A time for people and programs alike: 2026-11-15 14:03:07 UTC."""
    return datetime.fromtimestamp(epoch_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
