"""What the site has beside the pages of docs/: reference that the code gives, examples, the project's papers.

mkdocs calls this (`hooks` of mkdocs.yml). `PAGES` is the one list of what is made; nothing of it is kept in
the tree, so that it cannot be older than the code. Links of pages to files outside docs/ (`../examples/…`)
are right in a repository; here they lead to the pages that were made of these files.

How it fails: a link to a file that no page was made of is a warning, and the build is strict.
"""

import argparse
import asyncio
import dataclasses
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from penstock import client  # noqa: E402
from penstock.cli import main as cli  # noqa: E402
from penstock.client import options  # noqa: E402
from penstock.http.api.routes import all_routes  # noqa: E402
from penstock.server.settings import HttpSettings  # noqa: E402

LANGUAGES = {".service": "ini", ".yml": "yaml"}
LOGO = "penstock/dashboard/assets/favicon.svg"

Json = Mapping[str, Any]
"""Of the API document, which is JSON."""


def cell(text: str) -> str:
    """What stands in a table."""
    return " ".join(text.replace("|", "\\|").split())


def table(header: str, rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    if rows:
        columns = header.split(", ")
        yield f"| {' | '.join(columns)} |"
        yield f"|{'---|' * len(columns)}"
        yield from (f"| {' | '.join(map(cell, row))} |" for row in rows)
        yield ""


# --- commands --------------------------------------------------------------------------------------


def commands() -> Iterator[str]:
    """Every command, as its parser knows it."""
    os.environ["COLUMNS"] = "92"
    yield "# Commands\n"
    yield "Made from the parsers of the commands themselves: it is what `penstock COMMAND --help` says."
    yield "The exit code is 0 on success, 1 on failure, 2 on misuse; more is said where a command has more.\n"
    loaded = {name: cli.load(name, cli.COMMANDS) for name in cli.COMMANDS}
    rows = [(f"[`penstock {name}`](#penstock-{name})", command.HELP) for name, command in loaded.items()]
    yield from table("command, does", rows)
    for name, command in loaded.items():
        yield f"## penstock {name}\n"
        yield from command_page(cli.command_parser(name, command))


def command_page(parser: argparse.ArgumentParser) -> Iterator[str]:
    formatter = parser._get_formatter()
    yield f"{parser.description}\n"
    yield f"```text\n{parser.format_usage().removeprefix('usage: ').strip()}\n```\n"
    for group in parser._action_groups:
        actions = [it for it in group._group_actions if it.help is not argparse.SUPPRESS]
        rows = [
            (f"`{formatter._format_action_invocation(it)}`", formatter._expand_help(it) if it.help else "")
            for it in actions
        ]
        if group.title not in ("positional arguments", "options") and rows:
            yield f"**{group.title}**\n"
        yield from table("argument, meaning", rows)
    if parser.epilog:
        yield f"```text\n{parser.epilog % {'prog': parser.prog}}\n```\n"


# --- HTTP ------------------------------------------------------------------------------------------


def api() -> dict[str, Any]:
    """What a broker answers at /openapi.json."""
    routes = all_routes(HttpSettings().lease_seconds_max)
    (own,) = (route for route in routes if route.path == "/openapi.json")
    answered: dict[str, Any] = json.loads(bytes(asyncio.run(own.handler(None)).body))  # type: ignore[arg-type]
    return answered


def http() -> Iterator[str]:
    """Every call of the API."""
    document = api()
    yield "# Every call of the HTTP API\n"
    yield "Made from what a broker answers at `/openapi.json`, which is [here as a file](openapi.json), too."
    yield "[The HTTP API](../http.md) shows the same by examples, and says what the calls mean.\n"
    by_tag: dict[str, list[tuple[str, Json]]] = {}
    for path, methods in document["paths"].items():
        for method, call in methods.items():
            if method != "head":
                by_tag.setdefault(call["tags"][0], []).append((f"{method.upper()} {path}", call))
    for tag, calls in by_tag.items():
        yield f"## {tag.capitalize()}\n"
        for what, call in calls:
            yield f"### {what}\n"
            yield from call_page(call)
    yield "## Schemas\n"
    for name, schema in document["components"]["schemas"].items():
        yield f"### {name}\n"
        yield f"{schema.get('description', '')}\n"
        yield from fields(schema)


def call_page(call: Json) -> Iterator[str]:
    yield f"{call['summary']} {call.get('description', '')}\n"
    rows = [
        (
            f"`{it['name']}`",
            it["in"] + (", needed" if it["required"] else ""),
            kind(it["schema"]),
            it["description"],
        )
        for it in call.get("parameters", ())
    ]
    yield from table("parameter, in, is, meaning", rows)
    if body := call.get("requestBody"):
        yield from contents("Body" + ("" if body["required"] else " (may be left out)"), body)
    for status, response in call["responses"].items():
        if status < "300":
            yield from contents(f"Answer {status}", response)
    refused = [(status, it["description"]) for status, it in call["responses"].items() if status >= "300"]
    yield '??? note "When it says no"\n'
    yield from (f"    {line}" for line in table("status, why", refused))


def contents(title: str, part: Json) -> Iterator[str]:
    media = ", ".join(f"`{it}`" for it in part.get("content", {})) or "without a body"
    yield f"**{title}**: {media}. {part.get('description', '').removeprefix('Done.')}\n"
    for content in part.get("content", {}).values():
        if rows := list(fields(content.get("schema", {}))):
            yield from rows
            break
        if "$ref" in str(content):
            yield f"It is {kind(content['schema'])}.\n"
            break


def fields(schema: Json) -> Iterator[str]:
    needed = schema.get("required", ())
    rows = [
        (f"`{name}`", kind(it), it.get("description", "") + ("" if name in needed else " (not always)"))
        for name, it in schema.get("properties", {}).items()
    ]
    yield from table("field, is, meaning", rows)


def kind(schema: Json) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if several := schema.get("oneOf") or schema.get("anyOf"):
        return " or ".join(dict.fromkeys(map(kind, several)))
    if "enum" in schema and len(schema["enum"]) < 9:
        text = " or ".join(f"`{it}`" for it in schema["enum"])
    elif schema.get("type") == "array":
        text = f"list of {kind(schema['items'])}" if schema.get("items") else "list"
    else:
        types = schema.get("type", "anything")
        text = " or ".join(types) if isinstance(types, list) else types
    bounds = [
        f"{word} {schema[key]}" for word, key in (("from", "minimum"), ("to", "maximum")) if key in schema
    ]
    if "default" in schema:
        bounds.append(f"default `{schema['default']}`")
    return f"{text} {', '.join(bounds)}".strip()


# --- Python ----------------------------------------------------------------------------------------


def python() -> Iterator[str]:
    """Every public name of the clients."""
    yield "# The Python API\n"
    yield "Made from the sources. [Clients](../clients.md) shows how it is used, program by program.\n"
    yield "`connect` and `aconnect` are in `penstock`, everything is in `penstock.client`.\n"
    functions = [name for name in client.__all__ if not inspect.isclass(getattr(client, name))]
    classes = [name for name in client.__all__ if name not in functions and name != "ClientOptions"]
    for name in functions:
        yield f"## {name}\n"
        yield from callable_page(name, getattr(client, name))
    yield f"## ClientOptions\n\n{inspect.getdoc(options.Options)}\n"
    rows = [
        (f"`{it.name}`", f"`{inspect.formatannotation(it.type)}`", f"`{it.default!r}`")
        for it in vars(options.Options)["__dataclass_fields__"].values()
    ]
    yield from table("option, type, default", rows)
    for name in sorted(
        classes, key=lambda it: (issubclass(getattr(client, it), Exception), it.removeprefix("Async"), it)
    ):
        yield f"## {name}\n"
        yield from class_page(getattr(client, name))


def class_page(it: type) -> Iterator[str]:
    if issubclass(it, Exception):
        yield f"Is a `{it.__mro__[1].__name__}`.\n"
    yield f"{inspect.getdoc(it) or ''}\n"
    if dataclasses.is_dataclass(it):
        yield from table(
            "field, type",
            [
                (f"`{field.name}`", f"`{inspect.formatannotation(field.type)}`")
                for field in dataclasses.fields(it)
            ],
        )
    own = [base for base in it.__mro__ if base.__module__.startswith("penstock.")]
    names = dict.fromkeys(
        name for base in own for name in (*vars(base).get("__annotations__", ()), *vars(base))
    )
    for name in sorted(name for name in names if not name.startswith("_")):
        member = inspect.getattr_static(it, name, None)
        if isinstance(member, property):
            yield f"### {it.__name__}.{name}\n\n{inspect.getdoc(member) or ''}\n"
        elif callable(getattr(it, name, None)):
            yield f"### {it.__name__}.{name}()\n"
            yield from callable_page(name, getattr(it, name))


def said(it: object) -> str:
    """Its docstring; where that only names another one, the other."""

    def other(found: re.Match[str]) -> str:
        return said(getattr(getattr(client, found[1]), found[2]))

    return re.sub(r"^See `(\w+)\.(\w+)`\.", other, inspect.getdoc(it) or "")


def callable_page(name: str, it: Callable[..., object]) -> Iterator[str]:
    text = str(inspect.signature(it)).replace("(self, ", "(").replace("(self)", "()")
    text = re.sub(r"\b(?:penstock|collections|typing)(?:\.\w+)*\.(?=[A-Z])", "", text).replace("'", "")
    start = "async def" if inspect.iscoroutinefunction(it) else "def"
    if len(text) > 80:
        text = re.sub(r", (?=\w+:|\*)", ",\n    ", text.replace("(", "(\n    ", 1)).replace(") ->", "\n) ->")
    yield f"```python\n{start} {name}{text}\n```\n\n{said(it)}\n"


# --- files of the repository -----------------------------------------------------------------------


def anchor(path: str) -> str:
    return re.sub(r"\W+", "-", path)


def examples() -> Iterator[str]:
    """The folder examples/, on one page."""
    yield "# Examples\n\nThe files of `examples/` in the repository. Tests run and judge them.\n"
    folder = ROOT / "examples"
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() and path.name != "__pycache__":
            yield f"{'##' if path.parent == folder else '###'} {name} {{#{anchor(name)}}}\n"
        elif path.suffix == ".json":
            yield f"### {name} {{#{anchor(name)}}}\n\n[{path.name}](../{path.name})\n"
        elif path.is_file() and "__pycache__" not in name:
            language = LANGUAGES.get(path.suffix, path.suffix[1:])
            yield f"### {name} {{#{anchor(name)}}}\n\n```{language}\n{path.read_text(encoding='utf-8')}```\n"

    yield "## Containerfile {#Containerfile}\n"
    yield f"```dockerfile\n{(ROOT / 'Containerfile').read_text(encoding='utf-8')}```\n"


def paper(name: str) -> Callable[[], Iterator[str]]:
    """A page of the repository's first folder; its links are relative to that."""

    def page() -> Iterator[str]:
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](../")
        yield re.sub(r"\]\((?=\w[\w./-]*\))", "](../../", text)

    return page


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "reference/cli.md": commands,
    "reference/http.md": http,
    "reference/python.md": python,
    "reference/examples.md": examples,
    "project/changelog.md": paper("CHANGELOG.md"),
    "project/contributing.md": paper("CONTRIBUTING.md"),
    "project/security.md": paper("SECURITY.md"),
}
PAPERS = {"../CHANGELOG.md": "changelog", "../CONTRIBUTING.md": "contributing", "../SECURITY.md": "security"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is made here."""
    for uri, make in PAGES.items():
        files.append(File.generated(config, uri, content="\n".join(make())))
    files.append(File.generated(config, "reference/openapi.json", content=json.dumps(api(), indent=1)))
    files.append(File.generated(config, "images/logo.svg", abs_src_path=str(ROOT / LOGO)))
    for path in (ROOT / "examples").rglob("*.json"):
        files.append(File.generated(config, path.name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to what is outside docs/ lead to the page that was made of it."""
    up = "../" * page.file.src_uri.count("/")

    def here(found: re.Match[str]) -> str:
        path = found[1]
        if path.startswith(("../examples/", "../Containerfile")):
            path = path.removeprefix("../")
            return f"]({up}reference/examples.md#{anchor(path.removeprefix('examples/').rstrip('/'))})"
        return f"]({up}project/{PAPERS[path]}.md)" if path in PAPERS else found[0]

    return re.sub(r"\]\((?:\.\./)*(\.\./[\w./-]+)\)", here, markdown)
