"""Stages: parts of transactions that wait in the log for their commit, and what becomes of transactions.

A transaction is a key that its owner makes up. Under it any number of parts are staged. Each is in the log
before it is confirmed, and nobody sees it there. Then either

    commit   some of them become messages, in the order given, all at once; those that are not named are the
             leftovers of failed tries
    abort    all of them go away
    neither  for `stage-seconds`: they go away too, which the broker tells in its log

The first process does all of that, and remembers what was committed. Here stands what it means to callers.

Rules that always hold:
  * A key that was committed stays committed: to commit it again, with the same stages or with some that have
    the same messages, changes nothing and is answered as the first time; to abort it does nothing. With
    stages that have other messages it is the problem `key-reused`, with others that are gone
    `stage-not-found`: nobody can say what was in them.
  * Of stages, the first process gets no more at a time than `ON_THEIR_WAY_BYTES`, or one: what waits, waits
    here, as a part of `bodies-bytes-max`. A large one goes in pieces, none of which holds up its loop.

How it fails: a `Problem`, or what the link says.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Final, NamedTuple

from penstock.control.batches import pack_batches
from penstock.control.frames import Fields
from penstock.http.link import CALL_SECONDS, CallRefused, Link
from penstock.http.problems import Problem
from penstock.http.stages.old import TakeOver
from penstock.log.fingerprint import KIND, OF_STREAMS, Fingerprint, Totals, is_of_stages
from penstock.model.batch import Batch

ON_THEIR_WAY_BYTES: Final = 32 << 20
PIECE_BYTES: Final = 2 << 20
MESSAGE_BYTES: Final = 16
"""What a message takes besides its payload, about."""

SLOW_BYTES: Final = 1 << 20
"""A disk, or a cluster, takes at least so much in a second."""

COPIED: Final = (
    "is this a copy of another query's checkpoint, or is the option queue another one since then? Begin with "
    "a new checkpoint"
)

STAGE_FIELDS: Final = ("stage", "count", "bytes")

Parts = Sequence[tuple[str, Batch]]


class Committed(NamedTuple):
    """The outcome of a commit."""

    stored: list[Fields]
    repeated: bool


OWNER: Final = "\x1f"
"""Between a key and who has it for itself: in no key that is given."""


def owned(key: str, owner: str) -> str:
    """The key as the log has it, of somebody whose keys are nobody else's."""
    return f"{key}{OWNER}{owner}"


def shown(key: str) -> str:
    return key.partition(OWNER)[0]


class Stages:
    """Belongs to one loop."""

    def __init__(self, data: str, link: Link) -> None:
        self._link = link
        self._old = TakeOver(data, self._call, self._stage)
        self._numbers = count(1)
        self._on_their_way = 0  # bytes of stages
        self._door = asyncio.Lock()  # who comes first goes first
        self._left = asyncio.Event()

    async def start(self) -> None:
        """Take over what earlier versions have left."""
        await self._old.start()

    async def stop(self) -> None:
        await self._old.stop()

    # --- what is done ----------------------------------------------------------------------------

    async def stage(self, key: str, parts: Parts, alias: str = "", kind: str = KIND) -> Fields:
        """Keep a part of a transaction; it is synced when this returns. `alias`: another id for it; `kind`:
        what the log has before the key."""
        await self._old.check(key)
        return await self._stage(key, parts, alias, kind)

    async def commit(self, key: str, stage_ids: Sequence[str]) -> Committed:
        """Store exactly these stages, once. Answered when they are durable."""
        await self._old.check(key)
        done = await self._call("commit", key, {"stages": stage_ids})
        stored = ranges_of(done["stored"])
        if done["repeated"]:
            check_same(key, stage_ids, stored, done["fingerprint"], done["asked"])
        return Committed(stored, done["repeated"])

    async def queues(self, key: str, stage_ids: Sequence[str]) -> list[str]:
        """What these stages, as far as they are there, have messages for."""
        queues: list[str] = (await self._call("transaction", key, {"stages": stage_ids}))["queues"]
        return queues

    async def identity(self, queue: str) -> str:
        """That of the queue that is there now; who asks is refused where there is none."""
        answer = await self._link.call("queue", {"queue": queue})
        return str(answer.fields["row"]["identity"])

    async def abort(self, key: str) -> bool:
        """Let go of all its stages; whether it was committed before, which stays."""
        await self._old.check(key)
        return (await self._call("abort", key))["stored"] is not None

    async def standing(self, key: str) -> tuple[list[Fields] | None, list[Fields]]:
        """What is stored, None where it is open, and what is staged; a Problem where there is neither."""
        await self._old.check(key)
        known = await self._call("transaction", key)
        if known["stored"] is None and not known["stages"]:
            raise unknown_transaction(key)
        stages = [{name: it[name] for name in STAGE_FIELDS} for it in known["stages"]]
        return None if known["stored"] is None else ranges_of(known["stored"]), stages

    # --- the first process -----------------------------------------------------------------------

    async def _call(
        self,
        name: str,
        key: str,
        fields: Fields | None = None,
        parts: Parts = (),
        seconds: float = CALL_SECONDS,
        kind: str = KIND,
    ) -> Fields:
        """Its answer about a key, which the log has with what all keys of transactions begin with."""
        packed, buffers = pack_batches([batch for _, batch in parts])
        named = [{"queue": queue, "batch": it} for (queue, _), it in zip(parts, packed, strict=True)]
        said = {"key": kind + key, "parts": named, **(fields or {})}
        try:
            return (await self._link.call(name, said, *buffers, seconds=seconds)).fields
        except CallRefused as refusal:
            raise as_told(key, refusal) from None

    async def _stage(self, key: str, parts: Parts, was: str = "", kind: str = KIND) -> Fields:
        """What it has, and under which id. `was`: its id in an earlier version."""
        totals = await asyncio.to_thread(_totals, key, parts)
        size = sum(
            len(batch.payload) + MESSAGE_BYTES * len(batch) + sum(map(len, batch.headers or ()))
            for _, batch in parts
        )
        async with self._door:
            while self._on_their_way and self._on_their_way + size > ON_THEIR_WAY_BYTES:
                self._left.clear()
                await self._left.wait()
            self._on_their_way += size
        number = next(self._numbers)
        try:
            pieces = _pieces(parts)
            piece = next(pieces)
            for following in pieces:
                await self._call("stage", key, {"number": number, "more": True}, piece, kind=kind)
                piece = following
            fields = {"number": number, "totals": totals, "was": was}
            done = await self._call("stage", key, fields, piece, CALL_SECONDS + size / SLOW_BYTES, kind)
        except BaseException:
            self._forget(number)
            raise
        finally:
            self._on_their_way -= size
            self._left.set()
        return {name: done[name] for name in STAGE_FIELDS}

    def _forget(self, number: int) -> None:
        """Pieces of a stage that were sent are of no use. Who is gone need not be told."""
        gone = self._link.call("stage", {"number": number, "gone": True})
        asyncio.ensure_future(gone).add_done_callback(lambda told: told.cancelled() or told.exception())


