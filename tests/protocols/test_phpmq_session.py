"""PHPMQ sessions: windows, doors, verdicts, and both sides joined in memory."""

from array import array
from collections import deque
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.batch import Batch, Slice
from penstock.model.ids import id_of
from penstock.model.words import Cancel, Command, Consume, Ignored, Outcome, Publish, Settle, Where
from penstock.protocols.errors import MisuseError, PeerViolation
from penstock.protocols.phpmq import FROM_SERVER, Dialect, Dispatched, Limits, MessageType
from penstock.protocols.phpmq_read import Reader
from penstock.protocols.phpmq_session import (
    CLIENT_WINDOWS,
    IGNORED_FOREIGN_ID,
    IGNORED_NOT_OPEN,
    IGNORED_SENT_DEAD,
    IGNORED_TWICE,
    SERVER_WINDOWS,
    Cause,
    ClientSession,
    ConsumeMode,
    ServerSession,
    Window,
    ranges_of,
    split_ids,
)
from penstock.protocols.phpmq_write import TtlPacket, Writer
from penstock.protocols.share import SCATTERED_BYTES, SHARE
from tests.protocols.vectors_phpmq import NARROW, NARROW_LINES, WIDE, WIDE_LINES

ORIGIN = b"0123456789abcdef01"
OTHER = b"fedcba987654321010"
DIALECTS = (NARROW, NARROW_LINES, WIDE, WIDE_LINES)
WRITER = Writer(NARROW)


def ids(*offsets: int, origin: bytes = ORIGIN) -> list[bytes]:
    return [id_of(origin, offset) for offset in offsets]


def stored(first: int, *payloads: bytes) -> Slice:
    batch = Batch.of(payloads)
    return Slice(batch.payload, batch.bounds, 0, len(batch), first, ORIGIN, 0)


def read_by_client(data: bytes) -> list[tuple[str, list[bytes], list[bytes]]]:
    events = Reader(FROM_SERVER).feed(data)
    return [(e.queue, e.batch.messages(), list(e.ids)) for e in events if isinstance(e, Dispatched)]


# ---- windows


def server_in(window: Window) -> ServerSession:
    session = ServerSession()
    if window is Window.OPEN:
        session.receive(WRITER.consume("orders", 5))
    assert session.window("orders") is window
    return session


@pytest.mark.parametrize("cause", [Cause.ASKED, Cause.ASKED_NONE])
@pytest.mark.parametrize("window", [Window.CLOSED, Window.OPEN])
def test_the_server_s_window_follows_its_table(window: Window, cause: Cause) -> None:
    session = server_in(window)
    commands = session.receive(WRITER.consume("orders", 7 if cause is Cause.ASKED else 0))
    after = SERVER_WINDOWS.get((window, cause))
    expected: list[Command] = [Ignored(IGNORED_NOT_OPEN, 1, "queue 'orders'")]
    if after is Window.OPEN:
        expected = [Consume("orders", 7)]
    elif after is Window.CLOSED:
        expected = [Cancel("orders")]
    assert commands == expected
    assert session.window("orders") is (after or window)


@pytest.mark.parametrize("window", [Window.CLOSED, Window.OPEN])
def test_the_server_dispatches_only_through_an_open_window(window: Window) -> None:
    session = server_in(window)
    if (window, Cause.DISPATCHED) in SERVER_WINDOWS:
        written = session.deliver("orders", [stored(3, b"a", b"b"), stored(9, b"c")], 0)
        assert read_by_client(written) == [("orders", [b"a", b"b", b"c"], ids(3, 4, 9))]
    else:
        with pytest.raises(MisuseError, match="queue 'orders': cannot dispatch, the window is closed"):
            session.deliver("orders", [stored(3, b"a")], 0)
    assert session.window("orders") is window


