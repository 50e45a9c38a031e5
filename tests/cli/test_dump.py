"""`penstock dump`: what is in a folder, to the letter; and nothing that a terminal would obey."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import dump
from penstock.cli.main import main
from penstock.log.errors import LogError
from penstock.log.log import open_log
from penstock.log.reader import LogReader
from penstock.log.results import StageInfo
from penstock.log.segment import parse_segment_name
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.headers import encode_headers
from penstock.model.policy import Policies
from penstock.model.words import Outcome
from tests.log.folders import NOW_US, SECOND_US, Worker

NASTY = b"\x1b]0;owned\x07\x1b[2J\r\x00\x7f\xc2\x9b"
"""Would set a window's title, clear the screen and begin a control sequence in one character."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two queues; messages in every state that outlives a broker. The log's random number is not random."""
    monkeypatch.setattr(os, "urandom", lambda count: b"\xef\xcd\xab"[:count])
    path = tmp_path / "data"
    engine = open_log(str(path), NOW_US)
    engine.wait()  # What comes now is one group, and was synced up to here when that went out.
    orders = Batch.of(
        [b"first", NASTY, "caf\u00e9 \u2713".encode(), b"back\\slash", b"\xff\xfe", b"long " * 20],
        ttl_seconds=[60, 0, 0, 0, 0, 3600],
        retries=[2, -1, 255, -1, 3, -1],
        protocol="sspq",
    )
    engine.append("orders", orders, NOW_US + 1)
    mails = Batch.of(
        [b"", b"{}"],
        protocol="http",
        delay_us=[0, 90 * SECOND_US],
        headers=[b"", encode_headers({"kind": "\x1bé"})],
    )
    engine.append("mails", mails, NOW_US + 2)
    engine.flush(NOW_US + 3)
    engine.take("orders", "ann", 3, NOW_US + 10)
    engine.settle("orders", "ann", Outcome.ACK, [(0, 1)], NOW_US + 20)
    engine.settle("orders", "ann", Outcome.REJECT, [(1, 2)], NOW_US + 21)
    engine.settle("orders", "ann", Outcome.REQUEUE, [(2, 3)], NOW_US + 22, ttl_seconds=5)
    engine.flush(NOW_US + 30)
    engine.close(NOW_US + 40)
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["dump", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def rows(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in shown(capsys, "--json", *arguments).splitlines()]


MESSAGES = """\
queue 'orders'
  offset  id                                time                         state                     attempts  protocol  expires                      due                          retries  headers                 bytes  value
       0  abcdef00000100000100000000000000  2027-01-15T08:00:00.000001Z  gone                             -  sspq      2027-01-15T08:01:00.000001Z  -                                  2  -                           5  first
       1  abcdef00000100000100000000000001  2027-01-15T08:00:00.000001Z  dead (rejected)                  1  sspq      -                            -                                  -  -                          19  \\x1b]0;owned\\x07\\x1b[2J\\r\\x00\\x7f\\x9b
       2  abcdef00000100000100000000000002  2027-01-15T08:00:00.000001Z  ready                            1  sspq      2027-01-15T08:00:05.000022Z  -                                255  -                           9  caf\u00e9 \u2713
       3  abcdef00000100000100000000000003  2027-01-15T08:00:00.000001Z  ready                            0  sspq      -                            -                                  -  -                          10  back\\\\slash
       4  abcdef00000100000100000000000004  2027-01-15T08:00:00.000001Z  ready                            0  sspq      -                            -                                  3  -                           2  \\xff\\xfe
       5  abcdef00000100000100000000000005  2027-01-15T08:00:00.000001Z  ready                            0  sspq      2027-01-15T09:00:00.000001Z  -                                  -  -                         100  long long long long long long long long long lon...

queue 'mails'
  offset  id                                time                         state                     attempts  protocol  expires                      due                          retries  headers                 bytes  value
       0  abcdef00000200000100000000000000  2027-01-15T08:00:00.000002Z  ready                            0  http      -                            -                                  -  -                           0
       1  abcdef00000200000100000000000001  2027-01-15T08:00:00.000002Z  delayed                          0  http      -                            2027-01-15T08:01:30.000002Z        -  {"kind":"\\\\u001b\u00e9"}         2  {}
"""  # noqa: E501 - the lines are as long as they are on a terminal

EVENTS = """\
queue 'orders'
event_offset  event        offset  id                                reason               attempt  dispatched                   time                         consumer
           5  accepted          5  abcdef00000100000100000000000005  -                          0  -                            2027-01-15T08:00:00.000001Z  -
           6  acked             0  abcdef00000100000100000000000000  -                          1  2027-01-15T08:00:00.000010Z  2027-01-15T08:00:00.000030Z  ann
           7  dead              1  abcdef00000100000100000000000001  rejected                   1  2027-01-15T08:00:00.000010Z  2027-01-15T08:00:00.000030Z  ann
           8  requeued          2  abcdef00000100000100000000000002  -                          1  2027-01-15T08:00:00.000010Z  2027-01-15T08:00:00.000030Z  ann
"""  # noqa: E501

BLOCKS = """\
file                         position  kind         queue               count  offsets            events                 bytes  opening  time                         detail
00000000000000000000.seg            0  control      -                       0  -                  -                         56        1  2027-01-15T08:00:00.000000Z  {"format": 1, "log": 11259375, "op": "opening", "opening": 1}
00000000000000000000.seg          136  control      -                       0  -                  -                         48        1  2027-01-15T08:00:00.000001Z  {"name": "orders", "number": 1, "op": "queue"}
00000000000000000000.seg          264  control      -                       0  -                  -                         40        1  2027-01-15T08:00:00.000002Z  {"name": "mails", "number": 2, "op": "queue"}
00000000000000000000.seg          384  messages     orders                  6  0-5                0-5                      248        1  2027-01-15T08:00:00.000001Z  expires,retries
00000000000000000000.seg          712  control      -                       0  -                  -                         40        1  2027-01-15T08:00:00.000002Z  {"format": 3, "op": "format", "queue": 0}
00000000000000000000.seg          832  messages     mails                   2  0-1                0-1                       80        1  2027-01-15T08:00:00.000002Z  headers,delayed
00000000000000000000.seg          992  settlements  orders                  3  -                  6-8                      208        1  2027-01-15T08:00:00.000030Z  moved
00000000000000000000.seg         1280  control      -                       0  -                  -                         40        1  2027-01-15T08:00:00.000030Z  {"format": 3, "op": "format", "queue": 0}
"""  # noqa: E501


def test_messages(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, folder) == MESSAGES


def test_events(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, folder, "--events", "--queue", "orders", "--from", 5) == EVENTS


def test_blocks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, folder, "--blocks") == BLOCKS


def test_messages_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, *_ = found = rows(capsys, folder)
    assert first == {
        "queue": "orders",
        "offset": 0,
        "id": "abcdef00000100000100000000000000",
        "time": "2027-01-15T08:00:00.000001Z",
        "state": "gone",
        "reason": None,
        "attempts": None,
        "retries": 2,
        "expires": "2027-01-15T08:01:00.000001Z",
        "due": None,
        "protocol": "sspq",
        "headers": {},
        "bytes": 5,
        "value_base64": "Zmlyc3Q=",
    }
    assert (second["state"], second["reason"], second["attempts"]) == ("dead", "rejected", 1)
    assert base64.b64decode(second["value_base64"]) == NASTY
    assert base64.b64decode(found[5]["value_base64"]) == b"long " * 20
    assert (found[6]["state"], found[6]["due"], found[6]["headers"]) == ("ready", None, {})
    last = found[7]["state"], found[7]["due"], found[7]["headers"]
    assert last == ("delayed", "2027-01-15T08:01:30.000002Z", {"kind": "\x1bé"})
    assert [(row["queue"], row["offset"]) for row in found] == [
        *(("orders", offset) for offset in range(6)),
        *(("mails", offset) for offset in range(2)),
    ]


def test_events_and_blocks_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = rows(capsys, folder, "--events", "--queue", "orders", "--from", 7, "--limit", 1)
    assert event == [
        {
            "queue": "orders",
            "event_offset": 7,
            "event": "dead",
            "offset": 1,
            "id": "abcdef00000100000100000000000001",
            "reason": "rejected",
            "consumer": "ann",
            "attempt": 1,
            "dispatched": "2027-01-15T08:00:00.000010Z",
            "time": "2027-01-15T08:00:00.000030Z",
        }
    ]
    blocks = rows(capsys, folder, "--blocks", "--queue", "mails")
    assert blocks == [
        {
            "file": "00000000000000000000.seg",
            "position": 832,
            "kind": "messages",
            "queue": "mails",
            "count": 2,
            "first_offset": 0,
            "first_event": 0,
            "event_count": 2,
            "bytes": 80,
            "opening": 1,
            "time": "2027-01-15T08:00:00.000002Z",
            "flags": ["headers", "delayed"],
            "synced": 136,
        }
    ]
    control, *_ = rows(capsys, folder, "--blocks")
    assert control["control"] == {"op": "opening", "opening": 1, "log": 0xABCDEF, "format": 1}


@pytest.mark.parametrize(
    ("arguments", "offsets"),
    [
        (["--queue", "orders"], [0, 1, 2, 3, 4, 5]),
        (["--queue", "orders", "--from", "4"], [4, 5]),
        (["--queue", "orders", "--from", "1", "--limit", "2"], [1, 2]),
        (["--from", "5"], [5]),
        (["--from", "1", "--limit", "6"], [1, 2, 3, 4, 5, 1]),
        (["--queue", "orders", "--from", "6"], []),
        (["--queue", "orders", "--from", "99"], []),
        (["--limit", "0"], []),
    ],
)
def test_which_messages(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], offsets: list[int]
) -> None:
    assert [row["offset"] for row in rows(capsys, folder, *arguments)] == offsets


def test_from_a_log_position(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, folder, "--blocks", "--from", 384, "--limit", 2)
    assert [row["position"] for row in found] == [384, 712]


# --- the terminal ----------------------------------------------------------------------------------


def test_no_control_character_reaches_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = bytes(range(256)) + "".join(map(chr, [0x200B, 0x202E, 0x2028, 0xE000, 0xFEFF])).encode()
    engine = open_log(str(tmp_path), NOW_US)
    name = "caf\u00e9-\u202eright"
    pieces = [everything[i : i + 40] for i in range(0, len(everything), 40)]
    engine.append(name, Batch.of([NASTY, *pieces]), NOW_US)
    engine.take(name, "consumer\x1b[2J\n", 1, NOW_US)
    engine.settle(name, "consumer\x1b[2J\n", Outcome.ACK, [(0, 1)], NOW_US)
    engine.close(NOW_US)
    for option in ([], ["--events"], ["--blocks"], ["--json"], ["--events", "--json"]):
        out = shown(capsys, tmp_path, *option)
        assert out.replace("\n", "").isprintable()
    assert "consumer\\x1b[2J\\n" in shown(capsys, tmp_path, "--events")
    assert "queue 'caf\u00e9-\\u202eright'" in shown(capsys, tmp_path)


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"plain", "plain"),
        (b"", ""),
        (b"\\", "\\\\"),
        (b"\\x41", "\\\\x41"),
        (b"\xc3", "\\xc3"),
        (b"a\tb\n", "a\\tb\\n"),
        (b"x" * 48, "x" * 48),
        (b"x" * 49, "x" * 48 + "..."),
    ],
)
def test_previews(payload: bytes, text: str) -> None:
    assert dump.safe(dump.preview(payload)) == text


def test_a_terminal_that_knows_only_ascii(folder: Path) -> None:
    command = Path(sys.executable).with_name("penstock")
    ended = subprocess.run(
        [command, "dump", folder, "--queue", "orders", "--from", "2", "--limit", "1"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"caf\\xe9 \\u2713\n" in ended.stdout


def test_far_and_strange_times() -> None:
    assert dump._time(0) == "1970-01-01T00:00:00.000000Z"
    assert dump._time(1 << 62) == f"{1 << 62} us"


def test_a_reader_that_has_seen_enough(folder: Path) -> None:
    command = Path(sys.executable).with_name("penstock")
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        ended = subprocess.run(
            [command, "dump", folder], stdout=write_end, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(write_end)
    assert (ended.returncode, ended.stderr) == (141, b"")


# --- beside a broker, after trimming, and where something is wrong -----------------------------------


def test_beside_a_broker_and_without_changing_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = Worker(tmp_path, 4, queues=("brief", "lazy", "short"))
    for _ in range(200):
        worker.turn()
    worker.settle_down()
    worker.engine.trim(worker.now_us)
    worker.engine.wait()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    found = rows(capsys, tmp_path)
    for option in ("--events", "--blocks"):
        assert len(rows(capsys, tmp_path, option)) > 10
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    for queue in worker.queues:
        info = worker.engine.describe(queue)
        mine = [row for row in found if row["queue"] == queue]
        states = [row["state"] for row in mine]
        # What somebody holds is ready again for whoever comes after a crash; that a delay is over is not
        # written down.
        assert states.count("dead") == info.dead
        assert states.count("ready") + states.count("delayed") == info.ready + info.held + info.delayed
        assert all((row["due"] is not None) == (row["state"] == "delayed") for row in mine)
        complete = [row["offset"] for row in mine if row["offset"] >= info.offset_start]
        assert complete == [*range(info.offset_start, info.offset_end)]
    # Retention has left living messages alone before the start, and that is no loss.
    assert any(row["offset"] < worker.engine.describe(row["queue"]).offset_start for row in found)
    worker.engine.close(worker.now_us)


@pytest.mark.parametrize("events", [False, True])
def test_what_retention_takes_meanwhile_is_no_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], events: bool
) -> None:
    settings = LogSettings(segment_bytes=4096, snapshot_blocks=5)
    engine = open_log(
        str(tmp_path), NOW_US, settings=settings, policies=Policies({"q": {"retention-seconds": 0}})
    )
    for turn in range(60):
        engine.append("q", Batch.of([b"x" * 100] * 2), NOW_US + turn)
        engine.flush(NOW_US + turn)
    engine.wait()
    with LogReader(str(tmp_path), maps_max=1) as reader:
        dumped = dump._Dump(reader, None, 0)
        rows = dumped.events() if events else dumped.messages()
        assert next(rows)["offset"] == 0
        engine.take("q", "ann", 100, NOW_US + 100)
        engine.settle("q", "ann", Outcome.ACK, [(0, 100)], NOW_US + 101)
        for turn in range(1, 30):
            engine.append("q", Batch.of([b"behind"]), NOW_US + turn * SECOND_US)
            engine.tick(NOW_US + turn * SECOND_US)
            engine.trim(NOW_US + turn * SECOND_US)
            engine.wait()
            engine.poll()
        assert engine.describe("q").offset_start > 50
        assert len([*rows]) < 100
    assert not dumped.lost
    assert capsys.readouterr().err == ""
    engine.close(NOW_US + 10 * SECOND_US)


def segment_of(folder: Path) -> Path:
    (path,) = (path for path in folder.iterdir() if parse_segment_name(path.name))
    return path


@pytest.mark.parametrize(
    ("option", "damage", "says"),
    [
        ([], b"first", "queue 'orders': offsets 0 to 5 cannot be read"),
        (["--events"], b"ann", "queue 'orders': events 6 to 8 cannot be read"),
        (["--blocks"], b"first", "00000000000000000000.seg: 328 bytes at position 384 cannot be read"),
    ],
)
def test_damage_is_named_and_the_rest_is_shown(
    folder: Path, capsys: pytest.CaptureFixture[str], option: list[str], damage: bytes, says: str
) -> None:
    path = segment_of(folder)
    path.write_bytes(path.read_bytes().replace(damage, b"F" * len(damage)))
    assert main(["dump", str(folder), *option]) == 1
    out, err = capsys.readouterr()
    assert says in err
    assert err.endswith(f"`penstock verify {folder}` says why\n")
    assert err.count("\n") == 1
    assert "mails" in out


def test_a_cut_in_the_middle_of_a_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = open_log(str(tmp_path), NOW_US, settings=LogSettings(segment_bytes=2048))
    for turn in range(30):
        engine.append("q", Batch.of([b"%02d" % turn * 50] * 2), NOW_US + turn * SECOND_US)
        engine.flush(NOW_US + turn * SECOND_US)
    engine.close(NOW_US)
    segments = sorted(path for path in tmp_path.iterdir() if parse_segment_name(path.name))
    segments[2].unlink()
    code = main(["dump", str(tmp_path), "--json"])
    out, err = capsys.readouterr()
    assert code == 1
    offsets = [json.loads(line)["offset"] for line in out.splitlines()]
    missing = sorted({*range(60)} - {*offsets})
    assert f"queue 'q': offsets {missing[0]} to {missing[-1]} cannot be read" in err


def test_a_file_that_cannot_be_read_at_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = segment_of(folder)
    path.unlink()
    path.mkdir()
    for option in ("--json", "--blocks", "--events"):
        assert main(["dump", str(folder), option]) == 1
        err = capsys.readouterr().err
        assert err.startswith(f"penstock dump: {folder}: cannot be read: ")
        assert err.count("\n") == 1


def test_no_such_queue(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", str(folder), "--queue", "order"]) == 1
    says = f"penstock: there is no queue 'order' in '{folder}'; there are: 'orders', 'mails'\n"
    assert capsys.readouterr() == ("", says)


@pytest.mark.parametrize(
    "arguments", [["--from", "-1"], ["--from", "x"], ["--limit", "\u0661"], ["--blocks", "--events"]]
)
def test_misuse(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(["dump", str(folder), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "penstock dump: error: argument" in err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "--help")
    assert "  penstock dump penstock-data --queue orders --from 1000 --limit 20\n" in out


def test_what_was_staged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Messages are shown as they came with their commit; blocks show which rows they are."""
    engine = open_log(str(tmp_path), NOW_US)
    stages: list[str] = []

    def note(info: StageInfo | LogError) -> None:
        assert isinstance(info, StageInfo)
        stages.append(info.stage)

    for batch in (Batch.of([b"one", b"two"]), Batch.of([b"three"], ttl_seconds=[60])):
        engine.stage("nightly/7", [("orders", batch)], NOW_US, note)
        engine.wait()
    engine.commit("nightly/7", stages[::-1], NOW_US + SECOND_US)
    engine.close(NOW_US + SECOND_US)
    found = rows(capsys, tmp_path)
    assert [base64.b64decode(row["value_base64"]) for row in found] == [b"three", b"one", b"two"]
    assert {row["time"] for row in found} == {"2027-01-15T08:00:01.000000Z"}
    assert found[0]["expires"] == "2027-01-15T08:01:01.000000Z"
    told = rows(capsys, tmp_path, "--blocks")
    controls = [row["control"] for row in told if row["kind"] == "control"]
    first, *others = [it["op"] for it in controls]
    assert first == "opening"
    assert others == ["queue", "format", "stage", "stage", "queue", "transaction", "format"]
    staged = [(row["queue"], row["first_offset"], row["count"]) for row in told if row["kind"] == "messages"]
    assert staged == [("\0", 0, 2), ("\0", 2, 1), ("orders", 0, 3)]
    assert [row["rows"] for row in told if "rows" in row] == [[[2, 3], [0, 2]]]
    assert "part,elsewhere rows 2-2,0-1\n" in shown(capsys, tmp_path, "--blocks", "--queue", "orders")
