"""Looking at messages over HTTP: every state, every edge of a page, and nothing taken by it."""

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.control.frames import Frame
from penstock.http.reading import looking
from penstock.http.reading.looking import Runs, iso_time, look_at, message_fields
from penstock.log.log import open_log
from penstock.log.reader import LogReader
from penstock.model.batch import Batch
from tests.http.api import NDJSON, Api
from tests.http.conftest import StartBroker
from tests.http.morgue import path_of, phpmq, take
from tests.http.zoo import (
    ACKED,
    EXPIRED,
    HELD,
    LOOKED_INTO,
    READY,
    REDRIVEN,
    REJECTED,
    REQUEUED,
    SECONDS,
    STATES,
    TTL,
    counts,
    value,
    zoo,
)
from tests.log.folders import NOW_US, SECOND_US, Worker
from tests.server.harness import WAIT_SECONDS, BrokerProcess, until

NAMES = ["zoo", "a/b c", "größe/ñ 100%", "日本/語?x=1&y#z"]


def page(api: Api, queue: str, **query: object) -> tuple[list[dict[str, Any]], int | None]:
    answer = api.get(path_of(queue, "messages"), **query)
    assert answer.keys() == {"messages", "next"}
    return answer["messages"], answer["next"]


def offsets(messages: list[dict[str, Any]]) -> list[int]:
    return [message["offset"] for message in messages]


def pages(api: Api, queue: str, **query: object) -> Iterator[list[dict[str, Any]]]:
    """Page after page, until there is no next one."""
    at: int | None = 0
    while at is not None:
        messages, following = page(api, queue, from_=at, **query)
        assert following is None or following > at
        at = following
        yield messages


def moment(text: str) -> datetime:
    assert len(text) == len("2026-01-01T00:00:00.000000Z")
    assert text.endswith("Z")
    return datetime.fromisoformat(text)


def names(api: Api) -> list[str]:
    return [queue["name"] for queue in api.get("/v1/queues")["queues"]]


def events(message: dict[str, Any]) -> list[str]:
    return [event["event"] for event in message["history"]]


def send_lines(api: Api, queue: str, count: int, text: str = "{:07d}") -> None:
    lines = b"".join(json.dumps({"value": text.format(i)}).encode() + b"\n" for i in range(count))
    reply = api.ask("POST", path_of(queue, "batch"), lines, {"Content-Type": NDJSON})
    assert reply.status == 200, reply


# --- states ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", NAMES)
def test_every_state_is_shown_as_it_is(broker: BrokerProcess, api: Api, queue: str) -> None:
    with zoo(broker, api, queue):
        connected = {it["name"] for it in api.get("/v1/connections")["connections"]}
        messages, following = page(api, queue)
        assert following is None
        assert {message["offset"]: message["state"] for message in messages} == STATES
        assert [base64.b64decode(message["value_base64"]) for message in messages] == [*map(value, range(9))]
        assert {message["protocol"] for message in messages} == {"http"}
        assert len({message["id"] for message in messages}) == 9
        assert {message["id"][:18] for message in messages} == {messages[0]["id"][:18]}
        by_offset = {message["offset"]: message for message in messages}
        assert {o: m["attempts"] for o, m in by_offset.items()} == {
            ACKED: None,  # only its history tells
            REJECTED: 1,
            REQUEUED: 1,
            REDRIVEN: 0,
            LOOKED_INTO: 1,
            HELD: 0,
            EXPIRED: 0,
            TTL: 0,
            READY: 0,
        }
        assert {o: m["reason"] for o, m in by_offset.items() if m["reason"]} == {
            REJECTED: "rejected",
            LOOKED_INTO: "rejected",
            EXPIRED: "expired",
        }
        holders = {o: m["consumer"] for o, m in by_offset.items() if m["consumer"]}
        assert holders.keys() == {LOOKED_INTO, HELD}
        assert set(holders.values()) <= connected
        assert holders[LOOKED_INTO] != holders[HELD]
        assert {o: m["retries"] for o, m in by_offset.items() if m["retries"] is not None} == {TTL: 7}
        left = {o: m["ttl"] for o, m in by_offset.items() if m["ttl"] is not None}
        assert left.keys() == {REQUEUED, TTL}
        assert all(SECONDS - WAIT_SECONDS <= seconds <= SECONDS for seconds in left.values())
        expires = {o: moment(m["expires"]) for o, m in by_offset.items() if m["expires"]}
        assert expires.keys() == {REQUEUED, EXPIRED, TTL}
        assert expires[TTL] - moment(by_offset[TTL]["time"]) == timedelta(seconds=SECONDS)
        assert expires[EXPIRED] - moment(by_offset[EXPIRED]["time"]) == timedelta(seconds=1)
        assert moment(by_offset[READY]["time"]) <= datetime.now(UTC)
        # Nothing was taken, and nobody was disturbed.
        assert counts(api, queue) == (4, 1, 3)