def test_another_queue_adds_a_window_or_replaces_the_others() -> None:
    added, replaced = ServerSession(), ServerSession(consume="replace")
    assert added.receive(WRITER.consume("a", 1)) == replaced.receive(WRITER.consume("a", 1))
    assert added.receive(WRITER.consume("b", 2)) == [Consume("b", 2)]
    assert replaced.receive(WRITER.consume("b", 2)) == [Cancel("a"), Consume("b", 2)]
    assert (added.window("a"), replaced.window("a")) == (
        Window.OPEN,
        SERVER_WINDOWS[Window.OPEN, Cause.REPLACED],
    )
    assert replaced.receive(WRITER.consume("b", 3)) == [Consume("b", 3)]


@pytest.mark.parametrize("dialect", DIALECTS, ids=str)
def test_dispatches_are_written_in_the_dialect_of_the_consume_request(dialect: Dialect) -> None:
    session = ServerSession()
    session.receive(Writer(dialect).consume("orders", 1))
    session.receive(WRITER.sends("orders", Batch.of([b"in another dialect"])))
    piece = stored(1, b"x")
    assert session.deliver("orders", [piece], 0) == Writer(dialect).dispatches("orders", [piece], 0)
    session.receive(WRITER.consume("orders", 1))
    assert session.deliver("orders", [piece], 0) == WRITER.dispatches("orders", [piece], 0)


def test_too_many_windows_are_a_violation_and_the_rest_is_salvaged() -> None:
    session = ServerSession(limits=Limits(windows_max=2))
    asked = [WRITER.consume(queue, 1) for queue in "abc"]
    with pytest.raises(PeerViolation, match="more than 2 queues to consume from") as caught:
        session.receive(b"".join(asked))
    assert caught.value.position == len(asked[0] + asked[1])
    assert session.salvage() == [Consume("a", 1), Consume("b", 1)]
    assert session.salvage() == []
    with pytest.raises(PeerViolation, match="more than 2 queues"):
        session.receive(b"")


def test_a_window_that_was_closed_makes_room_for_another() -> None:
    session = ServerSession(limits=Limits(windows_max=2))
    for queue in "abcdef":
        session.receive(WRITER.consume(queue, 1) + WRITER.consume(queue, 0))
    assert session.receive(WRITER.consume("g", 1)) == [Consume("g", 1)]


def test_a_window_can_be_changed_where_there_is_room_for_no_other() -> None:
    session = ServerSession(limits=Limits(windows_max=2))
    session.receive(WRITER.consume("a", 1) + WRITER.consume("b", 1))
    assert session.receive(WRITER.consume("a", 9)) == [Consume("a", 9)]


# ---- dead letters


def test_dead_letters_are_consumed_and_settled_under_their_name() -> None:
    session = ServerSession()
    assert session.receive(WRITER.consume("orders.dead", 4)) == [Consume("orders", 4, dead=True)]
    assert session.window("orders", dead=True) is Window.OPEN
    assert session.window("orders") is Window.CLOSED
    written = session.deliver("orders", [stored(8, b"x")], 0, dead=True)
    assert read_by_client(written) == [("orders.dead", [b"x"], ids(8))]
    acked = session.receive(WRITER.settlements(MessageType.ACKNOWLEDGE, "orders.dead", ids(8)))
    assert acked == [Settle("orders", Outcome.ACK, ORIGIN, [(8, 9)], dead=True)]
    with pytest.raises(MisuseError, match="the window is closed"):
        session.deliver("orders", [stored(8, b"x")], 0)


def test_a_dead_letter_that_came_with_a_ttl_shows_0() -> None:
    session = ServerSession()
    session.receive(WRITER.consume("orders.dead", 4))
    piece = stored(8, b"x")
    piece.expires_us = [1]
    written = session.deliver("orders", [piece], 5_000_000, dead=True)
    assert written.startswith(b"H0100304")
    assert written.endswith(b"P05%029d0" % 1)
    piece.expires_us = None
    assert session.deliver("orders", [piece], 5_000_000, dead=True).startswith(b"H0100303")


