"""NDJSON: a body of lines, each a JSON object with one message, to columns.

    {"value": text}            the message is the text in UTF-8
    {"value_base64": text}     the message is what the text stands for
    "ttl", "retries", "delay"  numbers beside it, where wanted; null is as good as absent
    "headers"                  an object of texts, likewise
    "queue"                    where the caller allows it, and then in every line
    "offset"                   in every line, where messages are payloads for dead letters; nothing else then

Lines are parsed many at a time, as one JSON array: 1.8 million lines a second of 100 bytes each with
CPython 3.11, against 0.3 million one by one. That the lines of a chunk together are an array proves that
each is an object by itself, because it is only believed where
  * every line begins with `{` and ends with `}` (a break inside a text would be a control character, which
    JSON does not allow there), and there are as many objects as lines;
  * no object has a list in it, and only there could one end and the next begin as lines do.
Where it is not believed, lines are parsed one by one, which also finds the line to blame.

How it fails: a `Problem` that names the line, counted from 1, the field, and what would be right.
"""

import json
from array import array
from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, Final

from penstock.http.bodies.parts import (
    DELAY_RULE,
    NO_DELAY,
    NO_TTL,
    OFFSET_RULE,
    RETRIES_RULE,
    TTL_RULE,
    Others,
    Parts,
    PartsBuilder,
    too_large,
)
from penstock.http.kinds import OFFSET_MAX
from penstock.http.problems import Problem
from penstock.log.columns import TTL_SECONDS_MAX
from penstock.model.batch import DELAY_SECONDS_MAX, RETRIES_ENDLESS, RETRIES_NONE
from penstock.model.headers import encode_headers
from penstock.model.policy import QueueNameError, check_queue_name
from penstock.model.timers import SECOND_US

CHUNK_BYTES: Final = 64 * 1024
"""So much is parsed at a time: meanwhile no other thread runs, and the parsed objects take room."""

VALUE_FIELDS: Final = ("value", "value_base64")
FIELDS: Final = (*VALUE_FIELDS, "ttl", "retries", "delay", "headers")
REPAIR_FIELDS: Final = (*VALUE_FIELDS, "offset")

_FORM: Final = '{"value": "…"}'
_KINDS: Final = {bool: "a Boolean", int: "a number", float: "a number", str: "a text", list: "a list"}


def read_ndjson(
    body: bytes,
    *,
    payload_bytes_max: int,
    queues: bool = False,
    repairs: bool = False,
    protocol: str = "http",
) -> Parts:
    """The messages of a body. `queues`: every line names its queue; `repairs`: and a dead letter."""
    reader = _Reader(payload_bytes_max, queues, repairs)
    at, number = 0, 1
    while at < len(body):
        end = body.find(b"\n", at + CHUNK_BYTES) + 1 or len(body)
        chunk = body[at:end]
        reader.add(chunk, number)
        at = end
        number += chunk.count(b"\n")
    return reader.parts.finish(protocol)


