"""Tokens of users: random texts that name their owner, and the hashes by which settings know them.

    token   NAME.RANDOM: the name says whose hash to compare with, so that a wrong one costs one comparison
    hash    scrypt:N:R:P:SALT:DIGEST, in base64 without padding

The hash is slow on purpose (about 50 ms and 16 MiB): whoever gets hold of a settings file cannot try out
texts. Whoever checks a token remembers that it was right, and does not do so again.

How it fails: `ValueError`, for a text that is no such hash.
"""

import base64
import hashlib
import hmac
import secrets
from typing import Final

_KIND: Final = "scrypt"
_COST: Final = (1 << 14, 8, 1)
_COST_MAX: Final = (1 << 17, 16, 4)
_MEMORY_BYTES_MAX: Final = 512 << 20


def new_token(name: str) -> str:
    return f"{name}.{secrets.token_urlsafe(32)}"


def owner_of(token: str) -> str:
    """The name that a token claims to be of; empty: none."""
    return token.rpartition(".")[0]


def hash_token(token: str) -> str:
    salt = secrets.token_bytes(16)
    return ":".join((_KIND, *map(str, _COST), _text(salt), _text(_digest(token, salt, _COST))))


def check_hash(hashed: str) -> None:
    """Whether it is one that can be compared with."""
    _parts(hashed)


def fits(token: str, hashed: str) -> bool:
    """Whether this is the token that the hash was made of. Takes its time: not for the loop."""
    cost, salt, digest = _parts(hashed)
    return hmac.compare_digest(_digest(token, salt, cost), digest)


def _parts(hashed: str) -> tuple[tuple[int, int, int], bytes, bytes]:
    kind, *rest = hashed.split(":")
    if kind != _KIND or len(rest) != 5:
        raise ValueError("it has another form")
    n, r, p = map(int, rest[:3])
    salt, digest = map(_bytes, rest[3:])
    bounded = all(1 <= it <= most for it, most in zip((n, r, p), _COST_MAX, strict=True))
    if not bounded or n < 2 or n & (n - 1) or len(salt) < 8 or len(digest) != 32:
        raise ValueError("its numbers are out of bounds")
    return (n, r, p), salt, digest


def _digest(token: str, salt: bytes, cost: tuple[int, int, int]) -> bytes:
    n, r, p = cost
    raw = token.encode("utf-8", "surrogateescape")
    return hashlib.scrypt(raw, salt=salt, n=n, r=r, p=p, maxmem=_MEMORY_BYTES_MAX, dklen=32)


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
