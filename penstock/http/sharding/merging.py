"""Merging: one answer of the API, put together from what several logs say to the same request.

Each function gets the answers, none of which says no, as JSON objects, with the query. What is about one
thing is never in two logs: a queue has one. So lists are put one behind the other, and are in order again.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from penstock.common.health import LEVELS

Fields = dict[str, Any]  # JSON
Query = Mapping[str, str]
Merge = Callable[[Sequence[Fields], Query], Fields]

LIMIT: Final = 1000
"""What `limit` is where it is not said, and the most that it can be."""


def paged(name: str) -> Merge:
    """Rows by name, a page of each: the first of all of them."""

    def merge(answers: Sequence[Fields], query: Query) -> Fields:
        rows = sorted((row for it in answers for row in it[name]), key=lambda row: row["name"])
        limit = int(query.get("limit", LIMIT))
        # A page may be short: what is behind the first that ends is not all known.
        end: str | None = min((it["next"] for it in answers if it["next"] is not None), default=None)
        rows = [row for row in rows if end is None or row["name"] <= end]
        if len(rows) > limit:
            end = rows[limit - 1]["name"]
        return {name: rows[:limit], "next": end}

    return merge


def put_together(name: str) -> Merge:
    def merge(answers: Sequence[Fields], query: Query) -> Fields:
        return {name: [row for it in answers for row in it[name]]}

    return merge


def by_time(name: str) -> Merge:
    def merge(answers: Sequence[Fields], query: Query) -> Fields:
        rows = sorted((row for it in answers for row in it[name]), key=lambda row: str(row["time"]))
        return {**answers[0], name: rows}

    return merge


def audit(answers: Mapping[str, Fields], query: Query) -> Fields:
    """By front-end: lines by time. Where one has more behind what it tells, nothing later is told of any."""
    lines = [{**line, "front_end": name} for name, it in answers.items() for line in it["lines"]]
    lines.sort(key=lambda line: str(line["time"]))
    if "last" in query:
        return {"lines": lines[-int(query["last"]) :], "next": None}
    more = min((it["next"] for it in answers.values() if it["next"] is not None), default=None)
    lines = [line for line in lines if more is None or line["time"] < more]
    limit = int(query.get("limit", LIMIT))
    if len(lines) > limit:  # Those of one moment stay together.
        last = lines[limit - 1]["time"]
        more = next((line["time"] for line in lines[limit:] if line["time"] != last), more)
        lines = [line for line in lines if more is None or line["time"] < more]
    return {"lines": lines, "next": more}


def labelled(text: bytes, name: str) -> bytes:
    """Metrics of a front-end, each sample with its name."""
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    label = f'front_end="{quoted}"'
    lines = []
    for line in text.decode().splitlines():
        if line and not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            base, brace, labels = sample.partition("{")
            line = f"{base}{{{label},{labels} {value}" if brace else f"{base}{{{label}}} {value}"
        lines.append(line)
    return "\n".join(lines).encode()


def readers(answers: Sequence[Fields], query: Query) -> Fields:
    found: dict[str, Fields] = {}
    for reader in (row for it in answers for row in it["readers"]):
        name = reader["name"]
        found[name] = reader_of([found[name], reader]) if name in found else reader
    return {"readers": sorted(found.values(), key=lambda it: str(it["name"]))}


def reader_of(parts: Sequence[Fields]) -> Fields:
    """One reader, of which several logs have some queues each."""
    last = max(parts, key=lambda it: float(it["lease_seconds_left"]))
    said = [it["about"] for it in parts if it["about"] is not None]
    moved = [it["moved_seconds"] for it in parts if it["moved_seconds"] is not None]
    return {
        **last,
        "moved_seconds": min(moved, default=None),
        "moved": sum(it["moved"] or 0 for it in parts) if moved else None,
        "about": max(said, key=lambda it: str(it["at"]), default=None),
        "wish": next((it["wish"] for it in parts if it["wish"] is not None), None),
        "hidden": sum(it["hidden"] for it in parts),
        "queues": [queue for it in parts for queue in it["queues"]],
    }


def health(answers: Sequence[Fields], query: Query) -> Fields:
    rows = [row for it in answers for row in it["attention"]]
    # What is about the broker itself is said by each of its logs.
    once = {(it["state"], it["queue"], it["reader"]): it for it in reversed(rows)}
    found = sorted(once.values(), key=lambda it: (LEVELS.index(it["level"]), str(it["since"])))
    levels = [it["level"] for it in found]
    return {
        "attention": found[: int(query.get("limit", LIMIT))],
        "level": next((level for level in LEVELS if level in levels), "ok"),
        "bad": levels.count("bad"),
        "warn": levels.count("warn"),
        "looked": min((it["looked"] for it in answers if it["looked"] is not None), default=None),
    }


def engine(answers: Sequence[Fields], query: Query) -> Fields:
    """That of the front-end that was asked, of all of its logs."""
    first = answers[0]
    worst = min(answers, key=lambda it: int(it["disk_bytes_free"]))
    return {
        **first,
        **{name: worst[name] for name in ("disk_bytes_free", "disk_bytes_total", "disk_room_in")},
        "full": any(it["full"] for it in answers),
        "failed": next((it["failed"] for it in answers if it["failed"]), None),
        "damage": [text for it in answers for text in it["damage"]],
        "bytes_in_flight": sum(it["bytes_in_flight"] for it in answers),
    }


def summed(name: str) -> Merge:
    """A list, and what it adds up to."""

    def merge(answers: Sequence[Fields], query: Query) -> Fields:
        merged = {name: [row for it in answers for row in it[name]]}
        for field, value in answers[0].items():
            if field != name:
                numbers = [it[field] for it in answers]
                counts = isinstance(value, int | float) and not isinstance(value, bool)
                merged[field] = sum(numbers) if counts else value
        return merged

    return merge


def samples(answers: Sequence[Fields], query: Query) -> Fields:
    """Step by step: what is counted adds up, of times the longest is told."""
    found: dict[str, list[Fields]] = {}
    for row in (row for it in answers for row in it["samples"]):
        found.setdefault(row["time"], []).append(row)
    rows = [_step(found[time]) if len(found[time]) > 1 else found[time][0] for time in sorted(found)]
    return {**answers[0], "samples": rows}


def _step(rows: Sequence[Fields]) -> Fields:
    merged: Fields = {}
    for name in rows[0]:
        values = [row[name] for row in rows if row.get(name) is not None]
        if not values:
            merged[name] = None
        elif isinstance(values[0], dict):
            merged[name] = _step(values)
        elif isinstance(values[0], int | float) and not isinstance(values[0], bool):
            merged[name] = max(values) if name.endswith("seconds") else sum(values)
        else:
            merged[name] = values[0]
    return merged


def archive(answers: Sequence[Fields], query: Query) -> Fields:
    """The tables are those of all logs."""
    tables: dict[str, Fields] = {}
    for row in (row for it in answers for row in it["tables"]):
        known = tables.setdefault(row["view"], {**row, "rows": 0})
        known["rows"] += row["rows"]
        known["version"] = max(known["version"], row["version"])
        known["committed"] = max(filter(None, (known["committed"], row["committed"])), default=None)
    return {
        **answers[0],
        "error": "; ".join(dict.fromkeys(it["error"] for it in answers if it["error"])) or None,
        "starts": max(it["starts"] for it in answers),
        "gaps": [text for it in answers for text in it["gaps"]],
        "tables": list(tables.values()),
        "queues": sorted(
            (row for it in answers for row in it["queues"]),
            key=lambda row: (row["view"] != "messages", row["queue"]),
        ),
    }


MERGED: Final[Mapping[tuple[str, str], Merge]] = {
    ("GET", "/v1/queues"): paged("queues"),
    ("GET", "/v1/offsets"): paged("queues"),
    ("GET", "/v1/readers"): readers,
    ("GET", "/v1/health"): health,
    ("GET", "/v1/archive"): archive,
    ("GET", "/v1/marks"): by_time("marks"),
    ("GET", "/v1/samples"): samples,
    ("POST", "/v1/redrive"): summed("queues"),
}
"""What is asked of all logs, wherever they are led."""
