"""Rights: who may do what, with which queues. The same at every door.

    send      put messages into a queue, also by transactions and by redriving letters to another one
    receive   consume, take and settle
    read      look: at its figures, its log, its messages, its dead letters; Spark reads
    operate   pause, resume, redrive, withdraw, hold retention
    admin     everything, with every queue: also purge, delete, and what is about the broker as a whole

A user has these by patterns of queue names; dead letters belong to their queue. Rights are given, never taken
away: what no pattern gives, one has not.

Rule that always holds: nobody has a right when their time is over.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Flag
from fnmatch import translate
from functools import lru_cache
from typing import Final

from penstock.model.policy import door_of

KEPT_NAMES: Final = 4096
"""So many names of queues are remembered with what somebody may do with them."""


class Right(Flag):
    SEND = 1
    RECEIVE = 2
    READ = 4
    OPERATE = 8
    ADMIN = 16

    NONE = 0
    ALL = 15  # that patterns can give

    @property
    def word(self) -> str:
        """As settings have it; of several: one of them."""
        return " or ".join(str(it.name).lower() for it in self)


WORDS: Final = {right.word: right for right in Right.ALL}


@lru_cache(1024)
def matcher(pattern: str) -> Callable[[str], object]:
    """Whether a name fits a pattern: only `*` and `?` are special, as everywhere in the settings."""
    return re.compile(translate(pattern.replace("[", "[[]"))).match


@dataclass(frozen=True, slots=True)
class Grant:
    """Some rights with some queues."""

    queues: tuple[str, ...]  # patterns
    may: Right

    def fits(self, name: str) -> bool:
        return any(matcher(pattern)(name) for pattern in self.queues)


@dataclass(frozen=True, slots=True)
class User:
    """Somebody, or some program, and what it may do."""

    name: str
    grants: tuple[Grant, ...] = ()
    is_admin: bool = False
    expires_us: int = 0  # since the epoch; 0: never
    _known: dict[str, Right] = field(default_factory=dict, compare=False, repr=False)

    def is_over(self, now_us: int) -> bool:
        return 0 < self.expires_us <= now_us

    def rights(self, queue: str) -> Right:
        """With one queue, or with the dead letters of one."""
        if self.is_admin:
            return Right.ALL | Right.ADMIN
        known = self._known.get(queue)
        if known is None:
            name, _ = door_of(queue)
            known = Right.NONE
            for grant in self.grants:
                if grant.fits(name):
                    known |= grant.may
            if len(self._known) >= KEPT_NAMES:
                self._known.clear()
            self._known[queue] = known
        return known

    def may(self, right: Right, queue: str | None = None) -> bool:
        """Whether it has these rights with a queue; without one: with every queue that there can be."""
        if self.is_admin:
            return True
        if queue is not None:
            return right in self.rights(queue)
        everywhere = Right.NONE
        for grant in self.grants:
            if "*" in grant.queues:
                everywhere |= grant.may
        return right in everywhere

    def may_some(self, right: Right) -> bool:
        """Whether it has one of these rights with some queue."""
        return self.is_admin or any(grant.may & right for grant in self.grants)

    @property
    def words(self) -> str:
        """What it may do with some queue or other, for people."""
        if self.is_admin:
            return Right.ADMIN.word
        return ", ".join(word for word, right in WORDS.items() if self.may_some(right))

    def visible(self, queues: Iterable[str]) -> list[str]:
        """Those of some queues that it may read."""
        return [queue for queue in queues if self.may(Right.READ, queue)]


EVERYBODY: Final = User("", is_admin=True)
"""Who comes where nobody is asked for a name."""


NOBODY: Final = User("")
"""Who has no rights."""


def by_role(name: str, role: str) -> User:
    """What a token of `[[http.tokens]]` stands for: each role may do what the one before it may, and more."""
    if role == "admin":
        return User(name, is_admin=True)
    return User(name, (Grant(("*",), Right.READ if role == "read" else Right.ALL),))
