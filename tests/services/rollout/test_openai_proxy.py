"""Calls of agents with the real OpenAI client over HTTP: exact tokens, segments, tools, and calls that are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tandem.protos.types import SamplingParameters, Trajectory
from tandem.rollout.environments.limits import with_policy
from tandem.services.data.chat import ChatEncoder
from tests.support.agent_sessions import Served, served
from tests.support.agents import TOOL, client_of
from tests.support.episodes import PROMPT, ScriptedSampler, chat_encoder, sampled_parts, texts_of, tokenizer
from tests.support.tiny_model import TOOL_TEMPLATE, build_tiny_model

USER = {"role": "user", "content": "go on"}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return chat_encoder(tmp_path_factory.mktemp("model"))


def test_a_conversation_continues_with_the_tokens_that_were_sampled(encoder: ChatEncoder) -> None:
    words = ["one", " two", "three"]

    async def main() -> Trajectory:
        async with served(encoder, lambda _: words) as (one,):
            messages: list[Any] = [*PROMPT]
            for _ in words:
                messages += [await one.say(*messages), USER]
            return one.row()

    row = asyncio.run(main())
    (segment,) = row.segments
    conversation: list[Any] = [*PROMPT]
    for word in words:
        conversation += [{"role": "assistant", "content": word}, USER]
    whole = encoder.encode(conversation[:-1])
    assert segment.ids.tolist() == whole[: len(segment.ids)].tolist()
    assert texts_of(row) == [[f"{word}<|im_end|>" for word in words]]
    for turn, (start, end) in enumerate(sampled_parts(segment)):
        expected = [-(turn + 1) - place / 100 for place in range(end - start)]
        assert segment.behavior_logprobs[start:end].tolist() == pytest.approx(expected)
    assert {span.policy_version for span in segment.spans} == {0, 1}
    assert (row.text, row.earned_reward, row.finish_reason) == ("one\n two\nthree", 1.0, "stop")
    assert row.metadata["num_turns"] == 3 and row.metadata["stop"] == "terminated"
    assert [one["content"] for one in row.metadata["messages"]] == [one["content"] for one in conversation[:-1]]


def test_another_conversation_is_another_segment_and_each_sampled_token_is_in_one(encoder: ChatEncoder) -> None:
    async def main() -> Trajectory:
        async with served(encoder, lambda _: ["one", "two", "three", "four"]) as (one,):
            first = await one.say(*PROMPT)
            await one.say({"role": "system", "content": "Another."}, USER)
            await one.say(*PROMPT, first, USER)
            await one.say(*PROMPT)
            return one.row()

    row = asyncio.run(main())
    assert texts_of(row) == [["one<|im_end|>", "three<|im_end|>"], ["two<|im_end|>"], ["four<|im_end|>"]]
    assert row.text == "one\ntwo\nthree\nfour"


@pytest.mark.parametrize("setting", ["keep", "fork"])
def test_answers_that_the_policy_has_not_given_are_not_trained(encoder: ChatEncoder, setting: str) -> None:
    """The first call shows examples, and a later one an answer of the agent's own. The conversation goes on."""
    examples: list[Any] = [*PROMPT, USER, {"role": "assistant", "content": "example"}, USER]
    foreign: list[Any] = [USER, {"role": "assistant", "content": "foreign"}, USER]

    async def main() -> Trajectory:
        async with served(encoder, lambda _: ["one", "two", "three"], rewritten_history=setting) as (one,):
            first = await one.say(*examples)
            second = await one.say(*examples, first, USER)
            await one.say(*examples, first, USER, second, *foreign)
            return one.row()

    row = asyncio.run(main())
    (segment,) = row.segments
    assert texts_of(row) == [["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]]
    said = [{"role": "assistant", "content": word} for word in ("one", "two")]
    whole = encoder.encode([*examples, said[0], USER, said[1], *foreign]).tolist()
    assert segment.ids.tolist()[: len(whole)] == whole, "the other answers are read as the template shows them"
    assert segment.num_prompt_tokens == len(encoder.encode(examples))
    given = tokenizer().decode(segment.ids[segment.loss_mask == 0].tolist())
    assert given.count("example") == given.count("foreign") == 1 and row.text == "one\ntwo\nthree"


@pytest.mark.parametrize("change", ["another answer", "a turn less", "other tools"])
def test_a_rewritten_history_is_refused_or_begins_a_segment(encoder: ChatEncoder, tmp_path: Path, change: str) -> None:
    own = ChatEncoder(str(build_tiny_model(tmp_path, chat_template=TOOL_TEMPLATE)))

    async def main(setting: str) -> Trajectory:
        async with served(own, lambda _: ["one", "two", "three"], rewritten_history=setting) as (one,):
            first = await one.say(*PROMPT)
            await one.say(*PROMPT, first, USER)
            if change == "another answer":
                await one.say(*PROMPT, {"role": "assistant", "content": "uno"}, USER)
            elif change == "a turn less":
                await one.say(*PROMPT, first, {"role": "user", "content": "once more"})
            else:
                await one.say(*PROMPT, first, USER, tools=[TOOL])
            return one.row()

    with pytest.raises(openai.BadRequestError, match="messages of a conversation, and then differs from it"):
        asyncio.run(main("keep"))
    row = asyncio.run(main("fork"))
    assert texts_of(row) == [["one<|im_end|>", "two<|im_end|>"], ["three<|im_end|>"]]


def test_tools_are_shown_and_their_calls_are_read_by_tokens(tmp_path: Path) -> None:
    tags = ("<tool_call>", "</tool_call>")
    encoder = ChatEncoder(str(build_tiny_model(tmp_path, chat_template=TOOL_TEMPLATE)))
    said = f'{tags[0]}{{"name": "add", "arguments": {{"a": 1}}}}{tags[1]}'

    async def main() -> tuple[Any, Any, Trajectory]:
        async with served(encoder, lambda _: [said, "2", f"{tags[0]}add"]) as (one,):
            asked = await one.client.chat.completions.create(model="any", messages=[USER], tools=[TOOL])
            call = asked.choices[0].message.model_dump(exclude_none=True)
            call["tool_calls"][0]["function"]["arguments"] = '{ "a":1 }'  # as frameworks write it again
            result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "2"}
            last = await one.say(USER, call, result, tools=[TOOL])
            unreadable = await one.say(USER, call, result, last, USER, tools=[TOOL])
            return asked, unreadable, one.row()

    asked, unreadable, row = asyncio.run(main())
    choice = asked.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.tool_calls[0].function.name == "add"
    assert unreadable == {"role": "assistant", "content": f"{tags[0]}add"}, "a call that cannot be read is text"
    assert len(row.segments) == 1 and asked.usage.prompt_tokens == row.segments[0].num_prompt_tokens
    prompt = tokenizer().decode(row.segments[0].ids[: asked.usage.prompt_tokens].tolist())
    assert '"name": "add"' in prompt


UNREADABLE = "<tool_call>add"
UNKNOWN = '<tool_call>{"name": "subtract", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("said", "limits", "stop"),
    [
        ([UNREADABLE, "2"], {}, None),
        ([UNREADABLE], {"policies": {"parse_error": "end"}}, "parse_error"),
        ([UNKNOWN, UNREADABLE], {"max_invalid_calls": 2}, "invalid_calls"),
    ],
)
def test_invalid_calls_end_the_episode_of_an_agent_where_the_recipe_says_so(
    tmp_path: Path, said: list[str], limits: dict[str, Any], stop: str | None
) -> None:
    encoder = ChatEncoder(str(build_tiny_model(tmp_path, chat_template=TOOL_TEMPLATE)))

    async def main() -> Trajectory:
        async with served(encoder, lambda _: [*said, "more"], **limits) as (one,):
            messages: list[Any] = [USER]
            for _ in said:
                messages.append(await one.say(*messages, tools=[TOOL]))
                result = [
                    {"role": "tool", "tool_call_id": call["id"], "content": "?"}
                    for call in messages[-1].get("tool_calls", ())
                ]
                messages += result or [USER]
            if stop is None:
                await one.say(*messages, tools=[TOOL])
            else:
                with pytest.raises(openai.BadRequestError, match=f"the episode has ended by '{stop}'") as refused:
                    await one.say(*messages, tools=[TOOL])
                assert refused.value.code == "context_length_exceeded"
            return one.row()

    row = asyncio.run(main())
    assert row.metadata["stop"] == (stop or "terminated")
    assert row.metadata["num_turns"] == len(said) + (stop is None)


