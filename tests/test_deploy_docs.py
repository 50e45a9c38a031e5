"""docs/deploy.md: its commands are known to who runs them, its links lead somewhere, what it says is so."""

import re
import shlex

import pytest

from penstock import __version__
from penstock.cli.main import COMMANDS, command_parser, load
from tests.sandbox import values
from tests.server.harness import ROOT
from tests.test_deploy import TARGETS

PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
UNIT = (ROOT / "examples" / "systemd" / "penstock.service").read_text(encoding="utf-8")
SHELL = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.replace("\\\n", " ").splitlines()
] + re.findall(r"^    (\S.*)$", PAGE, re.MULTILINE)


def test_every_command_of_ours_is_one() -> None:
    ours = [shlex.split(line)[1:] for line in SHELL if line.startswith("/opt/penstock/bin/penstock ")]
    assert len(ours) == 2
    for name, *rest in ours:
        command_parser(name, load(name, COMMANDS)).parse_args(rest)
    targets = re.findall(r"^make ([a-z-]+)", "\n".join(SHELL), re.MULTILINE)
    assert {*targets, *re.findall(r"`make ([a-z-]+)", PAGE)} <= TARGETS


@pytest.mark.parametrize("flag", ["-f", "-k", "--values"])
def test_every_file_that_a_command_names_is_there(flag: str) -> None:
    named = re.findall(rf" {flag} (examples/\S+)", "\n".join(SHELL))
    assert named
    assert all((ROOT / name).exists() for name in named)


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", PAGE)
    assert len(links) > 15
    for path, anchor in links:
        file = ROOT / "docs" / path if path else ROOT / "docs" / "deploy.md"
        assert file.exists(), path
        if anchor:
            headings = re.findall(r"^#+ (.+)", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^a-z0-9 -]", "", it.lower()).replace(" ", "-") for it in headings}, (
                anchor
            )


def test_what_it_says_of_image_and_unit_is_so() -> None:
    assert set(re.findall(r"localhost/penstock:([\d.]+\d)", PAGE)) == {__version__}
    assert f"`WatchdogSec={values(UNIT, 'WatchdogSec')[0]}`" in PAGE
    assert values(UNIT, "Type") == ["notify"]
    assert "ARG BASE=docker.io/library/python:3.13-slim-trixie" in (ROOT / "Containerfile").read_text()
    assert "`python:3.13-slim-trixie`" in PAGE
