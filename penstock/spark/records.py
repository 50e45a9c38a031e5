"""Records: ranges of a queue straight from the NATS servers of a cluster, without a broker in between.

    plan_of    on the driver: asks a front-end where the messages of a range are in the stream
    batches    on an executor: reads them there, and makes the batches that the broker would have sent

The bytes in the stream are the blocks of the log, and what makes Arrow of them is the code that does it for
the HTTP API: the same rows come out, column by column.

Rules that always hold:
  * A plan tells what is synced.
  * Nothing is asked of the front-end while messages are read.

How it fails: `Interrupted` when no server answers, `BytesMissing` and `LogDamaged` when what was planned is
not there as it was; and whatever the front-end says to who asks for a plan.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.spark.api import Broker, Interrupted
from penstock.spark.links import link_for
from penstock.spark.options import ReadOptions
from penstock.spark.splits import Range

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.log.jetstream.ranges import Part, Source


class Plan(NamedTuple):
    """Where the messages of a range are. `start` is behind what was asked for where the rest is gone."""

    start: int
    source: "Source | None" = None  # None: there is nothing to read
    parts: "tuple[Part, ...]" = ()


def plan_of(broker: Broker, options: ReadOptions, whole: Range) -> Plan:
    """The plan of a range, in as many answers as it takes."""
    from penstock.log.jetstream.ranges import Part, Source

    parts: list[Part] = []
    at, start, source = whole.start, whole.start, None
    while at < whole.end:
        answer: dict[str, Any] = broker.get(
            "queues",
            whole.queue,
            "records",
            start=at,
            end=whole.end,
            fail_on_loss=options.fail_on_data_loss,
            identity=whole.identity or None,
        )
        if not parts:
            start = answer["start"]
            source = Source(answer["stream"], answer["log"], answer["number"])
        parts += (Part(**part) for part in answer["parts"])
        if answer["end"] <= at:
            break
        at = answer["end"]
    return Plan(start, source, tuple(parts))


def batches(
    options: ReadOptions, plan: Plan, whole: Range, columns: Sequence[str], *, step_over: bool
) -> Iterator["pa.RecordBatch"]:
    """The rows of a range. With `step_over`, what is missing or damaged is left out, with a warning."""
    from penstock.log.arrow import ROWS_MAX, Constants, batch_of, groups_of, schema_of
    from penstock.log.jetstream.errors import JetStreamTrouble
    from penstock.log.jetstream.ranges import blocks

    if plan.source is None:
        return
    schema = schema_of("messages", columns)
    try:
        nats = link_for(options)
        found = blocks(nats, plan.source, plan.parts, whole.start, whole.end, step_over=step_over)
        for group in groups_of(found, Constants(whole.queue), ROWS_MAX):
            yield batch_of(group, schema)
    except JetStreamTrouble as error:
        raise Interrupted(f"NATS: {error}") from None