def test_closing_one_door_leaves_the_other_open() -> None:
    session = ServerSession()
    session.receive(WRITER.consume("orders", 4) + WRITER.consume("orders.dead", 2))
    assert session.receive(WRITER.consume("orders.dead", 0)) == [Cancel("orders", dead=True)]
    assert session.window("orders") is Window.OPEN
    assert session.window("orders", dead=True) is Window.CLOSED
    assert session.receive(WRITER.consume("orders", 0)) == [Cancel("orders")]


def test_what_is_sent_to_dead_letters_is_counted_and_not_stored() -> None:
    session = ServerSession()
    data = WRITER.sends("orders.dead", Batch.of([b"x"] * 40)) + WRITER.sends("b.dead", Batch.of([b"y"] * 2))
    publish, ignored = session.receive(data + WRITER.sends("orders", Batch.of([b"z"])))
    assert isinstance(publish, Publish)
    assert publish.batch.messages() == [b"z"]
    assert ignored == Ignored(IGNORED_SENT_DEAD, 42, "queue 'orders.dead'")


# ---- messages and verdicts


def test_messages_for_one_queue_in_a_row_are_one_publish() -> None:
    session = ServerSession()
    data = b"".join(
        WRITER.sends(queue, Batch.of([b"%d" % n for n in range(40)], ttl_seconds=[5] * 39 + [60]))
        for queue in ("a", "a", "b", "a")
    )
    commands = session.receive(data)
    assert [(type(c), c.queue, len(c.batch)) for c in commands if isinstance(c, Publish)] == [
        (Publish, "a", 80),
        (Publish, "b", 40),
        (Publish, "a", 40),
    ]
    first = commands[0]
    assert isinstance(first, Publish)
    assert first.batch.ttl_seconds == array("q", ([5] * 39 + [60]) * 2)
    assert first.batch.retries is None


def test_messages_with_a_ttl_and_messages_without_are_told_apart() -> None:
    """Packet 05 goes out where one came in, also if it said 0."""
    with_0 = WRITER.sends("a", Batch.of([b"x"], ttl_seconds=[7])).replace(b"0000017", b"0000010")
    commands = ServerSession().receive(with_0 * 3 + WRITER.sends("a", Batch.of([b"y"] * 2)) + with_0)
    assert [(c.batch.messages(), c.batch.ttl_seconds) for c in commands if isinstance(c, Publish)] == [
        ([b"x"] * 3, array("q", [0, 0, 0])),
        ([b"y"] * 2, None),
        ([b"x"], array("q", [0])),
    ]


@pytest.mark.parametrize(
    ("type_", "outcome", "ranges"),
    [
        (MessageType.ACKNOWLEDGE, Outcome.ACK, [(1, 4), (7, 8)]),
        (MessageType.DEAD_LETTER, Outcome.REJECT, [(7, 8), (2, 4), (1, 2)]),
        (MessageType.REQUEUE, Outcome.REQUEUE, [(7, 8), (2, 4), (1, 2)]),
    ],
)
def test_verdicts_are_ranges(type_: MessageType, outcome: Outcome, ranges: list[tuple[int, int]]) -> None:
    """An acknowledgement has no order; what goes to a tail has the order in which it was said."""
    data = WRITER.settlements(type_, "orders", ids(7, 2, 3, 1), 60)
    ttl = 60 if outcome is Outcome.REQUEUE else 0
    assert ServerSession().receive(data) == [Settle("orders", outcome, ORIGIN, ranges, ttl)]


def test_acknowledgements_by_the_thousand_are_one_range() -> None:
    data = WRITER.settlements(MessageType.ACKNOWLEDGE, "orders", ids(*range(5, 3005)))
    assert ServerSession().receive(data) == [Settle("orders", Outcome.ACK, ORIGIN, [(5, 3005)])]


