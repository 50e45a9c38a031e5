"""The README is one screen: what it is, a picture, two commands, where to read on; what it names is there."""

import re
from pathlib import Path

from tests.server.harness import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
LINES_MAX = 45


def test_it_is_one_screen_with_a_picture_and_two_commands() -> None:
    assert len(README.splitlines()) <= LINES_MAX
    assert len(re.findall(r"^!\[[^]]+\]\(", README, re.MULTILINE)) == 1
    assert re.findall(r"^    (make \w+)", README, re.MULTILINE) == ["make demo", "make test"]


def test_every_page_that_it_names_is_there() -> None:
    pages = re.findall(r"\]\(([^)]+)\)", README)
    assert len(pages) > 20
    assert [page for page in pages if not Path(ROOT, page).is_file()] == []


def test_what_make_installs_outside_the_folder_is_named() -> None:
    """The README says that docs/install.md lists it: all packages that the scripts ask apt-get for."""
    assert "(docs/install.md) lists what they\ninstall outside" in README
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    table = page.partition("| installed with apt-get")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([a-z][\w-]+)`", table))
    asked = set()
    for script in (ROOT / "scripts").iterdir():
        if script.is_file() and script.suffix != ".py":
            text = script.read_text(encoding="utf-8")
            for words in re.findall(
                r"(?:apt_install|apt_install_stopped) ((?:[\w-]+ ?)+)(?= \|\||;|$| &&|\n)", text
            ):
                asked |= set(words.split())
            asked |= {
                last or first
                for first, last in re.findall(r"^ +need ([\w-]+) \"[^\"]*\"(?: (\w+))?$", text, re.MULTILINE)
            }
    assert len(asked) > 8
    assert asked - named == set()
