"""A queue over the last hour: how much came and went, and how it stood, every ten seconds."""

import time
from typing import Final

from starlette.responses import Response

from penstock.http import kinds, schema
from penstock.http.app import Call, answer_list
from penstock.http.reading.looking import MICROSECONDS, iso_time
from penstock.http.route import QUEUE, Param, Route
from penstock.http.watching.samples import SECONDS_MAX, STEP_SECONDS, Sample
from penstock.model.rights import Right

SCHEMAS: Final = {
    "Sample": schema.object_of(
        {
            "time": schema.said(schema.TIME, "The end of the step."),
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
        }
    )
}


async def get_samples(call: Call) -> Response:
    mirror, queue = call.site.mirror, call["queue"]
    if queue not in mirror.rows:
        # It may be younger than the last round; where there is none, this says so.
        answer, _ = await call.site.link.call("queue", {"queue": queue})
        mirror.put(answer["row"])
    began = time.time() - mirror.now()  # when the mirror's clock was at 0
    found = list(mirror.samples.of(queue, mirror.now(), call["seconds"]))
    return await answer_list(
        "samples", (_fields(sample, began) for sample in found), step_seconds=STEP_SECONDS
    )


def _fields(sample: Sample, began: float) -> dict[str, object]:
    end_us = round((began + sample.end) * MICROSECONDS)
    oldest_us = max(end_us - sample.oldest_us, 0) if sample.oldest_us else None
    return {
        "time": iso_time(end_us),
        # Neither counter goes back, but for a queue that was emptied of its log and counts again.
        "rate_in": max(sample.accepted, 0) / STEP_SECONDS,
        "rate_out": max(sample.acked, 0) / STEP_SECONDS,
        "ready": sample.ready,
        "held": sample.held,
        "delayed": sample.delayed,
        "dead": sample.dead,
        "oldest_seconds": None if oldest_us is None else round(oldest_us / MICROSECONDS, 1),
    }


ROUTES: Final = (
    Route(
        "GET /v1/queues/{queue}/samples",
        get_samples,
        Right.READ,
        "How a queue did over the last hour, or since the API was started, in steps of ten seconds.",
        schema.object_of({"samples": schema.list_of(schema.ref("Sample")), "step_seconds": schema.INTEGER}),
        params=(
            QUEUE,
            Param("seconds", kinds.Whole(STEP_SECONDS, SECONDS_MAX), "how far back", default=SECONDS_MAX),
        ),
        problems=("queue-not-found",),
    ),
)
