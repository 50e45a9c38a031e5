"""Options: every time and limit of a client, under one name with its unit, for all protocols alike.

`ClientOptions` is what a caller may pass, `Options` what the clients go by: complete and checked.
How it fails: `NotSupported`, which names the option and says what would be right.
"""

import re
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

from penstock.client.errors import NotSupported

if TYPE_CHECKING:
    import ssl

    from penstock.client.url import Target

_PAYLOAD_BYTES_TOP: Final = (1 << 31) - 1  # positions in a batch are int32
SECONDS_TOP: Final = 2_000_000.0
"""The longest that anybody waits: 23 days, because the system counts them in milliseconds of 31 bits."""


def bounded(seconds: float | None) -> float | None:
    """A time-out of a call, which may be infinite."""
    return None if seconds is None else min(seconds, SECONDS_TOP)


class ClientOptions(TypedDict, total=False):
    """The keyword arguments of `connect`, `aconnect` and every client. What each means is in `Options`."""

    connect_seconds: float
    operation_seconds: float
    reconnect_seconds: float
    backoff_seconds_min: float
    backoff_seconds_max: float
    silence_seconds: float
    drain_seconds: float
    payload_bytes_max: int
    receipts: bool
    token: str | None
    cafile: str | None
    certfile: str | None
    keyfile: str | None
    verify: bool
    ssl_context: "ssl.SSLContext | None"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one client."""

    connect_seconds: float = 5.0  # for one attempt at one address, TLS included
    operation_seconds: float = 30.0  # for a write, a receipt, an orderly end
    reconnect_seconds: float = 60.0  # how long to look for a broker again before giving up; 0: one round
    backoff_seconds_min: float = 0.1  # the pause after the first round of failed attempts; doubles each time
    backoff_seconds_max: float = 5.0  # but is never longer than this
    silence_seconds: float = 15.0  # RQ: a silent controller is pinged, and after as long again left
    drain_seconds: float = 10.0  # RQ: how long close() waits for handlers and answers
    payload_bytes_max: int = 64 << 20  # of a message, either way
    receipts: bool = True  # PHPMQ, SSPQ: False for a server that is no Penstock and cannot say what it stored
    token: str | None = field(default=None, repr=False)  # HTTP: who we are, where the broker has tokens
    cafile: str | None = None  # who signs the broker's certificate; None: what the system trusts
    certfile: str | None = None  # this client's own certificate, where the broker asks for one
    keyfile: str | None = None  # its key, where that is not in the same file
    verify: bool = True  # False: anybody may pose as the broker; for tests only
    ssl_context: "ssl.SSLContext | None" = None  # instead of the four above

    @classmethod
    def of(cls, **given: Unpack[ClientOptions]) -> "Options":
        """Checked options; what is not given has its default."""
        names = [it.name for it in fields(cls)]
        for name in given:
            if name not in names:
                near = get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
                raise NotSupported(f"there is no option {name}; {hint}")
        values: dict[str, Any] = {**given}  # which of them are numbers, only the names of options say
        for name in _SECONDS.keys() & given.keys() - {"reconnect_seconds"}:
            values[name] = min(values[name], SECONDS_TOP)
        options = cls(**values)
        options._check()
        return options

    def _check(self) -> None:
        for name, may_be_zero in _SECONDS.items():
            seconds: float = getattr(self, name)
            # The comparison is also false for "not a number".
            if not (seconds > 0 or (may_be_zero and seconds == 0)):
                raise NotSupported(
                    f"{name} is {seconds}: use a number of seconds over 0" + " or 0" * may_be_zero
                )
        if self.backoff_seconds_max < self.backoff_seconds_min:
            raise NotSupported(
                f"backoff_seconds_max is {self.backoff_seconds_max}: "
                f"use at least backoff_seconds_min, {self.backoff_seconds_min}"
            )
        if not 1 <= self.payload_bytes_max <= _PAYLOAD_BYTES_TOP:
            raise NotSupported(
                f"payload_bytes_max is {self.payload_bytes_max}: use 1 to {_PAYLOAD_BYTES_TOP}"
            )
        if self.token is not None and not re.fullmatch("[!-~]+", self.token):
            # Said without the token.
            raise NotSupported(
                "token has a character that no token has, or none: use printable ASCII without spaces"
            )
        if self.keyfile is not None and self.certfile is None:
            raise NotSupported("keyfile needs certfile: the key of which certificate?")
        if self.ssl_context is not None and (self.cafile or self.certfile or not self.verify):
            raise NotSupported(
                "ssl_context has its own certificates: use it, or cafile, certfile, keyfile and verify"
            )


_SECONDS: Final = {
    "connect_seconds": False,
    "operation_seconds": False,
    "reconnect_seconds": True,
    "backoff_seconds_min": False,
    "backoff_seconds_max": False,
    "silence_seconds": False,
    "drain_seconds": True,
}
"""The options that are times, and whether they may be 0."""


def tls_context(target: "Target", options: Options) -> "ssl.SSLContext | None":
    """What the connections to a target are encrypted with; None where its URL asks for no TLS."""
    if not target.tls:
        return None
    import ssl  # here, because most clients need none of it

    if options.ssl_context is not None:
        return options.ssl_context
    try:
        context = ssl.create_default_context(cafile=options.cafile)
    except OSError as error:
        raise NotSupported(
            f"cafile {options.cafile!r} cannot be used: {error}; name a file in PEM form"
        ) from None
    if not options.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if options.certfile is not None:
        try:
            context.load_cert_chain(options.certfile, options.keyfile)
        except OSError as error:
            names = f"certfile {options.certfile!r}" + (
                f", keyfile {options.keyfile!r}" if options.keyfile else ""
            )
            raise NotSupported(f"{names} cannot be used: {error}; name files in PEM form") from None
    return context
