"""Queues that are deleted and made again: a query is told, and never given messages of another queue."""

import json
from collections import Counter
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.streaming.datasource import ReadAllAvailable

from penstock.spark.offsets import DataLost
from penstock.spark.options import STREAM, read_options
from penstock.spark.source import schema_of
from penstock.spark.streaming import StreamReader
from tests.http.api import Api
from tests.http.morgue import path_of, reject
from tests.server.harness import BrokerProcess, until
from tests.spark.rig import Gathering, Queues, send, url_of, values
from tests.spark.test_redrive_at_scale import dead, redrive

TOLD = "was deleted, and another of that name stands now"


def delete(api: Api, queue: str) -> None:
    until(lambda: not api.get(path_of(queue))["consumers"], "those who were there to be gone")
    assert api.ask("DELETE", path_of(queue)).status == 200


def make_again(queues: Queues, api: Api, queue: str, count: int) -> None:
    delete(api, queue)
    queues.send(queue, values(count, 1000))


@pytest.mark.long
def test_a_query_that_is_started_again_is_told(queues: Queues, api: Api, tmp_path: Path) -> None:
    queues.send("deleted.later", values(20))
    with Gathering(
        queues.stream("deleted.later", startingOffsets="earliest"), "later", tmp_path
    ) as gathering:
        assert gathering.all().of("deleted.later") == Counter(values(20))
    # More than were read: by its offsets alone the query would go on in the middle.
    make_again(queues, api, "deleted.later", 50)
    with Gathering(queues.stream("deleted.later"), "later", tmp_path) as gathering:
        text = gathering.failure()
        assert f"DataLost: queue 'deleted.later' {TOLD} (or the log was restored from a backup); " in text
        assert "the one that was read up to 20 was" in text
        assert "begin with a new checkpoint, or set failOnDataLoss to false" in text
        assert not gathering.rows
    frame = queues.stream("deleted.later", failOnDataLoss="false")
    with Gathering(frame, "later", tmp_path) as gathering:
        assert gathering.all().of("deleted.later") == Counter(values(50, 1000))
        queues.send("deleted.later", values(5, 2000))
        assert gathering.all().of("deleted.later") == Counter(values(50, 1000) + values(5, 2000))


def test_a_checkpoint_of_another_view_is_told(broker: BrokerProcess) -> None:
    """Numbers of events are no offsets: what is between them would be left out."""
    send(broker, "deleted.view", values(5))
    said = {"url": url_of(broker), "subscribe": "deleted.view", "startingOffsets": "earliest"}
    views = ("messages", "events")
    options = {view: read_options({**said, "view": view}, STREAM) for view in views}
    start, end = {}, {}
    for view, other in zip(views, reversed(views), strict=True):
        reader = StreamReader(options[view], schema_of(view))
        start[view] = reader.initialOffset()
        end[view] = reader.latestOffset(start[view], ReadAllAvailable())
        assert len(reader.partitions(start[view], end[view])) == 1
        reader.stop()
        reader = StreamReader(options[other], schema_of(other))
        told = f"the checkpoint is of view '{view}', and '{other}' is read; begin with a new checkpoint"
        with pytest.raises(DataLost, match=told):
            reader.latestOffset(end[view], ReadAllAvailable())
        with pytest.raises(DataLost, match=told):
            reader.partitions(reader.initialOffset(), end[view])
        reader.stop()


def test_a_query_that_runs_is_told(queues: Queues, api: Api, tmp_path: Path) -> None:
    queues.send("deleted.now", values(20))
    frame = queues.stream("deleted.now", startingOffsets="earliest")
    with Gathering(frame, "now deleted", tmp_path) as gathering:
        gathering.all()
        make_again(queues, api, "deleted.now", 100)
        text = gathering.failure()
        assert TOLD in text or "queue 'deleted.now' is gone, but was read up to 20; was it deleted" in text
        assert gathering.of("deleted.now") == Counter(values(20))


def test_a_checkpoint_of_an_earlier_version_goes_on(queues: Queues, tmp_path: Path) -> None:
    queues.send("deleted.never", values(20))
    frame = queues.stream("deleted.never", startingOffsets="earliest")
    with Gathering(frame, "never", tmp_path) as gathering:
        gathering.all()
    stripped = 0
    for path in [path for path in (tmp_path / "offsets").iterdir() if not path.name.startswith(".")]:
        lines = path.read_text().splitlines()
        offset = json.loads(lines[-1])
        assert set(offset) == {"", "deleted.never"}
        del offset[""]
        path.write_text("\n".join([*lines[:-1], json.dumps(offset)]))
        (tmp_path / "offsets" / f".{path.name}.crc").unlink(missing_ok=True)
        stripped += 1
    assert stripped
    queues.send("deleted.never", values(20, 20))
    with Gathering(frame, "never", tmp_path) as gathering:
        assert gathering.all().of("deleted.never") == Counter(values(20, 20))


