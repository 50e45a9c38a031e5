"""What may leave a parser: a violation by the peer, or misuse by our own caller. Nothing else.

"Need more bytes" is not an error: a reader returns what it has and keeps the rest.
"""


class ProtocolError(Exception):
    """The base of both, so that a caller can tell a protocol's errors from a fault of ours."""


class MisuseError(ProtocolError):
    """Our own code asked for something that the protocol cannot say."""


class PeerViolation(ProtocolError):
    """The peer broke the protocol and its stream cannot be trusted any more: close it.

    `position` counts the bytes of the stream before the offending ones; `offending` holds the
    first few of them.
    """

    OFFENDING_BYTES_MAX = 32

    def __init__(self, protocol: str, message: str, *, position: int, offending: bytes) -> None:
        self.protocol = protocol
        self.position = position
        self.offending = bytes(offending[: self.OFFENDING_BYTES_MAX])
        super().__init__(f"{protocol}: {message} at byte {position}: {self.offending.hex(' ')}")
