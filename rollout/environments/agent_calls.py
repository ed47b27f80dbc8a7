"""The calls of an agent, whatever API they came by (`api_forms`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tandem.protos.contracts import JsonObject, Message
from tandem.rollout.environments.chat_messages import arguments_of


class RefusedCallError(Exception):
    """A call gets an error instead of an answer. `status` is that of HTTP; clients do not repeat a 400."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A request for the policy's next message. What differs from the run's sampling parameters is not read."""

    messages: Sequence[Message]
    tools: Sequence[JsonObject] = ()
    may_call: bool = True
    """Whether the tool calls in the answer are read."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_instructions: int | None = None
    """A later call may name the answer in place of the messages up to it, but for so many at their start. None: no call
    can name it.
    """


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The policy's message, as a turn of its session."""

    turn: int
    message: Message
    finish_reason: Literal["stop", "length", "tool_calls"]
    num_prompt_tokens: int
    num_sampled_tokens: int


def key_of(message: Message) -> str:
    """Equal for messages that say the same: white space around what the policy said, the ids of its calls and the
    spelling of their arguments are no difference.
    """
    is_own = message["role"] == "assistant"
    calls = [(call["function"]["name"], arguments_of(call)) for call in message.get("tool_calls", ())]
    content = message["content"].strip() if is_own else message["content"]
    return json.dumps([message["role"], content, calls, message.get("tool_call_id")], sort_keys=True)
