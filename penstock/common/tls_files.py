"""TlsFiles: the context of one door, made anew from its files when they change or somebody says so.

    look     cheap enough for a loop: are the files others than those that were read last?
    read     on a thread: a new context from them, for whoever connects from then on

Rules that always hold:
  * Every reading makes a context of its own, so that nothing of the old files counts for new connections: no
    authority that was taken out, no ticket of a session. Connections that are open stay as they are.
  * What was in force stays so until all files together make a context. One whose certificate has ended does
    not take its place.
  * What is wrong is said once for each state of the files, and each time that somebody asks for a reading.

How it fails: the first reading raises `SettingsError`, as `make_context` does; later ones say so in the log.
"""

import asyncio
import os
import ssl
import time
from typing import Any, Final, NamedTuple

from penstock.common.given import SettingsError
from penstock.common.journal import log
from penstock.common.tls import make_context

LOOK_SECONDS: Final = 5.0
DAY_SECONDS: Final = 86_400
ENDING_SECONDS: Final = 14 * DAY_SECONDS
"""So long before its end there is a warning about a certificate, once a day."""


class Certificate(NamedTuple):
    """What people want to know about one."""

    subject: str
    ends: float | None  # None: nobody can say

    @property
    def until(self) -> str:
        return "unknown" if self.ends is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.ends))


def read_certificate(path: str) -> Certificate:
    """The first one of a file in PEM form."""
    try:
        # The ssl module has no other way to read a file that nobody has shown in a handshake.
        found: dict[str, Any] = ssl._ssl._test_decode_cert(path)  # type: ignore[attr-defined]
        subject = ", ".join(f"{name}={value}" for ((name, value),) in found["subject"])
        return Certificate(subject.replace("commonName=", "CN="), ssl.cert_time_to_seconds(found["notAfter"]))
    except (OSError, ValueError, AttributeError, LookupError):
        return Certificate("unknown", None)


def _state(path: str) -> tuple[int, ...] | None:
    """Another file has another one, also where a symbolic link leads to another file than before."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev


class TlsFiles:
    """Those of one door. All but the thread's part is for the loop of whoever has it."""

    def __init__(self, owner: str, certificate: str, key: str, client_ca: str | None = None) -> None:
        """`owner` is what every line begins with: the place and the section."""
        self._owner = owner
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._found = self._states()
        self.context, self._in_force = self._read()
        self._said = -float(DAY_SECONDS)  # when the end of the certificate was told last
        self._readings: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()

    def _states(self) -> list[tuple[int, ...] | None]:
        paths = self._certificate, self._key, self._client_ca
        return [_state(path) for path in paths if path is not None]

    def _read(self) -> tuple[ssl.SSLContext, Certificate]:
        context = make_context(self._owner, self._certificate, self._key, self._client_ca)
        return context, read_certificate(self._certificate)

    def look(self, *, asked: bool = False) -> None:
        """Read the files where they have changed, or somebody asks for it; and is the certificate to end?"""
        found = self._states()
        if asked or found != self._found:
            self._found = found
            reading = asyncio.get_running_loop().create_task(self._read_again())
            self._readings.add(reading)
            reading.add_done_callback(self._readings.discard)
        self._tell_of_the_end()

    async def _read_again(self) -> None:
        async with self._one_at_a_time:
            try:
                context, certificate = await asyncio.to_thread(self._read)
                self._check_end(certificate)
            except SettingsError as error:
                log.error("%s; the TLS files that were read before stay in force", error)
                return
            self.context, self._in_force = context, certificate
            log.info(
                "%s: TLS files read again, for new connections", self._owner, extra={"facts": self._facts()}
            )
            self._said = -float(DAY_SECONDS)
            self._tell_of_the_end()

    def _check_end(self, certificate: Certificate) -> None:
        if certificate.ends is not None and certificate.ends <= time.time():
            raise SettingsError(
                f"{self._owner} tls-certificate: {self._certificate!r} ended on {certificate.until}; "
                f"put a new one there"
            )

    def _facts(self) -> dict[str, object]:
        return {"certificate": self._in_force.subject, "until": self._in_force.until}

    def _tell_of_the_end(self) -> None:
        ends, now = self._in_force.ends, time.monotonic()
        if ends is None or now - self._said < DAY_SECONDS or ends - time.time() >= ENDING_SECONDS:
            return
        self._said = now
        has_ended = ends <= time.time()
        what = "has ended: clients refuse it" if has_ended else "ends in less than 14 days"
        log.warning(
            "%s: the certificate in force %s; put a new one in its place, it is then read",
            self._owner,
            what,
            extra={"facts": self._facts()},
        )
