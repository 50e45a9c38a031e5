"""`penstock pipeline`: what it says, its exit codes, and that nothing is lost or doubled by killing it."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from deltalake import DeltaTable

from penstock.cli.main import main
from penstock.cli.pipeline import _stopping
from tests.pipeline.rig import Files, orders
from tests.server.harness import ROOT, BrokerProcess, until
from tests.spark.rig import PATIENCE_SECONDS

GOOD = """\
[source]
url = "URL"
subscribe = "orders"
retrySeconds = 0.2
[[step]]
sql = "select value from input"
[sink]
format = "penstock"
queue = "out"
[run]
checkpoint = "FOLDER/checkpoint"
"""


START_SECONDS = 4 * PATIENCE_SECONDS
"""Java, Spark and a first batch, on a machine that has much else to do."""


def write(folder: Path, name: str, url: str = "http://127.0.0.1:9180", text: str = GOOD) -> str:
    path = folder / f"{name}.toml"
    path.write_text(f'name = "{name}"\n' + text.replace("URL", url).replace("FOLDER", f"{folder}/{name}"))
    return str(path)


# --- check -------------------------------------------------------------------------------------------------


def test_check_says_what_a_pipeline_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "one")
    assert main(["pipeline", "check", path]) == 0
    assert capsys.readouterr() == (
        f"{path}: fine: one reads orders, 1 step, writes penstock to out\n"
        "  not judged without Spark (--spark): [[step]] 1 sql\n",
        "",
    )
    assert main(["pipeline", "check", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "file": path,
        "name": "one",
        "mistakes": [],
        "unjudged": ["[[step]] 1 sql"],
    }


def test_check_tells_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "one", text=GOOD.replace("sql =", "sq =").replace("queue", "quue"))
    assert main(["pipeline", "check", path]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"penstock pipeline: {path}, line 6: [[step]] 1: say what to do, with one of sql and python",
        f"penstock pipeline: {path}, line 7: [[step]] 1 sq: there is no such setting; did you mean sql?",
        f"penstock pipeline: {path}, line 10: [sink] quue: there is no such setting; did you mean queue?",
    ]
    assert main(["pipeline", "check", path, "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert (told["file"], len(told["mistakes"])) == (path, 3)


def test_check_sees_what_several_must_not_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path, "one")
    other = tmp_path / "other.toml"
    other.write_text(Path(one).read_text())
    assert main(["pipeline", "check", one, str(other)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"penstock pipeline: {other}: name: {one} is called 'one' too; take another",
        f"penstock pipeline: {other}: [run] checkpoint: {one} has the same; take another",
    ]
    # A place is one however it is written, and a reader whoever has it.
    text = GOOD.replace('"penstock"\nqueue = "out"', f'"json"\npath = "{tmp_path}/out"')
    one = write(tmp_path, "one", text=text)
    text = text.replace("/out", "/./out/").replace("[source]", '[source]\nreader = "one"')
    two = write(tmp_path, "two", text=text.replace("FOLDER", f"file://{tmp_path}/one/"))
    assert main(["pipeline", "check", one, two]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(f"{two}: ")[2].partition(": ")[0] for line in told] == [
        "name",
        "[run] checkpoint",
        "[sink] path",
    ]


# --- run ---------------------------------------------------------------------------------------------------


def test_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    path = write(tmp_path, "one", f"http://127.0.0.1:{port}")
    assert main(["pipeline", "run", path, "--once"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"penstock: http://127.0.0.1:{port}: no broker answers there (")


def test_the_broker_of_the_command_line_goes_before_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "one", "http://127.0.0.1:1")
    monkeypatch.setenv("PENSTOCK_URL", "http://127.0.0.1:2")
    assert main(["pipeline", "run", path, "--url", "http://127.0.0.1:3"]) == 1
    assert "http://127.0.0.1:3: no broker" in capsys.readouterr().err
    assert main(["pipeline", "run", path]) == 1
    assert "http://127.0.0.1:1: no broker" in capsys.readouterr().err
    silent = write(tmp_path, "two", text=GOOD.replace('url = "URL"\n', ""))
    assert main(["pipeline", "run", silent]) == 1
    assert "http://127.0.0.1:2: no broker" in capsys.readouterr().err


def test_files_with_tokens_that_others_can_read_are_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    file = write(tmp_path, "one", "http://127.0.0.1:1", GOOD.replace("[sink]", '[sink]\ntoken = "fedcba"'))
    for mode, count in ((0o644, 2), (0o600, 0)):
        token.chmod(mode)
        Path(file).chmod(mode)
        assert main(["pipeline", "run", file, "--token-file", str(token)]) == 1
        *warnings, failure = capsys.readouterr().err.splitlines()
        assert "no broker answers" in failure
        assert len(warnings) == count
        for line, path in zip(warnings, (token, file), strict=False):
            assert line.startswith(f"penstock: warning: {path} holds a secret")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["check", "--once"], "--once is for run"),
        (["run", "--spark"], "--spark is for check"),
        (["test", "--sample", "5"], "--sample is for infer"),
        (["infer", "--sample", "0"], "--sample 0: there is nothing to see in that many messages"),
        (["test"], "has no [[test]]; add one with given and expect"),
        (["export"], "export takes one file, and --out with a folder for the project"),
        (["run", "nowhere.toml"], "nowhere.toml: there is no such file or folder"),
        (["list"], "list takes no NAME"),
        (["pause", "--once"], "--once is for run"),
        (["run", "--master", "sc://host"], "--master: a pipeline does not run over Spark Connect"),
    ],
)
def test_misuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    assert main(["pipeline", *arguments, write(tmp_path, "one")]) == 2
    assert problem in capsys.readouterr().err


def test_a_mistake_is_told_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, "one", text=GOOD.replace("format", "formt"))
    assert main(["pipeline", "run", path]) == 2
    assert "[sink] formt: there is no such setting; did you mean format?" in capsys.readouterr().err


# --- killed, stopped, finished -----------------------------------------------------------------------------


class Command:
    """`penstock pipeline run`, as a process of its own."""

    def __init__(self, path: str, *flags: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "pipeline", "run", path, "--master", "local[2]", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            process_group=0,
        )
        self._heard = b""

    def object(self) -> dict[str, Any]:
        """The next object that it says."""
        assert self._process.stdout is not None
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self._process.stdout], [], [], START_SECONDS)
            piece = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not piece:
                self._process.kill()
                raise AssertionError(self._process.communicate()[1].decode() or "it says nothing")
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    def wait_for_batch(self, number: int) -> None:
        while True:
            told = self.object()
            if told["event"] == "batch" and told["number"] >= number:
                return

    def kill(self) -> None:
        """kill -9, and see that Java goes, too."""
        java = self._children()
        assert java
        self._process.kill()
        self._process.wait(PATIENCE_SECONDS)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in java), "Java to end", PATIENCE_SECONDS)

    def kill_java(self) -> None:
        for pid in self._children():
            os.kill(int(pid), signal.SIGKILL)

    def _children(self) -> list[str]:
        return Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()

    def signal(self, number: int) -> None:
        """To the whole group, as a terminal does: Java and its workers must not hear of it."""
        os.killpg(self._process.pid, number)

    def end(self) -> tuple[int, str, str]:
        """Exit code and what was said, once it has ended."""
        out, err = self._process.communicate(timeout=START_SECONDS)
        return self._process.returncode, out.decode(), err.decode()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


@contextmanager
def running(path: str, *flags: str) -> Iterator[Command]:
    command = Command(path, *flags)
    try:
        yield command
    finally:
        command.close()


@pytest.fixture
def rig(broker: BrokerProcess, tmp_path: Path) -> Files:
    """Not with the Spark of these tests: the command has its own."""
    return Files(broker, tmp_path)


RELAY = """\
[source]
url = "URL"
subscribe = "relay"
startingOffsets = "earliest"
maxOffsetsPerTrigger = 20
[parse]
format = "json"
schema = "id bigint not null, region string, amount double"
[[step]]
sql = "select cast(id as string) as value from input"
[sink]
format = "penstock"
queue = "relayed"
[run]
trigger = "50 milliseconds"
checkpoint = "FOLDER/checkpoint"
"""


@pytest.mark.long
def test_killed_stopped_and_finished_everything_is_there_once(rig: Files) -> None:
    path = str(rig.write("relay", RELAY))
    good = orders(200)
    bad = [b"bad %d" % number for number in range(12)]
    rig.send("relay", good[:120] + bad[:6])
    with running(path, "--json") as command:
        command.wait_for_batch(1)
        command.kill()
    rig.send("relay", good[120:] + bad[6:])
    with running(path, "--json") as command:
        command.wait_for_batch(3)
        command.signal(signal.SIGTERM)
        code, _, err = command.end()
    assert (code, err) == (0, "")
    with running(path, "--once") as command:
        code, out, err = command.end()
    assert (code, out) == (0, ""), err
    assert err.splitlines()[0] == "relay: reads relay as json, 1 step, writes penstock to relayed"
    assert err.splitlines()[-1] == "relay: done"
    assert Counter(rig.messages("relayed")) == Counter(b"%d" % number for number in range(200))
    assert Counter(it["value"] for it in rig.bad_records("relay")) == Counter(it.decode() for it in bad)


GATE = """\
import time
from pathlib import Path

