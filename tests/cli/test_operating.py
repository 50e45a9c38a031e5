"""docs/operating.md: every example is run, in the order of the page, and prints what the page says.

In a console block, lines that begin with `$` are run in one shell, and the others are what they print. Ages
and rates differ from run to run, and what the doctor finds from machine to machine: of these only the places
are compared. Commands that stand in the text are read by the commands' own parsers.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli import main as cli
from tests.http.api import Api
from tests.http.morgue import expire, reject
from tests.server.harness import BrokerProcess

DOCS = Path(__file__).parents[2] / "docs"
TEXTS = {
    page: (DOCS / f"{page}.md").read_text(encoding="utf-8") for page in ("operating", "workers", "retries")
}
PAGE = TEXTS["operating"]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
CONSOLES = [block for kind, block in BLOCKS if kind == "console"]
(SETTINGS,) = [block for kind, block in BLOCKS if kind == "toml"]
TOKENS = dict(re.findall(r'role = "(\w+)"\ntoken = "(\w+)"', SETTINGS))

ORDERS = [
    b'{"id": %d, "region": "%s"}' % (number, region)
    for number, region in enumerate([b"north", b"south", b"south", *[b"north"] * 5], 1)
]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker with the tokens of the page, and with the queues that its examples speak of."""
    folder = tmp_path_factory.mktemp("operating")
    config = folder / "penstock.toml"
    config.write_text(SETTINGS)
    process = BrokerProcess(folder, "--http", "127.0.0.1:0", "--config", str(config)).start()
    with Api(process.ports["http"], TOKENS["admin"]) as api:
        reject(process, api, "orders", ORDERS[:2])
        expire(api, "orders", ORDERS[2:3])
        api.send("orders", *ORDERS[3:])
        api.send("invoices", b"invoice 4711")
    yield process
    assert process.stop() == 0
    assert "Traceback" not in process.log()


def test_there_are_only_blocks_that_are_used() -> None:
    assert {kind for kind, _ in BLOCKS} == {"console", "toml"}
    assert len(CONSOLES) >= 8
    assert PAGE.count("```") == 2 * len(BLOCKS)


@pytest.mark.long
def test_the_console_says_what_the_page_says(broker: BrokerProcess) -> None:
    for console in CONSOLES:
        check(broker, console)


def check(broker: BrokerProcess, console: str) -> None:
    commands = "\n".join(line[2:] for line in console.splitlines() if line.startswith("$ "))
    commands = commands.replace("/var/lib/penstock", shlex.quote(str(broker.folder / "data")))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    done = subprocess.run(
        ["bash", "-euc", f'penstock() {{ "{sys.executable}" -m penstock "$@"; }}\n{commands}'],
        env=environment
        | {
            "PENSTOCK_URL": f"http://127.0.0.1:{broker.ports['http']}",
            "PENSTOCK_TOKEN": TOKENS["admin"],
            "HOME": str(broker.folder),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, (commands, done.stderr)
    printed = done.stdout.splitlines()
    expected = [line for line in console.splitlines() if not line.startswith("$ ")]
    assert [likeness(line) for line in printed] == [likeness(line) for line in expected], commands


def likeness(line: str) -> str:
    """A line without what differs from run to run."""
    if finding := re.match(r"(?:ok  |note|warn)  ([\w -]+): ", line):
        return finding[1]
    line = re.sub(r"\d+ warnings?", "WARNINGS", line)
    line = re.sub(r"<?\b\d+ (s|min|h|d)\b( \d+ (min|h)\b)?", "TIME", line)
    if re.search(r"TIME +\d+ B", line):  # of `penstock queues`: the two numbers before the time are rates
        line = re.sub(r"[<\d.,]+ +[<\d.,]+ +TIME", "RATES TIME", line)
    line = re.sub(r"\S+/s, \S+/s", "RATES", line)
    return " ".join(line.split())


@pytest.mark.parametrize("page", TEXTS)
def test_commands_in_the_text_are_real(page: str) -> None:
    prose = re.sub(r"^```.*?^```$", "", TEXTS[page], flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"`penstock ([^`]+)`", " ".join(prose.split()))
    assert len(found) > 1
    for line in found:
        name, *words = shlex.split(line)
        parser = cli.command_parser(name, cli.load(name, cli.COMMANDS))
        options = {flag for action in parser._actions for flag in action.option_strings}
        assert {word for word in words if word.startswith("--")} <= options, line


@pytest.mark.parametrize("page", TEXTS)
def test_the_pages_that_it_names_are_there(page: str) -> None:
    pages = re.findall(r"\]\(([\w-]+\.md)(#[\w-]+)?\)", TEXTS[page])
    assert len(pages) >= 3
    for named, anchor in pages:
        headings = re.findall(r"^#+ (.+)$", (DOCS / named).read_text(encoding="utf-8"), re.MULTILINE)
        anchors = {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, (named, anchor)
