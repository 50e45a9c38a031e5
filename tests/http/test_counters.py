"""Counters are true.

Traffic of all kinds goes through a real broker; then every counter is compared with the events that
are in the log, and with what the test itself did.
"""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.client import PhpmqClient, RqClient, SspqClient, TimedOut, Undelivered
from penstock.log.reader import LogReader
from penstock.model.life import DEAD_REASONS, Event, Reason
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.http.scrape import scrape, url
from tests.server.harness import BrokerProcess, until

CONFIG = """
[queue.drops]
on-expiry = "drop"
dead-letters = "off"
[queue.tries]
max-deliveries = 2
"""

COUNTERS = {
    "accepted": Event.ACCEPTED,
    "acked": Event.ACKED,
    "returned": Event.RETURNED,
    "requeued": Event.REQUEUED,
    "rejected": Event.REJECTED,
    "expired": Event.EXPIRED,
    "redriven": Event.REDRIVEN,
    "withdrawn": Event.WITHDRAWN,
}
"""Which event each counter is to agree with; `delivered` and `dead` are compared on their own."""


@pytest.fixture
def busy(start_broker: StartBroker, tmp_path: Path) -> BrokerProcess:
    """A broker with queues of several kinds."""
    config = tmp_path / "penstock.toml"
    config.write_text(CONFIG)
    return start_broker("--config", str(config))


# --- Traffic ---


def settle_in_every_way(broker: BrokerProcess, api: Api) -> None:
    """PHPMQ: 40 messages; 12 acked, 5 rejected, 4 requeued, 9 with a connection that is lost."""
    with PhpmqClient(url(broker, "phpmq")) as mq:
        mq.send_many("work", [b"%d" % number for number in range(40)])
    with PhpmqClient(url(broker, "phpmq")) as mq:
        messages = list(mq.consume("work", prefetch=30, count=30))
        mq.ack_many(messages[:12])
        for message in messages[12:17]:
            message.reject()
        for message in messages[17:21]:
            message.requeue(ttl=600)
    until(lambda: api.get("/v1/queues/work")["held"] == 0, "the rest to come back")


def send_through_every_door(broker: BrokerProcess, api: Api) -> None:
    """RQ: 10 messages. HTTP: 3 and a batch of 2."""
    with RqClient(url(broker, "rq")) as rq:
        rq.send_many("work", [b"r"] * 10)
    api.send("work", b"h", b"h", b"h")
    lines = b'{"value": "a"}\n{"value": "b"}\n'
    assert (
        api.ask("POST", "/v1/queues/work/batch", lines, {"Content-Type": "application/x-ndjson"}).status
        == 200
    )


def look_at_dead_letters(broker: BrokerProcess, api: Api) -> None:
    """Of the 5 dead letters of `work`: 1 acked, 1 rejected again, 1 left with a lost connection."""
    with PhpmqClient(url(broker, "phpmq")) as mq:
        dead = list(mq.consume("work.dead", prefetch=3, count=3))
        dead[0].ack()
        dead[1].reject()
    until(lambda: any_held(api) == 0, "the dead letters to come back")


def any_held(api: Api) -> int:
    return sum(it["held"] for it in api.get("/v1/connections")["connections"])


def run_out_of_retries(broker: BrokerProcess, api: Api) -> None:
    """SSPQ: one message that dies at once, one after a second delivery, one that is acked."""
    with SspqClient(url(broker, "sspq")) as mq:
        mq.send(b"fragile", retries=0)
        mq.flush()
    with SspqClient(url(broker, "sspq")) as mq:
        assert mq.receive(timeout=10).body == b"fragile"
    with SspqClient(url(broker, "sspq")) as mq:
        mq.send(b"twice", retries=1)
        mq.flush()
    for _ in range(2):
        with SspqClient(url(broker, "sspq")) as mq:
            assert mq.receive(timeout=10).body == b"twice"
    with SspqClient(url(broker, "sspq")) as mq:
        mq.send(b"good", retries=0)
        mq.receive(timeout=10).ack()
        dead = mq.receive_dead(timeout=10)
        dead.ack()
    until(lambda: any_held(api) == 0, "the last of them")