def test_delayed_messages(api: Api) -> None:
    """Sent so, and given back so."""
    api.send("delayed", b"sent", delay=600)
    api.send("delayed", b"given back", b"ready")
    (message,) = api.post(path_of("delayed", "take"))["messages"]
    api.post(path_of("delayed", "settle"), {"requeue": [{"id": message["id"], "delay": 60}]})
    messages, _ = page(api, "delayed")
    assert [(it["state"], it["attempts"]) for it in messages] == [
        ("delayed", 0),
        ("delayed", 1),
        ("ready", 0),
    ]
    sent, given_back, ready = messages
    assert moment(sent["due"]) - moment(sent["time"]) == timedelta(seconds=600)
    left = moment(given_back["due"]) - datetime.now(UTC)
    assert timedelta(seconds=60 - WAIT_SECONDS) < left < timedelta(seconds=60)
    assert ready["due"] is None
    assert page(api, "delayed", state="delayed") == ([sent, given_back], None)
    assert page(api, "delayed", state="ready") == ([ready], None)
    one = api.get(path_of("delayed", "messages/1"))
    assert events(one) == ["accepted", "delayed"]
    assert one["due"] == given_back["due"]
    row = api.get(path_of("delayed"))
    assert (row["ready"], row["delayed"], row["held"]) == (1, 2, 0)
    assert api.get("/v1/queues", match="delayed")["queues"][0]["delayed"] == 2


def test_what_was_said_with_a_rejection(api: Api) -> None:
    api.send("why", b"a", b"b", b"c")
    first, second, _ = (it["id"] for it in api.post(path_of("why", "take"), max=3)["messages"])
    api.post(path_of("why", "settle"), {"reject": [{"id": first, "reason": "größer"}, second]})
    messages, _ = page(api, "why")
    assert [(it["state"], it["reason"], it["why"]) for it in messages] == [
        ("dead", "rejected", "größer"),
        ("dead", "rejected", None),
        ("held", None, None),
    ]
    assert api.get(path_of("why", "messages/0"))["why"] == "größer"
    assert api.post(path_of("why", "redrive"), {})["redriven"] == 2
    messages, _ = page(api, "why", state="ready")
    assert [(it["reason"], it["why"]) for it in messages] == [(None, None), (None, None)]


@pytest.mark.parametrize("state", ["ready", "held", "dead", "gone"])
@pytest.mark.long
def test_one_state_only(broker: BrokerProcess, api: Api, state: str) -> None:
    queue = f"only/{state}"
    wanted = [offset for offset, its in STATES.items() if its == state]
    with zoo(broker, api, queue):
        every, _ = page(api, queue)
        messages, following = page(api, queue, state=state)
        assert (offsets(messages), following) == (wanted, None)
        for message in messages:
            whole = every[message["offset"]]
            assert {**message, "ttl": None} == {**whole, "ttl": None}
        assert [offsets(some) for some in pages(api, queue, state=state, limit=1) if some] == [
            [o] for o in wanted
        ]
        for start in range(10):
            messages, _ = page(api, queue, state=state, from_=start)
            assert offsets(messages) == [offset for offset in wanted if offset >= start]


