"""Options: what a Spark user may say to the source and the sink, as tables, and how it is judged.

Names and meanings are those of Spark's Kafka connector wherever the thing is the same. Spark hands options
over with their names in lower case, whatever the user wrote, so names are compared that way; messages say
them as the documentation does.

Rules that always hold:
  * Nothing that was said is ignored: a name that no table has is refused with the nearest that is there, and
    so is an option that has no meaning for a batch, or for a stream, with the reason.
  * Everything is judged here, before anybody is asked anything over the network.

How it fails: `WrongOption`, one sentence that names the option and says what would be right.

The file is long because its tables are: every option of the source and the sink stands beside the others.
"""

import difflib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from penstock.client.errors import NotSupported
from penstock.client.url import parse_url
from penstock.common.kinds import Fitting, Seconds, Switch, Whole, Word, WrongValue
from penstock.common.secret_file import WrongToken, sendable, token_around
from penstock.errors import PenstockError
from penstock.log.tables import VIEWS
from penstock.model.life import Reason
from penstock.model.policy import QueueNameError, check_queue_name, door_of

URL_DEFAULT: Final = "http://127.0.0.1:9180"
RETRY_SECONDS_DEFAULT: Final = 30.0
PARTITION_BYTES_DEFAULT: Final = 64 << 20
TRIGGER_DELAY_DEFAULT: Final = 15 * 60.0

EARLIEST: Final = -2
LATEST: Final = -1
"""As numbers, these stand for the first offset that is kept and for the end, as in Kafka's connector."""

OFFSET_MAX: Final = (1 << 56) - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
TIME_US_MAX: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
"""What is later than a date can be is the last moment there is."""

AUTO: Final = "auto"
HTTP: Final = "http"
FILE: Final = "file:"
"""What `engine` says, beside servers of NATS."""

log = logging.getLogger("penstock.spark")

BATCH: Final = "batch"
STREAM: Final = "stream"

BAD_RECORD: Final = Reason.BAD_RECORD.label
"""Why something is dead that was sent as a dead letter."""

COPIES: Final = "pipeline"
"""The protocol of what was sent as a dead letter: copies of bad records."""

Bound = int | Mapping[str, int]
"""Where to begin or end: EARLIEST or LATEST for every queue, or a number for each."""


class WrongOption(PenstockError):
    """An option that cannot be meant. The text names it and says what would be right."""


# --- kinds -----------------------------------------------------------------------------------------


def _url(text: str) -> str:
    try:
        parse_url(text, "http")
    except NotSupported as error:
        raise WrongOption(str(error)) from None
    return text


def _text(text: str) -> str:
    if not text.strip():
        raise WrongOption("it is empty; leave the option out, or say something")
    return text.strip()


def _token(text: str) -> str:
    try:
        return sendable(_text(text), "it")
    except WrongToken as error:
        raise WrongOption(str(error)) from None


def _queue(text: str) -> str:
    queue, dead = door_of(text)
    if dead:
        raise WrongOption(
            f"{text!r} is the door to the dead letters of {queue!r}, not a queue; "
            f"read view 'state' of {queue!r}, where state is 'dead'"
        )
    try:
        check_queue_name(text)
    except QueueNameError as error:
        raise WrongOption(str(error)) from None
    return text


