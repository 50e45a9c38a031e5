"""Answers of several logs, put together."""

import string
from typing import Any

from penstock.http.sharding import merging

DELETED = {"b", "d", "w"}  # while their log lists them


def page(names: str, after: str, limit: int) -> dict[str, Any]:
    """As a log answers: what was deleted meanwhile is left out, and the page is short."""
    left = [name for name in names if name > after]
    rows = [{"name": name} for name in left[:limit] if name not in DELETED]
    return {"queues": rows, "next": left[limit - 1] if len(left) > limit else None}


def test_nothing_is_left_out_of_a_list_whose_pages_are_short() -> None:
    logs = (string.ascii_lowercase[:8], string.ascii_lowercase[8:22], string.ascii_lowercase[22:])
    for limit in range(1, 12):
        found: list[str] = []
        after: str | None = ""
        while after is not None:
            answers = [page(names, after, limit) for names in logs]
            merged = merging.paged("queues")(answers, {"limit": str(limit)})
            assert len(merged["queues"]) <= limit
            assert merged["next"] is None or merged["next"] > after
            found += [row["name"] for row in merged["queues"]]
            after = merged["next"]
        assert found == [name for name in string.ascii_lowercase if name not in DELETED], limit
