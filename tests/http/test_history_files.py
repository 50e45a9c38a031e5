"""The files of the history: what was written is read again; coarse steps are the sums of fine ones; whatever
a crash, a bad disk or a clock does to them, the rest is shown and nobody fails."""

import contextlib
import logging
import os
import random
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.http.history import chunks, folder
from penstock.http.history.chunks import CUT, FRESH, HEADER_BYTES, Chunk, Header
from penstock.http.history.folder import DAY, HOUR, LEVELS, Folder, Part, Rows, minute, told_in_full
from penstock.http.history.keeper import STEPS, filled, fitting
from penstock.http.history.steps import (
    COUNTED,
    EMPTY,
    NOTHING,
    STANDING,
    STEP_SECONDS,
    WHOLE,
    Key,
    Step,
    coarser,
    column_of,
    joined,
)

T0 = 1_790_000_000 // DAY * DAY
ORDERS: Key = ("orders", "0123456789ab")

SMALL = st.integers(0, 1 << 40)
SPREADS = st.dictionaries(st.integers(0, 127), st.integers(1, 1 << 20), max_size=5)


def step_at(at: int) -> st.SearchStrategy[Step]:
    oldest = st.integers(0, (at + STEP_SECONDS) * 10)
    standing = st.tuples(*(oldest if name == "oldest" else SMALL for name in STANDING))
    return st.builds(
        Step,
        st.just(at),
        st.tuples(*(SMALL for _ in COUNTED)),
        standing,
        st.tuples(SPREADS, SPREADS, SPREADS),
    )


