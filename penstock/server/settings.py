"""The settings of `penstock serve`: every name, kind, bound and default, in one table.

`TABLE` holds what can be set in the file, in the environment and by a flag; `LISTENER_KEYS`, `HTTP_KEYS`,
`TOKEN_KEYS` and `USER_KEYS` what only the file can say. All are data: `settings_read.py` reads the three
sources by them, the command's help is made from them, and docs/settings.md is compared with them by a test.
`Settings` is what comes out. It is long because the table is, whose every row stands beside the others.

Rules that always hold:
  * A setting has one name. `durability` in the file is `--durability` and `PENSTOCK_DURABILITY`;
    `connections-max` under `[limits]` is `--limits-connections-max` and `PENSTOCK_LIMITS_CONNECTIONS_MAX`.
    One has two: TOML cannot have both `http = "ADDR"` and `[http]`, so `address` under `[http]` is `http`.
  * A default goes through the same check as what people write.
  * A `Settings` that was read is valid, as far as can be told without opening anything: nothing here
    touches a file or a socket.
  * The text of a token is in no error and no `repr`.

How it fails: `SettingsError`, for all that is wrong with a setting, wherever that is found.
"""

import os.path
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from penstock.common.address import Address, TcpAddress
from penstock.common.given import FileKey
from penstock.common.kinds import NAME, Kind, Seconds, Switch, Text, Texts, Whole, Word
from penstock.log.disk import AUDIT
from penstock.log.state import LogSettings
from penstock.model.policy import Policies, door_of
from penstock.model.rights import WORDS, User, matcher
from penstock.model.shards import SHARDS_DEFAULT, SHARDS_MAX
from penstock.server.setting_kinds import (
    LABEL,
    LOG_NAME,
    OFF,
    Engine,
    Listen,
    Mode,
    Moment,
    Patterns,
    Reach,
    Records,
    Secret,
    Store,
    TextOrTexts,
    TokenHashes,
    Urls,
    Words,
)

CONFIG_FLAG: Final = "--config"
CONFIG_VARIABLE: Final = "PENSTOCK_CONFIG"
PROTOCOLS: Final = ("sspq", "phpmq", "rq")
ROLES: Final = ("read", "operate", "admin")
"""Of tokens; each may do what the one before it may, and more."""


# --- What the settings become --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients can make the broker hold. The user's names have hyphens where these have underscores."""

    connections_max: int = 10_000
    payload_bytes_max: int = 64 << 20
    queue_name_bytes_max: int = 255
    queues_max: int = 100_000
    queues_new_per_second: int = 1000  # by one connection
    connection_buffer_bytes: int = 1 << 20  # waiting to be sent to one connection
    in_flight_bytes: int = 8 << 20  # accepted and not yet in the log, in all
    packets_per_message_max: int = 5  # PHPMQ
    consumed_queues_max: int = 1024  # by one connection
    memory_bytes_max: int = 512 << 20  # that all clients together make both processes hold
    frame_seconds: int = 30  # that an unfinished message may stay so
    handshake_seconds: int = 10  # of TLS


@dataclass(frozen=True, slots=True)
class Listener:
    """One door of the broker."""

    protocol: str  # "sspq", "phpmq" or "rq"
    address: Address
    queue: str = "default"  # SSPQ only: the queue of all its clients
    tls_certificate: str | None = None  # files in PEM form; without a certificate there is no TLS
    tls_key: str | None = None
    tls_client_ca: str | None = None  # who signs the certificates that clients must then show
    queues: tuple[str, ...] = ("*",)  # patterns of the names that its clients may use
    mode: str = "both"  # "both", "send-only" or "receive-only"
    ttl_packet: str = "auto"  # PHPMQ only: "auto", "always" or "never"
    consume: str = "add"  # PHPMQ only: "add" or "replace"
    user: str = ""  # whose rights its clients have who show no certificate of a user
    setting: str = ""  # what opened it: "sspq", "[[listener]] 2"
    place: str = field(default="", compare=False)  # where that stands: "penstock.toml, line 12"

    @property
    def may_send(self) -> bool:
        return self.mode != "receive-only"

    @property
    def may_receive(self) -> bool:
        return self.mode != "send-only"

    def allows(self, queue: str) -> bool:
        """Whether its clients may use `queue`; a door to dead letters is as open as the queue it leads to."""
        name, _ = door_of(queue)
        return any(matcher(pattern)(name) for pattern in self.queues)


