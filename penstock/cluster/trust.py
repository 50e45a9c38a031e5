"""Trust: how the front-ends of a cluster know each other, at every link of the relay.

A cluster has a key: 32 random bytes, made by its first front-end and kept in a stream that only front-ends
may read (`log/jetstream/names.py`). Nothing that opens a link stands anywhere else, and the key never travels
over one.

    TLS 1.3, both ways    with the certificates that `relay-` settings name; without them, with one that
                          follows from the key, so that whoever has its private half has the key
    HELLO                 the follower: who it is, whom it means, a nonce
    CHALLENGE             the leader: who it is, a nonce, and its proof
    PROOF                 the follower's
    WELCOME               or why not (`frames.py`)

Rules that always hold:
  * A proof is an HMAC by the key over both nonces, both ids, the term, the kind of the link, the certificate
    that the leader has shown, and the side that it is of. So none of another link, of the other side, or of
    somebody in between is worth anything.
  * Nothing is heard of a peer before its proof, and nothing is said to one but that.

How it fails: `SettingsError` for files that cannot be used; `PeerViolation` for a peer that does not know the
key.
"""

import asyncio
import hashlib
import hmac
import os
import secrets
import ssl
from typing import Final, NamedTuple

from penstock.cluster.frames import (
    MAGIC,
    VERSION,
    Frame,
    Hello,
    Kind,
    decode_hello,
    decode_json,
    encode_frame,
    encode_hello,
    encode_json,
    violation,
)
from penstock.common.address import TcpAddress
from penstock.common.tls import peer_context
from penstock.log.jetstream.api import JetStream
from penstock.log.jetstream.errors import JetStreamError, JetStreamTrouble, passes
from penstock.log.jetstream.names import LogNames

KEY_BYTES: Final = 32
ANOTHER_KEY: Final = (
    "it is of another cluster or version, or has other certificates; run one Penstock everywhere, with the "
    "same NATS servers, [cluster] name and relay- settings, and start it again if the key was made anew"
)
_KEY_ATTEMPTS: Final = 20
_KEY_SECONDS: Final = 0.25
_LEADER, _FOLLOWER = "leader", "follower"


class Files(NamedTuple):
    """What `relay-certificate`, `relay-key` and `relay-ca` name."""

    certificate: str
    key: str
    ca: str


async def cluster_key(api: JetStream, names: LogNames) -> bytes:
    """The key that the cluster has; made now, where it has none."""
    for _ in range(_KEY_ATTEMPTS):
        stored = await api.last(names.key_stream, names.key)
        if stored is not None and len(stored.payload) == KEY_BYTES:
            return stored.payload
        if stored is not None:
            raise JetStreamTrouble(
                f"stream {names.key_stream}: what it holds is no key; stop all front-ends and delete it: the "
                "next one to start makes another"
            )
        try:
            await api.put(names.key, secrets.token_bytes(KEY_BYTES), last_seq=0, stream=names.key_stream)
        except JetStreamTrouble as error:
            was_first = isinstance(error, JetStreamError) and error.wrong_last  # somebody else
            if not was_first and not passes(error):
                raise
            await asyncio.sleep(_KEY_SECONDS)
    raise JetStreamTrouble(f"stream {names.key_stream}: the cluster's key can neither be read nor made")


class Trust:
    """What a front-end shows to others, and asks of them."""

    def __init__(self, key: bytes, files: Files | None = None) -> None:
        self._proofs = _derived(key, b"proof")
        if files is not None:
            self.server, self.client = (peer_context("[cluster]", *files, server=it) for it in (True, False))
            with open(files.certificate, encoding="ascii", errors="replace") as file:
                _, begin, rest = file.read().partition(ssl.PEM_HEADER)
            text = begin + rest.partition(ssl.PEM_FOOTER)[0] + ssl.PEM_FOOTER
            self.certificate = ssl.PEM_cert_to_DER_cert(text)
        else:
            self.certificate, private = _certificate(_derived(key, b"certificate"))
            self.server, self.client = (
                _own_context(self.certificate, private, side)
                for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
            )
        self.server.num_tickets = 0  # every link is a handshake of its own

    def proof(self, side: str, hello: Hello, leader: str, nonce: str, certificate: bytes) -> str:
        said = [
            MAGIC,
            VERSION,
            side,
            *hello.said().values(),
            leader,
            nonce,
            hashlib.sha256(certificate).hexdigest(),
        ]
        return hmac.digest(self._proofs, encode_json({"said": said}), "sha256").hex()


class Leader(NamedTuple):
    """Whom a follower means to reach, and how it knows that it has."""

    address: TcpAddress
    id: str
    term: int
    trust: Trust


