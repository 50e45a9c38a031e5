"""Who we are to a NATS server, from a file: an nkey's seed, a credentials file (`.creds`), or USER:PASSWORD.

An nkey is an Ed25519 key. The server sends a nonce and nats-py signs it, so the seed never travels. A
credentials file holds a JWT, which says who we are and who vouches for it, and the seed of the nkey that it
was made out to. A user and a password, or a token, can stand in a server's address instead, where lists of
processes and files of settings show them.

How it fails: `CredentialsError`, with the file and what is wrong with it; never with what is secret in it.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import PenstockError

_SECTION = re.compile(r"-{3,}BEGIN ([A-Z ]+)-{3,}\s+(\S+)\s+-{3,}END \1-{3,}")
_CREDS = """\
-----BEGIN NATS USER JWT-----
{jwt}
------END NATS USER JWT------
-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""


class CredentialsError(PenstockError):
    """Credentials that cannot be used."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user's nkey, with a JWT or without one; or a name and a password. Nothing of it is shown."""

    seed: str = field(default="", repr=False)
    jwt: str = field(default="", repr=False)
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)

    @property
    def text(self) -> str:
        """As nats-py reads a credentials file."""
        return _CREDS.format(jwt=self.jwt, seed=self.seed)


def read_credentials(path: Path) -> Credentials:
    """A `.creds` file, or a file with nothing but the seed of an nkey, or a line USER:PASSWORD."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CredentialsError(
            f"credentials {str(path)!r} cannot be read ({error}); name a file that can"
        ) from None
    sections = dict(_SECTION.findall(text))
    user, colon, password = text.strip().partition(":")
    if not sections and colon and user and password and "\n" not in text.strip():
        return Credentials(user=user, password=password)
    seed = sections.get("USER NKEY SEED", "" if sections else text.strip())
    jwt = sections.get("NATS USER JWT", "")
    if not seed or (sections and not jwt):
        raise CredentialsError(
            f"credentials {str(path)!r} hold no user's JWT and seed; name a .creds file, a seed's, or one "
            "with a line USER:PASSWORD"
        )
    if not _is_users_seed(seed):
        raise CredentialsError(
            f"credentials {str(path)!r}: the seed is damaged, or is not that of a user; copy it again, it "
            "begins with SU"
        )
    return Credentials(seed, jwt)


def _is_users_seed(seed: str) -> bool:
    try:
        import nkeys
    except ImportError:
        raise CredentialsError(
            "nkeys need the package nkeys; install it with: pip install 'penstock[nats]'"
        ) from None
    try:
        prefix, key = nkeys.decode_seed(bytearray(seed.encode()))
        # Written again it must be the same: nkeys does not look at the checksum.
        return bool(prefix == nkeys.PREFIX_BYTE_USER and nkeys.encode_seed(key, prefix) == seed.encode())
    except (nkeys.NkeysError, ValueError):
        return False
