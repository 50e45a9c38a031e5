"""What `send`, `receive`, `request`, `reply` and `broadcast` share: where to connect, what goes in and out.

The URL is `--url`, else PENSTOCK_URL, else the default address of `--via`, or of the protocol that the
command goes over by itself. One of HTTP serves every command: where a command goes over another protocol, or
`--via` asks for one, the broker is asked over HTTP where that listens. Bodies are bytes on the way in and
out; only a terminal gets text, in which nothing can move the cursor.

How it fails: `Misuse`, and so the clients' `NotSupported`, is exit code 2; every other `PenstockError` is a
failure. `penstock.cli.main` prints both.
"""

import argparse
import asyncio
import base64
import fcntl
import getpass
import json
import os
import select
import stat
import struct
import sys
import termios
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from penstock.client import ClientOptions
from penstock.client.options import Options
from penstock.client.url import PORTS, target_of
from penstock.common.address import TcpAddress, UnixAddress, parse_address
from penstock.common.secret_file import (
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    exposed,
    sendable,
    token_around,
    token_from,
    token_in,
)
from penstock.common.text import printable
from penstock.errors import Misuse, PenstockError

if TYPE_CHECKING:
    from penstock.client import AsyncRqClient

T = TypeVar("T")

URL_VARIABLE = "PENSTOCK_URL"
TOKEN_HINT = f"--token-file, or {TOKEN_VARIABLE}"
STDIN = "-"
READ_BYTES = 1 << 16
PROGRESS_SECONDS = 0.2
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.001, 0.05
"""How often to look whether the reader of a pipe has taken what is in it: nothing tells."""

THIS_MACHINE = ("127.0.0.1", "::1", "localhost")
EVERYWHERE = ("0.0.0.0", "::")


# --- where ---------------------------------------------------------------------------------------------


def add_connection(parser: argparse.ArgumentParser, vias: Sequence[str] = ("rq",)) -> None:
    """The options that say where to connect, and `--json`. `vias`: the protocols, the usual one first."""
    parser.set_defaults(vias=vias, via=None)
    if len(vias) > 1:
        parser.add_argument(
            "--via", choices=vias, help=f"the protocol (default: that of the URL, else {vias[0]})"
        )
    parser.add_argument(
        "--url",
        metavar="URL",
        help=f"where the broker is: its http://HOST:PORT, or {vias[-1]}://HOST:PORT "
        f"(default: {URL_VARIABLE}, else the protocol's port of this machine)",
    )
    add_token(parser, "http: a file with our token, where the broker has tokens")
    parser.add_argument(
        "--wait",
        type=seconds,
        default=60.0,
        metavar="S",
        help="look for the broker so long, 0: once (default: %(default)g)",
    )
    if set(vias) & {"phpmq", "sspq"}:
        parser.add_argument(
            "--no-receipts",
            action="store_true",
            help="phpmq, sspq: for a server that is no Penstock, and cannot say what it has stored",
        )
    parser.add_argument("--cafile", metavar="FILE", help="TLS: who signs the broker's certificate")
    parser.add_argument("--certfile", metavar="FILE", help="TLS: our own certificate")
    parser.add_argument("--keyfile", metavar="FILE", help="TLS: its key")
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object a line")


def seconds(text: str) -> float:
    """The kind of an argument: how long, perhaps without end."""
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not number >= 0:  # which is also true of "nan"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 on")
    return number


def add_token(
    parser: argparse.ArgumentParser,
    what: str,
    default: str = f"{TOKEN_VARIABLE}, else {TOKEN_FILE_VARIABLE}",
) -> None:
    """The options that say who asks."""
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"{what}; -: the first line of standard input (default: {default})",
    )
    parser.add_argument("--token", metavar="TOKEN", help="it itself, where nobody else can list processes")


