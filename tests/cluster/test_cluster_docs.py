"""docs/cluster.md says what is true: its files are read by those they are for, its tables agree."""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from penstock.cli import cluster as command
from penstock.cluster.lease import LEASE_SECONDS, SUSPECT_SECONDS
from penstock.log.jetstream.cluster import server_path
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.rights import rights_of_front_end, rights_of_reader, user_block
from penstock.server.settings import SECTIONS, Settings
from penstock.server.settings_read import add_arguments, load

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cluster.md").read_text(encoding="utf-8")
VALUES = yaml.safe_load(
    (DOCS.parent / "examples/kubernetes/cluster/nats-values.yaml").read_text(encoding="utf-8")
)["config"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def read(folder: Path, text: str, **environ: str) -> Settings:
    (folder / "penstock.toml").write_text(text, encoding="utf-8")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return load(parser.parse_args(["--config", str(folder / "penstock.toml")]), environ)


def test_the_settings_of_a_front_end_are_settings(tmp_path: Path) -> None:
    front_end, several, other_log = (read(tmp_path, text) for text in blocks("toml"))
    assert isinstance(front_end.engine, tuple)
    assert len(front_end.engine) == 3
    assert (front_end.cluster.id, str(front_end.cluster.advertise)) == ("front-1", "front-1:7400")
    assert len(front_end.cluster.monitor) == 3
    assert several.cluster.shards == 16
    assert other_log.cluster.name == "telemetry"


def test_nats_takes_the_configuration_of_a_node(tmp_path: Path) -> None:
    config = next(text for text in blocks("text") if text.startswith("server_name"))
    (tmp_path / "nats.conf").write_text(config.replace("/var/lib/nats", str(tmp_path)))
    (line,) = re.findall(r"^    penstock (cluster rights) > /etc/nats/(\S+)$", PAGE, re.MULTILINE)
    with open(tmp_path / line[1], "w") as file:
        subprocess.run([sys.executable, "-m", "penstock", *line[0].split()], stdout=file, check=True)
    done = subprocess.run(
        [server_path(), "-t", "--config", tmp_path / "nats.conf"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "sync_interval: always" in config


def test_the_rights_of_users_are_those_that_are_needed() -> None:
    """And the table says what each is for. That they are enough is shown by `test_rights.py`."""
    front, reader = rights_of_front_end(LogNames()), rights_of_reader(LogNames())
    rows = re.findall(r"^\| (publish|subscribe) \| `(\S+)` \| (.+) \|$", PAGE, re.MULTILINE)
    assert rows == [
        (way, subject, reason)
        for way, subjects in (("publish", front.publish), ("subscribe", front.subscribe))
        for subject, reason in subjects.items()
    ]
    (user,) = VALUES["merge"]["authorization"]["users"]
    assert user["permissions"] == {"publish": [*front.publish], "subscribe": [*front.subscribe]}
    spark = (DOCS / "spark.md").read_text(encoding="utf-8")
    assert f"publish:   {', '.join(reader.publish)}\nsubscribe: {', '.join(reader.subscribe)}\n" in spark


def test_the_rights_of_several_logs_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    for flags, names, shards in (
        ([], LogNames(), 16),
        (["--shards", "1", "--name", "eu"], LogNames("eu"), 1),
    ):
        assert command.run(parser.parse_args(["rights", *flags])) == 0
        printed = capsys.readouterr().out
        assert user_block("penstock", '"replace-this"', rights_of_front_end(names, shards)) in printed
        assert user_block("spark", '"replace-this-too"', rights_of_reader(names, shards)) in printed


def test_no_example_is_without_a_user(tmp_path: Path) -> None:
    settings = read(tmp_path, blocks("toml")[0])
    assert settings.strict
    assert settings.cluster.credentials == "/etc/penstock/nats.user"


def test_the_values_of_the_chart_say_what_counts() -> None:
    assert VALUES["jetstream"]["merge"] == {"sync_interval": "always"}
    assert VALUES["cluster"]["replicas"] == 3
    assert VALUES["monitor"]["enabled"]


def test_the_table_of_checks_has_those_that_there_are() -> None:
    source = (DOCS.parent / "penstock" / "cluster" / "checks.py").read_text(encoding="utf-8")
    # "connection" is doctor's: a front-end that cannot connect says so by itself.
    names = set(re.findall(r'Finding\(\s*"([a-z_]+)"', source)) - {"connection"}
    _, _, table = PAGE.partition("| check | fails | warns |")
    told = set(re.findall(r"^\| `([a-z_]+)(?: …)?` \|", table, re.MULTILINE))
    assert told == names | {"stream"}


def test_what_it_says_of_flags_and_times_is_so() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    _, _, part = PAGE.partition("## Try it")
    said = set(re.findall(r"`(--[a-z-]+)", part.partition("## Run it")[0]))
    assert said <= flags
    assert f"after {LEASE_SECONDS:g} s of silence" in PAGE
    assert f"after {SUSPECT_SECONDS:g} s where its process died" in PAGE


def test_the_links_of_the_page_lead_somewhere() -> None:
    for page, anchor in re.findall(r"\]\(([a-z-]+\.md)(#[a-z-]+)?\)", PAGE):
        text = (DOCS / page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)", text, re.MULTILINE)
        titles = {re.sub(r"[^a-z0-9 -]", "", it.lower()).replace(" ", "-") for it in headings}
        assert not anchor or anchor[1:] in titles, (page, anchor)


@pytest.mark.parametrize("unit", blocks("ini"))
def test_units_have_what_a_unit_needs(unit: str) -> None:
    path, _, rest = unit.partition("\n")
    assert path.startswith("# /etc/systemd/system/")
    sections = re.findall(r"^\[(\w+)\]", rest, re.MULTILINE)
    assert sections == ["Unit", "Service", "Install"]
    assert re.search(r"^ExecStart=/\S+ ", rest, re.MULTILINE)


def test_every_setting_of_the_section_is_in_the_reference() -> None:
    reference = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert all(f"| `{setting.name}` |" in reference for setting in SECTIONS["cluster"])
    assert all(tomllib.loads(text) for text in blocks("toml"))
