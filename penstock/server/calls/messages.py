"""Messages in; and out, for a time, with what becomes of them."""

import time
from typing import Final

from penstock.broker.operate import DRAINING, Draining
from penstock.broker.taking import Ruling
from penstock.control.batches import unpack_batch
from penstock.control.frames import Fields
from penstock.control.takes import pack_taken, unpack_verdicts
from penstock.log.errors import (
    LogError,
)
from penstock.log.results import Stored
from penstock.model.batch import Slice
from penstock.model.words import Consume, Outcome
from penstock.server.calls.context import (
    Answer,
    Context,
    told_when_safe,
)


def append(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    batch, _ = unpack_batch(fields["batch"], body, 0)

    def receipt(result: Stored | LogError) -> None:
        if isinstance(result, LogError):
            context.refuse(answer, result)
        else:
            answer({"first": result.first, "end": result.end, "origin": result.origin.decode()})

    context.operator.append(fields["queue"], batch, context.server.arrival_us(), receipt)


def take(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """Verdicts on what was taken before may come along, and are carried out first. They have an answer of
    their own, and messages are taken whatever that is."""
    queue, dead = fields["queue"], fields["dead"]
    log = context.log
    if "settle" in fields:
        settled = answer.beside(fields["settle"]["n"])
        try:
            settle(context, fields["settle"], body, settled)
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


def untake(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    context.server.broker.taking.untake(fields["take"], context.server.arrival_us())
    answer({})


_OUTCOMES: Final = {"extend": None, **{outcome.value: outcome for outcome in Outcome}}


def settle(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    now_us, queue = context.server.arrival_us(), fields["queue"]
    done: list[int] = []
    gone: list[list[int]] = []
    for verdict in unpack_verdicts(fields, body):
        ruling = Ruling(_OUTCOMES[verdict.outcome], *verdict[1:])
        count, others = context.server.broker.taking.settle(queue, ruling, now_us)
        done.append(count)
        gone.append(others)
    context.log.confirm_with_turn(told_when_safe(context, answer, {"done": done, "gone": gone}))
