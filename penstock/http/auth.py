"""Auth: who asks, and what that one may do.

With tokens, of users or of `[[http.tokens]]`, a caller shows one: `Authorization: Bearer TOKEN`. Without any
the API listens on this machine only (the settings see to that) and everybody may do everything; then a web
page in somebody's browser must not pass for that somebody: a request is refused whose `Host` is no name of
this machine (a name that an attacker points to it), or whose `Origin` is another site's.

Rules that always hold:
  * A token of a user is compared with its hash once, in a thread; afterwards it is known by its digest, until
    the settings say otherwise or its time is over.
  * Whoever shows wrong tokens is slowed down (`guesses.py`), by address and by the name in the token, also
    where they come all at once. A token that was right before is not kept out for its name.
  * Calls of this process itself come with a user, and without a token: `scope[USER]`, which nobody outside
    can set, says who it is at that moment.

How it fails: `Problem` unauthorized, forbidden or too-many-guesses, which never repeat what was shown.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from starlette.datastructures import Headers

from penstock.common.tokens import fits, owner_of
from penstock.control.frames import Fields
from penstock.http.guesses import Guesses
from penstock.http.problems import Problem
from penstock.model.rights import EVERYBODY, Grant, Right, User, by_role

USER: Final = "penstock.user"
KNOWN_MAX: Final = 10_000
AT_ONCE: Final = 2
"""So many tokens are compared with their hashes at a time: each takes 16 MiB and a core."""

_LOCAL_NAMES: Final = frozenset({"localhost", "localhost.localdomain", "ip6-localhost"})

Digest = bytes


class Guard:
    """Recognises callers. `wall`: the time of day, for what ends at a date."""

    def __init__(
        self, tokens: Sequence[Fields], users: Sequence[Fields] = (), wall: Callable[[], float] = time.time
    ) -> None:
        self._wall = wall
        self._plain: tuple[tuple[Digest, User], ...] = ()
        self._users: dict[str, User] = {}
        self._hashes: dict[str, tuple[str, ...]] = {}  # by user
        self._known: dict[Digest, tuple[str, str]] = {}  # the user and the hash that it fits
        self._comparing = asyncio.Semaphore(AT_ONCE)
        self.guesses = Guesses()
        self.set_users(tokens, users)

    def set_users(self, tokens: Sequence[Fields], users: Sequence[Fields]) -> None:
        """From now on these, and no others."""
        self._plain = tuple((_digest(it["token"]), by_role(it["name"], it["role"])) for it in tokens)
        self._users = {it["name"]: _user(it) for it in users}
        self._hashes = {it["name"]: tuple(it["hashes"]) for it in users if it["hashes"]}
        self.guesses.forget_wrong()

    @property
    def is_open(self) -> bool:
        """Whether nobody has a token, and everybody on this machine may do everything."""
        return not self._plain and not self._hashes

    async def identify(self, headers: Headers, address: str) -> User:
        """Who asks; a Problem where that is not known."""
        if self.is_open:
            check_local(headers)
            return EVERYBODY
        token = _bearer(headers)
        if not token:
            raise _unauthorized("send a token: Authorization: Bearer TOKEN")
        return await self.recognise(token, address)

    def named(self, name: str) -> User | None:
        """Who is called that, by the word of another front-end of this cluster; None: nobody (any more)."""
        if self.is_open:
            return EVERYBODY
        user = self._users.get(name) or next((it for _, it in self._plain if it.name == name), None)
        return None if user is None or user.is_over(round(self._wall() * 1_000_000)) else user

    def recall(self, headers: Mapping[str, str], address: str) -> User | None:
        """Who asks, where nothing has to be compared to know it; None: `identify` finds out, or says no."""
        if self.is_open:
            check_local(headers)
            return EVERYBODY
        digest = _digest(_bearer(headers))
        user = self._recall(digest) if self.guesses.is_trusted(digest, address) else None
        return None if user is None or user.is_over(round(self._wall() * 1_000_000)) else user

    async def recognise(self, token: str, address: str) -> User:
        """Whose token it is; a Problem where nobody's, or its time is over."""
        digest = _digest(token)
        if self.guesses.is_trusted(digest, address) and (user := self._recall(digest)) is not None:
            return self._in_time(user)
        if self.guesses.is_known_wrong(digest):
            raise _unknown()
        name = owner_of(token)
        self._check_guesses(address, "")
        user = self._recall(digest)  # Who has a right one is not kept out by what others guess for its name.
        if user is None:
            user = await self._compared(token, name, digest, address)
        if user is None:
            self.guesses.failed(digest, address, name)
            raise _unknown()
        self.guesses.trust(digest, address)
        return self._in_time(user)

    def _recall(self, digest: Digest) -> User | None:
        found = None
        # Every token is compared, so that the time taken says nothing about which one was near.
        for its_digest, user in self._plain:
            if hmac.compare_digest(its_digest, digest):
                found = user
        if found is None and digest in self._known:
            name, hashed = self._known[digest]
            if hashed in self._hashes.get(name, ()):
                return self._users[name]
            del self._known[digest]
        return found

    def _check_guesses(self, address: str, name: str) -> None:
        seconds = self.guesses.wait_seconds(address, name)
        if seconds:
            raise Problem(
                "too-many-guesses",
                f"too many wrong tokens came from here, or for this user; try again in {seconds} s",
                headers={"Retry-After": str(seconds)},
            )

    async def _compared(self, token: str, name: str, digest: Digest, address: str) -> User | None:
        self._check_guesses(address, name)
        for hashed in self._hashes.get(name, ()):
            async with self._comparing:
                self._check_guesses(address, name)  # Those that came at the same time may have been wrong.
                is_it = await asyncio.to_thread(fits, token, hashed)
            if is_it and hashed in self._hashes.get(name, ()):
                while len(self._known) >= KNOWN_MAX:
                    del self._known[next(iter(self._known))]
                self._known[digest] = name, hashed
                return self._users[name]
        return None

    def _in_time(self, user: User) -> User:
        if user.is_over(round(self._wall() * 1_000_000)):
            ended = datetime.fromtimestamp(user.expires_us / 1_000_000, UTC)
            raise _unauthorized(f"the time of user {user.name!r} was over on {ended:%Y-%m-%d %H:%M} UTC")
        return user

    def user_now(self, headers: Headers) -> User | None:
        """Who asks, where that was found out when the call came; None: nobody any more."""
        return self.user_of(_bearer(headers))

    def user_of(self, token: str | None) -> User | None:
        """Whose token it is that was recognised before; None: nobody's any more."""
        if self.is_open:
            return EVERYBODY
        user = self._recall(_digest(token or ""))
        return None if user is None or user.is_over(round(self._wall() * 1_000_000)) else user


