"""Real brokers, and a real browser that looks at them.

The browser is Chromium, the package of that name in Debian, which `make setup` installs. Playwright only
drives it. One browser serves several modules (`TOGETHER` in `tests/conftest.py`), and one profile all tests
of a module: it has loaded once what all pages load. Who signs in, or chooses colours, comes alone, with a
profile of its own.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Literal

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    Request,
    expect,
    sync_playwright,
)
from playwright.sync_api import Error as PlaywrightError

from tests import sharing
from tests.http.conftest import StartBroker, api, broker, start_broker
from tests.server import harness
from tests.server.harness import BrokerProcess

BROWSER_SECONDS = 60.0
"""A browser and the two processes of a broker, where other tests run too: nobody is in a hurry."""

NETWORK_CHANGED = "ERR_NETWORK_CHANGED"
"""So Chromium ends what it loads where an interface of the machine comes or goes: it is loaded again."""

TRIES = 5

WIDTHS = (1280, 375)
THEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

Visit = Callable[..., Page]

# Brokers are those of the tests of the HTTP API.
__all__ = ["StartBroker", "Visit", "api", "broker", "browser", "chromium", "profile", "start_broker", "visit"]


@pytest.fixture(scope="module", autouse=True)
def _pages() -> Iterator[None]:
    """The brokers of these tests have NiceGUI at once."""
    BrokerProcess.has_pages = True
    yield
    BrokerProcess.has_pages = False


class Chromium:
    """The browser of the files that share one. It is there no longer: while Playwright drives, no other loop
    can run."""

    def __init__(self) -> None:
        self._ends = ExitStack()
        self._browser: Browser | None = None

    def start(self) -> Browser:
        if self._browser is None:
            found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
            if found is None:
                pytest.fail(
                    "there is no browser to test the dashboard with; on Debian, as root: "
                    "apt-get install chromium; or name one that is there: CHROMIUM=/path/to/chromium"
                )
            expect.set_options(timeout=BROWSER_SECONDS * 1000)
            driver = self._ends.enter_context(sync_playwright())
            self._browser = driver.chromium.launch(executable_path=found, args=list(FLAGS))
            self._ends.callback(self._browser.close)
        return self._browser

    def end(self) -> None:
        self._browser = None
        self._ends.close()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    chromium = Chromium()
    yield chromium
    chromium.end()


@pytest.fixture(scope="module")
def browser(chromium: Chromium) -> Iterator[Browser]:
    """Chromium, running."""
    yield chromium.start()
    if not sharing.goes_on:
        chromium.end()


@pytest.fixture(scope="module")
def profile(browser: Browser) -> Iterator[BrowserContext]:
    """That of all who leave nothing behind."""
    context = new_profile(browser)
    yield context
    context.close()


def new_profile(browser: Browser) -> BrowserContext:
    context = browser.new_context(
        reduced_motion="reduce",
        timezone_id="Asia/Kathmandu",  # 5 hours and 45 minutes from what pages show
    )
    context.set_default_timeout(BROWSER_SECONDS * 1000)
    return context


@pytest.fixture
def visit(browser: Browser, profile: BrowserContext) -> Iterator[Visit]:
    """Opens pages: `visit(broker, "/path")`.

    `width`, `dark`: of the window. `alone`: with a profile of its own. `context`: another page of such a
    visitor. `forgive`: parts of errors that belong to the test. Every other error that a page writes to
    its console, or throws, or makes by asking another host, fails the test when it ends.
    """
    contexts: list[BrowserContext] = []
    pages: list[Page] = []
    errors: list[str] = []

    def open_page(
        broker: BrokerProcess,
        path: str = "/",
        *,
        width: int = 1280,
        dark: bool = False,
        forgive: Sequence[str] = (),
        alone: bool = False,
        context: BrowserContext | None = None,
        host: str = "127.0.0.1",
    ) -> Page:
        base = f"http://{host}:{broker.ports['http']}"
        if alone:
            context = new_profile(browser)
            contexts.append(context)
        page = (context or profile).new_page()
        pages.append(page)
        resize(page, width)
        page.emulate_media(color_scheme="dark" if dark else "light")

        def wrong(what: str) -> None:
            if not any(part in what for part in forgive):
                errors.append(what)

        def said(it: ConsoleMessage) -> None:
            if it.type in ("error", "warning") and NETWORK_CHANGED not in it.text:
                wrong(f"console: {it.text}")

        cut: list[str] = []  # what the machine's network has cut off

        def failed(it: Request) -> None:
            if NETWORK_CHANGED in (it.failure or ""):
                cut.append(it.url)

        page.on("requestfailed", failed)
        page.on("console", said)
        page.on("pageerror", lambda it: wrong(f"page: {it}"))
        page.on("request", lambda it: None if _is_here(it.url, base) else wrong(f"asks {it.url}"))
        for left in reversed(range(TRIES)):
            cut.clear()
            try:
                page.goto(base + path)
            except PlaywrightError as error:
                if NETWORK_CHANGED not in str(error) or not left:
                    raise
            else:
                if not cut:
                    break
        return page

    yield open_page
    for it in (*pages, *contexts):
        it.close()
    assert errors == []


def _is_here(url: str, base: str) -> bool:
    return url.startswith((base + "/", base.replace("http:", "ws:") + "/", "data:", "blob:"))


def resize(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})


def everybody(page: Page) -> None:
    """The page, as it is now, serves all: on a desk and on a phone, by day and by night."""
    for width in WIDTHS:
        resize(page, width)
        for theme in THEMES:
            page.emulate_media(color_scheme=theme)
            expect(page.locator("html")).to_have_attribute("data-theme", theme)
            page.evaluate(DRAWN)
            try:
                axe(page)
                fits(page)
            except AssertionError as error:
                error.add_note(f"{width} pixels wide, {theme}")
                raise


DRAWN = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Over when the page has been drawn as it is."""


