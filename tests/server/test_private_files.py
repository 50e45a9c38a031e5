"""What a broker leaves on a machine is its own user's: modes under every umask, and links to elsewhere."""

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.cli.main import main
from tests.http.api import NDJSON, Api
from tests.server.harness import BrokerProcess, expect_dispatch, phpmq

LEFT = "0" * 20 + ".seg"


class Umasked(BrokerProcess):
    """A broker that was started with another umask."""

    umask = "000"

    def command(self) -> list[str]:
        return ["bash", "-c", f'umask {self.umask}; exec "$@"', "bash", *super().command()]


class Strict(Umasked):
    umask = "077"


def modes(folder: Path) -> dict[str, int]:
    """Of all that is there; a working broker removes some of it meanwhile."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        with suppress(FileNotFoundError):
            found[str(path)] = stat.S_IMODE(path.lstat().st_mode)
    return found


def wrong_modes(folder: Path) -> dict[str, str]:
    return {
        path: f"{mode:o}"
        for path, mode in modes(folder).items()
        if mode != (0o700 if Path(path).is_dir() else 0o600)
    }


def write_something(broker: BrokerProcess) -> None:
    with broker.wire("phpmq") as wire:
        for number in range(20):
            wire.say(phpmq(1, (1, b"q"), (2, b"%03d" % number + bytes(10_000))))
        wire.say(phpmq(2, (1, b"q"), (4, b"1")))
        expect_dispatch(wire, b"q", b"000" + bytes(10_000))


def test_everything_is_private_under_an_open_umask(tmp_path: Path) -> None:
    top = tmp_path / "made"
    flags = (
        "--data",
        str(top / "by" / "the broker"),
        "--log-segment-bytes",
        "65536",
        "--log-snapshot-blocks",
        "1",
    )
    broker = Umasked(tmp_path, *flags, "--http", "127.0.0.1:0").start()
    write_something(broker)
    with Api(broker.ports["http"]) as api:
        staged = api.ask(
            "POST", "/v1/stages", b'{"value": "x"}\n', {"Content-Type": NDJSON}, transaction="t", queue="q"
        )
        assert staged.status == 200, staged
    assert len(list(top.rglob("*.seg"))) > 2
    assert wrong_modes(top) == {}
    broker.kill()
    broker.start()
    assert broker.stop() == 0
    assert wrong_modes(top) == {}
    assert "open to other users" not in broker.log()


@pytest.mark.parametrize(
    ("kind", "flags", "mode"),
    [
        (Umasked, (), 0o600),
        (Strict, ("--socket-mode", "0660"), 0o660),
        (Umasked, ("--socket-mode", "777"), 0o777),
    ],
)
def test_sockets_have_the_mode_of_the_setting(
    tmp_path: Path, kind: type[Umasked], flags: tuple[str, ...], mode: int
) -> None:
    paths = {name: tmp_path / f"{name}.sock" for name in ("sspq", "http")}
    doors = [part for name, path in paths.items() for part in (f"--{name}", f"unix:{path}")]
    broker = kind(tmp_path, *doors, *flags).start()
    assert {name: stat.S_IMODE(path.lstat().st_mode) for name, path in paths.items()} == dict.fromkeys(
        paths, mode
    )
    assert broker.stop() == 0


@pytest.mark.parametrize("name", ["lock", "watermark", LEFT, "spare-1"])
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str) -> None:
    data, precious = tmp_path / "data", tmp_path / "precious"
    precious.write_text("precious")
    data.mkdir()
    (data / name).symlink_to(precious)
    broker = BrokerProcess(tmp_path)
    if name == "spare-1":  # What may be removed is: the link goes, and not what it leads to.
        assert broker.start().stop() == 0
    else:
        with pytest.raises(AssertionError, match="did not start"):
            broker.start()
        line = f"{data}/{name}: is a symbolic link, and nothing is written through one; take it away"
        assert broker.log().splitlines()[-1] == f"penstock serve: {line}"
        assert "Traceback" not in broker.log()
    assert precious.read_text() == "precious"


def test_a_folder_may_be_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    broker = BrokerProcess(tmp_path).start()
    write_something(broker)
    assert broker.stop() == 0
    assert (tmp_path / "disk" / LEFT).is_file()


def test_what_was_left_open_to_others_is_closed_and_told(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path).start()
    write_something(broker)
    assert broker.stop() == 0
    data = tmp_path / "data"
    (data / "stages").mkdir()
    for path in modes(data):
        os.chmod(path, 0o755 if Path(path).is_dir() else 0o644)
    broker.start()
    assert wrong_modes(data) == {}
    assert f"data folder {data} was open to other users: 0755, now 0700" in broker.log()
    write_something(broker)
    assert broker.stop() == 0


def test_a_folder_with_something_else_in_it_stays_open_and_is_told(tmp_path: Path) -> None:
    data = tmp_path / "shared"
    data.mkdir()
    (data / "readme.txt").write_text("precious")
    for path in modes(data):
        os.chmod(path, 0o775)
    broker = BrokerProcess(tmp_path, "--data", str(data)).start()
    found = modes(data)
    assert broker.stop() == 0
    assert (found.pop(str(data)), found.pop(str(data / "readme.txt"))) == (0o775, 0o775)
    assert set(found.values()) == {0o600}
    line = f"data folder {data} is open to other users (0775), and it holds more than a log ('readme.txt')"
    assert line in broker.log()


def test_readers_change_no_modes(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path).start()
    write_something(broker)
    assert broker.stop() == 0
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "data", copy)
    os.chmod(copy, 0o755)
    before = modes(copy)
    assert main(["verify", str(copy)]) == 0
    assert modes(copy) == before
