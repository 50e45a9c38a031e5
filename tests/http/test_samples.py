"""A queue over the last hour: what came and went, step by step; how much is kept; the call that shows it."""

from array import array
from datetime import UTC, datetime

import pytest

from penstock import connect
from penstock.control.frames import Fields
from penstock.http.watching.samples import (
    FIELDS,
    SECONDS_MAX,
    SLOTS_MAX,
    SLOTS_MIN,
    STEP_SECONDS,
    Sample,
    Samples,
)
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.server.harness import BrokerProcess, until


def row(name: str = "q", accepted: int = 0, acked: int = 0, ready: int = 0, oldest_us: int = 0) -> Fields:
    return {
        "name": name,
        "offset_end": accepted,
        "counts": {"acked": acked},
        "ready": ready,
        "held": 1,
        "delayed": 3,
        "dead": 2,
        "oldest_us": oldest_us,
    }


def steps(samples: Samples, at: float, seconds: float = SECONDS_MAX, name: str = "q") -> list[Sample]:
    return list(samples.of(name, at, seconds))


def test_each_step_has_what_came_in_it_and_how_it_ended() -> None:
    samples = Samples()
    samples.put(row(accepted=100), 1000)
    samples.put(row(accepted=130, acked=10, ready=20, oldest_us=7), 1012)
    samples.put(row(accepted=150, acked=50, ready=0), 1019)
    samples.put(row(accepted=151, acked=50, ready=1, oldest_us=9), 1045)
    # The slot of the first look is not known, the last one is not over, and 1020 to 1040 was at rest.
    assert steps(samples, 1059.9) == [
        Sample(1020, 50, 50, 0, 1, 3, 2, 0),
        Sample(1030, 0, 0, 0, 1, 3, 2, 0),
        Sample(1040, 0, 0, 0, 1, 3, 2, 0),
        Sample(1050, 1, 0, 1, 1, 3, 2, 9),
    ]
    assert [it.end for it in steps(samples, 1059.9, 20)] == [1040, 1050]
    assert steps(samples, 1060)[-1] == Sample(1060, 0, 0, 1, 1, 3, 2, 9)
    assert steps(samples, 1059.9, 20)[0].ready == 0


def test_all_of_a_new_queue_came_in_its_first_step() -> None:
    samples = Samples()
    samples.put(row(accepted=5, ready=5, oldest_us=3), 1005, is_new=True)
    assert steps(samples, 1010) == [Sample(1010, 5, 0, 5, 1, 3, 2, 3)]


def test_a_queue_has_its_hour_and_no_more() -> None:
    samples = Samples()
    for slot in range(3 * SLOTS_MAX):
        samples.put(row(accepted=slot), slot * STEP_SECONDS)
        assert samples.row_count <= SLOTS_MAX + 1
    end = 3 * SLOTS_MAX * STEP_SECONDS
    found = steps(samples, end)
    assert len(found) == SLOTS_MAX
    assert {it.accepted for it in found} == {1}
    # At rest for an hour: one row tells all of it.
    found = steps(samples, end + SECONDS_MAX)
    assert len(found) == SLOTS_MAX
    assert {it.accepted for it in found} == {0}


@pytest.mark.parametrize(("queues", "slots_kept"), [(10, SLOTS_MAX // 2), (400, SLOTS_MIN)])
def test_many_queues_have_less_than_an_hour(queues: int, slots_kept: int) -> None:
    rows_max = 3000
    samples = Samples(rows_max)
    for slot in range(SLOTS_MAX):
        for number in range(queues):
            samples.put(row(f"q{number}", accepted=slot), slot * STEP_SECONDS)
        # Where even a minute of all is more than that, a minute is kept.
        assert samples.row_count <= max(rows_max, queues * (SLOTS_MIN + 2))
    found = steps(samples, SLOTS_MAX * STEP_SECONDS, name="q3")
    assert len(found) >= slots_kept * 3 // 4
    assert {it.accepted for it in found} == {1}


def test_a_row_has_its_fields() -> None:
    assert len(Sample._fields) == FIELDS
    assert array("q").itemsize * FIELDS == 64  # what the theory says about memory


# --- the call ------------------------------------------------------------------------------------


def test_what_a_broker_tells_of_its_queue(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api, connect(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        api.get("/v1/queues")  # from now on, a queue is new
        api.send("orders", *[b"x"] * 6)
        api.send("orders", b"later", delay=600)
        consumed = mq.consume("orders", prefetch=1)
        for _ in range(2):
            next(consumed).ack()
        next(consumed).reject()

        def told() -> bool:
            samples = api.get("/v1/queues/orders/samples")["samples"]
            return bool(samples) and samples[-1]["ready"] == 2

        until(told, "the step to be over", STEP_SECONDS * 3)
        answer = api.get("/v1/queues/orders/samples", seconds=60)
        assert answer["step_seconds"] == STEP_SECONDS
        samples = answer["samples"]
        assert sum(it["rate_in"] for it in samples) * STEP_SECONDS == pytest.approx(7)
        assert sum(it["rate_out"] for it in samples) * STEP_SECONDS == pytest.approx(2)
        last = samples[-1]
        assert (last["ready"], last["held"], last["delayed"], last["dead"]) == (2, 1, 1, 1)
        assert 0 <= last["oldest_seconds"] <= STEP_SECONDS * 3
        age = (datetime.now(UTC) - datetime.fromisoformat(last["time"])).total_seconds()
        assert -0.5 < age < STEP_SECONDS + 1


def test_what_is_refused(broker: BrokerProcess, api: Api) -> None:
    api.send("some", b"x")
    assert api.get("/v1/queues/some/samples")["step_seconds"] == STEP_SECONDS
    assert api.ask("GET", "/v1/queues/none/samples").problem == "queue-not-found"
    assert api.ask("GET", "/v1/queues/some/samples", seconds=SECONDS_MAX + 1).problem == "bad-request"
    assert api.ask("GET", "/v1/queues/some/samples", seconds=1).problem == "bad-request"
