"""Transactions: in one call, or in stages that come one by one, are committed or aborted."""

from penstock.control.batches import unpack_batch
from penstock.control.frames import Fields
from penstock.log.errors import (
    LogError,
)
from penstock.log.log import Log
from penstock.log.results import Begun, StageInfo, Stored, TransactionDone, TransactionReceipt
from penstock.model.batch import Batch
from penstock.server.calls.context import (
    Answer,
    CallRefused,
    Context,
    when_safe,
)


def transact(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
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


def stage(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
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


def commit(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """One step now, the others in later turns of the loop."""
    begun = Begun(fields.get("steps", 0), fields.get("fingerprint", ""))
    now_us, receipt = context.server.arrival_us(), _committed(context, answer)
    steps = context.operator.commit(fields["key"], fields["stages"], now_us, receipt, begun)

    def take_one() -> None:
        try:
            if next(steps, answer) is not answer:
                context.step(take_one)
        except Exception as error:  # noqa: BLE001 - nobody else is there to see it
            context.refuse(answer, error)

    take_one()


def abort(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    key = fields["key"]
    steps = context.log.transaction_steps(key)
    if steps != fields.get("steps", 0):
        raise CallRefused(
            f"transaction {key!r} has begun, in an earlier version: {steps} chunks of it are in the log"
        )
    context.log.abort(key, context.server.arrival_us())
    when_safe(context, answer, _standing(context.log, key))


def transaction(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    told = _standing(context.log, fields["key"])
    its_own = {it.stage for it in context.log.stages(fields["key"])}.intersection(fields.get("stages", ()))
    told["queues"] = sorted(context.log.staged_queues(list(its_own)))
    if told["stored"] is None:
        answer(told)  # What is staged is synced.
    else:
        when_safe(context, answer, told)


def _standing(log: Log, key: str) -> Fields:
    stored = log.transaction(key)
    return {
        "stored": _stored(stored) if stored is not None else None,
        "steps": log.transaction_steps(key),
        "stages": [_stage_fields(stage) for stage in log.stages(key)],
    }


def _stored(stored: list[Stored]) -> list[list[object]]:
    return [[it.queue, it.first, it.end, it.origin.decode()] for it in stored]
