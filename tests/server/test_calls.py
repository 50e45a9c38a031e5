"""The calls of the private link, each against a real broker and log; without a link."""

import asyncio
import json
import time
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from penstock import __version__
from penstock.broker import operate
from penstock.broker.operate import Draining
from penstock.control.batches import pack_batch, pack_batches
from penstock.control.frames import Buffer, Fields, Frame
from penstock.control.takes import Verdict, pack_verdicts, unpack_taken
from penstock.http.link import CallRefused, Link
from penstock.http.reading import letters
from penstock.log.errors import (
    DiskFull,
    LogFailed,
    LogRefused,
    QueueFull,
    QueueTooSmall,
    QueueUnknown,
    ReaderUnknown,
    StageDamaged,
    StagesFull,
    StageUnknown,
)
from penstock.log.info import SYNC_BOUNDS_SECONDS
from penstock.model.batch import Batch
from penstock.model.life import Event, Reason, State
from penstock.model.policy import Policies, QueueNameError
from penstock.model.words import Consume, Outcome
from penstock.server.audit import Audit
from penstock.server.calls import CALLS, Context, clients, context, messages, queues, refusal_of
from penstock.server.memory import Account
from tests.broker.test_broker import FakePort, House, send, settle
from tests.log.old_steps import store_step

ROUNDS_MAX = 10_000
LAST: Fields = {"totals": [], "was": ""}
"""What the last call of a stage says besides."""


class Line(FakePort):
    """A port that knows where its peer is, as the server's connections do."""

    peer = "127.0.0.1:4711"
    user = ""
    is_held = False
    sent: ClassVar[dict[str, int]] = {"sent.to": 7}

    def about(self, now_us: int) -> Fields:
        return {"said": "publish", "bytes_in": 5}

    def end(self) -> None:
        self._house.broker.detach(self, 0)

    def __init__(self, caller: "Caller", name: str, protocol: str = "phpmq") -> None:
        super().__init__(caller, name, protocol)
        self.connected = time.monotonic()


class Said:
    """An answer that is written down."""

    def __init__(self) -> None:
        self.answers: list[tuple[Fields, bytes]] = []
        self.others: dict[int, Said] = {}  # answers to what came along

    def __call__(self, fields: Fields, *buffers: Buffer) -> None:
        self.answers.append((json.loads(json.dumps(fields)), b"".join(buffers)))

    def refuse(self, kind: str, detail: str) -> None:
        self({"error": {"kind": kind, "detail": detail}})

    def beside(self, number: int) -> "Said":
        self.others[number] = Said()
        return self.others[number]


class Caller(House):
    """A house, and the one who answers the second process's calls in it."""

    def __init__(self, folder: Path, policies: Policies | None = None) -> None:
        super().__init__(folder, policies)
        self.started = time.monotonic() - 3
        self.memory = Account(1 << 20)
        self.audit = Audit(None)
        self.failures: list[LogFailed] = []
        self.context = Context(self)

    def now_us(self) -> int:
        return self.now

    def arrival_us(self) -> int:
        return self.now

    def listeners(self) -> list[dict[str, object]]:
        return []

    def fail(self, error: LogFailed) -> None:
        self.failures.append(error)

    def line(self, name: str, protocol: str = "phpmq") -> Line:
        line = Line(self, name, protocol)
        self.broker.attach(line)
        return line

    def call(self, name: str, fields: Fields | None = None, *buffers: Buffer) -> tuple[Fields, bytes]:
        """The one answer of a call, whatever it is."""
        said = Said()

        async def run() -> None:
            try:
                CALLS[name](self.context, fields or {}, memoryview(b"".join(buffers)), said)
            except Exception as error:
                kind = refusal_of(error)
                if kind is None:
                    raise
                said.refuse(kind, str(error))
            for _ in range(ROUNDS_MAX):
                if said.answers:
                    return
                self.turn()
                await asyncio.sleep(0)

        asyncio.run(run())
        self.turn()
        (answer,) = said.answers
        return answer

    def ask(self, name: str, fields: Fields | None = None, *buffers: Buffer) -> Fields:
        """An answer that is no refusal."""
        result, body = self.call(name, fields, *buffers)
        assert "error" not in result, result
        assert body == b""
        return result

    def refused(self, name: str, fields: Fields, *buffers: Buffer) -> tuple[str, str]:
        result, _ = self.call(name, fields, *buffers)
        return result["error"]["kind"], result["error"]["detail"]

    def append(self, queue: str, *messages: bytes, **columns: Any) -> Fields:
        fields, buffers = pack_batch(Batch.of(messages, protocol="http", **columns))
        return self.ask("append", {"queue": queue, "batch": fields}, *buffers)

    def transact(self, key: str, *parts: tuple[str, list[bytes]], **more: Any) -> Fields:
        fields, buffers = pack_batches([Batch.of(messages) for _, messages in parts])
        named = [{"queue": queue, "batch": it} for (queue, _), it in zip(parts, fields, strict=True)]
        return self.ask("transact", {"key": key, "parts": named, **more}, *buffers)

    def stage(self, key: str, *parts: tuple[str, list[bytes]], **more: Any) -> Fields:
        fields, buffers = pack_batches([Batch.of(messages) for _, messages in parts])
        named = [{"queue": queue, "batch": it} for (queue, _), it in zip(parts, fields, strict=True)]
        return self.ask("stage", {"number": 0, "key": key, "parts": named, **LAST, **more}, *buffers)

    def kill(self, queue: str, count: int) -> None:
        """Dead letters at every second of the next offsets, held ones between them."""
        first = self.append(queue, *[b"x"] * (2 * count))["first"]
        self.log.take(queue, "killer", 2 * count, self.now)
        self.log.settle(
            queue,
            "killer",
            Outcome.REJECT,
            [(offset, offset + 1) for offset in range(first, first + 2 * count, 2)],
            self.now,
        )


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Caller]:
    caller = Caller(tmp_path)
    yield caller
    caller.log.close(caller.now)


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (QueueUnknown("x"), "no-queue"),
        (ReaderUnknown("x"), "no-reader"),
        (StageUnknown("x"), "no-stage"),
        (StageDamaged("x"), "stage-damaged"),
        (StagesFull("x"), "disk-full"),
        (DiskFull("x"), "disk-full"),
        (QueueFull("x"), "queue-full"),
        (QueueTooSmall("x"), "too-large"),
        (LogRefused("x"), "refused"),
        (context.CallRefused("x"), "refused"),
        (QueueNameError("x"), "name"),
        (LogFailed("x"), "failed"),
        (Draining("x"), "draining"),
        (KeyError("x"), None),
        (ValueError("x"), None),
    ],
)
def test_every_error_has_its_kind(error: Exception, kind: str | None) -> None:
    assert refusal_of(error) == kind


