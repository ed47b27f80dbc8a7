"""Items and scores to and from protobuf: the fast paths give the same as the plain ones."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.protos import reward_pb2
from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.services.reward.wire import MAX_DEPTH, read_items, reply_of, score_of, with_faults

FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SCORED = st.builds(Scored, st.one_of(FINITE, st.sampled_from([0.0, 1.0])), st.dictionaries(TEXT, FINITE, max_size=3))
REASONS = st.sampled_from(["timeout", "crashed", "infrastructure", "invalid_input", "limit"])
SCORES = st.lists(st.one_of(SCORED, st.builds(Unscored, REASONS, TEXT)), max_size=20)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), FINITE, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)


def plain_reply(scores: list[Score]) -> reward_pb2.ScoreReply:
    reply = reward_pb2.ScoreReply()
    for score in scores:
        item = reply.items.add()
        if isinstance(score, Scored):
            item.scored.value = score.value + 0.0  # negative zero becomes zero
            item.scored.breakdown.update({name: part + 0.0 for name, part in score.breakdown.items()})
        else:
            item.unscored.reason, item.unscored.detail = score.reason, score.detail
    return reply


@given(SCORES)
def test_a_reply_equals_one_built_item_by_item(scores: list[Score]) -> None:
    reply = reply_of(scores)
    assert reply == plain_reply(scores)
    assert [score_of(item) for item in reply.items] == scores


@settings(max_examples=50)
@given(st.lists(st.tuples(TEXT, TEXT, JSON, st.dictionaries(TEXT, JSON, max_size=2), TEXT), max_size=8), st.booleans())
def test_items_survive_the_wire(items: list[tuple[str, str, Any, dict[str, Any], str]], tight: bool) -> None:
    separators = (",", ":") if tight else None
    messages = [
        reward_pb2.ScoreRequest.Item(
            data_source=source,
            solution=solution,
            ground_truth=json.dumps(truth, separators=separators, ensure_ascii=tight),
            extra_info=json.dumps(extra) if extra else "",
            group=group,
        )
        for source, solution, truth, extra, group in items
    ]
    found, faults = read_items(messages)
    assert not faults and found == [ScoreItem(*item) for item in items]
    for one, item in zip(found, items, strict=True):
        assert type(one.ground_truth) is type(item[2]), "a number stays the kind it was"


@given(st.lists(st.sampled_from(["1", "{", "[1] 2", "", " 3"]), max_size=12), st.integers(0, 1000))
def test_faults_are_at_their_items_positions(truths: list[str], first: int) -> None:
    messages = [reward_pb2.ScoreRequest.Item(ground_truth=truth) for truth in truths]
    items, faults = read_items(messages, first)
    merged = with_faults([Scored(float(item.ground_truth or 0)) for item in items], faults)
    assert len(merged) == len(truths)
    for number, (truth, score) in enumerate(zip(truths, merged, strict=True), first):
        if truth in ("{", "[1] 2"):
            assert isinstance(score, Unscored) and score.reason == "invalid_input"
            assert score.detail.startswith(f"item {number}: ground_truth is not JSON: ")
        else:
            assert score == Scored(float(truth or 0))


PIECES = st.lists(st.sampled_from(['"', '"a"', "b", ",", "[", "]", "\n", " ", "1", "\\", '"c","d"', '"]']), max_size=4)


@example(['"', '"', '"c","d"'])
@settings(max_examples=200)
@given(st.lists(st.one_of(PIECES.map("".join), TEXT.map(json.dumps)), min_size=1, max_size=4))
def test_texts_parsed_together_equal_texts_parsed_alone(truths: list[str]) -> None:
    """This holds even if two invalid texts would be valid JSON when joined."""
    messages = [reward_pb2.ScoreRequest.Item(ground_truth=truth) for truth in truths]
    items, faults = read_items(messages)
    left = iter(items)
    for number, truth in enumerate(truths):
        try:
            expected = json.loads(truth) if truth else None
        except ValueError:
            assert number in faults
        else:
            assert next(left).ground_truth == expected
    assert next(left, None) is None


def test_json_nested_too_deeply_is_refused() -> None:
    def faults(text: str) -> int:
        return len(read_items([reward_pb2.ScoreRequest.Item(ground_truth=text)])[1])

    for opening, closing in (("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")):
        depth = MAX_DEPTH // (2 if opening == '[{"a":' else 1)
        assert faults(opening * depth + "1" + closing * depth) == 0
        assert faults(opening * (depth + 1) + "1" + closing * (depth + 1)) == 1
        assert faults(opening * 200_000) == 1
    assert faults(json.dumps(["["] * 1000)) == 0, "brackets within texts are no depth"
    assert faults(json.dumps([[]] * 1000)) == 0


def test_details_with_any_text_can_be_sent() -> None:
    (found,) = reply_of([Unscored("crashed", "half a pair \ud800, " + "x" * 5000)]).items
    assert found.unscored.detail.startswith("half a pair \\ud800, xx") and len(found.unscored.detail) < 1100
    (named,) = reply_of([Scored(1.0, {"\ud800": 0.5})]).items
    assert dict(named.scored.breakdown) == {"\\ud800": 0.5}
    (nan,) = reply_of([Scored(math.nan)]).items
    assert math.isnan(nan.scored.value)
