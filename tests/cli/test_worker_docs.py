"""docs/workers.md and docs/retries.md: every example is run, in order, and says what it says there.

All examples of a page are one session of a shell, with a broker that has the settings of the page. Lines that
begin with `$` are commands, the others what they print; an answer in JSON may be broken into lines, and `…`
stands for any value. A Python block is a program, whose `# ->` lines are what it prints. Delays of the page
are shortened.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.taking import TAKE_BYTES
from penstock.http.api.taking import MESSAGES_MAX, WAIT_SECONDS_MAX
from penstock.http.bodies.verdicts import IDS_MAX, REASON_BYTES_MAX
from penstock.model.batch import DELAY_SECONDS_MAX
from penstock.model.headers import HEADERS_BYTES_MAX, HEADERS_MAX, NAME_BYTES_MAX
from penstock.server.settings import HttpSettings
from tests.cli.test_operating import TEXTS, likeness
from tests.http.conftest import StartBroker
from tests.server.harness import ROOT, WAIT_SECONDS

PAGES = ("workers", "retries")
DELAYS = ("retry-delays = [10, 60]", "retry-delays = [0.1, 0.2]")

Example = tuple[str, list[str]]
"""What is typed, and the lines that it prints."""


def blocks(page: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w+)\n(.*?)^```$", TEXTS[page], re.MULTILINE | re.DOTALL)


def examples(page: str) -> Iterator[Example]:
    for kind, block in blocks(page):
        if kind == "python":
            yield f"python - <<'END'\n{block}\nEND", re.findall(r"^# -> (.*)$", block, re.MULTILINE)
        elif kind == "console":
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, *lines = part.splitlines()
                yield command, lines


def fits(wanted: Any, found: Any) -> bool:
    """Whether a value of JSON is what the page shows."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return wanted.keys() == found.keys() and all(fits(wanted[name], found[name]) for name in wanted)
    if isinstance(wanted, list) and isinstance(found, list):
        return len(wanted) == len(found) and all(map(fits, wanted, found))
    return bool(wanted in ("…", found))


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_a_session_that_says_what_it_shows(
    page: str, start_broker: StartBroker, tmp_path: Path
) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text("\n".join(block for kind, block in blocks(page) if kind == "toml").replace(*DELAYS))
    broker = start_broker("--config", str(config))
    typed = list(examples(page))
    assert len(typed) > 5
    python = f'python() {{ "{sys.executable}" "$@"; }}\npenstock() {{ python -m penstock "$@"; }}\n'
    script = "".join(f"echo '@{at}'\n{command}\necho\n" for at, (command, _) in enumerate(typed))
    here = f"127.0.0.1:{broker.ports['http']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", python + script.replace("127.0.0.1:9180", here)],
        env={**os.environ, "PENSTOCK_URL": f"http://{here}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=3 * WAIT_SECONDS,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    for at, printed in enumerate(re.split(r"^@\d+\n", done.stdout, flags=re.MULTILINE)[1:]):
        command, wanted = typed[at]
        if wanted and wanted[0].startswith("{"):
            answer = json.loads(" ".join(wanted).replace("…", '"…"'))
            assert fits(answer, json.loads(printed)), (command, printed)
        else:
            lines = [likeness(line) for line in printed.splitlines()]
            assert lines == [*map(likeness, wanted), ""], (command, printed)


def test_the_bounds_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", TEXTS["workers"].partition("| | at most |")[2], re.MULTILINE)
    numbers = [[int(it.replace(",", "")) for it in re.findall(r"\d[\d,]*", row[1])] for row in rows]
    assert numbers == [
        [MESSAGES_MAX, TAKE_BYTES >> 20],
        [IDS_MAX],
        [WAIT_SECONDS_MAX],
        [HttpSettings().lease_seconds_max],
        [DELAY_SECONDS_MAX // (365 * 86400)],
        [HEADERS_MAX, 1, NAME_BYTES_MAX, HEADERS_BYTES_MAX >> 10],
        [REASON_BYTES_MAX],
    ]