def test_who_settles_here_and_there_is_read_in_parts() -> None:
    """It is the log that takes its time for each. Who settles neighbours is read hundreds at a time."""
    scattered = [
        WRITER.settlements(MessageType.DEAD_LETTER, "q", ids(*range(at, at + 4000, 2))) for at in (0, 4000)
    ]
    neighbours = WRITER.settlements(MessageType.DEAD_LETTER, "q", ids(*range(8000, 16000)))
    session = ServerSession()
    settled: list[tuple[int, int]] = []
    parts: list[int] = []
    for chunk in (*scattered, neighbours):
        rest: bytes = chunk
        while rest:
            session.reader.share, before = (16 if len(parts) == 2 else SHARE), len(rest)
            for command in session.receive(rest):
                assert isinstance(command, Settle)
                settled += command.ranges
            rest = session.reader.rest
            parts.append(before - len(rest))
    assert [offset for first, end in settled for offset in range(first, end)] == [
        *range(0, 8000, 2),
        *range(8000, 16000),
    ]
    assert parts[0] == len(scattered[0])  # Nobody knew before it was read.
    assert parts[2] == 16 * SCATTERED_BYTES
    assert max(parts[1:-1]) == SHARE * SCATTERED_BYTES
    assert parts[-2:] == [SHARE * SCATTERED_BYTES, len(neighbours) - SHARE * SCATTERED_BYTES]


def test_verdicts_differ_by_queue_kind_and_ttl() -> None:
    data = (
        WRITER.settlements(MessageType.ACKNOWLEDGE, "a", ids(1))
        + WRITER.settlements(MessageType.ACKNOWLEDGE, "b", ids(1))
        + WRITER.settlements(MessageType.REQUEUE, "b", ids(2), 5)
        + WRITER.settlements(MessageType.REQUEUE, "b", ids(3), 6)
    )
    assert ServerSession().receive(data) == [
        Settle("a", Outcome.ACK, ORIGIN, [(1, 2)]),
        Settle("b", Outcome.ACK, ORIGIN, [(1, 2)]),
        Settle("b", Outcome.REQUEUE, ORIGIN, [(2, 3)], 5),
        Settle("b", Outcome.REQUEUE, ORIGIN, [(3, 4)], 6),
    ]


def test_ids_of_two_openings_are_two_settlements() -> None:
    named = [*ids(1, 2), *ids(1, origin=OTHER), *ids(3)]
    assert ServerSession().receive(WRITER.settlements(MessageType.ACKNOWLEDGE, "q", named)) == [
        Settle("q", Outcome.ACK, ORIGIN, [(1, 4)]),
        Settle("q", Outcome.ACK, OTHER, [(1, 2)]),
    ]


def test_ids_that_cannot_be_ours_are_counted() -> None:
    named = [b"?", *ids(1), b"x" * 32, ids(2)[0].upper().replace(b"0123456789ABCDEF", b"0123456789abcdeF")]
    assert ServerSession().receive(WRITER.settlements(MessageType.ACKNOWLEDGE, "q", named)) == [
        Settle("q", Outcome.ACK, ORIGIN, [(1, 2)]),
        Ignored(IGNORED_FOREIGN_ID, 3, "queue 'q'"),
    ]
    assert ServerSession().receive(WRITER.settlements(MessageType.REQUEUE, "q", [b"?"])) == [
        Ignored(IGNORED_FOREIGN_ID, 1, "queue 'q'")
    ]


def test_an_acknowledgement_said_twice_is_counted() -> None:
    data = WRITER.settlements(MessageType.ACKNOWLEDGE, "q", ids(1, 2, 1, 1))
    assert ServerSession().receive(data) == [
        Settle("q", Outcome.ACK, ORIGIN, [(1, 3)]),
        Ignored(IGNORED_TWICE, 2, "queue 'q'"),
    ]


