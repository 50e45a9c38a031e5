"""Whole pipelines in Spark, from a broker's queues to where they go, and once however often they are run."""

import json
import threading
from collections import Counter
from pathlib import Path

import pytest

from penstock.pipeline.model import Pipeline
from penstock.pipeline.running import PipelineFailed
from tests.pipeline.rig import Rig, orders
from tests.server.harness import until
from tests.spark.rig import PATIENCE_SECONDS

SOURCE = """
[source]
url = "URL"
subscribe = "QUEUE"
startingOffsets = "earliest"
retrySeconds = 5
[parse]
format = "json"
schema = "id bigint not null, region string, amount double, at timestamp"
"""
RUN = """
[run]
checkpoint = "FOLDER/checkpoint"
"""


def from_queue(queue: str) -> str:
    return SOURCE.replace("QUEUE", queue)


def test_json_to_an_aggregate_to_parquet(rig: Rig) -> None:
    def order(region: str, amount: float, at: str) -> bytes:
        return json.dumps({"id": 1, "region": region, "amount": amount, "at": f"2030-01-01T{at}Z"}).encode()

    pipeline = rig.pipeline(
        "aggregate",
        from_queue("aggregate")
        + """
[[step]]
name = "large"
sql = "select * from input where amount >= 1"
[[step]]
sql = "select region, window(at, '1 minute') as minute, sum(amount) as total from input group by 1, 2"
[[step]]
sql = "select region, date_format(minute.start, 'HH:mm') as minute, total from input"
[sink]
format = "parquet"
path = "FOLDER/out"
partitionBy = "region"
[run]
checkpoint = "FOLDER/checkpoint"
watermark = "at, 30 seconds"
""",
    )
    rig.send(
        "aggregate",
        [order("north", 2, "10:00:10"), order("south", 5, "10:00:20"), order("north", 0.5, "10:00:30")],
    )
    rig.send(
        "aggregate",
        [order("north", 3, "10:00:50"), order("north", 7, "10:01:10"), order("west", 1, "10:05:00")],
    )
    rig.run_once(pipeline)
    found = sorted((row["region"], row["minute"], row["total"]) for row in rig.parquet(f"{rig.folder}/out"))
    # What is still within the watermark is not written yet.
    assert found == [
        ("north", "10:00", 5.0),
        ("north", "10:01", 7.0),
        ("south", "10:00", 5.0),
    ]
    assert rig.said[-1].startswith("aggregate: 6 rows, ")
    assert "; 0 behind; batch 0 took " in rig.said[-1]


def test_bad_records_are_told_once_however_often_a_batch_is_run(rig: Rig) -> None:
    sink = '[sink]\nformat = "parquet"\npath = "FOLDER/out"\n'
    pipeline = rig.pipeline("told-once", from_queue("told-once") + sink + RUN)
    rig.send("told-once", [*orders(3), b"no record", b'{"id":"x"}', *orders(2, first=3)])
    rig.run_once(pipeline)
    assert "told-once: 2 bad records; `penstock dead QUEUE --reason bad-record` shows why" in rig.said
    letters = rig.bad_records("told-once")
    assert [(it["offset"], it["error"], it["value"], it["pipeline"]) for it in letters] == [
        (3, "it is not JSON", "no record", "told-once"),
        (4, "id is no bigint: x", '{"id":"x"}', "told-once"),
    ]
    # Workers have lost nothing by it.
    with rig.api() as api:
        assert api.get("/v1/queues/told-once")["ready"] == 7
    checkpoint = pipeline.checkpoint
    assert checkpoint is not None
    rig.forget_last_batch(checkpoint)
    assert not (Path(checkpoint) / "bad-records").exists()  # the log is read once
    rig.run_once(pipeline)
    assert rig.bad_records("told-once") == letters
    assert sorted(row["id"] for row in rig.parquet(f"{rig.folder}/out")) == [0, 1, 2, 3, 4]
    # What comes later is told beside it, and what was told is read by nobody.
    rig.send("told-once", [b"", *orders(1, first=5)])
    rig.said.clear()
    rig.run_once(pipeline)
    assert [line.partition(",")[0] for line in rig.said if " rows, " in line] == ["told-once: 2 rows"]
    assert [it["error"] for it in rig.bad_records("told-once")[2:]] == ["the message is empty"]
    assert sorted(row["id"] for row in rig.parquet(f"{rig.folder}/out")) == [0, 1, 2, 3, 4, 5]


