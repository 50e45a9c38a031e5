"""The rules of a lease, one by one, on the simulated clock of `test_lease_time`: when exactly somebody is
sure, and when somebody else may take it."""

import asyncio
import functools
import json
import logging
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Concatenate, ParamSpec

import pytest

from penstock.cluster.election import ASK_SECONDS, HURRY_SECONDS, LOOK_SECONDS, MEMBER_SECONDS, SOON_SECONDS
from penstock.cluster.lease import (
    COLD_SECONDS,
    LEASE_SECONDS,
    MEMBER_FORGET_SECONDS,
    MEMBER_GONE_SECONDS,
    RENEW_SECONDS,
    SUSPECT_SECONDS,
    TURN_SECONDS,
    UNSURE_SECONDS,
)
from penstock.cluster.records import UNKNOWN, WARM, WEARY, Claim, Role
from penstock.log.jetstream.api import Stored
from penstock.log.jetstream.errors import Failure, JetStreamError, NoAnswer
from tests.cluster.lease_stage import LEASE, NAMES, Member, SimLoop, World

WAY_SECONDS = 0.01  # one way of a question
FOREVER = 1e9

P = ParamSpec("P")


class Steady(random.Random):
    """Every way takes as long as it may, every clock goes right, and nothing is lost."""

    def uniform(self, a: float, b: float) -> float:
        return b

    def random(self) -> float:
        return 0.5


class Stage:
    def __init__(self) -> None:
        self.loop = SimLoop()
        self.world = World(1, self.loop, ["ann", "bob", "cid"])
        self.world.rng = Steady()
        for member in self.world.members:
            member.rate = 1.0
        self.ann, self.bob, self.cid = self.world.members

    @property
    def record(self) -> tuple[int, Claim]:
        seq, payload = self.world.store.records[LEASE]
        return seq, Claim(**json.loads(payload))

    def write(self, claim: Claim) -> None:
        """A record, by whomever."""
        self.world.store.seq += 1
        self.world.store.records[LEASE] = self.world.store.seq, json.dumps(asdict(claim)).encode()

    def before_puts(self, *calls: Callable[[], None]) -> None:
        """Each is called before one more record of the lease is stored, or refused."""
        left, put = list(calls), self.world.store.put

        def first(subject: str, payload: bytes, last_seq: int | None, stream_seq: int | None) -> int:
            if subject == LEASE and left:
                left.pop(0)()
            return put(subject, payload, last_seq, stream_seq)

        self.world.store.put = first  # type: ignore[method-assign]

    async def until(self, what: Callable[[], object], seconds: float = 20.0) -> float:
        """How long it takes."""
        began = self.loop.now
        while not what():
            assert self.loop.now < began + seconds, "it does not happen"
            await asyncio.sleep(0.004)
        return self.loop.now - began

    async def both(self) -> None:
        """Ann leads, and Bob follows her."""
        await self.ann.election.start()
        await self.until(lambda: self.ann.election.is_sure(0))
        await self.bob.election.start()
        await self.until(lambda: self.bob.election.view.claims[0].leader == "ann")

    async def renewed(self) -> None:
        """Until the record has just been stored again."""
        seq = self.record[0]
        await self.until(lambda: self.record[0] != seq)

    def run(self, life: Coroutine[Any, Any, None]) -> None:
        try:
            self.loop.run_until_complete(life)
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(5))
            self.loop.close()
        if self.world.broken is not None:
            raise self.world.broken


@pytest.fixture
def stage() -> Stage:
    return Stage()


