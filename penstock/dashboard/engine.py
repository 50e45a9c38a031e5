"""The page of the engine: disk, log, syncs, retention, cluster; above all, what is wrong and what to do."""

from typing import Any, Final

from nicegui.elements.mixins.text_element import TextElement

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard.cluster import ClusterPanel
from penstock.dashboard.feed import Health, Tick
from penstock.dashboard.findings import Findings
from penstock.dashboard.layout import badge, fact, facts, panel, style, tag
from penstock.dashboard.pages import reader_href
from penstock.dashboard.poll import Poll, watch
from penstock.dashboard.readers import READERS, holds, is_capped, lag_of
from penstock.dashboard.syncs import SyncPanel, SyncTrail
from penstock.dashboard.tile import Tiles
from penstock.dashboard.view import View

HOLDERS_SHOWN: Final = 5

DURABILITY: Final = {
    "commit": "commit: a receipt waits for the sync to disk",
    "interval": "interval: a receipt waits for the write, which is synced soon after",
    "none": "none: a receipt waits for nothing",
}
LONG_FACTS: Final = ("Folder", "Durability")

SYNCS: Final = SyncTrail()
ENGINE: Final = Poll("/v1/engine", lambda answer: 1, SYNCS.told)


async def build(view: View) -> None:
    style("state.css")
    tag("h1", "Engine")
    findings = Findings("What is wrong", "/engine")
    tiles = Tiles(
        state="State",
        disk_bytes_free="Free on the disk",
        log_bytes="Log",
        p99_seconds="Sync, 99 % within",
        uptime_seconds="Running for",
    )
    with tag("div", classes="ps-columns"):
        with tag("div", classes="ps-column"):
            cluster = ClusterPanel()
            disk = _Disk()
            holders = _Holders()
            log = _Log()
        with tag("div", classes="ps-column"):
            syncs = SyncPanel()
    poll, sync_trail = ENGINE.of(view, SYNCS)
    engine: Fields | None = None
    health = view.feed.health

    def show_state() -> None:
        if engine is not None:
            tiles.show(**_totals(engine, health))

    def tick(tick: Tick) -> None:
        nonlocal health
        findings.show(tick.attention.of_broker())
        if tick.health != health:
            health = tick.health
            show_state()

    def show(answer: Any, is_first: bool) -> None:
        nonlocal engine
        engine = answer
        findings.codes = dict.fromkeys(("failed", "damaged"), f"penstock verify {answer['data']}")
        show_state()
        disk.show(answer)
        log.show(answer)
        cluster.show(answer["cluster"])
        syncs.show(answer["sync"], sync_trail.trail, is_first)

    view.on_tick(tick)
    watch(view, poll, show)
    watch(view, READERS, lambda answer, is_first: holders.show(answer["readers"]), tells=False)


# --- parts of the page ---------------------------------------------------------------------------


def _totals(engine: Fields, health: Health) -> dict[str, tuple[str, ...]]:
    """What to see first."""
    word, kind = _state(engine, health)
    share = engine["disk_bytes_free"] / max(engine["disk_bytes_total"], 1)
    sync = engine["sync"]
    half = f"half within {units.duration(sync['p50_seconds'])}" if sync["count"] else "no sync yet"
    return {
        "state": (word, f"durability {engine['durability']}", kind),
        "disk_bytes_free": (
            units.size(engine["disk_bytes_free"]),
            f"{100 * share:.0f} % of {units.size(engine['disk_bytes_total'])}",
            "warn" if engine["disk_bytes_free"] < engine["disk_bytes_reserve"] else "",
        ),
        "log_bytes": (units.size(engine["log_bytes"]), f"in {units.counted(engine['segments'], 'segment')}"),
        "p99_seconds": (units.duration(sync["p99_seconds"] if sync["count"] else None), half),
        "uptime_seconds": (units.age(engine["uptime_seconds"]), f"Penstock {engine['version']}"),
    }


