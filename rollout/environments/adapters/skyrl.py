"""SkyRL-gym's environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Protocol, cast

from tandem.protos.contracts import JsonObject, Message, Observation, StepResult
from tandem.rollout.environments.adapters.conversions import accepted, columns_of, finished, messages_of, number, plain
from tandem.rollout.environments.loading import ContractError


class _SkyRL(Protocol):
    def init(self, prompt: list[Message], /) -> tuple[object, object]: ...
    def step(self, action: str, /) -> object: ...


class SkyRLEnvironment:
    """One episode of an object that `make` returns. It gets the row as `extras`, with the answer as `reward_spec`."""

    def __init__(self, make: Callable[..., object], arguments: Mapping[str, object]) -> None:
        self._make = make
        self._arguments = dict(arguments)
        if isinstance(config := arguments.get("env_config"), Mapping):
            self._arguments["env_config"] = SimpleNamespace(**config)  # its classes read attributes
        self._made: _SkyRL | None = None

    async def reset(self, task: JsonObject, *, seed: int, episode_id: str) -> Observation:
        answer = {"reward_spec": {"method": "rule", "ground_truth": task["ground_truth"]}}
        given = accepted(self._make, {"extras": {**answer, **columns_of(task)}})
        self._made = made = cast("_SkyRL", self._make(**self._arguments, **given))
        prompt = [dict(message) for message in task["prompt"]]
        result = await finished(made.init([dict(message) for message in prompt]))
        if not isinstance(result, tuple) or len(result) != 2:
            raise ContractError(f"init returned {result!r:.80} instead of (prompt, info)")
        messages = messages_of(result[0], "init")
        if messages[: len(prompt)] != prompt:
            raise ContractError("init changed the messages of the prompt; it may only add some")
        return Observation(messages[len(prompt) :])

    async def step(self, action: Message, *, deadline: float, idempotency_key: str) -> StepResult:
        assert self._made is not None, "reset comes before step"
        result = await finished(self._made.step(action["content"]))
        if not isinstance(result, Mapping) or not {"observations", "reward", "done"} <= set(result):
            raise ContractError(f"step returned {result!r:.80}, which lacks observations, reward or done")
        reward, done = number(result["reward"], "the reward of step"), bool(result["done"])
        messages = messages_of(result["observations"], "step")
        return StepResult(messages, reward, terminated=done, info=plain(result.get("metadata")))

    async def close(self) -> None:
        if callable(close := getattr(self._made, "close", None)):
            await finished(close())
