"""Placement: which front-end should lead a shard, and which should stand by.

Rendezvous hashing gives every shard an order of the front-ends that are there: each pair has a score,
the same at everybody, and a front-end that comes or goes changes nobody else's place in it.

    standby   the first in the order that does not lead: it keeps a copy, and takes a lease that is free
    leader    the one that leads, as long as nobody leads more than its share

Shares are equal, but for one shard. By scores alone they are not: of 16 shards one of three front-ends
would lead nine, now and then. So leaders are bounded by their share, and the order decides which shards
go where: whoever leads too many keeps those that have their best score there, and the others go to those
who lead too few, best scores first. Who leads now is a part of the question, because shares cannot be
equal and still follow from the members alone without moving shards between two that stay.

Rules that always hold:
  * The answer follows from what is given alone: everybody who sees the same comes to the same.
  * Who goes moves only what it led, and who comes gets no more than its share, and only from those that
    have more than theirs. A plan that is carried out in part, in any order, is the rest of the same
    plan.
  * A cluster with one shard never moves it.
  * Who is weary (it lost its session a short while ago) is the last in every order, and gets nothing
    new.

A front-end that is started again has another name and the same `home`, which is what is hashed: it gets
the shards of which it has copies.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Place:
    """Where a shard should be; empty: nowhere."""

    leader: str = ""
    standby: str = ""


@lru_cache(maxsize=65_536)
def score(home: str, shard: int) -> int:
    return int.from_bytes(blake2b(f"{shard} {home}".encode(), digest_size=8).digest())


def order(shard: int, homes: Mapping[str, str], weary: Collection[str] = ()) -> list[str]:
    """All members, the best first. `homes`: what is hashed, by the names of the members."""
    return sorted(homes, key=lambda name: (name in weary, -score(homes[name], shard), name))


def place(homes: Mapping[str, str], leaders: Sequence[str], weary: Collection[str] = ()) -> tuple[Place, ...]:
    """For each shard. `leaders` are those of now; a shard without one (or of somebody who is no member) is
    as good as led by the first in its order, who takes it."""
    wanted = _leaders(homes, [it if it in homes else "" for it in leaders], weary)
    places = []
    for shard, leader in enumerate(leaders):
        those = order(shard, homes, weary)
        present = leader if leader in homes else next(iter(those), "")
        places.append(Place(wanted[shard], next((it for it in those if it != present), "")))
    return tuple(places)


def _leaders(homes: Mapping[str, str], leaders: Sequence[str], weary: Collection[str]) -> list[str]:
    if not homes:
        return ["" for _ in leaders]
    led: dict[str, list[int]] = {name: [] for name in homes}
    for shard, name in enumerate(leaders):
        if name:
            led[name].append(shard)
    shares = _shares({name: len(shards) for name, shards in led.items()}, len(leaders), weary)
    wanted = ["" for _ in leaders]
    for name, shards in led.items():
        shards.sort(key=lambda shard: (-score(homes[name], shard), shard))
        for shard in shards[: shares[name]]:
            wanted[shard] = name
    lacks = {name: shares[name] - len(shards) for name, shards in led.items() if shares[name] > len(shards)}
    pairs = sorted(
        (-score(homes[name], shard), shard, name)
        for shard, it in enumerate(wanted)
        if not it
        for name in lacks
    )
    for _, shard, name in pairs:
        if not wanted[shard] and lacks[name]:
            wanted[shard] = name
            lacks[name] -= 1
    return wanted


def _shares(loads: Mapping[str, int], shards: int, weary: Collection[str]) -> dict[str, int]:
    """How many each should lead. What is left over stays with those who have it."""
    steady = [name for name in loads if name not in weary] or list(loads)
    most = -(-shards // len(loads))
    shares = {name: min(load, most) for name, load in loads.items() if name not in steady}
    each, over = divmod(shards - sum(shares.values()), len(steady))
    for rank, name in enumerate(sorted(steady, key=lambda name: (loads[name] <= each, name))):
        shares[name] = each + (rank < over)
    return shares
