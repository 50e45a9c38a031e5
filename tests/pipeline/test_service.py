"""A service keeps pipelines running: files that come, change and go; pauses, failures, and their brokers."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.pipeline import telling
from penstock.pipeline.file import read_pipeline
from penstock.pipeline.progress import Teller
from penstock.pipeline.service import Files, Service, shared_settings
from penstock.spark import lease
from tests.http.api import Api
from tests.pipeline.rig import Files as Folder
from tests.pipeline.rig import Rig
from tests.server.harness import until
from tests.spark.conftest import StartBroker
from tests.spark.rig import PATIENCE_SECONDS, restart

RELAY = """\
[source]
url = "URL"
subscribe = "QUEUE"
startingOffsets = "earliest"
retrySeconds = 0.2
[[step]]
sql = "select value from input"
[sink]
format = "penstock"
queue = "QUEUE.out"
[run]
trigger = "100 milliseconds"
checkpoint = "FOLDER/checkpoints/QUEUE"
"""

SECONDS = 4 * PATIENCE_SECONDS
"""Several queries begin at a time, on a machine that has much else to do."""


def relay(queue: str, word: str = "") -> str:
    text = RELAY.replace("QUEUE", queue)
    return (
        text.replace("select value", f"select concat('{word}', cast(value as string)) as value")
        if word
        else text
    )


class Kept:
    """A service over a folder, in a thread, and what it says."""

    def __init__(self, spark: SparkSession, *folders: Path, once: bool = False) -> None:
        self.said: list[tuple[str, str, str]] = []
        self.service = Service(
            Files(map(str, folders)),
            spark,
            read_pipeline,
            lambda name: Teller(name, lambda line: None, time.monotonic),
            lambda *said: self.said.append(said),
            once=once,
        )
        self.thread = threading.Thread(target=self.service.run, daemon=True)

    def states(self, name: str) -> list[str]:
        return [state for it, state, _ in self.said if it == name]

    def until_said(self, name: str, state: str, part: str = "", times: int = 1) -> None:
        def there() -> bool:
            found = [more for it, now, more in self.said if (it, now) == (name, state) and part in more]
            return len(found) >= times

        try:
            until(there, f"{name} is {state} {part}", SECONDS)
        except AssertionError as error:
            error.add_note(str(self.said))
            raise


@contextmanager
def kept(spark: SparkSession, *folders: Path) -> Iterator[Kept]:
    it = Kept(spark, *folders)
    it.thread.start()
    try:
        yield it
    finally:
        it.service.stop.set()
        it.thread.join(SECONDS)
        assert not it.thread.is_alive()


def reader(api: Api, name: str) -> dict[str, Any]:
    found: dict[str, Any] = api.get(f"/v1/readers/{name}")
    return found


def until_state(api: Api, name: str, state: str) -> dict[str, Any]:
    """What a pipeline says of itself, once it says that it is in that state."""
    until(
        lambda: about(api, name).get("state") == state,
        f"{name} is {state} ({about(api, name)})",
        SECONDS,
    )
    return about(api, name)


def about(api: Api, name: str) -> dict[str, Any]:
    reply = api.ask("GET", f"/v1/readers/{name}")
    found: dict[str, Any] = (reply.json["about"] or {}) if reply.status == 200 else {}
    return found


def wish(api: Api, name: str, action: str) -> None:
    """What a pipeline shall do, once it has told that it is there to do it."""

    def is_taken() -> bool:
        reply = api.ask("POST", f"/v1/readers/{name}/{action}")
        if reply.status != 200:
            assert reply.problem == "conflict", reply
            return False
        return bool(reply.json["wish"]["action"] == action)

    until(is_taken, f"{name} takes the wish to {action}", SECONDS)


def until_out(rig: Folder, queue: str, *values: bytes) -> None:
    def there() -> bool:
        with rig.api() as api:
            if api.ask("GET", f"/v1/queues/{queue}.out").status != 200:
                return False
        return sorted(rig.messages(f"{queue}.out")) == sorted(values)

    until(there, f"{values} in {queue}.out", SECONDS)


def test_files_come_change_and_go(rig: Rig) -> None:
    path = rig.write("a", relay("svc-a"))
    rig.write("b", relay("svc-b").replace("select value", "select valu"))
    same = rig.folder / "same.toml"
    same.write_text(path.read_text().replace("checkpoints/", "checkpoints/other-"))
    rig.send("svc-a", [b"1"])
    rig.send("svc-b", [b"1"])
    with kept(rig.spark, rig.folder) as it, rig.api() as api:
        # One is refused by its name, one does not get on; the third runs, whatever becomes of these.
        it.until_said(str(same), "not taken", f"{path} is called 'a' too")
        until_out(rig, "svc-a", b"1")
        said = until_state(api, "b", "failed")
        assert f"{rig.folder}/b.toml, line 7: [[step]] 1: " in said["error"]
        assert "valu" in said["error"]
        assert reader(api, "b")["queues"][0]["position"] == 0  # and nothing is lost for it meanwhile
        said = until_state(api, "a", "running")
        until(lambda: about(api, "a").get("rows_total") == 1, "its rows to be told", SECONDS)
        assert (about(api, "a")["name"], about(api, "a")["silent"]) == ("a", False)
        assert "rows_per_second" in about(api, "a")

        # Another time, or a comment, is no change.
        os.utime(path, (1, 1))
        path.write_text("# mine\n" + path.read_text())
        # What does not judge changes nothing, by our judgement or by Spark's.
        rig.write("b", relay("svc-b"))
        it.until_said("b", "running")
        until_out(rig, "svc-b", b"1")
        assert it.states("a") == ["running"]
        rig.write("a", relay("svc-a").replace("sql =", "sq ="))
        it.until_said("a", "not taken", "did you mean sql?; what it said before goes on")
        until(lambda: "did you mean sql?" in about(api, "a").get("error", ""), "that to be told")
        rig.write("a", relay("svc-a").replace("select value", "select other"))
        it.until_said("a", "not taken", "line 7: [[step]] 1: [UNRESOLVED_COLUMN")
        rig.send("svc-a", [b"2"])
        until_out(rig, "svc-a", b"1", b"2")
        assert about(api, "a")["state"] == "running"
        rig.write("a", relay("svc-a", "new "))
        it.until_said("a", "running", times=2)
        rig.send("svc-a", [b"3"])
        until_out(rig, "svc-a", b"1", b"2", b"new 3")
        assert "error" not in about(api, "a")

        # Gone is stopped; and who had the same name gets its turn.
        path.unlink()
        it.until_said("a", "running", times=3)
        assert it.states("a")[-2:] == ["stopped", "running"]
    assert it.states("a")[-1] == it.states("b")[-1] == "stopped"
    with rig.api() as api:
        assert about(api, "a")["state"] == about(api, "b")["state"] == "stopped"


@pytest.mark.long
def test_pause_resume_and_restart(rig: Rig) -> None:
    rig.write("p", relay("svc-p"))
    rig.send("svc-p", [b"1"])
    with rig.api() as api:
        with kept(rig.spark, rig.folder) as it:
            until_out(rig, "svc-p", b"1")
            wish(api, "p", "pause")
            until_state(api, "p", "paused")
            until(lambda: reader(api, "p")["wish"] is None, "the wish to be done", SECONDS)
            rig.send("svc-p", [b"2"])
            position = reader(api, "p")["queues"][0]["position"]
            # Nobody reads, and what comes is kept; a service that is started again knows it.
            shorter = {"positions": {"svc-p": position}, "lease_seconds": 2}
            assert api.ask("PUT", "/v1/readers/p", shorter).status == 200
            until(
                lambda: reader(api, "p")["lease_seconds_left"] > 30,
                "the lease to be renewed",
                SECONDS,
            )
        assert about(api, "p")["state"] == "paused"
        with kept(rig.spark, rig.folder) as it:
            it.until_said("p", "paused")
            assert reader(api, "p")["queues"][0]["position"] == position
            assert rig.messages("svc-p.out") == [b"1"]
            wish(api, "p", "resume")
            until_out(rig, "svc-p", b"1", b"2")
            wish(api, "p", "restart")
            it.until_said("p", "running", times=2)
            rig.send("svc-p", [b"3"])
            until_out(rig, "svc-p", b"1", b"2", b"3")
        assert api.ask("POST", "/v1/readers/p/restart").problem == "conflict"  # nobody is there to do it


def test_every_query_of_a_graph_is_held_while_it_is_paused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "HOLD_SECONDS", 0.1)
    step = '[[step]]\nname = "all"\nfrom = "input"\nsql = "select count(*) as n from input"\n'
    step += '[[sink]]\nname = "out"\nfrom = "step 1"'
    counts = '[[sink]]\nname = "n"\nformat = "delta"\nmode = "complete"\npath = "FOLDER/n"\n[run]'
    rig.write("q", relay("svc-q").replace("[sink]", step).replace("[run]", counts))
    rig.send("svc-q", [b"1"])
    with rig.api() as api, kept(rig.spark, rig.folder):
        until_out(rig, "svc-q", b"1")
        until(lambda: any(rig.folder.glob("checkpoints/svc-q/flows/*/commits/0")), "a count", SECONDS)
        wish(api, "q", "pause")
        until_state(api, "q", "paused")
        assert api.ask("DELETE", "/v1/readers/q.all.complete").status == 204
        until(
            lambda: api.ask("GET", "/v1/readers/q.all.complete").status == 200,
            "the other query's reader to be held again",
            SECONDS,
        )
        held = reader(api, "q.all.complete")
        assert (held["queues"][0]["position"], held["lease_seconds_left"] > 30) == (1, True)


def test_all_queues_of_a_pattern_are_held_while_it_is_paused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also more than one reader can have, and those that come meanwhile."""
    monkeypatch.setattr(telling, "HOLD_SECONDS", 0.1)
    monkeypatch.setattr(lease, "READER_QUEUES", 1)
    for queue in ("svc-m1", "svc-m2"):
        rig.send(queue, [b"1"])
    pattern = relay("svc-m").replace('subscribe = "svc-m"', "subscribePattern = 'svc-m[0-9]'")
    rig.write("m", pattern)

    def held(api: Api) -> dict[str, int]:
        rows = [it for it in api.get("/v1/readers")["readers"] if it["name"].startswith("m")]
        return {it["queue"]: it["position"] for row in rows for it in row["queues"]}

    with rig.api() as api, kept(rig.spark, rig.folder):
        until_out(rig, "svc-m", b"1", b"1")
        wish(api, "m", "pause")
        until_state(api, "m", "paused")
        rig.send("svc-m3", [b"1"])
        until(lambda: held(api) == {"svc-m1": 1, "svc-m2": 1, "svc-m3": 0}, "all to be held", SECONDS)
        names = [it["name"] for it in api.get("/v1/readers")["readers"]]
        assert {"m", "m (2)", "m (3)"} <= {*names}