@pytest.mark.parametrize("policy", ["observation", "end", "unscored"])
def test_a_refused_call_ends_the_episode_of_an_agent_where_the_recipe_says_so(
    encoder: ChatEncoder, policy: str
) -> None:
    async def main() -> Trajectory:
        async with served(encoder, lambda _: ["one", "two"], policies={"refused": policy}) as (one,):
            assert (await one.say(USER))["content"] == "one"
            with pytest.raises(openai.BadRequestError, match="one answer a call"):
                await one.say(USER, n=2)
            if policy == "observation":
                assert (await one.say(USER))["content"] == "two"
            else:
                with pytest.raises(openai.BadRequestError, match="the episode has ended by 'refused'") as refused:
                    await one.say(USER)
                assert refused.value.code == "context_length_exceeded"
            return with_policy(one.row(), one.session._config)

    row = asyncio.run(main())
    stop = "terminated" if policy == "observation" else "refused"
    assert (row.metadata["stop"], row.metadata["num_turns"]) == (stop, 2 if policy == "observation" else 1)
    assert row.finish_reason == ("error" if policy == "unscored" else "stop")


def test_a_streamed_answer_is_the_same_and_counts_once(encoder: ChatEncoder) -> None:
    async def main() -> tuple[list[Any], Trajectory]:
        async with served(encoder, lambda _: ["one", "two"]) as (one,):
            create = one.client.chat.completions.create
            options = {"include_usage": True}
            stream = await create(model="any", messages=PROMPT, stream=True, stream_options=options)
            chunks = [chunk async for chunk in stream]
            said = {"role": "assistant", "content": "".join(c.choices[0].delta.content or "" for c in chunks[:-1])}
            await one.say(*PROMPT, said, USER)
            return chunks, one.row()

    chunks, row = asyncio.run(main())
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, "stop"]
    assert chunks[-1].usage.completion_tokens == len("one") + 1
    assert texts_of(row) == [["one<|im_end|>", "two<|im_end|>"]]


