"""What a cluster's logs are called in JetStream: their streams and their subjects.

Every file of a log has a subject of its own, so that it can be read, and taken out, by itself. A cluster with
one shard has one log, `PENSTOCK_NAME`; one with more has a log for each, `PENSTOCK_NAME_S00` and so on. The
state and the key are of the cluster.
"""

import os
import re
from dataclasses import dataclass
from typing import Any, Final

from penstock.errors import PenstockError

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
SECOND_NS: Final = 1_000_000_000
SHARDS_MAX: Final = 256


class LogNameError(PenstockError, ValueError):
    """A log cannot be called that."""


@dataclass(frozen=True, slots=True)
class LogNames:
    """The names that belong to one log: of a cluster with one shard, or of one of its shards."""

    log: str = "penstock"
    shard: int | None = None

    def __post_init__(self) -> None:
        if self.shard is not None and not 0 <= self.shard < SHARDS_MAX:
            raise LogNameError(f"a cluster has no shard {self.shard}: they are 0 to {SHARDS_MAX - 1}")
        if not _NAME.fullmatch(self.log):
            raise LogNameError(
                f"{self.log!r} cannot name a cluster's log: up to 32 small letters, digits and hyphens"
            )

    def of_shards(self, shards: int) -> "tuple[LogNames, ...]":
        """Those of all logs of the cluster."""
        if shards == 1:
            return (LogNames(self.log),)
        return tuple(LogNames(self.log, shard) for shard in range(shards))

    def folder(self, data: str) -> str:
        """Where a front-end with that data folder has its copy of this log."""
        return data if self.shard is None else os.path.join(data, f"shard-{self.shard:02d}")

    @property
    def _subjects(self) -> str:
        """All subjects of this log begin with it."""
        return f"penstock.{self.log}" if self.shard is None else f"penstock.{self.log}.s{self.shard:02d}"

    @property
    def stream(self) -> str:
        return f"PENSTOCK_{self.log}" if self.shard is None else f"PENSTOCK_{self.log}_S{self.shard:02d}"

    @property
    def state_stream(self) -> str:
        return f"PENSTOCK_{self.log}_STATE"

    @property
    def key_stream(self) -> str:
        return f"PENSTOCK_{self.log}_KEY"

    @property
    def key(self) -> str:
        """The subject of the cluster's key."""
        return f"penstock.{self.log}.key"

    @property
    def answers(self) -> str:
        """Under this, front-ends are answered: nobody else of the account may listen there."""
        return f"penstock.{self.log}.answer"

    @property
    def files(self) -> str:
        """The subjects of all files."""
        return f"{self._subjects}.file.>"

    def file(self, name: str) -> str:
        """The subject of one file. Its dots stay: they only make it a longer subject."""
        return f"{self._subjects}.file.{name}"

    def name_of(self, subject: str) -> str:
        """The file of a subject."""
        return subject.removeprefix(f"{self._subjects}.file.")

    def state(self, key: str) -> str:
        return f"penstock.{self.log}.state.{key}"

    def stream_settings(self, replicas: int) -> dict[str, Any]:
        return {
            "name": self.stream,
            "description": "the log of a Penstock cluster; written by its brokers alone",
            "subjects": [self.files],
            "retention": "limits",
            "storage": "file",
            "num_replicas": replicas,
            "discard": "new",
            "allow_direct": True,
            "duplicate_window": 120 * SECOND_NS,
        }

    def state_settings(self, replicas: int) -> dict[str, Any]:
        return {
            "name": self.state_stream,
            "description": "who leads a Penstock cluster, and who takes part",
            "subjects": [f"penstock.{self.log}.state.>"],
            "retention": "limits",
            "storage": "file",
            "num_replicas": replicas,
            "max_msgs_per_subject": 1,
            "allow_direct": True,
            "duplicate_window": 120 * SECOND_NS,
        }

    def key_settings(self, replicas: int) -> dict[str, Any]:
        """It takes one message, and gives it back to no purge: what was made first is the key."""
        return {
            "name": self.key_stream,
            "description": "what the front-ends of a Penstock cluster know each other by",
            "subjects": [self.key],
            "retention": "limits",
            "storage": "file",
            "num_replicas": replicas,
            "max_msgs": 1,
            "discard": "new",
            "allow_direct": False,
            "deny_delete": True,
            "deny_purge": True,
        }

    def all_settings(self, replicas: int, shards: int = 1) -> tuple[dict[str, Any], ...]:
        logs = (it.stream_settings(replicas) for it in self.of_shards(shards))
        return *logs, *self.cluster_settings(replicas)

    def cluster_settings(self, replicas: int) -> tuple[dict[str, Any], ...]:
        """Of what all its logs share."""
        return self.state_settings(replicas), self.key_settings(replicas)
