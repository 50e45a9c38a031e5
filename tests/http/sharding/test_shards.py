"""Which logs have an application, as leadership comes and goes."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.http.link import CallRefused, ShardLink, open_link
from penstock.http.sharding.shards import Opened, Shards
from tests.http.sharding.test_others import WAIT_SECONDS, running


async def nothing() -> None:
    pass


class Noted(Shards):
    """Its applications do nothing."""

    def __init__(self, sharding: dict[str, Any]) -> None:
        base: Any = SimpleNamespace(set_shards=lambda sharding, apps, sites: None, stop=nothing)
        hello = {"sharding": sharding, "archive": None, "log_level": "info", "log_format": "text"}
        super().__init__(base, hello, base, base, lambda: ())
        self.said: list[tuple[str, int, int]] = []
        self.has_changed = asyncio.Event()

    async def _start(self, shard: int, opened: Opened) -> None:
        self.said.append(("start", shard, opened[1]))
        site: Any = SimpleNamespace(archiving=SimpleNamespace(let_go=nothing))
        self._there[shard] = site, site, opened
        self.has_changed.set()

    async def _close(self, shard: int, site: Any) -> None:
        self.said.append(("close", shard, 0))


@running
async def test_a_log_that_was_lost_and_is_led_again_has_another_application() -> None:
    """Also where both come at once: what the last one knew of it may not be so any more."""
    leads = {"own": "a", "leaders": ["a"]}
    shards = Noted({**leads, "served": {"0": ["/data/log", 1]}})
    await shards.start()
    shards.has_changed.clear()
    shards.want({"own": "a", "leaders": [""], "served": {}})
    shards.want({**leads, "served": {"0": ["/data/log", 2]}})
    async with asyncio.timeout(WAIT_SECONDS):
        await shards.has_changed.wait()
    await shards.stop()
    assert shards.said == [("start", 0, 1), ("close", 0, 0), ("start", 0, 2), ("close", 0, 0)]


@running
async def test_who_waits_for_an_answer_about_a_log_that_is_let_go_of_hears_that() -> None:
    """Whoever led it may never say what has become of it."""
    here, there = socket.socketpair()
    with there:
        whole = await open_link(here.detach())
        one, other = ShardLink(whole, 0, 2), ShardLink(whole, 1, 2)
        calls = [asyncio.ensure_future(link.call("describe")) for link in (one, other)]
        await asyncio.sleep(0)
        one.end()
        async with asyncio.timeout(WAIT_SECONDS):
            with pytest.raises(CallRefused, match="not led here any more") as refused:
                await calls[0]
        assert refused.value.kind == "unavailable"  # So a sender hears that nobody knows.
        assert not calls[1].done()
        calls[1].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert whole._transport is not None
        whole._transport.close()
