"""What needs attention: a real broker with every kind of trouble, and a stand-in for the rest.

The rules' cells are `tests/common/test_health.py`'s business; here it is seen that what happens in a broker
becomes the figures that they look at, who is told, and what it costs. Patience is a second here.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from penstock.client import PhpmqClient
from penstock.common.health import BY_STATE
from penstock.control.frames import Buffer, Fields, Frame
from penstock.http.api.health import fields_of
from penstock.http.link import CallRefused
from penstock.http.watching import health as watching
from penstock.http.watching.health import Health
from penstock.http.watching.mirror import Mirror
from penstock.http.watching.tracks import QueueTrack
from penstock.log.info import SYNC_BOUNDS_SECONDS
from penstock.model.rights import EVERYBODY
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.http.test_rights import SETTINGS, as_user
from tests.server.harness import BrokerProcess, phpmq, until

QUICK = ("--http-health-seconds", "1")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("health")
    (folder / "penstock.toml").write_text('[queue."small*"]\nmax-bytes = 4000000\n')
    flags = ("--http", "127.0.0.1:0", "--config", str(folder / "penstock.toml"), *QUICK)
    broker = BrokerProcess(folder, *flags).start()
    yield broker
    broker.kill()


def found(api: Api, queue: str) -> dict[str, Any]:
    """The findings of a queue, by state."""
    return {it["state"]: it for it in api.get("/v1/health", queue=queue)["attention"]}


def states(api: Api, queue: str) -> set[str]:
    return set(found(api, queue))


@contextmanager
def wire_client(broker: BrokerProcess) -> Iterator[PhpmqClient]:
    with PhpmqClient(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        yield mq


def test_a_new_broker_is_well(start_broker: StartBroker) -> None:
    with Api(start_broker(*QUICK).ports["http"]) as api:
        until(lambda: api.get("/v1/health")["looked"] is not None, "the first look")
        answer = api.get("/v1/health")
        assert (answer["attention"], answer["level"], answer["bad"], answer["warn"]) == ([], "ok", 0, 0)


@pytest.mark.long
def test_stalled_names_who_holds_and_ends_when_they_settle(broker: BrokerProcess, api: Api) -> None:
    api.send("stuck", *[b"x"] * 8)
    with wire_client(broker) as mq:
        held = list(mq.consume("stuck", prefetch=5, count=5))
        until(
            lambda: states(api, "stuck") == {"stalled"} and found(api, "stuck")["stalled"]["who"] != [], "it"
        )
        finding = found(api, "stuck")["stalled"]
        (name,) = [it["name"] for it in api.get("/v1/connections")["connections"] if it["held"] == 5]
        assert finding["who"] == [name]
        assert finding["level"] == "bad"
        assert finding["figures"]["held"] == 5
        assert finding["figures"]["ready"] == 3
        assert finding["why"].startswith("5 messages are held, and none was settled for ")
        assert finding["do"] == BY_STATE["stalled"].do
        assert finding["href"] == "/queue/stuck"
        assert (finding["queue"], finding["reader"]) == ("stuck", None)
        mq.ack_many(held)
        until(lambda: "stalled" not in states(api, "stuck"), "it to be well")


@pytest.mark.long
def test_no_consumers_until_there_are_some(broker: BrokerProcess, api: Api) -> None:
    api.send("lonely", b"x")
    until(lambda: states(api, "lonely") == {"no-consumers"}, "nobody to consume it")
    assert found(api, "lonely")["no-consumers"]["level"] == "warn"
    with wire_client(broker) as mq:
        for message in mq.consume("lonely", count=1):
            message.ack()
        until(lambda: not states(api, "lonely"), "it to be well")


def test_a_log_that_a_reader_reads_misses_nobody(broker: BrokerProcess, api: Api) -> None:
    api.send("log", b"x")
    hold = {"positions": {"log": 1}, "lease_seconds": 600}
    assert api.ask("PUT", "/v1/readers/nightly", hold).status == 200
    api.send("not a log", b"x")
    until(lambda: states(api, "not a log") == {"no-consumers"}, "the other one")
    assert states(api, "log") == set()


@pytest.mark.long
def test_paused_with_a_backlog(api: Api) -> None:
    api.send("rests", b"x")
    api.post("/v1/queues/rests/pause")
    until(lambda: states(api, "rests") == {"paused"}, "it to be told")
    api.post("/v1/queues/rests/resume")
    until(lambda: "paused" not in states(api, "rests"), "it to be well")


@pytest.mark.long
def test_blocked_names_who_does_not_read(broker: BrokerProcess, api: Api) -> None:
    with wire_client(broker) as mq:
        mq.send_many("big", [bytes(1_000_000)] * 40)
    with broker.wire("phpmq") as wire:
        wire.say(phpmq(2, (1, b"big"), (4, b"100")))  # It asks for a hundred, and reads nothing.
        until(lambda: states(api, "big") == {"blocked"}, "it to be told")
        finding = found(api, "big")["blocked"]
        (name,) = [it["name"] for it in api.get("/v1/connections")["connections"] if it["blocked"]]
        assert finding["who"] == [name]
        assert finding["figures"]["blocked"] == 1
    until(lambda: "blocked" not in states(api, "big"), "it to be gone")


@pytest.mark.long
def test_full_while_senders_wait(broker: BrokerProcess, api: Api) -> None:
    with broker.wire("phpmq") as wire:
        for _ in range(3):
            wire.say(phpmq(1, (1, b"small"), (2, bytes(1_500_000))))
        until(lambda: "full" in states(api, "small"), "it to be full")
        finding = found(api, "small")["full"]
        assert finding["level"] == "bad"
        assert finding["figures"]["bytes_max"] == 4_000_000
        assert "senders wait" in finding["why"]
        api.post("/v1/queues/small/purge")
        until(lambda: "full" not in states(api, "small"), "it to have room")


@pytest.mark.long
def test_dying_says_of_what(broker: BrokerProcess, api: Api) -> None:
    api.send("sick", *[b"x"] * 12)
    with wire_client(broker) as mq:
        for message in mq.consume("sick", count=12):
            message.reject()
        until(lambda: "dying" in states(api, "sick"), "it to be told")
        finding = found(api, "sick")["dying"]
        assert finding["figures"]["died"] == 12
        assert "12 rejected" in finding["why"]
        assert finding["level"] == "bad"
        assert finding["href"] == "/queue/sick?part=dead"
        until(lambda: "dying" not in states(api, "sick"), "nothing to die any more")


@pytest.mark.long
def test_growing_while_more_comes_than_goes(broker: BrokerProcess, api: Api) -> None:
    over = threading.Event()

    def send() -> None:
        with wire_client(broker) as mq:
            while not over.wait(0.1):
                mq.send_many("grows", [b"x" * 100] * 60)

    def consume() -> None:
        with wire_client(broker) as mq:
            for message in mq.consume("grows", prefetch=1):
                message.ack()
                if over.wait(0.05):
                    return

    threads = [threading.Thread(target=work) for work in (send, consume)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: states(api, "grows") == {"growing"}, "it to grow", 60)
        finding = found(api, "grows")["growing"]
        assert finding["figures"]["rate_in"] > finding["figures"]["rate_out"]
        assert finding["figures"]["full_seconds"] is None or "there is no room in" in finding["why"]
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_the_answer_is_as_promised_and_in_order(broker: BrokerProcess, api: Api) -> None:
    api.send("one", b"x")
    api.send("two", b"x")
    api.post("/v1/queues/one/take")
    until(lambda: states(api, "one") == {"stalled"} and states(api, "two") != set(), "both to be told")
    answer = api.get("/v1/health")
    document = api.get("/openapi.json")
    schema = document["paths"]["/v1/health"]["get"]["responses"]["200"]["content"]["application/json"][
        "schema"
    ]
    jsonschema_rs.validate({**schema, "components": document["components"]}, answer)
    levels = [it["level"] for it in answer["attention"]]
    assert levels == sorted(levels), "bad comes before warn"
    assert answer["level"] == "bad"
    assert answer["bad"] == levels.count("bad")
    assert len(api.get("/v1/health", limit=1)["attention"]) == 1
    assert api.get("/v1/health", limit=1)["warn"] == answer["warn"] or levels
    assert api.get("/v1/health", queue="nothing")["attention"] == []


def test_nobody_is_told_of_queues_that_they_may_not_read(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text(SETTINGS)
    flags = ("--http", "127.0.0.1:0", "--config", str(tmp_path / "penstock.toml"), *QUICK)
    broker = BrokerProcess(tmp_path, *flags).start()
    try:
        with (
            as_user(broker, "root") as root,
            as_user(broker, "read") as read,
            as_user(broker, "other") as other,
        ):
            for queue in ("orders.a", "payroll"):
                root.send(queue, b"x")
            until(lambda: root.get("/v1/health")["warn"] == 2, "both to be told")
            assert [it["queue"] for it in read.get("/v1/health")["attention"]] == ["orders.a"]
            assert read.get("/v1/health")["warn"] == 1
            assert [it["queue"] for it in other.get("/v1/health")["attention"]] == ["payroll"]
            assert read.ask("GET", "/v1/health", queue="payroll").status == 403
            with as_user(broker, "send") as send:
                assert send.ask("GET", "/v1/health").status == 403
    finally:
        broker.kill()


# --- with a stand-in for the broker ----------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def row(name: str, **more: Any) -> Fields:
    return {
        "name": name,
        "ready": 0,
        "held": 0,
        "delayed": 0,
        "dead": 0,
        "offset_start": 0,
        "offset_end": 0,
        "event_start": 0,
        "event_end": 0,
        "bytes": 0,
        "bytes_max": 0,
        "oldest_us": 0,
        "consumers": 0,
        "delivered": 0,
        "paused": False,
        "identity": "0" * 12,
        "counts": {},
        **more,
    }


class Link:
    """The first process, as it may be."""

    def __init__(self) -> None:
        self.rows: list[Fields] = []
        self.engine: Fields = {
            "failed": None,
            "full": False,
            "disk_bytes_free": 10**12,
            "disk_bytes_reserve": 10**9,
            "damage": [],
            "memory": {"held_bytes": 0, "limit_bytes": 10**9},
            "sync": {"buckets": [0] * (len(SYNC_BOUNDS_SECONDS) + 1)},
            "cluster": None,
            "readers": 0,
        }
        self.health: Fields = {"ready": True, "reason": ""}
        self.readers: list[Fields] = []
        self.attention: Fields = {"blocked": [], "holders": {}, "waited_for": []}
        self.asked: list[tuple[str, Fields]] = []
        self.refuses = False
        self.seconds: Callable[[], None] = lambda: None

    async def call(self, name: str, fields: Fields | None = None, *buffers: Buffer) -> Frame:
        self.asked.append((name, fields or {}))
        self.seconds()
        if name == "queues":
            rows, self.rows = self.rows, []
            return Frame({"queues": rows, "gone": [], "more": False}, memoryview(b""))
        if self.refuses:
            raise CallRefused("unavailable", "the broker has not answered")
        told = {
            "engine": self.engine,
            "health": self.health,
            "readers": {"readers": self.readers},
            "attention": self.attention,
        }[name]
        return Frame(told, memoryview(b""))


class Rig:
    def __init__(self, patience: float = 120.0) -> None:
        self.clock = Clock()
        self.link = Link()
        self.mirror = Mirror(self.link, self.clock)
        self.health = Health(self.link, self.mirror, patience, self.clock)

    async def run(self, seconds: float, *rows: Fields, step: float = 2.0) -> None:
        end = self.clock.now + seconds
        self.link.rows = list(rows)
        while self.clock.now < end:
            self.clock.now += step
            await self.mirror.refresh()
            await self.health.turn()

    @property
    def states(self) -> list[str]:
        return [it.state for it in self.health.findings(EVERYBODY)]


def test_the_broker_itself() -> None:
    async def scenario() -> None:
        rig = Rig()
        engine = rig.link.engine
        await rig.run(600)
        assert rig.states == []
        engine["cluster"] = {
            "nodes": [
                {"name": "n1", "state": "leader"},
                {"name": "n2", "state": "current"},
                {"name": "n3", "state": "offline"},
            ],
            "checks": [
                {"name": "sync", "level": "warn", "text": "off", "advice": "Set sync_interval."},
                {"name": "version", "level": "ok", "text": "2.12", "advice": ""},
            ],
        }
        engine["disk_bytes_free"] = 1
        engine["memory"]["held_bytes"] = 10**9
        engine["damage"] = [f"place {number}" for number in range(12)]
        await rig.run(60)
        assert rig.states == ["damaged", "memory", "node-offline", "disk-low", "cluster-check"]
        found = {it.state: it for it in rig.health.findings(EVERYBODY)}
        assert found["node-offline"].who == ("n3",)
        assert found["node-offline"].href == "/engine"
        assert found["memory"].level == "bad"
        assert "sync: off. Set sync_interval." in found["cluster-check"].why
        assert found["damaged"].lines[-2:] == ("place 9", "and 2 more")
        engine["full"] = True
        await rig.run(2)
        assert "disk-low" not in rig.states
        assert rig.states[0] == "disk-full"

    asyncio.run(scenario())


def test_why_archiving_fails_is_for_those_who_may_read_every_queue() -> None:
    class Archiving:
        error = "queue 'payroll': its schema has changed"

    async def scenario() -> None:
        rig = Rig()
        rig.health = Health(rig.link, rig.mirror, 120.0, rig.clock, Archiving())
        await rig.run(60)
        (finding,) = rig.health.findings(EVERYBODY)
        assert "payroll" in fields_of(finding, sees_all=True)["why"]
        told = fields_of(finding, sees_all=False)
        assert "payroll" not in str(told)
        assert told["why"] == "Who may read every queue is told why."

    asyncio.run(scenario())


def test_syncs_that_became_slow() -> None:
    async def scenario() -> None:
        rig = Rig()
        buckets = rig.link.engine["sync"]["buckets"]
        for _ in range(120):
            buckets[4] += 10  # up to 5 ms
            await rig.run(2)
        assert rig.states == []
        for _ in range(100):
            buckets[7] += 1  # up to 50 ms
            await rig.run(2)
        assert rig.states == ["slow-syncs"]
        (finding,) = rig.health.findings(EVERYBODY)
        assert 25 <= finding.figures["syncs"] <= 36  # type: ignore[operator]
        assert "before, 3.8" in finding.why

    asyncio.run(scenario())


def test_a_broker_that_does_not_answer_is_not_ready() -> None:
    async def scenario() -> None:
        rig = Rig()
        await rig.run(10)
        rig.link.refuses = True
        await rig.run(60)
        assert rig.states == ["not-ready"]
        assert "the broker has not answered" in rig.health.findings(EVERYBODY)[0].why
        rig.link.refuses = False
        await rig.run(60)
        assert rig.states == []

    asyncio.run(scenario())


def reader(name: str, position: int, end: int, **more: Any) -> Fields:
    queues = [{"queue": "orders", "position": position, "end": end, "lag": end - position, "capped": False}]
    return {"name": name, "view": "messages", "lease_seconds_left": 60.0, "queues": queues, **more}


def test_readers_that_fall_behind() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.link.engine["readers"] = 1
        for turn in range(1000):
            rig.link.readers = [
                reader("reads", turn * 100, turn * 100 + 50),
                reader("stands", 5, 10),
                reader("has nothing to do", 7, 7),
                reader("too slow", turn * 100, turn * 200),
                reader("gone", 3, 9, lease_seconds_left=0.0),
            ]
            await rig.run(2)
        found = {it.subject: it.state for it in rig.health.findings(EVERYBODY)}
        assert found == {"stands": "reader-behind", "too slow": "reader-behind", "gone": "reader-ended"}
        (finding,) = [it for it in rig.health.findings(EVERYBODY) if it.subject == "stands"]
        assert finding.href == "/readers?reader=stands#reader"
        assert finding.queues == ("orders",)
        rig.link.readers = [reader("stands", 5, 10)]
        rig.link.readers[0]["queues"][0]["capped"] = True
        await rig.run(2)
        assert rig.states == ["reader-capped"]

    asyncio.run(scenario())


def test_one_that_reads_now_and_then_is_not_blocked() -> None:
    async def scenario() -> None:
        rig = Rig()
        names = {"queues": ["q"], "name": "phpmq:1"}
        for turn in range(100):
            rig.link.attention["blocked"] = [{**names, "blockings": turn}]
            await rig.run(2, *([row("q", ready=5, consumers=1)] if not turn else []))
        assert rig.states == []
        await rig.run(40)
        assert rig.states == ["blocked"]

    asyncio.run(scenario())


def test_a_worker_of_long_jobs_is_learned() -> None:
    async def scenario() -> None:
        rig = Rig()
        told = []
        for job in range(1, 8):
            await rig.run(600, row("video", held=1, consumers=1, delivered=job))
            told.append(rig.states)
        assert told[0] == ["stalled"]
        assert told[-1] == told[-2] == []
        # And then it hangs.
        await rig.run(3600)
        assert rig.states == ["stalled"]

    asyncio.run(scenario())


def test_what_dies_as_usual_is_not_told() -> None:
    track_rows = []

    async def scenario() -> None:
        rig = Rig()
        died = delivered = 0
        for _ in range(60 * 30):
            died += 4
            delivered += 100
            counts = {"dead:rejected": died, "acked": delivered - died}
            await rig.run(60, row("q", delivered=delivered, counts=counts, consumers=1), step=20)
            track_rows.append(rig.states)
        assert track_rows[10] == ["dying"]
        assert track_rows[-1] == [], "what goes on for a day has become usual"
        for _ in range(6):
            died += 40
            delivered += 100
            counts = {"dead:rejected": died, "acked": delivered - died}
            await rig.run(60, row("q", delivered=delivered, counts=counts, consumers=1), step=20)
        assert rig.states == ["dying"]

    asyncio.run(scenario())


def test_a_queue_that_was_made_anew_has_no_past() -> None:
    track = QueueTrack(row("q", held=1, delivered=5), 0, 120)
    assert track.goes_on(row("q", held=0, delivered=5))
    assert not track.goes_on(row("q", identity="1" * 12, delivered=6))
    assert not track.goes_on(row("q", delivered=4))


def test_ten_thousand_queues_at_rest_are_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig()
        await rig.run(2, *(row(f"q{number}") for number in range(10_000)))
        looked: list[str] = []
        look = Health._look_at_queue

        def noted(self: Health, name: str, *rest: Any) -> None:
            looked.append(name)
            look(self, name, *rest)

        monkeypatch.setattr(Health, "_look_at_queue", noted)
        await rig.run(20, row("q7", held=1, delivered=1))
        assert set(looked) == {"q7"}

    asyncio.run(scenario())


def test_asking_takes_a_hundredth_of_the_time_of_the_broker() -> None:
    async def scenario() -> None:
        rig = Rig()

        def slow() -> None:
            rig.clock.now += 0.02

        rig.link.seconds = slow
        begin = rig.clock.now
        await rig.run(1000)
        asked = [name for name, _ in rig.link.asked if name != "queues"]
        assert len(asked) * 0.02 <= (rig.clock.now - begin) / 90
        assert set(asked) == {"engine", "health", "attention"}

    asyncio.run(scenario())


def test_who_holds_is_asked_for_those_in_trouble_and_a_few_at_a_time() -> None:
    async def scenario() -> None:
        rig = Rig()
        stuck = [row(f"q{number}", held=1, delivered=1, consumers=1) for number in range(200)]
        await rig.run(10, *stuck)
        assert [fields for name, fields in rig.link.asked if name == "attention"][-1] == {"queues": []}
        await rig.run(200)
        (*_, last) = [fields for name, fields in rig.link.asked if name == "attention"]
        assert len(last["queues"]) == watching.ASKED_ABOUT_MAX

    asyncio.run(scenario())
