"""How to connect to NATS servers; the same for all of them."""

import ssl
from dataclasses import dataclass

from penstock.log.jetstream.credentials import Credentials


@dataclass(frozen=True, slots=True)
class LinkOptions:
    name: str = "penstock"  # what the server's lists call us
    credentials: Credentials | None = None
    tls: ssl.SSLContext | None = None  # None: what the system trusts
    answers: str = "_INBOX"  # what the subjects of answers begin with: who may listen there hears them
    connect_seconds: float = 5.0  # for one server, from the socket to its welcome
    ping_seconds: float = 2.0
