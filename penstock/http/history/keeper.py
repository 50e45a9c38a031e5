"""Keeper: the task that closes a step every ten seconds, and the thread that owns the history's files.

    step      at every tenth second of the log's time, which people can read and which never goes back: what
              the recorder has seen becomes a step, in memory
    minute    the steps of a minute become a chunk, which the thread appends to the file of the hour
    hour      the thread folds the hour that is over
    read      what is asked for, by the same thread: files, chunks that could not be written, steps in memory

Rules that always hold:
  * The loop never waits for the disk: encoding, writing, folding and reading are the thread's.
  * A step is later than every step before it, also than those that the files had when they were opened.
    Where the time jumps ahead, there is a gap.
  * What cannot be written waits in memory, an hour and `WAITING_BYTES` of it at most, and goes with the next
    chunk. Where the history is switched off, that hour is all there is.

How it fails: it does not stop the API. A disk that fails is told of once, in the log, and tried again every
minute.
"""

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, TypeVar

from penstock.common import units
from penstock.control.frames import Fields
from penstock.errors import PenstockError
from penstock.http.history import chunks
from penstock.http.history.chunks import CUT, FRESH
from penstock.http.history.folder import HOUR, LEVELS, Folder, Part, Rows, minute, told_in_full
from penstock.http.history.marks import ACTS, Marks
from penstock.http.history.recorder import Closed
from penstock.http.history.steps import EMPTY, STEP_SECONDS, WHOLE, Key, Step, coarser
from penstock.http.watching.mirror import Caller, Mirror
from penstock.log.disk import HISTORY

MINUTE: Final = 60
WAITING_BYTES: Final = 16 << 20
STEPS: Final = (10, 30, 60, 120, 300, 600, 1800, 3600)
"""What may be asked for, in seconds; each fits the levels that can tell it."""

POINTS_MAX: Final = 800
"""Where nobody says how fine, about so many steps at most."""

T = TypeVar("T")
log = logging.getLogger("penstock.history")


class Told(NamedTuple):
    """A step of a queue, and for how long somebody looked in it."""

    step: Step
    seconds: int


class Past(NamedTuple):
    seconds: int
    """Of a step."""

    told: list[Told]


