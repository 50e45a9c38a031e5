"""Forks: what a child process does with the clients of its parent.

A socket is of both then, and what the one says or ends the other does not know of; a lock may be held by a
thread that the child does not have. So in the child every client forgets its connection, without a word to
the broker, and has locks of its own. What its parent has sent or holds is the parent's business.
"""

import os
from typing import Final, Protocol
from weakref import WeakSet


class Forked(Protocol):
    """Whoever has a connection that blocks."""

    def forked(self) -> None:
        """This is a child: begin anew."""


_all: Final["WeakSet[Forked]"] = WeakSet()


def begin_anew_after_fork(owner: Forked) -> None:
    """From now on, tell it."""
    _all.add(owner)


def _tell_all() -> None:
    for owner in list(_all):
        owner.forked()


os.register_at_fork(after_in_child=_tell_all)
