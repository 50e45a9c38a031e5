"""Arrow batches: the views `messages` and `events` of a queue, built from blocks, not from messages.

The layout of a block is Arrow's own, so the `value` column of a batch is a window on the mapped
file. Everything else is made by a few numpy calls per batch: offsets count up, constants repeat,
and an id is 18 digits that a whole block shares and 14 digits of the offset, looked up four at a
time. Nothing here runs once per message.

Rules that always hold:
  * A column that was not asked for costs nothing; where no column needs the body of a block, the
    body is not read.
  * A large block is a batch of its own, without a copy. Small ones, as a slow queue writes them,
    are joined, because a batch costs more than a few messages do.
  * Types are plain (not large) strings and binaries, timestamps are µs in UTC. What a message
    does not have is null: `expires`, `retries`, `reason`, `consumer`, `dispatched`; and the `id`
    of an event whose message has left the log.

Needs the extra that brings pyarrow and numpy; nothing else in the package may.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.broker.ids import ID_DIGITS, id_of
from penstock.broker.life import Event, Reason
from penstock.engines.interface import EngineRefused
from penstock.engines.log.block import KIND_MESSAGES, PROTOCOLS, BodyReader
from penstock.engines.log.reader import Block, Columns, LogReader

ROWS_MAX = 65_536
JOIN_BYTES_MAX = 64 * 1024
"""Blocks with less payload than this are joined with their neighbours."""

TIMESTAMP = pa.timestamp("us", tz="UTC")

MESSAGES_SCHEMA = pa.schema(
    [
        pa.field("queue", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("timestamp", TIMESTAMP, nullable=False),
        pa.field("protocol", pa.string(), nullable=False),
        pa.field("expires", TIMESTAMP),
        pa.field("retries", pa.int32()),
    ]
)
EVENTS_SCHEMA = pa.schema(
    [
        pa.field("queue", pa.string(), nullable=False),
        pa.field("event_offset", pa.int64(), nullable=False),
        pa.field("event", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("id", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("consumer", pa.string()),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("dispatched", TIMESTAMP),
        pa.field("timestamp", TIMESTAMP, nullable=False),
    ]
)
