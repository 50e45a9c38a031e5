"""Shards: an application for each log that this front-end leads, made and ended as leadership comes and
goes."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from penstock.control.frames import Fields
from penstock.http.app import App
from penstock.http.archiving import Archivers
from penstock.http.link import Link, ShardLink
from penstock.http.route import Route
from penstock.http.sharding.gate import MOVED_SECONDS, Gate
from penstock.http.site import Site

AGAIN_SECONDS: Final = 1.0
"""After this, it is tried again to start what could not be started."""

log = logging.getLogger("penstock.http")

Opened = tuple[str, int]
"""The folder of a log, and its opening: one that was lost and is led again is another, in the same folder."""


class Shards:
    def __init__(
        self, link: Link, hello: Fields, base: Site, gate: Gate, routes: Callable[[], Iterable[Route]]
    ) -> None:
        self._link = link
        self._hello = hello
        self._base = base
        self._gate = gate
        self._routes = routes
        self._there: dict[int, tuple[Site, App, Opened]] = {}
        self._wanted: Fields = hello["sharding"]
        self._changed = asyncio.Event()
        self._changing: asyncio.Task[None] | None = None
        self._archivers = Archivers(hello)

    async def start(self) -> None:
        await self._change()
        self._changing = asyncio.get_running_loop().create_task(self._go_on())

    def want(self, sharding: Fields) -> None:
        """So it is from now on."""
        self._wanted = sharding
        self._tell()
        self._changed.set()

    def drain(self) -> None:
        """Answers that never end should end."""
        for site, _, _ in self._there.values():
            site.stopping.set()

    async def _go_on(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._change()

    async def _change(self) -> None:
        served = self._served()
        gone = [it for it, (_, _, opened) in self._there.items() if served.get(it) != opened]
        sites = [(shard, self._there.pop(shard)[0]) for shard in gone]
        self._archive()
        for shard, site in sites:
            await self._close(shard, site)
        for shard, opened in served.items():
            if shard not in self._there:
                await self._start(shard, opened)
        self._tell()
        self._archive()

    def _archive(self) -> None:
        self._archivers.want({str(shard): site.archiving for shard, (site, _, _) in self._there.items()})

    async def _start(self, shard: int, opened: Opened) -> None:
        link = ShardLink(self._link, shard, len(self._wanted["leaders"]))
        its = {**self._hello, "data": opened[0], "shard": shard}
        site = Site(link, its, self._base.held)
        site.guard, site.has_pages = self._base.guard, self._base.has_pages
        site.logs = self._gate.logs
        if self._base.stopping.is_set():
            site.stopping.set()
        try:
            await site.start()
        except Exception:  # as with the broker, another try may go well
            log.exception("the API of shard %d could not be started", shard)
            await self._close(shard, site)
            asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._changed.set)
        else:
            self._there[shard] = site, App(site, self._routes()), opened

    async def _close(self, shard: int, site: Site) -> None:
        # What it had been asked before it still answers, unless it was let go of in the middle.
        assert isinstance(site.link, ShardLink)
        asyncio.get_running_loop().call_later(MOVED_SECONDS, site.link.end)
        try:
            await site.close()
        except Exception:  # of what is over; the others have theirs to do
            log.exception("the API of shard %d has not ended well", shard)

    def _served(self) -> dict[int, Opened]:
        return {int(shard): (folder, opening) for shard, (folder, opening) in self._wanted["served"].items()}

    def _tell(self) -> None:
        served = self._served()
        there = {it: found for it, found in self._there.items() if served.get(it) == found[2]}
        apps = {it: app for it, (_, app, _) in there.items()}
        self._gate.set_shards(self._wanted, apps, {it: site for it, (site, _, _) in there.items()})

    async def stop(self) -> None:
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.gather(self._changing, return_exceptions=True)
        await self._archivers.stop()
        await self._gate.stop()
        for shard, (site, _, _) in self._there.items():
            await self._close(shard, site)
