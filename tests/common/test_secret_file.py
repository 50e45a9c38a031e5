"""Files that hold a secret: what is taken for a token, what is refused, and whom the warning is about."""

import os
from pathlib import Path

import pytest

from penstock.common.secret_file import (
    TOKEN_BYTES_MAX,
    WrongToken,
    exposed,
    token_around,
    token_from,
    token_in,
)

TOKEN = "0123456789abcdef0123"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("text", [TOKEN, f"{TOKEN}\n", f" {TOKEN}\r\n", "x" * TOKEN_BYTES_MAX + "\r\n"])
def test_a_file_with_a_token(file: Path, text: str) -> None:
    file.write_bytes(text.encode())
    assert token_in(str(file)) == text.strip()


@pytest.mark.parametrize(
    "text", ["", "\n", f"{TOKEN}\nmore", f"{TOKEN} more", "é" * 20, "x" * (TOKEN_BYTES_MAX + 1)]
)
def test_a_file_without_one(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(WrongToken, match="one line of printable ASCII") as error:
        token_in(str(file))
    assert not text.strip() or text.strip() not in str(error.value)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/nowhere/token", "No such file"),
        ("/dev", "directory"),
        ("/dev/zero", "no token"),
        ("a\0b", "null byte"),
    ],
)
def test_what_is_no_file_to_read(path: str, why: str) -> None:
    with pytest.raises(WrongToken, match=why):
        token_in(path)


def test_of_a_stream_one_line_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, f"{TOKEN}\nthe message".encode())
    try:
        assert token_from(reading) == TOKEN
        assert os.read(reading, 100) == b"the message"
    finally:
        os.close(reading)
        os.close(writing)


def test_a_line_that_does_not_end_is_not_read_to_its_end() -> None:
    with open("/dev/zero", "rb") as zeros, pytest.raises(WrongToken, match="standard input has no token"):
        token_from(zeros.fileno())


@pytest.mark.parametrize(
    ("mode", "is_exposed"), [(0o600, False), (0o400, False), (0o620, False), (0o640, True), (0o604, True)]
)
def test_whom_the_warning_is_about(file: Path, mode: int, is_exposed: bool) -> None:
    file.chmod(mode)
    warning = f"{file} holds a secret, and other users can read it; chmod 600 '{file}'"
    assert exposed(str(file)) == (warning if is_exposed else None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_somebody_else_s(file: Path) -> None:
    os.chown(file, 1, -1)
    file.chmod(0o640)
    assert exposed(str(file)) is None
    file.chmod(0o644)
    assert str(exposed(str(file))).endswith(f"chmod o= '{file}'")


def test_what_is_no_plain_file_gets_no_warning() -> None:
    assert exposed("/dev/null") is None
    assert exposed("/nowhere/token") is None


def test_the_environment(file: Path) -> None:
    assert token_around({}) == (None, None)
    assert token_around({"PENSTOCK_TOKEN": "", "PENSTOCK_TOKEN_FILE": ""}) == (None, None)
    assert token_around({"PENSTOCK_TOKEN_FILE": str(file)}) == (TOKEN, None)
    assert token_around({"PENSTOCK_TOKEN": "itself", "PENSTOCK_TOKEN_FILE": "/nowhere"}) == ("itself", None)
    assert token_around({"PENSTOCK_TOKEN": f"{TOKEN}\n"}) == (TOKEN, None)
    for text in (f"{TOKEN}\nX: y", f"{TOKEN}ü", " \n"):
        with pytest.raises(WrongToken, match="PENSTOCK_TOKEN has a character in it that no token") as error:
            token_around({"PENSTOCK_TOKEN": text})
        assert TOKEN not in str(error.value)
    file.chmod(0o644)
    token, warning = token_around({"PENSTOCK_TOKEN_FILE": str(file)})
    assert token == TOKEN
    assert warning is not None
