"""RabbitMQ as a source, and docs/import.md as one session, for which all the servers run."""

import os
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.client import HttpClient
from penstock.importing.amqp import Amqp
from penstock.importing.source import PASSWORD_VARIABLE
from tests.importing.conftest import Command, Peer, Stalk
from tests.importing.dying import STEPS, killed_after
from tests.server.harness import ROOT, WAIT_SECONDS, BrokerProcess

PAGE = (ROOT / "docs" / "import.md").read_text(encoding="utf-8")
BODIES = [b"message %04d" % number for number in range(150)]
BATCH = 64

Publish = Callable[..., str]


@pytest.fixture(scope="module")
def channel(rabbitmq: int) -> Iterator[Any]:
    import pika

    with pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", rabbitmq, heartbeat=0)) as connection:
        yield connection.channel()


@pytest.fixture
def publish(rabbitmq: int, channel: Any) -> Publish:
    """Puts messages into a queue; its URL."""
    import pika

    def publish(queue: str, bodies: list[bytes], *, named: bool = False, **properties: Any) -> str:
        channel.queue_declare(queue, durable=True)
        for number, body in enumerate(bodies):
            name = f"id-{number}" if named else None
            channel.basic_publish("", queue, body, pika.BasicProperties(message_id=name, **properties))
        return f"amqp://127.0.0.1:{rabbitmq}/%2F/{queue}"

    return publish


@pytest.mark.long
def test_headers_properties_and_expiration(publish: Publish, command: Command, broker: BrokerProcess) -> None:
    url = publish(
        "dressed",
        [b"\x00\xff"],
        headers={"trace": "abc", "tries": 3, "x": {"deep": [1]}},
        content_type="text/plain",
        priority=7,
        expiration="600500",
        named=True,
    )
    assert command(url, "--dry-run")[1] == f"{url}: 1 ready; nothing was taken\n"
    assert command(url)[1] == f"1 messages from {url} are in 'dressed'\n"
    with HttpClient(f"http://127.0.0.1:{broker.ports['http']}") as mq:
        (message,) = mq.peek("dressed")
        assert message.value == b"\x00\xff"
        assert message.ttl is not None
        assert 500 < message.ttl <= 601
        assert message.headers == {
            "amqp-content-type": "text/plain",
            "amqp-priority": "7",
            "amqp-message-id": "id-0",
            "trace": "abc",
            "tries": "3",
            "x": '{"deep": [1]}',
        }
        url = publish("bare", [b"plain"], headers={f"h{number}": "" for number in range(65)})
        code, _, err = command(url)
        assert (code, len(err.splitlines())) == (1, 1)
        assert "65 headers; a message has at most 64" in err
        assert command(f"{url}?headers=no")[0] == 0
        assert mq.peek("bare")[0].headers == {}


@pytest.mark.parametrize("step", STEPS)
def test_killed_after_any_step_it_goes_on(
    step: str, publish: Publish, command: Command, stored: Callable[[str], list[bytes]], tmp_path: Path
) -> None:
    url = publish(f"named-{step}", BODIES, named=True)
    killed_after(step, [url, "--journal", str(tmp_path / "journal")])
    code, out, err = command(url)
    assert code == 0, (out, err)
    assert Counter(stored(f"named-{step}")) == Counter(BODIES)


def test_without_a_name_what_was_stored_comes_again(
    publish: Publish, command: Command, stored: Callable[[str], list[bytes]], tmp_path: Path
) -> None:
    url = publish("nameless", BODIES)
    killed_after("stored", [url, "--journal", str(tmp_path / "journal")])
    assert command(url)[0] == 0
    counts = Counter(stored("nameless"))
    assert counts.keys() == set(BODIES)
    assert len(BODIES) < sum(counts.values()) <= len(BODIES) + BATCH


