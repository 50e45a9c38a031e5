"""Cluster: Spark's own standalone cluster on this machine.

Spark never runs a second try of a task on the host of the first. So neither `local[2]` nor
`local-cluster[2,1,1024]`, whose workers share one host name, ever has a speculative task; two workers that
listen on two loopback addresses do. Everything needed for it is in pip's PySpark.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pyspark

from tests.server.harness import until
from tests.spark.rig import PATIENCE_SECONDS

MASTER = "org.apache.spark.deploy.master.Master"
WORKER = "org.apache.spark.deploy.worker.Worker"
HOSTS = ("127.0.0.1", "127.0.0.2")


class Cluster:
    """A master and a worker of one core on each of `HOSTS`, while the block runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Cluster":
        try:
            master = self._start("master", MASTER, "--host", HOSTS[0], "--port", "0", "--webui-port", "0")
            self.url = self._said(master, r"Starting Spark master at (spark://\S+)")
            for host in HOSTS:
                arguments = ("--host", host, "--cores", "1", "--memory", "1g", "--webui-port", "0")
                work = ("--work-dir", str(self.folder / host))
                log = self._start(f"worker-{host}", WORKER, *arguments, *work, self.url)
                self._said(log, r"(Successfully registered) with master")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # A worker that is told to stop ends its executors; the master is the last to go.
        for process in reversed(self._processes):
            process.terminate()
            process.wait(PATIENCE_SECONDS)

    def _start(self, name: str, *command: str) -> Path:
        home = Path(pyspark.__file__).parent
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARK_")}
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    [str(home / "bin" / "spark-class"), *command],
                    env={
                        **environment,
                        "SPARK_HOME": str(home),
                        "SPARK_NO_DAEMONIZE": "1",
                        "PYSPARK_PYTHON": sys.executable,
                    },
                    stdout=output,
                    stderr=output,
                )
            )
        return log

    def _said(self, log: Path, pattern: str) -> str:
        """What a process has told in its log, as soon as it has."""
        process = self._processes[-1]

        def there() -> bool:
            assert process.poll() is None, log.read_text()[-5000:]
            return re.search(pattern, log.read_text()) is not None

        until(there, f"{log.name} says {pattern}", PATIENCE_SECONDS)
        found = re.search(pattern, log.read_text())
        assert found is not None
        return found[1]
