"""Helpers of the tests make assertions too; when one fails, pytest shows the values in it."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def helpers() -> list[str]:
    """The modules below this folder that tests import."""
    return [
        ".".join(path.relative_to(HERE.parent).with_suffix("").parts)
        for path in sorted(HERE.rglob("*.py"))
        if not path.stem.startswith(("test_", "conftest", "fuzz_", "__"))
    ]


pytest.register_assert_rewrite(*helpers())
