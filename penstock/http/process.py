"""The second process from its first line to its last. `python -m penstock.http` starts it.

It lives as long as the link: when the first process is gone, so is this one, at once. There is nothing
here that would be lost: what was answered is in the log.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from penstock.common.given import SettingsError
from penstock.common.journal import start_logging
from penstock.common.malloc import keep_freed_memory
from penstock.common.tls_files import TlsFiles
from penstock.control.frames import Fields
from penstock.control.gauge import Gauge
from penstock.http.api.routes import all_routes
from penstock.http.app import App, Door
from penstock.http.bell import Bell
from penstock.http.connection import BoundedProtocol
from penstock.http.held import Held
from penstock.http.link import Link, LinkLost, open_link
from penstock.http.quick import Quick
from penstock.http.route import Route
from penstock.http.site import Site
from penstock.http.tls_door import TlsDoor
from penstock.http.web_server import Config, Server

if TYPE_CHECKING:
    from penstock.http.sharding.gate import Gate
    from penstock.http.sharding.others import Others
    from penstock.http.sharding.shards import Shards

KEEP_ALIVE_SECONDS = 75

log = logging.getLogger("penstock.http")


class Extension(Protocol):
    """What answers beside the API, in this process; it is known by its name alone (`__main__.py`)."""

    door: Door
    websocket_bytes_max: int

    def websocket_protocol(self) -> type[asyncio.Protocol]: ...

    async def stop(self) -> None: ...


Extend = Callable[[Site, "App | Gate"], Extension]


async def serve(
    link_fd: int, listen_fd: int, gauge_fd: int, bell_fd: int | None, extend: Extend | None
) -> None:
    """Answer requests until the first process says stop, or is gone."""
    link = await open_link(link_fd)
    try:
        hello = await link.hello
    except LinkLost:  # It was only prepared, and is not wanted any more.
        return
    start_logging(hello["log_level"], hello["log_format"])
    tls = _tls_files(hello)
    held = Held(Gauge(gauge_fd), max(hello["bodies_bytes_max"], hello["body_bytes_max"]))
    site = Site(link, hello, held)
    routes = partial(all_routes, hello["lease_seconds_max"])
    own = App(site, routes())
    app: App | Gate = own
    others: Others | None = None
    shards: Shards | None = None
    if hello["sharding"] is not None:
        app, others, shards = _of_several_logs(link, hello, site, own, routes)
    extension = extend(site, app) if extend is not None else None
    if extension is not None:
        app.door = extension.door
        site.has_pages = True
    BoundedProtocol.connections_max = hello["connections_max"]
    BoundedProtocol.quick = Quick(site) if shards is None else None
    config = Config(
        app,
        http=BoundedProtocol,
        ws="none" if extension is None else extension.websocket_protocol(),
        ws_max_size=0 if extension is None else extension.websocket_bytes_max,
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    server = Server(config)
    door = socket.socket(fileno=listen_fd)
    entrance: TlsDoor | None = None
    bell: Bell | None = None

    def told(fields: Fields) -> None:
        if shards is not None and ("drain" in fields or "stop" in fields):
            shards.drain()
        if "drain" in fields:
            site.stopping.set()
        elif "stop" in fields:
            config.timeout_graceful_shutdown = max(int(fields["stop"]), 1)
            site.stopping.set()
            server.should_exit = True
            for way_in in (entrance, bell):
                if way_in is not None:
                    way_in.close()
        elif "memory_is_full" in fields:
            held.set_memory_full(fields["memory_is_full"])
        elif "tokens" in fields:
            site.guard.set_users(fields["tokens"], fields["users"])
        elif "sharding" in fields and shards is not None:
            shards.want(fields["sharding"])
        elif "tls" in fields and tls is not None:
            tls.look(asked=True)

    link.hear(told)
    link.on_lost = _gone
    await (site if shards is None else shards).start()
    log.info("the HTTP API answers", extra={"facts": {"address": hello["address"], "pid": os.getpid()}})
    config.load()
    make = partial(BoundedProtocol, config, server.server_state, {})
    if tls is not None:
        entrance = TlsDoor(door, make, tls, hello["handshake_seconds"], site.auditing)
    if bell_fd is not None:
        handed_over = others.handed_over if others is not None else None
        bell = Bell(socket.socket(fileno=bell_fd), make, entrance if others is None else None, handed_over)
    try:
        await server.serve(sockets=[] if tls is not None else [door])
    finally:
        for way_in in (entrance, bell):
            if way_in is not None:
                way_in.close()
        link.on_lost = None
        if extension is not None:
            await extension.stop()
        if shards is None:
            await site.close()
        else:
            await shards.stop()
            await site.auditing.close()


def _of_several_logs(
    link: Link, hello: Fields, site: Site, own: App, routes: Callable[[], Iterable[Route]]
) -> "tuple[Gate, Others, Shards]":
    # Here, for who has one log needs none of it.
    from penstock.http.sharding.gate import Gate
    from penstock.http.sharding.others import Others
    from penstock.http.sharding.shards import Shards

    others = Others(link)
    gate = Gate(site, own, others)
    return gate, others, Shards(link, hello, site, gate, routes)


def _tls_files(hello: Fields) -> TlsFiles | None:
    """As every other door has them; the process ends where they are of no use, and is started again later."""
    if not hello["tls_certificate"]:
        return None
    try:
        return TlsFiles(f"{hello['place']}: [http]", hello["tls_certificate"], hello["tls_key"])
    except SettingsError as error:
        log.critical("%s", error)
        sys.exit(1)


def _gone() -> None:
    log.warning("the broker is gone, and so is its HTTP API")
    logging.shutdown()
    os._exit(0)


def main(link_fd: int, listen_fd: int, gauge_fd: int, bell_fd: int | None, extend: Extend | None) -> None:
    keep_freed_memory()
    serving = serve(link_fd, listen_fd, gauge_fd, bell_fd, extend)
    try:
        import uvloop
    except ImportError:
        asyncio.run(serving)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serving)
