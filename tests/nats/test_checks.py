"""The checks before a front-end starts, on real nodes: what is accepted, refused, or only told."""

import asyncio
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cluster.checks import ClusterRefused, Finding, Level, check_servers, refuse
from penstock.common.given import SettingsError
from penstock.log.jetstream.cluster import Cluster
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.rights import USER_INFO, Rights, rights_of_front_end, user_block
from penstock.server.settings import Settings
from penstock.server.settings_read import load
from tests.certificates import make_authority, make_certificate
from tests.nats.cluster import api, linked
from tests.nats.conftest import Start
from tests.server.settings_source import parser


def settings_for(cluster: Cluster, words: str = "", *, monitored: bool = True) -> Settings:
    arguments = ["--engine", ",".join(cluster.urls), "--cluster-shards", "1", *shlex.split(words)]
    if monitored:
        arguments += ["--cluster-monitor", ",".join(monitors(cluster))]
    return load(parser().parse_args(arguments), {})


def monitors(cluster: Cluster) -> list[str]:
    return [f"http://127.0.0.1:{node.ports.monitor}" for node in cluster.nodes]


def found(settings: Settings) -> dict[str, Finding]:
    findings = asyncio.run(check_servers(settings))
    assert len({finding.name for finding in findings}) == len(findings)
    return {finding.name: finding for finding in findings}


def levels(findings: dict[str, Finding]) -> set[Level]:
    return {finding.level for finding in findings.values()}


# --- accepted ---


def test_three_nodes_that_sync_and_know_who_comes_are_accepted(start: Start, tmp_path: Path) -> None:
    user = user_block("front", "word", rights_of_front_end(LogNames()))
    (tmp_path / "front.user").write_text("front:word\n")
    cluster = start(3, settings=f"authorization {{ users: [ {user} ] }}\n")
    findings = found(settings_for(cluster, f"--cluster-credentials {tmp_path}/front.user"))
    assert levels(findings) == {Level.OK}, findings
    refuse(list(findings.values()))
    assert list(findings) == [
        "connection",
        "version",
        "max_payload",
        "replicas",
        "sync",
        "rights",
        "jetstream",
        "authentication",
        "stream PENSTOCK_penstock",
        "stream PENSTOCK_penstock_STATE",
        "stream PENSTOCK_penstock_KEY",
    ]
    assert findings["sync"].text == "every write is synced by penstock-1, penstock-2, penstock-3"
    assert findings["replicas"].text == "3 copies of the log on 3 nodes"
    assert findings["sync"].row() == {
        "name": "sync",
        "level": "ok",
        "text": "every write is synced by penstock-1, penstock-2, penstock-3",
        "advice": "",
    }


@pytest.mark.long
def test_a_node_that_is_down_is_told_and_stops_nobody(start: Start) -> None:
    cluster = start(3)
    cluster.nodes[2].kill()
    findings = found(settings_for(cluster))
    assert Level.FAIL not in levels(findings)
    assert findings["sync"].level is Level.WARN
    assert findings["sync"].text.startswith(
        "every write is synced by penstock-1, penstock-2; 1 of 3 nodes could not be asked"
        f" (http://127.0.0.1:{cluster.nodes[2].ports.monitor} does not answer"
    )


def test_one_node_is_enough_for_one_copy(node: Cluster) -> None:
    findings = found(settings_for(node, "--cluster-replicas 1"))
    assert findings.pop("authentication").level is Level.WARN
    assert levels(findings) == {Level.OK}


# --- who may do what ---


def test_nodes_that_let_anybody_in_are_told_and_refused_where_one_is_strict(node: Cluster) -> None:
    told = found(settings_for(node, "--cluster-replicas 1"))
    assert told["authentication"].level is Level.WARN
    assert told["authentication"].text == (
        f"{node.nodes[0].url} let in whoever can connect: to read every message, to delete the log unnoticed,"
        " and to lead"
    )
    refuse(list(told.values()))
    strict = found(settings_for(node, "--cluster-replicas 1 --strict"))
    with pytest.raises(ClusterRefused, match=r"set credentials under \[cluster\]"):
        refuse(list(strict.values()))


