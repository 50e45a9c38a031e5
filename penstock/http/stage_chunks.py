"""Chunks: stages cut into what the broker gets at a time, the same way every time.

A chunk is some pieces of stages, in the order in which the stages were named; what it has for one queue is
joined into one batch, so that the log gets few large blocks however many tasks have staged something.

The rule that always holds: the chunks are a function of the stages' files, their order, and the two bounds.
Files do not change, and an intent keeps the rest: chunk *n* has the same messages before and after a crash.
"""

from array import array
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from penstock.broker.batch import Batch
from penstock.broker.life import Reason
from penstock.http.parts import PartsBuilder
from penstock.http.stage_files import Piece, StageFolder


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
            count += piece.messages
            if chunk and (payload_bytes > chunk_bytes or count > chunk_messages):
                chunks.append(chunk)
                chunk, payload_bytes, count = [], piece.payload_bytes, piece.messages
            chunk.append(PieceOf(stage_id, piece))
    return [*chunks, chunk] if chunk else chunks


def load_chunk(folder: StageFolder, chunk: Chunk) -> list[tuple[str, Batch]]:
    """The messages of a chunk, a batch for each queue, door and reason; StageDamaged where a piece is."""
    doors: dict[tuple[str, Reason], PartsBuilder] = {}
    for stage_id, pieces in groupby(chunk, key=lambda it: it.stage_id):
        for queue, batch in folder.read(stage_id, [it.piece for it in pieces]):
            part = doors.setdefault((batch.protocol, batch.dead), PartsBuilder()).of(queue)
            ends = (
                array("i", [part.end + bound for bound in batch.bounds[1:]]) if part.end else batch.bounds[1:]
            )
            part.add(batch.payload, ends, batch.ttl_seconds, batch.retries)
    parts: list[tuple[str, Batch]] = []
    for (protocol, dead), builder in doors.items():
        for queue_name, batch in builder.finish(protocol):
            batch.dead = dead
            assert queue_name is not None, "a piece names its queue"
            parts.append((queue_name, batch))
    return parts


def check_chunks(folder: StageFolder, chunks: Iterable[Chunk]) -> None:
    """Read everything and check it, before anything is done with it; StageDamaged where it must not be."""
    for chunk in chunks:
        for stage_id, pieces in groupby(chunk, key=lambda it: it.stage_id):
            for _ in folder.read(stage_id, [it.piece for it in pieces]):
                pass
