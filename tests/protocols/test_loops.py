"""The loops of the compiled build, against the plainest Python that says the same.

They run here as they are: compiled by `make test-compiled`, and by `make test` as the Python that they also
are, though nobody uses them so. That both ways through a protocol agree is said by the tests of the protocol,
which run on both builds.
"""

from collections.abc import Iterable
from itertools import accumulate

from hypothesis import example, given
from hypothesis import strategies as st
from librt.strings import BytesWriter

from penstock.model.ids import ID_DIGITS, ORIGIN_DIGITS, id_of, origin_of, split_id
from penstock.protocols import loops
from penstock.protocols.phpmq_session import ranges_of

ORIGINS = (origin_of(1, 2, 3), origin_of(1, 2, 4), origin_of(0xABCDEF, 0, 0xFFFFFF))
OFFSET_EDGES = (0, 9, 10, 15, 16, 0xFFFFFFFF, 0x100000000, 0x1FFFFFFFF, (1 << 56) - 1)

# Few different bytes, so that what stands somewhere often nearly fits.
texts = st.binary(max_size=40).map(lambda text: bytes(byte & 1 for byte in text))
contents = st.binary(max_size=700)
offsets = st.one_of(st.integers(0, 20), st.integers(0, (1 << 56) - 1), st.sampled_from(OFFSET_EDGES))


@given(texts, st.integers(0, 50), texts)
def test_stands(data: bytes, at: int, part: bytes) -> None:
    expected = at + len(part) <= len(data) and data[at : at + len(part)] == part
    assert loops.stands(data, at, part) is expected


@given(contents, st.data())
def test_copy(data: bytes, draw: st.DataObject) -> None:
    start = draw.draw(st.integers(0, len(data)))
    stop = draw.draw(st.integers(start, len(data)))
    out = BytesWriter()
    out.write(b"before")
    loops.copy(out, data, start, stop)
    assert out.getvalue() == b"before" + data[start:stop]


@given(st.one_of(st.binary(max_size=30), st.integers(0, 10**30).map(lambda n: b"%030d" % n)), st.integers(0))
@example(b"0" * 36, 0)
@example(b"0" * 29 + b"100", 100)
@example(b"0" * 29 + b"101", 100)
def test_number(digits: bytes, highest: int) -> None:
    highest = min(highest, 1 << 40)
    expected = -1
    if not digits.strip(b"0123456789") and int(digits or b"0") <= highest:
        expected = int(digits or b"0")
    assert loops.number(b"x" + digits + b"7", 1, 1 + len(digits), highest) == expected


@given(st.lists(contents, max_size=5), st.sampled_from([b"", b"\n"]), texts, st.data())
def test_take_sized_takes_every_whole_message_and_no_more(
    messages: list[bytes], line_break: bytes, prefix: bytes, draw: st.DataObject
) -> None:
    whole = [b"P" + prefix + b"%029d" % len(m) + line_break + m + line_break for m in messages]
    ends = list(accumulate(map(len, whole), initial=3))
    data = b"..." + b"".join(whole)
    data = data[: draw.draw(st.integers(3, len(data)))]
    payloads: list[bytes] = [b"first"]
    sizes: list[int] = [5]
    at = loops.take_sized(data, 3, b"P" + prefix, 29, line_break, 1 << 30, payloads, sizes)
    count = sum(end <= len(data) for end in ends[1:])
    assert at == ends[count]
    assert b"".join(payloads) == b"first" + b"".join(messages[:count])
    assert sizes == [5, *map(len, messages[:count])]


def test_take_sized_leaves_what_is_over_the_limit() -> None:
    data = b"P02abP03abcP02ab"
    payloads: list[bytes] = []
    sizes: list[int] = []
    assert loops.take_sized(data, 0, b"P", 2, b"", 2, payloads, sizes) == 5
    assert (payloads, sizes) == ([b"ab"], [2])


@given(st.lists(st.binary(min_size=9, max_size=9), max_size=6), texts, texts, st.data())
def test_take_fixed_takes_every_whole_message_and_no_more(
    messages: list[bytes], head: bytes, tail: bytes, draw: st.DataObject
) -> None:
    whole = [b"H" + head + message + tail for message in messages]
    data = b"".join(whole)
    data = data[: draw.draw(st.integers(0, len(data)))]
    taken: list[bytes] = []
    at = loops.take_fixed(data, 0, b"H" + head, 9, tail, taken)
    count = len(data) // len(whole[0]) if whole else 0
    assert at == sum(map(len, whole[:count]))
    assert b"".join(taken) == b"".join(messages[:count])


@given(st.lists(st.integers(0, 1 << 20)))
def test_bounds_of(sizes: list[int]) -> None:
    expected = b"".join(bound.to_bytes(4, "little") for bound in accumulate(sizes, initial=0))
    assert loops.bounds_of(sizes) == expected


@given(st.lists(contents, max_size=5), offsets, st.integers(0, 9))
@example([b"", b"a", b"", b"b"], 0xFFFFFFFE, 0)
def test_write_dispatches(messages: list[bytes], offset: int, payload_start: int) -> None:
    headers = {size: b"%d>" % size for size in set(map(len, messages))}
    bounds = accumulate(map(len, messages), initial=payload_start)
    out = BytesWriter()
    loops.write_dispatches(
        out,
        b"<",
        headers,
        b"".join(messages),
        payload_start,
        b"".join(bound.to_bytes(4, "little") for bound in bounds),
        b"|id",
        offset,
        b";",
    )
    expected = [b"<%d>%s|id%014x;" % (len(m), m, offset + i) for i, m in enumerate(messages)]
    assert out.getvalue() == b"".join(expected)


