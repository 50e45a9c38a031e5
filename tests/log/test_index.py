"""What is known of a segment that is written to, by its spans where these can say it: against an index that
has every block, however often it was made again meanwhile."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.log.block import KIND_MESSAGES, KIND_SETTLEMENTS, Header
from penstock.log.segment import Entries, Index, Segment

BLOCKS = st.lists(
    st.tuples(
        st.sampled_from((KIND_MESSAGES, KIND_SETTLEMENTS, KIND_SETTLEMENTS)),
        st.integers(1, 3),  # its queue
        st.integers(1, 5),  # how many messages, or events
        st.sampled_from(
            ("goes on", "goes on", "is made again", "is not there")
        ),  # the index, before it comes
    ),
    max_size=14,
)


def rows(entries: Entries) -> list[tuple[int, ...]]:
    columns = entries.floors, entries.events, entries.positions, entries.bytes_before
    return list(zip(*columns, strict=True))


def made_again(headers: list[Header]) -> Index:
    index = Index()
    for header in headers:
        index.note(header)
    return index


@given(BLOCKS)
def test_spans_and_index_together_know_every_block(blocks: list[tuple[int, int, int, str]]) -> None:
    segment = Segment(1000, 0, 0, 1 << 20, sealed=False)
    segment.index = Index()
    offsets, events = {1: 5, 2: 0, 3: 7}, {1: 9, 2: 0, 3: 7}
    headers: list[Header] = []
    for kind, queue, count, how in blocks:
        if how == "is made again":
            segment.index = made_again(headers)
        elif how == "is not there":
            segment.index = None
        is_messages = kind == KIND_MESSAGES
        header = Header(
            kind,
            0,
            0,
            queue,
            count,
            1,
            0,
            offsets[queue],
            events[queue],
            count,
            64,
            0,
            0,
            0,
            10 * count,
            segment.end,
        )
        offsets[queue] += count if is_messages else 0
        events[queue] += count
        headers.append(header)
        segment.note(header)
        if segment.index is None:
            segment.index = made_again(headers)
        whole = made_again(headers)
        for number in (1, 2, 3):
            assert rows(segment.index.of(number, segment.spans.get(number))) == rows(whole.of(number))


def test_the_settlements_of_the_only_messages_take_no_entries() -> None:
    segment = Segment(0, 0, 0, 1 << 20, sealed=False)
    segment.index = Index()
    for at, kind in enumerate((KIND_MESSAGES, KIND_SETTLEMENTS)):
        segment.note(Header(kind, 0, 0, 7, 3, 1, 0, 0, 3 * at, 3, 64, 0, 0, 0, 30, segment.end))
    assert not segment.index.rows
    assert len(segment.index.of(7, segment.spans[7])) == 2