@pytest.mark.long
def test_what_ended_a_pipeline_is_told_when_bad_records_are_told_from_now_on(rig: Rig) -> None:
    """The second look at the log begins where the pipeline goes on, though it begins later."""
    sink = '[sink]\nformat = "parquet"\npath = "FOLDER/out"\n'
    text = from_queue("told-late").replace('startingOffsets = "earliest"\n', "")
    rig.send("told-late", [b"before", *orders(1)])
    failing = rig.pipeline("told-late", text + 'on-bad-record = "fail"\n' + sink + RUN)
    rig.run_once(failing)
    rig.send("told-late", [*orders(1, first=1), b"bad"])
    with pytest.raises(PipelineFailed):
        rig.run_once(failing)
    rig.run_once(rig.pipeline("told-late", text + sink + RUN))
    assert [row["id"] for row in rig.parquet(f"{rig.folder}/out")] == [1]
    assert [(it["offset"], it["value"]) for it in rig.bad_records("told-late")] == [(3, "bad")]


@pytest.mark.long
def test_a_join_of_two_queues(rig: Rig) -> None:
    pipeline = rig.pipeline(
        "joined",
        """
[[source]]
name = "orders"
url = "URL"
subscribe = "join-orders"
startingOffsets = "earliest"
watermark = "ordered, 10 minutes"
[source.parse]
format = "json"
schema = "id bigint, ordered timestamp"
[[source]]
name = "payments"
url = "URL"
subscribe = "join-payments"
startingOffsets = "earliest"
watermark = "paid, 10 minutes"
[source.parse]
format = "csv"
schema = "id bigint, paid timestamp, amount double"
[[step]]
sql = '''
  select o.id, p.amount, p.queue as paid_by from orders o join payments p
  on o.id = p.id and p.paid between o.ordered and o.ordered + interval 1 hour
'''
[sink]
format = "json"
path = "FOLDER/out"
[run]
checkpoint = "FOLDER/checkpoint"
""",
    )
    rig.send(
        "join-orders", [b'{"id":%d,"ordered":"2030-01-01T10:0%d:00Z"}' % (n, n) for n in range(4)] + [b"{"]
    )
    rig.send("join-payments", [b"1,2030-01-01T10:30:00Z,2.5", b"2,2030-01-01T12:30:00Z,3.5", b"x"])
    rig.run_once(pipeline)
    assert any(line.startswith("joined.orders.bad-records: 5 rows, ") for line in rig.said), rig.said
    # The payment of an order may come much later than the order.
    rig.send("join-payments", [b"3,2030-01-01T10:40:00Z,4.5"])
    rig.run_once(pipeline)
    rows = [row.asDict() for row in rig.spark.read.json(f"{rig.folder}/out").collect()]
    assert sorted((row["id"], row["amount"], row["paid_by"]) for row in rows) == [
        (1, 2.5, "join-payments"),
        (3, 4.5, "join-payments"),
    ]
    assert [it["error"] for it in rig.bad_records("join-orders")] == ["it is not JSON"]
    assert [it["error"] for it in rig.bad_records("join-payments")] == ["it does not have 3 fields"]
    with rig.api() as api:
        readers = {it["name"] for it in api.get("/v1/readers")["readers"]}
    assert {"joined.orders", "joined.payments", "joined.orders.bad-records"} <= readers


def test_a_step_in_python_and_a_queue_exactly_once(rig: Rig) -> None:
    steps = Path(__file__).with_name("steps_of_tests.py").read_text()
    (rig.folder / "beside_the_file.py").write_text(steps)
    pipeline = rig.pipeline(
        "shouting",
        from_queue("shouting")
        + '[[step]]\npython = "beside_the_file:shout"\n[sink]\nformat = "penstock"\nqueue = "shouted"\n'
        + RUN,
    )
    rig.send("shouting", orders(30))
    rig.run_once(pipeline)
    expected = Counter({b"NORTH!": 10, b"SOUTH!": 10, b"WEST!": 10})
    assert Counter(rig.messages("shouted")) == expected
    assert pipeline.checkpoint is not None
    rig.forget_last_batch(pipeline.checkpoint)
    rig.run_once(pipeline)
    assert Counter(rig.messages("shouted")) == expected
    rig.send("shouting", orders(1, first=30))
    rig.run_once(pipeline)
    assert Counter(rig.messages("shouted")) == expected + Counter({b"NORTH!": 1})


