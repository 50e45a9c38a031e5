"""examples/systemd: systemd reads the units, their sandboxes are tight, and the broker lives in its own.

`tests.sandbox` makes the sandbox, as root; that it forbids what it should is tried first.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.client import HttpClient, PhpmqClient
from penstock.common.ready import wait_ready
from penstock.server.settings import TABLE
from tests.sandbox import ROOT, STATE, allowed_calls, values

PATH = ROOT / "examples" / "systemd" / "penstock.service"
UNIT = PATH.read_text(encoding="utf-8")
PIPELINES = PATH.with_name("penstock-pipelines.service")
SECONDS = 60
EXPOSURE_MAX = 2.0

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make the sandbox")


def systemd_analyze(*words: str) -> str:
    done = subprocess.run(
        ["systemd-analyze", *words], capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert (done.returncode, done.stderr) == (0, ""), (done.stdout, done.stderr)
    return done.stdout


def test_it_is_the_one_that_is_installed() -> None:
    assert (ROOT / "penstock" / "cli" / "debian" / PATH.name).read_text(encoding="utf-8") == UNIT


@pytest.mark.parametrize("path", [PATH, PIPELINES], ids=lambda path: str(path.stem))
def test_the_sandbox_is_tight(path: Path) -> None:
    said = systemd_analyze("security", "--offline=yes", "--no-pager", str(path))
    found = re.search(rf"Overall exposure level for {path.name}: ([\d.]+)", said)
    assert found is not None, said
    assert float(found[1]) < EXPOSURE_MAX, said


@pytest.mark.parametrize("path", [PATH, PIPELINES], ids=lambda path: str(path.stem))
def test_systemd_knows_every_word_of_it(tmp_path: Path, path: Path) -> None:
    unit = path.read_text(encoding="utf-8")
    (tmp_path / path.name).write_text(unit.replace("/opt/penstock/bin/penstock", sys.executable))
    assert systemd_analyze("verify", "--man=no", str(tmp_path / path.name)) == ""


def test_pipelines_are_started_and_stopped_as_their_command_wants_it() -> None:
    unit = PIPELINES.read_text(encoding="utf-8")
    (line,) = values(unit, "ExecStart")
    assert shlex.split(line)[1:] == ["pipeline", "run", "/etc/penstock/pipelines"]
    assert (values(unit, "KillMode"), values(unit, "Restart")) == (["mixed"], ["on-failure"])
    assert "MemoryDenyWriteExecute" not in unit  # Java could not live with it.


def test_a_stop_has_the_time_that_it_needs() -> None:
    (drain,) = [setting.default for setting in TABLE if setting.name == "drain-seconds"]
    assert isinstance(drain, int)
    assert int(values(UNIT, "TimeoutStopSec")[0]) > drain + 2
    assert values(UNIT, "KillMode") == ["mixed"]


def test_what_it_allows_of_system_calls() -> None:
    allowed = allowed_calls(UNIT)
    assert {"openat", "fdatasync", "epoll_wait", "prlimit64", "setpriority"} <= allowed
    assert not {"mount", "ptrace", "setuid", "chroot", "bpf", "sched_setscheduler", "reboot"} & allowed


def inside(folder: Path, command: Sequence[str]) -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.sandbox", str(PATH), str(folder), *command],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


FORBIDDEN = """\
import mmap, os, pathlib, socket
def tried(what):
    try:
        what()
    except OSError as error:
        return error.strerror
    return "done"
print(*[
    tried(lambda: open("/var/lib/penstock/x", "w").close()),
    tried(lambda: open("SOURCES/x", "w")),
    tried(lambda: open("/tmp/x", "w")),
    tried(lambda: socket.socket(socket.AF_INET).close()),
    tried(lambda: socket.socket(socket.AF_NETLINK)),
    tried(lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC)),
    tried(lambda: os.chroot("/")),
    tried(lambda: os.sched_setaffinity(0, {0})),
    tried(lambda: open("/proc/meminfo")),
    oct(os.stat("/var/lib/penstock/x").st_mode & 0o777),
    pathlib.Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0],
], sep="; ")
"""


@as_root
def test_the_sandbox_of_the_test_forbids_what_the_unit_forbids(tmp_path: Path) -> None:
    script = FORBIDDEN.replace("SOURCES", str(ROOT))
    process = inside(tmp_path / "state", [sys.executable, "-c", script])
    out, err = process.communicate(timeout=SECONDS)
    assert err == ""
    assert out.rstrip("\n").split("; ") == [
        "done",
        "Read-only file system",
        "Read-only file system",
        "done",
        *["Operation not permitted"] * 4,
        "No such file or directory",
        "0o600",
        "0" * 16,
    ]


@as_root
def test_the_broker_lives_in_it(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (line,) = values(UNIT, "ExecStart")
    command, *words = shlex.split(line.replace("%S/penstock", STATE))
    assert (command, words[:3]) == (
        "/opt/penstock/bin/penstock",
        ["serve", "--config", "/etc/penstock/penstock.toml"],
    )
    config = tmp_path / "state" / "penstock.toml"  # in the one folder that both sides see
    config.parent.mkdir()
    config.write_text('sspq = "off"\nrq = "off"\nphpmq = "127.0.0.1:0"\nhttp = "127.0.0.1:0"\n')
    config.chmod(0o644)
    words[2] = f"{STATE}/{config.name}"
    process = inside(config.parent, [sys.executable, "-m", "penstock", *words])
    try:
        doors = dict(wait_ready(process, SECONDS))
        with PhpmqClient(f"phpmq://{doors['phpmq']}") as mq, HttpClient(f"http://{doors['http']}") as api:
            mq.send_many("orders", [b"one", b"two"])
            api.send("orders", b"three")
            bodies = []
            for message in mq.consume("orders", count=3):
                bodies.append(message.body)
                message.ack()
            assert bodies == [b"one", b"two", b"three"]
        for path in ("/", "/readyz", "/metrics", "/v1/queues/orders/log?view=messages&start=0"):
            with urllib.request.urlopen(f"http://{doors['http']}{path}", timeout=SECONDS) as answer:
                assert answer.status == 200
                assert answer.read()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=int(values(UNIT, "TimeoutStopSec")[0]))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert all(not entry.stat().st_mode & 0o077 for entry in config.parent.iterdir() if entry != config)
