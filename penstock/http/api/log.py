"""The log of a queue in bulk, as an Arrow IPC stream: messages, events, or how everything stands.

A walk in a thread (`reading/pool.py`) turns blocks into record batches and these into chunks of the stream of
about `CHUNK_BYTES`; the response hands them to the connection as fast as the client takes them.

Rules that always hold:
  * The range is settled before the first byte: the headers `Penstock-Start` and `Penstock-End` tell it,
    and a client that goes on from the end misses nothing. Only what is synced is in it.
  * What is wrong is a problem, as long as nothing has been sent. After that the connection is broken
    before the end of the stream: nobody takes half of it for all.
  * When the client goes, the walk ends and its reader is free again. So it does when the client takes nothing
    for `STALL_SECONDS` to twice that while others could not begin, or for `STALL_SECONDS_MAX` in any case.

Measured over loopback, 2 M messages of 200 bytes, on two cores that others used too: in two rounds of twelve
reads a median of 4 M rows/s (1.1 GB/s), in a third, under more load, 1.3 M; 0.2 s of this process's time per
million rows in each. A batch is serialized in one go, into memory of its size. A stream writer with a Python
file object as its sink was about a fifth slower, read in turns with this.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.http import kinds
from penstock.http.app import Call, client_left
from penstock.http.link import CALL_SECONDS
from penstock.http.problems import Problem
from penstock.http.reading.looking import Runs, ask_states
from penstock.http.reading.pool import Stream
from penstock.http.route import IDENTITY, QUEUE, Param, Route
from penstock.http.site import Site
from penstock.log.errors import LogDamaged, QueueDeleted
from penstock.log.reader import LogReader, OffsetsMissing, ReaderQueue
from penstock.log.tables import VIEWS, columns_of
from penstock.model.rights import Right

if TYPE_CHECKING:
    import pyarrow as pa

ARROW_MEDIA: Final = "application/vnd.apache.arrow.stream"
CHUNK_BYTES: Final = 1 << 20
STALL_SECONDS: Final = 10.0
"""Twice that is less than others wait for their turn."""

STALL_SECONDS_MAX: Final = 300.0
"""For who reads at leisure: a walk keeps files open that retention may have removed."""

STATE_RUNS_MAX: Final = 2000
"""Runs that the first process is asked for at a time: about a millisecond of its loop."""

COLUMNS: Final = {view: tuple(column.name for column in columns_of(view)) for view in VIEWS}

END_OF_STREAM: Final = b"\xff\xff\xff\xff\0\0\0\0"

Chunk = bytes | memoryview
T = TypeVar("T")

log = logging.getLogger("penstock.http")


class Wanted(NamedTuple):
    """What a caller asks for, its range as far as it was given."""

    queue: str
    view: str
    start: int | None
    end: int | None
    columns: tuple[str, ...]
    fail_on_loss: bool
    identity: str | None = None  # None: whatever has that name
    state: str | None = None  # of the view state: how messages stand; None: any


class Range(NamedTuple):
    """What is served: offsets, or numbers of events; the end is exclusive."""

    start: int
    end: int


class Asking:
    """Questions to the first process from a thread."""

    def __init__(self, site: Site) -> None:
        self._link = site.link
        self._loop = asyncio.get_running_loop()

    def check_queue(self, queue: str, identity: str | None = None) -> None:
        """CallRefused where there is no such queue."""
        answer = self._wait(self._link.call("queue", {"queue": queue}))
        if identity not in (None, answer.fields["row"]["identity"]):
            raise QueueDeleted(queue)

    def states(self, queue: str, start: int, end: int, identity: str, only: str | None) -> Runs:
        return self._wait(ask_states(self._link, queue, start, end, STATE_RUNS_MAX, only, identity=identity))

    def _wait(self, question: Coroutine[Any, Any, T]) -> T:
        # The link has a bound of its own; this one is for a loop that has ended meanwhile.
        return asyncio.run_coroutine_threadsafe(question, self._loop).result(2 * CALL_SECONDS)


async def get_log(call: Call) -> Response:
    if call["state"] is not None and call["view"] != "state":
        raise Problem(
            "bad-request",
            f"query parameter 'state': the view {call['view']} does not tell how messages stand; use state",
        )
    wanted = Wanted(
        call["queue"],
        call["view"],
        call["start"],
        call["end"],
        _columns(call["view"], call["columns"]),
        call["fail_on_loss"],
        call["identity"],
        call["state"],
    )
    stream = call.site.readers.stream(walk, wanted, Asking(call.site))
    try:
        served = await anext(stream)
    except BaseException:
        await stream.aclose()
        raise
    assert isinstance(served, Range)
    headers = {"Penstock-Start": str(served.start), "Penstock-End": str(served.end)}
    return StreamedResponse(
        stream, ARROW_MEDIA, headers, f"read of the {wanted.view} of {wanted.queue!r}", call.check_still
    )


def _columns(view: str, names: list[str] | None) -> tuple[str, ...]:
    """The columns to build, in the order in which they were asked for."""
    known = COLUMNS[view]
    if names is None:
        return tuple(column.name for column in VIEWS[view])
    for name in names:
        if name not in known:
            raise Problem(
                "bad-request",
                f"query parameter 'columns': the view {view} has no column {name!r}; "
                f"it has {', '.join(known)}",
            )
    return tuple(dict.fromkeys(names))


# --- in a thread -----------------------------------------------------------------------------------


def walk(reader: LogReader, wanted: Wanted, asking: Asking) -> Iterator[Range | Chunk]:
    """The range that is served, and then the stream in chunks."""
    known = reader.queue(wanted.queue)
    if known is None:
        asking.check_queue(wanted.queue, wanted.identity)  # It is there, but nothing of it is synced.
        known = ReaderQueue(0, 0, 0, 0, 0)
    identity = check_identity(reader, wanted) if known.number else ""
    served = range_of(wanted, known)
    try:
        schema, batches = _batches(reader, wanted, served, asking, identity)
    except ImportError as error:
        raise Problem(
            "not-installed",
            f"{error.name or 'pyarrow'} is not installed where the broker runs, and Arrow needs it: "
            f"pip install 'penstock[arrow]'",
        ) from None
    with losses_told(reader, wanted, known):
        # With the first batch at hand, all that can be known before is known.
        first = list(islice(batches, 1))
    if first and reader.identity(wanted.queue) != identity:
        raise QueueDeleted(wanted.queue)
    yield served
    yield from chunks_of(schema, chain(first, batches))


def check_identity(reader: LogReader, wanted: Wanted) -> str:
    """The identity of the queue that is there, which may have to be a certain one."""
    identity = reader.identity(wanted.queue)
    if wanted.identity not in (None, identity):
        raise QueueDeleted(wanted.queue)
    return identity


@contextmanager
def losses_told(reader: LogReader, wanted: Wanted, known: ReaderQueue) -> Iterator[None]:
    """What a reader cannot find, in the API's words."""
    try:
        yield
    except OffsetsMissing as error:
        # Either retention has gone on since the range was settled, or it has nothing to do with it.
        kept = _kept(wanted, reader.queue(wanted.queue) or known)
        if error.first < kept.start:
            raise _missing(wanted, kept.start, str(error)) from error
        raise Problem("internal", str(error)) from error
    except LogDamaged as error:
        raise Problem("internal", str(error)) from error


