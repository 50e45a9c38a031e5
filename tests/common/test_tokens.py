"""Tokens and their hashes."""

import pytest

from penstock.common.tokens import check_hash, fits, hash_token, new_token, owner_of


def test_a_token_fits_its_hash_and_no_other() -> None:
    token, other = new_token("ann.b"), new_token("ann.b")
    assert token != other
    assert owner_of(token) == "ann.b"
    assert len(token) >= len("ann.b.") + 43
    hashed = hash_token(token)
    check_hash(hashed)
    assert hash_token(token) != hashed  # the salt
    assert fits(token, hashed)
    assert not fits(other, hashed)
    assert token not in hashed


def test_a_text_without_an_owner() -> None:
    assert owner_of("0123456789abcdef") == ""


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "scrypt",
        "md5:1:2:3:4:5",
        "scrypt:16384:8:1:c2FsdHNhbHQ:",
        "scrypt:16383:8:1:c2FsdHNhbHQ:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
        "scrypt:1099511627776:8:1:c2FsdHNhbHQ:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
        "scrypt:16384:8:1:x:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
        "scrypt:16384:8:a:c2FsdHNhbHQ:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
    ],
)
def test_what_is_no_hash(wrong: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        check_hash(wrong)
