"""docs/clients.md: every example is run, and says what it says there.

A Python block is a program of its own; what it prints is compared with its `# ->` lines. In a console block,
lines that begin with `$` are run in one shell, and the others are what they print. The addresses of the page
are replaced by those of the broker under test.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.client import PhpmqClient
from penstock.client.options import Options
from tests.client.conftest import Doors
from tests.server.harness import BrokerProcess

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROGRAMS = [block for kind, block in BLOCKS if kind == "python"]
CONSOLES = [block for kind, block in BLOCKS if kind == "console"]

PORTS = {"sspq": "8888", "phpmq": "9100", "rq": "13700", "http": "9180"}

SHELL = """
penstock() {{
    local via=phpmq previous= word
    case $1 in send) via=http ;; request|reply|broadcast) via=rq ;; esac
    for word in "$@"; do
        [ "$previous" = --via ] && via=$word
        [ "$1 $word" = "receive --exec" ] && via=http
        previous=$word
    done
    declare -A ports=({ports})
    "{python}" -m penstock "$@" --url "$via://127.0.0.1:${{ports[$via]}}"
}}
{commands}
wait
"""


def test_there_are_only_blocks_that_are_run() -> None:
    assert {kind for kind, _ in BLOCKS} == {"python", "console"}
    assert len(PROGRAMS) >= 10
    assert len(CONSOLES) >= 3
    assert PAGE.count("```") == 2 * len(BLOCKS)


@pytest.fixture(autouse=True)
def _orders_is_empty_again(broker: BrokerProcess) -> Iterator[None]:
    """The examples use the same queue, and some leave something there."""
    yield
    with PhpmqClient(f"phpmq://127.0.0.1:{broker.ports['phpmq']}") as mq:
        for message in mq.consume("orders", timeout=0.02):
            message.ack()


@pytest.mark.parametrize("program", PROGRAMS, ids=range(1, len(PROGRAMS) + 1))
def test_python(broker: BrokerProcess, doors: Doors, program: str) -> None:
    expected = re.findall(r"^# -> (.*)$", program, re.MULTILINE)
    real = program.replace("broker.example:9100", f"localhost:{doors.process.ports['phpmq']}")
    real = real.replace("/etc/penstock/", f"{doors.folder}/")
    for protocol, port in PORTS.items():
        real = real.replace(f"127.0.0.1:{port}", f"127.0.0.1:{broker.ports[protocol]}")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(real, "docs/clients.md", "exec"), {"__name__": "__main__"})
    assert printed.getvalue().splitlines() == expected


@pytest.mark.parametrize("console", CONSOLES, ids=range(1, len(CONSOLES) + 1))
def test_console(broker: BrokerProcess, console: str) -> None:
    commands = "\n".join(line[2:] for line in console.splitlines() if line.startswith("$ "))
    expected = [line for line in console.splitlines() if not line.startswith("$ ")]
    ports = " ".join(f"[{protocol}]={port}" for protocol, port in broker.ports.items())
    done = subprocess.run(
        ["bash", "-euc", SHELL.format(python=sys.executable, commands=commands, ports=ports)],
        env={name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    shown = "\n".join(re.escape(line).replace("…", ".*") for line in expected)
    assert (done.returncode, bool(re.fullmatch(shown, done.stdout.strip("\n")))) == (0, True), done


def test_the_options_are_those_of_the_page() -> None:
    (table,) = re.findall(r"^\| option \|.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    named = re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in table.strip().splitlines()[2:]))
    assert named == list(Options.__dataclass_fields__)
    defaults = dict(re.findall(r"^\| `(\w+)` \| ([0-9.]+) \|", table, re.MULTILINE))
    assert {name: float(value) for name, value in defaults.items()} == {
        name: float(getattr(Options(), name)) for name in defaults
    }
