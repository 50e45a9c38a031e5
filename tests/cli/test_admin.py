"""The commands for operators, in both forms, on a real broker: look, pause, purge; and what goes wrong."""

import argparse
import http.server
import re
import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from penstock.cli import queues
from penstock.cli.admin import Admin, add_admin
from penstock.cli.main import main
from penstock.client import PhpmqClient
from penstock.common import tables
from tests.certificates import make_certificates
from tests.cli.conftest import Run, objects
from tests.cli.terminal import Terminal
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.http.morgue import path_of, phpmq, reject, take
from tests.server.harness import WAIT_SECONDS, BrokerProcess

STRANGE = ["a/b", "with blanks and %", "grüße-世界", "'quoted'", "..", "?x=1#y"]
"""Names of queues that need care in an address, in a shell or in a table."""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_URL", "PENSTOCK_TOKEN", "PENSTOCK_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


# --- queues --------------------------------------------------------------------------------------------


def test_queues_as_a_table(broker: BrokerProcess, api: Api, run: Run) -> None:
    api.send("table.a", b"x" * 2000, b"y", b"z")
    reject(broker, api, "table.b", [b"1", b"2"])
    api.post(path_of("table.b", "pause"))
    heading, a, b, total = run("queues", "table.*")
    assert heading.split() == [
        "QUEUE",
        "READY",
        "DELAYED",
        "HELD",
        "DEAD",
        "CONSUMERS",
        "IN/S",
        "OUT/S",
        "OLDEST",
        "SIZE",
    ]
    assert a.split()[:6] == ["table.a", "3", "0", "0", "0", "0"]
    assert a.endswith("2.0 KiB")
    assert b.split()[:6] == ["table.b", "0", "0", "0", "2", "0"]
    assert b.endswith("paused")
    assert total.split()[:7] == ["2", "queues", "3", "0", "0", "2", "0"]
    # Numbers stand below each other, with their last digits.
    assert {line.index(word) + len(word) for line, word in ((heading, "READY"), (a, "3"), (total, "3"))} == {
        heading.index("READY") + len("READY")
    }


def test_queues_as_json(api: Api, run: Run) -> None:
    api.send("json.a", b"1")
    api.send("json.b", b"1")
    found = objects(run("queues", "json.?", "--json"))
    assert [queue["name"] for queue in found] == ["json.a", "json.b"]
    shown = api.get("/v1/queues", match="json.?")["queues"]
    assert [set(queue) for queue in found] == [set(queue) for queue in shown]
    assert found[0]["ready"] == 1


def test_queues_are_sorted(api: Api, run: Run) -> None:
    api.send("sort.a", b"1")
    api.send("sort.b", b"1", b"2", b"3")
    api.send("sort.c", b"12345678", b"2")

    def names(*options: str) -> list[str]:
        return [queue["name"][-1] for queue in objects(run("queues", "sort.*", "--json", *options))]

    assert names() == ["a", "b", "c"]
    assert names("--sort", "ready") == ["b", "c", "a"]
    assert names("--sort", "bytes") == ["c", "b", "a"]
    assert names("--sort", "oldest_seconds") == ["a", "b", "c"]


def test_no_queue_is_no_failure(run: Run) -> None:
    _, total = run("queues", "there are none*")
    assert total.split()[:2] == ["0", "queues"]
    assert run("queues", "there are none*", "--json") == []


def test_more_queues_than_a_page(api: Api, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12):
        api.send(f"page.{number:02}", b"")
    # The API's page is made smaller, so that there are several.
    pages = Admin.pages
    monkeypatch.setattr(Admin, "pages", lambda *args, **words: pages(*args, **words, limit=5))
    assert len(objects(run("queues", "page.*", "--json"))) == 12


def test_watch_on_a_terminal(broker: BrokerProcess, api: Api, url: str) -> None:
    for number in range(30):
        api.send(f"watch.{number:02}", b"")
    with Terminal("queues", "watch.*", "--watch", "--url", url, lines=12) as terminal:
        terminal.wait_for("30 queues")
        api.send("watch.00", b"second")
        screen = terminal.wait_for("\x1b[H", 3)  # drawn over, twice at least
        assert "(24 more)" in screen
        assert "watch.05" in screen
        assert "watch.06" not in screen
        terminal.wait_for("watch.00       2")
        terminal.interrupt()
        assert terminal.end() == 0
        assert terminal.seen.endswith("\x1b[?25h")  # the cursor is back
        assert "Traceback" not in terminal.seen
        frames = terminal.seen.split("\x1b[H")[1:]
        assert all(frame.count("\r\n") < 12 for frame in frames)  # nothing scrolls


