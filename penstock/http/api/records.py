"""Where messages are in the stream of a cluster, for who reads them there, as Spark's executors do.

Only the plan comes from here: which bytes of which files, and from which records of the stream on. What is in
them goes straight from the NATS servers to whoever asks (`log/jetstream/ranges.py`).
"""

from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response

from penstock.http.api.log import Wanted
from penstock.http.app import Call, answer_json
from penstock.http.problems import Problem
from penstock.http.route import (
    INTEGER,
    OFFSET,
    QUEUE,
    STRING,
    Flag,
    Param,
    Role,
    Route,
    Schema,
    Whole,
    list_schema,
    object_schema,
)

SCHEMAS: Final[Mapping[str, Schema]] = {
    "RecordPart": object_schema(
        {
            "file": {**STRING, "description": "A file of the log."},
            "subject": {**STRING, "description": "The subject of its records in the stream."},
            "base": {**OFFSET, "description": "The log position of its first byte."},
            "position_start": {**OFFSET, "description": "The first byte to read, counted in the file."},
            "position_end": {**OFFSET, "description": "Where to stop, exclusive."},
            "seq_first": {
                **INTEGER,
                "minimum": 1,
                "description": "The stream's record that has the first byte is this one or a later one.",
            },
            "offset_start": {**OFFSET, "description": "The first message of the queue in it."},
            "offset_end": {**OFFSET, "description": "The end of these messages, exclusive."},
        }
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

    wanted = Wanted(call["queue"], "messages", call["start"], call["end"], (), call["fail_on_loss"])
    answer: dict[str, Any] | None = await site.readers.run(Planner(site.cluster, site.data).plan, wanted)
    if answer is None:
        # Nothing of it is synced; or there is no such queue.
        await site.link.call("queue", {"queue": wanted.queue})
        start = wanted.start or 0
        answer = {"stream": "", "log": 0, "number": 0, "start": start, "end": start, "parts": []}
    return answer_json(answer)


ROUTES: Final = (
    Route(
        "GET",
        "/v1/queues/{queue}/records",
        get_records,
        Role.READ,
        "Where the messages of a queue are in the stream of a cluster's log; only what is synced.",
        object_schema(
            {
                "stream": {**STRING, "description": "The stream; empty where there is nothing to read."},
                "log": {**INTEGER, "description": "The first 6 digits of the ids of its messages."},
                "number": {**INTEGER, "description": "The queue's number in the log: the next 6 digits."},
                "start": {**OFFSET, "description": "The first offset of the range that this is about."},
                "end": {**OFFSET, "description": "Its end, exclusive: where to go on."},
                "parts": list_schema({"$ref": "#/components/schemas/RecordPart"}),
            }
        ),
        params=(
            QUEUE,
            Param("start", Whole(), "the first offset; absent: the first kept"),
            Param("end", Whole(), "where to stop, exclusive; absent, or not synced: at what is synced now"),
            Param(
                "fail_on_loss",
                Flag(),
                "whether messages that retention has removed, or that cannot be read, are an error; "
                "if not, they are left out",
                default=True,
            ),
        ),
        problems=("queue-not-found", "conflict", "offsets-missing"),
        tag="messages",
    ),
)