def find_url(args: argparse.Namespace) -> tuple[str, str]:
    """Protocol and URL that a command line asks for."""
    token_given(args)  # first: behind it, standard input may be a message
    vias = (args.via,) if args.via else args.vias
    given = args.url or os.environ.get(URL_VARIABLE)
    if not given:
        return vias[0], f"{vias[0]}://127.0.0.1:{PORTS[vias[0]]}"
    protocol = target_of(given).protocol
    if protocol == "http" and vias[0] != "http":
        return _listener(given, args, [via for via in vias if via != "http"])
    if protocol not in vias:
        source = "--url" if args.url else URL_VARIABLE
        via = f"--via {vias[0]} " if len(args.vias) > 1 and not args.via else ""
        raise Misuse(
            f"{source} is {given}, but this needs {' or '.join(vias)}; use {via}--url {vias[0]}://HOST:PORT"
        )
    return protocol, given


def _listener(url: str, args: argparse.Namespace, vias: Sequence[str]) -> tuple[str, str]:
    """Protocol and URL of the listener that a broker, asked over HTTP, names for these protocols."""
    from penstock.client.http_core import HttpCore
    from penstock.client.http_line import HttpLine

    options = Options.of(**http_options(args))
    line = HttpLine(target_of(url), options)
    try:
        listeners = line.ask(HttpCore(options).get("v1", "engine"))["listeners"]
        there = line.address
    finally:
        line.close()
    for via in vias:
        for listener in listeners:
            address = parse_address(listener["address"])
            named = listener["queue"] is None or listener["queue"] == getattr(args, "queue", None)
            if listener["protocol"] != via or not named:
                continue
            if isinstance(address, UnixAddress):
                if isinstance(there, UnixAddress) or there.host in THIS_MACHINE:
                    return via, f"{via}+unix://{quote(address.path)}"
                continue
            # It may listen everywhere: then where it can be reached is known from the other URL.
            own = address.host in EVERYWHERE and not isinstance(there, UnixAddress)
            host = there.host if own and isinstance(there, TcpAddress) else address.host
            return via, f"{via}{'s' * listener['tls']}://{TcpAddress(host, address.port)}"
    raise PenstockError(
        f"{url}: this broker has no listener for {' or '.join(vias)}"
        + " and this queue" * ("sspq" in vias)
        + ", as far as it says; name one with --url"
    )


def client_options(args: argparse.Namespace) -> ClientOptions:
    return {
        "cafile": args.cafile,
        "certfile": args.certfile,
        "keyfile": args.keyfile,
        "reconnect_seconds": args.wait,
        "receipts": not getattr(args, "no_receipts", False),
    }


def http_options(args: argparse.Namespace) -> ClientOptions:
    return {**client_options(args), "token": token_of(args)}


def token_of(args: argparse.Namespace) -> str | None:
    """The token that a command line gives, or else the environment. A file is read, and warned of, once."""
    given = token_given(args)
    if given is None:
        given, warning = token_around(os.environ)
        warn(warning)
        args.token = given
    return given


def token_given(args: argparse.Namespace) -> str | None:
    """The token that a command line gives."""
    if args.token_file:
        if args.token:
            raise Misuse("--token and --token-file: give one of the two")
        if args.token_file != STDIN:
            args.token = token_in(args.token_file)
            warn(exposed(args.token_file))
        elif sys.stdin.isatty():
            args.token = getpass.getpass("token: ")
        else:
            args.token = token_from(sys.stdin.fileno())
        args.token_file = None
    return sendable(args.token, "the token") if args.token else None


def warn(warning: str | None) -> None:
    if warning is not None:
        print(f"penstock: warning: {warning}", file=sys.stderr, flush=True)


def check_only(args: argparse.Namespace, protocol: str, only: Mapping[str, Sequence[str]]) -> None:
    """Misuse where an option is given that the protocol has no word for."""
    for option, protocols in only.items():
        if getattr(args, option.replace("-", "_")) is not None and protocol not in protocols:
            raise Misuse(f"--{option}: {protocol} has no word for it; use --via {' or '.join(protocols)}")


