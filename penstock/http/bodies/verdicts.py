"""Verdicts: the body of a settlement, to the columns that travel.

    {"ack": [id…], "requeue": [id…], "reject": [id…], "extend": [{"id", "lease"}…]}

In place of an id may stand an object with `id`, and where wanted `attempts`: which delivery is meant. Beside
it stand `delay` (seconds) of a requeue, `reason` of a rejection and `lease` (seconds) of an extension.

Ids with nothing but `attempts` beside them, as nearly all are, are checked together and cut apart in one go:
100 in 30 µs. Where there is more, or something is wrong, entries are looked at one by one, which finds the
one to blame.

How it fails: a `Problem` that names the list, the entry in it, counted from 0, and what would be right. Then
nothing is settled.
"""

import re
import sys
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from penstock.control.takes import Verdict
from penstock.http import kinds, schema
from penstock.http.bodies.parts import DELAY
from penstock.http.kinds import WrongValue
from penstock.http.problems import Problem
from penstock.http.schema import Schema
from penstock.model.ids import ID_DIGITS, OFFSET_MAX, ORIGIN_DIGITS
from penstock.model.timers import SECOND_US

IDS_MAX: Final = 10_000
"""Of one settlement."""

REASON_BYTES_MAX: Final = 1000

OUTCOMES: Final = ("ack", "requeue", "reject", "extend")
"""What can become of a message that is held."""


class _Reason(kinds.Kind):
    """A text; what it is about is the sender's business."""

    def check(self, value: object) -> object:
        with suppress(UnicodeEncodeError):  # half of a surrogate pair
            if isinstance(value, str) and len(value.encode()) <= REASON_BYTES_MAX:
                return value
        raise self.refuse()

    def wanted(self) -> str:
        return f"a text of at most {REASON_BYTES_MAX} bytes"

    def schema(self) -> Schema:
        return {"type": "string", "maxLength": REASON_BYTES_MAX}


class _Option(NamedTuple):
    """What can be said beside an id."""

    name: str
    kind: kinds.Kind
    column: str  # of `Verdict`
    help: str = ""


_ATTEMPTS: Final = kinds.Whole(1, 2**31 - 1)
_NONE: Final = _Option("", DELAY, "")
_DELAY: Final = _Option("delay", DELAY, "delay_us", "Seconds; null: as retry-delays of the queue say.")
_REASON: Final = _Option("reason", _Reason(), "why", "What is shown with the dead letter.")

_are_digits: Final = re.compile("[0-9a-f]*").fullmatch
_is_id: Final = re.compile(f"[0-9a-f]{{{ID_DIGITS}}}").fullmatch


def _options(lease: kinds.Seconds) -> Mapping[str, _Option]:
    return dict(zip(OUTCOMES, (_NONE, _DELAY, _REASON, _Option("lease", lease, "lease_us")), strict=True))


def read_verdicts(given: object, lease: kinds.Seconds) -> list[Verdict]:
    """What the body of a settlement says. `lease`: how long one can be."""
    if type(given) is not dict or not given.keys() <= set(OUTCOMES):
        raise Problem("bad-request", f"the body is an object with lists of ids: {', '.join(OUTCOMES)}")
    verdicts: list[Verdict] = []
    named: list[str] = []
    for outcome, option in _options(lease).items():
        entries = given.get(outcome)
        if entries is None:
            continue
        if type(entries) is not list:
            raise Problem("bad-request", f"{outcome!r} is no list; send a list of ids")
        if len(named) + len(entries) > IDS_MAX:
            raise Problem("bad-request", f"more than {IDS_MAX} ids; settle fewer at a time")
        plain = _plain(entries) if outcome != "extend" else None
        if plain is not None:
            verdicts += _cut(outcome, *plain)
            named += plain[0]
        else:
            verdicts += _each(outcome, entries, named, option)
    if len(set(named)) < len(named):
        ((twice, _),) = Counter(named).most_common(1)
        raise Problem("bad-request", f"id {twice} is named twice; say once what becomes of each message")
    return verdicts


