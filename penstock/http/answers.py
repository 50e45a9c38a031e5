"""Answers that are large, in pieces: no more of one waits to be read than a piece, and not for long.

What nobody has taken yet of an answer is in the account of bodies (`site.py`): whoever hands it over has
asked for room there. So a thousand callers that ask for much and read nothing cost what that account allows.
"""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

from starlette.types import Send

from penstock.http.connection import BoundedProtocol
from penstock.http.site import Site

PIECE_BYTES: Final = 64 * 1024
"""Of an answer. One that is larger is on its way only when the caller has read most of it."""


async def hand_over(
    site: Site,
    connection: BoundedProtocol,
    send: Send,
    status: int,
    headers: Sequence[tuple[bytes, bytes]],
    whole: bytes,
) -> bool:
    """Whether it is on its way, as far as that can be known; TimeoutError where its caller does not read. The
    account has it no more then."""
    body = memoryview(whole)
    pieces = [body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)]
    if len(pieces) != 1:
        pieces.append(body[:0])  # which waits until the others are on their way
    was_closing = False
    try:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for number, piece in enumerate(pieces, 1):
            # The first one waits for nobody: the head was taken just before.
            async with asyncio.timeout(site.frame_seconds) if number > 1 else nullcontext():
                # From the caller's end until `lost`, what is written goes nowhere, without a word.
                was_closing = connection.transport.is_closing()
                await send({"type": "http.response.body", "body": piece, "more_body": number < len(pieces)})
    except TimeoutError:
        connection.transport.abort()  # An answer without an end; and its place is for others.
        await asyncio.wait([connection.lost], timeout=1)
        raise
    finally:
        site.held.let_body_go(len(body))
    return not was_closing and not connection.lost.done()
