"""Configuration of environments. Loads nothing heavy."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tandem.protos.options import Options


class EnvironmentConfig(Options):
    """`[environment]`: with a `path`, the policy answers in several turns, between which an environment answers it."""

    path: str = ""
    """Class of the environment (`tandem.Environment`): `module.path:Class` or `file.py:Class`. Empty: one answer a
    prompt, without an environment.
    """
    arguments: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    variables: tuple[str, ...] = ()
    """Names of environment variables that its process sees besides the usual ones, such as `PATH` and `HF_HOME`
    (docs/security.md), e.g. the key of an API.
    """
    num_processes: Annotated[int, Field(ge=1)] = 1
    """Processes of each sampler that run environments. One that blocks delays the others
    of its process or, past step_seconds, makes them start again.
    """
    max_turns: Annotated[int, Field(ge=1)] = 8
    """Turns of the policy; an episode that has not ended by then is cut off."""
    max_turn_tokens: Annotated[int, Field(ge=0)] = 0
    """Longest turn, in sampled tokens; 0: as many as the episode has left. A turn that reaches it ends the episode.
    rollout.max_response_tokens bounds all tokens after the first prompt, the environment's included.
    """
    step_seconds: Annotated[float, Field(gt=0.0)] = 30.0
    """Longest time for the start of an episode or one step."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Attempts at an episode whose environment raises, hangs or dies; after that its group is given back."""
