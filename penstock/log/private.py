"""Private files: what a broker writes is for its own user alone, whatever the umask is.

Rules that always hold:
  * Folders that are made here have mode 0700, files 0600.
  * A file that is opened to be written is no symbolic link: whoever could put one there would have the broker
    write to any file of its user. Folders may be reached through links, as the operator has set them.

How it fails: `OSError` with the path, and what is wrong with it.
"""

import errno
import os
from typing import Final

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
OTHERS: Final = 0o077
"""What only others need."""


def open_private(path: str, flags: int, *, folder: int | None = None, shown: str = "") -> int:
    """The descriptor of a file to write; `shown` is its whole path, where `path` is its name in a folder."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE, dir_fd=folder)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        what = "is a symbolic link, and nothing is written through one; take it away"
        raise OSError(errno.ELOOP, what, shown or path) from None


def make_folder(path: str) -> None:
    """A folder, and what is missing of those above it; one that is there stays as it is."""
    try:
        os.mkdir(path, FOLDER_MODE)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    except FileNotFoundError:
        above = os.path.dirname(path)
        if above in ("", path):
            raise
        make_folder(above)
        make_folder(path)


def close_to_others(folder: int, name: str = ".") -> None:
    """Take the rights of others away from a folder that is open, or from what has that name in it."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fchmod(fd, os.fstat(fd).st_mode & 0o7777 & ~OTHERS)
    finally:
        os.close(fd)