@pytest.mark.long
def test_a_pause_lasts_where_broker_and_service_restart_at_once(rig: Rig, start_broker: StartBroker) -> None:
    broker = start_broker()
    here = Folder(broker, rig.folder)
    text = relay("svc-long").replace('startingOffsets = "earliest"\n', "")
    here.send("svc-long", [b"0"])
    here.write("long", text)
    with kept(rig.spark, rig.folder), here.api() as api:
        until(lambda: api.ask("GET", "/v1/readers/long").status == 200, "it to read", SECONDS)
        here.send("svc-long", [b"1"])
        until_out(here, "svc-long", b"1")
        wish(api, "long", "pause")
        until_state(api, "long", "paused")
        here.send("svc-long", [b"2"])
        broker.kill()  # before it can hear the last words
    restart(broker)
    with here.api() as api:
        assert about(api, "long") == {}
        # As after a long while: nobody has renewed its lease.
        assert api.ask("DELETE", "/v1/readers/long").status == 204
    with kept(rig.spark, rig.folder) as it, here.api() as api:
        it.until_said("long", "paused")
        until_state(api, "long", "paused")
        assert reader(api, "long")["queues"][0]["position"] == 2  # what came since is kept for it
        assert here.messages("svc-long.out") == [b"1"]
        # It is paused as whatever its file says: also with another checkpoint.
        here.write("long", text.replace("checkpoints/", "others/"))
        it.until_said("long", "changed")
        until(lambda: (rig.folder / "others/svc-long/paused").exists(), "the pause to be noted", SECONDS)
        here.write("long", text)
        it.until_said("long", "changed", times=2)
        wish(api, "long", "resume")
        until_out(here, "svc-long", b"1", b"2")
        assert it.states("long") == ["paused", "changed", "changed", "running"]
    assert not list(rig.folder.glob("*/svc-long/paused"))


