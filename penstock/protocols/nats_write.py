"""What a NATS client sends: one frame, or thousands of publishes and acknowledgements in one buffer.

    CONNECT {json}   PING   PONG
    SUB subject [queue group] sid        UNSUB sid [messages]
    PUB subject [reply] bytes                   payload
    HPUB subject [reply] header-bytes bytes     headers payload

Publishes by the thousand have numbers: message *i* of a call has the number `number_first + i`, as thirteen
digits at the end of its reply subject, so that the answers can be counted off without a table of texts. The
message id (`Nats-Msg-Id`) ends with a number of its own in the same way: what is published again under the
same id is stored once.

Rules that always hold: a subject is checked where it is first named (`subject_bytes`), not for each message;
nothing here keeps what it is given.

How it fails: `MisuseError`, for what the protocol cannot say.

Measured with `bench/bench_nats.py`. What the speed rests on: no number is turned into digits for a message
(they come from a table, the rest is part of a constant), and a call's pieces are joined once.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import chain, pairwise, repeat

from penstock.protocols.errors import MisuseError
from penstock.protocols.nats import END, FRAME_BYTES_MAX
from penstock.protocols.nats_headers import OPENING

PING = b"PING\r\n"
PONG = b"PONG\r\n"
NUMBER_DIGITS = 13
"""Enough for three years at 100,000 a second."""

MSG_ID = b"Nats-Msg-Id"

_LOW_DIGITS = 3
_BLOCK = 10**_LOW_DIGITS
_LOW = [b"%0*d" % (_LOW_DIGITS, n) for n in range(_BLOCK)]
_HIGH_DIGITS = NUMBER_DIGITS - _LOW_DIGITS
_NUMBER_END = 10**NUMBER_DIGITS
_VIEW_BYTES = 4096  # from this average size on, payloads are joined from views instead of slices


class Settling(Enum):
    """What a consumer says of a message it was given."""

    DONE = b"+ACK"
    AGAIN = b"-NAK"  # it comes back, before everything that was not delivered yet
    WORKING = b"+WPI"  # the time to acknowledge starts anew
    NEVER = b"+TERM"  # it does not come back


def subject_bytes(subject: str, *, wildcards: bool = False) -> bytes:
    """A subject as it travels. Blanks and empty tokens would break the line, or match nothing."""
    text = subject.encode()
    tokens = text.split(b".")
    if b"" in tokens or any(byte <= 32 or byte == 127 for byte in text):
        raise MisuseError(f"nats: {subject!r} is no subject; use words without blanks, parted by dots")
    if not wildcards and (b"*" in tokens or b">" in tokens):
        raise MisuseError(f"nats: {subject!r} has a wildcard; nothing can be published to it")
    return text


def connect(options: Mapping[str, object]) -> bytes:
    """CONNECT, the first thing that a client says."""
    return b"CONNECT " + json.dumps(options, separators=(",", ":")).encode() + END


def subscribe(subject: bytes, sid: int, queue_group: bytes = b"") -> bytes:
    """SUB. Members of a queue group share what comes."""
    return (
        b"SUB %b %b %d\r\n" % (subject, queue_group, sid)
        if queue_group
        else b"SUB %b %d\r\n" % (subject, sid)
    )


def unsubscribe(sid: int, messages: int = 0) -> bytes:
    """UNSUB, at once or after that many messages since SUB."""
    return b"UNSUB %d %d\r\n" % (sid, messages) if messages else b"UNSUB %d\r\n" % sid


def publish(subject: bytes, payload: bytes, *, reply: bytes = b"", headers: bytes = b"") -> bytes:
    """One message; `headers` is a whole block, see `nats_headers`."""
    to = subject + b" " + reply if reply else subject
    if headers:
        size = len(headers) + len(payload)
        return b"HPUB %b %d %d\r\n%b%b\r\n" % (to, len(headers), size, headers, payload)
    return b"PUB %b %d\r\n%b\r\n" % (to, len(payload), payload)


def number_text(number: int) -> bytes:
    """A number as it stands at the end of a reply subject or a message id."""
    if not 0 <= number < _NUMBER_END:
        raise MisuseError(f"nats: {number} is no number of a publish (0 to {_NUMBER_END - 1})")
    return b"%0*d" % (NUMBER_DIGITS, number)


def _blocks(count: int, *firsts: int) -> Iterable[tuple[int, int]]:
    """(start, end) of parts of 0 … count in which no number beginning at `firsts` changes its high digits."""
    at = 0
    while at < count:
        end = min(count, *(at + _BLOCK - (first + at) % _BLOCK for first in firsts))
        yield at, end
        at = end


def _low(first: int, count: int) -> list[bytes]:
    start = first % _BLOCK
    return _LOW[start : start + count]


def encode_publishes(
    subject: bytes,
    payload: bytes | memoryview,
    bounds: Sequence[int],
    *,
    reply_head: bytes,
    number_first: int,
    reply_tail: bytes = b"",
    id_head: bytes,
    id_first: int,
    headers: bytes | Sequence[bytes] = b"",
    message_bytes_max: int = FRAME_BYTES_MAX,
) -> bytes:
    """Publishes of `payload[bounds[i]:bounds[i + 1]]`, each with a numbered reply subject and a message id.

    Reply subjects are `reply_head`, the number, `reply_tail`; ids are `id_head` and a number. `headers` are
    further header lines (`header_lines`): the same for all messages, or one entry for each of them. A server
    ends the connection of who sends more than its `max_payload`, headers and all: `message_bytes_max`.
    """
    marks = list(bounds)
    count = len(marks) - 1
    number_text(number_first), number_text(number_first + count)
    number_text(id_first), number_text(id_first + count)
    if count > 0 and marks[-1] - marks[0] >= _VIEW_BYTES * count:
        payload = memoryview(payload)
    payloads = [payload[start:end] for start, end in pairwise(marks)]
    same = headers if isinstance(headers, bytes) else None
    each: Sequence[bytes] = () if isinstance(headers, bytes) else headers
    if same is None and len(each) != count:
        raise MisuseError(f"nats: {len(each)} blocks of headers for {count} messages")
    out: list[bytes] = []
    # The head of a publish follows the end of the one before it: both are one constant.
    opening = b"HPUB " + subject + b" " + reply_head
    fixed_bytes = len(OPENING) + len(MSG_ID) + 2 + len(id_head) + NUMBER_DIGITS + 4
    for start, end in _blocks(count, number_first, id_first):
        number, id_number = number_first + start, id_first + start
        head = opening + b"%0*d" % (_HIGH_DIGITS, number // _BLOCK)
        middle = b"\r\n%b%b: %b%0*d" % (OPENING, MSG_ID, id_head, _HIGH_DIGITS, id_number // _BLOCK)
        sizes = map(len, payloads[start:end])
        if same is not None:
            header_bytes = fixed_bytes + len(same)
            middles = _Middles(reply_tail, middle, header_bytes, message_bytes_max)
            texts = [middles[size] for size in sizes]
            lines: Iterable[bytes] = repeat(END + same + END, end - start)
        else:
            lines = [END + line + END for line in each[start:end]]
            both = _MiddlesOf(reply_tail, middle, fixed_bytes, message_bytes_max)
            texts = [both[len(line), size] for line, size in zip(each[start:end], sizes, strict=True)]
        count_here = end - start
        pieces = zip(
            repeat(head, count_here),
            _low(number, count_here),
            texts,
            _low(id_number, count_here),
            lines,
            payloads[start:end],
            repeat(END, count_here),
            strict=True,
        )
        out.append(b"".join(chain.from_iterable(pieces)))
    return out[0] if len(out) == 1 else b"".join(out)


class _Middles(dict[int, bytes]):
    """What stands between a reply's number and an id's, by payload size; the headers have one size."""

    def __init__(self, tail: bytes, middle: bytes, header_bytes: int, bytes_max: int) -> None:
        self._tail, self._middle, self._header_bytes, self._bytes_max = tail, middle, header_bytes, bytes_max

    def __missing__(self, size: int) -> bytes:
        text = self[size] = _sizes(self._tail, self._header_bytes, size, self._bytes_max) + self._middle
        return text


class _MiddlesOf(dict[tuple[int, int], bytes]):
    """The same by the size of a message's own header lines and its payload's."""

    def __init__(self, tail: bytes, middle: bytes, fixed_bytes: int, bytes_max: int) -> None:
        self._tail, self._middle, self._fixed_bytes, self._bytes_max = tail, middle, fixed_bytes, bytes_max

    def __missing__(self, key: tuple[int, int]) -> bytes:
        header_bytes = self._fixed_bytes + key[0]
        text = self[key] = _sizes(self._tail, header_bytes, key[1], self._bytes_max) + self._middle
        return text


def _sizes(tail: bytes, header_bytes: int, size: int, bytes_max: int) -> bytes:
    total = header_bytes + size
    if total > bytes_max:
        raise MisuseError(
            f"nats: a message of {size} bytes with {header_bytes} of headers is over the limit of {bytes_max}"
        )
    return b"%b %d %d" % (tail, header_bytes, total)


def encode_settlings(replies: Sequence[bytes], settling: Settling, detail: bytes = b"") -> bytes:
    """The same word for many messages, by the reply subjects with which they were delivered.

    `detail` is what follows the word: `{"delay": nanoseconds}` for AGAIN, a reason for NEVER.
    """
    if not replies:
        return b""
    word = settling.value + b" " + detail if detail else settling.value
    tail = b" %d\r\n%b\r\n" % (len(word), word)
    return b"PUB " + (tail + b"PUB ").join(replies) + tail


def encode_settlings_confirmed(
    replies: Sequence[bytes], settling: Settling, *, reply_head: bytes, number_first: int
) -> bytes:
    """The same, each with a numbered reply subject at which the server says that it is stored."""
    number_text(number_first), number_text(number_first + len(replies))
    word = settling.value
    tail = b" %d\r\n%b\r\n" % (len(word), word)
    out: list[bytes] = []
    for start, end in _blocks(len(replies), number_first):
        number, count = number_first + start, end - start
        middle = b" " + reply_head + b"%0*d" % (_HIGH_DIGITS, number // _BLOCK)
        pieces = zip(
            repeat(b"PUB ", count),
            replies[start:end],
            repeat(middle, count),
            _low(number, count),
            repeat(tail, count),
            strict=True,
        )
        out.append(b"".join(chain.from_iterable(pieces)))
    return b"".join(out)
