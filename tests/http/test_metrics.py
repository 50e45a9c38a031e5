"""Metrics: what is measured besides messages, bounded labels, and everything that relies on their names."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock import __version__
from penstock.client import PhpmqClient, RqClient, SspqClient
from penstock.http.watching.metrics import READER_ROWS_MAX
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.http.scrape import Scraped, scrape, url
from tests.server.harness import ROOT, BrokerProcess, until


def test_a_scrape_is_as_of_now(broker: BrokerProcess, api: Api) -> None:
    for count in range(1, 10):
        api.send("now", b"x")
        assert scrape(api).of_queue("penstock_queue_ready_messages", "now") == count


# --- The broker's own ---


def test_the_engine_and_the_processes(broker: BrokerProcess, api: Api) -> None:
    api.send("engine", b"x")
    engine = api.get("/v1/engine")
    scraped = scrape(api)
    for name, field in (
        ("disk_total_bytes", "disk_bytes_total"),
        ("log_bytes", "log_bytes"),
        ("log_segments", "segments"),
        ("log_openings_total", "opening"),
        ("full", "full"),
        ("readers", "readers"),
    ):
        assert scraped[f"penstock_{name}", {}] == engine[field], name
    assert scraped["penstock_disk_free_bytes", {}] == pytest.approx(engine["disk_bytes_free"], rel=0.1)
    assert scraped["penstock_failed", {}] == 0
    assert scraped["penstock_damage_reports", {}] == 0
    assert scraped["penstock_sync_seconds_count", {}] >= engine["sync"]["count"] > 0
    assert scraped["penstock_sync_seconds_sum", {}] >= engine["sync"]["seconds_sum"] > 0
    buckets = sorted(
        (float(dict(labels)["le"]), value)
        for (name, labels), value in scraped.samples.items()
        if name == "penstock_sync_seconds_bucket"
    )
    counts = [count for _, count in buckets]
    assert counts == sorted(counts)
    assert buckets[-1] == (float("inf"), scraped["penstock_sync_seconds_count", {}])
    (info,) = (dict(labels) for name, labels in scraped.samples if name == "penstock_build_info")
    assert info["version"] == __version__
    assert info["engine"] == "log"
    assert scraped["penstock_broker_process_resident_memory_bytes", {}] == pytest.approx(
        broker.resident_bytes(), rel=0.5
    )
    assert (
        scraped["penstock_http_process_start_time_seconds", {}]
        >= (scraped["penstock_broker_process_start_time_seconds", {}])
    )


def test_connections_by_protocol(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        with (
            PhpmqClient(url(broker, "phpmq")),
            PhpmqClient(url(broker, "phpmq")),
            SspqClient(url(broker, "sspq")),
            RqClient(url(broker, "rq")),
        ):
            until(lambda: len(api.get("/v1/connections")["connections"]) == 4, "all of them")
            scraped = scrape(api)
            for protocol, count in (("phpmq", 2), ("sspq", 1), ("rq", 1)):
                assert scraped["penstock_connections", {"protocol": protocol}] == count
        until(
            lambda: scrape(api)["penstock_connections", {"protocol": "phpmq"}] == 0, "the clients to be gone"
        )


def test_requests_are_counted_by_route_and_status(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("a", b"x")
        api.send("b", b"x")
        assert api.ask("GET", "/v1/queues/nobody").status == 404
        assert api.ask("GET", "/v1/queues", limit="x").status == 400
        for path in ("/nowhere", "/somewhere/else"):
            assert api.ask("GET", path).status == 404
        assert api.ask("PATCH", "/v1/queues").status == 405
        scraped = scrape(api)

    def count(method: str, route: str, status: str) -> float:
        return scraped["penstock_http_requests_total", {"method": method, "route": route, "status": status}]

    assert count("POST", "/v1/queues/{queue}/messages", "2xx") == 2
    assert count("GET", "/v1/queues/{queue}", "4xx") == 1
    assert count("GET", "/v1/queues", "4xx") == 1
    assert count("GET", "(none)", "4xx") == 2
    assert count("(other)", "(none)", "4xx") == 1


def test_readers_and_their_lag(broker: BrokerProcess, api: Api) -> None:
    api.send("read", *[b"x"] * 10)
    body = {"view": "messages", "positions": {"read": 4}, "lease_seconds": 60}
    assert api.ask("PUT", "/v1/readers/spark", body).status == 200
    scraped = scrape(api)
    assert scraped["penstock_reader_lag", {"reader": "spark", "queue": "read", "view": "messages"}] == 6
    assert scraped["penstock_reader_lag_bytes", {"reader": "spark", "queue": "read"}] == 6
    assert 50 < scraped["penstock_reader_lease_seconds", {"reader": "spark"}] <= 60
    assert scraped["penstock_readers", {}] == 1
    assert api.ask("DELETE", "/v1/readers/spark").status == 204
    assert "spark" not in scrape(api).labelled("reader")


def test_readers_beyond_the_bound_share_a_label(start_broker: StartBroker) -> None:
    broker = start_broker("--http-readers-max", "2000")
    with Api(broker.ports["http"]) as api:
        api.send("read", *[b"x"] * 10)
        names = ["(others)", *(f"r{number:04}" for number in range(READER_ROWS_MAX + 2))]
        for name in names:
            position = {"r1000": 5, "r1001": 2, "(others)": 9}.get(name, 10)
            body = {"view": "messages", "positions": {"read": position}, "lease_seconds": 60}
            assert api.ask("PUT", f"/v1/readers/{name}", body).status == 200
        scraped = scrape(api)
    own = {name for name in names if name < "r1000"} - {"(others)"}
    assert scraped.labelled("reader") == own | {"(others)"}
    others = {"reader": "(others)", "queue": "(others)", "view": "messages"}
    assert scraped["penstock_reader_lag", others] == 8
    assert scraped["penstock_reader_lag_bytes", {"reader": "(others)", "queue": "(others)"}] == 8
    assert scraped["penstock_reader_lag", {"reader": "r0999", "queue": "read", "view": "messages"}] == 0
    assert scraped["penstock_readers", {}] == len(names)


# --- Labels ---


STRANGE = [
    'quo"ted',
    "back\\slash",
    "back\\n",
    "tr\\\\\\",
    "ünï cödé ☃ 🚰",
    "{a=b},c",
    "a/b c",
    "#",
    " lead",
    "' or",
]


def test_any_name_is_a_label(start_broker: StartBroker) -> None:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        for number, name in enumerate(STRANGE, 1):
            api.send(name, *[b"x"] * number)
        scraped = scrape(api)
        for number, name in enumerate(STRANGE, 1):
            assert scraped.of_queue("penstock_queue_ready_messages", name) == number
        assert scraped.labelled("queue") == set(STRANGE)


def test_the_others_are_added_up(start_broker: StartBroker) -> None:
    broker = start_broker("--http-metrics-queues-max", "2")
    with Api(broker.ports["http"]) as api:
        api.send("z-first", b"1")
        api.send("(others)", b"1", b"22")
        api.send("second", b"1", b"2", b"3")
        scraped = scrape(api)
        assert scraped.labelled("queue") == {"z-first", "second", "(others)"}
        assert scraped.of_queue("penstock_queue_ready_messages", "(others)") == 2
        for number in range(20):
            api.send(f"a{number}", b"xx", b"yy")
        api.post("/v1/queues/a1/pause")
        api.post("/v1/queues/a2/pause")
        api.post("/v1/queues/a3/purge")
        scraped = scrape(api)
        assert scraped.labelled("queue") == {"z-first", "second", "(others)"}
        assert scraped.of_queue("penstock_messages_accepted_total", "second") == 3
        assert scraped.of_queue("penstock_messages_accepted_total", "(others)") == 2 + 40
        assert scraped.of_queue("penstock_messages_withdrawn_total", "(others)") == 2
        assert scraped.of_queue("penstock_queue_ready_messages", "(others)") == 2 + 38
        assert scraped.of_queue("penstock_queue_bytes", "(others)") == 3 + 76
        assert scraped.of_queue("penstock_queue_paused", "(others)") == 2
        oldest = scraped.of_queue("penstock_queue_oldest_message_seconds", "(others)")
        assert 0 < oldest <= scraped.of_queue("penstock_queue_oldest_message_seconds", "z-first")
        assert ("penstock_queue_offset_end", frozenset({("queue", "(others)")})) not in scraped.samples
        assert scraped["penstock_queues", {}] == 23
    # The same queues after a restart: the order is that of their making.
    broker.stop()
    broker.start()
    with Api(broker.ports["http"]) as api:
        assert scrape(api).labelled("queue") == {"z-first", "second", "(others)"}


def test_no_queue_has_labels_where_none_may(start_broker: StartBroker) -> None:
    broker = start_broker("--http-metrics-queues-max", "0")
    with Api(broker.ports["http"]) as api:
        api.send("a", b"x")
        api.send("b", b"x")
        scraped = scrape(api)
        assert scraped.labelled("queue") == {"(others)"}
        assert scraped.of_queue("penstock_queue_ready_messages", "(others)") == 2


# --- Those who rely on the names ---


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """Every family, with something in each."""
    flags = ("--http", "127.0.0.1:0", "--http-health-seconds", "1")
    broker = BrokerProcess(tmp_path_factory.mktemp("exposed"), *flags).start()
    try:
        yield everything(broker)
    finally:
        broker.kill()


def everything(broker: BrokerProcess) -> Scraped:
    with Api(broker.ports["http"]) as api:
        api.send("all", b"x")
        api.post("/v1/queues/all/take")
        until(lambda: api.get("/v1/health")["bad"] == 1, "it to be stalled")
        about = {"kind": "pipeline", "name": "everything", "state": "running", "state_seconds": 1}
        about |= {"rows_total": 1, "bad_records": 1, "sinks": {"out": 1}, "expectations": {"fine": 1}}
        about["expectations_checked"] = {"fine": 2}
        body = {"view": "messages", "positions": {"all": 0}, "lease_seconds": 60, "about": about}
        assert api.ask("PUT", "/v1/readers/everything", body).status == 200
        scraped = scrape(api)
        assert api.ask("DELETE", "/v1/readers/everything").status == 204
    return scraped


def series(scraped: Scraped) -> set[str]:
    return {name for name, _ in scraped.samples}


def names_in(expression: str) -> set[str]:
    """The metrics in an expression of Prometheus' language: words that begin as ours do, and `up`."""
    return set(re.findall(r"\b(?:penstock_\w+|up)\b", expression))


