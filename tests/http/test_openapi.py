"""The API document is complete and true: schemathesis asks a real broker for everything that it promises.

It sends what fits the document and what does not, and compares every answer with it: status, media type,
headers, schema. `EXPECTED` names the calls where something can fit and still be refused, and why.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.http.api import Api
from tests.seeds import SEED, SEEDED
from tests.server.harness import ROOT, BrokerProcess

RUN_SECONDS_MAX = 1200
"""Four thousand requests and what makes them up: most of a minute of a core, which others may want, too."""

REQUEST_SECONDS_MAX = 60
REQUESTS_SEED = SEED or "20261115"
"""The same requests in every run; `make test-long` tries others, and more of them."""

EXAMPLES = 10 if SEEDED else 3

EXPECTED = {
    "/v1/queues/{queue}/log": 400,  # columns of another view
    "/v1/queues/{queue}/redrive": 400,  # a text that is no condition
    "/v1/queues/{queue}/search": 400,  # likewise; what is no place or cursor
    "/v1/search": 400,
    "/v1/queues/{queue}/copy": 400,  # likewise; nothing is chosen, or the same queue is
    "/v1/queues/{queue}/move": 400,
    "/v1/queues/{queue}/withdraw": 400,
    "/v1/redrive": 400,
    "/v1/queues/{queue}/settle": 400,  # an id in two lists, a reason of long characters
    "/v1/queues/{queue}/take": 400,  # likewise
    "/v1/stages": 400,  # no queue, neither as a parameter nor in the lines
    "/v1/readers/{name}": 400,  # a lease beyond the broker's settings
}
# 405: a name that is "." is taken out of the path by HTTP clients. 431: a list of very long names.
USUAL = ["2xx", "3xx", "401", "403", "404", "405", "409", "410", "429", "431", "5xx"]


def config(folder: Path) -> Path:
    lines = [
        "[checks]",
        f"positive_data_acceptance.expected-statuses = {USUAL}",
    ]
    for path, status in EXPECTED.items():
        lines += [
            "[[operations]]",
            f'include-path = "{path}"',
            f"checks.positive_data_acceptance.expected-statuses = {[*USUAL, str(status)]}",
        ]
    where = folder / "schemathesis.toml"
    where.write_text("\n".join(lines) + "\n")
    return where


@pytest.mark.long
def test_what_the_document_promises_holds(tmp_path: Path, broker: BrokerProcess) -> None:
    seed = REQUESTS_SEED
    url = f"http://127.0.0.1:{broker.ports['http']}/openapi.json"
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config(tmp_path))]
    command += ["run", url, "--phases", "examples,coverage,fuzzing", "--max-examples", str(EXAMPLES)]
    # An answer that never ends is tested in test_events.py.
    command += ["--exclude-path", "/v1/events", "--request-timeout", str(REQUEST_SECONDS_MAX), "--seed", seed]
    command += ["--generation-database", "none", "--continue-on-failure", "--no-color"]
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "tests.http.openapi_hooks", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS_MAX,
        env=environment,
        cwd=tmp_path,  # it leaves a folder behind
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in broker.log()


def test_every_route_is_in_the_document_with_its_role(api: Api) -> None:
    document = api.get("/openapi.json")
    assert document["openapi"] == "3.1.0"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"].endswith("."), (method, path)
            assert "500" in operation["responses"], (method, path)
            closed = path.startswith("/v1/") or path == "/metrics"
            assert ("401" in operation["responses"]) == closed, (method, path)
    identifiers = [
        operation["operationId"]
        for operations in document["paths"].values()
        for operation in operations.values()
    ]
    assert len(identifiers) == len(set(identifiers))
