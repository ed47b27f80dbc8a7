"""Tool calls in chat messages: their arguments are JSON text, as in OpenAI's API, and templates write the text."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tandem.protos.contracts import JsonObject, Message


def arguments_of(call: JsonObject) -> object:
    """The arguments of a call as the value that their JSON text has, or the text if it is none."""
    text: str = call["function"]["arguments"]
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value


def for_template(messages: Sequence[Message]) -> list[Message]:
    """The messages with the arguments of calls as values, which chat templates write as JSON themselves."""
    return [
        {**message, "tool_calls": [_with_value(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _with_value(call: JsonObject) -> JsonObject:
    return {**call, "function": {**call["function"], "arguments": arguments_of(call)}}
