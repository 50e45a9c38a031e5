"""Weight: how many bytes the living messages of a queue are, without a look into blocks at every ack."""

from typing import Final

WEIGHT_NOTES_MAX = 1 << 17
"""Two for each run; what so many take is what a walk over all living messages takes."""


_NOTHING: Final[list[int]] = []  # of all queues in which nothing has been noted; nobody adds to it


class Weight:
    """Payload bytes of the living messages of a queue that are in blocks, and what has to be added to know.

    How large messages are that end is in their blocks. To look there with every ack would cost more than
    the ack: it is noted which they are, and looked up when somebody wants to know (`views.weigh`), or before
    their segment goes.
    """

    __slots__ = ("back", "bytes", "known", "left")

    def __init__(self) -> None:
        self.bytes = 0
        self.known = False  # False: nobody has asked since the log was opened
        self.left = _NOTHING  # first and end of runs that live no more
        self.back = _NOTHING  # and of those that live again

    def leave(self, first: int, end: int) -> None:
        left = self.left
        if not left:
            self.left = [first, end]
            return
        if left[-1] == first:
            left[-1] = end
            return
        left.append(first)
        left.append(end)
        if len(left) > WEIGHT_NOTES_MAX:
            self.forget()

    def come_back(self, first: int, end: int) -> None:
        if not self.back:
            self.back = [first, end]
            return
        self.back += (first, end)
        if len(self.back) > WEIGHT_NOTES_MAX:
            self.forget()

    def forget(self) -> None:
        """Counted anew by the next who asks."""
        self.known = False
        self.left = self.back = _NOTHING
