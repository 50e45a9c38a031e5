"""A lease that is lost and taken again, while the log is opened or later: the term that counts is the last
one, and everybody who may hold something is waited for."""

import json
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cluster.frames import Hello
from penstock.cluster.records import LEASE, Claim
from penstock.cluster.shard import Shard, Standing
from penstock.cluster.trust import Leader, Trust, cluster_key
from penstock.common.address import TcpAddress, parse_address
from penstock.log.jetstream.cluster import Cluster, wait_until
from penstock.log.jetstream.errors import JetStreamError
from penstock.log.jetstream.link_thread import LinkThread
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.servers import parse_server
from tests.cluster.processes import ONE_LOG, FrontEnd
from tests.cluster.processes import site as site_of
from tests.cluster.relay_wire import RelayWire
from tests.http.api import Api
from tests.http.test_transactions import commit, stage
from tests.server.harness import WAIT_SECONDS, expect_dispatch, phpmq, until
from tests.server.test_phpmq_rules import ack, consume

NAMES = LogNames()

SLOW = """
import os, runpy, sys, time
from penstock.cluster import shard
opening = shard.open_stream_log
def slow(*args, **kwargs):
    deadline = time.monotonic() + 30
    while not os.path.exists({go!r}) and time.monotonic() < deadline:
        time.sleep(0.01)
    return opening(*args, **kwargs)
shard.open_stream_log = slow
runpy.run_module("penstock", run_name="__main__")
"""

SLOW_HTTP = """
import asyncio, os, runpy
starting = asyncio.create_subprocess_exec
async def slow(*args, **kwargs):
    while not os.path.exists({go!r}):
        await asyncio.sleep(0.01)
    return await starting(*args, **kwargs)
asyncio.create_subprocess_exec = slow
runpy.run_module("penstock", run_name="__main__")
"""

TURNED = """
import runpy, sys, threading
from penstock.broker.broker import Broker
from penstock.cluster.host import RelayHost
from penstock.log.jetstream.stream_log import StreamLog
from penstock.server.server import Server
ending, closing, turning = RelayHost.close, StreamLog.close, Server._turn
ended, closes, turned = threading.Event(), threading.Event(), threading.Event()
def end(self):
    ended.set()
    self._broker.wake()  # as the words of a follower do, that have just come
    ending(self)
def close(self, now_us):
    closes.set()
    turned.wait(10)
    closing(self, now_us)
def turn(self):
    if closes.is_set() and not turned.is_set():
        print("a turn of the broker:", any(isinstance(it, Broker) for it in self.home.homes), file=sys.stderr)
        turned.set()
    elif ended.is_set() and not turned.is_set():
        self._loop.call_later(0.01, self._turn)
    turning(self)
RelayHost.close, StreamLog.close, Server._turn = end, close, turn
runpy.run_module("penstock", run_name="__main__")
"""


class SlowFrontEnd(FrontEnd):
    """Opens its log when a file is there."""

    script = SLOW

    @property
    def go(self) -> Path:
        return self.folder / "go"

    def command(self) -> list[str]:
        python, _, _, *words = super().command()
        return [python, "-c", self.script.format(go=str(self.go)), *words]


class SlowHttpFrontEnd(SlowFrontEnd):
    """Starts the process of its HTTP API when a file is there."""

    script = SLOW_HTTP


class TurnedFrontEnd(SlowFrontEnd):
    """Has a turn to come when it closes its log, and closes it when that is over."""

    script = TURNED


def lease_in(nats: LinkThread) -> tuple[int, Claim]:
    stored = nats.ask(nats.api.last(NAMES.state_stream, NAMES.state(LEASE)))
    return (stored.seq, Claim(**json.loads(stored.payload))) if stored is not None else (0, Claim())


def lead_again(nats: LinkThread, go: Path) -> None:
    """Take the lease from who has it, give it back at once, and let it open its log when it has it again."""

    def led(above: int) -> Callable[[], Claim | None]:
        def found() -> Claim | None:
            claim = lease_in(nats)[1]
            return claim if claim.leader and claim.term > above else None

        return found

    first = wait_until("somebody leads", led(0))
    give_back(nats)
    wait_until("it leads again", led(first.term + 1))
    go.touch()


