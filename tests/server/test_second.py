"""The second process: started, watched, started again, stopped; and messages that go on meanwhile."""

import asyncio
import http.client
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock.common.address import TcpAddress
from penstock.server.second import NICENESS
from penstock.server.server import Server
from penstock.server.settings import Settings
from penstock.server.settings_read import load
from tests.http.api import Api
from tests.server.harness import WAIT_SECONDS, BrokerProcess
from tests.server.inside import LOOPS, Inside, run
from tests.server.settings_source import parser

pytestmark = pytest.mark.usefixtures("cold")


def started(folder: Path, *flags: str) -> BrokerProcess:
    return BrokerProcess(folder, "--http", "127.0.0.1:0", *flags).start()


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def second_of(broker: BrokerProcess) -> int:
    """The process of the API, once it answers."""
    with Api(broker.ports["http"]) as api:
        assert api.get("/healthz") == {"status": "ok"}
    (pid,) = children(broker.pid)
    return pid


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_ready_line_names_the_api_and_callers_wait_for_it(tmp_path: Path) -> None:
    broker = started(tmp_path)
    assert broker.doors[-1] == ("http", f"127.0.0.1:{broker.ports['http']}")
    second_of(broker)
    assert broker.stop() == 0


def test_where_both_want_a_core_messages_go_first(tmp_path: Path) -> None:
    broker = started(tmp_path)
    pid = second_of(broker)
    nicer_by = os.getpriority(os.PRIO_PROCESS, pid) - os.getpriority(os.PRIO_PROCESS, broker.pid)
    assert nicer_by == NICENESS
    assert broker.stop() == 0


def test_off_means_no_second_process(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, "--http", "off").start()
    assert "http" not in dict(broker.doors)
    assert children(broker.pid) == []
    assert broker.stop() == 0


def test_killed_it_comes_back_on_the_same_port_while_messages_go_on(tmp_path: Path) -> None:
    broker = started(tmp_path)
    first = second_of(broker)
    sent: list[bytes] = []
    stop = threading.Event()

    def traffic() -> None:
        with penstock.connect(f"rq://127.0.0.1:{broker.ports['rq']}") as node:
            while not stop.is_set():
                body = b"%d" % len(sent)
                node.send("orders", body)
                sent.append(body)

    worker = threading.Thread(target=traffic)
    worker.start()
    try:
        eventually(lambda: len(sent) > 10)
        for _ in range(3):
            pid = second_of(broker)
            before = len(sent)
            os.kill(pid, signal.SIGKILL)
            eventually(lambda before=before: len(sent) > before + 10)  # type: ignore[misc]
            # The call waits in the backlog of the socket that the broker has kept.
            assert second_of(broker) != pid
    finally:
        stop.set()
        worker.join()
    with Api(broker.ports["http"]) as api:
        assert api.get("/v1/queues/orders")["offset_end"] == len(sent)
    assert second_of(broker) != first
    assert "starts again" in broker.log()
    assert broker.stop() == 0


def test_where_it_cannot_be_started_for_a_while_it_is_tried_again(tmp_path: Path) -> None:
    """As where clients have taken every file descriptor."""
    broker = started(tmp_path)
    pid = second_of(broker)
    limits = resource.prlimit(broker.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, (1, limits[1]))
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: broker.log().count("could not be started (Too many open files)") >= 2)
    resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, limits)
    eventually(lambda: bool(children(broker.pid)))
    with Api(broker.ports["http"]) as api:
        assert api.ask("GET", "/healthz").status == 200
    assert broker.stop() == 0
    assert "Traceback" not in broker.log()


