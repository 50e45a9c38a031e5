"""What is done to a selection of messages: copied to another queue, moved there, or withdrawn.

Which messages these are is found by a walk in a thread, as a search finds them (`reading/search.py`); what is
done to them is done by the first process, in slices, each of which is durable before the next one begins.

    copy        messages of a slice are sent to the other queue in one transaction
    move        the same transaction withdraws the originals: the log has both, or neither. Where the other
                queue is in another log: `sharding/moving.py`
    withdraw    what nobody holds is taken out, with the reason `operator`

Rules that always hold:
  * Nothing is taken out of anybody's hands: what somebody holds stays, and is told.
  * A moved message is in one of the two queues at any moment, whatever crashes: never in both, nor in none,
    but for a moment on its way to another log. Made again, the same call moves what is left.
  * A copy has the payload and the headers. What lives also takes along what is left of its TTL, its retry
    counter and its delay. It is a new message, with an id and a history of its own; a request becomes a plain
    message, and who waits for its answer is told that there will be none, where it was moved.
  * A call ends: it looks at what was there when it began.

How it fails: what was done stays done, and the problem says how much that was. A copy that is made again
makes copies again, unless it has an Idempotency-Key: then each stretch of `KEY_OFFSETS` offsets, or part of
it with `SLICE_BYTES`, is copied once. Another selection under the same key is another copy.
"""

import hashlib
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final, TypeVar

from starlette.responses import Response

from penstock.control.batches import pack_batch
from penstock.http import kinds, schema
from penstock.http.api.log import Asking
from penstock.http.api.redrive import RANGES_MAX, RangesKind
from penstock.http.api.search import WhereKind, take_turn
from penstock.http.app import Call, answer_json, json_text
from penstock.http.auth import forbidden
from penstock.http.problems import Problem
from penstock.http.reading.letters import Range, Ranges, merged, parted
from penstock.http.reading.pool import Stream
from penstock.http.reading.search import Found, Item, Missing, Place, Search, Spans, Wanted
from penstock.http.route import IDENTITY, QUEUE, Body, Field, Route
from penstock.http.sharding.moving import move as move_between
from penstock.http.stages.idempotency import HEADER, KEY
from penstock.http.where.condition import TooLong
from penstock.log.errors import QueueDeleted
from penstock.log.reader import LogReader
from penstock.model.batch import RETRIES_NONE, Batch
from penstock.model.rights import NOBODY, Right
from penstock.model.shards import shard_of
from penstock.model.timers import SECOND_US

OFFSETS_MAX: Final = 10_000
SLICE_MESSAGES: Final = 1000
SLICE_BYTES: Final = 4 << 20
KEY_OFFSETS: Final = 1000
TOLD_MAX: Final = 1000
"""Ranges of offsets that an answer tells, of each kind."""

LIVING: Final = ("ready", "delayed", "held", "dead")
PROTOCOL: Final = "http"

T = TypeVar("T")


class OffsetsKind(kinds.Kind):
    """Offsets, in any order."""

    def check(self, value: object) -> object:
        if not isinstance(value, list) or not 0 < len(value) <= OFFSETS_MAX:
            raise self.refuse()
        if not all(type(it) is int and 0 <= it < kinds.OFFSET_MAX for it in value):
            raise self.refuse()
        return [Range(it, it + 1) for it in value]

    def wanted(self) -> str:
        return f"a list of 1 to {OFFSETS_MAX} offsets"

    def schema(self) -> schema.Schema:
        offset = kinds.Whole(0, kinds.OFFSET_MAX - 1).schema()
        return {**schema.list_of(offset), "minItems": 1, "maxItems": OFFSETS_MAX}


