"""What Spark says of pipelines that cannot run, before they do: every mistake, each with its line."""

import re

import pytest

from penstock.pipeline.running import PipelineFailed
from tests.pipeline.rig import Rig, orders

FINE = """\
[source]
url = "URL"
subscribe = "judged"
[parse]
format = "json"
schema = "id bigint, region string, at timestamp"
options = {timestampFormat = "yyyy"}
[[step]]
sql = "select region, at from input"
[sink]
format = "parquet"
path = "FOLDER/out"
partitionBy = "region"
[run]
checkpoint = "FOLDER/checkpoint"
watermark = "at, 1 minute"
spark = {"spark.sql.shuffle.partitions" = 3, "spark.hadoop.some.thing" = "x"}
"""
TO_QUEUE = 'format = "penstock"\nqueue = "out"\n'
TO_FILES = 'format = "parquet"\npath = "FOLDER/out"\npartitionBy = "region"\n'
COUNTED = "select region, count(*) as n from input group by region"


GROUPED = ("select region, at from input", COUNTED)
TO_CONSOLE = (TO_FILES, 'format = "console"\nmode = "append"\n')
NO_OPTION = "Spark's parser of json has no option 'timestampFromat'; did you mean timestampFormat?"
NO_SETTING = "Spark has no such setting; did you mean spark.sql.shuffle.partitions?"
WRONG: tuple[tuple[list[tuple[str, str]], list[tuple[int, str]]], ...] = (
    ([], []),
    (
        [(TO_FILES, TO_QUEUE)],
        [(11, "[sink]: column 'region' cannot be written: there are value, queue, ttl, retries")],
    ),
    (
        [(TO_FILES, TO_QUEUE), ("region, at from", "cast(id as string) as queue from")],
        [(11, "[sink]: the column 'value' (binary or string) is missing; there are 'queue'")],
    ),
    ([('"region"\n', '"regoin"\n')], [(14, "[sink] partitionBy: there is no column 'regoin'; did you mean")]),
    ([GROUPED], [(11, "[sink]: .*watermark")]),
    ([GROUPED, TO_CONSOLE], [(13, "[sink] mode: .*watermark")]),
    ([('"parquet"', '"text"')], [(11, "[sink]: .*ext")]),
    ([("timestampFormat", "timestampFromat")], [(8, f"[parse] options: {NO_OPTION}")]),
    (
        [("shuffle.partitions", "shuffle.partition")],
        [(18, f"[run] spark spark.sql.shuffle.partition: {NO_SETTING}")],
    ),
    ([("region, at from", "regin from")], [(9, "[[step]] 1: .*`regin`")]),
    (
        [
            ("timestampFormat", "timestampFromat"),
            ('"region"\n', '"nix"\n'),
            ("shuffle.partitions", "shuffle.partition"),
        ],
        [(8, "[parse] options"), (14, "[sink] partitionBy"), (18, "[run] spark")],
    ),
)
"""Changes in the file that is fine; and lines and words of the mistakes."""


def test_what_run_would_refuse_is_told_with_its_line(rig: Rig) -> None:
    for number, (changes, expected) in enumerate(WRONG):
        text = FINE
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        pipeline = rig.pipeline(f"judged{number}", text)
        found = rig.new_run(pipeline).check()
        assert len(found) == len(expected), (changes, found)
        for line, (at, words) in zip(found, expected, strict=True):
            pattern = re.escape(f"{pipeline.file}, line {at}: {words}").replace(r"\.\*", ".*")
            assert re.match(pattern, line), line


def test_lines_are_those_of_the_file_as_it_was_read(rig: Rig) -> None:
    """Somebody may change it, or take it away, while Spark looks."""
    pipeline = rig.pipeline("judged", FINE.replace('"region"\n', '"regoin"\n'))
    (rig.folder / "judged.toml").write_text('name = "judged"\n')
    assert "line 14: [sink] partitionBy: " in rig.new_run(pipeline).check()[0]


def test_a_setting_that_cannot_be_so_is_one_line(rig: Rig) -> None:
    pipeline = rig.pipeline("wrong-value", FINE.replace("= 3", '= "many"'))
    with pytest.raises(PipelineFailed, match=r"wrong-value: .*spark\.sql\.shuffle\.partitions"):
        rig.new_run(pipeline)


WITH_UDF = """\
from pyspark.sql.functions import udf


@udf("string")
def loud(text):
    return text.upper()


def shout(frame):
    return frame.select(loud("region").alias("value"))
"""


def test_a_module_that_needs_spark_when_it_is_imported(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Spark is there it is not judged; then it runs as any other."""
    (rig.folder / "loud_steps.py").write_text(WITH_UDF)
    text = FINE.replace('sql = "select region, at from input"', 'python = "loud_steps:shout"')
    text = text.replace(TO_FILES, TO_QUEUE.replace("out", "loud-out")).replace(
        "subscribe", 'startingOffsets = "earliest"\nsubscribe'
    )
    text = text.replace("schema", 'on-bad-record = "drop"\nschema')
    with monkeypatch.context() as patch:
        patch.setattr("pyspark.SparkContext._active_spark_context", None)
        pipeline = rig.pipeline("loud", text)
    assert pipeline.unjudged == ("[[step]] 1 python",)
    rig.send("judged", orders(3))
    rig.run_once(pipeline)
    assert sorted(rig.messages("loud-out")) == [b"NORTH", b"SOUTH", b"WEST"]
