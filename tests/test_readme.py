"""What the README tells people to type, typed. Only the ports differ, so that tests can run side by side."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import ROOT, BrokerProcess

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("readme"), "--http", "127.0.0.1:0").start()
    yield process
    assert process.stop() == 0


def shell(command: str, broker: BrokerProcess) -> str:
    words = shlex.split(command.replace(".venv/bin/penstock", f"{shlex.quote(sys.executable)} -m penstock"))
    protocol = "phpmq" if " receive " in command else "http"
    environment = os.environ | {"PENSTOCK_URL": f"{protocol}://127.0.0.1:{broker.ports[protocol]}"}
    result = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_send_and_receive_as_it_says(broker: BrokerProcess) -> None:
    words = "send|queues|peek|receive"
    commands = re.findall(rf"^    (\.venv/bin/penstock (?:{words})\b.*)$", README, re.MULTILINE)
    assert len(commands) == 4
    assert [shell(command, broker) for command in commands][-1] == "hello\n"


def test_the_python_example(broker: BrokerProcess) -> None:
    source, _ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    source = source.replace("127.0.0.1:9100", f"127.0.0.1:{broker.ports['phpmq']}")
    result = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert (result.stdout, result.stderr) == ("b'hello'\n", "")


def test_every_page_that_it_names_is_there() -> None:
    pages = re.findall(r"\]\((docs/[^)]+)\)", README)
    assert len(pages) > 4
    assert [page for page in pages if not Path(ROOT, page).is_file()] == []