def test_an_error_that_comes_late_is_refused_and_a_failure_is_told(
    caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    for error, kind in ((QueueFull("full"), "queue-full"), (LogFailed("gone"), "failed")):
        said = Said()
        caller.context.refuse(said, error)
        assert said.answers[0][0] == {"error": {"kind": kind, "detail": str(error)}}
    assert [str(error) for error in caller.failures] == ["gone"]
    said = Said()
    caller.context.refuse(said, ZeroDivisionError("ours"))
    assert said.answers[0][0]["error"]["kind"] == "bug"
    assert "failed" in caplog.text


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("queue", {}),
        ("states", {"start": 0, "end": 1, "runs_max": 1, "only": None}),
        ("pause", {"paused": True}),
        ("purge", {"dead": False}),
        ("redrive", {"reason": None, "ranges": None, "limit": None}),
        ("withdraw", {"identity": None, "ranges": [[0, 1]]}),
    ],
)
def test_a_queue_that_is_not_there(caller: Caller, name: str, more: Fields) -> None:
    kind, detail = caller.refused(name, {"queue": "nowhere", **more})
    assert kind == "no-queue"
    assert "nowhere" in detail


# --- messages in -------------------------------------------------------------------------------


def test_append_answers_when_it_is_safe(caller: Caller) -> None:
    answer = caller.append("q", b"a", b"", b"c" * 1000, ttl_seconds=[5, 0, 0], retries=[1, -1, 255])
    assert (answer["first"], answer["end"], len(answer["origin"])) == (0, 3, 18)
    (piece,) = caller.log.read("q", 0, 3)
    assert piece.messages() == [b"a", b"", b"c" * 1000]
    assert piece.protocol == "http"
    assert list(piece.retries or ()) == [1, -1, 255]
    assert (piece.expires_us or ())[0] == caller.now + 5_000_000
    assert answer["origin"].encode() == piece.origin


def test_append_says_why_not(tmp_path: Path) -> None:
    caller = Caller(tmp_path, Policies({"*": {"max-bytes": 2}}))
    fields, buffers = pack_batch(Batch.of([b"abc"]))
    assert caller.refused("append", {"queue": "q.dead", "batch": fields}, *buffers)[0] == "name"
    assert caller.refused("append", {"queue": "q", "batch": fields}, *buffers)[0] == "too-large"
    caller.broker.drain()
    assert caller.refused("append", {"queue": "q", "batch": fields}, *buffers)[0] == "draining"
    caller.log.close(caller.now)


NOTHING: Fields = {
    "stored": None,
    "fingerprint": "",
    "decision": None,
    "prepared": [],
    "steps": 0,
    "stages": [],
}
"""How a key stands that nobody has said anything of."""


def test_a_transaction_is_stored_once_for_its_key(caller: Caller) -> None:
    first = caller.transact("k", ("a", [b"1", b"2"]), ("b", [b"3"]), ("a", [b"4"]))
    assert [part[:3] for part in first["stored"]] == [["a", 0, 2], ["b", 0, 1], ["a", 2, 3]]
    assert first["repeated"] is False
    again = caller.transact("k", ("a", [b"1", b"2"]), ("b", [b"3"]), ("a", [b"4"]))
    assert again == {**first, "repeated": True}
    nothing = {**NOTHING, "queues": []}
    told = {"stored": first["stored"], "fingerprint": caller.log.fingerprint("k")}
    assert caller.ask("transaction", {"key": "k"}) == {**nothing, **told}
    assert caller.ask("transaction", {"key": "other"}) == nothing
    for offset in (3, 4):
        assert caller.transact("", ("a", [b"x"]))["stored"][0][1] == offset
    assert [m for piece in caller.log.read("a", 0, 9) for m in piece.messages()] == [
        b"1",
        b"2",
        b"4",
        b"x",
        b"x",
    ]