@dataclass(frozen=True, slots=True)
class Token:
    """What a caller of the HTTP API shows, and what that allows."""

    name: str  # for people: in settings and log lines
    role: str  # one of ROLES
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class UserSettings:
    """Somebody, what it is known by, and what it may do."""

    user: User
    certificates: tuple[str, ...] = ()  # names in client certificates: the subject's, or alternative ones
    hashes: tuple[str, ...] = field(default=(), repr=False)  # of its tokens
    certificate_ca: str = ""  # who must have signed these; empty: the only authority that a listener has


_HTTP_ADDRESS: Final = TcpAddress("127.0.0.1", 9180)


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The HTTP API, where it is on. The user's names have hyphens where these have underscores."""

    address: Address = _HTTP_ADDRESS
    tokens: tuple[Token, ...] = ()  # none: everybody may do everything, and `address` is a loopback one
    tls_certificate: str | None = None  # files in PEM form; without a certificate there is no TLS
    tls_key: str | None = None
    body_bytes_max: int = 16 << 20
    bodies_bytes_max: int = 256 << 20  # of all requests together
    connections_max: int = 1000
    metrics_queues_max: int = 1000
    health_seconds: int = 120
    history_days: int = 14
    lease_seconds_max: int = 3600
    readers_max: int = 1000
    place: str = field(default="", compare=False)  # the file that says what only a file can say


_RELAY_ADDRESS: Final = TcpAddress("127.0.0.1", 0)


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """How front-ends share a log on NATS. The user's names have hyphens where these have underscores."""

    name: str = "penstock"  # of the log; front-ends with the same one share it
    id: str | None = None  # of this front-end; None: made of the host's name and the process's number
    listen: TcpAddress = _RELAY_ADDRESS  # where other front-ends connect while this one leads
    advertise: TcpAddress | None = None  # where they reach that; None: where it really listens
    replicas: int = 3
    shards: int | None = None  # logs, of a cluster that is new; None: as many as it has, or `SHARDS_DEFAULT`
    credentials: str | None = None  # a .creds file, or one with the seed of an nkey or USER:PASSWORD
    tls_ca: str | None = None  # files in PEM form; None: what the system trusts
    tls_certificate: str | None = None  # what this front-end shows to the NATS servers
    tls_key: str | None = None
    relay_certificate: str | None = None  # what front-ends show to each other; None: one made of their key
    relay_key: str | None = None
    relay_ca: str | None = None
    monitor: tuple[str, ...] = ()  # http://HOST:PORT of the monitoring of every node


@dataclass(frozen=True, slots=True)
class ArchiveSettings:
    """History as Delta tables. The user's names have hyphens where these have underscores."""

    path: str | None = None  # a folder, or what deltalake takes for an object store; None: off
    queues: tuple[str, ...] = ("*",)
    seconds: int = 60
    rows: int = 1_000_000


