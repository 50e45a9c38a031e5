"""The HTTP API of a cluster with several logs: every front-end answers for all of them."""

import itertools
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.client import ConnectionLost, connect
from penstock.model.shards import shard_of
from tests.cluster.processes import FrontEnd, Site, site
from tests.cluster.test_shards import SHARDS, queues_of_all
from tests.http.api import NDJSON, Api, Reply
from tests.seeds import some
from tests.server.harness import until


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("http"), nodes=1, fronts=2, shards=SHARDS) as running:
        running.balanced()
        for front in running.fronts:
            for queue in queues_of_all("first"):
                until(partial(is_there, front, queue), f"somebody to answer for {queue}")
        yield running


def ask(front: FrontEnd, method: str, path: str, body: Any = None, **query: Any) -> Reply:
    with Api(front.ports["http"]) as api:
        raw = json.dumps(body).encode() if body is not None and not isinstance(body, bytes) else body
        headers = {"Content-Type": NDJSON} if path == "/v1/stages" else None
        return api.ask(method, path, raw, headers, **query)


def fill(running: Site, name: str, count: int = 1) -> list[str]:
    """Queues of all logs, with messages; a log that has just moved is not there at once."""
    queues = queues_of_all(name)
    for queue in queues:
        until(partial(is_there, running.fronts[0], queue), f"somebody to answer for {queue}")
        for number in range(count):
            assert (
                ask(running.fronts[0], "POST", f"/v1/queues/{queue}/messages", b"%d" % number).status == 200
            )
    return queues


def is_there(front: FrontEnd, queue: str) -> bool:
    return ask(front, "GET", f"/v1/queues/{queue}").status != 503


def test_calls_about_a_queue_are_answered_at_every_front_end(pair: Site) -> None:
    for queue in queues_of_all("about"):
        for number, front in enumerate(pair.fronts):
            reply = ask(front, "POST", f"/v1/queues/{queue}/messages", b"x" * 100_000)
            assert reply.json["offset"] == number
        for front in pair.fronts:
            assert ask(front, "GET", f"/v1/queues/{queue}").json["ready"] == 2
            page = ask(front, "GET", f"/v1/queues/{queue}/messages").json
            assert [it["offset"] for it in page["messages"]] == [0, 1]
            assert len(ask(front, "GET", f"/v1/queues/{queue}/log", view="messages").body) > 200_000
        assert ask(pair.fronts[1], "POST", f"/v1/queues/{queue}/purge").json == {"purged": 2}
        assert ask(pair.fronts[0], "DELETE", f"/v1/queues/{queue}").status == 200
        for front in pair.fronts:
            assert ask(front, "GET", f"/v1/queues/{queue}").status == 404


def test_messages_are_taken_and_settled_at_every_front_end(pair: Site) -> None:
    for queue in fill(pair, "taken", 4):
        for front in pair.fronts:
            taken = ask(front, "POST", f"/v1/queues/{queue}/take", max=2).json["messages"]
            ids = [it["id"] for it in taken]
            assert len(ids) == 2
            other = pair.fronts[front is pair.fronts[0]]
            assert ask(other, "POST", f"/v1/queues/{queue}/settle", {"ack": ids}).json["ack"] == 2
        assert ask(pair.fronts[0], "GET", f"/v1/queues/{queue}").json["ready"] == 0


def is_used(front: FrontEnd, queue: str) -> bool:
    return any(it["queue"] == queue for row in connections(front) for it in row["consumes"])


def test_who_leaves_while_waiting_takes_nothing(pair: Site) -> None:
    """Also where the queue is led at the other front-end."""
    for shard, queue in enumerate(queues_of_all("waited")):
        here, there = pair.fronts if pair.leaders(pair.fronts[0])[shard] == "b" else reversed(pair.fronts)
        with socket.create_connection(("127.0.0.1", here.ports["http"])) as caller:
            path = f"/v1/queues/{queue}/take?wait=30"
            caller.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
            until(partial(is_used, there, queue), f"{queue} to be waited for")
        until(lambda it=(there, queue): not is_used(*it), f"{queue} to be left")  # type: ignore[misc]
        ask(here, "POST", f"/v1/queues/{queue}/messages", b"x")
        assert ask(here, "GET", f"/v1/queues/{queue}").json["held"] == 0


