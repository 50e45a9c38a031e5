"""Wishes: what somebody wants by a key or the mouse; they rise from where it was pressed to the program."""

from textual.message import Message


class Wish(Message):
    """Something is wanted of a queue."""

    def __init__(self, queue: str) -> None:
        super().__init__()
        self.queue = queue


class Open(Wish):
    """See it."""


class Redrive(Wish):
    """Put its dead letters back."""


class Pause(Wish):
    """Pause it, or resume it where it is paused."""

    def __init__(self, queue: str, paused: bool) -> None:
        super().__init__(queue)
        self.paused = paused


class RedriveReason(Wish):
    """Put the dead letters of one reason back."""

    def __init__(self, queue: str, reason: str) -> None:
        super().__init__(queue)
        self.reason = reason


class PurgeLetters(Wish):
    """Throw its dead letters away."""


class End(Message):
    """Send a connection away."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class ShowList(Message):
    """See one of the lists."""

    def __init__(self, view: str) -> None:
        super().__init__()
        self.view = view
