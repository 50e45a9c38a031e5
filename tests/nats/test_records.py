"""Records: fixed bytes, round trips, and that no damage of a record goes unseen."""

import struct
import zlib
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.log.jetstream.records import HEAD_BYTES_MAX, MAGIC, Kind, Record, RecordDamaged, read_record

SEGMENT = "00000000000000000000.seg"


@dataclass(frozen=True, slots=True)
class Vector:
    """A record and its bytes, field by field, as they were written by the first version."""

    record: Record
    packed: str


VECTORS = {
    "write": Vector(
        Record(Kind.WRITE, SEGMENT, 4096, 0x0102030405060708, 9, True, b"payload"),
        "506e5231"  # magic
        "05cc99ed"  # checksum
        "01"  # kind
        "01"  # more
        "1800"  # length of the name
        "0807060504030201"  # writer
        "0900000000000000"  # number
        "0010000000000000"  # position
        "0700000000000000"  # length of the bytes
        "30303030303030303030303030303030303030302e736567"
        "7061796c6f6164",
    ),
    "piece": Vector(
        Record(Kind.PIECE, "snapshot-7", 0, 1, 0, False, b"\0\xff"),
        "506e52315485c87002000a00"
        "0100000000000000"
        "0000000000000000"
        "0000000000000000"
        "0200000000000000"
        "736e617073686f742d3700ff",
    ),
    "truncate": Vector(
        Record(Kind.TRUNCATE, "a", (1 << 64) - 1, (1 << 63) - 1, 1 << 40, False),
        "506e5231d7bd8a0b03000100ffffffffffffff7f0000000000010000ffffffffffffffff000000000000000061",
    ),
}

records = st.builds(
    Record,
    kind=st.sampled_from(Kind),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}", fullmatch=True),
    position=st.integers(0, (1 << 64) - 1),
    writer=st.integers(0, (1 << 64) - 1),
    number=st.integers(0, (1 << 64) - 1),
    more=st.booleans(),
    data=st.binary(max_size=200),
)


@pytest.mark.parametrize("vector", VECTORS.values(), ids=VECTORS)
def test_a_record_has_these_bytes(vector: Vector) -> None:
    assert vector.record.pack().hex() == vector.packed
    assert read_record(bytes.fromhex(vector.packed)) == vector.record


@given(records)
def test_what_is_packed_is_read(record: Record) -> None:
    packed = record.pack()
    assert len(packed) <= len(record.data) + HEAD_BYTES_MAX
    assert read_record(packed) == record
    assert read_record(packed).end == record.position + len(record.data)


@given(records)
def test_a_part_of_something_larger_is_packed_as_its_bytes(record: Record) -> None:
    around = b"before" + bytes(record.data) + b"behind"
    part = memoryview(around)[6 : 6 + len(record.data)]
    assert record._replace(data=part).pack() == record.pack()


@pytest.mark.parametrize("vector", VECTORS.values(), ids=VECTORS)
def test_every_flipped_bit_is_found(vector: Vector) -> None:
    whole = bytes.fromhex(vector.packed)
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordDamaged):
            read_record(bytes(damaged))


@pytest.mark.parametrize("vector", VECTORS.values(), ids=VECTORS)
def test_every_cut_is_found(vector: Vector) -> None:
    whole = bytes.fromhex(vector.packed)
    for end in range(len(whole)):
        with pytest.raises(RecordDamaged):
            read_record(whole[:end])
        with pytest.raises(RecordDamaged):
            read_record(whole[len(whole) - end :] if end else b"")
    with pytest.raises(RecordDamaged):
        read_record(whole + b"\0")


@given(st.binary(max_size=300))
def test_whatever_comes_is_a_record_or_is_damaged(payload: bytes) -> None:
    for candidate in (payload, MAGIC + payload):
        with pytest.raises(RecordDamaged):
            read_record(candidate)


def packed_by_somebody_else(kind: int, flags: int, name: bytes) -> bytes:
    """With a checksum that holds."""
    rest = struct.pack("<BBHQQQQ", kind, flags, len(name), 1, 2, 3, 0) + name
    return MAGIC + zlib.crc32(rest).to_bytes(4, "little") + rest


@pytest.mark.parametrize(
    ("kind", "flags", "name"),
    [
        (0, 0, b"a"),
        (4, 0, b"a"),
        (1, 2, b"a"),
        (1, 0, b""),
        (1, 0, b"../lock"),
        (1, 0, b"/etc/passwd"),
        (1, 0, b".hidden"),
        (1, 0, b"a\0b"),
        (1, 0, b"\xff\xfe"),
        (1, 0, b"a" * 256),
    ],
)
def test_what_this_version_does_not_know_is_not_used(kind: int, flags: int, name: bytes) -> None:
    assert read_record(packed_by_somebody_else(1, 1, b"a")).name == "a"
    with pytest.raises(RecordDamaged):
        read_record(packed_by_somebody_else(kind, flags, name))
