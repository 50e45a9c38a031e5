"""Readers over HTTP: they say where they are, are listed with their lag, and are let go of."""

from typing import Any
from urllib.parse import quote

import pytest

from penstock.http.watching import sayings
from tests.http.api import Api, Reply
from tests.http.conftest import StartBroker
from tests.server.harness import until


def put(api: Api, name: str, positions: dict[str, int], **fields: object) -> Reply:
    return api.ask("PUT", f"/v1/readers/{quote(name, safe='')}", {"positions": positions, **fields})


def held(api: Api, name: str, positions: dict[str, int], **fields: object) -> dict[str, Any]:
    reply = put(api, name, positions, **fields)
    assert reply.status == 200, reply
    reader: dict[str, Any] = reply.json
    return reader


def without_lease(reader: dict[str, Any]) -> dict[str, Any]:
    """What does not change by itself: neither the lease nor how old something is."""
    kept = {key: value for key, value in reader.items() if not key.endswith(("_left", "_seconds"))}
    kept["queues"] = [
        {key: value for key, value in it.items() if key != "lag_seconds"} for it in reader["queues"]
    ]
    return kept


def test_a_reader_is_shown_with_its_lag(api: Api) -> None:
    api.send("lag-a", b"1", b"22", b"333")
    api.send("lag-b", b"1")
    reader = held(api, "lag", {"lag-a": 1, "lag-b": 1}, lease_seconds=30)
    assert 25 < reader["lease_seconds_left"] <= 30
    assert without_lease(reader) == {
        "name": "lag",
        "view": "messages",
        "moved": None,
        "about": None,
        "wish": None,
        "hidden": 0,
        "queues": [
            {"queue": "lag-a", "position": 1, "end": 3, "lag": 2, "lag_bytes": 5, "capped": False},
            {"queue": "lag-b", "position": 1, "end": 1, "lag": 0, "lag_bytes": 0, "capped": False},
        ],
    }
    api.send("lag-b", b"2")
    shown = api.get("/v1/readers/lag")
    assert [(it["lag"], it["lag_bytes"]) for it in shown["queues"]] == [(2, 5), (1, 1)]
    (listed,) = [it for it in api.get("/v1/readers")["readers"] if it["name"] == "lag"]
    assert without_lease(listed) == without_lease(shown)
    assert api.ask("DELETE", "/v1/readers/lag").status == 204


