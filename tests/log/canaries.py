"""Faults of earlier versions, put back on purpose: what looks for them must find them."""

from collections import OrderedDict

import pytest

from penstock.log import retention
from penstock.log.block import Messages
from penstock.log.segment import Segment

Key = tuple[Segment, int]


def compact_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a segment is worth compacting is judged by payload alone, and nobody looks at what comes of it:
    it may be longer than it was."""

    def worth_compacting(segment: Segment, living: dict[int, tuple[int, int]], stage_queue: int) -> bool:
        alive = stored = 0.0
        events = survivors = 0
        for number, span in segment.spans.items():
            weight = span.bytes + span.count
            stored += weight
            events += span.end_event - span.first_event
            _, count = living[number]
            if count:
                alive += weight * count / span.count
                survivors += count
        if segment.generation:
            return alive < 0.5 * stored
        return survivors < events and alive < 0.5 * segment.size

    monkeypatch.setattr(retention, "_worth_compacting", worth_compacting)
    monkeypatch.setattr(retention, "COMPACT_BELOW", 1000.0)


class ByPosition(OrderedDict[Key, Messages]):
    """Blocks by log position, whatever segment they are of."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: dict[int, Key] = {}

    def get(self, key: Key, default: object = None) -> Messages | None:  # type: ignore[override]
        known = self._keys.get(key[1])
        return super().__getitem__(known) if known is not None else None

    def __contains__(self, key: object) -> bool:
        return isinstance(key, tuple) and key[1] in self._keys

    def __setitem__(self, key: Key, block: Messages) -> None:
        self._keys[key[1]] = key
        super().__setitem__(key, block)

    def pop(self, key: Key) -> Messages:  # type: ignore[override]
        del self._keys[key[1]]
        return super().pop(key)
