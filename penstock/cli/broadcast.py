"""`penstock broadcast QUEUE TEXT`: to everybody who consumes the queue at this moment. Over RQ.

Nobody confirms a broadcast, and it is not stored: success means that it was sent, no more.
"""

import argparse

from penstock import client
from penstock.cli.messaging import add_connection, body_of, client_options, find_url, say_json

HELP = "send something to every present consumer of a queue"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queue", metavar="QUEUE", help="the queue whose consumers hear it")
    parser.add_argument("text", metavar="TEXT", help="what they hear; -: standard input")
    add_connection(parser)


def run(args: argparse.Namespace) -> int:
    _, url = find_url(args)
    body = body_of(args.text)
    with client.RqClient(url, **client_options(args)) as node:
        node.broadcast(args.queue, body)
    if args.json:
        say_json(queue=args.queue, via="rq", broadcast_bytes=len(body))
    return 0
