"""Kinds of values that only the broker's settings have: addresses, secrets, names in a cluster."""

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Final

from penstock.common.address import FORMS, AddressError, TcpAddress, parse_address
from penstock.common.kinds import Fitting, Kind, WrongValue
from penstock.common.tokens import check_hash

OFF: Final = "off"
LOG: Final = "log"
EVERY_NETWORK: Final = ("0.0.0.0", "::")
SECRET_CHARACTERS_MIN: Final = 16


@dataclass(frozen=True, slots=True)
class Listen(Kind):
    """An address to listen on; None for `off`, where that is allowed."""

    may_be_off: bool = True
    metavar: str = "ADDR"

    def check(self, value: object) -> object:
        if value == OFF and self.may_be_off:
            return None
        if not isinstance(value, str):
            raise self.refuse()
        try:
            return parse_address(value)
        except AddressError as error:
            raise WrongValue(error.problem + (f"; or {OFF}" if self.may_be_off else "")) from None

    def wanted(self) -> str:
        return f"{FORMS.replace(' or ', ', ')} or {OFF}" if self.may_be_off else FORMS


@dataclass(frozen=True, slots=True)
class Mode(Kind):
    """Who may use a file, as `chmod` takes it; a number of TOML or YAML would be read as another one."""

    metavar: str = "MODE"

    def check(self, value: object) -> object:
        if isinstance(value, str) and re.fullmatch("0?[0-7]{3}", value):
            return int(value, 8)
        raise self.refuse()

    def wanted(self) -> str:
        return 'three octal digits as chmod has them, as in "0660"'


@dataclass(frozen=True, slots=True)
class Secret(Kind):
    """A text that is worth as much as a password, and can stand in a header of HTTP as it is."""

    def hides(self, value: object) -> bool:
        return True

    def check(self, value: object) -> object:
        if isinstance(value, str) and re.fullmatch(f"[!-~]{{{SECRET_CHARACTERS_MIN},}}", value):
            return value
        raise self.refuse()

    def wanted(self) -> str:
        return f"at least {SECRET_CHARACTERS_MIN} printable ASCII characters without blanks"


@dataclass(frozen=True, slots=True)
class TokenHashes(Kind):
    """Hashes of tokens: one, or a list, of which each counts while it is there."""

    def hides(self, value: object) -> bool:
        return True

    def check(self, value: object) -> object:
        hashes = value if isinstance(value, list) else [value]
        try:
            for hashed in hashes:
                check_hash(str(hashed))
        except ValueError:
            raise self.refuse() from None
        return tuple(hashes)

    def wanted(self) -> str:
        return "what `penstock token new NAME` prints, or a list of that"


@dataclass(frozen=True, slots=True)
class TextOrTexts(Kind):
    """One text, or a list of some. For the file only."""

    what: str

    def check(self, value: object) -> object:
        texts = value if isinstance(value, list) else [value]
        if texts and all(isinstance(text, str) and text for text in texts):
            return tuple(texts)
        raise self.refuse()

    def wanted(self) -> str:
        return self.what


@dataclass(frozen=True, slots=True)
class Store(Kind):
    """A folder, or the URL of one in an object store: many are told where it is, so without credentials."""

    metavar: str = "PATH"

    def hides(self, value: object) -> bool:
        return self._may_tell(value)

    def check(self, value: object) -> object:
        if not isinstance(value, str) or not value or "\0" in value:
            raise self.refuse()
        if self._may_tell(value):
            raise WrongValue(
                "it has credentials in it, and whoever may read is told it; leave them to the environment"
            )
        return value

    def wanted(self) -> str:
        return "a folder, or the URL of one in an object store"

    @staticmethod
    def _may_tell(value: object) -> bool:
        return bool(re.match(r"[^/]+://([^/]*:[^/]*@|.*\?)", str(value)))


@dataclass(frozen=True, slots=True)
class Patterns(Kind):
    """Patterns of names: a list in the file, elsewhere with commas between them."""

    metavar: str = "PATTERNS"

    def check(self, value: object) -> object:
        texts = [it.strip() for it in value.split(",")] if isinstance(value, str) else value
        texts = texts if isinstance(texts, list) else []
        if texts and all(isinstance(it, str) and it and it.isprintable() for it in texts):
            return tuple(texts)
        raise self.refuse()

    def wanted(self) -> str:
        return 'patterns of names, as in ["orders.*", "billing"]; outside a file with commas between them'


