"""Transactions over the processes of a cluster: what was staged outlives every leader, and a commit is whole
or absent, whoever dies when."""

import shutil
import threading
from collections import Counter
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from penstock.log.jetstream.appender import Appender
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.servers import parse_server
from penstock.log.jetstream.stream_log import make_missing
from penstock.log.reader import LogReader
from tests.cluster.processes import FrontEnd, Site
from tests.cluster.processes import site as site_of
from tests.http.api import Api, Reply
from tests.http.test_old_stages import (
    check_what_had_begun,
    check_what_was_open,
    check_what_was_there,
    unpacked,
)
from tests.http.test_transactions import stage
from tests.server.harness import until

PARTS = 12
COUNT = 7000
VALUE = 1000
"""84 MB in all, for two queues."""


def values(part: int) -> list[str]:
    return [f"{part:02d}-{number:04d}-".ljust(VALUE, "x") for number in range(COUNT)]


def queue_of(part: int) -> str:
    return "orders" if part % 3 else "mails"


def stage_all(front: FrontEnd, key: str) -> list[str]:
    with Api(front.ports["http"]) as api:
        return [stage(api, key, queue_of(part), *values(part)) for part in range(PARTS)]


def ask(site: Site, method: str, path: str, body: dict[str, Any] | None = None) -> Reply:
    """Ask anybody, until somebody who leads has answered."""
    found: list[Reply] = []

    def answered() -> bool:
        for front in site.running:
            with suppress(OSError, HTTPException), Api(front.ports["http"]) as api:
                reply = api.ask(method, path, body)
                if reply.status not in (502, 503, 504):
                    found.append(reply)
                    return True
        return False

    until(answered, f"an answer to {method} {path}", 60.0)
    return found[0]


def ends(site: Site) -> dict[str, int]:
    """How many messages each queue has had."""
    listed = ask(site, "GET", "/v1/queues").json["queues"]
    return {queue["name"]: queue["offset_end"] for queue in listed}


def open_stages(site: Site, key: str) -> set[str]:
    reply = ask(site, "GET", f"/v1/transactions/{key}")
    assert reply.status == 200, reply
    assert reply.json["state"] == "open", reply
    return {it["stage"] for it in reply.json["stages"]}


def test_84_megabytes_are_whole_or_absent_though_every_leader_dies(tmp_path: Path) -> None:
    with site_of(tmp_path, nodes=1, fronts=2) as site:
        first = site.leader()
        stages = stage_all(site.follower(), "large")
        first.kill()
        assert open_stages(site, "large") == set(stages)
        first.start()
        # Whoever leads now dies while it commits.
        second = site.leader(next(front for front in site.running if front is not first))
        asked = threading.Event()

        def send() -> None:
            with suppress(OSError, HTTPException), Api(second.ports["http"]) as api:
                api._connection.request(
                    "POST",
                    "/v1/transactions",
                    '{"transaction": "large", "stages": ["' + '", "'.join(stages) + '"]}',
                    {"Content-Type": "application/json"},
                )
                asked.set()
                api._connection.getresponse()

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        assert asked.wait(30)
        second.kill()
        sender.join(30)
        wanted = {"orders": 8 * COUNT, "mails": 4 * COUNT}
        state = ask(site, "GET", "/v1/transactions/large").json["state"]
        assert ends(site) == (wanted if state == "committed" else {})
        if state == "open":
            assert open_stages(site, "large") == set(stages)
        # The same call again has the answer that was due.
        body = {"transaction": "large", "stages": stages}
        reply = ask(site, "POST", "/v1/transactions", body)
        assert reply.status == 200, reply
        assert reply.json["repeated"] == (state == "committed")
        stored = {(it["queue"], it["offset_start"], it["offset_end"]) for it in reply.json["stored"]}
        assert stored == {(queue, 0, end) for queue, end in wanted.items()}
        assert ends(site) == wanted
        # Planned ones as well: and it is remembered.
        second.start()
        leader = site.leader()
        leader.stop()
        leader.start()
        again = ask(site, "POST", "/v1/transactions", body).json
        assert (again["stored"], again["repeated"]) == (reply.json["stored"], True)
        for queue in wanted:
            parts = [part for part in range(PARTS) if queue_of(part) == queue]
            assert read(site.leader(), queue) == Counter(dict.fromkeys(parts, COUNT))


def read(front: FrontEnd, queue: str) -> "Counter[int]":
    """By part, how many messages of it are in a front-end's files, in order."""
    with LogReader(str(front.folder / "data" / "log")) as reader:
        found = [it for block in reader.messages(queue, 0) for it in block.messages()]
    assert found == sorted(set(found))
    return Counter(int(payload[:2]) for payload in found)


def put_into_stream(site: Site, data: Path) -> None:
    """The log of a folder as that of the cluster."""
    names = LogNames()
    nats = LinkThread.open(map(parse_server, site.nodes.urls))
    nats.ask(make_missing(nats, names.all_settings(1)))
    appender = Appender(nats, names, 7, 0)
    with LogReader(str(data)) as reader:
        end = reader.position  # behind it there is room that was set aside
    for path in sorted(data.iterdir()):
        if path.suffix == ".seg":
            appender.write(path.name, [(0, path.read_bytes()[: end - int(path.stem)])])
        elif path.name.startswith("snapshot-"):
            appender.send_file(path.name, path.read_bytes())
    nats.close()


def test_a_log_and_its_stages_from_an_earlier_version(tmp_path: Path) -> None:
    """They are taken over by the front-end that has their files, as soon as it leads; then all have them."""
    data = unpacked(tmp_path / "old")
    site = Site(tmp_path, nodes=1, fronts=2)
    try:
        site.nodes.start()
        put_into_stream(site, data)
        (tmp_path / "a" / "data" / "log").mkdir(parents=True)
        shutil.move(data / "stages", tmp_path / "a" / "data" / "log")
        site.start_fronts()
        for _ in range(2):
            leader = site.leader(site.running[-1])
            ask(site, "GET", "/v1/transactions/begun")
            with Api(leader.ports["http"]) as api:
                check_what_had_begun(api)
                check_what_was_there(api)
                check_what_was_open(api)
                assert api.get("/v1/engine")["damage"] == []
            until(lambda: not (tmp_path / "a" / "data" / "log" / "stages").exists(), "the folder to go")
            if leader.name == "a":
                leader.kill()
        assert leader.name == "b"
    finally:
        site.end()
