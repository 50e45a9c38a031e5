"""The transport as kombu uses it, without Celery: what is published, what is consumed, what is held."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.exceptions import OperationalError

import penstock.kombu  # noqa: F401 - registers the transport
from penstock.kombu import bindings
from penstock.kombu.bindings import QUEUE, TIDY_AT
from penstock.kombu.settling import Delivery
from tests.celery.workers import url_of
from tests.certificates import make_certificates
from tests.http.api import NDJSON, Api
from tests.server.harness import WAIT_SECONDS, BrokerProcess, until
from tests.server.test_second import second_of

Connect = Callable[..., Any]  # a kombu.Connection, which has no types


@pytest.fixture
def connect(broker: BrokerProcess) -> Iterator[Connect]:
    made: list[Any] = []

    def connect(url: str = "", **options: Any) -> Any:
        connection = Connection(url or url_of(broker), transport_options=options)
        made.append(connection)
        return connection

    yield connect
    for connection in made:
        connection.release()


class Inbox:
    """What was consumed, unsettled."""

    def __init__(self, connection: Any, *queues: Any, prefetch: int = 0, **options: Any) -> None:
        self.connection = connection
        self.channel = connection.channel()
        self.messages: list[Any] = []
        if prefetch:
            self.channel.basic_qos(0, prefetch, False)
        self.consumer = Consumer(self.channel, list(queues), on_message=self.messages.append, **options)
        self.consumer.consume()

    def next(self) -> Any:
        self.connection.drain_events(timeout=WAIT_SECONDS)
        return self.messages[-1]

    def bodies(self, count: int) -> list[Any]:
        while len(self.messages) < count:
            self.next()
        return [message.payload for message in self.messages]

    def is_silent(self, seconds: float = 0.3) -> bool:
        """Nothing comes for that long. For asserting that nothing happens, never for waiting."""
        try:
            self.connection.drain_events(timeout=seconds)
        except TimeoutError:
            return True
        return False


def publish(connection: Any, queue: str, *bodies: object, **options: Any) -> None:
    producer = Producer(connection.channel())
    for body in bodies:
        producer.publish(body, routing_key=queue, **options)


def row(api: Api, queue: str) -> dict[str, Any]:
    reply = api.ask("GET", f"/v1/queues/{queue}")
    fields: dict[str, Any] = reply.json if reply.status == 200 else {}
    return fields


def names(api: Api) -> set[str]:
    return {row["name"] for row in api.get("/v1/queues")["queues"]}


# --- one queue ---


def test_what_is_published_is_stored_when_the_call_returns(connect: Connect, api: Api, queue: str) -> None:
    publish(connect(), queue, {"n": 1})
    assert row(api, queue)["ready"] == 1


@pytest.mark.parametrize("body", ["text", b"\x00\xff bytes", {"a": [1, None]}], ids=["text", "bytes", "json"])
def test_bodies_arrive_as_they_were(connect: Connect, queue: str, body: object) -> None:
    connection = connect()
    publish(connection, queue, body, headers={"h": "v"}, correlation_id="c")
    message = Inbox(connection, Queue(queue)).next()
    got = message.body if isinstance(body, bytes) else message.payload
    assert (got, message.headers["h"], message.properties["correlation_id"]) == (body, "v", "c")
    message.ack()


def test_ack_requeue_and_reject(connect: Connect, api: Api, queue: str) -> None:
    connection = connect()
    publish(connection, queue, 1, 2)
    inbox = Inbox(connection, Queue(queue))
    first, second = inbox.bodies(2) and inbox.messages
    first.requeue()
    second.reject()
    again = inbox.next()
    assert (again.payload, again.delivery_info["redelivered"]) == (1, True)
    assert not first.delivery_info["redelivered"]
    again.ack()
    counts = row(api, queue)
    assert (counts["ready"], counts["held"], counts["dead"]) == (0, 0, 1)


def test_many_are_acknowledged_by_the_last(connect: Connect, api: Api, queue: str) -> None:
    connection = connect()
    publish(connection, queue, 1, 2, 3)
    inbox = Inbox(connection, Queue(queue))
    inbox.bodies(3)
    inbox.messages[1].ack(multiple=True)
    assert row(api, queue)["held"] == 1


def test_get(connect: Connect, api: Api, queue: str) -> None:
    connection = connect()
    publish(connection, queue, 1, 2)
    get = Queue(queue)(connection.channel()).get
    held, gone = get(), get(no_ack=True)
    assert (held.payload, gone.payload, get()) == (1, 2, None)
    assert row(api, queue)["held"] == 1
    held.ack()
    assert row(api, queue)["held"] == 0


def test_what_is_held_goes_back_when_a_channel_is_closed(connect: Connect, api: Api, queue: str) -> None:
    connection = connect()
    publish(connection, queue, *range(5))
    inbox = Inbox(connection, Queue(queue))
    inbox.next()  # and four that have come, but were not delivered
    inbox.channel.close()
    assert (row(api, queue)["ready"], row(api, queue)["consumers"]) == (5, 0)
    assert Inbox(connection, Queue(queue)).bodies(5) == list(range(5))


def test_a_window_is_not_exceeded(connect: Connect, api: Api, queue: str) -> None:
    connection = connect()
    publish(connection, queue, *range(10))
    inbox = Inbox(connection, Queue(queue), prefetch=3)
    assert inbox.bodies(3) == [0, 1, 2]
    assert inbox.is_silent()
    assert row(api, queue)["held"] == 3
    inbox.messages[0].ack()
    assert inbox.bodies(4)[3] == 3


def test_no_ack_settles_what_it_takes(connect: Connect, api: Api, queue: str) -> None:
    connection = connect()
    publish(connection, queue, 1, 2)
    assert Inbox(connection, Queue(queue), no_ack=True).bodies(2) == [1, 2]
    assert row(api, queue)["held"] == 0


def test_a_consumer_can_wait_for_a_queue_that_is_not_there(connect: Connect, queue: str) -> None:
    connection = connect()
    inbox = Inbox(connection, Queue(queue))
    assert inbox.is_silent()
    publish(connect(), queue, "first")
    assert inbox.bodies(1) == ["first"]


def test_size_purge_and_delete(connect: Connect, api: Api, queue: str) -> None:
    simple = connect(priority_steps=[0, 5]).SimpleQueue(queue)
    simple.put(1)
    simple.put(2, priority=7)
    assert simple.qsize() == 2
    assert simple.clear() == 2
    simple.put(3)
    simple.queue.delete()
    assert {queue, f"{queue}.p5"} & names(api) == set()


def test_messages_expire(connect: Connect, api: Api, queue: str) -> None:
    connection = connect()
    publish(connection, queue, "short", expiration=0.2)
    with_ttl = Queue(f"{queue}.ttl", message_ttl=3)
    publish(connection, with_ttl.name, "by its queue", declare=[with_ttl])
    (message,) = api.get(f"/v1/queues/{queue}/messages")["messages"]
    (other,) = api.get(f"/v1/queues/{with_ttl.name}/messages")["messages"]
    assert (message["ttl"], other["ttl"]) == (1, 3)


def test_what_is_published_may_have_a_retry_counter(connect: Connect, api: Api, queue: str) -> None:
    publish(connect(retries=7), queue, 1)
    (message,) = api.get(f"/v1/queues/{queue}/messages")["messages"]
    assert message["retries"] == 7


# --- several queues, and priorities ---


def test_priorities_are_queues(connect: Connect, api: Api, queue: str) -> None:
    connection = connect(priority_steps=[0, 3, 9])
    for priority in (0, 2, 3, 8, 9):
        publish(connection, queue, priority, priority=priority)
    assert [row(api, name)["ready"] for name in (queue, f"{queue}.p3", f"{queue}.p9")] == [2, 2, 1]


@pytest.mark.parametrize("prefetch", [1, 2, 50])
def test_the_highest_priority_comes_first(connect: Connect, queue: str, prefetch: int) -> None:
    connection = connect(priority_steps=[0, 3, 9])
    for priority in (0, 9, 3, 0, 9, 3):
        publish(connection, queue, priority, priority=priority)
    inbox = Inbox(connection, Queue(queue), prefetch=prefetch)
    for _ in range(6):
        inbox.next().ack()
    assert inbox.bodies(6) == [9, 9, 3, 3, 0, 0]
    # At rest requests stand at all three, and whatever comes next is taken.
    assert inbox.is_silent()
    publish(connect(priority_steps=[0, 3, 9]), queue, "late", priority=9)
    assert inbox.next().payload == "late"


def test_get_takes_the_highest_priority(connect: Connect, queue: str) -> None:
    connection = connect(priority_steps=[0, 9])
    publish(connection, queue, "low")
    publish(connection, queue, "high", priority=9)
    get = Queue(queue)(connection.channel()).get
    assert [get(no_ack=True).payload, get(no_ack=True).payload] == ["high", "low"]


@pytest.mark.parametrize("prefetch", [1, 3, 50])
def test_one_window_for_several_queues(connect: Connect, api: Api, queue: str, prefetch: int) -> None:
    """However narrow it is, all queues get their turn and no more is held than the window has room for."""
    connection, queues = connect(), [f"{queue}.{letter}" for letter in "abc"]
    inbox = Inbox(connection, *map(Queue, queues), prefetch=prefetch)
    assert inbox.is_silent()
    for name in queues:
        publish(connect(), name, *[name] * 5)
    seen: list[str] = []
    while len(seen) < 15:
        message = inbox.next()
        assert sum(row(api, name).get("held", 0) for name in queues) <= prefetch
        seen.append(message.payload)
        message.ack()
    assert {name: seen.count(name) for name in queues} == dict.fromkeys(queues, 5)
    if prefetch == 1:
        assert set(seen[:3]) == set(queues)  # one after the other


def test_a_cancelled_queue_is_left_alone(connect: Connect, api: Api, queue: str) -> None:
    connection = connect()
    inbox = Inbox(connection, Queue(queue), Queue(f"{queue}.other"))
    assert inbox.is_silent()
    inbox.consumer.cancel_by_queue(queue)
    publish(connect(), queue, "for others")
    publish(connect(), f"{queue}.other", "for us")
    assert inbox.bodies(1) == ["for us"]
    assert inbox.is_silent()
    assert row(api, queue)["ready"] == 1


# --- exchanges ---


def test_a_topic_reaches_queues_of_other_connections(connect: Connect, queue: str) -> None:
    exchange = Exchange(queue, type="topic")
    boxes = [
        Inbox(connect(), Queue(f"{queue}.{number}", exchange, routing_key=key))
        for number, key in enumerate(["#", "a.*", "b.#"])
    ]
    for key in ("a.x", "b.y.z", "c"):
        publish(connect(), key, key, exchange=queue)  # who has not declared it, knows it from the bindings
    assert [sorted(box.bodies(count)) for box, count in zip(boxes, (3, 1, 1), strict=True)] == [
        ["a.x", "b.y.z", "c"],
        ["a.x"],
        ["b.y.z"],
    ]


def test_a_fanout_reaches_everybody_who_listens(connect: Connect, queue: str) -> None:
    exchange = Exchange(queue, type="fanout")
    boxes = [Inbox(connect(), Queue(f"{queue}.{it}", exchange, auto_delete=True)) for it in range(3)]
    publish(connect(), "", "all", exchange=exchange)
    assert [box.bodies(1) for box in boxes] == [["all"]] * 3


def test_bindings_of_durable_queues_stay(connect: Connect, api: Api, queue: str) -> None:
    bound = Queue(queue, Exchange(f"{queue}.x", type="direct"), routing_key="k")
    bound(connect().channel()).declare()
    entries = row(api, QUEUE)["offset_end"]
    bound(connect().channel()).declare()
    assert row(api, QUEUE)["offset_end"] == entries  # it is known
    publish(connect(), "k", "there", exchange=f"{queue}.x")
    assert row(api, queue)["ready"] == 1
    bound(connect().channel()).unbind_from(Exchange(f"{queue}.x"), "k")
    publish(connect(), "k", "nowhere", exchange=f"{queue}.x")
    assert row(api, queue)["ready"] == 1


def test_a_queue_that_another_has_deleted_a_moment_ago_is_bound_again(
    connect: Connect, api: Api, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by who has read its binding a moment before that."""
    monkeypatch.setattr(bindings, "FRESH_SECONDS", WAIT_SECONDS)
    exchange = Exchange(queue, type="fanout")
    bound = Queue(f"{queue}.bound", exchange)
    first, second = connect(), connect()
    bound(first.default_channel).declare()
    publish(second, "", "one", exchange=exchange)
    bound(first.default_channel).delete()
    bound(second.default_channel).declare()
    publish(connect(), "", "two", exchange=exchange)
    assert row(api, bound.name)["ready"] == 1


