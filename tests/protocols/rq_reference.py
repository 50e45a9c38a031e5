"""What RQ's bytes mean, said once more in the plainest way: one command at a time, one item a frame.

The decoder reads whole chunks and guesses shapes; this reads the same bytes with no cleverness at
all. `items_of` flattens the decoder's batches, and `settled` brings both into the order in which
they must agree: requests and broadcasts keep their order per queue, DELIVERED and REPLY keep
theirs per kind and per id, and everything else keeps its place.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from typing import Any

from penstock.model.batch import RETRIES_NONE
from penstock.protocols import rq
from penstock.protocols.rq import Command, Limits

Item = tuple[Any, ...]

_WIDTHS = (0, 0, 1, 2, 4, 1, 2, 4)  # by the top three bits of a command


def reference(stream: bytes, limits: Limits | None = None) -> tuple[list[Item], bool]:
    """The items of a stream, and whether it ends with a string over its limit."""
    limits = limits or Limits()
    items: list[Item] = []
    registers: dict[int, Any] = {}
    cleared = twice = False  # whether the last command was a CLEAR, and the one before a CLEAR, too
    at = 0
    while at < len(stream):
        command = stream[at]
        head_end = at + 1 + _WIDTHS[command >> 5]
        if head_end > len(stream):
            break
        value: Any = int.from_bytes(stream[at + 1 : head_end], "big")
        end = head_end
        if command >= 160:
            name = command == Command.QUEUE
            if value > (limits.queue_name_bytes_max if name else limits.payload_bytes_max):
                return items, True
            end += value
            if end > len(stream):
                break
            value = stream[head_end:end]
        at = end
        if command not in set(Command):
            items.append(("skipped", command))
            continue
        if command == Command.CLEAR:
            registers.clear()
            twice = cleared
        elif command == Command.PAYLOAD and twice and value == b"\0":
            registers[command] = b""
        elif command >= 32:
            registers[command] = value
        elif command != Command.NOP:
            items.append(_act(Command(command), registers))
        cleared = command == Command.CLEAR
    return items, False


def _act(action: Command, registers: dict[int, Any]) -> Item:
    needs = rq.NEEDS[action]
    ident = registers.get(Command.ID)
    if any(not set(choice) & set(registers) for choice in needs):
        return ("malformed", action.name, ident)
    queue: Any = registers.get(Command.QUEUE)
    if (Command.QUEUE, Command.QUEUEID) in needs or (Command.QUEUE,) in needs:
        if queue is None:
            queue = registers[Command.QUEUEID]
        else:
            try:
                queue = queue.decode()
            except UnicodeDecodeError:
                queue = ""
            if not queue:
                return ("malformed", action.name, ident)
    payload = registers.get(Command.PAYLOAD)
    if action is Command.REQUEST:
        retries = registers.get(Command.RETRIES, RETRIES_NONE)
        timeout = registers.get(Command.TIMEOUT, 0)
        return ("request", queue, ident, payload, Command.NOREPLY in registers, retries, timeout)
    if action is Command.BROADCAST:
        return ("broadcast", queue, payload)
    if action is Command.REPLY:
        return ("reply", ident, payload or b"")
    if action is Command.DELIVERED:
        return ("delivered", ident)
    if action is Command.UNDELIVERED:
        return ("undelivered", ident)
    if action is Command.CONSUME:
        credit, priority = registers.get(Command.MAX, 0), registers.get(Command.PRIORITY, 20)
        return ("consume", queue, credit, priority, Command.EXCLUSIVE in registers)
    if action is Command.CONSUMING:
        return ("consuming", queue, registers[Command.QUEUEID])
    if action is Command.CANCEL_QUEUE:
        return ("cancel", queue)
    return ("signal", action.name)


def items_of(events: Iterable[rq.Event]) -> Iterator[Item]:
    """The messages of the decoder's events, one by one."""
    for event in events:
        if isinstance(event, rq.Requests):
            batch = event.batch
            retries = batch.retries or [RETRIES_NONE] * len(batch)
            for ident, payload, left in zip(event.ids, batch.messages(), retries, strict=True):
                yield ("request", event.queue, ident, payload, event.noreply, left, event.timeout_seconds)
        elif isinstance(event, rq.Broadcasts):
            for payload in event.batch.messages():
                yield ("broadcast", event.queue, payload)
        elif isinstance(event, rq.Replies):
            for ident, payload in zip(event.ids, event.batch.messages(), strict=True):
                yield ("reply", ident, payload)
        elif isinstance(event, rq.Delivered):
            yield from (("delivered", ident) for ident in event.ids)
        elif isinstance(event, rq.Undelivered):
            yield from (("undelivered", ident) for ident in event.ids)
        elif isinstance(event, rq.ConsumeAsked):
            yield ("consume", event.queue, event.credit, event.priority, event.exclusive)
        elif isinstance(event, rq.Consuming):
            yield ("consuming", event.queue, event.queue_id)
        elif isinstance(event, rq.CancelAsked):
            yield ("cancel", event.queue)
        elif isinstance(event, rq.Signal):
            yield from [("signal", event.command.name)] * event.count
        elif isinstance(event, rq.Malformed):
            yield from [("malformed", event.command.name, event.ident)] * event.count
        else:
            for command, count in event.commands.items():
                yield from [("skipped", command)] * count


_KINDS = {"delivered": "settled", "reply": "settled"}


def settled(items: Iterable[Item]) -> list[Any]:
    """The items in the one order that does not depend on how they were gathered."""
    everything = list(items)
    told = [item for item in everything if item[0] != "skipped"]
    ordered: list[Any] = [sorted(item for item in everything if item[0] == "skipped")]
    for (kind, _), group in groupby(told, key=_segment):
        members = list(group)
        if kind in ("request", "broadcast"):
            ordered += sorted(members, key=lambda item: str(item[1]))
        elif kind == "settled":
            for one in ("delivered", "reply"):
                ordered.append([item for item in members if item[0] == one])
            by_id = sorted(members, key=lambda item: int(item[1]))
            ordered.append(by_id)
        else:
            ordered += members
    return ordered


def _segment(item: Item) -> tuple[str, type]:
    kind = _KINDS.get(str(item[0]), str(item[0]))
    named = kind in ("request", "broadcast")
    return kind, type(item[1]) if named else str


def cut(stream: bytes, at: list[int]) -> list[bytes]:
    """The stream in pieces, cut at these positions (taken modulo its length)."""
    edges = sorted({0, len(stream), *(position % (len(stream) + 1) for position in at)})
    return [stream[start:end] for start, end in pairwise(edges)]
