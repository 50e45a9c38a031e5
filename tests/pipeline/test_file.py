"""A pipeline's file: what it says, and every mistake in it with its line and key, without Spark."""

import re
from pathlib import Path

import pytest

from penstock.pipeline.file import PipelineMistakes, read_pipeline
from penstock.pipeline.model import Field, Pipeline, Watermark

GOOD = """\
name = "orders"
[source]
subscribe = "orders"
[parse]
format = "json"
schema = "id bigint, region string, at timestamp"
[[step]]
sql = "select region, count(*) as n from input group by region"
[sink]
format = "parquet"
path = "out/orders"
[run]
trigger = "10 seconds"
checkpoint = "out/_checkpoint/orders"
"""

TWO = """\
name = "joined"
[[source]]
name = "orders"
subscribe = "orders"
watermark = "timestamp, 5 minutes"
[source.parse]
format = "json"
schema = "id bigint, total double"
[[source]]
name = "payments"
subscribePattern = "pay.*"
watermark = "paid, 1 hour 30 minutes"
[source.parse]
format = "csv"
schema = "id bigint, paid timestamp"
on-bad-record = "drop"
options = {sep = ";"}
[[step]]
name = "both"
sql = "select * from orders join payments using (id);"
[[step]]
python = "tests.pipeline.steps_of_tests:counted"
[sink]
format = "console"
mode = "update"
numRows = 5
[run]
trigger = "once"
checkpoint = "cp"
spark.ui.enabled = true
spark."spark.executor.memory" = "2g"
"""


def read(folder: Path, text: str) -> Pipeline:
    path = folder / "p.toml"
    path.write_text(text)
    return read_pipeline(str(path))


def mistakes(folder: Path, text: str) -> list[str]:
    """What is wrong, without the folder."""
    with pytest.raises(PipelineMistakes) as raised:
        read(folder, text)
    return [line.replace(f"{folder}/", "") for line in raised.value.lines]


def test_a_pipeline(tmp_path: Path) -> None:
    pipeline = read(tmp_path, GOOD)
    (source,) = pipeline.sources
    assert (pipeline.name, pipeline.interval, pipeline.once) == ("orders", "10 seconds", False)
    assert (source.name, source.options, source.view) == ("input", {"subscribe": "orders"}, "messages")
    assert source.parse is not None
    assert source.parse.fields == (
        Field("id", "bigint"),
        Field("region", "string"),
        Field("at", "timestamp"),
    )
    assert source.parse.on_bad_record == "dead"
    assert (pipeline.sinks[0].format, pipeline.sinks[0].mode) == ("parquet", "append")
    assert pipeline.sinks[0].options == {"path": "out/orders"}
    assert pipeline.checkpoint == "out/_checkpoint/orders"
    assert pipeline.unjudged == ("[[step]] 1 sql",)


def test_a_pipeline_with_everything(tmp_path: Path) -> None:
    pipeline = read(tmp_path, TWO)
    orders, payments = pipeline.sources
    assert (orders.name, payments.name) == ("orders", "payments")
    assert (orders.watermark, payments.watermark) == (
        Watermark("timestamp", "5 minutes"),
        Watermark("paid", "1 hour 30 minutes"),
    )
    assert payments.options == {"subscribePattern": "pay.*"}
    assert payments.parse is not None
    assert (payments.parse.on_bad_record, payments.parse.options) == ("drop", {"sep": ";"})
    first, second = pipeline.steps
    assert (first.name, first.sql) == ("both", "select * from orders join payments using (id)")
    assert (second.function is not None, second.takes_views) == (True, True)
    assert (pipeline.sinks[0].mode, pipeline.sinks[0].options) == ("update", {"numRows": "5"})
    assert (pipeline.once, pipeline.interval) == (True, None)
    assert pipeline.spark == {"spark.ui.enabled": "true", "spark.executor.memory": "2g"}


def test_values_of_other_types_than_text(tmp_path: Path) -> None:
    text = GOOD.replace(
        'subscribe = "orders"',
        'subscribe = ["a", "b"]\nstartingOffsets = {a = 4, b = -2}\nfailOnDataLoss = false\n'
        "retrySeconds = 1.5",
    )
    assert read(tmp_path, text).sources[0].options == {
        "subscribe": "a,b",
        "startingOffsets": '{"a": 4, "b": -2}',
        "failOnDataLoss": "false",
        "retrySeconds": "1.5",
    }