def test_watch_waits_for_a_broker_that_went_away(start_broker: StartBroker) -> None:
    broker = start_broker()
    port = broker.ports["http"]
    with Api(port) as api:
        api.send("patient", b"")
    where = f"http://127.0.0.1:{port}"
    with Terminal("queues", "--watch", "--url", where) as terminal:
        terminal.wait_for("1 queue ")
        broker.kill()
        terminal.wait_for("could be reached")
        start_broker("--http", f"127.0.0.1:{port}")
        seen = len(terminal.wait_for("could be reached"))
        terminal.wait_for("1 queue ", terminal.seen.count("1 queue ") + 2)
        assert "patient" in terminal.seen[seen:]
        terminal.interrupt()
        assert terminal.end() == 0


def test_watch_without_a_terminal(
    api: Api, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api.send("plain", b"")
    turns: list[float] = []

    def pause(seconds: float) -> None:
        turns.append(seconds)
        if len(turns) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", pause)
    assert main(["queues", "plain", "--watch", "--url", url]) == 0
    out, err = capsys.readouterr()
    assert turns == [queues.WATCH_SECONDS] * 3
    assert err == ""
    assert "\x1b" not in out
    assert [table.split()[0] for table in out.strip().split("\n\n")] == ["QUEUE"] * 3
    turns.clear()
    assert main(["queues", "plain", "--watch", "--json", "--url", url]) == 0
    assert [queue["name"] for queue in objects(capsys.readouterr().out.splitlines())] == ["plain"] * 3


# --- show ----------------------------------------------------------------------------------------------


def test_show_everything_about_a_queue(broker: BrokerProcess, api: Api, run: Run) -> None:
    reject(broker, api, "shown", [b"1", b"2"])
    api.send("shown", b"3")
    reader = {"view": "messages", "positions": {"shown": 1}, "lease_seconds": 60}
    assert api.ask("PUT", "/v1/readers/nightly", reader).status == 200
    with phpmq(broker) as mq:
        (held,) = mq.consume("shown", prefetch=1, count=1, timeout=WAIT_SECONDS)
        lines = run("show", "shown")
        (shown,) = objects(run("show", "shown", "--json"))
        held.ack()
    facts = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if len(line.split()) > 1}
    assert (facts["queue"], facts["ready"], facts["held"], facts["dead"]) == ("shown", "0", "1", "2")
    assert facts["offsets"] == "0 to 2"
    assert facts["durability"] == "commit"
    assert facts["retention-seconds"] == "1 d"
    assert facts["max-bytes"] == "no bound"
    assert facts["dead-letters"] == "on"
    assert facts["rejected"] == "2"
    (consumer,) = [line for line in lines if " phpmq " in line]
    assert consumer.split()[3:5] == ["messages", "1"]
    (reading,) = [line for line in lines if line.startswith("nightly")]
    assert reading.split()[1:4] == ["messages", "1", "2"]
    assert shown["dead_reasons"] == {"rejected": 2}
    assert [it["protocol"] for it in shown["connections"]] == ["phpmq"]
    assert [(it["name"], it["lag"]) for it in shown["readers"]] == [("nightly", 2)]
    api.ask("DELETE", "/v1/readers/nightly")


def test_show_marks_a_pause(api: Api, run: Run) -> None:
    api.send("marked", b"")
    api.post(path_of("marked", "pause"))
    assert run("show", "marked")[0].split(maxsplit=1)[1] == "marked (paused)"


# --- peek ----------------------------------------------------------------------------------------------


def test_peek(broker: BrokerProcess, api: Api, run: Run) -> None:
    reject(broker, api, "peeked", [b"gone bad"])
    api.send("peeked", b'{"a": 1}', b"\x00\xff", "grüße\n\x1b[31m".encode())
    heading, *rows = run("peek", "peeked", "--state", "all")
    assert heading.split() == ["OFFSET", "STATE", "AGE", "ATTEMPTS", "VALUE"]
    assert [row.split()[:3] for row in rows[:2]] == [
        ["0", "dead", "(rejected)"],
        ["1", "ready", rows[1].split()[2]],
    ]
    assert [row.rpartition("  ")[2] for row in rows] == [
        "gone bad",
        '{"a": 1}',
        "0x00ff",
        "grüße\\n\\x1b[31m",
    ]
    assert [row.rpartition("  ")[2] for row in run("peek", "peeked")[1:]] == [
        '{"a": 1}',
        "0x00ff",
        "grüße\\n\\x1b[31m",
    ]
    found = objects(run("peek", "peeked", "--json"))
    assert [message.get("value") for message in found] == ['{"a": 1}', None, "grüße\n\x1b[31m"]
    assert found[1]["value_base64"] == "AP8="
    assert api.get(path_of("peeked"))["ready"] == 3


