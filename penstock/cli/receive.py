"""`penstock receive QUEUE`: messages of a queue on standard output, each acknowledged once it is written.

Into a pipe, that is when its reader has taken it. A message that could not be written, or that the reader
left behind, is not acknowledged, and comes again. With `--no-ack` none is: all go back when the command ends
(over SSPQ with one retry less). Over RQ, a request that wants an answer gets an empty one. With `--exec`, a
command gets each message, and its exit status says what becomes of it (`execute.py`). Exit code 1 where no
message came in time.
"""

import argparse
import asyncio
from contextlib import ExitStack

from penstock import client
from penstock.cli.execute import work
from penstock.cli.messaging import (
    Printer,
    add_connection,
    add_raw,
    check_only,
    client_options,
    find_url,
    http_options,
    seconds,
    until,
)
from penstock.client.http_core import check_delay
from penstock.errors import Misuse

HELP = "take messages from a queue and print them"

VIAS = ("phpmq", "sspq", "rq", "http")
LEASE_SECONDS = 60
PREFETCH = 100
PREFETCH_UNACKED = 1_000_000
"""With `--no-ack --follow` the window would be full after a while."""

FACTS = ("queue", "id", "offset", "attempts", "headers", "reason", "why")
"""What `--json` shows of a message that came over HTTP, beside its value and its time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "queue", metavar="QUEUE", help="the queue, or QUEUE.dead; over sspq always the listener's own"
    )
    parser.add_argument(
        "--count", type=int, metavar="N", help="how many messages (default: 1, with --follow all that come)"
    )
    parser.add_argument("--no-ack", action="store_true", help="look only: the messages go back afterwards")
    parser.add_argument("--follow", action="store_true", help="wait for messages without end")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=1.0,
        metavar="S",
        help="wait so long for each (default: %(default)s)",
    )
    parser.add_argument(
        "--lease",
        type=float,
        metavar="S",
        help=f"http: they come again so long after this has died (default: {LEASE_SECONDS})",
    )
    parser.add_argument(
        "--exec",
        metavar="CMD",
        help="http: run it in a shell for each message, which is on its stdin; its exit status settles the "
        "message: 0 done, 100 dead letter, others again",
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="--exec: so many at a time (default: 1)")
    parser.add_argument(
        "--retry-delay",
        type=float,
        metavar="S",
        help="--exec: again in so many seconds (default: as retry-delays of the queue say)",
    )
    add_raw(parser)
    add_connection(parser, VIAS)


def run(args: argparse.Namespace) -> int:
    if args.count is not None and args.count < 1:
        raise Misuse(f"--count {args.count}: use at least 1")
    if args.exec is None and (args.jobs is not None or args.retry_delay is not None):
        raise Misuse("--jobs and --retry-delay are for --exec")
    if args.exec is not None:
        if args.no_ack or args.raw:
            raise Misuse("--exec settles messages and prints none; use it without --no-ack and --raw")
        args.via = args.via or "http"
        args.jobs = 1 if args.jobs is None else args.jobs
        if args.jobs < 1:
            raise Misuse(f"--jobs {args.jobs}: use at least 1")
        check_delay(args.queue, args.retry_delay)
    protocol, url = find_url(args)
    check_only(args, protocol, {"exec": ("http",), "lease": ("http",)})
    args.lease = LEASE_SECONDS if args.lease is None else args.lease
    count = args.count if args.count is not None or args.follow else 1
    timeout = None if args.follow else args.timeout
    if not RECEIVERS[protocol](args, url, count, timeout):
        raise client.TimedOut(f"queue {args.queue!r}: no message within {args.timeout:g} s")
    return 0


def _phpmq(args: argparse.Namespace, url: str, count: int | None, timeout: float | None) -> int:
    printer = Printer(args)
    received = 0
    prefetch = PREFETCH if not args.no_ack else count or PREFETCH_UNACKED
    with client.PhpmqClient(url, **client_options(args)) as mq:
        for message in mq.consume(args.queue, prefetch, count=count, timeout=timeout):
            printer.show(message.body, queue=message.queue, id=message.id, ttl=message.ttl)
            received += 1
            if not args.no_ack:
                message.ack()
    return received


def _sspq(args: argparse.Namespace, url: str, count: int | None, timeout: float | None) -> int:
    if args.no_ack and count != 1:
        raise Misuse("--no-ack over sspq shows one message: the next one comes only after an acknowledgement")
    printer = Printer(args)
    received = 0
    with client.SspqClient(url, **client_options(args)) as mq:
        while count is None or received < count:
            try:
                message = mq.receive(timeout)
            except client.TimedOut:
                break
            printer.show(message.body, queue=args.queue, retries=message.retries)
            received += 1
            if not args.no_ack:
                message.ack()
    return received


def _http(args: argparse.Namespace, url: str, count: int | None, timeout: float | None) -> int:
    if args.exec is not None:
        return asyncio.run(work(args, url, count, timeout))
    printer = Printer(args)
    received = 0
    prefetch = PREFETCH if not args.no_ack else count or PREFETCH_UNACKED
    with ExitStack() as kept, client.HttpClient(url, **http_options(args)) as mq:
        for message in mq.consume(args.queue, prefetch, lease=args.lease, count=count, timeout=timeout):
            facts = {name: getattr(message, name) for name in FACTS}
            printer.show(message.body, **facts, timestamp=message.timestamp.isoformat())
            received += 1
            if args.no_ack:
                kept.enter_context(message.keep())
            else:
                message.ack()
    return received


def _rq(args: argparse.Namespace, url: str, count: int | None, timeout: float | None) -> int:
    return asyncio.run(_rq_node(args, url, count, timeout))


async def _rq_node(args: argparse.Namespace, url: str, count: int | None, timeout: float | None) -> int:
    printer = Printer(args)
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[tuple[client.RqRequest, asyncio.Future[None]]] = asyncio.Queue()
    open_: set[asyncio.Future[None]] = set()
    received = 0

    async def hand_over(request: client.RqRequest) -> None:
        done: asyncio.Future[None] = loop.create_future()
        open_.add(done)
        inbox.put_nowait((request, done))
        try:
            await done
        finally:
            open_.discard(done)

    async with client.AsyncRqClient(url, **client_options(args)) as node:
        try:
            await node.serve(args.queue, hand_over, max=(count or 0) if args.no_ack else 1)
            while count is None or received < count:
                came = await until(node, inbox.get(), timeout)
                if came is None:
                    break
                request, done = came
                facts = {"queue": request.queue, "wants_reply": request.wants_reply}
                await asyncio.to_thread(printer.show, request.body, **facts)  # pings are answered meanwhile
                received += 1
                if received == count:
                    await node.cancel(args.queue)  # first: an answer makes room for the next message
                if not args.no_ack:
                    done.set_result(None)
        finally:
            for done in open_:
                done.cancel()  # not answered, so that it goes back
    return received


RECEIVERS = {"phpmq": _phpmq, "sspq": _sspq, "rq": _rq, "http": _http}