@given(st.lists(st.tuples(st.sampled_from([ORIGIN, OTHER]), st.integers(0, (1 << 56) - 1)), max_size=20))
def test_split_ids_gives_each_origin_its_offsets_in_order(named: list[tuple[bytes, int]]) -> None:
    expected: dict[bytes, list[int]] = {}
    for origin, offset in named:
        expected.setdefault(origin, []).append(offset)
    assert split_ids(b"".join(id_of(origin, offset) for origin, offset in named)) == (expected, 0)


@given(st.lists(st.integers(0, 12), max_size=30))
def test_ranges_say_the_same_offsets_in_the_same_order(offsets: list[int]) -> None:
    ranges = ranges_of(offsets)
    assert [offset for first, end in ranges for offset in range(first, end)] == offsets
    assert all(end != first for (_, end), (first, _) in pairwise(ranges))


# ---- settings


def test_settings_are_checked() -> None:
    with pytest.raises(MisuseError, match="'sometimes' is not a valid TtlPacket"):
        ServerSession(ttl_packet="sometimes")
    with pytest.raises(MisuseError, match="'append' is not a valid ConsumeMode"):
        ServerSession(consume="append")
    assert ServerSession(ttl_packet=TtlPacket.NEVER, consume=ConsumeMode.REPLACE).position == 0


@pytest.mark.parametrize(("setting", "packets"), [("auto", b"03"), ("always", b"04"), ("never", b"03")])
def test_the_ttl_packet_is_a_setting(setting: str, packets: bytes) -> None:
    session = ServerSession(ttl_packet=setting)
    session.receive(WRITER.consume("q", 1))
    assert session.deliver("q", [stored(1, b"x")], 0)[6:8] == packets


def test_a_lost_consumer_s_messages_go_back_to_their_place() -> None:
    assert ServerSession.LOST_TO is Where.PLACE


# ---- the client


def client_in(window: Window) -> ClientSession:
    session = ClientSession()
    if window is not Window.NEVER:
        session.consume("orders", 5)
    if window is Window.CLOSED:
        session.consume("orders", 0)
    assert session.window("orders") is window
    return session


@pytest.mark.parametrize("cause", [Cause.ASKED, Cause.ASKED_NONE])
@pytest.mark.parametrize("window", Window)
def test_the_client_asks_only_where_its_table_says(window: Window, cause: Cause) -> None:
    session = client_in(window)
    count = 3 if cause is Cause.ASKED else 0
    if (window, cause) in CLIENT_WINDOWS:
        assert session.consume("orders", count) == WRITER.consume("orders", count)
        assert session.window("orders") is CLIENT_WINDOWS[window, cause]
    else:
        with pytest.raises(MisuseError, match=f"queue 'orders': the window is {window.value}"):
            session.consume("orders", count)
        assert session.window("orders") is window


@pytest.mark.parametrize("window", Window)
def test_the_client_takes_dispatches_only_where_it_asked(window: Window) -> None:
    session = client_in(window)
    data = WRITER.dispatches("orders", [stored(1, b"a", b"b")], 0)
    if (window, Cause.DISPATCHED) in CLIENT_WINDOWS:
        (event,) = session.receive(data)
        assert (event.queue, event.batch.messages(), event.ids) == ("orders", [b"a", b"b"], ids(1, 2))
    else:
        for _ in range(2):
            with pytest.raises(PeerViolation, match="messages of queue 'orders', which was never asked for"):
                session.receive(data)


def test_the_client_salvages_what_came_before_a_violation() -> None:
    session = client_in(Window.OPEN)
    good = WRITER.dispatches("orders", [stored(1, b"a")], 0)
    with pytest.raises(PeerViolation, match="a message header must begin with H"):
        session.receive(good + b"rubbish!")
    assert [event.ids for event in session.salvage()] == [ids(1)]
    assert session.salvage() == []


