"""An import that is killed at any step, or whose servers are, loses nothing; what doubles is in docs.

Killed means SIGKILL, of a process that has just done that step in its second batch, of 64 messages; then the
same command runs again.
"""

import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.client import HttpClient, RqClient
from penstock.client.rq_serving import AsyncServing
from penstock.importing import wires
from penstock.importing.sink import Sink
from penstock.importing.source import Away, source_of
from tests.importing.conftest import Command, Peer, Stalk
from tests.importing.dying import STEPS, killed_after, method_of, patched
from tests.seeds import some
from tests.server.harness import WAIT_SECONDS, BrokerProcess, until

BODIES = [b"message %04d" % number for number in range(150)]
BATCH = 64
"""The second one: four times the first."""

NAMELESS = ("sspq", "rq")
"""Where messages have no identity, what is stored and not settled comes twice."""

Look = Callable[[str], list[bytes]]
Fill = Callable[[str, str], str]


@pytest.fixture
def fill(
    broker: BrokerProcess, redis: Any, redis_peer: Peer, stalk: Callable[[str], Stalk], beanstalkd: Peer
) -> Fill:
    """Puts the bodies into a source of some kind, under a name; its URL."""

    def fill(kind: str, name: str) -> str:
        if kind == "list":
            redis.lpush(name, *BODIES)
            return f"redis://127.0.0.1:{redis_peer.port}/0/{name}"
        if kind == "stream":
            for body in BODIES:
                redis.xadd(name, {"payload": body})
            return f"redis://127.0.0.1:{redis_peer.port}/0/{name}"
        if kind == "beanstalk":
            stalk(name).put(BODIES)
            return f"beanstalk://127.0.0.1:{beanstalkd.port}/{name}"
        with HttpClient(f"http://127.0.0.1:{broker.ports['http']}") as mq:
            mq.send_many("default" if kind == "sspq" else name, BODIES)
        return f"{kind}://127.0.0.1:{broker.ports[kind]}{f'/{name}' * (kind != 'sspq')}"

    return fill


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", some(["list", "stream", "beanstalk", "phpmq", "sspq", "rq"], "stream", "rq"))
def test_killed_after_any_step_it_goes_on(
    kind: str, step: str, fill: Fill, command: Command, stored: Look, tmp_path: Path
) -> None:
    if kind in NAMELESS and step == "written":
        pytest.skip("nothing is written down of what has no identity")
    name = f"{kind}-{step}"
    queue = f"into-{name}"
    url = fill(kind, name)
    killed_after(step, [url, queue, "--journal", str(tmp_path / "journal")])
    code, out, err = command(url, queue)
    assert code == 0, (out, err)
    counts = Counter(stored(queue))
    assert counts.keys() == set(BODIES)
    doubled = sum(count - 1 for count in counts.values())
    if kind in NAMELESS and step == "stored":
        assert 0 < doubled <= BATCH
    elif kind == "rq" and step == "settled":  # which is written a moment later
        assert doubled <= BATCH
    else:
        assert doubled == 0
    # What had been stored comes again from these, and is known.
    again = " more had been stored before" in out
    assert again == (kind not in NAMELESS and step == "stored"), out
    # And nothing is there a third time.
    assert "another import" not in command(url, queue)[2]
    assert sum(Counter(stored(queue)).values()) == len(BODIES) + doubled


@pytest.mark.parametrize("kind", ["list", "stream", "beanstalk"])
@pytest.mark.parametrize("step", ["taken", "settled"])
def test_the_other_server_is_killed(
    kind: str,
    step: str,
    fill: Fill,
    command: Command,
    stored: Look,
    monkeypatch: pytest.MonkeyPatch,
    redis_peer: Peer,
    beanstalkd: Peer,
) -> None:
    name = f"{kind}-server-{step}"
    url = fill(kind, name)
    peer = beanstalkd if kind == "beanstalk" else redis_peer
    # Before it: with messages that are stored and not settled there, or with none.
    patched(monkeypatch, method_of(step, url), 2, before=peer.restart)
    code, out, err = command(url)
    assert code == 0, (out, err)
    assert stored(name) == BODIES
    assert "connecting again" in err or "trying for" in err or kind != "beanstalk"


@pytest.mark.parametrize("when", ["before", "after"])
def test_penstock_is_killed_around_a_commit(
    when: str,
    fill: Fill,
    command: Command,
    start_broker: Any,
    monkeypatch: pytest.MonkeyPatch,
    broker: BrokerProcess,
) -> None:
    other = start_broker("--http", f"127.0.0.1:{broker.port(f'http-{when}')}", folder=when)
    url = fill("list", f"broker-{when}")

    def again() -> None:
        other.kill()
        other.start()

    around: dict[str, Any] = {when: again}
    patched(monkeypatch, (Sink, "_commit"), 2, **around)
    here = f"http://127.0.0.1:{other.ports['http']}"
    code, out, err = command(url, "jobs", "--url", here)
    assert code == 0, (out, err)
    with HttpClient(here) as mq:
        assert [message.value for message in mq.peek("jobs", limit=1000)] == BODIES


