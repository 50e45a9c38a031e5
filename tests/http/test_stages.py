"""Stages: what is staged is on the disk, whole and as it was; what is not, is found out."""

import json
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.http.stages import files as stage_files
from penstock.http.stages.chunks import load_chunk, plan_chunks, read_chunks
from penstock.http.stages.files import (
    PIECE_BYTES,
    PIECE_MESSAGES,
    Intent,
    Stage,
    StageDamaged,
    StageFolder,
    StagesInUse,
    encode_stage,
)
from penstock.log.reader import LogReader
from penstock.model.batch import RETRIES_NONE, Batch
from penstock.model.life import Reason
from tests.http.api import ARROW, NDJSON, Api, Reply
from tests.http.conftest import StartBroker
from tests.server.harness import BrokerProcess, until

NOW_US = 1_700_000_000_000_000
Message = tuple[bytes, int, int]  # payload, TTL, retries


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StageFolder]:
    folder = StageFolder(str(tmp_path))
    folder.open()
    yield folder
    folder.close()


def written(folder: StageFolder, key: str, *parts: tuple[str, Batch]) -> Stage:
    file = encode_stage(key, parts, NOW_US)
    folder.write(file)
    return file.stage


def messages_of(batch: Batch) -> list[Message]:
    count = len(batch)
    ttls = batch.ttl_seconds or [0] * count
    retries = batch.retries or [RETRIES_NONE] * count
    return list(zip(batch.messages(), ttls, retries, strict=True))


def read_back(folder: StageFolder, *stage_ids: str) -> dict[str, list[Message]]:
    found: dict[str, list[Message]] = {}
    for stage_id in stage_ids:
        for queue, batch in folder.read(stage_id, folder.pieces(stage_id)):
            found.setdefault(queue, []).extend(messages_of(batch))
    return found


def some_batch(rng: random.Random, count: int, bytes_max: int) -> Batch:
    return Batch.of(
        [rng.randbytes(rng.randint(0, bytes_max)) for _ in range(count)],
        ttl_seconds=[rng.randint(0, 9) for _ in range(count)] if rng.random() < 0.5 else None,
        retries=[rng.randint(-1, 255) for _ in range(count)] if rng.random() < 0.5 else None,
        protocol="http",
    )


# --- files ---


def test_dead_letters_are_staged_apart_from_the_living(folder: StageFolder) -> None:
    living, dead = (
        Batch.of([b"a", b"b"], protocol="http"),
        Batch.of([b"c"] * (PIECE_MESSAGES + 1), protocol="http"),
    )
    dead.dead = Reason.BAD_RECORD
    stages = [written(folder, "key", ("orders", batch)).id for batch in (living, dead, living)]
    (chunk,) = plan_chunks(folder, stages, 1 << 30, 1 << 30)
    loaded = [(queue, batch.dead, len(batch)) for queue, batch in load_chunk(folder, chunk)]
    assert loaded == [("orders", Reason.NONE, 4), ("orders", Reason.BAD_RECORD, PIECE_MESSAGES + 1)]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_staged_is_read_back_as_it_was(folder: StageFolder, seed: int) -> None:
    rng = random.Random(seed)
    parts = [
        ("orders", some_batch(rng, 50, 100)),
        ("größe", some_batch(rng, 30_000, 10)),
        ("large", some_batch(rng, 30, 300_000)),
        ("giant", Batch.of([b"", b"x" * (3 * PIECE_BYTES), b""], protocol="http")),
    ]
    stage = written(folder, "key", *parts)
    assert read_back(folder, stage.id) == {queue: messages_of(batch) for queue, batch in parts}
    pieces = folder.pieces(stage.id)
    assert all(piece.messages <= PIECE_MESSAGES for piece in pieces)
    assert all(piece.payload_bytes <= PIECE_BYTES or piece.messages == 1 for piece in pieces)
    assert len(pieces) > len(parts)
    assert folder.stages() == [stage]
    assert stage.count == sum(len(batch) for _, batch in parts)
    assert stage.payload_bytes == sum(len(batch.payload) for _, batch in parts)


def test_every_flipped_bit_and_every_cut_is_found(folder: StageFolder) -> None:
    batch = Batch.of([b"one", b"", b"three"], ttl_seconds=[1, 2, 3], retries=[0, 1, 2], protocol="http")
    stage = written(folder, "key", ("orders", batch), ("mails", Batch.of([b"m"], protocol="http")))
    path = Path(folder.path) / f"{stage.id}.stage"
    whole = path.read_bytes()
    changed = [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(len(whole))]
    cut = [whole[:length] for length in range(len(whole))]
    for data in (*changed, *cut, whole + b"\0"):
        path.write_bytes(data)
        with pytest.raises(StageDamaged, match=stage.id):
            read_back(folder, stage.id)
    path.write_bytes(whole)
    assert read_back(folder, stage.id)["orders"][0] == (b"one", 1, 0)


