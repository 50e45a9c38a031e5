"""One connection to one NATS server, and the questions that are open on it. The client is nats-py.

A `Wire` lives from a connection's beginning to its end; who makes the next one is `link.py`. nats-py would do
that by itself, but keeps what it has not written yet and writes it to the next server, whenever that is: a
purge, long after somebody else has begun to write. So each connection is a client of its own, that never
reconnects, over a transport of ours (`transport.py`) and with a parser for large messages (`parser.py`).
Those two are what nats-py has no public way for: they are set as `Client._transport` and `Client._ps`.
Questions and answers pass by nats-py's queues and the tasks behind them: without these, and without futures
of threads (`link_thread.py`), a record of the log takes 310 µs of CPU beside a front-end's loop, and not 390.

Rules that always hold:
  * `lost` is set exactly once, with a sentence that names the server, whatever ends the connection.
  * A server that says nothing for two intervals of pings is gone: what was sent to it may be lost.
  * A question is answered, or fails, within its seconds; a connection that is lost fails all that are open.

How it fails: `LinkError` out of `connect`; `LinkLost`, `NoAnswer`, `NotAllowed` out of questions; and
`JetStreamError` when nobody listens to the subject at all, because that is how JetStream says that it has no
leader at the moment.
"""

import asyncio
import errno
import logging
import math
import os
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nats import errors
from nats.aio.client import Client, RawCredentials

from penstock.log.jetstream.errors import (
    NO_RESPONDERS,
    Failure,
    JetStreamError,
    LinkError,
    LinkLost,
    NoAnswer,
    NotAllowed,
)
from penstock.log.jetstream.options import LinkOptions
from penstock.log.jetstream.parser import RecordParser
from penstock.log.jetstream.servers import Server
from penstock.log.jetstream.transport import WatchedTransport

END_OF_BATCH: Final = "204"
_NEVER_SECONDS: Final = 1 << 30

REFUSALS: Final = (
    "authorization violation",
    "authentication expired",
    "authentication timeout",
    "authentication revoked",
    "account authentication expired",
)
"""What a server says, among other words, when it does not take our credentials."""

_VIOLATION: Final = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')
_ALLOW: Final = "docs/cluster.md lists the permissions that it needs"

log = logging.getLogger("penstock.nats")

Answer = tuple[Mapping[str, str], bytes]
"""Headers and payload of a message."""


@dataclass(slots=True)
class _Question:
    subject: str
    future: "asyncio.Future[list[Answer]]"
    answers: list[Answer] | None  # None: the first answer is the only one


class _Client(Client):
    """nats-py's, that tells of a message at once."""

    def __init__(self, hear: Callable[[str, Mapping[str, str], bytes], None]) -> None:
        super().__init__()
        self._hear = hear

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None
    ) -> None:
        self._hear(subject.decode(), (await self._process_headers(headers)) or {}, data)