def ask(broker: BrokerProcess) -> None:
    """RQ: 5 requests answered, 1 that nobody serves and that is withdrawn when its time is over."""
    with RqClient(url(broker, "rq")) as server, RqClient(url(broker, "rq")) as rq:
        server.serve("ask", lambda request: request.body, max=2).wait_turn(timeout=10)
        assert [rq.request("ask", b"%d" % n, timeout=10) for n in range(5)] == [b"%d" % n for n in range(5)]
        with pytest.raises((TimedOut, Undelivered)):
            rq.request("unserved", b"?", timeout=1)


def expire(broker: BrokerProcess, api: Api) -> None:
    """3 die of their TTL, 4 are dropped by it."""
    with PhpmqClient(url(broker, "phpmq")) as mq:
        mq.send_many("short", [b"x"] * 3, ttl=1)
        mq.send_many("drops", [b"x"] * 4, ttl=1)
    until(lambda: api.get("/v1/queues/short")["dead"] == 3, "the messages to expire")
    until(lambda: api.get("/v1/queues/drops")["ready"] == 0, "the messages to be dropped")


def throw_away(broker: BrokerProcess, api: Api) -> None:
    """2 of `drops` are rejected, where nothing becomes dead; 6 of `purged` are purged, 1 of them dead."""
    with PhpmqClient(url(broker, "phpmq")) as mq:
        mq.send_many("drops", [b"y"] * 2)
        for message in mq.consume("drops", count=2):
            message.reject()
        mq.send_many("purged", [b"x"] * 6)
        for message in mq.consume("purged", count=1):
            message.reject()
    until(lambda: any_held(api) == 0, "the rejects")
    assert api.post("/v1/queues/purged/purge") == {"purged": 5}
    assert api.post("/v1/queues/purged/purge", dead=True) == {"purged": 1}


def try_too_often(broker: BrokerProcess, api: Api) -> None:
    """A message whose consumer is lost twice, where two deliveries are allowed."""
    api.send("tries", b"x")
    for lost in (1, 2):
        with PhpmqClient(url(broker, "phpmq")) as mq:
            assert len(list(mq.consume("tries", prefetch=1, count=1, timeout=10))) == 1
        until(lambda: any_held(api) == 0, f"the loss of consumer {lost}")


def redrive(broker: BrokerProcess, api: Api) -> None:
    """The 4 dead letters that `work` has left: 3 are put back, and acked."""
    reply = api.post("/v1/queues/work/redrive", {"limit": 3})
    assert reply["redriven"] == 3
    with PhpmqClient(url(broker, "phpmq")) as mq:
        count = api.get("/v1/queues/work")["ready"]
        mq.ack_many(list(mq.consume("work", prefetch=1000, count=count)))
    until(lambda: api.get("/v1/queues/work")["ready"] == 0, "all to be acknowledged")
    until(lambda: any_held(api) == 0, "all to be settled")


# --- Truth ---


class Logged(NamedTuple):
    """What the log says has happened in a queue."""

    events: Counter[tuple[Event, Reason]]
    deliveries: int  # that have ended

    def count(self, event: Event) -> int:
        return sum(count for (it, _), count in self.events.items() if it is event)


def logged(broker: BrokerProcess, api: Api) -> dict[str, Logged]:
    """Every event of every queue, read from the files once all of them are synced."""
    ends = {it["name"]: it["event_end"] for it in api.get("/v1/queues")["queues"]}
    result: dict[str, Logged] = {}
    with LogReader(str(broker.folder / "data")) as reader:

        def all_synced() -> bool:
            reader.refresh()
            return {name: queue.event_end for name, queue in reader.queues().items()} == ends

        until(all_synced, "all events to be synced")
        for name in ends:
            events: Counter[tuple[Event, Reason]] = Counter()
            deliveries = 0
            for run in reader.events(name, 0):
                events[run.event, run.reason] += run.end - run.first
                deliveries += (run.end - run.first) * (run.dispatched_us > 0)
            result[name] = Logged(events, deliveries)
    return result


