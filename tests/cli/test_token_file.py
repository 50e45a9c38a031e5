"""Tokens by `--token-file`, standard input and PENSTOCK_TOKEN_FILE, which no list of processes shows; and
files that other users can read are told of, by the commands and by the broker."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli import completion
from penstock.cli.main import COMMANDS, command_parser, load
from penstock.client import HttpClient
from tests.certificates import make_authority, make_certificate
from tests.server.harness import BrokerProcess

TOKEN = "0123456789abcdef0123"
SETTINGS = f'[[http.tokens]]\nname = "a"\nrole = "admin"\ntoken = "{TOKEN}"\n'
WARNING = "holds a secret, and other users can read it; chmod 600"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("tokens")
    config = folder / "penstock.toml"
    config.write_text(SETTINGS)
    config.chmod(0o600)
    process = BrokerProcess(folder, "--http", "127.0.0.1:0", "--config", str(config)).start()
    yield process
    assert process.stop() == 0
    assert "holds a secret" not in process.log()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


def penstock(
    broker: BrokerProcess, *words: str, stdin: str = "", **around: str
) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return subprocess.run(
        [sys.executable, "-m", "penstock", *words, "--url", f"http://127.0.0.1:{broker.ports['http']}"],
        env=environment | around,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def messages(broker: BrokerProcess, queue: str) -> list[bytes]:
    with HttpClient(f"http://127.0.0.1:{broker.ports['http']}", token=TOKEN) as api:
        return [message.value for message in api.peek(queue)]


def test_a_command_takes_its_token_from_a_file(broker: BrokerProcess, file: Path) -> None:
    for done in (
        penstock(broker, "send", "by-file", "x", "--token-file", str(file)),
        penstock(broker, "send", "by-file", "y", PENSTOCK_TOKEN_FILE=str(file)),
        penstock(broker, "queues", "--token-file", str(file), PENSTOCK_TOKEN="the-flag-goes-before-it"),
    ):
        assert (done.returncode, done.stderr) == (0, "")
    assert messages(broker, "by-file") == [b"x", b"y"]


@pytest.mark.parametrize("via", ["http", "phpmq"])
def test_the_first_line_of_standard_input_is_the_token_and_never_a_message(
    broker: BrokerProcess, via: str
) -> None:
    done = penstock(broker, "send", f"in-{via}", "--via", via, "--token-file", "-", stdin=f"{TOKEN}\nbody")
    assert (done.returncode, done.stderr) == (0, "")
    assert messages(broker, f"in-{via}") == [b"body"]


def test_a_file_that_others_can_read_is_told_once(broker: BrokerProcess, file: Path) -> None:
    file.chmod(0o644)
    for done in (
        penstock(broker, "send", "warned", "x", "--via", "rq", "--token-file", str(file)),
        penstock(broker, "queues", PENSTOCK_TOKEN_FILE=str(file)),
    ):
        assert (done.returncode, done.stderr) == (0, f"penstock: warning: {file} {WARNING} {file}\n")


def test_mistakes(broker: BrokerProcess, file: Path) -> None:
    done = penstock(broker, "queues", "--token-file", str(file), "--token", TOKEN)
    assert (done.returncode, done.stderr) == (
        2,
        "penstock queues: --token and --token-file: give one of the two\n",
    )
    done = penstock(broker, "queues", "--token-file", f"{file}.not")
    assert done.returncode == 1
    assert done.stderr.startswith(f"penstock: {file}.not: No such file or directory; name a file")
    done = penstock(broker, "queues", "--token-file", "-")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("penstock: standard input has no token in it")


@pytest.mark.parametrize("name", COMMANDS)
def test_wherever_there_is_a_token_it_can_come_from_a_file(name: str) -> None:
    actions = {action.dest: action for action in command_parser(name, load(name, COMMANDS))._actions}
    file = actions.get("token_file")
    assert ("token" in actions) == (file is not None)
    if file is not None:
        assert file.metavar == "FILE"  # so that shells complete it as a path
        assert "PENSTOCK_TOKEN_FILE" in str(file.help)


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_shells_offer_it(shell: str) -> None:
    assert "token-file" in completion.script(shell, {"queues": COMMANDS["queues"]})


def test_the_broker_tells_of_files_that_others_can_read(tmp_path: Path) -> None:
    make_authority(tmp_path, "ours")
    make_certificate(tmp_path, "broker", "ours")
    config, key = tmp_path / "penstock.toml", tmp_path / "open.key"
    shutil.copyfile(tmp_path / "broker.key", key)
    listener = '[[listener]]\nprotocol = "rq"\naddress = "127.0.0.1:0"\n'
    files = f'tls-certificate = "{tmp_path}/broker.pem"\ntls-key = "{key}"\n'
    config.write_text(SETTINGS + listener + files)
    for path in (config, key):
        path.chmod(0o640)
    process = BrokerProcess(tmp_path, "--http", "127.0.0.1:0", "--config", str(config)).start()
    assert process.stop() == 0
    lines = [line for line in process.log().splitlines() if "holds a secret" in line]
    assert len(lines) == 2
    for line, path in zip(lines, (config, key), strict=True):
        assert line.endswith(f"{path} {WARNING} {path}")
        assert TOKEN not in line
