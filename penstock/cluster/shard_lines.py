"""ShardLines: what a front-end's log says of shards. What is said of several within a second is one line.

    say(level, shard, text)      behind the numbers of the shards, where the cluster has several

A cluster with one shard says everything at once, and names no shard.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from penstock.common.journal import log

GATHER_SECONDS: Final = 1.0


class ShardLines:
    def __init__(self) -> None:
        self.has_several = False
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[tuple[int, str], list[int]] = {}  # level and text: shards

    def say(self, level: int, shard: int, text: str) -> None:
        if not self.has_several:
            log.log(level, "%s", text)
            return
        if not self._waiting:
            self._loop.call_later(GATHER_SECONDS, self.flush)
        self._waiting.setdefault((level, text), []).append(shard)

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for (level, text), shards in waiting.items():
            log.log(level, "%s: %s", shards_named(shards), text)


def shards_named(shards: Sequence[int]) -> str:
    """As people write it: "shard 3", "shards 0 to 2, 7"."""
    runs: list[list[int]] = []
    for shard in sorted(set(shards)):
        if runs and shard == runs[-1][1] + 1:
            runs[-1][1] = shard
        else:
            runs.append([shard, shard])
    texts = (f"{first}" if first == last else f"{first} to {last}" for first, last in runs)
    return f"shard{'s' if len(set(shards)) > 1 else ''} {', '.join(texts)}"
