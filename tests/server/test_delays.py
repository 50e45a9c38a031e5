"""Delays in a running server: it does not wait for a tick to see that one is over."""

from pathlib import Path

import pytest

from penstock.model.batch import Batch
from penstock.server.rounds import TICK_SECONDS
from tests.server.inside import LOOPS, Inside, run
from tests.server.inside import until as soon

MS = 1000


async def stop_ticking(server: Inside) -> None:
    ticks = server.ticks
    server._tick = lambda: None  # type: ignore[method-assign]
    await soon(lambda: server.ticks > ticks, "the last tick, which was under way")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("step_ms", [0, 1, 7])
def test_one_after_the_other_between_two_ticks(tmp_path: Path, loop: str, step_ms: int) -> None:
    async def test() -> None:
        async with Inside.open(tmp_path) as server:
            await stop_ticking(server)
            for number in range(5):
                delays = [10 * MS + step_ms * MS * number] * 2
                assert delays[0] < TICK_SECONDS * 1_000_000
                server.log.append("q", Batch.of([b"x", b"y"], delay_us=delays), server.now_us())
            server.broker.stir("q")
            await soon(lambda: server.log.describe("q").ready == 10, "all of them to be due")

    run(loop, test())


@pytest.mark.parametrize("loop", LOOPS)
def test_more_than_one_look_has_time_for(tmp_path: Path, loop: str) -> None:
    async def test() -> None:
        async with Inside.open(tmp_path) as server:
            await stop_ticking(server)
            delays = [10 * MS + 10 * (i * 7919 % 3000) for i in range(3000)]
            server.log.append("q", Batch.of([b""] * 3000, delay_us=delays), server.now_us())
            server.broker.stir("q")
            await soon(lambda: server.log.describe("q").ready == 3000, "all of them to be due")

    run(loop, test())
