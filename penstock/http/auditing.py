"""Auditing: what this process tells the first one for the audit (`server/audit.py`), which writes it.

Acts wait until their line is synced. Refusals wait for nobody: they are gathered here for a second, so that a
flood of them is one call, and told together.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from typing import Final

from penstock.control.frames import Fields
from penstock.errors import PenstockError
from penstock.http.link import Link
from penstock.http.problems import problem_of

GATHER_SECONDS: Final = 1.0
KINDS_MAX: Final = 1000
NUMBERS: Final = count(1)
"""Of acts: of all logs that this process answers for, whose lines are in one file."""


class Auditing:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._refusals: dict[tuple[tuple[str, str], ...], int] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self.done: Callable[[Fields], Awaitable[None]] | None = None
        """Is told of every act that has been done."""

    @contextlib.asynccontextmanager
    async def act(self, fields: Fields) -> AsyncIterator[Fields]:
        """Something that changes something: it is told before it begins, and how it has ended. What is put
        into the fields that this gives is told with the end."""
        line = {**fields, "call": next(NUMBERS)}
        await self._link.call("audit", {"line": {**line, "result": "begun"}})
        told: Fields = {}
        try:
            yield told
        except BaseException as error:
            problem = problem_of(error) if isinstance(error, PenstockError) else None
            result = problem.name if problem is not None else "not ended"
            self._tell("audit", {"line": {**line, **told, "result": result}})
            raise
        await self._link.call("audit", {"line": {**line, **told, "result": "done"}})
        if self.done is not None:
            await self.done({**line, **told})

    def refused(self, **fields: str) -> None:
        """Somebody was told no."""
        kind = tuple(fields.items())
        if not self._refusals:
            asyncio.get_running_loop().call_later(GATHER_SECONDS, self._tell_refusals)
        if kind not in self._refusals and len(self._refusals) >= KINDS_MAX:
            kind = (("act", "others"), ("result", "refused"))
        self._refusals[kind] = self._refusals.get(kind, 0) + 1

    async def close(self) -> None:
        """Tell what is left."""
        self._tell_refusals()
        await asyncio.gather(*self._telling)

    def _tell_refusals(self) -> None:
        refusals, self._refusals = self._refusals, {}
        if refusals:
            self._tell("refusals", {"rows": [[dict(kind), times] for kind, times in refusals.items()]})

    def _tell(self, name: str, fields: Fields) -> None:
        """Nobody waits for it."""

        async def tell() -> None:
            with contextlib.suppress(PenstockError):  # A broker that is gone writes nothing any more.
                await self._link.call(name, fields)

        task = asyncio.ensure_future(tell())
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