def test_a_damaged_head_is_told_with_the_stages(folder: StageFolder) -> None:
    stage = written(folder, "key", ("orders", Batch.of([b"one"], protocol="http")))
    path = Path(folder.path) / f"{stage.id}.stage"
    path.write_bytes(path.read_bytes().replace(b'"key"', b'"kex"'))
    (found,) = folder.stages()
    assert (found.id, found.key) == (stage.id, "")
    assert "checksum" in found.damage


def test_no_text_of_a_caller_is_in_a_path(folder: StageFolder) -> None:
    key = "../../etc/passwd"
    stage = written(folder, key, ("../orders", Batch.of([b"one"], protocol="http")))
    folder.write_intent(Intent(key, (stage.id,), 1, 1, begun=False))
    names = sorted(os.listdir(folder.path))
    for name in names:
        assert name == "lock" or set(name.rpartition(".")[0]) <= set("0123456789abcdef"), name
    assert folder.intents() == ([Intent(key, (stage.id,), 1, 1, begun=False)], [])
    folder.write_intent(Intent(key, (stage.id,), 1, 1, begun=True))
    assert folder.intents() == ([Intent(key, (stage.id,), 1, 1, begun=True)], [])
    folder.remove_intent(key)
    folder.remove([stage.id])
    folder.remove([stage.id])
    assert os.listdir(folder.path) == ["lock"]


