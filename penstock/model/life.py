"""The life of a message: one drawing, one table. Everything else obeys it.

                        ┌────── due ─────── delayed ◄─── delayed ───┐
                        ├──────────── returned, requeued ───────────┤
                        ▼                                           │
    accepted ───────► ready ──────────── held ───────────────────► held ──── acked ────► gone
                       │ ▲                                          │
                       │ └───────────── redriven ──────────┐        ├─ expired, rejected,
                       │                                   │        │  withdrawn ──────► gone
                       ├─ expired, withdrawn ──► gone      │        │
                       └────────────── dead ────────────► dead ◄────┘ dead
                                                         │ │ ▲
                              gone ◄──── withdrawn ──────┘ │ │
                                                      held │ │ returned, requeued, dead
                                                           ▼ │
                                                        dead-held ── acked, rejected ──► gone

What is delayed may expire, die or be withdrawn as what is ready may, and a message that is sent with a delay
is delayed from the beginning. A state says where a message is, an
event is an arrow. Every arrow is recorded with its time, offset and reason, except two. A delivery (`held`)
is written down with its ending, which carries the moment of dispatch: a crash forgets who held what, and no
more; after it, what was held is ready (or dead) again, in its old place. And that a delay is over (`due`) is
told by the clock: when it was to be is stored.

Rules that always hold:
  * `gone` is final. No event leaves it, and no offset is given twice within one opening.
  * `dead` is a state, not a place: offset, id, payload and history stay.
  * A cell that is not in TRANSITIONS cannot happen: `pending.Pending.move`, through which every message
    goes from room to room, living or replayed, asks `after`, which raises `Refused`; nothing is changed.
"""

from enum import IntEnum


class State(IntEnum):
    """Where a message is. The numbers are not stored anywhere."""

    NEW = 0  # on its way in, not yet accepted
    READY = 1
    DELAYED = 2  # nobody gets it before its time
    HELD = 3
    DEAD = 4
    DEAD_HELD = 5  # taken through the dead-letter door
    GONE = 6  # settled for good; still in the log until retention takes it


class Event(IntEnum):
    """What happens to a message. The numbers are stored in settlement blocks: never renumber."""

    ACCEPTED = 1
    HELD = 2
    ACKED = 3
    RETURNED = 4  # back to its place: consumer lost, or given back
    REQUEUED = 5  # back behind the tail of the moment
    REJECTED = 6  # thrown away by its consumer, with dead letters switched off
    EXPIRED = 7  # thrown away by its TTL, with on-expiry = drop
    DEAD = 8
    REDRIVEN = 9  # from the dead letters back behind the tail
    WITHDRAWN = 10  # taken out by its sender or an operator
    DELAYED = 11  # not before a time: sent so, given back so, or lost where the queue has retry-delays
    DUE = 12  # that time has come


class Reason(IntEnum):
    """Why. Stored in settlement blocks: never renumber."""

    NONE = 0
    RETRIES_EXHAUSTED = 1
    EXPIRED = 2
    REJECTED = 3
    UNDELIVERABLE = 4
    TOO_MANY_DELIVERIES = 5
    BAD_RECORD = 6
    CONSUMER_LOST = 7
    CONSUMER_CANCELLED = 8
    REQUESTER_GONE = 9
    TIMEOUT = 10
    PURGED = 11
    OPERATOR = 12
    LEASE_ENDED = 13  # whoever took it neither settled it nor asked for more time

    @property
    def label(self) -> str:
        return "" if self is Reason.NONE else self.name.lower().replace("_", "-")

    @classmethod
    def of(cls, label: str) -> "Reason":
        """The reason with that label; ValueError lists the labels where there is none."""
        try:
            return cls[label.upper().replace("-", "_")] if label else cls.NONE
        except KeyError:
            known = ", ".join(r.label for r in cls if r)
            raise ValueError(f"no reason {label!r}: one of {known}") from None


DEAD_REASONS = frozenset(
    {
        Reason.RETRIES_EXHAUSTED,
        Reason.EXPIRED,
        Reason.REJECTED,
        Reason.UNDELIVERABLE,
        Reason.TOO_MANY_DELIVERIES,
        Reason.BAD_RECORD,
    }
)
"""The reasons a dead letter can have."""

LIVES_ON = frozenset({Event.RETURNED, Event.REQUEUED, Event.DELAYED})
"""Ends of a delivery after which the message is there for the next one."""

TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.NEW, Event.ACCEPTED): State.READY,
    (State.READY, Event.HELD): State.HELD,
    (State.READY, Event.EXPIRED): State.GONE,
    (State.READY, Event.DEAD): State.DEAD,
    (State.READY, Event.WITHDRAWN): State.GONE,
    (State.READY, Event.DELAYED): State.DELAYED,
    (State.DELAYED, Event.DUE): State.READY,
    (State.DELAYED, Event.EXPIRED): State.GONE,
    (State.DELAYED, Event.DEAD): State.DEAD,
    (State.DELAYED, Event.WITHDRAWN): State.GONE,
    (State.HELD, Event.ACKED): State.GONE,
    (State.HELD, Event.RETURNED): State.READY,
    (State.HELD, Event.REQUEUED): State.READY,
    (State.HELD, Event.DELAYED): State.DELAYED,
    (State.HELD, Event.REJECTED): State.GONE,
    (State.HELD, Event.EXPIRED): State.GONE,
    (State.HELD, Event.DEAD): State.DEAD,
    (State.HELD, Event.WITHDRAWN): State.GONE,
    (State.DEAD, Event.HELD): State.DEAD_HELD,
    (State.DEAD, Event.REDRIVEN): State.READY,
    (State.DEAD, Event.WITHDRAWN): State.GONE,
    (State.DEAD_HELD, Event.ACKED): State.GONE,
    (State.DEAD_HELD, Event.RETURNED): State.DEAD,
    (State.DEAD_HELD, Event.REQUEUED): State.DEAD,
    (State.DEAD_HELD, Event.REJECTED): State.GONE,
    (State.DEAD_HELD, Event.DEAD): State.DEAD,
}


class Refused(Exception):
    """An arrow that the table does not have."""


_STATES = len(State)
_AFTER: list[State | None] = [TRANSITIONS.get((state, event)) for event in Event for state in State]
"""The same table by number: acknowledgements ask it, and a hash of two members costs more than they do."""


def after(state: State, event: Event) -> State:
    """The state that `event` leads to from `state`, or Refused."""
    found = _AFTER[(event - 1) * _STATES + state]
    if found is None:
        raise Refused(f"a message that is {state.name.lower()} cannot be {event.name.lower()}")
    return found
