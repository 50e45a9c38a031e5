"""What must be true of messages that went through a cluster, whatever happened to it meanwhile.

Messages are known by numbers. A `Record` says what their senders and consumers have seen, and `judge`
compares that with what is in the log, all of it:

  * lost: every n that has a receipt is in the log, and was delivered. So was everything else that is there.
  * stored twice: the log has every n at most once, however often a sender had to send it.
  * accepted: what was sent without receipts on a connection that was never lost is in the log.
  * order: what one connection has sent is in the log in the order in which it was sent.
  * invented: what was delivered had been sent, and is in the log: a message is handed out when it is stored.
  * delivered again: of all deliveries of one n at most one was on a connection that has never been lost. So
    a client whose connection survived gets nothing again that it had acknowledged, whoever led meanwhile,
    and nothing that somebody else had acknowledged over such a connection. Excepted is what was on its way,
    sent and not confirmed, when the leader handed out its last message: that may not have been safe.

Of transactions, whose messages are in several queues, `judge_transactions` says besides:

  * whole: what a commit was answered for is in all its queues, where the answer says, in one piece and in the
    order in which its stages were named.
  * or not at all: of one that was aborted, and of a stage that no commit has named, nothing is in any log.

How it fails: `AssertionError`, with the numbers.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Record:
    """What clients have seen. Moments are those of the monotonic clock."""

    sent: dict[int, float] = field(default_factory=dict)
    """By number: when it was about to be sent for the first time."""

    confirmed: dict[int, float] = field(default_factory=dict)
    """By number: when its receipt came."""

    accepted: set[int] = field(default_factory=set)
    """Sent without receipts, on a connection that was never lost."""

    said: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By connection: what was sent on it, in order."""

    deliveries: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By number: the connections over which it was delivered."""

    connections_lost: set[int] = field(default_factory=set)

    changes: list[tuple[float, float]] = field(default_factory=list)
    """Of the lead: the leader of then has handed out its last message between these two moments."""

    def was_under_way(self, number: int) -> bool:
        """When a leader handed out its last message."""
        sent, confirmed = self.sent[number], self.confirmed.get(number, math.inf)
        return any(sent < ended and confirmed > began for began, ended in self.changes)


def judge(record: Record, log: Iterable[int]) -> str:
    """What happened, in a line, where all was well."""
    log = list(log)
    places = {number: place for place, number in enumerate(log)}
    stored = Counter(log)
    delivered = record.deliveries.keys()
    wrong = {
        "stored twice": {number for number, times in stored.items() if times > 1},
        "confirmed, and not in the log": record.confirmed.keys() - stored.keys(),
        "in the log, and not delivered": stored.keys() - delivered,
        "accepted, and not in the log": record.accepted - stored.keys(),
        "delivered, and never sent": delivered - record.sent.keys(),
        "delivered, and not in the log": delivered - stored.keys(),
        "behind what was sent later": {
            number
            for said in record.said.values()
            for number, later in pairwise(number for number in said if number in places)
            if places[number] > places[later]
        },
    }
    found = {what: sorted(numbers) for what, numbers in wrong.items() if numbers}
    assert not found, found
    again = {
        number: connections
        for number, connections in record.deliveries.items()
        if sum(connection not in record.connections_lost for connection in connections) > 1
    }
    unexcused = {
        number: connections for number, connections in again.items() if not record.was_under_way(number)
    }
    assert not unexcused, {"delivered again, and no connection was lost": unexcused}
    repeated = sum(len(connections) > 1 for connections in record.deliveries.values())
    return (
        f"    {len(record.confirmed):,} confirmed, {len(stored):,} stored once and delivered, "
        f"{repeated} of them again ({len(record.connections_lost)} connections were lost), "
        f"{len(again)} without that, {len(record.accepted):,} accepted without receipts"
    )


@dataclass(slots=True)
class Transaction:
    """What its writer knows of one, or of stages that are to come to nothing."""

    parts: dict[str, list[int]]
    """By queue: its messages, in order."""

    stored: dict[str, tuple[int, int]] | None = None
    """By queue: from where to where a commit has said that they are. None: none of them is anywhere."""


def judge_transactions(transactions: Mapping[str, Transaction], logs: Mapping[str, Sequence[int]]) -> str:
    """What happened, in a line, where all was well. Each log is that of a queue, from its beginning."""
    places: dict[str, dict[int, list[int]]] = {}
    for queue, log in logs.items():
        its = places[queue] = defaultdict(list)
        for place, number in enumerate(log):
            its[number].append(place)
    wrong = defaultdict(set)
    for key, transaction in transactions.items():
        found = {
            queue: [place for number in numbers for place in places[queue].get(number, ())]
            for queue, numbers in transaction.parts.items()
        }
        there = sum(map(len, found.values()))
        if transaction.stored is None:
            if there:
                wrong["not committed, and in a log"].add(key)
        elif not there:
            wrong["committed, and in no log"].add(key)
        elif any(len(found[queue]) < len(numbers) for queue, numbers in transaction.parts.items()):
            wrong["torn"].add(key)
        elif any(len(found[queue]) > len(numbers) for queue, numbers in transaction.parts.items()):
            wrong["stored twice"].add(key)
        elif found != {queue: list(range(*its)) for queue, its in transaction.stored.items()}:
            wrong["not where its commit has said, in one piece"].add(key)
    assert not wrong, {what: sorted(keys) for what, keys in wrong.items()}
    committed = sum(it.stored is not None for it in transactions.values())
    return (
        f"    {committed:,} transactions over {len(logs)} queues are whole, "
        f"{len(transactions) - committed:,} that were given up have left nothing"
    )
