"""What crosses the border of a sandbox: messages with the scorer, and plain data between a test and an answer.

A message is a frame: length of the header (4 bytes, big-endian), header (JSON), parts (bytes), and descriptors where
needed. The header's `sizes` has the length of every part.

Plain data carries no behaviour; nothing is pickled. Values that JSON supports are sent as JSON. Every JSON object is a
tag: {"tuple": […]}, {"set": […]}, {"frozenset": […]}, {"dict": [[key, value], …]}, {"bytes": text},
{"complex": [real, imaginary]}, {"int": hexadecimal} (for long integers), {"object": number, "type": name}, for one that
is not data and stays in its process. Subclasses become their base class.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_LENGTH = struct.Struct("!I")
_MOST_DESCRIPTORS = 2
_LONG_INT_BITS = 4096  # Python refuses to convert much longer integers to decimals
_MOST_COLLIDING = 1000


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


def dumps(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def encode(value: object, keep: Callable[[object], dict[str, object]]) -> object:
    """Converts the value to JSON types. `keep` returns the tag of an object that is not data, or raises TypeError.
    Raises RecursionError for a value that is nested too deeply, or contains itself.
    """
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _LONG_INT_BITS else {"int": hex(value)}
    if isinstance(value, list):
        return [encode(one, keep) for one in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, keep), encode(one, keep)] for key, one in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(one, keep) for one in value]}
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), keep)
    return keep(value)


def decode(value: Any, find: Callable[[dict[str, Any]], Any]) -> Any:
    """Decodes the output of `encode`; raises ValueError, TypeError, KeyError, RecursionError or OverflowError for
    anything else. `find` returns the object for a tag.
    """
    if isinstance(value, list):
        return [decode(one, find) for one in value]
    if not isinstance(value, dict):
        return value
    if "object" in value:
        return find(value)
    ((tag, inner),) = value.items()
    if tag == "dict":
        pairs = [(decode(key, find), decode(one, find)) for key, one in inner]
        _check_hashes([key for key, _ in pairs])
        return dict(pairs)
    if tag == "bytes":
        return inner.encode("latin-1")
    if tag == "complex":
        return complex(*inner)
    if tag == "int":
        return int(inner, 16)
    kinds: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
    members = decode(inner, find)
    if tag != "tuple":
        _check_hashes(members)
    return kinds[tag](members)


def _check_hashes(members: list[object]) -> None:
    """Raises ValueError if many have the hash of another one, as multiples of 2^61 - 1 have: a set of them would take
    quadratic time, outside the limits of the program that sent them.
    """
    if len(members) - len(set(map(hash, members))) > _MOST_COLLIDING:
        raise ValueError("a set or dictionary whose members have equal hashes")
