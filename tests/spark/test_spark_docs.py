"""docs/spark.md: its examples run, and its tables are those that the source goes by."""

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.log.tables import VIEWS
from penstock.spark.options import BATCH, READING, read_options
from tests.server.harness import ROOT, BrokerProcess
from tests.spark.rig import send, url_of

PAGE = (ROOT / "docs" / "spark.md").read_text()
READING_PART = PAGE[: PAGE.index("## Straight from NATS")]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", READING_PART, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def orders(broker: BrokerProcess) -> str:
    send(broker, "orders", [b"three apples", b"a pear"])
    return url_of(broker)


@pytest.mark.parametrize("block", BLOCKS, ids=range(1, len(BLOCKS) + 1))
def test_the_examples_run(
    block: tuple[str, str],
    orders: str,
    broker: BrokerProcess,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    kind, text = block
    monkeypatch.chdir(tmp_path)
    text = text.replace("http://127.0.0.1:9180", orders).replace('"out/', f'"{tmp_path}/out/')
    text = text.replace("/mnt/penstock/data", str(broker.folder / "data"))
    if kind == "sql":
        spark.sql(text)
        assert spark.sql("select * from orders").count() == 2
        return
    assert kind == "python"
    exec(compile(text, "docs/spark.md", "exec"), {"spark": spark})
    if ".show()" in text and "events" not in text:
        assert "three apples" in capfd.readouterr().out
    if "parquet" in text:
        assert spark.read.parquet(str(tmp_path / "out" / "orders")).count() == 2


def test_the_options_are_those_that_there_are() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", READING_PART, re.MULTILINE)
    defaults = {name: default for name, default in rows if name not in VIEWS}
    assert list(defaults) == [option.name for option in READING]
    options = read_options({"subscribe": "x"}, BATCH)
    assert defaults["url"] == f"`{options.url}`"
    assert defaults["engine"] == f"`{options.engine}`"
    assert defaults["view"] == f"`{options.view}`"
    assert defaults["retrySeconds"] == f"`{options.retry_seconds:g}`"
    assert (
        read_options({"subscribe": "x", "maxBytesPerPartition": defaults["maxBytesPerPartition"]}, BATCH)
        == options
    )
    assert options.max_trigger_delay == 60 * int(defaults["maxTriggerDelay"].removesuffix("m"))
    assert defaults["failOnDataLoss"] == f"`{str(options.fail_on_data_loss).lower()}`"


@pytest.mark.parametrize("view", VIEWS)
def test_the_columns_are_those_that_there_are(view: str) -> None:
    (row,) = re.findall(rf"^\| `{view}` \|.*\| (`queue`.*?) \|$", READING_PART, re.MULTILINE)
    columns = ", ".join(f"`{column.name}` {column.type}" for column in VIEWS[view])
    assert row == columns