@st.composite
def steps(draw: st.DrawFn, most: int = 40) -> list[Step]:
    slots = draw(st.lists(st.integers(0, HOUR // STEP_SECONDS - 1), unique=True, max_size=most))
    return [draw(step_at(T0 + slot * STEP_SECONDS)) for slot in sorted(slots)]


KEYS = st.tuples(st.text(min_size=1, max_size=20), st.text("0123456789abcdef", min_size=12, max_size=12))


# --- steps ----------------------------------------------------------------------------------------------


@given(steps())
def test_coarse_steps_are_the_sums_of_fine_ones_whichever_way_they_are_made(fine: list[Step]) -> None:
    for seconds in STEPS:
        once = list(coarser(fine, seconds))
        for between in STEPS:
            if seconds % between == 0:
                assert list(coarser(coarser(fine, between), seconds)) == once
        for column in range(len(COUNTED)):
            assert sum(it.counted[column] for it in once) == sum(it.counted[column] for it in fine)
        for which in range(3):
            total = sum(sum(it.spreads[which].values()) for it in fine)
            assert sum(sum(it.spreads[which].values()) for it in once) == total
        assert [it.standing for it in once[-1:]] == [it.standing for it in fine[-1:]]
        assert all(it.at % seconds == 0 for it in once)


def test_joining_leaves_its_parts_as_they_are() -> None:
    one, two = (
        Step(T0, (1,) * len(COUNTED), (5,) * len(STANDING), ({1: 1}, {}, {})),
        Step(T0 + 10, (2,) * len(COUNTED), EMPTY, ({1: 2, 9: 1}, {3: 3}, {})),
    )
    both = joined([one, two], T0)
    assert both == Step(T0, (3,) * len(COUNTED), EMPTY, ({1: 3, 9: 1}, {3: 3}, {}))
    assert one.spreads[0] == {1: 1}


@pytest.mark.parametrize(
    ("label", "column"),
    [
        ("requeued", "requeued"),
        ("returned:consumer-lost", "requeued"),
        ("delayed", "requeued"),
        ("dead:expired", "dead:expired"),
        ("expired:expired", "expired"),
        ("withdrawn:purged", "withdrawn"),
        ("redriven:operator", "redriven"),
        ("acked", ""),
        ("accepted", ""),
        ("held", ""),
    ],
)
def test_an_event_counts_for_one_column(label: str, column: str) -> None:
    assert column_of(label) == (COUNTED.index(column) if column else -1)


# --- chunks ---------------------------------------------------------------------------------------------


@given(st.dictionaries(KEYS, steps(3), max_size=3), st.integers(0, 3))
def test_a_chunk_is_read_as_it_was_written(rows: Rows, flags: int) -> None:
    assume(any(rows.values()))  # The whole is in all of them.
    raw = chunks.encode(rows, T0, STEP_SECONDS, 0, flags, 7)
    header = chunks.read_header(raw)
    assert header is not None
    assert (header.flags, header.shelf, header.start) == (flags, 7, T0)
    full = {key: its for key, its in rows.items() if its}
    assert chunks.decode(raw[HEADER_BYTES:], header) == full
    for key in full:
        assert chunks.decode(raw[HEADER_BYTES:], header, key.__eq__) == {key: full[key]}


def of_minute(at: int, rng: random.Random, queues: int = 3) -> Rows:
    rows: Rows = {WHOLE: []}
    for begin in range(at, at + 60, STEP_SECONDS):
        rows[WHOLE].append(Step(begin, (1, *NOTHING[1:]), EMPTY))
        for number in range(queues):
            counted = (0, *(rng.randrange(1000) for _ in COUNTED[1:]))
            stands = tuple(begin * 10 - 5 if name == "oldest" else rng.randrange(99) for name in STANDING)
            spread = {rng.randrange(128): rng.randrange(1, 99) for _ in range(6)}
            rows.setdefault((f"q{number}", f"{number:012x}"), []).append(
                Step(begin, counted, stands, (spread, dict(spread), {}))
            )
    return rows


def walked(raw: bytes) -> tuple[list[Chunk], int]:
    """The chunks of a file, and how many bytes belong to none."""
    lost = 0

    def damaged(at: int, length: int) -> None:
        nonlocal lost
        assert length > 0
        lost += length

    return list(chunks.walk(lambda at, length: raw[at : at + length], len(raw), damaged)), lost


def readable(raw: bytes) -> list[Rows]:
    found = []
    for chunk in walked(raw)[0]:
        body = raw[chunk.position + HEADER_BYTES :][: chunk.header.length]
        try:
            found.append(chunks.decode(body, chunk.header))
        except chunks.ChunkDamaged:
            continue
    return found


def test_any_cut_leaves_the_chunks_before_it_and_any_flipped_bit_the_others() -> None:
    rng = random.Random(3)
    minutes = [of_minute(T0 + 60 * number, rng, 2) for number in range(3)]
    parts = [minute(rows, 0, T0 + 60 * number) for number, rows in enumerate(minutes)]
    raw = b"".join(parts)
    ends = [sum(map(len, parts[: number + 1])) for number in range(3)]
    for cut in range(len(raw)):
        whole = sum(end <= cut for end in ends)
        assert readable(raw[:cut]) == minutes[:whole], cut
        found, lost = walked(raw[:cut])
        assert len(found) == whole
        assert lost == cut - ([0, *ends][whole])
    for place in range(len(raw)):
        bad = bytearray(raw)
        bad[place] ^= 1 << rng.randrange(8)
        hit = sum(end <= place for end in ends)
        assert readable(bytes(bad)) == [it for number, it in enumerate(minutes) if number != hit], place


@given(st.binary(max_size=400), st.binary(max_size=400))
def test_what_is_no_history_is_left_out(before: bytes, behind: bytes) -> None:
    rows = of_minute(T0, random.Random(1), 1)
    raw = minute(rows, FRESH, T0)
    assert readable(before + raw + behind) == [rows]


def test_a_checksum_that_fits_bytes_that_do_not_is_damage_too() -> None:
    body = b"not compressed"
    with pytest.raises(chunks.ChunkDamaged):
        chunks.decode(body, Header(0, 0, 0, len(body), 0, T0))
    for raw in (b"", b"\0" * 12, b"\x0a\0\0\0\x02\0\0\0\x01\0\0\0[]", b"\x0a\0\0\0\x02\0\0\0\0\0\0\0{}Z"):
        packed = zlib.compress(raw)
        with pytest.raises(chunks.ChunkDamaged):
            chunks.decode(packed, Header(0, 0, 0, len(packed), zlib.crc32(packed), T0))


# --- the folder -----------------------------------------------------------------------------------------


def fill(files: Folder, start: int, seconds: int, rng: random.Random, queues: int = 3) -> Rows:
    """Minutes of traffic, each written when it is over, hours folded when they are; all of it."""
    everything: Rows = {}
    for at in range(start, start + seconds, 60):
        rows = of_minute(at, rng, queues)
        files.append(minute(rows, 0, at), at)
        for key, its in rows.items():
            everything.setdefault(key, []).extend(its)
        files.tidy(at + 60)
    return everything


def read(files: Folder, key: Key, start: int, end: int, seconds: int) -> list[Step]:
    found = []
    for _, parts in sorted(files.read([key, WHOLE], start, end, seconds).items()):
        found += list(coarser(told_in_full(parts).get(key, ()), seconds))
    return found


@pytest.fixture
def files(tmp_path: Path) -> Folder:
    made = Folder(str(tmp_path / "history"))
    assert made.open(T0) == 0
    return made


def test_what_was_written_is_read_on_every_level(files: Folder, tmp_path: Path) -> None:
    everything = fill(files, T0, 2 * HOUR + 1800, random.Random(7))
    end = T0 + 2 * HOUR + 1800
    for key, its in everything.items():
        for seconds in STEPS:
            assert read(files, key, T0, end, seconds) == list(coarser(its, seconds)), seconds
    # Another process goes on with the same files.
    again = Folder(str(tmp_path / "history"))
    assert again.open(end) == end
    assert read(again, ("q1", f"{1:012x}"), T0, end, 60) == list(coarser(everything["q1", f"{1:012x}"], 60))


def test_files_are_private_and_no_link_is_followed(files: Folder, tmp_path: Path) -> None:
    fill(files, T0, HOUR + 120, random.Random(7))
    found = sorted((tmp_path / "history").iterdir())
    assert [it.name.partition("-")[0] for it in found] == ["10m", "10s", "1m", "now"]
    assert stat.S_IMODE((tmp_path / "history").stat().st_mode) == 0o700
    assert {stat.S_IMODE(it.stat().st_mode) for it in found} == {0o600}
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    hour = T0 + 5 * HOUR
    (tmp_path / "history" / f"now-{hour}.hist").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        files.append(b"x", hour)
    assert read(files, WHOLE, hour, hour + HOUR, 10) == []
    assert victim.read_bytes() == b"precious"


def test_a_torn_end_is_cut_and_the_next_minute_stands_behind_what_is_whole(
    files: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(11)
    first, second, third = (of_minute(T0 + 60 * number, rng) for number in range(3))
    path = tmp_path / "history" / f"now-{T0}.hist"
    for cut in (1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, 200):
        path.unlink(missing_ok=True)
        begun = Folder(str(tmp_path / "history"))
        begun.append(minute(first, 0, T0), T0)
        begun.append(minute(second, 0, T0 + 60)[:cut], T0 + 60)
        killed = Folder(str(tmp_path / "history"))
        assert killed.open(T0 + 120) == T0 + 60
        with caplog.at_level(logging.WARNING, "penstock.history"):
            killed.append(minute(third, 0, T0 + 120), T0 + 120)
        assert f"{cut} bytes at its end were not written whole" in caplog.text
        found = read(killed, ("q0", f"{0:012x}"), T0, T0 + HOUR, 10)
        assert found == first["q0", f"{0:012x}"] + third["q0", f"{0:012x}"]
        caplog.clear()


def test_damage_anywhere_costs_what_is_damaged_and_is_told_once(
    files: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every file, some place in it, and every kind of harm; read, folded and appended to afterwards."""
    key = ("q0", f"{0:012x}")
    fill(files, T0, HOUR + 600, random.Random(5))
    where = tmp_path / "history"
    good = {it.name: it.read_bytes() for it in where.iterdir()}
    rng = random.Random(13)
    for name, raw in good.items():
        for harm in range(12):
            place = rng.randrange(len(raw))
            bad = bytearray(raw)
            if harm % 3 == 0:
                del bad[place:]
            elif harm % 3 == 1:
                bad[place] ^= 1 << rng.randrange(8)
            else:
                bad[place : place + 50] = rng.randbytes(50)
            for it in where.iterdir():
                it.unlink()
            for other, was in good.items():
                (where / other).write_bytes(bytes(bad) if other == name else was)
            hurt = Folder(str(where))
            with caplog.at_level(logging.WARNING, "penstock.history"):
                hurt.open(T0 + 2 * HOUR)
                for seconds in (10, 60, 600):
                    for step in read(hurt, key, T0, T0 + 2 * HOUR, seconds):
                        assert step.at >= T0
                hurt.append(minute(of_minute(T0 + HOUR + 660, rng), 0, T0 + HOUR + 660), T0 + HOUR + 660)
                hurt.tidy(T0 + 3 * HOUR)
                assert read(hurt, key, T0 + HOUR, T0 + 2 * HOUR, 600)[-1].at == T0 + HOUR + 600
            told = [it for it in caplog.records if name in it.getMessage()]
            assert len(told) <= 3
            caplog.clear()


def test_a_fold_that_was_interrupted_anywhere_is_done_again(
    files: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = fill(files, T0, HOUR - 60, random.Random(17))
    last = of_minute(T0 + HOUR - 60, random.Random(18))
    files.append(minute(last, 0, T0 + HOUR - 60), T0 + HOUR - 60)
    for key, its in last.items():
        everything[key] += its
    calls = 0

    class Killed(BaseException):
        pass

    def kill(what: str, die_at: int) -> None:
        real = getattr(os, what)

        def dies(*args: object, **named: object) -> object:
            nonlocal calls
            calls += 1
            if calls == die_at:
                if what == "pwrite":
                    fd, raw, at = args
                    real(fd, raw[: len(raw) // 2], at)  # type: ignore[index, arg-type]
                raise Killed
            return real(*args, **named)

        monkeypatch.setattr(os, what, dies)

    for what in ("pwrite", "fdatasync", "rename", "unlink"):
        for die_at in range(1, 5):
            calls = 0
            kill(what, die_at)
            with contextlib.suppress(Killed):
                Folder(str(tmp_path / "history")).tidy(T0 + HOUR)
            monkeypatch.undo()
    again = Folder(str(tmp_path / "history"))
    again.open(T0 + HOUR)
    again.tidy(T0 + HOUR)
    assert not list((tmp_path / "history").glob("now-*"))
    assert not list((tmp_path / "history").glob("*.tmp"))
    for key, its in everything.items():
        for seconds in (10, 60, 600):
            assert read(again, key, T0, T0 + HOUR, seconds) == list(coarser(its, seconds))


def test_what_claims_to_be_from_later_goes(files: Folder, tmp_path: Path) -> None:
    fill(files, T0 + 30 * DAY, 120, random.Random(1))
    assert files.open(T0) == 0
    assert list((tmp_path / "history").iterdir()) == []


# --- days -----------------------------------------------------------------------------------------------


def test_fourteen_days_and_no_more_and_steps_that_fit_their_age(files: Folder, tmp_path: Path) -> None:
    key = ("q0", f"{0:012x}")
    now = T0
    for hour in range(15 * 24 + 3):
        now = T0 + hour * HOUR
        rows = {
            WHOLE: [Step(at, (1, *NOTHING[1:])) for at in range(now, now + HOUR, 600)],
            key: [Step(now, (0, hour, *NOTHING[2:]), (hour, *EMPTY[1:]))],
        }
        files.append(minute(rows, 0, now), now)
        files.tidy(now + HOUR)
    end = now + HOUR
    firsts = files.first()
    kept = [end - first for first in firsts]
    for level, seconds in zip(LEVELS, kept, strict=True):
        assert level.kept_seconds <= seconds < level.kept_seconds + level.file_seconds + HOUR
    assert fitting(10, end - HOUR, firsts) == 10
    assert fitting(30, end - HOUR, firsts) == 30
    assert fitting(10, end - 20 * HOUR, firsts) == 60
    assert fitting(120, end - 20 * HOUR, firsts) == 120
    assert fitting(10, end - 10 * DAY, firsts) == 600
    assert fitting(3600, end - 10 * DAY, firsts) == 3600
    assert fitting(10, 0, firsts) == 600
    found = read(files, key, end - 14 * DAY, end, 600)
    assert len(found) == 14 * 24
    assert [it.counted[1] for it in found] == list(range(15 * 24 + 3 - 14 * 24, 15 * 24 + 3))
    assert len(list((tmp_path / "history").iterdir())) < 40


def size_of(path: Path) -> int:
    return sum(it.stat().st_size for it in path.iterdir())


def test_thousands_of_queues_are_fewer_and_never_more_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tuple(level._replace(bytes_max=level.bytes_max // 1000) for level in LEVELS)
    monkeypatch.setattr(folder, "LEVELS", small)
    monkeypatch.setattr(folder, "MINUTE_BYTES_MAX", 20_000)
    bound = sum(level.bytes_max for level in small) + 2 * 60 * 20_000
    files = Folder(str(tmp_path / "history"))
    files.open(T0)
    rng = random.Random(19)
    for hour in range(4):
        for at in (T0 + hour * HOUR, T0 + hour * HOUR + 1800):
            rows: Rows = {WHOLE: [Step(at, (1, *NOTHING[1:]))]}
            for number in range(2000):
                weight = 1_000_000 if number == 77 else 100
                counted = (0, *(rng.randrange(weight) for _ in COUNTED[1:]))
                rows[f"queue-{number}", rng.randbytes(6).hex() if number != 77 else "7" * 12] = [
                    Step(at, counted, EMPTY, ({number % 128: 1}, {}, {}))
                ]
            files.append(folder.minute(rows, 0, at), at)
        files.tidy(T0 + (hour + 1) * HOUR)
        assert size_of(tmp_path / "history") <= bound
    # The whole is there for all of the time, and so is the queue in which most happened.
    for key in (WHOLE, ("queue-77", "7" * 12)):
        assert len(read(files, key, T0, T0 + 4 * HOUR, 600)) == 8
    hours = files.read([("queue-5", "5" * 12), WHOLE], T0, T0 + 4 * HOUR, 600)
    assert all(part.flags & CUT for parts in hours.values() for part in parts)


# --- what is shown --------------------------------------------------------------------------------------


def stood(at: int, ready: int, accepted: int = 0, born: int = 0) -> Step:
    return Step(at, (born, accepted, *NOTHING[2:]), (ready, *EMPTY[1:]))


def looks(*ats: int) -> list[Step]:
    return [Step(at, (1, *NOTHING[1:])) for at in ats]


def shown(parts: list[Part], start: int = T0, end: int = T0 + HOUR, seconds: int = 10) -> Iterator[object]:
    hours: dict[int, list[Part]] = {}
    for part in parts:
        hours.setdefault(part.rows[WHOLE][0].at // HOUR * HOUR, []).append(part)
    for told in filled(ORDERS, hours, start, end, seconds):
        yield told.step.at - T0, told.step.standing[0], told.step.counted[1]


def test_between_its_steps_a_queue_stands_as_it_stood_and_gaps_are_gaps() -> None:
    first = Part(FRESH, {WHOLE: looks(T0, T0 + 10, T0 + 20), ORDERS: [stood(T0, 5, 2)]})
    later = Part(FRESH, {WHOLE: looks(T0 + 90, T0 + 100), ORDERS: [stood(T0 + 90, 7, 1)]})
    assert list(shown([first, later])) == [(0, 5, 2), (10, 5, 0), (20, 5, 0), (90, 7, 1), (100, 7, 0)]
    assert list(shown([first, later], T0 + 15, T0 + 95)) == [(10, 5, 0), (20, 5, 0), (90, 7, 1)]


def test_what_is_not_told_of_after_a_restart_is_empty() -> None:
    first = Part(FRESH, {WHOLE: looks(T0), ORDERS: [stood(T0, 5)]})
    later = Part(FRESH, {WHOLE: looks(T0 + 60, T0 + 70)})
    assert list(shown([first, later])) == [(0, 5, 0), (60, 0, 0), (70, 0, 0)]
    # The same where there were more queues than are told of: nobody knows.
    more = Part(FRESH | CUT, later.rows)
    assert list(shown([Part(CUT, {WHOLE: looks(T0)}), more])) == []


def test_an_hour_begins_with_what_is_told_of_it() -> None:
    before = Part(0, {WHOLE: looks(T0 + HOUR - 10), ORDERS: [stood(T0 + HOUR - 10, 5)]})
    behind = Part(0, {WHOLE: looks(T0 + HOUR)})
    end = T0 + 2 * HOUR
    assert list(shown([before, behind], end=end)) == [(HOUR - 10, 5, 0), (HOUR, 0, 0)]
    told = Part(0, {**behind.rows, ORDERS: [stood(T0 + HOUR, 5)]})
    assert list(shown([before, told], end=end)) == [(HOUR - 10, 5, 0), (HOUR, 5, 0)]


def test_before_a_queue_was_there_nothing_is_shown_of_it() -> None:
    part = Part(0, {WHOLE: looks(T0, T0 + 10, T0 + 20), ORDERS: [stood(T0 + 10, 3, 3, born=1)]})
    assert list(shown([part])) == [(10, 3, 3), (20, 3, 0)]


def test_a_step_knows_for_how_long_somebody_looked() -> None:
    part = Part(0, {WHOLE: looks(T0, T0 + 10, T0 + 40), ORDERS: [stood(T0, 1, 6)]})
    (told,) = filled(ORDERS, {T0: [part]}, T0, T0 + HOUR, 60)
    assert told.seconds == 30
    assert told.step.counted[1] == 6