# --- transactions whose parts come one by one ------------------------------------------------------


def test_a_stage_is_one_call_or_several(caller: Caller) -> None:
    whole = caller.stage("k", ("a", [b"1", b"2"]), ("b", [b"3"]))
    assert (whole["count"], whole["bytes"], len(whole["stage"])) == (3, 3, 32)
    for number, its in ((7, [b"4"]), (8, [b"x"]), (7, [b"5"])):
        assert caller.stage("k", ("a", its), number=number, more=True) == {}
    assert caller.ask("stage", {"number": 8, "gone": True}) == {}
    assert caller.ask("transaction", {"key": "k"})["stages"] == [{**whole, "alias": ""}]
    pieces = caller.stage("k", ("b", [b"6"]), number=7)
    assert pieces["count"] == 3
    assert caller.context.staged == {}
    assert caller.ask("engine")["stages"]["count"] == 2
    done = caller.ask("commit", {"key": "k", "stages": [pieces["stage"], whole["stage"]]})
    assert [part[:3] for part in done["stored"]] == [["a", 0, 4], ["b", 0, 2]]
    assert (done["repeated"], done["asked"]) == (False, None)
    assert [m for piece in caller.log.read("a", 0, 9) for m in piece.messages()] == [b"4", b"5", b"1", b"2"]
    again = caller.ask("commit", {"key": "k", "stages": [pieces["stage"], whole["stage"]]})
    assert again == {**done, "repeated": True}


def test_a_commit_is_handed_out_at_once(caller: Caller) -> None:
    line = caller.line("ann")
    line.say(Consume("a", 10))
    stage = caller.stage("k", ("a", [b"1", b"2"]))["stage"]
    assert line.payloads() == []
    caller.ask("commit", {"key": "k", "stages": [stage]})
    assert line.payloads() == [b"1", b"2"]


def test_an_abort_says_whether_it_was_committed(caller: Caller) -> None:
    stage = caller.stage("k", ("a", [b"1"]))["stage"]
    assert caller.ask("abort", {"key": "k"}) == NOTHING
    assert caller.refused("commit", {"key": "k", "stages": [stage]})[0] == "no-stage"
    stage = caller.stage("k", ("a", [b"1"]))["stage"]
    caller.ask("commit", {"key": "k", "stages": [stage]})
    caller.stage("k", ("a", [b"1"]))
    answer = caller.ask("abort", {"key": "k"})
    assert ([part[:3] for part in answer["stored"]], answer["stages"]) == ([["a", 0, 1]], [])


def test_what_is_not_staged_or_committed(tmp_path: Path) -> None:
    caller = Caller(tmp_path, Policies({"a": {"max-bytes": 2}}))
    fields, buffers = pack_batch(Batch.of([b"abc"]))

    def refused(queue: str, key: str = "k") -> str:
        parts = [{"queue": queue, "batch": fields}]
        return caller.refused("stage", {"number": 0, "key": key, "parts": parts, **LAST}, *buffers)[0]

    assert refused("q.dead") == "name"
    assert refused("a", key="") == "refused"
    stage = caller.stage("k", ("a", [b"abc"]))["stage"]
    asked = {"key": "k", "stages": [stage]}
    assert caller.refused("commit", asked)[0] == "too-large"
    assert caller.refused("commit", {**asked, "key": "other"})[0] == "no-stage"
    caller.log._state.settings.stages_bytes_max = 10
    assert refused("a") == "disk-full"
    caller.broker.drain()
    assert refused("a") == "draining"
    assert caller.refused("commit", asked)[0] == "draining"
    caller.log.close(caller.now)


def test_steps_of_an_earlier_version_are_ended_by_who_knows_them(caller: Caller) -> None:
    store_step(caller.log, "k", [("a", Batch.of([b"1"]))], 0, caller.now)
    standing: Fields = {**NOTHING, "steps": 1, "queues": []}
    assert caller.ask("transaction", {"key": "k"}) == standing
    asked: Fields = {"key": "k", "stages": [caller.stage("k", ("a", [b"2"]))["stage"]]}
    for more in ({}, {"steps": 2}):
        kind, detail = caller.refused("commit", {**asked, **more})
        assert (kind, "1 chunks of it are in the log" in detail) == ("refused", True)
        assert caller.refused("abort", {"key": "k", **more})[0] == "refused"
    done = caller.ask("commit", {**asked, "steps": 1, "fingerprint": "of/both"})
    assert [part[:3] for part in done["stored"]] == [["a", 0, 2]]
    assert caller.ask("commit", asked)["fingerprint"] == "of/both"


