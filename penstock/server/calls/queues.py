"""Queues: what they are like and what is in them, and the knobs that people turn."""

import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from typing import Final

from penstock.broker.operate import QueueRow
from penstock.control.frames import Fields
from penstock.log.info import QueueInfo
from penstock.model.life import Event, Reason, State
from penstock.model.pending import Mark
from penstock.server.calls.context import (
    ROWS_MAX,
    Answer,
    CallRefused,
    Context,
    when_safe,
)

RUNS_MAX: Final = 2000
"""Runs of messages in one answer of `states`, whatever is asked for."""

STEPS_SECONDS_MAX: Final = 5.0
"""After so long a purge or redrive tells how far it is, and is asked to go on."""


def queues(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
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


def queue(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
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


def states(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
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


def pause(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    context.operator.pause(fields["queue"], fields["paused"], context.server.now_us())
    when_safe(context, answer, {"paused": fields["paused"]})


def purge(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    now_us = context.server.now_us()
    context.log.check_same(fields["queue"], fields.get("identity"))
    steps = context.operator.purge(fields["queue"], now_us, dead=fields["dead"], mark=_mark(fields))
    _take_steps(context, steps, answer)


def delete(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    info = context.operator.delete(fields["queue"], context.server.now_us(), force=fields["force"])
    when_safe(context, answer, asdict(info))


def redrive(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
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


def withdraw(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
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
    until = time.monotonic() + STEPS_SECONDS_MAX
    total = 0

    def take_one() -> None:
        nonlocal total
        try:
            count = next(steps, None)
            total += count or 0
            # One that has moved nothing yet would begin where it began, when it is asked again.
            if count is None or (total and time.monotonic() > until):
                when_safe(context, answer, {"count": total, "more": count is not None})
            else:
                context.step(take_one)
        except Exception as error:  # noqa: BLE001 - nobody else is there to see it
            context.refuse(answer, error)

    take_one()