class Keeper:
    def __init__(self, data: str, days: int, link: Caller, mirror: Mirror) -> None:
        self._link = link
        self._mirror = mirror
        self._kept_seconds = max(days * 24 * HOUR, HOUR)
        path = os.path.join(data, HISTORY)
        self._folder = Folder(path, days) if days else None
        self.marks = Marks(path if days else None, self._kept_seconds)
        self._thread = ThreadPoolExecutor(1, "history")
        self._task: asyncio.Task[None] | None = None
        self._page: Rows = {}  # the steps of the minute that runs
        self._page_flags = FRESH
        self._page_start = 0
        self._last = 0  # where the last step ended
        self._hour = 0  # that was begun with a step in full
        self._tidied = 0
        self._waiting: deque[tuple[int, bytes]] = deque()  # chunks that are in no file, and when they begin
        self._fails = False

    # --- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        """Write what there is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            if self._last:
                await self._step(self._now() // STEP_SECONDS * STEP_SECONDS, None)
                await self._turn_page()
                await self.mark("stop", "the broker stopped")
        self._thread.shutdown()

    def _now(self) -> int:
        return self._mirror.now_us() // 1_000_000

    async def _keep(self) -> None:
        with contextlib.suppress(PenstockError):  # The schedule goes on trying.
            await self._mirror.refresh()
        self._last = max(await self._run(self._open, self._now()) or 0, self._now() - STEP_SECONDS)
        await self._mark_start()
        while True:
            now_us = self._mirror.now_us()
            await asyncio.sleep(STEP_SECONDS - now_us / 1_000_000 % STEP_SECONDS)
            try:
                await self._look()
            except Exception:  # a step less; without the task there would be none any more
                log.exception("history: a step was left out")

    async def _look(self) -> None:
        engine: Fields | None = None
        with contextlib.suppress(PenstockError):
            engine, _ = await self._link.call("engine")
        now = self._now()
        await self._step(now // STEP_SECONDS * STEP_SECONDS - STEP_SECONDS, engine)
        if now // MINUTE != self._page_start // MINUTE:
            await self._turn_page()
        if now // HOUR != self._tidied // HOUR:
            self._tidied = now
            await self._run(self._tidy, now)

    async def _step(self, at: int, engine: Fields | None) -> None:
        """Close the step that began at `at`, unless a part of it was told before."""
        if at < self._last:
            return
        if self._page and at // MINUTE != self._page_start // MINUTE:
            await self._turn_page()
        if at >= self._last + 2 * STEP_SECONDS and self._hour:
            # Nobody has looked for a while: this process was stopped, or the time has jumped.
            await self._turn_page()
            self._page_flags |= FRESH
        hour = at // HOUR
        full = hour != self._hour or bool(self._page_flags & FRESH)
        closed = self._mirror.recorder.close(at, engine, full=full)
        self._hour, self._last = hour, at + STEP_SECONDS
        self._put(closed, at)

    def _put(self, closed: Closed, at: int) -> None:
        if not self._page:
            self._page_start = at
        for key, step in closed.steps.items():
            self._page.setdefault(key, []).append(step)
        if closed.is_cut:
            self._page_flags |= CUT

    # --- marks -----------------------------------------------------------------------------------

    async def mark(
        self, kind: str, text: str, queue: str = "", who: str = "", at_us: int | None = None, **more: object
    ) -> None:
        """Something happened, now or at a time. A disk that fails is told of in the log."""
        at_us = self._mirror.now_us() if at_us is None else at_us
        fields = {"at_us": at_us, "kind": kind, "text": text, "queue": queue, "who": who, **more}
        await self._run(self.marks.add, fields)

    async def marked(self, start_us: int, end_us: int) -> list[Fields]:
        """What happened in a time."""
        return await self._run(self.marks.between, start_us, end_us) or []

    async def acted(self, line: Fields) -> None:
        """An operator has done something, as the audit has it."""
        words = ACTS.get(str(line["act"]))
        if words is not None:
            count = line.get("count")
            text = words if count is None else f"{words}: {units.counted(count, 'message')}"
            await self.mark(str(line["act"]), text, str(line.get("queue", "")), str(line.get("who", "")))

    async def _mark_start(self) -> None:
        """The broker has started; or this process alone, where its log was not opened anew."""
        try:
            engine, _ = await self._link.call("engine")
        except PenstockError:
            return
        self._mirror.recorder.begin(engine)
        known = await self.marked(0, 1 << 62)
        before = next((it.get("opening") for it in reversed(known) if it["kind"] == "start"), None)
        opening, version = engine["opening"], engine["version"]
        if before == opening:
            await self.mark("restart", "the HTTP API's process was started again")
        else:
            await self.mark("start", f"Penstock {version} started", opening=opening)

    # --- the thread ------------------------------------------------------------------------------

    async def _run(self, do: Callable[..., T], *args: object) -> T | None:
        """What is for the thread; None where the disk fails, which is told once."""
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._thread, do, *args)
        except OSError as error:
            if not self._fails:
                log.warning("history: %s; it goes on in memory, and the disk is tried again", error)
            self._fails = True
            return None
        return result

    async def _turn_page(self) -> None:
        """The minute is over."""
        if not self._page:
            return
        rows, flags, start = self._page, self._page_flags, self._page_start
        self._page, self._page_flags = {}, 0
        # Nothing that is asked for in between is without these steps: the thread does one thing at a time.
        await self._run(self._write, rows, flags, start)

    def _open(self, now: int) -> int:
        if self._folder is None:
            return 0
        last = self._folder.open(now + STEP_SECONDS)
        self._folder.tidy(now)
        return last

    def _tidy(self, now: int) -> None:
        self.marks.trim(now)
        if self._folder is not None:
            self._folder.tidy(now)

    def _write(self, rows: Rows, flags: int, start: int) -> None:
        self._waiting.append((start, minute(rows, flags, start)))
        if self._folder is not None:
            while self._waiting:
                begin, chunk = self._waiting[0]
                self._folder.append(chunk, begin)
                self._waiting.popleft()
            self._fails = False
        size = sum(len(chunk) for _, chunk in self._waiting)
        while self._waiting and (size > WAITING_BYTES or self._waiting[0][0] < start - HOUR):
            size -= len(self._waiting.popleft()[1])

    # --- reading ---------------------------------------------------------------------------------

    async def read(self, key: Key, start: int, end: int, seconds: int | None) -> Past:
        """What is known of a queue, or of the whole, in a time; in steps of `seconds`, or coarser ones where
        finer are not kept so long. Steps in which nobody looked are left out."""
        start = max(start, self._now() - self._kept_seconds)
        # What is in memory goes along: a page that is turned meanwhile waits for its turn in the thread.
        page = Part(self._page_flags, {it: list(self._page.get(it, ())) for it in {key, WHOLE}})
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._read, key, start, end, seconds, page)

    def _read(self, key: Key, start: int, end: int, seconds: int | None, page: Part) -> Past:
        chosen = seconds or next((it for it in STEPS if (end - start) / it <= POINTS_MAX), STEPS[-1])
        hours: dict[int, list[Part]] = {}
        if self._folder is not None:
            with contextlib.suppress(OSError):
                chosen = fitting(chosen, start, self._folder.first())
                hours = self._folder.read((key, WHOLE), start // HOUR * HOUR, end, chosen)
        for begin, chunk in self._waiting:
            header = chunks.read_header(chunk)
            assert header is not None
            rows = chunks.decode(chunk[chunks.HEADER_BYTES :], header, {key, WHOLE}.__contains__)
            hours.setdefault(begin // HOUR * HOUR, []).append(Part(header.flags, rows))
        for step in page.rows[WHOLE][:1]:
            hours.setdefault(step.at // HOUR * HOUR, []).append(page)
        return Past(chosen, list(filled(key, hours, start, end, chosen)))


def fitting(seconds: int, start: int, firsts: Iterable[int]) -> int:
    """The finest step from `seconds` on that all which is known from a time on can be told in."""
    first = list(firsts)
    for at, level in enumerate(LEVELS):
        reaches = start >= first[at] or all(first[at] <= other for other in first[at + 1 :])
        if reaches and seconds <= level.seconds:
            return max(level.seconds, seconds)
        if reaches:
            return seconds
    return max(seconds, LEVELS[-1].seconds)


def filled(key: Key, hours: dict[int, list[Part]], start: int, end: int, seconds: int) -> Iterable[Told]:
    """A step for each in which somebody looked. Where nothing is told of a queue it stands as it stood
    before; or, from the beginning of an hour on, it is empty, unless there were more queues than were told
    of."""
    told: list[Told] = []
    standing: tuple[int, ...] | None = EMPTY
    for hour in sorted(hours):
        parts = hours[hour]
        rows = told_in_full(parts)
        standing = None if any(part.flags & CUT for part in parts) else EMPTY
        steps = {step.at: step for step in coarser(rows.get(key, ()), seconds)}
        for whole in coarser(rows.get(WHOLE, ()), seconds):
            step = steps.get(whole.at)
            if step is not None:
                standing = step.standing
                if key != WHOLE and step.counted[0]:
                    told = []  # It is new: there was none before.
            elif standing is not None:
                step = Step(whole.at, standing=standing)
            if step is None or whole.at + seconds <= start or whole.at >= end:
                continue
            told.append(Told(step, whole.counted[0] * STEP_SECONDS))
    return told
