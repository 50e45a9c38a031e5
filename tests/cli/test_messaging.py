"""`send`, `receive`, `request`, `reply` and `broadcast`, as people and scripts run them, on a real broker."""

import base64
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from penstock.cli import messaging
from penstock.cli.main import main
from penstock.client import HttpClient, PhpmqClient, RqClient
from tests.server.harness import BrokerProcess, until
from tests.warm import Warm

SECONDS = 20
COMMAND = [sys.executable, "-m", "penstock"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("broker"), "--http", "127.0.0.1:0").start()
    yield process
    assert process.stop() == 0
    assert "Traceback" not in process.log()


def url(broker: BrokerProcess, protocol: str) -> str:
    return f"{protocol}://127.0.0.1:{broker.ports[protocol]}"


def penstock(*arguments: str, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    return Warm.get(pages=False).run(arguments, {**ENVIRONMENT, **environment}, stdin, SECONDS)


def succeed(*arguments: str, stdin: bytes = b"") -> bytes:
    """What a command that must succeed, in silence, writes to standard output."""
    ended = penstock(*arguments, stdin=stdin)
    assert (ended.returncode, ended.stderr) == (0, b"")
    return ended.stdout


def start(*arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    )


def end(process: "subprocess.Popen[bytes]") -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


# --- send and receive ----------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["phpmq", "sspq", "rq", "http"])
def test_send_and_receive(broker: BrokerProcess, protocol: str) -> None:
    where = ("--url", url(broker, protocol), "--via", protocol)
    queue = "default" if protocol == "sspq" else f"both-ways-{protocol}"
    assert succeed("send", queue, "first", *where) == b""
    sent = json.loads(succeed("send", queue, "-", "--json", *where, stdin=b"\x00\xff\n"))
    assert sent == {"queue": queue, "via": protocol, "sent": 1, "receipts": True}
    if protocol != "sspq":
        assert succeed("receive", queue, "--no-ack", "--count", "2", *where) == b"first\n\x00\xff\n\n"
    assert succeed("receive", queue, *where) == b"first\n"
    assert succeed("receive", queue, "--raw", *where) == b"\x00\xff\n"
    ended = penstock("receive", queue, "--timeout", "0.1", *where)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert ended.stderr == f"penstock: queue '{queue}': no message within 0.1 s\n".encode()


def test_send_over_http(broker: BrokerProcess) -> None:
    """The usual way to send; whoever receives does so over another protocol."""
    where, elsewhere = ("--url", url(broker, "http")), ("--url", url(broker, "phpmq"))
    assert succeed("send", "over http", "first", "--ttl", "90", "--retries", "7", *where) == b""
    sent = json.loads(succeed("send", "over http", "-", "--json", *where, stdin=b"\x00\xff\n"))
    assert sent == {"queue": "over http", "via": "http", "sent": 1, "receipts": True}
    out = succeed("send", "over http", "--lines", "--count", "1001", "--json", *where, stdin=b"a\nb")
    assert json.loads(out)["sent"] == 2002
    with HttpClient(url(broker, "http")) as api:
        first, second, *others = api.peek("over http", limit=5000)
        assert first.expires is not None
        assert (first.value, first.expires - first.time, first.retries) == (
            b"first",
            timedelta(seconds=90),
            7,
        )
        assert (second.value, second.ttl, second.retries) == (b"\x00\xff\n", None, None)
        assert [message.value for message in others] == [b"a"] * 1001 + [b"b"] * 1001
    assert succeed("receive", "over http", *elsewhere) == b"first\n"


def test_delays_and_headers(broker: BrokerProcess) -> None:
    where = ("--url", url(broker, "http"), "--via", "http")
    succeed("send", "terms", "x", "--delay", "3600", "--header", "Trace=a=b", "--header", "n=1", *where)
    shown = succeed("peek", "terms", "--state", "delayed", "--url", url(broker, "http")).splitlines()
    assert re.fullmatch(rb" +0  delayed until [-0-9T:.]+Z  .* x", shown[1])
    (line,) = succeed("peek", "terms", "--json", "--url", url(broker, "http")).splitlines()
    assert json.loads(line)["headers"] == {"Trace": "a=b", "n": "1"}
    succeed("send", "terms", "y", "--header", "a=", *where)
    received = json.loads(succeed("receive", "terms", "--json", *where))
    assert (received["value"], received["headers"], received["attempts"]) == ("y", {"a": ""}, 1)
    assert (received["queue"], received["offset"], received["reason"]) == ("terms", 1, None)
    ended = penstock("receive", "terms", "--timeout", "0.1", *where)
    assert (ended.returncode, ended.stdout) == (1, b"")


def test_tokens(tmp_path: Path) -> None:
    config = tmp_path / "tokens.toml"
    config.write_text('[[http.tokens]]\nname = "a"\nrole = "operate"\ntoken = "0123456789abcdef0123"\n')
    broker = BrokerProcess(tmp_path, "--http", "127.0.0.1:0", "--config", str(config)).start()
    try:
        where = ("--url", url(broker, "http"))
        assert succeed("send", "q", "x", "--token", "0123456789abcdef0123", *where) == b""
        assert penstock("send", "q", "x", *where, PENSTOCK_TOKEN="0123456789abcdef0123").returncode == 0
        ended = penstock("send", "q", "x", *where)
        assert (ended.returncode, ended.stderr) == (
            1,
            b"penstock: send a token: Authorization: Bearer TOKEN (--token-file, or PENSTOCK_TOKEN)\n",
        )
        ended = penstock("send", "q", "x", "--token", "wrong one", *where)
        assert ended.returncode == 2
        assert b"token has a character that no token has" in ended.stderr
        with HttpClient(url(broker, "http"), token="0123456789abcdef0123") as api:
            assert api.queue("q").ready == 2
    finally:
        broker.kill()


def test_what_the_broker_refuses(broker: BrokerProcess) -> None:
    ended = penstock("send", "q.dead", "x", "--url", url(broker, "http"))
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert b"queue 'q.dead' cannot be sent to" in ended.stderr
    assert ended.stderr.count(b"\n") == 1


def test_lines_and_copies_and_json(broker: BrokerProcess) -> None:
    where = ("--url", url(broker, "phpmq"))
    out = succeed(
        "send", "lines", "--lines", "--count", "2", "--ttl", "90", "--json", *where, stdin=b"a\n\nb"
    )
    assert json.loads(out)["sent"] == 6
    succeed("send", "lines", "c\rC\nd\r\n", "--lines", *where)
    with PhpmqClient(url(broker, "phpmq")) as mq:
        mq.send("lines", b"\xff\n")
    lines = succeed("receive", "lines", "--count", "100", "--timeout", "0.2", "--json", *where).splitlines()
    received: list[dict[str, Any]] = [json.loads(line) for line in lines]
    values = [one.get("value", one.get("value_base64")) for one in received]
    assert values == ["a", "a", "", "", "b", "b", "c\rC", "d\r", base64.b64encode(b"\xff\n").decode()]
    assert all(60 < one["ttl"] <= 90 for one in received[:6])
    assert [one["ttl"] for one in received[6:]] == [None] * 3
    assert all(one["queue"] == "lines" and re.fullmatch("[0-9a-f]{32}", one["id"]) for one in received)


def test_what_was_stored_before_an_error(tmp_path: Path) -> None:
    """Lines go in calls of a thousand; an error counts within one of them."""
    config = tmp_path / "bounded.toml"
    config.write_text('[queue."small"]\nmax-bytes = 1500\n')
    broker = BrokerProcess(tmp_path, "--http", "127.0.0.1:0", "--config", str(config)).start()
    try:
        ended = penstock("send", "small", "x", "--count", "3000", "--url", url(broker, "http"))
        assert ended.returncode == 1
        assert ended.stderr.endswith(b"; before this call, 1,000 were stored\n")
        with HttpClient(url(broker, "http")) as api:
            assert api.queue("small").ready == 1000
    finally:
        broker.kill()


def test_lines_are_sent_as_they_come(broker: BrokerProcess) -> None:
    process = subprocess.Popen(
        [*COMMAND, "send", "slow", "--lines", "--url", url(broker, "phpmq")],
        stdin=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    assert process.stdin is not None
    process.stdin.write(b"early\nla")
    process.stdin.flush()
    with PhpmqClient(url(broker, "phpmq")) as mq:
        messages = mq.consume("slow", timeout=SECONDS)
        assert next(messages).body == b"early"
        process.stdin.write(b"te\n")
        process.stdin.close()
        assert next(messages).body == b"late"
    assert process.wait(SECONDS) == 0


def test_retries_become_dead_letters(broker: BrokerProcess) -> None:
    where = ("--url", url(broker, "rq"))
    succeed("send", "fragile", "x", "--retries", "0", *where)
    assert succeed("receive", "fragile", "--no-ack", *where) == b"x\n"
    assert succeed("receive", "fragile.dead", *where) == b"x\n"


@pytest.mark.parametrize("protocol", ["phpmq", "http"])
def test_follow_until_interrupted(broker: BrokerProcess, protocol: str) -> None:
    queue = f"followed-{protocol}"
    process = start("receive", queue, "--follow", "--url", url(broker, protocol), "--via", protocol)
    assert process.stdout is not None
    with PhpmqClient(url(broker, "phpmq")) as mq:
        mq.send(queue, b"one")
        assert process.stdout.readline() == b"one\n"
        mq.send(queue, b"two")
        assert process.stdout.readline() == b"two\n"
        process.send_signal(signal.SIGINT)
        assert end(process) == (130, b"", b"")
        # What was written was acknowledged, but for the last one, whose turn may not have come.
        left = [message.body for message in mq.consume(queue, timeout=0.1)]
        assert left in ([], [b"two"])


@pytest.mark.parametrize("protocol", ["phpmq", "rq", "http"])
def test_what_could_not_be_written_is_not_acknowledged(broker: BrokerProcess, protocol: str) -> None:
    queue = f"broken-pipe-{protocol}"
    with RqClient(url(broker, "rq")) as node:
        node.send(queue, b"kept")
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.Popen(
        [*COMMAND, "receive", queue, "--url", url(broker, protocol), "--via", protocol],
        stdout=write_end,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    os.close(write_end)
    assert end(process)[::2] == (141, b"")
    with PhpmqClient(url(broker, "phpmq")) as mq:
        assert [message.body for message in mq.consume(queue, count=1, timeout=SECONDS)] == [b"kept"]


def test_a_terminal_gets_text_that_cannot_hurt(broker: BrokerProcess) -> None:
    with PhpmqClient(url(broker, "phpmq")) as mq:
        mq.send("terminal", b"red \x1b[31m\xff\nline")
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "receive", "terminal", "--url", url(broker, "phpmq")], stdout=inner, env=ENVIRONMENT
    )
    os.close(inner)
    assert process.wait(SECONDS) == 0
    assert os.read(outer, 1000) == b"red \\x1b[31m\\xff\r\nline\r\n"
    os.close(outer)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_a_terminal_only(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    screen = Screen()
    monkeypatch.setattr(messaging, "PROGRESS_SECONDS", 0.0)  # whatever takes any time at all is shown
    monkeypatch.setattr(sys, "stderr", screen)
    assert main(["send", "many", "x", "--count", "3000", "--url", url(broker, "phpmq")]) == 0
    assert bool(re.match("\r[0-9,]+ messages sent", screen.getvalue())) is is_terminal


# --- request, reply, broadcast -------------------------------------------------------------------------


def test_request_and_reply(broker: BrokerProcess) -> None:
    where = ("--url", url(broker, "rq"))
    replying = start("reply", "upper", "--exec", "tr a-z A-Z", "--count", "2", "--json", *where)
    assert succeed("request", "upper", "hello", *where) == b"HELLO\n"
    answer = succeed("request", "upper", "-", "--raw", *where, stdin=b"\x00a\xff")
    assert answer == b"\x00A\xff"
    code, out, err = end(replying)
    assert (code, err) == (0, b"")
    assert [json.loads(line) for line in out.splitlines()] == [
        {"queue": "upper", "request_bytes": 5, "answer_bytes": 5},
        {"queue": "upper", "request_bytes": 3, "answer_bytes": 3},
    ]


def test_a_request_that_nobody_answers(broker: BrokerProcess) -> None:
    ended = penstock("request", "nobody", "hello", "--timeout", "0.2", "--url", url(broker, "rq"))
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert b"no answer within 0.2 s; no consumer had taken it" in ended.stderr


def test_a_command_that_fails_gives_the_request_back(broker: BrokerProcess, tmp_path: Path) -> None:
    where = ("--url", url(broker, "rq"))
    once = f"mkdir {tmp_path}/first 2>/dev/null && exit 3; cat"
    replying = start("reply", "fails-once", "--exec", once, "--count", "1", *where)
    assert json.loads(succeed("request", "fails-once", "x", "--json", *where)) == {
        "queue": "fails-once",
        "value": "x",
    }
    code, out, err = end(replying)
    assert (code, out) == (0, b"")
    assert err.startswith(
        b"penstock: queue 'fails-once': the handler failed; the request is given out again: "
    )
    assert err.endswith(b"exit status 3\n")


def test_an_answer_of_nothing_counts(broker: BrokerProcess) -> None:
    """`--count 1` must not take the whole queue where the command does not even start."""
    with HttpClient(url(broker, "http")) as mq:
        mq.send_many("counted", [b"1", b"2", b"3"])
        arguments = ("--exec", "exit 1", "--on-failure", "empty", "--count", "1", "--json")
        ended = penstock("reply", "counted", *arguments, "--url", url(broker, "rq"))
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout) == {"queue": "counted", "request_bytes": 1, "answer_bytes": 0}
        assert [it.value for it in mq.peek("counted", state="ready")] == [b"2", b"3"]


def test_a_command_that_fails_can_answer_with_nothing(broker: BrokerProcess) -> None:
    where = ("--url", url(broker, "rq"))
    replying = start("reply", "fails", "--exec", "echo no; exit 1", "--on-failure", "empty", *where)
    assert succeed("request", "fails", "x", "--raw", *where) == b""
    replying.send_signal(signal.SIGINT)
    code, out, err = end(replying)
    assert (code, out) == (130, b"")
    assert b"exit status 1" in err


@pytest.mark.parametrize("end_of_shell", ["; wait", ""])
def test_a_command_that_takes_too_long_is_killed_with_its_children(
    broker: BrokerProcess, tmp_path: Path, end_of_shell: str
) -> None:
    where = ("--url", url(broker, "rq"))
    command = f"sleep 1000 & echo $! > {tmp_path}/child{end_of_shell}"
    replying = start("reply", "slow", "--exec", command, "--timeout", "0.3", "--on-failure", "empty", *where)
    assert succeed("request", "slow", "x", "--raw", *where) == b""
    child = int((tmp_path / "child").read_text())
    until(lambda: not is_running(child), "the child to be killed")
    replying.send_signal(signal.SIGINT)
    code, _, err = end(replying)
    assert code == 130
    assert b"no end within 0.3 s, killed" in err


@pytest.mark.parametrize("on_failure", ["retry", "empty"])
def test_an_answer_is_given_where_nobody_hears_of_it(broker: BrokerProcess, on_failure: str) -> None:
    """The reader of our output is gone, and with it we go; but the command has not failed."""
    queue, where = f"unheard-{on_failure}", ("--url", url(broker, "rq"))
    replying = start("reply", queue, "--exec", "cat", "--json", "--on-failure", on_failure, *where)
    assert replying.stdout is not None
    replying.stdout.close()
    assert succeed("request", queue, "x", "--raw", *where) == b"x"
    assert replying.wait(SECONDS) == 141
    assert replying.stderr is not None
    with replying.stderr as said:
        assert said.read() == b""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_broadcast(broker: BrokerProcess) -> None:
    heard: Queue[bytes] = Queue()
    with RqClient(url(broker, "rq")) as node:
        serving = node.serve("news", lambda _request: None, on_broadcast=heard.put)
        assert serving.wait_turn(SECONDS)
        out = succeed("broadcast", "news", "extra", "--json", "--url", url(broker, "rq"))
        assert json.loads(out) == {"queue": "news", "via": "rq", "broadcast_bytes": 5}
        assert heard.get(timeout=SECONDS) == b"extra"


# --- one address, wrong ports, pipes -------------------------------------------------------------------


def test_one_address_of_http_serves_every_command(broker: BrokerProcess) -> None:
    where = url(broker, "http")
    for via in ("http", "phpmq", "rq"):
        ended = penstock("send", "one-address", via, "--via", via, "--json", PENSTOCK_URL=where)
        assert (ended.returncode, json.loads(ended.stdout)["via"]) == (0, via), ended.stderr
    ended = penstock("receive", "one-address", "--count", "2", PENSTOCK_URL=where)
    assert ended.stdout == b"http\nphpmq\n"
    assert penstock("receive", "one-address", "--via", "rq", PENSTOCK_URL=where).stdout == b"rq\n"
    ended = penstock("send", "one-address", "x", "--via", "sspq", PENSTOCK_URL=where)
    assert ended.returncode == 1
    assert b"no listener for sspq and this queue" in ended.stderr  # that is for another one
    assert penstock("broadcast", "one-address", "to nobody", PENSTOCK_URL=where).returncode == 0
    assert penstock("queues", PENSTOCK_URL=where).returncode == 0


def test_of_several_addresses_the_one_that_answers_is_where_listeners_are(tmp_path: Path) -> None:
    everywhere = BrokerProcess(
        tmp_path, "--sspq", "off", "--phpmq", "0.0.0.0:0", "--http", "127.0.0.1:0"
    ).start()
    try:
        where = f"http://[::1]:1,127.0.0.1:{everywhere.ports['http']}"
        assert penstock("send", "several", "x", "--url", where).returncode == 0
        ended = penstock("receive", "several", "--url", where, "--wait", "0")
        assert (ended.returncode, ended.stdout) == (0, b"x\n"), ended.stderr
    finally:
        everywhere.stop()


@pytest.mark.parametrize(
    ("command", "redirected", "code", "said"),
    [
        ("receive", ">&-", 1, "penstock: standard output is closed, so that no message was taken\n"),
        ("peek", ">/dev/full", 1, "penstock: standard output: No space left on device\n"),
        ("peek", ">&-", 0, ""),
        (
            "send",
            "<&-",
            1,
            "penstock: standard input is empty, and nothing was sent; for an empty message give ''\n",
        ),
    ],
)
def test_standard_streams_that_are_closed_or_full(
    broker: BrokerProcess, command: str, redirected: str, code: int, said: str
) -> None:
    with HttpClient(url(broker, "http")) as mq:
        mq.send("streams", b"kept")
        line = f"{sys.executable} -m penstock {command} streams --url {url(broker, 'http')} {redirected}"
        ended = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=SECONDS)
        assert (ended.returncode, ended.stderr) == (code, said)
        assert {it.state for it in mq.peek("streams")} == {"ready"}


