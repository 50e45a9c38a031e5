"""What NATS costs a message, with no socket and no server: publishes, answers, deliveries, acknowledgements.

Each figure is processor time, the best of several rounds: what is measured is this code, and not what else
the machine is doing.
"""

import random
from array import array
from collections.abc import Callable
from itertools import accumulate
from time import thread_time

from penstock.protocols import nats_jetstream, nats_write
from penstock.protocols.nats import Messages, Reader
from penstock.protocols.nats_headers import header_block, header_lines
from penstock.protocols.nats_write import Settling

MESSAGES = 50_000
MESSAGE_BYTES = 100
PUBLISHED = 500
CHUNK_BYTES = 256 << 10
ROUNDS = 7
SUBJECT = b"q.orders"
INBOX = b"_INBOX.0123456789."
ID_HEAD = b"0123456789abcdef-"

Row = tuple[str, float, str, float]


def best_us(act: Callable[[], object], messages: int) -> float:
    """Microseconds a message in the best round."""
    seconds = []
    for _ in range(ROUNDS):
        start = thread_time()
        act()
        seconds.append(thread_time() - start)
    return min(seconds) / messages * 1e6


def receive(stream: bytes, take: Callable[[Messages], int]) -> Callable[[], None]:
    """A reader of the stream, and what `take` makes of its messages; checks that nothing was lost."""
    parts = [stream[at : at + CHUNK_BYTES] for at in range(0, len(stream), CHUNK_BYTES)]

    def act() -> None:
        reader = Reader()
        taken = 0
        for part in parts:
            for event in reader.feed(memoryview(part)):
                assert isinstance(event, Messages)
                taken += take(event)
        assert taken == MESSAGES

    return act


def deliveries(sizes: list[int], source: random.Random) -> bytes:
    """What a consumer is sent: every message with an id and a header of ours."""
    out = []
    for n, size in enumerate(sizes, 1):
        headers = header_block([(b"Nats-Msg-Id", ID_HEAD + b"%013d" % n), (b"P", b"1 %08x" % (n * 7919))])
        out.append(
            b"HMSG %b 7 $JS.ACK.orders.workers.1.%d.%d.%d.%d %d %d\r\n%b%b\r\n"
            % (
                SUBJECT,
                n,
                n,
                1_700_000_000_000_000_000 + n * 1000,
                len(sizes) - n,
                len(headers),
                len(headers) + size,
                headers,
                source.randbytes(size),
            )
        )
    return b"".join(out)


def answers() -> bytes:
    said = [b'{"stream":"orders","seq":%d}' % n for n in range(1, MESSAGES + 1)]
    return b"".join(
        b"MSG %b%013d 1 %d\r\n%b\r\n" % (INBOX, n, len(text), text) for n, text in enumerate(said)
    )


def take_deliveries(event: Messages) -> int:
    return len(nats_jetstream.read_deliveries(event.replies).seqs)


def take_answers(event: Messages) -> int:
    numbers = nats_jetstream.read_numbers(event.subjects, len(INBOX))
    return len(nats_jetstream.read_publish_answers(numbers, event.payloads).seqs)


def reading(source: random.Random) -> list[Row]:
    equal = deliveries([MESSAGE_BYTES] * MESSAGES, source)
    varied = deliveries([source.randrange(80, 121) for _ in range(MESSAGES)], source)
    streams: list[tuple[str, bytes, Callable[[Messages], int], float]] = [
        ("read deliveries of 100 B", equal, len, 1.3),
        ("read deliveries, and where they came from", equal, take_deliveries, 1.7),
        ("read deliveries of 80 to 120 B, the same", varied, take_deliveries, 1.7),
        ("read answers to publishes", answers(), take_answers, 1.3),
    ]
    return [
        (f"NATS: {name}", best_us(receive(stream, take), MESSAGES), "µs/msg", goal)
        for name, stream, take, goal in streams
    ]


def writing(source: random.Random) -> list[Row]:
    payload = source.randbytes(PUBLISHED * MESSAGE_BYTES)
    bounds = array("i", accumulate([MESSAGE_BYTES] * PUBLISHED, initial=0))
    own = [header_lines([(b"P", b"1 %08x" % (n * 7919))]) for n in range(PUBLISHED)]
    replies = [b"$JS.ACK.orders.workers.1.%d.%d.1700000000000000000.0" % (n, n) for n in range(PUBLISHED)]

    def publishes(headers: bytes | list[bytes]) -> bytes:
        return nats_write.encode_publishes(
            SUBJECT,
            payload,
            bounds,
            reply_head=INBOX,
            number_first=123_456,
            id_head=ID_HEAD,
            id_first=7,
            headers=headers,
        )

    acts: list[tuple[str, Callable[[], object], float]] = [
        ("write publishes of 100 B", lambda: publishes(own[0]), 1.3),
        ("write publishes, each with headers of its own", lambda: publishes(own), 1.3),
        ("write acknowledgements", lambda: nats_write.encode_settlings(replies, Settling.DONE), 0.2),
    ]
    return [(f"NATS: {name}", best_us(act, PUBLISHED), "µs/msg", goal) for name, act, goal in acts]


def run() -> list[Row]:
    """Rows (name, value, unit, goal); goal 0 means that there is none."""
    source = random.Random(1)
    return reading(source) + writing(source)


if __name__ == "__main__":
    for name, value, unit, goal in run():
        print(f"{name:<58} {value:8.3f} {unit:<8} {f'≤ {goal}' if goal else '':>8}")
