"""Progress: every batch counts once, in lines for people and in objects for programs."""

import json
from types import SimpleNamespace
from typing import Any

from penstock.pipeline.progress import Batch, Follower, Judged, Teller

REPORT = {
    "batchId": 12,
    "batchDuration": 150,
    "numInputRows": 1200,
    "processedRowsPerSecond": 8000.0,
    "observedMetrics": {},
    "sources": [
        {"endOffset": {"orders": 1200, "mails": 5}, "latestOffset": {"orders": 1300, "mails": 5, "new": 2}},
        {"endOffset": '{"more": 10}', "latestOffset": '{"more": 20}'},
    ],
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def batch(number: int, rows: int = 100, query: str = "") -> Batch:
    return Batch(number, rows, 10.0, 7, 50, query)


def test_what_spark_tells_of_a_batch() -> None:
    assert Batch.of(REPORT) == Batch(12, 1200, 8000.0, 112, 150)
    unknown = {**REPORT, "sources": [{"endOffset": None, "latestOffset": None}], "batchDuration": None}
    assert Batch.of({**unknown, "name": "orders.sums"}) == Batch(12, 1200, 8000.0, None, 0, "orders.sums")


def test_a_line_about_once_a_second_for_all_that_was() -> None:
    clock, said = Clock(), list[str]()
    teller = Teller("orders", said.append, clock)
    teller.add([batch(0)])
    teller.counted(bad_records=2, judged={"paid": Judged(9, 2), "known": Judged(1200, 0)})
    teller.counted(judged={"paid": Judged(1000, 1)})
    teller.add([batch(1), batch(2, rows=1), batch(7, query="orders.sums")])
    assert said == ["orders: 100 rows, 2,000 a second; 7 behind; batch 0 took 50 ms"]
    clock.now += 1
    teller.add([])
    assert said[1:] == [
        "orders: 101 rows, 1,010 a second; 7 behind; batch 2 took 50 ms",
        "orders.sums: 100 rows, 2,000 a second; 7 behind; batch 7 took 50 ms",
        "orders: 2 bad records; `penstock dead QUEUE --reason bad-record` shows why",
        "orders: expectation paid: 3 of 1,009 rows against it",
    ]
    clock.now += 1
    teller.add([])
    teller.tell()
    assert len(said) == 5


def test_what_a_batch_has_found_is_said_behind_its_line() -> None:
    clock, said = Clock(), list[str]()
    teller = Teller("orders", said.append, clock)
    teller.counted(bad_records=2, query="orders", number=0)
    teller.counted(judged={"paid": Judged(9, 1)}, query="orders.sums", number=3)
    teller.add([], [("orders", -1), ("orders.sums", 2)])
    assert said == []
    assert teller.state()["bad_records"] == 2
    teller.add([batch(0, query="orders")], [("orders", 0), ("orders.sums", 2)])
    assert [line.partition(";")[0] for line in said] == [
        "orders: 100 rows, 2,000 a second",
        "orders: 2 bad records",
    ]
    # A batch without rows of its own is known to have ended when there is one behind it.
    clock.now += 1
    teller.add([], [("orders", 0), ("orders.sums", 3)])
    assert said[2:] == ["orders: expectation paid: 1 of 9 rows against it"]
    # Whatever there is is said in the end.
    teller.counted(bad_records=1, query="orders", number=1)
    clock.now += 1
    teller.add([])
    assert len(said) == 3
    teller.tell()
    assert said[3].startswith("orders: 1 bad record; ")


class Query:
    """One of Spark's, as far as a follower looks at it."""

    name = "orders"

    def __init__(self) -> None:
        self.recentProgress: list[Any] = []

    @property
    def lastProgress(self) -> Any:
        return self.recentProgress[-1] if self.recentProgress else None

    def tells(self, number: int, rows: int) -> None:
        text = json.dumps({**REPORT, "batchId": number, "numInputRows": rows})
        self.recentProgress.append(SimpleNamespace(batchId=number, json=text))


def test_every_batch_with_rows_is_handed_out_once() -> None:
    query: Any = Query()
    follower = Follower(query)
    assert (follower.batches(), follower.ended) == ([], ("orders", -1))
    query.tells(4, 0)  # it goes on from a checkpoint, and nothing has come yet
    assert (follower.batches(), follower.ended) == ([], ("orders", 3))
    query.tells(4, 10)
    assert [it.number for it in follower.batches()] == [4]
    assert (follower.batches(), follower.ended) == ([], ("orders", 4))
    query.tells(5, 0)  # without rows, or the next one, which has not begun
    assert (follower.batches(), follower.ended) == ([], ("orders", 4))
    query.tells(6, 0)
    assert (follower.batches(), follower.ended) == ([], ("orders", 5))
    for number in (6, 7, 8):
        query.tells(number, 1)
    assert [it.number for it in follower.batches()] == [6, 7, 8]
    assert follower.batches() == []


def test_how_it_stands() -> None:
    said: list[str] = []
    teller = Teller("orders", said.append, Clock())
    counts = {"rows": 0, "bad_records": 0, "sinks": {}, "expectations": {}, "expectations_checked": {}}
    assert teller.state() == {**counts, "lag": None, "batch": None}
    teller.add([batch(0, query="one"), batch(0, query="two"), batch(1, rows=5, query="one")])
    teller.counted({"files": 90}, {"paid": Judged(90, 0)}, 4)
    teller.counted({"files": 10, "large": 1}, {"paid": Judged(10, 2)})
    last = {"number": 1, "rows": 5, "rows_per_second": 10.0, "lag": 7, "milliseconds": 50, "query": "one"}
    assert teller.state() == {
        "rows": 205,
        "bad_records": 4,
        "sinks": {"files": 100, "large": 1},
        "expectations": {"paid": 2},
        "expectations_checked": {"paid": 100},
        "lag": 14,
        "batch": last,
    }


def test_objects_for_programs() -> None:
    said: list[str] = []
    teller = Teller("orders", said.append, Clock(), as_json=True)
    teller.counted(judged={"paid": Judged(5, 3), "known": Judged(5, 0)}, bad_records=2)
    teller.add([batch(0), batch(1)])
    teller.tell()
    assert [json.loads(line) for line in said] == [
        {
            "pipeline": "orders",
            "event": "batch",
            "number": number,
            "rows": 100,
            "rows_per_second": 10.0,
            "lag": 7,
            "milliseconds": 50,
            "query": "",
        }
        for number in (0, 1)
    ] + [
        {"pipeline": "orders", "event": "bad-records", "count": 2},
        {"pipeline": "orders", "event": "expectation", "name": "paid", "checked": 5, "violated": 3},
    ]
