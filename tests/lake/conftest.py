"""Brokers as the tests of the HTTP API have them, and an object store."""

import contextlib
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.conftest import start_broker as start_broker
from tests.lake.rig import WAIT_SECONDS
from tests.server.harness import until


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    """An S3 server with an empty bucket; the environment that leads there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    quiet: Any = subprocess.DEVNULL
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=quiet, stderr=quiet
    )

    def answers() -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
            return True
        return False

    try:
        until(answers, "an S3 server", WAIT_SECONDS)
        yield {
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "something",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
        }
    finally:
        server.kill()
        server.wait()