from pyspark.sql import functions as sql

BEGUN, GATE = Path("FOLDER/begun"), Path("FOLDER/gate")


def passed(value):
    BEGUN.touch()
    deadline = time.monotonic() + SECONDS
    while not GATE.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def gated(frame):
    return frame.select("id", sql.udf(lambda value: passed(value), "string")("region").alias("value"))
"""


@pytest.mark.long
def test_a_service_that_is_stopped_finishes_its_batches_and_the_next_goes_on(rig: Files) -> None:
    text = GATE.replace("FOLDER", str(rig.folder)).replace("SECONDS", str(START_SECONDS))
    (rig.folder / "gate_of_tests.py").write_text(text)
    sql = 'sql = "select cast(id as string) as value from input"'
    sinks = """
[[step]]
name = "letters"
sql = "select cast(id as string) as value from input"
[[sink]]
name = "table"
from = "gated"
format = "delta"
path = "FOLDER/table"
[[sink]]
name = "out"
from = "letters"
format = "penstock"
queue = "gated.out"
"""
    gated = RELAY.replace('"relay"', '"gated"').replace(sql, 'name = "gated"\npython = "gate_of_tests:gated"')
    gated = gated.replace('[sink]\nformat = "penstock"\nqueue = "relayed"\n', sinks)
    rig.write("gated", gated.replace("FOLDER/checkpoint", "FOLDER/gated-checkpoint"))
    rig.write("free", RELAY.replace('"relay"', '"free"').replace("relayed", "free.out"))
    rig.send("gated", orders(60))
    rig.send("free", orders(5))
    with running(str(rig.folder), "--json") as command:
        command.wait_for_batch(0)  # the other one's
        until((rig.folder / "begun").exists, "a batch to be at work", START_SECONDS)
        command.signal(signal.SIGTERM)
        while True:  # The service has heard it, and waits.
            told = command.object()
            if (told["pipeline"], told.get("state")) == ("free", "stopped"):
                break
        (rig.folder / "gate").touch()
        code, out, err = command.end()
    assert (code, err) == (0, "")
    states = [it["state"] for it in map(json.loads, out.splitlines()) if it["event"] == "state"]
    assert states == ["stopped"]

    def written() -> list[int]:
        return sorted(DeltaTable(f"{rig.folder}/table").to_pyarrow_table()["id"].to_pylist())

    # The batch is whole, in every sink and in the checkpoint.
    assert written()[:20] == list(range(20))
    assert len(written()) % 20 == 0
    assert {b"%d" % number for number in range(20)} <= set(rig.messages("gated.out"))
    assert (rig.folder / "gated-checkpoint" / "commits" / "0").exists()
    rig.send("free", orders(5, first=5))
    with running(str(rig.folder), "--once") as command:
        code, _, err = command.end()
    assert code == 0, err
    assert written() == list(range(60))
    assert Counter(rig.messages("gated.out")) == Counter(b"%d" % number for number in range(60))
    assert Counter(rig.messages("free.out")) == Counter(b"%d" % number for number in range(10))


def test_a_stop_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.pipeline.STOP_SECONDS", 0.1)

    class Slow:
        def __init__(self) -> None:
            self.stop, self.stop_now = Event(), Event()

    first, second = Slow(), Slow()
    with _stopping() as stopping:
        stopping.attach(first)  # type: ignore[arg-type]  # all that it needs of a run
        signal.raise_signal(signal.SIGTERM)
        assert first.stop.wait(PATIENCE_SECONDS)
        assert first.stop_now.wait(PATIENCE_SECONDS)
    monkeypatch.undo()
    with _stopping() as stopping:
        signal.raise_signal(signal.SIGTERM)  # before there is anything to stop
        stopping.attach(second)  # type: ignore[arg-type]
        assert second.stop.wait(PATIENCE_SECONDS)
        assert not second.stop_now.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert second.stop_now.wait(PATIENCE_SECONDS)


@pytest.mark.long
def test_a_failure_of_spark_is_one_line(rig: Files) -> None:
    rig.send("one-line", orders(1))
    text = RELAY.replace('"relay"', '"one-line"').replace("cast(id as string)", "id")
    with running(str(rig.write("one-line", text)), "--once") as command:
        code, out, err = command.end()
    assert (code, out) == (1, "")
    lines = [line for line in err.splitlines() if not line.startswith("one-line: ")]
    assert lines == ["penstock: one-line: column 'value' is bigint; cast it to binary or string"]


@pytest.mark.long
def test_java_that_is_killed_is_one_line(rig: Files) -> None:
    rig.send("orphan", orders(1))
    with running(str(rig.write("orphan", RELAY.replace('"relay"', '"orphan"'))), "--json") as command:
        command.wait_for_batch(0)
        command.kill_java()
        code, _, err = command.end()
    assert code == 1
    sentence = (
        "penstock: orphan: Spark's Java process has ended; somebody has killed it, or it needs more memory "
        "(spark.driver.memory)"
    )
    assert sentence in err.splitlines(), err
    assert "Py4J" not in err, err


@pytest.mark.long
def test_check_with_spark_judges_every_file(tmp_path: Path) -> None:
    fine = write(tmp_path, "fine")
    wrong = write(tmp_path, "wrong", text=GOOD.replace("select value", "select valu"))
    other = write(tmp_path, "other", text=GOOD.replace("select value", "select offset"))
    typo = write(tmp_path, "typo", text=GOOD.replace("queue =", "quue ="))
    command = [sys.executable, "-m", "penstock", "pipeline", "check", "--spark", wrong, other, typo, fine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert done.returncode == 2, done
    assert done.stdout.splitlines() == [f"{fine}: fine: fine reads orders, 1 step, writes penstock to out"]
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    for path, words in (
        (typo, "line 10: [sink] quue: "),
        (wrong, "line 6: [[step]] 1: "),
        (other, "line 8: [sink]: "),
    ):
        assert any(line.startswith(f"penstock pipeline: {path}, {words}") for line in lines), lines


@pytest.mark.long
def test_tests_of_files_are_run_and_what_differs_is_shown(tmp_path: Path) -> None:
    example = (ROOT / "examples" / "pipelines" / "shop.toml").read_text()
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(example.replace('{id = 1, manager = "Ann"', '{id = 1, manager = "Eve"'))
    fine = tmp_path / "fine.toml"
    fine.write_text(example)
    command = [sys.executable, "-m", "penstock", "pipeline", "test", str(fine), str(wrong)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert done.returncode == 1, done
    more = '"more": "{\\"colour\\":\\"red\\"}"}'
    assert done.stdout.splitlines() == [
        f"{fine}: an order has the manager of its region: fine",
        f"{wrong}: an order has the manager of its region: failed",
        f'  table: - {{"id": 1, "manager": "Eve", {more}',
        f'  table: + {{"id": 1, "manager": "Ann", {more}',
    ]


def test_a_project_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "project"
    assert main(["pipeline", "export", write(tmp_path, "one"), "--to", "sdp", "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{out}/spark-pipeline.yml",
        f"{out}/transformations/one.py",
    ]
    compile((out / "transformations" / "one.py").read_text(), "one.py", "exec")


def test_a_folder_without_a_pipeline_is_not_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "check", str(tmp_path)]) == 2
    assert f"{tmp_path}: there is no file of a pipeline, *.toml, in it" in capsys.readouterr().err