def connections(front: FrontEnd) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = front.ask("/v1/connections")["connections"]
    return rows


def test_a_connection_is_found_and_ended_by_its_number(pair: Site) -> None:
    here, there = pair.fronts
    queues = queues_of_all("ended")
    client = connect(here.url("phpmq"))
    for queue in queues:
        client.send(queue, b"x")
    list(client.consume(queues[0], count=1))
    until(lambda: any(it["held"] for it in connections(there)), "it to be listed")
    row = next(it for it in connections(there) if it["held"])
    for front in pair.fronts:
        for it in connections(front):
            one = front.ask(f"/v1/connections/{it['number']}")
            assert (one["number"], one["name"]) == (it["number"], it["name"])
            refused = ask(front, "DELETE", f"/v1/connections/{it['number']}", name="a/b")
            assert (refused.status, refused.problem) == (409, "conflict")
    assert ask(there, "DELETE", f"/v1/connections/{row['number']}").status == 200
    until(lambda: not any(it["number"] == row["number"] for it in connections(there)), "it to be ended")
    with pytest.raises(ConnectionLost):
        client.close()
    assert ask(there, "DELETE", "/v1/connections/123456").status == 404


def test_a_search_goes_through_all_logs_and_can_be_gone_on_with(pair: Site) -> None:
    queues = fill(pair, "searched", 3)
    for front in pair.fronts:
        lines = found(front, queues="searched.*")
        assert sorted(it["queue"] for it in lines[:-1]) == sorted(queue for queue in queues for _ in range(3))
        assert lines[-1]["end"]["complete"]
        assert lines[-1]["end"]["found"] == 3 * SHARDS
        first = found(front, queues="searched.*", limit=5)
        assert len(first) == 6
        assert not first[-1]["end"]["complete"]
        rest = found(front, queues="searched.*", after=first[-1]["end"]["next"])
        both = [(it["queue"], it["offset"]) for it in first[:-1] + rest[:-1]]
        assert sorted(both) == sorted((queue, offset) for queue in queues for offset in range(3))
    reply = ask(pair.fronts[0], "GET", "/v1/search", queues="searched.*", format="csv")
    assert reply.status == 409


def found(front: FrontEnd, **query: Any) -> list[dict[str, Any]]:
    reply = ask(front, "GET", "/v1/search", **query)
    assert reply.status == 200, reply
    lines = [json.loads(line) for line in reply.body.splitlines()]
    return [line for line in lines if "progress" not in line]


def test_events_are_of_all_logs(pair: Site) -> None:
    queues = queues_of_all("told")
    with socket.create_connection(("127.0.0.1", pair.fronts[0].ports["http"])) as listener:
        listener.settimeout(20)
        listener.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        heard = listener.recv(1 << 16)
        assert heard.startswith(b"HTTP/1.1 200")
        fill(pair, "told")
        while not all(f'"name":"{queue}","ready":1'.encode() in heard for queue in queues):
            heard += listener.recv(1 << 16)


def test_a_reader_has_queues_of_several_logs(pair: Site) -> None:
    queues = fill(pair, "read", 2)
    here, there = pair.fronts
    body = {"view": "messages", "positions": dict.fromkeys(queues, 1), "lease_seconds": 60}
    reply = ask(here, "PUT", "/v1/readers/several", body)
    assert reply.status == 200, reply
    for front in pair.fronts:
        reader = front.ask("/v1/readers/several")
        assert sorted(it["queue"] for it in reader["queues"]) == sorted(queues)
        assert {it["lag"] for it in reader["queues"]} == {1}
        assert [it["name"] for it in front.ask("/v1/readers")["readers"]] == ["several"]
    assert ask(there, "DELETE", "/v1/readers/several").status == 204
    assert ask(here, "GET", "/v1/readers/several").status == 404


def test_offsets_and_cuts_are_of_all_logs(pair: Site) -> None:
    queues = fill(pair, "cut", 4)
    for front in pair.fronts:
        rows = front.ask(f"/v1/offsets?queues={','.join(queues)}")["queues"]
        assert {it["name"]: it["offset_end"] for it in rows} == dict.fromkeys(queues, 4)
        ranges = [{"queue": queue, "start": 0, "end": 4, "bytes": 2} for queue in queues]
        reply = ask(front, "POST", "/v1/cuts", {"ranges": ranges})
        assert [it["ends"][-1] for it in reply.json["ranges"]] == [4] * SHARDS


