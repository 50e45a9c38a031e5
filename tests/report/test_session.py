"""How our own commands start Spark: what is set where, and what is said of all that Spark says."""

import pytest

from penstock.spark import session
from penstock.spark.session import one_line, settings_for


def test_a_cluster_gets_nothing_that_is_meant_for_this_machine() -> None:
    assert settings_for("sc://host") == {"spark.sql.session.timeZone": "UTC"}
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