def axe(page: Page) -> None:
    """Nothing on the page is seriously in the way of people who cannot see, hear or point."""
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(AXE_SCRIPT)
    # Not to load style sheets once more: the broker of a page may be gone.
    options = {"resultTypes": ["violations"], "preload": False}
    found = page.evaluate("options => axe.run(options).then(it => it.violations)", options)
    bad = [
        f"{it['id']} ({it['impact']}): {it['help']}; {[node['html'][:200] for node in it['nodes'][:5]]}"
        for it in found
        if it["impact"] in ("serious", "critical")
    ]
    assert bad == []


def readable(element: Locator) -> None:
    """Its text stands out from what is behind it, as WCAG asks of small text."""
    text, behind = (_brightness(colour) for colour in element.evaluate(COLOURS))
    contrast = (max(text, behind) + 0.05) / (min(text, behind) + 0.05)
    assert contrast >= 4.5, contrast


COLOURS = """it => {
    let box = it;
    const behind = () => getComputedStyle(box).backgroundColor;
    while (behind() === "rgba(0, 0, 0, 0)") box = box.parentElement;
    const parts = (colour) => colour.match(/\\d+/g).slice(0, 3).map(Number);
    return [parts(getComputedStyle(it).color), parts(behind())];
}"""


def _brightness(colour: Sequence[float]) -> float:
    shares = [part / 255 for part in colour]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return sum(share * weight for share, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def until(condition: Callable[[], bool], what: str) -> None:
    """Poll for what a browser shows; the end is bounded and named.

    A page that has lost its socket loads itself again (`page.js`): meanwhile it shows nothing.
    """

    def holds() -> bool:
        try:
            return condition()
        except PlaywrightError as error:
            if "Execution context was destroyed" not in error.message:
                raise
            return False

    harness.until(holds, what, BROWSER_SECONDS)


def fits(page: Page) -> None:
    """Nothing makes the page as a whole scroll sideways."""
    wide, window = page.evaluate("(it => [it.scrollWidth, it.clientWidth])(document.documentElement)")
    assert wide <= window, (wide, window)