WIRES = ("phpmq", "sspq", "rq")
PAIRS = [(ours, theirs) for ours in WIRES for theirs in (*WIRES, "http") if ours != theirs]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.long
def test_the_port_of_another_protocol(broker: BrokerProcess, ours: str, theirs: str) -> None:
    where = ("--url", f"{ours}://127.0.0.1:{broker.ports[theirs]}")
    for command in (("send", "astray", "x"), ("receive", "astray")):
        ended = penstock(*command, *where)
        assert (ended.returncode, ended.stdout) == (1, b"")
        assert b"is this the right port?" in ended.stderr


@pytest.mark.parametrize("theirs", WIRES)
def test_http_at_the_port_of_another_protocol(broker: BrokerProcess, theirs: str) -> None:
    ended = penstock("send", "astray", "x", "--url", f"http://127.0.0.1:{broker.ports[theirs]}")
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert b"is this the right port?" in ended.stderr


@pytest.mark.parametrize("protocol", ["phpmq", "rq", "http"])
def test_a_pipe_is_acknowledged_as_far_as_it_is_read(broker: BrokerProcess, protocol: str) -> None:
    queue = f"piped-{protocol}"
    succeed(
        "send", queue, "--lines", "--url", url(broker, "rq"), stdin=b"\n".join(b"%d" % n for n in range(50))
    )
    where = f"--url {url(broker, protocol)} --via {protocol}"
    line = f"{' '.join(COMMAND)} receive {queue} --follow {where} | head -3"
    ended = subprocess.run(
        ["sh", "-c", line], capture_output=True, check=False, timeout=SECONDS, env=ENVIRONMENT
    )
    assert ended.stdout == b"0\n1\n2\n"
    with PhpmqClient(url(broker, "phpmq")) as mq:
        left = [message.body for message in mq.consume(queue, timeout=1)]
    if protocol == "http":  # what was given back stands behind the others
        left.sort(key=int)
    assert left == [b"%d" % number for number in range(3, 50)]


