"""Who we are to a NATS server: user and password, a token, an nkey, or a file of credentials.

An nkey is an Ed25519 key written as text: base32 of a prefix, the key and a checksum. The server sends a
nonce and we sign it, so the seed never travels. A credentials file (`.creds`) holds a JWT, which says who we
are and who vouches for it, and the seed of the nkey that it was made out to.

How it fails: `CredentialsError`, with the file and what is wrong with it; never with what is secret in it.
"""

import base64
import binascii
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import PenstockError

_SEED_PREFIX = 18 << 3  # "S"
_USER_PREFIX = 20 << 3  # "U"
_KEY_BYTES = 32
_SECTION = re.compile(r"-{3,}BEGIN ([A-Z ]+)-{3,}\s+(\S+)\s+-{3,}END \1-{3,}")


class CredentialsError(PenstockError):
    """Credentials that cannot be used."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """At most one way to say who we are; nothing of it is shown."""

    user: str = ""
    password: str = ""
    token: str = ""
    seed: str = ""
    jwt: str = ""

    def __repr__(self) -> str:
        kinds = (name for name in ("user", "token", "jwt", "seed") if getattr(self, name))
        return f"Credentials({next(kinds, 'none')})"

    def answer(self, nonce: str) -> dict[str, str]:
        """What CONNECT says to a server that sent this nonce."""
        if self.seed:
            public, signature = _sign(self.seed, nonce.encode())
            who = {"jwt": self.jwt} if self.jwt else {"nkey": public}
            return {**who, "sig": signature}
        if self.token:
            return {"auth_token": self.token}
        if self.user:
            return {"user": self.user, "pass": self.password}
        return {}


def read_credentials(path: Path) -> Credentials:
    """A `.creds` file, or a file with nothing but the seed of an nkey."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CredentialsError(
            f"credentials {str(path)!r} cannot be read ({error}); name a file that can"
        ) from None
    sections = dict(_SECTION.findall(text))
    seed = sections.get("USER NKEY SEED", "" if sections else text.strip())
    jwt = sections.get("NATS USER JWT", "")
    if not seed or (sections and not jwt):
        raise CredentialsError(
            f"credentials {str(path)!r} hold no user's JWT and seed; name a .creds file or a seed's"
        )
    try:
        _sign(seed, b"")
    except CredentialsError as error:
        raise CredentialsError(f"credentials {str(path)!r}: {error}") from None
    return Credentials(seed=seed, jwt=jwt)


def _sign(seed: str, nonce: bytes) -> tuple[str, str]:
    """The public key of a seed, and its signature of a nonce, both as they travel."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError:
        raise CredentialsError(
            "nkeys need the package cryptography; install it with: pip install 'penstock[nats]'"
        ) from None
    key = Ed25519PrivateKey.from_private_bytes(_decode_seed(seed))
    body = bytes((_USER_PREFIX,)) + key.public_key().public_bytes_raw()
    public = base64.b32encode(body + _checksum(body)).rstrip(b"=").decode()
    return public, base64.urlsafe_b64encode(key.sign(nonce)).rstrip(b"=").decode()


def _decode_seed(seed: str) -> bytes:
    try:
        raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
    except (binascii.Error, ValueError):
        raise CredentialsError("the seed is no base32 text; copy it again") from None
    body, checksum = raw[:-2], raw[-2:]
    if len(body) != _KEY_BYTES + 2 or body[0] & 0xF8 != _SEED_PREFIX or checksum != _checksum(body):
        raise CredentialsError("the seed is damaged or is none; copy it again, it begins with SU")
    if (body[0] & 7) << 5 | body[1] >> 3 != _USER_PREFIX:
        raise CredentialsError("the seed is not that of a user; use one that begins with SU")
    return body[2:]


def _checksum(body: bytes) -> bytes:
    """CRC-16 as XMODEM has it, little endian."""
    return binascii.crc_hqx(body, 0).to_bytes(2, "little")
