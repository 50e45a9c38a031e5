"""Nothing confirmed is lost: hundreds of crashes in seeded runs, and proof that they would notice.

`crash.py` says what must hold. A failure names its seed and the command that repeats it. The first
seeds are the same in every run; the others follow a random number, so that each run of the tests looks
at something new. `make test-long` looks at as many as there is time for.
"""

import logging
import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from penstock.log.block import KIND_CONTROL, control_parts
from penstock.log.committer import Committer, Group
from penstock.log.disk import Disk
from penstock.log.recovery import _Recovery
from penstock.log.sealer import Sealer
from penstock.log.segments import Segments
from tests.build import interpreted_only
from tests.log.canaries import ByPosition, compact_as_before
from tests.log.crash import Broken, run

FIXED_SEEDS = 100
STAGES_LAPSE = 106
NEW_SEEDS = 25
CANARY_SEEDS = 1500


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Runs break the log on purpose: what it has to say about that is not for people."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_nothing_confirmed_is_lost() -> None:
    base = int(os.environ.get("PENSTOCK_TEST_SEED", random.randrange(10**6, 10**9)))
    total: Counter[str] = Counter()
    for seed in (*range(FIXED_SEEDS), STAGES_LAPSE, *range(base, base + NEW_SEEDS)):
        total += run(seed)
    # The seeds must have been everywhere, or the runs prove little.
    for what, least in {
        "cut": 250,
        "cut within a call": 50,
        "cut while opening": 15,
        "kill": 35,
        "closed": 25,
        "failed": 5,
        "receipts": 500,
        "refused": 12,
        "messages taken back": 250,
        "rename spare": 12,
        "rename snapshot": 125,
        "rename .1.seg.tmp": 2,
        "remove .seg": 25,
        "scattered": 250,
        "slices": 50,
        "stages": 100,
        "commits": 25,
        "stages lapsed": 1,
        "written by the loop": 300,
        "turns while a sync is under way": 200,
    }.items():
        assert total[what] >= least, f"{what}: {total[what]} times, new seeds from {base}: {total}"


# --- canaries: a log that is broken on purpose must be caught ---------------------------------------


def assert_caught(sign: str = "seed", *, seen_at: int = 0) -> None:
    """The runs must notice, and say what it is about, where that can be foreseen. The seed that did when the
    canary was written comes first; where it does no longer, another will."""
    complaints = []
    for seed in (seen_at, *range(CANARY_SEEDS)):
        try:
            run(seed)
        except Broken as broken:
            complaints.append(str(broken))
            if sign in str(broken):
                return
    pytest.fail(f"the canary sings: {CANARY_SEEDS} runs, {len(complaints)} complaints, none says {sign!r}")


@interpreted_only  # The fault is put in place of a method, which compiled callers do not look up.
def test_a_receipt_before_the_sync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is synced, a moment later: when the next group is written."""
    put, sync = Committer._put, Committer._sync
    late: set[Committer] = set()

    def sync_later(self: Committer, keep: int) -> list[float]:
        late.add(self)
        return []

    def sync_and_put(self: Committer, group: Group) -> None:
        if self in late:
            sync(self, keep=max(self._files, default=-1))
            late.remove(self)
        put(self, group)

    monkeypatch.setattr(Committer, "_sync", sync_later)
    monkeypatch.setattr(Committer, "_put", sync_and_put)
    assert_caught("LOST", seen_at=5)


@interpreted_only  # The fault is put in place of a method, which compiled callers do not look up.
def test_a_receipt_before_the_sync_of_what_the_loop_wrote_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's thread syncs it, but what the loop tells does not wait for that."""
    ended = Committer._ended

    def told(self: Committer, group: Group, took: list[float] | None, error: BaseException | None) -> None:
        at_once = took is None and error is None and group.sync
        ended(self, group, [] if at_once else took, error)
        if at_once:
            self._start_sync()

    monkeypatch.setattr(Committer, "_ended", told)
    assert_caught("LOST", seen_at=5)


@interpreted_only  # The fault is put in place of a method, which compiled callers do not look up.
def test_a_sync_that_claims_what_was_written_meanwhile_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = Committer._sync_written

    def claim(self: Committer) -> tuple[int, list[float]]:
        _, took = sync(self)
        return self._segments.written, took

    monkeypatch.setattr(Committer, "_sync_written", claim)
    assert_caught("LOST", seen_at=11)


@interpreted_only  # The fault is put in place of a method, which compiled callers do not look up.
def test_a_log_that_never_syncs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Committer, "_sync", lambda self, keep: [])
    assert_caught("LOST", seen_at=6)


def test_half_a_transaction_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_part(self: _Recovery, position: int) -> int:
        self._apply_part()
        return position

    monkeypatch.setattr(_Recovery, "_drop_part", keep_part)
    assert_caught("is there in part", seen_at=16)


@interpreted_only  # The fault is put in place of a method, which compiled callers do not look up.
def test_an_opening_that_is_not_synced_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a crash can take back the number of an opening whose ids were given out."""

    def control(self: Sealer, fields: dict[str, object], now_us: int) -> None:
        parts = control_parts(fields)
        header = self.header(KIND_CONTROL, 0, 0, 0, parts, now_us)
        self._committer.add(header, parts, sync=fields["op"] != "opening")

    monkeypatch.setattr(Sealer, "control", control)
    assert_caught("has named", seen_at=11)


def test_a_torn_tail_that_stays_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then what one crash took back can come back with the next one."""
    monkeypatch.setattr(_Recovery, "_cut", lambda self, segment, file, position, at: None)
    assert_caught(seen_at=1)


def test_what_a_killed_process_has_not_synced_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then an opening shows as synced what is in the kernel's memory only: messages, events, or a name."""
    monkeypatch.setattr(_Recovery, "_write_again", lambda self: None)
    assert_caught(seen_at=302)


def test_compacting_that_makes_a_segment_longer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    compact_as_before(monkeypatch)
    assert_caught("longer than what it was made from", seen_at=3)


@interpreted_only  # The fault is put in place of a method, which compiled callers do not look up.
@pytest.mark.long
def test_a_block_of_another_segment_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that overlap, nobody who looks for that, and blocks that are remembered by position alone."""
    compact_as_before(monkeypatch)
    monkeypatch.setattr(_Recovery, "_tell_overlap", lambda self, overlap: None)
    init = Segments.__init__

    def by_position(self: Segments, disk: Disk, cache_bytes: int) -> None:
        init(self, disk, cache_bytes)
        self._cache = ByPosition()

    monkeypatch.setattr(Segments, "__init__", by_position)
    assert_caught(seen_at=719)
