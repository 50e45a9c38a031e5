"""The demonstration, run as people run it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pyarrow.dataset as arrow_files
import pytest

from penstock.client import PhpmqClient, PhpmqMessage
from penstock.common.tables import Column
from penstock.demo import traffic
from penstock.demo.broker import Broker
from penstock.demo.orders import REGIONS, Sum, amount, body_of, closing_order, number_of, sums_of
from penstock.demo.screen import Screen
from penstock.errors import PenstockError
from penstock.tally import Tally

SECONDS_MAX = 300
"""Spark starts, on a machine that has much else to do."""


def demo(*flags: str, **around: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "demo", "--messages", "1000", *flags]
    return _run(command, around)


def _run(command: list[str], around: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **around}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False, env=environment
    )


# --- all of it ---


def test_the_demo_shows_that_nothing_is_lost_and_that_spark_agrees(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    # A broker and an address of the user's own are nothing to it.
    mine = {"PENSTOCK_URL": "http://127.0.0.1:1", "PENSTOCK_PHPMQ": "127.0.0.1:1"}
    ended = demo(TMPDIR=str(tmp_path / "temporary"), **mine)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    told = _row(ended.stdout, "attempted")
    assert (told["lost"], told["invented"], told["doubled"], told["repeated"]) == (0, 0, 0, 1500)
    assert told["confirmed"] > 3000
    assert "kill -9" in ended.stdout
    assert "bad-record  amount is no decimal(12,2): twelve" in ended.stdout
    assert "Exception" not in ended.stdout

    compared = re.findall(
        r"^ +(\w+) +([\d,]+) +([\d,.]+) +([\d,]+) +([\d,.]+)  (equal|DIFFERENT)$", ended.stdout, re.M
    )
    # By Spark from the sums, and by DuckDB from the table.
    assert [(row[0], row[5]) for row in compared] == 2 * [(name, "equal") for name in (*REGIONS, "all")]
    # The order of no amount, beside all that were delivered.
    assert f"expectation costs_something: 1 of {told['delivered'] + 1:,} rows against it" in ended.stdout
    assert compared[-1][1] == compared[-1][3] == f"{told['delivered']:,}"

    # What it has made is where it says, and nothing else is left.
    (folder,) = (tmp_path / "temporary").iterdir()
    assert f"rm -r {folder}" in ended.stdout
    kept = ["orders.delta", "orders.parquet", "orders.toml", "report-tables", "report.html"]
    assert sorted(path.name for path in folder.iterdir()) == kept
    assert "<h1>Penstock report</h1>" in (folder / "report.html").read_text()
    rows = arrow_files.dataset(sorted((folder / "orders.parquet").glob("*.parquet"))).to_table().to_pylist()
    assert sum(row["orders"] for row in rows) == told["delivered"]
    assert sum((row["amount"] for row in rows), Decimal(0)) == Decimal(compared[-1][4].replace(",", ""))


def _row(said: str, first: str) -> dict[str, int]:
    """The numbers of a table with one row, by their headings."""
    lines = said.splitlines()
    at = next(number for number, line in enumerate(lines) if line.split()[:1] == [first])
    numbers = [int(word.replace(",", "")) for word in lines[at + 1].split()]
    return dict(zip(lines[at].split(), numbers, strict=True))


# --- parts of it ---


def test_without_spark_it_leaves_nothing_behind(tmp_path: Path) -> None:
    ended = demo("--no-spark", TMPDIR=str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    assert _row(ended.stdout, "attempted")["lost"] == 0
    assert "Spark:" not in ended.stdout
    assert "is removed" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_named_keeps_the_log(tmp_path: Path) -> None:
    ended = demo("--no-spark", "--data", str(tmp_path / "new" / "folder"))
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    log = tmp_path / "new" / "folder" / "log"
    assert str(log) in ended.stdout
    verified = _run([sys.executable, "-m", "penstock", "verify", str(log)], {})
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_without_java_the_first_half_is_all_there_is(tmp_path: Path) -> None:
    ended = demo(TMPDIR=str(tmp_path), JAVA_HOME=str(tmp_path / "none"))
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    (line,) = (line for line in ended.stdout.splitlines() if "left out" in line)
    assert "Java 17" in line
    assert "apt-get install" in line
    assert list(tmp_path.iterdir()) == []


WITHOUT_PYSPARK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("duckdb", "pyspark"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from penstock.cli.main import main
sys.exit(main(["demo", "--messages", "1000"]))
"""


