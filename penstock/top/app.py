"""Top: the program on the terminal: shows what the feed brings, and asks the broker for what keys say.

Everything here runs in Textual's loop and never waits: the feed has its thread, and an errand (pause,
redrive) has one of its own, with a connection of its own, so that a redrive of a million letters stops
nothing.

Colours are those of the terminal, by their names: it is readable on a light one and on a dark one, and
NO_COLOR leaves none of them. SIGTERM, SIGINT and Ctrl-C end it in order, and the terminal is as it was.
"""

import argparse
import asyncio
import signal
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Final, TypeVar

from textual import events
from textual.app import App
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.notifications import SeverityLevel
from textual.screen import ModalScreen

from penstock.cli.admin import Admin
from penstock.cli.connections import called, goes_back
from penstock.cli.main import EXIT_FAILURE
from penstock.cli.redrive import redrive
from penstock.common import tables, units
from penstock.errors import PenstockError
from penstock.top.dialog import Confirm
from penstock.top.feed import Feed, Snapshot, Trouble
from penstock.top.help import Help
from penstock.top.listing import Listing
from penstock.top.overview import Overview
from penstock.top.queue import QueueScreen
from penstock.top.state import State
from penstock.top.wishes import End, Open, Pause, PurgeLetters, Redrive, RedriveReason, ShowList

T = TypeVar("T")

EXIT_TERMINATED: Final = 128 + signal.SIGTERM
MESSAGE_SECONDS: Final = 6.0


class Fed(Message):
    """A round of the feed."""

    def __init__(self, found: Snapshot | Trouble) -> None:
        super().__init__()
        self.found = found


