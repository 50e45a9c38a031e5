"""RISP as a layer of its own: any vocabulary, any cut of the stream, bounded memory."""

import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocols.errors import MisuseError, PeerViolation
from penstock.protocols.risp import HEAD_BYTES, NEED_MORE, Reader, encode
from tests.protocols.rq_reference import cut

# A vocabulary of its own, one command of each width, to show that nothing here knows RQ.
VOCABULARY = {7: None, 70: 1, 100: 2, 130: 4, 170: b"", 200: b"", 230: b""}
Told = tuple[int, int | bytes | None]


def values(command: int) -> st.SearchStrategy[int | bytes | None]:
    width = HEAD_BYTES[command] - 1
    if command < 64:
        return st.none()
    if command < 160:
        return st.integers(0, (1 << 8 * width) - 1)
    return st.binary(max_size=40)


commands = st.integers(0, 255).flatmap(lambda c: st.tuples(st.just(c), values(c)))


def reader(string_bytes_max: int = 1 << 20) -> Reader:
    return Reader("test", VOCABULARY, string_bytes_max=string_bytes_max)


def drain(source: Reader) -> Iterator[Told]:
    while (command := source.next()) != NEED_MORE:
        yield command, None if command < 64 else source.number if command < 160 else source.string


@given(st.lists(commands, max_size=20), st.lists(st.integers(0, 1000), max_size=8))
def test_what_is_encoded_is_read_whatever_the_chunks(sent: list[Told], at: list[int]) -> None:
    stream = b"".join(encode(command, value) for command, value in sent)
    source = reader()
    told: list[Told] = []
    for chunk in cut(stream, at):
        source.feed(chunk)
        told += drain(source)
    assert told == [(command, value) for command, value in sent if command in VOCABULARY]
    assert sum(source.skipped.values()) == len(sent) - len(told)
    assert set(source.skipped) == {command for command, _ in sent if command not in VOCABULARY}
    assert source.position == len(stream)


@given(st.binary(max_size=200), st.lists(st.integers(0, 300), max_size=8))
def test_any_bytes_give_commands_or_need_more_or_a_violation(stream: bytes, at: list[int]) -> None:
    results = []
    for chunks in ([stream], cut(stream, at), [stream[i : i + 1] for i in range(len(stream))]):
        source = reader(string_bytes_max=60)
        told: list[Told] = []
        violation = None
        try:
            for chunk in chunks:
                source.feed(chunk)
                told += drain(source)
        except PeerViolation as raised:
            violation = (raised.position, raised.offending[:1])
        results.append((told, source.skipped, violation))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    ("command", "value", "wire"),
    [
        (7, None, "07"),
        (70, 255, "46 ff"),
        (100, 258, "64 01 02"),
        (130, 0x80000001, "82 80 00 00 01"),
        (170, b"ab", "aa 02 6162"),
        (200, b"ab", "c8 00 02 6162"),
        (230, b"", "e6 00 00 00 00"),
    ],
)
def test_the_bytes_of_every_width(command: int, value: int | bytes | None, wire: str) -> None:
    assert encode(command, value) == bytes.fromhex(wire)


@pytest.mark.parametrize(
    ("command", "value"),
    [
        (-1, None),
        (256, None),
        (7, 1),
        (70, None),
        (70, 256),
        (70, -1),
        (100, b"x"),
        (170, b"x" * 256),
        (200, b"x" * 65536),
        (230, 5),
    ],
)
def test_what_a_command_cannot_say_is_misuse(command: int, value: int | bytes | None) -> None:
    with pytest.raises(MisuseError):
        encode(command, value)


@pytest.mark.parametrize("command", [170, 200, 230, 171, 201, 231])
def test_a_length_over_the_limit_is_refused_before_anything_is_allocated(command: int) -> None:
    width = HEAD_BYTES[command] - 1
    source = Reader("test", VOCABULARY, string_bytes_max=100, string_bytes_max_of={170: 50, 171: 50})
    limit = 50 if width == 1 else 100
    source.feed(b"\x07" + bytes((command,)) + limit.to_bytes(width, "big") + bytes(limit))
    list(drain(source))
    before = source.position
    source.feed(bytes((command,)) + (limit + 1).to_bytes(width, "big"))
    with pytest.raises(PeerViolation, match=f"limit is {limit}") as raised:
        source.next()
    assert raised.value.position == before
    assert raised.value.offending[0] == command


def test_feeding_before_everything_was_read_is_misuse() -> None:
    source = reader()
    source.feed(b"\x07\x07")
    source.next()
    with pytest.raises(MisuseError, match="unread"):
        source.feed(b"\x07")


def test_the_chunk_may_be_reused_by_its_owner() -> None:
    buffer = bytearray(64)
    source = reader()
    told: list[Told] = []
    stream = encode(230, b"a" * 100) + encode(170, b"bcd") + encode(130, 9)
    for start in range(0, len(stream), 10):
        piece = stream[start : start + 10]
        buffer[: len(piece)] = piece
        source.feed(memoryview(buffer)[: len(piece)])
        told += drain(source)
        buffer[:] = b"\xff" * 64
    assert told == [(230, b"a" * 100), (170, b"bcd"), (130, 9)]


def test_a_large_string_costs_its_own_size_and_an_idle_reader_nothing() -> None:
    size = 64 << 20
    chunk = memoryview(bytearray(256 << 10))
    source = reader(string_bytes_max=size)
    tracemalloc.start()
    try:
        source.feed(encode(230, b"")[:1] + size.to_bytes(4, "big"))
        assert source.next() == NEED_MORE
        for _ in range(size // len(chunk)):
            source.feed(chunk)
            if source.next() != NEED_MORE:
                break
        assert len(source.string) == size
        peak_bytes = tracemalloc.get_traced_memory()[1]
        source.string = b""
        idle_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert peak_bytes < size * 1.2
    assert idle_bytes < 64 << 10


def test_a_skipped_string_is_not_stored() -> None:
    size = 16 << 20
    chunk = bytes(1 << 20)
    source = reader(string_bytes_max=size)
    tracemalloc.start()
    try:
        source.feed(bytes((231,)) + size.to_bytes(4, "big"))
        assert source.next() == NEED_MORE
        for _ in range(16):
            source.feed(chunk)
            assert source.next() == NEED_MORE
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20
    assert source.skipped == {231: 1}
    source.feed(b"\x07")
    assert source.next() == 7
