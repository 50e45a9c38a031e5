"""What holds for every test: helpers show their values when they fail, and files run side by side.

Tests are handed to processes by file, so that what the tests of a file share (a broker, say) is made once.
All that use Spark go to one process, first: starting it costs more than most files do.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SPARK = ("spark", "pipeline", "report")
"""Folders whose tests share one Spark session."""


def helpers() -> list[str]:
    """The modules below this folder that tests import."""
    return [
        ".".join(path.relative_to(HERE.parent).with_suffix("").parts)
        for path in sorted(HERE.rglob("*.py"))
        if not path.stem.startswith(("test_", "conftest", "fuzz_", "__"))
    ]


pytest.register_assert_rewrite(*helpers())


def folder_of(item: pytest.Item) -> str:
    return item.path.relative_to(HERE).parts[0]


def pytest_itemcollected(item: pytest.Item) -> None:
    # Not when all are collected: by then, names have been made of the groups.
    group = "spark" if folder_of(item) in SPARK else str(item.path.relative_to(HERE))
    item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: folder_of(item) not in SPARK)
