"""Loops over columns of a block, for the compiled build only. The rules are those of `protocols/loops.py`."""

from librt.strings import BytesWriter, read_i32_le, write_i32_le
from mypy_extensions import i32, i64


def joined_bounds(columns: list[bytes], start: i32 = 0) -> bytes:
    """The bounds of all batches, little-endian int32 that begin with 0 each, as those of one; `start` is less
    where the first column begins with more."""
    out = BytesWriter()
    write_i32_le(out, 0)
    for column in columns:
        size: i64 = len(column)
        at: i64 = 4
        end = start
        while at < size:
            end = start + read_i32_le(column, at)
            write_i32_le(out, end)
            at += 4
        start = end
    return out.getvalue()
