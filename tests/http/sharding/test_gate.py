"""Whose word front-ends take for who asks."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.http.auth import USER, Guard
from penstock.http.connection import CONNECTION
from penstock.http.sharding.gate import NAMED, Gate

NAMES = ("anna", "?", "Jürgen", "Ж", "a b", "50%41", "\N{SNOWMAN}\N{SNOWMAN}")


def gate() -> tuple[Gate, Guard]:
    users = [
        {"name": name, "hashes": [f"hash of {name}"], "grants": [], "admin": False, "expires_us": 0}
        for name in NAMES
    ]
    guard = Guard([], users)
    base: Any = SimpleNamespace(guard=guard)  # as much of a site as this needs
    return Gate(base, base, base), guard


def heard(own: Gate, headers: list[tuple[bytes, bytes]], *, is_handed_over: bool) -> dict[str, Any]:
    connection = SimpleNamespace(is_handed_over=is_handed_over)
    return dict(own._believed({"type": "http", "headers": headers, CONNECTION: connection}))


@pytest.mark.parametrize("name", NAMES)
def test_a_visitor_is_the_same_one_at_another_front_end(name: str) -> None:
    """Whatever he is called: `?` is not everybody whose name cannot be written."""
    own, guard = gate()
    said = own._with_user({USER: lambda: guard.named(name)}, [(b"authorization", b"Bearer x")])
    assert [it for it, _ in said] == [NAMED]
    there = heard(own, said, is_handed_over=True)
    assert there[USER]().name == name
    assert there["headers"] == []


def test_nobody_else_is_believed() -> None:
    own, _ = gate()
    scope = heard(own, [(NAMED, b"anna"), (NAMED, b"anna"), (b"host", b"x")], is_handed_over=False)
    assert USER not in scope
    assert scope["headers"] == [(b"host", b"x")]
