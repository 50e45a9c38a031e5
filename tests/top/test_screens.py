"""The screens of `penstock top` without a terminal: many queues, long messages, sizes, the mouse, faults."""

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from textual.pilot import Pilot

from penstock.cli.main import COMMANDS, command_parser, load, main
from penstock.top.app import Top
from penstock.top.feed import Feed
from penstock.top.overview import Overview
from penstock.top.queue import QueueScreen
from penstock.top.table import QueueTable
from tests.http.api import NDJSON, Api
from tests.http.morgue import path_of
from tests.seeds import some
from tests.server.harness import WAIT_SECONDS, BrokerProcess

MANY = 1000

Drive = Callable[[Top, Pilot[int]], Awaitable[None]]


@pytest.fixture(scope="module")
def crowded(broker: BrokerProcess) -> BrokerProcess:
    """A broker with a thousand queues."""
    with Api(broker.ports["http"]) as api:
        for number in range(MANY):
            api.send(f"many.{number:04}", *[b"x"] * (1 + number % 3))
    return broker


def program(broker: BrokerProcess, *arguments: str) -> Top:
    command = load("top", COMMANDS)
    url = f"http://127.0.0.1:{broker.ports['http']}"
    args = command_parser("top", command).parse_args(["--url", url, *arguments])
    feed = Feed(args)
    return Top(args, feed, feed.look())


def run(app: Top, drive: Drive, size: tuple[int, int] = (80, 24)) -> None:
    async def go() -> None:
        async with app.run_test(size=size) as pilot:
            await drive(app, pilot)

    asyncio.run(go())


