"""The contract, part 1: messages come in. Receipts, offsets, ids, refusals, transactions."""

from array import array

import pytest

from penstock.log.errors import LogError, LogRefused, QueueFull
from penstock.log.results import Receipt, Stored, TransactionDone
from penstock.model.batch import RETRIES_NONE, Batch
from penstock.model.ids import ID_DIGITS, split_id
from penstock.model.words import Outcome
from tests.log.contract_rig import START_US, Rig, named, open_slices, payloads
from tests.log.old_steps import store_step

BAD_NAMES = {
    "empty": "",
    "control character": "a\nb",
    "half a surrogate": "a\ud800",
    "too long": "ü" * 128,
    "the door": "orders.dead",
}

BAD_BATCHES = {
    "no messages": Batch(b"", array("i", [0])),
    "does not begin at 0": Batch(b"abc", array("i", [1, 3])),
    "ends before the payload": Batch(b"abc", array("i", [0, 2])),
    "ends behind the payload": Batch(b"abc", array("i", [0, 4])),
    "one TTL too few": Batch(b"ab", array("i", [0, 1, 2]), ttl_seconds=array("q", [1])),
    "one counter too many": Batch(b"a", array("i", [0, 1]), retries=array("h", [1, 1])),
    "no address for one": Batch(b"ab", array("i", [0, 1, 2]), reply=[b"x"]),
    "a TTL below 0": Batch.of([b"a"], ttl_seconds=[-1]),
    "a TTL beyond all times": Batch.of([b"a"], ttl_seconds=[1 << 60]),
    "a counter below none": Batch.of([b"a"], retries=[-2]),
    "a counter above endless": Batch.of([b"a", b"b"], retries=[3, 256]),
    "an unknown protocol": Batch.of([b"a"], protocol="gopher"),
}


