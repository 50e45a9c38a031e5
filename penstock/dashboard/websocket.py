"""WebSocket: uvicorn's, which ends a handshake that cannot be read instead of waiting for ever.

The websockets library bounds what it reads of a request (the lines, their number, no body). Where one is
beyond that, it has nothing to say and uvicorn waits for more: the connection would stay, and count, as long
as its peer likes.
"""

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

_REFUSED = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class WebSocket(WebSocketsSansIOProtocol):
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self.transport.write(_REFUSED)
            self.transport.close()
