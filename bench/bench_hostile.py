"""A well-behaved pair beside each attack: what one client can do to the others, and to the broker's memory.

The pair sends 100 messages a second over PHPMQ, one connection to the other, each acknowledged before the
next one; it is measured alone and then beside the attack, in one broker that lives as long as its attack. An
attack is a process of its own that says what a program with bad manners could say, as fast as it is read.
Goals: the p99 beside it is at most three times that of before and 5 ms more, no gap is over 100 ms, the two
processes have never more than `MEMORY_MB` above what they had before, and a minute after it they have at most
`AFTER_TIMES` of that. `ATTACK=words` in the environment: only those that have these words in their name.
"""

import http.client
import io
import json
import multiprocessing
import os
import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pyarrow as pa

from bench import peers
from bench.server import Server, disk_folder, free_port

PAIR_PER_SECOND = 100
ALONE_SECONDS = 4.0
BESIDE_SECONDS = 8.0
MEMORY_MB = 150 + 537  # and `memory-bytes-max`, which is 512 MiB
GAP_MS = 100.0
AFTER_SECONDS = 60.0
AFTER_TIMES = 1.2
TLS = "tls"
SCATTERED = 500_000

Row = tuple[str, float, str, float]
Ports = dict[str, int]


# --- what is said ------------------------------------------------------------------------------------


def _phpmq(type_: int, *packets: tuple[int, bytes]) -> bytes:
    body = (b"P%02d%029d" % (number, len(content)) + content for number, content in packets)
    return b"H01%03d%02d" % (type_, len(packets)) + b"".join(body)


def _queue(name: bytes) -> bytes:
    return b"\xa0" + bytes([len(name)]) + name


def _payload(size: int) -> bytes:
    return b"\xe0" + struct.pack(">I", size) + bytes(size)


