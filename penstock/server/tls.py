"""TLS of the broker's own doors, from their settings."""

import ssl

from penstock.common.tls import make_context
from penstock.server.settings import HttpSettings, Listener


def server_context(door: Listener | HttpSettings) -> ssl.SSLContext | None:
    """What connections to a listener, or to the HTTP API, are encrypted with; None where it has no TLS."""
    if door.tls_certificate is None or door.tls_key is None:
        return None
    if isinstance(door, HttpSettings):
        return make_context(f"{door.place}: [http]", door.tls_certificate, door.tls_key)
    owner = f"{door.place}: {door.setting}"
    return make_context(owner, door.tls_certificate, door.tls_key, door.tls_client_ca)
