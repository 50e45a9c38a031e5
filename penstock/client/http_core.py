"""The core of the HTTP client: what to ask, and what an answer says. No IO, no clock.

A `Request` is one request of the API, with what must be known about it when its answer does not come:
whether it may be asked again, and which messages are in doubt.

Rules that always hold:
  * Only what is safe to repeat is repeated: a look, a take, a verdict, and a send with a key. A send without
    a key is not given one in secret: the broker remembers the last 10,000 keys, of everybody, and keys that
    no one asked for would push out those that somebody relies on.
  * The messages of `send_many` are cut into batches in the same way every time, and the key of a batch is
    made of the caller's key and the number of the batch. So the whole call can be repeated, whatever of it
    was stored before.

How it fails: `NotSupported`, with nothing sent; `Refused`, with the broker's own words.
"""

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, Final, TypeVar

from penstock.client.core import as_bytes
from penstock.client.errors import ConnectionLost, NotSupported, Refused, TimedOut, tell_sent
from penstock.client.http_connection import target_of_request
from penstock.client.options import Options
from penstock.model.batch import DELAY_SECONDS_MAX, RETRIES_ENDLESS
from penstock.model.headers import encode_headers
from penstock.model.policy import QueueNameError, check_queue_name, door_of

BATCH_MESSAGES: Final = 10_000
BATCH_BYTES: Final = 1 << 20
"""Of payload. So much is one block of the broker's log, by default."""

PAGE_QUEUES: Final = 10_000
PAGE_MESSAGES: Final = 1000
KEY_CHARACTERS_MAX: Final = 200
TTL_SECONDS_MAX: Final = 10**12
TAKE_MESSAGES: Final = 1000
TAKE_SECONDS: Final = 30
"""What one request can take, and how long it can wait for the first of them."""

WHY_BYTES_MAX: Final = 1000

_NDJSON: Final = "application/x-ndjson"
_BYTES: Final = "application/octet-stream"
_JSON: Final = "application/json"
_PROBLEM: Final = "application/problem+json"
_URN: Final = "urn:penstock:"
_STATES: Final = ("ready", "delayed", "held", "dead", "gone")

Answer = Mapping[str, Any]  # what the JSON of an answer says
T = TypeVar("T")


# --- What comes out --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Receipt:
    """One message is stored."""

    offset: int
    id: str
    repeated: bool  # and was before: the key had been used


@dataclass(frozen=True, slots=True)
class BatchReceipt:
    """The messages of one batch are stored: offsets from `offset_start` to `offset_end`, exclusive."""

    count: int
    offset_start: int
    offset_end: int
    id_first: str
    repeated: bool


@dataclass(frozen=True, slots=True)
class PeekedMessage:
    """A message that was looked at, and is where it was."""

    offset: int
    id: str
    state: str  # ready, delayed, held, dead or gone
    time: datetime  # when it was accepted
    due: datetime | None  # when a delayed one is ready
    ttl: int | None  # seconds left
    expires: datetime | None
    retries: int | None  # left
    attempts: int
    reason: str | None  # of its death
    why: str | None  # what was said when it was rejected
    consumer: str | None  # who holds it
    protocol: str
    headers: Mapping[str, str]
    value: bytes


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A queue as it is now."""

    name: str
    ready: int
    delayed: int
    held: int
    dead: int
    offset_start: int
    offset_end: int
    event_start: int
    event_end: int
    bytes: int
    consumers: int
    rate_in: float
    rate_out: float
    oldest_seconds: float | None
    paused: bool


@dataclass(frozen=True, slots=True)
class QueueDetails(QueueInfo):
    """The same, with why its dead letters died, and the settings that it goes by."""

    dead_reasons: Mapping[str, int] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)


# --- What goes out ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """One request, ready to be written."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes | None = None
    repeatable: bool = True
    first: int = 0  # of the messages in it: which one of its call it is
    count: int = 0  # how many there are in it
    patient: bool = False  # repeated as long as a broker is looked for, also where it says "not now"
    wait_seconds: float = 0.0  # the broker may wait before it answers


