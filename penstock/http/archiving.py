"""Archiving: starts the process that archives (`penstock/lake`), watches it, and holds retention for it.

It is known by its name alone: what it needs (pyarrow, deltalake) is not loaded here, and what it takes of a
core is not taken from those who wait for an answer. It says where each queue is archived up to, which becomes
the position of two readers (`READERS`): so lag and health of archiving are those of readers.

There is one process, whatever it archives (`Archivers`): the log of a broker, or those of a cluster with
several that are led here. Each log has readers of its own (`Archiving`). Where other logs are led here than
before, there is another process.

Rules that always hold:
  * A position moves when its rows are in the table, and safe.
  * The lease is long, and renewed long before it ends: nothing is forgotten because a broker was away for a
    week, or the store of the table. How much is kept is bounded as for every reader (`reader-bytes-max`).
  * Where nothing is to be archived, these readers hold nothing.

How it fails: a process that ends is started again, later each time; what it says is wrong is told by
`/v1/archive`, by the readers and as a finding of the broker, `archive-failing`.
"""

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Coroutine
from typing import Final

from penstock.control.frames import Fields
from penstock.errors import PenstockError
from penstock.http.link import CallRefused, Link
from penstock.http.watching.mirror import Mirror
from penstock.http.watching.sayings import Sayings
from penstock.log.info import ARCHIVE_READERS

READERS: Final = ARCHIVE_READERS
LEASE_SECONDS: Final = 30 * 86_400
RENEW_SECONDS: Final = 86_400
QUEUES_MAX: Final = 1000
"""Of one call."""

PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 1.0, 60.0
STOP_SECONDS: Final = 2.0
NICENESS: Final = 10
LINE_BYTES_MAX: Final = 1 << 26
ERROR_CHARACTERS_MAX: Final = 1000

log = logging.getLogger("penstock.http")


class Archivers:
    """The process, and the logs that it has."""

    def __init__(self, hello: Fields) -> None:
        self._plan: Fields | None = hello["archive"]
        self._wish = {"plan": self._plan}
        self._wish |= {name: hello[name] for name in ("log_level", "log_format")}
        self._logs: dict[str, Archiving] = {}  # by what they are called in the process
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def want(self, logs: "dict[str, Archiving]") -> None:
        """These are archived from now on."""
        if logs == self._logs:
            return
        new = [it for it in logs.values() if it not in self._logs.values()]
        self._logs = logs
        self._changed.set()
        if self._plan is None:
            self._start(*(it.let_go() for it in new))
        elif not self._tasks:
            self._start(self._keep())

    def _start(self, *work: Coroutine[None, None, None]) -> None:
        for it in work:
            task = asyncio.get_running_loop().create_task(it)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self) -> None:
        pause = PAUSE_SECONDS_MIN
        while True:
            self._changed.clear()
            logs = self._logs
            began = asyncio.get_running_loop().time()
            error = ""
            if logs:
                living = asyncio.ensure_future(self._live(logs))
                error = await self._unless_changed(living)
            else:
                await self._changed.wait()
            if self._changed.is_set():
                pause = PAUSE_SECONDS_MIN
                continue
            lived = asyncio.get_running_loop().time() - began
            pause = PAUSE_SECONDS_MIN if lived > PAUSE_SECONDS_MAX else min(2 * pause, PAUSE_SECONDS_MAX)
            for archiving in logs.values():
                archiving.failed(error)
            log.error("archiving has stopped, and begins again in %.0f s: %s", pause, error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), pause)

    async def _unless_changed(self, living: "asyncio.Future[int]") -> str:
        """Why a life has ended; it ends, too, where other logs are wanted."""
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait((living, changed), return_when=asyncio.FIRST_COMPLETED)
            return f"its process ended with {living.result()}" if living.done() else ""
        except (OSError, PenstockError) as error:
            return str(error)
        finally:
            for task in (living, changed):
                task.cancel()
            await asyncio.gather(living, changed, return_exceptions=True)

    async def _live(self, logs: "dict[str, Archiving]") -> int:
        """One life of the process; its exit code."""
        for archiving in logs.values():
            archiving.begin()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock.lake",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            limit=LINE_BYTES_MAX,
            env={**os.environ, "TOKIO_WORKER_THREADS": "1", "RAYON_NUM_THREADS": "1"},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        renewing = asyncio.get_running_loop().create_task(self._renew(logs))
        try:
            with contextlib.suppress(ProcessLookupError):
                nice = min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19)
                os.setpriority(os.PRIO_PROCESS, process.pid, nice)
            wish = {**self._wish, "logs": {name: it.data for name, it in logs.items()}}
            process.stdin.write(json.dumps(wish).encode() + b"\n")
            while line := await process.stdout.readline():
                fields = json.loads(line)
                name = fields.pop("log")
                for archiving in logs.values() if name is None else (logs[name],):
                    await archiving.hear(fields)
            return await process.wait()
        finally:
            renewing.cancel()
            process.stdin.close()  # It leaves at once, wherever it is: that is what it is made for.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _renew(self, logs: "dict[str, Archiving]") -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            for archiving in logs.values():
                await archiving.renew()


