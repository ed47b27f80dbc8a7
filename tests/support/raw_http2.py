"""A client of HTTP/2 frames, for what gRPC's own clients never do."""

from __future__ import annotations

import socket
import struct
from types import TracebackType
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
_END_STREAM, _END_HEADERS = 1, 4
_INITIAL_WINDOW_SIZE = 4


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


class RawConnection:
    """A connection that has sent its settings. With `window` 0 the server can send headers, but no message."""

    def __init__(self, address: str, window: int | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=20.0)
        settings = b"" if window is None else struct.pack(">HI", _INITIAL_WINDOW_SIZE, window)
        self.socket.sendall(PREFACE + frame(SETTINGS, payload=settings))
        self._stream = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self.socket.close()

    def call(self, path: str, token: str = "", message: bytes = b"") -> None:
        """Sends a call with one message, and reads nothing."""
        self._stream += 2
        headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test")]
        headers += [("te", "trailers"), ("content-type", "application/grpc")]
        if token:
            headers.append(("authorization", f"Bearer {token}"))
        # Literals without indexing: 0, then name and value, each after its length.
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)
        data = bytes([0]) + len(message).to_bytes(4, "big") + message
        self.socket.sendall(frame(HEADERS, _END_HEADERS, self._stream, block))
        self.socket.sendall(frame(DATA, _END_STREAM, self._stream, data))

    def reset(self) -> None:
        """Cancels the last call."""
        self.socket.sendall(frame(RST_STREAM, 0, self._stream, (8).to_bytes(4, "big")))

    def frames_until_end(self) -> list[int]:
        """The types of the frames that arrive until the server closes the connection."""
        data = b""
        try:
            while part := self.socket.recv(1 << 16):
                data += part
        except ConnectionResetError:
            pass
        kinds = []
        while data:
            length = int.from_bytes(data[:3], "big")
            kinds.append(data[3])
            data = data[9 + length :]
        return kinds
