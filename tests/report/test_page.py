"""The page: whole, closed, escaped, and of one piece."""

import re
from datetime import UTC, datetime
from html.parser import HTMLParser

import pyarrow as pa
import pytest

from penstock.report import charts, job, tables
from penstock.report.charts import Ranks, Series
from penstock.report.figures import figures_of
from penstock.report.page import About, render
from penstock.report.period import Span
from penstock.report.survey import Facts
from tests.report.conftest import CUT_QUEUE, Made
from tests.report.traffic import HOSTILE

ABOUT = About("http://127.0.0.1:9180", datetime(2030, 1, 31, 12, tzinfo=UTC), "1.2.3", ["a*", "<b>"])
VOID = {"meta", "br", "hr", "img", "input", "link"}
SECTIONS = ["found", "queues", "times", "retries", "ends", "consumers", "each", "coverage"]


class Page(HTMLParser):
    """Reads a page, and does not forgive what a browser would."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.table_words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), (tag, attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open and data.strip():
            self.words.append(data)
            if "table" in self.open:
                self.table_words.append(data)

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]

    @property
    def text(self) -> str:
        return " ".join(self.words)


@pytest.fixture(scope="module")
def html(whole: Made) -> str:
    return render(figures_of(whole.result.span, whole.result.tables), ABOUT)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_it_has_every_section_and_ways_to_them(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {str(attributes["href"]).removeprefix("#") for attributes in page.all("a")}
    assert targets <= set(ids)
    assert set(SECTIONS) <= targets
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == 1


def test_it_needs_nothing_from_elsewhere(html: str, page: Page) -> None:
    shown = html.replace(ABOUT.url, "")
    assert not re.search(r"https?:/|//[a-z]|url\(|@import|javascript:", shown, re.IGNORECASE)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "form", "base"}
    attributes = {name for _, given in page.tags for name in given}
    assert not {name for name in attributes if name.startswith("on") or name in ("src", "srcset", "action")}


def test_names_stay_text(html: str, page: Page) -> None:
    assert "<script" not in html.lower()
    assert HOSTILE in page.words
    assert any(
        attributes.get("aria-label", "") == f"{HOSTILE}: accepted over time" for _, attributes in page.tags
    )
    assert "only a*, &lt;b&gt;" in html


def test_tables_have_captions_and_headings(html: str, page: Page) -> None:
    for table in re.findall("<table>.*?</table>", html, re.DOTALL):
        assert table.startswith("<table><caption>")
        assert '<th scope="col"' in table
        body = table.partition("<tbody>")[2].partition("</tbody>")[0]
        assert body.count('<th scope="row">') == body.count("<tr>") > 0
    assert all(attributes.get("scope") in ("col", "row") for attributes in page.all("th"))


def test_charts_say_what_they_show(page: Page) -> None:
    pictures = page.all("svg")
    assert len(pictures) > 20
    for attributes in pictures:
        assert attributes.get("aria-label") or attributes.get("aria-hidden") == "true"
        assert attributes["preserveaspectratio"] == "none"
    assert len(page.all("figcaption")) == len(page.all("figure"))


def test_it_shows_the_numbers_of_the_tables(page: Page, whole: Made) -> None:
    for row in whole.result.tables["totals"].to_pylist():
        for name in ("accepted", "acked", "outstanding_end"):
            assert f"{row[name]:,}" in page.table_words
    assert "messages died" in page.text
    assert "no delivery ended, though" in page.text


def test_it_says_what_it_does_not_cover(page: Page) -> None:
    assert "Retention has removed the beginning of 1 queue" in page.text
    assert "retention has removed what was before event 300" in page.text
    assert "how long they waited is not known" in page.text
    assert CUT_QUEUE in page.words


def test_it_says_what_was_not_in_the_files_yet(whole: Made) -> None:
    coverage = [
        {**row, "cut": False, "unsynced_events": 2} for row in whole.result.tables["coverage"].to_pylist()
    ]
    changed = {
        **whole.result.tables,
        "coverage": pa.Table.from_pylist(coverage, tables.schema_of("coverage")),
    }
    page = Page(render(figures_of(whole.result.span, changed), ABOUT))
    assert "Every event" not in page.text
    assert f"{2 * len(coverage):,} events were not in the files yet." in page.text


def test_the_most_attempts_may_be_more_than_are_counted_apart(whole: Made) -> None:
    attempts = whole.result.tables["attempts"].to_pylist()
    attempts.append({**attempts[-1], "attempt": tables.ATTEMPTS_MAX})
    changed = {
        **whole.result.tables,
        "attempts": pa.Table.from_pylist(attempts, tables.schema_of("attempts")),
    }
    page = Page(render(figures_of(whole.result.span, changed), ABOUT))
    assert "10 or more" in page.table_words


def test_it_is_light_and_dark_and_fits_a_phone(html: str, page: Page) -> None:
    assert "@media (prefers-color-scheme: dark)" in html
    assert "@media (max-width: 40rem)" in html
    viewport = {"name": "viewport", "content": "width=device-width, initial-scale=1"}
    assert viewport in page.all("meta")


# --- without anything, and with a little -----------------------------------------------------------


def test_a_log_without_queues() -> None:
    result = job.Result(None, tables.of_nothing([]))
    page = Page(render(figures_of(*result), ABOUT))
    assert "There are no queues: nothing was ever sent to this broker." in page.text
    assert "0 queues · 0 events" in page.text


def test_queues_in_which_nothing_happened() -> None:
    facts = [Facts("orders", 10, 10, 0, 3, 1, 4, 2, 1, True), Facts("mail", 0, 0, 0, 0, 0, 0, 0, 0, False)]
    result = job.Result(None, tables.of_nothing(facts))
    page = Page(render(figures_of(*result), ABOUT))
    assert "Nothing happened in this time, as far as the log is kept." in page.text
    assert "orders" in page.table_words
    totals = result.tables["totals"].to_pylist()
    assert [(row["queue"], row["outstanding_end"], row["dead_now"]) for row in totals] == [
        ("orders", 10, 2),
        ("mail", 0, 0),
    ]


# --- charts ----------------------------------------------------------------------------------------

SPAN = Span(0, 4_000_000, 1_000_000)
EVIL = "</svg><script>x</script>"


@pytest.mark.parametrize(
    "chart",
    [
        charts.lines(EVIL, EVIL, SPAN, [Series(EVIL, "c1", [1, None, 3, 0], EVIL, True)], charts.NUMBERS),
        charts.lines("t", "u", SPAN, [Series("empty", "c1", [None] * 4)], charts.SECONDS),
        charts.stacked(EVIL, EVIL, SPAN, [Series(EVIL, "c5", [1, 0, None, 5], EVIL)], charts.NUMBERS),
        charts.percentile_bars(EVIL, [Ranks(EVIL, EVIL, 0.0, 0.002, 1.0, 4000.0)]),
        charts.percentile_bars("t", [Ranks("zeros", "", 0.0, 0.0, 0.0, 0.0)]),
        charts.share_bars(EVIL, EVIL, [(EVIL, [Series(EVIL, "c2", [0]), Series("b", "c5", [3])])]),
        charts.sparkline([0, 0], EVIL),
    ],
)
def test_a_chart_is_whole_and_escaped(chart: str) -> None:
    page = Page(chart)
    assert not page.all("script")
    assert "nan" not in chart.lower()


def test_what_is_not_known_is_a_gap() -> None:
    chart = charts.lines("t", "u", SPAN, [Series("a", "c1", [2, None, 1, 1])], charts.NUMBERS)
    assert 'd="M0 0h1M2 50h1V50h1"' in chart
    assert "<title>00:00:01" not in chart  # nothing to be told of that bucket
    assert "a: at most 2 at 00:00:00, at the end 1" in chart


def test_bars_stand_on_each_other() -> None:
    series = [Series("a", "c1", [1, 0, 0, 0]), Series("b", "c2", [3, 2, 0, 0])]
    chart = charts.stacked("t", "u", SPAN, series, charts.NUMBERS)
    assert '<path class="bar c1" d="M0.08 75h.84v25h-.84z"/>' in chart
    assert '<path class="bar c2" d="M0.08 0h.84v75h-.84zM1.08 50h.84v50h-.84z"/>' in chart


@pytest.mark.parametrize(
    ("largest", "top"), [(0, 1), (1, 1), (7, 8), (8.1, 10), (1000, 1000), (0.0031, 0.004), (95, 100)]
)
def test_scales_end_at_round_numbers(largest: float, top: float) -> None:
    assert charts.NUMBERS.top(largest) == pytest.approx(top)


@pytest.mark.parametrize(
    ("largest", "top"), [(0.9, 1), (59, 60), (61, 120), (1500, 1800), (3601, 7200), (90_000, 172_800)]
)
def test_scales_of_times_end_at_round_times(largest: float, top: float) -> None:
    assert charts.SECONDS.top(largest) == pytest.approx(top)


def test_times_lie_between_their_ticks() -> None:
    assert charts.log_ticks([0.003, 70.0]) == [0.001, 0.01, 0.1, 1.0, 10.0, 60.0, 600.0]
    assert charts.log_ticks([1.0]) == [0.1, 1.0]
    assert len(charts.log_ticks([0.0])) >= 2
    assert charts.log_ticks([1e-6]) == [1e-6, 1e-5]
