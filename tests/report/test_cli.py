"""`penstock report`: once as a user runs it, on traffic of real clients, and everything that goes wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock.cli.main import main
from penstock.client import PhpmqClient, RqClient, SspqClient
from penstock.report.tables import TABLES, schema_of
from tests.http.api import Api
from tests.report.test_page import Page
from tests.report.traffic import HOSTILE
from tests.server.harness import WAIT_SECONDS, BrokerProcess, until

RUN_SECONDS = 300.0
TOKENS = {role: f"{role}-0123456789abcdef" for role in ("read", "operate")}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with tokens, on which the clients of every protocol have worked."""
    folder = tmp_path_factory.mktemp("live")
    config = folder / "penstock.toml"
    config.write_text(
        "".join(
            f'[[http.tokens]]\nname = "{role}er"\nrole = "{role}"\ntoken = "{token}"\n'
            for role, token in TOKENS.items()
        )
    )
    broker = BrokerProcess(folder, "--http", "127.0.0.1:0", "--config", str(config)).start()
    work(broker)
    yield broker
    if broker.running:
        broker.kill()


def work(broker: BrokerProcess) -> None:
    """30 messages of a hostile name over phpmq, 1 over sspq that is lost, 10 over rq, 4 over http."""
    with PhpmqClient(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        mq.send_many(HOSTILE, [b"%d" % number for number in range(30)])
        for at, message in enumerate(mq.consume(HOSTILE, count=30, timeout=WAIT_SECONDS)):
            if at < 20:
                message.ack()
            elif at < 25:
                message.requeue(600)
            else:
                message.reject()
        for message in mq.consume(HOSTILE, count=5, timeout=WAIT_SECONDS):
            message.ack()
    with SspqClient(f"sspq://127.0.0.1:{broker.ports['sspq']}") as mq:
        mq.send(b"fragile", retries=0)
        mq.receive(timeout=WAIT_SECONDS)
    with RqClient(f"rq://127.0.0.1:{broker.ports['rq']}") as rq:
        rq.send_many("rq", [b"x"] * 10)
    with Api(broker.ports["http"], TOKENS["operate"]) as api:
        api.send("rq", b"1", b"2", b"3", b"4")
        until(lambda: api.get("/v1/queues/default")["dead"] == 1, "the lost message to die")
        until(lambda: sum(row["held"] for row in api.get("/v1/queues")["queues"]) == 0, "all to be settled")


def url_of(broker: BrokerProcess) -> str:
    return f"http://127.0.0.1:{broker.ports['http']}"


@pytest.mark.long
def test_a_report_as_a_user_makes_it(live: BrokerProcess, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "report", "--since", "1h", "--out", "out.html", "--json"],
        cwd=tmp_path,
        env=environment
        | {
            "PENSTOCK_URL": url_of(live),
            "PENSTOCK_TOKEN": TOKENS["read"],
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    counts = {name: said[name] for name in ("accepted", "acked", "requeued", "dead", "outstanding_end")}
    assert counts == {"accepted": 45, "acked": 25, "requeued": 5, "dead": 6, "outstanding_end": 20}
    assert (said["queues"], said["outstanding_start"]) == (3, 0)
    # What it does is told line by line, and nothing of what Java says.
    lines = done.stderr.splitlines()
    assert lines[0] == f"penstock report: 3 queues with {said['events']} events at {url_of(live)}"
    assert lines[1] == "penstock report: starting Spark"
    assert lines[-1] == "penstock report: writing out.html and out-tables"
    assert all(line.startswith("penstock report: ") for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-tables", "out.html"]
    page = Page((tmp_path / "out.html").read_text())
    assert HOSTILE in page.table_words
    assert "5 messages died: 5 rejected." in page.text
    assert "phpmq:127.0.0.1:" in page.text
    for name in TABLES:
        table = pq.read_table(tmp_path / "out-tables" / name)
        assert table.schema.equals(schema_of(name))
    consumers = pq.read_table(tmp_path / "out-tables" / "consumers").to_pylist()
    assert [
        (row["queue"], row["protocol"], row["host"], row["acked"], row["requeued"], row["died"], row["lost"])
        for row in consumers
        if row["consumer"] is None
    ] == [
        (HOSTILE, "phpmq", "127.0.0.1", 25, 5, 5, 0),
        ("default", "sspq", "127.0.0.1", 0, 0, 1, 0),
    ]


WITHOUT_SPARK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pyspark":
            raise ImportError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Blocked())
from penstock.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("program", "java", "words"),
    [
        (("-m", "penstock"), "/nowhere", "Spark needs Java 17 or newer, and there is none"),
        (("-c", WITHOUT_SPARK), "", "pyspark is not installed; pip install 'penstock[spark]'"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    live: BrokerProcess, tmp_path: Path, program: tuple[str, ...], java: str, words: str
) -> None:
    done = subprocess.run(
        [sys.executable, *program, "report", "--url", url_of(live), "--token", TOKENS["read"]],
        cwd=tmp_path,
        env={**os.environ, "JAVA_HOME": java, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_SECONDS,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith(f"penstock: {words}")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# --- without Spark ---------------------------------------------------------------------------------


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_empty_log(
    tmp_path: Path, in_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "broker"
    folder.mkdir()
    broker = BrokerProcess(folder, "--http", "127.0.0.1:0").start()
    monkeypatch.setenv("PENSTOCK_URL", url_of(broker))
    try:
        assert main(["report"]) == 0
    finally:
        broker.kill()
    out, err = capsys.readouterr()
    assert out == "report.html: 0 queues, and nothing happened in this time\n"
    assert "Spark" not in err
    assert "There are no queues" in Page((in_folder / "report.html").read_text()).text
    assert {path.name for path in (in_folder / "report-tables").iterdir()} == set(TABLES)


def test_nobody_there(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--url", "http://127.0.0.1:1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("penstock: http://127.0.0.1:1: no http broker could be reached")
    assert err.count("\n") == 1
    assert list(in_folder.iterdir()) == []


def test_no_such_queue(live: BrokerProcess, in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--url", url_of(live), "--token", TOKENS["read"]]
    assert main(["report", "--queue", "rq", "x*", *options]) == 1
    assert capsys.readouterr().err == (
        "penstock: no queue has a name that fits 'x*'; `penstock queues` lists them\n"
    )


def test_without_the_right_token(
    live: BrokerProcess, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--url", url_of(live), "--token", "wrong"]) == 1
    err = capsys.readouterr().err
    assert err.endswith("(--token-file, or PENSTOCK_TOKEN)\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--since", "yesterday"], "'yesterday' is no time; use 2030-01-31T12:00:00Z"),
        (["--since", "1h", "--until", "2h"], "--since 1h is not before --until 2h"),
        (["--since", "2999-01-01"], "--since 2999-01-01 is not before --until (now)"),
        (["--out", "."], "--out . is a folder; name a file in it"),
        (["--out", "nowhere/report.html"], "--out nowhere/report.html: there is no folder nowhere"),
        (["--parquet", "file"], "--parquet file is a file; name a folder"),
    ],
)
def test_misuse(options: list[str], words: str, in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (in_folder / "file").write_text("")
    assert main(["report", "--url", "http://127.0.0.1:1", *options]) == 2
    err = capsys.readouterr().err
    assert err.startswith("penstock report: ")
    assert words in err
    assert err.count("\n") == 1


def test_a_table_that_cannot_be_written(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Root may write anywhere, so that the way is closed by a file where a folder should be.
    (in_folder / "report-tables").mkdir()
    (in_folder / "report-tables" / "coverage").write_text("in the way")
    folder = in_folder / "broker"
    folder.mkdir()
    broker = BrokerProcess(folder, "--http", "127.0.0.1:0").start()
    try:
        assert main(["report", "--url", url_of(broker)]) == 1
    finally:
        broker.kill()
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("penstock: report-tables/coverage/coverage.parquet: cannot be written: ")
    assert not (in_folder / "report.html").exists()
