"""`penstock receive QUEUE --exec CMD`: a command is the worker. Over HTTP.

For each message CMD runs in a shell, with the message on its standard input and in its environment

    PENSTOCK_QUEUE, PENSTOCK_ID, PENSTOCK_OFFSET
    PENSTOCK_ATTEMPTS          how often it was delivered, this time included
    PENSTOCK_HEADER_NAME       for each header; its name in capitals, with _ for what no variable has

Its standard output and its standard error are ours. Its exit status says what becomes of the message:

    0      it is done
    100    never again: a dead letter, with the last line of standard error as its `why`
    other  again, after `--retry-delay`, else as the queue's `retry-delays` say; as by 75 (EX_TEMPFAIL)

The lease is extended as long as CMD runs. SIGTERM: nothing new begins, and what runs is waited for. Ctrl-C
kills what runs, with everything that it has started; those messages go back.
"""

import argparse
import asyncio
import contextlib
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from typing import Final

from penstock import client
from penstock.cli.messaging import http_options, say_json
from penstock.client.plan import log

EXIT_REJECT: Final = 100
TAIL_BYTES: Final = 4096
"""So much of what a command has said last is looked at for its last line."""

READ_BYTES: Final = 1 << 16


@contextlib.asynccontextmanager
async def shell(
    command: str,
    *,
    stdout: int | None = None,
    stderr: int | None = None,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[Process]:
    """A command in a shell, with a pipe for its standard input. Killed with everything that it has started,
    where the block ends by an exception."""
    # In a session of its own, so that all of them can be killed.
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_shell(
            command, stdin=PIPE, stdout=stdout, stderr=stderr, env=env, start_new_session=True
        )
    )
    try:
        yield await asyncio.shield(starting)
    except BaseException:  # the shell may have ended, and what it has started not
        process = await starting
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise


async def work(args: argparse.Namespace, url: str, count: int | None, timeout: float | None) -> int:
    """Run the command for the messages of the queue; for how many it was."""
    handled = 0
    slots = asyncio.Semaphore(args.jobs)

    async def take() -> None:
        nonlocal handled
        await slots.acquire()
        async for message in mq.consume(
            args.queue, args.jobs, lease=args.lease, count=count, timeout=timeout
        ):
            handled += 1
            handling = group.create_task(_handle(args, message))
            handling.add_done_callback(lambda _: slots.release())
            await slots.acquire()

    try:
        async with client.AsyncHttpClient(url, **http_options(args)) as mq, asyncio.TaskGroup() as group:
            taking = group.create_task(take())
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, taking.cancel)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return handled or taking.cancelled()


async def _handle(args: argparse.Namespace, message: client.AsyncHttpMessage) -> None:
    async with message.keep(), shell(args.exec, stderr=PIPE, env=_environment(message)) as process:
        last, _ = await asyncio.gather(_pass_on(process), _feed(process, message.body))
        code = await process.wait()
    if code == 0:
        outcome = "ack"
        await message.ack()
    elif code == EXIT_REJECT:
        outcome = "reject"
        await message.reject(last)
    else:
        outcome = "requeue"
        await message.requeue(args.retry_delay)
    if args.json:
        facts = {"offset": message.offset, "attempts": message.attempts, "exit": code, "outcome": outcome}
        say_json(queue=message.queue, id=message.id, **facts)
    elif code:
        log.warning("queue %r: message %d: exit status %d: %s", message.queue, message.offset, code, outcome)


def _environment(message: client.AsyncHttpMessage) -> dict[str, str]:
    facts = {"QUEUE": message.queue, "ID": message.id, "OFFSET": message.offset, "ATTEMPTS": message.attempts}
    facts |= {
        f"HEADER_{re.sub('[^A-Z0-9]', '_', name.upper())}": value.replace("\0", "")
        for name, value in message.headers.items()
    }
    return {**os.environ, **{f"PENSTOCK_{name}": str(value) for name, value in facts.items()}}


async def _pass_on(process: Process) -> str:
    """Standard error as it comes; its last line."""
    assert process.stderr is not None
    tail = b""
    while block := await process.stderr.read(READ_BYTES):
        sys.stderr.buffer.write(block)
        sys.stderr.flush()
        tail = (tail + block)[-TAIL_BYTES:]
    return tail.decode(errors="replace").strip().rpartition("\n")[2]


async def _feed(process: Process, body: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read it
        process.stdin.write(body)
        await process.stdin.drain()
    process.stdin.close()
