"""Transactions: in one call, or in stages that come one by one, are committed or aborted; and what is asked
of each log about one that has stages in several (`log/transactions.py`)."""

from typing import Final

from penstock.control.batches import read_column, unpack_batch
from penstock.control.frames import Fields
from penstock.log.errors import (
    LogError,
)
from penstock.log.log import Log
from penstock.log.results import Begun, Shares, StageInfo, Stored, TransactionDone, TransactionReceipt
from penstock.model.batch import Batch
from penstock.server.calls.context import (
    Answer,
    CallRefused,
    Context,
    when_safe,
)

DOUBTS_MAX: Final = 100
"""In one answer."""


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
    shares = Shares(**fields["shares"]) if "shares" in fields else None
    decided, rows = fields.get("decided", False), fields.get("rows")
    steps = context.operator.commit(
        fields["key"], fields["stages"], now_us, receipt, begun, shares, decided=decided, rows=rows
    )

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


# --- with stages in several logs ---------------------------------------------------------------------


def begin(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """An attempt of a commit, in the log of the key; or what is decided already."""
    log, key = context.log, fields["key"]
    if log.decision(key) is None and log.transaction(key) is None:
        answer({"attempt": log.begin(key)})
    else:
        when_safe(context, answer, _standing(log, key) | {"attempt": None})


def prepare(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    totals = context.operator.prepare(
        fields["key"], fields["attempt"], fields["stages"], context.server.arrival_us()
    )
    when_safe(context, answer, {"totals": totals})


def unprepare(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    context.log.unprepare(fields["key"], fields["attempt"], context.server.arrival_us())
    when_safe(context, answer, {})


def attempt(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """What became of an attempt, and what a log has to store for it; the log of the key says so."""
    log, key = context.log, fields["key"]
    if not log.is_decided(key, fields["attempt"]):
        answer({"stages": None, "rows": None})
        return
    decision = log.decision(key)
    stages = decision.shards.get(str(fields["of"])) if decision is not None else None
    when_safe(context, answer, {"stages": stages, "rows": decision.rows if decision is not None else None})


def move(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """Messages leave their queue, and another log has them; the log that they are in decides."""
    receipt, queue = _committed(context, answer), fields["queue"]
    offsets, _ = read_column("q", fields["count"], body, 0)
    key, attempt, now_us = fields["key"], fields["attempt"], context.server.arrival_us()
    stages = fields["stages"]
    context.operator.move(key, attempt, queue, fields["identity"], offsets, stages, now_us, receipt)


def finish(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    context.log.finish(fields["key"], fields["stored"], context.server.arrival_us())
    when_safe(context, answer, {})


def doubts(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """What is prepared here, and what is decided here and not known to be stored everywhere; some of each."""
    prepared, unfinished = context.log.prepared(), context.log.unfinished()
    answer({"prepared": prepared[:DOUBTS_MAX], "unfinished": unfinished[:DOUBTS_MAX]})


def totals(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """Which of these stages are in this log, and what they bring."""
    log = context.log
    found = log.stage_totals(fields["key"], fields["stages"])
    queues = log.staged_queues([stage for stage, _, _ in found])
    answer({"found": found, "queues": sorted(queues), "others": len(log.stages(fields["key"])) > len(found)})


def _standing(log: Log, key: str) -> Fields:
    stored = log.transaction(key)
    decision = log.decision(key)
    if stored is None and decision is not None:  # of a key that was forgotten since
        stored = []
    return {
        "stored": _stored(stored) if stored is not None else None,
        "fingerprint": log.fingerprint(key),
        "decision": decision._asdict() if decision is not None else None,
        "prepared": log.prepared_of(key),
        "steps": log.transaction_steps(key),
        "stages": [_stage_fields(it) | {"alias": log.stage_alias(it.stage)} for it in log.stages(key)],
    }


def _stored(stored: list[Stored]) -> list[list[object]]:
    return [[it.queue, it.first, it.end, it.origin.decode()] for it in stored]
