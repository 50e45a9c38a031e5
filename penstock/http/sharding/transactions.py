"""Transactions over several logs: what `stages.py` is for one.

What is staged is in the logs of its queues; a stage for queues of several logs has a part in each, under one
id that all of them know. A commit goes from log to log as `log/transactions.py` says: the log of the key
decides, the others are prepared before and store their part behind that. It may end between any two steps,
with this process or with those it asks; so whoever leads a log looks after what is in doubt there (`Doubts`):
it asks the log of the key what became of it, and goes on with what that has decided and others have not
stored yet.

Rules that always hold:
  * A commit that is refused has stored nothing, and nothing comes of it later. One that is answered has
    stored everything. In between (503), committing again tells.
  * What every log has of a transaction is there at once; that of one log may be there before that of another.
  * Who waits for a decision waits as long as the log of the key is led by nobody.

How it fails: as `stages.py`; `no-leader` where a log is needed that nobody leads.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary

from penstock.control.frames import Buffer, Fields
from penstock.errors import PenstockError
from penstock.http.link import CallRefused
from penstock.http.problems import Problem
from penstock.http.stages.stages import (
    Committed,
    Parts,
    as_told,
    check_same,
    ranges_of,
    shown,
    unknown_transaction,
)
from penstock.log.fingerprint import KIND, Fingerprint
from penstock.log.results import Rows
from penstock.model.shards import shard_of

ATTEMPTS: Final = 5
"""Where front-ends commit the same key at the same moment."""

FINISH_SECONDS: Final = 10.0
"""So long a commit that is decided waits until everybody has stored it."""

AGAIN_SECONDS: Final = 0.2
LOOK_SECONDS: Final = 2.0
DOUBT_SECONDS: Final = 5.0
"""Whoever commits is left so much time before anybody asks what became of it."""

LONG_SECONDS: Final = 60.0
"""What is in doubt for longer is told."""

UNCERTAIN: Final = frozenset({"unavailable", "failed", "bug"})
"""Refusals behind which a decision may stand all the same."""

Answers = dict[int, Fields | PenstockError]

log = logging.getLogger("penstock.http")


class Logs(Protocol):
    """All logs of the cluster, wherever they are led."""

    @property
    def count(self) -> int: ...

    async def call(self, name: str, fields: Mapping[int, Fields]) -> Answers:
        """Ask some of them, by their numbers, each its own."""

    async def stage(self, shard: int, key: str, parts: Parts, alias: str, kind: str = KIND) -> Fields:
        """Stage a part in one of them."""

    async def send(self, shard: int, name: str, fields: Fields, *buffers: Buffer) -> Fields:
        """Ask one of them, with what comes along."""


class ShardedStages:
    """Has the face of `Stages`. Belongs to one loop."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of keys

    # --- what is done ----------------------------------------------------------------------------

    async def stage(self, key: str, parts: Parts) -> Fields:
        """As `Stages.stage`; its id is that of its parts in all logs."""
        by_shard: dict[int, list[Any]] = {}
        for part in parts:
            by_shard.setdefault(self._shard(part[0]), []).append(part)
        # How many parts there are stands in it: a commit that misses one is refused.
        alias = secrets.token_hex(15) + f"{len(by_shard) - 1:02x}" if len(by_shard) > 1 else ""
        told = await asyncio.gather(
            *(self._logs.stage(shard, key, its, alias) for shard, its in by_shard.items())
        )
        return {
            "stage": alias or told[0]["stage"],
            "count": sum(it["count"] for it in told),
            "bytes": sum(it["bytes"] for it in told),
        }

    async def commit(self, key: str, stage_ids: Sequence[str]) -> Committed:
        """As `Stages.commit`, of stages in any log."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            for attempt in range(ATTEMPTS):
                try:
                    return await self._commit(key, stage_ids)
                except CallRefused as refusal:
                    if refusal.kind != "attempt-over" or attempt == ATTEMPTS - 1:
                        raise as_told(key, refusal) from None
                await asyncio.sleep(AGAIN_SECONDS)
            raise AssertionError("the last attempt returns or raises")

    async def _commit(self, key: str, stage_ids: Sequence[str]) -> Committed:
        its_key = KIND + key
        home = self._shard(its_key)
        begun = await self._one(home, "begin", {"key": its_key})
        found = all_told(await self._every("totals", {"key": its_key, "stages": stage_ids}))
        by_shard, totals = _where(stage_ids, found)
        if begun["attempt"] is None:
            stored = await self._finished(its_key, begun)
            asked = None if by_shard is None else Fingerprint.of_totals(its_key, totals).totals()
            check_same(key, stage_ids, ranges_of(stored), begun["fingerprint"], asked)
            return Committed(ranges_of(stored), True)
        if by_shard is None:
            missing = f"some of these are not there any more: {', '.join(map(repr, stage_ids[:3]))}"
            raise CallRefused("no-stage", f"{missing}; stage all parts again")
        own = by_shard.pop(home, [])
        fields: Fields = {"key": its_key, "stages": own}
        if by_shard:
            prepared = await self._prepare(its_key, begun["attempt"], by_shard)
            fields["shares"] = {
                "attempt": begun["attempt"],
                "stages": list(stage_ids),
                "totals": prepared,
                "shards": {str(shard): its for shard, its in by_shard.items()},
            }
        try:
            done = await self._one(home, "commit", fields)
        except CallRefused as refusal:
            if refusal.kind not in UNCERTAIN:
                await self._unprepare(its_key, begun["attempt"], by_shard)
            raise
        if done["repeated"]:  # Another front-end was faster.
            await self._unprepare(its_key, begun["attempt"], by_shard)
            raise CallRefused(
                "attempt-over", f"transaction {its_key!r} was committed a moment ago; ask again"
            )
        stored = [*done["stored"], *await store_shares(self._logs, its_key, home, by_shard)]
        # What was staged for it besides is over.
        rest = {it: {"key": its_key} for it, its in found.items() if its["others"] and it not in by_shard}
        await self._logs.call("abort", rest)
        return Committed(ranges_of(stored), False)

    async def queues(self, key: str, stage_ids: Sequence[str]) -> list[str]:
        found = all_told(await self._every("totals", {"key": KIND + key, "stages": stage_ids}))
        return sorted(set(chain.from_iterable(it["queues"] for it in found.values())))

    async def identity(self, queue: str) -> str:
        """That of the queue that is there now."""
        row = (await self._one(self._shard(queue), "queue", {"queue": queue}))["row"]
        return str(row["identity"])

    async def abort(self, key: str) -> bool:
        """As `Stages.abort`. With a new attempt no commit that is under way can be decided any more."""
        its_key = KIND + key
        home = self._shard(its_key)
        try:
            if (await self._one(home, "begin", {"key": its_key}))["attempt"] is None:
                return True
            standing = all_told(await self._every("transaction", {"key": its_key}))
            for shard, its in standing.items():
                for attempt in its["prepared"]:
                    await end_doubt(self._logs, shard, its_key, attempt)
            all_told(await self._every("abort", {"key": its_key}))
            # Another one may have begun since, and have been decided before its log was told.
            return (await self._one(home, "transaction", {"key": its_key}))["stored"] is not None
        except CallRefused as refusal:
            raise as_told(key, refusal) from None

    async def standing(self, key: str) -> tuple[list[Fields] | None, list[Fields]]:
        """As `Stages.standing`."""
        its_key = KIND + key
        found = all_told(await self._every("transaction", {"key": its_key}))
        home = found.pop(self._shard(its_key))
        others = home["decision"] and home["decision"]["stored"]
        if others is None:
            others = chain.from_iterable(it["stored"] or () for it in found.values())
        stages: dict[str, Fields] = {}
        for row in chain(home["stages"], *(it["stages"] for it in found.values())):
            stage_id = row["alias"] or row["stage"]
            its = stages.setdefault(stage_id, {"stage": stage_id, "count": 0, "bytes": 0})
            its["count"] += row["count"]
            its["bytes"] += row["bytes"]
        if home["stored"] is None and not stages:
            raise unknown_transaction(key)
        if home["stored"] is None:
            return None, list(stages.values())
        return ranges_of([*home["stored"], *others]), list(stages.values())

    # --- steps -----------------------------------------------------------------------------------

    async def _finished(self, key: str, begun: Fields) -> list[Any]:
        """Where everything is of one that is decided."""
        decision = begun["decision"]
        if decision is None:
            return list(begun["stored"])
        others = decision["stored"]
        if others is None:
            others = await store_shares(
                self._logs, key, self._shard(key), _shares(decision), decision["rows"]
            )
        return [*begun["stored"], *others]

    async def _prepare(self, key: str, attempt: str, by_shard: Mapping[int, list[str]]) -> list[Any]:
        """All of them can store their part; what it has. Where one cannot, none waits for anything."""
        fields = {shard: {"key": key, "attempt": attempt, "stages": its} for shard, its in by_shard.items()}
        answers = await self._logs.call("prepare", fields)
        try:
            told = all_told(answers)
        except PenstockError:
            await self._unprepare(key, attempt, by_shard)
            raise
        return list(chain.from_iterable(it["totals"] for it in told.values()))

    async def _unprepare(self, key: str, attempt: str, shards: Iterable[int]) -> None:
        """Who does not hear it asks by himself."""
        await self._logs.call("unprepare", {it: {"key": key, "attempt": attempt} for it in shards})

    # --- asking ----------------------------------------------------------------------------------

    def _shard(self, name: str) -> int:
        return shard_of(name, self._logs.count)

    async def _one(self, shard: int, name: str, fields: Fields) -> Fields:
        return all_told(await self._logs.call(name, {shard: fields}))[shard]

    async def _every(self, name: str, fields: Fields) -> Answers:
        return await self._logs.call(name, dict.fromkeys(range(self._logs.count), fields))


async def store_shares(
    logs: Logs,
    key: str,
    home: int,
    shares: Mapping[int, Sequence[str]],
    rows: Rows = None,
    *,
    waits: bool = True,
) -> list[Any]:
    """What the log of the key has decided is stored in all others, and it is told so; where that is."""
    stored: dict[int, list[Any]] = {}
    left = dict(shares)
    until = asyncio.get_running_loop().time() + (FINISH_SECONDS if waits else 0)
    while left:
        fields: dict[int, Fields] = {
            it: {"key": key, "stages": list(its), "decided": True, "rows": rows} for it, its in left.items()
        }
        refused = None
        for shard, answer in (await logs.call("commit", fields)).items():
            if isinstance(answer, PenstockError):
                refused = answer
            else:
                stored[shard] = answer["stored"]
                del left[shard]
        if refused is not None:
            if asyncio.get_running_loop().time() >= until:
                raise Problem(
                    "unavailable",
                    f"transaction {shown(key.removeprefix(KIND))!r} is committed, and its messages in "
                    f"{len(left)} of {logs.count} logs follow as soon as these can store them ({refused}); "
                    f"commit again to hear where all are",
                    headers={"Retry-After": "1"},
                )
            await asyncio.sleep(AGAIN_SECONDS)
    flat = list(chain.from_iterable(stored[shard] for shard in sorted(stored)))
    if shares:
        # Where this is not heard, its log asks once more.
        await logs.call("finish", {home: {"key": key, "stored": flat}})
    return flat


async def end_doubt(logs: Logs, shard: int, key: str, attempt: str) -> None:
    """Ask what became of an attempt that a log is prepared for, and do so."""
    home = shard_of(key, logs.count)
    asked = {"key": key, "attempt": attempt, "of": shard}
    told = all_told(await logs.call("attempt", {home: asked}))[home]
    if told["stages"] is None:
        all_told(await logs.call("unprepare", {shard: {"key": key, "attempt": attempt}}))
    else:
        its = {"key": key, "stages": told["stages"], "decided": True, "rows": told["rows"]}
        all_told(await logs.call("commit", {shard: its}))


class Doubts:
    """Of the logs that are led here: what waits for others."""

    def __init__(self, logs: Logs, is_led: Callable[[int], bool]) -> None:
        self._logs = logs
        self._is_led = is_led
        self._shards: set[int] = set()  # that may have some
        self._since: dict[tuple[int, str, str], float] = {}
        self._told: set[tuple[int, str, str]] = set()
        self._looking: asyncio.Task[None] | None = None

    def look_at(self, shard: int) -> None:
        """It has just been opened, or takes part in something."""
        self._shards.add(shard)
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self) -> None:
        while self._shards:
            await asyncio.sleep(LOOK_SECONDS)
            for shard in sorted(self._shards):
                try:
                    await self.settle(shard)
                except PenstockError as error:  # It is asked again.
                    log.debug("log %d: what is in doubt stays so: %s", shard, error)
                except Exception:  # Else nobody would look at any of them any more, without a word.
                    log.exception("log %d: a fault in settling what is in doubt, which goes on", shard)
        self._looking = None

    async def settle(self, shard: int, after_seconds: float = DOUBT_SECONDS) -> None:
        """Go on with what has been in doubt for so long."""
        if not self._is_led(shard):
            self._shards.discard(shard)
            return
        told = all_told(await self._logs.call("doubts", {shard: {}}))[shard]
        now = asyncio.get_running_loop().time()
        seen = [(shard, key, attempt) for key, attempt in told["prepared"]]
        seen += [(shard, key, "") for key in told["unfinished"]]
        others = {it: since for it, since in self._since.items() if it[0] != shard}
        since = {it: self._since.get(it, now) for it in seen}
        self._since = others | since
        self._told &= self._since.keys()
        if not seen:
            self._shards.discard(shard)
        failed: PenstockError | None = None
        for it in seen:
            if now - since[it] < after_seconds:
                continue
            try:
                await self._end(*it)
            except PenstockError as error:
                failed = error
                if now - since[it] > LONG_SECONDS and it not in self._told:
                    self._told.add(it)
                    name = shown(it[1].removeprefix(KIND))
                    log.warning("transaction %r is in doubt in log %d: %s", name, shard, error)
        if failed is not None:
            raise failed

    async def _end(self, shard: int, key: str, attempt: str) -> None:
        name = shown(key.removeprefix(KIND))
        if attempt:
            await end_doubt(self._logs, shard, key, attempt)
            log.info("transaction %r: log %d has asked what became of it, and goes by that", name, shard)
            return
        begun = all_told(await self._logs.call("begin", {shard: {"key": key}}))[shard]
        decision = begun["decision"]
        if decision is not None and decision["stored"] is None:
            await store_shares(self._logs, key, shard, _shares(decision), decision["rows"], waits=False)
            log.info("transaction %r, which log %d has decided, is stored in all others now", name, shard)


def _where(
    stage_ids: Sequence[str], found: Mapping[int, Fields]
) -> tuple[dict[int, list[str]] | None, list[Any]]:
    """Which stages each log has, in the order of the commit, and what all bring. None: one is missing."""
    by_shard: dict[int, list[str]] = {}
    totals: list[Any] = []
    for shard, its in found.items():
        its_ids = [stage_id for stage_id, _, _ in its["found"]]
        if its_ids:
            by_shard[shard] = its_ids
        totals += [total for _, total, _ in its["found"]]
    rows = [row for its in found.values() for row in its["found"]]
    in_one_log = {stage_id for stage_id, _, is_alias in rows if not is_alias}
    parts = Counter(stage_id for stage_id, _, is_alias in rows if is_alias)
    # One that has lapsed in some of its logs would be committed in part.
    is_whole = all(it in in_one_log or parts[it] == 1 + int(it[-2:], 16) for it in stage_ids)
    return by_shard if is_whole else None, totals


def _shares(decision: Fields) -> dict[int, list[str]]:
    return {int(shard): its for shard, its in decision["shards"].items()}


def all_told(answers: Answers) -> dict[int, Fields]:
    """All answers, where none is a no."""
    told: dict[int, Fields] = {}
    for shard, answer in answers.items():
        if isinstance(answer, PenstockError):
            raise answer
        told[shard] = answer
    return told
