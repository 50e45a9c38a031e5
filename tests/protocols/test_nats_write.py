"""What a NATS client says, and what JetStream says inside messages: written, and read by the thousand."""

from array import array
from datetime import UTC, datetime, timedelta
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocols import nats_jetstream, nats_write
from penstock.protocols.errors import MisuseError, PeerViolation
from penstock.protocols.nats_headers import header_block, header_lines, read_headers, value_of
from penstock.protocols.nats_jetstream import Failure, FlowAnswer
from penstock.protocols.nats_write import Settling

# --- single frames ---


@pytest.mark.parametrize(
    ("written", "wire"),
    [
        (nats_write.connect({"verbose": False, "name": "p"}), b'CONNECT {"verbose":false,"name":"p"}\r\n'),
        (nats_write.subscribe(b"a.>", 7), b"SUB a.> 7\r\n"),
        (nats_write.subscribe(b"a", 7, b"workers"), b"SUB a workers 7\r\n"),
        (nats_write.unsubscribe(7), b"UNSUB 7\r\n"),
        (nats_write.unsubscribe(7, 100), b"UNSUB 7 100\r\n"),
        (nats_write.publish(b"a", b""), b"PUB a 0\r\n\r\n"),
        (nats_write.publish(b"a", b"hi", reply=b"r"), b"PUB a r 2\r\nhi\r\n"),
        (
            nats_write.publish(b"a", b"hi", headers=header_block([(b"K", b"v")])),
            b"HPUB a 18 20\r\nNATS/1.0\r\nK: v\r\n\r\nhi\r\n",
        ),
        (
            nats_write.publish(b"a", b"hi", reply=b"r", headers=header_block([(b"K", b"v")])),
            b"HPUB a r 18 20\r\nNATS/1.0\r\nK: v\r\n\r\nhi\r\n",
        ),
    ],
)
def test_frames(written: bytes, wire: bytes) -> None:
    assert written == wire


@pytest.mark.parametrize("subject", ["", ".", "a.", ".a", "a..b", "a b", "a\r\nPUB b 0", "a\tb", "a\x7f"])
def test_what_is_no_subject_is_misuse(subject: str) -> None:
    with pytest.raises(MisuseError, match="is no subject"):
        nats_write.subject_bytes(subject)


def test_wildcards_are_for_those_who_listen() -> None:
    assert nats_write.subject_bytes("a.*.>", wildcards=True) == b"a.*.>"
    assert nats_write.subject_bytes("a.b*.ü") == "a.b*.ü".encode()
    with pytest.raises(MisuseError, match="has a wildcard"):
        nats_write.subject_bytes("a.>")


# --- publishes by the thousand ---


def one_by_one(
    payloads: list[bytes], number_first: int, id_first: int, headers: list[bytes], tail: bytes = b""
) -> bytes:
    """The same as `encode_publishes`, by `publish`."""
    out = b""
    for at, (payload, lines) in enumerate(zip(payloads, headers, strict=True)):
        block = b"NATS/1.0\r\nNats-Msg-Id: me-%013d\r\n%b\r\n" % (id_first + at, lines)
        reply = b"inbox.%013d%b" % (number_first + at, tail)
        out += nats_write.publish(b"q.orders", payload, reply=reply, headers=block)
    return out


payloads = st.sampled_from([0, 1, 100, 5000]).flatmap(lambda size: st.binary(min_size=size, max_size=size))
firsts = st.sampled_from([0, 1, 990, 999, 1000, 123_456, 9_999_999_998_900])
own_lines = st.sampled_from([b"", b"A: b\r\n", b"A: b\r\nLonger: value\r\n"])