def test_the_client_s_misuse() -> None:
    session = client_in(Window.NEVER)
    with pytest.raises(MisuseError, match=r"nobody can send to 'orders\.dead'"):
        session.send("orders.dead", Batch.of([b"x"]))
    for verdict in (session.ack, session.reject, session.requeue):
        with pytest.raises(MisuseError, match="no verdict on messages that were never asked for"):
            verdict("orders", ids(1))


@pytest.mark.parametrize("dialect", DIALECTS, ids=str)
def test_the_client_writes_the_dialect_that_it_was_given(dialect: Dialect) -> None:
    session, writer = ClientSession(dialect), Writer(dialect)
    batch = Batch.of([b"x", b"y"], ttl_seconds=[0, 60])
    assert session.consume("q", 9) == writer.consume("q", 9)
    assert session.send("q", batch) == writer.sends("q", batch)
    assert session.ack("q", ids(1, 2)) == writer.settlements(MessageType.ACKNOWLEDGE, "q", ids(1, 2))
    assert session.reject("q", ids(3)) == writer.settlements(MessageType.DEAD_LETTER, "q", ids(3))
    assert session.requeue("q", ids(4), 60) == writer.settlements(MessageType.REQUEUE, "q", ids(4), 60)


# ---- both sides joined


class Conversation:
    """A client, a server, and the smallest broker that there can be between them."""

    QUEUES = ("a", "b", "a.dead")

    def __init__(self, data: st.DataObject, mode: ConsumeMode, dialect: Dialect) -> None:
        self.data = data
        self.mode = mode
        self.client = ClientSession(dialect)
        self.server = ServerSession(consume=mode)
        self.up = b""
        self.down = b""
        self.log: dict[str, list[bytes]] = {"a": [], "b": []}
        self.ready: dict[tuple[str, bool], deque[int]] = {("a", False): deque(), ("b", False): deque()}
        self.ready["a", True] = deque()
        self.credit: dict[tuple[str, bool], int] = {}
        self.held: dict[tuple[str, bool], set[int]] = {door: set() for door in self.ready}
        self.settled: list[tuple[str, int, Outcome]] = []
        self.client_held: dict[str, list[bytes]] = {name: [] for name in self.QUEUES}
        self.contents: dict[tuple[str, bytes], bytes] = {}
        self.windows = dict.fromkeys(self.QUEUES, Window.CLOSED)  # by the server's table

    def execute(self, command: Command) -> None:
        if isinstance(command, Publish):
            for payload in command.batch.messages():
                self.ready[command.queue, False].append(len(self.log[command.queue]))
                self.log[command.queue].append(payload)
        elif isinstance(command, Consume):
            self.credit[command.queue, command.dead] = command.credit
        elif isinstance(command, Cancel):
            del self.credit[command.queue, command.dead]
        else:
            assert isinstance(command, Settle)
            door = (command.queue, command.dead)
            for offset in [o for first, end in command.ranges for o in range(first, end)]:
                self.held[door].remove(offset)
                self.settled.append((command.queue, offset, command.outcome))
                if command.outcome is Outcome.REQUEUE:
                    self.ready[door].append(offset)
                elif command.outcome is Outcome.REJECT and door == ("a", False):
                    self.ready["a", True].append(offset)

    def begin(self) -> None:
        """So that there is something to settle from the first moment on."""
        self.up += self.client.consume("a", 3) + self.client.send("a", Batch.of([b"1", b"2", b"3", b"4"]))
        self.windows["a"] = SERVER_WINDOWS[Window.CLOSED, Cause.ASKED]
        self.turn()

    def turn(self) -> None:
        """What a server does all the time."""
        self.carry(everything=True)
        self.dispatch()
        self.carry(everything=True)

    def consume(self) -> None:
        name = self.data.draw(st.sampled_from(self.QUEUES))
        cause = self.data.draw(st.sampled_from([Cause.ASKED, Cause.ASKED_NONE]))
        if (self.client.window(name), cause) not in CLIENT_WINDOWS:
            return
        self.up += self.client.consume(name, 3 if cause is Cause.ASKED else 0)
        if cause is Cause.ASKED and self.mode is ConsumeMode.REPLACE:
            for other in self.QUEUES:
                if other != name:
                    self.windows[other] = SERVER_WINDOWS.get(
                        (self.windows[other], Cause.REPLACED), self.windows[other]
                    )
        self.windows[name] = SERVER_WINDOWS.get((self.windows[name], cause), self.windows[name])

    def send(self) -> None:
        payloads = self.data.draw(st.lists(st.binary(max_size=2), max_size=4))
        self.up += self.client.send(self.data.draw(st.sampled_from("ab")), Batch.of(payloads))

    def settle(self) -> None:
        name = self.data.draw(st.sampled_from(self.QUEUES))
        held = self.client_held[name]
        if held:
            count = self.data.draw(st.integers(1, len(held)))
            verdict: Callable[[str, list[bytes]], bytes] = self.data.draw(
                st.sampled_from([self.client.ack, self.client.reject, self.client.requeue])
            )
            self.up += verdict(name, held[:count])
            del held[:count]

    def dispatch(self) -> None:
        for door, credit in self.credit.items():
            room = min(credit - len(self.held[door]), len(self.ready[door]))
            offsets = [self.ready[door].popleft() for _ in range(room)]
            self.held[door].update(offsets)
            slices = [stored(offset, self.log[door[0]][offset]) for offset in offsets]
            self.down += self.server.deliver(door[0], slices, 0, dead=door[1])

    def carry(self, everything: bool = False) -> None:
        up = len(self.up) if everything else self.data.draw(st.integers(0, len(self.up)))
        down = len(self.down) if everything else self.data.draw(st.integers(0, len(self.down)))
        data, self.up = self.up[:up], self.up[up:]
        for command in self.server.receive(data):
            if not isinstance(command, Ignored):
                self.execute(command)
        data, self.down = self.down[:down], self.down[down:]
        for event in self.client.receive(data):
            self.client_held[event.queue] += event.ids
            for id_, content in zip(event.ids, event.batch.messages(), strict=True):
                self.contents[event.queue, id_] = content


