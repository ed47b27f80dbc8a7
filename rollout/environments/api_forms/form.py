"""What the forms of calls have in common: how a form is described, and how its values are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tandem.protos.contracts import JsonObject, Message
from tandem.rollout.environments.agent_calls import ChatAnswer, ChatCall, RefusedCallError

MODEL = "policy"
"""The name of the policy, where a call names no model."""

Recall = Callable[[str], Sequence[Message]]
"""The messages up to and with an answer of this session, by the answer's name. Raises RefusedCallError."""


@dataclass(frozen=True, slots=True)
class ApiForm:
    """How an API writes calls of the policy, their answers and errors.

    `request` is the JSON object of a call, `name` that of its answer.
    """

    paths: tuple[str, ...]
    """Below the address of a session."""
    read: Callable[[JsonObject, Recall], ChatCall]
    """Raises RefusedCallError for what the policy cannot answer."""
    answer: Callable[[JsonObject, ChatAnswer, str], JsonObject]
    events: Callable[[JsonObject, ChatAnswer, str], str]
    """The answer as server-sent events."""
    error: Callable[[RefusedCallError], JsonObject]


def openai_error(error: RefusedCallError) -> JsonObject:
    """The error in the form of OpenAI's APIs."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def typed_events(events: Iterable[JsonObject]) -> str:
    """Server-sent events that have their `type` as name."""
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


def model_of(request: JsonObject) -> str:
    model = request.get("model")
    return model if isinstance(model, str) and model else MODEL


def text_of(place: str, content: object, types: tuple[str, ...]) -> str:
    """The text of a content: None, a text, or parts of these types, which have a `text`."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, dict) or part.get("type") not in types or not isinstance(part.get("text"), str):
            raise RefusedCallError(f"{place}: content {json.dumps(part):.80}: the policy reads text only")
        texts.append(part["text"])
    return "".join(texts)


def tool_call(place: str, call_id: object, name: object, arguments: object) -> JsonObject:
    """A call of a tool as chat messages have it."""
    if not isinstance(name, str):
        raise RefusedCallError(f"{place}: a tool call has a function with a name")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id_of(place, call_id), "type": "function", "function": {"name": name, "arguments": text or "{}"}}


def names_of_calls(messages: Iterable[Message]) -> dict[str | None, str]:
    """The names of the called tools, by the id of the call: many templates want them beside a result."""
    return {call["id"]: call["function"]["name"] for one in messages for call in one.get("tool_calls", ())}


def id_of(place: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RefusedCallError(f"{place}: the id of a tool call is a text")
    return value


def function_tool(place: str, tool: JsonObject, schema: str) -> JsonObject:
    """A function for the chat template, from an object with its name and description, and `schema` for its arguments.

    How strictly a client wants its calls to follow the schema is left out: they are sampled freely.
    """
    if not isinstance(tool.get("name"), str):
        raise RefusedCallError(f"{place}: a tool has a name")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get(schema)}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def least_one(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RefusedCallError(f"{name} is {value!r:.80}; it must be a whole number of at least 1")
    return value


def texts_of(name: str, value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RefusedCallError(f"{name}: a text, or a list of texts")
    return tuple(texts)


def list_in(request: JsonObject, name: str) -> list[object]:
    value = request.get(name) or []
    if not isinstance(value, list):
        raise RefusedCallError(f"{name}: a list is needed")
    return value


def objects_in(request: JsonObject, name: str) -> list[JsonObject]:
    values: list[JsonObject] = []
    for number, value in enumerate(list_in(request, name)):
        if not isinstance(value, dict):
            raise RefusedCallError(f"{name}[{number}]: an object is needed")
        values.append(value)
    return values


def object_in(request: JsonObject, name: str) -> Mapping[str, object]:
    value = request.get(name) or {}
    if not isinstance(value, dict):
        raise RefusedCallError(f"{name}: an object is needed")
    return value


def refuse(request: JsonObject, reasons: Mapping[str, str]) -> None:
    """Refuses a call that asks for one of these, unless it is None, false or empty."""
    for name, reason in reasons.items():
        if request.get(name):
            raise RefusedCallError(f"{name}: {reason}")
