"""Calls: what the second process may ask of the first, a handler for each.

    append, transact                       messages in
    take, untake, settle                   messages out, for a time, and what becomes of them
    stage, commit, abort, transaction      transactions whose parts come one by one
    queues, queue, states                  looking at queues
    pause, purge, redrive, withdraw, delete   knobs
    hold_reader, release_reader, readers   who reads the log, and holds retention
    connections, connection, end           who is connected
    engine, health                         the broker itself
    attention                              who does not read, who holds, who waits for room

A handler gets the fields and bytes of a frame (see `control/frames.py`) and an `answer` to call once,
now or later: `answer(fields, *buffers)`, or `answer.refuse(kind, detail)`. What it raises is refused by
whoever called it, with the kind that `refusal_of` says.

Rules that always hold:
  * No handler keeps the loop for long. What lists much answers in parts, and is called again; what moves
    many messages does so in steps, between which the loop goes on.
  * A kind of refusal says whose turn it is: `failed` is final, `bug` is a fault of ours.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from itertools import islice
from typing import Final, Protocol, cast

from penstock import __version__
from penstock.broker.broker import Broker
from penstock.broker.operate import DRAINING, Draining, Operator, QueueRow, TooFast
from penstock.broker.ports import OTHERS, PortInfo
from penstock.broker.taking import Ruling, Taker
from penstock.control.batches import unpack_batch
from penstock.control.frames import Buffer, Fields
from penstock.control.takes import pack_taken, unpack_verdicts
from penstock.log.block import read_header
from penstock.log.errors import (
    DiskFull,
    LogError,
    LogFailed,
    LogRefused,
    QueueDeleted,
    QueueFull,
    QueueTooSmall,
    QueueUnknown,
    ReaderUnknown,
    StageDamaged,
    StageUnknown,
)
from penstock.log.info import QueueInfo, ReaderInfo
from penstock.log.log import Log
from penstock.log.results import Begun, StageInfo, Stored, TransactionDone, TransactionReceipt
from penstock.log.scan import Hole
from penstock.model.batch import Batch, Slice
from penstock.model.life import Event, Reason, State
from penstock.model.pending import Mark
from penstock.model.policy import QueueNameError
from penstock.model.timers import SECOND_US
from penstock.model.words import Consume, Outcome
from penstock.server.audit import Audit
from penstock.server.connection import Connection
from penstock.server.memory import Account

ROWS_MAX: Final = 50
"""Queues or connections in one answer."""

CONSUMES_MAX: Final = 2000
"""Queues that the connections of one answer use, all together, where it is not one connection."""

HELD_RUNS_MAX: Final = 1000
HELD_SHOWN: Final = 100
"""Runs of messages that one connection holds of one queue: so many are looked at, and told."""

RUNS_MAX: Final = 2000
"""Runs of messages in one answer of `states`, whatever is asked for."""

STEPS_SECONDS_MAX: Final = 5.0
"""After so long a purge or redrive tells how far it is, and is asked to go on."""


log = logging.getLogger("penstock.control")


class Answer(Protocol):
    """What a call is answered with, once."""

    def __call__(self, fields: Fields, *buffers: Buffer) -> None: ...

    def refuse(self, kind: str, detail: str) -> None: ...

    def beside(self, number: int) -> "Answer":
        """That of another call, which came in the same frame under this number."""


class Host(Protocol):
    """What a handler needs of the server."""

    started: float
    memory: Account
    audit: Audit

    @property
    def broker(self) -> Broker: ...

    @property
    def log(self) -> Log: ...

    def now_us(self) -> int: ...

    def arrival_us(self) -> int: ...

    def fail(self, error: LogFailed) -> None: ...

    def listeners(self) -> list[Fields]:
        """Where clients of the wires connect to."""


class Context:
    """What handlers work on. One to a link: a round of `queues` is of one caller."""

    def __init__(self, server: Host) -> None:
        self.server = server
        self.log = server.log
        self.operator = Operator(server.broker, server.log)
        self.staged: dict[int, list[tuple[str, Batch]]] = {}  # of stages that come in several calls
        self.log.times.want(True)

    def refuse(self, answer: Answer, error: Exception, call: str = "") -> None:
        """Say no for an error, which may have come when nobody was there any more to raise it to."""
        kind = refusal_of(error)
        if kind is None:
            log.error("call %r of the second process failed", call or "earlier", exc_info=error)
            kind = "bug"
        answer.refuse(kind, str(error))
        if isinstance(error, LogFailed):
            self.server.fail(error)


Handler = Callable[[Context, Fields, memoryview, Answer], None]


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


class ConnectionUnknown(LogRefused):
    """There is no connection of that number, or not any more."""


class CallRefused(LogRefused):
    """A call that asks for what cannot be, said by its handler."""


REFUSALS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (QueueUnknown, "no-queue"),
    (QueueDeleted, "deleted"),
    (ReaderUnknown, "no-reader"),
    (ConnectionUnknown, "no-connection"),
    (StageUnknown, "no-stage"),
    (StageDamaged, "stage-damaged"),
    (DiskFull, "disk-full"),
    (QueueTooSmall, "too-large"),
    (QueueFull, "queue-full"),
    (LogFailed, "failed"),
    (LogError, "refused"),
    (QueueNameError, "name"),
    (Draining, "draining"),
    (TooFast, "too-fast"),
)
"""The kind of refusal that an error is; the first that fits counts."""


def refusal_of(error: Exception) -> str | None:
    """The kind of a refusal; None where the error is a fault of ours."""
    return next((kind for error_type, kind in REFUSALS if isinstance(error, error_type)), None)


# --- messages in ---------------------------------------------------------------------------------


def _append(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    batch, _ = unpack_batch(fields["batch"], body, 0)

    def receipt(result: Stored | LogError) -> None:
        if isinstance(result, LogError):
            context.refuse(answer, result)
        else:
            answer({"first": result.first, "end": result.end, "origin": result.origin.decode()})

    context.operator.append(fields["queue"], batch, context.server.arrival_us(), receipt)


def _transact(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    receipt = _committed(context, answer)
    context.operator.transact(fields["key"], _parts(fields, body), context.server.arrival_us(), receipt)


def _parts(fields: Fields, body: memoryview) -> list[tuple[str, Batch]]:
    parts: list[tuple[str, Batch]] = []
    at = 0
    for part in fields["parts"]:
        batch, at = unpack_batch(part["batch"], body, at)
        parts.append((part["queue"], batch))
    return parts


def _committed(context: Context, answer: Answer) -> TransactionReceipt:
    def receipt(result: TransactionDone | LogError) -> None:
        if isinstance(result, LogError):
            context.refuse(answer, result)
        else:
            answer({**result._asdict(), "stored": _stored(result.stored)})

    return receipt


# --- messages out --------------------------------------------------------------------------------


def _take(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """Verdicts on what was taken before may come along, and are carried out first. They have an answer of
    their own, and messages are taken whatever that is."""
    queue, dead = fields["queue"], fields["dead"]
    log = context.log
    if "settle" in fields:
        settled = answer.beside(fields["settle"]["n"])
        try:
            _settle(context, fields["settle"], body, settled)
        except Exception as error:  # noqa: BLE001 - as of every call
            context.refuse(settled, error, "settle")

    def done(ends_us: int, slices: list[Slice]) -> None:
        taken = [(it, log.whys(queue, it.offset_start, it.offset_end) if it.reason else []) for it in slices]
        its_fields, buffers = pack_taken(ends_us, taken)
        answer(its_fields, *buffers)

    if context.server.broker.is_draining:
        raise Draining(DRAINING)
    context.server.broker.taking.take(
        fields["take"],
        fields["consumer"],
        fields["user"],
        time.monotonic(),
        Consume(queue, fields["max"], dead),
        fields["wait_us"],
        fields["lease_us"],
        context.server.arrival_us(),
        done,
        fields["agent"],
    )


def _audit(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    context.server.audit.act(fields["line"], lambda: answer({}))


def _refusals(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    for line, times in fields["rows"]:
        context.server.audit.refused(line, times)
    answer({})


def _untake(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    context.server.broker.taking.untake(fields["take"], context.server.arrival_us())
    answer({})


_OUTCOMES: Final = {"extend": None, **{outcome.value: outcome for outcome in Outcome}}


def _settle(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    now_us, queue = context.server.arrival_us(), fields["queue"]
    done: list[int] = []
    gone: list[list[int]] = []
    for verdict in unpack_verdicts(fields, body):
        ruling = Ruling(_OUTCOMES[verdict.outcome], *verdict[1:])
        count, others = context.server.broker.taking.settle(queue, ruling, now_us)
        done.append(count)
        gone.append(others)
    context.log.confirm_with_turn(_told_when_safe(context, answer, {"done": done, "gone": gone}))


# --- transactions whose parts come one by one ------------------------------------------------------


def _stage(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """A stage is one call, or several with one number, of which all but the last say that there is more."""
    parts = context.staged.pop(fields["number"], [])
    if fields.get("gone"):
        answer({})
        return
    parts += _parts(fields, body)
    if fields.get("more"):
        context.staged[fields["number"]] = parts
        answer({})
        return

    def receipt(result: StageInfo | LogError) -> None:
        if isinstance(result, LogError):
            context.refuse(answer, result)
        else:
            answer(_stage_fields(result))

    context.operator.stage(
        fields["key"], parts, context.server.arrival_us(), receipt, totals=fields["totals"], was=fields["was"]
    )


def _stage_fields(stage: StageInfo) -> Fields:
    return {"stage": stage.stage, "count": stage.messages, "bytes": stage.payload_bytes}


def _commit(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """One step now, the others in later turns of the loop."""
    loop = asyncio.get_running_loop()
    begun = Begun(fields.get("steps", 0), fields.get("fingerprint", ""))
    now_us, receipt = context.server.arrival_us(), _committed(context, answer)
    steps = context.operator.commit(fields["key"], fields["stages"], now_us, receipt, begun)

    def take_one() -> None:
        try:
            if next(steps, answer) is not answer:
                loop.call_soon(take_one)
        except Exception as error:  # noqa: BLE001 - nobody else is there to see it
            context.refuse(answer, error)

    take_one()


def _abort(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    key = fields["key"]
    steps = context.log.transaction_steps(key)
    if steps != fields.get("steps", 0):
        raise CallRefused(
            f"transaction {key!r} has begun, in an earlier version: {steps} chunks of it are in the log"
        )
    context.log.abort(key, context.server.arrival_us())
    _when_safe(context, answer, _standing(context.log, key))


def _transaction(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    told = _standing(context.log, fields["key"])
    its_own = {it.stage for it in context.log.stages(fields["key"])}.intersection(fields.get("stages", ()))
    told["queues"] = sorted(context.log.staged_queues(list(its_own)))
    if told["stored"] is None:
        answer(told)  # What is staged is synced.
    else:
        _when_safe(context, answer, told)


def _standing(log: Log, key: str) -> Fields:
    stored = log.transaction(key)
    return {
        "stored": _stored(stored) if stored is not None else None,
        "steps": log.transaction_steps(key),
        "stages": [_stage_fields(stage) for stage in log.stages(key)],
    }


def _stored(stored: list[Stored]) -> list[list[object]]:
    return [[it.queue, it.first, it.end, it.origin.decode()] for it in stored]


# --- looking at queues ---------------------------------------------------------------------------


def _queues(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """Rows of a round. `all` begins one with every queue; its other parts are asked for without."""
    rows, more = context.operator.changed_rows(ROWS_MAX, every=fields["all"])
    told = {
        "queues": [{**_row(row), "times": _times(context, row.info.name)} for row in rows],
        "gone": list(context.log.deleted),
        "more": more,
    }
    context.log.deleted.clear()
    answer({**told, "time_us": context.server.now_us()})


_INFO_FIELDS: Final = tuple(QueueInfo.__dataclass_fields__)


def _row(row: QueueRow) -> Fields:
    info = row.info
    counts = {_event_label(*what): count for what, count in row.counts.items()}
    # `asdict` would take longer than all the rest.
    shown = {name: getattr(info, name) for name in _INFO_FIELDS}
    return {
        **shown,
        "consumers": row.consumers,
        "delivered": row.delivered,
        "counts": counts,
        "bytes_max": row.bytes_max,
    }


def _times(context: Context, queue: str) -> list[list[int]] | None:
    """Waiting and working times since the last round: bucket, count, bucket, count, …"""
    waits, works = context.log.take_times(queue)
    if not waits and not works:
        return None
    return [[number for pair in counts.items() for number in pair] for counts in (waits, works)]


@cache
def _event_label(event: Event, reason: Reason) -> str:
    return f"{event.name.lower()}:{reason.label}" if reason else event.name.lower()


def _queue(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    name = fields["queue"]
    deaths = context.log.deaths(name)
    answer(
        {
            "row": _row(context.operator.row(name)),
            "mark": context.log.mark(name),
            "dead_reasons": {reason.label: count for reason, count in deaths.items()},
            "policy": asdict(context.log.policies.for_queue(name)),
        }
    )


_ONLY: Final = {
    None: None,
    "ready": State.READY,
    "delayed": State.DELAYED,
    "held": State.HELD,
    "dead": State.DEAD,
}


def _states(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    context.log.check_same(fields["queue"], fields.get("identity"))
    runs_max = min(max(fields["runs_max"], 1), RUNS_MAX)
    only = _ONLY[fields["only"]]
    runs = context.log.states(fields["queue"], fields["start"], fields["end"], runs_max, only)
    answer(
        {
            "count": len(runs),
            "next": runs.next,
            "consumers": runs.consumers,
            "time_us": context.server.now_us(),
            "repairs": len(runs.repair_first),
            "steps": runs.steps,
            "whys": runs.whys,
        },
        runs.repair_first.tobytes(),
        runs.repair_end.tobytes(),
        runs.repair_distance.tobytes(),
        runs.first.tobytes(),
        runs.end.tobytes(),
        runs.time_us.tobytes(),
        runs.expires_us.tobytes(),
        runs.attempts.tobytes(),
        runs.retries.tobytes(),
        runs.consumer.tobytes(),
        runs.state.tobytes(),
        runs.reason.tobytes(),
    )


# --- knobs ---------------------------------------------------------------------------------------


def _pause(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    context.operator.pause(fields["queue"], fields["paused"], context.server.now_us())
    _when_safe(context, answer, {"paused": fields["paused"]})


def _when_safe(context: Context, answer: Answer, result: Fields) -> None:
    """Tell what was done when it is synced: a crash does not take back what somebody was told."""
    context.log.confirm(context.server.now_us(), _told_when_safe(context, answer, result))


def _told_when_safe(context: Context, answer: Answer, result: Fields) -> Callable[[LogFailed | None], None]:
    def confirmed(error: LogFailed | None) -> None:
        if error is None:
            answer(result)
        else:
            context.refuse(answer, error)

    return confirmed


def _purge(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    now_us = context.server.now_us()
    context.log.check_same(fields["queue"], fields.get("identity"))
    steps = context.operator.purge(fields["queue"], now_us, dead=fields["dead"], mark=_mark(fields))
    _take_steps(context, steps, answer)


def _delete(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    info = context.operator.delete(fields["queue"], context.server.now_us(), force=fields["force"])
    _when_safe(context, answer, asdict(info))


def _redrive(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    ranges = fields["ranges"]
    context.log.check_same(fields["queue"], fields.get("identity"))
    steps = context.operator.redrive(
        fields["queue"],
        context.server.now_us(),
        reason=_reason(fields["reason"]),
        ranges=[(first, end) for first, end in ranges] if ranges is not None else None,
        limit=fields["limit"],
        mark=_mark(fields),
    )
    _take_steps(context, steps, answer)


def _withdraw(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    context.log.check_same(fields["queue"], fields["identity"])
    ranges = [(first, end) for first, end in fields["ranges"]]
    _take_steps(context, context.operator.withdraw(fields["queue"], context.server.now_us(), ranges), answer)


def _mark(fields: Fields) -> Mark | None:
    """The one that `queue` told, for a purge or redrive in several calls; None: as it stands now."""
    mark = fields.get("mark")
    return (mark[0], mark[1]) if mark is not None else None


def _reason(label: str | None) -> Reason | None:
    try:
        return Reason.of(label) if label is not None else None
    except ValueError as error:
        raise CallRefused(str(error)) from None


def _take_steps(context: Context, steps: Iterator[int], answer: Answer) -> None:
    """One step now, the others in later turns of the loop; the answer comes with the last one."""
    loop = asyncio.get_running_loop()
    until = time.monotonic() + STEPS_SECONDS_MAX
    total = 0

    def take_one() -> None:
        nonlocal total
        try:
            count = next(steps, None)
            total += count or 0
            # One that has moved nothing yet would begin where it began, when it is asked again.
            if count is None or (total and time.monotonic() > until):
                _when_safe(context, answer, {"count": total, "more": count is not None})
            else:
                loop.call_soon(take_one)
        except Exception as error:  # noqa: BLE001 - nobody else is there to see it
            context.refuse(answer, error)

    take_one()


# --- readers -------------------------------------------------------------------------------------


def _hold_reader(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    now_us = context.server.now_us()
    context.operator.hold_reader(
        fields["name"],
        fields["view"],
        fields["positions"],
        fields["lease_seconds"],
        now_us,
        readers_max=fields["readers_max"],
        keep_others=fields.get("keep_others", False),
    )
    told = fields["positions"] if fields.get("keep_others") else None  # and not the 100,000 others
    mine = [reader for reader in context.log.readers(told) if reader.name == fields["name"]]
    _when_safe(context, answer, {"reader": _reader(context, mine, now_us)})


def _release_reader(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    context.operator.release_reader(fields["name"], context.server.now_us())
    _when_safe(context, answer, {})


def _readers(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """All of them, or the one that is named."""
    name = fields.get("name")
    by_name: dict[str, list[ReaderInfo]] = {}
    for reader in context.log.readers():
        if name is None or reader.name == name:
            by_name.setdefault(reader.name, []).append(reader)
    now_us = context.server.now_us()
    answer({"readers": [_reader(context, its, now_us) for its in by_name.values()]})


def _reader(context: Context, infos: list[ReaderInfo], now_us: int) -> Fields:
    """A reader with all its queues; which have one view and one lease, but for those that it has left."""
    newest = max(infos, key=lambda info: info.lease_until_us)
    queues = []
    for info in infos:
        queues.append(
            {
                "queue": info.queue,
                "position": info.position,
                "end": info.end,
                "lag": max(info.end - info.position, 0),
                "capped": info.capped,
            }
        )
    return {
        "name": newest.name,
        "view": newest.view,
        "lease_seconds_left": max(newest.lease_until_us - now_us, 0) / SECOND_US,
        "queues": queues,
    }


# --- the broker itself ---------------------------------------------------------------------------


def _connections(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
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


def _connection(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
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


def _end(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """A connection is sent away. `name`: only if that is the one."""
    info = _connection_info(context, fields)
    port, held = info.port, info.held
    if fields["name"] is not None and fields["name"] != port.name:
        raise CallRefused(f"connection {info.number} is {port.name}, not {fields['name']}: look again")
    if isinstance(port, Taker):
        context.server.broker.taking.end(port, context.server.now_us())
    else:
        cast(Connection, port).end()
    _when_safe(context, answer, {"name": port.name, "held": held})


def _engine(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    info = context.log.info()
    sync, stages = info.sync, info.stages
    answer(
        {
            **{name: value for name, value in asdict(info).items() if name != "sync"},
            "failed": info.failed or None,
            "stages": {
                "count": stages.count,
                "bytes": stages.bytes,
                "oldest_seconds": max(context.server.now_us() - stages.since_us, 0) / SECOND_US
                if stages.since_us
                else None,
            },
            "sync": {
                "count": sync.count,
                "seconds_sum": sync.seconds_sum,
                "last_seconds": sync.seconds_last,
                "p50_seconds": sync.quantile(0.5),
                "p99_seconds": sync.quantile(0.99),
                "buckets": sync.buckets,
            },
            "memory": {
                "held_bytes": context.server.memory.held_bytes + context.server.memory.tls_bytes,
                "limit_bytes": context.server.memory.limit_bytes,
                "closed": context.server.memory.closed,
                "broadcasts_lost": context.server.memory.broadcasts_lost,
            },
            "connections": len(context.server.broker.ports.attached),
            "durability": context.log.policies.defaults.durability,
            "listeners": context.server.listeners(),
            "version": __version__,
            "uptime_seconds": time.monotonic() - context.server.started,
        }
    )


def _rot(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """Whoever scrubs the log has found bytes that are not what was written."""
    start = fields["start"]
    context.log.report_rot(
        fields["segment"], Hole(start, fields["end"], read_header(body, 0, start)), fields["why"]
    )
    context.server.broker.wake()
    answer({})


def _health(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    reason = context.operator.unready
    info = context.log.info()
    warnings = ["disk"] if info.disk_bytes_free < info.disk_bytes_reserve else []
    answer({"ready": not reason, "reason": reason, "cluster": info.cluster, "warnings": warnings})


def _attention(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """What the rows of queues do not tell; who holds messages is told of the queues that are asked for."""
    operator = context.operator
    answer(
        {
            "blocked": [
                {
                    "name": it.port.name,
                    "blockings": it.blockings,
                    "queues": [queue for queue, _ in islice(it.doors, CONSUMES_MAX)],
                }
                for it in operator.blocked()
            ],
            "holders": {queue: operator.holders(queue) for queue in fields["queues"][:ROWS_MAX]},
            "waited_for": operator.waited_for(),
        }
    )


CALLS: Final[dict[str, Handler]] = {
    "take": _take,
    "untake": _untake,
    "audit": _audit,
    "refusals": _refusals,
    "settle": _settle,
    "append": _append,
    "transact": _transact,
    "stage": _stage,
    "commit": _commit,
    "abort": _abort,
    "transaction": _transaction,
    "queues": _queues,
    "queue": _queue,
    "states": _states,
    "pause": _pause,
    "purge": _purge,
    "redrive": _redrive,
    "withdraw": _withdraw,
    "delete": _delete,
    "hold_reader": _hold_reader,
    "release_reader": _release_reader,
    "readers": _readers,
    "connections": _connections,
    "connection": _connection,
    "end": _end,
    "engine": _engine,
    "rot": _rot,
    "health": _health,
    "attention": _attention,
}
"""Every call by its name."""