def test_peek_shortens_long_values(api: Api, run: Run) -> None:
    api.send("long-values", b"x" * 1000)
    assert run("peek", "long-values")[1].endswith(f"  {'x' * 200}...")
    assert run("peek", "long-values", "--full")[1].endswith("x" * 1000)
    assert objects(run("peek", "long-values", "--json"))[0]["value"] == "x" * 1000


def test_peek_shows_what_is_held_in_its_place(broker: BrokerProcess, api: Api, run: Run) -> None:
    api.send("in-hands", b"a", b"b", b"c")
    with PhpmqClient(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        first, second = list(mq.consume("in-hands", count=2, timeout=5))
        second.requeue()
        mq.flush()
        states = [message["state"] for message in objects(run("peek", "in-hands", "--json"))]
        assert states == ["held", "ready", "ready"]
        assert first.ack()


def test_peek_bounds(broker: BrokerProcess, api: Api, run: Run) -> None:
    api.send("bounded", *[b"%d" % number for number in range(30)])
    take(broker, "bounded", 2, lambda message: message.ack())

    def values(*options: str) -> list[int]:
        return [message["offset"] for message in objects(run("peek", "bounded", "--json", *options))]

    assert values() == list(range(2, 22))
    assert values("--limit", "100") == list(range(2, 30))
    assert values("--limit", "100", "--state", "all") == list(range(30))
    assert values("--from", "25", "--limit", "3") == [25, 26, 27]
    assert values("--state", "gone") == [0, 1]
    assert values("--state", "ready", "--limit", "1") == [2]
    assert values("--state", "held") == []


def test_peek_more_than_a_page(api: Api, run: Run) -> None:
    body = b"".join(b'{"value": "%d"}\n' % number for number in range(2500))
    reply = api.ask("POST", path_of("pages", "batch"), body, {"Content-Type": "application/x-ndjson"})
    assert reply.status == 200
    found = objects(run("peek", "pages", "--json", "--limit", "2400"))
    assert [message["offset"] for message in found] == list(range(2400))


def test_peek_with_history(broker: BrokerProcess, api: Api, run: Run) -> None:
    api.send("past", b"x")
    take(broker, "past", 1, lambda message: message.requeue())
    api.send("fence", b"")  # whose receipt says that what came before it is on the disk, and can be shown
    lines = run("peek", "past", "--history")
    assert [line.split()[0] for line in lines] == ["OFFSET", "0", "EVENT", "accepted", "requeued"]
    assert all(line.startswith("        ") for line in lines[2:])
    (message,) = objects(run("peek", "past", "--history", "--json"))
    assert [event["event"] for event in message["history"]] == ["accepted", "requeued"]


def test_peek_raw(api: Api, url: str, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    api.send("raw", b"\x00\xff\n", b"\x1b[31m")
    assert main(["peek", "raw", "--raw", "--url", url]) == 0
    assert capsysbinary.readouterr().out == b"\x00\xff\n\x1b[31m"


def test_a_terminal_gets_what_fits(api: Api, url: str) -> None:
    api.send("wide", b"x" * 500, "世".encode() * 200)
    with Terminal("peek", "wide", "--url", url, columns=60) as terminal:
        assert terminal.end() == 0
    _, plain, wide = terminal.seen.splitlines()
    assert tables.width_of(plain) == 60
    assert plain.endswith("xxx...")
    assert 58 <= tables.width_of(wide) <= 60


# --- pause, resume, purge ------------------------------------------------------------------------------


def test_pause_and_resume(api: Api, run: Run) -> None:
    api.send("stopped", b"")
    assert run("pause", "stopped") == ["stopped is paused"]
    assert api.get(path_of("stopped"))["paused"] is True
    assert objects(run("pause", "stopped", "--json")) == [{"queue": "stopped", "paused": True}]
    assert run("resume", "stopped") == ["stopped is not paused"]
    assert objects(run("resume", "stopped", "--json")) == [{"queue": "stopped", "paused": False}]
    assert api.get(path_of("stopped"))["paused"] is False


def test_purge(broker: BrokerProcess, api: Api, run: Run) -> None:
    reject(broker, api, "purged", [b"dead"])
    api.send("purged", b"1", b"2")
    assert run("purge", "purged", "--yes") == ["purged 2 ready messages of purged"]
    assert (api.get(path_of("purged"))["ready"], api.get(path_of("purged"))["dead"]) == (0, 1)
    assert objects(run("purge", "purged", "--dead", "--yes", "--json")) == [
        {"queue": "purged", "dead": True, "purged": 1}
    ]
    assert api.get(path_of("purged"))["dead"] == 0


def test_purge_asks_nobody_where_there_is_no_terminal(
    api: Api, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    api.send("unasked", b"")
    assert main(["purge", "unasked", "--url", url]) == 2
    assert "say --yes to purge without a question" in capsys.readouterr().err
    assert api.get(path_of("unasked"))["ready"] == 1


def test_delete(
    broker: BrokerProcess, api: Api, run: Run, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reject(broker, api, "deleted", [b"dead"])
    api.send("deleted", b"1", b"2")
    assert run("delete", "deleted", "--yes") == ["deleted deleted with 2 messages and 1 dead letter"]
    assert api.ask("GET", path_of("deleted")).status == 404
    api.send("deleted", b"1")
    identity = api.get(path_of("deleted"))["identity"]
    with phpmq(broker) as mq:
        (held,) = mq.consume("deleted", count=1)
        assert main(["delete", "deleted", "--yes", "--url", url]) == 1
        assert "who hold 1 messages: stop them, or delete it with force" in capsys.readouterr().err
        assert objects(run("delete", "deleted", "--yes", "--force", "--json")) == [
            {"name": "deleted", "identity": identity, "ready": 0, "delayed": 0, "held": 1, "dead": 0}
        ]
        held.ack()
    assert main(["delete", "deleted", "--url", url]) == 2
    assert "say --yes to delete without a question" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 1)])
def test_delete_asks_on_a_terminal(api: Api, url: str, answer: str, code: int) -> None:
    queue = f"deleted {answer.strip() or 'not'}"
    api.send(queue, b"1", b"2", b"3")
    with Terminal("delete", queue, "--url", url) as terminal:
        terminal.wait_for(f"Delete {queue} with 3 messages and 0 dead letters? [y/N] ")
        terminal.type(answer)
        assert terminal.end() == code
        assert ("nothing was deleted" if code else "deleted deleted y with 3 messages") in terminal.seen
    assert api.ask("GET", path_of(queue)).status == (200 if code else 404)


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, 0), ("\n", 1, 3), ("no\n", 1, 3)])
def test_purge_asks_on_a_terminal(api: Api, url: str, answer: str, code: int, left: int) -> None:
    queue = f"asked {answer.strip() or 'nothing'}"
    api.send(queue, b"1", b"2", b"3")
    with Terminal("purge", queue, "--url", url) as terminal:
        terminal.wait_for(f"Throw away 3 ready messages of {queue}? [y/N] ")
        terminal.type(answer)
        assert terminal.end() == code
        assert ("nothing was purged" if left else "purged 3 ready messages") in terminal.seen
    assert api.get(path_of(queue))["ready"] == left