class Done(Message):
    """An errand is done."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self.then = then


class Broken(Message):
    """A thread has ended by a fault of ours."""

    def __init__(self, fault: BaseException) -> None:
        super().__init__()
        self.fault = fault


class Top(App[int]):
    """`first` is a snapshot that was taken before there was a screen.

    `fault` is what has ended a thread, and so the program, and should not have happened.
    """

    ENABLE_COMMAND_PALETTE = False
    TITLE = "penstock top"

    CSS = """
    * { scrollbar-size-vertical: 1; scrollbar-background: ansi_default; scrollbar-color: ansi_blue; }
    Screen { background: ansi_default; color: ansi_default; }
    Confirm { background: transparent; }
    Footer { background: ansi_default; color: ansi_default; padding: 0 1; }
    FooterKey, FooterKey:hover { background: ansi_default; color: ansi_default; }
    Footer.-compact FooterKey { margin-right: 2; }
    FooterKey .footer-key--key { background: ansi_default; color: ansi_cyan; text-style: bold; }
    FooterKey .footer-key--description { background: ansi_default; color: ansi_default; }
    Toast { background: ansi_default; color: ansi_default; padding: 0 1; width: auto; max-width: 76; }
    Toast.-information { border: round ansi_green; }
    Toast.-warning { border: round ansi_yellow; }
    Toast.-error { border: round ansi_red; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False),
    ]

    def __init__(self, args: argparse.Namespace, feed: Feed, first: Snapshot) -> None:
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"
        self.feed = feed
        self.state = State(first)
        self.fault: BaseException | None = None
        self._args = args

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.exit, EXIT_TERMINATED)
        loop.add_signal_handler(signal.SIGINT, self.exit, 0)
        threading.excepthook = self._end_of_thread
        self.push_screen(Overview(self.feed.url, self.state, self._args.sort, self._args.pattern))
        self.feed.start(lambda found: self.post_message(Fed(found)))

    def on_unmount(self) -> None:
        self.feed.stop()
        threading.excepthook = threading.__excepthook__

    def _end_of_thread(self, ended: threading.ExceptHookArgs) -> None:
        if ended.exc_value is not None:
            self.post_message(Broken(ended.exc_value))

    def on_broken(self, event: Broken) -> None:
        self.fault = event.fault
        self.exit(EXIT_FAILURE)

    def on_fed(self, event: Fed) -> None:
        self.state.take(event.found)
        for screen in self.screen_stack:
            if isinstance(screen, (Overview, QueueScreen, Listing)):
                screen.show()

    def on_open(self, wish: Open) -> None:
        self.push_screen(QueueScreen(self.feed, self.state, wish.queue))

    def on_show_list(self, wish: ShowList) -> None:
        self.push_screen(Listing(self.feed, self.state, wish.view))

    def on_key(self, event: events.Key) -> None:
        if isinstance(self.screen, Overview) and self.screen.took_stray(event):
            event.prevent_default()  # it is not a command

    def action_help(self) -> None:
        if not isinstance(self.screen, ModalScreen):
            self.push_screen(Help())

    async def action_quit(self) -> None:
        self.exit(0)

    # --- errands -------------------------------------------------------------------------------------

    def on_pause(self, wish: Pause) -> None:
        name = wish.queue
        verb, question = (
            ("resume", f"Hand out messages of {tables.shown(name)} again?")
            if wish.paused
            else ("pause", f"Pause {tables.shown(name)}? Nothing is handed out until it is resumed.")
        )

        def decided(yes: bool | None) -> None:
            if yes:
                self._errand(lambda admin: admin.post("queues", name, verb), said)

        def said(answer: Any) -> None:  # what the API says of it
            self.say(f"{tables.shown(name)} is {'paused' if answer['paused'] else 'not paused'}")

        self.push_screen(Confirm(question), decided)

    def on_redrive(self, wish: Redrive) -> None:
        self._redrive(wish.queue, {})

    def on_redrive_reason(self, wish: RedriveReason) -> None:
        self._redrive(wish.queue, {"reason": wish.reason})

    def _redrive(self, name: str, which: dict[str, str]) -> None:
        reason = f" ({which['reason']})" if which else ""

        def counted(found: dict[str, Any]) -> None:
            if not found["matched"]:
                self.say(f"{tables.shown(name)} has no dead letters to redrive")
                return
            letters = units.counted(found["matched"], "dead letter")
            question = f"Put {letters}{reason} of {tables.shown(name)} back, behind what waits there?"
            self.push_screen(Confirm(question), decided)

        def decided(yes: bool | None) -> None:
            if yes:
                self._errand(lambda admin: redrive(admin, name, {"dry_run": False, **which}), redriven)

        def redriven(found: dict[str, Any]) -> None:
            self.say(f"{tables.shown(name)}: redriven {units.counted(found['redriven'], 'dead letter')}")

        self._errand(lambda admin: redrive(admin, name, {"dry_run": True, **which}), counted)

    def on_purge_letters(self, wish: PurgeLetters) -> None:
        name = wish.queue

        def counted(queue: Any) -> None:
            letters = units.counted(queue["dead"], "dead letter")
            question = f"Throw away all {letters} of {tables.shown(name)}? They cannot be redriven then."
            self.push_screen(Confirm(question), decided)

        def decided(yes: bool | None) -> None:
            if yes:
                self._errand(lambda admin: admin.post("queues", name, "purge", dead=True), purged)

        def purged(answer: Any) -> None:
            self.say(f"{tables.shown(name)}: purged {units.counted(answer['purged'], 'dead letter')}")

        self._errand(lambda admin: admin.get("queues", name), counted)

    def on_end(self, wish: End) -> None:
        number = str(wish.number)

        def found(connection: Any) -> None:
            def decided(yes: bool | None) -> None:
                if yes:
                    name = connection["name"]
                    self._errand(lambda admin: admin.delete("connections", number, name=name), ended)

            self.push_screen(Confirm(f"End {called(connection)}? {goes_back(connection)}"), decided)

        def ended(answer: Any) -> None:
            held = units.counted(answer["held"], "message")
            self.say(f"ended {tables.shown(answer['name'])}, which held {held}")

        self._errand(lambda admin: admin.get("connections", number), found)

    def say(self, text: str, *, error: bool = False) -> None:
        """A message for a moment."""
        severity: SeverityLevel = "error" if error else "information"
        self.notify(text, severity=severity, timeout=MESSAGE_SECONDS, markup=False)

    def _errand(self, work: Callable[[Admin], T], then: Callable[[T], None]) -> None:
        """Ask the broker for something in a thread, then go on here; its no is shown as a message."""

        def run() -> None:
            try:
                with Admin(self._args) as admin:
                    found = work(admin)
            except PenstockError as error:
                why = tables.shown(str(error))
                self.post_message(Done(lambda: self.say(why, error=True)))
            else:
                self.post_message(Done(lambda: then(found)))

        threading.Thread(target=run, name="errand", daemon=True).start()

    def on_done(self, event: Done) -> None:
        self.feed.hurry()
        event.then()
