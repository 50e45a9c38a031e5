"""What Spark says, in one line. The texts are Spark's, with most of their Java left out."""

import pytest
from pyspark.errors import PySparkException

from penstock.pipeline.failures import LINE_MAX, cause_of
from penstock.spark.api import Unreachable

PLAN = """
=== Streaming Query ===
Identifier: orders [id = 65267904-6cde-4215-b61a-c2b92443db8b, runId = 18535156-9a3f-4a7d-8d4f-8e5845b1dbcb]
Current Committed Offsets: {}

Logical Plan:
~Project [region#378]
"""

TOLD: list[tuple[str, str]] = [
    (
        "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `regon` cannot be resolved. Did you mean one "
        "of [`region`]. SQLSTATE: 42703; line 1 pos 7;\n'Project ['regon]\n+- Relation [region#1]\n",
        "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `regon` cannot be resolved. Did you mean one "
        "of [`region`].; line 1 pos 7",
    ),
    (
        "[STREAM_FAILED] Query [id = 65267904-6cde-4215-b61a-c2b92443db8b, runId = 18535156-9a3f-4a7d-8d4f-"
        "8e5845b1dbcb] terminated with exception: Multiple streaming queries are concurrently using "
        f"file:/tmp/offsets SQLSTATE: XXKST{PLAN}",
        "Multiple streaming queries are concurrently using file:/tmp/offsets",
    ),
    (
        "[PYTHON_EXCEPTION] An exception was thrown: Traceback (most recent call last):\n"
        '  File "steps.py", line 7, in divide\n    return 1 // 0\n'
        f"ZeroDivisionError: integer division or modulo by zero\n SQLSTATE: 38000{PLAN}",
        "ZeroDivisionError: integer division or modulo by zero",
    ),
    (
        "[PYTHON_DATA_SOURCE_ERROR] Failed: Traceback (most recent call last):\n"
        '  File "reading.py", line 80, in _range\n    raise ConnectionError\n'
        "ConnectionError: it is gone\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n"
        '  File "api.py", line 100, in failed\n    raise Unreachable(\n'
        f"penstock.spark.api.Unreachable: http://127.0.0.1:9: no broker answers there\n{PLAN}",
        "http://127.0.0.1:9: no broker answers there",
    ),
    (
        "An error occurred while calling o5459.start.\n: org.apache.spark.SparkClassNotFoundException: "
        "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: nosuch. SQLSTATE: 42K02\n"
        "\tat org.apache.spark.sql.errors.QueryExecutionErrors$.dataSourceNotFoundError(Errors.scala:722)\n"
        "Caused by: java.lang.ClassNotFoundException: nosuch.DefaultSource\n\t... 13 more\n",
        "[DATA_SOURCE_NOT_FOUND] Failed to find the data source: nosuch.",
    ),
    (
        "An error occurred while calling o5940.start.\n: org.apache.spark.SparkException: Writing failed.\n"
        "\tat org.apache.spark.Task.run(Task.scala:1)\n"
        "Caused by: java.io.IOException: No space left on device\n\t... 13 more\n",
        "No space left on device",
    ),
    ("", "PySparkException"),
]


@pytest.mark.parametrize(("text", "told"), TOLD, ids=[told[:40] for _, told in TOLD])
def test_what_happened(text: str, told: str) -> None:
    assert cause_of(PySparkException(text)) == told


def test_errors_of_ours_say_it_themselves() -> None:
    assert cause_of(Unreachable("nobody answers")) == "nobody answers"


def test_a_line_has_an_end() -> None:
    line = cause_of(PySparkException("x" * 10_000))
    assert len(line) == LINE_MAX
    assert line.endswith("…")
