"""Unix sockets: a broker takes a path that nobody listens on, and gives it back. It takes nothing else."""

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.server.harness import RECEIVE, SEND, BrokerProcess, Wire, sspq, until
from tests.server.inside import LOOPS, Inside, run

DOORS = ["--sspq", "--http"]


def refused(folder: Path, *flags: str) -> str:
    """What a broker says that cannot start."""
    folder.mkdir(exist_ok=True)
    broker = BrokerProcess(folder, *flags)
    with pytest.raises(AssertionError, match="did not start"):
        broker.start()
    assert "Traceback" not in broker.log()
    return broker.log().strip().splitlines()[-1]


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@pytest.mark.parametrize("door", DOORS)
def test_a_file_at_the_path_stays_what_it_is(tmp_path: Path, door: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    said = refused(tmp_path / "other", door, f"unix:{path}")
    assert path.read_text() == "precious"
    assert f"{door.strip('-')} listener unix:{path}: there is something at this path that is no" in said


@pytest.mark.parametrize("door", DOORS)
def test_a_path_that_somebody_listens_on_stays_theirs(tmp_path: Path, door: str) -> None:
    path = tmp_path / "door.sock"
    broker = BrokerProcess(tmp_path, door, f"unix:{path}").start()
    said = refused(tmp_path / "other", door, f"unix:{path}")
    assert f"{door.strip('-')} listener unix:{path}: Address already in use" in said
    assert answers(path)
    assert broker.stop() == 0
    assert not path.exists()


def test_who_cannot_start_for_another_reason_leaves_the_path_alone(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    broker = BrokerProcess(tmp_path, "--http", f"unix:{path}").start()
    taken = f"127.0.0.1:{broker.ports['phpmq']}"
    assert taken in refused(tmp_path / "other", "--phpmq", taken, "--http", f"unix:{path}")
    assert answers(path)
    assert broker.stop() == 0


@pytest.mark.parametrize("door", DOORS)
def test_what_a_killed_broker_left_is_taken(tmp_path: Path, door: str) -> None:
    path = tmp_path / "door.sock"
    broker = BrokerProcess(tmp_path, door, f"unix:{path}").start()
    broker.kill()
    assert path.exists()
    until(lambda: not answers(path), "the second process to be gone too")
    broker.start()
    assert answers(path)
    assert broker.stop() == 0


def test_a_broker_that_stops_does_not_take_its_successors_path(tmp_path: Path) -> None:
    path = tmp_path / "door.sock"
    old = BrokerProcess(tmp_path, "--sspq", f"unix:{path}", "--drain-seconds", "15").start()
    holder = Wire(str(path))
    holder.say(sspq(SEND, b"held"), sspq(RECEIVE))
    holder.expect(sspq(SEND, b"held"))
    old.signal(signal.SIGTERM)
    until(lambda: not answers(path), "the old broker to listen no more")
    (tmp_path / "new").mkdir()
    new = BrokerProcess(tmp_path / "new", "--sspq", f"unix:{path}").start()
    assert old.running
    holder.close()
    assert old.wait() == 0
    assert answers(path)
    assert new.stop() == 0
    assert not path.exists()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_socket_that_somebody_has_taken_away_is_not_missed(tmp_path: Path, loop: str) -> None:
    path = tmp_path / "door.sock"

    async def test() -> None:
        async with Inside.open(tmp_path, f"--sspq unix:{path}"):
            assert answers(path)
            os.unlink(path)

    run(loop, test())
