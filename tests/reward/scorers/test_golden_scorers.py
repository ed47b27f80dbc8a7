"""Rule scorers against the scores of another implementation (see golden/README.md), for every string and option set."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import pytest

from tandem.protos.contracts import Scored
from tandem.reward.contracts import Judge
from tandem.reward.registry import make_judge
from tests.support.golden_cases import GoldenCase, golden_cases
from tests.support.paths import GOLDEN, ROOT
from tests.support.scores import item, value

CASES: dict[str, list[dict[str, Any]]] = {
    name: cases for name, cases in json.loads((GOLDEN / "scorers.json").read_text()).items() if isinstance(cases, list)
}

WAYS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "gsm8k": {
        "strict": ("gsm8k", {}),
        "strict_format0.1": ("gsm8k", {"format_score": 0.1}),
        "flexible": ("gsm8k", {"method": "flexible"}),
        "flexible_format0.1": ("gsm8k", {"method": "flexible", "format_score": 0.1}),
    },
    "math_reward": {"default": ("math_boxed", {})},
    "math_dapo": {"default": ("math_dapo", {}), "strict_box": ("math_dapo", {"strict_box": True})},
    "search_em": {
        "em": ("short_answer", {}),
        "em_format0.1": ("short_answer", {"format_score": 0.1}),
        "subem": ("short_answer", {"metric": "contained"}),
    },
}
"""Name of the golden scorer → kind of score → our scorer and the options that give it."""


PAGE = ROOT / "docs" / "reward.md"


def test_the_reward_page_names_scorer_and_options_for_every_golden_case() -> None:
    table = PAGE.read_text().partition("| kind of score there |")[2].partition("\n\n")[0]
    shown: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {name: {} for name in WAYS}
    for name, kind, scorer, options in re.findall(r"^\| `(\w+)` `(\S+)` \|.*\| `(\w+)` \| `(.+)` \|$", table, re.M):
        shown[name][kind] = scorer, tomllib.loads(f"arguments = {options}")["arguments"]
    assert shown == WAYS


def asked(scorer: str, arguments: dict[str, Any]) -> Judge:
    judge = make_judge(scorer, arguments)
    assert isinstance(judge, Judge)
    return judge


def penalties(case: GoldenCase, **options: Any) -> list[float]:
    """The overlong penalty of each length of a case."""
    judge = asked("overlong", options)
    return [value(judge.judge(item("", num_tokens=length))) for length in case.inputs["lengths"].tolist()]


def test_every_golden_case_can_be_expressed_with_a_scorer() -> None:
    kinds = {name: {kind for case in cases for kind in case["scores"]} for name, cases in CASES.items()}
    assert kinds == {name: set(ways) for name, ways in WAYS.items()}
    assert {name: len(cases) for name, cases in CASES.items()} == dict.fromkeys(WAYS, 40)


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, ways in WAYS.items() for kind in ways], ids=lambda text: text
)
def test_golden_scores(name: str, kind: str) -> None:
    judge = asked(*WAYS[name][kind])
    got, want = {}, {}
    for case in CASES[name]:
        score = judge.judge(item(case["response"], case["ground_truth"]))
        got[case["id"]] = score.value if isinstance(score, Scored) else score
        want[case["id"]] = case["scores"][kind]
    assert got == want


@pytest.mark.parametrize(
    ("name", "kind", "read"),
    [
        ("gsm8k", "strict", "strict"),
        ("gsm8k", "flexible", "flexible"),
        ("math_reward", "default", "default"),
        ("math_dapo", "strict_box", "strict_box"),
        ("search_em", "em", "default"),
    ],
)
def test_answered_is_1_if_an_answer_was_extracted(name: str, kind: str, read: str) -> None:
    judge = asked(*WAYS[name][kind])
    for case in CASES[name]:
        score = judge.judge(item(case["response"], case["ground_truth"]))
        assert isinstance(score, Scored)
        assert score.breakdown["answered"] == float(case["extracted"][read] is not None), case


def test_the_ground_truth_of_search_data_sets_may_be_a_table() -> None:
    for case in CASES["search_em"]:
        as_table = item(case["response"], {"target": case["ground_truth"]})
        assert value(asked("short_answer", {}).judge(as_table)) == case["scores"]["em"]


@pytest.mark.parametrize("case", golden_cases("dapo/overlong/"), ids=lambda case: case.name)
def test_golden_overlong_penalty(case: GoldenCase) -> None:
    longest, buffer = case.hyper["max_resp_len"], case.hyper["overlong_buffer_len"]
    got = penalties(case, max_length=longest, buffer=buffer, factor=case.hyper["penalty_factor"], beyond="ramp")
    assert got == pytest.approx(case.outputs["penalty"].tolist(), rel=1e-5, abs=1e-6)


def test_the_overlong_penalty_is_flat_beyond_the_limit_by_default() -> None:
    case = golden_cases("dapo/overlong/4.beyond_max/s0")[0]
    got, ramp = penalties(case, max_length=64, buffer=16), case.outputs["penalty"].tolist()
    assert got == pytest.approx([max(-1.0, penalty) for penalty in ramp]) and min(ramp) < -1.0