def on_stage(life: Callable[Concatenate[Stage, P], Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine, in the loop of its stage."""

    @functools.wraps(life)
    def run(stage: Stage, *given: P.args, **named: P.kwargs) -> None:
        stage.run(life(stage, *given, **named))

    return run


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def die(member: Member) -> None:
    member.stalled_until = FOREVER


def roles(member: Member) -> Role:
    return member.election.view.roles[0]


# --- leading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [0.1, 0.3])
@on_stage
async def test_who_hears_that_somebody_goes_looks_often(stage: Stage, waits: float) -> None:
    """And not always: what that costs is a question for each look."""
    await stage.both()
    await stage.until(lambda: "bob" in stage.ann.election.view.members)
    stage.bob.election.hurry()
    await asyncio.sleep(waits)
    await stage.ann.election.release(0, "bob")
    assert await stage.until(lambda: stage.bob.election.is_sure(0)) < SOON_SECONDS + 8 * WAY_SECONDS
    looks = 0
    last_of = stage.bob.last_of

    async def counted(stream: str, subjects: Sequence[str]) -> list[Stored]:
        nonlocal looks
        looks += 1
        return await last_of(stream, subjects)

    stage.bob.last_of = counted  # type: ignore[method-assign]
    await asyncio.sleep(HURRY_SECONDS)
    looks = 0
    await asyncio.sleep(10 * LOOK_SECONDS)
    assert 8 <= looks <= 10


@on_stage
async def test_the_first_leads_at_once_and_says_so_again_and_again(stage: Stage) -> None:
    await stage.ann.election.start()
    assert await stage.until(lambda: stage.ann.election.is_sure(0)) < 12 * WAY_SECONDS
    session = stage.record[1].session
    assert stage.record[1] == Claim("ann", 1, "ann:1", "1", session)
    await stage.until(lambda: stage.ann.seen)  # in which step it is told is asyncio's business
    assert (roles(stage.ann), stage.ann.election.view.claims[0]) == (Role.LEADING, stage.record[1])
    await stage.bob.election.start()
    await stage.until(lambda: stage.bob.seen)
    assert stage.bob.election.view.claims[0] == stage.record[1]
    seqs = []
    for _ in range(20):
        seqs.append(stage.record[0])
        took = await stage.until(lambda: stage.record[0] != seqs[-1])
        assert len(seqs) == 1 or RENEW_SECONDS - 0.01 < took < RENEW_SECONDS + 0.01
        assert stage.ann.election.is_sure(0)
        assert not stage.bob.election.is_sure(0)
    # Nothing has changed, so nobody was told of anything.
    assert (len(stage.ann.seen), len(stage.bob.seen)) == (1, 1)


@on_stage
async def test_a_leader_is_sure_for_so_long_from_when_it_sent_its_record(stage: Stage) -> None:
    await stage.both()
    await stage.renewed()
    sent = stage.loop.now - WAY_SECONDS
    stage.world.silent_until = sent + 2.5
    await stage.until(lambda: not stage.ann.election.is_sure(0))
    assert stage.loop.now - sent == pytest.approx(UNSURE_SECONDS, abs=0.01)
    await stage.until(lambda: roles(stage.ann) is Role.UNSURE, ASK_SECONDS + LOOK_SECONDS + 0.1)
    assert stage.ann.seen[-1].roles[0] is Role.UNSURE
    await stage.until(lambda: stage.ann.election.is_sure(0))
    await stage.until(lambda: roles(stage.ann) is Role.LEADING, WAY_SECONDS)
    assert stage.record[1].term == 1


@on_stage
async def test_a_cluster_without_room_leaves_a_leader_unsure_and_is_asked_at_its_time(stage: Stage) -> None:
    refusals = 0

    def refuse() -> None:
        nonlocal refusals
        refusals += 1
        raise JetStreamError("put", Failure(503, 10077, "maximum bytes exceeded"))

    await stage.both()
    stage.before_puts(*[refuse] * 6)
    await stage.until(lambda: roles(stage.ann) is Role.UNSURE)
    assert 3 <= refusals <= 5
    await stage.until(lambda: roles(stage.ann) is Role.LEADING)
    assert (refusals, stage.record[1].term, len(stage.ann.seen)) == (6, 1, 3)


@on_stage
async def test_who_is_overtaken_follows_at_once(stage: Stage) -> None:
    await stage.both()
    other = Claim("zoe", 7, "zoe:1", "1")
    stage.write(other)
    await stage.until(lambda: roles(stage.ann) is Role.FOLLOWING, RENEW_SECONDS + 5 * WAY_SECONDS)
    assert not stage.ann.election.is_sure(0)
    assert stage.ann.election.view.claims[0] == stage.ann.seen[-1].claims[0] == other
    # It waits for her as anybody does, from when it saw her.
    assert await stage.until(lambda: stage.record[1].leader != "zoe") >= LEASE_SECONDS - 0.6
    assert stage.record[1].term == 8


@pytest.mark.parametrize("first", [True, False])
@on_stage
async def test_an_answer_that_is_lost_costs_no_lease(stage: Stage, first: bool) -> None:
    """The record is there, and who wrote it does not know: it is its own, and it says so again."""

    def lose() -> None:
        stage.ann.loss = 1.0
        stage.loop.call_later(0.5, setattr, stage.ann, "loss", 0.0)

    stage.before_puts(*[lambda: None] * (0 if first else 5), lose)
    await stage.ann.election.start()
    await stage.until(lambda: stage.ann.loss)
    await stage.until(lambda: not stage.ann.loss)
    await asyncio.sleep(3)
    assert stage.ann.election.is_sure(0)
    assert roles(stage.ann) is Role.LEADING
    assert stage.record[1].term == 1
    # Who had it before was sure of it all the time; who did not was unsure once.
    assert [it.roles[0] for it in stage.ann.seen][-2:] == (
        [Role.UNSURE, Role.LEADING] if first else [Role.LEADING]
    )


@pytest.mark.parametrize(("answer_seconds", "questions"), [(0.0, 10), (ASK_SECONDS, 5)])
@on_stage
async def test_a_cluster_that_says_no_is_asked_again_at_its_time(
    stage: Stage, answer_seconds: float, questions: int
) -> None:
    """And one that says nothing sooner: that was long enough."""
    asked = 0

    async def last(stream: str, subject: str) -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(answer_seconds)
        raise NoAnswer("not now")

    stage.ann.last = last  # type: ignore[method-assign]
    await stage.ann.election.start()
    await asyncio.sleep(10 * LOOK_SECONDS - 0.01)
    assert (asked, stage.ann.election.view.roles[0]) == (questions, Role.FOLLOWING)


# --- taking it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("suspected", "seconds"), [(False, LEASE_SECONDS), (True, SUSPECT_SECONDS)])
@on_stage
async def test_the_lease_of_who_has_died_is_taken_after_its_time(
    stage: Stage, suspected: bool, seconds: float
) -> None:
    await stage.both()
    await stage.renewed()
    died = stage.loop.now
    die(stage.ann)
    if suspected:
        await asyncio.sleep(2 * LOOK_SECONDS)  # the record was seen before
        stage.bob.election.suspect("ann")
    await stage.until(lambda: stage.record[1].leader == "bob")
    assert seconds <= stage.loop.now - died <= seconds + 2 * LOOK_SECONDS + 0.1
    await stage.until(lambda: stage.bob.election.is_sure, 2 * WAY_SECONDS)
    assert stage.record[1].term == 2
    await asyncio.sleep(WAY_SECONDS)
    await asyncio.sleep(WAY_SECONDS)
    assert (stage.bob.seen[-1].roles[0], stage.bob.seen[-1].claims[0].term) == (Role.LEADING, 2)


@on_stage
async def test_a_suspicion_ends_with_the_next_record(stage: Stage) -> None:
    await stage.both()
    stage.bob.election.suspect("ann")
    await stage.renewed()
    await asyncio.sleep(2 * LOOK_SECONDS)
    await stage.renewed()
    died = stage.loop.now
    die(stage.ann)
    await stage.until(lambda: stage.record[1].leader == "bob")
    assert stage.loop.now - died >= LEASE_SECONDS


@on_stage
async def test_a_question_without_an_answer_ends_no_suspicion_and_begins_the_patience_anew(
    stage: Stage,
) -> None:
    await stage.both()
    await stage.renewed()
    died = stage.loop.now
    die(stage.ann)
    await asyncio.sleep(2 * LOOK_SECONDS)
    stage.bob.election.suspect("ann")
    stage.world.silent_until = stage.loop.now + 0.9
    await stage.until(lambda: stage.record[1].leader == "bob")
    took = stage.loop.now - died
    # Seen first some 1.6 s after she died: not before two more, and not three.
    assert 1.6 + SUSPECT_SECONDS - LOOK_SECONDS <= took < 1.6 + LEASE_SECONDS


@on_stage
async def test_of_two_who_try_one_wins_and_the_other_follows(stage: Stage) -> None:
    both = (stage.ann, stage.bob)
    for member in both:
        await member.election.start()
    await stage.until(lambda: any(member.election.is_sure(0) for member in both))
    # Who comes first at the same moment is asyncio's business, and not the same in every Python.
    (leader,) = [member for member in both if member.election.is_sure(0)]
    await stage.until(
        lambda: {member.election.view.claims[0].leader for member in both} == {stage.record[1].leader}
    )
    (other,) = [member for member in both if member is not leader]
    assert roles(other) is Role.FOLLOWING
    assert not other.election.is_sure(0)
    assert stage.record[1].leader == leader.election.view.claims[0].leader


@pytest.mark.parametrize("gone", ["vanished", "given back"])
@on_stage
async def test_a_record_that_is_gone_is_waited_for_and_one_that_was_given_back_is_not(
    stage: Stage, gone: str
) -> None:
    await stage.both()
    await stage.renewed()
    die(stage.ann)
    if gone == "vanished":
        del stage.world.store.records[LEASE]
    else:
        stage.ann.election.leases.sure_until[0] = float("-inf")
        stage.world.store.put(NAMES.state("session.ann"), b'{"session": 99, "ended": true}', None, None)
        stage.write(Claim(term=1))
    began = stage.loop.now
    await stage.until(lambda: LEASE in stage.world.store.records and stage.record[1].leader == "bob")
    took = stage.loop.now - began
    if gone == "vanished":
        assert LEASE_SECONDS <= took < LEASE_SECONDS + 3 * LOOK_SECONDS
    else:
        assert took < LOOK_SECONDS + 5 * WAY_SECONDS
        assert stage.record[1].term == 2


@on_stage
async def test_a_vanished_record_is_somebodys_with_a_term_that_no_other_reaches(stage: Stage) -> None:
    await stage.both()
    die(stage.ann)
    last = stage.world.store.seq
    del stage.world.store.records[LEASE]
    await stage.until(lambda: LEASE in stage.world.store.records)
    claim = stage.record[1]
    assert claim == Claim(UNKNOWN, claim.term)
    assert last <= claim.term < stage.record[0]
    seq = stage.record[0]  # stands for the term, which may have been higher than it says
    await stage.until(lambda: stage.record[1].leader == "bob")
    assert stage.record[1].term == seq + 1


@on_stage
async def test_a_late_word_for_a_vanished_record_takes_no_term_back(stage: Stage) -> None:
    """It was on its way while somebody led in a higher term, whose record has vanished, too."""

    def lead_and_vanish() -> None:
        stage.world.store.seq = 60
        stage.write(Claim("zoe", 55))
        del stage.world.store.records[LEASE]

    await stage.both()
    die(stage.ann)
    del stage.world.store.records[LEASE]
    stage.before_puts(lead_and_vanish)
    await stage.until(lambda: LEASE in stage.world.store.records)
    assert stage.record[1].leader == UNKNOWN
    await stage.until(lambda: stage.record[1].leader == "bob")
    assert stage.record[1].term > 60


# --- stopping ------------------------------------------------------------------------------------------


@on_stage
async def test_who_stops_gives_it_back_and_leaves_the_members(stage: Stage) -> None:
    await stage.both()
    await stage.until(lambda: "bob" in stage.ann.election.view.members)
    await asyncio.sleep(RENEW_SECONDS)
    began = stage.loop.now
    await stage.ann.election.stop()
    assert stage.loop.now - began < RENEW_SECONDS
    assert stage.record[1] == Claim(term=1, to="bob")
    assert not stage.ann.election.is_sure(0)
    assert NAMES.state("member.ann") not in stage.world.store.records
    assert await stage.until(lambda: stage.record[1].leader == "bob") < LOOK_SECONDS + 5 * WAY_SECONDS
    assert stage.record[1].term == 2


@on_stage
async def test_who_stops_and_does_not_lead_leaves_the_lease_alone(stage: Stage) -> None:
    await stage.both()
    await stage.bob.election.stop()
    assert stage.record[1].leader == "ann"
    seq = stage.world.store.seq
    await asyncio.sleep(10 * WAY_SECONDS)
    assert stage.world.store.seq <= seq + 1
    assert stage.ann.election.is_sure(0)


@on_stage
async def test_who_stops_while_it_takes_the_lease_gives_it_back(stage: Stage) -> None:
    """Its record is on the way, and nobody has stored it so far: a look at what is stored would not do."""
    stage.write(Claim(term=4))
    stage.ann.delay_seconds = 0.15
    await stage.ann.election.start()
    await stage.until(lambda: stage.ann.election.leases.session)
    await asyncio.sleep(0.65)  # the look took 0.6 s
    stage.ann.delay_seconds = 0.005
    assert stage.record[1].leader == ""
    await stage.ann.election.stop()
    assert stage.record[1] == Claim(term=5)


@on_stage
async def test_who_stops_during_a_renewal_loses_no_time(stage: Stage) -> None:
    """A renewal that was stored is answered; the record is given back behind it, however often it changes."""
    await stage.both()
    await stage.renewed()
    stopping = stage.loop.create_task(stage.ann.election.stop())
    await stage.until(lambda: stage.record[1] == Claim(term=1, to="bob"), 12 * WAY_SECONDS)
    await stopping


@pytest.mark.parametrize("changes", [2, 6])
@on_stage
async def test_who_cannot_give_it_back_ends_its_session(stage: Stage, changes: int) -> None:
    """Where somebody writes our record again between the look and the answer, as often as it is tried."""
    await stage.both()
    await asyncio.sleep(2 * WAY_SECONDS)  # between two renewals
    stage.before_puts(*[lambda: stage.write(stage.record[1])] * changes)
    await stage.ann.election.stop()
    assert (stage.record[1].leader == "ann") is (changes > 2)
    await stage.until(lambda: stage.record[1].leader == "bob", 2 * LEASE_SECONDS + 2 * LOOK_SECONDS)


@on_stage
async def test_a_cluster_that_does_not_answer_does_not_keep_anybody(stage: Stage) -> None:
    await stage.both()
    stage.world.silent_until = FOREVER
    began = stage.loop.now
    await stage.ann.election.stop()
    assert stage.loop.now - began < 3 * ASK_SECONDS
    assert not stage.ann.election.is_sure(0)


# --- letting go ----------------------------------------------------------------------------------------


@on_stage
async def test_who_lets_go_is_not_sure_any_more_and_others_come_first(stage: Stage) -> None:
    await stage.both()
    await stage.until(lambda: "bob" in stage.ann.election.view.members)
    releasing = stage.loop.create_task(stage.ann.election.release(0))
    await asyncio.sleep(0)
    assert not stage.ann.election.is_sure(0)
    await releasing
    assert stage.record[1] == Claim(term=1)
    await stage.until(lambda: stage.bob.election.is_sure(0), LOOK_SECONDS + TURN_SECONDS + 0.4)
    assert stage.record[1].term == 2


@on_stage
async def test_who_lets_go_and_is_alone_has_it_again_after_a_while(stage: Stage) -> None:
    """Its log could not be opened, and may be by then."""
    await stage.ann.election.start()
    await stage.until(lambda: stage.ann.election.is_sure(0))
    await stage.ann.election.release(0)
    assert await stage.until(lambda: stage.ann.election.is_sure(0)) >= LEASE_SECONDS


@pytest.mark.parametrize("takes_it", [True, False])
@on_stage
async def test_what_is_given_to_somebody_is_left_to_it(stage: Stage, takes_it: bool) -> None:
    await stage.both()
    await stage.cid.election.start()
    await stage.until(lambda: set(stage.bob.election.view.members) == {"ann", "bob", "cid"})
    if not takes_it:
        die(stage.cid)
    await stage.ann.election.release(0, "cid")
    assert stage.record[1] == Claim(term=1, to="cid")
    taken = await stage.until(lambda: stage.record[1].leader)
    if takes_it:
        assert stage.record[1].leader == "cid"
        assert taken < LOOK_SECONDS + 5 * WAY_SECONDS
    else:
        assert taken >= LEASE_SECONDS - LOOK_SECONDS


@on_stage
async def test_a_release_that_is_not_answered_is_said_again(stage: Stage) -> None:
    await stage.both()
    await stage.until(lambda: "bob" in stage.ann.election.view.members)
    stage.world.silent_until = stage.loop.now + 1.2
    await stage.ann.election.release(0)
    assert not stage.ann.election.leads(0)
    await stage.until(lambda: stage.record[1].leader != "ann", 4 * LOOK_SECONDS + ASK_SECONDS)
    await stage.until(lambda: stage.bob.election.is_sure(0))


@on_stage
async def test_how_many_shards_there_are_is_written_again_where_it_has_vanished(stage: Stage) -> None:
    record = NAMES.state("shards")
    await stage.ann.election.start()
    await stage.until(lambda: record in stage.world.store.records, 1.0)
    assert json.loads(stage.world.store.records[record][1]) == {"shards": 1}


# --- members -------------------------------------------------------------------------------------------


@on_stage
async def test_members_are_seen_as_long_as_they_say_so_and_forgotten_by_who_leads(stage: Stage) -> None:
    of_bob = NAMES.state("member.bob")
    forgets: list[str] = []

    for member in stage.world.members:

        async def purge(name: str, subject: str, member: Member = member) -> int:
            forgets.append(member.name)
            return await Member.purge_subject(member, name, subject)

        member.purge_subject = purge  # type: ignore[method-assign]
        await member.election.start()
    everybody = {name: {"name": name, WARM: [0], WEARY: False} for name in ("ann", "bob", "cid")}
    await stage.until(
        lambda: all(it.election.view.members == everybody for it in stage.world.members),
        3 * MEMBER_SECONDS,
    )
    for _ in range(20):
        await asyncio.sleep(MEMBER_SECONDS)
        assert stage.ann.election.view.members == everybody
    seq = stage.world.store.records[of_bob][0]
    await stage.until(lambda: stage.world.store.records[of_bob][0] != seq, MEMBER_SECONDS + 1)
    died = stage.loop.now
    die(stage.bob)
    others = (stage.ann, stage.cid)
    await stage.until(lambda: all("bob" not in it.election.view.members for it in others))
    assert (
        MEMBER_GONE_SECONDS - 0.1 <= stage.loop.now - died <= MEMBER_GONE_SECONDS + 2 * MEMBER_SECONDS + 0.1
    )
    assert {"ann", "cid"} == set(stage.cid.election.view.members)
    await asyncio.sleep(MEMBER_FORGET_SECONDS - (stage.loop.now - died) - 0.1)
    assert of_bob in stage.world.store.records
    await stage.until(lambda: of_bob not in stage.world.store.records, 2 * MEMBER_SECONDS + 1)
    assert forgets == [stage.record[1].leader]
    # He was away, and is back.
    stage.bob.stalled_until = 0.0
    stage.world.store.put(of_bob, b'{"name": "bob"}', None, None)
    await stage.until(lambda: "bob" in stage.ann.election.view.members, 2 * MEMBER_SECONDS)


@pytest.mark.parametrize("said", [b"[1]", b"{", b"[" * 100_000])
@on_stage
async def test_what_a_member_says_that_cannot_be_read_is_nothing(stage: Stage, said: bytes) -> None:
    await stage.ann.election.start()
    stage.world.store.put(NAMES.state("member.odd"), said, None, None)
    await stage.until(lambda: "odd" in stage.ann.election.view.members)
    assert stage.ann.election.view.members["odd"] == {}


@on_stage
async def test_our_own_record_is_heard_first_and_then_the_oldest(stage: Stage) -> None:
    heard: list[str] = []
    stage.bob.election._heard = lambda member, facts, stored: heard.append(member)
    for name in ("ann", "cid", "ann"):
        stage.world.store.put(NAMES.state(f"member.{name}"), b"{}", None, None)
    await stage.bob.election.start()
    await stage.until(lambda: len(heard) == 3)
    assert heard == ["bob", "cid", "ann"]


# --- who has the log ---------------------------------------------------------------------------------


async def _ann_dies_before(stage: Stage, *others: Member) -> None:
    await stage.both()
    for other in others:
        await other.election.start()
    await stage.until(lambda: set(stage.bob.election.view.members) >= {"ann", *(it.name for it in others)})
    die(stage.ann)


@on_stage
async def test_a_lease_that_is_free_is_for_who_has_the_log(stage: Stage) -> None:
    stage.bob.warm = False
    await _ann_dies_before(stage, stage.cid)
    stage.bob.election.suspect("ann")  # He could have it a second before Cid.
    await stage.until(lambda: stage.record[1].leader == "cid")
    assert roles(stage.bob) is Role.FOLLOWING


@on_stage
async def test_a_lease_that_is_given_back_is_for_who_has_the_log(stage: Stage) -> None:
    """Also where one comes at this very moment, and has not looked who else is there."""
    await stage.both()
    await stage.until(lambda: "bob" in stage.ann.election.view.members)
    stage.cid.warm = False
    await stage.ann.election.stop()
    await stage.cid.election.start()  # It looks at once, and Bob with his next step.
    await stage.until(lambda: stage.record[1].leader)
    assert stage.record[1].leader == "bob"


@on_stage
async def test_where_nobody_has_the_log_anybody_leads(stage: Stage) -> None:
    stage.bob.warm = stage.cid.warm = False
    await _ann_dies_before(stage, stage.cid)
    # As long as Ann's word is fresh that she has it, she may be back.
    assert (
        await stage.until(lambda: stage.record[1].leader in ("bob", "cid"))
        < LEASE_SECONDS + 2 * MEMBER_GONE_SECONDS
    )


@on_stage
async def test_who_has_the_log_and_does_not_lead_is_not_waited_for_for_ever(stage: Stage) -> None:
    stage.bob.warm = False
    await _ann_dies_before(stage, stage.cid)
    stage.cid.election.leases._offer = _no_offer
    passed = await stage.until(lambda: stage.record[1].leader == "bob", COLD_SECONDS + 2 * LEASE_SECONDS)
    assert passed > COLD_SECONDS


def _no_offer(shard: int, term: int) -> Claim:
    raise NoAnswer("it says that it is there, and does nothing")


# --- other versions, and faults ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "leader", "term"),
    [
        (
            b'{"leader": "new", "term": 7, "relay": "h:1", "secret": "s", "version": "9", "shard": 3}',
            "new",
            8,
        ),
        (b"no JSON", UNKNOWN, 6),
        (b'{"leader": "new", "term": "7"}', UNKNOWN, 6),
        (b'{"leader": 3, "term": 7}', UNKNOWN, 6),
    ],
)
def test_a_lease_of_another_version_is_one(payload: bytes, leader: str, term: int) -> None:
    """A field more in the record, or nothing that can be read: it is followed until its time is over."""
    loop = SimLoop()
    world = World(1, loop, ["ann", "bob", "cid"])
    world.store.records[LEASE] = 5, payload
    world.store.seq = 5
    election = world.members[0].election

    async def life() -> None:
        await election.start()
        await asyncio.sleep(1)
        assert (election.view.roles[0], election.view.claims[0].leader) == (Role.FOLLOWING, leader)
        await asyncio.sleep(5)
        assert election.is_sure(0)
        assert (election.view.claims[0].leader, election.view.claims[0].term) == ("ann", term)
        await election.stop()

    loop.run_until_complete(life())
    loop.close()


def test_a_fault_of_ours_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    logging.disable(logging.NOTSET)
    loop = SimLoop()
    ann = World(1, loop, ["ann", "bob", "cid"]).members[0]
    faults = 20

    def offer(shard: int, term: int) -> Claim:
        nonlocal faults
        faults -= 1
        if faults > 0:
            raise KeyError("a fault")
        return Claim("ann", term)

    ann.election.leases._offer = offer

    async def life() -> None:
        await ann.election.start()
        await asyncio.sleep(20)
        assert ann.election.is_sure(0)
        await ann.election.stop()

    loop.run_until_complete(life())
    loop.close()
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "a fault in the election, which goes on"
    ]


@pytest.mark.parametrize("leading", [False, True])
def test_who_stops_during_a_step_leaves_no_lease_behind(leading: bool) -> None:
    """Its record is on the way when it is told to stop: it is given back all the same."""
    loop = SimLoop()
    world = World(1, loop, ["ann", "bob", "cid"])
    ann = world.members[0]
    ann.delay_seconds = 0.2

    async def life() -> None:
        await ann.election.start()
        while not (ann.election.view.roles[0] is Role.LEADING if leading else LEASE in world.store.records):
            await asyncio.sleep(0.01)
        if leading:
            seq = world.store.records[LEASE][0]
            while world.store.records[LEASE][0] == seq:  # stored, and not answered
                await asyncio.sleep(0.01)
        await ann.election.stop()
        assert json.loads(world.store.records[LEASE][1])["leader"] == ""
        assert not ann.election.is_sure(0)

    loop.run_until_complete(life())
    loop.close()