def test_a_wrong_key_and_unknown_sessions_and_paths_are_refused(encoder: ChatEncoder) -> None:
    async def main() -> None:
        async with served(encoder, lambda _: ["one"], number=2) as (one, other):
            stranger = client_of(one.base_url, other.session.api_key)
            with pytest.raises(openai.AuthenticationError, match="not that of this session") as refused:
                await stranger.chat.completions.create(model="any", messages=[USER])
            assert refused.value.code == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
            assert [model.id async for model in one.client.models.list()] == ["policy"]
            with pytest.raises(openai.NotFoundError, match=r"PUT .*models is not served"):
                await one.client.put("/models", cast_to=object)
            with pytest.raises(openai.NotFoundError, match=r"POST .*embeddings is not served"):
                await one.client.embeddings.create(model="any", input="?")
            del one.sessions[one.name]
            with pytest.raises(openai.NotFoundError, match="has ended, or is one of another run") as ended:
                await one.say(USER)
            assert ended.value.code == "session_not_found"
            await stranger.close()
            assert one.row().text == "", "nothing was sampled"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({"messages": []}, "messages: a list of at least one message is needed"),
        ({"messages": [{"role": "robot", "content": "?"}]}, r"messages\[0\]: a message has a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "the policy reads text only"),
        ({"n": 2}, "n: one answer a call"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number of at least 1"),
        ({"tool_choice": "required"}, 'tool_choice "required"'),
        ({"response_format": {"type": "json_object"}}, "answers are sampled as plain text only"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\]: a tool has type function"),
        ({"tools": [TOOL]}, "refuses the messages of tools: no tools"),
        ({"messages": [{"role": "tool", "content": "?", "tool_call_id": [1]}]}, "the id of a tool call is a text"),
        ({"messages": [{"role": "tool", "content": "?"}]}, "the chat template refuses the conversation: no tools"),
        ({"messages": [{"role": "user", "content": "?" * 2000}]}, "tokens leave none for an answer"),
    ],
)
def test_a_call_that_the_policy_cannot_answer_says_why(encoder: ChatEncoder, call: dict[str, Any], told: str) -> None:
    async def main() -> None:
        async with served(encoder, lambda _: ["one"]) as (one,):
            with pytest.raises(openai.BadRequestError, match=told):
                await one.client.chat.completions.create(**{"model": "any", "messages": [USER], **call})
            assert (await one.say(USER, temperature=0.1))["content"] == "one", "the session goes on"

    asyncio.run(main())


