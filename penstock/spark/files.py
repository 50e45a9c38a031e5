"""Files: ranges of a queue from the files of the log, read by the task itself where it has them before it.

    folder_of    on the driver: asks the broker where its files are, and by which mark they can be told
    batches      on an executor: reads them there, and makes the batches that the broker would have sent

A path says little: on another machine another broker may have a folder of that name, or an old copy of this
one. So a folder is read only if it has the mark that the broker has told, which every opening of a log draws
anew (`log/disk.py`), and if the queue there has the identity that was planned. A copy that was taken while
this broker ran has its mark, and is this log as far as it goes.

Rules that always hold:
  * Only what is synced is read, and each block after its checksum was found right: see `log/reader.py`.
  * Files are never the reason why a query fails. Whatever is wrong with them is `NoFiles`, and the rest of
    the range is asked of the broker, which says what has become of it.
  * Between two tasks a worker keeps what it knows of the log, and no file open: retention gets its room back.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.errors import PenstockError
from penstock.spark.api import Broker, Refused
from penstock.spark.options import ReadOptions
from penstock.spark.splits import Range

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.log.reader import LogReader

KEPT_MAX: Final = 2
"""Logs that a worker remembers between its tasks."""


class NoFiles(PenstockError):
    """The files cannot be read here, or not all of what should be. Says why."""


class Folder(NamedTuple):
    """Where the files of a log are, and how it is known that they are that log's."""

    path: str
    mark: str


def folder_of(broker: Broker, options: ReadOptions) -> Folder | None:
    """Which folder tasks may look for; None: they ask the broker for everything."""
    if not options.may_read_files:
        return None
    try:
        answer = broker.get("folder")
    except Refused as error:
        # A broker of an earlier version; or a user who may not read every queue, and the files have all.
        if error.status == 404 or (error.status == 403 and not options.folder):
            return None
        raise
    return Folder(options.folder or answer["path"], answer["mark"]) if answer["mark"] else None


# --- on an executor --------------------------------------------------------------------------------

_kept: "dict[Folder, LogReader]" = {}


def batches(folder: Folder, part: Range, view: str, columns: Sequence[str]) -> Iterator["pa.RecordBatch"]:
    """The rows of a range; NoFiles where they end too soon."""
    from penstock.log.arrow import events_batches, messages_batches
    from penstock.log.errors import LogError

    make = events_batches if view == "events" else messages_batches
    reader, failed = None, False
    try:
        reader = _taken(folder)
        for batch in make(reader, part.queue, part.start, part.end, columns=columns):
            if part.identity not in ("", reader.identity(part.queue)):
                raise NoFiles(f"queue {part.queue!r} there is not the one that was planned")
            yield batch
    except (OSError, LogError) as error:
        failed = True  # What is known of the log may be what was wrong: the next task looks anew.
        raise NoFiles(str(error)) from error
    finally:
        if reader is not None:
            _give_back(folder, reader, keep=not failed)


def _taken(folder: Folder) -> "LogReader":
    """A reader of a folder, if that is the one which was meant."""
    from penstock.log.disk import mark_of
    from penstock.log.reader import LogReader

    mark = mark_of(folder.path)
    if mark != folder.mark:
        raise NoFiles("there is no log" if not mark else "the log there is not the one of this broker")
    reader = _kept.pop(folder, None)
    if reader is None:
        return LogReader(folder.path)
    reader.refresh()
    return reader


def _give_back(folder: Folder, reader: "LogReader", *, keep: bool) -> None:
    if not keep:
        reader.close()
        return
    reader.rest()
    _kept[folder] = reader
    while len(_kept) > KEPT_MAX:
        _kept.pop(next(iter(_kept))).close()
