"""What JetStream says in messages, read by the thousand: answers to publishes, and where a message came from.

Four texts, each with a quick way for many of the same kind and a plain way for one:

    {"stream":"S","seq":7}                            a publish is stored; "duplicate": true: it was before
    {"type":"ack","seq":200,"msgs":100}               a fast batch is stored up to its message 200
    {"error":{"code":400,"err_code":10071,…},…}       it is not stored
    $JS.ACK.stream.consumer.tries.seq.delivery.ns.pending     the reply subject of a delivered message

Rules that always hold: the quick way is taken only if putting its findings together again gives the bytes
that came; everything else goes the plain way, one by one.

How it fails: `PeerViolation`, for what JetStream does not say. An error that JetStream reports is no failure
here: it is a `Failure` beside the answers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.protocols.errors import PeerViolation
from penstock.protocols.nats import END, PROTOCOL
from penstock.protocols.nats_write import NUMBER_DIGITS

NO_RESPONDERS = 503
"""The status for a request that nobody listens to; so also for a publish while a stream has no leader."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What JetStream says when it does not do what it was asked for."""

    code: int  # as in HTTP
    err_code: int  # which error it is
    text: str


@dataclass(slots=True)
class PublishAnswers:
    """Answers to publishes, each at its place. A number may be answered for more than once."""

    numbers: Sequence[int]
    seqs: Sequence[int]  # 0 where there is a failure
    duplicates: list[int] = field(default_factory=list)  # the places of those that were stored before
    failures: dict[int, Failure] = field(default_factory=dict)  # by place


@dataclass(slots=True)
class FlowAnswer:
    """How far a fast batch is stored: up to its message `upto`; from now on said every `every` messages.

    `lost_from` is not 0 when messages from there to before `upto` never arrived. `seq` is that of the batch's
    last message in the stream, once it is closed, and else 0.
    """

    upto: int
    every: int = 0
    lost_from: int = 0
    seq: int = 0
    failure: Failure | None = None


@dataclass(slots=True)
class Deliveries:
    """Where delivered messages came from."""

    seqs: list[int]  # in the stream
    tries: list[int]  # 1 for the first time
    pending: int  # how many the consumer had not delivered after the last one of these
    time_texts: list[bytes]  # when they were stored, in nanoseconds since 1970; few need it as a number


def read_numbers(subjects: Sequence[bytes], head_bytes: int) -> list[int]:
    """The numbers at the end of reply subjects that begin with `head_bytes` bytes of a known head."""
    head_end = head_bytes + NUMBER_DIGITS
    texts = [subject[head_bytes:head_end] for subject in subjects]
    joined = b"".join(texts)
    if len(joined) != NUMBER_DIGITS * len(subjects) or (joined and not joined.isdigit()):
        raise _wrong("an answer's subject has no number", b" ".join(subjects))
    return list(map(int, texts))


def read_publish_answers(numbers: Sequence[int], payloads: Sequence[bytes]) -> PublishAnswers:
    """What a stream says to publishes of these numbers."""
    seqs = _plain_seqs(payloads)
    if seqs is not None:
        return PublishAnswers(numbers, seqs)
    answers = PublishAnswers(numbers, seqs := [])
    for place, payload in enumerate(payloads):
        said = read_object(payload)
        failure = failure_of(said)
        seq = said.get("seq", 0)
        if failure is not None:
            answers.failures[place] = failure
            seq = 0
        elif not isinstance(seq, int) or seq < 1:
            raise _wrong("a stream's answer has no sequence number", payload)
        elif said.get("duplicate"):
            answers.duplicates.append(place)
        seqs.append(seq)
    return answers


def _plain_seqs(payloads: Sequence[bytes]) -> list[int] | None:
    """The quick way: all from one stream, all stored, none before."""
    if not payloads:
        return []
    head, mark, _ = payloads[0].partition(b'"seq":')
    if not mark:
        return None
    head += mark
    text = b"".join(payloads)
    digits = text.replace(head, b"").split(b"}")
    if digits.pop() or len(digits) != len(payloads) or not b"".join(digits).isdigit():
        return None
    if text != head + (b"}" + head).join(digits) + b"}" or b"" in digits or b"0" in digits:
        return None
    return list(map(int, digits))


def read_flow_answer(payload: bytes) -> FlowAnswer:
    """What a stream says to a fast batch."""
    said = read_object(payload)
    failure = failure_of(said)
    if failure is not None:
        return FlowAnswer(_natural(said, "seq", payload), failure=failure)
    if "batch" in said:
        count = _natural(said, "count", payload)
        return FlowAnswer(count, seq=_natural(said, "seq", payload))
    kind = said.get("type")
    if kind == "ack":
        return FlowAnswer(_natural(said, "seq", payload), every=_natural(said, "msgs", payload))
    if kind == "gap":
        return FlowAnswer(_natural(said, "seq", payload), lost_from=_natural(said, "last_seq", payload))
    raise _wrong("a stream's answer to a batch is of no known kind", payload)


def _natural(said: dict[str, Any], key: str, payload: bytes) -> int:
    number = said.get(key, 0)
    if not isinstance(number, int) or number < 0:
        raise _wrong(f"a stream's answer has no good {key!r}", payload)
    return number