def test_how_old_is_what_a_reader_has_not_read(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:

        def age(at: int, view: str = "messages") -> float:
            seconds: float = held(api, view, {"aged": at}, view=view)["queues"][0]["lag_seconds"]
            return seconds

        for number in range(3):
            api.send("aged", b"x")
            until(lambda number=number: age(number) > 1, "it to get older")  # type: ignore[misc]
        for view in ("messages", "events"):
            assert age(3, view) == 0
            for number in (2, 1):  # Each is a second older than the next, and time passes meanwhile.
                assert age(number - 1, view) > age(number, view) > 1
        # As metrics too.
        text = api.ask("GET", "/metrics").body.decode()
        assert 'penstock_reader_lag_seconds{queue="aged",reader="messages"} ' in text
        assert 'penstock_reader_failing{reader="messages"} 0.0' in text


def test_a_reader_is_seen_to_move(api: Api) -> None:
    api.send("moves-a", *[b"x"] * 5)
    api.send("moves-b", *[b"x"] * 5)
    reader = held(api, "moves", {"moves-a": 0, "moves-b": 0})
    assert (reader["moved"], reader["moved_seconds"]) == (None, None)
    reader = held(api, "moves", {"moves-a": 3, "moves-b": 1})
    assert reader["moved"] == 4
    assert 0 <= reader["moved_seconds"] < 30
    assert held(api, "moves", {"moves-a": 3, "moves-b": 1})["moved"] == 4
    assert api.get("/v1/readers/moves")["moved"] == 4


def test_a_reader_says_something_about_itself(api: Api) -> None:
    api.send("says", b"x")
    path = "/v1/readers/says"
    assert api.ask("PUT", path, {"about": {"kind": "spark"}}).problem == "reader-not-found"
    reader = held(api, "says", {"says": 0}, about={"kind": "pipeline", "name": "orders", "batch": 3})
    about = reader["about"]
    assert about.pop("at").endswith("Z")
    assert about.pop("silent") is False
    assert about == {"kind": "pipeline", "name": "orders", "batch": 3}
    # Alone: where it is stays as it was.
    reply = api.ask("PUT", path, {"about": {"error": "the sink is full", "name": None}})
    assert reply.status == 200
    assert without_lease(reply.json) == without_lease(api.get(path))
    about = api.get(path)["about"]
    del about["at"], about["silent"]
    assert about == {"kind": "pipeline", "batch": 3, "error": "the sink is full"}
    text = api.ask("GET", "/metrics").body.decode()
    assert 'penstock_reader_failing{reader="says"} 1.0' in text
    held(api, "says", {"says": 1}, about={"error": None})
    assert "error" not in api.get(path)["about"]
    # What was said goes with its reader.
    assert api.ask("DELETE", path).status == 204
    api.get("/v1/readers")
    assert held(api, "says", {"says": 1})["about"] is None


STATE = {
    "kind": "pipeline",
    "name": "orders",
    "state": "retrying",
    "state_seconds": 12.5,
    "retry_seconds": 3.5,
    "rows_total": 120,
    "rows_per_second": 0.4,
    "bad_records": 2,
    "sinks": {"files": 100, "alerts": 20},
    "expectations": {"amount is positive": 7},
    "expectations_checked": {"amount is positive": 118},
    "wish": 0,
}


def test_a_pipeline_says_how_it_stands(api: Api) -> None:
    api.send("stands", b"x")
    about = held(api, "stands", {"stands": 0}, about=STATE)["about"]
    assert about == {**STATE, "at": about["at"], "silent": False}
    text = api.ask("GET", "/metrics").body.decode()
    for line in (
        'penstock_reader_state{reader="stands",state="retrying"} 1.0',
        'penstock_reader_state{reader="stands",state="running"} 0.0',
        'penstock_reader_state{reader="stands",state="silent"} 0.0',
        'penstock_reader_rows_total{reader="stands"} 120.0',
        'penstock_reader_bad_records_total{reader="stands"} 2.0',
        'penstock_reader_sink_rows_total{reader="stands",sink="files"} 100.0',
        'penstock_reader_expectation_rows_total{expectation="amount is positive",reader="stands"} 118.0',
        'penstock_reader_expectation_violations_total{expectation="amount is positive",reader="stands"} 7.0',
    ):
        assert line in text
    assert api.ask("DELETE", "/v1/readers/stands").status == 204


def test_a_wish_is_kept_until_it_is_done(api: Api) -> None:
    api.send("wishes", b"x")
    path = "/v1/readers/wishes"
    assert api.ask("POST", f"{path}/pause").problem == "reader-not-found"
    held(api, "wishes", {"wishes": 0}, about={"kind": "spark"})
    assert api.ask("POST", f"{path}/pause").problem == "conflict"  # nobody there takes wishes
    assert api.ask("PUT", path, {"about": STATE}).json["wish"] is None
    first = api.ask("POST", f"{path}/pause").json["wish"]
    assert first["action"] == "pause"
    # Whatever it says, and wherever it is: it hears it until it says that it has done it.
    assert held(api, "wishes", {"wishes": 1})["wish"] == first
    assert api.ask("PUT", path, {"about": {"wish": 0}}).json["wish"] == first
    second = api.ask("POST", f"{path}/resume").json["wish"]
    assert (second["action"], second["number"] > first["number"]) == ("resume", True)
    assert api.ask("PUT", path, {"about": {"wish": first["number"]}}).json["wish"] == second
    assert api.ask("PUT", path, {"about": {"wish": second["number"]}}).json["wish"] is None
    assert api.ask("POST", f"{path}/dance").problem == "bad-request"
    # One that has ended takes none.
    assert api.ask("PUT", path, {"about": {"state": "stopped"}}).status == 200
    assert api.ask("POST", f"{path}/restart").problem == "conflict"
    assert api.ask("DELETE", path).status == 204


@pytest.mark.parametrize(
    "about",
    [
        {},
        {"state": "dancing"},
        {"sinks": {}},
        {"expectations": {"one": -1}},
        {"rows_per_second": -1},
        [],
        "x",
        {"kind": ""},
        {"kind": "x" * 41},
        {"error": "x" * 1001},
        {"batch": -1},
        {"other": 1},
        {"at": "x"},
    ],
)
def test_what_cannot_be_said_about_oneself(api: Api, about: object) -> None:
    api.send("unsaid", b"x")
    held(api, "unsaid", {"unsaid": 0})
    reply = api.ask("PUT", "/v1/readers/unsaid", {"about": about})
    assert (reply.status, reply.problem) == (400, "bad-request")
    assert api.get("/v1/readers/unsaid")["about"] is None


def test_nothing_is_said_at_all(api: Api) -> None:
    assert api.ask("PUT", "/v1/readers/mute", {}).problem == "bad-request"


def test_sayings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sayings, "READERS_MAX", 2)
    known = sayings.Sayings()
    for name in ("a", "b", "c"):
        known.said(name, {"kind": "spark"}, 1)
    assert [bool(known.of(name).about) for name in ("a", "b", "c")] == [False, True, True]
    known.forget_others({"c"})
    assert [bool(known.of(name).about) for name in ("b", "c")] == [False, True]


def test_positions_are_replaced_as_a_whole(api: Api) -> None:
    for queue in ("whole-a", "whole-b", "whole-c"):
        api.send(queue, b"1", b"2")
    held(api, "whole", {"whole-a": 0, "whole-b": 0})
    reader = held(api, "whole", {"whole-b": 1, "whole-c": 2})
    assert [(it["queue"], it["position"]) for it in reader["queues"]] == [("whole-b", 1), ("whole-c", 2)]
    assert without_lease(api.get("/v1/readers/whole")) == without_lease(reader)


