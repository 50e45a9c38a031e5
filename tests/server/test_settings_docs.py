"""docs/settings.md says what the tables say: every setting, nothing else, the same defaults."""

import argparse
import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.policy import QueuePolicy
from penstock.server.settings import LISTENER_KEYS, SECTIONS, Limits, Listener, Settings
from penstock.server.settings_read import add_arguments, load

DOCS = Path(__file__).parents[2] / "docs" / "settings.md"


def read(folder: Path, words: str = "", file: str = "", **environ: str) -> Settings:
    (folder / "penstock.toml").write_text(file, encoding="utf-8")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return load(parser.parse_args(["--config", str(folder / "penstock.toml"), *words.split()]), environ)


def sections_of_docs() -> dict[str, str]:
    title, *parts = re.split(r"^## (.+)\n", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {"": title, **dict(zip(parts[::2], parts[1::2], strict=True))}


def rows(section: str) -> list[str]:
    found = [line for line in sections_of_docs()[section].splitlines() if line.startswith("|")]
    assert found[0].startswith("| setting | default |")
    return found[2:]


@pytest.mark.parametrize(
    ("heading", "section"), [("Above all sections", ""), ("`[limits]`", "limits"), ("`[log]`", "log")]
)
def test_the_reference_has_every_setting_and_nothing_else(heading: str, section: str) -> None:
    assert rows(heading) == [
        f"| `{setting.name}` | `{setting.default}` | {setting.kind.wanted()} | {setting.help} |"
        for setting in SECTIONS[section]
    ]


def test_the_reference_has_every_section() -> None:
    assert list(sections_of_docs()) == [
        "",
        "Above all sections",
        "`[limits]`",
        "`[log]`",
        "`[[listener]]`",
        '`[queue."PATTERN"]`',
        "Reading the settings again",
    ]
    assert list(SECTIONS) == ["", "limits", "log"]


def test_the_reference_has_everything_a_listener_can_say() -> None:
    defaults = {field.name: field.default for field in fields(Listener)}

    def default(name: str) -> str:
        value: Any = defaults[name.replace("-", "_")]
        if value is None:
            return "none"
        return f"`{value if isinstance(value, str) else json.dumps(value)}`"

    assert rows("`[[listener]]`") == [
        f"| `{key.name}` | {'needed' if key.required else default(key.name)} | {', '.join(key.protocols)}"
        f" | {key.kind.wanted()} | {key.help} |"
        for key in LISTENER_KEYS
    ]
    told = {key.name.replace("-", "_") for key in LISTENER_KEYS}
    assert told == defaults.keys() - {"setting", "place"}


def test_the_reference_has_every_queue_setting() -> None:
    shown = [re.findall("`([^`]+)`", row)[:2] for row in rows('`[queue."PATTERN"]`')]
    policy = QueuePolicy()
    assert shown == [
        [field.name.replace("_", "-"), str(getattr(policy, field.name)).replace("True", "on")]
        for field in fields(QueuePolicy)
    ]


def test_the_example_of_the_reference_works(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.+?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    settings = read(tmp_path, "", example)
    assert [(listener.protocol, str(listener.address)) for listener in settings.listeners] == [
        ("rq", "127.0.0.1:13700"),
        ("phpmq", "0.0.0.0:9100"),
        ("sspq", "unix:/run/penstock/log.sock"),
    ]
    assert settings.limits == replace(Limits(), connections_max=500, payload_bytes_max=1 << 20)
    assert settings.policies.for_queue("orders.eu").max_deliveries == 5
    assert settings.policies.for_queue("log").durability == "interval"


def test_the_first_table_of_the_reference_is_true(tmp_path: Path) -> None:
    cells = [re.findall("`([^`]+)`", line) for line in sections_of_docs()[""].splitlines() if line[:1] == "|"]
    _, _, flags, variables, (top, key, header) = cells
    by_flags = read(tmp_path, " ".join(flags))
    assert (by_flags.durability, by_flags.limits.connections_max) == ("none", 500)
    assert read(tmp_path, **dict(variable.split("=") for variable in variables)) == by_flags
    assert read(tmp_path, "", f"{top}\n{header}\n{key}\n") == by_flags
