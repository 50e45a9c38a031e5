"""How our own commands start Spark: what is set where, and what is said of all that Spark says."""

import os
import sys
from pathlib import Path

import pytest

from penstock.spark import session
from penstock.spark.session import one_line, settings_for, tried_again


def test_a_cluster_gets_nothing_that_is_meant_for_this_machine() -> None:
    assert settings_for("sc://host") == {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.python.filterPushdown.enabled": "true",
    }
    cluster = settings_for("spark://host:7077")
    assert cluster["spark.ui.enabled"] == "false"
    assert not cluster.keys() & session.LOCAL.keys()
    for master in ("local", "local[*]", "local[2]", "local-cluster[1,1,1024]"):
        assert settings_for(master) == {**cluster, **session.LOCAL}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "It was thrown:\n  File x\npenstock.spark.offsets.DataLost: queue 'a': gone; do this\n\n at java",
            "queue 'a': gone; do this",
        ),
        ("[SOME_ERROR] Spark's own: words\nmore", "[SOME_ERROR] Spark's own: words"),
        ("penstock. is not: a name", "penstock. is not: a name"),
        ("", "ValueError"),
    ],
)
def test_one_line(text: str, line: str) -> None:
    assert one_line(ValueError(text)) == line


# --- a worker that is slow to start ------------------------------------------------------------------------


LATE = (
    "[STREAM_FAILED] Query terminated with exception: Python worker failed to connect back.\n"
    "Caused by: SocketTimeoutException: Timed out while waiting for the Python worker to connect back"
)


def test_what_a_slow_worker_ended_is_done_again_and_said() -> None:
    said: list[str] = []
    failures: list[Exception] = [ValueError(LATE)]

    def work() -> str:
        if failures:
            raise RuntimeError("the pipeline has failed") from failures.pop()
        return "done"

    assert tried_again(work, said.append) == "done"
    assert said == [
        "a Python worker of Spark's did not start within 10 s: this machine is busy; trying again"
    ]
    failures += [ValueError(LATE)] * 3
    with pytest.raises(RuntimeError):
        tried_again(work, said.append)
    assert (len(said), failures) == (3, [])


def test_what_anything_else_ended_is_not() -> None:
    said: list[str] = []

    def work() -> None:
        said.append("worked")
        raise ValueError("Python worker exited unexpectedly")

    with pytest.raises(ValueError, match="exited"):
        tried_again(work, lambda text: pytest.fail(text))
    assert said == ["worked"]


# --- with which Python -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "before", "settings", "local", "named"),
    [
        ("elsewhere", None, {}, True, sys.executable),
        ("elsewhere", None, {}, False, sys.executable),
        ("ours", None, {}, False, None),
        ("ours", None, {}, True, sys.executable),
        ("elsewhere", "/opt/python", {}, False, "/opt/python"),
        ("ours", None, {"spark.pyspark.python": "/opt/python"}, False, "/opt/python"),
    ],
)
def test_with_which_python_spark_works(
    path: str,
    before: str | None,
    settings: dict[str, str],
    local: bool,
    named: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The command may be called by its full path, and the first python3 of PATH knows nothing of Penstock."""
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) if path == "elsewhere" else os.path.dirname(sys.executable))
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    if before is not None:
        monkeypatch.setenv("PYSPARK_PYTHON", before)
    session._name_python(settings, local)
    assert os.environ.get("PYSPARK_PYTHON") == named
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
