"""What Spark says, in one line. The texts are Spark's, with most of their Java left out."""

import pytest
from pyspark.errors import AnalysisException, PySparkException

from penstock.pipeline.failures import LINE_MAX, cause_of, passes
from penstock.pipeline.running import PipelineFailed
from penstock.spark.api import Refused, RefusedForNow, Unreachable
from penstock.spark.offsets import DataLost

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


def traceback(line: str) -> PySparkException:
    text = f'[PYTHON_DATA_SOURCE_ERROR] Traceback (most recent call last):\n  File "api.py", line 1\n{line}\n'
    return PySparkException(f"{text} SQLSTATE: 38000{PLAN}")


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (Unreachable("nobody answers"), True),
        (RefusedForNow("the queue is full", 429, "queue-full", {}), True),
        (traceback("penstock.spark.api.Unreachable: nobody answers"), True),
        (traceback("penstock.spark.api.RefusedForNow: the disk is full"), True),
        (traceback("penstock.spark.writing_transaction.CommitUnknown: it may be committed"), True),
        (PySparkException("Caused by: Python worker failed to connect back."), True),
        (Refused("no", 403, "forbidden", {}), False),
        (DataLost("offsets 0 to 5 are gone"), False),
        (traceback("penstock.spark.offsets.DataLost: offsets 0 to 5 are gone"), False),
        (AnalysisException("[UNRESOLVED_COLUMN] no such column"), False),
        (PySparkException("[CAST_INVALID_INPUT] 'x' is no number. SQLSTATE: 22018"), False),
        (PySparkException("[USER_RAISED_EXCEPTION] a bad record SQLSTATE: P0001"), False),
        (PySparkException(TOLD[1][0]), None),
        (traceback("OSError: no luck today"), None),
        (PySparkException("Caused by: java.io.IOException: No space left on device"), None),
        (RuntimeError("whatever"), None),
    ],
    ids=lambda it: str(it)[-60:] if isinstance(it, Exception) else None,
)
def test_what_may_pass(error: Exception, verdict: bool | None) -> None:
    assert passes(error) is verdict
    failed = PipelineFailed("orders: it has failed")
    failed.__cause__ = error
    assert passes(failed) is verdict


def test_a_line_has_an_end() -> None:
    line = cause_of(PySparkException("x" * 10_000))
    assert len(line) == LINE_MAX
    assert line.endswith("…")