@pytest.mark.parametrize("by", ["who has bound it", "another"])
def test_a_queue_that_is_deleted_is_bound_no_more(connect: Connect, api: Api, queue: str, by: str) -> None:
    """Or what is published would make it again, for nobody."""
    exchange = Exchange(queue, type="fanout")
    bound = Queue(f"{queue}.bound", exchange)
    first, second = connect(), connect()
    bound(first.default_channel).declare()
    publish(first, bound.name, "one")
    (first if by == "who has bound it" else second).default_channel.queue_delete(bound.name)
    publish(connect(), "", "two", exchange=exchange)
    assert bound.name not in names(api)


def test_a_reply_is_found_by_who_has_read_the_bindings_before(connect: Connect, queue: str) -> None:
    worker, caller = connect(), connect()
    publish(worker, "nobody", "lost", exchange=queue)
    inbox = Inbox(caller, Queue(f"{queue}.me", Exchange(queue), routing_key="me", exclusive=True))
    publish(worker, "me", "reply", exchange=queue)
    assert inbox.bodies(1) == ["reply"]


def test_queues_end_with_their_consumers(connect: Connect, api: Api, queue: str) -> None:
    exchange = Exchange(queue, type="fanout")
    mine, other = (Queue(f"{queue}.{it}", exchange, auto_delete=True) for it in range(2))
    connection = connect()
    inbox = Inbox(connection, mine)
    Inbox(connection, other)
    publish(connect(), "", "all", exchange=exchange)
    inbox.next().ack()
    assert {mine.name, other.name} <= names(api)
    inbox.consumer.cancel()
    assert mine.name not in names(api)
    connection.release()
    assert other.name not in names(api)
    publish(connect(), "", "nobody", exchange=exchange)
    assert {mine.name, other.name} & names(api) == set()


