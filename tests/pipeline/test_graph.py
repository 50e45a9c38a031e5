"""Pipelines that are graphs: several sinks, tables, expectations; once, whatever ends between them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from deltalake import DeltaTable

from penstock.pipeline import batchwise
from penstock.pipeline.parsing import COPY_BYTES_MAX
from penstock.pipeline.running import PipelineFailed
from tests.pipeline.rig import Rig, orders

GRAPH = """
[[source]]
name = "orders"
url = "URL"
subscribe = "QUEUE"
startingOffsets = "earliest"
retrySeconds = 5
[source.parse]
format = "json"
schema = "id bigint not null, region string, amount double"
[[table]]
name = "regions"
format = "csv"
path = "FOLDER/regions.csv"
schema = "region string, manager string"
options = {header = true}
[[expect]]
name = "known"
on = "orders"
sql = "region in ('north', 'south', 'west')"
on-violation = "dead"
[[expect]]
name = "large"
on = "named"
sql = "amount >= 1"
[[expect]]
name = "managed"
on = "named"
sql = "manager is not null"
on-violation = "drop"
[[step]]
name = "named"
sql = "select o.id, o.region, o.amount, r.manager from orders o left join regions r using (region)"
[[step]]
name = "letters"
from = "named"
sql = "select to_json(struct(id, manager)) as value, region from input"
[[step]]
name = "sums"
sql = "select region, count(*) as n from named group by region"
[[sink]]
name = "files"
from = "named"
format = "parquet"
path = "FOLDER/files"
partitionBy = "region"
[[sink]]
name = "table"
from = "named"
format = "delta"
path = "FOLDER/table"
[[sink]]
name = "out"
from = "letters"
format = "penstock"
queue = "QUEUE.{region}"
[[sink]]
name = "counts"
from = "sums"
format = "delta"
mode = "complete"
path = "FOLDER/sums"
[run]
checkpoint = "FOLDER/checkpoint"
"""


def graph(rig: Rig, queue: str) -> Any:
    (rig.folder / "regions.csv").write_text("region,manager\nnorth,Ann\nsouth,Bob\n")
    return rig.pipeline(queue, GRAPH.replace("QUEUE", queue))


def rows_of(path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DeltaTable(path).to_pyarrow_table().to_pylist()
    return found


def found(rig: Rig, queue: str) -> tuple[list[int], list[int], list[int], dict[str, int]]:
    files = sorted(row["id"] for row in rig.parquet(f"{rig.folder}/files"))
    table = sorted(row["id"] for row in rows_of(f"{rig.folder}/table"))
    sent = [*rig.messages(f"{queue}.north"), *rig.messages(f"{queue}.south")]
    sums = {row["region"]: row["n"] for row in rows_of(f"{rig.folder}/sums")}
    return files, table, sorted(json.loads(it)["id"] for it in sent), sums


def test_several_sinks_are_each_written_once_whatever_ends_between_them(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = graph(rig, "graph")
    lost = json.dumps({"id": 90, "region": "moon" * COPY_BYTES_MAX, "amount": 1}).encode()
    rig.send("graph", [*orders(6), b"bad", lost])

    def dies(self: batchwise.QueueSink, *_: object) -> int:
        raise RuntimeError("between two sinks")

    with monkeypatch.context() as patch:
        patch.setattr(batchwise.QueueSink, "write", dies)
        with pytest.raises(PipelineFailed, match="between two sinks"):
            rig.run_once(pipeline)
    good = [number for number in range(6) if number % 3 != 2]  # nobody manages the west
    # The first two have the batch, and the letters are told; the rest is done by the next start.
    assert sorted(row["id"] for row in rig.parquet(f"{rig.folder}/files")) == good
    run = rig.new_run(pipeline)
    run.run()
    counts = {"north": 2, "south": 2}
    assert found(rig, "graph") == (good, good, good, counts)
    letters = rig.bad_records("graph")
    assert [(it["offset"], it["error"]) for it in letters] == [
        (6, "it is not JSON"),
        (7, "against expectation known: region in ('north', 'south', 'west')"),
    ]
    assert letters[1]["value"].startswith('{"id":90,"region":"moon')
    assert len(letters[1]["value"]) < COPY_BYTES_MAX < letters[1]["value_bytes"]
    state = run._teller.state()
    assert state["bad_records"] == 1
    assert state["expectations"] == {"known": 1, "large": 2, "managed": 2}
    # Each sees what those before it have let through: not the bad record, then not the row of the moon.
    assert state["expectations_checked"] == {"known": 7, "large": 6, "managed": 6}
    with rig.api() as api:
        about = api.get("/v1/readers/graph")["about"]
        metrics = api.ask("GET", "/metrics").body.decode()
    assert {name: about[name] for name in ("expectations", "expectations_checked")} == {
        name: state[name] for name in ("expectations", "expectations_checked")
    }
    assert 'penstock_reader_expectation_rows_total{expectation="large",reader="graph"} 6.0' in metrics
    assert state["sinks"] == {"files": 4, "table": 4, "out": 4, "counts": 2}
    assert any(line.startswith("graph: expectation managed: 2 of 6 rows against it") for line in rig.said)
    # A batch of each query once more, and something new behind it.
    for checkpoint in ("checkpoint", "checkpoint/flows/sums.complete"):
        rig.forget_last_batch(f"{rig.folder}/{checkpoint}")
    rig.send("graph", orders(2, first=6))
    rig.run_once(pipeline)
    good += [6, 7]
    assert found(rig, "graph") == (good, good, good, {"north": 3, "south": 3})
    assert rig.bad_records("graph") == letters
    assert not (Path(rig.folder) / "checkpoint" / "bad-records").exists()


@pytest.mark.long
def test_an_expectation_can_end_a_pipeline_before_anything_is_written(rig: Rig) -> None:
    text = GRAPH.replace('on-violation = "drop"', 'on-violation = "fail"').replace("QUEUE", "graph-fail")
    (rig.folder / "regions.csv").write_text("region,manager\nnorth,Ann\nsouth,Bob\n")
    rig.send("graph-fail", orders(3))
    with pytest.raises(PipelineFailed, match=r"expectation managed: .*west"):
        rig.run_once(rig.pipeline("graph-fail", text))
    assert not (rig.folder / "table").exists()
    # With a table that knows more, it goes on.
    (rig.folder / "regions.csv").write_text("region,manager\nnorth,Ann\nsouth,Bob\nwest,Cid\n")
    rig.run_once(rig.pipeline("graph-fail", text))
    assert Counter(row["manager"] for row in rows_of(f"{rig.folder}/table")) == {"Ann": 1, "Bob": 1, "Cid": 1}


@pytest.mark.long
def test_a_pipeline_of_an_earlier_version_goes_on_with_its_two_checkpoints(rig: Rig) -> None:
    """Where a second query has begun to tell of bad records, it goes on to."""
    text = """
