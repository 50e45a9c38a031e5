"""Tutorials and how-tos: each is followed from its first line to its last, as its reader would."""

from pathlib import Path

import pytest

from tests.seeds import some
from tests.server.harness import ROOT
from tests.terminals import Reader, typed

DOCS = ROOT / "docs"
PAGES = [
    DOCS / "get-started.md",
    *sorted((DOCS / "tutorials").glob("*.md")),
    *sorted((DOCS / "how-to").glob("*.md")),
]


LONG = ("celery", "first-cluster", "workers")
"""Most of whose time is waiting; what they say is tested beside their pages, too."""


@pytest.mark.parametrize(
    "page", some(PAGES, *(page for page in PAGES if page.stem not in LONG)), ids=lambda page: page.stem
)
def test_it_can_be_followed(page: Path, tmp_path: Path) -> None:
    with Reader(tmp_path) as reader:
        assert reader.follow(page.read_text(encoding="utf-8")) > 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("$ echo one\ntwo\n", "echo one"),
        ("$ false\n", "'false', ''"),
        ("$ sleep 60\n…\n$ echo next\nnext\n", "still runs where 'echo next' is typed"),
        ("$ echo done\ndone\n…\n", "'echo done', 'done"),
        ("$ echo one && sleep 60\ntwo\n…\n", "echo one && sleep 60"),
        ("stray\n", "nothing runs that could print: ['stray']"),
    ],
)
def test_a_page_that_is_wrong_is_noticed(wrong: str, said: str, tmp_path: Path) -> None:
    # One of them is waited for in vain, so that is short; the others end by themselves.
    seconds = 0.5 if wrong.endswith("two\n…\n") else 60
    with pytest.raises(AssertionError) as caught, Reader(tmp_path, seconds=seconds) as reader:
        reader.follow(f"```console\n{wrong}```\n")
    assert said in str(caught.value)


def test_a_block_is_commands_with_what_they_print() -> None:
    block = "$ penstock serve\npenstock ready\n…\n^C\n$ ls\n"
    assert [*typed(block)] == [("penstock serve", ["penstock ready", "…"]), ("^C", []), ("ls", [])]
