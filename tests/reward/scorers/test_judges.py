"""Judges: requests, verdicts and votes of a chat model, its use by a service, pairs of answers, ranks in a group."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.protos.types import Prompt, SamplingParameters, Trajectory
from tandem.reward.config import RewardConfig
from tandem.reward.scorers.group_rank import GroupRank, ranked
from tandem.reward.scorers.judge import GenerativeJudge
from tandem.reward.scorers.pairwise import Pairwise, choose_pairs, win_rates
from tandem.reward.scoring import ScoringCore
from tandem.services.reward.service import score_item
from tests.support.judge_calls import GOOD, ask, item, user_text
from tests.support.misbehaving_server import Answer, Asked, MisbehavingServer, chat
from tests.support.scores import refused, values

pytestmark = pytest.mark.usefixtures("short_pauses")

# ---- requests ----


def test_the_judge_is_sent_the_filled_template_and_its_grade_is_the_score() -> None:
    scores, asked = ask(GOOD, [item("two")], system="Be strict.", max_tokens=99, extra_body={"reasoning_effort": "low"})
    assert scores == [Scored(7.0)]
    (request,) = asked
    assert request.path == "/v1/chat/completions"
    assert "authorization" not in request.headers
    assert request.body["messages"][0] == {"role": "system", "content": "Be strict."}
    assert "What is 1 + 1?" in user_text(request) and "\ntwo\n" in user_text(request)
    del request.body["messages"]
    assert request.body == {"model": "m", "temperature": 0.0, "max_tokens": 99, "reasoning_effort": "low"}


def test_the_api_key_comes_from_the_environment_and_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    told = Answer({"error": "no such key: sk-secret"}, status=401)
    scores, asked = ask(told, [item("two")], api_key_env="JUDGE_KEY")
    assert asked[0].headers["authorization"] == "Bearer sk-secret"
    reason, detail = refused(scores[0])
    assert reason == "infrastructure" and "401" in detail and "sk-secret" not in detail
    assert len(asked) == 1, "a wrong key is wrong the next time, too"
    judge = GenerativeJudge(base_url="http://127.0.0.1:1", model="m", api_key_env="JUDGE_KEY")
    assert "sk-secret" not in repr(judge)


def test_an_item_without_a_placeholder_value_is_invalid_and_the_others_are_graded() -> None:
    lacking = [
        (ScoreItem("", "a", "2"), "extra_info.prompt is missing"),
        (item("a", 7), "extra_info.prompt is neither text nor chat messages"),
        (item("a", []), "neither text nor"),
        (item("a", [{"role": "user", "content": [{"type": "image_url"}]}]), "neither text nor"),
        (item("a", truth=None), "ground truth is missing"),
    ]
    scores, asked = ask(GOOD, [*(one for one, _ in lacking), item("two")])
    assert scores.pop() == Scored(7.0) and len(asked) == 1
    for score, (_, told) in zip(scores, lacking, strict=True):
        reason, detail = refused(score)
        assert reason == "invalid_input" and told in detail


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_an_unreadable_verdict_is_retried_only_above_temperature_0(temperature: float) -> None:
    scores, asked = ask(
        lambda asked: chat("dunno") if asked.number == 0 else GOOD, [item("two")], temperature=temperature
    )
    if temperature:
        assert scores == [Scored(7.0)] and len(asked) == 2
    else:
        reason, detail = refused(scores[0])
        assert reason == "crashed" and "no JSON with score in the judge's answer 'dunno'" in detail and len(asked) == 1


def test_a_missing_verdict_has_its_reason() -> None:
    cut, _ = ask(chat("I think", finish_reason="length"), [item("two")], max_tokens=5)
    assert refused(cut[0])[0] == "crashed" and "it was cut at max_tokens 5" in refused(cut[0])[1]
    silent, _ = ask(chat(None, finish_reason="content_filter"), [item("two")])
    assert refused(silent[0]) == ("crashed", "the judge gave no text (finish_reason 'content_filter')")


# ---- votes ----


@pytest.mark.parametrize(
    ("how", "grades", "value"),
    [
        ("mean", [2, 8, 3, 2, 5], 4.0),
        ("median", [2, 8, 3, 2, 5], 3.0),
        ("majority", [5, 5, 1], 5.0),
        ("majority", [3, 2, 3, 1, 2, 9], 2.0),
    ],
)
def test_votes_are_combined_and_their_spread_is_reported(how: Any, grades: list[int], value: float) -> None:
    answer = [chat(json.dumps({"score": grade})) for grade in grades]
    options = {"votes": len(grades), "combine": how, "temperature": 1.0}
    scores, asked = ask(lambda asked: answer[asked.number], [item("two")], **options)
    assert scores == [Scored(value, {"spread": max(grades) - min(grades)})] and len(asked) == len(grades)


def test_a_failed_vote_leaves_the_item_unscored() -> None:
    def answer(asked: Asked) -> Answer:
        return Answer({"error": "too long"}, status=400) if asked.number == 1 else GOOD

    scores, _ = ask(answer, [item("two")], votes=3, temperature=1.0)
    assert refused(scores[0])[0] == "invalid_input"


# ---- in a service ----


GRADED = """
[[components]]
scorer = "exact"
weight = 10.0
[[components]]
scorer = "strict"
from = [0.0, 10.0]
to = [0.0, 1.0]
"""


def test_a_service_that_declares_a_judge_lets_clients_use_it_by_name() -> None:
    with MisbehavingServer(GOOD) as server:
        arguments = {"base_url": server.url, "model": "m", "system": "Be strict."}
        declared = {"strict": {"scorer": "judge", "arguments": arguments}}
        with closing(ScoringCore(RewardConfig.model_validate({"scorers": declared}))) as core:
            rubric = core.compile(GRADED)
            assert core.score(rubric, [item("2"), item("3")], "calls") == [
                Scored(10.7, {"exact": 1.0, "strict": 0.7}),
                Scored(0.7, {"exact": 0.0, "strict": 0.7}),
            ]
            assert core.figures()["judge_requests:strict"] == 2.0
        assert server.asked[0].body["messages"][0] == {"role": "system", "content": "Be strict."}


def test_groups_of_a_run_show_the_judge_their_prompt() -> None:
    sampling = SamplingParameters()
    asked_for = ({"role": "user", "content": "1 + 1?"},)
    prompt = Prompt(0, 0, np.array([1], np.int32), 1, sampling, ground_truth="2", messages=asked_for)
    scores, asked = ask(GOOD, [score_item(prompt, Trajectory(0, "policy", (), "two", "stop", sampling))])
    assert scores == [Scored(7.0)] and "[Question]\n1 + 1?\n" in user_text(asked[0])


CONVERSATION = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": 1}}}]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is two."},
]
FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(extra_info["messages"]))
"""


