"""Who comes in at a follower: the leader knows the address of a caller, and the name of a client's user.

Two front-ends with users, as processes, and TLS everywhere. Callers have loopback addresses of their own.
"""

import http.client
import json
import os
import signal
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from penstock import connect
from penstock.client.errors import ClientError
from penstock.common.tokens import hash_token, new_token
from penstock.http.guesses import FREE
from tests.certificates import make_authority, make_certificate
from tests.cluster.processes import FrontEnd, Site, site
from tests.http.test_transactions import second_of
from tests.server.harness import WAIT_SECONDS, until

TOKENS = {name: new_token(name) for name in ("root", "reader")}
SETTINGS = """
[[user]]
name = "root"
token-hash = "{root}"
admin = true

[[user]]
name = "reader"
token-hash = "{reader}"
rights = [{{queues = "*", may = ["read"]}}]

[[user]]
name = "{shop}"
certificate = "shop"
rights = [{{queues = "orders", may = ["send"]}}]

[http]
tls-certificate = "{folder}/server.pem"
tls-key = "{folder}/server.key"

[[listener]]
protocol = "phpmq"
address = "localhost:0"
tls-certificate = "{folder}/server.pem"
tls-key = "{folder}/server.key"
tls-client-ca = "{folder}/ca.pem"
"""


class Guarded:
    """A cluster of two with users."""

    def __init__(self, folder: Path, running: Site, write: Callable[..., None]) -> None:
        self.folder = folder
        self.write = write
        until(lambda: any("leading after" in it.log() for it in running.fronts), "somebody to lead")
        (self.leader,) = (it for it in running.fronts if "leading after" in it.log())
        (self.follower,) = (it for it in running.fronts if it is not self.leader)

    def ask(
        self, front: FrontEnd, method: str, path: str, token: str, source: str = "127.0.0.1"
    ) -> tuple[int, Any]:
        """Status and JSON; a front-end that has no way to the leader yet is asked again."""
        answers: list[tuple[int, Any]] = []

        def answered() -> bool:
            connection = http.client.HTTPSConnection(
                "127.0.0.1",
                front.ports["http"],
                timeout=WAIT_SECONDS,
                source_address=(source, 0),
                context=ssl.create_default_context(cafile=str(self.folder / "ca.pem")),
            )
            with closing(connection), suppress(OSError, http.client.HTTPException):
                connection.request(method, path, headers={"Authorization": f"Bearer {token}"})
                response = connection.getresponse()
                answers.append((response.status, json.loads(response.read())))
            return bool(answers) and answers[-1][0] != 503

        until(answered, f"{method} {path} to be answered")
        return answers[-1]

    def get(self, path: str) -> Any:
        status, found = self.ask(self.leader, "GET", path, TOKENS["root"])
        assert status == 200, found
        return found

    def shop(self) -> Any:
        """A client of the follower that shows a certificate."""
        return connect(
            f"phpmqs://localhost:{self.follower.ports_of('phpmq')[1]}",
            cafile=str(self.folder / "ca.pem"),
            certfile=str(self.folder / "shop.pem"),
            keyfile=str(self.folder / "shop.key"),
            reconnect_seconds=0,
        )


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("callers")
    make_authority(folder)
    make_certificate(folder, "server")
    make_certificate(folder, "shop")
    hashes = {name: hash_token(token) for name, token in TOKENS.items()}

    def write(shop: str = "shop") -> None:
        (folder / "penstock.toml").write_text(SETTINGS.format(**hashes, shop=shop, folder=folder))

    write()
    with site(folder, flags=("--config", str(folder / "penstock.toml"))) as running:
        yield Guarded(folder, running, write)


def test_the_audit_has_the_address_of_the_caller(guarded: Guarded) -> None:
    for what in ("messages", "purge"):
        asked = guarded.ask(guarded.follower, "POST", f"/v1/queues/x/{what}", TOKENS["root"], "127.0.0.21")
        assert asked[0] in (200, 201), asked
    refused = guarded.ask(guarded.follower, "POST", "/v1/queues/x/purge", TOKENS["reader"], "127.0.0.22")
    assert refused[0] == 403

    def told(**wanted: str) -> bool:
        lines = guarded.get("/v1/audit?last=1000")["lines"]
        return any(wanted.items() <= line.items() for line in lines)

    until(lambda: told(who="root", **{"from": "127.0.0.21"}, act="purge"), "the act")
    until(lambda: told(who="reader", **{"from": "127.0.0.22"}, result="forbidden"), "the refusal")


def test_guesses_are_counted_by_the_address_of_who_guesses(guarded: Guarded) -> None:
    def guess(number: int, source: str) -> int:
        # Names of nobody, and another each time: it is the address alone that counts.
        return guarded.ask(guarded.follower, "GET", "/v1/queues", f"u{number}.{number}", source)[0]

    statuses = [guess(number, "127.0.0.31") for number in range(FREE + 2)]
    assert (statuses[0], statuses[-1]) == (401, 429)
    assert guess(99, "127.0.0.32") == 401, "somebody else may still try"
    assert guarded.ask(guarded.leader, "GET", "/v1/queues", "u98.x")[0] == 401, "and so at the leader"
    assert guarded.ask(guarded.leader, "GET", "/v1/queues", "u97.x", "127.0.0.31")[0] == 429


def test_the_leader_knows_the_users_of_a_follower_by_name(guarded: Guarded) -> None:
    def shown() -> list[tuple[str, str]]:
        found = guarded.get("/v1/connections")["connections"]
        return [(it["name"].rpartition("@")[2].rpartition("-")[0], it["user"]) for it in found]

    with guarded.shop() as shop:
        shop.send("orders", b"one")
        shop.flush()
        assert (guarded.follower.name, "shop") in shown()
        # A name that is another one after a reload is so for who is there.
        guarded.write(shop="store")
        guarded.follower.signal(signal.SIGHUP)
        until(lambda: (guarded.follower.name, "store") in shown(), "the new name")
        guarded.write()
        guarded.follower.signal(signal.SIGHUP)
        until(lambda: (guarded.follower.name, "shop") in shown(), "the old name")


def test_rights_are_those_of_the_certificate_also_at_a_follower(guarded: Guarded) -> None:
    with guarded.shop() as shop:
        shop.send("orders", b"kept")
        shop.flush()
        assert list(shop.consume("orders", 1, timeout=0.2)) == []
    guarded.follower.says("user 'shop' may not consume from queue 'orders': it has not the right receive")
    with guarded.shop() as shop:
        shop.send("payroll", b"none of its business")
        with pytest.raises(ClientError):
            shop.flush()
    guarded.follower.says("user 'shop' may not send to queue 'payroll': it has not the right send")
    assert all(it["name"] != "payroll" for it in guarded.get("/v1/queues")["queues"])

    def audited() -> bool:
        lines = map(json.loads, (guarded.follower.folder / "data" / "audit.jsonl").read_text().splitlines())
        found = {(line.get("who"), line.get("queue"), line.get("result")) for line in lines}
        return ("shop", "payroll", "forbidden") in found

    until(audited, "the refusal in the audit of the follower")


def test_another_http_process_hears_of_callers_as_the_first_did(guarded: Guarded) -> None:
    os.kill(second_of(guarded.leader), signal.SIGKILL)
    refused = guarded.ask(guarded.follower, "POST", "/v1/queues/x/purge", TOKENS["reader"], "127.0.0.41")
    assert refused[0] == 403
    until(
        lambda: any(it.get("from") == "127.0.0.41" for it in guarded.get("/v1/audit?last=1000")["lines"]),
        "the refusal",
    )
