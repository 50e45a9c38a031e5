"""A short search by the fuzzer on every run; `make fuzz SECONDS=600` searches for longer."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.build import interpreted_only

SEED = 20240301
RUNS = 4000


@interpreted_only  # The fuzzer finds its way by the branches of the Python.
@pytest.mark.parametrize("protocol", ["sspq", "phpmq", "rq"])
def test_fuzz(tmp_path: Path, protocol: str) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    target = Path(__file__).with_name(f"fuzz_{protocol}.py")
    options = [f"-runs={RUNS}", f"-seed={SEED}", "-timeout=10", f"-artifact_prefix={tmp_path}/"]
    done = subprocess.run(
        [sys.executable, str(target), *options, str(corpus)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = [path.read_bytes().hex(" ") for path in tmp_path.iterdir() if path.is_file()]
    report = (
        f"seed {SEED}, exit {done.returncode}, findings {found}\n{done.stderr[-4000:]}\n{done.stdout[-2000:]}"
    )
    assert done.returncode == 0, report
    assert not found, report
    assert f"Done {RUNS} runs" in done.stderr, report
    new = [path for path in corpus.iterdir() if not path.name.startswith("vector-")]
    assert len(new) > 10, f"the fuzzer has found next to nothing new: {report}"
