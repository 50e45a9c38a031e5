"""`penstock receive QUEUE --exec CMD`: commands as workers, on a real broker, with real processes."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.client import HttpClient, QueueDetails
from tests.cli.test_messaging import broker as broker
from tests.cli.test_messaging import end, is_running, penstock, start, url
from tests.server.harness import BrokerProcess, until


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@pytest.fixture
def api(broker: BrokerProcess) -> Iterator[HttpClient]:
    with HttpClient(url(broker, "http")) as api:
        yield api


Execute = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def execute(broker: BrokerProcess, queue: str) -> Iterator[Execute]:
    """Starts a worker on the test's queue; one that still runs afterwards is killed."""
    started = []

    def execute(command: str, *options: str) -> "subprocess.Popen[bytes]":
        words = ("receive", queue, "--exec", command, "--url", url(broker, "http"), *options)
        started.append(start(*words))
        return started[-1]

    yield execute
    for process in started:
        process.kill()
        process.communicate()


def waiting(info: QueueDetails) -> int:
    return info.ready + info.held + info.delayed


def test_a_message_is_given_to_a_command(api: HttpClient, queue: str, execute: Execute) -> None:
    headers = {"trace-id": "ab€", "With.Dots": "a\0b"}
    receipt = api.send(queue, b"\x00body\xff", headers=headers)
    command = (
        'cat; echo "$PENSTOCK_QUEUE $PENSTOCK_ID $PENSTOCK_OFFSET $PENSTOCK_ATTEMPTS '
        '$PENSTOCK_HEADER_TRACE_ID $PENSTOCK_HEADER_WITH_DOTS"; echo aside >&2'
    )
    code, out, err = end(execute(command))
    assert (code, err) == (0, b"aside\n")
    assert out == b"\x00body\xff" + f"{queue} {receipt.id} 0 1 ab€ ab\n".encode()
    assert (waiting(api.queue(queue)), api.queue(queue).dead) == (0, 0)


def test_what_the_exit_status_says(api: HttpClient, queue: str, execute: Execute) -> None:
    api.send_many(queue, [b"0", b"100", b"75", b"1"])
    command = 'read status || :; echo first >&2; echo "last of $status" >&2; exit $status'
    lines = execute(command, "--count", "4", "--retry-delay", "3600", "--json")
    code, out, err = end(lines)
    assert code == 0
    assert err.count(b"first\nlast of ") == 4
    told = [json.loads(line) for line in out.splitlines()]
    assert [(it["offset"], it["exit"], it["outcome"], it["attempts"]) for it in told] == [
        (0, 0, "ack", 1),
        (1, 100, "reject", 1),
        (2, 75, "requeue", 1),
        (3, 1, "requeue", 1),
    ]
    (letter,) = api.peek(queue, state="dead")
    assert (letter.value, letter.reason, letter.why) == (b"100", "rejected", "last of 100")
    assert [it.value for it in api.peek(queue, state="delayed")] == [b"75", b"1"]


def test_again_until_it_works(api: HttpClient, queue: str, execute: Execute) -> None:
    api.send(queue, b"x")
    code, _, err = end(execute('[ "$PENSTOCK_ATTEMPTS" = 3 ]', "--count", "3"))
    assert code == 0
    assert err == f"penstock: queue '{queue}': message 0: exit status 1: requeue\n".encode() * 2
    assert waiting(api.queue(queue)) == 0


def test_a_command_that_reads_nothing_of_much(api: HttpClient, queue: str, execute: Execute) -> None:
    api.send(queue, bytes(2 << 20))
    assert end(execute("exit 0")) == (0, b"", b"")
    assert waiting(api.queue(queue)) == 0


def test_jobs_run_at_the_same_time(api: HttpClient, queue: str, execute: Execute, tmp_path: Path) -> None:
    """Three of them wait for each other, and there are never more."""
    api.send_many(queue, [b"%d" % number for number in range(6)])
    command = (
        f"cd {tmp_path}; n=$(cat); : > run.$n; "
        "[ $(ls run.* 2>/dev/null | wc -l) -le 3 ] || : > crowd; : > seen.$n; "
        "until [ $(ls seen.* 2>/dev/null | wc -l) -ge 3 ]; do sleep 0.01; done; rm run.$n"
    )
    assert end(execute(command, "--jobs", "3", "--count", "6")) == (0, b"", b"")
    assert sorted(it.name for it in tmp_path.iterdir()) == [f"seen.{number}" for number in range(6)]
    assert waiting(api.queue(queue)) == 0