def test_a_schema_keeps_the_names_of_its_columns(tmp_path: Path) -> None:
    schema = "id  bigint, -- of the order's first part\n\n\t`two  spaces -- here` string -- the last"
    parse = (
        read(tmp_path, GOOD.replace('"id bigint, region string, at timestamp"', f'"""\n{schema}"""'))
        .sources[0]
        .parse
    )
    assert parse is not None
    assert parse.schema == "id bigint, `two  spaces -- here` string"
    assert parse.fields == (Field("id", "bigint"), Field("two  spaces -- here", "string"))


def test_a_schema_keeps_the_texts_in_it(tmp_path: Path) -> None:
    """Spark takes both kinds of quotes for a text, and both kinds of comments."""
    schema = """id  bigint comment "it's  -- here", /* no -- end "
        of it */ region string comment 'a "b"  -- c', -- "the last
        at timestamp comment "so \\"so\\"  -- there"
    """
    text = GOOD.replace('"id bigint, region string, at timestamp"', f'"""{schema}"""'.replace("\\", "\\\\"))
    parse = read(tmp_path, text).sources[0].parse
    assert parse is not None
    assert parse.schema == (
        """id bigint comment "it's  -- here", region string comment 'a "b"  -- c', """
        """at timestamp comment "so \\"so\\"  -- there\""""
    )


def test_a_format_that_is_not_ours_goes_to_spark_with_its_options(tmp_path: Path) -> None:
    text = GOOD.replace('format = "parquet"\npath = "out/orders"', 'format = "kafka"\ntopic = "x"\nacks = 1')
    pipeline = read(tmp_path, text)
    assert pipeline.sinks[0].options == {"topic": "x", "acks": "1"}
    assert pipeline.unjudged == ("[[step]] 1 sql", "[sink] format 'kafka' and its options")


def test_a_sink_may_be_from_the_source_itself(tmp_path: Path) -> None:
    pipeline = read(tmp_path, GOOD.replace('format = "parquet"', 'from = "input"\nformat = "parquet"'))
    assert pipeline.origin(pipeline.sinks[0]) == pipeline.sources[0].name == "input"


def test_a_console_needs_no_checkpoint_where_nothing_is_told_once(tmp_path: Path) -> None:
    text = re.sub('format = "parquet"\npath = .*', 'format = "console"', GOOD)
    text = text.replace('checkpoint = "out/_checkpoint/orders"\n', "")
    assert mistakes(tmp_path, text) == [
        "p.toml, line 11: [run]: there is no checkpoint, by which a bad record is told once; add checkpoint "
        '= and a path, as in checkpoint = "out/_checkpoint/NAME", or on-bad-record = "drop" under [parse]'
    ]
    assert read(tmp_path, text.replace("[[step]]", 'on-bad-record = "drop"\n[[step]]')).checkpoint is None


# --- mistakes ----------------------------------------------------------------------------------------------

