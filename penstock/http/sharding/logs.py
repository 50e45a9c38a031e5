"""Logs: what the first processes are asked about a log, from whatever front-end, for transactions.

A log that is led here is asked over the private link. For others their front-end is asked, once for all that
it leads: a request to `PATH` with a frame (`control/frames.py`) that names the call, and what each log is
asked. Only front-ends are answered.

How it fails: in place of the answer of a log stands a `Problem` or a `CallRefused`.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.control.batches import pack_batches, unpack_batch
from penstock.control.frames import Buffer, Fields, Frame, FrameDecoder, encode_frame
from penstock.errors import PenstockError
from penstock.http.app import Reading, moved
from penstock.http.link import CallRefused
from penstock.http.problems import Problem
from penstock.http.sharding.others import Asked, Others, unreachable
from penstock.http.sharding.transactions import Answers, Doubts
from penstock.http.site import Site
from penstock.http.stages.stages import Parts
from penstock.log.fingerprint import KIND

PATH: Final = "/v1/logs"
CALLS: Final = frozenset(
    {"begin", "prepare", "unprepare", "attempt", "commit", "finish", "abort", "transaction", "totals"}
    | {"doubts", "queue", "stage", "transact", "move"}
)
CALL_SECONDS: Final = 40.0
"""Longer than the other side gives its own first process."""

BODY_MORE: Final = 4
"""A part of a stage takes at most so many times what its messages took in the body of a request."""

_OF_DOUBTS: Final = frozenset(("prepare", "commit", "move"))


class ClusterLogs:
    """Belongs to one loop."""

    def __init__(
        self, base: Site, others: Others, asking: Callable[[str, str], AbstractAsyncContextManager[None]]
    ) -> None:
        """Within `asking`, a front-end that leads no more is not waited for."""
        self._base = base
        self._others = others
        self._asking = asking
        self._sites: Mapping[int, Site] = {}  # of the logs that are led here
        self._leaders: list[str] = []
        self._member = ""
        self.doubts = Doubts(self, lambda shard: shard in self._sites)

    def set_shards(self, leaders: list[str], member: str, sites: Mapping[int, Site]) -> None:
        """Who leads what, from now on."""
        for shard in sites.keys() - self._sites.keys():
            self.doubts.look_at(shard)
        self._leaders, self._member, self._sites = leaders, member, sites

    @property
    def count(self) -> int:
        return len(self._leaders)

    async def call(self, name: str, fields: Mapping[int, Fields]) -> Answers:
        """See `transactions.Logs`."""
        here, elsewhere, answers = self._sort(fields)
        asked = [self._here(name, {shard: fields[shard] for shard in here})]
        for leader, shards in elsewhere.items():
            asked.append(self._there(leader, name, {shard: fields[shard] for shard in shards}))
        for told in await asyncio.gather(*asked):
            answers |= told
        return answers

    async def stage(self, shard: int, key: str, parts: Parts, alias: str, kind: str = KIND) -> Fields:
        """See `transactions.Logs`."""
        site = self._sites.get(shard)
        if site is not None:
            return await site.stages.stage(key, parts, alias, kind)
        packed, buffers = pack_batches([batch for _, batch in parts])
        named = [{"queue": queue, "batch": it} for (queue, _), it in zip(parts, packed, strict=True)]
        fields = {"key": key, "kind": kind, "alias": alias, "parts": named}
        return await self.send(shard, "stage", fields, *buffers)

    async def send(self, shard: int, name: str, fields: Fields, *buffers: Buffer) -> Fields:
        """See `transactions.Logs`."""
        here, elsewhere, answers = self._sort((shard,))
        for its_shard in here:
            answers = await self._here(name, {its_shard: fields}, *buffers)
        for leader in elsewhere:
            answers |= await self._there(leader, name, {shard: fields}, *buffers)
        answer = answers[shard]
        if isinstance(answer, PenstockError):
            raise answer
        return answer

    def _sort(self, shards: Iterable[int]) -> tuple[list[int], dict[str, list[int]], Answers]:
        """Those that are led here, those that others lead, and what is said of the rest."""
        here: list[int] = []
        elsewhere: dict[str, list[int]] = {}
        nowhere: Answers = {}
        for shard in shards:
            leader = self._leaders[shard]
            if shard in self._sites:
                here.append(shard)
            elif leader in ("", self._member):
                nowhere[shard] = no_leader(shard)
            else:
                elsewhere.setdefault(leader, []).append(shard)
        return here, elsewhere, nowhere

    async def _here(self, name: str, fields: Mapping[int, Fields], *body: Buffer) -> Answers:
        answers = await asyncio.gather(
            *(self._one(name, self._sites[shard], shard, its, *body) for shard, its in fields.items())
        )
        return dict(zip(fields, answers, strict=True))

    async def _one(
        self, name: str, site: Site, shard: int, fields: Fields, *body: Buffer
    ) -> Fields | PenstockError:
        if name in _OF_DOUBTS:
            self.doubts.look_at(shard)
        try:
            return (await site.link.call(name, fields, *body)).fields
        except (CallRefused, Problem) as refusal:
            return refusal

    async def _there(self, leader: str, name: str, fields: Mapping[int, Fields], *buffers: Buffer) -> Answers:
        try:
            frame = encode_frame({"call": name, "logs": list(fields.items())}, *buffers)
            asked = Asked("POST", PATH.encode(), [], b"".join(frame))
            async with self._asking(leader, asked.method), asyncio.timeout(CALL_SECONDS):
                answer = await self._others.ask(leader, "", asked)
            if answer.status != 200:
                raise unreachable(leader, f"it answers {answer.status}: {answer.body[:200]!r}")
        except TimeoutError:
            return dict.fromkeys(fields, unreachable(leader, f"no answer for {CALL_SECONDS:.0f} s"))
        except Problem as problem:
            return dict.fromkeys(fields, problem)
        (frame_back,) = FrameDecoder().receive(answer.body)
        answers: Answers = {}
        for shard, told in frame_back.fields["logs"]:
            answers[shard] = CallRefused(*told["error"]) if "error" in told else told["fields"]
        return answers

    # --- the other side --------------------------------------------------------------------------

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What another front-end asks of the logs that are led here."""
        reading = Reading(self._base, Request(scope, receive))
        try:
            body = await reading.body(BODY_MORE * self._base.body_bytes_max + (1 << 20))
            (frame,) = FrameDecoder().receive(body)
            name = frame.fields["call"]
            if name not in CALLS:
                raise Problem("not-found", f"there is no call {name!r} of logs")
            fields: dict[int, Fields] = dict(frame.fields["logs"])
            if any(shard not in self._sites for shard in fields):
                raise moved()
            if name == "stage":
                answers = await self._staged(frame, fields)
            else:
                answers = await self._here(name, fields, frame.body)
        finally:
            reading.let_go()
        told = [(shard, _told(answer)) for shard, answer in answers.items()]
        await Response(b"".join(encode_frame({"logs": told})))(scope, receive, send)

    async def _staged(self, frame: Frame, fields: Mapping[int, Fields]) -> Answers:
        ((shard, its),) = fields.items()
        parts = []
        at = 0
        for part in its["parts"]:
            batch, at = unpack_batch(part["batch"], frame.body, at)
            parts.append((part["queue"], batch))
        try:
            stages = self._sites[shard].stages
            return {shard: await stages.stage(its["key"], parts, its["alias"], its["kind"])}
        except (CallRefused, Problem) as refusal:
            return {shard: refusal}


def no_leader(shard: int) -> Problem:
    return Problem(
        "no-leader",
        f"shard {shard} is led by nobody yet; try again in a second",
        headers={"Retry-After": "1"},
    )


def _told(answer: Fields | PenstockError) -> Fields:
    if isinstance(answer, CallRefused):
        return {"error": [answer.kind, str(answer)]}
    if isinstance(answer, PenstockError):
        return {"error": ["unavailable", str(answer)]}
    return {"fields": answer}
