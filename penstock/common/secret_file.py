"""Files that hold a secret: the token of a command or of Spark's driver, and who else can read such a file.

Rules that always hold:
  * No more is read than a token can be long, however long a file is, and of a stream nothing behind its line.
  * What a file holds is in no error and no warning.
  * A file of somebody else's that its group may read is how a service is given its own: no warning.

How it fails: `WrongToken`, one line that says what to do.
"""

import os
import re
import shlex
import stat
from collections.abc import Mapping
from typing import Final

from penstock.common.text import printable
from penstock.errors import PenstockError

TOKEN_VARIABLE: Final = "PENSTOCK_TOKEN"
TOKEN_FILE_VARIABLE: Final = "PENSTOCK_TOKEN_FILE"
TOKEN_BYTES_MAX: Final = 4096


class WrongToken(PenstockError):
    """There is no token in it that could be sent."""


def token_around(environ: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The token that the environment gives, itself or by a file, and a warning about that file, or None."""
    if token := environ.get(TOKEN_VARIABLE):
        return sendable(token, TOKEN_VARIABLE), None
    if path := environ.get(TOKEN_FILE_VARIABLE):
        return token_in(path), exposed(path)
    return None, None


def token_in(path: str) -> str:
    """The token that a file consists of."""
    try:
        with open(path, "rb") as file:
            return _checked(file.read(TOKEN_BYTES_MAX + 2), path)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        why = getattr(error, "strerror", None) or error
        raise WrongToken(
            f"{printable(path)}: {why}; name a file that this user may read, with the token in it"
        ) from None


def token_from(number: int) -> str:
    """The token in the next line of an open file; what follows is left to others."""
    text = b""
    while len(text) <= TOKEN_BYTES_MAX and (byte := os.read(number, 1)) not in (b"", b"\n"):
        text += byte
    return _checked(text, "standard input")


def _checked(text: bytes, where: str) -> str:
    token = text.strip()
    if len(token) > TOKEN_BYTES_MAX or not re.fullmatch(rb"[!-~]+", token):
        raise WrongToken(
            f"{printable(where)} has no token in it: it should be one line of printable ASCII without blanks"
        )
    return token.decode()


def sendable(token: str, where: str) -> str:
    """A token that is given as it is, without the end of its line: no header can have that in it."""
    token = token.strip()
    if not re.fullmatch("[ -~]+", token):
        raise WrongToken(f"{where} has a character in it that no token has; use printable ASCII")
    return token


def exposed(path: str) -> str | None:
    """A warning where other users than its owner can read a file that holds a secret."""
    try:
        found = os.stat(path)
    except OSError:
        return None  # whoever opens it says so
    mine = found.st_uid == os.geteuid()
    readable = found.st_mode & (stat.S_IRGRP | stat.S_IROTH if mine else stat.S_IROTH)
    if not readable or not stat.S_ISREG(found.st_mode):
        return None
    how = f"chmod {'600' if mine else 'o='} {shlex.quote(path)}"
    return printable(f"{path} holds a secret, and other users can read it; {how}")
