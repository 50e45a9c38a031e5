"""Stages and commits that are broken on purpose: what looks for that must find it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from penstock.log import adoption, retention, sealer
from penstock.log.adoption import Run, adoption_parts
from penstock.log.block import (
    FLAG_ELSEWHERE,
    KIND_CONTROL,
    KIND_MESSAGES,
    Buffer,
    Header,
    control_parts,
)
from penstock.log.committer import Committer
from penstock.log.errors import LogError
from penstock.log.recovery import _Recovery
from penstock.log.results import TransactionDone, TransactionReceipt
from penstock.log.sealer import Sealer
from penstock.log.segment import Segment, Span, merged
from penstock.log.snapshot import Capture
from penstock.log.staging import Staging, _Job
from penstock.log.state import LogState
from penstock.log.transactions import Transactions
from tests.build import interpreted_only
from tests.log.crash import Broken, run
from tests.log.test_stage_cuts import SCENES, after_every_call

# Faults are put in the place of methods, which compiled callers do not look up.
pytestmark = interpreted_only
SEEDS = 600


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def assert_scene_catches(name: str, sign: str = ".", *, backwards: bool = False) -> None:
    with pytest.raises((AssertionError, LogError, LookupError), match=sign):
        after_every_call(*SCENES[name], backwards=backwards)  # type: ignore[arg-type]


def assert_runs_catch(sign: str = "seed") -> None:
    for seed in range(SEEDS):
        try:
            run(seed)
        except Broken as broken:
            if sign in str(broken):
                return
    pytest.fail(f"the canary sings: {SEEDS} runs, and nobody says {sign!r}")


def test_a_stage_that_is_confirmed_before_the_sync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Staging._end

    def early(self: Staging, job: _Job) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Committer, "when_synced", Committer.when_written)
            patch.setattr(Sealer, "control", unsynced)
            end(self, job)

    monkeypatch.setattr(Staging, "_end", early)
    assert_scene_catches("stage", "LOST", backwards=True)


def unsynced(self: Sealer, fields: dict[str, object], now_us: int) -> None:
    parts = control_parts(fields)
    header = self.header(KIND_CONTROL, 0, 0, 0, parts, now_us)
    self._committer.add(header, parts, sync=False)


def test_a_commit_that_is_confirmed_before_the_sync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(self: Transactions, receipt: TransactionReceipt, done: TransactionDone) -> None:
        receipt(done)

    monkeypatch.setattr(Transactions, "_answer", early)
    assert_scene_catches("commit", "LOST")


def test_a_commit_that_is_numbered_before_what_came_before_it_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    init = Transactions.__init__

    def unsealed(
        self: Transactions, state: LogState, committer: Committer, sealer: Sealer, _: object, mark: Any
    ) -> None:
        init(self, state, committer, sealer, lambda now_us: None, mark)

    monkeypatch.setattr(Transactions, "__init__", unsealed)
    assert_runs_catch()


@pytest.mark.long
def test_a_commit_without_its_end_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_part(self: _Recovery, position: int) -> int:
        self._apply_part()
        return position

    monkeypatch.setattr(_Recovery, "_drop_part", keep_part)
    assert_runs_catch("transaction stage-")


def rows_of_open_stages(state: LogState) -> list[tuple[int, int]]:
    return [(stage.first, stage.end) for stage in state.stages]


def keep_rows(monkeypatch: pytest.MonkeyPatch, rows: Callable[[LogState], list[tuple[int, int]]]) -> None:
    class RowsKept:
        def __init__(self, state: LogState, _: object) -> None:
            self._rows = merged(rows(state))

        def of(self, segment: Segment, span: Span) -> list[tuple[int, int]]:
            first, end = span.first_offset, span.end_offset
            return [(max(a, first), min(b, end)) for a, b in self._rows if a < end and first < b]

    monkeypatch.setattr(retention, "_RowsKept", RowsKept)


def test_rows_that_nobody_keeps_for_the_messages_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_rows(monkeypatch, rows_of_open_stages)
    assert_scene_catches("trim")


def test_rows_that_go_before_the_segment_that_names_them_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kept are those of living messages: readers of the others find nothing."""

    def of_living(state: LogState) -> list[tuple[int, int]]:
        rows = rows_of_open_stages(state)
        for segment in state.segments.all:
            for header in state.segments.headers(segment) if segment.names else ():
                if header.kind == KIND_MESSAGES and header.flags & FLAG_ELSEWHERE:
                    found = state.segments._find(segment, header.position)
                    assert isinstance(found, adoption.Adoption)
                    pending = state.by_number[header.queue].pending
                    for first, end in pending.unsettled(header.first_offset, header.offset_end):
                        rows += [(row, rows_end) for _, row, rows_end in found.within(first, end)]
        return rows

    keep_rows(monkeypatch, of_living)
    assert_scene_catches("trim")


@pytest.mark.parametrize("field", ["opening", "time_us"])
def test_messages_that_are_as_old_as_their_stage_are_caught(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    header_of = adoption.adopted_header

    def as_staged(header: Header, stage: Header, offset: int, row: int) -> Header:
        found = header_of(header, stage, offset, row)
        setattr(found, field, getattr(stage, field))
        return found

    monkeypatch.setattr(adoption, "adopted_header", as_staged)
    assert_runs_catch("instead of")


@pytest.mark.parametrize(("field", "scene"), [("stages", "commit"), ("names", "trim")])
def test_snapshots_that_leave_something_out_are_caught(
    monkeypatch: pytest.MonkeyPatch, field: str, scene: str
) -> None:
    init = Capture.__init__

    def without(self: Capture, *arguments: Any) -> None:
        init(self, *arguments)
        self._meta[field] = []

    monkeypatch.setattr(Capture, "__init__", without)
    assert_scene_catches(scene)


def test_runs_that_are_exchanged_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchanged(runs: Sequence[Run]) -> list[Buffer]:
        return adoption_parts(runs[::-1])

    monkeypatch.setattr(sealer, "adoption_parts", exchanged)
    assert_scene_catches("commit")


def test_a_log_that_does_not_tell_its_format_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sealer, "format", lambda self: None)
    assert_scene_catches("stage", "format")
