"""What a cluster's log is called in JetStream: its streams and their subjects.

Every file of the log has a subject of its own, so that it can be read, and taken out, by itself.
"""

import re
from dataclasses import dataclass
from typing import Any, Final

from penstock.errors import PenstockError

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
SECOND_NS: Final = 1_000_000_000


class LogNameError(PenstockError, ValueError):
    """A log cannot be called that."""


@dataclass(frozen=True, slots=True)
class LogNames:
    """The names that belong to one log."""

    log: str = "penstock"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.log):
            raise LogNameError(
                f"{self.log!r} cannot name a cluster's log: up to 32 small letters, digits and hyphens"
            )

    @property
    def stream(self) -> str:
        return f"PENSTOCK_{self.log}"

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
        return f"penstock.{self.log}.file.>"

    def file(self, name: str) -> str:
        """The subject of one file. Its dots stay: they only make it a longer subject."""
        return f"penstock.{self.log}.file.{name}"

    def name_of(self, subject: str) -> str:
        """The file of a subject."""
        return subject.removeprefix(f"penstock.{self.log}.file.")

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

    def all_settings(self, replicas: int) -> tuple[dict[str, Any], ...]:
        return self.stream_settings(replicas), self.state_settings(replicas), self.key_settings(replicas)
