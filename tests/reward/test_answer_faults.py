"""Answers that make their scorer fail get its worst score; failures that are not an answer's fault keep a reason."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.reward.answer_faults import AnswerFaults
from tandem.reward.config import LimitsConfig
from tandem.reward.scoring import ScoringCore
from tests.support.scores import item
from tests.support.scoring_stand_ins import Make

FUNCTION = r"""
import os, pathlib, re, time

def compute_score(data_source, solution_str, ground_truth, extra_info, outage=""):
    if ground_truth == "unusable":
        raise KeyError("ground truth")
    if solution_str == "begin outage":
        pathlib.Path(outage).touch()
    if outage and solution_str and os.path.exists(outage):
        raise ConnectionError("the API is away")
    match solution_str:
        case "hang":
            time.sleep(600)
        case "backtrack":
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "exit":
            os._exit(3)
        case "memory":
            return len(b"1" * (1 << 40))
        case "babble":
            while True:
                print("word " * 1000)
        case "not a number":
            return float("nan")
    return {"score": 1.0 if solution_str == ground_truth else -1.0, "length": len(solution_str), "x": int(solution_str)}
"""
MERSENNE = (1 << 61) - 1  # Python's hash of its multiples is 0


@pytest.fixture
def function(tmp_path: Path) -> str:
    (tmp_path / "score.py").write_text(FUNCTION)
    return f"{tmp_path}/score.py:compute_score"


def of_run(core: ScoringCore, *items: ScoreItem, settled: Sequence[ScoreItem] = ()) -> list[Score]:
    return core.score(core.default, items, "ring", settled=settled)


def answers(*solutions: str) -> list[ScoreItem]:
    return [item(solution, "7") for solution in solutions]


def test_every_way_to_make_a_function_fail_gets_its_worst_score(
    make_core: Make, function: str, capfd: pytest.CaptureFixture[str]
) -> None:
    core = make_core(scorer=function, timeout_seconds=0.3, limits=LimitsConfig(output_bytes=1 << 16), num_workers=2)
    failing = {
        "hang": "timeout",
        "backtrack": "timeout",
        "exit": "crashed",
        "memory": "limit",
        "babble": "limit",
        "no integer": "crashed",
        "not a number": "invalid_input",
    }
    scores = of_run(core, *answers("7", *failing, "8"))
    parts = {"length": 0.0, "x": 0.0}
    assert scores[0] == Scored(1.0, {"length": 1.0, "x": 7.0}) and scores[-1] == Scored(-1.0, {"length": 1.0, "x": 8.0})
    assert scores[1:-1] == [Scored(-1.0, {**parts, f"fault/{reason}": 1.0}) for reason in failing.values()]
    capfd.readouterr()


def test_an_outage_of_what_a_function_needs_is_no_answers_fault(make_core: Make, function: str, tmp_path: Path) -> None:
    """It begins in the middle of a group: answers before it have a score, and an empty answer needs nothing."""
    outage = tmp_path / "outage"
    core = make_core(scorer=function, arguments={"outage": str(outage)})
    scores = of_run(core, *answers("7", "begin outage", "8"))
    assert isinstance(scores[0], Scored)
    assert [score.reason for score in scores[1:] if isinstance(score, Unscored)] == ["crashed", "crashed"]
    outage.unlink()
    assert of_run(core, *answers("8"), settled=answers("7")) == [Scored(-1.0, {"length": 1.0, "x": 8.0})]


def test_a_ground_truth_that_a_function_cannot_use_is_no_answers_fault(make_core: Make, function: str) -> None:
    core = make_core(scorer=function)
    scores = of_run(core, item("7", "unusable"), item("8", "unusable"), item("7", "7"))
    assert [score.reason for score in scores[:2] if isinstance(score, Unscored)] == ["crashed", "crashed"]
    assert isinstance(scores[2], Scored)


def test_a_group_in_which_every_answer_fails_is_judged_by_what_the_function_scored_last(
    make_core: Make, function: str
) -> None:
    core = make_core(scorer=function)
    before, after = of_run(core, *answers("exit")), of_run(core, item("8", "7"), item("", "8"))
    assert isinstance(before[0], Unscored), "nothing shows yet that the function works"
    assert isinstance(after[0], Scored)


def test_a_failed_penalty_is_the_whole_penalty(make_core: Make, tmp_path: Path) -> None:
    """A regular expression that backtracks for ever finds nothing; where a match costs, that must not pay."""
    rubric = tmp_path / "rubric.toml"
    rubric.write_text(
        "[[components]]\nscorer = 'exact'\n"
        "[[components]]\nname = 'bad'\nscorer = 'regex'\nweight = -0.5\noptional = true\n"
        "arguments = { pattern = '(a+)+$', compare = false }\n"
        "[[components]]\nname = 'good'\nscorer = 'regex'\narguments = { pattern = '(a+)+$', compare = false }\n"
    )
    core = make_core(rubric=str(rubric), timeout_seconds=0.3, num_workers=2)
    scores = of_run(core, *answers("7", "a" * 60 + "b"))
    assert scores[0] == Scored(1.0, {"exact": 1.0, "bad": 0.0, "good": 0.0})
    faults = {"bad/fault/timeout": 1.0, "good/fault/timeout": 1.0}
    assert scores[1] == Scored(-0.5, {"exact": 0.0, "bad": 1.0, "good": 0.0, **faults})


COLLIDING = ",".join(str(MERSENNE * number) for number in range(1, 12_000))


def test_no_answer_escapes_a_built_in_scorer(make_core: Make, tmp_path: Path) -> None:
    """Not even one that is alone in its group."""
    rubric = tmp_path / "rubric.toml"
    rubric.write_text(
        "".join(
            f"[[components]]\nscorer = '{name}'\ndata_sources = ['{name}']\n" for name in ("math_verify", "json_schema")
        )
    )
    core = make_core(rubric=str(rubric), timeout_seconds=0.6, num_workers=2)
    faults = [
        (ScoreItem("math_verify", r"\boxed{9^{9^{9^9}}}", "7"), "limit"),
        (ScoreItem("math_verify", r"\boxed{\{" + COLLIDING + r"\}}", r"\{1, 2\}"), "timeout"),
        (ScoreItem("json_schema", "[" * 200 + "]" * 200, "true"), "limit"),
    ]
    for (one, fault), score in zip(faults, of_run(core, *(one for one, _ in faults)), strict=True):
        assert isinstance(score, Scored) and score.value == 0.0
        assert score.breakdown[f"{one.data_source}/fault/{fault}"] == 1.0


def test_an_answer_judged_alone_gets_nothing_better_than_its_siblings() -> None:
    """They were scored by another process, whose scores this one has not seen."""
    lone, siblings = item("hang", "7"), [item("7", "7"), item("8", "7")]

    def ask(asked: Sequence[ScoreItem]) -> list[Score]:
        values = {"7": 0.5, "8": -0.5}
        return [
            Scored(values[one.solution], {"format": values[one.solution] - 0.5})
            if one.solution in values
            else Unscored("timeout")
            for one in asked
        ]

    decided = AnswerFaults().decide("mine", [lone], [Unscored("timeout")], ask, settled=siblings)
    assert decided == [Scored(-0.5, {"format": -1.0, "fault/timeout": 1.0})]


def test_calls_of_clients_keep_the_reasons(make_core: Make, function: str) -> None:
    core = make_core(scorer=function)
    scores = core.score(core.default, answers("7", "exit"), "calls")
    assert isinstance(scores[0], Scored) and isinstance(scores[1], Unscored)


REASONS = ["timeout", "crashed", "limit", "invalid_input", "infrastructure"]
attempts = st.one_of(st.floats(-5, 5).map(Scored), st.sampled_from(REASONS).map(Unscored))  # type: ignore[arg-type]


@given(
    first=st.lists(attempts, min_size=1, max_size=6),
    again=st.lists(attempts, min_size=6, max_size=6),
    works=st.booleans(),
)
def test_only_who_failed_twice_while_the_scorer_works_is_at_fault(
    first: list[Score], again: list[Score], works: bool
) -> None:
    items = [item(str(number), "truth") for number in range(len(first))]
    tried: set[str] = set()

    def ask(asked: Sequence[ScoreItem]) -> list[Score]:
        """The second try of each item; a later one, or an empty answer, is a control."""
        found: list[Score] = []
        for one in asked:
            number = int(one.solution or -1)
            is_second_try = one.solution and one.solution not in tried and isinstance(first[number], Unscored)
            tried.add(one.solution)
            found.append(again[number] if is_second_try else Scored(0.0) if works else Unscored("crashed"))
        return found

    decided = AnswerFaults().decide("scorer", items, first, ask, outside=False)
    values = [score.value for score in decided if isinstance(score, Scored)]
    for number, score in enumerate(decided):
        second = first[number]
        if isinstance(second, Unscored) and second.reason != "infrastructure":
            second = again[number]
        if isinstance(second, Scored) or second.reason == "infrastructure" or not works:
            assert score == second
        else:
            assert score == Scored(min([0.0, *values]), {f"fault/{second.reason}": 1.0})