def test_queues_of_a_commit_count_as_others_do(caller: Caller) -> None:
    caller.broker.doors.new_per_second = 2
    stages = [caller.stage("k", (f"queue-{it}", [b"x"]))["stage"] for it in range(3)]
    caller.append("before", b"x")
    caller.append("too", b"x")
    assert caller.refused("commit", {"key": "k", "stages": stages})[0] == "too-fast"
    caller.turn(seconds=5)
    caller.broker.doors._queues_max = 4
    assert caller.refused("commit", {"key": "k", "stages": stages})[0] == "refused"
    assert caller.log.queues() == ["before", "too"]
    assert len(caller.ask("commit", {"key": "k", "stages": stages[:2]})["stored"]) == 2


# --- looking at queues -------------------------------------------------------------------------


def test_rows_have_everything_and_come_when_they_change(caller: Caller) -> None:
    worker = caller.line("w")
    worker.say(Consume("q", 2))
    caller.append("q", b"aa", b"bb", b"cc")
    worker.say(settle(worker, "q", 0), settle(worker, "q", 1, Outcome.REJECT))
    caller.turn()
    answer = caller.ask("queues", {"all": True})
    assert (answer["more"], answer["time_us"]) == (False, caller.now)
    assert answer["queues"] == [
        {
            "name": "q",
            "ready": 0,
            "delayed": 0,
            "held": 1,
            "dead": 1,
            "offset_start": 0,
            "offset_end": 3,
            "event_start": 0,
            "event_end": 5,
            "bytes": 2,
            "oldest_us": caller.now,
            "paused": False,
            "identity": worker.origins[0][:12].decode(),
            "consumers": 1,
            "delivered": 3,
            "counts": {"accepted": 3, "held": 3, "acked": 1, "dead:rejected": 1},
            "bytes_max": 0,
            "times": [[0, 3], [0, 2]],
        }
    ]
    assert caller.ask("queues", {"all": False})["queues"] == []
    caller.ask("pause", {"queue": "q", "paused": True})
    (row,) = caller.ask("queues", {"all": False})["queues"]
    assert (row["paused"], row["times"]) == (True, None)  # Times are told once.


def test_many_rows_come_in_parts(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "ROWS_MAX", 4)
    for i in range(10):
        caller.append(f"q{i}", b"x")
    seen: list[list[str]] = []
    more, ask_all = True, True
    while more:
        answer = caller.ask("queues", {"all": ask_all})
        seen.append([row["name"] for row in answer["queues"]])
        more, ask_all = answer["more"], False
    assert [len(part) for part in seen] == [4, 4, 2]
    assert [name for part in seen for name in part] == [f"q{i}" for i in range(10)]


def test_one_queue_with_its_deaths_and_its_policy(tmp_path: Path) -> None:
    caller = Caller(tmp_path, Policies({"q": {"max-deliveries": 3, "retention-bytes": 1000}}))
    caller.kill("q", 3)
    answer = caller.ask("queue", {"queue": "q"})
    assert (answer["row"]["name"], answer["row"]["dead"]) == ("q", 3)
    assert answer["dead_reasons"] == {"rejected": 3}
    assert answer["policy"] == {
        "durability": "commit",
        "retention_seconds": 86_400,
        "retention_bytes": 1000,
        "max_deliveries": 3,
        "max_bytes": 0,
        "on_expiry": "dead",
        "dead_letters": True,
        "expire_seconds": 0,
        "retry_delays": [],
        "deliver_after": "accept",
    }
    caller.log.close(caller.now)


def test_a_queue_is_deleted_and_whoever_shows_queues_is_told(caller: Caller) -> None:
    caller.append("q", b"a", b"b")
    old = caller.ask("queue", {"queue": "q"})["row"]["identity"]
    worker = caller.line("w")
    worker.say(Consume("q", 1))
    caller.turn()
    assert caller.refused("delete", {"queue": "q", "force": False})[0] == "refused"
    answer = caller.ask("delete", {"queue": "q", "force": True})
    assert (answer["name"], answer["ready"], answer["held"], answer["identity"]) == ("q", 1, 1, old)
    assert caller.refused("delete", {"queue": "q", "force": True})[0] == "no-queue"
    answer = caller.ask("queues", {"all": False})
    assert (answer["queues"], answer["gone"]) == ([], ["q"])
    assert caller.ask("queues", {"all": False})["gone"] == []
    caller.append("q", b"c")
    asked = {"queue": "q", "start": 0, "end": 9, "runs_max": 9, "only": None}
    assert caller.refused("states", {**asked, "identity": old})[0] == "deleted"
    assert caller.call("states", asked)[0]["count"] == 1


class Pipe:
    """A link without a socket, for calls that are answered at once."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def call(self, name: str, fields: Fields) -> Frame:
        said = Said()
        try:
            CALLS[name](self._caller.context, fields, memoryview(b""), said)
        except LogRefused as error:
            raise CallRefused(refusal_of(error) or "", str(error)) from error
        ((answer, body),) = said.answers
        return Frame(answer, memoryview(body))


def test_a_walk_through_dead_letters_does_not_go_on_in_the_next_queue_of_that_name(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run would count letters of both."""
    monkeypatch.setattr(letters, "RUNS_MAX", 3)
    caller.kill("q", 5)
    identity = caller.ask("queue", {"queue": "q"})["row"]["identity"]
    walk = letters.dead_runs(cast(Link, Pipe(caller)), "q", identity, 0, 10, lambda _: True, 1)

    async def go_on() -> list[int]:
        return [run.first for run in await anext(walk)]

    async def both() -> None:
        assert await go_on() == [0, 2]
        caller.broker.delete(("q",), caller.now)
        batch = Batch.of([b"x"] * 10)
        batch.dead = Reason.BAD_RECORD
        caller.log.transact("key", [("q", batch)], caller.now)
        assert caller.log.describe("q").dead == 10
        with pytest.raises(CallRefused) as refused:
            await go_on()
        assert refused.value.kind == "deleted"

    asyncio.run(both())


