"""Readers of the log, who hold retention."""

from penstock.control.frames import Fields
from penstock.log.info import ReaderInfo
from penstock.model.timers import SECOND_US
from penstock.server.calls.context import Answer, Context, when_safe


def hold_reader(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    now_us = context.server.now_us()
    context.operator.hold_reader(
        fields["name"],
        fields["view"],
        fields["positions"],
        fields["lease_seconds"],
        now_us,
        readers_max=fields["readers_max"],
        keep_others=fields.get("keep_others", False),
    )
    told = fields["positions"] if fields.get("keep_others") else None  # and not the 100,000 others
    mine = [reader for reader in context.log.readers(told) if reader.name == fields["name"]]
    when_safe(context, answer, {"reader": _reader(context, mine, now_us)})


def release_reader(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    context.operator.release_reader(fields["name"], context.server.now_us())
    when_safe(context, answer, {})


def readers(context: Context, fields: Fields, body: memoryview, answer: Answer) -> None:
    """All of them, or the one that is named."""
    name = fields.get("name")
    by_name: dict[str, list[ReaderInfo]] = {}
    for reader in context.log.readers():
        if name is None or reader.name == name:
            by_name.setdefault(reader.name, []).append(reader)
    now_us = context.server.now_us()
    answer({"readers": [_reader(context, its, now_us) for its in by_name.values()]})


def _reader(context: Context, infos: list[ReaderInfo], now_us: int) -> Fields:
    """A reader with all its queues; which have one view and one lease, but for those that it has left."""
    newest = max(infos, key=lambda info: info.lease_until_us)
    queues = []
    for info in infos:
        queues.append(
            {
                "queue": info.queue,
                "position": info.position,
                "end": info.end,
                "lag": max(info.end - info.position, 0),
                "capped": info.capped,
            }
        )
    return {
        "name": newest.name,
        "view": newest.view,
        "lease_seconds_left": max(newest.lease_until_us - now_us, 0) / SECOND_US,
        "queues": queues,
    }