def test_a_broker_that_restarts_is_waited_for_and_others_go_on(rig: Rig, start_broker: StartBroker) -> None:
    other = start_broker()
    away = Folder(other, rig.folder)
    away.write("away", relay("svc-away"))
    rig.write("here", relay("svc-here"))
    away.send("svc-away", [b"1"])
    rig.send("svc-here", [b"1"])
    with kept(rig.spark, rig.folder) as it:
        until_out(away, "svc-away", b"1")
        until_out(rig, "svc-here", b"1")
        other.kill()
        it.until_said("away", "retrying", "again in 1 s: ")
        it.until_said("away", "retrying", "no broker answers there")
        rig.send("svc-here", [b"2"])
        until_out(rig, "svc-here", b"1", b"2")
        restart(other)
        away.send("svc-away", [b"2"])
        until_out(away, "svc-away", b"1", b"2")
        assert it.states("here") == ["running"]


@pytest.mark.long
def test_what_nobody_knows_is_tried_again_and_then_given_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.keeping.PAUSE_SECONDS_MIN", 0.01)
    monkeypatch.setattr("penstock.pipeline.keeping.TRIES_MAX", 1)
    rig.send("svc-odd", [b"1"])
    step = 'python = "tests.pipeline.steps_of_tests:out_of_luck"'
    rig.write("odd", relay("svc-odd").replace('sql = "select value from input"', step))
    with kept(rig.spark, rig.folder) as it, rig.api() as api:
        it.until_said("odd", "failed", "OSError: no luck today (tried 2 times)")
        assert it.states("odd") == ["running", "retrying", "running", "failed"]
        until_state(api, "odd", "failed")


