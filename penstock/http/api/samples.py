"""Samples: how a queue, or the whole broker, did over time (`penstock/http/history`).

Times are of the steps that somebody looked in: where the broker was not there, steps are missing.
"""

from collections.abc import Mapping
from typing import Final

from starlette.responses import Response

from penstock.http import kinds, schema
from penstock.http.api.offsets import Moment
from penstock.http.app import Call, answer_list
from penstock.http.history.keeper import STEPS, Told
from penstock.http.history.steps import COUNTED, REASONS, STANDING, WHOLE, Key, Spread
from penstock.http.reading.looking import MICROSECONDS, iso_time
from penstock.http.route import QUEUE, Param, Route
from penstock.log.info import SYNC_BOUNDS_SECONDS
from penstock.model.rights import Right
from penstock.model.spans import quantile_us, start_us

SECONDS: Final = 3600
SECONDS_MAX: Final = 14 * 86_400
MEDIAN, MOST = 0.5, 0.99

_TIMES: Final = schema.object_of(
    {
        "count": schema.COUNT,
        "p50_seconds": schema.said(schema.POSITIVE, "Half of them took no longer."),
        "p99_seconds": schema.said(schema.POSITIVE, "99 of 100 took no longer."),
        "buckets": schema.said(
            schema.list_of(
                schema.object_of(
                    {"seconds_min": schema.POSITIVE, "seconds_max": schema.POSITIVE, "count": schema.COUNT}
                )
            ),
            "How many took from one time up to another; only with buckets=true.",
        ),
    },
    optional=("buckets",),
)


def _times(text: str) -> schema.Schema:
    return {"anyOf": [_TIMES, {"type": "null"}], "description": f"{text}; null: there was none."}


_STEP: Final = {
    "time": schema.said(
        schema.TIME, "The end of the step; of the last one, which may still run, the end of what is known."
    ),
    "rate_in": schema.said(schema.POSITIVE, "Messages accepted per second, in this step."),
    "rate_out": schema.said(schema.POSITIVE, "Messages acknowledged per second, in this step."),
    "ready": schema.said(schema.OFFSET, "As it was at the end of the step, as the following."),
    "held": schema.OFFSET,
    "delayed": schema.OFFSET,
    "dead": schema.OFFSET,
    "oldest_seconds": schema.said(
        schema.or_null(schema.POSITIVE),
        "The age of the oldest message that was not settled; null: there was none.",
    ),
    "bytes": schema.COUNT,
    "consumers": schema.COUNT,
    "accepted": schema.said(schema.COUNT, "How many there were in this step, as of the following."),
    "acked": schema.COUNT,
    "delivered": schema.said(schema.COUNT, "Handed out, each time."),
    "requeued": schema.said(schema.COUNT, "Given back, by their consumers or because those were lost."),
    "expired": schema.said(schema.COUNT, "Thrown away by their TTL."),
    "rejected": schema.said(schema.COUNT, "Thrown away by their consumers."),
    "withdrawn": schema.said(schema.COUNT, "Purged, or taken back."),
    "redriven": schema.COUNT,
    "died": {
        "type": "object",
        "description": "How many became dead letters, by reason.",
        "propertyNames": {"enum": list(REASONS)},
        "additionalProperties": schema.COUNT,
    },
    "waiting": _times(
        "How long messages had waited that were handed out for the first time, since they came or were due"
    ),
    "working": _times("How long messages had been with their consumers when these settled them"),
}

SCHEMAS: Final = {
    "Sample": schema.object_of(_STEP),
    "WholeSample": schema.object_of(
        {
            **_STEP,
            "connections": schema.COUNT,
            "disk_bytes_free": schema.COUNT,
            "syncs": schema.object_of(
                {
                    "count": schema.COUNT,
                    "p50_seconds": schema.or_null(schema.POSITIVE),
                    "p99_seconds": schema.or_null(schema.POSITIVE),
                }
            ),
        }
    ),
}

_COUNTS: Final = {
    name: at for at, name in enumerate(COUNTED) if name != "looks" and not name.startswith("dead:")
}
_DEATHS: Final = {reason: COUNTED.index(f"dead:{reason}") for reason in REASONS}
_STANDS: Final = {
    name: STANDING.index(name) for name in ("ready", "held", "delayed", "dead", "bytes", "consumers")
}
_OLDEST, _CONNECTIONS, _FREE = (STANDING.index(it) for it in ("oldest", "connections", "disk_bytes_free"))


async def get_samples(call: Call) -> Response:
    mirror, queue = call.site.mirror, call["queue"]
    if queue not in mirror.rows:
        # It may be younger than the last round; where there is none, this says so.
        answer, _ = await call.site.link.call("queue", {"queue": queue})
        mirror.put(answer["row"])
    return await _answer(call, (queue, mirror.rows[queue]["identity"]))


async def get_whole(call: Call) -> Response:
    return await _answer(call, WHOLE)