def test_judges_and_functions_of_a_rubric_see_the_whole_conversation_of_an_episode(tmp_path: Path) -> None:
    """`solution_str` has only the policy's texts; the tool's calls and answers are in `extra_info["messages"]`."""
    (tmp_path / "turns.py").write_text(FUNCTION)
    (tmp_path / "rubric.toml").write_text(
        f'[[components]]\nname = "turns"\nscorer = "{tmp_path}/turns.py:compute_score"\n'
        '[[components]]\nname = "judged"\nscorer = "strict"\n'
    )
    sampling = SamplingParameters()
    prompt = Prompt(0, 0, np.array([1], np.int32), 1, sampling, ground_truth="2", messages=tuple(CONVERSATION[:1]))
    episode = Trajectory(0, "policy", (), "stop", "\nIt is two.", sampling, metadata={"messages": CONVERSATION})
    with MisbehavingServer(GOOD) as server:
        template = "{answer}\n{question}\n{extra_info.messages}"
        arguments = {"base_url": server.url, "model": "m", "template": template}
        scorers = {"strict": {"scorer": "judge", "arguments": arguments}}
        values = {"rubric": str(tmp_path / "rubric.toml"), "scorers": scorers}
        with closing(ScoringCore(RewardConfig.model_validate(values))) as core:
            (score,) = core.score(core.compile(""), [score_item(prompt, episode)], "calls")
        assert isinstance(score, Scored) and score.breakdown == {"turns": 4.0, "judged": 7.0}
        *texts, conversation = user_text(server.asked[0]).split("\n")
    assert texts == ["", "It is two.", "1 + 1?"] and json.loads(conversation) == CONVERSATION


# ---- pairs of answers ----


def shown(asked: Asked) -> tuple[str, str]:
    """The two answers of a comparison, as the judge sees them."""
    found = re.search(r"\[Answer A\]\n(.*)\n\n\[Answer B\]\n(.*)\n\n\[End", asked.body["messages"][0]["content"])
    assert found is not None
    return found[1], found[2]


def larger_wins(asked: Asked) -> Answer:
    a, b = map(float, shown(asked))
    return chat("I see. [[TIE]]" if a == b else "[[B]] or rather [[A]]" if a > b else "[[B]]")


compare = partial(ask, kind=Pairwise)