@dataclass(frozen=True, slots=True)
class Words(Kind):
    """A list of some of a few words. For the file only."""

    choices: tuple[str, ...]

    def check(self, value: object) -> object:
        if isinstance(value, list) and value and all(word in self.choices for word in value):
            return tuple(value)
        raise self.refuse()

    def wanted(self) -> str:
        return f"a list of some of {', '.join(self.choices)}"


@dataclass(frozen=True, slots=True)
class Records(Kind):
    """A list of tables, whose members are checked one by one elsewhere. For the file only."""

    def check(self, value: object) -> object:
        if isinstance(value, list) and value and all(isinstance(it, dict) for it in value):
            return value
        raise self.refuse()

    def wanted(self) -> str:
        return 'a list, as in [{queues = "orders.*", may = ["send", "read"]}]'


@dataclass(frozen=True, slots=True)
class Moment(Kind):
    """A date, which begins in UTC, or a time with its zone; µs since the epoch. For the file only."""

    def check(self, value: object) -> object:
        if isinstance(value, date) and not isinstance(value, datetime):
            value = datetime(value.year, value.month, value.day, tzinfo=UTC)
        if isinstance(value, datetime) and value.tzinfo is not None:
            return round(value.timestamp() * 1_000_000)
        raise self.refuse()

    def wanted(self) -> str:
        return "a date, 2027-01-31, or a time with its zone, 2027-01-31T12:00:00Z, without quotes"


LABEL: Final = Fitting("1 to 64 letters, digits and any of _ -", "[A-Za-z0-9_-]{1,64}", "NAME")
"""A name that becomes a part of a subject of NATS, where a dot would part it."""

LOG_NAME: Final = Fitting("1 to 32 small letters, digits and hyphens", "[a-z0-9][a-z0-9-]{0,31}", "NAME")
"""The name of a cluster's log, as `log/jetstream/names.py` takes it."""


@dataclass(frozen=True, slots=True)
class Reach(Kind):
    """An address of TCP; where others connect to, it is one that they can reach, with a port of its own."""

    may_be_any: bool  # port 0, or all networks: to listen on
    metavar: str = "ADDR"

    def check(self, value: object) -> object:
        if not isinstance(value, str):
            raise self.refuse()
        try:
            address = parse_address(value)
        except AddressError as error:
            raise WrongValue(error.problem.replace(FORMS, self.wanted())) from None
        if not isinstance(address, TcpAddress):
            raise self.refuse()
        if not self.may_be_any and (not address.port or address.host in EVERY_NETWORK):
            raise WrongValue("nobody can connect to that; use the HOST:PORT that other front-ends reach")
        return address

    def wanted(self) -> str:
        return "HOST:PORT or [IPV6]:PORT"


@dataclass(frozen=True, slots=True)
class Urls(Kind):
    """URLs of HTTP, parted by commas."""

    metavar: str = "URLS"

    def check(self, value: object) -> object:
        if not isinstance(value, str):
            raise self.refuse()
        urls = tuple(url.strip().rstrip("/") for url in value.split(","))
        if not all(re.fullmatch(r"https?://[^\s/@?#]+(:[0-9]{1,5})?", url) for url in urls):
            raise self.refuse()
        return urls

    def wanted(self) -> str:
        return "http://HOST:PORT, of several with commas between them"


@dataclass(frozen=True, slots=True)
class Engine(Kind):
    """Where messages live: "log", or the URLs of NATS servers as a tuple, each with its scheme."""

    metavar: str = "URL"

    def hides(self, value: object) -> bool:
        return "@" in str(value)  # what stands before it may be a password

    def check(self, value: object) -> object:
        if value == LOG:
            return value
        if not isinstance(value, str) or not re.match("(nats|tls)://", value):
            raise self.refuse()
        # Whoever has no cluster loads nothing of it.
        from penstock.log.jetstream.servers import ServerListError, parse_servers

        try:
            parse_servers(value)
        except ServerListError as error:
            raise WrongValue(error) from None
        scheme = value.partition("://")[0]
        urls = (url.strip() for url in value.split(","))
        return tuple(url if "://" in url else f"{scheme}://{url}" for url in urls)

    def wanted(self) -> str:
        return "log, or nats://HOST:PORT,HOST:PORT,… (tls:// for TLS)"
