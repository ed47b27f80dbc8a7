"""Repeats a recorded episode on its environment, with the recorded actions in place of the policy."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.protos.contracts import Message
from tandem.protos.errors import EpisodeError
from tandem.protos.types import Prompt, Trajectory, task_of
from tandem.rollout.environments.limits import LIMITS, NO_STEP_STOPS
from tandem.rollout.environments.source import OpenEnvironment

_SHOWN_CHARACTERS = 200
_ENDS = ("terminated", "truncated")
_UNANSWERED = (*NO_STEP_STOPS, "length")  # the last is of older recordings


@dataclass(frozen=True, slots=True)
class ObservationDifference:
    """What an environment showed or earned when the episode was recorded, and now."""

    num_turns: int
    """Turns of the policy before; 0: the observation of `reset`."""
    recorded: str
    repeated: str

    def __str__(self) -> str:
        place = f"after turn {self.num_turns - 1}" if self.num_turns else "of reset"
        return f"observation {place}: {self.recorded} was recorded, {self.repeated} was repeated"


async def first_other_observation(
    environment: OpenEnvironment,
    prompt: Prompt,
    recorded: Trajectory,
    *,
    seed: int,
    episode_id: str,
    step_seconds: float,
) -> ObservationDifference | None:
    """Repeats the episode and compares messages, end and sum of the rewards. `info` is not compared."""
    num_turns, stop = recorded.metadata["num_turns"], recorded.metadata["stop"]
    was_cut = stop in _UNANSWERED and recorded.metadata["messages"][-1].get("role") == "assistant"
    num_answered = num_turns - was_cut
    left: list[Message] = recorded.metadata["messages"][len(prompt.messages) :]
    turn, earned = 0, 0.0
    try:
        shown = (await environment.reset(task_of(prompt), seed=seed, episode_id=episode_id)).messages
        while (other := _first_other(left, shown, turn < num_turns)) is None and turn < num_answered:
            action, left = left[len(shown)], left[len(shown) + 1 :]
            deadline, key, turn = time.time() + step_seconds, f"{episode_id}/{turn}", turn + 1
            result = await environment.step(action, deadline=deadline, idempotency_key=key)
            shown, earned = result.messages, earned + result.reward
            ended = "terminated" if result.terminated else "truncated" if result.truncated else "no end"
            expected = stop if turn == num_turns and stop in _ENDS else "no end"
            if ended != expected:
                return ObservationDifference(turn, expected, ended)
        if stop in LIMITS and other is None and num_turns:
            earned += await environment.final_reward()
    except EpisodeError as error:
        return ObservationDifference(turn, "an answer", f"a failure ({error})")
    if other is not None:
        return ObservationDifference(turn, *other)
    if earned != recorded.earned_reward:
        return ObservationDifference(turn, f"a reward of {recorded.earned_reward!r}", f"one of {earned!r}")
    return None


def _first_other(left: Sequence[Message], shown: Sequence[Message], acts: bool) -> tuple[str, str] | None:
    """Where the messages that are shown are not the next ones of those that are left: both in words. If the policy acts
    after them, its message follows, else none.
    """
    for place, message in enumerate(shown):
        if place == len(left) or left[place] != message:
            return _in_words(left[place : place + 1]), _in_words([message])
    after = left[len(shown) :]
    if acts != bool(after) or (acts and after[0].get("role") != "assistant"):
        return _in_words(after[:1]), _in_words([])
    return None


def _in_words(messages: Sequence[Message]) -> str:
    return f"{json.dumps(messages[0]):.{_SHOWN_CHARACTERS}}" if messages else "no further message"