def test_a_turn_whose_client_has_gone_is_not_recorded(encoder: ChatEncoder) -> None:
    async def main() -> Trajectory:
        async with served(encoder, lambda _: ["one", "two"], stops_at=(0, 2)) as (one,):
            sampler = one.session._sampler
            assert isinstance(sampler, ScriptedSampler)
            asked = asyncio.create_task(one.say(USER))
            async with asyncio.timeout(20.0):
                while not sampler.begun:
                    await asyncio.sleep(0.01)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert (await one.say(USER))["content"] == "two"
            return one.row()

    row = asyncio.run(main())
    assert texts_of(row) == [["two<|im_end|>"]] and row.metadata["num_turns"] == 1


def test_a_call_that_is_being_answered_ends_with_its_session(encoder: ChatEncoder) -> None:
    async def main() -> Trajectory:
        async with served(encoder, lambda _: ["one"], stops_at=(0, 2)) as (one,):
            asked = asyncio.create_task(one.say(USER))
            async with asyncio.timeout(20.0):
                while not one.session._calls:
                    await asyncio.sleep(0.01)
            one.session.end()
            with pytest.raises(openai.NotFoundError, match="it has ended"):
                await asked
            return one.row()

    assert asyncio.run(main()).text == ""


def test_sixty_four_sessions_side_by_side_keep_their_tokens_apart(encoder: ChatEncoder) -> None:
    async def main() -> list[Trajectory]:
        async with served(encoder, lambda number: [f"{number}a", f"{number}b"], number=64) as found:

            async def talk(one: Served) -> Trajectory:
                await one.say(*PROMPT, await one.say(*PROMPT), USER)
                return one.row()

            return await asyncio.gather(*map(talk, found))

    for number, row in enumerate(asyncio.run(main())):
        assert texts_of(row) == [[f"{number}a<|im_end|>", f"{number}b<|im_end|>"]]


def test_parallel_calls_of_a_session_are_segments_of_their_own(encoder: ChatEncoder) -> None:
    async def main() -> Trajectory:
        async with served(encoder, lambda _: [f"turn {turn}" for turn in range(8)]) as (one,):
            names = [{"role": "user", "content": f"sub-agent {number}"} for number in range(4)]
            said = await asyncio.gather(*(one.say(name) for name in names))
            await asyncio.gather(*(one.say(name, turn, USER) for name, turn in zip(names, said, strict=True)))
            return one.row()

    found = texts_of(asyncio.run(main()))
    assert [len(one) for one in found] == [2] * 4
    assert sorted(text for one in found for text in one) == [f"turn {turn}<|im_end|>" for turn in range(8)]


def test_conversations_that_fork_share_the_limit_on_sampled_tokens(encoder: ChatEncoder) -> None:
    """Room in Redis is kept for so many in an episode."""

    async def main() -> None:
        limits = SamplingParameters(max_tokens=30)
        async with served(encoder, lambda _: ["a" * 8] * 9, sampling=limits, rewritten_history="fork") as (one,):
            for number in range(3):
                await one.say({"role": "user", "content": f"{number}"})
            with pytest.raises(openai.BadRequestError, match=r"rollout\.max_response_tokens") as refused:
                for number in range(3, 6):
                    await one.say({"role": "user", "content": f"{number}"})
            assert refused.value.code == "context_length_exceeded"
            row = one.row()
        assert sum(int(segment.loss_mask.sum()) for segment in row.segments) <= 30

    asyncio.run(main())
