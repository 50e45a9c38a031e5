"""Leaders: which of several addresses leads the log of a queue, in a cluster that has several logs.

Every front-end answers about every queue, but of those that another one leads it has to ask that one itself,
and what a task reads goes through both. So where `url` names several, the driver asks each of them who it is,
and tasks ask the leader of each queue first.

What is known here is a hint: leaders change, and any front-end has the right answer. `api.py` says what
happens where the one that is asked first does not answer.
"""

import time
from contextlib import closing
from typing import Final, NamedTuple

from penstock.model.shards import shard_of
from penstock.spark.api import Broker, BrokerError

KNOWN_SECONDS: Final = 10.0
"""For so long nobody is asked again."""


class Leaders(NamedTuple):
    addresses: tuple[str, ...] = ()  # by shard; empty: none of `url`

    def of(self, queue: str) -> str:
        """Whom to ask about a queue; empty: anybody."""
        return self.addresses[shard_of(queue, len(self.addresses))] if self.addresses else ""


NOBODY: Final = Leaders()
_known: dict[str, tuple[float, Leaders]] = {}  # by URL, for all of this process


def leaders_of(broker: Broker) -> Leaders:
    """Nobody where there is one address, or one log."""
    if len(broker.addresses) == 1:
        return NOBODY
    asked_at, leaders = _known.get(broker.url, (float("-inf"), NOBODY))
    if time.monotonic() - asked_at > KNOWN_SECONDS:
        leaders = _asked(broker)
        _known[broker.url] = time.monotonic(), leaders
    return leaders


def _asked(broker: Broker) -> Leaders:
    front_ends: dict[str, str] = {}
    led: list[str] = []
    with closing(Broker(broker.url, broker.token, retry_seconds=0)) as asking:
        for address in asking.addresses:
            asking.prefer(address)
            try:
                cluster = asking.get("engine").get("cluster") or {}
            except BrokerError:  # Who says nothing, or may not say it, is asked through the others.
                continue
            led = [shard["leader"] for shard in cluster.get("shards", ())]
            if len(led) < 2:
                return NOBODY
            front_ends[cluster["id"]] = asking.at
    return Leaders(tuple(front_ends.get(leader, "") for leader in led))