def stage_of(front: FrontEnd, key: str, queues: list[str], **query: str) -> str:
    """One stage, with a message for each queue; its id."""
    rows = b"".join(json.dumps({"queue": queue, "value": queue}).encode() + b"\n" for queue in queues)
    reply = ask(front, "POST", "/v1/stages", rows, transaction=key, **query)
    assert (reply.status, reply.json["count"]) == (200, len(queues)), reply
    return str(reply.json["stage"])


def test_a_transaction_is_of_all_logs(pair: Site) -> None:
    """Whoever is asked, and wherever its stages came in."""
    here, there = pair.fronts
    for number, (first, other) in enumerate(((here, there), (there, here))):
        queues = queues_of_all(f"together{number}")
        key = f"t{number}/1"
        stages = [stage_of(first, key, queues), stage_of(other, key, queues[:1])]
        single = ask(other, "POST", "/v1/stages", b'{"value": "x"}\n', transaction=key, queue=queues[2])
        stages.append(single.json["stage"])
        stage_of(first, key, queues[1:2])  # of a try that failed
        assert ask(first, "GET", f"/v1/queues/{queues[0]}").status == 404
        standing = other.ask(f"/v1/transactions/t{number}%2F1")
        assert (standing["state"], len(standing["stages"])) == ("open", 4)
        done = ask(first, "POST", "/v1/transactions", {"transaction": key, "stages": stages})
        assert (done.status, done.json["repeated"]) == (200, False), done
        ends = {it["queue"]: it["offset_end"] for it in done.json["stored"]}
        assert ends == dict(zip(queues, (2, 1, 2, 1), strict=True))
        again = ask(other, "POST", "/v1/transactions", {"transaction": key, "stages": stages})
        assert again.json == {**done.json, "repeated": True}
        for front in pair.fronts:
            assert [front.ask(f"/v1/queues/{queue}")["ready"] for queue in queues] == [2, 1, 2, 1]
            standing = front.ask(f"/v1/transactions/t{number}%2F1")
            assert (standing["state"], standing["stored"]) == ("committed", done.json["stored"])
        assert ask(first, "DELETE", f"/v1/transactions/t{number}%2F1").json["state"] == "committed"
        other_stages = {"transaction": key, "stages": [stage_of(first, key, queues[:3])]}
        assert ask(other, "POST", "/v1/transactions", other_stages).json["type"] == "urn:penstock:key-reused"


def test_a_transaction_over_several_logs_is_aborted_or_refused_whole(pair: Site) -> None:
    here, there = pair.fronts
    queues = queues_of_all("apart")
    stage = stage_of(here, "apart", queues)
    wrong = ask(there, "POST", "/v1/transactions", {"transaction": "apart", "stages": [stage, "f" * 32]})
    assert (wrong.status, wrong.json["type"]) == (404, "urn:penstock:stage-not-found")
    assert ask(there, "DELETE", "/v1/transactions/apart").json["state"] == "aborted"
    gone = ask(here, "POST", "/v1/transactions", {"transaction": "apart", "stages": [stage]})
    assert (gone.status, gone.json["type"]) == (404, "urn:penstock:stage-not-found")
    assert ask(here, "GET", "/v1/transactions/apart").status == 404
    for queue in queues:
        assert ask(here, "GET", f"/v1/queues/{queue}").status == 404
    nothing = ask(here, "POST", "/v1/transactions", {"transaction": "nothing", "stages": []})
    assert (nothing.status, nothing.json["stored"]) == (200, [])


