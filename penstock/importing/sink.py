"""Sink: messages into a queue of Penstock, a transaction each time, with a receipt.

A batch is staged in parts and committed under its key, which counts once however often it is asked. Where
Penstock has no room, it is asked again until it has; where it is away, for as long as clients look for it.

How it fails: `Refused` and `ConnectionLost` of the client. Then it is not known whether the batch is stored,
and `committed` tells, later.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from penstock.client.errors import Refused
from penstock.client.http_connection import target_of_request
from penstock.client.http_core import Answer, HttpCore, Request, json_value
from penstock.client.http_line import HttpLine
from penstock.client.options import ClientOptions, Options
from penstock.client.url import parse_url
from penstock.errors import Misuse, PenstockError
from penstock.importing.source import Message, log
from penstock.model.headers import encode_headers
from penstock.model.policy import QueueNameError, check_queue_name

PART_BYTES: Final = 4 << 20
"""Of lines in one request: a broker takes 16 MiB by default, and one message may be as large as that."""
FULL: Final = ("queue-full", "disk-full")


class Unmovable(PenstockError):
    """A message that no queue takes as it is."""


class Sink:
    def __init__(self, url: str, queue: str, options: ClientOptions) -> None:
        try:
            check_queue_name(queue)
        except QueueNameError as error:
            raise Misuse(f"{error}; behind the URL, say in which QUEUE messages are to be") from None
        self.queue = queue
        chosen = Options.of(**options)
        self._core = HttpCore(chosen)
        self._line = HttpLine(parse_url(url, "http"), chosen)
        self._line.open()

    def close(self) -> None:
        self._line.close()

    def committed(self, key: str) -> bool:
        """Whether a transaction counts. If not, it never will: what is staged of it is dropped."""
        target = target_of_request(("v1", "transactions", key), {})
        return bool(self._ask("DELETE", target, self._core.headers)["state"] == "committed")

    def store(self, key: str, messages: Sequence[Message], wait: Callable[[], None]) -> Mapping[str, Any]:
        """Store them, once; where they are. `wait` passes some time while there is no room, or raises."""
        stages: list[str] = []
        is_told = False
        while True:
            try:
                stages = stages or [self._stage(key, lines) for lines in self._parts(messages)]
                (stored,) = self._commit(key, stages)
            except Refused as error:
                if error.name == "stage-not-found":  # it has waited for longer than stages are kept
                    stages = []
                elif error.name not in FULL:
                    raise
                if not is_told:
                    log.warning("%s; waiting for room", error)
                is_told = True
                wait()
            else:
                return stored

    def _parts(self, messages: Sequence[Message]) -> Iterator[bytes]:
        part = bytearray()
        for message in messages:
            line = self._line_of(message)
            if part and len(part) + len(line) > PART_BYTES:
                yield bytes(part)
                part.clear()
            part += line
        yield bytes(part)

    def _line_of(self, message: Message) -> bytes:
        try:
            headers = encode_headers(message.headers).decode() or None
        except ValueError as error:
            raise Unmovable(f"message {message.identity or message.handle}: {error}") from None
        terms = {"ttl": message.ttl, "delay": message.delay, "retries": message.retries, "headers": headers}
        more = "".join(f',"{name}":{value}' for name, value in terms.items() if value is not None)
        return f"{{{json_value(message.body)}{more}}}\n".encode()

    def _stage(self, key: str, lines: bytes) -> str:
        target = target_of_request(("v1", "stages"), {"transaction": key, "queue": self.queue})
        headers = {**self._core.headers, "Content-Type": "application/x-ndjson"}
        return str(self._ask("POST", target, headers, lines)["stage"])

    def _commit(self, key: str, stages: list[str]) -> list[dict[str, Any]]:
        headers = {**self._core.headers, "Content-Type": "application/json"}
        target = target_of_request(("v1", "transactions"), {})
        body = json.dumps({"transaction": key, "stages": stages}).encode()
        stored: list[dict[str, Any]] = self._ask("POST", target, headers, body)["stored"]
        return stored

    def _ask(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None = None) -> Answer:
        """All of it can be asked again, and is."""
        return self._line.ask(Request(method, target, headers, body, patient=True))