def test_what_changes_to_a_queue_exactly_once(rig: Rig) -> None:
    pipeline = rig.pipeline(
        "changing",
        from_queue("changing")
        + '[[step]]\npython = "tests.pipeline.steps_of_tests:counted"\n'
        + "[[step]]\nsql = \"select concat(region, ' ', count) as value, 'changed' as queue, "
        + "3600 as delay, map('region', region) as headers from input\"\n"
        + '[sink]\nformat = "penstock"\nmode = "update"\n'
        + RUN,
    )
    rig.send("changing", orders(6))
    rig.run_once(pipeline)
    assert sorted(rig.messages("changed", "delayed")) == [b"north 2", b"south 2", b"west 2"]
    with rig.api() as api:
        changed = api.get("/v1/queues/changed/messages")["messages"]
    assert sorted(message["headers"]["region"] for message in changed) == ["north", "south", "west"]
    assert pipeline.checkpoint is not None
    rig.forget_last_batch(pipeline.checkpoint)
    rig.send("changing", orders(1))
    rig.run_once(pipeline)
    assert sorted(rig.messages("changed")) == [b"north 2", b"north 3", b"south 2", b"west 2"]


def delta_rows(path: str) -> list[tuple[int, str]]:
    from deltalake import DeltaTable

    return sorted((row["id"], row["region"]) for row in DeltaTable(path).to_pyarrow_table().to_pylist())


def test_a_delta_table_exactly_once(rig: Rig) -> None:
    text = (
        from_queue("to-delta") + '[sink]\nformat = "delta"\npath = "FOLDER/table"\npartitionBy = "region"\n'
    )
    pipeline = rig.pipeline("to-delta", text + RUN)
    path = f"{rig.folder}/table"
    rig.send("to-delta", orders(4))
    rig.run_once(pipeline)
    expected = [(0, "north"), (1, "south"), (2, "west"), (3, "north")]
    assert delta_rows(path) == expected
    assert pipeline.checkpoint is not None
    rig.forget_last_batch(pipeline.checkpoint)
    rig.send("to-delta", orders(1, first=4))
    rig.run_once(pipeline)
    assert delta_rows(path) == [*expected, (4, "south")]
    # With another checkpoint it is another query, whose batches are others.
    again = rig.pipeline("to-delta-again", text + RUN.replace("FOLDER/checkpoint", "FOLDER/other"))
    rig.run_once(again)
    assert len(delta_rows(path)) == 10


@pytest.mark.long
def test_files_of_another_checkpoint_are_refused(rig: Rig) -> None:
    """Spark would take our batch 0 for the one that is there, and write nothing."""
    text = from_queue("two-lives") + '[sink]\nformat = "parquet"\npath = "FOLDER/out"\n'
    rig.send("two-lives", orders(2))
    rig.run_once(rig.pipeline("two-lives", text + RUN))
    rig.send("two-lives", orders(2, first=2))
    other = rig.pipeline("two-lives", text + RUN.replace("FOLDER/checkpoint", "FOLDER/other"))
    (line,) = rig.new_run(other).check()
    assert line.startswith(f"{other.file}, line 11: [sink]: {rig.folder}/out has the batches of another ")
    with pytest.raises(PipelineFailed) as raised:
        rig.run_once(other)
    assert str(raised.value) == f"two-lives: {line}"
    rig.run_once(rig.pipeline("two-lives", text + RUN))
    assert sorted(row["id"] for row in rig.parquet(f"{rig.folder}/out")) == [0, 1, 2, 3]


@pytest.mark.long
def test_a_delta_table_written_anew(rig: Rig) -> None:
    from deltalake import DeltaTable

    pipeline = rig.pipeline(
        "delta-anew",
        from_queue("delta-anew")
        + '[[step]]\nsql = "select region, count(*) as n from input group by region"\n'
        + '[sink]\nformat = "delta"\npath = "FOLDER/table"\nmode = "complete"\n'
        + RUN,
    )
    for first in (0, 3):
        rig.send("delta-anew", orders(3, first))
        rig.run_once(pipeline)
    rows = DeltaTable(f"{rig.folder}/table").to_pyarrow_table().to_pylist()
    assert {row["region"]: row["n"] for row in rows} == {"north": 2, "south": 2, "west": 2}


