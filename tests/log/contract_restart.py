"""The contract, part 6: restarts. What a clean stop keeps, a crash keeps too."""

from typing import NamedTuple

import pytest

from penstock.log.info import QueueInfo, ReaderInfo
from penstock.model.life import Event, Reason
from penstock.model.words import Outcome
from tests.log.contract_rig import SECOND, Got, Rig, Told, named, payloads

HOW = ["reopen", "crash"]


class Picture(NamedTuple):
    """Everything that can be seen of an engine without changing it."""

    infos: list[QueueInfo]
    logs: list[list[Got]]
    events: list[list[Told]]
    readers: list[ReaderInfo]


def picture(rig: Rig) -> Picture:
    rig.turn()
    names = sorted(rig.engine.queues())
    return Picture(
        [rig.engine.describe(name) for name in names],
        [rig.read(name) for name in names],
        [rig.events(name) for name in names],
        rig.engine.readers(),
    )


def live(rig: Rig) -> None:
    """A queue with messages in every state and with every kind of history, and some others."""
    engine = rig.open({"orders": {"max-deliveries": 3}})
    rig.send("orders", named("m", 10), retries=[-1, 0, 1, 2, 255, -1, -1, 3, 3, -1], ttl=[0, 0, 90] + [0] * 7)
    got = rig.take("orders", 8)
    rig.ack("orders", got[:1])
    rig.settle("orders", Outcome.REJECT, got[5:6])
    rig.settle("orders", Outcome.REQUEUE, got[6:7], ttl=50)
    rig.later(seconds=1)
    rig.lose("orders")
    rig.kill("mails", [b"x", b"y", b"z"])
    engine.redrive("mails", rig.now_us, limit=1)
    engine.pause("mails", True, rig.now_us)
    rig.transact("key", ("orders", [b"t"]), ("audit", [b"t"]))
    engine.hold_retention(ReaderInfo("spark", "orders", "events", 3, rig.now_us + 60 * SECOND), rig.now_us)


