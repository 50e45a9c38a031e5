"""What schemathesis has to be taught to call the API: bodies of many messages, and not to wait for some.

Loaded by its command line in `test_openapi.py`, through SCHEMATHESIS_HOOKS.
"""

import contextlib
import io
import json
from typing import Any

import pyarrow as pa
import schemathesis


@schemathesis.serializer("application/x-ndjson")
def ndjson(context: schemathesis.SerializationContext, value: Any) -> bytes:  # whatever was generated
    """A text that was generated becomes a message; anything else is sent as it is, and must be refused."""
    line = {"value": value} if isinstance(value, str) else value
    return json.dumps(line).encode() + b"\n"


@schemathesis.serializer("application/vnd.apache.arrow.stream")
def arrow(context: schemathesis.SerializationContext, value: Any) -> bytes:
    """Text that was generated, as rows of one column."""
    sink = io.BytesIO()
    column = pa.array([repr(value).encode()], pa.binary())
    with pa.ipc.new_stream(sink, pa.schema({"value": pa.binary()})) as writer:
        writer.write_batch(pa.record_batch([column], names=["value"]))
    return sink.getvalue()


@schemathesis.hook
def before_load_schema(context: schemathesis.HookContext, raw_schema: dict[str, Any]) -> None:
    """Lists of ten thousand different things are not made up, which takes most of a minute:
    `test_transactions.py` has them."""
    parts: list[Any] = [raw_schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict) and part.get("uniqueItems"):
            del part["maxItems"]
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


@schemathesis.hook
def before_call(
    context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: dict[str, Any]
) -> None:
    """A taker that may wait does so for a moment: most queues that are made up have nothing to take."""
    with contextlib.suppress(KeyError, TypeError, ValueError):  # What is no number is refused.
        if case.path.endswith("/take") and 0 < float(case.query["wait"]) <= 30:
            case.query["wait"] = 0.01
