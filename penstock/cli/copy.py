"""`penstock copy QUEUE --to QUEUE`: payloads and headers of messages to another queue. The originals stay."""

import argparse
from typing import Final

from penstock.cli.admin import add_admin
from penstock.cli.search import STATES
from penstock.cli.selecting import add_to, add_which, run_to

HELP: Final = "send messages of a queue to another one as well"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_which(parser, STATES)
    add_to(parser)
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    return run_to(args, "copy", "copied")
