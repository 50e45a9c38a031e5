"""With no right in NATS but those that are listed, a front-end does all that it must; others may not."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import HttpClient, PhpmqClient
from penstock.cluster.records import LEASE
from penstock.log.jetstream.credentials import read_credentials
from penstock.log.jetstream.errors import JetStreamError, NotAllowed
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.options import LinkOptions
from penstock.log.jetstream.rights import Rights, rights_of_front_end, rights_of_reader, user_block
from penstock.log.jetstream.servers import parse_servers
from tests.cluster.processes import Site, site
from tests.server.harness import ROOT, WAIT_SECONDS, until

NAMES = LogNames()
USERS = {
    "front": rights_of_front_end(NAMES),
    "reader": rights_of_reader(NAMES),
    "admin": Rights({">": ""}, {">": ""}),
}
PASSWORD = "5d2f0c6b1a"
BODY = bytes(64 << 10)
COUNT = 60
"""Messages of several segments."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("rights")
    (folder / "penstock.toml").write_text('[queue."*"]\nretention-seconds = 0\n')
    users = "".join(user_block(user, PASSWORD, rights) for user, rights in USERS.items())
    for user in USERS:
        (folder / f"{user}.user").write_text(f"{user}:{PASSWORD}\n")
    flags = ("--config", str(folder / "penstock.toml"), "--strict", "--log-segment-bytes", str(1 << 20))
    with site(
        folder,
        flags=(*flags, "--cluster-credentials", str(folder / "front.user")),
        settings=f"authorization {{\n  users: [\n{users}  ]\n}}\n",
    ) as running:
        yield running


def link_as(running: Site, user: str, answers: str = "_INBOX") -> LinkThread:
    credentials = read_credentials(running.nodes.folder.parent / f"{user}.user")
    return LinkThread.open(
        parse_servers(",".join(running.nodes.urls)), LinkOptions(credentials=credentials, answers=answers)
    )


def send_and_take(running: Site, queue: str, count: int) -> None:
    """In over HTTP at one front-end, out at the other."""
    leader, follower = running.leader(), running.follower()
    for sender, taker in ((leader, follower), (follower, leader)):
        with HttpClient(sender.url("http")) as http, PhpmqClient(taker.url("phpmq")) as phpmq:
            for _ in range(count):
                http.send(queue, BODY)
            held = list(phpmq.consume(queue, count, count=count, timeout=WAIT_SECONDS))
            assert [message.body for message in held] == [BODY] * count
            assert phpmq.ack_many(held) == count


def test_two_front_ends_do_all_that_they_must(running: Site) -> None:
    leader, follower = running.leader(), running.follower()
    assert {check["level"] for check in leader.ask("/v1/engine")["cluster"]["checks"]} == {"ok"}
    send_and_take(running, "orders", COUNT)
    admin = link_as(running, "admin")
    try:

        def given_up() -> bool:
            state = admin.ask(admin.api.stream(NAMES.stream))["state"]
            return bool(state["first_seq"] > 1 or state.get("num_deleted"))

        until(given_up, "retention to take something out of the stream")
        claim = admin.ask(admin.api.last(NAMES.state_stream, NAMES.state(LEASE)))
        assert claim is not None
        key = admin.ask(admin.api.last(NAMES.key_stream, NAMES.key))
        assert key is not None
        assert (len(key.payload), key.payload.hex() in claim.payload.decode()) == (32, False)
        assert b"secret" not in claim.payload
    finally:
        admin.close()
    with HttpClient(follower.url("http")) as http:
        http.send("kept", b"one")
    leader.kill()
    until(lambda: running.leader(follower) is follower, "the other to lead")
    with PhpmqClient(follower.url("phpmq")) as phpmq:
        (message,) = phpmq.consume("kept", 1, count=1, timeout=WAIT_SECONDS)
        assert message.body == b"one"
        message.ack()
    running.start_fronts()
    send_and_take(running, "again", 3)
    for front in running.fronts:
        assert "permissions violation" not in front.log()
        assert PASSWORD not in front.log()
        assert PASSWORD not in " ".join(front.command())


def test_a_front_end_whose_user_lacks_a_right_says_which(running: Site, tmp_path: Path) -> None:
    monitors = ",".join(f"http://127.0.0.1:{node.ports.monitor}" for node in running.nodes.nodes)
    reader = running.nodes.folder.parent / "reader.user"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "penstock", "serve", "--data", str(tmp_path), "--http", "off"),
            *("--sspq", "127.0.0.1:0", "--phpmq", "127.0.0.1:0", "--rq", "127.0.0.1:0"),
            *("--engine", ",".join(running.nodes.urls), "--cluster-monitor", monitors),
            *("--cluster-credentials", str(reader)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert done.returncode == 2
    assert "this user of NATS may not subscribe to penstock.penstock.answer." in done.stderr
    assert "docs/cluster.md#rights-in-nats" in done.stderr
    assert PASSWORD not in done.stderr


def test_who_may_read_the_log_reads_nothing_else(running: Site) -> None:
    running.start_fronts()
    with HttpClient(running.leader().url("http")) as http:
        http.send("read", b"one")
    reader = link_as(running, "reader")
    try:
        last = reader.ask(reader.api.last(NAMES.stream, NAMES.files))
        assert last is not None
        assert reader.ask(reader.api.read(NAMES.stream, last.seq, 1)) == [last]
        for work in (
            reader.api.last(NAMES.key_stream, NAMES.key),
            reader.api.last(NAMES.state_stream, NAMES.state(LEASE)),
            reader.api.purge_subject(NAMES.stream, NAMES.files),
            reader.api.put(NAMES.file("x"), b""),
            reader.api.put(NAMES.key, b""),
        ):
            with pytest.raises(NotAllowed, match="this user of NATS may not publish to it"):
                reader.ask(work)
    finally:
        reader.close()
    listening = link_as(running, "reader", NAMES.answers)
    try:
        with pytest.raises(NotAllowed, match=f"may not subscribe to {NAMES.answers}"):
            listening.ask(listening.api.last(NAMES.stream, NAMES.files))
    finally:
        listening.close()


def test_the_key_stays_what_it_is(running: Site) -> None:
    """Not even somebody who may do anything changes it in passing."""
    admin = link_as(running, "admin")
    try:
        before = admin.ask(admin.api.last(NAMES.key_stream, NAMES.key))
        with pytest.raises(JetStreamError, match="maximum messages exceeded"):
            admin.ask(admin.api.put(NAMES.key, bytes(32)))
        with pytest.raises(JetStreamError, match="purge"):
            admin.ask(admin.api.purge_subject(NAMES.key_stream, NAMES.key))
        assert admin.ask(admin.api.last(NAMES.key_stream, NAMES.key)) == before
    finally:
        admin.close()
