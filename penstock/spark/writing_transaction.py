"""Transaction: one transaction of a broker, as the processes of a Spark job take part in it.

    stage    a task hands over rows; what it gets is the stage's id
    commit   the driver says which stages count
    abort    the driver gives up

Every call may be repeated, and is, where an answer was lost (`api.py`): the worst that comes of it is a stage
that nobody names, which goes away with the commit. Where the broker has no room it is asked again for
`retrySeconds`: consumers make some.

Rules that always hold:
  * A commit that returns is durable. One that raises is not known to have failed, unless the broker said so;
    the text says how to have the rows once all the same.
  * One that takes longer than an answer may is asked about, and waited for.
  * An abort raises nothing: whoever aborts has an error already, and the broker tidies up by itself.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Final, TypeVar

from penstock.spark.api import ARROW_MEDIA, Broker, BrokerError, Patience, Refused, Unreachable

NO_ROOM: Final = frozenset({"queue-full", "disk-full"})

log = logging.getLogger("penstock.spark")

T = TypeVar("T")


class CommitUnknown(BrokerError):
    """Nobody can say whether it is committed, or it is committed later."""


class Transaction:
    def __init__(self, broker: Broker, key: str, dead: str | None = None, redrive: bool = False) -> None:
        self._broker = broker
        self._key = key
        self._dead = dead  # its messages are dead letters from the beginning, for this reason
        self._redrive = redrive  # they are repaired payloads of dead letters

    def stage(self, body: memoryview, queue: str | None) -> str:
        """The id of a stage with these rows, an Arrow stream. `queue` is that of all, unless they say."""
        query: dict[str, object] = {"transaction": self._key, "queue": queue, "dead": self._dead}
        if self._redrive:
            query["redrive"] = "true"
        answer = self._when_there_is_room(
            lambda: self._broker.call("POST", ("stages",), query, body, ARROW_MEDIA)
        )
        return str(answer["stage"])

    def check_queue(self, queue: str, identity: str) -> None:
        """Whether that queue is the one that has its name; a broker that does not say deletes none."""
        there = self._broker.get("queues", queue).get("identity", identity)
        if there != identity:
            raise BrokerError(
                f"queue {queue!r} was deleted, and another of that name stands now: these dead letters were "
                f"those of {identity}, and that is {there}; nothing is written"
            )

    def commit(self, stages: Sequence[str], again: str) -> None:
        """Store these stages. `again` is how to repeat it, as in "do this, and rows are" (stored once)."""
        while True:
            try:
                answer = self._when_there_is_room(
                    lambda: self._broker.post(
                        "transactions", fields={"transaction": self._key, "stages": list(stages)}
                    )
                )
            except (Unreachable, Refused) as error:
                if self._is_on_its_way(error, again):
                    continue
                raise
            break
        if answer["repeated"]:
            log.info("transaction %r was committed before: nothing is stored again", self._key)

    def _is_on_its_way(self, error: BrokerError, again: str) -> bool:
        """Whether it is worth to ask again for a commit that was not confirmed; False where it has failed."""
        if isinstance(error, Refused) and error.name not in NO_ROOM:
            return False
        standing = self._standing()
        if isinstance(error, Refused):
            if standing in ("open", "committed"):
                return standing == "committed"
        elif standing:
            # It answers, but not within the time that an answer may take: a large commit takes longer.
            return True
        raise CommitUnknown(
            f"transaction {self._key!r} may be committed, now or later, though the broker has not confirmed "
            f"it: {error}. To be sure, {again} stored once"
        ) from error

    def _standing(self) -> str:
        """How it stands: open, committing or committed; empty where nobody says."""
        try:
            with closing(self._broker.in_haste()) as broker:
                answer = broker.get("transactions", self._key)
        except Refused as error:
            return "open" if error.name == "transaction-not-found" else ""
        except BrokerError:
            return ""
        return "committing" if answer["committing"] else str(answer["state"])

    def abort(self) -> None:
        try:
            answer = self._broker.delete("transactions", self._key)
        except BrokerError as error:
            log.warning("transaction %r was not aborted: %s", self._key, error)
            return
        log.info("transaction %r is %s", self._key, answer["state"])

    def _when_there_is_room(self, call: Callable[[], T]) -> T:
        patience = Patience(self._broker.retry_seconds)
        while True:
            try:
                return call()
            except Refused as error:
                if error.name not in NO_ROOM:
                    raise
                patience.failed(error)
