"""The HTTP API from outside: sending with receipts, bulk reading, and what a bulk reader does to messages.

Every send is confirmed after the sync to disk. The bulk reader is a process of its own that asks for the
whole log of a queue as Arrow, again and again, and throws the bytes away: it pulls as fast as the API gives.
Paced traffic (PHPMQ, 2,000 messages a second) is measured without it, with it, and without it again, in one
run; the quotient of the p99 is what the design promises to keep within 2. "Other core" pins the reader and
the process of the API to one core, and leaves the other one to the broker and the load generator.

A worker takes and settles batches of 100 over one connection: each batch by one call, which settles the one
before and takes the next, and by two calls. It is no more than a socket, so that the API is measured and no
client. Beside it stands what the broker's own process, not that of the API, took of the CPU for each message,
and what it takes where a PHPMQ client consumes as many with a window of 100 and acknowledges them.

A transaction of about a gigabyte is staged by two connections, while a third sends a message now and then and
notes how long each receipt takes; then it is committed, and the same is noted.
"""

import http.client
import io
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import pyarrow as pa

from bench import peers
from bench.cores import children, pinned
from bench.loadgen import Spread, drive
from bench.server import Server, disk_folder
from penstock import connect

RUNS = 3
SINGLE_MESSAGES = 2_000
BATCHES = 20
BATCH_MESSAGES = 20_000
TAKEN_MESSAGES = 100_000
LOG_MESSAGES = 1_000_000
LOG_SIZE_BYTES = 200
STAGES = 128
STAGE_MESSAGES = 40_000
PACED_PER_SECOND = 2_000
PACED_MESSAGES = 6_000
NDJSON = "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"

Row = tuple[str, float, str, float]

READER = """
import http.client, sys
port, once = int(sys.argv[1]), sys.argv[2] == "once"
buffer = bytearray(1 << 20)
while True:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/v1/queues/bulk/log?view=messages")
    response = connection.getresponse()
    assert response.status == 200, response.read()
    total = 0
    while got := response.readinto(buffer):
        total += got
    connection.close()
    if once:
        print(total)
        break
    print("pulled", flush=True)
"""
"""It only counts bytes: what is measured is the API, not a client's decoding."""


class Caller:
    """One connection to the API."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)

    def post(self, path: str, body: bytes, media: str = "application/octet-stream") -> bytes:
        self._connection.request("POST", path, body, {"Content-Type": media})
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {answer.decode()}")
        return answer


class Worker:
    """A socket that takes and settles, and looks at nothing but ids and counts."""

    def __init__(self, port: int, queue: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._queue = queue

    def work_by_one_call(self) -> int:
        answer = self._post("take?max=100", b"")
        settled = 0
        while verdict := _verdict(answer):
            answer = self._post("take?max=100", verdict)
            settled += _acked(answer)
        return settled

    def work_by_two_calls(self) -> int:
        settled = 0
        while verdict := _verdict(self._post("take?max=100", b"")):
            settled += _acked(self._post("settle", verdict))
        return settled

    def _post(self, what: str, body: bytes) -> bytes:
        head = (
            f"POST /v1/queues/{self._queue}/{what} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
        )
        self._socket.sendall(head.encode() + b"\r\n\r\n" + body)
        answer = b""
        while not (end := answer.find(b"\r\n\r\n") + 4) > 3:
            answer += self._socket.recv(1 << 18)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{what}: {answer.decode()}")
        length = end + int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(answer) < length:
            answer += self._socket.recv(1 << 18)
        return answer[end:]


def _verdict(answer: bytes) -> bytes:
    ids = re.findall(rb'"id":("[0-9a-f]{32}")', answer)
    return b'{"ack":[%b]}' % b",".join(ids) if ids else b""


def _acked(answer: bytes) -> int:
    return int((re.findall(rb'"ack":([0-9]+)', answer) or [b"0"])[-1])


def run() -> list[Row]:
    """See the module's docstring."""
    with disk_folder() as folder, peers.penstock(folder, http=True) as server:
        port = server.ports["http"]
        rows = [*_sending(port), *_taking(server)]
        return [*rows, *_transaction(port), *_reading(port), *_beside_a_reader(server)]


