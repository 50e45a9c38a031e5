"""The demonstration, run as people run it."""

import subprocess
import sys
from pathlib import Path

from penstock.tally import Tally


def test_the_demo_shows_that_nothing_is_lost(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "demo", "--messages", "1000", "--data", str(tmp_path / "d")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert "lost 0, invented 0, doubled 0" in result.stdout
    assert "kill -9" in result.stdout


def test_the_demo_keeps_its_hands_off_a_folder_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    command = [sys.executable, "-m", "penstock", "demo", "--data", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "not empty" in result.stderr


def test_the_tally_tells_lost_invented_doubled_and_repeated_apart() -> None:
    tally = Tally()
    tally.attempted(range(6))
    tally.confirmed([0, 1, 2, 3])
    tally.delivered([0, 1, 1, 2, 7])
    tally.settled([2])
    assert tally.clean is False
    tally.delivered([2])
    assert (tally.lost, tally.invented, tally.doubled, tally.repeated) == ({3}, {7}, {2}, 1)
    assert "lost 1" in str(tally)
