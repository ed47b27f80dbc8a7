"""Why an episode ends, and the limits that end it, in the order in which they are looked at.

Before a turn: turns, tokens of the episode, the model's context, wall time of the episode. While it is sampled: its
wall time, the episode's, and its tokens. After it: calls that could not be read, and turns with invalid calls in a row.
Last, the environment's own ends, calls past their limit, and time-outs of tools.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from tandem.protos.contracts import Message, ToolOutcome
from tandem.protos.types import Trajectory
from tandem.rollout.environments.config import EnvironmentConfig

Stop = Literal[
    "terminated",
    "truncated",
    "turns",
    "episode_tokens",
    "turn_tokens",
    "context",
    "episode_time",
    "turn_time",
    "parse_error",
    "invalid_calls",
    "refused",
    "call_limit",
    "tool_timeout",
]
"""Why an episode ended. `terminated`, `truncated`: the environment said so. `turns`: `max_turns`. `episode_tokens`:
`rollout.max_response_tokens`. `turn_tokens`: `max_turn_tokens`. `context`: the longest text of the engine.
`episode_time`: `episode_seconds`. `turn_time`: `turn_seconds`. `parse_error`: a call could not be read.
`invalid_calls`: `max_invalid_calls`. `refused`: a call of an agent was refused. `call_limit`: a call past the tools'
`max_calls`. `tool_timeout`: a tool did not answer in time.
"""
STOPS: tuple[str, ...] = get_args(Stop)
LENGTH_STOPS: Collection[Stop] = ("episode_tokens", "turn_tokens", "context")
"""No token was left: the finish reason is "length"."""
LIMITS: Collection[str] = [stop for stop in STOPS if stop not in ("terminated", "truncated")]
"""Ends that the environment does not know of."""
NO_STEP_STOPS: Collection[str] = (*LENGTH_STOPS, "parse_error", "invalid_calls")
"""The environment may not have answered the last turn."""


class TurnTimeError(Exception):
    """A turn was not sampled in time. `stop` says which limit it was."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(stop)
        self.stop = stop


@dataclass(slots=True)
class Limits:
    """The limits of one attempt at an episode, which begins now. What tokens and messages show is not kept here, so an
    episode that goes on meets the same limits; only its wall time begins anew.
    """

    config: EnvironmentConfig
    began_at: float = field(default_factory=time.monotonic)

    def before_turn(self, num_turns: int, tokens_left: tuple[int, Stop]) -> Stop | None:
        """`tokens_left`: of `longest_turn`."""
        if num_turns == self.config.max_turns:
            return "turns"
        left, stop = tokens_left
        if num_turns > 0 and left < 1:
            return stop
        return "episode_time" if self.episode_seconds_left() <= 0.0 else None

    def turn_seconds(self) -> tuple[float | None, Stop]:
        """How long the next turn may take, None: any time; and why the episode ends after that."""
        in_episode, in_turn = self.episode_seconds_left(), self.config.turn_seconds or float("inf")
        stop: Stop = "episode_time" if in_episode <= in_turn else "turn_time"
        seconds = min(in_episode, in_turn)
        return (None if seconds == float("inf") else seconds), stop

    def after_turn(self, actions: Sequence[Message], tools: Collection[str]) -> Stop | None:
        """`actions`: the policy's messages, the newest last. `tools`: names of those that may be called."""
        calls = actions[-1].get("tool_calls", ())
        if self.config.policies.parse_error != "observation" and any("error" in call for call in calls):
            return "parse_error"
        most = self.config.max_invalid_calls
        if most and len(actions) >= most and all(is_invalid(action, tools) for action in actions[-most:]):
            return "invalid_calls"
        return None

    def after_step(self, outcomes: Iterable[ToolOutcome]) -> Stop | None:
        """Of a step that has not ended the episode."""
        policies, found = self.config.policies, {one["outcome"] for one in outcomes}
        if policies.call_limit != "observation" and "call_limit" in found:
            return "call_limit"
        return "tool_timeout" if policies.tool_timeout != "observation" and "timeout" in found else None

    def episode_seconds_left(self) -> float:
        """Infinite without `episode_seconds`."""
        if not self.config.episode_seconds:
            return float("inf")
        return self.began_at + self.config.episode_seconds - time.monotonic()


@contextlib.asynccontextmanager
async def in_time(seconds: float | None, stop: Stop) -> AsyncIterator[None]:
    """Cancels what takes longer, and raises TurnTimeError with `stop`. None: any time."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():  # of something within
            raise
        raise TurnTimeError(stop) from None


def longest_turn(in_episode: int, in_context: int, max_turn_tokens: int = 0) -> tuple[int, Stop]:
    """The most tokens of the next turn, and which limit a turn of that length has reached. `max_turn_tokens` 0: none.
    Of limits of the same length, it is the episode's, then the context's.
    """
    longest: tuple[int, Stop] = (in_context, "context") if in_context < in_episode else (in_episode, "episode_tokens")
    return (max_turn_tokens, "turn_tokens") if 0 < max_turn_tokens < longest[0] else longest


def is_invalid(action: Message, tools: Collection[str]) -> bool:
    """Whether a turn has calls, none of which can be read and names a tool."""
    calls = action.get("tool_calls", ())
    return bool(calls) and all("error" in call or call["function"]["name"] not in tools for call in calls)


def with_policy(row: Trajectory, config: EnvironmentConfig) -> Trajectory:
    """The trajectory of an episode that has ended; without a score if the recipe's policy says so, or if it has no
    sampled token, since a row without a version cannot be trained. Then its finish reason is "error".
    """
    stop = row.metadata["stop"]
    policies: Mapping[str, str] = dict(config.policies)
    if not any(segment.spans for segment in row.segments):
        why = f"nothing was sampled (it ended by {stop!r})"
    elif policies.get(stop) == "unscored":
        why = f"it ended by {stop!r}, which environment.policies leaves unscored"
    else:
        return row
    return replace(row, finish_reason="error", metadata={**row.metadata, "unscored": why})
