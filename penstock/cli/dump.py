"""`penstock dump DIR`: shows what is in a data folder, as messages, events or blocks.

Reads as any other process would: synced data only, no lock, nothing changed; so it may run beside
a broker. The state of a message is what a start of the broker would find, so nobody holds one. One that was
delayed is so until the moment `due`: only the clock ends it, and nobody writes that down.

Whatever a message or a name holds, only printable characters reach the terminal: everything else
is shown as an escape. What cannot be read is named on standard error, and the exit code is 1.
"""

import argparse
import base64
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from penstock.cli.admin import at_least
from penstock.cli.main import EXIT_FAILURE
from penstock.common.tables import encodable, line
from penstock.errors import Misuse
from penstock.log import block as layout
from penstock.log.adoption import read_adoption
from penstock.log.block import (
    FLAG_ELSEWHERE,
    KIND_CONTROL,
    KIND_MESSAGES,
    KIND_SETTLEMENTS,
    Header,
    read_control,
)
from penstock.log.disk import RealDisk
from penstock.log.errors import LogRefused
from penstock.log.inspect import check_is_log
from penstock.log.overlay import replayed
from penstock.log.queue import LogQueue
from penstock.log.read_view import newest_generations
from penstock.log.reader import LogReader, ReaderQueue
from penstock.log.scan import Hole, is_blank, walk
from penstock.log.segment import segment_name
from penstock.model.batch import RETRIES_NONE
from penstock.model.headers import decode_headers, encode_headers
from penstock.model.ids import id_of
from penstock.model.life import State
from penstock.model.pending import AS_STORED, NO_NOTE

HELP = "show the messages, events or blocks of a data folder, and change nothing"

PREVIEW_BYTES = 48
Row = dict[str, Any]  # what one line says, by column

KINDS = {KIND_MESSAGES: "messages", KIND_SETTLEMENTS: "settlements", KIND_CONTROL: "control"}
FLAGS = {
    KIND_MESSAGES: ("expires", "retries", "reply", "headers", "part", "end", "delayed", "elsewhere"),
    KIND_SETTLEMENTS: ("why", "moved", "part", "end", "repaired"),
    KIND_CONTROL: ("part", "end"),
}
"""Of each kind: the same bit may say another thing elsewhere."""


def _table(text: str) -> dict[str, int]:
    """Columns and their widths; the last one has none."""
    return {name: int(width) for name, width in (column.split() for column in text.split(","))}


MESSAGE_TABLE = _table(
    "offset 8, id 32, time 27, state 24, attempts 8, protocol 8, expires 27, due 27, retries 7, headers 20, "
    "bytes 7, value 0"
)
EVENT_TABLE = _table(
    "event_offset 12, event 9, offset 8, id 32, reason 19, attempt 7, dispatched 27, time 27, consumer 0"
)
BLOCK_TABLE = _table(
    "file 26, position 9, kind 11, queue 16, count 7, offsets 17, events 17, bytes 9, opening 7, time 27, "
    "detail 0"
)
NUMBERS = {
    *("offset", "attempts", "retries", "bytes", "event_offset", "attempt", "position", "count", "opening")
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The folder, which part of it, and in which form."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", metavar="DIR", help="the data folder; a broker may be using it")
    parser.add_argument("--queue", metavar="NAME", help="only this queue (default: all)")
    parser.add_argument(
        "--from",
        dest="start",
        metavar="OFFSET",
        type=at_least(0),
        default=0,
        help="begin there; with --events an event offset, with --blocks a log position (default: 0)",
    )
    parser.add_argument("--limit", metavar="N", type=at_least(0), help="at most so many lines (default: all)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--blocks", action="store_true", help="the blocks, with file and position")
    what.add_argument("--events", action="store_true", help="what has happened to messages")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object per line; payloads as value_base64, in full"
    )
    parser.epilog = (
        "examples:\n"
        "  penstock dump penstock-data --queue orders --from 1000 --limit 20\n"
        "  penstock dump penstock-data --queue orders --events\n"
        "  penstock dump penstock-data --blocks | less -S\n"
        "  penstock dump penstock-data --json > messages.ndjson"
    )


def run(args: argparse.Namespace) -> int:
    """Show it."""
    try:
        check_is_log(args.folder)
    except LogRefused as error:
        raise Misuse(str(error)) from None
    # What is missing is told here, in the order of the output; the log's own words would come twice.
    logger = logging.getLogger("penstock.log")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with LogReader(args.folder) as reader:
            dump = _Dump(reader, args.queue, args.start)
            table, rows = (
                (BLOCK_TABLE, dump.blocks())
                if args.blocks
                else (EVENT_TABLE, dump.events())
                if args.events
                else (MESSAGE_TABLE, dump.messages())
            )
            show = _show_json if args.json else _show_table
            show(islice(rows, args.limit), table)
    except BrokenPipeError:
        raise  # Whoever read the output has seen enough; `main` knows what to do.
    except OSError as error:
        print(f"penstock dump: {args.folder}: cannot be read: {error}", file=sys.stderr)
        return EXIT_FAILURE
    finally:
        logger.setLevel(level)
    return EXIT_FAILURE if dump.lost else 0