def test_letters_of_all_logs_are_repaired_in_one_step(pair: Site) -> None:
    here, there = pair.fronts
    queues = fill(pair, "repaired")
    with connect(here.url("phpmq")) as client:
        for queue in queues:
            (message,) = client.consume(queue, count=1)
            message.reject()
    for queue in queues:
        until(lambda queue=queue: here.ask(f"/v1/queues/{queue}")["dead"] == 1, f"{queue} to be dead")  # type: ignore[misc]
    rows = [json.dumps({"queue": queue, "offset": 0, "value": "whole"}).encode() for queue in queues]
    stage = ask(here, "POST", "/v1/stages", b"\n".join(rows), transaction="repair", redrive="true")
    assert stage.status == 200, stage
    done = ask(there, "POST", "/v1/transactions", {"transaction": "repair", "stages": [stage.json["stage"]]})
    assert done.status == 200, done
    with connect(there.url("phpmq")) as client:
        for queue in queues:
            (message,) = client.consume(queue, count=1)
            assert message.body == b"whole"
            message.ack()


def test_what_front_ends_ask_each_other_nobody_else_may(pair: Site) -> None:
    for front in pair.fronts:
        assert ask(front, "POST", "/v1/logs", b"x").status == 404


@pytest.mark.parametrize("dies", some(["coordinator", "another", "all"], "another"))
def test_a_transaction_is_whole_whoever_is_killed(tmp_path: Path, dies: str) -> None:
    """While commits go on, one after the other, one front-end, or all, are killed and started again."""
    queues = queues_of_all("whole")
    committed: list[int] = []
    with site(tmp_path, nodes=1, fronts=2, shards=SHARDS) as running:
        running.balanced()
        here, there = running.fronts

        def commit(number: int) -> None:
            key = f"batch/{number}"
            until(lambda: tried(key), f"{key} to be committed", 60)
            committed.append(number)

        def tried(key: str) -> bool:
            rows = b"".join(json.dumps({"queue": it, "value": key}).encode() + b"\n" for it in queues)
            try:
                stage = ask(here, "POST", "/v1/stages", rows, transaction=key)
                if stage.status != 200:
                    return False
                body = {"transaction": key, "stages": [stage.json["stage"]]}
                return ask(here, "POST", "/v1/transactions", body).status == 200
            except (OSError, HTTPException):
                return False

        def goes_on() -> None:
            for number in range(40):
                commit(number)

        thread = threading.Thread(target=goes_on)
        thread.start()
        until(lambda: len(committed) > 5, "some commits")
        for front in {"coordinator": [here], "another": [there], "all": [here, there]}[dies]:
            front.signal(signal.SIGKILL)
        if dies != "another":
            here.wait()
            here.start()
        if dies != "coordinator":
            there.wait()
            there.start()
        thread.join(120)
        assert committed == list(range(40))
        for queue in queues:
            lines = ask(here, "GET", f"/v1/queues/{queue}/search").body.splitlines()
            found = sorted(it["value"] for it in map(json.loads, lines) if "value" in it)
            assert found == sorted(f"batch/{number}" for number in range(40))


def payloads(front: FrontEnd, queue: str) -> list[str]:
    """Of what is living there."""
    lines = ask(front, "GET", f"/v1/queues/{queue}/search", state="ready,held,dead,delayed").body.splitlines()
    return [it["value"] for it in map(json.loads, lines) if "value" in it]


def test_messages_are_copied_and_moved_between_logs(pair: Site) -> None:
    """Wherever both are led, and whoever is asked."""
    queues = fill(pair, "copied", 4)
    for number, (one, another) in enumerate(itertools.permutations(queues, 2)):
        front = pair.fronts[number % 2]
        there = f"{another}.of.{one}"
        while shard_of(there, SHARDS) != shard_of(another, SHARDS):
            there += "x"
        body = {"to": there, "offsets": [1, 2]}
        for repeated in (0, 2):  # The same call again copies nothing twice.
            reply = api_ask(front, f"/v1/queues/{one}/copy", body, {"Idempotency-Key": "once"})
            assert (reply.status, reply.json["copied"], reply.json["repeated"]) == (200, 2, repeated), reply
            assert reply.json["ranges"] == [[0, 2]]
        assert payloads(front, there) == ["1", "2"]
        for moved in (2, 0):
            reply = ask(front, "POST", f"/v1/queues/{there}/move", {"to": f"{one}.back", "state": ["ready"]})
            assert (reply.status, reply.json["moved"]) == (200, moved), reply
        assert payloads(front, there) == []
    for one in queues:
        assert sorted(payloads(pair.fronts[0], f"{one}.back")) == ["1", "1", "1", "2", "2", "2"]
        assert payloads(pair.fronts[1], one) == ["0", "1", "2", "3"]


