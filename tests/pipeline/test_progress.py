"""Progress: every batch counts once, in lines for people and in objects for programs."""

import json

from penstock.pipeline.progress import Batch, Teller

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


def batch(number: int, rows: int = 100, bad: int = 0) -> Batch:
    return Batch(number, rows, 10.0, 7, 50, bad)


def test_what_spark_tells_of_a_batch() -> None:
    assert Batch.of(REPORT) == Batch(12, 1200, 8000.0, 112, 150, 0)
    unknown = {**REPORT, "sources": [{"endOffset": None, "latestOffset": None}], "batchDuration": None}
    assert Batch.of(unknown) == Batch(12, 1200, 8000.0, None, 0, 0)
    bad = {**REPORT, "observedMetrics": {"bad-records": {"count": 3}}}
    assert Batch.of(bad).bad_records == 3


def test_a_line_about_once_a_second_for_all_that_was() -> None:
    clock, said = Clock(), list[str]()
    teller = Teller("orders", said.append, clock)
    teller.add([batch(0)], [])
    teller.add([batch(1), batch(2, rows=1)], [batch(0, bad=2)])
    assert said == ["orders: 100 rows, 2,000 a second; 7 behind; batch 0 took 50 ms"]
    clock.now += 1
    teller.add([], [])
    assert said[1:] == [
        "orders: 101 rows, 1,010 a second; 7 behind; batch 2 took 50 ms",
        "orders: 2 bad records; `penstock dead QUEUE --reason bad-record` shows why",
    ]
    clock.now += 1
    teller.add([], [])
    teller.tell()
    assert len(said) == 3


def test_objects_for_programs() -> None:
    said: list[str] = []
    teller = Teller("orders", said.append, Clock(), as_json=True)
    teller.add([batch(0), batch(1)], [batch(0, bad=2), batch(1, bad=0)])
    teller.tell()
    objects = [json.loads(line) for line in said]
    assert [(it["event"], it.get("number")) for it in objects] == [
        ("batch", 0),
        ("batch", 1),
        ("bad-records", None),
    ]
    assert objects[0] == {
        "pipeline": "orders",
        "event": "batch",
        "number": 0,
        "rows": 100,
        "rows_per_second": 10.0,
        "lag": 7,
        "milliseconds": 50,
    }
    assert objects[2] == {"pipeline": "orders", "event": "bad-records", "count": 2}