class _Dump:
    """The rows of each table, one dict per line."""

    def __init__(self, reader: LogReader, queue: str | None, start: int) -> None:
        self._reader = reader
        self._start = start
        self.lost = False
        known = reader.queues()
        if queue is not None and queue not in known:
            names = ", ".join(map(repr, known)) or "none"
            raise LogRefused(f"there is no queue {queue!r} in {reader.path!r}; there are: {names}")
        self._queues = {name: known[name] for name in known if queue in (None, name)}
        self._every_queue = queue is None

    def _say_lost(self, what: str) -> None:
        self.lost = True
        sys.stdout.flush()
        path = self._reader.path
        print(f"penstock dump: {what} cannot be read; `penstock verify {path}` says why", file=sys.stderr)

    # --- messages ------------------------------------------------------------------------------------

    def messages(self) -> Iterator[Row]:
        state, _ = replayed(self._reader.path, self._reader.position)
        for name, facts in self._queues.items():
            queue = state.queues[name]
            # Before the start it is right that messages are missing, but for those that are lost.
            lost = [(d.first, min(d.end, facts.offset_start)) for d in state.damage if d.queue == name]
            at = self._start
            for block in self._reader.messages(name, at, facts.offset_end, fail_on_loss=False):
                header = block.header
                first = header.first_offset + block.lo
                self._check_gap(name, "offset", max(at, self._now(name).offset_start), first)
                for lost_first, lost_end in lost:
                    self._check_gap(name, "offset", max(at, lost_first), min(first, lost_end))
                columns = block.columns()
                for i in range(block.lo, block.hi):
                    offset = header.first_offset + i
                    value = bytes(columns.payload[columns.bounds[i] : columns.bounds[i + 1]])
                    headers = columns.headers.at(i) if columns.headers is not None else b""
                    yield {
                        "queue": name,
                        "offset": offset,
                        "id": id_of(block.origin, offset).decode(),
                        "time": _time(header.time_us),
                        **_state(
                            queue,
                            offset,
                            columns.retries[i] if columns.retries is not None else RETRIES_NONE,
                            columns.expires[i] if columns.expires is not None else 0,
                            columns.due[i] if columns.due is not None else 0,
                        ),
                        "protocol": block.protocol,
                        "headers": decode_headers(headers),
                        "bytes": len(value),
                        "value": value,
                    }
                at = header.first_offset + block.hi
            self._check_gap(name, "offset", max(at, self._now(name).offset_start), facts.offset_end)

    def _now(self, name: str) -> ReaderQueue:
        """A queue as the reader has seen it last: what retention has taken meanwhile is no loss."""
        return self._reader.queue(name) or self._queues[name]

    def _check_gap(self, name: str, what: str, expected: int, found: int) -> None:
        if expected < found:
            self._say_lost(f"queue {name!r}: {what}s {expected} to {found - 1}")

    # --- events --------------------------------------------------------------------------------------

    def events(self) -> Iterator[Row]:
        for name, facts in self._queues.items():
            openings = self._reader.openings(name)
            at = self._start
            for run in self._reader.events(name, at, facts.event_end, fail_on_loss=False):
                self._check_gap(name, "event", max(at, self._now(name).event_start), run.event_offset)
                for i, offset in enumerate(range(run.first, run.end)):
                    opening = next((o for first, end, o in openings if first <= offset < end), None)
                    origin = self._reader.origin(name, opening) if opening is not None else None
                    yield {
                        "queue": name,
                        "event_offset": run.event_offset + i,
                        "event": run.event.name.lower(),
                        "offset": offset,
                        "id": id_of(origin, offset).decode() if origin is not None else None,
                        "reason": run.reason.label or None,
                        "consumer": run.consumer or None,
                        "attempt": run.attempt,
                        "dispatched": _time(run.dispatched_us) if run.dispatched_us else None,
                        "time": _time(run.time_us),
                    }
                at = run.event_offset + run.end - run.first
            self._check_gap(name, "event", max(at, self._now(name).event_start), facts.event_end)

    # --- blocks --------------------------------------------------------------------------------------

    def blocks(self) -> Iterator[Row]:
        disk = RealDisk(self._reader.path, read_only=True)
        names = {facts.number: name for name, facts in self._reader.queues(hidden=True).items()}
        synced = self._reader.position
        segments = [item for item in newest_generations(disk.names()).items() if item[0] < synced]
        for at, (base, generation) in enumerate(segments):
            name = segment_name(base, generation)
            try:
                file = disk.open(name)
            except FileNotFoundError:
                continue  # Retention has just taken it.
            try:
                next_base = segments[at + 1][0] if at + 1 < len(segments) else synced
                file_end = base + file.size()
                end = file_end if generation else min(file_end, next_base)
                for found in walk(file, base, base, end):
                    if isinstance(found, Hole):
                        if found.header is None and is_blank(file, base, found):
                            continue
                        where = f"{disk.where(name)}: {found.end - found.start} bytes at position"
                        self._say_lost(f"{where} {found.start - base}")
                    elif self._wanted(found[0]):
                        yield _block_row(name, base, found[0], found[1], names)
            finally:
                file.close()

    def _wanted(self, header: Header) -> bool:
        mine = self._every_queue or any(q.number == header.queue for q in self._queues.values())
        return mine and header.position >= self._start


