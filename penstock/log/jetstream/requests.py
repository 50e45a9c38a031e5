"""Questions and answers over a link: one subscription, and numbers that say which answer is whose.

For what is asked seldom: administration, a message here and there, and reading a range of a stream, where
one question has thousands of answers (`gather`). Each question has a future; nothing that happens for every
message comes through here.

Rules that always hold: a question is answered, or fails, within its seconds; a connection that is lost fails
all that are open at once; nothing waits for an answer that nobody wants any more.

How it fails: `LinkLost`, `NoAnswer`; and `JetStreamError` when nobody listens to the subject at all, because
that is how JetStream says that it has no leader at the moment.
"""

import asyncio
from dataclasses import dataclass
from itertools import groupby

from penstock.log.jetstream.errors import JetStreamError, LinkLost, NoAnswer
from penstock.log.jetstream.link import Link, Watcher
from penstock.protocols import nats_write
from penstock.protocols.nats import Messages, Status
from penstock.protocols.nats_jetstream import NO_RESPONDERS, Failure, read_numbers

END_OF_BATCH = 204


@dataclass(slots=True)
class _Question:
    subject: bytes
    future: "asyncio.Future[Messages]"
    answers: Messages | None  # None: the first answer is the only one


class Requests(Watcher):
    """Questions over one link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._head = link.new_inbox()
        self._number_next = 0
        self._open: dict[int, _Question] = {}
        self._sid = link.subscribe(self._head + b"*", self)
        link.watch(self)

    async def ask(
        self, subject: bytes, payload: bytes = b"", *, headers: bytes = b"", seconds: float = 5.0
    ) -> tuple[bytes, bytes]:
        """The headers and the payload of the answer."""
        answers = await self._ask(subject, payload, headers, seconds, gather=False)
        return answers.headers[0], answers.payloads[0]

    async def gather(self, subject: bytes, payload: bytes, *, seconds: float = 30.0) -> Messages:
        """All answers, until the one that says that it was the last."""
        return await self._ask(subject, payload, b"", seconds, gather=True)

    def tell(self, frames: bytes) -> None:
        """Frames that belong before the next question, and have no answer of their own."""
        if not self._link.write(frames):
            raise LinkLost("no connection to NATS; ask again when there is one")

    async def _ask(
        self, subject: bytes, payload: bytes, headers: bytes, seconds: float, *, gather: bool
    ) -> Messages:
        number = self._number_next
        self._number_next += 1
        future: asyncio.Future[Messages] = asyncio.get_running_loop().create_future()
        reply = self._head + nats_write.number_text(number)
        self._open[number] = _Question(subject, future, Messages(self._sid) if gather else None)
        try:
            if not self._link.write(nats_write.publish(subject, payload, reply=reply, headers=headers)):
                raise LinkLost(f"{subject.decode()}: no connection to NATS; ask again when there is one")
            return await asyncio.wait_for(future, seconds)
        except TimeoutError:
            raise NoAnswer(f"{subject.decode()}: no answer within {seconds:g} s; ask again") from None
        finally:
            self._open.pop(number, None)

    # --- what the link says ----------------------------------------------------------------------

    def messages(self, batch: Messages) -> None:
        numbers = read_numbers(batch.subjects, len(self._head))
        for number, rows in groupby(range(len(numbers)), key=numbers.__getitem__):
            question = self._open.get(number)
            if question is None:
                continue
            places = list(rows)
            lo, hi = places[0], places[-1] + 1
            if question.answers is None:
                answers = Messages(batch.sid)
                self._add(answers, batch, lo, hi)
                self._settle(question, answers)
            else:
                self._add(question.answers, batch, lo, hi)

    @staticmethod
    def _add(answers: Messages, batch: Messages, lo: int, hi: int) -> None:
        answers.subjects += batch.subjects[lo:hi]
        answers.replies += batch.replies[lo:hi]
        answers.headers += batch.headers[lo:hi]
        answers.payloads += batch.payloads[lo:hi]

    def status(self, status: Status) -> None:
        (number,) = read_numbers([status.subject], len(self._head))
        question = self._open.get(number)
        if question is None or question.future.done():
            return
        if status.code == END_OF_BATCH and question.answers is not None:
            self._settle(question, question.answers)
            return
        text = status.text or ("nobody listens" if status.code == NO_RESPONDERS else "")
        failure = Failure(status.code, 0, text)
        question.future.set_exception(JetStreamError(question.subject.decode(), failure))

    @staticmethod
    def _settle(question: _Question, answers: Messages) -> None:
        if not question.future.done():
            question.future.set_result(answers)

    def down(self, reason: str) -> None:
        for question in self._open.values():
            if not question.future.done():
                question.future.set_exception(
                    LinkLost(f"{question.subject.decode()}: {reason} before it answered; ask again")
                )
