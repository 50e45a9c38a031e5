"""Settings that are read again where a broker is one of several: they count for whoever leads next."""

import asyncio
import os
import shlex
from pathlib import Path

import pytest

from penstock.cluster.front import front_end
from penstock.log.log import open_log
from penstock.server.settings import Settings
from penstock.server.settings_read import load
from tests.server.settings_source import parser


def test_policies_that_a_follower_reads_again_are_in_force_when_it_leads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "penstock.toml"
    words = f"--engine nats://127.0.0.1:4222 --http off --data {tmp_path}/data --config {file}"

    def read() -> Settings:
        return load(parser().parse_args(shlex.split(words)), {})

    async def test() -> None:
        file.write_text("[queue.q]\nmax-deliveries = 3\n")
        front = front_end(read(), read)
        file.write_text("[queue.q]\nmax-deliveries = 7\n")
        front._asked_to_reload()
        log = open_log(os.path.join(tmp_path, "log"), front.now_us(), wake=lambda: None)
        try:
            front.make_broker(log)
            assert log.policies.for_queue("q").max_deliveries == 7
        finally:
            log.close(front.now_us())

    caplog.set_level("INFO")
    asyncio.run(test())
    assert "policies and users read again" in caplog.text
    assert "restart" not in caplog.text, "nothing but the policies has changed"
