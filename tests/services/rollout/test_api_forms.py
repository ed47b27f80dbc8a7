"""OpenAI's Responses API and Anthropic's Messages API: the conversations, tokens and errors of chat completions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tandem.protos.types import Trajectory
from tandem.services.data.chat import ChatEncoder
from tests.support.agent_sessions import Served, served
from tests.support.agents import TOOL
from tests.support.episodes import texts_of
from tests.support.tiny_model import TOOL_TEMPLATE, build_tiny_model

FUNCTION = TOOL["function"]
ITEM_TOOL = {"type": "function", "strict": True, **FUNCTION}
BLOCK_TOOL = {"name": "add", "description": "Adds.", "input_schema": FUNCTION["parameters"]}
CALLS = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
WORDS = [f"I add.{CALLS}{CALLS}", "It is 2.", CALLS, ""]
SYSTEM, ASKED, THANKS = "Be brief.", "What is 1 + 1?", "Once more."


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    return ChatEncoder(str(build_tiny_model(tmp_path_factory.mktemp("model"), chat_template=TOOL_TEMPLATE)))


def anthropic_client(one: Served) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=one.base_url, api_key=one.session.api_key, max_retries=0)


async def by_chat(one: Served, stream: bool) -> list[Any]:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASKED}]
    answers = []
    for turn in range(4):
        answers.append(await one.say(*messages, tools=[TOOL]))
        calls = answers[-1].get("tool_calls", ())
        messages += [answers[-1], *({"role": "tool", "tool_call_id": call["id"], "content": "2"} for call in calls)]
        messages += [{"role": "user", "content": THANKS}] if turn == 1 else []
    return [answer.get("content") or "" for answer in answers]


async def by_responses(one: Served, stream: bool, named: bool = False) -> list[Any]:
    """`named`: later calls name the answer before them, and do not repeat what was said."""
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": ASKED}]}]
    answers, previous = [], None
    for turn in range(4):
        request = {"model": "any", "instructions": SYSTEM, "input": items, "tools": [ITEM_TOOL]}
        request |= {"previous_response_id": previous} if previous else {}
        if stream:
            async with one.client.responses.stream(**request) as events:
                answers.append(await events.get_final_response())
        else:
            answers.append(await one.client.responses.create(**request))
        if named:
            items, previous = [], answers[-1].id
        items += [] if named else [item.model_dump(exclude_none=True) for item in answers[-1].output]
        calls = [item.call_id for item in answers[-1].output if item.type == "function_call"]
        items += [{"type": "function_call_output", "call_id": call, "output": "2"} for call in calls]
        items += [{"role": "user", "content": THANKS}] if turn == 1 else []
    kinds = [[item.type for item in answer.output] for answer in answers]
    assert kinds == [["message", "function_call", "function_call"], ["message"], ["function_call"], ["message"]]
    assert {answer.status for answer in answers} == {"completed"}
    return [answer.output_text for answer in answers]


async def by_named_responses(one: Served, stream: bool) -> list[Any]:
    return await by_responses(one, stream, named=True)


async def by_messages(one: Served, stream: bool) -> list[Any]:
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    answers = []
    async with anthropic_client(one) as client:
        for turn in range(4):
            request = {"model": "any", "system": SYSTEM, "messages": messages, "tools": [BLOCK_TOOL]}
            if stream:
                async with client.messages.stream(max_tokens=300, **request) as events:
                    answers.append(await events.get_final_message())
            else:
                answers.append(await client.messages.create(max_tokens=300, **request))
            calls = [block.id for block in answers[-1].content if block.type == "tool_use"]
            found = [{"type": "tool_result", "tool_use_id": call, "content": "2"} for call in calls]
            found += [{"type": "text", "text": THANKS}] if turn == 1 else []
            said = [block.model_dump(exclude_none=True) for block in answers[-1].content]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": found}]
    assert [answer.stop_reason for answer in answers] == ["tool_use", "end_turn", "tool_use", "end_turn"]
    assert answers[0].content[1].input == {"a": 1}
    return ["".join(block.text for block in answer.content if block.type == "text") for answer in answers]


async def talked(encoder: ChatEncoder, talk: Callable[[Served, bool], Awaitable[list[Any]]], stream: bool) -> Any:
    async with served(encoder, lambda _: WORDS, max_turn_tokens=200) as (one,):
        said = await talk(one, stream)
        return said, one.row()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("talk", [by_responses, by_named_responses, by_messages])
def test_every_api_continues_the_same_conversation_with_the_same_tokens(
    encoder: ChatEncoder, talk: Callable[[Served, bool], Awaitable[list[Any]]], stream: bool
) -> None:
    said, row = asyncio.run(talked(encoder, talk, stream))
    expected_said, expected = asyncio.run(talked(encoder, by_chat, False))
    assert said == expected_said == ["I add.", "It is 2.", "", ""]
    assert texts_of(row) == [[f"{word}<|im_end|>" for word in WORDS]], "one segment"
    (segment,), (other,) = row.segments, expected.segments
    assert segment.ids.tolist() == other.ids.tolist()
    assert segment.behavior_logprobs.tolist() == other.behavior_logprobs.tolist()
    assert row.metadata["messages"][:-1] == expected.metadata["messages"][:-1]


def test_another_answer_can_be_named_and_unknown_ones_are_refused(encoder: ChatEncoder) -> None:
    async def main() -> Trajectory:
        async with served(encoder, lambda _: ["one", "two", "three"], number=2, rewritten_history="fork") as (
            one,
            other,
        ):
            create = one.client.responses.create
            first = await create(model="any", input=ASKED, instructions=SYSTEM)
            await create(model="any", input=THANKS, previous_response_id=first.id)
            await create(model="any", input=THANKS, previous_response_id=first.id, instructions=SYSTEM)
            for unknown in (first.id.replace("-0-0", "-0-7"), "resp_x", "resp_" + "9" * 5000):
                with pytest.raises(openai.BadRequestError, match="this session has not given the response") as refused:
                    await create(model="any", input=THANKS, previous_response_id=unknown)
                assert refused.value.code == "previous_response_not_found"
            with pytest.raises(openai.BadRequestError, match="this session has not given the response"):
                await other.client.responses.create(model="any", input=THANKS, previous_response_id=first.id)
            return one.row()

    row = asyncio.run(main())
    said = [["one<|im_end|>", "three<|im_end|>"], ["two<|im_end|>"]]
    assert texts_of(row) == said, "other instructions begin another conversation"


def test_a_cut_answer_says_so_in_every_form(encoder: ChatEncoder) -> None:
    async def main() -> None:
        async with served(encoder, lambda _: [CALLS] * 2) as (one,), anthropic_client(one) as client:
            cut = await one.client.responses.create(model="any", input=ASKED, max_output_tokens=5, tools=[ITEM_TOOL])
            assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert (cut.output_text, cut.usage.output_tokens) == (CALLS[:5], 5), "a call that is cut is text"
            asked = [{"role": "user", "content": ASKED}]
            cut = await client.messages.create(model="any", messages=asked, max_tokens=5, tools=[BLOCK_TOOL])
            assert (cut.stop_reason, cut.content[0].text, cut.usage.output_tokens) == ("max_tokens", CALLS[:5], 5)

    asyncio.run(main())


@pytest.mark.parametrize("path", ["messages", "v1/messages"])
def test_anthropics_key_and_errors(encoder: ChatEncoder, path: str) -> None:
    async def main() -> None:
        async with served(encoder, lambda _: ["one"]) as (one,), httpx.AsyncClient() as client:
            call = {"messages": [{"role": "user", "content": ASKED}]}
            for headers, status, kind in (
                ({"x-api-key": "wrong"}, 401, "authentication_error"),
                ({}, 401, "authentication_error"),
                ({"x-api-key": one.session.api_key}, 200, None),
            ):
                done = await client.post(f"{one.base_url}/{path}", json=call, headers=headers)
                assert (done.status_code, done.json().get("error", {}).get("type")) == (status, kind)
            key = {"x-api-key": one.session.api_key}
            long = {"messages": [{"role": "user", "content": "?" * 2000}]}
            done = await client.post(f"{one.base_url}/{path}", json=long, headers=key)
            assert done.json()["type"] == "error" and done.json()["error"]["code"] == "context_length_exceeded"
            del one.sessions[one.name]
            done = await client.post(f"{one.base_url}/{path}", json=call, headers=key)
            assert (done.status_code, done.json()["error"]["type"]) == (404, "not_found_error")

    asyncio.run(main())


ITEM = {"role": "user", "content": ASKED}
IMAGE = [{"type": "image", "source": {}}]


def test_what_cannot_be_answered_is_refused_in_the_form_of_its_api(encoder: ChatEncoder) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("responses", {}, "input: a text or a list of at least one item is needed"),
        ("responses", {"input": 3}, "input: a text or a list of items is needed"),
        ("responses", {"input": [{"type": "reasoning"}]}, "reads items of type message, function_call and"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]: item"),
        ("responses", {"input": ["text"]}, "input[0]: item"),
        ("responses", {"input": [{"role": "robot", "content": "?"}]}, "input[0]: a message has a role"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "reads text only"),
        ("responses", {"input": [{"type": "function_call", "call_id": "x"}]}, "a function with a name"),
        ("responses", {"input": [{"type": "function_call_output", "call_id": [1]}]}, "id of a tool call is a text"),
        ("responses", {"input": ASKED, "tools": [{"type": "web_search"}]}, 'tools[0]: type "web_search"'),
        ("responses", {"input": ASKED, "tools": [{"type": "function"}]}, "tools[0]: a tool has a name"),
        ("responses", {"input": ASKED, "tools": [1]}, "tools[0]: an object is needed"),
        ("responses", {"input": ASKED, "tool_choice": "required"}, 'tool_choice "required"'),
        ("responses", {"input": ASKED, "text": {"format": {"type": "json_object"}}}, "sampled as plain text only"),
        ("responses", {"input": ASKED, "max_output_tokens": 0}, "max_output_tokens is 0"),
        ("responses", {"input": ASKED, "truncation": "auto"}, "truncation: nothing is left out"),
        ("responses", {"input": ASKED, "background": True}, "background: "),
        ("responses", {"input": ASKED, "conversation": "conv_1"}, "conversation: "),
        ("responses", {"input": ASKED, "prompt": {"id": "x"}}, "prompt: there are no stored prompts"),
        ("responses", {"input": ASKED, "previous_response_id": 3}, "the id of a response is a text"),
        ("messages", {}, "messages: a list of at least one message is needed"),
        ("messages", {"messages": [{"role": "tool", "content": "?"}]}, "messages[0]: a message has a role"),
        ("messages", {"messages": [{"role": "user", "content": IMAGE}]}, "the policy reads text only"),
        ("messages", {"messages": [{"role": "user", "content": 3}]}, "the policy reads text only"),
        ("messages", {"messages": [ITEM, {"role": "assistant", "content": "It"}]}, "not begun by the caller"),
        ("messages", {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}, ITEM]}, "text only"),
        ("messages", {"messages": [ITEM], "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]: type"),
        ("messages", {"messages": [ITEM], "tool_choice": {"type": "any"}}, 'tool_choice "any"'),
        ("messages", {"messages": [ITEM], "thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking: "),
        ("messages", {"messages": [ITEM], "output_config": {"format": {"type": "json_schema"}}}, "as plain text only"),
        ("messages", {"messages": [ITEM], "stop_sequences": [1]}, "stop_sequences: a text, or a list of texts"),
        ("messages", {"messages": [ITEM], "container": "x"}, "container: there is none"),
    ]

    async def main() -> None:
        async with served(encoder, lambda _: ["one"]) as (one,), httpx.AsyncClient() as client:
            headers = {"x-api-key": one.session.api_key}
            for path, call, told in cases:
                done = await client.post(f"{one.base_url}/{path}", json=call, headers=headers)
                said = done.json()
                assert done.status_code == 400 and told in said["error"]["message"], (call, said)
                assert said["error"]["type"] == "invalid_request_error"
                assert (said.get("type") == "error") == (path == "messages")
            assert (await one.say(ITEM))["content"] == "one", "the session goes on"

    asyncio.run(main())