def test_queues_of_who_was_killed_are_forgotten_and_deleted(connect: Connect, api: Api, queue: str) -> None:
    """By who tidies up, when the lease is over; and what counts is kept."""
    exchange = Exchange(queue, type="fanout")
    stays = Queue(f"{queue}.stays", exchange)
    stays(connect().channel()).declare()
    dead = Queue(f"{queue}.dead-one", exchange, auto_delete=True)
    program = f"""
import os, penstock.kombu
from kombu import Connection, Exchange, Queue
connection = Connection({url_of_api(api)!r}, transport_options={{"lease": 1}})
Queue({dead.name!r}, Exchange({queue!r}, type="fanout"), auto_delete=True)(connection.channel()).declare()
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", program], timeout=WAIT_SECONDS, check=False)
    publish(connect(), "", "all", exchange=exchange)
    assert row(api, dead.name)["ready"] == 1
    lives = connect(lease=1)
    inbox = Inbox(lives, Queue(f"{queue}.lives", exchange, auto_delete=True))
    bindings = lives.default_channel.connection.bindings
    until(lambda: dead.name not in {it.queue for it in bindings.of(queue)}, "the binding to lapse")
    ended = json.dumps({"exchange": queue, "type": "fanout", "key": "", "queue": "once", "seconds": 0})
    batch = "\n".join([json.dumps({"value": ended})] * 4 * TIDY_AT)
    headers = {"Content-Type": NDJSON}
    assert api.ask("POST", f"/v1/queues/{QUEUE}/batch", batch.encode(), headers=headers).status == 200
    until(lambda: dead.name not in names(api), "the queue to be deleted")
    assert row(api, QUEUE)["ready"] <= TIDY_AT + 20
    publish(connect(), "", "again", exchange=exchange)
    assert dead.name not in names(api)
    assert row(api, stays.name)["ready"] == 2
    assert inbox.bodies(1) == ["again"]


def test_bindings_survive_the_deletion_of_their_queue(connect: Connect, api: Api, queue: str) -> None:
    """What is said again is heard also by those who have read the old one further."""
    exchange = Exchange(queue, type="fanout")
    inbox = Inbox(connect(lease=1), Queue(f"{queue}.lives", exchange, auto_delete=True))
    sender = connect()
    publish(sender, "", "before", exchange=exchange)
    assert inbox.bodies(1) == ["before"]
    assert api.ask("DELETE", f"/v1/queues/{QUEUE}").status == 200
    until(lambda: QUEUE in names(api), "the binding to be said again")
    other = connect()
    publish(other, "", "after", exchange=exchange)
    assert inbox.bodies(2)[1] == "after"


def test_a_binding_counts_while_it_is_delayed(connect: Connect, api: Api, queue: str) -> None:
    """Whoever tidied up was killed, and the retry-delays of the queue say when what it held comes again."""
    said = {"exchange": queue, "type": "fanout", "key": "", "queue": f"{queue}.bound"}
    (offset,) = api.send(QUEUE, json.dumps(said).encode())
    taken = api.ask("POST", f"/v1/queues/{QUEUE}/take", max=1000).json["messages"]
    back = [{"id": it["id"], "delay": 3600 if it["offset"] == offset else 0} for it in taken]
    assert api.ask("POST", f"/v1/queues/{QUEUE}/settle", {"requeue": back}).status == 200
    assert row(api, QUEUE)["delayed"] == 1
    publish(connect(), "", "all", exchange=queue)
    assert row(api, f"{queue}.bound")["ready"] == 1


@pytest.mark.parametrize(
    "entry",
    [b"nonsense", b"[]", b"{}", b'{"exchange": 1}', b"[" * 100_000, b'{"exchange": "X", "type": "headers"}'],
    ids=range(6),
)
def test_what_is_no_binding_does_no_harm(connect: Connect, api: Api, queue: str, entry: bytes) -> None:
    """Nor does what a later version adds to one."""
    api.send(QUEUE, entry)
    said = {"exchange": queue, "type": "fanout", "key": "", "queue": f"{queue}.bound", "new": 1}
    api.send(QUEUE, json.dumps(said).encode())
    publish(connect(), "", "all", exchange=queue)
    assert row(api, f"{queue}.bound")["ready"] == 1


# --- leases ---


def test_leases_are_extended_while_a_consumer_is_busy(connect: Connect, api: Api, queue: str) -> None:
    publish(connect(), queue, "long")
    message = Inbox(connect(lease=1), Queue(queue)).next()
    other = Inbox(connect(), Queue(queue))
    assert other.is_silent(2.5)  # this thread does nothing for the first meanwhile
    message.ack()
    assert row(api, queue)["held"] == 0


def test_leases_are_extended_where_the_broker_refuses_those_of_another_queue(
    connect: Connect, api: Api, queue: str
) -> None:
    """As where a right was taken from this user."""
    publish(connect(), queue, "long")
    inbox = Inbox(connect(lease=1), Queue(queue))
    message = inbox.next()
    held = inbox.channel.qos.held
    mine = dict(held)
    held.clear()
    held.update({"first": Delivery("refused\n", "0" * 32, 1), **mine})
    assert Inbox(connect(), Queue(queue)).is_silent(1.5)
    del held["first"]
    message.ack()
    assert row(api, queue)["held"] == 0


def test_what_a_killed_process_held_comes_again(connect: Connect, api: Api, queue: str) -> None:
    publish(connect(), queue, "survivor")
    program = f"""
