"""Journal: what an import remembers from one run to the next, so that a crash stores nothing twice.

Before messages are committed here, the record names the transaction and their identities. The next run asks
Penstock what became of that transaction: if it was committed, those that come again are settled and not
stored.

The record is kept by the source where that can (Redis), else in a file of this machine, which is replaced as
a whole and synced. Beside it is a lock: one import from a source at a time, on this machine. How it fails:
`Busy`, one sentence.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from penstock.errors import PenstockError
from penstock.importing.source import Source

DIRECTORY: Final = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state", "penstock", "import")


class Busy(PenstockError):
    """Another import has this source, or the file cannot be had."""


class Journal:
    def __init__(self, source: Source, path: str | None) -> None:
        self._source = source
        digest = hashlib.sha256(source.name.encode()).hexdigest()[:16]
        self._path = Path(path) if path else DIRECTORY.expanduser() / f"{digest}.json"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"another import from {source.name} runs on this machine; one at a time") from None
        except OSError as error:
            raise self._no_file(error) from None

    def read(self) -> dict[str, Any]:
        """The record that was written last; nothing where none was, or the last run has ended well."""
        if self._source.keeps_records:
            kept = self._source.recall()
        else:
            try:
                kept = self._path.read_bytes() if self._path.exists() else b""
            except OSError as error:
                raise self._no_file(error) from None
        try:
            record = json.loads(kept or b"{}")
        except ValueError:
            record = None
        if not isinstance(record, dict) or not record.keys() <= {"transaction", "fresh", "known"}:
            raise Busy(f"{self._path}: is no journal of an import; name another file with --journal")
        return record

    def write(self, transaction: str, fresh: Sequence[str], known: Sequence[str]) -> None:
        """About to commit: these identities now, and those were stored before and may come again."""
        self._put(json.dumps({"transaction": transaction, "fresh": fresh, "known": known}).encode())

    def clear(self) -> None:
        """Nothing is on its way."""
        self._put(b"")

    def close(self) -> None:
        os.close(self._file)  # and the lock with it

    def _put(self, record: bytes) -> None:
        if self._source.keeps_records:
            self._source.remember(record)
            return
        fresh = self._path.with_name(f"{self._path.name}.new")
        try:
            with fresh.open("wb") as file:
                file.write(record)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._no_file(error) from None

    def _no_file(self, error: OSError) -> Busy:
        return Busy(f"{self._path}: {error.strerror}; name a file of yours with --journal")
