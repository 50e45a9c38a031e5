"""`penstock move QUEUE --to QUEUE`: messages that nobody holds to another queue, never to be in both."""

import argparse
from typing import Final

from penstock.cli.admin import add_admin
from penstock.cli.selecting import LIVING, add_to, add_which, run_to

HELP: Final = "move messages that nobody holds to another queue"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_which(parser, LIVING)
    add_to(parser)
    add_admin(parser)


def run(args: argparse.Namespace) -> int:
    return run_to(args, "move", "moved")
