"""Moving: messages out of a queue of one log into a queue of another, each of them once.

They are staged where they go to, and the log that they are in decides: with the step that takes them out it
says which of them the other one has to store (`log/transactions.py`). Until then nothing has happened; from
then on they come, whoever dies (`Doubts`).

How it fails: as a commit. What is refused has moved nothing; a `Problem` unavailable says that nobody knows.
"""

import secrets
from typing import Any, Final, NamedTuple

from penstock.control.frames import Fields
from penstock.errors import PenstockError
from penstock.http.link import CallRefused
from penstock.http.problems import Problem
from penstock.http.sharding.transactions import UNCERTAIN, Logs, all_told, store_shares
from penstock.model.batch import Batch
from penstock.model.shards import shard_of

MOVES: Final = "move/"
"""What keys of moves begin with in the log."""


class Moved(NamedTuple):
    messages: int
    stored: list[Any] | None  # queue, first offset, end; None: they are on their way


async def move(logs: Logs, queue: str, batch: Batch) -> Moved:
    """The messages that a batch `moves` leave their queue, as far as nobody holds them, for `queue`."""
    assert batch.moves is not None
    home, there = shard_of(batch.source, logs.count), shard_of(queue, logs.count)
    key = _key(home, logs.count)
    staged = await logs.stage(there, key.removeprefix(MOVES), [(queue, _new(batch))], "", MOVES)
    stages = [staged["stage"]]
    try:
        attempt = all_told(await logs.call("begin", {home: {"key": key}}))[home]["attempt"]
        prepare = {"key": key, "attempt": attempt, "stages": stages}
        all_told(await logs.call("prepare", {there: prepare}))
    except PenstockError:
        await _let_go(logs, there, key)
        raise
    fields: Fields = {"key": key, "attempt": attempt, "queue": batch.source, "identity": batch.identity}
    fields |= {"count": len(batch), "stages": {str(there): stages}}
    try:
        done = await logs.send(home, "move", fields, batch.moves.tobytes())
    except CallRefused as refusal:
        if refusal.kind not in UNCERTAIN:
            await logs.call("unprepare", {there: {"key": key, "attempt": attempt}})
            await _let_go(logs, there, key)
            raise
        raise _unknown(batch, queue, refusal) from None
    except Problem as problem:
        raise _unknown(batch, queue, problem) from None
    count = sum(end - first for first, end in done["rows"])
    try:
        return Moved(count, await store_shares(logs, key, home, {there: stages}, done["rows"]))
    except Problem:
        return Moved(count, None)


def _key(home: int, count: int) -> str:
    """A new one, that this log decides about."""
    while shard_of(key := MOVES + secrets.token_hex(16), count) != home:
        pass
    return key


def _new(batch: Batch) -> Batch:
    """Where they go to they are messages as others are."""
    staged = batch.cut(0, len(batch))
    staged.identity = ""
    return staged


async def _let_go(logs: Logs, shard: int, key: str) -> None:
    """Nothing comes of what is staged. Where that is not heard, it lapses."""
    await logs.call("abort", {shard: {"key": key}})


def _unknown(batch: Batch, queue: str, error: PenstockError) -> Problem:
    return Problem(
        "unavailable",
        f"it is not known whether {len(batch)} messages of queue {batch.source!r} were moved to {queue!r} "
        f"({error}): each is in one of the two, or comes there in a moment. Made again, the same call moves "
        f"what is left",
        headers={"Retry-After": "1"},
    )
