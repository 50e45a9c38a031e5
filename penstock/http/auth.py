"""Auth: who asks, and whether that is enough.

With tokens: a caller shows one in `Authorization: Bearer TOKEN` and has its role. Without tokens the API
listens on this machine only (the settings see to that) and everybody may do everything; then a web page
in somebody's browser must not pass for that somebody: a request is refused whose `Host` is no name of
this machine (a name that an attacker points to it), or whose `Origin` is another site's.

This process has a token of its own, to read: what it reads on behalf of many (the dashboard's feed) has
no visitor's. It is random, never leaves the process, and counts only where there are tokens.

How it fails: `Problem` unauthorized or forbidden, which never repeats what was shown.
"""

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from starlette.datastructures import Headers

from penstock.control.frames import Fields
from penstock.http.problems import Problem
from penstock.http.route import Role

ROLES: Final = {"read": Role.READ, "operate": Role.OPERATE, "admin": Role.ADMIN}
_LOCAL_NAMES: Final = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})


@dataclass(frozen=True, slots=True)
class _Known:
    """A token as it is kept here: only what is needed to recognise it."""

    name: str
    role: Role
    digest: bytes


class Guard:
    """Recognises callers."""

    def __init__(self, tokens: Sequence[Fields]) -> None:
        self._known: tuple[_Known, ...] = ()
        self.own_token = secrets.token_urlsafe(32)
        self._own = _Known("dashboard", Role.READ, _digest(self.own_token))
        self.set_tokens(tokens)

    def set_tokens(self, tokens: Sequence[Fields]) -> None:
        self._known = tuple(_Known(it["name"], ROLES[it["role"]], _digest(it["token"])) for it in tokens)

    @property
    def is_open(self) -> bool:
        """Whether there are no tokens, and everybody on this machine may do everything."""
        return not self._known

    def role_of(self, token: str | None) -> Role:
        """What the owner of a token may do; `ANYONE` where it is not known."""
        if self.is_open:
            return Role.ADMIN
        found = _find(token or "", self._known)
        return found.role if found is not None else Role.ANYONE

    def name_of(self, token: str | None) -> str:
        found = _find(token or "", self._known)
        return found.name if found is not None else ""

    def admit(self, headers: Headers, needed: Role) -> str:
        """The name of who asks; a Problem where it may not do that."""
        if not self._known:
            _check_local(headers)
            return ""
        if needed is Role.ANYONE:
            return ""
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not shown.strip():
            raise _unauthorized("send a token: Authorization: Bearer TOKEN")
        found = _find(shown.strip(), (*self._known, self._own))
        if found is None:
            raise _unauthorized("this token is not known here; see [[http.tokens]] of the broker's settings")
        if found.role < needed:
            raise Problem(
                "forbidden",
                f"token {found.name!r} has the role {found.role.name.lower()}, and this needs "
                f"{needed.name.lower()}",
            )
        return found.name


def _find(token: str, among: Sequence[_Known]) -> _Known | None:
    digest = _digest(token)
    found = None
    # Every token is compared, so that the time taken says nothing about which one was near.
    for known in among:
        if hmac.compare_digest(known.digest, digest):
            found = known
    return found


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(detail: str) -> Problem:
    return Problem("unauthorized", detail, headers={"WWW-Authenticate": 'Bearer realm="penstock"'})


def _check_local(headers: Headers) -> None:
    host = headers.get("host", "")
    if host and not _is_local(host):
        raise Problem(
            "forbidden",
            "without tokens the API answers only to names of this machine (localhost, 127.0.0.1); "
            "set [[http.tokens]] to use another name",
        )
    origin = headers.get("origin")
    if origin is not None and (origin == "null" or origin.partition("://")[2] != host):
        raise Problem(
            "forbidden", "a page of another site asks; set [[http.tokens]] and send one to allow that"
        )


@lru_cache(64)
def _is_local(host: str) -> bool:
    """Whether a Host header names this machine itself."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() in _LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
