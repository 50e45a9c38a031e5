"""`penstock request QUEUE TEXT`: ask, wait, print the answer. Over RQ.

Exit code 1 where there is no answer: nobody took the request in time, or the broker says that none will come.
"""

import argparse

from penstock import client
from penstock.cli.messaging import Printer, add_connection, add_raw, body_of, client_options, find_url
from penstock.errors import Misuse

HELP = "send a request and print the answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queue", metavar="QUEUE", help="the queue whose consumers answer")
    parser.add_argument("text", metavar="TEXT", help="the request; -: standard input")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="wait so long, and withdraw it then (default: wait 30 s)"
    )
    add_raw(parser)
    add_connection(parser)


def run(args: argparse.Namespace) -> int:
    if args.timeout is not None and args.timeout <= 0:
        raise Misuse(f"--timeout {args.timeout:g}: use a number of seconds over 0")
    _, url = find_url(args)
    body = body_of(args.text)
    with client.RqClient(url, **client_options(args)) as node:
        answer = node.request(args.queue, body, args.timeout)
    Printer(args).show(answer, queue=args.queue)
    return 0