import os, penstock.kombu
from kombu import Connection, Queue
connection = Connection({url_of_api(api)!r}, transport_options={{"lease": 1}})
assert Queue({queue!r})(connection.channel()).get() is not None
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", program], timeout=WAIT_SECONDS, check=False)
    message = Inbox(connect(), Queue(queue)).next()
    assert (message.payload, message.delivery_info["redelivered"]) == ("survivor", True)


def test_a_child_has_nothing_of_its_parent(connect: Connect, api: Api, queue: str) -> None:
    """It can publish, by a connection of its own, and what its parent holds is none of its business."""
    connection = connect()
    publish(connection, queue, 1)
    inbox = Inbox(connection, Queue(queue))
    inbox.next()
    assert inbox.is_silent(0.1)  # a request stands there
    child = os.fork()
    if not child:
        code = 1
        try:
            publish(connection, f"{queue}.child", "from the child")
            inbox.channel.close()
            connection.release()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (row(api, queue)["held"], row(api, f"{queue}.child")["ready"]) == (1, 1)
    publish(connection, queue, 2)
    assert inbox.bodies(2) == [1, 2]


# --- what others send ---


@pytest.mark.parametrize(
    "body",
    [
        b"plain",
        b"\xff\x00",
        b"[]",
        b'{"properties": {}}',
        b'{"properties": {"delivery_info": {}, "body_encoding": "base64"}, "headers": null, "body": "*"}',
        b'{"properties": {"delivery_info": {}}, "headers": {}, "body": 7}',
        b'{"properties": {"__type__": "decimal", "__value__": "x"}}',
        b"[" * 100_000,
    ],
    ids=range(8),
)
def test_messages_of_others_arrive_as_they_are(connect: Connect, api: Api, queue: str, body: bytes) -> None:
    headers = {"Penstock-Header-Kind": "foreign"}
    assert api.ask("POST", f"/v1/queues/{queue}/messages", body, headers=headers).status == 200
    message = Inbox(connect(), Queue(queue)).next()
    assert (message.body, message.headers["kind"]) == (body, "foreign")
    message.ack()


