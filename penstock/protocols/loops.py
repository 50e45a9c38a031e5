"""Loops over bytes, for the compiled build only: `penstock.build.COMPILED` says where they are used.

Compiled, a step over a few bytes costs a nanosecond, and an object for each message is what costs.
Interpreted it is the other way round: a step costs fifty, and objects that one call of C makes for many
messages are cheap. So whoever calls a loop has a second way that gives the same answer, and takes that one
interpreted. The tests of the protocols run on both builds.

Rules that always hold:
  * A loop only ever takes what it is certain about, whole messages first of all. It stops where it is not,
    and says where that is; whoever called it goes on from there with care.
  * Nothing here is imported where it is not compiled, and so nobody needs its packages there.
"""

from typing import Final

from librt.strings import (
    BytesWriter,
    read_i32_be,
    read_i32_le,
    read_i64_be,
    read_i64_le,
    write_i16_be,
    write_i32_be,
    write_i32_le,
    write_i64_be,
    write_i64_le,
)
from mypy_extensions import i32, i64, u8

_STEP: Final = 8  # bytes that are compared or copied at once
_SLICE_BYTES: Final = 512  # from here on a slice costs less than the steps
_ZEROS: Final = 0x3030303030303030  # b"00000000"
_LOW: Final = 0xFFFFFFFF  # of an offset: what its last eight digits say


def stands(data: bytes, at: i64, part: bytes) -> bool:
    """Whether `part` stands in `data` at that place."""
    size: i64 = len(part)
    if at + size > len(data):
        return False
    done: i64 = 0
    while done + _STEP <= size:
        if read_i64_le(data, at + done) != read_i64_le(part, done):
            return False
        done += _STEP
    while done < size:
        if data[at + done] != part[done]:
            return False
        done += 1
    return True


def copy(out: BytesWriter, data: bytes, start: i64, stop: i64) -> None:
    """Write a part of `data`."""
    if stop - start >= _SLICE_BYTES:
        out.write(data[start:stop])
        return
    while start + _STEP <= stop:
        write_i64_le(out, read_i64_le(data, start))
        start += _STEP
    while start < stop:
        out.append(u8(data[start]))
        start += 1


def number(data: bytes, start: i64, stop: i64, highest: i64) -> i64:
    """What the decimal digits there say; -1 where one of them is none, or it is more than `highest`."""
    while start + _STEP <= stop and read_i64_le(data, start) == _ZEROS:
        start += _STEP
    value: i64 = 0
    while start < stop:
        digit: i64 = data[start] - 48
        if digit < 0 or digit > 9:
            return -1
        value = value * 10 + digit
        if value > highest:
            return -1
        start += 1
    return value


def take_sized(
    data: bytes,
    at: i64,
    prefix: bytes,
    digits: i64,
    line_break: bytes,
    size_max: i64,
    payloads: list[bytes],
    sizes: list[int],
) -> i64:
    """Take messages: a prefix, the digits of a size, a break, as many bytes, a break. Where they end.

    Their contents are one more of the `payloads`, and their sizes are added one by one.
    """
    out = BytesWriter()
    lead: i64 = len(prefix)
    break_bytes: i64 = len(line_break)
    end: i64 = len(data)
    while stands(data, at, prefix):
        start: i64 = at + lead + digits
        if start > end:
            break
        size = number(data, at + lead, start, size_max)
        if size < 0 or not stands(data, start, line_break):
            break
        start += break_bytes
        stop: i64 = start + size
        if stop > end or not stands(data, stop, line_break):
            break
        copy(out, data, start, stop)
        sizes.append(size)
        at = stop + break_bytes
    if len(out):
        payloads.append(out.getvalue())
    return at


def take_fixed(data: bytes, at: i64, head: bytes, size: i64, tail: bytes, contents: list[bytes]) -> i64:
    """Take messages that are equal but for contents of one size. Where they end.

    Their contents are one more of the list.
    """
    out = BytesWriter()
    head_bytes: i64 = len(head)
    while stands(data, at, head) and stands(data, at + head_bytes + size, tail):
        at += head_bytes
        copy(out, data, at, at + size)
        at += size + len(tail)
    if len(out):
        contents.append(out.getvalue())
    return at


