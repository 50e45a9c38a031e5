"""From measured samples to medians, ratios, verdicts, tables, the chart and the page."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.compare import chart, page
from bench.compare.cost import calls_by_name
from bench.compare.goals import ANY_WIRE, GOALS, Verdict, verdicts
from bench.compare.results import Cost, Results, Sample
from bench.compare.subjects import PENSTOCK, SETTINGS, VARIANTS, Variant, chosen, penstock_setting, variants
from bench.compare.tables import all_tables, as_markdown, as_text
from bench.compare.works import FULL, QUICK, TITLES, WORKS
from bench.loadgen import Load, Spread

OURS = f"Penstock PHPMQ, {VARIANTS[0].name}"
LISTS, STREAMS, RELAXED = (
    "Redis lists, fsync always",
    "Redis Streams, fsync always",
    "Redis lists, fsync everysec",
)
END_TO_END = "end to end 100 B"


def sample(subject: str, work: str, per_second: float, cpu_us: float, p99_us: float | None = None) -> Sample:
    spread = None if p99_us is None else Spread(p99_us / 2, p99_us, p99_us * 2, p99_us * 3)
    load = Load(1000, 1000 / per_second, per_second, 0.0, spread, spread)
    return Sample(subject, work, load, cpu_us * 1000 / 1e6)


def results() -> Results:
    made = Results()
    for subject, rate, cpu in ((OURS, 600_000, 1.5), (LISTS, 150_000, 5.0), (STREAMS, 140_000, 4.0)):
        made.samples += [sample(subject, END_TO_END, rate * factor, cpu) for factor in (0.5, 1.0, 7.0)]
    made.samples += [sample(RELAXED, END_TO_END, 900_000, 3.0)]
    for subject, p99_us in ((OURS, 300.0), (LISTS, 500.0), (RELAXED, 100.0)):
        made.samples.append(sample(subject, "paced", 2000, 50.0, p99_us))
    made.scenes = {(OURS, "backlog MB"): 10.0, (LISTS, "backlog MB"): 100.0, (OURS, "recovery s"): 0.5}
    made.costs = [Cost(OURS, END_TO_END, 0.1, "read 0.05", 2.0)]
    return made


def verdict(variant: str, measure: str, against: str) -> Verdict:
    found = [
        one
        for one in verdicts(results(), SETTINGS)
        if one.goal.variant == variant and measure in one.goal.measure.name and against in one.goal.against
    ]
    assert len(found) == 1
    return found[0]


# -- figures --


def test_a_figure_is_the_median_of_its_samples() -> None:
    figure = results().figure(LISTS, END_TO_END)
    assert figure is not None
    assert figure.per_second == 150_000
    assert figure.cpu_us == pytest.approx(5.0)
    assert figure.p99_us is None
    assert results().figure(LISTS, "drain 100 B") is None


def test_latency_has_its_marks_and_the_generator_s_share() -> None:
    figure = results().figure(OURS, "paced")
    assert figure is not None
    assert (figure.p50_us, figure.p99_us, figure.p999_us, figure.delay_p99_us) == (150, 300, 600, 300)


@pytest.mark.parametrize(
    ("variant", "measure", "against", "ratio", "best", "word"),
    [
        ("interpreted", "100 B: msg/s", "syncs first", 4.0, LISTS, "reached"),
        ("interpreted", "100 B: CPU", "syncs first", 0.375, STREAMS, "reached"),
        ("", "paced: p99", "syncs first", 0.6, LISTS, "not reached"),
        ("", "paced: p99", "does not", 3.0, RELAXED, "not reached"),
        ("", "backlog: resident", "of all", 0.1, LISTS, "reached"),
    ],
)
def test_a_goal_is_a_ratio_to_the_best_of_its_group(
    variant: str, measure: str, against: str, ratio: float, best: str, word: str
) -> None:
    found = verdict(variant, measure, against)
    assert found.ratio == pytest.approx(ratio)
    assert (found.best_name, found.word) == (best, word)


def test_a_goal_for_any_wire_is_for_the_best_of_ours() -> None:
    made, settings = Results(), (penstock_setting(Variant("compiled")), *SETTINGS)
    wires = [subject.name for subject in settings[0].subjects]
    for subject, rate in zip((*wires, LISTS), (3_000, 9_000, 4_000, 6_000), strict=True):
        made.samples.append(sample(subject, "publish 64 KiB", rate, 100.0))
    (found,) = (it for it in verdicts(made, settings) if it.goal.measure.name == "publish 64 KiB: msg/s")
    assert (found.goal.wire, found.word) == (ANY_WIRE, "reached")
    assert found.ratio == pytest.approx(1.5)


def test_what_was_not_measured_is_never_reached() -> None:
    assert verdict("", "to the first message", "of all").word == "not measured"  # no peer
    assert verdict("", "32+32", "syncs first").word == "not measured"  # nobody
    assert {one.word for one in verdicts(Results(), SETTINGS)} == {"not measured"}


# -- who and what --


def test_every_goal_names_something_that_is_measured() -> None:
    ours = {
        subject.wire for setting in SETTINGS if setting.program == PENSTOCK for subject in setting.subjects
    }
    assert {goal.wire for goal in GOALS} <= {*ours, ANY_WIRE}
    named = {goal.measure.name.rpartition(":")[0] for goal in GOALS if "backlog" not in goal.measure.name}
    assert named <= set(TITLES)


def test_names_are_given_once_and_say_who_it_is() -> None:
    names = [subject.name for setting in SETTINGS for subject in setting.subjects]
    assert len(names) == len(set(names))
    assert [[one.name for one in setting.subjects] for setting in chosen(["redis LISTS"])] == [
        [LISTS],
        [RELAXED],
    ]
    assert chosen([]) == SETTINGS
    assert chosen(["nobody"]) == ()


def test_runs_are_large_enough_to_measure_and_small_enough_to_end() -> None:
    small, _, large = WORKS[:3]
    assert FULL.messages(small, 500_000) == 500_000
    assert FULL.messages(large, 500_000) == 3_000
    assert QUICK.messages(small, 3_000) == 300
    assert (FULL.messages(WORKS[3], 25_000), QUICK.messages(WORKS[3], 25_000)) == (200, 20)


def test_system_calls_are_read_from_strace_with_and_without_errors() -> None:
    table = """% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 60.00    0.000060           1        40           epoll_pwait
 40.00    0.000040           2        20         3 read
