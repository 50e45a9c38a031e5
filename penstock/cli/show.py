"""`penstock show QUEUE`: everything about one queue."""

import argparse
from collections.abc import Iterable
from typing import Final

from penstock.cli.admin import Admin, add_admin, add_queue, say_objects
from penstock.client.http_core import Answer
from penstock.common import tables, units
from penstock.common.tables import columns

HELP = "show one queue: counts, offsets, policy, dead letters by reason, consumers and readers"

CONSUMERS: Final = columns("CONSUMER", "PROTOCOL", "PEER", "TAKES", ">HELD", ">CONNECTED", "")
READERS: Final = columns("READER", "VIEW", ">POSITION", ">LAG", ">LEASE", "")
DEATHS: Final = columns("DEAD LETTERS", ">COUNT")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_queue(parser)
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    with Admin(args) as admin:
        queue = admin.get("queues", args.queue)
        connections = consumers_of(args.queue, admin.get("connections")["connections"])
        readers = [
            {**{key: value for key, value in reader.items() if key != "queues"}, **place}
            for reader in admin.get("readers")["readers"]
            for place in reader["queues"]
            if place["queue"] == args.queue
        ]
    if args.json:
        say_objects([{**queue, "connections": connections, "readers": readers}])
        return 0
    parts = [facts(queue), policy(queue["policy"]), deaths(queue["dead_reasons"])]
    if connections:
        parts.append(tables.table(CONSUMERS, [consumer(args.queue, it) for it in connections]))
    if readers:
        parts.append(tables.table(READERS, map(_reader, readers)))
    print("\n\n".join("\n".join(part) for part in parts if part))
    return 0


def consumers_of(queue: str, connections: Iterable[Answer]) -> list[Answer]:
    """Of all connections those that consume from the queue."""
    return [it for it in connections if any(taken["queue"] == queue for taken in it["consumes"])]


def facts(queue: Answer) -> list[str]:
    """Its numbers, a name and what it is in a line."""
    return tables.pairs(
        [
            ("queue", queue["name"] + (" (paused)" if queue["paused"] else "")),
            ("ready", units.count(queue["ready"])),
            ("delayed", units.count(queue["delayed"])),
            ("held", units.count(queue["held"])),
            ("dead", units.count(queue["dead"])),
            ("oldest", tables.age(queue["oldest_seconds"])),
            ("size", units.size(queue["bytes"])),
            ("in, out", f"{units.rate(queue['rate_in'])}/s, {units.rate(queue['rate_out'])}/s"),
            ("consumers", units.count(queue["consumers"])),
            ("offsets", _span(queue["offset_start"], queue["offset_end"])),
            ("events", _span(queue["event_start"], queue["event_end"])),
        ]
    )


def _span(start: int, end: int) -> str:
    return f"{start:,} to {end - 1:,}" if start < end else f"none; the next is {end:,}"


def policy(policy: Answer) -> list[str]:
    """The policy by the names of its settings; 0 means that there is no such bound."""
    shown = {
        "durability": policy["durability"],
        "deliver-after": policy["deliver_after"],
        "retention-seconds": units.duration(policy["retention_seconds"]),
        "retention-bytes": units.size(policy["retention_bytes"]) if policy["retention_bytes"] else "no bound",
        "max-deliveries": units.count(policy["max_deliveries"]) if policy["max_deliveries"] else "no bound",
        "retry-delays": ", ".join(map(units.duration, policy["retry_delays"])) or "none",
        "max-bytes": units.size(policy["max_bytes"]) if policy["max_bytes"] else "no bound",
        "on-expiry": policy["on_expiry"],
        "dead-letters": "on" if policy["dead_letters"] else "off",
        "expire-seconds": units.duration(policy["expire_seconds"]) if policy["expire_seconds"] else "never",
    }
    return tables.pairs(shown.items())


def deaths(reasons: dict[str, int]) -> list[str]:
    """How many dead letters there are of each reason; no lines where there is none."""
    found = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    rows = [(reason, units.count(count)) for reason, count in found if count]
    return tables.table(DEATHS, rows) if rows else []


def consumer(queue: str, connection: Answer) -> list[str]:
    """A connection that consumes from the queue, in the cells of `CONSUMERS`."""
    doors = sorted(
        {
            "dead letters" if it["dead"] else "messages"
            for it in connection["consumes"]
            if it["queue"] == queue
        }
    )
    return [
        connection["name"],
        connection["protocol"],
        connection["peer"],
        ", ".join(doors),
        units.count(connection["held"]),
        units.age(connection["connected_seconds"]),
        "slow: does not read what it is sent" if connection["blocked"] else "",
    ]


def _reader(reader: Answer) -> list[str]:
    return [
        reader["name"],
        reader["view"],
        units.count(reader["position"]),
        units.count(reader["lag"]),
        units.age(reader["lease_seconds_left"]),
        "so far behind that not all is held for it" if reader["capped"] else "",
    ]
