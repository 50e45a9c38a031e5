"""A real Prometheus: its tool judges and tests the alert rules of `examples/`; it scrapes a real broker."""

import json
import os
import re
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.common.health import RULES
from tests.http.api import Api
from tests.http.conftest import StartBroker
from tests.server.harness import ROOT, until

EXAMPLES = ROOT / "examples" / "prometheus"
ALERTS = EXAMPLES / "penstock-alerts.yml"


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        ["promtool", *arguments], cwd=EXAMPLES, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_and_the_settings_are_good() -> None:
    count = len(yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"])
    assert f"SUCCESS: {count} rules found" in promtool("check", "rules", ALERTS.name)
    promtool("check", "config", "prometheus.yml")


def test_the_rules_do_what_their_tests_say() -> None:
    assert "SUCCESS" in promtool("test", "rules", "penstock-alerts-test.yml")


def test_the_alerts_about_the_broker_leave_out_the_states_of_queues() -> None:
    found = re.findall(r'penstock_health\{state!~"([^"]*)"\}', ALERTS.read_text())
    assert len(found) == 2
    for states in found:
        assert set(states.split("|")) == {rule.state for rule in RULES if rule.scope == "queue"}


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def ask(port: int, expression: str) -> list[dict[str, Any]]:
    """What Prometheus answers to a query; nothing while it does not answer yet."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=10) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return result
    except OSError:
        return []


@pytest.mark.long
def test_prometheus_scrapes_a_broker_and_alerts(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = start_broker("--http-health-seconds", "1")
    config = yaml.safe_load((EXAMPLES / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ALERTS)]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{broker.ports['http']}"]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
            env={"PATH": os.environ["PATH"], "GOMAXPROCS": "1"},
        )
    try:
        with Api(broker.ports["http"]) as api:
            api.send("stuck", b"x")
            api.post("/v1/queues/stuck/take")
            until(lambda: [it["value"][1] for it in ask(port, "up")] == ["1"], "it to scrape the broker", 120)
            stalled = 'penstock_queue_health{queue="stuck",state="stalled"}'
            until(lambda: [it["value"][1] for it in ask(port, stalled)] == ["2"], "the metric", 120)
            (health,) = ask(port, 'penstock_health{state="disk-full"}')
            assert health["value"][1] == "0"
            firing = 'ALERTS{alertname="PenstockQueueBad",queue="stuck",alertstate="firing"}'
            until(lambda: len(ask(port, firing)) == 1, "the alert", 120)
    finally:
        process.kill()
        process.wait()
