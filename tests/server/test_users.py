"""Users at the three wires, by certificate or by listener: every word with its right and without."""

import json
import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, get_args

import pytest

from penstock import connect
from penstock.client.errors import ClientError
from penstock.model import words
from penstock.model.rights import Grant, Right, User
from penstock.server.settings import Listener, UserSettings
from penstock.server.users import Users, names_in
from tests.certificates import make_authority, make_certificate
from tests.seeds import some
from tests.server.harness import WAIT_SECONDS, BrokerProcess, until

USERS = """
[[user]]
name = "shop"
certificate = "shop"
rights = [{queues = "orders", may = ["send"]}]

[[user]]
name = "workers"
certificate = ["worker.example", "other"]
rights = [{queues = "ord*", may = ["receive"]}]

[[user]]
name = "old"
certificate = "old"
expires = 2020-01-31
rights = [{queues = "*", may = ["send", "receive"]}]

[[user]]
name = "local"
rights = [{queues = "orders", may = ["send", "receive"]}]
"""
PROTOCOLS = ("phpmq", "rq", "sspq")


class Site:
    """A broker whose listeners ask for certificates, and one that stands for a user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_authority(folder)
        for name, names in {
            "server": "DNS:localhost,IP:127.0.0.1",
            "shop": "DNS:shop.example",
            "worker": "DNS:worker.example",
            "old": "DNS:old.example",
            "stranger": "DNS:stranger.example",
        }.items():
            make_certificate(folder, name, names=names)
        self.config = folder / "penstock.toml"
        self.config.write_text(self.settings())
        off = [part for name in PROTOCOLS for part in (f"--{name}", "off")]
        self.broker = BrokerProcess(folder, "--config", str(self.config), *off, "--http", "off").start()

    def settings(self, users: str = USERS) -> str:
        tls = f'tls-certificate = "{self.folder}/server.pem"\ntls-key = "{self.folder}/server.key"\n'
        doors = "".join(
            f'[[listener]]\nprotocol = "{protocol}"\naddress = "localhost:0"\n{tls}'
            f'tls-client-ca = "{self.folder}/ca.pem"\n' + ('queue = "orders"\n' if protocol == "sspq" else "")
            for protocol in PROTOCOLS
        )
        local = (
            f'[[listener]]\nprotocol = "phpmq"\naddress = "unix:{self.folder}/local.sock"\nuser = "local"\n'
        )
        return doors + local + users

    def connect(self, protocol: str, name: str) -> Any:
        return connect(
            f"{protocol}s://localhost:{self.broker.ports[protocol]}",
            cafile=str(self.folder / "ca.pem"),
            certfile=str(self.folder / f"{name}.pem"),
            keyfile=str(self.folder / f"{name}.key"),
            reconnect_seconds=0,
            operation_seconds=5,
        )

    def audit(self) -> list[tuple[str | None, ...]]:
        lines = map(json.loads, (self.folder / "data" / "audit.jsonl").read_text().splitlines())
        return [tuple(map(line.get, ("who", "door", "act", "queue", "result"))) for line in lines]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from sites(tmp_path_factory.mktemp("users"))


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Site]:
    """Whose log and audit nobody has written to."""
    yield from sites(tmp_path)


def sites(folder: Path) -> Iterator[Site]:
    site = Site(folder)
    yield site
    assert site.broker.stop() == 0
    assert "Traceback" not in site.broker.log()


def send(client: Any, protocol: str, body: bytes, queue: str = "orders") -> None:
    """Returns when it is stored."""
    if protocol == "sspq":
        client.send(body)
    else:
        client.send(queue, body)
    if protocol != "rq":
        client.flush()


def receive(client: Any, protocol: str) -> bytes:
    """One message, acknowledged."""
    if protocol == "rq":
        got: SimpleQueue[bytes] = SimpleQueue()
        serving = client.serve("orders", lambda request: got.put(request.body))
        body = got.get(timeout=WAIT_SECONDS)
        serving.cancel()
        return body
    message = (
        client.receive(timeout=WAIT_SECONDS)
        if protocol == "sspq"
        else next(iter(client.consume("orders", 1, count=1, timeout=WAIT_SECONDS)))
    )
    message.ack()
    return bytes(message.body)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_who_may_send_sends_and_who_may_receive_receives(site: Site, protocol: str) -> None:
    with site.connect(protocol, "shop") as shop, site.connect(protocol, "worker") as worker:
        send(shop, protocol, protocol.encode())
        assert receive(worker, protocol) == protocol.encode()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", ["worker", "old", "stranger"])
def test_who_may_not_send_is_refused(site: Site, protocol: str, name: str) -> None:
    who = {"worker": "workers", "stranger": "certificate:stranger"}.get(name, name)
    client = site.connect(protocol, name)
    with pytest.raises(ClientError):
        send(client, protocol, b"refused")
    client.close()
    assert f"user {who!r} may not send to queue 'orders'" in site.broker.log()
    until(lambda: (who, protocol, "send", "orders", "forbidden") in site.audit(), "a line of the audit")


def test_who_may_not_send_broadcasts_nothing(site: Site) -> None:
    with site.connect("rq", "worker") as worker:
        worker.broadcast("shouts", b"refused")
        until(lambda: ("workers", "rq", "send", "shouts", "forbidden") in site.audit(), "a line of the audit")
    assert "user 'workers' may not send to queue 'shouts'" in site.broker.log()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_who_may_not_receive_gets_nothing(site: Site, protocol: str) -> None:
    with site.connect(protocol, "shop") as shop:
        send(shop, protocol, b"kept")
        if protocol == "rq":
            shop.serve("orders", lambda request: None)
        elif protocol == "sspq":
            with pytest.raises(ClientError):
                shop.receive(timeout=WAIT_SECONDS)
        else:
            assert list(shop.consume("orders", 1, timeout=0.2)) == []
        until(lambda: ("shop", protocol, "receive", "orders", "forbidden") in site.audit(), "a line")
        with site.connect(protocol, "worker") as worker:
            assert receive(worker, protocol) == b"kept"
    why = "user 'shop' may not consume from queue 'orders': it has not the right receive"
    assert why in site.broker.log()


def test_a_listener_stands_for_a_user(site: Site) -> None:
    with connect(f"phpmq+unix://{site.folder}/local.sock") as client:
        send(client, "phpmq", b"here")
        assert receive(client, "phpmq") == b"here"
        with pytest.raises(ClientError):
            send(client, "phpmq", b"no", "other")


def reload(site: Site, users: str) -> None:
    before = site.broker.log().count("users read again")
    site.config.write_text(site.settings(users))
    site.broker.signal(signal.SIGHUP)
    until(lambda: site.broker.log().count("users read again") > before, "it to be read again")


def test_rights_that_are_read_again_count_for_who_is_there(site: Site) -> None:
    with site.connect("phpmq", "shop") as shop, site.connect("phpmq", "worker") as worker:
        send(shop, "phpmq", b"before")
        reload(site, USERS.replace('"orders", may = ["send"]', '"none", may = ["send"]'))
        with pytest.raises(ClientError):
            send(shop, "phpmq", b"after")
        assert receive(worker, "phpmq") == b"before"
        reload(site, USERS)
        send(shop, "phpmq", b"again")
        assert receive(worker, "phpmq") == b"again"


def test_who_was_the_last_with_a_certificate_does_not_get_all_rights(own_site: Site) -> None:
    with own_site.connect("phpmq", "shop") as shop, local(own_site) as other:
        reload(own_site, USERS[USERS.index('[[user]]\nname = "local"') :])
        with pytest.raises(ClientError):
            send(shop, "phpmq", b"no", "payroll")
        send(other, "phpmq", b"yes")


class Consumer:
    """Has asked for more than one message; the first one has come, and is not settled yet."""

    def __init__(self, client: Any, protocol: str, first: Callable[[], None]) -> None:
        self._got: SimpleQueue[bytes] = SimpleQueue()
        self._go_on = Event()
        self._thread: Thread | None = None
        if protocol == "rq":
            client.serve("orders", self._work)
        else:
            work = self._one_by_one if protocol == "sspq" else self._window
            self._thread = Thread(target=work, args=(client,))
            self._thread.start()
        first()
        assert self._got.get(timeout=WAIT_SECONDS) == b"first"

    def _work(self, request: Any) -> None:
        self._got.put(request.body)
        self._go_on.wait(WAIT_SECONDS)

    def _window(self, client: Any) -> None:
        for message in client.consume("orders", 10, timeout=3):
            self._work(message)
            message.ack()

    def _one_by_one(self, client: Any) -> None:
        client.receive(timeout=WAIT_SECONDS).ack()
        self._got.put(b"first")
        with pytest.raises(ClientError, match="will come"):
            self._got.put(client.receive(timeout=WAIT_SECONDS).body)

    def rest(self) -> list[bytes]:
        """What else it gets, when the first is settled."""
        self._go_on.set()
        if self._thread is not None:
            self._thread.join(WAIT_SECONDS)
            assert not self._thread.is_alive()
        return [self._got.get() for _ in range(self._got.qsize())]


def local(site: Site) -> Any:
    return connect(f"phpmq+unix://{site.folder}/local.sock", reconnect_seconds=0, operation_seconds=5)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("by", some(["reload", "time"], "time"))
def test_who_consumes_gets_nothing_more_when_the_right_is_gone(
    own_site: Site, protocol: str, by: str
) -> None:
    site = own_site
    with site.connect(protocol, "worker") as worker, local(site) as other:
        consumer = Consumer(worker, protocol, lambda: send(other, "phpmq", b"first"))
        if by == "reload":
            reload(site, USERS.replace('"ord*", may = ["receive"]', '"ord*", may = ["send"]'))
        else:
            soon = datetime.now(UTC) + timedelta(seconds=1)
            workers = 'name = "workers"'
            reload(site, USERS.replace(workers, f"{workers}\nexpires = {soon:%Y-%m-%dT%H:%M:%S.%fZ}"))
        until(lambda: "user 'workers' may not consume" in site.broker.log(), "it to be refused")
        send(other, "phpmq", b"second")
        assert consumer.rest() == []
        assert receive(other, "phpmq") == b"second"  # and not the first: who held it has settled it
        assert ("workers", protocol, "receive", "orders", "forbidden") in site.audit()


# --- who it is ---------------------------------------------------------------------------------------


CERTIFICATE = {
    "subject": ((("organizationName", "o"),), (("commonName", "shop"),)),
    "subjectAltName": (("DNS", "shop.example"), ("IP Address", "10.0.0.1"), ("URI", "spiffe://x/shop")),
}


def test_the_names_in_a_certificate() -> None:
    assert names_in(CERTIFICATE) == ["shop", "shop.example", "spiffe://x/shop"]
    assert names_in({}) == []


def test_who_is_meant() -> None:
    shop = User("shop", (Grant(("*",), Right.SEND),))
    plain = Listener("rq", None)  # type: ignore[arg-type]  # nobody looks at its address
    asking = Listener("rq", None, tls_client_ca="ca.pem")  # type: ignore[arg-type]
    standing = Listener("rq", None, tls_client_ca="./ca.pem", user="local")  # type: ignore[arg-type]
    listeners = [plain, asking, standing]
    users = Users([UserSettings(shop, ("spiffe://x/shop",)), UserSettings(User("local"))], listeners)
    assert users.find(CERTIFICATE, asking) is shop
    assert users.find(CERTIFICATE, standing) is shop
    assert users.find(None, plain) is None
    assert users.find(None, standing) == User("local")
    stranger = users.find({"subject": ((("commonName", "x"),),)}, asking)
    assert stranger == User("certificate:x")  # which nobody can take for a user of that name
    assert not any(stranger.may(right, "q") for right in Right.ALL)
    # Where no user has a certificate, they are what they were.
    assert Users([], listeners).find(CERTIFICATE, asking) is None
    assert Users([], listeners, users).find(CERTIFICATE, asking) == User("certificate:shop")


def test_a_name_counts_where_its_own_authority_has_signed_it() -> None:
    root, guest = User("root", is_admin=True), User("guest")
    own, others = (Listener("rq", None, tls_client_ca=name) for name in ("own.pem", "others.pem"))  # type: ignore[arg-type]
    users = [UserSettings(root, ("shop",), certificate_ca="own.pem"), UserSettings(guest, ("shop.example",))]
    known = Users(users, [own, others])
    assert known.find(CERTIFICATE, own) is root
    assert known.find(CERTIFICATE, others) == User("certificate:shop")
    # Settings say whose are meant; should they have changed under open listeners, a name alone is nobody's.
    users = [UserSettings(root, ("shop",))]
    assert Users(users, [own]).find(CERTIFICATE, own) is root
    assert Users(users, [own, others]).find(CERTIFICATE, own) == User("certificate:shop")


def test_an_authority_makes_nobody_of_another_one(tmp_path: Path) -> None:
    """The name is right, the listener lets it in, and it is nobody's there."""
    make_authority(tmp_path)
    make_authority(tmp_path, "others")
    for name, authority in (("server", "ca"), ("own", "ca"), ("theirs", "others")):
        make_certificate(tmp_path, name, authority, "DNS:localhost,DNS:shop.example")
    door = '[[listener]]\nprotocol = "phpmq"\naddress = "localhost:0"\ntls-certificate = "{0}/server.pem"\n'
    door += 'tls-key = "{0}/server.key"\ntls-client-ca = "{0}/{1}.pem"\n'
    shop = (
        '[[user]]\nname = "shop"\ncertificate = "shop.example"\ncertificate-ca = "{0}/ca.pem"\nadmin = true\n'
    )
    config = tmp_path / "penstock.toml"
    text = door.format(tmp_path, "ca") + door.format(tmp_path, "others") + shop.format(tmp_path)
    config.write_text(text)
    off = [part for name in (*PROTOCOLS, "http") for part in (f"--{name}", "off")]
    broker = BrokerProcess(tmp_path, "--config", str(config), *off).start()
    try:

        def client(name: str, door: int) -> Any:
            return connect(
                f"phpmqs://localhost:{broker.ports_of('phpmq')[door]}",
                cafile=str(tmp_path / "ca.pem"),
                certfile=str(tmp_path / f"{name}.pem"),
                keyfile=str(tmp_path / f"{name}.key"),
                reconnect_seconds=0,
            )

        with client("own", 0) as own:
            send(own, "phpmq", b"x")
        with client("theirs", 1) as theirs, pytest.raises(ClientError):
            send(theirs, "phpmq", b"y")
        assert "user 'certificate:theirs' may not send to queue 'orders'" in broker.log()
    finally:
        assert broker.stop() == 0


def test_every_word_is_either_asked_about_or_is_about_what_one_has() -> None:
    asked = {words.Publish, words.Broadcast, words.Consume}
    own = {words.Settle, words.Accepted, words.Reply, words.Cancel, words.Closing, words.Sync, words.Ignored}
    assert set(get_args(words.Command)) == asked | own