_CLUSTER: Final = ClusterSettings()
_ARCHIVE: Final = ArchiveSettings()
_AUDIT: Final = f"DATA/{AUDIT}"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that `penstock serve` goes by."""

    data: str
    engine: str | tuple[str, ...] = field(repr=False)  # "log", or URLs, which may hold a password
    listeners: tuple[Listener, ...]
    http: HttpSettings | None  # None: off
    durability: str
    drain_seconds: float
    log_level: str
    log_format: str
    audit: str  # see `audit_path`
    limits: Limits
    log: LogSettings
    policies: Policies = field(compare=False)  # has no equality of its own
    users: tuple[UserSettings, ...] = ()
    allow_unsafe_sync: bool = False
    strict: bool = False
    socket_mode: int = 0o600
    cluster: ClusterSettings = _CLUSTER  # means something only with an engine of URLs
    archive: ArchiveSettings = _ARCHIVE

    @property
    def audit_path(self) -> str | None:
        """None: off."""
        if self.audit == OFF:
            return None
        return os.path.join(self.data, AUDIT) if self.audit == _AUDIT else self.audit


# --- The table -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """One row: a setting of the file, the environment and the command line."""

    name: str
    kind: Kind
    default: str | int | float | None  # as it would stand in the file; None: it is not there
    help: str
    section: str = ""  # of the file; empty: above all sections
    field: str = ""  # where `Settings` has it; empty: in one of the listeners
    reloads: bool = False  # takes effect when the settings are read again

    @property
    def label(self) -> str:
        """How the file has it."""
        return f"[{self.section}] {self.name}" if self.section else self.name

    @property
    def default_text(self) -> str:
        """The default as people read it."""
        if self.default is None:
            return "none"
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)

    @property
    def dest(self) -> str:
        return f"{self.section}-{self.name}".lstrip("-").replace("-", "_")

    @property
    def flag(self) -> str:
        return "--" + self.dest.replace("_", "-")

    @property
    def variable(self) -> str:
        return "PENSTOCK_" + self.dest.upper()


_DEFAULTS: Final = {
    "limits": Limits(),
    "http": HttpSettings(),
    "log": LogSettings(),
    "cluster": _CLUSTER,
    "archive": _ARCHIVE,
}
_INT32_MAX = 2**31 - 1  # the ends of payloads in a batch are 32-bit numbers
_MONTH_SECONDS = 30 * 86_400
_PEM: Final = Text("a file in PEM form", "FILE")


def _of(section: str, name: str, kind: Kind, text: str, keeper: str = "") -> Setting:
    """A row of a section whose defaults are those of the class behind it, or of that of another section."""
    attribute, keeper = name.replace("-", "_"), keeper or section
    default = getattr(_DEFAULTS[keeper], attribute)
    if not isinstance(default, int):
        default = str(default) if default else None
    return Setting(name, kind, default, text, section, f"{keeper}.{attribute}")


TABLE: Final[tuple[Setting, ...]] = (
    Setting(
        "data",
        Text("a folder", "DIR"),
        "./penstock-data",
        "the folder of the embedded log; with NATS, of the copy of it that is at hand",
        field="data",
    ),
    Setting(
        "engine",
        Engine(),
        "log",
        "where messages live: log, the embedded log, or the servers of a NATS cluster with JetStream",
        field="engine",
    ),
    Setting(
        "allow-unsafe-sync",
        Switch(),
        False,
        "with NATS: start also where nodes do not sync every write, so that a power cut may lose what was"
        " confirmed",
        field="allow_unsafe_sync",
    ),
    Setting(
        "strict",
        Switch(),
        False,
        "with NATS: do not start where strangers could read and change the log: warnings of that are errors",
        field="strict",
    ),
    Setting("sspq", Listen(), "127.0.0.1:8888", "where SSPQ clients connect"),
    Setting("sspq-queue", Text("the name of a queue", "NAME"), "default", "the queue that SSPQ clients use"),
    Setting("phpmq", Listen(), "127.0.0.1:9100", "where PHPMQ clients connect"),
    Setting("rq", Listen(), "127.0.0.1:13700", "where RQ nodes connect"),
    Setting(
        "http",
        Listen(),
        str(_HTTP_ADDRESS),
        "where the HTTP API is, with metrics and health",
        field="http.address",
    ),
    Setting(
        "socket-mode",
        Mode(),
        "0600",
        "who may connect to the Unix sockets: the modes of their paths; who may write to one may connect",
        field="socket_mode",
    ),
    Setting(
        "durability",
        Word(("commit", "interval", "none")),
        "commit",
        "what a sender's receipt waits for: the sync to disk (commit), the write, which is synced soon after"
        " (interval), or nothing (none); a queue can have its own",
        field="durability",
        reloads=True,
    ),
    Setting(
        "drain-seconds",
        Seconds(0, 86_400),
        10,
        "how long a stop waits for work in flight",
        field="drain_seconds",
    ),
    Setting(
        "log-level",
        Word(("debug", "info", "warning", "error")),
        "info",
        "how much is told on standard error",
        field="log_level",
    ),
    Setting(
        "audit",
        Text("a file, or off", "FILE"),
        _AUDIT,
        "where it is written down who did what, and who was refused; off: nowhere",
        field="audit",
    ),
    Setting("log-format", Word(("text", "json")), "text", "how it is told there", field="log_format"),
    _of("limits", "connections-max", Whole(1, 1_000_000), "connections at a time, of all listeners together"),
    _of("limits", "payload-bytes-max", Whole(1, _INT32_MAX), "bytes of one message"),
    _of("limits", "queue-name-bytes-max", Whole(16, 255), "bytes of a queue's name"),
    _of("limits", "queues-max", Whole(1, 10_000_000), "queues in all"),
    _of(
        "limits",
        "queues-new-per-second",
        Whole(1, 1_000_000),
        "queues that one connection may make in a second; what would make more waits",
    ),
    _of(
        "limits",
        "connection-buffer-bytes",
        Whole(4096, _INT32_MAX),
        "bytes that may wait to be sent to one connection",
    ),
    _of(
        "limits",
        "in-flight-bytes",
        Whole(4096, 2**40),
        "bytes accepted and not yet in the log, of all connections together",
    ),
    _of("limits", "packets-per-message-max", Whole(3, 99), "packets of one PHPMQ message"),
    _of("limits", "consumed-queues-max", Whole(1, 65_535), "queues that one connection may consume from"),
    _of(
        "limits",
        "memory-bytes-max",
        Whole(1 << 20, 2**40),
        "bytes that all connections, and bodies over HTTP, together can make the broker hold",
    ),
    _of(
        "limits",
        "frame-seconds",
        Whole(1, 86_400),
        "how long an unfinished message may stay unfinished while nothing more of it comes",
    ),
    _of("limits", "handshake-seconds", Whole(1, 3600), "how long a TLS handshake may take"),
    _of(
        "http",
        "body-bytes-max",
        Whole(1024, 1 << 30),
        "bytes of the body of one request; a message larger than this goes by another door",
    ),
    _of(
        "http",
        "bodies-bytes-max",
        Whole(1024, 2**40),
        "bytes of the bodies of all requests together, and of large answers until they are taken; "
        "body-bytes-max at least; beyond, try again",
    ),
    _of("http", "connections-max", Whole(1, 1_000_000), "connections at a time"),
    _of(
        "http",
        "metrics-queues-max",
        Whole(0, 1_000_000),
        "queues with metrics of their own; those of the others are added up",
    ),
    _of(
        "http",
        "health-seconds",
        Whole(1, 86_400),
        "how long a queue may stand still before that is told; all times of docs/health.md go by it",
    ),
    _of(
        "http",
        "history-days",
        Whole(0, 14),
        "how many days of charts and marks are kept in the data folder; 0: an hour, in memory",
    ),
    _of(
        "http",
        "stage-seconds",
        Whole(1, _MONTH_SECONDS),
        "how long a staged part of a transaction waits for its commit",
        keeper="log",
    ),
    _of(
        "http",
        "stages-bytes-max",
        Whole(1024, 1 << 50),
        "bytes of all staged parts together",
        keeper="log",
    ),
    _of(
        "http",
        "lease-seconds-max",
        Whole(1, _MONTH_SECONDS),
        "the longest lease that a reader, or a worker that takes messages, can ask for",
    ),
    _of("http", "readers-max", Whole(0, 1_000_000), "readers that hold retention at a time"),
    _of(
        "log",
        "segment-bytes",
        Whole(1 << 16, 1 << 32),
        "size of a file of the log, at most a sixteenth of the disk and an eighth of its free room; "
        "messages leave room for two",
    ),
    _of(
        "log",
        "cache-bytes",
        Whole(0, 2**40),
        "stored messages kept in memory, so that consumers need not wait for the disk",
    ),
    _of(
        "log",
        "block-bytes",
        Whole(4096, 1 << 30),
        "what arrives at once for a queue is stored in blocks of about this size",
    ),
    Setting(
        "interval-seconds",
        Seconds(0.001, 60),
        LogSettings().interval_us / 1_000_000,
        "time between two syncs where durability is interval",
        section="log",
        field="log.interval_us",
    ),
    _of(
        "log",
        "snapshot-blocks",
        Whole(1, 1_000_000_000),
        "a snapshot after so many blocks; more: a slower start, less writing",
    ),
    _of(
        "log",
        "reader-bytes-max",
        Whole(0, 1 << 50),
        "bytes of the log that retention keeps for one reader of a queue; 0: no cap",
    ),
    _of(
        "log",
        "disk-bytes-reserve",
        Whole(0, 1 << 50),
        "bytes that should be free on the disk, at most a quarter of it; with less, /readyz warns; 0: never",
    ),
    _of(
        "archive",
        "path",
        Store(),
        "where queues become Delta tables, as s3://bucket/penstock; without it they do not",
    ),
    Setting(
        "queues",
        Patterns(),
        "*",
        "which queues do: patterns of names, `*` is any text, `?` any character",
        section="archive",
        field="archive.queues",
    ),
    _of("archive", "seconds", Whole(1, 86_400), "how often a table gets what has come since"),
    _of("archive", "rows", Whole(1, 100_000_000), "a queue with so many new rows does not wait for that"),
    _of("cluster", "name", LOG_NAME, "the log, shared by all front-ends that have the same name here"),
    _of(
        "cluster",
        "id",
        LABEL,
        "this front-end's own name; without one, that of the host and the process's number",
    ),
    _of("cluster", "listen", Reach(may_be_any=True), "where other front-ends connect while this one leads"),
    _of(
        "cluster", "advertise", Reach(may_be_any=False), "where they reach that; without it, where it listens"
    ),
    _of("cluster", "replicas", Whole(1, 5), "nodes that have a copy of the log each"),
    _of(
        "cluster",
        "shards",
        Whole(1, SHARDS_MAX),
        f"how many logs a new cluster has, which share its queues ({SHARDS_DEFAULT}); it keeps them",
    ),
    _of(
        "cluster",
        "credentials",
        Text("a file", "FILE"),
        "a NATS .creds file, or one with the seed of an nkey or a line USER:PASSWORD",
    ),
    _of(
        "cluster",
        "tls-ca",
        _PEM,
        "who signs the certificates of the nodes; without it, whom the system trusts",
    ),
    _of("cluster", "tls-certificate", _PEM, "what this front-end shows to the nodes, where they ask for it"),
    _of("cluster", "tls-key", _PEM, "the certificate's private key, without a passphrase"),
    _of(
        "cluster",
        "relay-certificate",
        _PEM,
        "what this front-end shows to the others; without it, one that follows from the cluster's own key",
    ),
    _of("cluster", "relay-key", _PEM, "the private key of that, without a passphrase"),
    _of("cluster", "relay-ca", _PEM, "who signs the certificates of all front-ends"),
    _of(
        "cluster",
        "monitor",
        Urls(),
        "the monitoring of every node, where the start looks whether it syncs every write",
    ),
)

SECTIONS: Final[Mapping[str, tuple[Setting, ...]]] = {
    section: tuple(setting for setting in TABLE if setting.section == section)
    for section in dict.fromkeys(setting.section for setting in TABLE)
}
"""The table by sections of the file; the settings above all sections are those of ""."""


@dataclass(frozen=True, slots=True)
class ListenerKey(FileKey):
    """What a `[[listener]]` can say."""

    protocols: tuple[str, ...] = PROTOCOLS  # of the listeners that may say it


_CERTIFICATE = ("tls-certificate", _PEM, "turns TLS on: its certificate, and what leads to the root")
_KEY = ("tls-key", _PEM, "the certificate's private key, without a passphrase")

LISTENER_KEYS: Final[tuple[ListenerKey, ...]] = (
    ListenerKey("protocol", Word(PROTOCOLS), "what its clients speak", required=True),
    ListenerKey("address", Listen(may_be_off=False), "where they connect", required=True),
    ListenerKey(
        "queue", Text("the name of a queue", "NAME"), "the queue of all its clients", protocols=("sspq",)
    ),
    ListenerKey(*_CERTIFICATE),
    ListenerKey(*_KEY),
    ListenerKey("tls-client-ca", _PEM, "clients must show a certificate that was signed by one of these"),
    ListenerKey(
        "queues",
        Texts('a list of patterns, as in ["orders.*"]'),
        "the queues that its clients may use, and their dead letters; `*` is any text, `?` any character",
        protocols=("phpmq", "rq"),
    ),
    ListenerKey(
        "mode",
        Word(("both", "send-only", "receive-only")),
        "whether its clients may send and receive, only send, or only receive",
    ),
    ListenerKey("user", NAME, "whose rights clients have that show no certificate of a user"),
    ListenerKey(
        "ttl-packet",
        Word(("auto", "always", "never")),
        "which dispatches carry a TTL: those of messages that have one, all, or none",
        protocols=("phpmq",),
    ),
    ListenerKey(
        "consume",
        Word(("add", "replace")),
        "what a consume request for a second queue does: it is added, or replaces the first",
        protocols=("phpmq",),
    ),
)

HTTP_KEYS: Final[tuple[FileKey, ...]] = (
    FileKey("address", Listen(), "the same as http above all sections; a file has one of the two"),
    FileKey(*_CERTIFICATE),
    FileKey(*_KEY),
)
"""What `[http]` can say besides its section of the table; and there is `[[http.tokens]]`."""

TOKEN_KEYS: Final[tuple[FileKey, ...]] = (
    FileKey("name", NAME, "who has it; shown in log lines, and no two have the same", required=True),
    FileKey("role", Word(ROLES), "what it allows", required=True),
    FileKey("token", Secret(), "what the caller shows; no two have the same", required=True),
)
"""What a `[[http.tokens]]` can say."""

GRANT_KEYS: Final[tuple[FileKey, ...]] = (
    FileKey(
        "queues",
        TextOrTexts('a pattern of names, or a list of them, as in "orders.*"'),
        "the queues, and their dead letters; `*` is any text, `?` any character",
        required=True,
    ),
    FileKey("may", Words(tuple(WORDS)), "what is allowed with them", required=True),
)
"""What one of the `rights` of a `[[user]]` can say."""

USER_KEYS: Final[tuple[FileKey, ...]] = (
    FileKey("name", NAME, "shown in log lines and in the audit, and no two have the same", required=True),
    FileKey(
        "certificate",
        TextOrTexts("a name in a certificate, or a list of names"),
        "clients whose certificate has it, as the subject's common name or an alternative one, are this user",
    ),
    FileKey(
        "certificate-ca",
        _PEM,
        "only what this `tls-client-ca` of a listener has signed counts; needed where there are several",
    ),
    FileKey("token-hash", TokenHashes(), "of its token, as `penstock token new` prints it, or of several"),
    FileKey("expires", Moment(), "from then on it may do nothing"),
    FileKey("rights", Records(), "what it may do, each with `queues` and `may`"),
    FileKey("admin", Switch(), "it may do everything, with every queue"),
)
"""What a `[[user]]` can say."""
