"""Transactions: exactly what was committed is in the log, once, whoever is killed meanwhile."""

import contextlib
import http.client
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.client import PhpmqClient
from penstock.http.api.transactions import STAGES_MAX as STAGES_NAMED_MAX
from penstock.log.keys import TRANSACTIONS_MAX
from penstock.log.log import open_log
from penstock.log.reader import LogReader
from penstock.log.stages import STAGES_MAX
from penstock.model.batch import Batch
from tests.http.api import NDJSON, Api, Reply
from tests.http.conftest import StartBroker
from tests.http.morgue import bodies_left, reject, take
from tests.seeds import SEED, SEEDED
from tests.server.harness import ROOT, WAIT_SECONDS, BrokerProcess, until

LINE_BYTES = 60_000
"""Few large lines make a large transaction without much ado."""

NOBODY = (ConnectionError, http.client.HTTPException, TimeoutError)
"""What a caller sees of a process that is gone."""


def lines(*values: str) -> bytes:
    return b"".join(json.dumps({"value": value}).encode() + b"\n" for value in values)


def stage(api: Api, key: str, queue: str, *values: str) -> str:
    reply = api.ask(
        "POST", "/v1/stages", lines(*values), {"Content-Type": NDJSON}, transaction=key, queue=queue
    )
    assert reply.status == 200, reply
    return str(reply.json["stage"])


def commit(api: Api, key: str, *stages: str) -> Reply:
    return api.ask("POST", "/v1/transactions", {"transaction": key, "stages": list(stages)})


def committed(api: Api, key: str, *stages: str) -> dict[str, Any]:
    reply = commit(api, key, *stages)
    assert reply.status == 200, reply
    fields: dict[str, Any] = reply.json
    assert (fields["transaction"], fields["state"]) == (key, "committed")
    return fields


def stored(broker: BrokerProcess, queue: str) -> list[str]:
    """What is in the log, in order."""
    with LogReader(str(broker.folder / "data")) as reader:
        known = reader.queue(queue)
        if known is None:
            return []
        return [
            message.decode()
            for block in reader.messages(queue, 0, known.offset_end)
            for message in block.messages()
        ]


def staged(api: Api) -> int:
    """How many stages there are."""
    count: int = api.get("/v1/engine")["stages"]["count"]
    return count


def large_values(name: str, count: int) -> list[str]:
    return [f"{name}-{number:04d}".ljust(LINE_BYTES, ".") for number in range(count)]


def second_of(broker: BrokerProcess) -> int:
    """The process of the API."""
    (pid,) = Path(f"/proc/{broker.pid}/task/{broker.pid}/children").read_text().split()
    return int(pid)


# --- commit and abort ---


def test_a_commit_stores_the_stages_named_in_their_order_and_drops_the_others(
    api: Api, broker: BrokerProcess
) -> None:
    first = stage(api, "attempts", "attempts", "a1", "a2")
    stage(api, "attempts", "attempts", "b1")  # a try of the second task that failed half-way
    second = stage(api, "attempts", "attempts", "b1", "b2")
    fields = committed(api, "attempts", second, first)
    assert fields["repeated"] is False
    assert fields["stored"] == [{"queue": "attempts", "offset_start": 0, "offset_end": 4}]
    assert stored(broker, "attempts") == ["b1", "b2", "a1", "a2"]
    state = api.get("/v1/transactions/attempts")
    assert state == {
        "transaction": "attempts",
        "state": "committed",
        "committing": False,
        "stages": [],
        "stored": fields["stored"],
    }
    assert staged(api) == 0


def test_a_commit_counts_once_whatever_it_names_the_second_time(api: Api, broker: BrokerProcess) -> None:
    first = stage(api, "twice", "twice", "one", "two")
    answer = committed(api, "twice", first)
    # The batch is replayed from its beginning, in another order, and in other parts.
    again = stage(api, "twice", "twice", "two"), stage(api, "twice", "twice", "one")
    # Then an answer was lost, of this commit or of the first one, whose stages are gone by now.
    for stages in (again, again, (first,), ()):
        assert committed(api, "twice", *stages) == {**answer, "repeated": True}
    assert stored(broker, "twice") == ["one", "two"]
    # What was staged again waits, so that the same call has the same answer; an abort takes it away.
    assert staged(api) == 2
    assert api.ask("DELETE", "/v1/transactions/twice").json["state"] == "committed"
    assert staged(api) == 0


