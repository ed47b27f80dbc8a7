"""A recorded episode is repeated on its environment, and the first thing that differs is named."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tandem import Observation, StepResult
from tandem.protos.errors import EpisodeError
from tandem.protos.types import Prompt, SamplingParameters, Trajectory
from tandem.rollout.environments.repetition import first_other_observation
from tandem.rollout.segments import unsampled

SYSTEM = {"role": "system", "content": "play"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


class Counts:
    """Shows the seed, then how often the policy acted. Ends when it says "end"; fails when it says "fail"."""

    def __init__(self) -> None:
        self.num_steps = 0

    async def reset(self, task: Mapping[str, Any], *, seed: int, episode_id: str) -> Observation:
        return Observation([user(f"seed {seed}"), user(str(task["ground_truth"]))])

    async def step(self, action: Mapping[str, Any], *, deadline: float, idempotency_key: str) -> StepResult:
        self.num_steps += 1
        assert idempotency_key == f"0-7/0/x/{self.num_steps - 1}"
        match action["content"]:
            case "end":
                return StepResult([], reward=0.5, terminated=True)
            case "fail":
                raise EpisodeError("it is away")
        return StepResult([user(f"step {self.num_steps}")], reward=0.25)

    async def final_reward(self) -> float:
        return 2.0

    async def close(self) -> None: ...


EPISODE = [user("seed 3"), user("42"), says("a"), user("step 1"), says("b"), user("step 2"), says("end")]


def repeated(messages: list[dict[str, str]], stop: str = "terminated", earned: float = 1.0) -> str:
    """The difference to a recorded episode in words; "None" if there is none."""
    prompt = Prompt(0, 7, np.zeros(1, np.int32), 1, SamplingParameters(), ground_truth=42, messages=(SYSTEM,))
    num_turns = sum(message["role"] == "assistant" for message in messages)
    metadata = {"messages": [SYSTEM, *messages], "num_turns": num_turns, "stop": stop}
    recorded = Trajectory(
        *(0, "policy", (unsampled(prompt.token_ids),), "stop", "", SamplingParameters()),
        earned_reward=earned,
        metadata=metadata,
    )
    found = first_other_observation(Counts(), prompt, recorded, seed=3, episode_id="0-7/0/x", step_seconds=5.0)
    return str(asyncio.run(found))


@pytest.mark.parametrize(
    ("messages", "stop", "earned"),
    [
        (EPISODE, "terminated", 1.0),
        (EPISODE[:6], "turns", 2.5),
        (EPISODE[:5], "length", 0.25),
        (EPISODE[:6], "length", 0.5),
        ([*EPISODE[:2], says("end")], "length", 0.0),
    ],
    ids=["terminated", "turns", "length", "length after an answer", "length in the first turn"],
)
def test_an_episode_that_repeats_itself_does_not_differ(
    messages: list[dict[str, str]], stop: str, earned: float
) -> None:
    assert repeated(messages, stop, earned) == "None"


def test_another_message_of_reset_is_named() -> None:
    told = 'observation of reset: {"role": "user", "content": "43"} was recorded, '
    assert repeated([EPISODE[0], user("43"), *EPISODE[2:]]).startswith(told)


def test_another_message_after_a_turn_is_named_with_both_values() -> None:
    assert repeated([*EPISODE[:5], user("step 9"), says("end")]) == (
        'observation after turn 1: {"role": "user", "content": "step 9"} was recorded, '
        '{"role": "user", "content": "step 2"} was repeated'
    )


def test_a_message_that_is_recorded_and_not_shown_is_named() -> None:
    told = repeated([*EPISODE[:4], user("more"), *EPISODE[4:]])
    assert told == (
        'observation after turn 0: {"role": "user", "content": "more"} was recorded, no further message was repeated'
    )


def test_a_message_that_is_shown_and_not_recorded_is_named() -> None:
    assert repeated(EPISODE[:3], "turns").startswith("observation after turn 0: no further message was recorded")


def test_another_end_reward_and_a_failure_are_named() -> None:
    assert repeated(EPISODE, "truncated") == (
        "observation after turn 2: truncated was recorded, terminated was repeated"
    )
    assert repeated([*EPISODE[:2], says("end"), says("b")], "turns") == (
        "observation after turn 0: no end was recorded, terminated was repeated"
    )
    assert repeated(EPISODE, earned=2.0) == (
        "observation after turn 2: a reward of 2.0 was recorded, one of 1.0 was repeated"
    )
    assert repeated([*EPISODE[:2], says("fail")], "turns") == (
        "observation after turn 0: an answer was recorded, a failure (it is away) was repeated"
    )