WRONG: list[tuple[str, str, str, str]] = [
    # what is replaced in the good file, by what, where the mistake is, what is said about it
    (
        '"orders"\n[s',
        '"or ders"\n[s',
        "line 1: name = 'or ders'",
        "use 1 to 64 letters, digits and any of . _ -",
    ),
    ('name = "orders"\n[s', "[s", "the file", "there is no name; add name = and 1 to 64 letters"),
    ("[source]", "[sorce]", "line 2: sorce", "there is no such setting; did you mean source?"),
    ("[[step]]", "[[steps]]", "line 7: steps", "there is no such setting; did you mean step?"),
    ("[[step]]", "[step]", "line 7: step", "begin each one with [[step]]"),
    ('subscribe = "orders"', "", "line 2: [source]", "say what to read, with one of the options subscribe"),
    ('subscribe = "', 'subscibe = "', "line 3: [source] subscibe", "did you mean subscribe?"),
    (
        'subscribe = "orders"',
        'subscribe = "orders.dead"',
        "line 3: [source] subscribe = 'orders.dead'",
        "'orders.dead' is the door to the dead letters of 'orders', not a queue",
    ),
    (
        'subscribe = "orders"',
        'subscribe = "orders"\nstartingOffsets = "start"',
        "line 4: [source] startingOffsets = 'start'",
        "'start' is none of earliest, latest and JSON",
    ),
    (
        'subscribe = "orders"',
        'subscribe = "orders"\nendingOffsets = "latest"',
        "line 4: [source] endingOffsets = 'latest'",
        "it is not for a pipeline: a stream has no end",
    ),
    (
        'subscribe = "orders"',
        'subscribe = "orders"\nmaxOffsetsPerTrigger = [1]',
        "line 4: [source] maxOffsetsPerTrigger = [1]",
        "use a text, a number, or true or false",
    ),
    (
        'subscribe = "orders"',
        'subscribe = "orders"\nurl = "ftp://x"',
        "line 4: [source] url = 'ftp://x'",
        "",
    ),
    (
        'subscribe = "orders"',
        'subscribe = "orders"\nview = "events"',
        "line 5: [parse]",
        "view 'events' has no payload to parse",
    ),
    (
        'subscribe = "orders"',
        'subscribe = "orders"\nwatermark = "region, 1 minute"',
        "line 4: [source] watermark",
        "column 'region' is string; a watermark needs a timestamp",
    ),
    (
        'subscribe = "orders"',
        'subscribe = "orders"\nwatermark = "att, 1 minute"',
        "line 4: [source] watermark",
        "there is no column 'att'; did you mean at?",
    ),
    ('"json"', '"jsn"', "line 5: [parse] format = 'jsn'", "use json, csv, text, avro or protobuf"),
    (
        'format = "json"\n',
        "",
        "line 4: [parse]",
        "there is no format; add format = and json, csv, text, avro or protobuf",
    ),
    (
        "id bigint, ",
        "id bigin, ",
        "line 6: [parse] schema = 'id bigin, region string, at timestamp'",
        "column 'id': there is no type 'bigin'; did you mean bigint?",
    ),
    (
        'schema = "id bigint, region string, at timestamp"\n',
        "",
        "line 4: [parse]",
        "there is no schema; add schema =",
    ),
    ('"json"', '"text"', "line 6: [parse] schema", "a text has no columns: it is the column value"),
    (
        "[[step]]",
        'on-bad-record = "skip"\n[[step]]',
        "line 7: [parse] on-bad-record = 'skip'",
        "use dead, drop or fail",
    ),
    (
        "[[step]]",
        'options = {mode = "FAILFAST"}\n[[step]]',
        "line 7: [parse] options",
        "'mode' is not yours to set; on-bad-record does it",
    ),
    ("sql =", 'python = "x:y"\nsql =', "line 7: [[step]] 1", "say what to do, with one of sql and python"),
    ("sql = ", "sqls = ", "line 8: [[step]] 1 sqls", "did you mean sql?"),
    (
        'sql = "select region, count(*) as n from input group by region"',
        'sql = " "',
        "line 8: [[step]] 1 sql = ' '",
        "use a query: select … from input",
    ),
    (
        "[[step]]",
        '[[step]]\nname = "input"',
        "line 8: [[step]] 1 name",
        "'input' is another view already; take another name",
    ),
    ("[sink]", "[sink]\npth = 5", "line 10: [sink] pth", "there is no such setting; did you mean path?"),
    ('"parquet"', '"parqet"', "line 10: [sink] format = 'parqet'", "did you mean parquet?"),
    ('format = "parquet"\n', "", "line 9: [sink]", "there is no format; add format ="),
    (
        'path = "out/orders"\n',
        "",
        "line 9: [sink]",
        "there is no path; add path = and where the parquet files go",
    ),
    (
        "[run]",
        'mode = "complete"\n[run]',
        'line 12: [sink] mode = "complete"',
        "parquet has append: rows that are in a file stay",
    ),
    (
        'format = "parquet"\npath = "out/orders"',
        'format = "penstock"\nqueue = "orders.dead"',
        "line 11: [sink] queue = 'orders.dead'",
        "",
    ),
    (
        'format = "parquet"\npath = "out/orders"',
        'format = "penstock"\nqueu = "out"',
        "line 11: [sink] queu",
        "there is no such setting; did you mean queue?",
    ),
    (
        'format = "parquet"\npath = "out/orders"',
        'format = "penstock"\ntransactionId = "x"',
        "line 11: [sink] transactionId = 'x'",
        "it is not for a pipeline: a stream's batches have identities of their own",
    ),
    (
        'format = "parquet"\npath = "out/orders"',
        'format = "delta"\npath = "x"\nmode = "update"',
        'line 12: [sink] mode = "update"',
        "delta has append and complete",
    ),
    (
        'format = "parquet"\npath = "out/orders"',
        'format = "console"\npath = "x"',
        "line 11: [sink] path",
        "there is no such setting; use one of name, from, format, mode, numRows, truncate",
    ),
    ('"10 seconds"', '"10 secs"', "line 13: [run] trigger = '10 secs'", "use a number and a unit"),
    ('"10 seconds"', '"1 month"', "line 13: [run] trigger = '1 month'", "use a number and a unit"),
    ('"10 seconds"', '"0 seconds"', "line 13: [run] trigger = '0 seconds'", "use a number and a unit"),
    ('"10 seconds"', "10", "line 13: [run] trigger = 10", "use a number and a unit"),
    ("trigger =", "tigger =", "line 13: [run] tigger", "did you mean trigger?"),
    (
        "trigger =",
        'watermark = "timestamp 5 minutes"\ntrigger =',
        "line 13: [run] watermark = 'timestamp 5 minutes'",
        "use a column, a comma, and a number and a unit",
    ),
    (
        'checkpoint = "out/_checkpoint/orders"\n',
        "",
        "line 12: [run]",
        "there is no checkpoint, by which a restart knows where to go on",
    ),
    ("trigger =", "spark = 5\ntrigger =", "line 13: [run] spark = 5", "use settings of Spark"),
    (
        'subscribe = "orders"',
        'subscribe = ["a,b", "c"]',
        "line 3: [source] subscribe = ['a,b', 'c']",
        "'a,b' has a comma in it, which would make two of it",
    ),
]


