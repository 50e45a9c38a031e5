"""`penstock pipeline list|pause|resume|restart`: the pipelines that tell a broker of themselves.

They are readers of the broker's that have a state. One that a service keeps takes wishes, too: it is asked
through the broker, and hears it within seconds. A pipeline of several sources is several readers, all of
which hear for it; the first is told.
"""

import argparse
import time
from typing import Final

from penstock.cli.admin import Admin, say_objects
from penstock.client.http_core import Answer
from penstock.common import tables, units
from penstock.errors import Misuse, PenstockError

STATES: Final = {"pause": "paused", "resume": "running", "restart": "running"}
"""What a pipeline is in the end, by what was wished."""

ACTIONS: Final = ("list", *STATES)
LIST: Final = tables.columns("PIPELINE", "STATE", ">FOR", ">LAG", ">BEHIND", ">ROWS/S", "ERROR")
WAIT_SECONDS: Final = 10.0
LOOK_SECONDS: Final = 0.2


class NoPipeline(PenstockError):
    """Nobody of that name takes wishes."""


def run(args: argparse.Namespace) -> int:
    if (args.action == "list") == bool(args.files):
        raise Misuse("list takes no NAME" if args.files else f"{args.action} which? name a pipeline")
    with Admin(args) as admin:
        found = _pipelines(admin)
        if args.action == "list":
            _say(args, list(found.values()))
            return 0
        for name in args.files:
            if "wish" not in (found.get(name, {}).get("about") or {}):
                others = ", ".join(it for it, reader in found.items() if "wish" in reader["about"]) or "none"
                raise NoPipeline(
                    f"no pipeline {name!r} that a service keeps tells this broker of itself; those that do: "
                    f"{others} (`penstock pipeline run DIR` is such a service)"
                )
        _say(args, [_wish(admin, found[name], args.action) for name in args.files])
    return 0


def _pipelines(admin: Admin) -> dict[str, Answer]:
    """One reader of each, by the name of the pipeline."""
    readers = [it for it in admin.get("readers")["readers"] if "state" in (it["about"] or {})]
    return {it["about"].get("name", it["name"]): it for it in reversed(readers)}


def _wish(admin: Admin, reader: Answer, action: str) -> Answer:
    """The reader, when it has done what is wished, or after a while."""
    number = admin.post("readers", reader["name"], action)["wish"]["number"]
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        reader = admin.get("readers", reader["name"])
        about = reader["about"] or {}
        if about.get("wish", 0) >= number and about["state"] == STATES[action]:
            break
    return reader


def _say(args: argparse.Namespace, readers: list[Answer]) -> None:
    if args.json:
        say_objects(readers)
    elif readers:
        print("\n".join(tables.table(LIST, map(_row, sorted(readers, key=lambda it: str(it["name"]))))))


def _row(reader: Answer) -> list[str]:
    about, queues = reader["about"], reader["queues"]
    lags = [it["lag_seconds"] for it in queues if it["lag"] and it["lag_seconds"] is not None]
    state = about["state"] + (" (silent)" if about["silent"] else "")
    if reader["wish"] is not None:
        state += f" ({reader['wish']['action']} wished)"
    return [
        about.get("name", reader["name"]),
        state,
        units.age(about.get("state_seconds", 0)),
        units.count(sum(it["lag"] for it in queues)),
        units.age(max(lags)) if lags else tables.NOTHING,
        units.rate(about.get("rows_per_second", 0)),
        about.get("error", ""),
    ]
