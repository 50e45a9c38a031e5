"""Findings: what `inspect.py` tells of a data folder, in words that people and programs can count on."""

from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.log.block import KIND_CONTROL, KIND_MESSAGES
from penstock.log.scan import Hole

DEFECTS = {
    "bad-header": "no valid block stands where one was synced",
    "bad-body": "a block does not have its checksum",
    "bad-content": "a block has its checksum, but does not fit together",
    "missing-segment": "a part of the log is in no file",
    "missing-offsets": "messages that should be in the log are not",
    "missing-rows": "what was staged for messages, or waits for its commit, is not in the log",
    "missing-events": "events that should be in the log are not",
    "repeated-offsets": "offsets were given twice",
    "overlap": "a compacted segment reaches into the positions of the next one",
    "open-transaction": "a transaction has no end",
    "lost-name": "the name of a queue is in no block",
    "bad-snapshot": "a snapshot cannot be read",
    "snapshot-disagrees": "a snapshot does not say what the blocks before it say",
    "synced-and-gone": "the log ends before the position up to which it was synced",
}
NOTES = {
    "torn-tail": "the end of the log is being written, or was left unfinished: the next start cuts it",
    "behind-watermark": "valid blocks that are not known to be synced: the next start takes them in",
    "no-watermark": "no watermark says how far the log is synced",
    "leftover": "a file of unfinished work: the next start removes it",
    "quarantine": "damaged bytes that were set aside earlier",
    "known-damage": "damage that the log itself has on record",
    "removed-since": "retention removed a segment after the last snapshot",
    "not-compared": "a snapshot that could not be compared with the blocks before it",
    "unknown-file": "a file that is not of this log",
}


NOBODY_S_ROWS = "it was staged, and nobody needs it any more"


@dataclass(slots=True)
class Finding:
    """One thing that was found. The position is in the file; `first` to `end` are offsets or events."""

    kind: str
    text: str
    file: str = ""
    position: int = 0
    queue: str = ""
    first: int = 0
    end: int = 0


def rot(hole: Hole, base: int, name: str, what: str = "") -> Finding:
    """What there is to say of bytes that should be a block of that queue; `base` is where the file begins.

    `what` is in the block where its header does not tell: of the rows of stages.
    """
    at, header = hole.start - base, hole.header
    if header is None:
        text = f"{hole.end - hole.start} bytes at position {at} are no valid block"
        return Finding("bad-header", text, position=at)
    first, end = header.first_offset, header.offset_end
    told = f"queue {name!r}, offsets {first} to {end - 1}"
    if header.kind == KIND_CONTROL:
        told, first, end = "a control block", 0, 0
    elif header.kind != KIND_MESSAGES:
        first, end = header.first_event, header.first_event + header.event_count
        told = f"queue {name!r}, events {first} to {end - 1}"
    text = f"the block at position {at} does not have its checksum: {what or told}"
    return Finding("bad-body", text, "", at, name, first, end)


@dataclass(slots=True)
class Report:
    """What `inspect_log` says about a folder."""

    segments: int = 0
    snapshots: int = 0
    blocks: int = 0
    messages: int = 0
    events: int = 0
    bytes: int = 0
    queues: int = 0
    position: int = 0  # where the log ends
    defects: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        return asdict(self)

    def defect(
        self,
        kind: str,
        file: str,
        text: str,
        position: int = 0,
        queue: str = "",
        first: int = 0,
        end: int = 0,
    ) -> None:
        """Something is wrong."""
        assert kind in DEFECTS, kind
        text = f"{file}: {text}" if file else text
        self.defects.append(Finding(kind, text, file, position, queue, first, end))

    def note(self, kind: str, file: str, text: str, position: int = 0) -> None:
        """Something that a person may want to know."""
        assert kind in NOTES, kind
        text = f"{file}: {text}" if file else text
        self.notes.append(Finding(kind, text, file, position))
