"""`penstock resume QUEUE`: hands out messages again, which `penstock pause` has stopped."""

import argparse

from penstock.cli.pause import add_arguments, set_paused

__all__ = ["HELP", "add_arguments", "run"]

HELP = "hand out the messages of a paused queue again"


def run(args: argparse.Namespace) -> int:
    return set_paused(args, "resume")
