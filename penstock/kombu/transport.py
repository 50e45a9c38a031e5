"""A connection of kombu to a broker: its channels, the leases of what they hold, and what drives it.

    with an event loop    (a Celery worker) the sockets are the hub's, and every turn of it asks for what
                          there is room for: nothing polls, nothing blocks but what is published
    without one           `drain_events` waits for the same sockets

A thread extends the leases of all that is held, at a third of their time, also while the thread that
consumes is busy with a task; and it says again which queues end with this connection. So what a process
holds that was killed or stopped comes again when its lease ends, and nothing else does.

Rules that always hold:
  * A call that publishes returns when the message is on the disk.
  * What fails with the network, or with a broker that stops, is one of `connection_errors`: kombu connects
    again. What the broker refuses is one of `channel_errors`, and is not tried again.
  * A child process has nothing of its parent's connection.
"""

import atexit
import logging
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Final

from kombu.exceptions import ChannelError
from kombu.transport import virtual
from kombu.utils.eventio import READ, poll

from penstock.client.fork import begin_anew_after_fork
from penstock.client.http_connection import target_of_request
from penstock.client.options import Options, tls_context
from penstock.client.url import PORTS, parse_url
from penstock.common.address import TcpAddress
from penstock.kombu.bindings import EXCHANGE_TYPES, Binding, Bindings
from penstock.kombu.channel import Channel as PenstockChannel
from penstock.kombu.line import Answer, Line, Place
from penstock.kombu.settling import Call, Delivery, Outbox

log = logging.getLogger(__name__)

LEASE_SECONDS: Final = 60.0
TRANSIENT: Final = (408, 429)
"""Refusals for the moment, beside those of 500 and more: the request came too slowly, the queue is full."""

_all: "Final[weakref.WeakSet[Transport]]" = weakref.WeakSet()