def test_who_loses_the_lease_while_it_opens_leads_in_the_new_term(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "nats", 1).start()
    nats = LinkThread.open([parse_server(cluster.nodes[0].url)])
    front = SlowFrontEnd("a", tmp_path / "a", cluster, cluster.urls, *ONE_LOG)
    thread = threading.Thread(target=lead_again, args=(nats, front.go))
    try:
        thread.start()
        front.start()
        _, claim = lease_in(nats)
        assert claim.term == 3
        address = parse_address(claim.relay)
        assert isinstance(address, TcpAddress)
        trust = Trust(nats.ask(cluster_key(nats.api, NAMES)))
        with RelayWire(Leader(address, claim.leader, claim.term, trust)) as link:
            link.prove(Hello("words", "b-1", claim.term, "life"))
            assert link.welcome() == ""
        assert front.stop() == 0
    finally:
        thread.join()
        if front.running:
            front.kill()
        nats.close()
        cluster.stop()


def give_back(nats: LinkThread) -> None:
    """Somebody has taken the lease from who had it, and given it back."""
    write_lease(nats, lambda claim: Claim(term=claim.term + 1))


def lead_once_more(nats: LinkThread) -> None:
    """Somebody has led in between, as far as the record says, and it is the leader's again."""
    write_lease(nats, lambda claim: replace(claim, term=claim.term + 1))


def write_lease(nats: LinkThread, changed: Callable[[Claim], Claim]) -> None:
    def written() -> bool | None:
        seq, claim = lease_in(nats)
        record = json.dumps(asdict(changed(claim))).encode()
        try:
            nats.ask(nats.api.put(NAMES.state(LEASE), record, last_seq=seq))
        except JetStreamError as error:
            if not error.wrong_last:
                raise
            return None
        return True

    wait_until("the record is written", written)


@pytest.mark.long
def test_who_leads_again_waits_for_who_led_long_ago(tmp_path: Path) -> None:
    """Its clients were gone when it led no more. By now it has others, and they hold messages."""
    with site_of(tmp_path, nodes=1) as site:
        nats = LinkThread.open([parse_server(site.nodes.nodes[0].url)])
        try:
            first, second = site.leader(), site.follower()
            first.pause()
            until(lambda: lease_in(nats)[1].leader.startswith(second.name), "the other one to lead")
            first.resume()
            first.says("leads no more")
            assert site.leader(second) is second
            with first.wire("phpmq") as holder:
                holder.say(phpmq(1, (1, b"work"), (2, b"held")), consume(b"work", 1))
                held = expect_dispatch(holder, b"work", b"held")
                mark = second.mark()
                lead_once_more(nats)
                second.says("leads no more", mark)
                with second.wire("phpmq") as other:
                    other.say(consume(b"work", 1))
                    second.says("leading after", mark)
                    second.says("is linked", second.log().index("leading after", mark))
                    other.say(phpmq(1, (1, b"work"), (2, b"new")))
                    expect_dispatch(other, b"work", b"new")
                    holder.say(ack(b"work", held))
        finally:
            nats.close()


@pytest.mark.long
def test_who_has_just_come_is_waited_for(tmp_path: Path) -> None:
    """Whoever leads has to know of everybody who was there when it took the lease, not a second before."""
    with site_of(tmp_path, nodes=1) as site:
        nats = LinkThread.open([parse_server(site.nodes.nodes[0].url)])
        try:
            fronts = site.leader(), site.follower()
            marks = [front.mark() for front in fronts]

            def said() -> set[int]:
                own = NAMES.state(f"member.{fronts[1].name}-")
                found = nats.ask(nats.api.last_of(NAMES.state_stream, [NAMES.state("member.>")]))
                return {stored.seq for stored in found if stored.subject.startswith(own)}

            before = said()
            until(lambda: said() != before, "the follower to look for others")
            nats.ask(nats.api.put(NAMES.state("member.new"), b"{}"))
            give_back(nats)
            until(
                lambda: any("not come back: new" in f.log()[m:] for f, m in zip(fronts, marks, strict=True)),
                "whoever leads now to wait for the new one",
            )
        finally:
            nats.close()


def test_a_stop_while_the_log_is_let_go_of_leaves_no_note_of_the_copy(tmp_path: Path) -> None:
    """The copy has what was written as leader; a note of how it was before would count all of that twice."""
    with site_of(tmp_path, nodes=1, fronts=1, flags=("--drain-seconds", "0.1")) as site:
        nats = LinkThread.open([parse_server(site.nodes.nodes[0].url)])
        try:
            (front,) = site.fronts
            front.ask("/v1/engine")
            with front.wire("phpmq") as sender, front.wire("http") as caller:
                sender.say(phpmq(1, (1, b"work"), (2, b"kept")), consume(b"work", 1))
                expect_dispatch(sender, b"work", b"kept")
                # Somebody who has not said all keeps the process of the HTTP API, which ends before the log.
                caller.say(b"POST /v1/queues/work/messages HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")
                lead_once_more(nats)
                front.says("leads no more")
                assert front.stop() == 0
            assert "leading after" not in front.log().partition("leads no more")[2], "it was too late to stop"
            note = front.folder / "data" / "replica"
            counted = json.loads(note.read_text())[2] if note.exists() else {}
            assert counted == {}
            front.start()
            with front.wire("phpmq") as other:
                other.say(consume(b"work", 1))
                expect_dispatch(other, b"work", b"kept")
        finally:
            nats.close()


