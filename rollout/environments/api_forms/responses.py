"""Calls in the form of OpenAI's Responses API.

A turn of the policy is several items here: its text, and each of its calls of tools.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from itertools import count

from tandem.protos.contracts import JsonObject, Message
from tandem.rollout.environments.agent_calls import ChatAnswer, ChatCall, RefusedCallError
from tandem.rollout.environments.api_forms.form import (
    ApiForm,
    Recall,
    function_tool,
    id_of,
    least_one,
    model_of,
    names_of_calls,
    object_in,
    objects_in,
    openai_error,
    refuse,
    text_of,
    tool_call,
    typed_events,
)

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text")
_ITEMS = "message, function_call and function_call_output"
_REFUSED = {
    "conversation": "conversations are not kept; use previous_response_id, or repeat all items",
    "background": "an answer is made while the call waits for it",
    "prompt": "there are no stored prompts",
}


def _read(request: JsonObject, recall: Recall) -> ChatCall:
    refuse(request, _REFUSED)
    form = object_in(object_in(request, "text"), "format") or {"type": "text"}
    if form.get("type") != "text":
        raise RefusedCallError(f"text.format {json.dumps(form):.80}: answers are sampled as plain text only")
    if (choice := request.get("tool_choice") or "auto") not in ("auto", "none"):
        raise RefusedCallError(f'tool_choice {json.dumps(choice):.80}: it may be "auto" or "none"')
    if request.get("truncation") not in (None, "disabled"):
        raise RefusedCallError('truncation: nothing is left out of a conversation; it may be "disabled"')
    instructions = request.get("instructions")
    first: list[Message] = []
    if instructions:
        first.append({"role": "system", "content": text_of("instructions", instructions, _TEXTS)})
    before = _before(request.get("previous_response_id"), recall)
    messages = [*first, *before, *_messages(request.get("input"), before)]
    if not messages:
        raise RefusedCallError("input: a text or a list of at least one item is needed")
    return ChatCall(
        messages=messages,
        tools=tuple(_tool(number, one) for number, one in enumerate(objects_in(request, "tools"))),
        may_call=choice == "auto",
        max_tokens=least_one("max_output_tokens", request.get("max_output_tokens")),
        num_instructions=len(first),
    )


def _before(name: object, recall: Recall) -> Sequence[Message]:
    if name is None:
        return ()
    if not isinstance(name, str):
        raise RefusedCallError("previous_response_id: the id of a response is a text")
    return recall(name.removeprefix("resp_"))


def _messages(items: object, before: Sequence[Message]) -> list[Message]:
    if items is None or isinstance(items, str):
        return [{"role": "user", "content": items}] if items else []
    if not isinstance(items, list):
        raise RefusedCallError("input: a text or a list of items is needed")
    names = names_of_calls(before)
    messages: list[Message] = []
    for number, item in enumerate(items):
        place = f"input[{number}]"
        kind = (item.get("type") or ("message" if "role" in item else None)) if isinstance(item, dict) else None
        if kind == "message":
            messages.append(_message(place, item))
        elif kind == "function_call":
            call = tool_call(place, item.get("call_id"), item.get("name"), item.get("arguments") or "{}")
            names |= {call["id"]: call["function"]["name"]}
            said = messages.pop() if messages and messages[-1]["role"] == "assistant" else None
            said = said or {"role": "assistant", "content": ""}
            messages.append({**said, "tool_calls": [*said.get("tool_calls", ()), call]})
        elif kind == "function_call_output":
            call_id = id_of(place, item.get("call_id"))
            content = text_of(place, item.get("output"), _TEXTS)
            messages.append(
                {"role": "tool", "content": content, "tool_call_id": call_id, "name": names.get(call_id, "")}
            )
        else:
            raise RefusedCallError(f"{place}: item {json.dumps(item):.80}: the policy reads items of type {_ITEMS}")
    return messages


def _message(place: str, item: JsonObject) -> Message:
    role = _ROLES.get(str(item.get("role")))
    if role is None:
        raise RefusedCallError(f"{place}: a message has a role, one of {', '.join(_ROLES)}")
    return {"role": role, "content": text_of(place, item.get("content"), _TEXTS)}


def _tool(number: int, tool: JsonObject) -> JsonObject:
    place = f"tools[{number}]"
    if tool.get("type") != "function":
        raise RefusedCallError(f"{place}: type {json.dumps(tool.get('type')):.80}: a tool has type function")
    return function_tool(place, tool, "parameters")


def _answer(request: JsonObject, answer: ChatAnswer, name: str) -> JsonObject:
    is_cut = answer.finish_reason == "length"
    num_prompt, num_sampled = answer.num_prompt_tokens, answer.num_sampled_tokens
    usage = {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_sampled,
    }
    end = {"status": "incomplete" if is_cut else "completed", "output": _items(answer, name), "usage": usage}
    cause = {"reason": "max_output_tokens"} if is_cut else None
    return {**_begun(request, name), **end, "incomplete_details": cause}


def _begun(request: JsonObject, name: str) -> JsonObject:
    """The response before its first item."""
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": request.get("instructions"),
        "max_output_tokens": request.get("max_output_tokens"),
        "metadata": request.get("metadata") or {},
        "model": model_of(request),
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": request.get("previous_response_id"),
        "text": {"format": {"type": "text"}},
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "truncation": "disabled",
        "usage": None,
    }


def _items(answer: ChatAnswer, name: str) -> list[JsonObject]:
    message, status = answer.message, "incomplete" if answer.finish_reason == "length" else "completed"
    items: list[JsonObject] = []
    if message["content"] or not message.get("tool_calls"):
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        said = {"type": "message", "role": "assistant", "content": [part]}
        items.append({"id": f"msg_{name}", "status": status, **said})
    for number, call in enumerate(message.get("tool_calls", ())):
        function = {"type": "function_call", "call_id": call["id"], **call["function"]}
        items.append({"id": f"fc_{name}_{number}", "status": status, **function})
    return items


def _events(request: JsonObject, answer: ChatAnswer, name: str) -> str:
    """Each item in one piece."""
    begun, whole = _begun(request, name), _answer(request, answer, name)
    events: list[JsonObject] = [{"type": f"response.{one}", "response": begun} for one in ("created", "in_progress")]
    for place, item in enumerate(whole["output"]):
        events += _item_events(item, place)
    events.append({"type": f"response.{whole['status']}", "response": whole})
    numbers = count()
    return typed_events({**event, "sequence_number": next(numbers)} for event in events)


def _item_events(item: JsonObject, place: int) -> Iterator[JsonObject]:
    at = {"item_id": item["id"], "output_index": place}
    if item["type"] == "message":
        (part,) = item["content"]
        at_part = {**at, "content_index": 0}
        text = {**at_part, "logprobs": []}
        yield _item_event("added", {**item, "status": "in_progress", "content": []}, place)
        yield {"type": "response.content_part.added", **at_part, "part": {**part, "text": ""}}
        yield {"type": "response.output_text.delta", **text, "delta": part["text"]}
        yield {"type": "response.output_text.done", **text, "text": part["text"]}
        yield {"type": "response.content_part.done", **at_part, "part": part}
    else:
        arguments = {"arguments": item["arguments"]}
        yield _item_event("added", {**item, "status": "in_progress", "arguments": ""}, place)
        yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **at, "name": item["name"], **arguments}
    yield _item_event("done", item, place)


def _item_event(what: str, item: JsonObject, place: int) -> JsonObject:
    return {"type": f"response.output_item.{what}", "output_index": place, "item": item}


FORM = ApiForm(("responses",), _read, _answer, _events, openai_error)
