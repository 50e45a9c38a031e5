"""docs/security.md and SECURITY.md: tests and settings that they name are there, and defaults are right."""

import re
from itertools import chain

import pytest

from penstock.model.policy import QueuePolicy
from penstock.server.settings import HTTP_KEYS, LISTENER_KEYS, TABLE
from tests.server.harness import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
REPORTING = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)` \(([^)]*)\)", PAGE)
DOORS = PAGE.partition("\n## SSPQ")[2].partition("\n## Budgets")[0].split("\n## ")
BUDGETS = re.findall(r"^\| (`.+?) \| (.+?) \|", PAGE.partition("\n## Budgets")[2], re.MULTILINE)
UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


@pytest.mark.parametrize(("file", "names"), NAMED)
def test_every_test_that_is_named_is_there(file: str, names: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)`", names)
    assert named
    assert [name for name in named if not re.search(rf"^(?:async )?def {name}\b", source, re.MULTILINE)] == []


def test_no_test_is_named_without_its_file() -> None:
    assert (len(NAMED) > 30, len(DOORS), len(BUDGETS)) == (True, 10, 13)
    told = chain.from_iterable(re.findall(r"test_\w+", names) for _, names in NAMED)
    rest = re.sub(r"`tests/[\w/]+\.py` \([^)]*\)", "", PAGE)
    assert len(list(told)) > 60
    assert "test_" not in rest


@pytest.mark.parametrize("door", DOORS)
def test_every_door_says_who_what_and_what_not(door: str) -> None:
    said = re.findall(r"^\| (.*?) \| .+ \|$", door, re.MULTILINE)
    assert said == ["who may come", "could want", "promised", "**not promised**", "held by"]


@pytest.mark.parametrize(("names", "defaults"), BUDGETS)
def test_a_budget_is_a_setting_with_that_default(names: str, defaults: str) -> None:
    known = {(setting.section, setting.name): setting.default for setting in TABLE}
    section, values = "", []
    for one, name in re.findall(r"`(?:\[(\w+)\] )?([a-z-]+)`", names):
        section = one or section
        if "of `[queue." in names:
            values.append(getattr(QueuePolicy(), name.replace("-", "_")))
        else:
            values.append(known[section, name])
    told = [0 if one == "no limit" else size(one) for one in defaults.split(", ")]
    assert told == values


def size(text: str) -> int:
    number, _, unit = text.partition(" ")
    return int(number) * UNITS.get(unit, 1)


def test_settings_that_are_named_are_there() -> None:
    names = {setting.name for setting in TABLE} | {key.name for key in (*HTTP_KEYS, *LISTENER_KEYS)}
    sections = {setting.section for setting in TABLE} | {"listener", "queue"}
    for section, name in re.findall(r"`\[(\w+)\] ([a-z-]+)`", PAGE):
        assert section in sections
        assert name in names


def test_links_lead_somewhere() -> None:
    for text, folder in ((PAGE, ROOT / "docs"), (REPORTING, ROOT)):
        links = re.findall(r"\]\(([^)#]*)(#[\w-]+)?\)", text)
        assert len(links) > 1
        for path, anchor in links:
            target = (folder / path).read_text(encoding="utf-8") if path else text
            headings = re.findall(r"^#+ (.+)$", target, re.MULTILINE)
            anchors = {"#" + re.sub(r"[^\w\- ]", "", it.lower()).replace(" ", "-") for it in headings}
            assert not anchor or anchor in anchors, (path, anchor)
