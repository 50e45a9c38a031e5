"""How far the log of each queue can be read, and where in it a moment is."""

from urllib.parse import quote

import pytest

from tests.http.api import Api


def test_named_queues(api: Api) -> None:
    api.send("offsets.a", b"1", b"2")
    api.send("offsets/b", b"1")
    rows = api.get("/v1/offsets", queues="offsets/b,offsets.a,offsets.none,offsets.a")["queues"]
    expected = {"offset_start": 0, "offset_end": 2, "event_start": 0, "event_end": 2}
    for row in rows:
        (message,) = api.get(f"/v1/queues/{quote(row['name'], safe='')}/messages", limit=1)["messages"]
        assert message["id"].startswith(row.pop("identity"))
    assert rows == [
        {"name": "offsets/b", "offset_start": 0, "offset_end": 1, "event_start": 0, "event_end": 1},
        {"name": "offsets.a", **expected},
    ]


def test_all_queues_in_pages(api: Api) -> None:
    names = [f"offsets.page{n}" for n in range(5)]
    for name in reversed(names):
        api.send(name, b"x")
    seen: list[str] = []
    after = None
    while True:
        page = api.get("/v1/offsets", after=after, limit=2)
        assert len(page["queues"]) <= 2
        seen += [row["name"] for row in page["queues"]]
        after = page["next"]
        if after is None:
            break
    assert seen == sorted(seen)
    assert [name for name in seen if name in names] == names


def test_what_was_confirmed_can_be_read(api: Api) -> None:
    for offset in range(50):
        assert api.send("offsets.synced", b"x") == [offset]
        (row,) = api.get("/v1/offsets", queues="offsets.synced")["queues"]
        assert row["offset_end"] == offset + 1


def test_the_offset_of_a_time(api: Api) -> None:
    api.send("offsets.time", *[b"%d" % n for n in range(5)])
    path = "/v1/queues/offsets.time/offset"
    for offset in range(5):
        time = api.get(f"/v1/queues/offsets.time/messages/{offset}")["time"]
        assert api.get(path, time=time) == {"offset": offset}
        assert api.get(path, time=time, view="events") == {"offset": offset}
    assert api.get(path, time="1969-01-01T00:00:00Z") == {"offset": 0}
    assert api.get(path, time="2999-01-01T00:00:00.123456+01:00") == {"offset": 5}


@pytest.mark.parametrize(
    "time", ["", "yesterday", "2030-01-31", "2030-02-31T00:00:00Z", "2030-01-01T00:00:00", "1"]
)
def test_what_is_no_time_is_refused(api: Api, time: str) -> None:
    reply = api.ask("GET", "/v1/queues/q/offset", time=time)
    assert (reply.status, reply.problem) == (400, "bad-request")
    assert "use a time with its zone" in reply.json["detail"]


def test_a_queue_that_is_not_there(api: Api) -> None:
    path = f"/v1/queues/{quote('offsets/none', safe='')}/offset"
    assert api.ask("GET", path, time="2030-01-01T00:00:00Z").problem == "queue-not-found"
    assert api.ask("GET", "/v1/queues/q/offset").problem == "bad-request"
    assert api.ask("GET", "/v1/offsets", queues="orders.dead").problem == "bad-request"


def cuts(api: Api, *ranges: tuple[str, int, int, int], **more: int) -> list[dict[str, list[int]]]:
    asked = [dict(zip(("queue", "start", "end", "bytes"), it, strict=True)) for it in ranges]
    rows: list[dict[str, list[int]]] = api.post("/v1/cuts", {"ranges": asked, **more})["ranges"]
    return rows


def test_ranges_are_cut_by_bytes(api: Api) -> None:
    for _ in range(6):
        api.send("cuts.even", b"x" * 1000)
    api.send("cuts.small", b"x", b"y", b"z")
    assert cuts(api, ("cuts.even", 0, 6, 2500), ("cuts.small", 0, 3, 2500), ("cuts.none", 0, 9, 1)) == [
        {"ends": [2, 4, 6], "bytes": [2000, 2000, 2000]},
        {"ends": [3], "bytes": [3]},
        {"ends": [], "bytes": []},
    ]
    assert cuts(api, ("cuts.even", 1, 5, 1), most=2) == [{"ends": [2, 3], "bytes": [1000, 1000]}]
    # What is not synced is in no piece.
    assert cuts(api, ("cuts.even", 4, 100, 10_000)) == [{"ends": [6], "bytes": [2000]}]
    assert cuts(api, ("cuts.even", 6, 6, 10_000)) == [{"ends": [], "bytes": []}]


def test_ranges_that_are_not_whole_are_refused(api: Api) -> None:
    for wrong in ({"queue": "a", "start": 0, "end": 1}, 7):
        reply = api.ask("POST", "/v1/cuts", {"ranges": [wrong]})
        assert (reply.status, reply.problem) == (400, "bad-request")
        assert "use an object with queue, start, end, bytes" in reply.json["detail"]
