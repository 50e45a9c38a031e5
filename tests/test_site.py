"""The documentation's site: it builds strictly, has every page, and is read and searched without a network.

mkdocs fails the build where a link, an anchor or an entry of the navigation leads nowhere (`validation` of
mkdocs.yml); that it does is tried with pages that are wrong.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from penstock.cli.main import COMMANDS
from tests.dashboard.conftest import BROWSER_SECONDS, browser, chromium
from tests.server.harness import ROOT

__all__ = ["browser", "chromium"]

DOCS = ROOT / "docs"


def build(site: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Builds the site of a tree, as `make docs` does."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)],
        cwd=root,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    made = build(folder)
    assert made.returncode == 0, made.stderr
    return folder


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = re.findall(r": ([\w/-]+\.md)$", nav, re.MULTILINE)
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert pages - set(listed) == set()


def test_the_reference_has_what_the_code_has(site: Path) -> None:
    commands = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f'id="penstock-{name}"' not in commands] == []
    calls = (site / "reference" / "http.html").read_text(encoding="utf-8")
    document = json.loads((site / "reference" / "openapi.json").read_text(encoding="utf-8"))
    assert len(document["paths"]) > 20
    for path, methods in document["paths"].items():
        for method in methods.keys() - {"head"}:
            assert f"{method.upper()} {path}" in calls
    python = (site / "reference" / "python.html").read_text(encoding="utf-8")
    for name in ("connect", "aconnect", "PhpmqClient", "HttpMessage.requeue", "Undelivered"):
        assert f">{name}" in python, name


def loaded(site: Path) -> Iterator[tuple[Path, str]]:
    """What a browser loads by itself, of each page and style sheet."""
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for tag in re.findall(r"<(?:script|img|link|iframe|source)\b[^>]*>", text):
            if 'rel="canonical"' not in tag:
                yield from ((page, url) for url in re.findall(r'(?:src|href)="([^"]+)"', tag))
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        yield from ((sheet, url) for url in re.findall(r"url\(['\"]?([^)'\"]+)", text))


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    found = [*loaded(site)]
    assert len(found) > 500
    assert [(page.name, url) for page, url in found if re.match(r"(?:https?:)?//", url)] == []


def test_it_is_read_and_searched_from_a_folder(site: Path, browser: Browser) -> None:
    """Without any server, and so that nothing but files is asked for."""
    context = browser.new_context(color_scheme="dark", viewport={"width": 1280, "height": 800})
    context.set_default_timeout(BROWSER_SECONDS * 1000)
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((site / "index.html").as_uri())
    expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "slate")
    box = page.get_by_role("textbox", name="Search")
    box.click()
    # By keys: the theme listens to them. What is typed before the index is there is looked for then.
    box.press_sequentially("idempotency")
    found = page.locator(".md-search-result__item a").first
    expect(found).to_be_visible()
    found.click()
    expect(page.locator("article")).to_contain_text("Idempotency")
    context.close()
    assert errors == []
    assert len(asked) > 5
    assert [url for url in asked if not url.startswith(("file:", "data:", "about:"))] == []


@pytest.mark.parametrize("name", ["index", "settings", "benchmarks", "reference/http", "tutorials/workers"])
def test_no_page_is_wider_than_a_phone(site: Path, browser: Browser, name: str) -> None:
    """Tables, code and charts scroll by themselves."""
    page = browser.new_page(viewport={"width": 375, "height": 800})
    page.set_default_timeout(BROWSER_SECONDS * 1000)
    page.goto((site / f"{name}.html").as_uri(), wait_until="domcontentloaded")
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    page.close()


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    """By the settings of this tree, for a site of two pages."""
    settings, _, _ = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")
    settings = re.sub(r"^hooks: .*$", "", settings, flags=re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(f"{settings}\nnav: [index.md, gone.md]\n", encoding="utf-8")
    (tmp_path / "docs").mkdir()
    links = "[a](index.md#no-such-anchor) [b](no-such-page.md) [c](index.md#it-is-there)"
    (tmp_path / "docs" / "index.md").write_text(f"# It is there\n\n{links}\n", encoding="utf-8")
    (tmp_path / "docs" / "stray.md").write_text("# In no navigation\n", encoding="utf-8")
    made = build(tmp_path / "site", tmp_path)
    assert made.returncode == 1
    # In whatever words: a warning for each, and none for what is there.
    warnings = re.findall(r"^WARNING\b.*(?:\n .*)*", made.stderr, re.MULTILINE)
    wrong = ("no-such-anchor", "no-such-page.md", "gone.md", "stray.md")
    assert sorted(name for warning in warnings for name in wrong if name in warning) == sorted(wrong)
    assert len(warnings) == len(wrong)
    assert "it-is-there" not in made.stderr
