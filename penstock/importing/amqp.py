"""A queue of RabbitMQ, over AMQP 0-9-1 by pika: messages are consumed, and acknowledged when they are stored.

A message that its publisher has given a `message_id` is known by that and by its bytes, when RabbitMQ says
that it has been delivered before (`redelivered`). Any other is stored again when it comes again.

Properties come along as headers `amqp-NAME`, and headers under their own names, values that are no text as
JSON. `expiration` becomes the TTL, and begins anew. A question behind the acknowledgements proves that they
have arrived.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from penstock.common.text import printable
from penstock.errors import Misuse
from penstock.importing.source import (
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    PASSWORD_VARIABLE,
    POLL_SECONDS,
    Away,
    Message,
    Place,
    Refuses,
    Source,
    choice,
    tls_of,
)

LATE: Final = 406
"""What RabbitMQ closes a channel with where an acknowledgement was due, after 30 minutes by default: as where
Penstock has had no room for so long. The messages come again over another one."""

PROPERTIES: Final = (
    "content_type",
    "content_encoding",
    "priority",
    "correlation_id",
    "reply_to",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
)


class Amqp(Source):
    batch_max = 200

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        if not 1 <= len(place.path) <= 2:
            raise Misuse("amqp://…: use amqp://USER@HOST:PORT/VHOST/QUEUE, with %2F for the vhost /")
        self._vhost = place.path[0] if len(place.path) > 1 else "/"
        self._with_headers = choice(place, "headers", "yes", "no") == "yes"
        import pika  # here: an extra

        self._pika: Any = pika
        self._connection: Any = None

    def open(self) -> None:
        place, pika = self.place, self._pika
        context = tls_of(place)
        tls = pika.SSLOptions(context, place.host) if context else None
        terms = pika.ConnectionParameters(
            place.host,
            place.port or (5671 if tls else 5672),
            self._vhost,
            pika.PlainCredentials(place.user or "guest", place.password or "guest"),
            ssl_options=tls,
            socket_timeout=CONNECT_SECONDS,
            stack_timeout=2 * CONNECT_SECONDS,
            blocked_connection_timeout=ANSWER_SECONDS,
        )
        with self._told():
            self._connection = pika.BlockingConnection(terms)
            self._channel = self._connection.channel()
            self._channel.basic_qos(prefetch_count=self.batch_max)
        self.left()

    def take(self, count: int) -> list[Message]:
        messages = []
        with self._told():
            for method, properties, body in self._channel.consume(
                self.queue, inactivity_timeout=POLL_SECONDS
            ):
                if method is not None:
                    messages.append(self._message(method, properties, body))
                if method is None or len(messages) == count:
                    break
        return messages

    def _message(self, method: Any, properties: Any, body: bytes) -> Message:
        message = Message(method.delivery_tag, body, is_first=not method.redelivered)
        if properties.message_id:
            digest = hashlib.sha256(body).hexdigest()[:16]
            message.identity = f"{digest}:{properties.message_id}"
        if properties.expiration:
            message.ttl = max(1, -(-int(properties.expiration) // 1000))
        if self._with_headers:
            found = {f"amqp-{name.replace('_', '-')}": getattr(properties, name) for name in PROPERTIES}
            if method.exchange:
                found |= {"amqp-exchange": method.exchange, "amqp-routing-key": method.routing_key}
            found |= properties.headers or {}
            message.headers = {name: _text(value) for name, value in found.items() if value is not None}
        return message

    def settle(self, messages: Sequence[Message]) -> None:
        with self._told():
            self._channel.basic_ack(messages[-1].handle, multiple=True)
        self.left()  # what is asked behind them is answered behind them

    def keep(self, messages: Sequence[Message]) -> None:
        with self._told():
            self._connection.process_data_events(0)

    def left(self) -> dict[str, int]:
        with self._told():
            answer = self._channel.queue_declare(self.queue, passive=True)
        return {"ready": answer.method.message_count}

    def close(self) -> None:
        if self._connection is not None:
            with suppress(self._pika.exceptions.AMQPError, OSError):
                self._connection.close()
            self._connection = None

    @contextmanager
    def _told(self) -> Iterator[None]:
        errors = self._pika.exceptions
        try:
            yield
        except (errors.ProbableAuthenticationError, errors.AuthenticationError):
            who = self.place.user or "guest"
            raise Refuses(
                f"{self.name}: RabbitMQ refuses user {who!r}; give the password in {PASSWORD_VARIABLE}"
            ) from None
        except errors.ProbableAccessDeniedError as error:
            raise Refuses(f"{self.name}: no access to vhost {self._vhost!r}: {_said(error)}") from None
        except errors.ChannelClosedByBroker as error:
            if error.reply_code == LATE:
                raise Away(f"{self.name}: RabbitMQ says {_said(error)}") from None
            raise Refuses(f"{self.name}: RabbitMQ says {_said(error)}") from None
        except (errors.AMQPError, OSError) as error:
            raise Away(f"{self.name}: {_said(error)}") from None


def _said(error: Exception) -> str:
    return printable(getattr(error, "reply_text", "") or str(error) or "it does not answer")


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