class _Rows:
    """What lines say that were looked at one by one, for one queue."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.ttl, self.retries = array("q"), array("h")
        self.offsets, self.delay_us = array("q"), array("q")
        self.headers: list[bytes] = []

    def others(self) -> Others:
        return Others(
            self.ttl if any(self.ttl) else None,
            self.retries if max(self.retries) != RETRIES_NONE else None,
            self.offsets or None,
            self.delay_us if any(self.delay_us) else None,
            self.headers if any(self.headers) else None,
        )


class _Reader:
    """One body on its way in."""

    def __init__(self, payload_bytes_max: int, queues: bool, repairs: bool) -> None:
        self.parts = PartsBuilder()
        self._payload_bytes_max = payload_bytes_max
        self._queues = queues
        self._repairs = repairs
        fields = REPAIR_FIELDS if repairs else FIELDS
        self._names = frozenset((*fields, "queue") if queues else fields)
        self._checked: set[str] = set()  # names of queues

    def add(self, chunk: bytes, number: int) -> None:
        """Whole lines, the first of which has that number."""
        text = _text(chunk, number)
        rows = _all_at_once(text)
        if rows is not None and not self._queues and not self._repairs and self._add_plain(rows):
            return
        self._add_rows(_by_line(text, number) if rows is None else enumerate(rows, number))

    def _add_plain(self, rows: list[Any]) -> bool:
        """Add lines that have a `value` each and nothing else; False where some do not, and none is added."""
        try:
            values = [row["value"] for row in rows]
            joined = "".join(values)
            payload = joined.encode()
            members = sum(map(len, rows))
        except (KeyError, TypeError, UnicodeEncodeError):
            return False
        lengths = [*map(len, values)]
        if len(payload) != len(joined):
            lengths = [len(value.encode()) for value in values]
        if members != len(rows) or max(lengths) > self._payload_bytes_max:
            return False
        self.parts.count(len(rows))
        part = self.parts.of(None)
        part.add(payload, _ends(lengths, part.end))
        return True

    def _add_rows(self, rows: Iterable[tuple[int, Any]]) -> None:
        """Add lines of any form, looking at each."""
        gathered: dict[str | None, _Rows] = {}
        for number, row in rows:
            if type(row) is not dict:
                raise _wrong(number, f"this is {_kind(row)}; send an object, {_FORM}")
            if not row.keys() <= self._names:
                raise self._unknown(number, row)
            queue = self._queue(number, row) if self._queues else None
            its = gathered.get(queue)
            if its is None:
                its = gathered[queue] = _Rows()
            its.values.append(self._value(number, row))
            if self._repairs:
                offset = _number(number, row, "offset", 0, OFFSET_MAX, -1, OFFSET_RULE)
                if offset < 0:
                    raise _wrong(number, f"the field 'offset' is missing; use {OFFSET_RULE}")
                its.offsets.append(offset)
            its.ttl.append(_number(number, row, "ttl", 1, TTL_SECONDS_MAX, NO_TTL, TTL_RULE))
            its.retries.append(
                _number(number, row, "retries", 0, RETRIES_ENDLESS, RETRIES_NONE, RETRIES_RULE)
            )
            its.delay_us.append(_delay_us(number, row))
            its.headers.append(_headers(number, row))
        for queue, its in gathered.items():
            self.parts.count(len(its.values))
            part = self.parts.of(queue)
            part.add(b"".join(its.values), _ends(map(len, its.values), part.end), its.others())

    def _value(self, number: int, row: dict[str, Any]) -> bytes:
        given = [name for name in VALUE_FIELDS if name in row]
        if len(given) != 1:
            raise _wrong(number, f"use one of the fields {' and '.join(VALUE_FIELDS)}, as in {_FORM}")
        name = given[0]
        text = row[name]
        if type(text) is not str:
            raise _wrong(number, f"field {name!r} is {_kind(text)}; use a text")
        if name == "value":
            try:
                value = text.encode()
            except UnicodeEncodeError as error:
                raise _wrong(
                    number,
                    f"field 'value' has half a character ({text[error.start]!a}) at {error.start}; "
                    f"what is no text goes into value_base64",
                ) from None
        else:
            try:
                value = a2b_base64(text, strict_mode=True)
            except (Base64Error, ValueError) as error:
                raise _wrong(
                    number, f"field 'value_base64' is no base64 ({error}); use A-Z a-z 0-9 + / with padding"
                ) from None
        if len(value) > self._payload_bytes_max:
            raise too_large(f"line {number}", len(value), self._payload_bytes_max)
        return value

    def _queue(self, number: int, row: dict[str, Any]) -> str:
        queue = row.get("queue")
        if type(queue) is not str:
            raise _wrong(
                number,
                "the field 'queue' is missing; name the queue in every line"
                if queue is None
                else f"field 'queue' is {_kind(queue)}; use the name of a queue",
            )
        if queue not in self._checked:
            try:
                check_queue_name(queue)
            except QueueNameError as error:
                raise _wrong(number, f"field 'queue': {error}") from None
            self._checked.add(queue)
        return queue

    def _unknown(self, number: int, row: dict[str, Any]) -> Problem:
        name = next(name for name in row if name not in self._names)
        if name == "queue":
            return _wrong(number, "there is no field 'queue' here; the queue is the one of the address")
        return _wrong(number, f"there is no field {name!r:.100}; there are {', '.join(sorted(self._names))}")


# --- lines -----------------------------------------------------------------------------------------


def _text(chunk: bytes, number: int) -> str:
    try:
        text = chunk.decode()
    except UnicodeDecodeError as error:
        number += chunk.count(b"\n", 0, error.start)
        raise _wrong(number, "this is no UTF-8; bytes that are no text go into value_base64") from None
    # Outside a text a return is white space to JSON, inside it is refused, with and without a break.
    return text.replace("\r\n", "\n") if "\r" in text else text


def _all_at_once(text: str) -> list[Any] | None:
    """What the lines say, one item each; None where that must be found out line by line."""
    text = text.rstrip("\n")
    breaks = text.count("\n")
    if not text.startswith("{") or not text.endswith("}") or text.count("}\n{") != breaks:
        return None
    try:
        rows: list[Any] = json.loads("[" + text.replace("\n", ",\n") + "]")
    except (ValueError, RecursionError):
        return None
    return rows if len(rows) == breaks + 1 else None


def _by_line(text: str, first: int) -> Iterator[tuple[int, Any]]:
    """The number of each line that is not empty, and what it says."""
    for number, line in enumerate(text.split("\n"), first):
        if line.strip(" \t\r"):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _wrong(number, f"this is no JSON: {_short(error)}; send an object a line") from None
            yield number, row


def _short(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return str(error)


# --- fields ----------------------------------------------------------------------------------------


def _number(
    number: int, row: dict[str, Any], name: str, lowest: int, highest: int, absent: int, rule: str
) -> int:
    value = row.get(name)
    if value is None:
        return absent
    if type(value) is not int or not lowest <= value <= highest:
        raise _wrong(number, f"field {name!r} is {_shown(value)}; use {rule}")
    return value


def _delay_us(number: int, row: dict[str, Any]) -> int:
    value = row.get("delay")
    if value is None:
        return NO_DELAY
    if (type(value) is int or type(value) is float) and 0 <= value <= DELAY_SECONDS_MAX:
        return round(value * SECOND_US)
    raise _wrong(number, f"field 'delay' is {_shown(value)}; use {DELAY_RULE}")


def _headers(number: int, row: dict[str, Any]) -> bytes:
    value = row.get("headers")
    if value is None:
        return b""
    if type(value) is not dict:
        raise _wrong(number, f"field 'headers' is {_kind(value)}; use an object of texts")
    try:
        return encode_headers(value)
    except ValueError as error:
        raise _wrong(number, f"field 'headers': {error}") from None


def _ends(lengths: Iterable[int], first: int) -> "array[int]":
    """Where things of these lengths end, one behind the other."""
    ends = array("i", accumulate(lengths, initial=first))
    del ends[0]
    return ends


def _shown(value: object) -> str:
    return repr(value)[:100] if type(value) in (int, float) else _kind(value)


def _kind(value: object) -> str:
    return "null" if value is None else _KINDS.get(type(value), "an object")


def _wrong(number: int, what: str) -> Problem:
    return Problem("bad-request", f"line {number}: {what}")
