"""`penstock pause QUEUE`: nothing more is handed out; sending and settling go on."""

import argparse

from penstock.cli.admin import Admin, add_admin, add_queue, say_objects
from penstock.common.tables import shown

HELP = "hand out no more messages of a queue; sending goes on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_queue(parser)
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    return set_paused(args, "pause")


def set_paused(args: argparse.Namespace, verb: str) -> int:
    """Pause or resume, and say what it is now."""
    with Admin(args) as admin:
        paused = admin.post("queues", args.queue, verb)["paused"]
    if args.json:
        say_objects([{"queue": args.queue, "paused": paused}])
    else:
        print(f"{shown(args.queue)} is {'paused' if paused else 'not paused'}")
    return 0
