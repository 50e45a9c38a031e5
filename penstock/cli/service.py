"""`penstock service install|uninstall`: the broker as a service of systemd, on this machine.

What is installed are two files beside this module, `debian/penstock.service` and `debian/penstock.toml`, with
the path of this very command in the first. Installing again renews the unit and leaves the settings alone;
uninstalling takes the unit away, leaves settings, messages and the user, and says how those go. Every step
is said before it is done; `--dry-run` says them all, prints both files and does nothing.

How it fails: whoever is not root, or has the command where the sandbox hides it (a home), hears what to do; a
step that fails ends it, and the next try goes on from there.
"""

import argparse
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from penstock.errors import Misuse, PenstockError

HELP = "install the broker as a service of systemd, or take that away"

FILES: Final = Path(__file__).parent / "debian"
UNIT: Final = Path("/etc/systemd/system/penstock.service")
CONFIG: Final = Path("/etc/penstock/penstock.toml")
DATA: Final = Path("/var/lib/penstock")
USER: Final = "penstock"
COMMAND_OF_UNIT: Final = "/opt/penstock/bin/penstock"
HIDDEN: Final = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")
"""What `ProtectHome=` and `PrivateTmp=` of the unit hide from the service."""

Step = tuple[str, Callable[[], object]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("act", choices=("install", "uninstall"), help="what to do")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")


def run(args: argparse.Namespace) -> int:
    command = Path(sys.executable).with_name("penstock")
    unit = (FILES / UNIT.name).read_text(encoding="utf-8").replace(COMMAND_OF_UNIT, str(command))
    config = (FILES / CONFIG.name).read_text(encoding="utf-8")
    steps = _install(unit, config) if args.act == "install" else _uninstall()
    if not args.dry_run:
        _refuse(args.act, command)
    for what, do in steps:
        print(f"{'would ' if args.dry_run else ''}{what}", flush=True)
        if not args.dry_run:
            _do(what, do)
    if args.act == "uninstall":
        rest = f"rm -r {CONFIG.parent} {DATA}; userdel {USER}"
        print(f"kept: {CONFIG}, the messages in {DATA} and the user {USER}; without them: {rest}")
    elif args.dry_run:
        print(f"\n# --- {UNIT}\n{unit}\n# --- {CONFIG}\n{config}", end="")
    else:
        print(f"next: look at {CONFIG}, then `systemctl enable --now {USER}`")
    return 0


def _refuse(act: str, command: Path) -> None:
    if os.geteuid() != 0:
        raise Misuse(f"only root may {act} a service; run it by sudo, or look at it first: --dry-run")
    if act == "install" and str(command).startswith(HIDDEN):
        raise PenstockError(
            f"{command} is where the service's sandbox sees nothing; install Penstock elsewhere, and run "
            f"that one: python3 -m venv /opt/penstock && /opt/penstock/bin/pip install penstock"
        )


def _install(unit: str, config: str) -> Iterator[Step]:
    try:
        pwd.getpwnam(USER)
    except KeyError:
        words = f"useradd --system --user-group --no-create-home --shell /usr/sbin/nologin {USER}"
        yield f"make the user {USER}: {words}", lambda: _call(*words.split())
    yield f"make the folder {CONFIG.parent}, root:{USER} 0750", lambda: _folder(CONFIG.parent, 0o750, 0)
    if CONFIG.exists():
        yield f"leave {CONFIG} as it is", lambda: None
    else:
        yield f"write {CONFIG}, root:{USER} 0640", lambda: _write(CONFIG, config, 0o640, USER)
    yield f"make the folder {DATA}, {USER}:{USER} 0700", lambda: _folder(DATA, 0o700, USER)
    yield f"write {UNIT}", lambda: _write(UNIT, unit, 0o644, 0)
    yield from _systemctl("daemon-reload")


def _uninstall() -> Iterator[Step]:
    if UNIT.exists():
        yield from _systemctl("disable", "--now", USER)
        yield f"remove {UNIT}", lambda: UNIT.unlink()
        yield from _systemctl("daemon-reload")
    else:
        yield f"find no {UNIT}: there is nothing to remove", lambda: None


def _systemctl(*words: str) -> Iterator[Step]:
    if Path("/run/systemd/system").exists():
        yield f"run: systemctl {' '.join(words)}", lambda: _call("systemctl", *words)
    else:
        yield f"leave out `systemctl {' '.join(words)}`: systemd does not run here", lambda: None


def _folder(path: Path, mode: int, owner: str | int) -> None:
    path.mkdir(mode=mode, exist_ok=True)
    shutil.chown(path, owner, USER)
    path.chmod(mode)


def _write(path: Path, text: str, mode: int, group: str | int) -> None:
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    new.touch(mode=mode)
    new.write_text(text, encoding="utf-8")
    shutil.chown(new, 0, group)
    new.replace(path)


def _call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def _do(what: str, do: Callable[[], object]) -> None:
    try:
        do()
    except subprocess.CalledProcessError as error:
        raise PenstockError(f"could not {what}: {error.stderr.strip()}") from None
    except OSError as error:
        raise PenstockError(f"could not {what}: {error}") from None
