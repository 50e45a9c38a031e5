"""`python -m bench.compare` as a whole, small: Penstock beside NATS, which pip brings."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.compare import page

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the load generator needs a C compiler")

ROOT = Path(__file__).parent.parent.parent
COMMAND = [sys.executable, "-m", "bench.compare", "--quick"]
SECONDS_MAX = 120.0


def environment(folder: Path) -> dict[str, str]:
    """Everything that the run makes is below this folder."""
    folder.mkdir()
    return {**os.environ, "TMPDIR": str(folder)}


def left_behind(folder: Path) -> list[str]:
    """Servers' folders, and processes that were started with one of them."""
    found = [path.name for path in folder.glob("penstock-bench-*")]
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = process.read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        if str(folder).encode() in command:
            found.append(command.decode(errors="replace"))
    return found


@pytest.mark.long
def test_a_run_measures_both_proves_the_counts_and_writes_the_report(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / page.PAGE).write_text(f"above\n\n{page.FROM}\n{page.TO}\n\nbelow\n", encoding="utf-8")
    report = tmp_path / "report.json"
    command = [*COMMAND, "--only", "penstock phpmq", "--only", "sync 2m"]
    command += ["--json", str(report), "--write-docs", str(docs)]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(tmp_path / "tmp"),
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "left]" in ended.stderr
    assert left_behind(tmp_path / "tmp") == []

    found = json.loads(report.read_text(encoding="utf-8"))
    assert [line for line in found["left_out"] if "system calls" not in line] == []
    works = {(one["subject"], one["work"]) for one in found["figures"]}
    subjects = {subject for subject, _ in works}
    assert subjects == {"Penstock PHPMQ, interpreted", "NATS JetStream, sync 2m"}
    assert len(works) == 2 * 14
    assert all(one["per_second"] > 0 for one in found["figures"])
    paced = [one for one in found["figures"] if one["work"] == "paced"]
    assert all(0 < one["p50_us"] <= one["p99_us"] <= one["p999_us"] for one in paced)
    assert {one["measure"] for one in found["scenes"]} >= {"backlog MB", "recovery s", "queue ms"}
    assert {one["verdict"] for one in found["goals"]} <= {"reached", "not reached", "not measured"}

    text = (docs / page.PAGE).read_text(encoding="utf-8")
    assert text.startswith("above\n")
    assert text.endswith("\nbelow\n")
    tables = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    assert len(tables) >= 7
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    ElementTree.fromstring((docs / page.CHART).read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_interrupted_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [*COMMAND, "--only", "sync 2m"],
        cwd=ROOT,
        env=environment(tmp_path / "tmp"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "end to end" in line:  # a server runs, and the generator too
                break
        running.send_signal(number)
        _, rest = running.communicate(timeout=SECONDS_MAX)
    assert running.returncode == 130
    assert rest.endswith("stopped: the servers are ended and their folders removed\n")
    deadline = time.monotonic() + 10
    while left_behind(tmp_path / "tmp") and time.monotonic() < deadline:
        os.sched_yield()
    assert left_behind(tmp_path / "tmp") == []


def misused(*words: str) -> str:
    """What is said to a command that cannot be followed, before anything is started."""
    ended = subprocess.run([*COMMAND, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    return ended.stderr


def test_nobody_of_that_name_is_misuse() -> None:
    assert misused("--only", "nobody") == "nobody is called nobody\n"


def test_a_page_without_marks_is_found_before_the_run(tmp_path: Path) -> None:
    (tmp_path / page.PAGE).write_text("no marks\n", encoding="utf-8")
    assert f"{page.PAGE} needs the lines" in misused("--write-docs", str(tmp_path))
