"""`penstock completion SHELL`: what the Tab key offers, written by shtab from the commands' own parsers.

So a new command or option is offered by all shells with nothing to keep in step. A value is completed by its
choices where it has some, as a path where its metavar is `DIR` or `FILE`, else not at all.
"""

import argparse
import shlex
from collections.abc import Mapping
from typing import Final

from penstock.cli import main as cli

HELP = "print a script that completes commands and options with the Tab key"

SHELLS: Final = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The one argument, and how to use what is printed."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=SHELLS, help="the shell that will read the script")
    parser.epilog = (
        "bash:  source <(penstock completion bash)      in ~/.bashrc\n"
        "zsh:   source <(penstock completion zsh)       in ~/.zshrc, after compinit\n"
        "fish:  penstock completion fish | source       in ~/.config/fish/config.fish"
    )


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(script(args.shell, cli.COMMANDS), end="")
    return 0


def script(shell: str, commands: Mapping[str, str]) -> str:
    """The completion script of one shell for these commands."""
    import shtab  # only this command needs it, and every command is loaded for the overview

    paths = {"DIR": shtab.DIRECTORY, "FILE": shtab.FILE}
    parser = argparse.ArgumentParser("penstock", add_help=False)
    parser.add_argument("-h", "--help", action="help", help=cli.HELP_OF_HELP)
    parser.add_argument("--version", action="version", help="show the version and leave")
    below = parser.add_subparsers()
    for name in commands:
        command = cli.load(name, commands)
        own = cli.command_parser(name, command)
        # argparse has no public way to list a parser's arguments; `_actions` has been stable for many years.
        for action in own._actions:
            if action.metavar in paths:
                vars(action)["complete"] = paths[action.metavar]  # where shtab looks for it
        below.add_parser(name, help=command.HELP, parents=[own], add_help=False)
    made: str = shtab.complete(parser, shell)
    if shell != "zsh":
        return made
    # What shtab makes registers itself where it comes by `eval`, but not where it is sourced. Found through
    # fpath, all of this is the body of a function, which is called to complete.
    return (
        f"#compdef penstock\neval {shlex.quote(made)}\n"
        'if [[ $funcstack[1] == _penstock ]]; then _shtab_penstock "$@"; fi\n'
    )
