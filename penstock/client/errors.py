"""What can go wrong between a client and a broker: six errors, each with what was in flight and what to do.

    ClientError
      ConnectionLost   the connection broke, or none could be made
      TimedOut         nothing came in time; it may still come
      Undelivered      the broker says that a request will not be answered, or a message was not stored
      Declined         the broker says that no message will come (SSPQ's NO_RECEIVE)
      Refused          the HTTP API says no, and why
      NotSupported     the call asks for something that the protocol, or this version, cannot say

All are `PenstockError`, and so end a command as one line. An error never hides a message: what was handed to
the client and is not known to have arrived is counted in `in_doubt`, and once counted it is not told again.
"""

import os
import ssl
from collections.abc import Sequence

from penstock.errors import Misuse, PenstockError


class ClientError(PenstockError):
    """The base of everything that a client raises by itself."""


class _InFlight(ClientError):
    """An error that may leave messages behind of which nobody knows whether they arrived."""

    def __init__(
        self,
        text: str,
        *,
        in_doubt: int = 0,
        verdicts_in_doubt: int = 0,
        positions: Sequence[int] = (),
        sent: int | None = None,
    ) -> None:
        self.in_doubt = in_doubt
        """How many messages were sent and are not known to have arrived. Send again what must not be lost."""
        self.positions = tuple(positions)
        """In an error of `send_many` with receipts: which of its messages have none, counted from 0."""
        self.verdicts_in_doubt = verdicts_in_doubt
        """How many acknowledgements (requeues, rejections) are not known to have arrived."""
        self.sent = sent
        """In an error of `send_many`: how many of its messages, the first ones, were sent; no others were."""
        super().__init__(text)


class ConnectionLost(_InFlight):
    """The connection broke, or there was none to be had. The next call connects again."""


class TimedOut(_InFlight):
    """What was waited for did not come in time."""


class Undelivered(_InFlight):
    """The broker's own word: these will not be answered, or were not stored."""


class Declined(ClientError):
    """The broker's own word: no message will come, now or from this queue."""


class Refused(ClientError):
    """The HTTP API's own word: no. Programs go by `name` (as in `queue-full`) and `status`."""

    def __init__(self, status: int, name: str, detail: str, *, stored: int = 0) -> None:
        self.status = status
        self.name = name
        """Of the problem, see the API's reference; empty where somebody else than a broker has answered."""
        self.detail = detail
        """The broker's own sentence."""
        self.stored = stored
        """In an error of `send_many`: how many of its messages, the first ones, are stored nevertheless."""
        super().__init__(detail + f"; the first {stored} messages of this call are stored" * bool(stored))


class NotSupported(ClientError, Misuse, ValueError):
    """Nothing that can be said in this protocol, or by this version. Nothing was sent of it."""

    def __init__(self, text: str) -> None:
        self.sent = 0
        """In an error of `send_many`: how many of its messages, the first ones, were sent before."""
        super().__init__(text)


def tell_sent(error: Exception, sent: int) -> None:
    """Put into an error of `send_many` how many of its messages were sent before.

    Also into one that is not ours: the messages come out of an iterable of the caller's.
    """
    if isinstance(error, _InFlight | NotSupported):
        error.sent = sent
    before = f"the first {sent} messages of this call were sent before"
    if sent and isinstance(error, NotSupported):
        error.args = (f"{error}; {before}",)
    elif sent and not isinstance(error, ClientError):
        error.add_note(before)


def reason_of(why: object) -> str:
    """Why a connection failed, in the same words whichever library has tried it."""
    # An errno of the resolver is negative, and that of TLS is no errno.
    if isinstance(why, OSError) and not isinstance(why, ssl.SSLError) and (why.errno or 0) > 0:
        return os.strerror(why.errno or 0)
    return str(why) or type(why).__name__