def test_the_score_is_the_share_of_the_group_that_an_answer_beats() -> None:
    others = item("5", group="other"), item("4", group="other")
    scores, asked = compare(larger_wins, [item("1"), item("7"), item("3"), item("7.0"), *others])
    assert values(scores) == [0.0, 5 / 6, 1 / 3, 5 / 6, 1.0, 0.0]
    assert len(asked) == 2 * 6 + 2, "each pair twice, and none across groups"
    assert Counter(frozenset(shown(one)) for one in asked)[frozenset({"1", "7"})] == 2


def test_a_judge_that_prefers_a_position_yields_ties() -> None:
    scores, _ = compare(chat("[[A]]"), [item(str(n)) for n in range(4)])
    assert values(scores) == [0.5] * 4
    biased, asked = compare(chat("[[A]]"), [item(str(n)) for n in range(4)], swap=False)
    assert len(asked) == 6 and sum(values(biased)) == 2.0


def test_equal_texts_are_a_tie_without_a_request() -> None:
    scores, asked = compare(larger_wins, [item("1"), item("1"), item("1")])
    assert values(scores) == [0.5] * 3 and asked == []


def test_an_answer_without_others_in_its_group_is_unscored() -> None:
    alone = item("1", group=""), item("2", group=""), item("3", group="alone")
    scores, asked = compare(larger_wins, [*alone, item("1"), item("2")])
    assert refused(scores[0])[0] == "invalid_input" and "has no group" in refused(scores[0])[1]
    assert refused(scores[1]) == refused(scores[0])
    assert refused(scores[2]) == ("invalid_input", "group 'alone' has no other answer to compare with")
    assert values(scores[3:]) == [0.0, 1.0] and len(asked) == 2


def test_a_failed_comparison_affects_its_two_answers_only() -> None:
    def answer(asked: Asked) -> Answer:
        return Answer(status=503) if shown(asked) == ("2", "0") else larger_wins(asked)

    scores, asked = compare(answer, [item(str(n)) for n in range(4)], max_attempts=2)
    assert refused(scores[0])[0] == "infrastructure" and refused(scores[0]) == refused(scores[2])
    assert scores[1] == Scored(1 / 3) and scores[3] == Scored(1.0)
    assert len(asked) == 2 * 6 + 1


def test_an_unreadable_verdict_is_not_a_tie() -> None:
    scores, _ = compare(chat("both fine"), [item("1"), item("2")])
    assert [refused(score)[0] for score in scores] == ["crashed"] * 2


def test_an_answer_that_met_only_answers_at_fault_is_not_at_fault() -> None:
    pairs = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 5)]
    unreadable: Score = Unscored("crashed")
    results = [unreadable, unreadable, 1.0, 0.0, unreadable, unreadable]
    fault = Scored(0.0, {"fault/crashed": 1.0})
    assert win_rates(6, pairs, results) == [Scored(1.0), fault, Scored(1.0), Scored(0.0), Scored(1.0), fault]


@pytest.mark.parametrize(("said", "reason"), [(chat("I cannot say"), "crashed"), (Answer(status=400), "invalid_input")])
def test_an_answer_with_which_no_comparison_succeeds_loses_all_of_them(said: Answer, reason: str) -> None:
    def answer(asked: Asked) -> Answer:
        return said if "-1" in shown(asked) else larger_wins(asked)

    scores, _ = compare(answer, [item("1"), item("-1"), item("3"), item("-1")])
    fault = Scored(0.0, {f"fault/{reason}": 1.0})
    assert scores == [Scored(2 / 3), fault, Scored(1.0), fault]


def test_opponents_limits_the_comparisons_of_each_answer() -> None:
    scores, asked = compare(larger_wins, [item(str(n)) for n in range(9)], opponents=3)
    met = Counter(text for one in asked for text in shown(one))
    assert set(met.values()) == {8}, "four opponents (three, rounded up to an even number), each twice"
    by_value = dict(zip((str(n) for n in range(9)), values(scores), strict=True))
    assert by_value["0"] == 0.0 and by_value["8"] == 1.0
    again, _ = compare(larger_wins, [item(str(n)) for n in range(9)], opponents=3)
    assert again == scores, "chosen by the texts, not by chance"


@given(count=st.integers(2, 14), opponents=st.integers(0, 14), seed=st.integers(0, 2**32))
def test_every_answer_is_compared_equally_often(count: int, opponents: int, seed: int) -> None:
    pairs = choose_pairs(count, opponents, seed)
    assert len(set(pairs)) == len(pairs) and all(0 <= i < j < count for i, j in pairs)
    met = Counter(number for pair in pairs for number in pair)
    assert len(met) == count
    (number,) = set(met.values())
    assert number == count - 1 if opponents == 0 else min(opponents, count - 1) <= number <= opponents + 1


