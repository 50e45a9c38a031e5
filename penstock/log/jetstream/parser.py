"""The parser below nats-py's client, for large messages: a record of the log is put together with one copy.

nats-py's own one collects all bytes in one buffer and takes a message out of it by three copies. For answers
of some megabytes that was a third of what a task of Spark spends on reading them. Here the chunks of a
large message are kept as they came, and joined when the last is there. Messages that came as a whole are cut
out of their chunk: nats-py tries up to seven patterns for each, and moves what is behind it. All else is
nats-py's.
"""

from typing import Any, Final

from nats.protocol.parser import AWAITING_CONTROL_LINE, AWAITING_MSG_PAYLOAD, CRLF_SIZE, Parser

LARGE_BYTES: Final = 64 * 1024
_CRLF: Final = b"\r\n"


class RecordParser(Parser):
    def __init__(self, client: Any) -> None:  # as nats-py has it
        self._chunks: list[bytes] = []  # of a large message
        self._chunks_bytes = 0
        super().__init__(client)

    def reset(self) -> None:
        super().reset()
        self._chunks = []
        self._chunks_bytes = 0

    async def parse(self, data: bytes = b"") -> None:
        if self.state == AWAITING_MSG_PAYLOAD and self.needed > LARGE_BYTES:
            if self.buf:
                self._chunks.append(bytes(self.buf))
                self._chunks_bytes = len(self.buf)
                self.buf.clear()
            self._chunks.append(data)
            self._chunks_bytes += len(data)
            over = self._chunks_bytes - self.needed - CRLF_SIZE
            if over < 0:
                return
            chunks, self._chunks, self._chunks_bytes = self._chunks, [], 0
            data = await self._take(chunks, over)
        if self.state == AWAITING_CONTROL_LINE and not self.buf:
            data = data[await self._take_whole(data) :]
        if data:
            await super().parse(data)

    async def _take_whole(self, data: bytes) -> int:
        """Hands over the messages that stand there whole, from the beginning on; up to where that is."""
        at = 0
        while (end := data.find(_CRLF, at)) >= 0:
            words = data[at:end].split(b" ")
            has_header = words[0] == b"HMSG"
            if not (has_header or words[0] == b"MSG") or not 4 <= len(words) - has_header <= 5:
                break
            try:
                sid, header_bytes, size = int(words[2]), int(words[-2]) if has_header else 0, int(words[-1])
            except ValueError:
                break
            start = end + CRLF_SIZE
            if len(data) < start + size + CRLF_SIZE:
                break
            reply = words[3] if len(words) - has_header == 5 else b""
            middle, end = start + header_bytes, start + size
            await self.nc._process_msg(sid, words[1], reply, data[middle:end], data[start:middle] or None)
            at = end + CRLF_SIZE
        return at

    async def _take(self, chunks: list[bytes], over: int) -> bytes:
        """Hands over the message; what comes behind it."""
        first, header_bytes = chunks[0], self.header_needed
        while len(first) < header_bytes:
            first += chunks.pop(1)
        header, chunks[0] = first[:header_bytes], first[header_bytes:]
        rest = chunks[-1][len(chunks[-1]) - over :]
        surplus = over + CRLF_SIZE
        while surplus >= len(chunks[-1]):
            surplus -= len(chunks.pop())
        chunks[-1] = chunks[-1][: len(chunks[-1]) - surplus]
        self.state = AWAITING_CONTROL_LINE
        self.header_needed = 0
        about = self.msg_arg
        await self.nc._process_msg(
            about["sid"], about["subject"], about["reply"], b"".join(chunks), header or None
        )
        return rest
