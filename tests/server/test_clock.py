"""A machine whose clock is set while a broker runs: what waits or runs out does as if it were not."""

import logging
import time
from pathlib import Path

import pytest

from penstock.log.info import ReaderInfo
from tests.server.harness import phpmq, rq
from tests.server.inside import LOOPS, Inside, run
from tests.server.inside import until as soon

DAY = 86_400


def set_clock(server: Inside, seconds: float) -> None:
    """The machine's clock shows the right time and so much more from now on."""
    server.clock._wall_ns = lambda: time.time_ns() + round(seconds * 1e9)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_clock_that_is_put_forward_ends_nothing(
    tmp_path: Path, loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with Inside.open(tmp_path) as server:
            sender, asking, worker = [await server.connect(it) for it in ("phpmq", "rq", "phpmq")]
            await sender.say(phpmq(1, (1, b"q"), (2, b"before"), (5, b"600")))
            await asking.say(rq(1, (128, 7), (160, b"asked"), (97, 300), (224, b"?"), 10))
            await soon(lambda: server.log.has_queue("asked") and server.log.is_safe, "both to be stored")
            before_us = server.now_us()
            reader = ReaderInfo("spark", "q", "messages", 0, before_us + 60 * 10**6)
            server.log.hold_retention(reader, before_us)
            set_clock(server, DAY)
            await soon(lambda: server.now_us() > before_us + DAY * 10**6, "the time to be the machine's")
            ticks = server.ticks
            await soon(lambda: server.ticks > ticks + 20, "a second to go by")
            await sender.say(phpmq(1, (1, b"q"), (2, b"after"), (5, b"600")))
            await soon(lambda: server.log.describe("q").offset_end == 2, "the other one")
            assert server.log.describe("q").ready == 2
            assert server.log.describe("asked").ready == 1
            assert server.log.readers()[0].lease_until_us > server.now_us()
            assert time.monotonic() - server.started < 60
            assert all(time.monotonic() - it.connected < 60 for it in server.connections)
            await worker.say(phpmq(2, (1, b"q"), (4, b"2")))
            for content in (b"before", b"after"):
                told = phpmq(3, (1, b"q"), (2, content), (3, b"?" * 32), (5, b"600"))
                heard = await worker.hear(len(told))
                assert content in heard
                assert 500 < int(heard[-3:]) <= 600  # seconds left

    caplog.set_level(logging.INFO)
    run(loop, test())
    assert [it for it in caplog.messages if "was set" in it] == [
        "the clock of this machine was set forward by 86400.0 s"
    ]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_clock_that_is_put_back_holds_up_nothing(
    tmp_path: Path, loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with Inside.open(tmp_path, "--durability interval") as server:
            sender, asking = await server.connect("phpmq"), await server.connect("rq")
            await sender.say(phpmq(1, (1, b"q"), (2, b"x")))
            await soon(lambda: server.log.has_queue("q"), "the first one")
            before_us = server.now_us()
            set_clock(server, -DAY)
            ticks = server.ticks
            await soon(lambda: server.ticks > ticks + 2, "the clock to be looked at")
            await sender.say(phpmq(1, (1, b"q"), (2, b"y"), (5, b"1")))
            await asking.say(rq(1, (128, 7), (160, b"asked"), (97, 1), (224, b"?"), 10))
            assert await asking.hear(7) == rq(1, (128, 7), 16)  # UNDELIVERED: its second is over
            await soon(lambda: server.log.describe("q").dead == 1, "a TTL to run out")
            await soon(lambda: server.log.is_safe, "what was sent to be synced")
            assert before_us < server.log.time_us < before_us + 100 * 10**6

    caplog.set_level(logging.INFO)
    run(loop, test())
    (line,) = [it for it in caplog.messages if "was set" in it]
    assert line.startswith("the clock of this machine was set back by 86400.0 s: ")


def test_a_broker_begins_where_its_log_has_come_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def ahead() -> None:
        async with Inside.open(tmp_path) as server:
            set_clock(server, 3600)
            before_us = server.now_us()
            await soon(lambda: server.now_us() > before_us + 3600 * 10**6, "the time to be the machine's")
            sender = await server.connect("phpmq")
            await sender.say(phpmq(1, (1, b"q"), (2, b"x")))
            await soon(lambda: server.log.has_queue("q"), "a message")

    async def again() -> None:
        async with Inside.open(tmp_path) as server:
            assert server.now_us() > (time.time() + 3500) * 10**6

    run("uvloop", ahead())
    run("uvloop", again())
    assert any("is behind the log" in line for line in caplog.messages)
