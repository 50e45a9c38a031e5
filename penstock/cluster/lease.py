"""Leases: which front-end leads which shard. What follows from what was seen, without IO and without a
clock.

Every front-end has a session: one record (`session.MEMBER`), which it writes again every
`RENEW_SECONDS`. Every shard has a lease: one record that names who leads, in which session and term, and
stays as it is while nothing changes. So a shard at rest costs nothing; a cluster at rest, one heartbeat
a front-end. All records are written by compare and set: of several who try, one wins.

A front-end that stops writing its session loses all its leases at once. Whoever has seen the session
unchanged for `LEASE_SECONDS` (`SUSPECT_SECONDS`, where its front-end cannot be reached either) fences
it: writes over it that it has ended. From then on its renewal fails, it knows that all is lost, and
begins another session; and whatever names the old one, also a claim that was long on its way, is void
for everybody who reads it.

Rules that always hold:
  * Who leads is unsure before anybody else may take the lease. It is sure for `UNSURE_SECONDS` from when
    it sent the session's record that was stored last; everybody else counts from when that was seen,
    which is later, and fences by compare and set, which fails if there was another. `UNSURE_SECONDS` is
    the shorter time by so much that clocks may differ by a fifth.
  * A lease may change although its session lives: it vanished, or a stranger wrote over it. So who leads
    is sure only for `_proof_seconds` from the last proof that the lease is still there: a look that has
    both the lease and a session's record of ours shows the stream as it was after that was sent; without
    such a look, the lease is written again. Everybody else waits for `_unknown_seconds` before such a
    lease is taken.
  * Session numbers go up: each is larger than the number of any record when it was chosen. A record with
    a smaller number says nothing about a session with a larger one.
  * What has vanished is written again first, as somebody's that nobody knows, and waited for like any
    other: only of a record that is there can be told whether it has changed. The same goes for what
    cannot be read.
  * `term` goes up with every new leader, and never down: it is at most the number of its record, and
    where the record was lost, it goes on from the number of the one that stands in for it.
  * Reads may be late: a record that is older than one we have seen is passed over, one that is missing
    is missed by compare and set. No read says that something may be taken: only what is stored does.
  * Seconds in which our own session was not stored do not count against others: the cluster was away.

Which of those that may take a lease does is for `placement.py`: at once the first in the order of those
that have the log (`WARM`), later the others; who has not got it leaves it to them for `COLD_SECONDS`.
Leadership moves when membership has been quiet for `QUIET_SECONDS`, one shard at a time, to who has the
log: the record of a lease that was given back names for whom. Who lost its session is `weary` for
`WEARY_SECONDS`, twice as long each time: others come first, and nothing is handed to it, so that a
front-end under too much load does not take again and again what it cannot keep.

A cluster with one shard is what earlier versions know, whose lease is its own heartbeat. So there, who
leads writes the lease again with every renewal and is sure only as long as that was stored, too; and a
lease without a session is waited for as they do. Front-ends of both kinds may lead the same cluster in
turn.

The file is long because what may be written next follows from all that was seen: leases, sessions and members
are one state.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from penstock.cluster.placement import Place, order, place
from penstock.cluster.records import (
    HOME,
    LEASE,
    MEMBER,
    SESSION,
    SHARDS,
    UNKNOWN,
    WARM,
    WEARY,
    Act,
    Claim,
    Put,
    Role,
    Seen,
    View,
    claim_of,
    fields_of,
    session_of,
)

RENEW_SECONDS: Final = 0.5
LEASE_SECONDS: Final = 3.0
SUSPECT_SECONDS: Final = 1.8
UNSURE_SECONDS: Final = 1.5
COLD_SECONDS: Final = 30.0
"""Whoever has the log and has not taken a free lease in this time is not going to."""

TURN_SECONDS: Final = 1.0
"""How long each leaves a free lease to the one before it in the order."""

QUIET_SECONDS: Final = 10.0
AVOID_SECONDS: Final = 30.0
"""How long who could not open a log leaves its lease to others."""

DECLINED_SECONDS: Final = 60.0
"""How long a shard is not offered again to somebody who did not take it."""

WEARY_SECONDS: Final = 30.0
WEARY_SECONDS_MAX: Final = 600.0
MEMBER_GONE_SECONDS: Final = 5.0
MEMBER_FORGET_SECONDS: Final = 600.0

NEVER: Final = float("-inf")
_SENT_KEPT: Final = 16


@dataclass(slots=True)
class _Lease:
    seq: int = 0
    claim: Claim = field(default_factory=Claim)
    since: float | None = None  # we have seen it unchanged from then on, with no gap
    free_since: float | None = None
    suspected: bool = False
    is_missing: bool = False  # in the last look
    is_led: bool = False  # by us
    proof: float = NEVER  # it was there at that time or later, and ours
    is_releasing: bool = False
    to: str = ""  # whom we handed it to, until somebody leads
    avoid_until: float = NEVER


@dataclass(slots=True)
class _Session:
    seq: int
    number: int
    ended: bool
    since: float | None
    suspected: bool = False
    is_missing: bool = False
    changed: float = NEVER

    def is_over(self, number: int) -> bool:
        return self.number > number or (self.number == number and self.ended)


@dataclass(slots=True)
class _Member:
    seq: int
    facts: dict[str, Any]  # JSON
    since: float
    time: str
    is_heard: bool = False


class Leases:
    """What one front-end has seen and written, and what it should write next.

    Whoever drives it tells what a look has found (`saw`), writes what `beat`, `touches` and `wants` say,
    tells what became of that (`stored`, `refused`), and gives the time of its own clock with everything.
    """

    def __init__(self, member: str, shards: int, offer: Callable[[int, int], Claim]) -> None:
        """`offer` makes what we would say if we led that shard in that term."""
        self.member = member
        self.shards = shards
        self._offer = offer
        self._is_single = shards == 1
        self._proof_seconds = UNSURE_SECONDS if self._is_single else 2 * UNSURE_SECONDS
        self._unknown_seconds = LEASE_SECONDS if self._is_single else 2 * LEASE_SECONDS
        self.warm: frozenset[int] = frozenset()  # by our own word; set by the driver
        self._leases = [_Lease() for _ in range(shards)]
        self._sessions: dict[str, _Session] = {}
        self._members: dict[str, _Member] = {}
        self._seq_last = 0  # of all that was seen
        self._is_counted = True  # The record of how many shards there are was there.
        # Our own session
        self.session = 0  # its number, from when it was stored
        self._number = 0  # the same, from when it was sent first
        self._session_seq = 0
        self._begin: tuple[int, int] | None = None  # the record to write over, and the next number
        self._beat = 0  # counts all that were sent, of all sessions
        self._beat_stored = 0
        self._beats: deque[tuple[int, float]] = deque(maxlen=_SENT_KEPT)  # and when
        self.renewed = NEVER  # when we sent the last record that was stored
        self._is_in_doubt = True  # our record must be looked at first
        self._another = 0, NEVER  # a record of our name that is not ours, and since when it is there
        self._is_ending = False
        self._weary_until = NEVER
        self._weary_seconds = WEARY_SECONDS
        # Who is there
        self._there: dict[str, str] = {}
        self._weary: frozenset[str] = frozenset()
        self._quiet_since = NEVER
        self._plan: tuple[Place, ...] = ()
        self._planned_for: object = None
        self._copies: frozenset[int] = frozenset()
        self._has_settled = False
        self._declined: dict[tuple[int, str], float] = {}
        self.sure_until = [NEVER] * shards

    # --- keys ------------------------------------------------------------------------------------

    def lease_key(self, shard: int) -> str:
        return LEASE if self._is_single else f"{LEASE}.{shard:02d}"

    def shard_of(self, key: str) -> int:
        """-1: none of ours."""
        if self._is_single:
            return 0 if key == LEASE else -1
        head, _, number = key.partition(".")
        shard = int(number) if head == LEASE and number.isdecimal() and len(number) <= 3 else -1
        return shard if shard < self.shards and key == self.lease_key(shard) else -1

    @property
    def session_key(self) -> str:
        return SESSION + self.member

    @property
    def filters(self) -> list[str]:
        """What a look looks at."""
        return [SHARDS, LEASE if self._is_single else LEASE + ".*", SESSION + "*", MEMBER + "*"]

    # --- being sure ------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Until when we are sure of what we lead; read by other threads."""
        for shard, lease in enumerate(self._leases):
            until = NEVER
            if lease.is_led:
                until = min(self.renewed + UNSURE_SECONDS, lease.proof + self._proof_seconds)
            self.sure_until[shard] = until

    def leads(self, shard: int) -> bool:
        return self._leases[shard].is_led

    def _is_mine(self, claim: Claim) -> bool:
        return claim.leader == self.member and claim.session == self.session != 0

    def are_named(self) -> bool:
        """Whether a lease names us, in whatever session."""
        return any(lease.claim.leader == self.member for lease in self._leases)

    # --- our session -----------------------------------------------------------------------------

    def beat(self, now: float) -> Put | None:
        """The record that says that we are there; None: our own must be looked at first (`saw_own`)."""
        if self._is_in_doubt:
            return None
        if self.session:
            last_seq = self._session_seq
        elif self._begin is not None:
            last_seq, self._number = self._begin
        else:
            return None
        self._beat += 1
        self._beats.append((self._beat, now))
        said = {"session": self._number, "beat": self._beat}
        return Put(Act.BEAT, self.session_key, said, last_seq, now)

    def saw_own(self, seen: Seen | None, seq_last: int, now: float) -> None:
        """Our session's record as the stream's leader has it; where there is none, the last number there."""
        if seen is None:
            self._lose_session(now)
            self._begin = 0, seq_last + 1
        elif seen.seq < self._session_seq:
            return  # an old one: the node that answered does not lead any more
        else:
            number, ended, beat = session_of(seen)
            if number == self._number and not ended and self._is_beat_of_ours(beat):
                self._adopt(seen.seq, beat)
            elif number == self._number == self.session and not ended and seen.seq == self._session_seq:
                pass  # as it was
            else:
                self._lose_session(now)
                if self._another[0] != seen.seq:
                    self._another = seen.seq, now
                # It may be of somebody who has our name: he is waited for, like anybody.
                if not ended and now - self._another[1] < LEASE_SECONDS:
                    return
                self._begin = seen.seq, seen.seq + 1
        self._is_in_doubt = False
        self._settle()

    def _is_beat_of_ours(self, beat: int) -> bool:
        """Whether it is one that we have sent, and later than what we know to be stored."""
        return self._beat_stored < beat <= self._beat

    def _adopt(self, seq: int, beat: int) -> None:
        """A record of ours is there, whether or not that was answered."""
        self._session_seq = max(self._session_seq, seq)
        self._beat_stored = beat
        self.session = self._number
        self.renewed = max(self.renewed, next((sent for it, sent in self._beats if it == beat), NEVER))

    def _lose_session(self, now: float) -> None:
        if not self.session:
            return
        self.session = self._number = self._session_seq = 0
        self.renewed = NEVER
        for lease in self._leases:
            lease.is_led = lease.is_releasing = False
        self._settle()
        if now - self._weary_until > WEARY_SECONDS_MAX:
            self._weary_seconds = WEARY_SECONDS
        self._weary_until = now + self._weary_seconds
        self._weary_seconds = min(2 * self._weary_seconds, WEARY_SECONDS_MAX)

    def end(self, now: float) -> Put | None:
        """The record that says that our session is over, and nothing is ours any more."""
        number, seq = self.session, self._session_seq
        self._is_ending = True
        self.renewed = NEVER
        for lease in self._leases:
            lease.is_led = False
        self._settle()
        said = {"session": number, "ended": True}
        return Put(Act.END, self.session_key, said, seq, now) if number else None

    # --- what was seen ---------------------------------------------------------------------------

    def looked_in_vain(self) -> None:
        """Nobody answered: what others have written meanwhile was not seen."""
        for lease in self._leases:
            lease.since = None
        for session in self._sessions.values():
            session.since = None

    def saw(self, found: Collection[Seen], now: float) -> list[tuple[str, dict[str, Any], str]]:
        """All records there are. What members say that is new, with when it was stored: ours first."""
        if now - self.renewed >= UNSURE_SECONDS:
            self.looked_in_vain()  # What we write is not stored; nor is what others do.
        for session in self._sessions.values():
            session.is_missing = True
        for lease in self._leases:
            lease.is_missing = True
        proven = NEVER
        fresh: list[int] = []
        own = MEMBER + self.member
        for seen in sorted(found, key=lambda it: (it.key != own, it.seq)):
            self._seq_last = max(self._seq_last, seen.seq)
            if seen.key.startswith(SESSION):
                name = seen.key.removeprefix(SESSION)
                self._saw_session(name, seen, now)
                if name == self.member:
                    proven = self._proven_by(seen, now)
            elif seen.key.startswith(MEMBER):
                self._saw_member(seen, now)
            elif (shard := self.shard_of(seen.key)) >= 0:
                self.saw_lease(shard, seen, now)
                if seen.seq == self._leases[shard].seq:
                    fresh.append(shard)
        for shard in fresh:
            lease = self._leases[shard]
            if lease.is_led and not self._is_single:
                lease.proof = max(lease.proof, proven)
        self._forget()
        keys = {seen.key for seen in found}
        self._is_counted = SHARDS in keys
        self._members = {name: it for name, it in self._members.items() if MEMBER + name in keys}
        self._look_who_is_there(now)
        self._settle()
        return self._news() if own in keys else []

    def _news(self) -> list[tuple[str, dict[str, Any], str]]:
        unheard = [(name, it) for name, it in self._members.items() if not it.is_heard]
        for _, it in unheard:
            it.is_heard = True
        unheard.sort(key=lambda it: (it[0] != self.member, it[1].seq))
        return [(name, it.facts, it.time) for name, it in unheard]

    def _proven_by(self, seen: Seen, now: float) -> float:
        """Our own record in a look: what else is in it was so after that record was sent."""
        number, ended, beat = session_of(seen)
        if not self._number or number != self._number:
            return NEVER
        if ended:
            if not self._is_ending:
                self._lose_session(now)
                self._is_in_doubt = True
            return NEVER
        if self._is_beat_of_ours(beat) and not self._is_ending:
            self._adopt(seen.seq, beat)
            self._is_in_doubt = False
        return next((sent for it, sent in self._beats if it == beat), NEVER)

    def _saw_session(self, name: str, seen: Seen, now: float) -> None:
        session = self._sessions.get(name)
        if session is not None:
            session.is_missing = False
            if seen.seq < session.seq:
                return
            if seen.seq == session.seq:
                session.since = now if session.since is None else session.since
                return
        number, ended, _ = session_of(seen)
        self._sessions[name] = _Session(seen.seq, number, ended, now, changed=now)

    def _saw_member(self, seen: Seen, now: float) -> None:
        name = seen.key.removeprefix(MEMBER)
        known = self._members.get(name)
        if known is None or seen.seq > known.seq:
            self._members[name] = _Member(seen.seq, fields_of(seen.payload), now, seen.time)

    def saw_lease(self, shard: int, seen: Seen, now: float) -> None:
        lease = self._leases[shard]
        lease.is_missing = False
        if seen.seq < lease.seq:
            return
        if seen.seq == lease.seq:
            lease.since = now if lease.since is None else lease.since
            return
        self._is_now(lease, seen.seq, claim_of(seen), now)
        if not self._is_mine(lease.claim):
            lease.is_led = lease.is_releasing = False
        elif not lease.is_releasing and not self._is_ending:
            lease.is_led = True  # We took it, or said so again, and the answer was lost.
        if lease.claim.leader:
            self._was_taken(shard, lease, now)
        self._settle()

    def lost_lease(self, shard: int) -> None:
        """Its record has vanished."""
        lease = self._leases[shard]
        lease.is_led = lease.is_releasing = False
        lease.is_missing = True
        self._settle()

    def _is_now(self, lease: _Lease, seq: int, claim: Claim, now: float) -> None:
        if (claim.leader, claim.session) != (lease.claim.leader, lease.claim.session):
            lease.proof = NEVER
        # A term is at most the number of its record: so is the highest that was before a record got lost.
        term = seq if claim.leader == UNKNOWN else claim.term
        lease.seq, lease.claim, lease.since = seq, replace(claim, term=term), now
        lease.free_since, lease.suspected = None, False

    def _was_taken(self, shard: int, lease: _Lease, now: float) -> None:
        if lease.to and lease.claim.leader != lease.to:
            self._declined[shard, lease.to] = now + DECLINED_SECONDS
        if not self._is_mine(lease.claim) or lease.is_led:
            lease.to = ""

    def _forget(self) -> None:
        leaders = {it.claim.leader for it in self._leases}
        for name in [name for name, it in self._sessions.items() if it.is_missing and name not in leaders]:
            del self._sessions[name]

    def forgotten(self, now: float) -> list[str]:
        """Keys of records that are of no use any more; for one of us to remove."""
        if not self._leases[0].is_led:
            return []
        leaders = {it.claim.leader for it in self._leases}
        gone = [
            SESSION + name
            for name, it in self._sessions.items()
            if it.ended
            and not it.is_missing
            and name not in leaders
            and now - it.changed > MEMBER_FORGET_SECONDS
        ]
        # It died, and comes back under another name.
        return gone + [
            MEMBER + name for name, it in self._members.items() if now - it.since > MEMBER_FORGET_SECONDS
        ]

    def suspect(self, member: str) -> None:
        """It cannot be reached: fence it as soon as it must be unsure."""
        if (session := self._sessions.get(member)) is not None:
            session.suspected = True
        for lease in self._leases:
            if lease.claim.leader == member and not lease.claim.session:
                lease.suspected = True

    # --- who is there ----------------------------------------------------------------------------

    def _look_who_is_there(self, now: float) -> None:
        there = {}
        for name, session in self._sessions.items():
            if not session.ended and not session.is_missing:
                there[name] = self._home(name)
        for name, known in self._members.items():
            if name not in self._sessions and now - known.since <= MEMBER_GONE_SECONDS:
                there[name] = self._home(name)  # of an earlier version, or it comes at this moment
        if self.session:
            there[self.member] = self._home(self.member)
        weary = frozenset(
            name for name in there if name in self._members and self._members[name].facts.get(WEARY) is True
        ) - {self.member}
        if now < self._weary_until:
            weary |= {self.member}
        if (there, weary) != (self._there, self._weary):
            self._there, self._weary, self._quiet_since = there, weary, now

    def _home(self, name: str) -> str:
        known = self._members.get(name)
        return str(known.facts.get(HOME) or name) if known is not None else name

    def members(self, now: float) -> dict[str, dict[str, Any]]:
        """Who has said a short while ago that it is there, and what."""
        return {name: it.facts for name, it in self._members.items() if now - it.since <= MEMBER_GONE_SECONDS}

    def said_of_us(self, facts: dict[str, Any], now: float) -> dict[str, Any]:
        """What goes into our record among the members."""
        return {**facts, WARM: sorted(self._own_warm(now)), WEARY: now < self._weary_until}

    def _own_warm(self, now: float) -> set[int]:
        return {
            shard
            for shard, lease in enumerate(self._leases)
            if lease.is_led or (shard in self.warm and now >= lease.avoid_until)
        }

    def _is_warm(self, name: str, shard: int, now: float) -> bool:
        if name == self.member:
            return shard in self._own_warm(now)
        known = self._members.get(name)
        said = known.facts.get(WARM) if known is not None else None
        return (
            said is True
            if self._is_single and isinstance(said, bool)
            else isinstance(said, list) and shard in said
        )

    # --- what to write ---------------------------------------------------------------------------

    def touches(self, now: float) -> list[Put]:
        """The lease of a cluster with one shard, which is written again with the session."""
        return [self._touch(0, now)] if self._is_single and self._leases[0].is_led else []

    def _touch(self, shard: int, now: float) -> Put:
        lease = self._leases[shard]
        return self._lease_put(Act.TOUCH, shard, lease.claim, lease.seq, now)

    def _lease_put(self, act: Act, shard: int, claim: Claim, seq: int, now: float) -> Put:
        said = asdict(claim)
        if not claim.to:
            del said["to"]
        return Put(act, self.lease_key(shard), said, seq, now, shard)

    def wants(self, now: float) -> list[Put]:
        """All that should be written now, beside our session."""
        if not self.session or now - self.renewed >= UNSURE_SECONDS:
            return [it for it in self._about_ours(now) if it.act is Act.RELEASE]
        self._look_who_is_there(now)
        found = [*self._about_ours(now), *self._about_sessions(now), *self._about_others(now)]
        if not self._is_counted:  # It has vanished: who comes now has to know.
            self._is_counted = True
            found.append(Put(Act.COUNT, SHARDS, {SHARDS: self.shards}, 0, now))
        return found

    def _about_ours(self, now: float) -> Iterator[Put]:
        for shard, lease in enumerate(self._leases):
            if lease.is_releasing:
                claim = Claim(term=lease.claim.term, to=lease.to)
                yield self._lease_put(Act.RELEASE, shard, claim, lease.seq, now)
            elif lease.is_led and not self._is_single and now - lease.proof >= UNSURE_SECONDS:
                yield self._touch(shard, now)

    def _about_sessions(self, now: float) -> Iterator[Put]:
        for name, session in self._sessions.items():
            if session.ended or session.is_missing or session.since is None:
                continue
            if name == self.member:
                continue  # That is for `saw_own`.
            if now - session.since >= (SUSPECT_SECONDS if session.suspected else LEASE_SECONDS):
                said = {"session": session.number, "ended": True, "by": self.member}
                yield Put(Act.FENCE, SESSION + name, said, session.seq, now, member=name)
        marked = set()
        for lease in self._leases:
            name, number = lease.claim.leader, lease.claim.session
            if not number or name in marked or self._is_mine(lease.claim):
                continue
            there = self._sessions.get(name)
            if there is not None and there.is_over(number):
                continue
            if there is None or there.is_missing:
                seq = 0
            elif there.ended:
                seq = there.seq
            else:
                continue
            marked.add(name)
            said = {"session": number, "beat": -1, "by": self.member}
            yield Put(Act.MARK, SESSION + name, said, seq, now, member=name)

    def _about_others(self, now: float) -> Iterator[Put]:
        if self._is_ending:
            return
        for shard, lease in enumerate(self._leases):
            if lease.is_led or lease.is_releasing:
                continue
            if lease.is_missing:
                lease.is_missing = False  # until the next look
                claim = Claim(UNKNOWN, self._seq_last)
                yield self._lease_put(Act.STAND_IN, shard, claim, 0, now)
            elif self._is_free(lease, now):
                if lease.free_since is None:
                    lease.free_since = now
                if self._may_take(shard, lease, now):
                    yield self._claim(shard, lease, now)

    def _claim(self, shard: int, lease: _Lease, now: float) -> Put:
        offer = replace(self._offer(shard, lease.claim.term + 1), session=self.session)
        return self._lease_put(Act.CLAIM, shard, offer, lease.seq, now)

    def _is_free(self, lease: _Lease, now: float) -> bool:
        claim = lease.claim
        if not lease.seq:
            return False
        if not claim.leader:
            return True
        if claim.session:
            session = self._sessions.get(claim.leader)
            return session is not None and session.is_over(claim.session)
        patience = self._unknown_seconds
        if self._is_single and lease.suspected:
            patience = SUSPECT_SECONDS
        return lease.since is not None and now - lease.since >= patience

    def _may_take(self, shard: int, lease: _Lease, now: float) -> bool:
        """Whether the lease, which is free, is for us: not where somebody else can lead at once."""
        assert lease.free_since is not None
        waited = now - lease.free_since
        to = lease.claim.to
        if to and to != self.member and to in self._there and waited < LEASE_SECONDS:
            return False
        if now < lease.avoid_until:
            # We could not lead it. Where nobody else does, it may work by now.
            return waited >= LEASE_SECONDS + len(self._there) * TURN_SECONDS
        those = order(shard, self._there, self._weary)
        warm = [name for name in those if self._is_warm(name, shard, now)]
        if self.member in warm:
            return to == self.member or waited >= warm.index(self.member) * TURN_SECONDS
        if warm or self._may_be_back(shard, now):
            waited -= COLD_SECONDS
        cold = [name for name in those if name not in warm]
        return self.member in cold and waited >= cold.index(self.member) * TURN_SECONDS

    def _may_be_back(self, shard: int, now: float) -> bool:
        """Whether somebody has the log who was fenced a moment ago: reading it takes longer."""
        return any(
            now - it.since <= MEMBER_GONE_SECONDS and self._is_warm(name, shard, now)
            for name, it in self._members.items()
            if name not in self._there
        )

    def let_go(self, shard: int, to: str, now: float) -> None:
        """We do not lead it any more, whatever becomes of the record that says so. `to`: for whom it is."""
        lease = self._leases[shard]
        lease.is_releasing = self._is_mine(lease.claim)
        lease.is_led = False
        lease.to = to if lease.is_releasing else ""
        if not to:
            lease.avoid_until = now + AVOID_SECONDS
        self._settle()

    def leave(self, now: float) -> None:
        """Let go of all that we lead, and take nothing any more."""
        self._is_ending = True
        for shard, lease in enumerate(self._leases):
            if lease.is_led:
                self.let_go(shard, self._heir(shard, now), now)

    def _heir(self, shard: int, now: float) -> str:
        """Who should lead it where we go: the first that has the log."""
        those = [it for it in order(shard, self._there, self._weary) if it != self.member]
        return next((name for name in those if self._is_warm(name, shard, now)), "")

    # --- what became of it -----------------------------------------------------------------------

    def stored(self, put: Put, seq: int, now: float) -> None:
        if put.act in (Act.BEAT, Act.END):
            self._stored_own(put, seq)
        elif put.act in (Act.FENCE, Act.MARK):
            self._saw_session(put.member, Seen(put.key, seq, put.payload), now)
            self._look_who_is_there(now)
        elif put.shard >= 0:
            self._stored_lease(put, seq, now)
        self._settle()

    def _stored_own(self, put: Put, seq: int) -> None:
        if put.act is Act.END:
            self.session = self._number = 0
        elif put.said["session"] == self._number and self._is_beat_of_ours(put.said["beat"]):
            self._adopt(seq, put.said["beat"])

    def _stored_lease(self, put: Put, seq: int, now: float) -> None:
        lease = self._leases[put.shard]
        if seq < lease.seq:
            return  # Somebody has written since, and was seen.
        claim = claim_of(Seen(put.key, seq, put.payload))
        self._is_now(lease, seq, claim, now)
        lease.is_missing = False
        if self._is_mine(claim):
            lease.proof = max(lease.proof, put.sent)
            if put.act is Act.CLAIM and not self._is_ending:
                lease.is_led = True
                self._was_taken(put.shard, lease, now)
        elif put.act is Act.RELEASE:
            lease.is_releasing = False

    def refused(self, put: Put, now: float) -> None:
        """Somebody else was first. A lease is looked at anew then (`saw_lease`, `lost_lease`)."""
        if put.act in (Act.BEAT, Act.END):
            self._is_in_doubt = True
        elif put.member:
            if (session := self._sessions.get(put.member)) is not None:
                session.since = now
        elif put.shard >= 0:
            self._leases[put.shard].since = now

    # --- what others should know -----------------------------------------------------------------

    def view(self, now: float) -> View:
        claims, roles = [], []
        for shard, lease in enumerate(self._leases):
            is_over = bool(lease.claim.session) and self._is_free(lease, now)
            claims.append(Claim(term=lease.claim.term) if is_over else lease.claim)
            is_sure = now < self.sure_until[shard]
            roles.append(Role.FOLLOWING if not lease.is_led else Role.LEADING if is_sure else Role.UNSURE)
        self._plan_anew(claims)
        is_quiet = now - self._quiet_since >= QUIET_SECONDS
        led = frozenset(shard for shard, lease in enumerate(self._leases) if lease.is_led)
        if is_quiet or not self._has_settled:
            self._has_settled = self._has_settled or is_quiet
            near = (shard for shard, it in enumerate(self._plan) if self.member in (it.leader, it.standby))
            self._copies = led.union(near)
        else:
            self._copies |= led
        return View(
            tuple(claims),
            tuple(roles),
            self._copies,
            self._give(now) if is_quiet else {},
            self.members(now),
        )

    def _plan_anew(self, claims: Collection[Claim]) -> None:
        leaders = [claim.leader for claim in claims]
        planned_for = leaders, self._there, self._weary
        if planned_for != self._planned_for:
            self._planned_for = planned_for
            self._plan = place(self._there, leaders, self._weary)

    def _give(self, now: float) -> dict[int, str]:
        """One at a time: not before somebody leads what was given last."""
        self._declined = {it: until for it, until in self._declined.items() if now < until}
        if any(lease.to for lease in self._leases):
            return {}
        for shard, lease in enumerate(self._leases):
            to = self._plan[shard].leader
            if (
                lease.is_led
                and now < self.sure_until[shard]
                and to not in ("", self.member)
                and self._is_warm(to, shard, now)
                and (shard, to) not in self._declined
            ):
                return {shard: to}
        return {}
