"""Charts over days, in a browser: what the files say is drawn, with gaps and marks, for everybody who may."""

import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from penstock.control.frames import Fields
from penstock.dashboard.history import GRAPHS, RANGES, WHOLE_GRAPHS, between, mark_text, points, spread
from penstock.http.history.chunks import FRESH
from penstock.http.history.folder import Folder, minute
from penstock.http.history.marks import Marks
from penstock.http.history.steps import COUNTED, STANDING, STEP_SECONDS, WHOLE, Step
from penstock.model.spans import bucket_of
from tests.dashboard.conftest import StartBroker, Visit, everybody, until
from tests.http.api import Api
from tests.http.test_rights import SETTINGS, TOKENS
from tests.server.harness import BrokerProcess

HOUR, DAY = 3600, 86_400


# --- what becomes of samples ----------------------------------------------------------------------------


@pytest.mark.long
def test_every_field_of_a_chart_is_one_of_a_sample(broker: BrokerProcess, api: Api) -> None:
    api.send("fields", b"x")
    for graphs, path in ((GRAPHS, "/v1/queues/fields/samples"), (WHOLE_GRAPHS, "/v1/samples")):
        until(lambda path=path: bool(api.get(path)["samples"]), "a step to be over")  # type: ignore[misc]
        samples = api.get(path)["samples"]
        for graph in graphs:
            assert len(graph.fields) == len(graph.series)
            for point in points(samples, graph, 10):
                assert len(point) == 1 + len(graph.fields)


def test_deaths_are_told_per_minute_and_what_is_not_known_is_a_gap() -> None:
    sample = {"time": "2026-11-18T04:00:00Z", "died": {"expired": 5}, "waiting": None}
    died = next(it for it in GRAPHS if it.title == "Died")
    at, *values = points([sample], died, 600)[0]
    assert at == datetime(2026, 11, 18, 4, tzinfo=UTC).timestamp()
    assert dict(zip(died.fields, values, strict=True))["died.expired"] == 0.5
    assert sum(value or 0 for value in values) == 0.5
    waiting = next(it for it in GRAPHS if it.title == "Waiting")
    assert points([sample], waiting, 600)[0][1:] == [None, None]


def test_a_heat_map_has_the_rows_that_there_is_something_of() -> None:
    def bucket(low: float, high: float, count: int) -> dict[str, float]:
        return {"seconds_min": low, "seconds_max": high, "count": count}

    samples: list[Fields] = [
        {
            "time": "2026-11-18T04:00:00Z",
            "waiting": {"buckets": [bucket(0.002, 0.0025, 3), bucket(40, 48, 1)]},
        },
        {"time": "2026-11-18T04:01:00Z", "waiting": None},
        {"time": "2026-11-18T04:02:00Z", "waiting": {"buckets": [bucket(0.0015, 0.002, 7)]}},
    ]
    rows, columns = spread(samples)
    assert (rows[0], rows[-1]) == ("1 – 3 ms", "30 – 100 s")
    assert [(sum(counts), counts[0]) for _, counts in columns] == [(4, 3), (7, 7)]
    assert spread([]) == ([], [])
    assert [below for below, _ in RANGES] == sorted(below for below, _ in RANGES)


@pytest.mark.parametrize(
    ("start", "end", "found"),
    [
        ("2026-11-18T03:00", "2026-11-18T04:00", (-HOUR, 0)),
        ("2026-11-18T03:00:30", "2026-11-18T04:00:00", (-HOUR + 30, 0)),
        ("2026-11-18T04:00:00+02:00", "2026-11-18T04:00:00Z", (-2 * HOUR, 0)),
        ("2020-01-01T00:00", "2026-11-18T04:00", (-14 * DAY, 0)),
        ("2026-11-18T03:00", "2030-01-01T00:00", (-HOUR, 0)),
        ("2026-11-18T04:00", "2026-11-18T03:00", None),
        ("", "", None),
        ("soon", "2026-11-18T03:00", None),
    ],
)
def test_times_in_the_address(start: str, end: str, found: tuple[int, int] | None) -> None:
    now = datetime(2026, 11, 18, 4, tzinfo=UTC).timestamp()
    expected = None if found is None else tuple(now + it for it in found)
    assert between(start, end, now) == expected


def test_what_a_mark_says() -> None:
    mark = {"kind": "deploy", "text": "shop 1.2", "queue": None, "who": "ann"}
    assert mark_text(mark, "orders") == "deploy: shop 1.2 (ann)"
    mark = {"kind": "pause", "text": "paused", "queue": "orders", "who": ""}
    assert mark_text(mark, "orders") == "paused"
    assert mark_text(mark, None) == "orders: paused"


# --- in a browser ---------------------------------------------------------------------------------------


