"""Calls: what the second process may ask of the first, a handler for each.

    messages        append, take, untake, settle
    transactions    transact; stage, commit, abort, transaction; of several logs: begin, prepare, unprepare,
                    attempt, move, finish, doubts, totals
    queues          queues, queue, states; pause, purge, redrive, withdraw, delete
    readers         hold_reader, release_reader, readers
    clients         connections, connection, end
    broker          engine, health, attention; audit, refusals, rot

A handler gets the fields and bytes of a frame (see `control/frames.py`) and an `answer` to call once,
now or later: `answer(fields, *buffers)`, or `answer.refuse(kind, detail)`. What it raises is refused by
whoever called it, with the kind that `refusal_of` says.

Rules that always hold:
  * No handler keeps the loop for long. What lists much answers in parts, and is called again; what moves
    many messages does so in steps, between which the loop goes on; one in a turn, whoever asked for it.
  * A kind of refusal says whose turn it is: `failed` is final, `bug` is a fault of ours.
"""

from typing import Final

from penstock.server.calls import broker, clients, messages, queues, readers, transactions
from penstock.server.calls.context import Context as Context
from penstock.server.calls.context import Handler
from penstock.server.calls.context import refusal_of as refusal_of

CALLS: Final[dict[str, Handler]] = {
    "take": messages.take,
    "untake": messages.untake,
    "audit": broker.audit,
    "refusals": broker.refusals,
    "settle": messages.settle,
    "append": messages.append,
    "transact": transactions.transact,
    "stage": transactions.stage,
    "commit": transactions.commit,
    "abort": transactions.abort,
    "transaction": transactions.transaction,
    "begin": transactions.begin,
    "prepare": transactions.prepare,
    "unprepare": transactions.unprepare,
    "attempt": transactions.attempt,
    "move": transactions.move,
    "finish": transactions.finish,
    "doubts": transactions.doubts,
    "totals": transactions.totals,
    "queues": queues.queues,
    "queue": queues.queue,
    "states": queues.states,
    "pause": queues.pause,
    "purge": queues.purge,
    "redrive": queues.redrive,
    "withdraw": queues.withdraw,
    "delete": queues.delete,
    "hold_reader": readers.hold_reader,
    "release_reader": readers.release_reader,
    "readers": readers.readers,
    "connections": clients.connections,
    "connection": clients.connection,
    "end": clients.end,
    "engine": broker.engine,
    "rot": broker.rot,
    "health": broker.health,
    "attention": broker.attention,
}
"""Every call by its name."""
