"""Compiling the hot modules with mypyc: for a wheel, and for this tree.

The same sources run interpreted, which is what `pip install` without a compiler gives. Compiled, what is done
per message and per chunk costs less. Two ways to get it:

    HATCH_BUILD_HOOK_ENABLE_CUSTOM=true pip wheel .     a wheel with compiled modules, for this platform
    python hatch_build.py build/compiled                a copy of this tree with them (`scripts/compile`)

Rules that always hold:
  * Nothing is written into the source tree: a compiled module there would be taken by all who run them.
  * What is compiled is a list. A module belongs on it when it runs per message or per chunk in the broker's
    own process; those that inherit from classes of others (asyncio's protocols) cannot.
"""

import hashlib
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
    "penstock/engines/log/transactions.py",
    "penstock/engines/log/views.py",
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
modules = mypycify(["--strict", *sys.argv[3:]], opt_level="3", debug_level="0")
setup(name="penstock", packages=[], ext_modules=modules, script_args=sys.argv[1:3])
"""


def compile_into(folder: Path) -> list[Path]:
    """Put the compiled modules into a folder, each in its place; which they are."""
    with tempfile.TemporaryDirectory() as work:
        shutil.copytree(
            ROOT / "penstock", Path(work, "penstock"), ignore=shutil.ignore_patterns("__pycache__")
        )
        command = [sys.executable, "-c", _SETUP, "build_ext", "--inplace", *MODULES]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"the modules were not compiled:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        made: list[Path] = []
        for library in sorted(Path(work).rglob("*.so")):
            place = library.relative_to(work)
            if place.parts[0] != "build":
                # What all modules share lies beside the package, and is imported by a name of its own.
                (folder / place).parent.mkdir(parents=True, exist_ok=True)
                made.append(Path(shutil.copy2(library, folder / place)))
    return made


class CustomBuildHook(BuildHookInterface):
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


# --- for this tree ---------------------------------------------------------------------------------


def fingerprint() -> str:
    """What the compiled modules are made from, and by whom."""
    digest = hashlib.sha256(sys.version.encode())
    sources = [ROOT / "hatch_build.py", *(ROOT / "penstock").glob("*.py")]
    for package in ("broker", "engines", "protocols"):
        sources += (ROOT / "penstock" / package).rglob("*.py")
    for source in sorted(sources):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Make a folder that is this tree with compiled modules; compile only what is not there yet."""
    folder = Path(sys.argv[1])
    libraries = folder.parent / "libraries" / fingerprint()
    if not libraries.exists():
        print(f"compiling {len(MODULES)} modules (some two minutes, once)", flush=True)
        unfinished = libraries.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        compile_into(unfinished)
        unfinished.rename(libraries)
    shutil.rmtree(folder, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "penstock", folder / "penstock", ignore=ignore)
    shutil.copytree(libraries, folder, dirs_exist_ok=True)
    # Everything else of the project in its place, so that tests and benchmarks find it beside the package.
    for place in ROOT.iterdir():
        if place.name not in ("penstock", "build", ".git", ".venv"):
            (folder / place.name).symlink_to(os.path.relpath(place, folder))


if __name__ == "__main__":
    main()