def test_tokens_that_change_while_it_starts_are_in_force(tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    row = '[[http.tokens]]\nname = "ann"\nrole = "admin"\ntoken = "{}-0123456789abcdef"\n'
    config.write_text(row.format("old"))
    broker = started(tmp_path, "--config", str(config))
    first = second_of(broker)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: children(broker.pid) not in ([], [first]))
    (pid,) = children(broker.pid)
    # The broker waits for a process until it has begun with its program.
    eventually(lambda: b"penstock.http" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(pid, signal.SIGSTOP)  # it will hear everything at once
    config.write_text(row.format("new"))
    broker.signal(signal.SIGHUP)
    eventually(lambda: "policies and users read again" in broker.log())
    os.kill(pid, signal.SIGCONT)
    with Api(broker.ports["http"], "old-0123456789abcdef") as api:
        # It may have been ready before it was stopped, and hears a caller before it hears of the tokens.
        eventually(lambda: api.ask("GET", "/v1/queues").status == 401)
    with Api(broker.ports["http"], "new-0123456789abcdef") as api:
        assert api.ask("GET", "/v1/queues").status == 200
    assert broker.stop() == 0


def test_what_was_revoked_stays_so_where_later_settings_are_not_taken(tmp_path: Path) -> None:
    """Others can reach the door: settings without a token are not in force there, and the last ones are."""
    row = '[[http.tokens]]\nname = "ann"\nrole = "admin"\ntoken = "{}-0123456789abcdef"\n'
    user = '[[user]]\nname = "{0}"\ncertificate = "{0}"\nadmin = true\n'
    config = tmp_path / "penstock.toml"

    def put(http: str, text: str) -> Settings:
        config.write_text(f'[http]\naddress = "{http}"\n{text}')
        words = f"--config {config} --data {tmp_path}/data --sspq off --phpmq off --rq off"
        return load(parser().parse_args(words.split()), {})

    async def test() -> None:
        read = [
            put("0.0.0.0:0", row.format("leaked") + user.format("gone")),
            put("0.0.0.0:0", row.format("new") + user.format("here")),
            put("127.0.0.1:0", ""),
        ]
        server = Server(read[0], lambda: read.pop(1))
        assert server.second is not None
        for _ in range(2):
            server._read_again()
            fields = server.second._user_fields()
            assert [it["token"] for it in fields["tokens"]] == ["new-0123456789abcdef"]
            assert [it["name"] for it in fields["users"]] == ["here"]
        await server._close_everything()

    run("asyncio", test())


def test_when_the_broker_is_killed_it_goes_too(tmp_path: Path) -> None:
    broker = started(tmp_path)
    pid = second_of(broker)
    broker.kill()
    eventually(lambda: gone(pid))
    # The port is free again: nobody inherits it.
    broker.start()
    second_of(broker)
    assert broker.stop() == 0


def test_a_stop_ends_both_and_answers_what_was_asked(tmp_path: Path) -> None:
    broker = started(tmp_path)
    pid = second_of(broker)
    receipts: list[int] = []
    refused = threading.Event()

    def send() -> None:
        try:
            with Api(broker.ports["http"]) as api:
                while True:
                    reply = api.ask("POST", "/v1/queues/orders/messages", b"x")
                    if reply.status != 200:
                        break
                    receipts.append(reply.json["offset"])
        except OSError:
            pass  # the connection was closed between two calls, or the next one was refused
        finally:
            refused.set()

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(receipts) > 100)
    assert broker.stop() == 0
    for thread in threads:
        thread.join()
    assert gone(pid)
    broker.start()
    with Api(broker.ports["http"]) as api:
        stored = api.get("/v1/queues/orders")["offset_end"]
    # What was confirmed is there; a call that was cut off by the end may be there too.
    assert sorted(receipts) == sorted(set(receipts))
    assert len(receipts) <= stored <= len(receipts) + len(threads)
    assert max(receipts) < stored
    assert broker.stop() == 0


def test_an_address_in_use_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        broker = BrokerProcess(tmp_path, "--http", f"127.0.0.1:{port}")
        try:
            broker.start()
        except AssertionError:
            pass
        else:
            raise AssertionError("it started on an address that is taken")
    assert f"http listener 127.0.0.1:{port}" in broker.log()
    assert "Traceback" not in broker.log()


