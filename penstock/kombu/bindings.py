"""Bindings: which queues get what is published to an exchange, the same for every process.

The broker knows queues only. So bindings are messages of a queue of their own (`QUEUE`), which nobody
consumes and everybody reads by offset: the latest that is said of an exchange, a key and a queue counts.

    {"exchange": "celeryev", "type": "topic", "key": "#", "queue": "celeryev.1f…", "seconds": 60, "ttl": 5000}

`seconds` is null for a binding that stays, 0 for one that has ended. Any other number is how long it holds,
by the broker's clock: of queues that end with their process (`auto_delete`, `exclusive`), which says so
again in time. One that was killed does not, and its queues are deleted by whoever tidies up next.

Tidying up: when there is much more in the queue than counts, what is at its head is taken; of it, what
counts is sent again and then all acknowledged. So at every moment everything that counts is in the queue,
ready or held, however many do this at a time and wherever they are killed.
"""

import json
import math
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple

from penstock.kombu.line import Answer

QUEUE: Final = "_kombu.bindings"
EXCHANGE_TYPES: Final = frozenset(["direct", "topic", "fanout"])
FRESH_SECONDS: Final = 1.0
"""What was read so lately is not read again before a message is published."""
PAGE: Final = 1000
TIDY_AT: Final = 100
"""So many entries that do not count are left lying around."""
TIDY_LEASE_SECONDS: Final = 60


class Key(NamedTuple):
    exchange: str
    key: str
    queue: str


@dataclass(frozen=True, slots=True)
class Binding:
    exchange: str
    type: str
    key: str
    queue: str
    seconds: float | None = None
    ttl: int | None = None  # of messages in this queue, in milliseconds

    @property
    def identity(self) -> Key:
        return Key(self.exchange, self.key, self.queue)


def binding_of(text: bytes) -> Binding | None:
    """None where somebody else has sent it, whatever it is."""
    try:
        fields = json.loads(text)
        binding = Binding(**{name: fields[name] for name in Binding.__slots__ if name in fields})
        numbers = [it for it in (binding.seconds, binding.ttl) if it is not None]
        is_one = all(isinstance(it, str) for it in binding.identity) and all(it >= 0 for it in numbers)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return binding if is_one and binding.type in EXCHANGE_TYPES else None


class Said(NamedTuple):
    """A binding, where it stands in the queue, and until when it holds by the broker's clock."""

    binding: Binding
    offset: int
    until: float


