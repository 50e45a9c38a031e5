"""Idempotency keys: the same again stores nothing, another body is refused, no key passes for another."""

import asyncio
import io
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.http.problems import Problem
from penstock.http.reading.pool import ReaderPool
from penstock.http.stages.idempotency import check_same, transaction_key
from penstock.log.log import open_log
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.policy import Policies
from penstock.model.words import Outcome
from tests.http.api import ARROW, NDJSON, Api, Reply
from tests.http.conftest import StartBroker
from tests.log.folders import NOW_US
from tests.server.harness import BrokerProcess, until


def send(api: Api, queue: str, body: bytes, key: str, **query: object) -> Reply:
    path = f"/v1/queues/{quote(queue, safe='')}/messages"
    return api.ask("POST", path, body, {"Idempotency-Key": key}, **query)


def send_lines(api: Api, queue: str, key: str, *rows: dict[str, Any]) -> Reply:
    body = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    headers = {"Content-Type": NDJSON, "Idempotency-Key": key}
    return api.ask("POST", f"/v1/queues/{quote(queue, safe='')}/batch", body, headers)


def offset_end(api: Api, queue: str) -> int:
    return int(api.get(f"/v1/queues/{quote(queue, safe='')}")["offset_end"])


# --- the same again ----------------------------------------------------------------------------------


def test_a_repetition_gets_the_first_answer(api: Api) -> None:
    first = send(api, "again", b"x", "key 1", ttl=60, retries=3).json
    assert first["repeated"] is False
    assert send(api, "again", b"y", "key 2").json["offset"] == 1
    for _ in range(3):
        assert send(api, "again", b"x", "key 1", ttl=60, retries=3).json == first | {"repeated": True}
    assert offset_end(api, "again") == 2
    assert api.send("again", b"x") == [2]  # without a key it is another message


def test_a_repetition_of_a_batch(api: Api) -> None:
    rows: list[dict[str, Any]] = [
        {"value": "a", "ttl": 9},
        {"value": ""},
        {"value_base64": "/w==", "retries": 0},
    ]
    first = send_lines(api, "batches", "k", *rows).json
    assert (first["count"], first["repeated"]) == (3, False)
    assert send_lines(api, "batches", "k", *rows).json == first | {"repeated": True}
    # What counts is what it means, not how it is written.
    table = pa.table({"value": [b"a", b"", b"\xff"], "ttl": [9, None, None], "retries": [None, None, 0]})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    headers = {"Content-Type": ARROW, "Idempotency-Key": "k"}
    reply = api.ask("POST", "/v1/queues/batches/batch", sink.getvalue(), headers)
    assert reply.json == first | {"repeated": True}
    assert offset_end(api, "batches") == 3


def test_one_message_is_a_batch_of_one(api: Api) -> None:
    first = send(api, "one", b"x", "k").json
    assert send_lines(api, "one", "k", {"value": "x"}).json["offset_start"] == first["offset"]
    assert offset_end(api, "one") == 1


def test_a_batch_of_several_blocks(api: Api) -> None:
    rows: list[dict[str, Any]] = [
        {"value": f"{number}" + "x" * 30_000, "ttl": number % 3 + 1} for number in range(150)
    ]
    first = send_lines(api, "blocks", "k", *rows).json
    assert send_lines(api, "blocks", "k", *rows).json == first | {"repeated": True}
    rows[149]["value"] += "!"
    assert send_lines(api, "blocks", "k", *rows).status == 409
    rows[149] = {"value": "149" + "x" * 30_000, "ttl": 1}
    assert send_lines(api, "blocks", "k", *rows).status == 409
    assert offset_end(api, "blocks") == 150


