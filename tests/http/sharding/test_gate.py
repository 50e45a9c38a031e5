"""Whose word front-ends take for who asks, and how long they wait for each other."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.control.gauge import Gauge, gauge_file
from penstock.http.app import App
from penstock.http.auth import USER, Guard
from penstock.http.connection import CONNECTION
from penstock.http.held import Held
from penstock.http.problems import Problem
from penstock.http.sharding import gate as gate_module
from penstock.http.sharding.gate import NAMED, THEIRS, Gate
from penstock.model.shards import shard_of
from tests.http.sharding.test_others import ANSWER, answered, made, running
from tests.http.sharding.test_streams import Caller, told

NAMES = ("anna", "?", "Jürgen", "Ж", "a b", "50%41", "\N{SNOWMAN}\N{SNOWMAN}")


def gate() -> tuple[Gate, Guard]:
    users = [
        {"name": name, "hashes": [f"hash of {name}"], "grants": [], "admin": False, "expires_us": 0}
        for name in NAMES
    ]
    guard = Guard([], users)
    base: Any = SimpleNamespace(guard=guard)  # as much of a site as this needs
    return Gate(base, base, base), guard


def heard(own: Gate, headers: list[tuple[bytes, bytes]], *, is_handed_over: bool) -> dict[str, Any]:
    connection = SimpleNamespace(is_handed_over=is_handed_over)
    return dict(own._believed({"type": "http", "headers": headers, CONNECTION: connection}))


@pytest.mark.parametrize("name", NAMES)
def test_a_visitor_is_the_same_one_at_another_front_end(name: str) -> None:
    """Whatever he is called: `?` is not everybody whose name cannot be written."""
    own, guard = gate()
    said = own._with_user({USER: lambda: guard.named(name)}, [(b"authorization", b"Bearer x")])
    assert [it for it, _ in said] == [NAMED]
    there = heard(own, said, is_handed_over=True)
    assert there[USER]().name == name
    assert there["headers"] == []


def test_nobody_else_is_believed() -> None:
    own, _ = gate()
    scope = heard(own, [(NAMED, b"anna"), (NAMED, b"anna"), (b"host", b"x")], is_handed_over=False)
    assert USER not in scope
    assert scope["headers"] == [(b"host", b"x")]


# --- who has led, and stands still ---------------------------------------------------------------------

BEGUN = ANSWER.replace(b"length: 2", b"length: 9")


class Asking(Caller):
    """One who asks about a queue, through a gate."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.aborted = asyncio.Event()
        self.lost = asyncio.get_running_loop().create_future()
        self.transport = SimpleNamespace(abort=self.abort)
        self.is_handed_over = False
        path = b"/v1/queues/q/messages"
        self.scope.update({"method": method, "raw_path": path, "client": ("1.2.3.4", 5), CONNECTION: self})

    def abort(self) -> None:
        self.aborted.set()
        self.lost.set_result(None)


@pytest.mark.parametrize("method", ["GET", "POST"])
@running
async def test_who_leads_no_more_is_not_waited_for(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may stand still, and its connections with it."""
    monkeypatch.setattr(gate_module, "MOVED_SECONDS", 0.05)
    with made() as (others, ways):
        guard: Any = SimpleNamespace(guard=Guard([]))
        own = Gate(guard, guard, others)
        own.set_shards({"leaders": ["b"], "own": "a"}, {}, {})
        waiting, reading, used = (Asking(method) for _ in range(3))
        calls = []
        for number, (asking, answer) in enumerate(((waiting, b""), (reading, BEGUN), (used, ANSWER))):
            calls.append(asyncio.ensure_future(own(asking.scope, asking.receive, asking.send)))
            await answered(ways, number, answer)
        await told(calls.pop())
        own.set_shards({"leaders": ["c"], "own": "a"}, {}, {})
        own.set_shards({"leaders": ["b"], "own": "a"}, {}, {})  # It was only away for a moment.
        await told(reading.hears.wait())
        assert not any(call.done() for call in calls)
        own.set_shards({"leaders": ["c"], "own": "a"}, {}, {})
        for call in calls:
            await told(call)
        assert waiting.status == 503
        problem = json.loads(waiting.heard)
        if method == "GET":
            assert problem["type"] == "urn:penstock:no-leader"
        else:
            assert problem["type"] == "urn:penstock:unavailable"
            assert "not known whether this was carried out" in problem["detail"]
        assert (reading.status, reading.heard, reading.aborted.is_set()) == (200, b"ok", True)
        assert (used.status, used.heard, used.aborted.is_set()) == (200, b"ok", False)
        assert not own._away


# --- several logs --------------------------------------------------------------------------------------


@running
async def test_a_reader_goes_on_holding_where_one_log_is_led_by_nobody() -> None:
    """Or what the others have for it would be removed, when its lease there ends."""
    held: list[dict[str, int]] = []

    async def log(scope: Any, receive: Any, send: Any) -> None:
        held.append(json.loads((await receive())["body"])["positions"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    with made() as (others, _):
        site: Any = SimpleNamespace(
            guard=Guard([]),
            held=Held(Gauge(gauge_file()), 1 << 20),
            body_bytes_max=1 << 20,
            frame_seconds=5,
        )
        own = Gate(site, App(site, ()), others)
        queues = {shard_of(name, 3): name for name in "abcdefghi"}
        app: Any = log
        own.set_shards({"leaders": ["", "us", "us"], "own": "us"}, {1: app, 2: app}, {})
        caller = Putting({"positions": dict.fromkeys(queues.values(), 7)})
        await told(own(caller.scope, caller.receive, caller.send))
        assert caller.status == 503
        assert sorted(map(sorted, held)) == sorted([queues[shard]] for shard in (1, 2))


class Putting(Caller):
    """A reader that says where it is."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        self.body = json.dumps(fields).encode()
        self.scope.update(method="PUT", raw_path=b"/v1/readers/r", client=("1.2.3.4", 5))

    async def receive(self) -> dict[str, Any]:
        return {"type": "http.request", "body": self.body, "more_body": False}


def test_what_another_front_end_has_sent_on_goes_no_further() -> None:
    """Or two who do not agree who leads would send it to each other."""
    own, _ = gate()
    own._leaders = ["b"]
    assert own._leader(0, {THEIRS: False}) == "b"
    with pytest.raises(Problem, match="not led here any more"):
        own._leader(0, {THEIRS: True})
