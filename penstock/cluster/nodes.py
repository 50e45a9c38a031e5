"""How to reach the NATS servers that the settings name, and what this front-end is called there.

Here the files are opened that `[cluster]` names: credentials and certificates. Nothing here connects.

How it fails: `SettingsError`, with the setting, the file and what is wrong with it; nothing secret is shown.
"""

import os
import re
import socket
from pathlib import Path

from penstock.cluster.trust import Files
from penstock.common.given import SettingsError
from penstock.common.tls import client_context
from penstock.log.jetstream.credentials import Credentials, CredentialsError, read_credentials
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.options import LinkOptions
from penstock.log.jetstream.servers import Server, parse_servers
from penstock.model.shards import SHARDS_DEFAULT
from penstock.server.settings import ClusterSettings, Settings

_ID_CHARACTERS_MAX = 64
PING_SECONDS = 0.6
"""A server that is silent for twice as long is left for another, before a leader must doubt that it leads."""


def servers_of(settings: Settings) -> list[Server]:
    """The servers that `engine` names."""
    if isinstance(settings.engine, str):
        raise SettingsError(f"engine = {settings.engine!r}: names no NATS server; use nats://HOST:PORT")
    return parse_servers(",".join(settings.engine))


def front_end_id(cluster: ClusterSettings) -> str:
    """What this front-end is called: as the settings say, or by its host and its process."""
    if cluster.id is not None:
        return cluster.id
    process = f"-{os.getpid()}"
    host = re.sub("[^A-Za-z0-9_-]", "-", socket.gethostname())
    return host[: _ID_CHARACTERS_MAX - len(process)] + process


def shards_wanted(settings: Settings) -> int:
    """How many logs a cluster gets that is new."""
    return settings.cluster.shards or SHARDS_DEFAULT


def wire_options(cluster: ClusterSettings) -> LinkOptions:
    """How to connect to each of them."""
    encrypted = cluster.tls_ca is not None or cluster.tls_certificate is not None
    tls = (
        client_context("[cluster]", cluster.tls_ca, cluster.tls_certificate, cluster.tls_key)
        if encrypted
        else None
    )
    return LinkOptions(
        name=f"penstock {front_end_id(cluster)}",
        credentials=_credentials(cluster),
        tls=tls,
        answers=LogNames(cluster.name).answers,
        ping_seconds=PING_SECONDS,
    )


def relay_files(cluster: ClusterSettings) -> Files | None:
    """The certificates of the relay; the settings name all of them, or none."""
    files = cluster.relay_certificate, cluster.relay_key, cluster.relay_ca
    return Files(*(str(file) for file in files)) if None not in files else None


def _credentials(cluster: ClusterSettings) -> Credentials | None:
    if cluster.credentials is None:
        return None
    try:
        return read_credentials(Path(cluster.credentials))
    except CredentialsError as error:
        raise SettingsError(f"[cluster] credentials: {error}") from None
