"""What the tests of pipelines share: files, runs, dead letters, and batches that are run again."""

import base64
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from penstock.pipeline.file import read_pipeline
from penstock.pipeline.model import Pipeline
from penstock.pipeline.progress import Teller
from penstock.pipeline.running import Run
from tests.http.api import Api
from tests.server.harness import BrokerProcess
from tests.spark.rig import send, url_of


def orders(count: int, first: int = 0) -> list[bytes]:
    """Records with three regions and amounts that tell them apart."""
    regions = ("north", "south", "west")
    return [
        json.dumps({"id": number, "region": regions[number % 3], "amount": number * 0.5}).encode()
        for number in range(first, first + count)
    ]


class Files:
    """A folder for files, and a broker, for pipelines that are run by processes of their own."""

    def __init__(self, broker: BrokerProcess, folder: Path) -> None:
        self.broker = broker
        self.folder = folder
        self.url = url_of(broker)

    # --- files -----------------------------------------------------------------------------------

    def write(self, name: str, text: str) -> Path:
        """A pipeline's file, in which URL and FOLDER stand for what they are here."""
        path = self.folder / f"{name}.toml"
        path.write_text(
            f'name = "{name}"\n' + text.replace("URL", self.url).replace("FOLDER", str(self.folder))
        )
        return path

    def pipeline(self, name: str, text: str) -> Pipeline:
        return read_pipeline(str(self.write(name, text)))

    # --- queues ----------------------------------------------------------------------------------

    def send(self, queue: str, values: Iterable[bytes]) -> None:
        send(self.broker, queue, values)

    def api(self) -> Api:
        return Api(self.broker.ports["http"])

    def messages(self, queue: str, state: str | None = None) -> list[bytes]:
        """The payloads of a queue, in order."""
        found: list[bytes] = []
        start: int | None = 0
        with self.api() as api:
            while start is not None:
                page = api.get(f"/v1/queues/{queue}/messages", from_=start, limit=1000, state=state)
                found += (base64.b64decode(message["value_base64"]) for message in page["messages"])
                start = page["next"]
        return found

    def bad_records(self, queue: str) -> list[dict[str, Any]]:
        """What is said in the dead letters of a queue, by the offset of the record."""
        with self.api() as api:
            reasons = api.get(f"/v1/queues/{queue}")["dead_reasons"]
        letters = [json.loads(value) for value in self.messages(queue, "dead")]
        assert reasons == ({"bad-record": len(letters)} if letters else {})
        return sorted(letters, key=lambda letter: letter["offset"])


class Rig(Files):
    """These, and Spark."""

    def __init__(self, spark: SparkSession, broker: BrokerProcess, folder: Path) -> None:
        super().__init__(broker, folder)
        self.spark = spark
        self.said: list[str] = []

    # --- runs ------------------------------------------------------------------------------------

    def new_run(self, pipeline: Pipeline, *, once: bool = True) -> Run:
        self.said = []
        return Run(pipeline, self.spark, Teller(pipeline.name, self.said.append, time.monotonic), once=once)

    def run_once(self, pipeline: Pipeline) -> None:
        """Until everything is done that is there."""
        self.new_run(pipeline).run()

    def forget_last_batch(self, checkpoint: str) -> None:
        """As if the driver had died when a batch was written, but not written down."""
        commits = Path(checkpoint) / "commits"
        last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
        (commits / str(last)).unlink()
        (commits / f".{last}.crc").unlink(missing_ok=True)

    # --- results ---------------------------------------------------------------------------------

    def parquet(self, path: str) -> list[dict[str, Any]]:
        """The rows that count: Spark's own list says which files do."""
        return [row.asDict() for row in self.spark.read.parquet(path).collect()]
