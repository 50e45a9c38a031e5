"""What a message of kombu is as a message of a queue: JSON with its properties, its headers and its body.

    {"body": text, "content-type": …, "content-encoding": …, "headers": {…}, "properties": {…}}

A body that is UTF-8 stands in it as it is, so that people can read it; others are in Base64
(`properties.body_encoding`). A task that is not to run before a time waits in the broker, as a delay.

Messages that are no such JSON are from others, and their own headers make them what they are to kombu:
`content-type` (text/plain where there is none), and for Celery `task` and `id`.
"""

import math
from base64 import b64decode
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from kombu.utils.json import dumps, loads

from penstock.model.batch import DELAY_SECONDS_MAX


def payload_of(message: Mapping[str, Any]) -> bytes:
    text: str = dumps(message)
    return text.encode()


def ttl_of(message: Mapping[str, Any], queue_ttl_ms: int | None) -> int | None:
    """Seconds, whole as the broker has them: the shorter of the message's own and its queue's."""
    given = [ms for ms in (message["properties"].get("expiration"), queue_ttl_ms) if ms is not None]
    return max(math.ceil(min(int(ms) for ms in given) / 1000), 1) if given else None


def delay_of(message: Mapping[str, Any]) -> str | None:
    """Seconds until its `eta`. One without a time zone a worker understands, and holds it for so long."""
    eta = message["headers"].get("eta")
    try:
        due = datetime.fromisoformat(eta) if isinstance(eta, str) else None
    except ValueError:
        return None
    if due is None or due.tzinfo is None:
        return None
    seconds = (due - datetime.now(UTC)).total_seconds()
    return f"{min(seconds, DELAY_SECONDS_MAX):.3f}" if seconds > 0 else None


def message_of(fields: Mapping[str, Any], queue: str) -> dict[str, Any]:
    """What a channel makes a message from, of a row of `take`."""
    try:
        raw = _own(fields)
    except Exception:  # noqa: BLE001 - whatever it is that somebody sends, no worker may die of it
        raw = _foreign(fields, queue)
    properties = raw["properties"]
    properties["delivery_tag"] = f"{fields['id']}.{fields['attempts']}"
    properties["delivery_info"]["redelivered"] = fields["attempts"] > 1
    return raw


def _own(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Raises nearly anything where it is none of ours."""
    raw: dict[str, Any] = loads(fields["value"])
    properties = raw["properties"]
    properties["delivery_info"].items()
    (raw["headers"] or {}).items()
    if properties.get("body_encoding") == "base64":
        raw["body"] = b64decode(raw["body"], validate=True)
    elif not isinstance(raw["body"], str):
        raise TypeError
    properties["body_encoding"] = None
    return raw


def _foreign(fields: Mapping[str, Any], queue: str) -> dict[str, Any]:
    headers: Mapping[str, str] = fields["headers"]
    is_text = "value" in fields
    return {
        "body": fields["value"] if is_text else b64decode(fields["value_base64"]),
        "content-type": headers.get("content-type", "text/plain" if is_text else "application/data"),
        "content-encoding": "utf-8" if is_text else "binary",
        "headers": dict(headers),
        "properties": {
            "correlation_id": headers.get("id"),
            "delivery_info": {"exchange": "", "routing_key": queue, "priority": 0},
        },
    }
