"""Tool calls in chat messages: their arguments are JSON text, as in OpenAI's API, and templates write the text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

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
        {**message, "tool_calls": [_with_value(call) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list | tuple)
        else message
        for message in messages
    ]


def _with_value(call: object) -> object:
    """Leaves what is no call with text as arguments to the template: environments and data may have any."""
    match call:
        case {"function": {"arguments": str()}}:
            made = cast("JsonObject", call)
            return {**made, "function": {**made["function"], "arguments": arguments_of(made)}}
    return call
