"""What schemathesis has to be taught to call the API: bodies of many messages, as lines and as Arrow.

Loaded by its command line in `test_openapi.py`, through SCHEMATHESIS_HOOKS.
"""

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