def _bearer(headers: Mapping[str, str]) -> str:
    """The token that a caller shows; empty: none."""
    scheme, _, shown = headers.get("authorization", "").partition(" ")
    return shown.strip() if scheme.lower() == "bearer" else ""


def _user(fields: Fields) -> User:
    grants = tuple(Grant(tuple(it["queues"]), Right(it["may"])) for it in fields["grants"])
    return User(fields["name"], grants, fields["admin"], fields["expires_us"])


def forbidden(user: User, right: Right, queue: str | None) -> Problem:
    """It has not this right, with this queue or with all of them."""
    where = f" with queue {queue!r}" if queue is not None else " with every queue"
    where = "" if right is Right.ADMIN else where
    detail = f"{user.name!r} may not do this: it needs the right {right.word}{where}; see [[user]]"
    return Problem("forbidden", detail) if queue is None else Problem("forbidden", detail, queue=queue)


def _digest(token: str) -> Digest:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _unknown() -> Problem:
    return _unauthorized("this token is not known here; see [[user]] of the broker's settings")


def _unauthorized(detail: str) -> Problem:
    return Problem("unauthorized", detail, headers={"WWW-Authenticate": 'Bearer realm="penstock"'})


def check_local(headers: Mapping[str, str]) -> None:
    """Where nobody has a token: whether it is somebody on this machine who asks, and no web page."""
    host = headers.get("host", "")
    if host and not _is_local(host):
        raise Problem(
            "forbidden",
            "without tokens the API answers only to names of this machine (localhost, 127.0.0.1); "
            "set [[user]] to use another name",
        )
    origin = headers.get("origin")
    if origin is not None and (origin == "null" or origin.partition("://")[2] != host):
        raise Problem("forbidden", "a page of another site asks; set [[user]] and send a token to allow that")


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
