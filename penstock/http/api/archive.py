"""The archive: where queues become Delta tables, how far each is, and what is in the way."""

from typing import Final

from starlette.responses import Response

from penstock.http import schema
from penstock.http.api.readers import ask_readers
from penstock.http.app import Call, answer_json
from penstock.http.archiving import READERS
from penstock.http.reading.looking import iso_time
from penstock.http.route import Route
from penstock.model.rights import Right

HIDDEN: Final = "who may read every queue is told why"

SCHEMAS: Final = {
    "Archive": schema.object_of(
        {
            "path": schema.said(
                schema.or_null(schema.STRING), "Where the tables are; null: nothing is archived."
            ),
            "patterns": schema.said(schema.list_of(schema.STRING), "Of the queues that are archived."),
            "seconds": schema.said(schema.COUNT, "How often a table gets what has come since."),
            "rows": schema.said(schema.COUNT, "A queue with so many new rows does not wait for that."),
            "error": schema.said(schema.or_null(schema.STRING), "Why it does not get on; null: it does."),
            "starts": schema.said(schema.COUNT, "How often its process was started."),
            "gaps": schema.said(
                schema.list_of(schema.STRING), "What was not in the log any more when it was its turn."
            ),
            "tables": schema.list_of(
                schema.object_of(
                    {
                        "view": schema.words(*READERS),
                        "version": schema.said(schema.COUNT, "Of the Delta table."),
                        "rows": schema.said(
                            schema.COUNT, "That its process has archived since it was started."
                        ),
                        "committed": schema.said(
                            schema.or_null(schema.TIME), "When it last archived something."
                        ),
                    }
                )
            ),
            "queues": schema.list_of(
                schema.object_of(
                    {
                        "queue": schema.STRING,
                        "view": schema.words(*READERS),
                        "archived": schema.said(schema.OFFSET, "What is before this is in the table."),
                        "lag": schema.said(schema.COUNT, "How much is not yet."),
                        "lag_seconds": schema.said(
                            schema.or_null(schema.POSITIVE),
                            "How old the oldest of that is; null: nobody knows.",
                        ),
                        "capped": schema.said(schema.BOOLEAN, "Whether not all of that is kept for it."),
                        "refused": schema.said(
                            schema.or_null(schema.STRING), "Why nothing is archived of it; null: it is."
                        ),
                    }
                )
            ),
        }
    )
}


async def get_archive(call: Call) -> Response:
    archiving = call.site.archiving
    plan = archiving.plan or {"path": None, "queues": [], "seconds": 0, "rows": 0}
    state, sees_all = archiving.state, call.user.may(Right.READ)
    views = {name: view for view, name in READERS.items()}
    readers = await ask_readers(call.site, call.user) if archiving.plan is not None else []
    return answer_json(
        {
            "path": plan["path"],
            "patterns": list(plan["queues"]) if sees_all else [],
            "seconds": plan["seconds"],
            "rows": plan["rows"],
            "error": (archiving.error if sees_all else HIDDEN) if archiving.error else None,
            "starts": archiving.starts,
            "gaps": state["gaps"] if sees_all else [HIDDEN] * len(state["gaps"]),
            "tables": [
                {
                    "view": view,
                    "version": it["version"],
                    "rows": it["rows"],
                    "committed": iso_time(it["committed_us"]) if it["committed_us"] else None,
                }
                for view, it in state["tables"].items()
            ],
            "queues": [
                {
                    "queue": it["queue"],
                    "view": views[reader["name"]],
                    "archived": it["position"],
                    **{name: it[name] for name in ("lag", "lag_seconds", "capped")},
                    "refused": state["refused"].get(it["queue"]),
                }
                for reader in readers
                if reader["name"] in views
                for it in reader["queues"]
            ],
        }
    )


ROUTES: Final = (
    Route(
        "GET /v1/archive",
        get_archive,
        Right.READ,
        "History as Delta tables: where they are, and what is not in them yet.",
        schema.ref("Archive"),
    ),
)