def _sending(port: int) -> Iterator[Row]:
    for connections, messages, goal in ((1, SINGLE_MESSAGES, 3_000), (16, 4 * SINGLE_MESSAGES, 15_000)):
        name = f"one message a call, {connections} connection{'s' * (connections > 1)}"
        yield name, _singles(port, connections, messages), "msg/s", goal

    lines = b"".join(json.dumps({"value": "x" * 100}).encode() + b"\n" for _ in range(BATCH_MESSAGES))
    for name, body, media in (("NDJSON", lines, NDJSON), ("Arrow", _arrow(BATCH_MESSAGES, 100), ARROW)):
        caller = Caller(port)
        began = time.perf_counter()
        for _ in range(BATCHES):
            caller.post(f"/v1/queues/{name}/batch", body, media)
        rate = BATCHES * BATCH_MESSAGES / (time.perf_counter() - began)
        yield f"{name} batches of {BATCH_MESSAGES:,} x 100 B, 1 connection", rate, "msg/s", 0


def _singles(port: int, connections: int, messages: int) -> float:
    """Messages a second. By sockets: sixteen threads with a client each would take longer than the API."""
    head = b"POST /v1/queues/single/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    request = head + b"x" * 100
    began = time.perf_counter()
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for _ in range(connections):
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            selector.register(peer, selectors.EVENT_READ, peer)
            peer.sendall(request)
        sent, answered = connections, 0
        while answered < messages:
            for key, _ in selector.select():
                answer = key.data.recv(1 << 16)  # It is short, and written at once.
                if not answer.startswith(b"HTTP/1.1 200") or not answer.endswith(b"}"):
                    raise RuntimeError(f"messages: {answer.decode()}")
                answered += 1
                if sent < messages:
                    sent += 1
                    key.data.sendall(request)
    return messages / (time.perf_counter() - began)


