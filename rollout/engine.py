"""Sampling engines by name. An engine is a folder `rollout/<name>/` whose `engine.py` holds `ENGINE`.

Nothing here, nor in those modules, loads torch or an engine's library: preflight and placement ask them before a run.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import psutil

from tandem.protos.contracts import JsonObject
from tandem.protos.errors import EnvironmentLackError, ModelError
from tandem.protos.store_source import StoreSource
from tandem.rollout.config import RolloutConfig, engine_names
from tandem.rollout.environments.tools.parsers import ParsedTurn, TurnPiece
from tandem.rollout.sampler import Sampler


@dataclass(frozen=True, slots=True)
class SamplerArguments:
    config: RolloutConfig
    model_path: str
    dtype: Literal["float32", "bfloat16"]
    max_model_tokens: int
    """Maximum length of prompt plus answer."""
    seed: int
    shares_gpu: bool = False
    """The trainer uses the same GPU, so the KV cache takes only `config.kv_cache_bytes`."""
    rows_per_group: int = 0
    """Trajectories of a group that are sampled at the same time. 0: `config.samples_per_prompt`."""
    group_store: StoreSource | None = None
    """Where weight groups meet; None: the sampler joins none."""

    @property
    def max_rows(self) -> int:
        """Maximum number of trajectories that the service requests at once."""
        return self.config.max_groups_in_flight * (self.rows_per_group or self.config.samples_per_prompt)


class Engine(ABC):
    """Interface of an engine that works without loading the engine's library."""

    name: ClassVar[str]
    library: ClassVar[str]
    """Import name of the engine's package."""
    install: ClassVar[str]
    """The command that installs it."""

    @abstractmethod
    def known_architectures(self) -> frozenset[str]:
        """Architecture names (`config.json`) of the causal language models it supports; empty if unknown."""

    @abstractmethod
    async def start(self, arguments: SamplerArguments) -> Sampler:
        """Loads the model; call it from the main thread, before threads or gRPC exist.

        Raises ModelError for a bad model folder, EnvironmentLackError if memory is short or the engine does not start.
        """

    def check(self, config: RolloutConfig) -> None:
        """Raises EnvironmentLackError if the library is not installed, ConfigError for an unsupported setting."""
        if not self.installed:
            others = [name for name in engine_names() if name != self.name and find_engine(name).installed]
            instead = f', or set rollout.engine="{others[0]}"' if others else ""
            raise EnvironmentLackError(
                f'rollout.engine="{self.name}": {self.library} is not installed; install it: {self.install}{instead}'
            )

    def core_environment(self, cores: Sequence[int]) -> Mapping[str, str]:
        """Returns environment variables that pin each worker to one of these cores. Empty: the engine does it."""
        return {}

    def remove_leftovers(self) -> None:  # noqa: B027 (most engines leave nothing)
        """Removes files that killed samplers of any run left on this machine. Live samplers keep theirs."""

    def tool_parser(
        self, name: str, tokenizer: object, schemas: Sequence[JsonObject]
    ) -> Callable[[Sequence[TurnPiece], frozenset[str]], ParsedTurn]:
        """A parser of tool calls of its library, with pieces and vocabulary as of `parse_turn`.

        Raises ModelError if there is none of that name for the model, EnvironmentLackError without the library.
        """
        raise ModelError(f'environment.tool_format "{self.name}:{name}": {self.name} has no parsers of tool calls')

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.library) is not None


def find_engine(name: str) -> Engine:
    """Returns the engine of that name, one of `engine_names()`."""
    engine: Engine = importlib.import_module(f"tandem.rollout.{name}.engine").ENGINE
    return engine


def usable_engine() -> str:
    """Returns the default engine of recipes or, if its library is not installed, the first engine whose library is."""
    preferred = RolloutConfig().engine
    return next((name for name in (preferred, *engine_names()) if find_engine(name).installed), preferred)


def remove_leftovers() -> None:
    """Removes files that killed samplers of all engines left on this machine. Live samplers keep theirs."""
    for name in engine_names():
        find_engine(name).remove_leftovers()


def class_names_in(package: str, file: str, variable: str) -> frozenset[str]:
    """Returns the class names in a constant in the source of an installed package; empty if there is no such constant.

    Reading the source takes at most 0.1 s. Importing the package would delay every `tandem run` by seconds
    (`model_check_seconds` of benchmarks/startup.py).
    """
    spec = importlib.util.find_spec(package)
    source = Path(((spec and spec.submodule_search_locations) or [""])[0]) / file
    if not source.is_file():
        return frozenset()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == variable for target in targets):
            texts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            return frozenset(text for text in texts if isinstance(text, str) and text[:1].isupper())
    return frozenset()


def check_model_folder(arguments: SamplerArguments) -> None:
    """Raises ModelError if the model's path is a missing folder."""
    path = arguments.model_path
    if not Path(path).is_dir() and (Path(path).is_absolute() or path.startswith((".", "~"))):
        raise ModelError(f"model folder {path} does not exist; set model.path to a Hugging Face folder")


def check_cache(arguments: SamplerArguments, bytes_per_sequence: int) -> None:
    """Raises EnvironmentLackError unless one sequence of `max_model_tokens` fits `rollout.kv_cache_bytes`."""
    if bytes_per_sequence > arguments.config.kv_cache_bytes:
        raise EnvironmentLackError(
            f"rollout.kv_cache_bytes={arguments.config.kv_cache_bytes} holds no whole sequence: "
            f"{arguments.max_model_tokens} tokens take {bytes_per_sequence} bytes; "
            "raise it, or lower data.max_prompt_tokens or rollout.max_response_tokens"
        )


def check_memory(arguments: SamplerArguments, engine_bytes: int) -> None:
    """Raises EnvironmentLackError unless weights, one staged version, KV cache and `engine_bytes` fit free memory."""
    weights = sum(file.stat().st_size for file in Path(arguments.model_path).glob("*.safetensors"))
    needed = 2 * weights + arguments.config.kv_cache_bytes + engine_bytes
    free = psutil.virtual_memory().available
    if needed > free:
        raise EnvironmentLackError(
            f"the engine for {arguments.model_path} needs about {needed / 1e9:.1f} GB of memory and "
            f"{free / 1e9:.1f} GB are free; lower rollout.kv_cache_bytes or rollout.num_replicas, or end other programs"
        )


def one_line(error: BaseException) -> str:
    """Returns the informative line of an exception's text, which pydantic wraps into several lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("Value error, ")] or lines or [type(error).__name__]
    return telling[0].removeprefix("Value error, ").partition(" [type=")[0][:300]