def test_of_two_writers_with_one_key_the_second_hears_of_what_is_dropped(start_broker: StartBroker) -> None:
    """Both have staged before either commits: nobody can say any more whether they brought the same."""
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        first, second = stage(api, "key", "two", "a1", "a2"), stage(api, "key", "two", "b1")
        answer = committed(api, "key", first)
    for end in (lambda: None, broker.kill, broker.stop):
        end()
        if not broker.running:
            broker.start()
        with Api(broker.ports["http"]) as api:
            reply = commit(api, "key", second)
            assert reply.problem == "stage-not-found"
            assert "transaction 'key' was committed with other stages" in reply.json["detail"]
            assert second in reply.json["detail"], reply
            assert commit(api, "key", stage(api, "key", "two", "b1")).problem == "key-reused"
            api.ask("DELETE", "/v1/transactions/key")
            assert committed(api, "key", first) == {**answer, "repeated": True}
    assert stored(broker, "two") == ["a1", "a2"]


OTHERS = {
    "payload": ("reused", ("b1", "a3")),
    "rows": ("reused", ("a1", "b2", "")),
    "exchanged": ("reused", ("a2", "b1")),
    "queue": ("elsewhere", ("a1", "b2")),
}


def test_a_key_that_is_used_again_for_something_else(start_broker: StartBroker) -> None:
    """Also after a restart from the log, and from a snapshot."""
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        committed(api, "key", stage(api, "key", "reused", "a1", "b2"))
    for end in (lambda: None, broker.kill, broker.stop):
        end()
        if not broker.running:
            broker.start()
        with Api(broker.ports["http"]) as api:
            for what, (queue, values) in OTHERS.items():
                reply = commit(api, "key", stage(api, "key", queue, *values))
                assert (reply.status, reply.problem) == (409, "key-reused"), what
                assert reply.json["detail"] == (
                    "transaction 'key' was committed for other messages (2 in 'reused' from offset 0 on) "
                    f"than are staged now ({len(values)} for {queue!r}), of which none is stored; use a new "
                    "key for what is new"
                )
                assert reply.json["stored"] == [{"queue": "reused", "offset_start": 0, "offset_end": 2}]
                assert reply.json["asked"] == [{"queue": queue, "count": len(values)}]
                assert api.ask("DELETE", "/v1/transactions/key").json["state"] == "committed"
                assert committed(api, "key", stage(api, "key", "reused", "b2", "a1"))["repeated"] is True
    assert stored(broker, "reused") == ["a1", "b2"]


def test_of_a_stream_s_batch_other_contents_are_the_same_batch_and_other_queues_are_not(
    api: Api, broker: BrokerProcess
) -> None:
    key = "spark/6c0b8a3f/7"
    answer = committed(api, key, stage(api, key, "stream-a", "one"), stage(api, key, "stream-b", "two"))
    other = stage(api, key, "stream-a", "ONE", "more")
    assert committed(api, key, other) == {**answer, "repeated": True}
    reply = commit(api, key, stage(api, key, "stream-a", "one"), stage(api, key, "stream-c", "two"))
    assert (reply.status, reply.problem) == (409, "key-reused")
    for words in ("1 in 'stream-a'", "1 in 'stream-b'", "1 for 'stream-c'", "a new checkpoint"):
        assert words in reply.json["detail"]
    assert stored(broker, "stream-c") == []
    api.ask("DELETE", "/v1/transactions/spark%2F6c0b8a3f%2F7")


