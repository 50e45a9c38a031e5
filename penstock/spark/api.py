"""Broker: the HTTP API of a broker, as Spark's driver and executors ask it.

A call is made again where the connection breaks or the broker says that it cannot do it now, with pauses
that grow, until `retry_seconds` have passed since it last answered: a broker that restarts does not end a
query. Every call here may be repeated: reading changes nothing, and what writes is idempotent by its key.

Where the URL names several front-ends of a cluster, the first that answers is asked. One that does not, or
says that it cannot, is passed over: at once where the connection is refused, otherwise after `PASS_SECONDS`,
and for `AVOID_SECONDS` all of this process ask the others first. A list of which one of them has not told its
part is asked for again, and so is what ends before the end that another one has told, as with one that leads
no more and does not know it: nothing is taken for gone that somebody has.

Rules that always hold:
  * One connection, used by one thread at a time and kept open between calls. One that the broker has closed
    meanwhile is found out before anything is written. `ask_all` is for many questions at once.
  * A `Broker` can be pickled, and arrives without its connection.
  * Only `stream` does not repeat by itself: who reads a body knows from where to go on (`reading.py`).

How it fails, always with one line that a person can act on: `Unreachable` where nobody has answered for too
long, `Refused` where the broker has said no. `Interrupted` is for those who try again themselves.
"""

import http.client
import json
import logging
import math
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.client.errors import reason_of
from penstock.client.http_connection import HttpConnection, target_of_request
from penstock.client.url import parse_url
from penstock.common.address import Address
from penstock.common.secret_file import TOKEN_VARIABLE
from penstock.errors import PenstockError
from penstock.spark.options import RETRY_SECONDS_DEFAULT

if TYPE_CHECKING:
    import pyarrow as pa

CONNECT_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 60.0
"""Between two bytes of an answer; the broker itself may keep a bulk read waiting for half of that."""

PAUSE_SECONDS_MIN: Final = 0.1
PAUSE_SECONDS_MAX: Final = 2.0
PASS_SECONDS: Final = 3.0
"""How long one of several brokers has to take a connection, and to say something then."""

PASS_ANSWER_SECONDS: Final = 10.0
"""And to answer a question that asks for little. Only questions: what writes may take longer, and no other is
asked to do it while it may be done yet."""

AVOID_SECONDS: Final = 30.0
AT_ONCE_MAX: Final = 8
"""Questions of one who plans; the logs of a cluster answer side by side."""

FIRST_CONTACT_SECONDS: Final = 5.0
"""Nobody who has mistyped a URL should wait longer than this to be told so."""

BUSY: Final = frozenset({502, 503, 504})
"""Statuses of a broker, or of a proxy before it, that may be better in a moment."""

FULL: Final = frozenset({429, 507})

JSON_MEDIA: Final = "application/json"
ARROW_MEDIA: Final = "application/vnd.apache.arrow.stream"
_URN: Final = "urn:penstock:"

_T = TypeVar("_T")
_R = TypeVar("_R")
Answer = Any  # what the JSON of an answer says; docs/http.md has every shape

log = logging.getLogger("penstock.spark")

_failed_at: dict[str, float] = {}  # by address: when it did not answer; for all of this process


class BrokerError(PenstockError):
    """The base of what goes wrong between Spark and a broker."""


class Interrupted(BrokerError):
    """The connection broke, or the broker cannot do it now. Worth another try."""


class NoLeader(Interrupted):
    """A front-end has answered; nobody leads a log of its cluster, or whoever does cannot be reached from it.
    That passes."""


class Unreachable(BrokerError):
    """Nobody has answered for as long as somebody was willing to wait."""


class Refused(BrokerError):
    """The broker says no. `name` is that of the problem, `fields` are all that it says."""

    def __init__(self, text: str, status: int, name: str, fields: dict[str, Any]) -> None:
        super().__init__(text)
        self.status = status
        self.name = name
        self.fields = fields


class RefusedForNow(Refused):
    """The same, where waiting may help: a queue or a disk is full."""


class Patience:
    """How long somebody goes on trying: pauses that grow, until nobody has answered for `seconds`; or for
    `contact_seconds`, unless it is for a leader that a cluster has no other soon."""

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        *,
        contact_seconds: float = math.inf,
        advice: str = "Is the broker running, and is the option url right?",
    ) -> None:
        self._seconds = seconds
        self._contact_seconds = contact_seconds
        self._advice = advice
        self._clock = clock
        self._sleep = sleep
        self._failing_since: float | None = None
        self._pause = PAUSE_SECONDS_MIN

    def succeeded(self) -> None:
        """Somebody has answered: the time begins anew."""
        self._failing_since = None
        self._pause = PAUSE_SECONDS_MIN

    def failed(self, error: "Interrupted | Refused") -> None:
        """Returns when it is time for another try; Unreachable where there has been time enough.

        A no that may change is raised itself.
        """
        now = self._clock()
        seconds = self._seconds if isinstance(error, NoLeader) else min(self._seconds, self._contact_seconds)
        if self._failing_since is None:
            self._failing_since = now
            if seconds:  # Else nobody tries again.
                log.warning("%s; trying again for up to %g s", error, seconds)
        left = self._failing_since + seconds - now
        if left <= 0 and isinstance(error, Refused):
            raise error
        if left <= 0:
            raise Unreachable(f"{error}; tried for {seconds:g} s. {self._advice}") from None
        self._sleep(min(self._pause, left))
        self._pause = min(2 * self._pause, PAUSE_SECONDS_MAX)


