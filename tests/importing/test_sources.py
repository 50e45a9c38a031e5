"""What comes along from each source, and what is said where something cannot be had."""

import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from penstock.client import HttpClient, PeekedMessage, RqClient, SspqClient
from penstock.errors import Misuse
from penstock.importing.amqp import Amqp
from penstock.importing.journal import Busy, Journal
from penstock.importing.run import Import
from penstock.importing.sink import Sink
from penstock.importing.source import PASSWORD_VARIABLE, Away, Refuses, place_of, source_of
from tests.importing.conftest import Command, Peer, Stalk
from tests.importing.dying import killed_after, patched
from tests.server.harness import BrokerProcess, until


@pytest.fixture
def mq(broker: BrokerProcess) -> Any:
    with HttpClient(f"http://127.0.0.1:{broker.ports['http']}") as client:
        yield client


@pytest.fixture
def redis_url(redis_peer: Peer) -> str:
    return f"redis://127.0.0.1:{redis_peer.port}/0"


def said(result: tuple[int, str, str]) -> str:
    """What is said by one that has failed, in one line."""
    code, out, err = result
    (line,) = err.splitlines()
    assert (code, out) == (1, "")
    return line


# --- Redis -------------------------------------------------------------------------------------------------


def test_a_list_from_either_end_and_in_part(
    redis: Any, redis_url: str, command: Command, mq: HttpClient
) -> None:
    redis.rpush("ends", "a", "b", "c", "d")
    name = f"{redis_url}/ends"
    assert (
        command(f"{name}?pop=left", "--count", "2")[1]
        == f"2 messages from {name} are in 'ends'; left there: 2 ready\n"
    )
    assert command(name)[0] == 0
    assert [it.value for it in mq.peek("ends")] == [b"a", b"b", b"d", b"c"]
    assert redis.keys("ends*") == []


def test_bytes_that_are_no_text_and_a_name_with_slashes(
    redis: Any, redis_url: str, command: Command, mq: HttpClient
) -> None:
    redis.lpush("a/b c", bytes(range(256)))
    assert command(f"{redis_url}/a/b%20c", "raw")[0] == 0
    assert [it.value for it in mq.peek("raw")] == [bytes(range(256))]


def test_a_stream_by_its_fields(redis: Any, redis_url: str, command: Command, mq: HttpClient) -> None:
    redis.xadd("fields", {"payload": b"\xff", "city": "Bern"})
    assert command(f"{redis_url}/fields?body=payload")[0] == 0
    (message,) = mq.peek("fields")
    assert (message.value, message.headers) == (b"\xff", {"city": "Bern"})
    redis.xadd("fields", {"city": "Basel"})
    assert "has no field 'payload', only ['city']" in said(command(f"{redis_url}/fields?body=payload"))
    redis.xadd("whole", {"a": "1", "b": "zwei"})
    assert command(f"{redis_url}/whole")[0] == 0
    assert mq.peek("whole")[0].value == b'{"a": "1", "b": "zwei"}'
    redis.xadd("bytes", {"a": "1", "b": b"\xff"})
    assert "?body=FIELD" in said(command(f"{redis_url}/bytes"))
    assert redis.xlen("fields") == 2  # they stay


def test_the_work_of_a_group(redis: Any, redis_url: str, command: Command, mq: HttpClient) -> None:
    redis.xgroup_create("grouped", "workers", "0", mkstream=True)
    for number in range(4):
        redis.xadd("grouped", {"n": number})
    (taken,) = redis.xreadgroup("workers", "ann", {"grouped": ">"}, count=2)
    redis.xack("grouped", "workers", taken[1][0][0])
    assert "has no group 'works'" in said(command(f"{redis_url}/grouped?group=works"))
    code, out, _ = command(f"{redis_url}/grouped?group=workers")
    assert (code, out.partition("; ")[2]) == (0, "left there: 1 pending\n")
    assert [it.value for it in mq.peek("grouped")] == [b"2", b"3"]
    assert command(f"{redis_url}/grouped?group=workers&claim=0")[0] == 0
    assert [it.value for it in mq.peek("grouped")] == [b"2", b"3", b"1"]
    assert redis.xpending("grouped", "workers")["pending"] == 0


def test_entries_that_were_deleted_while_they_were_pending(
    redis: Any, redis_url: str, command: Command, mq: HttpClient
) -> None:
    names = [redis.xadd("gone", {"n": number}) for number in range(3)]
    redis.xgroup_create("gone", "penstock", "0")
    redis.xreadgroup("penstock", "penstock-import", {"gone": ">"})
    redis.xdel("gone", names[1])
    assert command(f"{redis_url}/gone")[0] == 0
    assert [it.value for it in mq.peek("gone")] == [b"0", b"2"]
    assert redis.xpending("gone", "penstock")["pending"] == 0


