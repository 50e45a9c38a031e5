"""`penstock delete QUEUE`: a queue is no more, nor is anything that is in it.

The next message that is sent to its name makes another queue, with offsets from 0 on. One that has consumers
stays, unless `--force` is said: then they wait for that next one. A person is asked first, as with `purge`.
"""

import argparse

from penstock.cli.admin import Admin, add_admin, add_queue
from penstock.cli.purge import ask_and_do
from penstock.client.http_core import Answer
from penstock.common import tables, units

HELP = "delete a queue with its messages and dead letters"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_queue(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--force", action="store_true", help="also while it has consumers")
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    def what(queue: Answer) -> str:
        messages = units.counted(queue["ready"] + queue["delayed"] + queue["held"], "message")
        return f"{tables.shown(args.queue)} with {messages} and {units.counted(queue['dead'], 'dead letter')}"

    def delete(admin: Admin) -> tuple[str, Answer]:
        deleted = admin.delete("queues", args.queue, force=args.force)
        return f"deleted {what(deleted)}", deleted

    return ask_and_do(args, "delete", lambda queue: f"Delete {what(queue)}?", delete)
