"""TLS: the context of a door of the broker, or of its way to others, from the files that its settings name.

TLS 1.2 or newer; of the ciphers of 1.2 a door has only those that keep the past safe when the key is lost.
With a client CA a client without a certificate that it signed is turned away in the handshake; without one,
nobody is asked for a certificate. What the system trusts plays no part at a door; on the way to others it
counts where no CA is named.

How it fails: `SettingsError`, with the door, the setting, the file and what is wrong with it. That comes
when a door is about to open, not when settings are read: reading them touches no other file.
"""

import re
import ssl
from typing import Final, NoReturn

from penstock.common.given import SettingsError

CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Of TLS 1.2; all that TLS 1.3 has are as good."""

_MISMATCHES = {
    "KEY_VALUES_MISMATCH",
    "KEY_TYPE_MISMATCH",
    "NO_CERTIFICATE_ASSIGNED",  # said of a key of another type: certificates are kept by type
}


def make_context(owner: str, certificate: str, key: str, client_ca: str | None = None) -> ssl.SSLContext:
    """The context that these files make; `owner` is what an error begins with: the place and the section."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    # A client of TLS 1.2 could otherwise make the broker shake hands for ever on one connection.
    context.options |= ssl.OP_NO_RENEGOTIATION
    _load_chain(context, owner, certificate, key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_trusted(context, owner, "tls-client-ca", client_ca)
    return context


def client_context(
    owner: str, ca: str | None = None, certificate: str | None = None, key: str | None = None
) -> ssl.SSLContext:
    """What a connection of ours to others is encrypted with; without a CA, the system says whom to trust."""
    context = ssl.create_default_context() if ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is not None:
        _load_trusted(context, owner, "tls-ca", ca)
    if certificate is not None and key is not None:
        _load_chain(context, owner, certificate, key)
    return context


def peer_context(owner: str, certificate: str, key: str, ca: str, *, server: bool) -> ssl.SSLContext:
    """Between equals (`relay-` settings): each shows a certificate of the CA, of whatever name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    _load_chain(context, owner, certificate, key, "relay")
    _load_trusted(context, owner, "relay-ca", ca)
    return context


def _load_chain(context: ssl.SSLContext, owner: str, certificate: str, key: str, prefix: str = "tls") -> None:
    # OpenSSL does not tell which of the two files it means, so the certificate is tried alone before.
    key_setting = f"{prefix}-key"
    _load_trusted(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), owner, f"{prefix}-certificate", certificate)
    _check_readable(owner, key_setting, key)

    def ask_for_passphrase() -> NoReturn:
        # Without this, OpenSSL would ask on the terminal and wait.
        raise _wrong(
            owner, key_setting, key, "is locked with a passphrase; unlock it: openssl pkey -in FILE -out NEW"
        )

    try:
        context.load_cert_chain(certificate, key, password=ask_for_passphrase)
    except ssl.SSLError as error:
        if error.reason in _MISMATCHES:
            problem = f"is not the key of the certificate {certificate!r}; name the one it was made with"
        else:
            problem = (
                f"cannot be used with {certificate!r} ({_reason(error)}); name a private key in PEM form"
            )
        raise _wrong(owner, key_setting, key, problem) from None


def _load_trusted(context: ssl.SSLContext, owner: str, setting: str, path: str) -> None:
    _check_readable(owner, setting, path)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        problem = f"holds no certificate that can be read ({_reason(error)}); name a file in PEM form"
        raise _wrong(owner, setting, path, problem) from None


def _check_readable(owner: str, setting: str, path: str) -> None:
    # The errors of the ssl module do not name the file.
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise _wrong(
            owner, setting, path, f"cannot be read ({error.strerror}); name a file that can"
        ) from None


def _reason(error: ssl.SSLError) -> str:
    """OpenSSL's words, without the place in its and Python's source."""
    words: str = error.reason or re.sub(r"^\[.*?\] | \(_ssl\.c:.*", "", str(error))
    return words.lower().replace("_", " ")


def _wrong(owner: str, setting: str, path: str, problem: str) -> SettingsError:
    return SettingsError(f"{owner} {setting}: {path!r} {problem}")
