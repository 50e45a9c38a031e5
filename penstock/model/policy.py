"""Policies: what a queue does when things go wrong or grow old. Settings in, verdicts out.

A `QueuePolicy` holds the settings of one queue; `Policies` finds it by the queue's name. The
functions at the end are the only place where a policy meets a message: an engine asks what
becomes of it, gets an event and a reason out of `life.py`, and carries that out. So every
engine decides alike, and a decision can be tested without one.

Rules that always hold:
  * A policy that exists is valid: wrong values raise `PolicyError`, which names the setting as
    the user wrote it, says what would be right, and fits on one line.
  * One section speaks for a queue: the most specific pattern wins alone, laid over the defaults.
    Sections are not mixed with each other.
  * A verdict is an arrow that the life table has from the state that its function names.
  * With dead letters switched off nothing becomes dead: what would have died is thrown away, for
    the same reason.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from operator import itemgetter
from reprlib import repr as short_repr
from typing import Any, Final, NamedTuple

from penstock.errors import PenstockError
from penstock.model.batch import DELAY_SECONDS_MAX, RETRIES_ENDLESS, RETRIES_NONE
from penstock.model.life import Event, Reason
from penstock.model.words import Where

DEAD_SUFFIX: Final = ".dead"
"""What is put behind a queue's name to speak of its dead letters."""


class PolicyError(PenstockError, ValueError):
    """A queue setting that cannot be used."""


class QueueNameError(PenstockError, ValueError):
    """A name that no queue can have."""


# --- What a setting may be -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Number:
    """A whole number from 0, as a number (file) or as digits (flag, environment)."""

    largest: int
    zero_means: str

    def read(self, value: object) -> object:
        # The bound on the length keeps int() away from absurd inputs; 19 digits hold any `largest`.
        if isinstance(value, str) and re.fullmatch("[0-9]{1,19}", value):
            return int(value)
        return value

    def holds(self, value: object) -> bool:
        # A bool is an int to Python, but `max-deliveries = true` is a mistake.
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= self.largest

    def wanted(self) -> str:
        return f"a whole number from 0 ({self.zero_means}) to {self.largest}"


@dataclass(frozen=True, slots=True)
class _Choice:
    """One word of a few."""

    words: tuple[str, ...]

    def read(self, value: object) -> object:
        return value

    def holds(self, value: object) -> bool:
        return isinstance(value, str) and value in self.words

    def wanted(self) -> str:
        return " or ".join(self.words)


