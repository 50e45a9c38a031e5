"""MappedSegments: the files of a log as read-only maps, with an index of the blocks in each.

Nothing is copied out of a map: who needs bytes gets a window (a memoryview) on it. A map is let
go when `maps_max` newer ones are there, and really goes when the last window on it does, so a
window that was handed out stays good whatever happens to the file's name.

How it fails: FileNotFoundError where a segment has been removed or compacted since its name was
seen; LogDamaged, with file, position and offsets, where a body does not have its checksum.
"""

import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator

from penstock.log.block import HEADER_BYTES, KIND_CONTROL, Header, read_header
from penstock.log.checksum import crc32
from penstock.log.disk import RealDisk
from penstock.log.errors import LogDamaged
from penstock.log.findings import rot
from penstock.log.scan import Hole, find_block
from penstock.log.segment import Index, Segment

INDEX_ROWS_MAX = 1_000_000
"""Blocks that are indexed at a time, 32 bytes each."""


class MappedSegments:
    """Maps and indexes of segments, those that were used last."""

    def __init__(self, path: str, maps_max: int) -> None:
        self._disk = RealDisk(path, read_only=True)
        self._maps_max = maps_max
        self._maps: OrderedDict[str, memoryview] = OrderedDict()
        self._rows: OrderedDict[Segment, int] = OrderedDict()  # how many each index has

    def where(self, segment: Segment) -> str:
        return self._disk.where(segment.name)

    def view(self, segment: Segment) -> memoryview:
        """The file of a segment: all that the segment is known to have, and maybe more."""
        name = segment.name
        view = self._maps.get(name)
        # A file for which no room was set aside has grown since it was mapped.
        if view is not None and len(view) >= segment.size:
            self._maps.move_to_end(name)
            return view
        fd = os.open(self._disk.where(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            is_empty = os.fstat(fd).st_size == 0
            view = memoryview(b"" if is_empty else mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(fd)
        self._maps[name] = view
        self._maps.move_to_end(name)
        while len(self._maps) > self._maps_max:
            self._maps.popitem(last=False)
        return view

    def headers(self, segment: Segment, start: int, end: int) -> Iterator[Header]:
        """The valid headers from log position `start` to `end`; what is not valid is stepped over."""
        base, at = segment.base, start
        if len(self._maps.get(segment.name, b"")) < end - base:
            self._maps.pop(segment.name, None)  # as it was when it had less
        view = self.view(segment)
        while at < end:
            header = read_header(view, at - base, at)
            if header is None or header.end > end:
                file = self._disk.open(segment.name)
                try:
                    header = find_block(file, base, at + 8, end)
                finally:
                    file.close()
                if header is None:
                    return
            yield header
            at = header.end

    def body(self, segment: Segment, header: Header, queue: str, what: str = "") -> memoryview:
        """The body of a block, checked. For the error: the name of its queue, or what is in it."""
        at = header.position - segment.base + HEADER_BYTES
        body = self.view(segment)[at : at + header.body_bytes]
        if len(body) == header.body_bytes and crc32(body) == header.body_checksum:
            return body
        hole = Hole(header.position, header.end, header)
        raise LogDamaged(f"{self.where(segment)}: {rot(hole, segment.base, queue, what).text}")

    # --- indexes -----------------------------------------------------------------------------------

    def index(self, segment: Segment) -> Index:
        """Where the blocks of a segment are; walks over it where that has been forgotten."""
        index = segment.index
        if index is None:
            index = Index()
            for header in self.headers(segment, segment.base, segment.end):
                if header.kind != KIND_CONTROL:
                    index.note(header)
            segment.index = index
        self.used(segment)
        return index

    def used(self, segment: Segment) -> None:
        """Forget the indexes that nobody has used for longest, but not this one."""
        if segment.index is not None:
            self._rows[segment] = segment.index.rows
            self._rows.move_to_end(segment)
        total = sum(self._rows.values())
        for oldest in list(self._rows):
            if total <= INDEX_ROWS_MAX or oldest is segment:
                break
            total -= self._rows.pop(oldest)
            oldest.index = None

    def forget(self, segment: Segment) -> None:
        """A segment that will not be asked for again."""
        segment.index = None
        self._rows.pop(segment, None)
        self._maps.pop(segment.name, None)

    def unmap(self) -> None:
        """Let go of the files, and keep the indexes."""
        self._maps.clear()

    def close(self) -> None:
        self._maps.clear()
        self._rows.clear()