def test_the_lease_is_extended_while_a_command_runs(
    api: HttpClient, queue: str, execute: Execute, tmp_path: Path
) -> None:
    api.send(queue, b"x")
    command = f"until [ -e {tmp_path}/go ]; do sleep 0.02; done"
    process = execute(command, "--lease", "1")
    until(lambda: api.queue(queue).held == 1, "the message to be taken")
    assert list(api.consume(queue, timeout=1.5)) == []  # nobody else gets it
    (tmp_path / "go").touch()
    assert end(process) == (0, b"", b"")
    assert waiting(api.queue(queue)) == 0


def test_a_worker_that_is_killed(api: HttpClient, queue: str, execute: Execute, tmp_path: Path) -> None:
    api.send(queue, b"x")
    process = execute(f"until [ -e {tmp_path}/go ]; do sleep 0.02; done", "--lease", "1")
    until(lambda: api.queue(queue).held == 1, "the message to be taken")
    process.kill()
    (message,) = api.consume(queue, count=1)
    assert (message.body, message.attempts) == (b"x", 2)
    message.ack()
    (tmp_path / "go").touch()
    end(process)  # with the command, which nobody has killed


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_sigterm_lets_what_runs_finish(
    api: HttpClient, queue: str, execute: Execute, tmp_path: Path, jobs: str
) -> None:
    api.send_many(queue, [b"a", b"b", b"c"])
    begin = f"touch {tmp_path}/begun-$PENSTOCK_OFFSET"
    command = f"{begin}; until [ -e {tmp_path}/go ]; do sleep 0.02; done; cat"
    process = execute(command, "--follow", "--jobs", jobs)
    until(lambda: len([*tmp_path.glob("begun-*")]) == int(jobs), "commands to begin")
    process.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()
    code, out, err = end(process)
    assert (code, sorted(out.decode()), err) == (0, list("abc")[: int(jobs)], b"")
    info = api.queue(queue)
    assert (info.ready, info.held) == (3 - int(jobs), 0)


def test_an_interrupt_gives_back_what_runs(
    api: HttpClient, queue: str, execute: Execute, tmp_path: Path
) -> None:
    api.send(queue, b"x")
    process = execute(f"echo $$ > {tmp_path}/pid; sleep 1000; :", "--follow")
    until(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()), "the command")
    process.send_signal(signal.SIGINT)
    assert end(process) == (130, b"", b"")
    until(lambda: not is_running(int((tmp_path / "pid").read_text())), "the command to be killed")
    (message,) = api.consume(queue, count=1)
    assert (message.body, message.attempts) == (b"x", 2)
    message.ack()


def test_a_broker_that_is_killed_under_workers(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, "--http", "127.0.0.1:0").start()
    done = tmp_path / "done"
    done.touch()
    where = ("--url", url(broker, "http"))
    worker = start(
        "receive", "q", "--exec", f"cat >> {done}", "--follow", "--jobs", "2", "--lease", "5", *where
    )
    try:
        with HttpClient(url(broker, "http")) as api:
            api.send_many("q", [b"%d\n" % number for number in range(30)])
            until(lambda: "\n10\n" in done.read_text(), "ten to be done")
            broker.kill()
            broker.flags = ("--http", f"127.0.0.1:{broker.ports['http']}")
            broker.start()
            until(lambda: waiting(api.queue("q")) == 0, "everything to be done")
        worker.send_signal(signal.SIGTERM)
        assert end(worker)[0] == 0
        assert {int(line) for line in done.read_text().split()} == set(range(30))
    finally:
        worker.kill()
        broker.kill()


def test_nobody_there_and_nothing_there(broker: BrokerProcess, queue: str) -> None:
    ended = penstock("receive", queue, "--exec", "cat", "--timeout", "0.1", "--url", url(broker, "http"))
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert ended.stderr == f"penstock: queue '{queue}': no message within 0.1 s\n".encode()
    ended = penstock("receive", queue, "--exec", "cat", "--wait", "0", "--url", "http://127.0.0.1:1")
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert ended.stderr.startswith(b"penstock: no http broker could be reached")
    assert ended.stderr.count(b"\n") == 1
