"""Cluster: a map of who leads, who takes part and how the NATS nodes stand, and what was checked; of the
engine's page."""

from typing import Final

from nicegui.elements.mixins.text_element import TextElement

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard.layout import badge, fact, facts, panel, tag

NODE_KINDS: Final = {"leader": "ok", "current": "ok", "behind": "warn", "offline": "bad"}
CHECK_KINDS: Final = {"ok": "ok", "warn": "warn", "fail": "bad"}


def _told(check: Fields) -> str:
    return f"{check['text']}. {check['advice']}" if check["advice"] else str(check["text"])


class ClusterPanel:
    """Nothing is seen of it where there is no cluster. It is drawn anew when something of it has changed, but
    for what grows all the time."""

    def __init__(self) -> None:
        self._shown: Fields | None = None
        self._extents: list[tuple[TextElement, TextElement]] = []  # of each shard: queues, bytes
        with panel("Cluster") as section:
            self._section = section
            with facts():
                self._name = fact("Log")
                self._role = fact("Role")
                self._own = fact("This front-end")
                self._leader = fact("Leader")
            self._tables = tag("div", classes="ps-reader-rest")
        section.set_visibility(False)

    def show(self, cluster: Fields | None) -> None:
        shown = None if cluster is None else {**cluster, "shards": [_fixed(it) for it in cluster["shards"]]}
        if shown != self._shown:
            self._shown = shown
            self._draw(cluster)
        for shard, (queues, size) in zip(cluster["shards"] if cluster else (), self._extents, strict=False):
            queues.set_text(units.count(shard["queues"]))
            size.set_text(units.size(shard["bytes"]))

    def _draw(self, cluster: Fields | None) -> None:
        self._section.set_visibility(cluster is not None)
        if cluster is None:
            return
        self._name.set_text(cluster["name"])
        many = len(cluster["shards"]) > 1
        self._role.set_text(_led(cluster, cluster["id"]) if many else cluster["role"])
        self._own.set_text(cluster["id"])
        leaders = sorted({it["leader"] for it in cluster["shards"] if it["leader"]})
        self._leader.set_text(", ".join(leaders) if many else cluster["leader"] or "nobody at the moment")
        self._tables.clear()
        with self._tables:
            _map(cluster)
            self._extents = _shards(cluster["shards"]) if many else []
            _checks(cluster["checks"])


def _fixed(shard: Fields) -> Fields:
    """Without what grows all the time."""
    is_current = shard["standby"] in shard["copies"]
    behind = None if is_current or shard["behind_bytes"] is None else units.size(shard["behind_bytes"])
    return {**shard, "queues": 0, "bytes": 0, "behind_bytes": behind}


def _map(cluster: Fields) -> None:
    """Boxes: front-ends above, the nodes with copies of the log below, and the log between them."""
    members, nodes = cluster["members"], cluster["nodes"]
    with tag("div", classes="ps-map"):
        with tag("ul", classes="ps-map-row ps-map-above", aria_label="Front-ends"):
            for member in members:
                _member(member, cluster)
        tag("p", _between(cluster), "ps-map-log")
        if nodes:
            with tag("ul", classes="ps-map-row ps-map-below", aria_label="NATS nodes"):
                for node in nodes:
                    _node(node)


def _led(cluster: Fields, member: str) -> str:
    """How much a front-end leads, where there are several logs."""
    shards = cluster["shards"]
    return f"leads {sum(it['leader'] == member for it in shards)} of {len(shards)} shards"


def _between(cluster: Fields) -> str:
    if len(cluster["shards"]) > 1:
        orphans = sum(not it["leader"] for it in cluster["shards"])
        led = "each written by the front-end that leads it" if not orphans else f"{orphans} led by nobody"
        return f"The {len(cluster['shards'])} logs of {cluster['name']}, {led}"
    there = sum(node["state"] != "offline" for node in cluster["nodes"])
    copies = f"kept by {there} of {units.counted(len(cluster['nodes']), 'node')}" if cluster["nodes"] else ""
    who = f"written by {cluster['leader']}" if cluster["leader"] else "nobody leads at the moment"
    return f"The log {cluster['name']}: {', '.join(filter(None, (who, copies)))}"


def _member(member: Fields, cluster: Fields) -> None:
    is_this = member["id"] == cluster["id"]
    leads = member["role"] == "leader"
    with tag("li", classes="ps-map-box ps-map-leads" if leads else "ps-map-box"):
        tag("b", member["id"])
        with tag("span", classes="ps-map-badges"):
            many = len(cluster["shards"]) > 1
            badge(_led(cluster, member["id"]) if many else member["role"], "ok" if leads else "")
            if not member["linked"]:
                badge("not linked", "warn")
            if member["copy"] == "behind":
                badge("copy behind", "warn")
        notes = [
            f"Penstock {member['version']}" if member["version"] else "",
            "answers here" if is_this else "",
        ]
        tag("small", ", ".join(filter(None, notes)))


def _node(node: Fields) -> None:
    leads = node["state"] == "leader"
    with tag("li", classes="ps-map-box ps-map-leads" if leads else "ps-map-box"):
        tag("b", node["name"])
        with tag("span", classes="ps-map-badges"):
            badge(node["state"], NODE_KINDS.get(node["state"], ""))
        tag("small", f"{units.counted(node['behind'], 'record')} behind" if node["behind"] else "NATS")


def _shards(shards: list[Fields]) -> list[tuple[TextElement, TextElement]]:
    extents = []
    with (
        tag(
            "div", classes="ps-table-box", tabindex="0", role="region", aria_label="Shards and who leads them"
        ),
        tag("table", classes="ps-table", aria_label="Shards"),
    ):
        _head("Shard", "Led by", "Stands by", "Term", "Queues", "Size")
        with tag("tbody"):
            for shard in shards:
                with tag("tr"):
                    tag("th", str(shard["shard"]), scope="row")
                    with tag("td"):
                        if shard["leader"]:
                            tag("span", shard["leader"])
                        else:
                            badge("nobody", "bad")
                    with tag("td"):
                        _standby(shard)
                    tag("td", str(shard["term"]))
                    extents.append((tag("td"), tag("td")))
    return extents


def _standby(shard: Fields) -> None:
    if not shard["standby"]:
        badge("nobody", "warn")
        return
    tag("span", shard["standby"])
    if shard["standby"] not in shard["copies"]:
        behind = shard["behind_bytes"]
        badge("reads the log" if behind is None else f"{units.size(behind)} behind", "warn")


def _checks(checks: list[Fields]) -> None:
    with tag("table", classes="ps-table", aria_label="Checks"):
        _head("Check", "Result", "Found")
        with tag("tbody"):
            for check in _gathered(checks):
                with tag("tr"):
                    tag("th", check["name"], scope="row")
                    with tag("td"):
                        badge(check["level"], CHECK_KINDS.get(check["level"], ""))
                    tag("td", _told(check))


def _gathered(checks: list[Fields]) -> list[Fields]:
    """Streams that are as they should be are one row: with many logs there are many."""
    good = [it for it in checks if it["name"].startswith("stream ") and it["level"] == "ok"]
    if len(good) < 2:
        return checks
    rest = [it for it in checks if it not in good]
    text = f"{units.counted(len(good), 'stream')} as they should be, or not there yet"
    return [*rest, {"name": "streams", "level": "ok", "text": text, "advice": ""}]


def _head(*labels: str) -> None:
    with tag("thead"), tag("tr"):
        for label in labels:
            tag("th", label, scope="col")
