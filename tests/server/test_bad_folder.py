"""`penstock serve` where its data folder is of no use: one line that names it and says what to do."""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.harness import ROOT, WAIT_SECONDS, BrokerProcess, expect_dispatch, phpmq, until

OF_ITS_OWN = "give the broker a folder of its own with --data"
WRITABLE = "name a folder with --data that this user may write to"

PR_CAPBSET_DROP = 24
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2


def _as_anybody() -> None:
    """Whoever may write everywhere runs the broker as somebody who may not."""
    if os.geteuid() == 0:
        for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
            if ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
                raise PermissionError("this process may not give up a capability")


def served(folder: Path) -> tuple[int, str]:
    """The exit code, and the one line."""
    doors = [word for name in ("sspq", "phpmq", "rq", "http") for word in (f"--{name}", "off")]
    doors[3] = "127.0.0.1:0"
    result = subprocess.run(
        [sys.executable, "-m", "penstock", "serve", "--data", str(folder), *doors],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        cwd=ROOT,
        check=False,
        preexec_fn=_as_anybody,
    )
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    return result.returncode, line.removeprefix("penstock serve: ")


def a_file(folder: Path) -> tuple[Path, str]:
    (folder / "file").write_text("precious")
    return folder / "file", f"{folder}/file: is no folder; {OF_ITS_OWN}"


def below_a_file(folder: Path) -> tuple[Path, str]:
    (folder / "file").write_text("precious")
    return folder / "file" / "data", f"{folder}/file/data: Not a directory; {OF_ITS_OWN}"


def not_writable(folder: Path) -> tuple[Path, str]:
    (folder / "data").mkdir(mode=0o555)
    return folder / "data", f"{folder}/data/lock: Permission denied; {WRITABLE}"


def below_what_is_not_writable(folder: Path) -> tuple[Path, str]:
    (folder / "above").mkdir(mode=0o555)
    return folder / "above" / "data", f"{folder}/above/data: Permission denied; {WRITABLE}"


def the_lock_of_somebody_else(folder: Path) -> tuple[Path, str]:
    (folder / "data").mkdir()
    (folder / "data" / "lock").touch(mode=0o000)
    return folder / "data", f"{folder}/data/lock: Permission denied; {WRITABLE}"


def no_log(folder: Path) -> tuple[Path, str]:
    (folder / "data" / "lock").mkdir(parents=True)
    return folder / "data", f"{folder}/data/lock: Is a directory; {OF_ITS_OWN}"


@pytest.mark.parametrize(
    "case",
    [a_file, below_a_file, not_writable, below_what_is_not_writable, the_lock_of_somebody_else, no_log],
)
def test_what_is_wrong_with_a_folder_is_said_in_one_line(
    tmp_path: Path, case: Callable[[Path], tuple[Path, str]]
) -> None:
    data, line = case(tmp_path)
    assert served(data) == (1, line)
    if (tmp_path / "file").exists():
        assert (tmp_path / "file").read_text() == "precious"


def test_a_lock_that_is_held_by_an_unknown_program_is_exit_3(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, line = served(tmp_path)
    assert code == 3
    assert line == (
        f"data folder '{tmp_path}' is in use by another broker (process unknown): "
        "stop it, or give this one a folder of its own with --data"
    )


def test_what_else_is_in_the_folder_stays_there(tmp_path: Path) -> None:
    (tmp_path / "readme.txt").write_text("precious")
    assert BrokerProcess(tmp_path, "--data", str(tmp_path)).start().stop() == 0
    assert (tmp_path / "readme.txt").read_text() == "precious"


# --- under a broker that runs ---


def test_a_folder_that_is_removed_ends_the_broker(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path).start()
    until(lambda: bool(list((tmp_path / "data").glob("snapshot-*[0-9]"))), "a start to be over")
    broker.signal(signal.SIGSTOP)  # Otherwise it may be making a file there.
    shutil.rmtree(tmp_path / "data")
    broker.signal(signal.SIGCONT)
    assert broker.wait() == 1
    assert f"critical stopping: data folder '{tmp_path}/data', or " in broker.log()
    assert "the lock file in it, was removed under the running broker" in broker.log()
    assert "everything that was confirmed" not in broker.log(), "it is not, and nobody should think so"
    assert "Traceback" not in broker.log()
    assert not (tmp_path / "data").exists()


def test_a_folder_that_is_replaced_belongs_to_the_broker_that_starts_in_it(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    data = tmp_path / "data"
    first = BrokerProcess(tmp_path / "one", "--data", str(data), "--log-segment-bytes", "65536").start()
    with first.wire("phpmq") as wire:
        wire.say(phpmq(1, (1, b"q"), (2, b"of the first")), phpmq(2, (1, b"q"), (4, b"1")))
        expect_dispatch(wire, b"q", b"of the first")
        first.signal(signal.SIGSTOP)  # It notices when the other one is there.
        data.rename(tmp_path / "away")
        second = BrokerProcess(tmp_path / "two", "--data", str(data)).start()
        first.signal(signal.SIGCONT)
        names = sorted(path.name for path in data.glob("*.seg"))
        # What the first one still writes goes where its log is.
        for number in range(100):
            with contextlib.suppress(OSError):
                wire.say(phpmq(1, (1, b"q"), (2, b"%03d" % number + bytes(10_000))))
        assert first.wait() == 1
    assert "or the lock file in it, was replaced by another one" in first.log()
    assert sorted(path.name for path in data.glob("*.seg")) == names
    with second.wire("phpmq") as wire:
        wire.say(phpmq(1, (1, b"q"), (2, b"of the second")), phpmq(2, (1, b"q"), (4, b"2")))
        expect_dispatch(wire, b"q", b"of the second")
        assert wire.is_silent()
    assert second.stop() == 0
    again = BrokerProcess(tmp_path / "one", "--data", str(tmp_path / "away")).start()
    with again.wire("phpmq") as wire:
        wire.say(phpmq(2, (1, b"q"), (4, b"1")))
        expect_dispatch(wire, b"q", b"of the first")
    assert again.stop() == 0


def test_without_the_lock_file_nobody_else_gets_in(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path).start()
    broker.signal(signal.SIGSTOP)  # It has not noticed yet.
    try:
        (tmp_path / "data" / "lock").unlink()
        code, line = served(tmp_path / "data")
    finally:
        broker.signal(signal.SIGCONT)
    assert code == 3
    assert "is in use by another broker" in line
    assert broker.wait() == 1
    assert "or the lock file in it, was replaced by another one" in broker.log()
