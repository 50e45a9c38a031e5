"""The `penstock` command: finds the subcommand, runs it, and turns every ending into an exit code.

`COMMANDS` is the one list of subcommands. It maps a name to a module, and a module is imported only when
its command runs (or when its help is wanted), so that `penstock --version` stays quick however much the
commands need. A command module exposes what `Command` describes.

Exit codes: 0 done, 1 failed, 2 misuse (argparse's own code too), from 3 on what a command has of its own
(`health`), and 128 + n where a signal was the reason, as shells count: 130 interrupted, 141 the reader of our
output went away. A `PenstockError` is for the user
and becomes one line on standard error (`Misuse` with its own exit code); any other exception is a fault of
ours and keeps its traceback.
"""

import argparse
import difflib
import errno
import gc
import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from penstock import __version__
from penstock.common.text import printable
from penstock.errors import Misuse, PenstockError

COMMANDS: Mapping[str, str] = {
    "serve": "penstock.cli.serve",
    "send": "penstock.cli.send",
    "receive": "penstock.cli.receive",
    "request": "penstock.cli.request",
    "reply": "penstock.cli.reply",
    "broadcast": "penstock.cli.broadcast",
    "queues": "penstock.cli.queues",
    "show": "penstock.cli.show",
    "peek": "penstock.cli.peek",
    "search": "penstock.cli.search",
    "connections": "penstock.cli.connections",
    "pause": "penstock.cli.pause",
    "resume": "penstock.cli.resume",
    "purge": "penstock.cli.purge",
    "delete": "penstock.cli.delete",
    "dead": "penstock.cli.dead",
    "redrive": "penstock.cli.redrive",
    "copy": "penstock.cli.copy",
    "move": "penstock.cli.move",
    "withdraw": "penstock.cli.withdraw",
    "import": "penstock.cli.importing",
    "health": "penstock.cli.health",
    "mark": "penstock.cli.mark",
    "top": "penstock.top.command",
    "report": "penstock.cli.report",
    "verify": "penstock.cli.verify",
    "dump": "penstock.cli.dump",
    "backup": "penstock.cli.backup",
    "restore": "penstock.cli.restore",
    "doctor": "penstock.cli.doctor",
    "token": "penstock.cli.token",
    "archive": "penstock.cli.archive",
    "pipeline": "penstock.cli.pipeline",
    "demo": "penstock.demo.command",
    "cluster": "penstock.cli.cluster",
    "service": "penstock.cli.service",
    "completion": "penstock.cli.completion",
}

EXIT_FAILURE = 1
EXIT_MISUSE = 2
EXIT_INTERRUPTED = 130
EXIT_OUTPUT_CLOSED = 141

OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a disk says no with to what is printed. For files that a command opens it has words of its own."""

VERSION_LINE = f"penstock {__version__}"
HIDDEN = "\0"
HELP_OF_HELP = "show this help and leave"


class Command(Protocol):
    """What a command module looks like to this one."""

    HELP: str
    """One sentence, lower case and without a full stop, for the list of commands."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; the result is the exit code."""


def main(argv: Sequence[str] | None = None, commands: Mapping[str, str] = COMMANDS) -> int:
    """Run one command line (default: this process's) and return its exit code."""
    fill_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments, commands)
        # Here and not at interpreter exit, where a reader that went away could no longer be handled.
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _forget_output()
        return EXIT_OUTPUT_CLOSED
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS or error.filename is not None:
            raise
        _forget_output()
        print(f"penstock: standard output: {error.strerror}", file=sys.stderr)
        return EXIT_FAILURE
    return code


def fill_streams() -> None:
    """A standard stream that is closed leads nowhere. Otherwise the first file that is opened would get its
    number, and what anybody says there would be written into that file."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - it stays open


def _forget_output() -> None:
    """What is still buffered goes nowhere; the interpreter would try once more and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def load(name: str, commands: Mapping[str, str]) -> Command:
    """The module of one command."""
    gc.disable()  # What is imported stays. To look for garbage meanwhile takes a tenth of the time.
    try:
        return cast(Command, importlib.import_module(commands[name]))
    finally:
        gc.enable()