COLUMNS = (
    ("first", "q"),
    ("end", "q"),
    ("time_us", "q"),
    ("expires_us", "q"),
    ("attempts", "i"),
    ("retries", "i"),
    ("consumer", "i"),
    ("state", "B"),
    ("reason", "B"),
)
"""The body of an answer of `states`, as the contract of the link has it."""


def states(caller: Caller, only: str | None = None, **more: int) -> tuple[Fields, list[dict[str, int]]]:
    asked = {"queue": "q", "start": 0, "end": 100, "runs_max": 100, "only": only, **more}
    fields, body = caller.call("states", asked)
    columns: dict[str, array[int]] = {}
    at = 0
    for name, typecode in COLUMNS:
        column = columns[name] = array(typecode)
        size = column.itemsize * fields["count"]
        column.frombytes(body[at : at + size])
        at += size
    assert at == len(body)
    return fields, [{name: columns[name][i] for name, _ in COLUMNS} for i in range(fields["count"])]


def test_states_come_as_columns(caller: Caller) -> None:
    caller.kill("q", 2)
    caller.append("q", b"r", b"s", ttl_seconds=[9, 0])
    caller.log.give_back("q", "killer", caller.now, ranges=[(3, 4)])
    fields, runs = states(caller)
    assert (fields["next"], fields["consumers"], fields["time_us"]) == (100, ["killer"], caller.now)
    as_stored = {"expires_us": -2, "retries": -2}
    dead = {"time_us": caller.now, "attempts": 1, "consumer": -1, "state": State.DEAD, **as_stored}
    ready = {"time_us": 0, "consumer": -1, "state": State.READY, "reason": 0, **as_stored}
    held = dict(ready, time_us=caller.now, attempts=0, consumer=0, state=State.HELD)
    assert runs == [
        {"first": 0, "end": 1, "reason": Reason.REJECTED, **dead},
        {"first": 1, "end": 2, **held},
        {"first": 2, "end": 3, "reason": Reason.REJECTED, **dead},
        {"first": 3, "end": 4, "attempts": 1, **ready},
        {"first": 4, "end": 6, "attempts": 0, **ready},
    ]
    for only, firsts in (("ready", [3, 4]), ("held", [1]), ("dead", [0, 2])):
        assert [run["first"] for run in states(caller, only)[1]] == firsts
    fields, runs = states(caller, start=1, runs_max=2)
    assert (fields["count"], fields["next"], runs[-1]["end"]) == (2, 3, 3)
    assert states(caller, runs_max=-5)[0]["count"] == 1
    assert states(caller, start=50)[0]["count"] == 0


# --- knobs -------------------------------------------------------------------------------------


def test_pause_and_resume(caller: Caller) -> None:
    worker = caller.line("w")
    worker.say(Consume("q", 0))
    caller.append("q", b"a")
    for paused in (True, False):
        assert caller.ask("pause", {"queue": "q", "paused": paused}) == {"paused": paused}
        assert caller.log.is_paused("q") is paused
        caller.append("q", b"b")
    assert worker.payloads() == [b"a", b"b", b"b"]


@pytest.mark.parametrize("runs_a_step", [1, 500])
def test_purge_tells_how_many(caller: Caller, monkeypatch: pytest.MonkeyPatch, runs_a_step: int) -> None:
    monkeypatch.setattr(operate, "RUNS_A_STEP", runs_a_step)
    caller.kill("q", 20)
    caller.append("q", b"a", b"b")
    assert caller.ask("purge", {"queue": "q", "dead": True}) == {"count": 20, "more": False}
    assert caller.ask("purge", {"queue": "q", "dead": False}) == {"count": 2, "more": False}
    assert caller.ask("purge", {"queue": "q", "dead": False}) == {"count": 0, "more": False}
    assert caller.log.describe("q").held == 20


def test_purge_tells_who_waits_for_an_answer(caller: Caller) -> None:
    asker = caller.line("a", "rq")
    asker.say(send("q", b"x", tickets=[3], wants_reply=True))
    caller.turn()
    assert caller.ask("purge", {"queue": "q", "dead": False})["count"] == 1
    assert asker.heard("undelivered") == [[3]]


def test_withdraw_takes_what_nobody_holds(caller: Caller) -> None:
    caller.kill("q", 3)  # of six: the others are held
    caller.append("q", b"a", b"b")
    identity = caller.log.describe("q").identity
    wish = {"queue": "q", "identity": identity, "ranges": [[0, 7]]}
    assert caller.ask("withdraw", wish) == {"count": 4, "more": False}
    assert caller.ask("withdraw", wish) == {"count": 0, "more": False}
    assert caller.refused("withdraw", {**wish, "identity": "0" * 12})[0] == "deleted"
    assert (caller.log.describe("q").ready, caller.log.describe("q").held) == (1, 3)