@dataclass(frozen=True, slots=True)
class _Switch:
    """On or off, as a word (anywhere) or as true and false (file)."""

    def read(self, value: object) -> object:
        return {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value

    def holds(self, value: object) -> bool:
        return isinstance(value, bool)

    def wanted(self) -> str:
        return "on or off"


@dataclass(frozen=True, slots=True)
class _Seconds:
    """A list of seconds, as numbers (file) or as numbers with commas between them (anywhere)."""

    def read(self, value: object) -> object:
        if isinstance(value, str):
            try:
                value = [float(text) for text in value.split(",")] if value.strip() else []
            except ValueError:
                return value
        return tuple(value) if isinstance(value, list) else value

    def holds(self, value: object) -> bool:
        return (
            isinstance(value, tuple)
            and len(value) <= _DELAYS_MAX
            and all(type(it) in (int, float) and 0 <= it <= DELAY_SECONDS_MAX for it in value)
        )

    def wanted(self) -> str:
        return f"a list of at most {_DELAYS_MAX} numbers of seconds, each from 0 to {DELAY_SECONDS_MAX}"


_INT32_MAX = 2**31 - 1  # seconds: 68 years, so that microseconds since the epoch stay within 64 bits
_INT64_MAX = 2**63 - 1
_DELAYS_MAX = 100

_RULES: Final[dict[str, _Number | _Choice | _Switch | _Seconds]] = {
    "retention-seconds": _Number(_INT32_MAX, "keep nothing that is settled"),
    "retention-bytes": _Number(_INT64_MAX, "no cap"),
    "max-deliveries": _Number(_INT32_MAX, "no limit"),
    "max-bytes": _Number(_INT64_MAX, "no limit"),
    "on-expiry": _Choice(("dead", "drop")),
    "durability": _Choice(("commit", "interval", "none")),
    "dead-letters": _Switch(),
    "expire-seconds": _Number(_INT32_MAX, "never"),
    "retry-delays": _Seconds(),
    "deliver-after": _Choice(("accept", "sync")),
}
"""Every setting under the name that users type. The field's name is the same with underscores."""


def _field_of(setting: str) -> str:
    return setting.replace("-", "_")


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """The settings of one queue. The user's names have hyphens where these have underscores."""

    retention_seconds: int = 86_400  # how long a settled message stays readable in the log
    retention_bytes: int = 0  # the most that settled messages may keep occupied; 0: no cap
    max_deliveries: int = 20  # for messages that came without a retry counter; 0: no limit
    max_bytes: int = 0  # payload bytes of unsettled messages; 0: no limit
    on_expiry: str = "dead"  # "dead" or "drop"
    durability: str = "commit"  # "commit", "interval" or "none"
    dead_letters: bool = True
    expire_seconds: int = 0  # an empty queue that nobody has used for so long is deleted; 0: never
    retry_delays: tuple[float, ...] = ()  # seconds before the 2nd, 3rd, … delivery; the last for all others
    deliver_after: str = "accept"  # or "sync": nobody gets what a crash could still take

    def __post_init__(self) -> None:
        for setting, rule in _RULES.items():
            value = getattr(self, _field_of(setting))
            if not rule.holds(value):
                raise PolicyError(f"{setting} = {short_repr(value)}: use {rule.wanted()}")

    @property
    def waits_for_sync(self) -> bool:
        """Whether nobody gets a message before it is durable; what is never made so is not waited for."""
        return self.deliver_after == "sync" and self.durability != "none"

    @classmethod
    def from_settings(
        cls,
        settings: Mapping[str, object],
        where: str = "queue settings",
        base: "QueuePolicy | None" = None,
    ) -> "QueuePolicy":
        """The policy that `settings` (user's names) describe, laid over `base` or the defaults.

        `where` is the place to look at, for the error: `[queue."orders.*"]`, `PENSTOCK_…`, a flag.
        """
        changes: dict[str, Any] = {}  # Any: values of all kinds, judged when the policy is made
        for setting, value in settings.items():
            rule = _RULES.get(setting)
            if rule is None:
                raise PolicyError(f"{where}: there is no setting {short_repr(setting)}: {_suggest(setting)}")
            changes[_field_of(setting)] = rule.read(value)
        try:
            return replace(base if base is not None else cls(), **changes)
        except PolicyError as error:
            raise PolicyError(f"{where}: {error}") from None


def _suggest(setting: str) -> str:
    """What to write instead of a setting that does not exist."""
    near = get_close_matches(setting.lower().replace("_", "-"), _RULES, n=1)
    return f"did you mean {near[0]}?" if near else "use one of " + ", ".join(_RULES)


# --- Which policy a queue has --------------------------------------------------------------


class _Section(NamedTuple):
    """One pattern of the configuration, made ready for matching."""

    names: re.Pattern[str]
    policy: QueuePolicy


class Policies:
    """Every queue's policy, by patterns of names.

    `sections` is `[queue."PATTERN"]` → settings in the order of the file. In a pattern `*` stands
    for any characters, also none, `?` for exactly one; everything else stands for itself, and
    the whole name must match. Of several that match, the one with most literal characters
    counts; among equals one without any wildcard, then the first in the file.
    """

    CACHED_NAMES_MAX = 4096  # clients choose queue names, so the cache must not grow with them

    def __init__(
        self,
        sections: Mapping[str, object] | None = None,
        defaults: QueuePolicy | None = None,
    ) -> None:
        self.defaults = defaults if defaults is not None else QueuePolicy()
        ranked = [(_rank(p), self._section(p, settings)) for p, settings in (sections or {}).items()]
        ranked.sort(key=itemgetter(0))  # stable: equals stay in the order of the file
        self._sections = [section for _, section in ranked]
        self._cache: dict[str, QueuePolicy] = {}
        policies = (self.defaults, *(section.policy for section in self._sections))
        self.some_expire = any(policy.expire_seconds for policy in policies)

    def _section(self, pattern: str, settings: object) -> _Section:
        if not pattern or _UNNAMEABLE.search(pattern):
            raise PolicyError(f"[queue.{short_repr(pattern)}]: no queue can have such a name; remove it")
        where = f'[queue."{pattern}"]'
        queue, dead = door_of(pattern)
        if dead:
            raise PolicyError(f'{where}: dead letters follow the settings of their queue, [queue."{queue}"]')
        if not isinstance(settings, Mapping):
            raise PolicyError(f"{where}: is {short_repr(settings)}; use a table of settings")
        return _Section(_matcher(pattern), QueuePolicy.from_settings(settings, where, self.defaults))

    def for_queue(self, name: str) -> QueuePolicy:
        """The policy of the queue `name` (the queue itself, not its dead-letter door)."""
        policy = self._cache.get(name)
        if policy is None:
            policy = next((s.policy for s in self._sections if s.names.fullmatch(name)), self.defaults)
            if len(self._cache) >= self.CACHED_NAMES_MAX:
                self._cache.clear()
            self._cache[name] = policy
        return policy


def _rank(pattern: str) -> tuple[int, bool]:
    """Sorts the most specific pattern first."""
    wildcards = pattern.count("*") + pattern.count("?")
    return wildcards - len(pattern), wildcards > 0


def _matcher(pattern: str) -> re.Pattern[str]:
    """A regular expression for a pattern of names.

    Each literal piece between two stars is taken at the first place where it fits, for good (an
    atomic group). That finds a match whenever there is one, and no name that a client makes up
    can send the matcher back and forth.
    """
    first, *rest = [re.escape(piece).replace(r"\?", ".") for piece in re.split(r"\*+", pattern)]
    if not rest:
        return re.compile(first, re.DOTALL)
    *middle, last = rest
    return re.compile(first + "".join(f"(?>.*?{piece})" for piece in middle) + ".*" + last, re.DOTALL)


# --- Names of queues -----------------------------------------------------------------------

# Control characters would break logs and terminals; half of a surrogate pair is not text at all.
_UNNAMEABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def check_queue_name(name: str, bytes_max: int = 255) -> None:
    """Raise QueueNameError unless `name` can be a queue, that is: messages can be sent to it.

    Whoever names a queue for consuming, looking or purging asks `door_of` first and checks the
    queue that it leads to.
    """
    if not name:
        raise QueueNameError("a queue name cannot be empty")
    bad = _UNNAMEABLE.search(name)
    if bad is not None:
        raise QueueNameError(
            f"queue {short_repr(name)}: character {bad.start()} ({bad.group()!a}) is a control character"
            " or not text; use printable characters"
        )
    # A character has at most 4 bytes, so most names need not be encoded to be measured.
    if len(name) * 4 > bytes_max and (name_bytes := len(name.encode())) > bytes_max:
        raise QueueNameError(
            f"queue {short_repr(name)}: the name has {name_bytes} bytes; use at most {bytes_max}"
        )
    queue, dead = door_of(name)
    if dead:
        raise QueueNameError(
            f"queue {short_repr(name)} cannot be sent to: it is the door to the dead letters"
            f" of {short_repr(queue)}; send to that queue"
        )


def door_of(name: str) -> tuple[str, bool]:
    """The queue that `name` speaks of, and whether it means its dead letters."""
    if name.endswith(DEAD_SUFFIX):
        return name.removesuffix(DEAD_SUFFIX), True
    return name, False


# --- Verdicts ------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What becomes of a message whose consumer was lost."""

    event: Event
    reason: Reason
    retries_left: int  # from now on; RETRIES_NONE: it came without a counter


_BACK: Final = {Where.PLACE: Event.RETURNED, Where.TAIL: Event.REQUEUED}


def after_loss(retries_left: int, attempts: int, policy: QueuePolicy, where: Where = Where.PLACE) -> Verdict:
    """A held message whose consumer was lost: back again, or the end.

    `attempts` counts its deliveries, the lost one included. `where` is where it goes if it goes
    back. A retry counter that the message brought along counts for itself; only without one does
    the queue's max-deliveries apply. For a held dead letter there is nothing to decide: it always
    goes back.

    When the counter is absent and the policy has no limit, the answer is the same for every
    message: ask once for a whole range.
    """
    if not RETRIES_NONE <= retries_left <= RETRIES_ENDLESS:
        raise ValueError(f"retries left {retries_left}: use {RETRIES_NONE} to {RETRIES_ENDLESS}")
    if retries_left == 0:
        return Verdict(_end(policy), Reason.RETRIES_EXHAUSTED, 0)
    if retries_left == RETRIES_NONE and attempts >= policy.max_deliveries > 0:
        return Verdict(_end(policy), Reason.TOO_MANY_DELIVERIES, RETRIES_NONE)
    if RETRIES_NONE < retries_left < RETRIES_ENDLESS:
        retries_left -= 1
    back = Event.DELAYED if retry_delay_us(policy, attempts) else _BACK[where]
    return Verdict(back, Reason.CONSUMER_LOST, retries_left)


def after_requeue(retries_left: int, attempts: int, policy: QueuePolicy) -> tuple[Event, Reason]:
    """A held message that its consumer wants to be given again later: that is a delivery, as a lost one is.

    A retry counter that it brought along counts lost consumers only, and stays as it is.
    """
    if retries_left == RETRIES_NONE and attempts >= policy.max_deliveries > 0:
        return _end(policy), Reason.TOO_MANY_DELIVERIES
    return Event.REQUEUED, Reason.NONE


def retry_delay_us(policy: QueuePolicy, attempts: int) -> int:
    """How long a message waits of which so many deliveries have ended."""
    delays = policy.retry_delays
    return round(delays[min(attempts, len(delays)) - 1] * 1_000_000) if delays else 0


def after_reject(policy: QueuePolicy) -> tuple[Event, Reason]:
    """A held message that its consumer rejected; a held dead letter dies once more, or is thrown away."""
    return _end(policy), Reason.REJECTED


def after_expiry(policy: QueuePolicy) -> tuple[Event, Reason]:
    """A ready or held message whose TTL is over.

    Thrown away it is `expired`, not `rejected`: nobody saw it, and a ready message cannot be rejected.
    """
    keep = policy.dead_letters and policy.on_expiry == "dead"
    return (Event.DEAD if keep else Event.EXPIRED), Reason.EXPIRED


def at_birth(policy: QueuePolicy, reason: Reason) -> tuple[Event, Reason]:
    """A ready message that was sent as a dead letter, before anybody can have it."""
    return (Event.DEAD if policy.dead_letters else Event.WITHDRAWN), reason


def _end(policy: QueuePolicy) -> Event:
    return Event.DEAD if policy.dead_letters else Event.REJECTED