def as_told(key: str, refusal: CallRefused) -> CallRefused:
    """What the first process says of a key, in the words of who has given it."""
    told = str(refusal).replace(repr(KIND + key), repr(shown(key)))
    if refusal.kind in ("no-stage", "stage-damaged"):
        told = f"transaction {shown(key)!r}: {told}"
    return CallRefused(refusal.kind, told)


def unknown_transaction(key: str) -> Problem:
    return Problem(
        "transaction-not-found",
        f"there is no transaction {shown(key)!r}: nothing is staged for it, and it was not committed lately",
    )


def _pieces(parts: Parts) -> Iterator[Parts]:
    """The same messages, about `PIECE_BYTES` of payload at a time."""
    piece: list[tuple[str, Batch]] = []
    room = PIECE_BYTES
    for queue, batch in parts:
        lo, bounds = 0, batch.bounds
        while lo < len(batch):
            hi = max(bisect_right(bounds, bounds[lo] + room) - 1, lo + 1)
            piece.append((queue, batch if hi - lo == len(batch) else batch.cut(lo, hi)))
            room -= bounds[hi] - bounds[lo]
            lo = hi
            if room <= 0 or lo < len(batch):
                yield piece
                piece, room = [], PIECE_BYTES
    yield piece


def _totals(key: str, parts: Parts) -> Totals:
    fingerprint = Fingerprint(KIND + key)
    fingerprint.add(parts)
    return fingerprint.totals()


def ranges_of(stored: Iterable[Sequence[Any]]) -> list[Fields]:
    """Where messages are; ranges of a queue that follow upon each other as one."""
    joined: list[Fields] = []
    for queue, first, end, _ in stored:
        if joined and (joined[-1]["queue"], joined[-1]["offset_end"]) == (queue, first):
            joined[-1]["offset_end"] = end
        else:
            joined.append({"queue": queue, "offset_start": first, "offset_end": end})
    return joined


# --- the same key again ------------------------------------------------------------------------------


def check_same(
    key: str, stage_ids: Sequence[str], stored: list[Fields], fingerprint: str, totals: Totals | None
) -> None:
    """Whether these stages bring what is stored under their key already. `totals`: what they bring."""
    if totals is None:
        # Somebody asks again because an answer was lost, about stages that are over since then. Other stages
        # of the key are those of a second writer, and went when the first one committed.
        if not is_of_stages(fingerprint, stage_ids):
            raise Problem(
                "stage-not-found",
                f"transaction {shown(key)!r} was committed with other stages, with which these cannot be "
                f"compared: some are gone, of {_some([repr(it) for it in stage_ids])}; stage all parts again",
            )
        return
    asked = Fingerprint.of_totals(KIND + key, [totals])
    if (KIND + key).startswith(OF_STREAMS):
        queues = {it["queue"] for it in stored}
        if queues and not queues.issuperset(asked.counts()):
            raise _reused(key, stored, asked, COPIED)
    elif fingerprint and stage_ids and not asked.is_of(fingerprint):
        raise _reused(key, stored, asked, "use a new key for what is new")


def _reused(key: str, stored: list[Fields], asked: Fingerprint, advice: str) -> Problem:
    counts = sorted(asked.counts().items())
    there = [
        f"{it['offset_end'] - it['offset_start']} in {it['queue']!r} from offset {it['offset_start']} on"
        for it in stored
    ]
    here = [f"{count} for {queue!r}" for queue, count in counts]
    return Problem(
        "key-reused",
        f"transaction {shown(key)!r} was committed for other messages ({_some(there)}) than are staged now "
        f"({_some(here)}), of which none is stored; {advice}",
        stored=stored,
        asked=[{"queue": queue, "count": count} for queue, count in counts],
    )


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more or "none that are new"
