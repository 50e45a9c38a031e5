"""Archiving: starts the process that archives (`penstock/lake`), watches it, and holds retention for it.

It is known by its name alone: what it needs (pyarrow, deltalake) is not loaded here, and what it takes of a
core is not taken from those who wait for an answer. It says where each queue is archived up to, which becomes
the position of two readers (`READERS`): so lag and health of archiving are those of readers.

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


class Archiving:
    def __init__(self, data: str, hello: Fields, link: Link, mirror: Mirror, sayings: Sayings) -> None:
        self.plan: Fields | None = hello["archive"]
        self._wish = {"data": data, "plan": self.plan}
        self._wish |= {name: hello[name] for name in ("log_level", "log_format")}
        self._readers_max: int = hello["readers_max"]
        self._link = link
        self._mirror = mirror
        self._sayings = sayings
        self._positions: dict[str, dict[str, int]] = {}
        self._task: asyncio.Task[None] | None = None
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

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        if self.plan is None:
            for name in READERS.values():
                with contextlib.suppress(PenstockError):
                    await self._link.call("release_reader", {"name": name})
            return
        pause = PAUSE_SECONDS_MIN
        while True:
            began = asyncio.get_running_loop().time()
            try:
                code = await self._live()
                self._error = self._error or f"its process ended with {code}"
            except (OSError, PenstockError) as error:
                self._error = str(error)
            lived = asyncio.get_running_loop().time() - began
            pause = PAUSE_SECONDS_MIN if lived > PAUSE_SECONDS_MAX else min(2 * pause, PAUSE_SECONDS_MAX)
            log.error("archiving has stopped, and begins again in %.0f s: %s", pause, self._error)
            self._say()
            await asyncio.sleep(pause)

    async def _live(self) -> int:
        """One life of the process; its exit code."""
        self.starts += 1
        self._positions = {}
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
        renewing = asyncio.get_running_loop().create_task(self._renew())
        try:
            with contextlib.suppress(ProcessLookupError):
                nice = min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19)
                os.setpriority(os.PRIO_PROCESS, process.pid, nice)
            process.stdin.write(json.dumps(self._wish).encode() + b"\n")
            while line := await process.stdout.readline():
                await self._hear(json.loads(line))
            return await process.wait()
        finally:
            renewing.cancel()
            process.stdin.close()  # It leaves at once, wherever it is: that is what it is made for.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _hear(self, fields: Fields) -> None:
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

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            for view, positions in list(self._positions.items()):
                with contextlib.suppress(PenstockError):  # There are many days until the lease ends.
                    await self._hold(view, dict(positions))

    def _say(self) -> None:
        assert self.plan is not None
        for view, name in READERS.items():
            rows = self.state["tables"].get(view, {}).get("rows")
            about = {"kind": "archive", "name": self.plan["path"][:200], "rows": rows}
            about["error"] = self.error or None
            self._sayings.said(name, about, self._mirror.now_us())