@given(
    st.lists(st.tuples(payloads, own_lines), max_size=30),
    firsts,
    firsts,
    st.sampled_from([b"", b".1.$FI"]),
    st.booleans(),
)
def test_publishes_are_written_as_one_by_one(
    messages: list[tuple[bytes, bytes]], number_first: int, id_first: int, tail: bytes, views: bool
) -> None:
    contents = [payload for payload, _ in messages]
    lines = [line for _, line in messages]
    joined = b"??" + b"".join(contents)
    bounds = array("i", accumulate(map(len, contents), initial=2))

    def written(headers: bytes | list[bytes]) -> bytes:
        return nats_write.encode_publishes(
            b"q.orders",
            memoryview(joined) if views else joined,
            bounds,
            reply_head=b"inbox.",
            number_first=number_first,
            reply_tail=tail,
            id_head=b"me-",
            id_first=id_first,
            headers=headers,
        )

    assert written(lines) == one_by_one(contents, number_first, id_first, lines, tail)
    assert written(b"X: y\r\n") == one_by_one(
        contents, number_first, id_first, [b"X: y\r\n"] * len(contents), tail
    )


def test_three_thousand_publishes_are_numbered_without_a_gap() -> None:
    written = nats_write.encode_publishes(
        b"q.orders",
        b"x" * 3000,
        range(3001),
        reply_head=b"inbox.",
        number_first=700,
        id_head=b"me-",
        id_first=1,
    )
    assert written == one_by_one([b"x"] * 3000, 700, 1, [b""] * 3000)


def test_what_cannot_be_published_is_misuse() -> None:
    def write(number_first: int, headers: list[bytes]) -> None:
        nats_write.encode_publishes(
            b"a",
            b"xy",
            [0, 1, 2],
            reply_head=b"i.",
            number_first=number_first,
            id_head=b"",
            id_first=0,
            headers=headers,
        )

    with pytest.raises(MisuseError, match="1 blocks of headers for 2 messages"):
        write(0, [b""])
    with pytest.raises(MisuseError, match="10000000000000 is no number of a publish"):
        write(9_999_999_999_998, [b"", b""])
    with pytest.raises(MisuseError, match="-1 is no number"):
        write(-1, [b"", b""])
    for headers in (b"X: y\r\n", [b"X: y\r\n"]):
        with pytest.raises(
            MisuseError, match="a message of 30 bytes with 46 of headers is over the limit of 75"
        ):
            nats_write.encode_publishes(
                b"a",
                bytes(30),
                [0, 30],
                reply_head=b"i.",
                number_first=0,
                id_head=b"",
                id_first=0,
                headers=headers,
                message_bytes_max=75,
            )


# --- settling ---


def test_settlings() -> None:
    assert nats_write.encode_settlings([], Settling.DONE) == b""
    assert (
        nats_write.encode_settlings([b"$JS.ACK.1", b"$JS.ACK.2"], Settling.DONE)
        == b"PUB $JS.ACK.1 4\r\n+ACK\r\nPUB $JS.ACK.2 4\r\n+ACK\r\n"
    )
    assert (
        nats_write.encode_settlings([b"r"], Settling.AGAIN, b'{"delay":1000}')
        == b'PUB r 19\r\n-NAK {"delay":1000}\r\n'
    )
    assert nats_write.encode_settlings([b"r"], Settling.WORKING) == b"PUB r 4\r\n+WPI\r\n"
    assert nats_write.encode_settlings([b"r"], Settling.NEVER) == b"PUB r 5\r\n+TERM\r\n"


@pytest.mark.parametrize("count", [0, 1, 3, 2500])
def test_confirmed_settlings(count: int) -> None:
    replies = [b"$JS.ACK.%d" % n for n in range(count)]
    written = nats_write.encode_settlings_confirmed(
        replies, Settling.DONE, reply_head=b"inbox.", number_first=998
    )
    assert written == b"".join(
        nats_write.publish(reply, b"+ACK", reply=b"inbox.%013d" % n) for n, reply in enumerate(replies, 998)
    )


# --- headers ---

names = st.from_regex(rb"[A-Za-z-]{1,12}", fullmatch=True)
values = st.binary(max_size=20).filter(lambda v: not set(v) & {10, 13} and v == v.strip(b" \t"))


@given(st.lists(st.tuples(names, values), max_size=6))
def test_headers_read_as_they_were_written(headers: list[tuple[bytes, bytes]]) -> None:
    block = header_block(headers)
    assert read_headers(block) == headers
    for name in {name for name, _ in headers}:
        assert value_of(block, name) == next(value for other, value in headers if other == name)
    assert value_of(block, b"Not-There") is None