def test_a_reader_that_has_gone_leaves_its_messages(broker: BrokerProcess) -> None:
    succeed("send", "unread", "--lines", "--url", url(broker, "rq"), stdin=b"a\nb\n")
    receiving = start("receive", "unread", "--count", "2", "--url", url(broker, "phpmq"))
    assert receiving.stdout is not None
    assert receiving.stdout.read(2) == b"a\n"
    receiving.stdout.close()
    assert receiving.stderr is not None
    with receiving.stderr:
        assert receiving.wait(SECONDS) == 141
    with PhpmqClient(url(broker, "phpmq")) as mq:
        assert [message.body for message in mq.consume("unread", timeout=1)] == [b"b"]


def test_what_begins_with_a_dash(broker: BrokerProcess) -> None:
    where = ("--url", url(broker, "phpmq"))
    assert succeed("send", *where, "--", "-dash", "-x") == b""
    assert succeed("receive", *where, "--", "-dash") == b"-x\n"


def test_an_empty_standard_input_is_no_message(broker: BrokerProcess) -> None:
    where = ("--url", url(broker, "phpmq"))
    ended = penstock("send", "empty", *where)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert b"standard input is empty, and nothing was sent" in ended.stderr
    assert succeed("send", "empty", "", *where) == b""
    assert succeed("receive", "empty", *where) == b"\n"


