"""docs/pipelines.md and the examples: what is shown there is run, and its tables are those of the file."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest

from penstock.common.given import FileKey
from penstock.pipeline.file import EXPECT, PARSE, RUN, SINK, SOURCE, STEP, TABLE, TEST, read_pipeline
from penstock.pipeline.formats import FORMATS
from penstock.spark.options import READING
from tests.server.harness import ROOT, BrokerProcess, until
from tests.spark.conftest import StartBroker

PAGE = (ROOT / "docs" / "pipelines.md").read_text()
EXAMPLES = sorted((ROOT / "examples" / "pipelines").glob("*.toml"))
RUN_SECONDS = 240.0


def is_told(log: Path, line: str) -> bool:
    return line in log.read_text()


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
        ("`[[table]]`", names(TABLE)),
        ("`[[step]]`", names(STEP)),
        ("`[[expect]]`", names(EXPECT)),
        ("`[[test]]`", names(TEST)),
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


@pytest.mark.long
def test_the_first_one_does_what_the_page_shows(start_broker: StartBroker, tmp_path: Path) -> None:
    """One Spark of its own, because it is the command that is shown."""
    part = section("A first one")
    (text,) = re.findall(r"^```toml\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
    tomllib.loads(text)
    (tmp_path / "orders.toml").write_text(text)
    environment = environment_of(start_broker())
    said = ""
    for command, shown in commands(PAGE.replace(section("As a service"), "")):
        if "jq" in command and shutil.which("jq") is None:
            continue
        said = run(command, tmp_path, environment)
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


def commands(text: str) -> list[tuple[str, str]]:
    """What is typed, and what is shown below it."""
    blocks = re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", "".join(blocks), re.MULTILINE)


def environment_of(broker: BrokerProcess) -> dict[str, str]:
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")},
        "PENSTOCK_URL": f"http://127.0.0.1:{broker.ports['http']}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def run(command: str, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.long
def test_the_service_does_what_the_page_shows(start_broker: StartBroker, tmp_path: Path) -> None:
    """What the service itself says is shown below what has made it say so. In the end, Java is killed."""
    (text,) = re.findall(r"^```toml\n(.*?)^```$", section("A first one"), re.MULTILINE | re.DOTALL)
    (tmp_path / "orders.toml").write_text(text)
    (tmp_path / "pipelines").mkdir()
    # What is wrong with the other one only Spark can tell.
    other = text.replace('"orders"', '"others"').replace("/orders", "/others").replace("amount *", "amont *")
    (tmp_path / "pipelines" / "others.toml").write_text(other)
    environment = environment_of(start_broker())
    run("penstock send orders '{}' && penstock send others '{}'", tmp_path, environment)
    first, service, *rest = commands(section("As a service"))
    run(first[0].replace("mkdir pipelines", "true"), tmp_path, environment)
    log = tmp_path / "service.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(shlex.split(service[0]), cwd=tmp_path, env=environment, stderr=output) as process,
    ):
        try:
            until(lambda: "orders: running" in log.read_text(), "it runs", RUN_SECONDS)
            (runs,) = re.findall("^orders +running .*$", dict(rest)["penstock pipeline list"], re.M)
            until(
                lambda: plain(runs) in plain(run("penstock pipeline list", tmp_path, environment)),
                "a list",
                RUN_SECONDS,
            )
            for command, shown in rest:
                said = run(command, tmp_path, environment)
                for line in shown.splitlines():
                    if line.startswith("orders: "):
                        until(partial(is_told, log, line), line, RUN_SECONDS)
                    else:
                        assert plain(line) in plain(said), f"{command}: {line!r} is not in\n{said}"
            assert process.poll() is None
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for pid in children:
                os.kill(int(pid), signal.SIGKILL)
            assert process.wait(RUN_SECONDS) == 1
        finally:
            process.kill()
    *lines, last = log.read_text().splitlines()
    assert last == (
        "penstock: Spark's Java process has ended; somebody has killed it, or it needs more memory "
        "(spark.driver.memory)"
    )
    assert not any(word in line for line in lines for word in ("Java", "Py4J", "Traceback")), lines
    # Nobody has minded the one that does not get on.
    assert sum("others: failed" in line for line in lines) == 1


def plain(text: str) -> str:
    """Without figures: times in seconds, however long they are, and rates, however small."""
    text = re.sub(r"<?[0-9][0-9,.]*", "0", text)
    return " ".join(re.sub(r"(0 (min|h) )?0 (s|min|h)\b", "0 s", text).split())