def test_odd_headers() -> None:
    odd = [
        (b"Colons", b"a:b: c"),
        (b"Empty", b""),
        (b"Umlaut", "ü".encode()),
        (b"Twice", b"1"),
        (b"Twice", b"2"),
    ]
    assert read_headers(header_block(odd)) == odd
    assert read_headers(b"NATS/1.0 503 No Responders\r\nA:b\r\n\r\n") == [(b"A", b"b")]
    assert read_headers(b"") == []


@pytest.mark.parametrize(
    ("name", "value"),
    [(b"", b"x"), (b"a b", b"x"), (b"a:", b"x"), (b"a", b"x\r\ny: z"), (b"a", b" x"), (b"a", b"x\t")],
)
def test_headers_that_would_not_survive_are_misuse(name: bytes, value: bytes) -> None:
    with pytest.raises(MisuseError, match="cannot"):
        header_lines([(name, value)])


@pytest.mark.parametrize(
    "block", [b"HTTP/1.1\r\n\r\n", b"NATS/1.0\r\n", b"NATS/1.0\r\nx\r\n\r\n", b"NATS/1.0"]
)
def test_what_is_no_block_of_headers_is_a_violation(block: bytes) -> None:
    with pytest.raises(PeerViolation):
        read_headers(block)


# --- answers to publishes ---


def test_numbers_of_answers() -> None:
    subjects = [b"inbox.%013d" % n for n in (7, 8, 1234567890123)]
    assert nats_jetstream.read_numbers(subjects, 6) == [7, 8, 1234567890123]
    assert nats_jetstream.read_numbers([b"inbox.%013d.1.$FI" % 7], 6) == [7]
    assert nats_jetstream.read_numbers([], 6) == []
    for bad in (b"inbox.7", b"inbox.000000000000x", b""):
        with pytest.raises(PeerViolation, match="has no number"):
            nats_jetstream.read_numbers([subjects[0], bad], 6)


STORED = b'{"stream":"S","seq":%d}'
DUPLICATE = b'{"stream":"S","seq":%d,"duplicate": true}'
WRONG = b'{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 2"},"stream":"S","seq":0}'


def test_answers_of_one_stream() -> None:
    answers = nats_jetstream.read_publish_answers(range(5), [STORED % n for n in (9, 10, 99, 100, 7)])
    assert list(answers.seqs) == [9, 10, 99, 100, 7]
    assert answers.duplicates == []
    assert answers.failures == {}
    assert list(nats_jetstream.read_publish_answers([], []).seqs) == []


def test_answers_of_every_kind() -> None:
    payloads = [STORED % 5, DUPLICATE % 2, WRONG, b'{"stream":"T","domain":"hub","seq":8}']
    answers = nats_jetstream.read_publish_answers([10, 11, 12, 13], payloads)
    assert list(answers.seqs) == [5, 2, 0, 8]
    assert answers.duplicates == [1]
    assert answers.failures == {2: Failure(400, 10071, "wrong last sequence: 2")}


@pytest.mark.parametrize(
    "payload", [STORED % 0, b"", b"[]", b"{", b'{"seq":"x"}', b'{"stream":"S"}', b'{"stream":"S","seq":}']
)
def test_what_is_no_answer_is_a_violation(payload: bytes) -> None:
    with pytest.raises(PeerViolation):
        nats_jetstream.read_publish_answers([1, 2], [STORED % 1, payload])
    with pytest.raises(PeerViolation):
        nats_jetstream.read_publish_answers([1], [payload])


@pytest.mark.parametrize(
    ("payload", "answer"),
    [
        (b'{"type":"ack","seq":0,"msgs":100}', FlowAnswer(0, every=100)),
        (b'{"type":"ack","seq":200,"msgs":50}', FlowAnswer(200, every=50)),
        (b'{"type":"gap","last_seq":301,"seq":303}', FlowAnswer(303, lost_from=301)),
        (b'{"stream":"S","seq":328,"batch":"b2","count":300}', FlowAnswer(300, seq=328)),
        (
            b'{"error":{"code":400,"err_code":10208,"description":"unknown"},"stream":"S","seq":0}',
            FlowAnswer(0, failure=Failure(400, 10208, "unknown")),
        ),
    ],
)
def test_answers_to_a_fast_batch(payload: bytes, answer: FlowAnswer) -> None:
    assert nats_jetstream.read_flow_answer(payload) == answer