class Wire:
    """One connection. `connect` makes one."""

    def __init__(self, server: Server, options: LinkOptions) -> None:
        self.server = server
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.is_leaving = False
        self._options = options
        self._is_connecting = True
        self._transport = WatchedTransport(server, options, self._end)
        self._client = _Client(self._answered)
        self._client._transport = self._transport
        self._client._ps = RecordParser(self._client)
        self._head = ""
        self._deaf = ""  # why no answer can come
        self._number = 0
        self._open: dict[str, _Question] = {}

    # --- its life --------------------------------------------------------------------------------

    @classmethod
    async def connect(cls, server: Server, options: LinkOptions) -> "Wire":
        """A wire that the server has welcomed."""
        wire = cls(server, options)
        try:
            async with asyncio.timeout(options.connect_seconds):
                await wire._connect()
        except BaseException as error:
            await wire.close("")
            if isinstance(error, LinkError) or not isinstance(error, Exception):
                raise
            raise wire._why(error) from error
        return wire

    async def _connect(self) -> None:
        options, server = self._options, self.server
        credentials = options.credentials if not server.user else None
        seed, creds = None, None
        if credentials is not None and credentials.jwt:
            creds = RawCredentials(credentials.text)
        elif credentials is not None:
            seed = credentials.seed or None
        user, password = server.user, server.password
        if credentials is not None and credentials.user:
            user, password = credentials.user, credentials.password
        has_password = bool(user and password)
        await self._client.connect(
            [str(server)],
            name=options.name,
            allow_reconnect=False,
            pending_size=0,
            connect_timeout=math.ceil(options.connect_seconds),
            ping_interval=_NEVER_SECONDS,
            tls=options.tls,
            user=user if has_password else None,
            password=password if has_password else None,
            token=user if user and not has_password else None,
            inbox_prefix=options.answers,
            nkeys_seed_str=seed,
            user_credentials=creds,
            error_cb=self._failed,
            lame_duck_mode_cb=self._is_about_to_stop,
        )
        if not self._client.is_connected:
            raise LinkError(self.lost.result() if self.lost.done() else f"NATS server {server}: is none")
        self._is_connecting = False
        self._head = self._client.new_inbox() + "."
        await self._client.subscribe(self._head + "*")
        await self._client.flush()  # Questions are not written behind it, but past nats-py.
        self._transport.watch()

    def _why(self, error: Exception) -> LinkError:
        about = f"NATS server {self.server}"
        match error:
            case ssl.SSLError():
                return LinkError(f"{about}: no TLS with it ({error}); check its certificate")
            case TimeoutError():
                return LinkError(
                    f"{about}: did not welcome us within {self._options.connect_seconds:g} s; "
                    "is it a NATS server, and not overloaded?"
                )
            case OSError():
                # Event loops have words of their own for it; the system's can be looked up.
                reason = os.strerror(error.errno or 0) if error.errno in errno.errorcode else str(error)
                return LinkError(f"{about}: cannot be reached ({reason}); is it running?")
            case errors.Error():
                pass
            case _:  # nats-py could make nothing of what it said
                return LinkError(f"{about}: says what is not understood ({error!r})")
        text = _text_of(error)
        refused = any(words in text.lower() for words in REFUSALS)
        now = "; check user, password, token or credentials" if refused else ""
        return LinkError(f"{about}: says {text!r}{now}", refused=refused)

    async def close(self, reason: str = "closed by us") -> None:
        """End it; what waits to be written is lost."""
        self._is_connecting = False
        self._end(reason)
        self._transport.close()
        await self._client.close()

    def _end(self, reason: str) -> None:
        if self.lost.done():
            return
        said = self._client.last_error
        text = f"NATS server {self.server}: {reason}{f', having said {_text_of(said)!r}' if said else ''}"
        self.lost.set_result(text)
        for question in self._open.values():
            if not question.future.done():
                error = LinkLost(f"{question.subject}: {text} before it answered; ask again")
                question.future.set_exception(error)

    async def _failed(self, error: Exception) -> None:
        if self._is_connecting:
            raise error  # nats-py would try again
        if not self.lost.done():
            log.warning("NATS server %s: says %r", self.server, _text_of(error))
            self._forbidden(_text_of(error))

    def _forbidden(self, text: str) -> None:
        """A question that we may not ask has no answer to wait for; nor has any, where we may not hear it."""
        found = _VIOLATION.search(text)
        if found is None:
            return
        way, subject = found.groups()
        if way == "subscription":
            self._deaf = f"this user of NATS may not subscribe to {self._head}*; {_ALLOW}"
        for question in self._open.values():
            # nats-py tells it in small letters.
            if (way == "subscription" or question.subject.lower() == subject) and not question.future.done():
                why = self._deaf or f"this user of NATS may not publish to it; {_ALLOW}"
                question.future.set_exception(NotAllowed(f"{question.subject}: {why}"))

    async def _is_about_to_stop(self) -> None:
        self.is_leaving = True
        log.warning("NATS server %s: is about to stop; moving to another one", self.server)
        self._end("is about to stop")

    # --- what it is like -------------------------------------------------------------------------

    @property
    def info(self) -> Mapping[str, Any]:
        return self._transport.info

    @property
    def message_bytes_max(self) -> int:
        return self._client.max_payload

    @property
    def told_of(self) -> list[str]:
        """The other servers that this one tells of."""
        return [server.netloc for server in self._client.discovered_servers]

    # --- questions -------------------------------------------------------------------------------

    async def ask(
        self, subject: str, payload: bytes, headers: dict[str, str] | None, seconds: float, *, gather: bool
    ) -> list[Answer]:
        """The answer; with `gather` all of them, until the one that says that it was the last."""
        if self._deaf:
            raise NotAllowed(f"{subject}: {self._deaf}")
        if self.lost.done():
            raise LinkLost(f"{subject}: not sent to NATS ({self.lost.result()}); ask again")
        if len(payload) > self.message_bytes_max:
            raise LinkLost(f"{subject}: not sent to NATS (maximum payload exceeded); ask again")
        self._number += 1
        key = str(self._number)
        loop = asyncio.get_running_loop()
        question = self._open[key] = _Question(subject, loop.create_future(), [] if gather else None)
        late = loop.call_later(seconds, _late, question, seconds)
        try:
            # It waits for no room: a server that does not read is gone soon.
            self._transport.write(said(subject, self._head + key, payload, headers))
            return await question.future
        finally:
            late.cancel()
            del self._open[key]

    def _answered(self, subject: str, headers: Mapping[str, str], data: bytes) -> None:
        question = self._open.get(subject[len(self._head) :])
        if question is None or question.future.done():
            return
        status = headers.get("Status") if not data else None
        if status is None:
            answer = headers, data
            if question.answers is None:
                question.future.set_result([answer])
            else:
                question.answers.append(answer)
        elif status == END_OF_BATCH and question.answers is not None:
            question.future.set_result(question.answers)
        else:
            code = int(status)
            text = "nobody listens" if code == NO_RESPONDERS else headers.get("Description", "")
            question.future.set_exception(JetStreamError(question.subject, Failure(code, 0, text)))


def _late(question: _Question, seconds: float) -> None:
    if not question.future.done():
        error = NoAnswer(f"{question.subject}: no answer within {seconds:g} s; ask again")
        question.future.set_exception(error)


def said(subject: str, reply: str, payload: bytes, headers: Mapping[str, str] | None) -> bytes:
    """A question, as NATS reads it."""
    if not headers:
        return b"".join((f"PUB {subject} {reply} {len(payload)}\r\n".encode(), payload, b"\r\n"))
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    head = f"NATS/1.0\r\n{lines}\r\n".encode()
    line = f"HPUB {subject} {reply} {len(head)} {len(head) + len(payload)}\r\n".encode()
    return b"".join((line, head, payload, b"\r\n"))


def _text_of(error: Exception) -> str:
    return str(error).removeprefix("nats: ").strip("'")
