"""What has happened to messages: what a plain walk over all events tells, wherever it begins and rests."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.http.problems import Problem
from penstock.http.reading import history
from penstock.http.reading.history import Histories, histories_of, numpy_hits, plain_hits, walk_events
from penstock.http.reading.looking import Seen, extent_of, iso_time, look_at
from penstock.http.reading.pool import ReaderPool
from penstock.log.log import Log, open_log
from penstock.log.reader import LogReader
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.life import Event
from penstock.model.words import Outcome
from tests.log.folders import NOW_US, Worker

QUEUES = ("brief", "lazy", "short")  # of which retention takes and compacts
FINAL = {"acked", "rejected", "expired", "withdrawn"}


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A log with every kind of event, several openings, and what retention has left of it; still open."""
    worker = Worker(tmp_path_factory.mktemp("busy"), 32, queues=QUEUES)
    for part in range(6):
        for _ in range(80):
            worker.turn()
        worker.settle_down()
        worker.reopen(crash=part % 2 == 0)
    worker.settle_down()
    yield worker
    worker.engine.close(worker.now_us)


@pytest.fixture(params=[numpy_hits, plain_hits], ids=["numpy", "plain"])
def hits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With numpy, and as it is done where that is not installed."""
    monkeypatch.setattr(history, "_hits_of", request.param)


def seen_of(reader: LogReader, queue: str) -> list[Seen]:
    extent = extent_of(reader, queue)
    assert extent is not None
    return look_at(reader, queue, [(0, extent.offset_end)], 1_000_000, 1 << 40).seen


def found(reader: LogReader, queue: str, messages: Sequence[Seen]) -> Histories:
    *rests, histories = walk_events(reader, queue, messages)
    assert set(rests) <= {None}
    assert histories is not None
    return histories


def expected(log: Log, queue: str, message: Seen) -> list[dict[str, Any]]:
    """One event after the other, for one message."""
    fields = [
        {
            "event": run.event.name.lower(),
            "time": iso_time(run.time_us),
            "reason": run.reason.label or None,
            "consumer": run.consumer or None,
            "attempt": run.attempt,
            "dispatched": iso_time(run.dispatched_us) if run.dispatched_us else None,
        }
        for run in log.events(queue, 0, log.describe(queue).event_end)
        if run.first <= message.offset < run.end and run.event is not Event.ACCEPTED
    ]
    accepted = {"event": "accepted", "time": iso_time(message.time_us), "attempt": 0}
    return [{**accepted, "reason": None, "consumer": None, "dispatched": None}, *fields]


# --- the same as all events ------------------------------------------------------------------------


@pytest.mark.usefixtures("hits")
@pytest.mark.parametrize("rest", [7, 1000, 1_000_000])
@pytest.mark.parametrize("queue", QUEUES)
def test_a_history_has_every_event_of_its_message(
    busy: Worker, queue: str, rest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "REST_EVENTS", rest)
    reader = LogReader(str(busy.folder))
    messages = seen_of(reader, queue)
    wanted = {message.offset: expected(busy.engine, queue, message) for message in messages}
    assert found(reader, queue, messages) == wanted
    for some in (messages[:1], messages[-1:], messages[3:60:7], messages[len(messages) // 2 :][:5]):
        assert found(reader, queue, some) == {message.offset: wanted[message.offset] for message in some}


def test_the_log_has_all_that_should_be_tested(busy: Worker) -> None:
    """Long lives, short ones, and messages whose first events retention has taken."""
    reader = LogReader(str(busy.folder))
    lives: list[list[dict[str, Any]]] = []
    cut_off = 0
    for queue in QUEUES:
        known = reader.queue(queue)
        assert known is not None
        messages = seen_of(reader, queue)
        cut_off += sum(message.event < known.event_start for message in messages)
        lives += found(reader, queue, messages).values()
    assert {event["event"] for life in lives for event in life} >= {
        "accepted",
        "acked",
        "dead",
        "requeued",
        "returned",
        "redriven",
        "withdrawn",
    }
    assert max(len(life) for life in lives) > 4
    assert cut_off > 0
    assert any(life[-1]["event"] not in FINAL for life in lives)


def test_rests_are_taken_and_the_walk_ends_where_all_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(str(tmp_path), NOW_US)
    for turn in range(20):
        log.append("q", Batch.of([b"x"] * 10), NOW_US + turn)
        log.take("q", "ann", 10, NOW_US + turn)
        log.settle("q", "ann", Outcome.ACK, [(10 * turn, 10 * turn + 10)], NOW_US + turn)
        log.flush(NOW_US + turn)
        log.wait()
    monkeypatch.setattr(history, "REST_EVENTS", 50)
    reader = LogReader(str(tmp_path))
    messages = seen_of(reader, "q")
    assert len(list(walk_events(reader, "q", messages))) == 400 // 50 + 1
    assert len(list(walk_events(reader, "q", messages[:10]))) == 2
    log.close(NOW_US)


# --- bounds ----------------------------------------------------------------------------------------


def test_a_walk_that_would_be_too_long_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(str(tmp_path), NOW_US)
    log.append("q", Batch.of([b"x"] * 300), NOW_US)
    log.close(NOW_US)
    monkeypatch.setattr(history, "REST_EVENTS", 20)
    monkeypatch.setattr(history, "EVENTS_MAX", 100)
    reader = LogReader(str(tmp_path))
    messages = seen_of(reader, "q")
    with pytest.raises(Problem, match=r"more than 100 events .* offset 40 came.*start=40 instead") as caught:
        list(walk_events(reader, "q", messages[40:41]))
    assert caught.value.status == 503
    # What is near the end of the log is found all the same.
    assert len(found(reader, "q", messages[250:251])[250]) == 1


def test_a_message_that_goes_back_again_and_again_has_too_long_a_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(str(tmp_path), NOW_US)
    log.append("q", Batch.of([b"poison", b"x"], retries=[255, 255]), NOW_US)
    for turn in range(60):
        log.take("q", "ann", 2, NOW_US + turn)
        log.settle("q", "ann", Outcome.REQUEUE, [(0, 1), (1, 2)] if turn < 3 else [(0, 1)], NOW_US + turn)
        log.flush(NOW_US + turn)
        log.wait()
    log.close(NOW_US)
    monkeypatch.setattr(history, "FOUND_MAX", 50)
    reader = LogReader(str(tmp_path))
    messages = seen_of(reader, "q")
    with pytest.raises(Problem, match=r"more than 50 events .* offset 0 came.*start=0 instead") as caught:
        list(walk_events(reader, "q", messages))
    assert caught.value.status == 503
    # Another one beside it is shown, however much has happened to that.
    assert len(found(reader, "q", messages[1:])[1]) == 4


def test_histories_through_the_pool_give_their_reader_back(busy: Worker) -> None:
    async def ask() -> Histories:
        pool = ReaderPool(str(busy.folder))
        try:
            messages = await pool.run(seen_of, "brief")
            assert await histories_of(pool, "brief", []) == {}
            histories = await histories_of(pool, "brief", messages)
            assert pool.lent == 0
            return histories
        finally:
            pool.close()

    reader = LogReader(str(busy.folder))
    assert asyncio.run(ask()) == found(reader, "brief", seen_of(reader, "brief"))


def test_a_damaged_block_is_left_out_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = open_log(str(tmp_path), NOW_US, settings=LogSettings(segment_bytes=1 << 16))
    log.append("q", Batch.of([b"x"]), NOW_US)
    for who in ("ann", "bob", "cay"):
        log.take("q", who, 1, NOW_US)
        log.settle("q", who, Outcome.REQUEUE, [(0, 1)], NOW_US)
        log.flush(NOW_US)
        log.wait()
    log.close(NOW_US)
    for path in tmp_path.glob("*.seg"):
        data = bytearray(path.read_bytes())
        if b"bob" in data:
            data[data.index(b"bob")] ^= 1
            path.write_bytes(data)
    reader = LogReader(str(tmp_path))
    events = found(reader, "q", seen_of(reader, "q"))[0]
    assert [event["consumer"] for event in events] == [None, "ann", "cay"]
    assert "does not have its checksum" in caplog.text