def test_keys_are_remembered_across_a_restart(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        first = send(api, "kept", b"x", "k").json
    broker.kill()
    again = BrokerProcess(broker.folder, "--http", "127.0.0.1:0").start()
    try:
        with Api(again.ports["http"]) as api:
            assert send(api, "kept", b"x", "k").json == first | {"repeated": True}
            assert send(api, "kept", b"y", "k").status == 409
    finally:
        again.kill()


def test_what_retention_has_removed_counts_as_the_same(tmp_path: Path) -> None:
    small = LogSettings(segment_bytes=4096, block_bytes=1024, snapshot_blocks=1000)
    log = open_log(str(tmp_path), NOW_US, settings=small, policies=Policies({"*": {"retention-seconds": 0}}))
    try:
        ours = Batch.of([b"%03d" % number + bytes(600) for number in range(8)], protocol="http")
        log.transact(transaction_key("q", "k"), [("q", ours)], NOW_US)
        log.flush(NOW_US)
        log.wait()

        async def main() -> None:
            readers = ReaderPool(str(tmp_path))

            async def judge(batch: Batch) -> bool:
                try:
                    await check_same(readers, "q", 0, 8, batch)
                except Problem as problem:
                    return problem.name != "key-reused"
                return True

            other = Batch.of([b"%03d" % number + bytes(600) for number in range(1, 9)], protocol="http")
            assert await judge(ours)
            assert not await judge(other)
            for piece in log.take("q", "ann", 8, NOW_US, bytes_max=1 << 20):
                log.settle("q", "ann", Outcome.ACK, [(piece.offset_start, piece.offset_end)], NOW_US)
            while log.describe("q").offset_start < 8:
                log.append("filler", Batch.of([bytes(1000)]), NOW_US)
                log.flush(NOW_US)
                log.wait()
                log.trim(NOW_US + 1)
                log.wait()
            assert await judge(ours)
            assert await judge(other)
            assert not await judge(Batch.of([b"one more or less"]))
            readers.close()

        asyncio.run(main())
    finally:
        log.close(NOW_US)


# --- something else ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [
        [{"value": "ab"}, {"value": "C"}],
        [{"value": "a"}, {"value": "bc"}],  # the same bytes, cut elsewhere
        [{"value": "abc"}],
        [{"value": "ab"}, {"value": "c"}, {"value": ""}],
        [{"value": "ab"}, {"value": "c", "ttl": 5}],
        [{"value": "ab", "retries": 0}, {"value": "c"}],
        [{"value": "ab"}, {"value": "c", "delay": 5}],
        [{"value": "ab", "headers": {"a": "b"}}, {"value": "c"}],
    ],
)
def test_another_body_is_refused(api: Api, rows: list[dict[str, Any]]) -> None:
    queue = f"other {json.dumps(rows)}"
    first = send_lines(api, queue, "k", {"value": "ab"}, {"value": "c"}).json
    reply = send_lines(api, queue, "k", *rows)
    assert (reply.status, reply.problem) == (409, "key-reused")
    assert reply.json["detail"] == (
        f"queue {queue!r}: this Idempotency-Key was used for other messages (offsets 0 to 1); use a new key "
        f"for what is new"
    )
    assert send_lines(api, queue, "k", {"value": "ab"}, {"value": "c"}).json == first | {"repeated": True}
    assert offset_end(api, queue) == 2


def test_other_terms_are_another_body(api: Api) -> None:
    terms = {"ttl": 60, "retries": 3, "delay": 0.5}
    assert send(api, "terms", b"x", "k", **terms).status == 200
    assert send(api, "terms", b"x", "k", **terms).json["repeated"]
    for other in (
        {"ttl": 61},
        {"retries": 4},
        {"delay": 0.6},
        {"ttl": None},
        {"retries": None},
        {"delay": None},
    ):
        assert send(api, "terms", b"x", "k", **{**terms, **other}).status == 409
    rows = [{"value": "x", "delay": 1, "headers": {"a": "b"}}, {"value": "y", "ttl": 5}]
    assert send_lines(api, "terms", "many", *rows).status == 200
    assert send_lines(api, "terms", "many", *rows).json["repeated"]
    rows[0]["headers"] = {"a": "c"}
    assert send_lines(api, "terms", "many", *rows).status == 409


def test_the_same_key_for_another_queue_is_another_key(api: Api) -> None:
    pairs = [("a", "b/c"), ("a/b", "c"), ("1/a", "b/c"), ("a", "c"), ("c", "a")]
    for queue, key in pairs:
        assert send(api, queue, b"x", key).json["repeated"] is False
    for queue, key in pairs:
        assert send(api, queue, b"x", key).json["repeated"] is True


NAMES = st.text("a/1", min_size=1, max_size=4)


@given(st.tuples(NAMES, NAMES), st.tuples(NAMES, NAMES))
def test_no_name_and_no_key_passes_for_others(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (transaction_key(*one) == transaction_key(*other)) == (one == other)


@pytest.mark.parametrize("key", ["", " ", "x" * 201, "é", "a\tb"])
def test_what_is_no_key(api: Api, key: str) -> None:
    reply = send(api, "keys", b"x", key)
    assert (reply.status, reply.problem) == (400, "bad-request")
    assert reply.json["detail"] == (
        "header parameter 'Idempotency-Key': use 1 to 200 printable ASCII characters"
    )


# --- at the same moment ------------------------------------------------------------------------------


@contextmanager
def stopped(broker: BrokerProcess) -> Iterator[None]:
    """The first process does nothing for a while, so that what is asked meanwhile comes at once."""
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(broker.pid, signal.SIGCONT)


def test_two_requests_at_the_same_moment(broker: BrokerProcess) -> None:
    senders = 6

    def one(number: int) -> Reply:
        with Api(broker.ports["http"]) as api:
            return send(api, "moment", b"x" if number % 3 else b"y", "k")

    with ThreadPoolExecutor(senders) as pool:
        with stopped(broker):
            some = [pool.submit(one, number) for number in range(senders)]
            until(lambda: all(it.running() for it in some), "all requests to be under way")
        replies = [it.result() for it in some]
    taken = [reply.json for reply in replies if reply.status == 200]
    # Which of the two bodies came first is open; the other one is refused.
    assert len(taken) in (2, 4)
    assert {reply.status for reply in replies} == {200, 409}
    assert sum(not receipt["repeated"] for receipt in taken) == 1
    assert len({(receipt["offset"], receipt["id"]) for receipt in taken}) == 1
    with Api(broker.ports["http"]) as api:
        assert offset_end(api, "moment") == 1
