"""JetStream's API over a link: streams and single messages.

Everything here is a question with an answer. A method's name is what the API calls the thing, and its
settings are the API's own, as dictionaries: a stream has fifty of them, and we would only repeat their names.

What passes by itself (no leader, a node that is just starting, an answer that did not come) is tried again
for up to `patience_seconds`, where trying again is safe: questions that read, and those whose repetition
changes nothing. `put` is asked once, and says so.

How it fails: `JetStreamError` when JetStream says no, `NoAnswer` and `LinkLost` when nobody can say.
"""

import asyncio
import base64
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.log.jetstream.errors import (
    JetStreamError,
    JetStreamTrouble,
    LinkLost,
    passes,
    read_answer,
)
from penstock.log.jetstream.link import Link
from penstock.log.jetstream.rights import USER_INFO

Settings = Mapping[str, Any]
Answer = dict[str, Any]
"""JSON in the server's terms: `Any`."""

_PAUSE_SECONDS = 0.1

READS_AT_ONCE: Final = 4
"""A node ends a connection for which more than 64 MB wait (`max_pending`): a front-end that copies 16 logs at
once would lose it again and again. And a lease that is renewed waits behind what is on its way."""

log = logging.getLogger("penstock.nats")


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as it is in a stream."""

    seq: int
    subject: str
    payload: bytes
    time: str = ""  # when it was stored, by the clock of NATS


class JetStream:
    """The API of one account."""

    def __init__(self, link: Link, *, answer_seconds: float = 5.0, patience_seconds: float = 20.0) -> None:
        self._link = link
        self._answer_seconds = answer_seconds
        self._patience_seconds = patience_seconds
        self._reading = asyncio.Semaphore(READS_AT_ONCE)

    # --- asking ----------------------------------------------------------------------------------

    async def call(self, name: str, question: Settings | None = None) -> Answer:
        """One question to `$JS.API.` and its answer, without an error in it; asked again if it may help."""
        payload = json.dumps(question).encode() if question is not None else b""
        loop = asyncio.get_running_loop()
        deadline, told = loop.time() + self._patience_seconds, False
        while True:
            try:
                said = await self._link.ask(f"$JS.API.{name}", payload, seconds=self._answer_seconds)
                return read_answer(name, said)
            except JetStreamTrouble as error:
                if not passes(error) or loop.time() > deadline:
                    raise
                if not told and not isinstance(error, LinkLost):  # the link tells that by itself
                    told = True
                    log.info("waiting: %s", error)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def account(self) -> Answer:
        """What the account uses and may use; fails where JetStream is not enabled for it."""
        return await self.call("INFO")

    async def user(self) -> Answer:
        """Who we are to the server, and what we may do."""
        said = await self._link.ask(USER_INFO, seconds=self._answer_seconds)
        return dict(read_answer(USER_INFO, said).get("data") or {})

    # --- streams ---------------------------------------------------------------------------------

    async def create_stream(self, settings: Settings) -> Answer:
        """Make a stream. One that is there with the same settings is good; with others it is an error."""
        return await self.call(f"STREAM.CREATE.{settings['name']}", settings)

    async def stream(self, name: str) -> Answer:
        """Its settings, its state, and where it lives."""
        return await self.call(f"STREAM.INFO.{name}")

    async def purge_subject(self, name: str, subject: str, *, before_seq: int = 0) -> int:
        """Delete the messages of a subject, all or those before a sequence number; how many there were."""
        question: Answer = {"filter": subject}
        if before_seq:
            question["seq"] = before_seq
        said = await self.call(f"STREAM.PURGE.{name}", question)
        return int(said["purged"])

    async def subjects(self, name: str, filter_subject: str) -> dict[str, int]:
        """The subjects of a stream that have messages, and how many."""
        found: dict[str, int] = {}
        while True:
            question = {"subjects_filter": filter_subject, "offset": len(found)}
            said = await self.call(f"STREAM.INFO.{name}", question)
            page = said["state"].get("subjects") or {}
            found |= page
            if not page or len(found) >= said.get("total", 0):
                return found

    # --- reading ---------------------------------------------------------------------------------

    async def read(
        self, stream: str, seq: int, count: int, *, bytes_max: int = 0, only: str = ""
    ) -> list[Stored]:
        """Up to `count` messages from a sequence number on, straight from one of the stream's nodes.

        `only` names the subject to read. Which node answers is not ours to choose, and one that is behind may
        not have the newest messages yet. Holes are skipped. However few bytes are asked for, one message
        comes if there is one. Whoever comes when `READS_AT_ONCE` are on their way waits for his turn.
        """
        question: Answer = {"seq": seq, "batch": count}
        if bytes_max:
            question["max_bytes"] = bytes_max
        if only:
            question["next_by_subj"] = only
        async with self._reading:
            return await self._gather(stream, question)

    async def last_of(self, stream: str, subjects: Sequence[str]) -> list[Stored]:
        """The last message of each subject (wildcards too), as the nodes have them: see `read`."""
        return await self._gather(stream, {"multi_last": list(subjects)})

    async def last(self, stream: str, subject: str) -> Stored | None:
        """The last message of a subject, as the leader has it: what was stored before is seen."""
        return await self._get(stream, {"last_by_subj": subject})

    async def message(self, stream: str, seq: int) -> Stored | None:
        """One message, as the leader has it; None where there is none (any more)."""
        return await self._get(stream, {"seq": seq})

    async def next_message(self, stream: str, seq: int, only: str = ">") -> Stored | None:
        """The first message from a sequence number on, as the leader has it; of one subject, if named."""
        return await self._get(stream, {"seq": seq, "next_by_subj": only})

    async def _get(self, stream: str, question: Settings) -> Stored | None:
        try:
            said = await self.call(f"STREAM.MSG.GET.{stream}", question)
        except JetStreamError as error:
            if error.not_found:
                return None
            raise
        message = said["message"]
        return Stored(
            int(message["seq"]),
            str(message["subject"]),
            base64.b64decode(message.get("data", "")),
            str(message.get("time", "")),
        )

    async def _gather(self, stream: str, question: Settings) -> list[Stored]:
        try:
            found = await self._link.gather(f"$JS.API.DIRECT.GET.{stream}", json.dumps(question).encode())
        except JetStreamError as error:
            if error.failure.code == 404:
                return []
            raise
        try:
            return [
                Stored(
                    int(said["Nats-Sequence"]), said["Nats-Subject"], data, said.get("Nats-Time-Stamp", "")
                )
                for said, data in found
            ]
        except (KeyError, ValueError):
            raise JetStreamTrouble(f"stream {stream}: an answer does not say which message it is") from None

    # --- writing ---------------------------------------------------------------------------------

    async def put(
        self,
        subject: str,
        payload: bytes,
        *,
        last_seq: int | None = None,
        stream_seq: int | None = None,
        message_id: str = "",
        stream: str = "",
    ) -> int:
        """Publish one message and return its sequence number. Asked once: see the module.

        With `last_seq`, only if the last message of the subject has that sequence number (0: there is none):
        compare and set; with `stream_seq`, only if that of the stream has. Then `JetStreamError.wrong_last`
        says that somebody else was first.
        """
        headers = {}
        if last_seq is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(last_seq)
        if stream_seq is not None:
            headers["Nats-Expected-Last-Sequence"] = str(stream_seq)
        if message_id:
            headers["Nats-Msg-Id"] = message_id
        if stream:
            headers["Nats-Expected-Stream"] = stream
        said = await self._link.ask(subject, payload, headers=headers or None, seconds=self._answer_seconds)
        return int(read_answer(f"publish to {subject}", said)["seq"])
