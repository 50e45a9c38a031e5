"""Readers in threads: lent to one at a time, always given back, bounded, and never on the loop."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from penstock.errors import PenstockError
from penstock.http.problems import Problem
from penstock.http.reading import pool as readers
from penstock.http.reading.pool import AHEAD_MAX, IDLE_MAX, LOOK_THREADS, WALK_THREADS, ReaderPool
from penstock.log.errors import LogRefused
from penstock.log.log import open_log
from penstock.log.reader import LogReader
from penstock.model.batch import Batch
from tests.log.folders import NOW_US
from tests.server.harness import WAIT_SECONDS

T = TypeVar("T")


def write(folder: Path, count: int) -> None:
    log = open_log(str(folder), NOW_US)
    log.append("q", Batch.of([b"%d" % i for i in range(count)]), NOW_US)
    log.close(NOW_US)


def with_pool(folder: Path, test: Callable[[ReaderPool], Awaitable[T]], *, walks_max: int = 64) -> T:
    """Run a test with a pool of its own; all readers are back in the end."""

    async def run() -> T:
        pool = ReaderPool(str(folder), walks_max=walks_max)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                result = await test(pool)
            assert pool.lent == 0
            return result
        finally:
            pool.close()
            assert pool.idle == 0

    return asyncio.run(run())


def offset_end(reader: LogReader) -> int:
    return reader.queues()["q"].offset_end


def messages(reader: LogReader) -> Iterator[bytes]:
    """The first one, again and again."""
    while True:
        (block,) = reader.messages("q", 0)
        yield block.messages()[0]


def numbers(_reader: LogReader, end: int) -> Iterator[int]:
    yield from range(end)


# --- looks -----------------------------------------------------------------------------------------


def test_a_look_has_a_reader_that_knows_what_is_new(tmp_path: Path) -> None:
    log = open_log(str(tmp_path), NOW_US)

    async def test(pool: ReaderPool) -> list[int]:
        seen = []
        for turn in range(3):
            log.append("q", Batch.of([b"x"] * 5), NOW_US + turn)
            log.flush(NOW_US + turn)
            log.wait()
            seen.append(await pool.run(offset_end))
        assert pool.idle == 1
        return seen

    assert with_pool(tmp_path, test) == [5, 10, 15]
    log.close(NOW_US)


def test_arguments_go_to_the_function_and_its_thread_is_not_the_loops(tmp_path: Path) -> None:
    write(tmp_path, 3)

    def look(reader: LogReader, /, *more: object, **named: object) -> tuple[object, ...]:
        return type(reader), more, named, threading.current_thread() is threading.main_thread()

    async def test(pool: ReaderPool) -> tuple[object, ...]:
        return await pool.run(look, 1, 2, name="x")

    assert with_pool(tmp_path, test) == (LogReader, (1, 2), {"name": "x"}, False)


def test_an_empty_folder_has_no_queues_until_there_are_some(tmp_path: Path) -> None:
    async def test(pool: ReaderPool) -> None:
        assert await pool.run(LogReader.queues) == {}
        write(tmp_path, 4)
        assert await pool.run(offset_end) == 4

    with_pool(tmp_path, test)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    async def test(pool: ReaderPool) -> None:
        with pytest.raises(LogRefused, match="there is no such folder"):
            await pool.run(LogReader.queues)

    with_pool(tmp_path / "nix", test)


def test_a_walk_that_cannot_begin_has_no_reader_to_give_back(tmp_path: Path) -> None:
    async def test(pool: ReaderPool) -> None:
        for _ in range(2):
            with pytest.raises(PenstockError):
                await anext(pool.stream(messages))
            assert (pool.lent, pool.idle) == (0, 0)

    with_pool(tmp_path / "nowhere", test)


def test_a_refusal_keeps_the_reader_and_any_other_failure_does_not(tmp_path: Path) -> None:
    write(tmp_path, 1)

    def refuse(reader: LogReader) -> None:
        reader.openings("nix")

    def break_down(_reader: LogReader) -> None:
        raise ZeroDivisionError

    async def test(pool: ReaderPool) -> None:
        with pytest.raises(LogRefused):
            await pool.run(refuse)
        assert (pool.idle, pool.lent) == (1, 0)
        with pytest.raises(ZeroDivisionError):
            await pool.run(break_down)
        assert (pool.idle, pool.lent) == (0, 0)

    with_pool(tmp_path, test)


def test_many_looks_at_once_share_a_few_threads_and_readers(tmp_path: Path) -> None:
    write(tmp_path, 2)
    together = threading.Barrier(LOOK_THREADS)

    def look(reader: LogReader) -> int:
        together.wait(WAIT_SECONDS)
        return offset_end(reader)

    async def test(pool: ReaderPool) -> None:
        looks = 5 * LOOK_THREADS
        assert await asyncio.gather(*(pool.run(look) for _ in range(looks))) == [2] * looks
        assert 0 < pool.idle <= min(LOOK_THREADS, IDLE_MAX)

    with_pool(tmp_path, test)


def test_a_look_that_nobody_waits_for_any_more_gives_its_reader_back(tmp_path: Path) -> None:
    write(tmp_path, 1)
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def look(_reader: LogReader) -> None:
        begun.set()
        assert go_on.wait(WAIT_SECONDS)

    async def test(pool: ReaderPool) -> None:
        task = asyncio.create_task(pool.run(look))
        assert await asyncio.to_thread(begun.wait, WAIT_SECONDS)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.lent == 1
        go_on.set()
        while pool.lent:
            await asyncio.sleep(0)
        ended.set()

    with_pool(tmp_path, test)
    assert ended.is_set()


def test_readers_that_nobody_uses_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A map keeps a file's room on the disk, though its name has long been removed."""
    write(tmp_path, 1)
    monkeypatch.setattr(readers, "IDLE_SECONDS", 0.05)

    def mapped() -> bool:
        return str(tmp_path) in Path("/proc/self/maps").read_text()

    async def test(pool: ReaderPool) -> None:
        stream = pool.stream(messages)
        assert await anext(stream) == b"0"
        assert await pool.run(offset_end) == 1
        # One is lent all the time, and is not touched.
        while pool.idle:
            await asyncio.sleep(0.01)
        assert await anext(stream) == b"0"
        await stream.aclose()
        while mapped():
            await asyncio.sleep(0.01)
        assert await pool.run(offset_end) == 1

    with_pool(tmp_path, test)


