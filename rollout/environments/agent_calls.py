"""The calls of an agent: requests for a chat completion in OpenAI's form, and errors in the same form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.protos.contracts import JsonObject, Message
from tandem.rollout.environments.chat_messages import arguments_of

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXTS = ("text", "input_text", "output_text")


class RefusedCallError(Exception):
    """A call gets an error instead of an answer. `status` is that of HTTP; clients do not repeat a 400."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    @property
    def body(self) -> JsonObject:
        """The error in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A request for the policy's next message. What differs from the run's sampling parameters is not read."""

    messages: Sequence[Message]
    tools: Sequence[JsonObject] = ()
    may_call: bool = True
    """Whether the tool calls in the answer are read."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    model: str = ""
    stream: bool = False
    stream_usage: bool = False


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The policy's message, as a turn of its session."""

    turn: int
    message: Message
    finish_reason: Literal["stop", "length", "tool_calls"]
    num_prompt_tokens: int
    num_sampled_tokens: int


def read_call(body: object) -> ChatCall:
    """Reads the JSON value of a request. Raises RefusedCallError for what the policy cannot answer."""
    if not isinstance(body, dict):
        raise RefusedCallError("the request is no JSON object")
    if body.get("n") not in (None, 1):
        raise RefusedCallError("n: one answer a call; call again for another one")
    if (form := body.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise RefusedCallError(f"response_format {json.dumps(form):.80}: answers are sampled as plain text only")
    if body.get("functions"):
        raise RefusedCallError("functions: name them in `tools`")
    if (choice := body.get("tool_choice") or "auto") not in ("auto", "none"):
        raise RefusedCallError(f'tool_choice {json.dumps(choice):.80}: it may be "auto" or "none"')
    return ChatCall(
        messages=tuple(_messages(body.get("messages"))),
        tools=tuple(_tool(number, one) for number, one in enumerate(_list(body, "tools"))),
        may_call=choice == "auto",
        max_tokens=_max_tokens(body),
        stop=_stop(body.get("stop")),
        model=body["model"] if isinstance(body.get("model"), str) else "",
        stream=body.get("stream") is True,
        stream_usage=bool(_mapping(body, "stream_options").get("include_usage")),
    )


def key_of(message: Message) -> str:
    """Equal for messages that say the same: white space around what the policy said, the ids of its calls and the
    spelling of their arguments are no difference.
    """
    is_own = message["role"] == "assistant"
    calls = [(call["function"]["name"], arguments_of(call)) for call in message.get("tool_calls", ())]
    content = message["content"].strip() if is_own else message["content"]
    return json.dumps([message["role"], content, calls, message.get("tool_call_id")], sort_keys=True)


def _messages(values: object) -> Iterator[Message]:
    if not isinstance(values, list) or not values:
        raise RefusedCallError("messages: a list of at least one message is needed")
    names: dict[str | None, str] = {}  # of the tools, by the id of the call: many templates want it beside a result
    for number, value in enumerate(values):
        place = f"messages[{number}]"
        role = _ROLES.get(str(value.get("role"))) if isinstance(value, dict) else None
        if role is None:
            raise RefusedCallError(f"{place}: a message has a role, one of {', '.join(_ROLES)}")
        message: dict[str, object] = {"role": role, "content": _text(place, value.get("content"))}
        if role == "assistant" and value.get("tool_calls"):
            calls = [_tool_call(place, call) for call in _list(value, "tool_calls")]
            message["tool_calls"] = calls
            names.update((call["id"], call["function"]["name"]) for call in calls)
        if role == "tool":
            call_id = _call_id(place, value.get("tool_call_id"))
            message |= {"tool_call_id": call_id, "name": value.get("name") or names.get(call_id, "")}
        yield message


def _text(place: str, content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") not in _TEXTS or not isinstance(part.get("text"), str):
            raise RefusedCallError(f"{place}: content {json.dumps(part):.80}: the policy reads text only")
        texts.append(part["text"])
    return "".join(texts)


def _tool_call(place: str, call: object) -> JsonObject:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedCallError(f"{place}: a tool call has a function with a name")
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": _call_id(place, call.get("id")),
        "type": "function",
        "function": {"name": function["name"], "arguments": text},
    }


def _call_id(place: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RefusedCallError(f"{place}: the id of a tool call is a text")
    return value


def _tool(number: int, tool: object) -> JsonObject:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedCallError(f"tools[{number}]: a tool has type function, and a function with a name")
    return tool


def _max_tokens(body: Mapping[str, object]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        asked = body.get(name)
        if asked is None:
            continue
        if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
            raise RefusedCallError(f"{name} is {asked!r:.80}; it must be a whole number of at least 1")
        return asked
    return None


def _stop(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RefusedCallError("stop: a text, or a list of texts")
    return tuple(texts)


def _list(body: Mapping[str, object], name: str) -> list[object]:
    value = body.get(name) or []
    if not isinstance(value, list):
        raise RefusedCallError(f"{name}: a list is needed")
    return value


def _mapping(body: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = body.get(name) or {}
    if not isinstance(value, dict):
        raise RefusedCallError(f"{name}: an object is needed")
    return value
