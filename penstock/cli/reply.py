"""`penstock reply QUEUE --exec CMD`: answer the requests of a queue with what a command prints. Over RQ.

For each request, CMD runs in a shell with the request on its standard input; what it writes to standard
output is the answer. Its standard error is ours. When it fails (another exit status than 0, or no end within
`--timeout`, when it is killed with everything it has started), then with `--on-failure`

    retry   (default) the request is not answered: the broker gives it out again, here after a growing pause,
            or to another consumer; `max-deliveries` of the queue bounds how often
    empty   the answer is empty, and the request is done

The command ends with Ctrl-C, after `--count` answers, or when no broker can be found any more.
"""

import argparse
import asyncio

from penstock import client
from penstock.cli.execute import shell
from penstock.cli.messaging import (
    add_connection,
    client_options,
    find_url,
    say_json,
    until,
)
from penstock.errors import Misuse, PenstockError

HELP = "answer the requests of a queue with what a command prints"


class CommandFailed(PenstockError):
    """The command of `--exec` has not given an answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queue", metavar="QUEUE", help="the queue")
    parser.add_argument(
        "--exec", required=True, metavar="CMD", help="run in a shell: request on stdin, answer on stdout"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="kill it after so long (default: %(default)s)",
    )
    parser.add_argument(
        "--max", type=int, default=1, metavar="N", help="so many at a time (default: %(default)s)"
    )
    parser.add_argument("--count", type=int, metavar="N", help="end after so many answers")
    parser.add_argument(
        "--on-failure",
        choices=("retry", "empty"),
        default="retry",
        help="what a command that fails means: the request is given out again, or answered with nothing",
    )
    add_connection(parser)


def run(args: argparse.Namespace) -> int:
    for option in ("timeout", "max", "count"):
        value = getattr(args, option)
        if value is not None and value <= 0:
            raise Misuse(f"--{option} {value:g}: use a number over 0")
    _, url = find_url(args)
    asyncio.run(_serve(args, url))
    return 0


async def _serve(args: argparse.Namespace, url: str) -> None:
    answered = 0
    enough = asyncio.Event()
    unheard: OSError | None = None  # what we say

    async def answer(request: client.RqRequest) -> bytes:
        return await given(request, await run_command(args.exec, request.body, args.timeout))

    async def empty(request: client.RqRequest, _error: Exception) -> bytes:
        return await given(request, b"")

    async def given(request: client.RqRequest, output: bytes) -> bytes:
        nonlocal answered, unheard
        try:
            if args.json:
                say_json(queue=request.queue, request_bytes=len(request.body), answer_bytes=len(output))
        except OSError as error:
            unheard = error  # the command has not failed, and its answer is one
        answered += 1
        if not enough.is_set() and (unheard or answered == args.count):
            await node.cancel(args.queue)  # first: an answer makes room for the next request
            enough.set()
        return output

    async with client.AsyncRqClient(url, **client_options(args)) as node:
        on_error = empty if args.on_failure == "empty" else None
        await node.serve(args.queue, answer, max=args.max, on_error=on_error)
        await until(node, enough.wait())
    if unheard:
        raise unheard


async def run_command(command: str, stdin: bytes, seconds: float) -> bytes:
    """What a shell command writes to standard output. CommandFailed where it fails or takes too long."""
    try:
        async with asyncio.timeout(seconds), shell(command, stdout=asyncio.subprocess.PIPE) as process:
            output, _ = await process.communicate(stdin)
    except TimeoutError:
        raise CommandFailed(f"{command!r}: no end within {seconds:g} s, killed") from None
    if process.returncode:
        raise CommandFailed(f"{command!r}: exit status {process.returncode}")
    return output
