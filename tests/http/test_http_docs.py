"""Every `curl` line of docs/http.md, sent to a real broker in order; answers as the page shows them."""

import argparse
import json
import re
import shlex
from collections.abc import Iterator
from urllib.parse import urlsplit

from penstock.http.problems import PROBLEMS
from tests.http.api import Api, Reply
from tests.http.conftest import StartBroker
from tests.server.harness import ROOT

PAGE = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
AN_ID = "5e7c1a00000100000100000000000000"
"""What stands on the page for the message that was taken last."""


def sent_by(command: str, api: Api) -> Reply:
    """What the command would ask, asked."""
    parser = argparse.ArgumentParser(prog="curl")
    parser.add_argument("-X", dest="method")
    parser.add_argument("-d", dest="body")
    parser.add_argument("-o", dest="file")
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("url")
    words = parser.parse_args(shlex.split(command)[1:])
    url = urlsplit(words.url)
    assert url.netloc == "127.0.0.1:9180"
    headers = dict(line.split(": ", 1) for line in words.headers)
    method = words.method or ("POST" if words.body is not None else "GET")
    body = words.body.encode() if words.body is not None else None
    return api.ask(method, url.path + (f"?{url.query}" if url.query else ""), body, headers)


def examples() -> Iterator[tuple[str, str]]:
    """Commands, each with the answer that the page shows for it, if any."""
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.rstrip("\n").split("\n")
            # An answer begins with a brace in the first column, after the line that names the URL.
            at = next(i for i, line in enumerate(lines) if "http://" in line) + 1
            yield "\n".join(lines[:at]), "\n".join(lines[at:])


def fits(shown: str, body: bytes) -> bool:
    """Whether an answer is what the page shows, where `…` stands for any value."""
    answer = json.loads(body)
    wanted = json.loads(shown.replace("…", '"…"'))
    return wanted.keys() == answer.keys() and all(
        value in ("…", answer[name]) for name, value in wanted.items()
    )


def test_every_line_of_the_page(start_broker: StartBroker) -> None:
    broker = start_broker()
    commands = list(examples())
    assert len(commands) > 15
    with Api(broker.ports["http"]) as api:
        taken = AN_ID
        for command, shown in commands:
            reply = sent_by(command.replace(AN_ID, taken), api)
            if "/take?" in command:
                taken = reply.json["messages"][0]["id"]
            if "no-such-queue" in command:
                assert reply.problem == "queue-not-found"
            else:
                assert reply.status in (200, 204), (command, reply)
            assert not shown or fits(shown, reply.body), (command, reply)


def test_every_problem_is_on_the_page() -> None:
    rows = re.findall(r"^\| ([0-9, ]+) \| ([^|]+) \|", PAGE, re.MULTILINE)
    shown = {name for _, names in rows for name in re.findall(r"`([a-z-]+)`", names)}
    assert shown == set(PROBLEMS)
    for statuses, names in rows:
        for name in re.findall(r"`([a-z-]+)`", names):
            assert str(PROBLEMS[name][0]) in statuses