def api_ask(front: FrontEnd, path: str, body: Any, headers: dict[str, str]) -> Reply:
    with Api(front.ports["http"]) as api:
        return api.ask("POST", path, json.dumps(body).encode(), headers)


def test_what_somebody_holds_does_not_move_to_another_log(pair: Site) -> None:
    one, another = fill(pair, "held", 4)[:2]
    here, there = pair.fronts
    taken = ask(here, "POST", f"/v1/queues/{one}/take", max=2).json["messages"]
    moved = ask(there, "POST", f"/v1/queues/{one}/move", {"to": another, "ranges": [[0, 4]]}).json
    assert (moved["selected"], moved["moved"], moved["held_ranges"]) == (4, 2, [[0, 2]])
    assert payloads(here, another) == ["0", "1", "2", "3", "2", "3"]
    settled = ask(there, "POST", f"/v1/queues/{one}/settle", {"ack": [it["id"] for it in taken]}).json
    assert settled["ack"] == 2
    assert payloads(there, one) == []
    dry = ask(here, "POST", f"/v1/queues/{another}/move", {"to": one, "state": ["ready"], "dry_run": True})
    assert (dry.json["selected"], dry.json["moved"]) == (6, 0)
    assert ask(here, "POST", f"/v1/queues/{another}/move", {"to": "\ud800", "state": ["ready"]}).status == 400


def test_commands_copy_and_move_between_logs(pair: Site, capsys: pytest.CaptureFixture[str]) -> None:
    one, another = fill(pair, "typed", 2)[:2]
    url = ["--url", f"http://127.0.0.1:{pair.fronts[1].ports['http']}"]
    assert main(["copy", one, "--to", another, "--offsets", "0", *url]) == 0
    assert main(["move", one, "--to", another, "--state", "ready", *url]) == 0
    capsys.readouterr()
    assert payloads(pair.fronts[0], another) == ["0", "1", "0", "0", "1"]
    assert payloads(pair.fronts[0], one) == []


@pytest.mark.parametrize("dies", some(["source", "target", "both"], "both"))
def test_messages_that_move_are_there_once_whoever_is_killed(tmp_path: Path, dies: str) -> None:
    """Back and forth between two logs, while front-ends are killed and started again."""
    messages = 3000
    with site(tmp_path, nodes=1, fronts=2, shards=SHARDS) as running:
        running.balanced()
        leaders = running.leaders(running.fronts[0])
        queues = queues_of_all("moved")
        one, another = (next(it for it, led in zip(queues, leaders, strict=True) if led == x) for x in "ab")
        here, there = running.fronts
        rows = b"".join(b'{"value": "%d"}\n' % number for number in range(messages))
        with Api(here.ports["http"]) as api:
            assert api.ask("POST", f"/v1/queues/{one}/batch", rows, {"Content-Type": NDJSON}).status == 200
        done: list[int] = []

        def goes_on() -> None:
            for number in range(6):
                source, target = ((one, another), (another, one))[number % 2]
                until(lambda it=(source, target): moved(*it), "all to be moved", 60)  # type: ignore[misc]
                done.append(number)

        def moved(source: str, target: str) -> bool:
            """Whether nothing is left there."""
            for front in running.fronts:
                try:
                    reply = ask(
                        front, "POST", f"/v1/queues/{source}/move", {"to": target, "state": ["ready"]}
                    )
                    if reply.status == 200 and not reply.json["selected"]:
                        return bool(ask(front, "GET", f"/v1/queues/{target}").json["ready"] == messages)
                except (OSError, HTTPException, KeyError):
                    pass
            return False

        thread = threading.Thread(target=goes_on)
        thread.start()
        until(lambda: bool(done), "the first to be moved")
        for front in {"source": [here], "target": [there], "both": [here, there]}[dies]:
            front.signal(signal.SIGKILL)
            front.wait()
            front.start()
        thread.join(120)
        assert done == list(range(6))
        for queue, count in ((one, messages), (another, 0)):
            found = sorted(map(int, payloads(here, queue)))
            assert found == list(range(count))


