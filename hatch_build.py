"""What a build does beside packing: compiling the hot modules with mypyc, for a wheel and for this tree, and
the addresses that a package page shows.

The same sources run interpreted, which is what `pip install` without a compiler gives. Compiled, what is done
per message and per chunk costs less. Two ways to get it:

    HATCH_BUILD_HOOK_ENABLE_CUSTOM=true pip wheel .     a wheel with compiled modules, for this platform;
                                                        it needs two small packages more, `RUN_TIME`;
                                                        COMPILED_LIBRARIES=FOLDER keeps what was compiled
                                                        there, and takes it where nothing has changed
    python hatch_build.py build/compiled                a copy of this tree with them (`scripts/compile`)

Rules that always hold:
  * Nothing is written into the source tree: a compiled module there would be taken by all who run them.
  * What is compiled is a list. A module belongs on it when it runs per message or per chunk in the broker's
    own process; those that inherit from classes of others (asyncio's protocols) cannot.
  * The loops read numbers as little-endian: on a machine of the other kind nothing is compiled.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).parent

MODULES = (
    "penstock/broker/broker.py",
    "penstock/broker/claims.py",
    "penstock/broker/consumers.py",
    "penstock/broker/doors.py",
    "penstock/broker/hand_out.py",
    "penstock/broker/leases.py",
    "penstock/broker/ports.py",
    "penstock/broker/publishing.py",
    "penstock/broker/requests.py",
    "penstock/broker/settling.py",
    "penstock/broker/taking.py",
    "penstock/common/framing.py",
    "penstock/log/adoption.py",
    "penstock/log/block.py",
    "penstock/log/columns.py",
    "penstock/log/committer.py",
    "penstock/log/ledger.py",
    "penstock/log/log.py",
    "penstock/log/loops.py",
    "penstock/log/queue.py",
    "penstock/log/queue_state.py",
    "penstock/log/redrive.py",
    "penstock/log/repairs.py",
    "penstock/log/sealer.py",
    "penstock/log/segment.py",
    "penstock/log/segments.py",
    "penstock/log/state.py",
    "penstock/log/transactions.py",
    "penstock/log/views.py",
    "penstock/log/weight.py",
    "penstock/model/batch.py",
    "penstock/model/ids.py",
    "penstock/model/pending.py",
    "penstock/model/ranges.py",
    "penstock/model/spans.py",
    "penstock/model/timers.py",
    "penstock/model/words.py",
    "penstock/protocols/gathering.py",
    "penstock/protocols/loops.py",
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

RUN_TIME = ("librt>=0.16,<1", "mypy_extensions>=1,<2")
"""What compiled modules import, and the sources do not."""

# A C file for each module, and all cores at work: a third of the time that one file with -O3 takes, and no
# slower when it runs. setuptools would compile the files of a library one after the other.
_SETUP = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from mypyc.build import mypycify
from setuptools import setup
from setuptools.command.build_ext import build_ext

class SideBySide(build_ext):
    def build_extensions(self):
        compile_some = self.compiler.compile
        def compile_all(sources, *args, **kwargs):
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                made = pool.map(lambda source: compile_some([source], *args, **kwargs), sources)
                return [file for files in made for file in files]
        self.compiler.compile = compile_all
        super().build_extensions()

modules = mypycify(["--strict", *sys.argv[3:]], opt_level="2", debug_level="0", multi_file=True)
setup(
    name="penstock", packages=[], ext_modules=modules,
    script_args=sys.argv[1:3], cmdclass={"build_ext": SideBySide},
)
"""


def compile_into(folder: Path) -> None:
    """Put the compiled modules into a folder, each in its place."""
    if sys.byteorder != "little":
        raise SystemExit("the modules were not compiled: this machine is big-endian")
    with tempfile.TemporaryDirectory() as work:
        shutil.copytree(
            ROOT / "penstock", Path(work, "penstock"), ignore=shutil.ignore_patterns("__pycache__")
        )
        command = [sys.executable, "-c", _SETUP, "build_ext", "--inplace", *MODULES]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"the modules were not compiled:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        for library in sorted(Path(work).rglob("*.so")):
            place = library.relative_to(work)
            if place.parts[0] != "build":
                # What all modules share lies beside the package, and is imported by a name of its own.
                (folder / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(library, folder / place)


class CustomBuildHook(BuildHookInterface):
    """Off by default; see the module's docstring for how it is switched on."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        kept = os.environ.get("COMPILED_LIBRARIES")
        if kept:
            folder = libraries_in(Path(kept))
        else:
            self._folder = tempfile.mkdtemp(prefix="penstock-compiled-")
            folder = Path(self._folder)
            compile_into(folder)
        for library in sorted(folder.rglob("*.so")):
            build_data["force_include"][str(library)] = str(library.relative_to(folder))
        build_data["dependencies"] += RUN_TIME
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_folder"):
            shutil.rmtree(self._folder)


class PackagePage(MetadataHookInterface):
    """The package's addresses and its README. A package page has no files of the repository beside it: links,
    which are relative here, lead to the one that pyproject.toml names."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = self.config["repository"]
        metadata["urls"] = {
            "Repository": repository,
            "Documentation": f"{repository}/tree/main/docs",
            "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        }
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\g<1>{repository}/raw/main/", text)
        text = re.sub(r"(?<!!)(\[[^]]*\]\()(?!https?:|#)", rf"\g<1>{repository}/blob/main/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


# --- for this tree ---------------------------------------------------------------------------------


def fingerprint(sources: Iterable[Path]) -> str:
    """What something is made from, and by whom."""
    digest = hashlib.sha256(sys.version.encode())
    for source in sorted({*sources, ROOT / "hatch_build.py"}):
        digest.update(f"{source.relative_to(ROOT)}\n".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def packaged() -> list[Path]:
    """All files of the package."""
    return [path for path in (ROOT / "penstock").rglob("*") if path.is_file() and path.suffix != ".pyc"]


def seen_by_the_compiler() -> list[Path]:
    """The sources of the modules, and those whose types they use."""
    packages = {ROOT / "penstock", *((ROOT / module).parent for module in MODULES)}
    return [path for path in packaged() if path.parent in packages and path.suffix == ".py"]


def libraries_in(cache: Path) -> Path:
    """The folder with the compiled modules of these sources; they are compiled where it is not there yet."""
    libraries = cache / fingerprint(seen_by_the_compiler())
    if not libraries.exists():
        print(f"penstock: compiling {len(MODULES)} modules, about a minute, once", flush=True)
        cache.mkdir(parents=True, exist_ok=True)
        before = list(cache.iterdir())
        with tempfile.TemporaryDirectory(dir=cache.parent) as work:
            compile_into(Path(work, "made"))
            # Somebody else may have made the same meanwhile.
            if not libraries.exists():
                Path(work, "made").rename(libraries)
        for old in before:
            shutil.rmtree(old, ignore_errors=True)
    return libraries


def main() -> None:
    """Make a folder that is this tree with compiled modules. Nothing is touched where it is that already."""
    folder = Path(sys.argv[1]).absolute()
    stamp, wanted = folder / "stamp", fingerprint(packaged())
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    libraries = libraries_in(folder.parent / "libraries")
    shutil.rmtree(folder, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "penstock", folder / "penstock", ignore=ignore)
    shutil.copytree(libraries, folder, dirs_exist_ok=True)
    # Everything else of the project in its place, so that tests and benchmarks find it beside the package.
    for place in ROOT.iterdir():
        if place.name not in ("penstock", "build", ".git", ".venv"):
            (folder / place.name).symlink_to(os.path.relpath(place, folder))
    stamp.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
