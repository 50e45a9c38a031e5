"""Fingerprints: sums that say whether a key that comes again brings the same messages."""

import json
from array import array

import pytest

from penstock.log.fingerprint import Fingerprint, is_of_stages
from penstock.model.batch import Batch
from penstock.model.life import Reason


def repairs(payloads: list[bytes], letters: list[int]) -> Batch:
    batch = Batch.of(payloads, protocol="http")
    batch.repairs = array("q", letters)
    return batch


def dead(payloads: list[bytes]) -> Batch:
    batch = Batch.of(payloads, protocol="pipeline")
    batch.dead = Reason.BAD_RECORD
    return batch


PARTS = [
    ("orders", Batch.of([b"a", b"b", b"\xff" * 300], protocol="http")),
    ("bills", dead([b"x", b"y"])),
    ("orders", repairs([b"first", b"second"], [7, 1 << 40])),
    ("orders", Batch.of([b"c"], protocol="http")),
    ("bills", repairs([b"third"], [0])),
]


def fingerprint(key: str, parts: list[tuple[str, Batch]]) -> Fingerprint:
    found = Fingerprint(key)
    found.add(parts)
    return found


@pytest.mark.parametrize("key", ["transaction/nightly", "transaction/spark/query/7"])
def test_of_stages_it_is_the_sum(key: str) -> None:
    whole = fingerprint(key, PARTS)
    for cut in range(len(PARTS) + 1):
        stages = [fingerprint(key, PARTS[cut:]), fingerprint(key, PARTS[:cut]), fingerprint(key, [])]
        kept = json.loads(json.dumps([it.totals() for it in stages]))
        summed = Fingerprint.of_totals(key, kept)
        assert summed.text(["1", "2"]) == whole.text(["2", "1"])
        assert summed.counts() == whole.counts() == {"orders": 4, "bills": 2}
        again = Fingerprint.of_totals(key, [summed.totals()])
        assert sorted(again.totals()) == sorted(whole.totals())


def test_other_messages_have_another_one() -> None:
    text = fingerprint("transaction/k", PARTS).text(["1"])
    swapped = [*PARTS[:2], ("orders", repairs([b"second", b"first"], [7, 1 << 40])), *PARTS[3:]]
    for parts in (PARTS[1:], [*PARTS, PARTS[0]], swapped):
        assert not fingerprint("transaction/k", parts).is_of(text)
    assert fingerprint("transaction/k", PARTS[::-1]).is_of(text)


def test_of_a_stream_nothing_is_remembered() -> None:
    assert fingerprint("transaction/spark/query/7", PARTS).text(["1"]) == ""
    assert fingerprint("spark/query/7", PARTS).text(["1"])


def test_the_stages_are_remembered_too() -> None:
    text = fingerprint("transaction/k", PARTS).text(["1", "2"])
    assert is_of_stages(text, ["2", "1"])
    assert not is_of_stages(text, ["2"])
    assert is_of_stages("", ["2"])


def test_as_earlier_versions_wrote_it() -> None:
    text = "d17170f92ec6c55e6980e100/862b22a72d9a59b6"
    assert fingerprint("transaction/k", PARTS).text(["stage"]) == text


def test_an_older_version_did_not_look_at_whose_payloads_they_are() -> None:
    found = fingerprint("transaction/key", [("orders", repairs([b"x", b"y"], [3, 5]))])
    assert found.is_of("f540530ce1c6d218393b8a58/e64984c3aacf6ede")
    assert found.is_of(found.text(["stage"]))
    assert not found.text(["stage"]).startswith("f540530ce1c6d218393b8a58")
