"""Compiling the hot modules with mypyc: for a wheel, and for this tree.

The same sources run interpreted, which is what `pip install` without a compiler gives. Compiled, what is done per
message and per chunk costs less. Two ways to get it:

    HATCH_BUILD_HOOK_ENABLE_CUSTOM=true pip wheel .     a wheel with compiled modules, for this platform
    python hatch_build.py build/compiled                a copy of the package with compiled modules beside their sources

Rules that always hold:
  * Nothing is written into the source tree: a compiled module there would be taken by whoever runs the sources.
  * What is compiled is a list. A module belongs on it when it runs per message or per chunk of the broker's own
    process; those that inherit from classes of others (asyncio's protocols) cannot.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent

MODULES = (
    "penstock/broker/batch.py",
    "penstock/broker/broker.py",
    "penstock/broker/consumers.py",
    "penstock/broker/ids.py",
    "penstock/broker/pending.py",
    "penstock/broker/ranges.py",
    "penstock/broker/timers.py",
    "penstock/broker/words.py",
    "penstock/engines/log/block.py",
    "penstock/engines/log/columns.py",
    "penstock/engines/log/committer.py",
    "penstock/engines/log/engine.py",
    "penstock/engines/log/ledger.py",
    "penstock/engines/log/queue.py",
    "penstock/engines/log/repairs.py",
    "penstock/engines/log/sealer.py",
    "penstock/engines/log/segments.py",
    "penstock/engines/log/state.py",
    "penstock/protocols/phpmq.py",
    "penstock/protocols/phpmq_read.py",
    "penstock/protocols/phpmq_runs.py",
    "penstock/protocols/phpmq_session.py",
    "penstock/protocols/phpmq_write.py",
    "penstock/protocols/risp.py",
    "penstock/protocols/rq.py",
    "penstock/protocols/rq_controller.py",
    "penstock/protocols/rq_decoder.py",
    "penstock/protocols/rq_runs.py",
    "penstock/protocols/rq_session.py",
    "penstock/protocols/sspq.py",
    "penstock/protocols/sspq_session.py",
)

_SETUP = """
import sys
from mypyc.build import mypycify
from setuptools import setup
setup(name="penstock", packages=[], ext_modules=mypycify(["--strict", *sys.argv[3:]], opt_level="3", debug_level="0"),
      script_args=sys.argv[1:3])
"""


def compile_into(folder: Path) -> list[Path]:
    """Put a copy of the package into a folder, and compiled modules beside their sources; which those are."""
    shutil.rmtree(folder / "penstock", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / "penstock", folder / "penstock", ignore=shutil.ignore_patterns("__pycache__"))
    # Its own name for the folder of C sources, and none of the settings of this project.
    with tempfile.TemporaryDirectory() as work:
        shutil.copytree(ROOT / "penstock", Path(work, "penstock"), ignore=shutil.ignore_patterns("__pycache__"))
        command = [sys.executable, "-c", _SETUP, "build_ext", "--inplace", *MODULES]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, env={**os.environ, "MYPYPATH": ""})
        if done.returncode:
            raise SystemExit(f"the modules were not compiled:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        made: list[Path] = []
        for library in sorted(Path(work).rglob("*.so")):
            place = library.relative_to(work)
            if place.parts[0] == "build":
                continue
            # What all modules share lies beside the package; it is imported by its own name.
            target = folder / place
            shutil.copy2(library, target)
            made.append(target)
    return made


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Off by default; see the module's docstring for how it is switched on."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        self._folder = tempfile.mkdtemp(prefix="penstock-compiled-")
        for library in compile_into(Path(self._folder)):
            build_data["force_include"][str(library)] = str(library.relative_to(self._folder))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            shutil.rmtree(self._folder)


def main() -> None:
    folder = Path(sys.argv[1])
    made = compile_into(folder)
    # Everything else of the project by its place, so that tests and benchmarks find it beside the package.
    for place in ROOT.iterdir():
        link = folder / place.name
        if place.name not in ("penstock", "build", ".git", ".venv") and not link.exists():
            link.symlink_to(os.path.relpath(place, folder))
    print(f"{len(made)} compiled modules in {folder}")


if __name__ == "__main__":
    main()