def test_bad_records_can_be_dropped_or_end_it(rig: Rig) -> None:
    sink = '[sink]\nformat = "penstock"\nqueue = "dropped"\n'
    step = '[[step]]\nsql = "select cast(id as string) as value from input"\n'
    text = from_queue("dropping") + 'on-bad-record = "drop"\n' + step + sink + RUN
    rig.send("dropping", [*orders(1), b"bad"])
    rig.run_once(rig.pipeline("dropping", text))
    assert rig.messages("dropped") == [b"0"]
    assert rig.bad_records("dropping") == []
    failing = text.replace('"drop"', '"fail"').replace("FOLDER/checkpoint", "FOLDER/other")
    with pytest.raises(PipelineFailed) as raised:
        rig.run_once(rig.pipeline("failing", failing))
    assert str(raised.value) == "failing: queue 'dropping', offset 1: this record does not fit: bad"


def test_what_was_done_before_a_failure_is_counted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    text = from_queue("counted-too").replace("retrySeconds", "maxOffsetsPerTrigger = 2\nretrySeconds")
    sink = '[sink]\nformat = "parquet"\npath = "FOLDER/out"\n'
    rig.send("counted-too", [*orders(4), b"bad"])
    run = rig.new_run(rig.pipeline("counted-too", text + 'on-bad-record = "fail"\n' + sink + RUN))

    def all_is_over(seconds: float) -> bool:
        until(lambda: not any(query.isActive for query in run._queries), "the failure", PATIENCE_SECONDS)
        return False

    monkeypatch.setattr(run.stop, "wait", all_is_over)  # nobody looks meanwhile
    with pytest.raises(PipelineFailed, match="offset 4: this record does not fit"):
        run.run()
    state = run._teller.state()
    assert (state["rows"], state["sinks"]) == (4, {"sink": 4})


def test_a_stop_finishes_the_batch_and_a_start_goes_on(rig: Rig) -> None:
    sink = '[[step]]\nsql = "select cast(id as string) as value from input"\n'
    sink += '[sink]\nformat = "penstock"\nqueue = "stopped"\n'
    text = from_queue("stopping").replace("retrySeconds", "maxOffsetsPerTrigger = 20\nretrySeconds")
    pipeline = rig.pipeline("stopping", text + sink + RUN + 'trigger = "100 milliseconds"\n')
    rig.send("stopping", orders(200))
    run = rig.new_run(pipeline, once=False)

    def stop_after_a_batch() -> None:
        with rig.api() as api:
            until(
                lambda: any(it["name"] == "stopped" for it in api.get("/v1/queues")["queues"]),
                "a batch to be written",
                PATIENCE_SECONDS,
            )
        run.stop.set()

    stopper = threading.Thread(target=stop_after_a_batch)
    stopper.start()
    run.run()
    stopper.join(PATIENCE_SECONDS)
    assert rig.spark.streams.active == []
    rig.run_once(pipeline)
    assert Counter(rig.messages("stopped")) == Counter(b"%d" % number for number in range(200))


def test_the_batch_that_a_stop_waits_for_is_told(rig: Rig) -> None:
    sink = '[[step]]\nsql = "select cast(id as string) as value from input"\n'
    sink += '[sink]\nformat = "penstock"\nqueue = "told"\n'
    pipeline = rig.pipeline("telling", from_queue("telling") + sink + RUN + 'trigger = "1 hour"\n')
    rig.send("telling", orders(30))
    run = rig.new_run(pipeline, once=False)

    def stop_within_the_batch() -> None:
        try:
            until(
                lambda: any(query.status["isDataAvailable"] for query in run._queries),
                "the batch to begin",
                PATIENCE_SECONDS,
            )
        finally:
            run.stop.set()

    stopper = threading.Thread(target=stop_within_the_batch)
    stopper.start()
    run.run()
    stopper.join(PATIENCE_SECONDS)
    assert len(rig.messages("told")) == 30
    (said,) = rig.said
    assert said.startswith("telling: 30 rows")


