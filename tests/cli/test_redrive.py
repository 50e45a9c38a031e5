"""`penstock dead` and `penstock redrive`: in both forms, with every filter, and on a terminal."""

import pytest

from penstock.cli import messaging, redrive
from penstock.cli.main import main
from penstock.client import HttpClient
from tests.cli.conftest import Run, objects
from tests.cli.terminal import Terminal
from tests.http.api import Api
from tests.http.morgue import bodies_left, exhaust, expire, path_of, phpmq, reasons, reject
from tests.server.harness import WAIT_SECONDS, BrokerProcess

# --- dead ----------------------------------------------------------------------------------------------


def test_dead_letters_by_reason_and_one_by_one(broker: BrokerProcess, api: Api, run: Run) -> None:
    reject(broker, api, "letters", [b"one", b"two"])
    exhaust(broker, api, "letters", [b"three"])
    with phpmq(broker) as mq:
        (held,) = mq.consume("letters.dead", prefetch=1, count=1, timeout=WAIT_SECONDS)
        assert held.body == b"one"
        lines = run("dead", "letters")
        found = objects(run("dead", "letters", "--json"))
    assert [line.split() for line in lines[:3]] == [
        ["DEAD", "LETTERS", "COUNT"],
        ["rejected", "2"],
        ["retries-exhausted", "1"],
    ]
    assert lines[3] == ""
    assert lines[4].split() == ["OFFSET", "REASON", "AGE", "ATTEMPTS", "HELD", "BY", "VALUE"]
    assert [(line.split()[0], line.split()[1], line.split()[-1]) for line in lines[5:]] == [
        ("0", "rejected", "one"),
        ("1", "rejected", "two"),
        ("2", "retries-exhausted", "three"),
    ]
    assert found[0]["consumer"] in lines[5]
    assert [(letter["offset"], letter["reason"], letter["state"]) for letter in found] == [
        (0, "rejected", "dead"),
        (1, "rejected", "dead"),
        (2, "retries-exhausted", "dead"),
    ]
    first = objects(run("dead", "letters", "--json", "--limit", "2"))
    assert [letter["offset"] for letter in first] == [0, 1]


def test_what_was_said_of_dead_letters(broker: BrokerProcess, run: Run, url: str) -> None:
    with HttpClient(url) as mq:
        mq.send_many("said", [b"one", b"two"])
        one, two = mq.consume("said", count=2)
        one.reject("no such \x1b customer, " + "x" * 100)
        two.reject()
    heading, *rows = run("dead", "said")[3:]
    assert heading.split()[:3] == ["OFFSET", "REASON", "WHY"]
    assert r"rejected  no such \x1b customer, xxxxxxxxxxxxxx...  " in rows[0]
    assert "rejected  -   " in rows[1]
    assert [letter["why"] for letter in objects(run("dead", "said", "--json"))][1] is None


def test_dead_letters_of_one_reason(broker: BrokerProcess, api: Api, run: Run) -> None:
    reject(broker, api, "picked", [b"%d" % number for number in range(5)])
    exhaust(broker, api, "picked", [b"x", b"y"])
    words = ("dead", "picked", "--reason", "retries-exhausted")
    assert [letter["offset"] for letter in objects(run(*words, "--json"))] == [5, 6]
    assert [letter["offset"] for letter in objects(run(*words, "--json", "--limit", "1"))] == [5]
    assert run(*words)[-1].endswith("y")
    # There are some, only none of this one.
    assert len(run("dead", "picked", "--reason", "expired")) == 3


def test_no_dead_letters(api: Api, run: Run) -> None:
    api.send("healthy", b"")
    assert run("dead", "healthy") == ["healthy has no dead letters"]
    assert run("dead", "healthy", "--json") == []


# --- redrive -------------------------------------------------------------------------------------------


