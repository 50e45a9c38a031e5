"""Which logs have an application, as leadership comes and goes."""

import asyncio
from types import SimpleNamespace
from typing import Any

from penstock.http.sharding.shards import Opened, Shards
from tests.http.sharding.test_others import WAIT_SECONDS, running


async def nothing() -> None:
    pass


class Noted(Shards):
    """Its applications do nothing."""

    def __init__(self, sharding: dict[str, Any]) -> None:
        base: Any = SimpleNamespace(set_shards=lambda sharding, apps, sites: None, stop=nothing)
        super().__init__(base, {"sharding": sharding}, base, base, lambda: ())
        self.said: list[tuple[str, int, int]] = []
        self.has_changed = asyncio.Event()

    async def _start(self, shard: int, opened: Opened) -> None:
        self.said.append(("start", shard, opened[1]))
        site: Any = SimpleNamespace()
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