@pytest.mark.parametrize("view", ["messages", "events"])
def test_what_was_planned_is_not_read_from_another_queue(queues: Queues, api: Api, view: str) -> None:
    name = f"deleted.{view}"
    queues.send(name, values(20))
    said = {"url": queues.url, "subscribe": name, "view": view, "startingOffsets": "earliest"}
    reader = StreamReader(read_options(said, STREAM), schema_of(view))
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    assert end[name] == 20
    (piece,) = reader.partitions(start, end)
    assert sum(batch.num_rows for batch in reader.read(piece)) == 20
    delete(api, name)
    with pytest.raises(DataLost, match=f"{name}.*cannot be read"):
        list(reader.read(piece))
    queues.send(name, values(50, 1000))
    with pytest.raises(DataLost, match=TOLD):
        list(reader.read(piece))
    with pytest.raises(DataLost, match=TOLD):
        reader.latestOffset(end, ReadAllAvailable())
    # Where it may go on, the new one is read from its beginning, however far the old one was.
    going_on = StreamReader(read_options({**said, "failOnDataLoss": "false"}, STREAM), schema_of(view))
    further = going_on.latestOffset(end, ReadAllAvailable())
    assert further[""] != end[""]
    pieces = going_on.partitions(end, further)
    assert sum(batch.num_rows for it in pieces for batch in going_on.read(it)) == 50
    for it in (reader, going_on):
        it.stop()


def test_a_stream_with_a_reader_holds_the_others_on(queues: Queues, api: Api, tmp_path: Path) -> None:
    for name in ("leased.a", "leased.b"):
        queues.send(name, values(10))
    frame = queues.stream(
        "leased.a,leased.b", startingOffsets="earliest", reader="leaser", failOnDataLoss="false"
    )
    with Gathering(frame, "leased", tmp_path) as gathering:
        gathering.all()
        delete(api, "leased.a")
        queues.send("leased.b", values(10, 10))
        gathering.wait(30)
        until(
            lambda: (
                [(it["queue"], it["position"]) for it in api.get("/v1/readers/leaser")["queues"]]
                == [("leased.b", 20)]
            ),
            "the reader to hold what is left",
        )


def test_letters_are_redriven_by_their_ids(broker: BrokerProcess, queues: Queues, api: Api) -> None:
    reject(broker, api, "deleted.letters", [b"old 0", b"old 1"])
    chosen = dead(queues, "deleted.letters").select("queue", "offset", "id").collect()
    frame = queues.spark.createDataFrame(chosen)
    redrive(frame.where("offset = 1"), queues)
    assert api.get(path_of("deleted.letters"))["dead"] == 1
    delete(api, "deleted.letters")
    reject(broker, api, "deleted.letters", [b"new 0", b"new 1"])
    with pytest.raises(PySparkException, match=TOLD):
        redrive(frame, queues)
    assert api.get(path_of("deleted.letters"))["dead"] == 2
    redrive(dead(queues, "deleted.letters").select("offset", "id"), queues, queue="deleted.letters")
    assert api.get(path_of("deleted.letters"))["dead"] == 0


@pytest.mark.long
def test_letters_are_repaired_by_their_ids(broker: BrokerProcess, queues: Queues, api: Api) -> None:
    reject(broker, api, "deleted.repairs", [b"old 0", b"old 1"])
    columns = ("queue", "offset", "id", "cast('repaired' as binary) as value")
    chosen = dead(queues, "deleted.repairs").selectExpr(*columns).collect()
    frame = queues.spark.createDataFrame(chosen)
    redrive(frame.where("offset = 1"), queues)
    assert api.get(path_of("deleted.repairs"))["dead"] == 1
    delete(api, "deleted.repairs")
    reject(broker, api, "deleted.repairs", [b"new 0", b"new 1"])
    for options in ({}, {"queue": "deleted.repairs"}):
        with pytest.raises(PySparkException, match=TOLD):
            redrive(frame, queues, **options)
    assert api.get(path_of("deleted.repairs"))["dead"] == 2
    redrive(dead(queues, "deleted.repairs").selectExpr(*columns), queues)
    assert api.get(path_of("deleted.repairs"))["dead"] == 0


def test_texts_of_any_width_and_ids_that_are_none(broker: BrokerProcess, queues: Queues, api: Api) -> None:
    reject(broker, api, "deleted.wide", [b"0", b"1", b"2"])
    wide = "spark.sql.execution.arrow.useLargeVarTypes"
    queues.spark.conf.set(wide, "true")
    try:
        for columns, left in (
            (("queue", "offset"), 2),
            (("queue", "offset", "id"), 1),
            (("offset", "id"), 0),
        ):
            frame = dead(queues, "deleted.wide").where(f"offset = {left}").select(*columns)
            redrive(frame, queues, **({} if "queue" in columns else {"queue": "deleted.wide"}))
            assert api.get(path_of("deleted.wide"))["dead"] == left
    finally:
        queues.spark.conf.unset(wide)
    for value in ("'42'", "cast(null as string)"):
        with pytest.raises(PySparkException, match="column 'id' is no id in a row"):
            redrive(queues.spark.sql(f"select 'deleted.wide' as queue, 0L as offset, {value} as id"), queues)
