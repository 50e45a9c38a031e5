"""Site: what the handlers of the API work with, made once when the process starts."""

import asyncio
from collections import Counter

from penstock.control.frames import Fields
from penstock.http.auth import Guard
from penstock.http.link import Link
from penstock.http.reading.pool import ReaderPool
from penstock.http.stages.stages import Stages
from penstock.http.watching.mirror import Mirror


class Site:
    """Owns everything that outlives a request."""

    def __init__(self, link: Link, hello: Fields) -> None:
        self.link = link
        self.hello = hello
        self.guard = Guard(hello["tokens"])
        self.data: str = hello["data"]
        self.cluster: str | None = hello["cluster"]  # the name of the log that front-ends share; None: nobody
        self.body_bytes_max: int = hello["body_bytes_max"]
        self.bodies_bytes_max: int = max(hello["bodies_bytes_max"], self.body_bytes_max)
        self.bodies_bytes = 0  # of requests that are not answered yet
        self.frame_seconds: int = hello["frame_seconds"]
        self.payload_bytes_max: int = hello["payload_bytes_max"]
        self.readers = ReaderPool(self.data)
        self.mirror = Mirror(link)
        self.stages = Stages(
            self.data, link, seconds=hello["stage_seconds"], bytes_max=hello["stages_bytes_max"]
        )
        self.requests: Counter[tuple[str, str, str]] = Counter()  # answered: method, route, class of status
        self.stopping = asyncio.Event()  # set when answers that never end should end
        self.has_pages = False  # a dashboard answers beside the API

    async def start(self) -> None:
        """Begin what runs beside the requests."""
        self.mirror.start()
        await self.stages.start()

    async def close(self) -> None:
        await self.mirror.stop()
        await self.stages.stop()
        self.readers.close()
