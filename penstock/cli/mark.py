"""`penstock mark TEXT`: a line on the charts, at this moment: a deployment, a change, an incident."""

import argparse
from typing import Final

from penstock.cli.admin import Admin, add_admin, say_objects
from penstock.common.tables import shown

HELP = "mark this moment on the charts, for everybody who looks"
KINDS: Final = ("deploy", "change", "incident", "note")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", help="what to show, a line of at most 200 characters")
    parser.add_argument("--kind", choices=KINDS, default="deploy", help="what it is (default: deploy)")
    parser.add_argument("--queue", metavar="QUEUE", help="only on the charts of this queue")
    parser.add_argument("--at", metavar="TIME", help="when it was, as in 2030-01-31T12:00:00Z (default: now)")
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    mark = {"text": args.text, "kind": args.kind, "queue": args.queue, "at": args.at}
    with Admin(args) as admin:
        told = admin.post("marks", fields={name: value for name, value in mark.items() if value is not None})
    if args.json:
        say_objects([told])
    else:
        about = f" on {shown(told['queue'])}" if told["queue"] else ""
        print(f"marked {told['time']}{about}: {shown(told['text'])}")
    return 0