def test_a_leader_whose_copy_cannot_be_kept_lets_go_of_the_lease(tmp_path: Path) -> None:
    """The copy is a cache: that the local disk takes no note of it must not hold up who leads next."""
    with site_of(tmp_path, nodes=1, fronts=1) as site:
        nats = LinkThread.open([parse_server(site.nodes.nodes[0].url)])
        try:
            (front,) = site.fronts
            (front.folder / "data" / "replica.new").mkdir()
            assert lease_in(nats)[1].leader.startswith(front.name)
            assert front.stop() == 0
            assert lease_in(nats)[1].leader == ""
            front.says("is read anew the next time")
        finally:
            nats.close()


def test_who_leads_no_more_before_its_http_process_has_begun_goes_on(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "nats", 1).start()
    nats = LinkThread.open([parse_server(cluster.nodes[0].url)])
    front = SlowHttpFrontEnd("a", tmp_path / "a", cluster, cluster.urls, *ONE_LOG)
    try:
        front.start()
        lead_once_more(nats)
        front.says("leads no more")
        front.go.touch()
        front.says("leading after", front.log().index("leads no more"))
        assert front.ask("/v1/engine")["cluster"]["leader"].startswith("a-")
        assert front.stop() == 0
        assert "Traceback" not in front.log()
    finally:
        if front.running:
            front.kill()
        nats.close()
        cluster.stop()


def test_a_follower_whose_disk_fails_goes_on_and_can_lead_when_it_does_not_any_more(tmp_path: Path) -> None:
    """What it keeps is a copy, for the day when it leads: its clients need none of it."""
    with site_of(tmp_path, nodes=1) as site:
        leader, follower = site.leader(), site.follower()
        records, away = follower.folder / "data" / "records", follower.folder / "data" / "away"
        records.rename(away)
        with follower.wire("phpmq") as sender:
            sender.say(phpmq(1, (1, b"work"), (2, b"first")), consume(b"work", 1))
            expect_dispatch(sender, b"work", b"first")
            follower.says("the copy of the log cannot be kept up")
            away.rename(records)
            sender.say(phpmq(1, (1, b"more"), (2, b"second")), consume(b"more", 1))
            expect_dispatch(sender, b"more", b"second")
        leader.kill()
        follower.says("leading after")
        with follower.wire("phpmq") as other:
            other.say(consume(b"work", 1), consume(b"more", 1))
            expect_dispatch(other, b"work", b"first")
            expect_dispatch(other, b"more", b"second")


def test_a_front_end_whose_folder_is_removed_or_replaced_stops_with_a_word(tmp_path: Path) -> None:
    with site_of(tmp_path, nodes=1) as site:
        leader, follower = site.leader(), site.follower()
        for front in (follower, leader):
            front.signal(signal.SIGSTOP)
            (front.folder / "data").rename(front.folder / "away")
            if front is leader:
                (front.folder / "data").mkdir()
                (front.folder / "data" / "lock").touch()
            front.signal(signal.SIGCONT)
            assert front.wait(WAIT_SECONDS) == 1
            what = "replaced by another one" if front is leader else "removed"
            assert f"or the lock file in it, was {what} under the running broker" in front.log()
            assert "Traceback" not in front.log()
            site.fronts.remove(front)


def test_a_follower_that_stops_waits_for_what_is_settled_last_and_no_longer(tmp_path: Path) -> None:
    with site_of(tmp_path, nodes=1, flags=("--drain-seconds", "60")) as site:
        follower = site.follower()
        with follower.wire("phpmq") as holder:
            holder.say(phpmq(1, (1, b"work"), (2, b"held")), consume(b"work", 1))
            held = expect_dispatch(holder, b"work", b"held")
            follower.signal(signal.SIGTERM)
            assert holder.is_silent(0.3), "it may finish what it has"
            holder.say(ack(b"work", held))
            assert holder.is_closed()
            assert follower.wait(WAIT_SECONDS) == 0


