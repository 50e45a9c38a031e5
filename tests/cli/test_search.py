"""`penstock search`, `copy`, `move` and `withdraw`, on a real broker."""

import csv
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock.cli import search, selecting
from penstock.cli.main import main
from tests.cli.conftest import Run, objects
from tests.cli.terminal import Terminal
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.http.disks import damage
from tests.http.morgue import path_of, phpmq, reject, send
from tests.server.harness import WAIT_SECONDS, BrokerProcess


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_URL", "PENSTOCK_TOKEN", "PENSTOCK_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_search_as_a_table(broker: BrokerProcess, api: Api, run: Run) -> None:
    send(api, "s.a", [b'{"n": %d}' % number for number in range(5)])
    reject(broker, api, "s.b", [b'{"n": 9}'])
    heading, first, second = run("search", "s.a", "--where", "value.n > 2")
    assert heading.split() == ["QUEUE", "OFFSET", "STATE", "AGE", "ATTEMPTS", "VALUE"]
    assert first.startswith("s.a         3  ready")
    assert first.endswith('{"n": 3}')
    assert second.split()[:2] == ["s.a", "4"]
    rows = run("search", "s.?", "--newest", "--state", "ready,dead")[1:]
    assert [row.split()[:2] for row in rows] == [["s.a", str(n)] for n in range(4, -1, -1)] + [["s.b", "0"]]
    assert "dead (rejected)" in rows[-1]
    assert len(run("search", "s.a", "--from", "1", "--to", "3")) == 3
    assert len(run("search", "s.a", "--from", "1h")) == 6
    assert len(run("search", "s.a", "--from=-1h", "--to", "1h")) == 1


def test_search_says_that_there_may_be_more(api: Api, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    send(api, "more", [b"%d" % number for number in range(5)])
    assert main(["search", "more", "--limit", "2", "--url", url]) == 0
    err = capsys.readouterr().err
    cursor = err.split("--after ")[1].split()[0]
    assert err.startswith("there may be more: --limit N shows more")
    assert main(["search", "more", "--after", cursor, "--json", "--url", url]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["value"] for line in out.splitlines()] == ["2", "3", "4"]
    assert err == ""


def test_search_as_json_has_everything(api: Api, run: Run) -> None:
    api.send("whole", b"x" * 10_000, b"\xff")
    text, raw = objects(run("search", "whole", "--json"))
    assert (text["value"], raw["value_base64"], text["state"]) == ("x" * 10_000, "/w==", "ready")


def test_a_long_table_comes_in_parts(api: Api, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "TABLE_ROWS", 3)
    send(api, "long", [b"%d" % number for number in range(7)])
    lines = run("search", "long")
    assert [line.split()[0] for line in lines] == ["QUEUE", *["long"] * 7]


def test_export(api: Api, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    send(api, "kept", [b"=1", b"two"])
    for suffix in search.FORMATS:
        file = tmp_path / f"kept{suffix}"
        assert main(["search", "kept", "--export", str(file), "--url", url]) == 0
        assert str(file) in capsys.readouterr().err
    with (tmp_path / "kept.csv").open(newline="") as lines:
        assert [row["value"] for row in csv.DictReader(lines)] == ["=1", "two"]
    assert pq.read_table(tmp_path / "kept.parquet")["value"].to_pylist() == [b"=1", b"two"]
    *found, end = map(json.loads, (tmp_path / "kept.ndjson").read_text().splitlines())
    assert [row["value"] for row in found] == ["=1", "two"]
    assert end["end"]["complete"]
    assert sorted(it.name for it in tmp_path.iterdir()) == ["kept.csv", "kept.ndjson", "kept.parquet"]
    nowhere = tmp_path / "no" / "kept.csv"
    assert main(["search", "kept", "--export", str(nowhere), "--url", url]) == 1
    assert "No such file" in capsys.readouterr().err


def test_what_is_not_whole_is_said_and_leaves_no_file(
    start_broker: StartBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = start_broker()
    damage(broker, "q")
    url = f"http://127.0.0.1:{broker.ports['http']}"
    assert main(["search", "q", "--json", "--url", url]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 4
    assert "q: offsets 3 to 3 could not be looked at (damaged)" in err
    assert "this is not all: 1 messages could not be looked at" in err
    file = tmp_path / "q.csv"
    assert main(["search", "q", "--export", str(file), "--url", url]) == 1
    assert "the answer broke off before its end" in capsys.readouterr().err
    assert not list(tmp_path.glob("q.csv*"))


def test_a_wrong_condition_is_said(api: Api, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    api.send("wrong", b"x")
    for command in (["search", "wrong"], ["withdraw", "wrong", "--yes"]):
        assert main([*command, "--where", "colour = 1", "--url", url]) == 1
        assert "there is no column 'colour'" in capsys.readouterr().err


# --- what is done to a selection ---------------------------------------------------------------------


def test_copy_and_move(broker: BrokerProcess, api: Api, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selecting, "PART", 4)
    send(api, "source", [b"%d" % number for number in range(10)])
    assert run("copy", "source", "--to", "dest", "--offsets", "0,8-20", "--dry-run") == [
        "3 messages would be copied from source to dest; nothing was changed"
    ]
    assert run("copy", "source", "--to", "dest", "--offsets", "0,8-20") == [
        "copied 3 messages from source to dest"
    ]
    with phpmq(broker) as mq:
        list(mq.consume("source", count=2, timeout=WAIT_SECONDS))
        assert run("move", "source", "--to", "dest", "--where", "value != '9'") == [
            "moved 7 messages from source to dest; 2 stay, because somebody holds them"
        ]
    (told,) = objects(run("move", "source", "--to", "dest", "--state", "ready", "--limit", "1", "--json"))
    assert (told["moved"], told["queue"], told["to"]) == (1, "source", "dest")
    assert api.get(path_of("dest"))["ready"] == 11


def test_withdraw(api: Api, run: Run) -> None:
    send(api, "out", [b"%d" % number for number in range(10)])
    assert run("withdraw", "out", "--offsets", "1-3", "--dry-run") == [
        "3 messages would be withdrawn from out; nothing was changed"
    ]
    assert run("withdraw", "out", "--offsets", "1-3", "--yes") == ["withdrawn 3 messages from out"]
    (told,) = objects(run("withdraw", "out", "--state", "ready", "--limit", "2", "--yes", "--json"))
    assert (told["withdrawn"], told["held"]) == (2, 0)
    assert api.get(path_of("out"))["ready"] == 5


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 1), ("\n", 1, 3)])
def test_withdraw_asks_on_a_terminal(api: Api, url: str, answer: str, code: int, left: int) -> None:
    queue = f"asked {answer.strip() or 'nothing'}"
    api.send(queue, b"1", b"2", b"3")
    with Terminal("withdraw", queue, "--where", "value < '3'", "--url", url) as terminal:
        terminal.wait_for(f"Withdraw 2 messages of {queue}? [y/N] ")
        terminal.type(answer)
        assert terminal.end() == code
        assert ("nothing was withdrawn" if code else "withdrawn 2 messages") in terminal.seen
    assert api.get(path_of(queue))["ready"] == left
