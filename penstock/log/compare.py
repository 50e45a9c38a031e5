"""Comparing: does a block fit itself, and does a snapshot say what the blocks before it say?

For `inspect.py`. A checksum tells that bytes are as they were written; here is asked whether
what was written makes sense, which only a fault of the broker can spoil.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

from penstock.log.adoption import Adoption, read_adoption
from penstock.log.block import (
    FLAG_ELSEWHERE,
    KIND_CONTROL,
    KIND_MESSAGES,
    PROTOCOLS,
    Header,
    read_control,
    read_messages,
)
from penstock.log.ledger import read_rows
from penstock.log.queue import LogQueue
from penstock.log.segment import Segment, merged
from penstock.log.stages import stage_of
from penstock.log.state import LogState
from penstock.model.pending import Line


def problem_of(header: Header, body: memoryview) -> str:
    """What does not fit in a block that has its checksum; empty where all does."""
    try:
        if header.kind == KIND_MESSAGES:
            return _message_problem(header, body)
        if header.kind == KIND_CONTROL:
            return _control_problem(read_control(body))
        rows = list(read_rows(header, body))
    except (ValueError, IndexError, KeyError, TypeError) as error:
        return f"its columns do not fit: {error!r}"
    if sum(row.end - row.first for row in rows) != header.event_count:
        return "its rows and its number of events do not agree"
    if min((row.first for row in rows), default=header.first_offset) != header.first_offset:
        return "its rows and its first offset do not agree"
    if any(row.first >= row.end for row in rows):
        return "it has a row without messages"
    return ""


def _message_problem(header: Header, body: memoryview) -> str:
    if header.flags & FLAG_ELSEWHERE:
        runs = read_adoption(header, body).runs
        if any(run.length < 1 or run.row < 0 for run in runs):
            return "it has a run without rows"
        payload_bytes, expires = sum(run.payload_bytes for run in runs), [run.expires_us for run in runs]
    else:
        block = read_messages(header, body)
        bounds = list(block.bounds)
        if bounds[0] != 0 or bounds != sorted(bounds):
            return "the bounds of its messages are not in order"
        payload_bytes, expires = bounds[-1], list(block.expires or ())
    if payload_bytes != header.extra:
        return "its payload and its header do not agree"
    if header.protocol >= len(PROTOCOLS):
        return f"there is no protocol {header.protocol}"
    if header.event_count != header.count:
        return "it has not one event for each message"
    if min(filter(None, expires), default=0) != header.expires_min_us:
        return "its expiries and its header do not agree"
    return ""


def _control_problem(fields: dict[str, Any]) -> str:
    if fields["op"] == "stage":
        stage = stage_of(fields["stage"])
        for part in stage.parts:
            if not stage.first <= part.first < part.end <= stage.end:
                return f"what stage {stage.info.stage!r} has for queue {part.queue!r} is not among its rows"
    return ""


def differences(replayed: LogState, written: LogState) -> Iterator[str]:
    """What a snapshot says otherwise than the blocks before it, in sentences.

    Not compared: timers, which run out on their own, the moments of death, which blocks round up
    to their own time, and what retention has moved.
    """
    for name in ("log", "opening", "readers"):
        if getattr(replayed, name) != getattr(written, name):
            yield f"{name} is {getattr(written, name)!r}; the blocks say {getattr(replayed, name)!r}"
    if (list(replayed.transactions.items()), replayed.fingerprints) != (
        list(written.transactions.items()),
        written.fingerprints,
    ):
        yield "its transactions are not those of the blocks"
    if replayed.unfinished != written.unfinished:
        yield "its unfinished transactions are not those of the blocks"
    our_stages, their_stages = _open_stages(replayed), _open_stages(written)
    for stage in sorted(our_stages.keys() | their_stages.keys()):
        if our_stages.get(stage) != their_stages.get(stage):
            told, ours_is = _short(their_stages.get(stage)), _short(our_stages.get(stage))
            yield f"stage {stage!r} is {told}; the blocks say {ours_is}"
    for number in sorted(replayed.by_number.keys() | written.by_number.keys()):
        ours, theirs = replayed.by_number.get(number), written.by_number.get(number)
        if ours is None or theirs is None:
            known = ours or theirs
            assert known is not None
            yield f"queue {known.name!r} is {'not in it' if theirs is None else 'in no block'}"
            continue
        our_facts, their_facts = _facts(ours), _facts(theirs)
        for name, fact in our_facts.items():
            if their_facts[name] != fact:
                yield (
                    f"queue {ours.name!r}: {name} {_short(their_facts[name])}; the blocks say {_short(fact)}"
                )


def _open_stages(state: LogState) -> dict[str, dict[str, Any]]:
    """By their ids. That one is damaged may have been found since its block was written."""
    return {stage.info.stage: {**stage.fields(), "damage": ""} for stage in state.stages}


def missing_names(segment: Segment, adoptions: Iterable[Adoption]) -> Iterator[str]:
    """What a snapshot does not say of the adoption blocks that a segment had by then."""
    for adoption in adoptions:
        for run in adoption.runs if adoption.header.queue in segment.spans else ():  # It may be deleted.
            first, end = run.row, run.row + run.length
            at = bisect_right(segment.names, first, key=itemgetter(0)) - 1
            if at < 0 or segment.names[at][1] < end:
                yield f"rows {first} to {end - 1} of the stages are not among those that {segment.name} names"


def _facts(queue: LogQueue) -> dict[str, Any]:
    pending = queue.pending
    return {
        "name": queue.name,
        "tail": pending.tail,
        "next event": queue.next_event,
        "paused": queue.paused,
        # When the time of what is delayed has come is told by a clock, not by blocks.
        "ready or delayed": merged((a, b) for room in (pending.ready, pending.delayed) for a, b, _ in room),
        "whys": list(queue.whys),
        "moved": _in_order(pending.waiting),
        "dead": _in_order(pending.dead),
        "notes": [(a, b, tuple(note)) for a, b, note in pending.notes],
        "asking": [(a, b) for a, b, _ in queue.asking],
        "repairs": list(queue.repairs),
    }


def _in_order(line: Line) -> list[tuple[int, int, int, str]]:
    """A line from front to back, without the numbers of its places."""
    runs: list[tuple[int, int, int, str]] = []
    for a, b, place in sorted(line.places, key=lambda run: (run[2].tail, run[2].number, run[0])):
        label = place.reason.label
        if runs and runs[-1][1:] == (a, place.tail, label):
            runs[-1] = (runs[-1][0], b, place.tail, label)
        else:
            runs.append((a, b, place.tail, label))
    return runs


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