def test_without_pyspark_it_says_what_to_install(tmp_path: Path) -> None:
    ended = _run([sys.executable, "-c", WITHOUT_PYSPARK], {"TMPDIR": str(tmp_path)})
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout
    (line,) = (line for line in ended.stdout.splitlines() if "left out" in line)
    assert line.strip() == (
        "left out: duckdb is not installed; pip install 'penstock[spark,lake]' duckdb, and Java 17 or newer"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_demo_keeps_its_hands_off_a_folder_with_something_in_it(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    ended = demo("--data", str(tmp_path))
    assert ended.returncode == 2
    assert "not empty" in ended.stderr


def test_a_folder_that_cannot_be_is_misuse(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    ended = demo("--data", str(tmp_path / "mine"))
    assert ended.returncode == 2
    assert ended.stderr == f"penstock demo: --data {tmp_path / 'mine'}: File exists; name a new folder\n"


def test_a_broker_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no folder")
    broker = Broker(tmp_path / "data", tmp_path / "journal")
    try:
        with pytest.raises(PenstockError, match=r"^the broker did not start: .*data"):
            broker.start()
    finally:
        broker.end(signal.SIGKILL)


class Slow(Broker):
    """Once it was killed, it stands still for longer than a worker waits, runs for a moment, and so on."""

    starts = 0

    def start(self) -> float:
        self.starts += 1
        return super().start()

    def slow_down(self) -> None:
        process = self._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        threading.Thread(target=self._go_on, args=(process,), daemon=True).start()

    def _go_on(self, process: subprocess.Popen[str]) -> None:
        for _ in range(4):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.5)
            process.send_signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
            process.send_signal(signal.SIGSTOP)
        process.send_signal(signal.SIGCONT)


class WithSlow(traffic.Traffic):
    """The broker is slow from the moment on at which a worker wants what is left."""

    broker: Slow

    def _take(self, worker: PhpmqClient, total: int, prefetch: int) -> Iterator[PhpmqMessage]:
        if self.broker.starts == 2:
            self.broker.slow_down()
        return super()._take(worker, total, prefetch)


@pytest.mark.long
def test_what_a_slow_broker_has_not_given_yet_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(traffic, "PROGRESS_SECONDS", 0.5)
    broker = Slow(tmp_path / "log", tmp_path / "journal")
    try:
        slowed = WithSlow(broker, Screen(sys.stdout), 100)
        slowed.broker = broker
        right = slowed.run()
    finally:
        broker.end(signal.SIGKILL)
    said = capsys.readouterr().out
    assert right, said
    assert re.search(r"PHPMQ  [\d,]+ of [\d,]+ have come, waiting for the others", said)
    assert _row(said, "attempted")["lost"] == 0


def test_a_broker_that_gives_nothing_for_ever_is_no_loss_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "PROGRESS_SECONDS", 0.1)
    monkeypatch.setattr(traffic, "PATIENCE_SECONDS", 0.5)
    broker = Broker(tmp_path / "log", tmp_path / "journal")
    broker.start()
    try:
        with (
            PhpmqClient(broker.url("phpmq")) as worker,
            pytest.raises(PenstockError, match="'orders': 0 of 7 orders came, and then nothing"),
        ):
            list(traffic.Traffic(broker, Screen(sys.stdout), 1)._take(worker, 7, 1))
    finally:
        broker.end(signal.SIGKILL)


# --- orders, the screen, the tally ---


def test_sums_are_those_of_the_orders_that_are_sent() -> None:
    bodies = [body_of(number) for number in range(5000)]
    assert bodies[17] == b'{"id": 17, "region": "north", "amount": 346.33}'
    assert [number_of(body) for body in bodies] == list(range(5000))
    amounts = [Decimal(body.rpartition(b": ")[2][:-1].decode()) for body in bodies]
    sums = sums_of(range(5000))
    assert sums["north"] == Sum(1250, int(sum(amounts[1::4]) * 100))
    assert sum(one.cents for one in sums.values()) == sum(amounts) * 100
    assert amount(123456789) == "1,234,567.89"
    assert number_of(closing_order(7)) == 7


def test_times_on_the_screen_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 1.0, 1.5, 4.0])
    screen = Screen(sys.stdout, lambda: next(times))
    screen.section("First")
    screen.step("done")
    screen.note("so it is")
    screen.table([Column("a"), Column("b", right=True)], [["x", "10"], ["yy", "1"]])
    assert screen.seconds() == 4.0
    assert capsys.readouterr().out.splitlines() == [
        "",
        "1. First",
        "   0.50 s  done",
        "           so it is",
        "",
        "           a    b",
        "           x   10",
        "           yy   1",
        "",
    ]


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
