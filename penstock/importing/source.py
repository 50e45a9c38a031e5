"""Source: where messages are taken from, the same for every kind of server, and the URLs that name one.

A source takes messages so that they come again unless they are settled, and settles them when they are stored
here. `Message.identity` is what it knows a message by when it comes again; without one it may be stored twice
where an import is broken off.

How it fails: `Away` where the server is not there, perhaps soon; `Refuses` where it says no, in one sentence.
Credentials are in neither, nor in a source's `name`.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from penstock.client.errors import reason_of
from penstock.client.options import ClientOptions, Options, tls_context
from penstock.client.url import Target
from penstock.common.text import printable
from penstock.errors import Misuse, PenstockError

if TYPE_CHECKING:
    import ssl

log = logging.getLogger("penstock.client.importing")

PASSWORD_VARIABLE: Final = "PENSTOCK_IMPORT_PASSWORD"
BATCH_MAX: Final = 1000
"""Of messages that are taken at a time."""
POLL_SECONDS: Final = 0.2
"""How long a `take` may wait for a message."""
CONNECT_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 30.0

KINDS: Final = {
    "sspq": ("wires", "Sspq", ""),
    "phpmq": ("wires", "Phpmq", ""),
    "rq": ("wires", "Rq", ""),
    "redis": ("redis", "Key", "pop group claim body"),
    "beanstalk": ("beanstalk", "Beanstalk", "buried"),
    "amqp": ("amqp", "Amqp", "headers"),
}
"""By the scheme of the URL: module, class, and the words that may follow a `?`. With an s at its end a scheme
means TLS; then the words of `TLS` may follow, too."""
TLS: Final = ["cafile", "certfile", "keyfile"]

FORMS: Final = (
    "sspq://HOST:PORT, phpmq://HOST:PORT/QUEUE, rq://HOST:PORT/QUEUE, redis://HOST:PORT/DB/KEY, "
    "beanstalk://HOST:PORT/TUBE or amqp://USER@HOST:PORT/VHOST/QUEUE"
)


class Away(PenstockError):
    """The other side cannot be reached, or has gone away. What was not settled comes again there."""


class Refuses(PenstockError):
    """The other side says no, or has nothing that could be taken."""


@dataclass(slots=True)
class Message:
    handle: Any  # by which its source settles it
    body: bytes
    identity: str = ""
    is_first: bool = False  # nobody has had it before, says the source: whatever its identity, it is another
    headers: Mapping[str, str] = field(default_factory=dict)
    ttl: int | None = None  # seconds left
    delay: float | None = None  # seconds left
    retries: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """What a URL says."""

    scheme: str
    tls: bool
    hosts: str
    host: str
    port: int | None
    user: str | None
    password: str | None = field(repr=False)
    path: tuple[str, ...]
    options: Mapping[str, str]

    @property
    def name(self) -> str:
        return printable(
            "/".join([f"{self.scheme}://{self.hosts}", *(part.replace("/", "%2F") for part in self.path)])
        )


class Source:
    confirms = True  # whether `settle` returns only when the other side has it
    keeps_records = False
    batch_max = BATCH_MAX

    def __init__(self, place: Place) -> None:
        self.place = place
        self.queue = place.path[-1] if place.path else ""  # what it is called there

    @property
    def name(self) -> str:
        return self.place.name

    def open(self) -> None:
        """Connect."""
        raise NotImplementedError

    def take(self, count: int) -> list[Message]:
        """At most so many; none where none has come within `POLL_SECONDS`."""
        raise NotImplementedError

    def settle(self, messages: Sequence[Message]) -> None:
        """They are stored here: there, they are done."""
        raise NotImplementedError

    def left(self) -> dict[str, int]:
        """How many there are in which state, as far as the other side tells."""
        return {}

    def keep(self, messages: Sequence[Message]) -> None:
        """They are still wanted: called every second while Penstock has no room for them."""

    def recall(self) -> bytes:
        """What `remember` was given last; of a source that `keeps_records`."""
        raise NotImplementedError

    def remember(self, record: bytes) -> None:
        """Keep what the next run has to know."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave; what was not settled goes back. Can be called at any time, and fails at none."""
        raise NotImplementedError


def source_of(url: str) -> Source:
    """The source that a URL names."""
    place = place_of(url)
    module, maker, _ = KINDS[place.scheme]
    make: Callable[[Place], Source] = getattr(import_module(f"penstock.importing.{module}"), maker)
    try:
        return make(place)
    except ModuleNotFoundError as error:
        raise Refuses(
            f"{place.scheme}:// needs the package {error.name}: pip install 'penstock[import]'"
        ) from None


def place_of(url: str) -> Place:
    """A URL, taken apart. `Misuse` says what would be right, without what may be a password."""
    try:
        parts = urlsplit(url)
        port = parts.port if "," not in parts.netloc else None
    except ValueError:
        raise Misuse(f"this is no URL of a source; use {FORMS}") from None
    scheme, tls = parts.scheme, False
    if scheme not in KINDS:
        scheme, tls = scheme.removesuffix("s"), True
    if scheme not in KINDS or not parts.hostname:
        raise Misuse(f"{printable(parts.scheme)}://…: use {FORMS}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = KINDS[scheme][2].split() + TLS * tls
    for name in options:
        if name not in known:
            words = ", ".join(known) or "nothing"
            raise Misuse(f"{scheme}://…?{printable(name)}: after the ? can be {words}")
    password = os.environ.get(PASSWORD_VARIABLE) if parts.password is None else unquote(parts.password)
    return Place(
        scheme=scheme,
        tls=tls,
        hosts=parts.netloc.rpartition("@")[2],
        host=parts.hostname,
        port=port,
        user=unquote(parts.username) if parts.username else None,
        password=password or None,
        path=tuple(unquote(part) for part in parts.path.removeprefix("/").split("/") if part),
        options=options,
    )


def tls_of(place: Place) -> "ssl.SSLContext | None":
    """What the connection is encrypted with; None: it is not. Misuse where a file cannot be used."""
    return tls_context(Target(place.scheme, (), place.tls), Options.of(**tls_files(place)))


def tls_files(place: Place) -> ClientOptions:
    cafile, certfile, keyfile = map(place.options.get, TLS)
    return {"cafile": cafile, "certfile": certfile, "keyfile": keyfile}


def choice(place: Place, name: str, *words: str) -> str:
    """An option of a URL that is one of these words, the first unless it is given."""
    word = place.options.get(name, words[0])
    if word not in words:
        raise Misuse(f"{place.scheme}://…?{name}={printable(word)}: use {' or '.join(words)}")
    return word


@contextmanager
def told(name: str, away: tuple[type[Exception], ...]) -> Iterator[None]:
    """What means that the other side is not there, as `Away`."""
    try:
        yield
    except away as error:
        # Of a client of ours the sentence ends with what the loop says, too.
        raise Away(f"{name}: {printable(reason_of(error)).partition('; is it')[0]}") from None
