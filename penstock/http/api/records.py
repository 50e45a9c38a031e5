"""Where messages are in the stream of a cluster, for who reads them there, as Spark's executors do.

Only the plan comes from here: which bytes of which files, and from which records of the stream on. What is in
them goes straight from the NATS servers to whoever asks (`log/jetstream/ranges.py`).
"""

from typing import Any, Final

from starlette.responses import Response

from penstock.http import kinds, schema
from penstock.http.api.log import END, FAIL_ON_LOSS, Wanted
from penstock.http.app import Call, answer_json
from penstock.http.problems import Problem
from penstock.http.route import IDENTITY, QUEUE, Param, Route
from penstock.model.rights import Right

SCHEMAS: Final = {
    "RecordPart": schema.object_of(
        {
            "file": schema.said(schema.STRING, "A file of the log."),
            "subject": schema.said(schema.STRING, "The subject of its records in the stream."),
            "base": schema.said(schema.OFFSET, "The log position of its first byte."),
            "position_start": schema.said(schema.OFFSET, "The first byte to read, counted in the file."),
            "position_end": schema.said(schema.OFFSET, "Where to stop, exclusive."),
            "seq_first": {
                **schema.INTEGER,
                "minimum": 1,
                "description": "The stream's record that has the first byte is this one or a later one.",
            },
            "offset_start": schema.said(schema.OFFSET, "The first message of the queue in it."),
            "offset_end": schema.said(schema.OFFSET, "The end of these messages, exclusive."),
            "number": schema.said(
                schema.INTEGER, "These were staged: the number of the queue whose blocks have their rows."
            ),
            "runs": schema.said(
                schema.list_of(schema.list_of(schema.OFFSET)),
                "Which rows are meant, in runs: the offset of the first, its row, how many there are, the "
                "opening and the time (µs) of their commit.",
            ),
        },
        ("number", "runs"),
    )
}


async def get_records(call: Call) -> Response:
    site = call.site
    if site.cluster is None:
        raise Problem(
            "conflict",
            "this broker keeps its log in files of its own, not in NATS; read it over HTTP, at "
            "/v1/queues/NAME/log",
        )
    # Whoever has no cluster loads nothing of it.
    from penstock.http.reading.records import Planner
    from penstock.log.jetstream.names import LogNames

    wanted = Wanted(
        call["queue"], "messages", call["start"], call["end"], (), call["fail_on_loss"], call["identity"]
    )
    planner = Planner(LogNames(site.cluster, site.shard), site.data)
    answer: dict[str, Any] | None = await site.readers.run(planner.plan, wanted)
    if answer is None:
        # Nothing of it is synced; or there is no such queue.
        await site.link.call("queue", {"queue": wanted.queue})
        start = wanted.start or 0
        answer = {"stream": "", "log": 0, "number": 0, "start": start, "end": start, "parts": []}
    return answer_json(answer)


ROUTES: Final = (
    Route(
        "GET /v1/queues/{queue}/records",
        get_records,
        Right.READ,
        "Where the messages of a queue are in the stream of a cluster's log; only what is synced.",
        schema.object_of(
            {
                "stream": schema.said(schema.STRING, "The stream; empty where there is nothing to read."),
                "log": schema.said(schema.INTEGER, "The first 6 digits of the ids of its messages."),
                "number": schema.said(schema.INTEGER, "The queue's number in the log: the next 6 digits."),
                "start": schema.said(schema.OFFSET, "The first offset of the range that this is about."),
                "end": schema.said(schema.OFFSET, "Its end, exclusive: where to go on."),
                "parts": schema.list_of(schema.ref("RecordPart")),
            }
        ),
        params=(
            QUEUE,
            Param("start", kinds.Whole(), "the first offset; absent: the first kept"),
            END,
            FAIL_ON_LOSS,
            IDENTITY,
        ),
        problems=("queue-not-found", "queue-deleted", "conflict", "offsets-missing"),
    ),
)
