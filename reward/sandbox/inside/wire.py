"""Messages between the scorer and its sandboxes: a header of JSON and parts of bytes, with descriptors where needed.

Frame: length of the header (4 bytes, big-endian), header, parts. The header's `sizes` has the length of every part.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_LENGTH = struct.Struct("!I")
_MOST_DESCRIPTORS = 2


class Message(NamedTuple):
    """One received message. The receiver closes the descriptors."""

    header: dict[str, Any]
    parts: list[bytes]
    descriptors: list[int]


def send(channel: socket.socket, header: Mapping[str, object], *parts: bytes, descriptors: Sequence[int] = ()) -> None:
    """Sends one message. Raises OSError (TimeoutError among them, if the channel has a time-out)."""
    text = json.dumps({**header, "sizes": [len(part) for part in parts]}).encode()
    frame = memoryview(b"".join((_LENGTH.pack(len(text)), text, *parts)))
    sent = socket.send_fds(channel, [frame], list(descriptors)) if descriptors else 0
    channel.sendall(frame[sent:])


def receive(channel: socket.socket, most_bytes: int = 1 << 31) -> Message | None:
    """The next message; None at the end. Raises OSError, and ValueError for a message longer than `most_bytes`."""
    prefix, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, _MOST_DESCRIPTORS)
    try:
        prefix += _exactly(channel, _LENGTH.size - len(prefix)) if prefix else b""
        if not prefix:
            return None
        (length,) = _LENGTH.unpack(prefix)
        if length > most_bytes:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(_exactly(channel, length))
        sizes = header.pop("sizes")
        if sum(sizes) > most_bytes:
            raise ValueError(f"a message of {sum(sizes)} bytes")
        return Message(header, [_exactly(channel, size) for size in sizes], descriptors)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = channel.recv_into(view)
        if not count:
            raise ConnectionResetError("the other end closed in the middle of a message")
        view = view[count:]
    return bytes(data)
