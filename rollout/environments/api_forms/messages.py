"""Calls in the form of Anthropic's Messages API.

Its results of tools are blocks of the user's message, and messages of their own for the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

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
    refuse,
    text_of,
    texts_of,
    tool_call,
    typed_events,
)

_ROLES = ("user", "assistant", "system")
_TEXTS = ("text",)
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
_REFUSED = {"container": "there is none", "mcp_servers": "give the agent their tools"}


def _read(request: JsonObject, _recall: Recall) -> ChatCall:
    refuse(request, _REFUSED)
    choice = object_in(request, "tool_choice").get("type") or "auto"
    if choice not in ("auto", "none"):
        raise RefusedCallError(f'tool_choice {json.dumps(choice):.80}: its type may be "auto" or "none"')
    if object_in(request, "thinking").get("type") == "enabled":
        raise RefusedCallError('thinking: answers have no blocks of thoughts; its type may be "disabled" or "adaptive"')
    if form := object_in(request, "output_config").get("format") or request.get("output_format"):
        raise RefusedCallError(f"output format {json.dumps(form):.80}: answers are sampled as plain text only")
    messages = list(_messages(objects_in(request, "messages")))
    if not messages:
        raise RefusedCallError("messages: a list of at least one message is needed")
    if messages[-1]["role"] == "assistant":
        raise RefusedCallError("messages: the last one is the policy's, and answers are not begun by the caller")
    if system := text_of("system", request.get("system"), _TEXTS):
        messages.insert(0, {"role": "system", "content": system})
    return ChatCall(
        messages=messages,
        tools=tuple(_tool(number, one) for number, one in enumerate(objects_in(request, "tools"))),
        may_call=choice == "auto",
        max_tokens=least_one("max_tokens", request.get("max_tokens")),
        stop=texts_of("stop_sequences", request.get("stop_sequences")),
    )


def _messages(values: list[JsonObject]) -> Iterator[Message]:
    names: dict[str | None, str] = {}
    for number, value in enumerate(values):
        place, role, content = f"messages[{number}]", value.get("role"), value.get("content")
        if role not in _ROLES:
            raise RefusedCallError(f"{place}: a message has a role, one of {', '.join(_ROLES)}")
        one_text: list[JsonObject] = [{"type": "text", "text": "" if content is None else content}]
        blocks: list[JsonObject] = content if isinstance(content, list) else one_text
        if role == "assistant":
            message = _said(place, blocks)
            names.update(names_of_calls([message]))
            yield message
        else:
            yield from _heard(place, role, blocks, names)


def _said(place: str, blocks: list[JsonObject]) -> Message:
    """A message of the policy."""
    is_call = [isinstance(block, dict) and block.get("type") == "tool_use" for block in blocks]
    texts = [block for block, calls in zip(blocks, is_call, strict=True) if not calls]
    calls = [
        tool_call(place, block.get("id"), block.get("name"), block.get("input") or {})
        for block, calls in zip(blocks, is_call, strict=True)
        if calls
    ]
    message = {"role": "assistant", "content": text_of(place, texts, _TEXTS)}
    return {**message, "tool_calls": calls} if calls else message


def _heard(place: str, role: str, blocks: list[JsonObject], names: Mapping[str | None, str]) -> Iterator[Message]:
    """The messages in one of the user, in order: each result of a tool, and the texts between them."""
    texts: list[JsonObject] = []
    for block in blocks:
        if role == "user" and isinstance(block, dict) and block.get("type") == "tool_result":
            if texts:
                yield {"role": role, "content": text_of(place, texts, _TEXTS)}
                texts = []
            call_id = id_of(place, block.get("tool_use_id"))
            content = text_of(place, block.get("content"), _TEXTS)
            yield {"role": "tool", "content": content, "tool_call_id": call_id, "name": names.get(call_id, "")}
        else:
            texts.append(block)
    if texts or not blocks:
        yield {"role": role, "content": text_of(place, texts, _TEXTS)}


def _tool(number: int, tool: JsonObject) -> JsonObject:
    place = f"tools[{number}]"
    if tool.get("type") not in (None, "custom"):
        raise RefusedCallError(f"{place}: type {json.dumps(tool['type']):.80}: a tool is the agent's own")
    return function_tool(place, tool, "input_schema")


def _answer(request: JsonObject, answer: ChatAnswer, name: str) -> JsonObject:
    message = answer.message
    content: list[JsonObject] = [{"type": "text", "text": message["content"]}] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return {
        **_begun(request, answer, name),
        "content": content,
        "stop_reason": _STOP_REASONS[answer.finish_reason],
        "usage": {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_sampled_tokens},
    }


def _begun(request: JsonObject, answer: ChatAnswer, name: str) -> JsonObject:
    """The message before its first block."""
    return {
        "id": f"msg_{name}",
        "type": "message",
        "role": "assistant",
        "model": model_of(request),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": answer.num_prompt_tokens, "output_tokens": 0},
    }


def _events(request: JsonObject, answer: ChatAnswer, name: str) -> str:
    """Each block in one piece."""
    whole = _answer(request, answer, name)
    events: list[JsonObject] = [{"type": "message_start", "message": _begun(request, answer, name)}]
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            begun, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            begun = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        events += [
            {"type": "content_block_start", "index": index, "content_block": begun},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    events.append({"type": "message_delta", "delta": end, "usage": {"output_tokens": answer.num_sampled_tokens}})
    return typed_events([*events, {"type": "message_stop"}])


def _error(error: RefusedCallError) -> JsonObject:
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    code = {"code": error.code} if error.code else {}  # Anthropic has none; agents find the end of their room by it
    return {"type": "error", "error": {"type": kind, "message": str(error), **code}}


FORM = ApiForm(("messages", "v1/messages"), _read, _answer, _events, _error)  # its client appends /v1/messages
