"""Fuzzed messages: values of any schema, many of them extreme, and mutations of encoded messages."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence

from google.protobuf.descriptor import Descriptor, FieldDescriptor

NUMBERS = (0, 1, 2, 7, 100, 65_535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, 0.05, 1.0, 1.5, -1.0, 1e300, 5e-324, float("inf"), float("-inf"), float("nan"))
PATHS = (
    *("../x", "../" * 20 + "etc/passwd", "/etc/passwd", "%2e%2e%2fx", "a\x00b", "a\nb", "．．／x", "C:\\x", "~/x", "*"),
)
ESCAPES = ("\x1b[2J", "\x1b]0;title\x07", "<script>alert(1)</script>", "\u202e", "{__import__('os')}", "$(id)")
NESTED = b"\x0b" * 20_000
"""Groups within one another, which no schema here has."""

_FIXED = {
    FieldDescriptor.TYPE_DOUBLE: (1, "<d"),
    FieldDescriptor.TYPE_FLOAT: (5, "<f"),
}
_DELIMITED = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE)


class Fuzz:
    """A source of random messages. `known`: by the name of a field, values that lead further than a random one."""

    def __init__(self, seed: int, known: Mapping[str, Sequence[str | bytes]] | None = None) -> None:
        self.chance = random.Random(seed)
        self._known = known or {}

    def distorted(self, parts: Sequence[bytes]) -> list[bytes]:
        """The encoded messages as they are, mutated, or other bytes in their place."""
        dice = self.chance.random()
        if dice < 0.1:
            return [self.chance.randbytes(self.chance.choice([0, 1, 5, 50, 2000])) for _ in parts]
        return [self.mutated(part) for part in parts] if dice < 0.4 else list(parts)

    def mutated(self, data: bytes) -> bytes:
        """Flips, removes, repeats or inserts a few bytes; the result is often invalid text."""
        changed = bytearray(data)
        for _ in range(self.chance.choice([1, 1, 2, 8])):
            place = self.chance.randrange(len(changed) + 1)
            change = self.chance.randrange(5)
            if change == 0 and changed:
                changed[min(place, len(changed) - 1)] ^= 1 << self.chance.randrange(8)
            elif change == 1:
                del changed[place : place + self.chance.choice([1, 3, 100])]
            elif change == 2:
                changed[place:place] = self.chance.choice([b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\x00", b"\x7f" * 9])
            elif change == 3:
                changed[place:place] = changed[:place][-50:]
            elif changed:
                changed[min(place, len(changed) - 1)] = self.chance.choice([0, 0x7F, 0x80, 0xFF])
        return bytes(changed)

    def message(self, kind: Descriptor) -> bytes:
        """An encoded message: fields absent, once or repeated, out of order, and some that the schema does not have."""
        times = [0, 1, 1, 1, 2, 5] if kind.fields else []
        parts = [self._field(field) for field in kind.fields for _ in range(self.chance.choice(times))]
        if self.chance.random() < 0.1:
            parts.append(self.chance.choice([NESTED, _delimited(99, b"x" * 1000), _varint(98 << 3) + b"\x01"]))
        if self.chance.random() < 0.2:
            self.chance.shuffle(parts)
        return b"".join(parts)

    def _field(self, field: FieldDescriptor) -> bytes:
        if field.type in _FIXED:
            wire_type, form = _FIXED[field.type]
            value = self.chance.choice(FLOATS)
            if form == "<f" and abs(value) == 1e300:
                value = 3e38
            return _varint(field.number << 3 | wire_type) + struct.pack(form, value)
        if field.type not in _DELIMITED:
            return _varint(field.number << 3) + _varint(self.chance.choice(NUMBERS))
        if field.message_type is not None:
            return _delimited(field.number, self.message(field.message_type))
        return _delimited(field.number, self._text(field.name))

    def _text(self, name: str) -> bytes:
        known, dice = self._known.get(name), self.chance.random()
        if known and dice < 0.7:
            value = self.chance.choice(known)
            return value.encode() if isinstance(value, str) else value
        if dice < 0.9:
            return self.chance.choice(["", "a", *PATHS, *ESCAPES]).encode()
        return self.chance.choice([b"\xff\xfe", b"\xed\xa0\x80", b"\x00" * 8, b"x" * 5000, b"y" * 70_000])


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _delimited(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data
