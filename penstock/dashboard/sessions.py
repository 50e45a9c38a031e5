"""Sessions: who has signed in, by a secret that only their browser has.

A browser holds a random text in a cookie that scripts cannot read; here is its digest, and the token that
was shown. Sessions live in memory: they end with the process, after `IDLE_SECONDS_MAX` without a visit,
when their owner signs out, and as soon as their token is no longer known to the broker.
"""

import hashlib
import secrets
import time
from collections.abc import Callable
from typing import Final

from penstock.http.auth import Guard
from penstock.http.route import Role

IDLE_SECONDS_MAX: Final = 12 * 3600.0
SESSIONS_MAX: Final = 1000


class Session:
    """One browser that has signed in; or everybody, where there are no tokens."""

    def __init__(self, guard: Guard, token: str | None, clock: Callable[[], float]) -> None:
        self._guard = guard
        self._clock = clock
        self.token = token
        self.used_at = clock()

    @property
    def role(self) -> Role:
        """What it may do now: the broker's tokens may change at any time. `ANYONE`: nothing at all."""
        return self._guard.role_of(self.token)

    @property
    def name(self) -> str:
        """The name of its token; empty where there are no tokens."""
        return self._guard.name_of(self.token)

    @property
    def is_idle(self) -> bool:
        """Whether nobody has used it for too long."""
        return self._clock() - self.used_at > IDLE_SECONDS_MAX

    def touch(self) -> None:
        """It is being used: a page that is left open keeps its visitor signed in."""
        self.used_at = self._clock()

    def end(self) -> None:
        """Its pages can do nothing any more."""
        self.token = None


class Sessions:
    """All of them."""

    def __init__(self, guard: Guard, clock: Callable[[], float] = time.monotonic) -> None:
        self._guard = guard
        self._clock = clock
        self._sessions: dict[bytes, Session] = {}  # by the digest of the browser's secret, oldest first

    def start(self, token: str) -> str | None:
        """The secret for the browser; None where the broker does not know the token."""
        if self._guard.role_of(token) is Role.ANYONE:
            return None
        while len(self._sessions) >= SESSIONS_MAX:
            self._end(next(iter(self._sessions)))
        secret = secrets.token_urlsafe(32)
        self._sessions[_digest(secret)] = Session(self._guard, token, self._clock)
        return secret

    def find(self, secret: str | None) -> Session | None:
        """The session of a browser that may come in; where there are no tokens, everybody may."""
        if self._guard.is_open:
            return Session(self._guard, None, self._clock)
        digest = _digest(secret or "")
        session = self._sessions.get(digest)
        if session is None:
            return None
        if session.is_idle or session.role is Role.ANYONE:
            self._end(digest)
            return None
        self._sessions[digest] = self._sessions.pop(digest)
        session.touch()
        return session

    def end(self, secret: str | None) -> None:
        """Sign out: pages that are open notice it by their next look at the session."""
        self._end(_digest(secret or ""))

    def _end(self, digest: bytes) -> None:
        session = self._sessions.pop(digest, None)
        if session is not None:
            session.end()


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