def test_histories_tell_what_has_happened(broker: BrokerProcess, api: Api) -> None:
    lives = {
        ACKED: ["accepted", "acked"],
        REJECTED: ["accepted", "dead"],
        REQUEUED: ["accepted", "requeued"],
        REDRIVEN: ["accepted", "dead", "redriven"],
        LOOKED_INTO: ["accepted", "dead"],
        HELD: ["accepted"],
        EXPIRED: ["accepted", "dead"],
        TTL: ["accepted"],
        READY: ["accepted"],
    }
    with zoo(broker, api, "lives"):

        def all_told() -> bool:
            messages, _ = page(api, "lives", history=True)
            return {message["offset"]: events(message) for message in messages} == lives

        until(all_told, "what happened last to be synced")
        messages, _ = page(api, "lives", history=True)
        for message in messages:
            alone = api.get(path_of("lives", f"messages/{message['offset']}"))
            assert {**alone, "ttl": None} == {**message, "ttl": None}
        acked, rejected = messages[ACKED], messages[REJECTED]
        assert acked["attempts"] == 1
        accepted, ending = acked["history"]
        assert accepted == {
            "event": "accepted",
            "time": acked["time"],
            "reason": None,
            "consumer": None,
            "attempt": 0,
            "dispatched": None,
        }
        assert ending["attempt"] == 1
        assert ending["consumer"] == messages[HELD]["consumer"]
        assert moment(accepted["time"]) <= moment(ending["dispatched"]) <= moment(ending["time"])
        assert [event["reason"] for event in rejected["history"]] == [None, "rejected"]
        assert [event["reason"] for event in messages[EXPIRED]["history"]] == [None, "expired"]
        plain, _ = page(api, "lives")
        assert all("history" not in message for message in plain)


# --- pages -----------------------------------------------------------------------------------------


def test_pages_of_a_large_queue_have_everything_once(broker: BrokerProcess, api: Api) -> None:
    count = 100_000
    send_lines(api, "large", count)
    at = 0
    for messages in pages(api, "large", limit=1000):
        assert offsets(messages) == [*range(at, at + 1000)]
        assert base64.b64decode(messages[0]["value_base64"]) == b"%07d" % at
        assert base64.b64decode(messages[-1]["value_base64"]) == b"%07d" % (at + 999)
        at += 1000
    assert at == count


def test_pages_of_a_state_in_a_large_queue(broker: BrokerProcess, api: Api) -> None:
    """Every third is dead, every third gone, every third ready: as many runs as messages."""
    count = 30_000
    send_lines(api, "mixed", count)
    with phpmq(broker) as mq:
        for _ in range(count // 1000):
            taken = list(mq.consume("mixed", prefetch=1000, count=1000, timeout=WAIT_SECONDS))
            mq.ack_many(taken[0::3])
            for body in taken[1::3]:
                body.reject()
            for body in taken[2::3]:
                body.requeue()
    until(lambda: counts(api, "mixed")[1] == 0, "verdicts to arrive")
    for state in ("gone", "dead", "ready"):
        seen = [message for messages in pages(api, "mixed", state=state, limit=1000) for message in messages]
        assert {message["state"] for message in seen} == {state}
        numbers = [int(base64.b64decode(message["value_base64"])) for message in seen]
        assert numbers == offsets(seen)
    every = sorted(
        offset
        for state in ("gone", "dead", "ready", "held")
        for messages in pages(api, "mixed", state=state, limit=1000)
        for offset in offsets(messages)
    )
    assert every == [*range(count)]
    messages, _ = page(api, "mixed", from_=20_000, limit=1000, history=True)
    for message in messages:
        assert events(message)[0] == "accepted"
        if message["state"] == "dead":
            assert events(message)[-1] == "dead"


def test_edges_of_pages(api: Api) -> None:
    api.send("edges", b"a", b"b", b"c")
    for start, limit, wanted, following in [
        (0, 100, [0, 1, 2], None),
        (0, 3, [0, 1, 2], None),
        (0, 2, [0, 1], 2),
        (2, 1, [2], None),
        (3, 1, [], None),
        ((1 << 56) - 1, 1000, [], None),
    ]:
        messages, next_one = page(api, "edges", from_=start, limit=limit)
        assert (offsets(messages), next_one) == (wanted, following)
        messages, next_one = page(api, "edges", from_=start, limit=limit, state="ready")
        assert (offsets(messages), next_one) == (wanted, following)
        for state in ("held", "dead", "gone"):
            assert page(api, "edges", from_=start, limit=limit, state=state) == ([], None)


def test_a_page_is_bounded_in_bytes(api: Api) -> None:
    for _ in range(5):
        api.send("heavy", b"x" * (3 << 20))
    for query in ({}, {"state": "ready"}):
        sizes = [len(messages) for messages in pages(api, "heavy", **query)]
        assert sizes == [3, 2]


def test_a_message_larger_than_a_page_comes_alone(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("giants", b"g" * (9 << 20), b"small", b"g" * (9 << 20))
        assert [offsets(some) for some in pages(api, "giants")] == [[0], [1, 2]]
        message = api.get(path_of("giants", "messages/2"))
        assert len(base64.b64decode(message["value_base64"])) == 9 << 20


def test_empty_messages_are_messages(api: Api) -> None:
    api.send("empty", b"", b"")
    messages, _ = page(api, "empty")
    assert [message["value_base64"] for message in messages] == ["", ""]


# --- no ---------------------------------------------------------------------------------------------


def test_what_is_not_there(api: Api) -> None:
    for path in (path_of("nix", "messages"), path_of("nix", "messages/0")):
        reply = api.ask("GET", path)
        assert (reply.status, reply.problem) == (404, "queue-not-found")
    assert api.ask("GET", path_of("nix", "messages"), state="dead").problem == "queue-not-found"
    api.send("one", b"x")
    reply = api.ask("GET", path_of("one", "messages/1"))
    assert (reply.status, reply.problem) == (404, "message-not-found")
    assert "offset 1" in reply.json["detail"]


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ({"from_": -1}, "from"),
        ({"from_": "x"}, "from"),
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"state": "acked"}, "state"),
        ({"history": "yes"}, "history"),
        ({"form": 1}, "did you mean 'from'"),
    ],
)
def test_wrong_parameters_are_named(api: Api, query: dict[str, Any], named: str) -> None:
    api.send("asked", b"x")
    reply = api.ask("GET", path_of("asked", "messages"), **query)
    assert (reply.status, reply.problem) == (400, "bad-request")
    assert named in reply.json["detail"]


