"""The image: what its Containerfile promises, and, where there is a builder, that it is built and keeps it.

No registry is asked. The base is made here, of the Python that runs the tests and the libraries it needs: no
shell, no package manager, nothing that the image could lean on unseen. It is run without a container engine:
root is the image, mounted read-only, in namespaces of its own; process 1 is what the image says, as its user.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import __version__
from penstock.client import PhpmqClient
from penstock.common.ready import wait_ready
from penstock.server.settings import TABLE
from tests.server.harness import ROOT

SECONDS = 600
TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8")
LINES = re.sub(r"\\\n\s*", "", TEXT).splitlines()

can_build = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("buildah") is None,
    reason="an image is built by root, where buildah is: apt-get install buildah",
)


def said(word: str) -> list[str]:
    return [line.removeprefix(f"{word} ") for line in LINES if line.startswith(f"{word} ")]


def test_the_file_says_what_it_promises() -> None:
    assert said("USER") == ["10001:10001"]
    assert said("VOLUME") == said("WORKDIR") == ["/data"]
    assert said("STOPSIGNAL") == ["SIGTERM"]
    doors = {one.name: str(one.default) for one in TABLE}
    ports = [doors[name].rpartition(":")[2] for name in ("sspq", "phpmq", "rq", "http")]
    assert said("EXPOSE")[0].split() == ports
    # Without a shell in between, process 1 is the broker, and no base needs one.
    for word in ("RUN", "ENTRYPOINT", "CMD"):
        assert all(json.loads(one) for one in said(word)), word
    (health,) = said("HEALTHCHECK")
    assert json.loads(health.partition(" CMD ")[2])[0] == "python3"


# --- built, and run -----------------------------------------------------------------------------


def run(*words: str | Path, cwd: Path = ROOT, **around: str) -> str:
    done = subprocess.run(
        words, cwd=cwd, env=os.environ | around, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def needed_by(programs: list[Path]) -> set[Path]:
    found = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    return {Path(path) for path in re.findall(r"(/\S+) \(0x", found)}


def make_base(folder: Path) -> None:
    """This Python, where programs look for it, and the libraries that it and what is compiled for it need."""
    home = Path(sys.base_prefix)
    number = f"python3.{sys.version_info.minor}"
    library = Path("lib", number)
    ignore = shutil.ignore_patterns(
        "__pycache__", "test", "tests", "idlelib", "ensurepip", "site-packages", "*.a"
    )
    shutil.copytree(home / library, folder / "usr/local" / library, ignore=ignore, symlinks=True)
    (folder / "usr/local/bin").mkdir(parents=True)
    program = folder / "usr/local/bin" / number
    shutil.copy2(Path(home, "bin", number).resolve(), program)
    program.with_name("python3").symlink_to(number)
    modules = [*(folder / "usr/local" / library / "lib-dynload").glob("*.so")]
    own = [
        path for path in Path(sys.prefix, library, "site-packages").rglob("*.so") if "uvloop" in path.parts
    ]
    needed = needed_by([program, *modules, *own])
    # The C library asks for it by name, when a thread ends while its process does.
    needed |= {path.with_name("libgcc_s.so.1") for path in needed if path.name == "libc.so.6"}
    for path in needed:
        place = folder / path.relative_to("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path.resolve(), place)
    for name in ("tmp", "proc", "dev", "etc"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "Containerfile").write_text("FROM scratch\nCOPY usr /usr\nCOPY lib* /lib/\n")


class Built:
    """An image, in a store of its own."""

    def __init__(self, folder: Path) -> None:
        self._flags = [
            "--root",
            str(folder / "store"),
            "--runroot",
            str(folder / "run"),
            "--storage-driver",
            "vfs",
        ]
        base = folder / "base"
        base.mkdir()
        make_base(base)
        self.call("from", "--name", "base", "scratch")
        mounted = Path(self.call("mount", "base").strip())
        shutil.copytree(base, mounted, symlinks=True, dirs_exist_ok=True)
        self.call("commit", "--quiet", "--rm", "base", "localhost/penstock-base")
        run(
            *("scripts/image", "--isolation", "chroot", "--pull-never"),
            BASE="localhost/penstock-base",
            IMAGE="localhost/penstock-tested",
            PYTHON_VERSION=f"3.{sys.version_info.minor}",
            EXTRAS="",
            BUILDER_FLAGS=" ".join(self._flags),
        )
        self.call("from", "--name", "tested", "--pull-never", "localhost/penstock-tested")
        self.root = Path(self.call("mount", "tested").strip())
        config = json.loads(self.call("inspect", "--type", "image", "localhost/penstock-tested"))
        self.config: dict[str, Any] = config["Docker"]["config"]

    def call(self, *words: str) -> str:
        return run("buildah", *self._flags, *words)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    folder = tmp_path_factory.mktemp("image")
    yield Built(folder)
    shutil.rmtree(folder, ignore_errors=True)  # a store is large


INSIDE = """
set -e
mount --make-rprivate /
mount --bind "$1" "$1"
mount --bind "$2" "$1/data"
mount -t tmpfs tmpfs "$1/tmp"
mount -t proc proc "$1/proc"
mount -t tmpfs tmpfs "$1/dev"
mknod -m 666 "$1/dev/null" c 1 3
mknod -m 666 "$1/dev/urandom" c 1 9
mount -o remount,bind,ro "$1"
shift 2
exec env -i "$@"
"""


def start(built: Built, data: Path, *words: str, **more: str) -> "subprocess.Popen[str]":
    """As an engine does it with --read-only, --tmpfs /tmp and --network host."""
    config = built.config
    around = [*config["Env"], *(f"{name}={value}" for name, value in more.items())]
    command = [*config["Entrypoint"], *(words or config["Cmd"])]
    chroot = shutil.which("chroot") or "chroot"  # the rest is looked for where the image says
    enter = [chroot, f"--userspec={config['User']}", "--groups=", str(built.root)]
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    script = ["bash", "-c", INSIDE, "bash", str(built.root), str(data)]
    return subprocess.Popen(
        [*apart, *script, *around, *enter, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def first_process(unshared: "subprocess.Popen[str]") -> int:
    return int(Path(f"/proc/{unshared.pid}/task/{unshared.pid}/children").read_text())


@can_build
def test_it_is_what_the_file_says(built: Built) -> None:
    assert built.config["User"] == "10001:10001"
    assert (built.config["Entrypoint"], built.config["Cmd"]) == (["penstock"], ["serve"])
    assert built.config["Healthcheck"]["Test"][:2] == ["CMD", "python3"]
    assert (built.root / "data").stat().st_uid == 10001
    assert [*built.root.glob("usr/local/lib/*/asyncio/__pycache__/*.pyc")]
    assert not (built.root / "wheels").exists()
    installed = {
        path.name.partition("-")[0]
        for path in built.root.glob("opt/penstock/lib/*/site-packages/*.dist-info")
    }
    assert {"penstock", "uvloop", "starlette"} <= installed
    assert not {"pip", "setuptools", "pytest", "pyspark"} & installed


@can_build
def test_it_serves_with_a_read_only_root_as_nobody_and_stops_at_sigterm(built: Built, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    os.chown(data, 10001, 10001)
    free = {
        "PENSTOCK_SSPQ": "off",
        "PENSTOCK_RQ": "off",
        "PENSTOCK_PHPMQ": "127.0.0.1:0",
        "PENSTOCK_HTTP": "127.0.0.1:0",
    }
    for round_ in range(2):
        unshared = start(built, data, **free)
        try:
            doors = dict(wait_ready(unshared, SECONDS))
            broker = first_process(unshared)
            status = Path(f"/proc/{broker}/status").read_text()
            assert re.findall(r"^Uid:\s+(\d+)", status, re.MULTILINE) == ["10001"]
            assert re.findall(r"^NSpid:.*\s(\d+)$", status, re.MULTILINE) == ["1"]
            with PhpmqClient(f"phpmq://{doors['phpmq']}") as mq:
                if round_ == 0:
                    mq.send_many("orders", [b"one", b"two"])
                    (first,) = mq.consume("orders", count=1)
                    first.ack()
                else:
                    (second,) = mq.consume("orders", count=1)
                    assert second.body == b"two"
                    second.ack()
            for path in ("/healthz", "/readyz"):
                with urllib.request.urlopen(f"http://{doors['http']}{path}", timeout=SECONDS) as answer:
                    assert answer.status == 200
            check = built.config["Healthcheck"]["Test"][-1].replace("127.0.0.1:9180", doors["http"])
            assert subprocess.run([sys.executable, "-c", check], check=False, timeout=SECONDS).returncode == 0
            os.kill(broker, signal.SIGTERM if round_ else signal.SIGKILL)
            _, said_last = unshared.communicate(timeout=SECONDS)
        finally:
            unshared.kill()
            unshared.wait()
        assert "Traceback" not in said_last
        assert "Read-only file system" not in said_last
        if round_:
            assert unshared.returncode == 0, said_last
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(doors["http"].rpartition(":")[2])), timeout=SECONDS)


@can_build
def test_any_command_of_it_is_there(built: Built, tmp_path: Path) -> None:
    out, _ = start(built, tmp_path, "--version").communicate(timeout=SECONDS)
    assert out == f"penstock {__version__}\n"