class Accepting:
    """append, and what may be appended."""

    def test_a_queue_begins_with_its_first_message(self, rig: Rig) -> None:
        engine = rig.open()
        assert engine.queues() == []
        rig.send("orders", [b"one"])
        assert engine.queues() == ["orders"]
        rig.has("orders", ready=1)

    def test_receipts_name_the_offsets_which_follow_each_other(self, rig: Rig) -> None:
        rig.open()
        first = rig.send("orders", named("a", 3))
        second = rig.send("orders", named("b", 2))
        other = rig.send("mails", [b"m"])
        assert (first.queue, first.first, first.end) == ("orders", 0, 3)
        assert (second.queue, second.first, second.end) == ("orders", 3, 5)
        assert (other.queue, other.first, other.end) == ("mails", 0, 1)
        assert rig.described("orders").offset_end == 5

    def test_a_receipt_never_comes_from_within_the_call(self, rig: Rig) -> None:
        engine = rig.open()
        came, receipt = rig.receipts()
        engine.append("orders", Batch.of([b"one"]), rig.now_us, receipt)
        engine.flush(rig.now_us)
        assert came == []
        assert rig.drive(lambda: len(came) == 1)

    def test_the_receipts_of_one_turn_come_in_order_and_once(self, rig: Rig) -> None:
        engine = rig.open()
        came, receipt = rig.receipts()
        for i in range(20):
            engine.append("orders", Batch.of(named("x", i % 3 + 1)), rig.now_us, receipt)
        rig.turn()
        assert [stored.first for stored in came] == sorted(stored.first for stored in came)
        assert [stored.end - stored.first for stored in came] == [i % 3 + 1 for i in range(20)]

    def test_all_that_has_happened_can_be_confirmed(self, rig: Rig) -> None:
        engine = rig.open({"orders": {"durability": "none"}})
        engine.append("orders", Batch.of([b"a", b"b"]), rig.now_us)
        rig.ack("orders", rig.take("orders", 1))
        engine.pause("orders", True, rig.now_us)
        came: list[LogError | None] = []
        engine.confirm(rig.now_us, came.append)
        assert came == []
        assert rig.drive(lambda: bool(came))
        assert came == [None]
        assert sum(run.end - run.first for run in engine.events("orders", 0, 9)) == 3
        rig.engine = rig.harness.crash(rig.now_us)
        info = rig.engine.describe("orders")
        assert (info.ready, info.held, info.paused) == (1, 0, True)

    def test_work_that_ends_between_append_and_flush_confirms_nothing_too_early(self, rig: Rig) -> None:
        """A group that is on its way does not carry receipts of messages that are not in it."""
        engine = rig.open()
        shown: list[list[bytes]] = []

        def look_at(queue: str) -> Receipt:
            """A receipt that looks at what a reader is shown: only what no power cut can take back."""
            return lambda _: shown.append(payloads(open_slices(engine.read(queue, 0, 10))))

        for i in range(10):
            engine.append(f"queue-{i}", Batch.of([b"x"]), rig.now_us, look_at(f"queue-{i}"))
            rig.drive()  # whatever is on its way arrives before the turn ends
            engine.flush(rig.now_us)
        rig.turn()
        assert shown == [[b"x"]] * 10

    def test_without_a_receipt_messages_are_stored_all_the_same(self, rig: Rig) -> None:
        engine = rig.open()
        engine.append("orders", Batch.of([b"one"]), rig.now_us)
        assert payloads(rig.read("orders")) == [b"one"]

    @pytest.mark.parametrize("durability", ["commit", "interval", "none"])
    def test_every_durability_has_receipts_and_keeps_messages(self, rig: Rig, durability: str) -> None:
        rig.open({"orders": {"durability": durability}})
        assert rig.send("orders", [b"one"]).end == 1
        rig.later(seconds=2)
        rig.engine.tick(rig.now_us)
        assert payloads(rig.read("orders")) == [b"one"]

    def test_ids_are_32_hex_digits_and_never_the_same(self, rig: Rig) -> None:
        rig.open()
        for queue in ("orders", "mails"):
            rig.send(queue, named(queue, 5))
            rig.send(queue, named(queue, 5))
        messages = [message for queue in ("orders", "mails") for message in rig.take(queue)]
        assert len({message.message_id for message in messages}) == 20
        for message in messages:
            assert len(message.message_id) == ID_DIGITS
            assert split_id(message.message_id) == (message.origin, message.offset)

    def test_the_receipt_s_origin_makes_the_ids(self, rig: Rig) -> None:
        rig.open()
        stored = rig.send("orders", named("a", 2))
        assert [message.origin for message in rig.take("orders")] == [stored.origin] * 2

    def test_attributes_are_delivered_as_they_came(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"plain"])
        rig.send("orders", [b"t0", b"t9"], ttl=[0, 9], protocol="phpmq")
        rig.send("orders", [b"r-", b"r0", b"r255"], retries=[RETRIES_NONE, 0, 255], protocol="sspq")
        rig.later(us=7)
        rig.send("orders", [b"q1", b"q2"], reply=[b"", b"there"], protocol="rq")
        seen = [
            (m.payload, m.expires_us, m.retries, m.reply, m.protocol, m.time_us, m.attempts)
            for m in rig.take("orders")
        ]
        end = START_US + 9_000_000
        assert seen == [
            (b"plain", 0, -1, None, "http", START_US, 0),
            (b"t0", 0, -1, None, "phpmq", START_US, 0),
            (b"t9", end, -1, None, "phpmq", START_US, 0),
            (b"r-", 0, -1, None, "sspq", START_US, 0),
            (b"r0", 0, 0, None, "sspq", START_US, 0),
            (b"r255", 0, 255, None, "sspq", START_US, 0),
            (b"q1", 0, -1, b"", "rq", START_US + 7, 0),
            (b"q2", 0, -1, b"there", "rq", START_US + 7, 0),
        ]

    def test_every_message_has_the_time_of_its_own_call(self, rig: Rig) -> None:
        engine = rig.open()
        for _ in range(3):
            engine.append("orders", Batch.of([b"x"], ttl_seconds=[1]), rig.now_us)
            rig.later(us=5)
        rig.turn()
        seen = [(m.time_us - START_US, m.expires_us - START_US) for m in rig.read("orders")]
        assert seen == [(0, 1_000_000), (5, 1_000_005), (10, 1_000_010)]

    def test_batches_of_one_turn_with_different_columns_do_not_mix(self, rig: Rig) -> None:
        engine = rig.open()
        for batch in (
            Batch.of([b"", b"a"]),
            Batch.of([b"b"], ttl_seconds=[5]),
            Batch.of([b"c"], retries=[3]),
            Batch.of([b""], ttl_seconds=[0], retries=[0]),
            Batch.of([b"d"]),
        ):
            engine.append("orders", batch, rig.now_us)
        rig.turn()
        end = START_US + 5_000_000
        assert [(m.payload, m.expires_us, m.retries) for m in rig.take("orders")] == [
            (b"", 0, -1),
            (b"a", 0, -1),
            (b"b", end, -1),
            (b"c", 0, 3),
            (b"", 0, 0),
            (b"d", 0, -1),
        ]

    def test_a_payload_of_8_mib_and_its_small_neighbours(self, rig: Rig) -> None:
        rig.open()
        large = bytes(range(256)) * (8 * 4096)
        sent = [b"before", large, b"", large[:1_500_000], b"after"]
        rig.send("orders", sent)
        assert payloads(rig.take("orders")) == sent
        assert payloads(rig.read("orders")) == sent

    def test_what_comes_out_is_what_went_in_whatever_the_sizes(self, rig: Rig) -> None:
        rig.open()
        sent: list[bytes] = []
        for turn in range(30):
            messages = [bytes([turn, i]) * (turn * i * 7 % 3000) for i in range(turn % 7 + 1)]
            rig.send("orders", messages)
            sent += messages
        assert payloads(rig.read("orders")) == sent
        assert payloads(rig.read("orders", 17, 41)) == sent[17:41]
        assert payloads(rig.take("orders")) == sent

    @pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
    def test_a_name_that_no_queue_can_have_is_refused(self, rig: Rig, name: str) -> None:
        engine = rig.open()
        with pytest.raises(LogRefused):
            engine.append(name, Batch.of([b"x"]), rig.now_us)
        with pytest.raises(LogRefused):
            engine.transact("key", [("fine", Batch.of([b"x"])), (name, Batch.of([b"x"]))], rig.now_us)
        rig.turn()
        assert engine.queues() == []

    @pytest.mark.parametrize("batch", BAD_BATCHES.values(), ids=BAD_BATCHES)
    def test_a_malformed_batch_is_refused_and_changes_nothing(self, rig: Rig, batch: Batch) -> None:
        engine = rig.open()
        came, receipt = rig.receipts()
        with pytest.raises(LogRefused, match="orders"):
            engine.append("orders", batch, rig.now_us, receipt)
        with pytest.raises(LogRefused, match="orders"):
            engine.transact("key", [("mails", Batch.of([b"x"])), ("orders", batch)], rig.now_us)
        rig.turn()
        assert (engine.queues(), came) == ([], [])
        rig.send("orders", [b"still fine"])
        assert payloads(rig.take("orders")) == [b"still fine"]

    def test_max_bytes_refuses_what_would_be_too_much_until_there_is_room(self, rig: Rig) -> None:
        engine = rig.open({"orders": {"max-bytes": 100}})
        rig.send("orders", [b"x" * 60])
        with pytest.raises(QueueFull, match="max-bytes"):
            engine.append("orders", Batch.of([b"x" * 41]), rig.now_us)
        rig.send("orders", [b"y" * 40])
        with pytest.raises(QueueFull):
            engine.append("orders", Batch.of([b"z"]), rig.now_us)
        rig.ack("orders", rig.take("orders", 1))
        rig.send("orders", [b"z" * 60])
        assert [m.payload[:1] for m in rig.take("orders")] == [b"y", b"z"]

    def test_max_bytes_counts_the_living_and_not_what_came_after_them(self, rig: Rig) -> None:
        """One that is held for long keeps nobody out when all later ones are settled."""
        engine = rig.open({"orders": {"max-bytes": 500}})
        rig.send("orders", [b"x" * 100])
        (held,) = rig.take("orders", 1)
        for _ in range(8):
            rig.send("orders", [b"y" * 200, b"z" * 200])
            assert rig.described("orders").bytes == 500
            with pytest.raises(QueueFull):
                engine.append("orders", Batch.of([b"z"]), rig.now_us)
            second, first = rig.take("orders", 2)
            rig.ack("orders", [first])
            assert rig.described("orders").bytes == 300
            rig.ack("orders", [second])
            assert rig.described("orders").bytes == 100
        for how in ("crash", "reopen"):
            rig.restart(how)
            assert rig.described("orders").bytes == 100
        assert payloads(rig.take("orders")) == [held.payload]

    def test_an_old_letter_that_lives_again_counts_for_itself(self, rig: Rig) -> None:
        engine = rig.open()
        rig.kill("orders", [b"old" * 10])
        rig.send("orders", [b"x" * 3000] * 4)
        rig.ack("orders", rig.take("orders"))
        assert rig.described("orders").bytes == 0
        engine.redrive("orders", rig.now_us)
        rig.turn()
        assert rig.described("orders").bytes == 30
        engine.purge("orders", rig.now_us)
        assert rig.described("orders").bytes == 0

    def test_max_bytes_counts_what_is_held_and_a_transaction_as_a_whole(self, rig: Rig) -> None:
        engine = rig.open({"*": {"max-bytes": 100}})
        rig.send("orders", [b"x" * 60])
        rig.take("orders")
        with pytest.raises(QueueFull):
            engine.append("orders", Batch.of([b"x" * 41]), rig.now_us)
        parts = [("mails", Batch.of([b"x" * 60])), ("mails", Batch.of([b"x" * 60]))]
        with pytest.raises(QueueFull):
            engine.transact("key", parts, rig.now_us)
        with pytest.raises(QueueFull):
            engine.append("new", Batch.of([b"x" * 101]), rig.now_us)
        rig.turn()
        assert engine.queues() == ["orders"]

    def test_ten_thousand_queues(self, rig: Rig) -> None:
        engine = rig.open()
        came, receipt = rig.receipts()
        for i in range(10_000):
            engine.append(f"queue-{i}", Batch.of([b"%d" % i]), rig.now_us, receipt)
        rig.turn()
        assert len(came) == len(set(engine.queues())) == 10_000
        for i in (0, 4711, 9_999):
            assert payloads(rig.take(f"queue-{i}")) == [b"%d" % i]
        rig.restart("reopen")
        assert len(rig.engine.queues()) == 10_000
        assert payloads(rig.take("queue-77")) == [b"77"]

    def test_a_closed_engine_refuses(self, rig: Rig) -> None:
        engine = rig.open()
        rig.send("orders", [b"x"])
        engine.close(rig.now_us)
        engine.close(rig.now_us)
        with pytest.raises(LogError, match="closed"):
            engine.append("orders", Batch.of([b"x"]), rig.now_us)
        with pytest.raises(LogError, match="closed"):
            engine.take("orders", "ann", 1, rig.now_us)


