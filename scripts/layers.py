"""Who may import whom: `make check` runs this, and it prints what each package really uses of the others.

`LAYERS` is the plan of the house, from the bottom up. A package may import what its row names, and a row
names only packages above it in the table: so there is no cycle. The packages of `PURE` do no IO, read no
clock and start no task. And no two modules, of one package or of two, need each other while they load.

How it fails: a line for each import that breaks a rule and each permission that nobody uses; exit code 1.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LAYERS: dict[str, str] = {
    "common": "",
    "model": "",
    "protocols": "model",
    "log": "model",
    "broker": "model log",
    "control": "common model",
    "server": "common model protocols log broker control",
    "cluster": "common model protocols log broker server",
    "http": "common model log control",
    "dashboard": "common model log control http",
    "client": "common model protocols",
    "kombu": "common model client",
    "importing": "common model client",
    "lake": "common model log",
    "spark": "common model log client lake",
    "pipeline": "common log spark",
    "report": "common model spark",
    "cli": "common model log server cluster client importing lake spark pipeline report",
    "top": "common client cli",
    "demo": "common client dashboard spark pipeline report",
}
"""From the bottom up: what each package of `penstock` may import of the others. Beside them stand a few
modules (`errors`, `build`, `tally`, the version), which anybody may import and which import nothing."""

DOORS: dict[tuple[str, str], str] = {
    ("broker", "log"): "errors info log results",
    ("dashboard", "log"): "info",
}
"""Where one package may use only these modules of another."""

PURE = ("model", "protocols", "broker")

IMPURE = frozenset(
    [
        "asyncio",
        "concurrent",
        "datetime",
        "multiprocessing",
        "os",
        "select",
        "selectors",
        "signal",
        "socket",
        "ssl",
        "subprocess",
        "threading",
        "time",
        "uvloop",
    ]
)
"""Modules that do IO, read a clock or start a task."""


# --- What a source imports -------------------------------------------------------------------------


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def absolute(name: str, level: int, package: str) -> str:
    """The full name of a relative import (`level` dots) out of `package`."""
    if not level:
        return name
    base = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*base, name] if name else base)


def text_of(node: ast.expr) -> str:
    """A literal text, or nothing."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def imports_of(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, full name) of everything that a source imports, wherever in it; '?' where nobody can say.

    `from a import b` counts as `a.b`: b may be a module, and if it is a name in a, the rules give
    the same answer for it as for a.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node.module or "", node.level, package)
            for alias in node.names:
                yield node.lineno, base if alias.name == "*" else f"{base}.{alias.name}"
        elif isinstance(node, ast.Call):
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if called in ("import_module", "__import__"):
                arguments = [*node.args, *(word.value for word in node.keywords if word.arg == "package")]
                name, *others = [text_of(argument) for argument in arguments] or [""]
                dots = len(name) - len(name.lstrip("."))
                anchor = others[0] if others and called == "import_module" else ""
                yield node.lineno, absolute(name[dots:], dots, anchor or package) if name else "?"


def loaded_first(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """The modules that one needs while it loads: what it imports outside of functions, not for types only."""
    found: set[str] = set()
    waiting: list[ast.stmt] = list(ast.parse(path.read_text(encoding="utf-8")).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.If | ast.Try) and "TYPE_CHECKING" not in ast.unparse(node).split("\n")[0]:
            waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return found & modules.keys()


# --- The rules -------------------------------------------------------------------------------------


def layer_of(module: str) -> str:
    """The package that a module of `penstock` is in; empty for those beside the packages."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else ""


def is_allowed(layer: str, name: str) -> bool:
    """Whether a package may import something of Penstock."""
    other = layer_of(name)
    if not other:
        return name.split(".")[1:2] in (["errors"], ["build"], ["tally"], ["__version__"])
    if other == layer:
        return True
    doors = DOORS.get((layer, other))
    return other in LAYERS[layer].split() and (
        doors is None or name.split(".")[2:3] in [[it] for it in doors.split()]
    )


def violations(source: str, module: str, package: str) -> list[str]:
    """What a source imports against the rules, as sentences."""
    layer = layer_of(module)
    found = []
    for line, name in imports_of(source, package):
        root = name.split(".")[0]
        if name == "?" and layer in PURE:
            found.append(f"{module}, line {line}: imports by a name that is computed; name the module")
        elif root in IMPURE and layer in PURE:
            found.append(f"{module}, line {line}: imports {name}; nothing here does IO or reads a clock")
        elif root == "penstock" and layer and not is_allowed(layer, name):
            found.append(f"{module}, line {line}: imports {name}; its row in scripts/layers.py has it not")
    return found


def misplaced(table: Mapping[str, str], packages: set[str]) -> list[str]:
    """Rows that name what is not above them, and packages without a row."""
    found = []
    above: set[str] = set()
    for layer, names in table.items():
        found += [
            f"{layer} may import {name}, which is not above it" for name in names.split() if name not in above
        ]
        above.add(layer)
    return found + [f"{package} has no row in scripts/layers.py" for package in sorted(packages - above)]


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Names that lead from one to the next and back to the first; nothing where there is no such way."""
    done: set[str] = set()
    for start in graph:
        way: list[str] = []
        turns: list[Iterator[str]] = []
        if start not in done:
            way.append(start)
            turns.append(iter(sorted(graph[start])))
        while turns:
            after = next((name for name in turns[-1] if name not in done), None)
            if after is None:
                turns.pop()
                done.add(way.pop())
            elif after in way:
                return [*way[way.index(after) :], after]
            else:
                way.append(after)
                turns.append(iter(sorted(graph[after])))
    return []


# --- The tree --------------------------------------------------------------------------------------


def sources() -> dict[str, Path]:
    """Every module of the tree by its name."""
    return {module_of(path): path for path in sorted((ROOT / "penstock").rglob("*.py"))}


def package_of(module: str, path: Path) -> str:
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def main() -> int:
    modules = sources()
    packages = {module.split(".")[1] for module, path in modules.items() if module.count(".") > 1}
    wrong = misplaced(LAYERS, packages)
    used: dict[str, dict[str, int]] = {layer: {} for layer in LAYERS}
    for module, path in modules.items():
        source = path.read_text(encoding="utf-8")
        package = package_of(module, path)
        wrong += violations(source, module, package)
        layer = layer_of(module)
        for _, name in imports_of(source, package):
            other = layer_of(name) if name.startswith("penstock.") else ""
            if layer and other and other != layer:
                used[layer][other] = used[layer].get(other, 0) + 1
    names = cycle({module: loaded_first(path, modules) for module, path in modules.items()})
    if names:
        wrong.append(f"these need each other while they load: {' -> '.join(names)}")
    for layer, allowed in LAYERS.items():
        wrong += [
            f"{layer} may import {name} and does not: take it out of scripts/layers.py"
            for name in allowed.split()
            if name not in used[layer]
        ]
        counts = ", ".join(f"{name} {used[layer].get(name, 0)}" for name in allowed.split())
        print(f"  {layer:10} {counts or '-'}")
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