def command_parser(name: str, command: Command) -> argparse.ArgumentParser:
    """The parser for what follows `penstock NAME`."""
    # Abbreviated options would become part of the contract the day somebody's script uses one.
    parser = argparse.ArgumentParser(
        prog=f"penstock {name}",
        description=f"{command.HELP[:1].upper()}{command.HELP[1:]}.",
        allow_abbrev=False,
        add_help=False,
    )
    command.add_arguments(parser)
    parser.add_argument("-h", "--help", action="help", help=HELP_OF_HELP)
    return parser


def overview_parser(commands: Mapping[str, str]) -> argparse.ArgumentParser:
    """The parser for a command line without a command; its help is the overview."""
    width = max(map(len, commands), default=0)
    parser = argparse.ArgumentParser(
        prog="penstock",
        usage="penstock COMMAND [OPTION ...]",
        description="A durable message broker where a queue and a log are the same thing.",
        epilog="`penstock COMMAND --help` explains a command and its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument_group(
        "commands", "\n".join(f"{name:{width}}  {load(name, commands).HELP}" for name in commands)
    )
    options = parser.add_argument_group("options")
    options.add_argument("-h", "--help", action="help", help=HELP_OF_HELP)
    options.add_argument(
        "--version", action="version", version=VERSION_LINE, help="show the version and leave"
    )
    return parser


def _dispatch(arguments: list[str], commands: Mapping[str, str]) -> int:
    try:
        if arguments and not arguments[0].startswith("-"):
            return _run(arguments[0], arguments[1:], commands)
        # Asked before the overview, which imports every command for its sentence.
        if arguments[:1] == ["--version"]:
            print(VERSION_LINE)
            return 0
        parser = overview_parser(commands)
        parser.parse_args(arguments)
        parser.print_help(sys.stderr)
    except PenstockError as error:
        print(f"penstock: {'; '.join(str(error).splitlines())}", file=sys.stderr)
        return EXIT_FAILURE
    except SystemExit as leaving:  # argparse's way to end: 0 after --help, 2 after misuse
        if isinstance(leaving.code, int):
            return leaving.code
        raise
    return EXIT_MISUSE


def _run(name: str, rest: list[str], commands: Mapping[str, str]) -> int:
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        print(f"penstock: there is no command '{name}'.{hint} `penstock --help` lists them.", file=sys.stderr)
        return EXIT_MISUSE
    command = load(name, commands)
    parser = command_parser(name, command)
    # Intermixed: an option may stand between two positional arguments, also where the second can be left out.
    # argparse loses a -- then, and so what comes behind it stands there under another name.
    cut = rest.index("--") if "--" in rest else len(rest)
    behind = rest[cut + 1 :]
    hidden = {f"{HIDDEN}{text}": text for text in behind if text.startswith("-")}
    shown = [f"{HIDDEN}{text}" if text.startswith("-") else text for text in behind]
    args = parser.parse_intermixed_args([*rest[:cut], *shown])
    for option, value in vars(args).items():
        if isinstance(value, str) and value in hidden:
            setattr(args, option, hidden[value])
        elif isinstance(value, list):
            setattr(args, option, [hidden.get(one, one) for one in value])
    _log_in_lines()
    try:
        return command.run(args)
    except Misuse as error:
        print(f"penstock {name}: {error}", file=sys.stderr)
        return EXIT_MISUSE


class _OneLine(logging.Formatter):
    """What a client has to tell, as one line; an exception is told by its own text."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        return "penstock: " + printable(record.getMessage() + (f": {error}" if error else ""))


def _log_in_lines() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    logging.getLogger("penstock.client").handlers[:] = [handler]
