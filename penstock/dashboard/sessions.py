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
from penstock.model.rights import User

IDLE_SECONDS_MAX: Final = 12 * 3600.0
SESSIONS_MAX: Final = 1000
SESSIONS_OF_USER_MAX: Final = 20
"""One who signs in again and again ends sessions of its own, and nobody else's."""


class Session:
    """One browser that has signed in; or everybody, where there are no tokens."""

    def __init__(self, guard: Guard, token: str | None, clock: Callable[[], float]) -> None:
        self._guard = guard
        self._clock = clock
        self.token = token
        self.used_at = clock()

    @property
    def user(self) -> User | None:
        """Who has signed in, with the rights of now: settings may change. None: nobody any more."""
        return self._guard.user_of(self.token)

    @property
    def name(self) -> str:
        """Empty where there are no tokens."""
        user = self.user
        return user.name if user is not None else ""

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

    def __len__(self) -> int:
        return len(self._sessions)

    async def start(self, token: str, address: str) -> str:
        """The secret for the browser; a Problem where the broker does not know the token."""
        user = await self._guard.recognise(token, address)
        own = [digest for digest, session in self._sessions.items() if session.name == user.name]
        for digest in own[: max(len(own) - SESSIONS_OF_USER_MAX + 1, 0)]:
            self._end(digest)
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
        if session.is_idle or session.user is None:
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
