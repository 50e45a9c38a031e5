"""Shards: in which of a cluster's logs a queue is.

A cluster has a number of logs that never changes, and the name of a queue says which one has it. Everybody
who has to find a queue goes by this: front-ends, their HTTP processes, Spark.
"""

from functools import lru_cache
from zlib import crc32

SHARDS_MAX = 256
SHARDS_DEFAULT = 16
"""Of a cluster that is new: good for three or four front-ends."""


@lru_cache(10_000)
def shard_of(queue: str, shards: int) -> int:
    """The number of a queue's log, of so many. Transactions go by their keys in the same way."""
    return crc32(queue.encode()) % shards