def test_a_connection_that_is_lost_with_messages_that_are_stored(
    publish: Publish, command: Command, stored: Callable[[str], list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = publish("cut", BODIES, named=True)
    settle = Amqp.settle
    calls = 0

    def cut(self: Amqp, messages: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            self._connection._impl._transport._sock.shutdown(socket.SHUT_RDWR)
        settle(self, messages)

    monkeypatch.setattr(Amqp, "settle", cut)
    code, out, err = command(url)
    assert (code, "connecting again" in err, "more had been stored before" in out) == (0, True, True), err
    assert stored("cut") == BODIES


def test_equal_names_are_other_messages_unless_they_come_again(
    publish: Publish, command: Command, stored: Callable[[str], list[bytes]]
) -> None:
    url = publish("equal", [b"tick"] * 300, correlation_id="c")
    assert command(url)[0] == 0
    assert stored("equal") == [b"tick"] * 300


def test_rabbitmq_says_no(
    rabbitmq: int, publish: Publish, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = f"127.0.0.1:{rabbitmq}"
    for url, what in {
        f"amqp://{here}/%2F/nothing": "NOT_FOUND - no queue 'nothing' in vhost '/'",
        f"amqp://{here}/nowhere/jobs": "vhost nowhere not found",
        f"amqp://joe:hidden@{here}/jobs": f"refuses user 'joe'; give the password in {PASSWORD_VARIABLE}",
    }.items():
        code, out, err = command(url)
        assert (code, out, len(err.splitlines())) == (1, "", 1)
        assert what in err
        assert "hidden" not in err
    monkeypatch.setenv(PASSWORD_VARIABLE, "wrong")
    assert "refuses user 'guest'" in command(publish("closed", [b"a"]))[2]
    monkeypatch.setenv(PASSWORD_VARIABLE, "guest")
    assert command(publish("closed", []))[0] == 0


@pytest.mark.long
def test_the_page_is_a_session_that_says_what_it_shows(
    broker: BrokerProcess,
    redis_peer: Peer,
    beanstalkd: Peer,
    stalk: Callable[[str], Stalk],
    publish: Publish,
    rabbitmq: int,
    tmp_path: Path,
) -> None:
    publish("invoices", [b"one", b"two"])
    mails = stalk("mails")
    mails.put([b"buried"])
    mails.bury()
    mails.put([b"now"])
    mails.put([b"later"], delay=600)
    ports = {
        "6379": redis_peer.port,
        "11300": beanstalkd.port,
        "5672": rabbitmq,
        "9180": broker.ports["http"],
    }
    ports |= {"9100": broker.ports["phpmq"], "8888": broker.ports["sspq"], "13700": broker.ports["rq"]}
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    typed = [part.partition("\n") for part in re.split(r"^\$ ", "".join(blocks), flags=re.MULTILINE)[1:]]
    assert len(typed) > 10
    for command, _, wanted in typed:
        for usual, port in ports.items():
            command = re.sub(rf"(127\.0\.0\.1[: ]|-p ){usual}\b", rf"\g<1>{port}", command)
            wanted = wanted.replace(f"127.0.0.1:{usual}", f"127.0.0.1:{port}")
        done = subprocess.run(
            [
                "bash",
                "-euo",
                "pipefail",
                "-c",
                f'penstock() {{ "{sys.executable}" -m penstock "$@"; }}\n{command}',
            ],
            env={
                **os.environ,
                "PENSTOCK_URL": f"http://127.0.0.1:{broker.ports['http']}",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "XDG_STATE_HOME": str(tmp_path),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_SECONDS,
        )
        assert done.returncode == 0, (command, done.stderr)
        shown = re.escape(wanted).replace("…", '[^"]*')
        assert re.fullmatch(shown, done.stdout.replace("\r", "")), (command, done.stdout)


def test_the_bounds_are_those_of_the_code() -> None:
    from penstock.importing.wires import Rq, Sspq

    assert f"at most {Amqp.batch_max} messages" in PAGE
    assert f"at most {Sspq.batch_max} messages" in PAGE
    assert Sspq.batch_max == Rq.batch_max
