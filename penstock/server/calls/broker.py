"""The broker itself: how it is, what needs attention, its audit, and rot that was found in its log."""

import time
from dataclasses import fields as fields_of
from itertools import islice

from penstock import __version__
from penstock.control.frames import Fields
from penstock.log.block import read_header
from penstock.log.scan import Hole
from penstock.model.timers import SECOND_US
from penstock.server.calls.clients import CONSUMES_MAX
from penstock.server.calls.context import ROWS_MAX, Answer, Context


def engine(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """`brief`: of a cluster its nodes and checks alone. The rest is most of an answer, and who looks after
    health asks for one of each log, every two seconds."""
    info = context.log.info()
    if fields.get("brief") and info.cluster is not None:
        info.cluster = {name: info.cluster[name] for name in ("nodes", "checks")}
    sync, stages = info.sync, info.stages
    answer(
        {
            **{it.name: getattr(info, it.name) for it in fields_of(info)},
            "failed": info.failed or None,
            "stages": {
                "count": stages.count,
                "bytes": stages.bytes,
                "oldest_seconds": max(context.server.now_us() - stages.since_us, 0) / SECOND_US
                if stages.since_us
                else None,
            },
            "sync": {
                "count": sync.count,
                "seconds_sum": sync.seconds_sum,
                "last_seconds": sync.seconds_last,
                "p50_seconds": sync.quantile(0.5),
                "p99_seconds": sync.quantile(0.99),
                "buckets": sync.buckets,
            },
            "memory": {
                "held_bytes": context.server.memory.held_bytes + context.server.memory.tls_bytes,
                "limit_bytes": context.server.memory.limit_bytes,
                "closed": context.server.memory.closed,
                "broadcasts_lost": context.server.memory.broadcasts_lost,
            },
            "connections": len(context.server.broker.ports.attached),
            "durability": context.log.policies.defaults.durability,
            "listeners": context.server.listeners(),
            "version": __version__,
            "uptime_seconds": time.monotonic() - context.server.started,
        }
    )


def rot(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """Whoever scrubs the log has found bytes that are not what was written."""
    start = fields["start"]
    context.log.report_rot(
        fields["segment"], Hole(start, fields["end"], read_header(body, 0, start)), fields["why"]
    )
    context.server.broker.wake()
    answer({})


def health(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    reason = context.operator.unready
    info = context.log.info(with_cluster=not fields.get("brief"))
    warnings = ["disk"] if info.disk_bytes_free < info.disk_bytes_reserve else []
    answer({"ready": not reason, "reason": reason, "cluster": info.cluster, "warnings": warnings})


def attention(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """What the rows of queues do not tell; who holds messages is told of the queues that are asked for."""
    operator = context.operator
    answer(
        {
            "blocked": [
                {
                    "name": it.port.name,
                    "blockings": it.blockings,
                    "queues": [queue for queue, _ in islice(it.doors, CONSUMES_MAX)],
                }
                for it in operator.blocked()
            ],
            "holders": {queue: operator.holders(queue) for queue in fields["queues"][:ROWS_MAX]},
            "waited_for": operator.waited_for(),
        }
    )


def audit(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    context.server.audit.act(fields["line"], lambda: answer({}))


def refusals(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    for line, times in fields["rows"]:
        context.server.audit.refused(line, times)
    answer({})
