"""The core of one connection of an RQ client: who waits for which answer.

A `Call` is what one call of the caller sent: one request, or many messages that want receipts. It may be
spread over several connections, and ends when nothing of it is open any more: each of its messages was
confirmed (or answered), failed (UNDELIVERED), or is in doubt because its connection was lost.

A `LineCore` is one connection to one controller: the session, and for every request id the call behind it.
An exchange that nobody waits for any more keeps its id until the controller has ended it, because a late
answer must not be taken for that of another request.

Nothing here does IO or reads a clock. What is not about our own calls (deliveries, broadcasts, farewells)
comes out of `feed` as the session's events. How it fails: `NotSupported` where RQ cannot say it, with
nothing changed; `PeerViolation` from `feed`.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.client.errors import NotSupported
from penstock.model.batch import Batch
from penstock.protocols import rq
from penstock.protocols.errors import MisuseError
from penstock.protocols.rq_node import Answers, Failed, NodeEvent, NodeSession, Receipts, Taken
from penstock.protocols.rq_session import refusal

TIMEOUT_SECONDS_MAX = (1 << 16) - 1
RETRIES_MAX = 255


@dataclass(slots=True, eq=False)
class Call:
    """What is known about the messages of one call, by their positions in it."""

    _changed: Callable[[], None]  # called after every change
    open: set[int] = field(default_factory=set)
    confirmed: int = 0
    failed: list[int] = field(default_factory=list)
    in_doubt: list[int] = field(default_factory=list)
    why: str = ""  # the connection was lost
    taken: bool = False  # a consumer works on it
    answer: bytes = b""

    def note_taken(self) -> None:
        self.taken = True

    def note_confirmed(self, positions: Iterable[int], answer: bytes = b"") -> None:
        for position in positions:
            self.open.discard(position)
            self.confirmed += 1
        self.answer = answer
        self._changed()

    def note_failed(self, positions: Iterable[int]) -> None:
        for position in positions:
            self.open.discard(position)
            self.failed.append(position)
        self._changed()

    def note_lost(self, positions: Iterable[int], why: str) -> None:
        for position in positions:
            self.open.discard(position)
            self.in_doubt.append(position)
        self.why = why
        self._changed()


class LineCore:
    """One connection to one controller."""

    def __init__(self, now_us: int, *, payload_bytes_max: int, silence_us: int) -> None:
        limits = rq.Limits(payload_bytes_max=payload_bytes_max)
        self.session = NodeSession(now_us, limits=limits, silence_us=silence_us)
        self._behind: dict[int, tuple[Call, int]] = {}  # by request id: the call, and the position in it

    def send(self, call: Call, queue: str, bodies: list[bytes], first: int, retries: int | None) -> bytes:
        """Messages that want receipts; the first of them is number `first` of its call."""
        try:
            ids, frames = self.session.send(queue, _batch(queue, bodies, retries))
        except MisuseError as error:
            raise NotSupported(str(error)) from None
        self._note(call, ids, first)
        return frames

    def request(
        self, call: Call, queue: str, body: bytes, timeout_seconds: int, retries: int | None
    ) -> bytes:
        """A message that wants an answer, from the broker's view within so many seconds (0: at any time)."""
        batch = _batch(queue, [body], retries)
        try:
            ids, frames = self.session.request(queue, batch, timeout_seconds=timeout_seconds)
        except MisuseError as error:
            raise NotSupported(str(error)) from None
        self._note(call, ids, 0)
        return frames

    def feed(self, data: bytes, now_us: int) -> list[NodeEvent]:
        """What the controller says, without what was an answer to our own calls."""
        return [event for event in self.session.receive(data, now_us) if not self._is_about_calls(event)]

    def forget(self, call: Call) -> None:
        """Nobody waits for this call any more."""
        for ident in [ident for ident, (behind, _) in self._behind.items() if behind is call]:
            del self._behind[ident]

    def lost(self, why: str) -> None:
        """The connection is gone: everything that was open on it is in doubt."""
        behind, self._behind = self._behind, {}
        for call, positions in _by_call(behind.values()).items():
            call.note_lost(positions, why)

    @property
    def calls(self) -> int:
        """How many messages wait for a receipt or an answer."""
        return len(self._behind)

    def _note(self, call: Call, ids: "array[int]", first: int) -> None:
        end = first + len(ids)
        self._behind.update(zip(ids, ((call, position) for position in range(first, end)), strict=True))
        call.open.update(range(first, end))

    def _is_about_calls(self, event: NodeEvent) -> bool:
        if isinstance(event, Receipts):
            for call, positions in self._pop(event.ids).items():
                call.note_confirmed(positions)
        elif isinstance(event, Answers):
            for ident, answer in zip(event.ids, event.batch.messages(), strict=True):
                for call, positions in self._pop((ident,)).items():
                    call.note_confirmed(positions, answer)
        elif isinstance(event, Failed):
            for call, positions in self._pop(event.ids).items():
                call.note_failed(positions)
        elif isinstance(event, Taken):
            for ident in event.ids:
                if ident in self._behind:
                    self._behind[ident][0].note_taken()
        else:
            return False
        return True

    def _pop(self, ids: Sequence[int]) -> dict[Call, list[int]]:
        behind = self._behind
        return _by_call(behind.pop(ident) for ident in ids if ident in behind)


def _by_call(entries: Iterable[tuple[Call, int]]) -> dict[Call, list[int]]:
    calls: dict[Call, list[int]] = {}
    for call, position in entries:
        calls.setdefault(call, []).append(position)
    return calls


def _batch(queue: str, bodies: list[bytes], retries: int | None) -> Batch:
    if wrong := refusal(queue):
        raise NotSupported(wrong)
    if retries is None:
        return Batch.of(bodies)
    if not 0 <= retries <= RETRIES_MAX:
        raise NotSupported(f"queue {queue!r}: retries is {retries}: use 0 to {RETRIES_MAX}")
    return Batch.of(bodies, retries=[retries] * len(bodies))
