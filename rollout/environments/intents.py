"""Calls of unsafe tools. The intent to make them is saved before they are made, and they are never made again.

An intent without an outcome leaves unknown what the tool has done. Such an episode ends without a score, and so does
one that could only begin anew, because it would call the tool once more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

from tandem.protos.contracts import Message, Resume
from tandem.protos.types import Prompt, SamplingParameters, Trajectory
from tandem.rollout.environments.journal import Episode, unfinished_row

Save = Callable[[Trajectory], Awaitable[None]]
"""Stores an unfinished trajectory. Raises UnavailableError unless it is stored in time."""


class UnrepeatableError(Exception):
    """An episode with intents can neither go on nor begin anew. The message says why."""


def calls_one_of(action: Message, tools: Collection[str]) -> bool:
    """Whether the policy's message has a call of one of these tools that can be read."""
    calls = action.get("tool_calls", ()) if tools else ()
    return any("error" not in call and call["function"]["name"] in tools for call in calls)


def check_repeatable(episode: Episode, resume: Resume) -> None:
    """Raises UnrepeatableError if an interrupted episode cannot go on, and must not begin anew."""
    if not episode.intents:
        return
    if episode.intents[-1] == len(episode.rewards):
        raise UnrepeatableError(f"turn {episode.intents[-1]} called an unsafe tool, and its outcome is unknown")
    if resume == "restart":
        raise UnrepeatableError("its environment cannot go on, and an unsafe tool was called")


def unscored_row(
    episode: Episode, prompt: Prompt, sampling: SamplingParameters, trajectory_id: int, why: str
) -> Trajectory:
    """An interrupted episode as a trajectory that gets no score, with the reason as `unscored` of its metadata."""
    told = {"unscored": why, "num_turns": len(episode.turns), "messages": episode.messages}
    row = unfinished_row(episode, prompt, sampling, trajectory_id, None)
    return replace(row, finish_reason="error", text="\n".join(episode.turns), metadata=told)
