"""What `penstock backup` copies: the files of the log, as they are on the disk.

The first route says which files they are at one moment (`log/backup/listing.py`), the second one gives the
bytes of one of them. Whoever has both has all messages of all queues, so they are for administrators; the
list is an act of the audit. The bytes are read by the threads and in the turns of other bulk readers: nobody
waits for them.

In a cluster with several logs both are about one of them, `shard`, and are answered where that is led. Files
are those of one front-end and one opening of the log: where it is led anew, a list is needed that is, too.
"""

from collections.abc import Iterator
from typing import Final

from starlette.responses import Response

from penstock.http import kinds, schema
from penstock.http.api.log import CHUNK_BYTES, StreamedResponse
from penstock.http.app import Call, answer_json
from penstock.http.problems import Problem
from penstock.http.route import Param, Route
from penstock.log.backup.listing import Listed, list_files
from penstock.log.disk import RealDisk
from penstock.log.reader import LogReader
from penstock.model.rights import Right

MEDIA: Final = "application/octet-stream"


async def get_backup(call: Call) -> Response:
    shards = _shards(call)
    async with call.act("backup") as told:
        log, opening, (end, files) = await call.site.readers.run(_look)
        told["bytes"] = sum(file.bytes for file in files)
    return answer_json(
        {
            "log": log,
            "opening": opening,
            "shard": call["shard"],
            "shards": shards,
            "time_us": call.site.mirror.now_us(),
            "end": end,
            "files": [file._asdict() for file in files],
        }
    )


def _shards(call: Call) -> int:
    """How many logs there are. The one that is asked for is that of this site, or there is none."""
    sharding = call.site.hello["sharding"]
    shards = 1 if sharding is None else len(sharding["leaders"])
    if call["shard"] >= shards:
        raise Problem("bad-request", f"there is no shard {call['shard']}: they are 0 to {shards - 1}")
    return shards


def _look(reader: LogReader) -> tuple[str, int, tuple[int, list[Listed]]]:
    return reader.log, reader.opening, list_files(reader.path)


async def get_backup_file(call: Call) -> Response:
    _shards(call)
    stream = call.site.readers.stream(_read, call["file"], call["bytes"], call["opening"])
    try:
        await anext(stream)
    except BaseException:
        await stream.aclose()
        raise
    return StreamedResponse(stream, MEDIA, {}, f"copy of {call['file']}", call.check_still)


def _read(reader: LogReader, name: str, size: int, opening: int | None) -> Iterator[bytes]:
    """Nothing, and then the bytes of a file, as far as it has so many."""
    if opening not in (None, reader.opening):
        raise Problem("file-not-found", f"the log was opened anew since opening {opening}; ask for the list")
    try:
        file = RealDisk(reader.path, read_only=True).open(name)
    except FileNotFoundError:
        raise Problem("file-not-found", f"{name!r} is not there any more; ask for the list again") from None
    try:
        yield b""
        at = 0
        while at < size and (chunk := file.read(at, min(size - at, CHUNK_BYTES))):
            yield chunk
            at += len(chunk)
    finally:
        file.close()


SHARD: Final = Param("shard", kinds.Whole(), "of a cluster with several logs: which one", default=0)

ROUTES: Final = (
    Route(
        "GET /v1/backup",
        get_backup,
        Right.ADMIN,
        "The files that are the log at this moment, for `penstock backup`.",
        schema.object_of(
            {
                "log": schema.said(schema.STRING, "The log's own number: what all ids begin with."),
                "opening": schema.said(schema.COUNT, "How often it was opened by now."),
                "shard": schema.said(schema.COUNT, "Which one it is."),
                "shards": schema.said(schema.COUNT, "How many logs there are; a backup has all of them."),
                "time_us": schema.said(schema.COUNT, "Now, by the broker's clock, in µs since the epoch."),
                "end": schema.said(schema.OFFSET, "The log position up to which they go."),
                "files": schema.list_of(
                    schema.object_of(
                        {
                            "name": schema.STRING,
                            "bytes": schema.said(schema.COUNT, "So much of it is synced."),
                            "modified_ns": schema.said(schema.COUNT, "When it was written last."),
                        }
                    )
                ),
            }
        ),
        params=(SHARD,),
    ),
    Route(
        "GET /v1/backup/{file}",
        get_backup_file,
        Right.ADMIN,
        "The bytes of one of these files.",
        None,
        params=(
            Param(
                "file",
                kinds.Text("a file of the list", 64, r"(\d{20}(\.\d+)?\.seg|snapshot-\d{20})"),
                "its name",
                "path",
                required=True,
            ),
            Param("bytes", kinds.Whole(), "how many, from its beginning, as the list says", required=True),
            SHARD,
            Param("opening", kinds.Whole(), "as the list says: where it is another by now, it is not found"),
        ),
        problems=("file-not-found",),
        answer_media=MEDIA,
        streams=True,
    ),
)