def _state(engine: Fields, health: Health) -> tuple[str, str]:
    if engine["failed"]:
        return "Failed", "bad"
    if engine["full"]:
        return "Full", "bad"
    if not health.ready:
        return "Not ready", "bad"
    return ("Damaged", "bad") if engine["damage"] else ("Ready", "")


class _Disk:
    """What the disk is used for, as a bar."""

    def __init__(self) -> None:
        with panel("Disk"):
            with tag("div", classes="ps-disk", role="img") as bar:
                self._bar = bar
                self._log_part = tag("span", classes="ps-disk-log")
                self._other_part = tag("span", classes="ps-disk-other")
            with tag("ul", classes="ps-disk-legend"):
                self._log = _legend("ps-disk-log", "Log")
                self._other = _legend("ps-disk-other", "Everything else")
                self._free = _legend("ps-disk-free", "Free")

    def show(self, engine: Fields) -> None:
        total, free, log = engine["disk_bytes_total"], engine["disk_bytes_free"], engine["log_bytes"]
        other = max(total - free - log, 0)
        texts = [units.size(log), units.size(other), units.size(free)]
        for element, text in zip((self._log, self._other, self._free), texts, strict=True):
            element.set_text(text)
        self._log_part.style(replace=f"width: {100 * log / total if total else 0:.2f}%")
        self._other_part.style(replace=f"width: {100 * other / total if total else 0:.2f}%")
        self._bar.props["aria-label"] = (
            f"Of {units.size(total)}: log {texts[0]}, everything else {texts[1]}, free {texts[2]}"
        )


def _legend(part: str, label: str) -> TextElement:
    with tag("li"):
        tag("i", classes=part)
        tag("span", label)
        return tag("b", "–")


class _Holders:
    """Who holds retention, the furthest behind first."""

    def __init__(self) -> None:
        self._shown: list[tuple[str, int, int, bool]] | None = None
        with panel("Retention is held by"):
            self._box = tag("div", classes="ps-holders")
            self._note = tag("p", "", "ps-hint")
            tag("a", "All readers", href="/readers")

    def show(self, readers: list[Fields]) -> None:
        holding = sorted(filter(holds, readers), key=lambda it: (-lag_of(it), it["name"]))
        first = [(it["name"], lag_of(it), len(it["queues"]), is_capped(it)) for it in holding[:HOLDERS_SHOWN]]
        more = len(holding) - len(first)
        if not first:
            self._note.set_text("Nobody. What is settled stays as long as the retention of its queue says.")
        elif more:
            self._note.set_text(f"and {units.count(more)} more")
        else:
            self._note.set_text(
                "What they have not read is kept for them, up to [log] reader-bytes-max each."
            )
        if first == self._shown:
            return
        self._shown = first
        self._box.clear()
        self._box.set_visibility(bool(first))
        with self._box:
            for name, lag, queues, capped in first:
                with tag("p", data_reader=name):
                    tag("a", name, href=reader_href(name))
                    if capped:
                        badge("capped", "bad")
                    tag("span", f"{lag:,} behind in {units.counted(queues, 'queue')}", "ps-hint")


class _Log:
    """The rest that is known, as a list."""

    def __init__(self) -> None:
        with panel("Log"), facts():
            self._values = {label: fact(label) for label in _facts({})}
            for label in LONG_FACTS:
                self._values[label].classes("ps-fact-long")

    def show(self, engine: Fields) -> None:
        for label, text in _facts(engine).items():
            self._values[label].set_text(text)


def _facts(engine: Fields) -> dict[str, str]:
    """Names and values; without an engine, only the names count."""
    durability = str(engine.get("durability", ""))
    return {
        "Folder": str(engine.get("data", "")),
        "Engine": str(engine.get("engine", "")),
        "Segments": units.count(engine.get("segments", 0)),
        "On the disk": units.size(engine.get("log_bytes", 0)),
        "Written since it was made": units.size(engine.get("position", 0)),
        "In flight": units.size(engine.get("bytes_in_flight", 0)),
        "Openings": units.count(engine.get("opening", 0)),
        "Durability": DURABILITY.get(durability, durability),
    }
