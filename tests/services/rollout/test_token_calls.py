"""Calls of agents with token ids: the tokens of a conversation, and calls that are refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.protos.contracts import AgentResult
from tandem.protos.errors import ConfigError
from tandem.protos.types import Trajectory
from tandem.rollout.environments.agent_session import AgentSession
from tandem.rollout.environments.config import EnvironmentConfig
from tandem.rollout.environments.process import check_class
from tandem.services.data.chat import ChatEncoder
from tandem.services.rollout.episodes import EpisodeEncoder
from tandem.services.rollout.openai_proxy import OpenAIProxy
from tests.support.episodes import (
    PROMPT,
    SAMPLING,
    ScriptedSampler,
    chat_encoder,
    prompt_of,
    sampled_parts,
    texts_of,
    tokenizer,
)

GENERATE = "/sessions/one/inference/v1/generate"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return chat_encoder(tmp_path_factory.mktemp("model"))


@contextlib.asynccontextmanager
async def served(encoder: ChatEncoder, **config: Any) -> AsyncIterator[tuple[httpx.AsyncClient, AgentSession]]:
    """A session, and a client with its key."""
    sampler = ScriptedSampler(lambda _: ["one", "two", "three"])
    settings = EnvironmentConfig(path="unread:Agent", **config)
    session = AgentSession(sampler, EpisodeEncoder(encoder), settings, prompt_of(), SAMPLING, 0)
    async with OpenAIProxy({"one": session}).serving() as address:
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(base_url=address, headers=headers, trust_env=False) as client:
            yield client, session


async def ask(client: httpx.AsyncClient, ids: object, **parameters: object) -> Any:
    answer = await client.post(GENERATE, json={"token_ids": ids, "sampling_params": parameters})
    return answer.json() | {"status": answer.status_code}


def encoded(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False)
    return ids


def test_a_conversation_by_tokens_continues_with_the_tokens_that_were_sampled(encoder: ChatEncoder) -> None:
    first, reply = prompt_of().token_ids.tolist(), encoded("\n<|im_start|>user\nmore<|im_end|>\n")

    async def main() -> tuple[list[Any], Any, Trajectory]:
        async with served(encoder) as (client, session):
            answers = [await ask(client, first)]
            answers.append(await ask(client, [*first, *answers[0]["choices"][0]["token_ids"], *reply], max_tokens=2))
            models = (await client.get("/sessions/one/v1/models")).json()
            return answers, models, session.trajectory(AgentResult(1.0))

    answers, models, row = asyncio.run(main())
    (segment,) = row.segments
    assert texts_of(row) == [["one<|im_end|>", "tw"]]
    parts = [one["choices"][0] for one in answers]
    assert segment.ids.tolist() == [*first, *parts[0]["token_ids"], *reply, *parts[1]["token_ids"]]
    assert [one["finish_reason"] for one in parts] == ["stop", "length"]
    for part, (start, end) in zip(parts, sampled_parts(segment), strict=True):
        content = part["logprobs"]["content"]
        assert [one["logprob"] for one in content] == segment.behavior_logprobs[start:end].tolist()
        assert [one["token_id"] for one in content] == part["token_ids"]
        assert [one["token"] for one in content] == [f"token_id:{one}" for one in part["token_ids"]]
    assert row.metadata["stop"] == "terminated", "the call asked for a short answer"
    assert [one["content"] for one in row.metadata["messages"]] == [PROMPT[0]["content"], "one", "tw"]
    assert models["data"][0]["root"] == encoder.model_path


def test_rewritten_tokens_are_refused_or_begin_a_segment(encoder: ChatEncoder) -> None:
    first = prompt_of().token_ids.tolist()

    async def main(setting: str) -> tuple[Any, Trajectory]:
        async with served(encoder, rewritten_history=setting) as (client, session):
            await ask(client, first)
            changed = await ask(client, [*first, *encoded("uno<|im_end|>")])
            await ask(client, encoded("another"))
            return changed, session.trajectory(AgentResult(1.0))

    changed, row = asyncio.run(main("keep"))
    assert changed["status"] == 400 and "repeats the first tokens of a conversation" in changed["error"]["message"]
    assert texts_of(row) == [["one<|im_end|>"], ["two<|im_end|>"]], "another conversation is none that is rewritten"
    changed, row = asyncio.run(main("fork"))
    assert changed["status"] == 200 and texts_of(row) == [["one<|im_end|>"], ["two<|im_end|>"], ["three<|im_end|>"]]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ([], "the request is no JSON object"),
        ({"token_ids": []}, "token_ids: a list of at least one token is needed"),
        ({"token_ids": [3, "4"]}, "token_ids: '4' is no token"),
        ({"token_ids": [-1]}, "token_ids: -1 is no token"),
        ({"token_ids": [100_000]}, "token_ids: 100000 is no token; the tokenizer has "),
        ({"token_ids": [3], "stream": True}, "stream: an answer of tokens comes as a whole"),
        ({"token_ids": [3], "features": {"mm_hashes": {}}}, "the policy reads text only"),
        ({"token_ids": [3], "sampling_params": 1}, "sampling_params: an object is needed"),
        ({"token_ids": [3], "sampling_params": {"n": 2}}, "one answer a call"),
        ({"token_ids": [3], "sampling_params": {"max_tokens": 0}}, "max_tokens is 0; it must be a whole number"),
        ({"token_ids": [3], "sampling_params": {"stop": 1}}, "stop: a text, or a list of texts"),
    ],
)
def test_a_call_that_cannot_be_answered_is_refused(encoder: ChatEncoder, body: object, told: str) -> None:
    async def main() -> tuple[httpx.Response, int, int]:
        async with served(encoder, max_turns=1) as (client, _):
            refused = await client.post(GENERATE, json=body)
            foreign = await client.post(GENERATE, json=body, headers={"Authorization": "Bearer other"})
            await ask(client, [3])
            return refused, foreign.status_code, (await ask(client, [3]))["status"]

    refused, foreign, beyond = asyncio.run(main())
    assert (refused.status_code, foreign, beyond) == (400, 401, 400)
    assert told in refused.json()["error"]["message"]


def test_an_interpreter_that_is_none_is_refused(tmp_path: Path) -> None:
    settings = EnvironmentConfig(path="unread:Agent", interpreter=str(tmp_path))
    with pytest.raises(ConfigError, match=f"environment.interpreter: {tmp_path} is no program"):
        asyncio.run(check_class(settings))
