"""TLS of the broker's own doors, from their settings."""

from penstock.common.tls_files import TlsFiles
from penstock.server.settings import HttpSettings, Listener


def tls_files(door: Listener | HttpSettings) -> TlsFiles | None:
    """What connections to a listener, or to the HTTP API, are encrypted with; None where it has no TLS."""
    if door.tls_certificate is None or door.tls_key is None:
        return None
    if isinstance(door, HttpSettings):
        return TlsFiles(f"{door.place}: [http]", door.tls_certificate, door.tls_key)
    owner = f"{door.place}: {door.setting}"
    return TlsFiles(owner, door.tls_certificate, door.tls_key, door.tls_client_ca)