class Archiving:
    """One log."""

    def __init__(self, data: str, hello: Fields, link: Link, mirror: Mirror, sayings: Sayings) -> None:
        self.plan: Fields | None = hello["archive"]
        self.data = data
        self._readers_max: int = hello["readers_max"]
        self._link = link
        self._mirror = mirror
        self._sayings = sayings
        self._positions: dict[str, dict[str, int]] = {}
        self.state: Fields = {"tables": {}, "refused": {}, "gaps": []}
        self._error = ""
        self.starts = 0

    @property
    def error(self) -> str:
        """Why archiving does not get on, as a whole or with a queue; empty: it does."""
        if self._error:
            return self._error
        return "; ".join(f"queue {name!r}: {why}" for name, why in self.state["refused"].items())[
            :ERROR_CHARACTERS_MAX
        ]

    async def let_go(self) -> None:
        """Nothing is to be archived."""
        for name in READERS.values():
            with contextlib.suppress(PenstockError):
                await self._link.call("release_reader", {"name": name})

    def begin(self) -> None:
        """A process has it from now on."""
        self.starts += 1
        self._positions = {}

    def failed(self, why: str) -> None:
        self._error = self._error or why
        self._say()

    async def renew(self) -> None:
        for view, positions in list(self._positions.items()):
            with contextlib.suppress(PenstockError):  # There are many days until the lease ends.
                await self._hold(view, dict(positions))

    async def hear(self, fields: Fields) -> None:
        if "error" in fields:
            self._error = (fields["error"] or "")[:ERROR_CHARACTERS_MAX]
        else:
            self.state = fields["state"]
            for view, positions in fields["held"].items():
                await self._hold(view, positions)
        self._say()

    async def _hold(self, view: str, positions: dict[str, int]) -> None:
        known = self._positions.setdefault(view, {})
        # The first word of a process names all queues that it archives: others are let go of.
        keep_others = bool(known) or len(positions) > QUEUES_MAX
        known |= positions
        names = list(positions)
        if not names and not keep_others:
            with contextlib.suppress(CallRefused):  # There is none.
                await self._link.call("release_reader", {"name": READERS[view]})
        for first in range(0, len(names), QUEUES_MAX):
            part = names[first : first + QUEUES_MAX]
            try:
                await self._call(view, {name: positions[name] for name in part}, keep_others)
            except CallRefused as error:
                if error.kind in ("unavailable", "draining", "failed"):  # Nobody knows what is held.
                    raise
                for name in part:  # One of them may have been deleted meanwhile.
                    with contextlib.suppress(CallRefused):
                        await self._call(view, {name: positions[name]}, True)
                        continue
                    known.pop(name, None)
        self._sayings.is_at(READERS[view], known, self._mirror.now_us())

    async def _call(self, view: str, positions: dict[str, int], keep_others: bool) -> None:
        fields = {"name": READERS[view], "view": view, "positions": positions, "keep_others": keep_others}
        # These two are beside those that others may have.
        bounds = {"lease_seconds": LEASE_SECONDS, "readers_max": self._readers_max + len(READERS)}
        await self._link.call("hold_reader", {**fields, **bounds})

    def _say(self) -> None:
        assert self.plan is not None
        for view, name in READERS.items():
            rows = self.state["tables"].get(view, {}).get("rows")
            about = {"kind": "archive", "name": self.plan["path"][:200], "rows": rows}
            about["error"] = self.error or None
            self._sayings.said(name, about, self._mirror.now_us())
