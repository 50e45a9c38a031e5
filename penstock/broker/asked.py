"""Asked: requests that came together, and the addresses by which their answers find back.

A request's sender is a port of this broker, and the message carries the way back as its reply address: the
opening of the log in which that broker leads, the port's number, the number of the batch that it came with,
and its place in that batch. So an answer finds its way by four numbers, and nothing is kept per request but a
byte and its ticket.

Ports are numbered anew by every broker, and a request may outlive the one that took it in (as a dead letter
that is redriven later). So an address of another opening leads nowhere, nor does one of three numbers, as
they were written before addresses named the opening.
"""

from array import array
from collections.abc import Sequence
from itertools import compress

from penstock.broker.port import Port

_OPEN = 1
_TOLD = 2  # open, and its sender knows that a consumer has it


def addresses(opening: int, port_number: int, asked_number: int, count: int) -> list[bytes]:
    """The ways back to all requests of a batch."""
    head = b"%d %d %d " % (opening, port_number, asked_number)
    return [head + b"%d" % index for index in range(count)]


def parse_address(value: bytes, opening: int) -> tuple[int, int, int] | None:
    """Port, batch and index; None where the address was not made in this opening."""
    try:
        made_in, port_number, asked_number, index = map(int, value.split())
    except ValueError:
        return None
    return (port_number, asked_number, index) if made_in == opening else None


class Asked:
    """Requests of one port that came together."""

    __slots__ = ("_open", "first", "number", "open_count", "port", "queue", "tickets", "timed")

    def __init__(self, port: Port, number: int, queue: str, tickets: "array[int]") -> None:
        self.port = port
        self.number = number
        self.queue = queue
        self.tickets = tickets
        self.first = -1  # the offset of the first one, once the log has told it
        self._open = bytearray([_OPEN]) * len(tickets)
        self.open_count = len(tickets)
        self.timed = False  # the broker keeps a deadline for it

    def tickets_of(self, indexes: Sequence[int]) -> "array[int]":
        if isinstance(indexes, range):
            return self.tickets[indexes.start : indexes.stop]
        return array("I", [self.tickets[index] for index in indexes])

    def end(self, indexes: Sequence[int]) -> None:
        """These requests have ended, if they had not before."""
        state = self._open
        if isinstance(indexes, range):
            count = len(indexes)
            self.open_count -= count - state.count(0, indexes.start, indexes.stop)
            state[indexes.start : indexes.stop] = bytes(count)
            return
        for index in indexes:
            self.open_count -= state[index] != 0
            state[index] = 0

    @property
    def opened(self) -> bytearray:
        """By index: 0 where it has ended."""
        return self._open

    def is_open(self, index: int) -> bool:
        return 0 <= index < len(self._open) and bool(self._open[index])

    def tell(self, indexes: Sequence[int]) -> "array[int]":
        """Consumers have these: the tickets of the open ones of which that is news."""
        state = self._open
        if isinstance(indexes, range):
            news = state.count(_OPEN, indexes.start, indexes.stop)
            if not news:
                return array("I")
            if news == len(indexes):
                state[indexes.start : indexes.stop] = bytes((_TOLD,)) * news
                return self.tickets_of(indexes)
        fresh = [index for index in indexes if state[index] == _OPEN]
        for index in fresh:
            state[index] = _TOLD
        return self.tickets_of(fresh)

    def open_from(self, index: int, count: int) -> Sequence[int]:
        """The indexes of the open ones among so many from `index` on; a range where all of them are."""
        state, end = self._open, index + count
        if state.find(0, index, end) < 0:
            return range(index, end)
        return [i for i in range(index, end) if state[i]]

    def open_in(self, first: int, end: int) -> list[int]:
        """The indexes of the open ones between two offsets, where the first one's is known."""
        return [o - self.first for o in range(first, end) if self.is_open(o - self.first)]

    def end_all(self) -> "array[int]":
        """The tickets of those that were open; none is any more."""
        tickets = array("I", compress(self.tickets, self._open))
        self._open = bytearray(len(self._open))
        self.open_count = 0
        return tickets
