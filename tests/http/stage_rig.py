"""A log with its broker, and beside it the part of the second process that speaks of transactions.

Both run here as they are; the link is a call of the handlers that answer it in the first process. Every call
is a moment at which the second process can die, before it and behind it.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from penstock.broker.broker import Broker
from penstock.control.frames import Buffer, Fields, Frame
from penstock.http.link import CallRefused, Link
from penstock.http.stages.stages import Stages
from penstock.log.disk import RealDisk
from penstock.log.errors import LogFailed
from penstock.log.log import Log
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.policy import Policies
from penstock.server.audit import Audit
from penstock.server.calls import CALLS, Context, refusal_of
from penstock.server.memory import Account
from tests.log.inline import InlineWorker

WAIT_SECONDS = 20.0


class Died(BaseException):
    """The process is gone at this moment."""


class Moments:
    """Counts the moments at which a process could die, and has it die at one of them."""

    def __init__(self) -> None:
        self.passed = 0
        self.last = -1
        self.dead = False

    def here(self) -> None:
        if self.dead or (self.last >= 0 and self.passed >= self.last):
            self.dead = True
            raise Died
        self.passed += 1


class Said:
    """The answer to a call."""

    def __init__(self) -> None:
        self.fields: Fields | None = None

    def __call__(self, fields: Fields, *buffers: Buffer) -> None:
        self.fields = json.loads(json.dumps(fields))

    def beside(self, number: int) -> "Said":
        raise AssertionError("nothing comes along here")

    def refuse(self, kind: str, detail: str) -> None:
        self({"error": {"kind": kind, "detail": detail}})


class Rig:
    """A log and the stages beside it, through any number of lives."""

    def __init__(
        self, folder: Path, settings: LogSettings | None = None, policies: dict[str, object] | None = None
    ) -> None:
        self.folder = folder
        self.started = time.monotonic()
        self.memory = Account(1 << 20)
        self.audit = Audit(None)
        self.now = time.time_ns() // 1000
        self.moments = Moments()
        self.calls: Counter[str] = Counter()
        self.on_call: Callable[[str, Fields], None] = lambda name, fields: None
        self._settings = settings
        self._policies = Policies(policies or {})
        self.open_log()

    # --- what a handler needs of the server ---

    def now_us(self) -> int:
        return self.now

    def arrival_us(self) -> int:
        return self.now

    def listeners(self) -> list[Fields]:
        return []

    def fail(self, error: LogFailed) -> None:
        raise AssertionError(error)

    # --- life ---

    def open_log(self) -> None:
        self.log = Log.open(
            RealDisk(str(self.folder)),
            self.now,
            settings=self._settings,
            policies=self._policies,
            writer=InlineWorker(),
            keeper=InlineWorker(),
        )
        self.broker = Broker(self.log, lambda: None)

    async def start(self, last: int = -1) -> None:
        """A new second process, which dies at a moment, or not."""
        self.moments.passed, self.moments.last, self.moments.dead = 0, last, False
        self.context = Context(self)  # There is one to a link.
        self.stages = Stages(str(self.folder), cast(Link, self))
        await self.stages.start()

    async def die(self, *, log_too: bool) -> None:
        """Of the second process nothing is left; of the log, what is on the disk."""
        self.moments.dead = True
        await self.stages.stop()
        if log_too:
            self.log.abandon()
            self.open_log()

    async def end(self) -> None:
        await self.stages.stop()
        self.log.abandon()
        assert not self.log.damage

    def turn(self) -> None:
        self.now += 1000
        for _ in range(3):
            self.broker.turn(self.now)
            self.log.wait()

    # --- the link ---

    async def call(
        self, name: str, fields: Fields | None = None, *buffers: Buffer, seconds: float = 30.0
    ) -> Frame:
        await asyncio.sleep(0)
        self.moments.here()
        said, given = Said(), json.loads(json.dumps(fields or {}))
        self.calls[name] += 1
        try:
            self.on_call(name, given)
            CALLS[name](self.context, given, memoryview(b"".join(buffers)), said)
        except Exception as error:
            kind = refusal_of(error)
            if kind is None:
                raise
            said.refuse(kind, str(error))
        for _ in range(1000):
            if said.fields is not None:
                break
            self.turn()
        answer = said.fields
        assert answer is not None, f"{name} is not answered"
        self.moments.here()
        if "error" in answer:
            raise CallRefused(answer["error"]["kind"], answer["error"]["detail"])
        return Frame(answer, memoryview(b""))

    # --- for stories ---

    async def stage(self, key: str, *parts: tuple[str, list[bytes]]) -> Fields:
        return await self.stages.stage(key, [(queue, Batch.of(it, protocol="http")) for queue, it in parts])

    def stored(self) -> dict[str, list[bytes]]:
        """What the log has, by queue."""
        self.turn()
        return {
            queue: [m for it in self.log.read(queue, 0, 1 << 40) for m in it.messages()]
            for queue in self.log.queues()
        }


async def every_moment(one_life: Callable[[int], Any]) -> int:
    """One life after the other, each of which ends a moment later, until one does not end; how many."""
    last = 0
    while await one_life(last):
        last += 1
    return last