class Transport(virtual.Transport):
    Channel = PenstockChannel
    default_port = PORTS["http"]
    driver_type = driver_name = "penstock"
    implements = virtual.Transport.implements.extend(asynchronous=True, exchange_type=EXCHANGE_TYPES)
    connection_errors = (*virtual.Transport.connection_errors, OSError)
    recoverable_connection_errors = connection_errors
    recoverable_channel_errors = ()

    channels: list[PenstockChannel]
    _avail_channels: list[PenstockChannel]

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        options = client.transport_options
        self.lease_seconds = float(options.get("lease", LEASE_SECONDS))
        self.retries: int | None = options.get("retries")  # of what is published; None: as the queue has it
        self._steps = sorted(options.get("priority_steps", [0]))
        self.ready: deque[tuple[PenstockChannel, str, Any]] = deque()  # channel, queue, message
        self.declared: dict[str, int | None] = {}  # queues, and the time to live of what is in them
        self.bindings = Bindings(self.ask)
        self._ending: set[str] = set()  # queues that end with this connection, or with their last consumer
        self._place: Place | None = None
        self._is_lost = False  # and nothing more is tried
        self._lock = threading.Lock()  # of the line for calls
        self._calls: Line | None = None
        self._settles: Line | None = None
        self._outbox = Outbox()
        self._hub: Any = None
        self._watched: dict[int, tuple[Line, Callable[[], None]]] = {}  # by the socket's number
        self._kept: threading.Event | None = None  # set when the thread is to end
        begin_anew_after_fork(self)
        _all.add(self)

    def forked(self) -> None:
        """This is a child: whatever is open or held is its parent's."""
        for line in self._lines():
            line.close(shut=False)
        for channel in self.channels:
            channel.forked()
        self.channels, self._avail_channels = [], []
        self.ready.clear()
        self._watched.clear()
        self._lock = threading.Lock()
        self._outbox = Outbox()
        self._hub = self._kept = None
        self._ending.clear()
        self.bindings.forked()

    # --- kombu's side ------------------------------------------------------------------------------

    def establish_connection(self) -> Any:
        self._place = place_of(self.client)
        self._calls, self._settles = Line(self._place), self.line()
        try:
            self.ask("GET", "queues", query={"limit": 1})
        except BaseException:
            self._calls.close()
            raise
        return super().establish_connection()

    def close_connection(self, connection: Any) -> None:
        """Give back what is held, and end. What does not get through comes back by the ends of the leases."""
        if self._kept is not None:
            self._kept.set()
        for channel in list(self.channels):
            channel.close()
        self._avail_channels.clear()
        with self.quietly("settle what is held"):
            self._flush()
        for queue in list(self._ending):
            with self.quietly("delete a queue"):
                self.delete(queue, force=False)
        if self._hub is not None:
            self._hub.on_tick.discard(self._turn)
        for line in self._lines():
            line.close()
        self._hub = None

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        self._hub = loop
        loop.on_tick.add(self._turn)

    def drain_events(self, connection: Any, timeout: float | None = None, **_: Any) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._tick()
            if self._deliver_one():
                return
            if not self._wait(deadline) and deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError("no message within the time given")

    # --- the broker's side -------------------------------------------------------------------------

    def ask(
        self,
        method: str,
        *segments: str,
        query: Mapping[str, object] | None = None,
        body: bytes = b"",
        media: str = "",
        allow: Iterable[int] = (),
    ) -> Answer:
        """What the broker answers; it may say no with the statuses that are allowed."""
        target = target_of_request(("v1", *segments), query or {})
        with self._lock:
            if self._calls is None or self._is_lost:
                raise ConnectionError("there is no connection to the broker any more")
            return self.checked(self._calls.ask(method, target, body, media), allow)

    @staticmethod
    def checked(answer: Answer, allow: Iterable[int] = ()) -> Answer:
        if answer.status < 400 or answer.status in allow:
            return answer
        try:
            detail = answer.fields["detail"]
        except (ValueError, KeyError, TypeError):
            detail = f"the broker answers {answer.status}; is this the right port?"
        if answer.status >= 500 or answer.status in TRANSIENT:
            raise ConnectionError(detail)
        raise ChannelError(detail, (0, 0), "", str(answer.status))

    def line(self) -> Line:
        assert self._place is not None
        return Line(self._place, self._unwatch)

    def send(
        self,
        line: Line,
        action: str,
        name: str,
        query: Mapping[str, object],
        readable: Callable[[], None],
        body: bytes = b"",
        wait: float = 0.0,
    ) -> None:
        """Ask a queue for something, and go on; `readable` is called when some of the answer has come."""
        media = "application/json" if body else ""
        line.send("POST", target_of_request(("v1", "queues", name, action), query), body, media, wait)
        number = line.fileno()
        if number not in self._watched and self._hub is not None:
            self._hub.add_reader(number, self._readable, number)
        self._watched[number] = line, readable

    # --- what channels say -------------------------------------------------------------------------

    def names(self, queue: str) -> dict[int, str]:
        """The queues of the broker that make one, by priority, the highest first."""
        lowest = self._steps[0]
        return {step: queue if step == lowest else f"{queue}.p{step}" for step in reversed(self._steps)}

    def declare(self, queue: str, *, ends: bool, ttl: int | None) -> None:
        self.declared[queue] = ttl
        if ends:
            self._ending.add(queue)
            self.bind("", "direct", queue, queue)
            self.keep_leases()

    def ttl_of(self, queue: str) -> int | None:
        """Of the messages in a queue, as far as is known here; in milliseconds."""
        return self.declared.get(queue) or self.bindings.ttl_of(queue)

    def bind(self, exchange: str, kind: str, key: str, queue: str) -> None:
        seconds = self.lease_seconds if queue in self._ending else None
        self.bindings.add(Binding(exchange, kind, key, queue, seconds, self.declared.get(queue)))

    def take_back(self, channel: PenstockChannel, queue: str | None = None) -> list[Any]:
        """What was not delivered yet, and will not be; of one queue, or of all."""
        mine = [it for it in self.ready if it[0] is channel and queue in (None, it[1])]
        for it in mine:
            self.ready.remove(it)
        return [message for _, _, message in mine]

    def consumed(self, queue: str) -> None:
        """A channel consumes it no more."""
        if queue in self._ending and not any(channel.consumes(queue) for channel in self.channels):
            self._flush()
            self.delete(queue, force=False)

    def delete(self, queue: str, *, force: bool) -> None:
        """Only an administrator may, where the broker has tokens."""
        self.bindings.remove_queue(queue)
        self.declared.pop(queue, None)
        for name in self.names(queue).values():
            answer = self.ask("DELETE", "queues", name, query={"force": force}, allow=(403, 404, 409))
            if answer.status != 409:  # Otherwise it is still in use, and is tried again at the end.
                self._ending.discard(queue)

    def settle(self, verdict: str, deliveries: Iterable[Delivery], **more: object) -> None:
        self._outbox.add(verdict, deliveries, **more)
        if self._hub is None:
            self._tell_all()

    def _tell_all(self) -> None:
        for _ in self._outbox.tell_all(self._tell):
            pass  # `Call` has said it

    def _tell(self, call: Call) -> Any:
        return self.ask(
            "POST", "queues", call.name, "settle", body=call.body, media="application/json"
        ).fields

    # --- what drives it ----------------------------------------------------------------------------

    def _turn(self) -> None:
        """The event loop's call, before it waits."""
        self._tick()
        while self._deliver_one():
            pass

    def _readable(self, number: int) -> None:
        """The event loop's call, when something has come."""
        line, readable = self._watched[number]
        if not line.is_waiting:
            line.close()  # The broker has closed what was not used for long.
            return
        readable()
        while self._deliver_one():
            pass

    def _tick(self) -> None:
        """Whatever there is room or cause for is asked."""
        for channel in list(self.channels):
            channel.pump()
        self._pump_settling()
        now = time.monotonic()
        for line, _ in list(self._watched.values()):
            if line.is_waiting and now > line.due:
                line.close()
                raise ConnectionError("the broker has not answered in time")

    def _pump_settling(self) -> None:
        assert self._settles is not None
        call = None if self._settles.is_waiting else self._outbox.next_call()
        if call is not None:
            self.send(self._settles, "settle", call.name, {}, partial(self._settled, call), call.body)

    def _settled(self, call: Call) -> None:
        assert self._settles is not None
        answer = self._settles.receive()
        if answer is not None:
            call.gone(self.checked(answer).fields)
            self._pump_settling()

    def _deliver_one(self) -> bool:
        if not self.ready:
            return False
        channel, queue, message = self.ready.popleft()
        channel.deliver(queue, message)
        return True

    def _wait(self, deadline: float | None) -> bool:
        """Until something has come, or the time is over, or an answer is late."""
        waiting = [(number, line) for number, (line, _) in self._watched.items() if line.is_waiting]
        ends = [line.due for _, line in waiting] + ([] if deadline is None else [deadline])
        seconds = max(min(ends) - time.monotonic(), 0.0) if ends else 1.0
        with closing(poll()) as poller:
            for number, _ in waiting:
                poller.register(number, READ)
            numbers = [number for number, _ in poller.poll(seconds) or ()]
        for number in numbers:
            if number in self._watched:  # One may end the other.
                self._watched[number][1]()
        return bool(numbers)

    def _unwatch(self, number: int) -> None:
        if self._watched.pop(number, None) is not None and self._hub is not None:
            self._hub.remove_reader(number)

    # --- leases ------------------------------------------------------------------------------------

    def keep_leases(self) -> None:
        """From now on, there is something to be extended, or may be."""
        if self._kept is None:
            self._kept = threading.Event()
            arguments = weakref.ref(self), self._kept, self.lease_seconds / 3
            threading.Thread(target=_keep, args=arguments, name="penstock leases", daemon=True).start()

    def extend(self) -> None:
        held = {it.id: it for channel in list(self.channels) for it in list(channel.qos.held.values())}
        extending = Outbox()
        extending.add("extend", (it for it in held.values() if not it.is_gone), lease=self.lease_seconds)
        try:
            for message_id in extending.tell_all(self._tell):
                held[message_id].is_gone = True
        finally:
            self.bindings.renew()

    # --- the end -----------------------------------------------------------------------------------

    def _flush(self) -> None:
        """All verdicts are with the broker when this returns."""
        assert self._settles is not None
        if self._settles.is_waiting and self._settles.receive(5.0) is None:
            raise ConnectionError("the broker has not answered in time")
        self._tell_all()

    def _lines(self) -> list[Line]:
        own = [line for line in (self._calls, self._settles) if line is not None]
        return own + [line for line, _ in self._watched.values() if line not in own]

    @contextmanager
    def quietly(self, what: str) -> Iterator[None]:
        """For the end of something, which has to end also where nobody listens any more."""
        try:
            yield
        except self.channel_errors as error:
            log.info("could not %s: %s", what, error)
        except self.connection_errors as error:
            log.info("could not %s: %s", what, error)
            self._is_lost = True


