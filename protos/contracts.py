"""Contracts of plug-ins, and the values they take and return: scores and an environment's observations. The contract
of scorer classes is in `tandem.reward.contracts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, TypeVar

# Not in types.py, because scoring processes and clients do not load numpy, which starts threads.
UnscoredReason = Literal["timeout", "crashed", "infrastructure", "invalid_input", "limit"]

FAULT = "fault/"
"""Prefix of a component of the breakdown: the answer got the worst score because it made its scorer fail. The reason
follows: `fault/timeout`.
"""


def is_fault(component: str) -> bool:
    """Whether a component of the breakdown, also of a part of a rubric, says that its answer made a scorer fail."""
    return f"/{FAULT}" in f"/{component}"


class ScoreItem(NamedTuple):
    """One answer to score, with verl's field names. A tuple, because a service creates about 100,000 per second."""

    data_source: str
    solution: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = MappingProxyType({})
    group: str = ""
    """Group-relative scorers compare the items of a call with the same group. Empty: not compared with other items."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A reward and its components."""

    value: float
    breakdown: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unscored:
    """The reason why an item has no reward. A failure is never turned into a number."""

    reason: UnscoredReason
    detail: str = ""


Score = Scored | Unscored


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a scorer. `default` is JSON text, or "" for a required parameter."""

    name: str
    type: str
    default: str
    description: str


@dataclass(frozen=True, slots=True)
class ScorerInfo:
    """Description of one scorer of a reward service."""

    name: str
    version: str
    summary: str
    parameters: tuple[Parameter, ...]
    isolation: str
    """Where the scorer runs: one of `tandem.reward.contracts.Isolation`."""


Resume = Literal["restart", "replay", "snapshot"]
"""How an episode goes on after its environment's process, or its sampler, has died: from its start, by the same actions
once more, or from the snapshot after its last step.
"""

MAX_SNAPSHOT_BYTES = 32 << 10
"""Largest snapshot of an environment, which is stored for every unfinished episode."""

JsonObject = Mapping[str, Any]
Message = JsonObject
"""A chat message: `role`, `content` and any other key that the chat template reads."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment shows the policy at the start of an episode."""

    messages: Sequence[Message]
    info: Mapping[str, Any] = field(default_factory=dict)


class ToolOutcome(TypedDict):
    """How a call of a tool ended. A dictionary, because it crosses processes as JSON."""

    tool: str
    outcome: str
    """`result`, or the name of a failure (docs/tools.md)."""
    seconds: float | None
    """How long the call took. None: it was not executed."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one action led to."""

    messages: Sequence[Message]
    """The environment's answer; empty if the episode has ended."""
    reward: float = 0.0
    """Earned by this action, not since the start of the episode."""
    terminated: bool = False
    """The episode reached an end state."""
    truncated: bool = False
    """The episode was cut off, e.g. by a limit on its turns."""
    info: Mapping[str, Any] = field(default_factory=dict)
    tool_outcomes: Sequence[ToolOutcome] = ()
    """Of the calls of `action["tool_calls"]`. Only the metrics show them."""


class Environment(Protocol):
    """An environment that a policy acts in for several turns. Each episode has an object of its own.

    The methods run in the event loop of a process that has the environments of several episodes, so they may not block
    it (docs/environments.md). A class attribute `resume` says how an interrupted episode goes on (`Resume`); without it
    the episode starts again. With an attribute `tool_schemas`, a list of tools in OpenAI's form, the chat template
    shows them to the policy, and actions have its calls as `tool_calls` (docs/tools.md). Turns that call a tool named
    in an attribute `unsafe_tools` are never repeated. A method `async def final_reward(self) -> float`, if there is
    one, is called before `close` where a limit, and not `step`, ends the episode: the last turn earns that, too.
    """

    async def reset(self, task: Mapping[str, Any], *, seed: int, episode_id: str) -> Observation:
        """Starts an episode of a task. The same task and seed lead to the same episode."""
        ...

    async def step(self, action: Message, *, deadline: float, idempotency_key: str) -> StepResult:
        """Applies the policy's message to the environment.

        Args:
            deadline: Unix time in seconds by which the result must be there.
            idempotency_key: names this step with this action, also in a later attempt at the episode; the environment's
                server may use it to carry out a request once that it gets twice.
        """
        ...

    async def close(self) -> None:
        """Frees what the environment holds, also in the middle of an episode. A second call does nothing."""
        ...


class SnapshotEnvironment(Environment, Protocol):
    """An environment whose episode can go on in another object of its class, e.g. after the death of its process."""

    async def snapshot(self) -> bytes:
        """The state of the episode between two steps, at most `MAX_SNAPSHOT_BYTES`."""
        ...

    async def restore(self, state: bytes) -> None:
        """Continues the episode of a snapshot. Called once, in place of `reset`, on an object of the same class and
        arguments.
        """
        ...


class Agent(Protocol):
    """A program that calls the policy by OpenAI's API. Each episode has an object of its own.

    `run` runs in the event loop of a process that has the agents of several episodes, so it may not block it
    (docs/agents.md). A method `async def close(self)`, if there is one, is called after it, also if it was cancelled.
    """

    async def run(self, data: JsonObject, *, base_url: str, api_key: str) -> float | JsonObject:
        """Does the task `data`, a row of the data set, with the policy at `base_url`.

        Returns the reward, or a mapping with `reward` and anything else, which becomes the episode's `info`.
        """
        ...


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What a run of an agent returned, or with an `error` what it raised."""

    reward: float = 0.0
    info: JsonObject = field(default_factory=dict)
    error: str = ""


ToolEffect = Literal["pure", "idempotent", "unsafe"]
"""What a call changes outside of the episode: nothing; the same as another call with its idempotency key; or something
that a second call changes again.
"""

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., object])


def parallel_tool(function: AnyFunction) -> AnyFunction:
    """Declares that calls of this tool may run at the same time as other calls of their turn."""
    function.parallel = True  # type: ignore[attr-defined]
    return function


def tool_effect(effect: ToolEffect) -> Callable[[AnyFunction], AnyFunction]:
    """Declares what a call of this tool changes. A tool that declares nothing is taken to be idempotent."""

    def declare(function: AnyFunction) -> AnyFunction:
        function.effect = effect  # type: ignore[attr-defined]
        return function

    return declare
