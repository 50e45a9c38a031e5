"""Transactions over the queues of all loads of a site, and over quiet queues in its other logs.

At every front-end there is a writer, which does as docs/transactions.md tells users: it makes up a key,
stages its messages, commits the stages, and repeats each call, at one front-end after the other, until it
has an answer. By the number of the transaction it also

    stages messages that it does not name in the commit, as a task does that was run twice,
    commits again what it has staged anew, as one that does not know how it went: nothing may be added,
    aborts instead of committing.

What must be true of them is said, and judged, in `verdict.py`; their messages count among those of the loads.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from itertools import count, cycle
from typing import Any, Final
from urllib.parse import quote

from penstock.client.http_line import UNAVAILABLE
from tests.cluster.load import CLIENT_OPTIONS, PATIENCE_SECONDS, PAUSE_SECONDS, Load, read_log
from tests.cluster.processes import FrontEnd, Site
from tests.cluster.verdict import Transaction, judge_transactions
from tests.http.api import NDJSON, Api, Reply
from tests.server.harness import number_of, numbered, until

PACE_SECONDS: Final = 0.1
COMMITS_SOME: Final = 1
UNNAMED_EVERY, ANEW_EVERY, ABORTED_EVERY = 3, 4, 5


class Transacting:
    """Its threads end with `end`."""

    def __init__(self, site: Site, loads: Sequence[Load]) -> None:
        self._site = site
        self._loads = {load.queue: load for load in loads}
        shards = range(len(loads), site.shards) or (0,)
        self._quiet = {site.queue(shard): count() for shard in shards}
        self._queues = [*self._loads, *self._quiet]
        self._transactions: dict[str, Transaction] = {}
        self._commits: Counter[str] = Counter()  # by the front-end of the writer
        self._ends = threading.Event()
        self._faults: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._guarded, args=[front], name=f"transactions@{front.name}")
            for front in site.fronts
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Each writer has the answer to what it has begun."""
        self._ends.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_SECONDS)
            assert not thread.is_alive(), f"{thread.name} does not end"

    # --- a writer --------------------------------------------------------------------------------

    def _guarded(self, front: FrontEnd) -> None:
        try:
            for number in count(1):
                self._write(front, number)
                if self._ends.wait(PACE_SECONDS):
                    break
        except BaseException as error:  # noqa: BLE001 - told by `flows` and `check`
            self._faults.append(error)

    def _write(self, front: FrontEnd, number: int) -> None:
        key = f"{self._queues[0]}.{front.name}/{number}"
        if number % UNNAMED_EVERY == 0:
            unnamed = self._transactions[f"{key} unnamed"] = Transaction(self._messages(1))
            self._stage(front, key, unnamed.parts)
        # The first queue has the most: a stage of its own, and its part of the one for all.
        parts = self._messages(1 + number % 2)
        first = self._queues[0]
        more = {first: self._messages(2, [first])[first]}
        whole = {queue: [*more.get(queue, ()), *numbers] for queue, numbers in parts.items()}
        transaction = self._transactions[key] = Transaction(whole)
        stages = [self._stage(front, key, more, first), self._stage(front, key, parts)]
        if number % ABORTED_EVERY == 0:
            told = self._ask(front, "DELETE", f"/v1/transactions/{quote(key, safe='')}").json
            assert told["state"] == "aborted", (key, told)
            return
        for queue, numbers in whole.items():
            if queue in self._loads:
                self._loads[queue].record.said[f"transactions@{front.name}"] += numbers
        transaction.stored = self._commit(front, key, stages)
        for queue, numbers in whole.items():
            if queue in self._loads:
                self._loads[queue].note(f"transactions@{front.name}", numbers)
        if number % ANEW_EVERY == 0:
            anew = self._commit(front, key, [self._stage(front, key, whole)])
            assert anew == transaction.stored, (key, anew, transaction.stored)
        self._commits[front.name] += 1

    def _messages(self, each: int, queues: Sequence[str] = ()) -> dict[str, list[int]]:
        """New ones."""
        made: dict[str, list[int]] = {}
        for queue in queues or self._queues:
            load = self._loads.get(queue)
            made[queue] = [load.next_number() if load else next(self._quiet[queue]) for _ in range(each)]
        return made

    def _stage(self, front: FrontEnd, key: str, parts: Mapping[str, list[int]], queue: str = "") -> str:
        """In one body, in which each message names its queue unless all have that one; the id."""
        rows = [
            ({} if queue else {"queue": name}) | {"value": value.decode()}
            for name, numbers in parts.items()
            for value in numbered(numbers)
        ]
        body = "".join(json.dumps(row) + "\n" for row in rows).encode()
        query = {"transaction": key, "queue": queue or None}
        told = self._ask(front, "POST", "/v1/stages", body, {"Content-Type": NDJSON}, **query).json
        assert told["count"] == len(rows), (key, told)
        return str(told["stage"])

    def _commit(self, front: FrontEnd, key: str, stages: list[str]) -> dict[str, tuple[int, int]]:
        told = self._ask(front, "POST", "/v1/transactions", {"transaction": key, "stages": stages}).json
        assert told["state"] == "committed", (key, told)
        stored = {it["queue"]: (it["offset_start"], it["offset_end"]) for it in told["stored"]}
        assert len(stored) == len(told["stored"]), told
        return stored

    def _ask(self, front: FrontEnd, *request: Any, **query: Any) -> Reply:
        """At this front-end, or else at the next one, until there is an answer. Any: what `Api.ask` takes."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        fronts = self._site.fronts
        place = fronts.index(front)
        for asked in cycle(fronts[place:] + fronts[:place]):
            assert time.monotonic() < deadline, f"nobody has answered {request[:2]}"
            try:
                with (
                    asked.inside(),
                    Api(asked.ports["http"], seconds=CLIENT_OPTIONS["operation_seconds"]) as api,
                ):
                    reply = api.ask(*request, **query)
            except (OSError, HTTPException):
                time.sleep(PAUSE_SECONDS)
                continue
            if reply.status != UNAVAILABLE:
                assert reply.status == 200, (request, query, reply)
                return reply
            time.sleep(PAUSE_SECONDS)
        raise AssertionError("a cycle has no end")

    # --- what a test does with it ------------------------------------------------------------------

    def flows(self, fronts: Sequence[FrontEnd] | None = None) -> None:
        """Every writer commits again, some of them from now on."""
        names = [front.name for front in fronts or self._site.running]
        before = dict(self._commits)

        def flowing() -> bool:
            self._raise_faults()
            return all(self._commits[name] >= before.get(name, 0) + COMMITS_SOME for name in names)

        until(flowing, f"commits by {names}, after {before}", PATIENCE_SECONDS)

    def check(self) -> str:
        """Judge, when the loads have been judged."""
        self._raise_faults()
        front = self._site.running[0]
        logs = {queue: load.log for queue, load in self._loads.items()}
        logs |= {queue: [number_of(value) for value in read_log(front, queue)] for queue in self._quiet}
        return judge_transactions(self._transactions, logs)

    def _raise_faults(self) -> None:
        if self._faults:
            raise self._faults[0]
