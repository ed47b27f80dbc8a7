"""Calls of a generative judge whose endpoint is a server in the test."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

from tandem.protos.contracts import Score, ScoreItem, Unscored
from tandem.reward.scorers.judge import GenerativeJudge
from tests.support.misbehaving_server import Answer, Asked, MisbehavingServer, chat

GOOD = chat('Fine. {"score": 7}')


def item(answer: str, question: Any = "What is 1 + 1?", truth: Any = "2") -> ScoreItem:
    return ScoreItem("test", answer, truth, {"prompt": question})


def ask(
    answer: Callable[[Asked], Answer] | Answer, items: list[ScoreItem], **options: Any
) -> tuple[list[Score], list[Asked]]:
    """The scores that a judge with these options gives, and the requests that the endpoint received."""
    serve = answer if callable(answer) else lambda asked: answer
    with (
        MisbehavingServer(serve) as server,
        closing(GenerativeJudge(base_url=server.url + "/v1", model="m", **options)) as judge,
    ):
        return judge.judge_batch(items), server.asked


def refused(score: Score) -> tuple[str, str]:
    assert isinstance(score, Unscored), score
    return score.reason, score.detail


def user_text(asked: Asked) -> str:
    text: str = asked.body["messages"][-1]["content"]
    return text
