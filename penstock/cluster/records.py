"""Records of a cluster's state: who leads what, who is there, and how many logs there are.

Each is JSON under a key of its own in the state stream, of which the last one counts. Fields that are not
known are left out: a later version may have more.
"""

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

SHARDS: Final = "shards"
"""The record that says how many shards the cluster has."""

LEASE: Final = "lease"
SESSION: Final = "session."
MEMBER: Final = "member."
UNKNOWN: Final = "?"
"""Who leads where the record has vanished or cannot be read."""

WARM: Final = "warm"
"""The fact of a member that says of which shards it has the log. Earlier versions say whether, of the one."""

LOGS: Final = "logs"
"""The fact of a member that says of each shard that it leads up to where the log goes, and how many queues
and bytes it has; of each that it keeps a copy of, up to where that goes."""

WEARY: Final = "weary"
HOME: Final = "home"
"""The fact of a member by which it gets shards: it stays when a front-end starts again. Else, its name."""


class Role(Enum):
    FOLLOWING = "following"
    LEADING = "leading"
    UNSURE = "unsure"


@dataclass(frozen=True, slots=True)
class Claim:
    """What the record of a lease says: who leads, and how to reach it."""

    leader: str = ""  # empty: nobody, it has let go
    term: int = 0
    relay: str = ""
    version: str = ""
    session: int = 0  # 0: of an earlier version
    to: str = ""  # for whom it was let go


class Seen(NamedTuple):
    """A record of the state stream."""

    key: str
    seq: int
    payload: bytes
    time: str = ""  # when it was stored, by the clock of NATS


class Act(Enum):
    BEAT = "our session, again"
    END = "our session has ended"
    FENCE = "a session has ended"
    MARK = "a session that has vanished"
    CLAIM = "we lead"
    TOUCH = "we still lead"
    RELEASE = "nobody leads"
    STAND_IN = "a lease that has vanished"
    COUNT = "how many shards there are"


@dataclass(frozen=True, slots=True)
class Put:
    """A record to be written, if the last one of its key has that number."""

    act: Act
    key: str
    said: dict[str, Any]  # JSON
    last_seq: int
    sent: float
    shard: int = -1
    member: str = ""

    @property
    def payload(self) -> bytes:
        return json.dumps(self.said).encode()


@dataclass(frozen=True, slots=True)
class View:
    """What a front-end knows of its cluster."""

    claims: tuple[Claim, ...]
    """By shard. Where its session is over, nobody leads."""

    roles: tuple[Role, ...]
    """Ours, by shard."""

    copies: frozenset[int] = frozenset()
    """The shards that this front-end should keep a copy of: it leads them, stands by or is to lead them."""

    give: dict[int, str] = field(default_factory=dict)
    """Which shard should be handed over now, and to whom."""

    members: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By their names: what each says of itself. JSON: `Any`."""

    @property
    def leads(self) -> frozenset[int]:
        return frozenset(shard for shard, role in enumerate(self.roles) if role is not Role.FOLLOWING)


def fields_of(payload: bytes) -> dict[str, Any]:
    """What a record says; nothing, where it cannot be read. JSON: `Any`."""
    try:
        said = json.loads(payload)
    except (ValueError, RecursionError):
        said = None
    return said if isinstance(said, dict) else {}


def claim_of(seen: Seen) -> Claim:
    """Fields that are not known are left out: a later version may have more."""
    said = fields_of(seen.payload)
    leader, term, session = said.get("leader"), said.get("term"), said.get("session", 0)
    if not isinstance(leader, str) or not isinstance(term, int) or not isinstance(session, int):
        return Claim(UNKNOWN, seen.seq)
    relay, version, to = (str(said.get(it, "")) for it in ("relay", "version", "to"))
    return Claim(leader, term, relay, version, session, to)


def session_of(seen: Seen) -> tuple[int, bool, int]:
    """Its number, whether it has ended, and the number of its beat. What cannot be read ends no session: it
    may have been written over one that somebody is sure of."""
    said = fields_of(seen.payload)
    number, beat = said.get("session"), said.get("beat", -1)
    if not isinstance(number, int) or not isinstance(beat, int):
        return 0, False, -1
    return number, said.get("ended") is True, beat
