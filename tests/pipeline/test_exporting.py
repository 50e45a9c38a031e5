"""A pipeline, and the same as a project of Spark Declarative Pipelines: both are run, and do the same."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.pipeline.exporting import NotExported, _fanned_out, export
from tests.pipeline.rig import Rig, orders
from tests.spark.test_sql_commands import COMMANDS, run

EXPORTED = """
[source]
url = "URL"
subscribe = "QUEUE"
startingOffsets = "earliest"
[parse]
format = "json"
schema = "id bigint not null, region string, amount double"
[[table]]
name = "regions"
format = "csv"
path = "FOLDER/regions.csv"
schema = "region string, manager string"
[[step]]
sql = "select o.id, o.region, r.manager from input o join regions r using (region)"
[[step]]
name = "letters"
sql = "select concat(id, ' ', manager) as value, region from input"
[[expect]]
name = "small"
on = "letters"
sql = "length(value) < 7"
on-violation = "drop"
[[sink]]
name = "out"
format = "penstock"
queue = "QUEUE.{region}"
[[sink]]
name = "files"
format = "json"
path = "FOLDER/files"
[run]
checkpoint = "FOLDER/checkpoint"
"""


def test_a_queue_s_name_is_a_text_of_sql(spark: SparkSession) -> None:
    spark.createDataFrame([("north", 1)], "region string, value int").createOrReplaceTempView("quoted")
    sql = _fanned_out("quoted", "o'b\\ri.{region}", ["region"]).replace("STREAM(quoted)", "quoted")
    assert [tuple(row) for row in spark.sql(sql).collect()] == [(1, "o'b\\ri.north")]


@pytest.mark.long
def test_both_do_the_same(rig: Rig) -> None:
    (rig.folder / "regions.csv").write_text("north,Ann\nsouth,Bob\n")
    found = []
    for queue in ("exported", "exported-sdp"):
        shutil.rmtree(rig.folder / "files", ignore_errors=True)
        pipeline = rig.pipeline(
            queue, EXPORTED.replace("QUEUE", queue).replace("FOLDER/check", f"FOLDER/{queue}")
        )
        rig.send(queue, [*orders(13), b"bad", b'{"region":"north"}'])
        if queue == "exported":
            rig.run_once(pipeline)
        else:
            project = rig.folder / "project"
            paths = export(pipeline, str(project))
            assert [str(Path(path).relative_to(project)) for path in paths] == [
                "spark-pipeline.yml",
                "transformations/exported_sdp.py",
            ]
            run(COMMANDS[2], project, rig.broker)
        found.append(
            (
                sorted(rig.messages(f"{queue}.north")),
                sorted(rig.messages(f"{queue}.south")),
                Counter(row.value for row in rig.spark.read.json(f"{rig.folder}/files").collect()),
                [(it["offset"], it["error"]) for it in rig.bad_records(queue)],
            )
        )
    assert found[0] == found[1]
    assert found[0][0] == [b"0 Ann", b"12 Ann", b"3 Ann", b"6 Ann", b"9 Ann"]
    assert found[0][3] == [(13, "it is not JSON"), (14, "id is missing")]


def test_what_cannot_be_exported_is_refused_by_name(rig: Rig) -> None:
    text = EXPORTED.replace('"drop"', '"keep"').replace('format = "json"\npath', 'format = "delta"\npath')
    text = text.replace("from input o", "from input where input.id > 1")
    text = text.replace('format = "csv"', 'format = "delta"').replace(
        'schema = "region string, manager string"\n', ""
    )
    text = text.replace(
        '[[step]]\nname = "letters"',
        '[[step]]\npython = "tests.pipeline.steps_of_tests:shout"\n[[step]]\nname = "letters"',
    )
    text += 'spark = {"spark.hadoop.fs.s3a.secret.key" = "geheim"}\n'
    with pytest.raises(NotExported) as raised:
        export(rig.pipeline("refused", text), str(rig.folder / "nothing"))
    said = str(raised.value)
    for what in (
        "[[table]] regions: delta",
        "[[step]] step 1: input.COLUMN",
        "[[step]] step 2: python",
        "[[expect]] small: keep",
        "[[sink]] files: delta",
        "[run] spark: spark.hadoop.fs.s3a.secret.key",
    ):
        assert f": {what} cannot be exported" in said
    assert "geheim" not in said
    assert not (rig.folder / "nothing").exists()
    (rig.folder / "full").mkdir()
    (rig.folder / "full" / "x").write_text("")
    fine = rig.pipeline("refused", EXPORTED.replace("QUEUE", "refused"))
    with pytest.raises(NotExported, match="there is something in it; name a new folder"):
        export(fine, str(rig.folder / "full"))