def test_what_is_about_a_front_end_is_said_by_each(pair: Site) -> None:
    for front in pair.fronts:
        assert ask(front, "GET", "/healthz").status == 200
        assert front.ask("/readyz")["ready"]
        engine = front.ask("/v1/engine")
        assert len(engine["cluster"]["shards"]) == SHARDS
        metrics = ask(front, "GET", "/metrics").body.decode()
        assert 'penstock_build_info{engine="jetstream"' in metrics
        names = [line.split("{")[0].split(" ")[0] for line in metrics.splitlines() if line[:1] != "#"]
        samples = [line.rpartition(" ")[0] for line in metrics.splitlines() if line[:1] != "#"]
        assert len(samples) == len(set(samples)), "no sample is there twice"
        assert "penstock_sync_seconds_count" in names
        for path in ("/v1/health", "/v1/marks", "/v1/samples", "/v1/audit", "/openapi.json"):
            assert ask(front, "GET", path).status == 200, path
        assert ask(front, "GET", "/v1/folder").status == 404
        for path in (f"/v1/backup?shard={SHARDS}", "/v1/backup?shard=x"):
            assert ask(front, "GET", path).status == 400, path
        assert ask(front, "GET", "/v1/nothing").status == 404
        assert ask(front, "POST", "/v1/cuts", b"nonsense").status == 400


def test_each_says_how_far_its_copies_are(pair: Site) -> None:
    """Of what it leads, and of what it stands by for."""
    for front in pair.fronts:
        cluster = front.ask("/v1/engine")["cluster"]
        wanted = [(it["leader"] == cluster["this"], 0) for it in cluster["shards"]]

        def told(front: FrontEnd = front) -> list[tuple[bool, int]]:
            return [(it["role"] == "leader", it["behind_bytes"]) for it in front.ask("/readyz")["copies"]]

        until(lambda told=told, wanted=wanted: told() == wanted, "all to be copied")  # type: ignore[misc]


def test_an_id_says_its_log(pair: Site) -> None:
    for shard, queue in enumerate(fill(pair, "named", 1)):
        (found,) = ask(pair.fronts[0], "GET", f"/v1/queues/{queue}/messages").json["messages"]
        for front in pair.fronts:
            until(lambda front=front: all(logs_of(front)), "all leaders to have said it")  # type: ignore[misc]
            has_it = [found["id"].startswith(log) for log in logs_of(front)]
            assert has_it == [number == shard for number in range(SHARDS)]


def logs_of(front: FrontEnd) -> list[str]:
    return [it["log"] for it in front.ask("/v1/engine")["cluster"]["shards"]]


