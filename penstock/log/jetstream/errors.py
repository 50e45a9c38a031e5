"""What can go wrong between a broker and NATS, by what the caller can do about it.

* `LinkError`: a server cannot be reached, or does not want us. Somebody must look at it.
* `ClientMissing`: nats-py is not installed here. Somebody must install it.
* `LinkLost`: the connection broke before an answer came. What was asked for may have happened or not; ask
  again if it may happen twice, or under the same message id.
* `NoAnswer`: the connection is there, and no answer came in time. The same goes for it.
* `JetStreamError`: JetStream answered, and says no. `again` says whether the same may work in a moment.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

from penstock.errors import PenstockError

NO_RESPONDERS: Final = 503


@dataclass(frozen=True, slots=True)
class Failure:
    """Why JetStream says no: the class, the exact reason, and both in words."""

    code: int
    err_code: int
    text: str


class JetStreamTrouble(PenstockError):
    """The base of all of them."""


class LinkError(JetStreamTrouble):
    """No connection could be made. `refused` when it is our credentials that are wrong."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class ClientMissing(JetStreamTrouble):
    """nats-py is not installed."""


class LinkLost(JetStreamTrouble):
    """The connection broke, or was not there."""


class NoAnswer(JetStreamTrouble):
    """Nobody answered in time."""


class NotAllowed(JetStreamTrouble):
    """The user of NATS that we are may not ask this."""


AGAIN = frozenset(
    {
        10004,  # incomplete results: a node did not answer
        10007,  # the asset is not assigned to this server (yet)
        10008,  # JetStream temporarily unavailable: no meta leader
        10009,  # not the leader: it has just moved
        10023,  # insufficient resources: a node is behind
        10041,  # Raft: a proposal did not go through
        10077,  # the stream cannot store it: it or its disk is full, or it is being stopped
        10118,  # the stream has no leader
        10158,  # a message of this id is being stored at this moment
        10163,  # the last sequence of a subject is not known yet, after a change of leader
        10167,  # too many requests
        10202,  # a member is being changed
        10226,  # the stream is being changed
    }
)
"""Errors that pass by themselves. All others stay until somebody changes something."""

FULL = frozenset(
    {
        10002,  # the account has stored as much as it may
        10047,  # a node has too little for what a stream asks for
    }
)
NODE_FULL = 10023
_FULL_TEXTS = ("maximum bytes exceeded", "no space left")
"""What is said where there is no room: by these numbers, or with 10077 in these words."""

NO_PLACE = 10005
_NO_PLACE_TEXT = "no suitable peers for placement"
_PASSING_REASONS = frozenset({"", "peer offline", "miscellaneous issue"})
"""Why there is no place for a stream. Nodes that have not been heard of yet come in a moment; where no reason
is given, there are too few of them so far. A disk that is too small, or tags that nobody has, stay."""

NOT_FOUND = frozenset({10037, 10059})
"""No such message, stream."""

WRONG_LAST = frozenset({10071, 10164})
"""Compare and set: somebody else was first."""


class JetStreamError(JetStreamTrouble):
    """JetStream says no."""

    def __init__(self, what: str, failure: Failure) -> None:
        again = _passes(failure)
        now = "it may work in a moment" if again else "it will not work before something is changed"
        full = failure.err_code in FULL or any(text in failure.text for text in _FULL_TEXTS)
        if full:
            now = "its storage is full: raise the limit of the account, the stream or the nodes, or make room"
        elif failure.err_code == NODE_FULL:
            now = "a node's storage is full (max_file_store), or it is behind the others"
        super().__init__(f"{what}: JetStream says {failure.text!r} (error {failure.err_code}); {now}")
        self.failure = failure
        self.again = again
        self.is_full = full or failure.err_code == NODE_FULL

    @property
    def not_found(self) -> bool:
        return self.failure.err_code in NOT_FOUND

    @property
    def wrong_last(self) -> bool:
        return self.failure.err_code in WRONG_LAST


def _passes(failure: Failure) -> bool:
    if failure.err_code == NO_PLACE:
        reasons = failure.text.removeprefix(_NO_PLACE_TEXT).removeprefix(", ").split(", ")
        return not _PASSING_REASONS.isdisjoint(reasons)
    # A status has no error code of its own: nobody listens at the moment.
    return failure.err_code in AGAIN or (failure.code, failure.err_code) == (NO_RESPONDERS, 0)


def passes(error: JetStreamTrouble) -> bool:
    """Whether the same question may have an answer in a moment."""
    return error.again if isinstance(error, JetStreamError) else isinstance(error, NoAnswer | LinkLost)


def read_answer(what: str, payload: bytes) -> dict[str, Any]:
    """What JetStream answered, in JSON of its own making: `Any`; raises where it says no."""
    try:
        said = json.loads(payload)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise JetStreamTrouble(f"{what}: the answer is no JSON object: {payload[:80]!r}")
    error = said.get("error")
    if error is None:
        return said
    fields = error if isinstance(error, dict) else {}
    raise JetStreamError(
        what,
        Failure(
            int(fields.get("code", 0)), int(fields.get("err_code", 0)), str(fields.get("description", error))
        ),
    )
