"""Prompts and verdicts of judges: templates that no text breaks, and parsing a number or nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.contracts import ScoreItem
from tandem.reward.scorers.judge import TEMPLATE
from tandem.reward.text.judge_text import NoVerdictError, PromptTemplate, VerdictReader, item_values
from tests.support.judge_calls import item

FRAGMENTS = st.sampled_from(
    ["{question}", "{answer}", "{", "}", "{{", "{0}", "{x!r:>9}", "\\g<0>", "$answer", "%s", "\n", "two"]
)


# ---- templates ----


@given(
    answer=st.lists(FRAGMENTS).map("".join),
    question=st.lists(FRAGMENTS).map("".join),
)
def test_no_text_breaks_a_template(answer: str, question: str) -> None:
    template = PromptTemplate('Q: {question}\nA: {answer}\n{"score": {x}} {0} {{answer}}')
    values = item_values(item(answer, question), template.names, "prompt")
    assert isinstance(values, dict)
    assert template.fill(values) == f'Q: {question}\nA: {answer}\n{{"score": {{x}}}} {{0}} {{{answer}}}'


def test_placeholders() -> None:
    template = PromptTemplate("{answer}|{ground_truth}|{data_source}|{extra_info.rubric}")
    one = ScoreItem("d", "a", {"target": "ü"}, {"rubric": ["x"]})
    assert template.fill(item_values(one, template.names, "prompt")) == 'a|{"target": "ü"}|d|["x"]'
    for slip, told in (("{anwser}", "did you mean {answer}"), ("{question}", "lacks {answer}")):
        with pytest.raises(ValueError, match=told):
            PromptTemplate(slip)
    assert PromptTemplate(TEMPLATE).names == {"question", "answer", "ground_truth"}


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("plain", "plain"),
        ([{"role": "user", "content": "one"}], "one"),
        ([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "system: s\n\nuser: u"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "ab"),
    ],
)
def test_questions_are_text_or_messages(prompt: Any, shown: str) -> None:
    values = item_values(item("x", prompt), {"question"}, "prompt")
    assert isinstance(values, dict) and values["question"] == shown


# ---- verdicts ----


def reader(**options: Any) -> VerdictReader:
    return VerdictReader(**{"pattern": "", "key": "score", "labels": {}, "lowest": 0.0, "highest": 10.0, **options})


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('{"score": 7}', 7.0),
        ('first {"score": 3}, no: {"why": {"score": 1}, "score": 8.5} so', 8.5),
        ('```json\n{ "score" : "4" }\n```', 4.0),
        ('\\frac{1}{2} {x} {"score": 2}', 2.0),
        ('<think>{"score": 1}</think>{"score": 9}', 9.0),
        ('{"score": true}', 1.0),
        ('{"score": 5} {"other": 1}', 5.0),
        ("{" * 3000 + '{"score": 6}', 6.0),
    ],
)
def test_json_verdicts(text: str, verdict: float) -> None:
    assert reader().read(text) == verdict


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seven", "no JSON with score"),
        ("", "no JSON with score"),
        ('{"score": 11}', "11 is outside 0 … 10"),
        ('{"score": -0.5}', "outside"),
        ('{"score": NaN}', "is no number"),
        ('{"score": 1e999}', "is no number"),
        ('{"score": "good"}', "'good' is no number"),
        ('{"score": [7]}', "is no number"),
        ('{"score": "1_0"}', "is no number"),
        ('{"score": null}', "no JSON with score"),
        ('{"score": ' + "9" * 5000 + "}", "no JSON with score"),
        ('<think>{"score": 9} hmm', "no JSON with score"),
        ('{"score": ' + '{"a":' * 3000, "no JSON with score"),
    ],
)
def test_text_without_a_verdict_gives_no_number(text: str, told: str) -> None:
    with pytest.raises(NoVerdictError) as caught:
        reader().read(text)
    assert told in str(caught.value) and len(str(caught.value)) < 300


@settings(max_examples=300)
@given(st.one_of(st.floats(), st.floats(0.0, 10.0)), st.text(alphabet="[]:,score 0123456789.eE-\n", max_size=40))
def test_a_verdict_outside_the_scale_is_refused(number: float, before: str) -> None:
    text = f'{before}{{"score": {json.dumps(number)}}}'
    if 0.0 <= number <= 10.0:
        assert reader().read(text) == number
    else:
        with pytest.raises(NoVerdictError):
            reader().read(text)


def test_patterns_and_labels() -> None:
    assert reader(pattern=r"(\d+)/10").read("3/10, rather 8/10") == 8.0
    assert reader(pattern=r"\d+$").read("in all 4") == 4.0
    words = reader(pattern=r"(?i)verdict: (\w+)", labels={"CORRECT": 1.0, "WRONG": -1.0})
    assert words.read("verdict: correct") == 1.0
    assert reader(key="grade", labels={"A": 1.0}).read('{"grade": "a"}') == 1.0
    with pytest.raises(NoVerdictError, match="'MAYBE' is none of correct, wrong"):
        words.read("Verdict: MAYBE")
    with pytest.raises(NoVerdictError, match="no match of the pattern"):
        words.read("hm")


def test_a_pattern_that_backtracks_forever_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.reward.text.judge_text._PATTERN_SECONDS", 0.05)
    with pytest.raises(NoVerdictError, match="the pattern took longer"):
        reader(pattern=r"(a|aa)+$").read("a" * 200 + "b")