def _queues(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    chosen = tuple(dict.fromkeys(_queue(name) for name in names if name))
    if not chosen:
        raise WrongOption("it names no queue; name one, or several with commas between them")
    return chosen


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise WrongOption(f"{text!r} is no regular expression: {error}") from None
    _text(text)
    return text  # as it is: a name may end with a space


def _engine(text: str) -> str:
    word = text.strip().lower()
    if word in (AUTO, HTTP):
        return word
    if word == "log":
        raise WrongOption("'log' is the broker's own; leave the option out to read from the broker")
    if word.startswith(FILE):
        folder = text.strip()[len(FILE) :]
        if not os.path.isabs(folder):
            raise WrongOption(
                f"{text!r} names no folder from the root on: tasks run in folders of their own; "
                "use file:/DIR, the broker's setting data as the executors see it"
            )
        return FILE + os.path.normpath(folder)
    # Whoever has no cluster loads nothing of it.
    from penstock.log.jetstream.servers import ServerListError, parse_servers

    try:
        parse_servers(text)
    except ServerListError as error:
        raise WrongOption(str(error)) from None
    return text


_COUNT: Final = Whole(1, OFFSET_MAX).parse
_SIZE: Final = re.compile(r"([0-9]{1,18}) ?(?:([kmgt])(?:i?b)?|b)?", re.IGNORECASE)
_DELAY: Final = re.compile(r"([0-9]{1,12}) ?(us|ms|s|m|min|h|d)?", re.IGNORECASE)
_DELAY_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_SECONDS: Final = Seconds(0, 999_999).parse
_TRANSACTION_ID: Final = Fitting("1 to 200 printable ASCII characters", "[ -~]{1,200}").parse


def _bytes(text: str) -> int:
    """As Spark's own settings have sizes: every k is 1024."""
    found = _SIZE.fullmatch(text.strip())
    size = int(found[1]) << 10 * (" kmgt".index((found[2] or " ").lower())) if found else 0
    if not 0 < size <= OFFSET_MAX:
        raise WrongOption(f"{text!r} is no number of bytes; use one from 1 on, as in 1048576 or 64m")
    return size


def _delay(text: str) -> float:
    """As Spark's own settings have times: without a unit, milliseconds."""
    found = _DELAY.fullmatch(text.strip())
    if found is None:
        raise WrongOption(f"{text!r} is no time; use a number with its unit, as in 90s or 15m")
    return int(found[1]) * _DELAY_SECONDS[(found[2] or "ms").lower()]


def _flag(text: str) -> object:
    return Switch().parse(text.lower())


def _view(text: str) -> object:
    return Word(tuple(VIEWS)).parse(text.lower())


_BOUNDS: Final = {"earliest": EARLIEST, "latest": LATEST}


def _bound(text: str) -> Bound:
    word = _BOUNDS.get(text.strip().lower())
    if word is not None:
        return word
    given = _by_queue(text)
    if given is None:
        raise WrongOption(
            f"{text!r} is none of earliest, latest and JSON with a number for each queue, "
            '{"orders": 42} (-2: earliest, -1: latest)'
        )
    for queue, offset in given.items():
        if isinstance(offset, bool) or not isinstance(offset, int) or not EARLIEST <= offset <= OFFSET_MAX:
            raise WrongOption(
                f"queue {queue!r}: {json.dumps(offset)} is no offset; "
                "use a whole number (-2: earliest, -1: latest)"
            )
    return {_queue(queue): offset for queue, offset in given.items()}


def _by_queue(text: str) -> dict[str, Any] | None:
    """A JSON object; None where it is none, or has nothing in it."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return given if isinstance(given, dict) and given else None


def _times(text: str) -> Mapping[str, int]:
    given = _by_queue(text)
    if given is None:
        raise WrongOption(
            f'{text!r} is no JSON with a time for each queue, {{"orders": 1700000000000}} '
            "(milliseconds since 1970, or ISO 8601)"
        )
    times: dict[str, int] = {}
    for queue, time in given.items():
        try:
            times[_queue(queue)] = _time_us(time if isinstance(time, str) else json.dumps(time))
        except WrongOption as error:
            raise WrongOption(f"queue {queue!r}: {error}") from None
    return times


def _time_us(text: str) -> int:
    text = text.strip()
    if re.fullmatch("[0-9]{1,15}", text) is not None:
        return min(int(text) * 1000, TIME_US_MAX)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise WrongOption(
            f"{text!r} is no time; use ISO 8601, 2030-01-31T12:00:00Z (UTC where it names no zone), "
            "or milliseconds since 1970"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return min(max((moment - _EPOCH) // timedelta(microseconds=1), 0), TIME_US_MAX)


# --- tables ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `refused` says for which kind of query it has no meaning, and why."""

    name: str
    parse: Callable[[str], object]
    default: object = None
    refused: Mapping[str, str] | None = None


_NO_END: Final = {STREAM: "a stream has no end; read a batch, or use the trigger availableNow"}
_NO_TRIGGERS: Final = {BATCH: "a batch has no triggers; use endingOffsets to read less"}

READING: Final = (
    Option("url", _url, URL_DEFAULT),
    Option("token", _token),
    Option("subscribe", _queues),
    Option("subscribePattern", _pattern),
    Option("view", _view, "messages"),
    Option("includeHeaders", _flag, False),
    Option("startingOffsets", _bound),
    Option("endingOffsets", _bound, refused=_NO_END),
    Option("startingTimestamp", _time_us),
    Option("endingTimestamp", _time_us, refused=_NO_END),
    Option("startingOffsetsByTimestamp", _times),
    Option("endingOffsetsByTimestamp", _times, refused=_NO_END),
    Option("maxOffsetsPerTrigger", _COUNT, refused=_NO_TRIGGERS),
    Option("maxBytesPerTrigger", _bytes, refused=_NO_TRIGGERS),
    Option("minOffsetsPerTrigger", _COUNT, refused=_NO_TRIGGERS),
    Option("maxTriggerDelay", _delay, refused=_NO_TRIGGERS),
    Option("minPartitions", _COUNT),
    Option("maxBytesPerPartition", _bytes),
    Option("pushFilters", _flag, False, {STREAM: "Spark pushes filters into batches only; leave it out"}),
    Option("failOnDataLoss", _flag, True),
    Option(
        "history",
        _flag,
        False,
    ),
    Option(
        "copies",
        _flag,
        True,
        {BATCH: f"a batch has conditions; leave it out, and say where protocol <> '{COPIES}'"},
    ),
    Option(
        "reader",
        _text,
        refused={BATCH: "only a stream lives on to hold retention; PUT /v1/readers/NAME does it by hand"},
    ),
    Option("retrySeconds", _SECONDS, RETRY_SECONDS_DEFAULT),
    Option("engine", _engine, AUTO),
    Option("credentials", _text),
    Option("tlsCa", _text),
    Option("tlsCertificate", _text),
    Option("tlsKey", _text),
)
WRITING: Final = (
    Option("url", _url, URL_DEFAULT),
    Option("token", _token),
    Option("queue", _queue),
    Option(
        "transactionId",
        _TRANSACTION_ID,
        refused={STREAM: "a stream's batches have identities of their own; leave it out"},
    ),
    Option(
        "redrive",
        _flag,
        False,
        {STREAM: "dead letters are read as a batch; write with foreachBatch, a batch at a time"},
    ),
    Option("dead", Word((BAD_RECORD,)).parse),
    Option("retrySeconds", _SECONDS, RETRY_SECONDS_DEFAULT),
)

_FOR_NATS: Final = ("credentials", "tlsCa", "tlsCertificate", "tlsKey")
"""Options that say how to connect to the servers of `engine`."""

SPARK_S_OWN: Final = frozenset({"checkpointlocation", "queryname"})
"""Options of a stream's writer that Spark hands on to the sink, though they are meant for itself."""

_INSTEAD: Final = dict.fromkeys(
    ("path", "queue"), "name queues with the option subscribe (reading) or queue (writing)"
)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What to read. Each field is the option of the same name, in Python's spelling."""

    url: str
    token: str | None = field(repr=False)
    subscribe: tuple[str, ...] | None
    subscribe_pattern: str | None
    view: str
    include_headers: bool
    starting_offsets: Bound
    ending_offsets: Bound
    starting_timestamp: int | None  # times are µs since the epoch
    ending_timestamp: int | None
    starting_offsets_by_timestamp: Mapping[str, int] | None
    ending_offsets_by_timestamp: Mapping[str, int] | None
    max_offsets_per_trigger: int | None
    max_bytes_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay: float  # seconds
    min_partitions: int | None
    max_bytes_per_partition: int
    push_filters: bool
    fail_on_data_loss: bool
    history: bool
    copies: bool  # of bad records, which are in the log as dead letters
    reader: str | None
    retry_seconds: float
    engine: str = field(repr=False)  # AUTO, HTTP, FILE with a folder, or NATS servers to read messages from
    credentials: str | None  # files on the executors
    tls_ca: str | None
    tls_certificate: str | None
    tls_key: str | None

    @property
    def is_direct(self) -> bool:
        """Whether messages come from NATS, and not through the broker."""
        return _names_nats(self.engine) and self.view == "messages"

    @property
    def may_read_files(self) -> bool:
        """Whether tasks may read the files of the log. How messages stand is known to the broker alone."""
        return (self.engine == AUTO or self.engine.startswith(FILE)) and self.view != "state"

    @property
    def folder(self) -> str | None:
        """Where the files are, as the tasks see them; None: where the broker says."""
        return self.engine.removeprefix(FILE) if self.engine.startswith(FILE) else None

    @property
    def starting_times(self) -> Bound | None:
        """From which time on a new query reads, all queues or each; None: it goes by offsets."""
        if self.starting_timestamp is not None:
            return self.starting_timestamp
        return self.starting_offsets_by_timestamp

    @property
    def ending_times(self) -> Bound | None:
        """Before which time a batch ends, likewise."""
        return (
            self.ending_timestamp if self.ending_timestamp is not None else self.ending_offsets_by_timestamp
        )

    @property
    def begins_at_ends(self) -> bool:
        """Whether a new query begins at the end of a queue, or of several."""
        return self.starting_times is None and _says(self.starting_offsets, LATEST)

    def wants(self, queue: str) -> bool:
        """Whether a queue is one of those to read."""
        if self.subscribe is not None:
            return queue in self.subscribe
        assert self.subscribe_pattern is not None
        return re.fullmatch(self.subscribe_pattern, queue) is not None


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Where to write to."""

    url: str
    token: str | None = field(repr=False)
    queue: str | None
    transaction_id: str | None
    redrive: bool
    dead: str | None  # what is written are dead letters from the beginning, for this reason
    retry_seconds: float


def of_queue(queue: str) -> dict[str, str]:
    """The option that reads one queue, whatever its name has in it."""
    return {"subscribePattern": re.escape(queue)} if "," in queue else {"subscribe": queue}


def view_of(options: Mapping[str, str]) -> tuple[str, bool]:
    """The view, and whether it has headers: what decides the schema, which Spark asks for before it says what
    kind of query it is."""
    values = _values(options, READING, None)
    _check_headers(values)
    return values["view"], values["include_headers"]


def read_options(options: Mapping[str, str], kind: str) -> ReadOptions:
    """The options of a batch or a stream that reads; WrongOption where they cannot be meant."""
    values = _values(options, READING, kind)
    if (values["subscribe"] is None) == (values["subscribe_pattern"] is None):
        raise WrongOption("say what to read, with one of the options subscribe and subscribePattern")
    if values["view"] == "state" and kind == STREAM:
        raise WrongOption(
            "option 'view': the state of messages is a picture of one moment, so view 'state' is read as a "
            "batch; a stream can read view 'events', which says how it changes"
        )
    _check_headers(values)
    _check_bounds(values)
    _check_rates(values)
    _check_history(values)
    if not values["copies"] and values["view"] != "messages":
        raise WrongOption("option 'copies' is for view 'messages'; leave it out")
    values["ending_offsets"] = LATEST if values["ending_offsets"] is None else values["ending_offsets"]
    if values["starting_offsets"] is None:
        values["starting_offsets"] = EARLIEST if kind == BATCH else LATEST
    elif kind == BATCH and _says(values["starting_offsets"], LATEST):
        raise WrongOption(
            "option 'startingOffsets': a batch that begins at the latest offset is empty; use earliest"
        )
    if kind == BATCH and _says(values["ending_offsets"], EARLIEST):
        raise WrongOption(
            "option 'endingOffsets': a batch that ends at the earliest offset is empty; use latest"
        )
    for option in _FOR_NATS:
        if values[_spelled(option)] is not None and not _names_nats(values["engine"]):
            raise WrongOption(
                f"option {option!r} is for NATS; name its servers with the option engine, as in nats://HOST:4222"
            )
    if (values["tls_certificate"] is None) != (values["tls_key"] is None):
        raise WrongOption("tlsCertificate and tlsKey belong together; name both files, or none")
    return ReadOptions(**values)


def _check_headers(values: dict[str, Any]) -> None:
    if values["include_headers"] and values["view"] != "messages":
        raise WrongOption(
            f"option 'includeHeaders': view {values['view']!r} has no headers; view 'messages' has them, and "
            "the two join by queue and offset"
        )


def _check_bounds(values: dict[str, Any]) -> None:
    """One beginning and one end at most, and these in order."""
    for prefix, what in (("starting", "begin"), ("ending", "end")):
        names = [f"{prefix}{it}" for it in ("Offsets", "Timestamp", "OffsetsByTimestamp")]
        said = [name for name in names if values[_spelled(name)] is not None]
        if len(said) > 1:
            raise WrongOption(f"{said[0]} and {said[1]} both say where to {what}; leave one out")
    for name in ("Timestamp", "OffsetsByTimestamp"):
        starts, ends = values[_spelled(f"starting{name}")], values[_spelled(f"ending{name}")]
        if starts is None or ends is None:
            continue
        pairs = (
            [("", starts, ends)]
            if isinstance(starts, int)
            else [(f"queue {queue!r}: ", starts[queue], ends[queue]) for queue in starts.keys() & ends.keys()]
        )
        for where, start, end in pairs:
            if start > end:
                raise WrongOption(
                    f"{where}starting{name} is later than ending{name}; nothing is between them"
                )


def _check_rates(values: dict[str, Any]) -> None:
    """How much is read at a time; what was not said gets its default."""
    for name, instead in (
        ("maxBytesPerTrigger", "maxOffsetsPerTrigger"),
        ("maxBytesPerPartition", "minPartitions"),
    ):
        if values["view"] == "events" and values[_spelled(name)] is not None:
            raise WrongOption(f"option {name!r} counts payloads, and events have none; use {instead}")
    least, most = values["min_offsets_per_trigger"], values["max_offsets_per_trigger"]
    if least is not None and most is not None and least > most:
        raise WrongOption(
            f"minOffsetsPerTrigger is {least}, which is more than maxOffsetsPerTrigger, {most}; "
            "no batch can have so many"
        )
    if least is None and values["max_trigger_delay"] is not None:
        raise WrongOption(
            "maxTriggerDelay is how long a stream waits for minOffsetsPerTrigger; say both, or neither"
        )
    for name, default in (
        ("max_trigger_delay", TRIGGER_DELAY_DEFAULT),
        ("max_bytes_per_partition", PARTITION_BYTES_DEFAULT),
    ):
        values[name] = default if values[name] is None else values[name]


def _check_history(values: dict[str, Any]) -> None:
    """What begins in the table goes by offsets, and is read from the broker."""
    if not values["history"]:
        return
    if values["view"] != "messages":
        raise WrongOption("option 'history' is for view 'messages'; leave it out")
    if values["starting_offsets"] is None or _says(values["starting_offsets"], LATEST):
        raise WrongOption(
            "option 'history' begins in the table; say where: startingOffsets earliest, or {\"orders\": 42}"
        )
    if values["ending_timestamp"] is not None or values["ending_offsets_by_timestamp"] is not None:
        raise WrongOption("option 'history' ends at offsets; use endingOffsets, or where timestamp < …")
    if values["max_bytes_per_trigger"] is not None:
        raise WrongOption("option 'history': the table counts rows; use maxOffsetsPerTrigger")
    if _names_nats(values["engine"]):
        raise WrongOption("option 'history' goes through the broker; leave the option engine out")


def _names_nats(engine: str) -> bool:
    return engine not in (AUTO, HTTP) and not engine.startswith(FILE)


def _says(bound: Bound, word: int) -> bool:
    return bound == word if isinstance(bound, int) else word in bound.values()


def write_options(options: Mapping[str, str], kind: str) -> WriteOptions:
    """The options of a batch or a stream that writes, likewise."""
    known = {name: value for name, value in options.items() if name.lower() not in SPARK_S_OWN}
    values = _values(known, WRITING, kind)
    if values["redrive"] and values["dead"] is not None:
        raise WrongOption("option 'dead' is not for redriving; leave one of the two out")
    return WriteOptions(**values)


def _values(options: Mapping[str, str], table: tuple[Option, ...], kind: str | None) -> dict[str, Any]:
    """Every option of a table by its name in Python's spelling: what was said, or its default."""
    by_name = {option.name.lower(): option for option in table}
    values = {_spelled(option.name): option.default for option in table}
    for name, text in options.items():
        option = by_name.get(name.lower())
        if option is None:
            raise _unknown(name, table)
        why_not = (option.refused or {}).get(kind or "")
        if why_not is not None:
            raise WrongOption(f"option {option.name!r} is not for a {kind}: {why_not}")
        try:
            values[_spelled(option.name)] = option.parse(str(text))
        except WrongOption as error:
            raise WrongOption(f"option {option.name!r}: {error}") from None
        except WrongValue as error:
            raise WrongOption(f"option {option.name!r} is {text!r:.250}: {error}") from None
    if not values["token"]:
        # In the environment of the driver. Options can be seen by others.
        values["token"], warning = token_around(os.environ)
        if warning is not None:
            log.warning("%s", warning)
    return values


def _unknown(name: str, table: tuple[Option, ...]) -> WrongOption:
    instead = _INSTEAD.get(name.lower())
    if instead is None:
        names = {option.name.lower(): option.name for option in table}
        near = difflib.get_close_matches(name.lower(), names, n=1)
        instead = f"did you mean {names[near[0]]!r}?" if near else f"there are {', '.join(names.values())}"
    return WrongOption(f"there is no option {name!r}; {instead}")


def _spelled(name: str) -> str:
    """startingOffsets -> starting_offsets"""
    return re.sub("(?=[A-Z])", "_", name).lower()