def _kept(wanted: Wanted, known: ReaderQueue) -> Range:
    """What there is of a view."""
    if wanted.view == "events":
        return Range(known.event_start, known.event_end)
    # What is alive is kept, however old it is.
    return Range(0 if wanted.view == "state" else known.offset_start, known.offset_end)


def range_of(wanted: Wanted, known: ReaderQueue) -> Range:
    """What will be served of what was asked for; a problem where its beginning is not there any more."""
    kept = _kept(wanted, known)
    start = kept.start if wanted.start is None else wanted.start
    if start < kept.start:
        if wanted.fail_on_loss:
            what = "event" if wanted.view == "events" else "offset"
            raise _missing(
                wanted,
                kept.start,
                f"queue {wanted.queue!r}: retention has removed what was before {what} {kept.start}; "
                f"begin there, or use fail_on_loss=false",
            )
        start = kept.start
    end = kept.end if wanted.end is None else min(wanted.end, kept.end)
    return Range(start, max(start, end))


def _missing(wanted: Wanted, start: int, detail: str) -> Problem:
    return Problem("offsets-missing", detail, queue=wanted.queue, offset_start=start)


def _batches(
    reader: LogReader, wanted: Wanted, served: Range, asking: Asking, identity: str
) -> "tuple[pa.Schema, Iterator[pa.RecordBatch]]":
    """The schema of a view, and its batches. What makes them is imported here: it may not be installed."""
    from penstock.log.arrow import events_batches, messages_batches, schema_of

    schema = schema_of(wanted.view, wanted.columns)
    if served.start == served.end:
        return schema, iter(())
    batches: Callable[..., Iterator[pa.RecordBatch]]
    if wanted.view == "state":
        from penstock.http.reading.state import state_batches

        batches = partial(
            state_batches,
            ask=lambda start: asking.states(wanted.queue, start, served.end, identity, wanted.state),
        )
    else:
        batches = events_batches if wanted.view == "events" else messages_batches
    return schema, batches(
        reader, wanted.queue, *served, columns=wanted.columns, fail_on_loss=wanted.fail_on_loss
    )