def read_object(payload: bytes) -> dict[str, Any]:
    """A JSON object as JetStream's API sends it."""
    try:
        said = json.loads(payload)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise _wrong("JetStream's answer is no JSON object", payload)
    return said


def failure_of(said: dict[str, Any]) -> Failure | None:
    """The error that an answer reports, if it does."""
    error = said.get("error")
    if not isinstance(error, dict):
        return None
    code, err_code = error.get("code"), error.get("err_code")
    return Failure(
        code if isinstance(code, int) else 0,
        err_code if isinstance(err_code, int) else 0,
        str(error.get("description", "")),
    )


_REPLY_FIELDS = 9
_REPLY_FIELDS_LONG = 11  # with a domain and an account after $JS.ACK; further fields may follow


def read_deliveries(replies: Sequence[bytes]) -> Deliveries:
    """Where messages came from, by the reply subjects with which they were delivered; at least one."""
    tokens = _plain_tokens(replies)
    if tokens is None:
        tokens = []
        for reply in replies:
            tokens += *_delivery_tokens(reply), _PART
        tokens.pop()
    tries = tokens[0::6]
    return Deliveries(
        list(map(int, tokens[1::6])),
        [1] * len(tries) if tries.count(b"1") == len(tries) else list(map(int, tries)),
        int(tokens[-1]),
        tokens[3::6],
    )


_PART = b" "  # stands between the tokens of two replies


def _plain_tokens(replies: Sequence[bytes]) -> list[bytes] | None:
    """The quick way: all from one consumer. Five tokens for each of them, and `_PART` in between."""
    fields = replies[0].split(b".")
    if len(fields) != _REPLY_FIELDS or fields[:2] != [b"$JS", b"ACK"]:
        return None
    count = len(replies)
    nothing, *parts = b"".join(replies).split(b".".join(fields[:4]) + b".")
    tokens = b". .".join(parts).split(b".")
    good = not nothing and len(tokens) == 6 * count - 1 and tokens[5::6].count(_PART) == count - 1
    good = good and b"" not in tokens and b"".join(tokens).replace(_PART, b"").isdigit()
    return tokens if good else None


def _delivery_tokens(reply: bytes) -> list[bytes]:
    fields = reply.split(b".")
    known = fields[:2] == [b"$JS", b"ACK"]
    if known and len(fields) == _REPLY_FIELDS:
        tokens = fields[4:9]
    elif known and len(fields) >= _REPLY_FIELDS_LONG:
        tokens = fields[6:11]
    else:
        raise _wrong("a message's reply subject is not one of a consumer", reply)
    if not all(token.isdigit() for token in tokens):
        raise _wrong("a consumer's reply subject has a field that is no number", reply)
    return tokens


_SEQ_MARK = b"\r\nNats-Sequence: "


def read_direct_seqs(headers: Sequence[bytes]) -> list[int]:
    """The sequence numbers of messages that were read straight from a stream."""
    seqs = []
    for block in headers:
        # The server adds its own lines behind those of the message, which may say anything.
        start = block.rfind(_SEQ_MARK) + len(_SEQ_MARK)
        text = block[start : block.find(END, start)]
        if start < len(_SEQ_MARK) or not text.isdigit():
            raise _wrong("a message that was read straight from a stream has no sequence number", block)
        seqs.append(int(text))
    return seqs


_TIME_MARK = b"\r\nNats-Time-Stamp: "
_MINUTE_BYTES = len(b"2026-11-15T13:51")
_MINUTES_MAX = 64


class _Minutes(dict[bytes, int]):
    """Seconds since 1970 at the beginning of a minute, by its text. Messages that were stored in the same
    minute follow each other, so few are worked out."""

    def __missing__(self, text: bytes) -> int:
        if len(self) >= _MINUTES_MAX:
            self.clear()
        year, month, day = int(text[:4]), int(text[5:7]), int(text[8:10])
        # Days since 1970 in the Gregorian calendar, with years that begin in March.
        year, month = (year, month - 3) if month > 2 else (year - 1, month + 9)
        days = 365 * year + year // 4 - year // 100 + year // 400 + (153 * month + 2) // 5 + day - 719_469
        seconds = self[text] = (days * 24 + int(text[11:13])) * 3600 + int(text[14:16]) * 60
        return seconds


_MINUTES = _Minutes()


def read_direct_times_us(headers: Sequence[bytes]) -> list[int]:
    """When messages that were read straight from a stream were stored, in microseconds since 1970, UTC."""
    times_us = []
    for block in headers:
        start = block.rfind(_TIME_MARK) + len(_TIME_MARK)
        text = block[start : block.find(END, start)]
        if start < len(_TIME_MARK) or text[-1:] != b"Z":
            raise _wrong("a message that was read straight from a stream has no time", block)
        try:
            seconds, _, fraction = text[_MINUTE_BYTES + 1 : -1].partition(b".")
            whole = _MINUTES[text[:_MINUTE_BYTES]] + int(seconds)
            times_us.append(whole * 1_000_000 + int(fraction[:6].ljust(6, b"0")))
        except ValueError:
            raise _wrong("a message that was read straight from a stream has no good time", block) from None
    return times_us


def _wrong(message: str, offending: bytes) -> PeerViolation:
    return PeerViolation(PROTOCOL, message, position=0, offending=offending)
