"""Environments of verifiers up to 0.3 (in 0.3 `verifiers.legacy`): they play their episodes themselves, as agents."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Protocol

from tandem.protos.contracts import JsonObject
from tandem.rollout.environments.adapters.conversions import number, plain
from tandem.rollout.environments.loading import ContractError

_MODEL = "policy"
_KEPT = ("metrics", "stop_condition", "is_truncated")


class PlayedEnvironment(Protocol):
    """What is used of `verifiers.Environment`."""

    async def run_rollout(
        self, input: JsonObject, client: object, model: str, sampling_args: Mapping[str, object]
    ) -> Mapping[str, object]: ...


class VerifiersAgent:
    """Plays an episode of an environment, which the other episodes of the process share."""

    def __init__(self, environment: PlayedEnvironment) -> None:
        self._environment = environment

    async def run(self, data: JsonObject, *, base_url: str, api_key: str) -> JsonObject:
        """The reward of the environment's rubric, and its metrics. Raises ContractError if the row lacks a column of
        the environment's data set, or the episode failed.
        """
        row = row_of(data)
        data_set = getattr(self._environment, "dataset", None)  # None before a function has made it
        if missing := [name for name in getattr(data_set, "column_names", ()) if name not in row]:
            told = f"the row has no {', '.join(missing)}, which the environment's data set has"
            raise ContractError(f"{told}; write the data with examples/prepare_verifiers.py")
        clients, openai = importlib.import_module("verifiers.clients"), importlib.import_module("openai")
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            wrapped = clients.OpenAIChatCompletionsClient(client)
            played = await self._environment.run_rollout(row, wrapped, _MODEL, {})
        if fault := played.get("error"):
            raise ContractError(f"the episode failed: {_told(fault)}")
        return {**plain({name: played.get(name) for name in _KEPT}), "reward": number(played["reward"], "the reward")}


def check_environment(environment: object, path: str) -> None:
    """Raises ContractError if its rubric compares the episodes of a group: each is scored alone."""
    if getattr(environment, "requires_group_rollouts", False):
        raise ContractError(f"{path}: its rubric scores the episodes of a group together, which is not supported")


def row_of(data: JsonObject) -> JsonObject:
    """The row of the environment's data set: `extra_info` with the prompt, and the ground truth as `answer`."""
    return {"answer": data["ground_truth"], "example_id": 0, **data["extra_info"], "prompt": data["prompt"]}


def _told(fault: object) -> str:
    """The text of an error, which verifiers gives as a mapping."""
    if isinstance(fault, Mapping):
        return str(fault.get("error_chain_str") or fault.get("error_chain_repr") or dict(fault))
    return str(fault)
