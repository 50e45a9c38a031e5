"""Dead letters that are repaired in a transaction: another payload, under the same id, once."""

import base64
import io
import json
from array import array
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.http.reading.looking import payloads_at
from penstock.log.disk import RealDisk
from penstock.log.log import Log
from penstock.log.reader import LogReader
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.life import Reason
from tests.http.api import ARROW, NDJSON, Api, Reply
from tests.http.conftest import StartBroker
from tests.http.morgue import bodies_left, ids, path_of, reject, take
from tests.log.inline import InlineWorker
from tests.server.harness import BrokerProcess

WHOLE = 5000
NOW_US = 1_700_000_000_000_000


def stage(api: Api, key: str, lines: list[dict[str, Any]], **query: object) -> Reply:
    body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return api.ask(
        "POST", "/v1/stages", body, {"Content-Type": NDJSON}, transaction=key, redrive="true", **query
    )


def commit(api: Api, key: str, *stages: Reply) -> dict[str, Any]:
    named = [it.json["stage"] for it in stages]
    fields = json.dumps({"transaction": key, "stages": named}).encode()
    reply = api.ask("POST", "/v1/transactions", fields, {"Content-Type": "application/json"})
    assert reply.status == 200, reply
    answer: dict[str, Any] = reply.json
    return answer


def repair(api: Api, queue: str, key: str, **values: str) -> None:
    """`o7="x"`: the letter at offset 7 gets the payload x."""
    lines = [{"offset": int(name[1:]), "value": value} for name, value in values.items()]
    staged = stage(api, key, lines, queue=queue)
    assert staged.status == 200, staged
    commit(api, key, staged)


def looked_at(api: Api, queue: str, **query: object) -> dict[int, tuple[str, bytes, bool]]:
    return {
        message["offset"]: (
            message["state"],
            base64.b64decode(message["value_base64"]),
            message["repaired"],
        )
        for message in api.get(path_of(queue, "messages"), **query)["messages"]
    }


def state_view(api: Api, queue: str) -> dict[int, tuple[str, bytes]]:
    reply = api.ask("GET", path_of(queue, "log"), view="state")
    assert reply.status == 200, reply
    with pa.ipc.open_stream(io.BytesIO(reply.body)) as stream:
        rows = stream.read_all().to_pylist()
    return {row["offset"]: (row["state"], row["value"]) for row in rows}


def test_a_letter_of_the_next_queue_of_that_name_is_not_repaired(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "repair.anew", [b"old"])
    identity = api.get(path_of("repair.anew"))["identity"]
    assert api.ask("DELETE", path_of("repair.anew")).status == 200
    reject(broker, api, "repair.anew", [b"new"])
    line = {"offset": 0, "value": "repaired"}
    reply = stage(api, "repair/anew", [line], queue="repair.anew", identity=identity)
    assert (reply.status, reply.problem) == (409, "queue-deleted")
    reply = api.ask(
        "POST", "/v1/stages", b"{}", {"Content-Type": NDJSON}, transaction="t", queue="q", identity=identity
    )
    assert (reply.status, reply.problem) == (400, "bad-request")
    identity = api.get(path_of("repair.anew"))["identity"]
    assert stage(api, "repair/anew", [line], queue="repair.anew", identity=identity).status == 200


def test_the_same_id_and_another_payload(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "repair.ids", [b"a", b"b", b"c"])
    before = ids(api, "repair.ids")
    repair(api, "repair.ids", "repair.ids/1", o0="A!", o2="")
    assert looked_at(api, "repair.ids") == {
        0: ("ready", b"A!", True),
        1: ("dead", b"b", False),
        2: ("ready", b"", True),
    }
    assert ids(api, "repair.ids") == before
    assert state_view(api, "repair.ids") == {0: ("ready", b"A!"), 1: ("dead", b"b"), 2: ("ready", b"")}
    one = api.get(path_of("repair.ids", "messages/0"))
    assert (base64.b64decode(one["value_base64"]), one["repaired"]) == (b"A!", True)
    assert [event["event"] for event in one["history"]] == ["accepted", "dead", "redriven"]
    assert [queue["name"] for queue in api.get("/v1/queues")["queues"] if "repair.ids" in queue["name"]] == [
        "repair.ids"
    ]
    assert bodies_left(broker, "repair.ids", 2) == [b"A!", b""]
    # The log has what was sent, and a message that is gone is what the log has.
    assert looked_at(api, "repair.ids")[0] == ("gone", b"a", False)


def test_a_commit_that_is_repeated_repairs_once(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "repair.once", [b"a"])
    staged = stage(api, "once", [{"offset": 0, "value": "A"}], queue="repair.once")
    assert commit(api, "once", staged)["stored"] == []
    assert take(broker, "repair.once", 1, lambda message: message.reject()) == [b"A"]
    assert commit(api, "once", staged)["repeated"] is True
    assert looked_at(api, "repair.once") == {0: ("dead", b"A", True)}


def test_conditions_see_the_payload_that_would_be_delivered(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "repair.where", [b'{"n": %d}' % n for n in range(6)])
    repair(api, "repair.where", "where/1", o1='{"n": 100}', o2='{"n": 200}', o4='{"n": 300}')
    take(broker, "repair.where", 3, lambda message: message.reject())
    answer = api.post(path_of("repair.where", "redrive"), {"where": "value.n >= 200"})
    assert answer["redriven"] == 2
    assert bodies_left(broker, "repair.where", 2) == [b'{"n": 200}', b'{"n": 300}']
    assert api.post(path_of("repair.where", "redrive"), {"where": "value.n = 1"})["redriven"] == 0
    dead = looked_at(api, "repair.where", state="dead")
    assert {offset: value for offset, (_, value, _) in dead.items()} == {
        0: b'{"n": 0}',
        1: b'{"n": 100}',
        3: b'{"n": 3}',
        5: b'{"n": 5}',
    }