def test_a_limit_names_the_way_that_has_room(broker: BrokerProcess) -> None:
    large = bytes(20 << 20)
    ended = penstock("send", "large", "--url", url(broker, "http"), stdin=large)
    assert ended.returncode == 1
    assert b"--via rq" in ended.stderr
    ended = penstock("send", "large", "--url", url(broker, "http"), "--via", "rq", stdin=large)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_command_that_starts_before_its_broker(tmp_path: Path) -> None:
    late = BrokerProcess(tmp_path).start()
    late.stop()
    sending = start("send", "early", "x", "--url", url(late, "phpmq"))
    assert sending.stderr is not None
    assert b"no phpmq broker yet (127.0.0.1" in sending.stderr.readline()
    late.start()
    assert end(sending)[0] == 0
    late.stop()


# --- where, and what is refused ------------------------------------------------------------------------


def test_the_url_of_the_environment(broker: BrokerProcess) -> None:
    ended = penstock("send", "environment", "x", "--json", PENSTOCK_URL=url(broker, "rq"))
    assert json.loads(ended.stdout)["via"] == "rq"
    ended = penstock("receive", "environment", "--url", url(broker, "phpmq"), PENSTOCK_URL="rq://nowhere:1")
    assert ended.stdout == b"x\n"


@pytest.mark.parametrize("protocol", ["phpmq", "http"])
def test_nobody_there(protocol: str) -> None:
    ended = penstock("send", "q", "x", "--url", f"{protocol}://127.0.0.1:1", "--wait", "0")
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert ended.stderr.startswith(
        b"penstock: no %b broker could be reached (1 attempt): 127.0.0.1:1: Conn" % protocol.encode()
    )
    assert ended.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (
            "send q x --via rq --url phpmq://a",
            "--url is phpmq://a, but this needs rq; use --url rq://HOST:PORT",
        ),
        ("request q x --url phpmq://a", "--url is phpmq://a, but this needs rq; use --url rq://HOST:PORT"),
        ("send q x --via rq --ttl 5", "--ttl: rq has no word for it; use --via http or phpmq"),
        (
            "send q x --via phpmq --retries 5",
            "--retries: phpmq has no word for it; use --via http or sspq or rq",
        ),
        ("send q x --count 0", "--count 0: use at least 1"),
        ("receive q --count 0", "--count 0: use at least 1"),
        ("receive q --timeout -1", "--timeout: '-1' is not a number of seconds from 0 on"),
        ("receive q --timeout nan", "--timeout: 'nan' is not a number of seconds from 0 on"),
        ("send q x --wait=-1", "--wait: '-1' is not a number of seconds from 0 on"),
        ("receive q --via sspq --no-ack --count 2", "--no-ack over sspq shows one message"),
        ("request q x --timeout 0", "--timeout 0: use a number of seconds over 0"),
        ("reply q --exec cat --max 0", "--max 0: use a number over 0"),
        ("reply q", "the following arguments are required: --exec"),
        ("send q x --via rq --delay 5", "--delay: rq has no word for it; use --via http"),
        ("send q x --via phpmq --header a=b", "--header: phpmq has no word for it; use --via http"),
        ("send q x --header a", "--header a: use NAME=VALUE"),
        ("receive q --via rq --exec cat", "--exec: rq has no word for it; use --via http"),
        ("receive q --lease 5", "--lease: phpmq has no word for it; use --via http"),
        ("receive q --jobs 2", "--jobs and --retry-delay are for --exec"),
        ("receive q --exec cat --jobs 0", "--jobs 0: use at least 1"),
        ("receive q --exec cat --retry-delay -1", "delay is -1.0: use seconds from 0"),
        ("receive q --exec cat --no-ack", "use it without --no-ack and --raw"),
    ],
)
def test_misuse(
    line: str, complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PENSTOCK_URL", raising=False)
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert complaint in err


def test_the_environment_is_not_overruled_in_silence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_URL", "phpmq://broker.example")
    assert main(["request", "q", "x"]) == 2
    assert "PENSTOCK_URL is phpmq://broker.example, but this needs rq" in capsys.readouterr().err