def test_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    broker = BrokerProcess(tmp_path, "--http", f"unix:{path}").start()
    with socket.socket(socket.AF_UNIX) as wire:
        wire.settimeout(WAIT_SECONDS)
        wire.connect(str(path))
        wire.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        heard = b""
        while chunk := wire.recv(4096):
            heard += chunk
    assert heard.startswith(b"HTTP/1.1 200 ")
    assert broker.stop() == 0
    assert not path.exists()


@pytest.mark.parametrize("loop", LOOPS)
def test_it_may_be_told_to_rest_at_any_moment_of_its_start(tmp_path: Path, loop: str) -> None:
    """A front-end that leads no more has no log: there is nobody whom a process that comes then could ask."""

    async def test() -> None:
        async with Inside.open(tmp_path, "--http 127.0.0.1:0") as server:
            home, served, second = server.home, server.served, server.second
            assert second is not None
            await second.listen()
            before = children(os.getpid())  # a Java or a server of other tests
            for moment in range(4):
                second.start()
                for _ in range(moment):
                    await asyncio.sleep(0)
                server.move_to(home)
                try:
                    async with asyncio.timeout(WAIT_SECONDS / 2):  # it hears of it, and is not killed
                        await second.rest(WAIT_SECONDS)
                finally:
                    server.move_to(home, *served)
                assert children(os.getpid()) == before

    run(loop, test())


@pytest.mark.parametrize("loop", LOOPS)
def test_it_may_stand_by_until_it_is_wanted(tmp_path: Path, loop: str) -> None:
    """It is there, and does nothing; it is started again where it ends; then it is the one that answers."""

    async def test() -> None:
        async with Inside.open(tmp_path, "--http 127.0.0.1:0") as server:
            second = server.second
            assert second is not None
            await second.listen()
            before = set(children(os.getpid()))  # a Java or a server of other tests

            async def standing_by() -> int:
                async with asyncio.timeout(WAIT_SECONDS):
                    while not (new := set(children(os.getpid())) - before):
                        await asyncio.sleep(0.01)
                return new.pop()

            second.prepare()
            await standing_by()
            await second.rest(WAIT_SECONDS)  # Nobody wants it.
            assert set(children(os.getpid())) == before

            second.prepare()
            first = await standing_by()
            os.kill(first, signal.SIGKILL)
            async with asyncio.timeout(WAIT_SECONDS):
                while (pid := await standing_by()) == first:
                    await asyncio.sleep(0.01)
            second.start()
            address = second.address
            assert isinstance(address, TcpAddress)
            assert await asyncio.to_thread(_health, address.port) == {"status": "ok"}
            assert set(children(os.getpid())) - before == {pid}
            await second.rest(WAIT_SECONDS)

    run(loop, test())


def _health(port: int) -> object:
    with Api(port) as api:
        return api.get("/healthz")


def test_a_caller_that_waited_when_it_ended_takes_nothing(tmp_path: Path) -> None:
    """Nobody is there any more who would get what comes, and the next process counts its calls anew."""
    broker = started(tmp_path)
    pid = second_of(broker)
    with Api(broker.ports["http"]) as waiting:
        take = "/v1/queues/q/take?wait=30"
        waiting._connection.request("POST", take)
        with Api(broker.ports["http"]) as api:
            eventually(lambda: len(api.get("/v1/connections")["connections"]) == 1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises((http.client.HTTPException, OSError)):
            waiting._connection.getresponse()
    eventually(lambda: bool(children(broker.pid)) and pid not in children(broker.pid))
    with Api(broker.ports["http"]) as api:
        api.send("q", b"x")
        (message,) = api.post("/v1/queues/q/take")["messages"]
        assert (message["value"], message["attempts"]) == ("x", 1)
        assert api.post("/v1/queues/q/settle", {"ack": [message["id"]]})["ack"] == 1
    assert broker.stop() == 0