def test_the_reference_lists_every_metric(exposed: Scraped) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(penstock_\w+)` \| (\w+) \| ([\w, ]*?) ?\|", text, re.MULTILINE)
    documented = {
        name: (kind, frozenset(label for label in labels.split(", ") if label)) for name, kind, labels in rows
    }
    assert len(documented) == len(rows), "a metric is listed twice"
    assert documented == exposed.families


def test_names_follow_the_rules(exposed: Scraped) -> None:
    for name, (kind, labels) in exposed.families.items():
        assert re.fullmatch("penstock_[a-z_]+", name)
        assert name.endswith("_total") == (kind == "counter"), name
        assert labels <= {
            "queue",
            "reason",
            "protocol",
            "reader",
            "view",
            "method",
            "route",
            "status",
            "version",
            "engine",
            "python",
            "state",
            "sink",
            "expectation",
        }


def test_the_scrape_in_the_reference_works(start_broker: StartBroker, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    (section,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (command,) = re.findall(r"^    (curl .*)$", text, re.MULTILINE)
    config = tmp_path / "penstock.toml"
    config.write_text(section)
    broker = start_broker("--config", str(config))
    command = command.replace("127.0.0.1:9180", f"127.0.0.1:{broker.ports['http']}")
    for token, works in (("a-long-random-text", True), ("another-long-random-text", False)):
        done = subprocess.run(
            ["sh", "-c", command], env={"TOKEN": token}, capture_output=True, check=False, timeout=30
        )
        assert (done.returncode == 0) == works
        assert (b"penstock_build_info" in done.stdout) == works


def test_alerts_use_what_is_exposed_and_say_what_to_do(exposed: Scraped) -> None:
    rules = yaml.safe_load((ROOT / "examples/prometheus/penstock-alerts.yml").read_text())
    seen: set[str] = set()
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        assert rule["alert"] not in seen
        seen.add(rule["alert"])
        names = names_in(rule["expr"])
        assert names
        assert names <= series(exposed) | {"up"}, rule["alert"]
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        annotations = rule["annotations"]
        assert set(annotations) == {"summary", "action"}
        assert len(annotations["action"]) > 40
        for label in re.findall(r"\$labels\.(\w+)", " ".join(annotations.values())):
            assert label == "instance" or any(
                label in exposed.families[name][1] for name in names if name in exposed.families
            ), (rule["alert"], label)
    assert {
        "PenstockApiDown",
        "PenstockBacklogOld",
        "PenstockDamage",
        "PenstockDeadLettersGrow",
        "PenstockDiskLow",
        "PenstockFull",
        "PenstockReaderLag",
        "PenstockSyncSlow",
    } <= seen


def test_prometheus_is_told_where_to_look() -> None:
    config = yaml.safe_load((ROOT / "examples/prometheus/prometheus.yml").read_text())
    assert config["rule_files"] == ["penstock-alerts.yml"]
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "penstock"
    assert job["static_configs"] == [{"targets": ["127.0.0.1:9180"]}]
    assert job.get("metrics_path", "/metrics") == "/metrics"


def test_the_dashboard_uses_what_is_exposed(exposed: Scraped) -> None:
    dashboard = json.loads((ROOT / "examples/grafana/penstock.json").read_text())
    variables = {it["name"]: it for it in dashboard["templating"]["list"]}
    assert {"datasource", "instance", "queue"} <= set(variables)
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert len(rows) >= 7
    used: set[str] = set()
    for expression in expressions(dashboard):
        names = names_in(expression)
        assert names, expression
        assert names <= series(exposed) | {"up"}, expression
        used |= names
        for variable in re.findall(r"\$(\w+)", expression):
            assert variable in variables or variable == "__rate_interval", expression
    for panel in panels:
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            assert panel["description"], panel["title"]
    # What a person would look for first is somewhere on it.
    assert {name for name in series(exposed) if name.startswith("penstock_messages_")} <= used
    assert {"penstock_full", "penstock_sync_seconds_bucket", "penstock_reader_lag"} <= used


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]
