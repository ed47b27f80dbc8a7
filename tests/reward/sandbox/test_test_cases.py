"""Tests in ground truths: selection of the tests to run, and comparison of results."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.reward.sandbox.test_cases import ScriptTest, same_output, same_value, spread


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