class Bindings:
    def __init__(self, ask: Callable[..., Answer]) -> None:
        self._ask = ask
        self._lock = threading.RLock()
        self._said: dict[Key, Said] = {}
        self._mine: dict[Key, Binding] = {}  # those that end with this connection
        self._last = -1, ""  # the offset and the id of the last one read
        self._read_at = -FRESH_SECONDS
        self._ahead = 0.0  # the broker's clock, seen from the monotonic one here

    def forked(self) -> None:
        """This is a child, and nothing is its own."""
        self._lock = threading.RLock()
        self._mine.clear()

    # --- what counts -------------------------------------------------------------------------------

    def of(self, exchange: str, *, anew: bool = False) -> list[Binding]:
        """The bindings of an exchange; `anew`: with those of this moment."""
        with self._lock:
            if anew or time.monotonic() - self._read_at >= FRESH_SECONDS:
                self._read()
            return [it.binding for it in self._living() if it.binding.exchange == exchange]

    def ttl_of(self, queue: str) -> int | None:
        """Of messages for a queue, where somebody has said so; in milliseconds."""
        with self._lock:
            return next((it.binding.ttl for key, it in self._said.items() if key.queue == queue), None)

    def add(self, binding: Binding) -> None:
        """From now on it holds; one with an end, for as long as `renew` is called in time."""
        with self._lock:
            if self._mine.get(binding.identity) == binding:
                return
            if binding.seconds is not None:
                self._mine[binding.identity] = binding
            elif binding in self.of(binding.exchange, anew=True):
                return
            self._send([binding])

    def remove(self, *keys: Key) -> None:
        with self._lock:
            ended = []
            for key in keys:
                self._mine.pop(key, None)
                said = self._said.pop(key, None)
                kind = said.binding.type if said is not None else "direct"
                ended.append(Binding(key.exchange, kind, key.key, key.queue, seconds=0))
            if ended:
                self._send(ended)

    def remove_queue(self, queue: str) -> None:
        with self._lock:
            self._read()  # Others may have bound it, and what we have said ourselves was not read so far.
            self.remove(*[key for key in {**self._said, **self._mine} if key.queue == queue])

    def renew(self) -> None:
        """Say again what ends with this connection, and tidy up where there is much to do."""
        with self._lock:
            if self._mine:
                self._send(self._mine.values())
                self._tidy()

    # --- the queue ---------------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic() + self._ahead

    def _living(self) -> list[Said]:
        now = self._now()
        return [it for it in self._said.values() if it.until > now]

    def _send(self, bindings: Iterable[Binding]) -> None:
        lines = (json.dumps({"value": json.dumps(asdict(it)), "retries": 255}) for it in bindings)
        body = "\n".join(lines).encode()
        self._ask("POST", "queues", QUEUE, "batch", body=body, media="application/x-ndjson")
        self._read_at = -FRESH_SECONDS

    def _read(self) -> None:
        """What was said since the last time. Another queue than the one of last time is read as a whole."""
        offset, id_ = self._last
        rows = self._rows(offset) if id_ else []
        if not rows or rows[0]["id"] != id_:
            self._said.clear()
            self._last = -1, ""
            # Who tidies up sends before it acknowledges: what was held at the first look and gone at the
            # second is found behind the others. What somebody held who was killed comes back in between, or
            # later, by `retry-delays`.
            looks = (self._rows(0, state=it) for it in ("ready", "held", "delayed", "ready"))
            found = {row["offset"]: row for rows in looks for row in rows}
            living = [found[at] for at in sorted(found)]
            rows = living + (self._rows(living[-1]["offset"] + 1) if living else [])
        for row in rows:
            self._last = row["offset"], row["id"]
            binding = binding_of(b64decode(row["value_base64"]))
            if binding is None:
                continue
            if binding.seconds == 0:
                self._said.pop(binding.identity, None)
                continue
            begun = datetime.fromisoformat(row["time"]).timestamp()
            until = math.inf if binding.seconds is None else begun + binding.seconds
            self._said[binding.identity] = Said(binding, row["offset"], until)
        self._read_at = time.monotonic()

    def _rows(self, start: int, state: str | None = None) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        at: int | None = start
        while at is not None:
            query = {"from": at, "limit": PAGE, "state": state}
            answer = self._ask("GET", "queues", QUEUE, "messages", query=query, allow=(404,))
            ahead = parsedate_to_datetime(answer.date).timestamp() - time.monotonic()
            # A date is whole seconds, rounded down: what seems a step back is none.
            if not -2 < ahead - self._ahead < 0:
                self._ahead = ahead
            page = answer.fields if answer.status < 400 else {"messages": [], "next": None}
            rows += page["messages"]
            at = page["next"]
        return rows

    def _tidy(self) -> None:
        row = self._ask("GET", "queues", QUEUE).fields
        if row["ready"] <= 2 * len(self._living()) + TIDY_AT:
            return
        query = {"max": PAGE, "lease": TIDY_LEASE_SECONDS}
        taken = self._ask("POST", "queues", QUEUE, "take", query=query).fields["messages"]
        self._read()
        offsets = {row["offset"] for row in taken}
        latest = [it for it in self._said.values() if it.offset in offsets]
        kept = [it for it in self._living() if it.offset in offsets]
        now = self._now()
        # What has an end keeps it, however often it is sent again.
        again = [
            it.binding if it.binding.seconds is None else replace(it.binding, seconds=it.until - now)
            for it in kept
        ]
        if again:
            self._send(again)
        ack = json.dumps({"ack": [row["id"] for row in taken]}).encode()
        self._ask("POST", "queues", QUEUE, "settle", body=ack, media="application/json")
        over = [it.binding for it in latest if it not in kept]
        for binding in over:
            del self._said[binding.identity]
        for queue in {it.queue for it in over} - {key.queue for key in self._said}:
            self._ask("DELETE", "queues", queue, allow=(403, 404, 409))
