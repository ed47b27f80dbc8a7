"""Group-relative judges: properties of win rates and ranks, order bias, sampling, small groups, and failed pairs."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import closing
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.reward.scorers.group_rank import GroupRank, ranked
from tandem.reward.scorers.pairwise import Pairwise, choose_pairs, win_rates
from tests.support import judge_calls
from tests.support.misbehaving_server import Answer, Asked, MisbehavingServer, chat
from tests.support.scores import refused, values

pytestmark = pytest.mark.usefixtures("short_pauses")


def item(answer: str, group: str = "g") -> ScoreItem:
    return ScoreItem("test", answer, None, {"prompt": "How many?"}, group=group)


def shown(asked: Asked) -> tuple[str, str]:
    """The two answers of a comparison, as the judge sees them."""
    found = re.search(r"\[Answer A\]\n(.*)\n\n\[Answer B\]\n(.*)\n\n\[End", asked.body["messages"][0]["content"])
    assert found is not None
    return found[1], found[2]


def larger_wins(asked: Asked) -> Answer:
    a, b = map(float, shown(asked))
    return chat("I see. [[TIE]]" if a == b else "[[B]] or rather [[A]]" if a > b else "[[B]]")


ask = partial(judge_calls.ask, kind=Pairwise)


# ---- pairs by a chat model ----


def test_the_score_is_the_share_of_the_group_that_an_answer_beats() -> None:
    others = item("5", "other"), item("4", "other")
    scores, asked = ask(larger_wins, [item("1"), item("7"), item("3"), item("7.0"), *others])
    assert values(scores) == [0.0, 5 / 6, 1 / 3, 5 / 6, 1.0, 0.0]
    assert len(asked) == 2 * 6 + 2, "each pair twice, and none across groups"
    assert Counter(frozenset(shown(one)) for one in asked)[frozenset({"1", "7"})] == 2


def test_a_judge_that_prefers_a_position_yields_ties() -> None:
    scores, _ = ask(chat("[[A]]"), [item(str(n)) for n in range(4)])
    assert values(scores) == [0.5] * 4
    biased, asked = ask(chat("[[A]]"), [item(str(n)) for n in range(4)], swap=False)
    assert len(asked) == 6 and sum(values(biased)) == 2.0


def test_equal_texts_are_a_tie_without_a_request() -> None:
    scores, asked = ask(larger_wins, [item("1"), item("1"), item("1")])
    assert values(scores) == [0.5] * 3 and asked == []


def test_an_answer_without_others_in_its_group_is_unscored() -> None:
    scores, asked = ask(larger_wins, [item("1", ""), item("2", ""), item("3", "alone"), item("1"), item("2")])
    assert refused(scores[0])[0] == "invalid_input" and "has no group" in refused(scores[0])[1]
    assert refused(scores[1]) == refused(scores[0])
    assert refused(scores[2]) == ("invalid_input", "group 'alone' has no other answer to compare with")
    assert values(scores[3:]) == [0.0, 1.0] and len(asked) == 2


def test_a_failed_comparison_affects_its_two_answers_only() -> None:
    def answer(asked: Asked) -> Answer:
        return Answer(status=503) if shown(asked) == ("2", "0") else larger_wins(asked)

    scores, asked = ask(answer, [item(str(n)) for n in range(4)], max_attempts=2)
    assert refused(scores[0])[0] == "infrastructure" and refused(scores[0]) == refused(scores[2])
    assert scores[1] == Scored(1 / 3) and scores[3] == Scored(1.0)
    assert len(asked) == 2 * 6 + 1


def test_an_unreadable_verdict_is_not_a_tie() -> None:
    scores, _ = ask(chat("both fine"), [item("1"), item("2")])
    assert [refused(score)[0] for score in scores] == ["crashed"] * 2


def test_opponents_limits_the_comparisons_of_each_answer() -> None:
    scores, asked = ask(larger_wins, [item(str(n)) for n in range(9)], opponents=3)
    met = Counter(text for one in asked for text in shown(one))
    assert set(met.values()) == {8}, "four opponents (three, rounded up to an even number), each twice"
    by_value = dict(zip((str(n) for n in range(9)), values(scores), strict=True))
    assert by_value["0"] == 0.0 and by_value["8"] == 1.0
    again, _ = ask(larger_wins, [item(str(n)) for n in range(9)], opponents=3)
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