def test_redis_says_no(redis: Any, redis_url: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    redis.hset("table", "a", 1)
    assert "/0/table: this key is a hash; only a list or a stream can be imported" in said(
        command(f"{redis_url}/table")
    )
    assert "there is no such key" in said(command(f"{redis_url}/nothing"))
    redis.lpush("locked", "a")
    redis.config_set("requirepass", "hidden")
    try:
        for url in (f"{redis_url}/locked", f"{redis_url.replace('//', '//:wrong-one@')}/locked"):
            line = said(command(url))
            assert PASSWORD_VARIABLE in line
            assert "wrong-one" not in line
        monkeypatch.setenv(PASSWORD_VARIABLE, "hidden")
        assert command(f"{redis_url}/locked")[0] == 0
    finally:
        redis.config_set("requirepass", "")


# --- beanstalkd --------------------------------------------------------------------------------------------


def test_delayed_and_buried_jobs(
    stalk: Callable[[str], Stalk], beanstalkd: Peer, command: Command, mq: HttpClient
) -> None:
    url = f"beanstalk://127.0.0.1:{beanstalkd.port}/rooms"
    client = stalk("rooms")
    client.put([b"buried"])
    client.bury()
    client.put([b"second", b"third"])
    client.put([b"first"], priority=1)
    client.put([b"later"], delay=3600)
    assert command(url, "--dry-run")[1] == f"{url}: 3 ready, 1 delayed, 1 buried; nothing was taken\n"
    assert command(url)[1] == f"4 messages from {url} are in 'rooms'; left there: 1 buried\n"
    messages: list[PeekedMessage] = mq.peek("rooms")
    assert [it.value for it in messages] == [b"first", b"second", b"third", b"later"]
    due = messages[3].due
    assert due is not None
    assert 3000 < (due - messages[3].time).total_seconds() <= 3600
    assert command(f"{url}?buried=take")[0] == 0
    assert mq.peek("rooms")[4].value == b"buried"


def test_there_is_no_such_tube(beanstalkd: Peer, command: Command) -> None:
    assert "there is no tube of this name" in said(command(f"beanstalk://127.0.0.1:{beanstalkd.port}/none"))


# --- our own protocols -------------------------------------------------------------------------------------


def test_what_is_left_of_a_ttl_and_of_retries(
    broker: BrokerProcess, command: Command, mq: HttpClient
) -> None:
    mq.send("short", b"lives", ttl=600)
    assert command(f"phpmq://127.0.0.1:{broker.ports['phpmq']}/short", "short-2")[0] == 0
    (message,) = mq.peek("short-2")
    assert message.ttl is not None
    assert 500 < message.ttl <= 600
    with SspqClient(f"sspq://127.0.0.1:{broker.ports['sspq']}") as sspq:
        sspq.send(b"three", retries=3)
        sspq.send(b"endless")
        sspq.flush()
    assert command(f"sspq://127.0.0.1:{broker.ports['sspq']}", "tried")[0] == 0
    assert [(it.value, it.retries) for it in mq.peek("tried")] == [(b"three", 3), (b"endless", None)]
    assert mq.peek("default", state="ready") == []


def test_a_count_takes_little_more_from_others(
    broker: BrokerProcess, command: Command, mq: HttpClient
) -> None:
    """What is fetched ahead and goes back was delivered, which max-deliveries there counts."""
    mq.send_many("many", [b"x"] * 100)
    assert command(f"rq://127.0.0.1:{broker.ports['rq']}/many", "few", "--count", "2")[0] == 0
    assert sum(it.attempts for it in mq.peek("many", state="ready")) <= 4


def test_a_request_is_left_to_those_who_can_answer_it(broker: BrokerProcess, command: Command) -> None:
    url = f"rq://127.0.0.1:{broker.ports['rq']}"
    with ThreadPoolExecutor(1) as others, RqClient(url) as rq:
        answer = others.submit(rq.request, "asked", b"hello", timeout=60)
        assert "a request waits for an answer there" in said(command(f"{url}/asked", "--timeout", "20"))
        rq.serve("asked", lambda request: request.body.upper())
        assert answer.result() == b"HELLO"


# --- all of them -------------------------------------------------------------------------------------------


def test_a_queue_that_is_full_is_waited_for(
    redis: Any, redis_url: str, command: Command, start_broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = start_broker(config='[queue."full"]\nmax-bytes = 5000\n', folder="full")
    here = f"http://127.0.0.1:{other.ports['http']}"
    bodies = [b"%04d" % number + b"x" * 60 for number in range(150)]
    redis.lpush("full", *bodies)
    got: list[bytes] = []

    def consume() -> None:
        with HttpClient(here) as mq:
            for message in mq.consume("full", timeout=0.1):
                got.append(message.body)
                message.ack()

    monkeypatch.setattr(Import, "_wait", lambda *_: consume())
    code, out, err = command(f"{redis_url}/full", "--url", here)
    assert (code, err.count("waiting for room")) == (0, 2), (out, err)
    consume()
    assert got == bodies


@pytest.mark.parametrize(
    "setting", ['[queue."small"]\nmax-bytes = 2000\n', "[http]\nbody-bytes-max = 2000\n"]
)
def test_batches_are_as_small_as_penstock_takes_them(
    setting: str, redis: Any, redis_url: str, command: Command, start_broker: Any, tmp_path: Path
) -> None:
    """16 messages of 300 bytes are never taken at once; killed after the first part, nothing comes twice; one
    that alone is too large ends the import."""
    folder = setting[1:5]
    other = start_broker(config=setting, folder=folder)
    here = f"http://127.0.0.1:{other.ports['http']}"
    bodies = [b"%04d" % number + b"x" * 296 for number in range(40)]
    redis.lpush(f"small-{folder}", *bodies, b"x" * 2001)
    words = [f"{redis_url}/small-{folder}", "small", "--url", here]
    killed_after("stored", [*words, "--journal", str(tmp_path / "journal")], nth=3)
    got: list[bytes] = []
    ends = threading.Event()

    def consume() -> None:
        with HttpClient(here) as mq:
            while not ends.is_set():
                for message in mq.consume("small", timeout=0.1):
                    got.append(message.body)
                    message.ack()

    consumer = threading.Thread(target=consume)
    consumer.start()
    try:
        code, out, err = command(*words)
        assert (code, out) == (1, "")
        assert re.search("(max-bytes of 2000|body-bytes-max).*(raise|less)", err.splitlines()[-1]), err
        assert redis.lrange(f"small-{folder}:penstock", 0, -1)[-1] == b"x" * 2001
        redis.lset(f"small-{folder}:penstock", -1, b"fits")
        assert command(*words)[0] == 0
        until(lambda: len(got) > len(bodies), "all of it has come")
    finally:
        ends.set()
        consumer.join(30)
    assert got == [*bodies, b"fits"]


def test_ctrl_c_lets_the_batch_finish(
    redis: Any, redis_url: str, command: Command, mq: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis.lpush("ended", *range(100))
    with monkeypatch.context() as patch:
        patched(patch, (Sink, "store"), 1, before=lambda: os.kill(os.getpid(), signal.SIGINT))
        code, out, err = command(f"{redis_url}/ended")
    assert (code, err) == (130, "")
    assert out.endswith("are in 'ended'; ended early, the same command goes on\n")
    assert (len(mq.peek("ended")), redis.llen("ended"), redis.llen("ended:penstock")) == (16, 84, 0)
    assert command(f"{redis_url}/ended")[0] == 0
    assert [it.value for it in mq.peek("ended")] == [b"%d" % number for number in range(100)]


def test_one_that_follows_goes_on_until_it_is_told(
    redis: Any, redis_url: str, command: Command, mq: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis.lpush("followed", "a")
    patched(monkeypatch, (Sink, "store"), 1, after=lambda: redis.lpush("followed", "b"))
    patched(monkeypatch, (Sink, "store"), 2, after=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert command(f"{redis_url}/followed", "--follow")[0] == 0
    assert [it.value for it in mq.peek("followed")] == [b"a", b"b"]


def test_one_at_a_time(redis: Any, redis_url: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    redis.lpush("alone", "a")
    second: list[tuple[int, str, str]] = []
    patched(monkeypatch, (Sink, "store"), 1, before=lambda: second.append(command(f"{redis_url}/alone")))
    assert command(f"{redis_url}/alone")[0] == 0
    assert "another import from" in said(second[0])


@pytest.mark.parametrize(("code", "what"), [(406, Away), (404, Refuses)])
def test_rabbitmq_waits_half_an_hour_for_an_acknowledgement(code: int, what: type[Exception]) -> None:
    """Where Penstock has no room for longer, the channel is closed, and the import goes on over another."""
    source = Amqp(place_of("amqp://h/q"))
    why = "delivery acknowledgement on channel 1 timed out"
    with pytest.raises(what, match=why), source._told():
        raise source._pika.exceptions.ChannelClosedByBroker(code, why)


@pytest.mark.parametrize("content", [b"notes", b"[1]", b'{"notes": 1}', b"\xff"])
def test_a_file_of_something_else_is_no_journal(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(content)
    journal = Journal(source_of("sspq://h"), str(tmp_path / "notes"))
    with closing(journal), pytest.raises(Busy, match="notes: is no journal of an import; name another file"):
        journal.read()
    assert (tmp_path / "notes").read_bytes() == content


def test_a_journal_that_is_a_folder(broker: BrokerProcess, command: Command, tmp_path: Path) -> None:
    url = f"phpmq://127.0.0.1:{broker.ports['phpmq']}/any"
    told = said(command(url, "--journal", str(tmp_path)))
    assert told == f"penstock: {tmp_path}: Is a directory; name a file of yours with --journal"


def test_a_message_that_is_too_large_is_named(
    redis: Any, redis_url: str, command: Command, stored: Callable[[str], list[bytes]]
) -> None:
    redis.rpush("large", b"first", b"x" * (17 << 20))
    code, out, err = command(f"{redis_url}/large", "--timeout", "0", "--wait", "1")
    assert (code, out) == (1, "")
    assert f"{redis_url}/large: the message " in err
    assert "of 17,825,792 bytes is too large for Penstock (the body has more than 16777216 bytes" in err
    redis.delete("large", "large:penstock")


@pytest.mark.parametrize("key", ["jobs.dead", "a%0Ab", "n" * 300])
def test_a_name_that_no_queue_has(redis: Any, redis_url: str, command: Command, key: str) -> None:
    redis.rpush(unquote(key), b"x")
    code, out, err = command(f"{redis_url}/{key}")
    assert (code, out, "behind the URL, say in which QUEUE messages are to be" in err) == (2, "", True), err
    assert redis.lrange(unquote(key), 0, -1) == [b"x"]  # nothing was taken
    assert command(f"{redis_url}/{key}", "named")[0] == 0


@pytest.mark.parametrize("scheme", ["redis", "beanstalk", "phpmq", "sspq", "rq"])
def test_nobody_is_there(scheme: str, command: Command, broker: BrokerProcess) -> None:
    path = {"redis": "/0/jobs", "sspq": ""}.get(scheme, "/jobs")
    code, out, err = command(f"{scheme}://127.0.0.1:{broker.port('nobody')}{path}", "jobs", "--wait", "0")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].count("is it running, and is the address right?") == 1, err


def test_somebody_else_is_there(command: Command, broker: BrokerProcess) -> None:
    where = f"127.0.0.1:{broker.ports['http']}/jobs"
    assert "no answer of a beanstalkd" in said(command(f"beanstalk://{where}", "--wait", "0.1"))
    # This one is let in, and is told nothing but nonsense from then on.
    code, out, err = command(f"phpmq://{where}", "--wait", "0.3")
    assert (code, out, len(err.splitlines()) < 12) == (1, "", True), err
    assert "does not speak this protocol" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("ftp://joe:secret@example/x", "use sspq://HOST:PORT"),
        ("jobs", "use sspq://HOST:PORT"),
        ("redis://h:x/0/jobs", "no URL of a source"),
        ("redis://h/0/jobs?pip=left", "can be pop, group, claim, body"),
        ("amqp://h/q?cafile=x", "can be headers"),
    ],
)
def test_a_url_that_cannot_be_meant(url: str, what: str) -> None:
    with pytest.raises(Misuse) as caught:
        place_of(url)
    assert what in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["sspq://h", "phpmq://h", "redis://h/jobs", "beanstalk://h", "redis://h/0/jobs?pop=up", "amqp://h"]
)
def test_a_source_that_cannot_be_meant(url: str, command: Command) -> None:
    code, out, err = command(url)
    assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_what_is_missing_is_named(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "redis", None)
    assert "pip install 'penstock[import]'" in said(command("redis://h/0/jobs"))


def test_two_machines_at_one_list_lose_nothing(redis: Any, redis_url: str) -> None:
    """Each has a lock of its own machine only: whoever finds more than its batch takes nothing away."""
    redis.rpush("shared", *(b"%d" % n for n in range(10)))
    here, there = source_of(f"{redis_url}/shared"), source_of(f"{redis_url}/shared")
    here.open()
    there.open()
    mine = here.take(3)
    there.take(3)  # the batch of the other one, which it takes for what an earlier run has left
    there.settle(mine)
    others = there.take(3)
    more = here.take(2)
    with pytest.raises(Refuses, match="another import takes from this key"):
        there.settle(others)
    assert {*redis.lrange("shared:penstock", 0, -1)} == {it.body for it in (*others, *more)}
    for source in (here, there):
        source.close()
