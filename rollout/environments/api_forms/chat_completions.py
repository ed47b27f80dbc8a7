"""Calls in the form of OpenAI's chat completions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from tandem.protos.contracts import JsonObject, Message
from tandem.rollout.environments.agent_calls import ChatAnswer, ChatCall, RefusedCallError
from tandem.rollout.environments.api_forms.form import (
    ApiForm,
    Recall,
    id_of,
    least_one,
    list_in,
    model_of,
    names_of_calls,
    object_in,
    openai_error,
    refuse,
    text_of,
    texts_of,
    tool_call,
)

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXTS = ("text", "input_text", "output_text")


def _read(request: JsonObject, _recall: Recall) -> ChatCall:
    if request.get("n") not in (None, 1):
        raise RefusedCallError("n: one answer a call; call again for another one")
    if (form := request.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise RefusedCallError(f"response_format {json.dumps(form):.80}: answers are sampled as plain text only")
    refuse(request, {"functions": "name them in `tools`"})
    object_in(request, "stream_options")
    if (choice := request.get("tool_choice") or "auto") not in ("auto", "none"):
        raise RefusedCallError(f'tool_choice {json.dumps(choice):.80}: it may be "auto" or "none"')
    limits = [least_one(name, request.get(name)) for name in ("max_completion_tokens", "max_tokens")]
    return ChatCall(
        messages=tuple(_messages(request.get("messages"))),
        tools=tuple(_tool(number, one) for number, one in enumerate(list_in(request, "tools"))),
        may_call=choice == "auto",
        max_tokens=limits[0] or limits[1],
        stop=texts_of("stop", request.get("stop")),
    )


def _messages(values: object) -> Iterator[Message]:
    if not isinstance(values, list) or not values:
        raise RefusedCallError("messages: a list of at least one message is needed")
    names: dict[str | None, str] = {}
    for number, value in enumerate(values):
        place = f"messages[{number}]"
        role = _ROLES.get(str(value.get("role"))) if isinstance(value, dict) else None
        if role is None:
            raise RefusedCallError(f"{place}: a message has a role, one of {', '.join(_ROLES)}")
        message: dict[str, object] = {"role": role, "content": text_of(place, value.get("content"), _TEXTS)}
        if role == "assistant" and value.get("tool_calls"):
            message["tool_calls"] = [_tool_call(place, call) for call in list_in(value, "tool_calls")]
            names.update(names_of_calls([message]))
        if role == "tool":
            call_id = id_of(place, value.get("tool_call_id"))
            message |= {"tool_call_id": call_id, "name": value.get("name") or names.get(call_id, "")}
        yield message


def _tool_call(place: str, call: object) -> JsonObject:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise RefusedCallError(f"{place}: a tool call has a function with a name")
    return tool_call(place, call.get("id"), function.get("name"), function.get("arguments") or "{}")


def _tool(number: int, tool: object) -> JsonObject:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedCallError(f"tools[{number}]: a tool has type function, and a function with a name")
    return tool


def _answer(request: JsonObject, answer: ChatAnswer, name: str) -> JsonObject:
    choice = {"index": 0, "message": _message(answer), "finish_reason": answer.finish_reason, "logprobs": None}
    common = _common(request, name)
    return {**common, "object": "chat.completion", "choices": [choice], "usage": _usage(answer)}


def _events(request: JsonObject, answer: ChatAnswer, name: str) -> str:
    """The whole message, why it ended, and the usage if it is wanted."""
    message = _message(answer)
    calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
    delta = {**message, **({"tool_calls": calls} if calls else {})}
    common = {**_common(request, name), "object": "chat.completion.chunk"}
    chunks: list[JsonObject] = [
        {**common, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**common, "choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish_reason}]},
    ]
    if object_in(request, "stream_options").get("include_usage"):
        chunks.append({**common, "choices": [], "usage": _usage(answer)})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def _message(answer: ChatAnswer) -> Message:
    if not answer.message.get("tool_calls"):
        return answer.message
    return {**answer.message, "content": answer.message["content"] or None}


def _common(request: JsonObject, name: str) -> JsonObject:
    return {"id": f"chatcmpl-{name}", "created": int(time.time()), "model": model_of(request)}


def _usage(answer: ChatAnswer) -> JsonObject:
    num_prompt, num_sampled = answer.num_prompt_tokens, answer.num_sampled_tokens
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}


FORM = ApiForm(("chat/completions",), _read, _answer, _events, openai_error)