------ ----------- ----------- --------- --------- ----------------
100.00    0.000100           1        60         3 total
"""
    assert calls_by_name(table) == {"epoll_pwait": 40, "read": 20}


# -- the report --


def test_tables_have_the_same_columns_everywhere() -> None:
    for table in all_tables(results(), SETTINGS):
        assert {len(row) for row in table.rows} <= {len(table.header)}
        lines = as_markdown(table).splitlines()
        assert lines[0] == f"### {table.title}"
        assert {line.count("|") for line in lines[2:]} == {len(table.header) + 1}
        assert len(as_text(table).splitlines()) == 2 + len(table.rows)


def test_cells_have_rate_cpu_and_ratio() -> None:
    shown = "\n".join(as_text(table) for table in all_tables(results(), SETTINGS))
    assert re.search(rf"{OURS} +600,000 · 1.50 · 4.00×", shown)
    assert re.search(rf"{STREAMS} +140,000 · 4.00 · 0.933×", shown)


def test_the_chart_has_a_bar_for_each_figure_the_best_one_first() -> None:
    drawing = ElementTree.fromstring(chart.svg(results(), SETTINGS))
    texts = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    rates = chart.bars(chart.PANELS[0][1], results(), SETTINGS)
    assert [bar.name for bar in rates] == [RELAXED, OURS, LISTS, STREAMS]
    assert {bar.name for bar in rates} <= set(texts)
    assert "900,000" in texts
    # Colours come from the style alone, which has those for dark pages: also in the picture of this tree.
    shown = (page.DOCS / page.CHART).read_text(encoding="utf-8")
    for picture in (chart.svg(results(), SETTINGS), shown):
        assert chart.STYLE in picture
        assert "prefers-color-scheme: dark" in picture
        assert "fill=" not in picture


def test_the_page_keeps_what_people_wrote() -> None:
    before = f"# Title\n\nabove\n\n{page.FROM}\nold\n{page.TO}\n\nbelow\n"
    after = page.replaced(before, "new")
    assert after == f"# Title\n\nabove\n\n{page.FROM}\n\nnew\n\n{page.TO}\n\nbelow\n"
    assert page.replaced(after, "new") == after


def test_a_page_without_marks_is_not_touched() -> None:
    with pytest.raises(page.MarksMissing, match="needs the lines"):
        page.replaced(f"{page.TO} {page.FROM}", "new")


def test_the_page_of_this_tree_has_the_marks_and_shows_the_chart() -> None:
    text = (page.DOCS / page.PAGE).read_text(encoding="utf-8")
    assert page.replaced(text, "x") != text
    for linked in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        assert (Path(page.DOCS) / linked).is_file()


def test_penstock_is_there_in_both_builds_where_it_was_compiled() -> None:
    assert [variant.name for variant in variants(None)] == ["interpreted"]
    interpreted, compiled = variants("/the/build")
    assert not interpreted.environment
    assert compiled.environment == {"PYTHONPATH": "/the/build", "PYTHONSAFEPATH": "1"}
    names = [subject.name for subject in penstock_setting(compiled).subjects]
    assert names == ["Penstock PHPMQ, compiled", "Penstock RQ, compiled", "Penstock SSPQ, compiled"]