@pytest.mark.parametrize(("old", "new", "where", "problem"), WRONG, ids=[row[2] for row in WRONG])
def test_a_mistake_is_told_with_its_line_and_key(
    tmp_path: Path, old: str, new: str, where: str, problem: str
) -> None:
    assert old in GOOD
    lines = mistakes(tmp_path, GOOD.replace(old, new, 1))
    beginning = f"p.toml, {where}: " if where.startswith("line") else f"p.toml: {where}: "
    assert any(line.startswith(beginning) and problem in line for line in lines), "\n".join(lines)


WRONG_TWO: list[tuple[str, str, str]] = [
    ('name = "orders"\n', "", "line 2: [[source]] 1: there is no name; add name ="),
    ('name = "payments"', 'name = "orders"', "line 10: [[source]] 2 name: another source is called 'orders'"),
    ('name = "payments"', 'name = "input"', "line 10: [[source]] 2 name: 'input' is the result of the step"),
    ('name = "payments"', 'name = "a-b"', "line 10: [[source]] 2 name = 'a-b': use a letter and up to 63"),
    ('name = "both"', 'name = "orders"', "line 19: [[step]] 1 name: 'orders' is another view already"),
    # Spark makes no difference between two views whose names differ in case.
    ('name = "payments"', 'name = "Orders"', "line 10: [[source]] 2 name: another source is called 'orders'"),
    ('name = "payments"', 'name = "Input"', "line 10: [[source]] 2 name: 'input' is the result of the step"),
    ('name = "both"', 'name = "ORDERS"', "line 19: [[step]] 1 name: 'ORDERS' is another view already"),
    ('name = "both"', 'name = "INPUT"', "line 19: [[step]] 1 name: 'INPUT' is another view already"),
    (
        '"once"',
        '"once"\nwatermark = "timestamp, 1 day"',
        "line 29: [run] watermark: there are several sources",
    ),
    ("[run]", '[parse]\nformat = "text"\n[run]', "line 27: [parse]: there are several sources; write it as"),
    ("id bigint, paid", "id bigint, paied", "line 12: [[source]] 2 watermark: there is no column 'paid'"),
]