async def _answer(call: Call, key: Key) -> Response:
    now_us = call.site.mirror.now_us()
    end_us = now_us if call["to"] is None else min(call["to"], now_us)
    start_us = end_us - call["seconds"] * MICROSECONDS if call["from"] is None else call["from"]
    asked = call["step"]
    step = None if asked is None else next(it for it in STEPS if it >= asked)
    past = await call.site.history.read(key, start_us // MICROSECONDS, -(-end_us // MICROSECONDS), step)
    with_buckets: bool = call["buckets"]
    rows = (_fields(told, past.seconds, end_us, with_buckets, key == WHOLE) for told in past.told)
    return await answer_list("samples", rows, step_seconds=past.seconds)


def _fields(told: Told, seconds: int, end_us: int, buckets: bool, whole: bool) -> dict[str, object]:
    step = told.step
    step_end_us = min((step.at + seconds) * MICROSECONDS, max(end_us, (step.at + 1) * MICROSECONDS))
    counts = {name: step.counted[at] for name, at in _COUNTS.items()}
    oldest = step.standing[_OLDEST]
    waits, works, syncs = step.spreads
    looked = max(told.seconds, 1)
    fields: dict[str, object] = {
        "time": iso_time(step_end_us),
        "rate_in": round(counts["accepted"] / looked, 6),
        "rate_out": round(counts["acked"] / looked, 6),
        **{name: step.standing[at] for name, at in _STANDS.items()},
        "oldest_seconds": round(max(step_end_us / MICROSECONDS - oldest / 10, 0), 1) if oldest else None,
        **counts,
        "died": {reason: step.counted[at] for reason, at in _DEATHS.items() if step.counted[at]},
        "waiting": _spread(waits, buckets),
        "working": _spread(works, buckets),
    }
    if whole:
        fields["connections"] = step.standing[_CONNECTIONS]
        fields["disk_bytes_free"] = step.standing[_FREE]
        fields["syncs"] = {
            "count": sum(syncs.values()),
            "p50_seconds": _sync_quantile(syncs, MEDIAN),
            "p99_seconds": _sync_quantile(syncs, MOST),
        }
    return fields


def _spread(spread: Spread, buckets: bool) -> dict[str, object] | None:
    if not spread:
        return None
    half, most = (quantile_us(spread, part) or 0.0 for part in (MEDIAN, MOST))
    fields: dict[str, object] = {
        "count": sum(spread.values()),
        "p50_seconds": round(half / MICROSECONDS, 6),
        "p99_seconds": round(most / MICROSECONDS, 6),
    }
    if buckets:
        fields["buckets"] = [
            {
                "seconds_min": start_us(bucket) / MICROSECONDS,
                "seconds_max": start_us(bucket + 1) / MICROSECONDS,
                "count": spread[bucket],
            }
            for bucket in sorted(spread)
        ]
    return fields


def _sync_quantile(syncs: Mapping[int, int], part: float) -> float | None:
    """As `SyncInfo.quantile` says it of all; of those beyond the last bound, that bound."""
    rank = part * sum(syncs.values())
    for bucket in sorted(syncs):
        if rank <= syncs[bucket]:
            low = SYNC_BOUNDS_SECONDS[bucket - 1] if bucket else 0.0
            high = SYNC_BOUNDS_SECONDS[min(bucket, len(SYNC_BOUNDS_SECONDS) - 1)]
            return round(low + (high - low) * rank / syncs[bucket], 6)
        rank -= syncs[bucket]
    return None


_PARAMS: Final = (
    Param("seconds", kinds.Whole(10, SECONDS_MAX), "how far back from `to`, without `from`", default=SECONDS),
    Param("from", Moment(), "from this time on; at most 14 days are kept"),
    Param("to", Moment(), "up to this time; if not given, up to now"),
    Param(
        "step",
        kinds.Whole(1, STEPS[-1]),
        f"in steps of at least so many seconds: the next of {', '.join(map(str, STEPS))} that is kept for "
        f"that time; if not given, one that makes at most 800 of them",
    ),
    Param("buckets", kinds.Flag(), "also tell how waiting and working times are spread", default=False),
)

ROUTES: Final = (
    Route(
        "GET /v1/queues/{queue}/samples",
        get_samples,
        Right.READ,
        "How a queue did over time, step by step; steps in which the broker was not there are left out.",
        schema.object_of({"samples": schema.list_of(schema.ref("Sample")), "step_seconds": schema.INTEGER}),
        params=(QUEUE, *_PARAMS),
        problems=("queue-not-found",),
    ),
    Route(
        "GET /v1/samples",
        get_whole,
        Right.READ,
        "How the whole broker did over time: what all queues did together, connections, syncs, disk.",
        schema.object_of(
            {"samples": schema.list_of(schema.ref("WholeSample")), "step_seconds": schema.INTEGER}
        ),
        params=_PARAMS,
        everywhere=True,
    ),
)
