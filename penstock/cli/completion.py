"""`penstock completion SHELL`: what the Tab key offers, written from the commands' own parsers.

The parsers are read once into `Page` and `Entry` records, and each shell has one writer that turns these
into its language, so a new command or option appears in all three with nothing to keep in step. A value is
completed by its choices where it has some, as a path where its metavar is `DIR` or `FILE`, else not at all.

Texts reach the scripts only through the quoting functions below; a help sentence can hold any character.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from penstock.cli import main as cli

HELP = "print a script that completes commands and options with the Tab key"

PATH_METAVARS = {"DIR": "directory", "FILE": "file"}

TOP_OPTIONS = ("-h", "--help", "--version")


@dataclass(frozen=True, slots=True)
class Entry:
    """One argument of a command: an option where it has flags, else a positional one."""

    flags: tuple[str, ...]
    help: str
    metavar: str  # the name of the value; empty where no value follows
    choices: tuple[str, ...]

    @property
    def path(self) -> str:
        """`directory`, `file`, or nothing."""
        return PATH_METAVARS.get(self.metavar, "")


@dataclass(frozen=True, slots=True)
class Page:
    """One command, as completion sees it."""

    name: str
    help: str
    entries: tuple[Entry, ...]

    @property
    def options(self) -> Iterator[Entry]:
        return (entry for entry in self.entries if entry.flags)

    @property
    def flags(self) -> Iterator[str]:
        return (flag for option in self.options for flag in option.flags)

    @property
    def positionals(self) -> Iterator[Entry]:
        return (entry for entry in self.entries if not entry.flags)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The one argument, and how to use what is printed."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=tuple(WRITERS), help="the shell that will read the script")
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
    return WRITERS[shell]([_page(name, cli.load(name, commands)) for name in commands])


def _page(name: str, command: cli.Command) -> Page:
    parser = cli.command_parser(name, command)
    # argparse has no public way to list a parser's arguments; `_actions` has been stable since Python 2.7.
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    return Page(name, command.HELP, tuple(_entry(action, parser.prog) for action in shown))


def _entry(action: argparse.Action, prog: str) -> Entry:
    text = (action.help or "") % {**vars(action), "prog": prog}
    takes_value = not action.option_strings or action.nargs != 0
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return Entry(
        tuple(action.option_strings),
        " ".join(text.split()),
        metavar if takes_value else "",
        tuple(map(str, action.choices or ())),
    )


# -- bash: one function; COMPREPLY is filled from words that hold no blanks, or from paths. --


def _bash(pages: list[Page]) -> str:
    top = " ".join([*(page.name for page in pages), *TOP_OPTIONS])
    values = "".join(
        f"        {page.name},{flag}) {_bash_offer([option])} return ;;\n"
        for page in pages
        for option in page.options
        for flag in option.flags
        if option.metavar
    )
    cases = "".join(
        f"        {page.name},-*) _penstock_words {_quote(' '.join(page.flags))} ;;\n"
        f"        {page.name},*) {_bash_offer(page.positionals)} ;;\n"
        for page in pages
    )
    return (
        "# bash completion for penstock; made by `penstock completion bash`.\n"
        '_penstock_words() { mapfile -t COMPREPLY < <(compgen -W "$1" -- "${COMP_WORDS[COMP_CWORD]}"); }\n'
        "_penstock_paths() {\n"
        "    compopt -o filenames\n"
        '    mapfile -t COMPREPLY < <(compgen "$1" -- "${COMP_WORDS[COMP_CWORD]}")\n'
        "}\n"
        "_penstock() {\n"
        "    COMPREPLY=()\n"
        "    if ((COMP_CWORD == 1)); then\n"
        f"        _penstock_words {_quote(top)}\n"
        "        return\n"
        "    fi\n"
        '    case "${COMP_WORDS[1]},${COMP_WORDS[COMP_CWORD - 1]}" in\n'
        f"{values}"
        "    esac\n"
        '    case "${COMP_WORDS[1]},${COMP_WORDS[COMP_CWORD]}" in\n'
        f"{cases}"
        "    esac\n"
        "}\n"
        "complete -F _penstock penstock\n"
    )


def _bash_offer(entries: Iterable[Entry]) -> str:
    """Paths where one of the entries is a path (bash cannot mix them with words well), else the choices."""
    entries = list(entries)
    for path, letter in (("file", "-f"), ("directory", "-d")):
        if any(entry.path == path for entry in entries):
            return f"_penstock_paths {letter};"
    choices = " ".join(choice for entry in entries for choice in entry.choices)
    return f"_penstock_words {_quote(choices)};" if choices else ""


# -- zsh: `_arguments` does the work; a spec is '(others)flag[help]:value:action'. --


def _zsh(pages: list[Page]) -> str:
    commands = "".join(f"        {_quote(f'{page.name}:{page.help}')}\n" for page in pages)
    cases = "".join(
        f"        {page.name})\n            _arguments -s -S \\\n"
        + " \\\n".join(f"                {spec}" for entry in page.entries for spec in _zsh_specs(entry))
        + "\n            ;;\n"
        for page in pages
    )
    return (
        "#compdef penstock\n"
        "# zsh completion for penstock; made by `penstock completion zsh`.\n"
        "_penstock() {\n"
        "    local -a commands=(\n"
        f"{commands}"
        "    )\n"
        "    if ((CURRENT == 2)); then\n"
        "        _describe -t commands command commands\n"
        f"        [[ $PREFIX == -* ]] && compadd -- {' '.join(TOP_OPTIONS)}\n"
        "        return\n"
        "    fi\n"
        "    shift words\n"
        "    ((CURRENT--))\n"
        "    case $words[1] in\n"
        f"{cases}"
        "    esac\n"
        "}\n"
        "# Found through fpath it is called at once; sourced, it registers itself.\n"
        'if [[ $funcstack[1] == _penstock ]]; then _penstock "$@"; else compdef _penstock penstock; fi\n'
    )


def _zsh_specs(entry: Entry) -> Iterator[str]:
    value = f":{_zsh_text(entry.metavar)}:{_zsh_action(entry)}" if entry.metavar else ""
    if not entry.flags:
        yield _quote(f":{_zsh_text(entry.help or entry.metavar)}:{_zsh_action(entry)}")
    for flag in entry.flags:
        yield _quote(f"({' '.join(entry.flags)}){flag}[{_zsh_text(entry.help)}]{value}")


def _zsh_action(entry: Entry) -> str:
    if entry.choices:
        return f"({' '.join(entry.choices)})"
    return {"directory": "_directories", "file": "_files"}.get(entry.path, "")


def _zsh_text(text: str) -> str:
    """Plain text inside a spec, where brackets and colons have a meaning."""
    return "".join(f"\\{sign}" if sign in "[]:\\" else sign for sign in text)


# -- fish: one `complete` line per command and per option. --


def _fish(pages: list[Page]) -> str:
    lines = ["# fish completion for penstock; made by `penstock completion fish`.", "complete -c penstock -f"]
    lines += [f"complete -c penstock -n __fish_use_subcommand {_fish_flag(flag)}" for flag in TOP_OPTIONS]
    for page in pages:
        lines.append(
            f"complete -c penstock -n __fish_use_subcommand -a {page.name} -d {_fish_quote(page.help)}"
        )
        seen = f"complete -c penstock -n {_fish_quote(f'__fish_seen_subcommand_from {page.name}')}"
        for entry in page.entries:
            parts = [
                seen,
                *map(_fish_flag, entry.flags),
                *_fish_value(entry),
                f"-d {_fish_quote(entry.help)}",
            ]
            if entry.flags or entry.choices or entry.path:
                lines.append(" ".join(parts))
    return "\n".join(lines) + "\n"


def _fish_flag(flag: str) -> str:
    return f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"


def _fish_value(entry: Entry) -> Iterator[str]:
    """What may stand for the value: `-F` brings files back, which the first line of the script turned off."""
    if entry.metavar and entry.flags:
        yield "-r" if entry.path == "file" else "-x"
    if entry.choices:
        yield f"-a {_fish_quote(' '.join(entry.choices))}"
    elif entry.path == "directory":
        yield "-a '(__fish_complete_directories)'"
    elif entry.path == "file":
        yield "-F"


def _fish_quote(text: str) -> str:
    """A literal of fish, where a backslash escapes inside single quotes too."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _quote(text: str) -> str:
    """A literal of bash and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


WRITERS: Mapping[str, Callable[[list[Page]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
