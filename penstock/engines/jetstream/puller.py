"""Pulling from a consumer: as many messages as somebody has room for, and no silence that means nothing.

A `Puller` keeps one pull open at a consumer, for what is wanted and not on its way yet. The server sends
messages as they come, and a heartbeat when there are none. A leader that dies takes the pull with it and
nobody says so: the heartbeats stop. So when neither a message nor a heartbeat came for two intervals, the
pull counts as lost, and another one is made.

Rules that always hold:
  * Of what was wanted, never more is asked for than has not come yet. What a lost pull still sends comes on
    top; the consumer's own limit (`max_ack_pending`) bounds it.
  * A pull that ends (expired, its leader moved, the consumer was made anew) is followed by the next one as
    long as something is wanted. One that ends because of an error waits a moment before.

How it fails: `ended` is told when a consumer or its stream is gone, or does not take such pulls; nothing is
pulled from then on.
"""

import asyncio
import json
from collections.abc import Callable

from penstock.engines.jetstream.link import Link, Watcher
from penstock.protocols import nats_write
from penstock.protocols.errors import MisuseError
from penstock.protocols.nats import Messages, Status
from penstock.protocols.nats_headers import value_of

HEARTBEAT = 100
BAD_REQUEST = 400
FINAL_TEXTS = ("consumer deleted", "stream deleted", "consumer is push based", "exceeded maxrequest")
"""Among the words of a 409, which mostly means that a leader has moved, or that too many pulls wait."""

AGAIN_SECONDS = 0.1
_NANOSECONDS = 1_000_000_000


class Puller(Watcher):
    """The pulls of one front-end at one consumer."""

    def __init__(
        self,
        link: Link,
        stream: str,
        consumer: str,
        *,
        messages: Callable[[Messages], None],
        ended: Callable[[str], None],
        expires_seconds: float = 30.0,
        heartbeat_seconds: float = 0.5,
        bytes_max: int = 0,
    ) -> None:
        """Every batch goes to `messages`; `ended` is called with the reason when no more can come."""
        if 2 * heartbeat_seconds > expires_seconds:
            raise MisuseError(
                f"nats: no pull of {expires_seconds:g} s has heartbeats every {heartbeat_seconds:g} s; "
                "it must be twice as long"
            )
        self.losses = 0  # how often the heartbeats stopped
        self._link = link
        self._subject = nats_write.subject_bytes(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}")
        self._head = link.new_inbox()
        self._deliver = messages
        self._ended = ended
        self._pull: dict[str, int] = {
            "expires": int(expires_seconds * _NANOSECONDS),
            "idle_heartbeat": int(heartbeat_seconds * _NANOSECONDS),
        }
        if bytes_max:
            self._pull["max_bytes"] = bytes_max
        self._silence_seconds = 2 * heartbeat_seconds
        self._wanted = 0  # of these, `_asked` are asked for
        self._asked = 0
        self._pulls = 0
        self._pull_valid = 1  # the first one that is not lost
        self._heard = 0.0
        self._loop = asyncio.get_running_loop()
        self._watch: asyncio.TimerHandle | None = None
        self._gone = False
        self._sid = link.subscribe(self._head + b"*", self)
        link.watch(self)

    @property
    def wanted(self) -> int:
        """How many may still come."""
        return self._wanted

    def want(self, more: int) -> None:
        """There is room for so many more."""
        self._wanted += more
        # Topping up a pull that is half full costs a request and gains nothing.
        if self._asked <= self._wanted // 2:
            self._ask()

    def close(self) -> None:
        """Want nothing more. What is on its way is dropped; the server gives it to others after a while."""
        self._gone = True
        if self._watch is not None:
            self._watch.cancel()
        self._link.unsubscribe(self._sid)
        self._link.unwatch(self)

    def _ask(self) -> None:
        count = self._wanted - self._asked
        if count <= 0 or self._gone or not self._link.is_up:
            return
        self._pulls += 1
        question = json.dumps({"batch": count, **self._pull}, separators=(",", ":")).encode()
        reply = self._head + b"%d" % self._pulls
        self._link.write(nats_write.publish(self._subject, question, reply=reply))
        self._asked = self._wanted
        self._heard = self._loop.time()
        if self._watch is None:
            self._watch = self._loop.call_later(self._silence_seconds, self._look)

    def _ask_anew(self) -> None:
        """The pulls so far are lost; what they still say does not count."""
        self._pull_valid = self._pulls + 1
        self._asked = 0
        self._ask()

    def _look(self) -> None:
        """Finds out about a silence."""
        self._watch = None
        if self._gone or not self._asked:
            return
        quiet_seconds = self._loop.time() - self._heard
        if quiet_seconds >= self._silence_seconds:
            self.losses += 1
            self._ask_anew()
        else:
            self._watch = self._loop.call_later(self._silence_seconds - quiet_seconds, self._look)

    # --- the subscription ------------------------------------------------------------------------

    def messages(self, batch: Messages) -> None:
        self._heard = self._loop.time()
        self._wanted -= len(batch)
        self._asked = max(0, self._asked - len(batch))
        self._deliver(batch)

    def status(self, status: Status) -> None:
        self._heard = self._loop.time()
        if status.code == HEARTBEAT or self._gone:
            return
        text = status.text.lower()
        if status.code == BAD_REQUEST or any(words in text for words in FINAL_TEXTS):
            self._gone = True
            self._ended(status.text)
            return
        if int(status.subject[len(self._head) :]) < self._pull_valid:
            return
        # A pull has ended, and says how many it still owes.
        owed = value_of(status.headers, b"Nats-Pending-Messages")
        left = int(owed) if owed is not None and owed.isdigit() else self._asked
        self._asked = max(0, self._asked - left)
        if owed is not None:
            self._ask()
        else:
            self._loop.call_later(AGAIN_SECONDS, self._ask)

    # --- the link --------------------------------------------------------------------------------

    def up(self) -> None:
        self._ask_anew()