def test_events_are_counted_by_their_numbers(api: Api) -> None:
    api.send("told", b"1", b"2")
    api.post("/v1/queues/told/purge")
    reader = held(api, "told", {"told": 1}, view="events")
    (queue,) = reader["queues"]
    assert reader["view"] == "events"
    assert queue["end"] == api.get("/v1/queues/told")["event_end"] > 2
    assert (queue["lag"], queue["lag_bytes"]) == (queue["end"] - 1, None)


def test_an_unknown_queue_is_named_and_nothing_changes(api: Api) -> None:
    api.send("there", b"1")
    before = held(api, "unknown", {"there": 0})
    reply = put(api, "unknown", {"there": 1, "not-there": 0})
    assert reply.problem == "queue-not-found"
    assert "'not-there'" in reply.json["detail"]
    assert without_lease(api.get("/v1/readers/unknown")) == without_lease(before)


@pytest.mark.parametrize("name", ["a/b", "größe", "with blank", "%41", "x" * 200, "."])
def test_names(api: Api, name: str) -> None:
    api.send("names", b"1")
    path = f"/v1/readers/{quote(name, safe='')}"
    assert held(api, name, {"names": 0})["name"] == name
    assert api.get(path)["name"] == name
    assert name in [it["name"] for it in api.get("/v1/readers")["readers"]]
    assert api.ask("DELETE", path).status == 204
    for method in ("GET", "DELETE"):
        assert api.ask(method, path).problem == "reader-not-found"


def test_readers_are_listed_by_name(api: Api) -> None:
    api.send("listed", b"1")
    for name in ("list-b", "list-c", "list-a"):
        held(api, name, {"listed": 0})
    names = [it["name"] for it in api.get("/v1/readers")["readers"]]
    assert names == sorted(names)
    assert {"list-a", "list-b", "list-c"} <= set(names)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "positions"),
        ({"positions": {}}, "1 to 1000"),
        ({"positions": {"q": -1}}, "whole number"),
        ({"positions": {"q": "1"}}, "whole number"),
        ({"positions": {"q": 1.5}}, "whole number"),
        ({"positions": {"q.dead": 1}}, "dead letters"),
        ({"positions": {"a\ud800": 1}}, "not text"),
        ({"positions": {str(number): 0 for number in range(1001)}}, "1 to 1000"),
        ({"positions": {"q": 0}, "view": "state"}, "messages, events"),
        ({"positions": {"q": 0}, "lease_seconds": 0}, "1 to"),
        ({"positions": {"q": 0}, "lease_seconds": 3601}, "1 to 3600"),
        ({"positions": {"q": 0}, "lease": 1}, "lease_seconds"),
    ],
)
def test_what_is_wrong_is_named(api: Api, body: dict[str, Any], words: str) -> None:
    reply = api.ask("PUT", "/v1/readers/wrong", body)
    assert reply.problem == "bad-request"
    assert words in reply.json["detail"]
    assert api.ask("GET", "/v1/readers/wrong").problem == "reader-not-found"


@pytest.mark.parametrize("name", ["a%0Ab", "x" * 201, "%7F"])
def test_names_that_none_can_have(api: Api, name: str) -> None:
    assert api.ask("PUT", f"/v1/readers/{name}", {"positions": {"q": 0}}).problem == "bad-request"


def test_bounds_of_leases_and_of_readers(start_broker: StartBroker) -> None:
    broker = start_broker("--http-lease-seconds-max", "30", "--http-readers-max", "2")
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"1")
        assert held(api, "one", {"orders": 0})["lease_seconds_left"] <= 30
        assert put(api, "one", {"orders": 0}, lease_seconds=31).problem == "bad-request"
        held(api, "two", {"orders": 0})
        refused = put(api, "three", {"orders": 0})
        assert refused.problem == "conflict"
        assert "readers-max" in refused.json["detail"]
        held(api, "two", {"orders": 1})  # one that is there may go on
        assert api.ask("DELETE", "/v1/readers/one").status == 204
        held(api, "three", {"orders": 0})


def test_a_lease_that_has_ended_makes_room_for_another_reader(start_broker: StartBroker) -> None:
    broker = start_broker("--http-readers-max", "1")
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"1")
        held(api, "one", {"orders": 0}, lease_seconds=1)
        until(lambda: put(api, "two", {"orders": 0}).status == 200, "the lease to end")
        assert put(api, "one", {"orders": 0}).problem == "conflict"


def test_a_reader_outlives_restarts_but_not_its_lease(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"1", b"2")
        held(api, "long", {"orders": 1}, lease_seconds=600)
        held(api, "short", {"orders": 1}, lease_seconds=1)
    broker.kill()
    broker.start()
    with Api(broker.ports["http"]) as api:
        (queue,) = api.get("/v1/readers/long")["queues"]
        assert (queue["queue"], queue["position"]) == ("orders", 1)
        until(lambda: api.get("/v1/readers/short")["lease_seconds_left"] == 0, "the lease to end")
        assert api.get("/v1/readers/long")["lease_seconds_left"] > 500
