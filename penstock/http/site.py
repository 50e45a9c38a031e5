"""Site: what the handlers of the API work with, made once when the process starts."""

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from penstock.common.malloc import give_memory_back
from penstock.control.frames import Fields
from penstock.http.archiving import Archivers, Archiving
from penstock.http.auditing import Auditing
from penstock.http.auth import Guard
from penstock.http.held import Held
from penstock.http.history.keeper import Keeper
from penstock.http.link import Link
from penstock.http.reading.pool import ReaderPool
from penstock.http.scrubbing import Scrubber
from penstock.http.stages.stages import Stages
from penstock.http.watching.health import Health
from penstock.http.watching.mirror import Mirror
from penstock.http.watching.rates import Rates
from penstock.http.watching.sayings import Sayings

if TYPE_CHECKING:
    from penstock.http.sharding.transactions import Logs, ShardedStages


class Site:
    """Owns everything that outlives a request."""

    def __init__(self, link: Link, hello: Fields, held: Held) -> None:
        self.link = link
        self.held = held
        self.hello = hello
        self.auditing = Auditing(link)
        self.guard = Guard(hello["tokens"], hello["users"])
        self.data: str = hello["data"]
        self.cluster: str | None = hello["cluster"]  # the name of the log that front-ends share; None: nobody
        self.shard: int | None = hello.get("shard")  # where that has several
        self.body_bytes_max: int = hello["body_bytes_max"]
        self.frame_seconds: int = hello["frame_seconds"]
        self.payload_bytes_max: int = hello["payload_bytes_max"]
        self.readers = ReaderPool(self.data)
        self.mirror = Mirror(link)
        self.rates = Rates()
        self.sayings = Sayings()
        self.archiving = Archiving(self.data, hello, link, self.mirror, self.sayings)
        # Of several logs one process archives all that are led here.
        self._archivers = Archivers(hello) if hello["sharding"] is None else None
        self.health = Health(link, self.mirror, hello["health_seconds"], archiving=self.archiving)
        self.history = Keeper(self.data, hello["history_days"], link, self.mirror)
        self.auditing.done = self.history.acted
        self.scrubber = Scrubber(self.data, link)
        self.stages = Stages(self.data, link)
        self.transactions: Stages | ShardedStages = self.stages
        self.logs: Logs | None = None  # all of the cluster, where it has several
        self.requests: Counter[tuple[str, str, str]] = Counter()  # answered: method, route, class of status
        self.searches: Counter[str] = Counter()  # that are running, by user
        self.stopping = asyncio.Event()  # set when answers that never end should end
        self.is_closed = False
        self.has_pages = False  # a dashboard answers beside the API

    async def start(self) -> None:
        """Begin what runs beside the requests."""
        self.mirror.start()
        self.health.start()
        self.history.start()
        await self.stages.start()
        self.scrubber.start()
        if self._archivers is not None:
            self._archivers.want({"": self.archiving})
        asyncio.get_running_loop().call_later(1, give_memory_back)  # What only the start took.

    async def close(self) -> None:
        self.is_closed = True
        self.stopping.set()  # What never ends, and what waits, ends here.
        await self.auditing.close()
        if self._archivers is not None:
            await self._archivers.stop()
        await self.health.stop()
        await self.history.stop()
        await self.mirror.stop()
        self.scrubber.stop()
        await self.stages.stop()
        self.readers.close()
