"""Who is connected, what each uses and holds, and how one is sent away."""

import time
from typing import Final, Protocol, cast

from penstock.broker.ports import OTHERS, PortInfo
from penstock.broker.taking import Taker
from penstock.control.frames import Fields
from penstock.model.timers import SECOND_US
from penstock.server.calls.context import ROWS_MAX, Answer, CallRefused, ConnectionUnknown, Context, when_safe
from penstock.server.connection import Connection

CONSUMES_MAX: Final = 2000
"""Queues that the connections of one answer use, all together, where it is not one connection."""

HELD_RUNS_MAX: Final = 1000
HELD_SHOWN: Final = 100
"""Runs of messages that one connection holds of one queue: so many are looked at, and told."""


class Client(Protocol):
    """A port as people see it: a connection here, one of another front-end, a caller over HTTP."""

    name: str
    protocol: str
    peer: str
    connected: float
    sent: dict[str, int] | None

    @property
    def user(self) -> str: ...

    @property
    def is_held(self) -> bool: ...

    def about(self, now_us: int) -> Fields: ...


def connections(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """In the order of arrival; `next` is what to ask for behind the last one, null where it is the last."""
    infos = context.server.broker.ports.infos(fields["after"], ROWS_MAX + 1)
    rows: list[Fields] = []
    consumes = 0
    after: int | None = None
    now_us = context.server.now_us()
    for info in infos:
        consumes += len(info.consumes) + len(info.delivered) + len(cast(Client, info.port).sent or ())
        if rows and (len(rows) == ROWS_MAX or consumes > CONSUMES_MAX):
            break
        after = info.number
        rows.append(_client(info, now_us))
    answer({"connections": rows, "next": after if len(rows) < len(infos) else None})


_UNTOLD: Final[Fields] = {
    **dict.fromkeys(("certificate", "listener", "front_end", "said"), ""),
    **dict.fromkeys(("said_seconds", "heard_seconds", "blocked_seconds", "held_back_seconds", "pulse")),
    **dict.fromkeys(("bytes_in", "bytes_out", "input_bytes", "output_bytes")),
}
"""What some clients can tell of themselves, and others cannot (`Client.about`)."""


def _client(info: PortInfo, now_us: int) -> Fields:
    """A connection as a list has it. `queues` are all that it is known to use; `others`: there are more,
    whose names are not known."""
    # The server makes no other ports; those of other front-ends look like one.
    client = cast(Client, info.port)
    sent = client.sent if client.sent is not None else {}
    taken = {*info.consumes, *info.holds, *info.delivered}
    queues = {*sent, *(queue for queue, _ in taken)}
    by_count = sorted(((it, count) for it, count in sent.items() if it != OTHERS), key=lambda it: -it[1])
    return {
        "number": info.number,
        "name": client.name,
        "protocol": client.protocol,
        "peer": client.peer,
        "user": client.user,
        "connected_seconds": time.monotonic() - client.connected,
        "consumes": [{"queue": queue, "dead": dead} for queue, dead in info.consumes],
        "sends": [{"queue": queue, "count": count} for queue, count in by_count],
        "sent": sum(sent.values()) if client.sent is not None else None,
        "delivered": sum(info.delivered.values()),
        "settled": sum(info.settled.values()),
        "held": info.held,
        "blocked": info.blocked,
        "held_back": info.held_back or client.is_held,
        "queues": sorted(queues - {OTHERS}),
        "others": OTHERS in queues,
        **_UNTOLD,
        "client": client.peer,
        **client.about(now_us),
    }


def _connection_info(context: Context, fields: Fields) -> PortInfo:
    number = fields["number"]
    info = context.server.broker.ports.info(number)
    if info is None:
        raise ConnectionUnknown(f"there is no connection {number} (any more)")
    return info


def connection(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """All about one: also what it holds of each queue, and since when."""
    info = _connection_info(context, fields)
    now_us = context.server.now_us()
    takes = []
    doors = context.server.broker.doors.by_queue
    held: dict[str, list[tuple[int, int, bool, int]]] = {}
    for queue in {queue for queue, _ in info.holds}:
        held[queue] = context.log.held_by(queue, info.port.name, HELD_RUNS_MAX)
    for queue, dead in sorted(
        {*info.consumes, *info.holds, *info.delivered} - {(OTHERS, False), (OTHERS, True)}
    ):
        consumed = (queue, dead) in info.consumes
        window, active = doors[queue].door(dead).consumers.window(info.port) if consumed else (None, None)
        runs = [run for run in held.get(queue, ()) if run[2] == dead]
        since_us = min((run[3] for run in runs), default=None)
        takes.append(
            {
                "queue": queue,
                "dead": dead,
                "window": window,
                "active": active,
                "held": info.holds.get((queue, dead), 0),
                "held_seconds": max(now_us - since_us, 0) / SECOND_US if since_us is not None else None,
                "messages": [
                    {"first": first, "end": end, "seconds": max(now_us - at_us, 0) / SECOND_US}
                    for first, end, _, at_us in runs[:HELD_SHOWN]
                ],
                "delivered": info.delivered.get((queue, dead), 0),
                "settled": info.settled.get((queue, dead), 0),
            }
        )
    answer({"connection": {**_client(info, now_us), "takes": takes}})


def end(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """A connection is sent away. `name`: only if that is the one."""
    info = _connection_info(context, fields)
    port, held = info.port, info.held
    if fields["name"] is not None and fields["name"] != port.name:
        raise CallRefused(f"connection {info.number} is {port.name}, not {fields['name']}: look again")
    if isinstance(port, Taker):
        context.server.broker.taking.end(port, context.server.now_us())
    else:
        cast(Connection, port).end()
    when_safe(context, answer, {"name": port.name, "held": held})
