"""Transactions: messages for many queues, all or nothing, once for each key; and repairs of dead letters.

All blocks of a transaction, and the control block that ends it, are written one behind the other. Recovery
takes them as one: without their end they are void. So whatever a transaction does to the state is done
here in one call, between the blocks of the turn before and its own.
"""

from collections.abc import Callable, Sequence

from penstock.log.block import FLAG_END, FLAG_PART, HEADER_BYTES, KIND_CONTROL, Buffer, control_parts
from penstock.log.columns import check_batch, join_batches, split_columns, stored_bytes
from penstock.log.committer import Committer
from penstock.log.errors import LogRefused
from penstock.log.queue import LogQueue
from penstock.log.repairs import cut_batch, repair_queue_of
from penstock.log.results import Step, Stored, TransactionDone, TransactionReceipt
from penstock.log.sealer import SealedBlock, Sealer
from penstock.log.state import UNFINISHED_MAX, LogState, StoredPart
from penstock.log.views import check_queue, known_queue
from penstock.model.batch import Batch


class Transactions:
    def __init__(
        self,
        state: LogState,
        committer: Committer,
        sealer: Sealer,
        seal_all: Callable[[int], None],
        mark: Callable[[LogQueue], None],
    ) -> None:
        self._state = state
        self._committer = committer
        self._sealer = sealer
        self._seal_all = seal_all  # what has gathered in this turn comes before
        self._mark = mark  # a queue has something to seal

    def transact(
        self,
        key: str,
        parts: Sequence[tuple[str, Batch]],
        now_us: int,
        receipt: TransactionReceipt | None = None,
        *,
        step: Step | None = None,
        fingerprint: str = "",
    ) -> None:
        """All of these messages or none, once for each key, whatever happens meanwhile.

        Without a key nothing is remembered: said again, the messages are stored again.
        In steps: each is all or nothing, and stored once; the key counts as committed with the last one.
        A key that has begun is remembered until then, however many others are committed meanwhile.
        A fingerprint is remembered with its key, for those who want to know whether it was the same.
        A batch that is `dead` becomes dead letters, which nobody has had before. One of `repairs` is no new
        messages: the dead letters that it names go back into their queue with these payloads, as far as
        they are dead and nobody holds them. Where that queue has been deleted, none of them is.
        """
        if step is not None and not key:
            raise LogRefused("a transaction in steps needs a key that names it")
        done = self._repeated(key, step)
        if done is not None:
            if receipt is not None:
                # It may have been committed a moment ago: the answer waits for the same sync.
                self._answer(receipt, done)
                self._committer.want_sync()
            return
        parts = [(name, batch) for name, batch in parts if not self._is_gone(name, batch)]
        self._check(key, parts, step)
        queues = self._queues_of(parts, now_us)
        self._seal_all(now_us)
        blocks: list[SealedBlock] = []
        stored: list[StoredPart] = []
        redriven = 0
        for queue, (_, batch) in zip(queues, parts, strict=True):
            if batch.repairs is not None:
                redriven += self._repair(queue, batch, now_us, blocks)
            else:
                stored.append(self._accept(queue, batch, now_us, blocks))
        fields: dict[str, object] = {"op": "transaction", "key": key, "parts": [part[:3] for part in stored]}
        if step is not None:
            fields |= {"step": step.number, "last": step.last}
        if fingerprint:
            fields["fingerprint"] = fingerprint
        self._add(blocks, control_parts(fields), now_us)
        if step is not None:
            stored = self._state.remember_step(key, step, stored, fingerprint)
        elif key:
            self._state.remember(key, stored, fingerprint)
        if receipt is not None:
            told = [self._stored(part) for part in stored]
            steps = self._state.steps_of(key)
            self._answer(receipt, TransactionDone(key, told, repeated=False, steps=steps, redriven=redriven))

    def _answer(self, receipt: TransactionReceipt, done: TransactionDone) -> None:
        self._committer.when_synced(lambda error: receipt(error or done))

    def _repeated(self, key: str, step: Step | None) -> TransactionDone | None:
        """The answer where a transaction, or this step of it, is stored already."""
        known = self.stored(key)
        if known is not None:
            return TransactionDone(key, known, repeated=True)
        steps = self._state.steps_of(key)
        if step is not None and step.number < steps:
            return TransactionDone(key, [], repeated=True, steps=steps)
        return None

    def _is_gone(self, name: str, batch: Batch) -> bool:
        """Whether these are repairs of a queue that is no more."""
        if not batch.identity:
            return False
        found = self._state.queues.get(name)
        return found is None or found.identity != batch.identity

    def _check(self, key: str, parts: Sequence[tuple[str, Batch]], step: Step | None) -> None:
        """Refuse what cannot be stored, before anything has changed."""
        self._check_step(key, step)
        payload_bytes: dict[str, int] = {}
        for name, batch in parts:
            check_batch(name, batch)
            if batch.repairs is not None:
                known_queue(self._state, name)
            # What is dead takes no room that a queue's max-bytes gives to the living.
            living_bytes = 0 if batch.dead or batch.repairs is not None else len(batch.payload)
            payload_bytes[name] = payload_bytes.get(name, 0) + living_bytes
        for name, more in payload_bytes.items():
            check_queue(self._state, name, more)
        self._committer.check_room(
            self._state.gathered_bytes + sum(stored_bytes(batch) for _, batch in parts)
        )

    def _check_step(self, key: str, step: Step | None) -> None:
        steps = self._state.steps_of(key)
        if step is None and steps:
            raise LogRefused(
                f"transaction {key!r} comes in steps, of which {steps} are stored: go on with step {steps}"
            )
        if step is not None and step.number > steps:
            raise LogRefused(
                f"transaction {key!r}: this is step {step.number}, and {steps} are stored: send step {steps}"
            )
        if step is not None and not steps and len(self._state.unfinished) >= UNFINISHED_MAX:
            raise LogRefused(
                f"{UNFINISHED_MAX} transactions have begun and not ended: finish some of them first"
            )

    def _queues_of(self, parts: Sequence[tuple[str, Batch]], now_us: int) -> list[LogQueue]:
        """The queue of each part; what is missing is declared first, repair queues too."""
        declare, known = self._sealer.declare, self._state.queues
        queues = [known.get(name) or declare(name, now_us) for name, _ in parts]
        for queue, (_, batch) in zip(queues, parts, strict=True):
            if batch.repairs is not None and queue.repair_queue is None:
                declare(repair_queue_of(queue.name), now_us)
        return queues

    def _accept(self, queue: LogQueue, batch: Batch, now_us: int, blocks: list[SealedBlock]) -> StoredPart:
        """New messages, perhaps dead ones: their blocks behind the others; where they are."""
        first = queue.pending.accept(len(batch))
        end = first + len(batch)
        self._state.changed[queue.number] = queue
        self._split(queue, batch, now_us, blocks)
        if batch.dead:
            rows = queue.bury(first, end, batch.dead, now_us)
            blocks.append(self._sealer.settlement_block(queue, rows, now_us, FLAG_PART))
        return queue.name, first, end, self._state.opening

    def _split(self, queue: LogQueue, batch: Batch, now_us: int, blocks: list[SealedBlock]) -> None:
        for columns in split_columns(join_batches([batch], now_us), self._state.settings.block_bytes):
            blocks.append(self._sealer.message_block(queue, columns, batch.protocol, now_us, FLAG_PART))

    def _repair(self, queue: LogQueue, batch: Batch, now_us: int, blocks: list[SealedBlock]) -> int:
        """Dead letters with other payloads back behind the tail; how many it were."""
        repair_queue = queue.repair_queue
        assert repair_queue is not None
        assert batch.repairs is not None
        first = repair_queue.pending.tail
        rows, taken = queue.repair(batch.repairs, first)
        if not taken:
            return 0
        payloads = cut_batch(batch, taken)
        repair_queue.pending.accept(len(payloads))
        self._state.changed[repair_queue.number] = repair_queue
        self._split(repair_queue, payloads, now_us, blocks)
        blocks.append(self._sealer.repair_block(queue, rows, first, now_us, FLAG_PART))
        # Payloads of earlier repairs are let go of behind this transaction.
        self._mark(queue)
        return len(payloads)

    def _add(self, blocks: list[SealedBlock], control: list[Buffer], now_us: int) -> None:
        """All of them and their end into one segment, one behind the other."""
        end = self._sealer.header(KIND_CONTROL, FLAG_PART | FLAG_END, 0, 0, control, now_us)
        self._committer.reserve(
            sum(HEADER_BYTES + block.header.body_bytes for block in blocks) + HEADER_BYTES + end.body_bytes
        )
        for block in blocks:
            self._sealer.add(block, sync=True)
        self._committer.add(end, control, sync=True)

    def stored(self, key: str) -> list[Stored] | None:
        """Where a committed transaction's messages are; None where the key is not known (any more).

        It may have been committed a moment ago: only a receipt says that it is safe. Of a queue that was
        deleted since then no offset is left, so that first and end are the same.
        """
        known = self._state.transactions.get(key)
        if known is None:
            return None
        # A queue whose name is lost by damage has no origin to tell.
        return [self._stored(part) for part in known if part[0] in self._state.queues or part[1] == part[2]]

    def _stored(self, part: StoredPart) -> Stored:
        name, first, end, opening = part
        queue = self._state.queues.get(name)
        return Stored(name, first, end, queue.origin(opening) if queue is not None else b"")