def bounds_of(sizes: list[int]) -> bytes:
    """Where contents of these sizes begin and end in a payload, as little-endian int32."""
    out = BytesWriter()
    end: i64 = 0
    write_i32_le(out, 0)
    for size in sizes:
        end += size
        write_i32_le(out, i32(end))
    return out.getvalue()


def write_dispatches(
    out: BytesWriter,
    lead: bytes,
    headers: dict[int, bytes],
    payload: bytes,
    payload_start: i64,
    bounds: bytes,
    middle: bytes,
    offset: i64,
    tail: bytes,
) -> None:
    """Write messages: a lead, the header for a size, a payload, `middle`, 14 hex digits of an offset, a tail.

    `bounds` are little-endian int32, one more than there are messages; `payload_start` is the bound that the
    first byte of the payload has.
    """
    count: i64 = len(bounds) // 4 - 1
    start: i64 = i64(read_i32_le(bounds, 0)) - payload_start
    header = b""
    header_size: i64 = -1
    high: i64 = -1  # the first six digits, which nearly all offsets share
    before_low = b""
    index: i64 = 1
    while index <= count:
        stop: i64 = i64(read_i32_le(bounds, index * 4)) - payload_start
        if stop - start != header_size:
            header_size = stop - start
            header = headers[header_size]
        if offset >> 32 != high:
            high = offset >> 32
            before_low = middle + b"%06x" % high
        out.write(lead)
        out.write(header)
        copy(out, payload, start, stop)
        out.write(before_low)
        write_i64_be(out, low_digits(offset))
        out.write(tail)
        start = stop
        offset += 1
        index += 1


def low_digits(offset: i64) -> i64:
    """The last eight hex digits of an offset, as big-endian bytes: all of them in a few steps."""
    spread: i64 = offset & _LOW
    spread = ((spread & 0xFFFF0000) << 16) | (spread & 0xFFFF)
    spread = ((spread & 0x0000FF000000FF00) << 8) | (spread & 0x000000FF000000FF)
    spread = ((spread & 0x00F000F000F000F0) << 4) | (spread & 0x000F000F000F000F)
    letters: i64 = ((spread + 0x0606060606060606) >> 4) & 0x0101010101010101
    return spread + 0x3030303030303030 + letters * (ord("a") - ord("9") - 1)


def offset_at(ids: bytes, start: i64, stop: i64) -> i64:
    """What the hex digits there say; -1 where one of them is none of ours."""
    value: i64 = 0
    while start < stop:
        digit: i64 = ids[start]
        if 48 <= digit <= 57:
            digit -= 48
        elif 97 <= digit <= 102:
            digit -= 87
        else:
            return -1
        value = (value << 4) | digit
        start += 1
    return value


def offset_ranges(ids: bytes, id_digits: i64, origin_digits: i64) -> list[tuple[int, int]] | None:
    """The offsets that ids of one origin name, as ranges, in their order; None where they are not all that.

    Ids are one after the other, and have at least 24 digits before their last 8.
    """
    ranges: list[tuple[int, int]] = []
    stop: i64 = len(ids)
    if offset_at(ids, 0, 12) < 0 or offset_at(ids, 12, origin_digits) < 0:
        return None
    first: i64 = -1
    end: i64 = -1
    at: i64 = 0
    while at < stop:
        low_at = at + id_digits - 8
        # Nearly always this is the neighbour of the one before: only the last digits differ, by one.
        if (
            end > 0
            and end & _LOW != 0
            and read_i64_be(ids, low_at) == low_digits(end)
            and read_i64_le(ids, at) == read_i64_le(ids, at - id_digits)
            and read_i64_le(ids, at + 8) == read_i64_le(ids, at + 8 - id_digits)
            and read_i64_le(ids, at + 16) == read_i64_le(ids, at + 16 - id_digits)
        ):
            end += 1
        else:
            offset = offset_at(ids, at + origin_digits, at + id_digits)
            if offset < 0 or (at and not _same_origin(ids, at, origin_digits)):
                return None
            if offset != end:
                if end >= 0:
                    ranges.append((first, end))
                first = offset
            end = offset + 1
        at += id_digits
    if end >= 0:
        ranges.append((first, end))
    return ranges


