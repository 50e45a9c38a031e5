"""The ready line, as it is printed and waited for."""

import subprocess
import sys

import pytest

from penstock.common.ready import NotReady, ready_line, wait_ready

DOORS = [("sspq", "127.0.0.1:8888"), ("sspq", "unix:/run/a=b.sock"), ("http", "[::1]:8300")]


def started(program: str, *, text: bool = True) -> "subprocess.Popen[str] | subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=text)


@pytest.mark.parametrize("text", [True, False])
def test_what_is_printed_is_read(text: bool) -> None:
    assert ready_line(DOORS[::2]) == "penstock ready sspq=127.0.0.1:8888 http=[::1]:8300"
    process = started(f"import time; print({ready_line(DOORS)!r}, flush=True); time.sleep(60)", text=text)
    try:
        assert wait_ready(process, 20.0) == DOORS
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize(
    ("program", "seconds", "said"),
    [
        ("pass", 20.0, "it ended"),
        ("print('something else')", 20.0, "it said 'something else"),
        ("import time; time.sleep(60)", 0.2, "not within 0.2 s"),
    ],
)
def test_who_does_not_say_it_is_gone(program: str, seconds: float, said: str) -> None:
    process = started(program)
    with pytest.raises(NotReady, match=f"the broker did not start: {said}"):
        wait_ready(process, seconds)
    assert process.poll() is not None