def test_the_door_is_not_a_queue(api: Api) -> None:
    api.send("house", b"x")
    reply = api.ask("GET", path_of("house.dead", "messages"))
    assert (reply.status, reply.problem) == (400, "bad-request")
    assert "messages?state=dead" in reply.json["detail"]


@pytest.mark.parametrize("offset", ["-1", "x", "99999999999999999999"])
def test_offsets_that_are_none(api: Api, offset: str) -> None:
    api.send("one", b"x")
    reply = api.ask("GET", path_of("one", f"messages/{offset}"))
    assert (reply.status, reply.problem) == (400, "bad-request")


# --- retention --------------------------------------------------------------------------------------


def test_what_retention_has_removed_is_passed_over(tmp_path: Path, start_broker: StartBroker) -> None:
    """A log of which old segments are gone or compacted: what is alive is shown, wherever it lies."""
    folder = tmp_path / "broker"
    folder.mkdir()
    worker = Worker(folder / "data", 19, queues=("brief", "lazy", "short"))
    for part in range(6):
        for _ in range(80):
            worker.turn()
        worker.settle_down()
        worker.reopen(crash=part % 2 == 0)
    # The broker's time goes on from here: no delay and no TTL ends between one question and the next.
    worker.now_us += 60 * SECOND_US
    worker.engine.due(worker.now_us)
    worker.engine.expire(worker.now_us)
    worker.settle_down()
    worker.engine.pause("brief", True, worker.now_us)
    worker.engine.close(worker.now_us)
    broker = start_broker()
    with LogReader(str(folder / "data")) as reader, Api(broker.ports["http"]) as api:
        known = reader.queue("brief")
        assert known is not None
        kept = [
            block.header.first_offset + i
            for block in reader.messages("brief", 0, fail_on_loss=False)
            for i in range(block.lo, block.hi)
        ]
        facts = api.get(path_of("brief"))
        assert facts["offset_start"] == known.offset_start > kept[0] > 0
        every = [message for messages in pages(api, "brief", limit=7) for message in messages]
        assert offsets(every) == kept
        for state in ("ready", "dead", "gone"):
            some = [message for messages in pages(api, "brief", limit=7, state=state) for message in messages]
            assert offsets(some) == [message["offset"] for message in every if message["state"] == state]
        ready = [message for message in every if message["state"] == "ready"]
        assert len(ready) == facts["ready"] > 0
        # Of an old one, the acceptance is known, though the events of that time are gone.
        old = api.get(path_of("brief", f"messages/{kept[0]}"))
        assert old["history"][0]["event"] == "accepted"
        removed = next(offset for offset in range(known.offset_start) if offset not in kept)
        reply = api.ask("GET", path_of("brief", f"messages/{removed}"))
        assert (reply.status, reply.problem) == (410, "offsets-missing")
        assert reply.json["queue"] == "brief"
        assert reply.json["offset_start"] == known.offset_start