@pytest.mark.long
def test_who_had_the_lease_and_never_came_to_lead_is_waited_for(tmp_path: Path) -> None:
    """Its clients were not sent away, and hold what they have from the leader before."""
    cluster = Cluster(tmp_path / "nats", 1).start()
    nats = LinkThread.open([parse_server(cluster.nodes[0].url)])
    first, second, third = fronts = [
        kind(name, tmp_path / name, cluster, cluster.urls, *ONE_LOG)
        for kind, name in ((FrontEnd, "a"), (SlowFrontEnd, "b"), (FrontEnd, "c"))
    ]
    try:
        for front in fronts:
            front.start()
        third.pause()
        first.kill()
        until(lambda: lease_in(nats)[1].leader.startswith("b-"), "the second to have the lease")
        second.pause()
        third.resume()
        third.says("not come back")
        assert re.search("not come back: .*b-", third.log())
    finally:
        for front in fronts:
            if front.running:
                front.kill()
        nats.close()
        cluster.stop()


def test_a_log_that_is_closed_in_a_thread_is_left_alone_by_the_turn_that_is_still_to_come(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path / "nats", 1).start()
    front = TurnedFrontEnd("a", tmp_path / "a", cluster, cluster.urls, *ONE_LOG)
    try:
        front.start()
        assert front.stop() == 0
        assert re.findall("a turn of the broker: (.*)", front.log()) == ["False"]
    finally:
        if front.running:
            front.kill()
        cluster.stop()


@pytest.mark.parametrize("how", ["killed", "led once more"])
@pytest.mark.long
def test_a_commit_that_was_refused_is_taken_under_the_next_leader(tmp_path: Path, how: str) -> None:
    """The copy of the log is thrown away; what was staged is in the stream."""
    settings = tmp_path / "penstock.toml"
    settings.write_text('[queue."full"]\nmax-bytes = 10_000_000\n')
    with site_of(tmp_path, nodes=1, fronts=1, flags=("--config", str(settings))) as site:
        (front,) = site.fronts
        front.ask("/v1/engine")
        with Api(front.ports["http"]) as api:
            api.send("full", b"." * 9_000_000)
            stages = [stage(api, "late", "full", *[name * 1000] * 2000) for name in ("a", "b")]
            assert commit(api, "late", *stages).problem == "queue-full"
        if how == "killed":
            front.kill()
            front.start()
        else:
            nats = LinkThread.open([parse_server(site.nodes.nodes[0].url)])
            lead_once_more(nats)
            nats.close()
            front.says("leads no more")
            front.says("leading after", front.log().index("leads no more"))
        front.ask("/v1/engine")
        with Api(front.ports["http"]) as api:
            assert commit(api, "late", *stages).problem == "queue-full"
            assert api.post("/v1/queues/full/purge")["purged"] == 1
            done = commit(api, "late", *stages)
            assert (done.status, done.json["repeated"]) == (200, False)
            assert api.get("/v1/queues/full")["offset_end"] == 4001


def test_a_follower_that_cannot_wait_for_a_leader_says_that_something_may_be_lost(tmp_path: Path) -> None:
    with site_of(tmp_path, nodes=1, flags=("--drain-seconds", "0.5")) as site:
        leader, follower = site.leader(), site.follower()
        with follower.wire("phpmq") as sender:
            sender.say(phpmq(1, (1, b"work"), (2, b"first")))
            # Who is not accepted yet when it stops is refused.
            until(lambda: leader.ask("/v1/queues")["queues"], "the first message to be there")
            leader.pause()
            sender.say(phpmq(1, (1, b"work"), (2, b"sent")))
            follower.signal(signal.SIGTERM)
            assert follower.wait() == 0
        follower.says("not known to be stored")
        leader.resume()


def test_who_was_stopped_again_a_moment_after_it_was_unsure_hands_nothing_out() -> None:
    """That a doubt is looked at again soon says nothing of this turn: the process may have stood still."""
    shard: Any = Shard.__new__(Shard)
    election = SimpleNamespace(is_sure=lambda shard: False)
    broker = SimpleNamespace(is_suspended=False)
    broker.suspend = lambda suspended: setattr(broker, "is_suspended", suspended)
    shard.broker, shard.number, shard.standing, shard._doubt = broker, 0, Standing(Claim(), True), None
    shard._loop = SimpleNamespace(call_later=lambda seconds, call: call)
    shard._front = SimpleNamespace(election=election)
    shard.check()
    assert broker.is_suspended
    election.is_sure = lambda shard: True
    shard.make_sure()  # as it does when the lease was renewed
    shard.check()
    assert not broker.is_suspended
    election.is_sure = lambda shard: False
    shard.check()
    assert broker.is_suspended
