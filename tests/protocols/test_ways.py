"""Fast and careful, whole and in pieces, compiled and interpreted: seeds of the one property of the wires."""

from array import array

import pytest

from penstock.protocols import phpmq_runs, risp, rq_controller, rq_decoder
from tests.build import interpreted_only
from tests.protocols.ways import digest

SEEDS = {"rq": 60, "phpmq": 300}
"""Each fault is found within so many."""

GOLDEN = {
    ("rq", 0): "f7913bcc0878d360",
    ("rq", 50): "326086a224cfc620",
    ("phpmq", 0): "3b46560230b85071",
    ("phpmq", 50): "ea83049b198cd2c3",
    ("sspq", 0): "c27b952ec3c1eb73",
    ("sspq", 50): "5f69743f97766c9a",
}
"""What `digest` says of 50 seeds from there on, in either build. It changes where a stream is read or written
in another way on purpose, and where `streams.py` changes: then take what the failure shows."""


@pytest.mark.parametrize(("wire", "first"), GOLDEN)
def test_every_way_through_a_stream_says_the_same_in_both_builds(wire: str, first: int) -> None:
    assert digest(wire, first, first + 50) == GOLDEN[wire, first]


@interpreted_only  # A compiled class cannot be changed.
@pytest.mark.parametrize("mutation", ["pending", "marks", "order", "ttl"])
def test_the_property_finds_what_it_was_made_for(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The faults that fast paths once had, put back one by one."""
    wire = "rq"
    if mutation == "pending":  # A string of an earlier chunk is forgotten at a CLEAR.
        monkeypatch.setattr(risp.Reader, "pending", False)
    elif mutation == "marks":  # What a fast path has read is taken for part of the frame that is walked.
        take = rq_decoder.Decoder._take_frames

        def forgetful(decoder: rq_decoder.Decoder) -> None:
            before = decoder._frame_start
            take(decoder)
            decoder._frame_start = before

        monkeypatch.setattr(rq_decoder.Decoder, "_take_frames", forgetful)
    elif mutation == "order":  # Whatever a consumer is done with is taken for what it was given first.
        settle = rq_controller.ControllerSession._settle_in_order

        def trusting(session: rq_controller.ControllerSession, ids: "array[int]") -> "array[int]":
            given = session._notices[0].ids if session._notices else ids
            return settle(session, given[: len(ids)] if len(given) >= len(ids) else ids)

        monkeypatch.setattr(rq_controller.ControllerSession, "_settle_in_order", trusting)
    else:  # The text of a TTL may have the line break of another dialect in it.
        wire = "phpmq"

        def trusting_number(text: bytes, behind: bytes) -> int | None:
            return int(text) if text.strip().isdigit() else None

        monkeypatch.setattr(phpmq_runs, "_number", trusting_number)
    with pytest.raises(AssertionError, match="seed"):
        digest(wire, 0, SEEDS[wire])
