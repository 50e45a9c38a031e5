"""docs/pipelines.md and the examples: what is shown there is run, and its tables are those of the file."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.common.given import FileKey
from penstock.pipeline.file import PARSE, RUN, SINK, SOURCE, STEP, read_pipeline
from penstock.pipeline.formats import FORMATS
from penstock.spark.options import READING
from tests.server.harness import ROOT
from tests.spark.conftest import StartBroker

PAGE = (ROOT / "docs" / "pipelines.md").read_text()
EXAMPLES = sorted((ROOT / "examples" / "pipelines").glob("*.toml"))
RUN_SECONDS = 240.0


def section(title: str) -> str:
    """What stands under a heading, up to the next one."""
    return re.split(r"^#+ ", PAGE.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def keys_in(title: str) -> list[str]:
    return re.findall(r"^\| `([\w-]+)` \|", section(title).split("| format |")[0], re.MULTILINE)


def names(keys: tuple[FileKey, ...]) -> set[str]:
    return {key.name for key in keys}


@pytest.mark.parametrize(
    ("title", "keys"),
    [
        ("`[source]`", names(SOURCE) - {option.name for option in READING}),
        ("`[parse]`", names(PARSE)),
        ("`[[step]]`", names(STEP)),
        ("`[sink]`", names(SINK)),
        ("`[run]`", names(RUN)),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_the_keys_are_those_that_there_are(title: str, keys: set[str]) -> None:
    assert sorted(keys_in(title)) == sorted(keys)


def test_the_formats_and_their_modes_are_those_that_there_are() -> None:
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", section("`[sink]`").split("| format |")[1], re.MULTILINE)
    found = {name: modes for names, modes in rows for name in re.findall("`(.*?)`", names)}
    assert found == {
        name: "all" if len(it.modes) == 3 else ", ".join(it.modes) for name, it in FORMATS.items()
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_right(path: Path) -> None:
    pipeline = read_pipeline(str(path))
    assert pipeline.name == path.stem


def test_the_first_one_does_what_the_page_shows(start_broker: StartBroker, tmp_path: Path) -> None:
    """One Spark of its own, because it is the command that is shown."""
    part = section("A first one")
    (text,) = re.findall(r"^```toml\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
    tomllib.loads(text)
    (tmp_path / "orders.toml").write_text(text)
    broker = start_broker()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
    environment |= {
        "PENSTOCK_URL": f"http://127.0.0.1:{broker.ports['http']}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    said = ""
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", "".join(blocks), re.MULTILINE):
        if "jq" in command and shutil.which("jq") is None:
            continue
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        said = done.stdout + done.stderr
        # Numbers are those of another day.
        for line in shown.splitlines():
            assert plain(line) in plain(said), f"{command}: {line!r} is not in\n{said}"
    import pyarrow.dataset as ds

    files = [str(path) for path in (tmp_path / "out" / "orders").glob("*.parquet")]
    rows = ds.dataset(files).to_table().to_pylist()
    assert sorted((row["id"], row["region"], row["cents"]) for row in rows) == [
        (1, "north", 250.0),
        (3, None, 400.0),
    ]


def plain(text: str) -> str:
    return " ".join(re.sub(r"[0-9][0-9,.]*", "0", text).split())