def test_strangers_with_an_account_of_their_own_are_no_danger(start: Start, tmp_path: Path) -> None:
    ours = "A { jetstream: enabled, users: [{user: a, password: b}] }"
    others = "B { jetstream: enabled, users: [{user: c, password: d}] }"
    cluster = start(1, settings=f"accounts {{\n{ours}\n{others}\n}}\nno_auth_user: c\n")
    (tmp_path / "a.user").write_text("a:b")
    settings = settings_for(cluster, f"--cluster-replicas 1 --strict --cluster-credentials {tmp_path}/a.user")

    async def make() -> None:
        async with linked(cluster.nodes[0].url.replace("//", "//a:b@")) as link:
            await api(link).create_stream(LogNames().stream_settings(1))

    asyncio.run(make())
    assert found(settings)["authentication"].level is Level.OK


WAYS = ("publish", "subscribe")
RIGHTS = rights_of_front_end(LogNames())
LEFT_OUT = [(way, subject) for way in WAYS for subject in getattr(RIGHTS, way)]


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Every user lacks another right."""

    def without(left_out: tuple[str, str]) -> Rights:
        publish, subscribe = (
            {it: "" for it in getattr(RIGHTS, way) if (way, it) != left_out} for way in WAYS
        )
        return Rights(publish, subscribe or {"_INBOX.>": ""})  # to NATS, none would be all

    users = "".join(user_block(f"u{number}", "word", without(it)) for number, it in enumerate(LEFT_OUT))
    settings = f"authorization {{ users: [\n{users}] }}\n"
    cluster = Cluster(tmp_path_factory.mktemp("limited"), 1, settings=settings)
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.mark.parametrize("number", range(len(LEFT_OUT)))
def test_a_right_left_out_is_told(limited: Cluster, tmp_path: Path, number: int) -> None:
    (tmp_path / "user").write_text(f"u{number}:word")
    words = f"--cluster-replicas 1 --cluster-credentials {tmp_path}/user"
    rights = found(settings_for(limited, words))["rights"]
    way, subject = LEFT_OUT[number]
    # Who may not ask what it may do can do all the same.
    assert rights.level is (Level.WARN if subject == USER_INFO else Level.FAIL)
    assert subject.removesuffix(">") in rights.text
    assert f"may not {way}" in rights.text
    assert "docs/cluster.md#rights-in-nats" in rights.advice


# --- refused ---


def test_a_node_that_does_not_sync_every_write_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "unsafe", 1)
    cluster._choose_ports()
    config = cluster.nodes[0].folder / "server.conf"
    config.write_text(config.read_text().replace("sync_interval: always", ""))
    cluster.start()
    try:
        findings = found(settings_for(cluster, "--cluster-replicas 1"))
        assert findings["sync"].level is Level.FAIL
        with pytest.raises(ClusterRefused) as refused:
            refuse(list(findings.values()))
        assert str(refused.value) == (
            "the NATS cluster cannot be used as it is: sync: not every write is synced by penstock-1: a power"
            " cut may lose what was confirmed; set sync_interval: always in the jetstream block of the"
            " configuration there, or allow it with --allow-unsafe-sync"
        )
        assert isinstance(refused.value, SettingsError)
        allowed = found(settings_for(cluster, "--cluster-replicas 1 --allow-unsafe-sync"))
        assert allowed["sync"].level is Level.WARN
        assert "allow" not in allowed["sync"].advice
        refuse(list(allowed.values()))
    finally:
        cluster.stop()


def test_nodes_of_which_nobody_says_whether_they_sync_are_refused(node: Cluster) -> None:
    # The monitoring of the node is not at the port where it would be looked for.
    findings = found(settings_for(node, "--cluster-replicas 1", monitored=False))
    assert findings["sync"].level is Level.FAIL
    assert findings["sync"].text.startswith(
        "nobody says whether the nodes sync every write (http://127.0.0.1:8222 "
    )
    assert findings["sync"].advice.startswith("set monitor under [cluster] to http://HOST:8222")
    unsafe = found(settings_for(node, "--cluster-replicas 1 --allow-unsafe-sync", monitored=False))
    assert unsafe["sync"].level is Level.WARN


def test_what_another_cluster_says_does_not_count(start: Start, node: Cluster) -> None:
    other = start(1)
    words = f"--cluster-replicas 1 --cluster-monitor {monitors(other)[0]}"
    sync = found(settings_for(node, words, monitored=False))["sync"]
    assert sync.level is Level.FAIL
    assert f"{monitors(other)[0]} is of another cluster" in sync.text


def test_something_else_at_the_address_of_the_monitoring_is_no_answer(node: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        words = f"--cluster-replicas 1 --cluster-monitor http://127.0.0.1:{port}"
        sync = found(settings_for(node, words, monitored=False))["sync"]
        assert sync.level is Level.FAIL
        assert "does not answer" in sync.text


def test_the_port_for_clients_is_not_taken_for_the_monitoring(node: Cluster) -> None:
    """It answers, and not in HTTP."""
    clients = f"http://127.0.0.1:{node.nodes[0].ports.client}"
    words = f"--cluster-replicas 1 --cluster-monitor {clients}"
    sync = found(settings_for(node, words, monitored=False))["sync"]
    assert sync.level is Level.FAIL
    assert f"{clients} does not answer" in sync.text
    both = found(settings_for(node, f"{words},{monitors(node)[0]}", monitored=False))["sync"]
    assert both.level is Level.OK


def test_more_copies_than_nodes_are_refused(node: Cluster) -> None:
    replicas = found(settings_for(node))["replicas"]
    assert replicas == Finding(
        "replicas",
        Level.FAIL,
        "3 copies of the log are wanted, and there is 1 node",
        "add nodes, or set replicas = 1 under [cluster]",
    )
    blind = found(settings_for(node, "--allow-unsafe-sync", monitored=False))["replicas"]
    assert blind.level is Level.FAIL


def test_two_copies_are_worse_than_one(start: Start) -> None:
    assert found(settings_for(start(3), "--cluster-replicas 2"))["replicas"].level is Level.WARN


@pytest.mark.parametrize(("size", "level"), [("32KB", Level.FAIL), ("1MB", Level.WARN), ("8MB", Level.OK)])
def test_messages_must_have_room_for_the_log(start: Start, size: str, level: Level) -> None:
    cluster = start(1, settings=f"max_payload: {size}\n")
    payload = found(settings_for(cluster, "--cluster-replicas 1"))["max_payload"]
    assert payload.level is level, payload
    assert ("max_payload" in payload.advice) is (level is not Level.OK)


def test_a_server_without_jetstream_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1)
    cluster._choose_ports()
    config = cluster.nodes[0].folder / "server.conf"
    config.write_text(config.read_text().partition("jetstream {")[0])
    cluster.start()
    try:
        findings = found(settings_for(cluster, "--cluster-replicas 1"))
        assert findings["jetstream"].level is Level.FAIL
        assert findings["jetstream"].text == "server 'penstock-1' has no JetStream"
        assert findings["sync"].text.endswith("(no node has JetStream)")
    finally:
        cluster.stop()


def test_an_account_that_may_not_use_jetstream_is_refused(start: Start) -> None:
    cluster = start(1, settings="accounts { A { users: [{user: a, password: b}] } }\nno_auth_user: a\n")
    jetstream = found(settings_for(cluster, "--cluster-replicas 1"))["jetstream"]
    assert jetstream.level is Level.FAIL
    assert jetstream.advice


def test_servers_that_are_not_there_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    settings = load(parser().parse_args(["--engine", f"nats://127.0.0.1:{port}"]), {})
    (connection,) = found(settings).values()
    assert connection.level is Level.FAIL
    assert f"nats://127.0.0.1:{port}: cannot be reached" in connection.text


def test_wrong_credentials_are_told_without_them(start: Start) -> None:
    cluster = start(1, settings='authorization { user: a, password: "right" }\n')
    (connection,) = found(
        load(
            parser().parse_args(["--engine", f"nats://a:wrong@127.0.0.1:{cluster.nodes[0].ports.client}"]), {}
        )
    ).values()
    assert connection.level is Level.FAIL
    assert "wrong" not in connection.text


@pytest.mark.parametrize("setting", ["credentials", "tls-ca"])
def test_a_file_that_is_not_there_is_a_wrong_setting(node: Cluster, setting: str) -> None:
    settings = settings_for(node, f"--cluster-{setting} /no/such/file")
    with pytest.raises(SettingsError, match=rf"^\[cluster\] {setting}: .*'/no/such/file' cannot be read"):
        asyncio.run(check_servers(settings))


def test_a_cluster_behind_tls_that_wants_to_know_us(start: Start, tmp_path: Path) -> None:
    make_authority(tmp_path, "ours")
    make_certificate(tmp_path, "broker", "ours")
    make_certificate(tmp_path, "client", "ours")
    files = f'cert_file: "{tmp_path}/broker.pem", key_file: "{tmp_path}/broker.key"'
    cluster = start(1, settings=f'tls {{ {files}, ca_file: "{tmp_path}/ours.pem", verify: true }}\n')
    engine = ["--engine", f"tls://localhost:{cluster.nodes[0].ports.client}", "--cluster-replicas", "1"]
    monitor = ["--cluster-monitor", monitors(cluster)[0]]
    trust = ["--cluster-tls-ca", f"{tmp_path}/ours.pem"]
    known = [
        *("--cluster-tls-certificate", f"{tmp_path}/client.pem"),
        *("--cluster-tls-key", f"{tmp_path}/client.key"),
    ]
    everything = load(parser().parse_args([*engine, *monitor, *trust, *known]), {})
    assert levels(found(everything)) == {Level.OK}
    for missing in ([*engine, *monitor, *trust], [*engine, *monitor, *known]):
        (connection,) = found(load(parser().parse_args(missing), {})).values()
        assert connection.level is Level.FAIL
    wrong = [*trust, *known[:2], "--cluster-tls-key", f"{tmp_path}/broker.key"]
    with pytest.raises(SettingsError, match=r"^\[cluster\] tls-key: .* is not the key of the certificate"):
        asyncio.run(check_servers(load(parser().parse_args([*engine, *wrong]), {})))


# --- streams that are there ---


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, Level.OK, "is there, with replicas = 1"),
        ({"storage": "memory"}, Level.FAIL, 'storage = "memory" instead of "file"'),
        ({"retention": "workqueue"}, Level.FAIL, 'retention = "workqueue" instead of "limits"'),
        ({"max_age": 10**12}, Level.FAIL, "deletes messages by age"),
        ({"max_bytes": 10**6, "discard": "old"}, Level.FAIL, "deletes the oldest messages (max_bytes"),
        ({"max_bytes": 10**6}, Level.OK, "is there"),
        ({"max_msgs_per_subject": 5}, Level.FAIL, "max_msgs_per_subject = 5"),
        ({"allow_direct": False}, Level.FAIL, "allow_direct = false instead of true"),
    ],
)
def test_a_stream_that_is_there_is_looked_at(
    start: Start, changes: dict[str, object], level: Level, words: str
) -> None:
    cluster = start(1)

    async def make() -> None:
        async with linked(*cluster.urls) as link:
            await api(link).create_stream({**LogNames("eu").stream_settings(1), **changes})

    asyncio.run(make())
    findings = found(settings_for(cluster, "--cluster-replicas 1 --cluster-name eu"))
    stream = findings["stream PENSTOCK_eu"]
    assert stream.level is level, stream
    assert words in stream.text
    assert findings["stream PENSTOCK_eu_STATE"].text == "was not there yet: the first front-end makes it"


def test_other_replicas_are_told(start: Start) -> None:
    cluster = start(3)

    async def make() -> None:
        async with linked(*cluster.urls) as link:
            await api(link).create_stream(LogNames("penstock").stream_settings(1))

    asyncio.run(make())
    stream = found(settings_for(cluster))["stream PENSTOCK_penstock"]
    assert stream.level is Level.WARN
    assert stream.text == "has replicas = 1, and the settings say 3"
    assert stream.advice.startswith("nats stream edit PENSTOCK_penstock --replicas 3")
