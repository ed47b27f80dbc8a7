"""The generative judge: requests, verdicts and votes, and its use by a service."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from tandem.protos.contracts import Scored, ScoreItem
from tandem.protos.types import Prompt, SamplingParameters, Trajectory
from tandem.reward.config import RewardConfig
from tandem.reward.scorers.judge import GenerativeJudge, combined
from tandem.reward.scoring import ScoringCore
from tandem.services.reward.service import score_item
from tests.support.judge_calls import GOOD, ask, item, user_text
from tests.support.misbehaving_server import Answer, Asked, MisbehavingServer, chat
from tests.support.scores import refused

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


@pytest.mark.parametrize(
    ("one", "told"),
    [
        (ScoreItem("", "a", "2"), "extra_info.prompt is missing"),
        (item("a", 7), "extra_info.prompt is neither text nor chat messages"),
        (item("a", []), "neither text nor"),
        (item("a", [{"role": "user", "content": [{"type": "image_url"}]}]), "neither text nor"),
        (item("a", truth=None), "ground truth is missing"),
    ],
)
def test_an_item_without_a_placeholder_value_is_invalid_and_the_others_are_graded(one: ScoreItem, told: str) -> None:
    scores, asked = ask(GOOD, [one, item("two")])
    reason, detail = refused(scores[0])
    assert reason == "invalid_input" and told in detail
    assert scores[1] == Scored(7.0) and len(asked) == 1


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


@pytest.mark.parametrize(("how", "value"), [("mean", 4.0), ("median", 3.0), ("majority", 2.0)])
def test_votes_are_combined_and_their_spread_is_reported(how: Any, value: float) -> None:
    answer = [chat(json.dumps({"score": grade})) for grade in (2, 8, 3, 2, 5)]
    options = {"votes": 5, "combine": how, "temperature": 1.0}
    scores, asked = ask(lambda asked: answer[asked.number], [item("two")], **options)
    assert scores == [Scored(value, {"spread": 6.0})] and len(asked) == 5


def test_majority_takes_the_most_frequent_vote_and_the_lowest_on_a_tie() -> None:
    assert combined([5.0, 5.0, 1.0], "majority") == 5.0
    assert combined([3.0, 2.0, 3.0, 1.0, 2.0, 9.0], "majority") == 2.0


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
