"""Where the tests of the settings get settings from: words, variables, and the text of a file."""

import argparse
import shlex
from pathlib import Path

import pytest

from penstock.common.given import SettingsError
from penstock.server.settings import Settings
from penstock.server.settings_read import add_arguments, load


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="penstock serve", allow_abbrev=False)
    add_arguments(made)
    return made


class Source:
    """Loads settings from words of a command line, variables, and the text of a file called penstock.toml."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "penstock.toml"

    def __call__(self, words: str = "", file: str | None = None, **environ: str) -> Settings:
        arguments = shlex.split(words)
        if file is not None:
            self.path.write_text(file, encoding="utf-8", newline="")
            arguments += ["--config", str(self.path)]
        return load(parser().parse_args(arguments), environ)

    def error(self, words: str = "", file: str | None = None, **environ: str) -> str:
        """The one line that it fails with, with the file's name alone where its path stands."""
        with pytest.raises(SettingsError) as caught:
            self(words, file, **environ)
        line = str(caught.value)
        assert line == " ".join(line.splitlines())
        return line.replace(str(self.path), "penstock.toml")