def test_a_key_without_a_fingerprint_is_answered_as_ever(tmp_path: Path, start_broker: StartBroker) -> None:
    """Earlier versions remembered none."""
    broker = start_broker()
    broker.stop()
    log = open_log(str(broker.folder / "data"), time.time_ns() // 1000)
    log.transact("transaction/old", [("old", Batch.of([b"x"]))], time.time_ns() // 1000)
    log.close(time.time_ns() // 1000)
    broker.start()
    with Api(broker.ports["http"]) as api:
        assert committed(api, "old", stage(api, "old", "old", "y"))["repeated"] is True


def test_commits_at_the_same_time_are_one(api: Api, broker: BrokerProcess) -> None:
    for key, values in (("race", ["small"]), ("large race", large_values("race", 200))):
        stages = [stage(api, key, key, *values[at : at + 100]) for at in range(0, len(values), 100)]
        answers: list[dict[str, Any]] = []

        def ask(key: str, stages: list[str], answers: list[dict[str, Any]]) -> None:
            with Api(broker.ports["http"]) as api:
                answers.append(committed(api, key, *stages))

        threads = [threading.Thread(target=ask, args=(key, stages, answers)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert sorted(answer["repeated"] for answer in answers) == [False] + [True] * 5
        assert len({json.dumps(answer["stored"]) for answer in answers}) == 1
        assert stored(broker, key) == values
    assert staged(api) == 0


def test_nothing_is_committed_in_part(api: Api, broker: BrokerProcess) -> None:
    mine = stage(api, "mine", "apart", "mine")
    theirs = stage(api, "theirs", "apart", "theirs")
    for stages in ((mine, theirs), (mine, "f" * 32)):
        assert commit(api, "mine", *stages).problem == "stage-not-found"
    assert stored(broker, "apart") == []
    assert commit(api, "mine", mine, mine).problem == "bad-request"
    assert commit(api, "mine", "../lock").problem == "bad-request"
    committed(api, "mine", mine)
    committed(api, "theirs", theirs)
    assert stored(broker, "apart") == ["mine", "theirs"]


def test_a_transaction_without_stages_is_one(api: Api) -> None:
    assert committed(api, "empty")["stored"] == []
    assert committed(api, "empty")["repeated"] is True
    assert api.get("/v1/transactions/empty")["state"] == "committed"


def test_so_many_stages_and_each_once(api: Api) -> None:
    known = stage(api, "many", "many", "x")
    others = [f"{number:0{len(known)}x}" for number in range(STAGES_NAMED_MAX)]
    assert commit(api, "many", *others).problem == "stage-not-found"
    for stages, detail in (
        ((*others, known), f"a list of 0 to {STAGES_NAMED_MAX} items"),
        ((known, known), "an item is there twice; name each once"),
    ):
        reply = commit(api, "many", *stages)
        assert (reply.status, reply.problem) == (400, "bad-request"), reply
        assert detail in reply.json["detail"]
    assert committed(api, "many", known)["stored"][0]["offset_end"] == 1


def test_abort(api: Api, broker: BrokerProcess) -> None:
    first = stage(api, "given/up", "given-up", "x")
    path = "/v1/transactions/given%2Fup"
    for _ in range(2):
        assert api.ask("DELETE", path).json == {"transaction": "given/up", "state": "aborted"}
    assert api.ask("GET", path).problem == "transaction-not-found"
    assert staged(api) == 0
    assert commit(api, "given/up", first).problem == "stage-not-found"
    # The key can be used again.
    again = stage(api, "given/up", "given-up", "y")
    committed(api, "given/up", again)
    assert api.ask("DELETE", path).json == {"transaction": "given/up", "state": "committed"}
    assert stored(broker, "given-up") == ["y"]
    assert committed(api, "given/up")["repeated"] is True


def test_a_damaged_stage_is_never_committed(start_broker: StartBroker) -> None:
    """Neither while the broker runs, as soon as it has read it, nor after a restart."""
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        damaged = stage(api, "key", "orders", "fine", "DAMAGED")
        fine = stage(api, "key", "orders", "fine")
        committed(api, "other", stage(api, "other", "orders", "before"))
    broker.kill()
    (segment,) = (it for it in (broker.folder / "data").glob("*.seg") if b"DAMAGED" in it.read_bytes())
    data = segment.read_bytes()
    segment.write_bytes(data.replace(b"DAMAGED", b"DAMAGEd"))
    broker.start()
    with Api(broker.ports["http"]) as api:
        reply = commit(api, "key", damaged, fine)
        assert reply.problem == "conflict", reply
        assert reply.json["detail"].startswith(f"transaction 'key': stage {damaged!r} is damaged")
        assert "stage that part again" in reply.json["detail"]
        assert stored(broker, "orders") == ["before"]
        assert api.get("/v1/engine")["damage"] != []
        again = stage(api, "key", "orders", "fine", "whole")
        committed(api, "key", again, fine)
    assert stored(broker, "orders") == ["before", "fine", "whole", "fine"]


# --- large ones ---


def test_a_large_transaction(api: Api, broker: BrokerProcess) -> None:
    values = large_values("large", 400)  # 24 MB
    stages = [stage(api, "large", "large", *values[at : at + 100]) for at in range(0, 400, 100)]
    answer = committed(api, "large", *stages)
    assert answer["stored"] == [{"queue": "large", "offset_start": 0, "offset_end": 400}]
    assert stored(broker, "large") == values
    assert committed(api, "large", *stages) == {**answer, "repeated": True}
    assert staged(api) == 0
    again = [stage(api, "large", "large", *values[at : at + 80]) for at in range(320, -1, -80)]
    assert committed(api, "large", *again) == {**answer, "repeated": True}
    values[7] = values[7].upper()
    other = [stage(api, "large", "large", *values[at : at + 80]) for at in range(0, 400, 80)]
    assert commit(api, "large", *other).problem == "key-reused"
    api.ask("DELETE", "/v1/transactions/large")


def test_all_of_a_large_one_is_there_at_once(start_broker: StartBroker) -> None:
    """100 MB, for a reader of the log, for the API's counts, and for a worker."""
    broker = start_broker()
    values = large_values("once", 1700)
    seen: set[int] = set()
    ready: set[int] = set()
    taken: list[str] = []
    over = threading.Event()

    def read() -> None:
        with LogReader(str(broker.folder / "data")) as reader:
            while not over.is_set():
                reader.refresh()
                known = reader.queue("once")
                seen.add(known.offset_end if known is not None else 0)

    def look() -> None:
        with Api(broker.ports["http"]) as api:
            while not over.is_set():
                reply = api.ask("GET", "/v1/queues/once")
                ready.add(reply.json["offset_end"] if reply.status == 200 else 0)

    def work() -> None:
        where = f"phpmq://127.0.0.1:{broker.ports['phpmq']}"
        with PhpmqClient(where) as mq, Api(broker.ports["http"]) as api:
            for message in mq.consume("once", prefetch=50, count=1700, timeout=3 * WAIT_SECONDS):
                if not taken:
                    ready.add(api.get("/v1/queues/once")["offset_end"])
                taken.append(message.body.decode())
                message.ack()

    threads = [threading.Thread(target=it) for it in (read, look, work)]
    for thread in threads:
        thread.start()
    try:
        with Api(broker.ports["http"]) as api:
            stages = [stage(api, "once", "once", *values[at : at + 170]) for at in range(0, 1700, 170)]
            assert not taken
            committed(api, "once", *stages)
            until(lambda: len(taken) == 1700, "the worker to have it all", 3 * WAIT_SECONDS)
    finally:
        over.set()
        for thread in threads:
            thread.join(4 * WAIT_SECONDS)
    assert (seen, ready) == ({0, 1700}, {0, 1700})
    assert taken == values


def test_a_full_queue_takes_all_of_a_transaction_or_nothing(start_broker: StartBroker) -> None:
    broker = start_broker(config='[queue."full"]\nmax-bytes = 10_000_000\n')
    values = large_values("full", 160)  # 9.6 MB
    with Api(broker.ports["http"]) as api:
        api.send("full", b"x" * 1_000_000)
        stages = [stage(api, "full", "full", *values[at : at + 80]) for at in range(0, 160, 80)]
        for _ in range(2):
            reply = commit(api, "full", *stages)
            assert reply.problem == "queue-full"
            assert reply.headers["retry-after"]
        state = api.get("/v1/transactions/full")
        assert (state["state"], state["committing"], len(state["stages"])) == ("open", False, 2)
        assert api.get("/v1/queues/full")["ready"] == 1
    broker.kill()
    broker.start()
    with Api(broker.ports["http"]) as api:
        assert commit(api, "full", *stages).problem == "queue-full"
        assert api.post("/v1/queues/full/purge")["purged"] == 1
        assert committed(api, "full", *stages)["repeated"] is False
        assert api.get("/v1/queues/full")["ready"] == 160
    assert stored(broker, "full")[1:] == values


# --- killed ---


@pytest.mark.parametrize("who", ["first", "second"])
def test_killed_between_stage_and_commit(start_broker: StartBroker, who: str) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        first = stage(api, "key", "orders", "one", "two")
    if who == "first":
        broker.kill()
        broker.start()
    else:
        os.kill(second_of(broker), signal.SIGKILL)
    with Api(broker.ports["http"]) as api:
        assert [it["stage"] for it in api.get("/v1/transactions/key")["stages"]] == [first]
        answer = committed(api, "key", first)
        assert answer["repeated"] is False
    if who == "first":
        broker.kill()
        broker.start()
    else:
        os.kill(second_of(broker), signal.SIGKILL)
    with Api(broker.ports["http"]) as api:
        assert committed(api, "key", first) == {**answer, "repeated": True}
        assert api.ask("DELETE", "/v1/transactions/key").json["state"] == "committed"
    assert stored(broker, "orders") == ["one", "two"]


ROUNDS = 6 if SEEDED else 3


class Caller:
    """Commits a transaction, again and again until it is answered, whoever is killed meanwhile."""

    def __init__(self, broker: BrokerProcess, key: str, stages: list[str]) -> None:
        self._broker = broker
        self._key = key
        self._stages = stages
        self.answer: dict[str, Any] | None = None
        self.fault: Reply | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        deadline = time.monotonic() + 3 * WAIT_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(*NOBODY), Api(self._broker.ports["http"]) as api:
                reply = commit(api, self._key, *self._stages)
                if reply.status == 200:
                    self.answer = reply.json
                    return
                if reply.status != 503:
                    self.fault = reply
                    return

    def wait(self) -> dict[str, Any]:
        self._thread.join(4 * WAIT_SECONDS)
        assert self.answer is not None, self.fault
        return self.answer


@pytest.mark.parametrize("who", ["first", "second", "both"])
def test_killed_at_any_moment_of_large_commits(start_broker: StartBroker, who: str) -> None:
    """Seeded, so that the moments are many; what is stored is what was committed, in whichever round."""
    rng = random.Random(f"{SEED}large commits, {who}")
    broker = start_broker()
    wanted: Counter[str] = Counter()
    for round_ in range(ROUNDS):
        key = f"round-{round_}"
        with Api(broker.ports["http"]) as api:
            parts = [large_values(f"{key}-{part}", rng.randint(60, 120)) for part in range(3)]
            stages = [stage(api, key, "orders", *part) for part in parts]
            stage(api, key, "orders", *large_values(f"{key}-failed", 5))
            stage(api, f"{key}-open", "orders", f"{key}-open")
            given_up = stage(api, f"{key}-aborted", "orders", f"{key}-aborted")
            api.ask("DELETE", f"/v1/transactions/{key}-aborted")
        wanted.update(value for part in parts for value in part)
        caller = Caller(broker, key, stages)
        for _ in range(rng.randint(1, 2)):
            time.sleep(rng.uniform(0.0, 0.5))  # any moment: nothing waits for it
            if who != "first":
                with contextlib.suppress(ValueError, ProcessLookupError):  # it is being started
                    os.kill(second_of(broker), signal.SIGKILL)
            if who != "second":
                broker.kill()
                broker.start()
        answer = caller.wait()
        assert sum(it["offset_end"] - it["offset_start"] for it in answer["stored"]) == sum(map(len, parts))
        with Api(broker.ports["http"]) as api:
            assert committed(api, key)["stored"] == answer["stored"]
            assert commit(api, f"{key}-aborted", given_up).problem == "stage-not-found"
            assert api.get(f"/v1/transactions/{key}-open")["state"] == "open"
    assert Counter(stored(broker, "orders")) == wanted
    with Api(broker.ports["http"]) as api:
        assert staged(api) == ROUNDS, "what is open is still there"


@pytest.mark.parametrize("who", ["first", "second"])
def test_killed_at_any_moment_of_staging(start_broker: StartBroker, who: str) -> None:
    """What was confirmed is there, what was not is not, and nobody sees either."""
    rng = random.Random(f"{SEED}staging, {who}")
    broker = start_broker()
    confirmed: list[str] = []
    attempts = 0
    for round_ in range(ROUNDS):
        over = threading.Event()

        def stage_on(round_: int, over: threading.Event) -> None:
            nonlocal attempts
            with contextlib.suppress(*NOBODY), Api(broker.ports["http"]) as api:
                while not over.is_set():
                    attempts += 1
                    body = lines(*large_values(f"{round_}-{attempts}", 60))
                    query = {"transaction": "key", "queue": "orders"}
                    reply = api.ask("POST", "/v1/stages", body, {"Content-Type": NDJSON}, **query)
                    if reply.status != 200:  # It has lost the first process, and ends.
                        assert reply.status == 503, reply
                        return
                    confirmed.append(reply.json["stage"])

        thread = threading.Thread(target=stage_on, args=(round_, over))
        thread.start()
        time.sleep(rng.uniform(0.0, 0.5))  # any moment: nothing waits for it
        if who == "first":
            broker.kill()
            broker.start()
        else:
            with contextlib.suppress(ValueError, ProcessLookupError):
                os.kill(second_of(broker), signal.SIGKILL)
        over.set()
        thread.join(2 * WAIT_SECONDS)
        with Api(broker.ports["http"]) as api:
            known = api.get("/v1/transactions/key")["stages"] if confirmed else []
            assert {it["stage"] for it in known} >= set(confirmed)
            assert len(known) <= attempts
            assert api.ask("GET", "/v1/queues/orders").problem == "queue-not-found"
    with Api(broker.ports["http"]) as api:
        committed(api, "key", *confirmed)
        assert staged(api) == 0
    assert len(stored(broker, "orders")) == 60 * len(confirmed)


# --- the documentation ---


def test_the_example_of_the_documentation(start_broker: StartBroker) -> None:
    text = (ROOT / "docs" / "transactions.md").read_text(encoding="utf-8")
    script, repair = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    (answer,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    broker = start_broker()
    script = script.replace("127.0.0.1:9180", f"127.0.0.1:{broker.ports['http']}")
    for repeated in (False, True):
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, timeout=60, check=True
        )
        assert json.loads(result.stdout) == {**json.loads(answer), "repeated": repeated}
    with Api(broker.ports["http"]) as api:
        take(broker, "orders", 3, lambda message: message.reject())
        reject(broker, api, "orders", [b"wrong"] * 40)
        first_line, _, _ = script.partition("\n")
        command = ["bash", "-euo", "pipefail", "-c", f"{first_line}\n{repair}"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(result.stdout)["stored"] == []
        assert bodies_left(broker, "orders", 2) == [b'{"amount": 12.5}', b'{"amount": 3}']


def test_the_documentation_knows_the_bounds() -> None:
    text = " ".join((ROOT / "docs" / "transactions.md").read_text(encoding="utf-8").split())
    for words in (f"the last {TRANSACTIONS_MAX:,} keys", f"and be {STAGES_MAX:,}"):
        assert words in text