async def until(pilot: Pilot[int], condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        await pilot.pause(0.01)


def table_of(app: Top) -> QueueTable:
    (overview,) = (screen for screen in app.screen_stack if isinstance(screen, Overview))
    return overview.table


def lines_of(table: QueueTable) -> list[str]:
    return [table.render_line(y).text.strip() for y in range(table.size.height)]


def name_at_cursor(app: Top) -> str:
    current = table_of(app).current
    assert current is not None
    return str(current["name"])


# --- very many queues ----------------------------------------------------------------------------------


@pytest.mark.long
def test_a_thousand_queues(crowded: BrokerProcess) -> None:
    app = program(crowded, "many.*")

    async def drive(app: Top, pilot: Pilot[int]) -> None:
        table = table_of(app)
        assert table.count == MANY
        assert lines_of(table)[1].startswith("many.0000")
        await pilot.press("end")
        assert lines_of(table)[-1].startswith("many.0999")
        await pilot.press("pageup", "up")
        assert name_at_cursor(app) < "many.0985"
        await pilot.press("home", "down", "down")
        assert name_at_cursor(app) == "many.0002"
        # The cursor goes with its queue, and the screen with the cursor.
        await pilot.press("S")
        assert name_at_cursor(app) == "many.0002"
        assert lines_of(table)[0].startswith("QUEUE▼")
        assert any(line.startswith("many.0002") for line in lines_of(table))
        await pilot.press("slash", *"0999")
        await until(pilot, lambda: table.count == 1, "the filter")
        await pilot.press("enter")
        assert name_at_cursor(app) == "many.0999"

    run(app, drive)


def test_a_round_with_a_thousand_queues_is_cheap(crowded: BrokerProcess) -> None:
    app = program(crowded)

    async def drive(app: Top, pilot: Pilot[int]) -> None:
        table, snapshot = table_of(app), app.state.snapshot
        began = time.process_time()
        for _ in range(10):
            app.state.take(snapshot)
            table.sort_by("ready")
            table.show(snapshot.queues)
            lines_of(table)
        # A tenth of a core at most, where a round is a second.
        assert (time.process_time() - began) / 10 < 0.1

    run(app, drive)


@pytest.mark.parametrize("size", some([(20, 5), (40, 10), (80, 24), (250, 80)], (20, 5), (80, 24)))
def test_every_size_of_terminal(crowded: BrokerProcess, size: tuple[int, int]) -> None:
    app = program(crowded, "many.000?")

    async def drive(app: Top, pilot: Pilot[int]) -> None:
        await pilot.press("s", "enter")
        await until(pilot, lambda: isinstance(app.screen, QueueScreen), "the queue's screen")
        await until(pilot, lambda: app.state.snapshot.opened is not None, "what is asked for it")
        await pilot.resize_terminal(size[0] + 30, size[1] + 3)
        await pilot.press("escape", "p", "n")
        await until(pilot, lambda: isinstance(app.screen, Overview), "the overview")

    run(app, drive, size)


# --- very long messages --------------------------------------------------------------------------------


def test_messages_that_do_not_fit_into_an_answer(broker: BrokerProcess, api: Api) -> None:
    body = base64.b64encode(b"y" * (3 << 20))
    for _ in range(6):
        line = b'{"value_base64": "%s"}\n' % body
        reply = api.ask("POST", path_of("long.one", "batch"), line, {"Content-Type": NDJSON})
        assert reply.status == 200, reply
    app = program(broker, "long.*")

    async def drive(app: Top, pilot: Pilot[int]) -> None:
        await pilot.press("enter")
        await until(pilot, lambda: app.state.snapshot.opened is not None, "the queue")
        opened = app.state.snapshot.opened
        assert opened is not None
        # The last one is there; as many others as fit.
        assert opened.messages[0]["offset"] == 5
        assert 1 <= len(opened.messages) < 6

    run(app, drive)


def test_the_messages_of_a_queue_that_was_made_anew_are_its_own(broker: BrokerProcess, api: Api) -> None:
    """However much it looks like the one that was deleted."""
    api.send("anew.one", b"old")
    feed = program(broker, "anew.*").feed
    feed.open("anew.one")
    with feed._admin:
        for body in (b"old", b"new"):
            opened = feed.look().opened
            assert opened is not None
            assert [base64.b64decode(it["value_base64"]) for it in opened.messages] == [body]
            assert api.ask("DELETE", path_of("anew.one")).status == 200
            api.send("anew.one", b"new")


# --- the mouse -----------------------------------------------------------------------------------------


def test_the_mouse_sorts_and_opens(crowded: BrokerProcess) -> None:
    app = program(crowded, "many.00??")

    async def drive(app: Top, pilot: Pilot[int]) -> None:
        table = table_of(app)
        ready = lines_of(table)[0].index("READY")
        await pilot.click(QueueTable, offset=(ready + 2, 0))
        assert (table.sort, table.reversed) == ("ready", False)
        await pilot.click(QueueTable, offset=(ready + 2, 0))
        assert (table.sort, table.reversed) == ("ready", True)
        await pilot.click(QueueTable, offset=(2, 0))
        assert (table.sort, table.reversed) == ("name", False)
        await pilot.click(QueueTable, offset=(4, 3))
        assert name_at_cursor(app) == "many.0002"
        await pilot.click(QueueTable, offset=(4, 4), times=2)
        await until(pilot, lambda: isinstance(app.screen, QueueScreen), "the queue's screen")
        assert isinstance(app.screen, QueueScreen)
        assert app.screen.queue == "many.0003"

    run(app, drive)


# --- faults of ours ------------------------------------------------------------------------------------


def test_a_fault_in_the_feed_is_not_kept_quiet(
    crowded: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = program(crowded)

    def broken(_feed: Feed) -> Any:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(Feed, "look", broken)

    async def drive(app: Top, pilot: Pilot[int]) -> None:
        await until(pilot, lambda: app.fault is not None, "the fault")

    run(app, drive)
    assert isinstance(app.fault, ZeroDivisionError)
    assert app.return_value == 1


def test_an_empty_pattern_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", ""]) == 2
    assert "the pattern is empty" in capsys.readouterr().err
