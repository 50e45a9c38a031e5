"""Numbers as people read them: the browser says the same as the broker's side."""

from playwright.sync_api import Browser

from tests.common.test_units import SAID
from tests.server.harness import ROOT


def test_the_browser_says_the_same(browser: Browser) -> None:
    source = (ROOT / "penstock" / "dashboard" / "assets" / "words.js").read_text(encoding="utf-8")
    page = browser.new_page()
    try:
        for kind, said in SAID.items():
            script = f"{source.replace('export ', '')}\nJSON.parse(values).map(NAMED.{kind})"
            values = list(said)
            heard = page.evaluate(f"values => eval({script!r})", str(values))
            assert dict(zip(values, heard, strict=True)) == said
    finally:
        page.close()
