"""Load on all front-ends of a site, and what must be true of it whatever happens to the site meanwhile.

On every front-end there are three senders, two of which wait for the receipt of what they sent before they go
on, and two consumers, which acknowledge what they get, all on one queue:

    rq      NOREPLY requests, a few at a time. What got no receipt is in doubt, and is not sent again.
    http    one message at a time, with a key of its own: what got no receipt is sent again until it has one
    phpmq   one message at a time, and no receipts: what was sent on a connection that was never lost is
            accepted
    phpmq, rq consumers     they connect again for as long as it takes

What must be true of it is said, and judged, in `verdict.py`.
"""

import contextlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from http.client import HTTPException
from itertools import count, pairwise
from typing import Final, TypeVar

import pyarrow.ipc

from penstock.client import ClientError, ClientOptions, HttpClient, RqClient
from penstock.client.http_line import UNAVAILABLE
from tests.cluster.processes import FrontEnd, Site
from tests.cluster.verdict import Record, judge
from tests.http.api import Api
from tests.server.doors import DOORS, Door
from tests.server.harness import number_of, numbered, until

RQ_MESSAGES: Final = 10
RECEIPTS_SOME: Final = 20
PATIENCE_SECONDS: Final = 45.0
"""A node that is killed is missed by the others after some seconds only."""

PACE_SECONDS: Final = 0.01
"""Between two sends: what is looked for are faults, and two cores have to run all of this."""

PAUSE_SECONDS: Final = 0.05
LOOK_SECONDS: Final = 0.25
CLIENT_OPTIONS: Final[ClientOptions] = {
    "operation_seconds": 8.0,
    "backoff_seconds_max": 0.2,
    "reconnect_seconds": 60.0,
}

C = TypeVar("C", RqClient, HttpClient)


