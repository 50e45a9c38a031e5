"""Columns of a block: what has come in several batches is stored as if it had come in one."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.log.columns import join_batches
from penstock.model.batch import Batch

MESSAGES = st.lists(st.binary(max_size=20), min_size=1, max_size=5)


@given(st.lists(MESSAGES, min_size=1, max_size=6))
def test_joined_batches_are_one_batch(batches: list[list[bytes]]) -> None:
    joined = join_batches([Batch.of(messages) for messages in batches], now_us=0)
    whole = Batch.of([message for messages in batches for message in messages])
    assert (joined.payload, joined.bounds) == (whole.payload, whole.bounds)
    assert len(joined) == len(whole)
