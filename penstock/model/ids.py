"""Message ids: 32 lower-case hex digits, derived, never stored and never looked up.

    digits  0-5   which log      24 bits, random, drawn when the log is created
            6-11  which queue    24 bits, the queue's number in that log, never reused
            12-17 which opening  24 bits, how often the log had been opened when the message came
            18-31 which offset   56 bits

The first 12 digits are the *identity* of a queue: one that is deleted and made again has another. The
first 18 are the *origin*: one value for all messages of a block. The opening is in
there because a crash may take back offsets that were dispatched before their sync; the next
opening gives the same offsets to other messages, and no id may ever name two messages.
"""

ID_DIGITS = 32
ORIGIN_DIGITS = 18
IDENTITY_DIGITS = 12
OFFSET_MAX = (1 << 56) - 1
PART_MAX = (1 << 24) - 1
_HEX = frozenset(b"0123456789abcdef")


def origin_of(log: int, queue: int, opening: int) -> bytes:
    """The part of an id that all messages of one queue and one opening share."""
    if not (0 <= log <= PART_MAX and 0 <= queue <= PART_MAX and 0 <= opening <= PART_MAX):
        raise ValueError(f"log {log}, queue {queue}, opening {opening}: each must fit in 24 bits")
    return b"%06x%06x%06x" % (log, queue, opening)


def id_of(origin: bytes, offset: int) -> bytes:
    return origin + b"%014x" % offset


def split_id(message_id: bytes) -> tuple[bytes, int] | None:
    """Origin and offset of an id, or None where it cannot be one of ours."""
    if len(message_id) != ID_DIGITS or not _HEX.issuperset(message_id):
        return None
    return message_id[:ORIGIN_DIGITS], int(message_id[ORIGIN_DIGITS:], 16)
