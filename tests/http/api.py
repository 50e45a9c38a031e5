"""A caller of the HTTP API for tests: requests over a real socket, answers as they came."""

import http.client
import json
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from tests.server.harness import WAIT_SECONDS

NDJSON = "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"


class Reply(NamedTuple):
    """One answer."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:  # whatever the API said
        return json.loads(self.body)

    @property
    def problem(self) -> str:
        """The name of the problem that this is."""
        assert self.headers["content-type"] == "application/problem+json", self
        fields = self.json
        assert fields["status"] == self.status, self
        assert fields["detail"], self
        return str(fields["type"].removeprefix("urn:penstock:"))


class Api:
    """One connection to the API of a broker."""

    def __init__(
        self,
        port: int,
        token: str | None = None,
        host: str = "127.0.0.1",
        seconds: float = WAIT_SECONDS,
    ) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=seconds)
        self._token = token

    def __enter__(self) -> "Api":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        **query: Any,  # whatever can be written in a query
    ) -> Reply:
        """Ask, and wait for the whole answer. A dict is sent as JSON; a query value of None is left out."""
        sent = dict(headers or {})
        if isinstance(body, dict):
            body = json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        if self._token is not None:
            sent.setdefault("Authorization", f"Bearer {self._token}")
        words = {
            name.rstrip("_"): str(value).lower() if isinstance(value, bool) else value
            for name, value in query.items()
            if value is not None
        }
        target = path + (f"?{urlencode(words)}" if words else "")
        self._connection.request(method, target, body, sent)
        response = self._connection.getresponse()
        content = response.read()
        return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, content)

    def get(self, path: str, **query: Any) -> Any:
        """The JSON of an answer that must be a success."""
        reply = self.ask("GET", path, **query)
        assert reply.status == 200, reply
        return reply.json

    def post(self, path: str, body: bytes | dict[str, Any] | None = None, **query: Any) -> Any:
        reply = self.ask("POST", path, body, **query)
        assert reply.status == 200, reply
        return reply.json

    def send(self, queue: str, *messages: bytes, **query: Any) -> list[int]:
        """Messages one by one; their offsets."""
        path = f"/v1/queues/{quote(queue, safe='')}/messages"
        return [self.post(path, message, **query)["offset"] for message in messages]
