"""Rule scorers: tags and formats, choices, short answers, lengths, repetition, language, JSON, text and numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protos.contracts import Score, Scored
from tandem.reward.contracts import Judge
from tandem.reward.scorers.exact import ExactMatch
from tandem.reward.scorers.format import Format
from tandem.reward.scorers.json_schema import JsonSchema
from tandem.reward.scorers.language import LanguageConsistency, without_formulas
from tandem.reward.scorers.multiple_choice import MultipleChoice
from tandem.reward.scorers.numeric import NumericEquality, numbers_in
from tandem.reward.scorers.overlong import Overlong
from tandem.reward.scorers.regex import RegexMatch
from tandem.reward.scorers.repetition import Repetition
from tandem.reward.scorers.short_answer import ShortAnswer
from tandem.reward.scorers.tags import Tags
from tandem.reward.scorers.target_length import TargetLength
from tests.support.scores import item, refused, value


def reason(score: Score, told: str = "") -> str:
    assert told in refused(score)[1]
    return refused(score)[0]


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("<think>a</think><answer>b</answer>", {"think": 1.0, "answer": 1.0}),
        (" words <think>a</think> words <answer>b</answer> words", {"think": 1.0, "answer": 1.0}),
        ("<think>a</think>", {"think": 1.0, "answer": 0.0}),
        ("<answer>b</answer><think>a</think>", {"think": 1.0, "answer": 0.0}),
        ("<think>a</think><answer>b</answer><answer>c</answer>", {"think": 1.0, "answer": 0.0}),
        ("<think>a</think></think><answer>b</answer>", {"think": 0.0, "answer": 1.0}),
        ("<think>a<answer>b</answer></think>", {"think": 1.0, "answer": 0.0}),
        ("<think>a<answer>b</think></answer>", {"think": 1.0, "answer": 0.0}),
        ("</think>a<think><answer>b</answer>", {"think": 0.0, "answer": 1.0}),
        ("<think> \n</think><answer>b</answer>", {"think": 0.0, "answer": 1.0}),
        ("<THINK>a</THINK><answer>b</answer>", {"think": 0.0, "answer": 1.0}),
        ("", {"think": 0.0, "answer": 0.0}),
    ],
)
def test_tags(solution: str, expected: dict[str, float]) -> None:
    share = sum(expected.values()) / len(expected)
    assert Tags().judge(item(solution)) == Scored(float(share == 1.0), expected)
    assert Tags(partial=True).judge(item(solution)) == Scored(share, expected)


def test_tags_options() -> None:
    both = "<think>a</think>\n<answer>b</answer>\n"
    assert value(Tags(only=True).judge(item(both))) == 1.0
    assert Tags(only=True, partial=True).judge(item(both + "!")).breakdown["only"] == 0.0  # type: ignore[union-attr]
    assert value(Tags(only=True).judge(item("! " + both))) == 0.0
    assert value(Tags(allow_empty=True).judge(item("<think></think><answer></answer>"))) == 1.0
    searching = Tags(order=("answer",), counts={"search": (1, 2)})
    assert value(searching.judge(item("<search>x</search><answer>b</answer>"))) == 1.0
    assert value(searching.judge(item("<answer>b</answer>"))) == 0.0
    assert value(searching.judge(item("<search>x</search>" * 3 + "<answer>b</answer>"))) == 0.0
    assert value(searching.judge(item("<search>x</search><search><answer>b</answer>"))) == 0.0


def test_format_matches_each_part() -> None:
    judge = Format(parts={"answer": r"-?\d+"})
    assert value(judge.judge(item("<think>a\nb</think> <answer> 4 </answer>"))) == 1.0
    assert judge.judge(item("<think>a</think><answer>4.</answer>")) == Scored(0.0, {"think": 1.0, "answer": 0.0})
    assert judge.judge(item("<think> </think><answer>4</answer>")) == Scored(0.0, {"think": 0.0, "answer": 1.0})
    assert value(judge.judge(item("<answer>4</answer><think>a</think>"))) == 0.0
    answer = Format(order=("answer",), parts={"answer": "4"}, only=True)
    assert value(answer.judge(item("<answer>4</answer>"))) == 1.0
    assert value(answer.judge(item("so <answer>4</answer>"))) == 0.0
    whole = Format(order=("answer",), parts={"answer": "4"}, pattern="(?i)so .*", partial=True)
    assert whole.judge(item("So\n<answer>5</answer>")) == Scored(0.0, {"answer": 0.0, "pattern": 0.0})
    assert whole.judge(item("So <answer>5</answer>\n")) == Scored(0.5, {"answer": 0.0, "pattern": 1.0})


@pytest.mark.parametrize(
    ("solution", "chosen"),
    [
        ("B", "B"),
        (" b. ", "B"),
        ("(C)", "C"),
        (r"$\boxed{D}$", "D"),
        (r"so \boxed{\text{(B)}}", "B"),
        ("<answer>C</answer> not A", "C"),
        ("<answer>the capital of Peru</answer> B", ""),
        ("The answer is (B).", "B"),
        ("the correct option is: **B**", "B"),
        ("Answer: B because A is wrong", "B"),
        ("**Answer:** C", "C"),
        ("Final Answer: option D", "D"),
        ("The answer is A. No: the answer is C.", "C"),
        ("the answer is (b)", "B"),
        (r"The answer is $\text{D}$", "D"),
        ("A is too small.\nB) Paris", "B"),
        ("I think (B)", "B"),
        ("I would go for **D**", "D"),
        ("so it must be C", "C"),
        ("A dog and I agree", ""),
        ("It is clearly A", "A"),
        ("Anything Goes", ""),
        ("don't B'd", ""),
        ("", ""),
    ],
)
def test_multiple_choice(solution: str, chosen: str) -> None:
    judge = MultipleChoice()
    assert judge.chosen(solution) == chosen
    assert judge.judge(item(solution, "B")) == Scored(float(chosen == "B"), {"answered": float(chosen != "")})


def test_multiple_choice_options_and_ground_truths() -> None:
    assert MultipleChoice(strict=True).chosen("so it must be C") == ""
    assert MultipleChoice(choices="abcdefghij").chosen("The answer is (J)") == "J"
    assert MultipleChoice(choices="1234").chosen("The answer is 3") == "3"
    for truth in ("B", "(b)", 1, ["B", "C"], ["A", 1]):
        assert value(MultipleChoice().judge(item("B", truth))) == 1.0
    for truth in (None, "", "E", 4, -1, True, ["B", "E"], [], {"target": "B"}, 1.0):
        assert reason(MultipleChoice().judge(item("B", truth)), "not among the choices ABCD") == "invalid_input"


@pytest.mark.parametrize(
    ("answer", "truth", "exact", "contained", "f1"),
    [
        ("Paris", "paris", 1.0, 1.0, 1.0),
        ("Paris, France", ["Lyon", "Paris"], 0.0, 1.0, 2 / 3),
        ("a new day", "the new  day!", 1.0, 1.0, 1.0),
        ("new new day", "new day day", 0.0, 0.0, 2 / 3),
        ("Rome", "Paris", 0.0, 0.0, 0.0),
        ("42", 42, 1.0, 1.0, 1.0),
        ("", "Paris", 0.0, 0.0, 0.0),
        ("anything", "The", 0.0, 0.0, 0.0),
        ("the", "a", 1.0, 1.0, 1.0),
    ],
)
def test_short_answer(answer: str, truth: Any, exact: float, contained: float, f1: float) -> None:
    asked = item(f"so <answer>{answer}</answer>", truth)
    assert ShortAnswer().judge(asked) == Scored(exact, {"answered": 1.0, "exact": exact, "f1": pytest.approx(f1)})
    assert value(ShortAnswer(metric="contained").judge(asked)) == contained
    assert value(ShortAnswer(metric="f1").judge(asked)) == pytest.approx(f1)
    assert value(ShortAnswer(metric="f1", format_score=0.1).judge(asked)) == pytest.approx(f1 or 0.1)
    assert value(ShortAnswer(tag="").judge(item(answer, truth))) == exact


def test_short_answer_without_a_part_or_with_many() -> None:
    assert value(ShortAnswer(format_score=0.1).judge(item("Paris", "Paris"))) == 0.0
    assert value(ShortAnswer(tag="final").judge(item("<final>Paris</final>", "Paris"))) == 1.0
    guesses = "<answer>Paris</answer>" * 11
    assert value(ShortAnswer().judge(item(guesses, "Paris"))) == 0.25
    assert value(ShortAnswer(max_tags=0).judge(item(guesses, "Paris"))) == 1.0
    assert reason(ShortAnswer().judge(item("<answer>x</answer>", {"answer": "x"})), "`target`") == "invalid_input"


def test_overlong_is_the_formula_of_dapo() -> None:
    lengths = [0, 80, 81, 90, 100, 120]
    judge = Overlong(max_length=100, buffer=20, factor=2.0)
    got = [value(judge.judge(item("", num_tokens=length))) for length in lengths]
    assert got == pytest.approx([0.0, 0.0, -0.1, -1.0, -2.0, -2.0])
    assert math.copysign(1.0, got[0]) == 1.0
    characters = Overlong(max_length=10, buffer=5, unit="characters")
    assert characters.judge(item("é" * 7)) == Scored(pytest.approx(-0.4), {"length": 7.0})


@pytest.mark.parametrize("tokens", [None, "7", -1, 1.5, True, 10**400])
def test_a_length_in_tokens_needs_num_tokens(tokens: Any) -> None:
    told = "extra_info.num_tokens is"
    for judge in (Overlong(max_length=10, buffer=5, beyond="ramp"), TargetLength(target=5)):
        assert reason(judge.judge(item("words", num_tokens=tokens)), told) == "invalid_input"
        assert reason(judge.judge(item("words")), "extra_info.num_tokens is missing") == "invalid_input"


def test_target_length() -> None:
    assert value(TargetLength(target=1000).judge(item("", num_tokens=1500))) == pytest.approx(-0.15)
    assert value(TargetLength(target=1000).judge(item("", num_tokens=500))) == pytest.approx(-0.15)
    below = TargetLength(target=1000, mode="at_most", slope=0.001)
    got = [value(below.judge(item("", num_tokens=length))) for length in (0, 600, 1000, 1200, 9000)]
    assert got == pytest.approx([1.0, 0.9, 0.5, 0.3, 0.0])
    told = TargetLength(unit="characters", slope=0.1)
    assert value(told.judge(item("four", target_length=5))) == pytest.approx(-0.1)
    assert reason(told.judge(item("four")), "extra_info.target_length is missing") == "invalid_input"
    assert reason(TargetLength(unit="characters").judge(item("", target_length=10**400))) == "invalid_input"


def test_repetition_counts_repeated_n_grams() -> None:
    assert value(Repetition().judge(item("one two three four"))) == 0.0
    assert value(Repetition().judge(item("one two"))) == 0.0
    assert value(Repetition(n=1).judge(item("Yes yes no"))) == pytest.approx(-1 / 3)
    assert value(Repetition(n=2, penalty=0.5).judge(item("a b a b a b"))) == pytest.approx(-0.5 * 3 / 5)
    assert value(Repetition(n=2, unit="characters").judge(item("哈哈 哈哈"))) == pytest.approx(-2 / 3)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 13])
def test_n_grams_of_any_length_are_distinguished(n: int) -> None:
    words = [str(i * i % 7) for i in range(200)] + ["8"] * 30 + ["9"]
    runs = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    expected = -(1.0 - len(set(runs)) / len(runs))
    assert value(Repetition(n=n).judge(item(" ".join(words)))) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("language", "solution", "words", "letters"),
    [
        ("en", "The answer is 42.", 1.0, 1.0),
        ("en", "The answer 是 42", 2 / 3, 9 / 10),
        ("zh", "我们得到 answer", 4 / 5, 4 / 10),
        ("zh", r"我们得到 $x = \frac{1}{2}$ `code` \(y\)", 1.0, 1.0),
        ("ja", "これはテストです、ｱｲｳー", 1.0, 1.0),
        ("ru", "ПрiВет мир", 1 / 2, 3 / 9),
        ("hi", "यह हिन्दी है and", 3 / 4, None),
        ("de", "naïve Grüße", 1.0, 1.0),
        ("ko", "안녕하세요 hello", 1 / 2, 1 / 2),
        ("en", "5 µm and 𝑥", 1.0, 1.0),
        ("en", "1 + 2 = 3", 0.0, 0.0),
        ("en", "", 0.0, 0.0),
    ],
)
def test_language(language: str, solution: str, words: float, letters: float | None) -> None:
    assert value(LanguageConsistency(language=language).judge(item(solution))) == pytest.approx(words)
    if letters is not None:
        by_letters = LanguageConsistency(language=language, unit="letters")
        assert value(by_letters.judge(item(solution))) == pytest.approx(letters)


def test_language_options() -> None:
    both = LanguageConsistency(scripts=("Latin", "Han"))
    assert value(both.judge(item("答案 is yes"))) == 1.0
    assert value(LanguageConsistency(language="zh", ignore_formulas=False).judge(item("是 $x$"))) == 0.5
    scripts = ("Latin", "Latin", "Cyrillic", "Greek", "Han", "Hiragana", "Katakana", "Hangul", "Arabic")
    for letter, script in zip("aéяα中あァ한ا", scripts, strict=True):
        assert value(LanguageConsistency(scripts=(script,)).judge(item(letter))) == 1.0
        assert value(LanguageConsistency(scripts=("Tamil",)).judge(item(letter))) == 0.0
    for sign in "7\u0301\u2126µ𝑥":
        assert value(LanguageConsistency(scripts=("Tamil",), unit="letters").judge(item(f"அ {sign}"))) == 1.0


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a $x$ b", "a   b"),
        ("costs $5\nand $6", "costs $5\nand $6"),
        ("$$x\ny$$ b", "  b"),
        (r"\[x\] \(y\) \[z", r"    \[z"),
        ("```\ncode\n``` b ` c", "  b ` c"),
        ("$", "$"),
    ],
)
def test_formulas_and_code_are_ignored(text: str, left: str) -> None:
    assert without_formulas(text) == left


CITY = '{"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}}, "required": ["n"]}'


@pytest.mark.parametrize(
    ("solution", "score", "is_json"),
    [
        ('{"n": 3}', 1.0, 1.0),
        ('{"n": 2}', 0.1, 1.0),
        ("[]", 0.1, 1.0),
        ('Sure:\n```json\n{"n": 4}\n```\nDone.', 1.0, 1.0),
        ('```\n{"n": 1}\n```\n```\n{"n": 4}\n```', 1.0, 1.0),
        ('{"n": NaN}', 0.0, 0.0),
        ('{"n": 3', 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_json_schema(solution: str, score: float, is_json: float) -> None:
    given = JsonSchema(schema=CITY, format_score=0.1).judge(item(solution))
    assert given == Scored(score, {"json": is_json})
    assert JsonSchema(format_score=0.1).judge(item(solution, CITY)) == given


def test_json_schema_options() -> None:
    assert value(JsonSchema(source="code_block").judge(item("{}", True))) == 0.0
    assert value(JsonSchema(source="answer").judge(item("```\n{}\n```", True))) == 0.0
    assert value(JsonSchema(tag="answer").judge(item("<answer>{}</answer>", {"type": "object"}))) == 1.0
    assert value(JsonSchema(tag="answer").judge(item("{}", {"type": "object"}))) == 0.0
    draft4 = {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True}
    assert value(JsonSchema().judge(item("3", draft4))) == 0.0
    inside = {"$defs": {"n": {"type": "integer"}}, "items": {"$ref": "#/$defs/n"}}
    assert value(JsonSchema().judge(item("[1, 2]", inside))) == 1.0


@pytest.mark.parametrize(
    "truth", [None, 3, [], "{", "3", {"type": "sandwich"}, {"$ref": "#/nowhere"}, {"pattern": "("}]
)
def test_a_ground_truth_that_is_not_a_schema_is_unscored(truth: Any) -> None:
    assert reason(JsonSchema().judge(item('"text"', truth)), "schema") == "invalid_input"


def test_json_schema_fetches_nothing_and_has_limits() -> None:
    elsewhere = {"$ref": "http://127.0.0.1:9/schema.json"}
    assert reason(JsonSchema().judge(item("1", elsewhere)), "127.0.0.1:9") == "invalid_input"
    assert reason(JsonSchema().judge(item("1", {"$ref": "#"})), "refer to itself") == "limit"
    for beyond in ("[" * 101 + "]" * 101, "[" * 200_000, "9" * 5000):
        for format_score in (-1.0, 0.5):
            score = JsonSchema(format_score=format_score).judge(item(beyond, True))
            assert score == Scored(min(0.0, format_score), {"json": 0.0, "fault/limit": 1.0})
    assert value(JsonSchema().judge(item("[" * 100 + "]" * 100, True))) == 1.0


# ---- exact, numeric, regex ----

EXACT, NUMERIC, MARKED = ExactMatch(), NumericEquality(), NumericEquality(marker="####")
LAST_LINE, HASHES = ExactMatch(last_line=True), RegexMatch(pattern=r"#### (-?\d+)")


@pytest.mark.parametrize(
    ("judge", "solution", "truth", "expected"),
    [
        (EXACT, "42", "42", 1.0),
        (EXACT, " 42\n", "42 ", 1.0),
        (EXACT, "42", 42, 1.0),
        (EXACT, "42.0", "42", 0.0),
        (EXACT, "Paris", "paris", 0.0),
        (EXACT, "", "42", 0.0),
        (EXACT, "b", ["a", "b"], 1.0),
        (EXACT, "c", ["a", "b"], 0.0),
        (ExactMatch(ignore_case=True), "PARIS", "paris", 1.0),
        (LAST_LINE, "12 + 3\nis\n 15 \n\n", "15", 1.0),
        (LAST_LINE, "15\nor not", "15", 0.0),
        (NUMERIC, "8 * 9 = 72.\n#### 72", "72", 1.0),
        (NUMERIC, "#### 1,234", "1234", 1.0),
        (NUMERIC, "it is 0.3333333", "1/3", 1.0),
        (NUMERIC, "it is 0.33", "1/3", 0.0),
        (NUMERIC, "seven", "7", 0.0),
        (NUMERIC, "7", 7, 1.0),
        (NUMERIC, "1000000.5", "1000000", 1.0),
        (NUMERIC, "7", "#### 7", 1.0),
        (MARKED, "#### 5 (checked 9 times)", "5", 1.0),
        (MARKED, "the answer is 5", "5", 0.0),
        (MARKED, "#### 3 and then #### x", "3", 1.0),
        (MARKED, "#### 3 no, #### 5", "3", 0.0),
        (HASHES, "#### 5\n#### 72", "72", 1.0),
        (HASHES, "#### 72\n#### 5", "72", 0.0),
        (HASHES, "72", "72", 0.0),
        (HASHES, "#### -3", ["-3", "three"], 1.0),
        (RegexMatch(pattern=r"<answer>.*</answer>", compare=False), "<answer>1</answer>", None, 1.0),
        (RegexMatch(pattern=r"yes|no"), "no, yes", "yes", 1.0),
        (RegexMatch(pattern=r"ANSWER (\w+)", ignore_case=True), "answer Paris", "PARIS", 1.0),
    ],
)
def test_right_and_wrong_answers(judge: Judge, solution: str, truth: Any, expected: float) -> None:
    assert value(judge.judge(item(solution, truth))) == expected


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("the answer is 72.", [72.0]),
        ("1,234 eggs", [1234.0]),
        ("1,234,567.5", [1234567.5]),
        ("1, 2, 3", [1.0, 2.0, 3.0]),
        ("-5", [-5.0]),
        ("= \u22125", [-5.0]),
        ("5-3", [5.0, 3.0]),
        ("(4)-3", [4.0, 3.0]),
        ("-$5.50", [-5.5]),
        ("$1,000", [1000.0]),
        ("3/4 of it", [0.75]),
        ("a/5", [5.0]),
        ("1/0", []),
        (".5", [0.5]),
        ("1e3", [1000.0]),
        ("1e9999", []),
        ("2e", [2.0]),
        ("50%", [50.0]),
        ("no number", []),
        ("", []),
    ],
)
def test_numbers_in(text: str, found: list[float]) -> None:
    assert numbers_in(text) == found


def test_numeric_ground_truth_must_be_one_number() -> None:
    for truth in ("1 or 2", math.nan):
        assert reason(NumericEquality().judge(item("1", truth)), "not one number") == "invalid_input"


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_numeric_accepts_what_python_writes(number: float) -> None:
    assert value(NumericEquality().judge(item(f"so {number!r}", number))) == 1.0
