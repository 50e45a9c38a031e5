"""Gate: a way to a broker's API at which a test can have things happen, between a request and its answer.

Every request goes through the hooks `before` and `after`, in the thread that carries it. A hook may do what
it likes (kill somebody, for one) and may raise `Cut`: then the connection ends without an answer.
"""

import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.server.harness import WAIT_SECONDS, BrokerProcess

STAGE = "POST /v1/stages"
COMMIT = "POST /v1/transactions"


class Cut(Exception):
    """The connection ends here."""


Hook = Callable[[str], None]


class Faults:
    """Hooks for some requests, each used once: the first for the first request of that kind, and so on."""

    def __init__(self, *faults: tuple[str, Hook | None]) -> None:
        self._faults = list(faults)
        self._lock = threading.Lock()

    def __call__(self, what: str) -> None:
        with self._lock:
            found = next((at for at, (name, _) in enumerate(self._faults) if name == what), None)
            hook = self._faults.pop(found)[1] if found is not None else None
        if hook is not None:
            hook(what)

    @property
    def left(self) -> list[str]:
        return [name for name, hook in self._faults if hook is not None]


class Gate:
    """See the module's docstring.

    `seen` are the requests that came; of those that stage something, `keys` are their transactions, and
    `sizes` how many bytes they had.
    """

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.before: Hook = _nothing
        self.after: Hook = _nothing
        self.seen: list[str] = []
        self.keys: list[str] = []
        self.sizes: list[int] = []
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                gate._pass(self)

            def do_POST(self) -> None:
                gate._pass(self)

            def do_DELETE(self) -> None:
                gate._pass(self)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """Whoever is killed leaves broken connections behind."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Gate":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.daemon_threads = True
        self._server.server_close()

    def count(self, what: str) -> int:
        return self.seen.count(what)

    def _pass(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        address = urlsplit(handler.path)
        what = f"{handler.command} {address.path}"
        self.seen.append(what)
        if what == STAGE:
            self.keys += parse_qs(address.query)["transaction"]
            self.sizes.append(len(body))
        try:
            self.before(what)
            status, content, media = self._ask(handler, body)
            self.after(what)
        except (Cut, OSError, http.client.HTTPException):
            handler.close_connection = True
            return
        handler.send_response(status)
        handler.send_header("Content-Type", media)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    def _ask(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, bytes, str]:
        headers = {"Content-Type": handler.headers.get("Content-Type", "")} if body else {}
        connection = http.client.HTTPConnection("127.0.0.1", self.broker.ports["http"], timeout=WAIT_SECONDS)
        try:
            connection.request(handler.command, handler.path, body or None, headers)
            response = connection.getresponse()
            return response.status, response.read(), response.headers["Content-Type"]
        finally:
            connection.close()


def _nothing(what: str) -> None:
    """What happens where nothing is to happen."""


def raising(fault: Callable[[], Any]) -> Hook:
    """A hook that does something and then ends the connection."""

    def hook(what: str) -> None:
        fault()
        raise Cut

    return hook
