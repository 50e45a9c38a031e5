"""Celery workers in processes of their own, and apps that talk to them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celery import Celery

import penstock.kombu  # noqa: F401 - registers the transport
from tests.server.harness import ROOT, WAIT_SECONDS, BrokerProcess, until


def url_of(broker: BrokerProcess) -> str:
    return f"penstock://127.0.0.1:{broker.ports['http']}"


def environment(broker: BrokerProcess, settings: Mapping[str, object]) -> dict[str, str]:
    # As a program of its own that finds the same tree.
    return os.environ | {
        "BROKER": url_of(broker),
        "CELERY_SETTINGS": json.dumps(settings),
        "PYTHONPATH": str(ROOT),
    }


class Worker:
    """`celery worker`, from its start to its end."""

    def __init__(
        self, broker: BrokerProcess, folder: Path, name: str, *flags: str, **settings: object
    ) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        words = [
            "-m",
            "celery",
            "-A",
            "tests.celery.tasks",
            "worker",
            "-n",
            f"{name}@test",
            "-l",
            "INFO",
            *flags,
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *words],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=environment(broker, settings),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def ready(self) -> "Worker":
        until(lambda: "ready." in self.log() or self._process.poll() is not None, f"{self.name} to be ready")
        assert self._process.poll() is None, self.log()
        return self

    def cpu_seconds(self) -> float:
        """Of the process that has the connection."""
        user, system = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> int:
        """As an operator does; the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(WAIT_SECONDS)

    def kill(self) -> None:
        """kill -9, which its children notice."""
        self._process.kill()
        self._process.wait(WAIT_SECONDS)


def celery(broker: BrokerProcess, *words: str, **settings: object) -> str:
    """What a command of Celery's prints."""
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "tests.celery.tasks", *words],
        env=environment(broker, settings),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def send(app: Celery, task: str, *arguments: object, **options: Any) -> Any:
    return app.send_task(f"tests.celery.tasks.{task}", arguments, **options)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
