"""The end of the demonstration on a terminal: the broker stays up until somebody has looked."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.demo import staying
from penstock.log.log import open_log
from tests.cli.terminal import Terminal
from tests.http.api import Api
from tests.server.harness import ROOT, WAIT_SECONDS, until
from tests.top.screen import without

DEMO = ("demo", "--no-spark", "--messages", "10")
STAY = (
    sys.executable,
    "-c",
    "import sys; from penstock.demo.screen import Screen; from penstock.demo.staying import stay, watched\n"
    "if watched(): stay(Screen(sys.stdout), 'http://127.0.0.1:1')\n"
    "print('and on')",
)
"""The end alone, without the demonstration before it."""


class Demo(Terminal):
    """The demonstration; where a test fails, it is ended so that it can end its broker."""

    def __exit__(self, *failure: Any) -> None:
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
            self.end()
        super().__exit__(*failure)


def port_of(said: str) -> int:
    """The port of the address that the demo has named."""
    found = re.search(r"http://127\.0\.0\.1:(\d+)/", said)
    assert found, said
    return int(found[1])


def refused(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) != 0


def test_the_broker_stays_up_until_enter(tmp_path: Path) -> None:
    # A CI that runs this test is not what the demo sees.
    with Demo(*DEMO, around={"TMPDIR": str(tmp_path), "CI": ""}) as terminal:
        said = terminal.wait_for("Enter ends it.")
        port = port_of(said)
        assert re.search(rf"in a browser +http://127\.0\.0\.1:{port}/\r\n", said)
        assert re.search(rf"in a terminal +\S*penstock top --url http://127\.0\.0\.1:{port}\r\n", said)
        assert "Done" not in said
        with Api(port) as api:
            assert "orders" in [queue["name"] for queue in api.get("/v1/queues")["queues"]]
        terminal.type("\n")
        terminal.wait_for("Done, in ")
        assert terminal.end() == 0
    assert refused(port)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_it_in_order(tmp_path: Path, number: signal.Signals) -> None:
    with Terminal(command=STAY, around={"CI": "", **without("nicegui", tmp_path)}) as terminal:
        said = terminal.wait_for("Enter ends it.")
        # Without the extra there is only the API to look at.
        assert re.search(r"the API +http://127\.0\.0\.1:1/v1/queues\r\n", said)
        assert "in a browser" not in said
        assert "penstock top" not in said
        terminal.signal(number)
        terminal.wait_for("and on")
        assert terminal.end() == 0


def test_a_closed_terminal_leaves_no_broker_behind(tmp_path: Path) -> None:
    terminal = Terminal(*DEMO, around={"TMPDIR": str(tmp_path), "CI": ""})
    said = terminal.wait_for("Enter ends it.")
    terminal.hang_up()
    until(lambda: refused(port_of(said)), "the broker to be gone")


def test_where_nobody_watches_it_ends_by_itself() -> None:
    with Terminal(command=STAY, around={"CI": "true"}) as terminal:
        assert terminal.end() == 0
        assert terminal.seen == "and on\r\n"
    ended = subprocess.run(STAY, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert ended.stdout == "and on\n"


@pytest.mark.parametrize(
    ("called", "command"),
    [
        (".venv/bin/penstock", ".venv/bin/penstock"),
        ("/with blanks/penstock", "'/with blanks/penstock'"),
        ("penstock/__main__.py", "penstock"),
    ],
)
def test_the_command_is_named_as_it_was_called(
    monkeypatch: pytest.MonkeyPatch, called: str, command: str
) -> None:
    monkeypatch.setattr(sys, "argv", [called, "demo"])
    (_, named) = staying.places("http://127.0.0.1:9180")[1]
    assert named == f"{command} top --url http://127.0.0.1:9180"


def test_a_demonstration_that_is_ended_leaves_no_broker_behind(tmp_path: Path) -> None:
    data = tmp_path / "demo"
    command = [sys.executable, "-m", "penstock", "demo", "--no-spark", "--messages", "1000000"]
    with subprocess.Popen([*command, "--data", str(data)], stdout=subprocess.DEVNULL, cwd=ROOT) as demo:
        until(lambda: any(data.rglob("*.seg")), "its broker to have a log")
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(WAIT_SECONDS) == 128 + signal.SIGTERM
    (log,) = {path.parent for path in data.rglob("*.seg")}
    open_log(str(log), 1_800_000_000_000_000).abandon()  # which nobody else has open