# --- walks -----------------------------------------------------------------------------------------


def test_a_walk_hands_out_everything_in_order(tmp_path: Path) -> None:
    write(tmp_path, 1)

    async def test(pool: ReaderPool) -> list[int]:
        stream = pool.stream(numbers, 1000)
        items = [item async for item in stream]
        assert (pool.lent, pool.idle) == (0, 1)
        await stream.aclose()
        assert [item async for item in stream] == []
        return items

    assert with_pool(tmp_path, test) == [*range(1000)]


def test_a_walk_is_only_a_little_ahead_and_keeps_no_thread_while_it_waits(tmp_path: Path) -> None:
    write(tmp_path, 1)
    yielded = [0] * (2 * WALK_THREADS)

    def walk(_reader: LogReader, which: int) -> Iterator[int]:
        while True:
            yielded[which] += 1
            yield yielded[which]

    async def test(pool: ReaderPool) -> None:
        # Twice as many as there are threads: were one kept by a stalled walk, some would not begin.
        streams = [pool.stream(walk, which) for which in range(len(yielded))]
        for taken in range(1, 4):
            for stream in streams:
                assert await anext(stream) == taken
            while min(yielded) < taken + AHEAD_MAX:
                await asyncio.sleep(0)
            assert await pool.run(offset_end) == 1
            assert set(yielded) == {taken + AHEAD_MAX}
        assert pool.lent == len(streams)
        for stream in streams:
            await stream.aclose()
        assert pool.idle == min(IDLE_MAX, len(streams) + 1)

    with_pool(tmp_path, test)


def test_a_walk_whose_pool_is_closed_is_refused_and_is_no_fault(tmp_path: Path) -> None:
    """As when a log is led elsewhere from now on, while somebody reads it here."""
    write(tmp_path, 1)

    async def test(pool: ReaderPool) -> None:
        stream = pool.stream(numbers, 10 * AHEAD_MAX)
        assert await anext(stream) == 0
        while stream._ready.qsize() < AHEAD_MAX:  # It waits until these are taken.
            await asyncio.sleep(0.001)
        pool.close()
        with pytest.raises(Problem, match="not read here any more"):
            async for _ in stream:
                pass
        await stream.aclose()

    with_pool(tmp_path, test)