def remember(data: Path, identity: str, now: int) -> None:
    """Three hours of a queue, with half an hour in which nobody was there; and marks."""
    files = Folder(str(data / "history"))
    files.open(now)
    flags = FRESH
    start = now - 3 * HOUR
    counted = dict.fromkeys(COUNTED, 0) | {"accepted": 50, "acked": 50, "dead:expired": 2, "dead:rejected": 1}
    stands = dict.fromkeys(STANDING, 0) | {"ready": 700}
    spreads = ({bucket_of(20_000): 40, bucket_of(5_000_000): 10}, {bucket_of(300_000): 50}, {3: 2})
    for at in range(start // 60 * 60, now, 60):
        if start + HOUR <= at < start + HOUR + 1800:
            flags = FRESH
            continue
        steps = [
            Step(it, tuple(counted.values()), tuple(stands.values()), (spreads[0], spreads[1], {}))
            for it in range(at, at + 60, STEP_SECONDS)
        ]
        whole = [it._replace(counted=(1, *it.counted[1:]), spreads=spreads) for it in steps]
        files.append(minute({("orders", identity): steps, WHOLE: whole}, flags, at), at)
        flags = 0
        files.tidy(at + 60)
    marks = Marks(str(data / "history"), 14 * DAY)
    for ago, kind, text, queue in (
        (2 * HOUR, "deploy", "shop <b>1.2</b>", ""),
        (HOUR, "pause", "paused", "orders"),
        (HOUR, "note", "another's", "other"),
    ):
        marks.add({"at_us": (now - ago) * 1_000_000, "kind": kind, "text": text, "queue": queue, "who": ""})


@pytest.fixture
def remembering(start_broker: StartBroker) -> BrokerProcess:
    broker = start_broker()
    with Api(broker.ports["http"]) as api:
        api.send("orders", b"x")
        identity = api.get("/v1/queues/orders")["identity"]
    broker.stop()
    data = broker.folder / "data"
    for file in (data / "history").iterdir():
        os.unlink(file)
    remember(data, identity, int(time.time()))
    return broker.start()


def spoken(page: Page, name: str) -> str:
    return page.get_by_role("img", name=name).first.get_attribute("aria-label") or ""


@pytest.mark.long
def test_a_queue_over_hours_with_gaps_marks_and_all_charts(remembering: BrokerProcess, visit: Visit) -> None:
    page = visit(remembering, "/queue/orders?span=6h")
    expect(page.get_by_role("button", name="6 hours")).to_have_attribute("aria-pressed", "true")
    until(lambda: "highest 1,000" in spoken(page, "Messages that wait, are held"), "the backlog to be drawn")
    assert "99 %" in spoken(page, "How long messages had waited when they were handed out")
    # Two runs of a line and not one: nobody was there for half an hour. And then came this start.
    line = (
        page.locator('section[aria-label="Backlog"] .ps-stroke-ready.ps-line').last.get_attribute("d") or ""
    )
    assert line.count("M") in (2, 3)
    legend = page.locator('section[aria-label="Died"] .ps-legend')
    expect(legend).to_contain_text("expired")
    expect(legend).to_contain_text("rejected")
    expect(legend).not_to_contain_text("bad record")
    heat = page.get_by_role("img", name="How long messages had waited:")
    expect(heat).to_have_attribute(
        "aria-label", "How long messages had waited: 10 – 30 ms 80 %, 3 – 10 s 20 %"
    )
    assert page.locator(".ps-heat rect").count() > 20
    # Marks are text, in the list and at their lines; another queue's is not here.
    marks = page.locator(".ps-marks li")
    expect(marks.filter(has_text="deploy: shop <b>1.2</b>")).to_have_count(1)
    expect(marks.filter(has_text="paused")).to_have_count(1)
    expect(marks.filter(has_text="started")).to_have_count(1)
    expect(marks.filter(has_text="another's")).to_have_count(0)
    handle = page.get_by_role("button", name="deploy: shop <b>1.2</b>")
    handle.focus()
    expect(page.locator(".ps-tip-mark")).to_have_text("deploy: shop <b>1.2</b>")
    everybody(page)
    page.get_by_role("button", name="14 days").click()
    expect(page.locator(".ps-span")).to_contain_text("in steps of 1 h")
    expect(page).to_have_url(re.compile(r"/queue/orders\?span=14d$"))


@pytest.mark.long
def test_a_time_of_ones_own_is_in_the_address_and_stands_still(
    remembering: BrokerProcess, visit: Visit
) -> None:
    page = visit(remembering, "/queue/orders")
    page.get_by_text("Another time").click()
    end = time.time() - 2 * HOUR - 600
    for label, at in (("From (UTC)", end - 900), ("To (UTC)", end)):
        page.get_by_label(label).fill(f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%S}")
    page.get_by_role("button", name="Show").click()
    expect(page.locator(".ps-span")).to_contain_text(f"to {datetime.fromtimestamp(end, UTC):%Y-%m-%d %H:%M}")
    assert "from=" in page.url
    until(lambda: "Ready 700" in spoken(page, "Messages that wait, are held"), "that time to be drawn")
    expect(page.locator('[aria-pressed="true"]')).to_have_count(0)
    everybody(page)


def test_the_whole_has_a_page_and_tiles_go_on_after_a_restart(
    remembering: BrokerProcess, visit: Visit
) -> None:
    page = visit(remembering, "/history?span=6h")
    until(lambda: "highest 1,000" in spoken(page, "Messages that wait, are held"), "the backlog to be drawn")
    until(lambda: "Median" in spoken(page, "How long syncs to the disk took"), "syncs to be drawn")
    expect(page.locator(".ps-marks li").filter(has_text="other: another's")).to_have_count(1)
    everybody(page)
    page = visit(remembering, "/")
    # What was ready before the restart is not ready any more, and yet it is drawn.
    until(lambda: "highest 1,000" in spoken(page, "Ready, the last two minutes"), "the past in a tile")


def test_sums_are_for_those_who_may_read_everything(start_broker: StartBroker, visit: Visit) -> None:
    broker = start_broker(config=SETTINGS)
    with Api(broker.ports["http"], TOKENS["root"]) as api:
        api.send("orders.a", b"x")
    for name, is_shown in (("read", False), ("all", True)):
        page = visit(broker, "/", alone=True, forgive=("403",))
        page.get_by_label("Token").fill(TOKENS[name])
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("link", name="Connections")).to_be_visible()
        expect(page.get_by_role("link", name="History")).to_have_count(int(is_shown))
        page.goto(page.url.rstrip("/") + "/history")
        if is_shown:
            expect(page.get_by_role("heading", name="Over time")).to_be_visible()
        else:
            expect(page.get_by_role("heading", name="This page is about all queues")).to_be_visible()