ids_of_rq = st.sampled_from((0, 1, 7, 0x01800000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF))


def le32(numbers: Iterable[int]) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


@given(st.lists(st.tuples(ids_of_rq, contents), max_size=5), texts, texts, st.booleans(), st.data())
def test_take_requests_takes_every_whole_one_and_no_more(
    requests: list[tuple[int, bytes]], middle: bytes, tail: bytes, id_first: bool, draw: st.DataObject
) -> None:
    head, tail, whole = b"H" + middle, tail + b"T", []
    for ident, payload in requests:
        said = [ident.to_bytes(4, "big"), len(payload).to_bytes(4, "big") + payload]
        first, second = said if id_first else said[::-1]
        whole.append(head + first + middle + second + tail)
    ends = list(accumulate(map(len, whole), initial=0))
    data = b"".join(whole)[: draw.draw(st.integers(0, ends[-1]))]
    size_max = draw.draw(st.sampled_from((2, 600, 1 << 30)))
    count = sum(end <= len(data) for end in ends[1:])
    count = next((i for i in range(count) if len(requests[i][1]) > size_max), count)
    if draw.draw(st.booleans()):
        data += b"H" + b"\xff" * 60
    ids = BytesWriter()
    payloads: list[bytes] = []
    sizes: list[int] = []
    at = loops.take_requests(data, 0, head, middle, tail, id_first, size_max, ids, payloads, sizes)
    assert at == ends[count]
    assert ids.getvalue() == le32(ident for ident, _ in requests[:count])
    assert b"".join(payloads) == b"".join(payload for _, payload in requests[:count])
    assert sizes == [len(payload) for _, payload in requests[:count]]


def test_take_requests_leaves_a_size_that_no_payload_has() -> None:
    data = b"H\0\0\0\1M\x80\0\0\0T"
    assert loops.take_requests(data, 0, b"H", b"M", b"T", True, 1 << 30, BytesWriter(), [], []) == 0


@given(
    st.lists(ids_of_rq, max_size=5),
    st.sampled_from((10, 11, 13, 16)),
    st.integers(0, 8),
    st.binary(max_size=8),
)
def test_id_frames(ids: list[int], action: int, cut: int, more: bytes) -> None:
    frames = [b"\x01\x80" + ident.to_bytes(4, "big") + bytes((action,)) for ident in ids]
    assert loops.write_id_frames(le32(ids), action) == b"".join(frames)
    data = b"".join(frames)
    data = data[: len(data) - cut] if cut else data + b"\x01\x80" + more[:4] + b"\x0c"
    count = len(data) // 7 if cut else len(ids)
    out = BytesWriter()
    assert loops.take_id_frames(data, 0, action, out) == 7 * count
    assert out.getvalue() == le32(ids[:count])


@given(st.lists(st.tuples(ids_of_rq, contents), max_size=5), st.integers(0, 9))
@example([(1, b""), (2, b"a"), (3, b"")], 0)
def test_write_deliveries(messages: list[tuple[int, bytes]], payload_start: int) -> None:
    bounds = le32(accumulate((len(payload) for _, payload in messages), initial=payload_start))
    payload = b"".join(payload for _, payload in messages)
    ids = le32(ident for ident, _ in messages)
    written = loops.write_deliveries(b"<", b"(0)", b"|id", b";", ids, payload, payload_start, bounds)
    expected = [
        (b"<" + len(said).to_bytes(4, "big") + said if said else b"(0)")
        + b"|id"
        + ident.to_bytes(4, "big")
        + b";"
        for ident, said in messages
    ]
    assert written == b"".join(expected)


@given(offsets)
def test_low_digits(offset: int) -> None:
    assert int(loops.low_digits(offset)).to_bytes(8, "big") == b"%08x" % (offset & 0xFFFFFFFF)


runs = st.tuples(st.sampled_from(ORIGINS), offsets, st.integers(1, 4)).map(
    lambda run: [id_of(run[0], min(run[1] + i, (1 << 56) - 1)) for i in range(run[2])]
)
foreign = st.binary(min_size=ID_DIGITS, max_size=ID_DIGITS).map(lambda raw: [raw])


@given(st.lists(st.one_of(runs, runs, foreign), min_size=1, max_size=6))
@example([[id_of(ORIGINS[0], offset) for offset in (0xFFFFFFFE, 0xFFFFFFFF, 0x100000000, 0x100000001)]])
@example([[id_of(ORIGINS[0], offset) for offset in (0xFFFFFFFF, 0)]])
@example([[id_of(ORIGINS[0], 1), id_of(ORIGINS[0], 2).upper()], [id_of(ORIGINS[2], 3).upper()]])
@example([[b"g" * ID_DIGITS]])
def test_offset_ranges(groups: list[list[bytes]]) -> None:
    ids = [id_ for group in groups for id_ in group]
    found = [split_id(id_) for id_ in ids]
    expected = None
    if None not in found and len({parts[0] for parts in found if parts is not None}) == 1:
        expected = ranges_of([parts[1] for parts in found if parts is not None])
    assert loops.offset_ranges(b"".join(ids), ID_DIGITS, ORIGIN_DIGITS) == expected
