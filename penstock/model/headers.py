"""Headers: names and values that travel beside a message's payload.

A message keeps them as one text, JSON of an object of strings, as short as JSON allows; no text where it has
none. Whoever lets them in checks them by `encode_headers`; nobody else looks into the text but to show it.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

HEADERS_MAX: Final = 64
NAME_BYTES_MAX: Final = 255
HEADERS_BYTES_MAX: Final = 16 * 1024
"""Names and values of one message, all together."""

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def encode_headers(headers: Mapping[Any, Any]) -> bytes:  # whatever somebody has sent
    """The text that is kept of them. ValueError says what is wrong with them."""
    if not headers:
        return b""
    if len(headers) > HEADERS_MAX:
        raise ValueError(f"{len(headers)} headers; a message has at most {HEADERS_MAX}")
    wrong = [
        name for name, value in headers.items() if not (isinstance(name, str) and isinstance(value, str))
    ]
    if wrong:
        raise ValueError(f"header {wrong[0]!r:.100}: names and values are texts")
    size = 0
    for name, value in headers.items():
        try:
            name_bytes, value_bytes = len(name.encode()), len(value.encode())
        except UnicodeEncodeError:
            raise ValueError(
                f"header {name!r:.100}: it has half of a surrogate pair, which is no text"
            ) from None
        if not 0 < name_bytes <= NAME_BYTES_MAX:
            raise ValueError(f"header {name!r:.100}: a name has 1 to {NAME_BYTES_MAX} bytes")
        size += name_bytes + value_bytes
    if size > HEADERS_BYTES_MAX:
        raise ValueError(f"headers of {size} bytes; those of a message have at most {HEADERS_BYTES_MAX}")
    return _encode(dict(headers)).encode()


def decode_headers(text: bytes) -> dict[str, str]:
    """What `encode_headers` was given."""
    headers: dict[str, str] = json.loads(text) if text else {}
    return headers
