"""Headers: what goes in comes out; what is too much, or no text, is refused with a sentence that says so."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.headers import (
    HEADERS_BYTES_MAX,
    HEADERS_MAX,
    NAME_BYTES_MAX,
    decode_headers,
    encode_headers,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
names = texts.filter(lambda name: 0 < len(name.encode()) <= NAME_BYTES_MAX)


@given(st.dictionaries(names, texts, max_size=20))
def test_what_goes_in_comes_out_in_its_order(headers: dict[str, str]) -> None:
    text = encode_headers(headers)
    assert list(decode_headers(text).items()) == list(headers.items())
    assert (text == b"") == (not headers)
    if headers:
        assert json.loads(text) == headers


def test_the_text_is_as_short_as_json_allows() -> None:
    assert (
        encode_headers({"traceparent": "00-1", "größe": "5 €"})
        == '{"traceparent":"00-1","größe":"5 €"}'.encode()
    )
    assert encode_headers({}) == b""
    assert decode_headers(b"") == {}


@pytest.mark.parametrize(
    "headers",
    [
        {f"n{i}": "" for i in range(HEADERS_MAX)},
        {"n" * NAME_BYTES_MAX: ""},
        {"ü" * (NAME_BYTES_MAX // 2): "x"},
        {"n": "x" * (HEADERS_BYTES_MAX - 1)},
        {"n": '"' * (HEADERS_BYTES_MAX - 1)},  # By what they are, not by what they are written as.
        {"n": "€" * ((HEADERS_BYTES_MAX - 1) // 3)},
        {" ": "\n\0"},
    ],
)
def test_at_the_limit(headers: dict[str, str]) -> None:
    assert decode_headers(encode_headers(headers)) == headers


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({f"n{i}": "" for i in range(HEADERS_MAX + 1)}, "65 headers; a message has at most 64"),
        ({"": "x"}, "header '': a name has 1 to 255 bytes"),
        ({"n" * 256: "x"}, "a name has 1 to 255 bytes"),
        ({"ü" * 128: "x"}, "a name has 1 to 255 bytes"),
        ({"n": "x" * HEADERS_BYTES_MAX}, "headers of 16385 bytes; those of a message have at most 16384"),
        ({"a": "x" * 9000, "b": "x" * 9000}, "headers of 18002 bytes"),
        ({"n": "€" * 6000}, "headers of 18001 bytes"),
        ({"n": 1}, "header 'n': names and values are texts"),
        ({"n": None}, "header 'n': names and values are texts"),
        ({"n": ["x"]}, "header 'n': names and values are texts"),
        ({1: "x"}, "header 1: names and values are texts"),
        ({"n": b"x"}, "header 'n': names and values are texts"),
        ({"n": "\ud800"}, "half of a surrogate pair"),
        ({"\udfff": "x"}, "half of a surrogate pair"),
    ],
)
def test_what_is_refused(headers: dict[Any, Any], why: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the sentence is looked at below
        encode_headers(headers)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 200