class Load:
    """A context manager: leaving it ends all threads."""

    def __init__(self, site: Site, queue: str, pace_seconds: float = PACE_SECONDS) -> None:
        self._site = site
        self.queue = queue
        self.log: list[int] = []  # all of it, once it was judged
        self._pace_seconds = pace_seconds
        self._numbers = count()
        self._lock = threading.Lock()
        self.record = Record()
        self._receipts: dict[str, list[float]] = defaultdict(list)  # by sender: when it got one
        self._connections = count()
        self._sending_ends, self._consuming_ends = threading.Event(), threading.Event()
        self._faults: list[BaseException] = []
        self._senders = [
            self._thread(work, front, kind)
            for front in site.fronts
            for kind, work in (
                ("rq", self._send_rq),
                ("http", self._send_http),
                ("phpmq", self._send_phpmq),
            )
        ]
        self._consumers = [
            self._thread(self._consume, front, protocol)
            for front in site.fronts
            for protocol in ("phpmq", "rq")
        ]

    def _thread(self, work: Callable[[FrontEnd, str], None], front: FrontEnd, kind: str) -> threading.Thread:
        def guarded() -> None:
            try:
                with front.inside():
                    work(front, kind)
            except BaseException as error:  # noqa: BLE001 - told by `check`
                self._faults.append(error)

        return threading.Thread(target=guarded, name=f"{kind}@{front.name}")

    def __enter__(self) -> "Load":
        for thread in [*self._consumers, *self._senders]:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sending_ends.set()
        self._consuming_ends.set()
        for thread in [*self._senders, *self._consumers]:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive(), f"{thread.name} does not end"

    # --- threads ---------------------------------------------------------------------------------

    def _send_rq(self, front: FrontEnd, kind: str) -> None:
        losses = 0  # of its connection: another one may overtake what the last one had sent
        with self._connected(lambda: RqClient(front.url("rq"), **CLIENT_OPTIONS)) as client:
            while not self._sending_ends.is_set():
                numbers = [self.next_number() for _ in range(RQ_MESSAGES)]
                self.record.said[f"{kind}@{front.name} {losses}"] += numbers
                try:
                    client.send_many(self.queue, numbered(numbers))
                except ClientError as error:
                    losses += 1
                    doubtful = getattr(error, "positions", ()) or range(len(numbers))
                    numbers = [n for place, n in enumerate(numbers) if place not in set(doubtful)]
                    self._sending_ends.wait(PAUSE_SECONDS)
                self.note(f"{kind}@{front.name}", numbers)
                self._sending_ends.wait(self._pace_seconds)

    def _send_http(self, front: FrontEnd, kind: str) -> None:
        with self._connected(lambda: HttpClient(front.url("http"), **CLIENT_OPTIONS)) as client:
            said = self.record.said[f"{kind}@{front.name}"]
            number = self.next_number()
            while not self._sending_ends.is_set():
                said += [number] if said[-1:] != [number] else []
                try:
                    client.send(self.queue, numbered([number])[0], key=f"{self.queue}/{number}")
                except ClientError:
                    self._sending_ends.wait(PAUSE_SECONDS)
                    continue
                self.note(f"{kind}@{front.name}", [number])
                self._sending_ends.wait(self._pace_seconds)
                number = self.next_number()

    def _send_phpmq(self, front: FrontEnd, kind: str) -> None:
        losses = 0
        while not self._sending_ends.is_set():
            said = self.record.said[f"{kind}@{front.name} {losses}"]
            try:
                with contextlib.closing(DOORS[kind](front, self.queue)) as door:
                    while not self._sending_ends.wait(self._pace_seconds):
                        said.append(self.next_number())
                        door.send(said[-1:])
                    door.stored()
            except OSError:
                losses += 1
                self._sending_ends.wait(PAUSE_SECONDS)
            else:
                self.record.accepted.update(said)

    def next_number(self) -> int:
        number = next(self._numbers)
        self.record.sent[number] = time.monotonic()
        return number

    def note(self, sender: str, numbers: list[int]) -> None:
        if numbers:
            now = time.monotonic()
            with self._lock:
                self.record.confirmed.update(dict.fromkeys(numbers, now))
                self._receipts[sender].append(now)

    @contextlib.contextmanager
    def _connected(self, connect: Callable[[], C]) -> Iterator[C]:
        while True:
            try:
                client = connect()
            except ClientError:
                if self._sending_ends.wait(PAUSE_SECONDS):
                    raise
            else:
                break
        with client:
            yield client

    def _consume(self, front: FrontEnd, protocol: str) -> None:
        while not self._consuming_ends.is_set():
            try:
                door = DOORS[protocol](front, self.queue)
            except OSError:
                self._consuming_ends.wait(PAUSE_SECONDS)
                continue
            connection = next(self._connections)
            try:
                self._take(door, connection)
            except OSError:
                self.record.connections_lost.add(connection)
            finally:
                door.close()

    def _take(self, door: Door, connection: int) -> None:
        door.wire.socket.settimeout(LOOK_SECONDS)
        door.demand(50)
        while not self._consuming_ends.is_set():
            with contextlib.suppress(TimeoutError):
                got = door.collect(1)
                with self._lock:
                    for number in got:
                        self.record.deliveries[number].append(connection)
                door.ack()

    # --- what a test does with it ------------------------------------------------------------------

    def flows(self, fronts: list[FrontEnd] | None = None) -> None:
        """Every sender gets receipts again, some of them from now on."""
        names = {front.name for front in fronts or self._site.running}
        senders = [thread.name.split("@") for thread in self._senders]
        waiting = [f"{kind}@{name}" for kind, name in senders if name in names and kind != "phpmq"]
        before = {name: len(self._receipts[name]) for name in waiting}

        def flowing() -> bool:
            self._raise_faults()
            return all(len(self._receipts[name]) >= before[name] + RECEIPTS_SOME for name in waiting)

        until(flowing, f"receipts for {waiting}, after {before}", PATIENCE_SECONDS)

    def wait(self, seconds: float) -> None:
        """Go on for that long."""
        self._consuming_ends.wait(seconds)
        self._raise_faults()

    def lead_changed(self, since: float, until: float | None = None) -> None:
        """Between these moments the leader of then has handed out its last message; None: by now."""
        self.record.changes.append((since, until or time.monotonic()))

    def pauses(self, since: float, without: FrontEnd | None = None) -> str:
        """For how long each sender went without a receipt, at most, from that moment on; `without` those of a
        front-end."""
        longest = {}
        for name, moments in sorted(self._receipts.items()):
            if without is not None and name.endswith(f"@{without.name}"):
                continue
            seen = [since, *(moment for moment in moments if moment > since)]
            longest[name] = max((later - moment for moment, later in pairwise(seen)), default=math.inf)
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in longest.items())

    @property
    def connections_lost(self) -> int:
        return len(self.record.connections_lost)

    def check(self) -> str:
        """End, and judge. What is left in the queue is consumed first."""
        self._sending_ends.set()
        for thread in self._senders:
            thread.join(PATIENCE_SECONDS)
        front = self._site.running[0]

        def consumed() -> bool:
            info = front.ask(f"/v1/queues/{self.queue}", PATIENCE_SECONDS)
            return bool(info["ready"] == info["held"] == 0)

        until(consumed, "everything to be consumed", PATIENCE_SECONDS)
        self.__exit__()
        self._raise_faults()
        self.log = [number_of(value) for value in read_log(front, self.queue)]
        return judge(self.record, self.log)

    def _raise_faults(self) -> None:
        if self._faults:
            raise self._faults[0]


def read_log(front: FrontEnd, queue: str) -> list[bytes]:
    """All of it; who is about to hand it over ends in the middle of an answer."""
    values: list[bytes] = []

    def is_read() -> bool:
        try:
            with front.inside(), Api(front.ports["http"]) as api:
                path = f"/v1/queues/{queue}/log"
                reply = api.ask("GET", path, view="messages", columns="value", start=0)
        except (OSError, HTTPException):
            return False
        if reply.status == UNAVAILABLE:
            return False
        assert reply.status == 200, reply
        with pyarrow.ipc.open_stream(reply.body) as reader:
            values[:] = reader.read_all()["value"].to_pylist()
        return True

    until(is_read, f"the log of {queue} to be read", PATIENCE_SECONDS)
    return values
