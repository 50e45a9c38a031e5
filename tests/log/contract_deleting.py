"""The contract, part 9: queues that are deleted, and others that have their names."""

import pytest

from penstock.log.errors import QueueDeleted, QueueUnknown
from penstock.log.info import ReaderInfo
from penstock.model.words import Outcome
from tests.log.contract_restart import HOW, picture
from tests.log.contract_rig import SECOND, Rig, named, payloads


def delete(rig: Rig, *queues: str) -> None:
    """Deleted, and told so."""
    confirmed: list[object] = []
    rig.engine.delete(queues, rig.now_us)
    rig.engine.confirm(rig.now_us, confirmed.append)
    rig.engine.flush(rig.now_us)
    assert rig.drive(lambda: bool(confirmed)), f"{queues}: no word of their end"
    assert confirmed == [None]


class Deleting:
    """delete."""

    @pytest.mark.parametrize("how", HOW)
    def test_its_end_outlives_the_engine(self, rig: Rig, how: str) -> None:
        rig.open()
        rig.kill("orders", [b"dead"])
        rig.send("orders", named("old", 5))
        rig.send("mails", named("m", 5))
        old = rig.described("orders").identity
        delete(rig, "orders")
        rig.restart(how)
        assert rig.engine.queues() == ["mails"]
        with pytest.raises(QueueUnknown):
            rig.engine.describe("orders")
        assert rig.send("orders", named("new", 3)).first == 0
        before = picture(rig)
        assert rig.described("orders").identity != old
        rig.restart(how)
        assert picture(rig) == before
        assert payloads(rig.read("orders")) == named("new", 3)
        assert payloads(rig.take("orders")) == named("new", 3)
        assert payloads(rig.take("mails")) == named("m", 5)

    @pytest.mark.parametrize("how", HOW)
    def test_no_identity_and_no_id_is_given_twice(self, rig: Rig, how: str) -> None:
        rig.open()
        identities: list[str] = []
        ids: list[bytes] = []
        for _ in range(4):
            rig.send("orders", [b"x", b"y"])
            identities.append(rig.described("orders").identity)
            ids += [message.message_id for message in rig.read("orders")]
            delete(rig, "orders")
            rig.restart(how)
        assert (len(set(identities)), len(set(ids))) == (4, 8)
        assert all(it[:12].decode() in identities for it in ids)

    def test_several_at_once(self, rig: Rig) -> None:
        rig.open()
        for name in ("a", "b", "c"):
            rig.send(name, [b"x"])
        with pytest.raises(QueueUnknown):
            rig.engine.delete(["a", "nobody"], rig.now_us)
        assert rig.engine.queues() == ["a", "b", "c"]
        delete(rig, "a", "c")
        assert rig.engine.queues() == ["b"]
        assert rig.engine.queue_count == 1

    def test_what_is_said_of_the_old_one_does_not_reach_the_new_one(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"old"])
        (old,) = rig.take("orders")
        identity = rig.described("orders").identity
        delete(rig, "orders")
        rig.send("orders", [b"new"])
        (new,) = rig.take("orders")
        assert (old.offset, new.offset) == (0, 0)
        for outcome in Outcome:
            fates = rig.engine.settle("orders", "ann", outcome, [(0, 1)], rig.now_us, origin=old.origin)
            assert fates == []
        with pytest.raises(QueueDeleted):
            rig.engine.check_same("orders", identity)
        rig.engine.check_same("orders", rig.described("orders").identity)
        assert rig.described("orders").held == 1

    @pytest.mark.parametrize("how", HOW)
    def test_keys_stay_and_readers_go(self, rig: Rig, how: str) -> None:
        engine = rig.open()
        rig.transact("key", ("orders", [b"o"]), ("mails", [b"m"]))
        engine.hold_retention(ReaderInfo("spark", "orders", "messages", 0, rig.now_us + SECOND), rig.now_us)
        delete(rig, "orders")
        rig.restart(how)
        again = rig.transact("key", ("orders", [b"o"]), ("mails", [b"m"]))
        assert again.repeated
        assert [part[:3] for part in again.stored] == [("orders", 0, 0), ("mails", 0, 1)]
        assert rig.engine.readers() == []
        assert rig.engine.queues() == ["mails"]