# --- names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRANGE)
def test_strange_names(broker: BrokerProcess, api: Api, run: Run, name: str) -> None:
    reject(broker, api, name, [b"1"])
    assert run("show", name)[0].split(maxsplit=1)[1] == name
    assert name in [queue["name"] for queue in objects(run("queues", "--json"))]
    assert run("pause", name) == [f"{name} is paused"]
    assert run("resume", name) == [f"{name} is not paused"]
    assert len(run("dead", name)) == 5
    assert run("redrive", name) == ["redriven 1 dead letter; 0 left"]
    assert len(run("peek", name)) == 2
    assert run("purge", name, "--yes") == [f"purged 1 ready message of {name}"]


def test_what_a_peer_names_cannot_reach_the_terminal(broker: BrokerProcess, api: Api, run: Run) -> None:
    """U+202E turns the direction of writing; unlike a control character it may be in a queue's name."""
    name = "evil\u202e[31m\u2028"
    api.send(name, b"\x1b]0;title\x07")
    for command in (["queues", "evil*"], ["show", name], ["peek", name], ["dead", name], ["pause", name]):
        text = "\n".join(run(*command))
        assert text.replace("\n", "").isprintable(), command
        assert "evil\\u202e[31m\\u2028" in text or command[0] == "peek"


def test_a_name_that_is_no_text(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "caf\udce9", "--url", url]) == 1
    assert "not UTF-8" in capsys.readouterr().err


