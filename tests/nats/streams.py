"""What the tests of a cluster's log share: streams of their own, their records, a wire that can be cut."""

import random
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from penstock.log.jetstream.api import Stored
from penstock.log.jetstream.cluster import Cluster, Node
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.records import Record, read_record
from penstock.log.jetstream.replica import Replica, is_shared
from penstock.log.jetstream.servers import parse_server
from penstock.log.jetstream.stream_log import StreamLog, open_stream_log
from penstock.log.log import Log
from penstock.log.state import LogSettings
from penstock.model.batch import Batch
from penstock.model.policy import Policies
from penstock.model.words import Outcome

WAIT_SECONDS = 30.0
_T = TypeVar("_T")


def wait_for(what: str, ask: Callable[[], object], seconds: float = WAIT_SECONDS) -> None:
    """Wait, bounded, until something is true."""
    deadline = time.monotonic() + seconds
    while not ask():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain until {what}"
        time.sleep(0.005)


def silence(node: Node) -> None:
    """Pause a node, and wait until none of its threads does anything any more."""
    node.pause()

    def still() -> bool:
        tasks = Path(f"/proc/{node.pid}/task").iterdir()
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    wait_for(f"node {node.name} is paused", still)


class Later(threading.Thread):
    """Something that waits, on a thread of its own; `result` is how it ended."""

    def __init__(self, call: Callable[..., Any], *arguments: object) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._arguments = arguments
        self._error: BaseException | None = None
        self._value: Any = None  # of whatever was called
        self.start()

    def run(self) -> None:
        try:
            self._value = self._call(*self._arguments)
        except BaseException as error:  # noqa: BLE001 - handed over by `result`
            self._error = error

    def result(self, seconds: float = WAIT_SECONDS) -> Any:
        self.join(seconds)
        assert not self.is_alive(), f"waited {seconds:g} s in vain for an end"
        if self._error is not None:
            raise self._error
        return self._value


@contextmanager
def link_at(*urls: str, alone: bool = True) -> Iterator[LinkThread]:
    """A link, which leaves no thread behind; `alone`: no other one begins meanwhile."""
    before = set(threading.enumerate())
    nats = LinkThread.open(map(parse_server, urls))
    try:
        yield nats
    finally:
        nats.close()
        left = [t.name for t in set(threading.enumerate()) - before if t.name.startswith("penstock-nats")]
        assert not (alone and left), f"these threads are left: {left}"


def new_log(nats: LinkThread, replicas: int = 1, **more: Any) -> LogNames:
    """A log that nobody else has, with nothing in it. `more` are settings of JetStream: `Any`."""
    names = LogNames(f"t{secrets.token_hex(6)}")
    nats.ask(nats.api.create_stream({**names.stream_settings(replicas), **more}))
    return names


def last_seq(nats: LinkThread, names: LogNames) -> int:
    info = nats.ask(nats.api.stream(names.stream))
    return int(info["state"]["last_seq"])


def stored_in(nats: LinkThread, names: LogNames) -> list[Stored]:
    """Everything that is in a stream."""
    out: list[Stored] = []
    seq = 1
    while True:
        found = nats.ask(nats.api.read(names.stream, seq, 500, bytes_max=8 << 20))
        if not found:
            return out
        out += found
        seq = found[-1].seq + 1


def delete_stream(nats: LinkThread, name: str) -> None:
    nats.ask(nats.api.call(f"STREAM.DELETE.{name}"))