async def until(
    node: "AsyncRqClient", work: Coroutine[Any, Any, T], seconds: float | None = None
) -> T | None:
    """What comes of `work`; None where that is not known in time.

    ConnectionLost where the node finds no broker any more, so that nothing would come at all.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(node.wait())
    try:
        await asyncio.wait({task, watch}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if watch.done():
            watch.result()
        return None
    finally:
        task.cancel()
        watch.cancel()


# --- what goes in --------------------------------------------------------------------------------------


def body_of(text: str) -> bytes:
    """A message from the command line, or from standard input where that is asked for."""
    if text != STDIN:
        return os.fsencode(text)
    body = sys.stdin.buffer.read()
    if not body:
        raise PenstockError("standard input is empty, and nothing was sent; for an empty message give ''")
    return body


def lines_of(text: str) -> Iterator[list[bytes]]:
    """The lines of it, as many at a time as are there, so that a slow writer's do not wait for others."""
    if text != STDIN:
        yield os.fsencode(text).removesuffix(b"\n").split(b"\n") if text else []
        return
    rest = b""
    while block := os.read(sys.stdin.fileno(), READ_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        if lines:
            yield lines
    if rest:
        yield [rest]


# --- what comes out ------------------------------------------------------------------------------------


def add_raw(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--raw", action="store_true", help="bytes as they are, with no line break added")


class Printer:
    """Bodies on standard output: as JSON, as bytes, or as text for a terminal."""

    def __init__(self, args: argparse.Namespace) -> None:
        if getattr(sys.stdout, "name", "") == os.devnull:  # see `fill_streams`; else it has no name of a file
            raise PenstockError("standard output is closed, so that no message was taken")
        self._json: bool = args.json
        self._end = b"" if args.raw else b"\n"
        self._for_people = sys.stdout.isatty() and not args.raw
        self._is_pipe = stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode)

    def show(self, body: bytes, **facts: object) -> None:
        """Write one body out. When the call returns it has left this process, and a reader of a pipe has it.

        BrokenPipeError where that reader has gone away without it.
        """
        if self._json:
            shown = json.dumps({**facts, **value_of(body)}).encode() + b"\n"
        elif self._for_people:
            text = body.decode("utf-8", "backslashreplace")
            shown = "\n".join(map(printable, text.split("\n"))).encode() + b"\n"
        else:
            shown = body + self._end
        sys.stdout.buffer.write(shown)
        sys.stdout.buffer.flush()
        if self._is_pipe:
            self._await_reader()

    def _await_reader(self) -> None:
        """What a pipe has room for was read by nobody yet, and goes with it."""
        number = sys.stdout.fileno()
        gone = select.poll()
        gone.register(number, 0)  # a reader that has gone away is told in any case
        pause = PAUSE_SECONDS_MIN
        has_gone = False
        while struct.unpack("i", fcntl.ioctl(number, termios.FIONREAD, bytes(4)))[0]:
            if has_gone:
                raise BrokenPipeError
            has_gone = bool(gone.poll(pause * 1000))  # perhaps with the last of it
            pause = min(2 * pause, PAUSE_SECONDS_MAX)


def value_of(body: bytes) -> dict[str, str]:
    """A body in JSON: `value` where it is text, else `value_base64`."""
    try:
        return {"value": body.decode()}
    except UnicodeDecodeError:
        return {"value_base64": base64.b64encode(body).decode()}


def say_json(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """What takes a text that says how far something is: a line on standard error that is written over, some
    times a second, and gone in the end. Nothing where nobody looks."""
    following = time.monotonic() + PROGRESS_SECONDS
    shown = False

    def tell(text: str) -> None:
        nonlocal following, shown
        now = time.monotonic()
        if now >= following and sys.stderr.isatty():
            following, shown = now + PROGRESS_SECONDS, True
            print(f"\r{text}", end="", file=sys.stderr, flush=True)

    try:
        yield tell
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
