"""Marks: what operators do and what people say leaves one; what is kept, and who may see and set them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from penstock.control.frames import Fields
from penstock.http.history.marks import FILE, FILE_BYTES, KINDS, MEMORY_MAX, Marks
from tests.http.api import Api
from tests.http.test_rights import as_user, guarded
from tests.server.harness import BrokerProcess, until

__all__ = ["guarded"]  # a broker whose users have different rights


def mark(at_us: int, text: str = "1.2", queue: str = "") -> Fields:
    return {"at_us": at_us, "kind": "deploy", "text": text, "queue": queue, "who": "ann"}


# --- the file -------------------------------------------------------------------------------------------


def test_marks_are_told_by_time_and_a_torn_line_is_none(tmp_path: Path) -> None:
    marks = Marks(str(tmp_path), 3600)
    assert marks.between(0, 1 << 62) == []
    marks.add(mark(5))
    marks.add(mark(3, "early"))
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes() + b'{"at_us":7,"kind":"dep')
    again = Marks(str(tmp_path), 3600)
    again.add(mark(9, "ü\ud800"))
    assert [it["text"] for it in again.between(0, 1 << 62)] == ["early", "1.2", "ü\ud800"]
    assert [it["at_us"] for it in again.between(4, 8)] == [5]
    assert path.stat().st_mode & 0o777 == 0o600
    raw = path.read_bytes()
    for place in range(len(raw)):
        for bad in (raw[:place], raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :]):
            path.write_bytes(bad)
            assert len(again.between(0, 1 << 62)) <= 3


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"precious\n")
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / FILE).symlink_to(tmp_path / "other")
    marks = Marks(str(tmp_path / "history"), 3600)
    with pytest.raises(OSError, match="symbolic link"):
        marks.add(mark(1))
    assert (tmp_path / "other").read_bytes() == b"precious\n"


def test_what_is_old_goes_and_the_file_is_bounded(tmp_path: Path) -> None:
    marks = Marks(str(tmp_path), 3600)
    for number in range(100):
        marks.add(mark(number * 60_000_000))
    marks.trim(100 * 60)
    assert [it["at_us"] for it in marks.all()] == [number * 60_000_000 for number in range(40, 100)]
    long = "x" * 100_000
    for number in range(30):
        marks.add(mark(7_000_000_000 + number, long))
        assert (tmp_path / FILE).stat().st_size <= FILE_BYTES + 2 * len(long)
    assert next(reversed(list(marks.all())))["at_us"] == 7_000_000_029
    in_memory = Marks(None, 3600)
    for number in range(2 * MEMORY_MAX):
        in_memory.add(mark(number))
    assert len(list(in_memory.all())) == MEMORY_MAX


# --- the calls ------------------------------------------------------------------------------------------


def texts(api: Api, **query: object) -> list[tuple[str, str | None, str]]:
    return [(it["kind"], it["queue"], it["text"]) for it in api.get("/v1/marks", **query)["marks"]]


def test_what_is_done_to_a_queue_and_what_people_say_leaves_a_mark(broker: BrokerProcess, api: Api) -> None:
    api.send("marked", b"x")
    for act in ("pause", "resume", "purge"):
        api.post(f"/v1/queues/marked/{act}")
    api.post("/v1/queues/marked/redrive")
    api.post("/v1/marks", {"text": "deploy 1.2", "kind": "deploy"})
    api.post("/v1/marks", {"text": "look here", "queue": "marked"})
    assert api.ask("DELETE", "/v1/queues/marked").status == 200
    until(lambda: any(it[0] == "start" for it in texts(api)), "the broker to mark its start")
    about = [it for it in texts(api, queue="marked") if it[0] != "start"]
    assert about == [
        ("pause", "marked", "paused"),
        ("resume", "marked", "resumed"),
        ("purge", "marked", "purged: 1 message"),
        ("redrive", "marked", "dead letters were redriven: 0 messages"),
        ("deploy", None, "deploy 1.2"),
        ("note", "marked", "look here"),
        ("delete", "marked", "deleted: 0 messages"),
    ]
    assert [it for it in texts(api, queue="another") if it[0] != "start"] == [("deploy", None, "deploy 1.2")]
    assert {it[0] for it in texts(api)} <= set(KINDS)
    # In the audit, the same acts have their lines, and so has what was said.
    said = [it for it in api.get("/v1/audit")["lines"] if it["act"] == "mark"]
    assert [(it["kind"], it["text"], it["result"]) for it in said[:2]] == [
        ("deploy", "deploy 1.2", "begun"),
        ("deploy", "deploy 1.2", "done"),
    ]


def test_a_mark_may_be_of_the_last_days(broker: BrokerProcess, api: Api) -> None:
    now = datetime.now(UTC)

    def at(ago: timedelta) -> str:
        return (now - ago).isoformat(timespec="seconds").replace("+00:00", "Z")

    api.post("/v1/marks", {"text": "yesterday", "at": at(timedelta(days=1))})
    assert texts(api, from_=at(timedelta(days=2)), to=at(timedelta(hours=23))) == [
        ("note", None, "yesterday")
    ]
    for ago in (timedelta(days=15), timedelta(hours=-1)):
        assert api.ask("POST", "/v1/marks", {"text": "x", "at": at(ago)}).problem == "conflict"
    for body in ({}, {"text": ""}, {"text": "a\nb"}, {"text": "x" * 201}, {"text": "x", "kind": "start"}):
        assert api.ask("POST", "/v1/marks", body).problem == "bad-request", body


def test_who_may_set_and_see_which(guarded: BrokerProcess) -> None:
    with as_user(guarded, "operate") as operate:
        assert operate.ask("POST", "/v1/marks", {"text": "mine", "queue": "orders.a"}).status == 200
        reply = operate.ask("POST", "/v1/marks", {"text": "all"})
        assert (reply.status, reply.json["detail"]) == (
            403,
            "'operate' may not do this: it needs the right operate with every queue; see [[user]]",
        )
        assert operate.ask("POST", "/v1/marks", {"text": "x", "queue": "payroll"}).status == 403
        assert operate.ask("GET", "/v1/marks").status == 403
    with as_user(guarded, "all") as everything:
        assert everything.ask("POST", "/v1/marks", {"text": "for all"}).status == 200
        assert everything.ask("POST", "/v1/marks", {"text": "theirs", "queue": "payroll"}).status == 200
        assert everything.ask("GET", "/v1/samples").status == 200
    with as_user(guarded, "read") as read, as_user(guarded, "other") as other:
        shown = [it[2] for it in texts(read) if it[0] == "note"]
        assert shown == ["mine", "for all"]
        assert [it[2] for it in texts(other) if it[0] == "note"] == ["for all", "theirs"]
        assert read.ask("POST", "/v1/marks", {"text": "x", "queue": "orders.a"}).status == 403
        # Sums over queues that one may not read would tell of them.
        reply = read.ask("GET", "/v1/samples")
        assert (reply.status, reply.json["detail"]) == (
            403,
            "'read' may not do this: it needs the right read with every queue; see [[user]]",
        )
