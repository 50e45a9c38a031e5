"""The one hand that writes a cluster's log: every record once, through lost answers, nodes and room."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.log.jetstream import appender as module
from penstock.log.jetstream.appender import Appender, Overtaken
from penstock.log.jetstream.cluster import Cluster
from penstock.log.jetstream.link_thread import LinkClosed, LinkThread
from penstock.log.jetstream.records import Kind
from tests.nats.streams import (
    Later,
    delete_stream,
    last_seq,
    link_at,
    new_log,
    records_in,
    silence,
    stored_in,
    wait_for,
    wire_to,
)

FILE = "00000000000000000000.seg"
SNAPSHOT = "snapshot-00000000000000000000"
STOP_SECONDS = 10.0

Calls = dict[str, Callable[[Appender], None]]

CALLS: Calls = {
    "write": lambda appender: appender.write(FILE, [(0, b"late")]),
    "write of two records": lambda appender: appender.write(FILE, [(0, b"a"), (1, b"b")]),
    "send_file": lambda appender: appender.send_file(SNAPSHOT, b"late"),
    "truncate": lambda appender: appender.truncate(FILE, 0),
    "remove": lambda appender: appender.remove(FILE),
}


@pytest.fixture(scope="module")
def nats(node: Cluster) -> Iterator[LinkThread]:
    with link_at(node.nodes[0].url) as nats:
        yield nats


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Whoever harms a node makes it whole again."""
    cluster = Cluster(tmp_path_factory.mktemp("nats"), 3)
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that are lost are not waited for as long."""
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.3)


# --- what it writes ----------------------------------------------------------------------------------


def test_records_stand_one_after_the_other(nats: LinkThread) -> None:
    names = new_log(nats)
    counts: dict[str, int] = {}
    appender = Appender(nats, names, 7, 0, counts)
    appender.write(FILE, [(0, b"abc"), (3, b"defg")])
    appender.truncate(FILE, 5)
    appender.send_file(SNAPSHOT, b"")
    assert [
        (r.kind, r.name, r.position, r.number, r.more, bytes(r.data)) for r in records_in(nats, names)
    ] == [
        (Kind.WRITE, FILE, 0, 0, True, b"abc"),
        (Kind.WRITE, FILE, 3, 1, False, b"defg"),
        (Kind.TRUNCATE, FILE, 5, 2, False, b""),
        (Kind.PIECE, SNAPSHOT, 0, 3, False, b""),
    ]
    assert appender.seq_last == last_seq(nats, names) == 4
    assert counts == {FILE: 3, SNAPSHOT: 1}
    appender.remove(FILE)
    assert [record.name for record in records_in(nats, names)] == [SNAPSHOT]
    assert counts == {SNAPSHOT: 1}
    appender.write(FILE, [(0, b"again")])
    assert appender.seq_last == last_seq(nats, names) == 5


def test_what_is_larger_than_a_message_is_several_records_of_one_write(nats: LinkThread) -> None:
    names = new_log(nats)
    appender = Appender(nats, names, 7, 0)
    data = bytes(range(256)) * (2 * appender.bytes_max // 256 + 1)
    appender.write(FILE, [(10, data), (10 + len(data), b"end")])
    records = records_in(nats, names)
    assert [record.more for record in records] == [True, True, True, False]
    assert [record.position for record in records[1:]] == [record.end for record in records[:-1]]
    assert b"".join(record.data for record in records) == data + b"end"


def test_writes_go_between_the_pieces_of_a_file_and_pieces_into_no_write(nats: LinkThread) -> None:
    names = new_log(nats)
    appender = Appender(nats, names, 7, 0)
    sending = Later(appender.send_file, SNAPSHOT, bytes(12 << 20))
    writes = 0
    while sending.is_alive():
        appender.write(FILE, [(3 * writes, b"abc"), (3 * writes, b"def")])
        writes += 1
    sending.result()
    records = records_in(nats, names)
    assert [record.number for record in records] == list(range(len(records)))
    assert len(records) == 12 + 2 * writes
    pieces = [record for record in records if record.kind is Kind.PIECE]
    assert [(piece.position, piece.more) for piece in pieces] == [(at << 20, at < 11) for at in range(12)]
    opened = [
        after.name for record, after in itertools.pairwise(records) if record.more and record.name == FILE
    ]
    assert opened == [FILE] * writes


# --- two of them -------------------------------------------------------------------------------------


def test_whoever_is_overtaken_is_told_by_the_next_record_and_for_ever(nats: LinkThread) -> None:
    names = new_log(nats)
    first = Appender(nats, names, 1, 0)
    first.write(FILE, [(0, b"first")])
    second = Appender(nats, names, 2, first.seq_last)
    second.write(FILE, [(5, b"second")])
    before = stored_in(nats, names)
    for call in (*CALLS.values(), *CALLS.values()):
        with pytest.raises(Overtaken):
            call(first)
    assert stored_in(nats, names) == before
    second.write(FILE, [(11, b"goes on")])
    assert last_seq(nats, names) == 3


def test_overtaken_in_the_middle_of_a_write(nats: LinkThread) -> None:
    names = new_log(nats)
    first = Appender(nats, names, 1, 0)
    nats.ask(first._append(Kind.WRITE, FILE, 0, memoryview(b"half"), more=True))
    second = Appender(nats, names, 2, 1)
    second.write(FILE, [(0, b"other")])
    with pytest.raises(Overtaken):
        nats.ask(first._append(Kind.WRITE, FILE, 4, memoryview(b"half"), more=False))
    assert last_seq(nats, names) == 2


def test_an_overtaken_one_that_does_not_know_it_takes_nothing_of_the_other_out(nats: LinkThread) -> None:
    names = new_log(nats)
    first = Appender(nats, names, 1, 0)
    first.write(FILE, [(0, b"first")])
    second = Appender(nats, names, 2, 1)
    second.remove(FILE)
    second.write(FILE, [(0, b"second")])
    with pytest.raises(Overtaken):
        first.remove(FILE)
    assert [bytes(record.data) for record in records_in(nats, names)] == [b"second"]


def test_an_overtaken_one_that_does_not_know_it_takes_nothing_of_its_own_out(nats: LinkThread) -> None:
    """Who leads now has it, and may have promised it to a reader."""
    names = new_log(nats)
    first = Appender(nats, names, 1, 0)
    first.write(FILE, [(0, b"first")])
    second = Appender(nats, names, 2, 1)
    second.send_file(SNAPSHOT, b"second")
    with pytest.raises(Overtaken, match="another broker has written"):
        first.remove(FILE)
    assert [bytes(record.data) for record in records_in(nats, names)] == [b"first", b"second"]
    second.remove(FILE)
    assert [bytes(record.data) for record in records_in(nats, names)] == [b"second"]


def test_overtaken_by_what_was_taken_out_again(nats: LinkThread) -> None:
    names = new_log(nats)
    first = Appender(nats, names, 1, 0)
    first.write(FILE, [(0, b"first")])
    second = Appender(nats, names, 2, 1)
    second.send_file(SNAPSHOT, b"second")
    second.remove(SNAPSHOT)
    with pytest.raises(Overtaken):
        first.write(FILE, [(5, b"more")])


# --- lost answers ------------------------------------------------------------------------------------


def test_a_record_whose_answer_was_lost_is_stored_once(node: Cluster, nats: LinkThread) -> None:
    names = new_log(nats)
    with wire_to(node) as wire, link_at(wire.url) as own:
        appender = Appender(own, names, 7, 0)
        for number in range(5):
            wire.mute()
            writing = Later(appender.write, FILE, [(number, b"x")])
            wait_for("it is stored", lambda: last_seq(nats, names) > appender.seq_last)
            assert writing.is_alive()
            wire.mend()
            writing.result()
        assert appender.seq_last == 5
    assert [record.number for record in records_in(nats, names)] == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("quick")
def test_an_answer_lost_for_longer_than_ids_are_remembered(node: Cluster, nats: LinkThread) -> None:
    """Then the stream says that something stands there, and it is our own."""
    window = {"duplicate_window": 1_000_000_000}
    names = new_log(nats, **window)
    probes = new_log(nats, **window)
    with wire_to(node) as wire, link_at(wire.url) as own:
        appender = Appender(own, names, 7, 0)
        wire.mute()
        writing = Later(appender.write, FILE, [(0, b"x")])
        wait_for("it is stored", lambda: last_seq(nats, names) == 1)
        # What was stored later under an id is forgotten later.
        probe = probes.file("probe")
        seq = nats.ask(nats.api.put(probe, b"", message_id="p"))
        wait_for(
            "the stream has forgotten ids of that time",
            lambda: nats.ask(nats.api.put(probe, b"", message_id="p")) != seq,
        )
        wire.mend()
        writing.result()
        assert appender.seq_last == 1
        appender.write(FILE, [(1, b"y")])
    assert [record.number for record in records_in(nats, names)] == [0, 1]


@pytest.mark.usefixtures("quick")
def test_no_node_that_could_store_it_for_a_while(three: Cluster) -> None:
    """Two of three nodes say nothing: records and removals wait, and go on when they are back."""
    with link_at(*three.urls) as nats:
        names = new_log(nats, 3)
        appender = Appender(nats, names, 7, 0)
        appender.write(FILE, [(0, b"x")])
        gone = [node for node in three.nodes if node.url != str(nats.link.server)][:2]
        for call in (lambda: appender.write(FILE, [(1, b"y")]), lambda: appender.remove(FILE)):
            for node in gone:
                silence(node)
            waiting = Later(call)
            try:
                wait_for("it waits", lambda: appender.trouble)
            finally:
                for node in gone:
                    node.resume()
            waiting.result()
            assert appender.trouble == ""
            assert appender.seq_last == last_seq(nats, names) == 2
        assert records_in(nats, names) == []


# --- no room -----------------------------------------------------------------------------------------


def test_a_full_stream_is_waited_for(nats: LinkThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TELL_SECONDS", 0.2)
    names = new_log(nats, max_bytes=20_000)
    appender = Appender(nats, names, 7, 0)
    for number in range(5):
        appender.write(FILE, [(3000 * number, bytes(3000))])
    writing = Later(appender.write, FILE, [(15_000, bytes(6000))])
    wait_for("it waits", lambda: appender.trouble)
    assert "maximum bytes" in appender.trouble
    wait_for("the room is known to be used up", lambda: appender.room.refused)
    assert appender.room.refused == "maximum bytes exceeded"
    assert last_seq(nats, names) == 5
    settings = {**names.stream_settings(1), "max_bytes": 100_000}
    nats.ask(nats.api.call(f"STREAM.UPDATE.{names.stream}", settings))
    writing.result()
    assert appender.trouble == appender.room.refused == ""
    assert [record.number for record in records_in(nats, names)] == list(range(6))


def test_room_that_a_removal_makes_is_used(nats: LinkThread, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.nats")
    names = new_log(nats, max_bytes=20_000)
    appender = Appender(nats, names, 7, 0)
    appender.room.refused = "full in an earlier term"
    appender = Appender(nats, names, 7, 0, room=appender.room)
    assert not appender.room.refused
    appender.send_file(SNAPSHOT, bytes(15_000))
    writing = Later(appender.write, FILE, [(0, bytes(10_000))])
    wait_for("it waits", lambda: appender.trouble)
    Later(appender.remove, "snapshot-00000000000000000001").result()
    assert "stored again" not in caplog.text
    Later(appender.remove, SNAPSHOT).result()
    writing.result()
    assert "stored again" in caplog.text
    assert [record.name for record in records_in(nats, names)] == [FILE]


def test_a_stream_that_has_lost_records_is_not_written_to(nats: LinkThread) -> None:
    names = new_log(nats)
    appender = Appender(nats, names, 7, 0)
    appender.write(FILE, [(0, b"x")])
    delete_stream(nats, names.stream)
    nats.ask(nats.api.create_stream(names.stream_settings(1)))
    writing = Later(appender.write, FILE, [(1, b"y")])
    wait_for("it says so", lambda: "have lost" in appender.trouble)
    appender.stop()
    with pytest.raises(LinkClosed, match="have lost"):
        writing.result(STOP_SECONDS)
    assert last_seq(nats, names) == 0


# --- its end -----------------------------------------------------------------------------------------


@pytest.fixture
def own_node(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path / "nats", 1)
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("how", ["dead", "silent"])
def test_stop_ends_the_wait_while_nats_is_down(
    own_node: Cluster, how: str, call: Callable[[Appender], None]
) -> None:
    (node,) = own_node.nodes
    with link_at(node.url) as nats:
        names = new_log(nats)
        appender = Appender(nats, names, 7, 0)
        appender.send_file(SNAPSHOT, b"x")
        node.kill() if how == "dead" else silence(node)
        waiting = [Later(call, appender), Later(appender.send_file, SNAPSHOT, b"y")]
        wait_for("it waits", lambda: appender.trouble)
        appender.stop()
        for later in waiting:
            with pytest.raises(LinkClosed):
                later.result(STOP_SECONDS)
        node.start() if how == "dead" else node.resume()
        own_node.wait_ready()
        wait_for("the link is back", lambda: nats.link.server is not None)
        # Behind what a node that was only silent had got already, and stores now.
        Appender(nats, names, 7, 0).send_file(SNAPSHOT, b"z")
        before = last_seq(nats, names)
        for later_call in CALLS.values():
            with pytest.raises(LinkClosed):
                later_call(appender)
        assert last_seq(nats, names) == before


def test_a_number_that_was_given_up_is_not_used_again(node: Cluster, nats: LinkThread) -> None:
    """Its record may be stored: another one under the same id would be said to be stored."""
    names = new_log(nats)
    with wire_to(node) as wire, link_at(wire.url) as own:
        appender = Appender(own, names, 7, 0)
        wire.mute()
        writing = Later(appender.write, FILE, [(0, b"x")])
        wait_for("it is stored", lambda: last_seq(nats, names) == 1)
        sending = Later(appender.send_file, SNAPSHOT, b"a file")
        appender.stop()
        wire.mend()
        for later in (writing, sending):
            try:
                later.result(STOP_SECONDS)
            except LinkClosed:
                continue
            assert later is writing, "the file is said to be stored"
        assert [record.name for record in records_in(nats, names)] == [FILE]


def test_a_link_that_closes_ends_the_wait(own_node: Cluster) -> None:
    (node,) = own_node.nodes
    before = set(threading.enumerate())
    with link_at(node.url) as nats:
        names = new_log(nats)
        appender = Appender(nats, names, 7, 0)
        silence(node)
        waiting = [Later(appender.write, FILE, [(0, b"x")]) for _ in range(3)]
        wait_for("it waits", lambda: appender.trouble)
        began = time.monotonic()
        nats.close()
        assert time.monotonic() - began < STOP_SECONDS
        for later in waiting:
            with pytest.raises(LinkClosed):
                later.result()
        with pytest.raises(LinkClosed):
            appender.write(FILE, [(0, b"x")])
    assert set(threading.enumerate()) <= before


def test_asking_while_a_link_closes_never_hangs(node: Cluster) -> None:
    for _ in range(20):
        with link_at(node.nodes[0].url) as nats:

            def ask(nats: LinkThread = nats) -> None:
                while True:
                    nats.ask(nats.api.account())

            asking = [Later(ask) for _ in range(4)]
            nats.close()
            for later in asking:
                with pytest.raises(LinkClosed):
                    later.result()


def test_links_of_one_process_do_not_hear_each_other(node: Cluster, nats: LinkThread) -> None:
    """Each has a thread of its own, and what one receives must not land in what another is reading."""
    names = new_log(nats)
    appender = Appender(nats, names, 7, 0)
    contents = [bytes([number]) * 200_000 for number in range(20)]
    for number, content in enumerate(contents):
        appender.write(FILE, [(200_000 * number, content)])

    def read() -> None:
        with link_at(node.nodes[0].url, alone=False) as own:
            for _ in range(10):
                assert [bytes(record.data) for record in records_in(own, names)] == contents

    for later in [Later(read) for _ in range(4)]:
        later.result()