def delete_message(nats: LinkThread, stream: str, seq: int) -> None:
    """Take one message out of a stream; it leaves a hole."""
    nats.ask(nats.api.call(f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": True}))


def records_in(nats: LinkThread, names: LogNames) -> list[Record]:
    return [read_record(stored.payload) for stored in stored_in(nats, names)]


class Wire:
    """A way to a node that goes through us: it can be cut, and the node's answers can be lost on it."""

    def __init__(self, cluster: Cluster, place: int = 0) -> None:
        self._to = cluster.nodes[place].ports.client
        self._door = socket.create_server(("127.0.0.1", 0))
        self._selector = selectors.DefaultSelector()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._clients: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._muted = False
        self._ending = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._door.getsockname()[1]}"

    def mute(self) -> None:
        """From now on nothing that the node says arrives; it hears everything."""
        with self._lock:
            self._muted = True

    def mend(self) -> None:
        """Cut what is there. The next connection is a good one."""
        with self._lock:
            self._muted = False
            for end in list(self._clients):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._ending = True
        self._wake_in.send(b"x")
        self._thread.join()
        for end in (*self._pairs, self._door, self._wake_in, self._wake_out):
            end.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._ending:
            for key, _ in self._selector.select():
                end = key.fileobj
                assert isinstance(end, socket.socket)
                if end is self._door:
                    self._accept()
                elif end in self._pairs:
                    self._move(end)

    def _accept(self) -> None:
        client, _ = self._door.accept()
        try:
            node = socket.create_connection(("127.0.0.1", self._to))
        except OSError:
            client.close()
            return
        with self._lock:
            self._clients.add(client)
        self._pairs |= {client: node, node: client}
        for end in (client, node):
            self._selector.register(end, selectors.EVENT_READ)

    def _move(self, end: socket.socket) -> None:
        other = self._pairs[end]
        try:
            data = end.recv(1 << 16)
            with self._lock:
                lost = self._muted and end not in self._clients
            if data and not lost:
                other.sendall(data)
        except OSError:
            data = b""
        if not data:
            for side in (end, other):
                self._selector.unregister(side)
                self._pairs.pop(side)
                with self._lock:
                    self._clients.discard(side)
                side.close()


@contextmanager
def wire_to(cluster: Cluster) -> Iterator[Wire]:
    wire = Wire(cluster)
    try:
        yield wire
    finally:
        wire.close()


# --- a log and its messages --------------------------------------------------------------------------

SMALL = LogSettings(segment_bytes=16 * 1024, block_bytes=2048, cache_bytes=4096, snapshot_blocks=16)
SECOND_US = 1_000_000
QUEUES = ("orders", "mails", "tasks")
POLICIES = Policies({name: {"retention-seconds": 0} for name in QUEUES})


class TestLog:
    """A log with a folder of its own, and what was sent to it and settled."""

    __test__ = False

    def __init__(self, nats: LinkThread, names: LogNames, folder: Path, *, seed: int = 0) -> None:
        self.nats = nats
        self.names = names
        self.folder = folder
        self.rng = random.Random(seed)
        self.now_us = 1_700_000_000 * SECOND_US
        self.sent: dict[bytes, str] = {}  # every payload, and its queue
        self.gone: set[bytes] = set()  # acknowledged
        self.replica = Replica(nats.api, names, str(folder))
        self.led: StreamLog

    @property
    def engine(self) -> Log:
        return self.led.log

    def open(self) -> Log:
        self.nats.ask(self.replica.begin())
        return self.lead()

    def lead(self) -> Log:
        """With the copy as it is."""
        self.led = open_stream_log(
            self.nats,
            self.names,
            self.replica,
            self.now_us,
            settings=SMALL,
            policies=POLICIES,
            wake=lambda: None,
        )
        return self.engine

    def again(self, folder: Path, names: LogNames | None = None) -> "TestLog":
        """The same log, or a copy of it, for somebody else."""
        other = TestLog(self.nats, names or self.names, folder)
        other.sent, other.gone, other.now_us = dict(self.sent), set(self.gone), self.now_us
        return other

    def kill(self) -> None:
        """Its process dies: the folder stays as it is."""
        self.led.appender.stop()
        self.engine.abandon()

    def send(self, queue: str, count: int) -> None:
        payloads = []
        for _ in range(count):
            payload = b"<%s-%06d>" % (queue.encode(), len(self.sent))
            self.sent[payload] = queue
            payloads.append(payload + b"." * self.rng.choice((0, 10, 200)))
        self.engine.append(queue, Batch.of(payloads), self.now_us)

    def settle(self, queue: str, share: float) -> None:
        """Take everything and acknowledge a share of it; one of thirteen is never acknowledged."""
        if queue not in self.engine.queues():
            return
        for piece in self.engine.take(queue, "ann", 10_000, self.now_us):
            for offset, payload in zip(
                range(piece.offset_start, piece.offset_end), piece.messages(), strict=True
            ):
                if self.rng.random() < share and int(name_of(payload)[-7:-1]) % 13:
                    self.engine.settle(queue, "ann", Outcome.ACK, [(offset, offset + 1)], self.now_us)
                    self.gone.add(name_of(payload))
        self.engine.give_back(queue, "ann", self.now_us, lost=False)

    def work(self, turns: int, *, trim: bool = True) -> None:
        """What makes segments, snapshots, and something for retention to do."""
        rng = self.rng
        for _ in range(turns):
            self.now_us += rng.choice((1000, SECOND_US))
            for queue in QUEUES:
                if rng.random() < 0.6:
                    self.send(queue, rng.choice((1, 3, 10)))
                if rng.random() < 0.6:
                    self.settle(queue, rng.choice((0.3, 1.0)))
            self.engine.flush(self.now_us)
            self.engine.wait()
            if trim and rng.random() < 0.3:
                self.engine.trim(self.now_us)
            self.engine.tick(self.now_us)
            self.engine.poll()
        self.engine.flush(self.now_us)
        self.engine.wait()

    @property
    def living(self) -> set[bytes]:
        return set(self.sent) - self.gone

    def served(self) -> list[bytes]:
        """Everything that somebody gets, of all queues."""
        found: list[bytes] = []
        for queue in self.engine.queues():
            while slices := self.engine.take(queue, "drain", 1000, self.now_us):
                found += [name_of(payload) for piece in slices for payload in piece.messages()]
        return found

    def files(self) -> dict[str, bytes]:
        return files_in(self.replica.path)


def name_of(payload: bytes) -> bytes:
    return payload.rstrip(b".")


def files_in(path: str) -> dict[str, bytes]:
    """The files of a folder that belong to the stream, too."""
    return {p.name: p.read_bytes() for p in sorted(Path(path).iterdir()) if is_shared(p.name)}
