"""The writing part of docs/spark.md: its examples run, and its tables are those that the sink goes by."""

import re
from base64 import b64decode
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.spark.options import BATCH, WRITING, write_options
from penstock.spark.writing_columns import MESSAGES
from tests.http.api import Api
from tests.http.morgue import path_of, reject
from tests.server.harness import ROOT, BrokerProcess
from tests.spark.rig import Queues, url_of

PAGE = (ROOT / "docs" / "spark.md").read_text()
WRITING_PART = PAGE[PAGE.index("## Writing a batch") :]


def test_the_examples_run(
    spark: SparkSession, broker: BrokerProcess, queues: Queues, api: Api, tmp_path: Path
) -> None:
    letters = [b'{"region": "north"}', b'{"region": "south", "amount": 1,5}', b'{"region": "north"}']
    reject(broker, api, "docs.orders", letters)
    blocks = re.findall(r"^```python\n(.*?)^```$", WRITING_PART, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, object] = {"spark": spark}
    for text in blocks:
        text = text.replace("http://127.0.0.1:9180", url_of(broker)).replace('"out/', f'"{tmp_path}/out/')
        text = re.sub('"(orders|written|shouted|copied)"', r'"docs.\1"', text)
        exec(compile(text, "docs/spark.md", "exec"), names)
    assert queues.values("docs.written") == {b"order %d" % number: 1 for number in range(1000)}
    shouted = {b'{"REGION": "NORTH"}': 2, b'{"REGION": "SOUTH", "AMOUNT": 1,5}': 1}
    assert queues.values("docs.shouted") == shouted
    # With another checkpoint, batches have other ids: the same rows are written once more.
    text = blocks[2].replace("http://127.0.0.1:9180", url_of(broker)).replace('"out/', f'"{tmp_path}/other/')
    exec(
        compile(
            text.replace('"orders"', '"docs.orders"').replace('"copied"', '"docs.copied"'), "page", "exec"
        ),
        names,
    )
    assert queues.values("docs.copied") == Counter(letters * 2)
    # The first two were redriven as they are, and the third one with another payload.
    ready = api.get(path_of("docs.orders", "messages"), state="ready")["messages"]
    assert [(message["offset"], message["repaired"]) for message in ready] == [
        (0, False),
        (1, True),
        (2, False),
    ]
    assert b64decode(ready[1]["value_base64"]) == b'{"region": "south". "amount": 1.5}'


def test_the_options_are_those_that_there_are() -> None:
    table = WRITING_PART[WRITING_PART.index("## Options for writing") :]
    defaults = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE))
    assert list(defaults) == [option.name for option in WRITING]
    options = write_options({}, BATCH)
    assert defaults["url"] == f"`{options.url}`"
    assert defaults["retrySeconds"] == f"`{options.retry_seconds:g}`"
    assert defaults["redrive"] == f"`{str(options.redrive).lower()}`"


@pytest.mark.parametrize("name", MESSAGES)
def test_the_columns_are_those_that_there_are(name: str) -> None:
    (words,) = re.findall(rf"^\| `{name}` \| (.*?) \|", WRITING_PART.partition("## Options")[0], re.MULTILINE)
    assert words == MESSAGES[name].words
