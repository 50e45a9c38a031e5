"""docs/settings.md says what the tables say: every setting, nothing else, the same defaults."""

import argparse
import json
import re
from dataclasses import fields, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from penstock.model.policy import QueuePolicy
from penstock.model.rights import WORDS
from penstock.server.settings import (
    GRANT_KEYS,
    HTTP_KEYS,
    LISTENER_KEYS,
    SECTIONS,
    TOKEN_KEYS,
    USER_KEYS,
    HttpSettings,
    Limits,
    Listener,
    Settings,
    Token,
)
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
    _, _, table = sections_of_docs()[section].partition("| setting | default |")
    _, _, *found = takewhile(lambda line: line.startswith("|"), ("|" + table).splitlines())
    return found


@pytest.mark.parametrize(
    ("heading", "section"),
    [
        ("Above all sections", ""),
        ("`[limits]`", "limits"),
        ("`[http]`", "http"),
        ("`[log]`", "log"),
        ("`[cluster]`", "cluster"),
    ],
)
def test_the_reference_has_every_setting_and_nothing_else(heading: str, section: str) -> None:
    assert rows(heading) == [
        f"| `{setting.name}` | {'none' if setting.default is None else f'`{setting.default_text}`'}"
        f" | {setting.kind.wanted()} | {setting.help} |"
        for setting in SECTIONS[section]
    ] + [
        f"| `{key.name}` | {f'`{HttpSettings().address}`' if key.name == 'address' else 'none'}"
        f" | {key.kind.wanted()} | {key.help} |"
        for key in (HTTP_KEYS if section == "http" else ())
    ]


def test_the_reference_has_everything_a_token_can_say() -> None:
    assert rows("`[[http.tokens]]`") == [
        f"| `{key.name}` | needed | {key.kind.wanted()} | {key.help} |" for key in TOKEN_KEYS
    ]
    assert [key.name for key in TOKEN_KEYS] == [field.name for field in fields(Token)]
    assert all(key.required for key in TOKEN_KEYS)


def test_the_reference_has_everything_a_user_can_say() -> None:
    text = sections_of_docs()["`[[user]]`"]
    for key in USER_KEYS:
        needed = "needed" if key.required else "none"
        assert f"| `{key.name}` | {needed} | {key.kind.wanted()} | {key.help} |" in text
    for key in GRANT_KEYS:
        assert f"| `{key.name}` of `rights` | needed | {key.kind.wanted()} | {key.help} |" in text
    for right in WORDS:
        assert f"| `{right}` |" in text


def test_everything_about_the_http_api_can_be_said() -> None:
    told = [*(setting.name for setting in SECTIONS["http"]), *(key.name for key in HTTP_KEYS), "tokens"]
    of_the_log = {"stage_seconds", "stages_bytes_max"}  # which keeps what is staged
    names = {field.name for field in fields(HttpSettings)} - {"place"} | of_the_log
    assert {name.replace("-", "_") for name in told} == names


def test_the_reference_has_every_section() -> None:
    assert list(sections_of_docs()) == [
        "",
        "Above all sections",
        "`[limits]`",
        "`[http]`",
        "`[[user]]`",
        "`[[http.tokens]]`",
        "`[log]`",
        "`[archive]`",
        "`[cluster]`",
        "`[[listener]]`",
        '`[queue."PATTERN"]`',
        "Reading the settings again",
    ]
    assert list(SECTIONS) == ["", "limits", "http", "log", "archive", "cluster"]


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
    said = {"True": "on", "()": "[]"}
    defaults = [str(getattr(QueuePolicy(), field.name)) for field in fields(QueuePolicy)]
    assert shown == [
        [field.name.replace("_", "-"), said.get(default, default)]
        for field, default in zip(fields(QueuePolicy), defaults, strict=True)
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
    assert settings.http is not None
    assert str(settings.http.address) == "0.0.0.0:9180"
    assert settings.http.tls_key == "/etc/penstock/broker.key"
    assert settings.http.tokens == (Token("grafana", "read", "replace-this-by-openssl-rand-hex-24"),)
    assert settings.policies.for_queue("orders.eu").max_deliveries == 5
    assert settings.policies.for_queue("log").durability == "interval"


def test_the_first_table_of_the_reference_is_true(tmp_path: Path) -> None:
    cells = [re.findall("`([^`]+)`", line) for line in sections_of_docs()[""].splitlines() if line[:1] == "|"]
    _, _, flags, variables, (top, key, header) = cells
    by_flags = read(tmp_path, " ".join(flags))
    assert (by_flags.durability, by_flags.limits.connections_max) == ("none", 500)
    assert read(tmp_path, **dict(variable.split("=") for variable in variables)) == by_flags
    assert read(tmp_path, "", f"{top}\n{header}\n{key}\n") == by_flags
