"""Calls of scorers whose endpoint is a server in the test."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from tandem.protos.contracts import Score, ScoreItem
from tandem.reward.endpoints.endpoint import Endpoint
from tandem.reward.scorers.judge import GenerativeJudge
from tandem.reward.scorers.remote import RemoteScorer
from tests.support.misbehaving_server import Asked, Behaviour, MisbehavingServer, chat

GOOD = chat('Fine. {"score": 7}')


def item(answer: str, question: Any = "What is 1 + 1?", truth: Any = "2", group: str = "g") -> ScoreItem:
    return ScoreItem("test", answer, truth, {"prompt": question}, group)


def endpoint(kind: type[Endpoint], url: str, **options: Any) -> Any:
    """A scorer that asks the server at `url`."""
    address = {"url": f"{url}/score"} if kind is RemoteScorer else {"base_url": f"{url}/v1", "model": "m"}
    return kind(**address, **options)


def ask(
    answer: Behaviour, items: list[ScoreItem], kind: type[Endpoint] = GenerativeJudge, **options: Any
) -> tuple[list[Score], list[Asked]]:
    """The scores that a scorer with these options gives, and the requests that its endpoint received."""
    with MisbehavingServer(answer) as server, closing(endpoint(kind, server.url, **options)) as scorer:
        return scorer.judge_batch(items), server.asked


def user_text(asked: Asked) -> str:
    text: str = asked.body["messages"][-1]["content"]
    return text