def place_of(client: Any) -> Place:
    """Where the URL of a kombu connection leads to: penstock://:TOKEN@HOST:PORT, or with TLS penstocks://."""
    given = client.ssl if isinstance(client.ssl, dict) else {}
    if (client.virtual_host or "/") != "/":
        raise ValueError(
            f"there are no virtual hosts here: leave {client.virtual_host!r} out of the broker's URL"
        )
    options = Options.of(
        token=client.password,
        connect_seconds=client.connect_timeout or Options().connect_seconds,
        cafile=given.get("ca_certs"),
        certfile=given.get("certfile"),
        keyfile=given.get("keyfile"),
        verify=given.get("cert_reqs", ssl.CERT_REQUIRED) != ssl.CERT_NONE,
    )
    address = TcpAddress(client.hostname or "localhost", client.port or Transport.default_port)
    scheme = "https" if client.ssl or client.transport_cls == "penstocks" else "http"
    target = parse_url(f"{scheme}://{address}", "http")
    headers = [f"Host: {address}", "User-Agent: penstock.kombu"]
    if options.token is not None:
        headers.append(f"Authorization: Bearer {options.token}")
    return Place(address, tls_context(target, options), tuple(headers), options.connect_seconds)


def _keep(transport_ref: "weakref.ref[Transport]", ended: threading.Event, seconds: float) -> None:
    while not ended.wait(seconds):
        transport = transport_ref()
        if transport is None:
            return
        try:
            transport.extend()
        except Exception as error:  # noqa: BLE001 - the next time it may work; if not, the leases end
            log.warning("leases were not extended: %s", error)
        del transport


@atexit.register
def _close_all() -> None:
    """Nobody closes the connections of a program that ends, and their queues would stay."""
    for transport in list(_all):
        if transport.channels:
            transport.close_connection(transport)
