"""Transactions: parts are staged, and then all that belong together are committed in one step, once.

The two steps of a sink whose tasks are tried again. A task stages what it has to write, each try for itself;
whoever knows which tries count commits these, and may do so again until it has an answer.
"""

from typing import Final

from starlette.responses import Response

from penstock.http import kinds, schema
from penstock.http.app import Call, answer_json
from penstock.http.auth import forbidden
from penstock.http.bodies.media import BATCH_BODY, read_parts
from penstock.http.problems import Problem
from penstock.http.route import IDENTITY, Body, Field, Param, Route
from penstock.http.schema import Schema
from penstock.http.stages.stages import owned
from penstock.log.errors import QueueDeleted
from penstock.model.batch import Batch
from penstock.model.life import Reason
from penstock.model.policy import QueueNameError, check_queue_name
from penstock.model.rights import Right

PROTOCOL: Final = "http"
PROTOCOL_OF_DEAD: Final = "pipeline"
"""The door of dead letters: whoever reads the log can tell copies of bad records from what was sent."""

STAGES_MAX: Final = 10_000
"""Of one commit: about as many as are done in one turn of the broker's loop while nobody notices."""

_KEY: Final = kinds.Text("1 to 200 printable ASCII characters", 200, "[ -~]+")
_STAGE_ID: Final = kinds.Text("the id of a stage, 32 hex digits", 32, "[0-9a-f]{32}")
_STATE: Final[Schema] = schema.words("open", "committed")

SCHEMAS: Final = {
    "Stage": schema.object_of(
        {"stage": schema.STRING, "count": schema.INTEGER, "bytes": schema.said(schema.INTEGER, "Of payload.")}
    ),
    "StoredRange": schema.object_of(
        {"queue": schema.STRING, "offset_start": schema.OFFSET, "offset_end": schema.OFFSET}
    ),
    "Commit": schema.object_of(
        {
            "transaction": schema.STRING,
            "state": schema.words("committed"),
            "repeated": schema.said(schema.BOOLEAN, "Whether it was committed before."),
            "stored": schema.list_of(schema.ref("StoredRange")),
        }
    ),
    "Transaction": schema.object_of(
        {
            "transaction": schema.STRING,
            "state": _STATE,
            "committing": schema.said(schema.BOOLEAN, "Always false: a commit is one step."),
            "stages": schema.list_of(schema.ref("Stage")),
            "stored": schema.list_of(schema.ref("StoredRange")),
        }
    ),
}


async def post_stage(call: Call) -> Response:
    queue: str | None = call["queue"]
    parts: list[tuple[str, Batch]] = []
    dead = Reason.of(call["dead"] or "")
    repairs: bool = call["redrive"]
    if dead and repairs:
        raise Problem("bad-request", "dead and redrive exclude each other; leave one of the two out")
    if call["identity"] is not None and not repairs:
        raise Problem("bad-request", "identity says which queue has the dead letters: use it with redrive")
    protocol = PROTOCOL_OF_DEAD if dead else PROTOCOL
    for name, batch in await read_parts(call, queues=queue is None, repairs=repairs, protocol=protocol):
        if dead and batch.delay_us is not None:
            raise Problem("bad-request", "a dead letter is not handed out, now or later: leave 'delay' out")
        batch.dead = dead
        its_queue = queue if name is None else name
        assert its_queue is not None, "a body without a queue in each message has one for all"
        try:
            # What a commit would have to refuse half-way is refused here.
            check_queue_name(its_queue, call.site.hello["queue_name_bytes_max"])
        except QueueNameError as error:
            raise Problem("bad-request", str(error)) from None
        call.require(Right.OPERATE if repairs else Right.SEND, (its_queue,))
        if repairs:
            # Which says no, where there is none. The letters of the one that is there are meant.
            batch.identity = await call.site.transactions.identity(its_queue)
            if call["identity"] not in (None, batch.identity):
                raise QueueDeleted(its_queue)
        parts.append((its_queue, batch))
    key = _key(call, call["transaction"])
    if not repairs:
        return answer_json(await call.site.transactions.stage(key, parts))
    count = sum(len(batch) for _, batch in parts)
    async with call.act("repair", queue=queue or "", transaction=call["transaction"], count=count):
        return answer_json(await call.site.transactions.stage(key, parts))


