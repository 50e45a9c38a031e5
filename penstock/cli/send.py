"""`penstock send QUEUE [TEXT|-]`: messages for a queue, from the command line or standard input.

Success means that the broker has said that everything is stored, over every protocol (`--no-receipts` is for
servers that cannot say it). SSPQ has no queue names: the listener's settings name the queue. An empty
standard input is no message.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, islice, repeat

from penstock import client
from penstock.cli.messaging import (
    STDIN,
    TOKEN_HINT,
    add_connection,
    body_of,
    check_only,
    client_options,
    find_url,
    http_options,
    lines_of,
    progress,
    say_json,
)
from penstock.errors import Misuse, PenstockError

HELP = "send messages to a queue"

VIAS = ("http", "phpmq", "sspq", "rq")
ONLY = {
    "ttl": ("http", "phpmq"),
    "retries": ("http", "sspq", "rq"),
    "delay": ("http",),
    "header": ("http",),
}
"""Options that not every protocol has a word for."""

MESSAGES_AT_ONCE = 1000

Send = Callable[[list[bytes]], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queue", metavar="QUEUE", help="the queue; over sspq always the listener's own")
    parser.add_argument(
        "text", metavar="TEXT", nargs="?", default=STDIN, help="the message; - or nothing: standard input"
    )
    parser.add_argument("--ttl", type=int, metavar="S", help="http, phpmq: expires after so many seconds")
    parser.add_argument(
        "--retries", type=int, metavar="N", help="http, sspq, rq: delivered at most 1 + N times"
    )
    parser.add_argument("--delay", type=float, metavar="S", help="http: nobody gets it for so many seconds")
    parser.add_argument(
        "--header", action="append", metavar="NAME=VALUE", help="http: goes with it; any number of them"
    )
    parser.add_argument("--count", type=int, default=1, metavar="N", help="each message so many times")
    parser.add_argument("--lines", action="store_true", help="each line is a message")
    add_connection(parser, VIAS)


def run(args: argparse.Namespace) -> int:
    if args.count < 1:
        raise Misuse(f"--count {args.count}: use at least 1")
    protocol, url = find_url(args)
    check_only(args, protocol, ONLY)
    sent = 0
    with progress() as tell, SENDERS[protocol](args, url) as send:
        for messages in _messages(args):
            try:
                sent += send(messages)
            except PenstockError as error:
                if sent:
                    done = "stored" if protocol in ("http", "rq") else "sent"
                    error.args = (f"{error}; before this call, {sent:,} were {done}",)
                raise
            tell(f"{sent:,} messages sent")
    if args.json:
        receipts = protocol in ("http", "rq") or not args.no_receipts
        say_json(queue=args.queue, via=protocol, sent=sent, receipts=receipts)
    return 0


def _messages(args: argparse.Namespace) -> Iterator[list[bytes]]:
    """Everything that is to be sent, in lists that are worth a call each."""
    blocks = lines_of(args.text) if args.lines else iter([[body_of(args.text)]])
    for block in blocks:
        copies = chain.from_iterable(repeat(message, args.count) for message in block)
        while messages := list(islice(copies, MESSAGES_AT_ONCE)):
            yield messages


@contextmanager
def _http(args: argparse.Namespace, url: str) -> Iterator[Send]:
    headers = dict(_header(text) for text in args.header or ())
    terms = {"ttl": args.ttl, "retries": args.retries, "delay": args.delay, "headers": headers}
    with client.HttpClient(url, **http_options(args)) as api:

        def send(messages: list[bytes]) -> int:
            try:
                receipts = api.send_many(args.queue, messages, **terms)
            except client.Refused as refusal:
                if refusal.name == "body-too-large":
                    raise PenstockError(f"{refusal}, or use --via rq, which takes larger ones") from None
                if refusal.status not in (401, 403):
                    raise
                raise PenstockError(f"{refusal} ({TOKEN_HINT})") from None
            return sum(receipt.count for receipt in receipts)

        yield send


def _header(text: str) -> tuple[str, str]:
    name, mark, value = text.partition("=")
    if not mark:
        raise Misuse(f"--header {text}: use NAME=VALUE")
    return name, value


@contextmanager
def _phpmq(args: argparse.Namespace, url: str) -> Iterator[Send]:
    with client.PhpmqClient(url, **client_options(args)) as mq:
        yield lambda messages: mq.send_many(args.queue, messages, args.ttl)


@contextmanager
def _sspq(args: argparse.Namespace, url: str) -> Iterator[Send]:
    with client.SspqClient(url, **client_options(args)) as mq:
        yield lambda messages: mq.send_many(messages, args.retries)


@contextmanager
def _rq(args: argparse.Namespace, url: str) -> Iterator[Send]:
    with client.RqClient(url, **client_options(args)) as node:
        yield lambda messages: node.send_many(args.queue, messages, retries=args.retries)


SENDERS: dict[str, Callable[[argparse.Namespace, str], AbstractContextManager[Send]]] = {
    "http": _http,
    "phpmq": _phpmq,
    "sspq": _sspq,
    "rq": _rq,
}
