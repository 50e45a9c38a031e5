"""Where messages are in NATS, asked of a broker that has none. With a cluster: tests/nats/test_planned.py."""

from tests.http.api import Api
from tests.http.morgue import path_of


def test_a_log_that_is_in_files_is_not_in_nats(api: Api) -> None:
    api.send("records", b"x")
    for query in ({}, {"start": 0, "end": 1}, {"fail_on_loss": "false"}):
        reply = api.ask("GET", path_of("records", "records"), **query)
        assert reply.problem == "conflict"
        assert "keeps its log in files of its own, not in NATS" in reply.json["detail"]
    assert api.ask("GET", path_of("records", "records"), start=-1).problem == "bad-request"
