"""docs/celery.md, examples/celery/: every command is run, in the page's order, and prints what it says there.

The worker runs until the end; `…` stands for anything.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.kombu.transport import LEASE_SECONDS
from penstock.model.policy import Policies
from tests.celery.workers import url_of
from tests.http.api import Api
from tests.server.harness import ROOT, WAIT_SECONDS, BrokerProcess, until

PAGE = (ROOT / "docs" / "celery.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
EXAMPLE = ROOT / "examples" / "celery"


@pytest.mark.long
def test_the_console_says_what_the_page_says(broker: BrokerProcess, tmp_path: Path) -> None:
    environment = os.environ | {
        "BROKER": url_of(broker),
        "PENSTOCK_URL": f"http://127.0.0.1:{broker.ports['http']}",
        "PYTHONPATH": str(ROOT),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    for name in ("celery", "penstock"):
        (tmp_path / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {name} "$@"\n')
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    steps = [step for kind, block in BLOCKS if kind == "console" for step in steps_of(block)]
    (start, _), *others = steps
    log = tmp_path / "worker.log"
    with log.open("wb") as out:
        worker = subprocess.Popen(
            ["bash", "-c", f"exec {start}"], cwd=EXAMPLE, env=environment, stdout=out, stderr=out
        )
    try:
        until(lambda: "ready." in log.read_text(), "the worker")
        for command, shown in others:
            command = command.replace("127.0.0.1:9180", f"127.0.0.1:{broker.ports['http']}")
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=EXAMPLE,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=4 * WAIT_SECONDS,
            )
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            pattern = re.escape(shown.strip()).replace("…", ".*")
            assert re.fullmatch(pattern, done.stdout.strip(), re.DOTALL), (command, done.stdout)
        with Api(broker.ports["http"]) as api:
            until(
                lambda: (row := api.get("/v1/queues/celery"))["ready"] == row["held"] == 0, "the task by curl"
            )
            assert api.get("/v1/queues/celery")["dead"] == 1
    finally:
        worker.terminate()
        assert worker.wait(WAIT_SECONDS) == 0, log.read_text()


def steps_of(block: str) -> list[tuple[str, str]]:
    """Commands, and what they print."""
    parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def test_the_rest_of_the_page() -> None:
    assert {kind for kind, _ in BLOCKS} == {"console", "python", "toml"}
    (settings,) = [tomllib.loads(block) for kind, block in BLOCKS if kind == "toml"]
    assert Policies(settings["queue"]).for_queue("a@host.celery.pidbox").on_expiry == "drop"
    (program,) = [block for kind, block in BLOCKS if kind == "python"]
    exec(compile(program, "docs/celery.md", "exec"), {})
    assert f"| `lease` | {LEASE_SECONDS:g} |" in PAGE


@pytest.mark.parametrize("name", ["shop.py", "order.py"])
def test_the_example_is_named(name: str) -> None:
    assert (EXAMPLE / name).is_file()
    assert name.removesuffix(".py") in PAGE
