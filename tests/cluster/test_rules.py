"""Every rule of the three protocols, through two front-ends that are connected to different nodes.

One site for all: a test that ends a front-end leaves it so, and the next one finds it started again. The
front-end that leads is another one then; the tests ask who it is where it matters.
"""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise, product
from queue import Queue

import pytest

from penstock.client import HttpClient, PhpmqClient, RqClient, SspqClient, TimedOut, Undelivered
from penstock.cluster.lease import LEASE_SECONDS
from tests.cluster.processes import FrontEnd, Site, site
from tests.http.api import Api
from tests.server.harness import WAIT_SECONDS, until

SSPQ_QUEUES = ["jobs", "counted"]
"""Of the SSPQ listeners, in their order. The first is that of the flag."""

MESSAGES = 300
LARGE_BYTES = 20 << 20
"""The nodes of the tests take 8 MB at a time."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("rules")
    config = folder / "penstock.toml"
    listener = '[[listener]]\nprotocol = "sspq"\naddress = "127.0.0.1:0"\nqueue = "{}"\n'
    config.write_text("".join(listener.format(queue) for queue in SSPQ_QUEUES[1:]))
    with site(folder, apart=True, flags=("--config", str(config), "--sspq-queue", SSPQ_QUEUES[0])) as running:
        yield running


@pytest.fixture
def fronts(running: Site) -> Iterator[Site]:
    """The site, with all its front-ends."""
    running.start_fronts()
    yield running
    sys.stdout.write(running.logs())  # which pytest shows where the test has failed


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Clients, which are closed with the test."""
    with ExitStack() as stack:
        yield stack


def one(client: PhpmqClient, queue: str) -> bytes:
    """Take and acknowledge the next message."""
    for message in client.consume(queue, 1, count=1, timeout=WAIT_SECONDS):
        message.ack()
        return message.body
    raise AssertionError(f"no message came from {queue}")


# --- send here, consume there ------------------------------------------------------------------------


def send(front: FrontEnd, protocol: str, queue: str, bodies: list[bytes]) -> None:
    if protocol == "sspq":
        with SspqClient(front.url("sspq", SSPQ_QUEUES.index(queue))) as sspq:
            sspq.send_many(bodies)
    elif protocol == "phpmq":
        with PhpmqClient(front.url("phpmq")) as phpmq:
            phpmq.send_many(queue, bodies)
    else:
        with RqClient(front.url("rq")) as rq:
            rq.send_many(queue, bodies)


def receive(front: FrontEnd, protocol: str, queue: str, count: int) -> list[bytes]:
    if protocol == "sspq":
        got = []
        with SspqClient(front.url("sspq", SSPQ_QUEUES.index(queue))) as sspq:
            for _ in range(count):
                message = sspq.receive(WAIT_SECONDS)
                got.append(message.body)
                message.ack()
        return got
    if protocol == "phpmq":
        with PhpmqClient(front.url("phpmq")) as phpmq:
            messages = list(phpmq.consume(queue, count, count=count, timeout=WAIT_SECONDS))
            phpmq.ack_many(messages)
            return [message.body for message in messages]
    heard: Queue[bytes] = Queue()
    with RqClient(front.url("rq")) as rq:
        rq.serve(queue, lambda request: heard.put(request.body))
        return [heard.get(timeout=WAIT_SECONDS) for _ in range(count)]


@pytest.mark.parametrize(("sender", "consumer"), list(product(("sspq", "phpmq", "rq"), repeat=2)))
def test_send_here_consume_there(fronts: Site, sender: str, consumer: str) -> None:
    a, b = fronts.fronts
    for here, there in ((a, b), (b, a)):
        queue = "jobs" if "sspq" in (sender, consumer) else fronts.queue()
        bodies = [b"%s %d" % (here.name.encode(), number) for number in range(MESSAGES)]
        send(here, sender, queue, bodies)
        assert receive(there, consumer, queue, MESSAGES) == bodies
        wait_empty(there, queue)


def wait_empty(front: FrontEnd, queue: str) -> None:
    def empty() -> bool:
        found = front.ask(f"/v1/queues/{queue}")
        return bool(found["ready"] == found["held"] == found["dead"] == 0)

    until(empty, f"{queue} to be empty")


def wait_count(front: FrontEnd, queue: str, state: str, count: int) -> None:
    until(lambda: bool(front.ask(f"/v1/queues/{queue}")[state] == count), f"{count} messages to be {state}")