class HttpCore:
    def __init__(self, options: Options) -> None:
        self._payload_bytes_max = options.payload_bytes_max
        self.headers = {"Accept": f"{_JSON}, {_PROBLEM}"}
        if options.token is not None:
            self.headers["Authorization"] = f"Bearer {options.token}"

    def send(
        self,
        queue: str,
        body: bytes,
        ttl: int | None,
        retries: int | None,
        key: str | None,
        delay: float | None = None,
        headers: Mapping[str, str] | None = None,
        first: int = 0,
    ) -> Request:
        """One message, as it is; with headers as a line of JSON, because those of HTTP lose their case."""
        terms = _checked_terms(queue, ttl, retries, key, delay, headers)
        message = self._checked(queue, body)
        if headers:
            line = f"{{{json_value(message)}{_members(terms)}}}\n".encode()
            return self._post(_path(queue, "batch"), _NDJSON, line, key, first, 1)
        return self._post(_path(queue, "messages", **terms), _BYTES, message, key, first, 1)

    def batches(
        self,
        queue: str,
        bodies: Iterable[bytes],
        ttl: int | None,
        retries: int | None,
        key: str | None,
        delay: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[Request]:
        """Any number of messages, in requests of bounded size. `receipt_of_batch` reads their answers."""
        more = _members(_checked_terms(queue, ttl, retries, key, delay, headers))
        first = 0
        try:
            for number, batch in enumerate(_batches(self._checked(queue, body) for body in bodies)):
                its_key = None if key is None else _check_key(f"{key}/{number}")
                if len(batch) == 1:
                    # As it is: in a line of JSON a large message could be larger than the broker takes.
                    yield self.send(queue, batch[0], ttl, retries, its_key, delay, headers, first)
                else:
                    lines = "".join(f"{{{json_value(message)}{more}}}\n" for message in batch).encode()
                    yield self._post(_path(queue, "batch"), _NDJSON, lines, its_key, first, len(batch))
                first += len(batch)
        except Exception as error:
            tell_sent(error, first)
            raise

    def take(self, queue: str, dead: bool, count: int, lease: float, wait: float) -> Request:
        """At most so many messages, for so many seconds each; the broker waits for the first of them.

        It can be asked again: what was taken for an answer that nobody got goes back.
        """
        query = {"max": min(count, TAKE_MESSAGES), "wait": round(wait, 3), "lease": lease, "dead": dead}
        target = _path(queue, "take", **query)
        return Request("POST", target, self.headers, b"", patient=True, wait_seconds=wait)

    def settle(self, queue: str, verdicts: Mapping[str, list[Mapping[str, Any]]]) -> Request:
        """What became of messages: by outcome, the entries of the API. Asked again, it does no more."""
        headers = {**self.headers, "Content-Type": _JSON}
        body = json.dumps(verdicts).encode()
        return Request("POST", _path(queue, "settle"), headers, body, patient=True)

    def queues(self, after: str | None) -> Request:
        """A page of the list of queues."""
        return self.get("v1", "queues", limit=PAGE_QUEUES, after=after)

    def queue(self, name: str) -> Request:
        _check_look(name)
        return self.get("v1", "queues", name)

    def peek(self, queue: str, from_offset: int | None, limit: int, state: str | None) -> Request:
        """A page of messages, at most `limit` of them."""
        _check_look(queue)
        if state is not None and state not in _STATES:
            raise NotSupported(f"queue {queue!r}: there is no state {state!r}; use {', '.join(_STATES)}")
        if limit < 1:
            raise NotSupported(f"queue {queue!r}: limit is {limit}: use at least 1")
        query = {"from": from_offset, "limit": min(limit, PAGE_MESSAGES), "state": state}
        return self.get("v1", "queues", queue, "messages", **query)

    def get(self, *segments: str, **query: object) -> Request:
        """What is at an address; parameters that are None are left out."""
        return Request("GET", target_of_request(segments, query), self.headers)

    def _post(self, target: str, media: str, body: bytes, key: str | None, first: int, count: int) -> Request:
        headers = {**self.headers, "Content-Type": media}
        if key is not None:
            headers["Idempotency-Key"] = key
        return Request("POST", target, headers, body, key is not None, first, count)

    def _checked(self, queue: str, body: bytes) -> bytes:
        message = as_bytes(body)
        if len(message) > self._payload_bytes_max:
            raise NotSupported(
                f"queue {queue!r}: a message of {len(message)} bytes; payload_bytes_max of this client is "
                f"{self._payload_bytes_max}"
            )
        return message


def _path(queue: str, *words: str, **query: object) -> str:
    return target_of_request(("v1", "queues", queue, *words), query)


def _check_look(queue: str) -> None:
    name, dead = door_of(queue)
    if dead:
        raise NotSupported(
            f"{queue!r} is the door to the dead letters of {name!r}; look at them with "
            f"peek({name!r}, state='dead')"
        )
    _check_name(queue)


def _check_name(queue: str) -> None:
    try:
        check_queue_name(queue)
    except QueueNameError as error:
        raise NotSupported(str(error)) from None


def check_delay(queue: str, delay: float | None) -> None:
    if delay is not None and not 0 <= delay <= DELAY_SECONDS_MAX:
        raise NotSupported(f"queue {queue!r}: delay is {delay}: use seconds from 0 to {DELAY_SECONDS_MAX}")


def check_door(queue: str, dead: bool) -> tuple[str, bool]:
    """The queue that a name stands for to one who takes, and whether its dead letters are meant."""
    name, is_door = door_of(queue)
    _check_name(name)
    return name, is_door or dead


def _checked_terms(
    queue: str,
    ttl: int | None,
    retries: int | None,
    key: str | None,
    delay: float | None,
    headers: Mapping[str, str] | None,
) -> dict[str, object]:
    """What goes with a message, by the API's names."""
    _check_name(queue)
    if ttl is not None and not 1 <= ttl <= TTL_SECONDS_MAX:
        raise NotSupported(f"queue {queue!r}: ttl is {ttl}: use whole seconds from 1 to {TTL_SECONDS_MAX}")
    if retries is not None and not 0 <= retries <= RETRIES_ENDLESS:
        raise NotSupported(f"queue {queue!r}: retries is {retries}: use 0 to {RETRIES_ENDLESS}")
    if key is not None:
        _check_key(key)
    check_delay(queue, delay)
    try:
        text = encode_headers(headers or {})
    except ValueError as error:
        raise NotSupported(f"queue {queue!r}: {error}") from None
    return {"ttl": ttl, "retries": retries, "delay": delay, "headers": text.decode() or None}


def _members(terms: Mapping[str, object]) -> str:
    """Terms behind the first member of a JSON object; all of them are JSON as they are."""
    return "".join(f',"{name}":{value}' for name, value in terms.items() if value is not None)


def _check_key(key: str) -> str:
    if len(key) > KEY_CHARACTERS_MAX or not re.fullmatch("[!-~]([ -~]*[!-~])?", key):
        raise NotSupported(
            f"key {key!r}: use 1 to {KEY_CHARACTERS_MAX} printable ASCII characters, no space at the ends; "
            "in send_many the number of the batch is put behind it"
        )
    return key


def _batches(messages: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Messages in lists of bounded size, in order; one that is larger is alone."""
    batch: list[bytes] = []
    size = 0
    for message in messages:
        if batch and (size + len(message) > BATCH_BYTES or len(batch) == BATCH_MESSAGES):
            yield batch
            batch, size = [], 0
        batch.append(message)
        size += len(message)
    if batch:
        yield batch


_text_in_json = json.JSONEncoder(ensure_ascii=False).encode


def json_value(message: bytes) -> str:
    """A message as a member of a JSON object: as text where it is some, because that is shorter."""
    try:
        return f'"value":{_text_in_json(message.decode())}'
    except UnicodeDecodeError:
        return f'"value_base64":"{b64encode(message).decode()}"'


# --- Answers ---------------------------------------------------------------------------------------


_FOREIGN: Final = "{}: this is no answer of a broker; is the URL right?"


def answer_of(request: Request, status: int, media: str, body: bytes) -> Answer:
    """What an answer says; Refused where that is no."""
    kind = media.partition(";")[0].strip().lower()
    told: object = None
    if kind in (_JSON, _PROBLEM):
        try:
            told = json.loads(body)
        except ValueError:
            told = None
    if isinstance(told, dict) and status == 200 and kind == _JSON:
        return told
    name, detail = "", _FOREIGN.format(f"status {status} and {kind or 'nothing'}")
    if isinstance(told, dict) and kind == _PROBLEM:
        name = str(told.get("type", "")).removeprefix(_URN)
        detail = str(told.get("detail", f"status {status}"))
    raise Refused(status, name, detail, stored=request.first)


def receipt_of(answer: Answer) -> Receipt:
    """The receipt of one message, also of one that went as a batch."""
    if "offset_start" in answer:
        batch = receipt_of_batch(answer)
        return Receipt(batch.offset_start, batch.id_first, batch.repeated)
    return _made(Receipt, answer)


def receipt_of_batch(answer: Answer) -> BatchReceipt:
    """The receipt of a batch, also of one that went as a single message."""
    if "offset" not in answer:
        return _made(BatchReceipt, answer)
    one = receipt_of(answer)
    return BatchReceipt(1, one.offset, one.offset + 1, one.id, one.repeated)


def message_of(answer: Answer) -> PeekedMessage:
    times = {name: time_of(said(answer, name)) for name in ("time", "expires", "due")}
    return _made(PeekedMessage, {**answer, **times, "value": b64decode(said(answer, "value_base64"))})


def queue_of(answer: Answer) -> QueueInfo:
    return _made(QueueInfo, answer)


def details_of(answer: Answer) -> QueueDetails:
    return _made(QueueDetails, answer)


def body_of(answer: Answer) -> bytes:
    """The payload of a message that was taken."""
    return answer["value"].encode() if "value" in answer else b64decode(said(answer, "value_base64"))


def time_of(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _made(kind: type[T], answer: Answer) -> T:
    """An object of the fields that it knows; a newer broker may say more."""
    known = [it.name for it in fields(kind)]  # type: ignore[arg-type]  # every kind here is a dataclass
    return kind(**{name: said(answer, name) for name in known})


def said(answer: Answer, name: str) -> Any:  # whatever the API's document promises
    """A member of an answer; Refused where a broker would have said it."""
    try:
        return answer[name]
    except KeyError:
        raise Refused(200, "", _FOREIGN.format(f"JSON without {name!r}")) from None


def page_of(answer: Answer, name: str, made: Callable[[Answer], T]) -> tuple[list[T], Any]:
    """The items of a page, and where the next one begins; None: there is none."""
    return [made(item) for item in said(answer, name)], said(answer, "next")


# --- Without an answer -----------------------------------------------------------------------------


def lost(name: str, request: Request, why: str) -> ConnectionLost:
    """The error of a request whose connection broke before it was answered."""
    return ConnectionLost(
        f"{name}: the connection was lost ({why}){_doubt(request)}",
        in_doubt=request.count,
        positions=range(request.first, request.first + request.count),
        sent=request.first + request.count,
    )


def unreached(name: str, request: Request, tried: str, error: ConnectionLost) -> ConnectionLost:
    """The error of a request that nobody is there for; `tried`: what became of it before, if it was."""
    if tried:
        return lost(name, request, f"{tried}; {error}")
    error.sent = request.first
    if request.first:
        error.args = (f"{error}{_before(request)}, the others were not sent",)
    return error


def timed_out(name: str, request: Request, seconds: float) -> TimedOut:
    """The error of a request that was not answered in time."""
    return TimedOut(
        f"{name}: no answer within {seconds:g} s{_doubt(request)}",
        in_doubt=request.count,
        positions=range(request.first, request.first + request.count),
        sent=request.first + request.count,
    )


def _doubt(request: Request) -> str:
    if not request.count:
        return "; ask again"
    what = "the message was" if request.count == 1 else f"{request.count} messages were"
    safe = (
        "the same call again, with the same key, is safe" if request.repeatable else "a key makes that safe"
    )
    again = "" if request.repeatable else ", and sending again may store twice"
    return f"{_before(request)}; it is not known whether {what} stored{again}; {safe}"


def _before(request: Request) -> str:
    return f"; the first {request.first} messages of this call are stored" if request.first else ""