def chunks_of(schema: "pa.Schema", batches: Iterator["pa.RecordBatch"]) -> Iterator[Chunk]:
    """A whole stream: its schema, its batches, and the mark of its end."""
    pieces: list[Chunk] = [memoryview(schema.serialize())]
    size = len(pieces[0])
    for batch in batches:
        piece = memoryview(batch.serialize())
        pieces.append(piece)
        size += len(piece)
        if size >= CHUNK_BYTES:
            yield _joined(pieces)
            pieces, size = [], 0
    pieces.append(END_OF_STREAM)
    yield _joined(pieces)


def _joined(pieces: list[Chunk]) -> Chunk:
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


# --- the answer ------------------------------------------------------------------------------------


class StreamedResponse(Response):
    """Hands the chunks of a walk to the client, and ends the walk."""

    def __init__(
        self,
        stream: Stream[Any],
        media_type: str,
        headers: Mapping[str, str],
        what: str,
        check: Callable[[], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        # As starlette's own streaming response does: there is no body that could be measured.
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers(headers)
        self._stream = stream
        self._what = what
        self._check = check  # raises where the client may not have the rest
        self._ended = ended  # called when there is no walk any more
        self._steps = 0  # odd: a part is on its way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        talking = asyncio.ensure_future(self._talk(send))
        stalling = asyncio.ensure_future(self._stalled())
        tasks = (talking, stalling, asyncio.ensure_future(client_left(receive)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stalling.done() and not talking.done():
                raise Problem("unavailable", f"the client took nothing for {stalling.result():g} s")
            if talking.done():
                talking.result()
        except PenstockError as error:
            # An answer without an end: the server closes the connection, and the client can tell.
            log.warning("a %s was broken off: %s", self._what, error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stream.aclose()
            self._ended()

    async def _talk(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._stream:
            view = memoryview(chunk)
            for at in range(0, len(view), CHUNK_BYTES):
                self._check()
                self._steps += 1
                await send(_part(view[at : at + CHUNK_BYTES], more=True))
                self._steps += 1
        await send(_part(b"", more=False))

    async def _stalled(self) -> float:
        """Returns when the client has taken nothing for too long, and for how long that was at least."""
        seconds = 0.0
        while seconds < (STALL_SECONDS if self._stream.is_crowded else STALL_SECONDS_MAX):
            seen = self._steps
            await asyncio.sleep(STALL_SECONDS)
            seconds = seconds + STALL_SECONDS if seen % 2 and seen == self._steps else 0.0
        return seconds


def _part(body: Chunk, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


# --- the table -------------------------------------------------------------------------------------

END: Final = Param(
    "end", kinds.Whole(), "where to stop, exclusive; absent, or not synced: at what is synced now"
)
FAIL_ON_LOSS: Final = Param(
    "fail_on_loss",
    kinds.Flag(),
    "whether messages that retention has removed, or that cannot be read, are an error; "
    "if not, they are left out",
    default=True,
)

ROUTES: Final = (
    Route(
        "GET /v1/queues/{queue}/log",
        get_log,
        Right.READ,
        "Read the log of a queue in bulk, as an Arrow IPC stream; only what is synced.",
        None,
        params=(
            QUEUE,
            Param("view", kinds.Word(tuple(COLUMNS)), "what of it", default="messages"),
            Param(
                "start",
                kinds.Whole(),
                "the first offset, or event of the view events; absent: the first kept",
            ),
            END,
            Param(
                "columns",
                kinds.ListOf(kinds.Word(tuple(dict.fromkeys(chain(*COLUMNS.values())))), items_max=32),
                "only these columns, in this order; headers only come where they are named",
            ),
            FAIL_ON_LOSS,
            IDENTITY,
            Param("state", kinds.Word(("ready", "delayed", "held", "dead")), "of the view state: only these"),
        ),
        problems=("queue-not-found", "queue-deleted", "offsets-missing", "not-installed"),
        answer_media=ARROW_MEDIA,
        answer_headers={
            "Penstock-Start": "The first offset (or event) of the range that is served.",
            "Penstock-End": "Its end, exclusive: where to go on.",
        },
        streams=True,
    ),
)