[source]
url = "URL"
subscribe = "graph-old"
[parse]
format = "json"
schema = "id bigint"
[sink]
format = "json"
path = "FOLDER/out"
[run]
checkpoint = "FOLDER/checkpoint"
"""
    rig.send("graph-old", [b"before"])
    pipeline = rig.pipeline("graph-old", text)
    rig.run_once(pipeline)
    old = Path(rig.folder) / "checkpoint"
    (old / "bad-records" / "input").mkdir(parents=True)
    (old / "bad-records" / "input" / "metadata").write_text(json.dumps({"id": str(uuid4())}))
    for name in ("offsets", "commits"):
        (old / "bad-records" / "input" / name).mkdir(parents=True)
        for path in (old / name).iterdir():
            (old / "bad-records" / "input" / name / path.name).write_bytes(path.read_bytes())
    rig.send("graph-old", [b'{"id":1}', b"bad"])
    rig.run_once(pipeline)
    assert [it["offset"] for it in rig.bad_records("graph-old")] == [2]
    assert [row.id for row in rig.spark.read.json(f"{rig.folder}/out").collect()] == [1]
    assert sorted(path.name for path in (old / "bad-records" / "input" / "commits").iterdir()) != []


WRONG = (
    (
        'from = "named"\nsql',
        'from = "nmed"\nsql',
        "[[step]] 2 from: there is no view 'nmed'; did you mean named?",
    ),
    (
        'name = "table"',
        'name = "files"',
        "[[sink]] 2 name: another sink is called 'files'; take another name",
    ),
    ("FOLDER/table", "FOLDER/./files/", "[[sink]] 2 path: another sink writes there; take another path"),
    (
        '"QUEUE.{region}"',
        '"QUEUE.{re-gion}"',
        "[[sink]] 3 queue: {re-gion} is no column: in { } stands the name of a column, of letters",
    ),
    ('on = "orders"', 'on = "order"', "[[expect]] 1 on: there is no view 'order'; did you mean orders?"),
    (
        'name = "large"',
        'name = "known"',
        "[[expect]] 2 name: another one is called 'known'; take another name",
    ),
    ('"dead"', '"die"', "[[expect]] 1 on-violation = 'die': use keep, drop, dead or fail"),
    ('format = "csv"', 'format = "xls"', "[[table]] 1 format = 'xls': use parquet, delta, csv, json or orc"),
    (
        'name = "regions"',
        'name = "orders"',
        "[[table]] 1 name: 'orders' is another view already; take another name",
    ),
    (
        'name = "regions"',
        'name = "Input"',
        "[[table]] 1 name: 'Input' is another view already; take another name",
    ),
    (
        '"FOLDER/files"',
        '"${GRAPH_NOWHERE}"',
        "sink.path: there is no variable GRAPH_NOWHERE in the environment; ",
    ),
)
BY_SPARK = (
    ("amount >= 1", "amont >= 1", "[[expect]] 2: [UNRESOLVED_COLUMN"),
    ("QUEUE.{region}", "QUEUE.{regin}", "[[sink]] 3 queue: there is no column 'regin'; did you mean region?"),
    ("FOLDER/regions.csv", "FOLDER/nothing.csv", "[[table]] 1: [PATH_NOT_FOUND]"),
    ('on = "orders"', 'on = "named"', "[[expect]] 1: a dead letter needs the column queue, which named does"),
    (
        'from = "letters"',
        'from = "regions"',
        "[[sink]] 3: 'regions' reads no queue; a sink needs rows that come",
    ),
)


@pytest.mark.parametrize(("old", "new", "said"), WRONG)
def test_a_mistake_is_told(rig: Rig, old: str, new: str, said: str) -> None:
    from penstock.pipeline.file import PipelineMistakes

    assert old in GRAPH
    with pytest.raises(PipelineMistakes) as raised:
        rig.pipeline("wrong", GRAPH.replace(old, new, 1))
    assert any(f": {said}" in line and ", line " in line for line in raised.value.lines), raised.value.lines


def test_what_only_spark_can_see_is_told(rig: Rig) -> None:
    (rig.folder / "regions.csv").write_text("region,manager\nnorth,Ann\n")
    for old, new, said in BY_SPARK:
        assert old in GRAPH
        pipeline = rig.pipeline("wrong", GRAPH.replace(old, new, 1).replace("QUEUE", "graph-wrong"))
        lines = rig.new_run(pipeline).check()
        assert any(f": {said}" in line and ", line " in line for line in lines), (said, lines)


def test_variables_of_the_environment(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPH_QUEUE", "from-outside")
    text = GRAPH.replace('"QUEUE"', '"${GRAPH_QUEUE}"').replace("amount >= 1", "amount >= ${GRAPH_LEAST:7}")
    text = text.replace("manager is not null", "manager <> '$${GRAPH_QUEUE}${spark.x}'")
    pipeline = rig.pipeline("outside", text)
    assert pipeline.sources[0].options["subscribe"] == "from-outside"
    assert pipeline.expectations[1].sql == "amount >= 7"
    assert pipeline.expectations[2].sql == "manager <> '${GRAPH_QUEUE}${spark.x}'"