def test_counters_agree_with_the_log_and_with_what_was_done(busy: BrokerProcess) -> None:
    with Api(busy.ports["http"]) as api:
        settle_in_every_way(busy, api)
        send_through_every_door(busy, api)
        look_at_dead_letters(busy, api)
        run_out_of_retries(busy, api)
        ask(busy)
        expire(busy, api)
        throw_away(busy, api)
        try_too_often(busy, api)
        redrive(busy, api)
        until(lambda: any_held(api) == 0, "everything to be settled")
        truth = logged(busy, api)
        scraped = scrape(api)
        rows = {it["name"]: it for it in api.get("/v1/queues")["queues"]}

    assert set(truth) == {"work", "default", "ask", "unserved", "short", "drops", "purged", "tries"}
    for queue, its in truth.items():
        for name, event in COUNTERS.items():
            counted = scraped.of_queue(f"penstock_messages_{name}_total", queue)
            assert counted == its.count(event), (queue, name, its)
        assert scraped.of_queue("penstock_messages_delivered_total", queue) == its.deliveries, (queue, its)
        for reason in DEAD_REASONS:
            counted = scraped["penstock_messages_dead_total", {"queue": queue, "reason": reason.label}]
            assert counted == its.events[Event.DEAD, reason], (queue, reason, its)
        row = rows[queue]
        for name in ("ready", "held", "dead"):
            assert scraped.of_queue(f"penstock_queue_{name}_messages", queue) == row[name]
        for name in ("bytes", "consumers", "offset_start", "offset_end"):
            assert scraped.of_queue(f"penstock_queue_{name}", queue) == row[name]

    def happened(queue: str, **expected: int) -> None:
        found = {
            name: int(scraped.of_queue(f"penstock_messages_{name}_total", queue))
            for name in (*COUNTERS, "delivered")
        }
        assert {name: count for name, count in found.items() if count} == expected, queue

    def died(queue: str, **expected: int) -> None:
        found = {
            reason.label.replace("-", "_"): int(
                scraped["penstock_messages_dead_total", {"queue": queue, "reason": reason.label}]
            )
            for reason in DEAD_REASONS
        }
        assert {name: count for name, count in found.items() if count} == expected, queue

    # `work`: 40 + 10 + 3 + 2 came. 12 were acked at first and one as a dead letter; of the 5 that died, one
    # died twice, and 3 were put back; in the end all 40 that were ready were acked with them.
    left = 55 - 12 - 5
    assert scraped.of_queue("penstock_messages_accepted_total", "work") == 55
    assert scraped.of_queue("penstock_messages_acked_total", "work") == 12 + 1 + left + 3
    assert scraped.of_queue("penstock_messages_redriven_total", "work") == 3
    lost = truth["work"]
    assert lost.events[Event.REQUEUED, Reason.NONE] == 4
    assert (
        lost.events[Event.RETURNED, Reason.CONSUMER_LOST] + lost.events[Event.REQUEUED, Reason.CONSUMER_LOST]
        == 9 + 1
    )
    died("work", rejected=5 + 1)
    assert rows["work"]["dead"] == 5 - 1 - 3
    died("default", retries_exhausted=2)
    happened("ask", accepted=5, delivered=5, acked=5)
    happened("unserved", accepted=1, withdrawn=1)
    happened("short", accepted=3)
    died("short", expired=3)
    happened("drops", accepted=6, delivered=2, expired=4, rejected=2)
    died("drops")
    happened("purged", accepted=6, delivered=1, withdrawn=6)
    died("purged", rejected=1)
    died("tries", too_many_deliveries=1)
    assert scraped.of_queue("penstock_messages_delivered_total", "tries") == 2
    assert scraped["penstock_queues", {}] == 8


def test_counters_begin_again_with_the_broker(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("q", b"1", b"2", b"3")
        before = scrape(api)
        assert before.of_queue("penstock_messages_accepted_total", "q") == 3
        assert before["penstock_log_openings_total", {}] == 1
    broker.kill()
    broker.start()
    with Api(broker.ports["http"]) as api:
        after = scrape(api)
        assert after.of_queue("penstock_messages_accepted_total", "q") == 0
        assert after.of_queue("penstock_queue_ready_messages", "q") == 3
        assert after.of_queue("penstock_queue_offset_end", "q") == 3
        assert after["penstock_log_openings_total", {}] == 2
        assert after["penstock_log_written_bytes_total", {}] >= before["penstock_log_written_bytes_total", {}]
        api.send("q", b"4")
        assert scrape(api).of_queue("penstock_messages_accepted_total", "q") == 1