@pytest.mark.parametrize(
    "payload", [b"", b'{"type":"new"}', b'{"type":"ack","seq":-1}', b'{"type":"ack","seq":"1"}']
)
def test_what_is_no_answer_to_a_fast_batch_is_a_violation(payload: bytes) -> None:
    with pytest.raises(PeerViolation):
        nats_jetstream.read_flow_answer(payload)


# --- where messages came from ---

short_replies = st.builds(
    lambda consumer, *numbers: b"$JS.ACK.S.%b.%d.%d.%d.%d.%d" % (consumer, *numbers),
    st.sampled_from([b"C", b"C", b"C", b"D"]),
    st.integers(1, 3),
    *[st.integers(0, 1 << 62)] * 4,
)
long_replies = st.builds(
    lambda *numbers: b"$JS.ACK.hub.hash.S.C.%d.%d.%d.%d.%d.token" % numbers,
    *[st.integers(0, 1 << 62)] * 5,
)


@given(st.lists(short_replies, min_size=1, max_size=20) | st.lists(short_replies | long_replies, min_size=1))
def test_deliveries_are_read_as_one_by_one(replies: list[bytes]) -> None:
    read = nats_jetstream.read_deliveries(replies)
    fields = [
        reply.split(b".")[4:9] if b".hub." not in reply else reply.split(b".")[6:11] for reply in replies
    ]
    assert read.tries == [int(field[0]) for field in fields]
    assert read.seqs == [int(field[1]) for field in fields]
    assert read.time_texts == [field[3] for field in fields]
    assert read.pending == int(fields[-1][4])


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"_INBOX.x",
        b"$JS.ACK.S.C.1.2.3.4",
        b"$JS.ACK.S.C.1.2.3.4.x",
        b"$JS.ACK.S.C.1..3.4.5",
        b"$JS.FC.S.C.1.2.3.4.5",
    ],
)
def test_what_is_no_consumer_s_reply_is_a_violation(reply: bytes) -> None:
    good = b"$JS.ACK.S.C.1.2.3.4.5"
    for replies in ([reply], [good, reply], [reply, good]):
        with pytest.raises(PeerViolation):
            nats_jetstream.read_deliveries(replies)


def direct(own: bytes, seq: bytes, time: bytes) -> bytes:
    return (
        b"NATS/1.0\r\n%bNats-Stream: S\r\nNats-Subject: q.s\r\nNats-Sequence: %b\r\nNats-Time-Stamp: %b\r\n"
        b"Nats-Num-Pending: 330\r\nNats-Last-Sequence: 0\r\n\r\n" % (own, seq, time)
    )


@given(
    st.datetimes(min_value=datetime(1970, 1, 1), max_value=datetime(2200, 1, 1), timezones=st.just(UTC)),
    st.integers(1, 1 << 62),
)
def test_what_was_read_straight_from_a_stream(when: datetime, seq: int) -> None:
    text = (
        when.strftime("%Y-%m-%dT%H:%M:%S") + (f".{when.microsecond:06d}789" if when.microsecond else "") + "Z"
    )
    misleading = b"Nats-Sequence: 1\r\nNats-Time-Stamp: 1999-01-01T00:00:00Z\r\n"
    blocks = [direct(misleading, b"%d" % seq, text.encode())] * 2
    assert nats_jetstream.read_direct_seqs(blocks) == [seq] * 2
    expected_us = (when - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    assert nats_jetstream.read_direct_times_us(blocks) == [expected_us] * 2


@pytest.mark.parametrize(
    "block", [b"", b"NATS/1.0\r\n\r\n", direct(b"", b"x", b"y"), direct(b"", b"", b"12-3Z")]
)
def test_what_was_not_read_straight_from_a_stream_is_a_violation(block: bytes) -> None:
    with pytest.raises(PeerViolation):
        nats_jetstream.read_direct_seqs([block])
    with pytest.raises(PeerViolation):
        nats_jetstream.read_direct_times_us([block])
