"""The limits of NATS itself: before they are reached new messages wait, and all that makes room goes on; and
what a stranger takes out of the stream is noticed while the broker runs."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from penstock.log.jetstream.names import LogNames
from tests.cluster.processes import FrontEnd
from tests.cluster.processes import site as site_of
from tests.http.api import Api
from tests.nats.streams import link_at
from tests.server.harness import until

NAMES = LogNames()
LIMIT = 48 << 20
MESSAGE = b"." * 200_000
ACCOUNT = f"""
accounts {{ A: {{ jetstream: {{ max_file: {LIMIT} }}, users: [{{user: u, password: p}}] }} }}
no_auth_user: u
"""
KEEP_NOTHING = """
[log]
snapshot-blocks = 1
[queue."*"]
retention-seconds = 0
"""
SENDS_MAX = 2 * LIMIT // len(MESSAGE)
FULL = "the disk is full: new messages wait for room in the account's max_file"


def sent_until_full(api: Api, queue: str = "orders") -> int:
    """How many messages it took."""
    for count in range(SENDS_MAX):
        reply = api.ask("POST", f"/v1/queues/{queue}/messages", MESSAGE)
        if reply.status != 200:
            assert (reply.status, reply.problem) == (507, "disk-full"), reply
            assert "the account's max_file" in reply.json["detail"]
            return count
    raise AssertionError("the account was never full")


def test_an_account_that_fills_up_stops_senders_and_nobody_else(tmp_path: Path) -> None:
    settings = tmp_path / "penstock.toml"
    settings.write_text(KEEP_NOTHING)
    flags = ("--config", str(settings))
    with site_of(tmp_path, nodes=1, fronts=1, settings=ACCOUNT, flags=flags) as site:
        (front,) = site.fronts
        with Api(front.ports["http"]) as api, link_at(*site.nodes.urls) as nats:
            engine = api.get("/v1/engine")
            assert engine["disk_bytes_total"] == LIMIT
            assert engine["disk_room_in"] == "the account's max_file"
            count = sent_until_full(api)
            assert count * len(MESSAGE) > LIMIT // 2
            # It was not NATS that said no: there is room for what makes room.
            used = nats.ask(nats.api.account())["storage"]
            assert used < LIMIT * 15 // 16
            front.says(FULL)
            assert "storage is full" not in front.log()
            until(lambda: api.get("/v1/engine")["full"], "the engine to be full")
            assert api.ask("GET", "/readyz").status == 503
            # Taking and settling go on, though they are written down.
            taken = api.post("/v1/queues/orders/take", max=5, lease=60)["messages"]
            assert len(taken) == 5
            verdict = {"ack": [it["id"] for it in taken]}
            assert api.post("/v1/queues/orders/settle", verdict)["ack"] == 5
            # So does purging, and then there is room again.
            assert api.post("/v1/queues/orders/purge")["purged"] == count - 5
            until(lambda: api.ask("POST", "/v1/queues/orders/messages", MESSAGE).status == 200, "room", 60.0)
            front.says("there is room on the disk again, for the account's max_file")


@pytest.mark.long
def test_several_who_fill_an_account_leave_room_for_what_makes_room(tmp_path: Path) -> None:
    """Each front-end knows what it has sent itself, and of the others only what it has seen."""
    settings = tmp_path / "penstock.toml"
    settings.write_text(KEEP_NOTHING)
    flags = ("--config", str(settings))
    with site_of(tmp_path, nodes=1, fronts=3, shards=4, settings=ACCOUNT, flags=flags) as site:
        site.balanced()
        led = site.leaders()
        queues = {name: site.queue(led.index(name)) for name in {front.name for front in site.fronts}}

        def fill(front: FrontEnd) -> int:
            with Api(front.ports["http"]) as api:
                return sent_until_full(api, queues[front.name])

        with link_at(*site.nodes.urls) as nats, ThreadPoolExecutor() as pool:
            counts = list(pool.map(fill, site.fronts))
            assert sum(counts) * len(MESSAGE) > LIMIT // 4
            assert nats.ask(nats.api.account())["storage"] < LIMIT * 15 // 16
            for front, count in zip(site.fronts, counts, strict=True):
                queue = queues[front.name]
                front.says(FULL)
                assert "storage is full" not in front.log()
                with Api(front.ports["http"]) as api:
                    taken = api.post(f"/v1/queues/{queue}/take", max=5, lease=60)["messages"]
                    verdict = {"ack": [it["id"] for it in taken]}
                    assert api.post(f"/v1/queues/{queue}/settle", verdict)["ack"] == len(taken)
                    assert api.post(f"/v1/queues/{queue}/purge")["purged"] == count - len(taken)
            assert site.leaders() == led
            for front in site.fronts:
                until(partial(has_room, front, queues[front.name]), "room", 60.0)


def has_room(front: FrontEnd, queue: str) -> bool:
    with Api(front.ports["http"]) as api:
        return api.ask("POST", f"/v1/queues/{queue}/messages", MESSAGE).status == 200


def test_what_a_stranger_removes_is_noticed_while_it_runs(tmp_path: Path) -> None:
    with site_of(tmp_path, nodes=1, fronts=1) as site:
        (front,) = site.fronts
        with Api(front.ports["http"]) as api, link_at(*site.nodes.urls) as nats:
            api.send("orders", *[b"%d" % number for number in range(10)])
            assert "records" not in api.get("/readyz")["warnings"]
            (segment,) = [
                subject
                for subject in nats.ask(nats.api.subjects(NAMES.stream, NAMES.files))
                if subject.endswith(".seg")
            ]
            assert nats.ask(nats.api.purge_subject(NAMES.stream, segment)) > 0
            until(lambda: "records" in api.get("/readyz")["warnings"], "the loss to be seen")
            engine = api.get("/v1/engine")
            (check,) = [it for it in engine["cluster"]["checks"] if it["name"] == "records"]
            assert check["level"] == "fail"
            assert "removed by somebody else" in check["text"]
            assert "penstock backup" in check["advice"]
            assert any("removed by somebody else" in text for text in engine["damage"])
            front.says("removed by somebody else")
            # What it has itself it gives, and goes on.
            assert api.send("orders", b"10") == [10]
            assert [it["offset"] for it in api.get("/v1/queues/orders/messages")["messages"]] == [*range(11)]