class Transactions:
    """transact: all or nothing, once per key."""

    def test_all_queues_get_their_messages_and_one_receipt_says_where(self, rig: Rig) -> None:
        rig.open()
        rig.send("orders", [b"before"])
        done = rig.transact("key", ("orders", named("o", 2)), ("mails", [b"m"]), ("orders", [b"again"]))
        assert (done.key, done.repeated) == ("key", False)
        assert [(s.queue, s.first, s.end) for s in done.stored] == [
            ("orders", 1, 3),
            ("mails", 0, 1),
            ("orders", 3, 4),
        ]
        assert payloads(rig.take("orders")) == [b"before", b"o-0", b"o-1", b"again"]
        assert [m.origin for m in rig.take("mails")] == [done.stored[1].origin]

    def test_a_key_counts_once(self, rig: Rig) -> None:
        rig.open()
        first = rig.transact("key", ("orders", [b"one"]))
        again = rig.transact("key", ("orders", [b"one"]), ("mails", [b"other"]))
        assert (again.repeated, again.stored) == (True, first.stored)
        assert payloads(rig.take("orders")) == [b"one"]
        assert "mails" not in rig.engine.queues()
        assert rig.transact("other key", ("orders", [b"two"])).repeated is False

    def test_a_repetition_in_the_same_turn_gets_its_receipt_too(self, rig: Rig) -> None:
        engine = rig.open()
        came: list[TransactionDone | LogError] = []
        for _ in range(3):
            engine.transact("key", [("orders", Batch.of([b"one"]))], rig.now_us, came.append)
        rig.turn()
        done = [answer for answer in came if isinstance(answer, TransactionDone)]
        assert [answer.repeated for answer in done] == [False, True, True]
        assert len({tuple(answer.stored) for answer in done}) == 1

    def test_it_stands_in_order_with_what_is_sent_around_it(self, rig: Rig) -> None:
        engine = rig.open()
        engine.append("orders", Batch.of([b"1"]), rig.now_us)
        engine.transact("key", [("orders", Batch.of([b"2", b"3"]))], rig.now_us)
        engine.append("orders", Batch.of([b"4"]), rig.now_us)
        rig.turn()
        assert payloads(rig.take("orders")) == [b"1", b"2", b"3", b"4"]

    def test_attributes_travel_in_transactions_too(self, rig: Rig) -> None:
        engine = rig.open()
        engine.transact("key", [("orders", Batch.of([b"a"], ttl_seconds=[5], retries=[2]))], rig.now_us)
        rig.turn()
        (message,) = rig.take("orders")
        assert (message.expires_us, message.retries) == (START_US + 5_000_000, 2)

    def test_a_large_transaction_is_still_one(self, rig: Rig) -> None:
        rig.open()
        sent = [bytes([i % 256]) * 100_000 for i in range(40)]
        done = rig.transact("key", ("orders", sent), ("mails", sent[:3]))
        assert [s.end - s.first for s in done.stored] == [40, 3]
        assert payloads(rig.take("orders")) == sent

    def test_without_a_key_it_is_all_or_nothing_and_not_remembered(self, rig: Rig) -> None:
        engine = rig.open({"orders": {"max-bytes": 10}})
        for number in range(2):
            done = rig.transact("", ("orders", [b"x"]), ("mails", [b"y"]))
            assert (done.key, done.repeated, len(done.stored)) == ("", False, 2)
            assert done.stored[0].first == number
        with pytest.raises(QueueFull):
            engine.transact("", [("mails", Batch.of([b"z"])), ("orders", Batch.of([b"x" * 11]))], rig.now_us)
        assert engine.transaction("") is None
        rig.restart("crash")
        assert rig.engine.transaction("") is None
        assert rig.transact("", ("orders", [b"x"])).repeated is False
        rig.has("orders", ready=3)
        rig.has("mails", ready=2)

    def test_what_is_remembered_of_a_key_can_be_asked_for(self, rig: Rig) -> None:
        engine = rig.open()
        assert engine.transaction("key") is None
        done = rig.transact("key", ("orders", [b"x"]), ("mails", [b"y", b"z"]))
        assert engine.transaction("key") == done.stored
        assert rig.transact("nothing").stored == engine.transaction("nothing") == []
        rig.restart("reopen")
        assert rig.engine.transaction("key") == done.stored
        assert rig.engine.transaction("nothing") == []
        assert rig.engine.transaction("other") is None

    def test_without_messages_it_is_fine(self, rig: Rig) -> None:
        rig.open()
        assert rig.transact("nothing").stored == []
        assert rig.transact("nothing", ("orders", [b"x"])).repeated is True

    def test_a_refused_one_leaves_its_key_free(self, rig: Rig) -> None:
        engine = rig.open({"orders": {"max-bytes": 10}})
        with pytest.raises(QueueFull):
            engine.transact(
                "key", [("mails", Batch.of([b"x"])), ("orders", Batch.of([b"x" * 11]))], rig.now_us
            )
        assert engine.queues() == []
        assert rig.transact("key", ("orders", [b"x"])).repeated is False

    @pytest.mark.parametrize("how", ["reopen", "crash"])
    def test_keys_are_remembered_across_restarts(self, rig: Rig, how: str) -> None:
        rig.open()
        first = rig.transact("key", ("orders", [b"one"]), ("mails", [b"m"]))
        rig.restart(how)
        again = rig.transact("key", ("orders", [b"one"]), ("mails", [b"m"]))
        assert (again.repeated, again.stored) == (True, first.stored)
        (message,) = rig.take("orders")
        assert Stored("orders", message.offset, message.offset + 1, message.origin) == first.stored[0]
        rig.settle("orders", Outcome.ACK, [message])
        rig.restart(how)
        assert rig.transact("key", ("orders", [b"one"])).repeated is True
        assert rig.take("orders") == []