def test_what_is_staged_is_not_for_everybody(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        folder = StageFolder(str(tmp_path))
        folder.open()
        folder.write(encode_stage("key", [("q", Batch.of([b"secret"]))], 0))
        folder.write_intent(Intent("key", (), 1, 1, False))
    finally:
        os.umask(before)
    folder.close()
    for path in (tmp_path / "stages", *(tmp_path / "stages").iterdir()):
        assert path.stat().st_mode & 0o7 == 0, path


def test_a_damaged_intent_is_told(folder: StageFolder) -> None:
    folder.write_intent(Intent("key", ("a" * 32,), 1, 1, begun=False))
    path = Path(folder.intent_path("key"))
    path.write_bytes(path.read_bytes()[:-1])
    found, (damage,) = folder.intents()
    assert found == []
    assert str(path) in damage


def test_what_was_not_finished_is_removed(folder: StageFolder, tmp_path: Path) -> None:
    stage = written(folder, "key", ("orders", Batch.of([b"one"], protocol="http")))
    (Path(folder.path) / "left.stage.tmp").write_bytes(b"half")
    folder.close()
    again = StageFolder(str(tmp_path))
    again.open()
    try:
        assert sorted(os.listdir(again.path)) == sorted(["lock", f"{stage.id}.stage"])
    finally:
        again.close()


def test_one_process_has_the_folder(
    folder: StageFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = StageFolder(str(tmp_path))
    monkeypatch.setattr(stage_files, "LOCK_SECONDS", 0.1)
    with pytest.raises(StagesInUse, match="another process"):
        other.open()
    monkeypatch.setattr(stage_files, "LOCK_SECONDS", 20.0)
    waiting = threading.Thread(target=other.open)
    waiting.start()
    folder.close()
    waiting.join(20)
    assert not waiting.is_alive()
    other.close()


# --- chunks ---


@pytest.mark.parametrize("seed", range(5))
def test_chunks_have_everything_once_in_order_and_are_always_the_same(folder: StageFolder, seed: int) -> None:
    rng = random.Random(seed)
    expected: dict[str, list[Message]] = {}
    ids: list[str] = []
    for _ in range(rng.randint(2, 6)):
        parts = [
            (queue, some_batch(rng, rng.randint(1, 25_000), rng.choice((0, 5, 100))))
            for queue in rng.sample(("a", "b", "c"), rng.randint(1, 3))
        ]
        ids.append(written(folder, "key", *parts).id)
        for queue, batch in parts:
            expected.setdefault(queue, []).extend(messages_of(batch))
    chunks = plan_chunks(folder, ids, 500_000, 20_000)
    assert sum(len(batch) for _, batch in read_chunks(folder, chunks)) == sum(map(len, expected.values()))
    found: dict[str, list[Message]] = {}
    for chunk in chunks:
        parts = load_chunk(folder, chunk)
        assert len({queue for queue, _ in parts}) == len(parts), "one batch for each queue"
        total = sum(len(batch) for _, batch in parts)
        assert total <= 20_000 or len(chunk) == 1
        assert sum(len(batch.payload) for _, batch in parts) <= 500_000 or len(chunk) == 1
        for queue, batch in parts:
            assert batch.protocol == "http"
            found.setdefault(queue, []).extend(messages_of(batch))
    assert found == expected
    assert plan_chunks(folder, ids, 500_000, 20_000) == chunks
    assert plan_chunks(folder, [], 500_000, 20_000) == []


def test_a_stage_that_is_gone_is_damage(folder: StageFolder) -> None:
    stage = written(folder, "key", ("orders", Batch.of([b"one"], protocol="http")))
    chunks = plan_chunks(folder, [stage.id], 1, 1)
    folder.remove([stage.id])
    with pytest.raises(StageDamaged, match="is gone"):
        load_chunk(folder, chunks[0])
    with pytest.raises(StageDamaged, match="is gone"):
        plan_chunks(folder, [stage.id], 1, 1)


# --- the API ---


def lines(*messages: dict[str, object]) -> bytes:
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


def stage(api: Api, key: str, body: bytes, media: str = NDJSON, **query: object) -> Reply:
    return api.ask("POST", "/v1/stages", body, {"Content-Type": media}, transaction=key, **query)


def test_nobody_sees_what_is_staged(api: Api, broker: BrokerProcess) -> None:
    reply = stage(api, "unseen", lines({"value": "é"}, {"value_base64": "AAE="}), queue="unseen")
    assert reply.status == 200, reply
    assert {**reply.json, "stage": ""} == {"stage": "", "count": 2, "bytes": 4}
    assert api.ask("GET", "/v1/queues/unseen").problem == "queue-not-found"
    assert api.get("/v1/transactions/unseen") == {
        "transaction": "unseen",
        "state": "open",
        "committing": False,
        "stages": [reply.json],
        "stored": [],
    }
    # The file is there before the answer is.
    assert (broker.folder / "data" / "stages" / f"{reply.json['stage']}.stage").exists()


def test_messages_name_their_queues_where_the_address_does_not(api: Api) -> None:
    body = lines(
        {"value": "1", "queue": "stage-a"},
        {"value": "2", "queue": "stage-b/c", "ttl": 100, "retries": 3},
        {"value": "3", "queue": "stage-a"},
    )
    first = stage(api, "queues", body).json["stage"]
    stored = api.post("/v1/transactions", {"transaction": "queues", "stages": [first]})["stored"]
    assert stored == [
        {"queue": "stage-a", "offset_start": 0, "offset_end": 2},
        {"queue": "stage-b/c", "offset_start": 0, "offset_end": 1},
    ]
    (message,) = api.get("/v1/queues/stage-b%2Fc/messages")["messages"]
    assert (message["ttl"], message["retries"], message["protocol"]) == (100, 3, "http")


def test_arrow_is_staged_too(api: Api) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"value": [b"one", b"two"], "queue": ["arrow-a", "arrow-b"], "ttl": [None, 9]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    reply = stage(api, "arrow", sink.getvalue().to_pybytes(), ARROW)
    assert reply.json["count"] == 2
    api.post("/v1/transactions", {"transaction": "arrow", "stages": [reply.json["stage"]]})
    (message,) = api.get("/v1/queues/arrow-b/messages")["messages"]
    assert (message["value_base64"], message["ttl"]) == ("dHdv", 9)


@pytest.mark.parametrize(
    ("body", "query", "words"),
    [
        (b"", {"queue": "q"}, "no message"),
        (lines({"value": "x"}), {}, "queue"),
        (lines({"value": "x", "queue": "q"}), {"queue": "q"}, "line 1"),
        (lines({"value": "x", "queue": "q.dead"}), {}, "dead letters"),
        (lines({"value": "x"}), {"queue": "q.dead"}, "dead letters"),
        (lines({"value": "x"}), {"queue": "q" * 256}, "bytes"),
        (lines({"value": "x"}), {"queue": "q", "transaction": ""}, "printable"),
        (lines({"value": "x"}), {"queue": "q", "transaction": "k" * 201}, "printable"),
        (lines({"value": "x"}), {"queue": "q", "transaction": "ü"}, "printable"),
        (lines({"value": "x"}), {"queue": "q", "transaction": None}, "missing"),
    ],
)
def test_what_cannot_be_staged(api: Api, body: bytes, query: dict[str, object], words: str) -> None:
    words_sent = {"transaction": "wrong", **query}
    reply = api.ask("POST", "/v1/stages", body, {"Content-Type": NDJSON}, **words_sent)
    assert reply.problem == "bad-request"
    assert words in reply.json["detail"]
    assert api.ask("GET", "/v1/transactions/wrong").problem == "transaction-not-found"


def test_a_body_of_another_kind_is_refused(api: Api) -> None:
    assert stage(api, "kind", b"x", "text/plain", queue="q").problem == "unsupported-media-type"


def test_bounds_of_a_body_and_of_all_stages(start_broker: StartBroker) -> None:
    broker = start_broker("--http-stages-bytes-max", "4000", "--http-body-bytes-max", "3000")
    with Api(broker.ports["http"]) as api:
        first = stage(api, "a", lines({"value": "x" * 2000}), queue="q")
        assert first.status == 200
        full = stage(api, "b", lines({"value": "x" * 2000}), queue="q")
        assert full.problem == "disk-full"
        assert "stages-bytes-max" in full.json["detail"]
        # A commit and an abort make room again.
        api.post("/v1/transactions", {"transaction": "a", "stages": [first.json["stage"]]})
        assert stage(api, "b", lines({"value": "x" * 2000}), queue="q").status == 200
        assert api.ask("DELETE", "/v1/transactions/b").json["state"] == "aborted"
        assert stage(api, "c", lines({"value": "x" * 2000}), queue="q").status == 200
    with Api(broker.ports["http"]) as api:
        assert stage(api, "d", lines({"value": "x" * 3000}), queue="q").problem == "body-too-large"


def test_the_bound_counts_what_was_there_before_a_restart(start_broker: StartBroker) -> None:
    broker = start_broker("--http-stages-bytes-max", "4000")
    with Api(broker.ports["http"]) as api:
        assert stage(api, "a", lines({"value": "x" * 2000}), queue="q").status == 200
    broker.kill()
    broker.start()
    with Api(broker.ports["http"]) as api:
        assert stage(api, "b", lines({"value": "x" * 2000}), queue="q").problem == "disk-full"


def test_orphans_expire(start_broker: StartBroker) -> None:
    broker = start_broker("--http-stage-seconds", "1")
    with Api(broker.ports["http"]) as api:
        orphan = stage(api, "orphan", lines({"value": "x"}), queue="q").json["stage"]
        until(lambda: api.ask("GET", "/v1/transactions/orphan").status == 404, "the orphan to be removed")
        folder = broker.folder / "data" / "stages"
        until(lambda: not list(folder.glob("*.stage")), "its file to go, which it does a moment later")
        gone = api.ask("POST", "/v1/transactions", {"transaction": "orphan", "stages": [orphan]})
        assert gone.problem == "stage-not-found"
    assert "transaction 'orphan' was not committed for" in broker.log()
    assert "its 1 stages are removed" in broker.log()


def test_a_start_sweeps_too_and_what_is_young_enough_stays(start_broker: StartBroker) -> None:
    broker = start_broker()
    folder = broker.folder / "data" / "stages"
    with Api(broker.ports["http"]) as api:
        stage(api, "young", lines({"value": "x"}), queue="q")
    broker.kill()
    old = encode_stage("old", [("q", Batch.of([b"x"], protocol="http"))], NOW_US)
    (folder / f"{old.stage.id}.stage").write_bytes(b"".join(old.buffers))
    broker.start()
    with Api(broker.ports["http"]) as api:
        assert api.ask("GET", "/v1/transactions/old").problem == "transaction-not-found"
        assert len(api.get("/v1/transactions/young")["stages"]) == 1
    assert "transaction 'old' was not committed for" in broker.log()


def test_the_log_does_not_mind_the_folder(
    start_broker: StartBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"one", b"two")
        stage(api, "open", lines({"value": "x"}), queue="orders")
        assert [m["offset"] for m in api.get("/v1/queues/orders/messages")["messages"]] == [0, 1]
        assert api.get("/v1/engine")["damage"] == []
    data = str(broker.folder / "data")
    for stopped in (False, True):
        if stopped:
            assert broker.stop() == 0
            os.unlink(os.path.join(data, "watermark"))  # a reader has to look at all files now
        assert main(["verify", data]) == 0
        assert "stages" not in capsys.readouterr().out
        with LogReader(data) as reader:
            assert reader.queues()["orders"].offset_end == 2
    assert main(["dump", data]) == 0
    broker.start()
    with Api(broker.ports["http"]) as api:
        assert len(api.get("/v1/transactions/open")["stages"]) == 1
