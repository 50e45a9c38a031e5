"""Weight: how many bytes the living messages of a queue are, without a look into blocks at every ack."""

from typing import Final

NOTES_MAX = 2000
"""Two for each run: what so many take is looked up in a few milliseconds."""

_NOTHING: Final[list[int]] = []  # of all queues in which nothing has been noted; nobody adds to it


class Weight:
    """Payload bytes of the living messages of a queue that are in blocks, and what has to be added to know.

    How large messages are that end is in their blocks. To look there with every ack would cost more than
    the ack: it is noted which they are, and looked up when somebody wants to know (`views.weigh`), when there
    are many of them, or before their segment goes.
    """

    __slots__ = ("back", "bytes", "known", "left")

    def __init__(self) -> None:
        self.bytes = 0
        self.known = False  # False: nobody has asked since the log was opened, and nothing is noted
        self.left = _NOTHING  # first and end of runs that live no more
        self.back = _NOTHING  # and of those that live again

    @property
    def is_due(self) -> bool:
        return len(self.left) > NOTES_MAX or len(self.back) > NOTES_MAX

    def leave(self, first: int, end: int) -> None:
        left = self.left
        if left and left[-1] == first:
            left[-1] = end
        elif left:
            left.append(first)
            left.append(end)
        elif self.known:
            self.left = [first, end]

    def come_back(self, first: int, end: int) -> None:
        if self.known:
            self.back = self.back or []
            self.back += (first, end)

    def forget(self) -> None:
        """Who asks next counts anew."""
        self.known = False
        self.left = self.back = _NOTHING