def _taking(server: Server) -> Iterator[Row]:
    caller = Caller(server.ports["http"])
    for queue in ("one", "two", "dispatched"):
        for _ in range(TAKEN_MESSAGES // BATCH_MESSAGES):
            caller.post(f"/v1/queues/{queue}/batch", _arrow(BATCH_MESSAGES, 100), ARROW)
    for queue, calls, goal in (("one", "one call", 50_000), ("two", "two calls", 0)):
        worker = Worker(server.ports["http"], queue)
        before, began = _own_cpu_seconds(server.pid), time.perf_counter()
        settled = worker.work_by_one_call() if queue == "one" else worker.work_by_two_calls()
        rate = settled / (time.perf_counter() - began)
        if settled != TAKEN_MESSAGES:
            raise RuntimeError(f"{settled} of {TAKEN_MESSAGES} messages were settled")
        yield f"taken and settled in batches of 100 by {calls}, 1 connection", rate, "msg/s", goal
        spent = (_own_cpu_seconds(server.pid) - before) / TAKEN_MESSAGES
        yield "the same, CPU of the broker's own process", spent * 1e6, "µs/msg", 0
    before = _own_cpu_seconds(server.pid)
    with connect(f"phpmq://127.0.0.1:{server.ports['phpmq']}") as client:
        for message in client.consume("dispatched", prefetch=100, count=TAKEN_MESSAGES):
            message.ack()
    spent = (_own_cpu_seconds(server.pid) - before) / TAKEN_MESSAGES
    yield "PHPMQ with a window of 100, CPU of the broker's own process", spent * 1e6, "µs/msg", 0


def _own_cpu_seconds(pid: int) -> float:
    """Of all threads of one process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _arrow(messages: int, size_bytes: int = LOG_SIZE_BYTES) -> bytes:
    sink = io.BytesIO()
    column = pa.array([b"x" * size_bytes] * messages, pa.binary())
    with pa.ipc.new_stream(sink, pa.schema({"value": pa.binary()})) as writer:
        writer.write_batch(pa.record_batch([column], names=["value"]))
    return sink.getvalue()


def _transaction(port: int) -> Iterator[Row]:
    body, over = _arrow(STAGE_MESSAGES), threading.Event()
    receipts: list[float] = []

    def send_beside() -> None:
        caller = Caller(port)
        while not over.is_set():
            began = time.perf_counter()
            caller.post("/v1/queues/beside/messages", b"x")
            receipts.append(time.perf_counter() - began)
            over.wait(0.005)

    def stage(count: int) -> list[str]:
        caller = Caller(port)
        path = "/v1/stages?transaction=bench&queue=staged"
        return [json.loads(caller.post(path, body, ARROW))["stage"] for _ in range(count)]

    with ThreadPoolExecutor(3) as pool:
        beside = pool.submit(send_beside)
        try:
            began = time.perf_counter()
            stages = [it for some in pool.map(stage, [STAGES // 2] * 2) for it in some]
            staged = time.perf_counter()
            fields = json.dumps({"transaction": "bench", "stages": stages}).encode()
            Caller(port).post("/v1/transactions", fields, "application/json")
            committed = time.perf_counter()
        finally:
            over.set()
        beside.result()
    size = f"{STAGES * STAGE_MESSAGES / 1e6:.1f} M x {LOG_SIZE_BYTES} B"
    yield f"transaction of {size}, staged", STAGES * STAGE_MESSAGES / (staged - began), "msg/s", 0
    yield f"transaction of {size}, its commit", 1000 * (committed - staged), "ms", 100
    yield f"transaction of {size}, longest receipt of others", 1000 * max(receipts), "ms", 50


def _reading(port: int) -> Iterator[Row]:
    caller = Caller(port)
    body = _arrow(BATCH_MESSAGES)
    for _ in range(LOG_MESSAGES // BATCH_MESSAGES):
        caller.post("/v1/queues/bulk/batch", body, ARROW)
    seconds: list[float] = []
    total = 0
    for _ in range(RUNS):
        began = time.perf_counter()
        command = [sys.executable, "-c", READER, str(port), "once"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - began)
        total = int(done.stdout)
    name = f"log of {LOG_MESSAGES:,} x {LOG_SIZE_BYTES} B as Arrow, all columns"
    yield name, LOG_MESSAGES / median(seconds) / 1e6, "M msg/s", 0
    yield f"{name}, bytes", total / median(seconds) / 1e6, "MB/s", 0


def _beside_a_reader(server: Server) -> Iterator[Row]:
    port = server.ports["http"]
    alone = [_paced(server, run) for run in range(RUNS)]
    with _bulk_reader(port, None):
        beside = [_paced(server, RUNS + run) for run in range(RUNS)]
    between = [_paced(server, 2 * RUNS + run) for run in range(RUNS)]
    cores = sorted(os.sched_getaffinity(0))
    pinned: list[Spread] = []
    if len(cores) > 1:
        with _bulk_reader(port, server):
            pinned = [_paced(server, 3 * RUNS + run) for run in range(RUNS)]
    name = f"paced {PACED_PER_SECOND:,}/s"
    quiet = median(spread.p99 for spread in (*alone, *between))
    yield f"{name}, no reader, p50", median(spread.p50 for spread in (*alone, *between)), "µs", 0
    yield f"{name}, no reader, p99", quiet, "µs", 0
    yield f"{name}, bulk reader anywhere, p50", median(spread.p50 for spread in beside), "µs", 0
    yield f"{name}, bulk reader anywhere, p99", median(spread.p99 for spread in beside), "µs", 0
    if pinned:
        yield f"{name}, bulk reader on the other core, p50", median(spread.p50 for spread in pinned), "µs", 0
        p99 = median(spread.p99 for spread in pinned)
        yield f"{name}, bulk reader on the other core, p99", p99, "µs", 2 * quiet


def _paced(server: Server, run: int) -> Spread:
    load = drive(
        "phpmq",
        "paced",
        server.ports["phpmq"],
        queue=f"paced-{run}",
        messages=PACED_MESSAGES,
        run=run + 1,
        size_bytes=100,
        rate_per_second=PACED_PER_SECOND,
    )
    assert load.latency is not None
    return load.latency


@contextmanager
def _bulk_reader(port: int, pin_beside: Server | None) -> Iterator[None]:
    """A reader at full speed; with a server given, it has the last core, with the process of the API."""
    cores = sorted(os.sched_getaffinity(0))
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(port), "on"], stdout=subprocess.PIPE, text=True
    )
    with ExitStack() as stack:
        try:
            if pin_beside is not None:
                broker, api = [pin_beside.pid], children(pin_beside.pid)
                stack.enter_context(pinned(lambda: [reader.pid, *api], {cores[-1]}))
                stack.enter_context(pinned(lambda: broker, set(cores[:-1])))
            assert reader.stdout is not None
            if not reader.stdout.readline():
                raise RuntimeError("the bulk reader ended")
            yield
        finally:
            reader.kill()
            reader.wait()
            assert reader.stdout is not None
            reader.stdout.close()
