"""`penstock service`: what it would do, what it does as root, and that it goes back.

As root it is done for real, in a copy of this machine's /etc and /var/lib that only the test sees.
"""

import argparse
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import service
from penstock.common.tokens import hash_token, new_token
from penstock.errors import Misuse, PenstockError
from penstock.server.settings_read import add_arguments, load
from tests.server.harness import ROOT

SECONDS = 60
UNIT = (service.FILES / "penstock.service").read_text(encoding="utf-8")
CONFIG = (service.FILES / "penstock.toml").read_text(encoding="utf-8")

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can have a /etc of its own")


def penstock(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "penstock", "service", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=SECONDS)


def test_a_dry_run_says_the_steps_and_prints_both_files() -> None:
    done = penstock("install", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    steps, unit, config = done.stdout.split("\n# --- ")
    assert all(line.startswith("would ") for line in steps.splitlines() if line)
    assert "would write /etc/systemd/system/penstock.service\n" in steps
    own = str(Path(sys.executable).with_name("penstock"))
    assert unit.partition("\n")[2].rstrip("\n") == UNIT.replace("/opt/penstock/bin/penstock", own).rstrip(
        "\n"
    )
    assert f"ExecStart={own} serve --config /etc/penstock/penstock.toml" in unit
    assert config.partition("\n")[2] == CONFIG


def test_a_dry_run_of_uninstalling_says_what_stays() -> None:
    done = penstock("uninstall", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "kept: /etc/penstock/penstock.toml, the messages in /var/lib/penstock" in done.stdout


def test_the_settings_are_valid_as_they_are_and_with_every_comment_taken_away(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def read(text: str) -> object:
        (tmp_path / "penstock.toml").write_text(text, encoding="utf-8")
        return load(parser.parse_args(["--config", str(tmp_path / "penstock.toml")]), {})

    assert read(CONFIG) == read("")  # every comment shows what is so without it
    lines = [line.removeprefix("# ") for line in CONFIG.splitlines()]
    shown = [line for line in lines if line.startswith("[") or " = " in line]
    before_users = shown[: shown.index("[[http.tokens]]")]
    limits = shown[shown.index("[limits]") : next(i for i, line in enumerate(shown) if "[queue" in line)]
    assert len(before_users) + len(limits) > 9
    assert read("\n".join(before_users + limits)) == read("")
    assert read("\n".join(shown).replace("scrypt:…", hash_token(new_token("ann")))) != read("")


def test_who_is_not_root_and_who_is_at_home_hear_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Misuse, match=r"only root may install a service; .*--dry-run"):
        service._refuse("install", Path("/opt/penstock/bin/penstock"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(PenstockError, match=r"install Penstock elsewhere, and run that one: python3"):
        service._refuse("install", Path("/home", "ann", "bin", "penstock"))
    service._refuse("install", Path("/opt/penstock/bin/penstock"))
    service._refuse("uninstall", Path("/home", "ann", "bin", "penstock"))


INSIDE = r"""
set -e
for folder in etc var/lib; do
    mkdir -p "$1/$folder" "$1/work/$folder"
    mount -t overlay overlay -o "lowerdir=/$folder,upperdir=$1/$folder,workdir=$1/work/$folder" "/$folder"
done
mount -t tmpfs tmpfs /opt
mkdir -p /opt/penstock/bin
ln -s "$(readlink -f "$2")" /opt/penstock/bin/python
cd "$3"
export PYTHONPATH="$4"
for round in 1 2; do
    /opt/penstock/bin/python -m penstock service install
done
stat -c '%a %U:%G %n' /etc/penstock /etc/penstock/penstock.toml /var/lib/penstock \
    /etc/systemd/system/penstock.service
grep '^penstock:' /etc/passwd
echo '# mine' >>/etc/penstock/penstock.toml
/opt/penstock/bin/python -m penstock service install
tail -n 1 /etc/penstock/penstock.toml
for round in 1 2; do
    /opt/penstock/bin/python -m penstock service uninstall
done
ls /etc/systemd/system/penstock.service /etc/penstock/penstock.toml /var/lib/penstock || true
"""


@as_root
def test_it_installs_says_each_step_keeps_settings_and_goes_back(tmp_path: Path) -> None:
    # An overlay cannot lie on another one, which the temporary folder may be on.
    script = f"mount -t tmpfs tmpfs {shlex.quote(str(tmp_path))}\n{INSIDE}"
    words = [str(tmp_path), sys.executable, str(ROOT), os.pathsep.join(filter(None, sys.path))]
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script, "bash", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.split("next: look at ")[:3]
    assert first.startswith("make the user penstock: useradd --system")
    assert "\nwrite /etc/penstock/penstock.toml, root:penstock 0640\n" in first
    assert "make the user" not in second
    assert "leave /etc/penstock/penstock.toml as it is\n" in second
    assert "750 root:penstock /etc/penstock\n640 root:penstock /etc/penstock/penstock.toml\n" in third
    assert (
        "700 penstock:penstock /var/lib/penstock\n644 root:root /etc/systemd/system/penstock.service\n"
        in third
    )
    assert ":/usr/sbin/nologin\n" in third
    assert "\n# mine\n" in done.stdout
    assert "\nremove /etc/systemd/system/penstock.service\n" in done.stdout
    assert "\nfind no /etc/systemd/system/penstock.service: there is nothing to remove\n" in done.stdout
    assert done.stdout.count("\nkept: ") == 2
    assert done.stdout.endswith("/etc/penstock/penstock.toml\n\n/var/lib/penstock:\n")
    assert "cannot access '/etc/systemd/system/penstock.service'" in done.stderr
    assert not Path("/etc/systemd/system/penstock.service").exists()


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    place = tmp_path / "unit"
    place.write_text("old")
    old = place.open()
    service._write(place, "new", 0o640, os.getgid())
    assert (place.read_text(), old.read(), stat.S_IMODE(place.stat().st_mode)) == ("new", "old", 0o640)
    old.close()
