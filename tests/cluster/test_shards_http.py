"""The HTTP API of a cluster with several logs: every front-end answers for all of them."""

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

from penstock.client import ConnectionLost, connect
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


def test_messages_are_not_copied_into_the_log_of_another_queue(pair: Site) -> None:
    """Where nobody who asks for that queue would find them."""
    one, another = fill(pair, "copied", 1)[:2]
    for front in pair.fronts:
        for what in ("copy", "move"):
            body = {"to": another, "state": ["ready"]}
            refused = ask(front, "POST", f"/v1/queues/{one}/{what}", body)
            assert (refused.status, refused.json["type"]) == (409, "urn:penstock:conflict")
            assert another in refused.json["detail"]
        assert [it["ready"] for it in front.ask("/v1/queues?match=copied*")["queues"]] == [1] * SHARDS


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
    there.kill()

    def are_led_here() -> bool:
        reply = ask(here, "GET", "/v1/offsets", queues=",".join(queues))
        if reply.status == 503:
            return False
        is_whole = len(reply.json["queues"]) == SHARDS
        assert is_whole or reply.json["missing"], reply.json
        return is_whole and set(pair.leaders(here)) == {here.name}

    until(are_led_here, "all logs to be led again", 60)