def _key(call: Call, key: str) -> str:
    """Who may not send everywhere has keys of its own: nobody else's transactions are ended or mixed up."""
    return key if call.user.may(Right.SEND) else owned(key, call.user.name)


async def post_transaction(call: Call) -> Response:
    fields = await call.fields()
    key: str = fields["transaction"]
    if not call.user.may(Right.SEND):  # It may have had rights when it staged that are gone since.
        for queue in await call.site.transactions.queues(_key(call, key), fields["stages"]):
            if not call.user.rights(queue) & (Right.SEND | Right.OPERATE):
                raise forbidden(call.user, Right.SEND, queue)
    stored, repeated = await call.site.transactions.commit(_key(call, key), fields["stages"])
    return answer_json({"transaction": key, "state": "committed", "repeated": repeated, "stored": stored})


async def get_transaction(call: Call) -> Response:
    try:
        stored, stages = await call.site.transactions.standing(_key(call, call["key"]))
    except Problem as problem:
        if problem.name != "transaction-not-found" or not call.user.may(Right.READ):
            raise
        stored, stages = await call.site.transactions.standing(call["key"])
    return answer_json(
        {
            "transaction": call["key"],
            "state": "open" if stored is None else "committed",
            "committing": False,
            "stages": stages,
            "stored": stored or [],
        }
    )


async def delete_transaction(call: Call) -> Response:
    committed = await call.site.transactions.abort(_key(call, call["key"]))
    return answer_json({"transaction": call["key"], "state": "committed" if committed else "aborted"})


_KEY_IN_PATH: Final = Param("key", _KEY, "the key of the transaction", "path", required=True)

ROUTES: Final = (
    Route(
        "POST /v1/stages",
        post_stage,
        Right.SEND | Right.OPERATE,
        "Stage a part of a transaction: it is durable, and nobody sees it before the commit.",
        schema.ref("Stage"),
        params=(
            Param("transaction", _KEY, "the key of the transaction, which its owner makes up", required=True),
            Param(
                "queue",
                kinds.QueueName(),
                "the queue of all its messages; without: each message names its own",
            ),
            Param(
                "dead",
                kinds.Word((Reason.BAD_RECORD.label,)),
                "its messages are dead letters from the beginning, for this reason",
            ),
            Param(
                "redrive",
                kinds.Flag(),
                "its messages are repaired payloads, each with the offset of a dead letter, which goes back "
                "into its queue with it, under its id",
                default=False,
            ),
            IDENTITY,
        ),
        body=Body(
            BATCH_BODY.media,
            help=f'{BATCH_BODY.help} Without the parameter queue, each message has "queue" beside these. '
            'With redrive, each has "offset", and nothing else beside its value.',
        ),
        problems=(
            "unsupported-media-type",
            "not-installed",
            "conflict",
            "disk-full",
            "queue-not-found",
            "queue-deleted",
        ),
    ),
    Route(
        "POST /v1/transactions",
        post_transaction,
        Right.SEND | Right.OPERATE,
        "Commit: store exactly these stages, in this order, once. Safe to repeat until there is an answer.",
        schema.ref("Commit"),
        body=Body(
            fields=(
                Field("transaction", _KEY, "the key of the transaction", required=True),
                Field(
                    "stages",
                    kinds.ListOf(_STAGE_ID, STAGES_MAX, items_min=0, unique=True),
                    "ids of the stages that count; all others of this transaction are dropped",
                    required=True,
                ),
            )
        ),
        problems=(
            "stage-not-found",
            "conflict",
            "key-reused",
            "queue-not-found",
            "queue-full",
            "disk-full",
            "unsupported-media-type",
        ),
    ),
    Route(
        "GET /v1/transactions/{key}",
        get_transaction,
        Right.READ | Right.SEND | Right.OPERATE,
        "How a transaction stands.",
        schema.ref("Transaction"),
        params=(_KEY_IN_PATH,),
        problems=("transaction-not-found", "conflict"),
    ),
    Route(
        "DELETE /v1/transactions/{key}",
        delete_transaction,
        Right.SEND | Right.OPERATE,
        "Abort: drop the stages of a transaction. One that is committed stays committed.",
        schema.object_of({"transaction": schema.STRING, "state": schema.words("aborted", "committed")}),
        params=(_KEY_IN_PATH,),
        problems=("conflict", "disk-full"),
    ),
)