class Steps:
    """Steps of transactions that an earlier version has stored: a commit ends them, and the key counts."""

    def store(self, rig: Rig, number: int, *parts: tuple[str, list[bytes]], last: bool = False) -> None:
        batches = [(queue, Batch.of(messages)) for queue, messages in parts]
        store_step(rig.engine, "key", batches, number, rig.now_us, last=last)
        rig.turn()

    def test_a_commit_ends_it_and_tells_of_all(self, rig: Rig) -> None:
        rig.open()
        self.store(rig, 0, ("orders", named("a", 2)), ("mails", [b"m"]))
        rig.send("mails", [b"between"])
        self.store(rig, 1, ("mails", [b"n"]))
        assert (rig.engine.transaction_steps("key"), rig.engine.transaction("key")) == (2, None)
        whole = rig.commit("key", rig.stage("key", ("orders", named("b", 3))), steps=2)
        assert (whole.repeated, rig.engine.transaction_steps("key")) == (False, 0)
        ranges = [(s.queue, s.first, s.end) for s in whole.stored]
        assert ranges == [("orders", 0, 5), ("mails", 0, 1), ("mails", 2, 3)]
        assert payloads(rig.take("orders")) == named("a", 2) + named("b", 3)
        again = rig.transact("key", ("orders", [b"other"]))
        assert (again.repeated, again.stored) == (True, whole.stored)

    def test_a_commit_without_stages_ends_it_too(self, rig: Rig) -> None:
        rig.open()
        for number in range(3):
            self.store(rig, number, ("orders", [b"%d" % number]))
        whole = rig.commit("key", steps=3)
        assert [(s.queue, s.first, s.end) for s in whole.stored] == [("orders", 0, 3)]
        again = rig.commit("key")
        assert (again.repeated, again.fingerprint) == (True, "of all")
        assert payloads(rig.take("orders")) == [b"0", b"1", b"2"]

    def test_nothing_else_goes_on_with_it(self, rig: Rig) -> None:
        engine = rig.open()
        self.store(rig, 0, ("orders", [b"a"]))
        with pytest.raises(LogRefused, match="earlier version"):
            engine.transact("key", [("orders", Batch.of([b"x"]))], rig.now_us)
        stage = rig.stage("key", ("orders", [b"x"]))
        for steps in (0, 2):
            with pytest.raises(LogRefused, match="1 chunks of it are in the log, of an earlier version"):
                rig.commit("key", stage, steps=steps)
        assert payloads(rig.take("orders")) == [b"a"]

    @pytest.mark.parametrize("how", ["reopen", "crash"])
    def test_they_are_remembered(self, rig: Rig, how: str) -> None:
        rig.open()
        self.store(rig, 0, ("orders", [b"a"]))
        rig.restart(how)
        assert rig.engine.transaction_steps("key") == 1
        self.store(rig, 1, ("orders", [b"b"]))
        rig.restart(how)
        whole = rig.commit("key", rig.stage("key", ("orders", [b"c"])), steps=2)
        assert sum(s.end - s.first for s in whole.stored) == 3
        rig.restart(how)
        again = rig.commit("key")
        assert (again.repeated, again.stored) == (True, whole.stored)
        assert payloads(rig.take("orders")) == [b"a", b"b", b"c"]

    @pytest.mark.parametrize("how", ["reopen", "crash"])
    def test_a_last_one_is_a_commit(self, rig: Rig, how: str) -> None:
        rig.open()
        self.store(rig, 0, ("orders", [b"a"]))
        self.store(rig, 1, ("orders", [b"b"]), last=True)
        for _ in range(2):
            stored = rig.engine.transaction("key")
            assert stored is not None
            assert [(s.queue, s.first, s.end) for s in stored] == [("orders", 0, 2)]
            assert rig.transact("key", ("orders", [b"other"])).repeated
            rig.restart(how)
