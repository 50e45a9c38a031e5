"""Quick: a short way for the call that is made most, `POST /v1/queues/{queue}/messages` with a small body.

The usual way (`app.py`) takes a task, a request, its parameters one by one and a response. Where sixteen
callers send on a busy machine it costs the second process 287 µs a message, and here 117; the first 120, and
here 83, for the messages of one turn of the loop that are for the same queue go as one batch.

Rules that always hold:
  * Nothing is answered here but a receipt. Whatever is not as usual goes the usual way, which says what is
    wrong: a query, a key, headers of the message, a caller who is not known or may not, a body that is large
    or has no room.
  * A batch that was refused was not stored: its messages go the usual way, one by one. Where nobody knows
    whether it was, all of them are told so.
"""

import asyncio
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from penstock.control.batches import pack_batch
from penstock.http.api.sending import HEADER_PREFIX, IN_DOUBT, PROTOCOL, SEND_PATH, in_doubt
from penstock.http.kinds import WrongValue
from penstock.http.link import CallRefused, LinkLost
from penstock.http.problems import Problem
from penstock.http.route import QUEUE
from penstock.http.site import Site
from penstock.http.stages.idempotency import HEADER
from penstock.model.batch import Batch
from penstock.model.ids import id_of
from penstock.model.rights import Right

if TYPE_CHECKING:
    from penstock.http.connection import BoundedProtocol
    from penstock.http.web_server import RequestResponseCycle

BODY_BYTES_MAX: Final = 16 * 1024
PATH_BYTES_MAX: Final = 512
"""Of paths that are remembered: whoever may not even send could have us keep a thousand of 64 KiB."""

_BEFORE, _, _BEHIND = (part.encode() for part in SEND_PATH.partition("{queue}"))
_KEY: Final = HEADER.lower().encode()
_ASKED: Final = frozenset({b"host", b"origin", b"authorization"})

Waiting = tuple["BoundedProtocol", "RequestResponseCycle", bytes]


class Quick:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._waiting: dict[str, list[Waiting]] = {}  # of this turn, by queue
        self._bytes = 0  # of their bodies
        self._bytes_max: int = site.hello["block_bytes"] // 2  # A batch must fit in a block.
        self._body_bytes_max = min(BODY_BYTES_MAX, site.payload_bytes_max, site.body_bytes_max)
        self._sending: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def take(self, connection: "BoundedProtocol", cycle: "RequestResponseCycle") -> bool:
        """Whether a request whose body is whole goes this way; it is answered later then."""
        scope = cycle.scope
        if scope["method"] != "POST" or scope["query_string"] or connection.flow.write_paused:
            return False
        queue = _queue_in(scope["raw_path"])
        if queue is None or len(cycle.body) > self._body_bytes_max:
            return False
        asked: dict[str, str] = {}
        for name, value in scope["headers"]:
            if name == _KEY or name.startswith(HEADER_PREFIX):
                return False
            if name in _ASKED:
                asked.setdefault(name.decode(), value.decode("latin-1"))
        body = bytes(cycle.body)
        if not self._may_send(asked, scope["client"], queue) or not self._site.held.hold_body(len(body)):
            return False
        sent = self._waiting.get(queue)
        if sent is None:
            sent = self._waiting[queue] = []
            task = self._loop.create_task(self._send(queue, sent))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        sent.append((connection, cycle, body))
        self._bytes += len(body)
        if self._bytes > self._bytes_max - BODY_BYTES_MAX:
            self._begin_anew()
        return True

    def _may_send(self, headers: Mapping[str, str], client: tuple[str, int] | None, queue: str) -> bool:
        try:
            user = self._site.guard.recall(headers, client[0] if client else "")
        except Problem:
            return False
        return user is not None and user.may(Right.SEND, queue)

    def _begin_anew(self) -> None:
        """Who comes from now on goes with others."""
        self._waiting, self._bytes = {}, 0

    async def _send(self, queue: str, sent: list[Waiting]) -> None:
        self._begin_anew()  # A task begins when the turn is over in which it was made.
        fields, buffers = pack_batch(Batch.of([body for _, _, body in sent], protocol=PROTOCOL))
        try:
            done = (await self._site.link.call("append", {"queue": queue, "batch": fields}, *buffers)).fields
        except CallRefused as refusal:
            problem = in_doubt(refusal, queue) if refusal.kind in IN_DOUBT else None
            if problem is not None:
                self._site.requests["POST", SEND_PATH, f"{problem.status // 100}xx"] += len(sent)
            for connection, cycle, _ in sent:
                connection.go_on(cycle, problem.response() if problem is not None else None)
            return
        except LinkLost:
            return  # So this process ends.
        finally:
            self._site.held.let_body_go(sum(len(body) for _, _, body in sent))
        first, origin = done["first"], done["origin"].encode()
        for offset, (connection, cycle, _) in enumerate(sent, first):
            connection.answer(
                cycle, b'{"offset":%d,"id":"%b","repeated":false}' % (offset, id_of(origin, offset))
            )
        self._site.requests["POST", SEND_PATH, "2xx"] += len(sent)


def _queue_in(path: bytes) -> str | None:
    """The queue that a message is for; None where it is another path, or is written in another way."""
    return _short_path(path) if len(path) <= PATH_BYTES_MAX else None


@lru_cache(1024)
def _short_path(path: bytes) -> str | None:
    if not (path.startswith(_BEFORE) and path.endswith(_BEHIND)) or b"%" in path:
        return None
    name = path[len(_BEFORE) : -len(_BEHIND)]
    if b"/" in name:
        return None
    try:
        return str(QUEUE.kind.parse(name.decode()))
    except (UnicodeDecodeError, WrongValue):
        return None