def redrive(caller: Caller, **more: Any) -> Fields:
    return caller.ask("redrive", {"queue": "q", "reason": None, "ranges": None, "limit": None, **more})


@pytest.mark.parametrize("runs_a_step", [1, 3, 500])
def test_redrive_by_reason_ranges_and_limit(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, runs_a_step: int
) -> None:
    monkeypatch.setattr(operate, "RUNS_A_STEP", runs_a_step)
    caller.kill("q", 10)
    assert redrive(caller, reason="expired")["count"] == 0
    assert redrive(caller, limit=3) == {"count": 3, "more": False}
    assert redrive(caller, ranges=[[0, 8], [12, 13]], reason="rejected")["count"] == 2
    assert redrive(caller, ranges=[[0, 1 << 50]], limit=2)["count"] == 2
    assert redrive(caller)["count"] == 3
    assert caller.log.describe("q").ready == 10
    assert caller.refused("redrive", {"queue": "q", "reason": "boredom", "ranges": None, "limit": None}) == (
        "refused",
        f"no reason 'boredom': one of {', '.join(reason.label for reason in Reason if reason)}",
    )


def test_a_long_redrive_is_asked_to_go_on(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operate, "RUNS_A_STEP", 1)
    monkeypatch.setattr(queues, "STEPS_SECONDS_MAX", -1.0)
    caller.kill("q", 2)
    assert redrive(caller) == {"count": 1, "more": True}
    assert redrive(caller) == {"count": 1, "more": True}
    assert redrive(caller) == {"count": 0, "more": False}


@pytest.mark.parametrize("ranges", [None, [[0, 1 << 40]]])
def test_a_redrive_in_several_calls_moves_what_was_dead_at_the_mark(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, ranges: list[list[int]] | None
) -> None:
    """Each letter once, though those that were moved die again between two calls."""
    monkeypatch.setattr(operate, "RUNS_A_STEP", 1)
    monkeypatch.setattr(queues, "STEPS_SECONDS_MAX", -1.0)
    caller.kill("q", 4)
    mark = caller.ask("queue", {"queue": "q"})["mark"]
    moved = []
    while (answer := redrive(caller, ranges=ranges, mark=mark))["more"]:
        moved.append(answer["count"])
        caller.log.take("q", "again", 9, caller.now)
        caller.log.settle("q", "again", Outcome.REJECT, [(0, 8)], caller.now)
    assert sum(moved) == 4
    assert caller.log.counts("q")[Event.REDRIVEN, Reason.REJECTED] == 4
    assert caller.log.describe("q").dead == 4


def test_a_purge_in_several_calls_leaves_what_came_after_the_mark(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operate, "RUNS_A_STEP", 1)
    monkeypatch.setattr(queues, "STEPS_SECONDS_MAX", -1.0)
    caller.kill("q", 4)
    redrive(caller, limit=None)
    caller.append("q", b"a")
    fields = {"queue": "q", "dead": False, "mark": caller.ask("queue", {"queue": "q"})["mark"]}
    purged, more = 0, True
    while more:
        answer = caller.ask("purge", fields)
        purged, more = purged + answer["count"], answer["more"]
        caller.append("q", b"new")
    assert purged == 2  # the one letter that was redriven, and the message behind it


def test_other_work_goes_on_between_two_steps(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operate, "RUNS_A_STEP", 1)
    caller.kill("q", 5)
    said, seen = Said(), []

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def look() -> None:
            seen.append(caller.log.describe("q").dead)
            if not said.answers:
                caller.turn()
                loop.call_soon(look)

        fields = {"queue": "q", "dead": True}
        CALLS["purge"](caller.context, fields, memoryview(b""), said)
        look()
        for _ in range(ROUNDS_MAX):
            if said.answers:
                return
            await asyncio.sleep(0)

    asyncio.run(run())
    assert said.answers[0][0]["count"] == 5
    assert {4, 3, 2, 1, 0} <= set(seen)


def test_many_who_purge_at_once_take_one_step_in_a_turn(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operate, "RUNS_A_STEP", 1)
    queues = [f"q{number}" for number in range(8)]
    for queue in queues:
        caller.kill(queue, 5)
    said = [Said() for _ in queues]

    def dead() -> list[int]:
        return [caller.log.describe(queue).dead for queue in queues]

    async def run() -> None:
        for queue, answer in zip(queues, said, strict=True):
            CALLS["purge"](caller.context, {"queue": queue, "dead": True}, memoryview(b""), answer)
        before = dead()
        while sum(before):
            await asyncio.sleep(0)
            after = dead()
            assert sum(before) - sum(after) <= 1
            assert max(after) - min(after) <= 1, "they do not take turns"
            before = after
        for _ in range(ROUNDS_MAX):
            caller.turn()
            await asyncio.sleep(0)

    asyncio.run(run())
    assert [answer.answers[0][0]["count"] for answer in said] == [5] * len(queues)


