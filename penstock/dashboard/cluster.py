"""Cluster: who leads, who takes part, how the NATS nodes stand, what was checked; of the engine's page."""

from typing import Final

from penstock.common import units
from penstock.control.frames import Fields
from penstock.dashboard.layout import badge, fact, facts, panel, tag

NODE_KINDS: Final = {"leader": "ok", "current": "ok", "behind": "warn", "offline": "bad"}
CHECK_KINDS: Final = {"ok": "ok", "warn": "warn", "fail": "bad"}


def _told(check: Fields) -> str:
    return f"{check['text']}. {check['advice']}" if check["advice"] else str(check["text"])


class ClusterPanel:
    """Nothing is seen of it where there is no cluster. It is drawn anew when something of it has changed."""

    def __init__(self) -> None:
        self._shown: Fields | None = None
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
        if cluster == self._shown:
            return
        self._shown = cluster
        self._section.set_visibility(cluster is not None)
        if cluster is None:
            return
        self._name.set_text(cluster["name"])
        self._role.set_text(cluster["role"])
        self._own.set_text(cluster["id"])
        self._leader.set_text(cluster["leader"] or "nobody at the moment")
        self._tables.clear()
        with self._tables:
            _members(cluster["members"])
            _nodes(cluster["nodes"])
            _checks(cluster["checks"])


def _members(members: list[Fields]) -> None:
    with tag("table", classes="ps-table", aria_label="Front-ends"):
        _head("Front-end", "Role")
        with tag("tbody"):
            for member in members:
                with tag("tr"):
                    tag("th", member["id"], scope="row")
                    with tag("td"):
                        badge(member["role"], "ok" if member["role"] == "leader" else "")


def _nodes(nodes: list[Fields]) -> None:
    with tag("table", classes="ps-table", aria_label="NATS nodes"):
        _head("NATS node", "State", "Records behind")
        with tag("tbody"):
            for node in nodes:
                with tag("tr"):
                    tag("th", node["name"], scope="row")
                    with tag("td"):
                        badge(node["state"], NODE_KINDS.get(node["state"], ""))
                    tag("td", units.count(node["behind"]), "ps-number")


def _checks(checks: list[Fields]) -> None:
    with tag("table", classes="ps-table", aria_label="Checks"):
        _head("Check", "Result", "Found")
        with tag("tbody"):
            for check in checks:
                with tag("tr"):
                    tag("th", check["name"], scope="row")
                    with tag("td"):
                        badge(check["level"], CHECK_KINDS.get(check["level"], ""))
                    tag("td", _told(check))


def _head(*labels: str) -> None:
    with tag("thead"), tag("tr"):
        for label in labels:
            tag("th", label, "ps-number" if label == "Records behind" else "", scope="col")