def test_equal_messages_are_no_repetition(
    redis: Any, redis_peer: Peer, command: Command, stored: Look, tmp_path: Path
) -> None:
    redis.lpush("ticks", *[b"tick"] * 200)
    url = f"redis://127.0.0.1:{redis_peer.port}/0/ticks"
    killed_after("stored", [url, "--journal", str(tmp_path / "journal")])
    assert command(url)[0] == 0
    assert stored("ticks") == [b"tick"] * 200


def test_groups_of_a_stream_know_nothing_of_each_other(
    redis: Any, fill: Fill, command: Command, stored: Look, tmp_path: Path
) -> None:
    """They have the same entries: what one has stored and not acknowledged is not done for the other."""
    url = fill("stream", "shared-stream")
    for group in ("one", "two"):
        redis.xgroup_create("shared-stream", group, "0")
    killed_after("stored", [f"{url}?group=one", "one", "--journal", str(tmp_path / "journal")])
    for group in ("two", "one"):
        assert command(f"{url}?group={group}", group)[0] == 0
        assert stored(group) == BODIES


@pytest.mark.parametrize("kind", ["list", "stream", "beanstalk", "phpmq"])
def test_told_to_end_before_what_is_stored_came_again(
    kind: str, fill: Fill, command: Command, stored: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise Away("lost")

    name = f"{kind}-ended"
    url = fill(kind, name)
    with monkeypatch.context() as patch:
        patched(patch, method_of("settled", url), 2, before=lose)
        assert command(url, f"into-{name}")[0] == 130
    assert command(url, f"into-{name}")[0] == 0
    assert Counter(stored(f"into-{name}")) == Counter(BODIES)


@contextmanager
def cut_once(port: int, bytes_down: int, cut: threading.Event) -> Iterator[int]:
    """A port that leads to another one; over the first connection so many bytes come back, before its end."""

    def pass_on(source: socket.socket, sink: socket.socket, left: int) -> None:
        with suppress(OSError):
            while left and (data := source.recv(min(left, 4096))):
                sink.sendall(data)
                left -= len(data)
        if not left:
            cut.wait(WAIT_SECONDS)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def let_in(listener: socket.socket) -> None:
        for left in (bytes_down, 1 << 40):
            with listener.accept()[0] as client, socket.create_connection(("127.0.0.1", port)) as there:
                up = threading.Thread(target=pass_on, args=(client, there, 1 << 40))
                up.start()
                pass_on(there, client, left)
                up.join()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        door = threading.Thread(target=let_in, args=(listener,))
        door.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            cut.set()
            socket.create_connection(listener.getsockname()).close()  # the second one, where none has come
            door.join()


def test_what_comes_again_within_a_batch_is_taken_once(
    fill: Fill, broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client connects again by itself, in the middle of taking."""
    monkeypatch.setattr(wires, "POLL_SECONDS", 5)
    fill("phpmq", "cut")
    cut = threading.Event()
    with cut_once(broker.ports["phpmq"], 800, cut) as port, ThreadPoolExecutor(1) as others:
        source = source_of(f"phpmq://127.0.0.1:{port}/cut")
        assert isinstance(source, wires.Phpmq)
        with closing(source):
            source.open()
            taking = others.submit(source.take, 64)
            windows = source._mq._core._windows
            until(lambda: "cut" in windows and windows["cut"]._all[0].handed_out > 4, "some are handed out")
            cut.set()
            assert len({it.body for it in taking.result()}) == len(taking.result()) > 4


def test_messages_that_come_while_an_import_ends_go_back(
    fill: Fill, broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was held is given back, and in the moment before the client leaves it is given the next ones."""
    deliveries = 0
    take, close = AsyncServing.take, RqClient.close

    def count(serving: AsyncServing, line: Any, event: Any) -> None:
        nonlocal deliveries
        deliveries += 1
        take(serving, line, event)

    def close_later(node: RqClient) -> None:
        before = deliveries
        until(lambda: deliveries > before, "more has come")
        close(node)

    monkeypatch.setattr(AsyncServing, "take", count)
    monkeypatch.setattr(RqClient, "close", close_later)
    source = source_of(fill("rq", "ending"))
    source.open()
    left = 64
    while left:  # It may take them in parts: it does not wait for the next one where one is late.
        taken = len(source.take(left))
        assert taken, "there are more"
        left -= taken
    source.close()
    # A thread that waited for ever would keep the command from ending.
    until(lambda: not any("rq-ending" in it.name for it in threading.enumerate()), "handlers have ended")