def test_what_a_file_says_counts_when_it_was_said_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("one")
    files = Files([str(tmp_path)])
    assert files.look() == {str(path): b"one"}
    path.write_text("tw")
    assert files.look() == {str(path): b"one"}
    path.write_text("two")
    assert files.look() == {str(path): b"one"}
    assert files.look() == {str(path): b"two"}
    # As an editor does that writes another file and gives it the name.
    path.unlink()
    assert files.look() == {str(path): b"two"}
    path.write_text("two")
    assert files.look() == {str(path): b"two"}
    path.unlink()
    files.look()
    assert files.look() == {}


TWO = """\
name = "two"
[[source]]
name = "a"
url = "http://127.0.0.1:1"
subscribe = "q"
[[source]]
name = "b"
url = "http://127.0.0.1:2"
subscribe = "q"
[sink]
from = "a"
format = "console"
"""


def test_wishes_of_two_brokers_whose_clocks_differ(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(TWO)
    pipeline = read_pipeline(str(tmp_path / "two.toml"))
    wished: list[str] = []
    it = telling.Telling(pipeline, dict, wished.append)
    for _ in range(2):
        it._hear("a", {"wish": {"action": "pause", "number": 1000}})
        it._hear("b", {"wish": {"action": "resume", "number": 900}})
    it._hear("b", {"wish": {"action": "pause", "number": 950}})
    assert wished == ["pause", "resume", "pause"]


def test_whatever_a_file_raises_ends_no_service(tmp_path: Path) -> None:
    (tmp_path / "odd.toml").write_text("")

    def fails(path: str) -> Any:
        raise KeyError(path)

    said: list[tuple[str, ...]] = []
    nothing: Any = None  # what is not asked for
    service = Service(
        Files([str(tmp_path)]), nothing, fails, nothing, lambda *them: said.append(them), once=True
    )
    service._look()
    ((name, state, why),) = said
    assert (name, state) == (str(tmp_path / "odd.toml"), "not taken")
    assert "odd.toml" in why


def test_a_folder_in_which_nothing_is_to_be_run_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.service.LOOK_SECONDS", 0.01)
    it = Kept(spark, tmp_path, once=True)
    it.thread.start()
    it.thread.join(SECONDS)
    assert not it.thread.is_alive()


def test_settings_of_spark_that_all_share(rig: Rig) -> None:
    text = (
        relay("svc-s") + '[run.spark]\n"spark.sql.shuffle.partitions" = 3\n"spark.driver.memory" = "MEMORY"\n'
    )
    one = rig.pipeline("one", text.replace("MEMORY", "1g"))
    two = rig.pipeline("two", text.replace("MEMORY", "2g"))
    assert shared_settings([one, two]) == {"spark.scheduler.mode": "FAIR", "spark.driver.memory": "1g"}