def test_columns_of_wide_names_stand_below_each_other() -> None:
    lines = tables.table(
        [tables.Column("NAME"), tables.Column("N", right=True)],
        [("世界", "1"), ("e\u0301", "22"), ("abcd", "3")],
    )
    assert lines == ["NAME   N", "世界   1", "e\u0301     22", "abcd   3"]


# --- what goes wrong -----------------------------------------------------------------------------------

COMMANDS = [
    "queues",
    "show q",
    "peek q",
    "search q",
    "copy q --to other --state ready",
    "move q --to other --offsets 1",
    "withdraw q --offsets 1-5 --yes",
    "pause q",
    "resume q",
    "purge q --yes",
    "dead q",
    "redrive q",
    "delete q --yes",
]


@pytest.mark.parametrize("line", COMMANDS)
def test_nobody_there(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*line.split(), "--url", "http://127.0.0.1:1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("penstock: http://127.0.0.1:1: no http broker could be reached")
    assert "Connection refused" in err
    assert err.endswith("(`penstock serve` starts one, --url says where it is)\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("line", COMMANDS[1:])
def test_no_such_queue(line: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*line.replace(" q", " nowhere").split(), "--url", url]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("penstock: ")
    assert "'nowhere'" in err
    assert err.count("\n") == 1


def test_the_door_of_dead_letters_is_no_queue(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "orders.dead", "--url", url]) == 1
    assert "orders" in capsys.readouterr().err


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with a token for each role."""
    folder = tmp_path_factory.mktemp("guarded")
    config = folder / "penstock.toml"
    config.write_text(
        "".join(
            f'[[http.tokens]]\nname = "{role}er"\nrole = "{role}"\ntoken = "{role}-0123456789abcdef"\n'
            for role in ("read", "operate", "admin")
        )
    )
    broker = BrokerProcess(folder, "--http", "127.0.0.1:0", "--config", str(config)).start()
    with Api(broker.ports["http"], "operate-0123456789abcdef") as api:
        api.send("q", b"1")
    yield broker
    broker.kill()


@pytest.mark.parametrize("line", COMMANDS)
@pytest.mark.parametrize("token", [None, "wrong"])
def test_without_the_right_token(
    guarded: BrokerProcess, line: str, token: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{guarded.ports['http']}"
    words = [] if token is None else ["--token", token]
    assert main([*line.split(), "--url", url, *words]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"penstock: {url}: ")
    assert err.endswith("(--token-file, or PENSTOCK_TOKEN)\n")
    assert err.count("\n") == 1


def test_tokens_and_their_roles(
    guarded: BrokerProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_URL", f"http://127.0.0.1:{guarded.ports['http']}")
    needed = dict.fromkeys(COMMANDS, "read") | {
        "pause q": "operate",
        "resume q": "operate",
        "redrive q": "operate",
        "purge q --yes": "admin",
        "delete q --yes": "admin",
        "copy q --to other --state ready": "operate",  # to send there
        "move q --to other --offsets 1": "operate",
        "withdraw q --offsets 1-5 --yes": "operate",
    }
    roles = ["read", "operate", "admin"]
    for role in roles:
        monkeypatch.setenv("PENSTOCK_TOKEN", f"{role}-0123456789abcdef")
        for line, least in needed.items():
            allowed = roles.index(role) >= roles.index(least)
            assert main(line.split()) == (0 if allowed else 1), (role, line)
            err = capsys.readouterr().err
            right = "send" if line.startswith("copy") else least
            assert err == "" if allowed else f"needs the right {right}" in err
    # A flag beats the variable.
    assert main(["queues", "--token", "read-0123456789abcdef"]) == 0


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("queues ''", "the pattern is empty"),
        ("queues --sort colour", "invalid choice: 'colour'"),
        ("queues --url phpmq://127.0.0.1:9100", "--url is phpmq://127.0.0.1:9100, but this needs http"),
        ("peek q --limit 0", "'0' is not a whole number from 1 on"),
        ("peek q --from -1", "-1"),
        ("peek q --state lost", "invalid choice: 'lost'"),
        ("peek q --raw --json", "--raw writes nothing but the values"),
        ("dead q --reason purged", "invalid choice: 'purged'"),
        ("redrive q --limit x", "'x' is not a whole number from 1 on"),
        ("show", "the following arguments are required: QUEUE"),
        ("search q --export dead.xlsx", "its name says the kind of file; use .ndjson, .csv, .parquet"),
        ("search q --export dead.csv --json", "use it without --json and --full"),
        ("move q --state ready", "the following arguments are required: --to"),
        ("copy q --to r", "say which messages: --offsets, --where or --state"),
        ("withdraw q --offsets 7-3 --yes", "'7-3' ends before it begins; use 3-7"),
        ("withdraw q --offsets 1,x --yes", "'x' is no offset, and no range such as 100-199"),
        ("withdraw q --offsets 1", "say --yes to withdraw without a question"),
    ],
)
def test_misuse(line: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert complaint in err


def test_a_variable_for_another_protocol(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_URL", "phpmq://127.0.0.1:9100")
    assert main(["queues"]) == 2
    assert "PENSTOCK_URL is phpmq://127.0.0.1:9100, but this needs http" in capsys.readouterr().err


class NoBroker(http.server.BaseHTTPRequestHandler):
    """Somebody else's web server."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()
        self.wfile.write(b"<html>\x1b[31mnot here</html>")

    def log_message(self, *_: object) -> None:
        """Nothing is told."""


class HalfACluster(NoBroker):
    """A front-end that hears nothing of one log."""

    def do_GET(self) -> None:
        body = b'{"queues": [], "next": null, "missing": ["shard 3", "b-\\u001b"]}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def answering(handler: type[NoBroker]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_what_a_list_leaves_out_is_told_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(HalfACluster) as url:
        assert main(["queues", "--url", url]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[-1].startswith("0 queues")
    assert "without what shard 3, b-" in told.err
    assert told.err.strip().isprintable()


def test_somebody_else_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(NoBroker) as url:
        assert main(["queues", "--url", url]) == 1
    err = capsys.readouterr().err
    assert "no answer of a broker" in err
    assert err.strip().isprintable()


def test_over_a_unix_socket_and_over_tls(
    start_broker: StartBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "http.sock"
    start_broker("--http", f"unix:{path}", folder="unix")
    assert main(["queues", "--url", f"http+unix://{path}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 queues")

    make_certificates(tmp_path)
    config = tmp_path / "penstock.toml"
    config.write_text(
        f'[http]\naddress = "127.0.0.1:0"\n'
        f'tls-certificate = "{tmp_path}/server.pem"\ntls-key = "{tmp_path}/server.key"\n'
    )
    broker = start_broker("--config", str(config), folder="tls")
    url = f"https://localhost:{broker.ports['http']}"
    assert main(["queues", "--url", url, "--cafile", str(tmp_path / "ca.pem")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 queues")
    assert main(["queues", "--url", url]) == 1
    assert "certificate" in capsys.readouterr().err


# --- how lines are written ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "..."),
        ("abcdef", 5, "ab..."),
        ("世世世", 5, "世..."),
        ("世世世", 6, "世世世"),
    ],
)
def test_cutting(text: str, width: int, shown: str) -> None:
    assert tables.cut(text, width) == shown


def test_every_command_has_the_same_options() -> None:
    parser = argparse.ArgumentParser()
    add_admin(parser)
    assert [action.option_strings for action in parser._actions[1:]] == [
        ["--url"],
        ["--token-file"],
        ["--token"],
        ["--cafile"],
        ["--json"],
    ]


# --- marks ---------------------------------------------------------------------------------------------


def test_a_moment_is_marked(api: Api, run: Run) -> None:
    (line,) = run("mark", "shop 1.2")
    assert re.fullmatch(r"marked 20\d\d-\d\d-\d\dT[\d:.]+Z: shop 1\.2", line)
    at = f"{datetime.now(UTC) - timedelta(hours=1):%Y-%m-%dT%H:%M:%SZ}"
    (told,) = objects(run("mark", "odd", "--kind", "incident", "--queue", "a/b", "--at", at, "--json"))
    assert told["time"].startswith(at[:-1])
    assert (told["kind"], told["queue"], told["text"]) == ("incident", "a/b", "odd")
    marks = api.get("/v1/marks", queue="a/b")["marks"]
    said = [(it["kind"], it["text"]) for it in marks if it["kind"] in ("incident", "deploy")]
    assert said == [("incident", "odd"), ("deploy", "shop 1.2")]


def test_a_backup_into_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["backup", str(file)]) == 2
    assert capsys.readouterr().err == f"penstock backup: {file}: is no folder; name another one\n"
