"""Stages: parts of transactions that are in the log, and are nobody's messages yet.

The messages of a stage are rows of the stage queue (`repairs.STAGE_QUEUE`), stored as any message is. A
control block behind them says what they are for: with it the stage is there, and can be committed. What a
commit makes of them stands in `adoption.py`. All stages of a key are over with its commit, when it is
aborted, and when for `stage_seconds` nobody has done either. Where a log has a part of a transaction and is
prepared to store it, its stages are kept until it is told what was decided.

Rows are alive while an open stage has them, while a stage is being written, and while a segment has adoption
blocks that name them. In between, and where a crash has left some that no control block speaks of, retention
takes them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock.log.results import StageInfo

STAGES_MAX = 100_000


class StagePart(NamedTuple):
    """What a stage has for one queue: rows of the stage queue that follow upon each other."""

    queue: str
    first: int
    end: int
    payload_bytes: int
    ttl_min_us: int  # the shortest of its messages; 0: none has one
    protocol: str
    reason: int  # of dead letters; 0: they are messages for consumers
    letters: int  # the row with the offsets of the dead letters whose payloads these are; -1: of none
    identity: str  # of the queue whose letters they are
    delayed: bool = False  # some of its messages are


class Stage:
    """A part of a transaction."""

    __slots__ = ("damage", "end", "first", "info", "parts", "synced", "totals", "was")

    def __init__(
        self, info: StageInfo, first: int, end: int, parts: list[StagePart], totals: list[Any], was: str
    ) -> None:
        self.info = info
        self.first = first
        self.end = end
        self.parts = parts
        self.totals = totals  # see `fingerprint.py`
        self.was = was  # another id: in an earlier version, which kept files; of its parts in several logs
        self.synced = False
        self.damage = ""  # why it cannot be committed

    def fields(self) -> dict[str, Any]:
        """What is written down of it."""
        return {
            "stage": list(self.info),
            "first": self.first,
            "end": self.end,
            "parts": self.parts,
            "totals": self.totals,
            "was": self.was,
            "damage": self.damage,
        }


def stage_of(fields: dict[str, Any]) -> Stage:
    """A stage that was written down, and synced."""
    parts = [StagePart(*part) for part in fields["parts"]]
    info = StageInfo(*fields["stage"])
    stage = Stage(info, fields["first"], fields["end"], parts, fields["totals"], fields["was"])
    stage.synced = True
    stage.damage = fields["damage"]
    return stage


class OpenStages:
    """All that are neither committed nor gone."""

    def __init__(self) -> None:
        self._by_id: dict[str, Stage] = {}  # by both ids of one that has two
        self._by_key: dict[str, dict[str, Stage]] = {}  # that which was staged for last at the end
        self.prepared: dict[str, list[str]] = {}  # attempts, by key
        self.count = 0
        self.stored_bytes = 0

    def __iter__(self) -> Iterator[Stage]:
        for stages in self._by_key.values():
            yield from stages.values()

    def put(self, stage: Stage) -> None:
        """One more."""
        info = stage.info
        stages = self._by_key.pop(info.key, {})
        stages[info.stage] = stage
        self._by_key[info.key] = stages
        self._by_id[info.stage] = stage
        if stage.was:
            self._by_id[stage.was] = stage
        self.count += 1
        self.stored_bytes += info.stored_bytes

    def drop(self, key: str) -> list[Stage]:
        """Those of a key are over; which they were."""
        self.prepared.pop(key, None)
        gone = list(self._by_key.pop(key, {}).values())
        for stage in gone:
            self._by_id.pop(stage.info.stage, None)
            self._by_id.pop(stage.was, None)
            self.count -= 1
            self.stored_bytes -= stage.info.stored_bytes
        return gone

    def find(self, stage_id: str) -> Stage | None:
        return self._by_id.get(stage_id)

    def of(self, key: str) -> list[Stage]:
        """Those of a key, in the order in which they came."""
        return list(self._by_key.get(key, {}).values())

    def prepare(self, key: str, attempt: str) -> None:
        """They stay until this attempt is over."""
        attempts = self.prepared.setdefault(key, [])
        if attempt not in attempts:
            attempts.append(attempt)

    def unprepare(self, key: str, attempt: str) -> bool:
        """It is over; whether it was not before."""
        attempts = self.prepared.get(key, [])
        if attempt not in attempts:
            return False
        attempts.remove(attempt)
        if not attempts:
            del self.prepared[key]
        return True

    def oldest(self) -> tuple[str, int] | None:
        """The key that nobody has staged anything for for longest, and since when, but for those prepared."""
        for key, stages in self._by_key.items():
            if key not in self.prepared:
                return key, next(reversed(stages.values())).info.time_us
        return None

    def lose(self, first: int, end: int, why: str) -> None:
        """These rows cannot be read."""
        for stage in self if first < end else ():
            if stage.first < end and first < stage.end:
                stage.damage = stage.damage or why

    def step(self, by_us: int) -> None:
        """The time was put forward."""
        for stage in self:
            stage.info = stage.info._replace(time_us=stage.info.time_us + by_us)