# --- what goes wrong ---


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        connection = Connection(f"penstock://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(OperationalError, match="refused"):
            connection.ensure_connection(max_retries=1, interval_start=0)


def test_another_url_is_tried(broker: BrokerProcess, connect: Connect, queue: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"penstock://127.0.0.1:{taken.getsockname()[1]}"
        connection = connect(f"{nobody};{url_of(broker)}")
        connection.ensure_connection(max_retries=3, interval_start=0, interval_step=0)
    publish(connection, queue, 1)


def test_what_the_broker_refuses_is_not_tried_again(connect: Connect) -> None:
    connection = connect()
    producer = Producer(connection.channel())
    with pytest.raises(connection.channel_errors, match="name has 300 bytes"):
        producer.publish(1, routing_key="n" * 300, retry=True, retry_policy={"max_retries": 3})


@pytest.mark.parametrize("size", [10, 12_000_000], ids=["answer", "body"])
def test_a_call_that_was_interrupted_is_not_gone_on_with(
    broker: BrokerProcess, connect: Connect, api: Api, queue: str, size: int
) -> None:
    """As by a soft time limit of Celery: the next call gets its own answer, and nothing is mixed."""

    class TimeLimitError(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise TimeLimitError

    connection = connect()
    connection.connect()
    ask = connection.transport.ask
    second = second_of(broker)
    former = signal.signal(signal.SIGALRM, interrupt)
    os.kill(second, signal.SIGSTOP)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(TimeLimitError):
            ask("POST", "queues", queue, "messages", body=b"A" * size)
        going_on = threading.Timer(0.3, os.kill, (second, signal.SIGCONT))
        going_on.start()
        assert "queues" in ask("GET", "queues", query={"limit": 1}, body=b"B" * 14_000_000).fields
        going_on.join()
    finally:
        os.kill(second, signal.SIGCONT)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    until(lambda: row(api, queue).get("ready", 0) == (size == 10), "what was sent as a whole, and no more")


def test_a_url_has_no_virtual_host(connect: Connect, broker: BrokerProcess) -> None:
    with pytest.raises(ValueError, match="virtual hosts"):
        connect(f"{url_of(broker)}/prod").connect()


def test_a_broker_that_comes_back_is_found_again(tmp_path: Path, connect: Connect, queue: str) -> None:
    broker = BrokerProcess(tmp_path, "--http", "127.0.0.1:0").start()
    broker.flags = ("--http", f"127.0.0.1:{broker.ports['http']}")
    connection = connect(url_of(broker))
    publish(connection, queue, 1)
    inbox = Inbox(connection, Queue(queue), prefetch=1)
    inbox.next()
    broker.kill()
    with pytest.raises(OperationalError):
        publish(connection, queue, "never", retry=True, retry_policy={"max_retries": 1, "interval_start": 0})
    broker.start()
    publish(connection, queue, 2, retry=True)
    other = connect(url_of(broker))
    assert Inbox(other, Queue(queue)).bodies(2) == [1, 2]
    connection.release()
    other.release()
    assert broker.stop() == 0


def test_tls_and_a_token(tmp_path: Path, connect: Connect, queue: str) -> None:
    make_certificates(tmp_path)
    config = tmp_path / "penstock.toml"
    config.write_text(
        f"""
[http]
tls-certificate = "{tmp_path}/server.pem"
tls-key = "{tmp_path}/server.key"
[[http.tokens]]
name = "worker"
role = "operate"
token = "{"t" * 32}"
"""
    )
    broker = BrokerProcess(tmp_path, "--http", "127.0.0.1:0", "--config", str(config)).start()
    tls = {"ca_certs": f"{tmp_path}/ca.pem"}
    where = f"127.0.0.1:{broker.ports['http']}"
    with Connection(f"penstocks://:{'t' * 32}@{where}", ssl=tls) as connection:
        publish(connection, queue, 1)
        inbox = Inbox(connection, Queue(queue), Queue(f"{queue}.ends", auto_delete=True), prefetch=1)
        inbox.next().ack()
        assert inbox.is_silent()
    stranger = Connection(f"penstock://:{'f' * 32}@{where}", ssl=tls)
    with pytest.raises(stranger.channel_errors):
        stranger.connect()
    assert broker.stop() == 0


def url_of_api(api: Api) -> str:
    return f"penstock://127.0.0.1:{api._connection.port}"


def test_an_eta_is_a_delay(connect: Connect, api: Api, queue: str) -> None:
    connection = connect()
    soon = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() + 100))
    publish(connection, queue, 1, headers={"eta": soon})
    publish(connection, f"{queue}.worker", 2, headers={"eta": soon[:19]})  # in whose time zone?
    publish(connection, f"{queue}.past", 3, headers={"eta": "2020-01-01T00:00:00+00:00"})
    publish(connection, f"{queue}.none", 4, headers={"eta": "whenever"})
    assert row(api, queue)["ready"] == 0
    assert [row(api, f"{queue}.{it}")["ready"] for it in ("worker", "past", "none")] == [1, 1, 1]