# --- failures ----------------------------------------------------------------------------------------------

TO_QUEUE = '[sink]\nformat = "penstock"\nqueue = "nothing"\n'

FAILING: list[tuple[str, str, str, str]] = [
    (
        "syntax",
        '[[step]]\nsql = "selec 1"\n',
        TO_QUEUE,
        "[[step]] 1: [PARSE_SYNTAX_ERROR] Syntax error at or near",
    ),
    (
        "view",
        '[[step]]\nname = "s"\nsql = "select * from inpt"\n',
        TO_QUEUE,
        "[[step]] 1: [TABLE_OR_VIEW_NOT",
    ),
    (
        "column",
        '[[step]]\nsql = "select regon from input"\n',
        TO_QUEUE,
        "[[step]] 1: [UNRESOLVED_COLUMN.WITH_SUGGESTION] A column",
    ),
    (
        "none",
        '[[step]]\npython = "tests.pipeline.steps_of_tests:nothing"\n',
        TO_QUEUE,
        "[[step]] 1: tests.pipeline.steps_of_tests:nothing returned NoneType; return a DataFrame",
    ),
    (
        "raising",
        '[[step]]\npython = "tests.pipeline.steps_of_tests:failing"\n',
        TO_QUEUE,
        "[[step]] 1: tests.pipeline.steps_of_tests:failing: KeyError: 'no such thing'",
    ),
    (
        "mode",
        '[[step]]\nsql = "select region, count(*) as n from input group by region"\n',
        '[sink]\nformat = "parquet"\npath = "FOLDER/out"\n',
        "[STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION] Invalid streaming output mode: append.",
    ),
    (
        "static",
        '[[step]]\nsql = "select id from (values (1)) as t(id) left join input using (id)"\n',
        '[sink]\nformat = "parquet"\npath = "FOLDER/out"\n',
        "LeftOuter join with a streaming DataFrame/Dataset on the right and a static",
    ),
    ("columns", "", TO_QUEUE, "column 'id' cannot be written: there are value, queue, ttl, retries"),
    (
        "format",
        "",
        '[sink]\nformat = "nosuch"\n',
        "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: nosuch",
    ),
]


@pytest.mark.parametrize(("name", "steps", "sink", "told"), FAILING, ids=[row[0] for row in FAILING])
@pytest.mark.long
def test_what_fails_is_told_in_one_line(rig: Rig, name: str, steps: str, sink: str, told: str) -> None:
    rig.send("failing", orders(1))
    pipeline = rig.pipeline(f"fails-{name}", from_queue("failing") + steps + sink + RUN)
    with pytest.raises(PipelineFailed) as raised:
        rig.run_once(pipeline)
    (line,) = str(raised.value).splitlines()
    assert told in line
    assert f"{pipeline.file}, line 11: " in line or "[[step]]" not in told
    assert rig.spark.streams.active == []


def test_a_worker_that_fails_is_told_in_one_line(rig: Rig) -> None:
    pipeline = rig.pipeline(
        "dividing",
        from_queue("dividing")
        + '[[step]]\npython = "tests.pipeline.steps_of_tests:dividing"\n'
        + TO_QUEUE
        + RUN,
    )
    rig.send("dividing", orders(1))
    with pytest.raises(PipelineFailed) as raised:
        rig.run_once(pipeline)
    assert str(raised.value).startswith("dividing: ZeroDivisionError: ")
    # The broker is told, too, for whoever looks at the page.
    with rig.api() as api:
        about = api.get("/v1/readers/dividing")["about"]
    assert (about["kind"], about["name"]) == ("pipeline", "dividing")
    assert about["error"].startswith("dividing: ZeroDivisionError: ")


def test_two_pipelines_have_views_of_their_own(rig: Rig) -> None:
    def to(queue: str) -> Pipeline:
        text = from_queue("shared") + '[[step]]\nname = "mine"\nsql = "select \'OUT\' as value"\n'.replace(
            "OUT", queue
        )
        text += '[[step]]\nsql = "select value from mine"\n'
        sink = '[sink]\nformat = "console"\n'
        return rig.pipeline(queue, text + sink + RUN)

    for queue in ("one", "two"):
        rig.new_run(to(queue)).check()
    assert not rig.spark.catalog.tableExists("mine")