def test_redrive_all(broker: BrokerProcess, api: Api, run: Run) -> None:
    reject(broker, api, "again", [b"1", b"2", b"3"])
    assert run("redrive", "again", "--dry-run") == [
        "3 of 3 dead letters would be redriven; nothing was changed"
    ]
    assert run("redrive", "again", "--limit", "1") == ["redriven 1 dead letter; 2 left"]
    assert objects(run("redrive", "again", "--json")) == [
        {"queue": "again", "looked_at": 2, "matched": 2, "redriven": 2, "dry_run": False, "left": 0}
    ]
    assert run("redrive", "again") == ["redriven 0 dead letters; 0 left"]
    assert bodies_left(broker, "again", 3) == [b"1", b"2", b"3"]


def test_redrive_by_reason(broker: BrokerProcess, api: Api, run: Run) -> None:
    reject(broker, api, "why", [b"1"])
    expire(api, "why", [b"2", b"3"])
    assert run("redrive", "why", "--reason", "expired") == ["redriven 2 dead letters; 1 left"]
    assert reasons(api, "why") == {"rejected": 1}


def test_redrive_by_a_condition(broker: BrokerProcess, api: Api, run: Run) -> None:
    reject(broker, api, "where", [b'{"n": %d}' % number for number in range(10)])
    words = ("redrive", "where", "--where", "value.n >= 6 and attempts = 1")
    assert run(*words, "--dry-run") == ["4 of 10 dead letters would be redriven; nothing was changed"]
    (dry,) = objects(run(*words, "--dry-run", "--json"))
    assert (dry["looked_at"], dry["matched"], dry["redriven"], dry["left"]) == (10, 4, 0, 10)
    assert run(*words, "--limit", "3") == ["redriven 3 dead letters; 7 left"]
    assert run(*words) == ["redriven 1 dead letter; 6 left"]
    assert bodies_left(broker, "where", 4) == [b'{"n": %d}' % number for number in (6, 7, 8, 9)]


@pytest.mark.parametrize(
    ("options", "moved"), [([], 25), (["--limit", "12"], 12), (["--limit", "12", "--dry-run"], 0)]
)
def test_a_redrive_in_parts(
    broker: BrokerProcess, api: Api, run: Run, monkeypatch: pytest.MonkeyPatch, options: list[str], moved: int
) -> None:
    queue = f"parts {options}"
    monkeypatch.setattr(redrive, "SCAN", 10)
    reject(broker, api, queue, [b"%d" % (number % 2) for number in range(50)])
    (told,) = objects(run("redrive", queue, "--where", "value = '1'", "--json", *options))
    assert told["redriven"] == moved
    assert told["matched"] == (moved or 12)
    assert told["left"] == 50 - moved
    assert api.get(path_of(queue))["ready"] == moved


def test_progress_on_a_terminal(broker: BrokerProcess, api: Api, url: str) -> None:
    """So many letters, and so long a condition, that looking takes longer than the wait for progress."""
    queue, count = "slow", 2 * redrive.SCAN + 1
    reject(broker, api, queue, [b'{"n": %d}' % number for number in range(count)])
    where = "value.n < 10" + "".join(f" or value.n = -{number}" for number in range(1, 200))
    with Terminal("redrive", queue, "--where", where, "--url", url) as terminal:
        assert terminal.end() == 0
    assert f"\r{redrive.SCAN:,} dead letters looked at" in terminal.seen
    assert terminal.seen.endswith(f"\r\x1b[Kredriven 10 dead letters; {count - 10:,} left\r\n")


def test_no_progress_elsewhere(
    broker: BrokerProcess, api: Api, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messaging, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(redrive, "SCAN", 1)
    reject(broker, api, "silent", [b"1", b"2", b"3"])
    assert run("redrive", "silent", "--where", "value = '2'") == ["redriven 1 dead letter; 2 left"]


def test_a_wrong_condition(api: Api, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    api.send("wrong", b"")
    assert main(["redrive", "wrong", "--where", "value.a == 1", "--url", url]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("penstock: where, character 9: ")
    assert err.count("\n") == 1


def test_a_condition_with_control_characters(api: Api, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    api.send("wrong", b"")
    assert main(["redrive", "wrong", "--where", "\x1b[31m = 1", "--url", url]) == 1
    assert capsys.readouterr().err.strip().isprintable()