def test_a_failure_between_two_steps_is_told(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operate, "RUNS_A_STEP", 1)
    caller.kill("q", 5)
    said = Said()

    async def run() -> None:
        CALLS["purge"](caller.context, {"queue": "q", "dead": True}, memoryview(b""), said)
        caller.log._committer.fail(OSError("the disk is on fire"))
        for _ in range(ROUNDS_MAX):
            if said.answers:
                return
            await asyncio.sleep(0)

    asyncio.run(run())
    assert said.answers[0][0]["error"]["kind"] == "failed"
    assert "on fire" in str(caller.failures[0])


# --- readers -----------------------------------------------------------------------------------


def test_a_reader_from_its_first_word_to_its_last(caller: Caller) -> None:
    caller.append("a", b"1", b"2", b"3")
    caller.append("b", b"1")
    hold = {"name": "spark", "view": "messages", "lease_seconds": 60, "readers_max": 9}
    answer = caller.ask("hold_reader", {**hold, "positions": {"a": 1, "b": 0}})
    spark = {
        "name": "spark",
        "view": "messages",
        "lease_seconds_left": 60.0,
        "queues": [
            {"queue": "a", "position": 1, "end": 3, "lag": 2, "capped": False},
            {"queue": "b", "position": 0, "end": 1, "lag": 1, "capped": False},
        ],
    }
    assert answer == {"reader": spark}
    caller.log.purge("a", caller.now)
    other = caller.ask(
        "hold_reader", {**hold, "name": "audit", "view": "events", "positions": {"a": 2}, "lease_seconds": 1}
    )
    assert other["reader"]["queues"] == [{"queue": "a", "position": 2, "end": 6, "lag": 4, "capped": False}]
    assert [reader["name"] for reader in caller.ask("readers")["readers"]] == ["spark", "audit"]
    caller.now += 70_000_000
    assert [reader["lease_seconds_left"] for reader in caller.ask("readers")["readers"]] == [0, 0]
    assert caller.ask("release_reader", {"name": "spark"}) == {}
    assert caller.refused("release_reader", {"name": "spark"})[0] == "no-reader"
    assert [reader["name"] for reader in caller.ask("readers")["readers"]] == ["audit"]
    assert caller.refused("hold_reader", {**hold, "positions": {"a": 0, "nowhere": 0}})[0] == "no-queue"


# --- the broker itself -------------------------------------------------------------------------


def test_connections_are_shown_in_parts(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "ROWS_MAX", 2)
    lines = [caller.line(f"phpmq:{i}") for i in range(5)]
    lines[1].say(Consume("q", 1), Consume("q", 1, dead=True))
    lines[2].is_held = True
    caller.append("q", b"a")
    caller.broker.blocked(lines[1], True)
    lines[1].connected -= 2.5
    caller.now += 1_000_000_000  # The time of day has nothing to do with it.
    first = caller.ask("connections", {"after": 0})
    assert 2.5 <= first["connections"][1].pop("connected_seconds") < 100
    assert first["connections"][1] == {
        "number": first["connections"][0]["number"] + 1,
        "name": "phpmq:1",
        "client": "127.0.0.1:4711",
        "protocol": "phpmq",
        "peer": "127.0.0.1:4711",
        "user": "",
        "consumes": [{"queue": "q", "dead": False}, {"queue": "q", "dead": True}],
        "sends": [{"queue": "sent.to", "count": 7}],
        "queues": ["q", "sent.to"],
        "others": False,
        "sent": 7,
        "delivered": 1,
        "settled": 0,
        "held": 1,
        "blocked": True,
        "held_back": False,
        "said": "publish",
        "bytes_in": 5,
        **dict.fromkeys(("certificate", "listener", "front_end"), ""),
        **dict.fromkeys(("said_seconds", "heard_seconds", "blocked_seconds", "held_back_seconds", "pulse")),
        **dict.fromkeys(("bytes_out", "input_bytes", "output_bytes")),
    }
    found = first["connections"]
    after = first["next"]
    while after is not None:
        part = caller.ask("connections", {"after": after})
        assert len(part["connections"]) <= 2
        found += part["connections"]
        after = part["next"]
    assert [it["name"] for it in found] == [line.name for line in lines]
    assert [it["held_back"] for it in found] == [False, False, True, False, False]


def test_a_connection_that_consumes_much_is_an_answer_of_its_own(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "CONSUMES_MAX", 3)
    greedy, modest = caller.line("greedy"), caller.line("modest")
    greedy.say(*[Consume(f"q{i}", 1) for i in range(5)])
    modest.say(Consume("q0", 1))
    first = caller.ask("connections", {"after": 0})
    assert [it["name"] for it in first["connections"]] == ["greedy"]
    rest = caller.ask("connections", {"after": first["next"]})
    assert ([it["name"] for it in rest["connections"]], rest["next"]) == (["modest"], None)


def test_nobody_is_connected(caller: Caller) -> None:
    assert caller.ask("connections", {"after": 0}) == {"connections": [], "next": None}


