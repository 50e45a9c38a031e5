"""The settings of a cluster: what they add up to, which of them do not go together, what people should know.

Rules that always hold:
  * Where the engine is the embedded log, a cluster's settings are read and mean nothing: what does not go
    together is an error only where it matters.
  * A front-end that may come to lead is one that others can reach: where it listens on every network, it is
    told under which address.
  * Nothing here opens a file or a connection; `penstock.cluster.nodes` does.

How it fails: `SettingsError`, at the place of what is to blame.
"""

from collections.abc import Mapping
from typing import Any, Final

from penstock.common.address import TcpAddress, is_loopback
from penstock.common.given import Given, check_tls
from penstock.server.setting_kinds import EVERY_NETWORK, LOG
from penstock.server.settings import ClusterSettings, Settings

_TLS: Final = ("tls-certificate", "tls-key")
_RELAY: Final = ("relay-certificate", "relay-key", "relay-ca")


def cluster_settings(given: Mapping[str, Given], values: Mapping[str, Any]) -> ClusterSettings:
    """What `[cluster]` says (`values`, by field) with defaults for the rest; `given` is by label."""
    settings = ClusterSettings(**{name: value for name, value in values.items() if value is not None})
    if given["engine"].value == LOG:
        return settings
    tls = {name: given[f"[cluster] {name}"] for name in _TLS}
    check_tls({name: it for name, it in tls.items() if it.value is not None})
    relay = {name: given[f"[cluster] {name}"] for name in _RELAY}
    lacking = [name for name, it in relay.items() if it.value is None]
    if 0 < len(lacking) < len(_RELAY):
        named = next(it for it in relay.values() if it.value is not None)
        raise named.spot.wrong(f"it needs {' and '.join(lacking)} beside it; add that")
    if settings.listen.host in EVERY_NETWORK and settings.advertise is None:
        raise given["[cluster] listen"].spot.wrong(
            f"{settings.listen} does not say where other front-ends reach this one;"
            " set advertise under [cluster] to a HOST:PORT that they can"
        )
    return settings


def warnings(settings: Settings) -> list[str]:
    """What is allowed, but should be known to whoever starts a front-end with these settings."""
    if isinstance(settings.engine, str):
        return []
    found = []
    if settings.allow_unsafe_sync:
        found.append(
            "allow-unsafe-sync: nodes may not sync every write, and a power cut may then lose messages that"
            " were confirmed; set sync_interval: always in the jetstream block of every node, and leave this"
            " out"
        )
    reached = settings.cluster.advertise or settings.cluster.listen
    if is_loopback(reached) and not all(map(_is_here, settings.engine)):
        found.append(
            f"[cluster] listen: {reached} can be reached from this machine only, and the NATS servers are on"
            " others; where front-ends are too, set listen to an address that they reach"
        )
    return found


def _is_here(url: str) -> bool:
    # Whoever has no cluster loads nothing of it.
    from penstock.log.jetstream.servers import parse_server

    server = parse_server(url)
    return is_loopback(TcpAddress(server.host, server.port))
