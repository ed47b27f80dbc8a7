"""Properties of the scorers that run in the service's own thread: they never raise and take linear time."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.contracts import Scored, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward.registry import SCORERS
from tandem.reward.scorers.gsm8k import Gsm8k
from tandem.reward.scorers.json_schema import JsonSchema
from tandem.reward.scorers.language import LanguageConsistency
from tandem.reward.scorers.math_boxed import MathBoxed
from tandem.reward.scorers.math_dapo import MathDapo
from tandem.reward.scorers.multiple_choice import MultipleChoice
from tandem.reward.scorers.numeric import NumericEquality, numbers_in
from tandem.reward.scorers.overlong import Overlong
from tandem.reward.scorers.repetition import Repetition
from tandem.reward.scorers.short_answer import ShortAnswer
from tandem.reward.scorers.tags import MAX_NAMES, Tags
from tandem.reward.text.values import MAX_ACCEPTED
from tests.support.scores import item, judge_of, value

WAYS: list[tuple[str, dict[str, Any]]] = [
    ("earned", {}),
    ("exact", {"ignore_case": True, "last_line": True}),
    ("gsm8k", {"last_characters": 0}),
    ("gsm8k", {"last_characters": 0, "method": "flexible"}),
    ("language", {"language": "en"}),
    ("language", {"language": "zh", "unit": "letters", "ignore_formulas": False}),
    ("math_boxed", {}),
    ("math_dapo", {}),
    ("math_dapo", {"strict_box": True}),
    ("multiple_choice", {}),
    ("numeric", {}),
    ("numeric", {"marker": "####"}),
    ("overlong", {"max_length": 100, "buffer": 20, "unit": "characters"}),
    ("repetition", {}),
    ("repetition", {"n": 12, "unit": "characters"}),
    ("short_answer", {"metric": "f1"}),
    ("short_answer", {"metric": "contained", "tag": ""}),
    ("tags", {"only": True, "counts": {"search": [0, 3]}}),
    ("target_length", {"target": 100, "unit": "characters"}),
]
NEEDS_NO_TRUTH = {"earned", "language", "overlong", "repetition", "tags", "target_length"}

_PIECES = (
    r"<answer>|</answer>|<think>|</think>|<search>|\boxed{|\boxed |\fbox{|{|}|$|$$|\(|\)|\[|`|```| |#### |Answer:|"
    r"answer is (|The answer is |option |(B)|**A|\text{|\text{ |\textbf{|\overline{|\sqrt|\frac|\left|=|/|0.5|1,234|"
    r"-|+|.|,|1|9e9|E|A |I am|a |the |b|'|_|7"
    "|```\n|\n|é|漢|か|ف|\u0301|\u200d|\u2212|\x00|\ud800|𝑥"
)
PIECES = _PIECES.split("|")
_NUMBERS = "1", "1,", "1,111", " / ", "-", "1e"
_REPEATED = "<answer>|\\boxed{|\\text{|$a\n$|\\(|`|#### 1,|Answer: (|漢|a |the |(B|1"
texts = st.one_of(st.text(max_size=200), st.lists(st.sampled_from(PIECES), max_size=60).map("".join))
truths = st.one_of(
    texts,
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    ),
    texts.map(lambda text: {"target": text}),
)


def long(piece: str) -> str:
    return piece * (200_000 // len(piece))


def way_name(way: object) -> str | None:
    return way if isinstance(way, str) else "-".join(map(str, way.values())) if isinstance(way, dict) else None


def test_these_laws_cover_every_in_process_rule_scorer() -> None:
    names = {name for name, kind in SCORERS.items() if kind.ISOLATION == "in_process"}
    assert names <= {name for name, _ in WAYS}, "a new scorer in process belongs into WAYS"


@pytest.mark.parametrize(("name", "arguments"), WAYS, ids=way_name)
@settings(max_examples=60)
@given(solution=texts, truth=truths)
def test_no_text_and_no_ground_truth_makes_a_scorer_raise(
    name: str, arguments: dict[str, Any], solution: str, truth: Any
) -> None:
    asked, judge = item(solution, truth), judge_of(name, arguments)
    score = judge.judge(asked)
    if isinstance(score, Scored):
        assert math.isfinite(score.value) and all(math.isfinite(part) for part in score.breakdown.values())
        assert judge.judge(asked) == score
    else:
        assert score.reason == "invalid_input" and score.detail and "\n" not in score.detail


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("name", "arguments"), WAYS, ids=way_name)
def test_long_adversarial_answers_take_linear_time(name: str, arguments: dict[str, Any]) -> None:
    """Anything slower than linear would take many minutes on so many characters."""
    judge = judge_of(name, arguments)
    for piece in [*_REPEATED.split("|"), *(_NUMBERS if name == "numeric" else ())]:
        assert isinstance(judge.judge(item(long(piece), "B")), Scored | Unscored)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("piece", ["\\text{", "\\boxed{", "$", "=", "\\sqrt", "\\frac", "a ", "{"])
def test_long_ground_truths_take_linear_time(piece: str) -> None:
    for judge in (MathBoxed(), MathDapo(), ShortAnswer(), Gsm8k(), MultipleChoice()):
        score = judge.judge(item("<answer>\\boxed{1}</answer> Answer: 1 #### 1", long(piece)))
        assert isinstance(score, Unscored) or score.value <= 0.0


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("name", "arguments"), WAYS, ids=way_name)
@pytest.mark.parametrize("piece", ["a ", "\\frac", "É", "1,2 "])
def test_many_accepted_texts_read_a_long_answer_once(name: str, arguments: dict[str, Any], piece: str) -> None:
    """Reading the answer once for each of so many texts would take minutes."""
    solution = f"<answer>{long(piece)}</answer> \\boxed{{{long(piece)}}}"
    truth = [f"truth {number}" for number in range(MAX_ACCEPTED)]
    assert isinstance(judge_of(name, arguments).judge(item(solution, truth)), Scored | Unscored)


@pytest.mark.parametrize(("name", "arguments"), WAYS, ids=way_name)
def test_too_many_accepted_texts_are_refused(name: str, arguments: dict[str, Any]) -> None:
    score = judge_of(name, arguments).judge(item("<answer>A</answer>", ["A"] * (MAX_ACCEPTED + 1)))
    if name in NEEDS_NO_TRUTH:
        assert isinstance(score, Scored)
    elif name == "multiple_choice":
        assert score == Scored(1.0, {"answered": 1.0}), "they are letters: there are never many"
    else:
        assert isinstance(score, Unscored) and score.detail.endswith("is a list of 1,001, at most 1,000 are compared")


def test_too_many_tags_are_refused() -> None:
    names = [f"t{number}" for number in range(10_000)]
    Tags(order=tuple(names[:MAX_NAMES]))
    for too_many in ({"order": names}, {"counts": {name: [0, 1] for name in names}}):
        with pytest.raises(ScorerError, match=r"10,00[02] tags are named, at most 64"):
            judge_of("tags", too_many)
    with pytest.raises(ScorerError, match="10,000 tags are named, at most 64"):
        judge_of("format", {"order": names})


@settings(max_examples=200)
@given(solution=texts, truth=truths)
def test_no_text_and_no_schema_makes_the_json_scorer_raise(solution: str, truth: Any) -> None:
    assert isinstance(JsonSchema().judge(item(solution, truth)), Scored | Unscored)


@given(st.integers(min_value=-(10**12), max_value=10**12), texts)
def test_the_number_after_the_marker_is_found_after_any_text(number: int, before: str) -> None:
    solution = f"{before}\n#### {number:,}"
    assert Gsm8k().judge(item(solution, str(number))) == Scored(1.0, {"answered": 1.0})


@given(st.text(alphabet="abcxyz0123456789+-", min_size=1, max_size=20), texts)
def test_a_box_at_the_end_is_found_after_any_text(content: str, before: str) -> None:
    solution = f"{before.replace('boxed', '')} \\boxed{{{content}}}"
    assert MathBoxed().judge(item(solution, content)) == Scored(1.0, {"answered": 1.0})
    assert MathDapo(strict_box=True).judge(item(solution, content)) == Scored(1.0, {"answered": 1.0})


@given(st.lists(st.sampled_from(["1", "-2.5", "1e999", "7/0", "-1e-400", "x"]), max_size=60).map(" ".join))
def test_the_last_number_is_the_last_of_all_numbers(text: str) -> None:
    numbers = numbers_in(text)
    for wanted, score in ((numbers[-1], 1.0), (numbers[-1] + 1.0, 0.0)) if numbers else ((1.0, 0.0),):
        assert NumericEquality().judge(item(text, wanted)) == Scored(score)


words = st.lists(st.sampled_from(["paris", "rome", "the", "a", "lake", "of", "new", "1969"]), max_size=6).map(" ".join)


@given(words, words)
def test_the_measures_of_short_answers_agree(answer: str, truth: str) -> None:
    def scored(metric: str, one: str, other: str) -> float:
        return value(judge_of("short_answer", {"metric": metric, "tag": ""}).judge(item(one, other)))

    f1 = scored("f1", answer, truth)
    assert 0.0 <= f1 <= 1.0 and f1 == pytest.approx(scored("f1", truth, answer))
    assert scored("exact", answer, truth) <= scored("contained", answer, truth)
    assert scored("exact", answer, truth) <= f1


@given(st.lists(st.sampled_from(["think", "plan", "answer"]), unique=True, min_size=1), st.data())
def test_removing_a_tag_makes_a_right_answer_wrong(order: list[str], data: st.DataObject) -> None:
    pieces = [piece for name in order for piece in (f"<{name}>", "content", f"</{name}>")]
    judge = Tags(order=tuple(order), only=True)
    assert judge.judge(item("\n".join(pieces))) == Scored(1.0, dict.fromkeys([*order, "only"], 1.0))
    lost = data.draw(st.sampled_from([place for place, piece in enumerate(pieces) if piece != "content"]))
    assert value(judge.judge(item("\n".join(pieces[:lost] + pieces[lost + 1 :])))) == 0.0


@given(texts, st.integers(1, 12), st.floats(0.0, 10.0))
def test_repetition_is_within_its_penalty_and_a_loop_approaches_it(text: str, n: int, penalty: float) -> None:
    judge = Repetition(n=n, penalty=penalty)
    assert -penalty <= value(judge.judge(item(text))) <= 0.0
    assert value(judge.judge(item("again " * 1000))) == pytest.approx(-penalty, rel=0.01)


@given(texts)
def test_language_is_a_share_and_scripts_add_up(text: str) -> None:
    def share(*scripts: str) -> float:
        judge = LanguageConsistency(scripts=scripts, unit="letters", ignore_formulas=False)
        found = value(judge.judge(item(text.replace("a\u0301", ""))))
        assert 0.0 <= found <= 1.0
        return found

    assert share("Han") + share("Hiragana") == pytest.approx(share("Han", "Hiragana"))


@given(st.integers(1, 50), st.integers(0, 50), st.lists(st.integers(0, 200), min_size=2))
def test_a_longer_answer_never_scores_higher(buffer: int, before: int, lengths: list[int]) -> None:
    judge = Overlong(max_length=before + buffer, buffer=buffer)
    scores = [value(judge.judge(item("", num_tokens=length))) for length in sorted(lengths)]
    assert scores == sorted(scores, reverse=True) and -1.0 <= scores[-1] and scores[0] <= 0.0