def test_the_engine_says_how_it_is(caller: Caller, tmp_path: Path) -> None:
    caller.append("q", b"x" * 5000)
    answer = caller.ask("engine")
    assert 3 <= answer.pop("uptime_seconds") < 100
    sync = answer.pop("sync")
    assert answer.pop("disk_bytes_reserve") == min(1 << 30, answer["disk_bytes_total"] // 4)
    assert (answer.pop("disk_bytes_total") >= answer.pop("disk_bytes_free")) > 0
    assert answer.pop("position") >= answer.pop("log_bytes") > 5000
    assert answer.pop("disk_room_in") == answer["data"]
    assert answer.pop("data").startswith(str(tmp_path))
    assert answer == {
        "engine": "log",
        "opening": 1,
        "segments": 1,
        "bytes_in_flight": 0,
        "full": False,
        "failed": None,
        "damage": [],
        "readers": 0,
        "stages": {"count": 0, "bytes": 0, "oldest_seconds": None},
        "cluster": None,
        "connections": 0,
        "durability": "commit",
        "listeners": [],
        "version": __version__,
        "memory": {"held_bytes": 0, "limit_bytes": 1 << 20, "closed": 0, "broadcasts_lost": 0},
    }
    assert sync["count"] == sum(sync["buckets"]) > 0
    assert len(sync["buckets"]) == len(SYNC_BOUNDS_SECONDS) + 1
    assert 0 < sync["p50_seconds"] <= sync["p99_seconds"]
    assert 0 < sync["last_seconds"] <= sync["seconds_sum"]


def test_who_asks_briefly_is_told_of_nodes_and_checks_alone(caller: Caller) -> None:
    caller.log.cluster = lambda: {"nodes": [1], "checks": [2], "shards": [3], "members": [4]}
    assert caller.ask("engine", {"brief": True})["cluster"] == {"nodes": [1], "checks": [2]}
    assert caller.ask("engine")["cluster"] == caller.log.cluster()
    assert caller.ask("health", {"brief": True})["cluster"] is None
    assert caller.ask("health")["cluster"] == caller.log.cluster()


def test_health(caller: Caller) -> None:
    assert caller.ask("health") == {"ready": True, "reason": "", "cluster": None, "warnings": []}
    caller.broker.suspend(True)
    assert caller.ask("health")["reason"].startswith("the cluster does not answer: ")
    caller.broker.suspend(False)
    assert caller.ask("health")["ready"] is True
    caller.broker.drain()
    assert caller.ask("health")["reason"] == "the broker is stopping"
    assert caller.ask("health")["ready"] is False
    caller.log._committer.fail(OSError("the disk is on fire"))
    answer = caller.ask("health")
    assert (answer["ready"], "on fire" in answer["reason"]) == (False, True)


# --- verdicts that come along with a take ---------------------------------------------------------


def take_along(caller: Caller, verdict: Verdict | None, queue: str = "q") -> tuple[Said, list[bytes]]:
    """What a take of two messages is answered with, its own turn included; and the payloads."""
    fields: Fields = {"take": caller.now, "queue": "q", "dead": False}
    fields |= {"max": 2, "wait_us": 0, "lease_us": 60_000_000, "consumer": "ann:1", "user": "", "agent": ""}
    buffers: list[Buffer] = []
    if verdict is not None:
        packed, buffers = pack_verdicts(queue, [verdict])
        fields["settle"] = {"n": 7, **packed}
    said = Said()
    CALLS["take"](caller.context, fields, memoryview(b"".join(buffers)), said)
    assert not said.answers
    assert verdict is None or not said.others[7].answers, "nothing is on the disk so far"
    caller.now += 1
    caller.turn()
    ((answer, body),) = said.answers
    parts = unpack_taken(answer, memoryview(body)).parts
    return said, [part.payload[lo:hi] for part in parts for lo, hi in pairwise(part.bounds)]


def test_verdicts_along_with_a_take_are_carried_out_first_and_told_when_synced(caller: Caller) -> None:
    caller.append("q", *(b"%d" % number for number in range(5)))
    said, payloads = take_along(caller, None)
    assert payloads == [b"0", b"1"]
    origin = unpack_taken(said.answers[0][0], memoryview(said.answers[0][1])).parts[0].origin
    verdict = Verdict("ack", origin, array("q", [0, 1, 4]), array("i", [0, 0, 0]))
    said, payloads = take_along(caller, verdict)
    assert payloads == [b"2", b"3"]
    assert said.others[7].answers == [({"done": [2], "gone": [[4]]}, b"")]


def test_what_is_wrong_with_verdicts_keeps_nobody_from_taking(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller.append("q", b"a", b"b")

    def refuse(*_: object) -> None:
        raise LogRefused("not this time")

    monkeypatch.setattr(messages, "Ruling", refuse)
    verdict = Verdict("ack", b"0" * 18, array("q", [0]), array("i", [0]))
    fields, buffers = pack_verdicts("q", [verdict])
    asked: Fields = {"take": 1, "queue": "q", "dead": False, "max": 2, "wait_us": 0, "lease_us": 1_000_000}
    asked |= {"consumer": "ann:1", "user": "", "agent": "", "settle": {"n": 7, **fields}}
    said = Said()
    CALLS["take"](caller.context, asked, memoryview(b"".join(buffers)), said)
    caller.turn()
    assert said.others[7].answers[0][0]["error"]["detail"] == "not this time"
    assert said.answers[0][0]["parts"][0]["count"] == 2