def _connect(ports: Ports, wire: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", ports[wire]), 30)


def _pour(ports: Ports, wire: str, first: bytes, words: bytes) -> None:
    """One connection that says the same for ever, and reads no answer."""
    with _connect(ports, wire) as peer:
        peer.sendall(first)
        chunk = words * max(1, (1 << 20) // len(words))
        while True:
            peer.sendall(chunk)


# --- attacks -----------------------------------------------------------------------------------------


def _requests_without_anything(ports: Ports) -> None:
    _pour(ports, "rq", b"", b"\x0a")


def _pings(ports: Ports) -> None:
    _pour(ports, "rq", b"", b"\x05\x00")


def _consume_and_cancel(ports: Ports) -> None:
    _pour(ports, "rq", b"", b"\x01" + _queue(b"attacked") + b"\x14\x15")


def _unknown_words(ports: Ports) -> None:
    _pour(ports, "rq", b"", b"\x02\x03\x46\x00\xaa\x00")


def _windows(ports: Ports) -> None:
    words = (_phpmq(2, (1, b"attacked"), (4, b"%d" % count)) for count in (5, 0))
    _pour(ports, "phpmq", b"", b"".join(words))


def _frames_that_mean_nothing(ports: Ports) -> None:
    frames = (b"\x55\x99" + bytes([type_]) + bytes(5) for type_ in (0xC0, 0x0E, 1, 2))
    _pour(ports, "sspq", b"", b"".join(frames))


def _one_payload_again_and_again(ports: Ports) -> None:
    first = b"\x01" + _queue(b"attacked") + _payload(1 << 20) + b"\x21"
    _pour(ports, "rq", first, b"\x80\x00\x00\x00\x01\x0a")


def _broadcasts_to_a_deaf_consumer(ports: Ports) -> None:
    with _connect(ports, "rq") as deaf:
        deaf.sendall(b"\x01" + _queue(b"attacked") + b"\x14")
        deaf.recv(100)
        _pour(ports, "rq", b"\x01" + _queue(b"attacked") + _payload(1 << 20), b"\x0e")


def _unfinished_payloads(ports: Ports) -> None:
    with suppress(OSError):
        crowd = []
        for _ in range(40):
            peer = _connect(ports, "rq")
            crowd.append(peer)
            peer.sendall(b"\x01" + _payload(60 << 20)[:-1])
        time.sleep(BESIDE_SECONDS)


def _replies_that_nobody_reads(ports: Ports) -> None:
    queue, count = _queue(b"attacked"), 3000
    with _connect(ports, "rq") as deaf, _connect(ports, "rq") as worker:
        worker.sendall(b"\x01" + queue + b"\x14")
        ids = [b"\x80" + struct.pack(">I", number) for number in range(count)]
        deaf.sendall(b"\x01" + queue + _payload(0) + b"\x0a".join(ids) + b"\x0a")
        heard = 0
        while heard < count:
            heard += worker.recv(1 << 16).count(b"\x0a")
        worker.sendall(b"\x01" + _payload(1 << 20) + b"\x0b".join(ids) + b"\x0b")
        time.sleep(BESIDE_SECONDS)


def _as_many_as_are_taken(ports: Ports, wire: str, first: bytes = b"") -> None:
    crowd = []
    with suppress(OSError):
        while True:
            peer = _connect(ports, wire)
            peer.sendall(first)
            crowd.append(peer)
    time.sleep(BESIDE_SECONDS)


def _idle_connections(ports: Ports) -> None:
    _as_many_as_are_taken(ports, "rq")


def _half_open_handshakes(ports: Ports) -> None:
    _as_many_as_are_taken(ports, TLS, b"\x16\x03\x01")


def _post(size: int) -> bytes:
    head = f"POST /v1/queues/attacked/messages HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {size}\r\n\r\n"
    return head.encode()


def _bodies_that_never_end(ports: Ports) -> None:
    _as_many_as_are_taken(ports, "http", _post(15 << 20) + bytes(1000))


def _bodies_of_15_mib(ports: Ports) -> None:
    crowd = [_connect(ports, "http") for _ in range(60)]
    for peer in crowd:
        with suppress(OSError):
            peer.sendall(_post(15 << 20) + bytes((15 << 20) - 1))
    time.sleep(BESIDE_SECONDS)


def _arrow_batch(ports: Ports, queue: str, count: int) -> None:
    sink = io.BytesIO()
    column = pa.array([b""] * count, pa.binary())
    with pa.ipc.new_stream(sink, pa.schema({"value": pa.binary()})) as writer:
        writer.write_batch(pa.record_batch([column], names=["value"]))
    caller = http.client.HTTPConnection("127.0.0.1", ports["http"])
    media = {"Content-Type": "application/vnd.apache.arrow.stream"}
    caller.request("POST", f"/v1/queues/{queue}/batch", sink.getvalue(), media)
    caller.getresponse().read()
    caller.close()


def _empty_messages(ports: Ports) -> None:
    while True:
        _arrow_batch(ports, "attacked", 1_000_000)


def _new_queues(ports: Ports) -> None:
    with _connect(ports, "phpmq") as peer:
        for number in range(20_000):
            peer.sendall(_phpmq(1, (1, b"attacked-%d" % number), (2, b"x")))
    time.sleep(BESIDE_SECONDS)


def _many_senders(ports: Ports) -> None:
    crowd = [_connect(ports, "rq") for _ in range(500)]
    while True:
        for peer in crowd:
            peer.sendall(b"\x01" + _queue(b"attacked") + b"\x14\x15" * 400)


# --- long work ---------------------------------------------------------------------------------------


def _ask(ports: Ports, path: str, body: dict[str, object] | None = None, method: str = "POST") -> Any:
    caller = http.client.HTTPConnection("127.0.0.1", ports["http"], timeout=300)
    media = {"Content-Type": "application/json"}
    caller.request(method, f"/v1/queues/attacked{path}", json.dumps(body) if body else None, media)
    return json.loads(caller.getresponse().read())


def _send_scattered(ports: Ports) -> None:
    with _connect(ports, "phpmq") as sender:
        for _ in range(0, 2 * SCATTERED, 10_000):
            sender.sendall(_phpmq(1, (1, b"attacked"), (2, b"x" * 20)) * 10_000)


def _settle_scattered(ports: Ports, type_: int | None) -> socket.socket:
    """Every second one is acknowledged, the others get that verdict or none; who holds them."""
    dispatch_bytes = len(_phpmq(3, (1, b"attacked"), (2, b"x" * 20), (3, b"?" * 32)))
    heads = [_phpmq(it, (1, b"attacked"), (3, b"?" * 32))[:-32] if it else b"" for it in (type_, 4)]
    consumer = _connect(ports, "phpmq")
    consumer.sendall(_phpmq(2, (1, b"attacked"), (4, b"%d" % (2 * SCATTERED))))
    got, said = b"", 0
    while said < 2 * SCATTERED:
        got += consumer.recv(1 << 20)
        whole = len(got) // dispatch_bytes
        ids = (got[at - 32 : at] for at in range(dispatch_bytes, whole * dispatch_bytes + 1, dispatch_bytes))
        words = [heads[at % 2] + id_ for at, id_ in enumerate(ids, said) if heads[at % 2]]
        consumer.sendall(b"".join(words))
        got, said = got[whole * dispatch_bytes :], said + whole
    return consumer


def _scattered_letters(ports: Ports) -> None:
    _send_scattered(ports)
    with _settle_scattered(ports, 6):
        while _ask(ports, "", method="GET")["dead"] < SCATTERED:
            time.sleep(0.1)


def _redrive(ports: Ports) -> None:
    _ask(ports, "/redrive")
    time.sleep(BESIDE_SECONDS)


def _purge(ports: Ports) -> None:
    _ask(ports, "/purge?dead=true")
    time.sleep(BESIDE_SECONDS)


def _snapshots(ports: Ports) -> None:
    """A segment is full again and again, and each begins with a snapshot."""
    with _connect(ports, "phpmq") as sender:
        while True:
            sender.sendall(_phpmq(1, (1, b"filling"), (2, bytes(1 << 19))))
            time.sleep(0.02)


def _leave_with_everything(ports: Ports) -> None:
    with _settle_scattered(ports, None):
        while _ask(ports, "", method="GET")["held"] > SCATTERED:
            time.sleep(0.1)
    time.sleep(BESIDE_SECONDS)


def _large_letter(ports: Ports) -> None:
    with _connect(ports, "phpmq") as peer:
        peer.sendall(_phpmq(1, (1, b"attacked"), (2, b"a" * (8 << 20))))
        peer.sendall(_phpmq(2, (1, b"attacked"), (4, b"1")))
        last = b""
        while not re.search(rb"P03[0-9]{27}32.{32}\Z", last):
            last = (last + peer.recv(1 << 20))[-100:]
        peer.sendall(_phpmq(6, (1, b"attacked"), (3, last[-32:])))
        while not _ask(ports, "", method="GET")["dead"]:
            time.sleep(0.1)


def _like(ports: Ports) -> None:
    while True:
        _ask(ports, "/redrive", {"where": f"value like '%{'a_' * 400}b%'", "dry_run": True})


PREPARED: dict[Callable[[Ports], None], Callable[[Ports], None]] = {
    _redrive: _scattered_letters,
    _purge: _scattered_letters,
    _snapshots: _scattered_letters,
    _leave_with_everything: _send_scattered,
    _like: _large_letter,
}
"""What is done before some of the attacks, beside nobody."""

ATTACKS: dict[str, Callable[[Ports], None]] = {
    "RQ: REQUESTs without attributes": _requests_without_anything,
    "RQ: PINGs, answers not read": _pings,
    "RQ: consume and cancel in turn": _consume_and_cancel,
    "RQ: unknown commands": _unknown_words,
    "RQ: 1 MiB again and again by six bytes": _one_payload_again_and_again,
    "RQ: broadcasts of 1 MiB, consumer does not read": _broadcasts_to_a_deaf_consumer,
    "RQ: replies of 1 MiB, requester does not read": _replies_that_nobody_reads,
    "RQ: 40 unfinished payloads of 60 MiB": _unfinished_payloads,
    "RQ: 500 connections, consume and cancel": _many_senders,
    "PHPMQ: windows opened and closed": _windows,
    "PHPMQ: 20,000 new queues": _new_queues,
    "SSPQ: frames that mean nothing": _frames_that_mean_nothing,
    "idle connections, as many as are taken": _idle_connections,
    "TLS: half-open handshakes, as many as are taken": _half_open_handshakes,
    "HTTP: bodies that never end, as many as are taken": _bodies_that_never_end,
    "HTTP: 60 bodies of 15 MiB, unfinished": _bodies_of_15_mib,
    "HTTP: a million empty messages in an Arrow body": _empty_messages,
    "HTTP: redrive of 500,000 scattered letters": _redrive,
    "HTTP: purge of 500,000 scattered letters": _purge,
    "HTTP: like with 800 places on 8 MiB": _like,
    "snapshots with 500,000 scattered letters": _snapshots,
    "PHPMQ: leaves with 500,000 scattered messages": _leave_with_everything,
}


# --- the pair ----------------------------------------------------------------------------------------


class Pair:
    """A sender and a consumer, and how long each message took, in ms."""

    def __init__(self, ports: Ports) -> None:
        self._sender, self._consumer = _connect(ports, "phpmq"), _connect(ports, "phpmq")
        for peer in (self._sender, self._consumer):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._consumer.sendall(_phpmq(2, (1, b"pair"), (4, b"10")))

    def run(self, seconds: float) -> list[float]:
        message = _phpmq(1, (1, b"pair"), (2, b"x" * 100))
        heard_bytes = len(_phpmq(3, (1, b"pair"), (2, b"x" * 100), (3, b"?" * 32)))
        took: list[float] = []
        due = time.monotonic()
        end = due + seconds
        while due < end:
            time.sleep(max(0.0, due - time.monotonic()))
            self._sender.sendall(message)
            dispatch = b""
            while len(dispatch) < heard_bytes:
                more = self._consumer.recv(heard_bytes - len(dispatch))
                if not more:
                    raise ConnectionError("the broker has closed the pair's connection")
                dispatch += more
            now = time.monotonic()
            took.append((now - due) * 1000)  # from when it should have been sent
            self._consumer.sendall(_phpmq(4, (1, b"pair"), (3, dispatch[-32:])))
            # Who was kept waiting does not send all that he has missed.
            due = max(due + 1 / PAIR_PER_SECOND, now)
        return took


class Memory:
    """The most that a server has had."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._over = threading.Event()
        self.most_mb = server.resident_mb()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self.most_mb = max(self.most_mb, self._server.resident_mb())

    def stop(self) -> float:
        self._over.set()
        self._thread.join()
        return self.most_mb


def _broker(folder: Path) -> Server:
    """With all doors, and one with TLS."""
    port = free_port()
    certificate = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=bench"
    command = ["openssl", *certificate.split(), "-keyout", "bench.key", "-out", "bench.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    listener = f'protocol = "sspq"\naddress = "127.0.0.1:{port}"\ntls-certificate = "{folder}/bench.pem"'
    settings = folder / "bench.toml"
    settings.write_text(f'[[listener]]\n{listener}\ntls-key = "{folder}/bench.key"\n', encoding="utf-8")
    server = peers.penstock(folder, http=True, more=("--config", str(settings)))
    server.ports[TLS] = port
    return server


def _attacked(attack: Callable[[Ports], None]) -> Iterator[tuple[str, float, str, float]]:
    with disk_folder() as folder, _broker(folder) as server:
        _arrow_batch(server.ports, "before", 1)  # What is loaded for the first one stays.
        if attack in PREPARED:
            PREPARED[attack](server.ports)
        pair = Pair(server.ports)
        before = pair.run(ALONE_SECONDS)
        idle_mb = server.resident_mb()
        memory = Memory(server)
        attacker = multiprocessing.get_context("fork").Process(target=_quietly, args=(attack, server.ports))
        attacker.start()
        try:
            during = pair.run(BESIDE_SECONDS)
        finally:
            attacker.kill()
            attacker.join()
            most_mb = memory.stop()
        after_mb = _memory_after(server, AFTER_TIMES * idle_mb)
        p99 = quantiles(before, n=100)[98]
        yield "p50 alone", median(before), "ms", 0
        yield "p50 beside it", median(during), "ms", 0
        yield "p99 alone", p99, "ms", 0
        yield "p99 beside it", quantiles(during, n=100)[98], "ms", 3 * p99 + 5
        yield "longest gap", max(during), "ms", GAP_MS
        yield "memory before", idle_mb, "MB", 0
        yield "memory at most", most_mb, "MB", idle_mb + MEMORY_MB
        yield "memory afterwards", after_mb, "MB", AFTER_TIMES * idle_mb


def _memory_after(server: Server, goal_mb: float) -> float:
    """When it is as little as it should be, or has had its time for that."""
    deadline = time.monotonic() + AFTER_SECONDS
    while server.resident_mb() > goal_mb and time.monotonic() < deadline:
        time.sleep(0.2)
    return server.resident_mb()


def _quietly(attack: Callable[[Ports], None], ports: Ports) -> None:
    with suppress(OSError):  # The broker may send it away.
        attack(ports)


def run() -> Iterator[Row]:
    only = os.environ.get("ATTACK", "")
    for name, attack in ATTACKS.items():
        if only in name:
            for figure, value, unit, goal in _attacked(attack):
                yield f"{name}: {figure}", value, unit, goal