class _Act:
    """One call while it is carried out."""

    def __init__(self, call: Call, fields: dict[str, Any], name: str, states: Sequence[str]) -> None:
        self.call = call
        self.site = call.site
        self.queue: str = call["queue"]
        self.fields = fields
        self.name = name
        self._states = states
        self.identity = ""
        self.selected = self.done = 0
        self.missing = 0
        self.held: Ranges = []
        self.held_count = 0
        self.next: int | None = None
        self.left: int = fields["limit"] or kinds.OFFSET_MAX

    async def search(self) -> Search:
        row = (await self.site.link.call("queue", {"queue": self.queue})).fields["row"]
        self.identity = row["identity"]
        if self.fields["identity"] not in (None, self.identity):
            raise QueueDeleted(self.queue)
        given = [*(self.fields["offsets"] or ()), *(self.fields["ranges"] or ())]
        names_them = self.fields["offsets"] is not None or self.fields["ranges"] is not None
        if not names_them and self.fields["where"] is None and self.fields["state"] is None:
            raise Problem(
                "bad-request",
                "say which messages: offsets, ranges, where or state; a purge takes all that nobody holds",
            )
        wanted = Wanted(
            [self.queue],
            self.fields["where"],
            frozenset(self.fields["state"] or self._states),
            Place(offset=self.fields["from"]),
            ranges=merged(given) if names_them else None,
        )
        return Search(wanted, Asking(self.site), now_us=time.time_ns() // 1000)

    async def parts(self, stream: Stream[T]) -> AsyncIterator[T]:
        """What a walk finds, while somebody wants it."""
        try:
            async for part in stream:
                await self.call.check_wanted(self.so_far())
                yield part
        except TooLong as error:
            raise Problem("bad-request", f"{error}; {self.so_far()}") from None
        finally:
            await stream.aclose()

    def so_far(self) -> str:
        return f"{self.done} messages were done so far ({self.name})"

    def hold(self, ranges: Ranges) -> None:
        self.held_count += sum(end - first for first, end in ranges)
        if len(self.held) < TOLD_MAX:
            self.held = merged([*self.held, *ranges])[:TOLD_MAX]

    def answer(self, done: str, **more: object) -> dict[str, Any]:
        return {
            "selected": self.selected,
            done: self.done,
            "held": self.held_count,
            "held_ranges": self.held,
            "missing": self.missing,
            "dry_run": self.fields["dry_run"],
            "next": self.next,
            **more,
        }

    def wish(self) -> dict[str, object]:
        """For the audit."""
        told = {name: self.fields[name] for name in ("state", "limit") if self.fields[name] is not None}
        if self.fields["where"] is not None:
            told["where"] = str(self.fields["where"])
        return told


# --- withdraw --------------------------------------------------------------------------------------


async def withdraw(call: Call) -> Response:
    fields = await call.fields()
    if fields["where"] is not None:  # By conditions one can find out what is in a message.
        call.require(Right.READ, (call["queue"],))
    act = _Act(call, fields, "withdraw", LIVING)
    search = await act.search()
    release = take_turn(call.site, call.user.name)
    try:
        if fields["dry_run"]:
            await _withdraw(act, search)
        else:
            async with call.act("withdraw", queue=act.queue, **act.wish()) as told:
                try:
                    await _withdraw(act, search)
                finally:
                    told["count"] = act.done
    finally:
        release()
    return answer_json(act.answer("withdrawn"))


async def _withdraw(act: _Act, search: Search) -> None:
    async for part in act.parts(act.site.readers.stream(_spans_of, search)):
        if isinstance(part, Missing):
            act.missing += part.end - part.first
            continue
        act.hold(part.held)
        free, rest = parted(part.free, act.left)
        count = _messages(free)
        act.selected += count + _messages(part.held)
        act.left -= count
        if not act.fields["dry_run"]:
            for at in range(0, len(free), RANGES_MAX):
                await _withdraw_ranges(act, free[at : at + RANGES_MAX])
        if not act.left:
            act.next = rest[0].first if rest else part.next
            return


async def _withdraw_ranges(act: _Act, ranges: Ranges) -> None:
    more = True
    while more:
        await act.call.check_wanted(act.so_far())
        asked = {"queue": act.queue, "identity": act.identity, "ranges": ranges}
        answer = (await act.site.link.call("withdraw", asked)).fields
        act.done += answer["count"]
        more = answer["more"]


def _messages(ranges: Ranges) -> int:
    return sum(end - first for first, end in ranges)


def _spans_of(reader: LogReader, search: Search) -> Iterator[Spans | Missing]:
    return search.spans(reader)


# --- copy and move ---------------------------------------------------------------------------------


async def copy(call: Call) -> Response:
    return await _send(call, moves=False)


async def move(call: Call) -> Response:
    return await _send(call, moves=True)


async def _send(call: Call, *, moves: bool) -> Response:
    fields = await call.fields()
    to: str = fields["to"]
    call.require(Right.READ, (call["queue"],))
    call.require(Right.SEND, (to,))
    if to == call["queue"]:
        raise Problem("bad-request", "field 'to': it is the same queue; name another")
    name = "move" if moves else "copy"
    names_them = fields["offsets"] is not None or fields["ranges"] is not None
    states = (*LIVING, "gone") if names_them and not moves else LIVING
    act = _Sending(call, fields, name, states, to, moves)
    search = await act.search()
    release = take_turn(call.site, call.user.name)
    try:
        if fields["dry_run"]:
            await act.run(search)
        else:
            async with call.act(name, queue=act.queue, to=to, **act.wish()) as told:
                try:
                    await act.run(search)
                finally:
                    told["count"] = act.done
    finally:
        release()
    more = {} if moves else {"repeated": act.repeated}
    there = merged(act.there)[:TOLD_MAX]
    return answer_json(act.answer("moved" if moves else "copied", to=to, ranges=there, **more))


class _Sending(_Act):
    def __init__(
        self, call: Call, fields: dict[str, Any], name: str, states: Sequence[str], to: str, moves: bool
    ) -> None:
        super().__init__(call, fields, name, states)
        self._to = to
        self._moves = moves
        self._key: str = "" if moves else call[HEADER] or ""
        chosen = [str(fields[name]) for name in ("offsets", "ranges", "where", "state", "from", "limit")]
        self._selection = hashlib.sha256(json_text(chosen).encode()).hexdigest()[:16]
        self._slice: list[Found] = []
        self._bytes = 0
        self.there: Ranges = []
        self.repeated = 0

    async def run(self, search: Search) -> None:
        async for part in self.parts(self.site.readers.stream(_items_of, search)):
            for item in part:
                if isinstance(item, Missing):
                    self.missing += item.end - item.first
                    continue
                self.selected += 1
                row = item.row
                if self._moves and (row.state == "held" or row.consumer is not None):
                    self.hold([Range(row.offset, row.offset + 1)])
                    continue
                await self._take(item)
                self.left -= 1
                if not self.left:
                    self.next = row.offset + 1
                    await self._flush()
                    return
        await self._flush()

    async def _take(self, item: Found) -> None:
        size = item.row.value_bytes
        first = self._slice[0].row.offset if self._slice else item.row.offset
        if self._slice and (
            len(self._slice) >= SLICE_MESSAGES
            or self._bytes + size > SLICE_BYTES
            or (self._key and first // KEY_OFFSETS != item.row.offset // KEY_OFFSETS)
        ):
            await self._flush()
        self._slice.append(item)
        self._bytes += size

    async def _flush(self) -> None:
        """One slice, durable when this returns."""
        some, self._slice, self._bytes = self._slice, [], 0
        if not some or self.fields["dry_run"]:
            return
        if not (self.call.user_now or NOBODY).may(Right.SEND, self._to):
            raise forbidden(self.call.user, Right.SEND, self._to)
        batch = _batch_of(some)
        if self._moves:
            batch.moves = array("q", [item.row.offset for item in some])
            batch.source, batch.identity = self.queue, self.identity
        logs = self.site.logs
        if self._moves and logs is not None and shard_of(self._to, logs.count) != self.site.shard:
            moved = await move_between(logs, self._to, batch)
            self.done += moved.messages
            if moved.stored is None:
                raise Problem(
                    "unavailable",
                    f"{moved.messages} messages have left queue {self.queue!r}, and come to {self._to!r} as "
                    f"soon as its log can store them; {self.so_far()}, with these",
                    headers={"Retry-After": "1"},
                )
            self._tell(moved.stored)
            return
        key = self._slice_key(some[0].row.offset)
        fields, buffers = pack_batch(batch)
        asked = {"key": key, "parts": [{"queue": self._to, "batch": fields}]}
        if logs is None:
            done = (await self.site.link.call("transact", asked, *buffers)).fields
        else:
            done = await logs.send(shard_of(self._to, logs.count), "transact", asked, *buffers)
        count = self._tell(done["stored"])
        self.done += count
        if done["repeated"]:
            self.repeated += count

    def _tell(self, stored: Sequence[Sequence[Any]]) -> int:
        """Messages are there; how many."""
        count = 0
        for _, first, end, *_ in stored:
            count += end - first
            if len(self.there) < 2 * TOLD_MAX:
                self.there = merged([*self.there, Range(first, end)])
        return count

    def _slice_key(self, offset: int) -> str:
        if not self._key:
            return ""
        names = "/".join(f"{len(name)}/{name}" for name in (self.queue, self._to))
        return f"copy/{names}/{self.identity}/{self._selection}/{self._key}/{self._place(offset)}"

    def _place(self, offset: int) -> str:
        """A stretch; its later parts by where they begin."""
        stretch = offset // KEY_OFFSETS
        is_first = stretch != self._stretch
        self._stretch = stretch
        return f"{stretch}" if is_first else f"{stretch}/{offset}"

    _stretch = -1


def _items_of(reader: LogReader, search: Search) -> Iterator[list[Item]]:
    return search.walk(reader)


def _batch_of(items: Sequence[Found]) -> Batch:
    """New messages with what these have."""
    now_us = time.time_ns() // 1000
    rows = [item.row for item in items]
    living = [row.state not in ("dead", "gone") for row in rows]
    ttl = [
        max(-((now_us - row.expires) // SECOND_US), 1) if lives and row.expires else 0
        for row, lives in zip(rows, living, strict=True)
    ]
    retries = [
        row.retries if lives and row.retries is not None else RETRIES_NONE
        for row, lives in zip(rows, living, strict=True)
    ]
    delay_us = [
        max(row.due - now_us, 1) if lives and row.due else 0 for row, lives in zip(rows, living, strict=True)
    ]
    return Batch.of(
        [bytes(row.value) for row in rows],
        ttl_seconds=ttl if any(ttl) else None,
        retries=retries if any(it != RETRIES_NONE for it in retries) else None,
        protocol=PROTOCOL,
        delay_us=delay_us if any(delay_us) else None,
        headers=[row.headers for row in rows] if any(row.headers for row in rows) else None,
    )


# --- the table -------------------------------------------------------------------------------------


def _fields(states: Sequence[str], what: str) -> tuple[Field, ...]:
    return (
        Field("offsets", OffsetsKind(), "only these messages"),
        Field(
            "ranges", RangesKind(), "only messages in one of these ranges, each [first, end], end exclusive"
        ),
        Field("where", WhereKind(), "only messages that this condition is true of; see docs/where.md"),
        Field(
            "state",
            kinds.ListOf(kinds.Word(tuple(states)), len(states), unique=True),
            "only messages in these states",
        ),
        Field("from", kinds.Whole(), "begin at this offset", default=0),
        Field("limit", kinds.Whole(1), f"{what} at most so many; the answer says where to go on"),
        Field("identity", IDENTITY.kind, IDENTITY.help),
        Field("dry_run", kinds.Flag(), "change nothing, only count", default=False),
    )


_TO: Final = Field("to", kinds.QueueName(), "the other queue; it is made where there is none", required=True)
_RANGES: Final = schema.list_of({"type": "array", "items": schema.OFFSET, "minItems": 2, "maxItems": 2})


def _answer(done: str, said: str, **more: schema.Schema) -> schema.Schema:
    return schema.object_of(
        {
            "selected": schema.said(schema.COUNT, "Messages that fit, those included that somebody holds."),
            done: schema.said(schema.COUNT, said),
            "held": schema.said(schema.COUNT, "Those that stay because somebody holds them."),
            "held_ranges": schema.said(_RANGES, f"Where these are; at most {TOLD_MAX} ranges."),
            "missing": schema.said(schema.COUNT, "Messages that could not be looked at."),
            "dry_run": schema.BOOLEAN,
            "next": schema.said(schema.or_null(schema.OFFSET), "Where to go on (from) behind a limit."),
            **more,
        }
    )


_THERE: Final = {
    "to": schema.STRING,
    "ranges": schema.said(_RANGES, f"Their offsets there; at most {TOLD_MAX} ranges."),
}
_PROBLEMS: Final = (
    "queue-not-found",
    "queue-deleted",
    "unsupported-media-type",
    "conflict",
    "too-many-searches",
)
_SENDING: Final = (*_PROBLEMS, "queue-full", "disk-full")

ROUTES: Final = (
    Route(
        "POST /v1/queues/{queue}/copy",
        copy,
        Right.READ,
        "Send the payloads and headers of messages to another queue, which needs the right to send there.",
        _answer(
            "copied",
            "Those that are in the other queue now.",
            **_THERE,
            repeated=schema.said(schema.COUNT, "Those of them that were there before, by the same key."),
        ),
        params=(QUEUE, KEY),
        body=Body(fields=(_TO, *_fields((*LIVING, "gone"), "copy"))),
        problems=_SENDING,
    ),
    Route(
        "POST /v1/queues/{queue}/move",
        move,
        Right.OPERATE,
        "Move messages that nobody holds to another queue: each is in one of the two at any moment. Needs "
        "also the right to read here, and to send there.",
        _answer("moved", "Those that are in the other queue now, and not here any more.", **_THERE),
        params=(QUEUE,),
        body=Body(fields=(_TO, *_fields(LIVING, "move"))),
        problems=_SENDING,
    ),
    Route(
        "POST /v1/queues/{queue}/withdraw",
        withdraw,
        Right.OPERATE,
        "Take messages that nobody holds out of the queue: ready ones, delayed ones and dead letters.",
        _answer("withdrawn", "Those that are gone now."),
        params=(QUEUE,),
        body=Body(fields=_fields(LIVING, "withdraw")),
        problems=_PROBLEMS,
    ),
)