def test_metrics_of_all_front_ends_are_told_by_each(pair: Site) -> None:
    queues = fill(pair, "counted", 3)
    for front in pair.fronts:
        text = ask(front, "GET", "/metrics", all="true").body.decode()
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")
        assert len(samples) == sum(line[:1] != "#" for line in text.splitlines()), "no sample is there twice"
        types = [line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(types) == len(set(types))
        leaders = [it["leader"] for it in front.ask("/v1/engine")["cluster"]["shards"]]
        for other, queue in zip(leaders, queues, strict=True):
            name = f'penstock_queue_ready_messages{{front_end="{other}",queue="{queue}"}}'
            assert float(samples[name]) == 3
            assert samples[f'penstock_front_end_up{{front_end="{other}"}}'] == "1.0"
        assert ask(front, "GET", "/metrics", all="perhaps").status == 400


def test_the_audit_is_that_of_all_front_ends(pair: Site) -> None:
    queues = fill(pair, "audited")
    for number, queue in enumerate(queues):
        assert ask(pair.fronts[number % 2], "POST", f"/v1/queues/{queue}/purge").status == 200
    for front in pair.fronts:
        answer = ask(front, "GET", "/v1/audit", last=10_000).json
        assert "missing" not in answer
        lines = answer["lines"]
        assert [it["time"] for it in lines] == sorted(it["time"] for it in lines)
        ended = {it["queue"] for it in lines if it["act"] == "purge" and it["result"] == "done"}
        assert ended >= set(queues)
        assert len({it["front_end"] for it in lines}) == 2
        found: list[Any] = []
        more: str | None = lines[0]["time"]
        while more is not None:
            page = ask(front, "GET", "/v1/audit", limit=3, **{"from": more}).json
            found += page["lines"]
            more = page["next"]
        assert found[: len(lines)] == lines


def test_an_address_is_read_as_everywhere(pair: Site) -> None:
    """However it is written: a queue is in the log of its name, and in no other."""
    for queue in queues_of_all("written"):
        for front in pair.fronts:
            assert ask(front, "POST", f"/v1/%71ueues/{queue}/messages", b"x").status == 200
            assert ask(front, "POST", f"/%761/queues/%77{queue[1:]}/messages", b"x").status == 200
        listed = ask(pair.fronts[0], "GET", "/v1/queues", match=queue).json["queues"]
        assert [it["offset_end"] for it in listed] == [4]


def test_odd_requests_are_answered_as_by_one_broker(pair: Site) -> None:
    for front in pair.fronts:
        for path in ("/v1/queues", "/v1/connections", "/metrics", "/v1/engine", "/v1/health"):
            assert ask(front, "HEAD", path).status == 200, path
        for path in ("/v1/search?limit=x", "/v1/queues?limit=x", f"/v1/connections/{'9' * 5000}"):
            assert ask(front, "GET", path).status == 400, path
        assert ask(front, "DELETE", "/v1/connections/5/more").status == 404
        assert ask(front, "PUT", "/v1/readers/odd", {"positions": {"\ud800": 0}}).status == 400
        for queue in queues_of_all("odd"):
            with socket.create_connection(("127.0.0.1", front.ports["http"]), 20) as caller:
                caller.sendall(f"GET /v1/queues/{queue} HTTP/1.0\r\n\r\n".encode())
                head = b"".join(iter(partial(caller.recv, 1 << 16), b"")).lower()
            assert head.startswith(b"http/1.1 404"), head
            assert head.count(b"\r\ndate:") == 1


def test_whose_words_are_believed(pair: Site) -> None:
    """What front-ends say to each other, nobody else can say."""
    queue = fill(pair, "believed")[0]
    for front in pair.fronts:
        with Api(front.ports["http"]) as api:
            for header in ({"penstock-here": "all"}, {"penstock-here": "7"}, {"penstock-user": "root"}):
                reply = api.ask("GET", f"/v1/queues/{queue}", headers=header)
                assert reply.status == 200, reply
                listed = api.ask("GET", "/v1/queues", headers=header, match="believed.*")
                assert len(listed.json["queues"]) == SHARDS


@pytest.mark.long
def test_a_front_end_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with site(tmp_path, nodes=1, fronts=2, shards=SHARDS) as running:
        running.balanced()
        queues = fill(running, "named")
        here, there = running.fronts
        led = running.leaders(here)
        there.pause()
        try:
            began = time.monotonic()
            listed = ask(here, "GET", "/v1/queues").json
            assert time.monotonic() - began < 8, "what one takes is bounded"
            if "missing" in listed:  # or its shards are led here by now
                assert [it.rpartition("-")[0] for it in listed["missing"]] == [there.name]
                assert {it["name"] for it in listed["queues"]} >= {
                    queue for shard, queue in enumerate(queues) if led[shard] == here.name
                }
        finally:
            there.resume()
        until(lambda: "missing" not in here.ask("/v1/queues"), "all of them to answer")


def test_what_is_left_out_of_a_list_is_named(pair: Site) -> None:
    """Also where nobody leads a log: a queue that is not told is there for all that anybody knows.

    The last test here: it leaves one front-end.
    """
    pair.balanced()
    queues = fill(pair, "whole")
    here, there = pair.fronts
    gone = there.ask("/v1/engine")["cluster"]["this"]
    there.kill()
    text = ask(here, "GET", "/metrics", all="1").body.decode()
    assert f'penstock_front_end_up{{front_end="{gone}"}} 0.0' in text
    assert ask(here, "GET", "/v1/audit", last=1).json["missing"] == [gone]

    def are_led_here() -> bool:
        reply = ask(here, "GET", "/v1/offsets", queues=",".join(queues))
        if reply.status == 503:
            return False
        is_whole = len(reply.json["queues"]) == SHARDS
        assert is_whole or reply.json["missing"], reply.json
        return is_whole and set(pair.leaders(here)) == {here.name}

    until(are_led_here, "all logs to be led again", 60)
