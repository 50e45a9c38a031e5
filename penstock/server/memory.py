"""Memory: one account of what clients make the two processes hold, whoever of them it is.

What counts for a connection is what it has begun to say and not finished, what it has said and nobody has
read or stored yet, the queues that it consumes, and what waits to be read by its peer. The bodies that the
process of the HTTP API holds count as one (`control/gauge.py`). Beyond `memory-bytes-max` for all together:
  * nobody who holds anything to speak of is read from, until there is room again; those who say little go on;
  * where that does not help within `PATIENCE_SECONDS`, the largest is closed, one in a turn, with a line that
    says how much it held; who holds that much because it does not read is closed at once: nothing else would
    keep others from writing to it;
  * no body of more than `SMALL_BYTES` is read over HTTP, and those that are being read are refused: such a
    caller is told when to come again.
Above half of it, everybody is read from in small pieces, so that many senders cannot take much each.

A connection with TLS takes much by being there (`TLS_BYTES`): as many come in as fit into half of the limit.

A turn is between two looks: so much may be over.
"""

import time
from typing import Final, Protocol

PATIENCE_SECONDS: Final = 5.0
SMALL_BYTES: Final = 16 * 1024
"""What is less is not counted: ten thousand connections that hold so little are within every limit."""


TLS_BYTES: Final = 64 * 1024
"""What a connection with TLS takes, from its handshake on: 59 KB were measured."""


class Holder(Protocol):
    """A connection, as the account sees it."""

    @property
    def output_bytes(self) -> int:
        """Of what it holds: what its peer has not read."""

    def hold_for_memory(self, held: bool) -> None:
        """Read nothing from it for now, or go on."""

    def close_for_memory(self, why: str) -> None:
        """Close it at once."""


class Account:
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.bodies_bytes = 0  # of these: bodies over HTTP
        self.tls_bytes = 0
        self.is_full = False
        """From when more is held than there may be until there is room again."""

        self.is_tight = False
        """Whether it is time to look, and to receive little at a time: much is held, or somebody is."""

        self.closed = 0  # connections, so far
        self.broadcasts_lost = 0  # because who would have got them does not read
        self._holders: dict[Holder, int] = {}
        self._held_since: dict[Holder, float] = {}  # not read from

    def charge(self, holder: Holder, held_bytes: int) -> None:
        """So much is what it holds now."""
        before = self._holders.get(holder, 0)
        if held_bytes == before:
            return
        if held_bytes >= SMALL_BYTES:
            self._holders[holder] = held_bytes
        else:
            held_bytes = 0
            self._holders.pop(holder, None)
        self.held_bytes += held_bytes - before
        self._note_tightness()

    def charge_bodies(self, held_bytes: int) -> None:
        """So much is what all bodies over HTTP hold now."""
        self.held_bytes += held_bytes - self.bodies_bytes
        self.bodies_bytes = held_bytes
        self._note_tightness()

    def admit_tls(self) -> bool:
        """Whether one more connection with TLS may come in; then it has, until `tls_left`."""
        has_room = self.tls_bytes + TLS_BYTES <= self.limit_bytes // 2
        if has_room:
            self.tls_bytes += TLS_BYTES
        return has_room

    def tls_left(self) -> None:
        self.tls_bytes -= TLS_BYTES

    def forget(self, holder: Holder) -> None:
        self.charge(holder, 0)
        self._held_since.pop(holder, None)

    def _note_tightness(self) -> None:
        self.is_tight = self.is_full or bool(self._held_since) or self.held_bytes > self._room_bytes // 2

    @property
    def _room_bytes(self) -> int:
        return self.limit_bytes - self.tls_bytes

    def look(self) -> None:
        """Once in a turn, where it is tight."""
        now = time.monotonic()
        room_bytes = self._room_bytes
        if self.held_bytes > room_bytes:
            self.is_full = True
            self._restrain(now)
        if self.held_bytes <= room_bytes - room_bytes // 8:
            self.is_full = False
            held, self._held_since = self._held_since, {}
            for holder in held:
                holder.hold_for_memory(False)
        elif any(now - since > PATIENCE_SECONDS for since in self._held_since.values()):
            # Also where it is not over: those who are held would never come to an end.
            largest = max(self._held_since, key=lambda holder: self._holders.get(holder, 0))
            self._close(largest, "of what it has begun to say, consumes, or nobody could store")
        self._note_tightness()

    def _restrain(self, now: float) -> None:
        # All of them, and not only the largest: the others would become as large.
        mean = (self.held_bytes - self.bodies_bytes) / max(len(self._holders), 1)
        for holder, held_bytes in list(self._holders.items()):
            if held_bytes >= mean and holder.output_bytes * 2 > held_bytes:
                self._close(holder, "which it does not read")
            elif holder not in self._held_since:
                self._held_since[holder] = now
                holder.hold_for_memory(True)

    def _close(self, holder: Holder, what: str) -> None:
        held_bytes = self._holders.get(holder, 0)
        self.closed += 1
        self.forget(holder)
        holder.close_for_memory(
            f"it made the broker hold {held_bytes} bytes {what}, and all together are at the limit of "
            f"memory-bytes-max = {self.limit_bytes}"
        )
