"""JetStream's API over a link: streams, consumers, single messages, leases, atomic batches.

Everything here is a question with an answer. A method's name is what the API calls the thing, and its
settings are the API's own, as dictionaries: a stream has fifty of them, and we would only repeat their names.

What passes by itself (no leader, a node that is just starting, an answer that did not come) is tried again
for up to `patience_seconds`, where trying again is safe: questions that read, and those whose repetition
changes nothing. `put` and `commit_batch` are asked once, and say so.

How it fails: `JetStreamError` when JetStream says no, `NoAnswer` and `LinkLost` when nobody can say.
"""

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.log.jetstream.errors import JetStreamError, LinkLost, NoAnswer
from penstock.log.jetstream.requests import Requests
from penstock.protocols import nats_write
from penstock.protocols.errors import MisuseError
from penstock.protocols.nats import Messages
from penstock.protocols.nats_headers import header_block, value_of
from penstock.protocols.nats_jetstream import failure_of, read_direct_seqs, read_object

BATCH_MESSAGES_MAX = 1000
"""What a server takes in one atomic batch, unless it is set up otherwise."""

Settings = Mapping[str, Any]
Answer = dict[str, Any]
"""JSON in the server's terms: `Any`."""

_PAUSE_SECONDS = 0.1
_DELETE_FAILED = (10043, 10057)  # of one node and of a cluster, for any reason: also that nothing is there


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as it is in a stream."""

    seq: int
    subject: bytes
    headers: bytes
    payload: bytes


class JetStream:
    """The API of one account."""

    def __init__(
        self, requests: Requests, *, answer_seconds: float = 5.0, patience_seconds: float = 20.0
    ) -> None:
        self._requests = requests
        self._answer_seconds = answer_seconds
        self._patience_seconds = patience_seconds

    # --- asking ----------------------------------------------------------------------------------

    async def call(self, name: str, question: Settings | None = None) -> Answer:
        """One question to `$JS.API.` and its answer, without an error in it; asked again if it may help."""
        subject = nats_write.subject_bytes(f"$JS.API.{name}")
        payload = json.dumps(question).encode() if question is not None else b""
        deadline = asyncio.get_running_loop().time() + self._patience_seconds
        while True:
            try:
                _, said = await self._requests.ask(subject, payload, seconds=self._answer_seconds)
                return _good(name, said)
            except (JetStreamError, NoAnswer, LinkLost) as error:
                passing = not isinstance(error, JetStreamError) or error.again
                if not passing or asyncio.get_running_loop().time() > deadline:
                    raise
            await asyncio.sleep(_PAUSE_SECONDS)

    async def account(self) -> Answer:
        """What the account uses and may use; fails where JetStream is not enabled for it."""
        return await self.call("INFO")

    # --- streams ---------------------------------------------------------------------------------

    async def create_stream(self, settings: Settings) -> Answer:
        """Make a stream. One that is there with the same settings is good; with others it is an error."""
        return await self.call(f"STREAM.CREATE.{settings['name']}", settings)

    async def update_stream(self, settings: Settings) -> Answer:
        return await self.call(f"STREAM.UPDATE.{settings['name']}", settings)

    async def stream(self, name: str) -> Answer:
        """Its settings, its state, and where it lives."""
        return await self.call(f"STREAM.INFO.{name}")

    async def stream_names(self) -> list[str]:
        """All streams of the account."""
        names: list[str] = []
        while True:
            said = await self.call("STREAM.NAMES", {"offset": len(names)})
            page = said.get("streams") or []
            names += page
            if not page or len(names) >= said["total"]:
                return names

    async def delete_stream(self, name: str) -> None:
        await self._delete(f"STREAM.DELETE.{name}")

    async def purge(self, name: str, *, before_seq: int) -> int:
        """Delete what is before a sequence number; how many there were."""
        said = await self.call(f"STREAM.PURGE.{name}", {"seq": before_seq})
        return int(said["purged"])

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

    async def delete_message(self, stream: str, seq: int) -> None:
        """Take one message out of a stream; it leaves a hole. One that is not there is deleted."""
        try:
            await self.call(f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": True})
        except JetStreamError as error:
            if error.failure.err_code not in _DELETE_FAILED or await self.message(stream, seq) is not None:
                raise

    # --- consumers -------------------------------------------------------------------------------

    async def create_consumer(self, stream: str, settings: Settings) -> Answer:
        """Make a durable consumer, or change the one that is there."""
        question = {"stream_name": stream, "config": settings}
        return await self.call(f"CONSUMER.CREATE.{stream}.{settings['name']}", question)

    async def consumer(self, stream: str, name: str) -> Answer:
        """Its settings and how far it has come."""
        return await self.call(f"CONSUMER.INFO.{stream}.{name}")

    async def delete_consumer(self, stream: str, name: str) -> None:
        await self._delete(f"CONSUMER.DELETE.{stream}.{name}")

    async def _delete(self, name: str) -> None:
        """What is not there any more is deleted, by us or by somebody else."""
        try:
            await self.call(name)
        except JetStreamError as error:
            if not error.not_found:
                raise

    # --- reading ---------------------------------------------------------------------------------

    async def read(
        self, stream: str, seq: int, count: int, *, bytes_max: int = 0, only: str = ""
    ) -> Messages:
        """Up to `count` messages from a sequence number on, straight from one of the stream's nodes.

        `only` names the subject to read. Which node answers is not ours to choose, and one that is behind may
        not have the newest messages yet. `read_direct_seqs` says which ones came: holes are skipped. However
        few bytes are asked for, one message comes if there is one.
        """
        question: Answer = {"seq": seq, "batch": count}
        if bytes_max:
            question["max_bytes"] = bytes_max
        if only:
            question["next_by_subj"] = only
        subject = nats_write.subject_bytes(f"$JS.API.DIRECT.GET.{stream}")
        return await self._gather(subject, json.dumps(question).encode())

    async def last_of(self, stream: str, subjects: Sequence[str]) -> list[Stored]:
        """The last message of each subject (wildcards too), as the nodes have them: see `read`."""
        subject = nats_write.subject_bytes(f"$JS.API.DIRECT.GET.{stream}")
        found = await self._gather(subject, json.dumps({"multi_last": list(subjects)}).encode())
        seqs = read_direct_seqs(found.headers)
        return [
            Stored(seq, value_of(headers, b"Nats-Subject") or b"", headers, payload)
            for seq, headers, payload in zip(seqs, found.headers, found.payloads, strict=True)
        ]

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
            str(message["subject"]).encode(),
            base64.b64decode(message.get("hdrs", "")),
            base64.b64decode(message.get("data", "")),
        )

    async def _gather(self, subject: bytes, question: bytes) -> Messages:
        try:
            return await self._requests.gather(subject, question)
        except JetStreamError as error:
            if error.failure.code == 404:
                return Messages(0)
            raise

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
        headers = []
        if last_seq is not None:
            headers.append((b"Nats-Expected-Last-Subject-Sequence", b"%d" % last_seq))
        if stream_seq is not None:
            headers.append((b"Nats-Expected-Last-Sequence", b"%d" % stream_seq))
        if message_id:
            headers.append((b"Nats-Msg-Id", message_id.encode()))
        if stream:
            headers.append((b"Nats-Expected-Stream", stream.encode()))
        _, said = await self._requests.ask(
            nats_write.subject_bytes(subject),
            payload,
            headers=header_block(headers) if headers else b"",
            seconds=self._answer_seconds,
        )
        return int(_good(f"publish to {subject}", said)["seq"])

    async def commit_batch(
        self, batch_id: str, messages: Sequence[tuple[str, Sequence[tuple[bytes, bytes]], bytes]]
    ) -> int:
        """Store messages (subject, headers, payload) of one stream together or not at all.

        The sequence number of the last one. Asked once: when nobody can say whether it happened, the same
        batch with message ids says `contains duplicate message id` (10201) if it did.
        """
        if not 1 <= len(messages) <= BATCH_MESSAGES_MAX:
            raise MisuseError(
                f"nats: {len(messages)} messages cannot be one batch (1 to {BATCH_MESSAGES_MAX})"
            )
        frames = []
        for place, (subject, headers, payload) in enumerate(messages, 1):
            own = [(b"Nats-Batch-Id", batch_id.encode()), (b"Nats-Batch-Sequence", b"%d" % place), *headers]
            if place == len(messages):
                own.append((b"Nats-Batch-Commit", b"1"))
            frames.append((nats_write.subject_bytes(subject), header_block(own), payload))
        *parts, (subject_last, headers_last, payload_last) = frames
        self._requests.tell(
            b"".join(
                nats_write.publish(subject, payload, headers=headers) for subject, headers, payload in parts
            )
        )
        _, said = await self._requests.ask(
            subject_last, payload_last, headers=headers_last, seconds=self._answer_seconds
        )
        return int(_good(f"batch {batch_id}", said)["seq"])


def _good(what: str, said: bytes) -> Answer:
    answer = read_object(said)
    failure = failure_of(answer)
    if failure is not None:
        raise JetStreamError(what, failure)
    return answer
