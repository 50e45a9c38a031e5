"""What the log says no with.

`LogRefused` says no to one call and changes nothing; `LogFailed` is final for this opening of the log:
nothing is accepted, taken or settled any more.
"""

from penstock.errors import PenstockError


class LogError(PenstockError):
    """The base of what the log says no with."""


class LogRefused(LogError):
    """This call cannot be done now; nothing was changed. The text says what would help."""


class LogNewer(LogRefused):
    """A newer version has written this log, and something in it that this one does not know."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: the log was written by a newer version; start that one, or a later one")


class QueueUnknown(LogRefused):
    """There is no queue of that name. The first message that is sent to it makes it."""


class QueueDeleted(LogRefused):
    """The queue that is meant was deleted, and another one has its name."""

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"queue {queue!r} was deleted, and another of that name stands now (or the whole log was "
            f"restored from a backup): what is known of the old one does not go with it"
        )


class ReaderUnknown(LogRefused):
    """There is no reader of that name (any more): its lease has ended, or it was released."""


class DiskFull(LogRefused):
    """No room for new messages. Deliveries and settlements go on; try again when there is room."""


class StagesFull(DiskFull):
    """Stages have all the room that they may have, or are too many."""


class StageUnknown(LogRefused):
    """There is no such stage (any more), or it is of another transaction."""


class AttemptOver(LogRefused):
    """Another commit of the same key goes on, or somebody was told that nothing came of this one."""


class StageDamaged(LogRefused):
    """Rows of a stage cannot be read."""


class QueueFull(LogRefused):
    """The queue has its `max-bytes`. Try again when consumers have settled some."""


class QueueTooSmall(QueueFull):
    """It is more than the queue's `max-bytes`: there is never room for it, however long one waits."""


class LogFailed(LogError):
    """The log has stopped for good; what it confirmed is safe, the rest is unknown."""


class LogInUse(LogError):
    """Another process has this data folder open."""


class LogDamaged(LogError):
    """Stored bytes are not what was written. Says file, position and offsets."""
