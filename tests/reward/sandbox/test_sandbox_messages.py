"""Messages between scorer, sandboxes and programs: frames with descriptors, and plain data."""

from __future__ import annotations

import json
import os
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.reward.sandbox.inside import wire


def test_messages_carry_descriptors_and_end_of_file() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        read, write = os.pipe()
        large = bytes(range(256)) * 20_000
        sender = threading.Thread(target=wire.send, args=(mine, {"a": 1}, b"", large), kwargs={"descriptors": [write]})
        sender.start()
        message = wire.receive(theirs)
        sender.join(timeout=30)
        assert message is not None and message.header == {"a": 1} and message.parts == [b"", large]
        os.write(message.descriptors[0], b"x")
        assert os.read(read, 1) == b"x"
        for descriptor in (read, write, *message.descriptors):
            os.close(descriptor)
        wire.send(mine, {}, bytes(1000))
        with pytest.raises(ValueError, match="1000 bytes"):
            wire.receive(theirs, 100)
    mine, theirs = socket.socketpair()
    with theirs:
        with mine:
            mine.sendall(b"\0\0\0\5{")
        with pytest.raises(ConnectionResetError):
            wire.receive(theirs)
        assert wire.receive(theirs) is None


NUMBERS = st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
ATOMS = (
    st.none()
    | st.booleans()
    | NUMBERS
    | st.text()
    | st.binary()
    | st.integers(min_value=1 << 5000, max_value=1 << 5001)
)
HASHABLE = st.recursive(ATOMS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5)
DATA = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.sets(HASHABLE, max_size=3)
    ),
    max_leaves=12,
)


def refuse(value: object) -> dict[str, object]:
    raise TypeError(type(value).__name__)


def over_the_line(value: object) -> object:
    return wire.decode(json.loads(wire.dumps(wire.encode(value, refuse))), refuse)


@given(DATA)
def test_plain_data_survives_encoding(value: object) -> None:
    came = over_the_line(value)
    assert came == value and type(came) is type(value) and repr(came).count("(") == repr(value).count("(")


def test_subclasses_of_data_are_decoded_as_their_base_class() -> None:
    class Sly(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    came = over_the_line([Sly(3), {Sly(4): Sly(5)}])
    assert came == [3, {4: 5}] and came != [4, {4: 5}]
    with pytest.raises(TypeError, match="object"):
        over_the_line([object()])
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(RecursionError):
        over_the_line(endless)


@pytest.mark.parametrize(
    "forged",
    [{"tuple": 1}, {"x": []}, {}, {"set": [[]]}, {"int": 5}, {"complex": ["x", 1]}, {"dict": [1]}, {"bytes": 1}],
)
def test_forged_data_raises_and_does_nothing_else(forged: object) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        wire.decode(forged, refuse)
