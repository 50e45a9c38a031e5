"""Feed: asks the HTTP API once a second, in a thread of its own, and tells what it said.

One connection, one question at a time, and never more than half of the time is spent asking: a broker with
very many queues is asked less often. Connections and the engine, which change slowly and cost the broker
more, are asked for every `SLOW_ROUNDS` rounds. Of one queue, the one that is open, everything is asked for;
of the lists (`views.py`), the one that is open.

How it fails: a broker that is gone, does not answer within `ANSWER_SECONDS` or says no becomes a `Trouble`
with its sentence, and the next round comes as always. The thread is a daemon: who leaves does not wait for an
answer that may never come.
"""

import argparse
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from penstock.cli import queues as listing
from penstock.cli.admin import Admin
from penstock.cli.show import consumers_of
from penstock.client.errors import Refused
from penstock.client.http_core import Answer
from penstock.errors import PenstockError
from penstock.top.views import VIEWS

ROUND_SECONDS: Final = 1.0
ANSWER_SECONDS: Final = 10.0
SLOW_ROUNDS: Final = 5
ATTENTION: Final = 20
"""How much of what needs attention is asked for."""

MESSAGES: Final = 20
"""How many of the last messages of a queue are shown."""


class Opened(NamedTuple):
    """One queue with everything about it, the newest message first; or `gone`: why it is not there."""

    name: str
    queue: Answer | None = None
    consumers: Sequence[Answer] = ()
    messages: Sequence[Answer] = ()
    gone: str = ""


class Listed(NamedTuple):
    """One of the lists of `views.py`."""

    view: str
    rows: list[Answer]


class Snapshot(NamedTuple):
    """What one round has found."""

    queues: list[Answer]
    total: Mapping[str, Any]
    connections: int
    engine: Answer
    opened: Opened | None = None
    attention: Sequence[Answer] = ()  # the worst first
    attention_count: int = 0
    listed: Listed | None = None


class Trouble(NamedTuple):
    """Why a round has found nothing."""

    why: str


class Feed:
    """`start` begins it, `stop` ends it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._admin = Admin(args, ANSWER_SECONDS)
        self.url = self._admin.url
        self._rounds = 0
        self._connections: list[Answer] = []
        self._engine: Answer = {}
        self._name: str | None = None
        self._view: str | None = None
        self._messages = MESSAGES
        self._peeked: tuple[object, list[Answer]] = (None, [])
        self._stopped = threading.Event()
        self._wake = threading.Event()

    def start(self, tell: Callable[[Snapshot | Trouble], object]) -> None:
        """Begin: `tell` is called in the feed's thread, after every round."""
        threading.Thread(target=self._run, args=(tell,), name="feed", daemon=True).start()

    def stop(self) -> None:
        """Ask nothing more. Whoever waits for an answer goes on waiting, in the background."""
        self._stopped.set()
        self._wake.set()

    def open(self, name: str | None) -> None:
        """From now on everything about this queue; at once."""
        self._name = name
        self._messages = MESSAGES
        self._wake.set()

    def watch(self, view: str | None) -> None:
        """From now on this list, too; at once."""
        self._view = view
        self._wake.set()

    def hurry(self) -> None:
        """The next round at once: something has been done."""
        self._wake.set()

    def _run(self, tell: Callable[[Snapshot | Trouble], object]) -> None:
        with self._admin:
            while not self._stopped.is_set():
                began = time.monotonic()
                self._wake.clear()
                try:
                    found: Snapshot | Trouble = self.look()
                except PenstockError as error:
                    self._rounds = 0  # who comes back may be another one
                    found = Trouble(str(error))
                if not self._stopped.is_set():
                    tell(found)
                took = time.monotonic() - began
                self._wake.wait(max(ROUND_SECONDS - took, took))

    # --- one round -----------------------------------------------------------------------------------

    def look(self) -> Snapshot:
        """One round."""
        queues = listing.find(self._admin, self._args)
        name = self._name
        if self._rounds % SLOW_ROUNDS == 0:
            self._engine = self._admin.get("engine")
            self._connections = self._admin.get("connections")["connections"]
        self._rounds += 1
        opened = None if name is None else self._look_into(name)
        health, view = self._health(), self._view
        return Snapshot(
            queues,
            listing.totals(queues),
            len(self._connections),
            self._engine,
            opened,
            health["attention"],
            health["bad"] + health["warn"],
            None if view is None else Listed(view, VIEWS[view].ask(self._admin, queues)),
        )

    def _health(self) -> Answer:
        try:
            return self._admin.get("health", limit=ATTENTION)
        except Refused as error:
            if error.status != 404:  # An older broker does not look at itself.
                raise
            return {"attention": [], "bad": 0, "warn": 0}

    def _look_into(self, name: str) -> Opened:
        try:
            queue = self._admin.get("queues", name)
        except Refused as error:
            if error.status != 404:
                raise
            return Opened(name, gone=error.detail)
        if queue["consumers"] != len(consumers_of(name, self._connections)):
            self._connections = self._admin.get("connections")["connections"]
        return Opened(name, queue, consumers_of(name, self._connections), self._last_messages(queue))

    def _last_messages(self, queue: Answer) -> list[Answer]:
        """Asked for only where something has happened: their bodies may be long."""
        fields = ("name", "identity", "offset_end", "event_end", "ready", "held", "dead")
        seen = tuple(queue.get(field) for field in fields)  # an older broker tells no identity
        if self._peeked[0] != seen:
            self._peeked = (seen, self._peek(queue))
        return self._peeked[1]

    def _peek(self, queue: Answer) -> list[Answer]:
        while True:
            start = max(queue["offset_start"], queue["offset_end"] - self._messages)
            page = self._admin.get(
                "queues", queue["name"], "messages", limit=self._messages, **{"from": start}
            )
            found: list[Answer] = page["messages"]
            if page["next"] is None or page["next"] >= queue["offset_end"] or self._messages == 1:
                return found[::-1]
            # The bodies of so many do not fit into an answer: the last ones are what counts.
            self._messages = max(self._messages // 4, 1)