def test_a_message_that_is_larger_than_a_record_of_the_stream(fronts: Site) -> None:
    a, b = fronts.fronts
    for here, there in ((a, b), (b, a)):
        queue = fronts.queue()
        bodies = [b"small", bytes(range(256)) * (LARGE_BYTES // 256), b"behind"]
        send(here, "rq", queue, bodies)
        assert receive(there, "phpmq", queue, 3) == bodies


def test_front_ends_are_connected_to_different_nodes(fronts: Site) -> None:
    connected = []
    for node in fronts.nodes.nodes:
        names = [client.get("name", "") for client in node.monitor("connz")["connections"]]
        connected.append({name.split()[-1] for name in names if name.startswith("penstock ")})
    assert connected.count({"a"}) == connected.count({"b"}) == 1, connected


# --- RQ ----------------------------------------------------------------------------------------------


def test_request_here_reply_there(fronts: Site, stack: ExitStack) -> None:
    a, b = (stack.enter_context(RqClient(front.url("rq"))) for front in fronts.fronts)
    for here, there in ((a, b), (b, a)):
        queue = fronts.queue()
        there.serve(queue, lambda request: request.body[::-1], max=10).wait_turn(WAIT_SECONDS)
        assert [here.request(queue, b"%03d" % n, WAIT_SECONDS) for n in (12, 345)] == [b"210", b"543"]


def test_a_request_that_nobody_answers_is_told_undelivered(fronts: Site, stack: ExitStack) -> None:
    for front in fronts.fronts:
        client = stack.enter_context(RqClient(front.url("rq")))
        with pytest.raises((Undelivered, TimedOut)):
            client.request(fronts.queue(), b"?", 1)


def test_a_request_goes_to_another_consumer_when_its_front_end_is_killed(
    fronts: Site, stack: ExitStack
) -> None:
    leader, follower = fronts.leader(), fronts.follower()
    queue = fronts.queue()
    taken, over = threading.Event(), threading.Event()
    stack.callback(over.set)

    def stuck(_: object) -> bytes:
        taken.set()
        over.wait(WAIT_SECONDS)
        return b"too late"

    first = stack.enter_context(RqClient(follower.url("rq"), reconnect_seconds=0.5, drain_seconds=0.1))
    first.serve(queue, stuck, priority=30).wait_turn(WAIT_SECONDS)
    second = stack.enter_context(RqClient(leader.url("rq")))
    second.serve(queue, lambda _: b"second").wait_turn(WAIT_SECONDS)
    asker = stack.enter_context(RqClient(leader.url("rq")))
    answers: Queue[bytes] = Queue()
    asking = threading.Thread(target=lambda: answers.put(asker.request(queue, b"?", WAIT_SECONDS)))
    asking.start()
    stack.callback(asking.join)
    assert taken.wait(WAIT_SECONDS)
    follower.kill()
    assert answers.get(timeout=WAIT_SECONDS) == b"second"


def test_a_broadcast_reaches_the_consumers_of_both(fronts: Site, stack: ExitStack) -> None:
    queue = fronts.queue()
    clients, heard = [], []
    for front in fronts.fronts:
        client = stack.enter_context(RqClient(front.url("rq")))
        inbox: Queue[bytes] = Queue()
        # No consumer of the one kind that is served nothing but broadcasts is left out.
        serving = client.serve(queue, lambda _: b"", priority=0, on_broadcast=inbox.put)
        assert serving.wait_turn(WAIT_SECONDS)
        clients.append(client)
        heard.append(inbox)
    for number, client in enumerate(clients):
        client.broadcast(queue, b"%d" % number)
        assert [inbox.get(timeout=WAIT_SECONDS) for inbox in heard] == [b"%d" % number] * 2
    assert all(inbox.empty() for inbox in heard)


def test_the_higher_priority_is_served_first_wherever_it_is(fronts: Site, stack: ExitStack) -> None:
    a, b = (stack.enter_context(RqClient(front.url("rq"))) for front in fronts.fronts)
    for here, there in ((a, b), (b, a)):
        queue = fronts.queue()
        here.serve(queue, lambda _: b"low", max=10, priority=10).wait_turn(WAIT_SECONDS)
        there.serve(queue, lambda _: b"high", max=1, priority=30).wait_turn(WAIT_SECONDS)
        assert {here.request(queue, b"?", WAIT_SECONDS) for _ in range(10)} == {b"high"}
        there.cancel(queue)
        assert here.request(queue, b"?", WAIT_SECONDS) == b"low"


def exclusive(stack: ExitStack, front: FrontEnd, queue: str) -> tuple[RqClient, Queue[bytes]]:
    client = stack.enter_context(RqClient(front.url("rq"), drain_seconds=0.1, reconnect_seconds=0.1))
    heard: Queue[bytes] = Queue()
    client.serve(queue, lambda request: heard.put(request.body), exclusive=True)
    return client, heard


def test_a_standby_elsewhere_takes_over_when_the_exclusive_client_leaves(
    fronts: Site, stack: ExitStack
) -> None:
    leader, follower = fronts.leader(), fronts.follower()
    for here, there in ((leader, follower), (follower, leader)):
        queue = fronts.queue()
        sender = stack.enter_context(RqClient(here.url("rq")))
        first, heard_first = exclusive(stack, here, queue)
        sender.send(queue, b"0")
        assert heard_first.get(timeout=WAIT_SECONDS) == b"0"
        _, heard_second = exclusive(stack, there, queue)
        sender.send_many(queue, [b"1", b"2", b"3"])
        assert [heard_first.get(timeout=WAIT_SECONDS) for _ in range(3)] == [b"1", b"2", b"3"]
        assert heard_second.empty()
        first.close()
        sender.send(queue, b"4")
        assert heard_second.get(timeout=WAIT_SECONDS) == b"4"


@pytest.mark.parametrize("who", ["follower", "leader"])
@pytest.mark.long
def test_a_standby_elsewhere_takes_over_when_the_front_end_is_killed(
    fronts: Site, stack: ExitStack, who: str
) -> None:
    victim: FrontEnd = getattr(fronts, who)()
    other = next(front for front in fronts.fronts if front is not victim)
    queue = fronts.queue()
    sender = stack.enter_context(RqClient(other.url("rq")))
    _, heard_first = exclusive(stack, victim, queue)
    sender.send(queue, b"0")
    assert heard_first.get(timeout=WAIT_SECONDS) == b"0"
    _, heard_second = exclusive(stack, other, queue)
    sender.send(queue, b"1")
    assert heard_first.get(timeout=WAIT_SECONDS) == b"1"
    assert heard_second.empty()
    victim.kill()
    sender.send(queue, b"2")
    # The one before may come again: whether the first had settled it, nobody knew when it was killed.
    got = heard_second.get(timeout=WAIT_SECONDS)
    assert got in (b"1", b"2")
    assert got == b"2" or heard_second.get(timeout=WAIT_SECONDS) == b"2"


# --- PHPMQ -------------------------------------------------------------------------------------------


def test_requeue_here_and_take_it_there(fronts: Site, stack: ExitStack) -> None:
    a, b = (stack.enter_context(PhpmqClient(front.url("phpmq"))) for front in fronts.fronts)
    for here, there in ((a, b), (b, a)):
        queue = fronts.queue()
        there.send_many(queue, [b"first", b"second"])
        (message,) = here.consume(queue, 1, count=1, timeout=WAIT_SECONDS)
        assert message.body == b"first"
        message.requeue(ttl=600)
        got = []
        for message in there.consume(queue, 1, count=2, timeout=WAIT_SECONDS):
            got.append((message.body, message.ttl is not None))
            message.ack()
        assert got == [(b"second", False), (b"first", True)]


def test_expired_here_is_a_dead_letter_there(fronts: Site, stack: ExitStack) -> None:
    a, b = fronts.fronts
    for here, there in ((a, b), (b, a)):
        queue = fronts.queue()
        stack.enter_context(PhpmqClient(here.url("phpmq"))).send(queue, b"short-lived", ttl=1)
        assert one(stack.enter_context(PhpmqClient(there.url("phpmq"))), f"{queue}.dead") == b"short-lived"


def test_rejected_here_is_a_dead_letter_there(fronts: Site, stack: ExitStack) -> None:
    a, b = fronts.fronts
    for here, there in ((a, b), (b, a)):
        queue = fronts.queue()
        judge = stack.enter_context(PhpmqClient(here.url("phpmq")))
        judge.send(queue, b"unwanted")
        (message,) = judge.consume(queue, 1, count=1, timeout=WAIT_SECONDS)
        message.reject()
        assert one(stack.enter_context(PhpmqClient(there.url("phpmq"))), f"{queue}.dead") == b"unwanted"
        wait_empty(here, queue)


def test_windows_hold_and_both_get_their_share(fronts: Site, stack: ExitStack) -> None:
    queue, window = fronts.queue(), 10
    clients = [stack.enter_context(PhpmqClient(front.url("phpmq"))) for front in fronts.fronts]
    consumers = [client.consume(queue, window, timeout=WAIT_SECONDS) for client in clients]
    with RqClient(fronts.fronts[0].url("rq")) as sender:
        sender.send_many(queue, [b"%d" % number for number in range(MESSAGES)])
    wait_count(fronts.fronts[0], queue, "held", 2 * window)
    got: list[int] = []
    for _ in range(MESSAGES // 2 - window):
        # Neither waits for the other, and neither is given so much that the other has to.
        for consumer in consumers:
            message = next(consumer)
            got.append(int(message.body))
            message.ack()
    for client in clients:
        client.close()
    rest = receive(fronts.fronts[1], "phpmq", queue, 2 * window)
    assert sorted(got + list(map(int, rest))) == list(range(MESSAGES))


# --- SSPQ --------------------------------------------------------------------------------------------

COUNTED = SSPQ_QUEUES.index("counted")


@pytest.mark.long
def test_the_retry_counter_is_exact(fronts: Site, stack: ExitStack) -> None:
    """One less for every client that is lost, wherever it was, and for every follower; the death of a leader
    costs nothing: a delivery that a crash cuts off is not counted. Dead when there was no retry left."""
    leader, follower = fronts.leader(), fronts.follower()

    def taken(front: FrontEnd) -> tuple[SspqClient, bytes, int | None]:
        client = stack.enter_context(SspqClient(front.url("sspq", COUNTED), reconnect_seconds=0.1))
        message = client.receive(WAIT_SECONDS)
        return client, message.body, message.retries

    with SspqClient(follower.url("sspq", COUNTED)) as sender:
        sender.send(b"counted", retries=4)
    for retries, front in ((4, leader), (3, follower)):
        client, *seen = taken(front)
        assert seen == [b"counted", retries]
        client.close()
    _, *seen = taken(follower)
    assert seen == [b"counted", 2]
    follower.kill()
    _, *seen = taken(leader)
    assert seen == [b"counted", 1]
    fronts.start_fronts()
    leader.kill()
    client, *seen = taken(follower)
    assert seen == [b"counted", 1]
    client.close()
    fronts.start_fronts()
    client, *seen = taken(leader)  # which is the follower now
    assert seen == [b"counted", 0]
    client.close()
    with SspqClient(leader.url("sspq", COUNTED)) as undertaker:
        message = undertaker.receive_dead(WAIT_SECONDS)
        assert (message.body, message.retries, message.is_dead) == (b"counted", 0, True)
        message.ack()


def test_what_a_client_holds_stays_with_it_when_the_leader_dies(fronts: Site, stack: ExitStack) -> None:
    leader, follower = fronts.leader(), fronts.follower()
    queue = fronts.queue()
    sspq = stack.enter_context(SspqClient(follower.url("sspq", COUNTED)))
    sspq.send(b"kept", retries=0)
    phpmq = stack.enter_context(PhpmqClient(follower.url("phpmq")))
    phpmq.send_many(queue, [b"first", b"second"])
    kept = sspq.receive(WAIT_SECONDS)
    held = list(phpmq.consume(queue, 2, count=2, timeout=WAIT_SECONDS))
    leader.kill()
    with RqClient(follower.url("rq")) as sender:  # a receipt: somebody leads again
        sender.send(queue, b"third")
    # Nobody else gets what is held, and its holders settle it as if nothing had happened.
    other = stack.enter_context(PhpmqClient(follower.url("phpmq")))
    assert one(other, queue) == b"third"
    assert kept.ack()
    assert phpmq.ack_many(held) == 2
    for name in (queue, "counted"):
        wait_empty(follower, name)


# --- HTTP and commands -------------------------------------------------------------------------------


def test_the_http_api_answers_at_every_front_end(fronts: Site, stack: ExitStack) -> None:
    for front in (fronts.follower(), fronts.leader()):
        queue = fronts.queue()
        client = stack.enter_context(HttpClient(front.url("http")))
        api = stack.enter_context(Api(front.ports["http"]))
        phpmq = stack.enter_context(PhpmqClient(front.url("phpmq")))
        assert [
            client.send(queue, b"%d" % number, key=f"{queue}/{number}").offset for number in range(3)
        ] == [
            0,
            1,
            2,
        ]
        assert client.send(queue, b"2", key=f"{queue}/2").repeated
        assert [message.value for message in client.peek(queue)] == [b"0", b"1", b"2"]
        log = api.ask("GET", f"/v1/queues/{queue}/log", view="messages", start=0)
        assert (log.status, log.headers["penstock-end"]) == (200, "3")
        assert api.ask("POST", f"/v1/queues/{queue}/pause").json == {"paused": True}
        assert list(phpmq.consume(queue, 1, count=1, timeout=0.3)) == []
        assert api.ask("POST", f"/v1/queues/{queue}/resume").json == {"paused": False}
        for message in phpmq.consume(queue, 1, count=2, timeout=WAIT_SECONDS):
            message.reject()
        wait_count(front, queue, "dead", 2)
        redriven = api.ask("POST", f"/v1/queues/{queue}/redrive", {"reason": "rejected"})
        assert redriven.json["redriven"] == 2
        assert [one(phpmq, queue) for _ in range(3)] == [b"2", b"0", b"1"]
        page = api.ask("GET", "/", headers={"Accept": "text/html"})
        assert (page.status, page.headers["content-type"].partition(";")[0]) == (200, "text/html")
        assert b'engine="jetstream"' in api.ask("GET", "/metrics").body
        cluster = api.get("/v1/engine")["cluster"]
        assert {member["id"].rpartition("-")[0] for member in cluster["members"]} == {"a", "b"}


@pytest.mark.long
def test_commands_work_at_every_front_end(fronts: Site) -> None:
    for front in (fronts.follower(), fronts.leader()):
        queue, url = fronts.queue(), front.url("http")
        front.penstock("send", queue, "hello", "--url", url)
        front.penstock("send", queue, "again", "--url", front.url("rq"))
        assert queue in front.penstock("queues", "--url", url)
        got = front.penstock("receive", queue, "--count", "2", "--url", front.url("phpmq"))
        assert got.split() == ["hello", "again"]
        findings = front.penstock("doctor", "--data", str(front.folder / "data"), "--url", url)
        assert f"ok    broker: answers at {url}" in findings
        assert "0 failures" in findings


# --- handing over ------------------------------------------------------------------------------------


def test_a_leader_that_is_stopped_hands_over_at_once(
    fronts: Site, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    leader, follower = fronts.leader(), fronts.follower()
    queue = fronts.queue()
    sender = stack.enter_context(RqClient(follower.url("rq")))
    sender.send_many(queue, [b"%d" % number for number in range(MESSAGES)])
    holder = stack.enter_context(PhpmqClient(follower.url("phpmq")))
    held = list(holder.consume(queue, 10, count=10, timeout=WAIT_SECONDS))
    leader.signal(signal.SIGTERM)
    receipts = [time.monotonic()]
    gone = False
    while not gone:
        gone = not leader.running  # one more is sent then
        sender.send(queue, b"%d" % (MESSAGES + len(receipts) - 1))
        receipts.append(time.monotonic())
    assert leader.wait() == 0
    pause = max(later - moment for moment, later in pairwise(receipts))
    with capsys.disabled():
        sys.stdout.write(f"\nSIGTERM of the leader: no receipt for {pause:.2f} s\n")
    count = MESSAGES + len(receipts) - 1
    assert holder.ack_many(held) == len(held)
    taker = stack.enter_context(PhpmqClient(follower.url("phpmq")))
    rest = list(taker.consume(queue, count, count=count - len(held), timeout=WAIT_SECONDS))
    taker.ack_many(rest)
    assert [int(message.body) for message in held + rest] == list(range(count))
    wait_empty(follower, queue)
    assert pause < LEASE_SECONDS


# --- connections -------------------------------------------------------------------------------------


def test_a_connection_of_any_front_end_can_be_ended(fronts: Site, stack: ExitStack) -> None:
    for front, asked in product(fronts.fronts, fronts.fronts):
        queue = fronts.queue()
        api = stack.enter_context(Api(asked.ports["http"]))
        send(front, "phpmq", queue, [b"x"])
        client = stack.enter_context(PhpmqClient(front.url("phpmq")))
        (held,) = client.consume(queue, 1, count=1, timeout=WAIT_SECONDS)

        def holding(api: Api = api, queue: str = queue) -> list[dict[str, object]]:
            rows: list[dict[str, object]] = api.get("/v1/connections")["connections"]
            wanted = [{"queue": queue, "dead": False}]
            return [it for it in rows if it["held"] == 1 and it["consumes"] == wanted]

        until(lambda holding=holding: len(holding()) == 1, "it to hold the message")  # type: ignore[misc]
        (row,) = holding()
        number = row["number"]
        found = api.get(f"/v1/connections/{number}")
        assert found["front_end"].partition("-")[0] in ("", front.name)
        assert (found["bytes_in"] is None) == bool(found["front_end"])
        assert api.ask("DELETE", f"/v1/connections/{number}").json["held"] == 1
        gone = f"/v1/connections/{number}"
        until(lambda api=api, gone=gone: api.ask("GET", gone).status == 404, "it to be gone")  # type: ignore[misc]
        (again,) = client.consume(queue, 1, count=1, timeout=WAIT_SECONDS)
        assert again.body == held.body
        again.ack()
