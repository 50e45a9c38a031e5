"""Steps of transactions, as earlier versions stored them: they cut a large one into several, and a crash may
have left one begun."""

from collections.abc import Sequence

from penstock.log.block import FLAG_END, FLAG_PART, KIND_CONTROL, control_parts
from penstock.log.log import Log
from penstock.log.results import Step
from penstock.log.transactions import _Work
from penstock.model.batch import Batch


def store_step(
    engine: Log, key: str, parts: Sequence[tuple[str, Batch]], number: int, now_us: int, *, last: bool = False
) -> None:
    """One step of a transaction. It is stored with the next sync."""
    its, state = engine._transactions, engine._state
    queues = its._queues_of([(name, False) for name, _ in parts], now_us)
    engine._seal_all(now_us)
    work = _Work()
    for name, batch in parts:
        queue = queues[name]
        its._accept(queue, len(batch), its._split(queue, batch, now_us), batch.dead, work, now_us)
    stored = [part[:3] for part in work.stored]
    control = control_parts({"op": "transaction", "key": key, "parts": stored, "step": number, "last": last})
    for block in work.blocks:
        engine._sealer.add(block, sync=True)
    end = engine._sealer.header(KIND_CONTROL, FLAG_PART | FLAG_END, 0, 0, control, now_us)
    engine._committer.add(end, control, sync=True)
    state.remember_step(key, Step(number, last), work.stored)