def _state(queue: LogQueue, offset: int, retries: int, expires_us: int, due_us: int) -> Row:
    """Where a message is, and what it has by now."""
    pending = queue.pending
    state, place, _ = pending.state_at(offset)
    note = pending.notes.get(offset) or NO_NOTE
    retries = retries if note.retries == AS_STORED else note.retries
    expires_us = expires_us if note.expires_us == AS_STORED else note.expires_us
    delayed_us = pending.delayed.get(offset) or 0
    due_us = due_us if delayed_us == AS_STORED else delayed_us
    if state is State.DELAYED and not due_us:
        state = State.READY  # One that came with others that are delayed.
    return {
        "state": state.name.lower(),
        "reason": place.reason.label if place is not None and state is State.DEAD else None,
        "attempts": note.attempts if state is not State.GONE else None,  # Forgotten when it ends.
        "retries": retries if retries != RETRIES_NONE else None,
        "expires": _time(expires_us) if expires_us > 0 else None,
        "due": _time(due_us) if due_us else None,
    }


def _block_row(name: str, base: int, header: Header, body: memoryview, names: dict[int, str]) -> Row:
    is_control = header.kind == KIND_CONTROL
    row: Row = {
        "file": name,
        "position": header.position - base,
        "kind": KINDS[header.kind],
        "queue": None if is_control else names.get(header.queue, f"unknown-{header.queue}"),
        "count": header.count,
        "first_offset": header.first_offset,
        "first_event": header.first_event,
        "event_count": header.event_count,
        "bytes": header.body_bytes,
        "opening": header.opening,
        "time": _time(header.time_us),
        "flags": [name for name in FLAGS[header.kind] if header.flags & _flag(name)],
        "synced": header.synced,
    }
    if is_control:
        row["control"] = read_control(body)
    if header.flags & FLAG_ELSEWHERE:
        row["rows"] = [[run.row, run.row + run.length] for run in read_adoption(header, body).runs]
    return row


def _flag(name: str) -> int:
    flag: int = getattr(layout, f"FLAG_{name.upper()}")
    return flag


def _time(us: int) -> str:
    """Always with all six digits, so that lines are equally long; far futures as they are stored."""
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)
    except OverflowError:
        return f"{us} us"
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# --- showing ---------------------------------------------------------------------------------------


def _show_json(rows: Iterable[Row], _table: dict[str, int]) -> None:
    for row in rows:
        if "value" in row:
            row["value_base64"] = base64.b64encode(row.pop("value")).decode()
        print(json.dumps(row))


def _show_table(rows: Iterable[Row], table: dict[str, int]) -> None:
    heading: str | None = None
    for row in rows:
        if (heading_now := "" if table is BLOCK_TABLE else f"queue {row['queue']!r}") != heading:
            if heading is not None:
                print()
            if heading_now:
                print(encodable(heading_now))
            print(_line({name: name for name in table}, table))
            heading = heading_now
        print(_line(_cells(row), table))


def _cells(row: Row) -> Row:
    """A row in fewer columns, for people."""
    cells = dict(row)
    if "file" in row:
        control = row["kind"] == KINDS[KIND_CONTROL]
        events = row["first_event"], row["first_event"] + row["event_count"] - 1
        offsets = row["first_offset"], row["first_offset"] + row["count"] - 1
        cells["events"] = None if control else f"{events[0]}-{events[1]}"
        cells["offsets"] = f"{offsets[0]}-{offsets[1]}" if row["kind"] == KINDS[KIND_MESSAGES] else None
        cells["detail"] = json.dumps(row["control"]) if control else ",".join(row["flags"])
        if "rows" in row:
            cells["detail"] += " rows " + ",".join(f"{first}-{end - 1}" for first, end in row["rows"])
    elif "value" in row:
        cells["value"] = preview(row["value"])
        cells["headers"] = preview(encode_headers(row["headers"])) or None
        cells["state"] = f"{row['state']} ({row['reason']})" if row["reason"] else row["state"]
    return cells


def _line(cells: Row, table: dict[str, int]) -> str:
    texts = (safe("-" if cells[name] is None else str(cells[name])) for name in table)
    return line(texts, table.values(), (name in NUMBERS for name in table))


def preview(value: bytes) -> str:
    """The beginning of a payload, as text where it is text."""
    text = value[:PREVIEW_BYTES].decode("utf-8", "surrogateescape")
    return text + "..." if len(value) > PREVIEW_BYTES else text


def safe(text: str) -> str:
    """The text with an escape for everything that a terminal would not just show."""
    return encodable("".join(c if c.isprintable() and c != "\\" else _escape(c) for c in text))


def _escape(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # How `surrogateescape` keeps a byte that is no text.
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()
