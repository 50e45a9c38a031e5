"""kill -9 of a real process under load, again and again: lost 0, invented 0, doubled 0."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.log.errors import LogInUse
from penstock.log.log import open_log
from penstock.model.words import Outcome
from penstock.tally import Tally
from tests.log.kill_child import QUEUES, SETTINGS, now_us, numbers_of

LIVES = 12
ROOT = Path(__file__).parents[2]


def start(folder: Path, first: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.log.kill_child", str(folder), str(first)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def note(tally: Tally, line: str) -> None:
    if not line.endswith("\n"):
        return  # the kill has cut it off
    word, _, numbers = line.strip().partition(" ")
    facts = {
        "sending": tally.attempted,
        "confirmed": tally.confirmed,
        "delivered": tally.delivered,
        "settled": tally.settled,
    }
    facts[word](int(n) for n in numbers.split(",") if n)


def test_nothing_confirmed_is_lost_by_kill_9(tmp_path: Path) -> None:
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", random.randrange(2**32)))
    pace = random.Random(seed)
    tally = Tally()
    for life in range(LIVES):
        process = start(tmp_path, 1_000_000 * life)
        assert process.stdout is not None
        lines_before_kill = pace.randint(1, 1500)
        for _, line in zip(range(lines_before_kill), process.stdout, strict=False):
            note(tally, line)
        assert process.poll() is None, f"seed {seed}: the child ended by itself"
        os.kill(process.pid, signal.SIGKILL)
        for line in process.stdout:
            note(tally, line)
        process.wait()
        process.stdout.close()
    engine = open_log(str(tmp_path), now_us(), settings=SETTINGS)
    for queue in QUEUES:
        for dead in (False, True):
            while slices := engine.take(queue, "drain", 10_000, now_us(), dead=dead):
                for piece in slices:
                    tally.delivered(numbers_of(piece))
                    fates = engine.settle(
                        queue,
                        "drain",
                        Outcome.ACK,
                        [(piece.offset_start, piece.offset_end)],
                        now_us(),
                        dead=dead,
                    )
                    assert sum(fate.end - fate.first for fate in fates) == len(piece)
        info = engine.describe(queue)
        assert (info.ready, info.held, info.dead) == (0, 0, 0)
    assert not engine.damage
    engine.close(now_us())
    assert tally.clean, f"seed {seed} (PENSTOCK_TEST_SEED={seed} repeats it): {tally}"
    assert tally.counts()["confirmed"] > 1000, f"seed {seed}: too little happened: {tally}"


def test_a_second_process_is_told_who_has_the_folder(tmp_path: Path) -> None:
    process = start(tmp_path, 0)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(LogInUse, match=rf"process {process.pid}\b.*--data"):
        open_log(str(tmp_path), now_us())
    process.kill()
    process.stdout.read()
    process.stdout.close()
    process.wait()
    open_log(str(tmp_path), now_us(), settings=SETTINGS).close(now_us())
