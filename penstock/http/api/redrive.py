"""Redriving: dead letters back behind the tail of their queue, all of them or those that fit.

Without a condition the first process does it by itself, for all letters or for those in given ranges. With
one, the dead letters are walked in the order of their offsets (`reading/letters.py`), judged in a thread, and
those that fit are named to the first process in ranges.

Rules that always hold:
  * A letter is redriven by the first process alone, and counted by the call that it answered with it: of two
    callers who redrive or purge the same letters, one counts each.
  * A call ends: what was dead when it began is what it moves. What dies again is left for the next call.
  * Dead letters that somebody holds stay where they are.
  * So do bad records, unless somebody asks for them by reason, by ranges, or with a condition about
    reasons: they are reports of a pipeline about records that it could not read, which no worker expects.

How it fails: what was redriven stays redriven when a later part fails. A call that is made again goes on.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final, TypeVar

from starlette.responses import Response

from penstock.http import kinds, schema
from penstock.http.app import Call, answer_json, answer_list
from penstock.http.link import CallRefused
from penstock.http.problems import Problem
from penstock.http.reading import letters
from penstock.http.reading.letters import Range, Ranges, Run
from penstock.http.reading.pool import Stream
from penstock.http.route import IDENTITY, QUEUE, Body, Field, Route
from penstock.http.schema import Schema
from penstock.http.where.condition import TooLong, WhereError, parse
from penstock.http.where.read import TEXT_CHARACTERS_MAX
from penstock.log.errors import QueueDeleted
from penstock.log.reader import LogReader
from penstock.model.life import DEAD_REASONS, Reason
from penstock.model.rights import Right, matcher

LETTERS_MAX: Final = 2000
"""Letters that are read and judged in one go of a thread."""

LETTERS_MAX_OF_WALKS: Final = 50_000
"""The same where every go begins with a walk through the events."""

RANGES_MAX: Final = 1000
"""Ranges of letters that the first process is asked to redrive in one call."""

SYNC_SECONDS: Final = 2.0
"""How long a call waits, in all, for letters that are so new that they cannot be read yet."""

SYNC_PAUSE_SECONDS: Final = 0.02

RANGES_GIVEN_MAX: Final = 10_000
"""Ranges that a caller may name at a time: a few milliseconds of judging them."""

LIST_LIMIT_MAX: Final = 10_000
"""Letters whose offsets a dry run tells: as many as ranges may be named in a call."""

Part = TypeVar("Part")

REASONS: Final = tuple(sorted(reason.label for reason in DEAD_REASONS))


class RangesKind(kinds.Kind):
    """Ranges of offsets, in any order; each is [first, end], the end exclusive."""

    def check(self, value: object) -> Ranges:
        if not isinstance(value, list) or not 0 < len(value) <= RANGES_GIVEN_MAX:
            raise self.refuse()
        ranges: Ranges = []
        for item in value:  # may be many, so that no kinds of their own judge the numbers
            if not isinstance(item, list) or len(item) != 2:
                raise self.refuse()
            first, end = item
            if type(first) is not int or type(end) is not int:
                raise self.refuse()
            if not (0 <= first <= kinds.OFFSET_MAX and 0 <= end <= kinds.OFFSET_MAX):
                raise self.refuse()
            ranges.append(Range(first, end))
        return ranges

    def wanted(self) -> str:
        return (
            f"a list of 1 to {RANGES_GIVEN_MAX} ranges, each [first, end] with the end exclusive, of "
            f"whole numbers from 0 to {kinds.OFFSET_MAX}"
        )

    def schema(self) -> Schema:
        bounds = {**schema.list_of(kinds.Whole().schema()), "minItems": 2, "maxItems": 2}
        return {**schema.list_of(bounds), "minItems": 1, "maxItems": RANGES_GIVEN_MAX}


class _Redrive:
    """One call while it is carried out."""

    def __init__(self, call: Call, queue: str, fields: dict[str, Any]) -> None:
        self._call = call
        self._site = call.site
        self._queue = queue
        self._identity: str | None = fields["identity"]
        self._number = 0  # of the queue in its log, which an identity ends with
        self._reason = Reason.of(fields["reason"]) if fields["reason"] is not None else None
        self._condition = parse(fields["where"]) if fields["where"] is not None else None
        asks_reason = self._condition is not None and "reason" in self._condition.columns
        names_them = self._reason is not None or fields["ranges"] is not None
        self._spares_bad_records = not names_them and not asks_reason
        self._dry_run: bool = fields["dry_run"]
        self._start: int = fields["from"]
        self._ranges: Ranges | None = None
        if fields["ranges"] is not None:
            self._ranges = letters.merged(fields["ranges"], self._start)
        self._walks = self._condition is not None or self._dry_run or fields["scan_limit"] is not None
        self._letters_left: int = fields["scan_limit"] or kinds.OFFSET_MAX
        self._limit_left: int = fields["limit"] or kinds.OFFSET_MAX
        self._now_us = time.time_ns() // 1000
        self._event_end = 0  # what has happened before the call began
        self._mark: list[int] = []  # where the queue stood then
        self._sync_deadline = time.monotonic() + SYNC_SECONDS
        self._looked_at = self._matched = self._redriven = 0
        self._next: int | None = None
        self._lists: bool = self._dry_run and fields["list_limit"] is not None
        self._list_left: int = fields["list_limit"] or 0
        self._listed: Ranges = []

    async def run(self) -> dict[str, Any]:
        """Do it; what there is to say about it."""
        queue = (await self._site.link.call("queue", {"queue": self._queue})).fields
        row, self._mark = queue["row"], queue["mark"]
        if self._identity not in (None, row["identity"]):
            raise QueueDeleted(self._queue)
        self._identity = row["identity"]
        self._number = int(row["identity"][-6:], 16)
        some_stay = self._spares_bad_records and Reason.BAD_RECORD.label in queue["dead_reasons"]
        if self._walks or some_stay:
            self._event_end = row["event_end"]
            await self._walk(row["offset_end"])
        else:
            await self._move_all()
        told = {
            "looked_at": self._looked_at,
            "matched": self._matched,
            "redriven": self._redriven,
            "dry_run": self._dry_run,
            "next": self._next,
        }
        return {**told, "ranges": letters.merged(self._listed)} if self._lists else told

    async def _move_all(self) -> None:
        """Without looking: first died first; where ranges are given, in a portion of them."""
        if self._ranges is None:
            ranges = [Range(self._start, kinds.OFFSET_MAX)] if self._start else None
            await self._move(ranges, self._limit_left)
        else:
            for at in range(0, len(self._ranges), RANGES_MAX):
                await self._move(self._ranges[at : at + RANGES_MAX], self._limit_left - self._redriven)
        self._looked_at = self._matched = self._redriven

    async def _move(self, ranges: Ranges | None, limit: int) -> int:
        """Have the first process redrive at most so many of the letters in these ranges; how many it were."""
        fields = {
            "queue": self._queue,
            "identity": self._identity,
            "reason": self._reason.label if self._reason is not None else None,
            "ranges": ranges,
            "mark": self._mark,
        }
        left, more = limit, limit > 0
        while more:
            await self._check_wanted()
            frame = await self._site.link.call("redrive", {**fields, "limit": left})
            left -= frame.fields["count"]
            self._redriven += frame.fields["count"]
            more = frame.fields["more"] and left > 0
        return limit - left

    # --- with a look at each letter ----------------------------------------------------------------

    async def _walk(self, end: int) -> None:
        ranges = self._ranges
        if ranges is not None:
            if not ranges:
                return
            self._start, end = ranges[0].first, min(end, ranges[-1].end)
        at_once = self._letters_at_once()
        letters_min = at_once if at_once == LETTERS_MAX_OF_WALKS else 1
        async for runs in letters.dead_runs(
            self._site.link, self._queue, self._identity, self._start, end, self._wants, letters_min
        ):
            if ranges is not None:
                runs = await asyncio.to_thread(letters.within, runs, ranges)
            while runs:
                await self._check_wanted()
                part, runs = letters.parted(runs, min(at_once, self._letters_left))
                await self._look_at(part)
                if not self._limit_left:
                    return
                if not self._letters_left:
                    behind = part[-1].end
                    self._next = behind if behind < end else None
                    return

    def _wants(self, run: Run) -> bool:
        """Whether these letters are to be looked at."""
        if self._spares_bad_records:
            return run.reason is not Reason.BAD_RECORD
        return self._reason in (None, run.reason)

    def _letters_at_once(self) -> int:
        condition = self._condition
        if condition is None or letters.is_of_runs(condition):
            return kinds.OFFSET_MAX  # whole runs, however long they are
        return LETTERS_MAX_OF_WALKS if "consumer" in condition.columns else LETTERS_MAX

    async def _look_at(self, runs: list[Run]) -> None:
        ranges = await self._matching(runs)
        looked_at = sum(run.letters for run in runs)
        self._looked_at += looked_at
        self._letters_left -= looked_at
        # Where others are faster with some of them, those behind have their turn.
        while ranges and self._limit_left:
            some, left = letters.parted(ranges[:RANGES_MAX], self._limit_left)
            ranges = left + ranges[RANGES_MAX:]
            matched = sum(end - first for first, end in some)
            self._matched += matched
            if self._dry_run:
                self._limit_left -= matched
                if self._list_left:
                    listed, _ = letters.parted(some, self._list_left)
                    self._listed += listed
                    self._list_left -= sum(end - first for first, end in listed)
            else:
                moved = await self._move(some, matched)
                self._limit_left -= moved

    async def _matching(self, runs: list[Run]) -> Ranges:
        """The letters of these runs that fit."""
        condition = self._condition
        if condition is None:
            return [Range(run.first, run.end) for run in runs]
        if letters.is_of_runs(condition):
            return await asyncio.to_thread(letters.matching_runs, self._queue, runs, condition, self._now_us)
        readable = await self._readable(runs)
        consumers = await self._consumers(readable) if "consumer" in condition.columns else {}
        found: Ranges = []
        walk = self._site.readers.stream(
            letters.matching, self._queue, readable, condition, self._now_us, consumers
        )
        try:
            async for part in self._while_wanted(walk):
                found += part
        except TooLong as error:
            raise Problem("bad-request", f"{error}; {self._redriven} letters were redriven so far") from None
        return found

    async def _consumers(self, runs: list[Run]) -> dict[int, str]:
        """Who had these letters when they died."""
        found: dict[int, str] = {}
        if runs:
            walk = self._site.readers.stream(letters.walk_deaths, self._queue, runs)
            async for part in self._while_wanted(walk):
                found |= part
        return found

    async def _while_wanted(self, walk: Stream[Part]) -> AsyncIterator[Part]:
        try:
            async for part in walk:
                await self._check_wanted()
                yield part
        finally:
            await walk.aclose()

    async def _readable(self, runs: list[Run]) -> list[Run]:
        """As much of these runs as is synced: after a moment all of them are, and their deaths, too."""
        while True:
            known = await self._site.readers.run(LogReader.queue, self._queue)
            end, event_end = (known.offset_end, known.event_end) if known is not None else (0, 0)
            if known is not None and known.number != self._number:
                end = event_end = 0  # That is the one before this, whose end is not synced yet.
            if runs[-1].end <= end and self._event_end <= event_end:
                return runs
            if time.monotonic() > self._sync_deadline:
                return [run._replace(end=min(run.end, end)) for run in runs if run.first < end]
            await asyncio.sleep(SYNC_PAUSE_SECONDS)

    async def _check_wanted(self) -> None:
        await self._call.check_wanted(f"{self._redriven} letters were redriven so far", self._queue)


async def redrive(call: Call) -> Response:
    fields = await call.fields()
    if fields["where"] is not None:  # By conditions one can find out what is in a letter.
        call.require(Right.READ, (call["queue"],))
    return answer_json(await _redrive(call, call["queue"], fields))


async def _redrive(call: Call, queue: str, fields: dict[str, Any]) -> dict[str, Any]:
    try:
        work = _Redrive(call, queue, fields)
    except WhereError as error:
        raise Problem("bad-request", str(error), position=error.position) from None
    if fields["dry_run"]:
        return await work.run()
    wish = {name: fields[name] for name in ("reason", "where", "limit") if fields[name] is not None}
    async with call.act("redrive", queue=queue, **wish) as told:
        done = await work.run()
        told["count"] = done["redriven"]
    return done


async def redrive_many(call: Call) -> Response:
    """Queue after queue. One that is deleted meanwhile has nothing to redrive."""
    given = await call.fields()
    fields = {it.name: given.get(it.name, it.default) for it in _FIELDS}
    needed = Right.OPERATE if given["where"] is None else Right.OPERATE | Right.READ
    named: str | list[str] = given["queues"]
    mirror = call.site.mirror
    await mirror.refresh()
    if isinstance(named, str):
        fits = matcher(named)
        queues = [name for name in mirror.names if fits(name) and call.user.may(needed, name)]
    else:
        call.require(needed, named)
        queues = sorted(set(named))
    if fields["where"] is not None:
        try:
            parse(fields["where"])  # Also where there is no letter to judge by it.
        except WhereError as error:
            raise Problem("bad-request", str(error), position=error.position) from None
    left: int | None = given["max"]
    rows: list[dict[str, Any]] = []
    for queue in queues:
        if left == 0:
            break
        if isinstance(named, str) and (queue not in mirror.rows or not mirror.queue(queue)["dead"]):
            continue
        try:
            done = await _redrive(call, queue, {**fields, "limit": left})
        except (CallRefused, QueueDeleted) as error:
            if isinstance(error, CallRefused) and (error.kind != "no-queue" or not isinstance(named, str)):
                raise
            continue
        rows.append({"queue": queue, **{name: done[name] for name in COUNTS}})
        if left is not None:
            left -= done["matched"] if given["dry_run"] else done["redriven"]
    totals = {name: sum(row[name] for row in rows) for name in COUNTS}
    return await answer_list("queues", rows, **totals, dry_run=given["dry_run"])


COUNTS: Final = ("looked_at", "matched", "redriven")


class QueuesKind(kinds.Kind):
    """A pattern of names, or names."""

    _pattern = kinds.Text("a pattern of names: * stands for any characters, ? for one", 255)
    _names = kinds.ListOf(kinds.QueueName(), 1000)

    def check(self, value: object) -> object:
        return self._pattern.check(value) if isinstance(value, str) else self._names.check(value)

    def wanted(self) -> str:
        return "a pattern of names, or a list of 1 to 1000 names"

    def schema(self) -> Schema:
        return {"anyOf": [self._pattern.schema(), self._names.schema()]}


_FIELDS: Final = (
    Field("reason", kinds.Word(REASONS), "only letters that died for this reason"),
    Field(
        "where",
        kinds.Text("a condition of one character to 10,000", TEXT_CHARACTERS_MAX, "[\\s\\S]+"),
        "only letters that this condition is true of, as in: value.region = 'north' and attempts < 3",
    ),
    Field(
        "limit",
        kinds.Whole(1),
        "redrive at most so many: those that died first, or with a condition those with the lowest offsets",
    ),
    Field("dry_run", kinds.Flag(), "change nothing, only count", default=False),
    Field("from", kinds.Whole(), "begin at this offset", default=0),
    Field("identity", IDENTITY.kind, IDENTITY.help),
    Field(
        "ranges",
        RangesKind(),
        "only letters whose offsets are in one of these ranges, each [first, end] with the end exclusive",
    ),
    Field(
        "scan_limit", kinds.Whole(1), "look at no more than so many letters; the answer says where to go on"
    ),
    Field(
        "list_limit",
        kinds.Whole(1, LIST_LIMIT_MAX),
        "with dry_run, tell the offsets of so many of those that fit, as ranges",
    ),
)

SCHEMAS: Final = {
    "Redriven": schema.object_of(
        {
            "looked_at": schema.said(schema.OFFSET, "Dead letters that were looked at."),
            "matched": schema.said(schema.OFFSET, "Those of them that fit, at most limit."),
            "redriven": schema.said(schema.OFFSET, "Those of them that this call has moved."),
            "dry_run": schema.BOOLEAN,
            "next": schema.said(
                schema.or_null(schema.OFFSET),
                "Where to go on (from), where scan_limit has ended the call; else null.",
            ),
            "ranges": schema.said(
                schema.list_of({"type": "array", "items": schema.OFFSET, "minItems": 2, "maxItems": 2}),
                "Where the first of those that fit are; only with dry_run and list_limit.",
            ),
        },
        optional=("ranges",),
    )
}

ROUTES: Final = (
    Route(
        "POST /v1/queues/{queue}/redrive",
        redrive,
        Right.OPERATE,
        "Put dead letters back behind the tail of the queue: all of them, or those that fit.",
        schema.ref("Redriven"),
        (QUEUE,),
        Body(fields=_FIELDS, required=False, help="Nothing, or {}: all of them but bad records."),
        ("queue-not-found", "queue-deleted", "unsupported-media-type", "conflict"),
    ),
    Route(
        "POST /v1/redrive",
        redrive_many,
        Right.OPERATE,
        "Put dead letters of many queues back behind the tails of these: all of them, or those that fit.",
        schema.object_of(
            {
                "queues": schema.said(
                    schema.list_of(
                        schema.object_of({"queue": schema.STRING, **dict.fromkeys(COUNTS, schema.COUNT)})
                    ),
                    "Those that were looked at.",
                ),
                **{name: schema.said(schema.COUNT, "Of all of them.") for name in COUNTS},
                "dry_run": schema.BOOLEAN,
            }
        ),
        body=Body(
            fields=(
                Field(
                    "queues",
                    QueuesKind(),
                    "a pattern, of which those are meant that one may operate and that have dead letters; or "
                    "names",
                    required=True,
                ),
                *(it for it in _FIELDS if it.name in ("reason", "where", "dry_run")),
                Field("max", kinds.Whole(1), "redrive at most so many, of all queues together"),
            )
        ),
        problems=("queue-not-found", "queue-deleted", "unsupported-media-type", "conflict"),
    ),
)