class Broker:
    def __init__(
        self,
        url: str,
        token: str | None = None,
        retry_seconds: float = RETRY_SECONDS_DEFAULT,
        contact_seconds: float = math.inf,
    ) -> None:
        self.url = url
        self.token = token
        self.retry_seconds = retry_seconds
        self.contact_seconds = contact_seconds
        self._target = parse_url(url, "http")
        self._is_several = len(self._target.addresses) > 1
        self._at = self._target.addresses[0]  # who is asked
        self._preferred = ""
        self._http = HttpConnection(PASS_SECONDS if self._is_several else CONNECT_SECONDS, ANSWER_SECONDS)

    def __reduce__(self) -> tuple[Any, ...]:
        return Broker, (self.url, self.token, self.retry_seconds, self.contact_seconds)

    def in_haste(self) -> "Broker":
        """The same broker, for the first contact with it: gives up sooner."""
        return Broker(self.url, self.token, self.retry_seconds, FIRST_CONTACT_SECONDS)

    def close(self) -> None:
        self._http.close()

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(map(str, self._target.addresses))

    @property
    def at(self) -> str:
        """Who is asked, or was the last time."""
        return str(self._at)

    def prefer(self, address: str) -> None:
        """Ask that one of several first, from now on."""
        self._preferred = address
        if address and address != self.at:
            self.close()

    # --- calls -------------------------------------------------------------------------------------

    def get(self, *segments: str, **query: object) -> Answer:
        """What is at an address below /v1; parameters that are None are left out."""
        return self.call("GET", segments, query)

    def put(self, *segments: str, fields: dict[str, Any]) -> Answer:
        return self.call("PUT", segments, {}, json.dumps(fields).encode(), JSON_MEDIA)

    def post(self, *segments: str, fields: dict[str, Any], **query: object) -> Answer:
        return self.call("POST", segments, query, json.dumps(fields).encode(), JSON_MEDIA)

    def delete(self, *segments: str) -> Answer:
        return self.call("DELETE", segments, {})

    def call(
        self,
        method: str,
        segments: tuple[str, ...],
        query: dict[str, object],
        body: bytes | memoryview | None = None,
        media: str = JSON_MEDIA,
    ) -> Answer:
        """The JSON of the answer (None where it has no body), however often it takes to get one."""
        target = _target(segments, query)
        seconds = PASS_ANSWER_SECONDS if self._is_several and method == "GET" else ANSWER_SECONDS
        patience = Patience(self.retry_seconds, contact_seconds=self.contact_seconds)
        while True:
            try:
                with self._exchange(method, target, body, media, seconds) as response:
                    content = response.read()
                answer = self._json(response.status, content) if content else None
                if method == "GET":
                    self._check_whole(answer)
            except Interrupted as error:
                patience.failed(error)
                continue
            return answer

    def _check_whole(self, answer: Answer) -> None:
        """Of a cluster with several logs; what such an answer does not tell is not gone."""
        missing = answer.get("missing") if isinstance(answer, dict) else None
        if missing:
            # Another one may reach whom this one does not.
            raise self.passed_over(f"no answer from {', '.join(missing)}")

    def passed_over(self, why: str) -> NoLeader:
        """The error of an answer that another one may have better: it is asked first from now on."""
        _failed_at[self.at] = time.monotonic()
        self.close()
        return NoLeader(f"{self._where}: {why}")

    @property
    def is_several(self) -> bool:
        """Whether there is another one to ask."""
        return self._is_several

    @contextmanager
    def stream(self, *segments: str, **query: object) -> "Iterator[Body]":
        """The body of an answer, to be read piece by piece. Interrupted where that breaks."""
        with self._exchange("GET", _target(segments, query), None, "") as response:
            yield Body(response)

    # --- one exchange ------------------------------------------------------------------------------

    @contextmanager
    def _exchange(
        self,
        method: str,
        target: str,
        body: bytes | memoryview | None,
        media: str,
        seconds: float = ANSWER_SECONDS,
    ) -> Iterator[http.client.HTTPResponse]:
        """A request and the answer to it, if that is not a no. Leaving before its end ends the connection."""
        headers = {"Content-Type": media} if body is not None else {}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        whole = False
        try:
            response = self._present().ask(method, target, body, headers, seconds)
            if response.status >= 400:
                raise self._no(response.status, response.read())
            yield response
            whole = response.isclosed()
        except ssl.SSLCertVerificationError as error:
            raise BrokerError(
                f"{self._where}: the certificate there cannot be trusted ({error.verify_message}); "
                "SSL_CERT_FILE can name a file with who has signed it"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            _failed_at[str(self._at)] = time.monotonic()
            raise Interrupted(f"{self._where}: no broker answers there ({_why(error, seconds)})") from None
        except Interrupted:
            _failed_at[str(self._at)] = time.monotonic()
            raise
        finally:
            if not whole:
                self.close()

    @property
    def _where(self) -> str:
        """Who is asked, as people write it."""
        return self._name_of(self._at) if self._is_several else self.url

    def _name_of(self, address: Address) -> str:
        return f"{'https' if self._target.tls else 'http'}://{address}"

    def _present(self) -> HttpConnection:
        """A connection that is there, as far as can be seen."""
        if self._http.is_open:
            return self._http
        if not self._is_several:
            self._open(self._at)
            return self._http
        whys: list[str] = []
        for address in sorted(self._target.addresses, key=self._rank):
            try:
                self._open(address)
                # Whoever takes a connection need not be alive enough to say something.
                self._http.ask("GET", "/healthz", None, {}, PASS_SECONDS).read()
            except ssl.SSLCertVerificationError:
                raise
            except (OSError, http.client.HTTPException) as error:
                self.close()
                _failed_at[str(address)] = time.monotonic()
                whys.append(f"{self._name_of(address)} ({_why(error, PASS_SECONDS)})")
                continue
            _failed_at.pop(str(address), None)
            return self._http
        raise Interrupted(f"no broker answers: {', '.join(whys)}")

    def _rank(self, address: Address) -> tuple[float, bool]:
        """Of those that are avoided, first the one that has had most time to get well."""
        failed_at = _failed_at.get(str(address), -math.inf)
        is_avoided = time.monotonic() - failed_at < AVOID_SECONDS
        return failed_at if is_avoided else -math.inf, str(address) != self._preferred

    def _open(self, address: Address) -> None:
        self._at = address
        self._http.open(address, ssl.create_default_context() if self._target.tls else None)

    def _no(self, status: int, content: bytes) -> BrokerError:
        fields = self._json(status, content)
        detail = str(fields.get("detail", f"status {status}")) if isinstance(fields, dict) else ""
        name = str(fields.get("type", "")).removeprefix(_URN) if isinstance(fields, dict) else ""
        if status in BUSY:
            return (NoLeader if name == "no-leader" else Interrupted)(f"{self._where}: {detail}")
        if status in (401, 403):
            detail += f"; the option token says who you are, or {TOKEN_VARIABLE} where the driver runs"
        kind = RefusedForNow if status in FULL else Refused
        return kind(f"{self._where}: {detail}", status, name, fields)

    def _json(self, status: int, content: bytes) -> Answer:
        try:
            return json.loads(content)
        except ValueError:
            if status in BUSY:
                return {}
            raise BrokerError(
                f"{self._where}: whoever answers there is no Penstock broker's HTTP API (status {status}); "
                "say with the option url where that is"
            ) from None


class Body:
    """The body of an answer, as a file that pyarrow reads: every piece straight from the socket."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response
        self.headers = response.headers
        self.closed = False
        self.failure: Exception | None = None
        """What broke it. Readers of files make errors of their own of it."""

    def read(self, size: int = -1) -> "bytes | memoryview | pa.Buffer":
        """So many bytes, fewer only at the end."""
        import pyarrow as pa

        try:
            if size < 0:
                return self._response.read()
            # Arrow's memory is not filled with zeros first, and what one batch lets go of the next one gets.
            piece = pa.allocate_buffer(size)
            view, filled = memoryview(piece), 0
            while filled < size:
                count = self._response.readinto(view[filled:])
                if not count:
                    return view[:filled]
                filled += count
        except (OSError, http.client.HTTPException) as error:
            self.failure = error
            raise
        return piece

    def close(self) -> None:
        self.closed = True


def ask_all(broker: Broker, ask: Callable[[Broker, _T], _R], wanted: Sequence[_T]) -> list[_R]:
    """What is answered to each of many questions, of which several are asked at a time."""
    count = min(AT_ONCE_MAX, len(wanted))
    if count < 2:
        return [ask(broker, one) for one in wanted]

    def some(first: int) -> list[_R]:
        with closing(copy(broker)) as its:
            return [ask(its, one) for one in wanted[first::count]]

    with ThreadPoolExecutor(count) as threads:
        answers = list(threads.map(some, range(count)))
    return [answers[at % count][at // count] for at in range(len(wanted))]


def _target(segments: tuple[str, ...], query: dict[str, object]) -> str:
    return target_of_request(("v1", *segments), query)


def _why(error: Exception, seconds: float) -> str:
    if isinstance(error, (http.client.RemoteDisconnected, http.client.IncompleteRead)):
        return "it has closed the connection"
    if isinstance(error, TimeoutError) and not error.errno:
        return f"nothing came for {seconds:g} s"
    return reason_of(error)