class Asking:
    """A follower's half of a greeting."""

    def __init__(self, leader: Leader, hello: Hello) -> None:
        self._leader = leader
        self._hello = hello._replace(nonce=secrets.token_hex(KEY_BYTES))

    def hello(self) -> bytes:
        return encode_hello(self._hello)

    def prove(self, frame: Frame, seen: bytes) -> bytes:
        """What to answer to a challenge; a violation where whoever sent it, and has shown the certificate
        that was `seen`, is not that leader."""
        if frame.kind is not Kind.CHALLENGE:
            raise violation(
                f"a leader that begins with {frame.kind.name}, not with CHALLENGE", frame.position
            )
        said = decode_json(frame)
        leader, nonce = str(said.get("leader")), str(said.get("nonce"))
        trust = self._leader.trust
        if not _same(said.get("proof"), trust.proof(_LEADER, self._hello, leader, nonce, seen)):
            raise violation(f"a leader that does not know the cluster's key: {ANOTHER_KEY}", frame.position)
        if leader != self._leader.id:
            raise violation(f"front-end {leader}, where {self._leader.id} was expected", frame.position)
        proof = trust.proof(_FOLLOWER, self._hello, leader, nonce, seen)
        return encode_frame(Kind.PROOF, encode_json({"proof": proof}))


class Answering:
    """A leader's half."""

    def __init__(self, trust: Trust, leader: str) -> None:
        self._trust = trust
        self._leader = leader
        self._nonce = secrets.token_hex(KEY_BYTES)
        self._hello: Hello | None = None

    def hear(self, frame: Frame) -> bytes | Hello:
        """What to answer to a hello; or, once its proof is there, who that was."""
        if self._hello is None:
            self._hello = decode_hello(frame)
            fields = {"leader": self._leader, "nonce": self._nonce, "proof": self._proof(_LEADER)}
            return encode_frame(Kind.CHALLENGE, encode_json(fields))
        if frame.kind is not Kind.PROOF:
            raise violation(f"a peer that says {frame.kind.name} where its PROOF is due", frame.position)
        if not _same(decode_json(frame).get("proof"), self._proof(_FOLLOWER)):
            raise violation(f"a peer that does not know the cluster's key: {ANOTHER_KEY}", frame.position)
        return self._hello

    def _proof(self, side: str) -> str:
        assert self._hello is not None
        return self._trust.proof(side, self._hello, self._leader, self._nonce, self._trust.certificate)


def _same(said: object, due: str) -> bool:
    return hmac.compare_digest(str(said).encode(), due.encode())


def shown(transport: asyncio.BaseTransport) -> bytes:
    """The certificate of who is at the other end."""
    return transport.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""


# --- a certificate that follows from the key --------------------------------------------------------------


def _derived(key: bytes, purpose: bytes) -> bytes:
    return hmac.digest(key, b"penstock relay " + purpose, "sha256")


_ED25519: Final = bytes.fromhex("300506032b6570")  # the algorithm's identifier
_PRIVATE: Final = bytes.fromhex("302e020100300506032b657004220420")  # PKCS #8, up to the seed
_ALWAYS: Final = b"\x17\x0d000101000000Z", b"\x18\x0f99991231235959Z"


def _certificate(seed: bytes) -> tuple[bytes, bytes]:
    """A certificate that has signed itself, and its private key, both as DER. Everybody who has the seed
    makes the same."""
    from nacl.signing import SigningKey  # comes with nkeys; whoever has no cluster needs neither

    key = SigningKey(seed)
    attribute = _der(0x30, bytes.fromhex("0603550403"), _der(0x0C, b"penstock relay"))
    name = _der(0x30, _der(0x31, attribute))
    public = _der(0x30, _ED25519, _der(0x03, b"\0", bytes(key.verify_key)))
    body = _der(0x30, bytes.fromhex("020101"), _ED25519, name, _der(0x30, *_ALWAYS), name, public)
    return _der(0x30, body, _ED25519, _der(0x03, b"\0", key.sign(body).signature)), _PRIVATE + seed


def _der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    head = (len(body),) if len(body) < 128 else (0x81, len(body))
    return bytes((tag, *head)) + body


def _own_context(certificate: bytes, private: bytes, side: "ssl._SSLMethod") -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    shown = ssl.DER_cert_to_PEM_cert(certificate)
    context.load_verify_locations(cadata=shown)
    secret = ssl.DER_cert_to_PEM_cert(private).replace(" CERTIFICATE-", " PRIVATE KEY-")
    # OpenSSL reads keys from files alone: this one is of memory.
    file = os.memfd_create("penstock relay", os.MFD_CLOEXEC)
    try:
        os.write(file, (secret + shown).encode())
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context