def _plain(entries: list[Any]) -> tuple[list[str], list[int]] | None:
    """Ids, and which deliveries are meant, where entries have no more than that and nothing is wrong."""
    ids, attempts = entries, [0] * len(entries)
    try:
        if entries and type(entries[0]) is dict:
            ids, attempts = [entry["id"] for entry in entries], [entry["attempts"] for entry in entries]
            if {*map(len, entries)} != {2} or {*map(type, attempts)} != {int}:
                return None
            if not 0 < min(attempts) <= max(attempts) <= _ATTEMPTS.highest:
                return None
        are_ids = {ID_DIGITS}.issuperset(map(len, ids)) and _are_digits("".join(ids))
    except (KeyError, TypeError):
        return None
    return (ids, attempts) if are_ids else None


def _cut(outcome: str, ids: Sequence[str], attempts: Sequence[int]) -> list[Verdict]:
    # An id is two numbers of 64 bits; the offset is in the lower 56 of the second one.
    numbers = array("Q", bytes.fromhex("".join(ids)))
    if sys.byteorder == "little":
        numbers.byteswap()
    heads, tails = numbers[::2], numbers[1::2]
    low, high = min(tails, default=0), max(tails, default=0)
    if low >> 56 == high >> 56 and len(set(heads)) == 1:
        offsets = array("q", [tail & OFFSET_MAX for tail in tails])
        return [Verdict(outcome, ids[0][:ORIGIN_DIGITS].encode(), offsets, array("i", attempts))]
    found: dict[str, Verdict] = {}
    for it, tail, attempt in zip(ids, tails, attempts, strict=True):
        origin = it[:ORIGIN_DIGITS]
        if origin not in found:
            found[origin] = Verdict(outcome, origin.encode(), array("q"), array("i"))
        found[origin].offsets.append(tail & OFFSET_MAX)
        found[origin].attempts.append(attempt)
    return list(found.values())


def _each(outcome: str, entries: Sequence[Any], named: list[str], option: _Option) -> list[Verdict]:
    """Entries of any form, together where the same is said of them; their ids go to `named`."""
    found: dict[tuple[str, Any], Verdict] = {}
    for at, entry in enumerate(entries):
        try:
            it, attempts, said = _entry(entry, option)
        except WrongValue as error:
            raise Problem("bad-request", f"{outcome!r}, entry {at}: {error}") from None
        origin = it[:ORIGIN_DIGITS]
        verdict = found.get((origin, said))
        if verdict is None:
            verdict = found[origin, said] = Verdict(outcome, origin.encode(), array("q"), array("i"))
        verdict.offsets.append(int(it[ORIGIN_DIGITS:], 16))
        verdict.attempts.append(attempts)
        named.append(it)
    return [
        verdict if said is None else verdict._replace(**{option.column: said})
        for (_, said), verdict in found.items()
    ]


def _entry(entry: object, option: _Option) -> tuple[str, int, str | int | None]:
    """An id, which delivery is meant (0: whichever it is), and what is said beside it."""
    fields = entry if isinstance(entry, dict) else {"id": entry}
    known = ("id", "attempts", option.name)
    if any(not name or name not in known for name in fields):
        raise WrongValue(f"use an id, or an object with {', '.join(filter(None, known))}")
    it, attempts, said = map(fields.get, known)
    if not isinstance(it, str) or not _is_id(it):
        raise WrongValue("it has no id; use the 32 hex digits that take has told")
    if attempts is not None:
        attempts = _checked("attempts", _ATTEMPTS, attempts)
    if said is not None or option.name == "lease":
        said = _checked(option.name, option.kind, said)
    return it, attempts or 0, round(said * SECOND_US) if isinstance(said, float) else said


def _checked(name: str, kind: kinds.Kind, value: object) -> Any:  # what the kind makes of it
    try:
        return kind.check(value)
    except WrongValue as error:
        raise WrongValue(f"{name!r}: {error}") from None


def verdicts_schema(lease: kinds.Seconds) -> Schema:
    """The body as the API document has it."""
    id_schema: Schema = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
    lists: dict[str, Schema] = {}
    for outcome, option in _options(lease).items():
        members = {"id": id_schema, "attempts": schema.or_null(_ATTEMPTS.schema())}
        if outcome == "extend":
            members["lease"] = lease.schema()
        elif option.name:
            members[option.name] = schema.said(schema.or_null(option.kind.schema()), option.help)
        entry = schema.object_of(members, [name for name in members if name not in ("id", "lease")])
        either: Schema = entry if outcome == "extend" else {"anyOf": [id_schema, entry]}
        lists[outcome] = schema.or_null(schema.list_of(either))
    body = schema.object_of(lists, list(lists))
    return schema.said(body, f"Each id once, {IDS_MAX} of all lists together at most.")
