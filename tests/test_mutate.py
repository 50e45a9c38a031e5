"""The mutations are the ones they should be, and what no test notices is told."""

import ast
from pathlib import Path

import pytest

from tests import mutate

SOURCE = '''
def room(self, size: int) -> None:
    """Not this one: 5 < 6."""
    assert size >= 0, "nor this"
    log.info("nor this: %d", 7)
    if self.closed and size < 10:
        return
    self.used += size
    self.ä.add(min(size, 3))
'''


def changes(source: str) -> set[str]:
    found = mutate.Finder("m.py", source.encode()).found
    return {f"{it.before} -> {it.text}" for it in found}


def test_every_kind_of_change_is_found_and_nothing_that_only_tells() -> None:
    assert changes(SOURCE) == {
        "self.closed and size < 10 -> (self.closed or size < 10)",
        "self.closed and size < 10 -> (self.closed)",
        "self.closed and size < 10 -> (size < 10)",
        "size < 10 -> size <= 10",
        "10 -> 11",
        "10 -> 9",
        "return -> pass",
        "self.used += size -> pass",
        "self.ä.add(min(size, 3)) -> pass",
        "min -> max",
        "3 -> 4",
        "3 -> 2",
        'assert size >= 0, "nor this" -> return',
    }
    flags = "def f(a):\n    if a.ready:\n        b = not a.full\n        c = True\n        d = b | c\n"
    assert changes(flags) == {
        "a.ready -> True",
        "a.ready -> False",
        "not a.full -> a.full",
        "True -> False",
        "b | c -> (b & c)",
    }


def test_a_change_replaces_what_it_names_in_place() -> None:
    source = SOURCE.encode()
    for mutation in mutate.Finder("m.py", source).found:
        changed = mutation.apply(source)
        ast.parse(changed)
        assert changed == source[: mutation.start] + mutation.text.encode() + source[mutation.end :]
        assert source[mutation.start : mutation.end] == mutation.before.encode()
        assert source.splitlines()[mutation.line - 1].find(mutation.before.splitlines()[0].encode()) >= 0


def test_what_is_in_the_table_is_there() -> None:
    for module, tests in mutate.NEAR.items():
        assert (mutate.ROOT / module).is_file()
        assert [it for it in tests if not (mutate.ROOT / it).is_file()] == []
        assert mutate.mutations_of(module)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (root / "m.py").write_text("def next_one(n):\n    return n + 1 if n > 1 else 0\n")
    (root / "test_m.py").write_text(
        "from m import next_one\ndef test_next_one():\n    assert next_one(4) == 5\n"
    )
    return root


def test_survivors_are_told_and_the_tree_is_not_touched(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in tree.iterdir()}
    chosen = [it for it in mutate.mutations_of("m.py", tree) if it.before in ("n > 1", "n + 1")]
    survived = mutate.run("m.py", ("test_m.py",), chosen, 2, tree)
    assert survived is not None
    assert [f"{it.before} -> {it.text}" for it in survived] == ["n > 1 -> n >= 1"]
    assert "m.py:2: comparison: n > 1  ->  n >= 1" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in tree.iterdir()} == before


def test_tests_that_fail_by_themselves_prove_nothing(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "test_m.py").write_text("def test_no():\n    assert False\n")
    assert mutate.run("m.py", ("test_m.py",), mutate.mutations_of("m.py", tree), 1, tree) is None
    assert "do not pass without a change" in capsys.readouterr().out
