"""Offsets: where each queue begins and ends, where a query begins in it, and what is gone.

A *position* is the offset of the next message to read (for the view `events`: the number of the next event).
Streaming offsets are positions by queue, `{"orders": 42}`, which is also what `startingOffsets` takes. A
queue that they do not name has not been seen yet, and is read from 0 on when it comes. Under a name that no
queue has, `IDENTITIES`, they say which queues these were: one that is deleted and made again is another, and
its messages are no continuation. Checkpoints of earlier versions do not say it, and are taken at their word.
There too, and under that name again, stands the view, where it is not `messages`.

Rules that always hold:
  * Ends are synced ends: nothing that a query has seen can be taken back.
  * Nothing is passed over in silence. A position that is not in the log any more is `DataLost`, or a warning
    where the user has said that the query shall go on.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from penstock.errors import PenstockError
from penstock.spark.api import Broker, ask_all
from penstock.spark.options import EARLIEST, LATEST, TIME_US_MAX, Bound, ReadOptions, WrongOption

log = logging.getLogger("penstock.spark")

NAMES_CHARACTERS_MAX: Final = 4000
"""Names of queues, as they are in the address of one request."""

PAGE_QUEUES: Final = 10_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Positions = dict[str, int]
Identities = dict[str, str]
Offset = dict[str, Any]  # positions, and identities under their name

IDENTITIES: Final = ""
MESSAGES: Final = "messages"


class DataLost(PenstockError):
    """What a query should read next is not in the log. Says of which queue, which offsets, and what to do."""


class Extent(NamedTuple):
    """What can be read of a queue; the end is exclusive."""

    start: int
    end: int
    identity: str = ""  # of the queue; empty: nobody knows


# --- what there is ---------------------------------------------------------------------------------


def extents_of(broker: Broker, options: ReadOptions) -> dict[str, Extent]:
    """The queues to read, as far as there is something to be read of them, by name."""
    rows: list[Mapping[str, int | str]] = []
    if options.subscribe is not None:
        for names in _portions(options.subscribe):
            rows += broker.get("offsets", queues=",".join(names))["queues"]
    else:
        after = None
        while True:
            page = broker.get("offsets", after=after, limit=PAGE_QUEUES)
            rows += (row for row in page["queues"] if options.wants(row["name"]))
            after = page["next"]
            if after is None:
                break
    return {str(row["name"]): _extent(row, options.view) for row in rows}


def _extent(row: Mapping[str, int | str], view: str) -> Extent:
    identity = str(row.get("identity", ""))
    if view == "events":
        return Extent(int(row["event_start"]), int(row["event_end"]), identity)
    # A message that lives is in the log, however old it is: the state is complete from 0 on.
    return Extent(0 if view == "state" else int(row["offset_start"]), int(row["offset_end"]), identity)


def _portions(names: Sequence[str]) -> Iterator[list[str]]:
    """The names in as many lists as there are requests to be made."""
    portion: list[str] = []
    characters = 0
    for name in names:
        length = len(quote(name, safe="")) + 3
        if portion and characters + length > NAMES_CHARACTERS_MAX:
            yield portion
            portion, characters = [], 0
        portion.append(name)
        characters += length
    yield portion


def positions_of(offset: Offset) -> Positions:
    return {queue: position for queue, position in offset.items() if queue != IDENTITIES}


def identities_of(offset: Offset) -> Identities:
    identities: Identities = offset.get(IDENTITIES, {})
    return identities


def offset_of(positions: Positions, extents: Mapping[str, Extent], view: str = MESSAGES) -> Offset:
    """In order, because Spark compares offsets as texts."""
    queues = sorted(positions)
    identities = {queue: extents[queue].identity for queue in queues if extents[queue].identity}
    if identities and view != MESSAGES:
        identities = {IDENTITIES: view, **identities}
    return {**({IDENTITIES: identities} if identities else {}), **{it: positions[it] for it in queues}}


# --- where to begin and to end ---------------------------------------------------------------------


def starting_positions(broker: Broker, options: ReadOptions, extents: Mapping[str, Extent]) -> Positions:
    """Where a new query begins in each queue that is there."""
    times = options.starting_times
    if times is not None:
        return _positions_at(broker, "startingOffsetsByTimestamp", times, options, extents)
    return _positions("startingOffsets", options.starting_offsets, options, extents)


def position_at(broker: Broker, options: ReadOptions, queue: str, time_us: int) -> int:
    """The first position from a time on; the end of the queue where there is none."""
    moment = _EPOCH + timedelta(microseconds=min(time_us, TIME_US_MAX))
    time = f"{moment:%Y-%m-%dT%H:%M:%S.%f}Z"
    position: int = broker.get("queues", queue, "offset", time=time, view=options.view)["offset"]
    return position


def ending_positions(broker: Broker, options: ReadOptions, extents: Mapping[str, Extent]) -> Positions:
    """Where a batch ends in each queue."""
    times = options.ending_times
    if times is not None:
        return _positions_at(broker, "endingOffsetsByTimestamp", times, options, extents)
    return _positions("endingOffsets", options.ending_offsets, options, extents)


def _positions_at(
    broker: Broker, name: str, times: Bound, options: ReadOptions, extents: Mapping[str, Extent]
) -> Positions:
    """The first positions from certain times on, none behind what is there."""
    moments = dict.fromkeys(extents, times) if isinstance(times, int) else times
    if not isinstance(times, int):
        _check_names(name, times, options, extents, "a time for every queue")

    def at_time(asked: Broker, queue: str) -> int:
        return min(position_at(asked, options, queue, moments[queue]), extents[queue].end)

    return dict(zip(extents, ask_all(broker, at_time, list(extents)), strict=True))


def _positions(name: str, bound: Bound, options: ReadOptions, extents: Mapping[str, Extent]) -> Positions:
    if isinstance(bound, int):
        bound = dict.fromkeys(extents, bound)
    else:
        _check_names(name, bound, options, extents)
    positions: Positions = {}
    for queue, offset in bound.items():
        extent = extents.get(queue, Extent(0, 0))
        if (
            options.subscribe is None
            and queue not in extents
            and offset > 0
            and not options.fail_on_data_loss
        ):
            # A pattern takes what is there. This one was, when somebody looked, and is deleted since.
            lost(options, f"option {name!r}: there is no queue {queue!r}")
        elif offset > extent.end:
            raise WrongOption(
                f"option {name!r}: queue {queue!r}: {offset} is behind the end of what can be read, "
                f"{extent.end}; use -1 for the end"
            )
        positions[queue] = {EARLIEST: extent.start, LATEST: extent.end}.get(offset, offset)
    # Where nothing is there yet, everything is still to come.
    return {queue: position for queue, position in positions.items() if queue in extents}


def _check_names(
    name: str,
    given: Mapping[str, int],
    options: ReadOptions,
    extents: Mapping[str, Extent],
    wanted_words: str = "every queue (-2: earliest, -1: latest)",
) -> None:
    """What is said for single queues must be there for each of them, and for no other."""
    foreign = [queue for queue in given if not options.wants(queue)]
    if foreign:
        raise WrongOption(f"option {name!r} names {_listed(foreign)}, which this query does not read")
    wanted = options.subscribe if options.subscribe is not None else extents
    missing = [queue for queue in wanted if queue not in given]
    if missing:
        raise WrongOption(f"option {name!r} does not name {_listed(missing)}; name {wanted_words}")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# --- what is gone ----------------------------------------------------------------------------------

GO_ON: Final = "set failOnDataLoss to false to go on with what is there"
_HOLD: Final = f"{GO_ON}. The option reader makes the broker keep what a stream has not read yet"
_ANEW: Final = f"begin with a new checkpoint, or {GO_ON}"
_OTHER_VIEW: Final = f"{_ANEW}, though it counts something else"
_OTHER_LOG: Final = (
    f"was it deleted, or is it another broker, or another data folder? If that is right, {_ANEW}"
)


def kept_position(
    options: ReadOptions, queue: str, position: int, extent: Extent | None, identity: str = ""
) -> int:
    """A position that can be read from, as near as possible to the one where a query should go on.

    DataLost where that is another one, unless the query may go on all the same.
    """
    if extent is None:
        if position:
            lost(options, f"queue {queue!r} is gone, but was read up to {position}", _OTHER_LOG)
        return 0
    if identity and extent.identity and identity != extent.identity:
        what = (
            f"queue {queue!r} was deleted, and another of that name stands now (or the log was restored from "
            f"a backup); the one that was read up to"
        )
        lost(options, f"{what} {position} was {identity}, this one is {extent.identity}", _ANEW)
        return extent.start
    if position < extent.start:
        what = f"{counted(options)} {position} to {extent.start - 1}"
        lost(options, f"queue {queue!r}: {what} were removed by retention before they were read", _HOLD)
        return extent.start
    if position > extent.end:
        lost(options, f"queue {queue!r} ends at {extent.end}, but was read up to {position}", _OTHER_LOG)
        return extent.start
    return position


def check_view(options: ReadOptions, offset: Offset) -> None:
    """DataLost where the positions of a checkpoint count something else than this query does."""
    identities = identities_of(offset)
    view = identities.get(IDENTITIES, MESSAGES)
    if identities and view != options.view:
        lost(options, f"the checkpoint is of view {view!r}, and {options.view!r} is read", _OTHER_VIEW)


def counted(options: ReadOptions) -> str:
    """What a position counts, in words."""
    return "events" if options.view == "events" else "offsets"


def lost(options: ReadOptions, what: str, advice: str = GO_ON) -> None:
    """Something is gone: say so, in the way that was asked for."""
    if options.fail_on_data_loss:
        raise DataLost(f"{what}; {advice}")
    log.warning("%s; the query goes on, because failOnDataLoss is false", what)