def test_a_damaged_block_is_left_out_of_pages_and_named_when_asked_for(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("broken", b"first", b"second-message", b"third")
        for path in (broker.folder / "data").glob("*.seg"):
            with path.open("r+b") as file:
                at = file.read().find(b"second-message")
                if at >= 0:
                    file.seek(at)
                    file.write(b"S")
        for query in ({}, {"state": "ready"}):
            messages, following = page(api, "broken", **query)
            assert (offsets(messages), following) == ([0, 2], None)
        assert "does not have its checksum" in broker.log()
        reply = api.ask("GET", path_of("broken", "messages/1"))
        assert (reply.status, reply.problem) == (500, "internal")
        assert "offsets 1 to 1" in reply.json["detail"]


# --- not synced, or only just -----------------------------------------------------------------------


def test_a_queue_of_which_nothing_is_synced_is_empty(start_broker: StartBroker) -> None:
    broker = start_broker("--durability", "none")
    with Api(broker.ports["http"]) as api, phpmq(broker) as mq:
        mq.send_many("unsafe", [b"x"] * 10)
        until(lambda: "unsafe" in names(api), "the queue to be there")
        messages, _ = page(api, "unsafe")
        assert offsets(messages) in ([], [*range(10)])
        until(lambda: offsets(page(api, "unsafe")[0]) == [*range(10)], "messages to be synced")


def test_looking_while_others_work(broker: BrokerProcess, api: Api) -> None:
    """Each answer is true of its moment, and pages go on without holes while messages come and go."""
    send_lines(api, "rush", 2000)
    for _ in range(20):
        send_lines(api, "rush", 100)
        take(broker, "rush", 100, lambda message: message.ack())
        messages, _ = page(api, "rush", limit=300)
        assert offsets(messages) == [*range(300)]
        assert {message["state"] for message in messages} <= {"gone", "held", "ready"}
        ready, _ = page(api, "rush", state="ready", limit=10)
        assert offsets(ready) == [*range(ready[0]["offset"], ready[0]["offset"] + 10)]
    until(lambda: counts(api, "rush") == (2000, 0, 0), "acknowledgements to arrive")
    seen = [message["state"] for messages in pages(api, "rush", limit=1000) for message in messages]
    assert seen == ["gone"] * 2000 + ["ready"] * 2000


# --- parts of it ------------------------------------------------------------------------------------


def test_times_beyond_the_calendar_are_its_end() -> None:
    assert iso_time(0) == "1970-01-01T00:00:00.000000Z"
    assert iso_time(1 << 62) == "9999-12-31T23:59:59.999999Z"


def test_the_seconds_that_are_left_are_rounded_up() -> None:
    seen = looking.Seen(0, "", 0, NOW_US, "", 0, -1, b"")
    for left_us, ttl in ((1, 1), (999_999, 1), (1_000_000, 1), (1_000_001, 2), (0, 0), (-5_000_000, 0)):
        told = {"first": 0, "end": 1, "expires_us": NOW_US + left_us, "state": 1}
        sizes = {"q": 8, "i": 4, "B": 1}
        columns = [told.get(name, 0).to_bytes(sizes[code], "little") for name, code in Runs.COLUMNS]
        body = b"".join(columns)
        fields = {"next": 1, "time_us": NOW_US, "consumers": [""], "count": 1, "repairs": 0}
        runs = Runs(0, Frame(fields, memoryview(body)))
        assert message_fields(seen, runs)["ttl"] == ttl


def test_a_look_stops_at_blocks_that_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(str(tmp_path), NOW_US)
    for at in range(20):
        log.append("q", Batch.of([b"%d" % at, b"x" * 1000]), NOW_US)
        log.flush(NOW_US)
        log.wait()
    log.close(NOW_US)
    monkeypatch.setattr(looking, "BLOCKS_BYTES_MAX", 5000)
    with LogReader(str(tmp_path)) as reader:
        ranges = [(at, at + 1) for at in range(0, 40, 2)]
        seen: list[bytes] = []
        looks = 0
        while ranges:
            look = look_at(reader, "q", ranges, 100, 1 << 20)
            seen += [message.value for message in look.seen]
            looks += 1
            if look.offset_next is None:
                break
            at = look.offset_next
            ranges = [it for it in ranges if it[0] >= at]
        assert seen == [b"%d" % at for at in range(20)]
        assert looks == 4
