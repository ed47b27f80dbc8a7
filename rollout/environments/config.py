"""Configuration of environments. Loads nothing heavy."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator, model_validator

from tandem.protos.options import Options
from tandem.rollout.environments.tools.parsers import ToolFormat

TOOL_FORMATS = ("auto", *get_args(ToolFormat))
"""Values of `environment.tool_format` besides the names of vLLM's parsers."""
PYTHON = "python"
"""How `environment.tools` names the tool that runs programs."""
TOOL_ENVIRONMENT = "tandem.rollout.environments.tools.environment:ToolEnvironment"


Outcome = Literal["end", "unscored"]


class StopPolicies(Options):
    """`[environment.policies]`: what follows each reason for which a limit ends an episode: "end", it is scored as it
    is; "unscored", it has no reward, and is part neither of the loss nor of its group's baseline. Such rows need
    `reward.min_scored_samples`: without it, their group is given back.
    """

    turns: Outcome = "end"
    """After max_turns."""
    episode_tokens: Outcome = "end"
    """After rollout.max_response_tokens."""
    turn_tokens: Outcome = "end"
    """After max_turn_tokens."""
    context: Outcome = "end"
    """After the longest text of the engine."""
    episode_time: Outcome = "end"
    """After episode_seconds."""
    turn_time: Outcome = "end"
    """After turn_seconds."""
    invalid_calls: Outcome = "end"
    """After max_invalid_calls."""
    parse_error: Literal["observation", "end", "unscored"] = "observation"
    """After a call that could not be read; "observation": the environment answers, as tools do with the error."""
    refused: Literal["observation", "end", "unscored"] = "observation"
    """After a call of an agent that is refused, though no limit is reached, such as one that rewrites its history;
    "observation": the agent reads the error and may go on.
    """
    call_limit: Literal["observation", "end", "unscored"] = "observation"
    """After a call past the tools' max_calls; "observation": the policy reads that it was not executed."""
    tool_timeout: Literal["observation", "end", "unscored"] = "observation"
    """After a tool that did not answer in time; "observation": the policy reads the error."""