class Restarts:
    """reopen and crash."""

    @pytest.mark.parametrize("how", HOW)
    def test_the_state_is_the_same_afterwards(self, rig: Rig, how: str) -> None:
        live(rig)
        before = picture(rig)
        rig.restart(how)
        assert picture(rig) == before
        rig.restart(how)
        assert picture(rig) == before
        got = [(m.payload, m.retries, m.attempts) for m in rig.take("orders")]
        assert got == [
            (b"m-2", 0, 1),
            (b"m-3", 1, 1),
            (b"m-4", 255, 1),
            (b"m-7", 2, 1),
            (b"m-8", 3, 0),
            (b"m-9", -1, 0),
            (b"m-6", -1, 1),
            (b"t", -1, 0),
        ]
        assert payloads(rig.take("orders", dead=True)) == [b"m-5", b"m-1"]
        assert rig.take("mails") == []
        rig.engine.pause("mails", False, rig.now_us)
        assert payloads(rig.take("mails")) == [b"x"]
        assert payloads(rig.take("mails", dead=True)) == [b"y", b"z"]

    @pytest.mark.parametrize("how", HOW)
    def test_who_held_what_is_forgotten_and_no_more(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.kill("orders", [b"d0", b"d1", b"d2"])
        rig.send("orders", named("m", 5), retries=1)
        rig.take("orders", 3, consumer="ann")
        rig.take("orders", 2, consumer="ann", dead=True)
        rig.has("orders", ready=2, held=3, dead=3)
        rig.restart(how)
        rig.has("orders", ready=5, dead=3)
        assert rig.lose("orders") == []
        assert [(m.payload, m.retries, m.attempts) for m in rig.take("orders")] == [
            (payload, 1, 0) for payload in named("m", 5)
        ]
        assert payloads(rig.take("orders", dead=True)) == [b"d0", b"d1", b"d2"]

    @pytest.mark.parametrize("how", HOW)
    def test_requests_are_withdrawn_because_nobody_waits_any_more(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.send("orders", [b"ask-0", b"ask-1", b"ask-2"], reply=[b"x", b"y", b"z"], protocol="rq")
        rig.send("orders", [b"tell"])
        got = rig.take("orders", 2)
        rig.ack("orders", got[:1])
        rig.restart(how)
        rig.has("orders", ready=1)
        assert payloads(rig.take("orders")) == [b"tell"]
        ends = [(t.event, t.reason, t.offset) for t in rig.events("orders") if t.event is Event.WITHDRAWN]
        assert sorted(ends) == [(Event.WITHDRAWN, Reason.REQUESTER_GONE, offset) for offset in (1, 2)]
        assert len(rig.read("orders")) == 4

    @pytest.mark.parametrize("how", HOW)
    def test_a_rejected_request_stays_a_dead_letter(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.send("orders", [b"ask"], reply=[b"x"], protocol="rq")
        rig.settle("orders", Outcome.REJECT, rig.take("orders"))
        rig.restart(how)
        assert payloads(rig.take("orders", dead=True)) == [b"ask"]

    @pytest.mark.parametrize("how", HOW)
    def test_a_redriven_request_is_a_message_like_any_other(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.send("orders", [b"ask"], reply=[b"x"], protocol="rq")
        rig.settle("orders", Outcome.REJECT, rig.take("orders"))
        rig.engine.redrive("orders", rig.now_us)
        for _ in range(2):
            rig.restart(how)
            rig.has("orders", ready=1)
        assert payloads(rig.take("orders")) == [b"ask"]

    @pytest.mark.parametrize("how", HOW)
    def test_ids_stay_and_none_is_ever_given_twice(self, rig: Rig, how: str) -> None:
        rig.open()
        ids: dict[bytes, bytes] = {}
        for opening in range(4):
            rig.send("orders", named(f"opening-{opening}", 3))
            for message in rig.take("orders"):
                assert ids.setdefault(message.payload, message.message_id) == message.message_id
            assert len(set(ids.values())) == len(ids) == 3 * (opening + 1)
            rig.restart(how)
        assert {m.payload: m.message_id for m in rig.read("orders")} == ids

    @pytest.mark.parametrize("how", HOW)
    def test_messages_of_several_openings_come_in_order_and_whole(self, rig: Rig, how: str) -> None:
        rig.open()
        sent: list[bytes] = []
        for opening in range(5):
            messages = [bytes([opening, i]) * (i * 97 % 500) for i in range(40)]
            rig.send("orders", messages[:15])
            rig.send("orders", messages[15:])
            sent += messages
            rig.restart(how)
        assert payloads(rig.read("orders")) == sent
        assert payloads(rig.read("orders", 33, 91)) == sent[33:91]
        assert payloads(rig.take("orders", 120)) == sent[:120]
        assert payloads(rig.take("orders")) == sent[120:]
        assert rig.engine.describe("orders").offset_end == len(sent)

    def test_an_empty_engine_restarts_empty(self, rig: Rig) -> None:
        rig.open()
        for how in HOW:
            assert rig.restart(how).queues() == []
        rig.send("orders", [b"x"])
        assert payloads(rig.take("orders")) == [b"x"]

    def test_settlements_of_an_older_opening_s_messages_are_kept(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", named("m", 9))
        for _ in range(3):
            rig.restart("reopen")
            got = rig.take("orders", 3)
            rig.ack("orders", got[:1])
            rig.settle("orders", Outcome.REJECT, got[1:2])
            rig.settle("orders", Outcome.REQUEUE, got[2:])
            rig.restart("crash")
        # 012 345 678 have been taken; of each, the first is gone, the second dead, the third at the tail.
        assert payloads(rig.take("orders")) == [b"m-2", b"m-5", b"m-8"]
        assert payloads(rig.take("orders", dead=True)) == [b"m-1", b"m-4", b"m-7"]
