"""What scorer, sandboxes and programs exchange: messages with descriptors and plain data; which tests of a ground truth
are run, and how results are compared with it.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.reward.sandbox.inside import wire
from tandem.reward.sandbox.test_cases import ScriptTest, same_output, same_value, spread
from tandem.reward.sandbox.trial import NO_DATA


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


@pytest.mark.parametrize("kind", [set, frozenset, dict.fromkeys])
def test_members_with_equal_hashes_are_refused(kind: Callable[[Iterable[int]], object]) -> None:
    """A set of n of them takes n² steps, so the scorer would spend hours on an answer that sends many."""
    few = kind(number * ((1 << 61) - 1) for number in range(900))
    assert over_the_line(few) == few
    with pytest.raises(ValueError, match="equal hashes"):
        over_the_line(kind(number * ((1 << 61) - 1) for number in range(1100)))


TAGS = st.sampled_from(["tuple", "set", "frozenset", "dict", "bytes", "complex", "int", "object", "else"])
LARGE = st.sampled_from([10**400, -(10**4000), 1e308, math.inf, "f" * 5000, "\ud800", "0x"])
REPLIES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | LARGE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TAGS, inner, min_size=1, max_size=2),
    max_leaves=12,
)


@given(reply=REPLIES, wanted=st.sampled_from([1, 1.5, "a", None, [1, 2.0], {"1": 1.0, "a": [2]}, {"(1, 2)": None}]))
def test_no_reply_of_an_answer_ends_the_scorer(reply: Any, wanted: object) -> None:
    with suppress(*NO_DATA):
        same_value(wire.decode(reply, lambda _: object()), wanted, 1e-6)


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


# ---- tests in ground truths ----


@given(st.integers(1, 50), st.integers(0, 60))
def test_selected_tests_are_evenly_spread_and_in_order(number: int, most: int) -> None:
    tests = [ScriptTest(str(place), "") for place in range(number)]
    chosen = spread(tests, most)
    assert len(chosen) == (min(number, most) if most else number)
    places = [int(test.stdin) for test in chosen]
    assert places == sorted(set(places)) and places[0] == 0
    gaps = [after - before for before, after in zip(places, [*places[1:], number], strict=True)]
    assert max(gaps) - min(gaps) <= 1


# ---- comparison ----


@pytest.mark.parametrize(
    ("got", "wanted", "tokens", "lines"),
    [
        ("1 2\n3\n", "1 2\n3", True, True),
        ("1 2 3", "1 2\n3", True, False),
        (" 1   2\n\n", "1 2", True, True),
        ("1\n\n2", "1\n2", True, False),
        ("", "", True, True),
        ("", "0", False, False),
        ("YES", "Yes", False, False),
        ("1.0000001", "1", True, True),
        ("1.001", "1", False, False),
        ("3", "3.0", True, True),
        ("1e3", "1000", True, True),
        ("007", "7", True, True),
        ("1000001", "1000002", False, False),
        ("100000000000000000001", "100000000000000000002", False, False),
        ("1000000.5", "1000001", True, True),
        ("nan", "nan", True, True),
        ("inf", "1e999", False, False),
        ("1_0", "10", False, False),
        ("0x10", "16", False, False),
        ("-0", "0", True, True),
        ("1" * 5000, "1" * 5000, True, True),
        ("1" * 5000, "1" * 4999 + "2", False, False),
        ("٣", "3", False, False),
    ],
)
def test_same_output(got: str, wanted: str, tokens: bool, lines: bool) -> None:
    assert same_output(got, wanted, "tokens", 1e-6) == tokens
    assert same_output(got, wanted, "lines", 1e-6) == lines


WORDS = st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=8), max_size=6)


@given(WORDS, st.lists(st.sampled_from([" ", "\n", "  ", "\t", " \n "]), min_size=7, max_size=7))
def test_whitespace_is_ignored_between_tokens(words: list[str], between: list[str]) -> None:
    scattered = "".join(gap + word for gap, word in zip(between, words, strict=False)) + between[-1]
    assert same_output(scattered, " ".join(words), "tokens", 0.0)
    assert not same_output(scattered + " more", " ".join(words), "tokens", 0.0)


@given(st.floats(-1e6, 1e6), st.floats(-1.0, 1.0))
def test_numbers_match_within_the_tolerance_only(wanted: float, share: float) -> None:
    reach = 1e-3 * max(1.0, abs(wanted))
    assert same_output(repr(wanted + 0.99 * share * reach), repr(wanted), "tokens", 1e-3)
    beyond = wanted + math.copysign(1.01 + abs(share), share) * reach
    if "." in repr(beyond):
        assert not same_output(repr(beyond), repr(wanted), "tokens", 1e-3)


@pytest.mark.parametrize(
    ("got", "wanted", "same"),
    [
        ((1, (2, 3)), [1, [2, 3]], True),
        ([1, 2], [2, 1], False),
        ({1: "a"}, {"1": "a"}, True),
        ({"a": [0.1 + 0.2]}, {"a": [0.3]}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        (0.3, 0.30001, False),
        (10**17 + 1, 10**17, False),
        (10**400, 1.5, False),
        (None, None, True),
        (None, False, False),
        (True, 1, True),
        ("1", 1, False),
        ({1, 2}, [1, 2], False),
        (math.nan, 1.0, False),
        ("ab", ["a", "b"], False),
    ],
)
def test_same_value(got: Any, wanted: Any, same: bool) -> None:
    assert same_value(got, wanted, 1e-6) == same


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(JSON)
def test_every_json_value_equals_itself(value: Any) -> None:
    assert same_value(value, json.loads(json.dumps(value)), 0.0)
    assert not same_value([value], value, 0.0) and not same_value([value, 0], [value], 0.0)