def _same_origin(ids: bytes, at: i64, origin_digits: i64) -> bool:
    """Whether an id has the origin of the first one."""
    index: i64 = 0
    while index < origin_digits:
        if ids[at + index] != ids[index]:
            return False
        index += 1
    return True


def take_requests(
    data: bytes,
    at: i64,
    head: bytes,
    middle: bytes,
    tail: bytes,
    id_first: bool,
    size_max: i64,
    ids: BytesWriter,
    payloads: list[bytes],
    sizes: list[int],
) -> i64:
    """Take RQ's requests: head, id, middle, size, payload, tail; or head, size, payload, middle, id, tail.

    Where they end. Ids are added as little-endian int32, and payloads in pieces, small ones in one.
    """
    out = BytesWriter()
    head_bytes: i64 = len(head)
    middle_bytes: i64 = len(middle)
    front: i64 = head_bytes + 4
    back: i64 = len(tail)
    if id_first:
        front += middle_bytes + 4
    else:
        back += middle_bytes + 4
    last: i64 = len(data) - front - back  # where the last one can begin, if it is empty
    while at <= last and stands(data, at, head):
        if id_first and not stands(data, at + head_bytes + 4, middle):
            break
        start: i64 = at + front
        size = i64(read_i32_be(data, start - 4))
        if size < 0 or size > size_max or at + size > last:  # Over 31 bits it would be negative.
            break
        stop: i64 = start + size
        id_at: i64 = at + head_bytes
        if not id_first:
            if not stands(data, stop, middle):
                break
            id_at = stop + middle_bytes
        if not stands(data, stop + back - len(tail), tail):
            break
        write_i32_le(ids, read_i32_be(data, id_at))
        if size < _SLICE_BYTES:
            copy(out, data, start, stop)
        else:
            if len(out):
                payloads.append(out.getvalue())
                out = BytesWriter()
            payloads.append(data[start:stop])
        sizes.append(size)
        at = stop + back
    if len(out):
        payloads.append(out.getvalue())
    return at


def take_id_frames(data: bytes, at: i64, action: i64, ids: BytesWriter) -> i64:
    """Take RQ's frames of an id and this action: CLEAR, ID with four bytes, the action. Where they end.

    Ids are added as little-endian int32.
    """
    last: i64 = len(data) - 7
    while at <= last and data[at] == 0x01 and data[at + 1] == 0x80 and data[at + 6] == action:
        write_i32_le(ids, read_i32_be(data, at + 2))
        at += 7
    return at


def write_id_frames(ids: bytes, action: u8) -> bytes:
    """Write such frames; ids are little-endian int32."""
    out = BytesWriter()
    stop: i64 = len(ids)
    at: i64 = 0
    while at < stop:
        write_i16_be(out, 0x0180)
        write_i32_be(out, read_i32_le(ids, at))
        out.append(action)
        at += 4
    return out.getvalue()


def write_deliveries(
    head: bytes,
    empty: bytes,
    middle: bytes,
    tail: bytes,
    ids: bytes,
    payload: bytes,
    payload_start: i64,
    bounds: bytes,
) -> bytes:
    """Write RQ's deliveries: head, size, payload, middle, id, tail; with `empty` before the middle of one
    that is empty.

    Ids and bounds are little-endian int32; `payload_start` is the bound of the payload's first byte.
    """
    out = BytesWriter()
    stop: i64 = len(ids)
    start: i64 = i64(read_i32_le(bounds, 0)) - payload_start
    at: i64 = 0
    while at < stop:
        end: i64 = i64(read_i32_le(bounds, at + 4)) - payload_start
        if end == start:
            out.write(empty)
        else:
            out.write(head)
            write_i32_be(out, i32(end - start))
            copy(out, payload, start, end)
        out.write(middle)
        write_i32_be(out, read_i32_le(ids, at))
        out.write(tail)
        start = end
        at += 4
    return out.getvalue()
