"""What the fuzzers share: an input that says how it is to be fed, and a corpus that begins with the vectors.

The first bytes of an input say how the rest is cut into chunks, how often its beginning is repeated (fast
paths need many frames of a kind), and which byte is then spoiled.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import atheris

CUTS = 4
PREFIX_BYTES = CUTS + 5
REPEATS_MAX = 48

CheckStream = Callable[[bytes, bytes], None]
"""Gets a stream, and where to cut it: a mark is a part of 255 of its length."""


def unfolding(check_stream: CheckStream) -> Callable[[bytes], None]:
    """One input to a check of what it stands for. Whatever that raises is a finding."""

    def check(data: bytes) -> None:
        if len(data) < PREFIX_BYTES:
            return
        repeats, size, flip = data[CUTS] % REPEATS_MAX + 1, data[CUTS + 1], data[CUTS + 4]
        body = data[PREFIX_BYTES:]
        stream = bytearray(body[:size] * repeats + body[size:])
        if stream:
            stream[int.from_bytes(data[CUTS + 2 : CUTS + 4]) % len(stream)] ^= flip
        check_stream(bytes(stream), data[:CUTS])

    return check


def seeds(corpus: Path, vectors: Sequence[bytes]) -> None:
    """The vectors as a beginning: once, many times over, and many times over with something spoiled."""
    for number, data in enumerate(vectors):
        size = min(len(data), 255)
        for variant, (repeats, where, flip) in enumerate([(0, 0, 0), (39, 0, 0), (39, 999, 1)]):
            prefix = bytes((*[0] * CUTS, repeats, size, *where.to_bytes(2), flip))
            (corpus / f"vector-{number:02}-{variant}").write_bytes(prefix + data)


def search(check_stream: CheckStream, vectors: Sequence[bytes]) -> None:
    """Search as the command line says. The options are libFuzzer's; a folder is the corpus."""
    corpora = [Path(argument) for argument in sys.argv[1:] if not argument.startswith("-")]
    if corpora:
        seeds(corpora[0], vectors)
    atheris.Setup(sys.argv, unfolding(check_stream))
    atheris.Fuzz()
