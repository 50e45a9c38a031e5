"""What was taken, as its taker gets it: JSON, lines and Arrow say the same."""

import base64
import json
from array import array
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from penstock.control.takes import Taken, TakenPart
from penstock.http.bodies.taken import encode_taken, form_of
from penstock.model.headers import encode_headers
from penstock.model.life import Reason
from tests.http.api import ARROW, NDJSON

JSON = "application/json"
TIME_US = 1_790_000_000_123_456
ORIGIN = b"abcdef000001000001"


def part(*payloads: bytes, first: int = 5, **columns: Any) -> TakenPart:
    bounds = array("i", [0])
    for payload in payloads:
        bounds.append(bounds[-1] + len(payload))
    plain = TakenPart(
        first, ORIGIN, TIME_US, "http", Reason.NONE, [], bounds, b"".join(payloads), None, None, None, None
    )
    return plain._replace(**columns)


def encoded(media: str, *parts: TakenPart, dead: bool = False) -> list[dict[str, Any]]:
    """What a caller reads, with times and values as Arrow has them."""
    body = encode_taken(Taken(TIME_US + 60_000_000, list(parts)), media, dead=dead)
    if media == ARROW:
        table = pa.ipc.open_stream(body).read_all()
        return [{**row, "headers": dict(row["headers"])} for row in table.to_pylist()]
    rows: list[dict[str, Any]]
    if media == NDJSON:
        rows = [json.loads(line) for line in body.splitlines()]
        assert body.count(b"\n") == len(rows)
    else:
        fields = json.loads(body)
        assert fields.keys() == {"messages"}
        rows = fields["messages"]
    for row in rows:
        assert ("value" in row) != ("value_base64" in row)
        if "value" in row:
            row["value"] = row["value"].encode()
        else:
            row["value"] = base64.b64decode(row.pop("value_base64"))
            with pytest.raises(UnicodeDecodeError):
                row["value"].decode()
        for name in ("timestamp", "expires", "lease_ends"):
            if row[name] is not None:
                row[name] = datetime.fromisoformat(row[name])
    return rows


def moment(after_us: int = 0) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=TIME_US + after_us)


def row(offset: int, value: bytes, **fields: Any) -> dict[str, Any]:
    return {
        "offset": offset,
        "id": f"{ORIGIN.decode()}{offset:014x}",
        "value": value,
        "attempts": 1,
        "headers": {},
        "timestamp": moment(),
        "expires": None,
        "lease_ends": moment(60_000_000),
        "retries": None,
        **fields,
    }


@pytest.mark.parametrize("media", [JSON, NDJSON, ARROW])
class TestForms:
    def test_nothing(self, media: str) -> None:
        assert encoded(media) == encoded(media, dead=True) == []

    def test_plain_messages(self, media: str) -> None:
        assert encoded(media, part(b"a", b"", b'"\\\n\x00\x7f')) == [
            row(5, b"a"),
            row(6, b""),
            row(7, b'"\\\n\x00\x7f'),
        ]

    def test_payloads_of_any_bytes(self, media: str) -> None:
        payloads = ["é€\u2028😀".encode(), b"\xff", b"plain", "é".encode()[:1], bytes(range(256))]
        assert [it["value"] for it in encoded(media, part(*payloads))] == payloads

    def test_everything_that_a_message_can_have(self, media: str) -> None:
        headers = {"traceparent": "00-é", 'a"b': "\n"}
        full = part(
            b"a",
            b"b",
            attempts=array("i", [0, 4]),
            expires_us=array("q", [TIME_US + 1_000_000, 0]),
            retries=array("h", [-1, 255]),
            headers=[b"", encode_headers(headers)],
        )
        assert encoded(media, full, part(b"c", first=1 << 55, expires_us=array("q", [-1]))) == [
            row(5, b"a", expires=moment(1_000_000)),
            row(6, b"b", attempts=5, retries=255, headers=headers),
            row(1 << 55, b"c"),
        ]

    def test_dead_letters(self, media: str) -> None:
        rejected = part(b"a", b"b", b"c", reason=Reason.REJECTED, whys=[(5, 6, 'too "large"'), (7, 9, "é")])
        expired = part(b"d", first=20, reason=Reason.EXPIRED)
        assert encoded(media, rejected, expired, dead=True) == [
            row(5, b"a", reason="rejected", why='too "large"'),
            row(6, b"b", reason="rejected", why=None),
            row(7, b"c", reason="rejected", why="é"),
            row(20, b"d", reason="expired", why=None),
        ]

    def test_what_expires_after_the_end_of_all_dates(self, media: str) -> None:
        (message,) = encoded(media, part(b"a", expires_us=array("q", [2**62])))
        assert message["expires"].year == 9999


def test_types_of_arrow() -> None:
    body = encode_taken(Taken(0, []), ARROW, dead=True)
    schema = pa.ipc.open_stream(body).schema
    moments = pa.timestamp("us", tz="UTC")
    assert dict(zip(schema.names, schema.types, strict=True)) == {
        "offset": pa.int64(),
        "id": pa.string(),
        "value": pa.binary(),
        "attempts": pa.int32(),
        "headers": pa.map_(pa.string(), pa.string()),
        "timestamp": moments,
        "expires": moments,
        "lease_ends": moments,
        "retries": pa.int32(),
        "reason": pa.string(),
        "why": pa.string(),
    }


@pytest.mark.parametrize(
    ("accept", "media"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("text/html, */*;q=0.5", JSON),
        (NDJSON, NDJSON),
        ("Application/X-NDJSON; q=1", NDJSON),
        (f"text/plain, {ARROW}, {JSON}", ARROW),
        (f"{JSON},{ARROW}", JSON),
    ],
)
def test_the_form_that_is_asked_for(accept: str, media: str) -> None:
    assert form_of(accept) == media