@given(st.data(), st.sampled_from(ConsumeMode), st.sampled_from(DIALECTS))
def test_joined_sides_end_where_the_tables_say(
    data: st.DataObject, mode: ConsumeMode, dialect: Dialect
) -> None:
    talk = Conversation(data, mode, dialect)
    acts: dict[str, Callable[[], None]] = {
        "consume": talk.consume,
        "send": talk.send,
        "settle": talk.settle,
        "dispatch": talk.dispatch,
        "carry some": talk.carry,
        "carry all": lambda: talk.carry(everything=True),
        "turn": talk.turn,
    }
    talk.begin()
    for name in data.draw(st.lists(st.sampled_from(sorted(acts)), min_size=15, max_size=30)):
        acts[name]()
    talk.turn()
    for name, expected in talk.windows.items():
        door = (name.removesuffix(".dead"), name.endswith(".dead"))
        assert talk.server.window(door[0], dead=door[1]) is expected
        assert (door in talk.credit) is (expected is Window.OPEN)
        assert sorted(talk.client_held[name]) == ids(*sorted(talk.held[door]))
        for id_ in talk.client_held[name]:
            assert talk.contents[name, id_] == talk.log[door[0]][int(id_[18:], 16)]
    for queue, log in talk.log.items():
        gone = {o for q, o, outcome in talk.settled if q == queue and outcome is Outcome.ACK}
        for offset in range(len(log)):
            places = [door for door in talk.ready if door[0] == queue and offset in talk.ready[door]]
            places += [door for door in talk.held if door[0] == queue and offset in talk.held[door]]
            rejected = (queue, offset, Outcome.REJECT) in talk.settled
            assert len(places) == 1 or (not places and (offset in gone or rejected))
