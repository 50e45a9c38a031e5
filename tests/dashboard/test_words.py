"""Numbers as people read them: the same on the broker's side and in the browser."""

import pytest
from playwright.sync_api import Browser

from penstock.dashboard import words
from tests.server.harness import ROOT

SAID: dict[str, dict[float, str]] = {
    "count": {0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567"},
    "rate": {0: "0", 0.01: "<0.1", 0.05: "0.1", 3.14: "3.1", 9.9: "9.9", 9.96: "10", 1234.4: "1,234"},
    "age": {
        0: "<1 s",
        0.94: "<1 s",
        1: "1 s",
        119: "119 s",
        120: "2 min",
        3599: "59 min",
        3600: "1 h",
        3700: "1 h 1 min",
        47 * 3600: "47 h",
        48 * 3600: "2 d",
        49 * 3600: "2 d 1 h",
        11 * 86400 + 3600: "11 d",
    },
    "size": {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 123456: "121 KiB", 1.5e9: "1.4 GiB", 2e15: "1.8 PiB"},
}


@pytest.mark.parametrize("kind", SAID)
def test_the_broker_says(kind: str) -> None:
    say = getattr(words, kind)
    assert {value: say(value) for value in SAID[kind]} == SAID[kind]


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


def test_what_is_not_known() -> None:
    assert words.age(None) == "–"
    assert words.moment(0) == "1970-01-01 00:00:00 UTC"