@pytest.mark.parametrize(("old", "new", "problem"), WRONG_TWO, ids=[row[2] for row in WRONG_TWO])
def test_mistakes_with_several_sources(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in TWO
    lines = mistakes(tmp_path, TWO.replace(old, new, 1))
    assert any(line.startswith(f"p.toml, {problem}") for line in lines), "\n".join(lines)


def test_two_sources_do_not_hold_under_one_name(tmp_path: Path) -> None:
    text = TWO.replace("subscribe =", 'reader = "nightly"\nsubscribe =').replace(
        "subscribePattern =", 'reader = "nightly "\nsubscribePattern ='
    )
    assert mistakes(tmp_path, text) == [
        "p.toml, line 12: [[source]] 2 reader: source 'orders' has the same, and each would let go of what "
        "the other holds; take another name"
    ]
    assert len(read(tmp_path, text.replace('"nightly "', '"daily"')).sources) == 2


def test_several_sources_need_a_step(tmp_path: Path) -> None:
    text = re.sub(r"\[\[step\]\](.|\n)*\[sink\]", "[sink]", TWO)
    assert mistakes(tmp_path, text) == [
        "p.toml: [[step]]: there is none; add one that joins the sources with SQL"
    ]


PYTHON: list[tuple[str, str]] = [
    ("nothing", "use a module and a function in it, as in module:function"),
    (
        "no.such.module:f",
        "module 'no.such.module' cannot be imported: ModuleNotFoundError: No module named 'no'",
    ),
    ("tests.pipeline.steps_of_tests:shuot", "has no 'shuot'; did you mean shout?"),
    ("tests.pipeline.steps_of_tests:NUMBER", "is int; name a function"),
    ("tests.pipeline.steps_of_tests:three", "'three' takes 3 arguments; define three(frame)"),
    ("beside:f", "module 'beside' cannot be imported: ZeroDivisionError"),
    ("ending:f", "module 'ending' cannot be imported: SystemExit: 3"),
    ("sys:exit", "module 'sys' is Python's own here, and not the one beside this file"),
    ("typing:cast", "typing.py here, and not the one beside this file: Python loads a name once"),
]


@pytest.mark.parametrize(("path", "problem"), PYTHON, ids=[path for path, _ in PYTHON])
def test_a_step_in_python_is_imported(tmp_path: Path, path: str, problem: str) -> None:
    for name, text in (("beside", "1 / 0"), ("ending", "raise SystemExit(3)"), ("typing", ""), ("sys", "")):
        (tmp_path / f"{name}.py").write_text(text)
    text = re.sub("sql = .*", f'python = "{path}"', GOOD)
    (line,) = mistakes(tmp_path, text)
    assert line.startswith(f"p.toml, line 8: [[step]] 1 python = '{path}': ")
    assert problem in line


def test_all_mistakes_are_told_in_the_order_of_their_lines(tmp_path: Path) -> None:
    text = GOOD.replace('"json"', '"jsn"').replace("trigger", "triger").replace("subscribe", "subscrib")
    lines = mistakes(tmp_path, text)
    assert [re.sub("(line [0-9]+).*", r"\1", line) for line in lines] == [
        "p.toml, line 3",
        "p.toml, line 5",
        "p.toml, line 13",
    ]


def test_a_token_is_in_no_mistake(tmp_path: Path) -> None:
    text = GOOD.replace('subscribe = "orders"', 'subscribe = "orders"\ntoken = ["secret", 1]')
    (line,) = mistakes(tmp_path, text)
    assert line.startswith("p.toml, line 4: [source] token: ")
    assert "secret" not in line
    for key, url in (("engine", "nats://ann:secret@"), ("url", "http://ann:secret@host:1")):
        text = GOOD.replace('subscribe = "orders"', f'subscribe = "orders"\n{key} = "{url}"')
        (line,) = mistakes(tmp_path, text)
        assert line.startswith(f"p.toml, line 4: [source] {key}: ")
        assert "secret" not in line


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"name = ", "this is not TOML"), (b"\xff", "byte 0 is not UTF-8"), (None, "cannot be read")],
)
def test_a_file_that_is_none(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "p.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PipelineMistakes, match=problem):
        read_pipeline(str(path))
