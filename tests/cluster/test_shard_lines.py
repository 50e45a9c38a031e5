"""What the log says of shards: one line of all that is so within a second."""

import asyncio
import logging

import pytest

from penstock.cluster.shard_lines import ShardLines, shards_named


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        ([3], "shard 3"),
        ([7, 2, 0, 1], "shards 0 to 2, 7"),
        ([4, 5], "shards 4 to 5"),
        ([*range(16)], "shards 0 to 15"),
    ],
)
def test_shards_are_named_in_runs(shards: list[int], text: str) -> None:
    assert shards_named(shards) == text


def said(caplog: pytest.LogCaptureFixture, several: bool) -> list[str]:
    async def run() -> None:
        lines = ShardLines()
        lines.has_several = several
        for shard in range(3):
            lines.say(logging.WARNING, shard, "no link")
        lines.say(logging.INFO, 3, "leading")
        lines.flush()
        lines.flush()

    with caplog.at_level(logging.INFO, "penstock"):
        asyncio.run(run())
    return [record.message for record in caplog.records if record.name.startswith("penstock")]


def test_several_shards_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, several=True) == ["shards 0 to 2: no link", "shard 3: leading"]


def test_the_one_shard_is_not_named_and_nothing_waits(caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, several=False) == ["no link", "no link", "no link", "leading"]
