"""Start: the dashboard's parts put together, for the second process. Imports NiceGUI when somebody comes."""

import asyncio
import os
from typing import TYPE_CHECKING, Any, Final, cast

from starlette.types import ASGIApp

from penstock.dashboard.door import Door
from penstock.http.site import Site

if TYPE_CHECKING:
    from penstock.dashboard.web import Web


class Dashboard:
    """Owns the door, and behind it the pages once there was a visit."""

    websocket_bytes_max: Final = 1 << 20  # from a browser, at once; what pages say is a few hundred

    def __init__(self, site: Site, api: ASGIApp) -> None:
        self._site = site
        self._api = api
        self._web: Web | None = None
        self.door = Door(site, self._start)

    async def _start(self) -> ASGIApp:
        # Half a second of work, and 40 MB: in a thread, so that the API goes on answering.
        web = await asyncio.to_thread(_import, self._site.data)
        self._web = web(self._api)
        return await self._web.start()

    async def stop(self) -> None:
        if self._web is not None:
            await self._web.stop()

    @staticmethod
    def websocket_protocol() -> type[asyncio.Protocol]:
        """What uvicorn makes of a connection that becomes a websocket; imported with the first of them."""

        def make(**given: Any) -> asyncio.Protocol:  # uvicorn's own, passed through
            from penstock.dashboard.websocket import WebSocket

            return WebSocket(**given)

        # uvicorn only calls it.
        return cast(type[asyncio.Protocol], make)


def _import(data: str) -> "type[Web]":
    # NiceGUI looks for a storage beneath the folder that the process was started in; ours has none.
    os.environ["NICEGUI_STORAGE_PATH"] = os.path.join(data, "dashboard")
    from penstock.dashboard.web import Web

    return Web