def test_arrow_for_several_queues(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "repair.a", [b"a0", b"a1"])
    reject(broker, api, "repair.b", [b"b0", b"b1"])
    table = pa.table(
        {
            "queue": ["repair.b", "repair.a", "repair.b"],
            "offset": pa.array([1, 0, 0], pa.int64()),
            "value": pa.array([b"B1", b"A0", b"B0"], pa.binary()),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    staged = api.ask(
        "POST",
        "/v1/stages",
        sink.getvalue().to_pybytes(),
        {"Content-Type": ARROW},
        transaction="several",
        redrive="true",
    )
    commit(api, "several", staged)
    assert bodies_left(broker, "repair.b", 2) == [b"B1", b"B0"]
    assert bodies_left(broker, "repair.a", 1) == [b"A0"]


def test_a_key_again_with_payloads_for_other_letters(broker: BrokerProcess, api: Api) -> None:
    reject(broker, api, "repair.again", [b"a", b"b"])
    lines = [{"offset": 0, "value": "A"}, {"offset": 1, "value": "B"}]
    commit(api, "again", stage(api, "again", lines, queue="repair.again"))
    same = stage(api, "again", lines[::-1], queue="repair.again")
    assert commit(api, "again", same)["repeated"] is True
    exchanged = [{"offset": 1, "value": "A"}, {"offset": 0, "value": "B"}]
    fields = {
        "transaction": "again",
        "stages": [stage(api, "again", exchanged, queue="repair.again").json["stage"]],
    }
    reply = api.ask(
        "POST", "/v1/transactions", json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    assert (reply.status, reply.problem) == (409, "key-reused")
    assert state_view(api, "repair.again") == {0: ("ready", b"A"), 1: ("ready", b"B")}


def test_a_payload_that_is_not_synced_yet_is_waited_for(tmp_path: Path) -> None:
    log = Log.open(
        RealDisk(str(tmp_path)), NOW_US, settings=LogSettings(), writer=InlineWorker(), keeper=InlineWorker()
    )

    class Reader(LogReader):
        """While it looks for what is new, that is written."""

        looks = 0

        def refresh(self) -> None:
            self.looks += 1
            if self.looks == 5:
                log.flush(NOW_US)
                log.wait()
            super().refresh()

    dead = Batch.of([b"a"], protocol="http")
    dead.dead = Reason.BAD_RECORD
    log.transact("first", [("q", dead)], NOW_US)
    log.flush(NOW_US)
    log.wait()
    repaired = Batch.of([b"A"], protocol="http")
    repaired.repairs = array("q", [0])
    log.transact("second", [("q", repaired)], NOW_US)
    with Reader(str(tmp_path)) as reader:
        assert payloads_at(reader, "q", [0]) == {0: b"A"}
    log.abandon()


def test_a_large_one_survives_kills(start_broker: StartBroker) -> None:
    """Scattered letters, more than one step of the broker takes; both processes die in between."""
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        reject(broker, api, "q", [b"%d" % at for at in range(WHOLE)])
        lines = [{"offset": at, "value": f"repaired {at}"} for at in range(0, WHOLE, 2)]
        stages = [stage(api, "large", lines[at : at + 1000], queue="q") for at in range(0, len(lines), 1000)]
        commit(api, "large", *stages)
    broker.kill()
    broker.start()
    with Api(broker.ports["http"]) as api:
        assert commit(api, "large", *stages)["repeated"] is True
        found = state_view(api, "q")
        assert found == {
            at: ("ready", b"repaired %d" % at) if at % 2 == 0 else ("dead", b"%d" % at) for at in range(WHOLE)
        }
        assert bodies_left(broker, "q", WHOLE // 2) == [b"repaired %d" % at for at in range(0, WHOLE, 2)]


@pytest.mark.parametrize(
    ("line", "query", "words"),
    [
        ({"value": "x"}, {"queue": "repair.wrong"}, "the field 'offset' is missing"),
        ({"value": "x", "offset": -1}, {"queue": "repair.wrong"}, "field 'offset' is -1"),
        ({"value": "x", "offset": 0, "ttl": 3}, {"queue": "repair.wrong"}, "there is no field 'ttl'"),
        ({"value": "x", "offset": 0}, {"queue": "repair.wrong", "dead": "bad-record"}, "exclude each other"),
        ({"value": "x", "offset": 0}, {"queue": "no such queue"}, "no such queue"),
        ({"value": "x", "offset": 0}, {"queue": "\0repair.wrong"}, "queue"),
    ],
)
def test_nonsense_is_refused(
    broker: BrokerProcess, api: Api, line: dict[str, Any], query: dict[str, str], words: str
) -> None:
    if api.ask("GET", path_of("repair.wrong")).status == 404:
        reject(broker, api, "repair.wrong", [b"a"])
    reply = stage(api, "wrong", [line], **query)
    assert reply.status in (400, 404), reply
    assert words in reply.json["detail"]
    assert looked_at(api, "repair.wrong") == {0: ("dead", b"a", False)}