def test_a_closed_walk_is_ended_in_its_thread_and_its_reader_is_back(tmp_path: Path) -> None:
    write(tmp_path, 1)
    ended_in: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def walk(_reader: LogReader) -> Iterator[int]:
        try:
            yield 1
            begun.set()
            assert go_on.wait(WAIT_SECONDS)
            yield 2
        finally:
            ended_in.append(threading.current_thread().name)

    async def test(pool: ReaderPool) -> None:
        stream = pool.stream(walk)
        assert await anext(stream) == 1
        assert await asyncio.to_thread(begun.wait, WAIT_SECONDS)
        closing = asyncio.create_task(stream.aclose())
        again = asyncio.create_task(stream.aclose())
        await asyncio.sleep(0)
        # The step that has begun has the reader until it is done.
        assert (pool.lent, closing.done(), ended_in) == (1, False, [])
        go_on.set()
        await closing
        await again
        assert (pool.lent, pool.idle) == (0, 1)

    with_pool(tmp_path, test)
    assert [name.partition("_")[0] for name in ended_in] == ["walk"]


def test_a_failure_in_the_middle_comes_after_what_was_there_before_it(tmp_path: Path) -> None:
    write(tmp_path, 1)

    def walk(reader: LogReader) -> Iterator[int]:
        yield 1
        reader.openings("nix")

    async def test(pool: ReaderPool) -> None:
        stream = pool.stream(walk)
        assert await anext(stream) == 1
        with pytest.raises(LogRefused, match="no queue 'nix'"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert (pool.lent, pool.idle) == (0, 1)
        await stream.aclose()

    with_pool(tmp_path, test)


def test_walks_do_not_keep_looks_waiting(tmp_path: Path) -> None:
    write(tmp_path, 7)
    go_on = threading.Event()

    def walk(_reader: LogReader) -> Iterator[int]:
        assert go_on.wait(WAIT_SECONDS)
        yield 1

    async def test(pool: ReaderPool) -> None:
        streams = [pool.stream(walk) for _ in range(3 * WALK_THREADS)]
        assert await pool.run(offset_end) == 7
        go_on.set()
        for stream in streams:
            assert [item async for item in stream] == [1]

    with_pool(tmp_path, test)


def test_more_walks_than_allowed_wait_for_their_turn(tmp_path: Path) -> None:
    write(tmp_path, 1)

    async def test(pool: ReaderPool) -> None:
        first, second, third, fourth = (pool.stream(numbers, 10) for _ in range(4))
        assert [await anext(first), await anext(second)] == [0, 0]
        waiting = asyncio.create_task(anext(third))
        await fourth.aclose()  # one that gives up while it waits
        assert await pool.run(offset_end) == 1
        assert not waiting.done()
        await first.aclose()
        assert await waiting == 0
        for stream in (second, third):
            await stream.aclose()

    with_pool(tmp_path, test, walks_max=2)


def test_a_walk_whose_turn_does_not_come_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    monkeypatch.setattr(readers, "WALK_WAIT_SECONDS", 0.05)

    async def test(pool: ReaderPool) -> None:
        first, second = pool.stream(numbers, 10), pool.stream(numbers, 10)
        assert await anext(first) == 0
        with pytest.raises(Problem, match="too many bulk reads are open") as caught:
            await anext(second)
        assert caught.value.status == 503
        await first.aclose()
        await second.aclose()

    with_pool(tmp_path, test, walks_max=1)


def test_a_pool_that_closes_ends_its_walks(tmp_path: Path) -> None:
    write(tmp_path, 1)

    async def test(pool: ReaderPool) -> None:
        stream = pool.stream(numbers, 10)
        assert await anext(stream) == 0
        pool.close()
        with pytest.raises((Problem, RuntimeError)):
            _ = [item async for item in stream]
        assert (pool.lent, pool.idle) == (0, 0)

    with_pool(tmp_path, test)