class EnvironmentConfig(Options):
    """`[environment]`: with a `path` or `tools`, the policy answers in several turns, between which an environment or
    its tools answer it.
    """

    path: str = ""
    """Class of the environment, as `module.path:Class` or `file.py:Class`: a `tandem.Environment`, a `tandem.Agent`
    (docs/agents.md), or one of another library (docs/environments.md), for which a function that returns environments
    works, too. Empty: one answer a prompt, without an environment.
    """
    arguments: dict[str, object] = Field(default_factory=dict)
    """Keyword arguments of the class or function."""
    tools: tuple[str, ...] = ()
    """Tools that the policy may call, in place of `path`: Python functions as `file.py:function` or
    `module.path:function`, verl's YAML files, the JSON files of MCP servers, and `python`, which runs programs in the
    sandbox (docs/tools.md). `arguments` may set their limits.
    """
    tool_format: str = "auto"
    """How the policy writes calls: `auto`, as the chat template says; `hermes`, `qwen3_coder`, `llama3_json` or
    `pythonic`; or the name of one of vLLM's parsers, such as `vllm:kimi_k2` (docs/tools.md).
    """
    rewritten_history: Literal["keep", "fork"] = "keep"
    """Where the chat template leaves out or changes earlier turns, such as their thoughts: "keep" samples the next turn
    after the tokens as they were sampled; "fork" after what the template renders, as a new segment of the trajectory.
    Calls of an agent that change what was said are refused with "keep", and begin a segment with "fork".
    """
    interpreter: str = ""
    """Path of another Python, at least 3.11, that runs the environments' processes, such as `bin/python` of a virtual
    environment with packages that do not go together with Tandem's (docs/environments.md). Empty: Tandem's own.
    """
    variables: tuple[str, ...] = ()
    """Names of environment variables that its process sees besides the usual ones, such as `PATH` and `HF_HOME`
    (docs/security.md), e.g. the key of an API.
    """
    service: bool = False
    """Run environments in services of their own (`tandem serve environments`), which samplers find in the registry,
    instead of beside each sampler.
    """
    num_replicas: Annotated[int, Field(ge=1)] = 1
    """Environment services that `tandem run` starts with `service`; `tandem scale` changes their number during the run.
    """
    sandbox: bool = False
    """Run environments in the sandbox (docs/sandbox.md): without network, and without the machine's files except
    Python's, the class's folder, those of its tools, and `sandbox_files`. Not for agents, nor for the tool `python`.
    """
    sandbox_files: tuple[str, ...] = ()
    """Files and folders that environments in the sandbox may read, such as the corpus of a search."""
    num_processes: Annotated[int, Field(ge=1)] = 1
    """Processes of each sampler, or of each environment service, that run environments. One that blocks delays the
    others of its process or, past step_seconds, makes them start again.
    """
    max_turns: Annotated[int, Field(ge=1)] = 8
    """Turns of the policy; an episode that has not ended by then is cut off."""
    max_turn_tokens: Annotated[int, Field(ge=0)] = 0
    """Longest turn, in sampled tokens; 0: as many as the episode has left. A turn that reaches it ends the episode.
    rollout.max_response_tokens bounds all tokens after the first prompt, the environment's included.
    """
    step_seconds: Annotated[float, Field(gt=0.0)] = 30.0
    """Longest time for the start of an episode or one step, or for an agent between two answers of the policy."""
    episode_seconds: Annotated[float, Field(ge=0.0)] = 0.0
    """Longest wall time of an attempt at an episode, from its first turn; 0: any. A turn that is being sampled then is
    discarded; a step is not interrupted. An interrupted episode that goes on has the whole time again.
    """
    turn_seconds: Annotated[float, Field(ge=0.0)] = 0.0
    """Longest wall time in which a turn is sampled, with its time in queues and in updates of the weights; 0: any. Past
    it, the turn is discarded and the episode ends.
    """
    max_invalid_calls: Annotated[int, Field(ge=0)] = 0
    """Turns in a row that have calls, none of which can be read and names a tool, after which an episode ends without a
    step; 0: any number. Of an agent, the next call is refused.
    """
    policies: StopPolicies = StopPolicies()
    """What follows each reason for which a limit ends an episode."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """Attempts at an episode whose environment raises, hangs or dies. After that it has no score, if
    reward.min_scored_samples is set; else its group is given back.
    """

    @property
    def run_by(self) -> Literal["rollout", "environments"]:
        """The kind of service that has the environments' processes."""
        return "environments" if self.service else "rollout"

    @field_validator("tool_format")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in TOOL_FORMATS and not re.fullmatch(r"vllm:[\w-]+", value):
            named = f"{', '.join(TOOL_FORMATS)}, or vllm:NAME with the name of one of vLLM's parsers"
            raise ValueError(f"{value!r:.80} is not known; it is {named}")
        return value

    @model_validator(mode="after")
    def _can_be_sandboxed(self) -> EnvironmentConfig:
        if self.sandbox and PYTHON in self.tools:
            raise ValueError("sandbox: the tool python makes sandboxes of its own; leave sandbox out")
        if self.sandbox and self.interpreter:
            raise ValueError("sandbox: only Tandem's own Python is in it; leave sandbox or interpreter out")
        if self.sandbox_files and not self.sandbox:
            raise ValueError("sandbox_files: nothing is in a sandbox without sandbox = true")
        return self

    @property
    def num_services(self) -> int:
        """How many environment services the run starts with; 0 if its samplers run the environments."""
        return self.num_replicas if self.service else 0

    @model_validator(mode="before")
    @classmethod
    def _tools_are_an_environment(cls, values: object) -> object:
        """With `tools`, `path` is the class that calls them."""
        if not isinstance(values, dict) or not isinstance(tools := values.get("tools"), list | tuple) or not tools:
            return values
        arguments = values.get("arguments", {})
        if values.get("path", "") not in ("", TOOL_ENVIRONMENT):
            raise ValueError("path and tools exclude each other; a class names its own tools in `tool_schemas`")
        if not isinstance(arguments, dict):
            return values
        return {**values, "path": TOOL_ENVIRONMENT, "arguments": {**arguments, "tools": list(tools)}}
