"""Environments of verifiers since 0.4: a set of tasks, and the agents that do them.

They render the conversation themselves and ask for tokens after tokens, as from vLLM's `/inference/v1/generate`. Their
programs reach the policy through a server of verifiers on this machine, which adds nothing to the tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol

from pydantic import BaseModel, ValidationError

from tandem.protos.contracts import JsonObject
from tandem.rollout.environments.adapters.conversions import number, plain
from tandem.rollout.environments.loading import ContractError

_MODEL = "policy"
_NO_KEY = "TANDEM_HAS_NO_SUCH_VARIABLE"  # the key is in a header, because it differs between the episodes of a process


class _Trace(Protocol):
    reward: float
    metrics: Mapping[str, object]
    stop_condition: str | None
    errors: Sequence[object]


class _Episode(Protocol):
    ok: bool
    errors: Sequence[object]
    traces: Sequence[_Trace]


class _TaskKind(Protocol):
    def data_type(self) -> type[BaseModel]: ...
    def __call__(self, data: BaseModel, config: object, /) -> object: ...


class _TasksetConfig(Protocol):
    task: object


class _Taskset(Protocol):
    config: _TasksetConfig

    def task_type(self) -> _TaskKind: ...


class TaskEnvironment(Protocol):
    """What is used of `verifiers.v1.Env`."""

    taskset: _Taskset

    def serving(self) -> AbstractAsyncContextManager[None]: ...
    async def run_episode(self, task: object, ctx: object) -> _Episode: ...


class TaskAgent:
    """Plays an episode of an environment that `make` returns. `renderer` is one of the package `renderers`, by name
    and options; None: the one for the model's name.
    """

    def __init__(self, make: Callable[[], TaskEnvironment], renderer: object) -> None:
        self._make = make
        self._renderer = renderer

    async def run(self, data: JsonObject, *, base_url: str, api_key: str) -> JsonObject:
        """The reward of the task, and its metrics. Raises ContractError if the row is none of its tasks, or the episode
        failed.
        """
        environment = self._make()
        task = _task_of(environment, data["extra_info"])
        openai, verifiers = importlib.import_module("openai"), importlib.import_module("verifiers.v1")
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as asked:
            (model,) = (await asked.models.list()).data
        client = verifiers.TrainClientConfig(
            base_url=base_url,
            api_key_var=_NO_KEY,
            headers={"Authorization": f"Bearer {api_key}"},
            renderer=self._renderer,
            renderer_model_name=model.root,
        )
        async with environment.serving():
            episode = await environment.run_episode(task, verifiers.ModelContext(model=_MODEL, client=client))
        return _result(episode)


def is_loader(make: Callable[..., object]) -> bool:
    """Whether this is `verifiers.v1:load_environment`, which takes a configuration in place of arguments."""
    return make.__module__ == "verifiers.v1.utils.loaders"


def configured(make: Callable[..., object], arguments: Mapping[str, object]) -> Callable[[], object]:
    """Makes the environment of `verifiers.v1:load_environment`, whose configuration has `arguments` as its keys.

    Raises ContractError if it has no such keys or values.
    """
    loaders = importlib.import_module(make.__module__)
    try:
        return partial(make, loaders.resolve_env_config(dict(arguments)))
    except ValidationError as error:
        raise ContractError("; ".join(_faults(error, "arguments"))) from None


def _task_of(environment: TaskEnvironment, columns: JsonObject) -> object:
    """The row as a task, as verifiers' own server makes it of what it is sent."""
    kind = environment.taskset.task_type()
    try:
        task_data = kind.data_type().model_validate(columns)
    except ValidationError as error:
        told = f"the row is none of the environment's tasks: {'; '.join(_faults(error, 'extra_info'))}"
        raise ContractError(f"{told}; write the data with examples/prepare_verifiers.py") from None
    return kind(task_data, environment.taskset.config.task)


def _result(episode: _Episode) -> JsonObject:
    if not episode.ok:
        faults = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise ContractError(f"the episode failed: {_told(faults[-1]) if faults else 'no reason is given'}")
    if len(episode.traces) != 1:
        raise ContractError(f"the environment ran {len(episode.traces)} agents in an episode; one is supported")
    (trace,) = episode.traces
    found = {"metrics": dict(trace.metrics), "stop_condition": trace.stop_condition}
    return {**plain(found), "reward": number(trace.reward, "the reward")}


def _told(fault: object) -> str:
    return f"{getattr(fault, 'type', type(fault).__name__)}: {getattr(fault, 'message', fault)}"


def _faults(error: ValidationError, place: str) -> list[str]:
    return [f"{'.'.join([place, *map(str, one['loc'])])}: {one['msg']}" for one in error.errors()]
