"""A channel of kombu on Penstock's queues: what it publishes, what it consumes, and what it holds meanwhile.

Exchanges are kombu's own, direct, topic and fanout, over the bindings that all processes share
(`bindings.py`). A queue is there when the first message is. A queue with priorities is several, by
`priority_steps`: `NAME` for the lowest step and `NAME.p9` for step 9; as with AMQP, higher is sooner.

What is delivered is held by a lease that the transport extends until it is settled. A reject without
requeue makes a dead letter of it, and a requeue goes by the queue's `retry-delays`. What a channel still
holds when it is closed goes back at once.
"""

from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any

from amqp.protocol import queue_declare_ok_t
from kombu.exceptions import ChannelError
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.uuid import uuid

from penstock.kombu.bindings import Key
from penstock.kombu.envelope import delay_of, message_of, payload_of, ttl_of
from penstock.kombu.intake import TAKE_MAX, Intake, Row, Source
from penstock.kombu.settling import Delivery


class QoS:
    """What a channel holds, by its tags, and how much that may be."""

    def __init__(self, channel: "Channel", prefetch_count: int = 0) -> None:
        self.channel = channel
        self.prefetch_count = prefetch_count  # 0: no bound
        self.held: dict[str, Delivery] = {}

    def room(self) -> tuple[int, int]:
        window = self.prefetch_count or 0
        return window, window - len(self.held) if window else TAKE_MAX

    def can_consume(self) -> bool:
        return self.room()[1] > 0

    def ack(self, tag: str) -> None:
        self.settle("ack", tag)

    def reject(self, tag: str, requeue: bool = False) -> None:
        self.settle("requeue" if requeue else "reject", tag)

    def settle(self, verdict: str, *tags: str, **more: object) -> None:
        """A tag that is not held is one of before a connection was lost: its message comes again."""
        held = [self.held.pop(tag) for tag in tags if tag in self.held]
        if held:
            self.channel.connection.settle(verdict, held, **more)

    def restore_unacked(self) -> None:
        self.settle("requeue", *list(self.held), delay=0)

    restore_unacked_once = restore_unacked