@given(st.lists(st.integers(0, 6), min_size=2, max_size=10))
def test_win_rates_sum_to_half_and_keep_the_order_of_strengths(strengths: list[int]) -> None:
    pairs = choose_pairs(len(strengths), 0, 0)
    results = [(1.0 if strengths[i] > strengths[j] else 0.5 if strengths[i] == strengths[j] else 0.0) for i, j in pairs]
    rates = values(win_rates(len(strengths), pairs, results))
    assert sum(rates) == pytest.approx(len(strengths) / 2)
    assert all(0.0 <= rate <= 1.0 for rate in rates)
    for i, one in enumerate(strengths):
        for j, other in enumerate(strengths):
            assert (one < other) == (rates[i] < rates[j] - 1e-12)
    ranks = values(ranked([Scored(float(strength)) for strength in strengths]))
    assert ranks == pytest.approx(rates), "a rank is the win rate by the scorer's own values"


# ---- ranks by another scorer ----


def test_group_rank_ranks_by_another_scorers_values() -> None:
    rows = [("1", 1, "a"), ("2", 1, "a"), ("1", 1, "a"), ("x", "no number", "a")]
    rows += [("1", 1, "b"), ("y", "no number", "b"), ("1", 1, "c"), ("1", 1, "")]
    items = [ScoreItem("", text, truth, group=group) for text, truth, group in rows]
    with closing(GroupRank(scorer="numeric")) as ranks:
        scores = ranks.judge_batch(items)
    assert scores[0] == scores[2] == Scored(0.75, {"value": 1.0}) and scores[1] == Scored(0.0, {"value": 0.0})
    assert refused(scores[3])[0] == "invalid_input" and "ground truth" in refused(scores[3])[1]
    reason, detail = refused(scores[4])
    assert reason == "invalid_input" and "no other answer of the group has a score" in detail
    assert "ground truth" in refused(scores[5])[1]
    assert "no other answer to compare with" in refused(scores[6])[1] and "has no group" in refused(scores[7])[1]


def test_group_rank_keeps_the_reasons_of_a_remote_scorer() -> None:
    def answer(asked: Asked) -> Answer:
        (one,) = asked.body["items"]
        good = Answer({"results": [{"score": len(one["solution"])}]})
        return Answer(status=500) if one["solution"] == "bad" else good

    with MisbehavingServer(answer) as server:
        arguments = {"url": server.url, "max_attempts": 1}
        with closing(GroupRank(scorer="remote", arguments=arguments)) as ranks:
            scores = ranks.judge_batch([item("aaa"), item("bad"), item("a"), item("aa"), item("a" * 9)])
            assert ranks.figures()["remote_requests"] == 5.0
    assert values([score for n, score in enumerate(scores) if n != 1]) == pytest.approx([2 / 3, 0.0, 1 / 3, 1.0])
    assert refused(scores[1])[0] == "infrastructure"


def test_an_answer_that_the_other_scorer_refuses_shares_the_last_place_of_its_group() -> None:
    def answer(asked: Asked) -> Answer:
        (one,) = asked.body["items"]
        good = Answer({"results": [{"score": -len(one["solution"])}]})
        return Answer(status=413) if one["solution"] == "too long" else good

    with (
        MisbehavingServer(answer) as server,
        closing(GroupRank(scorer="remote", arguments={"url": server.url})) as ranks,
    ):
        scores = ranks.judge_batch([item("a"), item("too long"), item("aaa")])
        assert ranks.figures()["remote_requests"] == 3 + 1 + 1, "each, the refused one again, and a control"
    assert values(scores) == [1.0, 0.25, 0.25]
    assert isinstance(scores[1], Scored) and scores[1].breakdown["fault/invalid_input"] == 1.0


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=10))
@settings(max_examples=200)
def test_every_value_gets_a_rank_or_a_reason(numbers: list[float | None]) -> None:
    given_scores: list[Score] = [Unscored("timeout", "late") if n is None else Scored(n) for n in numbers]
    if len(numbers) == 1 and numbers[0] is not None:
        return  # `split_groups` leaves no group of one
    known = [n for n in numbers if n is not None]
    for number, score in zip(numbers, ranked(given_scores), strict=True):
        if number is None or len(known) == 1:
            assert refused(score)[0] == "timeout"
        else:
            others = sum(other < number for other in known) + (known.count(number) - 1) / 2
            assert score == Scored(others / (len(known) - 1), {"value": number})
