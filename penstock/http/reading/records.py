"""Records: where messages of a queue are in the stream of a cluster's log, for those who read it themselves.

The files that lie here are copies of what the stream has, and beside them lies which record has which bytes
(`log/jetstream/replica.py`). So the headers of a queue's blocks tell which bytes of which files are
needed, and the numbers beside them from which record on to read.

Rules that always hold:
  * What is told is synced, so it is in the stream.
  * A part begins and ends with a block of the queue. Blocks that are near each other in one file are one
    part, with what stands between them: records are read whole anyway.
  * The work has a bound. Where a range has more than that, what is told ends earlier, and says where.
  * Of messages that were staged, the blocks of the stage queue are told, and which of its rows are meant.
  * Files that compacting has written are told for such rows only: of messages, not every one is there, and
    the log is complete only behind them.

How it fails: as reading the log does (`api/log.py`).
"""

import os
from array import array
from typing import Any, Final

from penstock.http.api.log import Range, Wanted, check_identity, losses_told, range_of
from penstock.http.problems import Problem
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.ranges import Adopted, Part
from penstock.log.jetstream.replica import RECORDS, RecordIndex
from penstock.log.overlay import TRIES_MAX
from penstock.log.reader import LogReader
from penstock.log.segment import parse_segment_name

GAP_BYTES_MAX: Final = 1 << 20
"""Bytes of other queues that are read along rather than asked around."""

PARTS_MAX: Final = 1000
BLOCKS_MAX: Final = 20_000
"""Blocks that are looked at for one answer: some ten milliseconds."""

_OF_STAGES: Final = Part._field_defaults


class Planner:
    """Tells where messages are. For one log."""

    def __init__(self, names: LogNames, data: str) -> None:
        self._names = names
        self._index = RecordIndex(os.path.join(os.path.dirname(data), RECORDS))

    def plan(self, reader: LogReader, wanted: Wanted) -> dict[str, Any] | None:
        """The fields of the answer; None where nothing of the queue is synced."""
        for _ in range(TRIES_MAX):
            known = reader.queue(wanted.queue)
            if known is None:
                return None
            check_identity(reader, wanted)
            served = range_of(wanted, known)
            with losses_told(reader, wanted, known):
                parts, end = self._parts(reader, wanted, served)
            if all(part.seq_first for part in parts):
                origin = reader.origin(wanted.queue, 0)
                return {
                    "stream": self._names.stream,
                    "log": int(origin[:6], 16),
                    "number": known.number,
                    "start": served.start,
                    "end": end,
                    "parts": [_fields(part) for part in parts],
                }
            # A file was compacted while its blocks were looked at: the range is another one now. Or it is on
            # its way into the stream, with rows of stages.
            reader.refresh()
        raise Problem("unavailable", f"queue {wanted.queue!r}: its files change all the time; try again")

    def _parts(self, reader: LogReader, wanted: Wanted, served: Range) -> tuple[list[Part], int]:
        """The parts, and up to which offset they go."""
        parts: list[Part] = []
        runs: list[Adopted] = []  # of the last part
        pairs: dict[str, array[int]] = {}
        found = reader.messages(wanted.queue, *served, fail_on_loss=wanted.fail_on_loss, headers_only=True)
        for count, block in enumerate(found):
            header, stored = block.header, block.stored
            file, base = reader.file_of(stored)
            first, end = header.first_offset + block.lo, header.first_offset + block.hi
            position = stored.position - base
            number = stored.queue if stored is not header else 0
            if count == BLOCKS_MAX:
                return parts, first
            last = parts[-1] if parts else None
            if (
                last is not None
                and (last.file, last.number) == (file, number)
                and 0 <= position - last.position_end <= GAP_BYTES_MAX  # rows may lie before those before
            ):
                parts[-1] = last._replace(position_end=stored.end - base, offset_end=end)
            elif len(parts) == PARTS_MAX:
                return parts, first
            else:
                if file not in pairs:
                    pairs[file] = self._index.read(file)
                seq = seq_of(pairs[file], position)
                if parse_segment_name(file) != (base, 0) and not (number and pairs[file]):
                    seq = 0
                runs = []
                subject, position_end = self._names.file(file), stored.end - base
                parts.append(Part(file, subject, base, position, position_end, seq, first, end, number, runs))
            if number:
                row = stored.first_offset + block.lo
                _add(runs, Adopted(first, row, end - first, header.opening, header.time_us))
        return parts, served.end


def _add(runs: list[Adopted], run: Adopted) -> None:
    """One more, behind those that there are: it may go on where the last of them ends."""
    last = runs[-1] if runs else run
    length = last.length
    if run == last._replace(offset=last.offset + length, row=last.row + length, length=run.length):
        runs[-1] = last._replace(length=length + run.length)
    else:
        runs.append(run)


def _fields(part: Part) -> dict[str, Any]:
    """As it is told. Whoever knows nothing of stages reads what needs nothing of them."""
    return {name: value for name, value in part._asdict().items() if name not in _OF_STAGES or part.number}


def seq_of(pairs: "array[int]", position: int) -> int:
    """From which record on a position of a file is found, by what was noted when its bytes were stored."""
    # The last that was noted counts: a file that was cut may have been written again.
    for at in range(len(pairs) - 2, -1, -2):
        if pairs[at] <= position:
            return pairs[at + 1]
    return 1
