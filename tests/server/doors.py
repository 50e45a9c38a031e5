"""The three doors as a test uses them: send numbered messages, take them, end deliveries.

Each door is a small blocking client over the protocol's own client session, so that one test can
be written for all of them.
"""

import time
from array import array
from collections.abc import Sequence

from penstock.model.batch import Batch
from penstock.protocols import phpmq_session, rq_node, sspq_session
from penstock.tally import Tally
from tests.server.harness import BrokerProcess, Wire, number_of, numbered


def now_us() -> int:
    return time.time_ns() // 1000


class Door:
    """One connection. `name` of the queue is the SSPQ listener's for SSPQ."""

    protocol = ""

    def __init__(self, broker: BrokerProcess, queue: str) -> None:
        self.queue = queue
        self.wire: Wire = broker.wire(self.protocol)
        self.got: list[int] = []  # numbers, in the order of delivery

    def send(self, numbers: Sequence[int], tally: Tally | None = None) -> None:
        raise NotImplementedError

    def stored(self) -> None:
        """Wait until all that was sent here is stored. Where each message has its receipt, it is."""

    def heard(self) -> bytes:
        data = self.wire.some()
        if not data:
            raise ConnectionError("the broker has closed the connection")
        return data

    def demand(self, window: int, dead: bool = False) -> None:
        """Ask for messages."""
        raise NotImplementedError

    def collect(self, count: int) -> list[int]:
        """The next `count` deliveries, not settled."""
        raise NotImplementedError

    def ack(self) -> None:
        """Settle everything that this door has collected and not settled."""
        raise NotImplementedError

    def drain(self, count: int, window: int = 100, dead: bool = False) -> list[int]:
        """Take and settle `count` messages."""
        self.demand(min(window, count), dead)
        start = len(self.got)
        while len(self.got) - start < count:
            self.collect(1)
            self.ack()
        return self.got[start:]

    def close(self) -> None:
        self.wire.close()

    def reset(self) -> None:
        self.wire.reset()


class SspqDoor(Door):
    protocol = "sspq"

    def __init__(self, broker: BrokerProcess, queue: str) -> None:
        super().__init__(broker, queue)
        self._session = sspq_session.ClientSession()
        self._dead = False
        self.retries_seen: list[int] = []

    def send(self, numbers: Sequence[int], tally: Tally | None = None) -> None:
        if tally:
            tally.attempted(numbers)
        self.wire.say(self._session.send(Batch.of(numbered(numbers), retries=[255] * len(numbers))))

    def demand(self, window: int, dead: bool = False) -> None:
        self._dead = dead
        self.wire.say(self._session.ask(dead=dead))

    def collect(self, count: int) -> list[int]:
        assert count == 1, "SSPQ has one message in flight"
        while True:
            for answer in self._session.receive(self.heard()):
                assert isinstance(answer, sspq_session.Delivery), answer
                self.retries_seen.append(answer.retries)
                self.got.append(number_of(answer.payload))
                return self.got[-1:]

    def stored(self) -> None:
        self.wire.say(self._session.sync())
        while not self._session.receive(self.heard()):
            pass

    def ack(self) -> None:
        self.wire.say(self._session.confirm())

    def drain(self, count: int, window: int = 1, dead: bool = False) -> list[int]:
        start = len(self.got)
        self.demand(1, dead)
        for left in range(count - 1, -1, -1):
            self.collect(1)
            self.wire.say(self._session.confirm(), self._session.ask(dead=dead) if left else b"")
        return self.got[start:]


class PhpmqDoor(Door):
    protocol = "phpmq"

    def __init__(self, broker: BrokerProcess, queue: str) -> None:
        super().__init__(broker, queue)
        self._session = phpmq_session.ClientSession()
        self._name = queue
        self._unsettled: list[bytes] = []
        self.ids: dict[int, bytes] = {}
        self.ttl_seconds = 0

    def send(self, numbers: Sequence[int], tally: Tally | None = None) -> None:
        if tally:
            tally.attempted(numbers)
        ttl = [self.ttl_seconds] * len(numbers) if self.ttl_seconds else None
        self.wire.say(self._session.send(self.queue, Batch.of(numbered(numbers), ttl_seconds=ttl)))

    def demand(self, window: int, dead: bool = False) -> None:
        self._name = self.queue + (".dead" if dead else "")
        self.wire.say(self._session.consume(self._name, window))

    def collect(self, count: int) -> list[int]:
        start = len(self.got)
        while len(self.got) - start < count:
            for event in self._session.receive(self.heard()):
                for payload, message_id in zip(event.batch.messages(), event.ids, strict=True):
                    number = number_of(payload)
                    self.got.append(number)
                    self.ids[number] = bytes(message_id)
                    self._unsettled.append(bytes(message_id))
        return self.got[start:]

    def stored(self) -> None:
        self.wire.say(self._session.sync())
        while not self._session.receive(self.heard()):
            pass

    def _settled(self) -> list[bytes]:
        ids, self._unsettled = self._unsettled, []
        return ids

    def ack(self) -> None:
        self.wire.say(self._session.ack(self._name, self._settled()))

    def requeue(self, ttl_seconds: int = 0) -> None:
        self.wire.say(self._session.requeue(self._name, self._settled(), ttl_seconds))

    def reject(self) -> None:
        self.wire.say(self._session.reject(self._name, self._settled()))


class RqDoor(Door):
    protocol = "rq"

    def __init__(self, broker: BrokerProcess, queue: str) -> None:
        super().__init__(broker, queue)
        self._session = rq_node.NodeSession(now_us())
        self._name = queue
        self._unsettled: list[int] = []

    def send(self, numbers: Sequence[int], tally: Tally | None = None) -> None:
        """NOREPLY requests; returns when each has its receipt."""
        if tally:
            tally.attempted(numbers)
        ids, data = self._session.send(self.queue, Batch.of(numbered(numbers)))
        by_id = dict(zip(ids, numbers, strict=True))
        self.wire.say(data)
        while by_id:
            for event in self._events():
                assert isinstance(event, rq_node.Receipts), event
                confirmed = [by_id.pop(i) for i in event.ids]
                if tally:
                    tally.confirmed(confirmed)

    def _events(self) -> list[rq_node.NodeEvent]:
        data = self.heard()
        events = self._session.receive(data, now_us())
        self.wire.say(self._session.take_output())
        return events

    def demand(self, window: int, dead: bool = False) -> None:
        self._name = self.queue + (".dead" if dead else "")
        self.wire.say(self._session.consume(self._name, credit=window))

    def collect(self, count: int) -> list[int]:
        start = len(self.got)
        while len(self.got) - start < count:
            for event in self._events():
                if isinstance(event, rq_node.Deliveries):
                    self.got += [number_of(payload) for payload in event.batch.messages()]
                    self._unsettled += list(event.ids)
        return self.got[start:]

    def ack(self) -> None:
        ids, self._unsettled = self._unsettled, []
        self.wire.say(self._session.delivered(array("I", ids)))


DOORS: dict[str, type[Door]] = {"sspq": SspqDoor, "phpmq": PhpmqDoor, "rq": RqDoor}
