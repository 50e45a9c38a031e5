"""`penstock connections [NUMBER]`: who is connected, all about one, and with `--end` sending one away.

What passes in a second is known from two looks: of one connection both are taken here, a second apart; in the
list there is a rate where somebody has looked before. A person is asked before a connection is ended.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Final

from penstock.cli.admin import Admin, add_admin, at_least, say_objects
from penstock.cli.purge import ask_and_do
from penstock.client.http_core import Answer
from penstock.common import tables, units
from penstock.common.tables import NOTHING, columns
from penstock.errors import Misuse

HELP = "list who is connected, show one connection, or end it"

LOOK_SECONDS: Final = 1.1
"""Between two looks: with less, the broker does not tell what passes in a second."""

QUEUES_SHOWN: Final = 3
LIST: Final = columns(
    ">NUMBER", "CLIENT", "PROTOCOL", "USER", "TAKES", "SENDS", ">IN/S", ">OUT/S", ">HELD", ">SAID", ""
)
SENDS: Final = columns("SENDS TO", ">MESSAGES", ">/S")
TAKES: Final = columns("TAKES", ">WINDOW", ">HELD", ">SINCE", ">DELIVERED", ">/S", ">SETTLED", ">/S", "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("number", metavar="NUMBER", nargs="?", type=at_least(1), help="only this one")
    parser.add_argument("--end", metavar="NUMBER", type=at_least(1), help="send this one away")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    if args.end is not None:
        return _end(args)
    if args.yes:
        raise Misuse("--yes belongs to --end NUMBER")
    with Admin(args) as admin:
        if args.number is None:
            found = admin.get("connections")["connections"]
        else:
            found = [admin.get("connections", str(args.number))]
            if found[0]["sent_rate"] is None:
                time.sleep(LOOK_SECONDS)
                found = [admin.get("connections", str(args.number))]
    if args.json:
        say_objects(found)
    elif args.number is not None:
        print("\n\n".join("\n".join(part) for part in parts_of(found[0]) if part))
    elif found:
        print("\n".join(tables.table(LIST, map(row, found))))
    else:
        print("nobody is connected")
    return 0


def _end(args: argparse.Namespace) -> int:
    if args.number is not None:
        raise Misuse("say --end NUMBER, without another number")
    number = str(args.end)
    asked_for: dict[str, str] = {}

    def look(admin: Admin) -> Answer:
        return admin.get("connections", number)

    def question(connection: Answer) -> str:
        asked_for["name"] = connection["name"]
        return f"End {called(connection)}? {goes_back(connection)}"

    def end(admin: Admin) -> tuple[str, Answer]:
        ended = admin.delete("connections", number, name=asked_for.get("name"))
        held = units.counted(ended["held"], "message")
        return f"ended {tables.shown(ended['name'])}, which held {held}", ended

    return ask_and_do(args, "end", question, end, look)


def called(connection: Answer) -> str:
    """What to call it in a sentence."""
    client, name = tables.shown(connection["client"]), tables.shown(connection["name"])
    return name if connection["client"] in connection["name"] else f"{client} ({name})"


def goes_back(connection: Answer) -> str:
    """What ending it does, in a sentence."""
    held = connection["held"]
    if held is None:
        return "What it holds goes back, and is a delivery that has failed."
    if not held:
        return "It holds nothing."
    each = "is a delivery that has failed" if held == 1 else "is each a delivery that has failed"
    return f"{units.counted(held, 'message')} that it holds will go back, which {each}."


def row(it: Answer) -> list[str]:
    """A connection in the cells of `LIST`."""
    return [
        str(it["number"]),
        it["client"],
        it["protocol"],
        it["user"] or NOTHING,
        _names([f"{taken['queue']}{' (dead)' if taken['dead'] else ''}" for taken in it["consumes"]]),
        _names([sent["queue"] for sent in it["sends"]]),
        rate(it["sent_rate"]),
        rate(it["settled_rate"]),
        units.count(it["held"]) if it["held"] is not None else NOTHING,
        tables.age(it["said_seconds"]),
        _trouble(it),
    ]


def _names(queues: Sequence[str]) -> str:
    more = len(queues) - QUEUES_SHOWN
    return ", ".join(queues[:QUEUES_SHOWN]) + (f" and {more} more" if more > 0 else "") or NOTHING


def rate(value: float | None) -> str:
    return units.rate(value) if value is not None else NOTHING


def _trouble(it: Answer) -> str:
    told = [("blocked: does not read", it["blocked"]), ("held back: waits for room", it["held_back"])]
    return ", ".join(text for text, so in told if so)


def parts_of(it: Answer) -> list[list[str]]:
    """All about one connection, in blocks of lines."""
    sends = [[sent["queue"], units.count(sent["count"]), rate(sent.get("rate"))] for sent in it["sends"]]
    return [
        facts(it),
        tables.table(SENDS, sends) if sends else [],
        tables.table(TAKES, map(_taken, it["takes"])) if it["takes"] else [],
    ]


def facts(it: Answer) -> list[str]:
    """What is not about one queue, a name and what it is in a line."""
    said = f"{it['said']}, {tables.age(it['said_seconds'])} ago" if it["said"] else NOTHING
    found = [
        ("number", str(it["number"])),
        ("client", it["client"]),
        ("name", it["name"]),
        ("protocol", it["protocol"] + (f", at {it['listener']}" if it["listener"] else "")),
        ("peer", it["peer"] + (f", connected to {it['front_end']}" if it["front_end"] else "")),
        ("user", it["user"]),
        ("certificate", it["certificate"]),
        ("connected", units.age(it["connected_seconds"])),
        ("last word", said),
        ("last heard", "" if it["heard_seconds"] is None else f"{units.age(it['heard_seconds'])} ago"),
        (
            "pings",
            {None: "", "awake": "answered", "pinged": "one is out", "idle": "not answered"}[it["pulse"]],
        ),
        ("sent", _total(it, "sent")),
        ("delivered", _total(it, "delivered")),
        ("settled", _total(it, "settled")),
        ("held", "" if it["held"] is None else units.count(it["held"])),
        ("bytes", _bytes(it["bytes_in"], it["bytes_out"], "in", "out")),
        ("buffered", _bytes(it["input_bytes"], it["output_bytes"], "unread here", "unread there")),
        ("blocked", _since(it["blocked_seconds"], it["blocked"])),
        ("held back", _since(it["held_back_seconds"], it["held_back"])),
    ]
    return tables.pairs([(name, text) for name, text in found if text])


def _total(it: Answer, name: str) -> str:
    if it[name] is None:
        return ""
    in_a_second = it[f"{name}_rate"]
    return units.count(it[name]) + (f", {units.rate(in_a_second)}/s" if in_a_second is not None else "")


def _bytes(one: int | None, other: int | None, one_word: str, other_word: str) -> str:
    return (
        ""
        if one is None or other is None
        else f"{units.size(one)} {one_word}, {units.size(other)} {other_word}"
    )


def _since(seconds: float | None, so: bool) -> str:
    if seconds is None:
        return "yes" if so else ""
    return f"for {units.age(seconds)}"


def _taken(taken: Answer) -> list[str]:
    window = taken["window"]
    return [
        taken["queue"] + (" (dead letters)" if taken["dead"] else ""),
        NOTHING if window is None else units.count(window) if window else "no bound",
        units.count(taken["held"]),
        tables.age(taken["held_seconds"]),
        units.count(taken["delivered"]),
        rate(taken["delivered_rate"]),
        units.count(taken["settled"]),
        rate(taken["settled_rate"]),
        "" if taken["active"] is not False else "waits behind an exclusive consumer",
    ]