class Channel(virtual.Channel):
    QoS = QoS
    supports_fanout = True
    closed: bool
    exchange_types: Any

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self._callbacks: dict[str, Callable[[Any], object]] = {}
        self._without_ack: set[str] = set()
        self._intake = Intake(connection, self.qos.room, self._accept, self._give_back)

    # --- queues ------------------------------------------------------------------------------------

    def prepare_queue_arguments(self, arguments: Any, **options: Any) -> Any:
        return to_rabbitmq_queue_arguments(arguments, **options)

    def queue_declare(
        self,
        queue: str | None = None,
        passive: bool = False,
        auto_delete: bool = False,
        exclusive: bool = False,
        arguments: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> Any:
        queue = queue or f"amq.gen-{uuid()}"
        size = 0
        if passive:
            size = self._size(queue)
            if size < 0 and queue not in self.connection.declared:
                raise ChannelError(f"there is no queue {queue!r}", (50, 10), "Channel.queue_declare", "404")
        else:
            ttl = (arguments or {}).get("x-message-ttl")
            self.connection.declare(queue, ends=auto_delete or exclusive, ttl=ttl)
        return queue_declare_ok_t(queue, max(size, 0), 0)

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **_: Any) -> None:
        if not (if_empty and self._size(queue) > 0):
            self.connection.delete(queue, force=not if_unused)

    def queue_bind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **_: Any
    ) -> None:
        exchange = exchange or "amq.direct"
        self.connection.bind(exchange, self.typeof(exchange).type, routing_key, queue)

    def queue_unbind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **_: Any
    ) -> None:
        self.connection.bindings.remove(Key(exchange or "amq.direct", routing_key, queue))

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        bindings = self.connection.bindings
        bindings.remove(*[it.identity for it in bindings.of(exchange, anew=True)])
        self.state.exchanges.pop(exchange, None)

    def typeof(self, exchange: str, default: str = "direct") -> Any:
        declared = self.state.exchanges.get(exchange)
        if declared is not None:
            return self.exchange_types[declared["type"]]
        bound = self.connection.bindings.of(exchange)
        return self.exchange_types[bound[0].type if bound else default]

    def get_table(self, exchange: str) -> list[tuple[str, str | None, str]]:
        kind = self.typeof(exchange)
        bound = self.connection.bindings.of(exchange)
        return [kind.prepare_bind(it.queue, exchange, it.key, None) for it in bound]

    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> Any:
        found = super()._lookup(exchange, routing_key, default)
        if not found and exchange and self.typeof(exchange).type == "direct":
            # A reply, whose queue may be a moment old.
            self.connection.bindings.of(exchange, anew=True)
            found = super()._lookup(exchange, routing_key, default)
        return found

    def _size(self, queue: str) -> int:
        """Messages that are ready; -1: there is no such queue."""
        rows = [
            self.connection.ask("GET", "queues", name, allow=(404,))
            for name in self.connection.names(queue).values()
        ]
        there = [row.fields for row in rows if row.status == 200]
        return sum(row["ready"] for row in there) if there else -1

    def _purge(self, queue: str) -> int:
        purged = 0
        for name in self.connection.names(queue).values():
            answer = self.connection.ask("POST", "queues", name, "purge", allow=(404,))
            purged += answer.fields["purged"] if answer.status == 200 else 0
        return purged

    # --- publishing --------------------------------------------------------------------------------

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        try:
            return (body.decode() if isinstance(body, bytes) else body), "utf-8"
        except UnicodeDecodeError:
            return b64encode(body).decode(), "base64"

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        priority = self._get_message_priority(message)
        names = self.connection.names(queue)
        step = next((step for step in names if step <= priority), min(names))
        query = {
            "ttl": ttl_of(message, self.connection.ttl_of(queue)),
            "delay": delay_of(message),
            "retries": self.connection.retries,
        }
        self.connection.ask("POST", "queues", names[step], "messages", query=query, body=payload_of(message))

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **_: Any) -> None:
        for queue in {it.queue for it in self.connection.bindings.of(exchange)}:
            self._put(queue, message)

    # --- consuming ---------------------------------------------------------------------------------

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], object], consumer_tag: str, **_: Any
    ) -> None:
        self._tag_to_queue[consumer_tag] = queue
        self._consumers.add(consumer_tag)
        if queue not in self._callbacks:
            self._intake.add(queue, self.connection.names(queue))
        self._callbacks[queue] = callback
        (self._without_ack.add if no_ack else self._without_ack.discard)(queue)
        self.connection.keep_leases()

    def basic_cancel(self, consumer_tag: str) -> None:
        self._consumers.discard(consumer_tag)
        queue = self._tag_to_queue.pop(consumer_tag, None)
        if queue is not None and queue not in self._tag_to_queue.values():
            del self._callbacks[queue]
            with self.connection.quietly("cancel a consumer"):
                self._intake.remove(queue)
                undelivered = self.connection.take_back(self, queue)
                self.qos.settle("requeue", *(it.delivery_tag for it in undelivered), delay=0)
                self.connection.consumed(queue)

    def consumes(self, queue: str) -> bool:
        return queue in self._callbacks

    def pump(self) -> None:
        self._intake.pump()

    def basic_get(self, queue: str, no_ack: bool = False, **_: Any) -> Any:
        for name in self.connection.names(queue).values():
            query = {"lease": self.connection.lease_seconds}
            rows = self.connection.ask("POST", "queues", name, "take", query=query).fields["messages"]
            if rows:
                message = self._receive(queue, name, rows[0])
                if no_ack:
                    self.qos.ack(message.delivery_tag)
                self.connection.keep_leases()
                return message
        return None

    def _receive(self, queue: str, name: str, row: Row) -> Any:
        message = self.Message(message_of(row, queue), channel=self)
        self.qos.held[message.delivery_tag] = Delivery(name, row["id"], row["attempts"])
        return message

    def _accept(self, source: Source, rows: list[Row]) -> None:
        messages = [self._receive(source.queue, source.name, row) for row in rows]
        if source.queue in self._without_ack:
            self.qos.settle("ack", *(it.delivery_tag for it in messages))
        self.connection.ready.extend((self, source.queue, message) for message in messages)

    def _give_back(self, source: Source, rows: list[Row]) -> None:
        deliveries = [Delivery(source.name, row["id"], row["attempts"]) for row in rows]
        self.connection.settle("requeue", deliveries, delay=0)

    def deliver(self, queue: str, message: Any) -> None:
        self._callbacks[queue](message)

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        tags = list(self.qos.held)
        if multiple and delivery_tag in tags:
            self.qos.settle("ack", *tags[: tags.index(delivery_tag) + 1])
        else:
            self.qos.ack(delivery_tag)

    def forked(self) -> None:
        """This is a child: what is consumed and held is its parent's."""
        self.qos.held.clear()
        self._consumers.clear()
        self._callbacks.clear()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        with self.connection.quietly("give back what is held"):
            for queue in self._callbacks:
                self._intake.remove(queue)
            self.connection.take_back(self)
            self.qos.restore_unacked()  # all in one go, so that it stays in order
        for consumer in list(self._consumers):
            self.basic_cancel(consumer)
        self.connection.close_channel(self)
        self.exchange_types = None
