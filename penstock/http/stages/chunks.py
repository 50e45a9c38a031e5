"""Chunks: stages cut into what the broker gets at a time, the same way every time.

A chunk is some pieces of stages, in the order in which the stages were named. Small pieces for one queue are
joined, so that the log gets few large blocks however many tasks have staged something; a large one is a block
as it is, and to join it with others would be to copy it twice, here and where the log cuts it again.

The rule that always holds: the chunks are a function of the stages' files, their order, and the two bounds.
Files do not change, and an intent keeps the rest: chunk *n* has the same messages before and after a crash.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from penstock.http.bodies.parts import Part
from penstock.http.stages.files import Piece, StageFolder
from penstock.model.batch import Batch
from penstock.model.life import Reason

BLOCK_BYTES: Final = 1 << 20
"""As much payload as the log puts into one block."""


REPAIR_WEIGHT: Final = 100
"""A dead letter that is repaired is as much work for the broker's loop as so many new messages."""


class PieceOf(NamedTuple):
    """A piece, and the stage that it is of."""

    stage_id: str
    piece: Piece


Chunk = Sequence[PieceOf]


def plan_chunks(
    folder: StageFolder, stage_ids: Iterable[str], chunk_bytes: int, chunk_messages: int
) -> list[Chunk]:
    """All pieces of these stages, in chunks that have at most so much payload and so many messages.

    A piece is never cut: where it is larger than allowed, it is a chunk of its own.
    """
    chunks: list[Chunk] = []
    chunk: list[PieceOf] = []
    payload_bytes = count = 0
    for stage_id in stage_ids:
        for piece in folder.pieces(stage_id):
            payload_bytes += piece.payload_bytes
            weight = piece.messages * (REPAIR_WEIGHT if piece.fields.get("repairs") else 1)
            count += weight
            if chunk and (payload_bytes > chunk_bytes or count > chunk_messages):
                chunks.append(chunk)
                chunk, payload_bytes, count = [], piece.payload_bytes, weight
            chunk.append(PieceOf(stage_id, piece))
    return [*chunks, chunk] if chunk else chunks


def load_chunk(folder: StageFolder, chunk: Chunk) -> list[tuple[str, Batch]]:
    """The messages of a chunk, batches for each queue, door and reason; StageDamaged where a piece is."""
    doors: dict[tuple[str, str, Reason], list[Batch]] = {}
    parts: list[tuple[str, Batch]] = []
    for stage_id, pieces in groupby(chunk, key=lambda it: it.stage_id):
        for queue, batch in folder.read(stage_id, [it.piece for it in pieces]):
            if batch.repairs is None:
                doors.setdefault((queue, batch.protocol, batch.dead), []).append(batch)
            else:
                parts.append((queue, batch))
    for (queue, protocol, dead), batches in doors.items():
        for group in _groups(batches):
            batch = _joined(group, protocol)
            batch.dead = dead
            parts.append((queue, batch))
    return parts


def _groups(batches: Iterable[Batch]) -> Iterator[list[Batch]]:
    """Neighbours that are small enough to be one block of the log."""
    group: list[Batch] = []
    payload_bytes = 0
    for batch in batches:
        payload_bytes += len(batch.payload)
        if group and payload_bytes > BLOCK_BYTES:
            yield group
            group, payload_bytes = [], len(batch.payload)
        group.append(batch)
    if group:
        yield group


def _joined(batches: Sequence[Batch], protocol: str) -> Batch:
    if len(batches) == 1:
        return batches[0]
    part = Part()
    for batch in batches:
        ends = array("i", [part.end + bound for bound in batch.bounds[1:]])
        part.add(batch.payload, ends, batch.ttl_seconds, batch.retries)
    return part.batch(protocol)


def read_chunks(folder: StageFolder, chunks: Iterable[Chunk]) -> Iterator[tuple[str, Batch]]:
    """Everything, checked, a piece at a time; StageDamaged where one is."""
    for chunk in chunks:
        for stage_id, pieces in groupby(chunk, key=lambda it: it.stage_id):
            yield from folder.read(stage_id, [it.piece for it in pieces])
