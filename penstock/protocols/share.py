"""The share of a turn that one connection has: how much of a chunk is read before others have their turn.

What a chunk costs depends on what it says. Frames that look like those before them are read hundreds at a
time, and cost next to nothing; a frame that has to be taken apart costs microseconds, and a few bytes can
name a payload of a megabyte again and again. So a reader counts what it does one by one, in units of about
five microseconds, and stops when its share is used up: what it has not read then is its `rest`, which the
caller feeds to it later, before anything else. Where a chunk is cut changes how events are grouped, never
what they say.
"""

from typing import Final

SHARE: Final = 200
"""Units for one call of a session: some 1 ms where each word is read with care; what they ask for comes on
top."""

QUICK_SHARE: Final = 16
"""Where others wait: enough for one who says little."""

UNBOUNDED: Final = 1 << 60
"""For a reader of a client: nobody else waits."""

SCATTERED_BYTES: Final = 128
"""Settlements of this size cost a unit where each is of a message here and there. Read they are hundreds at a
time, as those of neighbours: it is the log that takes its time for each."""

SCATTERED_RANGES: Final = 16
"""What is fewer is settled at once, wherever the messages are."""

WINDOW_BYTES: Final = 1024
"""What a queue that a connection consumes takes, in its session and in the broker: 0.7 KB were measured, and
2.3 where nobody else consumes it."""

BROADCAST_COST: Final = 32
"""Units for broadcasts that are one event: they are written to everybody who consumes the queue."""

PAYLOAD_SHIFT: Final = 11
"""A payload that is named costs a unit for every 2 KiB: so much has to be written for it."""
