"""Admin: what the commands for operators share: where the broker's HTTP API is, and how it is asked.

Every one of these commands takes `--url`, `--token-file`, `--token`, `--cafile` and `--json`. `Admin` asks,
over the connection of the HTTP client, and returns what the JSON of the answer says. Names are encoded by
percents, so that a queue named `a/b` is one segment.

How it fails: `Refused` is the broker's own no, in its words; `Unreachable` says where nobody answers and what
to do. Both end a command with exit code 1, `Misuse` and `NotSupported` with 2.
"""

import argparse
import contextlib
import http.client
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final

from penstock.cli.messaging import TOKEN_HINT, URL_VARIABLE, add_token, find_url, token_of
from penstock.client.errors import ConnectionLost, Refused, TimedOut
from penstock.client.http_connection import target_of_request
from penstock.client.http_core import Answer, HttpCore, Request
from penstock.client.http_line import HttpLine
from penstock.client.options import Options
from penstock.client.url import PORTS, parse_url
from penstock.common.text import printable
from penstock.errors import PenstockError

_URL_DEFAULT: Final = f"http://127.0.0.1:{PORTS['http']}"
ANSWER_SECONDS: Final = 300.0
"""A redrive with a condition looks at many letters before it answers."""


class Unreachable(PenstockError):
    """Nobody answers there."""


def add_admin(parser: argparse.ArgumentParser) -> None:
    """The options of every command for operators."""
    parser.set_defaults(via=None, vias=("http",))
    parser.add_argument(
        "--url", metavar="URL", help=f"the broker's HTTP API (default: {URL_VARIABLE}, else {_URL_DEFAULT})"
    )
    add_token(parser, "a file with our token, where the broker has tokens")
    parser.add_argument("--cafile", metavar="FILE", help="TLS: who signs the broker's certificate")
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object a line")


def add_queue(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("queue", metavar="QUEUE", help="the queue")


def at_least(lowest: int) -> Callable[[str], int]:
    """The kind of an argument: a whole number."""

    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 18 and int(text) >= lowest):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {lowest} on")
        return int(text)

    return number


def say_objects(objects: Iterable[object]) -> None:
    """One JSON object a line."""
    for one in objects:
        print(json.dumps(one))


class Admin:
    """The HTTP API of the broker that a command line names."""

    def __init__(self, args: argparse.Namespace, answer_seconds: float = ANSWER_SECONDS) -> None:
        _, self.url = find_url(args)
        options = Options.of(
            token=token_of(args), cafile=args.cafile, operation_seconds=answer_seconds, reconnect_seconds=0
        )
        self._line = HttpLine(parse_url(self.url, "http"), options)
        self._core = HttpCore(options)
        self._missing: list[Any] = []  # of a cluster with several logs, as it was told last

    def __enter__(self) -> "Admin":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.close()

    def get(self, *segments: str, **query: object) -> Answer:
        """What is at an address below /v1; parameters that are None are left out."""
        return self._ask(self._core.get("v1", *segments, **query))

    def outside(self, segment: str) -> Answer:
        """What is at an address that is not below /v1."""
        return self._ask(self._core.get(segment))

    def post(self, *segments: str, fields: Mapping[str, Any] | None = None, **query: object) -> Answer:
        """Do something. It is not repeated by itself: the answer to the first try is the one that counts."""
        target = target_of_request(("v1", *segments), query)
        if fields is None:
            return self._ask(Request("POST", target, self._core.headers, b"", repeatable=False))
        headers = {**self._core.headers, "Content-Type": "application/json"}
        return self._ask(Request("POST", target, headers, json.dumps(fields).encode(), repeatable=False))

    def delete(self, *segments: str, **query: object) -> Answer:
        """Remove something; not repeated either."""
        target = target_of_request(("v1", *segments), query)
        return self._ask(Request("DELETE", target, self._core.headers, b"", repeatable=False))

    def pages(self, what: str, *segments: str, by: str, **query: object) -> Iterator[Answer]:
        """The items of a list that comes in pages; `by` is the parameter that says where a page begins."""
        following: object = query.pop(by, None)
        while True:
            page = self.get(*segments, **{**query, by: following})
            yield from page[what]
            following = page["next"]
            if following is None:
                return

    @contextlib.contextmanager
    def stream(self, *segments: str, **query: object) -> Iterator[http.client.HTTPResponse]:
        """An answer below /v1 that is read as it comes. Whoever leaves before its end breaks it off."""
        with self._told(), self._line.stream(self._core.get("v1", *segments, **query)) as response:
            yield response

    def _ask(self, request: Request) -> Answer:
        with self._told():
            answer = self._line.ask(request)
        missing = answer.get("missing")
        if isinstance(missing, list) and missing != self._missing:
            whose = printable(", ".join(map(str, missing)))
            print(f"penstock: without what {whose} has, which does not answer", file=sys.stderr, flush=True)
            self._missing = missing
        return answer

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong, in words for people."""
        try:
            yield
        except (ConnectionLost, TimedOut) as error:
            raise Unreachable(
                f"{self.url}: {printable(str(error))} (`penstock serve` starts one, --url says where it is)"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            why = printable(str(error)) or type(error).__name__
            raise Unreachable(f"{self.url}: the answer broke off before its end ({why}); try again") from None
        except Refused as error:
            detail = printable(error.detail)
            if error.status in (401, 403):
                detail = f"{self.url}: {detail} ({TOKEN_HINT})"
            elif not error.name:  # whoever has said that is no broker
                detail = f"{self.url}: {detail}"
            raise Refused(error.status, error.name, detail) from None
